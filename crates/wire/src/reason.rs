//! Why a migration failed: a kind on which a program can branch, and a text for people.
//!
//! Both cross the control channel. `kind` is a word of [`ErrorKind::name`]; a peer that sends only the text, or a word that this version
//! does not know, has failed for [`ErrorKind::Other`]. The text is cleaned and truncated to [`MAX_TEXT`](crate::limits::MAX_TEXT) bytes
//! whenever a reason is sent or received.

use std::borrow::Cow;
use std::{fmt, io};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::text::cleaned;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The migration was cancelled.
    Cancelled,
    /// A setting is out of its range, does not fit the others, or asks for what this host or its guest does not have. Nothing was begun.
    Settings,
    /// The system does not permit this process what it needs.
    NotPermitted,
    /// Guest RAM or its dirty log cannot be used.
    Memory,
    /// A method of the monitor has failed; the error's source is the method's error. Or a device whose state is sent separately.
    Monitor,
    /// The migration's record could not be read or written.
    Record,
    /// No connection could be made, or the address cannot be listened on.
    Network,
    /// At the source: the destination was reached and has refused the migration, before anything was done. It may take another one.
    Refused,
    /// The connection was lost, and the sides did not find each other again in time.
    ConnectionLost,
    /// A time limit has passed.
    TimeLimit,
    /// The rounds did not converge, and the settings end the migration then.
    NotConverging,
    /// The guest has ended at its source before it was moved: it has shut down, or has panicked.
    GuestEnded,
    /// The guest has arrived at the destination, and certainly does not run there.
    DoesNotRun,
    /// The other side has failed, and has sent the reason.
    OtherSide,
    /// None of these.
    Other,
}

impl ErrorKind {
    /// All kinds.
    pub const ALL: [Self; 15] = [
        Self::Cancelled,
        Self::Settings,
        Self::NotPermitted,
        Self::Memory,
        Self::Monitor,
        Self::Record,
        Self::Network,
        Self::Refused,
        Self::ConnectionLost,
        Self::TimeLimit,
        Self::NotConverging,
        Self::GuestEnded,
        Self::DoesNotRun,
        Self::OtherSide,
        Self::Other,
    ];

    /// Returns the kind of an operation of the system that failed: `otherwise`, unless this process may not do it.
    pub fn of_io(error: &io::Error, otherwise: Self) -> Self {
        if error.kind() == io::ErrorKind::PermissionDenied { Self::NotPermitted } else { otherwise }
    }

    /// Returns the word for the kind in messages and reports, for instance `time_limit`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Settings => "settings",
            Self::NotPermitted => "not_permitted",
            Self::Memory => "memory",
            Self::Monitor => "monitor",
            Self::Record => "record",
            Self::Network => "network",
            Self::Refused => "refused",
            Self::ConnectionLost => "connection_lost",
            Self::TimeLimit => "time_limit",
            Self::NotConverging => "not_converging",
            Self::GuestEnded => "guest_ended",
            Self::DoesNotRun => "does_not_run",
            Self::OtherSide => "other_side",
            Self::Other => "other",
        }
    }

    /// Returns the kind of this name; [`ErrorKind::Other`] for a name that this version does not know.
    fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|kind| kind.name() == name).unwrap_or(Self::Other)
    }

    // For serde: by reference.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    fn is_other(&self) -> bool {
        *self == Self::Other
    }
}

impl Default for ErrorKind {
    /// The kind of a failure of which only the text is known.
    fn default() -> Self {
        Self::Other
    }
}

impl Serialize for ErrorKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for ErrorKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<'de, str>::deserialize(deserializer).map(|name| Self::named(&name))
    }
}

/// Why a migration ended, or an action failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Reason {
    /// The text.
    #[serde(rename = "reason", serialize_with = "send_text", deserialize_with = "receive_text")]
    pub text: String,
    /// The kind.
    #[serde(default, skip_serializing_if = "ErrorKind::is_other")]
    pub kind: ErrorKind,
    /// Where the kind is [`ErrorKind::OtherSide`]: the kind that the other side sent.
    #[serde(skip)]
    pub other_side: Option<ErrorKind>,
}

impl Reason {
    /// Makes a reason of this side.
    pub fn new(kind: ErrorKind, text: impl fmt::Display) -> Self {
        Self { text: text.to_string(), kind, other_side: None }
    }

    /// Makes a reason of no particular kind.
    pub fn other(text: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Other, text)
    }

    /// Returns a reason that the peer has sent as one of this side.
    #[must_use]
    pub fn from_peer(self) -> Self {
        let other_side = (!matches!(self.kind, ErrorKind::Other | ErrorKind::OtherSide)).then_some(self.kind);
        Self { text: cleaned(&self.text), kind: ErrorKind::OtherSide, other_side }
    }

    /// Returns this reason with `what` and a colon before its text.
    #[must_use]
    pub fn within(self, what: impl fmt::Display) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn send_text<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&cleaned(text))
}

fn receive_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Cow::<'de, str>::deserialize(deserializer).map(|text| cleaned(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MAX_TEXT;

    fn received(json: &str) -> Reason {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn every_kind_survives_json_beside_its_text() {
        for kind in ErrorKind::ALL {
            let reason = Reason::new(kind, "the disk is full");
            assert_eq!(received(&serde_json::to_string(&reason).unwrap()), reason);
        }
        let names: std::collections::HashSet<_> = ErrorKind::ALL.map(ErrorKind::name).into();
        assert_eq!(names.len(), ErrorKind::ALL.len());
    }

    #[test]
    fn a_peer_that_sends_only_a_text_or_a_kind_of_its_own_has_failed_for_another_reason() {
        let expected = Reason::other("no");
        assert_eq!(received(r#"{"reason":"no"}"#), expected);
        assert_eq!(received(r#"{"reason":"no","kind":"out_of_luck","since":7}"#), expected);
        // And a reason of no particular kind is what an older version sends.
        assert_eq!(serde_json::to_string(&expected).unwrap(), r#"{"reason":"no"}"#);
    }

    #[test]
    fn a_text_is_cleaned_and_bounded_on_either_way() {
        let long = format!("a\u{1b}{}", "é".repeat(MAX_TEXT));
        let sent = serde_json::to_string(&Reason::other(&long)).unwrap();
        assert!(sent.len() < MAX_TEXT + 32 && sent.starts_with(r#"{"reason":"a é"#), "{sent}");
        let text = received(&serde_json::json!({ "reason": long }).to_string()).text;
        assert!(text.len() <= MAX_TEXT && text.starts_with("a é"), "{text}");
    }

    #[test]
    fn a_reason_of_the_peer_keeps_the_peers_kind_but_is_not_of_that_kind_here() {
        let theirs = Reason::new(ErrorKind::TimeLimit, "loading took too long");
        let ours = theirs.from_peer().within("the destination failed");
        assert_eq!((ours.kind, ours.other_side), (ErrorKind::OtherSide, Some(ErrorKind::TimeLimit)));
        assert_eq!(ours.text, "the destination failed: loading took too long");
        // Said back to the peer, it is no reason of this side, and the peer has its own.
        let echo = received(&serde_json::to_string(&ours).unwrap()).from_peer();
        assert_eq!((echo.kind, echo.other_side), (ErrorKind::OtherSide, None));
    }
}
