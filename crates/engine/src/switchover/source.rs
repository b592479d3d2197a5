//! The loop of every source, and what all of its drivers have.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use sterna_wire::control::ControlMessage;
use sterna_wire::switchover::{
    Moment, RecordState, SourceAction, SourceEnd, SourceEvent, SourceGuest, SourceState, SourceSwitchover,
    SwitchoverMessage,
};
use sterna_wire::text::cleaned;

use super::{CANCELLED, Event, Events, Ledger, TICK, after, passed, time_left};
use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::report::{Moments, Observer};
use crate::session::{ConnectionEvent, LAST_WORDS, OnConnectionEvent, Peer, PeerEvent, Redial, Session};
use crate::transport::{Address, Security};

/// Why a source does not send the pages that the destination lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unserved {
    /// The connection failed, for this reason: the destination is connected to anew.
    ConnectionLost(String),
    /// The monitor has ended, and the pages with it.
    MonitorGone,
    /// This process has no access to the pages, for this reason.
    NoPages(String),
}

/// How long a source tries to reach a destination that was lost.
#[derive(Clone, Copy, Debug)]
pub struct DeliveryLimits {
    /// After the decision, to deliver it.
    pub decision: Duration,
    /// After an abort, to report it. The destination presumes it anyway.
    pub abort: Duration,
}

/// How a source reaches its destination again.
#[derive(Debug)]
pub struct Reconnection {
    /// The address.
    pub to: Address,
    /// How connections are secured; or why the destination cannot be connected to.
    pub security: Result<Security, String>,
    /// The attempts.
    pub redial: Redial,
}

/// The values from which a [`SourceKernel`] is made.
pub struct SourceSetup<'a, E> {
    /// The state machine.
    pub machine: SourceSwitchover,
    /// The destination, as the control channels show it.
    pub peer: Peer,
    /// The destination, to be reached again.
    pub reconnection: Reconnection,
    /// Receives the events of later control channels.
    pub on_connection: OnConnectionEvent,
    /// The migration.
    pub session: Session,
    /// Its record.
    pub ledger: Ledger,
    /// The loop's events.
    pub events: Events<E>,
    /// How long a lost destination is dialled.
    pub limits: DeliveryLimits,
    /// Whether the migration was cancelled.
    pub cancel: &'a Cancel,
    /// Receives notes, progress and steps.
    pub observer: &'a dyn Observer,
}

/// What every driver of a source has.
pub struct SourceKernel<'a, E> {
    machine: SourceSwitchover,
    /// The destination.
    pub peer: Peer,
    reconnection: Reconnection,
    on_connection: OnConnectionEvent,
    /// The migration. Its incarnation is that of the newest attempt to connect.
    pub session: Session,
    /// The migration's record.
    pub ledger: Ledger,
    /// Sends events to the loop.
    pub events: Events<E>,
    limits: DeliveryLimits,
    /// Whether the migration was cancelled.
    pub cancel: &'a Cancel,
    /// Receives notes, progress and steps.
    pub observer: &'a dyn Observer,
    /// The alarm of the current data channels.
    pub abort: Arc<Abort>,
    /// Incarnation of the current data channels.
    data_incarnation: u32,
    /// When each step of the switchover happened.
    pub moments: Moments,
    cancelled: bool,
    /// Deadline of the current step, and the step's name.
    pub due: Option<(Instant, &'static str)>,
    /// Deadline for delivering the decision or the abort to the destination.
    give_up: Option<Instant>,
    /// Deadline for the destination's message about a broken channel.
    last_words: Option<Instant>,
    /// Why the decision cannot be delivered, where that is known.
    undelivered: Option<String>,
    /// Why the monitor could not be ended after its guest was moved.
    left: Option<String>,
}

