//! What is made of a device's answers, and what is given back with them: records, credits, grants.

mod support;

use std::io;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_idxd::{Descriptor, Device, Kind as DeviceKind, Mode, Portal, QueueInfo, Submission, Way, WorkQueue};
use sterna_offload::share::{Ask, Fifo, Grant, Share, Verdict};
use sterna_offload::trace::Trace;
use sterna_offload::{Bell, Cause, Kind, NEVER, Nanos, Offload, Operation, Outcome, Region, Settings, Shares, Time};
use support::{Clock, Fake, Memory, PAGE, Script, crc32c};

struct Bench {
    clock: Arc<Clock>,
    device: Arc<Fake>,
    settings: Settings,
    memory: Arc<Memory>,
    region: Arc<Region>,
}

/// Counts the grants that are out.
struct Counted(Arc<AtomicI64>);

impl Share for Counted {
    fn ask(&mut self, ask: &Ask, now: Nanos) -> Verdict {
        self.0.fetch_add(1, Ordering::Relaxed);
        Fifo.ask(ask, now)
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        Fifo.done(grant, sojourn, now);
    }

    fn dropped(&mut self, grant: Grant) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        Fifo.dropped(grant);
    }
}

impl Bench {
    /// A DSA with one queue of this many entries, dedicated where it says so; 32 pages.
    fn new(entries: u32, dedicated: bool) -> Bench {
        let device = Fake::new("dsa0", DeviceKind::Dsa, &[(entries, dedicated)], 1, Script::default());
        let mut settings = Settings::default();
        settings.threads = false;
        let clock = Clock::new();
        settings.time = clock.clone();
        let memory = Memory::new(32);
        let region = memory.region();
        Bench { clock, device, settings, memory, region }
    }

    fn start(&self, max_batch: u32) -> Arc<Offload> {
        Offload::over(self.device.open(&self.clock, max_batch), &self.settings).unwrap()
    }

    /// The checksums of all pages, one batch.
    fn checksums(&self, offload: &Offload) -> Vec<u32> {
        let channel = offload.channel();
        let mut batch = channel.batch(Operation::Checksum);
        for page in 0..32 {
            batch.push(&self.region.range(page * PAGE, PAGE).unwrap()).unwrap();
        }
        channel.submit(batch).unwrap().into_id();
        let done = channel.wait(NEVER).unwrap();
        assert_eq!(done.outcome, Outcome::Done);
        (0..32).map(|page| done.batch.checksum(page)).collect()
    }

    fn right_checksums(&self) -> Vec<u32> {
        (0..32).map(|page| crc32c(&self.memory.read(page * PAGE, PAGE))).collect()
    }
}

/// Items done by accelerators, and items left to the CPU by cause.
fn by_device(offload: &Offload) -> (u64, Vec<(Cause, u64)>) {
    let report = offload.report();
    let engines = || report.operations.iter().flat_map(|of| &of.engines).filter(|of| of.engine != Kind::Cpu);
    (engines().map(|of| of.items).sum(), engines().flat_map(|of| of.fallbacks.clone()).collect())
}

#[test]
fn a_batch_in_part_as_predicted_is_read_from_its_members_records_and_the_cpu_does_nothing() {
    let bench = Bench::new(16, false);
    let offload = bench.start(32);
    (0..32).filter(|page| page % 3 == 0).for_each(|page| bench.memory.write(page * PAGE + 9, &[1]));
    for _ in 0..2 {
        let map = offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
        assert!((0..32).all(|page| map[page] == (page % 3 != 0)), "{map:?}");
    }
    assert_eq!(by_device(&offload), (64, vec![]));
    assert!(offload.report().taken_out.is_empty());
}

#[test]
fn members_that_were_not_processed_have_no_answer_and_never_the_one_of_the_batch_before() {
    let bench = Bench::new(16, false);
    let offload = bench.start(32);
    for round in 1..20_u8 {
        bench.device.set_script(Script { list_fault: u64::from(round % 2 == 0), ..Script::default() });
        (0..32).for_each(|page| bench.memory.write(page * PAGE, &[round]));
        assert_eq!(bench.checksums(&offload), bench.right_checksums(), "round {round}");
    }
    let (_, fallbacks) = by_device(&offload);
    assert!(matches!(fallbacks[..], [(Cause::PageFault, 1..)]), "{fallbacks:?}");
}

