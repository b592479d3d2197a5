//! Completion records: they become due, are written, lost or copied by the kernel. Batches, drains and the queue's
//! entry that have waited for a record continue.

use super::{Device, Event, Owner, Pending};
use crate::core::batch::Batch;
use crate::core::queue::Entry;
use crate::core::{Payload, Step, Write, Writing, Written};
use crate::ops::{self, Record, Target};
use crate::table::dsa::code;
use crate::table::status;

impl Device {
    /// Handles a record that is due. Returns the write if the owner has to perform one.
    pub(super) fn record_due(&mut self, id: u64, pending: Pending) -> Option<Step> {
        if pending.dropped {
            self.accounts.lost_records += 1;
            self.record_settled(&pending);
            return None;
        }
        match pending.target {
            Target::Nowhere => {
                self.record_settled(&pending);
                None
            }
            Target::SoftwareError => {
                self.software_error(pending.record.status() & 0x3f, pending.queue, pending.operation);
                self.record_settled(&pending);
                None
            }
            Target::Address(address) => {
                let what = Writing::Record {
                    address,
                    record: pending.record,
                    page_requests: self.queues[pending.queue].limits.page_requests,
                    kernel: pending.kernel,
                };
                self.writes.insert(id, pending);
                Some(Step::Write(Write { id, what }))
            }
        }
    }

    /// Reports the result of a write.
    pub fn written(&mut self, write: &Write, result: Written) {
        let Some(mut pending) = self.writes.remove(&write.id) else { return };
        // 3.13.1: without translation service a write that faults is not reported, even that of a record.
        let unnoticed = result == Written::Faulted && !self.queues[pending.queue].limits.translation;
        if result != Written::Done && !unnoticed && let Owner::Member { batch } = pending.owner
            // 8.3.2: although the fault was resolved, hardware may indicate a possible error.
            && (result == Written::Faulted || self.random.below(2) == 0)
            && let Some(batch) = self.batches.get_mut(&batch)
        {
            batch.record_faulted();
        }
        match result {
            Written::Done | Written::Requested => {
                self.accounts.page_requests += u64::from(result == Written::Requested && !pending.kernel);
                self.accounts.event_log_records += u64::from(pending.kernel);
            }
            Written::Faulted if unnoticed => self.accounts.lost_records += 1,
            Written::Faulted if self.config.event_log && !pending.kernel => {
                // 3.13.3: the event log has the record; the kernel copies it when it has handled the fault. The
                // descriptor counts as complete for the device.
                self.record_settled(&pending);
                pending.kernel = true;
                let at = self.time + self.timing.event_log_ns;
                self.at(at, Event::Record(pending));
                return;
            }
            Written::Faulted => {
                self.accounts.lost_records += 1;
                self.software_error(status::RECORD_FAULT, pending.queue, pending.operation);
            }
        }
        if !pending.kernel {
            self.record_settled(&pending);
        }
    }

    /// Continues what waited for a record that is visible now, or never will be.
    fn record_settled(&mut self, pending: &Pending) {
        if pending.kernel {
            return;
        }
        match pending.owner {
            Owner::Entry { queue, sequence } => self.complete(queue, sequence),
            Owner::Member { batch } => {
                if let Some(state) = self.batches.get_mut(&batch) {
                    state.pending -= 1;
                    self.batch_over(batch);
                }
            }
        }
    }

    /// Writes a batch's record if all its members are complete and no engine executes it any more.
    pub(super) fn batch_over(&mut self, id: u64) {
        let held = self.engines.iter().any(|engine| engine.batch == Some(id));
        if held || !self.batches.get(&id).is_some_and(Batch::is_over) {
            return;
        }
        let batch = self.batches.remove(&id).expect("it was there");
        let record = batch.record(self.config.version);
        let target = ops::target(&batch.descriptor, record.status());
        let owner = Owner::Entry { queue: batch.queue, sequence: batch.sequence };
        let at = self.time.saturating_add(self.latency()).saturating_add(batch.late);
        let pending = Pending {
            owner,
            queue: batch.queue,
            operation: code::BATCH,
            record,
            target,
            dropped: batch.dropped,
            kernel: false,
        };
        self.at(at, Event::Record(pending));
    }

    pub(super) fn complete(&mut self, queue: usize, sequence: u64) {
        for drain in self.queues[queue].complete(sequence) {
            self.drained(queue, &drain);
        }
    }

    /// Completes a drain that has nothing more to wait for.
    pub(super) fn drained(&mut self, queue: usize, entry: &Entry) {
        let Payload::Descriptor(bytes) = &entry.payload else { return };
        let pending = Pending {
            owner: Owner::Entry { queue, sequence: entry.sequence },
            queue,
            operation: code::DRAIN,
            record: Record::new(self.config.kind, status::SUCCESS),
            target: ops::target(bytes, status::SUCCESS),
            dropped: false,
            kernel: false,
        };
        let at = self.time + self.latency();
        self.at(at, Event::Record(pending));
    }
}
