//! The drivers: they perform actions on the world and tell the machines what happened, as the gateway does.

use super::properties::Mutant;
use super::state::{Channels, DestinationProcess, DestinationSterna, Device, Mode, SourceProcess, SourceSterna, State};
use super::world::World;
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationEvent, DestinationState, DestinationSwitchover, Outcome,
    SourceAction, SourceEnd, SourceEvent, SourceGuest, SourceState, SourceSwitchover, SwitchoverMessage as Message,
};

impl World {
    pub(crate) fn source_performs(&self, state: &mut State, at: usize) {
        let Some(mut sterna) = state.source[at].take() else { return };
        let action = sterna.todo.remove(0);
        self.pass(state, action.step());
        match action {
            SourceAction::WriteRecord(SourceState::Aborted) if self.mutant == Mutant::ResumesWithoutRecord => {
                sterna.written = Some(true);
            }
            SourceAction::WriteRecord(SourceState::Committed) if self.mutant == Mutant::CommitsBeforeDurable => {
                sterna.late = Some(SourceState::Committed);
                sterna.written = Some(true);
            }
            SourceAction::WriteRecord(record) => {
                assert!(sterna.todo.is_empty(), "a record is the last action of its list");
                state.source_disk = Some(record);
                sterna.late = None;
                sterna.written = Some(true);
            }
            SourceAction::StartMigration if self.mode != Mode::Stream => {
                if state.source_qemu == SourceProcess::Idle {
                    state.source_qemu = SourceProcess::Tracked;
                    sterna.seen = Some(SourceGuest::Running);
                    sterna.machine.set_resumable(self.resumes);
                }
            }
            SourceAction::StartMigration => {
                if state.source_qemu == SourceProcess::Idle {
                    state.source_qemu = SourceProcess::Migrating;
                    sterna.seen = Some(SourceGuest::Migrating);
                }
            }
            SourceAction::Send(message) => {
                if self.mutant == Mutant::EndsUnconfirmed && message == Message::Commit {
                    end_source_qemu(state);
                }
                // Before all of the stream was sent the destination has no copy to lose.
                state.aborted_blindly |=
                    matches!(message, Message::Abort(_)) && !sterna.seen_resumed && state.stream_sent;
                if sterna.connected && state.link {
                    state.to_destination.push(message);
                }
            }
            SourceAction::EndGuest => {
                if matches!(state.source_qemu, SourceProcess::Completed | SourceProcess::Stopped) {
                    end_source_qemu(state);
                }
                sterna.seen = None;
            }
            SourceAction::RelayShut if self.mode != Mode::Stream => {
                state.looked = true;
                sterna.seen = None;
                if self.mutant == Mutant::TrustsThatItIsPaused {
                    sterna.seen = Some(SourceGuest::Completed);
                    sterna.todo = sterna.machine.on(SourceEvent::Guest(SourceGuest::Completed));
                }
            }
            SourceAction::RelayShut => {
                if state.source_qemu == SourceProcess::Finishing && !state.return_path_closed {
                    state.source_qemu = SourceProcess::ShutGiven;
                    if self.mutant == Mutant::CommitsBeforeCompleted {
                        sterna.todo = sterna.machine.on(SourceEvent::Guest(SourceGuest::Completed));
                    }
                }
            }
            SourceAction::EndMigration => {
                state.return_path_closed = true;
                sterna.seen = None;
                if self.mutant == Mutant::AbortsBlindly && sterna.connected && state.link {
                    sterna.todo.push(SourceAction::Send(Message::Abort(Reason::default())));
                }
            }
            SourceAction::Cont => {
                // The result is reported.
                sterna.seen = None;
                match state.source_qemu {
                    SourceProcess::Completed | SourceProcess::Stopped => state.source_qemu = SourceProcess::Resumed,
                    SourceProcess::PausedByOthers => {
                        state.paused_guest_resumed = true;
                        state.source_qemu = SourceProcess::Resumed;
                    }
                    _ => {}
                }
            }
            SourceAction::StartPostCopy => {
                state.pages.begun = true;
                state.pages.channels = if sterna.connected && state.link { Channels::Open } else { Channels::Broken };
            }
            SourceAction::ServePages => self.serve_pages(state, &mut sterna),
            SourceAction::Connect => {
                sterna.dials = self.mutant != Mutant::NeverReconnects;
                sterna.dials_in_time = sterna.dials;
                if sterna.connected {
                    sterna.connected = false;
                    state.break_link();
                    state.to_source.clear();
                }
            }
            SourceAction::ContinueRounds => state.interrupted = true,
            SourceAction::AnnounceSelf | SourceAction::HoldRounds => {}
            SourceAction::Done(end) => {
                // The process ends, and its connection with it.
                state.conflict |= end == SourceEnd::Conflict;
                state.source_end = Some(end);
                if sterna.connected {
                    state.break_link();
                    state.to_source.clear();
                }
                return;
            }
        }
        state.source[at] = Some(sterna);
    }

