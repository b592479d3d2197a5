//! Recovery of a monitor that embeds the library: its process has ended, and with it usually the guest.

use std::fmt;
use std::time::Duration;

use sterna_wire::control::Mode;
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{DestinationGuest, Record, RecordState, SourceGuest};

use super::{
    DestinationRemains, GaveUp, Means, RecoveredDestination, RecoveredSource, SourceRemains, recover_destination,
    recover_source,
};
use crate::cancel::Cancel;
use crate::cpu_time::CpuTime;
use crate::migration::{Cause, ErrorKind, GuestState, MigrationError, Phase, Side};
use crate::monitor::{CaughtObserver, DestinationMonitor, MonitorError, SourceMonitor};
use crate::record_file::{self, RecordFile, RecordFileError, StateDir};
use crate::report::{Observer, Outcome};
use crate::session::MAX_DIAL_PAUSE;
use crate::switchover::{DELIVERY_TIME, Ending, Ledger, Unserved};
use crate::transport::{Address, Security};
use crate::vmm::{AfterMove, DestinationVmm, ResumeReason, SourceVmm};

/// A migration that a process has left unsettled when it ended, at this side. Its record is locked: no other process settles it meanwhile.
///
/// ```no_run
/// # use sterna_engine::{cancel::Cancel, migration::Side, recovery::{Recovery, Remains}, transport::Security};
/// # fn settle(security: &Security) -> Result<(), Box<dyn std::error::Error>> {
/// for recovery in Recovery::unsettled("/var/lib/monitor/migrations")? {
///     let migration = recovery.migration();
///     let settled = match recovery.side() {
///         Side::Source => recovery.settle_source(security, Remains::Nothing, &Cancel::new(), &())?,
///         Side::Destination => recovery.settle_destination(security, Remains::Nothing, &Cancel::new(), &())?,
///     };
///     println!("migration {migration}: {settled:?}");
/// }
/// # Ok(())
/// # }
/// ```
pub struct Recovery {
    record: RecordFile,
    address: Address,
    fenced_peer: bool,
    give_up_after: Option<Duration>,
}

/// How long the other side is informed or answered once this one is settled.
const TELL_TIME: Duration = MAX_DIAL_PAUSE.saturating_add(Duration::from_secs(1));

/// What is left of the guest at this side. `V` is [`SourceVmm`] or [`DestinationVmm`].
pub enum Remains<'a, V: ?Sized> {
    /// Nothing: the guest ended with its process, as where its vCPUs were threads of that process.
    Nothing,
    /// The guest, paused as the migration had left it. At the destination: loaded completely, and never resumed.
    Paused(&'a mut V),
    /// The guest, which runs.
    Running(&'a mut V),
}

/// How a migration was settled at this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settled {
    /// The guest runs at the destination: at the source, the destination has confirmed it.
    RunsAtDestination,
    /// The guest runs at the source.
    RunsAtSource,
    /// Nothing of the guest is left here, and nothing is to be done here. At the source: nothing was decided; if the destination is
    /// prepared it has the only copy, and starts it once an operator asserts that the source is gone ([`Recovery::fenced_peer`] or
    /// [`Fence`](crate::destination::Fence)).
    NothingHere,
}

