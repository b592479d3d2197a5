//! A batch as its caller has it: filled before submission, read after completion.
//!
//! Guest memory cannot be read through a batch. What can be read is the batch's own: results, the zero map, and the
//! buffer, which belongs to the engine and is the caller's only while no device has it.

use std::fmt::{Debug, Formatter};
use std::sync::Arc;

use sterna_memory::PAGE_SIZE;
use thiserror::Error;

use crate::operation::Operation;
use crate::pools::{ByNode, Pools};
use crate::region::Range;
use crate::request::{Answer, Item, Request};
use crate::state::State;

/// Why a range cannot be part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PushError {
    /// The range does not fit any more: submit the batch and use another one.
    #[error("the batch has no room for {bytes} bytes more: hand it in first")]
    Full {
        /// Bytes of the range.
        bytes: usize,
    },
    /// The range can never fit: it is empty or longer than any batch.
    #[error("{bytes} bytes are no item of a {} batch: {rule}", operation.name())]
    Shape {
        /// The batch's kind.
        operation: Operation,
        /// Bytes of the range.
        bytes: usize,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// The batch's operation has other items.
    #[error("a {} batch takes {wants}", operation.name())]
    Kind {
        /// The batch's kind.
        operation: Operation,
        /// The items that it has.
        wants: &'static str,
    },
}

/// How to turn one range into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delta<'a> {
    /// They are equal.
    Equal,
    /// By this record.
    Record(&'a [u8]),
    /// The record would be longer than the range itself, or than the caller's limit.
    TooLong,
}

