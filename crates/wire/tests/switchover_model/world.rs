//! The world around the two machines: what there is, what can happen next, and what it changes.

use super::drivers::{crash_destination, crash_source};
use super::properties::{Mutant, properties};
use stateright::{Model, Property};
use std::collections::HashSet;
use std::sync::Mutex;
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{
    CrashPoint, DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest, DestinationState,
    DestinationSwitchover, Moment, SourceAction, SourceEnd, SourceEvent, SourceGuest, SourceState, SourceSwitchover,
    Step, SwitchoverMessage as Message,
};

/// How much trouble there may still be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    /// All kinds together.
    pub(crate) total: u8,
    /// A sterna process dies.
    pub(crate) crashes: u8,
    /// The connection breaks.
    pub(crate) losses: u8,
    /// A record cannot be written (old or new content stays), or `cont` or `quit` fails.
    pub(crate) failures: u8,
    /// Someone or something asks for the migration to end.
    pub(crate) cancels: u8,
    /// The source QEMU's migration fails by itself.
    pub(crate) qemu_failures: u8,
    /// A QEMU process dies.
    pub(crate) qemu_deaths: u8,
    /// Somebody else pauses the guest at the source, or lets it run.
    pub(crate) strangers: u8,
    /// A host goes, with disk and everything, and never comes back.
    pub(crate) hosts: u8,
    /// `recover` is called where everything is settled.
    pub(crate) stale_recovers: u8,
    /// An accelerator that writes guest RAM at the destination falls silent.
    pub(crate) silent_devices: u8,
}

/// How the guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// By QEMU's own migration: QEMU stops the guest, and lets it run again where SHUT does not come.
    Stream,
    /// From outside: QEMU knows of no migration. The driver stops the guest and lets it run again, and so may others by QMP.
    Direct,
    /// As [`Mode::Direct`], and the guest goes on before all of its memory is there. A monitor may also embed the driver, and die
    /// with it.
    PostCopy,
}

/// The data channels of post-copy, of one incarnation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Channels {
    /// Not opened yet.
    #[default]
    None,
    /// Open at both ends.
    Open,
    Broken,
}

/// The memory that follows the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Pages {
    /// The rounds do not converge: post-copy was asked for.
    pub(crate) wanted: bool,
    /// The post-copy channel was opened at the source.
    pub(crate) begun: bool,
    /// Neither placed nor zero at the destination: only at the source, or on their way.
    pub(crate) missing: u8,
    /// On the source's list.
    pub(crate) unsent: u8,
    /// In a data channel.
    pub(crate) travelling: u8,
    /// A thread at the destination that touches a missing page waits.
    pub(crate) watched: bool,
    /// What arrives cannot be placed any more.
    pub(crate) unplaceable: bool,
    pub(crate) channels: Channels,
    /// The source streams what is on its list.
    pub(crate) streaming: bool,
}

/// What an accelerator does with guest RAM at the destination that it was given to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Device {
    /// Nothing is out.
    Quiet,
    /// It fell silent, and may still write.
    MayWrite,
    /// So for ever, as far as anybody knows: the process has given up waiting for it.
    GivenUp,
}

/// The source's QEMU, finer than QMP shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SourceProcess {
    /// Before the migration.
    Idle,
    Migrating,
    /// Stopped; the whole stream is out; waits for SHUT.
    Finishing,
    /// Has SHUT in its socket.
    ShutGiven,
    Completed,
    /// Runs again.
    Resumed,
    Gone,
    /// In direct mode: runs, its writes are tracked.
    Tracked,
    /// In direct mode: stopped by the driver.
    Stopped,
    /// In direct mode: stopped by somebody else.
    PausedByOthers,
    /// In direct mode: let run by somebody else after the driver had stopped it.
    ResumedByOthers,
}

impl SourceProcess {
    pub(crate) fn shown(self) -> SourceGuest {
        match self {
            Self::Idle | Self::Resumed | Self::Tracked | Self::PausedByOthers | Self::ResumedByOthers => {
                SourceGuest::Running
            }
            Self::Migrating | Self::Finishing | Self::ShutGiven => SourceGuest::Migrating,
            Self::Completed | Self::Stopped => SourceGuest::Completed,
            Self::Gone => SourceGuest::Gone,
        }
    }

