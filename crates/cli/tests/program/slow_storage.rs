//! Storage that answers late, and programs that stop or resume the guest, in the moments of a direct move in which QEMU waits for the storage
//! or the guest is paused. Sterna waits as long as it is right to wait, says for what, and the move settles by itself: the guest executes at
//! exactly one side, or is as another program has left it.
#![cfg(feature = "fault-points")]

use std::path::Path;
use std::process::Command;

use crate::neighbours::qcow2;
use crate::support::pair::Pair;
use crate::support::settle::{Migration, Side};
use crate::support::{CANCELLED, FAILED, Hold, LONG, Sterna, receive, recover, report, send_by};
use serde_json::{Value, json};
use sterna_qemu::qmp::Qmp;
use sterna_qemu_lab::{Guest, NbdAnswer, NbdCommand, NbdRequest, NbdServer, QemuOptions, QemuVersion};
use sterna_wire::switchover::{DestinationState, RecordState, SourceState};

const MIB: u64 = 1 << 20;
/// A second disk of the guest, which does not use it.
const DISK: &str = "second-disk";
/// The numbers of the QEMUs' connections to the server of this disk, which are opened in this order.
const SOURCE: u64 = 1;
const DESTINATION: u64 = 2;
/// How long, in milliseconds, a command waits before Sterna says so. Then a limit that held for all commands, and was longer, is over.
const REPORTED_AFTER: (&str, &str) = ("STERNA_COMMAND_TIME", "300");
/// So long that the guest, which writes all its memory all the time, converges.
const DOWNTIME: [&str; 2] = ["--downtime", "10s"];

fn execute(monitor: &Qmp, command: &str, arguments: Value) -> Value {
    monitor.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
}

/// Starts two QEMUs whose guest boots from its first disk and has `node` in a second one.
fn pair(version: QemuVersion, node: &Value) -> Option<Pair> {
    let mut options = QemuOptions::new(version, Guest::BootSector);
    options.extra.extend(["-blockdev".into(), node.to_string()]);
    // The firmware boots from the first one.
    options.extra.extend(["-device".into(), format!("ide-hd,id={DISK},drive=second-node,bus=ide.3")]);
    let pair = Pair::start(&options, &options.incoming())?;
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    Some(pair)
}

/// A guest with a disk in the format qcow2, which QEMU reads whenever it takes the disk, on a server that answers as the test decides.
fn with_slow_disk(version: QemuVersion) -> Option<(Pair, NbdServer)> {
    let storage = NbdServer::memory(qcow2::empty(MIB)).unwrap();
    let mut file = storage.blockdev("unused");
    file.as_object_mut().unwrap().remove("node-name");
    let pair = pair(version, &json!({ "driver": "qcow2", "node-name": "second-node", "file": file }))?;
    assert_eq!(storage.connections(), DESTINATION);
    Some((pair, storage))
}