/// A batch in its caller's hands. Dropping it returns it to the pool.
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
    /// Returns an empty batch from the pool.
    pub(crate) fn empty(operation: Operation, pools: &Arc<Pools>) -> Self {
        let mut request = pools.take(operation.has_buffer());
        request.reset(operation);
        Self::new(request, Arc::clone(pools))
    }

    /// Returns the batch of a request that no device has any more.
    pub(crate) fn reopened(mut request: Box<Request>, pools: &ByNode) -> Self {
        request.leave();
        let pools = Arc::clone(pools.of(request.node()));
        Self::new(request, pools)
    }

    fn new(mut request: Box<Request>, pools: Arc<Pools>) -> Self {
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

    /// Returns its operation.
    pub fn operation(&self) -> Operation {
        self.request().operation
    }

    /// Returns the number of items: pages of a zero map, ranges (pairs) of every other operation.
    pub fn len(&self) -> usize {
        self.request().items.len()
    }

    /// Returns whether it has no items.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many bytes of guest memory its items name.
    pub fn bytes(&self) -> u64 {
        self.request().bytes
    }

    /// Returns how many more items fit, of at most a page each.
    pub fn room(&self) -> usize {
        let shape = self.pools.shape();
        let bytes = shape.bytes().saturating_sub(self.request().bytes as usize) / PAGE_SIZE;
        bytes.min(shape.pages - self.len())
    }

    /// Empties it, to be filled again with the same operation.
    pub fn clear(&mut self) {
        let operation = self.operation();
        self.request_mut().reset(operation);
    }

    /// Adds a range: whole pages for a zero map, any bytes for checksum, copy (with or without checksum) and deflate.
    /// Returns the index of its (first) item.
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

    /// As [`Self::push`], for deflate: the output does not end the stream, so the next item's output can follow it. The
    /// items of a batch form one deflate stream if all but the last are added with this method; several engines of a
    /// device work on it at once.
    pub fn push_continued(&mut self, range: &Range) -> Result<usize, PushError> {
        let operation = self.operation();
        if operation != Operation::Deflate {
            return Err(PushError::Kind { operation, wants: "ranges, none of which is continued" });
        }
        let item = self.push(range)?;
        self.request_mut().items[item].continued = true;
        Ok(item)
    }

    /// Adds a pair of ranges of equal length, for compare and create delta. A delta leads from `first` to `second`.
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

    /// Adds, to a batch that creates deltas, a delta from `old` to copy `item` of `copies`. The caller has no use for a
    /// record of more than `most` bytes (one of up to 80 bytes may come nevertheless). Keep `copies` unchanged until
    /// this batch is done: otherwise the record's content is undefined. The memory of `copies` stays valid either way.
    ///
    /// # Panics
    /// If `copies` has no such copy.
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
        if !aligned.is_multiple_of(8) || bytes > crate::delta::MAX_BYTES {
            let rule = "deltas are of multiples of 8 bytes at such addresses, up to 512 KiB";
            return Err(PushError::Shape { operation: self.operation(), bytes, rule });
        }
        self.push_item(first, Some(second), room)
    }

    /// Adds `input` bytes that the caller fills in (content to place, a delta record, a deflate stream), and the range
    /// to apply them to. Fill the returned slice before the next call.
    pub fn push_input(&mut self, input: usize, destination: &Range) -> Result<&mut [u8], PushError> {
        let (operation, bytes) = (self.operation(), destination.len());
        let wrong = |rule| Err(PushError::Shape { operation, bytes, rule });
        match operation {
            Operation::Place if input != bytes => return wrong("as much is placed as the range is long"),
            Operation::ApplyDelta
                if !(destination.pointer().addr() | bytes).is_multiple_of(8) || bytes > crate::delta::MAX_BYTES =>
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
        // SAFETY: the room is this item's part of the batch's own buffer, `input` bytes long, zero or initialised
        // before; no device has the batch (it is in its caller's hands), and the borrow of `self` keeps it so.
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
        // A device reads and writes records and streams faster at cache-line boundaries.
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

    /// Returns the zero map: bit `i % 64` of word `i / 64` is set if page `i` was zero when it was read.
    pub fn zero_map(&self) -> &[u64] {
        &self.request().zero[..self.len().div_ceil(64)]
    }

    /// Returns whether page `page` was zero when it was read.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn is_zero(&self, page: usize) -> bool {
        assert!(page < self.len(), "page {page} of a batch of {}", self.len());
        self.request().is_zero(page)
    }

    /// Returns the pages that a device reported as zero and that the CPU, reading a sample of them, found not zero: the
    /// device erred, or another thread wrote them in between. They are not zero in the map.
    pub fn suspect_pages(&self) -> impl Iterator<Item = usize> {
        let words = self.request().suspect[..self.len().div_ceil(64)].iter();
        words
            .enumerate()
            .filter(|(_, word)| **word != 0)
            .flat_map(|(at, &word)| (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 64 + bit))
    }

    /// Returns the offset in bytes at which the pair `item` first differs; none if it is equal.
    ///
    /// # Panics
    /// If there is no such item, or the batch was not compared.
    pub fn difference(&self, item: usize) -> Option<usize> {
        match self.request().answers[item] {
            Answer::Differs(at) => Some(at as usize),
            Answer::Equal => None,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// Returns the CRC-32C of item `item`.
    ///
    /// # Panics
    /// If there is no such item, or the batch has no checksums.
    pub fn checksum(&self, item: usize) -> u32 {
        match self.request().answers[item] {
            Answer::Checksum(checksum) => checksum,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// Returns how to turn the first range of pair `item` into the second.
    ///
    /// # Panics
    /// If there is no such item, or the batch is not of deltas.
    pub fn delta(&self, item: usize) -> Delta<'_> {
        match self.request().answers[item] {
            Answer::Equal => Delta::Equal,
            Answer::Written(bytes) => Delta::Record(self.written(item, bytes)),
            Answer::TooLong => Delta::TooLong,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// Returns the deflate stream of item `item`, or its part of one ([`Self::push_continued`]); none if the stream
    /// would be longer than the input.
    ///
    /// # Panics
    /// If there is no such item, or the batch was not deflated.
    pub fn deflated(&self, item: usize) -> Option<&[u8]> {
        match self.request().answers[item] {
            Answer::Written(bytes) => Some(self.written(item, bytes)),
            Answer::TooLong => None,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// Returns how many bytes apply delta or inflate wrote to the range of item `item`; none if the input was malformed
    /// or did not fit the range. The content of the range is undefined then.
    ///
    /// # Panics
    /// If there is no such item, or the batch writes nothing.
    pub fn placed(&self, item: usize) -> Option<usize> {
        match self.request().answers[item] {
            Answer::Written(bytes) => Some(bytes as usize),
            Answer::Malformed | Answer::TooLong => None,
            answer => panic!("a {} batch has {answer:?} for item {item}", self.operation().name()),
        }
    }

    /// Returns the copy of item `item`.
    ///
    /// # Panics
    /// If there is no such item, or the batch is not of copies.
    pub fn copy(&self, item: usize) -> &[u8] {
        assert!(matches!(self.operation(), Operation::Copy | Operation::CopyChecksum), "{self:?} has no copies");
        self.written(item, self.request().items[item].room)
    }

    /// All copies, one after the other.
    ///
    /// # Panics
    /// If the batch is not of copies, or has gaps between them: ranges that are copied with their checksum must then be
    /// of multiples of 64 bytes.
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
