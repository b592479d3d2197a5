//! A Linux guest moves while it reads and writes disks past its page cache, and finds correct data at the destination.
//! This includes data that a device wrote into guest RAM late, by a read that was in flight while RAM was already being
//! sent.
//!
//! Direct mode is correct only if this holds: write protection does not notice a device that has pinned a page before
//! the page was protected. So each round waits for reads in flight before pages are read, and a test shows which data
//! is lost without that wait.
//!
//! `STERNA_DISK_MOVES=100` for the full proof of moves one after the other.

use std::time::Duration;

#[cfg(feature = "fault-points")]
use crate::support::in_round;
use crate::support::pair::{Pair, eventually};
use crate::support::{LONG, Sterna, receive, report, send_by};
use sterna_qemu_lab::ram::Ram;
use sterna_qemu_lab::{
    Aio, Cache, Dirty, Disk, DiskImage, DiskLoad, DisksDone, Guest, HeldDisk, LinuxGuest, Qemu, QemuOptions,
    QemuVersion, skip_if_unavailable,
};

const MIB: u64 = 1 << 20;
const IMAGE: u64 = 16 * MIB;
/// Threads of the guest for each disk.
const THREADS: u64 = 2;
/// Moves one after the other in an ordinary test run.
const DEFAULT_MOVES: u64 = 3;
/// The lines that `send` logs when it begins to wait for QEMU's block layer, and when that wait is over.
const WAITING: &str = "waiting until QEMU's block layer has nothing under way";
const SETTLED: &str = "QEMU's block layer has nothing under way took=";
/// A rate of the guest's writes with [`SLOWLY`] at which a move does not end, even if the guest gets little of a CPU: it writes only stamps
/// then, which takes little.
const MANY_WRITES: u64 = 200 * MIB;
/// Twice what the disks write into memory: with those alone, rounds end.
const SLOWLY: &[&str] = &["--bandwidth", "32MB/s", "--method", "none"];

fn machine(dirty_rate: u64, disks: Vec<Disk>) -> QemuOptions {
    let linux = LinuxGuest {
        memory: Some(96 * MIB),
        dirty_rate,
        dirty: if dirty_rate == MANY_WRITES { Dirty::Stamp } else { Dirty::Page },
        disk_load: Some(DiskLoad { buffers: 32 * MIB, threads: THREADS, rate: 16 * MIB }),
        ..LinuxGuest::default()
    };
    QemuOptions { memory: 320 * MIB, disks, ..QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux)) }
}

/// Starts `receive` and `send` for `pair`, with more words for `send`.
fn begin(pair: &Pair, mode: &str, words: &[&str]) -> (Sterna, Sterna) {
    begin_with(pair, mode, words, &[])
}

/// Starts both as [`begin`] does, with environment variables for `send`.
fn begin_with(pair: &Pair, mode: &str, words: &[&str], environment: &[(&str, &str)]) -> (Sterna, Sterna) {
    let mut command = receive(pair.destination.qemu.qmp_path(), &pair.destination_state());
    let receiver = Sterna::start("receive", command.arg("--insecure"));
    let address = receiver.address();
    let mut command = send_by(mode, pair.source.qemu.qmp_path(), &address, &pair.source_state(), &pair.report());
    command.envs(environment.iter().copied());
    let sender = Sterna::start("send", command.arg("--insecure").args(words));
    (sender, receiver)
}

fn completed(pair: &Pair, (sender, receiver): (Sterna, Sterna)) {
    let (sent, received) = (sender.finish().0, receiver.finish().0);
    assert!(sent.success() && received.success(), "send: {sent}, receive: {received}");
    assert_eq!(report(&pair.report())["outcome"], "completed");
}

/// Checks that the guest's memory and all data that it has read from its disks are correct.
fn all_is_right(qemu: &Qemu) {
    let checked = qemu.guest().check_disks(LONG).unwrap();
    assert!(checked.bad == 0 && checked.pages > 0, "{checked:?}");
    let verified = qemu.guest().verify(LONG).unwrap();
    assert_eq!((verified.bad, verified.table_whole), (0, true));
    assert_eq!(qemu.guest().bad_lines(), [""; 0]);
}

