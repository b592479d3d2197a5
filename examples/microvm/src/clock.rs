//! The guest's own time: runs while the guest does, and moves with it.

use std::time::{Duration, Instant};

/// Of a machine.
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

    pub(crate) fn stand(&mut self) {
        self.before = Duration::from_nanos(self.now());
        self.since = None;
    }

    /// A standing clock that goes on from there.
    pub(crate) fn at(nanoseconds: u64) -> Self {
        Self { before: Duration::from_nanos(nanoseconds), since: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stands_while_the_guest_does() {
        let mut clock = Clock::at(5_000_000_000);
        assert_eq!(clock.now(), 5_000_000_000);
        clock.run();
        let running = clock.now();
        assert!(running >= 5_000_000_000);
        clock.stand();
        let stopped = clock.now();
        assert!(stopped >= running);
        assert_eq!(clock.now(), stopped);
    }
}
