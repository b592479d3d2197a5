//! Why a command of the gateway failed: a text for people, and a kind on which a program can branch.

use std::fmt::{Arguments, Display};
use std::io;

use sterna_codec::{EngineMissing, QatzipRefused};
use sterna_engine::migration::{self, MigrationError};
use sterna_engine::record_file::RecordFileError;
use sterna_engine::session::SessionError;
use sterna_engine::transport::TransportError;
use sterna_offload::StartError;

use crate::qmp::QmpError;
use crate::settings::SettingsError;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// It failed after it had begun. A guest continues at the source; a recovery has settled nothing.
    Failed,
    /// This side refuses, before anything was touched: QEMU, its guest, the options or this host do not permit it.
    Refused,
    /// As `Refused`: the system does not permit this process what it needs.
    NotPermitted,
    /// There is no connection with the other side, which was not reached, did not come, or does not prove who it is.
    Unreachable,
    /// The other side was reached, and refuses. Nothing was touched.
    PeerRefused,
    /// It was cancelled before anything was touched.
    Cancelled,
    /// The guest runs nowhere, and its memory is lost on this side.
    Lost,
}

impl ErrorKind {
    /// Returns the kind of an operation of the system that failed before anything was touched.
    pub(super) fn of_io(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::PermissionDenied { Self::NotPermitted } else { Self::Refused }
    }

    /// Returns the kind of a migration by the library that failed before anything was touched.
    pub(super) fn of_migration(error: &MigrationError) -> Self {
        let source = std::error::Error::source(error);
        match error.kind {
            migration::ErrorKind::Cancelled => Self::Cancelled,
            migration::ErrorKind::Refused => Self::PeerRefused,
            migration::ErrorKind::Network => {
                source.and_then(|source| source.downcast_ref::<TransportError>()).map_or(Self::Unreachable, Cause::kind)
            }
            migration::ErrorKind::Record => {
                source.and_then(|source| source.downcast_ref::<RecordFileError>()).map_or(Self::Refused, Cause::kind)
            }
            _ => Self::Refused,
        }
    }
}

/// Why a migration could not begin, or how it ended if there is no report. The text includes the guest's state.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct GatewayError {
    /// The kind of the failure.
    pub kind: ErrorKind,
    /// The text, for people.
    pub text: String,
}

impl GatewayError {
    /// Makes an error after something has begun.
    pub(super) fn new(what: impl Display) -> Self {
        Self { kind: ErrorKind::Failed, text: what.to_string() }
    }

    /// Makes an error from before anything was begun.
    pub(super) fn refused(cause: impl Cause) -> Self {
        Self { kind: cause.kind(), text: cause.to_string() }
    }

    /// Makes an error from before anything was done to the guest, and says so.
    pub(super) fn untouched(cause: impl Cause) -> Self {
        Self { kind: cause.kind(), text: format!("{cause} (the guest was not touched)") }
    }

    /// Returns this error as one of another kind.
    pub(super) fn of(self, kind: ErrorKind) -> Self {
        Self { kind, ..self }
    }
}

impl From<SessionError> for GatewayError {
    fn from(error: SessionError) -> Self {
        Self::new(error)
    }
}

/// What speaks against a migration before it has begun.
pub(super) trait Cause: Display {
    /// Returns its kind.
    fn kind(&self) -> ErrorKind {
        ErrorKind::Refused
    }
}

impl Cause for Arguments<'_> {}
impl Cause for &str {}
impl Cause for String {}
impl Cause for SettingsError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Qmp(error) => error.kind(),
            _ => ErrorKind::Refused,
        }
    }
}
impl Cause for StartError {}
impl Cause for QatzipRefused {}
impl Cause for EngineMissing {}

impl Cause for GatewayError {
    fn kind(&self) -> ErrorKind {
        if self.kind == ErrorKind::Failed { ErrorKind::Refused } else { self.kind }
    }
}

impl Cause for QmpError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { kind: io::ErrorKind::PermissionDenied, .. } => ErrorKind::NotPermitted,
            _ => ErrorKind::Refused,
        }
    }
}

impl Cause for RecordFileError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. } => ErrorKind::of_io(source),
            _ => ErrorKind::Refused,
        }
    }
}

impl Cause for TransportError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Address { .. } | Self::WrongSide(_) => ErrorKind::Refused,
            Self::Listen { source, .. } => ErrorKind::of_io(source),
            Self::Refused { .. } | Self::Busy { .. } | Self::NotAllowed { .. } => ErrorKind::PeerRefused,
            _ => ErrorKind::Unreachable,
        }
    }
}

impl Cause for SessionError {
    fn kind(&self) -> ErrorKind {
        match &self.source {
            _ if self.refused => ErrorKind::PeerRefused,
            Some(error) => error.kind(),
            None => ErrorKind::Unreachable,
        }
    }
}
