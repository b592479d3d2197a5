//! The shared resources: pipes of limited bandwidth, and cores with a run queue.

use std::collections::VecDeque;

use crate::Nanos;

/// A resource that moves bytes one after another at a limited bandwidth: memory, a network.
#[derive(Clone, Debug)]
pub struct Pipe {
    bytes_per_nano: f64,
    free: f64,
    moved: f64,
}

impl Pipe {
    /// Makes a pipe with this bandwidth in GB/s.
    pub fn new(gigabytes: f64) -> Self {
        Self { bytes_per_nano: gigabytes, free: 0.0, moved: 0.0 }
    }

    /// Returns when bytes that arrive now will have passed.
    pub fn reserve(&mut self, now: Nanos, bytes: f64) -> Nanos {
        self.free = self.free.max(now as f64) + bytes / self.bytes_per_nano;
        self.moved += bytes;
        self.free.ceil() as Nanos
    }

    /// Returns nanoseconds of work since the beginning.
    pub fn busy(&self) -> f64 {
        self.moved / self.bytes_per_nano
    }
}

/// The cores of a host and the threads that wait for one, first come first served.
#[derive(Clone, Debug, Default)]
pub struct Cores {
    free: usize,
    waiting: VecDeque<usize>,
}

impl Cores {
    /// Makes `count` cores.
    pub fn new(count: usize) -> Self {
        Self { free: count, waiting: VecDeque::new() }
    }

    /// Requests a core for a thread; returns true if it has one.
    pub fn want(&mut self, thread: usize) -> bool {
        if self.free > 0 {
            self.free -= 1;
            return true;
        }
        self.waiting.push_back(thread);
        false
    }

    /// Releases a core. Returns the waiting thread that gets it.
    pub fn give(&mut self) -> Option<usize> {
        let next = self.waiting.pop_front();
        if next.is_none() {
            self.free += 1;
        }
        next
    }

    /// Returns whether any thread waits.
    pub fn wanted(&self) -> bool {
        !self.waiting.is_empty()
    }
}
