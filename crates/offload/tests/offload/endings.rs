//! How batches, channels and devices end: handed in again, dropped with work under way, taken out while others look.

use crate::support;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Clock, Fake, Memory, PAGE, Script};
use sterna_idxd::Kind as DeviceKind;
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Fifo, Grant, Share};
use sterna_offload::trace::Trace;
use sterna_offload::{
    Cancelled, Channel, NEVER, Nanos, Offload, Operation, Outcome, Recheck, Region, Settings, Shares, Ticket,
};
use sterna_test_kit::tools::directory_in_memory;

const PAGES: usize = 32;

struct Bench {
    clock: Arc<Clock>,
    device: Arc<Fake>,
    settings: Settings,
    memory: Arc<Memory>,
    region: Arc<Region>,
}

impl Bench {
    /// A DSA with one shared queue; 32 zero pages.
    fn new() -> Bench {
        let (clock, memory) = (Clock::new(), Memory::new(PAGES));
        let device = Fake::new("dsa0", DeviceKind::Dsa, &[(16, false)], 1, Script::default());
        let mut settings = Settings::default();
        (settings.threads, settings.time) = (false, clock.clone());
        let region = memory.region();
        Bench { clock, device, settings, memory, region }
    }

    fn start(&self) -> Arc<Offload> {
        Offload::with_queues(self.device.open(&self.clock, 32), &self.settings).unwrap()
    }

    /// All pages, one by one, handed in on `channel`.
    fn submit(&self, channel: &Channel, operation: Operation) -> Ticket {
        let mut batch = channel.batch(operation);
        for page in 0..PAGES {
            batch.push(&self.region.range(page * PAGE, PAGE).unwrap()).unwrap();
        }
        channel.submit(batch).unwrap()
    }
}

#[test]
fn pages_side_by_side_are_copied_where_the_pages_before_were_all_zero() {
    let bench = Bench::new();
    let offload = bench.start();
    assert_eq!(offload.is_zero(&[bench.region.range(0, PAGES * PAGE).unwrap()]), Ok(vec![true; PAGES]));
    (0..PAGES).for_each(|page| bench.memory.write(page * PAGE, &[page as u8 + 1]));
    let channel = offload.channel();
    let _ = bench.submit(&channel, Operation::CopyChecksum).into_id();
    let done = channel.wait(NEVER).unwrap();
    for page in 0..PAGES {
        let content = bench.memory.read(page * PAGE, PAGE);
        assert_eq!((done.batch.copy(page), done.batch.checksum(page)), (&content[..], support::crc32c(&content)));
    }
}

/// Sends the first batch to the CPU.
struct FirstSpilled(bool);

impl Share for FirstSpilled {
    fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        if std::mem::replace(&mut self.0, true) { Fifo.ask(ask, now) } else { AdmissionDecision::Spill }
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        Fifo.done(grant, sojourn, now);
    }

    fn dropped(&mut self, grant: Grant) {
        Fifo.dropped(grant);
    }
}

#[test]
fn a_batch_handed_in_again_is_as_new_whoever_did_it_before() {
    let mut bench = Bench::new();
    bench.settings.shares = Shares::new(|_| Box::new(FirstSpilled(false)));
    let offload = bench.start();
    let channel = offload.channel();
    let _ = bench.submit(&channel, Operation::Checksum).into_id();
    let first = channel.wait(NEVER).unwrap();
    (0..PAGES).for_each(|page| bench.memory.write(page * PAGE, &[page as u8 + 1]));
    let _ = channel.submit(first.batch).unwrap().into_id();
    let second = channel.wait(NEVER).unwrap();
    for page in 0..PAGES {
        assert_eq!(second.batch.checksum(page), support::crc32c(&bench.memory.read(page * PAGE, PAGE)));
    }
    let report = offload.report();
    let items: Vec<_> = report.operations[0].engines.iter().map(|engine| engine.items).collect();
    assert_eq!(items, [PAGES as u64; 2], "once by the CPU, once by the device");
}

