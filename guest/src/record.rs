//! What stands in the files that a guest writes and reads: records that say which file they are of, and which one of it they are. Host and
//! guest make the same ones, so each can tell what the other must find.

use crate::content::mix;

/// Bytes in a record.
pub const RECORD_BYTES: usize = 64;
/// How many records a file of slots has; each is written again and again.
pub const SLOTS: u64 = 256;

/// A file, or a directory of files, of the directory that is shared with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum File {
    /// Has [`SLOTS`] records from the beginning, which the host wrote; the guest reads it.
    Given,
    /// The guest appends one record after another.
    Journal,
    /// Record N stands in [`slot`] N, over the one that stood there before.
    Slots,
    /// As `Slots`, in a file that the guest deleted before it wrote to it.
    Deleted,
    /// Files that the guest makes, named by their number; each is one record.
    Made,
    /// Files of the host, of which the guest only knows the names.
    Names,
}

impl File {
    /// Its name there.
    pub const fn name(self) -> &'static str {
        match self {
            File::Given => "given",
            File::Journal => "journal",
            File::Slots => "slots",
            File::Deleted => "deleted",
            File::Made => "made",
            File::Names => "names",
        }
    }
}

/// Record `number` of `file`: its number, and bytes that follow from both.
pub fn record(file: File, number: u64) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    for (word, place) in bytes.chunks_exact_mut(8).enumerate() {
        let value = if word == 0 { number } else { mix(mix(number) ^ ((file as u64) << 8) ^ word as u64) };
        place.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// Where record `number` goes: any order but that of the file, all slots equally often.
pub const fn slot(number: u64) -> u64 {
    number.wrapping_mul(91) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_differ_by_file_and_number_and_every_slot_has_its_turn() {
        let journal = record(File::Journal, 7);
        assert_eq!(journal[..8], 7u64.to_le_bytes());
        assert!([record(File::Slots, 7), record(File::Journal, 8)].iter().all(|other| other[8..] != journal[8..]));
        let mut slots: Vec<u64> = (0..SLOTS).map(slot).collect();
        slots.sort_unstable();
        assert_eq!(slots, (0..SLOTS).collect::<Vec<_>>());
    }
}
