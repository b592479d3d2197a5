//! What each page must hold, and what is wrong with one that holds something else.
//!
//! A page's *kind* follows from the fill pattern and its index, its *generation* (how often it was written) is in the
//! guest's own table. From these two the page's right content follows, so a page that was lost on the way (zero), is stale
//! (an older generation) or foreign (another page's content) is told apart:
//!
//! * random, text and corpus pages begin with a [stamp](Stamp) and carry a checksum of the rest;
//! * sequence pages number every word of memory, so each word says where and when it was written;
//! * a page of equal bytes can hold no stamp: its one byte follows from the generation (never zero, all ones at first), so a
//!   lost or stale one is seen and a foreign one only if it is of another generation;
//! * zero pages turn to stamped data with every second writing and back to zero with the next: while zero, anything else
//!   in them is wrong, while data, they are checked like any other.

use crate::content::{self, PAGE_BYTES, Page, mix};

const MAGIC: u64 = u64::from_le_bytes(*b"STERNApg");
const STAMP_BYTES: usize = 64;

/// What fills memory, as the command line's `sterna.fill` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Every page zero (and stamped data on every second writing).
    Zeros,
    /// Every byte of a page the same.
    Ones,
    /// Every 64-bit word its own number.
    Sequence,
    /// Nothing compresses it.
    Random,
    /// Text of a made-up language.
    Text,
    /// Text, machine code and records.
    Corpus,
    /// All of them, in runs of pages, about as often as in a real guest: 45 % zero, 40 % corpus.
    Mixed,
}

impl Fill {
    /// All fills with their names.
    pub const ALL: [(&'static str, Fill); 7] = [
        ("zeros", Fill::Zeros),
        ("ones", Fill::Ones),
        ("sequence", Fill::Sequence),
        ("random", Fill::Random),
        ("text", Fill::Text),
        ("corpus", Fill::Corpus),
        ("mixed", Fill::Mixed),
    ];

    /// What page `index` holds. Mixed memory changes from kind to kind in runs of 16 pages (64 KiB), as files and heaps do.
    fn of(self, index: u64) -> Fill {
        if self != Fill::Mixed {
            return self;
        }
        match mix((index / 16) ^ 0x6d69_7865_6400) % 100 {
            0..45 => Fill::Zeros,
            45..47 => Fill::Ones,
            47..50 => Fill::Sequence,
            50..60 => Fill::Random,
            _ => Fill::Corpus,
        }
    }
}

/// Why a page is not what it must be. `found` words are what the page itself says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Zero where data was written: the page was lost.
    Lost,
    /// An older content of the same page.
    Stale {
        /// The generation found in the page.
        generation: u32,
    },
    /// A later generation than the table's: the page of the table is the stale one.
    Newer {
        /// The generation found in the page.
        generation: u32,
    },
    /// Another page's content.
    Foreign {
        /// The index found in the page.
        index: u64,
    },
    /// Neither: damaged, or put together from two contents.
    Corrupt {
        /// The first byte that is wrong, or 0 where only the checksum says so.
        offset: usize,
    },
}

impl core::fmt::Display for Fault {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Fault::Lost => write!(f, "lost: zeros"),
            Fault::Stale { generation } => write!(f, "stale: generation {generation}"),
            Fault::Newer { generation } => write!(f, "newer: generation {generation}"),
            Fault::Foreign { index } => write!(f, "foreign: page {index}"),
            Fault::Corrupt { offset } => write!(f, "corrupt: wrong from byte {offset}"),
        }
    }
}

/// The first 64 bytes of a page that can hold one.
///
/// `content_generation` is the generation in which the bytes behind the stamp were last written, `checksum` theirs, and
/// `seal` covers the stamp's other words, so that a stamp may be renewed without rewriting what it stands for.
#[derive(Clone, Copy)]
struct Stamp {
    index: u64,
    generation: u32,
    content_generation: u32,
    checksum: u64,
}

impl Stamp {
    fn seal(&self) -> u64 {
        let generations = (u64::from(self.generation) << 32) | u64::from(self.content_generation);
        mix(mix(mix(MAGIC ^ self.index) ^ generations) ^ self.checksum)
    }

