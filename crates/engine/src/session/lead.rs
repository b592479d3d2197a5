//! What leads a source through its migration, beside a QEMU or embedded: the switchover's state machine, its driver's events,
//! and the times after which something is given up.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use sterna_wire::switchover::{SourceAction, SourceEnd, SourceEvent, SourceSwitchover, SwitchoverMessage};
use sterna_wire::text::cleaned;

use super::{LAST_WORDS, Peer};
use crate::abort::Abort;
use crate::report::{Moments, Observer};

/// How often a driver is given the word to tell progress.
const TICK: Duration = Duration::from_millis(250);

/// The longest time that is waited for: a setting may be so long that it means for ever.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// The moment after `time`, which may be of any length.
pub fn after(time: Duration) -> Instant {
    Instant::now() + time.min(LONGEST)
}

/// How a source's migration ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceOutcome {
    /// The machine came to its end.
    Machine(SourceEnd),
    /// What was decided could not be delivered in time.
    Undelivered,
}

/// What every driver of a source has.
#[derive(Debug)]
pub struct SourceLead {
    /// The switchover.
    pub switchover: SourceSwitchover,
    /// The destination.
    pub peer: Peer,
    /// The alarm of the data channels that there are now.
    pub abort: Arc<Abort>,
    /// What has come when.
    pub moments: Moments,
    /// Somebody has cancelled it.
    pub cancelled: bool,
    /// Until when what is decided may be delivered.
    pub give_up: Option<Instant>,
    /// When the step at hand must be done, and which it is.
    pub due: Option<(Instant, &'static str)>,
    /// Why the decision cannot be delivered, where the destination said so.
    pub undelivered: Option<String>,
    /// Until when a word about a broken channel is waited for.
    broken: Option<Instant>,
    /// How long a destination that was lost before anything was decided is tried to be told that it was given up.
    telling: Duration,
}

/// The driver of a source.
pub trait SourceDriver {
    /// What wakes it.
    type Event;

    /// What it has in common with others.
    fn lead(&mut self) -> &mut SourceLead;

    /// Performs an action; gives what the machine must be told at once. Never asked for the end.
    fn perform(&mut self, action: SourceAction) -> Option<SourceEvent>;

    /// What an event means to the machine, after what it means to the driver was done.
    fn translate(&mut self, event: Self::Event) -> Option<SourceEvent>;

    /// The machine has come to this end; none if the driver has still to go on. Then it says later by [`SourceDriver::late_end`]
    /// that it has not any more.
    fn ended(&mut self, end: SourceEnd) -> Option<SourceEnd> {
        Some(end)
    }

    /// The end, where it had to go on beyond that of the machine.
    fn late_end(&mut self) -> Option<SourceEnd> {
        None
    }

    /// Tells progress.
    fn tick(&mut self);

    /// What the step at hand waits for, where more is known than its name.
    fn waiting_for(&self) -> Option<String> {
        None
    }
}

impl SourceLead {
    /// At the beginning of the migration: also what is to be done first.
    pub fn begin(peer: Peer, abort: Arc<Abort>, telling: Duration) -> (Self, Vec<SourceAction>) {
        let (switchover, first) = SourceSwitchover::begin();
        let lead = Self {
            switchover,
            peer,
            abort,
            moments: Moments::default(),
            cancelled: false,
            give_up: None,
            due: None,
            undelivered: None,
            broken: None,
            telling,
        };
        (lead, first)
    }

    /// What the data channels' having failed means.
    pub fn channels_broke(&mut self) -> Option<SourceEvent> {
        if self.abort.was_lost() {
            self.broken = Some(Instant::now() + LAST_WORDS);
            return None;
        }
        Some(SourceEvent::Failed { reason: self.abort.reason()? })
    }

    /// Whether a word about a broken channel is waited for.
    pub fn awaits_last_words(&self) -> bool {
        self.broken.is_some()
    }

    /// The destination says something of the switchover.
    pub fn destination_says(&mut self, message: SwitchoverMessage) -> SourceEvent {
        match message {
            SwitchoverMessage::Prepared => self.moments.prepared = Some(Instant::now()),
            SwitchoverMessage::Running => self.moments.running = Some(Instant::now()),
            _ => {}
        }
        SourceEvent::Message(message)
    }

    /// The destination says that it has failed.
    pub fn destination_failed(&mut self, reason: &str, observer: &dyn Observer) -> Option<SourceEvent> {
        let reason = format!("the destination failed: {}", cleaned(reason));
        if !self.switchover.decided() {
            return Some(SourceEvent::Failed { reason });
        }
        observer.note(&reason);
        self.undelivered = Some(reason);
        self.give_up = Some(Instant::now());
        None
    }

    /// Whether nobody needs to wait any more for what is to be delivered.
    fn gives_up(&mut self) -> bool {
        if self.switchover.may_stop() && !self.switchover.decided() {
            self.give_up.get_or_insert(after(self.telling));
        }
        self.give_up.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// Why a step has failed that was not done in time.
pub(crate) fn too_long(step: &str, waiting_for: Option<String>) -> String {
    match waiting_for {
        Some(what) => format!("{step} took too long; waiting for {what}"),
        None => format!("{step} took too long"),
    }
}

/// A step that took too long, or a broken channel about which no word has come.
fn overdue<D: SourceDriver>(driver: &mut D) -> Option<SourceEvent> {
    let passed = |deadline: Instant| Instant::now() >= deadline;
    let late = driver.lead().due.take_if(|(deadline, _)| passed(*deadline));
    if late.is_none() {
        driver.lead().broken.take_if(|deadline| passed(*deadline))?;
    }
    // What has ended it already says more than that it took long.
    let reason = driver.lead().abort.reason();
    let step = |(_, step)| too_long(step, driver.waiting_for());
    Some(SourceEvent::Failed { reason: reason.or_else(|| late.map(step)).unwrap_or_default() })
}

/// Leads the source from its first actions to its end.
pub fn lead_source<D: SourceDriver>(
    driver: &mut D,
    events: &Receiver<D::Event>,
    first: Vec<SourceAction>,
) -> SourceOutcome {
    let mut next_tick = Instant::now() + TICK;
    let mut actions = first;
    loop {
        let mut answers = Vec::new();
        for action in std::mem::take(&mut actions) {
            match action {
                SourceAction::Done(end) => {
                    if let Some(end) = driver.ended(end) {
                        return SourceOutcome::Machine(end);
                    }
                }
                action => answers.extend(driver.perform(action)),
            }
        }
        actions.extend(answers.into_iter().flat_map(|answer| driver.lead().switchover.on(answer)));
        if !actions.is_empty() {
            continue;
        }
        if let Some(end) = driver.late_end() {
            return SourceOutcome::Machine(end);
        }
        if driver.lead().gives_up() {
            return SourceOutcome::Undelivered;
        }
        if let Some(event) = overdue(driver) {
            actions = driver.lead().switchover.on(event);
            continue;
        }
        let wake = driver.lead().broken.map_or(next_tick, |deadline| deadline.min(next_tick));
        match events.recv_timeout(wake.saturating_duration_since(Instant::now())) {
            Ok(event) => {
                if let Some(event) = driver.translate(event) {
                    actions = driver.lead().switchover.on(event);
                }
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() < next_tick => {}
            Err(RecvTimeoutError::Timeout) => {
                next_tick = Instant::now() + TICK;
                driver.tick();
            }
            Err(RecvTimeoutError::Disconnected) => unreachable!("the driver itself holds a sender"),
        }
    }
}
