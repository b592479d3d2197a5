//! Estimates of the time left.

use std::time::{Duration, Instant};

/// Memory that only becomes less, as in post-copy: what is left takes as long as its average rate so far tells.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shrinking(Option<(Instant, u64)>);

impl Shrinking {
    /// Estimates the time until nothing remains; none before anything has become less. Memory that has become more begins anew.
    pub(crate) fn time_left(&mut self, remaining: u64, now: Instant) -> Option<Duration> {
        let (since, from) = *self.0.get_or_insert((now, remaining));
        if remaining > from {
            self.0 = Some((now, remaining));
            return None;
        }
        let gone = from - remaining;
        if remaining == 0 {
            return Some(Duration::ZERO);
        }
        let elapsed = now.saturating_duration_since(since).as_secs_f64();
        let left = elapsed * remaining as f64 / gone as f64;
        (gone > 0).then(|| Duration::from_secs_f64(left.min(1e9)))
    }
}

/// Returns `time` in whole milliseconds.
pub(crate) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_takes_as_long_as_the_average_so_far_tells() {
        let (mut rest, begun) = (Shrinking::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(rest.time_left(1000, at(0)), None);
        assert_eq!(rest.time_left(1000, at(1)), None, "nothing has become less");
        assert_eq!(rest.time_left(750, at(2)), Some(Duration::from_secs(6)));
        assert_eq!(rest.time_left(500, at(8)), Some(Duration::from_secs(8)));
        assert_eq!(rest.time_left(0, at(9)), Some(Duration::ZERO));
    }

    #[test]
    fn memory_that_was_lost_with_a_connection_begins_the_estimate_anew() {
        let (mut rest, begun) = (Shrinking::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(rest.time_left(100, at(0)), None);
        assert_eq!(rest.time_left(200, at(10)), None);
        assert_eq!(rest.time_left(100, at(12)), Some(Duration::from_secs(2)));
    }
}
