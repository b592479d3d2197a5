//! How much of this side's CPUs the choice of methods may use: what compresses best would else take every core it finds from the guests
//! beside.
//!
//! The CPU time of all sending threads together lies in a bucket that fills as time passes. Who is in debt chooses what costs less, until
//! it is paid.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is saved up at most, and the debt with which nothing is worth its CPU time any more.
const SPAN: Duration = Duration::from_millis(10);
/// Most that is owed: some batches at the levels that take longest. More would be paid for long after what could not be avoided.
const MAX_DEBT: Duration = Duration::from_millis(30);

/// Shared by the sending threads of one migration.
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
    /// So many cores, more than 0.
    pub(crate) fn new(cores: f64) -> Self {
        assert!(cores > 0.0, "what may not run at all sends nothing");
        Self { cores, bucket: Mutex::new(Bucket { level: 0.0, at: Instant::now() }) }
    }

    /// A thread has run for `running` since it last said so; says how far all of them are beyond what they may use: 0 not at all, 1 far.
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

    /// Runs for `part` of each millisecond, for `times` of them.
    fn beyond(bucket: &mut Bucket, cores: f64, part: f64, times: u32) -> f64 {
        let mut beyond = 0.0;
        for _ in 0..times {
            let now = bucket.at + MS;
            beyond = bucket.used(MS.mul_f64(part), now, cores);
        }
        beyond
    }

    #[test]
    fn who_stays_within_it_is_never_beyond_and_who_does_not_soon_is() {
        let mut bucket = Bucket { level: 0.0, at: Instant::now() };
        assert_eq!(beyond(&mut bucket, 0.5, 0.49, 1000), 0.0);
        assert!(beyond(&mut bucket, 0.5, 0.6, 1000) > 0.99);
        // Half of what is owed is paid in the time of a core, and all of it is 30 ms at most.
        assert!(beyond(&mut bucket, 0.5, 0.0, 39) > 0.99);
        assert_eq!(beyond(&mut bucket, 0.5, 0.0, 22), 0.0);
        let twice = 2.0;
        assert_eq!(beyond(&mut bucket, twice, 1.9, 1000), 0.0);
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_pays_nothing() {
        let mut bucket = Bucket { level: 0.0, at: Instant::now() };
        let at = bucket.at;
        assert_eq!(bucket.used(SPAN, at, 4.0), 1.0);
        assert_eq!(bucket.used(Duration::ZERO, at, 4.0), 1.0);
        assert_eq!(bucket.used(Duration::ZERO, at + SPAN, 1.0), 0.0);
    }
}
