//! The progress that a destination reports while pages arrive, a few times a second.

use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;

use crate::report::{Observer, ReceiveProgress};
use crate::session::PagesPlaced;

/// How often progress is reported.
const TICK: Duration = Duration::from_millis(250);

/// The progress of one destination.
#[derive(Debug)]
pub(super) struct Placing {
    started: Instant,
    next: Instant,
    progress: ReceiveProgress,
}

impl Placing {
    /// Starts the progress of a guest with `total_bytes` of RAM; 0 where the source has not sent how many.
    pub(super) fn new(total_bytes: u64) -> Self {
        let started = Instant::now();
        Self { started, next: started + TICK, progress: ReceiveProgress { total_bytes, ..ReceiveProgress::default() } }
    }

    /// Returns the time until the next report.
    pub(super) fn left(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Returns whether it is time to report, and if so sets the time of the next report.
    pub(super) fn is_due(&mut self) -> bool {
        let due = self.left().is_zero();
        if due {
            self.next = Instant::now() + TICK;
        }
        due
    }

    /// Reports the phase, how many pages were placed so far, and in post-copy how many bytes are still missing.
    pub(super) fn report(&mut self, observer: &dyn Observer, phase: &str, placed: PagesPlaced, missing_bytes: u64) {
        let elapsed_ms = self.started.elapsed().as_millis() as u64;
        let interval = elapsed_ms.saturating_sub(self.progress.elapsed_ms).max(1) as f64 / 1e3;
        let placed_bytes = (placed.normal + placed.zero) * PAGE_SIZE as u64;
        let rate = placed_bytes.saturating_sub(self.progress.placed_bytes) as f64 / interval;
        self.progress = ReceiveProgress {
            phase: phase.to_owned(),
            elapsed_ms,
            total_bytes: self.progress.total_bytes,
            placed_bytes,
            normal_pages: placed.normal,
            zero_pages: placed.zero,
            placed_rate: rate,
            missing_bytes,
        };
        observer.received(&self.progress);
    }
}
