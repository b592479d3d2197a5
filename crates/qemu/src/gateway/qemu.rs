//! QMP commands and queries that both drivers need, besides settings.

use std::fmt::Display;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::Builder;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_engine::process;
use sterna_engine::record_file::{now_ms, prepare};
use sterna_engine::report::Outcome;
use sterna_engine::session::Session;
use sterna_engine::vmm::GuestEnd;
use sterna_wire::control::{Machine, Mode};
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{ProcessIdentity, RECORD_VERSION, Record, RecordState, SourceAfter, SourceGuest};
use sterna_wire::text::cleaned;

use super::backlog::BacklogEntry;
use super::sockets::{Listens, SocketPlace, accept_until};
use super::{GatewayError, Monitor, SocketDirectory};
use crate::qmp::{Meaning, MigrationInfo, Qmp, QmpError, RunState};
use crate::stream::MultifdInit;
use crate::vcpus;

/// Guest page size in bytes: x86, the only architecture that this version moves.
pub(super) const PAGE_SIZE: usize = 4096;
/// How long QEMU may take to end a migration that was cancelled.
const CANCEL_TIME: Duration = Duration::from_secs(30);
/// How long a running guest's migration may be `cancelling` before it counts as stuck there.
const CANCELLING_TIME: Duration = Duration::from_secs(5);
/// How long QEMU may take to clean up after a migration that was yanked.
const YANK_TIME: Duration = Duration::from_secs(2);
/// How long a QMP `quit` of the source may take: the kernel frees a guest's huge pages one by one.
pub(super) const SOURCE_QUIT_TIME: Duration = Duration::from_secs(30);
/// How long a destination QEMU may take to exit: it may have to wait for the storage of its disks first.
pub(super) const QUIT_TIME: Duration = Duration::from_secs(30);
/// How long to wait for a sign that the QMP connection has ended.
const HANG_UP_TIME: Duration = Duration::from_secs(1);
/// How long a QEMU whose QMP connection has ended may take to exit.
const EXIT_TIME: Duration = Duration::from_secs(5);
/// Pause between two polls of a state for which QEMU has no event.
const POLL_PAUSE: Duration = Duration::from_millis(5);
/// How long a destination QEMU may take from having loaded everything until it reports that it is paused.
const PAUSE_TIME: Duration = Duration::from_secs(10);
/// How long QEMU may take to report why it could not load a guest.
const REASON_TIME: Duration = Duration::from_secs(1);
/// As [`POLL_PAUSE`], while the guest is paused.
const LOADED_POLL_PAUSE: Duration = Duration::from_millis(1);

/// QEMU's events that concern the drivers.
#[derive(Debug)]
pub(super) enum QemuEvent {
    /// The guest was stopped.
    Stopped,
    /// The guest runs again.
    Resumed,
    /// The guest has ended, or QEMU is about to ([`guest_end`]).
    Ends,
    /// The migration's status changed to this.
    Migration(String),
    /// The QMP connection ended, most likely because QEMU ended.
    Gone,
}

/// Passes QEMU's events to `tell` on a thread of its own, until `tell` returns false. Each event is counted in `backlog`.
///
/// # Errors
/// The system cannot start a thread.
pub(super) fn watch(
    qmp: &Qmp,
    backlog: BacklogEntry,
    tell: impl Fn(QemuEvent) -> bool + Send + 'static,
) -> Result<(), String> {
    let qmp = qmp.clone();
    let watch = move || {
        loop {
            let event = match qmp.next_event(Instant::now() + Duration::from_secs(1)) {
                Ok(None) => continue,
                Ok(Some(event)) => match event.name.as_str() {
                    "STOP" => QemuEvent::Stopped,
                    "RESUME" => QemuEvent::Resumed,
                    "SHUTDOWN" | "GUEST_PANICKED" => QemuEvent::Ends,
                    "MIGRATION" => QemuEvent::Migration(event.data["status"].as_str().unwrap_or("").to_owned()),
                    _ => continue,
                },
                Err(_) => {
                    if backlog.wait() {
                        tell(QemuEvent::Gone);
                    }
                    return;
                }
            };
            if !backlog.wait() || !tell(event) {
                return;
            }
        }
    };
    let thread = Builder::new().name("qemu-events".into()).spawn(watch);
    thread.map(drop).map_err(|error| format!("no thread for QEMU's events: {error}"))
}

