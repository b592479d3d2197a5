//! The source's driver: events come in, the switchover's state machine says what to do, the monitor and the channels do it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_memory::dirty::DirtyLog;
use sterna_memory::ram::GuestRam;
use sterna_wire::control::{ControlMessage, DestinationFigures, Mode, PostCopyFigures, Totals};
use sterna_wire::header::ChannelKind;
use sterna_wire::switchover::{
    RecordState, SourceAction, SourceEnd, SourceEvent, SourceGuest, SourceState, SourceSwitchover, SwitchoverMessage,
};
use sterna_wire::text::cleaned;

use super::convergence::{Convergence, NotConverging};
use super::rounds::{Order, RoundNews, Rounds, Told};
use super::unsent::{PageServer, Unsent};
use super::{Settings, Source};
use crate::abort::Abort;
use crate::batch::BatchPool;
use crate::cancel::Cancel;
use crate::control_link::{ControlEvent, ControlLink};
use crate::entry::{PageSearch, Pipeline};
use crate::ledger::Ledger;
use crate::migration::{GUEST_STATE, GuestState, MigrationError, POST_COPY, Phase, Side, machine};
use crate::pacer::Pacer;
use crate::process::own_cpu_seconds;
use crate::report::{DowntimeParts, Observer, Outcome, PostCopyReport, Progress, Report};
use crate::send::{SendChannel, SendContext, Sent};
use crate::session::{self, Features, LAST_WORDS, Offer, Session, UNCHECKED};
use crate::state::{Part, StateWriter};
use crate::transport::{Address, Security};
use crate::vmm::SourceVmm;
use crate::window::Window;

/// How often progress is told.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);
/// Batches that wait for each channel or are being filled for it. They say which pages, nothing has been read yet.
const BATCHES_PER_CHANNEL: usize = 4;
/// The reason where it was cancelled on this side.
const CANCELLED: &str = "cancelled";

/// What wakes the driver.
#[derive(Debug)]
enum Event {
    Control(u32, ControlEvent),
    Reconnected(Box<Result<ControlLink, String>>),
    Rounds(RoundNews),
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
    let Source { ram, log, settings } = source;
    let (events_in, events) = channel();
    let machine = machine(vmm.name(), &ram, settings.downtime.as_millis() as u64);
    let post_copy = matches!(settings.not_converging, NotConverging::PostCopy | NotConverging::PostCopyAfter(_));
    if let Some(reason) = vmm.post_copy_refusal().filter(|_| post_copy) {
        return Err(MigrationError::untouched(format!("post-copy is not possible at the source: {reason}")));
    }
    // What was chosen is not left out silently: it is required.
    let mut wanted = vec![GUEST_STATE];
    wanted.extend(post_copy.then_some(POST_COPY));
    wanted.extend((!settings.checksums).then_some(UNCHECKED));
    let offer = Offer {
        to,
        security,
        channels: settings.channels,
        packet_size: settings.packet_size,
        machine,
        mode: Mode::Embedded,
        features: Features { offered: &wanted, required: &wanted },
        method: settings.method.method(),
    };
    let dialled = session::dial(&offer, cancel, link_events(&events_in, 1));
    // Which also is what interrupts dialling.
    let (link, session) =
        dialled.map_err(|error| if cancel.is_cancelled() { cancelled() } else { MigrationError::untouched(error) })?;
    observer.note(&format!("migration {}: {to} accepted it", session.id));
    if cancel.is_cancelled() {
        return Err(cancelled());
    }
    let state = RecordState::Source(SourceState::Started);
    let ledger = Ledger::new(settings.state_dir.as_deref(), &session, state, to.to_string());
    let ledger = ledger.map_err(MigrationError::untouched)?;

    let abort = Arc::new(Abort::default());
    let tell_cancelled = events_in.clone();
    cancel.on_cancel(move || drop(tell_cancelled.send(Event::Cancelled)));
    let broken = events_in.clone();
    abort.on_end(move || drop(broken.send(Event::Broken(1))));

    let window = Arc::new(Window::new(session.packet_size as u64, session.round_trip, settings.downtime));
    let (switchover, first) = SourceSwitchover::begin();
    let mut driver = Driver {
        vmm,
        to,
        security,
        observer,
        cancel,
        settings,
        unsent: Arc::new(Unsent::none_of(&ram)),
        ram: ram.clone(),
        log: Some(log),
        post_copy: None,
        ended: None,
        session,
        switchover,
        link: Some(link),
        ledger,
        abort,
        window,
        events_in,
        moving: None,
        told: Arc::default(),
        paused: false,
        moments: Moments::default(),
        started: Instant::now(),
        phase: Phase::SettingUp,
        progress: Progress::default(),
        content_told: 0,
        sent_before: Sent::default(),
        data_incarnation: 1,
        figures: DestinationFigures::default(),
        placement: Vec::new(),
        throttled: false,
        cancelled: false,
        give_up: None,
        broken: None,
        due: None,
        undelivered: None,
    };
    let end = driver.run(&events, first);
    driver.finish(end)
}

