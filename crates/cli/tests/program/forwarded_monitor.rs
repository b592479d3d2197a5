//! QEMU's monitor is reached through another program that forwards its socket, and that ends while QEMU lives: that is not taken for the end of
//! QEMU, and the guest never runs twice.

use sterna_qemu_lab::QemuVersion;
use sterna_wire::switchover::{DestinationState, RecordState, SourceState};

use crate::support::forwarder::Forwarder;
use crate::support::pair::{Pair, eventually};
use crate::support::settle::{Migration, Side};
use crate::support::{FAILED, LONG, PEER_REFUSED, REFUSED, receive, report, send_by};

/// So slow that a migration is certainly active when its monitor is lost.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"];

/// Starts a pair with a forwarder before the monitor of `side`; none if the tools are missing.
fn forwarded(side: Side) -> Option<(Pair, Forwarder)> {
    let mut pair = Pair::boot_sector(QemuVersion::V10_0)?;
    let scratch = pair.scratch.path();
    let watched = if side == Side::Source { &mut pair.source } else { &mut pair.destination };
    let forwarder = Forwarder::before(watched, scratch);
    Some((pair, forwarder))
}

/// Starts a migration in which the sterna of `side` crashes at the point `fault`, and waits until it has. Then the other sterna and the
/// forwarder before the monitor of `side` end as well.
fn all_have_ended(side: Side, fault: &str) -> Option<Migration> {
    let (pair, forwarder) = forwarded(side)?;
    let fault = format!("{fault}:crash");
    let (at_source, at_destination) = if side == Side::Source { (Some(&*fault), None) } else { (None, Some(&*fault)) };
    let mut migration = Migration::start(pair, &[], at_source, at_destination);
    migration.wait_crash(side).unwrap();
    drop((migration.sender.take(), migration.receiver.take()));
    drop(forwarder);
    let process = |side: Side| side.record(&migration.pair).expect("it has begun").monitor_process;
    assert_eq!(process(side), None, "the forwarder was taken for QEMU");
    assert!(process(side.other()).is_some());
    Some(migration)
}

/// Checks that `recover` at `side`, whose monitor does not answer, changes nothing and claims nothing.
fn is_not_known(migration: &Migration, side: Side) {
    let before = (migration.records(), migration.pair.states());
    let (status, lines) = side.recover(&migration.pair, &[], None).expect("there is a record").finish_with_lines();
    assert_eq!(status.code(), FAILED, "{lines:?}");
    let text = lines.iter().find(|line| line.starts_with("sterna: ")).expect("one line says why");
    for word in ["cannot be known whether QEMU lives", "nothing is settled yet", "`ps`", "Only if that shows"] {
        assert!(text.contains(word), "{word:?}: {text}");
    }
    assert!(!text.contains("QEMU has ended, and") && !text.contains("is gone"), "{text}");
    assert_eq!((migration.records(), migration.pair.states()), before);
}

/// Starts the forwarder again, and settles both sides. Returns where the guest runs.
fn settled(mut migration: Migration, side: Side) -> (Migration, Side) {
    let watched = if side == Side::Source { &migration.pair.source } else { &migration.pair.destination };
    let _forwarder = Forwarder::start(watched);
    migration.settle().unwrap();
    let runs = migration.exactly_one().unwrap();
    (migration, runs)
}

#[test]
fn a_source_whose_forwarder_ended_after_prepared_is_not_called_ended_and_takes_its_guest_back() {
    let Some(migration) = all_have_ended(Side::Source, "source.before-record-committed") else { return };
    let prepared = RecordState::Destination(DestinationState::Prepared);
    assert_eq!(Side::Destination.state(&migration.pair), Some(prepared));
    assert_eq!(migration.pair.states(), ["postmigrate", "paused"]);
    is_not_known(&migration, Side::Source);
    let (migration, runs) = settled(migration, Side::Source);
    assert_eq!(runs, Side::Source);
    assert_eq!(Side::Source.state(&migration.pair), Some(RecordState::Source(SourceState::Resumed)));
    // The copy there was ended.
    assert!(eventually(LONG, || migration.pair.destination.status().is_none()));
}

