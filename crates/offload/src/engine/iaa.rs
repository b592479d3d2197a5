//! Intel IAA: deflate with the fixed codes, and inflate. No job is completed in part: after a fault the CPU does the
//! job from its start.

use sterna_idxd::iaa::{
    AnalyticsError, Completion as Completed, CompressAecs, CompressAecsPair, Descriptor as Iax, Operation as Code,
};
use sterna_idxd::{Completion, Descriptor, Status};

use crate::engine::parts::{Dialect, Meaning};
use crate::kind::{Cause, Kind};
use crate::operation::Operation;
use crate::request::{Answer, Request};

/// The dialect of IAA devices.
#[derive(Debug)]
pub(crate) struct Iaa {
    /// The codes, which a device may read as long as the process lives.
    codes: &'static CompressAecsPair,
    /// The same for a block that is not the last.
    continued: &'static CompressAecsPair,
}

/// Follows a block that does not end its stream: an empty stored block (RFC 1951, 3.2.4), which ends at a byte
/// boundary, where the next stream can follow. The first byte provides the three header bits where the previous block's
/// last byte has no space for them.
const STORED_NOTHING: [u8; 5] = [0, 0, 0, 0xff, 0xff];

impl Iaa {
    pub(crate) fn new() -> Self {
        let codes = |last| Box::leak(Box::new(CompressAecsPair::new(CompressAecs::fixed(last))));
        Self { codes: codes(true), continued: codes(false) }
    }
}

/// Ends the part of a stream that a device has written for `item` at a byte boundary. Returns its length; none if there
/// is no space for that, or if the device's result is impossible.
fn ended(request: &Request, item: usize, completion: &Completed) -> Option<Answer> {
    let (written, bits, room) = (completion.output_bytes, completion.output_bits, request.items[item].room);
    if written == 0 || written > room || bits > 7 {
        return None;
    }
    let unused = (8 - bits) % 8;
    let tail = if unused < 3 { &STORED_NOTHING[..] } else { &STORED_NOTHING[1..] };
    let end = written as usize + tail.len();
    if end > room as usize {
        return Some(Answer::TooLong);
    }
    // SAFETY: the item's part of the batch's own buffer, of which these bytes are within the room; the device is done with it.
    unsafe {
        let last = request.room(item).add(written as usize - 1);
        *last &= 0xff >> unused;
        last.add(1).copy_from_nonoverlapping(tail.as_ptr(), tail.len());
    }
    Some(Answer::Written(end as u32))
}

/// Returns the opcode of `operation`, where there is one.
pub(crate) fn code(operation: Operation) -> Option<u8> {
    match operation {
        Operation::Deflate => Some(Code::Compress as u8),
        Operation::Inflate => Some(Code::Decompress as u8),
        _ => None,
    }
}

impl Dialect for Iaa {
    const KIND: Kind = Kind::Iaa;

    fn takes(&self, request: &Request, item: usize, max_transfer: u64) -> bool {
        let item = &request.items[item];
        item.room > 0 && u64::from(item.bytes) <= max_transfer && u64::from(item.room) <= max_transfer
    }

    fn describe(&self, request: &Request, index: usize, part: Option<usize>, _expect_zero: bool) -> Descriptor {
        let item = &request.items[index];
        let first = item.first.expose_provenance() as u64;
        let room = request.room(index).expose_provenance() as u64;
        let part = part.expect("IAA has no batches");
        let record = request.work.lists().iaa_part(part).address();
        let descriptor = match request.operation {
            Operation::Deflate => {
                let codes = if item.continued { self.continued } else { self.codes };
                Iax::compress(first, item.bytes, room, item.room, codes.address())
            }
            _ => Iax::decompress(room, item.room, first, item.bytes),
        };
        *descriptor.with_record(record).raw()
    }

    fn poll(&self, request: &Request, part: usize) -> Option<Completion> {
        // The first 16 bytes, all that the runner reads, are laid out as in a DSA record.
        request.work.lists().iaa_part(part).poll().map(|_| ())?;
        let bytes = request.work.lists().part_bytes(part);
        let (first, _) = bytes.split_first_chunk::<32>().expect("a record has 64 bytes");
        Some(Completion::from_bytes(first))
    }

    fn read(&self, request: &Request, item: usize, part: usize, _completion: &Completion) -> Meaning {
        let completion = request.work.lists().iaa_part(part).poll().expect("it was seen before");
        let of = &request.items[item];
        match (completion.status, request.operation) {
            (Status::Success, Operation::Deflate) if of.continued => {
                ended(request, item, &completion).map_or(Meaning::Broken(completion.status), Meaning::Answer)
            }
            (Status::Success, Operation::Deflate) if completion.output_bytes <= of.room => {
                Meaning::Answer(Answer::Written(completion.output_bytes))
            }
            (Status::AnalyticsError, Operation::Deflate)
                if completion.error == Some(AnalyticsError::OUTPUT_OVERFLOW) =>
            {
                Meaning::Answer(Answer::TooLong)
            }
            (Status::Success, Operation::Inflate) if completion.output_bytes <= of.bytes => {
                Meaning::Answer(Answer::Written(completion.output_bytes))
            }
            // The device may fail on a valid stream with a longer window: the CPU decides.
            (Status::OutputOverflow | Status::AnalyticsError, _) => Meaning::Rest(Cause::Unsuitable),
            (status, _) if status.is_page_fault() => Meaning::Rest(Cause::PageFault),
            (status, _) if status.is_rejected() => Meaning::Rest(Cause::Unsuitable),
            (status, _) => Meaning::Broken(status),
        }
    }

    /// IAA has no batches, and so no members of one.
    fn member(&self, _: &Request, _: usize, _: &Completion) -> Meaning {
        Meaning::Rest(Cause::DeviceError)
    }
}
