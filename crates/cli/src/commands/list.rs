//! `sterna list`: the migrations of which this host has records, and what each of them needs.

use std::path::Path;

use serde::Serialize;
use sterna_engine::process;
use sterna_engine::record_file::{self, RecordFile, RecordFileError, Side};
use sterna_wire::switchover::{DestinationState, Record, RecordState, SourceState};

use super::recover_command::RecoverCommand;
use super::{Failure, control, state_dir};
use crate::args::ListArgs;
use crate::control::{Running, running};
use crate::exit::Exit;

/// A migration, as its record on this host has it. The record's key stays there.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    id: String,
    #[serde(flatten)]
    state: RecordState,
    /// Whether nothing is left to be done on this host.
    settled: bool,
    /// What the state means for the guest.
    meaning: String,
    /// The process that works on it.
    process: Option<u32>,
    /// The command that settles it; none while a process works on it.
    recover: Option<String>,
    /// What that process reports by its control socket.
    running: Option<Running>,
    peer: String,
    monitor_socket: String,
    created_ms: u64,
    updated_ms: u64,
}

pub(super) fn run(args: &ListArgs) -> Result<Exit, Failure> {
    let dir = state_dir::choose(&args.state)?;
    let records = if args.all { record_file::all(&dir) } else { record_file::unsettled(&dir) };
    let mut records = records.map_err(|error| Failure::refused(&error))?;
    records.sort_by_key(|record| record.updated_ms);
    let recover = RecoverCommand::of_any(&args.state);
    let rows = records
        .into_iter()
        .map(|record| Row::of(record, |record| is_worked_on(&dir, record), process::lives, &recover));
    let mut rows: Vec<Row> = rows.filter(|row| args.all || !row.settled).collect();
    // A process whose socket cannot be made or asked works on its migration all the same.
    let running = running(&dir).unwrap_or_default();
    for row in &mut rows {
        row.running = running.iter().find(|running| Some(running.process) == row.process).cloned();
    }
    let text = match args.json {
        true => serde_json::to_string_pretty(&rows).map_err(|error| Failure::failed(&error))?,
        false => text(&rows, &dir, args.all, record_file::now_ms()),
    };
    crate::stdout::print(&text).map_err(|error| Failure::failed(&format!("cannot print the list: {error}")))?;
    Ok(Exit::Completed)
}

/// Returns whether a process works on this migration: it then holds the record's lock. The number of the process may be another's by now.
fn is_worked_on(dir: &Path, record: &Record) -> bool {
    let opened = RecordFile::open(dir, record.migration, Side::of(record.state));
    matches!(opened, Err(RecordFileError::Locked { .. }))
}

impl Row {
    fn of(
        record: Record,
        is_worked_on: impl Fn(&Record) -> bool,
        lives: impl Fn(sterna_wire::switchover::ProcessIdentity) -> bool,
        recover: &RecoverCommand,
    ) -> Self {
        let discarded = record.state == RecordState::Destination(DestinationState::Aborted)
            && record.monitor_process.is_some_and(|monitor| !lives(monitor));
        let settled = record.state.settled() || discarded;
        let process = (!settled && is_worked_on(&record)).then_some(record.pid);
        let recover = (!settled && process.is_none()).then(|| recover.line(record.migration));
        let meaning = meaning(&record);
        let Record { migration, state, peer, monitor_socket, created_ms, updated_ms, .. } = record;
        let id = migration.to_string();
        Self {
            id,
            state,
            settled,
            meaning,
            process,
            recover,
            running: None,
            peer,
            monitor_socket,
            created_ms,
            updated_ms,
        }
    }
}

/// Returns what a record's state means for the guest.
fn meaning(record: &Record) -> String {
    use DestinationState as D;
    use SourceState as S;
    let peer = &record.peer;
    let meaning = match record.state {
        RecordState::Source(S::Started) => "nothing is decided: the guest belongs here".to_owned(),
        RecordState::Source(S::Committed) => format!("the guest belongs to {peer}: never resume it here"),
        RecordState::Source(S::Aborted) => "the guest belongs here, and may still be paused".to_owned(),
        RecordState::Source(S::Resumed) => "the guest has stayed here".to_owned(),
        RecordState::Source(S::Finished) => format!("the guest was moved to {peer}"),
        RecordState::Source(S::Gone) => "its QEMU has ended: nothing of the guest is left here".to_owned(),
        RecordState::Destination(D::Started) => "the guest is still at the source".to_owned(),
        RecordState::Destination(D::Prepared | D::PreparedIncomplete) => {
            "the guest is here, paused, and waits for the source's decision: never start it by hand".to_owned()
        }
        RecordState::Destination(D::Committed | D::CommittedIncomplete) => "the guest belongs here".to_owned(),
        RecordState::Destination(D::RunningIncomplete) => {
            "the guest was started here, and part of its memory is still at the source".to_owned()
        }
        RecordState::Destination(D::Running) => "the guest was started here".to_owned(),
        RecordState::Destination(D::Aborted) => "the copy here was discarded".to_owned(),
    };
    match &record.does_not_run {
        Some(why) => format!("{meaning}, and does not run there: {why}"),
        None => meaning,
    }
}

