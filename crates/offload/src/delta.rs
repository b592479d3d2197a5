//! The sizes of delta records in Intel DSA (architecture specification, "Create Delta Record").

/// Bytes of an entry.
pub(crate) const ENTRY: usize = 10;

/// The longest range: the reach of 16-bit offsets in units of 8 bytes.
pub(crate) const MAX_BYTES: usize = 512 << 10;

/// The shortest space that a device accepts for a record.
const SHORTEST: usize = 80;

/// Returns the space for the record of a range of `bytes`: a longer record is of no use.
pub(crate) fn room(bytes: usize) -> usize {
    room_of(bytes, bytes)
}

/// As [`room`], where a record of more than `most` bytes is of no use, as far as the device accepts so little space.
pub(crate) fn room_of(bytes: usize, most: usize) -> usize {
    let most = most.min(bytes);
    (most - most % ENTRY).max(SHORTEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_of_whole_entries_no_longer_than_the_range_and_never_shorter_than_a_device_takes() {
        assert_eq!([8, 79, 80, 4096].map(room), [80, 80, 80, 4090]);
        assert_eq!(
            [0, 80, 89, 90, 2040, 4096, 9000].map(|most| room_of(4096, most)),
            [80, 80, 80, 90, 2040, 4090, 4090]
        );
        assert_eq!(room_of(64, 2040), 80);
    }
}
