//! The destination's driver: as the source's, one thread and one loop over events, led by the switchover's state machine.

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
use super::post_copy::{self, PostCopy, PostCopyNews};
use super::target::{RamSink, Target};
use super::{Destination, Listening, Taking};
use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::control_link::{ControlEvent, ControlLink, say};
use crate::cpu_time::{self, CpuTime};
use crate::device_state::load::{DeviceSink, LoadNews, LoadingDevices};
use crate::device_state::{self, DeviceChannels, DeviceId};
use crate::ledger::Ledger;
use crate::migration::{
    GuestState, MigrationError, POST_COPY, Phase, SEND_AGAIN, Side, difference, machine, size_difference,
};
use crate::monitor::{CaughtObserver, DestinationMonitor};
use crate::occupied::Occupied;
use crate::process;
use crate::receive::Sink;
use crate::report::{Observer, Outcome, ReceiveReport};
use crate::session::{
    Doorman, Features, Greeted, Greeting, Heard, LAST_WORDS, Peer, PeerNews, Placing, Sinks, TellPeer, after,
    link_events,
};
use crate::state::{Part, StateReader, StateSink, state_sink};
use crate::transport::{Address, Incoming, Stop, Writer};
use crate::vmm::DestinationVmm;

/// How often the loop wakes when nothing happens.
const IDLE: Duration = Duration::from_secs(1);
/// The reason where it was cancelled on this side.
const CANCELLED: &str = "cancelled";

/// What wakes the driver.
#[derive(Debug)]
pub(super) enum Event {
    Peer(PeerNews),
    State(Part),
    Device(LoadNews),
    Fenced,
    PostCopy(PostCopyNews),
    /// The guest's start need not wait any more.
    Start,
    /// The data channels of this incarnation have failed.
    Broken(u32),
    Cancelled,
}

/// Waits for a source, and takes its migration.
pub(super) fn run(
    listening: Listening,
    vmm: &mut dyn DestinationVmm,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let Listening { taking, address, incoming } = listening;
    // However this ends, nothing listens or shakes hands here any more.
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
    let refusal = |hello: &Hello| {
        let post_copy = || {
            let reason = no_post_copy.as_ref()?;
            Destination::wants_post_copy(hello)
                .then(|| format!("post-copy is not possible at the destination: {reason}"))
        };
        let devices = || device_state::difference(&hello.machine, &ids);
        difference(&hello.machine.blocks, &ours).or_else(devices).or_else(post_copy)
    };
    let mut offered = Destination::FEATURES.offered.to_vec();
    offered.extend(no_post_copy.is_none().then_some(POST_COPY));
    let features = Features { offered: &offered, ..Destination::FEATURES };
    let greeting = Greeting { takes: &[(Mode::Embedded, features)], refusal: &refusal };
    let greeted = greeting.first(&incoming, cancel, |reason| observer.note(&format!("refused: {reason}")));
    let Some(greeted) = greeted else {
        let reason = if cancel.is_cancelled() { "cancelled before a source came" } else { "the listener has ended" };
        return Err(MigrationError { cancelled: cancel.is_cancelled(), ..MigrationError::not_accepted(reason) });
    };
    let report = take(taking, &address, greeted, incoming, vmm, cpu.clone(), cancel, observer);
    drop(stopping);
    report
}

/// Why post-copy is not possible here, if it is not.
fn no_post_copy(vmm: &mut DestinationMonitor<'_>, ram: &GuestRam) -> Result<Option<String>, MigrationError> {
    let refused = vmm.post_copy_refusal().map_err(MigrationError::not_accepted)?;
    Ok(refused.or_else(|| post_copy::refusal(ram)))
}

