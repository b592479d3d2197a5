//! The 64-byte descriptors of an IAA device (IAA sections 6.1 and 6.3).

use std::fmt;

use super::aecs::{COMPRESS_AECS_BYTES, DECOMPRESS_AECS_BYTES, HISTOGRAM_BYTES};
use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor as Raw};
use crate::flags::flag as common;

/// Operation codes (table 6-2) for which this crate builds descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Operation {
    /// Does nothing but complete.
    Noop = 0x00,
    /// Completes when all earlier submissions to the same queue have completed.
    Drain = 0x02,
    /// Inflates.
    Decompress = 0x42,
    /// Deflates, or gathers statistics for it.
    Compress = 0x43,
    /// A CRC of up to 64 bits.
    Crc64 = 0x44,
}

/// The flags of IAA that DSA does not have.
pub mod flag {
    /// Operation flags: source 2 is read as AECS (value 1 of the field in bits 17:16).
    pub const READ_AECS: u32 = 1 << 16;
    /// Operation flags: the AECS is written at completion (value 1 of bits 19:18).
    pub const WRITE_AECS: u32 = 1 << 18;
    /// Operation flags: the AECS is written only when the output did not fit (value 2 of bits 19:18).
    pub const WRITE_AECS_ON_OVERFLOW: u32 = 2 << 18;
    /// Operation flags: the checksum is CRC-32C (RFC 3720) instead of the CRC-32 of gzip.
    pub const CRC32C: u32 = 1 << 21;
    /// Operation flags: the AECS is read from its second half and written to its first.
    pub const TOGGLE_AECS: u32 = 1 << 22;

    /// Compression flags, bytes 38 and 39: count tokens instead of writing them.
    pub const STATISTICS: u16 = 1 << 0;
    /// Compression, decompression: write a last word in part.
    pub const FLUSH_OUTPUT: u16 = 1 << 1;
    /// Compression: append an end of block (value 1 of bits 3:2).
    pub const APPEND_END_OF_BLOCK: u16 = 1 << 2;

    /// Decompression: must be set.
    pub const ENABLE_DECOMPRESSION: u16 = 1 << 0;
    /// Decompression: stop at an end of block.
    pub const STOP_ON_END_OF_BLOCK: u16 = 1 << 2;
    /// Decompression: it is an error if the last token is not an end of block.
    pub const CHECK_END_OF_BLOCK: u16 = 1 << 3;
    /// Decompression: the two flags above refer only to the end of the final block.
    pub const FINAL_END_OF_BLOCK: u16 = 1 << 4;
    /// Decompression: compute checksums, write nothing.
    pub const SUPPRESS_OUTPUT: u16 = 1 << 9;

    /// CRC64: start from all ones and invert the result.
    pub const CRC64_INVERT: u16 = 1 << 14;
    /// CRC64: bit 0 of each byte is the most significant.
    pub const CRC64_BIT_0_FIRST: u16 = 1 << 15;
}

/// Bytes that an output needs beyond its input so that incompressible data fits as stored blocks: the header bits and 4
/// bytes per 65 535, for jobs of up to 1 MiB.
pub const STORED_SLACK: usize = 128;

/// The order in which the bits of a byte enter a CRC64 (section 3.10.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BitOrder {
    /// Bit 7 of a byte is the most significant ("normal").
    Bit7First,
    /// Bit 0 of a byte is the most significant ("reflected").
    Bit0First,
}

/// An IAA descriptor. A queue accepts the same 64 bytes as for DSA, but their meaning differs: pass [`raw`](Self::raw)
/// to [`WorkQueue::submit`](crate::WorkQueue::submit).
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor(Raw);

/// Offsets of the fields that differ from DSA's.
mod at {
    pub(super) const OPERATION: usize = 7;
    pub(super) const RECORD: usize = 8;
    pub(super) const SOURCE_1: usize = 16;
    pub(super) const DESTINATION: usize = 24;
    pub(super) const SOURCE_1_BYTES: usize = 32;
    pub(super) const OPERATION_FLAGS: usize = 38;
    pub(super) const SOURCE_2: usize = 40;
    pub(super) const DESTINATION_BYTES: usize = 48;
    pub(super) const SOURCE_2_BYTES: usize = 52;
    pub(super) const POLYNOMIAL: usize = 56;
}

