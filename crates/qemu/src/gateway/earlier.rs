//! What the records of earlier migrations say about a QEMU, before it takes part in another one.
//!
//! A guest that is paused may have been moved away, may belong to another host since a decision that was not delivered, or may have been
//! paused by a `send` that was killed. Whoever resumes it then runs the guest on two hosts. So the records are looked at before anything is
//! said about a paused guest, and no text advises to run a guest unless it is known that this is its only copy, which no record shows.

use std::path::Path;

use sterna_engine::{process, record_file};
use sterna_wire::switchover::{ProcessIdentity, Record, RecordState, SourceState};

use super::qemu::identity;
use super::{GatewayError, Monitor};
use crate::qmp::Qmp;

/// Fails if an earlier migration of this QEMU is not settled: its `recover` would act on the guest of the new migration.
pub(super) fn refuse_if_claimed(state_dir: &Path, qmp: &Qmp, monitor: &Monitor) -> Result<(), GatewayError> {
    refuse_if_unsettled(&records_of(state_dir, identity(qmp), monitor)?)
}

/// As [`refuse_if_claimed`], for a domain that libvirt is to start: fails if a migration of a QEMU that it already has here, one of `qemus`, is
/// not settled. To end that QEMU may lose the guest.
pub(super) fn refuse_domain(state_dir: &Path, qemus: &[ProcessIdentity]) -> Result<(), String> {
    let mut records = record_file::all(state_dir).map_err(|error| error.to_string())?;
    records.retain(|record| record.monitor_process.is_some_and(|qemu| qemus.contains(&qemu)));
    refuse_if_unsettled(&records).map_err(|error| error.text)
}

/// As [`refuse_if_claimed`], for a source: fails as well if the guest does not run, `status` being its run state. The reason follows from the
/// records.
pub(super) fn refuse_source(state_dir: &Path, qmp: &Qmp, monitor: &Monitor, status: &str) -> Result<(), GatewayError> {
    let records = records_of(state_dir, identity(qmp), monitor)?;
    refuse_if_unsettled(&records)?;
    // The destination starts every guest that it receives: a guest that an operator paused must not run because it moved.
    if status == "running" { Ok(()) } else { Err(not_running(&records, state_dir, status)) }
}

/// Returns the records of the QEMU that is this process, the newest first. Where this process or the record's is not known, the name of its
/// monitor counts.
fn records_of(state_dir: &Path, qemu: Option<ProcessIdentity>, monitor: &Monitor) -> Result<Vec<Record>, GatewayError> {
    let name = monitor.name();
    let mut records = record_file::all(state_dir).map_err(GatewayError::untouched)?;
    records.retain(|record| match (record.monitor_process, qemu) {
        (Some(recorded), Some(qemu)) => recorded == qemu,
        (Some(recorded), None) => record.monitor_socket == name && process::lives(recorded),
        (None, _) => record.monitor_socket == name,
    });
    records.sort_by_key(|record| std::cmp::Reverse(record.updated_ms));
    Ok(records)
}

fn refuse_if_unsettled(records: &[Record]) -> Result<(), GatewayError> {
    let Some(record) = records.iter().find(|record| !record.state.settled()) else { return Ok(()) };
    let id = record.migration;
    let belongs = match record.state {
        RecordState::Source(SourceState::Committed) => format!(", and its guest belongs to {}", record.peer),
        _ => String::new(),
    };
    Err(GatewayError::untouched(format_args!(
        "migration {id} of this QEMU is not settled{belongs}: run `sterna recover {id}` first"
    )))
}