/// Takes the migration of a source that was greeted elsewhere, by whoever found out then what RAM there is to be.
pub(super) fn run_greeted(
    taking: Taking,
    address: &Address,
    mut greeted: Greeted,
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

/// Tells a source that it is refused, and why.
fn refuse(writer: &mut Writer, reason: String) -> MigrationError {
    // The peer may be gone; then nobody misses the answer.
    let _ = say(writer, &ControlMessage::Refused { reason: reason.clone() });
    MigrationError::not_accepted(reason)
}

#[allow(clippy::too_many_arguments)]
fn take<'a>(
    taking: Taking,
    address: &Address,
    greeted: Greeted,
    incoming: Incoming,
    vmm: DestinationMonitor<'a>,
    cpu: CpuTime,
    cancel: &Cancel,
    observer: &'a dyn Observer,
) -> Result<ReceiveReport, MigrationError> {
    let Taking { target, devices, device_share, state_dir, linger, stall, give_up_after, monitor, fence } = taking;
    let Greeted { session, mode: _, machine, peer, mut writer, reader, closer, messages, welcome } = greeted;
    observer.note(&format!("migration {} from {peer}", session.id));

    let state = RecordState::Destination(DestinationState::Started);
    let ledger = Ledger::new(state_dir.as_deref(), &session, state, address.to_string(), &monitor);
    let ledger = ledger.map_err(|error| refuse(&mut writer, error.to_string()))?;

    let (events_in, events) = channel();
    let told = events_in.clone();
    let occupied = Occupied::default();
    let meanwhile = occupied.clone();
    let tell: TellPeer = Arc::new(move |news| {
        if let PeerNews::Control(_, ControlEvent::Lost(reason)) = &news {
            meanwhile.lost(format_args!("the source was lost: {reason}"));
        }
        drop(told.send(Event::Peer(news)));
    });
    let link = ControlLink::start(writer, reader, closer, messages, link_events(&tell, 1));
    let link = link.map_err(MigrationError::not_accepted)?;
    let abort = Arc::new(Abort::default());
    let broken = events_in.clone();
    abort.on_end(move || drop(broken.send(Event::Broken(1))));
    let (cancelled, meanwhile) = (events_in.clone(), occupied.clone());
    let _cancelling = cancel.on_cancel(move || {
        meanwhile.raise(CANCELLED);
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
        may_refuse: session.has(SEND_AGAIN),
        state: Mutex::new(Some(state_sink)),
        mixed: devices.on(DeviceChannels::Mixed),
        apart: devices.on(DeviceChannels::Own(0)),
    };
    let rules = session.rules();
    let channels = PostCopyChannels::default();
    let other = channels.door(&target, rules);
    let doorman = Arc::new(Doorman::new(session, Box::new(sinks), &abort, Some(other), tell));
    let admitting = Arc::clone(&doorman);
    let admit = move || {
        while let Some((connection, header)) = incoming.next() {
            admitting.admit(connection, &header);
        }
    };
    // It ends by itself once nothing listens.
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
        doorman,
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
    // The word of it may still lie in the queue.
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
    /// Where the state of devices comes on RAM channels, and where on channels of its own.
    mixed: Option<Arc<LoadingDevices>>,
    apart: Option<Arc<LoadingDevices>>,
}

impl<F: FnMut(Part) + Send + 'static> Sinks for TargetSinks<F> {
    fn ram(&self, index: u16) -> Box<dyn Sink> {
        Box::new(RamSink::new(&self.target, index, self.may_refuse).with_devices(self.mixed.clone()))
    }

    fn stream(&self) -> Box<dyn Sink> {
        let sink = self.state.lock().expect("no thread panics with the lock held").take();
        Box::new(sink.expect("the doorman lets one stream channel in"))
    }

    fn devices(&self) -> Option<Box<dyn Sink>> {
        Some(Box::new(DeviceSink(self.apart.clone()?)))
    }
}

