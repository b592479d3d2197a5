//! Missing pages with the real userfaultfd: memory of every kind, threads that touch pages and threads that place them.

// The guests that write here are x86-64 machine code.
#![cfg(target_arch = "x86_64")]

use crate::dirty_support;

use crate::dirty_support::guest::{self, Guest};
use crate::missing_support::{HUGE, Kind, Memory, WORDS, WRITTEN, Watchdog, answer_faults, content, open, stamp};
use proptest::prelude::*;
use proptest::test_runner::contextualize_config;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use sterna_memory::PAGE_SIZE;
use sterna_memory::discard::{DiscardError, Discardable};
use sterna_memory::missing::{FaultAction, MissingError, MissingPages};
use sterna_memory::userfault::fill::Filled;
use sterna_memory::userfault::wait::{FaultBuffer, Stop};
use sterna_memory::userfault::{Faults, MISSING_SHMEM, Userfault, UserfaultError};
use sterna_test_kit::Random;

const TOUCHERS: u64 = 3;
/// The versions that the two channels and the answers to requests place.
const VERSIONS: [u64; 3] = [1, 2, 3];
/// A version that must never be placed.
const LATE: u64 = 99;

/// The key test. Threads read and write random pages while two channels place all stale pages in random order, with
/// many pages that arrive twice or were never stale, and faults are requested and answered.
fn race(kind: Kind, seed: u64, reconnects: bool) {
    println!("{kind:?}, seed {seed:#x}");
    let units = if kind.is_hugetlb() { 6 } else { 600 };
    let unit = if kind.is_hugetlb() { (HUGE / PAGE_SIZE) as u64 } else { 1 };
    let Some(memory) = Memory::new(kind, units * unit) else { return };
    let Some(userfault) = open(&memory) else { return };
    let _watchdog = Watchdog::new("race");
    let mut random = Random::new(seed);
    // Per unit: never sent, sent, or sent and stale by now; some stale ones were never sent.
    let sent: Vec<bool> = (0..units).map(|_| random.below(4) != 0).collect();
    let stale: Vec<bool> = (0..units).map(|_| random.below(5) < 3).collect();
    let pages = |at: u64| at * unit..(at + 1) * unit;
    (0..units).filter(|at| sent[*at as usize]).flat_map(pages).for_each(|page| memory.fill(page, 0));
    let missing = MissingPages::new(memory.backing(), Arc::clone(&userfault)).unwrap();
    (0..units).filter(|at| stale[*at as usize]).for_each(|at| missing.declare_stale(pages(at)).unwrap());
    let stale_pages = stale.iter().filter(|stale| **stale).count() as u64 * unit;
    assert_eq!(missing.stale_count(), stale_pages);
    assert!(stale_pages > 0, "the seed must make some pages stale");
    let enough_asks = (stale_pages / unit).min(2);

    let first: Vec<AtomicU64> = (0..units * unit).map(|_| AtomicU64::new(0)).collect();
    let writes: Vec<AtomicU64> = (0..units * unit).map(|_| AtomicU64::new(0)).collect();
    let asked: Vec<AtomicU64> = (0..units).map(|_| AtomicU64::new(0)).collect();
    let (asks, placed, arrived) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let place = |run: Range<u64>, version: u64| {
        arrived.fetch_add(run.end - run.start, Ordering::Relaxed);
        placed.fetch_add(missing.place(run.start, &content(run, version)).unwrap(), Ordering::Relaxed);
    };
    // The content that every reader must see at any time.
    let check = |page: u64, value: u64| {
        let at = (page / unit) as usize;
        match (stale[at], sent[at]) {
            (true, _) => {
                let version = value & 0xFF;
                assert!(VERSIONS.contains(&version) && value == stamp(page, version), "page {page} reads {value:#x}");
                let before = first[page as usize].compare_exchange(0, version, Ordering::Relaxed, Ordering::Relaxed);
                assert!(before.is_ok() || before == Err(version), "page {page} was {before:?} and is {version}");
            }
            (false, true) => assert_eq!(value, stamp(page, 0), "page {page} was replaced"),
            (false, false) => assert_eq!(value, 0, "page {page} was never sent"),
        }
    };
    let stop = Stop::new().unwrap();
    std::thread::scope(|scope| {
        let (ask, to_answer) = channel::<Range<u64>>();
        scope.spawn(|| {
            let ask = ask;
            answer_faults(&userfault, &missing, &stop, |answer| {
                if let FaultAction::Request(run) = answer {
                    asks.fetch_add(1, Ordering::Relaxed);
                    asked[(run.start / unit) as usize].fetch_add(1, Ordering::Relaxed);
                    ask.send(run).unwrap();
                }
            });
        });
        scope.spawn(|| {
            for run in to_answer {
                place(run, VERSIONS[2]);
            }
        });
        let touchers: Vec<_> = (0..TOUCHERS)
            .map(|thread| {
                let mut random = Random::new(seed.rotate_left(7 * thread as u32 + 1) | 1);
                let (memory, check, writes) = (&memory, &check, &writes);
                scope.spawn(move || {
                    for _ in 0..4 * units {
                        let page = random.below(units * unit);
                        if random.below(3) == 0 {
                            memory.word(page, WRITTEN).fetch_add(1 << 48, Ordering::Relaxed);
                            writes[page as usize].fetch_add(1, Ordering::Relaxed);
                        }
                        check(page, memory.read(page, random.below(WRITTEN as u64) as usize));
                    }
                })
            })
            .collect();
        let channels: Vec<_> = (0..2)
            .map(|channel| {
                let mut random = Random::new(seed.rotate_left(11 * channel as u32 + 31) | 1);
                let (place, stale, missing, asks) = (&place, &stale, &missing, &asks);
                scope.spawn(move || {
                    // Only after some faults were answered, so that there are any.
                    while asks.load(Ordering::Relaxed) < enough_asks {
                        std::thread::yield_now();
                    }
                    let mut order: Vec<u64> = (0..units).collect();
                    random.shuffle(&mut order);
                    for at in order {
                        if !stale[at as usize] {
                            place(pages(at), LATE);
                            continue;
                        }
                        // Also runs that overlap pages that are present already.
                        let end = (at + 1 + random.below(4)).min(units);
                        let end = (at..end).find(|at| !stale[*at as usize]).unwrap_or(end);
                        place(at * unit..end * unit, VERSIONS[channel]);
                        if reconnects && random.below(8) == 0 {
                            missing.forget_requests().unwrap();
                        }
                    }
                })
            })
            .collect();
        touchers.into_iter().for_each(|thread| thread.join().unwrap());
        channels.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(missing.stale_count(), 0);
        missing.finish().unwrap();
        stop.stop();
    });
    assert!(asks.into_inner() >= enough_asks);
    assert!(reconnects || asked.iter().all(|times| times.load(Ordering::Relaxed) <= 1), "requested twice: {asked:?}");
    assert_eq!(placed.load(Ordering::Relaxed), stale_pages, "each page is placed once");
    assert_eq!(missing.dropped(), arrived.into_inner() - placed.into_inner());
    for page in 0..units * unit {
        let value = memory.stamp(page);
        check(page, value);
        // Written before and after its arrival: no write was lost, so the page was not replaced.
        let written = writes[page as usize].load(Ordering::Relaxed) << 48;
        assert_eq!(memory.read(page, WRITTEN), value.wrapping_add(written), "page {page}");
    }
}

