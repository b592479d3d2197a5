//! Operations that move bytes: memory move, fill, dualcast; and cache flush, which only translates.

use super::access::Access;
use super::{CHUNK, Limits, Report, Scratch, overlap, tile};
use crate::table::dsa;

/// Memory move (8.3.4). An overlapping copy whose destination lies behind its source is done from the end.
pub(super) fn memory_move(
    descriptor: &[u8; 64],
    limits: &Limits,
    access: &mut Access<'_>,
    scratch: &mut Scratch,
) -> Report {
    let (source, destination) = (dsa::SOURCE.get(descriptor), dsa::DESTINATION.get(descriptor));
    let size = dsa::SIZE.get(descriptor);
    debug_assert!(limits.overlapping_copy || !overlap(source, size, destination, size));
    if destination > source && overlap(source, size, destination, size) {
        return reverse(source, destination, size, access, scratch);
    }
    let mut done = 0;
    while done < size {
        let part = CHUNK.min((size - done) as usize);
        let buffer = &mut scratch.first[..part];
        let read = access.read(source.wrapping_add(done), buffer);
        let valid = read.as_ref().map_or_else(|stop| stop.done, |()| part);
        if let Err(stop) = access.write(destination.wrapping_add(done), &buffer[..valid]) {
            let completed = done + stop.done as u64;
            return Report { bytes: completed, ..Report::fault(stop, 3, completed) };
        }
        done += valid as u64;
        if let Err(stop) = read {
            return Report { bytes: done, ..Report::fault(stop, 1, done) };
        }
    }
    Report { bytes: size, ..Report::ok() }
}

/// Copies from the end, in pieces that touch only one page of either buffer, so that a piece is copied wholly or not at
/// all.
fn reverse(source: u64, destination: u64, size: u64, access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    let mut left = size;
    while left > 0 {
        let in_page = |start: u64| (start.wrapping_add(left - 1) & 0xfff) + 1;
        let part = left.min(in_page(source)).min(in_page(destination));
        let from = left - part;
        let buffer = &mut scratch.first[..part as usize];
        let stopped = match access.read(source.wrapping_add(from), buffer) {
            Err(stop) => Some((stop, 1)),
            Ok(()) => access.write(destination.wrapping_add(from), buffer).err().map(|stop| (stop, 3)),
        };
        if let Some((stop, operand)) = stopped {
            let completed = size - left;
            return Report { result: 1, bytes: completed, ..Report::fault(stop, operand, completed) };
        }
        left = from;
    }
    Report { bytes: size, ..Report::ok() }
}

/// Fill (8.3.5) with 8 bytes.
pub(super) fn fill(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    let pattern = dsa::SOURCE.get(descriptor).to_le_bytes();
    let (destination, size) = (dsa::DESTINATION.get(descriptor), dsa::SIZE.get(descriptor));
    tile(&mut scratch.first[..CHUNK.min(size as usize)], pattern);
    let mut done = 0;
    while done < size {
        let part = CHUNK.min((size - done) as usize);
        if let Err(stop) = access.write(destination.wrapping_add(done), &scratch.first[..part]) {
            let completed = done + stop.done as u64;
            return Report { bytes: completed, ..Report::fault(stop, 3, completed) };
        }
        done += part as u64;
    }
    Report { bytes: size, ..Report::ok() }
}

/// Memory copy with dualcast (8.3.10): stops after the same number of bytes in both.
pub(super) fn dualcast(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    let (source, first) = (dsa::SOURCE.get(descriptor), dsa::DESTINATION.get(descriptor));
    let (second, size) = (dsa::DESTINATION2.get(descriptor), dsa::SIZE.get(descriptor));
    let mut done = 0;
    while done < size {
        // Pieces within one page of the destinations, which agree in bits 11:0.
        let part = (0x1000 - (first.wrapping_add(done) & 0xfff)).min(size - done) as usize;
        let buffer = &mut scratch.first[..part];
        let read = access.read(source.wrapping_add(done), buffer);
        let valid = read.as_ref().map_or_else(|stop| stop.done, |()| part);
        let written = match access.write(first.wrapping_add(done), &buffer[..valid]) {
            Err(stop) => Err((stop, 3)),
            Ok(()) => access.write(second.wrapping_add(done), &buffer[..valid]).map_err(|stop| (stop, 4)),
        };
        if let Err((stop, operand)) = written {
            return Report { bytes: done, ..Report::fault(stop, operand, done) };
        }
        done += valid as u64;
        if let Err(stop) = read {
            return Report { bytes: done, ..Report::fault(stop, 1, done) };
        }
    }
    Report { bytes: size, ..Report::ok() }
}

/// Cache flush (8.3.26): there are no caches to flush, but addresses that may fault.
pub(super) fn cache_flush(descriptor: &[u8; 64], access: &mut Access<'_>) -> Report {
    let (destination, size) = (dsa::DESTINATION.get(descriptor), dsa::SIZE.get(descriptor));
    let mut done = 0;
    while done < size {
        if let Err(stop) = access.read(destination.wrapping_add(done), &mut [0]) {
            return Report { bytes: done, ..Report::fault(stop, 3, done) };
        }
        done += (0x1000 - (destination.wrapping_add(done) & 0xfff)).min(size - done);
    }
    Report { bytes: size, ..Report::ok() }
}
