//! `--retry`: a direct migration whose connections are cut while the guest's memory is sent goes on over new ones.

use sterna_qemu_lab::{Dirty, Fill, Guest, LinuxGuest, QemuOptions, QemuVersion};

use crate::support::moving::Move;
use crate::support::pair::Pair;
use crate::support::relay::Network;
use crate::support::{CANCELLED, FAILED, LONG, Sterna, in_round, receive_waiting, report, send_retrying};

const MEMORY: u64 = 256 << 20;
/// So slow that the guest writes all of its memory in each round, until the test has it stop.
const SLOW: [&str; 6] = ["--method", "none", "--bandwidth", "30MB/s", "--downtime", "1s"];
const CUTS: usize = 4;
/// What both sides print when they have noticed that the connection is lost.
const DIALS: &str = "the destination is dialled for";
const WAITS: &str = "the source waited for";

/// Starts two QEMUs; the source's guest writes more than the network carries.
fn pair() -> Option<Pair> {
    let linux = LinuxGuest {
        fill: Fill::Random,
        memory: Some(64 << 20),
        dirty_rate: 64 << 20,
        dirty: Dirty::Stamp,
        ..LinuxGuest::default()
    };
    let mut machine = QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux));
    machine.memory = MEMORY;
    let pair = Pair::start(&machine, &machine.incoming())?;
    pair.source.qemu.guest().wait_ready(LONG).unwrap();
    pair.source.qemu.guest().wait_tick_after(0, LONG).unwrap();
    Some(pair)
}

fn arrives_over_a_network_that_is_cut(tls: bool) {
    let Some(pair) = pair() else { return };
    let send = SLOW.map(str::to_owned).to_vec();
    let moved = Move { mode: "direct", memory: MEMORY, tls, retry: "5min", send, receive: Vec::new() };
    let network = std::cell::OnceCell::new();
    let relay = |address: String| network.get_or_init(|| Network::to(&address)).address.clone();
    let cut = |sender: &Sterna| {
        sender.wait_until("a second round", |lines| in_round(lines, 2));
        for cut in 1..=CUTS {
            network.get().expect("send has its address").cut();
            let back = |lines: &[String]| {
                let back = lines.iter().filter(|line| line.contains("the destination is back after"));
                (back.count() == cut).then_some(())
            };
            sender.wait_until("that the destination is back", back);
        }
        assert_eq!(sender.count("stopping the guest"), 0, "the guest was paused before the last cut");
        pair.source.qemu.guest().set_dirty_rate(0).unwrap();
    };
    // All of memory is compared from outside, before the guest is started.
    let report = moved.run_while(&pair, relay, cut).unwrap();
    assert_eq!(report["interruptions"], CUTS, "{report}");
    assert!(report["interrupted_ms"].as_f64().unwrap() > 0.0, "{report}");
    let verified = pair.destination.qemu.guest().verify(LONG).unwrap();
    assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
    assert_eq!(pair.destination.qemu.guest().bad_lines(), [""; 0]);
    pair.never_both().unwrap();
    pair.destination.untouched().unwrap();
}

#[test]
fn a_guest_whose_network_is_cut_again_and_again_arrives_with_its_memory() {
    arrives_over_a_network_that_is_cut(false);
}

#[test]
fn a_guest_whose_network_is_cut_again_and_again_arrives_with_its_memory_by_tls() {
    arrives_over_a_network_that_is_cut(true);
}

/// A migration whose connections were cut for good while memory was sent.
fn cut_off(retry: &str) -> Option<(Pair, Sterna, Sterna)> {
    let pair = pair()?;
    let mut command = receive_waiting(retry, pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let network = Network::to(&receiver.address());
    let (qmp, state, json) = (pair.source.qemu.qmp_path(), pair.source_state(), pair.report());
    let mut command = send_retrying(retry, "direct", qmp, &network.address, &state, &json);
    let sender = Sterna::start("send", command.arg("--insecure").args(SLOW));
    sender.wait_until("a second round", |lines| in_round(lines, 2));
    network.cut_for_good();
    sender.wait_for(DIALS);
    receiver.wait_for(WAITS);
    Some((pair, sender, receiver))
}

#[test]
fn a_migration_that_is_cancelled_while_it_is_interrupted_ends_on_both_sides() {
    let Some((pair, sender, receiver)) = cut_off("5min") else { return };
    sender.interrupt();
    let (status, lines) = sender.finish_with_lines();
    assert_eq!(status.code(), CANCELLED, "{lines:?}");
    receiver.interrupt();
    let (status, lines) = receiver.finish_with_lines();
    assert_eq!(status.code(), CANCELLED, "{lines:?}");
    stays_at_the_source(&pair, "cancelled");
}

#[test]
fn a_migration_whose_connection_does_not_come_back_in_time_fails_on_both_sides() {
    let Some((pair, sender, receiver)) = cut_off("1s") else { return };
    let (status, lines) = sender.finish_with_lines();
    assert_eq!(status.code(), FAILED, "{lines:?}");
    let (status, lines) = receiver.finish_with_lines();
    assert_eq!(status.code(), FAILED, "{lines:?}");
    stays_at_the_source(&pair, "failed");
}

fn stays_at_the_source(pair: &Pair, outcome: &str) {
    let report = report(&pair.report());
    assert_eq!((&report["outcome"], &report["interruptions"]), (&outcome.into(), &1.into()), "{report}");
    assert_eq!(pair.source.status().as_deref(), Some("running"));
    assert_eq!(pair.destination.status(), None, "the incomplete copy was discarded");
    let verified = pair.source.qemu.guest().verify(LONG).unwrap();
    assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
    pair.never_both().unwrap();
}
