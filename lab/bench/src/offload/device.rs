//! What the search for zero pages leaves to the CPU when a device does it: handing batches in and taking answers.
//!
//! The product's own way, down to the 64 bytes; behind them a [`StandIn`] on another core, which knows the answers and gives them
//! at the pace of the model's calibration (the model itself reads memory through the page tables, which takes it a hundred
//! times as long as hardware). So descriptors and records really pass between two cores. Three accounts, never added silently:
//! *measured* is CPU time of the submitting thread and of offload's own threads; *charged* is what the hardware would make the
//! CPU wait for besides; *device* is the device's time by its calibration.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use sterna_engine::cancel::Cancel;
use sterna_idxd::{
    Descriptor, Device, Kind, Mode, OperationSet, Portal, QueueInfo, Submission, SubmitMethod, WorkQueue,
};
use sterna_idxd_model::core::Timing;
use sterna_memory::PAGE_SIZE;
use sterna_offload::{Channel, NEVER, Offload, Operation, Region, Settings, Ticket};

use super::cpu::{CONTENTS, Pages, cpu_ns, scan_cell};
use crate::BenchArgs;
use crate::harness::{Cell, Findings, Target, interleaved};
use crate::hosts::HostsError;

/// Pages in a batch.
const BATCHES: [usize; 6] = [1, 8, 32, 128, 512, 1024];
/// Batches that are under way together.
const IN_FLIGHT: usize = 16;
/// Memory that is searched again and again: more than the caches have.
const BYTES: usize = 128 << 20;
/// How often it is gone through, and before that until offload has its batches and knows the device's pace.
const WALKS: usize = 30;
const FIRST_WALKS: usize = 5;
/// From this size on the targets are meant.
const LARGE: usize = 128;

/// What the hardware makes a CPU wait for, in nanoseconds.
struct Charges {
    /// `ENQCMD`: 140 to 610 are what dsa-perf-micros' documentation allows (one core cannot keep a device busy with 4 KiB, four
    /// can). The upper end.
    submission: f64,
    /// A cache line that a device has written comes from another core here and from memory at worst there: so much more. No
    /// source gives it for these machines; a line from DRAM takes about 100 on servers of this kind.
    line_from_device: f64,
}

const CHARGES: Charges = Charges { submission: 610.0, line_from_device: 100.0 };

impl Charges {
    /// For one batch of so many pages. Where pages of both kinds are mixed, what a batch finds is not what was predicted, and
    /// every member's record is read, two to a line.
    fn of(&self, pages: usize, mixed: bool) -> f64 {
        let records = 1 + if mixed && pages > 1 { pages.div_ceil(2) } else { 0 };
        // Lines one after another come by prefetching, several at once.
        let records = self.line_from_device * (1.0 + (records - 1) as f64 / 10.0);
        self.submission + records
    }
}

fn name(content: &str, batch: usize) -> String {
    format!("device, {content}: batches of {batch}")
}

/// The names of the cells.
pub(super) fn cells() -> Vec<String> {
    CONTENTS.iter().flat_map(|(content, _)| BATCHES.map(|batch| name(content, batch))).collect()
}

/// Measures the cells that are wanted.
pub(super) fn measure(
    args: &BenchArgs,
    cancel: &Cancel,
    tell: &dyn Fn(&str),
    findings: &mut Findings,
) -> Result<(), HostsError> {
    for (content, zero_of_8) in CONTENTS {
        let wanted: Vec<usize> = BATCHES.into_iter().filter(|batch| args.wants(&name(content, *batch))).collect();
        if wanted.is_empty() {
            continue;
        }
        let mut memory = Pages::new(BYTES, true)?;
        memory.fill(zero_of_8);
        let memory = Arc::new(memory);
        // Made for each run: a stand-in that waits for work keeps a CPU busy.
        let mut cells: Vec<Cell<'_>> = wanted
            .into_iter()
            .map(|batch| {
                let memory = &memory;
                let run = move || Search::new(memory, zero_of_8, batch)?.run();
                Cell { name: name(content, batch), run: Box::new(run) }
            })
            .collect();
        findings.rows.extend(interleaved(&mut cells, args.rounds(), cancel, tell)?);
    }
    Ok(())
}

