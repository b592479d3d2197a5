//! The destination's proxy.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::abort::Abort;
use sterna::cancel::Cancel;
use sterna::control_link::{ControlEvent, ControlLink, say};
use sterna::pacer::Pacer;
use sterna::receive::PacketRules;
use sterna::report::Observer;
use sterna::send::{Compression, SendChannel, SendContext};
use sterna::session::{Doorman, Greeted, Greeting, OtherDoor, PeerNews, Refused, TellPeer, link_events};
use sterna::transport::{Connection, Limits, Listener, accept_channel};
use sterna::window::Window;
use sterna_wire::control::{ControlMessage, Mode};
use sterna_wire::header::ChannelKind;
use sterna_wire::limits::MAX_OPAQUE_CHANNELS;

use super::opaque::{Open, pump_in, pump_out};
use crate::gateway::features::FEATURES;
use crate::gateway::feeder::{Agreed, Feeder, FeederNews, FeederSinks};
use crate::gateway::sockets;
use crate::gateway::source_stream::closer;
use crate::gateway::{GatewayError, Placement, ProxyReceiveOptions};
use crate::stream::{ReturnMessage, ReturnPathReader};

enum Event {
    Control(ControlEvent),
    Feeder(FeederNews),
    ReturnPath(Option<ReturnMessage>),
    OpaqueEnded,
    Broken,
    Cancelled,
}

/// Carries what comes from one source's proxy to the destination QEMU, and opaque connections to their sockets.
///
/// # Errors
/// What broke; the QEMUs' own sockets have been closed, as if the network had failed.
pub fn proxy_receive(
    options: &ProxyReceiveOptions,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<(), GatewayError> {
    let listener = Listener::bind(&options.listen).map_err(GatewayError::new)?;
    observer.note(&format!("listening on {}", listener.local_address()));
    let incoming = listener.start(options.security.clone(), Limits::default()).map_err(GatewayError::new)?;
    let stop_at_end = incoming.stop_handle();
    let refused = |reason: &str| observer.note(&format!("refused: {reason}"));
    let greeting = Greeting { mode: Mode::Proxy, features: FEATURES, refusal: &|_| None };
    let greeted = greeting.first(&incoming, cancel, refused);
    let greeted = greeted.ok_or_else(|| GatewayError("cancelled before a source connected".into()))?;
    observer.note(&format!("a proxy's connections from {}", greeted.peer));

    let Greeted { session, mut writer, reader, closer: closing, messages, welcome, .. } = greeted;
    let (events_in, events) = channel();
    let abort = Arc::new(Abort::default());
    let broken = events_in.clone();
    abort.on_end(move || drop(broken.send(Event::Broken)));
    let cancelled = events_in.clone();
    let _cancelling = cancel.on_cancel(move || drop(cancelled.send(Event::Cancelled)));

    let nowhere = Box::new(|| Err("a proxy does not look into QEMU".to_owned()));
    let feeder = Feeder::new(&options.unix, Placement::InStream, nowhere, Agreed::default(), &abort);
    let fed = events_in.clone();
    let sinks = FeederSinks::new(feeder, move |news| drop(fed.send(Event::Feeder(news))));
    let packet_size = session.packet_size;
    let opaque = Arc::new(OpaqueConnections {
        local: Mutex::default(),
        next: AtomicU16::new(0),
        open: Open::default(),
        packet_size,
        abort: Arc::clone(&abort),
        events_in: events_in.clone(),
    });
    let door: OtherDoor = {
        let opaque = Arc::clone(&opaque);
        Box::new(move |header, connection, _| match header.kind {
            ChannelKind::Opaque => opaque.admit(header.index, connection),
            _ => Err(Box::new((connection, "a proxy has no such channel".into()))),
        })
    };
    let told = events_in.clone();
    // A proxy's source does not come back: what it cannot finish is begun anew.
    let tell: TellPeer = Arc::new(move |news| {
        if let PeerNews::Control(1, event) = news {
            let _ = told.send(Event::Control(event));
        }
    });
    let link_events = link_events(&tell, 1);
    let doorman = Arc::new(Doorman::new(session, Box::new(sinks), &abort, Some(door), tell));
    doorman.open();
    say(&mut writer, &ControlMessage::Welcome(welcome)).map_err(GatewayError::new)?;
    let link = ControlLink::start(writer, reader, closing, messages, link_events).map_err(GatewayError::new)?;
    let accepting = {
        let doorman = Arc::clone(&doorman);
        std::thread::spawn(move || {
            while let Some((connection, header)) = incoming.next() {
                doorman.admit(connection, &header);
            }
        })
    };

    let mut proxy = Proxy { options, link, opaque, events_in, stream_ended: false, shut: false };
    let mut outcome = Ok(());
    for event in events {
        match proxy.take(event, &abort) {
            Ok(false) => {}
            Ok(true) => break,
            Err(error) => {
                let _ = proxy.link.send(&ControlMessage::Failed { reason: error.to_string() });
                outcome = Err(error);
                break;
            }
        }
    }
    abort.finish();
    stop_at_end.stop();
    let _ = accepting.join();
    doorman.join();
    outcome
}

struct Proxy<'a> {
    options: &'a ProxyReceiveOptions,
    link: ControlLink,
    opaque: Arc<OpaqueConnections>,
    events_in: Sender<Event>,
    stream_ended: bool,
    shut: bool,
}

