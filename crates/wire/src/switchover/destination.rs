//! The destination's half of the switchover: the side that waits for the decision.

mod interface;

pub use self::interface::{DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest};
use super::{DestinationState, Outcome, SwitchoverMessage};
use crate::reason::{ErrorKind, Reason};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    WritingStarted,
    ClearingAutostart,
    Loading,
    /// The source was lost before any of the guest's state arrived: what was placed is kept, and the source waited for.
    Interrupted,
    WritingPrepared,
    Prepared,
    WritingCommitted,
    /// The guest is about to be started. The machine leaves this phase before it returns.
    Committed,
    /// The guest is to be started once there are channels for its missing memory: what starts it may touch that memory.
    AwaitingChannels,
    StartingGuest,
    WritingRunningIncomplete,
    /// The guest runs, and part of its memory is still at the source.
    RunningIncomplete,
    WritingRunning,
    Running,
    WritingAborted,
    Quitting,
    Discarded,
    Lost,
    MemoryLost,
    Conflict,
}

impl Phase {
    fn writing(self) -> bool {
        use Phase::*;
        matches!(
            self,
            WritingStarted
                | WritingPrepared
                | WritingCommitted
                | WritingRunningIncomplete
                | WritingRunning
                | WritingAborted
        )
    }

    fn unprepared(self) -> bool {
        matches!(self, Self::ClearingAutostart | Self::Loading | Self::Interrupted)
    }

    /// Returns whether `Done` was returned, and only the source may still need an answer.
    fn ended(self) -> bool {
        matches!(self, Self::Running | Self::Discarded | Self::Lost | Self::MemoryLost | Self::Conflict)
    }
}

/// The channels of missing memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Channels {
    /// Open, or admitted as soon as the source opens them.
    Open,
    /// The source must reconnect before there can be others.
    Broken,
}

/// What is known of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Memory {
    /// It is all placed before this side is prepared.
    BeforeStart,
    /// Post-copy was requested; the missing pages are not watched yet.
    Unwatched,
    /// Post-copy: part of it is at the source, and arrives over these channels.
    Missing(Channels),
    /// Post-copy: the last missing page was placed.
    Complete,
    /// Post-copy: part of it will never be placed.
    Lost,
}

impl Memory {
    /// Returns whether the guest can be started only without part of its memory, if at all.
    fn incomplete(self) -> bool {
        matches!(self, Self::Unwatched | Self::Missing(_) | Self::Lost)
    }
}

/// The destination's state machine. See the module for the contract with its driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationSwitchover {
    phase: Phase,
    memory: Memory,
    connected: bool,
    resumable: bool,
    /// An operator has asserted that the source is gone for good: do not wait for it.
    fenced_peer: bool,
    prepare_received: bool,
    loaded: bool,
    /// The source knows the result.
    source_left: bool,
    write_leases: u32,
    reason: Reason,
    /// Events that came while a record was being written.
    waiting: Vec<DestinationEvent>,
}

impl DestinationSwitchover {
    /// Begins a switchover, on an open connection, before the monitor is touched.
    pub fn begin() -> (Self, Vec<DestinationAction>) {
        let mut machine = Self::at(Phase::WritingStarted);
        machine.connected = true;
        (machine, vec![DestinationAction::WriteRecord(DestinationState::Started)])
    }

