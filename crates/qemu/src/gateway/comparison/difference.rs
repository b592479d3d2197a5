//! A difference between two machines, in words.

use sterna_wire::text::cleaned;

/// Maximum number of things that a text lists, and of differences that are reported.
pub(super) const MAX_LISTED: usize = 64;

/// What differs between two machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// The name by which a person allows it.
    pub(super) name: String,
    /// Whether the guest would be lost or run wrongly.
    pub(super) refuses: bool,
    /// What differs, on which side, and what to change.
    pub(super) text: String,
}

impl Difference {
    pub(super) fn refusal(name: impl Into<String>, text: String) -> Self {
        Self { name: cleaned(&name.into()), refuses: true, text }
    }

    pub(super) fn warning(name: impl Into<String>, text: String) -> Self {
        Self { refuses: false, ..Self::refusal(name, text) }
    }
}

/// Returns a list for people, bounded.
pub(super) fn listed(all: &[String]) -> String {
    let more = all.len().saturating_sub(MAX_LISTED);
    let first = all[..all.len() - more].join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}
