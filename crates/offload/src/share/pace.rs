//! How much slower the device is than predicted: someone else uses it, or the prediction is wrong.
//!
//! A batch should be done when everything before it and itself have had their device time. What it takes longer than
//! that, on average, stretches all reckoning of what is still in the device.

use super::Nanos;

/// More than this is not believed: completions that were noticed late look the same.
const MOST: f64 = 4.0;
const SMOOTH: f64 = 1.0 / 16.0;

#[derive(Clone, Copy, Debug)]
pub(super) struct Pace(f64);

impl Default for Pace {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Pace {
    /// A batch took this long where so much was expected.
    pub(super) fn learn(&mut self, sojourn: Nanos, expected: Nanos) {
        let seen = (sojourn as f64 / expected.max(1) as f64).clamp(1.0, MOST);
        self.0 += (seen - self.0) * SMOOTH;
    }

    /// How long so much device time will really take.
    pub(super) fn stretch(&self, device: Nanos) -> Nanos {
        (device as f64 * self.0) as Nanos
    }
}