    /// Continues after a crash, from the record and from the guest's present state. Without a record nothing was begun and
    /// there is nothing to recover.
    ///
    /// Where the record says that memory is missing, and the monitor shows that nothing is any more, the driver passes
    /// [`DestinationState::Running`] instead of [`DestinationState::RunningIncomplete`]: the process that died may have
    /// placed the last page before it could write that down.
    ///
    /// `fenced_peer` is an operator's assertion that the source's guest is gone for good and can never run. A prepared
    /// destination then commits by itself. If the source had aborted and resumed its guest before it went, this guest
    /// is older than the content of shared disks.
    pub fn recover(
        record: DestinationState,
        guest: DestinationGuest,
        fenced_peer: bool,
    ) -> (Self, Vec<DestinationAction>) {
        use DestinationGuest as G;
        use DestinationState as S;
        let mut machine = Self::at(Phase::Conflict);
        machine.fenced_peer = fenced_peer;
        machine.reason = Reason::other("the destination was restarted before it was prepared");
        let mut actions = Vec::new();
        if record.lacks_memory() {
            // Only the process that died could place it.
            machine.memory = Memory::Lost;
            let text = "the process that received the guest ended before all of its memory was here";
            machine.reason = Reason::new(ErrorKind::Memory, text);
        }
        match (record, guest) {
            (S::Running, _) => machine.running(&mut actions),
            // Sterna starts a guest only after a commit, so the record is outdated.
            (S::Prepared | S::Committed, G::Running) => machine.write(S::Running, &mut actions),
            (S::PreparedIncomplete | S::CommittedIncomplete, G::Running) => {
                machine.write(S::RunningIncomplete, &mut actions);
            }
            (S::Prepared, G::Paused) if fenced_peer => machine.write(S::Committed, &mut actions),
            (S::Prepared, G::Paused) => machine.phase = Phase::Prepared,
            // It never ran, and never can.
            (S::PreparedIncomplete, G::Paused) => machine.abort_now(&mut actions),
            (S::Prepared | S::PreparedIncomplete, G::Gone) => {
                machine.abort(monitor("is gone"), &mut actions);
            }
            (S::Committed, G::Paused) => machine.start(&mut actions),
            // The guest may have run: it is not ended by itself.
            (S::CommittedIncomplete, G::Paused) | (S::RunningIncomplete, G::Paused | G::Running) => {
                machine.memory_lost(&mut actions);
            }
            (S::Committed | S::CommittedIncomplete | S::RunningIncomplete, G::Gone) => {
                machine.lose(monitor("is gone"), &mut actions);
            }
            (S::Started, G::Incoming | G::Paused | G::Gone) => machine.abort_now(&mut actions),
            (S::Aborted, G::Incoming | G::Paused | G::Gone) => {
                machine.phase = Phase::Quitting;
                actions.push(DestinationAction::Quit);
            }
            (S::Started | S::Aborted, G::Running) | (_, G::Incoming) => {
                machine.done(DestinationEnd::Conflict, &mut actions);
            }
        }
        if !fenced_peer && machine.phase != Phase::Conflict {
            actions.insert(0, DestinationAction::AwaitSource);
        }
        (machine, actions)
    }

    /// Sets whether the loss of the source only interrupts the migration: both sides have agreed on that, and nothing but pages of the rounds
    /// has arrived. Otherwise, and by default, it ends the migration.
    pub fn set_resumable(&mut self, resumable: bool) {
        self.resumable = resumable;
    }

    /// Returns whether the loss of the source has interrupted the migration.
    pub fn is_interrupted(&self) -> bool {
        self.phase == Phase::Interrupted
    }

    /// Returns whether the loss of the source would interrupt the migration.
    pub fn may_be_interrupted(&self) -> bool {
        let only_pages = self.memory == Memory::BeforeStart && !self.prepare_received && !self.loaded;
        self.resumable && self.phase == Phase::Loading && only_pages
    }

    /// Returns whether it may still abort: it has not sent `Prepared`.
    pub fn may_give_up(&self) -> bool {
        self.phase.unprepared() || matches!(self.phase, Phase::WritingStarted | Phase::WritingPrepared)
    }

    /// Returns whether it is prepared and waits for the decision: it may not be cancelled here.
    pub fn unsure(&self) -> bool {
        self.phase == Phase::Prepared
    }

    /// Returns whether post-copy was requested.
    pub fn began_post_copy(&self) -> bool {
        !matches!(self.memory, Memory::BeforeStart)
    }

    /// Returns whether part of the guest's memory is still at the source, and is on its way or waited for.
    pub fn lacks_memory(&self) -> bool {
        matches!(self.memory, Memory::Missing(_)) && !self.phase.ended()
    }

