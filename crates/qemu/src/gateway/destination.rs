//! `sterna receive`: the driver beside the destination QEMU.
//!
//! Like the source's: one thread and one loop over events, led by the switchover's state machine. Connections are
//! accepted and checked by the listener; here they are matched to the migration, and each gets a thread.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_engine::abort::Abort;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{ControlLink, send_message};
use sterna_engine::destination::Destination;
use sterna_engine::migration::{DELTA, RETRANSMIT};
use sterna_engine::process;
use sterna_engine::record_file::RecordFile;
use sterna_engine::report::{Observer, Outcome, ReceiveReport};
use sterna_engine::session::{
    AcceptedSource, ChannelAcceptor, ConnectionEvent, DRY_RUN, Declined, Features, Handshake, OnConnectionEvent, Peer,
    PeerEvent, Placing, after, is_dry_run, link_events,
};
use sterna_engine::transport::{Limits, Listener};
use sterna_engine::wakers::Registration;
use sterna_wire::control::{Block, ControlMessage, DestinationFigures, Hello, Mode, Totals, Welcome};
use sterna_wire::limits::SILENCE_LIMIT;
use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest, DestinationState, DestinationSwitchover,
    Moment, RecordState, SwitchoverMessage,
};
use sterna_wire::text::cleaned;

use super::backlog::{Backlog, BacklogEntry};
use super::claim::Claim;
use super::features::{DESTINATION, DESTINATION_WITH_DELTAS};
use super::feeder::{Agreed, Feeder, FeederEvent, FeederSinks};
use super::qemu::{self, QemuEvent};
use super::sockets::{Listens, SocketDir, SocketPlace};
use super::{ErrorKind, GatewayError, Placement, ReceiveOptions, WaitLimits, direct, fault};
use crate::discover::{ListedBlock, discover, list};
use crate::qmp::Qmp;
use crate::settings::{RequiredSettings, Restore, Role, Settings};
use crate::stream::{ReturnMessage, ReturnPathReader};

/// How long QEMU may take from having loaded everything to saying that it is paused.
const PAUSE_TIME: Duration = Duration::from_secs(10);
/// Bytes of a page, to which a source rounds the lengths of its blocks.
const PAGE_SIZE: u64 = qemu::PAGE_SIZE as u64;
/// Pause between two looks at a state that QEMU tells by no event.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// How long QEMU may take to exit.
pub(super) const QUIT_TIME: Duration = Duration::from_secs(10);
/// The reason where it was cancelled on this side.
const CANCELLED: &str = "cancelled";
/// How often the loop wakes when nothing happens.
const IDLE: Duration = Duration::from_millis(250);
/// How long the source may stay connected after the outcome here: it needs the answers of this side no longer.
pub(super) const LINGER: Duration = SILENCE_LIMIT;
/// How long a source may take, from the start of the guest here, to hang up, or to come back where its connection was lost: until it notices
/// the loss, and some attempts to dial.
pub(super) const RETURN_TIME: Duration = SILENCE_LIMIT.saturating_add(Duration::from_secs(12));
/// What the end of a control channel is called that the source closed itself (`ControlLink`): not a loss.
const CLOSED: &str = "the peer closed the control channel";

/// What wakes the driver.
#[derive(Debug)]
enum Event {
    Peer(ConnectionEvent),
    Qemu(QemuEvent),
    Feeder(FeederEvent),
    ReturnPath(Result<ReturnMessage, String>),
    Broken,
    Cancelled,
}