#[test]
fn racing_threads_see_the_first_arrival_and_never_zeros_on_memory_of_every_kind() {
    for kind in Kind::ALL {
        for seed in [0x5EED_0001, 0x5EED_0002, 0x5EED_0003] {
            race(kind, seed, false);
        }
    }
}

#[test]
fn faults_that_are_forgotten_repeatedly_occur_again_and_none_hangs() {
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::HugetlbMemfd] {
        for seed in [0x5EED_0011, 0x5EED_0012, 0x5EED_0013, 0x5EED_0014] {
            race(kind, seed, true);
        }
    }
}

/// Watched memory of one kind, with one stale unit.
struct OneStale {
    userfault: Arc<Userfault>,
    missing: MissingPages,
    run: Range<u64>,
    // Last.
    memory: Memory,
}

impl OneStale {
    fn new(kind: Kind) -> Option<Self> {
        let pages = if kind.is_hugetlb() { 3 * HUGE / PAGE_SIZE } else { 64 } as u64;
        let memory = Memory::new(kind, pages)?;
        (0..pages).for_each(|page| memory.fill(page, 0));
        let userfault = open(&memory)?;
        let missing = MissingPages::new(memory.backing(), Arc::clone(&userfault)).unwrap();
        let run = memory.unit()..2 * memory.unit();
        missing.declare_stale(run.clone()).unwrap();
        Some(Self { userfault, missing, run, memory })
    }

