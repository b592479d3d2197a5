//! Disks of test machines: the guest reads and verifies them in each way that QEMU serves them, and finds errors on a
//! disk and in the pages that it read; a held disk holds exactly the reads that a test chooses.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use crate::qmp::{LONG, Qmp};
use rustix::fs::OFlags;
use serde_json::json;
use sterna_guest::content::PAGE_BYTES;
use sterna_guest::disk::{check_block, write_block};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_qemu_lab::{
    Aio, Cache, Disk, DiskImage, DiskLoad, Fill, Guest, HeldDisk, LinuxGuest, Qemu, QemuOptions, QemuVersion, ram,
    skip_if_unavailable,
};

const MIB: u64 = 1 << 20;
const IMAGE: u64 = 16 * MIB;

/// Returns a machine with these disks and two threads for each.
fn machine(disks: Vec<Disk>) -> QemuOptions {
    machine_with_threads(2, disks)
}

fn machine_with_threads(threads: u64, disks: Vec<Disk>) -> QemuOptions {
    let load = DiskLoad { buffers: 16 * MIB, threads, rate: 16 * MIB };
    let guest = LinuxGuest {
        fill: Fill::Mixed,
        memory: Some(32 * MIB),
        verify_rate: MIB,
        disk_load: Some(load),
        ..LinuxGuest::default()
    };
    QemuOptions { memory: 256 * MIB, disks, ..QemuOptions::new(QemuVersion::V10_0, Guest::Linux(guest)) }
}

#[test]
fn a_guest_reads_and_writes_disks_of_every_kind_and_finds_them_right() {
    let images: Vec<DiskImage> = (0..4).map(|number| DiskImage::new(number, IMAGE).expect("an image")).collect();
    let disk = |number: usize| Disk::new(&images[number].path());
    let machine = machine(vec![
        Disk { aio: Aio::Threads, ..disk(0) },
        Disk { aio: Aio::Native, iothread: true, ..disk(1) },
        Disk { aio: Aio::IoUring, iothread: true, ..disk(2) },
        Disk { cache: Cache::Writeback, ..disk(3) },
    ]);
    let Some(qemu) = skip_if_unavailable(Qemu::start(&machine)) else { return };
    qemu.guest().wait_ready(LONG).expect("the guest boots");
    let done = qemu.guest().wait_disks("200 reads and 50 writes", LONG, |done| done.reads > 200 && done.writes > 50);
    let done = done.expect("the guest reads and writes");
    assert!(done.bad == 0 && done.checked > done.reads && done.bytes > 250 * 4096, "{done:?}");
    let checked = qemu.guest().check_disks(LONG).expect("an answer");
    assert!(checked.bad == 0 && checked.pages > 0 && checked.buffers > checked.busy, "{checked:?}");
    assert_eq!(qemu.guest().bad_lines(), [""; 0]);
    // All of them were written.
    qemu.guest().pause_disks().expect("sent");
    qemu.guest().wait_disks("end of all reads and writes", LONG, |done| done.in_flight == 0).expect("a line");
    for (number, image) in (0..).zip(&images) {
        let content = std::fs::read(image.path()).expect("an image");
        let blocks = (0..).zip(content.as_chunks::<PAGE_BYTES>().0);
        let changed = blocks.filter(|&(block, page)| check_block(page, number, block, 1).is_err());
        let changed: Vec<u64> = changed.map(|(block, _)| block).collect();
        assert!(!changed.is_empty() && changed[0] >= IMAGE / 4096 / 2, "disk {number}: {changed:?}");
    }
}

