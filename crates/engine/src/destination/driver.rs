//! The destination's driver: like the source's, one loop over events that feeds the switchover's state machine and performs its actions.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::GuestRam;
use sterna_wire::control::{ControlMessage, DestinationFigures, Hello, Mode, PostCopyFigures, Totals, Welcome};
use sterna_wire::limits::SILENCE_LIMIT;
use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest, DestinationState, DestinationSwitchover,
    Moment, RecordState, SwitchoverMessage,
};
use sterna_wire::text::cleaned;

use super::channels::PostCopyChannels;
use super::devices::Devices;
use super::post_copy::{self, PostCopy, PostCopyEvent};
use super::target::{RamSink, Target};
use super::{Destination, Listening, Taking};
use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::control_link::{ControlEvent, ControlLink, send_message};
use crate::cpu_time::{self, CpuTime};
use crate::device_state::load::{DeviceSink, LoadEvent, LoadingDevices};
use crate::device_state::{self, DeviceChannels, DeviceId};
use crate::ledger::Ledger;
use crate::migration::{
    GuestState, MigrationError, POST_COPY, Phase, RETRANSMIT, Side, difference, machine, size_difference,
};
use crate::monitor::{CaughtObserver, DestinationMonitor};
use crate::occupied::Occupied;
use crate::process;
use crate::receive::Sink;
use crate::report::{Observer, Outcome, ReceiveReport};
use crate::session::{
    AcceptedSource, ChannelAcceptor, ConnectionEvent, Features, Handshake, LAST_WORDS, OnConnectionEvent, Peer,
    PeerEvent, Placing, Sinks, after, link_events,
};
use crate::state::{Part, StateReader, StateSink, state_sink};
use crate::transport::{Address, Incoming, Stop, Writer};
use crate::vmm::DestinationVmm;

/// How often the loop wakes when nothing happens.
const IDLE: Duration = Duration::from_secs(1);
/// The reason of a migration that was cancelled on this side.
const CANCELLED: &str = "cancelled";

/// What wakes the driver.
#[derive(Debug)]
pub(super) enum Event {
    Peer(ConnectionEvent),
    State(Part),
    Device(LoadEvent),
    Fenced,
    PostCopy(PostCopyEvent),
    /// The guest's start, which had to wait, is possible now.
    Start,
    /// The data channels of this incarnation have failed.
    Broken(u32),
    Cancelled,
}

/// Waits for a source, and runs its migration.
pub(super) fn run(
    listening: Listening,
    vmm: &mut dyn DestinationVmm,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let Listening { taking, address, incoming } = listening;
    // Ends the listening and all handshakes, however this function returns.
    let stopping = StopAtEnd(incoming.stop_handle());
    let observer = &CaughtObserver(observer);
    let cpu = CpuTime::default();
    let _counted = cpu.count();
    let mut vmm = DestinationMonitor::new(vmm, &cpu).map_err(MigrationError::not_accepted)?;
    observer.listening(&address.to_string());
    let ram = taking.target.ram();
    let ours = machine(vmm.name(), ram, 0).blocks;
    let ids: Vec<DeviceId> = taking.devices.iter().map(|(id, _)| id.clone()).collect();
    let no_post_copy = no_post_copy(&mut vmm, ram)?;
    let refusals = |hello: &Hello| -> Vec<String> {
        let post_copy = || {
            let reason = no_post_copy.as_ref()?;
            Destination::wants_post_copy(hello)
                .then(|| format!("post-copy is not possible at the destination: {reason}"))
        };
        let devices = || device_state::difference(&hello.machine, &ids);
        [difference(&hello.machine.blocks, &ours), devices(), post_copy()].into_iter().flatten().collect()
    };
    let mut offered = Destination::FEATURES.offered.to_vec();
    offered.extend(no_post_copy.is_none().then_some(POST_COPY));
    let features = Features { offered: &offered, ..Destination::FEATURES };
    let greeting = Handshake { takes: &[(Mode::Embedded, features)], refusals: &refusals };
    let greeted = greeting.first(&incoming, cancel, |source| observer.note(&source.to_string()));
    let Some(greeted) = greeted else {
        let reason = if cancel.is_cancelled() { "cancelled before a source came" } else { "the listener has ended" };
        return Err(MigrationError { cancelled: cancel.is_cancelled(), ..MigrationError::not_accepted(reason) });
    };
    let report = take(taking, &address, greeted, incoming, vmm, cpu.clone(), cancel, observer);
    drop(stopping);
    report
}

/// Returns why post-copy is not possible here, if it is not.
fn no_post_copy(vmm: &mut DestinationMonitor<'_>, ram: &GuestRam) -> Result<Option<String>, MigrationError> {
    let refused = vmm.post_copy_refusal().map_err(MigrationError::not_accepted)?;
    Ok(refused.or_else(|| post_copy::refusal(ram)))
}

