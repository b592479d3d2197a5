//! Bounds the queue of QEMU's events.
//!
//! The driver may be busy for seconds (QMP, the disk) while QEMU, which is not trusted, sends more events. A reader of
//! QEMU waits once too many events are unhandled; QEMU then has to wait as well.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Maximum number of events that wait for the driver: far more than a migration has.
const MAX_WAITING: usize = 1024;

/// The driver's end. Dropping it wakes all waiting readers.
#[derive(Debug, Default)]
pub(super) struct Backlog(Arc<Waiting>);

/// A reader's end.
#[derive(Clone, Debug)]
pub(super) struct BacklogEntry(Arc<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: usize,
    over: bool,
}

impl Waiting {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("counting does not panic")
    }
}

impl Backlog {
    /// Returns the end for a thread that reads from QEMU.
    pub(super) fn entry(&self) -> BacklogEntry {
        BacklogEntry(Arc::clone(&self.0))
    }

    /// Counts one event as handled.
    pub(super) fn handled(&self) {
        let mut state = self.0.state();
        state.events = state.events.saturating_sub(1);
        drop(state);
        self.0.changed.notify_one();
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.0.state().over = true;
        self.0.changed.notify_all();
    }
}

impl BacklogEntry {
    /// Waits until there is room, then counts one event as unhandled. Returns whether the driver still handles events.
    pub(super) fn wait(&self) -> bool {
        let full = |state: &mut State| !state.over && state.events >= MAX_WAITING;
        let mut state = self.0.changed.wait_while(self.0.state(), full).expect("counting does not panic");
        state.events += 1;
        !state.over
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_reader_runs_ahead_so_far_and_on_with_what_is_handled_until_the_end() {
        let backlog = Backlog::default();
        let entry = backlog.entry();
        let (sender, received) = channel();
        let reader = std::thread::spawn(move || {
            while entry.wait() {
                sender.send(()).unwrap();
            }
        });
        for _ in 0..MAX_WAITING {
            received.recv().unwrap();
        }
        assert!(received.try_recv().is_err(), "it waits");
        backlog.handled();
        received.recv().unwrap();
        drop(backlog);
        reader.join().unwrap();
    }
}
