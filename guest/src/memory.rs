//! The memory that the guest fills, dirties and verifies, with the table of generations that says what is right.
//!
//! The table is guest memory too and may come through a move as badly as any page. So the number of writings is counted
//! beside it: the table's entries must add up to it.

use crate::content::{PAGE_BYTES, Page, Random};
use crate::page::{FIRST_GENERATION, Fault, Fill, Pages};

/// Which page is written next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One after another, then again from the first.
    Sequential,
    /// Any, all equally often.
    Random,
    /// Nine of ten writings to the first tenth, the others anywhere.
    Hot,
}

impl Pattern {
    /// All patterns with their names.
    pub const ALL: [(&'static str, Pattern); 3] =
        [("sequential", Pattern::Sequential), ("random", Pattern::Random), ("hot", Pattern::Hot)];
}

/// A wrong page: its index, the generation it should have, and what is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bad {
    /// The page, counted from the start of the filled memory.
    pub index: u64,
    /// The generation that the table says.
    pub expected: u32,
    /// What the page says.
    pub fault: Fault,
}

/// Filled memory.
pub struct Memory<'a> {
    pages: &'a mut [Page],
    content: Pages,
    table: Vec<u32>,
    /// Sum of all generations in the table.
    writings: u64,
    pattern: Pattern,
    /// Pages from the first that are written; the others stay as filled.
    span: usize,
    random: Random,
    next_write: usize,
    next_check: usize,
}

impl<'a> Memory<'a> {
    /// Memory of `pages`, not filled yet. Of it the first `span` pages will be written.
    pub fn new(pages: &'a mut [Page], fill: Fill, pattern: Pattern, span: usize) -> Self {
        let count = pages.len();
        Memory {
            pages,
            content: Pages::new(fill),
            table: vec![FIRST_GENERATION; count],
            writings: count as u64 * u64::from(FIRST_GENERATION),
            pattern,
            span: span.clamp(1, count.max(1)),
            random: Random::new(0x6469_7274),
            next_write: 0,
            next_check: 0,
        }
    }

    /// Writes every page for the first time.
    pub fn fill(&mut self) {
        for (index, page) in self.pages.iter_mut().enumerate() {
            self.content.write(page, index as u64, FIRST_GENERATION);
        }
    }

    /// Pages in all.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// How often pages were written, filling included.
    pub fn writings(&self) -> u64 {
        self.writings
    }

    /// Writes the next page: the whole of it, or only as little as makes it another generation. The start of what it held is
    /// checked before, so that writing does not hide a page that came through a move badly.
    ///
    /// # Errors
    /// The page and what was wrong with it before it was written.
    pub fn dirty_next(&mut self, whole: bool) -> Result<(), Bad> {
        let index = match self.pattern {
            Pattern::Sequential => {
                let index = self.next_write;
                self.next_write = (index + 1) % self.span;
                index
            }
            Pattern::Random => self.random.next() as usize % self.span,
            Pattern::Hot => {
                let bits = self.random.next();
                let range = if bits.is_multiple_of(10) { self.span } else { (self.span / 10).max(1) };
                (bits >> 8) as usize % range
            }
        };
        let expected = self.table[index];
        let generation = expected.wrapping_add(1);
        self.table[index] = generation;
        self.writings += 1;
        let page = &mut self.pages[index];
        let before = self.content.check_start(page, index as u64, expected);
        if whole {
            self.content.write(page, index as u64, generation);
        } else {
            self.content.touch(page, index as u64, generation);
        }
        before.map_err(|fault| Bad { index: index as u64, expected, fault })
    }

    /// Checks the next page in order.
    ///
    /// # Errors
    /// The page and what is wrong with it.
    pub fn check_next(&mut self) -> Result<(), Bad> {
        let index = self.next_check;
        self.next_check = (index + 1) % self.pages.len();
        self.check(index)
    }

    /// Checks page `index`.
    ///
    /// # Errors
    /// The page and what is wrong with it.
    pub fn check(&self, index: usize) -> Result<(), Bad> {
        let expected = self.table[index];
        self.content.check(&self.pages[index], index as u64, expected).map_err(|fault| Bad {
            index: index as u64,
            expected,
            fault,
        })
    }