impl fmt::Debug for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let record = self.record.record();
        f.debug_struct("Recovery")
            .field("migration", &record.migration)
            .field("state", &record.state)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Recovery {
    /// Returns the migrations in `dir` that embedded monitors have left unsettled, with their records locked. Leaves out those on which a
    /// process is at work. A destination's that was aborted is among them for a week, since its source may ask for the outcome.
    ///
    /// # Errors
    /// The directory cannot be read, or other users could change its content.
    pub fn unsettled(dir: impl Into<StateDir>) -> Result<Vec<Self>, RecordFileError> {
        let dir = dir.into();
        let mut found = Vec::new();
        for record in record_file::unsettled(&dir)? {
            if record.mode != Mode::Embedded {
                continue;
            }
            match RecordFile::open(&dir, record.migration, record_file::Side::of(record.state)) {
                // It may have been settled before it was locked.
                Ok(record) if record.record().state.settled() => {}
                Ok(record) => found.push(Self::of(record)),
                Err(RecordFileError::Locked { .. } | RecordFileError::Missing { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    fn of(record: RecordFile) -> Self {
        let address = Address::from(&record.record().peer);
        Self { record, address, fenced_peer: false, give_up_after: None }
    }

    /// Returns the migration's id, which both sides' reports and records have.
    pub fn migration(&self) -> String {
        self.record.record().migration.to_string()
    }

    /// Returns the side of the migration that this process was.
    pub fn side(&self) -> Side {
        match self.record.record().state {
            RecordState::Source(_) => Side::Source,
            RecordState::Destination(_) => Side::Destination,
        }
    }

    /// Returns the destination's address: at the source where it is dialled, at the destination where it listened.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Sets another address than the record's: where the destination is dialled, or listens.
    #[must_use]
    pub fn at(mut self, address: impl Into<Address>) -> Self {
        self.address = address.into();
        self
    }

    /// Asserts that the other host is gone for good and its guest cannot run, now or later. With it a source that had given its guest to
    /// the destination resumes it, and a prepared destination starts it. Sterna cannot check the assertion: if it is wrong, two guests
    /// run.
    #[must_use]
    pub fn fenced_peer(mut self, fenced: bool) -> Self {
        self.fenced_peer = fenced;
        self
    }

    /// Sets how long the other side is waited for, where it must be asked or informed: by default 60 s at the source, without a limit at
    /// the destination. The recovery may be repeated.
    #[must_use]
    pub fn give_up_after(mut self, time: Option<Duration>) -> Self {
        self.give_up_after = time;
        self
    }

    /// Settles the migration at the source. Of `guest`, `resume` and `guest_moved` are called, on this thread.
    ///
    /// Dials the destination if it must learn the decision, so its own recovery may have to run at the same time.
    ///
    /// # Errors
    /// Nothing is settled, or the guest is lost: the error says where the guest is, and why. May be repeated.
    pub fn settle_source(
        self,
        security: &Security,
        guest: Remains<'_, dyn SourceVmm + '_>,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<Settled, MigrationError> {
        let RecordState::Source(state) = self.record.record().state else {
            return Err(self.wrong_side("destination", "settle_destination"));
        };
        let (time, cpu) = (self.give_up_after.unwrap_or(DELIVERY_TIME), CpuTime::default());
        let (left, vmm) = match guest {
            Remains::Nothing => (SourceGuest::Gone, None),
            Remains::Paused(vmm) => (SourceGuest::Completed, Some(vmm)),
            Remains::Running(vmm) => (SourceGuest::Running, Some(vmm)),
        };
        let monitor = vmm.map(|vmm| SourceMonitor::new(vmm, &cpu)).transpose().map_err(MigrationError::untouched)?;
        let observer = &CaughtObserver(observer);
        let mut remains = EmbeddedSource { monitor, guest: left };
        let recovered = recover_source(self.means(security, cancel, observer), state, left, time, &mut remains);
        let RecoveredSource { end, ending, ledger, left: _ } = recovered;
        use sterna_wire::switchover::SourceEnd as E;
        let settled = match end {
            E::Finished if ending.outcome == Outcome::DoesNotRun => None,
            E::Finished => Some(Settled::RunsAtDestination),
            E::Aborted { .. } => Some(Settled::RunsAtSource),
            E::GuestGone => Some(Settled::NothingHere),
            _ => None,
        };
        let failures = remains.monitor.as_ref().map_or(&[][..], SourceMonitor::failures);
        conclude(Side::Source, settled, ending, &ledger, cancel, failures)
    }

    /// Settles the migration at the destination. Of `guest`, `resume`, `guest_started` and `discard` are called, on this thread.
    ///
    /// Listens if only the source knows the decision, so the source's own recovery may have to run at the same time. Afterwards answers a
    /// source that asks, for a few seconds.
    ///
    /// # Errors
    /// Nothing is settled, or the guest is lost: the error says where the guest is, and why. May be repeated.
    pub fn settle_destination(
        self,
        security: &Security,
        guest: Remains<'_, dyn DestinationVmm + '_>,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<Settled, MigrationError> {
        let RecordState::Destination(state) = self.record.record().state else {
            return Err(self.wrong_side("source", "settle_source"));
        };
        let (wait, cpu) = (self.give_up_after, CpuTime::default());
        let (left, vmm) = match guest {
            Remains::Nothing => (DestinationGuest::Gone, None),
            Remains::Paused(vmm) => (DestinationGuest::Paused, Some(vmm)),
            Remains::Running(vmm) => (DestinationGuest::Running, Some(vmm)),
        };
        let monitor =
            vmm.map(|vmm| DestinationMonitor::new(vmm, &cpu)).transpose().map_err(MigrationError::not_accepted)?;
        let observer = &CaughtObserver(observer);
        let mut remains = EmbeddedDestination { monitor };
        let recovered = recover_destination(self.means(security, cancel, observer), state, left, wait, &mut remains);
        let RecoveredDestination { outcome, gave_up, mut ending, ledger } = recovered;
        use crate::switchover::DestinationOutcome::Machine;
        use sterna_wire::switchover::DestinationEnd as E;
        let settled = match outcome {
            Machine(E::Running) if ending.outcome == Outcome::DoesNotRun => None,
            Machine(E::Running) => Some(Settled::RunsAtDestination),
            Machine(E::Discarded { .. }) => Some(Settled::NothingHere),
            _ => None,
        };
        if gave_up == Some(GaveUp::Cancelled) {
            ending.outcome = Outcome::Cancelled;
        }
        let failures = remains.monitor.as_ref().map_or(&[][..], DestinationMonitor::failures);
        conclude(Side::Destination, settled, ending, &ledger, cancel, failures)
    }

    fn means<'a>(self, security: &Security, cancel: &'a Cancel, observer: &'a dyn Observer) -> Means<'a> {
        let Self { mut record, address, fenced_peer, .. } = self;
        record.amend(|record| record.fenced_peer |= fenced_peer);
        let security = Ok(security.clone());
        Means { record, fenced_peer, address, security, tell_time: TELL_TIME, cancel, observer }
    }

    fn wrong_side(&self, side: &str, method: &str) -> MigrationError {
        let cause = Cause::new(ErrorKind::Settings, format_args!("the record is the {side}'s: use {method}"));
        match self.side() {
            Side::Source => MigrationError::untouched(cause),
            Side::Destination => MigrationError::not_accepted(cause),
        }
    }
}

/// Returns how the migration is settled, provided that the record on the disk says so.
fn conclude(
    side: Side,
    settled: Option<Settled>,
    ending: Ending,
    ledger: &Ledger,
    cancel: &Cancel,
    failures: &[MonitorError],
) -> Result<Settled, MigrationError> {
    let aborted = RecordState::Destination(sterna_wire::switchover::DestinationState::Aborted);
    let durable = ledger.settled() || ledger.record().state == aborted;
    let Ending { outcome, guest, reason } = ending;
    match settled {
        Some(settled) if durable => Ok(settled),
        Some(settled) => {
            let why = ledger.unwritten().unwrap_or("the disk did not take it");
            let reason = format!("the migration is not settled: its record could not be written: {why}");
            let guest = match settled {
                Settled::RunsAtDestination => GuestState::BelongsToDestination,
                Settled::RunsAtSource => GuestState::RunsAtSource,
                Settled::NothingHere => GuestState::NotHere,
            };
            Err(MigrationError::new(side, Phase::Committed, guest, ErrorKind::Record, reason))
        }
        None => {
            let outcome = if cancel.is_cancelled() { Outcome::Cancelled } else { outcome };
            let reason = reason.unwrap_or_default();
            Err(MigrationError::ended((side, Phase::Committed, guest), outcome, reason, failures))
        }
    }
}

/// What is left of a source that embedded the library.
struct EmbeddedSource<'a> {
    monitor: Option<SourceMonitor<'a>>,
    guest: SourceGuest,
}

impl SourceRemains for EmbeddedSource<'_> {
    fn end_migration(&mut self) -> Result<SourceGuest, Reason> {
        Ok(self.guest)
    }

    fn resume(&mut self) -> Result<SourceGuest, Reason> {
        let Some(monitor) = &mut self.monitor else { return Ok(SourceGuest::Gone) };
        monitor
            .resume(ResumeReason::Failed)
            .map_err(|error| Reason::new(ErrorKind::Monitor, error).within("the monitor does not resume the guest"))?;
        Ok(SourceGuest::Running)
    }

    fn end_guest(&mut self, record: &Record) -> Result<SourceGuest, Reason> {
        let Some(monitor) = &mut self.monitor else { return Ok(SourceGuest::Gone) };
        let after = if record.does_not_run.is_some() { monitor.guest_does_not_run() } else { monitor.guest_moved() };
        match after {
            Ok(AfterMove::Kept) => Ok(SourceGuest::Completed),
            Ok(AfterMove::Ended) => Ok(SourceGuest::Gone),
            Ok(AfterMove::RunsHere) => Ok(SourceGuest::Running),
            Err(error) => Err(Reason::new(ErrorKind::Monitor, error)),
        }
    }

    fn unserved(&mut self) -> Unserved {
        match &self.monitor {
            None => Unserved::MonitorGone,
            Some(_) => Unserved::NoPages(Reason::other("the process that could read it has ended")),
        }
    }
}

/// What is left of a destination that embedded the library.
struct EmbeddedDestination<'a> {
    monitor: Option<DestinationMonitor<'a>>,
}

impl DestinationRemains for EmbeddedDestination<'_> {
    fn start_guest(&mut self) -> Result<DestinationGuest, Reason> {
        let Some(monitor) = &mut self.monitor else { return Ok(DestinationGuest::Gone) };
        monitor
            .resume()
            .map_err(|error| Reason::new(ErrorKind::Monitor, error).within("the monitor does not start the guest"))?;
        Ok(DestinationGuest::Running)
    }

    fn guest_started(&mut self) {
        if let Some(Err(error)) = self.monitor.as_mut().map(DestinationMonitor::guest_started) {
            tracing::warn!(%error, "after a recovery");
        }
    }

    fn why_not_running(&mut self) -> Option<String> {
        self.monitor.as_mut().and_then(DestinationMonitor::why_not_running)
    }

    fn discard(&mut self) -> Result<(), Reason> {
        let Some(monitor) = &mut self.monitor else { return Ok(()) };
        monitor
            .discard()
            .map_err(|error| Reason::new(ErrorKind::Monitor, error).within("the copy of the guest stays here"))
    }
}
