//! The pairwise table: releases, machine types, channels, TLS, methods, backings and ways of placing pages, so that each
//! pair of settings that could get in each other's way is met in some row.
//!
//! In each, a Linux guest writes memory all the while. Before the destination's guest starts, all of RAM is compared from
//! outside; afterwards the guest verifies its own.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::support::moving::{Backing, Move, backings, kernel_arguments, tried};
use crate::support::pair::{Pair, eventually};
use crate::support::{LONG, Sterna, in_round};
use serde_json::json;
use sterna_qemu_lab::{Dirty, Disk, DiskImage, DiskLoad, Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion};

use Backing::{Anonymous, HugeTmpfs as Tmpfs, Hugetlb, Memfd};
use QemuVersion::{V7_2, V10_0, V11_1};

const MEMORY: u64 = 320 << 20;
const FILLED: u64 = 32 << 20;
const DIRTY_RATE: u64 = 20 << 20;

struct Row {
    from: QemuVersion,
    to: QemuVersion,
    machine: &'static str,
    channels: u16,
    tls: bool,
    method: &'static str,
    source: Backing,
    destination: Backing,
    placement: &'static str,
    mode: &'static str,
    cpus: u32,
    /// Further arguments of both QEMUs.
    devices: &'static [&'static str],
    /// Further arguments of `send`.
    send: &'static [&'static str],
    with: With,
}

/// What the guest does besides.
#[derive(Clone, Copy, PartialEq)]
enum With {
    Nothing,
    /// It reads and writes a disk on a raw image that both QEMUs open, and lock while their guest runs.
    LockedDisk,
    /// While it is moved, its balloon takes memory and gives part of it back.
    Balloon,
}

/// Bytes that the balloon takes, and that it still has in the end.
const INFLATED: [u64; 2] = [60 << 20, 20 << 20];
/// So fast does the guest write stamps while its balloon works, and so slowly is it moved, that the move does not end before, even if the
/// guest gets little of a CPU.
const MANY_WRITES: u64 = 200 << 20;

/// Whether a QEMU has locks on the image.
fn locks(qemu: &Qemu, image: &Path) -> bool {
    let inode = format!(":{} ", std::fs::metadata(image).unwrap().ino());
    let files = std::fs::read_dir(format!("/proc/{}/fdinfo", qemu.pid())).unwrap();
    // One that was closed meanwhile has none.
    let texts = files.flatten().filter_map(|file| std::fs::read_to_string(file.path()).ok());
    let is_lock = |line: &str| line.starts_with("lock:") && line.contains(&inode);
    texts.into_iter().any(|text| text.lines().any(is_lock))
}

/// Has the balloon of the source's guest take memory and give part of it back while the guest is sent.
fn balloon_works(pair: &Pair, sender: &Sterna) {
    // Then all of memory was sent, also what the balloon is going to take.
    sender.wait_until("a second round", |lines| in_round(lines, 2));
    let monitor = &pair.source.monitor;
    for taken in INFLATED {
        let left = MEMORY - taken;
        monitor.execute("balloon", json!({ "value": left })).unwrap();
        let reached = || monitor.execute("query-balloon", json!({})).unwrap()["actual"].as_u64() == Some(left);
        assert!(eventually(LONG, reached), "the balloon does not leave {left} bytes");
    }
    assert_eq!(sender.count("stopping the guest"), 0, "the guest was sent before its balloon had worked");
    pair.source.qemu.guest().set_dirty_rate(0).unwrap();
}

