//! Signals: what a person or a script tells the program while it runs.

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::io;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use sterna::cancel::Cancel;

/// What was told so far.
#[derive(Clone, Default)]
pub(crate) struct Told(Arc<State>);

#[derive(Default)]
struct State {
    begin: AtomicBool,
    end: AtomicBool,
    migration: Mutex<Migration>,
    cancel: Cancel,
}

/// How far the program is with the migration.
#[derive(Default)]
enum Migration {
    /// It is over, or was not asked for.
    #[default]
    None,
    /// It is under way, or will be.
    UnderWay,
    /// It is being cancelled.
    Cancelled,
}

impl Told {
    /// Listens on a thread of its own, as long as the process runs.
    pub(crate) fn listen(moves: bool) -> io::Result<Self> {
        let told = Self::default();
        if moves {
            told.set(Migration::UnderWay);
        }
        let heard = told.clone();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1])?;
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in signals.forever() {
                match signal {
                    SIGUSR1 => heard.0.begin.store(true, Ordering::Relaxed),
                    _ => heard.to_end(),
                }
            }
        })?;
        Ok(told)
    }

    fn set(&self, migration: Migration) -> Migration {
        let mut state = self.0.migration.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut state, migration)
    }

    fn to_end(&self) {
        match self.set(Migration::Cancelled) {
            Migration::UnderWay => self.0.cancel.cancel(),
            Migration::None => {
                self.set(Migration::None);
                self.0.end.store(true, Ordering::Relaxed);
            }
            // It waits for what does not come, such as memory of a source that is lost.
            Migration::Cancelled => process::exit(4),
        }
    }

    /// The migration is over.
    pub(crate) fn moved(&self) {
        self.set(Migration::None);
    }

    /// Whether to begin what waits for it.
    pub(crate) fn begin(&self) -> bool {
        self.0.begin.load(Ordering::Relaxed)
    }

    /// Whether to end the program.
    pub(crate) fn end(&self) -> bool {
        self.0.end.load(Ordering::Relaxed)
    }

    /// For the migration.
    pub(crate) fn cancel(&self) -> &Cancel {
        &self.0.cancel
    }
}
