//! The rounds over the dirty pages, on a thread of their own: which pages go, and when the guest may be stopped.
//!
//! The order makes it right. Tracking is on before holes are searched, so that pages written meanwhile are sent too. The log is
//! collected, and so cleared, before the pages that it names are read. In between the monitor waits until the input and output under way
//! has written guest RAM ([`SourceVmm::settle_io`](crate::vmm::SourceVmm::settle_io)). After the guest has stopped the log is collected
//! twice: at once, for the last round, and when the monitor and its devices have saved their state, which may write guest RAM.
//!
//! Where the destination is lost, the thread ends and leaves its [`Rounds`] to the driver. Their log is still on. All pages that were handed over and
//! not acknowledged are pending again ([`Rounds::hold`]), and another thread goes on with them over new channels ([`Rounds::go_on_with`]).

mod requests;

use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::ram::GuestRam;
use sterna_wire::control::{ControlMessage, Totals};
use sterna_wire::reason::{ErrorKind, Reason};

pub(super) use self::requests::Controlled;
use super::convergence::{Arrived, Convergence, Decision, Measure};
use super::unsent::Unsent;
use crate::abort::Abort;
use crate::accelerator::{Accelerator, Doubt};
use crate::batch::REGION;
use crate::control_link::ControlSender;
use crate::device_state::SavingDevices;
use crate::entry::{PageSearch, Pipeline};
use crate::item::SendMode;
use crate::report::{Progress, milliseconds};
use crate::send::{Refusals, SendChannel, Sent};
use crate::window::{Delivered, WindowClosed};

/// Maximum number of times that the guest is resumed because it dirtied more than predicted until it was paused. After that it stays
/// paused: several pauses are worse than one longer pause.
const MAX_RETRIES: u32 = 3;
/// How long devices alone may keep the guest from being stopped before that is reported.
const HELD_LONG: Duration = Duration::from_secs(1);
/// How often the estimates are updated within a round.
const ESTIMATE_INTERVAL: Duration = Duration::from_millis(100);
/// Pages that are handed over between two checks whether estimates are due.
const ESTIMATE_PAGES: u64 = REGION / PAGE_SIZE as u64;
/// Within a round the log is collected for the first time after this long, then after twice as long, and so on. Each collecting costs the
/// guest a fault for each page that it goes on writing, so a long round costs it a few faults a page, not many.
const FIRST_COLLECTING: Duration = Duration::from_millis(250);

/// An order of the driver to this thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The destination permits the switchover.
    MayStop,
    /// The monitor does not slow its guest down, or not any more.
    NotThrottled,
    /// The input and output that was under way at [`RoundEvent::Settle`] has written guest RAM.
    Settled,
    /// The guest has stopped: send the rest, or in post-copy the list of the rest.
    LastRound,
    /// The monitor has saved its state, and writes guest RAM no more.
    Saved,
    /// In post-copy: the guest belongs to the destination, send the rest.
    Stream,
}

/// A message of this thread to the driver.
#[derive(Debug)]
pub(super) enum RoundEvent {
    /// The log was collected: wait for the input and output that writes guest RAM, before the pages are read.
    Settle,
    /// The rest fits the downtime: stop the guest and order the last round.
    SwitchOver,
    /// The guest was stopped for the last round, but had dirtied so much until then that the downtime would be far too long: resume it.
    RunOn,
    /// The guest stays stopped: its state may be sent.
    Stopped,
    /// Slow the guest down so much, in percent.
    Throttle(u8),
    /// The rounds do not converge, and all that they sent is acknowledged: let the destination watch for missing pages, then
    /// stop the guest.
    PostCopy,
    /// The rounds cannot go on, or are given up, with the reason.
    Failed(Reason),
    /// A line for people.
    Note(String),
    /// All of RAM, or in post-copy the list of missing pages, was acknowledged at this moment; the totals were sent to the destination.
    Drained {
        at: Instant,
        /// How long nothing but saving the state was waited for before.
        saving: Duration,
    },
}

/// The state of the rounds, for progress and the report.
#[derive(Clone, Debug, Default)]
pub(super) struct RoundStats {
    pub(super) round: u64,
    /// How many pages will have been delivered when all pages that are known to be dirty have been.
    pub(super) to_deliver: u64,
    pub(super) dirty_rate: f64,
    pub(super) predicted: Option<Duration>,
    /// Time until the guest runs at the destination.
    pub(super) time_left: Option<Duration>,
    pub(super) verdict: Option<String>,
    /// Why the downtime is longer than its target, where that was to be expected.
    pub(super) out_of_reach: Option<String>,
}