pub(super) struct Driver<'a> {
    vmm: DestinationMonitor<'a>,
    /// What the migration's threads take here.
    cpu: CpuTime,
    observer: &'a dyn Observer,
    pub(super) events_in: Sender<Event>,
    channels: PostCopyChannels,
    /// The thread that hears of faults, in post-copy.
    faults: Option<JoinHandle<()>>,
    /// The guest is to run before all of its RAM is here, and what has come of that.
    lacks_memory: Option<Lacks>,
    /// The guest is to be started when the channels for what it lacks are there again.
    start_waits: bool,
    pub(super) devices: Devices,
    /// Since when the monitor's own state was being loaded, once it is.
    loaded: Option<Instant>,
    target: Arc<Target>,
    switchover: DestinationSwitchover,
    ledger: Ledger,
    pub(super) peer: Peer,
    pub(super) occupied: Occupied,
    data_incarnation: u32,
    welcome: Option<Welcome>,
    doorman: Arc<Doorman>,
    pub(super) abort: Arc<Abort>,
    /// The state's readers, until they have been read.
    ahead: Option<StateReader>,
    last: Option<StateReader>,
    totals: Option<Totals>,
    state_begun: bool,
    decided: Option<Instant>,
    phase: Phase,
    placing: Placing,
    figures: DestinationFigures,
    faults_before: u64,
    /// Until when a word about a broken channel is waited for.
    broken: Option<Instant>,
    end: Option<DestinationEnd>,
    /// Once it has ended: the source need not be answered any more.
    settled: bool,
    /// Once it has ended: until when the source is let come back, or is waited for to hang up.
    hang_up_at: Option<Instant>,
    linger: Duration,
    cancelled: bool,
    /// Why the record could not be written, where the last attempt failed.
    unwritten: Option<String>,
    /// When the guest must be prepared.
    until: Option<Instant>,
    /// How long nothing may arrive; when something must have, and how many packets had when that was set.
    stall: Option<Duration>,
    stalled_at: Option<Instant>,
    received: u64,
}

