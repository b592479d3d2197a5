//! `sterna recover` at the source: the side that knows the decision.

use std::convert::Infallible;
use std::fmt::Display;
use std::time::Duration;

use sterna_engine::process;
use sterna_engine::session::{Backoff, DIAL_PAUSE, Redial, Session};
use sterna_engine::switchover::{
    DeliveryLimits, Reconnection, SourceDriver, SourceKernel, SourceSetup, Unserved, run_source,
};
use sterna_engine::transport::Address;
use sterna_wire::control::{ControlMessage, Mode};
use sterna_wire::switchover::{
    Record, RecordState, SourceAfter, SourceEnd, SourceEvent, SourceGuest, SourceState, SourceSwitchover,
};

use super::{
    CANCELLED, MAX_DIAL_PAUSE, Recovery, TELL_TIME, durable, restore_settings, security, unconnected_peer,
    unreachable_monitor,
};
use crate::gateway::{ErrorKind, GatewayError, qemu};
use crate::qmp::{Qmp, QmpError};

/// How long to dial the destination: `recover` may have to be started there first.
const DIAL_TIME: Duration = Duration::from_secs(60);

/// Settles the migration from a record in `state`.
pub(super) fn recover(recovery: Recovery<'_>, state: SourceState) -> Result<String, GatewayError> {
    let guest = guest_state(&recovery, state)?;
    tracing::info!(?state, ?guest, "recovering the source");
    let Recovery { options, cancel, observer, record, qmp, events, inbox } = recovery;
    let (machine, first) = SourceSwitchover::recover(Some(state), guest, options.fenced_peer);
    let session = session_of(record.record());
    let kernel = SourceKernel::new(SourceSetup {
        machine,
        peer: unconnected_peer(),
        reconnection: Reconnection {
            to: Address::from(&record.record().peer),
            security: security(options),
            redial: Redial::with(Backoff::new(DIAL_PAUSE).up_to(MAX_DIAL_PAUSE)),
        },
        on_connection: events.on_connection(),
        session,
        ledger: record.into(),
        events,
        limits: DeliveryLimits { decision: DIAL_TIME, abort: TELL_TIME },
        cancel,
        observer,
    });
    let mut driver = Driver { kernel, qmp };
    let end = run_source(&mut driver, &inbox, first);
    driver.kernel.hang_up();
    driver.settled(&end)
}

/// Returns the state of the source's guest. A settled migration needs none.
fn guest_state(recovery: &Recovery<'_>, state: SourceState) -> Result<SourceGuest, GatewayError> {
    let guest = match &recovery.qmp {
        None if RecordState::Source(state).settled() => SourceGuest::Running,
        _ if recovery.qemu_gone()? => SourceGuest::Gone,
        Some(qmp) => qemu::recorded_state(qmp, recovery.record.record()).map_err(GatewayError::new)?,
        None => SourceGuest::Gone,
    };
    if let (SourceState::Started | SourceState::Aborted, Some(qmp)) = (state, &recovery.qmp) {
        refuse_if_not_ours(qmp, recovery.record.record(), guest)?;
    }
    Ok(guest)
}

/// Fails if QEMU has an active or completed migration that cannot be the record's. Ending that migration, or resuming its guest,
/// could make the guest run on two hosts.
fn refuse_if_not_ours(qmp: &Qmp, record: &Record, guest: SourceGuest) -> Result<(), GatewayError> {
    let permitted = record.completion_permitted || record.mode == Mode::Direct;
    let whose = match guest {
        SourceGuest::Completed if !permitted => "was moved away by another migration; end this QEMU if it runs there",
        SourceGuest::Migrating if !permitted && qemu::goes_on(qmp).map_err(GatewayError::new)? => {
            "is being moved by another migration; wait for its end or cancel it, then try again"
        }
        _ => return Ok(()),
    };
    Err(GatewayError::new(format!("the guest {whose}. Nothing was touched")))
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

struct Driver<'a> {
    kernel: SourceKernel<'a, Infallible>,
    qmp: Option<Qmp>,
}

impl<'a> SourceDriver<'a> for Driver<'a> {
    type Event = Infallible;

    fn kernel(&mut self) -> &mut SourceKernel<'a, Infallible> {
        &mut self.kernel
    }

    fn start_migration(&mut self) -> Result<(), String> {
        Err("a recovery starts no migration".into())
    }

    fn complete(&mut self) -> Result<Option<SourceGuest>, String> {
        Err("a recovery completes no migration".into())
    }

    fn end_migration(&mut self) -> Result<SourceGuest, String> {
        let record = self.kernel.ledger.record();
        let qmp = self.qmp.as_ref().ok_or_else(|| unreachable_monitor(record).to_string())?;
        // In direct mode, the tracking of the guest's writes has ended with the process that died.
        let direct = record.mode == Mode::Direct;
        match if direct { qemu::recorded_state(qmp, record) } else { qemu::end_migration(qmp) } {
            Err(QmpError::Closed { .. }) if qemu::has_ended(record.monitor_process) => Ok(SourceGuest::Gone),
            ended => ended.map_err(failed("the source QEMU does not end its migration")),
        }
    }

    fn resume(&mut self) -> Result<SourceGuest, String> {
        let record = self.kernel.ledger.record();
        let qmp = self.qmp.as_ref().ok_or_else(|| unreachable_monitor(record).to_string())?;
        qemu::cont(qmp).map_err(failed("the source QEMU does not resume the guest"))?;
        Ok(SourceGuest::Running)
    }

    fn guest_stays(&mut self) {
        restore_settings(self.qmp.as_ref(), self.kernel.ledger.record(), self.kernel.observer);
        self.qmp.iter().for_each(qemu::announce);
    }

    fn end_guest(&mut self) -> Result<SourceGuest, String> {
        match &self.qmp {
            Some(qmp) => qemu::end_source(qmp, self.kernel.ledger.record()),
            None => Ok(SourceGuest::Gone),
        }
    }

    fn serve_pages(&mut self) -> Result<(), Unserved> {
        match self.kernel.ledger.record().monitor_process {
            Some(qemu) if !process::lives(qemu) => Err(Unserved::MonitorGone),
            _ => Err(Unserved::NoPages("the process that could read it has ended".into())),
        }
    }

    fn receive(&mut self, message: ControlMessage) -> Option<SourceEvent> {
        tracing::debug!(?message, "a message about a migration that is being recovered");
        None
    }

    fn handle(&mut self, event: Infallible) -> Option<SourceEvent> {
        match event {}
    }

    fn too_late_to_cancel(&mut self) {
        self.kernel.give_up(CANCELLED);
    }
}