#[test]
fn a_batch_taken_back_when_it_was_done_already_is_handed_in_again_like_any_other() {
    let bench = Bench::new();
    let offload = bench.start();
    let channel = offload.channel();
    bench.device.set_script(Script { page_fault: 1, ..Script::default() });
    let ticket = bench.submit(&channel, Operation::Checksum);
    // Another batch's end shows that it is done.
    bench.clock.pass(1_000_000);
    offload.run_backstop();
    let Cancelled::Returned(batch) = ticket.cancel() else { panic!("no device has it any more") };
    bench.device.set_script(Script::default());
    let before = bench.device.executed();
    let _ = channel.submit(batch).unwrap().into_id();
    let done = channel.wait(NEVER).unwrap();
    assert_eq!(done.outcome, Outcome::Done);
    assert!((0..PAGES).all(|page| done.batch.checksum(page) == support::crc32c(&[0; PAGE])));
    assert_eq!(bench.device.executed() - before, 1);
}

#[test]
fn queues_are_closed_with_offload_even_if_a_channel_went_before_its_work_was_done() {
    let bench = Bench::new();
    let offload = bench.start();
    let channel = offload.channel();
    drop(bench.submit(&channel, Operation::ZeroMap));
    drop(channel);
    let opened = Arc::strong_count(&bench.device);
    drop(offload);
    assert_eq!(bench.region.uses(), 0);
    assert_eq!(Arc::strong_count(&bench.device), opened - 1, "the queue's way in is gone");
}

/// The CPU's, and notes in whose place it worked.
struct Noted(String, Arc<Mutex<Vec<(String, bool)>>>);

impl Share for Noted {
    fn ask(&mut self, _: &AdmissionRequest, _: Nanos) -> AdmissionDecision {
        self.1.lock().unwrap().push((self.0.clone(), true));
        AdmissionDecision::Spill
    }

    fn done(&mut self, _: Grant, _: Nanos, _: Nanos) {}

    fn dropped(&mut self, _: Grant) {}

    fn spilled(&mut self, _: u64, _: Nanos, _: Nanos) {
        self.1.lock().unwrap().push((self.0.clone(), false));
    }
}

#[test]
fn the_share_that_left_a_batch_to_the_cpu_hears_how_long_it_took() {
    let mut bench = Bench::new();
    let other = Fake::new("dsa1", DeviceKind::Dsa, &[(16, false)], 2, Script::default());
    let queues = [&bench.device, &other].map(|device| device.open(&bench.clock, 32)).into_iter().flatten().collect();
    let noted = Arc::new(Mutex::new(Vec::new()));
    let notes = noted.clone();
    bench.settings.shares = Shares::new(move |device| Box::new(Noted(device.into(), notes.clone())));
    let offload = Offload::with_queues(queues, &bench.settings).unwrap();
    for _ in 0..4 {
        offload.checksum(&bench.region.range(0, PAGE).unwrap()).unwrap();
    }
    let noted = noted.lock().unwrap();
    let (asked, heard): (Vec<_>, Vec<_>) = noted.iter().partition(|(_, asked)| *asked);
    let names = |of: Vec<&(String, bool)>| of.into_iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(asked), names(heard));
    assert!(noted.iter().any(|(name, _)| name == "dsa1"));
}

