//! Intel IAA: deflate with the fixed codes, and inflate. Nothing is ever completed in part: a job that met a fault is the
//! CPU's from its start.

use sterna_idxd::iaa::{AnalyticsError, CompressAecs, CompressAecsPair, Descriptor as Iax, Operation as Code};
use sterna_idxd::{Completion, Descriptor, Status};

use crate::engine::parts::{Dialect, Meaning};
use crate::engine::{Cause, Kind};
use crate::operation::Operation;
use crate::request::{Answer, Request};

/// What IAA devices are told.
#[derive(Debug)]
pub(crate) struct Iaa {
    /// The codes, which a device may be reading as long as the process lives.
    codes: &'static CompressAecsPair,
}

impl Iaa {
    pub(crate) fn new() -> Self {
        Self { codes: Box::leak(Box::new(CompressAecsPair::new(CompressAecs::fixed(true)))) }
    }
}

/// The code of `operation`, where there is one.
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
            Operation::Deflate => Iax::compress(first, item.bytes, room, item.room, self.codes.address()),
            _ => Iax::decompress(room, item.room, first, item.bytes),
        };
        *descriptor.with_record(record).raw()
    }

    fn poll(&self, request: &Request, part: usize) -> Option<Completion> {
        // The first 16 bytes, which is all that the runner looks at, are those of a DSA record.
        request.work.lists().iaa_part(part).poll().map(|_| ())?;
        let bytes = request.work.lists().part_bytes(part);
        let (first, _) = bytes.split_first_chunk::<32>().expect("a record has 64 bytes");
        Some(Completion::from_bytes(first))
    }

    fn read(&self, request: &Request, item: usize, part: usize, _completion: &Completion) -> Meaning {
        let completion = request.work.lists().iaa_part(part).poll().expect("it was seen before");
        let of = &request.items[item];
        match (completion.status, request.operation) {
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
            // What the device does not read may still be a stream with a longer window: the CPU has the last word.
            (Status::OutputOverflow | Status::AnalyticsError, _) => Meaning::Rest(Cause::Unsuitable),
            (status, _) if status.is_page_fault() => Meaning::Rest(Cause::PageFault),
            (status, _) if status.is_rejected() => Meaning::Rest(Cause::Unsuitable),
            (status, _) => Meaning::Broken(status),
        }
    }
}
