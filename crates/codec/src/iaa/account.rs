//! Counts which encoder did how much of IAA's work, by bytes of content, for the report of one guest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use thiserror::Error;

use crate::account;

/// Why a device did not encode a batch, or its output was not used.
#[derive(Clone, Copy, Debug, Error)]
pub(super) enum Trouble {
    #[error("no device answered within {0:?}")]
    Late(Duration),
    #[error("a device's stream was wrong")]
    Wrong,
}

#[derive(Debug, Default)]
pub(super) struct Account {
    device: AtomicU64,
    /// The verified part of the devices' work.
    verified: AtomicU64,
    cpu: AtomicU64,
    last: Mutex<Option<Trouble>>,
}

impl Account {
    pub(super) fn by_device(&self, bytes: usize, verified: bool) {
        self.device.fetch_add(bytes as u64, Ordering::Relaxed);
        if verified {
            self.verified.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    pub(super) fn by_cpu(&self, bytes: usize) {
        self.cpu.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn trouble(&self, trouble: Trouble) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(trouble);
    }

    /// Returns the description; none before anything was encoded.
    pub(super) fn words(&self) -> Option<String> {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let by_device = if of(&self.verified) > 0 { "IAA, verified" } else { "IAA" };
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        account::words([(by_device, of(&self.device)), ("CPU", of(&self.cpu))], last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_say_who_encoded_and_what_went_wrong_last() {
        let account = Account::default();
        assert_eq!(account.words(), None);
        account.by_device(9990, false);
        assert_eq!(account.words().unwrap(), "IAA 100 %");
        account.by_cpu(10);
        account.trouble(Trouble::Late(Duration::from_millis(10)));
        assert_eq!(account.words().unwrap(), "IAA 99 %, CPU 1 % (last: no device answered within 10ms)");
        let verified = Account::default();
        verified.by_device(3, true);
        verified.by_cpu(1);
        verified.trouble(Trouble::Wrong);
        assert_eq!(verified.words().unwrap(), "IAA, verified 75 %, CPU 25 % (last: a device's stream was wrong)");
    }
}
