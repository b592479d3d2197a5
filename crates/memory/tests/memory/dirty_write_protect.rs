//! The write-protecting dirty log on memory of every kind, compared with the memory itself.

// The guests that write here are x86-64 machine code.
#![cfg(target_arch = "x86_64")]

use crate::dirty_support::guest::{self, Guest};
use crate::dirty_support::{HUGE, Memory, Writer, collected, misuse_is_refused, rounds_against_writers, works};
use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use rustix::mm::Advice;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::userfault::{Faults, Userfault, WP_ASYNC, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED};
use sterna_test_kit::Random;

/// Returns a log, or prints why none works here.
fn log_of(memories: &[&Memory]) -> Option<WriteProtectLog> {
    let mut log = WriteProtectLog::new(memories.iter().map(|memory| memory.addresses()).collect()).unwrap();
    works(&mut log).then(|| {
        log.stop().unwrap();
        log
    })
}

/// Returns a thread that writes: half of the writes to a few hot pages, the rest to one page after the other, `stay`
/// times to each and then no more, so that a lost write stays lost.
fn writer<'a>(memories: &'a [&'a Memory], seed: u64, stay: u64) -> Writer<'a> {
    Box::new(move |writers| {
        let (mut random, mut count) = (Random::new(seed), 0);
        while !writers.stopped() {
            let memory = memories[random.next_u64() as usize % memories.len()];
            count += 1;
            let page =
                if random.next_u64().is_multiple_of(2) { random.next_u64() % 8 } else { count / stay % memory.pages() };
            memory.word(page, random.next_u64() as usize % 512).store(random.next_u64(), Ordering::Relaxed);
            writers.writes.fetch_add(1, Ordering::Relaxed);
        }
    })
}

/// Runs the key test, on memory that is partly populated before.
fn no_write_is_lost(memories: &[&Memory]) {
    let Some(mut log) = log_of(memories) else { return };
    for memory in memories {
        (0..memory.pages() / 2).for_each(|page| memory.write(page));
    }
    println!("seeds 5EED0001 5EED0002");
    let threads = vec![writer(memories, 0x5EED_0001, 64), writer(memories, 0x5EED_0002, 4096)];
    let outcome = rounds_against_writers(&mut log, memories, 150, 300, threads);
    assert!(outcome.named.iter().all(|named| *named >= 1), "{:?}", outcome.named);
    for (block, memory) in memories.iter().enumerate() {
        assert_eq!(collected(&mut log, block, memory.pages()), [], "no page was written since");
    }
    log.stop().unwrap();
}

#[test]
fn a_given_userfaultfd_serves_one_tracking_after_the_other_and_watches_nothing_between_them() {
    let (anonymous, shared) = (Memory::small(8), Memory::memfd(8));
    let both = [&anonymous, &shared];
    if log_of(&both).is_none() {
        return;
    }
    // Opened elsewhere, and its handshake made.
    let made = Userfault::open(Faults::OfUserSpace, WP_ASYNC | WP_UNPOPULATED | WP_HUGETLBFS_SHMEM).unwrap();
    let given = made.as_fd().try_clone_to_owned().unwrap();
    let log = WriteProtectLog::new(both.iter().map(|memory| memory.addresses()).collect()).unwrap();
    let mut log = log.with_userfault(given).unwrap();
    for page in [2, 5] {
        log.check().unwrap();
        log.start().unwrap();
        for (block, memory) in both.iter().enumerate() {
            memory.write(page);
            assert_eq!(collected(&mut log, block, 8), [page]);
            assert_eq!(collected(&mut log, block, 8), []);
        }
        log.stop().unwrap();
        // Another log can watch the memory meanwhile.
        assert!(log_of(&both).is_some());
    }
    let no_userfault = std::fs::File::open("/dev/null").unwrap();
    let refused = WriteProtectLog::new(Vec::new()).unwrap().with_userfault(no_userfault).unwrap_err();
    assert!(matches!(refused, DirtyLogError::Userfault(_)), "{refused}");
}

#[test]
fn on_anonymous_memory_no_write_is_lost() {
    no_write_is_lost(&[&Memory::small(3000), &Memory::small(70)]);
}

#[test]
fn on_transparent_huge_pages_no_write_is_lost() {
    no_write_is_lost(&[&Memory::transparent_huge(6 * HUGE / PAGE_SIZE)]);
}

#[test]
fn on_a_shared_memory_file_no_write_is_lost() {
    no_write_is_lost(&[&Memory::memfd(3000), &Memory::small(100)]);
}

#[test]
fn on_a_shared_memory_file_of_huge_pages_no_write_is_lost() {
    no_write_is_lost(&[&Memory::memfd_transparent_huge(4 * HUGE / PAGE_SIZE)]);
}

#[test]
fn on_tmpfs_no_write_is_lost() {
    match Memory::tmpfs(2000) {
        Some(memory) => no_write_is_lost(&[&memory]),
        None => println!("skipped: no tmpfs at /dev/shm"),
    }
}

#[test]
fn on_hugetlb_no_write_is_lost() {
    match Memory::hugetlb(6 * HUGE / PAGE_SIZE) {
        Some(memory) => no_write_is_lost(&[&memory]),
        None => println!("skipped: no huge pages are free, and none can be added"),
    }
}

#[test]
fn writes_of_a_kvm_guests_vcpus_are_named_without_kvms_help() {
    let memories = guest::BLOCKS.map(|pages| Memory::small(pages as usize));
    let Some(mut guest) = Guest::new(memories, 2, |_| true) else { return };
    let memories = [&guest.memories[0], &guest.memories[1]];
    let Some(mut log) = log_of(&memories) else { return };
    rounds_against_writers(&mut log, &memories, 60, 20_000, Guest::writers(&mut guest.vcpus, None));
    log.stop().unwrap();
}

proptest! {
    #![proptest_config(contextualize_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) }))]

    #[test]
    fn exactly_the_pages_written_are_named_whether_they_were_populated_or_not(
        kind in 0usize..3,
        populated in proptest::collection::btree_set(0u64..3000, 0..100),
        rounds in proptest::collection::vec(proptest::collection::btree_set(0u64..3000, 0..600), 1..6),
    ) {
        let memory = match kind {
            0 => Memory::small(3000),
            1 => Memory::memfd(3000),
            _ => Memory::disk(3000),
        };
        let Some(mut log) = log_of(&[&memory]) else { return Ok(()) };
        populated.iter().for_each(|page| memory.write(*page));
        log.start().unwrap();
        for written in rounds {
            written.iter().for_each(|page| memory.write(*page));
            prop_assert_eq!(collected(&mut log, 0, 3000), written.into_iter().collect::<Vec<_>>());
        }
        log.stop().unwrap();
    }
}

#[test]
fn of_a_protected_huge_page_the_written_small_page_is_named_and_a_new_one_completely() {
    let pages = 4 * (HUGE / PAGE_SIZE) as u64;
    let memory = Memory::transparent_huge(pages as usize);
    let Some(mut log) = log_of(&[&memory]) else { return };
    (0..1024).for_each(|page| memory.write(page));
    log.start().unwrap();
    memory.write(700);
    assert_eq!(collected(&mut log, 0, pages), [700]);
    memory.write(1500);
    let named = collected(&mut log, 0, pages);
    assert!(named == [1500] || named == (1024..1536).collect::<Vec<_>>(), "{named:?}");
    memory.write(1501);
    assert_eq!(collected(&mut log, 0, pages), [1501]);
    log.stop().unwrap();
}

#[test]
fn a_written_hugetlb_page_is_named_completely_and_its_neighbours_are_not() {
    let Some(memory) = Memory::hugetlb(4 * HUGE / PAGE_SIZE) else {
        return println!("skipped: no huge pages are free, and none can be added");
    };
    let Some(mut log) = log_of(&[&memory]) else { return };
    memory.write(0);
    memory.write(512);
    log.start().unwrap();
    assert_eq!(collected(&mut log, 0, 2048), []);
    memory.write(600);
    memory.write(2047);
    let expected: Vec<u64> = (512..1024).chain(1536..2048).collect();
    assert_eq!(collected(&mut log, 0, 2048), expected);
    assert_eq!(collected(&mut log, 0, 2048), []);
    log.stop().unwrap();
}

/// The scan cannot protect these pages: finding and protecting are two steps.
#[test]
fn a_written_hugetlb_page_of_1_gib_is_named_completely() {
    let gib = 1_u64 << 18;
    for sharing in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        let Some(memory) = Memory::hugetlb_1_gib(2 * gib as usize, sharing) else {
            return println!("skipped: there are no two huge pages of 1 GiB in the pool");
        };
        let Some(mut log) = log_of(&[&memory]) else { return };
        memory.write(0);
        log.start().unwrap();
        assert_eq!(collected(&mut log, 0, 2 * gib), []);
        for (written, named) in
            [(vec![5], 0..gib), (vec![0, gib], 0..2 * gib), (vec![], 0..0), (vec![gib], gib..2 * gib)]
        {
            written.into_iter().for_each(|page| memory.write(page));
            assert!(collected(&mut log, 0, 2 * gib).into_iter().eq(named));
        }
        log.stop().unwrap();
    }
}