    fn content(&self, version: u64) -> Vec<u8> {
        content(self.run.clone(), version)
    }
}

#[test]
fn a_missing_page_is_requested_once_and_again_after_the_connection_was_lost() {
    for kind in Kind::ALL {
        let _watchdog = Watchdog::new("asked once");
        let Some(one) = OneStale::new(kind) else { continue };
        let stop = Stop::new().unwrap();
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..4)
                .map(|thread| {
                    let one = &one;
                    // On hugetlb, different small pages of one huge page.
                    let page = one.run.end - 1 - thread % one.memory.unit();
                    scope.spawn(move || assert_eq!(one.memory.read(page, 7), stamp(page, 1)))
                })
                .collect();
            // All four faults of each round: the first one requests the page, the others wait. Both after a loss and
            // without.
            let mut buffer = FaultBuffer::new();
            for _ in 0..3 {
                let mut answers = Vec::new();
                while answers.len() < 4 {
                    let faults = one.userfault.wait_faults(&stop, &mut buffer).unwrap().unwrap();
                    answers.extend(faults.iter().map(|fault| one.missing.fault(fault.address()).unwrap()));
                }
                assert_eq!(answers[0], FaultAction::Request(one.run.clone()), "{kind:?}");
                assert_eq!(
                    answers[1..],
                    [FaultAction::Waiting, FaultAction::Waiting, FaultAction::Waiting],
                    "{kind:?}"
                );
                let mut still = Vec::new();
                one.missing.for_each_stale_run(|run| still.push(run));
                assert_eq!(still, std::slice::from_ref(&one.run));
                one.missing.forget_requests().unwrap();
            }
            assert_eq!(one.missing.place(one.run.start, &one.content(1)).unwrap(), one.memory.unit());
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
        // Late ones are dropped and counted.
        assert_eq!(one.missing.place(one.run.start, &one.content(2)).unwrap(), 0);
        assert_eq!(one.missing.place_zero(one.run.clone()).unwrap(), 0);
        assert_eq!(one.missing.dropped(), 2 * one.memory.unit());
        assert_eq!(one.missing.fault(one.memory.address(one.run.start)).unwrap(), FaultAction::Present);
        one.missing.finish().unwrap();
        one.missing.finish().unwrap();
        for page in 0..one.memory.pages() {
            assert_eq!(one.memory.stamp(page), stamp(page, u64::from(one.run.contains(&page))));
        }
    }
}

#[test]
fn an_invalid_arrival_is_an_error_and_changes_nothing() {
    for kind in [Kind::Memfd, Kind::HugetlbMemfd, Kind::HugetlbAnonymous] {
        let Some(one) = OneStale::new(kind) else { continue };
        let (first, pages) = (one.run.start, one.memory.pages());
        let words = |error: Result<u64, MissingError>| error.unwrap_err().to_string();
        assert_eq!(words(one.missing.place(first, &[1; 100])), "100 bytes are not whole pages of 4096 bytes");
        let outside = words(one.missing.place(pages - 1, &vec![1; 2 * PAGE_SIZE]));
        assert_eq!(outside, format!("pages {}..{} are not within a RAM block of {pages} pages", pages - 1, pages + 1));
        assert!(words(one.missing.place_zero(u64::MAX - 1..u64::MAX)).contains("are not within a RAM block"));
        assert!(words(one.missing.place(u64::MAX, &vec![1; PAGE_SIZE])).contains("are not within a RAM block"));
        let elsewhere = one.missing.fault(one.memory.addresses().end).unwrap_err().to_string();
        assert!(elsewhere.contains("is not within the RAM block at"), "{elsewhere}");
        if kind.is_hugetlb() {
            for error in [one.missing.place(first, &vec![1; PAGE_SIZE]), one.missing.place_zero(first + 1..first + 513)]
            {
                assert!(words(error).ends_with("are not whole pages of 2097152 bytes, which back this RAM block"));
            }
            let error = one.missing.declare_stale(0..1).unwrap_err();
            assert!(matches!(error, MissingError::Discard(DiscardError::NotWhole { page_size: HUGE, .. })));
            assert_eq!(one.missing.backing().widen(0..1), 0..512);
        }
        let unfinished = one.missing.finish().unwrap_err().to_string();
        assert!(unfinished.contains("have not come from the source yet"), "{unfinished}");
        assert_eq!(one.missing.stale_count(), one.memory.unit());
        assert_eq!(one.missing.place(first, &one.content(1)).unwrap(), one.memory.unit());
        assert_eq!(one.memory.stamp(first), stamp(first, 1));
        assert_eq!(one.memory.stamp(0), stamp(0, 0));
    }
}

