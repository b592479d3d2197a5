//! What callers can rely on, case by case, with a device in virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{Clock, Fake, Memory, PAGE, Script, crc32c};
use sterna_idxd::{Directories, Kind as DeviceKind, WorkQueue};
use sterna_memory::ram::{Backing, RamBlock};
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Grant, Share};
use sterna_offload::trace::{self, Trace};
use sterna_offload::{
    Accelerators, Batch, CallError, Cancelled, Cause, Channel, Kind, NEVER, Nanos, Offload, Operation, Outcome,
    PushError, Reason, Recheck, Region, Settings, Shares, StartError, Time,
};

struct Bench {
    clock: Arc<Clock>,
    device: Arc<Fake>,
    settings: Settings,
    queues: Vec<Arc<WorkQueue>>,
    memory: Arc<Memory>,
    region: Arc<Region>,
}

impl Bench {
    /// One DSA with one shared queue of 16 and batches of up to `max_batch`; 32 zero pages.
    fn new(max_batch: u32) -> Self {
        Self::with(DeviceKind::Dsa, max_batch)
    }

    fn with(kind: DeviceKind, max_batch: u32) -> Self {
        let clock = Clock::new();
        let device = Fake::new(
            if kind == DeviceKind::Dsa { "dsa0" } else { "iax1" },
            kind,
            &[(16, false)],
            1,
            Script::default(),
        );
        let queues = device.open(&clock, max_batch);
        let mut settings = Settings::default();
        settings.threads = false;
        settings.time = clock.clone();
        let memory = Memory::new(32);
        let region = memory.region();
        Self { clock, device, settings, queues, memory, region }
    }

    fn start(&mut self) -> Arc<Offload> {
        Offload::with_queues(std::mem::take(&mut self.queues), &self.settings).unwrap()
    }

    fn zero_map(&self, channel: &Channel) -> Batch {
        let mut batch = channel.batch(Operation::ZeroMap);
        batch.push(&self.region.range(0, 32 * PAGE).unwrap()).unwrap();
        batch
    }
}

fn fallbacks(offload: &Offload, operation: Operation, cause: Cause) -> u64 {
    let report = offload.report();
    let of = report.operations.iter().find(|of| of.operation == operation);
    of.into_iter()
        .flat_map(|of| &of.engines)
        .flat_map(|engine| &engine.fallbacks)
        .filter(|(of, _)| *of == cause)
        .map(|(_, items)| items)
        .sum()
}

fn by_device(offload: &Offload) -> u64 {
    let report = offload.report();
    report.operations.iter().flat_map(|of| &of.engines).filter(|of| of.engine != Kind::Cpu).map(|of| of.items).sum()
}

#[test]
fn a_batch_that_went_as_predicted_is_believed_without_reading_its_members_records() {
    let mut bench = Bench::new(32);
    bench.settings.recheck = Recheck::None;
    let offload = bench.start();
    let channel = offload.channel();
    // The first batch teaches that most pages are zero here, but not so many that a run of them would be asked for at once.
    (0..8).for_each(|page| bench.memory.write(page * PAGE, &[1]));
    let first = bench.zero_map(&channel);
    channel.submit(first).unwrap().into_id();
    assert_eq!(channel.wait(NEVER).unwrap().batch.zero_map(), [u64::from(u32::MAX) & !0xff]);
    (0..8).for_each(|page| bench.memory.write(page * PAGE, &[0]));
    bench.device.set_script(Script { poison: true, ..Script::default() });
    let second = bench.zero_map(&channel);
    channel.submit(second).unwrap().into_id();
    assert_eq!(channel.wait(NEVER).unwrap().batch.zero_map(), [u64::from(u32::MAX)]);
    assert_eq!(by_device(&offload), 64);
}

