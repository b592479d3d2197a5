//! The source's driver: what the library does with its monitor and the channels for each action of the switchover's state machine.

mod data_plane;
mod devices;
mod post_copy;
mod report;
mod switch_over;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna_memory::ram::GuestRam;
use sterna_wire::control::{ControlMessage, DestinationFigures, DeviceChannels, Machine};
use sterna_wire::handshake::check_devices;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{RecordState, SourceEvent, SourceGuest, SourceState, SourceSwitchover};
use sterna_wire::text::cleaned;

use self::data_plane::Moving;
use self::devices::Devices;
use self::post_copy::PostCopy;
use self::switch_over::MONITORS_STATE;
use super::convergence::NotConverging;
use super::rounds::{Order, RoundEvent, RoundStats, Rounds};
use super::unsent::Unsent;
use super::{Settings, Source};
use crate::accelerator::Accelerator;
use crate::cancel::Cancel;
use crate::control_link::ControlEvent;
use crate::cpu_time::CpuTime;
use crate::device_state::SavingDevices;
use crate::device_state::save::SaveEvent;
use crate::live_control::Steering;
use crate::migration::{
    Cause, DELTA, DEVICE_STATE, GUEST_STATE, MigrationError, POST_COPY, PROGRESS, Phase, RESUME, RETRANSMIT, machine,
};
use crate::monitor::{CaughtLog, CaughtObserver, SourceMonitor};
use crate::occupied::{Deadlines, Occupied};
use crate::pacer::Pacer;
use crate::report::{Observer, Progress, Report, milliseconds};
use crate::send::{Compression, HashKey, Refusals, Sent};
use crate::session::{
    self, ConnectionEvent, Features, OPENING, Offer, OnConnectionEvent, Peer, Redial, Session, UNCHECKED,
};
use crate::switchover::{
    DeliveryLimits, Events, Ledger, Reconnection, SourceDriver, SourceKernel, SourceSetup, Unserved, cancelled,
    run_source,
};
use crate::transport::{Address, Security};
use crate::vmm::{AfterMove, GuestEnd, ResumeReason, SourceVmm, VmmError};
use crate::window::Window;

/// The events of the driver's own threads.
#[derive(Debug)]
enum Event {
    /// Of the thread of the rounds over the data channels of this incarnation.
    Rounds(u32, RoundEvent),
    Device(SaveEvent),
}

