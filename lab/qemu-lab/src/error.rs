//! The laboratory's errors, with what to do about them.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Why a request to the laboratory failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tool that `scripts/setup` installs is missing.
    #[error("{what} not found ({looked}): run scripts/setup")]
    ToolsMissing {
        /// What was looked for.
        what: String,
        /// The places that were searched.
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
    /// This machine or this user lacks something (no root, no huge pages, no network namespaces).
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
        /// The action that failed, and its object.
        action: String,
        /// The system's error.
        source: io::Error,
    },
    /// A command ended with an error.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// The command's output, or why it did not start.
        output: String,
    },
    /// QEMU ended although it was still needed.
    #[error("QEMU ended while waiting for {waiting_for}: {output}")]
    QemuEnded {
        /// The event that was awaited.
        waiting_for: String,
        /// QEMU's standard error, and the guest's last lines.
        output: String,
    },
    /// An event did not happen in time.
    #[error("no {waiting_for} within {} s; last on the console: {last}", .limit.as_secs_f32())]
    Timeout {
        /// The event that was awaited.
        waiting_for: String,
        /// The time limit.
        limit: Duration,
        /// The guest's last lines.
        last: String,
    },
    /// The guest reports an error, or prints something unexpected.
    #[error("the guest says: {0}")]
    Guest(String),
    /// A process has no memory block of the given size, or more than one.
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

    /// Returns whether the machine lacks something that a test needs; every other error is a failure.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(self, Error::ToolsMissing { .. } | Error::NotInMirrors { .. } | Error::Unavailable { .. })
    }
}

/// Runs `command` to its end. Returns its standard output.
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
