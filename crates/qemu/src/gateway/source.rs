//! `sterna send`: the driver beside the source QEMU.
//!
//! One thread runs one loop: it passes events (from the peer, QEMU, the readers, cancellation, time) to the switchover's state
//! machine and performs the actions that the machine returns, in that order. Other threads move the bytes.

mod report;
mod rounds;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_codec::{Engine, EngineMissing};
use sterna_engine::abort::Abort;
use sterna_engine::cancel::Cancel;
use sterna_engine::migration::DELTA;
use sterna_engine::pacer::Pacer;
use sterna_engine::record_file::RecordFile;
use sterna_engine::report::{Observer, Progress, Report};
use sterna_engine::send::{Compression, DeltaBlocks, SendContext, Sent};
use sterna_engine::session::{
    self, Backoff, ConnectionEvent, DIAL_PAUSE, Offer, OnConnectionEvent, Peer, PeerEvent, Redial, Session,
    SourceDriver, SourceLead, lead_source,
};
use sterna_engine::transport::Address;
use sterna_engine::window::Window;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_offload::Operation;
use sterna_wire::control::{ControlMessage, DestinationFigures, ReturnPath, Totals};
use sterna_wire::switchover::{Moment, RecordState, SourceAction, SourceEvent, SourceGuest, SourceState};
use sterna_wire::text::cleaned;

use self::rounds::RoundsWatch;
use super::backlog::Backlog;
use super::claim::Claim;
use super::features::{FEATURES, WITH_DELTAS};
use super::layout::Start;
use super::plane::{Plane, WhenAborted};
use super::qemu::{self, QemuEvent};
use super::recovery::MAX_DIAL_PAUSE;
use super::sockets::{Listens, SocketDir, SocketPlace};
use super::source_stream::{StreamNews, read_start};
use super::{ErrorKind, GatewayError, SendMode, SendOptions, direct, fault};
use crate::qmp::{Qmp, QmpError};
use crate::settings::{Plan, RequiredSettings, Restore, Role, Settings};
use crate::stream::{MainReader, ReturnMessage};

/// How long QEMU may take to connect to our sockets after the command `migrate`.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// How long `send` tries to deliver the decision to a lost destination. After that, `sterna recover` has to deliver it.
const DELIVERY_TIME: Duration = Duration::from_secs(60);
/// How long `send` tries to deliver an abort to a lost destination, which presumes an abort anyway.
const TELLING_TIME: Duration = Duration::from_secs(5);
/// Estimated time of commit and start besides loading: two records written durably on each side, and `cont`.
const COMMIT_ESTIMATE: Duration = Duration::from_millis(20);
/// Minimum time limit of a step while the guest is paused: the destination loads, or QEMU completes.
const MIN_STEP_LIMIT: Duration = Duration::from_secs(30);
/// QEMU never considers a smaller downtime limit as reached.
const MIN_DOWNTIME_LIMIT: Duration = Duration::from_millis(1);

/// What wakes the driver.
#[derive(Debug)]
enum Event {
    Peer(ConnectionEvent),
    Qemu(QemuEvent),
    Stream(StreamNews),
    Drained(Vec<u64>),
    Broken,
    Cancelled,
}

