//! Delta records as Intel DSA makes them (architecture specification, "Create Delta Record"): per differing 8 bytes, a
//! little-endian 16-bit offset in units of 8 bytes and the 8 bytes of the second source.

use crate::engine::cpu::copy_racing;
use crate::request::{Answer, Item};

/// Bytes of an entry.
pub(crate) const ENTRY: usize = 10;

/// Longest range: what 16 bits of 8-byte units reach.
pub(crate) const MOST_BYTES: usize = 512 << 10;

/// The shortest room a device takes for a record.
const SHORTEST: usize = 80;

/// Room for the record of a range of `bytes`: a longer record is of no use.
pub(crate) fn room(bytes: usize) -> usize {
    (bytes - bytes % ENTRY).max(SHORTEST)
}

/// Makes the record of `item`'s pair in `room`.
pub(crate) fn create(item: &Item, room: &mut [u8]) -> Answer {
    let mut written = 0;
    for word in 0..item.bytes as usize / 8 {
        let (mut first, mut second) = ([0; 8], [0; 8]);
        // SAFETY: both ranges are in entered regions and `bytes` long; the targets are 8 bytes each.
        unsafe {
            copy_racing(item.first.add(word * 8), first.as_mut_ptr(), 8);
            copy_racing(item.second.add(word * 8), second.as_mut_ptr(), 8);
        }
        if first != second {
            let Some(entry) = room.get_mut(written..written + ENTRY) else { return Answer::TooLong };
            entry[..2].copy_from_slice(&(word as u16).to_le_bytes());
            entry[2..].copy_from_slice(&second);
            written += ENTRY;
        }
    }
    if written == 0 { Answer::Equal } else { Answer::Written(written as u32) }
}

/// Applies `record` to `item`'s range, unless an offset is not above the one before or outside the range.
pub(crate) fn apply(record: &[u8], item: &Item) -> Answer {
    let offset = |entry: &[u8]| usize::from(u16::from_le_bytes([entry[0], entry[1]])) * 8;
    let mut least = 0;
    for entry in record.chunks_exact(ENTRY) {
        let at = offset(entry);
        if at < least || at + 8 > item.bytes as usize {
            return Answer::Malformed;
        }
        least = at + 8;
    }
    for entry in record.chunks_exact(ENTRY) {
        // SAFETY: the offset was checked to lie 8 bytes or more before the end of the range, which is in an entered, writable
        // region.
        unsafe { item.first.add(offset(entry)).copy_from_nonoverlapping(entry[2..].as_ptr(), 8) };
    }
    Answer::Written(item.bytes)
}