/// Like reclaim of shared memory: the page stays in the file, its page table entry is removed.
#[test]
fn a_written_shared_page_that_loses_its_page_table_entry_is_named_nevertheless() {
    let memory = Memory::memfd(1024);
    let Some(mut log) = log_of(&[&memory]) else { return };
    memory.populate();
    log.start().unwrap();
    memory.write(77);
    memory.advise(77..78, Advice::LinuxDontNeed).unwrap();
    memory.advise(200..210, Advice::LinuxDontNeed).unwrap();
    assert_eq!(collected(&mut log, 0, 1024), [77], "pages that were protected and not written keep that mark");
    log.stop().unwrap();
}

/// Whether they are touched again or not, and once each time: small pages, and huge ones whose page tables are freed
/// too.
#[test]
fn freed_anonymous_pages_are_named() {
    let pages = 6 * (HUGE / PAGE_SIZE) as u64;
    for memory in [Memory::small(pages as usize), Memory::transparent_huge(pages as usize)] {
        let Some(mut log) = log_of(&[&memory]) else { return };
        (0..4 * 512).for_each(|page| memory.write(page));
        log.start().unwrap();
        assert_eq!(collected(&mut log, 0, pages), []);
        memory.advise(100..200, Advice::LinuxDontNeed).unwrap();
        memory.advise(512..1536, Advice::LinuxDontNeed).unwrap();
        // Never populated: nothing is freed there.
        memory.advise(2100..2200, Advice::LinuxDontNeed).unwrap();
        assert_eq!(memory.word(150, 0).load(Ordering::Relaxed), 0);
        memory.write(160);
        let expected: Vec<u64> = (100..200).chain(512..1536).collect();
        assert_eq!(collected(&mut log, 0, pages), expected);
        assert_eq!(collected(&mut log, 0, pages), []);
        // Freed again, read again, written after it was freed, written and freed.
        memory.advise(110..115, Advice::LinuxDontNeed).unwrap();
        assert_eq!(memory.word(170, 0).load(Ordering::Relaxed), 0);
        memory.write(600);
        memory.write(700);
        memory.advise(700..701, Advice::LinuxDontNeed).unwrap();
        assert_eq!(collected(&mut log, 0, pages), [110, 111, 112, 113, 114, 600, 700]);
        assert_eq!(collected(&mut log, 0, pages), []);
        log.stop().unwrap();
    }
}

