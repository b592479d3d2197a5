//! Complete migrations of the embedded library, over loopback: both sides in this process, a guest that writes all the
//! time.

use crate::guest;

use std::error::Error;
use std::io::{Read, Seek, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload, log_of};
use sterna_codec::{Method, MethodChoice};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::{Before, Destination};
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase, Side};
use sterna_engine::process;
use sterna_engine::report::{Observer, Outcome, Progress, ReceiveReport, Report};
use sterna_engine::source::{NotConverging, Source, Throttle, TimeLimits};
use sterna_engine::transport::Security;
use sterna_engine::vmm::ResumeReason;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

const CALM: Workload = Workload { writers: 2, span: 600, seed: 1, burst: 8 };

/// Both sides of one migration.
struct Pair {
    source: Arc<Memory>,
    destination: Arc<Memory>,
    running: Running,
    from: Monitor,
    log: Option<Box<dyn DirtyLog>>,
    to: Monitor,
    cancel: (Cancel, Cancel),
}

type Ends = (Result<Report, MigrationError>, Result<ReceiveReport, MigrationError>);

impl Pair {
    fn new(workload: Workload) -> Self {
        Self::with(workload, Memory::new(3000, 1000), Memory::new(3000, 1000))
    }

    fn with(workload: Workload, source: Arc<Memory>, destination: Arc<Memory>) -> Self {
        let running = Running::default();
        let (mut from, log) = Monitor::new(&source, &running, workload);
        let (to, _) = Monitor::new(&destination, &running, workload);
        let log = log_of(&from, log);
        from.start();
        let cancel = (Cancel::new(), Cancel::new());
        Self { source, destination, running, from, log: Some(log), to, cancel }
    }

    /// A guest that never converges, every page of which has content.
    fn restless() -> Self {
        let source = Memory::new(3000, 1000);
        source.fill();
        Self::with(Workload { burst: 0, span: 3000, ..CALM }, source, Memory::new(3000, 1000))
    }

    fn source(&mut self) -> Source {
        let source = Source::new(self.source.ram(), self.log.take().unwrap()).method(MethodChoice::default());
        // So long that the guest is paused also on a busy machine.
        source.downtime(Duration::from_secs(20))
    }

    /// Migrates with these settings.
    fn run(&mut self, source: Source, destination: Destination) -> Ends {
        self.run_observed(source, destination, &())
    }

    /// As [`Pair::run`], where the source has an observer.
    fn run_observed(&mut self, mut source: Source, destination: Destination, observer: &dyn Observer) -> Ends {
        let listening = destination.listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();
        std::thread::scope(|scope| {
            let (to, cancel) = (&mut self.to, &self.cancel.1);
            let receiving = scope.spawn(move || listening.run(to, cancel, &()));
            let sent = source.run(address, &Security::Insecure, &mut self.from, &self.cancel.0, observer);
            if sent.as_ref().is_err_and(|error| error.phase == Phase::SettingUp) {
                // The destination waits for another source.
                self.cancel.1.cancel();
            }
            (sent, receiving.join().unwrap())
        })
    }

    fn migrate(&mut self) -> Ends {
        let (source, destination) = (self.source(), Destination::new(self.destination.ram()));
        self.run(source, destination)
    }

    fn stays_at_source(&self) {
        assert!(self.from.runs() && !self.to.runs());
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
    }

    fn has_moved(&self) {
        assert!(!self.from.runs() && self.to.runs());
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
    }
}

#[test]
fn a_running_guest_moves_and_continues() {
    within_a_minute(|| {
        let every = Method::all().map(|method| (method.name(), true));
        for (method, checksums) in every.chain([("none", false), ("zstd", false)]) {
            let mut pair = Pair::new(CALM);
            let choice = method.parse().unwrap();
            let source = pair.source().method(choice).channels(3).checksums(checksums);
            let destination = Destination::new(pair.destination.ram());
            let (sent, received) = pair.run(source, destination);
            let (sent, received) = (sent.unwrap(), received.unwrap());
            pair.has_moved();
            assert_eq!((sent.outcome, received.outcome), (Outcome::Completed, Outcome::Completed));
            let parts = sent.downtime;
            let sum =
                parts.stop_ms + parts.last_round_ms + parts.state_ms + parts.load_ms + parts.commit_ms + parts.start_ms;
            assert!((sum - sent.downtime_ms).abs() < 0.1, "{sum} of {}", sent.downtime_ms);
            assert_eq!(pair.from.called, ["save_ahead", "pause", "save"]);
            assert_eq!(pair.to.called, ["load", "start"]);
        }
    });
}

