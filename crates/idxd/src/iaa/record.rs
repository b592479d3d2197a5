//! IAA completion records: 64 bytes, with checksums (IAA section 6.2). Use them as those of DSA, see
//! [`crate::CompletionRecord`].

use std::sync::atomic::AtomicU64;

use crate::record::{Fault, clear, offset, read, take};
use crate::status::{CODE_BITS, Status};

/// The 64 bytes that an IAA device writes when a descriptor is complete.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct CompletionRecord {
    words: [AtomicU64; 8],
}

const _: () = assert!(size_of::<CompletionRecord>() == 64 && align_of::<CompletionRecord>() == 64);

impl CompletionRecord {
    /// Returns a cleared record.
    pub const fn new() -> Self {
        Self { words: [const { AtomicU64::new(0) }; 8] }
    }

    /// Zeroes the record. Call this before each submission that names the record.
    pub fn clear(&self) {
        clear(&self.words);
    }

    /// Returns the address for [`Descriptor::with_record`](super::Descriptor::with_record).
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    /// Returns the completion once the device has written it.
    pub fn poll(&self) -> Option<Completion> {
        read(&self.words).as_ref().map(Completion::from_bytes)
    }
}

impl Default for CompletionRecord {
    fn default() -> Self {
        Self::new()
    }
}

/// The result of an IAA descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The status.
    pub status: Status,
    /// The error code of an [`Status::AnalyticsError`].
    pub error: Option<AnalyticsError>,
    /// The bytes of input consumed by a decompression that overflowed; otherwise unused, because jobs cannot be
    /// resumed.
    pub bytes_completed: u32,
    /// The access that faulted, if the status reports a fault.
    pub fault: Option<Fault>,
    /// With a status about flags: at least one of the invalid flags.
    pub invalid_flags: u32,
    /// Bytes written to the destination.
    pub output_bytes: u32,
    /// Bits written to the last of these bytes; 0 means all 8.
    pub output_bits: u8,
    /// Exclusive or of the uncompressed data, as 16-bit words.
    pub xor: u16,
    /// CRC of the uncompressed data: gzip's, or CRC-32C if the descriptor requests it.
    pub crc: u32,
    /// The value of a CRC64 operation (bytes 40 to 47).
    pub crc64: u64,
}

impl Completion {
    /// Parses the 64 bytes of an IAA record whose status is not zero.
    pub fn from_bytes(record: &[u8; 64]) -> Completion {
        let status = Status::from_code(record[offset::STATUS] & CODE_BITS);
        Completion {
            status,
            error: (status == Status::AnalyticsError).then(|| AnalyticsError(record[offset::RESULT])),
            bytes_completed: u32::from_le_bytes(take(record, offset::BYTES_COMPLETED)),
            fault: Fault::of(status, record),
            invalid_flags: u32::from_le_bytes(take(record, 16)),
            output_bytes: u32::from_le_bytes(take(record, 24)),
            output_bits: record[28],
            xor: u16::from_le_bytes(take(record, 30)),
            crc: u32::from_le_bytes(take(record, 32)),
            crc64: u64::from_le_bytes(take(record, 40)),
        }
    }
}

/// An error code of an analytics error (table 4-8).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AnalyticsError(
    /// The code.
    pub u8,
);

impl AnalyticsError {
    /// The code for a compression whose output did not fit its buffer (unrecoverable output overflow).
    pub const OUTPUT_OVERFLOW: AnalyticsError = AnalyticsError(0x19);
    /// The code for a distance that is larger than the device's window.
    pub const BAD_DISTANCE: AnalyticsError = AnalyticsError(0x11);