/// All operations except no-op and drain must have a record (table 6-3, bits 2 and 3).
const RESULT_FLAGS: u32 = common::RECORD_ADDRESS_VALID | common::REQUEST_RECORD;

impl Descriptor {
    /// Does nothing and completes.
    pub fn noop() -> Self {
        Self::new(Operation::Noop, 0)
    }

    /// Completes when all earlier submissions of this process to the same queue have completed. The descriptor must
    /// have a record.
    pub fn drain() -> Self {
        Self::new(Operation::Drain, 0)
    }

    /// Compresses `bytes` bytes into one deflate block, header included, with the codes and the header in the
    /// [`CompressAecs`](super::aecs::CompressAecs) at `aecs` (32-byte aligned).
    pub fn compress(source: u64, bytes: u32, destination: u64, capacity: u32, aecs: u64) -> Self {
        Self::new(Operation::Compress, RESULT_FLAGS | flag::READ_AECS)
            .data(source, bytes, destination, capacity)
            .second(aecs, COMPRESS_AECS_BYTES as u32)
            .operation_flags(flag::FLUSH_OUTPUT | flag::APPEND_END_OF_BLOCK)
    }

    /// Counts the tokens that compressing `bytes` bytes would write, into the [`Histogram`](super::Histogram) at
    /// `histogram`.
    pub fn statistics(source: u64, bytes: u32, histogram: u64) -> Self {
        Self::new(Operation::Compress, RESULT_FLAGS)
            .data(source, bytes, histogram, HISTOGRAM_BYTES as u32)
            .operation_flags(flag::STATISTICS)
    }

    /// Decompresses a whole deflate stream, up to the end of its final block; anything else is an error.
    pub fn decompress(source: u64, bytes: u32, destination: u64, capacity: u32) -> Self {
        Self::new(Operation::Decompress, RESULT_FLAGS)
            .data(source, bytes, destination, capacity)
            .operation_flags(INFLATE_FLAGS)
    }

    /// Decompresses without writing any output, to compare the checksum in the record with that of the compression:
    /// Intel recommends this check after each compression.
    pub fn verify(source: u64, bytes: u32) -> Self {
        Self::new(Operation::Decompress, RESULT_FLAGS)
            .data(source, bytes, 0, 0)
            .operation_flags(INFLATE_FLAGS | flag::SUPPRESS_OUTPUT)
    }

    /// Computes a CRC with the given polynomial, which is in the *high* bits, without its leading one: 0x1edc6f41 << 32
    /// is CRC-32C. `invert` starts from all ones and inverts the result.
    pub fn crc64(source: u64, bytes: u32, polynomial: u64, order: BitOrder, invert: bool) -> Self {
        let order = if order == BitOrder::Bit0First { flag::CRC64_BIT_0_FIRST } else { 0 };
        let invert = if invert { flag::CRC64_INVERT } else { 0 };
        Self(
            Self::new(Operation::Crc64, RESULT_FLAGS)
                .data(source, bytes, 0, 0)
                .operation_flags(order | invert)
                .0
                .put(at::POLYNOMIAL, polynomial.to_le_bytes()),
        )
    }

    /// Has the completion record written to `address`, which is **64**-byte aligned.
    #[must_use]
    pub fn with_record(self, address: u64) -> Self {
        Self(self.0.put(at::RECORD, address.to_le_bytes()).with_flags(RESULT_FLAGS))
    }

    /// Makes the device wait for page faults to be resolved. Legal only on queues with block-on-fault enabled; no-op
    /// and drain are returned unchanged.
    #[must_use]
    pub fn blocking_on_fault(self) -> Self {
        if self.works() { Self(self.0.with_flags(common::BLOCK_ON_FAULT)) } else { self }
    }

    /// Hints that the output should go to the cache. Legal only if the device's capabilities include cache control;
    /// operations without output are returned unchanged.
    #[must_use]
    pub fn to_cache(self) -> Self {
        let writes = matches!(self.operation_code(), 0x42 | 0x43);
        if writes { Self(self.0.with_flags(common::CACHE_CONTROL_1)) } else { self }
    }

