//! The rounds over the dirty pages, on a thread of their own: which pages go, and when the guest may be stopped.
//!
//! The order is what makes it right. Tracking is on before holes are searched, so that what is written meanwhile is sent
//! all the same; the log is collected, and so cleared, before the pages that it names are read; in between the monitor waits until
//! what was under way has written guest RAM ([`SourceVmm::settle_io`](crate::vmm::SourceVmm::settle_io)); the last collecting comes
//! after the guest has stopped.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::holes::PageMap;
use sterna_memory::ram::GuestRam;
use sterna_wire::control::{ControlMessage, Totals};

use super::convergence::{Arrived, Convergence, Decision, Measure};
use super::unsent::Unsent;
use crate::abort::Abort;
use crate::accelerator::{Accelerator, Doubt};
use crate::control_link::ControlSender;
use crate::device_state::SavingDevices;
use crate::entry::{PageSearch, Pipeline, REGION};
use crate::report::Progress;
use crate::send::{SendAgain, SendChannel, Sent, Way};
use crate::window::{Delivered, WindowClosed};

/// How often the guest is let run on because it dirtied more, until it stood, than was to be expected. After that it stays
/// stopped: being stopped again and again is worse than once for longer.
const MAX_TRIES: u32 = 3;
/// After this long it is told what alone keeps the guest from being stopped.
const HELD_LONG: Duration = Duration::from_secs(1);
/// Within a round the figures are made anew this often, and whenever a few more pages were handed over.
const GLANCE: Duration = Duration::from_millis(100);
/// Pages that are handed over between two looks at the clock.
const BETWEEN_GLANCES: u64 = REGION / PAGE_SIZE as u64;
/// Within a round the log is collected for the first time after this long, then after twice as long, and so on: each time costs the guest
/// a fault for each page that it goes on writing, and so a long round costs it a few faults a page, not many.
const FIRST_COLLECTING: Duration = Duration::from_millis(250);

/// What the driver tells this thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The destination permits the switchover.
    MayStop,
    /// The monitor does not slow its guest down, or not any more.
    NotThrottled,
    /// What was under way when it was asked for has written guest RAM.
    Settled,
    /// The guest has stopped: send the rest, or in post-copy say what it is.
    LastRound,
    /// In post-copy: the guest belongs to the destination, send the rest after it.
    Stream,
}

/// What this thread tells the driver.
#[derive(Debug)]
pub(super) enum RoundNews {
    /// The log was collected: let what is under way write guest RAM before the pages are read.
    Settle,
    /// The rest fits the downtime: stop the guest and order the last round.
    SwitchOver,
    /// The guest, stopped for the last round, had dirtied so much until then that it would stand far too long: let it run on.
    RunOn,
    /// The guest stays stopped: its state may be sent.
    Stopped,
    /// Slow the guest down so much, in percent.
    Throttle(u8),
    /// The rounds do not converge, and all that they sent is acknowledged: let the destination watch for missing pages, then
    /// stop the guest.
    PostCopy,
    /// It is not possible or not worth while to go on, and why.
    Failed(String),
    /// A line for people.
    Note(String),
    /// All of RAM, or in post-copy what is to be given up of it, has been acknowledged, since then; the destination was told.
    Drained(Instant),
}

/// The rounds' state, as others may look at it.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) round: u64,
    /// How many pages will have been delivered once all are that are known to be dirty.
    pub(super) to_deliver: u64,
    pub(super) dirty_rate: f64,
    pub(super) predicted: Option<Duration>,
    pub(super) verdict: Option<String>,
    /// Why the guest stands for longer than was wanted, if it does.
    pub(super) out_of_reach: Option<String>,
}

impl Told {
    /// `delivered`: pages so far.
    pub(super) fn fill(&self, progress: &mut Progress, delivered: u64) {
        progress.round = self.round;
        progress.remaining_bytes = self.to_deliver.saturating_sub(delivered) * PAGE_SIZE as u64;
        progress.dirty_rate = self.dirty_rate;
        progress.predicted_downtime_ms = self.predicted.map_or(0.0, |time| time.as_secs_f64() * 1e3);
    }
}

