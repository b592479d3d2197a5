//! The destination's proxy: accepts sessions from the source's proxies and connects each to its local socket.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use sterna_engine::abort::Abort;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{ControlEvent, ControlLink, out_of_phase, send_message};
use sterna_engine::receive::ChannelSink;
use sterna_engine::receive::placer::PageAgreement;
use sterna_engine::report::{Observer, Outcome, between};
use sterna_engine::session::{
    AcceptedSource, ChannelAcceptor, ConnectionEvent, Entered, ExtraChannelHandler, Handshake, OnConnectionEvent,
    Opened, Session, Sessions, Sinks, link_events,
};
use sterna_engine::transport::{Connection, Limits, Listener, Security, accept_channel, refuse_channel};
use sterna_wire::control::{ControlMessage, Mode, RelayContent};
use sterna_wire::header::ChannelKind;
use sterna_wire::limits::HANDSHAKE_TIME;

use super::connection::{Ending, LocalEnd, TO_DESTINATION, TO_SOURCE};
use super::migration_in::Migration;
use super::report::{ProxyReport, ProxySide};
use super::under_way::UnderWay;
use super::{ProxyStop, under_way};
use crate::gateway::features::FEATURES;
use crate::gateway::feeder::{Feeder, FeederEvent, FeederSinks};
use crate::gateway::sockets;
use crate::gateway::{GatewayError, Placement, ProxyReceiveOptions};
use crate::stream::ReturnMessage;

/// The events of one session.
pub(super) enum Event {
    Control(ControlEvent),
    Feeder(FeederEvent),
    ReturnPath(ReturnMessage),
    /// The destination QEMU has closed its socket without a SHUT, by which it reports that it has loaded the guest.
    ClosedWithoutShut,
    /// A channel of a connection that is carried unchanged, with its index.
    Channel(u16, Box<Connection>),
    /// One direction of such a connection has ended.
    DirectionEnded,
    Broken,
    Cancelled,
}

struct Proxy<'a> {
    options: &'a ProxyReceiveOptions,
    observer: &'a dyn Observer,
    report: &'a (dyn Fn(&ProxyReport) + Sync),
    under_way: UnderWay,
    sessions: Arc<Sessions>,
}

/// Carries migrations from the source's proxies to the destination QEMUs, and connections to the other sockets, until `stop`. Calls
/// `report` at the end of each migration. Returns whether every session came to its own end.
///
/// # Errors
/// Listening on the address fails. No session was served.
pub fn proxy_receive(
    options: &ProxyReceiveOptions,
    stop: &ProxyStop,
    observer: &dyn Observer,
    report: &(dyn Fn(&ProxyReport) + Sync),
) -> Result<bool, GatewayError> {
    let listener = Listener::bind(&options.listen).map_err(GatewayError::new)?;
    observer.listening(&listener.local_address().to_string());
    let incoming = listener.start(options.security.clone(), Limits::default()).map_err(GatewayError::new)?;
    let sessions = Arc::new(Sessions::new(&incoming));
    let proxy = Proxy { options, observer, report, under_way: UnderWay::default(), sessions: Arc::clone(&sessions) };
    let drain = {
        let sessions = Arc::clone(&sessions);
        move || sessions.stop()
    };
    let _obeying = under_way::obey(stop, &proxy.under_way, drain, || ());
    let refused = |reason: &str| observer.note(&format!("refused: {reason}"));
    let greeting = Handshake { takes: &[(Mode::Proxy, FEATURES)], refusals: &|_| Vec::new(), describe: None };
    sessions.serve(&incoming, &greeting, refused, |greeted| proxy.serve(greeted));
    Ok(!proxy.under_way.was_cut())
}

impl Proxy<'_> {
    /// Serves one session to its end.
    fn serve(&self, greeted: AcceptedSource) {
        // Sessions have the same limit, so there is always room.
        let Some(carried) = self.under_way.enter() else { return };
        let AcceptedSource { session, mut writer, reader, closer, messages, welcome, peer, .. } = greeted;
        let (events_in, events) = channel();
        let news = events_in.clone();
        // A source's proxy never reconnects: the programs that drive the QEMUs start a failed migration again.
        let on_connection: OnConnectionEvent = Arc::new(move |event| {
            if let ConnectionEvent::Control(1, event) = event {
                let _ = news.send(Event::Control(event));
            }
        });
        let cancelled = events_in.clone();
        let _cancelling = carried.cancel.on_cancel(move || drop(cancelled.send(Event::Cancelled)));
        let close = closer.clone();
        let welcomed = send_message(&mut writer, &ControlMessage::Welcome(welcome));
        let link = welcomed
            .and_then(|()| ControlLink::start(writer, reader, closer, messages, link_events(&on_connection, 1)));
        // Closing also ends a write to a source that reads nothing.
        let _closing = carried.cancel.on_cancel(move || close.close());
        let link = match link {
            Ok(link) => link,
            Err(error) => return self.observer.note(&format!("{peer} was lost at once: {error}")),
        };
        let serving = Serving { proxy: self, session, peer, link, events, cancel: &carried.cancel, on_connection };
        serving.run(&events_in);
    }
}

