//! `sterna recover` at the destination: listens for the source, where only the source knows the decision.

use sterna_engine::cancel::Cancel;
use sterna_engine::process;
use sterna_engine::recovery::{DestinationRemains, GaveUp, RecoveredDestination, recover_destination};
use sterna_engine::report::Observer;
use sterna_engine::switchover::DestinationOutcome;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationEnd, DestinationGuest, DestinationState, Record, RecordState};

use super::{Recovery, durable, guest_here, restore_settings};
use crate::gateway::qemu::{self, QUIT_TIME};
use crate::gateway::storage::{Patience, Storage};
use crate::gateway::{GatewayError, first_moment};
use crate::qmp::{Meaning, Qmp};

/// Settles the migration from a record in `state`.
pub(super) fn recover(recovery: Recovery<'_>, state: DestinationState) -> Result<String, GatewayError> {
    let guest = guest_state(&recovery, state)?;
    let (record, wait) = (recovery.record.record().clone(), recovery.options.wait);
    let (cancel, observer) = (recovery.cancel, recovery.observer);
    let (means, qmp) = recovery.means();
    let mut remains = Remains { record, qmp, cancel, observer };
    let RecoveredDestination { outcome, gave_up, ledger, .. } =
        recover_destination(means, state, guest, wait, &mut remains);
    match outcome {
        DestinationOutcome::Machine(DestinationEnd::Running) if ledger.record().does_not_run.is_some() => {
            durable(&ledger, "the guest does not run here".into())?;
            let why = ledger.record().does_not_run.as_deref().unwrap_or_default();
            Err(GatewayError::does_not_run(why, "its source was kept, paused"))
        }
        DestinationOutcome::Machine(end) => {
            sentence(&end, ledger.record(), remains.qmp.as_ref()).and_then(|text| durable(&ledger, text))
        }
        DestinationOutcome::GivenUp(reason) if gave_up == Some(GaveUp::NoListener) => {
            Err(GatewayError::new(&reason).of(reason.kind))
        }
        DestinationOutcome::GivenUp(reason) => Err(GatewayError::of_kind(reason.kind, reason)),
    }
}

/// Returns the state of the destination's guest. A settled migration needs none.
fn guest_state(recovery: &Recovery<'_>, state: DestinationState) -> Result<DestinationGuest, GatewayError> {
    let lives = || recovery.record.record().monitor_process.is_some_and(process::lives);
    let qmp = match &recovery.qmp {
        None if RecordState::Destination(state).settled() => return Ok(DestinationGuest::Running),
        // A QEMU that waits for memory need not answer.
        qmp if state.lacks_memory() && lives() => {
            let runs = qmp.as_ref().is_some_and(|qmp| qmp.run_state().is_ok_and(|state| state.has_executed()));
            return Ok(if runs { DestinationGuest::Running } else { DestinationGuest::Paused });
        }
        _ if recovery.qemu_gone()? => return Ok(DestinationGuest::Gone),
        Some(qmp) => qmp,
        None => return Ok(DestinationGuest::Gone),
    };
    let state = qmp.run_state().map_err(GatewayError::new)?;
    match state.meaning() {
        Meaning::Incoming => Ok(DestinationGuest::Incoming),
        // Also a guest that was started and has stopped by itself since, for example because it was switched off.
        _ if state.has_executed() => Ok(DestinationGuest::Running),
        Meaning::Stopped if state.name() == "paused" => Ok(DestinationGuest::Paused),
        _ => Err(GatewayError::new(format!(
            "QEMU is in the state {state}, in which no migration of Sterna leaves it: another program has changed it, and nothing was \
             touched"
        ))),
    }
}

/// The destination's QEMU, if it lives.
struct Remains<'a> {
    record: Record,
    qmp: Option<Qmp>,
    cancel: &'a Cancel,
    observer: &'a dyn Observer,
}

impl DestinationRemains for Remains<'_> {
    fn start_guest(&mut self) -> Result<DestinationGuest, Reason> {
        let Some(qmp) = &self.qmp else { return Ok(DestinationGuest::Gone) };
        match Storage::of(qmp, self.cancel, self.observer).cont(qmp, Patience::UntilCancelled) {
            Ok(()) => Ok(DestinationGuest::Running),
            Err(_) if qemu::monitor_has_ended(qmp, self.record.monitor_process) => Ok(DestinationGuest::Gone),
            Err(error) => Err(error.into_reason("QEMU does not start the guest")),
        }
    }

    fn guest_started(&mut self) {
        self.qmp.iter().for_each(qemu::announce);
    }

    fn why_not_running(&mut self) -> Option<String> {
        first_moment::why_not_running(self.qmp.as_ref()?, self.record.monitor_process)
    }

    fn runs(&mut self) {
        restore_settings(self.qmp.as_ref(), &self.record, self.observer);
    }

    fn discard(&mut self) -> Result<(), Reason> {
        let recorded = self.record.monitor_process;
        match (&self.qmp, recorded) {
            (Some(qmp), _) => {
                qemu::quit(qmp, recorded, QUIT_TIME).map_err(|text| Reason::new(ErrorKind::Monitor, text))
            }
            (None, Some(qemu_process)) if process::lives(qemu_process) => {
                let text = qemu::must_be_ended(qemu_process, "its monitor cannot be reached");
                Err(Reason::new(ErrorKind::Monitor, text))
            }
            (None, _) => Ok(()),
        }
    }
}

/// Returns the sentence about `end`.
///
/// # Errors
/// Why the migration is not settled, or the guest is lost.
fn sentence(end: &DestinationEnd, record: &Record, qmp: Option<&Qmp>) -> Result<String, GatewayError> {
    match end {
        DestinationEnd::Running => Ok(guest_here("destination", qmp)),
        DestinationEnd::Discarded { reason } => Ok(format!("the copy here was discarded ({reason})")),
        DestinationEnd::Lost { reason } => Err(GatewayError::lost(format_args!(
            "the guest was given to this host, but its QEMU is gone ({reason}); whether it has run here, or has shut itself down, is not known. \
                 If it has not, `sterna recover --fenced-peer` at the source lets it go on from where it stopped there; if it has, that copy \
                 is older than its disks: start it anew from these"
        ))),
        DestinationEnd::MemoryLost { .. } => Err(GatewayError::lost(memory_lost(record))),
        DestinationEnd::Stuck { reason } => {
            let text = format_args!("{reason}; put that right and run this again");
            Err(GatewayError::new(text).of(reason.kind))
        }
        DestinationEnd::Conflict => Err(GatewayError::new(
            "the record and QEMU contradict each other: somebody else has started or restarted the guest here",
        )),
    }
}

/// Returns the sentence about a guest of which only the process that died could have placed the rest of its memory.
fn memory_lost(record: &Record) -> String {
    let next = match record.state {
        RecordState::Destination(DestinationState::RunningIncomplete | DestinationState::Running) => {
            "The guest has run here, and what its source has is older: start it anew from its disks, as after a power failure"
        }
        _ => "Then run this again: without its QEMU this side reports to the source that the guest is lost here",
    };
    let (process, kill) = match record.monitor_process {
        Some(qemu) => (format!(" (process {})", qemu.pid), format!("kill -KILL {}; ", qemu.pid)),
        None => Default::default(),
    };
    format!(
        "part of the guest's memory had not arrived (post-copy) when `sterna receive` ended, and nothing can bring it now: whatever in \
         QEMU{process} touches it waits for good; it never reads zeros in its place. The guest is lost here: end that QEMU ({kill}QMP \
         may not answer). {next}"
    )
}
