//! Ends a driver's call of its monitor from outside.
//!
//! A driver inside such a call handles no events, but a lost peer, a cancellation or a deadline must still end the
//! call. Each of them raises the alarm itself; the alarm closes the channels that the monitor writes to or reads from,
//! and the call fails.

use std::fmt::Display;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::abort::Abort;

/// The time by which a call must have ended, and the reason of the alarm if it has not.
pub(crate) type Deadline = (Instant, Box<dyn FnOnce() -> String + Send>);

/// Records whether a driver is inside a call of its monitor. Clones belong to the same driver.
#[derive(Clone, Debug, Default)]
pub(crate) struct Occupied(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// The alarm that ends the current call.
    inside: Option<Arc<Abort>>,
    /// Why every later call fails at once, and whether the reason is the loss of the peer.
    reason: Option<(String, bool)>,
}

impl Occupied {
    /// Begins a call, which lasts until the returned value is dropped. Raises `abort` if the call has not ended at
    /// `deadline`.
    pub(crate) fn enter(&self, abort: &Arc<Abort>, deadline: Option<Deadline>) -> Inside<'_> {
        let mut state = self.state();
        // The driver has not handled the event yet.
        if let Some((reason, lost)) = &state.reason {
            raise(abort, reason, *lost);
        }
        state.inside = Some(Arc::clone(abort));
        drop(state);
        let watch = deadline.map(|(deadline, reason)| {
            let (left, leaving) = channel::<()>();
            let abort = Arc::clone(abort);
            let watching = std::thread::spawn(move || {
                let time = deadline.saturating_duration_since(Instant::now());
                if leaving.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                    abort.raise(reason());
                }
            });
            (left, watching)
        });
        Inside { occupied: self, watch }
    }

    /// Ends the current call, and every later one, for `reason`.
    pub(crate) fn raise(&self, reason: impl Display) {
        self.end(&reason.to_string(), false);
    }

    /// Ends the current call, and every later one, because the peer was lost.
    pub(crate) fn lost(&self, reason: impl Display) {
        self.end(&reason.to_string(), true);
    }

    fn end(&self, reason: &str, lost: bool) {
        let mut state = self.state();
        if let Some(abort) = &state.inside {
            raise(abort, reason, lost);
        }
        state.reason.get_or_insert_with(|| (reason.to_owned(), lost));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("wakers do not panic")
    }
}

fn raise(abort: &Abort, reason: &str, lost: bool) {
    if lost {
        abort.lost(reason)
    } else {
        abort.raise(reason)
    };
}

/// A call of the monitor by the driver; dropping this ends it.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    occupied: &'a Occupied,
    watch: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.occupied.state().inside = None;
        if let Some((left, watching)) = self.watch.take() {
            drop(left);
            // The thread does not panic.
            let _ = watching.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn within(time: Duration) -> Option<Deadline> {
        Some((Instant::now() + time, Box::new(|| "it took too long".to_owned())))
    }

    #[test]
    fn a_call_that_is_under_way_is_ended_and_so_are_those_after_it() {
        let (occupied, abort) = (Occupied::default(), Arc::new(Abort::default()));
        let inside = occupied.enter(&abort, within(Duration::from_secs(3600)));
        assert!(!abort.is_over());
        occupied.clone().lost("amid");
        drop(inside);
        assert_eq!((abort.reason().as_deref(), abort.was_lost()), (Some("amid"), true));
        occupied.raise("after");
        let later = Arc::new(Abort::default());
        drop(occupied.enter(&later, None));
        assert_eq!((later.reason().as_deref(), later.was_lost()), (Some("amid"), true));
    }

    #[test]
    fn a_call_that_takes_too_long_is_ended_with_its_reason() {
        let (occupied, abort) = (Occupied::default(), Arc::new(Abort::default()));
        let (ended, end) = channel();
        abort.on_end(move || {
            let _ = ended.send(());
        });
        let inside = occupied.enter(&abort, within(Duration::ZERO));
        end.recv().unwrap();
        drop(inside);
        assert_eq!(abort.reason().as_deref(), Some("it took too long"));
    }
}
