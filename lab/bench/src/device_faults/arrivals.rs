//! The pages that arrive at the destination, and their order: packets of 128 pages, by address, as a migration sends
//! them.
//!
//! The first round has all pages, later rounds those of a working set, whose pages change between zero and normal.

use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::RamBlock;

/// Pages in a packet.
pub(super) const PACKET: usize = 128;
/// Rounds, the first included.
pub(super) const ROUNDS: u64 = 4;
/// Pages that are zero or normal together.
const CLUSTER: u64 = 8;
/// One of this many clusters is in the working set.
const WORKING_SET: u64 = 64;
/// One of this many clusters of the working set is zero, another one in each later round.
const ZERO_LATER: u64 = 4;
/// Number of different contents; a prime, so that neighbours and rounds have different ones.
pub(super) const CONTENTS: usize = 61;

/// A page that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) page: u64,
    /// The number of its content; none for a zero page.
    pub(super) content: Option<usize>,
}

/// A guest's pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrivals {
    pub(super) pages: u64,
    /// Pages that are normal in the first round, of 64.
    pub(super) normal_of_64: u64,
}

impl Arrivals {
    /// Returns the pages of round `round`, in order.
    pub(super) fn of(self, round: u64) -> Vec<Arrival> {
        let pages = (0..self.pages).filter(|page| round == 0 || in_working_set(*page));
        pages.map(|page| Arrival { page, content: self.content(page, round) }).collect()
    }

    fn content(self, page: u64, round: u64) -> Option<usize> {
        let cluster = page / CLUSTER;
        // The odd factor permutes each group of 64 neighbouring clusters, differently in each huge page.
        let zero = match round {
            0 => (cluster.wrapping_mul(37) + mixed(cluster / 64) % 64) % 64 >= self.normal_of_64,
            _ => mixed(cluster ^ round << 40).is_multiple_of(ZERO_LATER),
        };
        (!zero).then_some(((page + 17 * round) % CONTENTS as u64) as usize)
    }

    /// Checks every page of `block` after all rounds.
    pub(super) fn check(self, block: &RamBlock, contents: &[Vec<u8>]) -> Result<(), String> {
        let zero = vec![0; PAGE_SIZE];
        for page in 0..self.pages {
            let last = if in_working_set(page) { ROUNDS - 1 } else { 0 };
            let expected = self.content(page, last).map_or(&zero, |number| &contents[number]);
            let at = block.start().expect("mapped here").as_ptr().wrapping_add(page as usize * PAGE_SIZE);
            // SAFETY: the page is in the block, and the expected content is a page; no thread writes either of them
            // now.
            let differs =
                unsafe { sterna_memory::compare::first_difference_raw(at, expected.as_ptr(), expected.len()) };
            if let Some(byte) = differs {
                return Err(format!("page {page} is not what was sent last: it differs at byte {byte}"));
            }
        }
        Ok(())
    }
}

fn in_working_set(page: u64) -> bool {
    mixed(page / CLUSTER).is_multiple_of(WORKING_SET)
}

/// Maps neighbouring numbers to distant ones (the finaliser of SplitMix64).
fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// Makes different pages that deflate to about a third.
pub(super) fn contents() -> Vec<Vec<u8>> {
    let page = |number: usize| {
        let word = |at: usize| mixed((number * PAGE_SIZE + at / 8 % 180 * 8) as u64 | 1).to_le_bytes()[at % 8];
        (0..PAGE_SIZE).map(word).collect()
    };
    (0..CONTENTS).map(page).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::guest::{Guest, Memory};

    #[test]
    fn the_share_of_normal_pages_is_exact_and_later_rounds_change_pages_both_ways() {
        for normal_of_64 in [2, 56] {
            let arrivals = Arrivals { pages: 32_768, normal_of_64 };
            let first = arrivals.of(0);
            assert_eq!(first.len(), 32_768);
            assert_eq!(first.iter().filter(|arrival| arrival.content.is_some()).count() as u64, 512 * normal_of_64);
            let mut now: Vec<Option<usize>> = first.iter().map(|arrival| arrival.content).collect();
            let (mut to_zero, mut to_normal) = (0, 0);
            for round in 1..ROUNDS {
                let set = arrivals.of(round);
                assert!((300..900).contains(&set.len()), "{} pages in round {round}", set.len());
                assert!(set.is_sorted_by_key(|arrival| arrival.page));
                for Arrival { page, content } in set {
                    let before = std::mem::replace(&mut now[page as usize], content);
                    to_zero += u32::from(before.is_some() && content.is_none());
                    to_normal += u32::from(before.is_none() && content.is_some());
                }
            }
            assert!(to_zero > 50 && to_normal > 50, "{to_zero} and {to_normal}");
        }
    }

    #[test]
    fn memory_that_is_not_what_was_sent_last_is_found_out() {
        let arrivals = Arrivals { pages: 1024, normal_of_64: 32 };
        let guest = Guest::new(Memory::SmallPages, 1024 * PAGE_SIZE as u64).unwrap();
        let (ram, contents) = (guest.ram(), contents());
        let block = &ram.blocks()[0];
        assert!(arrivals.check(block, &contents).unwrap_err().contains("is not what was sent last"));
        for Arrival { page, content } in (0..ROUNDS).flat_map(|round| arrivals.of(round)) {
            match content {
                Some(number) => block.write(page, &contents[number]),
                None => block.zero(page..page + 1),
            }
        }
        assert_eq!(arrivals.check(block, &contents), Ok(()));
        block.zero(1023..1024);
        block.write(1023, &[1]);
        assert!(arrivals.check(block, &contents).unwrap_err().starts_with("page 1023 "));
    }

    #[test]
    fn contents_differ_and_none_is_zero() {
        let mut all = contents();
        assert!(all.iter().all(|page| page.len() == PAGE_SIZE && page.iter().any(|byte| *byte != 0)));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), CONTENTS);
    }
}
