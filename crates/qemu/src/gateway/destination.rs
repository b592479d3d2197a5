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
use sterna::abort::Abort;
use sterna::cancel::Cancel;
use sterna::control_link::{ControlLink, say};
use sterna::migration::{DELTA, SEND_AGAIN};
use sterna::process;
use sterna::record_file::RecordFile;
use sterna::report::{Observer, Outcome, ReceiveReport};
use sterna::session::{Doorman, Greeted, Greeting, Heard, Peer, PeerNews, TellPeer, link_events};
use sterna::transport::{Limits, Listener};
use sterna_wire::control::{ControlMessage, DestinationFigures, Hello, Mode, Totals, Welcome};
use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest, DestinationState, DestinationSwitchover,
    Moment, RecordState, SwitchoverMessage,
};
use sterna_wire::text::cleaned;

use super::features::{FEATURES, WITH_DELTAS};
use super::feeder::{Agreed, Feeder, FeederNews, FeederSinks};
use super::qemu::{self, QemuEvent};
use super::sockets::SocketDir;
use super::{GatewayError, Placement, ReceiveOptions, fault};
use crate::discover::discover;
use crate::qmp::Qmp;
use crate::settings::{Restore, Role, Settings, Wanted};
use crate::stream::{ReturnMessage, ReturnPathReader};

/// How long QEMU may take from having loaded everything to saying that it is paused.
const PAUSE_TIME: Duration = Duration::from_secs(10);
/// Pause between two looks at a state that QEMU tells by no event.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// How long QEMU may take to exit.
const QUIT_TIME: Duration = Duration::from_secs(10);
/// The reason where it was cancelled on this side.
const CANCELLED: &str = "cancelled";
/// How often the loop wakes when nothing happens.
const IDLE: Duration = Duration::from_secs(1);

/// What wakes the driver.
#[derive(Debug)]
enum Event {
    Peer(PeerNews),
    Qemu(QemuEvent),
    Feeder(FeederNews),
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
    let qmp = Qmp::connect(&options.qmp).map_err(GatewayError::new)?;
    // Until the end, whatever else is connected to this QEMU.
    let _claim = qemu::claim(&qmp)?;
    let settings = Settings::read(&qmp).map_err(GatewayError::new)?;
    let refusals = settings.refusals(Role::Destination);
    if !refusals.is_empty() {
        return Err(GatewayError(format!("this QEMU cannot take a guest: {}", refusals.join("; "))));
    }
    qemu::refuse_if_claimed(&options.state_dir, &qmp)?;
    qemu::check_directories(&options.state_dir, &qmp)?;
    let listener = Listener::bind(&options.listen).map_err(GatewayError::new)?;
    let address = listener.local_address().to_string();
    let incoming = listener.start(options.security.clone(), Limits::default()).map_err(GatewayError::new)?;
    observer.note(&format!("listening on {address}"));

    let guest = Guest::of(&qmp);
    // QEMU's own stream has no place for deltas.
    let features = if options.placement == Placement::InStream { FEATURES } else { WITH_DELTAS };
    let greeting = Greeting { mode: Mode::Owner, features, refusal: &|hello| guest.refusal(hello) };
    let first = greeting.first(&incoming, cancel, |reason| observer.note(&format!("refused: {reason}")));
    let greeted = first.ok_or_else(|| GatewayError("cancelled before a source connected".into()))?;
    observer.note(&format!("migration {} from {}", greeted.session.id, greeted.peer));
    run_session(greeted, options, &address, qmp, incoming, cancel, observer)
}

/// What the destination's QEMU must have in common with the source's.
struct Guest {
    machine_type: String,
}

impl Guest {
    fn of(qmp: &Qmp) -> Self {
        Self { machine_type: qemu::machine(qmp, Duration::ZERO).machine_type }
    }

    fn refusal(&self, hello: &Hello) -> Option<String> {
        // It is shown in the log here and on the terminal there.
        let theirs = cleaned(&hello.machine.machine_type);
        (theirs != self.machine_type && !theirs.is_empty() && !self.machine_type.is_empty()).then(|| {
            let ours = &self.machine_type;
            format!("the source's machine type is {theirs}, the destination's {ours}: start it with -M {theirs}")
        })
    }
}