/// Moves the guest of the QEMU at `options.qmp` to `options.to`.
///
/// # Errors
/// Only for failures before the guest is touched; the report describes every other end.
pub fn send(options: &SendOptions, cancel: &Cancel, observer: &dyn Observer) -> Result<Report, GatewayError> {
    let qmp = Qmp::connect(&options.qmp).map_err(GatewayError::untouched)?;
    // Held to the end: keeps every other sterna from this QEMU.
    let _claim = Claim::of(&qmp).map_err(GatewayError::untouched)?;
    let settings = Settings::read(&qmp).map_err(GatewayError::untouched)?;
    let refusals = settings.refusals(Role::Source);
    if !refusals.is_empty() {
        return Err(GatewayError::untouched(format_args!("this guest cannot be moved: {}", refusals.join("; "))));
    }
    if settings.status != "running" {
        // The destination starts every guest that it receives: a guest that an operator paused must not run because it moved.
        return Err(GatewayError::untouched(format_args!(
            "the guest does not run (its state is {}): only running guests are moved; let it run first",
            settings.status
        )));
    }
    qemu::refuse_if_claimed(&options.state_dir, &qmp)?;
    qemu::check_state_directory(&options.state_dir).map_err(GatewayError::untouched)?;
    // Before the destination is contacted: a `migrate` that QEMU refuses would end the destination's QEMU.
    qemu::wait_cleaned_up(&qmp).map_err(GatewayError::untouched)?;
    let machine = qemu::machine(&qmp, options.downtime);
    let not_direct = match try_direct(&qmp, options, cancel, observer)? {
        Direct::Done(report) => return Ok(*report),
        Direct::Not(why) => why,
    };
    qemu::check_sockets(&options.socket_dir, Listens::Sterna, &qmp).map_err(GatewayError::untouched)?;
    observer.note(&format!("source: {} ({})", machine.monitor, machine.machine_type));
    let engines = options.qatzip.engines(options.method, options.channels);
    let (engines, line) = engines.map_err(GatewayError::untouched)?;
    line.iter().for_each(|line| observer.note(line));
    let encoding = engines.encoding(options.method).map_err(GatewayError::untouched)?;

    let (events_in, events) = channel();
    let offer = Offer {
        to: &Address::from(&options.to),
        security: &options.security,
        channels: options.channels,
        packet_size: options.packet_size,
        machine: machine.clone(),
        mode: sterna_wire::control::Mode::Owner,
        features: if options.delta_cache > 0 { WITH_DELTAS } else { FEATURES },
        encoding,
        patience: Duration::ZERO,
    };
    let peer_events = events_in.clone();
    let tell_peer: OnConnectionEvent = Arc::new(move |news| drop(peer_events.send(Event::Peer(news))));
    let (link, session) = session::dial(&offer, cancel, &tell_peer).map_err(GatewayError::untouched)?;
    observer.note(&format!("migration {}: {} accepted it", session.id, options.to));
    if cancel.is_cancelled() {
        return Err(GatewayError::untouched("cancelled").of(ErrorKind::Cancelled));
    }

    let state = RecordState::Source(SourceState::Started);
    let mut record = qemu::new_record(&session, state, options.to.clone(), &options.qmp, &qmp);
    record.source_after = options.source_after;
    let mut record = RecordFile::create(&options.state_dir, record).map_err(GatewayError::untouched)?;

    let window = Arc::new(Window::new(session.packet_size as u64, session.round_trip, options.downtime));
    let ours = window.allowance() + COMMIT_ESTIMATE;
    let limit = options.downtime.saturating_sub(ours).max(MIN_DOWNTIME_LIMIT);
    let plan = Settings::plan(&qmp, &wanted(options, limit)).map_err(GatewayError::untouched)?;
    record.amend(|record| record.settings_before = serde_json::to_value(plan.before()).ok());
    observer.note(&format!(
        "QEMU's downtime-limit is {} ms: {} ms less what draining, loading and committing take",
        limit.as_millis(),
        options.downtime.as_millis()
    ));

    let abort = Arc::new(Abort::default());
    let cancelled = events_in.clone();
    let _cancelling = cancel.on_cancel(move || {
        let _ = cancelled.send(Event::Cancelled);
    });
    let broken = events_in.clone();
    abort.on_end(move || {
        let _ = broken.send(Event::Broken);
    });
    let backlog = Backlog::default();
    qemu::watch(&qmp, backlog.entry(), {
        let events_in = events_in.clone();
        move |event| events_in.send(Event::Qemu(event)).is_ok()
    });

    let deltas = (options.delta_cache > 0 && session.has(DELTA)).then(Arc::default);
    let (lead, first) = SourceLead::begin(Peer::new(link), abort, TELLING_TIME);
    let mut driver = Driver {
        lead,
        options,
        compression: Compression::new(encoding, engines, options.channels, options.max_cpus),
        observer,
        qmp,
        record,
        plan: Some(plan),
        restore: None,
        session,
        redial: Redial::with(Backoff::new(DIAL_PAUSE).up_to(MAX_DIAL_PAUSE)),
        window,
        events_in,
        tell_peer,
        moving: None,
        started: Instant::now(),
        figures: DestinationFigures::default(),
        placement: Vec::new(),
        progress: Progress::default(),
        watch: RoundsWatch::new(options.downtime),
        content_reported: 0,
        migrating: false,
        accepted: false,
        deltas,
        delta_cache: 0,
        no_deltas: None,
        cancel,
        rounds: 0,
        source_left: None,
        unwritten: None,
        until: options.waits.total.map(session::after),
        moved: (0, 0),
        machine_name: format!("{} {}", machine.monitor, machine.machine_type),
        not_direct,
        backlog,
    };
    let end = lead_source(&mut driver, &events, first);
    Ok(driver.finish(end))
}