/// What one monitor does as a source.
pub trait SourceDriver<'a> {
    /// The driver's own events.
    type Event: Send + 'static;

    /// Returns what all drivers have.
    fn kernel(&mut self) -> &mut SourceKernel<'a, Self::Event>;

    /// Begins to send the guest's memory.
    ///
    /// # Errors
    /// Why it cannot begin: the migration is aborted.
    fn start_migration(&mut self) -> Result<(), String>;

    /// Lets the monitor complete its part: the destination is prepared. Returns the guest's state, unless the monitor reports it later.
    ///
    /// # Errors
    /// Why it does not complete: the migration is aborted.
    fn complete(&mut self) -> Result<Option<SourceGuest>, String>;

    /// Ends the monitor's migration after an abort and returns the guest's state.
    ///
    /// # Errors
    /// Why the guest's state is not known: `sterna recover` has to settle the migration.
    fn end_migration(&mut self) -> Result<SourceGuest, String>;

    /// Resumes the guest and returns its state.
    ///
    /// # Errors
    /// Why the guest does not run: `sterna recover` has to settle the migration.
    fn resume(&mut self) -> Result<SourceGuest, String>;

    /// The guest runs here again, and stays.
    fn stays(&mut self);

    /// Ends the monitor, or keeps it: the guest runs at the destination. Returns the state of the guest here.
    ///
    /// # Errors
    /// Why the monitor still lives although it was to be ended.
    fn end_guest(&mut self) -> Result<SourceGuest, String>;

    /// Begins post-copy: answers requests for pages, pauses the guest and sends its state.
    ///
    /// # Errors
    /// Why it cannot begin: the migration is aborted.
    fn start_post_copy(&mut self) -> Result<(), String> {
        Err("post-copy is not possible at the source".into())
    }

    /// Sends the pages that the destination lacks, over new channels where the destination was lost before.
    ///
    /// # Errors
    /// Why they are not sent.
    fn serve_pages(&mut self) -> Result<(), Unserved>;

    /// Returns whether the monitor has ended, and what is left of its guest's memory with it.
    fn monitor_has_ended(&mut self) -> bool {
        false
    }

    /// Handles a message of the destination that is not about the switchover.
    fn receive(&mut self, message: ControlMessage) -> Option<SourceEvent>;

    /// Handles an event of the driver's own.
    fn handle(&mut self, event: Self::Event) -> Option<SourceEvent>;

    /// Reports progress.
    fn tick(&mut self) {}

    /// Returns what the current step waits for, where more is known than the step's name.
    fn waiting_for(&self) -> Option<String> {
        None
    }

    /// Handles a cancellation after the decision.
    fn too_late_to_cancel(&mut self) {
        self.kernel().observer.note("too late to cancel: the guest already belongs to the destination");
    }
}

