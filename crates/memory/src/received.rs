//! The pages that the destination has received, so that a zero page costs a page fault only where necessary.
//!
//! * A page is marked *before* content is decoded into it. If decoding fails half way, the page is no longer fresh.
//! * A zero page for a page that is fresh (never received, in memory known to be zero) is ignored: the page is not even
//!   read.
//! * A zero page for any other page clears that page, without reading it first.
//!
//! A mark means that content was placed here. Zero pages set no mark: an ignored page is as fresh as before, and a
//! cleared page has its mark already or lies in memory that is not known to be fresh.

use crate::bitmap::AtomicPageBitmap;
use std::ops::Range;

/// The state of a RAM block's memory before the first page arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Never written: it reads as zero wherever no content was placed.
    Fresh,
    /// Pre-filled, reused, or unknown.
    Unknown,
}

/// The received pages of one RAM block. Shared by all channels: every method takes `&self`.
#[derive(Debug)]
pub struct ReceivedBitmap {
    pages: AtomicPageBitmap,
}

impl ReceivedBitmap {
    /// Makes a bitmap for a block of `pages` pages, none of them received.
    pub fn new(pages: u64) -> Self {
        Self { pages: AtomicPageBitmap::new(pages) }
    }

    /// Returns the number of pages of the block.
    pub fn pages(&self) -> u64 {
        self.pages.pages()
    }

    /// Marks `run` as received. Call this before anything is decoded into these pages.
    ///
    /// # Panics
    /// If `run` is not within the block.
    pub fn mark(&self, run: Range<u64>) {
        self.pages.set(run);
    }

    /// Returns whether content was placed, or began to be placed, in `page`.
    pub fn contains(&self, page: u64) -> bool {
        self.pages.contains(page)
    }

    /// Returns how many pages have received content.
    pub fn count(&self) -> u64 {
        self.pages.count()
    }

    /// Handles zero pages that arrived for `run`: calls `clear` for each part that must be cleared. All other pages of
    /// the run must be left untouched.
    ///
    /// # Panics
    /// If `run` is not within the block.
    pub fn zero(&self, run: Range<u64>, freshness: Freshness, mut clear: impl FnMut(Range<u64>)) {
        match freshness {
            Freshness::Fresh => self.pages.for_each_run_in(run, clear),
            Freshness::Unknown => {
                assert!(run.start <= run.end && run.end <= self.pages(), "zero pages {run:?} are not within the block");
                if !run.is_empty() {
                    clear(run);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the first page and the page after the last of each part to clear.
    fn cleared(received: &ReceivedBitmap, run: Range<u64>, freshness: Freshness) -> Vec<(u64, u64)> {
        let mut parts = Vec::new();
        received.zero(run, freshness, |part| parts.push((part.start, part.end)));
        parts
    }

    #[test]
    fn a_zero_page_for_fresh_memory_is_ignored_however_often_it_comes() {
        let received = ReceivedBitmap::new(1000);
        assert!(cleared(&received, 0..1000, Freshness::Fresh).is_empty());
        assert!(cleared(&received, 0..1000, Freshness::Fresh).is_empty());
        assert_eq!(received.count(), 0);
    }

    #[test]
    fn a_zero_page_over_received_content_is_cleared_and_its_neighbours_are_not() {
        let received = ReceivedBitmap::new(1000);
        received.mark(10..20);
        received.mark(60..70);
        received.mark(500..501);
        assert_eq!(cleared(&received, 15..600, Freshness::Fresh), [(15, 20), (60, 70), (500, 501)]);
    }

    #[test]
    fn in_memory_not_known_to_be_fresh_every_zero_page_is_cleared() {
        let received = ReceivedBitmap::new(1000);
        received.mark(10..20);
        assert_eq!(cleared(&received, 0..1000, Freshness::Unknown), [(0, 1000)]);
        assert!(cleared(&received, 7..7, Freshness::Unknown).is_empty());
    }

    #[test]
    #[should_panic(expected = "not within")]
    fn zero_pages_outside_the_block_are_refused() {
        ReceivedBitmap::new(10).zero(5..11, Freshness::Unknown, |_| {});
    }

    proptest! {
        /// Tested with real content: after any sequence, each page has the content that was sent last.
        #[test]
        fn memory_ends_right_and_fresh_pages_stay_untouched(
            freshness in prop_oneof![Just(Freshness::Fresh), Just(Freshness::Unknown)],
            messages in proptest::collection::vec((any::<bool>(), 0u64..200, 1u64..40), 0..30),
        ) {
            let pages = 240u64;
            let start = if freshness == Freshness::Fresh { 0u32 } else { 99 };
            let mut memory = vec![start; pages as usize];
            let mut touched = vec![false; pages as usize];
            let mut expected = vec![None; pages as usize];
            let received = ReceivedBitmap::new(pages);
            for (number, (normal, first, length)) in messages.into_iter().enumerate() {
                let run = first..first + length;
                let mut write = |part: Range<u64>, value: u32| for page in part {
                    memory[page as usize] = value;
                    touched[page as usize] = true;
                };
                let value = if normal { number as u32 + 1 } else { 0 };
                if normal {
                    received.mark(run.clone());
                    write(run.clone(), value);
                } else {
                    received.zero(run.clone(), freshness, |part| write(part, 0));
                }
                expected[run.start as usize..run.end as usize].fill(Some(value));
            }
            for page in 0..pages as usize {
                prop_assert_eq!(memory[page], expected[page].unwrap_or(start), "page {}", page);
                let had_content = received.contains(page as u64);
                prop_assert_eq!(touched[page], had_content || (freshness == Freshness::Unknown && expected[page].is_some()));
            }
        }
    }
}
