//! The memory patterns of published measurements, and how a page or an item of them is rewritten.

use sterna_guest::content::{PAGE_BYTES, Page, Random, mix};
use sterna_guest::page::{FIRST_GENERATION, Fill};

use super::Pages;
use crate::Error;

/// Pages whose content follows from their numbers.
pub(super) struct Numbered {
    pages: sterna_guest::page::Pages,
    origin: &'static str,
    next: u64,
}

impl Numbered {
    pub(super) fn ones() -> Self {
        Self { pages: sterna_guest::page::Pages::new(Fill::Ones), origin: "pages of ones", next: 0 }
    }

    pub(super) fn sequence() -> Self {
        Self {
            pages: sterna_guest::page::Pages::new(Fill::Sequence),
            origin: "words of 64 bits, each its own number",
            next: 0,
        }
    }
}

impl Pages for Numbered {
    fn next(&mut self, page: &mut Page) -> Result<bool, Error> {
        self.pages.write(page, self.next, FIRST_GENERATION);
        self.next += 1;
        Ok(true)
    }

    fn origin(&self) -> String {
        self.origin.into()
    }
}

/// How a memcached lays items out in memory (its `items.h` and `slabs.c`): slabs of 1 MiB, cut into chunks of one size, an item in
/// each: a header of 48 bytes, a number for compare-and-swap, key, value, line end. With keys of 128 bytes and values of
/// 2048 that is 2235 bytes in chunks of 2320, of the factor 1.25 that it uses by default.
///
/// Values are of 36 letters and digits at random, which no method makes smaller than 5.2 bits of 8; with headers and unused ends
/// that gives the ratio of 1.6 that was published for such a load.
#[derive(Clone, Copy, Debug)]
pub struct Slabs {
    seed: u64,
}

impl Slabs {
    /// Bytes of a slab.
    pub const SLAB: usize = 1 << 20;
    /// Bytes of a chunk.
    pub const CHUNK: usize = 2320;
    const PER_SLAB: u64 = (Self::SLAB / Self::CHUNK) as u64;
    const KEY: usize = 128;
    const VALUE: usize = 2048;

    /// Makes the slabs of [`super::Corpus::Memcached`] with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Returns how many items there are in `bytes`.
    #[must_use]
    pub fn items(bytes: u64) -> u64 {
        bytes / Self::SLAB as u64 * Self::PER_SLAB
    }

    /// Returns the offset of an item.
    #[must_use]
    pub fn offset(item: u64) -> u64 {
        item / Self::PER_SLAB * Self::SLAB as u64 + item % Self::PER_SLAB * Self::CHUNK as u64
    }

    /// Writes an item with the content that it has after its value was set `times` times (from 0).
    pub fn write(&self, item: u64, times: u64, chunk: &mut [u8; Self::CHUNK]) {
        const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
        let fill = |into: &mut [u8], seed: u64| {
            let mut random = Random::new(mix(seed ^ mix(self.seed)));
            for eight in into.chunks_mut(8) {
                let mut bits = random.next();
                for byte in eight {
                    // 8 bits of 64 for each: a bias of an 18th toward a few letters is no structure that any method finds.
                    *byte = LETTERS[((bits & 0xff) as usize * LETTERS.len()) >> 8];
                    bits >>= 8;
                }
            }
        };
        chunk.fill(0);
        // Neighbours in the list of least recent use and in the hash chain are anywhere.
        let address = |salt: u64| 0x7f3a_0000_0000 + mix(item ^ salt ^ self.seed) % (1 << 30) / 16 * 16;
        for (at, salt) in [(0, 1 + times), (8, 2 + times)] {
            chunk[at..at + 8].copy_from_slice(&address(salt << 40).to_le_bytes());
        }
        chunk[24..28].copy_from_slice(&((item / 50_000 + times) as u32).to_le_bytes());
        chunk[32..36].copy_from_slice(&(Self::VALUE as u32 + 2).to_le_bytes());
        chunk[36..42].copy_from_slice(&[1, 0, 3, 0, 15, Self::KEY as u8]);
        chunk[48..56].copy_from_slice(&(item + times * 1_000_003).to_le_bytes());
        fill(&mut chunk[56..56 + Self::KEY], item);
        let value = 56 + Self::KEY + 1;
        fill(&mut chunk[value..value + Self::VALUE], mix(item) ^ (times + 1));
        chunk[value + Self::VALUE..value + Self::VALUE + 2].copy_from_slice(b"\r\n");
    }
}

/// Slab after slab, in pages.
pub(super) struct SlabPages {
    slabs: Slabs,
    slab: Vec<u8>,
    page: usize,
    number: u64,
}

impl SlabPages {
    pub(super) fn new(seed: u64) -> Self {
        Self { slabs: Slabs::new(seed), slab: vec![0; Slabs::SLAB], page: 0, number: 0 }
    }
}

impl Pages for SlabPages {
    fn next(&mut self, page: &mut Page) -> Result<bool, Error> {
        if self.page == 0 {
            for (index, chunk) in self.slab.as_chunks_mut().0.iter_mut().enumerate() {
                self.slabs.write(self.number * Slabs::PER_SLAB + index as u64, 0, chunk);
            }
            self.number += 1;
        }
        page.copy_from_slice(&self.slab[self.page * PAGE_BYTES..][..PAGE_BYTES]);
        self.page = (self.page + 1) % (Slabs::SLAB / PAGE_BYTES);
        Ok(true)
    }

    fn origin(&self) -> String {
        "slabs of a memcached, computed: keys of 128 bytes, values of 2048 random letters and digits".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_lies_at_its_offset_and_rewriting_changes_its_value_and_not_its_key() {
        let mut pages = SlabPages::new(7);
        let mut memory = Vec::new();
        let mut page = [0; PAGE_BYTES];
        for _ in 0..2 * Slabs::SLAB / PAGE_BYTES {
            assert!(pages.next(&mut page).unwrap());
            memory.extend_from_slice(&page);
        }
        assert_eq!(Slabs::items(memory.len() as u64), 2 * 451);
        let (mut item, mut again) = ([0; Slabs::CHUNK], [0; Slabs::CHUNK]);
        for number in [0, 450, 451, 901] {
            Slabs::new(7).write(number, 0, &mut item);
            let at = Slabs::offset(number) as usize;
            assert!(memory[at..at + Slabs::CHUNK] == item, "item {number}");
            Slabs::new(7).write(number, 1, &mut again);
            assert!(item[56..184] == again[56..184] && item[185..] != again[185..], "item {number}");
        }
    }
}
