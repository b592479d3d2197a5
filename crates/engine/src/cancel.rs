//! Cancelling a migration from outside of it: from a signal, a user interface, a fleet manager.

use std::sync::{Arc, Mutex};

type Waker = Box<dyn Fn() + Send>;

#[derive(Default)]
struct CancelState {
    cancelled: bool,
    wakers: Vec<Waker>,
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
    /// Not cancelled yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels. Before the decision the guest goes on at the source; after it this does nothing.
    pub fn cancel(&self) {
        let mut state = self.0.lock().expect("wakers do not panic");
        state.cancelled = true;
        state.wakers.iter().for_each(|waker| waker());
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().expect("wakers do not panic").cancelled
    }

    /// Has `wake` called when it is cancelled, or at once if it was. `wake` must not block and must not call back.
    pub fn on_cancel(&self, wake: impl Fn() + Send + 'static) {
        let mut state = self.0.lock().expect("wakers do not panic");
        if state.cancelled {
            wake();
        }
        state.wakers.push(Box::new(wake));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn who_registers_before_or_after_is_woken() {
        let cancel = Cancel::new();
        let woken = Arc::new(AtomicU32::new(0));
        let wake = || {
            let woken = Arc::clone(&woken);
            move || {
                woken.fetch_add(1, Ordering::Relaxed);
            }
        };
        cancel.on_cancel(wake());
        assert_eq!((woken.load(Ordering::Relaxed), cancel.is_cancelled()), (0, false));
        cancel.clone().cancel();
        cancel.on_cancel(wake());
        assert_eq!((woken.load(Ordering::Relaxed), cancel.is_cancelled()), (2, true));
    }
}
