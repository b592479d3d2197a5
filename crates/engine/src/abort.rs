//! How a migration is taken down: once, with the first reason, waking everybody.
//!
//! Threads of a migration block in sockets, queues and the window. Whoever fails first raises the alarm here; the
//! closures registered by the others then close what they block in, so that every thread ends by itself and is joined.

use std::fmt;
use std::sync::Mutex;

type Waker = Box<dyn Fn() + Send>;

#[derive(Default)]
struct State {
    reason: Option<String>,
    lost: bool,
    over: bool,
    wakers: Vec<Waker>,
}

/// The alarm of one migration, shared by all its threads.
#[derive(Default)]
pub struct Abort {
    state: Mutex<State>,
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
        let mut state = self.state.lock().expect("wakers do not panic");
        if state.reason.is_some() || state.over {
            return false;
        }
        (state.reason, state.lost) = (Some(reason), lost);
        for waker in &state.wakers {
            waker();
        }
        true
    }

    /// Whether the first reason was a broken connection.
    pub fn was_lost(&self) -> bool {
        self.state.lock().expect("wakers do not panic").lost
    }

    /// The migration has come to its end and its connections are closed on purpose: what threads report from now on is
    /// no failure.
    pub fn finish(&self) {
        let mut state = self.state.lock().expect("wakers do not panic");
        state.over = true;
        for waker in &state.wakers {
            waker();
        }
    }

    /// The first reason, once there is one.
    pub fn reason(&self) -> Option<String> {
        self.state.lock().expect("wakers do not panic").reason.clone()
    }

    /// Whether the migration is being taken down or has ended.
    pub fn is_over(&self) -> bool {
        let state = self.state.lock().expect("wakers do not panic");
        state.over || state.reason.is_some()
    }

    /// Registers what must be closed when the migration ends: at once, if that has happened. `wake` must not block and
    /// must not call back.
    pub fn on_end(&self, wake: impl Fn() + Send + 'static) {
        let mut state = self.state.lock().expect("wakers do not panic");
        if state.over || state.reason.is_some() {
            wake();
        }
        state.wakers.push(Box::new(wake));
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
}
