//! What both sides report while a migration is under way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::report::{Observer, Progress, ReceiveProgress};
use sterna_engine::source::{NotConverging, Source};
use sterna_engine::transport::Security;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

/// More than the queues take, so that the first round lasts.
const PAGES: (usize, usize) = (10_000, 6_000);
const ALL: u64 = (PAGES.0 + PAGES.1) as u64 * 4096;
/// A guest that writes a few pages of each block all the time.
const BUSY: Workload = Workload { writers: 1, span: 64, seed: 7, burst: 0 };

/// Memory of which every page has content.
fn filled() -> Arc<Memory> {
    let memory = Memory::new(PAGES.0, PAGES.1);
    for block in 0..2 {
        for (number, word) in memory.words(block).iter().enumerate() {
            word.store(number as u64 | 1, Ordering::Relaxed);
        }
    }
    memory
}

/// Keeps what it hears, and cancels as soon as it has heard enough.
struct Hears {
    progress: Mutex<Vec<Progress>>,
    received: Mutex<Vec<ReceiveProgress>>,
    notes: Mutex<Vec<String>>,
    enough: fn(&Hears) -> bool,
    cancel: Cancel,
}

impl Hears {
    fn until(enough: fn(&Hears) -> bool) -> Self {
        let (progress, received, notes) = Default::default();
        Self { progress, received, notes, enough, cancel: Cancel::new() }
    }

    fn heard(&self) {
        if (self.enough)(self) {
            self.cancel.cancel();
        }
    }
}

impl Observer for Hears {
    fn progress(&self, progress: &Progress) {
        self.progress.lock().unwrap().push(progress.clone());
        self.heard();
    }

    fn received(&self, progress: &ReceiveProgress) {
        self.received.lock().unwrap().push(progress.clone());
        self.heard();
    }

    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
        self.heard();
    }
}

/// Moves a guest until one of the observers has heard enough.
fn migrate(
    bandwidth: u64,
    workload: Workload,
    at_source: &Hears,
    at_destination: &Hears,
    settings: fn(Source) -> Source,
) {
    let (memory, there, running) = (filled(), Memory::new(PAGES.0, PAGES.1), Running::default());
    let (mut from, log) = Monitor::new(&memory, &running, workload);
    let (mut to, _) = Monitor::new(&there, &running, workload);
    from.start();
    let listening = Destination::new(there.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let source = Source::new(memory.ram(), Box::new(log)).method(MethodChoice::default()).bandwidth(Some(bandwidth));
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
        let at_source = Hears::until(|heard| {
            let all = heard.progress.lock().unwrap();
            let first: Vec<_> =
                all.iter().filter(|progress| progress.round == 1 && progress.dirty_rate > 0.0).collect();
            let moved = |figure: fn(&Progress) -> f64| {
                let figures: Vec<f64> = first.iter().map(|progress| figure(progress)).collect();
                figures.windows(2).filter(|pair| pair[0] != pair[1]).count() >= 2
            };
            moved(|progress| progress.remaining_bytes as f64) && moved(|progress| progress.predicted_downtime_ms)
        });
        let at_destination = Hears::until(|_| false);
        migrate(8 << 20, BUSY, &at_source, &at_destination, |source| source);

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
fn a_destination_reports_what_it_has_placed_of_what_was_announced() {
    within_a_minute(|| {
        let at_source = Hears::until(|_| false);
        let at_destination = Hears::until(|heard| {
            let all = heard.received.lock().unwrap();
            all.windows(2).filter(|pair| pair[0].placed_bytes < pair[1].placed_bytes).count() >= 3
        });
        // Uncompressed, its first round takes 16 s, and the fourth report comes within the first few.
        migrate(4 << 20, BUSY, &at_source, &at_destination, |source| source.method("none".parse().unwrap()));

        let all = at_destination.received.lock().unwrap();
        for progress in all.iter().filter(|progress| progress.placed_bytes > 0) {
            assert_eq!((progress.total_bytes, progress.missing_bytes), (ALL, 0), "{progress:?}");
            assert_eq!(progress.placed_bytes, (progress.normal_pages + progress.zero_pages) * 4096);
            assert_eq!(progress.phase, "receiving memory");
        }
        assert!(all.iter().any(|progress| progress.placed_rate > 0.0));
    });
}

/// So much is written that no round fits.
const TOO_BUSY: Workload = Workload { writers: 2, span: 6_000, seed: 11, burst: 0 };

#[test]
fn rounds_that_never_fit_are_noted_once_with_what_would_end_them() {
    within_a_minute(|| {
        let at_source = Hears::until(|heard| {
            heard.notes.lock().unwrap().iter().any(|note| note.contains("does not converge"))
                && heard.progress.lock().unwrap().last().is_some_and(|progress| progress.round >= 6)
        });
        let at_destination = Hears::until(|_| false);
        migrate(64 << 20, TOO_BUSY, &at_source, &at_destination, |source| {
            source.downtime(Duration::from_millis(20)).when_not_converging(NotConverging::GoOn)
        });

        let notes = at_source.notes.lock().unwrap();
        let told: Vec<_> = notes.iter().filter(|note| note.contains("does not converge")).collect();
        let [note] = &told[..] else { panic!("{told:?}") };
        assert!(note.contains("where 20 ms are wanted; a target downtime of "), "{note}");
        assert!(note.ends_with("the rounds go on until that changes or the migration is cancelled"), "{note}");
    });
}

/// Counts how often it is collected.
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

/// Pages before and behind those whose turn it is: the destination's monitor compares all of memory.
#[test]
fn what_is_written_while_a_long_round_is_under_way_arrives() {
    within_a_minute(|| {
        let all = Workload { writers: 2, span: u64::MAX, seed: 3, burst: 64 };
        let (memory, there, running) = (filled(), Memory::new(PAGES.0, PAGES.1), Running::default());
        let (mut from, log) = Monitor::new(&memory, &running, all);
        let (mut to, _) = Monitor::new(&there, &running, all);
        from.start();
        let listening = Destination::new(there.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();
        let collected = Arc::new(AtomicU64::new(0));
        // Whatever is left after the first round fits.
        let source = Source::new(memory.ram(), Box::new(Counting(log, Arc::clone(&collected))))
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
        // After the round and after the stop alone it would be twice.
        let collected = collected.load(Ordering::Relaxed);
        assert!(sent.rounds == 1 && collected >= 4, "{} rounds, collected {collected} times", sent.rounds);
    });
}
