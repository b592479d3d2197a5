//! Memory that is freed while it is tracked reads as zero at the destination too: replaying the pages that the logs
//! name results in equal memory.

use crate::dirty_support::process::{Process, serve};
use crate::dirty_support::{
    HUGE, Memory, Writer, collected, huge_memory_file, memory_file, misuse_is_refused, rounds_against_writers, works,
};
use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::Advice;
use std::fs::File;
use std::hint::black_box;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::punched::{PunchedLog, SharedFile};
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::holes::PageMap;
use sterna_memory::userfault::Userfault;
use sterna_test_kit::Random;

/// The test that [`Process`] runs as a child.
#[test]
fn as_a_child() {
    serve();
}

/// An event of the memory, in units of its page size.
#[derive(Clone, Debug)]
enum Step {
    Write(u64),
    Read(u64),
    /// A read through another mapping than the tracked one.
    ReadElsewhere(u64),
    /// A hole is punched into the file, or anonymous memory is discarded.
    Free(u64, u64),
    /// The same by `MADV_REMOVE`.
    Remove(u64, u64),
    /// The mapping loses its page table entries, as in reclaim.
    Forget(u64, u64),
    Round,
}

fn steps(units: u64) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..units).prop_map(Step::Write),
        2 => (0..units).prop_map(Step::Read),
        2 => (0..units).prop_map(Step::ReadElsewhere),
        3 => (0..units, 1..units / 2).prop_map(|(at, len)| Step::Free(at, len)),
        1 => (0..units, 1..units / 2).prop_map(|(at, len)| Step::Remove(at, len)),
        1 => (0..units, 1..units / 2).prop_map(|(at, len)| Step::Forget(at, len)),
        3 => Just(Step::Round),
    ];
    proptest::collection::vec(step, 1..120)
}

fn file_of(file: &File, pages: u64) -> Option<SharedFile> {
    Some(SharedFile { file: Arc::new(file.try_clone().unwrap()), offset: 0, pages })
}

fn punch(file: &File, pages: Range<u64>) {
    let (start, len) = (pages.start * PAGE_SIZE as u64, (pages.end - pages.start) * PAGE_SIZE as u64);
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, len).unwrap();
}

/// Copies the named pages through the file, which does not change it.
fn replay(log: &mut dyn DirtyLog, file: &File, copy: &mut [u8]) {
    let mut dirty = PageBitmap::new((copy.len() / PAGE_SIZE) as u64);
    log.collect(0, &mut dirty).unwrap();
    dirty.for_each_run(|run| {
        let bytes = run.start as usize * PAGE_SIZE..run.end as usize * PAGE_SIZE;
        file.read_exact_at(&mut copy[bytes.clone()], bytes.start as u64).unwrap();
    });
}

/// `unit`: number of small pages in a page of the file.
fn shared_memory_is_replayed(
    file: &File,
    units: u64,
    unit: u64,
    before: &[u64],
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let pages = units * unit;
    let (memory, elsewhere) = (Memory::shared_file(file, pages as usize), Memory::shared_file(file, pages as usize));
    before.iter().for_each(|at| memory.write(at * unit));
    let writes = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    let mut log = PunchedLog::new(Box::new(writes), vec![file_of(file, pages)]);
    if !works(&mut log) {
        return Ok(());
    }
    let mut copy = vec![0; pages as usize * PAGE_SIZE];
    file.read_exact_at(&mut copy, 0).unwrap();
    let range = |at: u64, len: u64| at * unit..(at + len).min(units) * unit;
    for (number, step) in steps.iter().enumerate() {
        match *step {
            Step::Write(at) => memory.word(at * unit, 3).store(number as u64 + 1, Ordering::Relaxed),
            Step::Read(at) => _ = black_box(memory.word(at * unit, 0).load(Ordering::Relaxed)),
            Step::ReadElsewhere(at) => _ = black_box(elsewhere.word(at * unit, 0).load(Ordering::Relaxed)),
            Step::Free(at, len) => punch(file, range(at, len)),
            Step::Remove(at, len) => memory.advise(range(at, len), Advice::LinuxRemove).unwrap(),
            Step::Forget(at, len) => memory.advise(range(at, len), Advice::LinuxDontNeed).unwrap(),
            Step::Round => replay(&mut log, file, &mut copy),
        }
    }
    replay(&mut log, file, &mut copy);
    let mut there = vec![0; copy.len()];
    file.read_exact_at(&mut there, 0).unwrap();
    let differs = (0..pages as usize).find(|page| {
        let bytes = page * PAGE_SIZE..(page + 1) * PAGE_SIZE;
        there[bytes.clone()] != copy[bytes]
    });
    prop_assert_eq!(differs, None);
    log.stop().unwrap();
    Ok(())
}

