//! What every driver of a destination has.

mod driver;
mod run;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_wire::control::ControlMessage;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationEnd, DestinationEvent, DestinationSwitchover};

pub use self::driver::DestinationDriver;
pub use self::run::run_destination;
use super::{Events, LastAnswer, Ledger, SourceLink, after, passed};
use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::control_link::out_of_phase;
use crate::migration::Phase;
use crate::report::Observer;
use crate::session::Peer;

/// How a destination's loop ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationOutcome {
    /// The state machine reached this end, and the source needs no more answers.
    Machine(DestinationEnd),
    /// The driver ended the loop before, for this reason.
    GivenUp(Reason),
}

/// The values from which a [`DestinationKernel`] is made.
pub struct DestinationSetup<'a, E> {
    /// The state machine.
    pub machine: DestinationSwitchover,
    /// The source.
    pub peer: Peer,
    /// The migration's record.
    pub ledger: Ledger,
    /// The loop's events.
    pub events: Events<E>,
    /// The alarm of the data channels.
    pub abort: Arc<Abort>,
    /// Whether the migration was cancelled.
    pub cancel: &'a Cancel,
    /// How long a source that was lost before its decision is waited for, so that the migration goes on; zero: the migration ends.
    pub retry: Duration,
    /// Receives notes, progress and steps.
    pub observer: &'a dyn Observer,
}

/// What every driver of a destination has.
pub struct DestinationKernel<'a, E> {
    machine: DestinationSwitchover,
    /// The source.
    pub peer: Peer,
    /// The migration's record.
    pub ledger: Ledger,
    /// Sends events to the loop.
    pub events: Events<E>,
    cancel: &'a Cancel,
    /// Receives notes, progress and steps.
    pub observer: &'a dyn Observer,
    /// The alarm of the current data channels.
    pub abort: Arc<Abort>,
    /// Incarnation of the current data channels.
    data_incarnation: u32,
    /// The phase that the migration has reached.
    pub phase: Phase,
    cancelled: bool,
    retry: Duration,
    /// When the source that has been lost must be back.
    back_by: Option<Instant>,
    /// When the decision arrived.
    decided: Option<Instant>,
    /// Deadline for the source's message about a broken channel.
    last_words: Option<Instant>,
    /// Whether the source closed the last control channel.
    closed: bool,
    /// Whether the source was sent that this side is prepared: it may have decided since.
    prepared: bool,
    /// Whether the source depends on no answer: it has sent that it has not decided and will not, or it is gone for good.
    independent: bool,
    /// Whether the source needs no more answers once the migration has ended.
    settled: bool,
    lingering: Option<Lingering>,
    given_up: Option<Reason>,
    /// How the guest has ended by itself at the source, if the source has sent that.
    pub(super) ended_at_source: Option<Reason>,
}

/// A migration that has ended here, whose source may still need answers.
#[derive(Clone)]
struct Lingering {
    end: DestinationEnd,
    since: Instant,
    /// When the source's control channel last changed.
    changed: Instant,
    /// When the source is no longer waited for; none where that must be determined anew.
    hang_up_at: Option<Instant>,
}