/// Has QEMU receive a guest at `uri`. A QEMU that cannot load the guest lives on to report why, since 9.1; older ones exit.
pub(super) fn migrate_incoming(qmp: &Qmp, uri: &str) -> Result<(), QmpError> {
    let mut arguments = json!({ "uri": uri });
    if qmp.version().at_least(9, 1) {
        arguments["exit-on-error"] = json!(false);
    }
    qmp.execute("migrate-incoming", arguments).map(drop)
}

/// Returns why QEMU could not load the guest, if it reports that.
pub(super) fn load_failure(qmp: &Qmp) -> Option<String> {
    let answer = qmp.execute_within("query-migrate", json!({}), REASON_TIME).ok()?;
    let info = MigrationInfo::from_json(&answer);
    let why = || info.error_desc.as_deref().map_or_else(|| "see its output".to_owned(), cleaned);
    (info.status == "failed").then(|| format!("QEMU could not load the guest: {}", why()))
}

/// Waits until QEMU, which has loaded the guest, reports that it is paused. This is downtime, so the pauses are short.
pub(super) fn wait_paused(qmp: &Qmp) -> Result<(), String> {
    let deadline = Instant::now() + PAUSE_TIME;
    loop {
        match qmp.status().map_err(|error| error.to_string())?.as_str() {
            "paused" => return Ok(()),
            // QEMU reports the end of its stream in the same way where it has failed after that.
            "inmigrate" if let Some(why) = load_failure(qmp) => return Err(why),
            "inmigrate" if Instant::now() < deadline => std::thread::sleep(LOADED_POLL_PAUSE),
            status => return Err(format!("QEMU is {status} where it should be loaded and paused")),
        }
    }
}

/// Returns the description of QEMU's machine for the source's hello.
pub(super) fn machine(qmp: &Qmp, downtime: Duration) -> Machine {
    let machine_type = qmp
        .execute("qom-get", json!({ "path": "/machine", "property": "type" }))
        .ok()
        .and_then(|value| value.as_str().map(|name| name.trim_end_matches("-machine").to_owned()))
        .unwrap_or_default();
    let memory = qmp.execute("query-memory-size-summary", json!({})).ok();
    Machine {
        monitor: format!("QEMU {}", qmp.version()),
        machine_type,
        ram: memory.and_then(|summary| summary["base-memory"].as_u64()).unwrap_or(0),
        downtime_ms: downtime.as_millis() as u64,
        ..Machine::default()
    }
}

/// Returns a closure that makes the reason of an error of QEMU, with `what` before its text.
pub(super) fn failed<E: Display>(what: &'static str) -> impl Fn(E) -> Reason {
    move |error| Reason::new(ErrorKind::Monitor, error).within(what)
}

/// Checks that records and private sockets can be made and that QEMU can use the sockets. A later failure would end the
/// migration, and with it the destination's QEMU.
pub(super) fn check_directories(
    state_dir: &Path,
    socket_dir: &SocketDirectory,
    listens: Listens,
    qmp: &Qmp,
) -> Result<(), GatewayError> {
    check_state_directory(state_dir)?;
    check_sockets(socket_dir, listens, qmp)
}

/// Checks that records can be made.
pub(super) fn check_state_directory(state_dir: &Path) -> Result<(), GatewayError> {
    prepare(state_dir).map_err(GatewayError::refused)
}

