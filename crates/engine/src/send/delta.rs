//! Pages by what has changed in them since the destination last acknowledged them.
//!
//! Each channel keeps what it has sent, in a cache of bounded size: all pages of a region travel on one channel, so nobody else
//! has newer content of them. A delta is made only against content that has been acknowledged and was not refused since, and the
//! cache follows by applying the very record that was sent.
//!
//! The cache is set-associative: no index to grow, and a page has [`WAYS`] places. Where all are taken most newcomers go without, and one
//! whose deltas have paid stays longest: a guest that writes more memory than fits the cache, round by round in the same order, would else
//! replace everything just before it is needed.

use std::ops::Range;

use sterna_memory::PAGE_SIZE;
use sterna_memory::delta::{Created, apply, create_raw};
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::{DELTA_HEADER_LENGTH, MAX_RECORD, PageDelta};
use sterna_wire::packet::{Run, RunKind};

use super::again::SendAgain;
use crate::batch::Room;

/// Places that a page may be kept in.
const WAYS: usize = 8;
/// Of so many newcomers that find no free place one gets a taken one.
const ADMITTED: u32 = 8;
/// How much an average follows its newest value.
const SMOOTH: f64 = 1.0 / 16.0;

/// Which page is kept in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key(u64);

impl Key {
    const NONE: Self = Self(u64::MAX);

    /// Pages have 40 bits on the wire, blocks 16.
    fn new(block: u16, page: u64) -> Self {
        Self(u64::from(block) << 40 | page)
    }
}

/// A place.
#[derive(Clone, Copy, Debug)]
struct Place {
    key: Key,
    /// The packet that this content went in.
    sequence: u64,
    /// A delta against it has paid since somebody wanted the place.
    paid: bool,
}

/// The pages that a channel has sent.
#[derive(Debug)]
struct Cache {
    places: Vec<[Place; WAYS]>,
    content: Room,
    kept: usize,
    /// Newcomers that found no free place.
    turned_away: u32,
}

impl Cache {
    /// Of at most `bytes`.
    fn new(bytes: usize) -> Self {
        let sets = bytes / (WAYS * PAGE_SIZE);
        let free = Place { key: Key::NONE, sequence: 0, paid: false };
        Self { places: vec![[free; WAYS]; sets], content: Room::new(sets * WAYS * PAGE_SIZE), kept: 0, turned_away: 0 }
    }

    fn set_of(&self, key: Key) -> usize {
        // Fibonacci hashing: neighbouring pages go to sets far apart.
        let hash = u128::from(key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        ((hash * self.places.len() as u128) >> 64) as usize
    }

    /// The place of a page, if it is kept.
    fn find(&self, key: Key) -> Option<usize> {
        let set = self.places.get(self.set_of(key))?;
        set.iter().position(|place| place.key == key).map(|way| self.set_of(key) * WAYS + way)
    }

    /// A place for a page that is not kept, if there is one.
    fn make_room(&mut self, key: Key) -> Option<usize> {
        let number = self.set_of(key);
        let set = self.places.get_mut(number)?;
        let way = match set.iter().position(|place| place.key == Key::NONE) {
            Some(way) => {
                self.kept += 1;
                way
            }
            // The oldest of those that have not paid.
            None => {
                self.turned_away = self.turned_away.wrapping_add(1);
                if !self.turned_away.is_multiple_of(ADMITTED) {
                    return None;
                }
                let unpaid = set.iter().enumerate().filter(|(_, place)| !place.paid);
                let oldest = unpaid.min_by_key(|(_, place)| place.sequence).map(|(way, _)| way);
                set.iter_mut().for_each(|place| place.paid = false);
                oldest?
            }
        };
        set[way] = Place { key, sequence: u64::MAX, paid: false };
        Some(number * WAYS + way)
    }

    fn place(&mut self, at: usize) -> &mut Place {
        &mut self.places[at / WAYS][at % WAYS]
    }

    fn page(&mut self, at: usize) -> &mut [u8] {
        &mut self.content[at * PAGE_SIZE..][..PAGE_SIZE]
    }

    fn forget(&mut self, key: Key) {
        if let Some(at) = self.find(key) {
            self.place(at).key = Key::NONE;
            self.kept -= 1;
        }
    }
}

/// What has become of the pages of a batch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    /// Pages that go as deltas.
    pub(super) deltas: u64,
    /// Pages that are what the destination has already.
    pub(super) same: u64,
    /// Pages that go whole.
    pub(super) whole: u64,
}

