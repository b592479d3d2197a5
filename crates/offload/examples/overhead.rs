//! What a batch costs the CPU when a device does the work: filling, submitting, reading records, collecting. The "device"
//! answers within the submission and reads nothing, so all that is left is the software.
//!
//!     cargo run --release -p sterna-offload --example overhead

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_idxd::{Descriptor, Device, Kind, Mode, OperationSet, Portal, QueueInfo, Submission, Way, WorkQueue};
use sterna_offload::{NEVER, Offload, Operation, Recheck, Region, Settings};

/// Answers at once. `mixed`: every other page is not as predicted, so that members' records are written and read.
#[derive(Debug)]
struct Answering {
    mixed: bool,
}

fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: a completion record or a descriptor, mapped and aligned.
    unsafe { &*std::ptr::with_exposed_provenance(address as usize) }
}

impl Portal for Answering {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        let record = descriptor.record().expect("all have one");
        let batch = descriptor.operation_code() == 0x01;
        if batch && self.mixed {
            for member in 0..u64::from(descriptor.bytes()) {
                let at = word(descriptor.source() + 64 * member + 8).load(Ordering::Relaxed);
                word(at).store((1 + member % 2) | (member % 2) << 8, Ordering::Release);
            }
        }
        word(record).store(if batch && self.mixed { 5 } else { 1 }, Ordering::Release);
        Submission::Accepted
    }

    fn way(&self) -> Way {
        Way::Enqcmd
    }
}

fn cpu_nanos() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn main() {
    println!("ns of CPU: submission and collection, without the device's work; ten batches under way");
    for mixed in [false, true] {
        for pages in [1usize, 8, 32, 128, 512, 1024] {
            measure(mixed, pages);
        }
    }
}

fn measure(mixed: bool, pages: usize) {
    let mut device = Device::new("dsa0", Kind::Dsa);
    device.version = 0x200;
    device.operations = OperationSet::parse(&["ffffffff"; 8].join(","));
    let mut info = QueueInfo::new("wq0.0", Arc::new(device), Mode::Shared, 16);
    info.max_batch = 1024;
    let queue = WorkQueue::with_portal(info, Arc::new(Answering { mixed })).expect("it answers");
    let mut settings = Settings::default();
    settings.batch_pages = pages;
    settings.recheck = Recheck::None;
    let offload = Offload::over(vec![queue], &settings).expect("settings are right");
    let memory = Vec::leak(vec![[0u64; 512]; 1025]);
    let start = NonNull::from(memory).cast::<u8>();
    // SAFETY: leaked, and nothing refers to it any more.
    let region = unsafe { Region::new(start.add(start.align_offset(4096)), 1024 * 4096, None) };
    let channel = offload.channel();
    let rounds = 1_000_000 / pages.max(10) as u64;
    let round = || {
        for _ in 0..10 {
            let mut batch = channel.batch(Operation::ZeroMap);
            batch.push(&region.range(0, pages * 4096).expect("inside")).expect("there is room");
            channel.submit(batch).expect("there is room").into_id();
        }
        for _ in 0..10 {
            let _ = std::hint::black_box(channel.wait(NEVER).expect("it is under way"));
        }
    };
    (0..rounds / 10).for_each(|_| round());
    let began = cpu_nanos();
    (0..rounds).for_each(|_| round());
    let cpu = (cpu_nanos() - began) as f64;
    let batches = (rounds * 10) as f64;
    let kind = if mixed { "half as predicted" } else { "all as predicted " };
    println!(
        "{kind}, {pages:>4} pages: {:>7.1} per page, {:>7.0} per batch",
        cpu / batches / pages as f64,
        cpu / batches
    );
}
