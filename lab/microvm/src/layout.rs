//! The layout of guest physical memory.
//!
//! ```text
//! 0             devices (guest/src/share.rs)
//! RAM_START     the payload, then page tables (KVM only)
//!               of each vCPU: layout, orders, counters (a page each), stack, table of generations
//!               of each vCPU: the pages that it fills, writes and verifies
//! ```
//!
//! It follows from the size of RAM and the number of vCPUs alone, so both ends of a migration have the same.

use crate::config::Workload;
use crate::error::Error;
use sterna_guest::memory::Pattern;
use sterna_guest::page::Fill;
use sterna_guest::share::{Layout, RAM_START};

/// Bytes in a page.
pub(crate) const PAGE: u64 = sterna::PAGE_SIZE as u64;
/// Bytes reserved for the payload.
pub(crate) const PAYLOAD_ROOM: u64 = 512 << 10;
const STACK_PAGES: u64 = 16;
/// Entries of a table of generations in a page.
const ENTRIES: u64 = PAGE / 4;
/// The range of one page table of the third level.
const GIB: u64 = 1 << 30;

/// All addresses are of guest physical memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GuestLayout {
    /// The first page table; all of them follow each other.
    pub(crate) page_tables: u64,
    /// The end of the memory that is mapped for the guest.
    pub(crate) end: u64,
    pub(crate) shares: Vec<ShareLayout>,
}

/// The layout of a vCPU's share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ShareLayout {
    /// Where `share` is written for the guest.
    pub(crate) layout: u64,
    pub(crate) orders: u64,
    pub(crate) counters: u64,
    /// The end of its stack, which grows down.
    pub(crate) stack: u64,
    pub(crate) share: Layout,
}

impl GuestLayout {
    /// Computes the layout for this much RAM and number of vCPUs.
    pub(crate) fn new(ram: u64, vcpus: usize, workload: &Workload) -> Result<Self, Error> {
        if !(1..=4).contains(&vcpus) {
            return Err(Error::Config(format!("{vcpus} vCPUs: must be 1 to 4")));
        }
        if !(1..=100).contains(&workload.span) {
            return Err(Error::Config(format!(
                "pages are written again in {} % of memory: must be 1 to 100",
                workload.span
            )));
        }
        let end = RAM_START + ram;
        let page_tables = RAM_START + PAYLOAD_ROOM;
        let first_share = page_tables + (2 + end.div_ceil(GIB)) * PAGE;
        let own = 3 + STACK_PAGES;
        // Each page of the table is for ENTRIES pages; one more per vCPU for what is not a whole table page.
        let left = (end.saturating_sub(first_share) / PAGE).saturating_sub(vcpus as u64 * (own + 1));
        let count = left * ENTRIES / (ENTRIES + 1) / vcpus as u64;
        if count == 0 {
            return Err(Error::Config(format!("{ram} bytes of RAM leave no page for each of {vcpus} vCPUs")));
        }
        let stride = (own + count.div_ceil(ENTRIES)) * PAGE;
        let first_page = first_share + vcpus as u64 * stride;
        let shares = (0..vcpus as u64).map(|vcpu| {
            let base = first_share + vcpu * stride;
            ShareLayout {
                layout: base,
                orders: base + PAGE,
                counters: base + 2 * PAGE,
                stack: base + own * PAGE,
                share: Layout {
                    vcpu,
                    pages: first_page + vcpu * count * PAGE,
                    count,
                    table: base + own * PAGE,
                    first: vcpu * count,
                    span: (count * u64::from(workload.span) / 100).max(1),
                    fill: index_of(&Fill::ALL, &workload.fill),
                    pattern: index_of(&Pattern::ALL, &workload.pattern),
                    whole: u64::from(workload.whole),
                },
            }
        });
        Ok(Self { page_tables, end, shares: shares.collect() })
    }
}

fn index_of<T: PartialEq>(all: &[(&str, T)], wanted: &T) -> u64 {
    all.iter().position(|(_, known)| known == wanted).expect("ALL has all") as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_little_is_left_over_whatever_the_size() {
        for ram in [2u64 << 20, 4 << 20, 6 << 20, 64 << 20, 1 << 30, 3 << 30, 7 << 30, (512 << 30) - RAM_START] {
            for vcpus in 1..=4 {
                let layout = GuestLayout::new(ram, vcpus, &Workload::default()).expect("fits");
                let mut ranges = vec![(RAM_START, PAYLOAD_ROOM)];
                ranges.push((layout.page_tables, (2 + (RAM_START + ram).div_ceil(GIB)) * PAGE));
                for share in &layout.shares {
                    ranges.extend([(share.layout, PAGE), (share.orders, PAGE), (share.counters, PAGE)]);
                    ranges.push((share.stack - STACK_PAGES * PAGE, STACK_PAGES * PAGE));
                    ranges.push((share.share.table, share.share.count * 4));
                    ranges.push((share.share.pages, share.share.count * PAGE));
                }
                ranges.sort_unstable();
                for pair in ranges.windows(2) {
                    assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{ram} {vcpus}: {pair:x?}");
                }
                let (last, bytes) = ranges[ranges.len() - 1];
                assert!(last + bytes <= RAM_START + ram);
                assert!(RAM_START + ram - last - bytes < 16 * PAGE + ram / 1000, "{ram} {vcpus}");
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let workload = Workload::default();
        assert!(GuestLayout::new(512 << 10, 1, &workload).is_err());
        for vcpus in [0, 5] {
            assert!(GuestLayout::new(64 << 20, vcpus, &workload).is_err());
        }
        for span in [0, 101] {
            assert!(GuestLayout::new(64 << 20, 1, &Workload { span, ..workload }).is_err());
        }
    }
}