/// A session whose source has been welcomed.
struct Serving<'a> {
    proxy: &'a Proxy<'a>,
    session: Session,
    peer: String,
    link: ControlLink,
    events: Receiver<Event>,
    cancel: &'a Cancel,
    on_connection: OnConnectionEvent,
}

impl Serving<'_> {
    fn run(self, events_in: &Sender<Event>) {
        let observer = self.proxy.observer;
        match self.relay() {
            Ok((RelayContent::Migration, socket)) => {
                let report = self.migration(socket, events_in);
                observer.note(&report.text());
                (self.proxy.report)(&report);
            }
            Ok((RelayContent::Connection, socket)) => {
                if let Err(error) = self.connection(&socket, events_in) {
                    observer.note(&format!("a connection from {} was closed: {error}", self.peer));
                }
            }
            Err(error) => observer.note(&format!("a session from {} was closed: {error}", self.peer)),
        }
        self.link.finish();
    }

    /// Receives what the session carries, and the name of its socket.
    fn relay(&self) -> Result<(RelayContent, String), GatewayError> {
        let event = self.events.recv_timeout(HANDSHAKE_TIME);
        let event = event.map_err(|_| GatewayError::new("it has not sent in time what it carries"))?;
        match event {
            Event::Control(ControlEvent::Message(ControlMessage::Relay { content, socket }, _)) => {
                Ok((content, socket))
            }
            Event::Control(ControlEvent::Message(..)) => {
                Err(GatewayError::new("its first message does not state what it carries"))
            }
            Event::Control(ControlEvent::Lost(reason)) => Err(GatewayError::new(reason)),
            Event::Cancelled => Err(GatewayError::new("the proxy was told to close its connections")),
            _ => Err(GatewayError::new("it sends before it has stated what it carries")),
        }
    }

    fn answer(&self, refusal: Option<String>) -> Result<(), GatewayError> {
        let answer = ControlMessage::RelayAnswer { refusal };
        self.link.send(&answer).map_err(|error| GatewayError::new(format!("the source's proxy was lost: {error}")))
    }

    /// Returns the path of a socket. An unknown name is refused to the source's proxy.
    fn path(&self, sockets: &[&[(String, PathBuf)]], name: &str) -> Result<PathBuf, GatewayError> {
        let found = sockets.iter().copied().flatten().find(|(known, _)| known == name);
        match found {
            Some((_, path)) => Ok(path.clone()),
            None => {
                let name = sterna_wire::text::cleaned(name);
                let refusal = format!("no socket is known here by the name \"{name}\"");
                self.answer(Some(refusal.clone()))?;
                Err(GatewayError::new(refusal))
            }
        }
    }

    fn migration(&self, socket: String, events_in: &Sender<Event>) -> ProxyReport {
        let begun = Instant::now();
        let result = self.carry_migration(&socket, events_in);
        let (outcome, reason) = match result {
            Ok(()) => (Outcome::Completed, None),
            Err(_) if self.cancel.is_cancelled() => (Outcome::Cancelled, None),
            Err(error) => (Outcome::Failed, Some(error.to_string())),
        };
        ProxyReport {
            side: ProxySide::Destination,
            id: self.session.id.to_string(),
            outcome,
            reason,
            socket,
            peer: self.peer.clone(),
            machine: String::new(),
            total_ms: between(Some(begun), Some(Instant::now())),
            downtime_seen_ms: None,
            multifd_channels: 0,
            channels: 0,
            encrypted: matches!(self.proxy.options.security, Security::Tls(_)),
            method: String::new(),
            wire_bytes: 0,
            content_bytes: 0,
            normal_pages: 0,
            zero_pages: 0,
            ratio: 1.0,
            throughput: 0.0,
        }
    }

    fn carry_migration(&self, socket: &str, events_in: &Sender<Event>) -> Result<(), GatewayError> {
        let options = self.proxy.options;
        let path = self.path(&[&options.unix], socket)?;
        self.proxy.observer.note(&format!("migration {}: from {}", self.session.id, self.peer));
        let abort = Arc::new(Abort::default());
        let broken = events_in.clone();
        abort.on_end(move || drop(broken.send(Event::Broken)));
        let no_blocks = Box::new(|| Err("a proxy does not look into QEMU".to_owned()));
        let agreement = PageAgreement::default();
        let feeder = Feeder::new(&path, options.patience, Placement::InStream, no_blocks, agreement, &abort);
        let fed = events_in.clone();
        let sinks = FeederSinks::new(feeder, move |news| drop(fed.send(Event::Feeder(news))));
        let acceptor =
            ChannelAcceptor::new(self.session.clone(), Box::new(sinks), &abort, None, Arc::clone(&self.on_connection));
        let acceptor = Arc::new(acceptor);
        let _entered = self.enter(&acceptor)?;
        acceptor.open();
        if let Err(error) = self.answer(None) {
            abort.finish();
            acceptor.join();
            return Err(error);
        }
        Migration::new(abort, acceptor, &self.link, events_in.clone()).carry(&self.events)
    }

    /// Has the session's channels admitted, or refuses the session.
    fn enter(&self, acceptor: &Arc<ChannelAcceptor>) -> Result<Entered<'_>, GatewayError> {
        self.proxy.sessions.enter(acceptor).map_err(|reason| {
            // Fails where the source is gone, which needs no answer.
            let _ = self.answer(Some(reason.clone()));
            GatewayError::new(reason)
        })
    }

    fn connection(&self, socket: &str, events_in: &Sender<Event>) -> Result<(), GatewayError> {
        let failed = GatewayError::new;
        let options = self.proxy.options;
        // A connection to a migration socket that carries no readable migration goes to the same socket.
        let path = self.path(&[&options.opaque, &options.unix], socket)?;
        let stream = match sockets::connect_within(&path, options.patience, || self.cancel.is_cancelled()) {
            Ok(stream) => stream,
            Err(error) => {
                let refusal = format!("{}: {error}", path.display());
                self.answer(Some(refusal.clone()))?;
                return Err(GatewayError::new(refusal));
            }
        };
        let mut local = LocalEnd::new(stream, self.session.packet_size).map_err(failed)?;
        let abort = Arc::new(Abort::default());
        let channels = events_in.clone();
        let accept_opaque: ExtraChannelHandler = Box::new(move |header, connection, _| match header.kind {
            ChannelKind::Opaque => {
                let _ = channels.send(Event::Channel(header.index, Box::new(connection)));
                Ok(())
            }
            _ => Err(Box::new((connection, "a carried connection has no such channel".into()))),
        });
        let acceptor = ChannelAcceptor::new(
            Session { channels: 0, ..self.session.clone() },
            Box::new(NoPages),
            &abort,
            Some(accept_opaque),
            Arc::clone(&self.on_connection),
        );
        let acceptor = Arc::new(acceptor);
        let _entered = self.enter(&acceptor)?;
        acceptor.open();
        let result = self.answer(None).and_then(|()| self.carry_connection(&mut local, events_in));
        // No effect if both directions have ended.
        local.close();
        local.join();
        abort.finish();
        acceptor.join();
        result
    }

    fn carry_connection(&self, local: &mut LocalEnd, events_in: &Sender<Event>) -> Result<(), GatewayError> {
        let mut expected = [true; 2];
        let mut ending = Ending::default();
        while !ending.is_over() {
            match ending.next(&self.events)? {
                Event::Channel(index, connection) => {
                    if !std::mem::take(&mut expected[usize::from(index)]) {
                        refuse_channel(*connection, "this channel exists already");
                        continue;
                    }
                    let closer = connection.closer();
                    let (writer, reader) = accept_channel(*connection).map_err(GatewayError::new)?;
                    let channel = Opened { writer, reader, closer, round_trip: Duration::ZERO };
                    let events = events_in.clone();
                    let ended = move || drop(events.send(Event::DirectionEnded));
                    match index {
                        TO_DESTINATION => local.carry_in(channel, ended).map_err(GatewayError::new)?,
                        TO_SOURCE => local.carry_out(channel, ended).map_err(GatewayError::new)?,
                        _ => unreachable!("the header's index was compared with its limit"),
                    }
                }
                Event::DirectionEnded => ending.direction_ended(),
                Event::Control(ControlEvent::Lost(reason)) => ending.session_ended(reason),
                Event::Cancelled => return Err(GatewayError::new("the proxy was told to close its connections")),
                Event::Control(ControlEvent::Message(message, _)) => {
                    return Err(GatewayError::new(out_of_phase("the source's proxy", &message)));
                }
                Event::Feeder(_) | Event::ReturnPath(_) | Event::ClosedWithoutShut | Event::Broken => {}
            }
        }
        Ok(())
    }
}

/// The sinks of a session without pages: they refuse every packet.
struct NoPages;

impl Sinks for NoPages {
    fn ram(&self, _: u16) -> ChannelSink {
        ChannelSink::new()
    }

    fn stream(&self) -> ChannelSink {
        ChannelSink::new()
    }
}
