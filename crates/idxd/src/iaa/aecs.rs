//! The structures beside a descriptor: the layout in memory of the *analytics engine configuration and state* (AECS)
//! and of the histogram of a statistics pass (IAA sections 3.2, 3.4.1 and 6.4).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::deflate::{Bits, Codes, DISTANCES, LITERAL_LENGTHS};

/// Bytes of a compression's AECS without a dictionary (table 3-2).
pub const COMPRESS_AECS_BYTES: usize = 1568;
/// Bytes of a decompression's AECS, window included (table 3-2).
pub const DECOMPRESS_AECS_BYTES: usize = 5376;
/// Bytes of the histogram that a statistics pass writes (table 3-4): 318 counts of 32 bits.
pub const HISTOGRAM_BYTES: usize = 1272;

/// Offsets of the fields of a compression's AECS (table 6-20).
mod at {
    pub(super) const CRC: usize = 0x000;
    pub(super) const ACCUMULATED_BITS: usize = 0x01c;
    pub(super) const ACCUMULATOR: usize = 0x020;
    pub(super) const LITERAL_CODES: usize = 0x120;
    pub(super) const DISTANCE_CODES: usize = 0x5a0;
}
/// Bytes of the output accumulator: 2048 bits.
const ACCUMULATOR_BYTES: usize = 256;

/// Why codes cannot be written to an AECS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The block header does not fit the output accumulator.
    #[error("the deflate header of these codes has more than 2048 bits")]
    HeaderTooLarge,
}

/// What a compression reads: Huffman codes, and the block header as the first bits of the output.
#[derive(Clone)]
#[repr(C, align(32))]
pub struct CompressAecs {
    bytes: [u8; COMPRESS_AECS_BYTES],
}

const _: () = assert!(size_of::<CompressAecs>() == COMPRESS_AECS_BYTES && align_of::<CompressAecs>() == 32);
const _: () = assert!(at::LITERAL_CODES == at::ACCUMULATOR + ACCUMULATOR_BYTES);
const _: () = assert!(at::DISTANCE_CODES == at::LITERAL_CODES + 4 * LITERAL_LENGTHS + 8);
const _: () = assert!(COMPRESS_AECS_BYTES == at::DISTANCE_CODES + 4 * DISTANCES + 8);

impl CompressAecs {
    /// Returns an AECS with the fixed codes. `last` marks the block as the stream's final one; set it for a stream of
    /// one block.
    pub fn fixed(last: bool) -> Self {
        let mut aecs = Self { bytes: [0; COMPRESS_AECS_BYTES] };
        aecs.set(&Codes::fixed(), last).expect("the header of a fixed block has three bits");
        aecs
    }

    /// Returns an AECS with codes made for the counts of a statistics pass.
    pub fn dynamic(histogram: &Histogram, last: bool) -> Result<Self, TableError> {
        let mut aecs = Self { bytes: [0; COMPRESS_AECS_BYTES] };
        aecs.set_dynamic(histogram, last)?;
        Ok(aecs)
    }

    /// Writes the codes of [`dynamic`](Self::dynamic) in place.
    pub fn set_dynamic(&mut self, histogram: &Histogram, last: bool) -> Result<(), TableError> {
        let (literals, distances) = histogram.counts();
        self.set(&Codes::for_counts(&literals, &distances), last)
    }

    /// Writes codes and the header of their block; checksums start from zero. After an error the contents are unusable.
    pub fn set(&mut self, codes: &Codes, last: bool) -> Result<(), TableError> {
        self.bytes.fill(0);
        let mut bits = Bits::new(&mut self.bytes[at::ACCUMULATOR..at::LITERAL_CODES]);
        if !codes.write_header(last, &mut bits) {
            return Err(TableError::HeaderTooLarge);
        }
        let used = bits.used() as u32;
        self.put(at::ACCUMULATED_BITS, used);
        for symbol in 0..LITERAL_LENGTHS {
            let entry = entry(codes.literal_code(symbol), codes.literal_bits(symbol));
            self.put(at::LITERAL_CODES + 4 * symbol, entry);
        }
        for symbol in 0..DISTANCES {
            let entry = entry(codes.distance_code(symbol), codes.distance_bits(symbol));
            self.put(at::DISTANCE_CODES + 4 * symbol, entry);
        }
        Ok(())
    }

