//! The state that all channels of a process share, and the one path of a request: submit, look, deliver.

use std::fmt::{Debug, Formatter};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use sterna_memory::checksum::crc32c;

use crate::batch::Batch;
use crate::common::{Closers, Common};
use crate::completion::{Done, Producer, Reason, TicketId};
use crate::engine::{Begun, OffloadEngine, Progress, cpu};
use crate::kind::{Cause, Kind};
use crate::lease::Leases;
use crate::operation::Operation;
use crate::pools::ByNode;
use crate::report::{Requests, Statistics};
use crate::request::{Answer, Request};
use crate::settings::{Recheck, Settings};
use crate::state::State;
use crate::submitter::Submitter;
use crate::sync::lock_std;
use crate::table::{Id, Slots, Step};
use crate::time::{Bell, NEVER, Nanos};
use crate::work::{Outcome, Run};

/// How much later than predicted the backstop looks at a channel: its owner is expected to look first. Without the
/// delay the backstop would wake for every batch of a caller that waits for each.
pub(crate) const LATER: Nanos = 500_000;

/// The state that all channels share.
pub(crate) struct Core {
    pub(crate) settings: Settings,
    pub(crate) pools: ByNode,
    /// The accelerators, in order of preference. If there are none, the CPU does everything.
    pub(crate) engines: Vec<Arc<dyn OffloadEngine>>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) closing: AtomicBool,
    pub(crate) channels: Mutex<Vec<Arc<Submitter>>>,
    /// What the backstop sleeps on, and until when it sleeps.
    pub(crate) bell: Bell,
    pub(crate) until: AtomicU64,
    sampled: AtomicU64,
    pub(crate) closers: Arc<Closers>,
    pub(crate) channel_number: AtomicU32,
    /// Number of guests made so far. 0 stands for channels without a guest.
    pub(crate) guests: AtomicU32,
}

impl Debug for Core {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Core({} engines)", self.engines.len())
    }
}

impl Core {
    pub(crate) fn new(common: Common, engines: Vec<Arc<dyn OffloadEngine>>) -> Arc<Self> {
        let Common { settings, statistics, leases, pools, closers } = common;
        Arc::new(Self {
            settings,
            pools,
            engines,
            leases,
            statistics,
            closing: AtomicBool::new(false),
            channels: Mutex::new(Vec::new()),
            bell: Bell::default(),
            until: AtomicU64::new(NEVER),
            sampled: AtomicU64::new(0),
            closers,
            channel_number: AtomicU32::new(0),
            guests: AtomicU32::new(0),
        })
    }

    fn now(&self) -> Nanos {
        self.settings.time.now()
    }

    /// Submits a batch.
    pub(crate) fn submit(&self, channel: &Submitter, mut batch: Batch) -> Result<Id, (Reason, Batch)> {
        if batch.is_empty() {
            return Err((Reason::Empty, batch));
        }
        if self.leases.forbid(batch.request()) {
            return Err((Reason::Leased, batch));
        }
        let mut slots = channel.table.lock();
        // Checked with the table locked: a shutdown looks at every table after it has set the flag.
        if self.closing.load(Ordering::Acquire) {
            return Err((Reason::Closed, batch));
        }
        let now = self.now();
        self.harvest(channel, &mut slots, now);
        if !slots.has_room() {
            return Err((Reason::Full, batch));
        }
        if !batch.request_mut().enter() {
            return Err((Reason::Retired, batch));
        }
        let mut request = batch.into_request();
        request.unanswered();
        request.go(State::Queued);
        request.submitted = now;
        let step = self.begin(&mut request, channel, now);
        let due = request.work.due;
        let inserted =
            slots.insert(request, &step).unwrap_or_else(|_| unreachable!("there was room, and it is locked"));
        if step == Step::Going {
            channel.last_due.fetch_max(due, Relaxed);
            let due = channel.due.load(Relaxed).min(due);
            channel.due.store(due, Ordering::SeqCst);
            drop(slots);
            self.arm(due);
        }
        Ok(inserted)
    }

