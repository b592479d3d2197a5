//! Intel DSA: the descriptor of each operation, and the meaning of its completion record.

use sterna_idxd::{Completion, Descriptor, Operation as Code, Status};

use crate::engine::parts::{Dialect, Meaning};
use crate::kind::{Cause, Kind};
use crate::operation::Operation;
use crate::request::{Answer, Request};

/// The dialect of DSA devices.
#[derive(Debug)]
pub(crate) struct Dsa;

/// Returns the opcode of `operation`, where there is one.
pub(crate) fn code(operation: Operation) -> Option<u8> {
    let code = match operation {
        Operation::ZeroMap => Code::ComparePattern,
        Operation::Compare => Code::Compare,
        Operation::Checksum => Code::Crc,
        Operation::Copy | Operation::Place => Code::Memmove,
        Operation::CopyChecksum => Code::CopyCrc,
        Operation::CreateDelta => Code::CreateDelta,
        Operation::ApplyDelta => Code::ApplyDelta,
        Operation::Deflate | Operation::Inflate => return None,
    };
    Some(code as u8)
}

impl Dialect for Dsa {
    const KIND: Kind = Kind::Dsa;

    fn takes(&self, request: &Request, item: usize, max_transfer: u64) -> bool {
        let item = &request.items[item];
        // The device refuses a delta record of no entries, or one shorter than an entry (status 15).
        let record = request.operation != Operation::ApplyDelta || item.room > 0;
        u64::from(item.bytes) <= max_transfer && u64::from(item.room) <= max_transfer && record
    }

    fn describe(&self, request: &Request, index: usize, part: Option<usize>, expect_zero: bool) -> Descriptor {
        let item = &request.items[index];
        let first = item.first.expose_provenance() as u64;
        let second = item.second.expose_provenance() as u64;
        let room = || request.room(index).expose_provenance() as u64;
        let bytes = item.bytes;
        let descriptor = match request.operation {
            // Result 0 means that all of the range is the pattern. Only members of batches have an expected result,
            // from which the batch's status is made.
            Operation::ZeroMap if part.is_none() => {
                Descriptor::compare_pattern(first, 0, bytes).expecting(u8::from(!expect_zero))
            }
            Operation::ZeroMap => Descriptor::compare_pattern(first, 0, bytes),
            Operation::Compare => Descriptor::compare(first, second, bytes),
            Operation::Checksum => Descriptor::crc(first, bytes, 0),
            Operation::Copy => Descriptor::memmove(first, room(), bytes),
            Operation::CopyChecksum => Descriptor::copy_crc(first, room(), bytes, 0),
            Operation::CreateDelta => Descriptor::create_delta(first, second, bytes, room(), item.room),
            Operation::ApplyDelta => Descriptor::apply_delta(room(), item.room, first, bytes),
            Operation::Place => Descriptor::memmove(room(), first, bytes),
            Operation::Deflate | Operation::Inflate => unreachable!("it has no code"),
        };
        match part {
            Some(part) => descriptor.with_record(request.work.lists().part(part).address()),
            None => descriptor,
        }
    }

    fn poll(&self, request: &Request, part: usize) -> Option<Completion> {
        request.work.lists().part(part).poll()
    }

    fn read(&self, request: &Request, item: usize, _part: usize, completion: &Completion) -> Meaning {
        meaning(request, item, completion)
    }

    fn member(&self, request: &Request, item: usize, completion: &Completion) -> Meaning {
        meaning(request, item, completion)
    }
}

/// Returns what the record of item `item` means, whether it is a part of its own or a member of a batch.
fn meaning(request: &Request, item: usize, completion: &Completion) -> Meaning {
    let Completion { status, result, bytes_completed, .. } = *completion;
    let of = request.items[item];
    match (status, request.operation) {
        (Status::DeltaOffsetOrder | Status::DeltaOffsetRange, Operation::ApplyDelta) => {
            Meaning::Answer(Answer::Malformed)
        }
        (status, _) if status.is_page_fault() => Meaning::Rest(Cause::PageFault),
        (status, _) if status.is_rejected() => Meaning::Rest(Cause::Unsuitable),
        (status, _) if !status.is_done() => Meaning::Broken(status),
        (_, Operation::ZeroMap) => {
            if result == 0 {
                Meaning::Zero
            } else {
                Meaning::NotZero
            }
        }
        (_, Operation::Compare) if result == 0 => Meaning::Answer(Answer::Equal),
        (_, Operation::Compare) if bytes_completed < of.bytes => Meaning::Answer(Answer::Differs(bytes_completed)),
        (_, Operation::Checksum | Operation::CopyChecksum) => Meaning::Answer(Answer::Checksum(completion.crc())),
        (_, Operation::CreateDelta) => match (result, completion.delta_size()) {
            (0, _) => Meaning::Answer(Answer::Equal),
            // A record of no entries would be result 0, and a record cannot exceed its space: a device that reports
            // either is wrong.
            (1, size) if size > 0 && size <= of.room && size % crate::delta::ENTRY as u32 == 0 => {
                Meaning::Answer(Answer::Written(size))
            }
            (2, _) => Meaning::Answer(Answer::TooLong),
            _ => Meaning::Broken(status),
        },
        (_, Operation::Copy | Operation::Place | Operation::ApplyDelta) => Meaning::Answer(Answer::Written(of.bytes)),
        // A difference beyond the end: the device is wrong, and none of its results can be trusted.
        _ => Meaning::Broken(status),
    }
}