pub(super) fn run(
    source: &Source,
    to: &Address,
    security: &Security,
    vmm: &mut dyn SourceVmm,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Report, MigrationError> {
    let Source { ram, log, devices, settings, control, .. } = source;
    let steering = Steering::begin(control, cancel)
        .map_err(|error| MigrationError::untouched(Cause::new(ErrorKind::Settings, error.to_string())))?;
    let cancel = steering.cancel();
    let cpu = CpuTime::new(settings.sandboxed);
    let _counted = cpu.count();
    let observer = &CaughtObserver(observer);
    let untouched = |error: VmmError| MigrationError::untouched(error);
    let mut vmm = SourceMonitor::new(vmm, &cpu).map_err(untouched)?;
    let (events, inbox) = Events::channel();
    let (ids, devices): (Vec<_>, Vec<_>) = devices.iter().cloned().unzip();
    let serial = settings.device_channels == DeviceChannels::Serial;
    let known = Arc::new(SavingDevices::new(ids.clone(), serial, settings.downtime));
    let machine = Machine {
        machine_type: vmm.machine_type().map_err(untouched)?,
        devices: ids,
        device_channels: if known.is_empty() { DeviceChannels::default() } else { settings.device_channels },
        opening: settings.opening.clone(),
        retry_ms: milliseconds(settings.limits.retry),
        ..machine(vmm.name(), ram, settings.downtime.as_millis() as u64)
    };
    check_devices(&machine).map_err(MigrationError::untouched)?;
    let chosen = matches!(settings.not_converging, NotConverging::PostCopy | NotConverging::PostCopyAfter(_));
    let post_copy = chosen || settings.allow_post_copy;
    if post_copy && let Some(reason) = vmm.post_copy_refusal().map_err(untouched)? {
        return Err(MigrationError::untouched(format!("post-copy is not possible at the source: {reason}")));
    }
    let engines = settings.engines(observer).map_err(MigrationError::untouched)?;
    let weight = settings.accelerator_weight;
    let accelerator = settings.offload.as_ref().and_then(|offload| Accelerator::new(offload, ram, weight));
    let engines = match &accelerator {
        Some(accelerator) => accelerator.engines(engines, settings.iaa_verify.verifies(settings.checksums)),
        None => engines,
    };
    let encoding = engines.encoding(settings.method).map_err(MigrationError::untouched)?;
    // What was chosen is required, so that it is not left out silently.
    let mut required = required_features(post_copy, settings.checksums, settings.delta_cache > 0);
    required.extend((!known.is_empty()).then_some(DEVICE_STATE));
    required.extend((!settings.opening.is_empty()).then_some(OPENING));
    let mut offered = required.clone();
    offered.extend([RETRANSMIT, PROGRESS]);
    offered.extend((!settings.limits.retry.is_zero()).then_some(RESUME));
    let offer = Offer {
        to,
        security,
        channels: settings.channels,
        packet_size: settings.packet_size,
        machine,
        mode: settings.monitor.mode,
        features: Features { offered: &offered, required: &required },
        encoding,
        patience: Duration::ZERO,
    };
    let occupied = Occupied::default();
    let no_thread = |error| MigrationError::untouched(format!("no thread for time limits: {error}"));
    let deadlines = occupied.watch_deadlines().map_err(no_thread)?;
    let on_connection = on_connection(&events, &occupied, &known);
    let dialled = session::dial(&offer, cancel, &on_connection);
    // A cancellation interrupts dialling, which then fails.
    let (link, session) = dialled.map_err(|error| match cancel.is_cancelled() {
        true => nothing_begun(),
        false => MigrationError::untouched(error),
    })?;
    observer.note(&format!("migration {}: {to} accepted it", session.id));
    if cancel.is_cancelled() {
        return Err(nothing_begun());
    }
    control.agreed(post_copy);
    let state = RecordState::Source(SourceState::Started);
    let ledger = Ledger::new(settings.state_dir.as_ref(), &session, state, to.to_string(), &settings.monitor);
    let ledger = ledger.map_err(MigrationError::untouched)?;

    let monitor_call = occupied.clone();
    let _cancelling = events.on_cancel(cancel, move || monitor_call.raise(cancelled()));
    let hash_key = HashKey::random()
        .map_err(|error| MigrationError::untouched(format!("no random numbers for hashes of pages: {error}")))?;
    let window = new_window(&session, settings);
    let (machine, first) = SourceSwitchover::begin();
    let kernel = SourceKernel::new(SourceSetup {
        machine,
        peer: Peer::new(link),
        reconnection: Reconnection {
            to: to.clone(),
            security: Ok(security.clone()),
            redial: Redial::new(settings.limits.dial_pause),
        },
        on_connection,
        session,
        ledger,
        events,
        limits: DeliveryLimits {
            retry: settings.limits.retry,
            decision: settings.limits.delivery,
            start: settings.limits.start,
            abort: settings.limits.reporting_abort,
        },
        cancel,
        control: control.clone(),
        observer,
    });
    let mut driver = Driver {
        kernel,
        accelerator,
        compression: Compression::new(encoding, engines, settings.channels, settings.max_cpus),
        vmm,
        cpu,
        security,
        unsent: Arc::new(Unsent::none_of(ram)),
        refusals: Arc::new(Refusals::of_guest_ram(ram.clone())),
        ram: ram.clone(),
        log: log.clone(),
        post_copy: PostCopy::default(),
        window,
        pacer: Arc::new(Pacer::new(settings.bandwidth)),
        settings: settings.clone(),
        occupied,
        deadlines,
        moving: None,
        held_rounds: None,
        resumable: false,
        devices: Devices::new(known, devices),
        stats: Arc::default(),
        started: Instant::now(),
        phase: Phase::SettingUp,
        progress: Progress::default(),
        content_reported: 0,
        sent_before: Sent::default(),
        figures: DestinationFigures::default(),
        placement: Vec::new(),
        ready: false,
        throttled: 0,
        hash_key,
        ended: false,
        moved: (0, 0),
    };
    driver.kernel.pace_by(&driver.pacer);
    let end = run_source(&mut driver, &inbox, first);
    driver.finish(end)
}

/// Returns the capabilities that a source with these settings requires of its destination, besides that for devices.
pub fn required_features(post_copy: bool, checksums: bool, deltas: bool) -> Vec<&'static str> {
    let chosen = [(true, GUEST_STATE), (post_copy, POST_COPY), (!checksums, UNCHECKED), (deltas, DELTA)];
    chosen.into_iter().filter(|(chosen, _)| *chosen).map(|(_, feature)| feature).collect()
}