/// What the guest's missing memory has come to.
#[derive(Clone, Debug, PartialEq)]
enum Lacks {
    /// It is on its way.
    Awaited,
    /// It is here, and this is how it came.
    Nothing(PostCopyFigures),
    /// It will not come, and why.
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
            // Once it has ended, the source is answered until it hangs up.
            if self.is_over() {
                return;
            }
            let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
            self.tell_progress();
            if self.runs_short() && self.target.post_copy().is_some_and(|post_copy| post_copy.guest_has_ended()) {
                self.post_copy_says(PostCopyNews::Failed("the guest's process has ended".into()));
                continue;
            }
            if let Some(reason) = self.overdue() {
                self.tell_failure(&reason);
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
                Err(RecvTimeoutError::Disconnected) => unreachable!("the doorman holds a sender"),
            }
        }
    }

    fn tell_progress(&mut self) {
        let ended = self.end.is_some() && !self.runs_short();
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
        self.placing.report(self.observer, phase, self.doorman.pages_placed(), missing * PAGE_SIZE as u64);
    }

    /// Whether it has ended, and the source knows, or has had its time to come back for it.
    fn is_over(&mut self) -> bool {
        if self.end.is_none() || self.runs_short() {
            self.hang_up_at = None;
            return false;
        }
        // A source that was lost while the guest's last memory came notices it only after a time of silence.
        let may_be_lost = self.peer.is_connected() && self.end == Some(DestinationEnd::Running);
        let linger = if may_be_lost { self.linger.saturating_add(SILENCE_LIMIT) } else { self.linger };
        let hang_up_at = *self.hang_up_at.get_or_insert_with(|| after(linger));
        self.settled || Instant::now() >= hang_up_at
    }

    /// Why the source has had its time, where it has. Only as long as this side may give up.
    fn overdue(&mut self) -> Option<String> {
        if !self.switchover.may_give_up() {
            return None;
        }
        let received = self.doorman.received();
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

    /// Whether the guest runs here and lacks part of its memory.
    fn runs_short(&self) -> bool {
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
            // The guest starts when this driver has it started, and not before.
            DestinationAction::ClearAutostart => Some(DestinationEvent::AutostartCleared),
            DestinationAction::AcceptStream => {
                self.phase = Phase::Rounds;
                self.doorman.open();
                if let Some(welcome) = self.welcome.take() {
                    self.peer.say(&ControlMessage::Welcome(welcome));
                    self.peer.say(&ControlMessage::Ready { placement: self.target.placement(), deltas: Vec::new() });
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
                    self.peer.say(&ControlMessage::Figures(self.figures.clone()));
                }
                self.peer.say(&ControlMessage::Switchover(message));
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
                // The channel of the state may be waiting for its readers.
                (self.ahead, self.last) = (None, None);
                // No channel's thread writes the memory of a monitor that is being ended.
                self.doorman.join();
                Some(match self.vmm.discard() {
                    Ok(()) => DestinationEvent::Guest(DestinationGuest::Gone),
                    Err(error) => {
                        DestinationEvent::Failed { reason: format!("what came of the guest stays here: {error}") }
                    }
                })
            }
            DestinationAction::AwaitSource => {
                if !self.peer.is_connected() && self.switchover.unsure() {
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
                if end == DestinationEnd::Running
                    && let Some(post_copy) = self.target.post_copy()
                {
                    self.phase = Phase::PostCopy;
                    self.observer
                        .note(&format!("the guest runs; {} pages are still at the source", post_copy.missing()));
                    post_copy.arm();
                }
                self.end = Some(end);
                if self.runs_short() && self.abort.is_over() {
                    // They broke meanwhile. What is wrong with its memory, if that is why, lies in the queue, and the source is told
                    // of it first.
                    let _ = self.events_in.send(Event::Broken(self.data_incarnation));
                }
                None
            }
        }
    }

    /// Starts the guest; none if that has to wait.
    fn start_guest(&mut self) -> Option<DestinationEvent> {
        match self.lacks_memory {
            // Everything is in place. No channel's thread writes the memory of a guest that runs, whatever a source sends.
            None => {
                self.abort.finish();
                self.doorman.join();
            }
            Some(Lacks::Awaited) if self.abort.is_over() => {
                // The monitor may touch what is missing, and while it waits for that, nobody here makes new channels.
                self.observer.note("the channels of the guest's memory failed: it is started when there are new ones");
                self.start_waits = true;
                self.peer.hang_up();
                return None;
            }
            Some(Lacks::ForGood(_)) => {
                let reason = "part of the guest's memory will not come".to_owned();
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

    /// What the guest's start waited for has come, or never will.
    fn start_now(&mut self) {
        if std::mem::take(&mut self.start_waits) {
            // This thread takes it.
            let _ = self.events_in.send(Event::Start);
        }
    }

    fn translate(&mut self, event: Event) -> Option<DestinationEvent> {
        match event {
            Event::Peer(news) => match self.peer.hear(news)? {
                Heard::Said(message, _share) => self.heard(message),
                Heard::Lost(reason) => {
                    self.hang_up_at = None;
                    if self.end.is_none() {
                        self.observer.note(&format!("the connection to the source is lost: {reason}"));
                        self.abort.lost(format_args!("the source was lost: {reason}"));
                    } else if self.runs_short() {
                        self.observer.note(&format!(
                            "the source is lost ({reason}) and part of the guest's memory with it: waiting for it to come back"
                        ));
                    }
                    Some(DestinationEvent::ConnectionLost)
                }
                Heard::Connected => {
                    // It has its time again to hear how it ended.
                    self.hang_up_at = None;
                    if let Some(DestinationEnd::Stuck { reason }) = &self.end {
                        self.tell_failure(reason);
                    }
                    self.renew_channels();
                    Some(DestinationEvent::Connected)
                }
                Heard::Unreachable(_) => None,
            },
            Event::Device(news) => self.device_says(news),
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
                self.observer.note("an operator says that the source is gone for good");
                self.peer.hang_up();
                // Nobody is left to take note.
                self.settled = true;
                let pages = self.target.post_copy().map_or(0, |post_copy| post_copy.missing());
                if pages > 0 {
                    let reason =
                        format!("the source is gone for good, and {pages} pages of the guest's memory with it");
                    self.post_copy_says(PostCopyNews::Failed(reason));
                    self.start_now();
                }
                Some(DestinationEvent::SourceFenced)
            }
            Event::PostCopy(news) => {
                self.post_copy_says(news);
                None
            }
            Event::Start => self.start_guest(),
            Event::Broken(incarnation) if incarnation != self.data_incarnation => None,
            Event::Broken(_) if self.abort.was_lost() && self.switchover.may_give_up() => {
                self.broken = Some(Instant::now() + LAST_WORDS);
                None
            }
            Event::Broken(_) => self.channels_failed(),
            Event::Cancelled if self.runs_short() => {
                self.observer.note("the guest runs here and lacks part of its memory: this cannot be cancelled");
                None
            }
            // Who waits here for the source to hang up does not wait for long.
            Event::Cancelled if self.end.is_some() => None,
            Event::Cancelled => {
                if !self.switchover.may_give_up() {
                    self.observer.note("the guest stands loaded here and the source decides: this cannot be cancelled");
                    return None;
                }
                self.tell_failure(CANCELLED);
                self.cancelled = true;
                Some(DestinationEvent::Failed { reason: CANCELLED.into() })
            }
        }
    }

    /// The data plane has failed. Before this side is prepared that ends the migration. Afterwards only post-copy still needs
    /// it: there all channels are made anew, once the guest runs.
    fn channels_failed(&mut self) -> Option<DestinationEvent> {
        let reason = self.abort.reason()?;
        if self.switchover.may_give_up() {
            self.tell_failure(&reason);
            return Some(DestinationEvent::Failed { reason });
        }
        if self.runs_short() || self.start_waits {
            self.observer.note(&format!("the channels of the guest's memory failed, and are made anew: {reason}"));
            // By which the source notices, if it has not.
            self.peer.hang_up();
        }
        None
    }

    fn heard(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        match message {
            ControlMessage::Totals(totals) => {
                let placed = self.doorman.placed();
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
                    self.tell_failure(&reason);
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

    /// The guest is to go on before all of its RAM is here.
    fn begin_post_copy(&mut self) -> Result<(), String> {
        if !self.doorman.session().has(POST_COPY) {
            return Err("it was not agreed on".into());
        }
        if self.phase != Phase::Rounds || self.target.post_copy().is_some() {
            return Err("it was begun already, or the guest is being switched over".into());
        }
        let (events, meanwhile) = (self.events_in.clone(), self.occupied.clone());
        let tell = Box::new(move |news| {
            let failed = if let PostCopyNews::Failed(reason) = &news { Some(reason.clone()) } else { None };
            // Before the channels are said to have broken, by which the source would no longer hear of it.
            drop(events.send(Event::PostCopy(news)));
            if let Some(reason) = failed {
                meanwhile.raise(reason);
            }
        });
        let post_copy = PostCopy::begin(self.target.ram(), tell)?;
        self.faults = Some(post_copy.hear_faults().map_err(|error| format!("no thread for page faults: {error}"))?);
        let released = Arc::clone(&post_copy);
        self.abort.on_end(move || released.release_if_not_loaded());
        self.target.begin_post_copy(post_copy)?;
        self.lacks_memory = Some(Lacks::Awaited);
        self.peer.say(&ControlMessage::PostCopyReady);
        Ok(())
    }

    /// The source has come back: in post-copy its data channels are made anew.
    fn renew_channels(&mut self) {
        let Some(post_copy) = self.target.post_copy().cloned() else { return };
        if self.switchover.may_give_up() || (self.end.is_some() && self.end != Some(DestinationEnd::Running)) {
            // A source comes back to say, or to hear, that nothing has come of it.
            return;
        }
        match &self.lacks_memory {
            Some(Lacks::Awaited) => {}
            Some(Lacks::Nothing(figures)) => return self.peer.say(&ControlMessage::PostCopyDone(*figures)),
            // It may not have heard.
            Some(Lacks::ForGood(reason)) => return self.tell_failure(reason),
            None => return,
        }
        self.abort.lost("the source has come back with new channels");
        post_copy.disconnected();
        self.channels.join();
        self.data_incarnation = self.peer.incarnation();
        self.abort = Arc::new(Abort::default());
        let (broken, incarnation) = (self.events_in.clone(), self.data_incarnation);
        self.abort.on_end(move || drop(broken.send(Event::Broken(incarnation))));
        self.broken = None;
        self.doorman.renew(incarnation, &self.abort);
        self.peer.say(&ControlMessage::PostCopyReady);
        self.start_now();
    }

    fn post_copy_says(&mut self, news: PostCopyNews) {
        match news {
            PostCopyNews::Complete => {
                let figures = self.target.post_copy().map(|post_copy| post_copy.figures()).unwrap_or_default();
                self.lacks_memory = Some(Lacks::Nothing(figures));
                self.observer.note("all of the guest's memory is here");
                self.peer.say(&ControlMessage::PostCopyDone(figures));
            }
            PostCopyNews::Note(text) => self.observer.note(&text),
            PostCopyNews::NoMemory(reason) => {
                self.observer.note(&format!("the guest waits for memory of this host: {reason}"));
            }
            PostCopyNews::Failed(reason) => {
                self.observer.note(&format!("the guest's memory: {reason}"));
                self.tell_failure(&reason);
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
                self.peer.say(&ControlMessage::SwitchoverAck);
                None
            }
            Err(_) if reader.broke_off() => self.state_broke_off(),
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
                self.failed_to_load("loading the guest's state failed: pages that it needs did not come")
            }
            Ok(_) => {
                self.loaded = Some(since);
                self.all_loaded()
            }
            Err(_) if reader.broke_off() => self.state_broke_off(),
            Err(error) => self.failed_to_load(&format!("loading the guest's state failed: {error}")),
        }
    }

    /// Once the monitor and all devices have loaded.
    pub(super) fn all_loaded(&mut self) -> Option<DestinationEvent> {
        let since = self.loaded.filter(|_| self.devices.all_loaded())?;
        self.figures.load_ms = since.elapsed().as_secs_f64() * 1e3;
        Some(DestinationEvent::AllPlacedAndLoaded)
    }

    /// The source has closed the channel: why, it says on another connection, or its being lost is noticed there.
    fn state_broke_off(&self) -> Option<DestinationEvent> {
        self.abort.lost("the source closed the stream channel before the end of the guest's state");
        None
    }

    pub(super) fn failed_to_load(&mut self, reason: &str) -> Option<DestinationEvent> {
        // Where the migration is being taken down already, that reason says more.
        let reason = self.abort.reason().unwrap_or_else(|| reason.to_owned());
        self.tell_failure(&reason);
        Some(DestinationEvent::Failed { reason })
    }

    fn tell_failure(&self, reason: &str) {
        self.peer.say(&ControlMessage::Failed { reason: reason.to_owned() });
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
            // Nobody takes its page faults any more.
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
            // Whichever came first is the reason, and the source may have cancelled too.
            Some(DestinationEnd::Discarded { reason }) if self.cancelled && reason == CANCELLED => {
                (Outcome::Cancelled, GuestState::NotHere, Some(reason))
            }
            Some(DestinationEnd::Discarded { reason }) => (Outcome::Failed, GuestState::NotHere, Some(reason)),
            Some(DestinationEnd::Lost { reason }) => (Outcome::Lost, GuestState::NotHere, Some(reason)),
            Some(DestinationEnd::Stuck { reason }) => {
                (Outcome::Unconfirmed, GuestState::StandsAtDestination, Some(reason))
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
        // A channel may be waiting for its readers.
        (self.ahead, self.last) = (None, None);
        self.devices.join(self.observer);
        self.doorman.join();
        self.channels.join();
        if let Some(faults) = self.faults.take() {
            // A panic there has been printed.
            let _ = faults.join();
        }
        let report = ReceiveReport {
            id: self.doorman.session().id.to_string(),
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
                reason: reason.unwrap_or_else(|| "no reason given".into()),
                report: None,
                received: Some(Box::new(report)),
            }),
        }
    }
}
