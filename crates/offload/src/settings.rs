//! What can be set, with what it is by default.

use std::sync::Arc;
use std::time::Duration;

use crate::time::{SystemTime, Time};

/// How many pages that a device called zero are read again by the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recheck {
    /// One in this many; 64 by default. At least 1.
    OneIn(u32),
    /// Every one.
    All,
    /// None.
    None,
}

/// Settings of an [`Offload`](crate::Offload).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Most pages of a batch, and most items: 128 (512 KiB, a packet) by default, 1024 at most. A batch on a shared queue is
    /// everyone's waiting time.
    pub batch_pages: usize,
    /// Most batches that one channel has under way: 64 by default.
    pub in_flight: usize,
    /// How much of a device's zero pages is checked.
    pub recheck: Recheck,
    /// Least time before a device that says nothing is given up: 1 s by default, and not less in earnest.
    pub patience: Duration,
    /// Retries of a submission that the queue refuses, before the CPU does the work.
    pub retries: u32,
    /// Whether threads run by themselves: the backstop, and the closing of devices out of service. Without, somebody calls
    /// [`Offload::turn`](crate::Offload::turn): tests, in virtual time.
    pub threads: bool,
    /// Where time comes from.
    pub time: Arc<dyn Time>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            batch_pages: 128,
            in_flight: 64,
            recheck: Recheck::OneIn(64),
            patience: Duration::from_secs(1),
            retries: 16,
            threads: true,
            time: Arc::new(SystemTime),
        }
    }
}
