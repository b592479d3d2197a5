//! What every driver of a source has.

mod driver;
mod run;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_wire::control::{ControlMessage, DestinationFigures};
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{SourceAfter, SourceEvent, SourceSwitchover};
use sterna_wire::text::cleaned;

pub use self::driver::{SourceDriver, Unserved};
pub use self::run::run_source;
pub(crate) use self::run::too_long;
use super::{Events, Interruptions, Ledger, after, passed};
use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::control_link::out_of_phase;
use crate::live_control::{Control, Requests, RoundsEnd};
use crate::pacer::Pacer;
use crate::report::{Moments, Observer};
use crate::session::{OnConnectionEvent, Peer, Redial, Session};
use crate::transport::{Address, Security};
use crate::vmm::GuestEnd;

/// How long a source tries to reach a destination that was lost.
#[derive(Clone, Copy, Debug)]
pub struct DeliveryLimits {
    /// Before the decision, to go on with the migration; zero: the migration ends.
    pub retry: Duration,
    /// After the decision, to deliver it.
    pub decision: Duration,
    /// How long a destination that is connected may take to start the guest after the decision; none, or shorter: as long as `decision`.
    pub start: Option<Duration>,
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
    /// The requests of other threads.
    pub control: Control,
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
    pub(crate) control: Control,
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
    /// When a destination that is connected must have started the guest.
    start_by: Option<Instant>,
    /// Deadline for the destination's message about a broken channel.
    last_words: Option<Instant>,
    /// How often and for how long the migration was interrupted.
    pub(crate) interruptions: Interruptions,
    /// Why the decision cannot be delivered, where that is known.
    undelivered: Option<Reason>,
    /// Why the monitor could not be ended after its guest was moved.
    left: Option<String>,
    /// How the guest has ended, where that has ended the migration.
    pub(super) guest_end: Option<GuestEnd>,
}

