//! The state after a command has ended: the source QEMU, its settings, records on a full disk, and the command itself
//! if its peer does not hang up.

use std::path::Path;
use std::process::{Command, ExitStatus};

use crate::support::pair::{Pair, eventually};
use crate::support::settle::{Migration, Side};
use crate::support::{Hold, LONG, MODES, REFUSED, Sterna, receive, report, send, send_by, sterna};
use serde_json::{Value, json};
use sterna_engine::record_file::RecordFile;
use sterna_qemu_lab::disk::SmallDisk;
use sterna_qemu_lab::{QemuVersion, skip_if_unavailable};
use sterna_wire::identity::MigrationId;
use sterna_wire::switchover::{DestinationState, Record, RecordState, SourceState};

const FAILED: Option<i32> = Some(1);
const CANCELLED: Option<i32> = Some(3);
const UNCONFIRMED: Option<i32> = Some(4);
/// So slow that a migration takes seconds, and that the guest writes more meanwhile than fits its downtime.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"];

fn warnings(report: &Value) -> String {
    report["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>().join("; ")
}

/// Runs an undisturbed migration to its end. Returns the output of `send`.
fn completed(migration: &mut Migration) -> String {
    let (sent, text) = migration.sender.take().unwrap().finish();
    let (received, _) = migration.receiver.take().unwrap().finish();
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    text
}

#[test]
fn a_completed_migration_leaves_nothing_at_the_source_and_the_settings_at_the_destination_as_they_were() {
    for version in QemuVersion::ALL {
        let Some(pair) = Pair::boot_sector(version) else { return };
        let before = pair.destination.migration_settings();
        let mut migration = Migration::start(pair, &[], None, None);
        completed(&mut migration);
        migration.pair.source.qemu.wait_exit(LONG).unwrap();
        let report = report(&migration.pair.report());
        assert_eq!((report["source_after"].as_str(), warnings(&report).as_str()), (Some("quit"), ""));
        assert!(report["rounds"].as_u64().unwrap() > 0, "queried before QEMU ended: {report}");
        assert_eq!(migration.pair.destination.migration_settings(), before, "QEMU {version}");
        assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    }
}

#[test]
fn a_source_that_is_kept_causes_a_warning_on_the_screen_and_in_the_report() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let mut migration = Migration::start(pair, &["--source-after", "keep"], None, None);
    let text = completed(&mut migration);
    assert_eq!(migration.pair.source.status().as_deref(), Some("postmigrate"));
    let report = report(&migration.pair.report());
    assert_eq!(report["source_after"], "keep");
    for told in [warnings(&report), text.lines().find(|line| line.contains("WARNING")).unwrap_or("").to_owned()] {
        assert!(told.contains("never resume"), "{told:?}");
    }
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn a_recovery_that_completes_a_migration_follows_the_source_after_option_of_send() {
    for (after, status) in [("quit", None), ("keep", Some("postmigrate"))] {
        let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let fault = "source.after-record-committed:crash";
        let mut migration = Migration::start(pair, &["--source-after", after], Some(fault), None);
        migration.wait_crash(Side::Source).unwrap();
        let (ended, text) = Side::Source.recover(&migration.pair, &[], None).expect("there is a record").finish();
        assert!(ended.success(), "{after}: {ended}");
        assert_eq!(text.contains("never resume"), after == "keep", "{text}");
        assert_eq!(migration.pair.source.status().as_deref(), status, "{after}");
        assert!(migration.receiver.take().unwrap().finish().0.success());
        assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    }
}

#[test]
fn a_source_that_cannot_record_its_end_reports_it_and_recover_settles_it_later() {
    for mode in MODES {
        println!("by {mode}");
        let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let Some(disk) = skip_if_unavailable(SmallDisk::mount(&pair.source_state())) else { return };
        let mut migration = Migration::start_by(mode, pair, SLOW, None, None);
        let sender = migration.sender.take().unwrap();
        sender.wait_for("placement: ");
        disk.fill().unwrap();
        sender.interrupt();
        let (sent, text) = sender.finish();
        let told = warnings(&report(&migration.pair.report()));
        assert_eq!(sent.code(), CANCELLED);
        assert!(told.contains("`started`") && told.contains("sterna recover"), "{told:?}");
        assert!(text.contains("WARNING"), "{text}");
        assert_eq!(Side::Source.state(&migration.pair), Some(RecordState::Source(SourceState::Started)));
        assert!(migration.pair.source.runs());
        migration.receiver.take().unwrap().finish();

        let recover =
            |pair: &Pair| Side::Source.recover(pair, &[], None).expect("there is a record").finish_with_lines();
        let (ended, lines) = recover(&migration.pair);
        assert_eq!(ended.code(), FAILED, "nothing was settled: {lines:?}");
        assert!(lines.last().unwrap().contains("could not be written"), "{lines:?}");
        assert_eq!(Side::Source.state(&migration.pair), Some(RecordState::Source(SourceState::Started)));
        disk.free().unwrap();
        assert!(recover(&migration.pair).0.success());
        assert_eq!(Side::Source.state(&migration.pair), Some(RecordState::Source(SourceState::Resumed)));
        assert_eq!(migration.exactly_one(), Ok(Side::Source));
    }
}

/// Runs the command that a side has printed for its host, by a shell. Returns how it ended, and all that it wrote.
fn paste(printed: &str) -> (ExitStatus, String) {
    let command = printed.lines().find_map(|line| line.strip_prefix("On this host: ")).expect(printed);
    let programs = Path::new(env!("CARGO_BIN_EXE_sterna")).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let output = Command::new("sh").args(["-c", command]).env("PATH", path).output().unwrap();
    (output.status, String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn a_completed_migration_whose_end_is_not_on_both_disks_is_not_reported_as_settled() {
    for mode in MODES {
        println!("by {mode}");
        for (side, point) in
            [(Side::Source, "source.before-end-guest"), (Side::Destination, "destination.before-record-running")]
        {
            let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
            let state = if side == Side::Source { pair.source_state() } else { pair.destination_state() };
            let Some(disk) = skip_if_unavailable(SmallDisk::mount(&state)) else { return };
            let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
            command.arg("--insecure");
            let at = |of, command: &mut _| (of == side).then(|| Hold::at(point, pair.scratch.path(), command));
            let at_destination = at(Side::Destination, &mut command);
            let receiver = Sterna::start("receive", &mut command);
            let address = receiver.address();
            let mut command =
                send_by(mode, pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
            command.args(["--insecure", "--downtime", "10s"]);
            let at_source = at(Side::Source, &mut command);
            let sender = Sterna::start("send", &mut command);
            let (hold, held) = match side {
                Side::Source => (at_source.unwrap(), &sender),
                Side::Destination => (at_destination.unwrap(), &receiver),
            };
            let reached = hold.reached(held);
            disk.fill().unwrap();
            drop(reached);
            let ((sent, sent_text), (received, received_text)) = (sender.finish(), receiver.finish());
            let codes = if side == Side::Source { (UNCONFIRMED, Some(0)) } else { (Some(0), UNCONFIRMED) };
            assert_eq!((sent.code(), received.code()), codes, "{side:?}");

            let mut migration = Migration { pair, sender: None, receiver: None };
            if side == Side::Destination {
                let recovery = side.recover(&migration.pair, &[], None).expect("there is a record");
                assert_eq!(recovery.finish().0.code(), FAILED, "nothing was written");
            }
            disk.free().unwrap();
            if side == Side::Destination {
                let (ended, text) = paste(&received_text);
                assert!(ended.success(), "{ended}: {text}");
            } else {
                // There the other host has to answer, where nothing listens yet.
                assert!(sent_text.contains("\nOn this host: sterna recover "), "{sent_text}");
            }
            migration.settle().unwrap();
            let settled =
                [RecordState::Source(SourceState::Finished), RecordState::Destination(DestinationState::Running)];
            assert_eq!(migration.records(), settled.map(Some));
            assert_eq!(migration.exactly_one(), Ok(Side::Destination));
            drop(disk);
        }
    }
}

#[test]
fn a_source_whose_qemu_is_gone_is_settled() {
    for mode in MODES {
        println!("by {mode}");
        let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let mut migration = Migration::start_by(mode, pair, SLOW, Some("source.after-start-migration:crash"), None);
        migration.wait_crash(Side::Source).unwrap();
        migration.receiver.take().unwrap().finish();
        let listed = listed(&migration.pair.source_state());
        let [row] = listed.as_array().unwrap().as_slice() else { panic!("{listed}") };
        assert_eq!((&row["side"], &row["state"], &row["process"]), (&json!("source"), &json!("started"), &Value::Null));
        assert!(row["recover"].as_str().unwrap().starts_with("sterna recover "), "{row}");
        migration.pair.source.kill();
        let all = || sterna().args(["recover", "--state-dir"]).arg(migration.pair.source_state()).output().unwrap();
        // The number of the process that died is another sterna's now.
        let socket = migration.pair.scratch.path().join("unused");
        let mut command = sterna();
        command.args(["proxy", "receive", "--insecure", "--listen", "127.0.0.1:0", "--unix"]).arg(socket);
        let other = Sterna::start("proxy", &mut command);
        other.address();
        let id = written_by(&migration.pair.source_state(), other.pid());
        assert_eq!(self::listed(&migration.pair.source_state())[0]["process"], Value::Null);
        // A record that a process works on is locked, and left to that process.
        let locked = RecordFile::open(migration.pair.source_state(), id, sterna_engine::record_file::Side::Source);
        assert_eq!(self::listed(&migration.pair.source_state())[0]["process"], other.pid());
        let left = all();
        let text = String::from_utf8(left.stdout).unwrap();
        assert_eq!(left.status.code(), REFUSED, "{text}");
        assert!(text.contains("NOT SETTLED") && text.contains("is locked"), "{text}");
        drop(locked.unwrap());
        let settled = all();
        let text = String::from_utf8(settled.stdout).unwrap();
        assert!(settled.status.success() && text.contains("QEMU has ended") && text.lines().count() == 1, "{text}");
        assert!(String::from_utf8(all().stdout).unwrap().contains("no migration"));
        for _ in 0..2 {
            let (ended, text) = Side::Source.recover(&migration.pair, &[], None).expect("there is a record").finish();
            assert!(ended.success() && text.contains("QEMU has ended"), "{ended}: {text}");
            assert_eq!(Side::Source.state(&migration.pair), Some(RecordState::Source(SourceState::Gone)));
        }
        assert_eq!(self::listed(&migration.pair.source_state()), json!([]));
    }
}

/// Has the only record in `state` name the process `pid`, and returns the migration.
fn written_by(state: &Path, pid: u32) -> MigrationId {
    let mut files = std::fs::read_dir(state).unwrap().map(|file| file.unwrap().path());
    let path = files.find(|path| path.extension().is_some_and(|ending| ending == "json")).unwrap();
    let mut record = Record::from_json(&std::fs::read(&path).unwrap()).unwrap();
    record.pid = pid;
    std::fs::write(&path, record.to_json().unwrap()).unwrap();
    record.migration
}

/// Returns what `sterna list` prints of the records in `state`.
fn listed(state: &Path) -> Value {
    let output = sterna().args(["list", "--json", "--state-dir"]).arg(state).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_receiver_ends_after_its_outcome_although_its_source_stays_connected() {
    for mode in MODES {
        println!("by {mode}");
        let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        let mut receiver = Sterna::start("receive", command.arg("--insecure"));
        let mut command =
            send_by(mode, pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
        command.args(["--insecure", "--downtime", "10s"]);
        // The source's heartbeats continue meanwhile.
        let hold = Hold::at("source.before-end-guest", pair.scratch.path(), &mut command);
        let mut sender = Sterna::start("send", &mut command);
        let held = hold.reached(&sender);
        assert!(
            eventually(LONG, || receiver.poll().is_some()),
            "it waits for a source that never closes its connection"
        );
        assert!(sender.poll().is_none() && pair.destination.runs());
        drop(held);
        assert!(receiver.finish().0.success() && sender.finish().0.success());
        let migration = Migration { pair, sender: None, receiver: None };
        assert_eq!(migration.exactly_one(), Ok(Side::Destination));
    }
}

#[test]
fn a_source_aborts_if_its_destination_sends_heartbeats_but_reads_nothing() {
    let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    command.arg("--insecure");
    // The destination's channels are open, but its driver never reports that it is ready for pages.
    let hold = Hold::at("destination.after-accept-stream", pair.scratch.path(), &mut command);
    let receiver = Sterna::start("receive", &mut command);
    let mut command = send(pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    let mut sender = Sterna::start("send", command.args(["--insecure", "--stall-limit", "10s"]));
    let held = hold.reached(&receiver);
    assert!(eventually(LONG, || sender.poll().is_some()), "it waits for a destination that never continues");
    assert_eq!(sender.finish().0.code(), FAILED);
    let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("--stall-limit"), "{reason}");
    drop(held);
    receiver.finish();
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_migration_that_exceeds_its_time_limit_is_aborted_and_the_guest_continues() {
    for mode in MODES {
        println!("by {mode}");
        let Some(pair) = Pair::boot_sector(QemuVersion::V10_0) else { return };
        let words = [SLOW, &["--time-limit", "10s"]].concat();
        let mut migration = Migration::start_by(mode, pair, &words, None, None);
        assert_eq!(migration.sender.take().unwrap().finish().0.code(), FAILED);
        let reason = report(&migration.pair.report())["reason"].as_str().unwrap().to_owned();
        let words = ["--time-limit", "time limit", "took longer than it was allowed to"];
        assert!(words.iter().any(|word| reason.contains(word)), "{reason}");
        migration.receiver.take().unwrap().finish();
        assert_eq!(migration.exactly_one(), Ok(Side::Source));
    }
}
