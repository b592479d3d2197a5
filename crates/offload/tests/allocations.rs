//! Nothing is allocated per batch: counted, after a few batches that fill the pools.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_idxd::{Descriptor, Device, Kind, Mode, QueueInfo, Submission, SubmitMethod, WorkQueue};
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Fair, Share};
use sterna_offload::{Accelerators, Batch, Channel, NEVER, Offload, Operation, Outcome, Region, Settings};
use sterna_test_kit::Random;
use sterna_test_kit::portal::{FakePortal, complete};

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Whether the next allocation is printed with its place.
    static SHOWN: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    let before = ALLOCATIONS.get();
    if SHOWN.replace(false) {
        // Allocates, which does not count.
        eprintln!("an allocation: {}", Backtrace::force_capture());
    }
    ALLOCATIONS.set(before + 1);
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: passed on.
        unsafe { System.realloc(start, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: a descriptor, mapped and aligned.
    unsafe { &*std::ptr::with_exposed_provenance(address as usize) }
}

fn answer(record: u64, status: u8, result: u8) {
    // SAFETY: the record of a descriptor that was submitted.
    unsafe { complete(record, status, result, 0) };
}

/// A device that has answered when the submission returns: every descriptor succeeds, every other member of a batch is not as
/// predicted, so that records are read.
fn instant(descriptor: &Descriptor) -> Submission {
    let record = descriptor.record().expect("all have one");
    if descriptor.operation_code() != 0x01 {
        answer(record, 1, 0);
        return Submission::Accepted;
    }
    for member in 0..descriptor.bytes() {
        let at = descriptor.source() + 64 * u64::from(member);
        // A no-op of the proof has no record.
        if word(at).load(Ordering::Relaxed) >> 34 & 1 == 1 {
            let odd = (member % 2) as u8;
            answer(word(at + 8).load(Ordering::Relaxed), 1 + odd, odd);
        }
    }
    answer(record, 5, 1);
    Submission::Accepted
}

fn instant_queues() -> Vec<Arc<WorkQueue>> {
    let mut device = Device::new("dsa0", Kind::Dsa);
    device.version = 0x200;
    device.operations = sterna_idxd::OperationSet::parse(&["ffffffff"; 8].join(","));
    let info = QueueInfo::new("wq0.0", Arc::new(device), Mode::Shared, 16);
    vec![WorkQueue::with_portal(info, FakePortal::new(SubmitMethod::Enqcmd, instant)).unwrap()]
}

fn run(channel: &Channel, region: &Arc<Region>, batches: usize) {
    for number in 0..batches {
        let operation = [Operation::ZeroMap, Operation::CopyChecksum, Operation::Compare, Operation::Copy][number % 4];
        for _ in 0..3 {
            let mut batch = channel.batch(operation);
            for page in 0..16 {
                let range = region.range(page * 4096, 4096).unwrap();
                match operation {
                    Operation::Compare => batch.push_pair(&range, &range).unwrap(),
                    _ => batch.push(&range).unwrap(),
                };
            }
            channel.submit(batch).unwrap().into_id();
        }
        let mut done = 0;
        while let Some(one) = channel.wait(NEVER) {
            assert_eq!((one.outcome, one.batch.len()), (Outcome::Done, 16));
            done += 1;
        }
        assert_eq!(done, 3);
    }
}

fn per_batch(offload: &Offload) -> u64 {
    let memory = Vec::leak(vec![[0u64; 512]; 17]);
    let start = NonNull::from(memory).cast::<u8>();
    // SAFETY: leaked, and nothing refers to it any more.
    let region = unsafe { Region::new(start.add(start.align_offset(4096)), 16 * 4096, None) };
    let channel = offload.channel();
    run(&channel, &region, 20);
    counted(|| run(&channel, &region, 5000))
}

/// Returns how many allocations this thread made in `work`, and prints where it made the first.
fn counted(work: impl FnOnce()) -> u64 {
    SHOWN.set(true);
    let before = ALLOCATIONS.get();
    work();
    let counted = ALLOCATIONS.get() - before;
    SHOWN.set(false);
    counted
}

#[test]
fn no_batch_allocates_by_the_cpu_or_by_a_device() {
    let cpu = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    assert_eq!(per_batch(&cpu), 0, "by the CPU");
    // The device says anything and writes nothing.
    let mut settings = Settings::default();
    settings.recheck_copies = false;
    let device = Offload::with_queues(instant_queues(), &settings).unwrap();
    assert_eq!(per_batch(&device), 0, "by a device");
    let report = device.report();
    assert_eq!(report.operations.len(), 4);
    assert!(
        report.operations.iter().all(|of| of.engines[0].engine == sterna_offload::Kind::Dsa && of.engines.len() == 1)
    );
}

#[test]
fn a_batch_after_a_long_pause_waits_for_its_turn_without_an_allocation() {
    let mut fair = Fair::default();
    let mut batch_at = |now| {
        let request = AdmissionRequest { vm: 1, channel: 0, weight: 1, predicted: 1000, bytes: 4096 };
        let AdmissionDecision::Admit(grant) = fair.ask(&request, now) else { panic!("the device is free") };
        fair.done(grant, 1000, now + 1000);
    };
    batch_at(0);
    // A guest that has sent nothing for ten seconds counts as gone.
    assert_eq!(counted(|| (1..5).for_each(|pause| batch_at(pause * 10_000_000_000))), 0);
}

/// One page that shrinks and one that does not, deflated, and the first inflated again.
fn deflate_and_inflate(channel: &Channel, region: &Arc<Region>, batches: usize) {
    let one = |fill: &dyn Fn(&mut Batch), operation| {
        let mut batch = channel.batch(operation);
        fill(&mut batch);
        channel.submit(batch).unwrap().into_id();
        channel.wait(NEVER).unwrap().batch
    };
    let page = |number: usize| region.range(number * 4096, 4096).unwrap();
    for _ in 0..batches {
        let push = |batch: &mut Batch| (0..2).for_each(|number| assert_eq!(batch.push(&page(number)), Ok(number)));
        let deflated = one(&push, Operation::Deflate);
        assert_eq!(deflated.deflated(1), None);
        let stream = deflated.deflated(0).unwrap();
        let push = |batch: &mut Batch| batch.push_input(stream.len(), &page(2)).unwrap().copy_from_slice(stream);
        assert_eq!(one(&push, Operation::Inflate).placed(0), Some(4096));
    }
}

#[test]
fn the_cpu_makes_its_deflate_contexts_once() {
    let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
    // Zeros, noise, and where they come back to.
    let memory = Vec::leak(vec![[0u64; 512]; 3]);
    let mut random = Random::new(1);
    memory[1].fill_with(|| random.next_u64());
    let start = NonNull::from(memory).cast::<u8>();
    // SAFETY: leaked, and nothing refers to it any more.
    let region = unsafe { Region::new(start, 3 * 4096, None) };
    let channel = offload.channel();
    deflate_and_inflate(&channel, &region, 20);
    assert_eq!(counted(|| deflate_and_inflate(&channel, &region, 200)), 0);
}
