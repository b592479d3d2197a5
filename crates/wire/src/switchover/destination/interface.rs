//! What the destination's machine and its driver tell each other: events in, actions out, and how it ends.

use crate::reason::Reason;
use crate::switchover::{DestinationState, SwitchoverMessage};

/// The state of the destination's guest, as its monitor (VMM) reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationGuest {
    /// Waits for the guest's state or is loading it (QEMU: `inmigrate`).
    Incoming,
    /// Loaded and paused.
    Paused,
    /// The guest runs.
    Running,
    /// The monitor's process has ended, or another process answers at its socket. (QEMU exits by itself when its stream
    /// breaks off.)
    Gone,
}

/// An event that the driver reports to the destination's machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationEvent {
    /// The requested record is durable.
    RecordWritten,
    /// Writing the record failed: the old or the new content may be on the disk.
    RecordFailed,
    /// The source has reconnected, with a valid proof; channels of an older connection are closed, whether or not its
    /// `ConnectionLost` was reported.
    Connected,
    /// The connection is gone, or has been silent for too long.
    ConnectionLost,
    /// The data channels of the current incarnation have failed, while the control connection is still there. Before this
    /// side is prepared this ends the migration, or interrupts it where that is possible and a connection has failed; afterwards
    /// only post-copy still needs them.
    ChannelsLost {
        /// The reason.
        reason: Reason,
    },
    /// The source sent a message.
    Message(SwitchoverMessage),
    /// The guest will stay paused when it is loaded: the result of [`DestinationAction::ClearAutostart`].
    AutostartCleared,
    /// Post-copy: a thread that touches a missing page waits from now on. The result of
    /// [`DestinationAction::WatchMissingPages`].
    MissingPagesWatched,
    /// Everything in the totals is placed, the monitor has loaded all state and the guest is paused.
    AllPlacedAndLoaded,
    /// The number of *write leases*: pieces of guest RAM that an unresponsive accelerator may still write. 0 initially;
    /// reported whenever it changes. While there is a lease this side is not prepared: a late write would corrupt the
    /// running guest.
    WriteLeases(u32),
    /// The guest's state changed, or is the result of [`DestinationAction::Cont`] or [`DestinationAction::Quit`].
    Guest(DestinationGuest),
    /// Post-copy: no page is missing any more, and all discards were applied before that was determined. Reported before
    /// every event that came after the last page was placed: a source's `MemoryLost`, or its fencing, counts only while
    /// memory is missing.
    MemoryComplete,
    /// Post-copy: part of the guest's missing memory can never be placed. Whatever touches it waits for good.
    MemoryFailed {
        /// The reason.
        reason: Reason,
    },
    /// An operator asserts that the source is gone for good and its guest cannot run. Without the source's process
    /// there is no record to recover from, so a prepared destination commits by itself; one that lacks memory can never
    /// have it.
    SourceFenced,
    /// The migration must end: cancelled, a time limit, an error of the data plane, a failure of the source. A prepared
    /// destination may not abort by itself, and ignores this.
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
pub enum DestinationAction {
    /// Write the record durably and report `RecordWritten` or `RecordFailed`.
    WriteRecord(DestinationState),
    /// Ensure that the guest stays paused when it is loaded, and report `AutostartCleared`. Until then not one byte of the
    /// guest's state may reach a monitor that would start the guest by itself. (QEMU: `migrate-incoming`, then `stop`
    /// while `inmigrate`; report when QMP has completed it.)
    ClearAutostart,
    /// Let the guest's memory and state through to the monitor.
    AcceptStream,
    /// Post-copy: have all missing pages of guest RAM watched, and report `MissingPagesWatched`; or `ActionFailed`, where that
    /// is not possible.
    WatchMissingPages,
    /// After an interruption, and in post-copy: close the data channels of older incarnations, wait for their threads, and admit
    /// those of the current one. On its post-copy channel the list of missing pages is sent first.
    RenewChannels,
    /// Post-copy: all discards are applied. Report `MemoryComplete` as soon as no page is missing any more.
    AwaitMemory,
    /// Send on the control channel; without a connection, drop the message.
    Send(SwitchoverMessage),
    /// Start the guest; report `Guest(Running)`, or `ActionFailed`. In post-copy the monitor may touch a missing page on the way,
    /// and wait until it has arrived, or for good. So other events are reported meanwhile: data channels may break, and be made anew.
    Cont,
    /// Announce the guest's network addresses from here.
    AnnounceSelf,
    /// End the monitor of this record, if it is still alive; report `Guest(Gone)`, or `ActionFailed`.
    Quit,
    /// Close the control connection, so that the source connects anew.
    HangUp,
    /// Keep (or start) listening for the source.
    AwaitSource,
    /// The migration has ended. The machine still answers a source that connects, until it returns
    /// [`DestinationAction::Leave`]; a driver may stop answering earlier, after a time: `recover` answers later.
    Done(DestinationEnd),
    /// After `Done`: the source needs no more answers. The process may end.
    Leave,
}

/// The end of the migration at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationEnd {
    /// The guest runs here, with all of its memory.
    Running,
    /// Discarded; the guest never ran here.
    Discarded {
        /// Why.
        reason: Reason,
    },
    /// It was committed here, and its monitor ended before the guest was seen running with all of its memory.
    Lost {
        /// What happened.
        reason: Reason,
    },
    /// Post-copy: the guest has run here, or may have, and part of its memory will never arrive. Whatever touches that part
    /// waits for good. Nothing is changed: an operator ends the monitor.
    MemoryLost {
        /// What happened.
        reason: Reason,
    },
    /// An action of the monitor failed; remedy the reason, then run `recover`.
    Stuck {
        /// What failed.
        reason: Reason,
    },
    /// The record and the monitor contradict each other (a guest runs without a commit, or a monitor is empty): another
    /// program has interfered. Nothing is changed.
    Conflict,
}
