//! The switchover as a commit: the only time in a migration at which two hosts could both run the guest.
//!
//! By itself, QEMU allows split brain: the destination starts its guest when the stream ends, and the source resumes
//! its own when the return path closes early. So Sterna takes the decision: it is one record on the **source's** disk.
//! Before that record exists the source may resume its guest; after that the source never runs it again.
//!
//! ```text
//!  source                                             destination
//!  record started                                     record started
//!  start migration                                    clear QEMU's autostart, confirmed, then accept the stream
//!  final state sent ────────── Prepare ─────────────> all placed, QEMU loaded and paused
//!                                                     record prepared          (from here it waits for the decision)
//!  relay SHUT to QEMU  <────── Prepared ─────────────
//!  QEMU reports completed
//!  record committed            (the decision)
//!                      ─────── Commit ──────────────> record committed, cont, QEMU reports running, record running
//!  monitor ended       <────── Running ──────────────
//!  record finished
//! ```
//!
//! After any failure before the decision, the source writes `aborted`, only then resumes its guest, and sends `Abort`.
//! A source record that is absent or `started` means that nothing was decided (presumed abort).
//!
//! After a lost connection or a crash **the source connects** to the destination's listener (the destination has no
//! address to connect to) and **the destination sends first**: `AskOutcome` if it is prepared, `Running`, `Abort`
//! (discarded, never ran) or `Lost` (committed, but its QEMU is gone). The source replies to `AskOutcome` with
//! `Outcome`.
//!
//! [`SourceSwitchover`] and [`DestinationSwitchover`] do no input or output and have no clock: events are passed in,
//! actions are returned. **The driver's part of the contract:**
//!
//! * It performs the actions of a list one after the other, in order, before it reports the next event.
//! * `WriteRecord` is always the last action of a list. The record is durable (temporary file, `fsync`, rename, `fsync`
//!   of the directory) when the driver reports `RecordWritten`; after `RecordFailed` either content may be on the disk.
//!   Other events may be reported in between; they wait inside the machine.
//! * It holds an exclusive `flock` on the record's lock file from before the record is read or created until the
//!   process ends, so that `recover` and a living process, or two `recover`s, never act for the same side at once;
//!   `recover` reads the record and queries QEMU's state only while it has the lock.
//! * It starts no new migration on a QEMU that is named by a record in an unsettled state ([`RecordState::settled`]):
//!   otherwise a late `recover` of the old migration would act on the new one's QEMU.
//! * It reports no events of an old connection after `Connected` of a newer one; messages sent without a connection are
//!   dropped. Silence beyond the heartbeat limit counts as `ConnectionLost`.
//! * It identifies QEMU by process identity ([`ProcessIdentity`]), not by socket path: another process on the same path
//!   means that the record's QEMU is gone.
//!
//! `tests/switchover_model.rs` explores these very types exhaustively; `docs/switchover.md` is the guide for operators.

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

/// The decision about a migration; only the source decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The guest belongs to the destination.
    Committed,
    /// The guest belongs to the source.
    Aborted,
}

/// The messages about the switchover, on the control channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchoverMessage {
    /// Source: the last byte of the guest's state has been passed to the channels. The totals for the completeness
    /// check are sent separately; the result of the check is reported as [`DestinationEvent::AllPlacedAndLoaded`].
    Prepare,
    /// Destination: the guest is loaded and paused, and the record of that is on disk. The destination no longer aborts
    /// by itself.
    Prepared,
    /// Source: the decision is on disk. Start the guest.
    Commit,
    /// Destination: the guest runs here.
    Running,
    /// Source: the guest stays at the source, discard yours. Destination: the guest was discarded here and never ran.
    Abort {
        /// The reason, as text for people.
        reason: String,
    },
    /// Destination, after a reconnection: it is prepared and does not know the decision.
    AskOutcome,
    /// Source: the reply to [`SwitchoverMessage::AskOutcome`].
    Outcome(Outcome),
    /// Destination: it had committed, but its QEMU is gone; the guest may have run for a while.
    Lost {
        /// The reason, as text for people.
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
