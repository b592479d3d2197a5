//! The downtime in reports: the moments of a switchover, and the parts that lie between them.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Where the downtime went, each in milliseconds. Their sum is the downtime as Sterna sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DowntimeParts {
    /// Stopping the guest, where Sterna does it itself.
    pub stop_ms: f64,
    /// From the guest's stop to the last page acknowledged, without the time in which only saving the state was waited for (beside QEMU: and
    /// the last byte of its state).
    pub last_round_ms: f64,
    /// That time, and from the last page acknowledged to the last byte of the monitor's state handed over; beside QEMU part of the last
    /// round.
    pub state_ms: f64,
    /// From then until the destination has loaded everything.
    pub load_ms: f64,
    /// From there to the decision on disk.
    pub commit_ms: f64,
    /// From the decision to the guest running at the destination.
    pub start_ms: f64,
}

/// The moments that the downtime's parts lie between, at the source. Each is none until it has come.
#[derive(Debug, Default)]
pub struct Moments {
    /// The guest was asked to stop, or stopped of itself.
    pub pausing: Option<Instant>,
    /// The guest was paused.
    pub paused: Option<Instant>,
    /// All of its RAM was acknowledged.
    pub drained: Option<Instant>,
    /// How long before that nothing but saving the state was waited for: saving may write pages.
    pub saving: Duration,
    /// The monitor's state was handed over.
    pub saved: Option<Instant>,
    /// The destination was prepared.
    pub prepared: Option<Instant>,
    /// The decision was on disk.
    pub decided: Option<Instant>,
    /// For how long the destination held the report back that the guest runs with all of its memory, to watch the guest's first moment.
    pub watched: Duration,
    /// The destination reported that the guest runs.
    pub running: Option<Instant>,
    /// The destination reported that the guest runs with all of its memory.
    pub complete: Option<Instant>,
}

/// Milliseconds between two moments; 0 where one of them has not come.
pub fn between(from: Option<Instant>, to: Option<Instant>) -> f64 {
    match (from, to) {
        (Some(from), Some(to)) => to.saturating_duration_since(from).as_secs_f64() * 1e3,
        _ => 0.0,
    }
}

impl Moments {
    /// Records that the guest is paused. Where it was not this side that paused it, the pause began now.
    pub fn stopped(&mut self) {
        self.paused = Some(*self.pausing.get_or_insert_with(Instant::now));
    }

    /// Records that the guest runs on after all.
    pub fn runs_on(&mut self) {
        (self.pausing, self.paused) = (None, None);
    }

    /// Records that the destination has reported now that the guest runs with all of its memory. It did so before the destination watched it.
    pub(crate) fn runs_complete(&mut self) {
        let now = Instant::now();
        let since = now.checked_sub(self.watched).unwrap_or(now).max(self.decided.unwrap_or(now));
        let complete = *self.complete.get_or_insert(since);
        self.running.get_or_insert(complete);
    }

    /// From the guest's stop to its running at the destination, ms.
    pub fn downtime_ms(&self) -> f64 {
        between(self.pausing, self.running)
    }

    /// What the downtime consists of.
    pub fn parts(&self) -> DowntimeParts {
        // State is written while the last pages travel: what of it takes longer than they do is its own part.
        let sent = self.drained.max(self.saved);
        let saving = self.saving.as_secs_f64() * 1e3;
        DowntimeParts {
            stop_ms: between(self.pausing, self.paused),
            last_round_ms: (between(self.paused, self.drained) - saving).max(0.0),
            state_ms: between(self.drained, sent) + saving,
            load_ms: between(sent, self.prepared),
            commit_ms: between(self.prepared, self.decided),
            start_ms: between(self.decided, self.running),
        }
    }
}