/// Checks that private sockets can be made and that QEMU can use them. A source in direct mode needs none.
pub(super) fn check_sockets(socket_dir: &SocketDirectory, listens: Listens, qmp: &Qmp) -> Result<(), GatewayError> {
    let failed = |error: String| {
        let advice = match socket_dir {
            SocketDirectory::Temporary => "set TMPDIR to another directory, or give --socket-dir DIR",
            _ => "give --socket-dir another directory",
        };
        GatewayError::new(format!("cannot make private sockets: {error}; {advice}"))
    };
    let place = SocketPlace::find(socket_dir, qmp.peer_pid()).map_err(|error| failed(error.to_string()))?;
    place.remove_stale();
    place.try_with(qmp, listens).map_err(failed)
}

/// Returns the identity of QEMU's process; none if the process that serves the QMP socket cannot be seen, or is not known to be QEMU's.
pub(super) fn identity(qmp: &Qmp) -> Option<ProcessIdentity> {
    let process = vcpus::process_of(qmp).map_err(|error| tracing::debug!(%error, "QEMU's process is not known"));
    process::identity(u32::try_from(process.ok()?).ok()?)
}

/// Returns the note for a QEMU whose process is not known; none if it is.
pub(super) fn unknown_process_note(qmp: &Qmp) -> Option<String> {
    let why = vcpus::process_of(qmp).err()?;
    Some(format!(
        "it is not known which process QEMU is: {why}. So it cannot be seen here whether QEMU has ended: after a failure, `sterna recover` \
         needs its monitor"
    ))
}

/// Returns whether the process of a record is the QEMU behind `qmp`, also where another program forwards the monitor.
pub(super) fn is_behind(qmp: &Qmp, recorded: ProcessIdentity) -> bool {
    let same = i32::try_from(recorded.pid).is_ok_and(|pid| vcpus::check(qmp, pid).is_ok());
    // After the check, so that it was about this process and not about an earlier one with its number.
    same && process::lives(recorded)
}

/// Returns whether the QMP connection has ended, and the process with it. A QEMU that waits for its storage does not answer, and has not ended.
pub(in crate::gateway) fn monitor_has_ended(qmp: &Qmp, process: Option<ProcessIdentity>) -> bool {
    has_hung_up(qmp) && has_ended(process)
}

fn has_hung_up(qmp: &Qmp) -> bool {
    matches!(qmp.execute_within("query-status", json!({}), HANG_UP_TIME), Err(QmpError::Closed { .. }))
}

/// Waits briefly and returns whether the process has ended after its QMP connection has: the connection can fail alone, and an
/// exit takes a moment. A process that is not known has never ended.
pub(in crate::gateway) fn has_ended(identity: Option<ProcessIdentity>) -> bool {
    let Some(identity) = identity else { return false };
    let deadline = Instant::now() + EXIT_TIME;
    while process::lives(identity) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL_PAUSE);
    }
    true
}

/// Returns the first record of a migration.
pub(super) fn new_record(session: &Session, state: RecordState, peer: String, monitor: &Monitor, qmp: &Qmp) -> Record {
    Record {
        version: RECORD_VERSION,
        migration: session.id,
        state,
        fenced_peer: false,
        peer,
        mode: Mode::Owner,
        monitor_socket: monitor.name(),
        monitor_process: identity(qmp),
        settings_before: None,
        completion_permitted: false,
        pausing: false,
        disputed: None,
        does_not_run: None,
        source_after: SourceAfter::Keep,
        key: session.key.clone(),
        pid: std::process::id(),
        created_ms: now_ms(),
        updated_ms: now_ms(),
    }
}

/// Returns how the guest has ended by itself, if it has.
pub(super) fn ended_by_itself(qmp: &Qmp) -> Option<String> {
    qmp.guest_end().filter(crate::qmp::GuestEnd::by_itself).map(|end| end.to_string())
}

/// Returns how the guest has ended, for the engine.
pub(super) fn guest_end(qmp: &Qmp) -> Option<GuestEnd> {
    qmp.guest_end().map(|end| GuestEnd { by_itself: end.by_itself(), what: end.to_string() })
}

/// Ends the QEMU process of a record by QMP `quit`, and waits until it has exited. If the process is not known, waits until a QEMU that has
/// accepted the command has closed its monitor.
///
/// # Errors
/// The process still lives after `time`, or that is not known.
pub(super) fn quit(qmp: &Qmp, identity: Option<ProcessIdentity>, time: Duration) -> Result<(), String> {
    end(qmp, identity, None, time)
}

