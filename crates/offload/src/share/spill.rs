//! When the CPU is faster: compares the wait for the device with the CPU's recent time for the same bytes.
//!
//! The CPU's time is wall-clock time, waiting for a core included. So on a host whose cores are busy the CPU counts as
//! slow, and work keeps going to the device.

use super::Nanos;

/// The initial value, before a measurement: a zero scan of uncached memory at about 20 GB/s.
const FIRST_GUESS: f64 = 0.05;

/// The excess of a value over the best one halves in this time. Otherwise one busy moment would keep work off the CPU
/// for ever, since no new value is measured while the CPU does no work.
const HALF_LIFE: f64 = 5e6;

/// The CPU's time per byte.
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
    /// Learns from a batch that was done on the CPU.
    pub(super) fn learn(&mut self, bytes: u64, took: Nanos, now: Nanos) {
        if bytes == 0 {
            return;
        }
        let current = self.current(now);
        // A thread that lost its core for long must not make the CPU look useless: at most four times the last value.
        let seen = (took as f64 / bytes as f64).clamp(current / 4.0, current * 4.0);
        self.nanos_per_byte = (current * 0.75 + seen * 0.25).clamp(0.001, 100.0);
        // The best value rises slowly: the machine may have become slower permanently.
        self.best = (self.best * 1.001).min(self.nanos_per_byte);
        self.learned = now;
    }

    fn current(&self, now: Nanos) -> f64 {
        let age = now.saturating_sub(self.learned) as f64;
        self.best + (self.nanos_per_byte - self.best) * (-age / HALF_LIFE).exp2()
    }

    /// Returns how long these bytes will take on the CPU.
    pub(super) fn of(&self, bytes: u64, now: Nanos) -> Nanos {
        (self.current(now) * bytes as f64) as Nanos
    }
}
