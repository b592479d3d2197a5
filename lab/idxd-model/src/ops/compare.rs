//! Compare and compare pattern. A difference wins over a page fault behind it (8.3.6, 8.3.7).

use super::access::{Access, Stop};
use super::{CHUNK, Limits, Report, Scratch, predicate, tile};
use crate::table::dsa;

/// Reads a chunk of both sources. Returns how much of both is valid, and the fault that stopped the reading.
pub(super) fn read_both(
    access: &mut Access<'_>,
    at: (u64, u64),
    first: &mut [u8],
    second: &mut [u8],
) -> (usize, Option<(Stop, u8)>) {
    let len = first.len();
    let one = access.read(at.0, first).err();
    let valid = one.as_ref().map_or(len, |stop| stop.done);
    let two = access.read(at.1, &mut second[..valid]).err();
    match (one, two) {
        (_, Some(stop)) => (stop.done, Some((stop, 2))),
        (Some(stop), None) => (valid, Some((stop, 1))),
        (None, None) => (len, None),
    }
}

/// Returns the index of the first byte that differs.
fn difference(first: &[u8], second: &[u8]) -> Option<usize> {
    if first == second { None } else { first.iter().zip(second).position(|(one, two)| one != two) }
}

fn differs(descriptor: &[u8; 64], at: u64, bytes: u64) -> Report {
    let expected = dsa::EXPECTED_RESULT.get(descriptor) & 1 == 1;
    Report { status: predicate(descriptor, expected), result: 1, completed: at, bytes, ..Report::default() }
}

fn equal(descriptor: &[u8; 64], bytes: u64) -> Report {
    let expected = dsa::EXPECTED_RESULT.get(descriptor) & 1 == 0;
    Report { status: predicate(descriptor, expected), bytes, ..Report::default() }
}

/// Compare (8.3.6).
pub(super) fn compare(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    let (first, second) = (dsa::SOURCE.get(descriptor), dsa::DESTINATION.get(descriptor));
    let size = dsa::SIZE.get(descriptor);
    let mut done = 0;
    while done < size {
        let part = CHUNK.min((size - done) as usize);
        let (one, two) = (&mut scratch.first[..part], &mut scratch.second[..part]);
        let (valid, stopped) = read_both(access, (first.wrapping_add(done), second.wrapping_add(done)), one, two);
        if let Some(at) = difference(&scratch.first[..valid], &scratch.second[..valid]) {
            return differs(descriptor, done + at as u64, 2 * (done + at as u64));
        }
        done += valid as u64;
        if let Some((stop, operand)) = stopped {
            return Report { bytes: 2 * done, ..Report::fault(stop, operand, done) };
        }
    }
    equal(descriptor, 2 * size)
}

/// Compare pattern (8.3.7).
pub(super) fn pattern(
    descriptor: &[u8; 64],
    limits: &Limits,
    access: &mut Access<'_>,
    scratch: &mut Scratch,
) -> Report {
    let (source, size) = (dsa::SOURCE.get(descriptor), dsa::SIZE.get(descriptor));
    let pattern = dsa::DESTINATION.get(descriptor).to_le_bytes();
    tile(&mut scratch.second[..CHUNK.min(size as usize)], pattern);
    let mut done = 0;
    while done < size {
        let part = CHUNK.min((size - done) as usize);
        let read = access.read(source.wrapping_add(done), &mut scratch.first[..part]);
        let valid = read.as_ref().map_or_else(|stop| stop.done, |()| part);
        if let Some(at) = difference(&scratch.first[..valid], &scratch.second[..valid]) {
            let at = done + at as u64;
            return differs(descriptor, at - at % u64::from(limits.pattern_granule.max(1)), at);
        }
        // Until a fault the chunks are whole, so the pattern's phase stays.
        done += valid as u64;
        if let Err(stop) = read {
            return Report { bytes: done, ..Report::fault(stop, 1, done) };
        }
    }
    equal(descriptor, size)
}
