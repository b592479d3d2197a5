//! Ends a driver's call of its monitor from outside.
//!
//! A driver inside such a call handles no events, but a lost peer, a cancellation or a deadline must still end the
//! call. Each of them raises the alarm itself; the alarm closes the channels that the monitor writes to or reads from,
//! and the call fails.

use std::fmt::{self, Display};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use sterna_wire::reason::Reason;

use crate::abort::Abort;
use crate::cpu_time;

/// The time by which a call must have ended, and the reason of the alarm if it has not.
pub(crate) type Deadline = (Instant, Box<dyn FnOnce() -> Reason + Send>);

/// Records whether a driver is inside a call of its monitor. Clones belong to the same driver.
#[derive(Clone, Debug, Default)]
pub(crate) struct Occupied(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Signalled when a deadline is set or removed, and when the thread that watches deadlines is to end.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The alarm that ends the current call.
    inside: Option<Arc<Abort>>,
    /// By when the current call must have ended.
    deadline: Option<Deadline>,
    /// Why every later call fails at once: the first of these.
    ends: Vec<End>,
    /// The incarnation of the channels that calls write to or read from.
    incarnation: u32,
    /// Whether no deadline will be set any more.
    over: bool,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { inside, deadline: _, ends, incarnation: _, over } = self;
        f.debug_struct("State").field("inside", inside).field("ends", ends).field("over", over).finish_non_exhaustive()
    }
}

/// Why calls of the monitor end.
#[derive(Clone, Debug)]
enum End {
    /// The peer of this incarnation was lost, with this text.
    Lost(u32, String),
    Failed(Reason),
}

impl End {
    fn raise(&self, abort: &Abort) {
        match self.clone() {
            Self::Lost(_, text) => abort.lost(text),
            Self::Failed(reason) => abort.raise(reason),
        };
    }
}

impl Occupied {
    /// Starts the thread that watches the deadlines of calls.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn watch_deadlines(&self) -> io::Result<Deadlines> {
        let watched = self.clone();
        let thread = cpu_time::spawn(Builder::new().name("deadlines".into()), move || watched.raise_overdue())?;
        Ok(Deadlines { occupied: self.clone(), thread: Some(thread) })
    }

    /// Begins a call, which lasts until the returned value is dropped.
    pub(crate) fn enter(&self, abort: &Arc<Abort>) -> Inside<'_> {
        self.begin(abort, None)
    }

    fn begin(&self, abort: &Arc<Abort>, deadline: Option<Deadline>) -> Inside<'_> {
        let mut state = self.state();
        // The driver has not handled the event yet.
        if let Some(end) = state.ends.first() {
            end.raise(abort);
        }
        state.inside = Some(Arc::clone(abort));
        state.deadline = deadline;
        drop(state);
        self.0.changed.notify_all();
        Inside(self)
    }

    /// Ends the current call, and every later one, for `reason`.
    pub(crate) fn raise(&self, reason: Reason) {
        self.end(End::Failed(reason));
    }

    /// Ends the current call because the peer was lost, whose control channel was of this incarnation; and every later call, until they have the
    /// [channels](Occupied::renew) of a later incarnation.
    pub(crate) fn lost(&self, incarnation: u32, text: impl Display) {
        self.end(End::Lost(incarnation, text.to_string()));
    }

    /// Has the calls that begin from now on use the channels of `incarnation`.
    pub(crate) fn renew(&self, incarnation: u32) {
        let mut state = self.state();
        state.incarnation = incarnation;
        state.ends.retain(|end| !matches!(end, End::Lost(lost, _) if *lost < incarnation));
    }

    fn end(&self, end: End) {
        let mut state = self.state();
        if let End::Lost(lost, _) = &end {
            if *lost < state.incarnation {
                return;
            }
            // The newest counts: a renewal may be for those before it.
            state.ends.retain(|end| !matches!(end, End::Lost(earlier, _) if earlier < lost));
        }
        if let Some(abort) = &state.inside {
            end.raise(abort);
        }
        state.ends.push(end);
    }

    /// Ends each call that is still under way at its deadline.
    fn raise_overdue(&self) {
        let mut state = self.state();
        while !state.over {
            let left = state.deadline.as_ref().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            state = match left {
                None => self.0.changed.wait(state).expect("wakers do not panic"),
                Some(left) if !left.is_zero() => {
                    self.0.changed.wait_timeout(state, left).expect("wakers do not panic").0
                }
                Some(_) => {
                    // Under the lock, so that a call which has ended is not ended again.
                    if let (Some((_, reason)), Some(abort)) = (state.deadline.take(), &state.inside) {
                        abort.raise(reason());
                    }
                    state
                }
            };
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("wakers do not panic")
    }
}