/// A page that was missing at the start, was sent by the first round, and is freed before the first collection.
#[test]
fn pages_that_the_first_round_sends_and_that_are_freed_meanwhile_are_named() {
    let memory = Memory::small(1000);
    let Some(mut log) = log_of(&[&memory]) else { return };
    log.start().unwrap();
    memory.write(300);
    let mut populated = PageBitmap::new(1000);
    populated.set(300..301);
    log.found_populated(0, &populated).unwrap();
    memory.advise(300..301, Advice::LinuxDontNeed).unwrap();
    // This page was never sent.
    memory.write(400);
    memory.advise(400..401, Advice::LinuxDontNeed).unwrap();
    assert_eq!(collected(&mut log, 0, 1000), [300]);
    log.stop().unwrap();
    assert!(matches!(log.found_populated(0, &populated), Err(DirtyLogError::NotStarted)));
}

/// Returns the page tables of this process, in KiB.
fn page_tables() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPTE:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn private_memory_that_was_never_touched_gets_no_page_tables() {
    let pages = 4 << 20;
    let memory = Memory::small(pages);
    let before = page_tables();
    let Some(mut log) = log_of(&[&memory]) else { return };
    log.start().unwrap();
    assert_eq!(collected(&mut log, 0, pages as u64), []);
    // All of 16 GiB would need 32 MiB; other tests of this process allocate some of their own meanwhile.
    let more = page_tables().saturating_sub(before);
    assert!(more < 16 << 10, "{more} KiB of page tables more");
    log.stop().unwrap();
}