/// Returns the error of a migration that was cancelled before anything was begun.
fn nothing_begun() -> MigrationError {
    MigrationError::untouched(Cause::from(cancelled()))
}

fn new_window(session: &Session, settings: &Settings) -> Arc<Window> {
    Arc::new(Window::new(session.packet_size as u64, session.round_trip, settings.downtime))
}

/// Returns a closure that passes on the events of the control channels. It handles itself what cannot wait for the driver, which may be
/// busy with the monitor's state for long.
fn on_connection(events: &Events<Event>, occupied: &Occupied, devices: &Arc<SavingDevices>) -> OnConnectionEvent {
    let pass_on = events.on_connection();
    let (monitor_call, devices) = (occupied.clone(), Arc::clone(devices));
    Arc::new(move |news| {
        if let ConnectionEvent::Control(_, ControlEvent::Message(message, _)) = &news {
            match message {
                ControlMessage::DeviceCredit { device, up_to } if devices.credit(*device, *up_to).is_ok() => return,
                ControlMessage::DeviceLoaded { device } => return devices.loaded(*device),
                _ => {}
            }
        }
        if let ConnectionEvent::Control(incarnation, ControlEvent::Lost(reason)) = &news {
            monitor_call.lost(*incarnation, format_args!("the destination was lost: {reason}"));
        }
        pass_on(news);
    })
}

struct Driver<'a> {
    kernel: SourceKernel<'a, Event>,
    accelerator: Option<Accelerator>,
    /// The encoders, and the engines besides the CPU.
    compression: Compression,
    vmm: SourceMonitor<'a>,
    /// CPU time of the migration's threads at this side.
    cpu: CpuTime,
    security: &'a Security,
    settings: Settings,
    ram: GuestRam,
    log: CaughtLog,
    /// In post-copy: pages that the destination lacks.
    unsent: Arc<Unsent>,
    /// Packets whose content did not arrive as it was read.
    refusals: Arc<Refusals>,
    post_copy: PostCopy,
    window: Arc<Window>,
    pacer: Arc<Pacer>,
    occupied: Occupied,
    deadlines: Deadlines,
    moving: Option<Moving>,
    /// The rounds, as long as the destination is lost.
    held_rounds: Option<Rounds>,
    /// Whether the rounds may go on after the destination was lost.
    resumable: bool,
    devices: Devices,
    stats: Arc<Mutex<RoundStats>>,
    started: Instant,
    /// The phase until the decision.
    phase: Phase,
    progress: Progress,
    /// Content bytes at the last tick.
    content_reported: u64,
    /// Figures of the channels that are closed.
    sent_before: Sent,
    figures: DestinationFigures,
    placement: Vec<String>,
    /// Whether the destination has sent that it is ready to be filled.
    ready: bool,
    /// How much the monitor slows its guest down, in percent.
    throttled: u8,
    /// Key of the hashes of sent pages, for blocks with huge pages.
    hash_key: HashKey,
    /// Whether the monitor has ended after its guest was moved.
    ended: bool,
    /// Bytes on the wire and in flight when they last changed.
    moved: (u64, u64),
}

