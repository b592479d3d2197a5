//! Buffers for batches, set up once and used over and over.
//!
//! A pool is one anonymous mapping cut into equal, page-aligned buffers. Its size bounds the memory of what is in flight:
//! who finds it empty waits. A buffer is memory-backed only once it has been used, and the most recently returned one is
//! handed out first, because it is the one in the cache. Taking and returning allocate nothing.

use crate::PAGE_SIZE;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// Why there is no pool.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The sizes make no pool.
    #[error(
        "a pool of {count} buffers of {size} bytes is not possible: both must be at least 1 and fit the address space together"
    )]
    Size {
        /// Buffers asked for.
        count: usize,
        /// Bytes asked for in each.
        size: usize,
    },
    /// The system refused the memory.
    #[error(
        "cannot reserve {bytes} bytes for a pool of {count} buffers: {source}; use smaller packets or fewer channels"
    )]
    Reserve {
        /// Buffers asked for.
        count: usize,
        /// Bytes in all.
        bytes: usize,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// A fixed number of equal buffers. Clones are handles to the same pool.
#[derive(Clone)]
pub struct BufferPool(Arc<Shared>);

struct Shared {
    mapping: NonNull<u8>,
    mapping_len: usize,
    buffer_len: usize,
    count: usize,
    /// Indices of the buffers nobody holds; its capacity is `count` from the start.
    free: Mutex<Vec<usize>>,
    returned: Condvar,
}

// SAFETY: the mapping is plain memory that any thread may use; a part of it is accessed only through the one
// `PooledBuffer` that holds its index, and indices are given out under the mutex, each to one holder at a time.
unsafe impl Send for Shared {}
// SAFETY: as above; through `&Shared` only the mutex, the condition variable and constants are reached.
unsafe impl Sync for Shared {}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        // The list is whole at every point where a panic could leave the lock: a poisoned one is as good.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length in `new`; every buffer holds an Arc of this, so none is left.
        // Unmapping a range that is mapped cannot fail.
        let _ = unsafe { munmap(self.mapping.as_ptr().cast(), self.mapping_len) };
    }
}

impl BufferPool {
    /// `count` buffers of at least `size` bytes each (rounded up to whole pages), all zero.
    pub fn new(count: usize, size: usize) -> Result<Self, PoolError> {
        let buffer_len = size.checked_next_multiple_of(PAGE_SIZE);
        let mapping_len =
            buffer_len.and_then(|len| len.checked_mul(count)).filter(|len| (1..=isize::MAX as usize).contains(len));
        let (Some(buffer_len), Some(mapping_len)) = (buffer_len, mapping_len) else {
            return Err(PoolError::Size { count, size });
        };
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nothing.
        let mapping = unsafe {
            mmap_anonymous(std::ptr::null_mut(), mapping_len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(|error| PoolError::Reserve { count, bytes: mapping_len, source: error.into() })?;
        let mapping = NonNull::new(mapping.cast()).expect("a mapping is never at address 0");
        Ok(Self(Arc::new(Shared {
            mapping,
            mapping_len,
            buffer_len,
            count,
            free: Mutex::new((0..count).rev().collect()),
            returned: Condvar::new(),
        })))
    }

    /// Takes a buffer, waiting until one is free. It holds whatever its last user left in it.
    pub fn take(&self) -> PooledBuffer {
        let mut free = self.0.free();
        loop {
            if let Some(index) = free.pop() {
                return self.hand_out(index);
            }
            free = self.0.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes a buffer if one is free now.
    pub fn try_take(&self) -> Option<PooledBuffer> {
        let index = self.0.free().pop()?;
        Some(self.hand_out(index))
    }

    /// The number of buffers, taken or not.
    pub fn count(&self) -> usize {
        self.0.count
    }

    /// The length of each buffer in bytes, a multiple of the page size.
    pub fn buffer_len(&self) -> usize {
        self.0.buffer_len
    }

    /// How many buffers are free at this moment.
    pub fn available(&self) -> usize {
        self.0.free().len()
    }

    fn hand_out(&self, index: usize) -> PooledBuffer {
        PooledBuffer { shared: Arc::clone(&self.0), index }
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("count", &self.count())
            .field("buffer_len", &self.buffer_len())
            .field("available", &self.available())
            .finish()
    }
}

/// A buffer that goes back to its pool when dropped. It keeps the pool's memory alive.
pub struct PooledBuffer {
    shared: Arc<Shared>,
    index: usize,
}

impl PooledBuffer {
    fn start(&self) -> *mut u8 {
        // SAFETY: index < count, so the offset is within the mapping.
        unsafe { self.shared.mapping.as_ptr().add(self.index * self.shared.buffer_len) }
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this handle alone holds the index, the part is mapped as long as `shared` lives, and mapped anonymous
        // memory is initialised.
        unsafe { std::slice::from_raw_parts(self.start(), self.shared.buffer_len) }
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.shared.buffer_len) }
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        self.shared.free().push(self.index);
        self.shared.returned.notify_one();
    }
}

impl fmt::Debug for PooledBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledBuffer").field("index", &self.index).field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn buffers_are_aligned_apart_and_as_many_as_asked_for() {
        let pool = BufferPool::new(5, 10_000).unwrap();
        let mut taken: Vec<_> = (0..5).map(|_| pool.try_take().unwrap()).collect();
        assert!(pool.try_take().is_none());
        for (number, buffer) in taken.iter_mut().enumerate() {
            assert_eq!((buffer.len(), buffer.as_ptr().addr() % PAGE_SIZE), (12_288, 0));
            assert!(crate::scan::is_zero(buffer));
            buffer.fill(number as u8 + 1);
        }
        for (number, buffer) in taken.iter().enumerate() {
            assert!(buffer.iter().all(|byte| *byte == number as u8 + 1));
        }
        drop(taken);
        assert_eq!(pool.available(), 5);
    }