proptest! {
    #![proptest_config(contextualize_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) }))]

    #[test]
    fn shared_memory_with_holes_punched_into_it_is_replayed(
        before in proptest::collection::vec(0u64..40, 0..40),
        steps in steps(40),
    ) {
        shared_memory_is_replayed(&memory_file(40), 40, 1, &before, &steps)?;
    }

    #[test]
    fn anonymous_memory_that_is_freed_is_replayed(
        huge in any::<bool>(),
        before in proptest::collection::vec(0u64..40, 0..40),
        early in steps(40),
        steps in steps(40),
    ) {
        // With huge pages, a unit is so large that page tables are allocated and freed.
        let unit = if huge { 256 } else { 1 };
        let pages = 40 * unit;
        let memory = if huge { Memory::transparent_huge(pages as usize) } else { Memory::small(pages as usize) };
        before.iter().for_each(|at| memory.write(at * unit));
        let mut log = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
        if !works(&mut log) {
            return Ok(());
        }
        let mut copy = vec![0; pages as usize];
        let read = |page: u64| memory.word(page, 3).load(Ordering::Relaxed);
        let apply = |log: &mut WriteProtectLog, steps: &[Step], copy: &mut Vec<u64>| {
            for (number, step) in steps.iter().enumerate() {
                match *step {
                    Step::Write(at) => memory.word(at * unit, 3).store(number as u64 + 1, Ordering::Relaxed),
                    Step::Read(at) | Step::ReadElsewhere(at) => _ = black_box(read(at * unit)),
                    Step::Free(at, len) | Step::Remove(at, len) | Step::Forget(at, len) => {
                        let range = at * unit..(at + len).min(40) * unit;
                        memory.advise(range, Advice::LinuxDontNeed).unwrap();
                    }
                    Step::Round => {
                        let named = collected(log, 0, pages);
                        named.into_iter().for_each(|page| copy[page as usize] = read(page));
                    }
                }
            }
        };
        // There is no round between the start and the search for populated pages.
        let early: Vec<Step> = early.into_iter().filter(|step| !matches!(step, Step::Round)).collect();
        apply(&mut log, &early, &mut copy);
        let mut populated = PageBitmap::new(pages);
        let start = memory.addresses().start;
        PageMap::own().unwrap().populated(memory.addresses(), |part| {
            populated.set(((part.start - start) / PAGE_SIZE) as u64..((part.end - start) / PAGE_SIZE) as u64);
        }).unwrap();
        log.found_populated(0, &populated).unwrap();
        populated.for_each_run(|run| run.for_each(|page| copy[page as usize] = read(page)));
        apply(&mut log, &steps, &mut copy);
        apply(&mut log, &[Step::Round], &mut copy);
        prop_assert_eq!((0..pages).find(|page| read(*page) != copy[*page as usize]), None);
        log.stop().unwrap();
    }
}

proptest! {
    #![proptest_config(contextualize_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20) }))]

    #[test]
    fn hugetlb_with_holes_punched_into_it_is_replayed(
        before in proptest::collection::vec(0u64..8, 0..8),
        steps in steps(8),
    ) {
        let unit = (HUGE / PAGE_SIZE) as u64;
        match huge_memory_file(8 * unit as usize) {
            Some((file, _surplus)) => shared_memory_is_replayed(&file, 8, unit, &before, &steps)?,
            None => println!("skipped: no huge pages are free, and none can be added"),
        }
    }
}

/// Returns a thread that writes pages and frees others.
fn writer<'a>(memory: &'a Memory, seed: u64, advice: Advice) -> Writer<'a> {
    Box::new(move |writers| {
        let mut random = Random::new(seed);
        while !writers.stopped() {
            let page = random.next_u64() % memory.pages();
            if random.next_u64().is_multiple_of(8) {
                memory.advise(page..(page + random.next_u64() % 8).min(memory.pages()), advice).unwrap();
            } else {
                memory.word(page, random.next_u64() as usize % 512).store(random.next_u64(), Ordering::Relaxed);
            }
            writers.writes.fetch_add(1, Ordering::Relaxed);
        }
    })
}