/// Returns the error for a guest that does not run, in the run state `status`, and whose migrations are settled.
fn not_running(records: &[Record], state_dir: &Path, status: &str) -> GatewayError {
    let paused = format!("the guest does not run (its state is {status})");
    let moved = records.first().filter(|record| record.state == RecordState::Source(SourceState::Finished));
    GatewayError::untouched(match moved {
        // Another QEMU may have had this socket then, and this one may hold the only copy of a guest.
        Some(Record { migration, peer, monitor_process: None, .. }) => format!(
            "{paused}: only running guests are moved. Migration {migration} has moved a guest behind the same monitor to {peer}, and it is not \
             known which process its QEMU was. If this is that guest, never resume it: it would run on both hosts, and its disks are lost"
        ),
        Some(Record { migration, peer, .. }) => format!(
            "{paused}: migration {migration} has moved it to {peer}, and this QEMU holds a stopped copy. Never resume that (`virsh resume`, \
             QMP `cont`), or the guest runs on both hosts and its disks are lost; end this QEMU (QMP `quit`, `virsh destroy`)"
        ),
        None => format!(
            "{paused}: only running guests are moved. No record in {} says why it was paused. Before it is resumed, make sure that it was \
             not moved to another host: there, too, it would run",
            state_dir.display()
        ),
    })
}

#[cfg(test)]
mod tests {
    use sterna_engine::record_file::RecordFile;
    use sterna_wire::control::Mode;
    use sterna_wire::identity::{MigrationId, MigrationKey};
    use sterna_wire::switchover::{DestinationState, RECORD_VERSION, SourceAfter};

    use super::*;

    const QEMU: ProcessIdentity = ProcessIdentity { pid: 4711, start_ticks: 99 };
    /// Another process with the same number.
    const LATER: ProcessIdentity = ProcessIdentity { start_ticks: 100, ..QEMU };

    /// The monitor's socket, of all these QEMUs.
    const SOCKET: &str = "/run/qmp";

    /// Writes the record of migration `number`, which was last written at that time.
    fn write(directory: &Path, number: u8, state: RecordState, qemu: impl Into<Option<ProcessIdentity>>) {
        let record = Record {
            version: RECORD_VERSION,
            migration: MigrationId::from_bytes([number; 16]),
            state,
            fenced_peer: false,
            peer: "host-b:4920".into(),
            mode: Mode::Direct,
            monitor_socket: SOCKET.into(),
            monitor_process: qemu.into(),
            settings_before: None,
            completion_permitted: false,
            pausing: true,
            disputed: None,
            does_not_run: None,
            source_after: SourceAfter::Keep,
            key: MigrationKey::from_bytes([2; 32]),
            pid: 1,
            created_ms: 0,
            updated_ms: 0,
        };
        let id = record.migration;
        RecordFile::create(directory, record.clone()).unwrap().write(state).unwrap();
        // With a time that does not depend on the clock.
        let side = if matches!(state, RecordState::Source(_)) { "source" } else { "destination" };
        let record = record.advanced(state, 1, number.into());
        std::fs::write(directory.join(format!("{id}.{side}.json")), record.to_json().unwrap()).unwrap();
    }