    /// Handles an event; returns the actions, in order.
    pub fn on(&mut self, event: DestinationEvent) -> Vec<DestinationAction> {
        let mut actions = Vec::new();
        if self.phase.writing() {
            match event {
                DestinationEvent::RecordWritten => self.on_written(&mut actions),
                DestinationEvent::RecordFailed => self.on_not_written(&mut actions),
                other => self.waiting.push(other),
            }
        } else {
            self.on_event(event, &mut actions);
        }
        while !self.phase.writing() && !self.waiting.is_empty() {
            let event = self.waiting.remove(0);
            self.on_event(event, &mut actions);
        }
        if self.phase == Phase::Committed {
            // Only now: channels that broke while the record was written are known.
            self.start(&mut actions);
        }
        actions
    }

    fn at(phase: Phase) -> Self {
        Self {
            phase,
            memory: Memory::BeforeStart,
            connected: false,
            resumable: false,
            fenced_peer: false,
            prepare_received: false,
            loaded: false,
            source_left: false,
            write_leases: 0,
            reason: Reason::default(),
            waiting: Vec::new(),
        }
    }

    fn write(&mut self, record: DestinationState, actions: &mut Vec<DestinationAction>) {
        use DestinationState as S;
        self.phase = match record {
            S::Started => Phase::WritingStarted,
            S::Prepared | S::PreparedIncomplete => Phase::WritingPrepared,
            S::Committed | S::CommittedIncomplete => Phase::WritingCommitted,
            S::RunningIncomplete => Phase::WritingRunningIncomplete,
            S::Running => Phase::WritingRunning,
            S::Aborted => Phase::WritingAborted,
        };
        actions.push(DestinationAction::WriteRecord(record));
    }

    fn on_written(&mut self, actions: &mut Vec<DestinationAction>) {
        match self.phase {
            Phase::WritingStarted => {
                self.phase = Phase::ClearingAutostart;
                actions.push(DestinationAction::ClearAutostart);
            }
            Phase::WritingPrepared => {
                self.phase = Phase::Prepared;
                actions.push(DestinationAction::Send(SwitchoverMessage::Prepared));
                if matches!(self.memory, Memory::Missing(_)) {
                    actions.push(DestinationAction::AwaitMemory);
                }
            }
            Phase::WritingCommitted => self.phase = Phase::Committed,
            Phase::WritingRunningIncomplete => self.running_incomplete(actions),
            Phase::WritingRunning => self.running(actions),
            Phase::WritingAborted => {
                self.phase = Phase::Quitting;
                actions.push(DestinationAction::Quit);
            }
            _ => {}
        }
    }

    fn on_not_written(&mut self, actions: &mut Vec<DestinationAction>) {
        match self.phase {
            // The monitor has not been touched, so it is left unchanged.
            Phase::WritingStarted => self.discarded(not_written(), actions),
            // `Prepared` has not been sent, so the source cannot have committed.
            Phase::WritingPrepared => self.abort(not_written(), actions),
            // The decision is the source's record, not this one: a running guest with an older record is recognised.
            _ => self.on_written(actions),
        }
    }

    fn on_event(&mut self, event: DestinationEvent, actions: &mut Vec<DestinationAction>) {
        match event {
            // Unexpected: a driver that repeats a report changes nothing.
            DestinationEvent::RecordWritten | DestinationEvent::RecordFailed => {}
            DestinationEvent::Connected => self.on_connected(actions),
            DestinationEvent::ConnectionLost => self.lose_connection(actions),
            DestinationEvent::ChannelsLost { reason } => self.on_channels_lost(reason, actions),
            DestinationEvent::Message(message) => self.on_message(message, actions),
            DestinationEvent::AutostartCleared => {
                if self.phase == Phase::ClearingAutostart {
                    self.phase = Phase::Loading;
                    actions.push(DestinationAction::AcceptStream);
                }
            }
            DestinationEvent::MissingPagesWatched => {
                if (self.phase, self.memory) == (Phase::Loading, Memory::Unwatched) {
                    self.memory = Memory::Missing(Channels::Open);
                    self.send(SwitchoverMessage::PostCopyReady, actions);
                }
            }
            DestinationEvent::AllPlacedAndLoaded => {
                self.loaded |= self.phase == Phase::Loading;
                self.prepare(actions);
            }
            DestinationEvent::WriteLeases(leases) => {
                self.write_leases = leases;
                self.prepare(actions);
            }
            DestinationEvent::Guest(state) => self.on_guest(state, actions),
            DestinationEvent::MemoryComplete => {
                if matches!(self.memory, Memory::Missing(_)) {
                    self.memory = Memory::Complete;
                    match self.phase {
                        Phase::AwaitingChannels => self.start(actions),
                        Phase::RunningIncomplete => self.write(DestinationState::Running, actions),
                        _ => {}
                    }
                }
            }
            DestinationEvent::MemoryFailed { reason } => self.lose_memory(reason, actions),
            DestinationEvent::SourceFenced => self.on_source_fenced(actions),
            DestinationEvent::Failed { reason } => {
                if self.phase.unprepared() {
                    self.abort(reason, actions);
                }
            }
            DestinationEvent::ActionFailed { reason } => match self.phase {
                phase if phase.unprepared() => self.abort(reason, actions),
                Phase::StartingGuest | Phase::Quitting => {
                    actions.push(DestinationAction::Done(DestinationEnd::Stuck { reason }));
                }
                _ => {}
            },
        }
    }