/// Returns a closure that puts `what` before an error's text.
fn failed<E: Display>(what: &str) -> impl Fn(E) -> String {
    move |error| format!("{what}: {error}")
}

impl Driver<'_> {
    /// Returns the sentence about how the migration is settled.
    fn settled(&self, end: &SourceEnd) -> Result<String, GatewayError> {
        let mut text = self.sentence(end)?;
        text += &self.warning(end).map(|warning| format!("; WARNING: {warning}")).unwrap_or_default();
        durable(&self.kernel.ledger, text)
    }

    /// Returns what the operator must know about the source's QEMU.
    fn warning(&self, end: &SourceEnd) -> Option<String> {
        let record = self.kernel.ledger.record();
        match end {
            // A record without a QEMU belongs to a monitor that embeds the library and decides itself.
            SourceEnd::Finished if !record.monitor_socket.is_empty() => {
                // An earlier run may have failed to end this QEMU. If its process is not known, only this run's failure counts.
                let left = self.kernel.left();
                let kept = left.is_some() || record.source_after == SourceAfter::Keep;
                let lives = record.monitor_process.map_or(kept, process::lives);
                lives.then(|| qemu::kept_warning(record.monitor_process, record.source_after, left))
            }
            SourceEnd::Aborted { .. } => self.held_migration(),
            _ => None,
        }
    }

    /// Returns why QEMU can begin no other migration, if it cannot.
    fn held_migration(&self) -> Option<String> {
        self.qmp.as_ref().and_then(|qmp| qemu::clean_up(qmp).err())
    }

    /// Returns the sentence about `end`.
    ///
    /// # Errors
    /// Why the migration is not settled, or the guest is lost.
    fn sentence(&self, end: &SourceEnd) -> Result<String, GatewayError> {
        let failed = |kind, text: String| Err(GatewayError::new(text).of(kind));
        match end {
            SourceEnd::Finished => Ok("the guest runs at the destination".into()),
            SourceEnd::Aborted { .. } => Ok("the guest runs here, at the source".into()),
            SourceEnd::NotStarted => Ok("nothing was begun; the guest was not touched".into()),
            SourceEnd::GuestGone => {
                Ok("the source's QEMU has ended, and nothing of the guest is left here: if the destination is prepared, \
                    `sterna recover --fenced-peer` there starts the guest from its copy"
                    .into())
            }
            SourceEnd::DestinationLost { never_ran, reason } => failed(
                ErrorKind::Lost,
                format!(
                    "the guest was given to the destination, whose QEMU is gone ({reason}); it {} there. \
                     `sterna recover --fenced-peer` here lets it go on from where it stopped",
                    if *never_ran { "never ran" } else { "may have run, and written to shared disks," }
                ),
            ),
            SourceEnd::MemoryLost { reason } => failed(
                ErrorKind::Lost,
                format!(
                    "the guest was given to the destination, where it can never have all of its memory ({reason}): it is lost there. End \
                     its QEMUs on both hosts and start it anew from its disks. The copy here is older than what the guest did there; once \
                     the QEMU there was ended, `sterna recover --fenced-peer` here lets that copy go on"
                ),
            ),
            SourceEnd::Undelivered { reason } => failed(
                if reason == CANCELLED { ErrorKind::Cancelled } else { ErrorKind::Unreachable },
                format!(
                    "the guest belongs to the destination, but {} was not informed: {reason}; run `sterna recover {}` there at the same \
                     time; only if that host is gone for good, add --fenced-peer here",
                    self.kernel.to(),
                    self.kernel.session.id
                ),
            ),
            SourceEnd::Unserved { reason } => failed(
                ErrorKind::Lost,
                format!(
                    "the guest was given to the destination, and part of its memory is only in its QEMU here, which no process can send any \
                     more ({reason}): it waits there wherever it touches that part, and is lost. End its QEMUs on both hosts and start it \
                     anew from its disks; never resume the QEMU here while the one there lives"
                ),
            ),
            SourceEnd::Stuck { reason } => {
                failed(ErrorKind::Failed, format!("{reason}; put that right and run this again"))
            }
            SourceEnd::Conflict => failed(
                ErrorKind::Failed,
                "the guest runs here although it was given to the destination: somebody started it by hand. If it runs there \
                 too, stop one of the two"
                    .into(),
            ),
        }
    }
}
