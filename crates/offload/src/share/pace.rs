//! How much slower the device is than predicted: another user has work in it, or the prediction is wrong.
//!
//! A batch should be done when the batches before it and the batch itself have had their device time. The average
//! excess over that stretches all predictions of the work still in the device.

use super::Nanos;

/// The largest factor that is accepted: completions that were noticed late look the same.
const MAX_FACTOR: f64 = 4.0;
const SMOOTH: f64 = 1.0 / 16.0;

#[derive(Clone, Copy, Debug)]
pub(super) struct Pace(f64);

impl Default for Pace {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Pace {
    /// Records that a batch took `sojourn` where `expected` was predicted.
    pub(super) fn learn(&mut self, sojourn: Nanos, expected: Nanos) {
        let seen = (sojourn as f64 / expected.max(1) as f64).clamp(1.0, MAX_FACTOR);
        self.0 += (seen - self.0) * SMOOTH;
    }

    /// Returns how long this much device time will really take.
    pub(super) fn stretch(&self, device: Nanos) -> Nanos {
        (device as f64 * self.0) as Nanos
    }
}
