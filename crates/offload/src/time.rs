//! Time and waiting, passed in: tests run in virtual time and never sleep.

use std::fmt::Debug;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::sync::{Condvar, Mutex, lock};

/// Nanoseconds of a monotonic clock.
pub type Nanos = u64;

/// A time that never comes.
pub const NEVER: Nanos = Nanos::MAX;

/// A clock, and how a thread waits by it.
pub trait Time: Debug + Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Nanos;

    /// Waits until `bell` has been rung since `heard` was read from it, or until `until`. May return earlier.
    fn wait(&self, bell: &Bell, heard: u64, until: Nanos);
}

/// The machine's monotonic clock (`CLOCK_MONOTONIC`): the same in all processes of a host, which a ledger needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemTime;

impl Time for SystemTime {
    fn now(&self) -> Nanos {
        let now = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        // Never 0, which stands for an event that has not happened.
        seconds.saturating_mul(1_000_000_000).saturating_add(nanos).max(1)
    }

    fn wait(&self, bell: &Bell, heard: u64, until: Nanos) {
        if until == NEVER {
            bell.wait(heard, None);
        } else {
            let now = self.now();
            if until > now {
                bell.wait(heard, Some(Duration::from_nanos(until - now)));
            }
        }
    }
}

/// Wakes sleeping threads: a count of rings. A thread that reads the count ([`Bell::heard`]), then checks its
/// condition, then sleeps, misses no ring.
#[derive(Debug, Default)]
pub struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
}

impl Bell {
    /// Returns how often it was rung.
    pub fn heard(&self) -> u64 {
        *lock(&self.rings)
    }

    /// Wakes all sleepers.
    pub fn ring(&self) {
        *lock(&self.rings) += 1;
        self.rung.notify_all();
    }

    /// Sleeps until the count is not `heard`, or for `at_most`; may return earlier.
    pub fn wait(&self, heard: u64, at_most: Option<Duration>) {
        let rings = lock(&self.rings);
        if *rings != heard {
            return;
        }
        match at_most {
            None => drop(self.rung.wait(rings).unwrap_or_else(std::sync::PoisonError::into_inner)),
            Some(at_most) => {
                drop(self.rung.wait_timeout(rings, at_most).unwrap_or_else(std::sync::PoisonError::into_inner));
            }
        }
    }
}
