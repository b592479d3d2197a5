//! Guests that continue at the destination before all of their memory has arrived.

use crate::process::{Kind, Microvm, moves_until, post_copy_is_possible};
use rustix::process::Signal;

/// A guest that never converges where the network is slow: it writes as fast as it can.
const FAST: &str = "--write-rate unlimited --pattern random --downtime 10";
/// A network that the guest's writes exceed many times, in bytes per second.
const SLOW: u64 = 20_000_000;

#[test]
fn guests_that_never_converge_continue_at_the_destination() {
    if !post_copy_is_possible() {
        return;
    }
    let backings = ["memfd", "anonymous", "anonymous-huge", "memfd"];
    for (kind, backing) in Kind::ALL.into_iter().zip(backings).filter(|(kind, _)| kind.is_possible()) {
        for (vcpus, when) in [(1, "--post-copy-after 1"), (4, "--not-converging post-copy")] {
            let both = format!("{} --memory 16 --vcpus {vcpus} --backing {backing}", kind.options());
            let source = format!("{FAST} {when} --fill random --channels {vcpus}");
            moves_until(&both, &source, SLOW, |report| report["post_copy"]["requests"].as_u64() > Some(0));
        }
    }
}

#[test]
fn huge_pages_follow_the_guest() {
    if !post_copy_is_possible() {
        return;
    }
    let reserved = sterna_qemu_lab::huge::HugePages::reserve(64 << 20);
    if let Err(error) = &reserved {
        println!("skipped: {error}");
        return;
    }
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_possible()) {
        let both = format!("{} --backing hugetlb", kind.options());
        let source = format!("{FAST} --post-copy-after 1 --fill sequence --method zstd");
        moves_until(&both, &source, SLOW, |report| report["post_copy"].is_object());
    }
}

#[test]
fn a_destination_that_may_not_receive_page_faults_refuses_with_the_reason_and_the_guest_is_not_touched() {
    let options = "--insecure --execution threads";
    let anybody = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if anybody.is_ok_and(|anybody| anybody.trim() == "1") {
        return println!("skipped: anybody may watch for page faults (vm.unprivileged_userfaultfd)");
    }
    let (mut receiving, address) = if rustix::process::geteuid().is_root() {
        Microvm::destination_of_nobody(options)
    } else if post_copy_is_possible() {
        return println!("skipped: this user may watch for page faults");
    } else {
        Microvm::destination(options)
    };
    let sent =
        Microvm::start(&format!("{options} --migrate-to {address} {FAST} --bandwidth {SLOW} --post-copy-after 1"))
            .end();
    assert_eq!((sent.code, sent.error()["guest"].as_str()), (Some(3), Some("Untouched")), "{}", sent.output);
    let reason = sent.error()["reason"].as_str().unwrap();
    assert!(reason.contains("post-copy is not possible at the destination"), "{reason}");
    sent.guest_is_well();
    receiving.wait_for("post-copy is not possible at the destination");
    receiving.signal(Signal::INT);
    assert_eq!(receiving.end().code, Some(3));
}

#[test]
fn a_guest_whose_memory_is_lost_with_the_source_waits_until_it_is_ended() {
    if !post_copy_is_possible() {
        return;
    }
    for kind in [Kind::Threads, Kind::KvmLog].into_iter().filter(|kind| kind.is_possible()) {
        // So slow that much is missing when the source ends.
        let both = format!("--insecure --memory 16 {}", kind.options());
        let (mut receiving, address) = Microvm::destination(&both);
        let slow = "--write-rate unlimited --bandwidth 4000000 --downtime 10 --post-copy-after 1 --fill random";
        let mut sending = Microvm::start(&format!("{both} --migrate-to {address} {slow}"));
        receiving.wait_for("pages are still at the source");
        sending.kill();
        receiving.wait_for("waiting for it to reconnect");
        receiving.signal(Signal::INT);
        receiving.signal(Signal::TERM);
        let received = receiving.end();
        assert_eq!(received.code, Some(4), "{}", received.output);
    }
}
