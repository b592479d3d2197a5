//! A guest that ends by itself while it is moved: it shuts down, panics, or resets where its QEMU ends at a reset. With `-no-shutdown` its QEMU
//! lives on with a guest that never runs again, without that it exits, as it does when it crashes. Both sides report what has happened, their
//! records are settled, and no text advises to run another copy of that guest.

use serde_json::{Value, json};
use sterna_qemu_lab::boot_sector::{End, end};
use sterna_qemu_lab::{Guest, QemuOptions, QemuVersion, ram::Ram};
use sterna_wire::switchover::{DestinationState, RecordState, SourceState};

use crate::support::pair::{Pair, Watched, eventually};
use crate::support::settle::{Migration, Side};
use crate::support::{
    DOES_NOT_RUN, FAILED, FIRST_MOMENT, Hold, LONG, LOST, MODES, Sterna, UNCONFIRMED, in_round, receive, report,
    send_by,
};

const GUEST_ENDED: Option<i32> = Some(10);
const COMPLETED: Option<i32> = Some(0);
/// So slow that a migration takes seconds, and that the guest writes more meanwhile than fits its downtime.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"];

/// Returns a guest that can end, whose QEMU then lives on if `stays`.
fn guest(version: QemuVersion, stays: bool) -> QemuOptions {
    let mut options = QemuOptions::new(version, Guest::BootSector);
    options.extra.extend(["-device", "pvpanic"].map(String::from));
    options.extra.extend(stays.then(|| "-no-shutdown".to_owned()));
    options
}

/// Starts a pair whose source runs a guest that works.
fn pair(version: QemuVersion, stays: bool) -> Option<Pair> {
    let options = guest(version, stays);
    let pair = Pair::start(&options, &options.incoming())?;
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    Some(pair)
}

/// Has the guest in this QEMU end as soon as it executes.
fn ends(side: &Watched, how: End) {
    let ram = Ram::open(side.qemu.pid(), side.qemu.memory()).unwrap();
    end(&ram, how).unwrap();
}

/// Checks that the guest of this QEMU has ended, and that its QEMU lives in the state `state`, or has exited.
fn has_ended(side: &mut Watched, state: Option<&str>) {
    match state {
        Some(state) => {
            assert!(eventually(LONG, || side.status().as_deref() == Some(state)), "{}", side.state());
        }
        None => {
            let status = side.qemu.wait_exit(LONG).unwrap();
            assert!(status.success(), "{}", side.state());
        }
    }
}

/// Checks that both sides are settled, that a `recover` of either has nothing to do, and that its sentence does not advise to run a copy.
fn settled(pair: &Pair, source: SourceState, destination: DestinationState) {
    for (side, state) in
        [(Side::Source, RecordState::Source(source)), (Side::Destination, RecordState::Destination(destination))]
    {
        assert_eq!(side.state(pair), Some(state));
        let (status, text) = side.recover(pair, &[], None).expect("there is a record").finish();
        assert!(status.success() && !text.contains("fenced"), "{side:?}: {text}");
        assert_eq!(side.state(pair), Some(state));
    }
}

/// The exit codes where the guest has ended by itself at the source. Without its QEMU (`state`), QEMU's own stream breaks off, and the
/// destination's QEMU may fail, and end `receive`, before the source's reason is there.
fn both_know(codes: [Option<i32>; 2], mode: &str, state: Option<&str>) {
    let at_destination = if codes[1] == FAILED && mode == "stream" && state.is_none() { FAILED } else { GUEST_ENDED };
    assert_eq!(codes, [GUEST_ENDED, at_destination], "by {mode}");
}

/// Moves a guest that ends in a round at its source, by `end`. Returns the exit codes, the report, and the texts of both commands.
fn ended_in_a_round(mode: &str, pair: &Pair, end: impl FnOnce(&Watched)) -> ([Option<i32>; 2], Value, [String; 2]) {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let mut command =
        send_by(mode, pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.arg("--insecure").args(SLOW));
    sender.wait_until("a round", |lines| in_round(lines, 1));
    end(&pair.source);
    let (sent, text) = sender.finish();
    let (received, at_destination) = receiver.finish();
    ([sent.code(), received.code()], report(&pair.report()), [text, at_destination])
}

