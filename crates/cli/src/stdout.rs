//! Prints the output of a command completely, or fails.
//!
//! A full disk behind standard output is an error; a closed pipe (`| head -1`) is not. Before `main` begins, Rust's runtime replaces a
//! closed standard output by `/dev/null`, which would lose the output without an error. So it is checked before the runtime starts.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: AtomicBool = AtomicBool::new(false);

#[cfg(target_os = "linux")]
extern "C" fn look() {
    // SAFETY: only reads a flag of the descriptor; fails if the descriptor is closed.
    let closed = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } == -1;
    CLOSED.store(closed, Ordering::Relaxed);
}

/// The loader calls the functions of this section before the runtime starts.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section holds pointers to functions that take and return nothing that matters; this one needs nothing of the runtime.
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

/// Checks that the program was started with a standard output.
///
/// # Errors
/// It was closed.
pub(crate) fn check() -> io::Result<()> {
    match CLOSED.load(Ordering::Relaxed) {
        true => Err(io::Error::from_raw_os_error(libc::EBADF)),
        false => Ok(()),
    }
}

/// Prints `text` and ends its last line.
///
/// # Errors
/// Not all of it could be written, except to a closed pipe.
pub(crate) fn print(text: &str) -> io::Result<()> {
    check()?;
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
