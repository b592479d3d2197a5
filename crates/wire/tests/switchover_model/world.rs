//! The world around the two machines: the steps that it takes, and what they change.

use super::drivers::{crash_destination, crash_source};
use super::properties::{Mutant, properties};
use super::state::{
    Budget, Channels, DestinationProcess, DestinationSterna, Device, Mode, Pages, SourceProcess, SourceSterna, State,
};
use stateright::{Model, Property};
use std::collections::HashSet;
use std::sync::Mutex;
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{
    CrashPoint, DestinationAction, DestinationEvent, DestinationGuest, DestinationSwitchover, Moment, SourceAction,
    SourceEvent, SourceGuest, SourceSwitchover, Step,
};

/// A step of the world.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Happens {
    // The source's driver; the number says which process.
    SourcePerforms(usize),
    SourceWriteFails { at: usize, new_content: bool },
    SourceContFails(usize),
    SourceQemuDoesNotEnd(usize),
    SourceTold(usize),
    SourceSeesQemu(usize),
    SourceSendsFinalState(usize),
    SourceHears(usize),
    SourceNoticesLoss(usize),
    SourceFlushes(usize),
    SourceCancelled(usize),
    SourceCrashes(usize),
    SourceRecovers { fenced: bool },
    SourceRecoversAgain,
    SourceHostLost,
    SourceFindsGuestPaused,
    SourceWantsPostCopy(usize),
    SourceNoticesBrokenChannels(usize),
    SourceGivesUp(usize),
    SourceFindsNobody(usize),
    SourceDies,
    SourceSendsPage,
    // The destination's driver.
    DestinationPerforms,
    DestinationWriteFails { new_content: bool },
    DestinationContFails,
    DestinationTold,
    DestinationSeesQemu,
    DestinationLoaded,
    DestinationCountsLeases,
    DestinationHears,
    DestinationNoticesLoss,
    DestinationCancelled,
    DestinationStopsWaiting,
    DestinationCrashes,
    DestinationRecovers { fenced: bool },
    DestinationRecoversAgain,
    DestinationHostLost,
    DestinationHasAll,
    DestinationCannotPlace,
    DestinationNoticesBrokenChannels,
    DestinationToldOfFence,
    DestinationDies,
    // The network.
    Connects,
    LinkBreaks,
    ChannelsBreak,
    PageArrives,
    // An operator.
    OperatorEndsSource,
    OperatorEndsDestination,
    // The source's QEMU.
    SourceQemuFinishes,
    SourceQemuCompletes,
    SourceQemuResumes,
    SourceQemuFails,
    SourceQemuDies,
    SomebodyPauses,
    SomebodyResumes,
    // The destination's QEMU.
    StreamArrives,
    DestinationQemuLoads,
    DestinationQemuTouches,
    DestinationQemuStarts,
    DestinationQemuExits,
    DestinationQemuDies,
    // An accelerator at the destination.
    DeviceFallsSilent,
    DeviceWritesLate,
    DeviceGivenUp,
}

impl Happens {
    /// Whether this is trouble, of which there is only so much.
    pub(crate) fn trouble(&self) -> bool {
        use Happens::*;
        matches!(
            self,
            SourceWriteFails { .. }
                | SourceContFails(_)
                | SourceQemuDoesNotEnd(_)
                | SourceCancelled(_)
                | SourceCrashes(_)
                | SourceRecoversAgain
                | SourceHostLost
                | DestinationWriteFails { .. }
                | DestinationContFails
                | DestinationCancelled
                | DestinationCrashes
                | DestinationRecoversAgain
                | DestinationHostLost
                | LinkBreaks
                | ChannelsBreak
                | SourceGivesUp(_)
                | SourceDies
                | DestinationDies
                | DestinationCannotPlace
                | SourceQemuFails
                | SourceQemuDies
                | SomebodyPauses
                | SomebodyResumes
                | DestinationQemuDies
                | DeviceFallsSilent
        )
    }
}

