//! The source's proxy.

use std::collections::HashMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use sterna::abort::Abort;
use sterna::cancel::Cancel;
use sterna::control_link::{ControlEvent, ControlLink};
use sterna::pacer::Pacer;
use sterna::report::Observer;
use sterna::send::{Compression, SendContext};
use sterna::session::{self, Offer, PeerNews, Session, TellPeer};
use sterna::transport::unix::{self, SocketFile};
use sterna::transport::{Address, Connection, open_channel};
use sterna::window::Window;
use sterna_wire::control::{ControlMessage, Machine, Mode};
use sterna_wire::header::ChannelKind;
use sterna_wire::limits::{HANDSHAKE_TIME, MAX_OPAQUE_CHANNELS, MAX_RAM_CHANNELS};

use super::opaque::{Open, pump_in, pump_out};
use crate::gateway::features::FEATURES;
use crate::gateway::layout::Start;
use crate::gateway::plane::{Plane, WhenAborted};
use crate::gateway::sockets::{accept_until, first_bytes};
use crate::gateway::source_stream::{NormalPageRatio, StreamNews, closer, read_start};
use crate::gateway::{GatewayError, ProxySendOptions};
use crate::stream::{ChannelSniff, MainReader, MultifdInit, ReturnMessage};

/// How long a connection on the migration socket may take to say what it is. QEMU from 9.0 connects everything first.
const SNIFF_TIME: Duration = Duration::from_secs(30);

enum Event {
    /// A migration has begun: its main channel, read up to the end of the RAM setup section, and its other channels.
    Migration(Box<(MainReader<UnixStream>, Start)>, UnixStream, Vec<(UnixStream, MultifdInit)>),
    Opaque(String, UnixStream),
    Control(ControlEvent),
    Stream(StreamNews),
    OpaqueEnded,
    Note(String),
    Broken,
    Cancelled,
}

/// Carries what connects to `options.unix`, and to the other sockets, to the destination's proxy. Ends when a migration
/// has come to its end and all connections are closed.
///
/// # Errors
/// What broke; the QEMUs' own sockets have been closed, as if the network had failed.
pub fn proxy_send(options: &ProxySendOptions, cancel: &Cancel, observer: &dyn Observer) -> Result<(), GatewayError> {
    let engines = options.qatzip.engines(options.method, options.channels);
    let (engines, line) = engines.map_err(|refused| GatewayError(refused.to_string()))?;
    line.iter().for_each(|line| observer.note(line));
    let (events_in, events) = channel();
    let migrations = Socket::listen(&options.unix)?;
    let mut opaque = Vec::new();
    for (name, path) in &options.opaque {
        opaque.push((name.clone(), Socket::listen(path)?));
    }
    observer.note(&format!("listening on {}", options.unix.display()));
    migrations.collect(events_in.clone());
    for (name, socket) in &opaque {
        socket.take_all(name.clone(), events_in.clone());
    }
    let cancelled = events_in.clone();
    cancel.on_cancel(move || drop(cancelled.send(Event::Cancelled)));

    let abort = Arc::new(Abort::default());
    let broken = events_in.clone();
    abort.on_end(move || drop(broken.send(Event::Broken)));
    let mut proxy = Proxy {
        options,
        compression: Compression::new(options.method, engines, options.channels, options.cpu),
        observer,
        cancel,
        events_in,
        abort,
        dialed: None,
        plane: None,
        return_path: None,
        waiting: HashMap::new(),
        next_opaque: 0,
        open: Open::default(),
        stream_ended: false,
    };
    let mut outcome = Ok(());
    for event in events {
        match proxy.take(event) {
            Ok(()) if proxy.is_done() => break,
            Ok(()) => {}
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    if outcome.is_ok()
        && let Some(plane) = &proxy.plane
    {
        // What was handed over last must have arrived before the connections are closed.
        let _ = plane.stream_channel.drained();
    }
    proxy.abort.finish();
    if let Some(plane) = proxy.plane.take() {
        plane.join();
    }
    outcome
}

/// A unix socket that this proxy listens on; removed at the end.
struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Now: the threads that accept have the listener as well, and end later.
        self.file.remove();
    }
}

