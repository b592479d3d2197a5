//! Making a connection, from either end, up to the finished TLS handshake.

use std::io::{self, IoSlice};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::SendFlags;
use rustls::{ClientConnection, ServerConnection};
use rustls_pki_types::ServerName;
use sterna_wire::header::{ChannelReply, MAGIC, REPLY_PREFIX_LENGTH};

use super::stream::{Arrived, Closer, Failure, Reader, Writer, halves};
use super::{Limits, Security, TransportError, channel, socket};
use crate::tls::{self, EXPORTER_LABEL, Side};

/// How long a refused peer is listened to after the refusal, so that it is not lost to a reset.
const LINGER: Duration = Duration::from_secs(1);

/// An established connection: the TLS handshake, if there is one, is finished, and the peer is who it says it is.
#[derive(Debug)]
pub struct Connection {
    pub(super) writer: Writer,
    pub(super) reader: Reader,
    pub(super) limits: Limits,
    /// Until when the channel must have been opened.
    pub(super) deadline: Instant,
    exporter: Vec<u8>,
    address: String,
    certificate: Option<String>,
}

/// What is at hand while the handshake runs.
struct Handshake<'a> {
    tcp: &'a TcpStream,
    tls: rustls::Connection,
    arrived: Arrived,
    deadline: Instant,
    read: u64,
    written: u64,
}

impl Connection {
    /// Connects to `to`, `HOST:PORT` (an IPv6 address in brackets), trying all addresses of the host; with TLS the
    /// host must be a name or address in the peer's certificate.
    ///
    /// # Errors
    /// Nobody answers within 10 s, or TLS fails. That the *peer* does not accept this side's certificate shows only
    /// when the channel is opened: TLS 1.3 lets a client finish first.
    pub fn connect(to: &str, security: &Security) -> Result<Self, TransportError> {
        Self::connect_within(to, security, &Limits::default())
    }

    /// [`Connection::connect`] with other limits.
    ///
    /// # Errors
    /// As [`Connection::connect`].
    pub fn connect_within(to: &str, security: &Security, limits: &Limits) -> Result<Self, TransportError> {
        let host = host_of(to).ok_or_else(|| bad_address(to, "it has no port"))?;
        let client = match security {
            Security::Insecure => None,
            Security::Tls(settings) => {
                let Side::Client(config) = &settings.side else {
                    return Err(TransportError::WrongSide("receiving"));
                };
                let name = ServerName::try_from(host.to_owned())
                    .map_err(|_| bad_address(to, "it is neither a host name nor an IP address"))?;
                Some((Arc::clone(config), name))
            }
        };
        let tcp = dial(to, limits.connect)?;
        let deadline = Instant::now() + limits.handshake;
        let peer = tcp.peer_addr().map_or_else(|_| to.to_owned(), |address| address.to_string());
        socket::configure(&tcp, limits.silence).map_err(|source| broken(&peer, source))?;
        let Some((config, name)) = client else {
            return Ok(Self::finished(tcp, None, peer, limits, deadline));
        };
        let tls = ClientConnection::new(config, name).map_err(|error| tls_failed(&peer, &error))?;
        let mut handshake = Handshake::new(&tcp, tls.into(), deadline);
        if let Err(error) = handshake.run() {
            handshake.say_why();
            if let Some(reason) = handshake.plain_refusal() {
                return Err(TransportError::Refused { peer, reason });
            }
            return Err(handshake_error(peer, error, limits));
        }
        let handshake = handshake.done();
        Ok(Self::finished(tcp, Some(handshake), peer, limits, deadline))
    }

    /// Takes an incoming TCP connection through the TLS handshake and looks whether its certificate may send here.
    ///
    /// # Errors
    /// TLS fails, the certificate is not on the list (the peer is told in words), or all of it takes more than 10 s.
    pub fn accept(tcp: TcpStream, security: &Security) -> Result<Self, TransportError> {
        Self::accept_within(tcp, security, &Limits::default())
    }

