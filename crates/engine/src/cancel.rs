//! Cancelling a migration from outside of it: from a signal, a user interface, a fleet manager.

use std::sync::{Arc, Mutex};

use crate::wakers::{HasWakers, Registration, Wakers};

#[derive(Default)]
struct CancelState {
    cancelled: bool,
    wakers: Wakers,
}

impl HasWakers for CancelState {
    fn wakers(&mut self) -> &mut Wakers {
        &mut self.wakers
    }
}

/// Cancels a migration from another thread, such as one that waits for signals.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Mutex<CancelState>>);

impl std::fmt::Debug for Cancel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cancel").field(&self.is_cancelled()).finish()
    }
}

impl Cancel {
    /// Makes one that is not cancelled yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels the migration. Before the decision the guest goes on at the source; after it this does nothing.
    pub fn cancel(&self) {
        let mut state = self.0.lock().expect("wakers do not panic");
        state.cancelled = true;
        state.wakers.wake();
    }

    /// Returns whether the migration was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().expect("wakers do not panic").cancelled
    }

    /// Calls `wake` when the migration is cancelled, or at once if it was, as long as the returned value is held. `wake` must not block
    /// and must not call back.
    pub fn on_cancel(&self, wake: impl Fn() + Send + 'static) -> Registration {
        let mut state = self.0.lock().expect("wakers do not panic");
        if state.cancelled {
            wake();
        }
        let number = state.wakers.add(wake);
        drop(state);
        Registration::new(&self.0, number)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn counter() -> (Arc<AtomicU32>, impl Fn() + Send + Clone + 'static) {
        let woken = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&woken);
        let wake = move || {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        (woken, wake)
    }

    #[test]
    fn closures_registered_before_and_after_are_called() {
        let cancel = Cancel::new();
        let (woken, wake) = counter();
        let _before = cancel.on_cancel(wake.clone());
        assert_eq!((woken.load(Ordering::Relaxed), cancel.is_cancelled()), (0, false));
        cancel.clone().cancel();
        let _after = cancel.on_cancel(wake);
        assert_eq!((woken.load(Ordering::Relaxed), cancel.is_cancelled()), (2, true));
    }

    #[test]
    fn a_closure_that_is_not_needed_any_more_is_dropped_with_its_captures() {
        let cancel = Cancel::new();
        let (woken, wake) = counter();
        let kept = cancel.on_cancel(wake.clone());
        for _ in 0..1000 {
            drop(cancel.on_cancel(wake.clone()));
        }
        assert_eq!(cancel.0.lock().unwrap().wakers.len(), 1);
        // The test's own, the one that is copied, and the registered one.
        assert_eq!(Arc::strong_count(&woken), 3);
        cancel.cancel();
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        drop(kept);
        assert_eq!(Arc::strong_count(&woken), 2);
    }

    #[test]
    fn a_registration_may_outlive_its_cancel() {
        let cancel = Cancel::new();
        let (woken, wake) = counter();
        let kept = cancel.on_cancel(wake);
        drop(cancel);
        assert_eq!(Arc::strong_count(&woken), 1);
        drop(kept);
    }
}
