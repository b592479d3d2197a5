//! A device in service, and how it is taken out of service.
//!
//! A device that fails, gives a wrong result or does not answer gets no more work. The memory that it may still write
//! is quarantined, and its queues are drained and closed, on a separate thread because closing can hang. The kernel
//! drains a queue when its file is closed, so once that has returned the device is quiet and the quarantine ends. If it
//! never returns, the memory is kept for ever.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};

use sterna_idxd::iaa::CompletionRecord as LongRecord;
use sterna_idxd::{CompletionRecord, Descriptor, SubmitError, WorkQueue};
use sterna_memory::PAGE_SIZE;

use crate::arena::Slab;
use crate::common::Common;
use crate::engine::queues::Takers;
use crate::kind::Kind;
use crate::operation::Operation;
use crate::region::Region;
use crate::request::Request;
use crate::share::{Grant, Predictor, Share};
use crate::state::State;
use crate::sync::lock_std;
use crate::time::{Bell, Nanos};
use crate::trace::Trace;

/// One queue of a device.
#[derive(Debug)]
pub(crate) struct Queue {
    /// None when the device is out of service.
    opened: RwLock<Option<Arc<WorkQueue>>>,
    pub(crate) name: Arc<str>,
    /// The most descriptors of a batch; 1 where there are no batches.
    pub(crate) max_batch: u32,
    pub(crate) max_transfer: u64,
    /// All retries of a batch were refused, and nothing has been accepted since.
    refuses: AtomicBool,
}

impl Queue {
    fn new(queue: Arc<WorkQueue>) -> Self {
        let info = queue.info();
        Self {
            name: info.full_name().into(),
            refuses: AtomicBool::new(false),
            max_batch: queue.max_batch().unwrap_or(1).max(1),
            max_transfer: info.max_transfer,
            opened: RwLock::new(Some(queue)),
        }
    }

    /// Submits, if the queue is still open.
    ///
    /// # Safety
    /// As [`WorkQueue::submit`]: the request that `descriptor` belongs to is kept until its record was seen, or
    /// quarantined.
    pub(crate) unsafe fn submit(&self, descriptor: &Descriptor) -> Option<Result<(), SubmitError>> {
        let opened = self.opened.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: passed on.
        opened.as_ref().map(|queue| unsafe { queue.submit(descriptor) })
    }

    /// Returns how many retries a refused submission is worth, at most `retries`. A device that has halted, or a queue
    /// that another submitter keeps full, refuses all: one batch discovers that, and the others need not wait for the
    /// same.
    pub(crate) fn retries(&self, retries: u32) -> u32 {
        if self.refuses.load(Relaxed) { 0 } else { retries }
    }

    /// Records that all retries of a batch were refused.
    pub(crate) fn refused(&self) {
        self.refuses.store(true, Relaxed);
    }

    /// Records that the queue has accepted a descriptor.
    pub(crate) fn accepted(&self) {
        if self.refuses.load(Relaxed) {
            self.refuses.store(false, Relaxed);
        }
    }

    /// Records that a completion record of the queue was seen.
    pub(crate) fn seen(&self) {
        let opened = self.opened.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(queue) = opened.as_ref() {
            queue.seen_complete(1);
        }
    }

    fn take(&self) -> Option<Arc<WorkQueue>> {
        self.opened.write().unwrap_or_else(std::sync::PoisonError::into_inner).take()
    }
}

/// Admission to a device.
pub(crate) struct Admission {
    pub(crate) share: Box<dyn Share>,
    pub(crate) predictors: [Predictor; Operation::ALL.len()],
}

#[derive(Debug, Default)]
struct Quarantine {
    #[expect(clippy::vec_box, reason = "a request goes from hand to hand in its box")]
    requests: Vec<Box<Request>>,
    /// The device's index in the list of those taken out, once it is there.
    place: Option<usize>,
    /// The device is proved quiet: no memory has to be kept any more.
    quiet: bool,
}

/// A device.
pub(crate) struct Device {
    /// Identifies the device in leases.
    number: u64,
    pub(crate) name: Arc<str>,
    pub(crate) kind: Kind,
    pub(crate) node: Option<u32>,
    pub(crate) queues: Vec<Queue>,
    /// The queues for each operation.
    takers: [Takers; Operation::ALL.len()],
    next: AtomicUsize,
    out: AtomicBool,
    /// When a completion of the device was last seen.
    completed: AtomicU64,
    /// When it is predicted to have finished all its work.
    busy_until: AtomicU64,
    outstanding: AtomicU32,
    /// Whether most pages of the last zero map were zero.
    expect_zero: AtomicBool,
    /// Whether nearly all of them were.
    expect_run: AtomicBool,
    pub(crate) admission: Mutex<Admission>,
    /// How it is shared, as text.
    pub(crate) shared: String,
    quarantine: Mutex<Quarantine>,
    second: Mutex<SecondLook>,
    pub(crate) common: Common,
}

