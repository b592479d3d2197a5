//! KVM's dirty bitmap and dirty rings, against real guests that write their memory.

// The guests that write here are x86-64 machine code.
#![cfg(target_arch = "x86_64")]

use crate::dirty_support::guest::{BLOCKS, FIRST_FREE, FIRST_WRITTEN, Guest, RING_FULL, WRITTEN, fd_of};
use crate::dirty_support::{Memory, collected, misuse_is_refused, rounds_against_writers};
use kvm_ioctls::VmFd;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use sterna_memory::dirty::kvm_log::KvmLog;
use sterna_memory::dirty::kvm_ring::{self, KvmRingLog};
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError, KvmSlot};
use sterna_test_kit::Random;

/// The smallest rings that KVM allows without and with Intel's page modification log: 256 and 1024 pages.
const SMALLEST_RINGS: [u32; 2] = [4096, 16384];

fn memories() -> [Memory; 2] {
    [Memory::memfd(BLOCKS[0] as usize), Memory::small(BLOCKS[1] as usize)]
}

fn plain_guest(vcpus: u64) -> Option<Guest> {
    Guest::new(memories(), vcpus, |_| true)
}

fn log_of(guest: &Guest) -> KvmLog {
    // SAFETY: these are the guest's slots.
    unsafe { KvmLog::new(fd_of(&guest.vm), &BLOCKS, guest.slots.clone()).unwrap() }
}

/// Returns a guest with rings of this many bytes.
fn ring_guest(vcpus: u64, bytes: &mut u32, sizes: &[u32]) -> Option<Guest> {
    Guest::new(memories(), vcpus, |vm: &VmFd| {
        for size in sizes {
            match kvm_ring::enable(fd_of(vm), *size) {
                Ok(()) => {
                    *bytes = *size;
                    return true;
                }
                Err(error @ DirtyLogError::Missing { .. }) => {
                    println!("skipped: {error}");
                    return false;
                }
                Err(error) => println!("{error}"),
            }
        }
        panic!("no ring size is allowed");
    })
}

fn ring_log_of(guest: &Guest, bytes: u32) -> KvmRingLog {
    // SAFETY: open as long as the guest is borrowed.
    let vcpus: Vec<_> = guest.vcpus.iter().map(|v| unsafe { BorrowedFd::borrow_raw(v.as_raw_fd()) }).collect();
    // SAFETY: these are the guest's slots and vCPUs, with rings of this size, which no other code harvests.
    unsafe { KvmRingLog::new(fd_of(&guest.vm), &vcpus, bytes, &BLOCKS, guest.slots.clone()).unwrap() }
}

/// Returns the pages that the log names, numbered as in guest physical memory, without those that the guest reads for
/// itself: KVM names a page that it maps at a first read, because it maps the page for writing.
fn named(log: &mut dyn DirtyLog) -> BTreeSet<u64> {
    let second = collected(log, 1, BLOCKS[1]).into_iter().map(|page| BLOCKS[0] + page);
    collected(log, 0, BLOCKS[0]).into_iter().filter(|page| *page >= FIRST_FREE).chain(second).collect()
}

/// Checks that exactly the single pages are named that a vCPU writes between two collections.
fn exactly_the_pages_written_are_named(
    guest: &mut Guest,
    log: &mut dyn DirtyLog,
    harvester: Option<&kvm_ring::RingHarvester>,
) {
    let mut random = Random::new(0x5EED_0003);
    let all = BLOCKS[0] + BLOCKS[1];
    // Before the start, and so not named. The guest itself writes none of its own pages.
    guest.write_pages((FIRST_FREE..all).filter(|page| page % 3 == 0), harvester);
    log.start().unwrap();
    assert_eq!(named(log), BTreeSet::new());
    for round in 0..30 {
        let count = [0, 1, 5, 300, 700][round % 5];
        let written: BTreeSet<u64> = (0..count).map(|_| FIRST_FREE + random.next_u64() % (all - FIRST_FREE)).collect();
        guest.write_pages(written.iter().copied(), harvester);
        assert_eq!(named(log), written, "round {round}, seed 5EED0003");
    }
    // The borders of blocks and slots.
    let ends = BTreeSet::from([FIRST_FREE, 63, 64, 1036, 1037, 1100, 1101, BLOCKS[0] - 1, BLOCKS[0], all - 1]);
    guest.write_pages(ends.iter().copied(), harvester);
    assert_eq!(named(log), ends);
    log.stop().unwrap();
    guest.write_pages(10..20, harvester);
    log.start().unwrap();
    assert_eq!(named(log), BTreeSet::new(), "writes while the log is stopped are not recorded");
    guest.write_pages(15..17, harvester);
    assert_eq!(named(log), BTreeSet::from([15, 16]));
    log.stop().unwrap();
}

