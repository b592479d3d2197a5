//! One migration at the source's proxy: reads QEMU's stream into the pipeline, and writes the destination QEMU's answers back.
//!
//! ```text
//! setup ──> dial ──> relay offered ──> channels ──> carried ──> delivered ──> ended
//! (reads up to the end of the RAM setup section; a stream that cannot be carried is refused here, before dialling)
//! ```

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna_engine::abort::Abort;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{ControlEvent, ControlLink, out_of_phase};
use sterna_engine::pacer::Pacer;
use sterna_engine::report::{Outcome, between};
use sterna_engine::send::{SendContext, Sent};
use sterna_engine::session::{LAST_WORDS, Session};
use sterna_engine::transport::Security;
use sterna_engine::window::Window;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_wire::control::{ControlMessage, RelayContent};

use super::endpoint::{Endpoint, PeerProcess, check_channels};
use super::report::{ProxyReport, ProxySide};
use super::send::{Event, Proxy};
use super::under_way::Carried;
use crate::gateway::GatewayError;
use crate::gateway::layout::Start;
use crate::gateway::plane::{Plane, WhenAborted};
use crate::gateway::source_stream::{StreamNews, closer, read_start};
use crate::stream::{MainReader, MultifdInit, ReturnMessage};
use sterna_wire::reason::Reason;

/// How long the destination's proxy may take to close the channels after a migration was delivered. After this time they are closed
/// without it.
const FAREWELL_TIME: Duration = Duration::from_secs(10);

/// How long a source QEMU may take to close its multifd channels after its main channel was closed. It stops its threads first.
const QEMU_TIME: Duration = Duration::from_secs(20);

/// The figures of a migration for its report.
#[derive(Debug, Default)]
struct Figures {
    id: String,
    machine: String,
    begun: Option<Instant>,
    /// When the last round ended in which the guest ran.
    last_round: Option<Instant>,
    /// When the destination QEMU reported that it has loaded the guest.
    loaded: Option<Instant>,
    multifd_channels: u16,
    channels: u16,
    sent: Sent,
}

/// Carries the migration whose main channel is `main` to its end. Returns its report.
pub(super) fn carry(
    proxy: &Proxy<'_>,
    endpoint: &Endpoint,
    main: UnixStream,
    process: PeerProcess,
    carried: &Carried,
) -> ProxyReport {
    let mut figures = Figures { begun: Some(Instant::now()), ..Figures::default() };
    let result = run(proxy, endpoint, main, process, &carried.cancel, &mut figures);
    let (outcome, reason) = match result {
        Ok(()) => (Outcome::Completed, None),
        Err(_) if carried.cancel.is_cancelled() => (Outcome::Cancelled, None),
        Err(error) => (Outcome::Failed, Some(error.to_string())),
    };
    let total_ms = between(figures.begun, Some(Instant::now()));
    ProxyReport {
        side: ProxySide::Source,
        id: figures.id,
        outcome,
        reason,
        socket: endpoint.name.clone(),
        peer: proxy.options.to.clone(),
        machine: figures.machine,
        total_ms,
        downtime_seen_ms: figures.loaded.map(|loaded| between(figures.last_round, Some(loaded))),
        multifd_channels: figures.multifd_channels,
        channels: figures.channels,
        encrypted: matches!(proxy.options.security, Security::Tls(_)),
        method: proxy.encoding.to_string(),
        wire_bytes: figures.sent.wire_bytes,
        content_bytes: figures.sent.content_bytes,
        normal_pages: figures.sent.normal_pages,
        zero_pages: figures.sent.zero_pages,
        ratio: figures.sent.ratio(),
        throughput: if total_ms > 0.0 { figures.sent.wire_bytes as f64 / (total_ms / 1e3) } else { 0.0 },
    }
}