impl RoundStats {
    /// Copies the state into `progress`. `delivered`: pages so far.
    pub(super) fn fill(&self, progress: &mut Progress, delivered: u64) {
        progress.round = self.round;
        progress.remaining_bytes = self.to_deliver.saturating_sub(delivered) * PAGE_SIZE as u64;
        progress.dirty_rate = self.dirty_rate;
        progress.time_left_ms = self.time_left.map(milliseconds);
        progress.predicted_downtime_ms = self.predicted.map_or(0.0, |time| time.as_secs_f64() * 1e3);
    }
}

/// What a thread of the rounds works with, as long as the destination is connected.
pub(super) struct Connections {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) orders: Receiver<Order>,
    pub(super) news: Box<dyn FnMut(RoundEvent) + Send>,
    /// Sends the totals to the destination. The driver cannot send them: it is busy with the state, of which the destination reads
    /// nothing before it has the totals.
    pub(super) totals: Option<ControlSender>,
    pub(super) may_stop: bool,
    pub(super) abort: Arc<Abort>,
}

/// How far the rounds are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progressed {
    /// The guest's writes are not tracked.
    NotTracking,
    /// The guest's writes are tracked, and what was populated before is to be found.
    Tracking,
    /// All pages that are to be sent are pending, or were handed over.
    Sending,
}

/// Why the rounds ended before their end.
enum Ended {
    /// The migration is being taken down; the alarm has the reason.
    TakenDown,
    /// The rounds have failed, with the reason.
    Failed(Reason),
}

impl From<WindowClosed> for Ended {
    fn from(_: WindowClosed) -> Self {
        Self::TakenDown
    }
}

impl Ended {
    fn memory(error: impl std::fmt::Display) -> Self {
        Self::Failed(Reason::new(ErrorKind::Memory, error))
    }
}

fn log_failed(error: &DirtyLogError) -> Ended {
    Ended::memory(format_args!("the dirty log failed: {error}"))
}

/// Returns an empty bitmap for each block of `ram`.
pub(super) fn no_pages(ram: &GuestRam) -> Vec<PageBitmap> {
    ram.blocks().iter().map(|block| PageBitmap::new(block.pages())).collect()
}

/// How long the guest could have been stopped, but must not yet.
#[derive(Debug, Default)]
pub(super) struct Held {
    since: Option<Duration>,
    reported: bool,
}

impl Held {
    /// Returns whether the guest has been held for so long that it must be reported. Returns true once only.
    fn is_to_be_reported(&mut self, now: Duration, held: bool) -> bool {
        self.since = held.then(|| self.since.unwrap_or(now));
        let long = self.since.is_some_and(|since| now.saturating_sub(since) >= HELD_LONG);
        long && !std::mem::replace(&mut self.reported, true)
    }
}

/// The state of the round under way.
#[derive(Debug)]
pub(super) struct CurrentRound {
    /// By block, the pages that the log names while it is collected; otherwise clean.
    named: Vec<PageBitmap>,
    /// Number of pages that the log has named since the round before.
    logged: u64,
    /// Number of pages that are known to be dirty and not handed over.
    left: u64,
    /// When the round began.
    began: Duration,
    /// When the estimates are updated next; never while the guest is paused.
    next: Duration,
    /// When the log is collected next within the round; never while the guest is paused.
    next_collecting: Duration,
}

impl CurrentRound {
    pub(super) fn new(ram: &GuestRam) -> Self {
        let (began, next, next_collecting) = (Duration::ZERO, Duration::MAX, Duration::MAX);
        Self { named: no_pages(ram), logged: 0, left: 0, began, next, next_collecting }
    }

    fn begin_round(&mut self, now: Duration) {
        (self.began, self.next, self.next_collecting) = (now, now + ESTIMATE_INTERVAL, now + FIRST_COLLECTING);
    }

    /// Returns whether the guest is paused, so that this round is the last.
    fn is_last(&self) -> bool {
        self.next == Duration::MAX
    }

    /// Ends the updates of estimates: the guest is paused, and its log names nothing more.
    fn end(&mut self) {
        (self.next, self.next_collecting) = (Duration::MAX, Duration::MAX);
    }
}