fn only_what_the_loop_writes(named: &BTreeSet<u64>) {
    assert!(named.iter().all(|page| (FIRST_WRITTEN..FIRST_WRITTEN + WRITTEN).contains(page)), "{named:?}");
}

#[test]
fn the_bitmap_names_exactly_the_pages_written() {
    let Some(mut guest) = plain_guest(1) else { return };
    let mut log = log_of(&guest);
    exactly_the_pages_written_are_named(&mut guest, &mut log, None);
}

#[test]
fn the_bitmap_cleared_by_reading_names_exactly_the_pages_written() {
    let Some(mut guest) = plain_guest(1) else { return };
    let mut log = log_of(&guest).cleared_by_reading();
    exactly_the_pages_written_are_named(&mut guest, &mut log, None);
    // The next log of this VM chooses the method again.
    let mut log = log_of(&guest);
    log.start().unwrap();
    guest.write_pages([1000, 2000], None);
    assert_eq!(named(&mut log), BTreeSet::from([1000, 2000]));
}

#[test]
fn by_the_bitmap_cleared_by_reading_no_write_of_racing_vcpus_is_lost() {
    let Some(mut guest) = plain_guest(2) else { return };
    let mut log = log_of(&guest).cleared_by_reading();
    let memories = [&guest.memories[0], &guest.memories[1]];
    rounds_against_writers(&mut log, &memories, 60, 20_000, Guest::writers(&mut guest.vcpus, None));
}

#[test]
fn by_the_bitmap_no_write_of_racing_vcpus_is_lost() {
    let Some(mut guest) = plain_guest(2) else { return };
    let mut log = log_of(&guest);
    let memories = [&guest.memories[0], &guest.memories[1]];
    let outcome = rounds_against_writers(&mut log, &memories, 60, 20_000, Guest::writers(&mut guest.vcpus, None));
    assert!(outcome.named.iter().all(|named| (1..=WRITTEN).contains(named)), "{:?}", outcome.named);
    assert_eq!(named(&mut log), BTreeSet::new());
    guest.write_pages([600], None);
    only_what_the_loop_writes(&named(&mut log));
}

#[test]
fn rings_name_exactly_the_pages_written() {
    let mut bytes = 0;
    let Some(mut guest) = ring_guest(1, &mut bytes, &SMALLEST_RINGS) else { return };
    let mut log = ring_log_of(&guest, bytes);
    let harvester = log.harvester();
    exactly_the_pages_written_are_named(&mut guest, &mut log, Some(&harvester));
    // 700 pages did not fit the smallest ring: the vCPU thread harvested, and the log has them nevertheless.
}

#[test]
fn by_rings_that_overflow_no_write_of_racing_vcpus_is_lost() {
    let mut bytes = 0;
    let Some(mut guest) = ring_guest(3, &mut bytes, &SMALLEST_RINGS) else { return };
    let mut log = ring_log_of(&guest, bytes);
    let harvester = log.harvester();
    let memories = [&guest.memories[0], &guest.memories[1]];
    let writers = Guest::writers(&mut guest.vcpus, Some(&harvester));
    let outcome = rounds_against_writers(&mut log, &memories, 60, 20_000, writers);
    assert!(RING_FULL.load(Ordering::Relaxed) > 0, "the rings were never full: {:?}", outcome.named);
    assert!(outcome.named.iter().all(|named| (1..=WRITTEN).contains(named)), "{:?}", outcome.named);
    assert_eq!(named(&mut log), BTreeSet::new());
}

#[test]
fn by_large_rings_no_write_of_racing_vcpus_is_lost() {
    let mut bytes = 0;
    let Some(mut guest) = ring_guest(2, &mut bytes, &[1 << 18]) else { return };
    let mut log = ring_log_of(&guest, bytes);
    let harvester = log.harvester();
    let memories = [&guest.memories[0], &guest.memories[1]];
    let writers = Guest::writers(&mut guest.vcpus, Some(&harvester));
    rounds_against_writers(&mut log, &memories, 60, 20_000, writers);
    assert_eq!(named(&mut log), BTreeSet::new());
}

