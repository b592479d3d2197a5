//! The destination's driver: what the library does with its monitor and the channels for each action of the switchover's state machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_wire::control::{ControlMessage, DestinationFigures};
use sterna_wire::limits::SILENCE_LIMIT;
use sterna_wire::switchover::{DestinationEnd, DestinationEvent, DestinationGuest};

use super::channels::PostCopyChannels;
use super::devices::Devices;
use super::late_memory::{LateMemory, Missing};
use super::loading::Loading;
use super::post_copy::PostCopyEvent;
use super::target::Target;
use crate::cpu_time::CpuTime;
use crate::device_state::load::LoadEvent;
use crate::migration::{GuestState, MigrationError, Side};
use crate::monitor::DestinationMonitor;
use crate::occupied::Occupied;
use crate::process;
use crate::report::{Outcome, ReceiveReport};
use crate::state::Part;
use crate::switchover::{
    DestinationDriver, DestinationKernel, DestinationOutcome, Ending, Receiving, SourceLink, after, start_guest,
};

/// The events of the driver's own threads.
#[derive(Debug)]
pub(super) enum Event {
    State(Part),
    Device(LoadEvent),
    Fenced,
    PostCopy(PostCopyEvent),
    /// The guest's start, which had to wait, is possible now.
    Start,
}

pub(super) struct Driver<'a> {
    pub(super) kernel: DestinationKernel<'a, Event>,
    pub(super) receiving: Receiving,
    pub(super) vmm: DestinationMonitor<'a>,
    /// CPU time of the migration's threads at this side.
    pub(super) cpu: CpuTime,
    pub(super) channels: PostCopyChannels,
    /// In post-copy: the memory that comes after the guest's start.
    pub(super) late: Option<LateMemory>,
    pub(super) devices: Devices,
    pub(super) loading: Loading,
    pub(super) target: Arc<Target>,
    pub(super) occupied: Occupied,
    /// Page faults of this process before the migration.
    pub(super) faults_before: u64,
    /// How long the source is answered after the end.
    pub(super) linger: Duration,
}

