//! What the source's machine and its driver tell each other: events in, actions out, and how it ends.

use crate::reason::Reason;
use crate::switchover::{SourceState, SwitchoverMessage};

/// The state of the source's guest, as its monitor (VMM) reports it. A monitor that embeds Sterna knows it; with QEMU the driver
/// combines QMP's `query-status` and `query-migrate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceGuest {
    /// No migration is in progress and the monitor controls the guest again: the guest runs, or is paused for a reason
    /// unrelated to Sterna. Also if the guest has ended here by itself, with or without its monitor, before it was moved: it stays here, and
    /// the destination discards its copy, which must never run.
    Running,
    /// The monitor runs a migration of its own, the guest running or paused for its last part. If that migration ends
    /// before [`SourceAction::RelayShut`] (connection closed, cancelled, failed), the monitor resumes the guest by itself.
    Migrating,
    /// The guest is paused for the switchover and stays so until [`SourceAction::Cont`] (QEMU: migration `completed`,
    /// guest `postmigrate`).
    Completed,
    /// The monitor's process has ended.
    Gone,
}

/// An event that the driver reports to the source's machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// The requested record is durable.
    RecordWritten,
    /// Writing the record failed: the old or the new content may be on the disk.
    RecordFailed,
    /// The connection that [`SourceAction::Connect`] requested is established, with a valid proof.
    Connected,
    /// The connection is gone, or has been silent for too long.
    ConnectionLost,
    /// The data channels of the current incarnation have failed, while the control connection is still there. Before the
    /// decision this ends the migration, or interrupts it where that is possible and a connection has failed; afterwards only
    /// post-copy still needs them, and connects again.
    ChannelsLost {
        /// The reason.
        reason: Reason,
    },
    /// The destination sent a message.
    Message(SwitchoverMessage),
    /// The rounds do not converge: begin post-copy. All RAM sent so far is placed and the guest still runs. Only after
    /// [`SourceAction::StartMigration`] was performed, once, and only with the capability for it.
    PostCopyWanted,
    /// The last byte of the guest's state has been passed to the channels. With post-copy: only after
    /// [`SourceAction::StartPostCopy`].
    FinalStateSent,
    /// The guest's state changed (only after [`SourceAction::StartMigration`] was performed), or is the result of
    /// [`SourceAction::RelayShut`], [`SourceAction::EndMigration`], [`SourceAction::Cont`] or [`SourceAction::EndGuest`];
    /// or, of [`SourceAction::ServePages`], that the monitor has ended and the pages with it.
    Guest(SourceGuest),
    /// While the migration is interrupted, after the decision, or once only the abort is to be delivered: the driver stops trying. The time for reaching the
    /// destination is over, the destination reported that it cannot go on, or this process cannot serve pages (a
    /// `recover`, which has no access to them). `recover` can continue later. Also in the place of a
    /// [`SwitchoverMessage::Running`] that cannot be true, because part of the guest's memory was never sent.
    GaveUp {
        /// The reason.
        reason: Reason,
    },
    /// The migration must end: cancelled, a time limit, an error of the data plane. After the decision a migration cannot be
    /// cancelled: this has no effect. (While pages are served, a cancelled driver stops waiting for a destination that is lost
    /// after a finite time, and then reports [`SourceEvent::GaveUp`].)
    Failed {
        /// The reason.
        reason: Reason,
    },
    /// The action under way has failed.
    ActionFailed {
        /// The reason.
        reason: Reason,
    },
}

