//! The messages of a control socket: one line of JSON for the request, one for the answer (docs/control.md).

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sterna_engine::live_control::RequestOutcome;

/// The version of the messages. Another version is refused; new fields do not change it.
pub(crate) const VERSION: u32 = 1;
/// Maximum bytes of a request.
pub(super) const MAX_REQUEST: usize = 4 << 10;
/// Maximum bytes of an answer.
pub(super) const MAX_ANSWER: u64 = 64 << 10;

/// A request.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) version: u32,
    #[serde(flatten)]
    pub(crate) command: Command,
}

/// What is requested.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub(crate) enum Command {
    Show,
    Set {
        /// Bytes per second; 0: no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bandwidth: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        downtime_ms: Option<u64>,
    },
    Cancel,
    SwitchOver,
    PostCopy,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AnswerKind {
    /// It is carried out, unless the migration fails before.
    Accepted,
    /// The two sides have not agreed on what it needs, or not yet.
    NotAgreed,
    /// The migration is beyond the point up to which it has an effect.
    TooLate,
    /// It cannot be carried out by this process, or not be understood.
    Refused,
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) version: u32,
    pub(crate) outcome: AnswerKind,
    /// The reason of a request that was not accepted, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// The migration, after the request `show`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) migration: Option<Running>,
}

impl Answer {
    pub(super) fn accepted() -> Self {
        Self { version: VERSION, outcome: AnswerKind::Accepted, reason: None, migration: None }
    }

    pub(super) fn refused(reason: impl Into<String>) -> Self {
        Self { outcome: AnswerKind::Refused, reason: Some(reason.into()), ..Self::accepted() }
    }

    /// Returns the answer to a request of a migration's control. `needs` says what both sides have to agree on.
    pub(super) fn of(outcome: RequestOutcome, needs: &str) -> Self {
        let (outcome, reason) = match outcome {
            RequestOutcome::Accepted => return Self::accepted(),
            RequestOutcome::NotAgreed => (AnswerKind::NotAgreed, needs.to_owned()),
            RequestOutcome::TooLate => (AnswerKind::TooLate, "the migration is beyond that point".to_owned()),
            _ => return Self::refused("this program does not know the answer of its library"),
        };
        Self { outcome, reason: Some(reason), ..Self::accepted() }
    }
}

/// A migration that a process works on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Running {
    /// Its id; none until both sides have agreed on it.
    pub(crate) id: Option<String>,
    /// `source` or `destination`.
    pub(crate) side: String,
    /// The process that works on it.
    pub(crate) process: u32,
    /// The QMP socket of the QEMU, or the domain of libvirt.
    pub(crate) monitor: String,
    /// Where the source sends, or the destination listens.
    pub(crate) peer: String,
    /// Milliseconds since 1970.
    pub(crate) started_ms: u64,
    /// The figures of this side: those of `Progress`, or of `ReceiveProgress`. Null until there are any.
    pub(crate) progress: Value,
}
