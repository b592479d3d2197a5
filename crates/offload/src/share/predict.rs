//! Predicts the device time of a batch: a time per byte and a time per descriptor, learned from completions.
//!
//! The observed time runs from the earliest start on the device to the noticed completion: other processes' batches in
//! between and late looks make it longer, never shorter. So the prediction follows a low quantile rather than the mean,
//! in steps of bounded size: one observation, however extreme, changes it by a few per cent.

use super::Nanos;

/// The quantile that the prediction follows.
const QUANTILE: f64 = 0.25;
/// Size of a step at first and in the long run, relative.
const FIRST_STEP: f64 = 0.08;
const LAST_STEP: f64 = 0.01;
/// The values stay within this factor of their initial values.
const RANGE: f64 = 16.0;

/// The predictor of one operation on one device.
#[derive(Clone, Copy, Debug)]
pub struct Predictor {
    first_per_byte: f64,
    first_per_descriptor: f64,
    per_byte: f64,
    per_descriptor: f64,
    step: f64,
    last_completed: Nanos,
}

impl Default for Predictor {
    /// 30 GB/s and 20 ns for each descriptor.
    fn default() -> Self {
        Self::new(1.0 / 30.0, 20.0)
    }
}

impl Predictor {
    /// Starts with these values, in nanoseconds.
    ///
    /// # Panics
    /// If one of them is not above zero.
    pub fn new(per_byte: f64, per_descriptor: f64) -> Self {
        assert!(per_byte > 0.0 && per_descriptor > 0.0, "a device takes time");
        Self {
            first_per_byte: per_byte,
            first_per_descriptor: per_descriptor,
            per_byte,
            per_descriptor,
            step: FIRST_STEP,
            last_completed: 0,
        }
    }

    /// Returns the device time of `bytes` bytes in `descriptors` descriptors.
    pub fn predict(&self, bytes: u64, descriptors: u32) -> Nanos {
        (self.exact(bytes, descriptors) as Nanos).max(1)
    }

    fn exact(&self, bytes: u64, descriptors: u32) -> f64 {
        self.per_byte * bytes as f64 + self.per_descriptor * f64::from(descriptors)
    }

    /// Learns from a batch that was submitted and seen complete at these times. Call it in the order of completion on
    /// one queue.
    pub fn learn(&mut self, bytes: u64, descriptors: u32, submitted: Nanos, completed: Nanos) {
        let begun = submitted.max(self.last_completed);
        self.last_completed = self.last_completed.max(completed);
        let predicted = self.exact(bytes, descriptors);
        if completed <= begun || predicted <= 0.0 {
            // Completed together with the batch before: its own time is unknown.
            return;
        }
        let taken = (completed - begun) as f64;
        let direction = if taken > predicted { QUANTILE } else { QUANTILE - 1.0 };
        let change = self.step * direction;
        let share = self.per_byte * bytes as f64 / predicted;
        self.per_byte = within(self.per_byte * (1.0 + change * share), self.first_per_byte);
        self.per_descriptor = within(self.per_descriptor * (1.0 + change * (1.0 - share)), self.first_per_descriptor);
        self.step = (self.step * 0.998).max(LAST_STEP);
    }
}

fn within(value: f64, first: f64) -> f64 {
    value.clamp(first / RANGE, first * RANGE)
}
