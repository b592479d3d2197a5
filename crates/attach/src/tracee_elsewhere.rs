//! Takes the place of `tracee` on CPUs that it does not support: every function returns an error.

use std::convert::Infallible;
use std::io;
use std::time::Duration;

use libc::c_long;

use crate::system::Tid;
use crate::{AttachError, Process, StoppedAt};

/// How long each step may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);

/// A traced thread, of which there is none on this CPU.
pub(crate) struct Tracee(Infallible);

impl Tracee {
    pub(crate) fn attach(_process: &Process) -> Result<Tracee, AttachError> {
        Err(AttachError::Architecture(std::env::consts::ARCH))
    }

    pub(crate) fn system_call(&mut self, _number: c_long, _arguments: [u64; 6]) -> Result<u64, AttachError> {
        match self.0 {}
    }

    pub(crate) fn release(self) -> Result<Duration, AttachError> {
        match self.0 {}
    }

    pub(crate) fn is_lent(&self) -> bool {
        match self.0 {}
    }
}

/// Fails, because this CPU is not supported.
pub(crate) fn check_architecture() -> Result<(), AttachError> {
    Err(AttachError::Architecture(std::env::consts::ARCH))
}

/// Fails, because this CPU is not supported.
pub(crate) fn at_rest(_tid: Tid) -> io::Result<Option<StoppedAt>> {
    Err(io::ErrorKind::Unsupported.into())
}