    #[test]
    fn the_buffer_returned_last_is_taken_first() {
        let pool = BufferPool::new(3, 1).unwrap();
        let (first, second) = (pool.take(), pool.take());
        let at = first.as_ptr();
        drop(second);
        drop(first);
        assert_eq!(pool.take().as_ptr(), at);
    }

    #[test]
    fn who_finds_the_pool_empty_gets_the_buffer_another_thread_returns() {
        let pool = BufferPool::new(2, PAGE_SIZE).unwrap();
        let (send, receive) = mpsc::sync_channel::<PooledBuffer>(2);
        let consumer = std::thread::spawn(move || receive.into_iter().map(|buffer| u64::from(buffer[7])).sum::<u64>());
        let mut expected = 0;
        for round in 0..2000u64 {
            let mut buffer = pool.take();
            buffer[7] = round as u8;
            expected += round % 256;
            send.send(buffer).unwrap();
        }
        drop(send);
        assert_eq!(consumer.join().unwrap(), expected);
        assert_eq!(pool.available(), 2);
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = BufferPool::new(1, PAGE_SIZE).unwrap();
        let mut buffer = pool.take();
        drop(pool);
        buffer.fill(9);
        assert_eq!(buffer[PAGE_SIZE - 1], 9);
    }

    #[test]
    fn impossible_sizes_are_refused_in_words() {
        for (count, size) in [(0, 1), (1, 0), (usize::MAX, 4096), (2, usize::MAX)] {
            assert!(matches!(BufferPool::new(count, size), Err(PoolError::Size { .. })), "{count} × {size}");
        }
        let error = BufferPool::new(1 << 20, 1 << 40).unwrap_err();
        assert!(error.to_string().contains("cannot reserve"), "{error}");
    }

    #[test]
    fn a_large_pool_costs_memory_only_where_it_is_used() {
        let pool = BufferPool::new(1024, 1 << 20).unwrap();
        let mut buffer = pool.take();
        buffer[0] = 1;
        let start = buffer.as_ptr().addr();
        let mut populated = 0;
        let mut map = crate::holes::PageMap::own().unwrap();
        map.populated(start..start + (1 << 30), |range| populated += range.len()).unwrap();
        // A page, or a huge page where the system hands them out unasked.
        assert!((PAGE_SIZE..=4 << 20).contains(&populated), "{populated} bytes populated");
    }
}