/// The rounds of one migration.
pub(super) struct Rounds {
    pub(super) ram: GuestRam,
    pub(super) log: Box<dyn DirtyLog>,
    pub(super) search: PageSearch,
    pub(super) convergence: Convergence,
    pub(super) state_size: u64,
    pub(super) devices: Arc<SavingDevices>,
    pub(super) started: Instant,
    pub(super) orders: Receiver<Order>,
    pub(super) news: Box<dyn FnMut(RoundEvent) + Send>,
    pub(super) totals: Option<ControlSender>,
    pub(super) progressed: Progressed,
    /// By block: the pages that are dirty and were not handed over.
    pub(super) pending: Vec<PageBitmap>,
    pub(super) stats: Arc<Mutex<RoundStats>>,
    pub(super) unsent: Arc<Unsent>,
    pub(super) refusals: Arc<Refusals>,
    /// How many refused packets were reported.
    pub(super) refusals_noted: u32,
    pub(super) accelerator: Option<Accelerator>,
    /// By block: all pages that the log has ever named. Empty without an accelerator.
    pub(super) written: Vec<PageBitmap>,
    pub(super) current: CurrentRound,
    pub(super) may_stop: bool,
    pub(super) control: Controlled,
    /// How long the missing permission alone has kept the guest from being stopped.
    pub(super) held: Held,
    /// How often the guest was stopped and resumed.
    pub(super) retries: u32,
    /// How long, with the guest paused and all pages acknowledged, saving the state was waited for.
    pub(super) waited_for_saving: Duration,
    pub(super) abort: Arc<Abort>,
}

impl Rounds {
    /// Runs until the last round is acknowledged, or as long as the destination is connected. Returns the rounds, with their log on, where they have
    /// not come to an end of their own.
    pub(super) fn run(mut self) -> Option<Self> {
        let mut pending = std::mem::take(&mut self.pending);
        let outcome = self.rounds(&mut pending);
        self.pending = pending;
        if let Err(Ended::TakenDown) = outcome {
            return Some(self);
        }
        if let Err(Ended::Failed(reason)) = outcome {
            (self.news)(RoundEvent::Failed(reason));
        }
        self.end();
        None
    }

    /// Stops the log.
    pub(super) fn end(mut self) {
        if self.progressed == Progressed::NotTracking {
            return;
        }
        if let Err(error) = self.log.stop() {
            // What it costs is that the guest stays a little slower; it must not cost the migration.
            (self.news)(RoundEvent::Note(format!("the dirty log does not stop: {error}")));
        }
    }

    /// Lets go of the channels, whose connections are closed: everything that was handed over and not acknowledged is pending again.
    pub(super) fn hold(&mut self) {
        let Self { search, pending, orders, .. } = self;
        let mut add = |block: u16, run| pending[usize::from(block)].set(run);
        for channel in &search.pipeline().channels {
            channel.unconfirmed_pages(&mut add);
        }
        search.detach(add);
        let unheeded: Vec<Order> = orders.try_iter().collect();
        for order in unheeded {
            let _ = self.heed(order);
        }
        self.control.control.rounds_go_on();
    }

    /// Prepares to go on over new connections.
    pub(super) fn go_on_with(&mut self, connections: Connections) {
        let Connections { pipeline, orders, news, totals, may_stop, abort } = connections;
        let arrived = pipeline.window.delivered().1.carried.pages();
        self.search.attach(pipeline, arrived);
        (self.orders, self.news, self.totals, self.abort) = (orders, news, totals, abort);
        self.may_stop = may_stop;
        self.current.left = self.pending.iter().map(PageBitmap::count).sum();
        if self.progressed != Progressed::NotTracking {
            // The path may be another one, and the time without a connection does not count.
            let measure = self.measure(self.current.left);
            self.convergence.measure_anew(&measure);
            self.announce();
        }
    }

