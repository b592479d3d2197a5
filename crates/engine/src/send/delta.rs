//! Deltas: only what has changed in a page since the destination last acknowledged it.
//!
//! Each channel keeps the pages that it has sent, in a cache of bounded size. All pages of a region take one channel, so no other channel
//! has sent newer content of them. A delta is made only against content that has been acknowledged and was not refused since, and the
//! cache follows by applying the very record that was sent.
//!
//! Where pages cannot be read again, those on their way that have no place in the cache are kept besides ([`underway`]): the destination
//! may refuse them ([`refused`]).
//!
//! Which pages are kept and tried depends on what has paid in each region ([`history`]).
//!
//! A device may have made the deltas before ([`device_results`]). They are verified before they are sent: the cache applies the device's record,
//! and must then equal the page.

mod cache;
mod device_readable;
mod device_results;
mod history;
mod refused;
mod underway;

use sterna_memory::PAGE_SIZE;
use sterna_memory::checksum::crc32c_combine;
use sterna_memory::delta::{Created, create};
use sterna_offload::Delta;
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::{DELTA_HEADER_LENGTH, MAX_RECORD, PageDelta};
use sterna_wire::limits::MAX_RUNS;
use sterna_wire::packet::{Run, RunKind};

use self::cache::{Cache, Key, Place};
pub(super) use self::device_results::{DeltaBase, DeviceResults, NormalPages, WrongResult};
pub(super) use self::history::Whole;
use self::history::{History, Plan, Tried};
use self::underway::Underway;
use super::coding::Costs;
use crate::batch::REGION;
use crate::off_cpu::thread_time;

/// Pages of a region, which have a history together.
const REGION_PAGES: u64 = REGION / PAGE_SIZE as u64;
/// Weight of the newest value in a moving average.
const SMOOTH: f64 = 1.0 / 16.0;
/// Nanoseconds that a byte on the wire costs where that is not measured: more than any work on the byte.
const BYTES_DECIDE: f64 = 1000.0;
/// A page that is not kept.
const NOWHERE: usize = usize::MAX;

/// How the pages of a batch are sent.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    /// Number of pages that are sent as deltas.
    pub(super) deltas: u64,
    /// Number of pages that the destination has already.
    pub(super) same: u64,
    /// Number of pages that are sent whole.
    pub(super) whole: u64,
    /// Number of pages, sent as deltas or unchanged, whose changes a device has found.
    pub(super) by_device: u64,
    /// A wrong result of a device, if there was one.
    pub(super) wrong: Option<WrongResult>,
}

/// One channel's deltas.
#[derive(Debug)]
pub(super) struct Deltas {
    cache: Cache,
    history: History,
    /// Pages of the last batch that are sent as deltas.
    runs: Vec<Run>,
    /// Their deltas, in the first `records_length` bytes.
    records: Vec<u8>,
    records_length: usize,
    /// Pages of the last batch that are sent whole or are zero.
    rest_runs: Vec<Run>,
    /// The content of those that are sent whole, unless these are all normal pages of the batch.
    rest: Vec<u8>,
    all_whole: bool,
    /// The CRC-32C of that content, where devices have computed those of its pages.
    rest_checksum: Option<u32>,
    /// Pages on their way that are not in the cache, where pages cannot be read again.
    underway: Option<Underway>,
    /// Pages of the last batch that are sent whole or are zero and are not kept, and where in the batch the content of the former begins,
    /// in pages.
    unkept: Vec<(Run, usize)>,
    /// The places at which the pages of the batch are kept.
    found: Vec<usize>,
    /// Places whose pages of the batch are sent as deltas.
    changed: Vec<usize>,
    /// Places whose pages of the batch are sent whole.
    replaced: Vec<usize>,
    /// The region of the last batch.
    region: u64,
    /// Average bytes of a page that is sent whole.
    whole_page: f64,
}

/// A region's part of a batch.
struct Part {
    region: u64,
    plan: Plan,
    tried: Tried,
}