#[test]
fn while_threads_write_and_free_anonymous_memory_nothing_is_lost() {
    for memory in [Memory::small(600), Memory::transparent_huge(2048)] {
        let mut log = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
        if !works(&mut log) {
            return;
        }
        log.stop().unwrap();
        println!("seeds 5EED0011 5EED0012");
        let writers = [0x5EED_0011, 0x5EED_0012].map(|seed| writer(&memory, seed, Advice::LinuxDontNeed));
        rounds_against_writers(&mut log, &[&memory], 100, 300, writers.into());
        log.stop().unwrap();
    }
}

#[test]
fn while_threads_write_shared_memory_and_punch_holes_nothing_is_lost() {
    let file = memory_file(600);
    let memory = Memory::shared_file(&file, 600);
    let writes = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    let mut log = PunchedLog::new(Box::new(writes), vec![file_of(&file, 600)]);
    if !works(&mut log) {
        return;
    }
    log.stop().unwrap();
    println!("seeds 5EED0013 5EED0014");
    let writers = [0x5EED_0013, 0x5EED_0014].map(|seed| writer(&memory, seed, Advice::LinuxRemove));
    rounds_against_writers(&mut log, &[&memory], 100, 300, writers.into());
    log.stop().unwrap();
}

/// Shows why there is a log of holes: the log of writes names no holes.
#[test]
fn holes_punched_into_shared_memory_are_named_by_the_log_of_holes_only() {
    for (punch_by_file, on_disk) in [(true, false), (false, false), (true, true)] {
        let file = if on_disk { tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap() } else { memory_file(200) };
        file.set_len(200 * PAGE_SIZE as u64).unwrap();
        let memory = Memory::shared_file(&file, 200);
        memory.populate();
        let elsewhere = Memory::shared_file(&file, 200);
        let give_back = |pages: Range<u64>| {
            if punch_by_file { punch(&file, pages) } else { memory.advise(pages, Advice::LinuxRemove).unwrap() }
        };
        let mut writes = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
        if !works(&mut writes) {
            return;
        }
        give_back(10..20);
        assert_eq!(memory.word(10, 0).load(Ordering::Relaxed), 0);
        assert_eq!(elsewhere.word(11, 0).load(Ordering::Relaxed), 0);
        assert_eq!(collected(&mut writes, 0, 200), [], "if it names them, the log of holes is not needed");
        writes.stop().unwrap();

        let mut log = PunchedLog::new(Box::new(writes), vec![file_of(&file, 200)]);
        log.start().unwrap();
        assert!(on_disk || collected(&mut log, 0, 200).is_empty());
        give_back(30..40);
        // Read again, by the tracked mapping and by another one: the file reports data there.
        assert_eq!(memory.word(32, 0).load(Ordering::Relaxed), 0);
        assert_eq!(elsewhere.word(33, 0).load(Ordering::Relaxed), 0);
        memory.write(50);
        memory.write(60);
        give_back(60..61);
        // A hole that is written and punched again.
        memory.write(15);
        give_back(15..16);
        // A hole all the time.
        give_back(16..18);
        // Pages of a file on a disk leave memory for other reasons too.
        let mut assert_named = |expected: Vec<u64>| {
            let mut named = collected(&mut log, 0, 200);
            named.retain(|page| !on_disk || expected.contains(page));
            assert_eq!(named, expected);
        };
        assert_named([15].into_iter().chain(30..40).chain([50, 60]).collect());
        assert_named(vec![]);
        // Data again, and freed again.
        memory.write(35);
        assert_named(vec![35]);
        give_back(35..36);
        assert_named(vec![35]);
        assert_named(vec![]);
        log.stop().unwrap();
    }
}

/// The content of the file becomes visible again.
#[test]
fn freed_pages_of_a_private_mapping_are_named() {
    let file = memory_file(100);
    (0..100).for_each(|page| file.write_all_at(b"of the file", page * PAGE_SIZE as u64).unwrap());
    let memory = Memory::private_mapping(&file, 100);
    (0..50).for_each(|page| memory.write(page));
    let mut log = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    if !works(&mut log) {
        return;
    }
    let mut all = PageBitmap::new(100);
    all.set(0..100);
    log.found_populated(0, &all).unwrap();
    collected(&mut log, 0, 100);
    memory.advise(10..20, Advice::LinuxDontNeed).unwrap();
    _ = black_box(memory.word(12, 0).load(Ordering::Relaxed));
    memory.write(70);
    memory.write(80);
    memory.advise(80..81, Advice::LinuxDontNeed).unwrap();
    let named = collected(&mut log, 0, 100);
    let expected: Vec<u64> = (10..20).chain([70, 80]).collect();
    assert_eq!(named, expected);
    memory.advise(70..71, Advice::LinuxDontNeed).unwrap();
    assert_eq!(collected(&mut log, 0, 100), [70]);
    assert_eq!(collected(&mut log, 0, 100), []);
    log.stop().unwrap();
}