    fn rounds(&mut self, pending: &mut Vec<PageBitmap>) -> Result<(), Ended> {
        if self.progressed == Progressed::NotTracking {
            // Also where that fails, the log is stopped.
            self.progressed = Progressed::Tracking;
            self.log
                .start()
                .map_err(|error| Ended::memory(format_args!("the dirty log cannot be started: {error}")))?;
            self.stats.lock().expect("no thread panics with the lock held").to_deliver =
                self.ram.bytes() / PAGE_SIZE as u64;
        }
        // After an interruption, too: the log may have been collected just before.
        self.settle()?;
        if self.progressed == Progressed::Tracking {
            self.find_populated(pending)?;
            self.progressed = Progressed::Sending;
        }
        let mut has_pages = true;
        loop {
            // A pass without dirty pages only checks what has arrived, so it does not count as a round.
            let round = {
                let mut stats = self.stats.lock().expect("no thread panics with the lock held");
                stats.round += u64::from(has_pages);
                stats.round
            };
            self.current.begin_round(self.started.elapsed());
            self.send(pending)?;
            let (found, decision, pause) = loop {
                self.devices.look();
                let found = self.collect(pending)?;
                let (decision, pause) = self.decide(found);
                if decision != Decision::Wait {
                    break (found, decision, pause);
                }
                self.wait(pause)?;
            };
            has_pages = found > 0;
            let goes_on = matches!(decision, Decision::Next | Decision::Throttle(_));
            if goes_on && has_pages {
                self.settle()?;
            }
            match decision {
                Decision::Wait => unreachable!("waited for above"),
                Decision::Next if found == 0 => self.wait(pause)?,
                Decision::Next => self.go_on()?,
                Decision::Throttle(percent) => (self.news)(RoundEvent::Throttle(percent)),
                Decision::PostCopy => return self.post_copy(pending),
                Decision::GiveUp => {
                    let verdict = self.verdict().unwrap_or_default();
                    let text = format_args!("given up after {round} rounds: {verdict}");
                    return Err(Ended::Failed(Reason::new(ErrorKind::NotConverging, text)));
                }
                Decision::SwitchOver => {
                    (self.news)(RoundEvent::SwitchOver);
                    while self.order()? != Order::LastRound {}
                    let found = self.collect(pending)?;
                    // State that devices have saved ahead is of no use once they were stopped and go on.
                    let stays = self.retries == MAX_RETRIES || !self.devices.is_empty();
                    self.obey(found);
                    if self.stays_paused(stays || self.convergence.still_fits(&self.measure(found))) {
                        break;
                    }
                    self.retries += 1;
                    has_pages = found > 0;
                    // No input or output is under way: the guest has been stopped since the log was collected.
                    (self.news)(RoundEvent::RunOn);
                }
            }
        }
        (self.news)(RoundEvent::Stopped);
        self.current.end();
        self.send(pending)?;
        if self.collect_after_saving(pending)? > 0 {
            self.send(pending)?;
        }
        self.send_totals(pending)
    }

    /// Adds to `pending` the pages that the monitor and its devices have written in saving their state: rings, clocks, steal time. Returns
    /// how many pages are pending.
    fn collect_after_saving(&mut self, pending: &mut [PageBitmap]) -> Result<u64, Ended> {
        let waiting = Instant::now();
        match self.order()? {
            Order::Saved => {}
            order => unreachable!("{order:?} was not requested"),
        }
        self.devices.await_saved()?;
        let window = &self.pipeline().window;
        if window.in_flight() == 0 {
            let acknowledged = window.delivered().1.last.map_or(waiting, |last| last.max(waiting));
            self.waited_for_saving = acknowledged.elapsed();
        }
        let saved = Instant::now();
        let found = self.collect(pending)?;
        tracing::debug!(pages = found, elapsed = ?saved.elapsed(), "collected what saving has written");
        Ok(found)
    }

    /// Waits until everything is acknowledged, and reports it to the destination and to the driver.
    fn send_totals(&mut self, pending: &mut [PageBitmap]) -> Result<(), Ended> {
        let ram = loop {
            let ram = self.drain()?;
            self.note_refusals();
            // The guest is paused, and all that it wrote before is in the log.
            self.judge(self.doubts());
            if !self.resend_suspect(pending)? {
                break ram;
            }
            self.announce();
            self.search.flush()?;
        };
        let drained = Instant::now();
        let Sent { normal_pages, zero_pages, .. } = Sent::over(&self.pipeline().channels);
        let totals = ControlMessage::Totals(Totals { ram, normal_pages, zero_pages });
        if let Some(Err(error)) = self.totals.as_ref().map(|destination| destination.send(&totals)) {
            // The link reports the loss to the driver.
            tracing::info!(%error, "the totals could not be sent to the destination");
        }
        (self.news)(RoundEvent::Drained { at: drained, saving: self.waited_for_saving });
        Ok(())
    }

