//! How the two sides of a migration meet: the source dials and offers, the destination answers, chooses and admits channels.
//!
//! ```text
//! source                                   destination
//! dial ── control channel, Hello ────────> Handshake::first: the first source that may send here
//!      <───────────────────── Welcome ────
//! Session::open_channels ─ RAM, stream ──> ChannelAcceptor: admits channels of this migration only (Sessions: of all migrations under way)
//! Redial::dial ─ control, incarnation + 1 > ChannelAcceptor: informs the driver that the source has reconnected
//! ```
//! The gateway beside QEMU and the embedded library use the same code. They differ in their [`Features`], in the
//! [`Mode`](sterna_wire::control::Mode), and in the sinks of the [`ChannelAcceptor`].

mod acceptor;
mod dial;
mod handshake;
mod peer;
mod redial;
mod serve;

use std::sync::Arc;
use std::time::Duration;

use sterna_codec::Format;
use sterna_wire::control::Capabilities;
use sterna_wire::identity::{MigrationId, MigrationKey};
use sterna_wire::reason::{ErrorKind, Reason};

use crate::migration::Cause;
use crate::receive::PacketRules;
use crate::transport::TransportError;

pub use self::acceptor::{ChannelAcceptor, ExtraChannelHandler, PagesPlaced, Refused, Sinks, receive_thread};
pub use self::dial::{DryRunAnswer, Offer, Opened, describe, dial, dry_run};
pub use self::handshake::{AcceptedSource, Declined, Describe, Handshake, SourceRequest, is_dry_run};
pub use self::peer::{ConnectionEvent, OnConnectionEvent, Peer, PeerEvent, link_events};
pub use self::redial::{Backoff, DIAL_PAUSE, MAX_DIAL_PAUSE, Redial};
pub use self::serve::{Entered, MAX_SESSIONS, Sessions};

/// The capability to leave out the checksums of packets' content, version 1. A source offers it only where its settings ask for it.
pub const UNCHECKED: &str = "unchecked-1";

/// The capability to answer whether a migration would begin, without beginning one, version 1. A source that offers it requires it.
pub const DRY_RUN: &str = "dry-run-1";

/// The capability to describe the destination's machine without beginning a migration, version 1. A source that offers it requires it.
pub const DESCRIPTION: &str = "description-1";

/// The capability to send the destination's monitor a message before it accepts, version 1. Only a source that has such a message offers
/// it, and requires it then.
pub const OPENING: &str = "opening-1";

/// How long a driver waits, after a channel broke, for the peer's message with the reason: it travels on another connection, and a busy
/// host sends it late.
pub const LAST_WORDS: Duration = Duration::from_secs(1);

// Neither crate uses the other, and both state it: what a packet may hold, an encoder must take.
const _: () = assert!(sterna_codec::MAX_CONTENT == sterna_wire::limits::MAX_CONTENT);

/// Why there is no migration with the other side.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
#[non_exhaustive]
pub struct SessionError {
    /// What happened.
    pub reason: String,
    /// The destination was reached, and has refused this migration; it may take another one.
    pub refused: bool,
    /// Why the connection could not be made, where that is the reason.
    pub source: Option<TransportError>,
}

impl From<TransportError> for SessionError {
    fn from(error: TransportError) -> Self {
        Self { reason: error.to_string(), refused: false, source: Some(error) }
    }
}

impl From<SessionError> for Cause {
    fn from(error: SessionError) -> Self {
        let reason = Reason::new(error.kind(), error.reason);
        Self { reason, source: error.source.map(|source| Arc::new(source) as _) }
    }
}

impl SessionError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match &self.source {
            _ if self.refused => ErrorKind::Refused,
            Some(error) => error.kind(),
            None => ErrorKind::Network,
        }
    }

    /// Returns the error as a reason.
    pub(crate) fn into_reason(self) -> Reason {
        Reason::new(self.kind(), self.reason)
    }

    fn new(what: impl std::fmt::Display) -> Self {
        Self { reason: what.to_string(), refused: false, source: None }
    }

    fn refused(what: impl std::fmt::Display) -> Self {
        Self { refused: true, ..Self::new(what) }
    }
}

/// One migration as both sides agreed on it, and what the source needs to reconnect.
#[derive(Clone, Debug)]
pub struct Session {
    /// The migration's id.
    pub id: MigrationId,
    /// Its key, by which channels prove that they belong to it.
    pub key: MigrationKey,
    /// Counts the source's attempts to connect, from 1.
    pub incarnation: u32,
    /// RAM channels.
    pub channels: u16,
    /// Channels that carry device state only, besides the stream channel.
    pub device_channels: u16,
    /// Maximum bytes of content in a packet.
    pub packet_size: usize,
    /// Names of the features that both sides have.
    pub features: Vec<String>,
    /// The path's round trip as the handshake measured it; zero where it was not measured.
    pub round_trip: Duration,
}

impl Session {
    /// Returns how packets are made.
    pub fn rules(&self) -> PacketRules {
        PacketRules { packet_size: self.packet_size, checksums: !self.has(UNCHECKED) }
    }

    /// Returns whether both sides have `feature`.
    pub fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|name| name == feature)
    }
}

/// The capabilities of a program beyond the protocol's basis, by name.
#[derive(Clone, Copy, Debug)]
pub struct Features<'a> {
    /// All capabilities of the program.
    pub offered: &'a [&'a str],
    /// Those of `offered` that the peer must have too.
    pub required: &'a [&'a str],
}

impl Features<'_> {
    fn capabilities(&self, packet_size: usize) -> Capabilities {
        let names = |list: &[&str]| list.iter().map(ToString::to_string).collect();
        Capabilities {
            methods: Format::all().map(|format| format.name().to_owned()).collect(),
            packet_size: packet_size as u32,
            features: names(self.offered),
            required: names(self.required),
        }
    }
}

/// Name and version of this program, for the peer's log.
fn program() -> String {
    format!("sterna {}", env!("CARGO_PKG_VERSION"))
}
