//! A batch as its caller has it: filled before it is handed in, read after it came back.
//!
//! Nothing of guest memory can be read through it. What can be read is the batch's own: answers, the zero map, and the
//! buffer, which is the engine's memory and the caller's only as long as no device has it.

use std::fmt::{Debug, Formatter};
use std::sync::Arc;

use sterna_memory::PAGE_SIZE;
use thiserror::Error;

use crate::channel::Pools;
use crate::operation::Operation;
use crate::region::Range;
use crate::request::{Answer, Item, Request};
use crate::state::State;

/// Why a range cannot be part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PushError {
    /// It does not fit any more: hand the batch in and take the next.
    #[error("the batch has no room for {bytes} bytes more: hand it in first")]
    Full {
        /// Bytes of the range.
        bytes: usize,
    },
    /// It would never fit, being empty or longer than any batch.
    #[error("{bytes} bytes are no item of a {} batch: {rule}", operation.name())]
    Shape {
        /// The batch's kind.
        operation: Operation,
        /// Bytes of the range.
        bytes: usize,
        /// What it should have been.
        rule: &'static str,
    },
    /// The batch's kind takes other items.
    #[error("a {} batch takes {wants}", operation.name())]
    Kind {
        /// The batch's kind.
        operation: Operation,
        /// What it takes.
        wants: &'static str,
    },
}

/// What turns one range into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delta<'a> {
    /// They are equal.
    Equal,
    /// This record does.
    Record(&'a [u8]),
    /// The record would be longer than the range itself, or than is of use.
    TooLong,
}

/// A batch in its caller's hands. Dropped, it goes back to the pool.
pub struct Batch {
    request: Option<Box<Request>>,
    pools: Arc<Pools>,
}

impl Debug for Batch {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch({}, {} items, {} bytes)", self.operation().name(), self.len(), self.bytes())
    }
}

impl Batch {
    pub(crate) fn new(mut request: Box<Request>, pools: Arc<Pools>) -> Self {
        if request.state() != State::Filling {
            request.go(State::Filling);
        }
        Self { request: Some(request), pools }
    }

    pub(crate) fn into_request(mut self) -> Box<Request> {
        self.request.take().expect("a batch holds its request until it is dropped")
    }

    pub(crate) fn request(&self) -> &Request {
        self.request.as_ref().expect("a batch holds its request until it is dropped")
    }

    pub(crate) fn request_mut(&mut self) -> &mut Request {
        self.request.as_mut().expect("a batch holds its request until it is dropped")
    }

    /// What is asked for.
    pub fn operation(&self) -> Operation {
        self.request().operation
    }