/// The model.
pub(crate) struct World {
    pub(crate) mode: Mode,
    pub(crate) budget: Budget,
    pub(crate) mutant: Mutant,
    /// How many pages are newer at the source when the guest is paused in post-copy. They are alike, so that they are only counted.
    pub(crate) pages: u8,
    /// Whether a lost connection only interrupts the migration while the guest runs.
    pub(crate) resumes: bool,
    pub(crate) passed: Mutex<HashSet<CrashPoint>>,
}

impl World {
    pub(crate) fn new(mode: Mode, budget: Budget, mutant: Mutant) -> Self {
        Self { mode, budget, mutant, pages: 1, resumes: false, passed: Mutex::new(HashSet::new()) }
    }

    /// The crash points around actions that were performed while a crash was possible.
    pub(crate) fn passed(&self) -> HashSet<CrashPoint> {
        self.passed.lock().unwrap().clone()
    }

    pub(crate) fn pass(&self, state: &State, step: Option<Step>) {
        if let (Some(step), true) = (step, state.left.crashes > 0 && state.left.total > 0) {
            let mut passed = self.passed.lock().unwrap();
            passed.insert(CrashPoint { moment: Moment::Before, step });
            passed.insert(CrashPoint { moment: Moment::After, step });
        }
    }

    /// What the driver takes the source's QEMU for.
    pub(crate) fn source_shown(&self, state: &State) -> SourceGuest {
        match state.source_qemu {
            SourceProcess::PausedByOthers if self.mutant == Mutant::RecoverTakesAnyPause => SourceGuest::Completed,
            qemu => qemu.shown(),
        }
    }

    /// Whether an operator may say that the destination's guest is gone for good.
    pub(crate) fn may_fence_destination(&self, state: &State) -> bool {
        state.destination_qemu == DestinationProcess::Gone || self.mutant == Mutant::SourceFencesLiving
    }

    pub(crate) fn may_fence_source(&self, state: &State) -> bool {
        state.source_qemu == SourceProcess::Gone || self.mutant == Mutant::DestinationFencesLiving
    }
}

impl Model for World {
    type State = State;
    type Action = Happens;

