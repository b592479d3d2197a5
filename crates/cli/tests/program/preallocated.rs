//! Direct mode into a QEMU whose memory is all there before the guest comes: preallocated, or populated by `receive --prefault`. All of
//! guest RAM is compared from outside before the destination's guest starts.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::support::LONG;
use crate::support::moving::{Backed, Backing, Move, backings};
use crate::support::pair::Pair;
use crate::support::settle::{Migration, Side};
use sterna_qemu_lab::ram::Ram;
use sterna_qemu_lab::{Guest, Qemu, QemuOptions, QemuVersion};

const MEMORY: u64 = 128 << 20;
const PAGE: u64 = 4096;

/// Moves the boot-sector guest into memory of `backing` with stale content in every third page. Returns the pair and what its memory needs;
/// none if it was skipped.
fn moved(backing: Backing, preallocate: bool, receive: &str) -> Option<(Pair, Backed)> {
    let source = QemuOptions::new(QemuVersion::V10_0, Guest::BootSector);
    let [_, memory] = backings([Backing::Anonymous, backing], MEMORY)?;
    let destination = QemuOptions { backend: memory.backend.clone(), preallocate, ..source.incoming() };
    let pair = Pair::start(&source, &destination)?;
    pair.source.qemu.console().wait_for_bytes(3, LONG).expect("the guest boots");
    spoil(&pair.destination.qemu);
    let options = ["--downtime", "10s", "--method", "none"].map(str::to_owned).to_vec();
    let receive = receive.split_whitespace().map(str::to_owned).collect();
    let moving = Move { mode: "direct", memory: MEMORY, tls: false, retry: "0s", send: options, receive };
    moving.run(&pair, |address| address).unwrap();
    Some((pair, memory))
}

/// Writes content that no guest has sent, as firmware and devices do, at another place in each of these pages.
fn spoil(qemu: &Qemu) {
    let ram = Ram::open(qemu.pid(), MEMORY).unwrap();
    let memory = File::options().write(true).open(format!("/proc/{}/mem", qemu.pid())).unwrap();
    for page in (0..MEMORY / PAGE).step_by(3) {
        let word = page * 8 % PAGE;
        memory.write_all_at(b"stale", ram.address() + page * PAGE + word.min(PAGE - 8)).unwrap();
    }
}

/// Returns how many bytes of the guest's private RAM are in memory or swapped out (proc_pid_smaps(5)).
fn resident(qemu: &Qemu) -> u64 {
    let start = format!("{:x}-", Ram::open(qemu.pid(), MEMORY).unwrap().address());
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", qemu.pid())).unwrap();
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let kib = |name: &str| {
        let line = lines.clone().find_map(|line| line.strip_prefix(name)).expect("each mapping has this line");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    (kib("Rss:") + kib("Swap:")) << 10
}

fn runs_at_destination(pair: Pair) {
    let migration = Migration { pair, sender: None, receiver: None };
    assert_eq!(migration.exactly_one(), Ok(Side::Destination));
}

#[test]
fn of_stale_content_in_preallocated_memory_nothing_is_left_and_the_memory_stays_there() {
    let Some((pair, _memory)) = moved(Backing::Anonymous, true, "") else { return };
    assert_eq!(resident(&pair.destination.qemu), MEMORY);
    runs_at_destination(pair);
}

#[test]
fn of_stale_content_in_shared_memory_nothing_is_left() {
    for backing in [Backing::Memfd, Backing::Hugetlb] {
        let Some((pair, _memory)) = moved(backing, true, "") else { continue };
        runs_at_destination(pair);
    }
}

#[test]
fn private_memory_is_populated_where_that_was_asked_for_and_stale_content_is_cleared() {
    let Some((pair, _memory)) = moved(Backing::Anonymous, false, "--prefault") else { return };
    assert_eq!(resident(&pair.destination.qemu), MEMORY);
    runs_at_destination(pair);
    let Some((pair, _memory)) = moved(Backing::Anonymous, true, "--prefault") else { return };
    assert_eq!(resident(&pair.destination.qemu), MEMORY);
    runs_at_destination(pair);
}