impl Socket {
    fn listen(path: &Path) -> Result<Self, GatewayError> {
        let failed =
            |error: &dyn std::fmt::Display| GatewayError(format!("cannot listen on {}: {error}", path.display()));
        let (listener, file) = unix::listen(path).map_err(|error| failed(&error))?;
        Ok(Self { listener, file })
    }

    /// Hands out every connection as opaque.
    fn take_all(&self, name: String, events: Sender<Event>) {
        let Ok(listener) = self.listener.try_clone() else { return };
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if events.send(Event::Opaque(name.clone(), stream)).is_err() {
                    return;
                }
            }
        });
    }

    /// Tells migration connections from others.
    fn collect(&self, events: Sender<Event>) {
        let Ok(listener) = self.listener.try_clone() else { return };
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let event = match first_bytes(&stream, SNIFF_TIME).map(ChannelSniff::of) {
                    Ok(ChannelSniff::Main) => begin_migration(stream, &listener),
                    Ok(ChannelSniff::Multifd) => {
                        Event::Note("a multifd channel came before its main channel: closed".into())
                    }
                    Ok(ChannelSniff::Other) => Event::Opaque(String::new(), stream),
                    Err(error) => Event::Note(format!("a connection said nothing: closed ({error})")),
                };
                if events.send(event).is_err() {
                    return;
                }
            }
        });
    }
}

/// Reads the beginning of the main channel. Its setup section ends only when all multifd channels are connected, so
/// those are all in the listener's queue by then.
fn begin_migration(main: UnixStream, listener: &UnixListener) -> Event {
    let begin = || -> Result<Event, String> {
        let return_path = main.try_clone().map_err(|error| error.to_string())?;
        let mut reader = MainReader::new(main);
        let mut start = read_start(&mut reader).map_err(|error| error.to_string())?;
        let mut multifd: Vec<(UnixStream, MultifdInit)> = Vec::new();
        while let Ok(stream) = accept_until(listener, Instant::now()) {
            stream.set_read_timeout(Some(HANDSHAKE_TIME)).map_err(|error| error.to_string())?;
            let init = MultifdInit::read(&stream, u8::MAX).map_err(|error| error.to_string())?;
            stream.set_read_timeout(None).map_err(|error| error.to_string())?;
            if multifd.iter().any(|(_, known)| known.id == init.id) {
                return Err("two multifd channels with the same number".into());
            }
            multifd.push((stream, init));
        }
        if multifd.len() > usize::from(MAX_RAM_CHANNELS) {
            return Err(format!(
                "{} multifd channels are more than the {MAX_RAM_CHANNELS} that can be carried",
                multifd.len()
            ));
        }
        start.multifd_channels = multifd.len() as u8;
        start.uuid = multifd.first().map_or([0; 16], |(_, init)| init.uuid);
        Ok(Event::Migration(Box::new((reader, start)), return_path, multifd))
    };
    begin().unwrap_or_else(|reason| Event::Note(format!("a migration was refused and its sockets closed: {reason}")))
}

struct Proxy<'a> {
    options: &'a ProxySendOptions,
    compression: Compression,
    observer: &'a dyn Observer,
    cancel: &'a Cancel,
    events_in: Sender<Event>,
    abort: Arc<Abort>,
    dialed: Option<(ControlLink, Session)>,
    plane: Option<Plane>,
    return_path: Option<UnixStream>,
    /// Opaque connections that the destination has not answered for yet.
    waiting: HashMap<u16, UnixStream>,
    next_opaque: u16,
    open: Open,
    stream_ended: bool,
}

