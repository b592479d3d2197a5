//! Pages by what has changed in them since the destination last acknowledged them.
//!
//! Each channel keeps what it has sent, in a cache of bounded size: all pages of a region travel on one channel, so nobody else
//! has newer content of them. A delta is made only against content that has been acknowledged and was not refused since, and the
//! cache follows by applying the very record that was sent.
//!
//! Where pages cannot be read again, what is on its way and has no place in the cache is held besides ([`underway`]): the destination
//! may refuse it.
//!
//! What is kept and tried at all is a matter of what has paid in each region ([`history`]).
//!
//! A device may have made the deltas before ([`said`]). Nothing of what it says is sent unseen: the cache follows by its record, and has
//! to be then what the page is.

mod cache;
mod history;
mod said;
mod shown;
mod underway;

use std::time::Instant;

use std::ops::Range;

use sterna_memory::PAGE_SIZE;
use sterna_memory::checksum::crc32c_combine;
use sterna_memory::delta::{Created, apply, create};
use sterna_offload::{Delta, Range as Shown};
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::{DELTA_HEADER_LENGTH, MAX_RECORD, PageDelta};
use sterna_wire::limits::MAX_RUNS;
use sterna_wire::packet::{Run, RunKind};

use self::cache::{Cache, Key, Place};
pub(super) use self::history::Whole;
use self::history::{History, Plan, Tried};
pub(super) use self::said::{Against, Answers, Normal, Wrong};
use self::underway::Underway;
use super::again::SendAgain;
use super::coding::Costs;
use crate::entry::REGION;

/// Pages of a region, which have a history together.
const REGION_PAGES: u64 = REGION / PAGE_SIZE as u64;
/// How much an average follows its newest value.
const SMOOTH: f64 = 1.0 / 16.0;
/// What a byte on the wire costs where nobody has measured it, in nanoseconds: more than any work on it.
const BYTES_DECIDE: f64 = 1000.0;
/// A page that is not kept.
const NOWHERE: usize = usize::MAX;

/// What has become of the pages of a batch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    /// Pages that go as deltas.
    pub(super) deltas: u64,
    /// Pages that are what the destination has already.
    pub(super) same: u64,
    /// Pages that go whole.
    pub(super) whole: u64,
    /// Of those that go as deltas or are the same, for how many a device has found out what changed.
    pub(super) by_device: u64,
    /// Something that a device has said was wrong.
    pub(super) wrong: Option<Wrong>,
}

/// One channel's deltas.
#[derive(Debug)]
pub(super) struct Deltas {
    cache: Cache,
    history: History,
    /// Of the last batch, the pages that go as deltas, and their content.
    runs: Vec<Run>,
    records: Vec<u8>,
    records_length: usize,
    /// The pages that go whole or are zero, and the content of the former unless that is all of the batch's.
    rest_runs: Vec<Run>,
    rest: Vec<u8>,
    all_whole: bool,
    /// The CRC-32C of the latter, where devices have said those of its pages.
    rest_checksum: Option<u32>,
    /// What is on its way and not in the cache, where it could not be read again.
    underway: Option<Underway>,
    /// Of the last batch, what goes whole or is zero and is not kept, and where in the batch's content the former begins, in pages.
    unkept: Vec<(Run, usize)>,
    /// Where the pages of the batch are kept.
    found: Vec<usize>,
    /// Places whose content is that of the batch.
    changed: Vec<usize>,
    replaced: Vec<usize>,
    /// The region of the last batch.
    region: u64,
    /// Bytes that a page takes which goes whole, on average.
    whole_page: f64,
}

/// A region's part of a batch.
struct Part {
    region: u64,
    plan: Plan,
    tried: Tried,
}