#[test]
fn a_block_of_the_disk_that_is_wrong_is_reported_with_its_place() {
    let image = DiskImage::new(0, IMAGE).expect("an image");
    let file = File::options().write(true).open(image.path()).expect("opened");
    let mut page = [0; PAGE_BYTES];
    write_block(&mut page, 0, 1, 9);
    // In the half that the guest does not write, every second block has a later generation.
    (0..IMAGE / 2 / 8192).for_each(|pair| {
        write_block(&mut page, 0, pair * 2 + 1, 9);
        file.write_all_at(&page, pair * 8192 + 4096).expect("written");
    });
    let Some(qemu) = skip_if_unavailable(Qemu::start(&machine(vec![Disk::new(&image.path())]))) else { return };
    qemu.guest().wait_ready(LONG).expect("the guest boots");
    let done = qemu.guest().wait_disks("something bad", LONG, |_| false).expect("a line");
    assert!(done.bad > 0);
    let lines = qemu.guest().bad_lines();
    let line = lines.first().expect("a line for the first one");
    assert!(line.contains("BAD disk /dev/vda offset "), "{line}");
    assert!(line.ends_with(" expected generation 1 found newer: generation 9, at once"), "{line}");
    let offset = line.split_once(" offset ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok());
    assert_eq!(offset.expect("an offset") % 8192, 4096, "{line}");
}

#[test]
fn a_page_that_was_read_and_is_lost_later_is_found() {
    let image = DiskImage::new(0, IMAGE).expect("an image");
    let machine = machine(vec![Disk::new(&image.path())]);
    let Some(qemu) = skip_if_unavailable(Qemu::start(&machine)) else { return };
    let guest = qemu.guest();
    guest.wait_ready(LONG).expect("the guest boots");
    guest.wait_disks("some reads", LONG, |done| done.reads > 50).expect("a line");
    guest.pause_disks().expect("sent");
    let paused = guest.wait_disks("end of all reads and writes", LONG, |done| done.in_flight == 0).expect("a line");
    let checked = guest.check_disks(LONG).expect("an answer");
    assert!((checked.busy, checked.bad) == (0, 0) && checked.pages > 0, "{checked:?}");

    let mut qmp = Qmp::connect(qemu.qmp_path());
    qmp.run("stop", &json!({}));
    let ram = ram::Ram::open(qemu.pid(), machine.memory).expect("RAM is found");
    // The stamp of a block of the half that is only read: the guest's kernel keeps no copy of it.
    let read_only = |page: &[u8]| {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| page[at + byte]));
        let page: &[u8; PAGE_BYTES] = page.try_into().expect("a page");
        word(8) < IMAGE / 4096 / 2 && check_block(page, 0, word(8), 1).is_ok()
    };
    let mut chunk = vec![0; 1 << 20];
    let mut lost = 0;
    let memory = File::options().write(true).open(format!("/proc/{}/mem", qemu.pid())).expect("opened");
    for offset in (0..ram.len()).step_by(chunk.len()) {
        ram.read(offset, &mut chunk).expect("RAM is read");
        let Some(place) = chunk.chunks(PAGE_BYTES).position(read_only) else { continue };
        let address = ram.address() + offset + (place * PAGE_BYTES) as u64;
        memory.write_all_at(&[0; PAGE_BYTES], address).expect("written");
        lost += 1;
        break;
    }
    assert_eq!(lost, 1, "a block is in RAM");
    qmp.run("cont", &json!({}));

    let again = guest.check_disks(LONG).expect("an answer");
    assert_eq!((again.bad, again.pages), (1, checked.pages));
    let lines = guest.bad_lines();
    assert!(lines.len() == 1 && lines[0].ends_with("expected generation 1 found lost: zeros, later"), "{lines:?}");
    let done = guest.last_disks().expect("a line");
    assert_eq!((done.bad, done.reads, done.writes), (1, paused.reads, paused.writes));
}

fn direct(path: &Path) -> File {
    File::options().read(true).custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path).expect("opened")
}

/// Starts a direct read of `length` bytes at `offset` on its own thread. The channel receives the bytes when the read
/// has ended.
fn read_directly(path: &Path, offset: u64, length: usize) -> Receiver<std::io::Result<Vec<u8>>> {
    let file = direct(path);
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut buffer = vec![0; length + 4096];
        let start = buffer.as_ptr().align_offset(4096);
        let read = file.read_exact_at(&mut buffer[start..start + length], offset);
        let _ = sender.send(read.map(|()| buffer[start..start + length].to_vec()));
    });
    receiver
}

