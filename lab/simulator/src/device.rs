//! A device in virtual time: the software model's own state machine, with batches that only take the predicted time.
//!
//! The project has one model of the device ([`sterna_idxd_model`]); this module uses it with one shared queue.

use sterna_idxd_model::core::{self, Payload, Posting, Step, Submitted, Timed};
use sterna_idxd_model::{DeviceConfig, QueueConfig};

pub use sterna_idxd_model::config::Timing;

use crate::Nanos;

/// The speed and size of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Its timing.
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

/// A batch whose record is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The tag of its submission.
    pub tag: u64,
    /// When the record became visible.
    pub at: Nanos,
    /// When an engine began it.
    pub begun: Nanos,
}

/// One device with one shared queue.
#[derive(Debug)]
pub struct Device {
    core: core::Device,
    read_byte_ps: u64,
    busy_ps: u64,
    occupied: usize,
    /// Batches that completed during a submission.
    early: Vec<Completed>,
    /// Batches refused because the queue was full.
    pub refused: u64,
}

impl Device {
    /// Makes an idle and empty device.
    ///
    /// # Panics
    /// If no device can have this shape.
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
            // No randomness.
            reorder: false,
            timing: Some(shape.timing.clone()),
            queues: vec![queue],
            ..DeviceConfig::default()
        };
        let core = core::Device::new(&config, 0, true).expect("a valid shape");
        Self { core, read_byte_ps: shape.timing.read_byte_ps, busy_ps: 0, occupied: 0, early: Vec::new(), refused: 0 }
    }

    /// Returns how long reading `bytes` bytes occupies a device's bandwidth.
    pub fn service(timing: &Timing, bytes: u64) -> f64 {
        bytes as f64 * timing.read_byte_ps as f64 / 1000.0
    }

    /// Submits by `ENQCMD` a batch of `members` descriptors with this many bytes each: returns true if it was accepted.
    pub fn submit(&mut self, tag: u64, members: u32, bytes_of_each: u64, now: Nanos) -> bool {
        let timed = Timed { tag, members, bytes: bytes_of_each, ..Timed::default() };
        if self.core.submit(0, Posting::NonPosted, Payload::Timed(timed), now) != Submitted::Accepted {
            self.refused += 1;
            return false;
        }
        self.busy_ps += u64::from(members.max(1)) * bytes_of_each * self.read_byte_ps;
        self.occupied += 1;
        // A free engine begins the batch now.
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
                Step::Execute(_) | Step::Write(_) => {
                    unreachable!("only timed work is submitted, which accesses no memory")
                }
            }
        }
    }

    /// Returns when its next event is due.
    pub fn next(&self) -> Option<Nanos> {
        self.early.first().map(|done| done.at).or_else(|| self.core.next_event())
    }

    /// Advances time: batches done since go to `out`.
    pub fn advance(&mut self, now: Nanos, out: &mut Vec<Completed>) {
        out.append(&mut self.early);
        self.poll(now, out);
    }

    /// Returns the device time of all batches accepted since the beginning.
    pub fn busy(&self) -> f64 {
        self.busy_ps as f64 / 1000.0
    }

    /// Returns how many batches are accepted and not done.
    pub fn occupied(&self) -> usize {
        self.occupied
    }
}
