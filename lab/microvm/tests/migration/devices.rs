//! Guests with four devices that have a large state of their own, write while they are moved, and verify themselves.

use rustix::process::Signal;

use crate::process::{Ended, Kind, Microvm, certificates, moved, moves, moves_until, post_copy_is_possible};

const DEVICES: usize = 4;
/// At both ends: 512 blocks each.
const FOUR: &str = "--devices 4 --device-state 2";
const STATE: u64 = 2 << 20;
/// A downtime so long that the guest is paused on any machine.
const PATIENT: &str = "--downtime 20000";

fn of_each(devices: &serde_json::Value, figure: &str) -> Vec<u64> {
    let devices = devices.as_array().unwrap_or_else(|| panic!("{devices}"));
    devices.iter().map(|device| device[figure].as_u64().unwrap_or_else(|| panic!("{device}"))).collect()
}

/// Checks that all blocks were verified so often, and none was wrong.
#[track_caller]
fn are_whole(ended: &Ended, looks: u64) {
    let devices = &ended.json["devices"];
    assert_eq!(of_each(devices, "wrong"), [0; DEVICES], "{}", ended.output);
    assert!(of_each(devices, "verified").iter().all(|verified| *verified >= looks * STATE / 4096), "{devices}");
    assert!(ended.output.contains("4 devices of 2.00 MiB"), "{}", ended.output);
}

/// Checks that the devices arrived as they were stopped, and continued to write.
#[track_caller]
fn have_moved(sent: &Ended, received: &Ended) {
    let devices = &sent.report()["devices"];
    assert!(of_each(devices, "bytes").iter().all(|bytes| *bytes > STATE), "{devices}");
    // When they were loaded, and at the end.
    are_whole(sent, 1);
    are_whole(received, 2);
    let written = |ended: &Ended| of_each(&ended.json["devices"], "written");
    let (before, after) = (written(sent), written(received));
    assert_eq!((before.len(), after.len()), (DEVICES, DEVICES));
    assert!(before.iter().zip(&after).all(|(before, after)| before < after), "{before:?} {after:?}");
    assert!(sent.output.contains("device       scratch/3: "), "{}", sent.output);
}

#[test]
fn devices_move_over_the_channels_of_memory_and_tls() {
    let certified = tempfile::tempdir().unwrap();
    certificates(certified.path());
    for kind in [Kind::Threads, Kind::KvmLog].into_iter().filter(|kind| kind.is_possible()) {
        let both = format!("--tls {} {FOUR} {}", certified.path().display(), kind.options());
        let (receiving, address) = Microvm::destination(&format!("{both} --allow source.example"));
        let sending = Microvm::start(&format!("{both} --migrate-to {address} {PATIENT}"));
        let (sent, received) = moved(sending.end(), receiving);
        have_moved(&sent, &received);
        let ahead = of_each(&sent.report()["devices"], "ahead_bytes");
        assert!(ahead.iter().all(|bytes| *bytes >= STATE), "{ahead:?}");
        assert_eq!(sent.report()["encrypted"], true);
    }
}

#[test]
fn devices_move_over_channels_of_their_own() {
    let (sent, received) = moves(FOUR, &format!("--device-channels 3 {PATIENT}"), "");
    have_moved(&sent, &received);
    let ahead = of_each(&sent.report()["devices"], "ahead_bytes");
    assert!(ahead.iter().all(|bytes| *bytes >= STATE), "{ahead:?}");
}

#[test]
fn devices_move_one_after_the_other_while_the_guest_is_paused() {
    let (sent, received) = moves(FOUR, &format!("--serial-device-state {PATIENT}"), "");
    have_moved(&sent, &received);
    assert_eq!(of_each(&sent.report()["devices"], "ahead_bytes"), [0; DEVICES]);
}

#[test]
fn devices_are_loaded_when_the_guest_continues_before_its_memory() {
    if !post_copy_is_possible() {
        return;
    }
    let source = "--write-rate unlimited --downtime 10 --post-copy-after 1 --fill random";
    let (sent, received) = moves_until(FOUR, source, 100_000_000, |report| report["post_copy"].is_object());
    have_moved(&sent, &received);
}

