//! Summarises each operation of a trace: how often it occurred, how it ended, how long it took. The times end when the
//! record is *seen*, so they are upper bounds of the device's times. [`Timing`](crate::config::Timing) is calibrated with
//! them.

use std::collections::BTreeMap;

use super::Queue;
use super::descriptor::operation;
use super::is_batch;
use crate::config::Kind;
use crate::table::dsa;

/// Time from the submission until the record was seen, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// The minimum.
    pub min: u64,
    /// The median.
    pub median: u64,
    /// The maximum.
    pub max: u64,
}

/// One operation of one kind of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationSummary {
    /// DSA or IAA.
    pub kind: Kind,
    /// The operation's name in the specification; for batches also that of their first member.
    pub operation: String,
    /// Whether these are members of batches, whose times are those of their batch.
    pub in_batches: bool,
    /// How many were submitted; for members, how many have a record.
    pub count: u64,
    /// How many of them were never seen to complete.
    pub unanswered: u64,
    /// Bytes of all *Transfer Size*, or descriptors of all batches.
    pub size: u64,
    /// How often each status was seen.
    pub statuses: BTreeMap<u8, u64>,
    /// The latency, if any completed.
    pub latency: Option<Latency>,
}

#[derive(Default)]
struct Row {
    count: u64,
    unanswered: u64,
    size: u64,
    statuses: BTreeMap<u8, u64>,
    latencies: Vec<u64>,
}

/// The summary while the trace is read.
#[derive(Default)]
pub(super) struct Summary {
    rows: BTreeMap<(bool, bool, String), Row>,
}

impl Summary {
    fn row(&mut self, queue: &Queue, descriptor: &[u8; 64], first: Option<&[u8; 64]>, in_batch: bool) -> &mut Row {
        let name = |descriptor| match operation(descriptor, queue.kind) {
            Some(row) => row.name.to_owned(),
            None => format!("operation {:#04x}", dsa::OPERATION.get(descriptor)),
        };
        let name = match first {
            Some(first) if is_batch(descriptor, queue) => format!("{} of {}", name(descriptor), name(first)),
            _ => name(descriptor),
        };
        let row = self.rows.entry((queue.kind == Kind::Iaa, in_batch, name)).or_default();
        row.count += 1;
        row.size = row.size.saturating_add(dsa::SIZE.get(descriptor));
        row
    }

    pub(super) fn answered(
        &mut self,
        queue: &Queue,
        descriptor: &[u8; 64],
        first: Option<&[u8; 64]>,
        status: u8,
        latency: u64,
    ) {
        let row = self.row(queue, descriptor, first, false);
        *row.statuses.entry(status).or_default() += 1;
        row.latencies.push(latency);
    }

    pub(super) fn unanswered(&mut self, queue: &Queue, descriptor: &[u8; 64], first: Option<&[u8; 64]>) {
        self.row(queue, descriptor, first, false).unanswered += 1;
    }

    pub(super) fn member(&mut self, queue: &Queue, descriptor: &[u8; 64], status: u8) {
        *self.row(queue, descriptor, None, true).statuses.entry(status).or_default() += 1;
    }

    pub(super) fn operations(self) -> Vec<OperationSummary> {
        let mut operations = Vec::new();
        for ((iaa, in_batches, operation), mut row) in self.rows {
            row.latencies.sort_unstable();
            let latency = row.latencies.first().zip(row.latencies.last()).map(|(&min, &max)| {
                let median = row.latencies[row.latencies.len() / 2];
                Latency { min, median, max }
            });
            operations.push(OperationSummary {
                kind: if iaa { Kind::Iaa } else { Kind::Dsa },
                operation,
                in_batches,
                count: row.count,
                unanswered: row.unanswered,
                size: row.size,
                statuses: row.statuses,
                latency,
            });
        }
        operations
    }
}