fn run(
    proxy: &Proxy<'_>,
    endpoint: &Endpoint,
    main: UnixStream,
    process: PeerProcess,
    cancel: &Cancel,
    figures: &mut Figures,
) -> Result<(), GatewayError> {
    let failed = GatewayError::new;
    let return_path = main.try_clone().map_err(failed)?;
    // Also ends the reading of the setup. QEMU sees its connections end.
    let _closing = cancel.on_cancel(closer(&return_path).map_err(failed)?);
    let mut reader = MainReader::new(main);
    let mut connections = QemuConnections { main: return_path.try_clone().map_err(failed)?, multifd: Vec::new() };
    let start = read_start(&mut reader);
    // Also for a migration that is refused, so that its multifd channels end in order and wait for nothing.
    let arrived = endpoint.take_multifd(process);
    let fits = arrived.as_deref().map_err(Clone::clone).and_then(check_channels);
    let mut multifd = Vec::new();
    for (stream, init) in arrived.unwrap_or_default() {
        multifd.push((stream.try_clone(), init));
        connections.multifd.push(stream);
    }
    let mut start = start.map_err(|error| refused(&error))?;
    fits.map_err(|reason| refused(&reason))?;
    let multifd: Vec<(UnixStream, MultifdInit)> =
        multifd.into_iter().map(|(stream, init)| Ok((stream?, init))).collect::<io::Result<_>>().map_err(failed)?;
    start.multifd_channels = multifd.len() as u8;
    start.uuid = multifd.first().map_or([0; 16], |(_, init)| init.uuid);
    start.ram_channels = if multifd.is_empty() { proxy.options.channels } else { multifd.len() as u16 };
    figures.machine.clone_from(&start.configuration.machine);
    (figures.multifd_channels, figures.channels) = (multifd.len() as u16, start.ram_channels);

    let (events_in, events) = channel();
    let cancelled = events_in.clone();
    let _cancelling = cancel.on_cancel(move || drop(cancelled.send(Event::Cancelled)));
    let (link, session) = proxy.dial(RelayContent::Migration, &endpoint.name, cancel, &events_in, &events)?;
    figures.id = session.id.to_string();
    proxy.observer.note(&format!(
        "migration {}: {} with {} multifd channels, to {}",
        session.id, figures.machine, figures.multifd_channels, proxy.options.to
    ));
    let abort = Arc::new(Abort::default());
    let broken = events_in.clone();
    abort.on_end(move || drop(broken.send(Event::Broken)));
    let return_path_opened = start.opens_return_path();
    let mut migration = Migration { abort, link, return_path, events_in, plane: None, return_path_opened, shut: None };
    let begun = migration.begin(proxy, &session, cancel, (reader, start), multifd);
    let result = begun.and_then(|()| {
        loop {
            let event = events.recv().expect("this function itself holds a sender");
            if migration.handle(event, figures)? {
                break Ok(());
            }
        }
    });
    figures.sent = migration.plane.as_ref().map(Plane::sent).unwrap_or_default();
    match result {
        Ok(()) => {
            migration.end();
            Ok(())
        }
        Err(error) => {
            let error = if migration.abort.was_lost() { migration.last_words(&events).unwrap_or(error) } else { error };
            migration.give_up(&error);
            Err(error)
        }
    }
}

fn refused(reason: &dyn std::fmt::Display) -> GatewayError {
    GatewayError::new(format!("refused at its beginning, and its sockets closed: {reason}"))
}

/// The source QEMU's connections. Dropping this ends them in the order that is safe for QEMU: see [`WhenAborted::CloseMain`].
struct QemuConnections {
    main: UnixStream,
    multifd: Vec<UnixStream>,
}

impl Drop for QemuConnections {
    fn drop(&mut self) {
        // The source QEMU may have closed it already.
        let _ = self.main.shutdown(Shutdown::Both);
        let deadline = Instant::now() + QEMU_TIME;
        let mut discarded = vec![0; 256 << 10];
        // All are read concurrently: QEMU may wait for any of them before it notices the closed main channel.
        while !self.multifd.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut descriptors: Vec<_> =
                self.multifd.iter().map(|stream| PollFd::new(stream, PollFlags::IN)).collect();
            match poll(&mut descriptors, Some(&timeout)) {
                Ok(0) => return,
                Err(error) if error != rustix::io::Errno::INTR => return,
                _ => {}
            }
            let ready: Vec<bool> = descriptors.iter().map(|descriptor| !descriptor.revents().is_empty()).collect();
            let mut ready = ready.into_iter();
            self.multifd.retain(|mut stream| {
                !ready.next().unwrap_or(false) || stream.read(&mut discarded).is_ok_and(|length| length > 0)
            });
        }
    }
}

struct Migration {
    abort: Arc<Abort>,
    link: ControlLink,
    return_path: UnixStream,
    events_in: Sender<Event>,
    plane: Option<Plane>,
    /// QEMU has opened a return path, and ends the migration only when the destination QEMU's answer has come on it.
    return_path_opened: bool,
    /// The destination QEMU's status after loading (SHUT); 0: success.
    shut: Option<u32>,
}

impl Migration {
    fn begin(
        &mut self,
        proxy: &Proxy<'_>,
        session: &Session,
        cancel: &Cancel,
        (reader, start): (MainReader<UnixStream>, Start),
        multifd: Vec<(UnixStream, MultifdInit)>,
    ) -> Result<(), GatewayError> {
        let failed = GatewayError::new;
        let options = proxy.options;
        let rules = session.rules();
        let context = SendContext::new(
            Arc::new(Window::new(rules.packet_size as u64, session.round_trip, options.downtime)),
            Arc::new(Pacer::new(options.bandwidth)),
            Arc::clone(&self.abort),
            proxy.compression.clone(),
            rules,
        );
        let session = Session { channels: start.ram_channels, ..session.clone() };
        let readers = 1 + multifd.len();
        let close = WhenAborted::CloseMain;
        let plane = Plane::open(&session, &options.security, &options.to, &context, readers, cancel, close)?;
        let plane = self.plane.insert(plane);
        self.abort.on_end(closer(&self.return_path).map_err(failed)?);
        let ratio = NormalPageRatio::new(0);
        plane.read_multifd(multifd, &ratio).map_err(failed)?;
        let events = self.events_in.clone();
        let news = move |news| drop(events.send(Event::Stream(news)));
        plane.read_main(&self.return_path, move || Ok((reader, start)), ratio, news).map_err(failed)
    }

