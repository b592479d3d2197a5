//! An established connection, and the errors of one.

use std::io;
use std::time::Instant;

use super::session::Failure;
use super::stream::{Closer, Reader, Writer};
use super::{Limits, TransportError};

/// An established connection: the TLS handshake, if there is one, is finished, and has proved the peer's identity.
#[derive(Debug)]
pub struct Connection {
    pub(super) writer: Writer,
    pub(super) reader: Reader,
    pub(super) limits: Limits,
    /// When the channel must have been opened.
    pub(super) deadline: Instant,
    pub(super) exporter: Vec<u8>,
    pub(super) address: String,
    pub(super) certificate: Option<String>,
}

impl Connection {
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

/// Returns the error for a connection that is broken.
pub(super) fn broken(peer: &str, source: io::Error) -> TransportError {
    TransportError::Broken { peer: peer.to_owned(), source }
}

/// Returns the typed error for a socket error that occurred during a step with a time limit.
pub(super) fn classify(peer: String, error: io::Error, what: &'static str, limits: &Limits) -> TransportError {
    if let Some(failure) = error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>()) {
        return TransportError::Tls { peer, reason: failure.to_string() };
    }
    match error.kind() {
        io::ErrorKind::TimedOut => TransportError::TooSlow { peer, what, limit: limits.handshake },
        _ => broken(&peer, error),
    }
}