impl Deltas {
    /// With a cache of at most `bytes`, for packets of at most `packet_size` bytes.
    pub(super) fn new(bytes: usize, packet_size: usize) -> Self {
        let pages = packet_size / PAGE_SIZE;
        Self {
            cache: Cache::new(bytes),
            history: History::new(bytes / PAGE_SIZE),
            runs: Vec::with_capacity(pages),
            // Nothing in it is read before it was written.
            records: vec![0; pages * (DELTA_HEADER_LENGTH + MAX_RECORD)],
            rest_runs: Vec::with_capacity(MAX_RUNS),
            rest: Vec::with_capacity(packet_size),
            underway: None,
            unkept: Vec::with_capacity(pages),
            found: Vec::with_capacity(pages),
            changed: Vec::with_capacity(pages),
            replaced: Vec::with_capacity(pages),
            region: 0,
            whole_page: PAGE_SIZE as f64,
            records_length: 0,
            all_whole: true,
            rest_checksum: None,
        }
    }

    /// As pages that cannot be read again need it: until it is acknowledged each of them can be sent again.
    pub(super) fn holding(mut self) -> Self {
        self.underway = Some(Underway::default());
        self
    }

    /// What a page costs that goes whole; where the way is chosen by what time and bytes cost, at `costs`.
    pub(super) fn whole(&self, costs: Option<Costs>) -> Whole {
        let Costs { encoding, price } = costs.unwrap_or(Costs { encoding: 0.0, price: BYTES_DECIDE });
        Whole { nanos: encoding * PAGE_SIZE as f64, bytes: self.whole_page, price }
    }

    /// Lists in `against` the normal pages of a batch of `block` that may go as deltas, and says how long the longest record may be that
    /// pays.
    pub(super) fn against(&mut self, block: u16, runs: &[Run], whole: Whole, against: &mut Vec<Against>) -> usize {
        against.clear();
        if self.cache.is_empty() {
            return 0;
        }
        let normal = runs.iter().filter(|run| run.kind == RunKind::Normal).flat_map(|run| run.first..run.end());
        let (mut part, mut most): (Option<(u64, Plan)>, _) = (None, 0);
        for (number, page) in normal.enumerate() {
            let region = region_of(block, page);
            let plan = match part {
                Some((of, plan)) if of == region => plan,
                _ => self.history.plan(region, whole),
            };
            part = Some((region, plan));
            if let Some(at) = self.cache.find(Key::new(block, page)).filter(|_| plan.tries) {
                against.push(Against { number, at, sequence: self.cache.place(at).sequence });
                most = most.max(plan.most);
            }
        }
        most
    }

    /// What is kept there, for a device.
    pub(super) fn shown(&self, against: Against) -> Shown {
        self.cache.range(against.at)
    }