#[test]
fn without_batches_a_run_of_zero_pages_takes_few_descriptors_and_every_difference_is_found() {
    let mut bench = Bench::new(1);
    let offload = bench.start();
    let channel = offload.channel();
    let before = bench.device.executed();
    for _ in 0..2 {
        let batch = bench.zero_map(&channel);
        channel.submit(batch).unwrap().into_id();
        assert_eq!(channel.wait(NEVER).unwrap().batch.zero_map(), [u64::from(u32::MAX)]);
    }
    assert!(bench.device.executed() - before <= 4, "{} descriptors", bench.device.executed() - before);
    for page in [0, 7, 8, 31] {
        bench.memory.write(page * PAGE + 4095, &[1]);
    }
    let batch = bench.zero_map(&channel);
    channel.submit(batch).unwrap().into_id();
    assert_eq!(channel.wait(NEVER).unwrap().batch.zero_map(), [u64::from(u32::MAX) & !(1 | 1 << 7 | 1 << 8 | 1 << 31)]);
}

#[test]
fn a_page_fault_is_finished_by_the_cpu_and_the_caller_sees_done() {
    for max_batch in [1, 32] {
        let mut bench = Bench::new(max_batch);
        bench.device.set_script(Script { page_fault: 1, ..Script::default() });
        let offload = bench.start();
        bench.memory.write(5 * PAGE, &[1]);
        let map = offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
        assert_eq!((0..32).filter(|page| !map[*page]).collect::<Vec<_>>(), [5]);
        assert!(fallbacks(&offload, Operation::ZeroMap, Cause::PageFault) > 0);
        assert!(offload.report().taken_out.is_empty(), "a fault is nobody's fault");
    }
}

#[test]
fn a_full_queue_is_tried_so_often_and_then_the_cpu_does_it() {
    let mut bench = Bench::new(32);
    bench.settings.retries = 5;
    bench.device.set_script(Script { full: 1, ..Script::default() });
    let offload = bench.start();
    bench.device.halt();
    assert_eq!(offload.is_zero(&[bench.region.range(0, 2 * PAGE).unwrap()]), Ok(vec![true, true]));
    let report = offload.report();
    let of_device = report.operations[0].engines.iter().find(|of| of.engine == Kind::Dsa).unwrap();
    assert_eq!((of_device.retries, of_device.batches), (6, 0));
    assert_eq!(of_device.fallbacks, [(Cause::QueueFull, 2)]);
    assert!(bench.clock.pass_so_far() < 5_000_000, "retries are bounded in time");
}

#[test]
fn reads_that_a_device_never_answers_are_redone_at_once_and_its_memory_is_kept_until_it_is_closed() {
    let mut bench = Bench::new(32);
    let offload = bench.start();
    let channel = offload.channel();
    bench.memory.write(0, b"content");
    let mut batch = channel.batch(Operation::CopyChecksum);
    batch.push(&bench.region.range(0, PAGE).unwrap()).unwrap();
    let id = channel.submit(batch).unwrap().into_id();
    bench.device.halt();
    let done = channel.wait(NEVER).unwrap();
    assert_eq!((done.ticket, done.outcome), (id, Outcome::Done));
    let copy = done.batch.copy(0).to_vec();
    assert_eq!(copy[..7], *b"content");
    assert_eq!(done.batch.checksum(0), crc32c(&copy));
    let passed = bench.clock.pass_so_far();
    assert!((1_000_000_000..2_000_000_000).contains(&passed), "given up after {passed} ns");

    let report = offload.report();
    assert_eq!(report.taken_out.len(), 1);
    assert!(report.taken_out[0].reason.contains("no answer") && report.taken_out[0].quarantined_bytes > 0);
    assert!(!report.taken_out[0].quiet);
    assert_eq!(report.requests.quarantined, 1);
    assert_eq!(offload.leases().count(), 0, "it only reads");
    drop(done);
    assert_eq!(bench.region.retire().unwrap_err().uses, 1);

    // New work is the CPU's.
    assert_eq!(offload.copy(&Memory::new(1).region().range(0, 8).unwrap()), Ok(vec![0; 8]));
    offload.close_devices();
    assert_eq!(bench.region.retire(), Ok(()));
    let report = offload.report();
    assert!(report.taken_out[0].quiet && report.taken_out[0].quarantined_bytes == 0);
    assert_eq!(report.requests.quarantined, 0);
}