impl<'a, E: Send + 'static> SourceKernel<'a, E> {
    /// Makes the kernel of a migration whose control channel is open, or that is recovered.
    pub fn new(setup: SourceSetup<'a, E>) -> Self {
        let SourceSetup {
            machine,
            peer,
            reconnection,
            on_connection,
            session,
            ledger,
            events,
            limits,
            cancel,
            observer,
        } = setup;
        let kernel = Self {
            machine,
            peer,
            reconnection,
            on_connection,
            session,
            ledger,
            events,
            limits,
            cancel,
            observer,
            abort: Arc::default(),
            data_incarnation: 1,
            moments: Moments::default(),
            cancelled: false,
            due: None,
            give_up: None,
            last_words: None,
            undelivered: None,
            left: None,
        };
        kernel.events.watch(&kernel.abort, kernel.data_incarnation);
        kernel
    }

    /// Returns whether the guest is committed to the destination.
    pub fn decided(&self) -> bool {
        self.machine.decided()
    }

    /// Returns whether the guest runs at the destination and part of its memory is only here.
    pub fn serves_pages(&self) -> bool {
        self.machine.serves_pages()
    }

    /// Returns whether the guest goes on at the destination before all of its memory is there.
    pub fn post_copy_begun(&self) -> bool {
        self.machine.post_copy_begun()
    }

    /// Returns why the migration was aborted; empty before that.
    pub fn reason(&self) -> &str {
        self.machine.reason()
    }

    /// Returns whether the migration was cancelled. The event of the cancellation may still be queued.
    pub fn cancelled(&self) -> bool {
        self.cancelled || self.cancel.is_cancelled() && self.reason() == CANCELLED
    }

    /// Returns whether the driver waits for the destination's reason for a broken channel.
    pub fn awaits_last_words(&self) -> bool {
        self.last_words.is_some()
    }

    /// Returns why the monitor could not be ended after its guest was moved.
    pub fn left(&self) -> Option<&str> {
        self.left.as_deref()
    }

    /// Returns the destination's address.
    pub fn to(&self) -> &Address {
        &self.reconnection.to
    }

    /// Stops trying to reach the destination, for `reason`.
    pub fn give_up(&mut self, reason: impl Into<String>) {
        self.undelivered.get_or_insert(reason.into());
        self.give_up = Some(Instant::now());
    }

    /// Returns whether new data channels would be the first of the newest control channel.
    pub(crate) fn expects_new_channels(&self) -> bool {
        self.session.incarnation != self.data_incarnation
    }

    /// Begins a new incarnation of the data channels, with an alarm of its own. The old channels have ended.
    pub(crate) fn renew_channels(&mut self) {
        self.abort = Arc::default();
        self.data_incarnation = self.session.incarnation;
        self.events.watch(&self.abort, self.data_incarnation);
    }

    /// Ends the connections: later reports of the channels' threads are no failures.
    pub fn hang_up(&mut self) {
        self.abort.finish();
        self.peer.hang_up();
    }

    fn reconnect(&mut self) {
        let Reconnection { to, security, redial } = &mut self.reconnection;
        match security {
            Ok(security) => {
                self.session.incarnation = self.peer.begin_anew();
                let on_connection = Arc::clone(&self.on_connection);
                redial.dial(to.clone(), security.clone(), self.session.clone(), on_connection);
            }
            Err(reason) => {
                let reason = reason.clone();
                self.give_up(reason);
            }
        }
    }

    /// Handles the destination's message that it has failed.
    fn destination_failed(&mut self, reason: &str) -> Option<SourceEvent> {
        let reason = format!("the destination failed: {}", cleaned(reason));
        if !self.decided() {
            return Some(SourceEvent::Failed { reason });
        }
        self.observer.note(&reason);
        Some(SourceEvent::GaveUp { reason })
    }

    /// Sets the deadline for delivering the decision. In post-copy there is none unless the migration was cancelled: the memory that is
    /// still here exists nowhere else.
    fn await_delivery(&mut self) {
        let waits_for_ever = self.post_copy_begun() && !self.cancelled;
        self.give_up = (!waits_for_ever).then(|| after(self.limits.decision));
    }

    /// Returns the event by which the machine ends, if the time for delivering the decision, or the abort, is over.
    fn gives_up(&mut self) -> Option<SourceEvent> {
        if self.machine.may_stop() && !self.decided() {
            self.give_up.get_or_insert(after(self.limits.abort));
        }
        self.give_up.take_if(|deadline| passed(*deadline))?;
        let reason = self.undelivered.take().unwrap_or_else(|| {
            match self.post_copy_begun() {
                true => {
                    "the rest of the guest's memory was not sent: the destination was lost, and the migration cancelled"
                }
                false => "the destination did not confirm it in time",
            }
            .to_owned()
        });
        Some(SourceEvent::GaveUp { reason })
    }
}

/// Returns the error text for a step that was not done in time.
pub(crate) fn too_long(step: &str, waiting_for: Option<String>) -> String {
    match waiting_for {
        Some(what) => format!("{step} took too long; waiting for {what}"),
        None => format!("{step} took too long"),
    }
}

