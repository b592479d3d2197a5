//! Pages on their way that are not in the cache, where pages cannot be read again: until they are acknowledged they may be refused, and
//! this is the only copy of them.
//!
//! For each page whose last packet is not acknowledged, either the cache has it, and keeps its place until then, or the newest
//! entry here has what the page became: content, or zero. So it is known of a refused page whether newer content follows anyway.

use std::collections::VecDeque;
use std::ops::Range;

use sterna_memory::PAGE_SIZE;
use sterna_wire::packet::{Run, RunKind};

/// Neighbouring pages of one packet.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The packet.
    sequence: u64,
    block: u16,
    run: Run,
}

impl Entry {
    fn has(&self, block: u16, page: u64) -> bool {
        self.block == block && (self.run.first..self.run.end()).contains(&page)
    }

    /// Returns the bytes of its content.
    fn bytes(&self) -> usize {
        if self.run.kind == RunKind::Normal { self.run.count as usize * PAGE_SIZE } else { 0 }
    }
}

/// A page's newest entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Newest {
    /// The packet that had it.
    pub(super) sequence: u64,
    /// The place of its content, unless it became zero.
    content: Option<Range<usize>>,
}

/// Pages on their way, oldest packet first. The memory is reused and grows to at most the bytes in flight.
#[derive(Debug, Default)]
pub(super) struct Underway {
    entries: VecDeque<Entry>,
    content: VecDeque<u8>,
}

impl Underway {
    /// Adds pages of `block` that are sent in the packet `sequence`, the newest one; `content` is that of a normal run.
    fn push(&mut self, sequence: u64, block: u16, run: Run, content: &[u8]) {
        let entry = Entry { sequence, block, run };
        debug_assert_eq!(entry.bytes(), content.len());
        debug_assert!(self.entries.back().is_none_or(|last| last.sequence <= sequence));
        self.entries.push_back(entry);
        self.content.extend(content);
    }

    /// Adds `runs` of `block` that are sent in the packet `sequence`, each with the page of `content` at which its content begins.
    pub(super) fn push_all(&mut self, sequence: u64, block: u16, runs: &[(Run, usize)], content: &[u8]) {
        for (run, at) in runs {
            let pages = if run.kind == RunKind::Normal { run.count as usize } else { 0 };
            self.push(sequence, block, *run, &content[at * PAGE_SIZE..][..pages * PAGE_SIZE]);
        }
    }

    /// Removes the pages of packets up to `acknowledged`: they have arrived, and refused ones have been retransmitted.
    pub(super) fn arrived(&mut self, acknowledged: u64) {
        while let Some(entry) = self.entries.pop_front_if(|entry| entry.sequence <= acknowledged) {
            self.content.drain(..entry.bytes());
        }
    }

    /// Returns the newest entry of a page.
    pub(super) fn newest(&self, block: u16, page: u64) -> Option<Newest> {
        let mut end = self.content.len();
        for entry in self.entries.iter().rev() {
            let begin = end - entry.bytes();
            if entry.has(block, page) {
                let at = begin + (page - entry.run.first) as usize * PAGE_SIZE;
                let content = (entry.run.kind == RunKind::Normal).then_some(at..at + PAGE_SIZE);
                return Some(Newest { sequence: entry.sequence, content });
            }
            end = begin;
        }
        None
    }

    /// Appends the content of a page to `into`. Returns false if the page became zero.
    pub(super) fn read(&self, newest: &Newest, into: &mut Vec<u8>) -> bool {
        newest.content.clone().map(|range| into.extend(self.content.range(range))).is_some()
    }

    /// Bytes of content.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.content.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(kind: RunKind, first: u64, count: u32) -> Run {
        Run { kind, first, count }
    }

    fn page(underway: &Underway, block: u16, page: u64) -> Option<(u64, Vec<u8>)> {
        let newest = underway.newest(block, page)?;
        let mut content = Vec::new();
        let normal = underway.read(&newest, &mut content);
        assert_eq!(content.len(), if normal { PAGE_SIZE } else { 0 });
        content.dedup();
        Some((newest.sequence, content))
    }

    #[test]
    fn the_newest_of_a_page_is_found_until_its_packet_has_arrived() {
        let mut underway = Underway::default();
        // Many times, so that the memory is used again at every offset.
        for round in 0..100u64 {
            let (first, number) = (4 * round + 1, round as u8);
            underway.push(first, 0, run(RunKind::Normal, 5, 2), &[[number; PAGE_SIZE], [101; PAGE_SIZE]].concat());
            underway.push(first, 0, run(RunKind::Zero, 8, 100), &[]);
            underway.push(first + 1, 1, run(RunKind::Normal, 6, 1), &[102; PAGE_SIZE]);
            underway.push(first + 2, 0, run(RunKind::Normal, 107, 1), &[103; PAGE_SIZE]);
            underway.push(first + 3, 0, run(RunKind::Zero, 6, 1), &[]);

            assert_eq!(page(&underway, 0, 5), Some((first, vec![number])));
            assert_eq!(page(&underway, 0, 6), Some((first + 3, vec![])));
            assert_eq!(page(&underway, 1, 6), Some((first + 1, vec![102])));
            assert_eq!(page(&underway, 0, 106), Some((first, vec![])));
            assert_eq!(page(&underway, 0, 107), Some((first + 2, vec![103])));
            assert_eq!((page(&underway, 0, 7), page(&underway, 0, 108), page(&underway, 1, 5)), (None, None, None));

            underway.arrived(first);
            assert_eq!((page(&underway, 0, 5), page(&underway, 0, 106)), (None, None));
            assert_eq!(page(&underway, 1, 6), Some((first + 1, vec![102])));
            assert_eq!(underway.bytes(), 2 * PAGE_SIZE);
            underway.arrived(first + 2 + round % 2);
        }
        underway.arrived(u64::MAX);
        assert!(underway.entries.is_empty() && underway.bytes() == 0);
    }
}