/// Why the rounds ended before their end.
enum Ended {
    /// The migration is being taken down; somebody else has said why.
    TakenDown,
    /// This is why.
    Failed(String),
}

impl From<WindowClosed> for Ended {
    fn from(_: WindowClosed) -> Self {
        Self::TakenDown
    }
}

impl Ended {
    fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

fn log_failed(error: &DirtyLogError) -> Ended {
    Ended::Failed(format!("the dirty log failed: {error}"))
}

/// None of the pages of `ram`, by block.
pub(super) fn no_pages(ram: &GuestRam) -> Vec<PageBitmap> {
    ram.blocks().iter().map(|block| PageBitmap::new(block.pages())).collect()
}

/// That the guest could be stopped, but must not yet.
#[derive(Debug, Default)]
pub(super) struct Held {
    since: Option<Duration>,
    told: bool,
}

impl Held {
    /// Whether that has gone on for so long that it is to be told. Once is enough.
    fn is_to_be_told(&mut self, now: Duration, held: bool) -> bool {
        self.since = held.then(|| self.since.unwrap_or(now));
        let long = self.since.is_some_and(|since| now.saturating_sub(since) >= HELD_LONG);
        long && !std::mem::replace(&mut self.told, true)
    }
}

/// What is known within a round.
#[derive(Debug)]
pub(super) struct Looks {
    /// By block, clean but while the log is collected: the pages that it names.
    named: Vec<PageBitmap>,
    /// Pages that the log has named since the round before.
    logged: u64,
    /// Pages that are known to be dirty and not handed over.
    left: u64,
    /// When the round began.
    began: Duration,
    /// When the figures are made anew, and when the log is collected too; never while the guest is paused.
    next: Duration,
    next_collecting: Duration,
}

impl Looks {
    pub(super) fn new(ram: &GuestRam) -> Self {
        let (began, next, next_collecting) = (Duration::ZERO, Duration::MAX, Duration::MAX);
        Self { named: no_pages(ram), logged: 0, left: 0, began, next, next_collecting }
    }

    fn begin_round(&mut self, now: Duration) {
        (self.began, self.next, self.next_collecting) = (now, now + GLANCE, now + FIRST_COLLECTING);
    }

    /// The guest is paused: its log names nothing more, and nobody waits for figures.
    fn end(&mut self) {
        (self.next, self.next_collecting) = (Duration::MAX, Duration::MAX);
    }
}

/// The rounds of one migration.
pub(super) struct Rounds<N> {
    pub(super) ram: GuestRam,
    pub(super) log: Box<dyn DirtyLog>,
    pub(super) search: PageSearch,
    pub(super) convergence: Convergence,
    pub(super) state_size: u64,
    pub(super) devices: Arc<SavingDevices>,
    pub(super) started: Instant,
    pub(super) orders: Receiver<Order>,
    pub(super) news: N,
    /// Where the totals are said. Not by the driver, which is busy with the state then: the destination reads none of it
    /// before it has them.
    pub(super) totals: Option<ControlSender>,
    pub(super) told: Arc<Mutex<Told>>,
    pub(super) unsent: Arc<Unsent>,
    pub(super) again: Arc<SendAgain>,
    pub(super) accelerator: Option<Accelerator>,
    /// Where there is an accelerator, by block: all pages that the log has ever named.
    pub(super) written: Vec<PageBitmap>,
    pub(super) looks: Looks,
    pub(super) may_stop: bool,
    /// How long that has been all that kept the guest from being stopped.
    pub(super) held: Held,
    /// How often the guest was stopped and let run on.
    pub(super) tried: u32,
    pub(super) abort: Arc<Abort>,
}

impl<N: FnMut(RoundNews)> Rounds<N> {
    /// Runs until the last round is acknowledged or the migration is taken down. The log is stopped in any case.
    pub(super) fn run(mut self) {
        let outcome = self.rounds();
        if let Err(Ended::Failed(reason)) = outcome {
            (self.news)(RoundNews::Failed(reason));
        }
        if let Err(error) = self.log.stop() {
            // What it costs is that the guest stays a little slower; it must not cost the migration.
            (self.news)(RoundNews::Note(format!("the dirty log does not stop: {error}")));
        }
    }