#[test]
fn pages_that_are_never_sent_read_as_zero_and_so_do_zero_pages() {
    for kind in Kind::ALL {
        let _watchdog = Watchdog::new("zero");
        let Some(one) = OneStale::new(kind) else { continue };
        let unit = one.memory.unit();
        // A page of the block that was never sent.
        one.missing.backing().discard(2 * unit..3 * unit).unwrap();
        let stop = Stop::new().unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (one.memory.stamp(3 * unit - 1), one.memory.stamp(2 * unit)));
            let mut answers = Vec::new();
            while !reader.is_finished() && answers.len() < unit.min(2) as usize {
                let mut buffer = FaultBuffer::new();
                let faults = one.userfault.wait_faults(&stop, &mut buffer).unwrap().unwrap();
                answers.extend(faults.iter().map(|fault| one.missing.fault(fault.address()).unwrap()));
                if answers.contains(&FaultAction::ZeroFilled) {
                    break;
                }
            }
            assert_eq!(reader.join().unwrap(), (0, 0));
            assert_eq!(answers, [FaultAction::ZeroFilled]);
            // A late reader finds the page present.
            assert_eq!(one.missing.fault(one.memory.address(2 * unit)).unwrap(), FaultAction::Present);
        });
        assert_eq!(one.missing.place_zero(one.run.clone()).unwrap(), unit);
        one.missing.finish().unwrap();
        assert_eq!((one.memory.stamp(0), one.memory.stamp(unit), one.memory.stamp(2 * unit)), (stamp(0, 0), 0, 0));
        one.memory.fill(unit, 5);
        assert_eq!(one.memory.stamp(unit), stamp(unit, 5), "a zero page can be written");
        // A fault that was received before the end and is processed after it: its thread was woken.
        one.missing.backing().discard(2 * unit..3 * unit).unwrap();
        assert_eq!(one.missing.fault(one.memory.address(2 * unit)).unwrap(), FaultAction::Present);
    }
}

#[test]
fn a_stale_page_that_becomes_present_by_itself_is_an_error_and_stays_stale() {
    let Some(one) = OneStale::new(Kind::Memfd) else { return };
    let (page, file) = (one.run.start, one.memory.file.as_ref().unwrap());
    // Another access to the same memory, like an unwatched mapping.
    std::os::unix::fs::FileExt::write_all_at(file, &[7; 8], page * PAGE_SIZE as u64).unwrap();
    for _ in 0..2 {
        let error = one.missing.place(page, &one.content(1)).unwrap_err();
        assert!(matches!(error, MissingError::NotMissing { page: named, .. } if named == page), "{error}");
        assert!(error.to_string().ends_with("The guest may have read zeros; stop it"), "{error}");
        assert_eq!((one.missing.stale_count(), one.missing.dropped()), (1, 0));
    }
    one.missing.abandon().unwrap();
}

#[test]
fn pages_placed_before_an_error_count_and_threads_that_wait_for_the_rest_request_again() {
    let _watchdog = Watchdog::new("after an error");
    let Some(one) = OneStale::new(Kind::Memfd) else { return };
    one.missing.declare_stale(10..20).unwrap();
    let file = one.memory.file.as_ref().unwrap();
    std::os::unix::fs::FileExt::write_all_at(file, &[7; 8], 15 * PAGE_SIZE as u64).unwrap();
    let stop = Stop::new().unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| one.memory.stamp(17));
        let mut buffer = FaultBuffer::new();
        let mut next_fault = || {
            let faults = one.userfault.wait_faults(&stop, &mut buffer).unwrap().unwrap();
            one.missing.fault(faults[0].address()).unwrap()
        };
        assert_eq!(next_fault(), FaultAction::Request(17..18));
        assert!(matches!(one.missing.place(0, &content(0..64, 1)), Err(MissingError::NotMissing { page: 15, .. })));
        let mut still = Vec::new();
        one.missing.for_each_stale_run(|run| still.push(run));
        assert_eq!(still, std::slice::from_ref(&(15..20)));
        assert_eq!(one.missing.stale_count(), 5);
        assert_eq!(next_fault(), FaultAction::Request(17..18));
        assert_eq!(one.missing.place(16, &content(16..20, 2)).unwrap(), 4);
        assert_eq!(reader.join().unwrap(), stamp(17, 2));
    });
    assert_eq!((one.memory.stamp(14), one.memory.stamp(16)), (stamp(14, 1), stamp(16, 2)));
    one.missing.abandon().unwrap();
}

