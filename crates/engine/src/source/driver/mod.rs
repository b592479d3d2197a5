//! The source's driver: it feeds events to the switchover's state machine, and has the monitor and the channels perform the actions.

mod devices;
mod post_copy;
mod report;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_memory::ram::GuestRam;
use sterna_wire::control::{ControlMessage, DestinationFigures, DeviceChannels, Machine};
use sterna_wire::handshake::check_devices;
use sterna_wire::header::ChannelKind;
use sterna_wire::switchover::{Moment, RecordState, SourceAction, SourceEnd, SourceEvent, SourceGuest, SourceState};
use sterna_wire::text::cleaned;

use self::devices::Devices;
use self::post_copy::PostCopy;
use super::convergence::{Convergence, NotConverging};
use super::rounds::{CurrentRound, Held, Order, RoundEvent, RoundStats, Rounds, no_pages};
use super::unsent::Unsent;
use super::{Settings, Source};
use crate::abort::Abort;
use crate::accelerator::Accelerator;
use crate::batch::BatchPool;
use crate::cancel::Cancel;
use crate::control_link::ControlEvent;
use crate::cpu_time::{self, CpuTime};
use crate::device_state::SavingDevices;
use crate::device_state::save::SaveEvent;
use crate::entry::{PageSearch, Pipeline};
use crate::ledger::Ledger;
use crate::migration::{
    DELTA, DEVICE_STATE, GUEST_STATE, MigrationError, POST_COPY, Phase, RETRANSMIT, machine, shapes,
};
use crate::monitor::{self, CaughtLog, CaughtObserver, SourceMonitor};
use crate::occupied::Occupied;
use crate::pacer::Pacer;
use crate::report::{Observer, Progress, Report};
use crate::send::{Compression, HashKey, Retransmit, SendChannel, SendContext, Sent};
use crate::session::{
    self, ConnectionEvent, Features, Offer, OnConnectionEvent, Peer, PeerEvent, Redial, Session, SourceDriver,
    SourceLead, UNCHECKED, after, lead_source, too_long,
};
use crate::state::{Part, StateWriter};
use crate::transport::{Address, Security};
use crate::vmm::{AfterMove, SourceVmm, VmmError};
use crate::window::Window;

/// Batches that wait for each channel or are being filled for it. They only list pages, whose content has not been read yet.
const BATCHES_PER_CHANNEL: usize = 4;
/// How long the round under way may go on when the rounds' time is over.
const ROUND_GRACE: Duration = Duration::from_secs(1);
/// The reason of a migration that was cancelled on this side.
const CANCELLED: &str = "cancelled";
/// The name of the monitor's state in reasons: the source waits for it while the guest is paused.
const MONITORS_STATE: &str = "the monitor's state";

/// What wakes the driver.
#[derive(Debug)]
enum Event {
    Peer(ConnectionEvent),
    Rounds(RoundEvent),
    Device(SaveEvent),
    /// The data channels of this incarnation have failed.
    Broken(u32),
    Cancelled,
}