fn text(rows: &[Row], dir: &Path, all: bool, now_ms: u64) -> String {
    if rows.is_empty() {
        let which = if all { "no records" } else { "no migration that is under way or not settled" };
        return format!("{which} in {}", dir.display());
    }
    let lines = rows.iter().map(|row| {
        let (side, other) = match row.state {
            RecordState::Source(_) => ("source", "to"),
            RecordState::Destination(_) => ("destination", "listening on"),
        };
        let work = match (&row.process, &row.recover) {
            (Some(pid), _) => {
                let figures =
                    row.running.as_ref().map_or(String::new(), |running| format!(": {}", control::figures(running)));
                format!("\n  under way: process {pid} works on it{figures}")
            }
            (None, Some(command)) => {
                format!(
                    "\n  not settled: {command}\n  (with the --tls and --allow, or the --insecure, of this migration)"
                )
            }
            (None, None) => String::new(),
        };
        let Row { id, state, meaning, peer, monitor_socket, updated_ms, .. } = row;
        let age = age(now_ms.saturating_sub(*updated_ms));
        let head = format!("{id}  {side}, {}, since {age}: {meaning}", state.name());
        let line = format!("{head}\n  QEMU {monitor_socket}, {other} {peer}");
        // The address and the reason may be the other side's.
        let line: Vec<String> = line.lines().map(sterna_wire::text::printable).collect();
        line.join("\n") + &work
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A duration for people, in one unit.
fn age(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use sterna_wire::control::Mode;
    use sterna_wire::identity::{MigrationId, MigrationKey};
    use sterna_wire::switchover::{ProcessIdentity, RECORD_VERSION, SourceAfter};

    use super::*;
    use crate::args::StateArgs;

    const MONITOR: ProcessIdentity = ProcessIdentity { pid: 4711, start_ticks: 99 };

    fn record(state: RecordState) -> Record {
        Record {
            version: RECORD_VERSION,
            migration: MigrationId::from_bytes([7; 16]),
            state,
            fenced_peer: false,
            peer: "host-b:4920".into(),
            mode: Mode::Direct,
            monitor_socket: "/run/a.qmp".into(),
            monitor_process: Some(MONITOR),
            settings_before: None,
            completion_permitted: false,
            pausing: false,
            disputed: None,
            does_not_run: None,
            source_after: SourceAfter::Quit,
            key: MigrationKey::from_bytes([9; 32]),
            pid: 42,
            created_ms: 1_000,
            updated_ms: 61_000,
        }
    }

    fn row(state: RecordState, works: bool, qemu_lives: bool) -> Row {
        let recover = RecoverCommand::of_any(&StateArgs { state_dir: Some("/records".into()) });
        Row::of(record(state), |_| works, |_| qemu_lives, &recover)
    }

    #[test]
    fn a_migration_that_died_is_listed_with_the_command_that_settles_it() {
        let row = row(RecordState::Source(SourceState::Committed), false, true);
        let id = MigrationId::from_bytes([7; 16]);
        assert_eq!(
            text(&[row], Path::new("/records"), false, 63_500),
            format!(
                "{id}  source, committed, since 2 s: the guest belongs to host-b:4920: never resume it here\n  QEMU /run/a.qmp, to \
                 host-b:4920\n  not settled: sterna recover {id} --state-dir /records\n  (with the --tls and --allow, or the --insecure, of \
                 this migration)"
            )
        );
    }

    #[test]
    fn a_migration_that_is_under_way_names_its_process_and_no_command() {
        let row = row(RecordState::Destination(DestinationState::Started), true, true);
        assert_eq!((row.settled, row.process, row.recover.as_ref()), (false, Some(42), None));
        assert!(text(&[row], Path::new("/records"), false, 0).ends_with("under way: process 42 works on it"));
    }

    #[test]
    fn what_is_settled_needs_nothing_and_a_discarded_copy_is_settled_once_its_qemu_has_ended() {
        for (state, qemu_lives, settled) in [
            (RecordState::Source(SourceState::Finished), true, true),
            (RecordState::Destination(DestinationState::Aborted), false, true),
            (RecordState::Destination(DestinationState::Aborted), true, false),
        ] {
            let row = row(state, false, qemu_lives);
            assert_eq!((row.settled, row.recover.is_none()), (settled, settled), "{state:?}");
        }
    }

    #[test]
    fn the_key_of_a_migration_is_not_printed() {
        let json = serde_json::to_string(&row(RecordState::Source(SourceState::Started), false, true)).unwrap();
        assert!(!json.contains("key") && !json.contains("0909"), "{json}");
        assert!(json.contains(r#""side":"source","state":"started""#), "{json}");
    }
}
