//! Making a connection, from either end, up to the finished TLS handshake.

use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use sterna_wire::header::{ChannelReply, MAGIC, REPLY_PREFIX_LENGTH};
use sterna_wire::limits::MAX_TEXT;

use super::connection::{broken, classify};
use super::encrypted::Arrived;
use super::session::{Session, failed};
use super::socket::{Sending, Wait};
use super::stream::halves;
use super::{Address, Connection, Limits, Security, Socket, TransportError, channel, dial};
use crate::tls::EXPORTER_LABEL;

/// How long this side continues to read after a refusal, so that a reset of the connection does not destroy the
/// refusal.
const LINGER: Duration = Duration::from_secs(1);

/// Maximum bytes of an answer to a channel header.
const MAX_REPLY: usize = REPLY_PREFIX_LENGTH + MAX_TEXT;

/// A handshake that is running.
struct Handshake<'a> {
    socket: &'a Socket,
    tls: Session,
    arrived: Arrived,
    /// The first bytes that arrived. From a peer without TLS they contain its refusal.
    heard: Vec<u8>,
    deadline: Instant,
    read: u64,
    written: u64,
}

impl Connection {
    /// Connects to `to`, trying all addresses of a host. With TLS the host, or the simulated port, must be a name or
    /// address in the peer's certificate; a Unix socket has no such name and is refused with TLS.
    ///
    /// # Errors
    /// No host answers within 10 s, or TLS fails. A *peer* that does not accept this side's certificate is noticed only
    /// when the channel is opened, because in TLS 1.3 the client finishes first.
    pub fn connect(to: impl Into<Address>, security: &Security) -> Result<Self, TransportError> {
        Self::connect_within(to, security, &Limits::default())
    }

    /// [`Connection::connect`] with other limits.
    ///
    /// # Errors
    /// As [`Connection::connect`].
    pub fn connect_within(
        to: impl Into<Address>,
        security: &Security,
        limits: &Limits,
    ) -> Result<Self, TransportError> {
        let to = to.into();
        let client = match security {
            Security::Insecure => None,
            Security::Tls(settings) => Some(Session::to(&to, settings)?),
        };
        let socket = dial::dial(&to, limits.connect)?;
        let deadline = Instant::now() + limits.handshake;
        let peer = socket.peer();
        socket.configure(limits.silence).map_err(|source| broken(&peer, source))?;
        let Some(tls) = client else {
            return Ok(Self::finished(socket, None, peer, limits, deadline));
        };
        let mut handshake = Handshake::new(&socket, tls, deadline);
        if let Err(error) = handshake.run() {
            handshake.send_reason();
            return Err(match handshake.plain_reply() {
                Some(ChannelReply::Refused(reason)) => TransportError::Refused { peer, reason: without_tls(&reason) },
                Some(ChannelReply::Busy(reason)) => TransportError::Busy { peer, reason: without_tls(&reason) },
                Some(ChannelReply::Accepted) | None => handshake_error(peer, error, limits),
            });
        }
        let handshake = handshake.done();
        Ok(Self::finished(socket, Some(handshake), peer, limits, deadline))
    }

    /// Runs the TLS handshake of an incoming connection and checks whether its certificate may send here.
    ///
    /// # Errors
    /// TLS fails, the certificate is not on the list (the peer receives the reason), or the handshake takes more than
    /// 10 s.
    pub fn accept(socket: impl Into<Socket>, security: &Security) -> Result<Self, TransportError> {
        Self::accept_within(socket, security, &Limits::default())
    }

    /// [`Connection::accept`] with other limits.
    ///
    /// # Errors
    /// As [`Connection::accept`].
    pub fn accept_within(
        socket: impl Into<Socket>,
        security: &Security,
        limits: &Limits,
    ) -> Result<Self, TransportError> {
        let socket = socket.into();
        let deadline = Instant::now() + limits.handshake;
        let peer = socket.peer();
        socket.configure(limits.silence).map_err(|source| broken(&peer, source))?;
        let Security::Tls(settings) = security else {
            return Ok(Self::finished(socket, None, peer, limits, deadline));
        };
        let tls = Session::of(&peer, settings)?;
        let mut handshake = Handshake::new(&socket, tls, deadline);
        if let Err(error) = handshake.run() {
            handshake.send_reason();
            linger(&socket, deadline);
            return Err(handshake_error(peer, error, limits));
        }
        let handshake = handshake.done();
        let allowed = handshake.tls.is_allowed(settings);
        let connection = Self::finished(socket, Some(handshake), peer, limits, deadline);
        if allowed { Ok(connection) } else { Err(connection.not_allowed()) }
    }