    fn drain(&self) -> Result<Vec<u64>, Ended> {
        Ok(self.pipeline().channels.iter().map(SendChannel::drained).collect::<Result<_, _>>()?)
    }

    /// Runs the rest of the migration as post-copy: the guest goes on at the destination before all of its RAM is there.
    fn post_copy(&mut self, pending: &mut Vec<PageBitmap>) -> Result<(), Ended> {
        self.drain()?;
        self.take_suspect_pages_into(pending);
        (self.news)(RoundEvent::PostCopy);
        while self.order()? != Order::LastRound {}
        // From here on the rounds do not go on after an interruption.
        let mut pending = std::mem::take(pending);
        self.collect(&mut pending)?;
        // This collecting may have shown that a device errs.
        self.take_suspect_pages_into(&mut pending);
        (self.news)(RoundEvent::Stopped);
        self.unsent.add(&self.ram, &mut pending);
        self.discard(&pending)?;
        let mut late = no_pages(&self.ram);
        self.collect_after_saving(&mut late)?;
        self.take_suspect_pages_into(&mut late);
        self.unsent.add_late(&self.ram, &mut late, &pending).map_err(Ended::memory)?;
        self.discard(&late)?;
        self.send_totals(&mut late)?;
        drop((pending, late));
        while self.order()? != Order::Stream {}
        Ok(self.unsent.stream(&mut self.search)?)
    }

    /// Has the destination discard what it has of `pages`.
    fn discard(&mut self, pages: &[PageBitmap]) -> Result<(), Ended> {
        let mut outcome = Ok(());
        for (number, pages) in pages.iter().enumerate() {
            pages.for_each_run(|run| {
                if outcome.is_ok() {
                    outcome = self.search.discard(number as u16, run);
                }
            });
        }
        outcome?;
        Ok(self.search.flush()?)
    }

    fn take_suspect_pages_into(&self, pending: &mut [PageBitmap]) {
        if let Some(accelerator) = &self.accelerator {
            accelerator.take_suspect_pages(|block, run| pending[usize::from(block)].set(run));
        }
    }

    fn pipeline(&self) -> &Arc<Pipeline> {
        self.search.pipeline()
    }

    /// Finds the pages of the first round: all that were ever populated.
    fn find_populated(&mut self, pending: &mut [PageBitmap]) -> Result<(), Ended> {
        let mut map = self.ram.page_map().map_err(Ended::memory)?;
        for (number, (block, pending)) in self.ram.blocks().iter().zip(pending).enumerate() {
            block.populated(&mut map, |run| pending.set(run)).map_err(Ended::memory)?;
            // From here on the log knows that memory which the guest releases was populated.
            self.log.found_populated(number, pending).map_err(|error| log_failed(&error))?;
        }
        Ok(())
    }

    /// Reports the packets that the destination has refused since the last call. The channels retransmit their pages.
    fn note_refusals(&mut self) {
        let (packets, pages) = (self.refusals.packets(), self.refusals.pages());
        if packets > self.refusals_noted {
            self.refusals_noted = packets;
            (self.news)(RoundEvent::Note(format!(
                "{pages} pages in {packets} packets did not arrive as they were read from the guest: they are retransmitted, read by the CPU \
                 and uncompressed"
            )));
        }
    }

    /// Hands to the channels all suspect pages that devices called zero. Returns whether there were any. Those that cannot be handed over are
    /// pending.
    fn resend_suspect(&mut self, pending: &mut [PageBitmap]) -> Result<bool, Ended> {
        let (search, mut outcome) = (&mut self.search, Ok(()));
        let send = |block: u16, run: Range<u64>| {
            if outcome.is_ok() {
                outcome = search.pages_by(SendMode::ByCpu, block, run.clone());
            }
            if outcome.is_err() {
                pending[usize::from(block)].set(run);
            }
        };
        let suspect = self.accelerator.as_ref().map_or(0, |accelerator| accelerator.take_suspect_pages(send));
        outcome?;
        if suspect > 0 {
            (self.news)(RoundEvent::Note(format!(
                "an accelerator has given wrong results: {suspect} pages that were called zero are read again by the CPU"
            )));
        }
        Ok(suspect > 0)
    }

