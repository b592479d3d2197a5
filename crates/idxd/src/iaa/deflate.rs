//! Deflate's codes and block headers (RFC 1951), which software must make for the device.

use super::huffman::{MAX_SYMBOLS, canonical_codes, code_lengths};

/// Number of literal and length symbols that can occur.
pub(super) const LITERAL_LENGTHS: usize = 286;
/// Number of distance symbols that can occur.
pub(super) const DISTANCES: usize = 30;
/// The symbol that ends a block.
pub(super) const END_OF_BLOCK: usize = 256;

/// Maximum length of the codes of literals, lengths and distances, in bits.
const MAX_CODE_BITS: u8 = 15;
/// Maximum length of the codes of code lengths, in bits.
const MAX_LENGTH_CODE_BITS: u8 = 7;
/// Order in which the lengths of the code-length codes are written (section 3.2.7).
const ORDER_OF_LENGTHS: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// The Huffman codes of one deflate block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Codes {
    literal_lengths: [u8; MAX_SYMBOLS],
    literal_codes: [u16; MAX_SYMBOLS],
    distance_lengths: [u8; DISTANCES],
    distance_codes: [u16; DISTANCES],
    fixed: bool,
}

impl Codes {
    /// Returns the fixed codes (section 3.2.6).
    pub fn fixed() -> Self {
        let mut codes = Self::empty(true);
        for (symbol, length) in codes.literal_lengths.iter_mut().enumerate() {
            *length = match symbol {
                0..=143 => 8,
                144..=255 => 9,
                256..=279 => 7,
                _ => 8,
            };
        }
        codes.distance_lengths = [5; DISTANCES];
        codes.assign()
    }

    /// Returns codes for tokens with these frequencies: `literals` (286 counts) and `distances` (30 counts). The end of
    /// the block counts at least once. Both codes get at least two symbols, so that they are complete: some inflaters
    /// accept only complete codes.
    pub fn for_counts(literals: &[u32; LITERAL_LENGTHS], distances: &[u32; DISTANCES]) -> Self {
        let mut codes = Self::empty(false);
        let mut counts = *literals;
        counts[END_OF_BLOCK] = counts[END_OF_BLOCK].max(1);
        at_least_two(&mut counts);
        code_lengths(&counts, MAX_CODE_BITS, &mut codes.literal_lengths[..LITERAL_LENGTHS]);
        let mut counts = *distances;
        at_least_two(&mut counts);
        code_lengths(&counts, MAX_CODE_BITS, &mut codes.distance_lengths);
        codes.assign()
    }

    /// Returns the length in bits of the code of a literal, a length or the end of the block; 0 if it has no code.
    pub fn literal_bits(&self, symbol: usize) -> u8 {
        self.literal_lengths[symbol]
    }

    /// Returns the length in bits of a distance's code; 0 if it has no code.
    pub fn distance_bits(&self, symbol: usize) -> u8 {
        self.distance_lengths[symbol]
    }

    /// Returns the code of a literal, a length or the end of the block, first bit highest.
    pub fn literal_code(&self, symbol: usize) -> u16 {
        self.literal_codes[symbol]
    }

    /// Returns the code of a distance, first bit highest.
    pub fn distance_code(&self, symbol: usize) -> u16 {
        self.distance_codes[symbol]
    }

    /// Writes the header of a block with these codes. Returns `false` if it does not fit.
    pub(super) fn write_header(&self, last: bool, bits: &mut Bits<'_>) -> bool {
        bits.put(u32::from(last), 1);
        if self.fixed {
            bits.put(0b01, 2);
        } else {
            bits.put(0b10, 2);
            self.write_lengths(bits);
        }
        bits.fits
    }

