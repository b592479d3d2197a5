//! A disk whose reads are in flight while its guest is moved: their data is at the destination if the monitor waits for
//! them.
//!
//! `STERNA_DISK_MOVES=100` for the full proof of moves one after the other.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sterna::{Cancel, Destination, Report, ResumeReason, Security, Source, SourceVmm, VmmError};
use sterna_microvm::disk::DiskReport;
use sterna_microvm::migration::{Movable, guest_ram, opening_message};
use sterna_microvm::{Config, Execution, Machine, Rate, Tracking, Workload};
use sterna_qemu_lab::{DiskImage, HeldDisk, skip_if_unavailable};

use crate::support::{KINDS, LONG, SerialOutput, busy, config, filled, goes_on_well, machine};

fn with_disk(kind: (Execution, Tracking), path: &Path) -> Config {
    let workload = Workload { write: Rate::PagesPerSecond(500), ..busy() };
    Config { disk: Some(path.to_owned()), ..config(kind, 2, workload) }
}

/// A monitor whose disk is slow until the monitor waits for it, or until the guest is stopped.
struct WithHeldDisk {
    machine: Movable,
    held: HeldDisk,
    settles: bool,
    settled: u64,
}

impl SourceVmm for WithHeldDisk {
    fn name(&self) -> String {
        SourceVmm::name(&self.machine)
    }

    fn settle_io(&mut self) -> Result<(), VmmError> {
        if self.settles {
            // The next read is not held, because the monitor might wait for it instead.
            self.held.stop_holding();
            self.held.release_all();
            self.machine.settle_io()?;
            self.held.hold_all();
            self.settled += 1;
        }
        Ok(())
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        self.held.stop_holding();
        self.held.release_all();
        self.machine.pause()
    }

    fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError> {
        SourceVmm::resume(&mut self.machine, reason)
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.machine.save(state)
    }
}

/// Moves the guest of `source`, which the library controls through `monitor`, to `destination`.
fn migrated(source: &Machine, destination: &Arc<Machine>, monitor: &mut dyn SourceVmm) -> Report {
    let listening =
        Destination::new(guest_ram(destination).unwrap()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let log = source.take_dirty_log().unwrap();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| listening.run(&mut Movable::new(destination), &Cancel::new(), &()).map(|_| ()));
        let sent = Source::new(guest_ram(source).unwrap(), log).opening_message(opening_message(source)).run(
            address,
            &Security::Insecure,
            monitor,
            &Cancel::new(),
            &(),
        );
        receiving.join().unwrap().unwrap();
        sent.unwrap()
    })
}

/// Moves a guest while a read of its disk is in flight. Returns the result of checking the disk's pages at the
/// destination; `None` if this machine lacks something.
fn moved(kind: (Execution, Tracking), settles: bool) -> Option<DiskReport> {
    let image = DiskImage::new(0, 4 << 20).unwrap();
    let held = skip_if_unavailable(HeldDisk::serve(&image.path()))?;
    let config = with_disk(kind, held.path());
    let source = Arc::new(filled(&config, &SerialOutput::default())?);
    let destination = Arc::new(machine(&config, &SerialOutput::default()).unwrap());
    let disk = source.disk().unwrap();
    source.wait_until(LONG, |_| disk.report().reads > 100).unwrap();
    held.hold_all();
    held.wait_held(1, LONG).unwrap();
    assert_eq!((disk.report().bad, disk.report().failed), (0, None));

    let machine = Movable::new(&source);
    let mut monitor = WithHeldDisk { machine, held: held.clone(), settles, settled: 0 };
    let report = migrated(&source, &destination, &mut monitor);
    assert!(report.rounds >= 1 && (monitor.settled > 0) == settles, "{report:?}");
    let disk = destination.disk().unwrap();
    let found = disk.verify();
    destination.wait_until(LONG, |_| disk.report().reads > 100).unwrap();
    goes_on_well(&destination, &source.report(), "the guest's own memory");
    assert!(found.checked > 0, "{found:?}");
    Some(disk.verify())
}

#[test]
fn data_of_reads_in_flight_is_at_the_destination() {
    for kind in KINDS {
        let Some(found) = moved(kind, true) else { continue };
        assert_eq!((found.bad, &found.failed), (0, &None), "{kind:?}");
    }
}

#[test]
fn with_write_protection_data_of_reads_in_flight_is_lost_without_waiting() {
    for kind in KINDS {
        let Some(found) = moved(kind, false) else { continue };
        // KVM's logs record a read when it has ended.
        assert_eq!(found.bad > 0, kind.1 == Tracking::WriteProtect, "{kind:?}: {found:?}");
    }
}

/// Moves one after the other in an ordinary test run, of each kind of machine.
const DEFAULT_MOVES: u64 = 3;

#[test]
fn a_guest_that_reads_and_writes_its_disk_is_moved_again_and_again_and_finds_nothing_wrong() {
    let moves =
        std::env::var("STERNA_DISK_MOVES").map_or(DEFAULT_MOVES, |text| text.parse().expect("a number of moves"));
    for kind in KINDS {
        let image = DiskImage::new(0, 8 << 20).unwrap();
        let Some(slow) = skip_if_unavailable(HeldDisk::serve(&image.path())) else { return };
        // Most of the time a read is in flight.
        slow.delay(Duration::from_millis(3));
        let config = with_disk(kind, slow.path());
        let Some(machine_of_guest) = filled(&config, &SerialOutput::default()) else { continue };
        let mut source = Arc::new(machine_of_guest);
        let (mut reads, mut writes, mut checked) = (0, 0, 0);
        for number in 1..=moves {
            let disk = source.disk().unwrap();
            source.wait_until(LONG, |_| disk.report().reads > 30 && disk.report().writes > 10).unwrap();
            let destination = Arc::new(machine(&config, &SerialOutput::default()).unwrap());
            migrated(&source, &destination, &mut Movable::new(&source));
            let left = disk.report();
            let found = destination.disk().unwrap().verify();
            assert_eq!(
                (left.bad, &left.failed, found.bad, &found.failed),
                (0, &None, 0, &None),
                "{kind:?}, move {number}"
            );
            goes_on_well(&destination, &source.report(), "the guest's own memory");
            (reads, writes, checked) =
                (reads + left.reads, writes + left.writes, checked + left.checked + found.checked);
            source = destination;
        }
        let last = source.disk().unwrap().verify();
        assert_eq!((last.bad, &last.failed), (0, &None), "{kind:?}");
        println!("{kind:?}: {moves} moves, {reads} reads, {writes} writes, {checked} pages checked, 0 bad");
    }
}