    fn write(&self, page: &mut Page) {
        page[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        page[8..16].copy_from_slice(&self.index.to_le_bytes());
        page[16..20].copy_from_slice(&self.generation.to_le_bytes());
        page[20..24].copy_from_slice(&self.content_generation.to_le_bytes());
        page[24..32].copy_from_slice(&self.checksum.to_le_bytes());
        page[32..40].copy_from_slice(&self.seal().to_le_bytes());
        page[40..STAMP_BYTES].fill(0);
    }

    fn read(page: &Page) -> Option<Stamp> {
        let generations = word(page, 16);
        let stamp = Stamp {
            index: word(page, 8),
            generation: generations as u32,
            content_generation: (generations >> 32) as u32,
            checksum: word(page, 24),
        };
        let whole =
            word(page, 0) == MAGIC && word(page, 32) == stamp.seal() && page[40..STAMP_BYTES].iter().all(|&b| b == 0);
        whole.then_some(stamp)
    }
}

#[inline]
fn word(page: &Page, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// A checksum of what stands behind the stamp; every word and its place count.
fn checksum(page: &Page) -> u64 {
    let mut sum = MAGIC;
    for word in page[STAMP_BYTES..].chunks_exact(8) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        sum = (sum.rotate_left(5) ^ u64::from_le_bytes(bytes)).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
    sum
}

/// The generation of a page that was filled and not written again.
pub const FIRST_GENERATION: u32 = 1;

/// The content of memory filled one way.
#[derive(Clone, Copy)]
pub struct Pages {
    fill: Fill,
}

impl Pages {
    /// Pages as `fill` says.
    pub const fn new(fill: Fill) -> Self {
        Pages { fill }
    }

    /// Writes the whole of page `index` as it is in `generation` (from 1).
    pub fn write(&self, page: &mut Page, index: u64, generation: u32) {
        match self.fill.of(index) {
            Fill::Zeros if is_zero(generation) => page.fill(0),
            Fill::Ones => page.fill(equal_byte(generation)),
            Fill::Sequence => {
                for (position, word) in page.chunks_exact_mut(8).enumerate() {
                    word.copy_from_slice(&sequence_word(index, generation, position).to_le_bytes());
                }
            }
            kind => {
                self.write_content(kind, page, index, generation);
                let checksum = checksum(page);
                Stamp { index, generation, content_generation: generation, checksum }.write(page);
            }
        }
    }

    /// Brings page `index` to `generation` with as few stores as its kind allows: stamped pages get a new stamp, the
    /// others are written whole.
    pub fn touch(&self, page: &mut Page, index: u64, generation: u32) {
        match self.fill.of(index) {
            Fill::Random | Fill::Text | Fill::Corpus => {
                // A damaged stamp stays, for the verification to find.
                if let Some(stamp) = Stamp::read(page) {
                    Stamp { generation, ..stamp }.write(page);
                }
            }
            _ => self.write(page, index, generation),
        }
    }

    fn write_content(&self, kind: Fill, page: &mut Page, index: u64, generation: u32) {
        let seed = mix(mix(index) ^ u64::from(generation));
        match kind {
            Fill::Text => content::write_text(page, STAMP_BYTES, seed),
            // Runs of 16 pages are of one variety.
            Fill::Corpus => content::write_corpus(page, STAMP_BYTES, seed, mix(index / 16)),
            // Zero pages turn to text, like a page that the guest's kernel hands out and a program fills.
            Fill::Zeros => content::write_text(page, STAMP_BYTES, seed),
            _ => content::write_random(page, STAMP_BYTES, seed),
        }
    }

    /// Checks the stamp of page `index`, or its first word where it has none: what costs next to nothing, so that no page
    /// is overwritten unseen.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_start(&self, page: &Page, index: u64, generation: u32) -> Result<(), Fault> {
        let right = match self.fill.of(index) {
            Fill::Zeros if is_zero(generation) => word(page, 0) == 0,
            Fill::Ones => page[0] == equal_byte(generation),
            Fill::Sequence => word(page, 0) == sequence_word(index, generation, 0),
            _ => Stamp::read(page).is_some_and(|stamp| judge(stamp, index, generation).is_none()),
        };
        // Only a wrong page is worth the whole look that says what is wrong.
        if right { Ok(()) } else { self.check(page, index, generation) }
    }

    /// Checks that `page` is page `index` in `generation`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, page: &Page, index: u64, generation: u32) -> Result<(), Fault> {
        match self.fill.of(index) {
            Fill::Zeros if is_zero(generation) => check_zero(page, index, generation),
            Fill::Ones => check_equal(page, generation),
            Fill::Sequence => check_sequence(page, index, generation),
            _ => check_stamped(page, index, generation),
        }
    }
}

