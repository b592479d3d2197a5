//! `sterna recover`: settles a migration from its record, after a crash in the commit window.
//!
//! The drivers are the engine's (`sterna_engine::recovery`), as for a monitor that embeds the library. This module has what is QEMU's:
//! which QEMU the record means, the state of its guest, the actions on it, and the sentences for the operator.

mod destination;
mod source;

use std::time::Duration;

use serde::Deserialize;
use sterna_engine::cancel::Cancel;
use sterna_engine::process;
use sterna_engine::record_file::{RecordFile, RecordFileError, Side};
use sterna_engine::recovery::Means;
use sterna_engine::report::Observer;
use sterna_engine::switchover::Ledger;
use sterna_engine::transport::{Address, Security};
use sterna_wire::control::Mode;
use sterna_wire::reason::ErrorKind;
use sterna_wire::switchover::{DestinationState, ProcessIdentity, Record, RecordState, SourceState};

use super::claim::Claim;
use super::fault::WithFaultPoints;
use super::sockets::SocketPlace;
use super::{GatewayError, Monitor, RecoverOptions, SocketDirectory, direct, qemu};
use crate::qmp::{Qmp, QmpError};
use crate::settings::Values;

/// How long a side that is settled tries to report that to the other side, which can ask later: `send` dials at least every second.
const TELL_TIME: Duration = Duration::from_secs(3);

/// Settles a migration at this side. Returns a sentence that describes the outcome.
///
/// # Errors
/// Why the migration is not settled and what to do next. `recover` may be repeated.
pub fn recover(options: &RecoverOptions, cancel: &Cancel, observer: &dyn Observer) -> Result<String, GatewayError> {
    let mut record = open_record(options)?;
    record.amend(|record| record.fenced_peer |= options.fenced_peer);
    let state = actual_state(record.record());
    // A settled migration needs no QEMU, which may be in use for something else by now.
    let qmp = if state.settled() { None } else { qemu_of(record.record(), cancel, observer)? };
    let _claim = match (&qmp, record.record().monitor_process) {
        // A QEMU that waits for memory need not answer.
        (None, _) if !lacks_memory(state) => None,
        (_, Some(process)) => Some(Claim::of_process(process).map_err(GatewayError::refused)?),
        (Some(qmp), None) => Claim::of(qmp).map_err(GatewayError::refused)?,
        (None, None) => None,
    };
    // Remove the sockets that the dead process left. Those in another --socket-dir are removed by the next migration.
    if let Ok(place) = SocketPlace::find(&SocketDirectory::Temporary, qmp.as_ref().and_then(Qmp::peer_pid)) {
        place.remove_stale();
    }
    let observer = &WithFaultPoints(observer);
    let recovery = Recovery { options, cancel, observer, record, qmp };
    match state {
        RecordState::Source(state) => source::recover(recovery, state),
        RecordState::Destination(state) => destination::recover(recovery, state),
    }
}

/// Opens the record of the chosen side, or of the only side that this host has.
fn open_record(options: &RecoverOptions) -> Result<RecordFile, GatewayError> {
    let open = |side| RecordFile::open(&options.state_dir, options.id, side);
    if let Some(side) = options.side {
        return open(side).map_err(GatewayError::refused);
    }
    match (open(Side::Source), open(Side::Destination)) {
        (Err(RecordFileError::Missing { .. }), other) | (other, Err(RecordFileError::Missing { .. })) => {
            other.map_err(GatewayError::refused)
        }
        _ => Err(GatewayError::new("this host has the records of both sides: say which with --side")),
    }
}

/// Returns the state from which a destination is recovered. Whether memory is missing (post-copy) is seen in its QEMU: the record of an
/// older sterna does not say so, and the last page may have been placed just before that could be written.
fn actual_state(record: &Record) -> RecordState {
    use DestinationState as D;
    let RecordState::Destination(state) = record.state else { return record.state };
    let Some(qemu) = record.monitor_process.filter(|qemu| record.mode == Mode::Direct && process::lives(*qemu)) else {
        return record.state;
    };
    // What cannot be seen changes nothing.
    let Ok(waits) = direct::waits_for_memory(qemu) else { return record.state };
    RecordState::Destination(match state {
        D::Prepared if waits => D::PreparedIncomplete,
        D::Committed if waits => D::CommittedIncomplete,
        D::Running if waits => D::RunningIncomplete,
        D::RunningIncomplete if !waits => D::Running,
        state => state,
    })
}

