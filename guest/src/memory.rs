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
    /// The page, counted from [`Plan::first`].
    pub index: u64,
    /// The generation that the table says.
    pub expected: u32,
    /// What the page says.
    pub fault: Fault,
}

/// How far filling, writing and checking are: plain numbers, so that a guest can keep them in its memory between turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Progress {
    /// Pages from the first that are filled.
    pub filled: u64,
    /// Sum of all generations in the table: how often pages were written, filling included.
    pub writings: u64,
    /// Where the generator of random pages stands.
    pub random: u64,
    /// The page written next, where they are written in order.
    pub next_write: u64,
    /// The page checked next.
    pub next_check: u64,
}

/// What is done to memory.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// What memory is filled with.
    pub fill: Fill,
    /// The order in which pages are written again.
    pub pattern: Pattern,
    /// How many pages, from the first, are ever written again.
    pub span: usize,
    /// The number of the first page: guests that share out their memory number each page once.
    pub first: u64,
}

/// Memory that is filled, written and checked.
pub struct Memory<'a> {
    pages: &'a mut [Page],
    table: &'a mut [u32],
    content: Pages,
    plan: Plan,
    progress: Progress,
}

impl<'a> Memory<'a> {
    /// Memory of `pages`, as far as `progress` says ([`Progress::default`] at first), with its table of generations, one
    /// for each page.
    ///
    /// # Panics
    /// Where there are no pages, or the table is of another length.
    pub fn new(pages: &'a mut [Page], table: &'a mut [u32], plan: Plan, progress: Progress) -> Self {
        assert!(!pages.is_empty() && pages.len() == table.len(), "a table entry for each page");
        let plan = Plan { span: plan.span.clamp(1, pages.len()), ..plan };
        Memory { pages, table, content: Pages::new(plan.fill), plan, progress }
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Writes every page for the first time.
    pub fn fill(&mut self) {
        while self.fill_next() {}
    }

    /// Writes one more page for the first time, unless all are.
    pub fn fill_next(&mut self) -> bool {
        let index = self.progress.filled as usize;
        let Some(page) = self.pages.get_mut(index) else { return false };
        self.table[index] = FIRST_GENERATION;
        self.content.write(page, self.plan.first + index as u64, FIRST_GENERATION);
        self.progress.filled += 1;
        self.progress.writings += u64::from(FIRST_GENERATION);
        true
    }

    /// Pages in all.
    pub fn count(&self) -> usize {
        self.pages.len()
    }

    /// Writes the next page: the whole of it, or only as little as makes it another generation. The start of what it held is
    /// checked before, so that writing does not hide a page that came through a move badly.
    ///
    /// # Errors
    /// The page and what was wrong with it before it was written.
    pub fn dirty_next(&mut self, whole: bool) -> Result<(), Bad> {
        let index = self.choose();
        let number = self.plan.first + index as u64;
        let expected = self.table[index];
        let generation = expected.wrapping_add(1);
        self.table[index] = generation;
        self.progress.writings += 1;
        let page = &mut self.pages[index];
        let before = self.content.check_start(page, number, expected);
        if whole {
            self.content.write(page, number, generation);
        } else {
            self.content.touch(page, number, generation);
        }
        before.map_err(|fault| Bad { index: number, expected, fault })
    }

    /// The page that is written next.
    fn choose(&mut self) -> usize {
        let span = self.plan.span;
        let mut random = Random::at(self.progress.random);
        let index = match self.plan.pattern {
            Pattern::Sequential => {
                let index = self.progress.next_write as usize % span;
                self.progress.next_write = (index as u64 + 1) % span as u64;
                return index;
            }
            Pattern::Random => random.next() as usize % span,
            Pattern::Hot => {
                let bits = random.next();
                let range = if bits.is_multiple_of(10) { span } else { (span / 10).max(1) };
                (bits >> 8) as usize % range
            }
        };
        self.progress.random = random.position();
        index
    }

    /// Checks the next page in order.
    ///
    /// # Errors
    /// The page and what is wrong with it.
    pub fn check_next(&mut self) -> Result<(), Bad> {
        let index = self.progress.next_check as usize % self.pages.len();
        self.progress.next_check = (index as u64 + 1) % self.pages.len() as u64;
        self.check(index)
    }

    /// Checks the page at `index` of these pages.
    ///
    /// # Errors
    /// The page and what is wrong with it.
    pub fn check(&self, index: usize) -> Result<(), Bad> {
        let expected = self.table[index];
        let number = self.plan.first + index as u64;
        self.content.check(&self.pages[index], number, expected).map_err(|fault| Bad { index: number, expected, fault })
    }

    /// Whether the table's generations add up to the number of writings.
    pub fn table_is_whole(&self) -> bool {
        self.table.iter().map(|&generation| u64::from(generation)).sum::<u64>() == self.progress.writings
    }

    /// Bytes of filled memory.
    pub fn bytes(&self) -> u64 {
        (self.pages.len() * PAGE_BYTES) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(fill: Fill, pattern: Pattern, span: usize) -> Plan {
        Plan { fill, pattern, span, first: 0 }
    }

    fn bad_pages(memory: &Memory<'_>) -> Vec<Bad> {
        (0..memory.count()).filter_map(|index| memory.check(index).err()).collect()
    }

    #[test]
    fn dirtied_memory_stays_right_in_every_fill_and_pattern() {
        for (_, fill) in Fill::ALL {
            for (_, pattern) in Pattern::ALL {
                for whole in [true, false] {
                    let (mut pages, mut table) = (vec![[0xee; PAGE_BYTES]; 97], vec![0; 97]);
                    let mut memory = Memory::new(&mut pages, &mut table, plan(fill, pattern, 50), Progress::default());
                    memory.fill();
                    for _ in 0..400 {
                        assert_eq!(memory.dirty_next(whole), Ok(()));
                    }
                    assert_eq!(bad_pages(&memory), [], "{fill:?} {pattern:?} {whole}");
                    assert!(memory.table_is_whole());
                    assert_eq!(memory.progress().writings, 497);
                }
            }
        }
    }

    #[test]
    fn a_page_put_back_to_what_it_was_is_found_as_stale() {
        let (mut pages, mut table) = (vec![[0; PAGE_BYTES]; 16], vec![0; 16]);
        let mut memory =
            Memory::new(&mut pages, &mut table, plan(Fill::Random, Pattern::Sequential, 16), Progress::default());
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
        let (mut pages, mut table) = (vec![[0; PAGE_BYTES]; 4], vec![0; 4]);
        let mut memory =
            Memory::new(&mut pages, &mut table, plan(Fill::Random, Pattern::Sequential, 4), Progress::default());
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
            let (mut pages, mut table) = (vec![[0; PAGE_BYTES]; 4], vec![0; 4]);
            let mut memory =
                Memory::new(&mut pages, &mut table, plan(fill, Pattern::Sequential, 4), Progress::default());
            memory.fill();
            memory.pages[0] = [0; PAGE_BYTES];
            assert_eq!(memory.dirty_next(true), Err(Bad { index: 0, expected: 1, fault: Fault::Lost }), "{fill:?}");
            assert_eq!(bad_pages(&memory), []);
        }
    }

    #[test]
    fn only_the_span_is_written() {
        let (mut pages, mut table) = (vec![[0; PAGE_BYTES]; 32], vec![0; 32]);
        let mut memory =
            Memory::new(&mut pages, &mut table, plan(Fill::Sequence, Pattern::Random, 8), Progress::default());
        memory.fill();
        for _ in 0..500 {
            assert_eq!(memory.dirty_next(true), Ok(()));
        }
        assert!(memory.table[..8].iter().all(|&generation| generation > FIRST_GENERATION));
        assert!(memory.table[8..].iter().all(|&generation| generation == FIRST_GENERATION));
    }

    #[test]
    fn checking_goes_round_through_all_pages() {
        let (mut pages, mut table) = (vec![[0; PAGE_BYTES]; 8], vec![0; 8]);
        let mut memory =
            Memory::new(&mut pages, &mut table, plan(Fill::Text, Pattern::Sequential, 8), Progress::default());
        memory.fill();
        memory.pages[7] = [0; PAGE_BYTES];
        let found: Vec<u64> = (0..16).filter_map(|_| memory.check_next().err().map(|bad| bad.index)).collect();
        assert_eq!(found, [7, 7]);
    }

    #[test]
    fn kept_progress_goes_on_as_if_nothing_had_happened() {
        for (_, pattern) in Pattern::ALL {
            let run = |turns: usize| {
                let (mut pages, mut table) = (vec![[0; PAGE_BYTES]; 40], vec![0; 40]);
                let mut progress = Progress::default();
                for _ in 0..turns {
                    let plan = Plan { fill: Fill::Sequence, pattern, span: 30, first: 7 };
                    let mut memory = Memory::new(&mut pages, &mut table, plan, progress);
                    memory.fill();
                    for _ in 0..240 / turns {
                        assert_eq!(memory.dirty_next(true), Ok(()));
                        assert_eq!(memory.check_next(), Ok(()));
                    }
                    assert!(memory.table_is_whole());
                    progress = memory.progress();
                }
                (pages, table, progress)
            };
            assert!(run(1) == run(60), "{pattern:?}");
        }
    }

    #[test]
    fn pages_of_another_share_are_foreign() {
        let (mut pages, mut table) = (vec![[0; PAGE_BYTES]; 4], vec![0; 4]);
        for first in [0, 4] {
            let plan = Plan { first, ..plan(Fill::Random, Pattern::Sequential, 4) };
            Memory::new(&mut pages, &mut table, plan, Progress::default()).fill();
        }
        let done = Progress { filled: 4, writings: 4, ..Progress::default() };
        let memory = Memory::new(&mut pages, &mut table, plan(Fill::Random, Pattern::Sequential, 4), done);
        assert_eq!(memory.check(2), Err(Bad { index: 2, expected: 1, fault: Fault::Foreign { index: 6 } }));
    }
}
