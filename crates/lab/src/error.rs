//! What goes wrong in the laboratory, in words that say what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Why the laboratory could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Something that `scripts/setup` brings is not there.
    #[error("{what} not found ({looked}): run scripts/setup")]
    ToolsMissing {
        /// What was looked for.
        what: String,
        /// Where.
        looked: String,
    },
    /// `scripts/setup` looked for something and recorded that this machine's mirrors lack it.
    #[error("{what} cannot be had here: {reason}")]
    NotInMirrors {
        /// What was looked for.
        what: String,
        /// What `scripts/setup` found instead.
        reason: String,
    },
    /// This machine or this user cannot do it (no root, no huge pages, no network namespaces).
    #[error("{what}: {reason}")]
    Unavailable {
        /// What was wanted.
        what: String,
        /// Why it cannot be had here.
        reason: String,
    },
    /// A system call or a file operation failed.
    #[error("{action}: {source}")]
    Io {
        /// What was being done, to what.
        action: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A command ended with an error.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// What it wrote, or why it did not start.
        output: String,
    },
    /// QEMU ended although it was still needed.
    #[error("QEMU ended while waiting for {waiting_for}: {output}")]
    QemuEnded {
        /// What was being waited for.
        waiting_for: String,
        /// What QEMU wrote to its standard error, and the guest's last lines.
        output: String,
    },
    /// Something did not happen in time.
    #[error("no {waiting_for} within {} s; last on the console: {last}", .limit.as_secs_f32())]
    Timeout {
        /// What was being waited for.
        waiting_for: String,
        /// How long.
        limit: Duration,
        /// The guest's last lines.
        last: String,
    },
    /// The guest says that something is wrong, or nothing that can be understood.
    #[error("the guest says: {0}")]
    Guest(String),
    /// A process has no memory block of the size asked for, or more than one.
    #[error("process {pid} has {found} mappings of {bytes} bytes that could be guest RAM, not one")]
    NoSuchBlock {
        /// The process.
        pid: u32,
        /// The block's size.
        bytes: u64,
        /// How many mappings fit.
        found: usize,
    },
}

impl Error {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let action = action.into();
        move |source| Error::Io { action, source }
    }

    pub(crate) fn path(action: &str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        Error::io(format!("{action} {}", path.display()))
    }

    pub(crate) fn missing(what: impl Into<String>, looked: &[PathBuf]) -> Error {
        let looked: Vec<String> = looked.iter().map(|path| path.display().to_string()).collect();
        Error::ToolsMissing { what: what.into(), looked: format!("looked in {}", looked.join(", ")) }
    }

    /// Whether the machine lacks what a test needs, rather than something being wrong.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(self, Error::ToolsMissing { .. } | Error::NotInMirrors { .. } | Error::Unavailable { .. })
    }
}

/// Runs `command` to its end.
pub(crate) fn run(command: &mut Command) -> Result<String, Error> {
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let failed = |output: String| Error::Command { command: words.join(" "), output };
    let output = command.output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(failed(if text.is_empty() { output.status.to_string() } else { text }))
    }
}
