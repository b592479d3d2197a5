//! Why a machine does not do what was asked.

use std::io;
use sterna_memory::dirty::DirtyLogError;
use thiserror::Error;

/// Why a machine does not do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine cannot be as configured.
    #[error("{0}")]
    Config(String),
    /// The system refused.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried, on what.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The dirty log cannot be had.
    #[error(transparent)]
    DirtyLog(#[from] DirtyLogError),
    /// A vCPU ended by itself; the machine stands.
    #[error("vCPU {vcpu} stopped: {why}")]
    Vcpu {
        /// Which, from 0.
        vcpu: usize,
        /// Why.
        why: String,
    },
    /// A saved state is not one that this machine can go on with. Nothing was changed unless it says so.
    #[error("the saved state does not fit this machine: {0}")]
    State(String),
    /// Asked in the wrong order.
    #[error("{0}")]
    Order(&'static str),
    /// What was waited for did not come in time.
    #[error("the guest did not get there within {seconds} s; it stands at: {report}")]
    Late {
        /// How long was waited.
        seconds: f64,
        /// How far it was, in words.
        report: String,
    },
}

impl Error {
    /// For `map_err`, on what the system or KVM say.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System { what, source: source.into() }
    }
}