/// Moves the guest of the row. An error where RAM differs before the destination's guest starts, none where it was skipped.
fn moved(row: &Row) -> Option<Result<(), String>> {
    let kernel_arguments = kernel_arguments(row.from);
    let balloon = row.with == With::Balloon;
    let linux = LinuxGuest {
        memory: Some(FILLED),
        dirty_rate: if balloon { MANY_WRITES } else { DIRTY_RATE },
        dirty: if balloon { Dirty::Stamp } else { Dirty::Page },
        kernel_arguments,
        disk_load: (row.with == With::LockedDisk).then_some(DiskLoad { buffers: 32 << 20, threads: 2, rate: 16 << 20 }),
        balloon,
        ..LinuxGuest::default()
    };
    let mut options = QemuOptions::new(row.from, Guest::Linux(linux));
    options.machine = row.machine.into();
    options.memory = MEMORY;
    options.cpus = row.cpus;
    options.extra.extend(row.devices.iter().map(|word| (*word).to_owned()));
    let image = (row.with == With::LockedDisk).then(|| DiskImage::new(0, 16 << 20).unwrap());
    options.disks.extend(image.iter().map(|image| Disk::new(&image.path())));
    let mut incoming = options.incoming();
    incoming.version = row.to;
    let [source, destination] = backings([row.source, row.destination], MEMORY)?;
    (options.backend, incoming.backend) = (source.backend.clone(), destination.backend.clone());
    let pair = Pair::start(&options, &incoming)?;
    pair.source.qemu.guest().wait_ready(LONG).unwrap();
    pair.source.qemu.guest().wait_tick_after(0, LONG).unwrap();
    if let Some(image) = &image {
        pair.source.qemu.guest().wait_disks("reads", LONG, |done| done.reads > 50 && done.writes > 10).unwrap();
        assert!(locks(&pair.source.qemu, &image.path()) && !locks(&pair.destination.qemu, &image.path()));
    }

    let mut send = ["--channels", &row.channels.to_string(), "--method", row.method].map(str::to_owned).to_vec();
    send.extend(row.send.iter().map(|word| (*word).to_owned()));
    let receive = ["--placement", row.placement].map(str::to_owned).to_vec();
    let report = match (Move { mode: row.mode, memory: MEMORY, tls: row.tls, retry: "0s", send, receive }).run_while(
        &pair,
        |address| address,
        |sender| {
            if balloon {
                balloon_works(&pair, sender);
            }
        },
    ) {
        Ok(report) => report,
        Err(differing) => return Some(Err(differing)),
    };
    assert_eq!(report["channels"], row.channels);
    // The firmware's small blocks may go in-stream; guest RAM is placed as the row requires.
    let in_place = report["placement"].as_array().unwrap().iter().any(|line| {
        let line = line.as_str().unwrap();
        line.starts_with("pc.ram: ") && !line.contains("in-stream")
    });
    assert!(row.mode == "direct" || in_place == (row.placement == "auto"), "placement: {}", report["placement"]);

    let tick = pair.destination.qemu.guest().last_tick().map_or(0, |tick| tick.number);
    let tick = pair.destination.qemu.guest().wait_tick_after(tick, LONG).unwrap();
    let before = pair.source.qemu.guest().last_tick().unwrap();
    assert!(tick.number > before.number && tick.dirtied >= before.dirtied, "{before:?} went on with {tick:?}");
    let verified = pair.destination.qemu.guest().verify(LONG).unwrap();
    assert!(verified.bad == 0 && verified.table_whole, "{verified:?}");
    assert_eq!(verified.pages, FILLED / 4096);
    if let Some(image) = &image {
        assert!(locks(&pair.destination.qemu, &image.path()));
        let before = pair.source.qemu.guest().last_disks().unwrap();
        let guest = pair.destination.qemu.guest();
        let more = guest.wait_disks("more reads", LONG, |done| done.reads > before.reads + 50).unwrap();
        let checked = guest.check_disks(LONG).unwrap();
        assert!(more.bad == 0 && checked.bad == 0 && checked.pages > 0, "{more:?} {checked:?}");
    }
    assert_eq!(pair.destination.qemu.guest().bad_lines(), [""; 0]);
    pair.never_both().unwrap();
    assert!(!pair.source.runs() && pair.destination.runs());
    assert_eq!(pair.source.status(), None, "nothing is left of the guest that was given away");
    Some(Ok(()))
}

impl Row {
    /// The columns that both tables have. By itself: moved by QEMU's stream, with one CPU and no more devices.
    fn new(
        [from, to]: [QemuVersion; 2],
        machine: &'static str,
        channels: u16,
        protection: &str,
        method: &'static str,
        [source, destination]: [Backing; 2],
    ) -> Self {
        Self {
            from,
            to,
            machine,
            channels,
            tls: protection == "tls",
            method,
            source,
            destination,
            placement: "auto",
            mode: "stream",
            cpus: 1,
            devices: NONE,
            send: NONE,
            with: With::Nothing,
        }
    }