    fn rounds(&mut self) -> Result<(), Ended> {
        let mut pending = no_pages(&self.ram);
        self.log.start().map_err(|error| Ended::Failed(format!("the dirty log cannot be started: {error}")))?;
        self.told.lock().expect("nobody panics with it").to_deliver = self.ram.bytes() / PAGE_SIZE as u64;
        self.settle()?;
        self.find_populated(&mut pending)?;
        let (mut round, mut has_pages) = (0, true);
        loop {
            // Where nothing was written there is nothing to send: that is only a look at what has arrived.
            round += u64::from(has_pages);
            self.told.lock().expect("nobody panics with it").round = round;
            self.looks.begin_round(self.started.elapsed());
            self.send(&mut pending)?;
            let (found, decision, pause) = loop {
                self.devices.look();
                let found = self.collect(&mut pending)?;
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
                Decision::Throttle(percent) => (self.news)(RoundNews::Throttle(percent)),
                Decision::PostCopy => return self.post_copy(pending),
                Decision::GiveUp => {
                    let verdict = self.verdict().unwrap_or_default();
                    return Err(Ended::Failed(format!("given up after {round} rounds: {verdict}")));
                }
                Decision::SwitchOver => {
                    (self.news)(RoundNews::SwitchOver);
                    while self.order()? != Order::LastRound {}
                    let found = self.collect(&mut pending)?;
                    // What devices have saved ahead is of no use once they were stopped and go on.
                    let stays = self.tried == MAX_TRIES || !self.devices.is_empty();
                    if stays || self.convergence.still_fits(&self.measure(found)) {
                        break;
                    }
                    self.tried += 1;
                    has_pages = found > 0;
                    // Nothing is under way: the guest has been stopped since the log was collected.
                    (self.news)(RoundNews::RunOn);
                }
            }
        }
        (self.news)(RoundNews::Stopped);
        self.looks.end();
        self.send(&mut pending)?;
        self.say_totals()
    }

    /// Waits until everything is acknowledged, and says so at both sides.
    fn say_totals(&mut self) -> Result<(), Ended> {
        let ram = loop {
            let ram = self.drain()?;
            // The guest stands, and all that it wrote before is in the log.
            self.judge(self.doubts());
            if !self.send_again()? {
                break ram;
            }
            self.announce();
            self.search.flush()?;
        };
        let drained = Instant::now();
        let Sent { normal_pages, zero_pages, .. } = Sent::over(&self.pipeline().channels);
        let totals = ControlMessage::Totals(Totals { ram, normal_pages, zero_pages });
        if let Some(Err(error)) = self.totals.as_ref().map(|destination| destination.send(&totals)) {
            // The driver hears of the loss.
            tracing::info!(%error, "the destination did not take the totals");
        }
        (self.news)(RoundNews::Drained(drained));
        Ok(())
    }

    fn drain(&self) -> Result<Vec<u64>, Ended> {
        Ok(self.pipeline().channels.iter().map(SendChannel::drained).collect::<Result<_, _>>()?)
    }

    /// The guest goes on at the destination before all of its RAM is there.
    fn post_copy(&mut self, mut pending: Vec<PageBitmap>) -> Result<(), Ended> {
        self.drain()?;
        // What did not arrive as it was read goes with the rest of memory, after the guest.
        self.again.take(|block, run| pending[usize::from(block)].set(run));
        self.take_disbelieved_into(&mut pending);
        (self.news)(RoundNews::PostCopy);
        while self.order()? != Order::LastRound {}
        self.collect(&mut pending)?;
        // What this collecting has shown about a device.
        self.take_disbelieved_into(&mut pending);
        (self.news)(RoundNews::Stopped);
        self.unsent.add(&self.ram, &pending);
        drop(pending);
        let mut outcome = Ok(());
        let (unsent, search) = (&self.unsent, &mut self.search);
        unsent.for_each_run(|block, run| {
            if outcome.is_ok() {
                outcome = search.discard(block, run);
            }
        });
        outcome?;
        self.search.flush()?;
        self.say_totals()?;
        while self.order()? != Order::Stream {}
        Ok(self.unsent.stream(&mut self.search)?)
    }

