//! The CPU's cost of the search for zero pages when a device does it: submitting batches and collecting results.
//!
//! The product's own code runs down to the 64-byte descriptors. In the place of the device there is a [`StandIn`] on
//! another core, which knows the results in advance and returns them at the pace of the model's calibration (the model
//! itself reads memory through the page tables, a hundred times slower than hardware). So descriptors and records
//! really pass between two cores. There are three accounts, which are never added silently: *measured* is CPU time of
//! the submitting thread and of offload's own threads; *charged* is the further time for which hardware would stall the
//! CPU; *device* is the device's time by its calibration.

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
use sterna_idxd_model::config::Timing;
use sterna_memory::PAGE_SIZE;
use sterna_offload::{Channel, NEVER, Offload, Operation, Region, Settings, Ticket};

use super::cpu::{CONTENTS, Pages, cpu_ns, scan_cell};
use crate::BenchArgs;
use crate::harness::{Cell, Findings, Target, interleaved};
use crate::hosts::HostsError;

/// Pages in a batch.
const BATCHES: [usize; 6] = [1, 8, 32, 128, 512, 1024];
/// Batches in flight together.
const IN_FLIGHT: usize = 16;
/// Memory that is searched repeatedly: larger than the caches.
const BYTES: usize = 128 << 20;
/// How many times it is searched, and how many times before that until offload has made its batches and measured the
/// device's pace.
const WALKS: usize = 30;
const FIRST_WALKS: usize = 5;
/// The smallest batch to which the targets apply.
const LARGE: usize = 128;

/// Stalls of the CPU caused by hardware, in nanoseconds.
struct Charges {
    /// `ENQCMD`: 140 to 610 are what dsa-perf-micros' documentation allows (one core cannot keep a device busy with 4 KiB, four
    /// can). The upper end.
    submission: f64,
    /// A cache line that a device wrote comes from another core here, and at worst from memory there: the difference.
    /// No source gives it for these machines; a line from DRAM takes about 100 on servers of this kind.
    line_from_device: f64,
}

const CHARGES: Charges = Charges { submission: 610.0, line_from_device: 100.0 };

impl Charges {
    /// Returns the charge for one batch of this many pages. If zero and normal pages are mixed, the results differ from
    /// the prediction, and every member's record is read, two per line.
    fn of(&self, pages: usize, mixed: bool) -> f64 {
        let records = 1 + if mixed && pages > 1 { pages.div_ceil(2) } else { 0 };
        // Consecutive lines are prefetched, several at once.
        let records = self.line_from_device * (1.0 + (records - 1) as f64 / 10.0);
        self.submission + records
    }
}

fn name(content: &str, batch: usize) -> String {
    format!("device, {content}: batches of {batch}")
}

/// Returns the names of the cells.
pub(super) fn cells() -> Vec<String> {
    CONTENTS.iter().flat_map(|(content, _)| BATCHES.map(|batch| name(content, batch))).collect()
}

/// Measures the selected cells.
pub(super) fn measure(
    args: &BenchArgs,
    cancel: &Cancel,
    progress: &dyn Fn(&str),
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
        // Made anew for each run, because a waiting stand-in keeps a CPU busy.
        let mut cells: Vec<Cell<'_>> = wanted
            .into_iter()
            .map(|batch| {
                let memory = &memory;
                let run = move || Search::new(memory, zero_of_8, batch)?.run();
                Cell { name: name(content, batch), run: Box::new(run) }
            })
            .collect();
        findings.rows.extend(interleaved(&mut cells, args.rounds(), cancel, progress)?);
    }
    Ok(())
}

/// Adds the targets.
pub(super) fn judge(findings: &mut Findings) {
    for (content, _) in CONTENTS {
        for batch in BATCHES.into_iter().filter(|batch| *batch >= LARGE) {
            let (row, scan) = (name(content, batch), scan_cell(content));
            // The part of the scan's CPU time that remains, measured and charged.
            findings.at_most(&format!("{row}: measured and charged to the scan's CPU"), 0.25, &row, &scan, "all_ns");
            let value = findings.spread(&row, "completion_core");
            let name = format!("{row}: completion at 25 GB/s");
            findings.targets.push(Target { name, limit: 0.10, value, unit: "of a core" });
        }
    }
}