/// Four disks of different kinds, with the resources that must exist while they are used.
struct FourKinds {
    disks: Vec<Disk>,
    _slow: HeldDisk,
    _images: Vec<DiskImage>,
}

/// Makes disks on new images, with an IOThread where `iothreads` is true; `None` if this machine cannot have them.
fn four_kinds(iothreads: [bool; 4]) -> Option<FourKinds> {
    let images: Vec<DiskImage> = (0..4).map(|number| DiskImage::new(number, IMAGE).unwrap()).collect();
    let slow = skip_if_unavailable(HeldDisk::serve(&images[3].path()))?;
    // So long that reads of this disk are always in flight.
    slow.delay(Duration::from_millis(20));
    let disk = |number: usize| Disk { iothread: iothreads[number], ..Disk::new(&images[number].path()) };
    let disks = vec![
        Disk { aio: Aio::Native, ..disk(0) },
        Disk { aio: Aio::Threads, ..disk(1) },
        Disk { cache: Cache::Writeback, ..disk(2) },
        Disk { aio: Aio::IoUring, iothread: iothreads[3], ..Disk::on(&slow) },
    ];
    Some(FourKinds { disks, _slow: slow, _images: images })
}

/// Waits until the guest has read and written more at the destination, and checks that all of it is correct.
fn goes_on(pair: &Pair) {
    let before = pair.source.qemu.guest().last_disks().unwrap();
    let after = pair.destination.qemu.guest().wait_disks("more reads and writes", LONG, |done| {
        done.reads > before.reads + 100 && done.writes > before.writes + 20
    });
    assert_eq!(after.unwrap().bad, 0);
}

/// Moves a guest with disks of all kinds while it uses them.
fn moves_with_all_kinds_of_disks(mode: &str, iothreads: [bool; 4]) {
    let Some(kinds) = four_kinds(iothreads) else { return };
    let machine = machine(10 * MIB, kinds.disks.clone());
    let Some(pair) = Pair::start(&machine, &machine.incoming()) else { return };
    let source = pair.source.qemu.guest();
    source.wait_ready(LONG).unwrap();
    source.wait_disks("reads and writes", LONG, |done| done.reads > 100 && done.writes > 20).unwrap();
    completed(&pair, begin(&pair, mode, &[]));
    goes_on(&pair);
    all_is_right(&pair.destination.qemu);
    pair.never_both().unwrap();
}

#[test]
fn a_guest_that_reads_and_writes_its_disks_moves_and_finds_correct_data() {
    moves_with_all_kinds_of_disks("stream", [true, false, false, false]);
}

#[test]
fn a_guest_that_reads_and_writes_its_disks_moves_directly_and_finds_correct_data() {
    moves_with_all_kinds_of_disks("direct", [true, false, false, false]);
}

#[test]
fn a_guest_with_iothreads_for_the_other_disks_moves_directly_and_finds_correct_data() {
    moves_with_all_kinds_of_disks("direct", [false, true, true, true]);
}

#[test]
fn a_guest_is_moved_directly_again_and_again_and_finds_correct_data() {
    let moves =
        std::env::var("STERNA_DISK_MOVES").map_or(DEFAULT_MOVES, |text| text.parse().expect("a number of moves"));
    let Some(kinds) = four_kinds([true, false, false, true]) else { return };
    let disks = kinds.disks.clone();
    let linux = LinuxGuest {
        memory: Some(32 * MIB),
        dirty_rate: 10 * MIB,
        disk_load: Some(DiskLoad { buffers: 32 * MIB, threads: THREADS, rate: 16 * MIB }),
        ..LinuxGuest::default()
    };
    let machine = QemuOptions { memory: 256 * MIB, disks, ..QemuOptions::new(QemuVersion::V10_0, Guest::Linux(linux)) };
    let incoming = machine.incoming();
    let Some(mut pair) = Pair::start(&machine, &incoming) else { return };
    pair.source.qemu.guest().wait_ready(LONG).unwrap();
    pair.source.qemu.guest().wait_disks("reads and writes", LONG, |done| done.reads > 100 && done.writes > 20).unwrap();
    for number in 1..=moves {
        completed(&pair, begin(&pair, "direct", &[]));
        goes_on(&pair);
        all_is_right(&pair.destination.qemu);
        pair.never_both().unwrap();
        let settling = &report(&pair.report())["longest_settling_ms"];
        println!("move {number} of {moves}: {:?}, settling {settling} ms", pair.destination.qemu.guest().last_disks());
        if number < moves {
            pair = pair.next(&incoming);
        }
    }
}