/// Takes one migration into the QEMU at `options.qmp`. Connections that are refused do not end it.
///
/// # Errors
/// Only for what is found before a migration was accepted; every other end is told by the report.
pub fn receive(
    options: &ReceiveOptions,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    let qmp = Qmp::connect(&options.qmp).map_err(GatewayError::refused)?;
    // Until the end, whatever else is connected to this QEMU.
    let _claim = Claim::of(&qmp).map_err(GatewayError::refused)?;
    let settings = Settings::read(&qmp).map_err(GatewayError::refused)?;
    let refusals = settings.refusals(Role::Destination);
    if !refusals.is_empty() {
        return Err(GatewayError::refused(format_args!("this QEMU cannot take a guest: {}", refusals.join("; "))));
    }
    qemu::refuse_if_claimed(&options.state_dir, &qmp)?;
    qemu::check_directories(&options.state_dir, &options.socket_dir, Listens::Qemu, &qmp)
        .map_err(GatewayError::refused)?;
    let listener = Listener::bind(&options.listen).map_err(GatewayError::refused)?;
    let listens_at = listener.local_address();
    let address = listens_at.to_string();
    let incoming = listener.start(options.security.clone(), Limits::default()).map_err(GatewayError::refused)?;
    observer.listening(&address);

    let guest = Guest::of(&qmp);
    // QEMU's own stream has no place for deltas.
    let features = if options.placement == Placement::InStream { DESTINATION } else { DESTINATION_WITH_DELTAS };
    let directly: Vec<_> = Destination::FEATURES_WITH_POST_COPY.offered.iter().copied().chain([DRY_RUN]).collect();
    let directly = Features { offered: &directly, ..Destination::FEATURES_WITH_POST_COPY };
    // Pages that are to go through QEMU's own stream do not go directly.
    let takes = [(Mode::Owner, features), (Mode::Direct, directly)];
    let takes = if options.placement == Placement::InStream { &takes[..1] } else { &takes[..] };
    let refusals = |hello: &Hello| -> Vec<String> {
        let mut reasons = guest.refusals(hello);
        reasons.extend(direct::post_copy_refusal(&qmp, hello));
        if is_dry_run(hello) {
            // Found out later where a migration begins.
            reasons.extend(
                Settings::read(&qmp)
                    .map_or_else(|error| vec![error.to_string()], |settings| settings.refusals(Role::Destination)),
            );
            reasons.extend(direct::destination_refusal(&qmp, hello));
        }
        reasons
    };
    let greeting = Handshake { takes, refusals: &refusals };
    let waiting = Waiting::start(options.wait, cancel);
    let nobody = || match options.wait {
        Some(wait) if !cancel.is_cancelled() => {
            let seconds = wait.as_secs_f64();
            let text = format!("no source has begun a migration within {seconds} s (--wait); QEMU was not touched");
            GatewayError::new(text).of(ErrorKind::Unreachable)
        }
        _ => GatewayError::new("cancelled before a migration began; QEMU was not touched").of(ErrorKind::Cancelled),
    };
    let identity = qemu::identity(&qmp);
    let note_declined = |source: &Declined| observer.note(&source.to_string());
    let (greeted, directly) = loop {
        let mut greeted = greeting.first(&incoming, &waiting.cancel, note_declined).ok_or_else(nobody)?;
        // The source may be gone; then nobody misses the answer.
        let mut refuse = |reason: String| drop(send_message(&mut greeted.writer, &ControlMessage::Refused { reason }));
        if waiting.cancel.is_cancelled() {
            // The listener has ended with the wait: a source that is lost could not come back.
            let error = nobody();
            refuse(error.text.clone());
            return Err(error);
        }
        if greeted.mode != Mode::Direct {
            break (greeted, None);
        }
        match direct::prepare_destination(&qmp, &greeted.machine) {
            Ok(ready) => break (greeted, Some(ready)),
            // The source may come again, by QEMU's own stream.
            Err(direct::NotTaken::Untouched(reason)) => {
                observer.note(&format!("refused: {}: {reason}; this QEMU was not touched", greeted.peer));
                refuse(reason);
            }
            Err(direct::NotTaken::Begun(reason)) => {
                refuse(reason.clone());
                let left = match qemu::quit(&qmp, identity, QUIT_TIME) {
                    Ok(()) => "its QEMU was ended".to_owned(),
                    Err(error) => format!("its QEMU could not be ended: {error}"),
                };
                return Err(GatewayError::new(format!("this QEMU cannot take the guest: {reason} ({left})")));
            }
        }
    };
    drop(waiting);
    if let Some(ready) = directly {
        return direct::receive(ready, greeted, options, &listens_at, incoming, cancel, observer);
    }
    observer.note(&format!("migration {} from {}", greeted.session.id, greeted.peer));
    if options.prefault {
        observer.note("--prefault is not used: it needs direct mode, and the source sends QEMU's own stream");
    }
    run_session(greeted, options, &address, qmp, incoming, cancel, observer)
}

