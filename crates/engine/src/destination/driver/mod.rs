//! The destination's driver: what the library does with its monitor and the channels for each action of the switchover's state machine.

mod devices;
mod late_memory;
mod loading;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_wire::control::{ControlMessage, DestinationFigures, PostCopyFigures};
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{DestinationEnd, DestinationEvent, DestinationGuest};

pub(super) use self::devices::Devices;
pub(super) use self::loading::{Loading, StateSinks};
use super::channels::PostCopyChannels;
use super::monitor_calls::MonitorCalls;
use super::post_copy::PostCopyEvent;
use super::target::Target;
use crate::cpu_time::CpuTime;
use crate::device_state::load::LoadEvent;
use crate::migration::{MigrationError, Side};
use crate::monitor::DestinationMonitor;
use crate::occupied::Occupied;
use crate::process;
use crate::report::ReceiveReport;
use crate::state::Part;
use crate::switchover::{DestinationDriver, DestinationKernel, DestinationOutcome, Ending, LastAnswer, Receiving};

/// The events of the driver's own threads.
#[derive(Debug)]
pub(super) enum Event {
    State(Part),
    Device(LoadEvent),
    Fenced,
    PostCopy(PostCopyEvent),
    /// The monitor's answer to starting the guest.
    Started(Result<DestinationGuest, Reason>),
}

pub(super) struct Driver<'a> {
    pub(super) kernel: DestinationKernel<'a, Event>,
    pub(super) receiving: Receiving,
    pub(super) vmm: MonitorCalls,
    /// CPU time of the migration's threads at this side.
    pub(super) cpu: CpuTime,
    pub(super) channels: PostCopyChannels,
    /// In post-copy: the thread that handles page faults.
    pub(super) faults: Option<JoinHandle<()>>,
    pub(super) devices: Devices,
    pub(super) loading: Loading,
    pub(super) state_sinks: StateSinks,
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
    fn clear_autostart(&mut self) -> Result<(), Reason> {
        Ok(())
    }

    fn accept_stream(&mut self) -> Result<(), Reason> {
        let placement = self.receiving.placement.clone();
        self.kernel.peer.send(&ControlMessage::Ready { placement, deltas: Vec::new() });
        self.start_devices()
    }

    fn watch_missing_pages(&mut self) -> Result<(), Reason> {
        self.begin_post_copy()
    }

    fn renew_channels(&mut self) {
        self.admit_new_channels();
    }

    fn await_memory(&mut self) {
        self.target.post_copy().iter().for_each(|post_copy| post_copy.arm());
    }

    fn start_guest(&mut self) -> Result<Option<DestinationGuest>, Reason> {
        let events = self.kernel.events.clone();
        let start = |vmm: &mut DestinationMonitor<'_>| match vmm.resume() {
            Ok(()) => Ok(DestinationGuest::Running),
            Err(_) if vmm.has_ended() => Ok(DestinationGuest::Gone),
            Err(error) => Err(Reason::new(ErrorKind::Monitor, error).within("the monitor does not start the guest")),
        };
        self.vmm.begin(start, move |started| {
            events.send(Event::Started(started));
        });
        Ok(None)
    }

    fn guest_started(&mut self) {
        if let Err(error) = self.vmm.call(|vmm| vmm.guest_started()) {
            self.kernel.observer.note(&error.to_string());
        }
    }

    fn why_not_running(&mut self) -> Option<String> {
        // The guest was resumed, so no call of the monitor is under way.
        self.vmm.call(|vmm| vmm.why_not_running())
    }

    fn discard(&mut self) -> Result<(), Reason> {
        // Dropped, because the channel of the state may be waiting for its readers.
        self.loading = Loading::Over;
        // So that no channel's thread writes the memory of a monitor that is being ended.
        self.receiving.acceptor.join();
        self.channels.join();
        let discarded = self.vmm.call(|vmm| vmm.discard());
        discarded.map_err(|error| Reason::new(ErrorKind::Monitor, error).within("the copy of the guest stays here"))
    }

    fn ended(&mut self, _end: &DestinationEnd) {}

    fn hang_up_at(&self, answer: &LastAnswer) -> Instant {
        answer.until(self.linger)
    }

    /// The wait is short, and a source that is lost in post-copy waits for its answer without a limit.
    fn cancel_ends_lingering(&self) -> bool {
        false
    }

    fn receive(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        match message {
            ControlMessage::Totals(totals) if !self.target.is_sealed() => self.handle_totals(&totals),
            unexpected => self.kernel.out_of_phase(&unexpected),
        }
    }

    fn handle(&mut self, event: Event) -> Option<DestinationEvent> {
        match event {
            Event::Device(news) => self.handle_device(news),
            Event::State(part) => self.handle_state(part),
            Event::PostCopy(news) => self.handle_post_copy(news),
            Event::Started(Ok(state)) => Some(DestinationEvent::Guest(state)),
            Event::Started(Err(reason)) => Some(DestinationEvent::ActionFailed { reason }),
            Event::Fenced => {
                self.kernel.observer.note("an operator has confirmed that the source is gone for good");
                self.kernel.source_is_gone();
                Some(DestinationEvent::SourceFenced)
            }
        }
    }

    fn idle(&mut self) -> Option<DestinationEvent> {
        let post_copy = self.target.post_copy().filter(|_| self.kernel.lacks_memory())?;
        if !post_copy.guest_has_ended() {
            return None;
        }
        if let Some(event) = self.memory_not_needed() {
            return Some(event);
        }
        self.kernel.observer.note("the guest's memory: the guest's process has ended");
        Some(DestinationEvent::Guest(DestinationGuest::Gone))
    }

    fn count_figures(&mut self, figures: &mut DestinationFigures) {
        figures.cpu_seconds = self.cpu.seconds();
        if !self.cpu.is_sandboxed() {
            figures.faults = process::faults(std::process::id()).saturating_sub(self.faults_before);
        }
        // The guest was resumed, so no call of the monitor is under way.
        figures.guest_ended = self.vmm.call(|vmm| vmm.guest_end()).map(|end| end.what);
    }

    fn post_copy_figures(&mut self) -> Option<PostCopyFigures> {
        self.target.post_copy().map(|post_copy| post_copy.figures())
    }

    fn missing_bytes(&self) -> u64 {
        self.target.post_copy().map_or(0, |post_copy| post_copy.missing()) * PAGE_SIZE as u64
    }
}

impl Driver<'_> {
    pub(super) fn finish(
        mut self,
        outcome: DestinationOutcome,
        source: String,
    ) -> Result<ReceiveReport, MigrationError> {
        let ending = self.kernel.ending(outcome);
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
        if let Some(faults) = self.faults.take() {
            // A panic of the thread has been printed.
            let _ = faults.join();
        }
        let report = ending.received(&self.receiving, source);
        let Ending { outcome, guest, reason } = ending;
        match reason {
            None => Ok(report),
            Some(reason) => {
                let place = (Side::Destination, self.kernel.phase, guest);
                let mut error = MigrationError::ended(place, outcome, reason, &self.vmm.failures());
                error.received = Some(Box::new(report));
                Err(error)
            }
        }
    }
}
