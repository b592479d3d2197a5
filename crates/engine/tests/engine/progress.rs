//! The progress that both sides report during a migration.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Restless, Running, Workload, log_of};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::Phase;
use sterna_engine::report::{Observer, Progress, ReceiveProgress};
use sterna_engine::source::{NotConverging, Source};
use sterna_engine::transport::Security;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

/// More pages than fit the queues, so that the first round takes a while.
const PAGES: (usize, usize) = (10_000, 6_000);
const ALL: u64 = (PAGES.0 + PAGES.1) as u64 * 4096;
/// A guest that writes a few pages of each block all the time.
const BUSY: Workload = Workload { writers: 1, span: 64, seed: 7, burst: 0 };

/// Returns memory of which every page has content.
fn filled() -> Arc<Memory> {
    let memory = Memory::new(PAGES.0, PAGES.1);
    for block in 0..2 {
        for (number, word) in memory.words(block).iter().enumerate() {
            word.store(number as u64 | 1, Ordering::Relaxed);
        }
    }
    memory
}

/// Records all reports, and cancels as soon as `enough` returns true.
struct RecordingObserver {
    progress: Mutex<Vec<Progress>>,
    received: Mutex<Vec<ReceiveProgress>>,
    notes: Mutex<Vec<String>>,
    enough: fn(&RecordingObserver) -> bool,
    cancel: Cancel,
}

impl RecordingObserver {
    fn until(enough: fn(&RecordingObserver) -> bool) -> Self {
        let (progress, received, notes) = Default::default();
        Self { progress, received, notes, enough, cancel: Cancel::new() }
    }

    fn cancel_if_enough(&self) {
        if (self.enough)(self) {
            self.cancel.cancel();
        }
    }
}

impl Observer for RecordingObserver {
    fn progress(&self, progress: &Progress) {
        self.progress.lock().unwrap().push(progress.clone());
        self.cancel_if_enough();
    }

    fn received(&self, progress: &ReceiveProgress) {
        self.received.lock().unwrap().push(progress.clone());
        self.cancel_if_enough();
    }

    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
        self.cancel_if_enough();
    }
}

/// Moves a guest until one of the observers has enough reports.
fn migrate(
    bandwidth: u64,
    workload: Workload,
    at_source: &RecordingObserver,
    at_destination: &RecordingObserver,
    settings: fn(Source) -> Source,
) {
    let (memory, there, running) = (filled(), Memory::new(PAGES.0, PAGES.1), Running::default());
    let (mut from, log) = Monitor::new(&memory, &running, workload);
    let (mut to, _) = Monitor::new(&there, &running, workload);
    from.start();
    let listening = Destination::new(there.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let log = log_of(&from, log);
    let source = Source::new(memory.ram(), log).method(MethodChoice::default()).bandwidth(Some(bandwidth));
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| listening.run(&mut to, &at_destination.cancel, at_destination));
        let sent = settings(source).run(address, &Security::Insecure, &mut from, &at_source.cancel, at_source);
        assert!(sent.is_err() && receiving.join().unwrap().is_err(), "an observer ends it");
    });
    assert!(!running.ever_twice() && from.runs() && !to.runs());
}

#[test]
fn all_figures_of_the_source_move_within_the_first_round() {
    within_a_minute(|| {
        let at_source = RecordingObserver::until(|observed| {
            let all = observed.progress.lock().unwrap();
            let first: Vec<_> =
                all.iter().filter(|progress| progress.round == 1 && progress.dirty_rate > 0.0).collect();
            let moved = |figure: fn(&Progress) -> f64| {
                let figures: Vec<f64> = first.iter().map(|progress| figure(progress)).collect();
                figures.windows(2).filter(|pair| pair[0] != pair[1]).count() >= 2
            };
            moved(|progress| progress.remaining_bytes as f64) && moved(|progress| progress.predicted_downtime_ms)
        });
        let at_destination = RecordingObserver::until(|_| false);
        migrate(4 << 20, BUSY, &at_source, &at_destination, |source| source);

        let all = at_source.progress.lock().unwrap();
        let first: Vec<_> = all.iter().filter(|progress| progress.round == 1).collect();
        for progress in &first {
            assert!(progress.total_bytes == ALL && progress.remaining_bytes > 0, "{progress:?}");
        }
        let [before, after] = [first[0], first[first.len() - 1]];
        assert!(after.remaining_bytes < before.remaining_bytes, "{before:?}, {after:?}");
    });
}

#[test]
fn a_destination_reports_how_much_of_the_announced_memory_it_has_placed() {
    within_a_minute(|| {
        let at_source = RecordingObserver::until(|_| false);
        let at_destination = RecordingObserver::until(|observed| {
            let all = observed.received.lock().unwrap();
            all.windows(2).filter(|pair| pair[0].placed_bytes < pair[1].placed_bytes).count() >= 3
        });
        // Uncompressed, its first round takes 16 s, and the fourth report comes within the first few.
        migrate(4 << 20, BUSY, &at_source, &at_destination, |source| source.method("none".parse().unwrap()));

        let all = at_destination.received.lock().unwrap();
        for progress in all.iter().filter(|progress| progress.placed_bytes > 0) {
            assert_eq!((progress.total_bytes, progress.missing_bytes), (ALL, 0), "{progress:?}");
            assert_eq!(progress.placed_bytes, (progress.normal_pages + progress.zero_pages) * 4096);
            assert_eq!(progress.phase, Phase::Rounds);
        }
        assert!(all.iter().any(|progress| progress.placed_rate > 0.0));
    });
}