    /// Hands all pending pages to the channels, and suspect pages. Afterwards only the pages are pending that the log has named
    /// meanwhile ([`Rounds::update_estimates`]), and the rest of the round where the rounds end early.
    fn send(&mut self, pending: &mut [PageBitmap]) -> Result<(), Ended> {
        self.note_refusals();
        self.resend_suspect(pending)?;
        self.current.left = pending.iter().map(PageBitmap::count).sum();
        self.announce();
        let mut handed_over = 0;
        if self.ends_early() {
            return Ok(self.search.flush()?);
        }
        for number in 0..pending.len() {
            let mut at = 0;
            while let Some(run) = pending[number].next_run(at, ESTIMATE_PAGES) {
                at = run.end;
                handed_over += run.end - run.start;
                self.current.left -= run.end - run.start;
                pending[number].clear(run.clone());
                if let Err(closed) = self.search.pages(number as u16, run.clone()) {
                    // Not all of the run was handed over.
                    pending[number].set(run);
                    return Err(closed.into());
                }
                if handed_over >= ESTIMATE_PAGES {
                    handed_over = 0;
                    self.update_estimates(pending)?;
                    if self.ends_early() {
                        return Ok(self.search.flush()?);
                    }
                }
            }
        }
        Ok(self.search.flush()?)
    }

    /// Updates the estimates, if they are due, and collects the log now and then. Pages that the log names and that this round has not
    /// handed over yet are sent in this round; the others stay pending for the next.
    fn update_estimates(&mut self, pending: &mut [PageBitmap]) -> Result<(), Ended> {
        let now = self.started.elapsed();
        if now < self.current.next {
            return Ok(());
        }
        self.current.next = now + ESTIMATE_INTERVAL;
        let collects = now >= self.current.next_collecting;
        if collects {
            self.collect(pending)?;
            self.settle()?;
            self.current.next_collecting = now + (now - self.current.began);
        }
        let measure = self.measure(self.current.left);
        let estimate = self.convergence.estimate(&measure);
        let mut stats = self.stats.lock().expect("no thread panics with the lock held");
        if collects {
            stats.dirty_rate = estimate.dirty;
        }
        stats.predicted = estimate.predicted.or(stats.predicted);
        stats.time_left = estimate.time_left;
        drop(stats);
        self.announce();
        Ok(())
    }

    /// Records how many pages must be delivered all together, as far as is known.
    fn announce(&self) {
        let to_deliver = self.search.handed_over() + self.current.left;
        self.stats.lock().expect("no thread panics with the lock held").to_deliver = to_deliver;
    }

    /// Adds to `pending` the pages that were written since the last collecting. Returns how many pages are pending.
    fn collect(&mut self, pending: &mut [PageBitmap]) -> Result<u64, Ended> {
        // Before the log: pages that the guest wrote between the device's test and the CPU's are in this log or an earlier one.
        let doubts = self.doubts();
        let mut found = 0;
        for (number, (pending, named)) in pending.iter_mut().zip(&mut self.current.named).enumerate() {
            self.log.collect(number, named).map_err(|error| log_failed(&error))?;
            self.current.logged += named.count();
            pending.merge_words(0, named.words());
            found += pending.count();
            if let Some(written) = self.written.get_mut(number) {
                written.merge_words(0, named.words());
            }
            named.clear(0..named.pages());
        }
        self.current.left = found;
        self.judge(doubts);
        Ok(found)
    }

    fn doubts(&self) -> Vec<Doubt> {
        self.accelerator.as_ref().map(Accelerator::take_doubts).unwrap_or_default()
    }

    /// Takes devices out of service that called pages zero which were not, and which the guest has not written since.
    fn judge(&self, doubts: Vec<Doubt>) {
        let Some(accelerator) = &self.accelerator else { return };
        for Doubt { block, page, producer } in doubts {
            if !self.written[usize::from(block)].contains(page) {
                accelerator.offload().report_wrong_result(
                    producer,
                    "it called a page zero that is not, and the guest has not written the page",
                );
            }
        }
    }