fn run_session(
    greeted: Greeted,
    options: &ReceiveOptions,
    address: &str,
    qmp: Qmp,
    incoming: sterna::transport::Incoming,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, GatewayError> {
    let Greeted { session, peer, mut writer, reader, closer, messages, welcome, .. } = greeted;
    let refused = |writer: &mut _, error: String| {
        // The peer may be gone; then nobody misses the answer.
        let _ = say(writer, &ControlMessage::Refused { reason: error.clone() });
        GatewayError(error)
    };
    let wanted = Wanted {
        role: Role::Destination,
        channels: session.channels as u8,
        downtime_limit: None,
        pause_before_switchover: false,
    };
    let restore = Settings::apply(&qmp, &wanted).map_err(|error| refused(&mut writer, error.to_string()))?;
    let state = RecordState::Destination(DestinationState::Started);
    let record = qemu::new_record(&session, state, address.to_owned(), &options.qmp, &qmp);
    let record =
        RecordFile::create(&options.state_dir, record).map_err(|error| refused(&mut writer, error.to_string()))?;
    let sockets = SocketDir::create(session.id, "destination", qmp.peer_pid())
        .map_err(|error| refused(&mut writer, format!("cannot make the private socket directory: {error}")))?;

    let (events_in, events) = channel();
    let told = events_in.clone();
    let tell: TellPeer = Arc::new(move |news| drop(told.send(Event::Peer(news))));
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
    qemu::watch(&qmp, {
        let events_in = events_in.clone();
        move |event| events_in.send(Event::Qemu(event)).is_ok()
    });

    let blocks_of = qmp.clone();
    let find_blocks = Box::new(move || discover(&blocks_of).map_err(|error| error.to_string()));
    let agreed = Agreed { deltas: session.has(DELTA), send_again: session.has(SEND_AGAIN) };
    let feeder =
        Feeder::new(&sockets.socket("qemu.sock"), Duration::ZERO, options.placement, find_blocks, agreed, &abort);
    let fed = events_in.clone();
    let sinks = FeederSinks::new(Arc::clone(&feeder), move |news| drop(fed.send(Event::Feeder(news))));
    let doorman = Arc::new(Doorman::new(session, Box::new(sinks), &abort, None, tell));
    let stop_listening = incoming.stop_handle();
    let admitting = Arc::clone(&doorman);
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
        doorman,
        feeder,
        abort,
        events_in,
        sockets,
        totals: None,
        ram_placed: None,
        loaded: false,
        decided: None,
        faults_before,
        figures: DestinationFigures::default(),
        placement: Vec::new(),
        return_path: None,
        end: None,
        guest_stopped: false,
        cancelled: false,
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
    doorman: Arc<Doorman>,
    feeder: Arc<Feeder>,
    abort: Arc<Abort>,
    events_in: Sender<Event>,
    sockets: SocketDir,
    totals: Option<Totals>,
    ram_placed: Option<Instant>,
    loaded: bool,
    decided: Option<Instant>,
    faults_before: u64,
    figures: DestinationFigures,
    placement: Vec<String>,
    return_path: Option<JoinHandle<()>>,
    end: Option<DestinationEnd>,
    guest_stopped: bool,
    cancelled: bool,
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
            // Once it has ended, the source is answered until it hangs up.
            if self.end.is_some() && !self.peer.is_connected() {
                return;
            }
            match events.recv_timeout(IDLE) {
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

    fn perform(&mut self, action: DestinationAction) -> Option<DestinationEvent> {
        tracing::debug!(?action, "switchover");
        match action {
            DestinationAction::WriteRecord(state) => {
                if state == DestinationState::Committed {
                    self.decided = Some(Instant::now());
                }
                match self.record.write(RecordState::Destination(state)) {
                    Ok(()) => Some(DestinationEvent::RecordWritten),
                    Err(error) => {
                        self.observer.note(&error.to_string());
                        Some(DestinationEvent::RecordFailed)
                    }
                }
            }
            DestinationAction::ClearAutostart => Some(match self.clear_autostart() {
                Ok(()) => DestinationEvent::AutostartCleared,
                Err(reason) => DestinationEvent::Failed { reason },
            }),
            DestinationAction::AcceptStream => {
                self.doorman.open();
                if let Some(welcome) = self.welcome.take() {
                    self.peer.say(&ControlMessage::Welcome(welcome));
                }
                None
            }
            DestinationAction::Send(message) => {
                if message == SwitchoverMessage::Running {
                    self.count_figures();
                    self.peer.say(&ControlMessage::Figures(self.figures.clone()));
                }
                self.peer.say(&ControlMessage::Switchover(message));
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
                Some(match quit(&self.qmp, &self.record) {
                    Ok(()) => DestinationEvent::Guest(DestinationGuest::Gone),
                    Err(reason) => DestinationEvent::Failed { reason },
                })
            }
            DestinationAction::AwaitSource => {
                if !self.peer.is_connected() && self.machine.unsure() {
                    self.observer.note(&format!(
                        "the source is lost and the guest stands loaded here: waiting for the source to say who runs it \
                         (migration {})",
                        self.doorman.session().id
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
                self.end = Some(end);
                None
            }
        }
    }

    fn translate(&mut self, event: Event) -> Option<DestinationEvent> {
        match event {
            Event::Peer(news) => match self.peer.hear(news)? {
                Heard::Said(message, _share) => self.heard(message),
                Heard::Lost(reason) => {
                    if self.end.is_none() {
                        self.observer.note(&format!("the connection to the source is lost: {reason}"));
                        self.abort.raise(format_args!("the source was lost: {reason}"));
                    }
                    Some(DestinationEvent::ConnectionLost)
                }
                Heard::Connected => Some(DestinationEvent::Connected),
                Heard::Unreachable(_) => None,
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
                self.tell_failure(&reason);
                Some(DestinationEvent::Failed { reason })
            }
            Event::Cancelled if self.end.is_some() => {
                self.peer.hang_up();
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

    fn fed(&mut self, news: FeederNews) {
        match news {
            FeederNews::Ready { placement, deltas, return_path } => {
                placement.iter().for_each(|line| self.observer.note(&format!("placement: {line}")));
                self.placement.clone_from(&placement);
                self.peer.say(&ControlMessage::Ready { placement, deltas });
                let events = self.events_in.clone();
                self.return_path = Some(std::thread::spawn(move || read_return_path(return_path, &events)));
            }
            FeederNews::RamPlaced => self.ram_placed = Some(Instant::now()),
            FeederNews::Ended => {}
        }
    }

    fn return_message(&mut self, message: ReturnMessage) -> Option<DestinationEvent> {
        self.peer.say(&ControlMessage::ReturnPath(message.into()));
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
        let placed = self.doorman.placed();
        let complete =
            totals.ram.len() == placed.len() && placed.iter().zip(&totals.ram).all(|(placed, last)| placed >= last);
        Some(if complete {
            DestinationEvent::AllPlacedAndLoaded
        } else {
            let reason = "pages are missing: the totals of the source are not what was placed";
            DestinationEvent::Failed { reason: reason.into() }
        })
    }

    /// Has QEMU listen, and stay paused when it has loaded the guest.
    fn clear_autostart(&self) -> Result<(), String> {
        let uri = format!("unix:{}", self.sockets.socket("qemu.sock").display());
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
        self.peer.say(&ControlMessage::Failed { reason: reason.to_owned() });
    }

    fn finish(mut self, source: String) -> ReceiveReport {
        let (outcome, reason) = match self.end.take() {
            Some(DestinationEnd::Running) => (Outcome::Completed, None),
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
        // A QEMU that has taken a guest, or has exited, needs nothing put back.
        if self.record.written()
            && let Some(restore) = self.restore.take()
        {
            restore.keep();
        }
        self.peer.hang_up();
        self.abort.finish();
        self.doorman.join();
        if let Some(thread) = self.return_path.take() {
            let _ = thread.join();
        }
        ReceiveReport {
            id: self.doorman.session().id.to_string(),
            outcome,
            reason,
            source,
            placement: self.placement,
            load_ms: self.figures.load_ms,
            start_ms: self.figures.start_ms,
        }
    }
}

fn read_return_path(mut reader: ReturnPathReader<std::os::unix::net::UnixStream>, events: &Sender<Event>) {
    loop {
        let message = match reader.next_message() {
            Ok(Some(message)) => Ok(message),
            Ok(None) => break,
            Err(error) => Err(format!("the destination QEMU's return path: {error}")),
        };
        let failed = message.is_err();
        if events.send(Event::ReturnPath(message)).is_err() || failed {
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

/// Ends the QEMU of the record, if it still lives.
pub(super) fn quit(qmp: &Qmp, record: &RecordFile) -> Result<(), String> {
    let Some(identity) = record.record().qemu else { return Err("it is not known which process QEMU is".into()) };
    if let Err(error) = qmp.execute("quit", json!({})) {
        // It may have exited by itself; whether it lives is what counts.
        tracing::debug!(%error, "quit");
    }
    let deadline = Instant::now() + QUIT_TIME;
    while process::lives(identity) {
        if Instant::now() >= deadline {
            return Err(format!("QEMU (process {}) does not exit", identity.pid));
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    Ok(())
}
