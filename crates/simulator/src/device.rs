//! A device as a queue with engines, in virtual time.
//!
//! A batch takes an entry of the queue from the moment it is accepted until it is done. It is fetched by one engine, which works
//! on it until its last byte; all engines share the device's bandwidth. So
//! with one engine and one source it is the M/D/1 queue of the textbooks, which the tests compare it with.

use std::collections::VecDeque;

use crate::Nanos;
use crate::costs::DeviceTiming;

/// A batch whose record can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// As it was submitted.
    pub tag: u64,
    /// When the record became visible.
    pub at: Nanos,
    /// When an engine took it.
    pub begun: Nanos,
    /// Of the device's bandwidth, how long it took.
    pub busy: Nanos,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    tag: u64,
    members: u32,
    bytes: u64,
}

/// One device with one shared queue.
#[derive(Clone, Debug)]
pub struct Device {
    timing: DeviceTiming,
    queue: VecDeque<Queued>,
    /// Under work, with the moment that its engine is free and its record visible.
    working: Vec<(Nanos, Completed)>,
    /// When the device's bandwidth is free again.
    pipe_free: Nanos,
    busy: Nanos,
    /// Batches refused because the queue was full.
    pub refused: u64,
}

impl Device {
    /// Idle and empty.
    pub fn new(timing: DeviceTiming) -> Self {
        Self { timing, queue: VecDeque::new(), working: Vec::new(), pipe_free: 0, busy: 0, refused: 0 }
    }

    /// How long the device as a whole is busy with a batch.
    pub fn service(timing: &DeviceTiming, members: u32, bytes: u64) -> Nanos {
        let overhead = timing.batch + timing.descriptor * u64::from(members);
        // Overheads are an engine's own; the others work meanwhile.
        let shared = overhead / timing.engines.max(1) as u64;
        (bytes * timing.byte_ps / 1000).max(shared)
    }

    /// `ENQCMD` of a batch: true if it was accepted.
    pub fn submit(&mut self, tag: u64, members: u32, bytes: u64, now: Nanos) -> bool {
        if self.queue.len() + self.working.len() >= self.timing.entries {
            self.refused += 1;
            return false;
        }
        self.queue.push_back(Queued { tag, members, bytes });
        self.start(now);
        true
    }

    fn start(&mut self, now: Nanos) {
        while self.working.len() < self.timing.engines {
            let Some(next) = self.queue.pop_front() else { return };
            let timing = &self.timing;
            let service = Self::service(timing, next.members, next.bytes);
            let engine =
                timing.batch + timing.descriptor * u64::from(next.members) + next.bytes * timing.engine_byte_ps / 1000;
            let begun = now;
            self.pipe_free = self.pipe_free.max(now) + service;
            self.busy += service;
            let free = self.pipe_free.max(now + engine);
            let completed = Completed { tag: next.tag, at: free + timing.latency, begun, busy: service };
            self.working.push((free, completed));
        }
    }

    /// When something will next happen in it.
    pub fn next(&self) -> Option<Nanos> {
        self.working.iter().map(|(free, _)| *free).min()
    }

    /// Time has come to here: what has been done since goes to `out`; its `at` may still lie ahead by the latency.
    pub fn advance(&mut self, now: Nanos, out: &mut Vec<Completed>) {
        while let Some(first) = self.next()
            && first <= now
        {
            let place = self.working.iter().position(|(free, _)| *free == first).expect("the least of them");
            out.push(self.working.swap_remove(place).1);
            self.start(first);
        }
    }

    /// Device time used since the beginning.
    pub fn busy(&self) -> Nanos {
        self.busy
    }

    /// Entries taken.
    pub fn occupied(&self) -> usize {
        self.queue.len() + self.working.len()
    }
}