/// Holds a read of each thread, so that no thread begins another one, and returns the counters at this point.
fn all_threads_in_reads(qemu: &Qemu, held: &HeldDisk) -> DisksDone {
    held.hold_all();
    held.wait_held(THREADS as usize, LONG).unwrap();
    let stuck = qemu.guest().wait_disks("all threads in reads", LONG, |done| done.in_flight == THREADS).unwrap();
    qemu.guest().pause_disks().unwrap();
    stuck
}

/// Starts a guest that writes its memory and reads the disk of the second value; the third must be kept.
fn with_held_disk() -> Option<(Pair, HeldDisk, DiskImage)> {
    let image = DiskImage::new(0, IMAGE).unwrap();
    let held = skip_if_unavailable(HeldDisk::serve(&image.path()))?;
    let machine = machine(MANY_WRITES, vec![Disk::on(&held)]);
    let pair = Pair::start(&machine, &machine.incoming())?;
    let source = pair.source.qemu.guest();
    source.wait_ready(LONG).unwrap();
    source.wait_disks("reads", LONG, |done| done.reads > 50).unwrap();
    Some((pair, held, image))
}

/// Returns how many bytes of guest RAM are not zero, without the first MiB, which contains the firmware.
fn bytes_in_use(qemu: &Qemu) -> usize {
    let ram = Ram::open(qemu.pid(), qemu.memory()).unwrap();
    let mut chunk = vec![0; MIB as usize];
    let mut used = 0;
    for offset in (MIB..ram.len()).step_by(chunk.len()) {
        ram.read(offset, &mut chunk).unwrap();
        used += chunk.iter().filter(|byte| **byte != 0).count();
    }
    used
}

#[test]
fn a_direct_move_waits_for_reads_that_are_in_flight_before_it_reads_pages() {
    let Some((pair, held, _image)) = with_held_disk() else { return };
    let [source, destination] = [&pair.source.qemu, &pair.destination.qemu].map(Qemu::guest);
    let stuck = all_threads_in_reads(&pair.source.qemu, &held);
    let moving = begin(&pair, "direct", &[SLOWLY, &["--log", "sterna_qemu=debug"]].concat());
    let sender = &moving.0;

    // During the start of tracking. QEMU answers neither its monitor nor its console now.
    sender.wait_for(WAITING);
    assert_eq!((sender.count(WAITING), sender.count(SETTLED)), (1, 0));
    assert_eq!(bytes_in_use(&pair.destination.qemu), 0, "pages have arrived");
    assert!(held.held().len() >= THREADS as usize);
    held.stop_holding();
    held.release_all();
    sender.wait_for(SETTLED);
    let done = source.wait_disks("end of the reads", LONG, |done| done.in_flight == 0).unwrap();
    assert_eq!((done.reads, done.writes, done.bad), (stuck.reads + THREADS, stuck.writes, 0));

    // During a collection of the log while pages are sent.
    source.resume_disks().unwrap();
    held.hold_all();
    held.wait_held(1, LONG).unwrap();
    sender.wait_until("another wait", |lines| {
        let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
        (count(WAITING) > count(SETTLED)).then_some(())
    });
    assert!(!held.held().is_empty(), "the read is still in flight");
    held.stop_holding();
    held.release_all();
    source.set_dirty_rate(0).unwrap();
    completed(&pair, moving);

    let after = destination.wait_disks("more reads", LONG, |now| now.reads > done.reads + 50).unwrap();
    assert_eq!(after.bad, 0);
    all_is_right(&pair.destination.qemu);
    pair.never_both().unwrap();
}