/// Runs the migration of a source whose hello the caller has accepted already, to learn which RAM is needed.
pub(super) fn run_greeted(
    taking: Taking,
    address: &Address,
    mut greeted: AcceptedSource,
    incoming: Incoming,
    vmm: &mut dyn DestinationVmm,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let stopping = StopAtEnd(incoming.stop_handle());
    let observer = &CaughtObserver(observer);
    let cpu = CpuTime::default();
    let _counted = cpu.count();
    let vmm = DestinationMonitor::new(vmm, &cpu).map_err(MigrationError::not_accepted)?;
    let ids: Vec<DeviceId> = taking.devices.iter().map(|(id, _)| id.clone()).collect();
    let differs = size_difference(&greeted.machine.blocks, taking.target.ram());
    if let Some(reason) = differs.or_else(|| device_state::difference(&greeted.machine, &ids)) {
        return Err(refuse(&mut greeted.writer, reason));
    }
    let report = take(taking, address, greeted, incoming, vmm, cpu.clone(), cancel, observer);
    drop(stopping);
    report
}

/// Refuses a source with the reason, and returns the error.
fn refuse(writer: &mut Writer, reason: String) -> MigrationError {
    // Fails where the peer is gone, which needs no answer.
    let _ = send_message(writer, &ControlMessage::Refused { reason: reason.clone() });
    MigrationError::not_accepted(reason)
}

#[allow(clippy::too_many_arguments)]
fn take<'a>(
    taking: Taking,
    address: &Address,
    greeted: AcceptedSource,
    incoming: Incoming,
    vmm: DestinationMonitor<'a>,
    cpu: CpuTime,
    cancel: &Cancel,
    observer: &'a dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let Taking { target, devices, device_share, state_dir, linger, stall, give_up_after, monitor, fence } = taking;
    let AcceptedSource { session, mode: _, machine, peer, mut writer, reader, closer, messages, welcome } = greeted;
    observer.note(&format!("migration {} from {peer}", session.id));

    let state = RecordState::Destination(DestinationState::Started);
    let ledger = Ledger::new(state_dir.as_deref(), &session, state, address.to_string(), &monitor);
    let ledger = ledger.map_err(|error| refuse(&mut writer, error.to_string()))?;

    let (events_in, events) = channel();
    let peer_events = events_in.clone();
    let occupied = Occupied::default();
    let monitor_call = occupied.clone();
    let tell: OnConnectionEvent = Arc::new(move |news| {
        if let ConnectionEvent::Control(_, ControlEvent::Lost(reason)) = &news {
            monitor_call.lost(format_args!("the source was lost: {reason}"));
        }
        drop(peer_events.send(Event::Peer(news)));
    });
    let link = ControlLink::start(writer, reader, closer, messages, link_events(&tell, 1));
    let link = link.map_err(MigrationError::not_accepted)?;
    let abort = Arc::new(Abort::default());
    let broken = events_in.clone();
    abort.on_end(move || drop(broken.send(Event::Broken(1))));
    let (cancelled, monitor_call) = (events_in.clone(), occupied.clone());
    let _cancelling = cancel.on_cancel(move || {
        monitor_call.raise(CANCELLED);
        drop(cancelled.send(Event::Cancelled));
    });
    let fenced = events_in.clone();
    let _fencing = fence.0.on_cancel(move || drop(fenced.send(Event::Fenced)));

    let begun = events_in.clone();
    let devices = Devices::new(devices, &machine, device_share);
    let ending = devices.known();
    abort.on_end(move || ending.end());
    let serial = devices.on(DeviceChannels::Serial);
    let (state_sink, ahead, last) = state_sink(move |part| drop(begun.send(Event::State(part))), serial);
    let sinks = TargetSinks {
        target: Arc::clone(&target),
        may_refuse: session.has(RETRANSMIT),
        state: Mutex::new(Some(state_sink)),
        mixed: devices.on(DeviceChannels::Mixed),
        own: devices.on(DeviceChannels::Own(0)),
    };
    let rules = session.rules();
    let channels = PostCopyChannels::default();
    let extra_channels = channels.handler(&target, rules);
    let acceptor = Arc::new(ChannelAcceptor::new(session, Box::new(sinks), &abort, Some(extra_channels), tell));
    let admitting = Arc::clone(&acceptor);
    let admit = move || {
        while let Some((connection, header)) = incoming.next() {
            admitting.admit(connection, &header);
        }
    };
    // The thread ends by itself when the listening has ended.
    cpu_time::spawn(Builder::new().name("admit".into()), admit).map_err(MigrationError::not_accepted)?;

    let (switchover, first) = DestinationSwitchover::begin();
    let faults_before = process::faults(std::process::id());
    let mut driver = Driver {
        vmm,
        cpu,
        observer,
        events_in,
        channels,
        faults: None,
        lacks_memory: None,
        start_waits: false,
        devices,
        loaded: None,
        target,
        switchover,
        ledger,
        peer: Peer::new(link),
        occupied,
        data_incarnation: 1,
        welcome: Some(welcome),
        acceptor,
        abort,
        ahead: Some(ahead),
        last: Some(last),
        totals: None,
        state_begun: false,
        decided: None,
        phase: Phase::SettingUp,
        placing: Placing::new(machine.ram),
        figures: DestinationFigures::default(),
        faults_before,
        broken: None,
        end: None,
        settled: false,
        hang_up_at: None,
        linger,
        cancelled: false,
        unwritten: None,
        until: give_up_after.map(after),
        stall,
        stalled_at: stall.map(after),
        received: 0,
    };
    driver.run(&events, first);
    // The event of the cancellation may still be queued.
    driver.cancelled |= cancel.is_cancelled();
    driver.finish(peer)
}