/// Cancelled before anything was begun.
fn cancelled() -> MigrationError {
    MigrationError { cancelled: true, ..MigrationError::untouched(CANCELLED) }
}

fn link_events(events: &Sender<Event>, incarnation: u32) -> impl FnMut(ControlEvent) + Send + 'static {
    let events = events.clone();
    move |event| drop(events.send(Event::Control(incarnation, event)))
}

/// The data plane.
#[derive(Debug)]
struct Moving {
    pipeline: Arc<Pipeline>,
    /// The monitor's state goes over it, once.
    stream: Option<SendChannel>,
    /// The thread of the rounds, until it was ended.
    rounds: Option<(Sender<Order>, JoinHandle<()>)>,
}

impl Moving {
    /// Tells the thread of the rounds, which may have ended: its news says why.
    fn order(&self, order: Order) {
        if let Some((orders, _)) = &self.rounds {
            let _ = orders.send(order);
        }
    }

    /// Waits for the thread of the rounds, which has come to its end or is being taken down.
    fn end_rounds(&mut self) {
        if let Some((orders, thread)) = self.rounds.take() {
            drop(orders);
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

/// The moments that the downtime's parts lie between.
#[derive(Debug, Default)]
struct Moments {
    pausing: Option<Instant>,
    paused: Option<Instant>,
    drained: Option<Instant>,
    saved: Option<Instant>,
    prepared: Option<Instant>,
    decided: Option<Instant>,
    running: Option<Instant>,
}

fn between(from: Option<Instant>, to: Option<Instant>) -> f64 {
    match (from, to) {
        (Some(from), Some(to)) => to.saturating_duration_since(from).as_secs_f64() * 1e3,
        _ => 0.0,
    }
}

impl Moments {
    fn parts(&self) -> DowntimeParts {
        // State is written while the last pages travel: what of it takes longer than they do is its own part.
        let sent = self.drained.max(self.saved);
        DowntimeParts {
            stop_ms: between(self.pausing, self.paused),
            last_round_ms: between(self.paused, self.drained),
            state_ms: between(self.drained, sent),
            load_ms: between(sent, self.prepared),
            commit_ms: between(self.prepared, self.decided),
            start_ms: between(self.decided, self.running),
        }
    }
}

/// How the loop ended.
enum End {
    Machine(SourceEnd),
    /// What was decided could not be delivered in time.
    Undelivered,
}

/// What is going on in post-copy.
#[derive(Debug, Default)]
struct PostCopy {
    /// The thread that answers requests.
    server: Option<JoinHandle<()>>,
    done: Option<(Instant, PostCopyFigures)>,
    reconnected: u32,
}

impl PostCopy {
    fn report(&self, moments: &Moments) -> PostCopyReport {
        let (done, figures) = self.done.unzip();
        let figures = figures.unwrap_or_default();
        PostCopyReport {
            ms: between(moments.running, done),
            requests: figures.requests,
            latency_p50_ms: f64::from(figures.latency_p50_us) / 1e3,
            latency_p99_ms: f64::from(figures.latency_p99_us) / 1e3,
            reconnected: self.reconnected,
        }
    }
}

struct Driver<'a> {
    vmm: &'a mut dyn SourceVmm,
    to: &'a Address,
    security: &'a Security,
    observer: &'a dyn Observer,
    cancel: &'a Cancel,
    settings: Settings,
    ram: GuestRam,
    /// Until the rounds begin.
    log: Option<Box<dyn DirtyLog>>,
    /// In post-copy: what the destination lacks.
    unsent: Arc<Unsent>,
    /// The guest goes on at the destination before all of its RAM is there.
    post_copy: Option<PostCopy>,
    /// The switchover is over, post-copy is not.
    ended: Option<SourceEnd>,
    session: Session,
    switchover: SourceSwitchover,
    link: Option<ControlLink>,
    ledger: Ledger,
    abort: Arc<Abort>,
    window: Arc<Window>,
    events_in: Sender<Event>,
    moving: Option<Moving>,
    told: Arc<Mutex<Told>>,
    /// The monitor was asked to pause the guest, and not to resume it since.
    paused: bool,
    moments: Moments,
    started: Instant,
    phase: Phase,
    progress: Progress,
    /// Content bytes at the last tick.
    content_told: u64,
    /// What went over channels that are closed.
    sent_before: Sent,
    /// Of the data channels.
    data_incarnation: u32,
    figures: DestinationFigures,
    placement: Vec<String>,
    throttled: bool,
    cancelled: bool,
    give_up: Option<Instant>,
    /// Until when a word about a broken channel is waited for.
    broken: Option<Instant>,
    /// When the step at hand must be done, and which it is.
    due: Option<(Instant, &'static str)>,
    /// Why the decision could not be delivered, where the destination said so.
    undelivered: Option<String>,
}

impl Driver<'_> {
    fn run(&mut self, events: &Receiver<Event>, first: Vec<SourceAction>) -> End {
        let mut next_progress = Instant::now() + PROGRESS_INTERVAL;
        let mut actions = first;
        loop {
            let mut answers = Vec::new();
            for action in actions {
                match action {
                    SourceAction::Done(SourceEnd::Finished) if self.post_copy.is_some() => {
                        self.phase = Phase::PostCopy;
                        self.ended = Some(SourceEnd::Finished);
                        (self.give_up, self.due) = (None, None);
                        if let Some(link) = self.link.as_ref().filter(|_| self.abort.is_over()) {
                            // Channels that broke meanwhile are made anew, the control channel too.
                            link.close();
                        }
                    }
                    SourceAction::Done(end) => return End::Machine(end),
                    action => answers.extend(self.perform(action)),
                }
            }
            if let (Some(end), Some(PostCopy { done: Some(_), .. })) = (&self.ended, &self.post_copy) {
                return End::Machine(end.clone());
            }
            actions = Vec::new();
            for answer in answers {
                actions.extend(self.switchover.on(answer));
            }
            if !actions.is_empty() {
                continue;
            }
            if self.switchover.may_stop() && self.ended.is_none() {
                self.give_up.get_or_insert(Instant::now() + self.settings.limits.telling);
            }
            if self.give_up.is_some_and(|deadline| Instant::now() >= deadline) {
                return End::Undelivered;
            }
            if let Some((deadline, what)) = self.due
                && Instant::now() >= deadline
            {
                self.due = None;
                let reason = format!("{what} took too long");
                actions = self.switchover.on(SourceEvent::Failed { reason });
                continue;
            }
            if self.broken.is_some_and(|deadline| Instant::now() >= deadline) {
                self.broken = None;
                let reason = self.abort.reason().unwrap_or_default();
                actions = self.switchover.on(SourceEvent::Failed { reason });
                continue;
            }
            let wake = self.broken.map_or(next_progress, |deadline| deadline.min(next_progress));
            match events.recv_timeout(wake.saturating_duration_since(Instant::now())) {
                Ok(event) => {
                    if let Some(event) = self.translate(event) {
                        actions = self.switchover.on(event);
                    }
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < next_progress => {}
                Err(RecvTimeoutError::Timeout) => {
                    next_progress = Instant::now() + PROGRESS_INTERVAL;
                    self.tell_progress();
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("the driver itself holds a sender"),
            }
        }
    }

    /// Performs an action; gives what the machine must be told at once.
    fn perform(&mut self, action: SourceAction) -> Option<SourceEvent> {
        tracing::debug!(?action, "switchover");
        match action {
            SourceAction::WriteRecord(state) => Some(self.write(state)),
            SourceAction::StartMigration => match self.begin_rounds() {
                Ok(()) => None,
                Err(reason) => {
                    // The event may still lie in the queue.
                    self.cancelled |= self.cancel.is_cancelled();
                    Some(SourceEvent::Failed { reason })
                }
            },
            SourceAction::Send(message) => {
                self.say(&ControlMessage::Switchover(message));
                None
            }
            // The guest has stopped and nothing of it will go on by itself.
            SourceAction::RelayShut => Some(SourceEvent::Guest(SourceGuest::Completed)),
            SourceAction::EndMigration => {
                self.abort.raise(self.switchover.reason());
                if let Some(moving) = &mut self.moving {
                    moving.end_rounds();
                }
                Some(SourceEvent::Guest(if self.paused { SourceGuest::Completed } else { SourceGuest::Running }))
            }
            SourceAction::Cont => Some(match self.vmm.resume() {
                Ok(()) => {
                    self.paused = false;
                    SourceEvent::Guest(SourceGuest::Running)
                }
                Err(error) => SourceEvent::Failed { reason: format!("the monitor does not resume the guest: {error}") },
            }),
            SourceAction::AnnounceSelf => {
                if self.throttled
                    && let Err(error) = self.vmm.throttle(0)
                {
                    self.observer.note(&format!("the guest stays slowed down: {error}"));
                }
                None
            }
            SourceAction::Connect => {
                self.link = None;
                if self.switchover.decided() {
                    self.give_up = self.give_up.or_else(|| self.delivery_deadline());
                } else {
                    self.give_up.get_or_insert(Instant::now() + self.settings.limits.telling);
                }
                self.reconnect();
                None
            }
            SourceAction::Done(_) => unreachable!("the loop ends before it is performed"),
        }
    }

    fn write(&mut self, state: SourceState) -> SourceEvent {
        if state == SourceState::Aborted {
            // Before the channels are closed, which says less.
            self.say(&ControlMessage::Failed { reason: self.switchover.reason().to_owned() });
            self.abort.raise(self.switchover.reason());
        }
        match self.ledger.write(RecordState::Source(state)) {
            Ok(()) => {
                self.due = None;
                if state == SourceState::Committed {
                    self.phase = Phase::Committed;
                    self.moments.decided = Some(Instant::now());
                    if let Some(moving) = self.moving.as_ref().filter(|_| self.post_copy.is_some()) {
                        moving.order(Order::Stream);
                    }
                    self.give_up = self.delivery_deadline();
                }
                SourceEvent::RecordWritten
            }
            Err(error) => {
                self.observer.note(&error.to_string());
                SourceEvent::RecordFailed
            }
        }
    }

    /// What an event means to the machine, after what it means to the driver was done.
    fn translate(&mut self, event: Event) -> Option<SourceEvent> {
        match event {
            Event::Control(incarnation, event) if incarnation == self.session.incarnation => match event {
                ControlEvent::Message(message, _) => self.heard(message),
                ControlEvent::Lost(reason) => {
                    self.observer.note(&format!("the connection to the destination is lost: {reason}"));
                    self.link = None;
                    self.abort.lost(format_args!("the destination was lost: {reason}"));
                    if self.ended.is_some() {
                        self.give_up = self.delivery_deadline();
                        self.reconnect();
                        return None;
                    }
                    Some(SourceEvent::ConnectionLost)
                }
            },
            Event::Control(..) => None,
            Event::Reconnected(outcome) => match *outcome {
                Ok(link) => {
                    self.link = Some(link);
                    if self.ended.is_some() {
                        self.give_up = None;
                    }
                    self.ended.is_none().then_some(SourceEvent::Connected)
                }
                Err(reason) => {
                    tracing::info!(reason, "the destination cannot be reached yet");
                    self.reconnect();
                    None
                }
            },
            Event::Rounds(news) => self.rounds_say(news),
            Event::Broken(incarnation) if incarnation != self.data_incarnation => None,
            Event::Broken(_) if self.ended.is_some() => {
                // All channels are made anew, the control channel too.
                if let Some(link) = &self.link {
                    link.close();
                }
                None
            }
            Event::Broken(_) if self.abort.was_lost() => {
                self.broken = Some(Instant::now() + LAST_WORDS);
                None
            }
            Event::Broken(_) => Some(SourceEvent::Failed { reason: self.abort.reason()? }),
            Event::Cancelled if self.ended.is_some() => {
                self.cancelled = true;
                if self.link.is_some() {
                    self.observer.note("too late to cancel: the rest of the guest's memory is being sent after it");
                } else {
                    self.give_up = self.delivery_deadline();
                }
                None
            }
            Event::Cancelled if self.switchover.may_stop() => {
                self.give_up = Some(Instant::now());
                None
            }
            Event::Cancelled if self.switchover.decided() => {
                // What is still to be sent in post-copy is sent, but a lost destination is not waited for.
                self.cancelled = true;
                self.give_up = self.give_up.or_else(|| self.delivery_deadline());
                self.observer.note("too late to cancel: the guest already belongs to the destination");
                None
            }
            Event::Cancelled => {
                self.cancelled = true;
                Some(SourceEvent::Failed { reason: CANCELLED.into() })
            }
        }
    }

    fn heard(&mut self, message: ControlMessage) -> Option<SourceEvent> {
        match message {
            ControlMessage::Ready { placement } => self.placement = placement,
            ControlMessage::SwitchoverAck => {
                if let Some(moving) = &self.moving {
                    moving.order(Order::MayStop);
                }
            }
            ControlMessage::PostCopyReady => {
                // Once the guest is given away the destination says it for new channels.
                if !self.switchover.decided() && self.ended.is_none() {
                    return self.enter_post_copy().err().map(|reason| SourceEvent::Failed { reason });
                }
                if let (Err(reason), Some(link)) = (self.resume_post_copy(), &self.link) {
                    tracing::info!(reason, "the rest of memory cannot be sent on yet");
                    link.close();
                }
            }
            ControlMessage::PostCopyDone(figures) => {
                if let Some(post_copy) = &mut self.post_copy {
                    post_copy.done = Some((Instant::now(), figures));
                }
            }
            ControlMessage::Figures(figures) => self.figures = figures,
            ControlMessage::Switchover(message) => {
                match message {
                    SwitchoverMessage::Prepared => self.moments.prepared = Some(Instant::now()),
                    SwitchoverMessage::Running => self.moments.running = Some(Instant::now()),
                    _ => {}
                }
                return Some(SourceEvent::Message(message));
            }
            ControlMessage::Failed { reason } | ControlMessage::Refused { reason } => {
                let reason = format!("the destination failed: {}", cleaned(&reason));
                if !self.switchover.decided() {
                    return Some(SourceEvent::Failed { reason });
                }
                self.observer.note(&reason);
                self.undelivered = Some(reason);
                self.give_up = Some(Instant::now());
            }
            unexpected => tracing::warn!(?unexpected, "not expected from a destination"),
        }
        None
    }

    fn rounds_say(&mut self, news: RoundNews) -> Option<SourceEvent> {
        let outcome = match news {
            RoundNews::Note(text) => {
                self.observer.note(&text);
                Ok(())
            }
            RoundNews::Throttle(percent) => {
                self.throttle(percent);
                Ok(())
            }
            RoundNews::SwitchOver => self.switch_over(),
            RoundNews::Stopped => self.send_state(),
            RoundNews::RunOn => self.run_on(),
            RoundNews::PostCopy => {
                self.observer.note("the guest will go on before all of its memory is there");
                self.say(&ControlMessage::PostCopy);
                Ok(())
            }
            RoundNews::Failed(reason) => Err(reason),
            RoundNews::Drained(ram) => {
                self.moments.drained = Some(Instant::now());
                self.due = Some((Instant::now() + self.step_time(), "loading at the destination"));
                let Sent { normal_pages, zero_pages, .. } = self.sent();
                self.say(&ControlMessage::Totals(Totals { ram, normal_pages, zero_pages }));
                return Some(SourceEvent::FinalStateSent);
            }
        };
        outcome.err().map(|reason| SourceEvent::Failed { reason })
    }

    fn throttle(&mut self, percent: u8) {
        match self.vmm.throttle(percent) {
            Ok(()) => {
                self.throttled = true;
                self.observer.note(&format!("the guest is held for {percent} % of the time"));
            }
            Err(error) => self.observer.note(&format!("the guest is not slowed down: {error}")),
        }
    }

    /// Opens the channels, sends what goes ahead, and starts the rounds.
    fn begin_rounds(&mut self) -> Result<(), String> {
        self.phase = Phase::Rounds;
        let log = self.log.take().ok_or("the rounds were begun already")?;
        let ram = self.ram.clone();
        self.progress.total_bytes = ram.bytes();
        let (pipeline, stream) = self.open_channels(true)?;
        let stream = stream.ok_or("there is no stream channel")?;
        let mut ahead = StateWriter::new(&stream, Part::Ahead, self.session.packet_size);
        self.vmm.save_ahead(&mut ahead).map_err(|error| format!("saving state ahead failed: {error}"))?;
        let ahead = ahead.finish().map_err(|error| error.to_string())?;

        let (orders, orders_out) = channel();
        let events = self.events_in.clone();
        let convergence =
            Convergence::new(self.settings.downtime, self.settings.not_converging, self.settings.give_up_after);
        let rounds = Rounds {
            log,
            search: PageSearch::new(Arc::clone(&pipeline), ram.clone(), self.session.packet_size),
            ram,
            convergence,
            state_size: self.vmm.state_size(),
            started: self.started,
            orders: orders_out,
            news: move |news| drop(events.send(Event::Rounds(news))),
            told: Arc::clone(&self.told),
            unsent: Arc::clone(&self.unsent),
            may_stop: ahead == 0,
            tried: 0,
            abort: Arc::clone(&self.abort),
        };
        let thread = std::thread::Builder::new().name("rounds".into());
        let rounds =
            thread.spawn(move || rounds.run()).map_err(|error| format!("no thread for the rounds: {error}"))?;
        self.moving = Some(Moving { pipeline, stream: Some(stream), rounds: Some((orders, rounds)) });
        Ok(())
    }

    /// The destination watches for missing pages: it may ask for them from now on.
    fn enter_post_copy(&mut self) -> Result<(), String> {
        if self.post_copy.is_some() || self.paused {
            return Err("the destination said something out of turn".into());
        }
        let server = self.serve_pages(1)?;
        self.post_copy = Some(PostCopy { server: Some(server), ..PostCopy::default() });
        self.switch_over()
    }

    /// Opens the post-copy channel; answers requests on a thread of its own, and streams the rest if the list of what is
    /// missing has to be heard first.
    fn serve_pages(&self, incarnation: u32) -> Result<JoinHandle<()>, String> {
        let opened = self.session.open_post_copy(self.security, self.to, &self.abort);
        let halves = opened.map_err(|error| error.to_string())?;
        let server = PageServer::new(self.ram.clone(), Arc::clone(&self.unsent), halves, self.session.rules());
        let mut server = server.map_err(|error| error.to_string())?;
        let (abort, unsent) = (Arc::clone(&self.abort), Arc::clone(&self.unsent));
        let pipeline = self.moving.as_ref().map(|moving| Arc::clone(&moving.pipeline));
        let (ram, packet_size) = (self.ram.clone(), self.session.packet_size);
        let thread = std::thread::Builder::new().name("page-requests".into());
        let serve = move || {
            let outcome = if incarnation == 1 {
                server.serve()
            } else {
                server.hear_list().and_then(|()| {
                    std::thread::scope(|scope| {
                        // A pipeline that is taken down says so itself.
                        let stream = move |pipeline| unsent.stream(&mut PageSearch::new(pipeline, ram, packet_size));
                        pipeline.map(|pipeline| scope.spawn(move || stream(pipeline)));
                        server.serve()
                    })
                })
            };
            if let Err(error) = outcome {
                abort.lost(format_args!("the post-copy channel: {error}"));
            }
        };
        thread.spawn(serve).map_err(|error| format!("no thread for page requests: {error}"))
    }

    /// The destination has come back and has said that data channels may come: they are made anew.
    fn resume_post_copy(&mut self) -> Result<(), String> {
        self.end_data_plane();
        self.abort = Arc::new(Abort::default());
        self.data_incarnation = self.session.incarnation;
        let (broken, incarnation) = (self.events_in.clone(), self.data_incarnation);
        self.abort.on_end(move || drop(broken.send(Event::Broken(incarnation))));
        self.window = self.new_window();
        let (pipeline, _) = self.open_channels(false)?;
        self.moving = Some(Moving { pipeline, stream: None, rounds: None });
        let server = self.serve_pages(incarnation)?;
        if let Some(post_copy) = &mut self.post_copy {
            post_copy.server = Some(server);
            post_copy.reconnected += 1;
        }
        self.observer.note("the destination is back: what it lacks is sent on");
        Ok(())
    }

    fn new_window(&self) -> Arc<Window> {
        Arc::new(Window::new(self.session.packet_size as u64, self.session.round_trip, self.settings.downtime))
    }

    /// The data channels of this incarnation, and the pipeline over those of RAM.
    fn open_channels(&self, with_stream: bool) -> Result<(Arc<Pipeline>, Option<SendChannel>), String> {
        let context = SendContext {
            window: Arc::clone(&self.window),
            pacer: Arc::new(Pacer::new(self.settings.bandwidth)),
            abort: Arc::clone(&self.abort),
            method: self.settings.method,
            rules: self.session.rules(),
        };
        let cancel = if with_stream { self.cancel.clone() } else { Cancel::new() };
        let channels = self.session.open_ram_channels(self.security, self.to, &context, &cancel);
        let channels = channels.map_err(|error| error.to_string())?;
        let stream =
            with_stream.then(|| self.session.open(self.security, self.to, ChannelKind::DeviceState, 0, &context));
        let stream = stream.transpose().map_err(|error| error.to_string())?;
        let pool = BatchPool::new(BATCHES_PER_CHANNEL * channels.len(), 0);
        let window = Arc::clone(&self.window);
        let pipeline = Pipeline {
            channels,
            pool: Arc::clone(&pool),
            window: Arc::clone(&window),
            page_size: sterna_memory::PAGE_SIZE,
        };
        let pacer = context.pacer;
        self.abort.on_end(move || {
            pacer.set_limit(None);
            window.close();
            pool.close();
        });
        Ok((Arc::new(pipeline), stream))
    }

    /// Waits for the threads of the data plane, whose connections are closed; keeps what went over it.
    fn end_data_plane(&mut self) {
        self.sent_before = self.sent();
        if let Some(mut moving) = self.moving.take() {
            moving.end_rounds();
            if let Some(server) = self.post_copy.as_mut().and_then(|post_copy| post_copy.server.take()) {
                // A panic there has been printed.
                let _ = server.join();
            }
            if let Some(stream) = moving.stream {
                stream.join();
            }
            if let Ok(pipeline) = Arc::try_unwrap(moving.pipeline) {
                pipeline.channels.into_iter().for_each(SendChannel::join);
            }
        }
    }

    /// Stops the guest, has the last round sent, and sends the state meanwhile.
    fn switch_over(&mut self) -> Result<(), String> {
        let Some(moving) = &self.moving else { return Ok(()) };
        if self.abort.is_over() {
            return Ok(());
        }
        self.phase = Phase::SwitchingOver;
        self.observer.note("stopping the guest");
        self.moments.pausing = Some(Instant::now());
        // Also where it fails: it may have stopped after all.
        self.paused = true;
        self.vmm.pause().map_err(|error| format!("the monitor does not pause the guest: {error}"))?;
        self.moments.paused = Some(Instant::now());
        self.due = Some((Instant::now() + self.step_time(), "sending the last pages"));
        moving.order(Order::LastRound);
        Ok(())
    }

    /// The guest would stand for too long after all.
    fn run_on(&mut self) -> Result<(), String> {
        self.observer.note("the guest had dirtied too much until it stood: it runs on");
        self.vmm.resume().map_err(|error| format!("the monitor does not resume the guest: {error}"))?;
        (self.paused, self.phase, self.due) = (false, Phase::Rounds, None);
        (self.moments.pausing, self.moments.paused) = (None, None);
        Ok(())
    }

    /// Sends the state of the guest, which stays stopped, while its last pages travel.
    fn send_state(&mut self) -> Result<(), String> {
        let Some(moving) = &self.moving else { return Ok(()) };
        if self.abort.is_over() {
            return Ok(());
        }
        let stream = moving.stream.as_ref().ok_or("there is no stream channel")?;
        let mut state = StateWriter::new(stream, Part::Final, self.session.packet_size);
        let saved = self.vmm.save(&mut state).map_err(|error| format!("saving the guest's state failed: {error}"));
        let finished = saved.and_then(|()| state.finish().map_err(|error| error.to_string()));
        // The reason that came first says more than a state that could not be sent.
        let bytes = finished.map_err(|error| self.abort.reason().unwrap_or(error))?;
        self.moments.saved = Some(Instant::now());
        tracing::debug!(bytes, "the guest's state is handed over");
        Ok(())
    }

    /// Until when a destination that was lost is waited for to be told that the guest is its own. In post-copy as long as it
    /// takes, unless nobody wants to: what is here of the guest's memory is nowhere else.
    fn delivery_deadline(&self) -> Option<Instant> {
        let waits_for_ever = self.post_copy.is_some() && !self.cancelled;
        (!waits_for_ever).then(|| Instant::now() + self.settings.limits.delivery)
    }

    fn step_time(&self) -> Duration {
        self.settings.limits.step.max(10 * self.settings.downtime)
    }

    fn say(&self, message: &ControlMessage) {
        let Some(link) = &self.link else { return };
        if let Err(error) = link.send(message) {
            // The link's reading side reports the loss.
            tracing::info!(%error, "the destination did not take a message");
        }
    }

    fn reconnect(&mut self) {
        // Counts attempts: one that failed here may have been accepted there, and none is accepted twice.
        self.session.incarnation += 1;
        let (events, to, security) = (self.events_in.clone(), self.to.clone(), self.security.clone());
        let (session, pause) = (self.session.clone(), self.settings.limits.dial_pause);
        std::thread::spawn(move || {
            let incarnation = session.incarnation;
            let told = link_events(&events, incarnation);
            let (outcome, gate) = match session::dial_again(&to, &security, &session, incarnation, told) {
                Ok((link, gate)) => (Ok(link), Some(gate)),
                Err(error) => {
                    std::thread::sleep(pause);
                    (Err(error.to_string()), None)
                }
            };
            let _ = events.send(Event::Reconnected(Box::new(outcome)));
            drop(gate);
        });
    }

    fn sent(&self) -> Sent {
        let Some(moving) = &self.moving else { return self.sent_before };
        self.sent_before + Sent::over(moving.pipeline.channels.iter().chain(&moving.stream))
    }

    fn tell_progress(&mut self) {
        let sent = self.sent();
        let elapsed_ms = self.started.elapsed().as_millis() as u64;
        let interval = (elapsed_ms - self.progress.elapsed_ms).max(1) as f64 / 1e3;
        self.progress.phase = self.phase.to_string();
        self.progress.content_rate = (sent.content_bytes - self.content_told) as f64 / interval;
        self.progress.wire_rate = (sent.wire_bytes - self.progress.wire_bytes) as f64 / interval;
        self.progress.elapsed_ms = elapsed_ms;
        self.progress.normal_pages = sent.normal_pages;
        self.progress.zero_pages = sent.zero_pages;
        self.progress.wire_bytes = sent.wire_bytes;
        self.progress.ratio = sent.ratio();
        self.content_told = sent.content_bytes;
        self.told.lock().expect("nobody panics with it").fill(&mut self.progress);
        self.observer.progress(&self.progress);
    }

    fn finish(mut self, end: End) -> Result<Report, MigrationError> {
        let decided = self.switchover.decided();
        let (outcome, guest, reason) = match end {
            End::Machine(SourceEnd::Finished) => (Outcome::Completed, GuestState::BelongsToDestination, None),
            End::Machine(SourceEnd::Aborted { reason }) => (self.ended(), GuestState::RunsAtSource, Some(reason)),
            End::Machine(SourceEnd::NotStarted) => {
                let reason = "the migration's record could not be written".to_owned();
                (Outcome::Failed, GuestState::Untouched, Some(reason))
            }
            End::Machine(SourceEnd::GuestGone) => {
                (Outcome::Lost, GuestState::StandsAtSource, Some("the guest is gone".into()))
            }
            End::Machine(SourceEnd::DestinationLost { never_ran, reason }) => {
                let ran = if never_ran { "it never ran there" } else { "it may have run there" };
                let reason = format!("the destination has lost the guest that was given to it ({ran}): {reason}");
                (Outcome::Unconfirmed, GuestState::BelongsToDestination, Some(reason))
            }
            End::Machine(SourceEnd::Stuck { reason }) => (Outcome::Stuck, GuestState::StandsAtSource, Some(reason)),
            End::Machine(SourceEnd::Conflict) => {
                let reason = "the destination runs the guest although it was not given to it".to_owned();
                (Outcome::Stuck, GuestState::RunsTwice, Some(reason))
            }
            End::Undelivered if decided => {
                let reason = self.undelivered.take();
                let reason = reason.unwrap_or_else(|| "the destination did not confirm it in time".into());
                (Outcome::Unconfirmed, GuestState::BelongsToDestination, Some(reason))
            }
            End::Undelivered if self.ended.is_some() => {
                let reason = "the rest of the guest's memory was not sent: the destination was lost, and the migration cancelled".to_owned();
                (Outcome::Lost, GuestState::LacksMemory, Some(reason))
            }
            // The guest runs; a destination that was not told asks, and presumes it.
            End::Undelivered => (self.ended(), GuestState::RunsAtSource, Some(self.switchover.reason().to_owned())),
        };
        self.abort.finish();
        // One that does not hear it waits a little for this side to come back.
        self.say(&ControlMessage::Goodbye);
        self.link = None;
        self.end_data_plane();
        let sent = self.sent_before;
        let told = self.told.lock().expect("nobody panics with it").clone();
        let done = self.post_copy.as_ref().and_then(|post_copy| post_copy.done).map(|(done, _)| done);
        let end = done.or(self.moments.running).unwrap_or_else(Instant::now);
        let total_ms = end.saturating_duration_since(self.started).as_secs_f64() * 1e3;
        let report = Report {
            id: self.session.id.to_string(),
            outcome,
            reason: reason.clone(),
            machine: self.vmm.name(),
            destination: self.to.to_string(),
            total_ms,
            downtime_ms: between(self.moments.pausing, self.moments.running),
            downtime: self.moments.parts(),
            rounds: told.round,
            convergence: told.verdict.map(|verdict| match told.throttled {
                0 => verdict,
                percent => format!("{verdict}; it was held for {percent} % of the time"),
            }),
            post_copy: self.post_copy.as_ref().map(|post_copy| post_copy.report(&self.moments)),
            wire_bytes: sent.wire_bytes,
            content_bytes: sent.content_bytes,
            normal_pages: sent.normal_pages,
            zero_pages: sent.zero_pages,
            ratio: sent.ratio(),
            throughput: sent.wire_bytes as f64 / (total_ms / 1e3).max(1e-3),
            method: self.settings.method.to_string(),
            channels: self.settings.channels,
            encrypted: matches!(self.security, Security::Tls(_)),
            source_cpu_seconds: own_cpu_seconds(),
            destination_cpu_seconds: self.figures.cpu_seconds,
            destination_faults: self.figures.faults,
            placement: std::mem::take(&mut self.placement),
        };
        match reason {
            None => Ok(report),
            Some(reason) => Err(MigrationError {
                side: Side::Source,
                phase: self.phase,
                guest,
                cancelled: outcome == Outcome::Cancelled,
                reason,
                report: Some(Box::new(report)),
            }),
        }
    }

    fn ended(&self) -> Outcome {
        if self.cancelled { Outcome::Cancelled } else { Outcome::Failed }
    }
}
