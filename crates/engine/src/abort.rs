//! How a migration is taken down: once, with the first reason, waking everybody.
//!
//! Threads of a migration block in sockets, queues and the window. Whoever fails first raises the alarm here; the
//! closures registered by the others then close what they block in, so that every thread ends by itself and is joined.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::wakers::{HasWakers, Registration, Wakers};

#[derive(Default)]
struct State {
    reason: Option<String>,
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
    /// Says whether this was the first.
    pub fn raise(&self, reason: impl fmt::Display) -> bool {
        self.take_down(reason.to_string(), false)
    }

    /// As [`Abort::raise`], where all that is known is that a connection broke: the peer may have said, or may be about to
    /// say on another connection, why.
    pub fn lost(&self, reason: impl fmt::Display) -> bool {
        self.take_down(reason.to_string(), true)
    }

    fn take_down(&self, reason: String, lost: bool) -> bool {
        let mut state = self.state();
        if state.has_ended() {
            return false;
        }
        (state.reason, state.lost) = (Some(reason), lost);
        let called = state.wakers.wake_and_take();
        // What they have captured is dropped without the lock.
        drop(state);
        drop(called);
        true
    }

    /// Whether the first reason was a broken connection.
    pub fn was_lost(&self) -> bool {
        self.state().lost
    }

    /// The migration has come to its end and its connections are closed on purpose: what threads report from now on is
    /// no failure.
    pub fn finish(&self) {
        let mut state = self.state();
        state.over = true;
        let called = state.wakers.wake_and_take();
        // What they have captured is dropped without the lock.
        drop(state);
        drop(called);
    }

    /// The first reason, once there is one.
    pub fn reason(&self) -> Option<String> {
        self.state().reason.clone()
    }

    /// Whether the migration is being taken down or has ended.
    pub fn is_over(&self) -> bool {
        self.state().has_ended()
    }

    /// Registers what must be closed when the migration ends: at once, if that has happened. It stays registered until then, so this is for
    /// what lives as long as the migration. `wake` must not block and must not call back.
    pub fn on_end(&self, wake: impl Fn() + Send + 'static) {
        let mut state = self.state();
        if state.has_ended() {
            wake();
        } else {
            state.wakers.add(wake);
        }
    }

    /// As [`Abort::on_end`], as long as the returned value is held: for connections that come and go while the migration lasts.
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
    fn the_first_reason_stays_and_everybody_is_woken_once_by_it() {
        let woken = Arc::new(AtomicU32::new(0));
        let abort = Abort::default();
        let counter = Arc::clone(&woken);
        abort.on_end(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });

        assert!(abort.raise("first"));
        assert!(!abort.lost("second") && !abort.was_lost());

        assert_eq!(abort.reason().as_deref(), Some("first"));
        assert_eq!(woken.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn who_registers_late_is_woken_at_once() {
        let abort = Abort::default();
        abort.raise("over");
        let woken = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&woken);
        abort.on_end(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(woken.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn after_the_end_nothing_is_a_failure_any_more() {
        let abort = Abort::default();
        abort.finish();
        assert!(!abort.raise("connection closed"));
        assert_eq!(abort.reason(), None);
        assert!(abort.is_over());
    }
    #[test]
    fn what_was_called_or_is_not_held_any_more_is_let_go_of() {
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
        abort.raise("over");
        abort.on_end(holding());
        assert_eq!(Arc::strong_count(&held), 1, "nothing of it is called twice");
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