/// Runs a source from its first actions to its end.
pub fn run_source<'a, D: SourceDriver<'a>>(
    driver: &mut D,
    inbox: &Receiver<Event<D::Event>>,
    first: Vec<SourceAction>,
) -> SourceEnd {
    let mut next_tick = Instant::now() + TICK;
    let mut actions = first;
    loop {
        let mut answers = Vec::new();
        for action in std::mem::take(&mut actions) {
            match action {
                SourceAction::Done(end) => return end,
                action => answers.extend(perform_observed(driver, action)),
            }
        }
        actions.extend(answers.into_iter().flat_map(|answer| driver.kernel().machine.on(answer)));
        if !actions.is_empty() {
            continue;
        }
        let event = driver.kernel().gives_up().or_else(|| overdue(driver));
        if let Some(event) = event {
            actions = driver.kernel().machine.on(event);
            continue;
        }
        let wake = driver.kernel().last_words.map_or(next_tick, |deadline| deadline.min(next_tick));
        match inbox.recv_timeout(time_left(wake)) {
            Ok(event) => {
                if let Some(event) = translate(driver, event) {
                    actions = driver.kernel().machine.on(event);
                }
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() < next_tick => {}
            Err(RecvTimeoutError::Timeout) => {
                next_tick = Instant::now() + TICK;
                driver.tick();
            }
            Err(RecvTimeoutError::Disconnected) => unreachable!("the kernel holds a sender"),
        }
    }
}

/// Returns the failure, where a step took too long or the destination sent no reason for a broken channel in time.
fn overdue<'a, D: SourceDriver<'a>>(driver: &mut D) -> Option<SourceEvent> {
    let late = driver.kernel().due.take_if(|(deadline, _)| passed(*deadline));
    if late.is_none() {
        driver.kernel().last_words.take_if(|deadline| passed(*deadline))?;
    }
    // The reason of the alarm explains more than that the step took long.
    let reason = driver.kernel().abort.reason();
    let step = |(_, step)| too_long(step, driver.waiting_for());
    Some(SourceEvent::Failed { reason: reason.or_else(|| late.map(step)).unwrap_or_default() })
}

fn perform_observed<'a, D: SourceDriver<'a>>(driver: &mut D, action: SourceAction) -> Option<SourceEvent> {
    tracing::debug!(?action, "switchover");
    let (observer, step) = (driver.kernel().observer, action.step());
    step.iter().for_each(|step| observer.step(Moment::Before, *step));
    let answer = perform(driver, action);
    step.iter().for_each(|step| observer.step(Moment::After, *step));
    answer
}

/// Performs an action. Returns the event that answers it, if that is known at once.
fn perform<'a, D: SourceDriver<'a>>(driver: &mut D, action: SourceAction) -> Option<SourceEvent> {
    let failed = |reason| SourceEvent::Failed { reason };
    let state_of = |outcome: Result<SourceGuest, String>| outcome.map_or_else(failed, SourceEvent::Guest);
    match action {
        SourceAction::WriteRecord(state) => Some(write_record(driver, state)),
        SourceAction::StartMigration => driver.start_migration().err().map(|reason| {
            let kernel = driver.kernel();
            // The event of the cancellation may still be queued.
            kernel.cancelled |= kernel.cancel.is_cancelled();
            failed(reason)
        }),
        SourceAction::StartPostCopy => driver.start_post_copy().err().map(failed),
        SourceAction::ServePages => match driver.serve_pages().err()? {
            Unserved::ConnectionLost(reason) => {
                tracing::info!(reason, "the rest of memory cannot be sent yet");
                driver.kernel().abort.lost(reason);
                driver.kernel().peer.hang_up();
                Some(SourceEvent::ConnectionLost)
            }
            Unserved::MonitorGone => Some(SourceEvent::Guest(SourceGuest::Gone)),
            Unserved::NoPages(reason) => Some(SourceEvent::GaveUp { reason }),
        },
        SourceAction::Send(message) => {
            driver.kernel().peer.send(&ControlMessage::Switchover(message));
            None
        }
        SourceAction::RelayShut => match driver.complete() {
            Ok(state) => state.map(SourceEvent::Guest),
            Err(reason) => Some(failed(reason)),
        },
        SourceAction::EndMigration => Some(state_of(driver.end_migration())),
        SourceAction::Cont => Some(state_of(driver.resume())),
        SourceAction::AnnounceSelf => {
            driver.stays();
            None
        }
        SourceAction::EndGuest => {
            let ended = driver.end_guest();
            driver.kernel().left = ended.as_ref().err().cloned();
            Some(state_of(ended))
        }
        SourceAction::Connect => {
            let kernel = driver.kernel();
            kernel.peer.hang_up();
            if !kernel.decided() {
                kernel.give_up.get_or_insert(after(kernel.limits.abort));
            } else if kernel.give_up.is_none() {
                kernel.await_delivery();
            }
            kernel.reconnect();
            None
        }
        SourceAction::Done(_) => unreachable!("the loop handles the end"),
    }
}

fn write_record<'a, D: SourceDriver<'a>>(driver: &mut D, state: SourceState) -> SourceEvent {
    let kernel = driver.kernel();
    if state == SourceState::Aborted {
        // Before the channels are closed, so that the destination learns the reason.
        let reason = kernel.machine.reason();
        kernel.peer.send(&ControlMessage::Failed { reason: reason.to_owned() });
        kernel.abort.raise(reason);
    }
    if !kernel.ledger.write(RecordState::Source(state), kernel.observer) {
        return SourceEvent::RecordFailed;
    }
    kernel.due = None;
    if state == SourceState::Committed {
        kernel.moments.decided = Some(Instant::now());
        kernel.await_delivery();
    }
    SourceEvent::RecordWritten
}

/// Handles an event. Returns what it means to the state machine, if anything.
fn translate<'a, D: SourceDriver<'a>>(driver: &mut D, event: Event<D::Event>) -> Option<SourceEvent> {
    match event {
        Event::Peer(news) => handle_peer(driver, news),
        Event::Broken(incarnation) if incarnation != driver.kernel().data_incarnation => None,
        Event::Broken(_) => channels_broke(driver),
        Event::Cancelled => cancel(driver),
        Event::Own(event) => driver.handle(event),
    }
}

/// Handles the failure of the data channels. Before the decision, where only a connection broke, first waits for the destination's reason.
fn channels_broke<'a, D: SourceDriver<'a>>(driver: &mut D) -> Option<SourceEvent> {
    let kernel = driver.kernel();
    if kernel.abort.was_lost() && !kernel.decided() {
        kernel.last_words = Some(Instant::now() + LAST_WORDS);
        return None;
    }
    let reason = kernel.abort.reason()?;
    if !kernel.decided() {
        // The control channel is still there: the destination is informed on it.
        return Some(SourceEvent::Failed { reason });
    }
    if kernel.post_copy_begun() && driver.monitor_has_ended() {
        return Some(SourceEvent::Guest(SourceGuest::Gone));
    }
    Some(SourceEvent::ChannelsLost { reason })
}

fn handle_peer<'a, D: SourceDriver<'a>>(driver: &mut D, news: ConnectionEvent) -> Option<SourceEvent> {
    let kernel = driver.kernel();
    match kernel.peer.handle(news)? {
        PeerEvent::Message(message, _share) => match message {
            ControlMessage::Switchover(message) => {
                match message {
                    SwitchoverMessage::Prepared => kernel.moments.prepared = Some(Instant::now()),
                    SwitchoverMessage::RunningIncomplete => {
                        kernel.moments.running.get_or_insert_with(Instant::now);
                    }
                    SwitchoverMessage::Running => {
                        let now = *kernel.moments.complete.get_or_insert_with(Instant::now);
                        kernel.moments.running.get_or_insert(now);
                    }
                    _ => {}
                }
                Some(SourceEvent::Message(message))
            }
            ControlMessage::Failed { reason } | ControlMessage::Refused { reason } => {
                kernel.destination_failed(&reason)
            }
            message => driver.receive(message),
        },
        PeerEvent::Lost(reason) => {
            kernel.observer.note(&format!("the connection to the destination is lost: {reason}"));
            kernel.abort.lost(format_args!("the destination was lost: {reason}"));
            Some(SourceEvent::ConnectionLost)
        }
        PeerEvent::Connected => {
            kernel.reconnection.redial.connected();
            if kernel.post_copy_begun() {
                // The destination is waited for without a limit as long as it is there.
                kernel.give_up = None;
            }
            Some(SourceEvent::Connected)
        }
        PeerEvent::Unreachable(reason) => {
            tracing::info!(reason, "the destination cannot be reached yet");
            kernel.reconnect();
            None
        }
    }
}

fn cancel<'a, D: SourceDriver<'a>>(driver: &mut D) -> Option<SourceEvent> {
    let kernel = driver.kernel();
    if kernel.machine.may_stop() && !kernel.decided() {
        kernel.give_up = Some(Instant::now());
        return None;
    }
    kernel.cancelled = true;
    if !kernel.decided() {
        return Some(SourceEvent::Failed { reason: CANCELLED.into() });
    }
    // In post-copy the rest is still sent, but the source does not wait for a lost destination.
    if !kernel.serves_pages() {
        driver.too_late_to_cancel();
        let kernel = driver.kernel();
        if kernel.give_up.is_none() {
            kernel.await_delivery();
        }
    } else if kernel.peer.is_connected() {
        kernel.observer.note("too late to cancel: the rest of the guest's memory is being sent after it");
    } else {
        kernel.await_delivery();
    }
    None
}
