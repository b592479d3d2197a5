//! A request: the items of a batch, what came out, and the memory that a device needs for it. Made once, used for ever.

use std::sync::Arc;

use crate::arena::Slab;
use crate::engine::Work;
use crate::operation::Operation;
use crate::region::Region;
use crate::state::State;
use crate::time::Nanos;

/// Bytes of the buffer per page of a batch beyond the page itself: what an incompressible page grows by when written down
/// as deflate, a delta record's shortest room, and alignment.
const SLACK: usize = 128;

/// One page or range of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// In guest memory: what is read; what is written by an operation that writes.
    pub(crate) first: *mut u8,
    /// The second of a pair.
    pub(crate) second: *mut u8,
    /// Length of `first` (and `second`).
    pub(crate) bytes: u32,
    /// Where its part of the batch's buffer begins.
    pub(crate) at: u32,
    /// Length of that part: room for what comes out, or exactly what goes in.
    pub(crate) room: u32,
    /// Of deflate: another item's stream follows this one's, so it must not end the whole.
    pub(crate) continued: bool,
}

/// What came out for an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nothing yet.
    #[default]
    None,
    /// The pair is equal.
    Equal,
    /// The pair differs, here first.
    Differs(u32),
    /// The checksum.
    Checksum(u32),
    /// So many bytes came out.
    Written(u32),
    /// What would have come out does not fit its room.
    TooLong,
    /// What went in is not of the format.
    Malformed,
}

/// A request.
#[derive(Debug)]
pub(crate) struct Request {
    state: State,
    pub(crate) operation: Operation,
    pub(crate) items: Vec<Item>,
    /// What the items point into; each once as long as they come in order.
    pub(crate) regions: Vec<Arc<Region>>,
    /// Whether the regions have been entered.
    entered: bool,
    pub(crate) answers: Vec<Answer>,
    pub(crate) zero: Vec<u64>,
    /// Pages that a device called zero, and the CPU then saw not to be.
    pub(crate) doubted: Vec<u64>,
    pub(crate) bytes: u64,
    /// The batch's own buffer, if its kind has one, and how much of it is given out.
    pub(crate) buffer: Option<Arc<Slab>>,
    /// The same, for other batches that read what came to lie there.
    pub(crate) shown: Option<Arc<Region>>,
    pub(crate) buffered: usize,
    /// The part of it that an accelerator has, or has had.
    pub(crate) work: Work,
    pub(crate) submitted: Nanos,
    node: Option<u32>,
}

// SAFETY: the pointers lead into the regions, which the request keeps and which are `Sync`; nothing is borrowed from them.
unsafe impl Send for Request {}

/// The sizes of a pool's requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Most pages of a batch, and most items.
    pub(crate) pages: usize,
    /// Whether an accelerator may get it: then it has descriptors and records.
    pub(crate) device: bool,
    /// The node of its memory.
    pub(crate) node: Option<u32>,
}

impl Shape {
    /// Most bytes of a batch.
    pub(crate) fn bytes(self) -> usize {
        self.pages * sterna_memory::PAGE_SIZE
    }
}

impl Request {
    /// A request without (`buffer` false) or with a buffer of its own.
    pub(crate) fn new(shape: Shape, buffer: bool) -> Self {
        let buffer = buffer.then(|| Arc::new(Slab::new(shape.bytes() + shape.pages * SLACK, shape.node)));
        Self {
            state: State::Free,
            operation: Operation::ZeroMap,
            items: Vec::with_capacity(shape.pages),
            // Two per item at most, for pairs.
            regions: Vec::with_capacity(2 * shape.pages),
            entered: false,
            answers: Vec::with_capacity(shape.pages),
            zero: vec![0; shape.pages.div_ceil(64)],
            doubted: vec![0; shape.pages.div_ceil(64)],
            bytes: 0,
            shown: buffer.as_ref().map(|slab| Region::of_slab(slab, shape.node)),
            buffer,
            buffered: 0,
            work: Work::new(shape),
            submitted: 0,
            node: shape.node,
        }
    }

    /// Bytes of its own that a device may write.
    pub(crate) fn device_bytes(&self) -> u64 {
        (self.work.bytes() + self.buffer.as_ref().map_or(0, |slab| slab.bytes())) as u64
    }

    /// The node of its memory.
    pub(crate) fn node(&self) -> Option<u32> {
        self.node
    }

    /// Its state.
    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Goes on to `next`.
    #[track_caller]
    pub(crate) fn go(&mut self, next: State) {
        assert!(self.state.may_become(next), "a request became {next:?} while {:?}", self.state);
        self.state = next;
    }

    /// Empty, of this kind. Only in states in which nobody else has it.
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

    /// Ready to be worked on: no answers yet, no page said to be zero, and nothing left of an earlier try (a batch that was done
    /// or taken back may be handed in again).
    pub(crate) fn unanswered(&mut self) {
        self.work.reset();
        self.answers.clear();
        if self.operation != Operation::ZeroMap {
            self.answers.resize(self.items.len(), Answer::None);
        }
        self.zero[..self.items.len().div_ceil(64)].fill(0);
        self.doubted[..self.items.len().div_ceil(64)].fill(0);
    }

    /// Enters all its regions, or none.
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

    /// Leaves its regions.
    pub(crate) fn leave(&mut self) {
        if std::mem::take(&mut self.entered) {
            self.regions.iter().for_each(|region| region.leave());
        }
    }

    /// The same items for another try, in a request that has been with nobody: the old one may still be written.
    pub(crate) fn copy_into(&self, fresh: &mut Self) {
        fresh.reset(self.operation);
        fresh.items.extend_from_slice(&self.items);
        fresh.regions.extend(self.regions.iter().cloned());
        (fresh.bytes, fresh.buffered, fresh.submitted) = (self.bytes, self.buffered, self.submitted);
        // The old one keeps its regions, so they let the new one in even while they are being retired.
        fresh.regions.iter().for_each(|region| region.enter_again());
        fresh.entered = true;
    }

    /// Notes that page `page` is zero.
    pub(crate) fn set_zero(&mut self, page: usize) {
        self.zero[page / 64] |= 1 << (page % 64);
    }

    /// Notes that pages `first` to before `end` are zero.
    pub(crate) fn set_zero_run(&mut self, first: usize, end: usize) {
        let mut page = first;
        while page < end {
            let (word, bit) = (page / 64, page % 64);
            let pages = (64 - bit).min(end - page);
            self.zero[word] |= (u64::MAX >> (64 - pages)) << bit;
            page += pages;
        }
    }

    /// Notes that page `page` is not zero.
    pub(crate) fn clear_zero(&mut self, page: usize) {
        self.zero[page / 64] &= !(1 << (page % 64));
    }

    /// Notes that a device called page `page` zero, and the CPU then saw that it is not.
    pub(crate) fn doubt(&mut self, page: usize) {
        self.doubted[page / 64] |= 1 << (page % 64);
    }

    /// Whether page `page` was said to be zero.
    pub(crate) fn is_zero(&self, page: usize) -> bool {
        self.zero[page / 64] >> (page % 64) & 1 == 1
    }

    /// Where item `item`'s part of the buffer is.
    pub(crate) fn room(&self, item: usize) -> *mut u8 {
        let buffer = self.buffer.as_ref().expect("an operation with a buffer has one");
        let Item { at, room, .. } = self.items[item];
        debug_assert!(at as usize + room as usize <= buffer.bytes());
        buffer.pointer().wrapping_add(at as usize)
    }
}

impl Drop for Request {
    /// Of one that a device has, everything is kept that the device may touch. It is dropped in that state only by a panic between
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
