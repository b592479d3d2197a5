//! Starts a thread for something that must not be lost where the system has no thread left: a connection, whose peer is then asked to come
//! again.

use std::io;
use std::sync::mpsc::channel;
use std::thread::{Builder, Scope};

/// The answer to a peer for whose connection there is no thread.
pub(crate) const NO_THREAD: &str = "the system has no thread for the connection now; try again in a moment";

/// Starts a thread that calls `run` with `value`. The thread's handle is not kept: the scope waits for it.
///
/// # Errors
/// The system cannot start a thread. Returns `value` with the reason; `run` is dropped.
pub(crate) fn spawn_with<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    value: T,
    run: impl FnOnce(T) + Send + 'scope,
) -> Result<(), (io::Error, T)> {
    let (hand_over, handed_over) = channel();
    let thread = move || {
        if let Ok(value) = handed_over.recv() {
            run(value);
        }
    };
    match Builder::new().name(name.to_owned()).spawn_scoped(scope, thread) {
        Ok(_) => {
            // The thread receives before it does anything else.
            let _ = hand_over.send(value);
            Ok(())
        }
        Err(error) => Err((error, value)),
    }
}