impl Deltas {
    /// Makes a delta encoder with a cache of at most `bytes`, for packets of at most `packet_size` bytes.
    pub(super) fn new(bytes: usize, packet_size: usize) -> Self {
        let pages = packet_size / PAGE_SIZE;
        Self {
            cache: Cache::new(bytes),
            history: History::new(bytes / PAGE_SIZE),
            runs: Vec::with_capacity(pages),
            // No byte is read before it was written.
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

    /// Returns whether nothing is kept because there was no memory for the cache.
    pub(super) fn lacks_memory(&self) -> bool {
        self.cache.lacks_memory()
    }

    /// Keeps each page until it is acknowledged, for pages that cannot be read again: so each can be retransmitted.
    pub(super) fn keeping_unacknowledged(mut self) -> Self {
        self.underway = Some(Underway::default());
        self
    }

    /// Returns what a page costs that is sent whole. `costs`: the costs of time and bytes, where an encoder is chosen by them.
    pub(super) fn whole(&self, costs: Option<Costs>) -> Whole {
        let Costs { encoding, price } = costs.unwrap_or(Costs { encoding: 0.0, price: BYTES_DECIDE });
        Whole { nanos: encoding * PAGE_SIZE as f64, bytes: self.whole_page, price }
    }

    /// Lists in `bases` the normal pages of a batch of `block` that may be sent as deltas. Returns the maximum length of a record that
    /// pays.
    pub(super) fn list_bases(&mut self, block: u16, runs: &[Run], whole: Whole, bases: &mut Vec<DeltaBase>) -> usize {
        bases.clear();
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
                bases.push(DeltaBase { number, at, sequence: self.cache.place(at).sequence });
                most = most.max(plan.most);
            }
        }
        most
    }

    /// Returns the memory of the kept content, for a device.
    pub(super) fn range_of(&self, base: DeltaBase) -> sterna_offload::Range {
        self.cache.range(base.at)
    }

    /// Makes deltas of the pages of a batch of `block` where they cost less than pages sent `whole`. `content` is that of
    /// the normal runs. The destination has placed all packets up to `acknowledged`.
    pub(super) fn split(
        &mut self,
        block: u16,
        runs: &[Run],
        content: NormalPages<'_>,
        acknowledged: u64,
        whole: Whole,
    ) -> Split {
        let (begun, touched) = (thread_time(), self.cache.touched());
        let NormalPages { bytes: content, mut results } = content;
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
                // A place that was found may have been given to another page of this batch since.
                let kept = self.found.get(number).copied().filter(|at| *at != NOWHERE && self.cache.keeps(*at, key));
                let checksum = results.as_ref().and_then(|results| results.checksum(number));
                number += 1;
                let usable = |at: &usize| {
                    let place = self.cache.place(*at);
                    (plan.tries && place.sequence <= acknowledged).then_some((*at, place))
                };
                // A page that leaves a run splits it in two; the runs of the rest must fit a packet's table all the same.
                let fits = self.rest_runs.len() + (runs.len() - before) <= MAX_RUNS;
                if let Some((at, Place { sequence, paid })) = kept.as_ref().filter(|_| fits).and_then(usable) {
                    passes += 1;
                    let of_it = DeltaBase { number: number - 1, at, sequence };
                    let length = match results.as_mut().and_then(|results| results.delta(of_it)) {
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
                    // In a region that rests, only pages that pay are kept, so only the samples represent all pages.
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
        // Memory that is touched for the first time takes many times longer than a pass, but only once.
        if self.cache.touched() == touched {
            self.history.took(thread_time().saturating_sub(begun).as_nanos() as f64, passes, number);
        }
        split
    }

    /// Finds the places of all pages of a batch at once: their sets are neighbours.
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

    /// Begins to collect the pages that are sent whole: `before` is, and the next page is not.
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

    /// Adds the delta from the page kept at `at` to `content`, and applies it there. Returns the record's length, 0 where the pages are the
    /// same, and none where it would be longer than `most`. The page kept at `next` is compared next. `checksum`: that of the content, if
    /// it is known.
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
            // A page of content that is not aligned has no record: it is sent whole.
            Ok(Created::Overflow { .. }) | Err(_) => None,
        }
    }