#[test]
fn without_memory_for_a_page_the_error_reports_it_and_the_page_is_requested_again() {
    let _watchdog = Watchdog::new("no memory");
    let Some(one) = OneStale::new(Kind::HugetlbMemfd) else { return };
    let stop = Stop::new().unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| one.memory.stamp(one.run.start));
        let mut buffer = FaultBuffer::new();
        let mut next_fault = || {
            let faults = one.userfault.wait_faults(&stop, &mut buffer).unwrap().unwrap();
            one.missing.fault(faults[0].address()).unwrap()
        };
        assert_eq!(next_fault(), FaultAction::Request(one.run.clone()));
        one.memory.without_spare_huge_pages(|| {
            let error = one.missing.place(one.run.start, &one.content(1)).unwrap_err().to_string();
            assert!(error.contains("the pool is empty"), "{error}");
            assert_eq!(one.missing.stale_count(), one.memory.unit());
            assert_eq!(next_fault(), FaultAction::Request(one.run.clone()));
            // The same for a zero page.
            assert!(matches!(one.missing.place_zero(one.run.clone()), Err(MissingError::NoHugePage { .. })));
            assert_eq!(next_fault(), FaultAction::Request(one.run.clone()));
            let free = 2 * one.memory.unit();
            one.missing.backing().discard(free..free + one.memory.unit()).unwrap();
            let error = one.missing.fault(one.memory.address(free)).unwrap_err();
            assert!(matches!(error, MissingError::NoHugePage { page, .. } if page == free), "{error}");
        });
        assert_eq!(one.missing.place(one.run.start, &one.content(2)).unwrap(), one.memory.unit());
        assert_eq!(reader.join().unwrap(), stamp(one.run.start, 2));
    });
    one.missing.finish().unwrap();
}

#[test]
fn a_block_of_several_mappings_is_placed_across_their_borders() {
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::HugetlbMemfd] {
        let unit = if kind.is_hugetlb() { (HUGE / PAGE_SIZE) as u64 } else { 1 };
        let Some(memory) = Memory::new(kind, 6 * unit) else { continue };
        let Some(userfault) = open(&memory) else { return };
        memory.advise(2 * unit..3 * unit, libc::MADV_DONTFORK as u32).unwrap();
        let missing = MissingPages::new(memory.backing(), userfault).unwrap();
        missing.declare_stale(0..6 * unit).unwrap();
        assert_eq!(missing.place(0, &content(0..5 * unit, 1)).unwrap(), 5 * unit);
        assert_eq!(missing.place_zero(4 * unit..6 * unit).unwrap(), unit);
        missing.finish().unwrap();
        (0..5 * unit).for_each(|page| assert_eq!(memory.stamp(page), stamp(page, 1)));
        assert_eq!(memory.stamp(5 * unit), 0);
    }
}

#[test]
fn an_unfinished_set_that_is_dropped_never_lets_waiting_threads_read_zeros() {
    let _watchdog = Watchdog::new("dropped");
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::HugetlbMemfd] {
        let Some(OneStale { userfault, missing, run, memory }) = OneStale::new(kind) else { continue };
        let stop = Stop::new().unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| memory.stamp(run.start));
            let mut buffer = FaultBuffer::new();
            assert_eq!(userfault.wait_faults(&stop, &mut buffer).unwrap().unwrap().len(), 1);
            drop(missing);
            assert_eq!(Arc::strong_count(&userfault), 2, "kept open without an owner");
            // Still watched: the reader is woken and finds the page missing again.
            userfault.wake(memory.addresses()).unwrap();
            assert_eq!(userfault.wait_faults(&stop, &mut buffer).unwrap().unwrap().len(), 1);
            // SAFETY: of the test's memory, which atomics access only.
            let filled = unsafe { userfault.copy(memory.address(run.start), &content(run.clone(), 1)).unwrap() };
            assert_eq!(filled, Filled::Placed);
            assert_eq!(reader.join().unwrap(), stamp(run.start, 1));
        });
        userfault.unregister(memory.addresses()).unwrap();
    }
    // If it is finished or nothing is left, the last owner closes it.
    let Some(OneStale { userfault, missing, run, memory }) = OneStale::new(Kind::Anonymous) else { return };
    missing.place(run.start, &content(run.clone(), 1)).unwrap();
    missing.backing().discard(10..11).unwrap();
    drop(missing);
    assert_eq!(Arc::strong_count(&userfault), 1);
    assert_eq!((memory.stamp(10), memory.stamp(run.start)), (0, stamp(run.start, 1)));
}