    fn on_connected(&mut self, actions: &mut Vec<DestinationAction>) {
        if self.connected {
            // The source noticed the loss of the older connection before this side did.
            self.lose_connection(actions);
        }
        self.connected = true;
        self.source_left = false;
        let reason = self.reason.clone();
        match self.phase {
            Phase::Interrupted => {
                self.phase = Phase::Loading;
                actions.push(DestinationAction::RenewChannels);
                self.send(SwitchoverMessage::Continue, actions);
            }
            Phase::Prepared => {
                self.renew_channels(actions);
                self.send(SwitchoverMessage::AskOutcome, actions);
            }
            Phase::Committed | Phase::StartingGuest => self.renew_channels(actions),
            Phase::AwaitingChannels => {
                self.renew_channels(actions);
                self.start(actions);
            }
            Phase::RunningIncomplete => {
                self.renew_channels(actions);
                self.send(SwitchoverMessage::RunningIncomplete, actions);
            }
            Phase::Running => self.send(SwitchoverMessage::Running, actions),
            Phase::Discarded => self.send(SwitchoverMessage::Abort(reason), actions),
            Phase::Lost => self.send(SwitchoverMessage::Lost(reason), actions),
            Phase::MemoryLost => self.send(SwitchoverMessage::MemoryLost(reason), actions),
            // A reply is sent when its current step is done.
            _ => {}
        }
    }

    /// Has the source send what is missing over channels of the new connection.
    fn renew_channels(&mut self, actions: &mut Vec<DestinationAction>) {
        if matches!(self.memory, Memory::Missing(_)) {
            self.memory = Memory::Missing(Channels::Open);
            actions.push(DestinationAction::RenewChannels);
            self.send(SwitchoverMessage::PostCopyReady, actions);
        }
    }

    fn lose_connection(&mut self, actions: &mut Vec<DestinationAction>) {
        self.connected = false;
        if self.may_be_interrupted() {
            self.phase = Phase::Interrupted;
        } else if self.phase.unprepared() && self.phase != Phase::Interrupted {
            self.abort(Reason::new(ErrorKind::ConnectionLost, "the connection to the source was lost"), actions);
            return;
        }
        if matches!(self.memory, Memory::Missing(_)) {
            self.memory = Memory::Missing(Channels::Broken);
        }
        if !self.fenced_peer && self.phase != Phase::Conflict {
            actions.push(DestinationAction::AwaitSource);
        }
    }

    fn on_channels_lost(&mut self, reason: Reason, actions: &mut Vec<DestinationAction>) {
        if self.phase == Phase::Interrupted {
            // Their end was the interruption.
        } else if reason.kind == ErrorKind::ConnectionLost && self.may_be_interrupted() {
            self.hang_up(actions);
        } else if self.phase.unprepared() {
            self.abort(reason, actions);
        } else if matches!(self.memory, Memory::Missing(_)) {
            self.memory = Memory::Missing(Channels::Broken);
            // Not while the decision is awaited: the source, undecided, would abort.
            if matches!(self.phase, Phase::StartingGuest | Phase::RunningIncomplete) {
                self.hang_up(actions);
            }
        }
    }

