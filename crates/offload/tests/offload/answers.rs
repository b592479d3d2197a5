//! What is made of a device's answers, and what is given back with them: records, credits, grants.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{Clock, Fake, Memory, PAGE, Script, crc32c};
use sterna_idxd::{Device, Kind as DeviceKind, Mode, QueueInfo, WorkQueue};
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Fifo, Grant, Share};
use sterna_offload::trace::Trace;
use sterna_offload::{
    Bell, Cancelled, Cause, Channel, Kind, NEVER, Nanos, Offload, Operation, Outcome, Reason, Recheck, Region,
    Settings, Shares, Time,
};
use sterna_test_kit::portal::OnDemandDevice;

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
    fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
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
        Offload::with_queues(self.device.open(&self.clock, max_batch), &self.settings).unwrap()
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
fn where_nothing_is_read_again_the_members_records_are_what_counts() {
    let mut bench = Bench::new(16, false);
    bench.settings.recheck = Recheck::None;
    let offload = bench.start(32);
    (0..32).for_each(|page| bench.memory.write(page * PAGE, &[1]));
    bench.device.set_script(Script { lie: 1, ..Script::default() });
    // None is as predicted, and what they say is wrong: had the CPU looked, it would have come out.
    let map = offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
    assert_eq!(map, [true; 32]);
}

#[test]
fn where_members_fault_their_pages_are_the_cpus_whatever_else_their_records_say() {
    let mut bench = Bench::new(16, false);
    bench.settings.recheck = Recheck::None;
    let offload = bench.start(32);
    (0..32).for_each(|page| bench.memory.write(page * PAGE, &[1]));
    bench.device.set_script(Script { page_fault: 1, ..Script::default() });
    let map = offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
    assert_eq!(map, [false; 32]);
    assert_eq!(by_device(&offload).1, [(Cause::PageFault, 32)]);
}

#[test]
fn a_lie_found_in_a_sample_has_the_whole_batch_done_again() {
    let mut bench = Bench::new(16, false);
    bench.settings.recheck = Recheck::OneIn(8);
    let offload = bench.start(32);
    (0..32).for_each(|page| bench.memory.write(page * PAGE, &[1]));
    bench.device.set_script(Script { lie: 1, ..Script::default() });
    let map = offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
    assert_eq!(map, [false; 32]);
    assert_eq!(by_device(&offload).1, [(Cause::WrongResult, 32)]);
}