/// As [`quit`], for a QEMU whose main loop may hang: gives up after `patience` without an answer.
pub(super) fn quit_if_it_answers(
    qmp: &Qmp,
    identity: Option<ProcessIdentity>,
    patience: Duration,
    time: Duration,
) -> Result<(), String> {
    end(qmp, identity, Some(patience), time)
}

fn end(qmp: &Qmp, identity: Option<ProcessIdentity>, patience: Option<Duration>, time: Duration) -> Result<(), String> {
    let Some(identity) = identity else {
        let accepted = qmp.execute("quit", json!({}));
        return closed_after_quit(qmp, accepted, Instant::now() + time);
    };
    // A stopped process answers nothing.
    if patience.is_some() && process::is_stopped(identity.pid) && process::lives(identity) {
        return Err(must_be_ended(identity, STOPPED));
    }
    let begun = Instant::now();
    // The answer shows no more than that QEMU does not hang: the loop checks whether it lives. It may have exited by itself, or carry this out
    // only when its storage answers.
    let mut unanswered = qmp.begin("quit", json!({})).inspect_err(|error| tracing::debug!(%error, "quit")).ok();
    let mut is_silent_until = |deadline| {
        if let Some(quitting) = &mut unanswered
            && !matches!(quitting.wait(deadline), Ok(None))
        {
            unanswered = None;
        }
        unanswered.is_some()
    };
    if patience.is_some_and(|patience| is_silent_until(begun + patience)) && process::lives(identity) {
        return Err(must_be_ended(identity, HANGS));
    }
    while process::lives(identity) {
        if Instant::now() >= begun + time {
            let stopped = process::is_stopped(identity.pid);
            return Err(match is_silent_until(Instant::now()) {
                true => must_be_ended(identity, if stopped { STOPPED } else { HANGS }),
                false => format!("QEMU (process {}) does not exit", identity.pid),
            });
        }
        std::thread::sleep(POLL_PAUSE);
    }
    Ok(())
}

/// Why a stopped process does not answer.
const STOPPED: &str = "it is stopped, by SIGSTOP, for instance";
/// Why another one may not.
const HANGS: &str = "its main loop hangs, or waits for the storage of the guest's disks";

/// Returns the error for a QEMU that is not ended by its monitor.
pub(super) fn must_be_ended(qemu: ProcessIdentity, why: impl Display) -> String {
    let pid = qemu.pid;
    format!("QEMU (process {pid}) does not answer, and must be ended: kill -KILL {pid} ({why})")
}

/// Waits until a QEMU of unknown process, which gave this answer to `quit`, has closed its monitor. Its guest never runs again once it has
/// accepted the command: `main_loop` returns (system/runstate.c), and `qemu_cleanup` stops the vCPUs first.
fn closed_after_quit(qmp: &Qmp, accepted: Result<Value, QmpError>, deadline: Instant) -> Result<(), String> {
    const UNKNOWN: &str = "it is not known which process QEMU is, so look for it on this host";
    accepted.map_err(|error| format!("QEMU has not accepted the command to end ({error}); {UNKNOWN}"))?;
    if qmp.wait_closed(deadline) {
        return Ok(());
    }
    Err(format!("QEMU has accepted the command to end and keeps its monitor open; {UNKNOWN}"))
}