    /// Closes the connection, if there is one, so that the source comes back with new channels.
    fn hang_up(&mut self, actions: &mut Vec<DestinationAction>) {
        if self.connected {
            actions.push(DestinationAction::HangUp);
        }
        self.lose_connection(actions);
    }

    fn on_message(&mut self, message: SwitchoverMessage, actions: &mut Vec<DestinationAction>) {
        use SwitchoverMessage as M;
        let waits = self.phase == Phase::Prepared;
        match message {
            M::PostCopy if (self.phase, self.memory) == (Phase::Loading, Memory::BeforeStart) => {
                self.memory = Memory::Unwatched;
                actions.push(DestinationAction::WatchMissingPages);
            }
            // A small guest's last byte may be in transit before the first is accepted here.
            M::Prepare if self.phase.unprepared() => {
                self.prepare_received = true;
                self.prepare(actions);
            }
            M::Commit | M::Outcome(Outcome::Committed) if waits => self.commit(actions),
            M::Abort(reason) if waits || self.phase.unprepared() => {
                self.abort(reason.from_peer().within("the source gave up"), actions);
            }
            M::Outcome(Outcome::Aborted) if waits => {
                self.abort(Reason::new(ErrorKind::OtherSide, "the source had given up"), actions);
            }
            _ if self.phase.unprepared() => {
                self.abort(Reason::other("the source sent a message that does not belong here"), actions);
            }
            M::MemoryLost(reason) => self.lose_memory(reason.from_peer(), actions),
            M::Goodbye => {
                self.source_left = true;
                if self.phase.ended() {
                    actions.push(DestinationAction::Leave);
                }
            }
            // Late or repeated: `Outcome` after `Commit`, `Abort` while the guest is being discarded.
            _ => {}
        }
    }

    fn on_guest(&mut self, state: DestinationGuest, actions: &mut Vec<DestinationAction>) {
        use DestinationState as S;
        let undecided = self.phase.unprepared() || self.phase == Phase::Prepared;
        match (self.phase, state) {
            (Phase::StartingGuest, DestinationGuest::Running) => {
                actions.push(DestinationAction::AnnounceSelf);
                self.write(if self.memory.incomplete() { S::RunningIncomplete } else { S::Running }, actions);
            }
            (_, DestinationGuest::Running) if undecided => {
                self.abort(monitor("started the guest before the commit"), actions);
            }
            (_, DestinationGuest::Gone) if undecided => self.abort(monitor("has ended"), actions),
            (Phase::Committed | Phase::AwaitingChannels | Phase::StartingGuest, DestinationGuest::Gone) => {
                self.lose(monitor("ended while it started the guest"), actions);
            }
            (Phase::RunningIncomplete, DestinationGuest::Gone) => {
                self.lose(monitor("ended before all of the guest's memory was there"), actions);
            }
            // From now on a source that connects learns that there is no guest here any more.
            (Phase::MemoryLost, DestinationGuest::Gone) => self.phase = Phase::Lost,
            (Phase::Quitting, DestinationGuest::Gone) => {
                let reason = std::mem::take(&mut self.reason);
                self.discarded(reason, actions);
            }
            _ => {}
        }
    }

    fn on_source_fenced(&mut self, actions: &mut Vec<DestinationAction>) {
        self.fenced_peer = true;
        match self.phase {
            phase if phase.unprepared() => {
                self.abort(Reason::other("the source is gone for good, and not all of the guest is here"), actions);
            }
            Phase::Prepared if !self.memory.incomplete() => self.commit(actions),
            phase if phase.ended() => actions.push(DestinationAction::Leave),
            _ => {
                let text = "the source is gone for good, and part of the guest's memory with it";
                self.lose_memory(Reason::new(ErrorKind::Memory, text), actions);
            }
        }
    }

    fn prepare(&mut self, actions: &mut Vec<DestinationAction>) {
        let complete = self.prepare_received && self.loaded && self.write_leases == 0;
        if self.phase == Phase::Loading && complete && self.memory != Memory::Unwatched {
            let incomplete = self.memory.incomplete();
            self.write(
                if incomplete { DestinationState::PreparedIncomplete } else { DestinationState::Prepared },
                actions,
            );
        }
    }

