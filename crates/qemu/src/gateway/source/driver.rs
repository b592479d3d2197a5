//! What `sterna send` does with its QEMU for each action of the switchover's state machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_engine::report::Progress;
use sterna_engine::send::{Compression, DeltaBlocks, Refusals, Sent};
use sterna_engine::switchover::{SourceDriver, SourceKernel, Unserved};
use sterna_engine::vmm::GuestEnd;
use sterna_engine::window::Window;
use sterna_wire::control::{ControlMessage, DestinationFigures, ReturnPath, Totals};
use sterna_wire::limits::MAX_BLOCKS;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{SourceEvent, SourceGuest};
use sterna_wire::text::cleaned;

use super::migration::Stage;
use super::rounds::RoundsWatch;
use crate::gateway::SendOptions;
use crate::gateway::backlog::Backlog;
use crate::gateway::fault::{self, PausePoint};
use crate::gateway::neighbours::{self, Media};
use crate::gateway::qemu::{self, QemuEvent};
use crate::gateway::source_stream::StreamNews;
use crate::gateway::storage::{Patience, Storage};
use crate::qmp::Qmp;

/// Minimum time limit of a step while the guest is paused: the destination loads, or QEMU completes.
const MIN_STEP_LIMIT: Duration = Duration::from_secs(30);

/// The events of the driver's own threads.
#[derive(Debug)]
pub(super) enum Event {
    Qemu(QemuEvent),
    Stream(StreamNews),
    Drained(Vec<u64>),
}

pub(super) struct Driver<'a> {
    pub(super) kernel: SourceKernel<'a, Event>,
    pub(super) options: &'a SendOptions,
    pub(super) compression: Compression,
    pub(super) qmp: Qmp,
    pub(super) stage: Stage,
    pub(super) window: Arc<Window>,
    pub(super) started: Instant,
    pub(super) figures: DestinationFigures,
    pub(super) placement: Vec<String>,
    /// Whether the destination has sent that it is ready to be filled.
    pub(super) ready: bool,
    pub(super) progress: Progress,
    pub(super) watch: RoundsWatch,
    /// QEMU's downtime limit.
    pub(super) limit: Duration,
    /// Bytes of normal pages at the last tick.
    pub(super) content_reported: u64,
    /// The blocks of which the destination accepts deltas; none if it accepts no deltas.
    pub(super) deltas: Option<Arc<DeltaBlocks>>,
    /// The packets that the destination has refused; none if it accepts no deltas, because then the channels keep no pages.
    pub(super) refusals: Option<Arc<Refusals>>,
    /// Maximum bytes of pages kept for deltas.
    pub(super) delta_cache: u64,
    /// Why no deltas are sent although the options ask for them.
    pub(super) no_deltas: Option<&'static str>,
    /// Rounds over the dirty pages, queried before QEMU is ended.
    pub(super) rounds: u64,
    /// When the guest must have been paused at the latest.
    pub(super) until: Option<Instant>,
    /// Bytes on the wire and in flight when they last changed.
    pub(super) moved: (u64, u64),
    pub(super) machine_name: String,
    /// Why the migration is not in direct mode.
    pub(super) not_direct: String,
    /// The media of the guest's drives at the start.
    pub(super) media: Media,
    /// Events of QEMU that have not been handled.
    pub(super) backlog: Backlog,
}

