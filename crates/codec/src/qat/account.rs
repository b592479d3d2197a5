//! Counts for the report how many bytes of content each encoder has encoded.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use sterna_qatzip::By;

use super::Trouble;
use crate::account;

#[derive(Debug, Default)]
pub(super) struct Account {
    hardware: AtomicU64,
    software: AtomicU64,
    cpu: AtomicU64,
    /// Not encoded: software is forbidden.
    raw: AtomicU64,
    last: Mutex<Option<Trouble>>,
}

impl Account {
    pub(super) fn done(&self, by: By, bytes: usize) {
        let counter = match by {
            By::Hardware => &self.hardware,
            By::Software => &self.software,
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn by_cpu(&self, bytes: usize) {
        self.cpu.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn not_encoded(&self, bytes: usize) {
        self.raw.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn trouble(&self, trouble: Trouble) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(trouble);
    }

    /// Returns the description; none before anything was encoded.
    pub(super) fn words(&self) -> Option<String> {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let parts = [
            ("QAT hardware", of(&self.hardware)),
            ("QATzip's software", of(&self.software)),
            ("CPU", of(&self.cpu)),
            ("not encoded", of(&self.raw)),
        ];
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        account::words(parts, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_qatzip::Failure;

    #[test]
    fn the_text_has_the_share_of_each_encoder_and_the_last_trouble() {
        let account = Account::default();
        assert_eq!(account.words(), None);
        account.done(By::Hardware, 9990);
        assert_eq!(account.words().unwrap(), "QAT hardware 100 %");
        account.by_cpu(10);
        account.trouble(Trouble::Failed(Failure::WorkerLost));
        let words = "QAT hardware 99 %, CPU 1 % (last: the QATzip worker that had this job ended before it was done)";
        assert_eq!(account.words().unwrap(), words);
        account.done(By::Software, 5000);
        account.not_encoded(5000);
        assert!(
            account
                .words()
                .unwrap()
                .starts_with("QAT hardware 50 %, QATzip's software 25 %, CPU 1 %, not encoded 25 % (")
        );
    }
}
