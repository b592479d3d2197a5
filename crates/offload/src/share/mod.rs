//! Who may put how much work on a device, and when.
//!
//! A work queue of the hardware is a plain FIFO that serves whoever is quickest to fill it, and what is in it is everyone's
//! waiting time. So admission happens here, before the hardware: little is let in at once, and who is let in next follows
//! the weights. There is no clock and no device in this module: time is passed in, which lets the simulator run the very
//! same code in virtual time.
//!
//! | share | who is bound by it | weights |
//! |---|---|---|
//! | [`Fifo`] | nobody | none |
//! | [`Fair`] | the VMs of one process | exact |
//! | [`Ledger`] | processes that keep the same ledger | exact among those who are honest |
//! | [`DelayBased`] | each by itself, from what it measures | none; waiting is bounded, the rest goes to the CPU |
//!
//! How a caller uses one: [`Share::ask`] before a batch is submitted; on [`Verdict::Wait`] ask again at that moment or when
//! a batch of its own has completed, whichever is first; on [`Verdict::Spill`] do the batch on the CPU and say how long it
//! took ([`Share::spilled`]). Every grant goes back by [`Share::done`] or [`Share::dropped`]. Who waits and then does not
//! come back loses its turn and holds nobody up.

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

/// A moment or a span in nanoseconds, on a clock that never goes back.
pub type Nanos = u64;

/// The most bytes in one batch while others wait: a batch is everyone's waiting time.
pub const CONTENDED_BATCH: u64 = 512 << 10;

/// Device time that is let into one hardware queue at once, where shares are kept: 300 µs. Less leaves the device idle
/// while the next in turn wakes; more is waiting that nobody can be spared any more.
pub const IN_FLIGHT: Nanos = 300_000;

/// The largest weight; larger ones count as this. The least is 1.
pub const MAX_WEIGHT: u32 = 1000;

/// How long room is kept for one that was told to come back and is late: 50 µs. After that others are let past it; it keeps its
/// place in the order.
pub const PATIENCE: Nanos = 50_000;

/// A batch that wants to go to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Whose it is; shares are between these.
    pub vm: u32,
    /// Which of the VM's channels asks: several may wait at one time.
    pub channel: u32,
    /// How much this VM may have beside the others, 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// Device time that it will take, by a [`Predictor`].
    pub predicted: Nanos,
    /// Bytes that the device will read.
    pub bytes: u64,
}

/// The answer.
#[derive(Debug)]
#[must_use]
pub enum Verdict {
    /// Submit it now. The grant goes back when it has completed.
    Admit(Grant),
    /// Not yet. Ask again then, or when a batch of one's own has completed.
    Wait {
        /// The moment to ask again; never in the past.
        until: Nanos,
    },
    /// The CPU is the quicker way: do it there.
    Spill,
}

/// Permission for one batch: room in the hardware queue that is taken until the grant is given back.
#[derive(Debug)]
#[must_use]
pub struct Grant {
    pub(crate) vm: u32,
    pub(crate) predicted: Nanos,
    pub(crate) bytes: u64,
    /// From submission to completion, as reckoned when it was let in; 0 where nothing was.
    pub(crate) expected: Nanos,
}

impl Grant {
    /// Whose batch it is for.
    pub fn vm(&self) -> u32 {
        self.vm
    }

    /// The device time that was predicted.
    pub fn predicted(&self) -> Nanos {
        self.predicted
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Admission to one hardware queue, as one process sees it.
pub trait Share: Send {
    /// May this batch go now?
    fn ask(&mut self, ask: &Ask, now: Nanos) -> Verdict;

    /// A batch has completed, `sojourn` after it was submitted.
    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos);

    /// A batch will never complete or was never submitted.
    fn dropped(&mut self, grant: Grant);

    /// A batch of so many bytes was done on the CPU instead and took this long by the clock, waiting for a core included.
    fn spilled(&mut self, bytes: u64, took: Nanos, now: Nanos) {
        let _ = (bytes, took, now);
    }

    /// The most bytes that one batch should have now.
    fn largest_batch(&self) -> u64 {
        u64::MAX
    }
}

fn weight(weight: u32) -> u64 {
    u64::from(weight.clamp(1, MAX_WEIGHT))
}

#[cfg(test)]
mod tests;
