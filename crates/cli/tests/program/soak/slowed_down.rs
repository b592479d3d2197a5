//! Guests that write too fast for their network move where they are slowed down. Both halves depend on how fast this machine runs them:
//! at full speed they must write too much, and slowed down little enough.

use crate::direct_options::{ALL_THE_TIME, CASE, Case, TooFast};
use crate::support::report;
use crate::support::settle::{Migration, Side};
use sterna_qemu_lab::{Accel, Dirty, Fill};

const BANDWIDTH: &str = "150MB/s";

fn slowed_down_to_move(accel: Accel, cpus: u32) {
    let Some(pair) = TooFast::pair(accel, cpus) else { return };
    let migration = TooFast::start(pair, BANDWIDTH, "--downtime 200ms --on-no-convergence throttle:50,49,99");
    let (status, lines) = migration.sender.finish_with_lines();
    let told = report(&migration.pair.report());
    assert!(status.success(), "{told}");
    assert!(lines.iter().any(|line| line.contains("the guest is held for 50 % of the time")), "{lines:?}");
    let convergence = told["convergence"].as_str().expect("why it was slowed down");
    assert!(convergence.contains("% of the time"), "{convergence}");
    assert!(migration.receiver.finish().0.success());
    migration.pair.source.untouched().unwrap();
    let moved = Migration { pair: migration.pair, sender: None, receiver: None };
    assert_eq!(moved.exactly_one(), Ok(Side::Destination));
}

#[test]
fn a_guest_that_writes_too_fast_does_not_move_and_the_same_guest_does_where_it_is_slowed_down() {
    let Some(pair) = TooFast::pair(Accel::Tcg, 1) else { return };
    let migration = TooFast::start(pair, BANDWIDTH, "--downtime 200ms --on-no-convergence give-up");
    let (status, _) = migration.sender.finish();
    assert_eq!(status.code(), Some(1));
    let told = report(&migration.pair.report());
    assert!(told["reason"].as_str().unwrap().contains("given up after"), "{told}");
    assert!(migration.pair.source.runs());
    slowed_down_to_move(Accel::Tcg, 1);
}

#[test]
fn a_guest_of_kvm_moves_where_it_is_slowed_down() {
    slowed_down_to_move(Accel::Kvm, 2);
}

#[test]
fn a_linux_guest_that_is_slowed_down_moves_with_all_its_memory_right() {
    let writes = (ALL_THE_TIME, Dirty::Page);
    let send = "--method none --bandwidth 40MB/s --downtime 200ms --on-no-convergence throttle:99,1,99";
    let Some(moved) = (Case { fill: Fill::Random, writes, send, ..CASE }).moved() else { return };
    let convergence = moved.report["convergence"].as_str().expect("why it was slowed down");
    assert!(convergence.contains("it was held for 99 % of the time"), "{convergence}");
}