    fn commit(&mut self, actions: &mut Vec<DestinationAction>) {
        let incomplete = self.memory.incomplete();
        self.write(
            if incomplete { DestinationState::CommittedIncomplete } else { DestinationState::Committed },
            actions,
        );
    }

    /// Starts the guest, once nothing that it may touch on the way is out of reach.
    fn start(&mut self, actions: &mut Vec<DestinationAction>) {
        match self.memory {
            Memory::Lost => self.abort_now(actions),
            Memory::Missing(Channels::Broken) => {
                self.phase = Phase::AwaitingChannels;
                self.hang_up(actions);
            }
            _ => {
                self.phase = Phase::StartingGuest;
                actions.push(DestinationAction::Cont);
            }
        }
    }

    /// The guest runs, and lacked memory when it was started.
    fn running_incomplete(&mut self, actions: &mut Vec<DestinationAction>) {
        match self.memory {
            Memory::Lost => self.memory_lost(actions),
            Memory::Missing(_) => {
                self.phase = Phase::RunningIncomplete;
                self.send(SwitchoverMessage::RunningIncomplete, actions);
            }
            _ => self.write(DestinationState::Running, actions),
        }
    }

    /// The guest runs here with all of its memory.
    fn running(&mut self, actions: &mut Vec<DestinationAction>) {
        self.phase = Phase::Running;
        self.send(SwitchoverMessage::Running, actions);
        self.done(DestinationEnd::Running, actions);
    }

    /// Records that what is missing of the guest's memory will never be there. A guest that never ran here is discarded: the source
    /// has all of it.
    fn lose_memory(&mut self, reason: Reason, actions: &mut Vec<DestinationAction>) {
        if !matches!(self.memory, Memory::Unwatched | Memory::Missing(_)) {
            return;
        }
        self.memory = Memory::Lost;
        match self.phase {
            Phase::Loading | Phase::Prepared | Phase::AwaitingChannels => self.abort(reason, actions),
            Phase::Committed => self.reason = reason,
            // What starts the guest may wait for that memory for good.
            Phase::StartingGuest | Phase::RunningIncomplete => {
                self.reason = reason;
                self.memory_lost(actions);
            }
            // The migration is being taken down.
            _ => {}
        }
    }

    fn memory_lost(&mut self, actions: &mut Vec<DestinationAction>) {
        self.phase = Phase::MemoryLost;
        self.send(SwitchoverMessage::MemoryLost(self.reason.clone()), actions);
        self.done(DestinationEnd::MemoryLost { reason: self.reason.clone() }, actions);
    }

    fn abort(&mut self, reason: Reason, actions: &mut Vec<DestinationAction>) {
        self.reason = reason;
        self.abort_now(actions);
    }

    fn abort_now(&mut self, actions: &mut Vec<DestinationAction>) {
        self.write(DestinationState::Aborted, actions);
    }

    fn discarded(&mut self, reason: Reason, actions: &mut Vec<DestinationAction>) {
        self.reason = reason.clone();
        self.phase = Phase::Discarded;
        self.send(SwitchoverMessage::Abort(reason.clone()), actions);
        self.done(DestinationEnd::Discarded { reason }, actions);
    }

    fn lose(&mut self, reason: Reason, actions: &mut Vec<DestinationAction>) {
        self.reason = reason.clone();
        self.phase = Phase::Lost;
        self.send(SwitchoverMessage::Lost(reason.clone()), actions);
        self.done(DestinationEnd::Lost { reason }, actions);
    }

    fn done(&mut self, end: DestinationEnd, actions: &mut Vec<DestinationAction>) {
        actions.push(DestinationAction::Done(end));
        if self.source_left || self.fenced_peer {
            actions.push(DestinationAction::Leave);
        }
    }

    fn send(&mut self, message: SwitchoverMessage, actions: &mut Vec<DestinationAction>) {
        if self.connected {
            actions.push(DestinationAction::Send(message));
        }
    }
}