/// Ends the listening when it is dropped.
struct StopAtEnd(Stop);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The sinks of this migration's channels.
struct TargetSinks<F> {
    target: Arc<Target>,
    may_refuse: bool,
    state: Mutex<Option<StateSink<F>>>,
    /// The devices, where their state arrives on RAM channels.
    mixed: Option<Arc<LoadingDevices>>,
    /// The devices, where their state arrives on channels of its own.
    own: Option<Arc<LoadingDevices>>,
}

impl<F: FnMut(Part) + Send + 'static> Sinks for TargetSinks<F> {
    fn ram(&self, index: u16) -> Box<dyn Sink> {
        Box::new(RamSink::new(&self.target, index, self.may_refuse).with_devices(self.mixed.clone()))
    }

    fn stream(&self) -> Box<dyn Sink> {
        let sink = self.state.lock().expect("no thread panics with the lock held").take();
        Box::new(sink.expect("the acceptor admits one stream channel"))
    }

    fn devices(&self) -> Option<Box<dyn Sink>> {
        Some(Box::new(DeviceSink(self.own.clone()?)))
    }
}

pub(super) struct Driver<'a> {
    vmm: DestinationMonitor<'a>,
    /// CPU time of the migration's threads at this side.
    cpu: CpuTime,
    observer: &'a dyn Observer,
    pub(super) events_in: Sender<Event>,
    channels: PostCopyChannels,
    /// The thread that handles page faults, in post-copy.
    faults: Option<JoinHandle<()>>,
    /// In post-copy: what is known of the guest's missing memory.
    lacks_memory: Option<Lacks>,
    /// Whether the guest's start waits for new channels of its missing memory.
    start_waits: bool,
    pub(super) devices: Devices,
    /// Once the monitor's own state is loaded: when its loading began.
    loaded: Option<Instant>,
    target: Arc<Target>,
    switchover: DestinationSwitchover,
    ledger: Ledger,
    pub(super) peer: Peer,
    pub(super) occupied: Occupied,
    data_incarnation: u32,
    welcome: Option<Welcome>,
    acceptor: Arc<ChannelAcceptor>,
    pub(super) abort: Arc<Abort>,
    /// Reader of the state that is sent ahead, until it was read.
    ahead: Option<StateReader>,
    /// Reader of the final state, until it was read.
    last: Option<StateReader>,
    totals: Option<Totals>,
    state_begun: bool,
    decided: Option<Instant>,
    phase: Phase,
    placing: Placing,
    figures: DestinationFigures,
    faults_before: u64,
    /// Deadline for the peer's message about a broken channel.
    broken: Option<Instant>,
    end: Option<DestinationEnd>,
    /// Once the migration has ended: the source needs no more answers.
    settled: bool,
    /// Once the migration has ended: deadline for the source to reconnect, or to close the connection.
    hang_up_at: Option<Instant>,
    linger: Duration,
    cancelled: bool,
    /// Why the record could not be written, where the last attempt failed.
    unwritten: Option<String>,
    /// When the guest must be prepared.
    until: Option<Instant>,
    /// How long nothing may arrive.
    stall: Option<Duration>,
    /// When a packet must have arrived.
    stalled_at: Option<Instant>,
    /// How many packets had arrived when `stalled_at` was set.
    received: u64,
}

/// The state of the guest's missing memory.
#[derive(Clone, Debug, PartialEq)]
enum Lacks {
    /// It is on its way.
    Awaited,
    /// It has all arrived, with these figures.
    Nothing(PostCopyFigures),
    /// It will never arrive, with the reason.
    ForGood(String),
}