impl<'a, E: Send + 'static> DestinationKernel<'a, E> {
    /// Makes the kernel of a migration whose control channel is open, or that is recovered.
    pub fn new(setup: DestinationSetup<'a, E>) -> Self {
        let DestinationSetup { mut machine, peer, ledger, events, abort, cancel, retry, observer } = setup;
        machine.set_resumable(!retry.is_zero());
        events.watch(&abort, 1);
        Self {
            machine,
            peer,
            ledger,
            events,
            cancel,
            observer,
            abort,
            data_incarnation: 1,
            phase: Phase::SettingUp,
            cancelled: false,
            retry,
            back_by: None,
            decided: None,
            last_words: None,
            closed: false,
            prepared: false,
            independent: false,
            settled: false,
            lingering: None,
            given_up: None,
            ended_at_source: None,
        }
    }

    /// Returns whether this side may still end the migration by itself.
    pub fn may_give_up(&self) -> bool {
        self.machine.may_give_up()
    }

    /// Has the loss of the source end the migration from now on: not only pages have arrived.
    pub(crate) fn forgo_resuming(&mut self) {
        self.machine.set_resumable(false);
    }

    /// Begins to wait for a source that was lost before the decision.
    fn await_continuation(&mut self) {
        self.back_by.get_or_insert(after(self.retry));
        self.observer.note(&format!(
            "what has arrived is kept, and the source waited for: {:.0} s at most",
            self.retry.as_secs_f64()
        ));
    }

    /// Returns the reason why an interrupted migration ends, if the source has not come back in time.
    fn not_back(&mut self) -> Option<Reason> {
        self.back_by.take_if(|deadline| self.machine.is_interrupted() && passed(*deadline))?;
        let text = format!("the source was lost, and did not come back within {:.0} s", self.retry.as_secs_f64());
        Some(Reason::new(ErrorKind::ConnectionLost, text))
    }

    /// Returns whether part of the guest's memory is still at the source, in post-copy.
    pub fn lacks_memory(&self) -> bool {
        self.machine.lacks_memory()
    }

    /// Returns the end, once the state machine has reached it.
    pub fn end(&self) -> Option<&DestinationEnd> {
        self.lingering.as_ref().map(|lingering| &lingering.end)
    }

    /// Returns whether the migration was cancelled. The event of the cancellation may still be queued.
    pub fn cancelled(&self) -> bool {
        self.cancelled || self.cancel.is_cancelled()
    }

    /// Ends the loop: nothing is settled, for `reason`.
    pub fn give_up(&mut self, reason: Reason) {
        self.given_up.get_or_insert(reason);
    }

    /// Keeps the source's reason for its abort if that is the end of the guest. A failure here may be a consequence that was noticed before.
    fn note_end_at_source(&mut self, reason: &Reason) {
        if reason.kind == ErrorKind::GuestEnded {
            self.ended_at_source.get_or_insert_with(|| reason.clone().from_peer().within("at the source"));
        }
    }

    /// Sends the source the reason of a failure.
    pub fn send_failure(&self, reason: &Reason) {
        self.peer.send(&ControlMessage::Failed(reason.clone()));
    }

    /// Handles a message that the source may not send now: it ends the migration, as long as this side may do that; later it is ignored.
    pub fn out_of_phase(&self, message: &ControlMessage) -> Option<DestinationEvent> {
        let reason = out_of_phase("the source", message);
        if self.may_give_up() {
            return Some(self.fail(reason));
        }
        tracing::debug!("{reason}");
        None
    }

    /// Sends the source the reason of a failure and returns the event of it.
    pub fn fail(&self, reason: Reason) -> DestinationEvent {
        self.send_failure(&reason);
        DestinationEvent::Failed { reason }
    }

    /// Ends the wait for a source that may still need answers: the migration has ended here.
    pub fn stop_lingering(&mut self) {
        self.peer.flush();
        self.peer.hang_up();
        self.settled = true;
    }

    /// Ends the connection to a source that is gone for good.
    pub fn source_is_gone(&mut self) {
        self.peer.hang_up();
        self.independent = true;
    }

    /// Ends the connections: later reports of the channels' threads are no failures.
    pub fn hang_up(&mut self) {
        self.peer.flush();
        self.peer.hang_up();
        self.abort.finish();
    }

    /// Begins a new incarnation of the data channels, with an alarm of its own. Returns the incarnation.
    pub(crate) fn renew_channels(&mut self) -> u32 {
        self.data_incarnation = self.peer.incarnation();
        self.abort = Arc::default();
        self.last_words = None;
        self.events.watch(&self.abort, self.data_incarnation);
        self.data_incarnation
    }

    fn link(&self) -> SourceLink {
        match self.peer.is_connected() {
            true => SourceLink::Connected,
            false if self.closed => SourceLink::Closed,
            false => SourceLink::Lost,
        }
    }

    /// Has the time until which the source is answered determined anew.
    fn link_changed(&mut self) {
        if let Some(lingering) = &mut self.lingering {
            (lingering.changed, lingering.hang_up_at) = (Instant::now(), None);
        }
    }

    /// Returns what is known of the source that may still need an answer, once the migration has ended here.
    fn last_answer(&self) -> Option<LastAnswer> {
        let Lingering { end, since, changed, .. } = self.lingering.clone()?;
        let awaited = !self.independent
            && match end {
                DestinationEnd::Running | DestinationEnd::Lost { .. } | DestinationEnd::MemoryLost { .. } => true,
                DestinationEnd::Discarded { .. } => self.prepared,
                // What is known was sent, and an operator has to settle it.
                DestinationEnd::Stuck { .. } | DestinationEnd::Conflict => false,
            };
        Some(LastAnswer { end, since, link: self.link(), changed, awaited })
    }
}