    fn finished(socket: Socket, tls: Option<Established>, address: String, limits: &Limits, deadline: Instant) -> Self {
        let mut exporter = Vec::new();
        let mut certificate = None;
        let (writer, reader) = match tls {
            None => halves(socket, None, Arrived::default(), limits.silence, (0, 0)),
            Some(Established { tls, arrived, read, written }) => {
                let material = tls.exporter(EXPORTER_LABEL);
                exporter = material.expect("a finished TLS 1.3 handshake has an exporter").to_vec();
                certificate = tls.peer_name();
                halves(socket, Some(tls), arrived, limits.silence, (read, written))
            }
        };
        Self { writer, reader, limits: *limits, deadline, exporter, address, certificate }
    }

    /// Refuses the peer's channel, because its certificate is not allowed to send here.
    fn not_allowed(mut self) -> TransportError {
        let peer = self.address.clone();
        let name = self.certificate.clone().unwrap_or_default();
        let reason = format!(
            "the certificate of this sender ({name}) is not allowed to send here: the receiver must allow one of its \
             names"
        );
        match channel::read_header(&mut self) {
            Ok(_) => channel::refuse_channel(self, &reason),
            Err(error) => tracing::debug!(%peer, %error, "no channel header from a peer that is not allowed"),
        }
        TransportError::NotAllowed { peer, name }
    }
}

/// A finished handshake.
struct Established {
    tls: Session,
    arrived: Arrived,
    read: u64,
    written: u64,
}

impl<'a> Handshake<'a> {
    fn new(socket: &'a Socket, tls: Session, deadline: Instant) -> Self {
        Self { socket, tls, arrived: Arrived::for_tls(), heard: Vec::new(), deadline, read: 0, written: 0 }
    }

    fn done(self) -> Established {
        let Self { tls, arrived, read, written, .. } = self;
        Established { tls, arrived, read, written }
    }

    /// Runs the handshake until it is finished.
    fn run(&mut self) -> io::Result<()> {
        loop {
            self.tls.shake(&mut self.arrived).map_err(failed)?;
            self.flush()?;
            if !self.tls.is_handshaking() {
                return Ok(());
            }
            if self.receive()? == 0 {
                let text = "the peer ended the connection during the TLS handshake: too many connections, or it does \
                            not speak TLS";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
        }
    }

    /// Reads a piece; 0 at the end.
    fn receive(&mut self) -> io::Result<usize> {
        let count = self.socket.read(self.arrived.room().into(), Wait::Until(self.deadline), 1)?;
        self.read += count as u64;
        let came = self.arrived.came(count);
        self.heard.extend(came.iter().take(MAX_REPLY - self.heard.len()));
        Ok(count)
    }

    /// Handshake messages are a few kilobytes and fit into the socket's buffer, so this does not wait for the peer.
    fn flush(&mut self) -> io::Result<()> {
        let bytes = self.tls.own_messages();
        self.written += bytes.len() as u64;
        self.socket.send_all(&mut [IoSlice::new(&bytes)], Sending::DoesNotWait)
    }

    /// A receiver's reply in clear text where TLS was expected: it has too many connections, or it has no TLS.
    fn plain_reply(&mut self) -> Option<ChannelReply> {
        loop {
            if let Some((prefix, rest)) = self.heard.split_first_chunk::<REPLY_PREFIX_LENGTH>() {
                let length = ChannelReply::reason_length(*prefix).ok()?;
                if let Some(reason) = rest.get(..length) {
                    return Some(ChannelReply::decode(*prefix, reason));
                }
            }
            // TLS failed before the whole reply had arrived.
            if !self.receive().is_ok_and(|count| count > 0) {
                return None;
            }
        }
    }

    /// Sends the reason of a failure: TLS's alert, or a refusal in clear text to a Sterna sender without TLS.
    fn send_reason(&mut self) {
        // TLS fails after a few bytes, perhaps before the whole magic has arrived.
        let compared = self.heard.len().min(MAGIC.len());
        let without_tls = compared > 0 && self.heard[..compared] == MAGIC[..compared];
        // Fails if the peer is gone; then no reason is needed.
        let _ = if without_tls {
            let reason = "this receiver accepts TLS only, and the sender does not use it: use TLS at both sides";
            let reply = ChannelReply::Refused(reason.to_owned()).encode();
            self.socket.send_all(&mut [IoSlice::new(&reply)], Sending::DoesNotWait)
        } else {
            self.flush()
        };
    }
}

/// Marks a reason that arrived in clear text, because anyone on the path may have written it.
fn without_tls(reason: &str) -> String {
    format!("(received without TLS) {reason}")
}

/// Ends the sending direction and reads until the peer has ended its own: closing with unread bytes would reset the
/// connection, and the reset may overtake the last bytes sent.
fn linger(socket: &Socket, deadline: Instant) {
    let deadline = deadline.min(Instant::now() + LINGER);
    let _ = socket.shutdown(Shutdown::Write);
    let mut unread = [0; 4096];
    while matches!(socket.read((&mut unread[..]).into(), Wait::Until(deadline), 1), Ok(count) if count > 0) {}
}

fn handshake_error(peer: String, error: io::Error, limits: &Limits) -> TransportError {
    classify(peer, error, "the TLS handshake", limits)
}