    /// Sets the checksum from which the device starts: 0, or that of the preceding data.
    pub fn seed_crc(&mut self, crc: u32) {
        self.put(at::CRC, crc);
    }

    /// Returns the bytes that the device reads.
    pub fn as_bytes(&self) -> &[u8; COMPRESS_AECS_BYTES] {
        &self.bytes
    }

    fn put(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
}

impl std::fmt::Debug for CompressAecs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompressAecs").finish_non_exhaustive()
    }
}

/// Returns a Huffman code in the device's form: the code, first bit highest, in bits 14:0, its length in bits 18:15
/// (table 6-21).
fn entry(code: u16, length: u8) -> u32 {
    u32::from(code) | u32::from(length) << 15
}

/// Memory for two AECS: a descriptor that names an AECS also covers the memory behind it, one half for reading and one
/// for writing (section 3.2). This crate's compressions only read the first half.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub struct CompressAecsPair {
    /// The half that is read.
    pub read: CompressAecs,
    written: CompressAecs,
}

const _: () = assert!(size_of::<CompressAecsPair>() == 2 * COMPRESS_AECS_BYTES);

impl CompressAecsPair {
    /// Returns a pair with this AECS in the half that is read.
    pub fn new(read: CompressAecs) -> Self {
        Self { read, written: CompressAecs { bytes: [0; COMPRESS_AECS_BYTES] } }
    }

    /// Returns the address for [`Descriptor::compress`](super::Descriptor::compress).
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }
}

/// The state of a decompression whose output did not fit. Its content is private to the device; software only stores
/// it.
#[derive(Debug)]
#[repr(C, align(32))]
pub struct DecompressAecs {
    words: [AtomicU64; DECOMPRESS_AECS_BYTES / 8],
}

const _: () = assert!(size_of::<DecompressAecs>() == DECOMPRESS_AECS_BYTES);

impl Default for DecompressAecs {
    fn default() -> Self {
        Self { words: [const { AtomicU64::new(0) }; DECOMPRESS_AECS_BYTES / 8] }
    }
}

/// Both halves of a decompression's state, which the device reads and writes in turns.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct DecompressAecsPair {
    halves: [DecompressAecs; 2],
}

const _: () = assert!(size_of::<DecompressAecsPair>() == 2 * DECOMPRESS_AECS_BYTES);

impl DecompressAecsPair {
    /// Returns a zeroed pair.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the address for [`Descriptor::keeping_state`](super::Descriptor::keeping_state).
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }
}

/// The output of a statistics pass: how often each token would be written. Counts saturate at 2^19 - 1.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Histogram {
    counts: [AtomicU32; HISTOGRAM_BYTES / 4],
}

/// Index of the first distance count: two reserved words follow the 286 counts of literals and lengths.
const FIRST_DISTANCE: usize = LITERAL_LENGTHS + 2;
const _: () = assert!(FIRST_DISTANCE * 4 == 1152 && HISTOGRAM_BYTES == 4 * (FIRST_DISTANCE + DISTANCES));

impl Histogram {
    /// Returns a histogram whose counts are zero.
    pub fn new() -> Self {
        Self { counts: [const { AtomicU32::new(0) }; HISTOGRAM_BYTES / 4] }
    }

    /// Returns the address for [`Descriptor::statistics`](super::Descriptor::statistics).
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    /// Returns the counts of literals and lengths, and of distances. Call this after the completion record of the pass
    /// was seen.
    pub fn counts(&self) -> ([u32; LITERAL_LENGTHS], [u32; DISTANCES]) {
        let count = |index: usize| self.counts[index].load(Ordering::Relaxed);
        (std::array::from_fn(count), std::array::from_fn(|symbol| count(FIRST_DISTANCE + symbol)))
    }

    /// Sets the counts, for codes made from statistics that no device has gathered.
    pub fn set(&self, literals: &[u32; LITERAL_LENGTHS], distances: &[u32; DISTANCES]) {
        let at = |index: usize, count: u32| self.counts[index].store(count, Ordering::Relaxed);
        literals.iter().enumerate().for_each(|(symbol, count)| at(symbol, *count));
        distances.iter().enumerate().for_each(|(symbol, count)| at(FIRST_DISTANCE + symbol, *count));
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