/// Ends the source QEMU after the destination has confirmed that the guest runs there, unless the record keeps it. Returns the state of
/// the guest here.
///
/// # Errors
/// The QEMU still lives: it does not exit, or is in a state in which no migration leaves it.
pub(super) fn end_source(qmp: &Qmp, record: &Record) -> Result<SourceGuest, String> {
    let state = qmp.run_state();
    match state.as_ref().map(|state| (state.meaning(), state.name(), record.mode)) {
        // An operator has resumed a guest that belongs to the destination: a contradiction, which `quit` must not hide. It may have stopped by
        // itself since.
        _ if state.as_ref().is_ok_and(RunState::has_executed) => return Ok(SourceGuest::Running),
        // In direct mode the guest is paused, and may have been reset since. A QEMU that does not answer is ended as well.
        Ok((Meaning::Stopped, _, Mode::Direct) | (_, "postmigrate", Mode::Owner)) | Err(_) => {}
        Ok((_, name, _)) => {
            return Err(format!(
                "in the state {name}, in which no migration leaves it (another program has changed it), so that it was not ended"
            ));
        }
    }
    match record.source_after {
        SourceAfter::Keep => Ok(SourceGuest::Completed),
        SourceAfter::Quit => quit(qmp, record.monitor_process, SOURCE_QUIT_TIME).map(|()| SourceGuest::Gone),
    }
}

/// Returns the warning for a source QEMU that still lives after its guest has moved.
pub(super) fn kept_warning(qemu: Option<ProcessIdentity>, source_after: SourceAfter, why: Option<&str>) -> String {
    let process = qemu.map_or(String::new(), |qemu| format!(" (process {})", qemu.pid));
    let why = why.unwrap_or(match source_after {
        SourceAfter::Keep => "as --source-after keep asked for",
        SourceAfter::Quit => "although it was to be ended, which has failed",
    });
    format!(
        "the source's QEMU{process} still holds a stopped copy of the guest, {why}: never resume it (`virsh resume`, QMP \
         `cont`), or the guest runs on both hosts and its disks are lost; end it (QMP `quit`, `virsh destroy`)"
    )
}

/// Returns the warning for a source QEMU that is kept because its guest has arrived and does not run.
pub(super) fn does_not_run_warning(qemu: Option<ProcessIdentity>) -> String {
    let process = qemu.map_or(String::new(), |qemu| format!(" (process {})", qemu.pid));
    format!(
        "the source's QEMU{process} is kept, whatever --source-after asks for: it holds the guest as it was when it was paused. The guest belongs \
         to the destination: before anything resumes this copy (QMP `cont`), end the destination's QEMU, and consider what the guest may have \
         written to its disks there; if the copy is of no use, end it (QMP `quit`, `virsh destroy`)"
    )
}

/// Returns the run state of a guest that was not moved and does not run.
pub(super) fn stopped_guest(qmp: &Qmp, outcome: Outcome) -> Option<String> {
    let stays = matches!(outcome, Outcome::Failed | Outcome::Cancelled);
    let state = qmp.run_state().ok().filter(|state| stays && state.meaning() != Meaning::Executes)?;
    Some(format!("QEMU: {state}"))
}

/// Returns the warning for a guest of which it is not confirmed that it runs at the destination.
pub(super) fn unconfirmed_warning() -> String {
    "the guest may run at the destination: until `sterna recover` has settled this migration, never resume it in the source's QEMU \
     (`virsh resume`, QMP `cont`)"
        .into()
}

/// Makes QEMU announce the guest's network addresses, so that switches learn where it is. The timing is QEMU's default.
pub(super) fn announce(qmp: &Qmp) {
    if ended_by_itself(qmp).is_some() {
        return;
    }
    let timing = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
    if let Err(error) = qmp.execute("announce-self", timing) {
        tracing::warn!(%error, "the guest's addresses were not announced");
    }
}

/// Returns QEMU's error for its failed migration, if it has one.
pub(super) fn failure(qmp: &Qmp) -> Option<String> {
    let info = qmp.query_migrate().ok()?;
    Some(format!("the source QEMU's migration failed: {}", info.error_desc?))
}

/// Returns the state of the source QEMU, from `query-status` and `query-migrate`.
pub(super) fn source_state(qmp: &Qmp) -> Result<SourceGuest, QmpError> {
    let info = qmp.query_migrate()?;
    if info.is_active() {
        return Ok(SourceGuest::Migrating);
    }
    let status = qmp.status()?;
    // `finish-migrate` becomes one of the other two states.
    Ok(match status.as_str() {
        "postmigrate" => SourceGuest::Completed,
        "finish-migrate" => SourceGuest::Migrating,
        _ => SourceGuest::Running,
    })
}

