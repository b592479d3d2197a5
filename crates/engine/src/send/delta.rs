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

use std::ops::Range;

use sterna_memory::PAGE_SIZE;
use sterna_memory::checksum::crc32c_combine;
use sterna_memory::delta::{Created, create};
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
use crate::off_cpu::thread_time;

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

    /// Whether nothing is kept because there was no memory for it.
    pub(super) fn lacks_memory(&self) -> bool {
        self.cache.lacks_memory()
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
        let (begun, touched) = (thread_time(), self.cache.touched());
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
                    self.cache.store(at, bytes);
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
        // Memory that is touched for the first time takes many times a pass, and will not again.
        if self.cache.touched() == touched {
            self.history.took(thread_time().saturating_sub(begun).as_nanos() as f64, passes, number);
        }
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
                self.cache.apply(at, record).expect("a record of a page applies to it");
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
        let of_content = checksum.unwrap_or_else(|| crc32c(content));
        if self.cache.apply(at, record).is_err() || crc32c(self.cache.page(at)) != of_content {
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
mod tests;
