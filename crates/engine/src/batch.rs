//! Batches, the unit of work of the pipeline, and their pool.
//!
//! A batch is up to one packet of pages of one RAM block: the list of pages, and the content of those that are not
//! zero, one after the other. An entry of the pipeline takes a batch from the pool and fills it, each stage passes it
//! to the next, and the batch returns to the pool when the last stage drops it. Pool and buffers are made at the start:
//! nothing is allocated per batch.

use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Condvar, Mutex};

use sterna_memory::PAGE_SIZE;
use sterna_wire::limits::MAX_RUNS;
use sterna_wire::packet::{Run, RunKind};

use crate::window::WindowClosed;

/// Pages of a region of this many bytes travel on one channel, in order.
pub const REGION: u64 = 2 << 20;

/// A buffer for content that begins with a page. The allocator would place it 16 bytes behind the beginning of one, and there memcpy from
/// guest memory that is in no cache was 2.6 times slower (8.4 GB/s for 22; Zen 4), a snapshot in the cache an eighth.
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    bytes: Box<[u8]>,
    place: Range<usize>,
}

impl AlignedBuffer {
    pub(crate) fn new(capacity: usize) -> Self {
        if capacity == 0 {
            return Self { bytes: Box::default(), place: 0..0 };
        }
        // Zeroed memory of this size comes from the kernel untouched: a buffer costs memory when it is first used.
        let bytes = vec![0; capacity + PAGE_SIZE - 1].into_boxed_slice();
        let start = bytes.as_ptr().align_offset(PAGE_SIZE);
        Self { bytes, place: start..start + capacity }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.place.clone()]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.place.clone()]
    }
}

/// Pages of one RAM block in the pipeline.
#[derive(Debug)]
pub struct Batch {
    /// The index of the RAM block.
    pub block: u16,
    runs: Vec<Run>,
    content: AlignedBuffer,
    filled: usize,
    in_window: u64,
    checksum: Option<u32>,
}

impl Batch {
    /// Makes an empty batch with room for `capacity` bytes of content.
    pub(crate) fn new(capacity: usize) -> Self {
        let content = AlignedBuffer::new(capacity);
        Self { block: 0, runs: Vec::with_capacity(256), content, filled: 0, in_window: 0, checksum: None }
    }

    /// Returns the pages, ascending.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the content of the normal pages, in the order of the runs.
    pub fn content(&self) -> &[u8] {
        &self.content[..self.filled]
    }

    /// Returns the bytes that this batch holds in the window.
    pub fn in_window(&self) -> u64 {
        self.in_window
    }

    /// Returns the number of all pages, zero or not.
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.count)).sum()
    }

    /// Sets how many bytes of the window this batch holds.
    pub fn set_in_window(&mut self, bytes: u64) {
        self.in_window = bytes;
    }

    /// Returns the CRC-32C of the content, where it was computed when the batch was filled.
    pub fn checksum(&self) -> Option<u32> {
        self.checksum
    }

    /// Sets the CRC-32C of the whole content.
    pub fn set_checksum(&mut self, checksum: u32) {
        self.checksum = Some(checksum);
    }

    /// Returns whether the batch has no pages.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the maximum bytes of content.
    pub fn capacity(&self) -> usize {
        self.content.len()
    }

    /// Returns whether pages from `first` on, with `content` bytes, can be added: pages ascend in a batch, and its
    /// table has a limit.
    pub fn takes(&self, first: u64, content: usize) -> bool {
        self.runs.len() < MAX_RUNS
            && self.filled + content <= self.content.len()
            && self.runs.last().is_none_or(|last| last.end() <= first)
    }

    /// Adds zero pages. The caller has checked [`Batch::takes`].
    pub fn push_zero(&mut self, first: u64, count: u32) {
        self.push_run(RunKind::Zero, first, count);
    }

    /// Adds normal pages and returns the buffer for their content, `length` bytes. The caller has checked
    /// [`Batch::takes`].
    pub fn push_normal(&mut self, first: u64, count: u32, length: usize) -> &mut [u8] {
        self.push_run(RunKind::Normal, first, count);
        let start = self.filled;
        self.filled += length;
        &mut self.content[start..start + length]
    }

    /// Returns the buffer for the content of all pages that were added so far.
    pub fn content_mut(&mut self) -> &mut [u8] {
        &mut self.content[..self.filled]
    }

    /// Returns the free part of the buffer.
    pub fn spare_mut(&mut self) -> &mut [u8] {
        &mut self.content[self.filled..]
    }

    fn push_run(&mut self, kind: RunKind, first: u64, count: u32) {
        debug_assert!(self.takes(first, 0));
        if let Some(last) = self.runs.last_mut()
            && last.kind == kind
            && last.end() == first
            && last.count + count <= Run::MAX_COUNT
        {
            last.count += count;
            return;
        }
        self.runs.push(Run { kind, first, count });
    }

    /// Empties the batch.
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
        self.filled = 0;
        self.in_window = 0;
        self.checksum = None;
    }
}