    /// As [`Deltas::delta`], with `delta`, which a device has made from the page kept at `at`. Where that delta is wrong, the kept page is
    /// spoilt.
    fn by_device(
        &mut self,
        at: usize,
        content: &[u8],
        most: usize,
        delta: Delta<'_>,
        checksum: Option<u32>,
    ) -> Result<Option<usize>, WrongResult> {
        let record = match delta {
            Delta::Equal => &[],
            Delta::Record(record) if (1..=most).contains(&record.len()) => record,
            Delta::Record(_) | Delta::TooLong => return Ok(None),
        };
        let of_content = checksum.unwrap_or_else(|| crc32c(content));
        if self.cache.apply(at, record).is_err() || crc32c(self.cache.page(at)) != of_content {
            // Either the record does not lead to the copy, or the copy is not what the device has read.
            return Err(if checksum.is_some_and(|checksum| checksum != crc32c(content)) {
                WrongResult::Copy
            } else {
                WrongResult::Delta
            });
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

    /// Records the numbers of the packets of the last batch, whose content is `content`.
    pub(super) fn sent(&mut self, block: u16, content: &[u8], deltas: u64, whole: u64) {
        self.number_places(deltas, whole);
        if let Some(underway) = &mut self.underway {
            underway.push_all(whole, block, &self.unkept, content);
        }
    }

    fn number_places(&mut self, deltas: u64, whole: u64) {
        for &at in &self.changed {
            let place = self.cache.place_mut(at);
            (place.sequence, place.paid) = (deltas, true);
        }
        for &at in &self.replaced {
            let place = self.cache.place_mut(at);
            (place.sequence, place.paid) = (whole, false);
        }
    }

    /// Returns the pages of the last batch that are sent as deltas, and the deltas.
    pub(super) fn deltas(&self) -> (&[Run], &[u8]) {
        (&self.runs, &self.records[..self.records_length])
    }

    /// Returns the pages of the last batch that are sent whole or are zero, and the content of the former. `content`: that of the batch.
    pub(super) fn rest<'a>(&'a self, content: &'a [u8]) -> (&'a [Run], &'a [u8]) {
        (&self.rest_runs, if self.all_whole { content } else { &self.rest })
    }

    /// Returns the CRC-32C of the content in [`Deltas::rest`], where devices have computed those of its pages.
    pub(super) fn rest_checksum(&self) -> Option<u32> {
        self.rest_checksum
    }

    /// Records how many pages of the last batch were sent whole, in how many bytes.
    pub(super) fn went_whole(&mut self, pages: u64, bytes: usize) {
        if pages > 0 {
            let each = bytes as f64 / pages as f64;
            self.whole_page += (each - self.whole_page) * SMOOTH;
            self.history.went_whole(self.region, each, self.whole_page);
        }
    }

    /// Returns how many pages are kept.
    #[cfg(test)]
    fn kept(&self) -> usize {
        self.cache.kept()
    }

    /// Forgets the pages of `run` in `block`, which are sent in another mode or discarded at the destination.
    pub(super) fn forget(&mut self, block: u16, run: &Run) {
        if !self.cache.is_empty() {
            (run.first..run.end()).for_each(|page| self.cache.forget(Key::new(block, page)));
        }
    }
}

/// Returns the number of a page's region.
fn region_of(block: u16, page: u64) -> u64 {
    (u64::from(block) << 40) + page / REGION_PAGES
}

/// Appends a page.
fn push(runs: &mut Vec<Run>, page: u64) {
    match runs.last_mut() {
        Some(last) if last.kind == RunKind::Normal && last.end() == page && last.count < Run::MAX_COUNT => {
            last.count += 1;
        }
        _ => runs.push(Run { kind: RunKind::Normal, first: page, count: 1 }),
    }
}

/// Appends a page whose content is the batch's page `number`.
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