#[test]
fn writes_that_a_device_never_answers_leave_a_lease_that_only_closing_ends() {
    let mut bench = Bench::new(32);
    let offload = bench.start();
    let channel = offload.channel();
    let place = |at: usize| {
        let mut batch = channel.batch(Operation::Place);
        batch.push_input(PAGE, &bench.region.range(at, PAGE).unwrap()).unwrap().fill(7);
        channel.submit(batch)
    };
    place(3 * PAGE).unwrap().into_id();
    bench.device.halt();
    assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Leased);
    let start = bench.region.start().as_ptr().addr();
    assert_eq!(offload.leases().ranges(), vec![start + 3 * PAGE..start + 4 * PAGE]);
    assert!(offload.leases().covers(&bench.region.range(4 * PAGE - 1, 1).unwrap()));
    assert!(matches!(place(3 * PAGE), Err((Reason::Leased, _))));
    // Beside it, and by the CPU.
    place(4 * PAGE).unwrap().into_id();
    assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Done);
    assert_eq!(bench.memory.read(4 * PAGE, 2), [7, 7]);

    offload.close_devices();
    assert_eq!(offload.leases().count(), 0);
    place(3 * PAGE).unwrap().into_id();
    assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Done);
}

#[test]
fn a_device_that_only_is_slow_is_waited_for_as_long_as_anything_of_it_completes() {
    let mut bench = Bench::new(1);
    // Each descriptor takes up to some 0.5 s; eight are under way at a time.
    bench.device.set_script(Script { slowness: 100_000, ..Script::default() });
    let offload = bench.start();
    let channel = offload.channel();
    let mut batch = channel.batch(Operation::Checksum);
    for page in 0..32 {
        batch.push(&bench.region.range(page * PAGE, PAGE).unwrap()).unwrap();
    }
    channel.submit(batch).unwrap().into_id();
    let done = channel.wait(NEVER).unwrap();
    assert!((0..32).all(|page| done.batch.checksum(page) == crc32c(&[0; PAGE])));
    assert!(offload.report().taken_out.is_empty());
    assert_eq!(by_device(&offload), 32);
}

#[test]
fn the_credits_of_a_dedicated_queue_come_back_with_every_completion() {
    let mut bench = Bench::new(32);
    let device = Fake::new("dsa5", DeviceKind::Dsa, &[(2, true)], 1, Script::default());
    bench.queues = device.open(&bench.clock, 32);
    let offload = bench.start();
    for _ in 0..50 {
        offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
    }
    // Dropped tickets give theirs back too, when the backstop sees them.
    let channel = offload.channel();
    for _ in 0..2 {
        drop(channel.submit(bench.zero_map(&channel)).unwrap());
    }
    while offload.run_backstop() != NEVER {
        bench.clock.pass(1_000_000);
    }
    offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
    assert_eq!(by_device(&offload), 53 * 32);
    assert_eq!(fallbacks(&offload, Operation::ZeroMap, Cause::QueueFull), 0);
    assert_eq!(device.overflows.load(Ordering::SeqCst), 0);
}

