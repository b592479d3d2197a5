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

use sterna_wire::reason::Reason;

use crate::abort::Abort;

/// The time by which a call must have ended, and the reason of the alarm if it has not.
pub(crate) type Deadline = (Instant, Box<dyn FnOnce() -> Reason + Send>);

/// Records whether a driver is inside a call of its monitor. Clones belong to the same driver.
#[derive(Clone, Debug, Default)]
pub(crate) struct Occupied(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// The alarm that ends the current call.
    inside: Option<Arc<Abort>>,
    /// Why every later call fails at once.
    end: Option<End>,
}

/// Why calls of the monitor end.
#[derive(Clone, Debug)]
enum End {
    /// The peer was lost, with this text.
    Lost(String),
    Failed(Reason),
}

impl End {
    fn raise(&self, abort: &Abort) {
        match self.clone() {
            Self::Lost(text) => abort.lost(text),
            Self::Failed(reason) => abort.raise(reason),
        };
    }
}

impl Occupied {
    /// Begins a call, which lasts until the returned value is dropped. Raises `abort` if the call has not ended at
    /// `deadline`.
    pub(crate) fn enter(&self, abort: &Arc<Abort>, deadline: Option<Deadline>) -> Inside<'_> {
        let mut state = self.state();
        // The driver has not handled the event yet.
        if let Some(end) = &state.end {
            end.raise(abort);
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
    pub(crate) fn raise(&self, reason: Reason) {
        self.end(End::Failed(reason));
    }

    /// Ends the current call, and every later one, because the peer was lost.
    pub(crate) fn lost(&self, text: impl Display) {
        self.end(End::Lost(text.to_string()));
    }

    fn end(&self, end: End) {
        let mut state = self.state();
        if let Some(abort) = &state.inside {
            end.raise(abort);
        }
        state.end.get_or_insert(end);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("wakers do not panic")
    }
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

    use sterna_wire::reason::ErrorKind;

    use super::*;

    fn within(time: Duration) -> Option<Deadline> {
        Some((Instant::now() + time, Box::new(|| Reason::new(ErrorKind::TimeLimit, "it took too long"))))
    }

    #[test]
    fn a_call_that_is_under_way_is_ended_and_so_are_those_after_it() {
        let (occupied, abort) = (Occupied::default(), Arc::new(Abort::default()));
        let inside = occupied.enter(&abort, within(Duration::from_secs(3600)));
        assert!(!abort.is_over());
        occupied.clone().lost("amid");
        drop(inside);
        let amid = Reason::new(ErrorKind::ConnectionLost, "amid");
        assert_eq!((abort.reason().as_ref(), abort.was_lost()), (Some(&amid), true));
        occupied.raise(Reason::other("after"));
        let later = Arc::new(Abort::default());
        drop(occupied.enter(&later, None));
        assert_eq!((later.reason(), later.was_lost()), (Some(amid), true));
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
        assert_eq!(abort.reason(), Some(Reason::new(ErrorKind::TimeLimit, "it took too long")));
    }
}