/// One channel's deltas.
#[derive(Debug)]
pub(super) struct Deltas {
    cache: Cache,
    /// Of the last batch, the pages that go as deltas, and their content.
    runs: Vec<Run>,
    records: Vec<u8>,
    /// The pages that go whole or are zero, and the content of the former.
    rest_runs: Vec<Run>,
    rest: Vec<u8>,
    /// Places whose content is that of the batch.
    changed: Vec<usize>,
    replaced: Vec<usize>,
    /// Bytes that a page takes which goes whole, on average.
    whole_page: f64,
}

impl Deltas {
    /// With a cache of at most `bytes`, for packets of at most `packet_size` bytes.
    pub(super) fn new(bytes: usize, packet_size: usize) -> Self {
        let pages = packet_size / PAGE_SIZE;
        Self {
            cache: Cache::new(bytes),
            runs: Vec::with_capacity(pages),
            records: Vec::with_capacity(pages * (DELTA_HEADER_LENGTH + MAX_RECORD)),
            rest_runs: Vec::with_capacity(sterna_wire::limits::MAX_RUNS),
            rest: Vec::with_capacity(packet_size),
            changed: Vec::with_capacity(pages),
            replaced: Vec::with_capacity(pages),
            whole_page: PAGE_SIZE as f64,
        }
    }

    /// Takes what can go as deltas out of a batch of `block`: `content` is that of the normal runs. What was acknowledged up to
    /// `acknowledged` is at the destination, but for what is listed in `again`.
    pub(super) fn split(
        &mut self,
        block: u16,
        runs: &[Run],
        content: &[u8],
        acknowledged: u64,
        again: Option<&SendAgain>,
    ) -> Split {
        let mut split = Split::default();
        for list in [&mut self.runs, &mut self.rest_runs] {
            list.clear();
        }
        for list in [&mut self.records, &mut self.rest] {
            list.clear();
        }
        self.changed.clear();
        self.replaced.clear();
        let mut pages = content.chunks_exact(PAGE_SIZE);
        for run in runs {
            if run.kind == RunKind::Zero {
                self.forget(block, run);
                self.rest_runs.push(*run);
                continue;
            }
            for page in run.first..run.end() {
                let content = pages.next().expect("a batch has the content of its normal pages");
                let key = Key::new(block, page);
                let kept = self.cache.find(key);
                let usable = |at: &usize| {
                    self.cache.places[at / WAYS][at % WAYS].sequence <= acknowledged
                        && again.is_none_or(|again| !again.is_stale(block, page))
                };
                match kept.filter(usable).map(|at| (at, self.delta(at, content))) {
                    Some((at, Some(0))) => {
                        self.cache.place(at).paid = true;
                        split.same += 1;
                        continue;
                    }
                    Some((at, Some(_))) => {
                        self.changed.push(at);
                        push(&mut self.runs, page);
                        split.deltas += 1;
                        continue;
                    }
                    Some((_, None)) | None => {}
                }
                if let Some(at) = kept.or_else(|| self.cache.make_room(key)) {
                    self.cache.page(at).copy_from_slice(content);
                    self.replaced.push(at);
                }
                push(&mut self.rest_runs, page);
                self.rest.extend_from_slice(content);
                split.whole += 1;
            }
        }
        split
    }