#[test]
fn while_others_wait_batches_are_as_small_as_the_share_says() {
    /// Four pages at a time.
    struct Small;
    impl Share for Small {
        fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
            sterna_offload::share::Fifo.ask(ask, now)
        }
        fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
            sterna_offload::share::Fifo.done(grant, sojourn, now);
        }
        fn dropped(&mut self, grant: Grant) {
            sterna_offload::share::Fifo.dropped(grant);
        }
        fn largest_batch(&self) -> u64 {
            4 * PAGE as u64
        }
    }
    let mut bench = Bench::new(32);
    bench.settings.shares = Shares::new(|_| Box::new(Small));
    let offload = bench.start();
    let before = bench.device.executed();
    assert_eq!(offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]), Ok(vec![true; 32]));
    assert_eq!(bench.device.executed() - before, 8);
    // By bytes: two ranges of two pages, one of more.
    let before = bench.device.executed();
    offload
        .call(Operation::Checksum, |batch| {
            let mut push = |at, pages| batch.push(&bench.region.range(at * PAGE, pages * PAGE).unwrap()).map(drop);
            (0..8).try_for_each(|at| push(2 * at, 2))?;
            push(16, 9)
        })
        .unwrap();
    assert_eq!(bench.device.executed() - before, 5);
}

#[test]
fn a_lying_device_is_found_out_and_its_whole_batch_is_done_again() {
    let mut bench = Bench::new(32);
    bench.settings.recheck = Recheck::All;
    bench.device.set_script(Script { lie: 1, ..Script::default() });
    let offload = bench.start();
    (0..32).for_each(|page| bench.memory.write(page * PAGE + 100, &[1]));
    assert_eq!(offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]), Ok(vec![false; 32]));
    let report = offload.report();
    assert!(report.taken_out[0].reason.contains("zero"), "{report:?}");
    assert_eq!(fallbacks(&offload, Operation::ZeroMap, Cause::WrongResult), 32);
}

#[test]
fn one_in_so_many_zero_pages_is_read_again_over_all_batches() {
    let mut bench = Bench::new(32);
    bench.settings.recheck = Recheck::OneIn(10);
    let offload = bench.start();
    for _ in 0..10 {
        offload.is_zero(&[bench.region.range(0, 31 * PAGE).unwrap()]).unwrap();
    }
    assert_eq!(offload.report().operations[0].engines[0].sampled, 31);
}

#[test]
fn a_dropped_ticket_is_never_heard_of_and_its_request_comes_back() {
    let mut bench = Bench::new(32);
    let offload = bench.start();
    let channel = offload.channel();
    let batch = bench.zero_map(&channel);
    drop(channel.submit(batch).unwrap());
    assert_eq!(bench.region.uses(), 1);
    assert!(channel.wait_for(Duration::from_secs(1)).is_none());
    assert_eq!((channel.in_flight(), bench.region.uses()), (0, 0));
    let requests = offload.report().requests;
    assert_eq!(requests.made, requests.free);
}

#[test]
fn an_old_ticket_means_nothing_to_the_batch_that_came_after_it() {
    let mut bench = Bench::new(32);
    bench.settings.in_flight = 1;
    let offload = bench.start();
    let channel = offload.channel();
    let old = channel.submit(bench.zero_map(&channel)).unwrap();
    assert_eq!(channel.wait(NEVER).map(|done| done.ticket), Some(old.id()));
    let new = channel.submit(bench.zero_map(&channel)).unwrap().into_id();
    assert_ne!(old.id(), new);
    drop(old);
    assert!(matches!(channel.submit(bench.zero_map(&channel)), Err((Reason::Full, _))));
    assert_eq!(channel.wait(NEVER).map(|done| done.ticket), Some(new));
}

#[test]
fn what_the_cpu_is_said_to_be_sooner_at_it_does_and_the_share_hears_how_long_it_took() {
    struct Spilling(Arc<AtomicU64>);
    impl Share for Spilling {
        fn ask(&mut self, _: &AdmissionRequest, _: Nanos) -> AdmissionDecision {
            AdmissionDecision::Spill
        }
        fn done(&mut self, _: Grant, _: Nanos, _: Nanos) {
            panic!("nothing was let in");
        }
        fn dropped(&mut self, _: Grant) {
            panic!("nothing was let in");
        }
        fn spilled(&mut self, bytes: u64, took: Nanos, now: Nanos) {
            assert!(took > 0 && now >= took);
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }
    }
    let mut bench = Bench::new(32);
    let spilled = Arc::new(AtomicU64::new(0));
    let heard = spilled.clone();
    bench.settings.shares = Shares::new(move |_| Box::new(Spilling(heard.clone())));
    let offload = bench.start();
    assert_eq!(offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]), Ok(vec![true; 32]));
    assert_eq!(spilled.load(Ordering::Relaxed), 32 * PAGE as u64);
    assert_eq!((fallbacks(&offload, Operation::ZeroMap, Cause::Spilled), by_device(&offload)), (32, 0));
}