/// The wait for a source: cancelled by the program's cancellation, and when its time is over.
struct Waiting {
    cancel: Cancel,
    _passing_on: Registration,
    /// The clock's thread ends when this is dropped.
    _over: Sender<()>,
}

impl Waiting {
    fn start(time: Option<Duration>, program: &Cancel) -> Self {
        let cancel = Cancel::new();
        let passed_on = cancel.clone();
        let passing_on = program.on_cancel(move || passed_on.cancel());
        let (over, is_over) = channel::<()>();
        if let Some(time) = time {
            let late = cancel.clone();
            std::thread::spawn(move || {
                if let Err(RecvTimeoutError::Timeout) = is_over.recv_timeout(time) {
                    late.cancel();
                }
            });
        }
        Self { cancel, _passing_on: passing_on, _over: over }
    }
}

/// What the destination's QEMU must have in common with the source's.
struct Guest {
    machine_type: String,
    /// None where QEMU does not tell.
    blocks: Vec<ListedBlock>,
}

impl Guest {
    fn of(qmp: &Qmp) -> Self {
        Self { machine_type: qemu::machine(qmp, Duration::ZERO).machine_type, blocks: list(qmp).unwrap_or_default() }
    }

    /// Returns in what the source's machine and RAM blocks differ.
    fn refusals(&self, hello: &Hello) -> Vec<String> {
        // It is shown in the log here and on the terminal there.
        let mut reasons = Vec::new();
        let theirs = cleaned(&hello.machine.machine_type);
        if theirs != self.machine_type && !theirs.is_empty() && !self.machine_type.is_empty() {
            let ours = &self.machine_type;
            reasons.push(format!(
                "the source's machine type is {theirs}, the destination's {ours}: start it with -M {theirs}"
            ));
        }
        // Only a source that moves its guest directly names its blocks.
        reasons.extend(hello.machine.blocks.iter().filter_map(|block| self.block_refusal(block)));
        reasons
    }

    /// Why QEMU would refuse a block of the source; it says so only in its own output, and ends.
    fn block_refusal(&self, theirs: &Block) -> Option<String> {
        let name = cleaned(&theirs.name);
        if self.blocks.is_empty() {
            return None;
        }
        let Some(ours) = self.blocks.iter().find(|ours| ours.name == theirs.name) else {
            return Some(format!(
                "the source's RAM block {name} is missing at the destination: start it with the same devices"
            ));
        };
        // QEMU resizes a block that may grow, within what it may have.
        let resizable = ours.total > ours.used;
        let fits = theirs.bytes == ours.used.next_multiple_of(PAGE_SIZE) || (resizable && theirs.bytes <= ours.total);
        (!fits).then(|| {
            let (theirs, ours) = (theirs.bytes, ours.used);
            format!("RAM block {name} has {theirs} bytes at the source and {ours} at the destination: give both the same memory and devices")
        })
    }
}

