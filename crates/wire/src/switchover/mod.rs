//! The switchover as a commit: the one moment of a migration in which two hosts could both run the guest.
//!
//! Left alone, QEMU splits the brain by default: the destination starts its guest when the stream ends, and the source
//! starts its own again when the return path closes early. So Sterna takes the decision: it is one record on the
//! **source's** disk. Before it is there the source may go on; once it is there the source never runs again.
//!
//! ```text
//!  source                                             destination
//!  record started                                     record started
//!  start migration                                    clear QEMU's autostart, confirmed, then accept the stream
//!  final state sent ────────── Prepare ─────────────> all placed, QEMU loaded and paused
//!                                                     record prepared          (from here it waits to be told)
//!  relay SHUT to QEMU  <────── Prepared ─────────────
//!  QEMU reports completed
//!  record committed            (the decision)
//!                      ─────── Commit ──────────────> record committed, cont, QEMU reports running, record running
//!  monitor ended       <────── Running ──────────────
//!  record finished
//! ```
//!
//! Any failure before the decision: the source writes `aborted`, only then makes its guest run again, and says `Abort`.
//! A source record that is absent or `started` means that nothing was decided (presumed abort).
//!
//! After a lost connection or a crash **the source dials** the destination's listener (the destination has no address
//! to dial) and **the destination speaks first**: `AskOutcome` if it stands prepared, `Running`, `Abort` (discarded,
//! never ran) or `Lost` (committed, but its QEMU is gone). The source answers `AskOutcome` with `Outcome`.
//!
//! [`SourceSwitchover`] and [`DestinationSwitchover`] do no input or output and know no time: events go in, actions
//! come out. **The driver's part of the contract:**
//!
//! * It performs the actions of a list one after the other, in order, before it gives the next event.
//! * `WriteRecord` is always the last action of a list. It is durable (temporary file, `fsync`, rename, `fsync` of the
//!   directory) when the driver answers `RecordWritten`; after `RecordFailed` either content may be on the disk. Other
//!   events may be given in between; they wait inside the machine.
//! * It holds an exclusive `flock` on the record's lock file from before the record is read or created until the
//!   process ends, so that `recover` and a living process, or two `recover`s, never act for the same side at once;
//!   `recover` reads the record and asks QEMU for its state only when it has the lock.
//! * It starts no new migration on a QEMU that a record in an unsettled state names ([`RecordState::settled`]):
//!   otherwise a late `recover` of the old migration would act on the new one's QEMU.
//! * Events of an old connection are not given after `Connected` of a newer one; what is sent without a connection is
//!   dropped. Silence beyond the heartbeat limit counts as `ConnectionLost`.
//! * It tells QEMU by process identity ([`ProcessIdentity`]), not by socket path: another process on the same path
//!   means that the record's QEMU is gone.
//!
//! `tests/switchover_model.rs` explores these very types exhaustively; `docs/switchover.md` tells operators what to do.

mod crash_point;
mod destination;
mod record;
mod source;

pub use crash_point::{CrashPoint, Moment, Step};
pub use destination::{DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest, DestinationSwitchover};
pub use record::{
    DestinationState, ProcessIdentity, RECORD_VERSION, Record, RecordError, RecordState, SourceAfter, SourceState,
};
pub use source::{SourceAction, SourceEnd, SourceEvent, SourceGuest, SourceSwitchover};

use serde::{Deserialize, Serialize};

/// What was decided about a migration; only the source decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The guest belongs to the destination.
    Committed,
    /// The guest belongs to the source.
    Aborted,
}

/// What the two sides say to each other about the switchover, on the control channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchoverMessage {
    /// Source: the last byte of the guest's state has been handed to the channels. The totals that completeness is
    /// checked against travel beside it; their check enters as [`DestinationEvent::AllPlacedAndLoaded`].
    Prepare,
    /// Destination: loaded, paused, and that is on disk. It no longer gives up by itself.
    Prepared,
    /// Source: decided, on disk. Start the guest.
    Commit,
    /// Destination: the guest runs here.
    Running,
    /// Source: the guest stays at the source, discard yours. Destination: the guest was discarded here and never ran.
    Abort {
        /// Why, in words, for people.
        reason: String,
    },
    /// Destination, after a reconnection: it stands prepared and does not know what was decided.
    AskOutcome,
    /// Source: the answer to [`SwitchoverMessage::AskOutcome`].
    Outcome(Outcome),
    /// Destination: it had committed, but its QEMU is gone; the guest may have run for a while.
    Lost {
        /// Why, in words, for people.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_json() {
        let messages = [
            SwitchoverMessage::Prepare,
            SwitchoverMessage::Prepared,
            SwitchoverMessage::Commit,
            SwitchoverMessage::Running,
            SwitchoverMessage::Abort { reason: "disk full".into() },
            SwitchoverMessage::AskOutcome,
            SwitchoverMessage::Outcome(Outcome::Committed),
            SwitchoverMessage::Outcome(Outcome::Aborted),
            SwitchoverMessage::Lost { reason: "killed".into() },
        ];
        for message in messages {
            let text = serde_json::to_string(&message).unwrap();
            assert_eq!(serde_json::from_str::<SwitchoverMessage>(&text).unwrap(), message, "{text}");
        }
    }
}