#[test]
fn memory_that_was_never_touched_is_neither_sent_nor_touched() {
    within_a_minute(|| {
        let mut pair = Pair::new(Workload { span: 50, ..CALM });
        let (sent, _) = pair.migrate();
        let sent = sent.unwrap();
        pair.has_moved();
        assert!(sent.zero_pages < sent.rounds * 100, "{sent:?}");
        let mut map = sterna_memory::holes::PageMap::own().unwrap();
        let mut touched = 0;
        let ram = pair.destination.ram();
        ram.blocks()[0].populated(&mut map, |run| touched += run.end - run.start).unwrap();
        // Its own writers read and write the same 50 pages only; comparing the digest has read the rest, which maps the
        // zero page.
        assert!(touched <= 50, "{touched}");
    });
}

#[test]
fn a_destination_with_old_content_is_cleared_first() {
    within_a_minute(|| {
        for prefault in [false, true] {
            let mut pair = Pair::new(Workload { span: 50, ..CALM });
            for block in 0..2 {
                pair.destination.words(block).iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
            }
            let destination =
                Destination::new(pair.destination.ram()).memory_before(Before::Anything).prefault(prefault);
            let source = pair.source();
            let (sent, received) = pair.run(source, destination);
            sent.unwrap();
            received.unwrap();
            pair.has_moved();
        }
    });
}

#[test]
fn state_sent_ahead_is_loaded_before_the_guest_is_paused() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        pair.from.ahead = true;
        pair.from.state_bytes = 3 << 20;
        let (sent, _) = pair.migrate();
        sent.unwrap();
        pair.has_moved();
        assert_eq!(pair.to.called, ["load_ahead", "load", "start"]);
    });
}

#[test]
fn each_failing_callback_is_reported_on_both_sides_and_the_guest_continues() {
    within_a_minute(|| {
        let moments = ["state_size", "save_ahead", "pause", "paused", "save"];
        // A method without an error can only panic.
        let each = moments.into_iter().flat_map(|moment| [(moment, true), (moment, false)]);
        for (at_source, panics) in each.filter(|(moment, panics)| *panics || *moment != "state_size") {
            let mut pair = Pair::new(CALM);
            (pair.from.fails, pair.from.panics) = (Some(at_source), panics);
            let (sent, received) = pair.migrate();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            pair.stays_at_source();
            assert!(sent.reason.contains("was made to fail"), "{at_source}: {sent}");
            assert!(received.reason.contains("was made to fail"), "{at_source}: {received}");
            assert_eq!((sent.side, sent.guest), (Side::Source, GuestState::RunsAtSource));
            assert_eq!((sent.kind, received.kind), (ErrorKind::Monitor, ErrorKind::OtherSide), "{sent}; {received}");
            assert!(sent.source().unwrap().to_string().contains("was made to fail") && received.source().is_none());
            assert_eq!((received.side, received.guest), (Side::Destination, GuestState::NotHere));
        }
        for (at_destination, panics) in [("load_ahead", false), ("load", false), ("load_ahead", true), ("load", true)] {
            let mut pair = Pair::new(CALM);
            pair.from.ahead = true;
            (pair.to.fails, pair.to.panics) = (Some(at_destination), panics);
            let (sent, received) = pair.migrate();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            pair.stays_at_source();
            assert!(sent.reason.contains("was made to fail"), "{at_destination}: {sent}");
            assert!(received.reason.contains("was made to fail"), "{at_destination}: {received}");
            assert_eq!((sent.kind, received.kind), (ErrorKind::OtherSide, ErrorKind::Monitor), "{sent}; {received}");
            assert!(received.source().unwrap().to_string().contains("was made to fail") && sent.source().is_none());
            assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere));
        }
    });
}

#[test]
fn a_monitor_that_panics_before_anything_is_begun_leaves_its_guest_untouched() {
    within_a_minute(|| {
        for (method, at_source) in
            [("name", true), ("post_copy_refusal", true), ("name", false), ("post_copy_refusal", false)]
        {
            let mut pair = Pair::new(CALM);
            let monitor = if at_source { &mut pair.from } else { &mut pair.to };
            (monitor.fails, monitor.panics) = (Some(method), true);
            let source = pair.source().when_not_converging(NotConverging::PostCopy);
            let destination = Destination::new(pair.destination.ram());
            let (sent, received) = pair.run(source, destination);
            let error = if at_source { sent.unwrap_err() } else { received.unwrap_err() };
            pair.stays_at_source();
            assert_eq!((error.guest, error.phase), (GuestState::Untouched, Phase::SettingUp), "{error}");
            assert!(error.reason.contains(&format!("panicked in {method}: ")), "{error}");
        }
    });
}

