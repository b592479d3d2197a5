//! The source's half of the switchover: the side that decides.

use super::{Outcome, SourceState, SwitchoverMessage};
use crate::text::cleaned;

/// The state of the source's guest, as its monitor reports it: with QEMU, combined from QMP's `query-status` and
/// `query-migrate`; a monitor that embeds Sterna knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceGuest {
    /// No migration is in progress and QEMU controls the guest again: it runs, or is paused for a reason unrelated to
    /// Sterna.
    Running,
    /// A migration is in progress, the guest running or paused for its last part. If it ends without SHUT (return path
    /// closed, cancelled, failed), QEMU resumes the guest by itself.
    Migrating,
    /// Migration `completed`, guest `postmigrate`: it is paused until `cont`.
    Completed,
    /// The process has ended.
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
    /// The destination sent a message.
    Message(SwitchoverMessage),
    /// The last byte of QEMU's stream has been passed to the channels.
    FinalStateSent,
    /// QEMU's state changed (only after [`SourceAction::StartMigration`] was performed), or is the result of
    /// [`SourceAction::EndMigration`], [`SourceAction::Cont`] or [`SourceAction::EndGuest`].
    Guest(SourceGuest),
    /// The migration must end: cancelled, a time limit, an error of the data plane; or the current action failed.
    Failed {
        /// The reason, as text for people.
        reason: String,
    },
}

/// An action for the driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Write the record durably and report `RecordWritten` or `RecordFailed`.
    WriteRecord(SourceState),
    /// Make QEMU start its migration into our sockets.
    StartMigration,
    /// Send on the control channel; without a connection, drop the message.
    Send(SwitchoverMessage),
    /// Forward the destination's SHUT(0) to QEMU's return path. QEMU then completes and reports it. Without a QEMU:
    /// report `Guest(Completed)`, since no guest resumes by itself.
    RelayShut,
    /// Ensure that QEMU has no migration in progress (close its sockets, `migrate_cancel`), then report `Guest`:
    /// `Running` if QEMU resumed the guest, `Completed` if it had completed already.
    EndMigration,
    /// QMP `cont`; report `Guest(Running)`, or `Failed`.
    Cont,
    /// QMP `announce-self`: the switches may have learned the other host's port.
    AnnounceSelf,
    /// The decision is durable and the destination has confirmed that the guest runs there: end the paused guest here,
    /// or keep it, as the record's [`SourceAfter`](super::SourceAfter) demands. Report `Guest`: `Gone` if it was ended,
    /// `Completed` if it was kept, `Running` if another program has started it; or `Failed`, which keeps it as well.
    EndGuest,
    /// Connect to the destination's listener, repeatedly, and report `Connected`.
    Connect,
    /// The machine has ended and returns no more actions.
    Done(SourceEnd),
}

/// The end of the migration at the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceEnd {
    /// The guest runs at the destination.
    Finished,
    /// The guest runs here, and the destination has been notified (or is fenced).
    Aborted {
        /// The reason.
        reason: String,
    },
    /// The first record could not be written: nothing was begun, the guest was not touched.
    NotStarted,
    /// The source's QEMU ended before the destination had confirmed that the guest runs there. If the destination is
    /// prepared it holds the only copy, and only an operator can let it run (`recover --fenced-peer` there).
    GuestGone,
    /// Committed, but the destination's QEMU is gone. The guest is paused here; `recover --fenced-peer` resumes it.
    DestinationLost {
        /// Whether the guest certainly never ran there.
        never_ran: bool,
        /// The reason that the destination sent.
        reason: String,
    },
    /// The guest is paused and this process cannot change that; remedy the reason, then run `recover`.
    Stuck {
        /// What failed.
        reason: String,
    },
    /// The guest runs here although it was committed to the destination, or runs there: it was started by hand. Nothing
    /// is changed; a person must stop one of the two.
    Conflict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    WritingStarted,
    Migrating,
    Preparing,
    Relaying,
    WritingCommitted,
    Committed,
    EndingGuest,
    WritingFinished,
    WritingAborted,
    Resuming,
    WritingResumed,
    WritingGone,
    Telling,
    /// The destination confirmed that the guest runs there.
    Finished,
    /// With any other result.
    Ended,
}