    fn serve_pages(&self, state: &mut State, sterna: &mut SourceSterna) {
        if sterna.recovered {
            sterna.not_served = match self.mutant {
                Mutant::RecoverIgnoresPages => None,
                Mutant::RecoverCallsPagesLost => Some(SourceEvent::Guest(SourceGuest::Gone)),
                _ if state.source_qemu.is_gone() => Some(SourceEvent::Guest(SourceGuest::Gone)),
                _ => Some(SourceEvent::GaveUp { reason: Reason::other("this process has no pages") }),
            };
            return;
        }
        if !sterna.connected || !state.link || state.pages.streaming {
            return;
        }
        if state.pages.channels == Channels::None {
            state.pages.channels = Channels::Open;
            if self.mutant != Mutant::TrustsItsOwnList {
                state.pages.unsent = state.pages.missing;
            }
        }
        state.pages.streaming = state.pages.channels == Channels::Open;
    }

    pub(crate) fn destination_performs(&self, state: &mut State) {
        let Some(mut sterna) = state.destination.take() else { return };
        let action = sterna.todo.remove(0);
        self.pass(state, action.step());
        match action {
            DestinationAction::WriteRecord(DestinationState::Prepared) if self.mutant == Mutant::PreparedNotWritten => {
                sterna.written = Some(true);
            }
            DestinationAction::WriteRecord(record) => {
                assert!(sterna.todo.is_empty(), "a record is the last action of its list");
                state.destination_disk = Some(record);
                sterna.written = Some(true);
            }
            DestinationAction::ClearAutostart => {
                sterna.cleared = true;
                state.feeding |= self.mutant == Mutant::FeedsBeforeStop;
                if let DestinationProcess::Incoming { autostart, .. } = &mut state.destination_qemu {
                    *autostart = matches!(self.mutant, Mutant::LeavesAutostart | Mutant::FeedsBeforeStop);
                }
            }
            DestinationAction::AcceptStream => state.feeding = true,
            DestinationAction::WatchMissingPages => {
                sterna.watching = true;
                state.pages.watched = self.mutant != Mutant::WatchesNothing;
            }
            DestinationAction::AwaitMemory => sterna.awaits_memory = true,
            DestinationAction::HangUp => {
                sterna.connected = false;
                state.break_link();
                state.to_destination.clear();
            }
            DestinationAction::Send(message) => {
                if sterna.connected && state.link {
                    state.to_source.push(message);
                }
            }
            DestinationAction::Cont => match &mut state.destination_qemu {
                DestinationProcess::Incoming { autostart, .. } => *autostart = true,
                DestinationProcess::Paused => {
                    let out_of_reach = sterna.broken_told || !sterna.connected;
                    state.started_blindly |= state.pages.missing > 0 && out_of_reach && state.pages.watched;
                    if state.pages.missing > 0 {
                        state.destination_qemu = DestinationProcess::Starting;
                    } else {
                        state.destination_qemu = DestinationProcess::Running;
                        state.destination_ran = true;
                    }
                }
                DestinationProcess::Starting
                | DestinationProcess::StartWaits
                | DestinationProcess::Running
                | DestinationProcess::Gone => {}
            },
            DestinationAction::Quit => {
                state.destination_qemu = DestinationProcess::Gone;
                sterna.seen = None;
            }
            DestinationAction::AnnounceSelf | DestinationAction::RenewChannels | DestinationAction::AwaitSource => {}
            DestinationAction::Leave => {
                crash_destination(state, &sterna);
                state.destination_left = true;
                return;
            }
            DestinationAction::Done(end) => {
                state.conflict |= end == DestinationEnd::Conflict;
                state.destination_end = Some(end.clone());
                if matches!(end, DestinationEnd::Stuck { .. }) {
                    crash_destination(state, &sterna);
                    return;
                }
                // It stays to answer the source.
                sterna.ended = true;
            }
        }
        state.destination = Some(sterna);
    }

