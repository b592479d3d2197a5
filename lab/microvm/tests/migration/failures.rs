//! Migrations that fail: the guest continues at the source and is intact, and never runs twice.

use crate::process::{Ended, Kind, Microvm};
use rustix::process::Signal;

/// A guest whose rounds never end: it writes as fast as it can, and 2 MB/s are sent, which a guest on a very busy machine exceeds too.
const ENDLESS: &str = "--write-rate unlimited --bandwidth 2000000 --downtime 1";

fn possible() -> impl Iterator<Item = Kind> {
    [Kind::Threads, Kind::KvmLog, Kind::KvmRing].into_iter().filter(|kind| kind.is_possible())
}

/// Returns both ends in the middle of the rounds.
fn in_the_rounds(kind: Kind) -> (Microvm, Microvm) {
    let (receiving, address) = Microvm::destination(&format!("--insecure --memory 8 {}", kind.options()));
    let source = format!("--insecure --memory 8 --migrate-to {address} {ENDLESS} {}", kind.options());
    let mut sending = Microvm::start(&source);
    sending.wait_for("round ");
    (sending, receiving)
}

#[track_caller]
fn stayed(sent: &Ended, words: &str) {
    assert_eq!(sent.code, Some(3), "{}", sent.output);
    assert_eq!(sent.error()["guest"], "RunsAtSource", "{}", sent.output);
    assert!(sent.error()["reason"].as_str().unwrap().contains(words), "{}", sent.output);
    sent.guest_is_well();
}

#[track_caller]
fn got_nothing(received: &Ended, words: &str) {
    assert_eq!(received.code, Some(3), "{}", received.output);
    assert_eq!(received.error()["guest"], "NotHere", "{}", received.output);
    assert!(received.error()["reason"].as_str().unwrap().contains(words), "{}", received.output);
}

#[test]
fn a_cancelled_guest_runs_on_at_the_source() {
    for kind in possible() {
        let (sending, receiving) = in_the_rounds(kind);
        sending.signal(Signal::INT);
        let (sent, received) = (sending.end(), receiving.end());
        stayed(&sent, "cancelled");
        assert_eq!((&sent.error()["cancelled"], &received.error()["cancelled"]), (&true.into(), &false.into()));
        got_nothing(&received, "cancelled");
    }
}

#[test]
fn a_destination_that_is_cancelled_leaves_the_guest_at_the_source() {
    for kind in possible() {
        let (sending, receiving) = in_the_rounds(kind);
        receiving.signal(Signal::TERM);
        got_nothing(&receiving.end(), "cancelled");
        stayed(&sending.end(), "cancelled");
    }
}

#[test]
fn a_destination_that_is_killed_leaves_the_guest_at_the_source() {
    // All at the same time: a source offers its abort for some seconds to a destination that is gone.
    let pairs: Vec<_> = possible().map(in_the_rounds).collect();
    let killed = pairs.into_iter().map(|(sending, mut receiving)| {
        receiving.kill();
        assert_eq!(receiving.end().code, None);
        sending
    });
    for sending in killed.collect::<Vec<_>>() {
        stayed(&sending.end(), "the destination was lost");
    }
}

#[test]
fn a_source_that_is_killed_before_the_commit_leaves_nothing_running_at_the_destination() {
    for kind in possible() {
        let (mut sending, receiving) = in_the_rounds(kind);
        sending.kill();
        assert_eq!(sending.end().code, None);
        let received = receiving.end();
        got_nothing(&received, "lost");
        assert!(received.json["faults"].is_null(), "no guest was here: {}", received.output);
    }
}

#[test]
fn a_guest_that_does_not_converge_is_given_up_with_the_reason() {
    // A round is short, but long enough for the vCPUs of a busy machine to write.
    let work = "--write-rate unlimited --span 50 --downtime 1 --not-converging give-up";
    for kind in possible() {
        let ends = |halved| {
            let (receiving, address) = Microvm::destination(&format!("--insecure --memory 8 {}", kind.options()));
            let bandwidth = 15_000_000 >> halved;
            let options = format!("--memory 8 --fill random --bandwidth {bandwidth} {}", kind.options());
            let sent = Microvm::start(&format!("--insecure --migrate-to {address} {work} {options}")).end();
            (sent, receiving.end())
        };
        // A guest that got little CPU while it was moved has written little, and converged.
        let given_up = (0..6).map(ends).find(|(sent, _)| sent.code != Some(0));
        let (sent, received) = given_up.expect("in one move of six the guest writes more than is sent");
        stayed(&sent, "the guest dirties");
        got_nothing(&received, "given up");
    }
}

#[test]
fn different_machines_are_refused_on_both_sides_before_anything_is_changed() {
    let (mut receiving, address) = Microvm::destination("--insecure --memory 30");
    let sent = Microvm::start(&format!("--insecure --migrate-to {address}")).end();
    assert_eq!((sent.code, sent.error()["guest"].as_str()), (Some(3), Some("Untouched")), "{}", sent.output);
    sent.guest_is_well();
    receiving.wait_for("RAM block 0 is ram, 33554432 bytes");
    receiving.signal(Signal::INT);
    assert_eq!(receiving.end().code, Some(3));

    // The library compares RAM and devices, the monitors the rest.
    let words = "the source's machine has 3 vCPUs, this one has 2";
    let (mut receiving, address) = Microvm::destination("--insecure --vcpus 2");
    let sent = Microvm::start(&format!("--insecure --migrate-to {address} --vcpus 3")).end();
    assert_eq!((sent.code, sent.error()["guest"].as_str()), (Some(3), Some("Untouched")), "{}", sent.output);
    assert!(sent.output.contains(words), "{}", sent.output);
    sent.guest_is_well();
    receiving.wait_for(words);
    receiving.signal(Signal::INT);
    assert_eq!(receiving.end().code, Some(3));
}

#[test]
fn impossible_options_are_refused_before_the_guest_boots() {
    let cases = [
        ("--migrate-to 127.0.0.1:1", "say how the connection is protected"),
        ("--incoming 127.0.0.1:0", "say how the connection is protected"),
        ("--migrate-to 127.0.0.1:1 --insecure --method snappy", "there is no method 'snappy'"),
        ("--incoming 127.0.0.1:0 --tls /nowhere --allow x", "/nowhere/server-cert.pem"),
        ("--memory 3", "multiple of 2 MiB"),
    ];
    for (options, words) in cases {
        let ended = Microvm::start(options).end();
        assert_eq!(ended.code, Some(2), "{options}: {}", ended.output);
        assert!(ended.output.contains(words) && !ended.output.contains("filled"), "{options}: {}", ended.output);
    }
}

#[test]
fn a_guest_without_a_destination_continues() {
    let sent = Microvm::start("--insecure --migrate-to 127.0.0.1:1").end();
    assert_eq!((sent.code, sent.error()["guest"].as_str()), (Some(3), Some("Untouched")), "{}", sent.output);
    sent.guest_is_well();
}
