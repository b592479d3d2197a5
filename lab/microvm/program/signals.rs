//! Signals, by which a user or a script controls the running program.

use crate::note;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use sterna::{Cancel, Control, RequestOutcome};

/// The signals received so far.
#[derive(Clone, Default)]
pub(crate) struct Requests(Arc<State>);

#[derive(Default)]
struct State {
    begin: AtomicBool,
    end: AtomicBool,
    migration: Mutex<Migration>,
    cancel: Cancel,
    control: Control,
}

/// The migration's state.
#[derive(Default)]
enum Migration {
    /// It is over, or there is none.
    #[default]
    None,
    /// It is in progress, or will begin.
    InProgress,
    /// It is being cancelled.
    Cancelled,
}

impl Requests {
    /// Handles signals on a thread of its own, as long as the process runs.
    pub(crate) fn listen(moves: bool) -> io::Result<Self> {
        let requests = Self::default();
        if moves {
            requests.set(Migration::InProgress);
        }
        let shared = requests.clone();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1, SIGUSR2])?;
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in signals.forever() {
                match signal {
                    SIGUSR1 => shared.0.begin.store(true, Ordering::Relaxed),
                    SIGUSR2 => shared.switch_over(),
                    _ => shared.request_end(),
                }
            }
        })?;
        Ok(requests)
    }

    fn set(&self, migration: Migration) -> Migration {
        let mut state = self.0.migration.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut state, migration)
    }

    fn request_end(&self) {
        match self.set(Migration::Cancelled) {
            Migration::InProgress => self.0.cancel.cancel(),
            Migration::None => {
                self.set(Migration::None);
                self.0.end.store(true, Ordering::Relaxed);
            }
            // The program may wait in vain, for example for memory of a lost source.
            Migration::Cancelled => process::exit(4),
        }
    }

    fn switch_over(&self) {
        match self.0.control.switch_over() {
            RequestOutcome::Accepted => note(format_args!("the guest will be paused as soon as possible")),
            refused => note(format_args!("the guest is not paused by request: {refused:?}")),
        }
    }

    /// Records that the migration is over.
    pub(crate) fn moved(&self) {
        self.set(Migration::None);
    }

    /// Returns whether the migration is to begin (SIGUSR1).
    pub(crate) fn begin(&self) -> bool {
        self.0.begin.load(Ordering::Relaxed)
    }

    /// Returns whether the program is to end.
    pub(crate) fn end(&self) -> bool {
        self.0.end.load(Ordering::Relaxed)
    }

    /// Returns the control of the migration from here.
    pub(crate) fn control(&self) -> &Control {
        &self.0.control
    }

    /// Returns the migration's cancellation.
    pub(crate) fn cancel(&self) -> &Cancel {
        &self.0.cancel
    }
}
