//! `sterna recover` at the source: the side that knows the decision.

use sterna_engine::cancel::Cancel;
use sterna_engine::process;
use sterna_engine::recovery::{RecoveredSource, SourceRemains, recover_source};
use sterna_engine::report::Observer;
use sterna_engine::switchover::{DELIVERY_TIME, Unserved};
use sterna_wire::control::Mode;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{Record, RecordState, SourceAfter, SourceEnd, SourceGuest, SourceState};

use super::{Recovery, durable, guest_here, restore_settings, unreachable_monitor};
use crate::gateway::storage::{Patience, Storage};
use crate::gateway::{GatewayError, qemu};
use crate::qmp::{Qmp, QmpError};

/// Settles the migration from a record in `state`.
pub(super) fn recover(recovery: Recovery<'_>, state: SourceState) -> Result<String, GatewayError> {
    let guest = guest_state(&recovery, state)?;
    let (record, cancel, observer) = (recovery.record.record().clone(), recovery.cancel, recovery.observer);
    let (means, qmp) = recovery.means();
    let mut remains = Remains { record, qmp, cancel, observer };
    let recovered = recover_source(means, state, guest, DELIVERY_TIME, &mut remains);
    remains.settled(&recovered)
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

/// The source's QEMU, if it lives.
struct Remains<'a> {
    record: Record,
    qmp: Option<Qmp>,
    cancel: &'a Cancel,
    observer: &'a dyn Observer,
}

impl SourceRemains for Remains<'_> {
    fn end_migration(&mut self) -> Result<SourceGuest, Reason> {
        let record = &self.record;
        let qmp = self.qmp.as_ref().ok_or_else(|| Reason::new(ErrorKind::Monitor, unreachable_monitor(record)))?;
        // In direct mode, the tracking of the guest's writes has ended with the process that died.
        let direct = record.mode == Mode::Direct;
        match if direct { qemu::recorded_state(qmp, record) } else { qemu::end_migration(qmp) } {
            Err(QmpError::Closed { .. }) if qemu::has_ended(record.monitor_process) => Ok(SourceGuest::Gone),
            ended => ended.map_err(qemu::failed("the source QEMU does not end its migration")),
        }
    }

    fn resume(&mut self) -> Result<SourceGuest, Reason> {
        let qmp =
            self.qmp.as_ref().ok_or_else(|| Reason::new(ErrorKind::Monitor, unreachable_monitor(&self.record)))?;
        match Storage::of(qmp, self.cancel, self.observer).cont(qmp, Patience::UntilCancelled) {
            Ok(()) => Ok(SourceGuest::Running),
            Err(_) if qemu::monitor_has_ended(qmp, self.record.monitor_process) => Ok(SourceGuest::Gone),
            Err(error) => Err(error.into_reason("the source QEMU does not resume the guest")),
        }
    }

    fn guest_stays(&mut self) {
        restore_settings(self.qmp.as_ref(), &self.record, self.observer);
        self.qmp.iter().for_each(qemu::announce);
    }

    fn end_guest(&mut self, record: &Record) -> Result<SourceGuest, Reason> {
        match &self.qmp {
            Some(qmp) => {
                let ended = qemu::end_source(qmp, record);
                ended.map_err(|text| Reason::new(ErrorKind::Monitor, text))
            }
            None => Ok(SourceGuest::Gone),
        }
    }

    fn unserved(&mut self) -> Unserved {
        match self.record.monitor_process {
            Some(qemu) if !process::lives(qemu) => Unserved::MonitorGone,
            _ => Unserved::NoPages(Reason::other("the process that could read it has ended")),
        }
    }
}

