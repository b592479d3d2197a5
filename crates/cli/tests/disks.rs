//! A Linux guest moves while it reads and writes disks past its page cache, and finds what it has read right at the destination: also what a
//! device wrote into guest RAM late, by a read that was in flight while RAM was already being sent.

mod support;

use std::time::Duration;

use sterna_lab::{
    Aio, Cache, Disk, DiskImage, DiskLoad, Guest, HeldDisk, LinuxGuest, Qemu, QemuOptions, QemuVersion, or_skip,
};
use support::pair::{Pair, eventually};
use support::{LONG, Sterna, receive, report, send};

const MIB: u64 = 1 << 20;
const IMAGE: u64 = 16 * MIB;
/// Threads of the guest for each disk.
const THREADS: u64 = 2;

fn machine(dirty_rate: u64, disks: Vec<Disk>) -> QemuOptions {
    let linux = LinuxGuest {
        memory: Some(96 * MIB),
        dirty_rate,
        disk_load: Some(DiskLoad { buffers: 32 * MIB, threads: THREADS, rate: 16 * MIB }),
        ..LinuxGuest::default()
    };
    QemuOptions { memory: 320 * MIB, disks, ..QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux)) }
}

/// `receive` and `send` for `pair`, with more words for `send`.
fn begin(pair: &Pair, words: &[&str]) -> (Sterna, Sterna) {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let address = receiver.address();
    let mut command = send(pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    let sender = Sterna::start("send", command.arg("--insecure").args(words));
    (sender, receiver)
}

fn completed(pair: &Pair, (sender, receiver): (Sterna, Sterna)) {
    let (sent, received) = (sender.finish().0, receiver.finish().0);
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    assert_eq!(report(&pair.report())["outcome"], "completed");
}

/// Everything that the guest holds is right: its memory, and what it has read from its disks.
fn all_is_right(qemu: &Qemu) {
    let checked = qemu.guest().check_disks(LONG).unwrap();
    assert!(checked.bad == 0 && checked.pages > 0, "{checked:?}");
    let verified = qemu.guest().verify(LONG).unwrap();
    assert_eq!((verified.bad, verified.table_whole), (0, true));
    assert_eq!(qemu.guest().bad_lines(), [""; 0]);
}

#[test]
fn a_guest_that_reads_and_writes_its_disks_moves_and_has_read_nothing_wrong() {
    let images: Vec<DiskImage> = (0..4).map(|number| DiskImage::new(number, IMAGE).unwrap()).collect();
    let Some(slow) = or_skip(HeldDisk::serve(&images[3].path())) else { return };
    // So long that reads of this disk are in flight whenever something happens.
    slow.delay(Duration::from_millis(20));
    let disk = |number: usize| Disk::new(&images[number].path());
    let machine = machine(
        10 * MIB,
        vec![
            Disk { aio: Aio::Native, iothread: true, ..disk(0) },
            Disk { aio: Aio::Threads, ..disk(1) },
            Disk { cache: Cache::Writeback, ..disk(2) },
            Disk { aio: Aio::IoUring, ..Disk::on(&slow) },
        ],
    );
    let Some(pair) = Pair::start(&machine, &machine.incoming()) else { return };
    let [source, destination] = [&pair.source.qemu, &pair.destination.qemu].map(Qemu::guest);
    source.wait_ready(LONG).unwrap();
    source.wait_disks("reads and writes", LONG, |done| done.reads > 100 && done.writes > 20).unwrap();
    completed(&pair, begin(&pair, &[]));
    let before = source.last_disks().unwrap();
    let after = destination.wait_disks("more reads and writes", LONG, |done| {
        done.reads > before.reads + 100 && done.writes > before.writes + 20
    });
    assert_eq!(after.unwrap().bad, 0);
    all_is_right(&pair.destination.qemu);
    pair.never_both().unwrap();
}

#[test]
fn what_a_read_brings_that_was_in_flight_over_rounds_is_at_the_destination() {
    let image = DiskImage::new(0, IMAGE).unwrap();
    let Some(held) = or_skip(HeldDisk::serve(&image.path())) else { return };
    // More than is sent meanwhile: the rounds do not end before the guest stops writing.
    let machine = machine(200 * MIB, vec![Disk::on(&held)]);
    let Some(pair) = Pair::start(&machine, &machine.incoming()) else { return };
    let [source, destination] = [&pair.source.qemu, &pair.destination.qemu].map(Qemu::guest);
    source.wait_ready(LONG).unwrap();
    source.wait_disks("reads", LONG, |done| done.reads > 50).unwrap();
    held.hold_all();
    held.wait_held(THREADS as usize, LONG).unwrap();
    let stuck = source.wait_disks("all threads in reads", LONG, |done| done.in_flight == THREADS).unwrap();
    // Then no buffer is used anew: what comes late must be right until the end.
    source.pause_disks().unwrap();
    source.set_dirty_rate(200 * MIB).unwrap();

    let moving = begin(&pair, &["--bandwidth", "8MB/s"]);
    let rounds =
        || pair.source.monitor.query_migrate().ok().and_then(|info| info.ram).map_or(0, |ram| ram.dirty_sync_count);
    assert!(eventually(LONG, || rounds() >= 3), "round {}", rounds());
    assert!(held.held().len() >= THREADS as usize, "the reads are still in flight");
    held.stop_holding();
    held.release_all();
    source.set_dirty_rate(0).unwrap();
    completed(&pair, moving);

    let done = destination.wait_disks("end of the reads", LONG, |done| done.in_flight == 0).unwrap();
    assert_eq!((done.reads, done.writes, done.bad), (stuck.reads + THREADS, stuck.writes, 0));
    all_is_right(&pair.destination.qemu);
    destination.resume_disks().unwrap();
    let after = destination.wait_disks("more reads", LONG, |now| now.reads > done.reads + 50).unwrap();
    assert_eq!(after.bad, 0);
    pair.never_both().unwrap();
}
