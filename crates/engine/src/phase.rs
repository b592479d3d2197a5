//! How far a migration is, and where its guest is.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Where the guest ran before the migration.
    Source,
    /// Where the guest is moved to.
    Destination,
}

/// The phase that a migration has reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// Settings, connection, handshake: nothing was begun.
    #[default]
    SettingUp,
    /// The guest runs and the rounds send dirty pages.
    Rounds,
    /// The guest is paused; its last pages and its state are being sent.
    SwitchingOver,
    /// The decision is made: the guest belongs to the destination.
    Committed,
    /// The guest runs at the destination; the rest of its memory is being sent.
    PostCopy,
}

impl Phase {
    /// Returns the phase in words for people, as `side` sees it. [`fmt::Display`] has those of the source.
    pub fn words(self, side: Side) -> &'static str {
        let at_source = side == Side::Source;
        match self {
            Self::SettingUp => "setting up",
            Self::Rounds if at_source => "sending memory",
            Self::Rounds => "receiving memory",
            Self::SwitchingOver => "switching over",
            Self::Committed if at_source => "starting the guest at the destination",
            Self::Committed => "starting the guest",
            Self::PostCopy if at_source => "sending the rest of memory after the guest",
            Self::PostCopy => "receiving the rest of memory after the guest",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words(Side::Source))
    }
}

/// Where the guest is after a migration that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestState {
    /// The guest was not touched: it is as it was before.
    Untouched,
    /// The guest runs at the source.
    RunsAtSource,
    /// The guest belongs to the source and is paused: the source could not resume it.
    PausedAtSource,
    /// The guest has ended at the source before it was moved: by itself, or with its monitor. The destination has no copy that could run.
    EndedAtSource,
    /// The guest belongs to the destination; whether it runs there was not confirmed. It must never run at the source again.
    BelongsToDestination,
    /// The guest belongs to the destination, was started there, and certainly does not run. The source's monitor is kept, with the guest as
    /// it was when it was paused.
    DoesNotRun,
    /// The guest belongs to the destination and is paused: the destination could not resume it.
    PausedAtDestination,
    /// The guest belongs to the destination, and the sides lost each other for good before all of its memory was known to have arrived.
    /// A thread at the destination that touches a missing page waits.
    LacksMemory,
    /// The guest runs on both sides: somebody started it by hand. One of the two must be stopped at once.
    RunsTwice,
    /// The guest is at the other side; the memory at this side is of no use.
    NotHere,
}

impl fmt::Display for GuestState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Untouched => "the guest was not touched",
            Self::RunsAtSource => "the guest runs on at the source",
            Self::PausedAtSource => "the guest is paused at the source: let the monitor resume it",
            Self::EndedAtSource => "the guest has ended at the source, and is nowhere else",
            Self::BelongsToDestination => {
                "the guest belongs to the destination and must not run at the source; look whether it runs there"
            }
            Self::DoesNotRun => {
                "the guest belongs to the destination and does not run there; the source keeps the guest as it was when it was paused"
            }
            Self::PausedAtDestination => {
                "the guest belongs to the destination and is paused there: let the monitor resume it"
            }
            Self::LacksMemory => "the guest belongs to the destination, and not all of its memory is known to be there",
            Self::RunsTwice => "the guest was started by hand where it must not run: stop one of the two at once",
            Self::NotHere => "nothing runs here, and the memory here is of no use",
        })
    }
}