    /// Takes what can go as deltas out of a batch of `block`, where that costs less than what it costs `whole`: `content` is that of
    /// the normal runs. What was acknowledged up to `acknowledged` is at the destination, but for what is listed in `again`.
    pub(super) fn split(
        &mut self,
        block: u16,
        runs: &[Run],
        content: Normal<'_>,
        acknowledged: u64,
        again: Option<&SendAgain>,
        whole: Whole,
    ) -> Split {
        let begun = Instant::now();
        let Normal { bytes: content, mut said } = content;
        let mut split = Split::default();
        for list in [&mut self.runs, &mut self.rest_runs] {
            list.clear();
        }
        for list in [&mut self.changed, &mut self.replaced] {
            list.clear();
        }
        self.unkept.clear();
        let holds = self.underway.as_mut().map(|underway| underway.arrived(acknowledged)).is_some();
        self.rest.clear();
        (self.records_length, self.all_whole, self.rest_checksum) = (0, true, None);
        self.find(block, runs);
        let mut part: Option<Part> = None;
        let (mut number, mut passes) = (0, 0);
        for (before, run) in runs.iter().enumerate() {
            if run.kind == RunKind::Zero {
                self.forget(block, run);
                self.rest_runs.push(*run);
                if holds {
                    self.unkept.push((*run, 0));
                }
                continue;
            }
            for page in run.first..run.end() {
                let bytes = &content[number * PAGE_SIZE..][..PAGE_SIZE];
                let (key, region) = (Key::new(block, page), region_of(block, page));
                if part.as_ref().is_none_or(|part| part.region != region) {
                    self.end(part.take());
                    part = Some(Part { region, plan: self.history.plan(region, whole), tried: Tried::default() });
                }
                let Part { plan, tried, .. } = part.as_mut().expect("there is one now");
                // One that was found may have had to give way since, to another page of this batch.
                let kept = self.found.get(number).copied().filter(|at| *at != NOWHERE && self.cache.keeps(*at, key));
                let checksum = said.as_ref().and_then(|said| said.checksum(number));
                number += 1;
                let usable = |at: &usize| {
                    let place = self.cache.place(*at);
                    let stale = || again.is_some_and(|again| again.is_stale(block, page));
                    (plan.tries && place.sequence <= acknowledged && !stale()).then_some((*at, place))
                };
                // Taken out of a run, a page leaves two; what goes whole has to fit a packet's table all the same.
                let fits = self.rest_runs.len() + (runs.len() - before) <= MAX_RUNS;
                if let Some((at, Place { sequence, paid })) = kept.as_ref().filter(|_| fits).and_then(usable) {
                    passes += 1;
                    let of_it = Against { number: number - 1, at, sequence };
                    let length = match said.as_mut().and_then(|said| said.delta(of_it)) {
                        Some(delta) => {
                            let length = self.by_device(at, bytes, plan.most, delta, checksum);
                            split.by_device += u64::from(matches!(length, Ok(Some(_))));
                            length.unwrap_or_else(|wrong| {
                                split.wrong = Some(wrong);
                                None
                            })
                        }
                        None => {
                            let next = self.found.get(number).copied().filter(|at| *at != NOWHERE);
                            self.delta(at, bytes, plan.most, next, checksum)
                        }
                    };
                    // In a region that rests, those that pay are kept and the others are not: only samples tell of all.
                    let counts = u32::from(plan.keeps || !paid);
                    tried.pages += counts;
                    if let Some(length) = length {
                        self.begin_rest(&content[..(number - 1) * PAGE_SIZE]);
                        if length == 0 {
                            self.cache.place_mut(at).paid = true;
                            tried.same += counts;
                            split.same += 1;
                        } else {
                            self.changed.push(self.cache.claim(at));
                            tried.deltas += counts;
                            tried.bytes += counts as usize * length;
                            push(&mut self.runs, page);
                            split.deltas += 1;
                        }
                        continue;
                    }
                }
                let place = if plan.keeps || plan.tries && self.history.samples() {
                    kept.or_else(|| self.cache.make_room(key, acknowledged))
                } else if kept.is_some() {
                    self.cache.forget(key);
                    None
                } else {
                    None
                };
                if let Some(at) = place {
                    passes += 1;
                    self.cache.page_mut(at).copy_from_slice(bytes);
                    self.replaced.push(self.cache.claim(at));
                } else if holds {
                    push_unkept(&mut self.unkept, page, number - 1);
                }
                push(&mut self.rest_runs, page);
                if !self.all_whole {
                    self.rest.extend_from_slice(bytes);
                }
                if let Some(checksum) = checksum {
                    let before = self.rest_checksum.map(|before| crc32c_combine(before, checksum, PAGE_SIZE as u64));
                    self.rest_checksum = Some(before.unwrap_or(checksum));
                }
                split.whole += 1;
            }
        }
        self.end(part);
        self.history.took(begun.elapsed().as_nanos() as f64, passes);
        split
    }

    /// Finds where the pages of a batch are kept, all of them at once: their sets are neighbours.
    fn find(&mut self, block: u16, runs: &[Run]) {
        self.found.clear();
        if !self.cache.is_empty() {
            for run in runs.iter().filter(|run| run.kind == RunKind::Normal) {
                let places =
                    (run.first..run.end()).map(|page| self.cache.find(Key::new(block, page)).unwrap_or(NOWHERE));
                self.found.extend(places);
            }
        }
    }

    /// What follows is not all that goes whole: `before` is.
    fn begin_rest(&mut self, before: &[u8]) {
        if std::mem::take(&mut self.all_whole) {
            self.rest.extend_from_slice(before);
        }
    }

