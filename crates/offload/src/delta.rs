//! The sizes of delta records, as Intel DSA has them (architecture specification, "Create Delta Record").

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