fn shuts_down_in_a_round(version: QemuVersion, mode: &str, stays: bool) {
    println!("{version} by {mode}, {}", if stays { "with -no-shutdown" } else { "without -no-shutdown" });
    let Some(mut pair) = pair(version, stays) else { return };
    let (codes, report, texts) = ended_in_a_round(mode, &pair, |source| ends(source, End::PowerOff));
    both_know(codes, mode, stays.then_some("shutdown"));
    assert_eq!([&report["outcome"], &report["kind"]], ["guest_ended"; 2], "{report}");
    assert_eq!(report["reason"], "the guest has shut itself down");
    assert!(texts[0].contains("there is nothing to recover"), "{}", texts[0]);
    assert!(codes[1] == FAILED || texts[1].contains("has shut itself down"), "{}", texts[1]);
    texts.iter().for_each(|text| assert!(!text.contains("fenced"), "{text}"));
    has_ended(&mut pair.source, stays.then_some("shutdown"));
    pair.destination.qemu.wait_exit(LONG).unwrap();
    settled(&pair, SourceState::Resumed, DestinationState::Aborted);
    assert_eq!(pair.destination.ran(), []);
}

#[test]
fn a_guest_that_shuts_down_in_a_round_of_a_direct_move_ends_the_move_as_that() {
    for stays in [true, false] {
        shuts_down_in_a_round(QemuVersion::V10_0, "direct", stays);
    }
}

#[test]
fn a_guest_that_shuts_down_in_a_round_of_qemus_stream_ends_the_move_as_that() {
    for version in [QemuVersion::V7_2, QemuVersion::V10_0] {
        for stays in [true, false] {
            shuts_down_in_a_round(version, "stream", stays);
        }
    }
}

#[test]
fn a_guest_that_panics_or_resets_itself_in_a_round_is_not_called_shut_down_or_lost() {
    let cases = [
        (End::Panic, true, "has panicked", Some("guest-panicked")),
        (End::Panic, false, "has panicked", None),
        // The laboratory's QEMUs have -no-reboot.
        (End::Reset, true, "has reset itself", Some("shutdown")),
        (End::Reset, false, "has reset itself", None),
    ];
    for mode in MODES {
        for (how, stays, words, state) in cases {
            println!("{how:?} by {mode}, {state:?}");
            let Some(mut pair) = pair(QemuVersion::V10_0, stays) else { return };
            let (codes, report, _) = ended_in_a_round(mode, &pair, |source| ends(source, how));
            both_know(codes, mode, state);
            assert_eq!(report["outcome"], "guest_ended", "{report}");
            assert!(report["reason"].as_str().unwrap().contains(words), "{report}");
            has_ended(&mut pair.source, state);
            settled(&pair, SourceState::Resumed, DestinationState::Aborted);
        }
    }
}

#[test]
fn a_qemu_that_another_program_ends_in_a_round_is_reported_as_that_and_nothing_is_advised() {
    for mode in MODES {
        println!("by {mode}");
        let Some(mut pair) = pair(QemuVersion::V10_0, true) else { return };
        let quit = |source: &Watched| drop(source.monitor.execute("quit", json!({})));
        let (codes, report, texts) = ended_in_a_round(mode, &pair, quit);
        assert_eq!((codes[0], report["outcome"].as_str()), (LOST, Some("lost")), "{report}");
        assert!(report["reason"].as_str().unwrap().contains("another program has ended it"), "{report}");
        assert!(texts[0].contains("nothing is left to recover") && !texts[0].contains("fenced"), "{}", texts[0]);
        has_ended(&mut pair.source, None);
        pair.destination.qemu.wait_exit(LONG).unwrap();
        assert_eq!(Side::Source.state(&pair), Some(RecordState::Source(SourceState::Gone)));
        assert_eq!(Side::Destination.state(&pair), Some(RecordState::Destination(DestinationState::Aborted)));
    }
}