impl Proxy<'_> {
    /// Says whether everything has come to its end.
    fn take(&mut self, event: Event, abort: &Abort) -> Result<bool, GatewayError> {
        match event {
            Event::Control(ControlEvent::Message(ControlMessage::Opaque { index, name }, _)) => {
                let refusal = self.connect_opaque(index, &name).err();
                self.say(&ControlMessage::OpaqueAnswer { index, refusal });
            }
            Event::Control(ControlEvent::Message(ControlMessage::Failed { reason }, _)) => {
                return Err(GatewayError(format!("the source failed: {}", sterna_wire::text::cleaned(&reason))));
            }
            Event::Control(ControlEvent::Lost(_)) if self.stream_ended => return Ok(true),
            Event::Control(ControlEvent::Lost(reason)) => {
                return Err(GatewayError(format!(
                    "the source's proxy was lost: {reason}; QEMU's connections were closed"
                )));
            }
            Event::Control(_) | Event::OpaqueEnded => {}
            Event::Feeder(FeederNews::Ready { placement, return_path, .. }) => {
                self.say(&ControlMessage::Ready { placement, deltas: Vec::new() });
                self.relay_return_path(return_path);
            }
            Event::Feeder(FeederNews::RamPlaced) => {}
            Event::Feeder(FeederNews::Ended) => self.stream_ended = true,
            Event::ReturnPath(Some(message)) => {
                self.shut |= matches!(message, ReturnMessage::Shut(_));
                self.say(&ControlMessage::ReturnPath(message.into()));
            }
            // Without a word it has given up, unless no return path was asked for and the stream is over.
            Event::ReturnPath(None) if self.shut || self.stream_ended => {}
            Event::ReturnPath(None) => {
                return Err(GatewayError("the destination QEMU closed its migration socket".into()));
            }
            Event::Broken => {
                if let Some(reason) = abort.reason() {
                    return Err(GatewayError(format!("{reason}; QEMU's connections were closed")));
                }
            }
            Event::Cancelled => return Err(GatewayError("cancelled; QEMU's connections were closed".into())),
        }
        Ok(false)
    }

    fn say(&self, message: &ControlMessage) {
        if let Err(error) = self.link.send(message) {
            // The link's reading side reports the loss.
            tracing::info!(%error, "the source's proxy did not take a message");
        }
    }

    fn connect_opaque(&self, index: u16, name: &str) -> Result<(), String> {
        if index != self.opaque.next.fetch_add(1, Ordering::Relaxed) || index >= MAX_OPAQUE_CHANNELS / 2 {
            return Err(format!("opaque connection {index} is out of order or one too many"));
        }
        let path: &PathBuf = if name.is_empty() {
            &self.options.unix
        } else {
            let known = self.options.opaque.iter().find(|(known, _)| known == name);
            &known.ok_or_else(|| format!("no socket is known here by the name {name:?}"))?.1
        };
        let stream = sockets::connect(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut local = self.opaque.local.lock().expect("opaque connections do not panic");
        local.insert(index, Waiting { stream, taken: [false; 2] });
        Ok(())
    }

    fn relay_return_path(&self, mut reader: ReturnPathReader<UnixStream>) {
        let events = self.events_in.clone();
        std::thread::spawn(move || {
            loop {
                let message = reader.next_message().unwrap_or_else(|error| {
                    tracing::info!(%error, "the return path broke");
                    None
                });
                let ended = message.is_none();
                if events.send(Event::ReturnPath(message)).is_err() || ended {
                    return;
                }
            }
        });
    }
}

