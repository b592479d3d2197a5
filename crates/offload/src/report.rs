//! Counters per operation and engine, cheap to update, and the report made from them.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use crate::kind::{Cause, Kind};
use crate::operation::Operation;
use crate::sync::lock_std;

/// What happened since the start.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct OffloadReport {
    /// The accelerators in use, why others are not used, and how each device is shared, in one line.
    pub summary: String,
    /// Per operation that was requested.
    pub operations: Vec<OperationReport>,
    /// Devices that were taken out of service, in order.
    pub taken_out: Vec<TakenOut>,
    /// Where the requests are now.
    pub requests: Requests,
    /// Number of ranges of guest memory that a device may still write.
    pub leases: usize,
}

impl OffloadReport {
    /// Returns the report as text: one line for each operation that an accelerator did, and one for each device out of
    /// service. The numbers are those of the whole process since the start of offload, for all guests.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.summary.clone()];
        for OperationReport { operation, engines } in &self.operations {
            lines.extend(
                engines.iter().filter(|engine| engine.engine != Kind::Cpu).map(|engine| engine.line(*operation)),
            );
        }
        lines.extend(self.taken_out.iter().map(|TakenOut { device, reason, quiet, quarantined_bytes }| {
            let since = match quiet {
                true => "it is quiet".to_owned(),
                false => format!("it may still write {quarantined_bytes} bytes, which are kept for it"),
            };
            format!("{device} was taken out of service: {reason}; {since}")
        }));
        lines
    }
}

impl EngineReport {
    fn line(&self, operation: Operation) -> String {
        let Self { engine, batches, items, bytes, .. } = self;
        let mut line = format!(
            "{}, for all guests of this process: {} of {items} items ({bytes} bytes) in {batches} batches",
            engine.name(),
            operation.name()
        );
        for (cause, items) in &self.fallbacks {
            let _ = write!(line, ", {items} left to the CPU ({cause})");
        }
        line
    }
}

/// One operation.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct OperationReport {
    /// The operation.
    pub operation: Operation,
    /// By engine; only engines that did any of it.
    pub engines: Vec<EngineReport>,
}

/// The counters of one engine for one operation.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct EngineReport {
    /// The engine.
    pub engine: Kind,
    /// Batches begun on this engine.
    pub batches: u64,
    /// Items (pages of zero maps) of these batches.
    pub items: u64,
    /// Bytes of guest memory of these batches.
    pub bytes: u64,
    /// Items that the CPU did instead of this engine, by cause. Items of batches that no device accepted are not among
    /// `items`.
    pub fallbacks: Vec<(Cause, u64)>,
    /// Submissions that the queue refused at first.
    pub retries: u64,
    /// Pages that the device reported as zero and the CPU read again.
    pub sampled: u64,
    /// Those pages that the CPU read as not zero: a running guest has written them, or the device was wrong.
    pub doubtful: u64,
    /// Time between submission and the observed completion, summed over the submitted descriptors, in nanoseconds.
    /// These times overlap.
    pub device_nanos: u64,
    /// Wall-clock time in nanoseconds that the CPU needed for the work itself: for all of it where the engine is the
    /// CPU, otherwise for what the device left undone. Submission, reading records and re-reading zero pages are not
    /// included.
    pub cpu_nanos: u64,
}

/// A device out of service.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TakenOut {
    /// Its name.
    pub device: String,
    /// Why it was taken out.
    pub reason: String,
    /// Whether the device was proved quiet. Until then the memory that it may write is quarantined.
    pub quiet: bool,
    /// Bytes of quarantined memory that the device may still write.
    pub quarantined_bytes: u64,
}

/// Number of requests, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Requests {
    /// Allocated since the start.
    pub made: usize,
    /// In the pool.
    pub free: usize,
    /// Quarantined because a device may still write them.
    pub quarantined: usize,
}

/// The counters of one operation on one engine.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) batches: AtomicU64,
    pub(crate) items: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) fallbacks: [AtomicU64; Cause::ALL.len()],
    pub(crate) retries: AtomicU64,
    pub(crate) sampled: AtomicU64,
    pub(crate) doubtful: AtomicU64,
    pub(crate) device_nanos: AtomicU64,
    pub(crate) cpu_nanos: AtomicU64,
}

impl Counters {
    /// Counts `items` items that go to the CPU because of `cause`.
    pub(crate) fn fell_back(&self, cause: Cause, items: u64) {
        self.fallbacks[cause as usize].fetch_add(items, Relaxed);
    }

    fn report(&self, engine: Kind) -> Option<EngineReport> {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let fallbacks: Vec<_> = Cause::ALL
            .into_iter()
            .map(|cause| (cause, get(&self.fallbacks[cause as usize])))
            .filter(|(_, items)| *items != 0)
            .collect();
        if get(&self.batches) == 0 && fallbacks.is_empty() {
            return None;
        }
        Some(EngineReport {
            engine,
            batches: get(&self.batches),
            items: get(&self.items),
            bytes: get(&self.bytes),
            fallbacks,
            retries: get(&self.retries),
            sampled: get(&self.sampled),
            doubtful: get(&self.doubtful),
            device_nanos: get(&self.device_nanos),
            cpu_nanos: get(&self.cpu_nanos),
        })
    }
}

/// All counters.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    table: [[Counters; 3]; Operation::ALL.len()],
    taken_out: Mutex<Vec<TakenOut>>,
    /// Wrong results for which a device was taken out of service.
    pub(crate) wrong_results: AtomicU64,
}

impl Statistics {
    /// Returns the counters of `operation` on `engine`.
    pub(crate) fn of(&self, operation: Operation, engine: Kind) -> &Counters {
        &self.table[operation.index()][engine as usize]
    }

    /// Records a device out of service, and returns its place in the list.
    pub(crate) fn taken_out(&self, device: String, reason: String) -> usize {
        let mut all = lock_std(&self.taken_out);
        all.push(TakenOut { device, reason, quiet: false, quarantined_bytes: 0 });
        all.len() - 1
    }

    /// Changes the entry at that place, if there is one.
    pub(crate) fn change(&self, place: Option<usize>, change: impl FnOnce(&mut TakenOut)) {
        if let Some(place) = place {
            change(&mut lock_std(&self.taken_out)[place]);
        }
    }

    pub(crate) fn report(&self, summary: String, requests: Requests, leases: usize) -> OffloadReport {
        let operations = Operation::ALL
            .into_iter()
            .map(|operation| {
                let of = |kind| self.of(operation, kind).report(kind);
                let engines = [Kind::Cpu, Kind::Dsa, Kind::Iaa].into_iter().filter_map(of).collect();
                OperationReport { operation, engines }
            })
            .filter(|operation| !operation.engines.is_empty())
            .collect();
        OffloadReport { summary, operations, taken_out: lock_std(&self.taken_out).clone(), requests, leases }
    }
}