#[test]
fn a_source_that_another_program_ends_before_the_decision_leaves_the_copy_at_the_destination_to_an_operator() {
    let Some(pair) = pair(QemuVersion::V10_0, false) else { return };
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let mut receiver = Sterna::start("receive", command.arg("--insecure"));
    let mut command =
        send_by("direct", pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    command.args(["--insecure", "--downtime", "10s"]);
    let hold = Hold::at("source.before-relay-shut", pair.scratch.path(), &mut command);
    let sender = Sterna::start("send", &mut command);
    let reached = hold.reached(&sender);
    // QEMU may close its monitor before it has answered.
    let _ = pair.source.monitor.execute("quit", json!({}));
    drop(reached);
    let (sent, text) = sender.finish();
    let reason = report(&pair.report())["reason"].as_str().unwrap().to_owned();
    assert_eq!(sent.code(), LOST, "{reason}");
    assert!(reason.contains("another program has ended it") && text.contains("--fenced-peer"), "{reason}: {text}");
    receiver.kill();
    let migration = Migration { pair, sender: None, receiver: None };
    let recovery = Side::Destination.recover(&migration.pair, &["--fenced-peer"], None).expect("there is a record");
    assert!(recovery.finish().0.success());
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

/// Moves a guest and calls `act` with the loaded destination before its guest is started. Returns the exit codes and the texts.
fn acted_at_the_start(mode: &str, pair: &mut Pair, act: impl FnOnce(&mut Watched)) -> ([Option<i32>; 2], [String; 2]) {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    command.arg("--insecure").env(FIRST_MOMENT, LONG.as_millis().to_string());
    let hold = Hold::at("destination.before-cont", pair.scratch.path(), &mut command);
    let receiver = Sterna::start("receive", &mut command);
    let mut command =
        send_by(mode, pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.args(["--insecure", "--downtime", "10s"]));
    let reached = hold.reached(&receiver);
    act(&mut pair.destination);
    drop(reached);
    let (sent, text) = sender.finish();
    let (received, at_destination) = receiver.finish();
    ([sent.code(), received.code()], [text, at_destination])
}

#[test]
fn a_guest_that_shuts_down_in_its_first_instants_at_the_destination_has_moved() {
    let cases = [
        (End::PowerOff, true, "has shut itself down", Some("shutdown")),
        (End::PowerOff, false, "has shut itself down", None),
    ];
    for mode in MODES {
        for (how, stays, words, state) in cases {
            println!("{how:?} by {mode}, {state:?}");
            let Some(mut pair) = pair(QemuVersion::V10_0, stays) else { return };
            let (codes, texts) = acted_at_the_start(mode, &mut pair, |destination| ends(destination, how));
            assert_eq!(codes, [COMPLETED; 2], "{texts:?}");
            has_ended(&mut pair.destination, state);
            pair.source.qemu.wait_exit(LONG).unwrap();
            settled(&pair, SourceState::Finished, DestinationState::Running);
            pair.never_both().unwrap();
            let report = report(&pair.report());
            assert_eq!(report["outcome"], "completed", "{report}");
            assert!(report["guest_ended"].as_str().unwrap().contains(words), "{report}");
            texts.iter().for_each(|text| assert!(text.contains(words), "{text}"));
        }
    }
}

#[test]
fn a_guest_that_panics_or_is_reset_in_its_first_instants_at_the_destination_does_not_run_there() {
    let cases = [
        (End::Panic, true, "has panicked", Some("guest-panicked")),
        (End::Panic, false, "has panicked", None),
        (End::Reset, false, "was reset", None),
    ];
    for mode in MODES {
        for (how, stays, words, state) in cases {
            println!("{how:?} by {mode}, {state:?}");
            let Some(mut pair) = pair(QemuVersion::V10_0, stays) else { return };
            let (codes, texts) = acted_at_the_start(mode, &mut pair, |destination| ends(destination, how));
            assert_eq!(codes, [DOES_NOT_RUN; 2], "{texts:?}");
            texts.iter().for_each(|text| assert!(text.contains(words), "{text}"));
            has_ended(&mut pair.destination, state);
            assert!(pair.source.status().is_some() && !pair.source.runs(), "{}", pair.source.state());
            pair.never_both().unwrap();
        }
    }
}

/// So slow that the guest, which writes all of its memory all the while, is started without most of it, and that the rest takes seconds.
const SHORT_OF_MEMORY: &[&str] =
    &["--method", "none", "--bandwidth", "12MB/s", "--on-no-convergence", "post-copy:1", "--downtime", "200ms"];

#[test]
fn a_guest_that_ends_while_part_of_its_memory_is_still_at_the_source_has_moved() {
    for stays in [true, false] {
        let Some(mut pair) = pair(QemuVersion::V10_0, stays) else { return };
        let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
        let receiver = Sterna::start("receive", command.arg("--insecure"));
        let mut command =
            send_by("direct", pair.source.qemu.qmp_path(), &receiver.address(), &pair.source_state(), &pair.report());
        command.arg("--insecure").args(SHORT_OF_MEMORY);
        let hold = Hold::at("source.after-stop", pair.scratch.path(), &mut command);
        let sender = Sterna::start("send", &mut command);
        let reached = hold.reached(&sender);
        ends(&pair.source, End::PowerOff);
        drop(reached);
        let (sent, text) = sender.finish();
        let (received, lines) = receiver.finish_with_lines();
        assert_eq!([sent.code(), received.code()], [COMPLETED; 2], "{text}\n{lines:?}");
        has_ended(&mut pair.destination, stays.then_some("shutdown"));
        pair.source.qemu.wait_exit(LONG).unwrap();
        settled(&pair, SourceState::Finished, DestinationState::Running);
        pair.never_both().unwrap();
        let report = report(&pair.report());
        assert!(report["guest_ended"].as_str().unwrap().contains("has shut itself down"), "{report}");
        assert!(!report["post_copy"].is_null(), "{report}");
        let not_needed = lines.iter().any(|line| line.contains("the memory that is still at the source is not needed"));
        assert_eq!(not_needed, !stays, "{lines:?}");
    }
}

#[test]
fn a_qemu_that_crashes_when_it_starts_the_guest_is_not_taken_for_a_guest_that_has_ended() {
    for mode in MODES {
        println!("by {mode}");
        let Some(mut pair) = pair(QemuVersion::V10_0, false) else { return };
        let (codes, texts) = acted_at_the_start(mode, &mut pair, Watched::kill);
        assert_eq!(codes, [UNCONFIRMED, LOST], "{texts:?}");
        assert!(!pair.source.runs());
        assert_eq!(Side::Source.state(&pair), Some(RecordState::Source(SourceState::Committed)));
    }
}

#[test]
fn recover_settles_a_guest_that_ends_when_recover_starts_it() {
    for stays in [true, false] {
        let Some(pair) = pair(QemuVersion::V10_0, stays) else { return };
        let mut migration = Migration::start_by("direct", pair, &[], None, Some("destination.before-cont:crash"));
        migration.wait_crash(Side::Destination).unwrap();
        ends(&migration.pair.destination, End::PowerOff);
        let recovery = Side::Destination.recover(&migration.pair, &[], None).expect("there is a record");
        let (status, text) = recovery.finish();
        assert!(status.success() && !text.contains("fenced"), "{text}");
        assert_eq!(migration.sender.take().unwrap().finish().0.code(), COMPLETED);
        let mut pair = migration.pair;
        has_ended(&mut pair.destination, stays.then_some("shutdown"));
        settled(&pair, SourceState::Finished, DestinationState::Running);
        pair.never_both().unwrap();
    }
}

#[test]
fn recover_of_a_guest_that_has_shut_down_since_its_send_was_killed_names_that() {
    let Some(pair) = pair(QemuVersion::V10_0, true) else { return };
    let mut migration = Migration::start_by("direct", pair, SLOW, None, None);
    let mut sender = migration.sender.take().unwrap();
    sender.wait_for("placement: ");
    sender.kill();
    ends(&migration.pair.source, End::PowerOff);
    has_ended(&mut migration.pair.source, Some("shutdown"));
    migration.receiver.take().unwrap().finish();
    let (status, text) = Side::Source.recover(&migration.pair, &[], None).expect("there is a record").finish();
    assert!(status.success() && text.contains("it has shut down") && !text.contains("runs here"), "{text}");
    assert_eq!(migration.pair.source.status().as_deref(), Some("shutdown"));
}