    fn end(&mut self, part: Option<Part>) {
        if let Some(part) = part {
            self.region = part.region;
            self.history.tried(part.region, part.tried);
        }
    }

    /// Adds what makes the page kept at `at` into `content`, and makes it so; says how long the record is, 0 where it is the same.
    /// None: it would be longer than `most`. What is kept at `next` is compared next. The content has this `checksum`, if it is known.
    fn delta(
        &mut self,
        at: usize,
        content: &[u8],
        most: usize,
        next: Option<usize>,
        checksum: Option<u32>,
    ) -> Option<usize> {
        let room = &mut self.records[self.records_length..][..DELTA_HEADER_LENGTH + most];
        let (header, record) = room.split_at_mut(DELTA_HEADER_LENGTH);
        let next = next.map(|next| self.cache.page(next));
        match create(self.cache.page(at), content, record, next) {
            Ok(Created::Same) => Some(0),
            Ok(Created::Complete { record: length }) => {
                let record = &record[..length];
                let checksum = checksum.unwrap_or_else(|| crc32c(content));
                header.copy_from_slice(&PageDelta { checksum, record }.header());
                apply(record, self.cache.page_mut(at)).expect("a record of a page applies to it");
                self.records_length += DELTA_HEADER_LENGTH + length;
                Some(length)
            }
            // A page of content that is not aligned has no record: it goes whole.
            Ok(Created::Overflow { .. }) | Err(_) => None,
        }
    }

    /// The same with `delta`, which a device has made of what is kept at `at`. Where that is wrong, nothing is kept there any more that is
    /// of use.
    fn by_device(
        &mut self,
        at: usize,
        content: &[u8],
        most: usize,
        delta: Delta<'_>,
        checksum: Option<u32>,
    ) -> Result<Option<usize>, Wrong> {
        let record = match delta {
            Delta::Equal => &[],
            Delta::Record(record) if (1..=most).contains(&record.len()) => record,
            Delta::Record(_) | Delta::TooLong => return Ok(None),
        };
        let page = self.cache.page_mut(at);
        let of_content = checksum.unwrap_or_else(|| crc32c(content));
        if apply(record, page).is_err() || crc32c(page) != of_content {
            // Either leads elsewhere than to the copy, or the copy is not what was read.
            return Err(if checksum.is_some_and(|said| said != crc32c(content)) { Wrong::Copy } else { Wrong::Delta });
        }
        if !record.is_empty() {
            let room = &mut self.records[self.records_length..][..DELTA_HEADER_LENGTH + record.len()];
            let (header, place) = room.split_at_mut(DELTA_HEADER_LENGTH);
            header.copy_from_slice(&PageDelta { checksum: of_content, record }.header());
            place.copy_from_slice(record);
            self.records_length += room.len();
        }
        Ok(Some(record.len()))
    }

    /// The packets of the last batch, whose content is `content`, have these numbers.
    pub(super) fn sent(&mut self, block: u16, content: &[u8], deltas: u64, whole: u64) {
        for &at in &self.changed {
            let place = self.cache.place_mut(at);
            (place.sequence, place.paid) = (deltas, true);
        }
        for &at in &self.replaced {
            let place = self.cache.place_mut(at);
            (place.sequence, place.paid) = (whole, false);
        }
        let Some(underway) = &mut self.underway else { return };
        for (run, at) in &self.unkept {
            let length = if run.kind == RunKind::Normal { run.count as usize } else { 0 };
            underway.push(whole, block, *run, &content[at * PAGE_SIZE..][..length * PAGE_SIZE]);
        }
    }

    /// What [`Deltas::again`] gave goes in the packet with this number.
    pub(super) fn sent_again(&mut self, block: u16, number: u64) {
        let content = std::mem::take(&mut self.rest);
        self.sent(block, &content, number, number);
        self.rest = content;
    }

    /// Of the last batch: which pages go as deltas, and the deltas.
    pub(super) fn deltas(&self) -> (&[Run], &[u8]) {
        (&self.runs, &self.records[..self.records_length])
    }