impl Driver<'_> {
    fn run(&mut self, events: &Receiver<Event>, first: Vec<DestinationAction>) {
        let mut actions = first;
        loop {
            let mut answers = Vec::new();
            for action in actions {
                let step = action.step();
                step.iter().for_each(|step| self.observer.step(Moment::Before, *step));
                answers.extend(self.perform(action));
                step.iter().for_each(|step| self.observer.step(Moment::After, *step));
            }
            actions = Vec::new();
            for answer in answers {
                actions.extend(self.switchover.on(answer));
            }
            if !actions.is_empty() {
                continue;
            }
            // Once the migration has ended, the source is answered until it closes the connection.
            if self.is_over() {
                return;
            }
            let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
            self.report_progress();
            if self.lacks_pages() && self.target.post_copy().is_some_and(|post_copy| post_copy.guest_has_ended()) {
                self.handle_post_copy(PostCopyEvent::Failed("the guest's process has ended".into()));
                continue;
            }
            if let Some(reason) = self.overdue() {
                self.send_failure(&reason);
                actions = self.switchover.on(DestinationEvent::Failed { reason });
                continue;
            }
            let waits = self.hang_up_at.map_or(IDLE, left).min(self.broken.map_or(IDLE, left)).min(self.placing.left());
            if self.broken.take_if(|deadline| left(*deadline).is_zero()).is_some() {
                if let Some(event) = self.channels_failed() {
                    actions = self.switchover.on(event);
                }
                continue;
            }
            match events.recv_timeout(waits) {
                Ok(event) => {
                    if let Some(event) = self.translate(event) {
                        actions.extend(self.switchover.on(event));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("the acceptor holds a sender"),
            }
        }
    }

    fn report_progress(&mut self) {
        let ended = self.end.is_some() && !self.lacks_pages();
        if !self.placing.is_due() || ended {
            return;
        }
        let phase = match self.phase {
            Phase::SettingUp => "setting up",
            Phase::Rounds => "receiving memory",
            Phase::SwitchingOver => "switching over",
            Phase::Committed => "starting the guest",
            Phase::PostCopy => "receiving the rest of memory after the guest",
        };
        let missing = self.target.post_copy().map_or(0, |post_copy| post_copy.missing());
        self.placing.report(self.observer, phase, self.acceptor.pages_placed(), missing * PAGE_SIZE as u64);
    }

    /// Returns whether the migration has ended and the source has received the outcome, or its time to reconnect is over.
    fn is_over(&mut self) -> bool {
        if self.end.is_none() || self.lacks_pages() {
            self.hang_up_at = None;
            return false;
        }
        // A source that was lost while the guest's last memory arrived notices the loss only after a time of silence.
        let may_be_lost = self.peer.is_connected() && self.end == Some(DestinationEnd::Running);
        let linger = if may_be_lost { self.linger.saturating_add(SILENCE_LIMIT) } else { self.linger };
        let hang_up_at = *self.hang_up_at.get_or_insert_with(|| after(linger));
        self.settled || Instant::now() >= hang_up_at
    }

    /// Returns why this side gives up, where a time limit has passed and it may still give up.
    fn overdue(&mut self) -> Option<String> {
        if !self.switchover.may_give_up() {
            return None;
        }
        let received = self.acceptor.received();
        if received != self.received {
            (self.received, self.stalled_at) = (received, self.stall.map(after));
        }
        let passed = |at: Instant| Instant::now() >= at;
        if self.until.is_some_and(passed) {
            return Some("the guest was not here in time (the destination's time limit)".into());
        }
        self.stalled_at
            .is_some_and(passed)
            .then(|| "nothing of the guest arrived for too long (the destination's stall limit)".into())
    }

    /// Returns whether the guest runs here and lacks part of its memory.
    fn lacks_pages(&self) -> bool {
        self.end == Some(DestinationEnd::Running) && self.lacks_memory == Some(Lacks::Awaited)
    }

    fn perform(&mut self, action: DestinationAction) -> Option<DestinationEvent> {
        tracing::debug!(?action, "switchover");
        match action {
            DestinationAction::WriteRecord(state) => {
                if state == DestinationState::Committed {
                    self.decided = Some(Instant::now());
                    self.phase = Phase::Committed;
                }
                match self.ledger.write(RecordState::Destination(state)) {
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
            // There is no autostart here: only this driver starts the guest.
            DestinationAction::ClearAutostart => Some(DestinationEvent::AutostartCleared),
            DestinationAction::AcceptStream => {
                self.phase = Phase::Rounds;
                self.acceptor.open();
                if let Some(welcome) = self.welcome.take() {
                    self.peer.send(&ControlMessage::Welcome(welcome));
                    self.peer.send(&ControlMessage::Ready { placement: self.target.placement(), deltas: Vec::new() });
                }
                match self.start_devices() {
                    Ok(()) => None,
                    Err(reason) => self.failed_to_load(&reason),
                }
            }
            DestinationAction::Send(message) => {
                if message == SwitchoverMessage::Running {
                    self.figures.cpu_seconds = self.cpu.seconds();
                    self.figures.faults = process::faults(std::process::id()).saturating_sub(self.faults_before);
                    self.peer.send(&ControlMessage::Figures(self.figures.clone()));
                }
                self.peer.send(&ControlMessage::Switchover(message));
                None
            }
            DestinationAction::Cont => self.start_guest(),
            DestinationAction::AnnounceSelf => {
                if let Err(error) = self.vmm.arrived() {
                    self.observer.note(&error.to_string());
                }
                None
            }
            DestinationAction::Quit => {
                self.abort.raise("the migration was aborted");
                // Dropped, because the channel of the state may be waiting for its readers.
                (self.ahead, self.last) = (None, None);
                // So that no channel's thread writes the memory of a monitor that is being ended.
                self.acceptor.join();
                Some(match self.vmm.discard() {
                    Ok(()) => DestinationEvent::Guest(DestinationGuest::Gone),
                    Err(error) => {
                        DestinationEvent::Failed { reason: format!("the copy of the guest stays here: {error}") }
                    }
                })
            }
            DestinationAction::AwaitSource => {
                if !self.peer.is_connected() && self.switchover.unsure() {
                    self.observer.note(&format!(
                        "the source is lost and the guest is loaded and paused here: waiting for the source's decision which side \
                         runs it (migration {})",
                        self.acceptor.session().id
                    ));
                }
                None
            }
            DestinationAction::Done(end) => {
                if let DestinationEnd::Stuck { reason } = &end {
                    self.send_failure(reason);
                }
                if end == DestinationEnd::Running
                    && let Some(post_copy) = self.target.post_copy()
                {
                    self.phase = Phase::PostCopy;
                    self.observer
                        .note(&format!("the guest runs; {} pages are still at the source", post_copy.missing()));
                    post_copy.arm();
                }
                self.end = Some(end);
                if self.lacks_pages() && self.abort.is_over() {
                    // The channels broke meanwhile. Queued behind the event of a failure of the memory, if there is one, so that the
                    // source receives that reason first.
                    let _ = self.events_in.send(Event::Broken(self.data_incarnation));
                }
                None
            }
        }
    }

    /// Starts the guest and returns the outcome; none if the start has to wait.
    fn start_guest(&mut self) -> Option<DestinationEvent> {
        match self.lacks_memory {
            // All memory is in place. The channels are ended, so that no thread writes the memory of a running guest, whatever a source
            // sends.
            None => {
                self.abort.finish();
                self.acceptor.join();
            }
            Some(Lacks::Awaited) if self.abort.is_over() => {
                // The monitor may touch missing memory in `resume`, and while it blocks this thread cannot accept new channels.
                self.observer.note("the channels of the guest's memory failed: it is started when there are new ones");
                self.start_waits = true;
                self.peer.hang_up();
                return None;
            }
            Some(Lacks::ForGood(_)) => {
                let reason = "part of the guest's memory will never arrive".to_owned();
                return Some(DestinationEvent::Failed { reason });
            }
            Some(Lacks::Awaited | Lacks::Nothing(_)) => {}
        }
        Some(match self.vmm.resume() {
            Ok(()) => {
                self.figures.start_ms = self.decided.map_or(0.0, |since| since.elapsed().as_secs_f64() * 1e3);
                DestinationEvent::Guest(DestinationGuest::Running)
            }
            Err(_) if self.vmm.has_ended() => DestinationEvent::Guest(DestinationGuest::Gone),
            Err(error) => DestinationEvent::Failed { reason: format!("the monitor does not start the guest: {error}") },
        })
    }

    /// Queues the guest's start, if it waits: new channels are there, or never will be.
    fn start_now(&mut self) {
        if std::mem::take(&mut self.start_waits) {
            // The receiver is this thread's own, so this cannot fail.
            let _ = self.events_in.send(Event::Start);
        }
    }

    fn translate(&mut self, event: Event) -> Option<DestinationEvent> {
        match event {
            Event::Peer(news) => match self.peer.handle(news)? {
                PeerEvent::Message(message, _share) => self.receive(message),
                PeerEvent::Lost(reason) => {
                    self.hang_up_at = None;
                    if self.end.is_none() {
                        self.observer.note(&format!("the connection to the source is lost: {reason}"));
                        self.abort.lost(format_args!("the source was lost: {reason}"));
                    } else if self.lacks_pages() {
                        self.observer.note(&format!(
                            "the source is lost ({reason}) and part of the guest's memory with it: waiting for it to reconnect"
                        ));
                    }
                    Some(DestinationEvent::ConnectionLost)
                }
                PeerEvent::Connected => {
                    // The source gets its full time again to receive the outcome.
                    self.hang_up_at = None;
                    if let Some(DestinationEnd::Stuck { reason }) = &self.end {
                        self.send_failure(reason);
                    }
                    self.renew_channels();
                    Some(DestinationEvent::Connected)
                }
                PeerEvent::Unreachable(_) => None,
            },
            Event::Device(news) => self.handle_device(news),
            Event::State(Part::Ahead) if self.state_begun => {
                self.failed_to_load("the source sends state ahead of what it has sent already")
            }
            Event::State(Part::Ahead) => self.load_ahead(),
            Event::State(Part::Final) => {
                self.phase = Phase::SwitchingOver;
                self.state_begun = true;
                self.load_if_complete()
            }
            Event::Fenced => {
                self.observer.note("an operator has confirmed that the source is gone for good");
                self.peer.hang_up();
                // No source is left that needs an answer.
                self.settled = true;
                let pages = self.target.post_copy().map_or(0, |post_copy| post_copy.missing());
                if pages > 0 {
                    let reason =
                        format!("the source is gone for good, and {pages} pages of the guest's memory with it");
                    self.handle_post_copy(PostCopyEvent::Failed(reason));
                    self.start_now();
                }
                Some(DestinationEvent::SourceFenced)
            }
            Event::PostCopy(news) => {
                self.handle_post_copy(news);
                None
            }
            Event::Start => self.start_guest(),
            Event::Broken(incarnation) if incarnation != self.data_incarnation => None,
            Event::Broken(_) if self.abort.was_lost() && self.switchover.may_give_up() => {
                self.broken = Some(Instant::now() + LAST_WORDS);
                None
            }
            Event::Broken(_) => self.channels_failed(),
            Event::Cancelled if self.lacks_pages() => {
                self.observer.note("the guest runs here and lacks part of its memory: this cannot be cancelled");
                None
            }
            // The wait for the source to close the connection is short.
            Event::Cancelled if self.end.is_some() => None,
            Event::Cancelled => {
                if !self.switchover.may_give_up() {
                    self.observer.note("the guest is loaded here and the source decides: this cannot be cancelled");
                    return None;
                }
                self.send_failure(CANCELLED);
                self.cancelled = true;
                Some(DestinationEvent::Failed { reason: CANCELLED.into() })
            }
        }
    }

    /// Handles a failure of the data plane. Before this side is prepared, it ends the migration. Afterwards only post-copy still needs
    /// the data plane: there all channels are opened anew, once the guest runs.
    fn channels_failed(&mut self) -> Option<DestinationEvent> {
        let reason = self.abort.reason()?;
        if self.switchover.may_give_up() {
            self.send_failure(&reason);
            return Some(DestinationEvent::Failed { reason });
        }
        if self.lacks_pages() || self.start_waits {
            self.observer.note(&format!("the channels of the guest's memory failed, and are made anew: {reason}"));
            // So that the source notices the failure, if it has not.
            self.peer.hang_up();
        }
        None
    }

    fn receive(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        match message {
            ControlMessage::Totals(totals) => {
                let placed = self.acceptor.placed();
                let complete =
                    totals.ram.len() == placed.len() && placed.iter().zip(&totals.ram).all(|(has, last)| has >= last);
                if !complete {
                    let reason = "pages are missing: the totals of the source are not what was placed";
                    return Some(DestinationEvent::Failed { reason: reason.into() });
                }
                let refused = self.target.refused();
                if refused > 0 {
                    let reason = format!("{refused} pages arrived damaged, and the source has not sent them again");
                    return Some(DestinationEvent::Failed { reason });
                }
                self.target.seal();
                self.totals = Some(totals);
                self.load_if_complete()
            }
            ControlMessage::PostCopy => match self.begin_post_copy() {
                Ok(()) => None,
                Err(reason) => {
                    let reason = format!("post-copy is not possible at the destination: {reason}");
                    self.send_failure(&reason);
                    Some(DestinationEvent::Failed { reason })
                }
            },
            ControlMessage::Goodbye => {
                self.settled = self.end.is_some();
                None
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

    /// Prepares for post-copy: the guest will go on before all of its RAM is here.
    fn begin_post_copy(&mut self) -> Result<(), String> {
        if !self.acceptor.session().has(POST_COPY) {
            return Err("it was not agreed on".into());
        }
        if self.phase != Phase::Rounds || self.target.post_copy().is_some() {
            return Err("it was begun already, or the guest is being switched over".into());
        }
        let (events, monitor_call) = (self.events_in.clone(), self.occupied.clone());
        let news = Box::new(move |news| {
            let failed = if let PostCopyEvent::Failed(reason) = &news { Some(reason.clone()) } else { None };
            // Queued before the alarm, whose event closes the connection to the source.
            drop(events.send(Event::PostCopy(news)));
            if let Some(reason) = failed {
                monitor_call.raise(reason);
            }
        });
        let post_copy = PostCopy::begin(self.target.ram(), news)?;
        self.faults = Some(post_copy.handle_faults().map_err(|error| format!("no thread for page faults: {error}"))?);
        let released = Arc::clone(&post_copy);
        self.abort.on_end(move || released.release_if_not_loaded());
        self.target.begin_post_copy(post_copy)?;
        self.lacks_memory = Some(Lacks::Awaited);
        self.peer.send(&ControlMessage::PostCopyReady);
        Ok(())
    }

    /// Admits new data channels in post-copy, when the source has reconnected.
    fn renew_channels(&mut self) {
        let Some(post_copy) = self.target.post_copy().cloned() else { return };
        if self.switchover.may_give_up() || (self.end.is_some() && self.end != Some(DestinationEnd::Running)) {
            // The source has reconnected only to exchange that the migration has failed.
            return;
        }
        match &self.lacks_memory {
            Some(Lacks::Awaited) => {}
            Some(Lacks::Nothing(figures)) => return self.peer.send(&ControlMessage::PostCopyDone(*figures)),
            // The source may not have received it before.
            Some(Lacks::ForGood(reason)) => return self.send_failure(reason),
            None => return,
        }
        self.abort.lost("the source has reconnected with new channels");
        post_copy.disconnected();
        self.channels.join();
        self.data_incarnation = self.peer.incarnation();
        self.abort = Arc::new(Abort::default());
        let (broken, incarnation) = (self.events_in.clone(), self.data_incarnation);
        self.abort.on_end(move || drop(broken.send(Event::Broken(incarnation))));
        self.broken = None;
        self.acceptor.renew(incarnation, &self.abort);
        self.peer.send(&ControlMessage::PostCopyReady);
        self.start_now();
    }

    fn handle_post_copy(&mut self, news: PostCopyEvent) {
        match news {
            PostCopyEvent::Complete => {
                let figures = self.target.post_copy().map(|post_copy| post_copy.figures()).unwrap_or_default();
                self.lacks_memory = Some(Lacks::Nothing(figures));
                self.observer.note("all of the guest's memory is here");
                self.peer.send(&ControlMessage::PostCopyDone(figures));
            }
            PostCopyEvent::Note(text) => self.observer.note(&text),
            PostCopyEvent::NoMemory(reason) => {
                self.observer.note(&format!("the guest waits for memory of this host: {reason}"));
            }
            PostCopyEvent::Failed(reason) => {
                self.observer.note(&format!("the guest's memory: {reason}"));
                self.send_failure(&reason);
                self.abort.raise(&reason);
                self.lacks_memory = Some(Lacks::ForGood(reason));
            }
        }
    }

    fn load_ahead(&mut self) -> Option<DestinationEvent> {
        let mut reader = self.ahead.take()?;
        let inside = self.occupied.enter(&self.abort, None);
        let loaded = self.vmm.load_ahead(&mut reader).map_err(|error| error.to_string());
        let loaded = loaded.and_then(|()| reader.finish().map_err(|error| error.to_string()));
        drop(inside);
        match loaded {
            Ok(_) => {
                self.peer.send(&ControlMessage::SwitchoverAck);
                None
            }
            Err(_) if reader.was_lost() => self.state_incomplete(),
            Err(error) => self.failed_to_load(&format!("loading state ahead failed: {error}")),
        }
    }

    /// Loads the guest's state once all of its RAM is here.
    fn load_if_complete(&mut self) -> Option<DestinationEvent> {
        if !self.state_begun || self.totals.is_none() {
            return None;
        }
        let mut reader = self.last.take()?;
        let since = Instant::now();
        let inside = self.occupied.enter(&self.abort, None);
        let loaded = self.vmm.load(&mut reader).map_err(|error| error.to_string());
        let loaded = loaded.and_then(|()| reader.finish().map_err(|error| error.to_string()));
        drop(inside);
        match loaded {
            Ok(_) if self.target.post_copy().is_some_and(|post_copy| !post_copy.loaded()) => {
                self.failed_to_load("loading the guest's state failed: pages that it needs did not arrive")
            }
            Ok(_) => {
                self.loaded = Some(since);
                self.all_loaded()
            }
            Err(_) if reader.was_lost() => self.state_incomplete(),
            Err(error) => self.failed_to_load(&format!("loading the guest's state failed: {error}")),
        }
    }

    /// Returns the event that all state is loaded, once the monitor and all devices have loaded.
    pub(super) fn all_loaded(&mut self) -> Option<DestinationEvent> {
        let since = self.loaded.filter(|_| self.devices.all_loaded())?;
        self.figures.load_ms = since.elapsed().as_secs_f64() * 1e3;
        Some(DestinationEvent::AllPlacedAndLoaded)
    }

    /// Handles the loss of the stream channel amid the state. The reason arrives on the control channel, or the control channel is lost.
    fn state_incomplete(&self) -> Option<DestinationEvent> {
        self.abort.lost("the source closed the stream channel before the end of the guest's state");
        None
    }

    pub(super) fn failed_to_load(&mut self, reason: &str) -> Option<DestinationEvent> {
        // Where the migration is being taken down already, the alarm's reason explains more.
        let reason = self.abort.reason().unwrap_or_else(|| reason.to_owned());
        self.send_failure(&reason);
        Some(DestinationEvent::Failed { reason })
    }

    fn send_failure(&self, reason: &str) {
        self.peer.send(&ControlMessage::Failed { reason: reason.to_owned() });
    }

    fn finish(mut self, source: String) -> Result<ReceiveReport, MigrationError> {
        let end = self.end.take();
        if let Some(post_copy) = self.target.post_copy() {
            post_copy.stop();
            if matches!(end, Some(DestinationEnd::Discarded { .. })) {
                post_copy.release();
            }
        }
        let lost = match (&end, self.lacks_memory.take()) {
            (Some(DestinationEnd::Running | DestinationEnd::Stuck { .. }), Some(Lacks::ForGood(reason))) => {
                Some(reason)
            }
            // No thread handles the guest's page faults any more.
            (Some(DestinationEnd::Stuck { reason }), Some(Lacks::Awaited)) => Some(reason.clone()),
            _ => None,
        };
        let (outcome, guest, reason) = match end {
            _ if lost.is_some() => (Outcome::Lost, GuestState::LacksMemory, lost),
            Some(DestinationEnd::Running) => match self.unwritten.take().filter(|_| !self.ledger.settled()) {
                None => (Outcome::Completed, GuestState::BelongsToDestination, None),
                Some(why) => {
                    let reason = format!("the guest runs here, but the record could not be written: {why}");
                    (Outcome::Unconfirmed, GuestState::BelongsToDestination, Some(reason))
                }
            },
            // The first failure is the reason, and the source may have cancelled too.
            Some(DestinationEnd::Discarded { reason }) if self.cancelled && reason == CANCELLED => {
                (Outcome::Cancelled, GuestState::NotHere, Some(reason))
            }
            Some(DestinationEnd::Discarded { reason }) => (Outcome::Failed, GuestState::NotHere, Some(reason)),
            Some(DestinationEnd::Lost { reason }) => (Outcome::Lost, GuestState::NotHere, Some(reason)),
            Some(DestinationEnd::Stuck { reason }) => {
                (Outcome::Unconfirmed, GuestState::PausedAtDestination, Some(reason))
            }
            Some(DestinationEnd::Conflict) => (
                Outcome::Unconfirmed,
                GuestState::RunsTwice,
                Some("the guest was started here by somebody else".into()),
            ),
            None => (Outcome::Failed, GuestState::NotHere, self.abort.reason()),
        };
        self.peer.hang_up();
        self.abort.finish();
        // Dropped, because a channel may be waiting for its readers.
        (self.ahead, self.last) = (None, None);
        self.devices.join(self.observer);
        self.acceptor.join();
        self.channels.join();
        if let Some(faults) = self.faults.take() {
            // A panic of the thread has been printed.
            let _ = faults.join();
        }
        let report = ReceiveReport {
            id: self.acceptor.session().id.to_string(),
            outcome,
            reason: reason.clone(),
            source,
            placement: self.target.placement(),
            load_ms: self.figures.load_ms,
            start_ms: self.figures.start_ms,
        };
        match reason {
            None if outcome == Outcome::Completed => Ok(report),
            reason => Err(MigrationError {
                side: Side::Destination,
                phase: self.phase,
                guest,
                cancelled: outcome == Outcome::Cancelled,
                refused: false,
                dial: None,
                reason: reason.unwrap_or_else(|| "no reason given".into()),
                report: None,
                received: Some(Box::new(report)),
            }),
        }
    }
}