    /// Writes the code lengths (section 3.2.7). The two sequences are run-length coded separately, as zlib does. The
    /// format would allow a run from one into the other, but IAA's error codes 06 and 07 make it invalid_attribute that devices
    /// do.
    fn write_lengths(&self, bits: &mut Bits<'_>) {
        let literals = trimmed(&self.literal_lengths[..LITERAL_LENGTHS], 257);
        let distances = trimmed(&self.distance_lengths, 1);
        let mut runs = Runs::new();
        runs.add(literals);
        runs.add(distances);

        let mut counts = [0_u32; 19];
        runs.iter().for_each(|run| counts[usize::from(run.symbol)] += 1);
        at_least_two(&mut counts);
        let (mut lengths, mut codes) = ([0; 19], [0; 19]);
        code_lengths(&counts, MAX_LENGTH_CODE_BITS, &mut lengths);
        canonical_codes(&lengths, &mut codes);

        let shown =
            ORDER_OF_LENGTHS.iter().rposition(|symbol| lengths[*symbol] > 0).map_or(4, |last| (last + 1).max(4));
        bits.put(literals.len() as u32 - 257, 5);
        bits.put(distances.len() as u32 - 1, 5);
        bits.put(shown as u32 - 4, 4);
        for symbol in &ORDER_OF_LENGTHS[..shown] {
            bits.put(u32::from(lengths[*symbol]), 3);
        }
        for run in runs.iter() {
            let symbol = usize::from(run.symbol);
            bits.put_code(codes[symbol], lengths[symbol]);
            let extra = match run.symbol {
                16 => 2,
                17 => 3,
                18 => 7,
                _ => 0,
            };
            bits.put(u32::from(run.extra), extra);
        }
    }

    fn empty(fixed: bool) -> Self {
        Self {
            literal_lengths: [0; MAX_SYMBOLS],
            literal_codes: [0; MAX_SYMBOLS],
            distance_lengths: [0; DISTANCES],
            distance_codes: [0; DISTANCES],
            fixed,
        }
    }

    fn assign(mut self) -> Self {
        canonical_codes(&self.literal_lengths, &mut self.literal_codes);
        canonical_codes(&self.distance_lengths, &mut self.distance_codes);
        self
    }
}

/// Counts further symbols once until two are counted: a code of one symbol is not complete.
fn at_least_two(counts: &mut [u32]) {
    let used = counts.iter().filter(|count| **count > 0).count();
    counts.iter_mut().filter(|count| **count == 0).take(2_usize.saturating_sub(used)).for_each(|count| *count = 1);
}

/// Returns the slice without the zeros at the end, but with at least `least` elements.
fn trimmed(lengths: &[u8], least: usize) -> &[u8] {
    let used = lengths.iter().rposition(|length| *length > 0).map_or(0, |last| last + 1);
    &lengths[..used.max(least)]
}

/// A code length, or a run of them (symbols 16 to 18, with the run's length beyond its minimum).
#[derive(Clone, Copy)]
struct Run {
    symbol: u8,
    extra: u8,
}

struct Runs {
    runs: [Run; LITERAL_LENGTHS + DISTANCES],
    len: usize,
}

impl Runs {
    fn new() -> Self {
        Self { runs: [Run { symbol: 0, extra: 0 }; LITERAL_LENGTHS + DISTANCES], len: 0 }
    }

    fn iter(&self) -> impl Iterator<Item = &Run> {
        self.runs[..self.len].iter()
    }

    fn push(&mut self, symbol: u8, extra: usize) {
        self.runs[self.len] = Run { symbol, extra: extra as u8 };
        self.len += 1;
    }

    fn add(&mut self, mut lengths: &[u8]) {
        while let Some(&length) = lengths.first() {
            let mut same = lengths.iter().take_while(|other| **other == length).count();
            lengths = &lengths[same..];
            if length != 0 {
                self.push(length, 0);
                same -= 1;
            }
            while same > 0 {
                let taken = match (length, same) {
                    (0, 11..) => {
                        self.push(18, same.min(138) - 11);
                        same.min(138)
                    }
                    (0, 3..) => {
                        self.push(17, same - 3);
                        same
                    }
                    (1.., 3..) => {
                        self.push(16, same.min(6) - 3);
                        same.min(6)
                    }
                    _ => {
                        self.push(length, 0);
                        1
                    }
                };
                same -= taken;
            }
        }
    }
}

/// Writes bits, lowest first, as deflate packs them.
pub(super) struct Bits<'a> {
    bytes: &'a mut [u8],
    used: usize,
    fits: bool,
}

impl<'a> Bits<'a> {
    /// Writes to `bytes`, which must be zeroed.
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, used: 0, fits: true }
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Writes the low `count` bits of `value`.
    fn put(&mut self, value: u32, count: u32) {
        for bit in 0..count {
            let Some(byte) = self.bytes.get_mut(self.used / 8) else {
                self.fits = false;
                return;
            };
            *byte |= ((value >> bit & 1) as u8) << (self.used % 8);
            self.used += 1;
        }
    }

    /// Writes a Huffman code, whose first bit is its highest.
    fn put_code(&mut self, code: u16, length: u8) {
        if length > 0 {
            self.put(u32::from(code.reverse_bits() >> (16 - length)), length.into());
        }
    }
}

#[cfg(test)]
mod tests;
