//! Create and apply delta record (8.3.8, 8.3.9).

use super::access::Access;
use super::compare::read_both;
use super::{Report, Scratch, predicate};
use crate::table::dsa::{self, record};
use crate::table::status;

/// Bytes compared at once; the deltas of a piece are written before the next piece is compared.
const PIECE: usize = 4096;

/// Create delta record: source 2's words where they differ.
pub(super) fn create(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    let (first, second) = (dsa::SOURCE.get(descriptor), dsa::DESTINATION.get(descriptor));
    let size = dsa::SIZE.get(descriptor);
    let (target, limit) = (dsa::DELTA_RECORD.get(descriptor), dsa::DELTA_LIMIT.get(descriptor));
    let mut used = 0_u64;
    let mut done = 0;
    let report = |result: u8, used: u64, completed: u64| Report {
        status: predicate(descriptor, dsa::EXPECTED_MASK.get(descriptor) >> result & 1 == 1),
        result,
        completed,
        detail: Some((record::DELTA_SIZE, used)),
        bytes: size,
        ..Report::default()
    };
    let faulted = |stop, operand, used: u64, completed: u64| Report {
        result: u8::from(used > 0),
        detail: Some((record::DELTA_SIZE, used)),
        bytes: completed,
        ..Report::fault(stop, operand, completed)
    };
    while done < size {
        let part = PIECE.min((size - done) as usize);
        let (one, two) = (&mut scratch.first[..part], &mut scratch.second[..part]);
        let (valid, stopped) = read_both(access, (first.wrapping_add(done), second.wrapping_add(done)), one, two);
        let valid = valid - valid % 8;
        scratch.output.clear();
        let mut overflow = None;
        for at in (0..valid).step_by(8) {
            if scratch.first[at..at + 8] == scratch.second[at..at + 8] {
                continue;
            }
            if used + (scratch.output.len() + dsa::DELTA) as u64 > limit {
                overflow = Some(done + at as u64);
                break;
            }
            let offset = ((done + at as u64) / 8) as u16;
            scratch.output.extend_from_slice(&offset.to_le_bytes());
            scratch.output.extend_from_slice(&scratch.second[at..at + 8]);
        }
        if let Err(stop) = access.write(target.wrapping_add(used), &scratch.output) {
            // Whole deltas only: the operation is resumed at the first delta that was not written.
            let whole = stop.done / dsa::DELTA;
            let missing = &scratch.output[whole * dsa::DELTA..];
            let completed = 8 * u64::from(u16::from_le_bytes([missing[0], missing[1]]));
            return faulted(stop, 3, used + (whole * dsa::DELTA) as u64, completed);
        }
        used += scratch.output.len() as u64;
        if let Some(at) = overflow {
            return report(2, used, at);
        }
        done += valid as u64;
        if let Some((stop, operand)) = stopped {
            return faulted(stop, operand, used, done);
        }
    }
    report(u8::from(used > 0), used, 0)
}

/// Apply delta record. Neighbouring deltas are written together.
pub(super) fn apply(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    let (source, destination) = (dsa::SOURCE.get(descriptor), dsa::DESTINATION.get(descriptor));
    let (deltas, size) = (dsa::DELTA_SIZE.get(descriptor), dsa::SIZE.get(descriptor));
    let deltas = deltas - deltas % dsa::DELTA as u64;
    let piece = (super::CHUNK / dsa::DELTA * dsa::DELTA) as u64;
    let mut applied = 0_u64;
    let mut last = None;
    while applied < deltas {
        let part = piece.min(deltas - applied) as usize;
        let read = access.read(source.wrapping_add(applied), &mut scratch.first[..part]);
        let valid = read.as_ref().map_or_else(|stop| stop.done, |()| part) / dsa::DELTA * dsa::DELTA;
        let mut rest = scratch.first[..valid].chunks_exact(dsa::DELTA).peekable();
        let offset_of = |delta: &[u8]| 8 * u64::from(u16::from_le_bytes([delta[0], delta[1]]));
        while let Some(delta) = rest.next() {
            let offset = offset_of(delta);
            let bad = if last.is_some_and(|last| offset <= last) {
                status::DELTA_ORDER
            } else if offset >= size {
                status::DELTA_RANGE
            } else {
                0
            };
            if bad != 0 {
                return Report { completed: applied, bytes: applied, ..Report::error(bad) };
            }
            scratch.output.clear();
            scratch.output.extend_from_slice(&delta[2..]);
            last = Some(offset);
            while let Some(next) = rest.next_if(|next| {
                let here = offset_of(next);
                here == offset + scratch.output.len() as u64 && here < size
            }) {
                scratch.output.extend_from_slice(&next[2..]);
                last = Some(offset_of(next));
            }
            if let Err(stop) = access.write(destination.wrapping_add(offset), &scratch.output) {
                let completed = applied + (stop.done / 8 * dsa::DELTA) as u64;
                return Report { bytes: completed, ..Report::fault(stop, 3, completed) };
            }
            applied += (scratch.output.len() / 8 * dsa::DELTA) as u64;
        }
        if let Err(stop) = read {
            return Report { bytes: applied, ..Report::fault(stop, 1, applied) };
        }
    }
    Report { bytes: applied, ..Report::ok() }
}