fn not_written() -> Reason {
    Reason::new(ErrorKind::Record, "the destination could not write its record")
}

fn monitor(what: &str) -> Reason {
    Reason::new(ErrorKind::Monitor, format_args!("the destination's monitor {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use DestinationAction as A;
    use DestinationEvent as E;
    use DestinationState as S;
    use SwitchoverMessage as M;

    /// A destination that is prepared, and lacks memory.
    fn prepared() -> DestinationSwitchover {
        let (mut destination, _) = DestinationSwitchover::begin();
        let mut actions = Vec::new();
        for event in [
            E::RecordWritten,
            E::AutostartCleared,
            E::Message(M::PostCopy),
            E::MissingPagesWatched,
            E::Message(M::Prepare),
            E::AllPlacedAndLoaded,
        ] {
            actions.extend(destination.on(event));
        }
        assert_eq!(actions.last(), Some(&A::WriteRecord(S::PreparedIncomplete)));
        assert_eq!(destination.on(E::RecordWritten), [A::Send(M::Prepared), A::AwaitMemory]);
        destination
    }

    #[test]
    fn a_guest_whose_channels_broke_is_started_when_there_are_others() {
        let mut destination = prepared();
        assert_eq!(destination.on(E::ChannelsLost { reason: Reason::other("a channel broke") }), []);
        assert_eq!(destination.on(E::Message(M::Commit)), [A::WriteRecord(S::CommittedIncomplete)]);
        assert_eq!(destination.on(E::RecordWritten), [A::HangUp, A::AwaitSource]);
        assert_eq!(destination.on(E::Connected), [A::RenewChannels, A::Send(M::PostCopyReady), A::Cont]);
    }

    #[test]
    fn channels_that_break_while_the_guest_is_started_are_made_anew_and_only_its_own_failure_ends_the_start() {
        let mut destination = prepared();
        destination.on(E::Message(M::Commit));
        assert_eq!(destination.on(E::RecordWritten), [A::Cont]);
        let broken = Reason::new(ErrorKind::ConnectionLost, "a channel broke");
        assert_eq!(destination.on(E::ChannelsLost { reason: broken }), [A::HangUp, A::AwaitSource]);
        assert_eq!(destination.on(E::Connected), [A::RenewChannels, A::Send(M::PostCopyReady)]);
        assert_eq!(destination.on(E::Failed { reason: Reason::new(ErrorKind::Cancelled, "cancelled") }), []);
        let mut failed = destination.clone();
        let reason = Reason::new(ErrorKind::Monitor, "no vCPU");
        let stuck = DestinationEnd::Stuck { reason: reason.clone() };
        assert_eq!(failed.on(E::ActionFailed { reason }), [A::Done(stuck)]);
        // What starts the guest may wait for the lost memory for good.
        let reason = Reason::new(ErrorKind::Memory, "no page can be placed");
        let lost = DestinationEnd::MemoryLost { reason: reason.clone() };
        let told = A::Send(M::MemoryLost(reason.clone()));
        assert_eq!(destination.on(E::MemoryFailed { reason }), [told, A::Done(lost)]);
        assert_eq!(destination.on(E::Guest(DestinationGuest::Running)), []);
    }

    /// A destination to which pages are sent and that may be interrupted.
    fn resumable() -> DestinationSwitchover {
        let (mut destination, _) = DestinationSwitchover::begin();
        destination.set_resumable(true);
        destination.on(E::RecordWritten);
        assert_eq!(destination.on(E::AutostartCleared), [A::AcceptStream]);
        destination
    }

    #[test]
    fn a_lost_source_interrupts_the_migration_and_is_sent_that_it_may_continue() {
        let mut destination = resumable();
        let broken = Reason::new(ErrorKind::ConnectionLost, "a channel broke");
        let continues = [A::RenewChannels, A::Send(M::Continue)];
        assert_eq!(destination.on(E::ConnectionLost), [A::AwaitSource]);
        assert!(destination.is_interrupted() && destination.may_give_up());
        assert_eq!(destination.on(E::ChannelsLost { reason: broken.clone() }), [], "an echo");
        assert_eq!(destination.on(E::Connected), continues);
        // Only the channels broke.
        assert_eq!(destination.on(E::ChannelsLost { reason: broken }), [A::HangUp, A::AwaitSource]);
        assert_eq!(destination.on(E::Connected), continues);
        // The source noticed the loss first.
        assert_eq!(destination.on(E::Connected), [&[A::AwaitSource][..], &continues].concat());
        assert_eq!(destination.on(E::Message(M::Prepare)), []);
        assert_eq!(destination.on(E::ConnectionLost), [A::WriteRecord(S::Aborted)], "not only pages were sent");
    }

    #[test]
    fn an_interrupted_destination_discards_its_copy_when_it_is_cancelled_or_the_source_has_aborted() {
        let mut destination = resumable();
        destination.on(E::ConnectionLost);
        let cancelled = E::Failed { reason: Reason::new(ErrorKind::Cancelled, "cancelled") };
        assert_eq!(destination.clone().on(cancelled), [A::WriteRecord(S::Aborted)]);
        destination.on(E::Connected);
        let aborted = E::Message(M::Abort(Reason::other("no")));
        assert_eq!(destination.on(aborted), [A::WriteRecord(S::Aborted)]);
    }

    #[test]
    fn a_destination_that_may_not_be_interrupted_aborts() {
        for event in [E::Message(M::PostCopy), E::AllPlacedAndLoaded] {
            let mut destination = resumable();
            destination.on(event);
            assert_eq!(destination.on(E::ConnectionLost), [A::WriteRecord(S::Aborted)]);
        }
        let mut destination = resumable();
        let damaged = E::ChannelsLost { reason: Reason::other("a packet is damaged") };
        assert_eq!(destination.clone().on(damaged), [A::WriteRecord(S::Aborted)]);
        destination.set_resumable(false);
        assert_eq!(destination.on(E::ConnectionLost), [A::WriteRecord(S::Aborted)]);
    }

    #[test]
    fn a_guest_that_runs_without_all_of_its_memory_is_not_called_moved() {
        let mut destination = prepared();
        destination.on(E::Message(M::Commit));
        assert_eq!(destination.on(E::RecordWritten), [A::Cont]);
        let runs = destination.on(E::Guest(DestinationGuest::Running));
        assert_eq!(runs, [A::AnnounceSelf, A::WriteRecord(S::RunningIncomplete)]);
        assert_eq!(destination.on(E::RecordWritten), [A::Send(M::RunningIncomplete)]);
        assert_eq!(destination.on(E::MemoryComplete), [A::WriteRecord(S::Running)]);
        let done = destination.on(E::RecordWritten);
        assert_eq!(done, [A::Send(M::Running), A::Done(DestinationEnd::Running)]);
        assert_eq!(destination.on(E::Message(M::Goodbye)), [A::Leave]);
    }

    #[test]
    fn a_guest_that_never_ran_is_discarded_when_its_memory_is_lost_and_started_when_it_is_complete() {
        let mut destination = prepared();
        let mut complete = destination.clone();
        assert_eq!(destination.on(E::SourceFenced), [A::WriteRecord(S::Aborted)]);
        assert_eq!(complete.on(E::MemoryComplete), []);
        assert_eq!(complete.on(E::SourceFenced), [A::WriteRecord(S::Committed)]);
        assert_eq!(complete.on(E::RecordWritten), [A::Cont]);
    }

    #[test]
    fn a_guest_that_may_have_run_is_neither_started_nor_ended_by_recover() {
        for (record, guest) in [
            (S::CommittedIncomplete, DestinationGuest::Paused),
            (S::RunningIncomplete, DestinationGuest::Paused),
            (S::RunningIncomplete, DestinationGuest::Running),
        ] {
            let (mut destination, actions) = DestinationSwitchover::recover(record, guest, false);
            assert!(
                matches!(&actions[..], [A::AwaitSource, A::Done(DestinationEnd::MemoryLost { .. })]),
                "{actions:?}"
            );
            let actions = destination.on(E::Connected);
            assert!(matches!(&actions[..], [A::Send(M::MemoryLost(_))]), "{actions:?}");
        }
    }
}