/// The local end of an opaque connection whose two channels have not both come yet.
struct Waiting {
    stream: UnixStream,
    taken: [bool; 2],
}

/// The local ends of opaque connections, by their index.
struct OpaqueConnections {
    local: Mutex<HashMap<u16, Waiting>>,
    /// The index of the next opaque connection.
    next: AtomicU16,
    open: Open,
    packet_size: usize,
    abort: Arc<Abort>,
    events_in: Sender<Event>,
}

impl OpaqueConnections {
    /// An even channel brings what the source's side says, the odd one after it takes back what this side says.
    fn admit(&self, channel: u16, connection: Connection) -> Result<(), Refused> {
        let local = {
            let mut local = self.local.lock().expect("opaque connections do not panic");
            let free = local.get_mut(&(channel / 2)).filter(|waiting| !waiting.taken[usize::from(channel % 2)]);
            let stream = free.map(|waiting| {
                waiting.taken[usize::from(channel % 2)] = true;
                (waiting.stream.try_clone(), waiting.taken == [true; 2])
            });
            if let Some((_, true)) = stream {
                local.remove(&(channel / 2));
            }
            stream.map(|(stream, _)| stream)
        };
        let Some(Ok(local)) = local else {
            return Err(Box::new((connection, "no opaque connection with this index".into())));
        };
        if let Err(error) = self.start(channel, connection, local) {
            tracing::info!(error, "an opaque connection failed");
        }
        Ok(())
    }

    fn start(&self, channel: u16, connection: Connection, local: UnixStream) -> Result<(), String> {
        let failed = |error: std::io::Error| error.to_string();
        let closing = connection.closer();
        self.abort.on_end(move || closing.close());
        self.abort.on_end(closer(&local).map_err(failed)?);
        let (writer, reader) = accept_channel(connection).map_err(|error| error.to_string())?;
        let events = self.events_in.clone();
        let ended = move || drop(events.send(Event::OpaqueEnded));
        if channel.is_multiple_of(2) {
            return pump_in(local, reader, writer, self.packet_size, &self.open, ended).map_err(failed);
        }
        let context = SendContext {
            window: Arc::new(Window::new(self.packet_size as u64, Duration::ZERO, Duration::ZERO)),
            pacer: Arc::new(Pacer::new(None)),
            abort: Arc::clone(&self.abort),
            compression: Compression::none(),
            rules: PacketRules { packet_size: self.packet_size, checksums: true },
            accelerator: None,
            again: None,
            delta_cache: 0,
            delta_blocks: None,
            devices: None,
        };
        let name = format!("opaque-{channel}");
        let channel = SendChannel::start(&name, writer, reader, context).map_err(failed)?;
        pump_out(local, channel, &self.open, ended).map_err(failed)
    }
}