    /// Adds what makes the page kept at `at` into `content`, and makes it so; says how many bytes that took, 0 where it is the same.
    /// None: it does not pay.
    fn delta(&mut self, at: usize, content: &[u8]) -> Option<usize> {
        let start = self.records.len();
        let most = MAX_RECORD.min((self.whole_page as usize).saturating_sub(DELTA_HEADER_LENGTH));
        self.records.resize(start + DELTA_HEADER_LENGTH + most, 0);
        let (header, record) = self.records[start..].split_at_mut(DELTA_HEADER_LENGTH);
        let kept = &mut self.cache.content[at * PAGE_SIZE..][..PAGE_SIZE];
        // SAFETY: both are slices of a page, and the record lies in neither.
        let created = unsafe { create_raw(kept.as_ptr(), content.as_ptr(), PAGE_SIZE, record) };
        let length = match created {
            Ok(Created::Same) => Some(0),
            Ok(Created::Complete { record }) => Some(DELTA_HEADER_LENGTH + record),
            // A page of content that is not aligned has no record: it goes whole.
            Ok(Created::Overflow { .. }) | Err(_) => None,
        };
        let end = match length {
            Some(length) if length > 0 => {
                let record = &record[..length - DELTA_HEADER_LENGTH];
                header.copy_from_slice(&PageDelta { checksum: crc32c(content), record }.header());
                apply(record, kept).expect("a record of a page applies to it");
                start + length
            }
            _ => start,
        };
        self.records.truncate(end);
        length
    }

    /// The packets of the last batch have these numbers.
    pub(super) fn sent(&mut self, deltas: u64, whole: u64) {
        for &at in &self.changed {
            let place = self.cache.place(at);
            (place.sequence, place.paid) = (deltas, true);
        }
        for &at in &self.replaced {
            self.cache.place(at).sequence = whole;
        }
    }

    /// Of the last batch: which pages go as deltas, and the deltas.
    pub(super) fn deltas(&self) -> (&[Run], &[u8]) {
        (&self.runs, &self.records)
    }

    /// Of the last batch: which pages go whole or are zero, and the content of the former.
    pub(super) fn rest(&self) -> (&[Run], &[u8]) {
        (&self.rest_runs, &self.rest)
    }

    /// So many pages went whole in so many bytes.
    pub(super) fn went_whole(&mut self, pages: u64, bytes: usize) {
        if pages > 0 {
            self.whole_page += (bytes as f64 / pages as f64 - self.whole_page) * SMOOTH;
        }
    }

    /// Of `pages` in `block`, those whose kept content went in the packet `refused`, as pages that go whole: it did not arrive. What
    /// was kept later is on its way in a later packet. The error is a page that is not kept.
    pub(super) fn again(&mut self, block: u16, pages: Range<u64>, refused: u64) -> Result<(), u64> {
        self.rest_runs.clear();
        self.rest.clear();
        self.changed.clear();
        self.replaced.clear();
        for page in pages {
            let at = self.cache.find(Key::new(block, page)).ok_or(page)?;
            if self.cache.place(at).sequence == refused {
                push(&mut self.rest_runs, page);
                self.rest.extend_from_slice(&self.cache.content[at * PAGE_SIZE..][..PAGE_SIZE]);
                self.replaced.push(at);
            }
        }
        Ok(())
    }

    /// Pages of `run` in `block` go another way, or are given up at the destination.
    pub(super) fn forget(&mut self, block: u16, run: &Run) {
        if self.cache.kept > 0 {
            (run.first..run.end()).for_each(|page| self.cache.forget(Key::new(block, page)));
        }
    }
}