#[test]
fn both_sides_estimate_the_time_left_within_the_first_round() {
    estimate_in_the_first_round(|_| true);
}

/// Has both sides estimate the time left, at the source so that all estimates are `sensible`.
fn estimate_in_the_first_round(sensible: fn(u64) -> bool) {
    within_a_minute(move || {
        let at_source = RecordingObserver::until(|_| false);
        let at_destination = RecordingObserver::until(|observed| {
            let all = observed.received.lock().unwrap();
            let estimated = all.iter().filter(|progress| progress.time_left_ms.is_some()).count();
            let shrinks = |pair: &[ReceiveProgress]| pair[0].remaining_bytes > pair[1].remaining_bytes;
            estimated >= 3 && all.windows(2).filter(|pair| shrinks(pair)).count() >= 3
        });
        migrate(4 << 20, BUSY, &at_source, &at_destination, |source| source.method("none".parse().unwrap()));

        let (sent, received) = (at_source.progress.lock().unwrap(), at_destination.received.lock().unwrap());
        let reported = |remaining: u64| sent.iter().any(|progress| progress.remaining_bytes == remaining);
        for remaining in received.iter().filter_map(|progress| progress.remaining_bytes) {
            assert!(reported(remaining), "{remaining} bytes are none of the source's figures");
        }
        let left = sent.iter().filter(|progress| progress.round == 1).filter_map(|progress| progress.time_left_ms);
        assert!(left.clone().count() >= 3 && left.clone().all(sensible), "{:?}", left.collect::<Vec<_>>());
    });
}

/// Writes so much that no round fits, however slow the machine is.
const TOO_BUSY: Workload = Workload { writers: 2, span: 6_000, seed: 11, burst: 0 };

#[test]
fn rounds_that_never_converge_are_noted_once_with_a_remedy() {
    within_a_minute(|| {
        let at_source = RecordingObserver::until(|observed| {
            observed.notes.lock().unwrap().iter().any(|note| note.contains("does not converge"))
                && observed.progress.lock().unwrap().last().is_some_and(|progress| progress.round >= 6)
        });
        let at_destination = RecordingObserver::until(|_| false);
        migrate(64 << 20, TOO_BUSY, &at_source, &at_destination, |source| {
            source.downtime(Duration::from_millis(20)).when_not_converging(NotConverging::GoOn)
        });

        let notes = at_source.notes.lock().unwrap();
        let noted: Vec<_> = notes.iter().filter(|note| note.contains("does not converge")).collect();
        let [note] = &noted[..] else { panic!("{noted:?}") };
        assert!(note.contains("where 20 ms are wanted; a target downtime of "), "{note}");
        assert!(note.ends_with("the rounds go on until that changes or the migration is cancelled"), "{note}");
    });
}

/// A dirty log that counts its collections.
struct Counting(ReportedLog, Arc<AtomicU64>);

impl DirtyLog for Counting {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.0.start()
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        self.1.fetch_add(u64::from(block == 0), Ordering::Relaxed);
        self.0.collect(block, dirty)
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.0.stop()
    }
}

/// Writes pages before and behind those being sent: the destination's monitor compares all of the memory.
#[test]
fn pages_written_during_a_long_round_arrive() {
    within_a_minute(|| {
        let all = Workload { writers: 2, span: u64::MAX, seed: 3, burst: 64 };
        let (memory, there, running) = (filled(), Memory::new(PAGES.0, PAGES.1), Running::default());
        let (mut from, log) = Monitor::new(&memory, &running, all);
        let (mut to, _) = Monitor::new(&there, &running, all);
        from.start();
        let listening = Destination::new(there.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();
        let collected = Arc::new(AtomicU64::new(0));
        let log = Restless::new(Box::new(Counting(log, Arc::clone(&collected))), &from);
        // All pages that are left after the first round fit, and another round would not shrink them.
        let mut source = Source::new(memory.ram(), Box::new(log))
            .method(MethodChoice::default())
            .bandwidth(Some(24 << 20))
            .downtime(Duration::from_secs(30));
        let sent = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| listening.run(&mut to, &Cancel::new(), &()));
            let sent = source.run(address, &Security::Insecure, &mut from, &Cancel::new(), &());
            receiving.join().unwrap().unwrap();
            sent.unwrap()
        });
        assert!(!running.ever_twice() && !from.runs() && to.runs());
        // Only after the round and after the pause, it would be twice.
        let collected = collected.load(Ordering::Relaxed);
        assert!(sent.rounds == 1 && collected >= 4, "{} rounds, collected {collected} times", sent.rounds);
    });
}

mod soak {
    /// 64 MB at 4 MiB/s are 15 s: an estimate that is wrong by orders of magnitude would be of no use. Where the machine pauses for a second,
    /// one is.
    #[test]
    fn the_source_estimates_about_the_time_that_the_first_round_takes() {
        super::estimate_in_the_first_round(|ms| (1_000..100_000).contains(&ms));
    }
}