    /// [`Connection::accept`] with other limits.
    ///
    /// # Errors
    /// As [`Connection::accept`].
    pub fn accept_within(tcp: TcpStream, security: &Security, limits: &Limits) -> Result<Self, TransportError> {
        let deadline = Instant::now() + limits.handshake;
        let peer = tcp.peer_addr().map_or_else(|_| "unknown".to_owned(), |address| address.to_string());
        socket::configure(&tcp, limits.silence).map_err(|source| broken(&peer, source))?;
        let Security::Tls(settings) = security else {
            return Ok(Self::finished(tcp, None, peer, limits, deadline));
        };
        let Side::Server { config, allow } = &settings.side else {
            return Err(TransportError::WrongSide("sending"));
        };
        let tls = ServerConnection::new(Arc::clone(config)).map_err(|error| tls_failed(&peer, &error))?;
        let mut handshake = Handshake::new(&tcp, tls.into(), deadline);
        if let Err(error) = handshake.run() {
            handshake.say_why();
            linger(&tcp, deadline);
            return Err(handshake_error(peer, error, limits));
        }
        let handshake = handshake.done();
        let certificate = handshake.tls.peer_certificates().and_then(|chain| chain.first());
        let allowed = certificate.is_some_and(|certificate| tls::is_allowed(certificate, allow));
        let connection = Self::finished(tcp, Some(handshake), peer, limits, deadline);
        if allowed { Ok(connection) } else { Err(connection.not_allowed()) }
    }

    fn finished(tcp: TcpStream, tls: Option<Established>, address: String, limits: &Limits, deadline: Instant) -> Self {
        let mut exporter = Vec::new();
        let mut certificate = None;
        let (writer, reader) = match tls {
            None => halves(tcp, None, Arrived::default(), limits.silence, (0, 0)),
            Some(Established { tls, arrived, read, written }) => {
                let material = tls.export_keying_material([0; 32], EXPORTER_LABEL, None);
                exporter = material.expect("a finished TLS 1.3 handshake has an exporter").to_vec();
                certificate = tls.peer_certificates().and_then(|chain| chain.first()).map(tls::certificate_name);
                halves(tcp, Some(tls), arrived, limits.silence, (read, written))
            }
        };
        Self { writer, reader, limits: *limits, deadline, exporter, address, certificate }
    }

    /// Tells the peer that its certificate may not send here, in an answer to its channel header.
    fn not_allowed(mut self) -> TransportError {
        let peer = self.address.clone();
        let name = self.certificate.clone().unwrap_or_default();
        let reason = format!(
            "the certificate of this sender ({name}) is not allowed to send here; start the receiver with one of its \
             names after --allow"
        );
        match channel::read_header(&mut self) {
            Ok(_) => channel::refuse_channel(self, &reason),
            Err(error) => tracing::debug!(%peer, %error, "no channel header from a peer that is not allowed"),
        }
        TransportError::NotAllowed { peer, name }
    }

    /// 32 bytes that only both ends of this TLS session know; empty without TLS.
    pub fn exporter(&self) -> &[u8] {
        &self.exporter
    }

    /// The peer's address and, with TLS, the names in its certificate.
    pub fn peer(&self) -> String {
        match &self.certificate {
            Some(name) => format!("{} (certificate: {name})", self.address),
            None => self.address.clone(),
        }
    }

    /// A handle that ends the connection from another thread.
    pub fn closer(&self) -> Closer {
        Closer::of(&self.writer)
    }

    /// The two halves, for two threads.
    pub fn split(self) -> (Writer, Reader) {
        (self.writer, self.reader)
    }
}

/// A finished handshake.
struct Established {
    tls: rustls::Connection,
    arrived: Arrived,
    read: u64,
    written: u64,
}

impl<'a> Handshake<'a> {
    fn new(tcp: &'a TcpStream, tls: rustls::Connection, deadline: Instant) -> Self {
        Self { tcp, tls, arrived: Arrived::for_tls(), deadline, read: 0, written: 0 }
    }

    fn done(self) -> Established {
        let Self { tls, arrived, read, written, .. } = self;
        Established { tls, arrived, read, written }
    }

    /// Talks until both sides agree.
    fn run(&mut self) -> io::Result<()> {
        loop {
            self.flush()?;
            if !self.tls.is_handshaking() {
                return Ok(());
            }
            if self.arrived.is_empty() {
                let count = socket::read_until(self.tcp, &mut self.arrived.bytes, self.deadline)?;
                if count == 0 {
                    let text = "the peer ended the connection during the TLS handshake: too many connections, or it \
                                does not speak TLS";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                }
                (self.arrived.start, self.arrived.end) = (0, count);
                self.read += count as u64;
            }
            self.arrived.feed(&mut self.tls)?;
        }
    }

