//! The source's half of the switchover: the side that decides.

mod interface;

pub use self::interface::{SourceAction, SourceEnd, SourceEvent, SourceGuest};
use super::{Outcome, SourceState, SwitchoverMessage};
use crate::reason::{ErrorKind, Reason};

/// Whether the guest goes on at the destination before all of its memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PostCopy {
    /// All of its memory is sent before the decision.
    No,
    /// The destination was requested to watch for missing pages.
    Requested,
    /// The destination watches for missing pages, which are only here.
    Begun,
    /// After a restart: only the destination knows.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    WritingStarted,
    Migrating,
    /// The destination was lost while the guest runs and only pages were sent: they go on when it is connected again.
    Interrupted,
    Preparing,
    Relaying,
    WritingCommitted,
    Committed,
    /// The guest runs at the destination, and part of its memory is only here.
    Serving,
    /// The source's monitor has ended while part of the guest's memory was only there: the destination is being informed.
    ReportingLoss,
    EndingGuest,
    WritingFinished,
    WritingAborted,
    Resuming,
    WritingResumed,
    WritingGone,
    /// The guest runs here; the destination is being informed.
    ReportingAbort,
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
        matches!(self, Self::Migrating | Self::Interrupted | Self::Preparing | Self::Relaying)
    }

    /// Returns whether the machine waits for a message of the destination, and so reconnects.
    fn needs_destination(self) -> bool {
        matches!(self, Self::Interrupted | Self::Committed | Self::Serving | Self::ReportingLoss | Self::ReportingAbort)
    }
}

/// The source's state machine. See the module for the contract with its driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceSwitchover {
    phase: Phase,
    post_copy: PostCopy,
    connected: bool,
    resumable: bool,
    /// The disk may contain `committed` although nothing was sent: the guest must not resume before the record is
    /// replaced.
    may_be_committed: bool,
    /// The destination's guest is known to be gone, or the operator asserts it: there is no peer to notify.
    destination_gone: bool,
    reason: Reason,
    /// Events that came while a record was being written.
    waiting: Vec<SourceEvent>,
}

impl SourceSwitchover {
    /// Begins a switchover, on an open connection, before the monitor is touched.
    pub fn begin() -> (Self, Vec<SourceAction>) {
        let mut machine = Self::at(Phase::WritingStarted, PostCopy::No);
        machine.connected = true;
        (machine, vec![SourceAction::WriteRecord(SourceState::Started)])
    }