impl<'a> SourceDriver<'a> for Driver<'a> {
    type Event = Event;

    fn kernel(&mut self) -> &mut SourceKernel<'a, Event> {
        &mut self.kernel
    }

    fn start_migration(&mut self) -> Result<(), Reason> {
        self.begin_migration().map_err(|error| Reason::new(error.kind, error.text))?;
        self.carry_out_requests();
        self.await_progress();
        Ok(())
    }

    fn complete(&mut self) -> Result<Option<SourceGuest>, Reason> {
        self.kernel.due = Some((Instant::now() + self.step_time(), "completing at the source QEMU"));
        self.permit_completion()?;
        Ok(None)
    }

    fn end_migration(&mut self) -> Result<SourceGuest, Reason> {
        self.cancel_migration()
    }

    fn resume(&mut self) -> Result<SourceGuest, Reason> {
        let storage = Storage::of(&self.qmp, self.kernel.cancel, self.kernel.observer);
        match storage.cont(&self.qmp, Patience::Endless) {
            Ok(()) => Ok(SourceGuest::Running),
            Err(_) if self.monitor_has_ended() => Ok(SourceGuest::Gone),
            Err(error) => Err(qemu::failed("the source QEMU does not resume the guest")(error)),
        }
    }

    fn guest_stays(&mut self) {
        if let Stage::Begun(begun) = &mut self.stage {
            begun.restore = None;
            if begun.accepted {
                qemu::announce(&self.qmp);
            }
        }
    }

    fn end_guest(&mut self) -> Result<SourceGuest, Reason> {
        self.count_rounds();
        let ended = qemu::end_source(&self.qmp, self.kernel.ledger.record());
        ended.map_err(|text| Reason::new(ErrorKind::Monitor, text))
    }

    /// QEMU's own stream sends all of the guest's memory before the decision.
    fn serve_pages(&mut self) -> Result<(), Unserved> {
        Err(Unserved::NoPages(Reason::other("all of the guest's memory was sent")))
    }

    fn monitor_has_ended(&mut self) -> bool {
        qemu::monitor_has_ended(&self.qmp, self.kernel.ledger.record().monitor_process)
    }

    fn guest_end(&mut self) -> Option<GuestEnd> {
        qemu::guest_end(&self.qmp)
    }

    fn receive(&mut self, message: ControlMessage) -> Option<SourceEvent> {
        match message {
            ControlMessage::Ready { placement, deltas } if !std::mem::replace(&mut self.ready, true) => {
                let lines = placement.iter().take(MAX_BLOCKS);
                let placement: Vec<String> = lines.map(|line| cleaned(line)).collect();
                placement.iter().for_each(|line| self.kernel.observer.note(&format!("placement: {line}")));
                self.placement = placement;
                self.settle_deltas(&deltas);
                if let Some(moving) = self.stage.moving() {
                    moving.plane.sync.open();
                }
                self.other_program()
            }
            ControlMessage::ReturnPath(message) => {
                match message {
                    // Success is reported by `Prepared`; SHUT(0) is relayed when the switchover requires it.
                    ReturnPath::Shut(0) => return None,
                    // QEMU sends 1 for every reason.
                    ReturnPath::Shut(_) => {
                        let text = "the destination QEMU could not load the guest: see its output";
                        return Some(SourceEvent::Failed { reason: Reason::new(ErrorKind::OtherSide, text) });
                    }
                    ReturnPath::Pong(_) | ReturnPath::SwitchoverAck => {}
                }
                let relayed = self.stage.return_message(message.into());
                // An alarm has closed QEMU's sockets, and its reason counts, or the peer's that follows.
                let failed = relayed.err().filter(|_| !self.kernel.abort.is_over());
                failed.map(|error| SourceEvent::Failed { reason: Reason::new(ErrorKind::Monitor, error) })
            }
            ControlMessage::Figures(figures) => {
                self.figures = figures;
                None
            }
            unexpected => self.kernel.out_of_phase(&unexpected),
        }
    }

    fn handle_requests(&mut self) {
        self.carry_out_requests();
    }

    fn handle(&mut self, event: Event) -> Option<SourceEvent> {
        match event {
            Event::Qemu(event) => {
                self.backlog.handled();
                self.handle_qemu(event)
            }
            Event::Stream(StreamNews::Started { ram, blocks, machine }) => {
                self.progress.total_bytes = ram;
                tracing::info!(?blocks, machine, "the stream has begun");
                None
            }
            Event::Stream(StreamNews::RamEnd { .. }) => {
                self.drain();
                None
            }
            Event::Stream(StreamNews::Ended) => None,
            Event::Drained(ram) => {
                self.kernel.moments.drained = Some(Instant::now());
                self.kernel.due = Some((Instant::now() + self.step_time(), "loading at the destination"));
                let Sent { normal_pages, zero_pages, .. } = self.sent();
                self.kernel.peer.send(&ControlMessage::Totals(Totals { ram, normal_pages, zero_pages }));
                Some(SourceEvent::FinalStateSent)
            }
        }
    }

    fn tick(&mut self) {
        if self.stage.begun()
            && self.kernel.moments.paused.is_none()
            && let Some(SourceEvent::Failed { reason }) = self.other_program()
        {
            self.kernel.abort.raise(reason);
        }
        self.watch_progress();
        self.report_progress();
    }
}