/// Lets nobody in until a moment.
struct Gate(Nanos);

impl Share for Gate {
    fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        if now >= self.0 {
            return sterna_offload::share::Fifo.ask(ask, now);
        }
        AdmissionDecision::Wait { until: self.0 }
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        sterna_offload::share::Fifo.done(grant, sojourn, now);
    }

    fn dropped(&mut self, grant: Grant) {
        sterna_offload::share::Fifo.dropped(grant);
    }
}

#[test]
fn what_waits_for_its_share_is_queued_and_can_be_taken_back_whole() {
    let mut bench = Bench::new(32);
    bench.settings.shares = Shares::new(|_| Box::new(Gate(1_000_000)));
    let offload = bench.start();
    let channel = offload.channel();
    let ticket = channel.submit(bench.zero_map(&channel)).unwrap();
    let Cancelled::Returned(batch) = ticket.cancel() else { panic!("no device has it") };
    assert_eq!((batch.len(), bench.region.uses(), channel.in_flight()), (32, 0, 0));
    let ticket = channel.submit(batch).unwrap();
    assert_eq!(by_device(&offload), 0);
    let done = channel.wait(NEVER).unwrap();
    assert_eq!((done.ticket, done.batch.zero_map()), (ticket.id(), &[u64::from(u32::MAX)][..]));
    assert_eq!(by_device(&offload), 32);
    assert!(bench.clock.pass_so_far() >= 1_000_000);
    assert!(matches!(ticket.cancel(), Cancelled::Delivered));
}

#[test]
fn at_shutdown_what_is_queued_is_given_back_and_what_is_with_a_device_is_waited_for() {
    let mut bench = Bench::new(32);
    let calls = Arc::new(AtomicU64::new(0));
    let count = calls.clone();
    /// Lets the first in.
    struct First(Arc<AtomicU64>);
    impl Share for First {
        fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
            if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
                return sterna_offload::share::Fifo.ask(ask, now);
            }
            AdmissionDecision::Wait { until: now + 1_000_000_000_000 }
        }
        fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
            sterna_offload::share::Fifo.done(grant, sojourn, now);
        }
        fn dropped(&mut self, grant: Grant) {
            sterna_offload::share::Fifo.dropped(grant);
        }
    }
    bench.settings.shares = Shares::new(move |_| Box::new(First(count.clone())));
    let offload = bench.start();
    let channel = offload.channel();
    let first = channel.submit(bench.zero_map(&channel)).unwrap().into_id();
    let second = channel.submit(bench.zero_map(&channel)).unwrap().into_id();
    offload.shutdown();
    assert!(matches!(channel.submit(bench.zero_map(&channel)), Err((Reason::Closed, _))));
    let mut outcomes: Vec<_> = std::iter::from_fn(|| channel.poll()).map(|done| (done.ticket, done.outcome)).collect();
    outcomes.sort_by_key(|(ticket, _)| *ticket);
    let mut expected = [(first, Outcome::Done), (second, Outcome::Cancelled)];
    expected.sort_by_key(|(ticket, _)| *ticket);
    assert_eq!(outcomes, expected);
    assert_eq!(bench.region.uses(), 0);
}