    /// Of the last batch, whose content is `content`: which pages go whole or are zero, and the content of the former.
    pub(super) fn rest<'a>(&'a self, content: &'a [u8]) -> (&'a [Run], &'a [u8]) {
        (&self.rest_runs, if self.all_whole { content } else { &self.rest })
    }

    /// The CRC-32C of the latter, where devices have said those of its pages.
    pub(super) fn rest_checksum(&self) -> Option<u32> {
        self.rest_checksum
    }

    /// So many pages of the last batch went whole in so many bytes.
    pub(super) fn went_whole(&mut self, pages: u64, bytes: usize) {
        if pages > 0 {
            let each = bytes as f64 / pages as f64;
            self.whole_page += (each - self.whole_page) * SMOOTH;
            self.history.went_whole(self.region, each, self.whole_page);
        }
    }

    /// Of `pages` in `block`, those whose newest content went in the packet `refused`, as pages that go whole: it did not arrive. What
    /// is newer is on its way in a later packet. The error is a page that was not in that one.
    pub(super) fn again(&mut self, block: u16, pages: Range<u64>, refused: u64) -> Result<(), u64> {
        self.rest_runs.clear();
        self.rest.clear();
        self.all_whole = false;
        for list in [&mut self.changed, &mut self.replaced] {
            list.clear();
        }
        self.unkept.clear();
        for page in pages {
            let number = self.rest.len() / PAGE_SIZE;
            let kept = self.cache.find(Key::new(block, page)).map(|at| (at, self.cache.place(at).sequence));
            if let Some((at, sequence)) = kept.filter(|(_, sequence)| *sequence >= refused) {
                if sequence > refused {
                    continue;
                }
                self.rest.extend_from_slice(self.cache.page(at));
                self.replaced.push(at);
            } else {
                let newest =
                    self.underway.as_ref().and_then(|underway| Some((underway, underway.newest(block, page)?)));
                let (underway, newest) = newest.filter(|(_, newest)| newest.sequence >= refused).ok_or(page)?;
                if newest.sequence > refused || !underway.read(&newest, &mut self.rest) {
                    continue;
                }
                push_unkept(&mut self.unkept, page, number);
            }
            push(&mut self.rest_runs, page);
        }
        Ok(())
    }

    /// How many pages are kept.
    #[cfg(test)]
    fn kept(&self) -> usize {
        self.cache.kept()
    }

    /// Pages of `run` in `block` go another way, or are given up at the destination.
    pub(super) fn forget(&mut self, block: u16, run: &Run) {
        if !self.cache.is_empty() {
            (run.first..run.end()).for_each(|page| self.cache.forget(Key::new(block, page)));
        }
    }
}

