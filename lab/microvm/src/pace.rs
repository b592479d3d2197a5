//! Computes how much work is due at a given rate.

use crate::config::Rate;
use std::time::{Duration, Instant};

/// Maximum pages in one step: well under a millisecond of work, so that pausing never waits long for a step's end.
pub(crate) const BATCH: u64 = 256;
/// How long a vCPU rests when little is due.
pub(crate) const SLICE: Duration = Duration::from_millis(5);
/// Maximum time that a busy host had no CPU for the guest and that is made up for.
const MAX_MISSED: Duration = Duration::from_millis(200);

/// The pace of one vCPU.
#[derive(Debug)]
pub(crate) struct Pace {
    last: Instant,
    /// Work that is due but not ordered yet, in nanoseconds times pages per second.
    owed: u128,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self { last: Instant::now(), owed: 0 }
    }

    /// Excludes a time in which the vCPU was held, which it need not make up for.
    pub(crate) fn held(&mut self, time: Duration) {
        self.last += time;
    }

    /// Returns the pages due at `now`, at most a batch, of a rate that `vcpus` share.
    pub(crate) fn due(&mut self, rate: Rate, vcpus: usize, now: Instant) -> u64 {
        let missed = now.saturating_duration_since(self.last).min(MAX_MISSED);
        self.last = now;
        let Rate::PagesPerSecond(rate) = rate else {
            self.owed = 0;
            return BATCH;
        };
        let page = 1_000_000_000 * vcpus as u128;
        // The limit is at least one page, else slow rates would never reach one.
        let most = (u128::from(rate) * MAX_MISSED.as_nanos()).max(page);
        self.owed = (self.owed + missed.as_nanos() * u128::from(rate)).min(most);
        let pages = (self.owed / page).min(u128::from(BATCH));
        self.owed -= pages * page;
        pages as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_kept_to_the_page_and_shared() {
        for (rate, vcpus) in [(1, 1), (7, 2), (1000, 1), (1000, 4), (40_000, 2)] {
            let mut pace = Pace::new();
            let mut now = pace.last;
            let mut pages = 0;
            for _ in 0..20_000 {
                now += Duration::from_millis(1);
                pages += pace.due(Rate::PagesPerSecond(rate), vcpus, now);
            }
            let expected = rate * 20 / vcpus as u64;
            assert!((expected - 1..=expected).contains(&pages), "{pages} of {expected}");
        }
    }

    #[test]
    fn nothing_is_due_at_rate_zero_and_a_batch_without_limit() {
        let mut pace = Pace::new();
        let later = pace.last + Duration::from_secs(5);
        assert_eq!(pace.due(Rate::PagesPerSecond(0), 1, later), 0);
        assert_eq!(pace.due(Rate::Unlimited, 1, later), BATCH);
    }

    #[test]
    fn nothing_is_due_for_the_time_that_the_vcpu_was_held() {
        let mut pace = Pace::new();
        let (mut now, mut pages) = (pace.last, 0);
        for _ in 0..1000 {
            pace.held(Duration::from_millis(9));
            now += Duration::from_millis(10);
            pages += pace.due(Rate::PagesPerSecond(10_000), 1, now);
        }
        assert_eq!(pages, 10_000);
    }

    #[test]
    fn what_was_missed_is_not_made_up_for() {
        let mut pace = Pace::new();
        let mut now = pace.last + Duration::from_secs(100);
        let rate = Rate::PagesPerSecond(100_000);
        let mut pages = 0;
        for _ in 0..1000 {
            pages += pace.due(rate, 1, now);
            now += Duration::from_nanos(1);
        }
        assert_eq!(pages, 20_000);
    }
}