fn is_zero(generation: u32) -> bool {
    generation % 2 == 1
}

/// All ones at first, then another byte with each of 255 generations, never zero.
fn equal_byte(generation: u32) -> u8 {
    255 - (generation.wrapping_sub(FIRST_GENERATION) % 255) as u8
}

/// 24 bits of generation, then the number of the word in memory (40 bits: 8 TiB of guest).
fn sequence_word(index: u64, generation: u32, position: usize) -> u64 {
    (u64::from(generation) << 40) | (index * (PAGE_BYTES as u64 / 8) + position as u64)
}

fn is_lost(page: &Page) -> bool {
    page.chunks_exact(8).all(|word| word == [0; 8])
}

fn first_difference(page: &Page, expected: impl Fn(usize) -> u8) -> usize {
    page.iter().enumerate().find(|&(at, &byte)| byte != expected(at)).map_or(0, |(at, _)| at)
}

/// What a whole stamp with another index or generation says.
fn judge(stamp: Stamp, index: u64, generation: u32) -> Option<Fault> {
    if stamp.index != index {
        Some(Fault::Foreign { index: stamp.index })
    } else if stamp.generation < generation {
        Some(Fault::Stale { generation: stamp.generation })
    } else if stamp.generation > generation {
        Some(Fault::Newer { generation: stamp.generation })
    } else {
        None
    }
}

fn check_zero(page: &Page, index: u64, generation: u32) -> Result<(), Fault> {
    if is_lost(page) {
        return Ok(());
    }
    let fault = Stamp::read(page).and_then(|stamp| judge(stamp, index, generation));
    Err(fault.unwrap_or_else(|| Fault::Corrupt { offset: first_difference(page, |_| 0) }))
}

fn check_equal(page: &Page, generation: u32) -> Result<(), Fault> {
    let expected = equal_byte(generation);
    let first = page[0];
    let pattern = [first; 8];
    if !page.chunks_exact(8).all(|word| word == pattern) {
        return Err(Fault::Corrupt { offset: first_difference(page, |_| expected) });
    }
    if first == expected {
        return Ok(());
    }
    if first == 0 {
        return Err(Fault::Lost);
    }
    // The latest generation before this one with that byte.
    let back = (i32::from(first) - i32::from(expected)).rem_euclid(255) as u32;
    match generation.checked_sub(back) {
        Some(found) if found >= FIRST_GENERATION => Err(Fault::Stale { generation: found }),
        _ => Err(Fault::Newer { generation: generation.saturating_add(255 - back) }),
    }
}

fn check_sequence(page: &Page, index: u64, generation: u32) -> Result<(), Fault> {
    let first = word(page, 0);
    let (found, number) = ((first >> 40) as u32, first & ((1 << 40) - 1));
    let found_index = number / (PAGE_BYTES as u64 / 8);
    let wrong = page
        .chunks_exact(8)
        .enumerate()
        .find(|&(position, word)| *word != sequence_word(found_index, found, position).to_le_bytes());
    match wrong {
        _ if is_lost(page) => Err(Fault::Lost),
        Some((position, _)) => Err(Fault::Corrupt { offset: position * 8 }),
        None if found_index != index => Err(Fault::Foreign { index: found_index }),
        None if found < generation & 0xff_ffff => Err(Fault::Stale { generation: found }),
        None if found > generation & 0xff_ffff => Err(Fault::Newer { generation: found }),
        None => Ok(()),
    }
}