/// The number of a page's region.
fn region_of(block: u16, page: u64) -> u64 {
    (u64::from(block) << 40) + page / REGION_PAGES
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

/// Adds a page whose content is the batch's page `number`; it comes after those there are, and so does its content.
fn push_unkept(unkept: &mut Vec<(Run, usize)>, page: u64, number: usize) {
    match unkept.last_mut() {
        Some((last, _)) if last.kind == RunKind::Normal && last.end() == page && last.count < Run::MAX_COUNT => {
            last.count += 1;
        }
        _ => unkept.push((Run { kind: RunKind::Normal, first: page, count: 1 }, number)),
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

    /// Mostly such that deltas pay.
    fn costs() -> impl Strategy<Value = Whole> {
        let price = prop_oneof![4 => Just(BYTES_DECIDE), 1 => Just(0.1), 1 => Just(0.0)];
        (price, 10.0..4096.0, 0.0..1000.0).prop_map(|(price, bytes, nanos)| Whole { nanos, bytes, price })
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
                (prop::collection::vec((0u64..24, change()), 1..PACKET_PAGES), 0u64..4, prop::option::weighted(0.2, 0u64..3), costs()),
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
            for (changes, late, refuse, costs) in rounds {
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
                let split = deltas.split(0, &runs, Normal::of(&bytes), acknowledged, Some(&again), costs);
                let (delta_sequence, whole_sequence) = (sequence + 1, sequence + 1 + u64::from(split.deltas > 0));
                deltas.sent(0, &bytes, delta_sequence, whole_sequence);
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
                let (rest_runs, mut rest) = deltas.rest(&bytes);
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

    /// A packet on its way to a destination that refuses some.
    struct Packet {
        number: u64,
        runs: Vec<Run>,
        deltas: bool,
        content: Vec<u8>,
    }

    /// A destination that takes packets in order and refuses those that `faults` says, by their numbers.
    struct Peer {
        there: HashMap<u64, Vec<u8>>,
        faults: Vec<bool>,
        packets: std::collections::VecDeque<Packet>,
        refused: Vec<(u64, Range<u64>)>,
        acknowledged: u64,
    }

    impl Peer {
        /// Takes all but the last `late` packets.
        fn take(&mut self, late: usize) {
            while self.packets.len() > late {
                let Packet { number, runs, deltas, content } = self.packets.pop_front().unwrap();
                assert_eq!(number, self.acknowledged + 1);
                self.acknowledged = number;
                let fault = self.faults.get(number as usize).copied().unwrap_or(false);
                let mut records = PageDeltas::new(&content, content.len() as u64);
                let mut pages = content.chunks_exact(PAGE_SIZE);
                for run in &runs {
                    if fault && run.kind == RunKind::Normal {
                        self.refused.push((number, run.first..run.end()));
                    }
                    for page in run.first..run.end() {
                        let there = self.there.get_mut(&page).unwrap();
                        if run.kind == RunKind::Zero {
                            there.fill(0);
                        } else if deltas {
                            let (delta, mut result) = (records.next().unwrap().unwrap(), there.clone());
                            apply(delta.record, &mut result).unwrap();
                            assert_eq!(crc32c(&result), delta.checksum, "page {page} is not what the source thinks");
                            if !fault {
                                *there = result;
                            }
                        } else if fault {
                            there.fill(0xdd);
                        } else {
                            there.copy_from_slice(pages.next().unwrap());
                        }
                    }
                }
            }
        }

        /// Has what was refused sent again; says whether there was anything.
        fn sent_again(&mut self, deltas: &mut Deltas, last: &mut u64) -> bool {
            let refused = std::mem::take(&mut self.refused);
            for (number, pages) in &refused {
                deltas.again(0, pages.clone(), *number).expect("it is known until it is acknowledged");
                let (runs, content) = deltas.rest(&[]);
                if !runs.is_empty() {
                    *last += 1;
                    let (runs, content) = (runs.to_vec(), content.to_vec());
                    self.packets.push_back(Packet { number: *last, runs, deltas: false, content });
                    deltas.sent_again(0, *last);
                }
            }
            !refused.is_empty()
        }
    }

    proptest! {
        /// Pages that cannot be read again, of regions that rest and in a cache that is too small.
        #[test]
        fn whatever_is_refused_can_be_sent_again_whether_it_is_kept_or_not(
            rounds in prop::collection::vec(
                (prop::collection::btree_map(0u64..48, change(), 1..PACKET_PAGES), 0usize..12, costs()), 1..60,
            ),
            faults in prop::collection::vec(prop::bool::weighted(0.3), 0..120),
            places in 0usize..40,
        ) {
            let mut deltas = Deltas::new(places * PAGE_SIZE, PACKET_PAGES * PAGE_SIZE).holding();
            let mut memory: HashMap<u64, Vec<u64>> = (0..48).map(|page| (page, vec![0; 512])).collect();
            let there = (0..48).map(|page| (page, vec![0; PAGE_SIZE])).collect();
            let mut peer = Peer { there, faults, packets: Default::default(), refused: Vec::new(), acknowledged: 0 };
            let mut last = 0;
            for (changes, late, costs) in rounds {
                peer.sent_again(&mut deltas, &mut last);
                changes.iter().for_each(|(page, change)| changed(memory.get_mut(page).unwrap(), *change));
                let is_zero = |page: u64| memory[&page].iter().all(|word| *word == 0);
                let kind = |page| if is_zero(page) { RunKind::Zero } else { RunKind::Normal };
                let runs: Vec<Run> = changes.keys().map(|page| Run { kind: kind(*page), first: *page, count: 1 }).collect();
                let pages = changes.keys().filter(|page| !is_zero(**page));
                let bytes: Vec<u8> = pages.flat_map(|page| content(&memory, *page)).collect();
                let split = deltas.split(0, &runs, Normal::of(&bytes), peer.acknowledged, None, costs);
                deltas.sent(0, &bytes, last + 1, last + 1 + u64::from(split.deltas > 0));
                let sent = [(true, deltas.deltas()), (false, deltas.rest(&bytes))];
                for (deltas, (runs, content)) in sent.into_iter().filter(|(_, (runs, _))| !runs.is_empty()) {
                    last += 1;
                    peer.packets.push_back(Packet { number: last, runs: runs.to_vec(), deltas, content: content.to_vec() });
                }
                peer.take(late);
            }
            loop {
                peer.take(0);
                if !peer.sent_again(&mut deltas, &mut last) {
                    break;
                }
            }
            (0..48).for_each(|page| assert!(peer.there[&page] == content(&memory, page), "page {page}"));
            deltas.split(0, &[], Normal::of(&[]), last, None, deltas.whole(None));
            prop_assert_eq!(deltas.underway.unwrap().bytes(), 0);
        }
    }

    #[test]
    fn what_was_not_in_the_refused_packet_is_not_sent_again() {
        let mut deltas = Deltas::new(0, PACKET_PAGES * PAGE_SIZE).holding();
        whole(&mut deltas, 3, &[7; PAGE_SIZE], 1);
        whole(&mut deltas, 3, &[8; PAGE_SIZE], 2);
        assert_eq!(deltas.again(0, 3..4, 1), Ok(()));
        assert!(deltas.rest(&[]).0.is_empty(), "what is newer is on its way");
        assert_eq!(deltas.again(0, 3..5, 2), Err(4));
        assert_eq!(deltas.again(1, 3..4, 2), Err(3));
        assert_eq!(deltas.again(0, 3..4, 3), Err(3));
        assert_eq!(deltas.again(0, 3..4, 2), Ok(()));
        assert_eq!(deltas.rest(&[]).1, [8; PAGE_SIZE]);
    }

    fn whole(deltas: &mut Deltas, page: u64, bytes: &[u8], sequence: u64) -> Split {
        let costs = deltas.whole(None);
        let split = deltas.split(
            0,
            &[Run { kind: RunKind::Normal, first: page, count: 1 }],
            Normal::of(bytes),
            sequence - 1,
            None,
            costs,
        );
        deltas.sent(0, bytes, sequence, sequence);
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

    #[test]
    fn a_place_that_is_given_away_within_a_batch_is_the_newcomers() {
        // One set: the last of the eight newcomers takes the place of the first page that is kept, which comes after it.
        let mut deltas = Deltas::new(8 * PAGE_SIZE, 32 * PAGE_SIZE);
        let of = |pages: Range<u64>| pages.flat_map(|page| [page as u8; PAGE_SIZE]).collect::<Vec<u8>>();
        let run = |first, count| Run { kind: RunKind::Normal, first, count };
        let mut split = |runs: &[Run], bytes: &[u8], sequence| {
            let costs = deltas.whole(None);
            let split = deltas.split(0, runs, Normal::of(bytes), sequence - 1, None, costs);
            deltas.sent(0, bytes, sequence, sequence);
            split.deltas
        };
        assert_eq!(split(&[run(100, 8)], &of(100..108), 1), 0);
        assert_eq!(split(&[run(0, 8), run(100, 1)], &[of(0..8), of(101..102)].concat(), 2), 0);
        let mut seventh = of(7..8);
        seventh[0] = 0;
        assert_eq!(split(&[run(7, 1)], &seventh, 3), 1);
    }

    /// What a table has room for, most of it taken by zero pages that lie apart.
    #[test]
    fn pages_that_are_taken_out_of_a_run_leave_no_more_runs_than_a_table_has_room_for() {
        const PAGES: usize = 64;
        let run = |kind, first, count| Run { kind, first, count };
        let mut page = vec![7; PAGES * PAGE_SIZE];
        for zero in [0, MAX_RUNS - PAGES, MAX_RUNS - 10, MAX_RUNS - 1] {
            let mut deltas = Deltas::new(1024 * PAGE_SIZE, PAGES * PAGE_SIZE);
            let mut send = |runs: &[Run], bytes: &[u8], sequence| {
                let costs = deltas.whole(None);
                let split = deltas.split(0, runs, Normal::of(bytes), sequence - 1, None, costs);
                deltas.sent(0, bytes, sequence, sequence);
                let (rest, _) = deltas.rest(bytes);
                assert!(rest.len() <= MAX_RUNS, "{} runs after {zero}", rest.len());
                let whole = rest.iter().filter(|run| run.kind == RunKind::Normal).map(|run| u64::from(run.count));
                assert_eq!(whole.sum::<u64>(), split.whole);
                split.deltas
            };
            let normal = run(RunKind::Normal, 10_000, PAGES as u32);
            page.fill(7);
            assert_eq!(send(&[normal], &page, 1), 0);
            // Every second page is rewritten.
            for (number, page) in page.chunks_exact_mut(PAGE_SIZE).enumerate() {
                if number % 2 == 0 { page[8] = 1 } else { page.fill(9) }
            }
            let mut runs: Vec<_> = (0..zero as u64).map(|at| run(RunKind::Zero, 2 * at, 1)).collect();
            runs.push(normal);
            // The first page, before which nothing goes whole, and then one for each run that there is room for besides.
            assert_eq!(send(&runs, &page, 2), (MAX_RUNS - zero).min(PAGES / 2) as u64, "after {zero}");
        }
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

    #[test]
    fn a_region_rests_while_it_is_rewritten_but_for_the_few_pages_that_pay_and_comes_back_when_it_ceases() {
        const PAGES: u64 = 32;
        let costs = Whole { nanos: 0.0, bytes: PAGE_SIZE as f64, price: 0.8 };
        let mut deltas = Deltas::new(64 * PAGE_SIZE, PAGES as usize * PAGE_SIZE);
        let mut memory = vec![0u64; PAGES as usize * PAGE_SIZE / 8];
        let mut sequence = 0;
        let mut round = |deltas: &mut Deltas, rewritten: &dyn Fn(u64) -> bool| {
            sequence += 2;
            for (page, words) in memory.chunks_exact_mut(PAGE_SIZE / 8).enumerate() {
                words[sequence as usize % 512] = sequence + 1;
                if rewritten(page as u64) {
                    words.iter_mut().for_each(|word| *word = word.wrapping_mul(3).wrapping_add(sequence));
                }
            }
            let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).collect();
            deltas.history.set_pass(400.0);
            let all = [Run { kind: RunKind::Normal, first: 0, count: PAGES as u32 }];
            let split = deltas.split(0, &all, Normal::of(&bytes), sequence - 1, None, costs);
            assert_eq!(deltas.rest(&bytes).1.len(), split.whole as usize * PAGE_SIZE);
            deltas.sent(0, &bytes, sequence, sequence + 1);
            split
        };
        let counters = |page: u64| page % 16 == 5;
        for _ in 0..3 {
            round(&mut deltas, &|_| false);
        }
        assert_eq!(round(&mut deltas, &|_| false).deltas, PAGES);
        for _ in 0..300 {
            round(&mut deltas, &|page| !counters(page));
        }
        for _ in 0..50 {
            assert_eq!(round(&mut deltas, &|page| !counters(page)), Split { deltas: 2, whole: 30, ..Split::default() });
            assert!(deltas.kept() < 10, "{}", deltas.kept());
        }
        for _ in 0..200 {
            round(&mut deltas, &|_| false);
        }
        assert_eq!(round(&mut deltas, &|_| false).deltas, PAGES);
    }
}