    fn take_disbelieved_into(&self, pending: &mut [PageBitmap]) {
        if let Some(accelerator) = &self.accelerator {
            accelerator.take_disbelieved(|block, run| pending[usize::from(block)].set(run));
        }
    }

    fn pipeline(&self) -> &Arc<Pipeline> {
        self.search.pipeline()
    }

    /// The first round: everything that was ever populated.
    fn find_populated(&mut self, pending: &mut [PageBitmap]) -> Result<(), Ended> {
        let mut map = PageMap::own().map_err(Ended::failed)?;
        for (number, (block, pending)) in self.ram.blocks().iter().zip(pending).enumerate() {
            block.populated(&mut map, |run| pending.set(run)).map_err(Ended::failed)?;
            // What is given back from here on is known to have been there.
            self.log.found_populated(number, pending).map_err(|error| log_failed(&error))?;
        }
        Ok(())
    }

    /// Hands the pages to the channels that were refused, and those that a device called zero which is not believed any more; whether
    /// there were any.
    fn send_again(&mut self) -> Result<bool, Ended> {
        let (search, mut outcome) = (&mut self.search, Ok(()));
        let mut send = |way, block, run| {
            if outcome.is_ok() {
                outcome = search.pages_by(way, block, run);
            }
        };
        let refused = self.again.take(|block, run| send(Way::Plain, block, run));
        let accelerator = self.accelerator.as_ref();
        let disbelieved = accelerator.map_or(0, |it| it.take_disbelieved(|block, run| send(Way::ByCpu, block, run)));
        outcome?;
        if refused > 0 {
            let packets = self.again.packets();
            (self.news)(RoundNews::Note(format!(
                "{refused} pages did not arrive as they were read from the guest ({packets} packets so far): they are sent again, \
                 read by the CPU and uncompressed"
            )));
        }
        if disbelieved > 0 {
            (self.news)(RoundNews::Note(format!(
                "an accelerator has given wrong results: {disbelieved} pages that were called zero are read again by the CPU"
            )));
        }
        Ok(refused + disbelieved > 0)
    }

    /// Hands all pending pages to the channels, and those that were refused. Afterwards only those are pending that the log has named
    /// meanwhile ([`Rounds::glance`]).
    fn send(&mut self, pending: &mut [PageBitmap]) -> Result<(), Ended> {
        self.send_again()?;
        self.looks.left = pending.iter().map(PageBitmap::count).sum();
        self.announce();
        let mut handed_over = 0;
        for number in 0..pending.len() {
            let mut at = 0;
            while let Some(run) = pending[number].next_run(at, BETWEEN_GLANCES) {
                at = run.end;
                handed_over += run.end - run.start;
                self.looks.left -= run.end - run.start;
                pending[number].clear(run.clone());
                self.search.pages(number as u16, run)?;
                if handed_over >= BETWEEN_GLANCES {
                    handed_over = 0;
                    self.glance(pending)?;
                }
            }
        }
        Ok(self.search.flush()?)
    }

    /// Within a round, now and then: makes the figures anew. What the guest has written of pages whose turn is still to come goes with
    /// them; what it has written of others is pending for the next round.
    fn glance(&mut self, pending: &mut [PageBitmap]) -> Result<(), Ended> {
        let now = self.started.elapsed();
        if now < self.looks.next {
            return Ok(());
        }
        self.looks.next = now + GLANCE;
        let collects = now >= self.looks.next_collecting;
        if collects {
            self.collect(pending)?;
            self.settle()?;
            self.looks.next_collecting = now + (now - self.looks.began);
        }
        let measure = self.measure(self.looks.left);
        let (dirty, predicted) = self.convergence.glance(&measure);
        let mut told = self.told.lock().expect("nobody panics with it");
        if collects {
            told.dirty_rate = dirty;
        }
        told.predicted = predicted.or(told.predicted);
        drop(told);
        self.announce();
        Ok(())
    }

    /// Says how many pages are known that will have to be delivered, all together.
    fn announce(&self) {
        let to_deliver = self.search.handed_over() + self.looks.left;
        self.told.lock().expect("nobody panics with it").to_deliver = to_deliver;
    }

