//! The CPU's engine. It does every operation, and finishes what a device left undone, on the thread that collects the
//! completion.
//!
//! Guest memory races. Code that needs the same bytes more than once works on a copy: each byte is read once, by a
//! volatile or vector load of `sterna-memory`.

use std::cell::RefCell;

use sterna_memory::compare::first_difference_raw;
use sterna_memory::copy::{copy_crc32c_raw, copy_raw, crc32c_raw};
use sterna_memory::delta::{self, Created};
use sterna_memory::scan::is_zero_raw;

use crate::deflate::{Deflater, Inflater};
use crate::operation::Operation;
use crate::request::{Answer, Request};
use crate::work::Run;

/// Does the items of `run`.
pub(crate) fn execute(request: &mut Request, run: Run) {
    for item in run.first..run.first + run.count {
        one(request, item as usize);
    }
}

/// Returns the checksum of the item's memory as it is now: a guest may be writing it.
pub(crate) fn current_checksum(request: &Request, item: usize) -> u32 {
    let item = request.items[item];
    // SAFETY: the range is within a region that the request has entered.
    unsafe { crc32c_raw(item.first, item.bytes as usize, 0) }
}

fn one(request: &mut Request, index: usize) {
    let item = request.items[index];
    let bytes = item.bytes as usize;
    match request.operation {
        Operation::ZeroMap => {
            // SAFETY: the page is within a region that the request has entered: mapped and readable.
            if unsafe { is_zero_raw(item.first, bytes) } {
                request.set_zero(index);
            } else {
                request.clear_zero(index);
            }
        }
        Operation::Compare => {
            // SAFETY: both ranges are within entered regions.
            let difference = unsafe { first_difference_raw(item.first, item.second, bytes) };
            request.answers[index] = difference.map_or(Answer::Equal, |at| Answer::Differs(at as u32));
        }
        Operation::Checksum => {
            // SAFETY: the range is within an entered region.
            request.answers[index] = Answer::Checksum(unsafe { crc32c_raw(item.first, bytes, 0) });
        }
        Operation::Copy => {
            let target = request.room(index);
            // SAFETY: the source is within an entered region, the target this item's own room of as many bytes, which no
            // device has any more.
            unsafe { copy_raw(item.first, target, bytes) };
            request.answers[index] = Answer::Written(item.bytes);
        }
        Operation::CopyChecksum => {
            // SAFETY: this item's room, of that length; no device has it any more.
            let room = unsafe { std::slice::from_raw_parts_mut(request.room(index), bytes) };
            // SAFETY: the source is within an entered region, as long as the room.
            request.answers[index] = Answer::Checksum(unsafe { copy_crc32c_raw(item.first, room, 0) });
        }
        Operation::Place => {
            // SAFETY: the source is this item's room, the destination within an entered, writable region; both have `bytes`.
            unsafe { item.first.copy_from_nonoverlapping(request.room(index), bytes) };
            request.answers[index] = Answer::Written(item.bytes);
        }
        Operation::CreateDelta => {
            // SAFETY: this item's room, of that length; no device has it any more.
            let room = unsafe { std::slice::from_raw_parts_mut(request.room(index), item.room as usize) };
            // SAFETY: both ranges are within entered regions; the room is the batch's own.
            let created = unsafe { delta::create_raw(item.first, item.second, bytes, room) };
            request.answers[index] = match created.expect("lengths and addresses were checked when it was pushed") {
                Created::Same => Answer::Equal,
                Created::Complete { record } => Answer::Written(record as u32),
                Created::Overflow { .. } => Answer::TooLong,
            };
        }
        Operation::ApplyDelta => {
            // SAFETY: this item's room, of that length; no device has it any more.
            let record = unsafe { std::slice::from_raw_parts(request.room(index), item.room as usize) };
            // SAFETY: the range is within an entered, writable region; the record is the batch's own.
            request.answers[index] = match unsafe { delta::apply_raw(record, item.first, bytes) } {
                Ok(()) => Answer::Written(item.bytes),
                Err(_) => Answer::Malformed,
            };
        }
        Operation::Deflate => with_scratch(bytes, |input, codec| {
            // SAFETY: the source is within an entered region, the target a buffer of that length.
            unsafe { copy_raw(item.first, input.as_mut_ptr(), bytes) };
            // SAFETY: this item's room, of that length; no device has it any more.
            let room = unsafe { std::slice::from_raw_parts_mut(request.room(index), item.room as usize) };
            let deflater = codec.deflater.get_or_insert_default();
            let written = match item.continued {
                true => deflater.deflate_continued(input, room),
                false => deflater.deflate(input, room),
            };
            request.answers[index] = written.map_or(Answer::TooLong, |written| Answer::Written(written as u32));
        }),
        Operation::Inflate => with_scratch(bytes, |output, codec| {
            // SAFETY: this item's room, of that length; no device has it any more.
            let input = unsafe { std::slice::from_raw_parts(request.room(index), item.room as usize) };
            let answer = codec.inflater.get_or_insert_default().inflate(input, output);
            if let Answer::Written(written) = answer {
                // SAFETY: the destination is within an entered, writable region of at least that many bytes.
                unsafe { item.first.copy_from_nonoverlapping(output.as_ptr(), written as usize) };
            }
            request.answers[index] = answer;
        }),
    }
}

/// A thread's compressor and decompressor, made at first use.
#[derive(Default)]
struct Codec {
    deflater: Option<Deflater>,
    inflater: Option<Inflater>,
}

/// Lends `bytes` bytes of this thread's own memory, of undefined content, and the thread's codec: codecs read their
/// data more than once, and so need stable memory.
fn with_scratch(bytes: usize, work: impl FnOnce(&mut [u8], &mut Codec)) {
    thread_local! {
        static SCRATCH: RefCell<(Vec<u8>, Codec)> = RefCell::default();
    }
    SCRATCH.with_borrow_mut(|(scratch, codec)| {
        if scratch.len() < bytes {
            scratch.resize(bytes, 0);
        }
        work(&mut scratch[..bytes], codec);
    });
}
