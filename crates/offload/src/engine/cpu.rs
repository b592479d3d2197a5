//! The CPU does everything, and finishes what a device left: on the thread of whoever collects the completion.
//!
//! Guest memory races. Whatever looks at it more than once works on a copy: each byte is read once, by a volatile or
//! vector load of `sterna-memory`.

use std::cell::RefCell;

use sterna_memory::PAGE_SIZE;
use sterna_memory::scan::is_zero_raw;

use crate::engine::Run;
use crate::operation::Operation;
use crate::request::{Answer, Item, Request};

/// Does the items of `run`.
pub(crate) fn execute(request: &mut Request, run: Run) {
    for item in run.first..run.first + run.count {
        one(request, item as usize);
    }
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
            request.answers[index] = first_difference(&item).map_or(Answer::Equal, Answer::Differs);
        }
        Operation::Checksum => {
            let mut crc = Crc::new();
            in_pieces(&item, |_, piece| crc.update(piece));
            request.answers[index] = Answer::Checksum(crc.finish());
        }
        Operation::Copy => {
            let target = request.room(index);
            // SAFETY: the source is within an entered region, the target this item's own room of as many bytes, which no
            // device has any more.
            unsafe { copy_racing(item.first, target, bytes) };
            request.answers[index] = Answer::Written(item.bytes);
        }
        Operation::CopyChecksum => {
            let (target, mut crc) = (request.room(index), Crc::new());
            in_pieces(&item, |at, piece| {
                crc.update(piece);
                // SAFETY: the room has `bytes` bytes, of which this piece is a part; a piece is a local buffer.
                unsafe { target.add(at).copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
            });
            request.answers[index] = Answer::Checksum(crc.finish());
        }
        Operation::Place => {
            // SAFETY: the source is this item's room, the destination within an entered, writable region; both have `bytes`.
            unsafe { item.first.copy_from_nonoverlapping(request.room(index), bytes) };
            request.answers[index] = Answer::Written(item.bytes);
        }
        Operation::CreateDelta => {
            // SAFETY: this item's room, of that length; no device has it any more.
            let room = unsafe { std::slice::from_raw_parts_mut(request.room(index), item.room as usize) };
            request.answers[index] = crate::delta::create(&item, room);
        }
        Operation::ApplyDelta => {
            // SAFETY: this item's room, of that length; no device has it any more.
            let record = unsafe { std::slice::from_raw_parts(request.room(index), item.room as usize) };
            request.answers[index] = crate::delta::apply(record, &item);
        }
        Operation::Deflate => with_scratch(bytes, |input| {
            // SAFETY: the source is within an entered region, the target a buffer of that length.
            unsafe { copy_racing(item.first, input.as_mut_ptr(), bytes) };
            // SAFETY: this item's room, of that length; no device has it any more.
            let room = unsafe { std::slice::from_raw_parts_mut(request.room(index), item.room as usize) };
            request.answers[index] = crate::deflate::deflate(input, room);
        }),
        Operation::Inflate => with_scratch(bytes, |output| {
            // SAFETY: this item's room, of that length; no device has it any more.
            let input = unsafe { std::slice::from_raw_parts(request.room(index), item.room as usize) };
            let answer = crate::deflate::inflate(input, output);
            if let Answer::Written(written) = answer {
                // SAFETY: the destination is within an entered, writable region of at least that many bytes.
                unsafe { item.first.copy_from_nonoverlapping(output.as_ptr(), written as usize) };
            }
            request.answers[index] = answer;
        }),
    }
}

/// Gives `bytes` bytes of this thread's own, of undefined content: codecs look at their data more than once, and so need it to
/// lie still.
fn with_scratch(bytes: usize, work: impl FnOnce(&mut [u8])) {
    thread_local! {
        static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < bytes {
            scratch.resize(bytes, 0);
        }
        work(&mut scratch[..bytes]);
    });
}

/// Copies memory that someone may be writing.
///
/// # Safety
/// Both ranges are mapped, the target is writable, they do not overlap, and nobody else has the target.
pub(crate) unsafe fn copy_racing(source: *const u8, target: *mut u8, bytes: usize) {
    let mut at = 0;
    // SAFETY: all offsets are below `bytes`; unaligned source addresses are read byte by byte.
    unsafe {
        if source.addr().is_multiple_of(8) {
            while at + 8 <= bytes {
                target.add(at).cast::<u64>().write_unaligned(source.add(at).cast::<u64>().read_volatile());
                at += 8;
            }
        }
        while at < bytes {
            target.add(at).write(source.add(at).read_volatile());
            at += 1;
        }
    }
}

/// Gives `item`'s first range piece by piece, each read once, with its offset.
fn in_pieces(item: &Item, mut give: impl FnMut(usize, &[u8])) {
    let mut buffer = [0; PAGE_SIZE];
    let bytes = item.bytes as usize;
    for at in (0..bytes).step_by(PAGE_SIZE) {
        let piece = PAGE_SIZE.min(bytes - at);
        // SAFETY: the range is within an entered region; the buffer is ours and has room for a piece.
        unsafe { copy_racing(item.first.add(at), buffer.as_mut_ptr(), piece) };
        give(at, &buffer[..piece]);
    }
}

/// Where a pair differs first.
fn first_difference(item: &Item) -> Option<u32> {
    let mut other = [0; PAGE_SIZE];
    let mut found = None;
    in_pieces(item, |at, piece| {
        if found.is_none() {
            // SAFETY: the second range is as long as the first and in an entered region; the buffer has room for a piece.
            unsafe { copy_racing(item.second.add(at), other.as_mut_ptr(), piece.len()) };
            if piece != &other[..piece.len()] {
                let inside = piece.iter().zip(&other).position(|(a, b)| a != b).expect("they differ");
                found = Some((at + inside) as u32);
            }
        }
    });
    found
}

/// A CRC-32C in pieces.
struct Crc(crc_fast::Digest);

impl Crc {
    fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(self) -> u32 {
        u32::try_from(self.0.finalize()).expect("a 32-bit CRC fits 32 bits")
    }
}