impl Phase {
    fn writing(self) -> bool {
        use Phase::*;
        matches!(
            self,
            WritingStarted | WritingCommitted | WritingFinished | WritingAborted | WritingResumed | WritingGone
        )
    }

    fn undecided(self) -> bool {
        matches!(self, Self::Migrating | Self::Preparing | Self::Relaying)
    }
}

/// The source's state machine. See the module for the contract with its driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceSwitchover {
    phase: Phase,
    connected: bool,
    /// The disk may contain `committed` although nothing was sent: the guest must not resume before the record is
    /// replaced.
    may_be_committed: bool,
    /// The destination's guest is known to be gone, or the operator asserts it: there is no peer to notify.
    destination_gone: bool,
    reason: String,
    /// Events that came while a record was being written.
    waiting: Vec<SourceEvent>,
}

impl SourceSwitchover {
    /// Begins a switchover, on an open connection, before QEMU is touched.
    pub fn begin() -> (Self, Vec<SourceAction>) {
        let mut machine = Self::at(Phase::WritingStarted);
        machine.connected = true;
        (machine, vec![SourceAction::WriteRecord(SourceState::Started)])
    }

    /// Continues after a crash, from the record (`None` if there is none) and from QEMU's present state.
    ///
    /// `fenced_peer` is an operator's assertion that the destination's guest is gone for good and can never run. It is
    /// the only means to run a guest here that was committed to the destination; this guest does not know what the
    /// destination wrote to shared disks meanwhile.
    pub fn recover(record: Option<SourceState>, qemu: SourceGuest, fenced_peer: bool) -> (Self, Vec<SourceAction>) {
        let mut machine = Self::at(Phase::Ended);
        machine.destination_gone = fenced_peer;
        machine.reason = "the source was restarted before anything was decided".into();
        let mut actions = Vec::new();
        match record {
            // The destination's copy may still be good, so the destination is not told to discard it.
            Some(SourceState::Started | SourceState::Aborted) if qemu == SourceGuest::Gone => {
                machine.guest_gone(&mut actions);
            }
            None if qemu == SourceGuest::Gone => machine.end(SourceEnd::GuestGone, &mut actions),
            None | Some(SourceState::Started) => machine.abort_now(&mut actions),
            Some(SourceState::Gone) => machine.end(SourceEnd::GuestGone, &mut actions),
            // Neither side has the guest any more.
            Some(SourceState::Committed) if fenced_peer && qemu == SourceGuest::Gone => {
                machine.guest_gone(&mut actions);
            }
            Some(SourceState::Committed) if fenced_peer => {
                machine.reason = "an operator fenced the destination".into();
                machine.may_be_committed = true;
                machine.abort_now(&mut actions);
            }
            Some(SourceState::Committed) if qemu == SourceGuest::Running => {
                machine.end(SourceEnd::Conflict, &mut actions);
            }
            Some(SourceState::Committed) => {
                machine.phase = Phase::Committed;
                actions.push(SourceAction::Connect);
            }
            Some(SourceState::Aborted) => {
                machine.phase = Phase::Resuming;
                actions.push(SourceAction::EndMigration);
            }
            Some(SourceState::Resumed) => machine.tell(&mut actions),
            Some(SourceState::Finished) => machine.end(SourceEnd::Finished, &mut actions),
        }
        (machine, actions)
    }

    /// Returns whether the guest is committed to the destination: cancelling has no effect any more.
    pub fn decided(&self) -> bool {
        matches!(self.phase, Phase::Committed | Phase::EndingGuest | Phase::WritingFinished | Phase::Finished)
    }

    /// Returns why the migration was aborted; empty before that.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Returns whether the process may end now without leaving the guest paused: the machine is done, or only the
    /// `Abort` message is still to be delivered (`recover` can do that later).
    pub fn may_stop(&self) -> bool {
        matches!(self.phase, Phase::Telling | Phase::Finished | Phase::Ended)
    }