#[test]
fn a_destination_whose_monitor_panicked_at_any_time_does_not_listen_any_more() {
    within_a_minute(|| {
        for method in ["name", "load", "start"] {
            let mut pair = Pair::new(CALM);
            (pair.to.fails, pair.to.panics) = (Some(method), true);
            let listening = Destination::new(pair.destination.ram()).linger(Duration::ZERO);
            let listening = listening.listen("127.0.0.1:0", &Security::Insecure).unwrap();
            let address = listening.address().clone();
            // The connection is in its handshake.
            let mut silent = TcpStream::connect(address.to_string()).unwrap();
            std::thread::scope(|scope| {
                let (to, cancel) = (&mut pair.to, &pair.cancel.1);
                let receiving = scope.spawn(move || listening.run(to, cancel, &()));
                let mut source = Source::new(pair.source.ram(), pair.log.take().unwrap());
                source.run(address.clone(), &Security::Insecure, &mut pair.from, &pair.cancel.0, &()).unwrap_err();
                let error = receiving.join().unwrap().unwrap_err();
                assert!(error.reason.contains("panicked"), "{method}: {error}");
            });
            let mut rest = Vec::new();
            assert!(silent.read_to_end(&mut rest).is_err() || rest.is_empty(), "it is closed");
            let again = Destination::new(Memory::new(1, 1).ram()).listen(address, &Security::Insecure).unwrap();
            // A listener that ends before a source has come also ends connections in their handshake.
            let mut silent = TcpStream::connect(again.address().to_string()).unwrap();
            drop(again);
            assert!(silent.read_to_end(&mut rest).is_err() || rest.is_empty(), "it is closed");
        }
    });
}

/// An observer that panics at every report.
struct Panics;

impl Observer for Panics {
    fn progress(&self, _: &Progress) {
        panic!("no progress");
    }

    fn note(&self, text: &str) {
        panic!("nothing of {text}");
    }
}

#[test]
fn an_observer_that_panics_does_not_matter() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        let listening = Destination::new(pair.destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();
        let mut source = pair.source();
        std::thread::scope(|scope| {
            let (to, cancel) = (&mut pair.to, &pair.cancel.1);
            let receiving = scope.spawn(move || listening.run(to, cancel, &Panics));
            source.run(address, &Security::Insecure, &mut pair.from, &pair.cancel.0, &Panics).unwrap();
            receiving.join().unwrap().unwrap();
        });
        pair.has_moved();
    });
}

#[test]
fn a_guest_on_a_private_mapping_of_its_snapshot_moves_and_both_files_stay_as_they_were() {
    within_a_minute(|| {
        let snapshot = |byte: u8| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&vec![byte; 600 * guest::PAGE]).unwrap();
            file
        };
        let (at_source, at_destination) = (snapshot(1), snapshot(2));
        let source = Memory::of_private_file(&at_source);
        let mut pair = Pair::with(CALM, source, Memory::of_private_file(&at_destination));
        let (source, destination) = (pair.source(), Destination::new(pair.destination.ram()));
        // The writers have made private pages; comparing all of the memory is part of loading.
        let (sent, received) = pair.run(source, destination.memory_before(Before::Anything));
        sent.unwrap();
        received.unwrap();
        pair.has_moved();
        for (mut file, byte) in [(at_source, 1), (at_destination, 2)] {
            let mut content = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut content).unwrap();
            assert!(content.len() == 600 * guest::PAGE && content.iter().all(|is| *is == byte));
        }
    });
}