    /// Continues after a crash, from the record (`None` if there is none) and from the guest's present state.
    ///
    /// `fenced_peer` is an operator's assertion that the destination's guest is gone for good and can never run. It is
    /// the only means to run a guest here that was committed to the destination; this guest does not know what the
    /// destination wrote to shared disks meanwhile.
    pub fn recover(record: Option<SourceState>, guest: SourceGuest, fenced_peer: bool) -> (Self, Vec<SourceAction>) {
        let mut machine = Self::at(Phase::Ended, PostCopy::Unknown);
        machine.destination_gone = fenced_peer;
        machine.reason = Reason::other("the source was restarted before anything was decided");
        let mut actions = Vec::new();
        match record {
            // The destination's copy may still be good, so the destination is not told to discard it.
            Some(SourceState::Started | SourceState::Aborted) if guest == SourceGuest::Gone => {
                machine.guest_gone(&mut actions);
            }
            None if guest == SourceGuest::Gone => machine.end(SourceEnd::GuestGone, &mut actions),
            None | Some(SourceState::Started) => machine.abort_now(&mut actions),
            Some(SourceState::Gone) => machine.end(SourceEnd::GuestGone, &mut actions),
            // Neither side has the guest any more.
            Some(SourceState::Committed) if fenced_peer && guest == SourceGuest::Gone => {
                machine.guest_gone(&mut actions);
            }
            Some(SourceState::Committed) if fenced_peer => {
                machine.reason = Reason::other("an operator fenced the destination");
                machine.may_be_committed = true;
                machine.abort_now(&mut actions);
            }
            Some(SourceState::Committed) if guest == SourceGuest::Running => {
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
            Some(SourceState::Resumed) => machine.report_abort(&mut actions),
            Some(SourceState::Finished) => machine.end(SourceEnd::Finished, &mut actions),
        }
        (machine, actions)
    }

    /// Sets whether the loss of the destination only interrupts the migration: both sides have agreed on that, the guest runs, and nothing but
    /// pages of the rounds was sent. Otherwise, and by default, it ends the migration.
    pub fn set_resumable(&mut self, resumable: bool) {
        self.resumable = resumable;
    }

    /// Returns whether the loss of the destination has interrupted the migration.
    pub fn is_interrupted(&self) -> bool {
        self.phase == Phase::Interrupted
    }

    /// Returns whether the guest is committed to the destination: cancelling has no effect any more.
    pub fn decided(&self) -> bool {
        use Phase::*;
        matches!(self.phase, Committed | Serving | ReportingLoss | EndingGuest | WritingFinished | Finished)
    }

    /// Returns whether nothing is decided and nothing has failed yet.
    pub fn undecided(&self) -> bool {
        self.phase.undecided()
    }

    /// Returns whether `event` makes the decision: the source then records that the guest belongs to the destination.
    pub fn decides_at(&self, event: &SourceEvent) -> bool {
        self.phase == Phase::Relaying && *event == SourceEvent::Guest(SourceGuest::Completed)
    }

    /// Returns whether the guest runs at the destination and part of its memory is only here.
    pub fn serves_pages(&self) -> bool {
        self.phase == Phase::Serving
    }

    /// Returns whether part of the guest's memory was still to follow at the decision: then a destination that is lost is
    /// waited for without a limit, since that part exists nowhere else.
    pub fn post_copy_begun(&self) -> bool {
        self.post_copy == PostCopy::Begun
    }

    /// Returns why the migration was aborted; empty before that.
    pub fn reason(&self) -> &Reason {
        &self.reason
    }

    /// Returns whether the process may end now without leaving the guest paused: the machine is done, or only the
    /// `Abort` message is still to be delivered (`recover` can do that later).
    pub fn may_stop(&self) -> bool {
        matches!(self.phase, Phase::ReportingAbort | Phase::Finished | Phase::Ended)
    }

    /// Handles an event; returns the actions, in order.
    pub fn on(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        let mut actions = Vec::new();
        if self.phase.writing() {
            match event {
                SourceEvent::RecordWritten => self.on_written(&mut actions),
                SourceEvent::RecordFailed => self.on_not_written(&mut actions),
                other => self.waiting.push(other),
            }
        } else {
            self.on_event(event, &mut actions);
        }
        while !self.phase.writing() && !self.waiting.is_empty() {
            let event = self.waiting.remove(0);
            self.on_event(event, &mut actions);
        }
        actions
    }

    fn at(phase: Phase, post_copy: PostCopy) -> Self {
        Self {
            phase,
            post_copy,
            connected: false,
            resumable: false,
            may_be_committed: false,
            destination_gone: false,
            reason: Reason::default(),
            waiting: Vec::new(),
        }
    }

    fn on_written(&mut self, actions: &mut Vec<SourceAction>) {
        match self.phase {
            Phase::WritingStarted => {
                self.phase = Phase::Migrating;
                actions.push(SourceAction::StartMigration);
            }
            Phase::WritingCommitted => {
                self.phase = Phase::Committed;
                actions.push(SourceAction::Send(SwitchoverMessage::Commit));
                if self.post_copy == PostCopy::Begun {
                    actions.push(SourceAction::ServePages);
                }
            }
            Phase::WritingFinished => self.end(SourceEnd::Finished, actions),
            Phase::WritingAborted => self.resume(actions),
            Phase::WritingResumed => self.report_abort(actions),
            Phase::WritingGone => self.end(SourceEnd::GuestGone, actions),
            _ => {}
        }
    }

    fn on_not_written(&mut self, actions: &mut Vec<SourceAction>) {
        match self.phase {
            Phase::WritingStarted => {
                let reason = Reason::new(ErrorKind::Record, "the source could not write its record");
                actions.push(SourceAction::Send(SwitchoverMessage::Abort(reason)));
                self.end(SourceEnd::NotStarted, actions);
            }
            Phase::WritingCommitted => {
                // `Commit` has not been sent, so the decision can be revoked; but only by a record of that.
                self.may_be_committed = true;
                self.abort(Reason::new(ErrorKind::Record, "the source could not write its decision"), actions);
            }
            Phase::WritingAborted if self.may_be_committed => {
                let text = format!("{}; nor could that be written down", self.reason);
                let reason = Reason { text, ..self.reason.clone() };
                self.end(SourceEnd::Stuck { reason }, actions);
            }
            // The disk contains `started`, which also means aborted.
            Phase::WritingAborted => self.resume(actions),
            // With `aborted` or `committed` on the disk, a later `recover` asks the destination needlessly.
            _ => self.on_written(actions),
        }
    }

    fn on_event(&mut self, event: SourceEvent, actions: &mut Vec<SourceAction>) {
        match event {
            // Unexpected: a driver that repeats a report changes nothing.
            SourceEvent::RecordWritten | SourceEvent::RecordFailed => {}
            SourceEvent::Connected => self.connected = true,
            SourceEvent::ConnectionLost => {
                self.connected = false;
                if self.may_be_interrupted() {
                    self.interrupt(actions);
                } else if self.phase.undecided() && self.phase != Phase::Interrupted {
                    let text = "the connection to the destination was lost";
                    self.abort(Reason::new(ErrorKind::ConnectionLost, text), actions);
                } else {
                    self.connect_anew(actions);
                }
            }
            SourceEvent::ChannelsLost { reason } => match self.phase {
                // Their end was the interruption.
                Phase::Interrupted => {}
                _ if reason.kind == ErrorKind::ConnectionLost && self.may_be_interrupted() => {
                    self.connected = false;
                    self.interrupt(actions);
                }
                // The control connection is still there, and carries the abort.
                phase if phase.undecided() => self.abort(reason, actions),
                // After the decision only post-copy needs data channels. They are opened anew with a new control connection.
                Phase::Committed | Phase::Serving if self.post_copy == PostCopy::Begun => {
                    self.connected = false;
                    self.connect_anew(actions);
                }
                _ => {}
            },
            SourceEvent::Message(message) => self.on_message(message, actions),
            SourceEvent::PostCopyWanted => {
                if (self.phase, self.post_copy) == (Phase::Migrating, PostCopy::No) {
                    self.post_copy = PostCopy::Requested;
                    actions.push(SourceAction::Send(SwitchoverMessage::PostCopy));
                }
            }
            SourceEvent::FinalStateSent => {
                if self.phase == Phase::Migrating && self.post_copy != PostCopy::Requested {
                    self.phase = Phase::Preparing;
                    actions.push(SourceAction::Send(SwitchoverMessage::Prepare));
                }
            }
            SourceEvent::Guest(state) => self.on_guest(state, actions),
            SourceEvent::GaveUp { reason } => self.give_up(reason, actions),
            SourceEvent::Failed { reason } => {
                if self.phase.undecided() {
                    self.abort(reason, actions);
                }
            }
            SourceEvent::ActionFailed { reason } => match self.phase {
                phase if phase.undecided() => self.abort(reason, actions),
                Phase::Resuming => self.end(SourceEnd::Stuck { reason }, actions),
                // The paused guest here does not run: the destination's confirmation counts.
                Phase::EndingGuest => self.finish(actions),
                _ => {}
            },
        }
    }

    fn on_message(&mut self, message: SwitchoverMessage, actions: &mut Vec<SourceAction>) {
        use Phase::*;
        use SwitchoverMessage as M;
        match (self.phase, message) {
            (Migrating, M::PostCopyReady) if self.post_copy == PostCopy::Requested => {
                self.post_copy = PostCopy::Begun;
                actions.push(SourceAction::StartPostCopy);
            }
            (Interrupted, M::Continue) => {
                self.phase = Migrating;
                actions.push(SourceAction::ContinueRounds);
            }
            (Preparing, M::Prepared) => {
                self.phase = Relaying;
                actions.push(SourceAction::RelayShut);
            }
            (phase, M::Abort(reason) | M::Lost(reason)) if phase.undecided() => {
                self.destination_gone = true;
                self.abort(reason.from_peer().within("the destination gave up"), actions);
            }
            (phase, _) if phase.undecided() => {
                self.abort(Reason::other("the destination sent a message that does not belong here"), actions);
            }

            (Committed | Serving | ReportingLoss, M::Running) => {
                self.phase = EndingGuest;
                actions.push(SourceAction::EndGuest);
            }
            (Committed, M::AskOutcome) => actions.push(SourceAction::Send(M::Outcome(Outcome::Committed))),
            // After a restart only the destination knows whether memory is missing there, so that its message is believed.
            (Committed | Serving, M::PostCopyReady) if self.post_copy != PostCopy::No => {
                self.post_copy = PostCopy::Begun;
                actions.push(SourceAction::ServePages);
            }
            (Committed, M::RunningIncomplete) if self.post_copy != PostCopy::No => {
                self.post_copy = PostCopy::Begun;
                self.phase = Serving;
            }
            (Committed, M::Abort(reason)) => {
                self.end(SourceEnd::DestinationLost { never_ran: true, reason: reason.from_peer() }, actions);
            }
            (Committed | Serving, M::Abort(reason) | M::Lost(reason)) => {
                self.end(SourceEnd::DestinationLost { never_ran: false, reason: reason.from_peer() }, actions);
            }
            // Without post-copy all memory was there before the decision: the message is out of phase, and ignored.
            (Committed | Serving, M::MemoryLost(reason)) if self.post_copy != PostCopy::No => {
                self.end(SourceEnd::MemoryLost { reason: reason.from_peer() }, actions);
            }

            // A destination that lacks memory sends this first, whatever its phase.
            (ReportingLoss, M::PostCopyReady) => self.send_memory_lost(actions),
            (ReportingLoss, M::Abort(_) | M::Lost(_) | M::MemoryLost(_)) => {
                self.send(M::Goodbye, actions);
                self.guest_gone(actions);
            }

            (Resuming | ReportingAbort, M::Running) => self.end(SourceEnd::Conflict, actions),
            (Resuming | ReportingAbort, M::RunningIncomplete | M::MemoryLost(_)) if self.post_copy != PostCopy::No => {
                self.end(SourceEnd::Conflict, actions);
            }
            // Prepared after all, because it did not receive the abort. It is notified once the guest runs here.
            (ReportingAbort, M::AskOutcome | M::Prepared) => {
                actions.push(SourceAction::Send(M::Outcome(Outcome::Aborted)));
            }
            // It had only been interrupted, and has kept what it has.
            (ReportingAbort, M::Continue) => self.send(M::Abort(self.reason.clone()), actions),
            (Resuming | ReportingAbort, M::Abort(_) | M::Lost(_)) => {
                self.destination_gone = true;
                if self.phase == ReportingAbort {
                    self.report_abort(actions);
                }
            }
            // Late or repeated: `Prepared` while the abort is being recorded, `Running` after the end.
            _ => {}
        }
    }

    fn on_guest(&mut self, state: SourceGuest, actions: &mut Vec<SourceAction>) {
        match (self.phase, state) {
            (Phase::Relaying, SourceGuest::Completed) => {
                self.phase = Phase::WritingCommitted;
                actions.push(SourceAction::WriteRecord(SourceState::Committed));
            }
            (Phase::Migrating | Phase::Interrupted | Phase::Preparing, SourceGuest::Completed) => {
                self.abort_for_monitor("the source's monitor completed before the destination was prepared", actions);
            }
            (phase, SourceGuest::Running) if phase.undecided() => {
                self.abort_for_monitor("the source's monitor ended the migration itself", actions);
            }
            // No copy can be complete yet: the destination may discard its copy.
            (Phase::Migrating | Phase::Interrupted, SourceGuest::Gone) => {
                self.abort_for_monitor("the source's monitor has ended", actions);
            }
            // The destination may hold the only complete copy, so it is not told to discard it.
            (Phase::Preparing | Phase::Relaying | Phase::Resuming, SourceGuest::Gone) => self.guest_gone(actions),
            (Phase::Committed | Phase::Serving, SourceGuest::Gone) if self.post_copy == PostCopy::Begun => {
                self.phase = Phase::ReportingLoss;
                self.send_memory_lost(actions);
            }
            (Phase::EndingGuest, SourceGuest::Gone | SourceGuest::Completed) => self.finish(actions),
            (Phase::Resuming, SourceGuest::Completed) => actions.push(SourceAction::Cont),
            (Phase::Resuming, SourceGuest::Running) => {
                self.phase = Phase::WritingResumed;
                actions.push(SourceAction::AnnounceSelf);
                // Not before: if this guest is lost or stuck, the destination may hold the only complete copy.
                if !self.destination_gone {
                    self.send(SwitchoverMessage::Abort(self.reason.clone()), actions);
                }
                actions.push(SourceAction::WriteRecord(SourceState::Resumed));
            }
            (Phase::Committed | Phase::Serving | Phase::EndingGuest, SourceGuest::Running) => {
                self.end(SourceEnd::Conflict, actions);
            }
            _ => {}
        }
    }

    fn may_be_interrupted(&self) -> bool {
        self.resumable && (self.phase, self.post_copy) == (Phase::Migrating, PostCopy::No)
    }

    fn interrupt(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::Interrupted;
        actions.extend([SourceAction::HoldRounds, SourceAction::Connect]);
    }

    fn connect_anew(&mut self, actions: &mut Vec<SourceAction>) {
        if self.phase.needs_destination() {
            actions.push(SourceAction::Connect);
        }
    }

    fn give_up(&mut self, reason: Reason, actions: &mut Vec<SourceAction>) {
        match self.phase {
            Phase::Interrupted => self.abort(reason, actions),
            Phase::Committed if self.post_copy != PostCopy::Begun => {
                self.end(SourceEnd::Undelivered { reason }, actions);
            }
            Phase::Committed | Phase::Serving => self.end(SourceEnd::Unserved { reason }, actions),
            // The record stays `committed`: a `recover` reports the loss to the destination.
            Phase::ReportingLoss => self.end(SourceEnd::GuestGone, actions),
            Phase::ReportingAbort => self.end(SourceEnd::Aborted { reason: self.reason.clone() }, actions),
            _ => {}
        }
    }

    fn send_memory_lost(&self, actions: &mut Vec<SourceAction>) {
        let text = "the source's monitor has ended, and part of the guest's memory with it";
        self.send(SwitchoverMessage::MemoryLost(Reason::new(ErrorKind::Monitor, text)), actions);
    }

    fn finish(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::WritingFinished;
        actions.push(SourceAction::WriteRecord(SourceState::Finished));
    }

    fn guest_gone(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::WritingGone;
        actions.push(SourceAction::WriteRecord(SourceState::Gone));
    }

    fn abort(&mut self, reason: Reason, actions: &mut Vec<SourceAction>) {
        self.reason = reason;
        self.abort_now(actions);
    }

    fn abort_for_monitor(&mut self, text: &str, actions: &mut Vec<SourceAction>) {
        self.abort(Reason::new(ErrorKind::Monitor, text), actions);
    }

    fn abort_now(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::WritingAborted;
        actions.push(SourceAction::WriteRecord(SourceState::Aborted));
    }

    fn resume(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::Resuming;
        actions.push(SourceAction::EndMigration);
    }

    fn report_abort(&mut self, actions: &mut Vec<SourceAction>) {
        self.phase = Phase::ReportingAbort;
        if self.destination_gone {
            self.end(SourceEnd::Aborted { reason: self.reason.clone() }, actions);
        } else if !self.connected {
            actions.push(SourceAction::Connect);
        }
    }

    fn send(&self, message: SwitchoverMessage, actions: &mut Vec<SourceAction>) {
        if self.connected {
            actions.push(SourceAction::Send(message));
        }
    }

    fn end(&mut self, end: SourceEnd, actions: &mut Vec<SourceAction>) {
        use SourceEnd::{Aborted, Conflict, DestinationLost, Finished, MemoryLost, NotStarted};
        self.phase = if end == Finished { Phase::Finished } else { Phase::Ended };
        // Otherwise the destination must go on waiting, or the message was sent already.
        if matches!(end, Finished | Aborted { .. } | NotStarted | DestinationLost { .. } | MemoryLost { .. } | Conflict)
        {
            self.send(SwitchoverMessage::Goodbye, actions);
        }
        actions.push(SourceAction::Done(end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SourceAction as A;
    use SourceEvent as E;
    use SwitchoverMessage as M;

    /// A source that has decided, and whose destination runs the guest without all of its memory.
    fn serving() -> SourceSwitchover {
        let (mut source, _) = SourceSwitchover::begin();
        let mut actions = Vec::new();
        for event in [
            E::RecordWritten,
            E::PostCopyWanted,
            E::Message(M::PostCopyReady),
            E::FinalStateSent,
            E::Message(M::Prepared),
            E::Guest(SourceGuest::Completed),
            E::RecordWritten,
            E::Message(M::RunningIncomplete),
        ] {
            actions.extend(source.on(event));
        }
        assert!(source.serves_pages() && actions.contains(&A::StartPostCopy) && actions.contains(&A::ServePages));
        source
    }

    #[test]
    fn pages_are_served_again_whenever_the_destination_is_back() {
        let mut source = serving();
        for lost in [E::ConnectionLost, E::ChannelsLost { reason: Reason::other("a channel broke") }] {
            assert_eq!(source.on(lost), [A::Connect]);
            assert_eq!(source.on(E::Connected), []);
            assert_eq!(source.on(E::Message(M::PostCopyReady)), [A::ServePages]);
            assert_eq!(source.on(E::Message(M::RunningIncomplete)), []);
        }
        assert_eq!(source.on(E::Message(M::Running)), [A::EndGuest]);
    }

    #[test]
    fn a_source_whose_monitor_ended_with_pages_reports_the_loss_and_awaits_the_answer() {
        let mut source = serving();
        let actions = source.on(E::Guest(SourceGuest::Gone));
        assert!(matches!(&actions[..], [A::Send(M::MemoryLost(_))]), "{actions:?}");
        let mut complete = source.clone();
        let actions = source.on(E::Message(M::MemoryLost(Reason::other("as you say"))));
        assert_eq!(actions, [A::Send(M::Goodbye), A::WriteRecord(SourceState::Gone)]);
        assert_eq!(source.on(E::RecordWritten), [A::Done(SourceEnd::GuestGone)]);
        // The last page had arrived just before.
        assert_eq!(complete.on(E::Message(M::Running)), [A::EndGuest]);
    }

    #[test]
    fn a_cancellation_while_pages_are_served_changes_nothing_and_giving_up_leaves_the_record() {
        let mut source = serving();
        assert_eq!(source.on(E::Failed { reason: Reason::new(ErrorKind::Cancelled, "cancelled") }), []);
        let reason = Reason::new(ErrorKind::TimeLimit, "out of time");
        let end = SourceEnd::Unserved { reason: reason.clone() };
        assert_eq!(source.on(E::GaveUp { reason }), [A::Done(end)]);
    }

    #[test]
    fn messages_of_post_copy_are_ignored_where_all_memory_was_there_before_the_decision() {
        let (mut source, _) = SourceSwitchover::begin();
        for event in [
            E::RecordWritten,
            E::FinalStateSent,
            E::Message(M::Prepared),
            E::Guest(SourceGuest::Completed),
            E::RecordWritten,
        ] {
            source.on(event);
        }
        for message in [M::PostCopyReady, M::RunningIncomplete, M::MemoryLost(Reason::other("it says so"))] {
            assert_eq!(source.on(E::Message(message)), []);
            assert!(source.decided() && !source.post_copy_begun());
        }
        let reason = Reason::new(ErrorKind::ConnectionLost, "not confirmed in time");
        let end = SourceEnd::Undelivered { reason: reason.clone() };
        assert_eq!(source.clone().on(E::GaveUp { reason }), [A::Done(end)]);
        assert_eq!(source.on(E::Message(M::Running)), [A::EndGuest]);
    }

    #[test]
    fn after_an_abort_without_post_copy_memory_that_is_called_lost_is_no_contradiction() {
        let (mut source, _) = SourceSwitchover::begin();
        for event in [
            E::RecordWritten,
            E::Failed { reason: Reason::other("a step failed") },
            E::RecordWritten,
            E::Guest(SourceGuest::Running),
            E::RecordWritten,
        ] {
            source.on(event);
        }
        for message in [M::RunningIncomplete, M::MemoryLost(Reason::other("it says so"))] {
            assert_eq!(source.on(E::Message(message)), []);
        }
        assert_eq!(source.on(E::Message(M::Running)), [A::Send(M::Goodbye), A::Done(SourceEnd::Conflict)]);
    }

    #[test]
    fn channels_that_break_before_the_decision_leave_the_control_connection_to_carry_the_abort() {
        let (mut source, _) = SourceSwitchover::begin();
        source.on(E::RecordWritten);
        let reason = Reason::new(ErrorKind::ConnectionLost, "channel ram-0 broke");
        assert_eq!(source.on(E::ChannelsLost { reason: reason.clone() }), [A::WriteRecord(SourceState::Aborted)]);
        assert_eq!(source.on(E::RecordWritten), [A::EndMigration]);
        let actions = source.on(E::Guest(SourceGuest::Running));
        let record = A::WriteRecord(SourceState::Resumed);
        assert_eq!(actions, [A::AnnounceSelf, A::Send(M::Abort(reason)), record]);
        // Nothing is connected anew: the answer comes on the connection that there is.
        assert_eq!(source.on(E::RecordWritten), []);
    }

    /// A source that sends pages and may be interrupted.
    fn resumable() -> SourceSwitchover {
        let (mut source, _) = SourceSwitchover::begin();
        source.on(E::RecordWritten);
        source.set_resumable(true);
        source
    }

    #[test]
    fn a_lost_destination_interrupts_the_rounds_as_often_as_it_is_lost() {
        let mut source = resumable();
        let broken = Reason::new(ErrorKind::ConnectionLost, "channel ram-0 broke");
        for loss in [E::ConnectionLost, E::ChannelsLost { reason: broken.clone() }] {
            assert_eq!(source.on(loss), [A::HoldRounds, A::Connect]);
            assert!(source.undecided() && source.is_interrupted());
            assert_eq!(source.on(E::ChannelsLost { reason: broken.clone() }), [], "an echo");
            assert_eq!(source.on(E::Connected), []);
            assert_eq!(source.on(E::ConnectionLost), [A::Connect]);
            assert_eq!(source.on(E::Connected), []);
            assert_eq!(source.on(E::Message(M::Continue)), [A::ContinueRounds]);
            assert!(!source.is_interrupted());
        }
        assert_eq!(source.on(E::FinalStateSent), [A::Send(M::Prepare)]);
        assert_eq!(source.on(E::ConnectionLost), [A::WriteRecord(SourceState::Aborted)], "the guest is paused");
    }

    #[test]
    fn what_is_no_lost_connection_ends_the_migration() {
        let mut source = resumable();
        let reason = Reason::other("a packet is damaged");
        assert_eq!(source.clone().on(E::ChannelsLost { reason }), [A::WriteRecord(SourceState::Aborted)]);
        source.set_resumable(false);
        assert_eq!(source.on(E::ConnectionLost), [A::WriteRecord(SourceState::Aborted)]);
    }

    #[test]
    fn an_interrupted_source_that_is_cancelled_or_gives_up_resumes_its_guest_and_reports_that() {
        let reason = Reason::new(ErrorKind::Cancelled, "cancelled");
        for event in [E::Failed { reason: reason.clone() }, E::GaveUp { reason: reason.clone() }] {
            let mut source = resumable();
            source.on(E::ConnectionLost);
            assert_eq!(source.on(event), [A::WriteRecord(SourceState::Aborted)]);
            assert_eq!(source.on(E::RecordWritten), [A::EndMigration]);
            let record = A::WriteRecord(SourceState::Resumed);
            assert_eq!(source.on(E::Guest(SourceGuest::Running)), [A::AnnounceSelf, record]);
            assert_eq!(source.on(E::RecordWritten), [A::Connect]);
            assert_eq!(source.on(E::Connected), []);
            assert_eq!(source.on(E::Message(M::Continue)), [A::Send(M::Abort(reason.clone()))]);
        }
    }

    #[test]
    fn an_interrupted_source_whose_destination_has_given_up_aborts() {
        let mut source = resumable();
        source.on(E::ConnectionLost);
        source.on(E::Connected);
        let actions = source.on(E::Message(M::Abort(Reason::new(ErrorKind::TimeLimit, "waited for too long"))));
        assert_eq!(actions, [A::WriteRecord(SourceState::Aborted)]);
        assert_eq!(source.reason().text, "the destination gave up: waited for too long");
    }

    #[test]
    fn the_reason_of_an_abort_keeps_its_kind_and_that_of_the_destination() {
        let (mut source, _) = SourceSwitchover::begin();
        source.on(E::RecordWritten);
        source.on(E::Message(M::Abort(Reason::new(ErrorKind::TimeLimit, "loading took too long"))));
        let reason = source.reason();
        assert_eq!((reason.kind, reason.other_side), (ErrorKind::OtherSide, Some(ErrorKind::TimeLimit)));
        assert_eq!(reason.text, "the destination gave up: loading took too long");
    }
}
