//! The errors of a machine.

use std::io;
use sterna::DirtyLogError;
use thiserror::Error;

/// Why an operation of a machine failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is not possible.
    #[error("{0}")]
    Config(String),
    /// The system refused.
    #[error("cannot {what}: {source}")]
    System {
        /// The action that failed, and its object.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The dirty log is not available.
    #[error(transparent)]
    DirtyLog(#[from] DirtyLogError),
    /// A vCPU ended by itself; the machine is paused.
    #[error("vCPU {vcpu} stopped: {why}")]
    Vcpu {
        /// Its number, from 0.
        vcpu: usize,
        /// Why.
        why: String,
    },
    /// A saved state does not fit this machine. Nothing was changed unless the text states it.
    #[error("the saved state does not fit this machine: {0}")]
    State(String),
    /// Operations were called in the wrong order.
    #[error("{0}")]
    Order(&'static str),
    /// The awaited state was not reached in time.
    #[error("the guest did not get there within {seconds} s; it is at: {report}")]
    Late {
        /// The time limit.
        seconds: f64,
        /// The guest's progress.
        report: String,
    },
}

impl Error {
    /// Converts an error of the system or KVM, for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System { what, source: source.into() }
    }
}