    /// Whether the table's generations add up to the number of writings.
    pub fn table_is_whole(&self) -> bool {
        self.table.iter().map(|&generation| u64::from(generation)).sum::<u64>() == self.writings
    }

    /// Bytes of filled memory.
    pub fn bytes(&self) -> u64 {
        (self.pages.len() * PAGE_BYTES) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad_pages(memory: &Memory<'_>) -> Vec<Bad> {
        (0..memory.len()).filter_map(|index| memory.check(index).err()).collect()
    }

    #[test]
    fn dirtied_memory_stays_right_in_every_fill_and_pattern() {
        for (_, fill) in Fill::ALL {
            for (_, pattern) in Pattern::ALL {
                for whole in [true, false] {
                    let mut pages = vec![[0xee; PAGE_BYTES]; 97];
                    let mut memory = Memory::new(&mut pages, fill, pattern, 50);
                    memory.fill();
                    for _ in 0..400 {
                        assert_eq!(memory.dirty_next(whole), Ok(()));
                    }
                    assert_eq!(bad_pages(&memory), [], "{fill:?} {pattern:?} {whole}");
                    assert!(memory.table_is_whole());
                    assert_eq!(memory.writings(), 497);
                }
            }
        }
    }

    #[test]
    fn a_page_put_back_to_what_it_was_is_found_as_stale() {
        let mut pages = vec![[0; PAGE_BYTES]; 16];
        let mut memory = Memory::new(&mut pages, Fill::Random, Pattern::Sequential, 16);
        memory.fill();
        let before = memory.pages[3];
        for _ in 0..16 {
            assert_eq!(memory.dirty_next(true), Ok(()));
        }
        memory.pages[3] = before;
        assert_eq!(bad_pages(&memory), [Bad { index: 3, expected: 2, fault: Fault::Stale { generation: 1 } }]);
    }

    #[test]
    fn a_page_of_the_table_put_back_is_found_although_its_pages_went_back_too() {
        let mut pages = vec![[0; PAGE_BYTES]; 4];
        let mut memory = Memory::new(&mut pages, Fill::Random, Pattern::Sequential, 4);
        memory.fill();
        let (page, generation) = (memory.pages[0], memory.table[0]);
        assert_eq!(memory.dirty_next(true), Ok(()));
        (memory.pages[0], memory.table[0]) = (page, generation);
        assert_eq!(bad_pages(&memory), []);
        assert!(!memory.table_is_whole());
    }

    #[test]
    fn a_lost_page_is_reported_when_it_is_overwritten() {
        for fill in [Fill::Ones, Fill::Sequence, Fill::Random, Fill::Text, Fill::Corpus] {
            let mut pages = vec![[0; PAGE_BYTES]; 4];
            let mut memory = Memory::new(&mut pages, fill, Pattern::Sequential, 4);
            memory.fill();
            memory.pages[0] = [0; PAGE_BYTES];
            assert_eq!(memory.dirty_next(true), Err(Bad { index: 0, expected: 1, fault: Fault::Lost }), "{fill:?}");
            assert_eq!(bad_pages(&memory), []);
        }
    }

    #[test]
    fn only_the_span_is_written() {
        let mut pages = vec![[0; PAGE_BYTES]; 32];
        let mut memory = Memory::new(&mut pages, Fill::Sequence, Pattern::Random, 8);
        memory.fill();
        for _ in 0..500 {
            assert_eq!(memory.dirty_next(true), Ok(()));
        }
        assert!(memory.table[..8].iter().all(|&generation| generation > FIRST_GENERATION));
        assert!(memory.table[8..].iter().all(|&generation| generation == FIRST_GENERATION));
    }

    #[test]
    fn checking_goes_round_through_all_pages() {
        let mut pages = vec![[0; PAGE_BYTES]; 8];
        let mut memory = Memory::new(&mut pages, Fill::Text, Pattern::Sequential, 8);
        memory.fill();
        memory.pages[7] = [0; PAGE_BYTES];
        let found: Vec<u64> = (0..16).filter_map(|_| memory.check_next().err().map(|bad| bad.index)).collect();
        assert_eq!(found, [7, 7]);
    }
}