#[derive(Debug, Default)]
struct Free {
    batches: Vec<Batch>,
    closed: bool,
    /// Number of threads that wait for a batch: a wake costs a system call even if no thread waits.
    waiting: u32,
}

/// The batches of one migration.
#[derive(Debug)]
pub struct BatchPool {
    capacity: usize,
    free: Mutex<Free>,
    returned: Condvar,
}

impl BatchPool {
    /// Makes a pool of `count` batches with `capacity` bytes of content each.
    pub fn new(count: usize, capacity: usize) -> Arc<Self> {
        let batches = (0..count).map(|_| Batch::new(capacity)).collect();
        Arc::new(Self {
            capacity,
            free: Mutex::new(Free { batches, closed: false, waiting: 0 }),
            returned: Condvar::new(),
        })
    }

    /// Returns the maximum bytes of content in a batch.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Waits for a free batch, and returns it empty, for `block`.
    pub fn take(self: &Arc<Self>, block: u16) -> Result<PooledBatch, WindowClosed> {
        let mut free = self.free.lock().expect("no holder of the pool panics");
        loop {
            if free.closed {
                return Err(WindowClosed);
            }
            if let Some(mut batch) = free.batches.pop() {
                batch.clear();
                batch.block = block;
                return Ok(PooledBatch { batch: Some(batch), pool: Arc::clone(self) });
            }
            free.waiting += 1;
            free = self.returned.wait(free).expect("no holder of the pool panics");
            free.waiting -= 1;
        }
    }

    /// Closes the pool: waiting and later calls of [`BatchPool::take`] fail.
    pub fn close(&self) {
        self.free.lock().expect("no holder of the pool panics").closed = true;
        self.returned.notify_all();
    }
}

/// A batch that returns to its pool when dropped.
#[derive(Debug)]
pub struct PooledBatch {
    batch: Option<Batch>,
    pool: Arc<BatchPool>,
}

impl Deref for PooledBatch {
    type Target = Batch;

    fn deref(&self) -> &Batch {
        self.batch.as_ref().expect("only drop takes the batch out")
    }
}

impl DerefMut for PooledBatch {
    fn deref_mut(&mut self) -> &mut Batch {
        self.batch.as_mut().expect("only drop takes the batch out")
    }
}

impl Drop for PooledBatch {
    fn drop(&mut self) {
        if let Some(batch) = self.batch.take() {
            let mut free = self.pool.free.lock().expect("no holder of the pool panics");
            free.batches.push(batch);
            let waiting = free.waiting;
            drop(free);
            if waiting > 0 {
                self.pool.returned.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pages_of_a_kind_become_one_run() {
        let pool = BatchPool::new(1, 16 << 10);
        let mut batch = pool.take(3).unwrap();
        batch.push_normal(5, 1, 4096).fill(1);
        batch.push_normal(6, 1, 4096).fill(2);
        batch.push_zero(7, 2);
        batch.push_normal(100, 1, 4096).fill(3);

        assert_eq!(batch.block, 3);
        let run = |kind, first, count| Run { kind, first, count };
        let expected = [run(RunKind::Normal, 5, 2), run(RunKind::Zero, 7, 2), run(RunKind::Normal, 100, 1)];
        assert_eq!(batch.runs(), expected);
        assert_eq!((batch.content().len(), batch.content()[8192]), (12288, 3));
    }

    #[test]
    fn content_begins_at_a_page_and_has_exactly_the_requested_room() {
        for capacity in [0, 1, 4095, 4096, 4097, 512 << 10] {
            let mut batch = Batch::new(capacity);
            assert_eq!((batch.capacity(), batch.spare_mut().len()), (capacity, capacity));
            if capacity > 0 {
                assert!(batch.spare_mut().as_ptr().addr().is_multiple_of(PAGE_SIZE), "{capacity} bytes");
                batch.push_normal(0, 1, capacity).fill(7);
                assert_eq!(batch.content().iter().filter(|byte| **byte == 7).count(), capacity);
            }
        }
    }

    #[test]
    fn pages_that_do_not_ascend_or_do_not_fit_are_refused() {
        let pool = BatchPool::new(1, 8192);
        let mut batch = pool.take(0).unwrap();
        batch.push_normal(5, 1, 4096);
        assert!(batch.takes(6, 4096));
        assert!(!batch.takes(5, 0));
        assert!(!batch.takes(6, 8192));
    }

    #[test]
    fn a_returned_batch_is_empty_and_wakes_a_waiting_thread() {
        let pool = BatchPool::new(1, 4096);
        let mut batch = pool.take(0).unwrap();
        batch.push_zero(1, 1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.take(1).map(|batch| batch.is_empty()));
            drop(batch);
            assert_eq!(waiting.join().unwrap(), Ok(true));
        });
        pool.close();
        assert!(pool.take(0).is_err());
    }
}
