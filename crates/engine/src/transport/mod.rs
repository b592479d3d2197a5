//! Connections between two hosts: TCP with mutual TLS 1.3 or, if the user insists, without TLS. Also Unix sockets to a
//! monitor or a relay on the same host, and a network in memory for tests ([`simulated`]).
//!
//! Threads block on connections; there is no event loop. A connection is opened ([`Connection::connect`]) or accepted
//! ([`Listener`]). The opening side sends the channel header, the other side answers it, and the connection splits into
//! a [`Writer`] and a [`Reader`] that two threads use at the same time. A [`Closer`] ends it from a third thread.
//!
//! * `address`, `dial`, `unix`: addresses, and connecting a socket to one; `given`: sockets that the embedder connects;
//! * `socket`: the socket below, its options, and waiting with a time limit; `session`: TLS without a socket; `stream`:
//!   the two halves over both;
//! * `connection`: what is established; `channel`: its header and the reply; `handshake`: connecting and accepting; `listener`: many at
//!   once, bounded.

mod address;
mod channel;
mod connection;
mod dial;
mod encrypted;
mod given;
mod handshake;
mod listener;
mod peer_process;
mod queued;
#[cfg(feature = "tls")]
mod session;
#[cfg(not(feature = "tls"))]
#[path = "no_session.rs"]
mod session;
pub mod simulated;
mod socket;
mod stream;
mod tcp_info;
#[cfg(all(test, feature = "tls"))]
mod tests;
pub mod unix;

use std::io;
use std::time::Duration;

use sterna_wire::header::{BadReply, HeaderError};
use sterna_wire::limits::{HANDSHAKE_TIME, SILENCE_LIMIT};
use sterna_wire::reason::ErrorKind;

pub use self::address::Address;
pub use self::channel::{accept_channel, open_channel, postpone_channel, read_header, refuse_channel};
pub use self::connection::Connection;
pub use self::given::{Given, SocketQueue};
pub use self::listener::{Incoming, Listener, RefusedConnections, Stop};
pub use self::peer_process::{peer_process, peer_user};
pub use self::queued::QueuedWriter;
pub use self::socket::Socket;
pub use self::stream::{Closer, Reader, Room, Writer};
pub use self::tcp_info::SendTimes;
use crate::tls::TlsSettings;

/// Whether one side uses TLS.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Security {
    /// Without TLS: anybody on the path can read and change the guest.
    Insecure,
    /// Mutual TLS 1.3.
    Tls(TlsSettings),
}

/// How long and how much a connection may take; the defaults are the protocol's limits.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time for connecting, all addresses of a host together.
    pub connect: Duration,
    /// Time from the connection until the TLS handshake is finished and the channel header (or the answer to it) has
    /// arrived.
    pub handshake: Duration,
    /// Time without a byte inside of a packet after which the peer counts as lost.
    pub silence: Duration,
    /// Maximum number of connections of a listener that have not sent their channel header yet.
    pub max_pending: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connect: HANDSHAKE_TIME, handshake: HANDSHAKE_TIME, silence: SILENCE_LIMIT, max_pending: 32 }
    }
}

/// Why there is no connection, or no channel on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The address cannot be understood.
    #[error("cannot use the address \"{address}\": {reason}; expected HOST:PORT or unix:PATH")]
    Address {
        /// The address given.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The host's name cannot be resolved.
    #[error("cannot find the host of {address}: {source}")]
    Lookup {
        /// The address given.
        address: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// No address of the host answered.
    #[error("cannot connect to {address}: {source}{}", connect_advice(source))]
    Connect {
        /// The address given.
        address: String,
        /// The error of the last attempt.
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address given.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// The TLS handshake failed.
    #[error("TLS with {peer} failed: {reason}")]
    Tls {
        /// The peer's address.
        peer: String,
        /// Why, in one line.
        reason: String,
    },
    /// The peer's certificate is good, but not on the list of those that may send.
    #[error("{peer} (certificate: {name}) may not send to this receiver: none of its names is allowed")]
    NotAllowed {
        /// The peer's address.
        peer: String,
        /// The names in its certificate.
        name: String,
    },
    /// Settings for one side were used for the other.
    #[error("these TLS settings are for the {0} side, which is not what they are used for")]
    WrongSide(&'static str),
    /// The peer took longer than the limit.
    #[error("{peer} did not finish {what} within {} s", limit.as_secs_f64())]
    TooSlow {
        /// The peer's address.
        peer: String,
        /// What the peer should have done.
        what: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// The connection broke or ended.
    #[error("the connection with {peer} failed: {source}")]
    Broken {
        /// The peer's address.
        peer: String,
        /// What happened.
        source: io::Error,
    },
    /// The peer refuses the channel, with a reason.
    #[error("{peer} refuses: {reason}")]
    Refused {
        /// The peer's address.
        peer: String,
        /// The peer's reason, cleaned.
        reason: String,
    },
    /// The peer has no room for the channel at the moment.
    #[error("{peer} has no room: {reason}")]
    Busy {
        /// The peer's address.
        peer: String,
        /// The peer's reason, cleaned.
        reason: String,
    },
    /// What arrived is no channel header.
    #[error("{peer} did not begin a channel: {source}")]
    Header {
        /// The peer's address.
        peer: String,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// What arrived is no answer to a channel header.
    #[error("{peer}: {source}")]
    Reply {
        /// The peer's address.
        peer: String,
        /// What is wrong with it.
        source: BadReply,
    },
}

impl TransportError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Address { .. } | Self::WrongSide(_) => ErrorKind::Settings,
            Self::Listen { source, .. } => ErrorKind::of_io(source, ErrorKind::Settings),
            Self::Refused { .. } | Self::Busy { .. } | Self::NotAllowed { .. } => ErrorKind::Refused,
            _ => ErrorKind::Network,
        }
    }

    /// Returns whether the peer has answered that it has no room at the moment.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. })
    }

    /// Returns whether no process listens at the peer's address, or none answers there: a peer that is being started,
    /// or a network that is being set up.
    pub fn is_absent(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkDown, NetworkUnreachable, NotFound, TimedOut};
        match self {
            Self::Connect { source, .. } => matches!(
                source.kind(),
                ConnectionRefused | HostUnreachable | NetworkDown | NetworkUnreachable | NotFound | TimedOut
            ),
            _ => false,
        }
    }
}

/// Returns what to do about a connection that could not be made, after the system's error.
fn connect_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            "; nothing listens there: start the destination first, and compare the addresses"
        }
        _ => "",
    }
}
