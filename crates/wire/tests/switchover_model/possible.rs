//! What can happen next in the world around the two machines.

use super::properties::Mutant;
use super::state::{Channels, DestinationProcess, DestinationSterna, Device, Mode, SourceProcess, SourceSterna, State};
use super::world::{Happens, World};
use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationGuest, SourceAction, SourceEnd, SourceGuest, SourceState,
};

impl World {
    /// Adds all that can happen next.
    pub(crate) fn possible(&self, state: &State, actions: &mut Vec<Happens>) {
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
        if sterna.machine.is_interrupted() && state.left.crashes > 0 {
            actions.push(SourceGivesUp(at));
        }
        if sterna.dials_in_time && state.nobody_answers() {
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
        if sterna.machine.is_interrupted() {
            actions.push(DestinationStopsWaiting);
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
                let sends = |sterna: &SourceSterna| sterna.todo.is_empty() && !sterna.machine.is_interrupted();
                let free = state.source[0].as_ref().is_some_and(sends);
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
