//! The switchover as a commit: the only time in a migration at which two hosts could both run the guest.
//!
//! A virtual machine monitor (VMM) that migrates by itself allows split brain: the destination of a QEMU, for example,
//! starts its guest when the stream ends, and the source resumes its own when the return path closes early. So Sterna takes
//! the decision: it is one record on the **source's** disk. Before that record exists the source may resume its guest; after
//! that the source never runs it again.
//!
//! With QEMU, for operators, the sequence is in `docs/switchover.md`; here with any monitor:
//!
//! ```text
//!  source                                             destination
//!  record started                                     record started
//!  start migration                                    the guest will stay paused when loaded, confirmed; then accept it
//!  final state sent ────────── Prepare ─────────────> all placed, all loaded, the guest paused
//!                                                     record prepared          (from here it waits for the decision)
//!  the monitor may     <────── Prepared ─────────────
//!  complete, completed
//!  record committed            (the decision)
//!                      ─────── Commit ──────────────> record committed, guest started, it runs, record running
//!  monitor ended       <────── Running ──────────────
//!  record finished     ─────── Goodbye ─────────────> need not answer any more
//! ```
//!
//! After any failure before the decision, the source writes `aborted`, only then resumes its guest, and sends `Abort`.
//! A source record that is absent or `started` means that nothing was decided (presumed abort).
//!
//! In **post-copy** the guest goes on at the destination before all of its memory is there. The rest is only at the source,
//! whose record stays `committed`, and whose paused guest is neither ended nor resumed, until the destination has sent
//! `Running`:
//!
//! ```text
//!  source                                             destination
//!  rounds do not       ─────── PostCopy ────────────> missing pages are watched
//!  converge            <────── PostCopyReady ────────
//!  answers requests; guest paused, discards and
//!  final state sent ────────── Prepare ─────────────> everything but the discarded pages placed, all loaded
//!                      <────── Prepared ───────────── record prepared_incomplete
//!  record committed            (the decision)
//!  serves pages        ─────── Commit ──────────────> record committed_incomplete, guest started, it runs
//!                      <────── RunningIncomplete ──── record running_incomplete; touches a missing page: waits, requests it
//!                              all pages placed       record running
//!  monitor ended       <────── Running ──────────────
//!  record finished     ─────── Goodbye ─────────────>
//! ```
//!
//! Where both sides have agreed on it, the loss of the connection before that only **interrupts** the migration, as long as nothing but pages was
//! sent: the source tracks the guest's writes on and connects again, the destination keeps what was placed and waits, and the rounds go on:
//!
//! ```text
//!  source                                             destination
//!  rounds              ───────── x ─────────────────
//!  counts as dirty what was not acknowledged          keeps its memory
//!  connects again      ────────────────────────────>  closes the old data channels, and admits new ones
//!  rounds go on        <────── Continue ─────────────
//! ```
//!
//! Whichever side does not go on, because it was cancelled or has waited for too long, has aborted, and answers so.
//!
//! After a lost connection or a crash **the source connects** to the destination's listener (the destination has no
//! address to connect to) and **the destination sends first**: `AskOutcome` if it is prepared, `Running`, `Abort`
//! (discarded, never ran), `Lost` (committed, but its monitor is gone), `MemoryLost`, or `Continue`. The source replies to `AskOutcome`
//! with `Outcome`. Where memory is missing the destination sends `PostCopyReady` before anything else. Before the decision this message
//! means that missing pages are watched; here, that memory is still missing: the source opens new data channels, and sends what the destination lists there. If the process that received the guest dies while memory is
//! missing, that memory can never be placed: a guest that had not been started is discarded (the source has all of it), any
//! other is lost. If the process that served the pages dies, the guest waits wherever it touches what is missing; nothing
//! of it may be ended or resumed before an operator decides. If the source's monitor dies, the source sends `MemoryLost`.
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
//!   `recover` reads the record and queries the monitor's state only while it has the lock.
//! * It starts no new migration of a monitor that is named by a record in an unsettled state ([`RecordState::settled`]):
//!   otherwise a late `recover` of the old migration would act on the new one's monitor.
//! * It reports no events of an old connection after `Connected` of a newer one; messages sent without a connection are
//!   dropped. Silence beyond the heartbeat limit counts as `ConnectionLost`.
//! * It identifies a monitor by process identity ([`ProcessIdentity`]), not by socket path: another process on the same path
//!   means that the record's monitor is gone.
//! * In post-copy the pages that the destination lists after a reconnection are what is missing, whatever was sent before;
//!   and while the guest may run without them no missing page is ever released to read as zero.
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

use crate::reason::Reason;

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
    /// by itself, unless its copy is gone.
    Prepared,
    /// Source: the decision is on disk. Start the guest.
    Commit,
    /// Destination: the guest runs here with all of its memory. Nothing of the source is needed any more.
    Running,
    /// Source: the guest stays at the source, discard yours. Destination: the guest was discarded here and never ran.
    Abort(Reason),
    /// Destination, after a reconnection before it was prepared: it has kept what it had acknowledged, and admits data channels of this
    /// incarnation, over which the source sends the rest.
    Continue,
    /// Destination, after a reconnection: it is prepared and does not know the decision.
    AskOutcome,
    /// Source: the reply to [`SwitchoverMessage::AskOutcome`].
    Outcome(Outcome),
    /// Destination: it had committed, but its monitor is gone; the guest may have run for a while.
    Lost(Reason),
    /// Source: the guest is to go on before all of its memory has arrived. Every page sent so far is placed.
    PostCopy,
    /// Destination: missing pages are watched; the post-copy channel may be opened. After a reconnection: so are all data
    /// channels of this incarnation, over which the source sends what is missing.
    PostCopyReady,
    /// Destination: the guest runs here, and part of its memory is still at the source.
    RunningIncomplete,
    /// Destination: the guest has been started here, and part of its memory can never be placed. Source: the part that was
    /// only there is gone.
    MemoryLost(Reason),
    /// Source: it knows the result of the migration and closes the connection; it needs no further message.
    Goodbye,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reason::ErrorKind;

    #[test]
    fn messages_survive_json() {
        let messages = [
            SwitchoverMessage::Prepare,
            SwitchoverMessage::Prepared,
            SwitchoverMessage::Commit,
            SwitchoverMessage::Running,
            SwitchoverMessage::Abort(Reason::new(ErrorKind::Record, "disk full")),
            SwitchoverMessage::Continue,
            SwitchoverMessage::AskOutcome,
            SwitchoverMessage::Outcome(Outcome::Committed),
            SwitchoverMessage::Outcome(Outcome::Aborted),
            SwitchoverMessage::Lost(Reason::other("killed")),
            SwitchoverMessage::PostCopy,
            SwitchoverMessage::PostCopyReady,
            SwitchoverMessage::RunningIncomplete,
            SwitchoverMessage::MemoryLost(Reason::other("killed")),
            SwitchoverMessage::Goodbye,
        ];
        for message in messages {
            let text = serde_json::to_string(&message).unwrap();
            assert_eq!(serde_json::from_str::<SwitchoverMessage>(&text).unwrap(), message, "{text}");
        }
    }
}