    /// Has the record's checksum computed as CRC-32C instead of gzip's CRC-32, in compressions and decompressions.
    #[must_use]
    pub fn with_crc32c(self) -> Self {
        let has = matches!(self.operation_code(), 0x42 | 0x43);
        if has { Self(self.0.with_flags(flag::CRC32C)) } else { self }
    }

    /// Makes a decompression keep its state in the [`DecompressAecsPair`](super::DecompressAecsPair) at `pair` if the
    /// output does not fit (status [`OutputOverflow`](crate::Status::OutputOverflow)), so that
    /// [`continued`](Self::continued) can continue. Other operations are returned unchanged.
    #[must_use]
    pub fn keeping_state(self, pair: u64) -> Self {
        if self.operation_code() != Operation::Decompress as u8 {
            return self;
        }
        self.second(pair, DECOMPRESS_AECS_BYTES as u32).with_flags(flag::WRITE_AECS_ON_OVERFLOW)
    }

    /// Returns the descriptor for the rest of a decompression whose output did not fit and that [kept its
    /// state](Self::keeping_state), into another buffer. `consumed` is the record's bytes completed. `None` if this is
    /// not such a decompression, or `consumed` is impossible.
    pub fn continued(self, consumed: u32, destination: u64, capacity: u32) -> Option<Self> {
        let left = self.bytes().checked_sub(consumed)?;
        let keeps = self.0.flags() & flag::WRITE_AECS_ON_OVERFLOW != 0;
        if self.operation_code() != Operation::Decompress as u8 || !keeps {
            return None;
        }
        // The device reads the half that it has written, and writes the other half next (section 3.2).
        let toggled = (self.0.flags() ^ flag::TOGGLE_AECS) & flag::TOGGLE_AECS;
        let base = self.0.flags() & !(flag::TOGGLE_AECS | flag::READ_AECS);
        let moved = self.data(self.0.source().wrapping_add(consumed.into()), left, destination, capacity);
        let [a, b, c, _] = (base | flag::READ_AECS | toggled).to_le_bytes();
        Some(Self(moved.0.put(crate::descriptor::offset::FLAGS, [a, b, c])))
    }

    /// Returns the descriptor in the form that a queue accepts.
    pub fn raw(&self) -> &Raw {
        &self.0
    }

    /// Returns the 64 bytes.
    pub fn as_bytes(&self) -> &[u8; DESCRIPTOR_BYTES] {
        self.0.as_bytes()
    }

    /// Returns the number of bytes of source 1.
    pub fn bytes(&self) -> u32 {
        self.0.bytes()
    }

    fn operation_code(&self) -> u8 {
        self.0.operation_code()
    }

    /// Returns whether the operation accesses data.
    fn works(&self) -> bool {
        self.operation_code() >= 0x40
    }

    fn new(operation: Operation, flags: u32) -> Self {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[at::OPERATION] = operation as u8;
        Self(Raw::from_bytes(bytes).with_flags(flags))
    }

    fn data(self, source: u64, bytes: u32, destination: u64, capacity: u32) -> Self {
        Self(
            self.0
                .put(at::SOURCE_1, source.to_le_bytes())
                .put(at::SOURCE_1_BYTES, bytes.to_le_bytes())
                .put(at::DESTINATION, destination.to_le_bytes())
                .put(at::DESTINATION_BYTES, capacity.to_le_bytes()),
        )
    }

    fn second(self, address: u64, bytes: u32) -> Self {
        Self(self.0.put(at::SOURCE_2, address.to_le_bytes()).put(at::SOURCE_2_BYTES, bytes.to_le_bytes()))
    }

    fn operation_flags(self, flags: u16) -> Self {
        Self(self.0.put(at::OPERATION_FLAGS, flags.to_le_bytes()))
    }

    fn with_flags(self, flags: u32) -> Self {
        Self(self.0.with_flags(flags))
    }
}

/// The flags for decompressing a whole stream, up to the end of its final block.
const INFLATE_FLAGS: u16 = flag::ENABLE_DECOMPRESSION
    | flag::FLUSH_OUTPUT
    | flag::STOP_ON_END_OF_BLOCK
    | flag::CHECK_END_OF_BLOCK
    | flag::FINAL_END_OF_BLOCK;

impl AsRef<Raw> for Descriptor {
    fn as_ref(&self) -> &Raw {
        &self.0
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "iaa::{:?}", self.0)
    }
}

#[cfg(test)]
mod tests;