/// Returns whether part of the guest's memory had not arrived when its destination died: nothing can bring that part now.
fn lacks_memory(state: RecordState) -> bool {
    matches!(state, RecordState::Destination(state) if state.lacks_memory())
}

/// Connects to the QEMU of the record; none if it has ended, or if its socket leads to another QEMU. If the record does not know the process,
/// that is not seen. A QEMU that waits for the storage of its disks is waited for.
///
/// # Errors
/// The wait was cancelled.
fn qemu_of(record: &Record, cancel: &Cancel, observer: &dyn Observer) -> Result<Option<Qmp>, GatewayError> {
    let mut noted = false;
    loop {
        if record.monitor_process.is_some_and(|identity| !process::lives(identity)) {
            return Ok(None);
        }
        match Monitor::of_record(&record.monitor_socket).connect() {
            Ok(qmp) => {
                let same = record.monitor_process.is_none_or(|recorded| qemu::is_behind(&qmp, recorded));
                return Ok(same.then_some(qmp));
            }
            // The monitor has greeted this process: it serves no other client, and only QEMU's main loop does not answer.
            Err(QmpError::Timeout { .. }) if cancel.is_cancelled() => {
                let text =
                    "cancelled while QEMU's monitor did not answer; nothing was touched, and this can be run again";
                return Err(GatewayError::of_kind(ErrorKind::Cancelled, text));
            }
            // Its main loop may wait for a page that only the source has.
            Err(QmpError::Timeout { .. }) if lacks_memory(actual_state(record)) => return Ok(None),
            Err(error @ QmpError::Timeout { .. }) => {
                if !std::mem::replace(&mut noted, true) {
                    observer.note(&format!(
                        "waiting for QEMU's monitor ({}): {error}{}",
                        record.monitor_socket,
                        way_out(record)
                    ));
                }
            }
            Err(error) => {
                tracing::debug!(%error, "connecting to the QEMU of the record");
                return Ok(None);
            }
        }
    }
}

/// Returns what an operator can do about a QEMU that never answers, where its guest is not lost by that.
fn way_out(record: &Record) -> String {
    match (record.state, record.monitor_process) {
        (RecordState::Source(SourceState::Committed), Some(ProcessIdentity { pid, .. })) => format!(
            ". Its guest belongs to the destination: if it never answers, end it (kill -KILL {pid}), and this goes on"
        ),
        _ => String::new(),
    }
}

/// The values from which either side's driver is made.
struct Recovery<'a> {
    options: &'a RecoverOptions,
    cancel: &'a Cancel,
    observer: &'a dyn Observer,
    record: RecordFile,
    /// The record's QEMU, if it lives.
    qmp: Option<Qmp>,
}

impl<'a> Recovery<'a> {
    /// Returns what the engine's driver needs, and the record's QEMU.
    fn means(self) -> (Means<'a>, Option<Qmp>) {
        let Self { options, cancel, observer, record, qmp } = self;
        let address = Address::from(&record.record().peer);
        let security = security(options);
        let (fenced_peer, tell_time) = (options.fenced_peer, TELL_TIME);
        (Means { record, fenced_peer, address, security, tell_time, cancel, observer }, qmp)
    }

    /// Returns whether the record's QEMU has ended.
    ///
    /// # Errors
    /// QEMU lives but cannot be reached, or that is not known.
    fn qemu_gone(&self) -> Result<bool, GatewayError> {
        let record = self.record.record();
        match (&self.qmp, record.monitor_process) {
            (Some(_), _) => Ok(false),
            (None, Some(identity)) if process::lives(identity) => Err(unreachable_monitor(record)),
            (None, Some(_)) => Ok(true),
            // A socket that no process serves shows nothing: the process that served it need not have been QEMU.
            (None, None) => Err(unknown_monitor(record)),
        }
    }
}