#[test]
fn a_range_is_zero_up_to_the_page_in_which_the_device_stopped_and_goes_on_behind_it() {
    for coarse in [false, true] {
        let mut bench = Bench::new(16, false);
        bench.settings.recheck = Recheck::None;
        bench.device.set_script(Script { coarse, ..Script::default() });
        let offload = bench.start(1);
        let normal = [0, 7, 8, 13, 31];
        normal.iter().for_each(|page| bench.memory.write(page * PAGE + 4090, &[1]));
        for _ in 0..3 {
            let map = offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
            assert_eq!((0..32).filter(|page| !map[*page]).collect::<Vec<_>>(), normal, "coarse: {coarse}");
        }
        assert_eq!(by_device(&offload), (96, vec![]));
    }
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
        for round in 0..10 {
            // Other answers each time: those of the round before are none.
            (0..32).for_each(|page| bench.memory.write(page * PAGE, &[round]));
            assert_eq!(bench.checksums(&offload), bench.right_checksums(), "round {round}");
        }
        assert_eq!(by_device(&offload), (320, vec![]), "batches of {max_batch}");
        assert_eq!(bench.device.overflows.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn a_device_out_of_service_is_passed_over_and_the_others_do_its_work() {
    let bench = Bench::new(16, false);
    let other = Fake::new("dsa1", DeviceKind::Dsa, &[(16, false)], 2, Script::default());
    let queues = [&bench.device, &other].map(|device| device.open(&bench.clock, 32)).into_iter().flatten().collect();
    let offload = Offload::with_queues(queues, &bench.settings).unwrap();
    bench.device.set_script(Script { lost: 1, ..Script::default() });
    for _ in 0..10 {
        assert_eq!(bench.checksums(&offload), bench.right_checksums());
    }
    assert_eq!(offload.report().taken_out.len(), 1);
    assert_eq!(by_device(&offload), (320, vec![(Cause::Timeout, 32)]));
}

#[test]
fn a_device_that_refused_all_retries_is_asked_once_per_batch_until_it_takes_one() {
    let mut bench = Bench::new(1, false);
    bench.settings.retries = 5;
    let offload = bench.start(32);
    let channel = offload.channel();
    let page = bench.region.range(0, PAGE).unwrap();
    let occupy = || {
        bench.device.set_script(Script { slowness: 10_000, ..Script::default() });
        let mut batch = channel.batch(Operation::Checksum);
        batch.push(&page).unwrap();
        channel.submit(batch).unwrap().into_id();
        bench.device.set_script(Script::default());
    };
    let retries = || offload.report().operations[0].engines.iter().map(|of| of.retries).sum::<u64>();
    occupy();
    for expected in [6, 7, 8] {
        offload.checksum(&page).unwrap();
        assert_eq!(retries(), expected);
    }
    assert!(channel.wait(NEVER).is_some());
    // It takes one, and is worth waiting for again.
    occupy();
    offload.checksum(&page).unwrap();
    assert_eq!(retries(), 8 + 6);
    assert!(channel.wait(NEVER).is_some());
    assert_eq!(by_device(&offload), (2, vec![(Cause::QueueFull, 4)]));
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

#[test]
fn a_lease_holds_for_all_that_touches_it_and_for_nothing_beside_it() {
    let bench = Bench::new(16, false);
    let offload = bench.start(32);
    let channel = offload.channel();
    let range = |from: usize, to: usize| bench.region.range(from, to - from).unwrap();
    let place = |from: usize, to: usize| {
        let mut batch = channel.batch(Operation::Place);
        batch.push_input(to - from, &range(from, to)).unwrap().fill(7);
        channel.submit(batch).map(|ticket| ticket.into_id()).map_err(|(reason, _)| reason)
    };
    place(4 * PAGE, 5 * PAGE).unwrap();
    bench.device.halt();
    assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Leased);
    let leased = (4 * PAGE, 5 * PAGE);
    for (from, to) in [(leased.0 - 8, leased.0 + 1), (leased.1 - 1, leased.1 + 8), (leased.0 - 8, leased.1 + 8), leased]
    {
        if to - from <= PAGE {
            assert_eq!(place(from, to), Err(Reason::Leased), "{from:#x}..{to:#x}");
        }
        assert!(offload.leases().covers(&range(from, to)), "{from:#x}..{to:#x}");
    }
    for (from, to) in [(leased.0 - 8, leased.0), (leased.1, leased.1 + 8)] {
        assert!(!offload.leases().covers(&range(from, to)));
        place(from, to).unwrap();
        assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Done);
    }
}

#[test]
fn an_old_ticket_says_nothing_of_the_batch_that_came_into_its_place() {
    let mut bench = Bench::new(16, false);
    bench.settings.in_flight = 1;
    let offload = bench.start(32);
    let channel = offload.channel();
    let submit = || {
        let mut batch = channel.batch(Operation::ZeroMap);
        batch.push(&bench.region.range(0, PAGE).unwrap()).unwrap();
        channel.submit(batch).unwrap()
    };
    let old = submit();
    assert!(channel.wait(NEVER).is_some());
    let new = submit().into_id();
    assert_ne!(old.id(), new);
    assert!(matches!(old.cancel(), Cancelled::Delivered));
    assert_eq!(channel.wait(NEVER).map(|done| done.ticket), Some(new));
}

/// Time that passes when it is told to.
#[derive(Debug)]
struct Still(AtomicU64);

impl Time for Still {
    fn now(&self) -> Nanos {
        self.0.load(Ordering::Relaxed)
    }

    fn wait(&self, _bell: &Bell, _heard: u64, until: Nanos) {
        self.0.fetch_max(until, Ordering::Relaxed);
    }
}

/// A trace that is written nowhere. The device's first descriptor is answered while the completion of another is written down.
struct Meanwhile {
    device: Arc<OnDemandDevice>,
    answers: Arc<AtomicBool>,
    crc: u32,
}

impl io::Write for Meanwhile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.starts_with(b"c ") && self.answers.load(Ordering::Relaxed) {
            self.device.answer(0, self.crc.into());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Two checksums under way on a device in the test's hands, each by itself; the right answers.
struct Pair {
    offload: Arc<Offload>,
    channel: Channel,
    device: Arc<OnDemandDevice>,
    /// Whether the first is answered in the moment in which the completion of another is written down.
    answers_meanwhile: Arc<AtomicBool>,
    time: Arc<Still>,
    right: [u32; 2],
    _memory: Arc<Memory>,
}

impl Pair {
    fn new() -> Pair {
        let memory = Memory::new(2);
        memory.write(PAGE, &[1]);
        let right = [0, PAGE].map(|at| crc32c(&memory.read(at, PAGE)));
        let device = Arc::new(OnDemandDevice::default());
        let answers_meanwhile = Arc::new(AtomicBool::new(false));
        let time = Arc::new(Still(AtomicU64::new(1_000)));
        let mut settings = Settings::default();
        (settings.threads, settings.time) = (false, time.clone());
        let meanwhile = Meanwhile { device: device.clone(), answers: answers_meanwhile.clone(), crc: right[0] };
        settings.trace = Some(Arc::new(Trace::new(Box::new(io::LineWriter::new(meanwhile)))));
        let mut info = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", DeviceKind::Dsa)), Mode::Shared, 16);
        info.max_batch = 1;
        let offload =
            Offload::with_queues(vec![WorkQueue::with_portal(info, device.clone()).unwrap()], &settings).unwrap();
        let region = memory.region();
        let channel = offload.channel();
        let mut batch = channel.batch(Operation::Checksum);
        for page in 0..2 {
            batch.push(&region.range(page * PAGE, PAGE).unwrap()).unwrap();
        }
        channel.submit(batch).unwrap().into_id();
        Pair { offload, channel, device, answers_meanwhile, time, right, _memory: memory }
    }

    fn pass(&self, time: Duration) {
        self.time.0.fetch_add(u64::try_from(time.as_nanos()).unwrap(), Ordering::Relaxed);
    }

    fn assert_both_by_the_device(&self) {
        let done = self.channel.poll().expect("both are answered by now");
        assert_eq!([done.batch.checksum(0), done.batch.checksum(1)], self.right);
        assert!(self.offload.report().taken_out.is_empty());
        assert_eq!(by_device(&self.offload), (2, vec![]));
    }
}

#[test]
fn an_answer_that_comes_while_the_clock_is_read_counts() {
    let pair = Pair::new();
    pair.answers_meanwhile.store(true, Ordering::Relaxed);
    // Nobody has looked for a long time; the second has been answered, the first is just being.
    pair.pass(Duration::from_secs(60));
    pair.device.answer(1, pair.right[1].into());
    pair.assert_both_by_the_device();
}

#[test]
fn an_answer_is_waited_for_as_long_as_others_of_the_device_come() {
    let pair = Pair::new();
    pair.pass(Duration::from_millis(1_500));
    pair.device.answer(1, pair.right[1].into());
    assert!(pair.channel.poll().is_none(), "the device lives");
    pair.pass(Duration::from_millis(900));
    assert!(pair.channel.poll().is_none());
    pair.device.answer(0, pair.right[0].into());
    pair.assert_both_by_the_device();
}

#[test]
fn an_answer_that_never_comes_is_given_up_in_the_end() {
    let pair = Pair::new();
    pair.pass(Duration::from_millis(1_500));
    pair.device.answer(1, pair.right[1].into());
    assert!(pair.channel.poll().is_none());
    pair.pass(Duration::from_secs(1));
    let done = pair.channel.poll().expect("done by the CPU");
    assert_eq!([done.batch.checksum(0), done.batch.checksum(1)], pair.right);
    assert_eq!(pair.offload.report().taken_out.len(), 1);
    assert_eq!(pair.offload.report().requests.quarantined, 1);
}

#[test]
fn what_writes_guest_memory_outlives_its_device_and_leaves_no_lease() {
    for answered in [true, false] {
        let bench = Bench::new(16, false);
        let portal = Arc::new(OnDemandDevice::default());
        let mut info = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", DeviceKind::Dsa)), Mode::Shared, 16);
        info.max_batch = 1;
        let queue = WorkQueue::with_portal(info, portal.clone()).unwrap();
        let offload = Offload::with_queues(vec![queue], &bench.settings).unwrap();
        let channel = offload.channel();
        let mut batch = channel.batch(Operation::Checksum);
        batch.push(&bench.region.range(0, PAGE).unwrap()).unwrap();
        let read = channel.submit(batch).unwrap().into_id();
        let mut batch = channel.batch(Operation::Place);
        batch.push_input(PAGE, &bench.region.range(PAGE, PAGE).unwrap()).unwrap().fill(7);
        let write = channel.submit(batch).unwrap().into_id();

        let records = portal.submitted().into_iter().map(|of| of.record().unwrap());
        let status = |record: u64, status| {
            // SAFETY: the record is its submitter's until it has a status, and an atomic there too.
            unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(record as usize) }
                .store(status, Ordering::Release);
        };
        let [first, second] = records.collect::<Vec<_>>()[..] else { panic!("two descriptors") };
        status(first, 0x20);
        assert_eq!(channel.poll().unwrap().ticket, read);
        assert!(offload.report().taken_out[0].reason.contains("0x20"));
        assert!(channel.poll().is_none(), "the device may be at it");
        assert_eq!(offload.leases().count(), 0);

        // It does it while it is drained, or never.
        if answered {
            bench.memory.write(PAGE, &[7; PAGE]);
            status(second, 0x01);
        }
        offload.close_devices();
        bench.clock.pass(10_000_000);
        let done = channel.poll().unwrap();
        assert_eq!((done.ticket, done.outcome), (write, Outcome::Done));
        assert_eq!(bench.memory.read(PAGE, PAGE), [7; PAGE]);
        let left = by_device(&offload).1.into_iter().find(|(cause, _)| *cause == Cause::OutOfService);
        assert_eq!(left, (!answered).then_some((Cause::OutOfService, 1)));
        assert_eq!((offload.leases().count(), offload.report().requests.quarantined), (0, 0));
    }
}

#[test]
fn a_range_in_which_the_device_stopped_behind_the_end_is_not_believed() {
    let mut bench = Bench::new(16, false);
    bench.settings.recheck = Recheck::None;
    let portal = Arc::new(OnDemandDevice::default());
    let mut info = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", DeviceKind::Dsa)), Mode::Shared, 16);
    info.max_batch = 1;
    let queue = WorkQueue::with_portal(info, portal.clone()).unwrap();
    let offload = Offload::with_queues(vec![queue], &bench.settings).unwrap();
    (0..4).for_each(|page| bench.memory.write(page * PAGE, &[1]));
    let channel = offload.channel();
    let mut batch = channel.batch(Operation::ZeroMap);
    batch.push(&bench.region.range(0, 4 * PAGE).unwrap()).unwrap();
    channel.submit(batch).unwrap().into_id();
    let record = portal.submitted()[0].record().unwrap();
    let first = std::ptr::with_exposed_provenance::<AtomicU64>(record as usize);
    // SAFETY: the record is its submitter's until it has a status, and an atomic there too. Status 1, result 1, and four pages that are equal to the pattern.
    unsafe { &*first }.store((4 * PAGE as u64) << 32 | 0x0101, Ordering::Release);
    assert_eq!(channel.poll().unwrap().batch.zero_map(), [0]);
    assert!(offload.report().taken_out[0].reason.contains("behind the last"));
    assert_eq!(by_device(&offload), (4, vec![(Cause::DeviceError, 4)]));
}