/// Begins calls that have a deadline. A thread watches the deadlines; it is started before the guest is paused, when a system
/// that has no thread left costs no more than the migration.
#[derive(Debug)]
pub(crate) struct Deadlines {
    occupied: Occupied,
    thread: Option<JoinHandle<()>>,
}

impl Deadlines {
    /// Begins a call, which lasts until the returned value is dropped. Raises `abort` if the call has not ended at `deadline`.
    pub(crate) fn enter(&self, abort: &Arc<Abort>, deadline: Option<Deadline>) -> Inside<'_> {
        self.occupied.begin(abort, deadline)
    }
}

impl Drop for Deadlines {
    fn drop(&mut self) {
        self.occupied.state().over = true;
        self.occupied.0.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

/// A call of the monitor by the driver; dropping this ends it.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Occupied);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        (state.inside, state.deadline) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use sterna_wire::reason::ErrorKind;

    use super::*;

    fn within(time: Duration) -> Option<Deadline> {
        Some((Instant::now() + time, Box::new(|| Reason::new(ErrorKind::TimeLimit, "it took too long"))))
    }

    #[test]
    fn a_call_that_is_under_way_is_ended_and_so_are_those_after_it() {
        let (occupied, abort) = (Occupied::default(), Arc::new(Abort::default()));
        let deadlines = occupied.watch_deadlines().unwrap();
        let inside = deadlines.enter(&abort, within(Duration::from_secs(3600)));
        assert!(!abort.is_over());
        occupied.clone().lost(1, "amid");
        drop(inside);
        let amid = Reason::new(ErrorKind::ConnectionLost, "amid");
        assert_eq!((abort.reason().as_ref(), abort.was_lost()), (Some(&amid), true));
        occupied.raise(Reason::other("after"));
        let later = Arc::new(Abort::default());
        drop(occupied.enter(&later));
        assert_eq!((later.reason(), later.was_lost()), (Some(amid), true));
    }

    #[test]
    fn a_lost_peer_ends_calls_until_they_have_the_channels_of_a_later_incarnation() {
        let occupied = Occupied::default();
        let ended = || {
            let abort = Arc::new(Abort::default());
            drop(occupied.enter(&abort));
            abort.reason().map(|reason| reason.text)
        };
        occupied.lost(1, "first");
        assert_eq!(ended().as_deref(), Some("first"));
        occupied.renew(2);
        // The end of the old channel may be noticed later.
        occupied.lost(1, "first");
        assert_eq!(ended(), None);
        // The next one may be lost before the driver has renewed its channels.
        occupied.lost(2, "second");
        occupied.lost(3, "third");
        occupied.renew(3);
        assert_eq!(ended().as_deref(), Some("third"));
        occupied.raise(Reason::other("cancelled"));
        occupied.renew(4);
        assert_eq!(ended().as_deref(), Some("cancelled"));
    }

    #[test]
    fn a_call_that_takes_too_long_is_ended_with_its_reason() {
        let (occupied, abort) = (Occupied::default(), Arc::new(Abort::default()));
        let (ended, end) = channel();
        abort.on_end(move || {
            let _ = ended.send(());
        });
        let deadlines = occupied.watch_deadlines().unwrap();
        let inside = deadlines.enter(&abort, within(Duration::ZERO));
        end.recv().unwrap();
        drop(inside);
        let too_long = Reason::new(ErrorKind::TimeLimit, "it took too long");
        assert_eq!(abort.reason().as_ref(), Some(&too_long));

        // One thread watches all calls.
        let next = Arc::new(Abort::default());
        let (ended, end) = channel();
        next.on_end(move || {
            let _ = ended.send(());
        });
        let inside = deadlines.enter(&next, within(Duration::from_millis(1)));
        end.recv().unwrap();
        drop(inside);
        assert_eq!(next.reason(), Some(too_long));
    }
}