    /// Returns the error's description, after the specification.
    pub const fn description(self) -> &'static str {
        match self.0 {
            0x01 => "header too large to save and restore",
            0x02 => "undefined code-length code",
            0x03 => "the first code of the literal and length tree is 16",
            0x04 => "the first code of the distance tree is 16",
            0x05 => "no valid literal or length code",
            0x06 => "wrong number of literal and length codes",
            0x07 => "wrong number of distance codes",
            0x08 => "bad lengths of the code-length codes",
            0x09 => "bad lengths of the literal and length codes",
            0x0a => "bad lengths of the distance codes",
            0x0b => "bad literal or length code",
            0x0c => "bad distance code",
            0x0d => "invalid block type",
            0x0e => "invalid length of a stored block",
            0x0f => "the stream does not end with an end of block",
            0x10 => "a length decodes to 0 or more than 258",
            0x11 => "a distance decodes to 0 or more than the window",
            0x12 => "a distance goes back before the start",
            0x13 => "time-out: no progress with input and room there",
            0x14 => "Parquet run-length format error",
            0x15 => "a filter's output is too wide for its words",
            0x16 => "the AECS contains an invalid value",
            0x17 => "source 1 is too small",
            0x18 => "source 2 is too small",
            0x19 => "the output does not fit, and the operation cannot be continued",
            0x1a => "a distance spans miniblocks",
            0x1b => "a length spans miniblocks",
            0x1c => "a block does not start at a miniblock",
            0x1d => "the device's own verification failed",
            0x1e => "a Huffman code of no length was needed",
            0x1f => "invalid bit width in a Parquet run-length stream",
            0x20 => "the input ended before the number of elements given",
            0x23 => "more than 286 literal and length codes",
            0x24 => "more than 30 distance codes",
            0x25 => "ended by an administrative time limit: submit it again",
            0x26 => "invalid cryptographic flag",
            0x27 => "invalid size for a cryptographic operation",
            0x28 => "too much data for header generation in one pass",
            0x29 => "ended early: it does not shrink enough",
            0x2a => "no deflate header can be made of these codes",
            0x2b => "the descriptor before was not a multiple of the miniblock",
            0x2c => "the deflate header does not fit the output accumulator",
            0x2d => "the AECS is of the other format",
            0x2e => "inconsistent decompression state",
            _ => "an error code that the specification does not define",
        }
    }
}

impl std::fmt::Debug for AnalyticsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AnalyticsError({:#04x}: {})", self.0, self.description())
    }
}

impl std::fmt::Display for AnalyticsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "error {:#04x}: {}", self.0, self.description())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_at_the_offsets_of_the_specification() {
        let mut record = [0xee_u8; 64];
        record[0] = 0x0a;
        record[1] = 0x11;
        record[4..8].copy_from_slice(&11_u32.to_le_bytes());
        record[16..20].copy_from_slice(&0x8001_u32.to_le_bytes());
        record[24..28].copy_from_slice(&2222_u32.to_le_bytes());
        record[28] = 3;
        record[30..32].copy_from_slice(&0xabcd_u16.to_le_bytes());
        record[32..36].copy_from_slice(&0x1234_5678_u32.to_le_bytes());
        record[40..48].copy_from_slice(&0x0123_4567_89ab_cdef_u64.to_le_bytes());
        let completion = Completion::from_bytes(&record);
        assert_eq!(completion.status, Status::AnalyticsError);
        assert_eq!(completion.error, Some(AnalyticsError::BAD_DISTANCE));
        assert_eq!((completion.bytes_completed, completion.invalid_flags), (11, 0x8001));
        assert_eq!((completion.output_bytes, completion.output_bits), (2222, 3));
        assert_eq!((completion.xor, completion.crc), (0xabcd, 0x1234_5678));
        assert_eq!(completion.crc64, 0x0123_4567_89ab_cdef);
        assert_eq!(completion.fault, None);
    }

    #[test]
    fn the_error_code_counts_only_with_its_status() {
        let mut record = [0; 64];
        (record[0], record[1]) = (0x84, 0x11);
        record[8..16].copy_from_slice(&0x5000_u64.to_le_bytes());
        let completion = Completion::from_bytes(&record);
        assert_eq!(completion.error, None);
        assert_eq!(completion.fault, Some(Fault { address: 0x5000, write: true, info: 0 }));
    }

    #[test]
    fn a_record_has_no_completion_until_its_status_is_written() {
        let record = CompletionRecord::new();
        assert_eq!(record.poll(), None);
        assert_eq!(record.address() % 64, 0);
        record.words[0].store(1, std::sync::atomic::Ordering::Release);
        assert_eq!(record.poll().unwrap().status, Status::Success);
        record.clear();
        assert_eq!(record.poll(), None);
    }
}