/// An action for the driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Write the record durably and report `RecordWritten` or `RecordFailed`.
    WriteRecord(SourceState),
    /// Begin to move the guest: track its writes and send its memory, or make its monitor send its own migration to us.
    StartMigration,
    /// The destination is lost before the decision. End the data channels, keep tracking the guest's writes, and count everything that was
    /// not acknowledged as dirty again.
    HoldRounds,
    /// The destination is connected again and has kept what it had acknowledged: open data channels of the current incarnation and send
    /// the rest. Where that fails because of the connection, close the control connection too and report `ConnectionLost`; else
    /// `ActionFailed`.
    ContinueRounds,
    /// Post-copy begins: the destination watches for missing pages. Open the post-copy channel, answer requests on it,
    /// pause the guest, send the discards and the last state, and report `FinalStateSent`, or `ActionFailed`.
    StartPostCopy,
    /// Post-copy: send all pages that the destination lacks, and answer its requests, over the channels of the current
    /// incarnation. After a reconnection these are opened first, and the destination's own list is what it lacks. Where
    /// that fails because of the connection, close the control connection too and report `ConnectionLost`; where this
    /// process cannot serve pages at all, report `GaveUp`, or `Guest(Gone)` if the monitor has ended. An incarnation whose
    /// pages are being served already needs nothing.
    ServePages,
    /// Send on the control channel; without a connection, drop the message.
    Send(SwitchoverMessage),
    /// The destination is prepared: have the monitor complete, or confirm that the guest is paused and stays so; report
    /// `Guest(Completed)`. (With a QEMU that migrates by itself: forward SHUT(0) to its return path.)
    RelayShut,
    /// Ensure that the monitor has no migration in progress, then report `Guest`: `Running` if the guest runs,
    /// `Completed` if it is paused for the switchover. (With a QEMU that migrates by itself: close its sockets,
    /// `migrate_cancel`.)
    EndMigration,
    /// Resume the guest; report `Guest(Running)`, or `ActionFailed`.
    Cont,
    /// Announce the guest's network addresses: the switches may have learned the other host's port.
    AnnounceSelf,
    /// The decision is durable and the destination has confirmed that the guest runs there with all of its memory: end the
    /// paused guest here, or keep it, as the record's [`SourceAfter`](crate::switchover::SourceAfter) demands. Report `Guest`: `Gone`
    /// if it was ended, `Completed` if it was kept, `Running` if another program has started it; or `ActionFailed`, which keeps
    /// it as well.
    EndGuest,
    /// Connect to the destination's listener, with the next incarnation, repeatedly, and report `Connected`; close a
    /// connection that is still open first.
    Connect,
    /// The machine has ended and returns no more actions.
    Done(SourceEnd),
}

/// The end of the migration at the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceEnd {
    /// The guest runs at the destination with all of its memory.
    Finished,
    /// The guest runs here. The destination has been notified, is fenced, or can ask later.
    Aborted {
        /// The reason.
        reason: Reason,
    },
    /// The first record could not be written: nothing was begun, the guest was not touched.
    NotStarted,
    /// The source's monitor ended before the destination had confirmed that the guest runs there. If the destination is
    /// prepared it holds the only copy, and only an operator can let it run (`recover --fenced-peer` there). In post-copy:
    /// the pages that were only here are gone, and the destination knows.
    GuestGone,
    /// Committed, but the destination's monitor is gone. The guest is paused here; `recover --fenced-peer` resumes it.
    DestinationLost {
        /// Whether the guest certainly never ran there.
        never_ran: bool,
        /// The reason that the destination sent.
        reason: Reason,
    },
    /// Post-copy: the destination has the guest, which may have run, and can never place the rest of its memory. The guest
    /// is lost there. The paused copy here knows nothing of what the guest did there; the record stays `committed`, and
    /// only an operator who has ended the destination's monitor may resume it (`recover --fenced-peer`).
    MemoryLost {
        /// The reason that the destination sent.
        reason: Reason,
    },
    /// Committed, and the destination has not confirmed that the guest runs there. The record stays `committed`; `recover`
    /// continues.
    Undelivered {
        /// Why the driver gave up.
        reason: Reason,
    },
    /// Post-copy: part of the guest's memory is only here, and this process sends no more of it. The guest at the
    /// destination waits wherever it touches that part. The paused copy here must be neither ended nor resumed: the record
    /// stays `committed`.
    Unserved {
        /// Why the driver gave up.
        reason: Reason,
    },
    /// The guest is paused and this process cannot change that; remedy the reason, then run `recover`.
    Stuck {
        /// What failed.
        reason: Reason,
    },
    /// The guest runs here although it was committed to the destination, or runs there: it was started by hand. Nothing
    /// is changed; a person must stop one of the two.
    Conflict,
}