/// Adds a page, which comes after those there are.
fn push(runs: &mut Vec<Run>, page: u64) {
    match runs.last_mut() {
        Some(last) if last.kind == RunKind::Normal && last.end() == page && last.count < Run::MAX_COUNT => {
            last.count += 1;
        }
        _ => runs.push(Run { kind: RunKind::Normal, first: page, count: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use sterna_memory::delta::apply;
    use sterna_wire::delta::PageDeltas;
    use sterna_wire::packet::{BlockShape, PageRequest};

    use super::*;

    const PACKET_PAGES: usize = 16;

    /// A guest's page as it is now: what it began with and how it was changed.
    fn content(memory: &HashMap<u64, Vec<u64>>, page: u64) -> Vec<u8> {
        memory[&page].iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// What is done to a page between two rounds.
    #[derive(Clone, Copy, Debug)]
    enum Change {
        Nothing,
        Word(usize, u64),
        All(u64),
        Zero,
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            Just(Change::Nothing),
            (0usize..512, any::<u64>()).prop_map(|(at, word)| Change::Word(at, word)),
            any::<u64>().prop_map(Change::All),
            Just(Change::Zero),
        ]
    }

    fn changed(page: &mut [u64], change: Change) {
        match change {
            Change::Nothing => {}
            Change::Word(at, word) => page[at] = word,
            Change::All(seed) => {
                page.iter_mut()
                    .enumerate()
                    .for_each(|(at, word)| *word = seed.wrapping_add(at as u64).wrapping_mul(3) | 1);
            }
            Change::Zero => page.fill(0),
        }
    }

    proptest! {
        /// Against a destination that places packets in order, answers late, and refuses some: whenever everything has been sent again
        /// and acknowledged it has what the source had.
        #[test]
        fn the_destination_has_what_was_sent_however_late_it_answers_and_whatever_it_refuses(
            rounds in prop::collection::vec(
                (prop::collection::vec((0u64..24, change()), 1..PACKET_PAGES), 0u64..4, prop::option::weighted(0.2, 0u64..3)),
                1..40,
            ),
            places in 0usize..40,
        ) {
            let again = SendAgain::none_of(vec![BlockShape { pages: 24, page_size: 4096 }]);
            let mut deltas = Deltas::new(places * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
            let mut memory: HashMap<u64, Vec<u64>> = (0..24).map(|page| (page, vec![page + 1; 512])).collect();
            let mut there: HashMap<u64, Vec<u8>> = (0..24).map(|page| (page, vec![0; PAGE_SIZE])).collect();
            let (mut sequence, mut acknowledged, mut made) = (0u64, 0u64, 0);
            let mut last = HashMap::new();
            for (changes, late, refuse) in rounds {
                let mut pages: Vec<u64> = changes.iter().map(|(page, _)| *page).collect();
                changes.iter().for_each(|(page, change)| changed(memory.get_mut(page).unwrap(), *change));
                pages.sort_unstable();
                pages.dedup();
                // What was refused goes whole, and the cache forgets it.
                again.take(|block, run| {
                    for page in run {
                        let bytes = content(&memory, page);
                        sequence += 1;
                        deltas.forget(block, &Run { kind: RunKind::Normal, first: page, count: 1 });
                        again.freshen(block, page..page + 1);
                        there.insert(page, bytes);
                        last.insert(page, sequence);
                    }
                });
                let is_zero = |page: &u64| memory[page].iter().all(|word| *word == 0);
                let runs: Vec<Run> = pages.iter().map(|page| Run { kind: if is_zero(page) { RunKind::Zero } else { RunKind::Normal }, first: *page, count: 1 }).collect();
                let bytes: Vec<u8> = pages.iter().filter(|page| !is_zero(page)).flat_map(|page| content(&memory, *page)).collect();
                let split = deltas.split(0, &runs, &bytes, acknowledged, Some(&again));
                let (delta_sequence, whole_sequence) = (sequence + 1, sequence + 1 + u64::from(split.deltas > 0));
                deltas.sent(delta_sequence, whole_sequence);
                made += split.deltas;
                let refused = refuse.map(|which| sequence + 1 + which);
                let (delta_runs, records) = deltas.deltas();
                let touched: Vec<u64> = delta_runs.iter().flat_map(|run| run.first..run.end()).collect();
                prop_assert_eq!(touched.len() as u64, split.deltas);
                let mut damaged = refused == Some(delta_sequence);
                for (page, delta) in touched.iter().zip(PageDeltas::new(records, split.deltas)) {
                    let (delta, page_there) = (delta.unwrap(), there.get_mut(page).unwrap());
                    let mut result = page_there.clone();
                    apply(delta.record, &mut result).unwrap();
                    // A delta is only made against what is there.
                    prop_assert_eq!(crc32c(&result), delta.checksum);
                    if !damaged {
                        *page_there = result;
                    }
                    last.insert(*page, delta_sequence);
                }
                if damaged && split.deltas > 0 {
                    touched.iter().for_each(|page| again.add(&PageRequest { block: 0, first: *page, count: 1 }));
                }
                let (rest_runs, mut rest) = deltas.rest();
                damaged = refused == Some(whole_sequence);
                for run in rest_runs {
                    for page in run.first..run.end() {
                        last.insert(page, whole_sequence);
                        let page_there = there.get_mut(&page).unwrap();
                        if run.kind == RunKind::Zero {
                            page_there.fill(0);
                            continue;
                        }
                        let (now, later) = rest.split_at(PAGE_SIZE);
                        rest = later;
                        if damaged {
                            page_there.fill(0xdd);
                            again.add(&PageRequest { block: 0, first: page, count: 1 });
                        } else {
                            page_there.copy_from_slice(now);
                        }
                    }
                }
                sequence += u64::from(split.deltas > 0) + u64::from(!rest_runs.is_empty());
                acknowledged = acknowledged.max(sequence.saturating_sub(late));
            }
            // The last round of a guest that stands.
            again.take(|_, run| run.for_each(|page| drop(there.insert(page, content(&memory, page)))));
            for page in 0..24 {
                prop_assert!(!last.contains_key(&page) || there[&page] == content(&memory, page), "page {page}");
            }
            prop_assert!(places > 0 || made == 0);
        }
    }

    fn whole(deltas: &mut Deltas, page: u64, bytes: &[u8], sequence: u64) -> Split {
        let split = deltas.split(0, &[Run { kind: RunKind::Normal, first: page, count: 1 }], bytes, sequence - 1, None);
        deltas.sent(sequence, sequence);
        split
    }

    #[test]
    fn a_word_that_changed_goes_as_a_delta_and_what_is_the_same_does_not_go() {
        let mut deltas = Deltas::new(64 * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
        let mut page = vec![7; PAGE_SIZE];
        assert_eq!(whole(&mut deltas, 3, &page, 1), Split { whole: 1, ..Split::default() });
        page[100] = 8;
        assert_eq!(whole(&mut deltas, 3, &page, 2), Split { deltas: 1, ..Split::default() });
        assert_eq!(deltas.deltas().1.len(), DELTA_HEADER_LENGTH + 10);
        assert_eq!(whole(&mut deltas, 3, &page, 3), Split { same: 1, ..Split::default() });
        // All of it: that does not pay. Then against that.
        page.fill(9);
        assert_eq!(whole(&mut deltas, 3, &page, 4), Split { whole: 1, ..Split::default() });
        page[0] = 1;
        assert_eq!(whole(&mut deltas, 3, &page, 5), Split { deltas: 1, ..Split::default() });
    }

    #[test]
    fn where_pages_shrink_to_less_than_their_deltas_they_go_whole() {
        let mut deltas = Deltas::new(64 * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
        let mut page = vec![7; PAGE_SIZE];
        (0..200).for_each(|_| deltas.went_whole(128, 128 * 50));
        whole(&mut deltas, 3, &page, 1);
        // Three words are 38 bytes, five are 58.
        (0..3).for_each(|word| page[word * 800] += 1);
        assert_eq!(whole(&mut deltas, 3, &page, 2).deltas, 1);
        (0..5).for_each(|word| page[word * 800] += 1);
        assert_eq!(whole(&mut deltas, 3, &page, 3).whole, 1);
    }

    /// A guest that writes twice as much memory as the cache holds, round by round in the same order.
    #[test]
    fn what_does_not_fit_leaves_what_does() {
        let pages = 64;
        let mut deltas = Deltas::new(pages / 2 * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE);
        let mut sequence = 0;
        let mut hits = Vec::new();
        for round in 0..10u8 {
            let mut made = 0;
            for page in 0..pages as u64 {
                let mut bytes = vec![7; PAGE_SIZE];
                bytes[8 * page as usize] = round;
                sequence += 1;
                made += whole(&mut deltas, page, &bytes, sequence).deltas;
            }
            hits.push(made);
        }
        assert!(hits[5..].iter().all(|made| *made >= pages as u64 / 5), "{hits:?}");
    }
}