impl Driver<'_> {
    /// Enables deltas of the blocks in `accepted`, which the destination names before the first page.
    fn settle_deltas(&mut self, accepted: &[u16]) {
        if self.options.delta_cache == 0 {
            return;
        }
        let shapes = self.stage.moving().and_then(|moving| moving.plane.sync.shapes());
        let why = match (&self.deltas, shapes) {
            (None, _) => "the destination takes none: its pages go through QEMU's own stream, or its sterna is older",
            (Some(_), _) if accepted.is_empty() => "the destination writes into no RAM block directly",
            (Some(deltas), Some(shapes)) => {
                self.delta_cache = deltas.set(shapes, accepted, self.options.delta_cache, self.options.channels);
                return;
            }
            (Some(_), None) => "the destination was ready before the guest's RAM blocks were known",
        };
        self.kernel.observer.note(&format!("deltas are not possible: {why}; pages go whole"));
        self.no_deltas = Some(why);
    }

    fn handle_qemu(&mut self, event: QemuEvent) -> Option<SourceEvent> {
        match event {
            QemuEvent::Stopped => {
                fault::at(PausePoint::Stopped);
                self.compression.set_urgent(true);
                self.kernel.moments.stopped();
                self.kernel.guest_stays_paused();
                if self.kernel.moments.drained.is_none() && self.stage.accepted() {
                    self.kernel.due = Some((Instant::now() + self.step_time(), "sending the last pages"));
                }
                self.stopped_by_another().or_else(|| self.other_program())
            }
            QemuEvent::Resumed => {
                self.compression.set_urgent(false);
                self.kernel.moments.runs_on();
                self.kernel.due = None;
                self.await_progress();
                // An operator has resumed a guest that already belongs to the destination.
                self.kernel.decided().then_some(SourceEvent::Guest(SourceGuest::Running))
            }
            QemuEvent::Ends => {
                let how = qemu::ended_by_itself(&self.qmp)?;
                Some(SourceEvent::Failed { reason: Reason::new(ErrorKind::GuestEnded, how) })
            }
            QemuEvent::Gone if qemu::has_ended(self.kernel.ledger.record().monitor_process) => {
                Some(SourceEvent::Guest(SourceGuest::Gone))
            }
            QemuEvent::Gone => {
                let reason = Reason::new(ErrorKind::Monitor, "the source QEMU closed its QMP socket");
                Some(SourceEvent::Failed { reason })
            }
            QemuEvent::Migration(_) if !self.stage.begun() => None,
            QemuEvent::Migration(status) => match status.as_str() {
                "completed" => Some(SourceEvent::Guest(SourceGuest::Completed)),
                // A consequence of the broken channel, whose reason may still be queued.
                "failed" | "cancelled" if self.kernel.awaits_last_words() => None,
                "failed" | "cancelled" => {
                    let why = qemu::failure(&self.qmp)
                        .unwrap_or_else(|| format!("the source QEMU reports its migration as {status}"));
                    // The first reason is more precise than QEMU's error about closed sockets.
                    let reason = self.kernel.abort.reason().unwrap_or_else(|| Reason::new(ErrorKind::Monitor, why));
                    Some(SourceEvent::Failed { reason })
                }
                _ => None,
            },
        }
    }

    /// Fails the migration if the guest was paused by an operator or stopped by itself: the destination would start it.
    fn stopped_by_another(&self) -> Option<SourceEvent> {
        let status = self.qmp.status().ok()?;
        let paused = !matches!(status.as_str(), "running" | "finish-migrate" | "postmigrate");
        (paused && !self.kernel.decided()).then(|| {
            let text =
                format_args!("the guest stopped during the migration (QEMU: {status}); only a running guest is moved");
            SourceEvent::Failed { reason: Reason::new(ErrorKind::Monitor, text) }
        })
    }

    /// Fails the migration because of what another program has begun: a job under which QEMU may abort when it makes the disks inactive, or
    /// a drive that the destination would show the guest as it was before.
    fn other_program(&self) -> Option<SourceEvent> {
        if self.kernel.decided() || self.kernel.abort.is_over() {
            return None;
        }
        let text = neighbours::seen_beside_migration(&self.qmp, &self.media)?;
        Some(SourceEvent::Failed { reason: Reason::new(ErrorKind::Monitor, text) })
    }

    fn drain(&mut self) {
        let Some(moving) = self.stage.moving_mut() else { return };
        let events = self.kernel.events.clone();
        let waiting = moving.plane.when_drained(move |ram| {
            events.send(Event::Drained(ram));
        });
        if let Err(error) = waiting {
            self.kernel.abort.raise(Reason::other(format_args!("no thread for draining the channels: {error}")));
        }
    }

    /// Restarts the stall limit, and keeps the limit until the guest must be paused.
    fn await_progress(&mut self) {
        // Once the guest is paused, or while the migration is being taken down, other limits hold.
        if !self.stage.begun() || self.kernel.moments.paused.is_some() || self.kernel.abort.is_over() {
            return;
        }
        let stalled = sterna_engine::switchover::after(self.options.waits.stall);
        self.kernel.due = Some(match self.until {
            Some(until) if until < stalled => (until, "copying the guest's memory (--time-limit)"),
            _ => (stalled, "waiting for anything of the guest to move (--stall-limit)"),
        });
    }

    /// Restarts the stall limit if bytes have moved since the last call.
    fn watch_progress(&mut self) {
        let moved = (self.sent().wire_bytes, self.window.in_flight());
        if moved != self.moved {
            self.moved = moved;
            self.await_progress();
        }
    }

    pub(super) fn count_rounds(&mut self) {
        let info = self.qmp.query_migrate().ok();
        self.rounds = info.and_then(|info| info.ram).map_or(self.rounds, |ram| ram.dirty_sync_count);
    }

    /// Returns how long a step may take while the guest is paused.
    fn step_time(&self) -> Duration {
        MIN_STEP_LIMIT.max(self.downtime().saturating_mul(10)).saturating_add(self.forced_time())
    }
}