fn run_session(
    greeted: AcceptedSource,
    options: &ReceiveOptions,
    address: &str,
    qmp: Qmp,
    incoming: sterna_engine::transport::Incoming,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    let AcceptedSource { session, mode: _, machine, peer, mut writer, reader, closer, messages, welcome } = greeted;
    let placing = Placing::new(machine.ram);
    let refused = |writer: &mut _, error: String| {
        // The peer may be gone; then nobody misses the answer.
        let _ = send_message(writer, &ControlMessage::Refused { reason: error.clone() });
        GatewayError::refused(error)
    };
    let wanted = RequiredSettings {
        role: Role::Destination,
        channels: session.channels as u8,
        downtime_limit: None,
        pause_before_switchover: false,
    };
    let plan = Settings::plan(&qmp, &wanted).map_err(|error| refused(&mut writer, error.to_string()))?;
    let state = RecordState::Destination(DestinationState::Started);
    let mut record = qemu::new_record(&session, state, address.to_owned(), &options.qmp, &qmp);
    record.settings_before = serde_json::to_value(plan.before()).ok();
    let restore = plan.carry_out().map_err(|error| refused(&mut writer, error.to_string()))?;
    let record =
        RecordFile::create(&options.state_dir, record).map_err(|error| refused(&mut writer, error.to_string()))?;
    let sockets = SocketPlace::find(&options.socket_dir, qmp.peer_pid())
        .and_then(|place| SocketDir::for_qemu(&place, session.id))
        .map_err(|error| refused(&mut writer, format!("cannot make the private socket directory: {error}")))?;

    let (events_in, events) = channel();
    let told = events_in.clone();
    let tell: OnConnectionEvent = Arc::new(move |news| drop(told.send(Event::Peer(news))));
    let link =
        ControlLink::start(writer, reader, closer, messages, link_events(&tell, 1)).map_err(GatewayError::new)?;
    let abort = Arc::new(Abort::default());
    let broken = events_in.clone();
    abort.on_end(move || {
        let _ = broken.send(Event::Broken);
    });
    let cancelled = events_in.clone();
    let _cancelling = cancel.on_cancel(move || {
        let _ = cancelled.send(Event::Cancelled);
    });
    let backlog = Backlog::default();
    qemu::watch(&qmp, backlog.entry(), {
        let events_in = events_in.clone();
        move |event| events_in.send(Event::Qemu(event)).is_ok()
    });

    let blocks_of = qmp.clone();
    let find_blocks = Box::new(move || discover(&blocks_of).map_err(|error| error.to_string()));
    let agreed = Agreed { deltas: session.has(DELTA), send_again: session.has(RETRANSMIT) };
    let feeder = Feeder::new(&sockets.path(), Duration::ZERO, options.placement, find_blocks, agreed, &abort);
    let fed = events_in.clone();
    let sinks = FeederSinks::new(Arc::clone(&feeder), move |news| drop(fed.send(Event::Feeder(news))));
    let acceptor = Arc::new(ChannelAcceptor::new(session, Box::new(sinks), &abort, None, tell));
    let stop_listening = incoming.stop_handle();
    let admitting = Arc::clone(&acceptor);
    std::thread::spawn(move || {
        while let Some((connection, header)) = incoming.next() {
            admitting.admit(connection, &header);
        }
    });

    let (machine, first) = DestinationSwitchover::begin();
    let faults_before = faults(&qmp);
    let mut driver = Driver {
        observer,
        qmp,
        record,
        restore: Some(restore),
        machine,
        peer: Peer::new(link),
        welcome: Some(welcome),
        acceptor,
        feeder,
        abort,
        events_in,
        sockets,
        totals: None,
        ram_placed: None,
        loaded: false,
        decided: None,
        faults_before,
        placing,
        figures: DestinationFigures::default(),
        placement: Vec::new(),
        return_path: None,
        end: None,
        hang_up_at: None,
        lost: false,
        unwritten: None,
        waits: options.waits,
        until: options.waits.total.map(after),
        stalled_at: after(options.waits.stall),
        moved: 0,
        guest_stopped: false,
        cancelled: false,
        backlog: Some(backlog),
    };
    driver.run(&events, first);
    let report = driver.finish(peer);
    // The accepting thread ends by itself; a handshake that is under way is not waited for.
    stop_listening.stop();
    Ok(report)
}

struct Driver<'a> {
    observer: &'a dyn Observer,
    qmp: Qmp,
    record: RecordFile,
    restore: Option<Restore>,
    machine: DestinationSwitchover,
    peer: Peer,
    welcome: Option<Welcome>,
    acceptor: Arc<ChannelAcceptor>,
    feeder: Arc<Feeder>,
    abort: Arc<Abort>,
    events_in: Sender<Event>,
    sockets: SocketDir,
    totals: Option<Totals>,
    ram_placed: Option<Instant>,
    loaded: bool,
    decided: Option<Instant>,
    faults_before: u64,
    placing: Placing,
    figures: DestinationFigures,
    placement: Vec<String>,
    return_path: Option<JoinHandle<()>>,
    end: Option<DestinationEnd>,
    /// When a source that is still connected after the end is hung up on, and one that was lost is no longer waited for.
    hang_up_at: Option<Instant>,
    /// Whether the source's last connection broke, and was not closed.
    lost: bool,
    /// Why the record could not be written, where the last attempt failed.
    unwritten: Option<String>,
    waits: WaitLimits,
    /// When the guest must be prepared.
    until: Option<Instant>,
    /// When something must have arrived, and how many packets had when that was set.
    stalled_at: Instant,
    moved: u64,
    guest_stopped: bool,
    cancelled: bool,
    /// Events of QEMU that have not been handled; none once nobody will.
    backlog: Option<Backlog>,
}