/// Returns the state of the source QEMU as [`source_state`] does, also for a migration in direct mode.
pub(super) fn recorded_state(qmp: &Qmp, record: &Record) -> Result<SourceGuest, QmpError> {
    if record.mode != Mode::Direct {
        return source_state(qmp);
    }
    // QEMU itself has no migration of Sterna's.
    let state = qmp.run_state()?;
    match state.meaning() {
        // Also a guest that was reset while it was paused: `cont` lets it go on.
        Meaning::Stopped if record.pausing && !state.has_executed() => Ok(SourceGuest::Completed),
        Meaning::Migrated => Err(QmpError::Unexpected {
            command: "query-status".into(),
            reason: format!(
                "the guest is {state}: another program has migrated it. End this QEMU if the guest runs where it was moved to; nothing was \
                 touched"
            ),
        }),
        // An operator paused a guest that is stopped although this migration had not begun to stop it.
        _ => Ok(SourceGuest::Running),
    }
}

/// Returns whether the active migration still sends after a while. A migration whose sockets ended with the crashed process does
/// not: it ends by itself, or is stuck.
pub(super) fn goes_on(qmp: &Qmp) -> Result<bool, QmpError> {
    let deadline = Instant::now() + CANCELLING_TIME;
    let sent = |qmp: &Qmp| Ok(qmp.query_migrate()?.ram.map(|ram| ram.transferred + ram.multifd_bytes));
    let first = sent(qmp)?;
    while source_state(qmp)? == SourceGuest::Migrating {
        if Instant::now() >= deadline {
            return Ok(sent(qmp)? != first);
        }
        std::thread::sleep(POLL_PAUSE);
    }
    Ok(false)
}

/// Cancels the migration, whose sockets have been closed, and waits until QEMU has no active migration.
pub(super) fn end_migration(qmp: &Qmp) -> Result<SourceGuest, QmpError> {
    if let Err(error) = qmp.execute("migrate_cancel", json!({})) {
        // There may be none to cancel; the state decides.
        tracing::debug!(%error, "migrate_cancel");
    }
    let (mut patience, deadline) = (Instant::now() + CANCELLING_TIME, Instant::now() + CANCEL_TIME);
    let mut yanked = false;
    loop {
        match source_state(qmp)? {
            SourceGuest::Migrating if Instant::now() >= patience && cancelling_for_good(qmp)? => {
                if yanked {
                    return Ok(SourceGuest::Running);
                }
                // The migration is ours and cannot complete any more; `yank` closes only its sockets.
                yank(qmp);
                (yanked, patience) = (true, Instant::now() + YANK_TIME);
            }
            SourceGuest::Migrating if Instant::now() < deadline => std::thread::sleep(POLL_PAUSE),
            SourceGuest::Migrating => {
                let (status, run_state) = (qmp.query_migrate()?.status, qmp.status()?);
                let seconds = CANCEL_TIME.as_secs();
                let reason = format!("{seconds} s after that its migration is {status}, the guest {run_state}");
                return Err(QmpError::Unexpected { command: "migrate_cancel".into(), reason });
            }
            state => return Ok(state),
        }
    }
}

/// Returns whether QEMU may stay in `cancelling` for ever, as 10.0 can if its sockets are closed during the setup.
/// `cancelling` never becomes `completed`, and the guest runs, so there is nothing to wait for.
fn cancelling_for_good(qmp: &Qmp) -> Result<bool, QmpError> {
    Ok(qmp.query_migrate()?.status == "cancelling" && qmp.status()? == "running")
}

/// Makes QEMU close the sockets of its migration, even while it waits for them.
fn yank(qmp: &Qmp) {
    if let Err(error) = qmp.execute("yank", json!({ "instances": [{ "type": "migration" }] })) {
        tracing::debug!(%error, "yank");
    }
}

