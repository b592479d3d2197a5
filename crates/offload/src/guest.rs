//! A guest among those that share a process's accelerators: what its channels have in common.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A guest, made by [`Offload::guest`](crate::Offload::guest). Shares of a device are between guests, however many channels each of
/// them has.
#[derive(Debug)]
pub struct Guest {
    pub(crate) number: u32,
    pub(crate) weight: u32,
    urgent: AtomicBool,
}

impl Guest {
    pub(crate) fn new(number: u32, weight: u32) -> Self {
        Self { number, weight, urgent: AtomicBool::new(false) }
    }

    /// Says whether somebody waits for its work, as for that of a guest that stands: from now on what its channels hand in goes to the
    /// queues that are kept for such work, where a device has any. It is not urgent at first.
    pub fn set_urgent(&self, urgent: bool) {
        self.urgent.store(urgent, Relaxed);
    }

    /// Whether somebody waits for its work.
    pub fn is_urgent(&self) -> bool {
        self.urgent.load(Relaxed)
    }
}
