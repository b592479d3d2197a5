//! What a command was asked to print: all of it, or an error.
//!
//! A full disk behind standard output is an error; a reader that has seen enough (`| head -1`) is none. Standard output that is
//! closed is replaced by `/dev/null` before `main` begins (so does Rust's runtime), where whatever is written is lost without a
//! word: it has to be looked at earlier.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: AtomicBool = AtomicBool::new(false);

#[cfg(target_os = "linux")]
extern "C" fn look() {
    // SAFETY: only a flag of the descriptor is asked for; where there is none, that is the answer.
    let closed = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } == -1;
    CLOSED.store(closed, Ordering::Relaxed);
}

/// The loader calls these before the runtime starts.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section holds pointers to functions that take and return nothing that matters; this one needs nothing of the runtime.
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

/// Whether the program was started without a standard output.
///
/// # Errors
/// It was.
pub(crate) fn check() -> io::Result<()> {
    match CLOSED.load(Ordering::Relaxed) {
        true => Err(io::Error::from_raw_os_error(libc::EBADF)),
        false => Ok(()),
    }
}

/// Prints `text` and ends its last line.
///
/// # Errors
/// Not all of it could be written, and not because the reader has gone.
pub(crate) fn print(text: &str) -> io::Result<()> {
    check()?;
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
