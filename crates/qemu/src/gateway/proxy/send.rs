//! The source's proxy: listens on the sockets to which the source QEMUs and other programs connect.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use sterna_codec::Encoding;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{ControlEvent, ControlLink, out_of_phase};
use sterna_engine::report::Observer;
use sterna_engine::send::Compression;
use sterna_engine::session::{self, ConnectionEvent, Offer, OnConnectionEvent, Session};
use sterna_engine::transport::Address;
use sterna_wire::control::{ControlMessage, Machine, Mode, RelayContent};
use sterna_wire::header::ChannelKind;
use sterna_wire::limits::{HANDSHAKE_TIME, MAX_RAM_CHANNELS};
use sterna_wire::text::cleaned;

use super::connection::{Ending, LocalEnd, TO_DESTINATION, TO_SOURCE};
use super::endpoint::{Accepted, Arrival, Endpoint, Expected};
use super::migration_out;
use super::report::ProxyReport;
use super::under_way::UnderWay;
use super::{ProxyStop, under_way};
use crate::gateway::features::FEATURES;
use crate::gateway::source_stream::StreamNews;
use crate::gateway::{GatewayError, ProxySendOptions};

/// The events of one session.
pub(super) enum Event {
    Control(ControlEvent),
    Stream(StreamNews),
    /// Everything that QEMU sent is acknowledged.
    Delivered,
    /// One direction of a connection has ended.
    DirectionEnded,
    Broken,
    Cancelled,
}

/// The state that all sessions share.
pub(super) struct Proxy<'a> {
    pub(super) options: &'a ProxySendOptions,
    pub(super) encoding: Encoding,
    pub(super) compression: Compression,
    pub(super) observer: &'a dyn Observer,
    report: &'a (dyn Fn(&ProxyReport) + Sync),
    under_way: UnderWay,
}

/// Carries the migrations and connections on `options.unix`, and the connections on the other sockets, to the destination's proxy, until
/// `stop`. Calls `report` at the end of each migration. Returns whether every session came to its own end.
///
/// # Errors
/// Listening on a socket fails, or the required compression library is missing. Nothing was carried.
pub fn proxy_send(
    options: &ProxySendOptions,
    stop: &ProxyStop,
    observer: &dyn Observer,
    report: &(dyn Fn(&ProxyReport) + Sync),
) -> Result<bool, GatewayError> {
    let engines = options.qatzip.engines(options.method, options.channels);
    let (engines, line) = engines.map_err(GatewayError::refused)?;
    line.iter().for_each(|line| observer.note(line));
    let encoding = engines.encoding(options.method).map_err(GatewayError::refused)?;
    let migrations = options.unix.iter().map(|(name, path)| Endpoint::listen(name, path, Expected::Migrations));
    let others = options.opaque.iter().map(|(name, path)| Endpoint::listen(name, path, Expected::Connections));
    let endpoints = migrations.chain(others).collect::<Result<Vec<_>, _>>()?;
    let endpoints: Arc<[Endpoint]> = endpoints.into();
    let paths: Vec<_> = endpoints.iter().map(|endpoint| endpoint.path().display().to_string()).collect();
    observer.listening(&paths.join(", "));

    let proxy = Proxy {
        options,
        encoding,
        compression: Compression::new(encoding, engines, options.channels, options.max_cpus),
        observer,
        report,
        under_way: UnderWay::default(),
    };
    let of_all = |act: fn(&Endpoint)| {
        let endpoints = Arc::clone(&endpoints);
        move || endpoints.iter().for_each(act)
    };
    let _obeying = under_way::obey(stop, &proxy.under_way, of_all(Endpoint::stop), of_all(Endpoint::abandon));
    std::thread::scope(|scope| {
        let proxy = &proxy;
        endpoints.iter().try_for_each(|endpoint| {
            let accept = move || {
                while let Some(accepted) = endpoint.accept() {
                    proxy.carry(scope, endpoint, accepted);
                }
            };
            let started = Builder::new().name("accept".into()).spawn_scoped(scope, accept);
            started.map(drop).map_err(|error| {
                endpoints.iter().for_each(Endpoint::stop);
                GatewayError::new(format!("no thread to accept connections on {}: {error}", endpoint.path().display()))
            })
        })
    })?;
    Ok(!proxy.under_way.was_cut())
}