impl Driver<'_> {
    fn run(&mut self, events: &Receiver<Event>, first: Vec<DestinationAction>) {
        let mut actions = first;
        loop {
            let mut answers = Vec::new();
            for action in actions {
                let step = action.step();
                fault::point(Moment::Before, step);
                answers.extend(self.perform(action));
                fault::point(Moment::After, step);
            }
            actions = Vec::new();
            for answer in answers {
                actions.extend(self.machine.on(answer));
            }
            if !actions.is_empty() {
                continue;
            }
            if self.is_over() {
                return;
            }
            self.tell_progress();
            if let Some(reason) = self.overdue() {
                self.tell_failure(&reason);
                actions = self.machine.on(DestinationEvent::Failed { reason });
                continue;
            }
            match events.recv_timeout(IDLE.min(self.placing.left())) {
                Ok(event) => {
                    if let Some(event) = self.translate(event) {
                        actions = self.machine.on(event);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("the driver itself holds a sender"),
            }
        }
    }

    /// Whether it has ended and the source has hung up, or has had its time to. A source that was lost may not have heard that the guest
    /// runs here: it dials again, and is told.
    fn is_over(&self) -> bool {
        let Some(end) = &self.end else { return false };
        let answers = self.peer.is_connected() || self.lost && *end == DestinationEnd::Running;
        !answers || self.hang_up_at.is_some_and(|at| Instant::now() >= at)
    }

    fn tell_progress(&mut self) {
        if !self.placing.is_due() || self.end.is_some() {
            return;
        }
        let phase = match (self.decided, &self.totals) {
            (Some(_), _) => "starting the guest",
            (None, Some(_)) => "switching over",
            (None, None) => "receiving memory",
        };
        self.placing.report(self.observer, phase, self.acceptor.pages_placed(), 0);
    }

    fn perform(&mut self, action: DestinationAction) -> Option<DestinationEvent> {
        tracing::debug!(?action, "switchover");
        match action {
            DestinationAction::WriteRecord(state) => {
                if state == DestinationState::Committed {
                    self.decided = Some(Instant::now());
                }
                match self.record.write(RecordState::Destination(state)) {
                    Ok(()) => {
                        self.unwritten = None;
                        Some(DestinationEvent::RecordWritten)
                    }
                    Err(error) => {
                        self.observer.note(&error.to_string());
                        self.unwritten = Some(error.to_string());
                        Some(DestinationEvent::RecordFailed)
                    }
                }
            }
            DestinationAction::ClearAutostart => Some(match self.clear_autostart() {
                Ok(()) => DestinationEvent::AutostartCleared,
                Err(reason) => DestinationEvent::Failed { reason },
            }),
            DestinationAction::AcceptStream => {
                self.acceptor.open();
                if let Some(welcome) = self.welcome.take() {
                    self.peer.send(&ControlMessage::Welcome(welcome));
                }
                None
            }
            DestinationAction::Send(message) => {
                if message == SwitchoverMessage::Running {
                    self.count_figures();
                    self.peer.send(&ControlMessage::Figures(self.figures.clone()));
                }
                self.peer.send(&ControlMessage::Switchover(message));
                None
            }
            DestinationAction::Cont => Some(match qemu::cont(&self.qmp) {
                Ok(()) => {
                    self.figures.start_ms = self.decided.map_or(0.0, |since| since.elapsed().as_secs_f64() * 1e3);
                    DestinationEvent::Guest(DestinationGuest::Running)
                }
                Err(error) => DestinationEvent::Failed { reason: format!("QEMU does not start the guest: {error}") },
            }),
            DestinationAction::AnnounceSelf => {
                qemu::announce(&self.qmp);
                None
            }
            DestinationAction::Quit => {
                self.abort.raise("the migration was aborted");
                Some(match qemu::quit(&self.qmp, self.record.record().qemu, QUIT_TIME) {
                    Ok(()) => DestinationEvent::Guest(DestinationGuest::Gone),
                    Err(reason) => DestinationEvent::Failed { reason },
                })
            }
            DestinationAction::AwaitSource => {
                if !self.peer.is_connected() && self.machine.unsure() {
                    self.observer.note(&format!(
                        "the source is lost and the guest stands loaded here: waiting for the source to say who runs it \
                         (migration {})",
                        self.acceptor.session().id
                    ));
                }
                None
            }
            DestinationAction::Done(end) => {
                if let DestinationEnd::Stuck { reason } = &end {
                    self.tell_failure(reason);
                }
                if matches!(end, DestinationEnd::Stuck { .. } | DestinationEnd::Conflict) {
                    // The source waits for nothing that could still come.
                    self.peer.hang_up();
                }
                if end == DestinationEnd::Running {
                    self.put_settings_back();
                }
                let time = if end == DestinationEnd::Running { RETURN_TIME } else { LINGER };
                self.hang_up_at.get_or_insert_with(|| Instant::now() + time);
                self.end = Some(end);
                None
            }
        }
    }

    fn translate(&mut self, event: Event) -> Option<DestinationEvent> {
        if let (Event::Qemu(_) | Event::ReturnPath(_), Some(backlog)) = (&event, &self.backlog) {
            backlog.handled();
        }
        match event {
            Event::Peer(news) => match self.peer.handle(news)? {
                PeerEvent::Message(message, _share) => self.heard(message),
                PeerEvent::Lost(reason) => {
                    self.lost = reason != CLOSED;
                    if self.end.is_none() {
                        self.observer.note(&format!("the connection to the source is lost: {reason}"));
                        self.abort.raise(format_args!("the source was lost: {reason}"));
                    }
                    Some(DestinationEvent::ConnectionLost)
                }
                PeerEvent::Connected => Some(DestinationEvent::Connected),
                PeerEvent::Unreachable(_) => None,
            },
            Event::Qemu(QemuEvent::Gone) if qemu::has_ended(self.record.record().qemu) => {
                Some(DestinationEvent::Guest(DestinationGuest::Gone))
            }
            Event::Qemu(QemuEvent::Gone) => {
                Some(DestinationEvent::Failed { reason: "QEMU closed its QMP socket".into() })
            }
            Event::Qemu(QemuEvent::Resumed) => Some(DestinationEvent::Guest(DestinationGuest::Running)),
            Event::Qemu(QemuEvent::Migration(status)) if status == "failed" => {
                let why = self.qmp.query_migrate().ok().and_then(|info| info.error_desc);
                let reason = format!("QEMU could not load the guest: {}", why.as_deref().unwrap_or("see its output"));
                self.tell_failure(&reason);
                Some(DestinationEvent::Failed { reason })
            }
            Event::Qemu(QemuEvent::Stopped) => {
                self.guest_stopped = true;
                None
            }
            Event::Qemu(_) => None,
            Event::Feeder(news) => {
                self.fed(news);
                None
            }
            Event::ReturnPath(Ok(message)) => self.return_message(message),
            Event::ReturnPath(Err(reason)) => {
                self.abort.raise(reason);
                None
            }
            Event::Broken => {
                let reason = self.abort.reason()?;
                // A destination that stands prepared, or has ended, is not over because the channels are: the source would give it up.
                if self.machine.may_give_up() {
                    self.tell_failure(&reason);
                }
                Some(DestinationEvent::Failed { reason })
            }
            Event::Cancelled if self.end.is_some() => {
                self.peer.hang_up();
                self.hang_up_at = Some(Instant::now());
                None
            }
            Event::Cancelled => {
                if self.machine.unsure() {
                    self.observer.note("the guest stands loaded here and the source decides: this cannot be cancelled");
                } else {
                    // Before the channels are closed, which says less.
                    self.tell_failure(CANCELLED);
                    self.cancelled = true;
                }
                Some(DestinationEvent::Failed { reason: CANCELLED.into() })
            }
        }
    }

    fn heard(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        match message {
            ControlMessage::Totals(totals) => {
                self.totals = Some(totals);
                if let Some(missing) = Some(self.feeder.missing()).filter(|missing| *missing > 0) {
                    let reason = format!("{missing} pages arrived damaged, and the source has not sent them again");
                    self.tell_failure(&reason);
                    return Some(DestinationEvent::Failed { reason });
                }
                self.if_complete()
            }
            ControlMessage::Switchover(message) => Some(DestinationEvent::Message(message)),
            ControlMessage::Failed { reason } | ControlMessage::Refused { reason } => {
                let reason = format!("the source failed: {}", cleaned(&reason));
                Some(DestinationEvent::Failed { reason })
            }
            unexpected => {
                tracing::warn!(?unexpected, "not expected from a source");
                None
            }
        }
    }

    fn fed(&mut self, news: FeederEvent) {
        match news {
            FeederEvent::Ready { placement, deltas, return_path } => {
                placement.iter().for_each(|line| self.observer.note(&format!("placement: {line}")));
                self.placement.clone_from(&placement);
                self.peer.send(&ControlMessage::Ready { placement, deltas });
                let events = self.events_in.clone();
                if let Some(entry) = self.backlog.as_ref().map(Backlog::entry) {
                    self.return_path = Some(std::thread::spawn(move || read_return_path(return_path, &entry, &events)));
                }
            }
            FeederEvent::RamPlaced => self.ram_placed = Some(Instant::now()),
            FeederEvent::Ended => {}
        }
    }

    fn return_message(&mut self, message: ReturnMessage) -> Option<DestinationEvent> {
        self.peer.send(&ControlMessage::ReturnPath(message.into()));
        match message {
            ReturnMessage::Shut(0) => {
                self.figures.load_ms = self.ram_placed.map_or(0.0, |since| since.elapsed().as_secs_f64() * 1e3);
                if let Err(reason) = wait_paused(&self.qmp) {
                    return Some(DestinationEvent::Failed { reason });
                }
                self.loaded = true;
                self.if_complete()
            }
            // It says 1 whatever the reason is.
            ReturnMessage::Shut(_) => {
                Some(DestinationEvent::Failed { reason: "QEMU could not load the guest: see its output".into() })
            }
            _ => None,
        }
    }

    /// Whether QEMU has loaded everything and every channel has placed what the source sent on it.
    fn if_complete(&mut self) -> Option<DestinationEvent> {
        let totals = self.totals.as_ref().filter(|_| self.loaded)?;
        let placed = self.acceptor.placed();
        let complete =
            totals.ram.len() == placed.len() && placed.iter().zip(&totals.ram).all(|(placed, last)| placed >= last);
        Some(if complete {
            DestinationEvent::AllPlacedAndLoaded
        } else {
            let reason = "pages are missing: the totals of the source are not what was placed";
            DestinationEvent::Failed { reason: reason.into() }
        })
    }

    /// Why the source has had its time, where it has. Only as long as this side may give up.
    fn overdue(&mut self) -> Option<String> {
        if !self.machine.may_give_up() {
            return None;
        }
        let moved = self.acceptor.received();
        if moved != self.moved {
            (self.moved, self.stalled_at) = (moved, after(self.waits.stall));
        }
        let passed = |at: Instant| Instant::now() >= at;
        if self.until.is_some_and(passed) {
            return Some("the guest was not here in time (--time-limit of the destination)".into());
        }
        passed(self.stalled_at)
            .then(|| "nothing of the guest arrived for too long (--stall-limit of the destination)".into())
    }

    /// The guest runs here: its QEMU is left as it was found, as the source's is where the guest stays there.
    fn put_settings_back(&mut self) {
        if let Some(Err(error)) = self.restore.take().map(Restore::restore) {
            self.observer.note(&format!("QEMU's migration settings could not be put back: {error}"));
        }
    }

    /// Has QEMU listen, and stay paused when it has loaded the guest.
    fn clear_autostart(&self) -> Result<(), String> {
        let uri = format!("unix:{}", self.sockets.path_for_qemu().display());
        let failed = |error| format!("QEMU does not take the migration: {error}");
        self.qmp.execute("migrate-incoming", json!({ "uri": uri })).map_err(failed)?;
        // Accepted while `inmigrate`: it clears the autostart flag and changes nothing else.
        self.qmp.execute("stop", json!({})).map_err(failed)?;
        match self.qmp.status().map_err(failed)?.as_str() {
            "inmigrate" => Ok(()),
            status => Err(format!("QEMU is {status} where it should wait for the migration")),
        }
    }

    fn count_figures(&mut self) {
        self.figures.cpu_seconds = process::own_cpu_seconds();
        self.figures.faults = faults(&self.qmp).saturating_sub(self.faults_before);
    }

    fn tell_failure(&self, reason: &str) {
        self.peer.send(&ControlMessage::Failed { reason: reason.to_owned() });
    }

    fn finish(mut self, source: String) -> ReceiveReport {
        let (outcome, reason) = match self.end.take() {
            Some(DestinationEnd::Running) => match &self.unwritten {
                Some(why) if !self.record.record().state.settled() => (
                    Outcome::Unconfirmed,
                    Some(format!("the guest runs here, but the record could not be written: {why}")),
                ),
                _ => (Outcome::Completed, None),
            },
            // Whichever came first is the reason, and the source may have cancelled too.
            Some(DestinationEnd::Discarded { reason }) if self.cancelled && reason == CANCELLED => {
                (Outcome::Cancelled, Some(reason))
            }
            Some(DestinationEnd::Discarded { reason }) => (Outcome::Failed, Some(reason)),
            Some(DestinationEnd::Lost { reason }) => (Outcome::Lost, Some(reason)),
            Some(DestinationEnd::Stuck { reason }) => (Outcome::Unconfirmed, Some(reason)),
            Some(DestinationEnd::Conflict) => {
                (Outcome::Unconfirmed, Some("the guest was started here by somebody else: stop one of the two".into()))
            }
            None => (Outcome::Failed, self.abort.reason()),
        };
        // A QEMU that holds part of a guest, or has exited, needs nothing put back.
        if self.record.written()
            && let Some(restore) = self.restore.take()
        {
            restore.keep();
        }
        self.peer.hang_up();
        // Whoever reads from QEMU may wait for an event to be handled.
        self.backlog = None;
        self.abort.finish();
        self.acceptor.join();
        if let Some(thread) = self.return_path.take() {
            let _ = thread.join();
        }
        ReceiveReport {
            id: self.acceptor.session().id.to_string(),
            outcome,
            reason,
            source,
            placement: self.placement,
            load_ms: self.figures.load_ms,
            start_ms: self.figures.start_ms,
        }
    }
}

fn read_return_path(
    mut reader: ReturnPathReader<std::os::unix::net::UnixStream>,
    backlog: &BacklogEntry,
    events: &Sender<Event>,
) {
    loop {
        let message = match reader.next_message() {
            Ok(Some(message)) => Ok(message),
            Ok(None) => break,
            Err(error) => Err(format!("the destination QEMU's return path: {error}")),
        };
        let failed = message.is_err();
        if !backlog.wait() || events.send(Event::ReturnPath(message)).is_err() || failed {
            break;
        }
    }
    // QEMU closes it when it has finished or failed; its events tell which.
    let _ = reader.get_ref().shutdown(Shutdown::Read);
}

/// QEMU's page faults so far.
fn faults(qmp: &Qmp) -> u64 {
    qmp.peer_pid().and_then(|pid| u32::try_from(pid).ok()).map_or(0, process::faults)
}

fn wait_paused(qmp: &Qmp) -> Result<(), String> {
    let deadline = Instant::now() + PAUSE_TIME;
    loop {
        match qmp.status().map_err(|error| error.to_string())?.as_str() {
            "paused" => return Ok(()),
            "inmigrate" if Instant::now() < deadline => std::thread::sleep(LOOK_PAUSE),
            status => return Err(format!("QEMU is {status} where it should be loaded and paused")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_qemu_that_floods_its_return_path_has_to_wait_for_a_driver_that_is_busy() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        qemu.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let backlog = Backlog::default();
        let (events_in, events) = channel();
        let entry = backlog.entry();
        let reading = std::thread::spawn(move || read_return_path(ReturnPathReader::new(ours), &entry, &events_in));
        // PONG, four bytes long (`migration/migration.c`).
        let pongs: Vec<u8> = [0, 2, 0, 4, 0, 0, 0, 1].repeat(512);
        let mut pushed_back = false;
        for _ in 0..65536 {
            pushed_back = qemu.write_all(&pongs).is_err();
            if pushed_back {
                break;
            }
        }
        assert!(pushed_back, "all of it was taken");
        drop(backlog);
        reading.join().unwrap();
        assert!(events.iter().count() < 65536, "what was read is bounded");
    }
}
