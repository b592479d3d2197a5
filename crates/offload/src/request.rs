//! A request: the items of a batch, their results, and the memory that a device needs for the batch. Allocated once and
//! reused.

use std::sync::Arc;

use crate::arena::Slab;
use crate::operation::Operation;
use crate::region::Region;
use crate::state::State;
use crate::time::Nanos;
use crate::work::{Shape, Work};

/// Bytes of the buffer per page of a batch beyond the page itself: the growth of an incompressible page in deflate, the
/// smallest space for a delta record, and alignment.
const SLACK: usize = 128;

/// One page or range of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// Address in guest memory that the operation reads, or writes if it is an operation that writes.
    pub(crate) first: *mut u8,
    /// Address of the second range of a pair.
    pub(crate) second: *mut u8,
    /// Length of `first` (and `second`).
    pub(crate) bytes: u32,
    /// Offset of the item's part of the batch's buffer.
    pub(crate) at: u32,
    /// Length of that part: the capacity for the output, or the exact length of the input.
    pub(crate) room: u32,
    /// Deflate only: another item's stream follows this one, so this stream must not have the final bit.
    pub(crate) continued: bool,
}

/// The result of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Answer {
    /// No result yet.
    #[default]
    None,
    /// The pair is equal.
    Equal,
    /// The pair differs; the offset of the first difference.
    Differs(u32),
    /// The checksum.
    Checksum(u32),
    /// The output has this many bytes.
    Written(u32),
    /// The output does not fit into the item's part of the buffer.
    TooLong,
    /// The input is not in the expected format.
    Malformed,
}

/// A request.
#[derive(Debug)]
pub(crate) struct Request {
    state: State,
    pub(crate) operation: Operation,
    pub(crate) items: Vec<Item>,
    /// The regions that the items point into; each once while consecutive items share it.
    pub(crate) regions: Vec<Arc<Region>>,
    /// Whether the regions have been entered.
    entered: bool,
    pub(crate) answers: Vec<Answer>,
    pub(crate) zero: Vec<u64>,
    /// Pages that a device reported as zero and that the CPU then read as not zero.
    pub(crate) suspect: Vec<u64>,
    pub(crate) bytes: u64,
    /// The batch's own buffer, if its kind has one, and how much of it is allocated to items.
    pub(crate) buffer: Option<Arc<Slab>>,
    /// The same buffer as a region, for other batches that read its contents.
    pub(crate) shown: Option<Arc<Region>>,
    pub(crate) buffered: usize,
    /// The accelerator's part of the request.
    pub(crate) work: Work,
    pub(crate) submitted: Nanos,
    node: Option<u32>,
}

// SAFETY: the pointers lead into the regions, which the request keeps and which are `Sync`; nothing is borrowed from
// them.
unsafe impl Send for Request {}

impl Request {
    /// Makes a request with or without a buffer of its own.
    pub(crate) fn new(shape: Shape, buffer: bool) -> Self {
        let buffer = buffer.then(|| Arc::new(Slab::new(shape.bytes() + shape.pages * SLACK, shape.node)));
        Self {
            state: State::Free,
            operation: Operation::ZeroMap,
            items: Vec::with_capacity(shape.pages),
            // At most two per item, for pairs.
            regions: Vec::with_capacity(2 * shape.pages),
            entered: false,
            answers: Vec::with_capacity(shape.pages),
            zero: vec![0; shape.pages.div_ceil(64)],
            suspect: vec![0; shape.pages.div_ceil(64)],
            bytes: 0,
            shown: buffer.as_ref().map(|slab| Region::of_slab(slab, shape.node)),
            buffer,
            buffered: 0,
            work: Work::new(shape),
            submitted: 0,
            node: shape.node,
        }
    }

    /// Returns how many bytes of the request's own memory a device may write.
    #[cfg(feature = "accel")]
    pub(crate) fn device_bytes(&self) -> u64 {
        (self.work.bytes() + self.buffer.as_ref().map_or(0, |slab| slab.bytes())) as u64
    }

    /// Returns the NUMA node of its memory.
    pub(crate) fn node(&self) -> Option<u32> {
        self.node
    }

    /// Returns its state.
    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Changes the state to `next`. Panics if `next` may not follow.
    #[track_caller]
    pub(crate) fn go(&mut self, next: State) {
        assert!(self.state.may_become(next), "a request became {next:?} while {:?}", self.state);
        self.state = next;
    }

