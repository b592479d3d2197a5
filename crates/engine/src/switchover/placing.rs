//! The progress that a destination reports while pages arrive, a few times a second.

use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_wire::control::SourceProgress;

use super::Interruptions;
use crate::migration::Phase;
use crate::report::{Observer, ReceiveProgress, Shrinking, milliseconds};
use crate::session::PagesPlaced;

/// How often progress is reported.
const TICK: Duration = Duration::from_millis(250);

/// The progress of one destination.
#[derive(Debug)]
pub(super) struct Placing {
    started: Instant,
    next: Instant,
    progress: ReceiveProgress,
    /// The source's last report, and when it came.
    source: Option<(Instant, SourceProgress)>,
    /// The missing memory, for estimates.
    missing: Shrinking,
}

impl Placing {
    /// Starts the progress of a guest with `total_bytes` of RAM; 0 where the source has not sent how many.
    pub(super) fn new(total_bytes: u64) -> Self {
        let started = Instant::now();
        let progress = ReceiveProgress { total_bytes, ..ReceiveProgress::default() };
        Self { started, next: started + TICK, progress, source: None, missing: Shrinking::default() }
    }

    /// Records what the source has reported.
    pub(super) fn source_reports(&mut self, progress: SourceProgress) {
        self.source = Some((Instant::now(), progress));
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
    pub(super) fn report(
        &mut self,
        observer: &dyn Observer,
        phase: Phase,
        placed: PagesPlaced,
        missing_bytes: u64,
        interruptions: Interruptions,
    ) {
        let (interruptions, interrupted_ms) = interruptions.figures();
        let elapsed_ms = self.started.elapsed().as_millis() as u64;
        let interval = elapsed_ms.saturating_sub(self.progress.elapsed_ms).max(1) as f64 / 1e3;
        let placed_bytes = (placed.normal + placed.zero) * PAGE_SIZE as u64;
        let rate = placed_bytes.saturating_sub(self.progress.placed_bytes) as f64 / interval;
        let (remaining_bytes, time_left_ms) = if phase == Phase::PostCopy {
            (Some(missing_bytes), self.missing.time_left(missing_bytes, Instant::now()).map(milliseconds))
        } else {
            let since = |at: Instant| milliseconds(at.elapsed());
            let left = |(at, source): (Instant, SourceProgress)| Some(source.time_left_ms?.saturating_sub(since(at)));
            (self.source.map(|(_, source)| source.remaining_bytes), self.source.and_then(left))
        };
        self.progress = ReceiveProgress {
            phase,
            elapsed_ms,
            total_bytes: self.progress.total_bytes,
            placed_bytes,
            normal_pages: placed.normal,
            zero_pages: placed.zero,
            placed_rate: rate,
            missing_bytes,
            remaining_bytes,
            time_left_ms,
            interruptions,
            interrupted_ms,
        };
        observer.received(&self.progress);
    }
}
