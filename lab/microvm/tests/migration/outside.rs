//! A guest on KVM whose writes are tracked from another process, by a userfaultfd that was made in the monitor's
//! process and duplicated into this one.
//!
//! The monitor is stopped for each comparison, so that memory and dirty log are of the same moment: each page that differs from the
//! copy must be named. vCPUs write by KVM's own page tables, so this shows that KVM follows the protection, also that of a
//! userfaultfd for faults of user space only.

use std::fs::File;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitOptions, waitpid};
use sterna_attach::{AttachError, Process, UserfaultOrigin, take_userfault};
use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::write_protect::{MappedBlock, MappedPart, WriteProtectLog};
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::place::TargetProcess;
use sterna_memory::userfault::Userfault;
use sterna_qemu_lab::ram::Ram;

use crate::process::{Kind, Microvm};

const MIB: u64 = 1 << 20;
const PAGES: u64 = 16 * MIB / PAGE_SIZE as u64;
const ROUNDS: usize = 10;
/// Pages that the guest writes before each comparison, at least.
const WRITTEN: usize = 50;
/// A time limit that no correct test reaches.
const LONG: Duration = Duration::from_secs(300);

fn stop(microvm: &Microvm) {
    microvm.signal(Signal::STOP);
    // All of its threads have stopped when the kernel reports that the process has.
    let (_, status) = waitpid(Some(microvm.pid()), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped(), "{status:?}");
}

fn pages_of(ram: &Ram) -> Vec<u8> {
    let mut bytes = vec![0; ram.len() as usize];
    ram.read(0, &mut bytes).unwrap();
    bytes
}

fn differing(one: &[u8], other: &[u8]) -> Vec<u64> {
    let pages = one.chunks(PAGE_SIZE).zip(other.chunks(PAGE_SIZE));
    (0..).zip(pages).filter(|(_, (one, other))| one != other).map(|(number, _)| number).collect()
}

/// Tracks a guest, whose monitor gets `input`. Prints the reason if that is not possible here.
fn tracks(kind: Kind, backing: &str, input: Stdio, origin: UserfaultOrigin) {
    let options =
        format!("{} --memory 16 --vcpus 2 --backing {backing} --write-rate 20000 --passes 1000000", kind.options());
    let microvm = Microvm::start_with(&options, input);
    let pid = microvm.pid().as_raw_nonzero().get();
    let deadline = Instant::now() + LONG;
    // RAM is mapped soon after the start.
    let ram = loop {
        match Ram::open(pid as u32, 16 * MIB) {
            Ok(ram) => break ram,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    };
    let taken = match take_userfault(&Process::open(pid).unwrap(), origin) {
        Ok(taken) => taken,
        Err(error @ (AttachError::Refused { .. } | AttachError::Kernel { .. })) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let userfault = Userfault::from_descriptor(taken.descriptor, WriteProtectLog::FEATURES).unwrap();
    let start = ram.address() as usize;
    let parts = vec![MappedPart { addresses: start..start + ram.len() as usize, first_page: 0 }];
    let process = Arc::new(TargetProcess::open(pid).unwrap());
    let mut log = WriteProtectLog::of_process(process, userfault, vec![MappedBlock { pages: PAGES, parts }]).unwrap();
    match log.start() {
        Ok(()) => {}
        Err(error @ DirtyLogError::Missing { .. }) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    }
    let mut copy = pages_of(&ram);
    // Pages written since the start are named by the first collection, or are in the copy.
    let (mut all_named, mut all_written) = (0, 0);
    for round in 0..ROUNDS {
        // The guest fills its memory first, and writes it again and again then.
        while differing(&copy, &pages_of(&ram)).len() < WRITTEN {
            assert!(Instant::now() < deadline, "the guest does not write in round {round}");
            std::thread::yield_now();
        }
        stop(&microvm);
        let now = pages_of(&ram);
        let mut named = PageBitmap::new(PAGES);
        log.collect(0, &mut named).unwrap();
        let written = differing(&copy, &now);
        let missing: Vec<_> = written.iter().filter(|page| !named.contains(**page)).collect();
        assert_eq!(
            missing,
            [&0; 0],
            "round {round}: {} of {} written pages are not named",
            missing.len(),
            written.len()
        );
        all_named += named.count();
        all_written += written.len();
        copy = now;
        microvm.signal(Signal::CONT);
    }
    assert!(all_written >= ROUNDS * WRITTEN);
    println!(
        "{kind:?}, {backing}, {origin:?}: {all_written} pages written, {all_named} named, {:?} stopped",
        taken.stopped
    );
    log.stop().unwrap();
}

const KINDS: [Kind; 2] = [Kind::Threads, Kind::KvmLog];

#[test]
fn the_writes_of_a_guest_on_kvm_are_tracked_from_outside_for_faults_of_user_space_only() {
    for kind in KINDS.into_iter().filter(|kind| kind.is_possible()) {
        for backing in ["anonymous", "anonymous-huge", "memfd"] {
            tracks(kind, backing, Stdio::null(), UserfaultOrigin::SystemCall);
        }
    }
}

#[test]
fn the_writes_of_a_guest_on_kvm_are_tracked_from_outside_for_all_faults() {
    for kind in KINDS.into_iter().filter(|kind| kind.is_possible()) {
        for backing in ["anonymous", "anonymous-huge", "memfd"] {
            let device = match File::options().read(true).write(true).open("/dev/userfaultfd") {
                Ok(device) => device,
                Err(error) => return println!("skipped: /dev/userfaultfd: {error}"),
            };
            tracks(kind, backing, device.into(), UserfaultOrigin::Device(0));
        }
    }
}
