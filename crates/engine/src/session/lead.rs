//! The main loop of a source's driver, beside a QEMU or embedded: it feeds events to the switchover's state machine, has the driver
//! perform the actions, and watches the deadlines.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use sterna_wire::switchover::{SourceAction, SourceEnd, SourceEvent, SourceSwitchover, SwitchoverMessage};
use sterna_wire::text::cleaned;

use super::{LAST_WORDS, Peer};
use crate::abort::Abort;
use crate::report::{Moments, Observer};

/// How often a driver reports progress.
const TICK: Duration = Duration::from_millis(250);

/// The longest wait. A setting may be longer, and then means for ever; an [`Instant`] cannot hold every duration.
const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Returns the moment `time` from now, at most a year ahead: `time` may be of any length.
pub fn after(time: Duration) -> Instant {
    Instant::now() + time.min(MAX_WAIT)
}

/// How a source's migration ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceOutcome {
    /// The state machine reached this end.
    Machine(SourceEnd),
    /// The decision could not be delivered to the destination in time.
    Undelivered,
}

/// The state that every driver of a source has.
#[derive(Debug)]
pub struct SourceLead {
    /// The switchover.
    pub switchover: SourceSwitchover,
    /// The destination.
    pub peer: Peer,
    /// The alarm of the current data channels.
    pub abort: Arc<Abort>,
    /// When each step of the switchover happened.
    pub moments: Moments,
    /// Whether the migration was cancelled.
    pub cancelled: bool,
    /// Deadline for delivering the decision to the destination.
    pub give_up: Option<Instant>,
    /// Deadline of the current step, and the step's name.
    pub due: Option<(Instant, &'static str)>,
    /// Why the decision cannot be delivered, where the destination sent a reason.
    pub undelivered: Option<String>,
    /// Deadline for the peer's message about a broken channel.
    broken: Option<Instant>,
    /// How long the source tries to reach a destination that was lost before the decision, to send it that the migration was given up.
    telling: Duration,
}

/// The driver of a source.
pub trait SourceDriver {
    /// What wakes the driver.
    type Event;

    /// Returns the state that all drivers have.
    fn lead(&mut self) -> &mut SourceLead;

    /// Performs an action and returns the event that follows from it at once, if any. Never called with [`SourceAction::Done`].
    fn perform(&mut self, action: SourceAction) -> Option<SourceEvent>;

    /// Handles an event and returns what it means to the state machine, if anything.
    fn translate(&mut self, event: Self::Event) -> Option<SourceEvent>;

    /// Called when the state machine has reached `end`. Returns none if the driver still has work: then the driver ends when
    /// [`SourceDriver::late_end`] returns an end.
    fn ended(&mut self, end: SourceEnd) -> Option<SourceEnd> {
        Some(end)
    }

    /// Returns the end once a driver has finished that went on beyond the end of the state machine.
    fn late_end(&mut self) -> Option<SourceEnd> {
        None
    }

    /// Reports progress.
    fn tick(&mut self);

    /// Returns what the current step waits for, where more is known than the step's name.
    fn waiting_for(&self) -> Option<String> {
        None
    }
}

impl SourceLead {
    /// Begins a migration. Returns its state and the first actions.
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

    /// Handles the failure of the data channels. Where only a connection broke, first waits [`LAST_WORDS`] for the peer's reason.
    pub fn channels_broke(&mut self) -> Option<SourceEvent> {
        if self.abort.was_lost() {
            self.broken = Some(Instant::now() + LAST_WORDS);
            return None;
        }
        Some(SourceEvent::Failed { reason: self.abort.reason()? })
    }

    /// Returns whether the driver waits for the peer's reason for a broken channel.
    pub fn awaits_last_words(&self) -> bool {
        self.broken.is_some()
    }

    /// Handles a message of the switchover from the destination.
    pub fn destination_says(&mut self, message: SwitchoverMessage) -> SourceEvent {
        match message {
            SwitchoverMessage::Prepared => self.moments.prepared = Some(Instant::now()),
            SwitchoverMessage::Running => self.moments.running = Some(Instant::now()),
            _ => {}
        }
        SourceEvent::Message(message)
    }

    /// Handles the destination's message that it has failed.
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

    /// Returns whether the time for delivering the decision, or the abort, is over.
    fn gives_up(&mut self) -> bool {
        if self.switchover.may_stop() && !self.switchover.decided() {
            self.give_up.get_or_insert(after(self.telling));
        }
        self.give_up.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// Returns the error text for a step that was not done in time.
pub(crate) fn too_long(step: &str, waiting_for: Option<String>) -> String {
    match waiting_for {
        Some(what) => format!("{step} took too long; waiting for {what}"),
        None => format!("{step} took too long"),
    }
}

/// Returns the failure, where a step took too long or the peer sent no reason for a broken channel in time.
fn overdue<D: SourceDriver>(driver: &mut D) -> Option<SourceEvent> {
    let passed = |deadline: Instant| Instant::now() >= deadline;
    let late = driver.lead().due.take_if(|(deadline, _)| passed(*deadline));
    if late.is_none() {
        driver.lead().broken.take_if(|deadline| passed(*deadline))?;
    }
    // The reason of the alarm explains more than that the step took long.
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