#[test]
fn an_abandoned_set_releases_waiting_threads() {
    let _watchdog = Watchdog::new("abandoned");
    let Some(OneStale { userfault, missing, run, memory }) = OneStale::new(Kind::Anonymous) else { return };
    let stop = Stop::new().unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| memory.stamp(run.start));
        assert_eq!(userfault.wait_faults(&stop, &mut FaultBuffer::new()).unwrap().unwrap().len(), 1);
        missing.abandon().unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
    // It is not kept open, unlike one with a waiting guest.
    drop(missing);
    assert_eq!(Arc::strong_count(&userfault), 1);
}

#[test]
fn stop_ends_waiting_and_later_readers_also_when_there_are_faults() {
    let _watchdog = Watchdog::new("stop");
    let Some(one) = OneStale::new(Kind::Anonymous) else { return };
    let stop = Stop::new().unwrap();
    std::thread::scope(|scope| {
        let (tell, ids) = channel();
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let (tell, stop, userfault) = (tell.clone(), stop.clone(), &one.userfault);
                scope.spawn(move || {
                    tell.send(rustix::thread::gettid()).unwrap();
                    userfault.wait_faults(&stop, &mut FaultBuffer::new()).unwrap().map(<[_]>::len)
                })
            })
            .collect();
        // Waits until both sleep in the kernel.
        for id in ids.iter().take(2) {
            let state = format!("/proc/self/task/{}/stat", id.as_raw_nonzero());
            while !std::fs::read_to_string(&state).unwrap().contains(") S ") {
                std::thread::yield_now();
            }
        }
        stop.stop();
        stop.stop();
        readers.into_iter().for_each(|reader| assert_eq!(reader.join().unwrap(), None));

        let toucher = scope.spawn(|| one.memory.stamp(one.run.start));
        let other = Stop::new().unwrap();
        let mut buffer = FaultBuffer::new();
        let faults = one.userfault.wait_faults(&other, &mut buffer).unwrap().unwrap();
        assert_eq!(faults[0].address(), one.memory.address(one.run.start));
        // The fault occurs again, but the stop is handled first.
        one.userfault.wake(one.memory.addresses()).unwrap();
        assert!(one.userfault.wait_faults(&stop, &mut buffer).unwrap().is_none());
        assert_eq!(one.userfault.wait_faults(&other, &mut buffer).unwrap().unwrap().len(), 1);
        one.missing.place(one.run.start, &one.content(1)).unwrap();
        assert_eq!(toucher.join().unwrap(), stamp(one.run.start, 1));
    });
}

#[test]
fn a_copy_stops_at_a_present_page_and_reports_its_progress() {
    let Some(memory) = Memory::new(Kind::Memfd, 8) else { return };
    memory.fill(3, 0);
    let Some(userfault) = open(&memory) else { return };
    assert!(userfault.register_missing(memory.addresses()).unwrap().zero_page);
    let (start, bytes) = (memory.address(0), content(0..8, 1));
    // SAFETY: of the test's memory, which atomics access only.
    let (copied, again, zeroed, outside) = unsafe {
        let copied = userfault.copy(start, &bytes).unwrap();
        let again = userfault.copy(start, &bytes).unwrap();
        let zeroed = userfault.zero(memory.address(2)..memory.address(6)).unwrap();
        userfault.unregister(memory.addresses()).unwrap();
        (copied, again, zeroed, userfault.copy(memory.address(4), &bytes[..PAGE_SIZE]))
    };
    assert_eq!(copied, Filled::AlreadyThere { placed: 3 * PAGE_SIZE });
    assert_eq!((again, zeroed), (Filled::AlreadyThere { placed: 0 }, Filled::AlreadyThere { placed: 0 }));
    let outside = outside.unwrap_err().to_string();
    assert!(outside.starts_with("cannot place pages at addresses 0x"), "{outside}");
    assert!(outside.contains("not watched by this userfaultfd"), "{outside}");
    assert_eq!((memory.stamp(2), memory.stamp(3), memory.stamp(4)), (stamp(2, 1), stamp(3, 0), 0));
}