    /// Returns the measurements with `found` pages pending.
    fn measure(&self, found: u64) -> Measure {
        let pages = |count: u64| count * PAGE_SIZE as u64;
        let window = &self.pipeline().window;
        let arrived = |delivered: &Delivered| Arrived {
            at: delivered.last.map_or(Duration::ZERO, |last| last.saturating_duration_since(self.started)),
            pages: pages(delivered.carried.pages()),
            normal: pages(delivered.carried.normal_pages),
            wire: delivered.carried.bytes,
            packets: delivered.packets,
        };
        let (first, delivered) = window.delivered();
        let on_the_way = self.search.handed_over().saturating_sub(delivered.carried.pages());
        Measure {
            now: self.started.elapsed(),
            dirtied: pages(found),
            logged: pages(self.current.logged),
            first: arrived(&first),
            arrived: arrived(&delivered),
            remaining: pages(found + on_the_way),
            state: self.state_size.saturating_add(self.devices.remaining()),
            state_rate: self.devices.rate(),
            loading: self.devices.loading(),
            full: window.full(),
            round_trip: window.round_trip(),
        }
    }

    fn decide(&mut self, found: u64) -> (Decision, Duration) {
        while let Ok(order) = self.orders.try_recv() {
            self.heed(order);
        }
        self.obey(found);
        let measure = self.measure(found);
        let (verdict_before, may_stop) = (self.convergence.verdict().is_some(), self.may_stop);
        let in_vain_before = self.convergence.throttled_in_vain();
        let decision = self.convergence.after_round(&measure, may_stop);
        let decision = self.as_requested(decision, &measure);
        self.current.logged = 0;
        self.announce();
        let mut stats = self.stats.lock().expect("no thread panics with the lock held");
        let round = stats.round;
        stats.dirty_rate = self.convergence.rates().dirty;
        stats.predicted = self.convergence.predicted(&measure);
        stats.time_left = self.convergence.time_left(&measure);
        stats.verdict = self.verdict();
        drop(stats);
        if let (false, Some(verdict)) = (verdict_before, self.verdict()) {
            let consequence = self.convergence.consequence();
            (self.news)(RoundEvent::Note(format!(
                "the migration does not converge ({round} rounds so far): {verdict}; {consequence}"
            )));
        }
        if !in_vain_before && self.convergence.throttled_in_vain() {
            let (percent, consequence) = (self.convergence.throttled(), self.convergence.consequence());
            (self.news)(RoundEvent::Note(format!(
                "the guest is held for {percent} % of the time, which is as much as it may be, and the migration still does not converge: \
                 {consequence}"
            )));
        }
        let held = !may_stop && self.convergence.fits(&measure);
        if self.held.is_to_be_reported(measure.now, held)
            && let Some(devices) = self.devices.waiting_for()
        {
            (self.news)(RoundEvent::Note(format!("the guest could be stopped; waiting for {devices}")));
        }
        if decision == Decision::SwitchOver {
            self.stats.lock().expect("no thread panics with the lock held").out_of_reach =
                self.convergence.out_of_reach(&measure);
        }
        (decision, self.convergence.pause(&measure))
    }

    /// Describes why the rounds do not converge, and which devices the source waits for.
    fn verdict(&self) -> Option<String> {
        let verdict = self.convergence.verdict()?;
        Some(match self.devices.waiting_for() {
            Some(devices) => format!("{verdict}; waiting for {devices}"),
            None => verdict.to_owned(),
        })
    }

    /// Waits until the input and output under way has written guest RAM. Afterwards the pages that the log has named may be read.
    fn settle(&mut self) -> Result<(), Ended> {
        (self.news)(RoundEvent::Settle);
        match self.order()? {
            Order::Settled => Ok(()),
            order => unreachable!("{order:?} was not requested"),
        }
    }

    /// Waits for the next order that this thread has requested. Fails when the driver is gone.
    fn order(&mut self) -> Result<Order, Ended> {
        loop {
            let order = self.orders.recv().map_err(|_| Ended::TakenDown)?;
            if let Some(order) = self.heed(order) {
                return Ok(order);
            }
        }
    }

    /// Obeys an order that was not requested, and returns any other.
    fn heed(&mut self, order: Order) -> Option<Order> {
        match order {
            Order::MayStop => self.may_stop = true,
            Order::NotThrottled => self.convergence.throttling_failed(),
            order => return Some(order),
        }
        None
    }

    fn go_on(&self) -> Result<(), Ended> {
        if self.abort.is_over() { Err(Ended::TakenDown) } else { Ok(()) }
    }

    /// Waits for an order, for `pause` at most.
    fn wait(&mut self, pause: Duration) -> Result<(), Ended> {
        self.go_on()?;
        match self.orders.recv_timeout(pause) {
            Ok(order) => drop(self.heed(order)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Ended::TakenDown),
        }
        Ok(())
    }
}