impl Proxy<'_> {
    fn is_done(&self) -> bool {
        self.stream_ended && self.waiting.is_empty() && !self.open.any()
    }

    fn take(&mut self, event: Event) -> Result<(), GatewayError> {
        match event {
            Event::Migration(begun, return_path, multifd) => self.migrate(*begun, return_path, multifd),
            Event::Opaque(name, stream) => self.offer_opaque(name, stream),
            Event::Control(ControlEvent::Message(message, _share)) => self.heard(message),
            Event::Control(ControlEvent::Lost(_)) if self.is_done() => Ok(()),
            Event::Control(ControlEvent::Lost(reason)) => {
                Err(GatewayError(format!("the destination's proxy was lost: {reason}; QEMU's connections were closed")))
            }
            Event::Stream(news) => {
                self.stream_ended |= matches!(news, StreamNews::Ended);
                Ok(())
            }
            Event::OpaqueEnded => Ok(()),
            Event::Note(text) => {
                self.observer.note(&text);
                Ok(())
            }
            Event::Broken => match self.abort.reason() {
                Some(reason) => Err(GatewayError(format!("{reason}; QEMU's connections were closed"))),
                None => Ok(()),
            },
            Event::Cancelled => Err(GatewayError("cancelled; QEMU's connections were closed".into())),
        }
    }

    /// The way to the destination's proxy, made when it is first needed.
    fn dialed(&mut self) -> Result<&(ControlLink, Session), GatewayError> {
        if self.dialed.is_none() {
            let offer = Offer {
                to: &Address::from(&self.options.to),
                security: &self.options.security,
                channels: MAX_RAM_CHANNELS,
                packet_size: self.options.packet_size,
                machine: Machine::default(),
                mode: Mode::Proxy,
                features: FEATURES,
                method: self.options.method.method(),
            };
            let events = self.events_in.clone();
            let tell: TellPeer = Arc::new(move |news| {
                if let PeerNews::Control(_, event) = news {
                    let _ = events.send(Event::Control(event));
                }
            });
            self.dialed = Some(session::dial(&offer, self.cancel, &tell)?);
        }
        Ok(self.dialed.as_ref().expect("just made"))
    }

    fn context(&mut self) -> Result<SendContext, GatewayError> {
        let (_, dialed) = self.dialed()?;
        let (rules, round_trip) = (dialed.rules(), dialed.round_trip);
        Ok(SendContext {
            window: Arc::new(Window::new(rules.packet_size as u64, round_trip, self.options.downtime)),
            pacer: Arc::new(Pacer::new(self.options.bandwidth)),
            abort: Arc::clone(&self.abort),
            compression: self.compression.clone(),
            rules,
            accelerator: None,
            again: None,
            delta_cache: 0,
            delta_blocks: None,
            devices: None,
        })
    }

    fn migrate(
        &mut self,
        (reader, start): (MainReader<UnixStream>, Start),
        return_path: UnixStream,
        multifd: Vec<(UnixStream, MultifdInit)>,
    ) -> Result<(), GatewayError> {
        if self.plane.is_some() {
            self.observer.note("a second migration came while one is under way: its connections were closed");
            return Ok(());
        }
        let context = self.context()?;
        let channels = if multifd.is_empty() { self.options.channels } else { multifd.len() as u16 };
        let start = Start { ram_channels: channels, ..start };
        let (_, dialed) = self.dialed()?;
        let dialed = Session { channels, ..dialed.clone() };
        let (security, to) = (&self.options.security, &self.options.to);
        let mut plane =
            Plane::open(&dialed, security, to, &context, 1 + multifd.len(), self.cancel, WhenAborted::Close)?;
        self.observer.note(&format!(
            "a migration of {} with {} multifd channels",
            start.configuration.machine,
            multifd.len()
        ));
        self.abort.on_end(closer(&return_path).map_err(GatewayError::new)?);
        let ratio = NormalPageRatio::new(0);
        plane.read_multifd(multifd, &ratio).map_err(GatewayError::new)?;
        let events = self.events_in.clone();
        let news = move |news| drop(events.send(Event::Stream(news)));
        plane.read_main(&return_path, move || Ok((reader, start)), ratio, news).map_err(GatewayError::new)?;
        self.return_path = Some(return_path);
        self.plane = Some(plane);
        Ok(())
    }

    fn heard(&mut self, message: ControlMessage) -> Result<(), GatewayError> {
        match message {
            ControlMessage::Ready { .. } => {
                if let Some(plane) = &self.plane {
                    plane.sync.open();
                }
            }
            ControlMessage::ReturnPath(message) => {
                let message = ReturnMessage::from(message);
                if let Some(return_path) = &self.return_path
                    && let Err(error) = message.write(return_path)
                {
                    // The source QEMU has closed it; its main channel's end is noticed by its reader.
                    tracing::info!(%error, "the return path is closed");
                }
            }
            ControlMessage::OpaqueAnswer { index, refusal } => match (self.waiting.remove(&index), refusal) {
                (Some(stream), None) => self.open_opaque(index, stream)?,
                (_, refusal) => {
                    let reason = sterna_wire::text::cleaned(refusal.as_deref().unwrap_or("not asked for"));
                    self.observer.note(&format!("the destination refuses an opaque connection: {reason}"));
                }
            },
            ControlMessage::Failed { reason } | ControlMessage::Refused { reason } => {
                let reason = sterna_wire::text::cleaned(&reason);
                return Err(GatewayError(format!("the destination failed: {reason}; QEMU's connections were closed")));
            }
            unexpected => tracing::warn!(?unexpected, "not expected from a destination's proxy"),
        }
        Ok(())
    }

    fn offer_opaque(&mut self, name: String, stream: UnixStream) -> Result<(), GatewayError> {
        let index = self.next_opaque;
        if index >= MAX_OPAQUE_CHANNELS / 2 {
            self.observer.note("too many opaque connections in one migration: closed");
            return Ok(());
        }
        self.next_opaque += 1;
        self.waiting.insert(index, stream);
        let (link, _) = self.dialed()?;
        link.send(&ControlMessage::Opaque { index, name }).map_err(GatewayError::new)
    }

    fn open_opaque(&mut self, index: u16, stream: UnixStream) -> Result<(), GatewayError> {
        let context = self.context()?;
        let (security, to) = (&self.options.security, &self.options.to);
        let (_, dialed) = self.dialed.as_ref().ok_or_else(|| GatewayError("an answer before a question".into()))?;
        let channel = dialed.open(security, to, ChannelKind::Opaque, 2 * index, &context)?;
        let back = Connection::connect(to, security).map_err(GatewayError::new)?;
        let closing = back.closer();
        self.abort.on_end(move || closing.close());
        self.abort.on_end(closer(&stream).map_err(GatewayError::new)?);
        let opened = open_channel(back, &dialed.key, dialed.id, ChannelKind::Opaque, 2 * index + 1, dialed.incarnation);
        let (writer, reader, _) = opened.map_err(GatewayError::new)?;
        let local = stream.try_clone().map_err(GatewayError::new)?;
        let ended = |events: &Sender<Event>| {
            let events = events.clone();
            move || drop(events.send(Event::OpaqueEnded))
        };
        pump_out(stream, channel, &self.open, ended(&self.events_in)).map_err(GatewayError::new)?;
        pump_in(local, reader, writer, dialed.packet_size, &self.open, ended(&self.events_in))
            .map_err(GatewayError::new)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_socket_that_a_killed_process_left_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the kernel leaves the name");

        let socket = Socket::listen(&path).unwrap();

        drop(UnixStream::connect(&path).unwrap());
        socket.listener.accept().unwrap();
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_in_use_is_left_alone_and_not_even_disturbed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        let socket = Socket::listen(&path).unwrap();

        let error = Socket::listen(&path).err().expect("it is in use").to_string();

        assert!(error.contains("from.sock") && error.contains("another process listens there"), "{error}");
        socket.listener.set_nonblocking(true).unwrap();
        assert_eq!(socket.listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody has connected");
    }

    #[test]
    fn what_is_no_socket_is_never_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        std::fs::write(&path, "precious").unwrap();

        let error = Socket::listen(&path).err().expect("it is a file").to_string();

        assert!(error.contains("something else than a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
