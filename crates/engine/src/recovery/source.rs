//! The source's driver: the side that knows the decision, and dials the destination until it answers.

use std::convert::Infallible;
use std::time::Duration;

use sterna_wire::control::ControlMessage;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{Record, SourceEnd, SourceEvent, SourceGuest, SourceState, SourceSwitchover};

use super::{CANCELLED, MAX_DIAL_PAUSE, Means, unconnected_peer};
use crate::live_control::Control;
use crate::migration::GuestState;
use crate::report::Outcome;
use crate::session::{Backoff, DIAL_PAUSE, Redial, Session};
use crate::switchover::{
    DeliveryLimits, Ending, Events, Ledger, Reconnection, SourceDriver, SourceKernel, SourceSetup, Unserved, run_source,
};

/// How many times longer than it is dialled a destination that is connected may take to start the guest: its storage may answer late.
const START_FACTOR: u32 = 10;

/// What is left of the source's monitor.
pub trait SourceRemains {
    /// Ends the monitor's own migration, if it has one, after an abort. Returns the guest's state.
    ///
    /// # Errors
    /// Why the guest's state is not known: nothing is settled.
    fn end_migration(&mut self) -> Result<SourceGuest, Reason>;

    /// Resumes the guest and returns its state.
    ///
    /// # Errors
    /// Why the guest does not run: nothing is settled.
    fn resume(&mut self) -> Result<SourceGuest, Reason>;

    /// Called when the guest runs here and stays.
    fn guest_stays(&mut self) {}

    /// Ends the monitor, or keeps it, as `record` asks for: the guest belongs to the destination, and runs there unless the record names why it
    /// does not. Returns the state of the guest here.
    ///
    /// # Errors
    /// Why the monitor still lives although it was to be ended.
    fn end_guest(&mut self, record: &Record) -> Result<SourceGuest, Reason>;

    /// Returns why the pages that the destination lacks cannot be sent.
    fn unserved(&mut self) -> Unserved;
}

/// How a source's recovery ended.
#[derive(Debug)]
pub struct RecoveredSource {
    /// The end of the state machine.
    pub end: SourceEnd,
    /// What that means.
    pub ending: Ending,
    /// The record.
    pub ledger: Ledger,
    /// Why the monitor could not be ended after its guest was moved.
    pub left: Option<String>,
}

/// Settles a migration at the source, from its record in `state`. `dial_time`: how long a destination that must learn the decision is
/// dialled.
pub fn recover_source(
    means: Means<'_>,
    state: SourceState,
    guest: SourceGuest,
    dial_time: Duration,
    remains: &mut dyn SourceRemains,
) -> RecoveredSource {
    tracing::info!(?state, ?guest, "recovering the source");
    let Means { record, fenced_peer, address, security, tell_time, cancel, observer } = means;
    if let Some(reason) = disputed(record.record(), state, guest).filter(|_| !fenced_peer) {
        let ending = Ending::failed(Outcome::Lost, GuestState::LacksMemory, reason.clone());
        return RecoveredSource { end: SourceEnd::Unserved { reason }, ending, ledger: record.into(), left: None };
    }
    let (events, inbox) = Events::channel();
    let _cancelling = events.on_cancel(cancel, || {});
    let (machine, first) = SourceSwitchover::recover(Some(state), guest, fenced_peer);
    let session = session_of(record.record());
    let redial = Redial::with(Backoff::new(DIAL_PAUSE).up_to(MAX_DIAL_PAUSE));
    let kernel = SourceKernel::new(SourceSetup {
        machine,
        peer: unconnected_peer(),
        reconnection: Reconnection { to: address, security, redial },
        on_connection: events.on_connection(),
        session,
        ledger: record.into(),
        events,
        limits: DeliveryLimits {
            // A recovery sends no memory.
            retry: Duration::ZERO,
            decision: dial_time,
            start: Some(dial_time.saturating_mul(START_FACTOR)),
            abort: tell_time,
        },
        cancel,
        control: Control::new(),
        observer,
    });
    let mut driver = Driver { kernel, remains };
    let end = run_source(&mut driver, &inbox, first);
    let mut kernel = driver.kernel;
    kernel.hang_up();
    let (ending, left) = (kernel.ending(end.clone()), kernel.left().map(str::to_owned));
    RecoveredSource { end, ending, ledger: kernel.ledger, left }
}

/// Returns why the destination is not asked: it has made a claim that the process which sent the guest's memory knew to be wrong, and would
/// repeat it. The paused guest here has the only copy of part of the memory. If that is gone, or runs, there is nothing to keep.
fn disputed(record: &Record, state: SourceState, guest: SourceGuest) -> Option<Reason> {
    let claim = record.disputed.as_ref()?;
    let kept = (state, guest) == (SourceState::Committed, SourceGuest::Completed);
    kept.then(|| Reason::new(ErrorKind::OtherSide, claim))
}

/// Returns the record's migration as far as a control channel needs it.
fn session_of(record: &Record) -> Session {
    Session {
        id: record.migration,
        key: record.key.clone(),
        incarnation: 0,
        channels: 0,
        device_channels: 0,
        packet_size: 0,
        features: Vec::new(),
        round_trip: Duration::ZERO,
    }
}

struct Driver<'a, 'r> {
    kernel: SourceKernel<'a, Infallible>,
    remains: &'r mut dyn SourceRemains,
}

impl<'a> SourceDriver<'a> for Driver<'a, '_> {
    type Event = Infallible;

    fn kernel(&mut self) -> &mut SourceKernel<'a, Infallible> {
        &mut self.kernel
    }

    fn start_migration(&mut self) -> Result<(), Reason> {
        Err(Reason::other("a recovery starts no migration"))
    }

    fn complete(&mut self) -> Result<Option<SourceGuest>, Reason> {
        Err(Reason::other("a recovery completes no migration"))
    }

    fn end_migration(&mut self) -> Result<SourceGuest, Reason> {
        self.remains.end_migration()
    }

    fn resume(&mut self) -> Result<SourceGuest, Reason> {
        self.remains.resume()
    }

    fn guest_stays(&mut self) {
        self.remains.guest_stays();
    }

    fn end_guest(&mut self) -> Result<SourceGuest, Reason> {
        self.remains.end_guest(self.kernel.ledger.record())
    }

    fn serve_pages(&mut self) -> Result<(), Unserved> {
        Err(self.remains.unserved())
    }

    fn receive(&mut self, message: ControlMessage) -> Option<SourceEvent> {
        tracing::debug!("`{}`, about a migration that is being recovered", message.kind());
        None
    }

    fn handle(&mut self, event: Infallible) -> Option<SourceEvent> {
        match event {}
    }

    fn too_late_to_cancel(&mut self) {
        self.kernel.give_up(Reason::new(ErrorKind::Cancelled, CANCELLED));
    }
}
