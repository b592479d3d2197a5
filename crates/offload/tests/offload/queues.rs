//! Which of a device's queues gets what: urgent work and other, operations that not all of them have.

use std::sync::Arc;

use crate::support::{Clock, Fake, Memory, PAGE, Script};
use sterna_idxd::{Kind as DeviceKind, OperationSet, QueueInfo};
use sterna_offload::{Cause, Channel, Kind, NEVER, Offload, Operation, Outcome, Settings};

const PAGES: usize = 8;

struct Bench {
    clock: Arc<Clock>,
    device: Arc<Fake>,
    offload: Arc<Offload>,
    memory: Arc<Memory>,
}

impl Bench {
    /// A DSA with shared queues of these sizes, of which `say` says more.
    fn new(sizes: &[u32], say: impl Fn(usize, &mut QueueInfo)) -> Bench {
        let (clock, memory) = (Clock::new(), Memory::new(PAGES));
        let sizes: Vec<_> = sizes.iter().map(|size| (*size, false)).collect();
        let device = Fake::new("dsa0", DeviceKind::Dsa, &sizes, 1, Script::default());
        let mut settings = Settings::default();
        (settings.threads, settings.time) = (false, clock.clone());
        let offload = Offload::with_queues(device.open_as(&clock, 32, None, say), &settings).unwrap();
        Bench { clock, device, offload, memory }
    }

    fn submit(&self, channel: &Channel, operation: Operation) {
        let mut batch = channel.batch(operation);
        batch.push(&self.memory.region().range(0, PAGES * PAGE).unwrap()).unwrap();
        channel.submit(batch).unwrap().into_id();
    }

    /// Does so many batches, one after another.
    fn batches(&self, channel: &Channel, count: u32) {
        for _ in 0..count {
            self.submit(channel, Operation::ZeroMap);
            assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Done);
        }
    }

    /// Pages left to the CPU, by cause.
    fn left(&self) -> Vec<(Cause, u64)> {
        let report = self.offload.report();
        let engines = report.operations.iter().flat_map(|of| &of.engines).filter(|of| of.engine != Kind::Cpu);
        engines.flat_map(|of| of.fallbacks.clone()).collect()
    }
}

/// As `sterna accel plan` names and ranks them.
fn planned(queue: usize, info: &mut QueueInfo) {
    let (label, priority) = [("sterna-bulk", 5), ("sterna-switchover", 15)][queue];
    (info.label, info.priority) = (Some(label.into()), Some(priority));
}

#[test]
fn the_switchovers_queue_gets_a_guests_work_while_it_stands_and_nothing_else() {
    let bench = Bench::new(&[16, 16], planned);
    let (guest, other) = (bench.offload.guest(1), bench.offload.guest(1));
    let (channel, another) = (bench.offload.channel_for(&guest), bench.offload.channel_for(&other));
    bench.batches(&channel, 5);
    assert_eq!(bench.device.taken(), [5, 0]);
    guest.set_urgent(true);
    bench.batches(&channel, 3);
    bench.batches(&another, 2);
    assert_eq!(bench.device.taken(), [7, 3]);
    // It runs on after all.
    guest.set_urgent(false);
    bench.batches(&channel, 4);
    bench.batches(&bench.offload.channel(), 1);
    assert_eq!(bench.device.taken(), [12, 3]);
}

#[test]
fn bulk_that_finds_its_queue_full_goes_to_the_cpu_rather_than_to_the_switchovers() {
    let bench = Bench::new(&[1, 16], planned);
    let channel = bench.offload.channel_for(&bench.offload.guest(1));
    // The one entry is taken for ever.
    bench.device.set_script(Script { lost: 1, ..Script::default() });
    bench.submit(&channel, Operation::ZeroMap);
    bench.device.set_script(Script::default());
    bench.submit(&channel, Operation::ZeroMap);
    assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Done);
    assert_eq!((bench.device.taken(), bench.left()), (vec![1, 0], vec![(Cause::QueueFull, PAGES as u64)]));
}

#[test]
fn urgent_work_that_finds_the_switchovers_queue_full_takes_the_other() {
    let bench = Bench::new(&[16, 1], planned);
    let guest = bench.offload.guest(1);
    guest.set_urgent(true);
    let channel = bench.offload.channel_for(&guest);
    bench.device.set_script(Script { slowness: 100, ..Script::default() });
    bench.submit(&channel, Operation::ZeroMap);
    bench.submit(&channel, Operation::ZeroMap);
    // Until after the first pause.
    bench.clock.pass(3_000);
    let before = bench.device.taken();
    (0..2).for_each(|_| assert_eq!(channel.wait(NEVER).unwrap().outcome, Outcome::Done));
    assert_eq!((before[1], bench.device.taken(), bench.left()), (1, vec![1, 1], vec![]));
}

#[test]
fn queues_that_nothing_tells_apart_take_turns_whatever_is_urgent() {
    let bench = Bench::new(&[16, 16], |_, _| {});
    let guest = bench.offload.guest(1);
    let channel = bench.offload.channel_for(&guest);
    for urgent in [false, true] {
        guest.set_urgent(urgent);
        bench.batches(&channel, 4);
    }
    assert_eq!(bench.device.taken(), [4, 4]);
}

#[test]
fn a_queue_is_not_sent_an_operation_that_it_is_not_configured_for() {
    // The first has all but compare pattern, the second all.
    let bench = Bench::new(&[16, 16], |queue, info| {
        info.operations = Some(OperationSet::of((0..=0x11).filter(|code| queue == 1 || *code != 0x06)));
    });
    bench.batches(&bench.offload.channel(), 4);
    assert_eq!((bench.device.taken(), bench.left()), (vec![0, 4], vec![]));
}

#[test]
fn what_no_queue_is_configured_for_is_the_cpus_and_no_device_is_asked() {
    let bench = Bench::new(&[16], |_, info| info.operations = Some(OperationSet::of([0x00, 0x01, 0x02, 0x10])));
    assert!(!bench.offload.accelerates(Operation::ZeroMap) && bench.offload.accelerates(Operation::Checksum));
    bench.batches(&bench.offload.channel(), 2);
    assert_eq!((bench.device.taken(), bench.left()), (vec![0], vec![]));
    bench.submit(&bench.offload.channel(), Operation::Checksum);
    assert_eq!(bench.device.taken(), [1]);
}