    /// Handshake messages are a few kilobytes and fit into the socket's buffer, so this does not wait for the peer.
    fn flush(&mut self) -> io::Result<()> {
        let mut bytes = Vec::new();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut bytes)?;
        }
        self.written += bytes.len() as u64;
        socket::send_all(self.tcp, &mut [IoSlice::new(&bytes)], SendFlags::DONTWAIT)
    }

    /// What arrived last, if it was the first to arrive.
    fn first_bytes(&self) -> &[u8] {
        if self.read == self.arrived.end as u64 { &self.arrived.bytes[..self.arrived.end] } else { &[] }
    }

    /// A receiver's refusal in clear text where TLS was expected: it has too many connections, or it has no TLS.
    fn plain_refusal(&self) -> Option<String> {
        let (prefix, rest) = self.first_bytes().split_first_chunk::<REPLY_PREFIX_LENGTH>()?;
        let length = ChannelReply::reason_length(*prefix).ok()?;
        match ChannelReply::decode(*prefix, rest.get(..length)?) {
            ChannelReply::Refused(reason) => Some(format!("(said without TLS) {reason}")),
            ChannelReply::Accepted => None,
        }
    }

    /// After a failure: TLS's alert; or, to a Sterna sender without TLS, a refusal in the form that it reads.
    fn say_why(&mut self) {
        // Somebody who is gone need not be told.
        let _ = if self.first_bytes().starts_with(&MAGIC) {
            let reason = "this receiver takes TLS only: start the sender with --tls instead of --insecure";
            let reply = ChannelReply::Refused(reason.to_owned()).encode();
            socket::send_all(self.tcp, &mut [IoSlice::new(&reply)], SendFlags::DONTWAIT)
        } else {
            self.flush()
        };
    }
}

/// Ends the sending direction and reads until the peer has ended its own: closing with unread bytes would reset the
/// connection, and the reset may overtake the last words.
fn linger(tcp: &TcpStream, deadline: Instant) {
    let deadline = deadline.min(Instant::now() + LINGER);
    let _ = tcp.shutdown(Shutdown::Write);
    let mut unread = [0; 4096];
    while matches!(socket::read_until(tcp, &mut unread, deadline), Ok(count) if count > 0) {}
}

/// The host in `HOST:PORT`, without an IPv6 address's brackets.
fn host_of(to: &str) -> Option<&str> {
    let (host, _port) = to.rsplit_once(':')?;
    Some(host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host))
}

fn dial(to: &str, limit: Duration) -> Result<TcpStream, TransportError> {
    let deadline = Instant::now() + limit;
    let addresses: Vec<_> = match to.to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        // The standard library's word for a port that is no number; a resolver has other errors.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(bad_address(to, &error.to_string())),
        Err(source) => return Err(TransportError::Lookup { address: to.to_owned(), source }),
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (tried, address) in addresses.iter().enumerate() {
        // A share of what is left, so that one address that swallows everything leaves time for the others.
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / (addresses.len() - tried) as u32;
        match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
            Ok(tcp) => return Ok(tcp),
            Err(error) if address.to_string() == to => last = error,
            Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(TransportError::Connect { address: to.to_owned(), source: last })
}

fn bad_address(address: &str, reason: &str) -> TransportError {
    TransportError::Address { address: address.to_owned(), reason: reason.to_owned() }
}

fn tls_failed(peer: &str, error: &rustls::Error) -> TransportError {
    TransportError::Tls { peer: peer.to_owned(), reason: tls::failure(error) }
}

fn broken(peer: &str, source: io::Error) -> TransportError {
    TransportError::Broken { peer: peer.to_owned(), source }
}

fn handshake_error(peer: String, error: io::Error, limits: &Limits) -> TransportError {
    classify(peer, error, "the TLS handshake", limits)
}

/// The typed error for a socket error while something with a time limit was going on.
pub(super) fn classify(peer: String, error: io::Error, what: &'static str, limits: &Limits) -> TransportError {
    if let Some(Failure(tls)) = error.get_ref().and_then(|inner| inner.downcast_ref()) {
        return tls_failed(&peer, tls);
    }
    match error.kind() {
        io::ErrorKind::TimedOut => TransportError::TooSlow { peer, what, limit: limits.handshake },
        _ => broken(&peer, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_what_stands_before_the_port() {
        assert_eq!(host_of("host.example:4444"), Some("host.example"));
        assert_eq!(host_of("192.0.2.1:1"), Some("192.0.2.1"));
        assert_eq!(host_of("[2001:db8::1]:4444"), Some("2001:db8::1"));
        assert_eq!(host_of("host"), None);
    }
}