    /// Gives a queued request to the first engine that accepts it, or leaves it to the CPU.
    fn begin(&self, request: &mut Request, channel: &Submitter, now: Nanos) -> Step {
        let operation = request.operation;
        for (number, engine) in self.engines.iter().enumerate().filter(|(_, engine)| engine.does(operation)) {
            let counters = self.statistics.of(operation, engine.kind());
            match engine.begin(request, channel.whose(), now) {
                Begun::InDevice => {
                    request.work.engine = number;
                    request.go(State::InDevice);
                    counters.batches.fetch_add(1, Relaxed);
                    counters.items.fetch_add(request.items.len() as u64, Relaxed);
                    counters.bytes.fetch_add(request.bytes, Relaxed);
                    return Step::Going;
                }
                Begun::Wait(until) => {
                    (request.work.due, request.work.seen) = (until, channel.completions.load(Relaxed));
                    return Step::Going;
                }
                Begun::Spill(cause) => {
                    request.work.engine = number;
                    request.work.spilled = cause == Cause::Spilled;
                    counters.fell_back(cause, request.items.len() as u64);
                }
            }
        }
        self.leave_to_cpu(request);
        Step::Done
    }

    fn leave_to_cpu(&self, request: &mut Request) {
        request.work.by_cpu = true;
        request.work.rest.clear();
        request.work.rest.push(Run { first: 0, count: request.items.len() as u32 });
        request.go(State::Done);
    }

    /// Looks at all requests of `channel` in progress, and records when to look again.
    pub(crate) fn harvest(&self, channel: &Submitter, slots: &mut Slots<Box<Request>>, now: Nanos) -> usize {
        let (mut due, mut last_due);
        let closing = self.closing.load(Ordering::Acquire);
        let completions = &channel.completions;
        let mut delivered = 0;
        loop {
            let before = completions.load(Relaxed);
            let mut waits = false;
            (due, last_due) = (NEVER, 0);
            let look = |request: &mut Box<Request>| {
                let step = match request.state() {
                    State::Queued if closing => {
                        request.work.outcome = Outcome::Cancelled;
                        request.go(State::Done);
                        Step::Done
                    }
                    // The request waits until its time, or until another request of its channel has completed.
                    State::Queued if now < request.work.due && request.work.seen == completions.load(Relaxed) => {
                        waits = true;
                        Step::Going
                    }
                    State::Queued => self.begin(request, channel, now),
                    _ => self.advance(request, now),
                };
                match step {
                    Step::Going => {
                        due = due.min(request.work.due);
                        last_due = last_due.max(request.work.due);
                    }
                    Step::Done => _ = completions.fetch_add(1, Relaxed),
                }
                step
            };
            delivered += slots.harvest(look, |request| self.pools.put_away(request));
            // A request has completed after the waiting ones were looked at: look at them again.
            if !waits || completions.load(Relaxed) == before {
                break;
            }
        }
        channel.due.store(due, Ordering::SeqCst);
        channel.last_due.store(last_due, Relaxed);
        delivered
    }

    fn advance(&self, request: &mut Box<Request>, now: Nanos) -> Step {
        let engine = &self.engines[request.work.engine];
        match engine.advance(request, now) {
            Progress::Going => return Step::Going,
            Progress::Done => request.go(State::Done),
            Progress::Lost => {
                let fresh = self.replace(request);
                engine.quarantine(std::mem::replace(request, fresh));
            }
        }
        Step::Done
    }

    /// Returns a copy of a request that a device may still write, for its caller.
    fn replace(&self, lost: &Request) -> Box<Request> {
        // Only for a broken device, and only here, a request may have to be allocated.
        let mut fresh = self.pools.of(lost.node()).take(lost.buffer.is_some());
        fresh.go(State::Filling);
        lost.copy_into(&mut fresh);
        fresh.unanswered();
        fresh.go(State::Queued);
        if lost.operation.writes_guest() {
            fresh.work.outcome = Outcome::Leased;
            fresh.go(State::Done);
        } else {
            let counters = self.statistics.of(lost.operation, self.engines[lost.work.engine].kind());
            counters.fell_back(Cause::Timeout, lost.items.len() as u64);
            self.leave_to_cpu(&mut fresh);
        }
        fresh
    }

    /// Looks at a channel and takes the oldest completion if `take` is set. The backstop takes none.
    pub(crate) fn look(&self, channel: &Submitter, take: bool) -> Option<(Id, Box<Request>)> {
        let mut slots = channel.table.lock();
        let now = self.now();
        // With completions at hand no record has to be read: they are collected in bulk.
        if slots.done() == 0 || channel.due.load(Relaxed) <= now {
            self.harvest(channel, &mut slots, now);
        }
        if take { slots.take() } else { None }
    }

