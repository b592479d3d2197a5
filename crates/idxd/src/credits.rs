//! The number of further descriptors that a dedicated work queue can accept.
//!
//! A dedicated queue silently drops descriptors that do not fit (DSA section 3.3.2): software must count. The count
//! belongs to the process, not to a submitter, and a credit is returned only when the completion record of its
//! descriptor was **seen** — not after a time-out, and not when a submitter gives up: the entry may still be in the
//! queue.

// Not known to Cargo: `RUSTFLAGS="--cfg loom" cargo test -p sterna-idxd --lib --release all_orders` takes the model checker's atomics.
#![allow(unexpected_cfgs)]

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Debug)]
pub(crate) struct Credits {
    free: AtomicU32,
    size: u32,
}

impl Credits {
    pub(crate) fn new(size: u32) -> Self {
        Self { free: AtomicU32::new(size), size }
    }

    /// Takes a credit, if there is one.
    pub(crate) fn take(&self) -> bool {
        // Acquire: the thread that takes a credit sees the returning thread's read of the record.
        self.free.fetch_update(Ordering::Acquire, Ordering::Relaxed, |free| free.checked_sub(1)).is_ok()
    }

    /// Returns `n` credits, never above the size. The result is the excess over the outstanding ones: a counting error
    /// of the caller.
    pub(crate) fn return_credits(&self, n: u32) -> u32 {
        let before = self
            .free
            .fetch_update(Ordering::Release, Ordering::Relaxed, |free| Some(free.saturating_add(n).min(self.size)))
            .unwrap_or_else(|free| free);
        n.saturating_sub(self.size - before)
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    pub(crate) fn outstanding(&self) -> u32 {
        self.size - self.free()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_credits_as_entries() {
        let credits = Credits::new(3);
        assert!(credits.take() && credits.take() && credits.take());
        assert!(!credits.take());
        assert_eq!((credits.free(), credits.outstanding()), (0, 3));
        assert_eq!(credits.return_credits(2), 0);
        assert!(credits.take() && credits.take() && !credits.take());
    }

    #[test]
    fn returning_too_many_is_reported_and_changes_nothing() {
        let credits = Credits::new(2);
        assert!(credits.take());
        assert_eq!(credits.return_credits(5), 4);
        assert_eq!(credits.free(), 2);
        assert_eq!(credits.return_credits(u32::MAX), u32::MAX);
        assert_eq!(credits.free(), 2);
    }

    #[test]
    fn threads_together_never_hold_more_than_there_are() {
        use std::sync::atomic::AtomicU32;
        let (credits, held, rounds) = (Credits::new(4), AtomicU32::new(0), if cfg!(miri) { 20 } else { 5_000 });
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        if credits.take() {
                            assert!(held.fetch_add(1, Ordering::SeqCst) < 4);
                            held.fetch_sub(1, Ordering::SeqCst);
                            assert_eq!(credits.return_credits(1), 0);
                        }
                    }
                });
            }
        });
        assert_eq!(credits.free(), 4);
    }
}

/// Every order of events of two submitters and a harvesting thread.
#[cfg(all(test, loom))]
mod all_orders {
    use loom::sync::Arc;

    use super::*;

    #[test]
    fn no_order_makes_or_loses_a_credit() {
        loom::model(|| {
            let (credits, held) = (Arc::new(Credits::new(1)), Arc::new(AtomicU32::new(0)));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let (credits, held) = (Arc::clone(&credits), Arc::clone(&held));
                    loom::thread::spawn(move || {
                        for _ in 0..2 {
                            if credits.take() {
                                // Relaxed on purpose: the credit itself must order one holder after the other.
                                assert_eq!(held.load(Ordering::Relaxed), 0);
                                held.store(1, Ordering::Relaxed);
                                held.store(0, Ordering::Relaxed);
                                assert_eq!(credits.return_credits(1), 0);
                            }
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(credits.free(), 1);
        });
    }
}