/// Does something in the moment in which a warning is given.
struct AtWarning(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl tracing::Subscriber for AtWarning {
    fn enabled(&self, of: &tracing::Metadata<'_>) -> bool {
        *of.level() == tracing::Level::WARN
    }

    fn event(&self, _: &tracing::Event<'_>) {
        let then = self.0.lock().unwrap().take();
        if let Some(then) = then {
            then();
        }
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn who_looks_while_a_device_is_being_taken_out_finds_it_in_the_report() {
    let bench = Bench::new();
    let offload = bench.start();
    let (first, second) = (offload.channel(), offload.channel());
    let _ = bench.submit(&first, Operation::Checksum).into_id();
    let _ = bench.submit(&second, Operation::Checksum).into_id();
    bench.device.halt();
    bench.clock.pass(10_000_000_000);
    let seen = Arc::new(Mutex::new(None));
    let note = seen.clone();
    let look: Box<dyn FnOnce() + Send> =
        Box::new(move || *note.lock().unwrap() = Some(second.poll().map(|done| done.outcome)));
    tracing::subscriber::with_default(AtWarning(Mutex::new(Some(look))), || {
        assert!(first.poll().is_some(), "done by the CPU");
    });
    assert_eq!(*seen.lock().unwrap(), Some(Some(Outcome::Done)));
    let report = offload.report();
    assert_eq!((report.taken_out.len(), report.requests.quarantined), (1, 2));
    let kept = report.taken_out[0].quarantined_bytes;
    offload.close_devices();
    assert!(kept > 0 && offload.report().taken_out[0].quarantined_bytes == 0);
}

/// Panics at the first line of a submission.
struct Panicking(Arc<AtomicBool>);

impl io::Write for Panicking {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        assert!(!(bytes.starts_with(b"s ") && self.0.load(Ordering::Relaxed)), "as told");
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_panic_after_a_submission_frees_nothing_that_the_device_will_write() {
    let mut bench = Bench::new();
    let panics = Arc::new(AtomicBool::new(true));
    let output = io::LineWriter::with_capacity(1 << 12, Panicking(panics.clone()));
    bench.settings.trace = Some(Arc::new(Trace::new(Box::new(output))));
    let offload = bench.start();
    let channel = offload.channel();
    let submitted = catch_unwind(AssertUnwindSafe(|| bench.submit(&channel, Operation::CopyChecksum).into_id()));
    assert!(submitted.is_err());
    panics.store(false, Ordering::Relaxed);
    // The device does it now: were its lists or the copy's place unmapped, that would be the end of this process.
    let before = bench.device.executed();
    bench.clock.pass(1_000_000);
    assert_eq!(bench.device.executed() - before, 1);
    assert_eq!(bench.region.retire().unwrap_err().uses, 1, "nor does anybody unmap what it reads");
}

/// A disk with room for so many bytes.
struct Full(usize);

impl io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.checked_sub(bytes.len()) {
            None => Err(io::ErrorKind::StorageFull.into()),
            Some(left) => {
                self.0 = left;
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_trial_whose_trace_cannot_be_written_ends_and_the_trace_says_why() {
    let mut bench = Bench::new();
    let trace = Arc::new(Trace::new(Box::new(Full(10_000))));
    bench.settings.trace = Some(trace.clone());
    let offload = bench.start();
    let before = bench.device.executed();
    let trials = sterna_offload::try_all(&offload, 1, 1_000);
    assert!(trials.iter().all(|trial| trial.wrong.is_none()));
    assert!(bench.device.executed() - before < 100, "not ten thousand batches in vain");
    assert!(trace.failed());
    assert_eq!(trace.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
}

#[test]
fn the_summary_says_how_a_device_is_shared_and_why_not_by_a_ledger() {
    let directory = directory_in_memory();
    let elsewhere = directory.path().join("nobody-made-this");
    let ledger = directory.path().join("dsa0.ledger");
    for (shares, how) in [
        (Shares::default(), "dsa0 is shared by weight among the guests of this process".to_owned()),
        (Shares::of_host(directory.path()), format!("among the processes that keep {}", ledger.display())),
        (
            Shares::of_host(&elsewhere),
            format!("by measured delay, as there is no ledger: cannot make the ledger {}", elsewhere.display()),
        ),
        (Shares::new(|_| Box::new(Fifo)), "dsa0 is shared as the program says".to_owned()),
    ] {
        let mut bench = Bench::new();
        bench.settings.shares = shares;
        let report = bench.start().report();
        assert!(report.summary.contains(&how) && !report.summary.contains('\n'), "{}", report.summary);
        assert_eq!(report.lines()[0], report.summary);
    }
}

#[test]
fn the_reports_lines_say_that_they_are_of_all_guests() {
    let bench = Bench::new();
    let offload = bench.start();
    for guest in [1, 2].map(|weight| offload.guest(weight)) {
        let channel = offload.channel_for(&guest);
        let _ = bench.submit(&channel, Operation::Copy).into_id();
        let _ = channel.wait(NEVER).unwrap();
    }
    let line = "dsa, for all guests of this process: copy of 64 items (262144 bytes) in 2 batches";
    assert_eq!(offload.report().lines()[1..], [line]);
}

#[test]
fn with_two_guests_more_than_the_device_has_at_a_time_waits_before_it_and_not_in_it() {
    const MANY: usize = 128;
    let mut bench = Bench::new();
    bench.device = Fake::new("dsa0", DeviceKind::Dsa, &[(MANY as u32, false)], 1, Script::default());
    let offload = Offload::with_queues(bench.device.open(&bench.clock, MANY as u32), &bench.settings).unwrap();
    let memory = Memory::new(MANY);
    let channels = [1, 1].map(|weight| offload.channel_for(&offload.guest(weight)));
    let submit = |number: usize| {
        let mut batch = channels[number].batch(Operation::Checksum);
        batch.push(&memory.region().range(0, MANY * PAGE).unwrap()).unwrap();
        channels[number].submit(batch).unwrap().into_id();
    };
    (0..60).for_each(|batch| submit(batch % 2));
    // Each is expected to take 17 µs, and 0.3 ms of work are let in.
    assert!((17..=18).contains(&bench.device.taken()[0]), "{:?}", bench.device.taken());
    for batch in 0..60 {
        assert!(channels[batch % 2].wait(NEVER).unwrap().producer.is_some(), "none is left to the CPU");
    }
    assert_eq!(bench.device.taken(), [60]);
    // Alone again, and for long: nobody is held back.
    bench.clock.pass(200_000_000);
    (0..60).for_each(|_| submit(0));
    assert_eq!(bench.device.taken(), [120]);
}

/// Lets nothing in before this moment, and notes of which device it was asked and when.
struct Closed(Nanos, String, Arc<Mutex<Vec<(String, Nanos)>>>);

impl Share for Closed {
    fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        self.2.lock().unwrap().push((self.1.clone(), now));
        if now < self.0 { AdmissionDecision::Wait { until: self.0 } } else { Fifo.ask(ask, now) }
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        Fifo.done(grant, sojourn, now);
    }

    fn dropped(&mut self, grant: Grant) {
        Fifo.dropped(grant);
    }
}

#[test]
fn who_was_told_to_wait_asks_the_same_device_again_and_not_before_it_was_told_to() {
    const OPENS: Nanos = 1_000_000;
    let mut bench = Bench::new();
    let other = Fake::new("dsa1", DeviceKind::Dsa, &[(16, false)], 2, Script::default());
    let queues = [&bench.device, &other].map(|device| device.open(&bench.clock, 32)).into_iter().flatten().collect();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let notes = asked.clone();
    bench.settings.shares = Shares::new(move |device| Box::new(Closed(OPENS, device.into(), notes.clone())));
    let offload = Offload::with_queues(queues, &bench.settings).unwrap();
    let channel = offload.channel();
    let _ = bench.submit(&channel, Operation::Checksum).into_id();
    for _ in 0..100 {
        assert!(channel.poll().is_none());
    }
    assert_eq!(asked.lock().unwrap().len(), 1, "{asked:?}");
    bench.clock.pass_until(OPENS);
    assert!(channel.wait(NEVER).unwrap().producer.is_some());
    let asked = asked.lock().unwrap();
    assert!(asked.len() == 2 && asked[1].1 >= OPENS && asked[1].0 == asked[0].0, "{asked:?}");
}

/// Lets one batch in at a time, and tells the others to come back much later.
struct OneByOne(bool);

impl Share for OneByOne {
    fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        if std::mem::replace(&mut self.0, true) {
            return AdmissionDecision::Wait { until: now + 1_000_000_000_000 };
        }
        Fifo.ask(ask, now)
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        self.0 = false;
        Fifo.done(grant, sojourn, now);
    }

    fn dropped(&mut self, grant: Grant) {
        self.0 = false;
        Fifo.dropped(grant);
    }
}

#[test]
fn who_waits_asks_again_as_soon_as_a_batch_of_its_channel_has_completed() {
    let mut bench = Bench::new();
    bench.settings.shares = Shares::new(|_| Box::new(OneByOne(false)));
    let offload = bench.start();
    let channel = offload.channel();
    for _ in 0..3 {
        let _ = bench.submit(&channel, Operation::Checksum).into_id();
    }
    for batch in 1..=3 {
        assert_eq!(bench.device.taken(), [batch]);
        bench.clock.pass(1_000_000);
        assert!(channel.poll().is_some(), "batch {batch}");
    }
}

/// A guest's page that the device calls zero and the CPU sees is not, so that the device is shown it once more; it has said nothing yet.
fn shown_once_more(bench: &Bench, offload: &Offload) {
    bench.region.set_racing(true);
    bench.memory.write(0, &[1]);
    bench.device.set_script(Script { lie: 1, ..Script::default() });
    let channel = offload.channel();
    let _ = bench.submit(&channel, Operation::ZeroMap).into_id();
    let _ = channel.wait(NEVER).unwrap();
    assert_eq!((bench.device.pending(), bench.region.uses()), (1, 1), "the device may still read the page");
}

#[test]
fn a_page_shown_to_the_device_once_more_is_in_use_until_it_has_answered() {
    let mut bench = Bench::new();
    bench.settings.recheck = Recheck::All;
    let offload = bench.start();
    shown_once_more(&bench, &offload);
    assert_eq!(offload.retire(std::slice::from_ref(&bench.region), offload.now()).unwrap_err().uses, 1);
    assert_eq!(offload.retire(std::slice::from_ref(&bench.region), offload.deadline(Duration::from_secs(2))), Ok(()));
    assert!(bench.device.pending() == 0 && bench.clock.pass_so_far() < 10_000_000, "it was looked at, not waited out");
}

#[test]
fn a_device_that_says_nothing_of_a_page_shown_once_more_is_taken_out_and_the_page_free_when_it_is_closed() {
    let mut bench = Bench::new();
    bench.settings.recheck = Recheck::All;
    let offload = bench.start();
    shown_once_more(&bench, &offload);
    bench.device.halt();
    let retired = offload.retire(std::slice::from_ref(&bench.region), offload.deadline(Duration::from_secs(2)));
    assert_eq!(retired.unwrap_err().uses, 1);
    let reasons: Vec<_> = offload.report().taken_out.into_iter().map(|out| out.reason).collect();
    assert_eq!(reasons, ["no answer to a second question about a page"]);
    offload.close_devices();
    assert_eq!(offload.retire(std::slice::from_ref(&bench.region), offload.now()), Ok(()));
}

#[test]
fn a_page_and_a_record_of_a_device_whose_queue_is_held_elsewhere_are_kept_for_ever() {
    let mut bench = Bench::new();
    bench.settings.recheck = Recheck::All;
    let queues = bench.device.open(&bench.clock, 32);
    let offload = Offload::with_queues(queues.clone(), &bench.settings).unwrap();
    shown_once_more(&bench, &offload);
    let kept = Arc::downgrade(&bench.memory);
    let Bench { clock, device, region, .. } = bench;
    drop(offload);
    assert_eq!(region.retire().unwrap_err().uses, 1, "it may be read as long as the queue is open");
    drop(region);
    // Were the record or the page unmapped, that would be the end of this process.
    clock.pass(1_000_000);
    assert!(device.pending() == 0 && kept.upgrade().is_some());
    drop(queues);
}

#[test]
fn retiring_goes_by_the_clock_of_the_settings() {
    let bench = Bench::new();
    let offload = bench.start();
    bench.device.set_script(Script { lost: 1, ..Script::default() });
    let channel = offload.channel();
    let ticket = bench.submit(&channel, Operation::Checksum);
    let deadline = offload.deadline(Duration::from_secs(1_000_000));
    assert_eq!(offload.retire(std::slice::from_ref(&bench.region), deadline).unwrap_err().uses, 1);
    assert!(bench.clock.pass_so_far() >= deadline);
    drop(ticket);
}
