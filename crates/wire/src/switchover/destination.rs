//! The destination's half of the switchover: the side that waits for the decision.

use super::{DestinationState, Outcome, SwitchoverMessage};
use crate::text::cleaned;

/// The state of the destination's guest, as its monitor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationGuest {
    /// `inmigrate`: waits for a stream or is loading one.
    Incoming,
    /// Loaded and paused.
    Paused,
    /// The guest runs.
    Running,
    /// The process has ended, or another process answers at its socket. QEMU exits by itself when its stream breaks
    /// off.
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
    /// The source sent a message.
    Message(SwitchoverMessage),
    /// QMP has completed the `stop` that [`DestinationAction::ClearAutostart`] requested.
    AutostartCleared,
    /// Everything in the totals is placed, QEMU has sent SHUT(0) and reports `paused`.
    AllPlacedAndLoaded,
    /// The number of *write leases*: pieces of guest RAM that an unresponsive accelerator may still write. 0 initially;
    /// reported whenever it changes. While there is a lease this side is not prepared: a late write would corrupt the
    /// running guest.
    WriteLeases(u32),
    /// QEMU's state changed, or is the result of [`DestinationAction::Cont`] or [`DestinationAction::Quit`].
    Guest(DestinationGuest),
    /// An operator asserts that the source is gone for good and its guest cannot run. Without the source's process
    /// there is no record to recover from, so a prepared destination commits by itself.
    SourceFenced,
    /// The migration must end: cancelled, a time limit, an error of the data plane; or the current action failed. A
    /// prepared destination may not abort by itself, and ignores this.
    Failed {
        /// The reason, as text for people.
        reason: String,
    },
}

/// An action for the driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationAction {
    /// Write the record durably and report `RecordWritten` or `RecordFailed`.
    WriteRecord(DestinationState),
    /// Ensure that the guest stays paused when it is loaded, and report `AutostartCleared`. With QEMU: QMP
    /// `migrate-incoming`, then `stop` while `inmigrate`; report when QMP has completed it. Until then not one byte of
    /// the stream may reach QEMU: QEMU would start the guest when the stream ends.
    ClearAutostart,
    /// Let the stream through to QEMU and guest RAM.
    AcceptStream,
    /// Send on the control channel; without a connection, drop the message.
    Send(SwitchoverMessage),
    /// QMP `cont`; report `Guest(Running)`, or `Failed`.
    Cont,
    /// QMP `announce-self`.
    AnnounceSelf,
    /// End the QEMU process of this record, if it is still alive; report `Guest(Gone)`, or `Failed`.
    Quit,
    /// Keep (or start) listening for the source.
    AwaitSource,
    /// The migration has ended. The machine still answers a source that connects.
    Done(DestinationEnd),
}

/// The end of the migration at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationEnd {
    /// The guest runs here.
    Running,
    /// Discarded; the guest never ran here.
    Discarded {
        /// Why.
        reason: String,
    },
    /// It was committed here, and QEMU died before the guest was seen running.
    Lost {
        /// What happened.
        reason: String,
    },
    /// An action on QEMU failed; remedy the reason, then run `recover`.
    Stuck {
        /// What failed.
        reason: String,
    },
    /// The record and QEMU contradict each other (a guest runs without a commit, or a QEMU is empty): another program
    /// has interfered. Nothing is changed.
    Conflict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    WritingStarted,
    ClearingAutostart,
    Loading,
    WritingPrepared,
    Prepared,
    WritingCommitted,
    StartingGuest,
    WritingRunning,
    Running,
    WritingAborted,
    Quitting,
    Discarded,
    Lost,
    Conflict,
}

impl Phase {
    fn writing(self) -> bool {
        use Phase::*;
        matches!(self, WritingStarted | WritingPrepared | WritingCommitted | WritingRunning | WritingAborted)
    }

    fn unprepared(self) -> bool {
        matches!(self, Self::ClearingAutostart | Self::Loading)
    }
}