impl Remains<'_> {
    /// Returns the sentence about how the migration is settled.
    fn settled(&self, recovered: &RecoveredSource) -> Result<String, GatewayError> {
        if let Some(why) =
            recovered.ledger.record().does_not_run.as_ref().filter(|_| recovered.end == SourceEnd::Finished)
        {
            durable(&recovered.ledger, "the guest does not run at the destination".into())?;
            return Err(GatewayError::does_not_run(why, qemu::does_not_run_warning(self.record.monitor_process)));
        }
        let mut text = self.sentence(&recovered.end)?;
        text += &self.warning(recovered).map(|warning| format!("; WARNING: {warning}")).unwrap_or_default();
        durable(&recovered.ledger, text)
    }

    /// Returns what the operator must know about the source's QEMU.
    fn warning(&self, recovered: &RecoveredSource) -> Option<String> {
        let record = &self.record;
        match recovered.end {
            // A record without a QEMU belongs to a monitor that embeds the library and decides itself.
            SourceEnd::Finished if !record.monitor_socket.is_empty() => {
                // An earlier run may have failed to end this QEMU. If its process is not known, only this run's failure counts.
                let left = recovered.left.as_deref();
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

    /// Returns the sentence about a guest that stays here. It may have been stopped by another program, or by itself. Of a migration that was
    /// settled before, no QEMU is asked: what became of its guest since is not known.
    fn guest_that_stays(&self) -> String {
        guest_here("source", self.qmp.as_ref())
    }

    /// Returns the sentence about `end`.
    ///
    /// # Errors
    /// Why the migration is not settled, or the guest is lost.
    fn sentence(&self, end: &SourceEnd) -> Result<String, GatewayError> {
        let lost = |text: String| Err(GatewayError::lost(text));
        match end {
            SourceEnd::Finished => Ok("the guest runs at the destination".into()),
            SourceEnd::Aborted { .. } => Ok(self.guest_that_stays()),
            SourceEnd::NotStarted => Ok("nothing was begun; the guest was not touched".into()),
            // The guest was never paused for its last round.
            SourceEnd::GuestGone if self.record.mode == Mode::Direct && !self.record.pausing => Ok(
                "the source's QEMU has ended while its guest ran here (it may have shut itself down), and nothing is to be recovered: the \
                    destination had not received all of it"
                    .into(),
            ),
            SourceEnd::GuestGone => Ok(
                "the source's QEMU has ended, and nothing of the guest is left here: if the destination is prepared, \
                    `sterna recover --fenced-peer` there starts the guest from its copy"
                    .into(),
            ),
            SourceEnd::DestinationLost { never_ran, reason } => lost(format!(
                "the guest was given to the destination, whose QEMU is gone ({reason}); it {} there. \
                     `sterna recover --fenced-peer` here lets it go on from where it stopped",
                if *never_ran { "never ran" } else { "may have run, and written to shared disks," }
            )),
            SourceEnd::MemoryLost { reason } => lost(format!(
                "the guest was given to the destination, where it can never have all of its memory ({reason}): it is lost there. End \
                     its QEMUs on both hosts and start it anew from its disks. The copy here is older than what the guest did there; once \
                     the QEMU there was ended, `sterna recover --fenced-peer` here lets that copy go on"
            )),
            SourceEnd::Undelivered { reason } => Err(GatewayError::of_kind(
                if reason.kind == ErrorKind::Cancelled { ErrorKind::Cancelled } else { ErrorKind::Network },
                format_args!(
                    "the guest belongs to the destination, but {} was not informed: {reason}; run `sterna recover {}` there at the same \
                     time; only if that host is gone for good, add --fenced-peer here",
                    self.record.peer, self.record.migration
                ),
            )),
            SourceEnd::Unserved { reason } => lost(format!(
                "the guest was given to the destination, and part of its memory is only in its QEMU here, which no process can send any \
                     more ({reason}): it waits there wherever it touches that part, and is lost. End its QEMUs on both hosts and start it \
                     anew from its disks; never resume the QEMU here while the one there lives"
            )),
            SourceEnd::Stuck { reason } => {
                let text = format_args!("{reason}; put that right and run this again");
                Err(GatewayError::new(text).of(reason.kind))
            }
            SourceEnd::Conflict => Err(GatewayError::new(
                "the guest runs here although it was given to the destination: somebody started it by hand. If it runs there \
                 too, stop one of the two",
            )),
        }
    }
}