#[test]
fn a_destination_whose_forwarder_ended_after_the_decision_is_not_called_ended_and_starts_the_guest() {
    let Some(migration) = all_have_ended(Side::Destination, "destination.after-record-committed") else { return };
    assert_eq!(migration.pair.states(), ["postmigrate", "paused"]);
    is_not_known(&migration, Side::Destination);
    let (migration, runs) = settled(migration, Side::Destination);
    assert_eq!(runs, Side::Destination);
    assert!(eventually(LONG, || migration.pair.source.status().is_none()));
}

#[test]
fn a_prepared_copy_behind_a_forwarder_is_ended_once_the_source_has_taken_its_guest_back() {
    let Some(migration) = all_have_ended(Side::Destination, "destination.after-record-prepared") else { return };
    is_not_known(&migration, Side::Destination);
    let (migration, runs) = settled(migration, Side::Destination);
    assert_eq!(runs, Side::Source);
    assert!(eventually(LONG, || migration.pair.destination.status().is_none()));
}

#[test]
fn a_guest_between_forwarded_monitors_moves_by_stream_and_its_source_is_ended() {
    let Some((mut pair, _source)) = forwarded(Side::Source) else { return };
    let scratch = pair.scratch.path();
    let _destination = Forwarder::before(&mut pair.destination, scratch);
    let mut migration = Migration::start_by("auto", pair, &[], None, None);
    let (status, lines) = migration.sender.take().unwrap().finish_with_lines();
    assert_eq!(status.code(), Some(0), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("it is not known which process QEMU is")), "{lines:?}");
    let (status, lines) = migration.receiver.take().unwrap().finish_with_lines();
    assert_eq!(status.code(), Some(0), "{lines:?}");
    let report = report(&migration.pair.report());
    assert_eq!((report["mode"].as_str(), report["source_after"].as_str()), (Some("stream"), Some("quit")), "{report}");
    assert_eq!(report["warnings"].as_array().map_or(0, Vec::len), 0, "{report}");
    assert!(eventually(LONG, || migration.pair.source.status().is_none()));
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn a_monitor_that_is_lost_during_the_rounds_ends_the_move_and_the_guest_runs_on() {
    let Some((pair, forwarder)) = forwarded(Side::Source) else { return };
    let mut migration = Migration::start(pair, SLOW, None, None);
    let sender = migration.sender.take().unwrap();
    sender.wait_for("placement: ");
    drop(forwarder);
    let (status, text) = sender.finish();
    assert!(!status.success(), "{text}");
    for claim in ["QEMU has ended", "is gone", "fenced"] {
        assert!(!text.contains(claim), "{text}");
    }
    let (_, runs) = settled(migration, Side::Source);
    assert_eq!(runs, Side::Source);
}

#[test]
fn no_guest_is_moved_directly_where_another_process_than_qemu_serves_its_monitor() {
    let Some((mut pair, forwarder)) = forwarded(Side::Source) else { return };
    let send = |pair: &Pair, to: &str| {
        let qmp = &pair.source.qmp_path;
        let mut send = send_by("direct", qmp, to, &pair.source_state(), &pair.report());
        let output = send.arg("--insecure").output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = send(&pair, "127.0.0.1:1");
    assert_eq!(code, REFUSED, "{text}");
    assert!(text.contains(&format!("process {}", forwarder.pid())) && text.contains("vCPUs"), "{text}");

    drop(forwarder);
    pair.source.qmp_path = pair.source.qemu.qmp_path().to_owned();
    let scratch = pair.scratch.path();
    let forwarder = Forwarder::before(&mut pair.destination, scratch);
    let mut command = receive(&pair.destination.qmp_path, &pair.destination_state());
    let receiver = crate::support::Sterna::start("receive", command.arg("--insecure"));
    let (code, text) = send(&pair, &receiver.address());
    assert_eq!(code, PEER_REFUSED, "{text}");
    assert!(text.contains(&format!("process {}", forwarder.pid())) && text.contains("vCPUs"), "{text}");
    assert!(pair.source.runs());
    pair.source.untouched().unwrap();
    assert_eq!(pair.destination.status().as_deref(), Some("inmigrate"));
}