#[test]
fn more_state_than_the_destination_keeps_waiting_moves() {
    // Of each device's 2 MiB, a quarter at a time.
    for way in ["", "--device-channels 1", "--serial-device-state"] {
        let (sent, received) = moves(FOUR, &format!("{way} {PATIENT}"), "--device-queue 1");
        have_moved(&sent, &received);
    }
}

#[test]
fn other_devices_than_the_destinations_are_refused_before_anything_is_begun() {
    let (mut receiving, address) = Microvm::destination("--insecure --devices 5 --device-state 2");
    let sent = Microvm::start(&format!("--insecure --migrate-to {address} {FOUR}")).end();
    assert_eq!((sent.code, sent.error()["guest"].as_str()), (Some(3), Some("Untouched")), "{}", sent.output);
    let lacks = "the destination awaits the state of devices that the source does not send: scratch/4";
    assert!(sent.error()["reason"].as_str().unwrap().contains(lacks), "{}", sent.output);
    sent.guest_is_well();
    are_whole(&sent, 1);
    receiving.wait_for(lacks);
    // The destination waits for a source with the same devices.
    let same = Microvm::start(&format!("--insecure --migrate-to {address} --devices 5 --device-state 2 {PATIENT}"));
    moved(same.end(), receiving);
}

#[test]
fn devices_of_another_size_are_refused_while_the_guest_runs() {
    let (receiving, address) = Microvm::destination("--insecure --devices 4 --device-state 3");
    let sent = Microvm::start(&format!("--insecure --migrate-to {address} {FOUR} {PATIENT}")).end();
    let received = receiving.end();
    assert_eq!((sent.code, received.code), (Some(3), Some(3)), "{}\n\n{}", sent.output, received.output);
    assert_eq!(sent.error()["guest"], "RunsAtSource", "{}", sent.output);
    let words = "with 512 blocks, this one is number";
    assert!(sent.error()["reason"].as_str().unwrap().contains(words), "{}", sent.output);
    assert!(!sent.output.contains("stopping the guest"), "{}", sent.output);
    sent.guest_is_well();
    are_whole(&sent, 1);
}

/// Starts a guest whose devices are sent for half a minute while it is paused. Returns both ends once it is paused.
fn in_the_stop() -> (Microvm, Microvm) {
    let both = "--insecure --memory 4 --devices 4 --device-state 16";
    let (receiving, address) = Microvm::destination(both);
    let slow = "--serial-device-state --bandwidth 2000000 --downtime 600000 --fill zeros --write-rate 0";
    let mut sending = Microvm::start(&format!("{both} --migrate-to {address} {slow}"));
    sending.wait_for("stopping the guest");
    (sending, receiving)
}

/// Checks that the guest and its devices continue at the source.
#[track_caller]
fn stayed(sent: &Ended, words: &str) {
    assert_eq!((sent.code, sent.error()["guest"].as_str()), (Some(3), Some("RunsAtSource")), "{}", sent.output);
    assert!(sent.error()["reason"].as_str().unwrap().contains(words), "{}", sent.output);
    sent.guest_is_well();
    assert!(sent.json["after"]["device_blocks"].as_u64() >= Some(DEVICES as u64), "{}", sent.output);
    assert_eq!(of_each(&sent.json["devices"], "wrong"), [0; DEVICES], "{}", sent.output);
}

#[test]
fn a_destination_that_is_killed_while_the_guest_is_paused_leaves_it_at_the_source() {
    let (sending, mut receiving) = in_the_stop();
    receiving.kill();
    assert_eq!(receiving.end().code, None);
    stayed(&sending.end(), "the destination was lost");
}

#[test]
fn a_migration_that_is_cancelled_while_devices_are_sent_leaves_the_guest_at_the_source() {
    let (sending, receiving) = in_the_stop();
    sending.signal(Signal::INT);
    stayed(&sending.end(), "cancelled");
    let received = receiving.end();
    assert_eq!((received.code, received.error()["guest"].as_str()), (Some(3), Some("NotHere")), "{}", received.output);
}