/// The destination's state machine. See the module for the contract with its driver.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationSwitchover {
    phase: Phase,
    connected: bool,
    /// An operator has asserted that the source is gone for good: do not wait for it.
    fenced_peer: bool,
    prepare_heard: bool,
    loaded: bool,
    write_leases: u32,
    reason: String,
    /// Events that came while a record was being written.
    waiting: Vec<DestinationEvent>,
}

impl DestinationSwitchover {
    /// Begins a switchover, on an open connection, before QEMU is touched.
    pub fn begin() -> (Self, Vec<DestinationAction>) {
        let mut machine = Self::at(Phase::WritingStarted);
        machine.connected = true;
        (machine, vec![DestinationAction::WriteRecord(DestinationState::Started)])
    }

    /// Continues after a crash, from the record and from QEMU's present state. Without a record nothing was begun and
    /// there is nothing to recover.
    ///
    /// `fenced_peer` is an operator's assertion that the source's guest is gone for good and can never run. A prepared
    /// destination then commits by itself. If the source had aborted and resumed its guest before it went, this guest
    /// is older than the content of shared disks.
    pub fn recover(
        record: DestinationState,
        qemu: DestinationGuest,
        fenced_peer: bool,
    ) -> (Self, Vec<DestinationAction>) {
        use DestinationGuest as Q;
        use DestinationState as S;
        let mut machine = Self::at(Phase::Conflict);
        machine.fenced_peer = fenced_peer;
        machine.reason = "the destination was restarted before it was prepared".into();
        let mut actions = Vec::new();
        match (record, qemu) {
            (S::Running, _) => machine.write(Phase::Running, None, &mut actions),
            // Sterna starts a guest only after a commit, so the record is outdated.
            (S::Prepared | S::Committed, Q::Running) => {
                machine.write(Phase::WritingRunning, Some(S::Running), &mut actions);
            }
            (S::Prepared, Q::Paused) if fenced_peer => {
                machine.write(Phase::WritingCommitted, Some(S::Committed), &mut actions);
            }
            (S::Prepared, Q::Paused) => machine.phase = Phase::Prepared,
            (S::Prepared, Q::Gone) => machine.abort("the destination's QEMU is gone", &mut actions),
            (S::Committed, Q::Paused) => {
                machine.phase = Phase::StartingGuest;
                actions.push(DestinationAction::Cont);
            }
            (S::Committed, Q::Gone) => machine.lose("the destination's QEMU is gone", &mut actions),
            (S::Started, Q::Incoming | Q::Paused | Q::Gone) => machine.abort_now(&mut actions),
            (S::Aborted, Q::Incoming | Q::Paused | Q::Gone) => {
                machine.phase = Phase::Quitting;
                actions.push(DestinationAction::Quit);
            }
            (S::Started | S::Aborted, Q::Running) | (S::Prepared | S::Committed, Q::Incoming) => {
                actions.push(DestinationAction::Done(DestinationEnd::Conflict));
            }
        }
        if machine.phase == Phase::Running {
            actions.push(DestinationAction::Done(DestinationEnd::Running));
        }
        if !fenced_peer && machine.phase != Phase::Conflict {
            actions.insert(0, DestinationAction::AwaitSource);
        }
        (machine, actions)
    }

    /// Returns whether it may still abort: it has not sent `Prepared`.
    pub fn may_give_up(&self) -> bool {
        self.phase.unprepared() || matches!(self.phase, Phase::WritingStarted | Phase::WritingPrepared)
    }

    /// Returns whether it is prepared and waits for the decision: it may not be cancelled here.
    pub fn unsure(&self) -> bool {
        self.phase == Phase::Prepared
    }