#[test]
fn freed_private_huge_pages_are_named() {
    let unit = (HUGE / PAGE_SIZE) as u64;
    let Some(memory) = Memory::hugetlb(4 * unit as usize) else {
        return println!("skipped: no huge pages are free, and none can be added");
    };
    (0..3).for_each(|at| memory.write(at * unit));
    let mut log = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    if !works(&mut log) {
        return;
    }
    memory.advise(unit..2 * unit, Advice::LinuxDontNeed).unwrap();
    // Written, not collected, and freed.
    memory.write(2 * unit);
    memory.advise(2 * unit..3 * unit, Advice::LinuxDontNeed).unwrap();
    assert_eq!(collected(&mut log, 0, 4 * unit), (unit..3 * unit).collect::<Vec<_>>());
    assert_eq!(collected(&mut log, 0, 4 * unit), []);
    log.stop().unwrap();
}

#[test]
fn searching_for_holes_populates_none() {
    let file = memory_file(1000);
    let memory = Memory::shared_file(&file, 1000);
    (0..1000).step_by(10).for_each(|page| memory.write(page));
    let data = || rustix::fs::fstat(&file).unwrap().st_blocks;
    let before = data();
    let writes = WriteProtectLog::new(vec![memory.addresses()]).unwrap();
    let mut log = PunchedLog::new(Box::new(writes), vec![file_of(&file, 1000)]);
    if !works(&mut log) {
        return;
    }
    assert_eq!(data(), before);
    punch(&file, 0..500);
    assert_eq!(collected(&mut log, 0, 1000), (0..500).step_by(10).collect::<Vec<_>>());
    assert_eq!(data(), before / 2);
    log.stop().unwrap();
}

#[test]
fn holes_that_another_process_punches_are_named() {
    let file = memory_file(300);
    let Some(mut process) =
        Process::start(&format!("/proc/{}/fd/{}:300 small:10", std::process::id(), file.as_raw_fd()))
    else {
        return;
    };
    process.ask("populate 0");
    let userfault = match Userfault::from_descriptor(process.userfaultfd(), WriteProtectLog::FEATURES) {
        Ok(userfault) => userfault,
        Err(error) => return println!("skipped: {error}"),
    };
    let writes = WriteProtectLog::of_process(process.target(), userfault, process.blocks()).unwrap();
    // The second block is not shared.
    let mut log = PunchedLog::new(Box::new(writes), vec![file_of(&file, 300), None]);
    if !works(&mut log) {
        return;
    }
    process.ask("remove 0 100 16");
    assert_eq!(process.ask("read 0 101"), "0");
    process.ask("write 0 7");
    process.ask("write 1 3");
    assert_eq!(collected(&mut log, 0, 300), [7].into_iter().chain(100..116).collect::<Vec<_>>());
    assert_eq!(collected(&mut log, 1, 10), [3]);
    assert_eq!(collected(&mut log, 0, 300), []);
    log.stop().unwrap();
}

#[test]
fn misuse_is_refused_with_the_reason() {
    let file = memory_file(70);
    let mut log = PunchedLog::new(Box::new(ReportedLog::new(&[70, 8])), vec![file_of(&file, 70)]);
    if !works(&mut log) {
        return;
    }
    log.stop().unwrap();
    misuse_is_refused(&mut log, &[70, 8]);
    // A file that may not be written cannot be guest RAM.
    let read_only = File::open("/proc/self/exe").unwrap();
    let mut log = PunchedLog::new(Box::new(ReportedLog::new(&[4])), vec![file_of(&read_only, 4)]);
    let error = log.start().unwrap_err().to_string();
    assert!(error.contains("a file that may not be written"), "{error}");
    // The log that it wraps was stopped.
    assert!(matches!(log.collect(0, &mut PageBitmap::new(4)), Err(DirtyLogError::NotStarted)));
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let mut log = PunchedLog::new(Box::new(ReportedLog::new(&[4])), vec![file_of(&File::from(pipe), 4)]);
    let error = log.start().unwrap_err().to_string();
    assert!(error.starts_with("cannot map the file of RAM block 0"), "{error}");
}