    pub(crate) fn is_gone(self) -> bool {
        self == Self::Gone
    }

    pub(crate) fn runs(self) -> bool {
        matches!(self, Self::Idle | Self::Migrating | Self::Resumed | Self::Tracked | Self::ResumedByOthers)
    }
}

/// The destination's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DestinationProcess {
    Incoming {
        autostart: bool,
        whole: bool,
    },
    Paused,
    /// In post-copy: told to let the guest run, which may touch a missing page on the way.
    Starting,
    /// On the way to running it has touched a missing page.
    StartWaits,
    Running,
    Gone,
}

impl DestinationProcess {
    pub(crate) fn shown(self) -> DestinationGuest {
        match self {
            Self::Incoming { .. } => DestinationGuest::Incoming,
            Self::Paused | Self::Starting | Self::StartWaits => DestinationGuest::Paused,
            Self::Running => DestinationGuest::Running,
            Self::Gone => DestinationGuest::Gone,
        }
    }
}

/// A `send` or `recover` process at the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SourceSterna {
    pub(crate) machine: SourceSwitchover,
    /// Actions not performed yet.
    pub(crate) todo: Vec<SourceAction>,
    /// The answer to a write, not given to the machine yet.
    pub(crate) written: Option<bool>,
    /// A record called durable that is not (a mutant's).
    pub(crate) late: Option<SourceState>,
    /// What the machine knows of QEMU.
    pub(crate) seen: Option<SourceGuest>,
    /// Whether it has seen the guest run after QEMU's migration was begun.
    pub(crate) seen_resumed: bool,
    pub(crate) final_state_sent: bool,
    pub(crate) dials: bool,
    pub(crate) connected: bool,
    /// An action failed, the machine has not been told.
    pub(crate) failed: bool,
    /// The answer to [`SourceAction::ServePages`] of a process that cannot, not given to the machine yet.
    pub(crate) not_served: Option<SourceEvent>,
    /// A `recover`, which cannot serve pages.
    pub(crate) recovered: bool,
    /// It knows that the data channels are broken.
    pub(crate) broken_told: bool,
}

/// A `receive` or `recover` process at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DestinationSterna {
    pub(crate) machine: DestinationSwitchover,
    pub(crate) todo: Vec<DestinationAction>,
    pub(crate) written: Option<bool>,
    pub(crate) seen: Option<DestinationGuest>,
    /// What the machine knows of write leases.
    pub(crate) leases_told: u32,
    pub(crate) cleared: bool,
    /// Missing pages are watched, the machine has not been told.
    pub(crate) watching: bool,
    pub(crate) loaded_told: bool,
    /// It reports when no page is missing any more.
    pub(crate) awaits_memory: bool,
    /// The driver knows that the data channels are broken.
    pub(crate) broken_told: bool,
    pub(crate) failed_told: bool,
    pub(crate) connected: bool,
    pub(crate) failed: bool,
    pub(crate) ended: bool,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// The second place is used only where the lock is missing.
    pub(crate) source: [Option<SourceSterna>; 2],
    pub(crate) destination: Option<DestinationSterna>,
    /// How the source's last process ended, if by itself.
    pub(crate) source_end: Option<SourceEnd>,
    /// How the migration ended at the destination, by its last process.
    pub(crate) destination_end: Option<DestinationEnd>,
    /// The destination's last process has ended because nobody needed it any more.
    pub(crate) destination_left: bool,
    /// History: a process at the destination was followed by another.
    pub(crate) destination_restarted: bool,
    pub(crate) source_disk: Option<SourceState>,
    pub(crate) destination_disk: Option<DestinationState>,
    pub(crate) source_qemu: SourceProcess,
    pub(crate) destination_qemu: DestinationProcess,
    /// QEMU's migration sockets at the source are closed, or it was told to cancel.
    pub(crate) return_path_closed: bool,
    /// In direct mode: the driver has looked for the last time whether the guest stands, and decides.
    pub(crate) looked: bool,
    /// History: a guest that somebody else had paused was let run.
    pub(crate) paused_guest_resumed: bool,
    /// The whole stream is on its way.
    pub(crate) stream_sent: bool,
    /// The destination QEMU's stream was opened.
    pub(crate) feeding: bool,
    pub(crate) pages: Pages,
    /// History: the guest was started although the driver knew that nothing could bring what it may touch.
    pub(crate) started_blindly: bool,
    pub(crate) device: Device,
    /// History: it wrote under the running guest.
    pub(crate) written_under_guest: bool,
    /// What is sent arrives, or may arrive.
    pub(crate) link: bool,
    pub(crate) to_source: Vec<Message>,
    pub(crate) to_destination: Vec<Message>,
    pub(crate) source_host: bool,
    pub(crate) destination_host: bool,
    /// History: the source has read or written the decision.
    pub(crate) decided: bool,
    /// History: the guest has run at the destination.
    pub(crate) destination_ran: bool,
    /// History: the source's driver has ended QEMU before that.
    pub(crate) ended_early: bool,
    /// History: the source has told the destination to give up before it knew that the guest runs at the source.
    pub(crate) aborted_blindly: bool,
    pub(crate) source_fenced: bool,
    pub(crate) destination_fenced: bool,
    pub(crate) conflict: bool,
    pub(crate) left: Budget,
}

