//! Bounds the CPU time of the sending threads: otherwise the best compression would take every core from the other guests of this host.
//!
//! All sending threads draw their CPU time from one bucket that fills as time passes. While the bucket is in debt, `auto` chooses cheaper
//! methods; threads whose debt goes further pause until it is paid. While the guest is paused there is no limit: its downtime is worth more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The bucket's capacity. Debt up to the same amount pauses no thread: `auto` reacts first.
const MAX_CREDIT: Duration = Duration::from_millis(10);
/// Maximum debt. More than the debt of 64 threads after one packet each at the slowest level.
const MAX_DEBT: Duration = Duration::from_secs(2);
/// Maximum time of one pause, so that a thread notices soon that the guest is paused or that the migration has ended.
const MAX_PAUSE: Duration = Duration::from_millis(20);

/// The allowance that the sending threads of one migration share.
#[derive(Debug)]
pub(crate) struct CpuAllowance {
    cores: f64,
    bucket: Mutex<Bucket>,
    limited: AtomicBool,
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
        let bucket = Mutex::new(Bucket { level: 0.0, at: Instant::now() });
        Self { cores, bucket, limited: AtomicBool::new(true) }
    }

    /// Sets whether the limit holds from now on; it does at first.
    pub(crate) fn set_limited(&self, limited: bool) {
        self.limited.store(limited, Ordering::Relaxed);
    }

    /// Records that a thread has run for `running` since its last call. Returns how long the thread must pause now.
    pub(crate) fn use_up(&self, running: Duration) -> Duration {
        if !self.limited.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        let mut bucket = self.bucket();
        bucket.use_up(running, Instant::now(), self.cores);
        bucket.pause(self.cores).min(MAX_PAUSE)
    }

    /// Returns how far all threads together exceed the allowance: from 0, not at all, to 1, far.
    pub(crate) fn beyond(&self) -> f64 {
        self.bucket().beyond()
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bucket {
    fn use_up(&mut self, running: Duration, now: Instant, cores: f64) {
        let elapsed = now.saturating_duration_since(self.at);
        self.at += elapsed;
        self.level = (self.level + cores * elapsed.as_secs_f64()).min(MAX_CREDIT.as_secs_f64()) - running.as_secs_f64();
        self.level = self.level.max(-MAX_DEBT.as_secs_f64());
    }

    fn beyond(&self) -> f64 {
        (-self.level / MAX_CREDIT.as_secs_f64()).clamp(0.0, 1.0)
    }

    /// Returns how long it takes until the debt is at most [`MAX_CREDIT`].
    fn pause(&self, cores: f64) -> Duration {
        let debt = -self.level - MAX_CREDIT.as_secs_f64();
        Duration::try_from_secs_f64(debt.max(0.0) / cores).unwrap_or(MAX_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs for `part` of each of `times` milliseconds, and returns how far the allowance is exceeded.
    fn beyond(bucket: &mut Bucket, cores: f64, part: f64, times: u32) -> f64 {
        for _ in 0..times {
            let now = bucket.at + MS;
            bucket.use_up(MS.mul_f64(part), now, cores);
        }
        bucket.beyond()
    }

    fn empty() -> Bucket {
        Bucket { level: 0.0, at: Instant::now() }
    }

    #[test]
    fn use_within_the_allowance_never_exceeds_it_and_higher_use_soon_does() {
        let mut bucket = empty();
        assert_eq!(beyond(&mut bucket, 0.5, 0.49, 1000), 0.0);
        assert!(beyond(&mut bucket, 0.5, 0.6, 200) > 0.99);
        // Half of the debt is paid in the time of a core.
        assert_eq!(beyond(&mut bucket, 0.5, 0.0, 45), 0.0);
        assert_eq!(beyond(&mut bucket, 2.0, 1.9, 1000), 0.0);
    }

    #[test]
    fn threads_that_pause_as_they_must_use_no_more_than_the_limit_however_they_run() {
        for (cores, packet) in [(0.5, MS), (0.25, 25 * MS), (1.5, MS / 2), (0.01, 5 * MS)] {
            let mut bucket = empty();
            let (begun, mut running) = (bucket.at, Duration::ZERO);
            let mut now = begun;
            while running < Duration::from_secs(20) {
                now += packet;
                running += packet;
                bucket.use_up(packet, now, cores);
                now += bucket.pause(cores);
            }
            let used = running.as_secs_f64() / (now - begun).as_secs_f64();
            // A thread that never pauses uses one core.
            let expected = cores.min(1.0);
            assert!((used / expected - 1.0).abs() < 0.01, "{used} of {cores} in packets of {packet:?}");
        }
    }

    #[test]
    fn a_clock_that_stops_or_goes_back_adds_nothing() {
        let mut bucket = empty();
        let at = bucket.at;
        bucket.use_up(MAX_CREDIT, at, 4.0);
        assert_eq!(bucket.beyond(), 1.0);
        bucket.use_up(Duration::ZERO, at, 4.0);
        assert_eq!(bucket.beyond(), 1.0);
        bucket.use_up(Duration::ZERO, at + MAX_CREDIT, 1.0);
        assert_eq!(bucket.beyond(), 0.0);
    }

    #[test]
    fn without_the_limit_no_thread_pauses_and_no_debt_is_recorded() {
        let allowance = CpuAllowance::new(0.001);
        allowance.set_limited(false);
        assert_eq!(allowance.use_up(Duration::from_secs(1)), Duration::ZERO);
        assert_eq!(allowance.beyond(), 0.0);
        allowance.set_limited(true);
        assert_eq!(allowance.use_up(Duration::from_secs(1)), MAX_PAUSE);
    }
}