    #[test]
    fn a_domain_is_refused_while_a_migration_of_its_qemu_here_is_not_settled() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        assert_eq!(refuse_domain(directory, &[QEMU]), Ok(()));
        write(directory, 1, RecordState::Source(SourceState::Finished), QEMU);
        write(directory, 2, RecordState::Destination(DestinationState::Prepared), LATER);
        assert_eq!(refuse_domain(directory, &[QEMU]), Ok(()));
        write(directory, 3, RecordState::Source(SourceState::Committed), QEMU);
        let reason = refuse_domain(directory, &[LATER, QEMU]).unwrap_err();
        assert!(reason.contains("is not settled") && reason.contains("sterna recover"), "{reason}");
        assert_eq!(refuse_domain(directory, &[]), Ok(()));
    }

    fn refusal(directory: &Path, status: &str) -> Option<String> {
        refusal_of(directory, Some(QEMU), status)
    }

    fn refusal_of(directory: &Path, qemu: Option<ProcessIdentity>, status: &str) -> Option<String> {
        let records = records_of(directory, qemu, &Monitor::Socket(SOCKET.into())).unwrap();
        let refused = refuse_if_unsettled(&records);
        let error = refused.err().or_else(|| (status != "running").then(|| not_running(&records, directory, status)));
        error.map(|error| error.to_string())
    }

    /// Checks that no text advises to run the guest.
    fn advises_nothing(text: &str) {
        for advice in ["let it run", "resume it first", "run it"] {
            assert!(!text.contains(advice), "{advice}: {text}");
        }
    }

    #[test]
    fn a_paused_guest_whose_migration_is_not_settled_is_for_recover() {
        use SourceState as S;
        for state in [S::Started, S::Aborted, S::Committed] {
            let directory = tempfile::tempdir().unwrap();
            write(directory.path(), 1, RecordState::Source(state), QEMU);
            for status in ["paused", "running"] {
                let text = refusal(directory.path(), status).unwrap();
                assert!(text.contains("is not settled") && text.contains("run `sterna recover 0101"), "{text}");
                assert_eq!(text.contains("its guest belongs to host-b:4920"), state == S::Committed, "{text}");
                advises_nothing(&text);
            }
        }
    }

    #[test]
    fn a_copy_that_was_kept_after_its_guest_moved_is_never_to_run() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, RecordState::Source(SourceState::Resumed), QEMU);
        write(directory.path(), 2, RecordState::Source(SourceState::Finished), QEMU);
        let text = refusal(directory.path(), "paused").unwrap();
        assert!(text.contains("migration 0202") && text.contains("has moved it to host-b:4920"), "{text}");
        assert!(text.contains("Never resume that"), "{text}");
        advises_nothing(&text);
    }

    #[test]
    fn a_paused_guest_of_which_no_record_says_why_is_not_called_safe_to_run() {
        use RecordState::{Destination, Source};
        let records: [&[(RecordState, ProcessIdentity)]; 4] = [
            &[],
            // Another QEMU had its number.
            &[(Source(SourceState::Finished), LATER), (Source(SourceState::Started), LATER)],
            &[(Destination(DestinationState::Running), QEMU)],
            // The copy that was kept was resumed, and another migration left it here.
            &[(Source(SourceState::Finished), QEMU), (Source(SourceState::Resumed), QEMU)],
        ];
        for records in records {
            let directory = tempfile::tempdir().unwrap();
            for (number, (state, qemu)) in (1..).zip(records) {
                write(directory.path(), number, *state, *qemu);
            }
            let text = refusal(directory.path(), "paused").unwrap();
            assert!(text.contains("No record in") && text.contains("not moved to another host"), "{text}");
            advises_nothing(&text);
            assert_eq!(refusal(directory.path(), "running"), None);
        }
    }

    #[test]
    fn where_a_process_is_not_known_the_records_of_the_same_monitor_count() {
        let started = RecordState::Source(SourceState::Started);
        let own = process::identity(std::process::id()).unwrap();
        // The record's process, and that of the QEMU now; does the record count?
        let cases = [(None, None, true), (None, Some(QEMU), true), (Some(own), None, true), (Some(QEMU), None, false)];
        for (recorded, now, counts) in cases {
            let directory = tempfile::tempdir().unwrap();
            write(directory.path(), 1, started, recorded);
            let refused = refusal_of(directory.path(), now, "running");
            assert_eq!(refused.is_some_and(|text| text.contains("is not settled")), counts, "{recorded:?} {now:?}");
            let elsewhere = records_of(directory.path(), now, &Monitor::Socket("/run/another".into())).unwrap();
            assert!(elsewhere.is_empty(), "{recorded:?} {now:?}");
        }
    }

    #[test]
    fn a_paused_guest_behind_a_monitor_that_another_may_have_had_is_neither_to_run_nor_to_be_ended() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), 1, RecordState::Source(SourceState::Finished), None);
        let text = refusal_of(directory.path(), None, "paused").unwrap();
        assert!(text.contains("behind the same monitor to host-b:4920"), "{text}");
        assert!(text.contains("If this is that guest, never resume it") && !text.contains("quit"), "{text}");
        advises_nothing(&text);
        assert_eq!(refusal_of(directory.path(), None, "running"), None);
    }
}