/// Adds the targets.
pub(super) fn judge(findings: &mut Findings) {
    for (content, _) in CONTENTS {
        for batch in BATCHES.into_iter().filter(|batch| *batch >= LARGE) {
            let (row, scan) = (name(content, batch), scan_cell(content));
            // What of the scan's CPU is still spent, by measured and charged time.
            findings.at_most(&format!("{row}: measured and charged to the scan's CPU"), 0.25, &row, &scan, "all_ns");
            let value = findings.spread(&row, "completion_core");
            let name = format!("{row}: completion at 25 GB/s");
            findings.targets.push(Target { name, limit: 0.10, value, unit: "of a core" });
        }
    }
}

/// What a reader must know.
pub(super) fn notes() -> Vec<String> {
    vec![
        format!(
            "The devices' cells: the product's own code over a stand-in for one DSA on another core, which answers from a table at \
             the pace of the model's calibration; {IN_FLIGHT} batches under way, {} MiB of memory. Measured is the submitter's \
             thread and offload's own. Nothing here was run on hardware.",
            BYTES >> 20
        ),
        format!(
            "Charged, for each batch: {} ns for ENQCMD, {} ns for the first completion record and a tenth of that for each further \
             line of records (read where a batch is mixed).",
            CHARGES.submission, CHARGES.line_from_device
        ),
        "Pages that are not zero cost a scan next to nothing: it stops at the first word. There a device saves no CPU, and the \
         targets are shown all the same."
            .into(),
        "Completion is what poll takes that finds something, in thread CPU time, at 25 GB/s of searched memory. The published \
         design needs 86 % of a core for it, which is all that its polling thread does, looking in vain included; here who waits \
         sleeps, and falling asleep and waking are in the measured CPU time, not in completion."
            .into(),
    ]
}

/// A search of the same memory in batches of one size.
struct Search {
    offload: Arc<Offload>,
    region: Arc<Region>,
    memory: Arc<Pages>,
    batch: usize,
    zero_of_8: usize,
}

impl Search {
    fn new(memory: &Arc<Pages>, zero_of_8: usize, batch: usize) -> Result<Self, HostsError> {
        let failed = |error: &dyn std::fmt::Display| HostsError(error.to_string());
        let mut device = Device::new("dsa0", Kind::Dsa);
        device.version = 0x200;
        let mut info = QueueInfo::new("wq0.0", Arc::new(device), Mode::Shared, 96);
        info.max_batch = 1024;
        info.operations = OperationSet::parse(&["ffffffff"; 8].join(","));
        let portal = Arc::new(StandIn::start(memory)?);
        let queue = WorkQueue::with_portal(info, portal).map_err(|error| failed(&error))?;
        let mut settings = Settings::default();
        settings.batch_pages = batch.max(LARGE);
        let offload = Offload::over(vec![queue], &settings).map_err(|error| failed(&error))?;
        let start = NonNull::from(memory.bytes()).cast::<u8>();
        // SAFETY: the region keeps the memory; nobody writes it while it is searched.
        let region = unsafe { Region::new(start, memory.bytes().len(), Some(Arc::<Pages>::clone(memory))) };
        region.set_racing(false);
        Ok(Self { offload, region, memory: Arc::clone(memory), batch, zero_of_8 })
    }

    /// Measured, charged, both, device, completion: nanoseconds per page; then the share of a core for completion.
    fn run(&self) -> Result<Vec<f64>, HostsError> {
        let channel = self.offload.channel();
        for _ in 0..FIRST_WALKS {
            self.walk(&channel)?;
        }
        let pages = (WALKS * self.memory.bytes().len() / PAGE_SIZE) as f64;
        let (own, others) = (cpu_ns(), threads_ns());
        let mut zero = 0;
        for _ in 0..WALKS {
            zero += self.walk(&channel)?;
        }
        let measured = (cpu_ns() - own + threads_ns() - others) / pages;
        let is_zero = |page: &&[u8]| page.iter().all(|byte| *byte == 0);
        let expected = self.memory.bytes().chunks(PAGE_SIZE).filter(is_zero).count() * WALKS;
        if zero != expected {
            return Err(HostsError(format!("{zero} zero pages were found of {expected}")));
        }
        let completion = self.completion(&channel)?;
        let charged = CHARGES.of(self.batch, !self.zero_of_8.is_multiple_of(8)) / self.batch as f64;
        let device = device_ns(self.batch) / self.batch as f64;
        let at_25_gb = completion / (PAGE_SIZE as f64 / 25.0);
        let rate = PAGE_SIZE as f64 * 1e9 / measured;
        Ok(vec![measured, rate, charged, measured + charged, device, completion, at_25_gb])
    }