#[test]
fn the_backstop_completes_what_nobody_polls_and_has_nothing_to_do_afterwards() {
    let mut bench = Bench::new(32);
    let offload = bench.start();
    assert_eq!(offload.run_backstop(), NEVER);
    let channel = offload.channel();
    drop(channel.submit(bench.zero_map(&channel)).unwrap());
    let mut turns = 0;
    loop {
        let next = offload.run_backstop();
        if next == NEVER {
            break;
        }
        bench.clock.pass_until(next);
        turns += 1;
    }
    assert!(turns <= 6, "{turns} turns for one batch");
    assert_eq!(bench.region.uses(), 0);
}

#[test]
fn waiting_sleeps_until_a_completion_is_predicted_and_looks_a_few_times_at_most() {
    #[derive(Debug)]
    struct Counting(Arc<Clock>, AtomicU64);
    impl Time for Counting {
        fn now(&self) -> Nanos {
            self.0.now()
        }
        fn wait(&self, bell: &sterna_offload::Bell, heard: u64, until: Nanos) {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.wait(bell, heard, until);
        }
    }
    let mut bench = Bench::new(32);
    let counting = Arc::new(Counting(bench.clock.clone(), AtomicU64::new(0)));
    bench.settings.time = counting.clone();
    let offload = bench.start();
    let channel = offload.channel();
    for _ in 0..20 {
        let batch = bench.zero_map(&channel);
        channel.submit(batch).unwrap().into_id();
        assert!(channel.wait(NEVER).is_some());
    }
    let waits = counting.1.load(Ordering::Relaxed);
    assert!(waits <= 80, "{waits} waits for 20 batches");
    // A deadline is kept.
    channel.submit(bench.zero_map(&channel)).unwrap().into_id();
    bench.device.halt();
    let deadline = offload.deadline(Duration::from_millis(3));
    assert!(channel.wait(deadline).is_none());
    assert!(bench.clock.pass_so_far() < deadline + 1_000_000);
}

#[test]
fn a_ram_block_is_a_region_that_keeps_it() {
    let memory = Memory::new(2);
    memory.write(PAGE, &[1]);
    let start = memory.region().start();
    // SAFETY: the memory is kept by the block, and accessed through raw pointers only.
    let block = unsafe { RamBlock::new("ram", start, 2 * PAGE, Backing::Other) }.owned_by(memory);
    let region = Region::of_block(&block, None).unwrap();
    drop(block);
    let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    assert_eq!(offload.is_zero(&[region.range(0, 2 * PAGE).unwrap()]), Ok(vec![true, false]));
}

#[test]
fn retired_memory_takes_no_new_work() {
    let mut bench = Bench::new(32);
    let offload = bench.start();
    let channel = offload.channel();
    let batch = bench.zero_map(&channel);
    let under_way = channel.submit(bench.zero_map(&channel)).unwrap().into_id();
    assert_eq!(bench.region.retire().unwrap_err().uses, 1);
    let Err((Reason::Retired, batch)) = channel.submit(batch) else { panic!("the region is retired") };
    assert_eq!(batch.len(), 32);
    assert_eq!(channel.wait(NEVER).map(|done| done.ticket), Some(under_way));
    assert_eq!(bench.region.retire_by(0, &*bench.clock), Ok(()));
}