    /// Items: pages of a zero map, ranges (pairs) of everything else.
    pub fn len(&self) -> usize {
        self.request().items.len()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of guest memory that its items name.
    pub fn bytes(&self) -> u64 {
        self.request().bytes
    }

    /// How many more items fit, if they are a page each at most.
    pub fn room(&self) -> usize {
        let shape = self.pools.shape();
        let bytes = shape.bytes().saturating_sub(self.request().bytes as usize) / PAGE_SIZE;
        bytes.min(shape.pages - self.len())
    }

    /// Empties it, to be filled anew with the same operation.
    pub fn clear(&mut self) {
        let operation = self.operation();
        self.request_mut().reset(operation);
    }

    /// Empties it, to be filled anew with `operation`.
    #[must_use]
    pub fn become_empty(mut self, operation: Operation) -> Self {
        if operation.has_buffer() == self.operation().has_buffer() {
            self.request_mut().reset(operation);
            return self;
        }
        self.pools.batch(operation)
    }

    /// Adds a range: whole pages for a zero map, any bytes for checksum, copy (with or without checksum) and deflate. Says the
    /// number of its (first) item.
    pub fn push(&mut self, range: &Range) -> Result<usize, PushError> {
        let operation = self.operation();
        match operation {
            Operation::ZeroMap => self.push_pages(range),
            Operation::Checksum => self.push_item(range, None, 0),
            Operation::Copy | Operation::CopyChecksum => self.push_item(range, None, range.len()),
            Operation::Deflate => self.push_item(range, None, deflate_room(range.len())),
            _ => Err(PushError::Kind { operation, wants: "pairs of ranges, or an input and a range" }),
        }
    }

    /// As [`Self::push`], of deflate: what comes out does not end a stream, so that the next item's can follow it. The items of a
    /// batch, all but the last pushed like this, are one deflate stream together; several engines of a device are at it at once.
    pub fn push_continued(&mut self, range: &Range) -> Result<usize, PushError> {
        let operation = self.operation();
        if operation != Operation::Deflate {
            return Err(PushError::Kind { operation, wants: "ranges, none of which is continued" });
        }
        let item = self.push(range)?;
        self.request_mut().items[item].continued = true;
        Ok(item)
    }

    /// Adds a pair of ranges of one length, for compare and create delta. A delta leads from `first` to `second`.
    pub fn push_pair(&mut self, first: &Range, second: &Range) -> Result<usize, PushError> {
        let (operation, bytes) = (self.operation(), first.len());
        let wrong = |rule| Err(PushError::Shape { operation, bytes, rule });
        if first.len() != second.len() {
            return wrong("both ranges of a pair are of one length");
        }
        match operation {
            Operation::Compare => self.push_item(first, Some(second), 0),
            Operation::CreateDelta => self.push_delta(first, second, crate::delta::room(bytes)),
            _ => Err(PushError::Kind { operation, wants: "single ranges, or an input and a range" }),
        }
    }

    /// Adds, to a batch that creates deltas, one that leads from `old` to copy `item` of `copies`, of which a record of more than
    /// `most` bytes is of no use (one up to 80 bytes may come nevertheless). `copies` is to be kept as it is until this is done:
    /// else the record is of who knows what. Its memory stays either way.
    ///
    /// # Panics
    /// When `copies` has no such copy.
    pub fn push_delta_to_copy(
        &mut self,
        old: &Range,
        copies: &Self,
        item: usize,
        most: usize,
    ) -> Result<usize, PushError> {
        let (operation, bytes) = (self.operation(), old.len());
        if operation != Operation::CreateDelta {
            return Err(PushError::Kind { operation, wants: "no deltas" });
        }
        let kept = copies.request();
        assert!(matches!(kept.operation, Operation::Copy | Operation::CopyChecksum), "{copies:?} has no copies");
        let Item { at, bytes: length, .. } = kept.items[item];
        if length as usize != bytes {
            return Err(PushError::Shape { operation, bytes, rule: "both ranges of a pair are of one length" });
        }
        let shown = kept.shown.as_ref().expect("a batch of copies has a buffer");
        let copy = shown.range(at as usize, bytes).expect("a copy lies within its buffer");
        self.push_delta(old, &copy, crate::delta::room_of(bytes, most))
    }

    fn push_delta(&mut self, first: &Range, second: &Range, room: usize) -> Result<usize, PushError> {
        let bytes = first.len();
        let aligned = first.pointer().addr() | second.pointer().addr() | bytes;
        if !aligned.is_multiple_of(8) || bytes > crate::delta::MOST_BYTES {
            let rule = "deltas are of multiples of 8 bytes at such addresses, up to 512 KiB";
            return Err(PushError::Shape { operation: self.operation(), bytes, rule });
        }
        self.push_item(first, Some(second), room)
    }

    /// Adds `input` bytes to be filled in by the caller (what to place, a delta record, a deflate stream), and the range they
    /// are for. The room is given to be filled before the next call.
    pub fn push_input(&mut self, input: usize, destination: &Range) -> Result<&mut [u8], PushError> {
        let (operation, bytes) = (self.operation(), destination.len());
        let wrong = |rule| Err(PushError::Shape { operation, bytes, rule });
        match operation {
            Operation::Place if input != bytes => return wrong("as much is placed as the range is long"),
            Operation::ApplyDelta
                if !(destination.pointer().addr() | bytes).is_multiple_of(8) || bytes > crate::delta::MOST_BYTES =>
            {
                return wrong("deltas are of multiples of 8 bytes at such addresses, up to 512 KiB");
            }
            Operation::ApplyDelta if !input.is_multiple_of(crate::delta::ENTRY) => {
                return wrong("a delta record is a multiple of 10 bytes");
            }
            Operation::Place | Operation::ApplyDelta | Operation::Inflate => {}
            _ => return Err(PushError::Kind { operation, wants: "ranges without an input" }),
        }
        let item = self.push_item(destination, None, input)?;
        let room = self.request().room(item);
        // SAFETY: the room is this item's part of the batch's own buffer, `input` bytes long, zero or initialised before; no
        // device has the batch (it is in its caller's hands), and the borrow of `self` keeps it so.
        Ok(unsafe { std::slice::from_raw_parts_mut(room, input) })
    }

    fn push_pages(&mut self, range: &Range) -> Result<usize, PushError> {
        let (operation, bytes) = (self.operation(), range.len());
        if !range.pointer().addr().is_multiple_of(PAGE_SIZE) || !bytes.is_multiple_of(PAGE_SIZE) || bytes == 0 {
            return Err(PushError::Shape { operation, bytes, rule: "a zero map is of whole, aligned pages" });
        }
        let (pages, most) = (bytes / PAGE_SIZE, self.pools.shape().pages);
        if pages > most {
            return Err(PushError::Shape { operation, bytes, rule: "a range has no more pages than a batch" });
        }
        let request = self.request_mut();
        let first = request.items.len();
        if pages > most - first {
            return Err(PushError::Full { bytes });
        }
        hold(request, range);
        for page in 0..pages {
            let first = range.pointer().wrapping_add(page * PAGE_SIZE);
            let bytes = PAGE_SIZE as u32;
            request.items.push(Item { first, second: std::ptr::null_mut(), bytes, at: 0, room: 0, continued: false });
        }
        request.bytes += bytes as u64;
        Ok(first)
    }

    fn push_item(&mut self, range: &Range, second: Option<&Range>, room: usize) -> Result<usize, PushError> {
        let (operation, bytes, shape) = (self.operation(), range.len(), self.pools.shape());
        if bytes == 0 || bytes > shape.bytes() || room > u32::MAX as usize {
            return Err(PushError::Shape { operation, bytes, rule: "a range has bytes, and no more than a batch" });
        }
        let request = self.request_mut();
        // Records and streams are easier on a device at addresses of whole cache lines.
        let at = request.buffered.next_multiple_of(if operation == Operation::Copy { 1 } else { 64 });
        let buffer = request.buffer.as_ref().map_or(0, |slab| slab.bytes());
        if operation.has_buffer() && room > buffer {
            return Err(PushError::Shape {
                operation,
                bytes,
                rule: "what goes in or comes out has no more bytes than a batch",
            });
        }
        let full = request.items.len() == shape.pages || request.bytes as usize + bytes > shape.bytes();
        if full || (operation.has_buffer() && at + room > buffer) {
            return Err(PushError::Full { bytes });
        }
        hold(request, range);
        if let Some(second) = second {
            hold(request, second);
        }
        request.items.push(Item {
            first: range.pointer(),
            second: second.map_or(std::ptr::null_mut(), Range::pointer),
            bytes: bytes as u32,
            at: at as u32,
            room: room as u32,
            continued: false,
        });
        request.buffered = at + room;
        request.bytes += bytes as u64;
        Ok(request.items.len() - 1)
    }

    /// The zero map: bit `i % 64` of word `i / 64` tells whether page `i` was zero when it was read.
    pub fn zero_map(&self) -> &[u64] {
        &self.request().zero[..self.len().div_ceil(64)]
    }

    /// Whether page `page` was zero when it was read.
    ///
    /// # Panics
    /// When there is no such page.
    pub fn is_zero(&self, page: usize) -> bool {
        assert!(page < self.len(), "page {page} of a batch of {}", self.len());
        self.request().is_zero(page)
    }

    /// The pages that a device called zero and the CPU, which has read a sample of them, saw not to be: the device has erred, unless
    /// somebody wrote them in between. They are not zero in the map.
    pub fn doubted(&self) -> impl Iterator<Item = usize> {
        let words = self.request().doubted[..self.len().div_ceil(64)].iter();
        words
            .enumerate()
            .filter(|(_, word)| **word != 0)
            .flat_map(|(at, &word)| (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 64 + bit))
    }

    /// Where the pair `item` differs first, in bytes; none if it is equal.
    ///
    /// # Panics
    /// When there is no such item, or the batch was not compared.
    pub fn difference(&self, item: usize) -> Option<usize> {
        match self.request().answers[item] {
            Answer::Differs(at) => Some(at as usize),
            Answer::Equal => None,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// The CRC-32C of item `item`.
    ///
    /// # Panics
    /// When there is no such item, or the batch has no checksums.
    pub fn checksum(&self, item: usize) -> u32 {
        match self.request().answers[item] {
            Answer::Checksum(checksum) => checksum,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// What turns the first range of pair `item` into the second.
    ///
    /// # Panics
    /// When there is no such item, or the batch is not of deltas.
    pub fn delta(&self, item: usize) -> Delta<'_> {
        match self.request().answers[item] {
            Answer::Equal => Delta::Equal,
            Answer::Written(bytes) => Delta::Record(self.written(item, bytes)),
            Answer::TooLong => Delta::TooLong,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// The deflate stream of item `item`, or its part of one ([`Self::push_continued`]); none if it would be longer than what went in.
    ///
    /// # Panics
    /// When there is no such item, or the batch was not deflated.
    pub fn deflated(&self, item: usize) -> Option<&[u8]> {
        match self.request().answers[item] {
            Answer::Written(bytes) => Some(self.written(item, bytes)),
            Answer::TooLong => None,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// How many bytes were written to the range of item `item` by apply delta or inflate; none if its input was not of the
    /// format, or did not fit the range. What lies in the range then is undefined.
    ///
    /// # Panics
    /// When there is no such item, or the batch writes nothing.
    pub fn placed(&self, item: usize) -> Option<usize> {
        match self.request().answers[item] {
            Answer::Written(bytes) => Some(bytes as usize),
            Answer::Malformed | Answer::TooLong => None,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// The copy of item `item`.
    ///
    /// # Panics
    /// When there is no such item, or the batch is not of copies.
    pub fn copy(&self, item: usize) -> &[u8] {
        assert!(matches!(self.operation(), Operation::Copy | Operation::CopyChecksum), "{self:?} has no copies");
        self.written(item, self.request().items[item].room)
    }

    /// All copies, one after the other.
    ///
    /// # Panics
    /// When the batch is not of copies, or there is room between them: ranges that are copied with their checksum must be of
    /// multiples of 64 bytes then.
    pub fn copies(&self) -> &[u8] {
        assert!(matches!(self.operation(), Operation::Copy | Operation::CopyChecksum), "{self:?} has no copies");
        let request = self.request();
        assert!(request.buffered as u64 == request.bytes, "{self:?} has room between its copies");
        if self.is_empty() {
            return &[];
        }
        // SAFETY: this many bytes, those of all items together, are the used part of the batch's own buffer, initialised (zero at
        // first); no device has the batch, as it is in its caller's hands.
        unsafe { std::slice::from_raw_parts(request.room(0), request.buffered) }
    }

    fn written(&self, item: usize, bytes: u32) -> &[u8] {
        let request = self.request();
        assert!(bytes <= request.items[item].room, "an engine said {bytes} bytes of item {item}, which has less room");
        // SAFETY: this many bytes are this item's part of the batch's own buffer, initialised (zero at first); no device has
        // the batch, as it is in its caller's hands.
        unsafe { std::slice::from_raw_parts(request.room(item), bytes as usize) }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(mut request) = self.request.take() {
            request.go(State::Free);
            self.pools.put(request);
        }
    }
}

/// Keeps the range's region with the request.
fn hold(request: &mut Request, range: &Range) {
    // Ranges come region by region as a rule, pairs from two: then nothing is counted per item.
    let held = request.regions.iter().rev().take(4).any(|region| Arc::ptr_eq(region, range.region()));
    if !held {
        request.regions.push(Arc::clone(range.region()));
    }
}

/// Room for a deflate stream: as long as what goes in (a longer one is of no use), and a little for the last code.
fn deflate_room(bytes: usize) -> usize {
    bytes + 8
}