/// Shows why the wait is necessary: the same reads in flight, without it.
#[cfg(feature = "fault-points")]
#[test]
fn a_direct_move_that_does_not_wait_for_reads_in_flight_loses_their_data() {
    let Some((pair, held, _image)) = with_held_disk() else { return };
    let [source, destination] = [&pair.source.qemu, &pair.destination.qemu].map(Qemu::guest);
    let stuck = all_threads_in_reads(&pair.source.qemu, &held);
    let moving = begin_with(&pair, "direct", SLOWLY, &[("STERNA_WITHOUT_SETTLING", "1")]);
    // All of the memory was sent, and all pages written since.
    moving.0.wait_until("a third round", |lines| in_round(lines, 3));
    assert!(held.held().len() >= THREADS as usize, "the reads are still in flight");
    held.stop_holding();
    held.release_all();
    let done = source.wait_disks("end of the reads", LONG, |done| done.in_flight == 0).unwrap();
    assert_eq!((done.reads, done.writes, done.bad), (stuck.reads + THREADS, stuck.writes, 0), "right at the source");
    source.set_dirty_rate(0).unwrap();
    completed(&pair, moving);

    let checked = destination.check_disks(LONG).unwrap();
    assert!(checked.bad > 0, "the reads were in flight across all scans, and yet nothing is lost: {checked:?}");
    // All pages that vCPUs wrote have arrived.
    assert_eq!(destination.verify(LONG).unwrap().bad, 0);
}

#[cfg(feature = "fault-points")]
#[test]
fn a_direct_move_whose_storage_does_not_answer_ends_and_names_the_storage() {
    let Some((pair, held, _image)) = with_held_disk() else { return };
    let source = pair.source.qemu.guest();
    let stuck = all_threads_in_reads(&pair.source.qemu, &held);
    let (sender, receiver) = begin_with(&pair, "direct", &[], &[("STERNA_SETTLING_TIME", "500")]);
    let (sent, received) = (sender.finish().0, receiver.finish().0);
    assert!(!sent.success() && !received.success(), "send: {sent}, receive: {received}");
    let report = report(&pair.report());
    let reason = report["reason"].as_str().unwrap();
    assert_eq!(report["outcome"], "failed");
    assert!(reason.contains("the storage of the guest's disks has not answered within 0.5 s"), "{reason}");
    assert!(reason.contains(&held.path().display().to_string()), "{reason}");
    assert_eq!(held.held().len(), THREADS as usize, "the reads are still in flight");

    held.stop_holding();
    held.release_all();
    let done = source.wait_disks("end of the reads", LONG, |done| done.in_flight == 0).unwrap();
    assert_eq!((done.reads, done.writes, done.bad), (stuck.reads + THREADS, stuck.writes, 0));
    assert!(pair.source.runs());
    source.resume_disks().unwrap();
    source.wait_disks("more reads", LONG, |now| now.reads > done.reads + 50).unwrap();
    all_is_right(&pair.source.qemu);
    assert_ne!(pair.destination.status().as_deref(), Some("running"));
    pair.never_both().unwrap();
}

#[test]
fn data_of_a_read_in_flight_over_several_rounds_is_at_the_destination() {
    let image = DiskImage::new(0, IMAGE).unwrap();
    let Some(held) = skip_if_unavailable(HeldDisk::serve(&image.path())) else { return };
    // The guest writes more than is sent, so the rounds do not end before it stops writing.
    let machine = machine(MANY_WRITES, vec![Disk::on(&held)]);
    let Some(pair) = Pair::start(&machine, &machine.incoming()) else { return };
    let [source, destination] = [&pair.source.qemu, &pair.destination.qemu].map(Qemu::guest);
    source.wait_ready(LONG).unwrap();
    source.wait_disks("reads", LONG, |done| done.reads > 50).unwrap();
    let stuck = all_threads_in_reads(&pair.source.qemu, &held);
    source.set_dirty_rate(MANY_WRITES).unwrap();

    let moving = begin(&pair, "stream", &["--bandwidth", "8MB/s"]);
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