#[test]
fn a_thread_that_waits_for_a_page_that_appears_otherwise_is_woken_by_the_copy() {
    let _watchdog = Watchdog::new("appears");
    let Some(memory) = Memory::new(Kind::Memfd, 8) else { return };
    let Some(userfault) = open(&memory) else { return };
    userfault.register_missing(memory.addresses()).unwrap();
    let (stop, bytes) = (Stop::new().unwrap(), content(3..4, 1));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| memory.stamp(3));
        assert_eq!(userfault.wait_faults(&stop, &mut FaultBuffer::new()).unwrap().unwrap().len(), 1);
        let other = content(3..4, 2);
        std::os::unix::fs::FileExt::write_all_at(memory.file.as_ref().unwrap(), &other, 3 * PAGE_SIZE as u64).unwrap();
        // SAFETY: of the test's memory, which atomics access only.
        let filled = unsafe { userfault.copy(memory.address(3), &bytes).unwrap() };
        assert_eq!(filled, Filled::AlreadyThere { placed: 0 });
        assert_eq!(reader.join().unwrap(), stamp(3, 2));
    });
}

#[test]
fn without_privileges_the_error_says_what_to_set_and_old_kernels_are_named() {
    let denied = || std::io::Error::from_raw_os_error(libc::EPERM);
    let words = UserfaultError::NotAllowed { device: denied(), call: denied() }.to_string();
    for part in ["/dev/userfaultfd", "CAP_SYS_PTRACE", "vm.unprivileged_userfaultfd=1", "seccomp"] {
        assert!(words.contains(part), "{words}");
    }
    let missing = "MISSING_SHMEM".to_owned();
    let words = UserfaultError::Features { missing, since: "4.11" }.to_string();
    assert_eq!(words, "this kernel's userfaultfd lacks MISSING_SHMEM; it needs Linux 4.11 or newer");
    assert_eq!(
        MissingError::from(UserfaultError::Features { missing: "X".into(), since: "1" }).to_string(),
        "this kernel's userfaultfd lacks X; it needs Linux 1 or newer"
    );
    if let Ok(userfault) = Userfault::open(Faults::OfUserSpace, MISSING_SHMEM) {
        let error = userfault.register_missing(0x1000..0x2000).unwrap_err().to_string();
        assert!(error.starts_with("cannot watch addresses 0x1000..0x2000"), "{error}");
    }
}

#[test]
fn a_vcpu_waits_for_a_stale_page_and_continues_with_its_content() {
    let _watchdog = Watchdog::new("vCPU");
    let memories = guest::BLOCKS.map(|pages| dirty_support::Memory::small(pages as usize));
    let Some(mut guest) = Guest::new(memories, 1, |_| true) else { return };
    let (first, pages) = (guest.memories[0].addresses(), guest.memories[0].pages());
    let userfault = match Userfault::open(Faults::All, 0) {
        Ok(userfault) => Arc::new(userfault),
        Err(error) => return println!("skipped: {error}"),
    };
    // SAFETY: mapped as long as the guest lives; the guest and atomics access it.
    let backing = unsafe { Discardable::anonymous(first.clone(), PAGE_SIZE) }.unwrap();
    let missing = MissingPages::new(backing, Arc::clone(&userfault)).unwrap();
    let stale = [600, 601, 700, 4000];
    stale.iter().for_each(|page| missing.declare_stale(*page..page + 1).unwrap());
    assert!(stale.iter().all(|page| *page < pages));
    let (stop, asks) = (Stop::new().unwrap(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let faults = scope.spawn(|| {
            answer_faults(&userfault, &missing, &stop, |answer| {
                if let FaultAction::Request(run) = answer {
                    asks.fetch_add(1, Ordering::Relaxed);
                    missing.place(run.start, &content(run.clone(), 1)).unwrap();
                }
            });
        });
        guest.write_pages(stale.into_iter().chain([800]), None);
        missing.finish().unwrap();
        stop.stop();
        faults.join().unwrap();
    });
    assert_eq!(asks.into_inner(), 4);
    for page in stale {
        // The guest wrote four bytes; the rest is the source's.
        assert_ne!(guest.memories[0].word(page, 0).load(Ordering::Relaxed), stamp(page, 1));
        let rest = (1..WORDS).all(|word| guest.memories[0].word(page, word).load(Ordering::Relaxed) == stamp(page, 1));
        assert!(rest, "page {page}");
    }
}

/// An event of a block during post-copy.
#[derive(Clone, Debug)]
enum Step {
    Place(Range<u64>, u64),
    Zero(Range<u64>),
    Fault(u64),
    Write(u64),
    Forget,
}