    /// Handles an event; returns the actions, in order.
    pub fn on(&mut self, event: DestinationEvent) -> Vec<DestinationAction> {
        let mut actions = Vec::new();
        if self.phase.writing() {
            match event {
                DestinationEvent::RecordWritten => self.written(&mut actions),
                DestinationEvent::RecordFailed => self.not_written(&mut actions),
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
            fenced_peer: false,
            prepare_heard: false,
            loaded: false,
            write_leases: 0,
            reason: String::new(),
            waiting: Vec::new(),
        }
    }

    fn write(&mut self, phase: Phase, record: Option<DestinationState>, actions: &mut Vec<DestinationAction>) {
        self.phase = phase;
        actions.extend(record.map(DestinationAction::WriteRecord));
    }

    fn written(&mut self, actions: &mut Vec<DestinationAction>) {
        match self.phase {
            Phase::WritingStarted => {
                self.phase = Phase::ClearingAutostart;
                actions.push(DestinationAction::ClearAutostart);
            }
            Phase::WritingPrepared => {
                self.phase = Phase::Prepared;
                actions.push(DestinationAction::Send(SwitchoverMessage::Prepared));
            }
            Phase::WritingCommitted => {
                self.phase = Phase::StartingGuest;
                actions.push(DestinationAction::Cont);
            }
            Phase::WritingRunning => {
                self.phase = Phase::Running;
                self.send(SwitchoverMessage::Running, actions);
                actions.push(DestinationAction::Done(DestinationEnd::Running));
            }
            Phase::WritingAborted => {
                self.phase = Phase::Quitting;
                actions.push(DestinationAction::Quit);
            }
            _ => {}
        }
    }

    fn not_written(&mut self, actions: &mut Vec<DestinationAction>) {
        match self.phase {
            // QEMU has not been touched, so it is left unchanged.
            Phase::WritingStarted => self.discarded("the destination could not write its record", actions),
            // `Prepared` has not been sent, so the source cannot have committed.
            Phase::WritingPrepared => self.abort("the destination could not write its record", actions),
            // The decision is the source's record, not this one: a running guest with an older record is recognised.
            _ => self.written(actions),
        }
    }

    fn step(&mut self, event: DestinationEvent, actions: &mut Vec<DestinationAction>) {
        match event {
            // Unexpected: a driver that repeats a report changes nothing.
            DestinationEvent::RecordWritten | DestinationEvent::RecordFailed => {}
            DestinationEvent::Connected => {
                if self.connected {
                    // The source noticed the loss of the older connection before this side did.
                    self.lose_connection(actions);
                }
                self.connected = true;
                match self.phase {
                    Phase::Prepared => self.send(SwitchoverMessage::AskOutcome, actions),
                    Phase::Running => self.send(SwitchoverMessage::Running, actions),
                    Phase::Discarded => self.send(SwitchoverMessage::Abort { reason: self.reason.clone() }, actions),
                    Phase::Lost => self.send(SwitchoverMessage::Lost { reason: self.reason.clone() }, actions),
                    // A reply is sent when its current step is done.
                    _ => {}
                }
            }
            DestinationEvent::ConnectionLost => self.lose_connection(actions),
            DestinationEvent::Message(message) => self.hear(message, actions),
            DestinationEvent::AutostartCleared => {
                if self.phase == Phase::ClearingAutostart {
                    self.phase = Phase::Loading;
                    actions.push(DestinationAction::AcceptStream);
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
            DestinationEvent::Guest(state) => self.qemu(state, actions),
            DestinationEvent::SourceFenced => match self.phase {
                phase if phase.unprepared() => {
                    self.fenced_peer = true;
                    self.abort("the source is gone for good, and not all of the guest is here", actions);
                }
                Phase::Prepared => {
                    self.fenced_peer = true;
                    self.write(Phase::WritingCommitted, Some(DestinationState::Committed), actions);
                }
                _ => {}
            },
            DestinationEvent::Failed { reason } => match self.phase {
                phase if phase.unprepared() => self.abort(&reason, actions),
                Phase::StartingGuest | Phase::Quitting => {
                    actions.push(DestinationAction::Done(DestinationEnd::Stuck { reason }));
                }
                _ => {}
            },
        }
    }

    fn lose_connection(&mut self, actions: &mut Vec<DestinationAction>) {
        self.connected = false;
        if self.phase.unprepared() {
            self.abort("the connection to the source was lost", actions);
        } else if !self.fenced_peer && self.phase != Phase::Conflict {
            actions.push(DestinationAction::AwaitSource);
        }
    }

    fn hear(&mut self, message: SwitchoverMessage, actions: &mut Vec<DestinationAction>) {
        use SwitchoverMessage as M;
        let waits = self.phase == Phase::Prepared;
        match message {
            // A small guest's last byte may be in transit before the first is accepted here.
            M::Prepare if self.phase.unprepared() => {
                self.prepare_heard = true;
                self.prepare(actions);
            }
            M::Commit | M::Outcome(Outcome::Committed) if waits => {
                self.write(Phase::WritingCommitted, Some(DestinationState::Committed), actions);
            }
            M::Abort { reason } if waits || self.phase.unprepared() => {
                self.abort(&format!("the source gave up: {}", cleaned(&reason)), actions);
            }
            M::Outcome(Outcome::Aborted) if waits => self.abort("the source had given up", actions),
            _ if self.phase.unprepared() => self.abort("the source said something out of turn", actions),
            // Late or repeated: `Outcome` after `Commit`, `Abort` while the guest is being discarded.
            _ => {}
        }
    }

    fn qemu(&mut self, state: DestinationGuest, actions: &mut Vec<DestinationAction>) {
        let undecided = self.phase.unprepared() || self.phase == Phase::Prepared;
        match state {
            DestinationGuest::Running if self.phase == Phase::StartingGuest => {
                actions.push(DestinationAction::AnnounceSelf);
                self.write(Phase::WritingRunning, Some(DestinationState::Running), actions);
            }
            DestinationGuest::Running if undecided => self.abort("QEMU started the guest before the commit", actions),
            DestinationGuest::Gone if undecided => self.abort("the destination's QEMU died", actions),
            DestinationGuest::Gone if self.phase == Phase::StartingGuest => {
                self.lose("the destination's QEMU died while it started the guest", actions);
            }
            DestinationGuest::Gone if self.phase == Phase::Quitting => {
                let reason = std::mem::take(&mut self.reason);
                self.discarded(&reason, actions);
            }
            _ => {}
        }
    }

    fn prepare(&mut self, actions: &mut Vec<DestinationAction>) {
        if self.phase == Phase::Loading && self.prepare_heard && self.loaded && self.write_leases == 0 {
            self.write(Phase::WritingPrepared, Some(DestinationState::Prepared), actions);
        }
    }

    fn abort(&mut self, reason: &str, actions: &mut Vec<DestinationAction>) {
        reason.clone_into(&mut self.reason);
        self.abort_now(actions);
    }

    fn abort_now(&mut self, actions: &mut Vec<DestinationAction>) {
        self.write(Phase::WritingAborted, Some(DestinationState::Aborted), actions);
    }

    fn discarded(&mut self, reason: &str, actions: &mut Vec<DestinationAction>) {
        reason.clone_into(&mut self.reason);
        self.phase = Phase::Discarded;
        self.send(SwitchoverMessage::Abort { reason: reason.to_owned() }, actions);
        actions.push(DestinationAction::Done(DestinationEnd::Discarded { reason: reason.to_owned() }));
    }

    fn lose(&mut self, reason: &str, actions: &mut Vec<DestinationAction>) {
        reason.clone_into(&mut self.reason);
        self.phase = Phase::Lost;
        self.send(SwitchoverMessage::Lost { reason: reason.to_owned() }, actions);
        actions.push(DestinationAction::Done(DestinationEnd::Lost { reason: reason.to_owned() }));
    }

    fn send(&mut self, message: SwitchoverMessage, actions: &mut Vec<DestinationAction>) {
        if self.connected {
            actions.push(DestinationAction::Send(message));
        }
    }
}
