//! Admission to a device: which submitter may submit how much work, and when.
//!
//! A work queue of the hardware is a plain FIFO: the fastest submitter fills it, and its content is every submitter's
//! waiting time. So admission happens here, before the hardware: little is admitted at once, and the order of admission
//! follows the weights. This module has no clock and no device: time is passed in, which lets the simulator run the
//! very same code in virtual time.
//!
//! | share | members | weights |
//! |---|---|---|
//! | [`Fifo`] | – | none |
//! | [`Fair`] | the VMs of one process | exact |
//! | [`Ledger`] | processes that keep the same ledger | exact among honest processes |
//! | [`DelayBased`] | each process by itself, from its measurements | none; waiting is bounded, the rest goes to the CPU |
//!
//! Use: call [`Share::ask`] before a batch is submitted. On [`AdmissionDecision::Wait`] ask again at the given time or when
//! another batch of the caller has completed, whichever is first. On [`AdmissionDecision::Spill`] do the batch on the CPU and
//! report how long that took ([`Share::spilled`]). Return every grant by [`Share::done`] or [`Share::dropped`]. A
//! caller that waits and does not ask again loses its turn and delays no other.

mod delay;
mod fair;
mod fifo;
pub mod ledger;
mod pace;
mod predict;
mod spill;
mod turns;

pub use delay::{DelayBased, DelaySettings};
pub use fair::Fair;
pub use fifo::Fifo;
pub use ledger::Ledger;
pub use predict::Predictor;

/// A time or a duration in nanoseconds, on a monotonic clock.
pub type Nanos = u64;

/// The most bytes in one batch while other submitters wait: they all wait for the batch.
pub const CONTENDED_BATCH: u64 = 512 << 10;

/// Device time that is admitted into one hardware queue at once, where a share limits it: 300 µs. Less leaves the
/// device idle while the thread of the next turn wakes; more is waiting time that cannot be avoided any more.
pub const IN_FLIGHT: Nanos = 300_000;

/// The largest weight; larger ones count as this. The smallest is 1.
pub const MAX_WEIGHT: u32 = 1000;

/// How long the place of a waiting caller is reserved when it is late: 50 µs. After that other batches pass it; it
/// keeps its place in the order.
pub const PATIENCE: Nanos = 50_000;

/// A batch for which admission is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionRequest {
    /// The VM that submits it; devices are shared between VMs.
    pub vm: u32,
    /// The VM's channel: several may wait at one time.
    pub channel: u32,
    /// The VM's weight beside the others, 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// Device time that it will take, predicted by a [`Predictor`].
    pub predicted: Nanos,
    /// Bytes that the device will read.
    pub bytes: u64,
}

/// The admission decision.
#[derive(Debug)]
#[must_use]
pub enum AdmissionDecision {
    /// Submit it now. Return the grant when it has completed.
    Admit(Grant),
    /// Not yet. Ask again at this time, or when another batch of the caller has completed.
    Wait {
        /// When to ask again; never in the past.
        until: Nanos,
    },
    /// Do it on the CPU, which is faster.
    Spill,
}

/// Permission for one batch: it occupies room in the hardware queue until it is returned.
#[derive(Debug)]
#[must_use]
pub struct Grant {
    pub(crate) vm: u32,
    pub(crate) predicted: Nanos,
    pub(crate) bytes: u64,
    /// Expected time from submission to completion, as of the admission; 0 where none was computed.
    pub(crate) expected: Nanos,
}

impl Grant {
    /// Returns the VM that the batch belongs to.
    pub fn vm(&self) -> u32 {
        self.vm
    }

    /// Returns the predicted device time.
    pub fn predicted(&self) -> Nanos {
        self.predicted
    }

    /// Returns the batch's bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Admission to one hardware queue, from the view of one process.
pub trait Share: Send {
    /// Decides whether this batch may be submitted now.
    fn ask(&mut self, request: &AdmissionRequest, now: Nanos) -> AdmissionDecision;

    /// Returns the grant of a batch that has completed, `sojourn` after its submission.
    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos);

    /// Returns the grant of a batch that will never complete or was never submitted.
    fn dropped(&mut self, grant: Grant);

    /// Records that a batch of `bytes` bytes was done on the CPU instead, in `took` of wall-clock time, waiting for a
    /// core included.
    fn spilled(&mut self, bytes: u64, took: Nanos, now: Nanos) {
        let _ = (bytes, took, now);
    }

    /// Returns the most bytes that one batch should have now.
    fn largest_batch(&self) -> u64 {
        u64::MAX
    }
}

fn weight(weight: u32) -> u64 {
    u64::from(weight.clamp(1, MAX_WEIGHT))
}

#[cfg(test)]
mod tests;