#[test]
fn devices_take_turns_and_those_of_the_pages_node_come_first() {
    let clock = Clock::new();
    let devices: Vec<_> = (0..3)
        .map(|number| Fake::new(&format!("dsa{number}"), DeviceKind::Dsa, &[(16, false)], number, Script::default()))
        .collect();
    let nodes = [Some(0), Some(1), Some(1)];
    let queues = devices.iter().zip(nodes).flat_map(|(device, node)| device.open_on(&clock, 32, node)).collect();
    let mut settings = Settings::default();
    settings.threads = false;
    settings.time = clock.clone();
    let offload = Offload::with_queues(queues, &settings).unwrap();
    let (memory, before) = (Memory::new(4), devices.iter().map(|device| device.executed()).collect::<Vec<_>>());
    // SAFETY: the memory outlives the region, which keeps it.
    let region = unsafe { Region::on_node(memory.region().start(), 4 * PAGE, Some(memory.clone()), 1) };
    let executed =
        || devices.iter().zip(&before).map(|(device, before)| device.executed() - before).collect::<Vec<_>>();
    for _ in 0..8 {
        offload.is_zero(&[region.range(0, 4 * PAGE).unwrap()]).unwrap();
    }
    assert_eq!(executed()[0], 0);
    assert!(executed()[1] >= 3 && executed()[2] >= 3, "{:?}", executed());
    for _ in 0..9 {
        offload.is_zero(&[memory.region().range(0, 4 * PAGE).unwrap()]).unwrap();
    }
    assert!(executed()[0] >= 3, "{:?}", executed());
}

#[test]
fn inflating_on_the_device_and_on_the_cpu_give_the_same_pages() {
    let mut bench = Bench::with(DeviceKind::Iaa, 1);
    let offload = bench.start();
    assert!(offload.accelerates(Operation::Deflate) && !offload.accelerates(Operation::ZeroMap));
    let content: Vec<u8> = (0..PAGE).map(|at| (at / 7) as u8).collect();
    bench.memory.write(0, &content);
    let cpu = Offload::start(&Accelerators::cpu(), &bench.settings).unwrap();
    let range = bench.region.range(0, PAGE).unwrap();
    for (number, by) in [&cpu, &offload].into_iter().enumerate() {
        let batch = by.call(Operation::Deflate, |batch| batch.push(&range).map(drop)).unwrap();
        let stream = match batch.deflated(0) {
            Some(stream) => stream.to_vec(),
            None => panic!("engine {number}: it compresses, or fits as it is"),
        };
        for (other, by) in [&cpu, &offload].into_iter().enumerate() {
            let at = (1 + 2 * number + other) * PAGE;
            let to = bench.region.range(at, PAGE).unwrap();
            let batch = by
                .call(Operation::Inflate, |batch| {
                    batch.push_input(stream.len(), &to)?.copy_from_slice(&stream);
                    Ok(())
                })
                .unwrap();
            assert_eq!(batch.placed(0), Some(PAGE), "deflated by {number}, inflated by {other}");
            assert_eq!(bench.memory.read(at, PAGE), content);
        }
    }
}

#[test]
fn a_run_can_be_traced_and_the_trace_read_again() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let writing = Arc::new(Trace::new(Box::new(std::io::BufWriter::new(file.reopen().unwrap()))));
    let mut bench = Bench::new(8);
    bench.settings.trace = Some(writing.clone());
    let offload = bench.start();
    bench.memory.write(9 * PAGE, &[1]);
    offload.is_zero(&[bench.region.range(0, 32 * PAGE).unwrap()]).unwrap();
    offload.checksum(&bench.region.range(0, PAGE).unwrap()).unwrap();
    writing.finish().unwrap();

    let exchanges = trace::read(std::io::BufReader::new(file.reopen().unwrap())).unwrap();
    assert_eq!(exchanges.len(), 5, "four batches of eight, and a checksum");
    for exchange in &exchanges[..4] {
        assert_eq!((exchange.descriptor[7], exchange.members.len(), &*exchange.queue), (0x01, 8, "dsa0/wq0.0"));
        assert!(exchange.members.iter().all(|member| member[7] == 0x06));
        let answer = exchange.answer.as_ref().unwrap();
        assert_eq!((answer.record.len(), answer.members.len()), (32, 8));
        // A batch's status is what its members' are made of.
        let all_well = answer.members.iter().all(|member| member[0] == 1);
        assert_eq!(answer.record[0], if all_well { 1 } else { 5 });
        assert!(answer.seen > exchange.submitted);
    }
    assert_eq!(exchanges[4].descriptor[7], 0x10);
    let record = &exchanges[4].answer.as_ref().unwrap().record;
    assert_eq!(u32::from_le_bytes(record[16..20].try_into().unwrap()), crc32c(&[0; PAGE]));
}