    /// Handles an event; returns the actions, in order.
    pub fn on(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        let mut actions = Vec::new();
        if self.phase.writing() {
            match event {
                SourceEvent::RecordWritten => self.written(&mut actions),
                SourceEvent::RecordFailed => self.not_written(&mut actions),
                other => self.waiting.push(other),
            }
        } else {
            self.step(event, &mut actions);
        }
        while !self.phase.writing() && !self.waiting.is_empty() {
            let event = self.waiting.remove(0);
            self.step(event, &mut actions);
        }
        actions
    }

    fn at(phase: Phase) -> Self {
        Self {
            phase,
            connected: false,
            may_be_committed: false,
            destination_gone: false,
            reason: String::new(),
            waiting: Vec::new(),
        }
    }

    fn written(&mut self, actions: &mut Vec<SourceAction>) {
        match self.phase {
            Phase::WritingStarted => {
                self.phase = Phase::Migrating;
                actions.push(SourceAction::StartMigration);
            }
            Phase::WritingCommitted => {
                self.phase = Phase::Committed;
                actions.push(SourceAction::Send(SwitchoverMessage::Commit));
            }
            Phase::WritingFinished => self.end(SourceEnd::Finished, actions),
            Phase::WritingAborted => self.resume(actions),
            Phase::WritingResumed => self.tell(actions),
            Phase::WritingGone => self.end(SourceEnd::GuestGone, actions),
            _ => {}
        }
    }

    fn not_written(&mut self, actions: &mut Vec<SourceAction>) {
        match self.phase {
            Phase::WritingStarted => {
                let reason = "the source could not write its record".to_owned();
                actions.push(SourceAction::Send(SwitchoverMessage::Abort { reason }));
                self.end(SourceEnd::NotStarted, actions);
            }
            Phase::WritingCommitted => {
                // `Commit` has not been sent, so the decision can be revoked; but only by a record of that.
                self.may_be_committed = true;
                self.abort("the source could not write its decision", actions);
            }
            Phase::WritingAborted if self.may_be_committed => {
                let reason = format!("{}; nor could that be written down", self.reason);
                self.end(SourceEnd::Stuck { reason }, actions);
            }
            // The disk contains `started`, which also means aborted.
            Phase::WritingAborted => self.resume(actions),
            // With `aborted` or `committed` on the disk, a later `recover` asks the destination needlessly.
            _ => self.written(actions),
        }
    }

    fn step(&mut self, event: SourceEvent, actions: &mut Vec<SourceAction>) {
        match event {
            // Unexpected: a driver that repeats a report changes nothing.
            SourceEvent::RecordWritten | SourceEvent::RecordFailed => {}
            SourceEvent::Connected => self.connected = true,
            SourceEvent::ConnectionLost => {
                self.connected = false;
                match self.phase {
                    phase if phase.undecided() => self.abort("the connection to the destination was lost", actions),
                    Phase::Committed | Phase::Telling => actions.push(SourceAction::Connect),
                    _ => {}
                }
            }
            SourceEvent::Message(message) => self.hear(message, actions),
            SourceEvent::FinalStateSent => {
                if self.phase == Phase::Migrating {
                    self.phase = Phase::Preparing;
                    actions.push(SourceAction::Send(SwitchoverMessage::Prepare));
                }
            }
            SourceEvent::Guest(state) => self.qemu(state, actions),
            SourceEvent::Failed { reason } => match self.phase {
                phase if phase.undecided() => self.abort(&reason, actions),
                Phase::Resuming => self.end(SourceEnd::Stuck { reason }, actions),
                // The paused guest here does not run: the destination's confirmation counts.
                Phase::EndingGuest => self.finish(actions),
                _ => {}
            },
        }
    }