impl<'a> DestinationDriver<'a> for Driver<'a> {
    type Event = Event;

    fn kernel(&mut self) -> &mut DestinationKernel<'a, Event> {
        &mut self.kernel
    }

    fn receiving(&mut self) -> Option<&mut Receiving> {
        Some(&mut self.receiving)
    }

    /// There is no autostart here: only this driver starts the guest.
    fn clear_autostart(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn accept_stream(&mut self) -> Result<(), String> {
        let placement = self.receiving.placement.clone();
        self.kernel.peer.send(&ControlMessage::Ready { placement, deltas: Vec::new() });
        self.start_devices()
    }

    fn start_guest(&mut self) -> Option<Result<DestinationGuest, String>> {
        match self.may_start() {
            Ok(true) => {}
            Ok(false) => return None,
            Err(reason) => return Some(Err(reason)),
        }
        Some(match self.vmm.resume() {
            Ok(()) => Ok(DestinationGuest::Running),
            Err(_) if self.vmm.has_ended() => Ok(DestinationGuest::Gone),
            Err(error) => Err(format!("the monitor does not start the guest: {error}")),
        })
    }

    fn arrived(&mut self) {
        if let Err(error) = self.vmm.arrived() {
            self.kernel.observer.note(&error.to_string());
        }
    }

    fn discard(&mut self) -> Result<(), String> {
        // Dropped, because the channel of the state may be waiting for its readers.
        self.loading = Loading::Over;
        // So that no channel's thread writes the memory of a monitor that is being ended.
        self.receiving.acceptor.join();
        self.vmm.discard().map_err(|error| format!("the copy of the guest stays here: {error}"))
    }

    fn ended(&mut self, end: &DestinationEnd) {
        if *end == DestinationEnd::Running {
            self.await_rest();
        }
    }

    fn hang_up_at(&self, end: &DestinationEnd, link: SourceLink, _since: Instant) -> Instant {
        // A source that was lost while the guest's last memory arrived notices the loss only after a time of silence.
        let may_be_lost = link == SourceLink::Connected && *end == DestinationEnd::Running;
        after(if may_be_lost { self.linger.saturating_add(SILENCE_LIMIT) } else { self.linger })
    }

    fn receive(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        match message {
            ControlMessage::Totals(totals) => self.handle_totals(&totals),
            ControlMessage::PostCopy => {
                let reason = self.begin_post_copy().err()?;
                Some(self.kernel.fail(format!("post-copy is not possible at the destination: {reason}")))
            }
            unexpected => {
                tracing::warn!(?unexpected, "unexpected message from the source");
                None
            }
        }
    }

    fn handle(&mut self, event: Event) -> Option<DestinationEvent> {
        match event {
            Event::Device(news) => self.handle_device(news),
            Event::State(part) => self.handle_state(part),
            Event::PostCopy(news) => {
                self.handle_post_copy(news);
                None
            }
            Event::Start => start_guest(self),
            Event::Fenced => {
                self.kernel.observer.note("an operator has confirmed that the source is gone for good");
                self.kernel.abandon_source();
                let pages = self.target.post_copy().map_or(0, |post_copy| post_copy.missing());
                if pages > 0 {
                    let reason =
                        format!("the source is gone for good, and {pages} pages of the guest's memory with it");
                    self.handle_post_copy(PostCopyEvent::Failed(reason));
                    self.start_now();
                }
                Some(DestinationEvent::SourceFenced)
            }
        }
    }

    fn idle(&mut self) {
        if self.lacks_pages() && self.target.post_copy().is_some_and(|post_copy| post_copy.guest_has_ended()) {
            self.handle_post_copy(PostCopyEvent::Failed("the guest's process has ended".into()));
        }
    }

    fn count_figures(&mut self, figures: &mut DestinationFigures) {
        figures.cpu_seconds = self.cpu.seconds();
        figures.faults = process::faults(std::process::id()).saturating_sub(self.faults_before);
    }

    fn reconnected(&mut self) {
        self.renew_channels();
    }

    fn lacks_memory(&self) -> Option<u64> {
        let post_copy = self.target.post_copy().filter(|_| self.lacks_pages())?;
        Some(post_copy.missing() * PAGE_SIZE as u64)
    }

    fn channels_failed_late(&mut self, reason: &str) {
        self.await_new_channels(reason);
    }
}

impl Driver<'_> {
    pub(super) fn finish(
        mut self,
        outcome: DestinationOutcome,
        source: String,
    ) -> Result<ReceiveReport, MigrationError> {
        let ending = self.ending(outcome);
        if let Some(post_copy) = self.target.post_copy() {
            post_copy.stop();
            if matches!(self.kernel.end(), Some(DestinationEnd::Discarded { .. })) {
                post_copy.release();
            }
        }
        self.kernel.hang_up();
        // Dropped, because a channel may be waiting for its readers.
        self.loading = Loading::Over;
        self.devices.join(self.kernel.observer);
        self.receiving.acceptor.join();
        self.channels.join();
        self.late.take().into_iter().for_each(LateMemory::join);
        let report = self.receiving.report(&ending, source);
        let Ending { outcome, guest, reason } = ending;
        match reason {
            None => Ok(report),
            Some(reason) => Err(MigrationError {
                side: Side::Destination,
                phase: self.kernel.phase,
                guest,
                cancelled: outcome == Outcome::Cancelled,
                refused: false,
                reason,
                report: None,
                received: Some(Box::new(report)),
            }),
        }
    }

    /// Returns what the end of the loop means. In post-copy a guest that belongs to this side may lack memory for good.
    fn ending(&self, outcome: DestinationOutcome) -> Ending {
        let end = self.kernel.end();
        let lost = match self.late.as_ref().map(|late| &late.missing) {
            Some(Missing::ForGood(reason))
                if matches!(end, Some(DestinationEnd::Running | DestinationEnd::Stuck { .. })) =>
            {
                Some(reason)
            }
            // No thread handles the guest's page faults any more.
            Some(Missing::Awaited) if let Some(DestinationEnd::Stuck { reason }) = end => Some(reason),
            _ => None,
        };
        match lost {
            Some(reason) => Ending::failed(Outcome::Lost, GuestState::LacksMemory, reason.as_str()),
            None => self.kernel.ending(outcome),
        }
    }
}