/// Holds the requests of one QEMU for which `held` returns true.
fn hold(storage: &NbdServer, connection: u64, held: impl Fn(&NbdRequest<'_>) -> bool + Send + 'static) {
    storage.decide(move |request| match request.connection == connection && held(request) {
        true => NbdAnswer::Hold,
        false => NbdAnswer::Serve,
    });
}

fn answer(storage: &NbdServer) {
    storage.serve_all();
    storage.release_all();
}

fn start_receive(pair: &Pair, adapt: impl FnOnce(&mut Command)) -> Sterna {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    command.arg("--insecure").env(REPORTED_AFTER.0, REPORTED_AFTER.1);
    adapt(&mut command);
    Sterna::start("receive", &mut command)
}

fn start_send(pair: &Pair, receiver: &Sterna, adapt: impl FnOnce(&mut Command)) -> Sterna {
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_by("direct", qmp, &receiver.address(), &state, &json);
    command.arg("--insecure").args(DOWNTIME).env(REPORTED_AFTER.0, REPORTED_AFTER.1);
    adapt(&mut command);
    Sterna::start("send", &mut command)
}

/// Waits until `sterna` says that QEMU waits for the storage in `command`; the storage is named.
fn waits(sterna: &Sterna, storage: &NbdServer, command: &str) {
    let line = sterna.wait_until(command, |lines| {
        let waits = |line: &&String| line.contains("waiting for the storage") && line.contains(&format!("`{command}`"));
        lines.iter().find(waits).cloned()
    });
    assert!(line.contains(&storage.socket().display().to_string()), "{line}");
    assert!(!storage.held().is_empty(), "the requests are still held");
}

fn completed(pair: Pair, sender: Sterna, receiver: Sterna) {
    let (sent, received) = (sender.finish().0, receiver.finish().0);
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    let report = report(&pair.report());
    assert_eq!(report["outcome"], "completed", "{report}");
    let reported_after: f64 = REPORTED_AFTER.1.parse().unwrap();
    assert!(report["downtime_ms"].as_f64().unwrap() >= reported_after, "the wait is part of the downtime: {report}");
    let migration = Migration { pair, sender: None, receiver: None };
    let records = [RecordState::Source(SourceState::Finished), RecordState::Destination(DestinationState::Running)];
    assert_eq!(migration.records(), records.map(Some));
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// Checks that the guest executes at the source, that no other sterna is needed, and returns the reason.
fn goes_on_at_the_source(pair: Pair, sender: Sterna, receiver: Sterna, code: Option<i32>) -> String {
    let sent = sender.finish().0;
    assert_eq!(sent.code(), code);
    assert!(!receiver.finish().0.success());
    let report = report(&pair.report());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.records()[0], Some(RecordState::Source(SourceState::Resumed)));
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
    report["reason"].as_str().expect("a reason").to_owned()
}

/// Has the guest's disk need a flush, and holds it.
fn hold_flush(pair: &Pair, storage: &NbdServer) {
    hold(storage, SOURCE, |request| request.command == NbdCommand::Flush);
    let write = json!({ "command-line": format!("qemu-io -d {DISK} \"write 0 4k\"") });
    let said = execute(&pair.source.monitor, "human-monitor-command", write);
    assert!(said.as_str().is_none_or(|text| !text.contains("rror")), "{said}");
}

#[test]
fn a_direct_move_waits_for_storage_that_answers_late_while_the_guest_is_paused() {
    let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
    hold_flush(&pair, &storage);
    let receiver = start_receive(&pair, |_| {});
    let sender = start_send(&pair, &receiver, |_| {});
    waits(&sender, &storage, "stop");
    answer(&storage);
    completed(pair, sender, receiver);
}

#[test]
fn a_direct_move_is_cancelled_while_the_pause_waits_for_storage_and_the_guest_goes_on_when_it_answers() {
    let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
    hold_flush(&pair, &storage);
    let receiver = start_receive(&pair, |_| {});
    let sender = start_send(&pair, &receiver, |_| {});
    waits(&sender, &storage, "stop");
    sender.interrupt();
    // Before the guest is resumed, QEMU is asked for its state, and is still in `stop`.
    waits(&sender, &storage, "query-status");
    answer(&storage);
    goes_on_at_the_source(pair, sender, receiver, CANCELLED);
}

#[test]
fn a_direct_move_whose_storage_does_not_let_the_guest_pause_fails_and_the_guest_goes_on_when_it_answers() {
    let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
    hold_flush(&pair, &storage);
    let receiver = start_receive(&pair, |_| {});
    let sender = start_send(&pair, &receiver, |command| {
        command.env("STERNA_SETTLING_TIME", "5000");
    });
    waits(&sender, &storage, "stop");
    // The first wait is over, and nothing else can be done for the guest.
    waits(&sender, &storage, "query-status");
    sender.interrupt();
    sender.wait_for("SIGINT");
    answer(&storage);
    let disks = storage.socket().display().to_string();
    let reason = goes_on_at_the_source(pair, sender, receiver, FAILED);
    assert!(reason.contains("has not answered within 5.0 s") && reason.contains("`stop`"), "{reason}");
    assert!(reason.contains(&disks), "{reason}");
}

/// Begins a move that is cancelled right before the decision, when the source's storage has ceased to answer, and waits until QEMU waits for
/// it in `cont`.
fn resumed_slowly_at_source() -> Option<(Pair, NbdServer, Sterna, Sterna)> {
    let (pair, storage) = with_slow_disk(QemuVersion::V10_0)?;
    let receiver = start_receive(&pair, |_| {});
    let mut point = None;
    let sender = start_send(&pair, &receiver, |command| {
        point = Some(Hold::at("source.before-relay-shut", pair.scratch.path(), command));
    });
    let reached = point.unwrap().reached(&sender);
    hold(&storage, SOURCE, |_| true);
    sender.interrupt();
    sender.wait_for("SIGINT");
    drop(reached);
    waits(&sender, &storage, "cont");
    Some((pair, storage, sender, receiver))
}

#[test]
fn a_guest_that_is_taken_back_goes_on_when_its_storage_answers_however_late_and_often_that_is_interrupted() {
    let Some((pair, storage, sender, receiver)) = resumed_slowly_at_source() else { return };
    sender.interrupt();
    sender.wait_for("already being cancelled");
    assert!(!storage.held().is_empty());
    answer(&storage);
    goes_on_at_the_source(pair, sender, receiver, CANCELLED);
}

#[test]
fn recover_waits_for_the_storage_of_a_guest_whose_send_was_killed_while_it_waited() {
    let Some((pair, storage, mut sender, receiver)) = resumed_slowly_at_source() else { return };
    let id = Side::Source.record(&pair).unwrap().migration.to_string();
    sender.kill();
    drop(sender);
    let recover = || {
        let recovery = Sterna::start("recover", &mut recover(&id, "source", &pair.source_state()));
        let line = recovery.wait_for("waiting for QEMU's monitor");
        assert!(line.contains("storage"), "{line}");
        assert!(!storage.held().is_empty());
        recovery
    };
    let interrupted = recover();
    interrupted.interrupt();
    assert_eq!(interrupted.finish().0.code(), CANCELLED);
    let recovery = recover();
    answer(&storage);
    assert!(recovery.finish().0.success());
    assert!(!receiver.finish().0.success());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.records()[0], Some(RecordState::Source(SourceState::Resumed)));
    assert_eq!(migration.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_destination_waits_for_its_storage_before_it_is_prepared() {
    for version in [QemuVersion::V10_0, QemuVersion::V11_1] {
        let Some((pair, storage)) = with_slow_disk(version) else { return };
        hold(&storage, DESTINATION, |_| true);
        let receiver = start_receive(&pair, |_| {});
        let sender = start_send(&pair, &receiver, |_| {});
        waits(&receiver, &storage, "blockdev-set-active");
        answer(&storage);
        completed(pair, sender, receiver);
    }
}

#[test]
fn a_direct_move_is_cancelled_while_a_round_waits_for_storage() {
    let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
    hold(&storage, SOURCE, |request| request.command == NbdCommand::Write);
    let write = json!({ "command-line": format!("qemu-io -d {DISK} \"aio_write 0 4k\"") });
    execute(&pair.source.monitor, "human-monitor-command", write);
    let receiver = start_receive(&pair, |_| {});
    let sender = start_send(&pair, &receiver, |_| {});
    waits(&sender, &storage, "transaction");
    sender.interrupt();
    // The destination is released at once, although QEMU still waits.
    assert!(!receiver.finish().0.success());
    assert!(!storage.held().is_empty());
    answer(&storage);
    assert_eq!(sender.finish().0.code(), CANCELLED);
    assert_eq!(report(&pair.report())["outcome"], "cancelled");
    assert_eq!(Migration { pair, sender: None, receiver: None }.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_cancelled_move_goes_on_at_the_source_while_the_destination_waits_for_its_storage() {
    let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
    hold(&storage, DESTINATION, |_| true);
    let receiver = start_receive(&pair, |_| {});
    let sender = start_send(&pair, &receiver, |_| {});
    waits(&receiver, &storage, "blockdev-set-active");
    sender.interrupt();
    assert_eq!(sender.finish().0.code(), CANCELLED);
    let (received, output) = receiver.finish();
    assert!(!received.success());
    // Its QEMU hangs, and is named for the operator.
    assert!(output.contains(&format!("kill -KILL {}", pair.destination.qemu.pid())), "{output}");
    assert!(!storage.held().is_empty());
    answer(&storage);
    assert_eq!(Migration { pair, sender: None, receiver: None }.exactly_one(), Ok(Side::Source));
}

/// Moves a guest whose destination's storage has ceased to answer when the guest is to be started.
fn started_slowly(version: QemuVersion) {
    let Some((pair, storage)) = with_slow_disk(version) else { return };
    let mut point = None;
    let receiver = start_receive(&pair, |command| {
        point = Some(Hold::at("destination.before-cont", pair.scratch.path(), command));
    });
    let sender = start_send(&pair, &receiver, |_| {});
    let reached = point.unwrap().reached(&receiver);
    hold(&storage, DESTINATION, |_| true);
    drop(reached);
    waits(&receiver, &storage, "cont");
    for side in [&receiver, &sender] {
        side.interrupt();
        side.wait_for("SIGINT");
    }
    answer(&storage);
    completed(pair, sender, receiver);
}

#[test]
fn a_decided_move_completes_when_the_destinations_storage_answers() {
    started_slowly(QemuVersion::V10_0);
}

#[test]
fn a_decided_move_between_qemus_of_11_1_completes_when_the_destinations_storage_answers() {
    started_slowly(QemuVersion::V11_1);
}

#[test]
fn recover_starts_a_guest_at_the_destination_when_its_storage_answers() {
    let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
    let crash = |command: &mut Command| {
        command.env("STERNA_FAULT", "destination.before-cont:crash");
    };
    let receiver = start_receive(&pair, crash);
    let sender = start_send(&pair, &receiver, |_| {});
    receiver.finish();
    hold(&storage, DESTINATION, |_| true);
    let id = Side::Destination.record(&pair).unwrap().migration.to_string();
    let mut command = recover(&id, "destination", &pair.destination_state());
    let recovery = Sterna::start("recover", command.env(REPORTED_AFTER.0, REPORTED_AFTER.1));
    waits(&recovery, &storage, "cont");
    answer(&storage);
    assert!(recovery.finish().0.success());
    assert!(sender.finish().0.success());
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// Moves the guest, calls `act` while `side` is held at `point`, and returns the pair, the exit codes of both and the lines of both.
fn while_held(
    pair: Pair,
    side: Side,
    point: &str,
    act: impl FnOnce(&Pair),
) -> (Pair, [Option<i32>; 2], [Vec<String>; 2]) {
    let mut held = None;
    let scratch: &Path = pair.scratch.path();
    let mut hold = |command: &mut Command| held = Some(Hold::at(point, scratch, command));
    let receiver = start_receive(&pair, |command| {
        if side == Side::Destination {
            hold(command);
        }
    });
    let sender = start_send(&pair, &receiver, |command| {
        if side == Side::Source {
            hold(command);
        }
    });
    let reached = held.unwrap().reached(if side == Side::Source { &sender } else { &receiver });
    act(&pair);
    drop(reached);
    let ((sent, lines), (received, received_lines)) = (sender.finish_with_lines(), receiver.finish_with_lines());
    (pair, [sent.code(), received.code()], [lines, received_lines])
}

fn boot_sector_pair() -> Option<Pair> {
    Pair::boot_sector(QemuVersion::V10_0)
}

fn stop(monitor: &Qmp) {
    execute(monitor, "stop", json!({}));
}

#[test]
fn a_guest_that_another_program_stops_just_before_the_pause_stays_stopped_at_the_source() {
    let Some(pair) = boot_sector_pair() else { return };
    let (pair, codes, _) = while_held(pair, Side::Source, "source.before-stop", |pair| stop(&pair.source.monitor));
    assert_eq!(codes[0], FAILED);
    let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("another program stopped the guest just before"), "{reason}");
    assert_eq!(pair.source.status().as_deref(), Some("paused"), "it was not resumed");
    assert_ne!(pair.destination.status().as_deref(), Some("running"));
    execute(&pair.source.monitor, "cont", json!({}));
    assert_eq!(Migration { pair, sender: None, receiver: None }.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_guest_that_another_program_stops_and_resumes_before_the_pause_moves() {
    let Some(pair) = boot_sector_pair() else { return };
    let (pair, codes, _) = while_held(pair, Side::Source, "source.before-stop", |pair| {
        stop(&pair.source.monitor);
        execute(&pair.source.monitor, "cont", json!({}));
    });
    assert_eq!(codes, [Some(0); 2]);
    assert_eq!(Migration { pair, sender: None, receiver: None }.exactly_one(), Ok(Side::Destination));
}

#[test]
fn a_move_of_a_guest_that_another_program_resumes_in_the_pause_names_that_and_not_the_disk_that_is_locked_again() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(MIB).unwrap();
    let file = json!({ "driver": "file", "filename": image, "locking": "on" });
    let node = json!({ "driver": "raw", "node-name": "second-node", "file": file });
    let Some(pair) = pair(QemuVersion::V10_0, &node) else { return };
    let resume = |pair: &Pair| drop(execute(&pair.source.monitor, "cont", json!({})));
    // Noticed before the destination tries to lock the disk.
    let (pair, codes, _) = while_held(pair, Side::Source, "source.before-state", resume);
    assert_eq!(codes[0], FAILED);
    let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("another program let the guest run") && !reason.contains("lock"), "{reason}");
    assert_eq!(Migration { pair, sender: None, receiver: None }.exactly_one(), Ok(Side::Source));
}

#[test]
fn a_guest_that_another_program_stops_right_after_its_start_at_the_destination_has_moved_and_stays_stopped() {
    let Some(pair) = boot_sector_pair() else { return };
    let act = |pair: &Pair| stop(&pair.destination.monitor);
    let (pair, codes, [_, lines]) = while_held(pair, Side::Destination, "after-cont", act);
    assert_eq!(codes, [Some(0); 2]);
    assert!(lines.iter().any(|line| line.contains("another program has stopped it")), "{lines:?}");
    assert_eq!(pair.destination.status().as_deref(), Some("paused"));
    execute(&pair.destination.monitor, "cont", json!({}));
    assert_eq!(Migration { pair, sender: None, receiver: None }.exactly_one(), Ok(Side::Destination));
}

/// The same in real time: longer than all limits that hold before the decision, and than the silence after which a peer counts as lost.
mod soak {
    use std::time::Duration;

    use super::*;
    use crate::support::pair::eventually;

    fn answer_after_45_s(storage: &NbdServer) {
        eventually(Duration::from_secs(45), || false);
        answer(storage);
    }

    #[test]
    fn a_decided_move_completes_when_the_destinations_storage_answers_after_45_s() {
        let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
        let mut point = None;
        let receiver = start_receive(&pair, |command| {
            point = Some(Hold::at("destination.before-cont", pair.scratch.path(), command));
        });
        let sender = start_send(&pair, &receiver, |_| {});
        let reached = point.unwrap().reached(&receiver);
        hold(&storage, DESTINATION, |_| true);
        drop(reached);
        waits(&receiver, &storage, "cont");
        answer_after_45_s(&storage);
        completed(pair, sender, receiver);
    }

    #[test]
    fn a_guest_that_is_taken_back_goes_on_when_its_storage_answers_after_45_s() {
        let Some((pair, storage, sender, receiver)) = resumed_slowly_at_source() else { return };
        answer_after_45_s(&storage);
        goes_on_at_the_source(pair, sender, receiver, CANCELLED);
    }

    #[test]
    fn a_guest_whose_storage_answers_45_s_after_the_pause_began_goes_on_at_the_source() {
        let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
        hold_flush(&pair, &storage);
        let receiver = start_receive(&pair, |_| {});
        let sender = start_send(&pair, &receiver, |_| {});
        waits(&sender, &storage, "stop");
        answer_after_45_s(&storage);
        let reason = goes_on_at_the_source(pair, sender, receiver, FAILED);
        assert!(reason.contains("has not answered within 30.0 s"), "{reason}");
    }

    #[test]
    fn a_guest_whose_destination_has_no_storage_for_45_s_before_the_decision_goes_on_at_the_source() {
        let Some((pair, storage)) = with_slow_disk(QemuVersion::V10_0) else { return };
        hold(&storage, DESTINATION, |_| true);
        let receiver = start_receive(&pair, |_| {});
        let sender = start_send(&pair, &receiver, |_| {});
        waits(&receiver, &storage, "blockdev-set-active");
        answer_after_45_s(&storage);
        let reason = goes_on_at_the_source(pair, sender, receiver, FAILED);
        assert!(reason.contains("has not answered within 30.0 s"), "{reason}");
    }
}