fn check_stamped(page: &Page, index: u64, generation: u32) -> Result<(), Fault> {
    let Some(stamp) = Stamp::read(page) else {
        return Err(if is_lost(page) { Fault::Lost } else { Fault::Corrupt { offset: 0 } });
    };
    if stamp.checksum != checksum(page) {
        return Err(Fault::Corrupt { offset: STAMP_BYTES });
    }
    judge(stamp, index, generation).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILLS: [Fill; 6] = [Fill::Zeros, Fill::Ones, Fill::Sequence, Fill::Random, Fill::Text, Fill::Corpus];

    fn page(pages: &Pages, index: u64, generation: u32) -> Page {
        let mut page = [0x5a; PAGE_BYTES];
        pages.write(&mut page, index, generation);
        page
    }

    #[test]
    fn what_was_written_is_right() {
        for (_, fill) in Fill::ALL {
            let pages = Pages::new(fill);
            for index in [0, 1, 17, 4095, 1 << 24] {
                for generation in [1, 2, 3, 254, 255, 256, 70_000] {
                    let page = page(&pages, index, generation);
                    assert_eq!(pages.check(&page, index, generation), Ok(()), "{fill:?} {index} {generation}");
                }
            }
        }
    }

    #[test]
    fn touching_a_page_brings_it_to_the_generation_whatever_it_holds() {
        for (_, fill) in Fill::ALL {
            let pages = Pages::new(fill);
            for index in 0..64 {
                let mut page = page(&pages, index, 1);
                for generation in 2..6 {
                    pages.touch(&mut page, index, generation);
                    assert_eq!(pages.check(&page, index, generation), Ok(()), "{fill:?} {index} {generation}");
                }
            }
        }
    }

    #[test]
    fn a_touched_stamped_page_keeps_its_content() {
        let pages = Pages::new(Fill::Corpus);
        let before = page(&pages, 9, 1);
        let mut after = before;
        pages.touch(&mut after, 9, 2);
        assert_eq!(before[STAMP_BYTES..], after[STAMP_BYTES..]);
        assert_eq!(pages.check(&after, 9, 1), Err(Fault::Newer { generation: 2 }));
    }

    #[test]
    fn a_lost_page_is_seen_in_every_kind_that_is_not_zero() {
        for fill in FILLS {
            let pages = Pages::new(fill);
            assert_eq!(pages.check(&[0; PAGE_BYTES], 5, 2), Err(Fault::Lost), "{fill:?}");
        }
    }

    #[test]
    fn a_stale_page_is_seen_in_every_kind() {
        for fill in FILLS {
            let pages = Pages::new(fill);
            for generation in 2..300 {
                let old = page(&pages, 5, generation - 1);
                let expected = match fill {
                    // Zero in the generation before: lost and stale are the same.
                    Fill::Zeros if is_zero(generation - 1) => Fault::Lost,
                    _ => Fault::Stale { generation: generation - 1 },
                };
                assert_eq!(pages.check(&old, 5, generation), Err(expected), "{fill:?} {generation}");
            }
        }
    }

    #[test]
    fn a_page_ahead_of_the_table_says_that_the_table_is_stale() {
        for fill in [Fill::Sequence, Fill::Random, Fill::Text, Fill::Corpus, Fill::Ones] {
            let pages = Pages::new(fill);
            let page = page(&pages, 5, 3);
            assert_eq!(pages.check(&page, 5, 2), Err(Fault::Newer { generation: 3 }), "{fill:?}");
        }
    }

    #[test]
    fn a_foreign_page_is_seen_where_content_tells_pages_apart() {
        for fill in [Fill::Sequence, Fill::Random, Fill::Text, Fill::Corpus, Fill::Zeros] {
            let pages = Pages::new(fill);
            let other = page(&pages, 6, 2);
            assert_eq!(pages.check(&other, 5, 2), Err(Fault::Foreign { index: 6 }), "{fill:?}");
        }
    }

    #[test]
    fn one_changed_bit_anywhere_is_seen() {
        for fill in FILLS {
            let pages = Pages::new(fill);
            for generation in [1, 2] {
                for at in (0..PAGE_BYTES).step_by(37) {
                    let mut page = page(&pages, 5, generation);
                    page[at] ^= 1 << (at % 8);
                    assert!(pages.check(&page, 5, generation).is_err(), "{fill:?} {generation} byte {at}");
                }
            }
        }
    }

    #[test]
    fn a_page_put_together_from_two_generations_is_corrupt() {
        for fill in [Fill::Sequence, Fill::Random, Fill::Text, Fill::Corpus] {
            let pages = Pages::new(fill);
            let (old, mut new) = (page(&pages, 5, 1), page(&pages, 5, 2));
            new[2048..].copy_from_slice(&old[2048..]);
            assert!(matches!(pages.check(&new, 5, 2), Err(Fault::Corrupt { .. })), "{fill:?}");
        }
    }

    #[test]
    fn mixed_memory_has_the_shares_it_promises() {
        let zero = (0..160_000).filter(|&index| Fill::Mixed.of(index) == Fill::Zeros).count();
        assert!((64_000..80_000).contains(&zero), "{zero} of 160000");
    }
}
