//! Guests that move and continue.

use rustix::process::Signal;
use serde_json::Value;

use crate::process::{Ended, Kind, Microvm, certificates, moved, moves, moves_until};

/// The guests' work: idle, and each content at a set rate and as fast as they can.
const WORK: [&str; 6] = [
    "--fill mixed --write-rate 0",
    "--fill ones --write-rate 20000 --pattern sequential",
    "--fill sequence --write-rate unlimited --first-bytes --pattern random",
    "--fill random --write-rate 5000 --pattern random",
    "--fill corpus --write-rate unlimited --pattern hot",
    "--fill zeros --write-rate 10000 --span 10",
];
/// So long that the fastest of these guests converges, however little of the CPUs its sender gets.
const ANY_DOWNTIME: &str = "--downtime 20000";
const METHODS: [&str; 3] = ["none", "lz4", "zstd"];
const BACKINGS: [&str; 3] = ["memfd", "anonymous", "anonymous-huge"];

#[test]
fn guests_of_every_kind_and_work_move_between_processes() {
    let mut turn = 0;
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_possible()) {
        for vcpus in [1, 4] {
            let (work, method) = (WORK[turn % WORK.len()], METHODS[turn % METHODS.len()]);
            // The ends need not have the same kind of memory, but pages of the same size.
            let (here, there) = (BACKINGS[turn % 3], BACKINGS[(turn + turn / 3) % 3]);
            turn += 1;
            let both = format!("{} --vcpus {vcpus}", kind.options());
            let channels = 1 + turn % 3;
            let source = format!("{work} {ANY_DOWNTIME} --method {method} --channels {channels} --backing {here}");
            let (sent, received) = moves(&both, &source, &format!("--backing {there}"));
            assert_eq!(sent.report()["channels"], channels, "{both}");
            went_on_with_its_work(&received, work);
        }
    }
}

#[test]
fn every_work_moves_without_kvm_and_with_it() {
    for kind in [Kind::Threads, Kind::KvmLog].into_iter().filter(|kind| kind.is_possible()) {
        for (turn, work) in WORK.into_iter().enumerate() {
            let both = format!("{} --vcpus 2 --memory 16 --backing {}", kind.options(), BACKINGS[turn % 3]);
            let (_, received) = moves(&both, &format!("{work} {ANY_DOWNTIME} --method {}", METHODS[turn % 3]), "");
            went_on_with_its_work(&received, work);
        }
    }
}

/// What a guest does comes with its state.
#[track_caller]
fn went_on_with_its_work(received: &Ended, work: &str) {
    let written = received.json["after"]["written"].as_u64().unwrap();
    assert_eq!(written == 0, work.contains("--write-rate 0"), "{work}: {}", received.output);
}

#[test]
fn huge_pages_move() {
    let reserved = sterna_qemu_lab::huge::HugePages::reserve(64 << 20);
    if let Err(error) = &reserved {
        println!("skipped: {error}");
        return;
    }
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_possible()) {
        moves(&format!("{} --backing hugetlb", kind.options()), "--write-rate 2000", "");
    }
}

#[test]
fn a_guest_moves_over_tls_from_a_permitted_source() {
    let (dir, records) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    certificates(dir.path());
    let both = format!("--tls {} --state-dir {}", dir.path().display(), records.path().display());
    let (receiving, address) = Microvm::destination(&format!("{both} --allow source.example"));
    let sending = Microvm::start(&format!("{both} --migrate-to {address}"));
    let (sent, _) = moved(sending.end(), receiving);
    assert_eq!(sent.report()["encrypted"], true);
    assert!(std::fs::read_dir(records.path()).unwrap().next().is_some(), "the records are there");
}

#[test]
fn a_guest_that_dirties_too_fast_is_slowed_down_until_it_fits() {
    for kind in [Kind::Threads, Kind::KvmRing].into_iter().filter(|kind| kind.is_possible()) {
        // 32 MB/s are written and 24 are sent, in 13 MB of memory: slowly enough for the vCPUs of a busy machine.
        let work = "--write-rate 8000 --span 80 --pattern sequential --fill random";
        let source = format!("{work} --downtime 100 --not-converging throttle");
        let is_slowed =
            |report: &Value| report["convergence"].as_str().is_some_and(|how| how.contains("% of the time"));
        let (_, received) = moves_until(&format!("--memory 16 {}", kind.options()), &source, 24_000_000, is_slowed);
        let after = &received.json["after"];
        assert!(after["written"].as_u64() > Some(0), "it is not slowed down at the destination: {after}");
    }
}

#[test]
fn a_migration_begins_when_a_signal_comes_or_is_cancelled_before() {
    let (receiving, address) = Microvm::destination("--insecure");
    let mut sending = Microvm::start(&format!("--insecure --migrate-to {address} --on-signal"));
    sending.wait_for("pages filled");
    sending.signal(Signal::USR1);
    let (sent, received) = (sending.end(), receiving.end());
    assert_eq!((sent.code, received.code), (Some(0), Some(0)), "{}\n\n{}", sent.output, received.output);
    received.guest_is_well();

    let mut sending = Microvm::start(&format!("--insecure --migrate-to {address} --on-signal"));
    sending.wait_for("pages filled");
    sending.signal(Signal::INT);
    let sent = sending.end();
    assert_eq!((sent.code, sent.error()["guest"].as_str()), (Some(3), Some("Untouched")), "{}", sent.output);
    sent.guest_is_well();
}

/// A guest whose rounds never end: it writes as fast as it can, and 2 MB/s are sent.
#[test]
fn a_signal_pauses_a_guest_whose_rounds_do_not_end() {
    let (receiving, address) = Microvm::destination("--insecure --execution threads --memory 8");
    let endless =
        "--execution threads --memory 8 --write-rate unlimited --method none --bandwidth 2000000 --downtime 1";
    let mut sending = Microvm::start(&format!("--insecure --migrate-to {address} {endless}"));
    sending.wait_for("round ");
    sending.signal(Signal::USR2);
    sending.wait_for("the guest will be paused as soon as possible");
    let (sent, _) = moved(sending.end(), receiving);
    assert!(sent.report()["downtime_ms"].as_f64() > Some(1.0), "{}", sent.output);
}