impl<'a> SourceDriver<'a> for Driver<'a> {
    type Event = Event;

    fn kernel(&mut self) -> &mut SourceKernel<'a, Event> {
        &mut self.kernel
    }

    fn start_migration(&mut self) -> Result<(), Reason> {
        self.begin_rounds()
    }

    /// There is no relay here: confirms that the guest is paused and stays so.
    fn complete(&mut self) -> Result<Option<SourceGuest>, Reason> {
        match self.vmm.confirm_paused() {
            Ok(()) => Ok(Some(SourceGuest::Completed)),
            Err(_) if self.vmm.has_ended() => Ok(Some(SourceGuest::Gone)),
            Err(error) => Err(Reason::new(ErrorKind::Monitor, error)),
        }
    }

    fn end_migration(&mut self) -> Result<SourceGuest, Reason> {
        self.kernel.abort.raise(self.kernel.reason().clone());
        self.end_rounds();
        self.end_devices();
        let paused = self.kernel.moments.pausing.is_some();
        Ok(match () {
            () if self.vmm.has_ended() => SourceGuest::Gone,
            () if paused => SourceGuest::Completed,
            () => SourceGuest::Running,
        })
    }

    fn resume(&mut self) -> Result<SourceGuest, Reason> {
        let cancelled = self.kernel.cancelled();
        match self.resume_guest(if cancelled { ResumeReason::Cancelled } else { ResumeReason::Failed }) {
            Ok(()) => Ok(SourceGuest::Running),
            Err(_) if self.vmm.has_ended() => Ok(SourceGuest::Gone),
            Err(reason) => Err(reason),
        }
    }

    fn guest_stays(&mut self) {
        if self.throttled > 0
            && let Err(error) = self.vmm.throttle(0)
        {
            self.kernel.observer.note(&format!("the guest stays slowed down: {error}"));
        }
    }

    fn end_guest(&mut self) -> Result<SourceGuest, Reason> {
        if self.kernel.post_copy_begun() {
            // The threads that read the guest's memory end before the monitor does.
            self.kernel.abort.finish();
            self.end_data_plane();
        }
        let runs = self.kernel.ledger.record().does_not_run.is_none();
        let after = if runs { self.vmm.guest_moved() } else { self.vmm.guest_does_not_run() };
        match after {
            Ok(AfterMove::Kept) => Ok(SourceGuest::Completed),
            Ok(AfterMove::Ended) => {
                self.ended = true;
                Ok(SourceGuest::Gone)
            }
            Ok(AfterMove::RunsHere) => Ok(SourceGuest::Running),
            Err(error) => Err(Reason::new(ErrorKind::Monitor, error)),
        }
    }

    fn hold_rounds(&mut self) -> Result<(), Reason> {
        self.keep_rounds()
    }

    fn continue_rounds(&mut self) -> Result<(), Reason> {
        self.reopen_channels()
    }

    fn start_post_copy(&mut self) -> Result<(), Reason> {
        self.begin_post_copy()
    }

    fn serve_pages(&mut self) -> Result<(), Unserved> {
        if self.vmm.has_ended() {
            return Err(Unserved::MonitorGone);
        }
        if self.kernel.expects_new_channels() {
            return self.resume_post_copy().map_err(Unserved::ConnectionLost);
        }
        self.moving.iter().for_each(|moving| moving.order(Order::Stream));
        Ok(())
    }

    fn unsent_pages(&self) -> u64 {
        // A guest that has ended by itself needs no memory.
        if self.figures.guest_ended.is_some() { 0 } else { self.unsent.unread() }
    }

    fn monitor_has_ended(&mut self) -> bool {
        self.vmm.has_ended()
    }

    fn changed_by_others(&mut self) -> Option<Reason> {
        self.kernel.moments.paused?;
        let error = self.vmm.changed_by_others()?;
        Some(Reason::new(ErrorKind::Monitor, error))
    }

    fn guest_end(&mut self) -> Option<GuestEnd> {
        self.vmm.guest_end()
    }

    fn receive(&mut self, message: ControlMessage) -> Option<SourceEvent> {
        match message {
            ControlMessage::Ready { placement, .. } if !std::mem::replace(&mut self.ready, true) => {
                let blocks = self.ram.blocks().len();
                let placement: Vec<String> = placement.iter().take(blocks).map(|line| cleaned(line)).collect();
                placement.iter().for_each(|line| self.kernel.observer.note(&format!("placement: {line}")));
                self.placement = placement;
            }
            ControlMessage::SwitchoverAck => self.monitor_loaded_ahead(),
            ControlMessage::DeviceTaken { device } => self.device_loaded_ahead(device),
            ControlMessage::DeviceCredit { device, up_to } => {
                // Refused on arrival, and refused again here, with the reason.
                let text = self.devices.known.credit(device, up_to).err()?;
                return Some(SourceEvent::Failed { reason: Reason::other(text) });
            }
            ControlMessage::PostCopyFigures(figures) => self.post_copy.figures = figures,
            ControlMessage::Figures(figures) => self.figures = figures,
            unexpected => return self.kernel.out_of_phase(&unexpected),
        }
        None
    }

    fn handle(&mut self, event: Event) -> Option<SourceEvent> {
        match event {
            Event::Rounds(incarnation, news) => self.handle_rounds(incarnation, news),
            Event::Device(news) => self.handle_device(news),
        }
    }

    fn tick(&mut self) {
        self.watch_progress();
        self.report_progress();
    }

    fn waiting_for(&self) -> Option<String> {
        let moments = &self.kernel.moments;
        let lacks = |moment: Option<Instant>| moments.paused.is_some() && moment.is_none();
        // Pages are also named last, because saving may write them: in that time they are not waited for.
        let to_deliver = self.stats.lock().expect("no thread panics with the lock held").to_deliver;
        let undelivered = to_deliver > self.window.delivered().1.carried.pages();
        let pages = undelivered || moments.saved.is_some() && self.devices.known.all_saved().is_some();
        let pages = (lacks(moments.drained) && pages).then(|| "the last pages".to_owned());
        let state = lacks(moments.saved).then(|| MONITORS_STATE.to_owned());
        let all: Vec<_> = pages.into_iter().chain(state).chain(self.devices.known.waiting_for()).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

impl Driver<'_> {
    /// Returns the phase that the migration has reached.
    fn phase(&self) -> Phase {
        let moments = &self.kernel.moments;
        match () {
            () if moments.running.is_some() && self.kernel.post_copy_begun() => Phase::PostCopy,
            () if moments.decided.is_some() => Phase::Committed,
            () => self.phase,
        }
    }

    fn handle_rounds(&mut self, incarnation: u32, news: RoundEvent) -> Option<SourceEvent> {
        let current = incarnation == self.kernel.data_incarnation();
        let counts = match news {
            RoundEvent::Note(_) => true,
            RoundEvent::Failed(_) => current,
            // Where the migration is being taken down, the guest is resumed, if it has to be, and runs at full speed.
            _ => current && !self.kernel.abort.is_over(),
        };
        if !counts {
            return None;
        }
        let outcome = match news {
            RoundEvent::Note(text) => {
                self.kernel.observer.note(&text);
                Ok(())
            }
            RoundEvent::Throttle(percent) => {
                self.throttle(percent);
                Ok(())
            }
            RoundEvent::Settle => self.settle_io(),
            RoundEvent::SwitchOver => self.switch_over(),
            RoundEvent::Stopped => self.send_state(),
            RoundEvent::RunOn => self.run_on(),
            RoundEvent::PostCopy => {
                self.kernel.observer.note("the guest will go on before all of its memory is there");
                return Some(SourceEvent::PostCopyWanted);
            }
            RoundEvent::Failed(reason) => Err(reason),
            RoundEvent::Drained { at, saving } => {
                (self.kernel.moments.drained, self.kernel.moments.saving) = (Some(at), saving);
                return self.final_state_sent();
            }
        };
        outcome.err().map(|reason| SourceEvent::Failed { reason })
    }
}
