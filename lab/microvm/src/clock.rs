//! The guest's own time: it runs while the guest runs, and moves with it.

use std::time::{Duration, Instant};

/// The clock of a machine.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    before: Duration,
    since: Option<Instant>,
}

impl Clock {
    /// Nanoseconds, 584 years of them.
    pub(crate) fn now(&self) -> u64 {
        let running = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        u64::try_from((self.before + running).as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) fn run(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    pub(crate) fn stop(&mut self) {
        self.before = Duration::from_nanos(self.now());
        self.since = None;
    }

    /// Makes a stopped clock that shows this time.
    pub(crate) fn at(nanoseconds: u64) -> Self {
        Self { before: Duration::from_nanos(nanoseconds), since: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stops_while_the_guest_is_paused() {
        let mut clock = Clock::at(5_000_000_000);
        assert_eq!(clock.now(), 5_000_000_000);
        clock.run();
        let running = clock.now();
        assert!(running >= 5_000_000_000);
        clock.stop();
        let stopped = clock.now();
        assert!(stopped >= running);
        assert_eq!(clock.now(), stopped);
    }
}
