//! When the CPU is the quicker way: the wait for the device against what the same bytes took on the CPU lately.
//!
//! The CPU's figure is learned by the clock, waiting for a core included. So on a host whose cores are taken, the CPU looks
//! as slow as it is, and work keeps going to the device.

use super::Nanos;

/// A zero scan of memory that is in no cache, before one was measured: about 20 GB/s.
const FIRST_GUESS: f64 = 0.05;

/// A figure that was higher than the best is forgotten by half in this time. Else one busy moment would keep work off the CPU
/// for ever, since nothing new is learned where nothing is done.
const HALF_LIFE: f64 = 5e6;

/// What doing it on the CPU costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct CpuCost {
    nanos_per_byte: f64,
    best: f64,
    learned: Nanos,
}

impl Default for CpuCost {
    fn default() -> Self {
        Self { nanos_per_byte: FIRST_GUESS, best: FIRST_GUESS, learned: 0 }
    }
}

impl CpuCost {
    /// A batch was done on the CPU.
    pub(super) fn learn(&mut self, bytes: u64, took: Nanos, now: Nanos) {
        if bytes == 0 {
            return;
        }
        let current = self.current(now);
        // A thread that lost its core for long must not teach that the CPU is useless: at most four times the last figure.
        let seen = (took as f64 / bytes as f64).clamp(current / 4.0, current * 4.0);
        self.nanos_per_byte = (current * 0.75 + seen * 0.25).clamp(0.001, 100.0);
        // The best rises slowly: the machine may have become slower for good.
        self.best = (self.best * 1.001).min(self.nanos_per_byte);
        self.learned = now;
    }

    fn current(&self, now: Nanos) -> f64 {
        let age = now.saturating_sub(self.learned) as f64;
        self.best + (self.nanos_per_byte - self.best) * (-age / HALF_LIFE).exp2()
    }

    /// How long these bytes will take on it.
    pub(super) fn of(&self, bytes: u64, now: Nanos) -> Nanos {
        (self.current(now) * bytes as f64) as Nanos
    }
}