const PAGES: u64 = 40;

fn run() -> impl Strategy<Value = Range<u64>> {
    (0..=PAGES, 0..=PAGES).prop_map(|(a, b)| a.min(b)..a.max(b))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (run(), 1u64..90).prop_map(|(run, version)| Step::Place(run, version)),
        run().prop_map(Step::Zero),
        (0..PAGES).prop_map(Step::Fault),
        (0..PAGES).prop_map(Step::Write),
        Just(Step::Forget),
    ]
}

proptest! {
    #![proptest_config(contextualize_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(120) }))]

    #[test]
    fn any_order_of_arrivals_zeros_and_faults_ends_with_the_right_memory(
        kind in proptest::sample::select(vec![Kind::Anonymous, Kind::Memfd, Kind::PrivateMemfd]),
        sent in proptest::collection::vec(run(), 0..4),
        stale in proptest::collection::vec(run(), 0..4),
        steps in proptest::collection::vec(step(), 0..30),
    ) {
        let _watchdog = Watchdog::new("any order");
        let Some(memory) = Memory::new(kind, PAGES) else { return Ok(()) };
        let Some(userfault) = open(&memory) else { return Ok(()) };
        // The content of each page, `None` while it is still at the source; and whether a request for it was returned.
        let mut model: Vec<Option<u64>> = vec![Some(0); PAGES as usize];
        let mut asked = vec![false; PAGES as usize];
        for page in sent.into_iter().flatten() {
            memory.fill(page, 0);
            model[page as usize] = Some(stamp(page, 0));
        }
        let missing = MissingPages::new(memory.backing(), userfault).unwrap();
        for run in stale {
            missing.declare_stale(run.clone()).unwrap();
            model[run.start as usize..run.end as usize].fill(None);
        }
        let arrives = |model: &mut Vec<Option<u64>>, run: Range<u64>, value: &dyn Fn(u64) -> u64| {
            let mut new = 0;
            for page in run {
                new += u64::from(model[page as usize].is_none());
                model[page as usize].get_or_insert_with(|| value(page));
            }
            new
        };
        for step in steps {
            match step {
                Step::Place(run, version) => {
                    let placed = missing.place(run.start, &content(run.clone(), version)).unwrap();
                    prop_assert_eq!(placed, arrives(&mut model, run, &|page| stamp(page, version)));
                }
                Step::Zero(run) => {
                    let placed = missing.place_zero(run.clone()).unwrap();
                    prop_assert_eq!(placed, arrives(&mut model, run, &|_| 0));
                }
                Step::Fault(page) => {
                    let answer = missing.fault(memory.address(page) + 100).unwrap();
                    let was_asked = &mut asked[page as usize];
                    match model[page as usize] {
                        None if *was_asked => prop_assert_eq!(answer, FaultAction::Waiting),
                        None => prop_assert_eq!(answer, FaultAction::Request(page..page + 1)),
                        Some(0) => prop_assert!(matches!(answer, FaultAction::ZeroFilled | FaultAction::Present)),
                        Some(_) => prop_assert_eq!(answer, FaultAction::Present),
                    }
                    *was_asked |= model[page as usize].is_none();
                }
                Step::Write(page) => {
                    // A guest that writes a page that is not at the source; its fault is answered first.
                    if model[page as usize].is_some() {
                        missing.fault(memory.address(page)).unwrap();
                        memory.fill(page, 95);
                        model[page as usize] = Some(stamp(page, 95));
                    }
                }
                Step::Forget => {
                    missing.forget_requests().unwrap();
                    asked.fill(false);
                }
            }
            prop_assert_eq!(missing.stale_count(), model.iter().filter(|page| page.is_none()).count() as u64);
        }
        let mut left = Vec::new();
        missing.for_each_stale_run(|run| left.extend(run));
        prop_assert_eq!(&left, &(0..PAGES).filter(|page| model[*page as usize].is_none()).collect::<Vec<_>>());
        prop_assert_eq!(missing.finish().is_ok(), left.is_empty());
        let placed = missing.place(0, &content(0..PAGES, 96)).unwrap();
        prop_assert_eq!(placed, left.len() as u64);
        missing.finish().unwrap();
        for page in 0..PAGES {
            prop_assert_eq!(memory.stamp(page), model[page as usize].unwrap_or(stamp(page, 96)), "page {}", page);
        }
    }
}