/// Returns the error for a monitor that lives but cannot be reached.
fn unreachable_monitor(record: &Record) -> GatewayError {
    if record.monitor_socket.is_empty() {
        return GatewayError::new(format!(
            "the migration was embedded in process {}, which lives and has the guest: let it resume the guest or end it, \
             then run this again",
            record.pid
        ));
    }
    let (socket, process) = (&record.monitor_socket, record.monitor_process);
    GatewayError::new(match process.filter(|qemu| process::is_stopped(qemu.pid)) {
        Some(ProcessIdentity { pid, .. }) => format!(
            "QEMU (process {pid}) is stopped (by SIGSTOP, for instance), so that its QMP socket {socket} does not answer: let it go on \
             (kill -CONT {pid}), then run this again"
        ),
        None => format!(
            "QEMU's QMP socket {socket} does not answer although QEMU{} lives: is another program connected to it, or does it lead to another \
             QEMU?",
            process.map_or_else(String::new, |qemu| format!(" (process {})", qemu.pid))
        ),
    })
}

/// Returns the error for a monitor that does not answer and whose process was never known.
fn unknown_monitor(record: &Record) -> GatewayError {
    let (socket, id, peer) = (&record.monitor_socket, record.migration, &record.peer);
    let ended = match record.state {
        RecordState::Source(_) => format!(
            "Only if that shows that QEMU has ended, nothing of the guest is left here, and `sterna recover {id} --fenced-peer` at the \
             destination ({peer}) starts a guest that is prepared there"
        ),
        RecordState::Destination(_) => format!(
            "Only if that shows that QEMU has ended, the guest is lost here, and `sterna recover {id} --fenced-peer` at the source lets it go \
             on there"
        ),
    };
    GatewayError::new(format!(
        "it cannot be known whether QEMU lives, and its guest with it: its monitor {socket} does not answer, and it is not known which \
         process QEMU is (another program forwarded its monitor, or its process could not be seen). Let {socket} lead to QEMU's monitor \
         again, and run this again: nothing is settled yet. If it cannot, look for QEMU's process on this host (`ps`, `virsh list`). {ended}; \
         if QEMU lives, the guest would then run twice"
    ))
}

/// Returns how connections to the other host are secured.
///
/// # Errors
/// The options do not say.
fn security(options: &RecoverOptions) -> Result<Security, String> {
    options.security.clone().ok_or_else(|| {
        "the other host must be asked: give --tls DIR (with --allow NAME on the host that received) or --insecure"
            .into()
    })
}

/// Returns the sentence about a guest that is at this side. Only of a guest that executes it says that it runs. Without a QEMU the migration was
/// settled before.
fn guest_here(side: &str, qmp: Option<&Qmp>) -> String {
    let Some(qmp) = qmp else {
        return format!("the migration was settled before: the guest was here, at the {side}, then");
    };
    if let Some(end) = qemu::ended_by_itself(qmp) {
        return format!("the guest is here, at the {side}, and has ended by itself: {end}");
    }
    match qmp.run_state().map(|state| (state.why_stopped(), state)) {
        Ok((Some(why), state)) => format!("the guest is here, at the {side}, and does not run (QEMU: {state}): {why}"),
        Ok((None, _)) => format!("the guest runs here, at the {side}"),
        Err(error) => format!("the guest is here, at the {side}; its QEMU does not say whether it runs: {error}"),
    }
}

/// Returns `text` if the record on the disk is settled; else an error.
fn durable(ledger: &Ledger, text: String) -> Result<String, GatewayError> {
    let state = ledger.record().state;
    if state.settled() || state == RecordState::Destination(DestinationState::Aborted) {
        return Ok(text);
    }
    let why = ledger.unwritten().unwrap_or("the disk did not take it");
    Err(GatewayError::new(format!(
        "{text}; but this could not be written to the record: {why}. Put that right and run this again: the migration is \
         not settled before"
    )))
}

/// Restores the migration settings of a QEMU whose guest runs here.
fn restore_settings(qmp: Option<&Qmp>, record: &Record, observer: &dyn Observer) {
    let (Some(qmp), Some(before)) = (qmp, &record.settings_before) else { return };
    let values = Values::deserialize(before).map_err(|error| error.to_string());
    if let Err(error) = values.and_then(|before| before.set(qmp).map_err(|error| error.to_string())) {
        observer.note(&format!("QEMU's migration settings could not be restored: {error}"));
    }
}