    fn submit(&self, channel: &Channel, first: usize) -> Result<(), HostsError> {
        let mut batch = channel.batch(Operation::ZeroMap);
        let bytes = self.batch * PAGE_SIZE;
        let range = self.region.range(first * PAGE_SIZE, bytes).map_err(|error| HostsError(error.to_string()))?;
        batch.push(&range).map_err(|error| HostsError(error.to_string()))?;
        channel.submit(batch).map(Ticket::into_id).map(drop).map_err(|(reason, _)| HostsError(reason.to_string()))
    }

    /// Goes through all of memory once, and counts the zero pages.
    fn walk(&self, channel: &Channel) -> Result<usize, HostsError> {
        let mut zero = 0;
        let mut next = || {
            channel.wait(NEVER).map(|done| {
                zero += done.batch.zero_map().iter().map(|word| word.count_ones() as usize).sum::<usize>();
            })
        };
        for first in (0..self.memory.bytes().len() / PAGE_SIZE).step_by(self.batch) {
            if channel.under_way() >= IN_FLIGHT {
                next();
            }
            self.submit(channel, first)?;
        }
        while next().is_some() {}
        Ok(zero)
    }

    /// What taking answers takes, per page.
    fn completion(&self, channel: &Channel) -> Result<f64, HostsError> {
        let (mut spent, mut batches) = (0.0, 0);
        let all = self.memory.bytes().len() / PAGE_SIZE / self.batch;
        for round in 0..all.min(2000) / IN_FLIGHT {
            for batch in 0..IN_FLIGHT {
                self.submit(channel, (round * IN_FLIGHT + batch) * self.batch)?;
            }
            while channel.under_way() > 0 {
                let began = cpu_ns();
                let found = channel.poll().is_some();
                let took = cpu_ns() - began - clock_ns();
                if found {
                    spent += took.max(0.0);
                    batches += 1;
                }
            }
        }
        Ok(spent / (batches * self.batch).max(1) as f64)
    }
}

/// A device that knows which pages are zero, on a thread of its own.
#[derive(Debug)]
struct StandIn {
    /// None once the queue is being closed.
    submitted: Option<SyncSender<Descriptor>>,
    thread: Option<JoinHandle<()>>,
}

