//! What stands for `tracee` on CPUs for which it is not written: an error in words.

use std::convert::Infallible;
use std::time::Duration;

use libc::c_long;

use crate::{AttachError, Process};

/// How long anything may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);

/// A thread that is traced: there is none here.
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