/// Polls of a device's record before a second look is left for later: some hundred microseconds.
const LOOKS: u32 = 20_000;

/// A question about a page that the device has answered before ([`Device::still_zero`]).
#[derive(Debug)]
struct SecondLook {
    /// The completion record. None if the device may write it for as long as the process lives.
    slab: Option<Slab>,
    /// A question without an answer in time: until it is answered, the device may write the record and read the page.
    under_way: Option<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    queue: usize,
    since: Nanos,
    /// The page's region, entered once more.
    region: Arc<Region>,
}

impl SecondLook {
    fn record(&self) -> Option<&CompletionRecord> {
        // SAFETY: the slab is page-aligned, larger than a record, initialised (zero at first), and a record is made of
        // atomics.
        self.slab.as_ref().map(|slab| unsafe { &*slab.pointer().cast::<CompletionRecord>() })
    }

    /// Ends the question: the device has answered or is quiet.
    fn over(&mut self) -> Option<usize> {
        let UnderWay { queue, region, .. } = self.under_way.take()?;
        region.leave();
        Some(queue)
    }

    /// Leaks the record and the page's region: the device may use them for ever.
    fn give_up(&mut self) {
        if let Some(under_way) = self.under_way.take() {
            tracing::warn!(region = ?under_way.region, "a record and a page of a device that may not be quiet are kept");
            std::mem::forget((self.slab.take(), under_way));
        }
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {} queues)", self.name, self.queues.len())
    }
}

impl Device {
    /// Makes a device of these queues, all of which have been tested. `code` returns the device's opcode of an operation, where it has one.
    pub(crate) fn new(
        number: u64,
        queues: Vec<Arc<WorkQueue>>,
        code: fn(Operation) -> Option<u8>,
        common: &Common,
    ) -> Arc<Self> {
        let info = Arc::clone(&queues[0].info().device);
        let takers = Operation::ALL.map(|operation| match code(operation) {
            Some(code) => Takers::of(queues.iter().map(|queue| queue.info()), code),
            None => Takers::default(),
        });
        let (share, shared) = common.settings.shares.of(&info.name);
        let admission = Admission { share, predictors: Default::default() };
        Arc::new(Self {
            number,
            name: info.name.as_str().into(),
            kind: match info.kind {
                sterna_idxd::Kind::Dsa => Kind::Dsa,
                sterna_idxd::Kind::Iaa => Kind::Iaa,
            },
            node: info.numa_node,
            queues: queues.into_iter().map(Queue::new).collect(),
            takers,
            next: AtomicUsize::new(0),
            out: AtomicBool::new(false),
            completed: AtomicU64::new(0),
            busy_until: AtomicU64::new(0),
            outstanding: AtomicU32::new(0),
            expect_zero: AtomicBool::new(false),
            expect_run: AtomicBool::new(false),
            admission: Mutex::new(admission),
            shared,
            quarantine: Mutex::default(),
            second: Mutex::new(SecondLook { slab: Some(Slab::new(64, info.numa_node)), under_way: None }),
            common: common.clone(),
        })
    }

    /// Returns whether it gets work.
    pub(crate) fn in_service(&self) -> bool {
        !self.out.load(Ordering::Acquire)
    }

    /// Returns whether one of its queues has `operation`.
    pub(crate) fn does(&self, operation: Operation) -> bool {
        !self.takers[operation.index()].is_empty()
    }

    /// Returns the next queue for work that has been refused `refusals` times.
    pub(crate) fn next_queue(&self, operation: Operation, urgent: bool, refusals: u32) -> Option<usize> {
        self.takers[operation.index()].choose(urgent, refusals, self.next.fetch_add(1, Relaxed))
    }

    /// Records a submission that is predicted to take `predicted`. Returns when it is expected to complete.
    pub(crate) fn submitted(&self, predicted: Nanos, now: Nanos) -> Nanos {
        if self.outstanding.fetch_add(1, Relaxed) == 0 {
            self.busy_until.store(now, Relaxed);
        }
        // Two threads may start from the same value: it is a prediction, and the next completion corrects it.
        let until = self.busy_until.load(Relaxed).max(now).saturating_add(predicted);
        self.busy_until.store(until, Relaxed);
        until
    }

