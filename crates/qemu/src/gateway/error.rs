//! Why a command of the gateway failed: a text for people, a kind on which a program can branch, and whether anything was begun.

use std::fmt::{Arguments, Display};
use std::io;

use sterna_codec::{EngineMissing, QatzipRefused};
use sterna_engine::migration::{ErrorKind, MigrationError};
use sterna_engine::record_file::RecordFileError;
use sterna_engine::report::Outcome;
use sterna_engine::session::SessionError;
use sterna_engine::transport::TransportError;
use sterna_offload::StartError;

use crate::qmp::QmpError;
use crate::settings::SettingsError;

/// Why a migration could not begin, or how it ended if there is no report. The text includes the guest's state.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct GatewayError {
    /// The kind of the failure.
    pub kind: ErrorKind,
    /// The outcome of a migration that was begun, or that a recovery has not settled; none if nothing was touched.
    pub outcome: Option<Outcome>,
    /// The text, for people.
    pub text: String,
}

impl GatewayError {
    /// Makes an error after something has begun.
    pub(super) fn new(what: impl Display) -> Self {
        Self { kind: ErrorKind::Other, outcome: Some(Outcome::Failed), text: what.to_string() }
    }

    /// Makes an error from before anything was begun.
    // By value: for map_err.
    #[allow(clippy::needless_pass_by_value)]
    pub(super) fn refused(cause: impl Cause) -> Self {
        Self { kind: cause.kind(), outcome: None, text: cause.to_string() }
    }

    /// Makes an error from before anything was done to the guest, and says so.
    pub(super) fn untouched(cause: impl Cause) -> Self {
        Self { text: format!("{cause} (the guest was not touched)"), ..Self::refused(cause) }
    }

    /// Makes an error of a kind, from before anything was begun.
    pub(super) fn of_kind(kind: ErrorKind, text: impl Display) -> Self {
        Self { kind, outcome: None, text: text.to_string() }
    }

    /// Makes an error of a guest that runs nowhere, and whose memory is lost on this side.
    pub(super) fn lost(text: impl Display) -> Self {
        Self { outcome: Some(Outcome::Lost), ..Self::new(text) }
    }

    /// Makes the error of a guest that was started at the destination and does not run there: `why`. `next`: what to do on this host.
    pub(super) fn does_not_run(why: &str, next: impl Display) -> Self {
        let text =
            format!("the guest has arrived at the destination, was started there, and does not run: {why}; {next}");
        Self { kind: ErrorKind::DoesNotRun, outcome: Some(Outcome::DoesNotRun), text }
    }

    /// Returns this error as one of another kind.
    pub(super) fn of(self, kind: ErrorKind) -> Self {
        Self { kind, ..self }
    }
}

impl From<SessionError> for GatewayError {
    fn from(error: SessionError) -> Self {
        Self::new(&error).of(error.kind())
    }
}

/// What speaks against a migration before it has begun.
pub(super) trait Cause: Display {
    /// Returns its kind.
    fn kind(&self) -> ErrorKind {
        ErrorKind::Settings
    }
}

impl Cause for Arguments<'_> {}
impl Cause for &str {}
impl Cause for String {}
impl Cause for SettingsError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Qmp(error) => error.kind(),
            _ => ErrorKind::Settings,
        }
    }
}
impl Cause for StartError {}
impl Cause for QatzipRefused {}
impl Cause for EngineMissing {}

impl Cause for GatewayError {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl Cause for MigrationError {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl Cause for QmpError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { kind: io::ErrorKind::PermissionDenied, .. } => ErrorKind::NotPermitted,
            _ => ErrorKind::Monitor,
        }
    }
}

impl Cause for RecordFileError {
    fn kind(&self) -> ErrorKind {
        self.kind()
    }
}

impl Cause for TransportError {
    fn kind(&self) -> ErrorKind {
        self.kind()
    }
}

impl Cause for SessionError {
    fn kind(&self) -> ErrorKind {
        self.kind()
    }
}