/// Returns the settings that QEMU's own migration needs.
pub(super) fn wanted(options: &SendOptions, downtime_limit: Duration) -> RequiredSettings {
    RequiredSettings {
        role: Role::Source,
        channels: options.channels as u8,
        downtime_limit: Some(downtime_limit),
        pause_before_switchover: false,
    }
}

/// The outcome of [`try_direct`].
enum Direct {
    /// The migration ran in direct mode.
    Done(Box<Report>),
    /// The guest was not touched, and QEMU's stream is used instead, for this reason.
    Not(String),
}

/// Moves the guest in direct mode if that is possible and allowed by the options.
fn try_direct(
    qmp: &Qmp,
    options: &SendOptions,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Direct, GatewayError> {
    let stream = |why: String| {
        if options.method.requires(Engine::Iaa) {
            return Err(GatewayError::untouched(format_args!(
                "--engine iaa needs direct mode, and the guest cannot be moved directly: {why}"
            )));
        }
        if let Some(option) = options.direct.for_the_guest() {
            return Err(GatewayError::untouched(format_args!(
                "{option} needs direct mode, and the guest cannot be moved directly: {why}"
            )));
        }
        let unused = options.direct.for_speed();
        if !unused.is_empty() {
            observer.note(&format!("{}: not used, because it needs direct mode", unused.join(", ")));
        }
        observer.note(&format!("mode: stream, by QEMU's own migration; not direct: {why}"));
        Ok(Direct::Not(why))
    };
    if options.mode == SendMode::Stream {
        return stream("--mode stream was given".into());
    }
    let must = options.mode == SendMode::Direct;
    let ready = match direct::prepare(qmp) {
        Ok(ready) => ready,
        Err(why) if must => {
            return Err(GatewayError::untouched(format_args!(
                "the guest cannot be moved directly (--mode direct): {why}"
            ))
            .of(direct::refusal_kind(qmp)));
        }
        Err(why) => return stream(why),
    };
    observer.note(&format!("mode: direct, by {}", ready.tracking()));
    let offload = direct::offload(&options.direct).map_err(GatewayError::untouched)?;
    if let Some(offload) = &offload {
        observer.note(&offload.summary().to_string());
    }
    let compresses = offload.as_ref().is_some_and(|offload| offload.accelerates(Operation::Deflate));
    if options.method.requires(Engine::Iaa) && !compresses {
        let missing = EngineMissing { engine: Engine::Iaa };
        return Err(GatewayError::untouched(format_args!(
            "{missing}; name one by --accel (`sterna accel list` says what is here)"
        )));
    }
    match direct::send(ready, qmp, options, offload, cancel, observer) {
        Ok(report) => Ok(Direct::Done(Box::new(report))),
        // Only the destination could know this reason. The guest was not touched.
        Err(direct::NotSent { refused: true, reason, .. }) if !must => stream(reason),
        Err(direct::NotSent { kind, reason, .. }) => Err(GatewayError::new(reason).of(kind)),
    }
}

/// The data plane, and the sockets of QEMU that the driver itself uses.
#[derive(Debug)]
struct Moving {
    plane: Plane,
    return_path: UnixStream,
    _sockets: SocketDir,
}

struct Driver<'a> {
    lead: SourceLead,
    options: &'a SendOptions,
    compression: Compression,
    observer: &'a dyn Observer,
    qmp: Qmp,
    record: RecordFile,
    /// QEMU's settings, to be applied once the record is on the disk.
    plan: Option<Plan>,
    restore: Option<Restore>,
    session: Session,
    /// Connects to a lost destination again.
    redial: Redial,
    window: Arc<Window>,
    events_in: Sender<Event>,
    tell_peer: OnConnectionEvent,
    moving: Option<Moving>,
    started: Instant,
    figures: DestinationFigures,
    placement: Vec<String>,
    progress: Progress,
    watch: RoundsWatch,
    /// Bytes of normal pages at the last tick.
    content_reported: u64,
    migrating: bool,
    /// QEMU has accepted our `migrate`, or may have: any migration that it now has is ours.
    accepted: bool,
    /// The blocks of which the destination accepts deltas; none if it accepts no deltas.
    deltas: Option<Arc<DeltaBlocks>>,
    /// Maximum bytes of pages kept for deltas.
    delta_cache: u64,
    /// Why no deltas are sent although the options ask for them.
    no_deltas: Option<&'static str>,
    cancel: &'a Cancel,
    /// Rounds over the dirty pages, queried before QEMU is ended.
    rounds: u64,
    /// Why the source QEMU still lives although it was to be ended.
    source_left: Option<String>,
    /// Why the last attempt to write the record failed.
    unwritten: Option<String>,
    /// When the guest must have been stopped at the latest.
    until: Option<Instant>,
    /// Bytes on the wire and in flight when they last changed.
    moved: (u64, u64),
    machine_name: String,
    /// Why the migration is not in direct mode.
    not_direct: String,
    /// Events of QEMU that have not been handled.
    backlog: Backlog,
}