    /// Adds to `pending` what was written since the log was collected last; gives how many pages are pending.
    fn collect(&mut self, pending: &mut [PageBitmap]) -> Result<u64, Ended> {
        // Before the log: what the guest wrote between a device's look and the CPU's is in it, or was in an earlier one.
        let doubts = self.doubts();
        let mut found = 0;
        for (number, (pending, named)) in pending.iter_mut().zip(&mut self.looks.named).enumerate() {
            self.log.collect(number, named).map_err(|error| log_failed(&error))?;
            self.looks.logged += named.count();
            pending.merge_words(0, named.words());
            found += pending.count();
            if let Some(written) = self.written.get_mut(number) {
                written.merge_words(0, named.words());
            }
            named.clear(0..named.pages());
        }
        self.looks.left = found;
        self.judge(doubts);
        Ok(found)
    }

    fn doubts(&self) -> Vec<Doubt> {
        self.accelerator.as_ref().map(Accelerator::take_doubts).unwrap_or_default()
    }

    /// Takes out the devices that called pages zero which were not, and which the guest has not written since.
    fn judge(&self, doubts: Vec<Doubt>) {
        let Some(accelerator) = &self.accelerator else { return };
        for Doubt { block, page, maker } in doubts {
            if !self.written[usize::from(block)].contains(page) {
                accelerator.offload().distrust(maker, "it called a page zero that is not, and nobody has written it");
            }
        }
    }

    /// The state of things with `found` pages pending.
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
            logged: pages(self.looks.logged),
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
        let measure = self.measure(found);
        let (verdict_before, may_stop) = (self.convergence.verdict().is_some(), self.may_stop);
        let in_vain_before = self.convergence.throttled_in_vain();
        let decision = self.convergence.after_round(&measure, may_stop);
        self.looks.logged = 0;
        self.announce();
        let mut told = self.told.lock().expect("nobody panics with it");
        let round = told.round;
        told.dirty_rate = self.convergence.rates().dirty;
        told.predicted = self.convergence.predicted(&measure);
        told.verdict = self.verdict();
        drop(told);
        if let (false, Some(verdict)) = (verdict_before, self.verdict()) {
            let consequence = self.convergence.consequence();
            (self.news)(RoundNews::Note(format!(
                "the migration does not converge ({round} rounds so far): {verdict}; {consequence}"
            )));
        }
        if !in_vain_before && self.convergence.throttled_in_vain() {
            let (percent, consequence) = (self.convergence.throttled(), self.convergence.consequence());
            (self.news)(RoundNews::Note(format!(
                "the guest is held for {percent} % of the time, which is as much as it may be, and the migration still does not converge: \
                 {consequence}"
            )));
        }
        let held = !may_stop && self.convergence.fits(&measure);
        if self.held.is_to_be_told(measure.now, held)
            && let Some(devices) = self.devices.waiting_for()
        {
            (self.news)(RoundNews::Note(format!("the guest could be stopped; waiting for {devices}")));
        }
        if decision == Decision::SwitchOver {
            self.told.lock().expect("nobody panics with it").out_of_reach = self.convergence.out_of_reach(&measure);
        }
        (decision, self.convergence.pause(&measure))
    }

    /// Why the rounds do not converge, and which devices are waited for, in words.
    fn verdict(&self) -> Option<String> {
        let verdict = self.convergence.verdict()?;
        Some(match self.devices.waiting_for() {
            Some(devices) => format!("{verdict}; waiting for {devices}"),
            None => verdict.to_owned(),
        })
    }

    /// Waits until what was under way has written guest RAM. Afterwards the pages that the log has named may be read.
    fn settle(&mut self) -> Result<(), Ended> {
        (self.news)(RoundNews::Settle);
        match self.order()? {
            Order::Settled => Ok(()),
            order => unreachable!("{order:?} was not asked for"),
        }
    }

    /// The next order that was asked for; the driver is gone when there is none.
    fn order(&mut self) -> Result<Order, Ended> {
        loop {
            let order = self.orders.recv().map_err(|_| Ended::TakenDown)?;
            if let Some(order) = self.heed(order) {
                return Ok(order);
            }
        }
    }

    /// Obeys an order that comes unasked, and returns any other.
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

    /// Waits for an order, or for so long.
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