    /// Finishes a request that no device has any more, and returns it to its caller.
    pub(crate) fn deliver(&self, id: Id, mut request: Box<Request>) -> Done {
        let outcome = request.work.outcome;
        if outcome == Outcome::Done {
            self.finish(&mut request);
        }
        let producer = (outcome == Outcome::Done && !request.work.by_cpu).then(|| self.producer(&request));
        Done { ticket: TicketId(id), batch: Batch::reopened(request, &self.pools), outcome, producer }
    }

    fn finish(&self, request: &mut Request) {
        let operation = request.operation;
        let engine = self.engines.get(request.work.engine);
        if request.work.by_cpu {
            let counters = self.statistics.of(operation, Kind::Cpu);
            counters.batches.fetch_add(1, Relaxed);
            counters.items.fetch_add(request.items.len() as u64, Relaxed);
            counters.bytes.fetch_add(request.bytes, Relaxed);
        } else {
            engine.expect("an engine had it").settle(request);
            match operation {
                Operation::ZeroMap => self.recheck(request),
                Operation::CopyChecksum if self.settings.recheck_copies => self.recheck_copies(request),
                _ => {}
            }
        }
        if request.work.rest.is_empty() {
            return;
        }
        let began = self.now();
        while let Some(run) = request.work.rest.pop() {
            cpu::execute(request, run);
        }
        let now = self.now();
        let took = now.saturating_sub(began);
        let kind = if request.work.by_cpu { Kind::Cpu } else { engine.map_or(Kind::Cpu, |engine| engine.kind()) };
        self.statistics.of(operation, kind).cpu_nanos.fetch_add(took, Relaxed);
        if request.work.spilled
            && let Some(engine) = engine
        {
            engine.spilled(request, took, now);
        }
    }

    /// Reads some of the pages that a device reported as zero.
    fn recheck(&self, request: &mut Request) {
        let every = match self.settings.recheck {
            Recheck::None => return,
            Recheck::All => 1,
            Recheck::OneIn(pages) => u64::from(pages.max(1)),
        };
        let engine = &self.engines[request.work.engine];
        let races = request.regions.iter().any(|region| region.races());
        let (mut sampled, mut doubtful, mut wrong) = (0, 0, false);
        for word in 0..request.items.len().div_ceil(64) {
            let mut zero = request.zero[word];
            let count = u64::from(zero.count_ones());
            // The sample counter runs on from batch to batch, so that small batches are sampled as often as large ones.
            let before = self.sampled.fetch_add(count, Relaxed);
            let mut skip = (every - before % every) % every;
            while zero != 0 {
                if skip == 0 {
                    let page = word * 64 + zero.trailing_zeros() as usize;
                    cpu::execute(request, Run { first: page as u32, count: 1 });
                    sampled += 1;
                    if !request.is_zero(page) {
                        doubtful += 1;
                        request.doubt(page);
                        wrong |= !races || self.repeats(engine, request, page);
                    }
                    skip = every;
                }
                skip -= 1;
                zero &= zero - 1;
            }
        }
        let counters = self.statistics.of(request.operation, engine.kind());
        counters.sampled.fetch_add(sampled, Relaxed);
        counters.doubtful.fetch_add(doubtful, Relaxed);
        if wrong {
            counters.fell_back(Cause::WrongResult, request.items.len() as u64);
            self.report_wrong_result(self.producer(request), "it called a page zero that is not");
            request.work.rest.clear();
            request.work.rest.push(Run { first: 0, count: request.items.len() as u32 });
        }
    }

    /// Returns the device that did `request`.
    fn producer(&self, request: &Request) -> Producer {
        let engine = request.work.engine;
        Producer { engine, device: self.engines[engine].device(request) }
    }