impl SourceDriver for Driver<'_> {
    type Event = Event;

    fn lead(&mut self) -> &mut SourceLead {
        &mut self.lead
    }

    fn perform(&mut self, action: SourceAction) -> Option<SourceEvent> {
        let step = action.step();
        fault::point(Moment::Before, step);
        let answer = self.act(action);
        fault::point(Moment::After, step);
        answer
    }

    fn translate(&mut self, event: Event) -> Option<SourceEvent> {
        match event {
            Event::Peer(news) => match self.lead.peer.handle(news)? {
                PeerEvent::Message(message, _share) => self.on_message(message),
                PeerEvent::Lost(reason) => {
                    self.observer.note(&format!("the connection to the destination is lost: {reason}"));
                    self.lead.abort.lost(format_args!("the destination was lost: {reason}"));
                    Some(SourceEvent::ConnectionLost)
                }
                PeerEvent::Connected => {
                    self.redial.connected();
                    Some(SourceEvent::Connected)
                }
                PeerEvent::Unreachable(reason) => {
                    tracing::info!(reason, "the destination cannot be reached yet");
                    self.reconnect();
                    None
                }
            },
            Event::Qemu(event) => {
                self.backlog.handled();
                self.on_qemu_event(event)
            }
            Event::Stream(news) => self.on_stream_news(news),
            Event::Drained(ram) => {
                self.lead.moments.drained = Some(Instant::now());
                self.lead.due = Some((Instant::now() + self.step_time(), "loading at the destination"));
                let Sent { normal_pages, zero_pages, .. } = self.sent();
                self.lead.peer.send(&ControlMessage::Totals(Totals { ram, normal_pages, zero_pages }));
                Some(SourceEvent::FinalStateSent)
            }
            Event::Broken => self.lead.channels_broke(),
            Event::Cancelled => {
                if self.lead.switchover.may_stop() {
                    self.lead.give_up = Some(Instant::now());
                    return None;
                }
                if self.lead.switchover.decided() {
                    self.observer.note("too late to cancel: the guest already belongs to the destination");
                    return None;
                }
                self.lead.cancelled = true;
                Some(SourceEvent::Failed { reason: "cancelled".into() })
            }
        }
    }

    fn tick(&mut self) {
        self.watch_progress();
        self.report_progress();
    }
}