impl StandIn {
    fn start(memory: &Arc<Pages>) -> Result<Self, HostsError> {
        let (submitted, descriptors) = sync_channel(256);
        let base = memory.bytes().as_ptr().expose_provenance();
        let zero: Vec<bool> = memory.bytes().chunks(PAGE_SIZE).map(|page| page.iter().all(|byte| *byte == 0)).collect();
        let work = move || {
            let began = Instant::now();
            let mut busy_until = 0.0_f64;
            loop {
                match descriptors.try_recv() {
                    Ok(descriptor) => {
                        let now = || began.elapsed().as_nanos() as f64;
                        busy_until = busy_until.max(now()) + takes(&descriptor);
                        while now() < busy_until {
                            std::hint::spin_loop();
                        }
                        answer(&descriptor, base, &zero);
                    }
                    Err(TryRecvError::Empty) => std::hint::spin_loop(),
                    Err(TryRecvError::Disconnected) => return,
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("stand-in".into())
            .spawn(work)
            .map_err(|error| HostsError(format!("no thread for the stand-in of a device: {error}")))?;
        Ok(Self { submitted: Some(submitted), thread: Some(thread) })
    }
}

impl Portal for StandIn {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        match self.submitted.as_ref().map(|submitted| submitted.try_send(*descriptor)) {
            Some(Ok(())) => Submission::Accepted,
            _ => Submission::Retry,
        }
    }

    fn way(&self) -> SubmitMethod {
        SubmitMethod::Enqcmd
    }
}

impl Drop for StandIn {
    /// As closing a queue does: nothing is under way afterwards. On a machine so busy that a request was given up, its records are
    /// unmapped next.
    fn drop(&mut self) {
        drop(self.submitted.take());
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// How long the device needs for it.
fn takes(descriptor: &Descriptor) -> f64 {
    match descriptor.operation() {
        Some(sterna_idxd::Operation::Batch) => device_ns(descriptor.bytes() as usize),
        _ => device_ns(descriptor.bytes() as usize / PAGE_SIZE),
    }
}

/// Writes the records of a descriptor as the device would. First the members' of a batch.
fn answer(descriptor: &Descriptor, base: usize, zero: &[bool]) {
    let word = |address: u64| {
        // SAFETY: a descriptor's or record's word: mapped, aligned, kept by the submitter until its record is written.
        unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(address as usize) }
    };
    let record = |address: u64, status: u64, result: u64, bytes: u64| {
        word(address).store(status | result << 8 | bytes << 32, Ordering::Release);
    };
    let Some(at) = descriptor.record() else { return };
    match descriptor.operation() {
        Some(sterna_idxd::Operation::Batch) => {
            let mut all = 1;
            for member in 0..u64::from(descriptor.bytes()) {
                let list = descriptor.source() + 64 * member;
                let field = |offset| word(list + offset).load(Ordering::Relaxed);
                // What proves a queue are no-ops, which have nothing to say.
                if field(0) >> 56 != u64::from(sterna_idxd::Operation::ComparePattern as u8) {
                    continue;
                }
                let page = (field(16) as usize - base) / PAGE_SIZE;
                // The expected result is the lowest bit of byte 40.
                let result = u64::from(!zero[page]);
                let status = if result == field(40) & 1 { 1 } else { 2 };
                all = if status == 1 { all } else { 5 };
                record(field(8), status, result, 0);
            }
            record(at, all, 0, descriptor.bytes().into());
        }
        Some(sterna_idxd::Operation::ComparePattern) => {
            let first = (descriptor.source() as usize - base) / PAGE_SIZE;
            let pages = descriptor.bytes() as usize / PAGE_SIZE;
            match zero[first..first + pages].iter().position(|zero| !zero) {
                None => record(at, 1, 0, 0),
                Some(before) => record(at, 1, 1, (before * PAGE_SIZE) as u64),
            }
        }
        _ => record(at, 1, 0, 0),
    }
}

/// The time of one batch on the device.
fn device_ns(pages: usize) -> f64 {
    let timing = Timing::dsa();
    let bytes = (pages * PAGE_SIZE) as f64 * timing.read_byte_ps as f64 / 1e3;
    let list = if pages > 1 { timing.batch_ns as f64 } else { 0.0 };
    // The four engines share the bytes' time and have their own for descriptors.
    list + bytes.max(pages as f64 * timing.descriptor_ns as f64 / 4.0)
}

/// What looking at the clock takes itself.
fn clock_ns() -> f64 {
    static TAKES: std::sync::LazyLock<f64> = std::sync::LazyLock::new(|| {
        let looks: Vec<f64> = (0..1001).map(|_| cpu_ns()).collect();
        let mut gaps: Vec<f64> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.sort_by(f64::total_cmp);
        gaps[gaps.len() / 2]
    });
    *TAKES
}

/// CPU time of offload's own threads: /proc/self/task/*/schedstat begins with it, in nanoseconds (sched-stats.rst).
fn threads_ns() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let of = |task: std::path::PathBuf| {
        let name = std::fs::read_to_string(task.join("comm")).ok()?;
        let spent = std::fs::read_to_string(task.join("schedstat")).ok()?;
        let own = name.starts_with("offload-");
        own.then(|| spent.split_whitespace().next()?.parse::<f64>().ok())?
    };
    tasks.filter_map(|task| of(task.ok()?.path())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_larger_batch_is_charged_more_and_its_pages_less() {
        let per_page = |pages| CHARGES.of(pages, false) / pages as f64;
        for pair in BATCHES.windows(2) {
            assert!(per_page(pair[1]) < per_page(pair[0]));
            assert!(CHARGES.of(pair[1], true) > CHARGES.of(pair[0], true));
        }
        assert!(CHARGES.of(128, true) > CHARGES.of(128, false));
        // 64 lines of records are behind the batch's own.
        assert_eq!(CHARGES.of(128, true) - CHARGES.of(128, false), 64.0 * CHARGES.line_from_device / 10.0);
    }
}