#[test]
fn the_cpu_time_in_the_reports_is_the_migrations_own() {
    within_a_minute(|| {
        const OTHERS: f64 = 1.0;
        // Like vCPUs, which run long before the migration and during it.
        std::thread::spawn(|| while process::own_cpu_seconds() < OTHERS {}).join().unwrap();
        let mut pair = Pair::new(CALM);
        let burn = |until: f64| while process::own_cpu_seconds() < until {};
        pair.from.on_call = Some(Box::new(move |method| {
            if method == "save" {
                // On the thread that called `run`.
                burn(process::own_cpu_seconds() + OTHERS);
            }
        }));
        let (sent, _) = pair.migrate();
        let sent = sent.unwrap();
        for (side, seconds) in [("source", sent.source_cpu_seconds), ("destination", sent.destination_cpu_seconds)] {
            assert!(seconds > 0.0 && seconds < OTHERS, "{seconds} s at the {side}");
        }
    });
}

#[test]
fn a_guest_that_cannot_be_started_at_the_destination_never_runs_at_the_source_again() {
    within_a_minute(|| {
        for panics in [false, true] {
            let mut pair = Pair::new(CALM);
            (pair.to.fails, pair.to.panics) = (Some("start"), panics);
            let (sent, received) = pair.migrate();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            assert_eq!(sent.guest, GuestState::BelongsToDestination, "{sent}");
            assert_eq!(received.guest, GuestState::PausedAtDestination, "{received}");
            assert_eq!((pair.running.now(), pair.running.ever_twice()), (0, false));
            assert!(!pair.from.runs());
        }
    });
}

#[test]
fn a_guest_that_cannot_be_resumed_is_reported_as_paused() {
    within_a_minute(|| {
        for panics in [false, true] {
            let mut pair = Pair::new(CALM);
            pair.to.fails = Some("load");
            (pair.from.fails, pair.from.panics) = (Some("resume"), panics);
            let (sent, _) = pair.migrate();
            assert_eq!(sent.unwrap_err().guest, GuestState::PausedAtSource);
            assert_eq!(pair.running.now(), 0);
        }
    });
}

#[test]
fn different_blocks_are_refused_with_the_reason_on_both_sides_before_anything_is_done() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        let other = Memory::new(3000, 999);
        let (source, destination) = (pair.source(), Destination::new(other.ram()));
        let (sent, received) = pair.run(source, destination);
        let sent = sent.unwrap_err();
        assert!(sent.reason.contains("RAM block 1 is high, 4096000 bytes, pages of 4096 at the source"), "{sent}");
        assert_eq!((sent.kind, sent.guest, sent.phase), (ErrorKind::Refused, GuestState::Untouched, Phase::SettingUp));
        assert!(received.unwrap_err().kind == ErrorKind::Cancelled, "it would have waited for another source");
        pair.stays_at_source();
    });
}

/// A dirty log that fails, or panics, at the given call.
struct FailingLog(sterna_memory::dirty::reported::ReportedLog, u32, bool);

impl FailingLog {
    fn may_fail(&mut self) -> Result<(), DirtyLogError> {
        assert!(self.1 > 0 || !self.2, "dirty ring of vCPU 3 overflowed");
        self.1 = self.1.checked_sub(1).ok_or(DirtyLogError::RingOverflow { vcpu: 3 })?;
        Ok(())
    }
}

impl DirtyLog for FailingLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.may_fail()?;
        self.0.start()
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        self.may_fail()?;
        self.0.collect(block, dirty)
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.0.stop()
    }
}

#[test]
fn a_dirty_log_that_fails_at_any_time_is_reported_on_both_sides_and_the_guest_continues() {
    within_a_minute(|| {
        // Starting it, the first round, a later one, the last one after the guest was paused.
        for (calls, panics) in [0, 1, 2, 4].into_iter().flat_map(|calls| [(calls, false), (calls, true)]) {
            let mut pair = Pair::new(CALM);
            let (_, log) = Monitor::new(&pair.source, &pair.running, CALM);
            pair.log = Some(Box::new(FailingLog(log, calls, panics)));
            let (sent, received) = pair.migrate();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            pair.stays_at_source();
            assert!(sent.reason.contains("dirty ring of vCPU 3 overflowed"), "{calls}: {sent}");
            assert!(received.reason.contains("dirty ring of vCPU 3 overflowed"), "{calls}: {received}");
            assert_eq!((sent.kind, received.kind), (ErrorKind::Memory, ErrorKind::OtherSide), "{sent}; {received}");
            assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere));
        }
    });
}