    fn is_moved(&self) {
        tried(self.from, || moved(self));
    }
}

macro_rules! table {
    ($($name:ident: $from:ident $to:ident $machine:literal $channels:literal $protection:ident $method:literal
        $source:ident $destination:ident $placement:literal;)*) => {$(
        #[test]
        fn $name() {
            let (versions, backings) = ([$from, $to], [$source, $destination]);
            let row = Row::new(versions, $machine, $channels, stringify!($protection), $method, backings);
            Row { placement: $placement, ..row }.is_moved();
        }
    )*};
}

// The stream's variant follows the machine type: up to 8.0, up to 8.2, newer; so each is met with both ways of placing.
table! {
//  row                         from  to    machine            N  wire  method source    destination placement
    row_01_plain:               V7_2  V7_2  "pc-q35-7.2"       2  plain "none" Anonymous Anonymous   "auto";
    row_02_one_channel_tls:     V7_2  V7_2  "pc-q35-7.2"       1  tls   "lz4"  Anonymous Memfd       "auto";
    row_03_in_stream_zstd:      V7_2  V7_2  "pc-i440fx-7.2"    8  plain "zstd" Memfd     Anonymous   "in-stream";
    row_04_huge_tmpfs:          V7_2  V7_2  "pc-i440fx-7.2"    2  tls   "none" Anonymous Tmpfs       "auto";
    row_05_upgrade:             V7_2  V10_0 "pc-q35-7.2"       2  tls   "zstd" Anonymous Anonymous   "auto";
    row_06_upgrade_in_stream:   V7_2  V10_0 "pc-q35-7.2"       1  plain "none" Memfd     Memfd       "in-stream";
    row_07_upgrade_huge_tmpfs:  V7_2  V10_0 "pc-q35-7.2"       8  plain "lz4"  Tmpfs     Tmpfs       "auto";
    row_08_newest:              V10_0 V10_0 "pc-q35-10.0"      2  plain "lz4"  Anonymous Anonymous   "auto";
    row_09_newest_in_stream:    V10_0 V10_0 "pc-q35-10.0"      8  tls   "zstd" Anonymous Anonymous   "in-stream";
    row_10_newest_memfd:        V10_0 V10_0 "pc-q35-10.0"      1  tls   "none" Memfd     Memfd       "auto";
    row_11_9_0_huge_tmpfs:      V10_0 V10_0 "pc-q35-9.0"       2  plain "zstd" Memfd     Tmpfs       "auto";
    row_12_8_2:                 V10_0 V10_0 "pc-q35-8.2"       8  plain "none" Anonymous Memfd       "auto";
    row_13_8_2_in_stream:       V10_0 V10_0 "pc-q35-8.2"       1  tls   "lz4"  Anonymous Anonymous   "in-stream";
    row_14_hugetlb:             V10_0 V10_0 "pc-q35-9.0"       2  tls   "lz4"  Anonymous Hugetlb     "auto";
    row_15_old_stream:          V10_0 V10_0 "pc-q35-7.2"       8  plain "lz4"  Anonymous Tmpfs       "auto";
    row_16_old_in_stream:       V10_0 V10_0 "pc-i440fx-7.2"    2  tls   "zstd" Anonymous Memfd       "in-stream";
    row_17_to_11_1:             V10_0 V11_1 "pc-q35-10.0"      2  tls   "zstd" Memfd     Anonymous   "auto";
    row_18_11_1:                V11_1 V11_1 "pc-q35-11.1"      2  plain "lz4"  Anonymous Memfd       "auto";
    row_19_11_1_in_stream:      V11_1 V11_1 "pc-q35-11.1"      8  tls   "none" Memfd     Anonymous   "in-stream";
    row_20_7_2_to_11_1:         V7_2  V11_1 "pc-q35-7.2"       1  plain "lz4"  Anonymous Anonymous   "auto";
}