    /// Handles one event. Returns whether all of the migration has been delivered.
    fn handle(&mut self, event: Event, figures: &mut Figures) -> Result<bool, GatewayError> {
        match event {
            Event::Control(ControlEvent::Message(message, _share)) => self.handle_message(message, figures)?,
            Event::Control(ControlEvent::Lost(reason)) => {
                return Err(GatewayError::new(format!("the destination's proxy was lost: {reason}")));
            }
            Event::Stream(StreamNews::Started { .. }) => {}
            Event::Stream(StreamNews::RamEnd { last_round }) => figures.last_round = Some(last_round),
            Event::Stream(StreamNews::Ended) => self.await_delivery()?,
            Event::Delivered => {
                return match self.shut {
                    None if self.return_path_opened => {
                        Err(GatewayError::new("the source QEMU ended the migration before it was complete"))
                    }
                    Some(status) if status != 0 => {
                        Err(GatewayError::new("the destination QEMU could not load the guest (its log says why)"))
                    }
                    _ => Ok(true),
                };
            }
            Event::Broken => {
                if let Some(reason) = self.abort.reason() {
                    return Err(GatewayError::new(&reason).of(reason.kind));
                }
            }
            Event::Cancelled => return Err(GatewayError::new("the proxy was told to close its connections")),
            // Only connections that are carried unchanged have directions.
            Event::DirectionEnded => {}
        }
        Ok(false)
    }

    fn handle_message(&mut self, message: ControlMessage, figures: &mut Figures) -> Result<(), GatewayError> {
        match message {
            ControlMessage::Ready { .. } => {
                if let Some(plane) = &self.plane {
                    plane.sync.open();
                }
            }
            ControlMessage::ReturnPath(message) => {
                let message = ReturnMessage::from(message);
                if let ReturnMessage::Shut(status) = message {
                    self.shut = Some(status);
                    figures.loaded = (status == 0).then(Instant::now);
                }
                if let Err(error) = message.write(&self.return_path) {
                    // The source QEMU has closed it; the reader notices the end of its main channel.
                    tracing::info!(%error, "the return path is closed");
                }
            }
            ControlMessage::Failed(reason) | ControlMessage::Refused(reason) => {
                let reason = reason.from_peer().within("the destination's proxy");
                return Err(GatewayError::new(&reason).of(reason.kind));
            }
            unexpected => return Err(GatewayError::new(out_of_phase("the destination's proxy", &unexpected))),
        }
        Ok(())
    }

    /// Waits for the destination's reason for a broken channel, which comes on the control channel.
    fn last_words(&mut self, events: &Receiver<Event>) -> Option<GatewayError> {
        let deadline = Instant::now() + LAST_WORDS;
        loop {
            let event = events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
            if let Event::Control(ControlEvent::Message(message, _)) = event
                && let Err(reason) = self.handle_message(message, &mut Figures::default())
            {
                return Some(reason);
            }
        }
    }

    /// Sends `Delivered` once the end of the stream is acknowledged: then the destination QEMU has everything. Called when QEMU has closed its
    /// main channel.
    fn await_delivery(&self) -> Result<(), GatewayError> {
        let Some(plane) = &self.plane else { return Ok(()) };
        let (stream, events) = (Arc::clone(&plane.stream_channel), self.events_in.clone());
        let wait = move || {
            // If the channel breaks instead, the alarm has been raised.
            if stream.drained().is_ok() {
                let _ = events.send(Event::Delivered);
            }
        };
        Builder::new().name("delivery".into()).spawn(wait).map(drop).map_err(GatewayError::new)
    }

    /// Ends the session in order: first each channel, with its closing message, then the control channel.
    fn end(self) {
        let Self { abort, link, plane, .. } = self;
        let Some(plane) = plane else { return };
        std::thread::scope(|scope| {
            let (ended, waiting) = channel::<()>();
            let abort = &abort;
            let limit = move || {
                if waiting.recv_timeout(FAREWELL_TIME) == Err(RecvTimeoutError::Timeout) {
                    abort.finish();
                }
            };
            if Builder::new().name("farewell".into()).spawn_scoped(scope, limit).is_err() {
                // Without a time limit a peer that does not read would be waited for without end.
                abort.finish();
            }
            plane.join();
            drop(ended);
        });
        abort.finish();
        link.finish();
    }

    fn give_up(self, error: &GatewayError) {
        let _ = self.link.send(&ControlMessage::Failed(Reason::new(error.kind, error)));
        self.abort.finish();
        if let Some(plane) = self.plane {
            plane.leave(QEMU_TIME);
        }
        self.link.finish();
    }
}