#[test]
fn post_copy_that_a_device_does_not_support_is_refused_before_anything_is_done() {
    within_a_minute(|| {
        for at_source in [true, false] {
            let mut pair = Pair::new(CALM);
            let monitor = if at_source { &mut pair.from } else { &mut pair.to };
            monitor.no_post_copy = Some("a network card is assigned to the guest");
            let source = pair.source().when_not_converging(NotConverging::PostCopy);
            let destination = Destination::new(pair.destination.ram());
            let (sent, _) = pair.run(source, destination);
            let sent = sent.unwrap_err();
            pair.stays_at_source();
            assert!(sent.reason.contains("a network card is assigned"), "{sent}");
            assert!(sent.reason.contains(if at_source { "at the source" } else { "at the destination" }), "{sent}");
            assert_eq!((sent.guest, sent.phase), (GuestState::Untouched, Phase::SettingUp));
            // Without post-copy the same guest moves.
            if !at_source {
                let mut again = Pair::new(CALM);
                again.to.no_post_copy = Some("a network card is assigned to the guest");
                let (sent, _) = again.migrate();
                sent.unwrap();
                again.has_moved();
            }
        }
    });
}

#[test]
fn a_record_is_kept_on_disk_if_requested_and_a_full_disk_is_reported() {
    within_a_minute(|| {
        let states = tempfile::tempdir().unwrap();
        let mut pair = Pair::new(CALM);
        let source = pair.source().state_dir(states.path().join("source"));
        let destination = Destination::new(pair.destination.ram()).state_dir(states.path().join("destination"));
        let (sent, _) = pair.run(source, destination);
        let id = sent.unwrap().id;
        pair.has_moved();
        let read =
            |side: &str| std::fs::read_to_string(states.path().join(format!("{side}/{id}.{side}.json"))).unwrap();
        assert!(read("source").contains("\"finished\"") && read("destination").contains("\"running\""));

        // A directory that cannot be made, because a file has its path.
        let file = states.path().join("file");
        std::fs::write(&file, "").unwrap();
        for at_source in [true, false] {
            let mut pair = Pair::new(CALM);
            let (mut source, mut destination) = (pair.source(), Destination::new(pair.destination.ram()));
            if at_source {
                source = source.state_dir(file.join("state"));
            } else {
                destination = destination.state_dir(file.join("state"));
            }
            let (sent, received) = pair.run(source, destination);
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            pair.stays_at_source();
            assert!(sent.reason.contains("state directory"), "{sent}");
            assert_eq!(sent.guest, GuestState::Untouched);
            assert!(at_source || received.reason.contains("state directory"), "{received}");
        }
    });
}

#[test]
fn a_guest_that_dirties_too_much_until_it_is_paused_continues_but_not_for_ever() {
    within_a_minute(|| {
        let mut pair = Pair::new(Workload { span: 10, ..CALM });
        pair.from.last_writes = 2000;
        // 8 MB at 16 MB/s are half a second, ten times the target downtime.
        let source = pair.source().bandwidth(Some(16 << 20)).downtime(Duration::from_millis(50));
        let destination = Destination::new(pair.destination.ram());
        let (sent, received) = pair.run(source, destination);
        sent.unwrap();
        received.unwrap();
        pair.has_moved();
        let times = |name| pair.from.called.iter().filter(|called| **called == name).count();
        assert_eq!((times("pause"), times("resume"), times("save")), (4, 3, 1));
        assert_eq!(pair.from.resumed, [ResumeReason::RoundsGoOn; 3]);
    });
}

#[test]
fn a_destination_without_memory_is_reported_on_both_sides_and_the_guest_continues() {
    within_a_minute(|| {
        let pool = std::fs::read_to_string("/proc/meminfo").unwrap();
        let all = pool.lines().find_map(|line| line.strip_prefix("HugePages_Total:"));
        // More huge pages than there are, whatever other processes use or give back.
        let count = all.map_or(0, |all| all.trim().parse::<usize>().unwrap()) + 8;
        let source = Memory::of_huge_pages(count, true).unwrap();
        let destination = match Memory::of_huge_pages(count, false) {
            Ok(destination) => destination,
            Err(error) => return println!("skipped: no huge pages, not even none: {error}"),
        };
        let everywhere = Workload { span: u64::MAX, ..CALM };
        let mut pair = Pair::with(everywhere, source, destination);
        let ram = pair.source.ram();
        let fill = |page| ram.blocks()[0].write(page, &[1; guest::PAGE]);
        (0..ram.blocks()[0].pages()).for_each(fill);

        let too_early = Destination::new(pair.destination.ram()).prefault(true);
        let error = too_early.listen("127.0.0.1:0", &Security::Insecure).unwrap_err();
        assert!(error.reason.contains("no memory for") && error.guest == GuestState::Untouched, "{error}");

        let (sent, received) = pair.migrate();
        let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
        assert!(received.reason.contains("no memory for"), "{received}");
        assert!(sent.reason.contains("the destination failed") && sent.reason.contains("no memory for"), "{sent}");
        pair.stays_at_source();
    });
}

