//! The alarm that takes a migration down: once, with the first reason, waking all threads.
//!
//! Threads of a migration block in sockets, queues and the window. The first thread that fails raises the alarm. The closures that the
//! others have registered then close what they block in, so that every thread ends by itself and is joined.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use sterna_wire::reason::{ErrorKind, Reason};

use crate::wakers::{HasWakers, Registration, Wakers};

#[derive(Default)]
struct State {
    reason: Option<Reason>,
    lost: bool,
    over: bool,
    wakers: Wakers,
}

impl State {
    fn has_ended(&self) -> bool {
        self.over || self.reason.is_some()
    }
}

impl HasWakers for State {
    fn wakers(&mut self) -> &mut Wakers {
        &mut self.wakers
    }
}

/// The alarm of one migration, shared by all its threads.
#[derive(Default)]
pub struct Abort {
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Abort").field("reason", &self.reason()).finish_non_exhaustive()
    }
}

impl Abort {
    /// Takes the migration down because of `reason`. Only the first reason counts: those that follow are echoes.
    /// Returns whether this was the first.
    pub fn raise(&self, reason: Reason) -> bool {
        self.take_down(reason, false)
    }

    /// As [`Abort::raise`], where all that is known is that a connection broke: the peer's message with the reason may be under way
    /// on another connection.
    pub fn lost(&self, text: impl fmt::Display) -> bool {
        self.take_down(Reason::new(ErrorKind::ConnectionLost, text), true)
    }

    fn take_down(&self, reason: Reason, lost: bool) -> bool {
        let mut state = self.state();
        if state.has_ended() {
            return false;
        }
        (state.reason, state.lost) = (Some(reason), lost);
        let called = state.wakers.wake_and_take();
        // The closures' captures are dropped without the lock.
        drop(state);
        drop(called);
        true
    }

    /// Returns whether the first reason was a broken connection.
    pub fn was_lost(&self) -> bool {
        self.state().lost
    }

    /// Ends the migration, whose connections are now closed on purpose: later reports of threads are no failures.
    pub fn finish(&self) {
        let mut state = self.state();
        state.over = true;
        let called = state.wakers.wake_and_take();
        // The closures' captures are dropped without the lock.
        drop(state);
        drop(called);
    }

    /// Returns the first reason, once there is one.
    pub fn reason(&self) -> Option<Reason> {
        self.state().reason.clone()
    }

    /// Returns whether the migration is being taken down or has ended.
    pub fn is_over(&self) -> bool {
        self.state().has_ended()
    }

    /// Calls `wake` when the migration ends, or at once if it has ended. `wake` stays registered until then, so it is for resources that
    /// live as long as the migration. It must not block and must not call back.
    pub fn on_end(&self, wake: impl Fn() + Send + 'static) {
        let mut state = self.state();
        if state.has_ended() {
            wake();
        } else {
            state.wakers.add(wake);
        }
    }

    /// As [`Abort::on_end`], as long as the returned value is held: for connections that open and close while the migration lasts.
    pub fn on_end_while_held(&self, wake: impl Fn() + Send + 'static) -> Registration {
        let mut state = self.state();
        if state.has_ended() {
            wake();
        }
        let number = state.wakers.add(wake);
        drop(state);
        Registration::new(&self.state, number)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("wakers do not panic")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn the_first_reason_stays_and_every_closure_is_called_once() {
        let woken = Arc::new(AtomicU32::new(0));
        let abort = Abort::default();
        let counter = Arc::clone(&woken);
        abort.on_end(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });

        assert!(abort.raise(Reason::new(ErrorKind::Record, "first")));
        assert!(!abort.lost("second") && !abort.was_lost());

        assert_eq!(abort.reason(), Some(Reason::new(ErrorKind::Record, "first")));
        assert_eq!(woken.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_closure_that_is_registered_late_is_called_at_once() {
        let abort = Abort::default();
        abort.raise(Reason::other("over"));
        let woken = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&woken);
        abort.on_end(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(woken.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn after_the_end_nothing_counts_as_a_failure() {
        let abort = Abort::default();
        abort.finish();
        assert!(!abort.raise(Reason::other("connection closed")));
        assert_eq!(abort.reason(), None);
        assert!(abort.is_over());
    }
    #[test]
    fn closures_that_were_called_or_are_not_held_any_more_are_dropped() {
        let held = Arc::new(());
        let holding = || {
            let held = Arc::clone(&held);
            move || drop(Arc::clone(&held))
        };
        let abort = Abort::default();
        abort.on_end(holding());
        for _ in 0..1000 {
            drop(abort.on_end_while_held(holding()));
        }
        assert_eq!(Arc::strong_count(&held), 2);
        let last = abort.on_end_while_held(holding());
        abort.raise(Reason::other("over"));
        abort.on_end(holding());
        assert_eq!(Arc::strong_count(&held), 1, "no closure is kept");
        drop(last);
    }

    #[test]
    fn a_held_closure_is_called_and_one_that_is_not_held_any_more_is_not() {
        let woken = Arc::new(AtomicU32::new(0));
        let waking = |by: u32| {
            let woken = Arc::clone(&woken);
            move || {
                woken.fetch_add(by, Ordering::Relaxed);
            }
        };
        let abort = Abort::default();
        let _held = abort.on_end_while_held(waking(1));
        drop(abort.on_end_while_held(waking(10)));
        abort.finish();
        let _late = abort.on_end_while_held(waking(100));
        assert_eq!(woken.load(Ordering::Relaxed), 101);
    }
}