#[test]
fn a_new_log_continues_in_the_ring_where_the_old_one_stopped() {
    let mut bytes = 0;
    let Some(mut guest) = ring_guest(1, &mut bytes, &SMALLEST_RINGS) else { return };
    for turn in 0..6 {
        let mut log = ring_log_of(&guest, bytes);
        let harvester = log.harvester();
        log.start().unwrap();
        let written: BTreeSet<u64> = (100..170 + turn * 13).collect();
        guest.write_pages(written.iter().copied(), Some(&harvester));
        assert_eq!(named(&mut log), written, "turn {turn}");
    }
}

#[test]
fn misuse_is_refused_by_both() {
    if let Some(guest) = plain_guest(1) {
        misuse_is_refused(&mut log_of(&guest), &BLOCKS);
        // SAFETY: these are the guest's slots and vCPUs; the size is never used, as there are no rings.
        let error = unsafe { KvmRingLog::new(fd_of(&guest.vm), &[], 4096, &BLOCKS, guest.slots.clone()).unwrap_err() };
        assert!(error.to_string().contains("enable it before the first vCPU is made"), "{error}");
        let error = kvm_ring::enable(fd_of(&guest.vm), 4096).unwrap_err().to_string();
        assert!(error.contains("before any vCPU is made") || error.contains("needs Linux"), "{error}");
    }
    let mut bytes = 0;
    if let Some(guest) = ring_guest(1, &mut bytes, &SMALLEST_RINGS) {
        misuse_is_refused(&mut ring_log_of(&guest, bytes), &BLOCKS);
        // A VM with rings has no bitmaps.
        let mut log = log_of(&guest);
        let error = log.start().and_then(|()| named_or_error(&mut log)).unwrap_err().to_string();
        assert!(error.contains("dirty log of KVM memory slot"), "{error}");
    }
}

fn named_or_error(log: &mut KvmLog) -> Result<(), DirtyLogError> {
    log.collect(0, &mut sterna_memory::bitmap::PageBitmap::new(BLOCKS[0]))
}

#[test]
fn slots_that_do_not_fit_their_blocks_are_refused_with_the_reason() {
    let Some(guest) = plain_guest(1) else { return };
    let with = |change: &dyn Fn(&mut [KvmSlot])| {
        let mut slots = guest.slots.clone();
        change(&mut slots);
        // SAFETY: refused before any of them is used.
        unsafe { KvmLog::new(fd_of(&guest.vm), &BLOCKS, slots).unwrap_err() }
    };
    assert!(matches!(with(&|slots| slots[2].block = 2), DirtyLogError::NoSuchBlock { block: 2, blocks: 2 }));
    type Change<'a> = &'a dyn Fn(&mut [KvmSlot]);
    let cases: [(Change<'_>, &str); 6] = [
        (
            &|slots| slots[2].first_page = 1,
            "KVM memory slot 7: its 600 pages from page 1 on are not within RAM block 1",
        ),
        (&|slots| slots[2].first_page = u64::MAX, "not within RAM block 1 of 600 pages"),
        (&|slots| slots[1].size += 1, "KVM memory slot 1: its addresses and size are not of whole pages"),
        (&|slots| slots[1].userspace_address += 8, "not of whole pages"),
        (&|slots| slots[1].slot = 0, "KVM memory slot 0: given twice"),
        (&|slots| slots[0].flags = 1, "dirty logging is on already"),
    ];
    for (change, words) in cases {
        let error = with(change).to_string();
        assert!(error.contains(words), "{error}");
    }
    // Not a VM.
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = kvm_ring::enable(file.as_fd(), 4096).unwrap_err().to_string();
    assert!(error.contains("is it a VM file descriptor?"), "{error}");
}

/// The monitor's own writes are not in KVM's log, but the process's log contains them beside the vCPUs' writes.
#[test]
fn writes_of_the_monitor_are_named_by_write_protection_and_not_by_kvm() {
    let Some(mut guest) = plain_guest(1) else { return };
    let mut kvm = log_of(&guest);
    let ranges = guest.memories.iter().map(Memory::addresses).collect();
    let mut process = WriteProtectLog::new(ranges).unwrap();
    (FIRST_FREE..BLOCKS[0]).for_each(|page| guest.memories[0].write(page));
    guest.memories[1].populate();
    kvm.start().unwrap();
    if let Err(error) = process.start() {
        return println!("skipped: {error}");
    }
    guest.write_pages([700], None);
    guest.memories[0].write(900);
    assert_eq!(named(&mut kvm), BTreeSet::from([700]));
    assert_eq!(named(&mut process), BTreeSet::from([700, 900]));
    process.stop().unwrap();
}