    /// Records that a completion was seen.
    pub(crate) fn completed(&self, now: Nanos) {
        self.outstanding.fetch_sub(1, Relaxed);
        self.completed.fetch_max(now, Relaxed);
    }

    /// Returns whether a descriptor submitted at `submitted` and overdue since `deadline` is to be given up: the device
    /// has completed nothing for the time that takes, or others completed for four times as long.
    pub(crate) fn given_up(&self, submitted: Nanos, deadline: Nanos, now: Nanos) -> bool {
        if now < deadline {
            return false;
        }
        let silent_since = self.completed.load(Relaxed).max(submitted);
        now.saturating_sub(silent_since) >= self.common.patience()
            || now >= deadline.saturating_add(4 * (deadline - submitted))
    }

    /// Returns how much longer than on an idle device a descriptor submitted now may take.
    pub(crate) fn backlog(&self, now: Nanos) -> Nanos {
        self.busy_until.load(Relaxed).saturating_sub(now)
    }

    /// Returns whether the next pages are expected to be zero.
    pub(crate) fn expects_zero(&self) -> bool {
        self.expect_zero.load(Relaxed)
    }

    /// Returns whether nearly all of the next pages are expected to be zero.
    pub(crate) fn expects_run(&self) -> bool {
        self.expect_run.load(Relaxed)
    }

    /// Records whether most pages were zero, and whether nearly all of them were.
    pub(crate) fn expect_zero(&self, zero: bool, nearly_all: bool) {
        self.expect_zero.store(zero, Relaxed);
        self.expect_run.store(nearly_all, Relaxed);
    }

    /// Takes it out of service, once.
    pub(crate) fn take_out(self: &Arc<Self>, reason: &str) {
        {
            let mut quarantine = lock_std(&self.quarantine);
            if quarantine.place.is_some() {
                return;
            }
            // Set before other threads see it out of service: the requests that they quarantine are counted there.
            quarantine.place = Some(self.common.statistics.taken_out(self.name.to_string(), reason.to_owned()));
        }
        self.out.store(true, Ordering::Release);
        tracing::warn!(device = &*self.name, reason, "accelerator taken out of service; the CPU does its work");
        let device = Arc::clone(self);
        self.common.closers.run(Box::new(move || device.close()));
    }

    /// Quarantines a request that the device may still write, until the device is proved quiet.
    pub(crate) fn keep(&self, mut request: Box<Request>) {
        request.go(State::Quarantined);
        let mut quarantine = lock_std(&self.quarantine);
        if quarantine.quiet {
            drop(quarantine);
            return self.free(request);
        }
        if request.operation.writes_guest() {
            self.common.leases.add(self.number, &request);
        }
        let bytes = request.device_bytes();
        quarantine.requests.push(request);
        self.common.statistics.change(quarantine.place, |out| out.quarantined_bytes += bytes);
    }

    /// Returns whether it is closed, and proved not to touch memory any more.
    pub(crate) fn is_quiet(&self) -> bool {
        lock_std(&self.quarantine).quiet
    }

    /// Returns the number of requests in quarantine.
    pub(crate) fn quarantined(&self) -> usize {
        lock_std(&self.quarantine).requests.len()
    }

    fn free(&self, mut request: Box<Request>) {
        request.leave();
        request.go(State::Free);
        // No part of it is in the device any more, whatever its records show.
        request.work.reset();
        self.common.pools.of(request.node()).put(request);
    }