    fn hear(&mut self, message: SwitchoverMessage, actions: &mut Vec<SourceAction>) {
        use SwitchoverMessage as M;
        let aborted = matches!(self.phase, Phase::Resuming | Phase::Telling);
        match message {
            M::Prepared if self.phase == Phase::Preparing => {
                self.phase = Phase::Relaying;
                actions.push(SourceAction::RelayShut);
            }
            M::Running if self.phase == Phase::Committed => {
                self.phase = Phase::EndingGuest;
                actions.push(SourceAction::EndGuest);
            }
            M::Running if aborted => self.end(SourceEnd::Conflict, actions),
            M::AskOutcome if self.phase == Phase::Committed => {
                actions.push(SourceAction::Send(M::Outcome(Outcome::Committed)));
            }
            // Prepared after all, because it did not receive the abort. It is notified once the guest runs here.
            M::AskOutcome | M::Prepared if self.phase == Phase::Telling => {
                actions.push(SourceAction::Send(M::Outcome(Outcome::Aborted)));
            }
            M::Abort { reason } | M::Lost { reason } if self.phase.undecided() => {
                self.destination_gone = true;
                self.abort(&format!("the destination gave up: {}", cleaned(&reason)), actions);
            }
            M::Abort { reason } if self.phase == Phase::Committed => {
                self.end(SourceEnd::DestinationLost { never_ran: true, reason: cleaned(&reason) }, actions);
            }
            M::Lost { reason } if self.phase == Phase::Committed => {
                self.end(SourceEnd::DestinationLost { never_ran: false, reason: cleaned(&reason) }, actions);
            }
            M::Abort { .. } | M::Lost { .. } if aborted => {
                self.destination_gone = true;
                if self.phase == Phase::Telling {
                    self.tell(actions);
                }
            }
            _ if self.phase.undecided() => self.abort("the destination said something out of turn", actions),
            // Late or repeated: `Prepared` while the abort is being recorded, `Running` after the end.
            _ => {}
        }
    }

    fn qemu(&mut self, state: SourceGuest, actions: &mut Vec<SourceAction>) {
        match (self.phase, state) {
            (Phase::Relaying, SourceGuest::Completed) => {
                self.phase = Phase::WritingCommitted;
                actions.push(SourceAction::WriteRecord(SourceState::Committed));
            }
            (Phase::Migrating | Phase::Preparing, SourceGuest::Completed) => {
                self.abort("QEMU completed without the destination's word; is its return path off?", actions);
            }
            (phase, SourceGuest::Running) if phase.undecided() => {
                self.abort("QEMU ended the migration itself", actions);
            }
            // No copy can be complete yet: the destination may discard its copy.
            (Phase::Migrating, SourceGuest::Gone) => self.abort("the source's QEMU died", actions),
            // The destination may hold the only complete copy, so it is not told to discard it.
            (Phase::Preparing | Phase::Relaying | Phase::Resuming, SourceGuest::Gone) => self.guest_gone(actions),
            (Phase::EndingGuest, SourceGuest::Gone | SourceGuest::Completed) => self.finish(actions),
            (Phase::Resuming, SourceGuest::Completed) => actions.push(SourceAction::Cont),
            (Phase::Resuming, SourceGuest::Running) => {
                self.phase = Phase::WritingResumed;
                actions.push(SourceAction::AnnounceSelf);
                // Not before: if this guest is lost or stuck, the destination may hold the only complete copy.
                if self.connected && !self.destination_gone {
                    actions.push(SourceAction::Send(SwitchoverMessage::Abort { reason: self.reason.clone() }));
                }
                actions.push(SourceAction::WriteRecord(SourceState::Resumed));
            }
            (Phase::Committed | Phase::EndingGuest, SourceGuest::Running) => self.end(SourceEnd::Conflict, actions),
            _ => {}
        }
    }

    fn finish(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::WritingFinished;
        actions.push(SourceAction::WriteRecord(SourceState::Finished));
    }

    fn guest_gone(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::WritingGone;
        actions.push(SourceAction::WriteRecord(SourceState::Gone));
    }

    fn abort(&mut self, reason: &str, actions: &mut Vec<SourceAction>) {
        reason.clone_into(&mut self.reason);
        self.abort_now(actions);
    }

    fn abort_now(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::WritingAborted;
        actions.push(SourceAction::WriteRecord(SourceState::Aborted));
    }

    fn resume(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::Resuming;
        actions.push(SourceAction::EndMigration);
    }

    fn tell(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::Telling;
        if self.destination_gone {
            self.end(SourceEnd::Aborted { reason: self.reason.clone() }, actions);
        } else if !self.connected {
            actions.push(SourceAction::Connect);
        }
    }

    fn end(&mut self, end: SourceEnd, actions: &mut Vec<SourceAction>) {
        self.phase = if end == SourceEnd::Finished { Phase::Finished } else { Phase::Ended };
        actions.push(SourceAction::Done(end));
    }
}
