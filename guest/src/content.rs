//! What stands in a page: one generator per kind of content, each a pure function of a 64-bit seed.
//!
//! Compression results depend on content, so it is generated, never a file repeated to fill memory (which would reward
//! long matches and de-duplication that no real guest offers). Text and corpus compress about 3:1 with zstd at level 1 in
//! pieces of 512 KiB, as a real guest's RAM does; `sterna-guest dump corpus 4096 | zstd -1 -B524288` repeats the measurement.

/// Bytes in a guest page.
pub const PAGE_BYTES: usize = 4096;

/// One guest page.
pub type Page = [u8; PAGE_BYTES];

/// A small generator of pseudo-random numbers (SplitMix64: one multiplication-mixed counter), the same on host and guest.
#[derive(Clone, Copy)]
pub struct Random(u64);

impl Random {
    /// A generator whose sequence is decided by `seed` alone.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

/// Mixes all bits of `value` into each other (the finaliser of SplitMix64).
#[inline]
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Entries of a dictionary; a power of two, so that choosing one is a mask.
const ENTRIES: usize = 2048;

/// Up to 16 bytes and their number; always copied whole, which is two word stores.
#[derive(Clone, Copy)]
struct Entry {
    bytes: [u8; 16],
    length: u8,
}

impl Entry {
    fn new(text: &[u8]) -> Self {
        let mut bytes = [0; 16];
        bytes[..text.len()].copy_from_slice(text);
        Entry { bytes, length: text.len() as u8 }
    }
}

/// The words of a made-up language and the instruction forms of a made-up compiler, generated once.
pub struct Dictionaries {
    words: Vec<Entry>,
    instructions: Vec<Entry>,
}

impl Default for Dictionaries {
    fn default() -> Self {
        Self::new()
    }
}

impl Dictionaries {
    /// Generates both dictionaries (a few milliseconds, also in an emulated guest).
    pub fn new() -> Self {
        let mut random = Random::new(0x5354_4552_4e41);
        let words = (0..ENTRIES).map(|_| word(&mut random)).collect();
        let instructions = (0..ENTRIES).map(|_| instructions(&mut random)).collect();
        Dictionaries { words, instructions }
    }
}

/// A pronounceable word of 2 to 13 letters with a space, sometimes a comma or a line end, behind it.
fn word(random: &mut Random) -> Entry {
    const ONSETS: [&str; 16] = ["t", "s", "r", "n", "l", "d", "c", "m", "p", "st", "th", "b", "f", "g", "pr", "w"];
    const VOWELS: [&str; 8] = ["e", "a", "i", "o", "e", "u", "io", "ea"];
    const CODAS: [&str; 8] = ["", "n", "s", "r", "", "t", "ng", "l"];
    let mut text = String::new();
    let syllables = 1 + random.next() % 3;
    for _ in 0..syllables {
        let bits = random.next();
        text.push_str(ONSETS[bits as usize % 16]);
        text.push_str(VOWELS[(bits >> 8) as usize % 8]);
        text.push_str(CODAS[(bits >> 16) as usize % 8]);
    }
    text.truncate(13);
    text.push_str(match random.next() % 16 {
        0 => ", ",
        1 => ".\n",
        _ => " ",
    });
    Entry::new(text.as_bytes())
}

/// A few instruction-like forms in a row, 7 to 15 bytes, as compilers emit the same idiom again and again: prefix, opcode,
/// operand byte and a short displacement from small sets.
fn instructions(random: &mut Random) -> Entry {
    const OPCODES: [u8; 16] =
        [0x89, 0x8b, 0x8d, 0x85, 0x83, 0xe8, 0x0f, 0x31, 0x74, 0x75, 0x39, 0x01, 0xc7, 0xff, 0x84, 0x29];
    let mut bytes = Vec::with_capacity(16);
    while bytes.len() < 7 {
        let bits = random.next();
        if bits & 1 == 0 {
            bytes.push(0x48 | ((bits >> 1) as u8 & 5));
        }
        bytes.push(OPCODES[(bits >> 8) as usize % 16]);
        bytes.push(0x40 | ((bits >> 16) as u8 & 0xbf));
        if (bits >> 24) & 3 != 0 {
            bytes.push((bits >> 32) as u8 & 0xf8);
        }
        if (bits >> 26) & 7 == 0 {
            bytes.extend_from_slice(&[(bits >> 40) as u8, (bits >> 48) as u8 & 0x0f, 0, 0]);
        }
    }
    Entry::new(&bytes)
}

/// Chooses an entry so that few are common and most are rare, as words and instructions are.
#[inline]
fn choose(bits: u64) -> usize {
    // The range's exponent is itself random: entry 2^k..2^(k+1) is chosen about as often as any other such range.
    let span = (bits >> 16) & 15;
    let span = if span > 10 { 10 } else { span };
    (bits as usize & 0xffff) & ((2usize << span) - 1) & (ENTRIES - 1)
}

/// Writes entries one after another until `page` is full, starting at byte `from`. About one entry in `noise + 1` is
/// followed by three bytes that no dictionary predicts: numbers, names, immediates.
fn write_entries(page: &mut Page, from: usize, entries: &[Entry], random: &mut Random, noise: u64) {
    let mut at = from;
    while at + 24 <= PAGE_BYTES {
        let draw = random.next();
        let entry = &entries[choose(draw)];
        page[at..at + 16].copy_from_slice(&entry.bytes);
        at += usize::from(entry.length);
        if draw >> 48 & noise == 0 {
            page[at..at + 4].copy_from_slice(&(draw as u32).to_le_bytes());
            at += 3;
        }
    }
    // The end is too short for whole entries: cut one off, as buffers cut off what they hold.
    while at < PAGE_BYTES {
        let entry = &entries[choose(random.next())];
        let length = usize::from(entry.length).min(PAGE_BYTES - at);
        page[at..at + length].copy_from_slice(&entry.bytes[..length]);
        at += length;
    }
}

/// Fills `page` from byte `from` (a multiple of eight) with random words: nothing compresses it.
pub fn write_random(page: &mut Page, from: usize, seed: u64) {
    let mut random = Random::new(seed);
    for word in page[from..].chunks_exact_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
}

/// Fills `page` from byte `from` with text of a made-up language.
pub fn write_text(page: &mut Page, from: usize, seed: u64, dictionaries: &Dictionaries) {
    write_entries(page, from, &dictionaries.words, &mut Random::new(seed), 0x3f);
}

/// Fills `page` from byte `from` (a multiple of eight) with what programs keep in memory; `variety` says which of it: text,
/// machine code, or records of pointers, counters and flags.
pub fn write_corpus(page: &mut Page, from: usize, seed: u64, variety: u64, dictionaries: &Dictionaries) {
    match variety % 8 {
        0 | 1 => write_text(page, from, seed, dictionaries),
        2..=4 => write_entries(page, from, &dictionaries.instructions, &mut Random::new(seed), 0x7f),
        _ => write_records(page, from, seed),
    }
}

/// Records of eight words: two pointers into one heap, a size, two counters, flags, an identifier, and an unused word.
fn write_records(page: &mut Page, from: usize, seed: u64) {
    let mut random = Random::new(seed);
    let heap = 0x7f00_0000_0000 | (random.next() & 0x3f) << 24;
    let mut counter = random.next() & 0xffff;
    for (position, word) in page[from..].chunks_exact_mut(8).enumerate() {
        let draw = random.next();
        let value = match position % 8 {
            0 => heap | draw & 0x00ff_ffc0,
            1 => heap | draw & 0x000f_ffc0,
            2 => 64 << (draw & 7),
            3 => {
                counter += 1 + (draw & 3);
                counter
            }
            4 => draw & 0xff,
            5 => 1 << (draw & 15),
            6 => draw & 0xff_ffff,
            _ => 0,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_page_and_another_seed_another() {
        let dictionaries = Dictionaries::new();
        let page = |seed, variety| {
            let mut page = [0; PAGE_BYTES];
            write_corpus(&mut page, 64, seed, variety, &dictionaries);
            page
        };
        for variety in 0..8 {
            assert_eq!(page(1, variety), page(1, variety));
            assert_ne!(page(1, variety), page(2, variety));
        }
    }

    #[test]
    fn text_is_printable_for_the_most_part() {
        let dictionaries = Dictionaries::new();
        let mut page = [0; PAGE_BYTES];
        write_text(&mut page, 0, 7, &dictionaries);
        let printable = page.iter().filter(|byte| (b' '..=b'z').contains(byte)).count();
        assert!(printable > 3600, "only {printable} of 4096 bytes");
    }

    #[test]
    fn only_what_is_behind_the_start_is_written_and_what_was_there_does_not_shine_through() {
        let dictionaries = Dictionaries::new();
        for variety in 0..8 {
            let page = |before: u8| {
                let mut page = [before; PAGE_BYTES];
                write_corpus(&mut page, 64, 3, variety, &dictionaries);
                page
            };
            let (ones, zeros) = (page(0xff), page(0));
            assert!(ones[..64].iter().all(|&byte| byte == 0xff));
            assert_eq!(ones[64..], zeros[64..], "variety {variety}");
        }
    }
}