    pub(crate) fn source_recovers(&self, state: &mut State, fenced: bool) {
        if self.mutant == Mutant::NoLock && state.source[1].is_none() {
            state.source[1] = state.source[0].take();
        } else if let Some(old) = state.source[0].take() {
            crash_source(state, &old);
        }
        let qemu = self.source_shown(state);
        let mut record = state.source_disk;
        if self.mutant == Mutant::RecoverPresumesCommit && record == Some(SourceState::Started) {
            record = Some(SourceState::Committed);
        }
        if record == Some(SourceState::Committed) {
            state.decided = true;
        }
        state.source_fenced |= fenced;
        state.source_end = None;
        let (machine, todo) = SourceSwitchover::recover(record, qemu, fenced);
        state.source[0] = Some(SourceSterna {
            machine,
            todo,
            written: None,
            late: None,
            seen: Some(qemu),
            seen_resumed: qemu == SourceGuest::Running,
            final_state_sent: true,
            dials: false,
            dials_in_time: false,
            connected: false,
            failed: false,
            not_served: None,
            recovered: true,
            broken_told: false,
        });
    }

    pub(crate) fn destination_recovers(&self, state: &mut State, fenced: bool) {
        if let Some(old) = state.destination.take() {
            crash_destination(state, &old);
        }
        let qemu = state.destination_qemu.shown();
        let Some(mut record) = state.destination_disk else { return };
        // The monitor shows it: what watched for missing pages is closed.
        if record == DestinationState::RunningIncomplete && !state.pages.watched {
            record = DestinationState::Running;
        }
        if self.mutant == Mutant::RecoverForgetsMissingMemory {
            record = match record {
                DestinationState::PreparedIncomplete => DestinationState::Prepared,
                DestinationState::CommittedIncomplete => DestinationState::Committed,
                DestinationState::RunningIncomplete => DestinationState::Running,
                other => other,
            };
        }
        state.destination_fenced |= fenced;
        state.destination_end = None;
        state.destination_left = false;
        state.destination_restarted = true;
        let (machine, todo) = DestinationSwitchover::recover(record, qemu, fenced);
        state.destination = Some(DestinationSterna {
            machine,
            todo,
            written: None,
            seen: Some(qemu),
            leases_told: 0,
            cleared: false,
            watching: false,
            loaded_told: true,
            awaits_memory: false,
            broken_told: false,
            failed_told: true,
            connected: false,
            failed: false,
            ended: false,
        });
    }

    pub(crate) fn source_event(&self, state: &mut State, at: usize, event: SourceEvent) {
        let Some(sterna) = &mut state.source[at] else { return };
        let lost = event == SourceEvent::ConnectionLost;
        let event = match event {
            SourceEvent::Message(Message::RunningIncomplete) if self.mutant == Mutant::TakesIncompleteForRunning => {
                SourceEvent::Message(Message::Running)
            }
            event => event,
        };
        sterna.todo = sterna.machine.on(event);
        // Known to itself as decided from the moment it has been told that the record is written.
        state.decided |= sterna.machine.decided();
        if self.mutant == Mutant::ResumesAfterDecision && lost && sterna.machine.decided() {
            sterna.todo.push(SourceAction::Cont);
        }
    }

    pub(crate) fn destination_event(&self, state: &mut State, event: DestinationEvent) {
        let Some(sterna) = &mut state.destination else { return };
        let lost = event == DestinationEvent::ConnectionLost;
        sterna.todo = sterna.machine.on(event);
        if lost && self.mutant == Mutant::ReleasesMissingPages {
            state.pages.watched = false;
        }
        if lost && sterna.machine.unsure() {
            let outcome = match self.mutant {
                Mutant::ImpatientDestination => Outcome::Committed,
                Mutant::ForgetfulDestination => Outcome::Aborted,
                _ => return,
            };
            sterna.todo = sterna.machine.on(DestinationEvent::Message(Message::Outcome(outcome)));
        }
    }
}

fn end_source_qemu(state: &mut State) {
    state.source_qemu = SourceProcess::Gone;
    state.ended_early |= !state.destination_ran;
}

pub(crate) fn crash_source(state: &mut State, sterna: &SourceSterna) {
    if sterna.connected {
        state.break_link();
        state.to_source.clear();
    }
    state.pages.lose_channels(Channels::Broken);
    state.return_path_closed = true;
}

pub(crate) fn crash_destination(state: &mut State, sterna: &DestinationSterna) {
    // The kernel lets a process end only when its work queues are drained (idxd: close).
    state.device = Device::Quiet;
    if sterna.connected {
        state.break_link();
        state.to_destination.clear();
    }
    state.pages.lose_channels(Channels::Broken);
}