pub(super) fn run(
    source: Source,
    to: &Address,
    security: &Security,
    vmm: &mut dyn SourceVmm,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Report, MigrationError> {
    let Source { ram, log, devices, settings } = source;
    let cpu = CpuTime::default();
    let _counted = cpu.count();
    let observer = &CaughtObserver(observer);
    let untouched = |error: VmmError| MigrationError::untouched(error);
    let mut vmm = SourceMonitor::new(vmm, &cpu).map_err(untouched)?;
    let (events_in, events) = channel();
    let (ids, devices): (Vec<_>, Vec<_>) = devices.into_iter().unzip();
    let serial = settings.device_channels == DeviceChannels::Serial;
    let known = Arc::new(SavingDevices::new(ids.clone(), serial, settings.downtime));
    let machine = Machine {
        machine_type: vmm.machine_type().map_err(untouched)?,
        devices: ids,
        device_channels: if known.is_empty() { DeviceChannels::default() } else { settings.device_channels },
        ..machine(vmm.name(), &ram, settings.downtime.as_millis() as u64)
    };
    check_devices(&machine).map_err(MigrationError::untouched)?;
    let post_copy = matches!(settings.not_converging, NotConverging::PostCopy | NotConverging::PostCopyAfter(_));
    if post_copy && let Some(reason) = vmm.post_copy_refusal().map_err(untouched)? {
        return Err(MigrationError::untouched(format!("post-copy is not possible at the source: {reason}")));
    }
    let (engines, line) =
        settings.qatzip.engines(settings.method, settings.channels).map_err(MigrationError::untouched)?;
    line.iter().for_each(|line| observer.note(line));
    let weight = settings.accelerator_weight;
    let accelerator = settings.offload.as_ref().and_then(|offload| Accelerator::new(offload, &ram, weight));
    let engines = match &accelerator {
        Some(accelerator) => accelerator.engines(engines, settings.iaa_verify.verifies(settings.checksums)),
        None => engines,
    };
    let encoding = engines.encoding(settings.method).map_err(MigrationError::untouched)?;
    // What was chosen is required, so that it is not left out silently.
    let mut required = required_features(post_copy, settings.checksums, settings.delta_cache > 0);
    required.extend((!known.is_empty()).then_some(DEVICE_STATE));
    let mut offered = required.clone();
    offered.push(RETRANSMIT);
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
    let peer_events = events_in.clone();
    let occupied = Occupied::default();
    let monitor_call = occupied.clone();
    let of_devices = Arc::clone(&known);
    let tell_peer: OnConnectionEvent = Arc::new(move |news| {
        // Handled here, because the driver may be busy with the monitor's state for long.
        if let ConnectionEvent::Control(_, ControlEvent::Message(message, _)) = &news {
            match message {
                ControlMessage::DeviceCredit { device, up_to } if of_devices.credit(*device, *up_to).is_ok() => return,
                ControlMessage::DeviceLoaded { device } => return of_devices.loaded(*device),
                _ => {}
            }
        }
        if let ConnectionEvent::Control(_, ControlEvent::Lost(reason)) = &news {
            monitor_call.lost(format_args!("the destination was lost: {reason}"));
        }
        drop(peer_events.send(Event::Peer(news)));
    });
    let dialled = session::dial(&offer, cancel, &tell_peer);
    // A cancellation interrupts dialling, which then fails.
    let (link, session) = dialled.map_err(|error| match cancel.is_cancelled() {
        true => cancelled(),
        false => {
            let (refused, untouched) = (error.refused, MigrationError::untouched(&error));
            MigrationError { refused, dial: Some(Box::new(error)), ..untouched }
        }
    })?;
    observer.note(&format!("migration {}: {to} accepted it", session.id));
    if cancel.is_cancelled() {
        return Err(cancelled());
    }
    let state = RecordState::Source(SourceState::Started);
    let ledger = Ledger::new(settings.state_dir.as_deref(), &session, state, to.to_string(), &settings.monitor);
    let ledger = ledger.map_err(MigrationError::untouched)?;

    let cancel_events = events_in.clone();
    let monitor_call = occupied.clone();
    let _cancelling = cancel.on_cancel(move || {
        monitor_call.raise(CANCELLED);
        drop(cancel_events.send(Event::Cancelled));
    });
    let (lead, first) = SourceLead::begin(Peer::new(link), Arc::new(Abort::default()), settings.limits.telling);
    let hash_key = HashKey::random()
        .map_err(|error| MigrationError::untouched(format!("no random numbers for hashes of pages: {error}")))?;
    let mut driver = Driver {
        lead,
        accelerator,
        compression: Compression::new(encoding, engines, settings.channels, settings.max_cpus),
        vmm,
        cpu,
        to,
        security,
        observer,
        cancel,
        unsent: Arc::new(Unsent::none_of(&ram)),
        again: Arc::new(Retransmit::none_of(shapes(&ram))),
        ram: ram.clone(),
        log: Some(CaughtLog::new(log)),
        post_copy: PostCopy::No,
        ledger,
        window: new_window(&session, &settings),
        pacer: Arc::new(Pacer::new(settings.bandwidth)),
        redial: Redial::new(settings.limits.dial_pause),
        settings,
        session,
        events_in,
        tell_peer,
        occupied,
        moving: None,
        devices: Devices::new(known, devices),
        stats: Arc::default(),
        started: Instant::now(),
        phase: Phase::SettingUp,
        progress: Progress::default(),
        content_reported: 0,
        sent_before: Sent::default(),
        data_incarnation: 1,
        figures: DestinationFigures::default(),
        placement: Vec::new(),
        throttled: 0,
        hash_key,
        ended: false,
        left: None,
        unwritten: None,
        moved: (0, 0),
    };
    driver.report_if_broken();
    let end = lead_source(&mut driver, &events, first);
    driver.finish(end)
}

/// Returns the capabilities that a source with these settings requires of its destination, besides that for devices.
pub fn required_features(post_copy: bool, checksums: bool, deltas: bool) -> Vec<&'static str> {
    let chosen = [(true, GUEST_STATE), (post_copy, POST_COPY), (!checksums, UNCHECKED), (deltas, DELTA)];
    chosen.into_iter().filter(|(chosen, _)| *chosen).map(|(_, feature)| feature).collect()
}