impl<'a, E: Send + 'static> SourceKernel<'a, E> {
    /// Makes the kernel of a migration whose control channel is open, or that is recovered.
    pub fn new(setup: SourceSetup<'a, E>) -> Self {
        let kernel = Self {
            machine: setup.machine,
            peer: setup.peer,
            reconnection: setup.reconnection,
            on_connection: setup.on_connection,
            session: setup.session,
            ledger: setup.ledger,
            events: setup.events,
            limits: setup.limits,
            cancel: setup.cancel,
            control: setup.control,
            observer: setup.observer,
            abort: Arc::default(),
            data_incarnation: 1,
            moments: Moments::default(),
            cancelled: false,
            due: None,
            give_up: None,
            start_by: None,
            last_words: None,
            interruptions: Interruptions::default(),
            undelivered: None,
            left: None,
            guest_end: None,
        };
        kernel.events.watch(&kernel.abort, kernel.data_incarnation);
        kernel
    }

    /// Returns whether the guest is committed to the destination.
    pub fn decided(&self) -> bool {
        self.machine.decided()
    }

    /// Sets whether the loss of the destination only interrupts the migration: both sides have agreed on that, the guest runs, and nothing but
    /// pages of the rounds was sent.
    pub(crate) fn set_resumable(&mut self, resumable: bool) {
        self.machine.set_resumable(resumable);
    }

    /// Returns the incarnation of the current data channels.
    pub(crate) fn data_incarnation(&self) -> u32 {
        self.data_incarnation
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
    pub fn reason(&self) -> &Reason {
        self.machine.reason()
    }

    /// Returns whether the migration was cancelled. The event of the cancellation may still be queued.
    pub fn cancelled(&self) -> bool {
        self.cancelled || self.cancel.is_cancelled() && self.reason().kind == ErrorKind::Cancelled
    }

    /// Begins to handle requests of other threads ([`SourceDriver::handle_requests`]): both sides have agreed on the migration, by a monitor
    /// that migrates by itself, without post-copy.
    pub fn await_requests(&self) {
        self.control.agreed(false);
        self.events.on_request(&self.control);
    }

    /// Returns what other threads have requested so far.
    pub fn requests(&self) -> Requests {
        self.control.requests()
    }

    /// Has `pacer`, that of the data channels, follow the requested limit.
    pub fn pace_by(&self, pacer: &Arc<Pacer>) {
        self.control.pace_by(pacer);
    }

    /// Records that a monitor which migrates by itself has paused its guest for the switchover.
    pub fn guest_stays_paused(&self) {
        self.control.begin_ending(RoundsEnd::SwitchOver);
        self.control.stays_paused(true);
    }

    /// Returns whether a connection broke before the decision. The destination's reason counts then, and the driver reports no failure of its
    /// own.
    pub fn awaits_last_words(&self) -> bool {
        // The wait begins with the event of the alarm, which may still be queued.
        self.last_words.is_some() || (self.abort.was_lost() && !self.decided())
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
    pub fn give_up(&mut self, reason: Reason) {
        self.undelivered.get_or_insert(reason);
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
        self.last_words = None;
        self.events.watch(&self.abort, self.data_incarnation);
    }

    /// Ends the connections: later reports of the channels' threads are no failures.
    pub fn hang_up(&mut self) {
        self.abort.finish();
        self.peer.flush();
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
                let reason = Reason::new(ErrorKind::Settings, reason);
                self.give_up(reason);
            }
        }
    }

    /// Handles a message that the destination may not send now: it ends the migration; after the decision it is ignored.
    pub fn out_of_phase(&self, message: &ControlMessage) -> Option<SourceEvent> {
        let reason = out_of_phase("the destination", message);
        if self.decided() {
            tracing::debug!("{reason}");
            return None;
        }
        Some(SourceEvent::Failed { reason })
    }

    /// Handles the destination's message that it has failed.
    fn destination_failed(&mut self, reason: Reason) -> Option<SourceEvent> {
        let reason = reason.from_peer().within("the destination failed");
        if !self.decided() {
            return Some(SourceEvent::Failed { reason });
        }
        self.observer.note(&reason.text);
        Some(SourceEvent::GaveUp { reason })
    }

    /// Handles the destination's report that the guest runs there with all of its memory, `unsent` pages of which were never sent. The monitor
    /// here has the only copy of these pages and is kept. The record says so, because a later `recover` does not know what was sent.
    fn dispute_running(&mut self, unsent: u64) -> SourceEvent {
        let text = format!(
            "the destination claims that the guest runs there with all of its memory, but {unsent} of its pages were never sent: they are only \
             here"
        );
        if let Err(error) = self.ledger.write_amended(|record| record.disputed = Some(text.clone())) {
            self.observer.note(&format!("the record does not say that the destination's claim is wrong: {error}"));
        }
        SourceEvent::GaveUp { reason: Reason::new(ErrorKind::OtherSide, text) }
    }

    /// Keeps what the destination reports of the guest's first moment there, before it reports that it runs. The monitor of a guest that does
    /// not run is kept; the record that follows says so, because a later `recover` must keep it too.
    fn note_first_moment(&mut self, figures: &DestinationFigures) {
        if !self.decided() {
            return;
        }
        // The peer may have sent any number.
        self.moments.watched = Duration::try_from_secs_f64(figures.watched_ms / 1e3).unwrap_or_default();
        if let Some(why) = &figures.does_not_run {
            let why = cleaned(why);
            self.observer.note(&format!("the guest does not run at the destination: {why}"));
            self.ledger.amend(|record| {
                record.does_not_run = Some(why);
                record.source_after = SourceAfter::Keep;
            });
        }
    }

    /// Begins to wait for the destination's answer to the decision.
    fn begin_awaiting(&mut self) {
        let start = self.limits.start.unwrap_or_default().max(self.limits.decision);
        // In post-copy the destination is waited for without a limit as long as it is there.
        self.start_by = (!self.post_copy_begun()).then(|| after(start));
        self.await_start();
    }

    /// Sets the deadline for the answer of a destination that is connected, and so has the decision, or gets it.
    fn await_start(&mut self) {
        if self.undelivered.is_none() && !self.cancelled {
            self.give_up = self.start_by;
        }
    }

    /// Sets the deadline for delivering the decision. In post-copy there is none unless the migration was cancelled: the memory that is
    /// still here exists nowhere else.
    fn await_delivery(&mut self) {
        if self.post_copy_begun() && !self.cancelled {
            return;
        }
        let deadlines = [Some(after(self.limits.decision)), self.start_by, self.give_up];
        self.give_up = deadlines.into_iter().flatten().min();
    }

    /// Returns the event by which the machine ends, if the time for delivering the decision, or the abort, is over.
    fn gives_up(&mut self) -> Option<SourceEvent> {
        if self.machine.may_stop() && !self.decided() {
            self.give_up.get_or_insert(after(self.limits.abort));
        }
        self.give_up.take_if(|deadline| passed(*deadline))?;
        let reason = self.undelivered.take().unwrap_or_else(|| {
            let text = match () {
                () if self.machine.is_interrupted() => {
                    format!(
                        "the destination was lost, and not reached again within {:.0} s",
                        self.limits.retry.as_secs_f64()
                    )
                }
                () if self.post_copy_begun() => {
                    "the rest of the guest's memory was not sent: the destination was lost, and the migration cancelled"
                        .into()
                }
                () => "the destination did not confirm it in time".into(),
            };
            Reason::new(ErrorKind::ConnectionLost, text)
        });
        Some(SourceEvent::GaveUp { reason })
    }
}