#[test]
fn a_state_larger_than_all_queues_is_sent_beside_the_last_pages() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        pair.from.state_bytes = 64 << 20;
        let (source, destination) = (pair.source().packet_size(64 << 10), Destination::new(pair.destination.ram()));
        let (sent, received) = pair.run(source, destination);
        sent.unwrap();
        received.unwrap();
        pair.has_moved();
    });
}

#[test]
fn settings_without_a_limit_have_none() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        let ever = Duration::MAX;
        let limits = TimeLimits::default().step(ever).delivery(ever).reporting_abort(ever);
        let source = pair.source().time_limits(limits).give_up_after(Some(ever)).downtime(Duration::from_secs(3600));
        let destination = Destination::new(pair.destination.ram()).linger(ever);
        let (sent, received) = pair.run(source, destination);
        sent.unwrap();
        received.unwrap();
        pair.has_moved();
    });
}

#[test]
fn settings_out_of_range_are_refused_before_anything_is_done() {
    for settings in [|source: Source| source.channels(0), |source: Source| source.packet_size(5000)] {
        let mut pair = Pair::new(CALM);
        let mut source = settings(pair.source());
        let error = source.run("127.0.0.1:1", &Security::Insecure, &mut pair.from, &Cancel::new(), &()).unwrap_err();
        assert_eq!((error.kind, error.guest), (ErrorKind::Settings, GuestState::Untouched), "{error}");
    }
}

#[test]
fn where_nobody_listens_the_source_of_the_error_is_the_connections() {
    let mut pair = Pair::new(CALM);
    let mut source = pair.source();
    let error = source.run("127.0.0.1:1", &Security::Insecure, &mut pair.from, &Cancel::new(), &()).unwrap_err();
    assert_eq!((error.kind, error.guest), (ErrorKind::Network, GuestState::Untouched), "{error}");
    assert!(error.source().unwrap().to_string().contains("cannot connect to 127.0.0.1:1"), "{error:?}");
}

#[test]
fn a_guest_that_dirties_too_fast_is_given_up_with_the_figures() {
    within_a_minute(|| {
        let mut pair = Pair::restless();
        let source = pair
            .source()
            .bandwidth(Some(32 << 20))
            .downtime(Duration::from_millis(20))
            .when_not_converging(NotConverging::GiveUp);
        let destination = Destination::new(pair.destination.ram());
        let (sent, received) = pair.run(source, destination);
        let sent = sent.unwrap_err();
        assert!(sent.reason.contains("given up") && sent.reason.contains("the guest dirties"), "{sent}");
        assert_eq!(sent.kind, ErrorKind::NotConverging);
        assert!(received.unwrap_err().reason.contains("given up"));
        pair.stays_at_source();
        let report = sent.report.unwrap();
        assert!(report.convergence.unwrap().contains("MiB/s"));
    });
}

#[test]
fn a_guest_is_slowed_down_in_steps_and_released_if_it_stays() {
    within_a_minute(|| {
        let mut pair = Pair::restless();
        let throttle = Throttle { initial: 30, step: 30, max: 90 };
        let source = pair
            .source()
            .bandwidth(Some(64 << 20))
            .downtime(Duration::from_millis(20))
            .when_not_converging(NotConverging::Throttle(throttle));
        let destination = Destination::new(pair.destination.ram());
        // The third step is the last one.
        let third = CancellingAfter::new("the guest is held for 90 % of the time", 0, &pair.cancel.0);
        let (sent, _) = pair.run_observed(source, destination, &third);
        let report = sent.unwrap_err().report.unwrap();
        assert!(report.convergence.unwrap().contains("% of the time"));
        assert!(pair.from.called.iter().filter(|name| **name == "throttle").count() >= 3, "{:?}", pair.from.called);
        assert_eq!(pair.from.throttled, 0, "full speed again");
        pair.stays_at_source();
    });
}

