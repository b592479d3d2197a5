//! Bounds how much CPU time the choice of methods may use: otherwise the best compression would take every core from
//! the other guests of this host.
//!
//! All sending threads draw their CPU time from one bucket that fills as time passes. While the bucket is in debt, the
//! threads choose cheaper methods.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum CPU time that is saved up; also the debt at which no method is worth its CPU time.
const SPAN: Duration = Duration::from_millis(10);
/// Maximum debt: a few batches at the slowest levels. A larger debt would restrict the choice long after CPU use that
/// could not be avoided.
const MAX_DEBT: Duration = Duration::from_millis(30);

/// The allowance that the sending threads of one migration share.
#[derive(Debug)]
pub(crate) struct CpuAllowance {
    cores: f64,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// CPU seconds; debt below 0.
    level: f64,
    at: Instant,
}

impl CpuAllowance {
    /// Makes an allowance of `cores` CPU cores, more than 0.
    pub(crate) fn new(cores: f64) -> Self {
        assert!(cores > 0.0, "threads without CPU time cannot send");
        Self { cores, bucket: Mutex::new(Bucket { level: 0.0, at: Instant::now() }) }
    }

    /// Records that a thread has run for `running` since its last call. Returns how far all threads together exceed the
    /// allowance: from 0, not at all, to 1, far.
    pub(crate) fn used(&self, running: Duration) -> f64 {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner).used(running, Instant::now(), self.cores)
    }
}

impl Bucket {
    fn used(&mut self, running: Duration, now: Instant, cores: f64) -> f64 {
        let span = SPAN.as_secs_f64();
        let elapsed = now.saturating_duration_since(self.at);
        self.at += elapsed;
        self.level = (self.level + cores * elapsed.as_secs_f64()).min(span) - running.as_secs_f64();
        self.level = self.level.max(-MAX_DEBT.as_secs_f64());
        (-self.level / span).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs for `part` of each of `times` milliseconds, and returns how far the allowance is exceeded.
    fn beyond(bucket: &mut Bucket, cores: f64, part: f64, times: u32) -> f64 {
        let mut beyond = 0.0;
        for _ in 0..times {
            let now = bucket.at + MS;
            beyond = bucket.used(MS.mul_f64(part), now, cores);
        }
        beyond
    }

    #[test]
    fn use_within_the_allowance_never_exceeds_it_and_higher_use_soon_does() {
        let mut bucket = Bucket { level: 0.0, at: Instant::now() };
        assert_eq!(beyond(&mut bucket, 0.5, 0.49, 1000), 0.0);
        assert!(beyond(&mut bucket, 0.5, 0.6, 1000) > 0.99);
        // Half of the debt is paid in the time of a core, and the whole debt is at most 30 ms.
        assert!(beyond(&mut bucket, 0.5, 0.0, 39) > 0.99);
        assert_eq!(beyond(&mut bucket, 0.5, 0.0, 22), 0.0);
        let twice = 2.0;
        assert_eq!(beyond(&mut bucket, twice, 1.9, 1000), 0.0);
    }

    #[test]
    fn a_clock_that_stops_or_goes_back_adds_nothing() {
        let mut bucket = Bucket { level: 0.0, at: Instant::now() };
        let at = bucket.at;
        assert_eq!(bucket.used(SPAN, at, 4.0), 1.0);
        assert_eq!(bucket.used(Duration::ZERO, at, 4.0), 1.0);
        assert_eq!(bucket.used(Duration::ZERO, at + SPAN, 1.0), 0.0);
    }
}