impl<'a> Proxy<'a> {
    /// Carries a connection, or the migration that it begins, on a thread of its own.
    fn carry<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, endpoint: &'scope Endpoint, accepted: Accepted) {
        let Some(carried) = self.under_way.enter() else {
            self.observer.note("the maximum number of connections is carried: one more was closed");
            return endpoint.forget(accepted.number());
        };
        let number = accepted.number();
        let serve = move || match endpoint.classify(accepted, &carried.cancel) {
            Ok(Some(Arrival::Main(main, process))) => {
                let report = migration_out::carry(self, endpoint, main, process, &carried);
                self.observer.note(&report.text());
                (self.report)(&report);
            }
            Ok(Some(Arrival::Connection(local))) => {
                if let Err(error) = self.carry_connection(&endpoint.name, local, &carried.cancel) {
                    self.observer.note(&format!("a connection was closed: {error}"));
                }
            }
            // A multifd channel, which its migration has taken.
            Ok(None) => {}
            Err(note) => self.observer.note(&note),
        };
        // If the thread does not start, the closure is dropped, which closes the connection.
        if let Err(error) = Builder::new().name("carry".into()).spawn_scoped(scope, serve) {
            endpoint.forget(number);
            self.observer.note(&format!("no thread for a connection: {error}"));
        }
    }

    /// Begins a session with the destination's proxy to carry `content` for the socket with this name. The session's events arrive in
    /// `events`.
    pub(super) fn dial(
        &self,
        content: RelayContent,
        socket: &str,
        cancel: &Cancel,
        events_in: &Sender<Event>,
        events: &Receiver<Event>,
    ) -> Result<(ControlLink, Session), GatewayError> {
        let options = self.options;
        let offer = Offer {
            to: &Address::from(&options.to),
            security: &options.security,
            channels: MAX_RAM_CHANNELS,
            packet_size: options.packet_size,
            machine: Machine::default(),
            mode: Mode::Proxy,
            features: FEATURES,
            encoding: self.encoding,
            patience: options.patience,
        };
        let news = events_in.clone();
        let on_connection: OnConnectionEvent = Arc::new(move |event| {
            if let ConnectionEvent::Control(_, event) = event {
                let _ = news.send(Event::Control(event));
            }
        });
        let (link, session) = session::dial(&offer, cancel, &on_connection)?;
        let relay = ControlMessage::Relay { content, socket: socket.to_owned() };
        link.send(&relay).map_err(|error| GatewayError::new(format!("the destination's proxy was lost: {error}")))?;
        let deadline = Instant::now() + options.patience + 2 * HANDSHAKE_TIME;
        loop {
            let left: Duration = deadline.saturating_duration_since(Instant::now());
            let event = events.recv_timeout(left).map_err(|_| {
                GatewayError::new("the destination's proxy does not say whether it takes the connection")
            })?;
            match event {
                Event::Control(ControlEvent::Message(ControlMessage::RelayAnswer { refusal }, _)) => {
                    return match refusal {
                        None => Ok((link, session)),
                        Some(reason) => {
                            Err(GatewayError::new(format!("the destination's proxy refuses: {}", cleaned(&reason))))
                        }
                    };
                }
                Event::Control(ControlEvent::Message(message, _)) => {
                    return Err(GatewayError::new(out_of_phase("the destination's proxy", &message)));
                }
                Event::Control(ControlEvent::Lost(reason)) => {
                    return Err(GatewayError::new(format!("the destination's proxy was lost: {reason}")));
                }
                Event::Cancelled => return Err(GatewayError::new("the proxy was told to close its connections")),
                Event::Stream(_) | Event::Delivered | Event::DirectionEnded | Event::Broken => {}
            }
        }
    }

    /// Carries a connection unchanged, until both of its directions have ended.
    fn carry_connection(&self, socket: &str, local: UnixStream, cancel: &Cancel) -> Result<(), GatewayError> {
        let failed = GatewayError::new;
        let (events_in, events) = channel();
        let cancelled = events_in.clone();
        let _cancelling = cancel.on_cancel(move || drop(cancelled.send(Event::Cancelled)));
        let (link, session) = self.dial(RelayContent::Connection, socket, cancel, &events_in, &events)?;
        let mut local = LocalEnd::new(local, session.packet_size).map_err(failed)?;
        let ended = || {
            let events = events_in.clone();
            move || drop(events.send(Event::DirectionEnded))
        };
        let (security, to) = (&self.options.security, &Address::from(&self.options.to));
        let open = |index| session.open_halves(security, to, ChannelKind::Opaque, index).map_err(GatewayError::new);
        let carried = open(TO_DESTINATION)
            .and_then(|channel| local.carry_out(channel, ended()).map_err(failed))
            .and_then(|()| open(TO_SOURCE))
            .and_then(|channel| local.carry_in(channel, ended()).map_err(failed));
        let result = carried.and_then(|()| {
            let mut ending = Ending::default();
            while !ending.is_over() {
                match ending.next(&events)? {
                    Event::DirectionEnded => ending.direction_ended(),
                    Event::Control(ControlEvent::Lost(reason)) => ending.session_ended(reason),
                    Event::Cancelled => return Err(GatewayError::new("the proxy was told to close its connections")),
                    Event::Control(ControlEvent::Message(message, _)) => {
                        return Err(GatewayError::new(out_of_phase("the destination's proxy", &message)));
                    }
                    Event::Stream(_) | Event::Delivered | Event::Broken => {}
                }
            }
            Ok(())
        });
        // No effect if both directions have ended.
        local.close();
        local.join();
        link.finish();
        result
    }
}