#[test]
fn items_that_do_not_fit_their_operation_are_refused() {
    let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    let memory = Memory::new(200);
    let region = memory.region();
    let channel = offload.channel();
    let range = |offset, len| region.range(offset, len).unwrap();
    let mut zero_map = channel.batch(Operation::ZeroMap);
    assert!(matches!(zero_map.push(&range(8, PAGE)), Err(PushError::Shape { .. })));
    assert!(matches!(zero_map.push_pair(&range(0, PAGE), &range(0, PAGE)), Err(PushError::Kind { .. })));
    assert!(matches!(zero_map.push(&range(0, 129 * PAGE)), Err(PushError::Shape { .. })), "it would never fit");
    assert_eq!((zero_map.push(&range(0, 128 * PAGE)), zero_map.room()), (Ok(0), 0));
    assert!(matches!(zero_map.push(&range(0, PAGE)), Err(PushError::Full { .. })));
    let mut compare = channel.batch(Operation::Compare);
    assert!(matches!(compare.push_pair(&range(0, PAGE), &range(0, 8)), Err(PushError::Shape { .. })));
    assert!(matches!(compare.push(&range(0, PAGE)), Err(PushError::Kind { .. })));
    let mut place = channel.batch(Operation::Place);
    assert!(matches!(place.push_input(7, &range(0, 8)), Err(PushError::Shape { .. })));
    let mut inflate = channel.batch(Operation::Inflate);
    assert!(matches!(inflate.push_input(1 << 20, &range(0, 8)), Err(PushError::Shape { .. })), "it would never fit");
    let mut delta = channel.batch(Operation::CreateDelta);
    assert!(matches!(delta.push_pair(&range(4, 8), &range(0, 8)), Err(PushError::Shape { .. })));
    assert!(matches!(channel.submit(channel.batch(Operation::Copy)), Err((Reason::Empty, _))));
    assert!(region.range(199 * PAGE, PAGE + 1).is_err() && region.range(usize::MAX, 2).is_err());
    assert!(offload.checksum(&range(0, 0)).unwrap_err().to_string().contains("bytes"));
    region.retire().unwrap();
    assert_eq!(offload.checksum(&range(0, 8)), Err(CallError::Refused(Reason::Retired)));
}

#[test]
fn what_is_asked_for_by_name_and_not_there_is_an_error_and_auto_says_why() {
    let empty = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.directories = Directories { sysfs: empty.path().join("none"), dev: empty.path().into() };
    for name in ["dsa", "iaa", "dsa:/dev/dsa/wq0.0", "dsa,iaa"] {
        let error = Offload::start(&name.parse().unwrap(), &settings).unwrap_err();
        let StartError::Missing { selector, why } = &error else { panic!("{error}") };
        assert!(name.contains(selector) && why.contains("modprobe idxd"), "{error}");
    }
    let auto = Offload::start(&Accelerators::auto(), &settings).unwrap();
    let summary = auto.summary();
    assert!(summary.starts_with("cpu; not used: dsa, iaa:") && !summary.contains('\n'), "{summary}");
    settings.batch_pages = 0;
    assert!(matches!(
        Offload::start(&Accelerators::cpu(), &settings),
        Err(StartError::Setting { name: "batch_pages", .. })
    ));
}

#[test]
fn the_summary_names_queues_and_ways() {
    let mut bench = Bench::new(32);
    let offload = bench.start();
    let queue = "dsa dsa0/wq0.0 (shared, mapped portal, ENQCMD, batches of 32), cpu";
    let share = "dsa0 is shared by weight among the guests of this process";
    assert_eq!(offload.summary(), format!("{queue}; {share}"));
    assert_eq!(serde_json::to_value(offload.report()).unwrap()["requests"]["quarantined"], 0);
}