impl Driver<'_> {
    /// Performs an action. Returns the event that answers it, if that is known at once.
    fn act(&mut self, action: SourceAction) -> Option<SourceEvent> {
        tracing::debug!(?action, "switchover");
        match action {
            SourceAction::WriteRecord(state) => {
                if state == SourceState::Aborted {
                    self.lead.abort.raise(self.lead.switchover.reason());
                }
                match self.record.write(RecordState::Source(state)) {
                    Ok(()) => {
                        self.unwritten = None;
                        self.lead.due = None;
                        if state == SourceState::Committed {
                            self.lead.moments.decided = Some(Instant::now());
                            self.lead.give_up = Some(Instant::now() + DELIVERY_TIME);
                        }
                        Some(SourceEvent::RecordWritten)
                    }
                    Err(error) => {
                        self.observer.note(&error.to_string());
                        self.unwritten = Some(error.to_string());
                        Some(SourceEvent::RecordFailed)
                    }
                }
            }
            SourceAction::StartMigration => match self.start_migration() {
                Ok(()) => {
                    self.await_progress();
                    None
                }
                Err(error) => {
                    // The event `Cancelled` may still be queued.
                    self.lead.cancelled |= self.cancel.is_cancelled();
                    Some(SourceEvent::Failed { reason: error.to_string() })
                }
            },
            SourceAction::Send(message) => {
                self.lead.peer.send(&ControlMessage::Switchover(message));
                None
            }
            SourceAction::RelayShut => {
                self.lead.due = Some((Instant::now() + self.step_time(), "completing at the source QEMU"));
                self.permit_completion().err().map(|reason| SourceEvent::Failed { reason })
            }
            SourceAction::EndMigration => Some(self.end_migration()),
            SourceAction::Cont => Some(match qemu::cont(&self.qmp) {
                Ok(()) => SourceEvent::Guest(SourceGuest::Running),
                Err(error) => {
                    SourceEvent::Failed { reason: format!("the source QEMU does not resume the guest: {error}") }
                }
            }),
            SourceAction::AnnounceSelf => {
                // The guest stays here: QEMU's settings are restored.
                self.restore = None;
                if self.accepted {
                    qemu::announce(&self.qmp);
                }
                None
            }
            SourceAction::Connect => {
                self.lead.peer.hang_up();
                let time = if self.lead.switchover.decided() { DELIVERY_TIME } else { TELLING_TIME };
                self.lead.give_up.get_or_insert(Instant::now() + time);
                self.reconnect();
                None
            }
            SourceAction::EndGuest => {
                self.count_rounds();
                let event = qemu::end_source(&self.qmp, self.record.record());
                if let SourceEvent::Failed { reason } = &event {
                    self.source_left = Some(reason.clone());
                }
                Some(event)
            }
            SourceAction::Done(_) => unreachable!("the loop ends before it is performed"),
        }
    }

    fn on_message(&mut self, message: ControlMessage) -> Option<SourceEvent> {
        match message {
            ControlMessage::Ready { placement, deltas } => {
                let placement: Vec<String> = placement.iter().map(|line| cleaned(line)).collect();
                placement.iter().for_each(|line| self.observer.note(&format!("placement: {line}")));
                self.placement = placement;
                self.settle_deltas(&deltas);
                if let Some(moving) = &self.moving {
                    moving.plane.sync.open();
                }
                None
            }
            ControlMessage::ReturnPath(message) => {
                match message {
                    // Success is reported by `Prepared`; SHUT(0) is relayed when the switchover requires it.
                    ReturnPath::Shut(0) => return None,
                    // QEMU sends 1 for every reason.
                    ReturnPath::Shut(_) => {
                        let reason = "the destination QEMU could not load the guest: see its output".into();
                        return Some(SourceEvent::Failed { reason });
                    }
                    ReturnPath::Pong(_) | ReturnPath::SwitchoverAck => {}
                }
                let relayed = self.return_message(message.into());
                relayed.err().map(|error| SourceEvent::Failed { reason: error.to_string() })
            }
            ControlMessage::Switchover(message) => Some(self.lead.destination_says(message)),
            ControlMessage::Figures(figures) => {
                self.figures = figures;
                None
            }
            ControlMessage::Failed { reason } | ControlMessage::Refused { reason } => {
                self.lead.destination_failed(&reason, self.observer)
            }
            unexpected => {
                tracing::warn!(?unexpected, "unexpected message from the destination");
                None
            }
        }
    }

    /// Enables deltas of the blocks in `accepted`, which the destination names before the first page.
    fn settle_deltas(&mut self, accepted: &[u16]) {
        if self.options.delta_cache == 0 {
            return;
        }
        let shapes = self.moving.as_ref().and_then(|moving| moving.plane.sync.shapes());
        let why = match (&self.deltas, shapes) {
            (None, _) => "the destination takes none: its pages go through QEMU's own stream, or its sterna is older",
            (Some(_), _) if accepted.is_empty() => "the destination writes into no RAM block directly",
            (Some(deltas), Some(shapes)) => {
                self.delta_cache = deltas.set(shapes, accepted, self.options.delta_cache, self.options.channels);
                return;
            }
            (Some(_), None) => "the destination was ready before the guest's RAM blocks were known",
        };
        self.observer.note(&format!("deltas are not possible: {why}; pages go whole"));
        self.no_deltas = Some(why);
    }

    fn on_qemu_event(&mut self, event: QemuEvent) -> Option<SourceEvent> {
        match event {
            QemuEvent::Stopped => {
                self.compression.set_urgent(true);
                self.lead.moments.stands();
                if self.lead.moments.drained.is_none() && self.accepted {
                    self.lead.due = Some((Instant::now() + self.step_time(), "sending the last pages"));
                }
                self.stopped_by_another()
            }
            QemuEvent::Resumed => {
                self.compression.set_urgent(false);
                self.lead.moments.runs_on();
                self.lead.due = None;
                self.await_progress();
                // An operator has resumed a guest that already belongs to the destination.
                self.lead.switchover.decided().then_some(SourceEvent::Guest(SourceGuest::Running))
            }
            QemuEvent::Gone if qemu::has_ended(self.record.record().qemu) => {
                Some(SourceEvent::Guest(SourceGuest::Gone))
            }
            QemuEvent::Gone => Some(SourceEvent::Failed { reason: "the source QEMU closed its QMP socket".into() }),
            QemuEvent::Migration(_) if !self.migrating => None,
            QemuEvent::Migration(status) => match status.as_str() {
                "completed" => Some(SourceEvent::Guest(SourceGuest::Completed)),
                // A consequence of the broken channel, whose reason may still be queued.
                "failed" | "cancelled" if self.lead.awaits_last_words() => None,
                "failed" | "cancelled" => {
                    let why = qemu::failure(&self.qmp).unwrap_or_else(|| format!("the source QEMU says {status}"));
                    // The first reason tells more than QEMU's error about closed sockets.
                    let reason = self.lead.abort.reason().unwrap_or(why);
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
        (paused && !self.lead.switchover.decided()).then(|| SourceEvent::Failed {
            reason: format!("the guest stopped during the migration (QEMU: {status}); only a running guest is moved"),
        })
    }

    fn on_stream_news(&mut self, news: StreamNews) -> Option<SourceEvent> {
        match news {
            StreamNews::Started { ram, blocks, machine } => {
                self.progress.total_bytes = ram;
                tracing::info!(?blocks, machine, "the stream has begun");
            }
            StreamNews::RamEnd { .. } => self.drain(),
            StreamNews::Ended => {}
        }
        None
    }

    fn drain(&mut self) {
        let Some(moving) = &mut self.moving else { return };
        let events = self.events_in.clone();
        let waiting = moving.plane.when_drained(move |ram| {
            let _ = events.send(Event::Drained(ram));
        });
        if let Err(error) = waiting {
            self.lead.abort.raise(format_args!("no thread for draining the channels: {error}"));
        }
    }

    fn start_migration(&mut self) -> Result<(), GatewayError> {
        let (sockets, listener) = SocketPlace::find(&self.options.socket_dir, self.qmp.peer_pid())
            .and_then(|place| SocketDir::listening(&place, self.session.id))
            .map_err(|error| GatewayError::new(format!("cannot make the private socket for QEMU: {error}")))?;
        let context = SendContext {
            normal_page_ratio: Default::default(),
            hash_key: None,
            window: Arc::clone(&self.window),
            pacer: Arc::new(Pacer::new(self.options.bandwidth)),
            abort: Arc::clone(&self.lead.abort),
            compression: self.compression.clone(),
            rules: self.session.rules(),
            accelerator: None,
            again: None,
            // The channels get their caches once the blocks are known (`settle_deltas`).
            delta_cache: 0,
            delta_blocks: self.deltas.clone(),
            devices: None,
        };
        let channels = self.options.channels;
        let readers = 1 + usize::from(channels);
        let (security, to) = (&self.options.security, &self.options.to);
        let mut plane = Plane::open(&self.session, security, to, &context, readers, self.cancel, WhenAborted::Drain)?;

        let failed = |error: io::Error| GatewayError::new(format!("the private sockets for QEMU failed: {error}"));
        if self.cancel.is_cancelled() {
            return Err(GatewayError::new("cancelled"));
        }
        if let Some(plan) = self.plan.take() {
            let failed = |error| GatewayError::new(format!("the source QEMU does not take the settings: {error}"));
            self.restore = Some(plan.carry_out().map_err(failed)?);
        }
        self.migrating = true;
        let uri = format!("unix:{}", sockets.path_for_qemu().display());
        let failed_to_start = |why: &dyn std::fmt::Display| {
            GatewayError::new(format!("the source QEMU does not start the migration: {why}"))
        };
        match self.qmp.status() {
            Ok(status) if status != "running" => return Err(failed_to_start(&format_args!("its guest is {status}"))),
            Ok(_) => {}
            Err(error) => return Err(failed_to_start(&error)),
        }
        let answer = self.qmp.execute("migrate", json!({ "uri": uri }));
        // Without an answer QEMU may have accepted the command.
        self.accepted = !matches!(answer, Err(QmpError::Refused { .. }));
        answer.map_err(|error| failed_to_start(&error))?;
        let connections = qemu::accept_migration(&listener, channels as u8, CONNECT_TIME)
            .map_err(|error| not_connected(&self.qmp, &sockets.path_for_qemu(), &error))?;

        let return_path = connections.main.try_clone().map_err(failed)?;
        let ending = return_path.try_clone().map_err(failed)?;
        // A QEMU that has sent its last page waits for the return path. Closing it is a failure for QEMU, and the guest continues.
        self.lead.abort.on_end(move || drop(ending.shutdown(Shutdown::Write)));
        let main = connections.main.try_clone().map_err(failed)?;
        let uuid = connections.multifd.first().map_or([0; 16], |(_, init)| init.uuid);
        let ratio = NormalPageRatio::new(self.options.normal_page_ratio);
        plane.read_multifd(connections.multifd, &ratio).map_err(failed)?;
        let start = move || {
            let mut reader = MainReader::new(connections.main);
            let start = read_start(&mut reader).map_err(|error| error.to_string())?;
            Ok((reader, Start { ram_channels: channels, multifd_channels: channels as u8, uuid, ..start }))
        };
        let events = self.events_in.clone();
        let news = move |news| drop(events.send(Event::Stream(news)));
        plane.read_main(&main, start, ratio, news).map_err(failed)?;
        self.moving = Some(Moving { plane, return_path, _sockets: sockets });
        Ok(())
    }

    /// Ends QEMU's migration. Returns the guest's state after that.
    fn end_migration(&mut self) -> SourceEvent {
        self.lead.abort.raise(self.lead.switchover.reason());
        if !self.accepted {
            // Our `migrate` was refused: any migration that QEMU has was started by somebody else.
            return SourceEvent::Guest(SourceGuest::Running);
        }
        let ended = qemu::end_migration(&self.qmp);
        if let Some(moving) = &self.moving {
            moving.plane.release();
        }
        match ended {
            Ok(SourceGuest::Completed) if !self.record.record().completion_permitted => SourceEvent::Failed {
                reason: "QEMU completed a migration although this one was not at its end: somebody else has moved the \
                         guest, or turned off the return path"
                    .into(),
            },
            Ok(state) => SourceEvent::Guest(state),
            Err(QmpError::Closed { .. }) if qemu::has_ended(self.record.record().qemu) => {
                SourceEvent::Guest(SourceGuest::Gone)
            }
            Err(error) => {
                SourceEvent::Failed { reason: format!("the source QEMU does not end its migration: {error}") }
            }
        }
    }

    /// Sends SHUT(0), at which QEMU completes. The record first notes the permission, for `recover`.
    fn permit_completion(&mut self) -> Result<(), String> {
        self.record.amend(|record| record.completion_permitted = true);
        self.record.write(RecordState::Source(SourceState::Started)).map_err(|error| error.to_string())?;
        self.return_message(ReturnMessage::Shut(0))
            .map_err(|error| format!("the source QEMU does not take the end of the migration: {error}"))
    }

    fn return_message(&self, message: ReturnMessage) -> Result<(), crate::stream::StreamError> {
        match &self.moving {
            Some(moving) => message.write(&moving.return_path),
            None => Ok(()),
        }
    }

    fn reconnect(&mut self) {
        self.session.incarnation = self.lead.peer.begin_anew();
        let (to, security) = (Address::from(&self.options.to), self.options.security.clone());
        self.redial.dial(to, security, self.session.clone(), Arc::clone(&self.tell_peer));
    }

    /// Restarts the stall limit, and keeps the limit until the guest must be stopped.
    fn await_progress(&mut self) {
        // Once the guest is stopped, or while the migration is being taken down, other limits hold.
        if !self.migrating || self.lead.moments.paused.is_some() || self.lead.abort.is_over() {
            return;
        }
        let stalled = session::after(self.options.waits.stall);
        self.lead.due = Some(match self.until {
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

    fn count_rounds(&mut self) {
        let info = self.qmp.query_migrate().ok();
        self.rounds = info.and_then(|info| info.ram).map_or(self.rounds, |ram| ram.dirty_sync_count);
    }

    /// Returns how long a step may take while the guest is paused.
    fn step_time(&self) -> Duration {
        MIN_STEP_LIMIT.max(10 * self.options.downtime)
    }
}

/// Returns why QEMU did not connect: its own error for the migration, if it has one, tells more than `error`.
fn not_connected(qmp: &Qmp, socket: &Path, error: &io::Error) -> GatewayError {
    let why = qemu::failure(qmp).unwrap_or_else(|| error.to_string());
    GatewayError::new(format!("the source QEMU did not connect to {}: {why}", socket.display()))
}