#[test]
fn a_held_disk_holds_the_reads_that_were_ordered_and_no_others() {
    let image = DiskImage::new(0, IMAGE).expect("an image");
    let content = std::fs::read(image.path()).expect("an image");
    let Some(held) = skip_if_unavailable(HeldDisk::serve(&image.path())) else { return };
    let read = |offset: u64| read_directly(held.path(), offset, 8192);
    let expected = |offset: u64| content[offset as usize..offset as usize + 8192].to_vec();
    let get = |reading: &Receiver<std::io::Result<Vec<u8>>>| {
        reading.recv_timeout(LONG).expect("it ends").expect("it is read")
    };

    assert_eq!(get(&read(4096)), expected(4096), "nothing is held at first");
    held.hold(2, MIB..2 * MIB);
    assert_eq!(get(&read(2 * MIB)), expected(2 * MIB), "behind the range");
    let first = read(MIB);
    let one = held.wait_held(1, LONG).expect("held")[0];
    let second = read(MIB + 65536);
    let both = held.wait_held(2, LONG).expect("held");
    assert_eq!((both[0], both.len()), (one, 2));
    assert_eq!((one.offset, one.length, both[1].offset), (MIB, 8192, MIB + 65536));
    assert_eq!(get(&read(MIB + 8192)), expected(MIB + 8192), "a third in the range");
    assert!(matches!(first.try_recv(), Err(TryRecvError::Empty)));

    // In another order than they arrived, and with the file's content at the time of their release.
    let file = File::options().write(true).open(held.path()).expect("opened");
    file.write_all_at(&[7; 8192], MIB).expect("written while reads are held");
    assert!(held.release(both[1]) && !held.release(both[1]));
    assert_eq!(get(&second), expected(MIB + 65536));
    assert!(matches!(first.try_recv(), Err(TryRecvError::Empty)));
    assert_eq!(held.held(), [one]);
    assert_eq!(held.release_all(), 1);
    assert_eq!(get(&first), vec![7; 8192]);
    assert_eq!(std::fs::read(image.path()).expect("the image")[MIB as usize], 7);
    assert_eq!(held.answered(), 5);

    held.delay(Duration::from_millis(1));
    assert_eq!(get(&read(4096)), expected(4096), "late, but right");
    held.delay(Duration::from_secs(3600));
    let late = read(8192);
    while held.release_all() == 0 {
        std::thread::yield_now();
    }
    assert_eq!(get(&late), expected(8192), "released before its time");
    held.delay(Duration::ZERO);

    held.hold_all();
    let third = read(0);
    held.wait_held(1, LONG).expect("held");
    held.stop_holding();
    assert_eq!(get(&read(0)), expected(0));
    assert!(matches!(third.try_recv(), Err(TryRecvError::Empty)), "what is held stays held");
    let path = held.path().to_owned();
    drop(file);
    drop(held);
    third.recv_timeout(LONG).expect("it ends").expect_err("the file system is gone");
    assert!(!path.parent().expect("a directory").exists());
}

/// Why direct mode waits for all I/O in flight between collecting pages and reading them: a page that was pinned before
/// a scan and written after the scan takes no page fault, so no scan reports it. If this test fails, the kernel has
/// become safer.
#[test]
fn no_write_protection_sees_what_a_held_read_brings() {
    const PAGES: usize = 16;
    let image = DiskImage::new(0, IMAGE).expect("an image");
    let Some(held) = skip_if_unavailable(HeldDisk::serve(&image.path())) else { return };
    let mut memory = vec![1; (PAGES + 1) * PAGE_BYTES];
    let start = memory.as_ptr().align_offset(PAGE_BYTES);
    let buffer = &mut memory[start..start + PAGES * PAGE_BYTES];
    let addresses = buffer.as_ptr_range();
    let blocks = [addresses].map(|range| range.start.addr()..range.end.addr());
    let mut log = WriteProtectLog::new(blocks.into()).expect("whole pages");
    match log.start() {
        Ok(()) => {}
        Err(error @ (DirtyLogError::Missing { .. } | DirtyLogError::Userfault(_))) => {
            return println!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    }
    let mut written = || {
        let mut dirty = PageBitmap::new(PAGES as u64);
        log.collect(0, &mut dirty).expect("a scan");
        dirty.count()
    };
    held.hold_all();
    let file = direct(held.path());
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| file.read_exact_at(buffer, 0));
        held.wait_held(1, LONG).expect("held");
        assert_eq!(written(), PAGES as u64, "pinned for writing");
        held.release_all();
        reading.join().expect("no panic").expect("it is read");
    });
    assert_eq!(written(), 0, "written after the scan");
    for (block, page) in (0..).zip(buffer.as_chunks::<PAGE_BYTES>().0) {
        assert_eq!(check_block(page, 0, block, 1), Ok(()));
    }
}

