//! The synchronisation primitives of the queue modules: the standard library's, or loom's under `--cfg loom`, which
//! then tries every order of events (`loom_tests.rs`).

#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

/// Locks `mutex`, poisoned or not. A panic in one thread must not lose other threads' batches: every critical section
/// here leaves its state consistent at each point where it could panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

pub(crate) use plain::lock as lock_std;

/// For the code that loom does not check.
mod plain {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Locks a mutex of the standard library, as [`super::lock`] does.
    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