/// Returns the notes for the reader.
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
        let offload = Offload::with_queues(vec![queue], &settings).map_err(|error| failed(&error))?;
        let start = NonNull::from(memory.bytes()).cast::<u8>();
        // SAFETY: the region keeps the memory; no thread writes it while it is searched.
        let region = unsafe { Region::new(start, memory.bytes().len(), Some(Arc::<Pages>::clone(memory))) };
        region.set_racing(false);
        Ok(Self { offload, region, memory: Arc::clone(memory), batch, zero_of_8 })
    }

    /// Returns nanoseconds per page: measured, charged, both, device, completion; then the share of a core for
    /// completion.
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

    /// Searches all of memory once, and returns the number of zero pages.
    fn walk(&self, channel: &Channel) -> Result<usize, HostsError> {
        let mut zero = 0;
        let mut next = || {
            channel.wait(NEVER).map(|done| {
                zero += done.batch.zero_map().iter().map(|word| word.count_ones() as usize).sum::<usize>();
            })
        };
        for first in (0..self.memory.bytes().len() / PAGE_SIZE).step_by(self.batch) {
            if channel.in_flight() >= IN_FLIGHT {
                next();
            }
            self.submit(channel, first)?;
        }
        while next().is_some() {}
        Ok(zero)
    }

    /// Returns the cost of collecting results, per page.
    fn completion(&self, channel: &Channel) -> Result<f64, HostsError> {
        let (mut spent, mut batches) = (0.0, 0);
        let all = self.memory.bytes().len() / PAGE_SIZE / self.batch;
        for round in 0..all.min(2000) / IN_FLIGHT {
            for batch in 0..IN_FLIGHT {
                self.submit(channel, (round * IN_FLIGHT + batch) * self.batch)?;
            }
            while channel.in_flight() > 0 {
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

/// A thread that acts as a device and knows in advance which pages are zero.
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
        let accepted = self.submitted.as_ref().is_some_and(|submitted| submitted.try_send(*descriptor).is_ok());
        if accepted { Submission::Accepted } else { Submission::Retry }
    }

    fn submit_method(&self) -> SubmitMethod {
        SubmitMethod::Enqcmd
    }
}

impl Drop for StandIn {
    /// Waits, like closing a queue, until nothing is in flight. After a request that timed out on a busy machine, its
    /// records are unmapped next.
    fn drop(&mut self) {
        drop(self.submitted.take());
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been printed.
            let _ = thread.join();
        }
    }
}

/// Returns how long the device needs for a descriptor.
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
                // The no-ops that test a queue have no result.
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

/// Returns the time of one batch on the device.
fn device_ns(pages: usize) -> f64 {
    let timing = Timing::dsa();
    let bytes = (pages * PAGE_SIZE) as f64 * timing.read_byte_ps as f64 / 1e3;
    let list = if pages > 1 { timing.batch_ns as f64 } else { 0.0 };
    // The four engines share the bytes' time and have their own for descriptors.
    list + bytes.max(pages as f64 * timing.descriptor_ns as f64 / 4.0)
}

/// Returns the cost of reading the clock.
fn clock_ns() -> f64 {
    static TAKES: std::sync::LazyLock<f64> = std::sync::LazyLock::new(|| {
        let looks: Vec<f64> = (0..1001).map(|_| cpu_ns()).collect();
        let mut gaps: Vec<f64> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.sort_by(f64::total_cmp);
        gaps[gaps.len() / 2]
    });
    *TAKES
}

/// Returns the CPU time of offload's own threads, the first field of /proc/self/task/*/schedstat, in nanoseconds
/// (sched-stats.rst).
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
        // The members' records take 64 lines more than the batch's own.
        assert_eq!(CHARGES.of(128, true) - CHARGES.of(128, false), 64.0 * CHARGES.line_from_device / 10.0);
    }
}
