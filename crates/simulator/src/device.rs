//! A device in virtual time: the software model's own state machine, with batches that only take the time they would take.
//!
//! There is one model of the device in this project ([`sterna_idxd_model`]); this is no more than its use with one shared queue.

use sterna_idxd_model::core::{self, Payload, Posting, Step, Submitted, Timed};
use sterna_idxd_model::{DeviceConfig, QueueConfig};

pub use sterna_idxd_model::core::Timing;

use crate::Nanos;

/// How quick and how large a device is.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// How long things take.
    pub timing: Timing,
    /// Entries of its queue.
    pub entries: u32,
    /// Engines.
    pub engines: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self { timing: Timing::dsa(), entries: 128, engines: 4 }
    }
}

/// A batch whose record can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// As it was submitted.
    pub tag: u64,
    /// When the record became visible.
    pub at: Nanos,
    /// When an engine took it.
    pub begun: Nanos,
}

/// One device with one shared queue.
#[derive(Debug)]
pub struct Device {
    core: core::Device,
    read_byte_ps: u64,
    busy_ps: u64,
    occupied: usize,
    /// Came to be done while something was submitted.
    early: Vec<Completed>,
    /// Batches refused because the queue was full.
    pub refused: u64,
}

impl Device {
    /// Idle and empty.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn new(shape: &Shape) -> Self {
        let queue = QueueConfig {
            size: shape.entries,
            threshold: shape.entries,
            max_batch_size: 1024,
            ..QueueConfig::default()
        };
        let config = DeviceConfig {
            engines: shape.engines,
            max_work_queues_size: shape.entries,
            // Nothing is left to chance.
            reorder: false,
            timing: Some(shape.timing.clone()),
            queues: vec![queue],
            ..DeviceConfig::default()
        };
        let core = core::Device::new(&config, 0, true).expect("a device that can be");
        Self { core, read_byte_ps: shape.timing.read_byte_ps, busy_ps: 0, occupied: 0, early: Vec::new(), refused: 0 }
    }

    /// How long a device's bandwidth is taken by so many bytes that it only reads.
    pub fn service(timing: &Timing, bytes: u64) -> f64 {
        bytes as f64 * timing.read_byte_ps as f64 / 1000.0
    }

    /// `ENQCMD` of a batch of so many descriptors with so many bytes each: true if it was accepted.
    pub fn submit(&mut self, tag: u64, members: u32, bytes_of_each: u64, now: Nanos) -> bool {
        let timed = Timed { tag, members, bytes: bytes_of_each, ..Timed::default() };
        if self.core.submit(0, Posting::NonPosted, Payload::Timed(timed), now) != Submitted::Accepted {
            self.refused += 1;
            return false;
        }
        self.busy_ps += u64::from(members.max(1)) * bytes_of_each * self.read_byte_ps;
        self.occupied += 1;
        // An engine that is free takes it now.
        let mut early = std::mem::take(&mut self.early);
        self.poll(now, &mut early);
        self.early = early;
        true
    }

    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) {
        loop {
            match self.core.poll(now) {
                Step::Completed(done) => {
                    self.occupied -= 1;
                    out.push(Completed { tag: done.tag, at: done.at, begun: done.started });
                }
                Step::Idle { .. } => return,
                Step::Execute(_) | Step::Write(_) => unreachable!("nothing is handed in that is read or written"),
            }
        }
    }

    /// When something will next happen in it.
    pub fn next(&self) -> Option<Nanos> {
        self.early.first().map(|done| done.at).or_else(|| self.core.next_event())
    }

    /// Time has come to here: what has been done since goes to `out`.
    pub fn advance(&mut self, now: Nanos, out: &mut Vec<Completed>) {
        out.append(&mut self.early);
        self.poll(now, out);
    }

    /// Device time of all that was accepted since the beginning.
    pub fn busy(&self) -> f64 {
        self.busy_ps as f64 / 1000.0
    }

    /// Batches that were accepted and are not done.
    pub fn occupied(&self) -> usize {
        self.occupied
    }
}