#[test]
fn a_guest_waits_for_the_reads_that_its_disk_holds_and_goes_on() {
    // One thread for disks on which a held read may block another one.
    for (aio, iothread, threads) in [(Aio::Threads, false, 1), (Aio::Native, true, 2)] {
        let image = DiskImage::new(0, IMAGE).expect("an image");
        let Some(held) = skip_if_unavailable(HeldDisk::serve(&image.path())) else { return };
        let machine = machine_with_threads(threads, vec![Disk { aio, iothread, ..Disk::on(&held) }]);
        let Some(qemu) = skip_if_unavailable(Qemu::start(&machine)) else { return };
        let guest = qemu.guest();
        guest.wait_ready(LONG).expect("the guest boots");
        guest.wait_disks("some reads", LONG, |done| done.reads > 20).expect("a line");
        held.hold_all();
        held.wait_held(threads as usize, LONG).expect("all threads read");
        let stuck = guest.wait_disks("all threads in a read", LONG, |done| done.in_flight == threads).expect("a line");
        // The guest runs; its disk does nothing.
        let tick = guest.last_tick().expect("a tick").number;
        guest.wait_tick_after(tick + 3, LONG).expect("the guest counts");
        let still = guest.last_disks().expect("a line");
        assert_eq!((still.reads, still.writes, still.bad), (stuck.reads, stuck.writes, 0), "{aio:?}");

        guest.pause_disks().expect("sent");
        guest.wait_tick_after(tick + 5, LONG).expect("the guest counts");
        held.stop_holding();
        assert!(held.release_all() >= threads as usize);
        let ended = guest.wait_disks("end of all reads", LONG, |done| done.in_flight == 0).expect("a line");
        assert_eq!((ended.reads, ended.writes, ended.bad), (stuck.reads + threads, stuck.writes, 0), "{aio:?}");
        guest.resume_disks().expect("sent");
        guest.wait_disks("more reads", LONG, |done| done.reads > ended.reads + 20).expect("a line");
        assert_eq!(guest.check_disks(LONG).expect("an answer").bad, 0);
        assert_eq!(guest.bad_lines(), [""; 0]);
    }
}

/// The barrier of direct mode: QEMU drains all block I/O before a transaction, also an empty one.
#[test]
fn an_empty_transaction_ends_after_all_reads_that_were_in_flight() {
    for version in QemuVersion::ALL {
        let kinds = Aio::ALL.into_iter().flat_map(|aio| [(aio, false), (aio, true)]);
        let (mut images, mut served, mut disks) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (aio, iothread)) in (0..).zip(kinds) {
            let image = DiskImage::new(number, IMAGE).expect("an image");
            let Some(held) = skip_if_unavailable(HeldDisk::serve(&image.path())) else { return };
            disks.push(Disk { aio, iothread, ..Disk::on(&held) });
            served.push(held);
            images.push(image);
        }
        let machine = QemuOptions { version, machine: version.machine().into(), ..machine(disks) };
        let Some(qemu) = skip_if_unavailable(Qemu::start(&machine)) else { return };
        qemu.guest().wait_ready(LONG).expect("the guest boots");
        // Far longer than a transaction that does not wait.
        served.iter().for_each(|disk| disk.delay(Duration::from_millis(300)));
        let mut qmp = Qmp::connect(qemu.qmp_path());
        for round in 0..5 {
            let before: Vec<_> = served
                .iter()
                .map(|disk| {
                    loop {
                        let reads = disk.in_flight();
                        if !reads.is_empty() {
                            return reads;
                        }
                        std::thread::park_timeout(Duration::from_millis(1));
                    }
                })
                .collect();
            qmp.run("transaction", &json!({ "actions": [] }));
            for (number, (disk, before)) in served.iter().zip(before).enumerate() {
                let after = disk.in_flight();
                let left = before.iter().find(|read| after.contains(read));
                assert_eq!(left, None, "{version}, disk {number}, round {round}");
            }
        }
    }
}

#[test]
fn a_killed_machine_ends_although_its_disk_holds_reads() {
    for aio in Aio::ALL {
        let image = DiskImage::new(0, IMAGE).expect("an image");
        let Some(held) = skip_if_unavailable(HeldDisk::serve(&image.path())) else { return };
        let Some(mut qemu) = skip_if_unavailable(Qemu::start(&machine(vec![Disk { aio, ..Disk::on(&held) }]))) else {
            return;
        };
        // Held reads may be the firmware's or the guest kernel's.
        held.hold_all();
        held.wait_held(1, LONG).expect("a read");
        qemu.kill();
        assert!(!qemu.is_running(), "{aio:?}");
    }
}