impl Pages {
    /// Ends the data channels, and what was on its way in them.
    pub(crate) fn lose_channels(&mut self, channels: Channels) {
        self.travelling = 0;
        self.streaming = false;
        if self.begun {
            self.channels = channels;
        }
    }
}

impl State {
    /// Breaks the control connection, and the data channels with it.
    pub(crate) fn break_link(&mut self) {
        self.link = false;
        self.pages.lose_channels(Channels::Broken);
    }

    /// Whether there is no process at the destination that could answer, and never will be.
    fn nobody_answers(&self) -> bool {
        self.destination.is_none() && (!self.destination_host || self.destination_disk.is_none())
    }

    /// Whether a process at the source waits for the destination's answer.
    fn source_asks(&self) -> bool {
        self.source[0].as_ref().is_some_and(|sterna| sterna.dials)
    }
}

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
    pub(crate) passed: Mutex<HashSet<CrashPoint>>,
}

impl World {
    pub(crate) fn new(mode: Mode, budget: Budget, mutant: Mutant) -> Self {
        Self { mode, budget, mutant, pages: 1, passed: Mutex::new(HashSet::new()) }
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

    fn source_actions(&self, state: &State, at: usize, actions: &mut Vec<Happens>) {
        use Happens::*;
        let Some(sterna) = &state.source[at] else { return };
        if state.left.crashes > 0 {
            actions.push(SourceCrashes(at));
        }
        if sterna.late.is_some() {
            actions.push(SourceFlushes(at));
        }
        if let Some(action) = sterna.todo.first() {
            actions.push(SourcePerforms(at));
            if state.left.failures > 0 {
                match action {
                    SourceAction::WriteRecord(_) => {
                        actions.push(SourceWriteFails { at, new_content: false });
                        actions.push(SourceWriteFails { at, new_content: true });
                    }
                    SourceAction::Cont => actions.push(SourceContFails(at)),
                    SourceAction::EndGuest => actions.push(SourceQemuDoesNotEnd(at)),
                    _ => {}
                }
            }
            return;
        }
        if sterna.written.is_some() || sterna.failed || sterna.not_served.is_some() {
            actions.push(SourceTold(at));
        }
        self.source_post_copy_actions(state, sterna, at, actions);
        let shown = self.source_shown(state);
        // Of a QEMU that is driven from outside only what was asked, or that it is gone, is known.
        let looks = self.mode == Mode::Stream || sterna.seen.is_none() || shown == SourceGuest::Gone;
        if looks && sterna.seen != Some(shown) && (shown != SourceGuest::Migrating) {
            actions.push(SourceSeesQemu(at));
        }
        let all_out = matches!(
            state.source_qemu,
            SourceProcess::Finishing | SourceProcess::Stopped | SourceProcess::ResumedByOthers
        );
        if all_out && !sterna.final_state_sent && !state.return_path_closed {
            actions.push(SourceSendsFinalState(at));
        }
        if sterna.connected {
            if !state.to_source.is_empty() {
                actions.push(SourceHears(at));
            }
            if !state.link {
                actions.push(SourceNoticesLoss(at));
            }
        }
        if state.left.cancels > 0 {
            actions.push(SourceCancelled(at));
        }
        if sterna.dials && state.nobody_answers() {
            actions.push(SourceFindsNobody(at));
        }
        let free = state.destination.as_ref().is_some_and(|other| other.todo.is_empty());
        if at == 0 && sterna.dials && !sterna.connected && free && state.source[1].is_none() {
            actions.push(Connects);
        }
    }

    fn source_post_copy_actions(&self, state: &State, sterna: &SourceSterna, at: usize, actions: &mut Vec<Happens>) {
        use Happens::*;
        if self.mode != Mode::PostCopy {
            return;
        }
        let pages = &state.pages;
        // All that was sent so far has been placed.
        let tracked = state.source_qemu == SourceProcess::Tracked && state.feeding;
        if tracked && !pages.wanted && !state.return_path_closed {
            actions.push(SourceWantsPostCopy(at));
        }
        if pages.channels == Channels::Broken && sterna.connected && state.link && !sterna.broken_told {
            actions.push(SourceNoticesBrokenChannels(at));
        }
        if pages.streaming && pages.channels == Channels::Open && pages.unsent > 0 && !state.source_qemu.is_gone() {
            actions.push(SourceSendsPage);
        }
        if sterna.machine.decided() && state.left.crashes > 0 {
            actions.push(SourceGivesUp(at));
        }
    }

    fn destination_post_copy_actions(&self, state: &State, sterna: &DestinationSterna, actions: &mut Vec<Happens>) {
        use Happens::*;
        if self.mode != Mode::PostCopy {
            return;
        }
        let pages = &state.pages;
        if pages.travelling > 0 && !pages.unplaceable {
            actions.push(PageArrives);
        }
        if pages.watched && pages.missing > 0 && !sterna.failed_told && state.left.failures > 0 {
            actions.push(DestinationCannotPlace);
        }
        if pages.channels == Channels::Broken && sterna.connected && state.link && !sterna.broken_told {
            actions.push(DestinationNoticesBrokenChannels);
        }
        let all_here = pages.missing == 0 || (self.mutant == Mutant::TakesSentForPlaced && pages.unsent == 0);
        // Before anything that came after the last page.
        if sterna.awaits_memory && all_here && !pages.unplaceable {
            actions.push(DestinationHasAll);
            return;
        }
        if sterna.machine.lacks_memory() && state.source_qemu.is_gone() && !state.destination_fenced {
            actions.push(DestinationToldOfFence);
        }
    }

    fn destination_actions(&self, state: &State, actions: &mut Vec<Happens>) {
        use Happens::*;
        let Some(sterna) = &state.destination else { return };
        if state.left.crashes > 0 {
            actions.push(DestinationCrashes);
        }
        if let Some(action) = sterna.todo.first() {
            actions.push(DestinationPerforms);
            if state.left.failures > 0 {
                match action {
                    DestinationAction::WriteRecord(_) => {
                        actions.push(DestinationWriteFails { new_content: false });
                        actions.push(DestinationWriteFails { new_content: true });
                    }
                    DestinationAction::Cont | DestinationAction::WatchMissingPages => {
                        actions.push(DestinationContFails);
                    }
                    _ => {}
                }
            }
            return;
        }
        let starting = matches!(state.destination_qemu, DestinationProcess::Starting | DestinationProcess::StartWaits);
        if starting && self.mutant == Mutant::WaitsForTheStart {
            return;
        }
        if sterna.written.is_some() || sterna.cleared || sterna.watching || sterna.failed {
            actions.push(DestinationTold);
        }
        self.destination_post_copy_actions(state, sterna, actions);
        if actions.last() == Some(&DestinationHasAll) {
            return;
        }
        let shown = state.destination_qemu.shown();
        if sterna.seen != Some(shown) && !matches!(shown, DestinationGuest::Paused | DestinationGuest::Incoming) {
            actions.push(DestinationSeesQemu);
        }
        let leases = u32::from(state.device != Device::Quiet);
        if sterna.leases_told != leases && self.mutant != Mutant::ForgetsLeases {
            actions.push(DestinationCountsLeases);
        } else if shown == DestinationGuest::Paused && state.feeding && !sterna.loaded_told {
            actions.push(DestinationLoaded);
        }
        if sterna.connected {
            if !state.to_destination.is_empty() {
                actions.push(DestinationHears);
            }
            if !state.link {
                actions.push(DestinationNoticesLoss);
            }
        }
        // Of the actions only `Cont` lasts while other events are handled, and only in post-copy.
        let late = self.mode == Mode::PostCopy && sterna.machine.lacks_memory();
        if state.left.cancels > 0 && (sterna.machine.may_give_up() || sterna.machine.unsure() || late) {
            actions.push(DestinationCancelled);
        }
        // Work is handed to a device while pages arrive, and all of it is through or has fallen silent when they are placed.
        if state.left.silent_devices > 0
            && state.device == Device::Quiet
            && state.feeding
            && !sterna.loaded_told
            && !sterna.ended
        {
            actions.push(DeviceFallsSilent);
        }
        if state.device == Device::MayWrite {
            actions.push(DeviceGivenUp);
        }
    }

    fn device_actions(state: &State, actions: &mut Vec<Happens>) {
        if state.device != Device::Quiet {
            actions.push(Happens::DeviceWritesLate);
        }
    }

    fn operator_actions(&self, state: &State, actions: &mut Vec<Happens>) {
        use Happens::*;
        if self.mutant == Mutant::NoRecover {
            return;
        }
        if state.source_host && state.source_disk.is_some() {
            let stuck = match state.source_end {
                None | Some(SourceEnd::Stuck { .. }) => true,
                Some(SourceEnd::Undelivered { .. }) => !state.nobody_answers(),
                _ => false,
            };
            let unlocked = self.mutant == Mutant::NoLock && state.source[1].is_none() && !state.decided;
            match &state.source[0] {
                None if stuck => actions.push(SourceRecovers { fenced: false }),
                None if state.left.stale_recovers > 0 => actions.push(SourceRecoversAgain),
                Some(_) if unlocked => actions.push(SourceRecovers { fenced: false }),
                _ => {}
            }
            let waits = state.source[0].as_ref().is_none_or(|sterna| sterna.machine.decided());
            let stopped = !matches!(state.source_qemu, SourceProcess::Gone | SourceProcess::PausedByOthers)
                && !state.source_qemu.runs()
                && state.source_disk != Some(SourceState::Finished);
            if waits && stopped && self.may_fence_destination(state) {
                actions.push(SourceRecovers { fenced: true });
            }
        }
        if state.destination_host && state.destination_disk.is_some() {
            match &state.destination {
                None if !state.destination_left || state.source_asks() => {
                    actions.push(DestinationRecovers { fenced: false });
                }
                None if state.left.stale_recovers > 0 => actions.push(DestinationRecoversAgain),
                Some(sterna) if sterna.ended && state.left.stale_recovers > 0 => actions.push(DestinationRecoversAgain),
                _ => {}
            }
            let waits = state.destination.as_ref().is_none_or(|sterna| sterna.machine.unsure());
            let stopped = state.destination_qemu == DestinationProcess::Paused && !state.destination_left;
            if waits && stopped && self.may_fence_source(state) {
                actions.push(DestinationRecovers { fenced: true });
            }
        }
        if matches!(state.source_end, Some(SourceEnd::Unserved { .. })) && !state.source_qemu.is_gone() {
            actions.push(OperatorEndsSource);
        }
        if matches!(state.destination_end, Some(DestinationEnd::MemoryLost { .. }))
            && state.destination_qemu != DestinationProcess::Gone
        {
            actions.push(OperatorEndsDestination);
        }
    }

    fn qemu_actions(&self, state: &State, actions: &mut Vec<Happens>) {
        use Happens::*;
        let served = state.source[0].is_some() && !state.return_path_closed;
        match state.source_qemu {
            SourceProcess::Migrating | SourceProcess::Finishing => {
                if served && state.source_qemu == SourceProcess::Migrating {
                    actions.push(SourceQemuFinishes);
                }
                if state.return_path_closed {
                    actions.push(SourceQemuResumes);
                } else if state.left.qemu_failures > 0 {
                    actions.push(SourceQemuFails);
                }
            }
            SourceProcess::ShutGiven => {
                actions.push(SourceQemuCompletes);
                // Told to cancel at the same moment, or failing for a reason of its own.
                if state.return_path_closed {
                    actions.push(SourceQemuResumes);
                } else if state.left.qemu_failures > 0 {
                    actions.push(SourceQemuFails);
                }
            }
            SourceProcess::Tracked => {
                let free = state.source[0].as_ref().is_some_and(|sterna| sterna.todo.is_empty());
                if served && free && (state.pages.begun || self.mode != Mode::PostCopy) {
                    actions.push(SourceQemuFinishes);
                }
                if state.left.strangers > 0 {
                    actions.push(SomebodyPauses);
                }
            }
            SourceProcess::PausedByOthers => {
                let free = state.source[0].as_ref().is_some_and(|sterna| sterna.todo.is_empty());
                if served && free {
                    actions.push(SourceFindsGuestPaused);
                }
            }
            // Who lets it run after the decision makes two of it, whatever the driver does.
            SourceProcess::Stopped if state.left.strangers > 0 && !state.looked => actions.push(SomebodyResumes),
            _ => {}
        }
        if state.left.qemu_deaths > 0 && state.source_qemu != SourceProcess::Gone {
            actions.push(SourceQemuDies);
        }
        match state.destination_qemu {
            DestinationProcess::Incoming { whole: true, .. } => actions.push(DestinationQemuLoads),
            DestinationProcess::Starting => {
                actions.push(DestinationQemuStarts);
                if state.pages.missing > 0 {
                    actions.push(DestinationQemuTouches);
                }
            }
            DestinationProcess::StartWaits if state.pages.missing == 0 => actions.push(DestinationQemuStarts),
            DestinationProcess::Incoming { whole: false, .. } if state.feeding => match &state.destination {
                Some(sterna) if state.stream_sent && sterna.connected => actions.push(StreamArrives),
                Some(_) => {}
                None => actions.push(DestinationQemuExits),
            },
            _ => {}
        }
        if state.left.qemu_deaths > 0 && state.destination_qemu != DestinationProcess::Gone {
            actions.push(DestinationQemuDies);
        }
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
            connected: true,
            failed: false,
            not_served: None,
            recovered: false,
            broken_told: false,
        };
        let (machine, todo) = DestinationSwitchover::begin();
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
        self.source_actions(state, 0, actions);
        self.source_actions(state, 1, actions);
        self.destination_actions(state, actions);
        self.operator_actions(state, actions);
        self.qemu_actions(state, actions);
        Self::device_actions(state, actions);
        if state.link && state.left.losses > 0 {
            actions.push(Happens::LinkBreaks);
            if state.pages.channels == Channels::Open {
                actions.push(Happens::ChannelsBreak);
            }
        }
        if self.mode == Mode::PostCopy && state.left.crashes > 0 {
            if state.source[0].is_some() && !state.source_qemu.is_gone() {
                actions.push(Happens::SourceDies);
            }
            if state.destination.is_some() && state.destination_qemu != DestinationProcess::Gone {
                actions.push(Happens::DestinationDies);
            }
        }
        if state.left.hosts > 0 {
            actions.push(Happens::SourceHostLost);
            actions.push(Happens::DestinationHostLost);
        }
        if state.left.total == 0 {
            actions.retain(|action| !action.trouble());
        }
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
                sterna.dials = false;
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
                state.source[0].as_mut()?.seen = Some(SourceGuest::Completed);
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
