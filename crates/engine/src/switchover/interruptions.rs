//! How often, and for how long, a migration was interrupted: the connection was lost before the decision, and the migration went on later.

use std::time::{Duration, Instant};

/// The interruptions of one migration, as one side has noticed them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Interruptions {
    count: u32,
    /// All of them together, but for one that lasts.
    ended: Duration,
    since: Option<Instant>,
}

impl Interruptions {
    /// Records that the connection is lost. Without effect where it is lost already.
    pub(crate) fn begin(&mut self) {
        if self.since.is_none() {
            (self.count, self.since) = (self.count + 1, Some(Instant::now()));
        }
    }

    /// Records that the migration goes on. Returns how long the interruption has lasted.
    pub(crate) fn end(&mut self) -> Duration {
        let lasted = self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        self.ended += lasted;
        lasted
    }

    /// Returns how often the migration was interrupted, and for how many milliseconds all together.
    pub(crate) fn figures(&self) -> (u32, f64) {
        let lasts = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        (self.count, (self.ended + lasts).as_secs_f64() * 1e3)
    }
}