#[test]
fn shared_memory_that_was_never_touched_gets_no_pages() {
    let pages = 1 << 18;
    let memory = Memory::memfd(pages);
    let Some(mut log) = log_of(&[&memory]) else { return };
    log.start().unwrap();
    assert_eq!(collected(&mut log, 0, pages as u64), []);
    memory.write(99);
    assert_eq!(collected(&mut log, 0, pages as u64), [99]);
    log.stop().unwrap();
    let resident = (0..pages as u64).step_by(512).filter(|page| memory.is_resident(*page)).count();
    assert_eq!(resident, 0);
    assert!(memory.is_resident(99));
}

#[test]
fn a_dropped_log_leaves_memory_to_the_next_one() {
    let memory = Memory::small(512);
    let Some(mut first) = log_of(&[&memory]) else { return };
    memory.populate();
    first.start().unwrap();
    memory.write(3);
    let mut second = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    let error = second.start().unwrap_err().to_string();
    assert!(error.contains("another userfaultfd watches part of it"), "{error}");
    drop(first);
    second.start().unwrap();
    assert_eq!(collected(&mut second, 0, 512), []);
    memory.write(5);
    assert_eq!(collected(&mut second, 0, 512), [5]);
    second.stop().unwrap();
    assert_eq!(memory.word(3, 3).load(Ordering::Relaxed), 2);
}

#[test]
fn misuse_and_memory_that_cannot_be_tracked_are_refused_with_the_reason() {
    let memory = Memory::small(100);
    let other = Memory::small(64);
    let Some(mut log) = log_of(&[&memory, &other]) else { return };
    misuse_is_refused(&mut log, &[100, 64]);

    let range = memory.addresses();
    for broken in [range.start + 1..range.end, range.start..range.end - 1, range.start..range.start] {
        let error = WriteProtectLog::new(vec![range.clone(), broken]).unwrap_err();
        assert!(matches!(error, DirtyLogError::Unaligned { block: 1, .. }), "{error}");
    }
    // A hole in the middle.
    let hole = Memory::small(30);
    // SAFETY: an unused part of our own mapping; unmapping it again on drop is allowed.
    unsafe { rustix::mm::munmap(hole.bytes().add(10 * PAGE_SIZE).cast(), PAGE_SIZE).unwrap() };
    let mut unmapped = WriteProtectLog::new(vec![range.clone(), hole.addresses()]).unwrap();
    let error = unmapped.start().unwrap_err();
    assert!(matches!(error, DirtyLogError::Unmapped { block: 1, .. }), "{error}");
    // Block 0 was released.
    log.start().unwrap();
    log.stop().unwrap();
    // Memory that may not be written needs no log, and the kernel refuses one.
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let read_only = Memory::read_only_file(&file, 4);
    let mut log = WriteProtectLog::new(vec![read_only.addresses()]).unwrap();
    let error = log.start().unwrap_err().to_string();
    assert!(error.contains("a file that may not be written"), "{error}");
    assert!(matches!(log.collect(0, &mut PageBitmap::new(4)), Err(DirtyLogError::NotStarted)));
}