    fn init_states(&self) -> Vec<State> {
        let (machine, todo) = SourceSwitchover::begin();
        let source = SourceSterna {
            machine,
            todo,
            written: None,
            late: None,
            seen: Some(SourceGuest::Running),
            seen_resumed: false,
            final_state_sent: false,
            dials: false,
            dials_in_time: false,
            connected: true,
            failed: false,
            not_served: None,
            recovered: false,
            broken_told: false,
        };
        let (mut machine, todo) = DestinationSwitchover::begin();
        machine.set_resumable(self.resumes);
        let destination = DestinationSterna {
            machine,
            todo,
            written: None,
            seen: Some(DestinationGuest::Incoming),
            leases_told: 0,
            cleared: false,
            watching: false,
            loaded_told: false,
            awaits_memory: false,
            broken_told: false,
            failed_told: false,
            connected: true,
            failed: false,
            ended: false,
        };
        vec![State {
            source: [Some(source), None],
            destination: Some(destination),
            source_end: None,
            destination_end: None,
            destination_left: false,
            destination_restarted: false,
            source_disk: None,
            destination_disk: None,
            source_qemu: SourceProcess::Idle,
            destination_qemu: DestinationProcess::Incoming { autostart: true, whole: false },
            return_path_closed: false,
            looked: false,
            paused_guest_resumed: false,
            stream_sent: false,
            feeding: false,
            pages: Pages::default(),
            started_blindly: false,
            device: Device::Quiet,
            written_under_guest: false,
            link: true,
            to_source: Vec::new(),
            to_destination: Vec::new(),
            source_host: true,
            destination_host: true,
            interrupted: false,
            decided: false,
            destination_ran: false,
            ended_early: false,
            aborted_blindly: false,
            source_fenced: false,
            destination_fenced: false,
            conflict: false,
            left: self.budget.clone(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Happens>) {
        self.possible(state, actions);
    }

    fn next_state(&self, last: &State, action: Happens) -> Option<State> {
        use Happens::*;
        let mut next = last.clone();
        let state = &mut next;
        state.left.total -= u8::from(action.trouble());
        match action {
            SourcePerforms(at) => self.source_performs(state, at),
            SourceWriteFails { at, new_content } => {
                state.left.failures -= 1;
                let sterna = state.source[at].as_mut()?;
                if let (SourceAction::WriteRecord(record), true) = (sterna.todo.remove(0), new_content) {
                    state.source_disk = Some(record);
                }
                sterna.written = Some(false);
            }
            SourceContFails(at) | SourceQemuDoesNotEnd(at) => {
                state.left.failures -= 1;
                let sterna = state.source[at].as_mut()?;
                sterna.todo.remove(0);
                sterna.failed = true;
            }
            SourceTold(at) => {
                let sterna = state.source[at].as_mut()?;
                let event = match sterna.written.take() {
                    Some(true) => SourceEvent::RecordWritten,
                    Some(false) => SourceEvent::RecordFailed,
                    None if sterna.not_served.is_some() => sterna.not_served.take()?,
                    None => {
                        sterna.failed = false;
                        SourceEvent::ActionFailed { reason: Reason::other("cont or quit failed") }
                    }
                };
                self.source_event(state, at, event);
            }
            SourceSeesQemu(at) => {
                let shown = self.source_shown(state);
                let resumed = shown == SourceGuest::Running && state.source_qemu != SourceProcess::Idle;
                let sterna = state.source[at].as_mut()?;
                sterna.seen = Some(shown);
                sterna.seen_resumed |= resumed;
                self.source_event(state, at, SourceEvent::Guest(shown));
            }
            SourceSendsFinalState(at) => {
                state.source[at].as_mut()?.final_state_sent = true;
                self.source_event(state, at, SourceEvent::FinalStateSent);
            }
            SourceHears(at) => {
                let message = state.to_source.remove(0);
                self.source_event(state, at, SourceEvent::Message(message));
            }
            SourceNoticesLoss(at) => {
                state.to_source.clear();
                state.source[at].as_mut()?.connected = false;
                self.source_event(state, at, SourceEvent::ConnectionLost);
            }
            SourceFlushes(at) => state.source_disk = state.source[at].as_mut()?.late.take(),
            SourceCancelled(at) => {
                state.left.cancels -= 1;
                self.source_event(state, at, SourceEvent::Failed { reason: Reason::other("cancelled") });
            }
            SourceCrashes(at) => {
                state.left.crashes -= 1;
                let old = state.source[at].take()?;
                crash_source(state, &old);
            }
            SourceRecovers { fenced } => self.source_recovers(state, fenced),
            SourceRecoversAgain => {
                state.left.stale_recovers -= 1;
                self.source_recovers(state, false);
            }
            SourceHostLost => {
                state.left.hosts -= 1;
                state.source_host = false;
                state.source_disk = None;
                state.source_qemu = SourceProcess::Gone;
                for at in 0..2 {
                    if let Some(old) = state.source[at].take() {
                        crash_source(state, &old);
                    }
                }
            }
            DestinationPerforms => self.destination_performs(state),
            DestinationWriteFails { new_content } => {
                state.left.failures -= 1;
                let sterna = state.destination.as_mut()?;
                if let (DestinationAction::WriteRecord(record), true) = (sterna.todo.remove(0), new_content) {
                    state.destination_disk = Some(record);
                }
                sterna.written = Some(false);
            }
            DestinationContFails => {
                state.left.failures -= 1;
                let sterna = state.destination.as_mut()?;
                sterna.todo.remove(0);
                sterna.failed = true;
            }
            DestinationTold => {
                let sterna = state.destination.as_mut()?;
                let event = match sterna.written.take() {
                    Some(true) => DestinationEvent::RecordWritten,
                    Some(false) => DestinationEvent::RecordFailed,
                    None if sterna.cleared => {
                        sterna.cleared = false;
                        DestinationEvent::AutostartCleared
                    }
                    None if sterna.watching => {
                        sterna.watching = false;
                        DestinationEvent::MissingPagesWatched
                    }
                    None => {
                        sterna.failed = false;
                        DestinationEvent::ActionFailed { reason: Reason::other("cont failed") }
                    }
                };
                self.destination_event(state, event);
            }
            DestinationSeesQemu => {
                let shown = state.destination_qemu.shown();
                state.destination.as_mut()?.seen = Some(shown);
                self.destination_event(state, DestinationEvent::Guest(shown));
            }
            DestinationLoaded => {
                let sterna = state.destination.as_mut()?;
                sterna.loaded_told = true;
                sterna.seen = Some(DestinationGuest::Paused);
                self.destination_event(state, DestinationEvent::AllPlacedAndLoaded);
            }
            DestinationCountsLeases => {
                let leases = u32::from(state.device != Device::Quiet);
                state.destination.as_mut()?.leases_told = leases;
                self.destination_event(state, DestinationEvent::WriteLeases(leases));
            }
            DeviceFallsSilent => {
                state.left.silent_devices -= 1;
                state.device = Device::MayWrite;
            }
            DeviceWritesLate => {
                state.device = Device::Quiet;
                state.written_under_guest |= state.destination_qemu == DestinationProcess::Running;
            }
            DeviceGivenUp => {
                state.device = Device::GivenUp;
                let reason = Reason::other("an accelerator has not answered");
                self.destination_event(state, DestinationEvent::Failed { reason });
            }
            DestinationHears => {
                let message = state.to_destination.remove(0);
                self.destination_event(state, DestinationEvent::Message(message));
            }
            DestinationNoticesLoss => {
                state.to_destination.clear();
                state.destination.as_mut()?.connected = false;
                self.destination_event(state, DestinationEvent::ConnectionLost);
            }
            DestinationCancelled => {
                state.left.cancels -= 1;
                self.destination_event(state, DestinationEvent::Failed { reason: Reason::other("cancelled") });
            }
            DestinationStopsWaiting => {
                let reason = Reason::other("the source did not come back in time");
                self.destination_event(state, DestinationEvent::Failed { reason });
            }
            DestinationCrashes => {
                state.left.crashes -= 1;
                let old = state.destination.take()?;
                crash_destination(state, &old);
            }
            DestinationRecovers { fenced } => self.destination_recovers(state, fenced),
            DestinationRecoversAgain => {
                state.left.stale_recovers -= 1;
                self.destination_recovers(state, false);
            }
            DestinationHostLost => {
                state.left.hosts -= 1;
                state.destination_host = false;
                state.destination_disk = None;
                state.destination_qemu = DestinationProcess::Gone;
                if let Some(old) = state.destination.take() {
                    crash_destination(state, &old);
                }
            }
            Connects => {
                // Where the destination has not noticed that the old connection broke, the new one tells it.
                state.link = true;
                state.to_source.clear();
                state.to_destination.clear();
                let sterna = state.source[0].as_mut()?;
                (sterna.dials, sterna.dials_in_time) = (false, false);
                sterna.connected = true;
                sterna.broken_told = false;
                let other = state.destination.as_mut()?;
                other.connected = true;
                other.broken_told = false;
                state.pages.lose_channels(Channels::None);
                self.destination_event(state, DestinationEvent::Connected);
                self.source_event(state, 0, SourceEvent::Connected);
            }
            LinkBreaks => {
                state.left.losses -= 1;
                state.break_link();
            }
            ChannelsBreak => {
                state.left.losses -= 1;
                state.pages.lose_channels(Channels::Broken);
            }
            PageArrives => {
                state.pages.travelling -= 1;
                // A page that came twice is dropped.
                state.pages.missing = state.pages.missing.saturating_sub(1);
            }
            SourceWantsPostCopy(at) => {
                state.pages.wanted = true;
                self.source_event(state, at, SourceEvent::PostCopyWanted);
            }
            SourceNoticesBrokenChannels(at) => {
                state.source[at].as_mut()?.broken_told = true;
                self.source_event(state, at, SourceEvent::ChannelsLost { reason: Reason::other("a channel broke") });
            }
            SourceFindsNobody(at) => {
                state.source[at].as_mut()?.dials_in_time = false;
                self.source_event(state, at, SourceEvent::GaveUp { reason: Reason::other("the destination is gone") });
            }
            SourceGivesUp(at) => {
                state.left.crashes -= 1;
                self.source_event(state, at, SourceEvent::GaveUp { reason: Reason::other("out of time") });
            }
            SourceDies => {
                state.left.crashes -= 1;
                state.source_qemu = SourceProcess::Gone;
                let old = state.source[0].take()?;
                crash_source(state, &old);
            }
            SourceSendsPage => {
                state.pages.unsent -= 1;
                state.pages.travelling += 1;
            }
            DestinationHasAll => {
                state.destination.as_mut()?.awaits_memory = false;
                state.pages.watched = false;
                self.destination_event(state, DestinationEvent::MemoryComplete);
            }
            DestinationCannotPlace => {
                state.left.failures -= 1;
                state.destination.as_mut()?.failed_told = true;
                state.pages.unplaceable = true;
                self.destination_event(
                    state,
                    DestinationEvent::MemoryFailed { reason: Reason::other("no page can be placed") },
                );
            }
            DestinationNoticesBrokenChannels => {
                state.destination.as_mut()?.broken_told = true;
                if self.mutant != Mutant::ForgetsBrokenChannels {
                    let reason = Reason::other("a channel broke");
                    self.destination_event(state, DestinationEvent::ChannelsLost { reason });
                }
            }
            DestinationToldOfFence => {
                state.destination_fenced = true;
                self.destination_event(state, DestinationEvent::SourceFenced);
            }
            DestinationDies => {
                state.left.crashes -= 1;
                state.destination_qemu = DestinationProcess::Gone;
                let old = state.destination.take()?;
                crash_destination(state, &old);
            }
            OperatorEndsSource => state.source_qemu = SourceProcess::Gone,
            OperatorEndsDestination => state.destination_qemu = DestinationProcess::Gone,
            SourceFindsGuestPaused => {
                let reason = Reason::other("the guest stopped during the migration");
                self.source_event(state, 0, SourceEvent::Failed { reason });
            }
            SomebodyPauses => {
                state.left.strangers -= 1;
                state.source_qemu = SourceProcess::PausedByOthers;
            }
            SomebodyResumes => {
                state.left.strangers -= 1;
                state.source_qemu = SourceProcess::ResumedByOthers;
            }
            SourceQemuFinishes if self.mode != Mode::Stream => {
                state.source_qemu = SourceProcess::Stopped;
                let sterna = state.source[0].as_mut()?;
                sterna.seen = Some(SourceGuest::Completed);
                sterna.machine.set_resumable(self.mutant == Mutant::ContinuesWithThePausedGuest);
                state.stream_sent = state.link;
                if state.pages.begun {
                    (state.pages.missing, state.pages.unsent) = (self.pages, self.pages);
                }
            }
            SourceQemuFinishes => {
                state.source_qemu = SourceProcess::Finishing;
                state.stream_sent = state.link;
            }
            SourceQemuCompletes => state.source_qemu = SourceProcess::Completed,
            SourceQemuResumes => state.source_qemu = SourceProcess::Resumed,
            SourceQemuFails => {
                state.left.qemu_failures -= 1;
                state.source_qemu = SourceProcess::Resumed;
            }
            SourceQemuDies => {
                state.left.qemu_deaths -= 1;
                state.source_qemu = SourceProcess::Gone;
            }
            StreamArrives => {
                if let DestinationProcess::Incoming { whole, .. } = &mut state.destination_qemu {
                    *whole = true;
                }
                state.destination.as_mut()?.machine.set_resumable(false);
            }
            DestinationQemuLoads => {
                state.destination_qemu = match state.destination_qemu {
                    DestinationProcess::Incoming { autostart: true, .. } => DestinationProcess::Running,
                    _ => DestinationProcess::Paused,
                };
                state.destination_ran |= state.destination_qemu == DestinationProcess::Running;
            }
            DestinationQemuTouches => state.destination_qemu = DestinationProcess::StartWaits,
            DestinationQemuStarts => {
                state.destination_qemu = DestinationProcess::Running;
                state.destination_ran = true;
            }
            DestinationQemuExits => state.destination_qemu = DestinationProcess::Gone,
            DestinationQemuDies => {
                state.left.qemu_deaths -= 1;
                state.destination_qemu = DestinationProcess::Gone;
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties()
    }
}