macro_rules! direct_table {
    ($($name:ident: $from:ident $to:ident $machine:literal $channels:literal $protection:ident $method:literal
        $source:ident $destination:ident $cpus:literal $devices:ident $send:ident $with:ident;)*) => {$(
        #[test]
        fn $name() {
            let (versions, backings) = ([$from, $to], [$source, $destination]);
            let row = Row::new(versions, $machine, $channels, stringify!($protection), $method, backings);
            Row { mode: "direct", cpus: $cpus, devices: $devices, send: $send, with: With::$with, ..row }.is_moved();
        }
    )*};
}

const NONE: &[&str] = &[];
/// Devices with memory or state of their own, besides the machine's.
const DEVICES: &[&str] = &[
    "-device",
    "VGA",
    "-device",
    "qemu-xhci",
    "-device",
    "usb-tablet",
    "-netdev",
    "user,id=net",
    "-device",
    "virtio-net-pci,netdev=net",
    "-device",
    "virtio-balloon-pci",
    "-device",
    "virtio-rng-pci",
];
const BALLOON: &[&str] = &["-device", "virtio-balloon-pci"];
/// A huge page is dirty as a whole, whatever little of it was written.
const LONG_STOP: &[&str] = &["--downtime", "2s"];
const SLOWLY: &[&str] = &["--bandwidth", "16MB/s"];
const DELTAS: &[&str] = &["--delta-cache", "256MiB", "--bandwidth", "150MB/s"];

// Every backing at each side, and what else could prevent reading and tracking from outside.
direct_table! {
//  row                           from  to    machine       N  wire  method source    destination cpus devices send      with
    direct_01_anonymous:          V10_0 V10_0 "pc-q35-10.0" 2  plain "none" Anonymous Anonymous   1    NONE    NONE      Nothing;
    direct_02_memfd_tls:          V10_0 V10_0 "pc-q35-10.0" 1  tls   "zstd" Memfd     Memfd       4    NONE    NONE      Nothing;
    direct_03_tmpfs_to_anonymous: V10_0 V10_0 "pc-q35-9.0"  2  plain "lz4"  Tmpfs     Anonymous   1    NONE    NONE      Nothing;
    direct_04_hugetlb:            V10_0 V10_0 "pc-q35-10.0" 2  plain "lz4"  Hugetlb   Hugetlb     1    NONE    LONG_STOP Nothing;
    direct_05_anonymous_hugetlb:  V10_0 V10_0 "pc-q35-10.0" 8  tls   "none" Anonymous Hugetlb     4    NONE    NONE      Nothing;
    direct_06_devices:            V10_0 V10_0 "pc-q35-10.0" 2  plain "lz4"  Anonymous Tmpfs       1    DEVICES NONE      Nothing;
    direct_07_deltas:             V10_0 V10_0 "pc-q35-10.0" 2  tls   "lz4"  Memfd     Anonymous   1    NONE    DELTAS    Nothing;
    direct_08_to_11_1:            V10_0 V11_1 "pc-q35-10.0" 2  plain "zstd" Anonymous Memfd       1    DEVICES NONE      Nothing;
    direct_09_11_1:               V11_1 V11_1 "pc-q35-11.1" 2  tls   "lz4"  Memfd     Memfd       4    NONE    NONE      Nothing;
    direct_10_disk_anonymous:     V10_0 V10_0 "pc-q35-10.0" 2  plain "lz4"  Anonymous Anonymous   1    NONE    NONE      LockedDisk;
    direct_11_disk_memfd:         V10_0 V10_0 "pc-q35-10.0" 2  plain "none" Memfd     Memfd       1    NONE    NONE      LockedDisk;
    direct_12_balloon_anonymous:  V10_0 V10_0 "pc-q35-10.0" 2  plain "none" Anonymous Anonymous   1    BALLOON SLOWLY    Balloon;
    direct_13_balloon_memfd:      V10_0 V10_0 "pc-q35-10.0" 2  plain "none" Memfd     Memfd       1    BALLOON SLOWLY    Balloon;
}