/// Returns whether QEMU has a migration that is active or not cleaned up: `query-yank` lists it until then.
fn holds_migration(qmp: &Qmp) -> bool {
    let instances = qmp.execute("query-yank", json!({})).unwrap_or_default();
    instances.as_array().is_some_and(|all| all.iter().any(|one| one["type"] == "migration"))
}

/// Waits until QEMU, which has no active migration, has cleaned up after the last one.
///
/// Until then QEMU refuses another `migrate`, and QEMU 7.2 stays in the state `setup` for ever after it has refused one (its
/// `qmp_migrate` registers the yank instance only when the migration has begun). QEMU 7.2 and 10.0 may never clean up if
/// their sockets were closed while they opened them.
///
/// # Errors
/// QEMU has not cleaned up within 5 s.
pub(super) fn wait_cleaned_up(qmp: &Qmp) -> Result<(), String> {
    if cleaned_up_within(qmp, CANCELLING_TIME) {
        return Ok(());
    }
    Err(format!(
        "QEMU {} holds on to a migration that broke off (`query-yank` names it) and can begin no other one: the guest runs on. If it \
         still does after `migrate_cancel` and `yank` (QMP), {}",
        qmp.version(),
        way_out(qmp)
    ))
}

/// Waits as [`wait_cleaned_up`] does, after a migration of our own, whose sockets may be yanked.
///
/// # Errors
/// QEMU has not cleaned up within 7 s.
pub(super) fn clean_up(qmp: &Qmp) -> Result<(), String> {
    if cleaned_up_within(qmp, CANCELLING_TIME) {
        return Ok(());
    }
    yank(qmp);
    if cleaned_up_within(qmp, YANK_TIME) {
        return Ok(());
    }
    Err(format!(
        "QEMU {} holds on to a migration that broke off (`query-yank` names it; neither `migrate_cancel` nor `yank` has helped) and \
         can begin no other one: the guest runs on, but {}",
        qmp.version(),
        way_out(qmp)
    ))
}

/// The first and the last release, as major and minor number, that direct mode moves: they are known to drain the block layer in a
/// `transaction` without actions, and to load device state as it was saved.
pub(super) const DIRECT_RELEASES: ((u32, u32), (u32, u32)) = ((8, 0), (11, 1));

/// Returns the advice for a QEMU that never cleans up.
fn way_out(qmp: &Qmp) -> &'static str {
    if qmp.version().at_least(DIRECT_RELEASES.0.0, DIRECT_RELEASES.0.1) {
        "it can only be moved directly (--mode direct), or after it was shut down and started again in a new QEMU"
    } else {
        "it can only be moved after it was shut down and started again in a new QEMU"
    }
}

/// Returns whether QEMU has cleaned up within `time`.
fn cleaned_up_within(qmp: &Qmp, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while holds_migration(qmp) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL_PAUSE);
    }
    true
}

/// The connections of an outgoing migration.
#[derive(Debug)]
pub(super) struct Connections {
    pub(super) main: UnixStream,
    pub(super) multifd: Vec<(UnixStream, MultifdInit)>,
}

/// Accepts the connections of a source QEMU: its main channel, then `multifd` others.
///
/// The main channel comes first: QEMU opens the others only when it is connected (`migration_connect` in
/// `migration/migration.c`). QEMU may send nothing on it until all are connected, so its first bytes cannot identify it.
pub(super) fn accept_migration(listener: &UnixListener, multifd: u8, time: Duration) -> io::Result<Connections> {
    let deadline = Instant::now() + time;
    let main = accept_until(listener, deadline)?;
    let mut others: Vec<(UnixStream, MultifdInit)> = Vec::new();
    while others.len() < usize::from(multifd) {
        let stream = accept_until(listener, deadline)?;
        stream.set_read_timeout(Some(time))?;
        let init = MultifdInit::read(&stream, multifd).map_err(invalid)?;
        stream.set_read_timeout(None)?;
        if others.iter().any(|(_, known)| known.id == init.id) {
            return Err(invalid("two multifd channels with the same number"));
        }
        others.push((stream, init));
    }
    Ok(Connections { main, multifd: others })
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
