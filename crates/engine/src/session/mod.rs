//! How the two sides of one migration meet: the source dials and offers, the destination greets, chooses and lets in.
//!
//! ```text
//! source                                   destination
//! dial ── control channel, Hello ────────> Greeting::first: the first source that may send here
//!      <───────────────────── Welcome ────
//! Session::open_channels ─ RAM, stream ──> Doorman: channels of this migration and no others (Sessions: of any that are under way)
//! Redial::dial ─ control, incarnation + 1 > Doorman: tells the driver that the source came back
//! ```
//! The gateway beside QEMU and the embedded library use the same code: what differs is said in [`Features`], in the
//! [`Mode`](sterna_wire::control::Mode), and by the sinks that the [`Doorman`] is given.

mod dial;
mod doorman;
mod greet;
mod lead;
mod peer;
mod placing;
mod redial;
mod serve;

use std::time::Duration;

use sterna_codec::Format;
use sterna_wire::control::Capabilities;
use sterna_wire::identity::{MigrationId, MigrationKey};

use crate::receive::PacketRules;

pub use self::dial::{Offer, Opened, dial};
pub use self::doorman::{Doorman, OtherDoor, PagesPlaced, Refused, Sinks, receive_thread};
pub use self::greet::{Greeted, Greeting};
pub(crate) use self::lead::too_long;
pub use self::lead::{SourceDriver, SourceLead, SourceOutcome, after, lead_source};
pub use self::peer::{Heard, Peer, PeerNews, TellPeer, link_events};
pub use self::placing::Placing;
pub use self::redial::{Backoff, DIAL_PAUSE, MAX_DIAL_PAUSE, Redial};
pub use self::serve::{Entered, MAX_SESSIONS, Sessions};

/// The capability to leave out the checksums of packets' content, version 1: offered by a source only where it was asked to.
pub const UNCHECKED: &str = "unchecked-1";

/// How long, after a channel broke, a word of the peer about the reason is waited for: it travels on another connection, and a busy
/// host says it late.
pub const LAST_WORDS: Duration = Duration::from_millis(300);

/// Why there is no migration with the other side, in words.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct SessionError {
    /// What happened.
    pub reason: String,
    /// The destination was reached, and has refused this migration; it may take another one.
    pub refused: bool,
}

impl SessionError {
    fn new(what: impl std::fmt::Display) -> Self {
        Self { reason: what.to_string(), refused: false }
    }

    fn refused(what: impl std::fmt::Display) -> Self {
        Self { refused: true, ..Self::new(what) }
    }
}

/// One migration as both sides agreed on it, and what the source needs to come back.
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
    /// Channels of device state alone, besides the stream channel.
    pub device_channels: u16,
    /// Most bytes of content in a packet.
    pub packet_size: usize,
    /// Names of the features that both sides have.
    pub features: Vec<String>,
    /// The path's round trip as the handshake measured it; zero where it did not.
    pub round_trip: Duration,
}

impl Session {
    /// How packets are made.
    pub fn rules(&self) -> PacketRules {
        PacketRules { packet_size: self.packet_size, checksums: !self.has(UNCHECKED) }
    }

    /// Whether both sides have `feature`.
    pub fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|name| name == feature)
    }
}

/// What a program can do beyond the protocol's basis, by name.
#[derive(Clone, Copy, Debug)]
pub struct Features<'a> {
    /// All that it has.
    pub offered: &'a [&'a str],
    /// Those of them without which it does not go on.
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