#[test]
fn a_guest_whose_monitor_cannot_slow_it_down_is_not_reported_as_slowed_down() {
    within_a_minute(|| {
        let mut pair = Pair::restless();
        pair.from.fails = Some("throttle");
        let source = pair
            .source()
            .bandwidth(Some(64 << 20))
            .downtime(Duration::from_millis(20))
            .when_not_converging(NotConverging::Throttle(Throttle::default()));
        let destination = Destination::new(pair.destination.ram());
        // More than it takes to see that rounds do not converge.
        let later = CancellingAfter::new("the guest is not slowed down", 6, &pair.cancel.0);
        let (sent, _) = pair.run_observed(source, destination, &later);
        let convergence = sent.unwrap_err().report.unwrap().convergence.unwrap();
        assert!(!convergence.contains("% of the time"), "{convergence}");
        let times = pair.from.called.iter().filter(|name| **name == "throttle").count();
        assert_eq!(times, 1, "{:?}", pair.from.called);
        pair.stays_at_source();
    });
}

#[test]
fn a_guest_that_is_resumed_after_a_pause_is_slowed_down_again() {
    within_a_minute(|| {
        let mut pair = Pair::restless();
        (pair.from.span_when_throttled, pair.from.last_writes) = (Some(10), 2000);
        let throttle = Throttle { initial: 30, step: 30, max: 90 };
        let source = pair
            .source()
            .bandwidth(Some(16 << 20))
            .downtime(Duration::from_millis(50))
            .when_not_converging(NotConverging::Throttle(throttle));
        let destination = Destination::new(pair.destination.ram());
        let (sent, received) = pair.run(source, destination);
        sent.unwrap();
        received.unwrap();
        pair.has_moved();
        let called = &pair.from.called;
        let after_resume: Vec<_> = called.windows(2).filter(|pair| pair[0] == "resume").map(|pair| pair[1]).collect();
        assert!(!after_resume.is_empty() && after_resume.iter().all(|name| *name == "throttle"), "{called:?}");
    });
}

#[test]
fn cancelling_at_either_side_leaves_the_guest_at_the_source() {
    within_a_minute(|| {
        for at_source in [true, false] {
            let mut pair = Pair::restless();
            let mut source = pair.source().bandwidth(Some(2 << 20)).downtime(Duration::from_millis(5));
            let destination = Destination::new(pair.destination.ram());
            let cancel = if at_source { pair.cancel.0.clone() } else { pair.cancel.1.clone() };
            let listening = destination.listen("127.0.0.1:0", &Security::Insecure).unwrap();
            let address = listening.address().clone();
            let cancelling = Cancelling(cancel);
            let (sent, received) = std::thread::scope(|scope| {
                let (to, cancel) = (&mut pair.to, &pair.cancel.1);
                let receiving = scope.spawn(move || listening.run(to, cancel, &()));
                let sent = source.run(address, &Security::Insecure, &mut pair.from, &pair.cancel.0, &cancelling);
                (sent.unwrap_err(), receiving.join().unwrap().unwrap_err())
            });
            pair.stays_at_source();
            assert_eq!(
                (sent.kind == ErrorKind::Cancelled, received.kind == ErrorKind::Cancelled),
                (at_source, !at_source),
                "{sent}; {received}"
            );
            assert!(sent.reason.contains("cancelled") && received.reason.contains("cancelled"), "{sent}; {received}");
        }
    });
}

/// Cancels so many rounds after a note that begins with these words.
struct CancellingAfter {
    words: &'static str,
    rounds: u64,
    cancel: Cancel,
    /// The last round that was reported, and the one that it ends with.
    round: AtomicU64,
    until: AtomicU64,
}

impl CancellingAfter {
    fn new(words: &'static str, rounds: u64, cancel: &Cancel) -> Self {
        let (round, until) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        Self { words, rounds, cancel: cancel.clone(), round, until }
    }
}

impl Observer for CancellingAfter {
    fn progress(&self, progress: &Progress) {
        self.round.store(progress.round, Ordering::Relaxed);
        if progress.round >= self.until.load(Ordering::Relaxed) {
            self.cancel.cancel();
        }
    }

    fn note(&self, text: &str) {
        if text.starts_with(self.words) {
            self.until.fetch_min(self.round.load(Ordering::Relaxed) + self.rounds, Ordering::Relaxed);
        }
    }
}

/// Cancels at the first progress report, in the middle of the rounds.
struct Cancelling(Cancel);

impl Observer for Cancelling {
    fn progress(&self, _: &Progress) {
        self.0.cancel();
    }

    fn note(&self, _: &str) {}
}