    /// Takes a device out of service that gave a wrong result. Its earlier results become suspect, if it makes zero
    /// maps: a device that only compresses has reported no zero pages.
    pub(crate) fn report_wrong_result(&self, producer: Producer, what: &str) {
        let engine = &self.engines[producer.engine];
        engine.report_wrong_result(producer.device, what);
        if engine.does(Operation::ZeroMap) {
            self.statistics.wrong_results.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns whether the device that reported `page` as zero, which the CPU has just read as not zero, reports so
    /// again while the page is unchanged. Once, the device may only have read before the guest wrote; and a guest may
    /// clear and fill a page between any two reads.
    fn repeats(&self, engine: &Arc<dyn OffloadEngine>, request: &mut Request, page: usize) -> bool {
        let before = cpu::current_checksum(request, page);
        if engine.still_zero(request, page, self.now()) != Some(true) || cpu::current_checksum(request, page) != before
        {
            return false;
        }
        cpu::execute(request, Run { first: page as u32, count: 1 });
        !request.is_zero(page)
    }

    /// Computes the checksums of the copies that a device has made. No other thread writes them, so a copy that differs
    /// from the device's own checksum is the device's mistake.
    fn recheck_copies(&self, request: &mut Request) {
        let kind = self.engines[request.work.engine].kind();
        let mut wrong = 0;
        for item in 0..request.items.len() {
            let Answer::Checksum(said) = request.answers[item] else { continue };
            // SAFETY: this item's part of the batch's own buffer, initialised; no device has it any more.
            let copy = unsafe { std::slice::from_raw_parts(request.room(item), request.items[item].bytes as usize) };
            if crc32c(copy) != said {
                wrong += 1;
                request.answers[item] = Answer::None;
                request.work.rest.push(Run { first: item as u32, count: 1 });
            }
        }
        if wrong > 0 {
            self.statistics.of(request.operation, kind).fell_back(Cause::WrongResult, wrong);
            self.report_wrong_result(self.producer(request), "its copy is not what it has read");
        }
    }

    /// Looks at pages that devices were asked about a second time without an immediate answer. Returns whether there
    /// are any.
    pub(crate) fn second_looks(&self) -> bool {
        let now = self.now();
        self.engines.iter().filter(|engine| engine.second_looks(now)).count() > 0
    }

    /// Returns whether no device has any request.
    pub(crate) fn idle(&self) -> bool {
        lock_std(&self.channels).iter().all(|channel| channel.table.lock().active() == 0)
    }

    /// Looks at all requests until no device has any. Ends because a device that does not answer is given up.
    pub(crate) fn settle_all(&self) {
        let channels = lock_std(&self.channels).clone();
        for channel in channels {
            loop {
                let heard = self.bell.heard();
                let mut slots = channel.table.lock();
                let now = self.now();
                if self.harvest(&channel, &mut slots, now) > 0 {
                    channel.table.bell.ring();
                }
                if slots.active() == 0 {
                    let closed = slots.closed();
                    drop(slots);
                    // The owner left the table to the thread that sees its last request done.
                    if closed {
                        self.forget(&channel);
                    }
                    break;
                }
                drop(slots);
                self.settings.time.wait(&self.bell, heard, channel.due.load(Ordering::SeqCst));
            }
        }
    }

    /// Makes the backstop wake at `due` at the latest.
    pub(crate) fn arm(&self, due: Nanos) {
        if due.saturating_add(LATER) < self.until.load(Ordering::SeqCst) {
            self.bell.ring();
        }
    }

    /// Removes a channel that has no requests any more.
    pub(crate) fn forget(&self, channel: &Arc<Submitter>) {
        lock_std(&self.channels).retain(|other| !Arc::ptr_eq(other, channel));
    }

    /// Returns the number of requests by state.
    pub(crate) fn requests(&self) -> Requests {
        let (made, free) = self.pools.counts();
        let mut requests = Requests { made, free, ..Requests::default() };
        requests.quarantined = self.engines.iter().map(|engine| engine.quarantined()).sum();
        requests
    }

    /// Looks at the channels whose owners do not, removes those that are closed and empty, and returns when to look
    /// again.
    pub(crate) fn turn(&self) -> Nanos {
        let now = self.now();
        let mut next = NEVER;
        lock_std(&self.channels).retain(|channel| {
            let due = channel.due.load(Ordering::SeqCst).saturating_add(LATER);
            if due > now || channel.attended.load(Ordering::SeqCst) {
                next = next.min(if due > now { due } else { NEVER });
                let idle =
                    due == NEVER && channel.table.try_lock().is_some_and(|slots| slots.closed() && slots.active() == 0);
                return !idle;
            }
            match channel.table.try_lock() {
                // The owner is looking at this moment.
                None => next = next.min(now + LATER),
                Some(mut slots) => {
                    // The clock is read again under the lock: nothing was submitted after this moment.
                    let now = self.now();
                    if self.harvest(channel, &mut slots, now) > 0 {
                        channel.table.bell.ring();
                    }
                    next = next.min(channel.due.load(Ordering::SeqCst).saturating_add(LATER));
                    return !(slots.closed() && slots.active() == 0);
                }
            }
            true
        });
        next
    }
}
