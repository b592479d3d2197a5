//! When the CPU is the quicker way: the wait for the device against what the same bytes took on the CPU lately.
//!
//! The CPU's figure is learned by the clock, waiting for a core included. So on a host whose cores are taken, the CPU looks
//! as slow as it is, and work keeps going to the device.

use super::Nanos;

/// A zero scan of memory that is in no cache, before one was measured: about 20 GB/s.
const FIRST_GUESS: f64 = 0.05;

/// What doing it on the CPU costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct CpuCost {
    nanos_per_byte: f64,
}

impl Default for CpuCost {
    fn default() -> Self {
        Self { nanos_per_byte: FIRST_GUESS }
    }
}

impl CpuCost {
    /// A batch was done on the CPU.
    pub(super) fn learn(&mut self, bytes: u64, took: Nanos) {
        if bytes == 0 {
            return;
        }
        // A thread that lost its core for long must not teach that the CPU is useless: at most four times the last figure.
        let seen = (took as f64 / bytes as f64).clamp(self.nanos_per_byte / 4.0, self.nanos_per_byte * 4.0);
        self.nanos_per_byte = (self.nanos_per_byte * 0.875 + seen * 0.125).clamp(0.001, 100.0);
    }

    /// How long these bytes will take on it.
    pub(super) fn of(&self, bytes: u64) -> Nanos {
        (self.nanos_per_byte * bytes as f64) as Nanos
    }
}
