//! A guest that shares a process's accelerators with others: the state common to its channels.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A guest, made by [`Offload::guest`](crate::Offload::guest). A device is shared between guests, however many channels
/// each guest has.
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

    /// Sets whether the guest's work is urgent, as it is while the guest is paused: its channels then submit to the
    /// queues reserved for urgent work, where a device has any. A guest is not urgent at first.
    pub fn set_urgent(&self, urgent: bool) {
        self.urgent.store(urgent, Relaxed);
    }

    /// Returns whether the guest's work is urgent.
    pub fn is_urgent(&self) -> bool {
        self.urgent.load(Relaxed)
    }
}