    /// Empties the request and sets its operation. Only in states in which no device and no other thread has the
    /// request.
    pub(crate) fn reset(&mut self, operation: Operation) {
        debug_assert!(matches!(self.state, State::Free | State::Filling));
        debug_assert!(!self.entered, "an empty request holds no region");
        self.operation = operation;
        self.items.clear();
        self.regions.clear();
        self.answers.clear();
        self.bytes = 0;
        self.buffered = 0;
    }

    /// Clears all results, so that the request can be submitted: also those of an earlier submission (a batch that is
    /// done or was cancelled may be submitted again).
    pub(crate) fn unanswered(&mut self) {
        self.work.reset();
        self.answers.clear();
        if self.operation != Operation::ZeroMap {
            self.answers.resize(self.items.len(), Answer::None);
        }
        self.zero[..self.items.len().div_ceil(64)].fill(0);
        self.suspect[..self.items.len().div_ceil(64)].fill(0);
    }

    /// Enters all its regions, or none if one of them is retired.
    pub(crate) fn enter(&mut self) -> bool {
        debug_assert!(!self.entered);
        for (at, region) in self.regions.iter().enumerate() {
            if !region.enter() {
                self.regions[..at].iter().for_each(|region| region.leave());
                return false;
            }
        }
        self.entered = true;
        true
    }

    /// Leaves the regions that it entered.
    pub(crate) fn leave(&mut self) {
        if std::mem::take(&mut self.entered) {
            self.regions.iter().for_each(|region| region.leave());
        }
    }

    /// Copies the items into `fresh`, a request that no device has had, for another attempt: a device may still write
    /// the old one.
    pub(crate) fn copy_into(&self, fresh: &mut Self) {
        fresh.reset(self.operation);
        fresh.items.extend_from_slice(&self.items);
        fresh.regions.extend(self.regions.iter().cloned());
        (fresh.bytes, fresh.buffered, fresh.submitted) = (self.bytes, self.buffered, self.submitted);
        // The old request stays in its regions, so the new one may enter them even while they are being retired.
        fresh.regions.iter().for_each(|region| region.enter_again());
        fresh.entered = true;
    }

    /// Marks page `page` as zero.
    pub(crate) fn set_zero(&mut self, page: usize) {
        self.zero[page / 64] |= 1 << (page % 64);
    }

    /// Marks the pages `first..end` as zero.
    pub(crate) fn set_zero_run(&mut self, first: usize, end: usize) {
        let mut page = first;
        while page < end {
            let (word, bit) = (page / 64, page % 64);
            let pages = (64 - bit).min(end - page);
            self.zero[word] |= (u64::MAX >> (64 - pages)) << bit;
            page += pages;
        }
    }

    /// Marks page `page` as not zero.
    pub(crate) fn clear_zero(&mut self, page: usize) {
        self.zero[page / 64] &= !(1 << (page % 64));
    }

    /// Records that a device reported page `page` as zero and the CPU then read it as not zero.
    pub(crate) fn doubt(&mut self, page: usize) {
        self.suspect[page / 64] |= 1 << (page % 64);
    }

    /// Returns whether page `page` is marked as zero.
    pub(crate) fn is_zero(&self, page: usize) -> bool {
        self.zero[page / 64] >> (page % 64) & 1 == 1
    }

    /// Returns the address of item `item`'s part of the buffer.
    pub(crate) fn room(&self, item: usize) -> *mut u8 {
        let buffer = self.buffer.as_ref().expect("an operation with a buffer has one");
        let Item { at, room, .. } = self.items[item];
        debug_assert!(at as usize + room as usize <= buffer.bytes());
        buffer.pointer().wrapping_add(at as usize)
    }
}

#[cfg(feature = "accel")]
impl Drop for Request {
    /// Leaks the memory that a device may still write. A request is dropped in that state only by a panic between
    /// submission and completion.
    fn drop(&mut self) {
        if self.work.parts.with_device() {
            tracing::error!(
                bytes = self.device_bytes(),
                "a batch was lost while a device has it: its memory is leaked"
            );
            std::mem::forget((self.work.take_lists(), self.buffer.take(), std::mem::take(&mut self.regions)));
        }
    }
}