#[test]
fn a_dedicated_queue_gets_its_credits_back_and_serves_any_number_of_batches() {
    for max_batch in [1, 8] {
        let bench = Bench::new(4, true);
        let offload = bench.start(max_batch);
        for _ in 0..10 {
            assert_eq!(bench.checksums(&offload), bench.right_checksums());
        }
        assert_eq!(by_device(&offload), (320, vec![]), "batches of {max_batch}");
        assert_eq!(bench.device.overflows.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn grants_come_back_whether_the_work_was_done_refused_or_lost() {
    let mut bench = Bench::new(16, false);
    let out = Arc::new(AtomicI64::new(0));
    let count = out.clone();
    bench.settings.shares = Shares::new(move |_| Box::new(Counted(count.clone())));
    let offload = bench.start(32);
    bench.checksums(&offload);
    assert_eq!((out.load(Ordering::Relaxed), by_device(&offload).0), (0, 32), "done");
    bench.device.set_script(Script { full: 1, ..Script::default() });
    bench.checksums(&offload);
    assert_eq!(out.load(Ordering::Relaxed), 0, "refused");
    bench.device.set_script(Script { lost: 1, ..Script::default() });
    assert_eq!(bench.checksums(&offload), bench.right_checksums());
    assert_eq!(out.load(Ordering::Relaxed), 0, "lost");
}

/// A device in the test's hands: the no-op that proves it is answered, the rest when it is told.
#[derive(Debug, Default)]
struct Told(Mutex<Vec<Descriptor>>);

impl Told {
    /// Answers the checksum that was submitted as number `index`.
    fn answer(&self, index: usize, crc: u32) {
        let record = self.0.lock().unwrap()[index].record().unwrap();
        write_record(record, crc);
    }
}

fn write_record(record: u64, crc: u32) {
    let words = std::ptr::with_exposed_provenance::<AtomicU64>(record as usize);
    // SAFETY: the record is the submitter's until it has seen the status, which is written last.
    unsafe {
        (*words.add(2)).store(crc.into(), Ordering::Relaxed);
        (*words).store(1, Ordering::Release);
    }
}

impl Portal for Told {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        if descriptor.operation_code() == 0 {
            write_record(descriptor.record().unwrap(), 0);
        } else {
            self.0.lock().unwrap().push(*descriptor);
        }
        Submission::Accepted
    }

    fn way(&self) -> Way {
        Way::Enqcmd
    }
}

/// Time that passes when it is told to.
#[derive(Debug)]
struct Still(AtomicU64);

impl Time for Still {
    fn now(&self) -> Nanos {
        self.0.load(Ordering::Relaxed)
    }

    fn sleep(&self, _bell: &Bell, _heard: u64, until: Nanos) {
        self.0.fetch_max(until, Ordering::Relaxed);
    }
}

/// Answers one descriptor at the moment in which the completion of another is written down.
struct Meanwhile(Arc<Told>, u32);

impl io::Write for Meanwhile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.starts_with(b"c ") {
            self.0.answer(0, self.1);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_answer_that_comes_while_the_clock_is_read_counts() {
    let memory = Memory::new(2);
    memory.write(PAGE, &[1]);
    let right = [0, PAGE].map(|at| crc32c(&memory.read(at, PAGE)));
    let portal = Arc::new(Told::default());
    let time = Arc::new(Still(AtomicU64::new(1_000)));
    let mut settings = Settings::default();
    (settings.threads, settings.time) = (false, time.clone());
    settings.trace = Some(Arc::new(Trace::new(Box::new(io::LineWriter::new(Meanwhile(portal.clone(), right[0]))))));
    let mut info = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", DeviceKind::Dsa)), Mode::Shared, 16);
    info.max_batch = 1;
    let offload = Offload::over(vec![WorkQueue::with_portal(info, portal.clone()).unwrap()], &settings).unwrap();
    let region = memory.region();
    let channel = offload.channel();
    let mut batch = channel.batch(Operation::Checksum);
    for page in 0..2 {
        batch.push(&region.range(page * PAGE, PAGE).unwrap()).unwrap();
    }
    channel.submit(batch).unwrap().into_id();
    // Nobody has looked for a long time, and the second has been answered for long, the first has not.
    time.0.fetch_add(u64::try_from(Duration::from_secs(60).as_nanos()).unwrap(), Ordering::Relaxed);
    portal.answer(1, right[1]);
    let done = channel.poll().expect("both are answered by now");
    assert_eq!([done.batch.checksum(0), done.batch.checksum(1)], right);
    assert!(offload.report().taken_out.is_empty());
    assert_eq!(by_device(&offload), (2, vec![]));
}