    /// Drains and closes its queues. Returns when the device is quiet, or never.
    fn close(&self) {
        let time = &self.common.settings.time;
        let queues: Vec<_> = self.queues.iter().filter_map(Queue::take).collect();
        // The completion records of the drains are in this slab, which outlives the queues.
        let records = Slab::new(queues.len() * 64, self.node);
        let asleep = Bell::default();
        for (number, queue) in queues.iter().enumerate() {
            let end = time.now().saturating_add(self.common.patience());
            // SAFETY: within the slab, aligned, zero, made of atomics.
            let record = unsafe { &*records.pointer().wrapping_add(number * 64).cast::<LongRecord>() };
            let drain = Descriptor::drain().with_record(record.address());
            let mut pause = 1_000;
            // SAFETY: the record lives until the queue is closed, below; a drain names no other memory.
            while unsafe { queue.submit(&drain) }.is_err() && time.now() < end {
                time.wait(&asleep, 0, time.now() + pause);
                pause = (pause * 2).min(1_000_000);
            }
            while record.poll().is_none() && time.now() < end {
                time.wait(&asleep, 0, time.now() + pause);
                pause = (pause * 2).min(1_000_000);
            }
        }
        // Dropping the last reference unmaps the portal and then closes the file, whereupon the kernel drains the
        // queue.
        let shared = queues.into_iter().filter(|queue| Arc::strong_count(queue) > 1).count();
        if shared > 0 {
            tracing::error!(device = &*self.name, "a queue is also held elsewhere: it cannot be proved quiet");
            std::mem::forget(records);
            return lock_std(&self.second).give_up();
        }
        drop(records);
        lock_std(&self.second).over();
        let (kept, place) = {
            let mut quarantine = lock_std(&self.quarantine);
            quarantine.quiet = true;
            (std::mem::take(&mut quarantine.requests), quarantine.place)
        };
        kept.into_iter().for_each(|request| self.free(request));
        self.common.leases.release(self.number);
        self.common.statistics.change(place, |out| (out.quiet, out.quarantined_bytes) = (true, 0));
        tracing::info!(device = &*self.name, "the accelerator is closed and quiet");
    }

    /// Asks the device a second time whether this page of `region`, which a request has entered, is zero. Returns none
    /// if the device does not answer at once: the call is for the rare case that the CPU read something else, which is
    /// not worth waiting.
    pub(crate) fn still_zero(&self, queue: usize, page: *const u8, region: &Arc<Region>, now: Nanos) -> Option<bool> {
        let mut second = lock_std(&self.second);
        if !self.answered(&mut second) {
            return None;
        }
        let record = second.record()?;
        record.clear();
        let descriptor = Descriptor::compare_pattern(page.expose_provenance() as u64, 0, PAGE_SIZE as u32)
            .with_record(record.address());
        // SAFETY: the record is kept until it was seen or the device is proved quiet, else for ever; the page is only
        // read, and its region is entered until then.
        unsafe { self.queues[queue].submit(&descriptor) }?.ok()?;
        let said = (0..LOOKS).find_map(|_| {
            std::hint::spin_loop();
            record.poll()
        });
        let Some(said) = said else {
            region.enter_again();
            second.under_way = Some(UnderWay { queue, since: now, region: Arc::clone(region) });
            return None;
        };
        self.queues[queue].seen();
        said.status.is_success().then_some(said.result == 0)
    }

    /// Looks at a second question without an answer, and returns whether it is still in progress. A device that stays
    /// silent is taken out of service.
    pub(crate) fn second_look(self: &Arc<Self>, now: Nanos) -> bool {
        let since = {
            let mut second = lock_std(&self.second);
            if self.answered(&mut second) {
                return false;
            }
            second.under_way.as_ref().map_or(now, |under_way| under_way.since)
        };
        if now.saturating_sub(since) >= self.common.patience() {
            self.take_out("no answer to a second question about a page");
        }
        true
    }

    /// Returns whether `second` has nothing in progress (any more).
    fn answered(&self, second: &mut SecondLook) -> bool {
        if second.under_way.is_some() && second.record().is_some_and(|record| record.poll().is_none()) {
            return false;
        }
        if let Some(queue) = second.over() {
            self.queues[queue].seen();
        }
        true
    }

    /// Releases a grant.
    pub(crate) fn return_grant(&self, grant: Option<Grant>, submitted: Option<Nanos>, now: Nanos) {
        let Some(grant) = grant else { return };
        let mut admission = lock_std(&self.admission);
        match submitted {
            Some(submitted) => admission.share.done(grant, now.saturating_sub(submitted), now),
            None => admission.share.dropped(grant),
        }
    }

    pub(crate) fn trace(&self) -> Option<&Trace> {
        self.common.settings.trace.as_deref()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let mut second = lock_std(&self.second);
        if second.under_way.is_some() {
            // The kernel drains the queues when they are closed here, unless another owner holds one too.
            let held = self.queues.iter().filter_map(Queue::take).filter(|queue| Arc::strong_count(queue) > 1).count();
            match held {
                0 => _ = second.over(),
                _ => second.give_up(),
            }
        }
        drop(second);
        let quarantine = std::mem::take(&mut *lock_std(&self.quarantine));
        if !quarantine.requests.is_empty() {
            // A device that was never proved quiet may write them for as long as the process lives.
            tracing::warn!(
                device = &*self.name,
                requests = quarantine.requests.len(),
                "memory of a hung device is leaked"
            );
            std::mem::forget(quarantine.requests);
        }
    }
}