/// Returns the error of a migration that was cancelled before anything was begun.
fn cancelled() -> MigrationError {
    MigrationError { cancelled: true, ..MigrationError::untouched(CANCELLED) }
}

fn new_window(session: &Session, settings: &Settings) -> Arc<Window> {
    Arc::new(Window::new(session.packet_size as u64, session.round_trip, settings.downtime))
}

/// The data plane.
#[derive(Debug)]
struct Moving {
    pipeline: Arc<Pipeline>,
    /// Carries the monitor's state, once.
    stream: Option<Arc<SendChannel>>,
    /// Carry the state of devices, where such channels were chosen.
    device_channels: Arc<Vec<SendChannel>>,
    /// The thread of the rounds, until it was joined.
    rounds: Option<(Sender<Order>, JoinHandle<()>)>,
}

impl Moving {
    /// Sends an order to the thread of the rounds. Where that thread has ended, its last message has the reason.
    fn order(&self, order: Order) {
        if let Some((orders, _)) = &self.rounds {
            let _ = orders.send(order);
        }
    }

    /// Waits for the thread of the rounds, which has ended or is being taken down.
    fn end_rounds(&mut self) {
        if let Some((orders, thread)) = self.rounds.take() {
            drop(orders);
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

struct Driver<'a> {
    lead: SourceLead,
    accelerator: Option<Accelerator>,
    /// The encoders, and the engines besides the CPU.
    compression: Compression,
    vmm: SourceMonitor<'a>,
    /// CPU time of the migration's threads at this side.
    cpu: CpuTime,
    to: &'a Address,
    security: &'a Security,
    observer: &'a dyn Observer,
    cancel: &'a Cancel,
    settings: Settings,
    /// Reconnects to the destination.
    redial: Redial,
    ram: GuestRam,
    /// The dirty log, until the rounds begin.
    log: Option<CaughtLog>,
    /// In post-copy: pages that the destination lacks.
    unsent: Arc<Unsent>,
    /// Pages that did not arrive as they were read.
    again: Arc<Retransmit>,
    post_copy: PostCopy,
    session: Session,
    ledger: Ledger,
    window: Arc<Window>,
    pacer: Arc<Pacer>,
    events_in: Sender<Event>,
    tell_peer: OnConnectionEvent,
    occupied: Occupied,
    moving: Option<Moving>,
    devices: Devices,
    stats: Arc<Mutex<RoundStats>>,
    started: Instant,
    phase: Phase,
    progress: Progress,
    /// Content bytes at the last tick.
    content_reported: u64,
    /// Figures of the channels that are closed.
    sent_before: Sent,
    /// Incarnation of the data channels.
    data_incarnation: u32,
    figures: DestinationFigures,
    placement: Vec<String>,
    /// How much the monitor slows its guest down, in percent.
    throttled: u8,
    /// Key of the hashes of sent pages, for blocks with huge pages.
    hash_key: HashKey,
    /// Whether the monitor has ended after its guest was moved.
    ended: bool,
    /// Why the monitor could not be ended after its guest was moved.
    left: Option<String>,
    /// Why the record could not be written, where the last attempt failed.
    unwritten: Option<String>,
    /// Bytes on the wire and in flight when they last changed.
    moved: (u64, u64),
}

impl SourceDriver for Driver<'_> {
    type Event = Event;

    fn lead(&mut self) -> &mut SourceLead {
        &mut self.lead
    }

    fn perform(&mut self, action: SourceAction) -> Option<SourceEvent> {
        tracing::debug!(?action, "switchover");
        let step = action.step();
        step.iter().for_each(|step| self.observer.step(Moment::Before, *step));
        let answer = self.act(action);
        step.iter().for_each(|step| self.observer.step(Moment::After, *step));
        answer
    }

    fn translate(&mut self, event: Event) -> Option<SourceEvent> {
        let follows = self.phase == Phase::PostCopy;
        match event {
            Event::Peer(news) => match self.lead.peer.handle(news)? {
                PeerEvent::Message(message, _share) => self.receive(message),
                PeerEvent::Lost(reason) => {
                    self.observer.note(&format!("the connection to the destination is lost: {reason}"));
                    self.lead.abort.lost(format_args!("the destination was lost: {reason}"));
                    if follows {
                        self.lead.give_up = self.delivery_deadline();
                        self.reconnect();
                        return None;
                    }
                    Some(SourceEvent::ConnectionLost)
                }
                PeerEvent::Connected => {
                    self.redial.connected();
                    if follows {
                        self.lead.give_up = None;
                        return None;
                    }
                    Some(SourceEvent::Connected)
                }
                PeerEvent::Unreachable(reason) => {
                    tracing::info!(reason, "the destination cannot be reached yet");
                    self.reconnect();
                    None
                }
            },
            Event::Rounds(news) => self.handle_rounds(news),
            Event::Device(news) => self.handle_device(news),
            Event::Broken(incarnation) if incarnation != self.data_incarnation => None,
            Event::Broken(_) if follows => {
                // All channels are made anew, the control channel too.
                self.lead.peer.close();
                None
            }
            Event::Broken(_) => self.lead.channels_broke(),
            Event::Cancelled => self.cancelled(),
        }
    }

    fn ended(&mut self, end: SourceEnd) -> Option<SourceEnd> {
        let stays = end == SourceEnd::Finished && self.follows_the_guest();
        (!stays).then_some(end)
    }

    fn late_end(&mut self) -> Option<SourceEnd> {
        (self.phase == Phase::PostCopy && self.post_copy.done().is_some()).then_some(SourceEnd::Finished)
    }

    fn tick(&mut self) {
        self.watch_progress();
        self.report_progress();
    }

    fn waiting_for(&self) -> Option<String> {
        let moments = &self.lead.moments;
        let lacks = |moment: Option<Instant>| moments.paused.is_some() && moment.is_none();
        let pages = lacks(moments.drained).then(|| "the last pages".to_owned());
        let state = lacks(moments.saved).then(|| MONITORS_STATE.to_owned());
        let all: Vec<_> = pages.into_iter().chain(state).chain(self.devices.known.waiting_for()).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

impl Driver<'_> {
    /// Performs an action and returns the event that follows from it at once, if any.
    fn act(&mut self, action: SourceAction) -> Option<SourceEvent> {
        match action {
            SourceAction::WriteRecord(state) => Some(self.write(state)),
            SourceAction::StartMigration => match self.begin_rounds() {
                Ok(()) => None,
                Err(reason) => {
                    // The event of the cancellation may still be queued.
                    self.lead.cancelled |= self.cancel.is_cancelled();
                    Some(SourceEvent::Failed { reason })
                }
            },
            SourceAction::Send(message) => {
                self.lead.peer.send(&ControlMessage::Switchover(message));
                None
            }
            // There is no relay here: confirms that the guest is paused and stays so.
            SourceAction::RelayShut => Some(match self.vmm.confirm_paused() {
                Ok(()) => SourceEvent::Guest(SourceGuest::Completed),
                Err(_) if self.vmm.has_ended() => SourceEvent::Guest(SourceGuest::Gone),
                Err(error) => SourceEvent::Failed { reason: error.to_string() },
            }),
            SourceAction::EndMigration => {
                self.lead.abort.raise(self.lead.switchover.reason());
                if let Some(moving) = &mut self.moving {
                    moving.end_rounds();
                }
                self.end_devices();
                let paused = self.lead.moments.pausing.is_some();
                Some(SourceEvent::Guest(match () {
                    () if self.vmm.has_ended() => SourceGuest::Gone,
                    () if paused => SourceGuest::Completed,
                    () => SourceGuest::Running,
                }))
            }
            SourceAction::Cont => Some(match self.resume_guest() {
                Ok(()) => SourceEvent::Guest(SourceGuest::Running),
                Err(_) if self.vmm.has_ended() => SourceEvent::Guest(SourceGuest::Gone),
                Err(reason) => SourceEvent::Failed { reason },
            }),
            SourceAction::AnnounceSelf => {
                if self.throttled > 0
                    && let Err(error) = self.vmm.throttle(0)
                {
                    self.observer.note(&format!("the guest stays slowed down: {error}"));
                }
                if let Err(error) = self.vmm.stays() {
                    self.observer.note(&error.to_string());
                }
                None
            }
            // In post-copy the monitor is still needed for the pages that follow.
            SourceAction::EndGuest if self.post_copy.begun().is_some() => {
                Some(SourceEvent::Guest(SourceGuest::Completed))
            }
            SourceAction::EndGuest => Some(self.end_guest()),
            SourceAction::Connect => {
                self.lead.peer.hang_up();
                if self.lead.switchover.decided() {
                    self.lead.give_up = self.lead.give_up.or_else(|| self.delivery_deadline());
                } else {
                    self.lead.give_up.get_or_insert(after(self.settings.limits.telling));
                }
                self.reconnect();
                None
            }
            SourceAction::Done(_) => unreachable!("the main loop handles the end"),
        }
    }

    /// Ends the monitor here, or keeps it: the guest runs at the destination.
    fn end_guest(&mut self) -> SourceEvent {
        match self.vmm.moved() {
            Ok(AfterMove::Kept) => SourceEvent::Guest(SourceGuest::Completed),
            Ok(AfterMove::Ended) => {
                self.ended = true;
                SourceEvent::Guest(SourceGuest::Gone)
            }
            Ok(AfterMove::RunsHere) => SourceEvent::Guest(SourceGuest::Running),
            Err(error) => {
                self.left = Some(error.to_string());
                SourceEvent::Failed { reason: error.to_string() }
            }
        }
    }

    fn write(&mut self, state: SourceState) -> SourceEvent {
        if state == SourceState::Aborted {
            // Before the channels are closed, so that the destination learns the reason.
            let reason = self.lead.switchover.reason();
            self.lead.peer.send(&ControlMessage::Failed { reason: reason.to_owned() });
            self.lead.abort.raise(reason);
        }
        match self.ledger.write(RecordState::Source(state)) {
            Ok(()) => {
                self.unwritten = None;
                self.lead.due = None;
                if state == SourceState::Committed {
                    self.phase = Phase::Committed;
                    self.lead.moments.decided = Some(Instant::now());
                    if let Some(moving) = self.moving.as_ref().filter(|_| self.post_copy.begun().is_some()) {
                        moving.order(Order::Stream);
                    }
                    self.lead.give_up = self.delivery_deadline();
                }
                SourceEvent::RecordWritten
            }
            Err(error) => {
                self.observer.note(&error.to_string());
                self.unwritten = Some(error.to_string());
                SourceEvent::RecordFailed
            }
        }
    }

    fn cancelled(&mut self) -> Option<SourceEvent> {
        let decided = self.lead.switchover.decided();
        if self.lead.switchover.may_stop() && !decided {
            self.lead.give_up = Some(Instant::now());
            return None;
        }
        self.lead.cancelled = true;
        if !decided {
            return Some(SourceEvent::Failed { reason: CANCELLED.into() });
        }
        // In post-copy the rest is still sent, but the source does not wait for a lost destination.
        if self.phase != Phase::PostCopy {
            self.observer.note("too late to cancel: the guest already belongs to the destination");
            self.lead.give_up = self.lead.give_up.or_else(|| self.delivery_deadline());
        } else if self.lead.peer.is_connected() {
            self.observer.note("too late to cancel: the rest of the guest's memory is being sent after it");
        } else {
            self.lead.give_up = self.delivery_deadline();
        }
        None
    }

    fn receive(&mut self, message: ControlMessage) -> Option<SourceEvent> {
        match message {
            ControlMessage::Ready { placement, .. } => {
                let placement: Vec<String> = placement.iter().map(|line| cleaned(line)).collect();
                placement.iter().for_each(|line| self.observer.note(&format!("placement: {line}")));
                self.placement = placement;
            }
            ControlMessage::SwitchoverAck => self.monitor_loaded_ahead(),
            ControlMessage::DeviceTaken { device } => self.device_loaded_ahead(device),
            ControlMessage::DeviceCredit { device, up_to } => {
                // Refused on arrival, and refused again here, with the reason.
                let reason = self.devices.known.credit(device, up_to).err()?;
                return Some(SourceEvent::Failed { reason });
            }
            ControlMessage::PostCopyReady => return self.destination_watches(),
            ControlMessage::PostCopyDone(figures) => return self.destination_has_all(figures),
            ControlMessage::Figures(figures) => self.figures = figures,
            ControlMessage::Switchover(message) => {
                return Some(self.lead.destination_says(message));
            }
            ControlMessage::Failed { reason } | ControlMessage::Refused { reason } => {
                return self.lead.destination_failed(&reason, self.observer);
            }
            unexpected => tracing::warn!(?unexpected, "not expected from a destination"),
        }
        None
    }

    fn handle_rounds(&mut self, news: RoundEvent) -> Option<SourceEvent> {
        if self.lead.abort.is_over() && !matches!(news, RoundEvent::Note(_) | RoundEvent::Failed(_)) {
            // The migration is being taken down: the guest is resumed, if it has to be, and runs at full speed.
            return None;
        }
        let outcome = match news {
            RoundEvent::Note(text) => {
                self.observer.note(&text);
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
                self.request_post_copy();
                Ok(())
            }
            RoundEvent::Failed(reason) => Err(reason),
            RoundEvent::Drained(when) => {
                self.lead.moments.drained = Some(when);
                return self.final_state_sent();
            }
        };
        outcome.err().map(|reason| SourceEvent::Failed { reason })
    }

    fn throttle(&mut self, percent: u8) {
        match self.vmm.throttle(percent) {
            Ok(()) => {
                self.throttled = percent;
                self.observer.note(&format!("the guest is held for {percent} % of the time"));
            }
            Err(error) => self.not_throttled(&error),
        }
    }

    /// Has the monitor go on slowing its guest down: a pause of the guest, or something on the host, may have ended it.
    fn keep_throttled(&mut self) {
        if self.throttled > 0
            && let Err(error) = self.vmm.throttle(self.throttled)
        {
            self.not_throttled(&error);
        }
    }

    fn not_throttled(&mut self, error: &VmmError) {
        self.throttled = 0;
        self.observer.note(&format!("the guest is not slowed down: {error}"));
        self.moving.iter().for_each(|moving| moving.order(Order::NotThrottled));
    }

    /// Opens the channels, sends the state that is saved ahead, and starts the rounds.
    fn begin_rounds(&mut self) -> Result<(), String> {
        self.phase = Phase::Rounds;
        let log = self.log.take().ok_or("the rounds were begun already")?;
        let ram = self.ram.clone();
        self.progress.total_bytes = ram.bytes();
        let context = self.send_context();
        let pipeline = self.open_ram_channels(&context, Some(self.cancel))?;
        let stream = self.session.open(self.security, self.to, ChannelKind::DeviceState, 0, &context);
        let stream = Arc::new(stream.map_err(|error| error.to_string())?);
        let device_channels = self.open_device_channels(&context)?;
        self.start_devices(&pipeline, &device_channels, &stream)?;
        let mut ahead = StateWriter::new(&stream, Part::Ahead, self.session.packet_size);
        let inside = self.occupied.enter(&self.lead.abort, None);
        let saved = self.vmm.save_ahead(&mut ahead).map_err(|error| format!("saving state ahead failed: {error}"));
        let finished = saved.and_then(|()| ahead.finish().map_err(|error| error.to_string()));
        drop(inside);
        let ahead = finished.map_err(|error| self.lead.abort.reason().unwrap_or(error))?;
        if ahead == 0 {
            self.monitor_loaded_ahead();
        }

        let (orders, orders_out) = channel();
        let events = self.events_in.clone();
        let state_size = self.vmm.state_size().map_err(|error| error.to_string())?;
        let convergence =
            Convergence::new(self.settings.downtime, self.settings.not_converging, self.settings.give_up_after);
        let rounds = Rounds {
            log: Box::new(log),
            search: PageSearch::new(Arc::clone(&pipeline), ram.clone(), self.session.packet_size),
            current: CurrentRound::new(&ram),
            ram,
            convergence,
            state_size,
            devices: Arc::clone(&self.devices.known),
            started: self.started,
            orders: orders_out,
            news: move |news| drop(events.send(Event::Rounds(news))),
            totals: self.lead.peer.sender(),
            stats: Arc::clone(&self.stats),
            unsent: Arc::clone(&self.unsent),
            again: Arc::clone(&self.again),
            accelerator: self.accelerator.clone(),
            written: self.accelerator.iter().flat_map(|_| no_pages(&self.ram)).collect(),
            may_stop: self.may_stop(),
            held: Held::default(),
            retries: 0,
            abort: Arc::clone(&self.lead.abort),
        };
        let panicked = self.events_in.clone();
        let run = move || {
            // Reported, because the driver waits for messages of this thread.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| rounds.run())) {
                let reason = format!("the thread of the rounds panicked: {}", monitor::panic_text(panic));
                drop(panicked.send(Event::Rounds(RoundEvent::Failed(reason))));
            }
        };
        let thread = std::thread::Builder::new().name("rounds".into());
        let rounds = cpu_time::spawn(thread, run).map_err(|error| format!("no thread for the rounds: {error}"))?;
        self.moving = Some(Moving { pipeline, stream: Some(stream), device_channels, rounds: Some((orders, rounds)) });
        self.lead.due = self.rounds_due();
        Ok(())
    }

    /// Returns the deadline of the rounds: when their time is over, or when a byte of the guest must have moved. Between two rounds
    /// the thread of the rounds gives up by itself, with the reason; this deadline ends a round that lasts too long.
    fn rounds_due(&self) -> Option<(Instant, &'static str)> {
        let over = self.settings.give_up_after.map(|time| {
            let left = time.saturating_sub(self.started.elapsed());
            (after(left.saturating_add(ROUND_GRACE)), "sending the guest's memory (time limit)")
        });
        let stalled = self.settings.limits.stall;
        let stalled = stalled.map(|time| (after(time), "waiting for anything of the guest to move (stall limit)"));
        [over, stalled].into_iter().flatten().min_by_key(|(deadline, _)| *deadline)
    }

    /// Moves the deadline of the rounds where bytes of the guest have moved.
    fn watch_progress(&mut self) {
        let moved = (self.sent().wire_bytes, self.window.in_flight());
        if moved != self.moved {
            self.moved = moved;
            self.await_progress();
        }
    }

    /// Sets the deadline of the rounds anew. Other limits hold once the guest is being paused, in post-copy, and where the migration is
    /// being taken down.
    fn await_progress(&mut self) {
        let rounds = self.phase == Phase::Rounds && self.moving.is_some() && matches!(self.post_copy, PostCopy::No);
        if rounds && self.lead.moments.pausing.is_none() && !self.lead.abort.is_over() {
            self.lead.due = self.rounds_due();
        }
    }

    /// Sends an event to the driver when the data channels of this incarnation have failed.
    fn report_if_broken(&self) {
        let (broken, incarnation) = (self.events_in.clone(), self.data_incarnation);
        self.lead.abort.on_end(move || drop(broken.send(Event::Broken(incarnation))));
    }

    fn send_context(&self) -> SendContext {
        SendContext {
            normal_page_ratio: NormalPageRatio::new(self.settings.normal_page_ratio),
            // Not in post-copy: a page that was lost with a connection must be sent again although it is the same.
            hash_key: self.post_copy.begun().is_none().then(|| self.hash_key.clone()),
            window: Arc::clone(&self.window),
            pacer: Arc::clone(&self.pacer),
            abort: Arc::clone(&self.lead.abort),
            compression: self.compression.clone(),
            rules: self.session.rules(),
            accelerator: self.accelerator.clone(),
            again: self.session.has(RETRANSMIT).then(|| Arc::clone(&self.again)),
            // More than all of RAM and some spare places is of no use, and might not be available.
            delta_cache: self.settings.delta_cache.min(self.ram.bytes().saturating_add(self.ram.bytes() / 8)) as usize
                / usize::from(self.session.channels),
            delta_blocks: None,
            devices: Some(Arc::clone(&self.devices.known)),
        }
    }

    /// Opens the RAM channels of this incarnation and returns the pipeline over them. Without a `cancel` this cannot be cancelled.
    fn open_ram_channels(&self, context: &SendContext, cancel: Option<&Cancel>) -> Result<Arc<Pipeline>, String> {
        let never = Cancel::new();
        let cancel = cancel.unwrap_or(&never);
        let channels = self.session.open_ram_channels(self.security, self.to, context, cancel);
        let channels = channels.map_err(|error| error.to_string())?;
        let pool = BatchPool::new(BATCHES_PER_CHANNEL * channels.len(), 0);
        let (window, pacer) = (Arc::clone(&self.window), Arc::clone(&self.pacer));
        let pipeline = Pipeline {
            channels,
            pool: Arc::clone(&pool),
            window: Arc::clone(&window),
            page_size: sterna_memory::PAGE_SIZE,
        };
        self.lead.abort.on_end(move || {
            pacer.set_limit(None);
            window.close();
            pool.close();
        });
        Ok(Arc::new(pipeline))
    }

    /// Waits for the threads of the data plane, whose connections are closed, and keeps its figures.
    fn end_data_plane(&mut self) {
        self.sent_before = self.sent();
        if let Some(mut moving) = self.moving.take() {
            moving.end_rounds();
            self.post_copy.join_server();
            self.end_devices();
            // The threads that shared these channels have ended.
            let stream = moving.stream.and_then(Arc::into_inner);
            let of_devices = Arc::into_inner(moving.device_channels).unwrap_or_default();
            stream.into_iter().chain(of_devices).for_each(SendChannel::join);
            if let Ok(pipeline) = Arc::try_unwrap(moving.pipeline) {
                pipeline.channels.into_iter().for_each(SendChannel::join);
            }
        }
    }

    /// Has the monitor wait until the input and output under way has written guest RAM.
    fn settle_io(&mut self) -> Result<(), String> {
        let inside = self.occupied.enter(&self.lead.abort, None);
        let settled = self.vmm.settle_io();
        drop(inside);
        settled.map_err(|error| format!("the guest's input and output does not settle: {error}"))?;
        // The time limit does not count the wait, in which no page could be sent.
        self.await_progress();
        self.moving.iter().for_each(|moving| moving.order(Order::Settled));
        self.keep_throttled();
        Ok(())
    }

    /// Stops the guest, has the last round sent, and sends the state meanwhile.
    fn switch_over(&mut self) -> Result<(), String> {
        let Some(moving) = &self.moving else { return Ok(()) };
        if self.lead.abort.is_over() {
            return Ok(());
        }
        self.vmm.may_pause().map_err(|error| error.to_string())?;
        // `sterna recover` resumes only a guest that was paused by its migration.
        self.ledger.note_pausing(true).map_err(|error| error.to_string())?;
        self.phase = Phase::SwitchingOver;
        self.observer.note("stopping the guest");
        // Before the call: the guest may have stopped even where pausing fails.
        self.lead.moments.pausing = Some(Instant::now());
        // In `pause` a monitor may wait for a device that is saved ahead, and that device for the destination.
        let inside = self.occupied.enter(&self.lead.abort, None);
        let paused = self.vmm.pause();
        drop(inside);
        paused.map_err(|error| format!("the monitor does not pause the guest: {error}"))?;
        self.lead.moments.paused = Some(Instant::now());
        self.set_urgent(true);
        self.lead.due = Some((after(self.step_time()), "sending the last pages and the state"));
        moving.order(Order::LastRound);
        Ok(())
    }

    /// Resumes the guest, because the downtime would be too long after all.
    fn run_on(&mut self) -> Result<(), String> {
        self.observer.note("the guest had dirtied too much until it was paused: it runs on");
        self.resume_guest()?;
        self.keep_throttled();
        self.ledger.note_pausing(false).map_err(|error| error.to_string())?;
        (self.phase, self.lead.due) = (Phase::Rounds, self.rounds_due());
        Ok(())
    }

    fn resume_guest(&mut self) -> Result<(), String> {
        self.vmm.resume().map_err(|error| format!("the monitor does not resume the guest: {error}"))?;
        self.lead.moments.runs_on();
        self.set_urgent(false);
        Ok(())
    }

    /// Makes the work of accelerators urgent while the guest is paused, and lifts the limit of CPU time.
    fn set_urgent(&self, urgent: bool) {
        self.compression.set_urgent(urgent);
        if let Some(accelerator) = &self.accelerator {
            accelerator.set_urgent(urgent);
        }
    }

    /// Sends the state of the guest, which stays paused, while its last pages are on their way.
    fn send_state(&mut self) -> Result<(), String> {
        let Some(moving) = &self.moving else { return Ok(()) };
        if self.lead.abort.is_over() {
            return Ok(());
        }
        self.devices.known.save();
        let stream = moving.stream.as_ref().ok_or("there is no stream channel")?;
        let mut state = StateWriter::new(stream, Part::Final, self.session.packet_size);
        // The deadline ends the call where the destination does not read and so blocks the monitor, on this thread.
        let deadline = self.lead.due.map(|(deadline, step)| {
            let devices = Arc::clone(&self.devices.known);
            let lacks = move || [Some(MONITORS_STATE.to_owned()), devices.waiting_for()];
            let reason = move || too_long(step, Some(lacks().into_iter().flatten().collect::<Vec<_>>().join(", ")));
            (deadline, Box::new(reason) as _)
        });
        let inside = self.occupied.enter(&self.lead.abort, deadline);
        let saved = self.vmm.save(&mut state).map_err(|error| format!("saving the guest's state failed: {error}"));
        let finished = saved.and_then(|()| state.finish().map_err(|error| error.to_string()));
        drop(inside);
        let bytes = match finished {
            Ok(bytes) => bytes,
            // The reason is in an event that is queued already, or the destination will send it.
            Err(_) if self.lead.abort.is_over() => return Ok(()),
            Err(error) => return Err(error),
        };
        self.lead.moments.saved = Some(Instant::now());
        tracing::debug!(bytes, "the guest's state is handed over");
        Ok(())
    }

    /// Returns the deadline for delivering the decision to a lost destination. In post-copy there is none unless the migration was
    /// cancelled: the memory that is still here exists nowhere else.
    fn delivery_deadline(&self) -> Option<Instant> {
        let waits_for_ever = self.post_copy.begun().is_some() && !self.lead.cancelled;
        (!waits_for_ever).then(|| after(self.settings.limits.delivery))
    }

    fn step_time(&self) -> Duration {
        self.settings.limits.step.max(self.settings.downtime.saturating_mul(10))
    }

    fn reconnect(&mut self) {
        self.session.incarnation = self.lead.peer.begin_anew();
        let (to, security, session) = (self.to.clone(), self.security.clone(), self.session.clone());
        self.redial.dial(to, security, session, Arc::clone(&self.tell_peer));
    }
}
