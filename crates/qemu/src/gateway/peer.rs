//! The source's way to the destination's sterna: dialing, the handshake, and the channels.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sterna::control_link::{ControlEvent, ControlLink, Gate, hear, held_back, say};
use sterna::send::{SendChannel, SendContext};
use sterna::transport::{Connection, Security, open_channel};
use sterna_codec::Method;
use sterna_wire::control::{Capabilities, ControlMessage, ControlReader, Hello, Machine, Mode, Welcome};
use sterna_wire::handshake::conclude;
use sterna_wire::header::ChannelKind;
use sterna_wire::identity::{MigrationId, MigrationKey};
use sterna_wire::limits::HANDSHAKE_TIME;

use super::{Cancel, GatewayError};

/// Pause between attempts to reach a destination that was lost.
pub(super) const DIAL_PAUSE: Duration = Duration::from_millis(500);

/// What the source asks for.
#[derive(Debug)]
pub(super) struct Offer<'a> {
    pub(super) to: &'a str,
    pub(super) security: &'a Security,
    pub(super) channels: u16,
    pub(super) packet_size: usize,
    pub(super) machine: Machine,
    pub(super) mode: Mode,
}

/// What was agreed on, and what is needed to come back.
#[derive(Clone, Debug)]
pub(super) struct Dialed {
    pub(super) id: MigrationId,
    pub(super) key: MigrationKey,
    pub(super) incarnation: u32,
    pub(super) channels: u16,
    pub(super) packet_size: usize,
    pub(super) round_trip: Duration,
}

/// The control channel to the destination.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) link: ControlLink,
}

/// What this program can do.
pub(super) fn own_capabilities(packet_size: usize) -> Capabilities {
    Capabilities {
        methods: Method::all().map(|method| method.name().to_owned()).collect(),
        packet_size: packet_size as u32,
        features: vec![QEMU_STREAM.into()],
        required: vec![QEMU_STREAM.into()],
    }
}

/// The capability to carry QEMU's migration stream, version 1 of the records in `layout`.
const QEMU_STREAM: &str = "qemu-stream-1";

/// Name and version of this program, for the peer's log.
pub(super) fn program() -> String {
    format!("sterna {}", env!("CARGO_PKG_VERSION"))
}

/// Begins a migration with the destination: control channel, hello, welcome.
pub(super) fn dial(
    offer: &Offer<'_>,
    method: Method,
    cancel: &Cancel,
    events: impl FnMut(ControlEvent) + Send + 'static,
) -> Result<(Peer, Dialed), GatewayError> {
    let (id, key) = new_identity()?;
    let connection = Connection::connect(offer.to, offer.security).map_err(GatewayError::new)?;
    let closer = connection.closer();
    let interrupted = closer.clone();
    let dialled = Arc::new(AtomicBool::new(false));
    let finished = Arc::clone(&dialled);
    // Only while dialling: later a cancelled migration still has something to say on this connection.
    cancel.on_cancel(move || {
        if !finished.load(Ordering::Acquire) {
            interrupted.close();
        }
    });
    let opened = open_channel(connection, &key, id, ChannelKind::Control, 0, 1);
    let (mut writer, mut reader, round_trip) = opened.map_err(GatewayError::new)?;
    let offered = own_capabilities(offer.packet_size);
    let hello = Hello {
        program: program(),
        key: key.to_hex(),
        mode: offer.mode,
        channels: offer.channels,
        capabilities: offered.clone(),
        machine: offer.machine.clone(),
    };
    let lost = |error| GatewayError(format!("{} was lost during the handshake: {error}", offer.to));
    say(&mut writer, &ControlMessage::Hello(hello)).map_err(lost)?;
    // The destination asks its QEMU before it answers: that may take longer than a bare handshake.
    let mut messages = ControlReader::default();
    let welcome: Welcome = match hear(&mut reader, &mut messages, Instant::now() + 2 * HANDSHAKE_TIME).map_err(lost)? {
        ControlMessage::Welcome(welcome) => welcome,
        ControlMessage::Refused { reason } | ControlMessage::Failed { reason } => {
            return Err(GatewayError(format!("{} refuses: {}", offer.to, sterna_wire::text::cleaned(&reason))));
        }
        other => return Err(GatewayError(format!("{} answered a hello with {other:?}", offer.to))),
    };
    let chosen = conclude(&offered, &welcome).map_err(GatewayError::new)?;
    if !chosen.methods.iter().any(|name| name == method.name()) {
        let known = chosen.methods.join(", ");
        return Err(GatewayError(format!("{} cannot decode {}; both sides know {known}", offer.to, method.name())));
    }
    dialled.store(true, Ordering::Release);
    let link = ControlLink::start(writer, reader, closer, messages, events).map_err(GatewayError::new)?;
    let dialed = Dialed {
        id,
        key,
        incarnation: 1,
        channels: offer.channels,
        packet_size: chosen.packet_size as usize,
        round_trip,
    };
    Ok((Peer { link }, dialed))
}

/// Comes back to the destination after the connection was lost: a control channel of a new incarnation, on which the
/// destination speaks first. What it says is held back until the gate is dropped.
pub(super) fn dial_again(
    to: &str,
    security: &Security,
    dialed: &Dialed,
    incarnation: u32,
    events: impl FnMut(ControlEvent) + Send + 'static,
) -> Result<(Peer, Gate), GatewayError> {
    let connection = Connection::connect(to, security).map_err(GatewayError::new)?;
    let closer = connection.closer();
    let opened = open_channel(connection, &dialed.key, dialed.id, ChannelKind::Control, 0, incarnation);
    let (writer, reader, _) = opened.map_err(GatewayError::new)?;
    let (events, gate) = held_back(events);
    let link = ControlLink::start(writer, reader, closer, ControlReader::default(), events);
    Ok((Peer { link: link.map_err(GatewayError::new)? }, gate))
}

impl Dialed {
    /// Opens the RAM channels and the stream channel.
    pub(super) fn open_channels(
        &self,
        security: &Security,
        to: &str,
        context: &SendContext,
        cancel: &Cancel,
    ) -> Result<(Vec<SendChannel>, SendChannel), GatewayError> {
        let ram = (0..self.channels).map(|index| match cancel.is_cancelled() {
            true => Err(GatewayError("cancelled".into())),
            false => self.open(security, to, ChannelKind::Ram, index, context),
        });
        Ok((ram.collect::<Result<_, _>>()?, self.open(security, to, ChannelKind::DeviceState, 0, context)?))
    }

    /// Opens one channel.
    pub(super) fn open(
        &self,
        security: &Security,
        to: &str,
        kind: ChannelKind,
        index: u16,
        context: &SendContext,
    ) -> Result<SendChannel, GatewayError> {
        let connection = Connection::connect(to, security).map_err(GatewayError::new)?;
        let closer = connection.closer();
        let opened = open_channel(connection, &self.key, self.id, kind, index, self.incarnation);
        let (writer, reader, _) = opened.map_err(GatewayError::new)?;
        context.abort.on_end(move || closer.close());
        let name = match kind {
            ChannelKind::Ram => format!("ram-{index}"),
            ChannelKind::DeviceState => "stream".to_owned(),
            _ => format!("opaque-{index}"),
        };
        SendChannel::start(&name, writer, reader, context.clone()).map_err(GatewayError::new)
    }
}

fn new_identity() -> Result<(MigrationId, MigrationKey), GatewayError> {
    let mut random = [0; 48];
    File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut random))
        .map_err(|error| GatewayError(format!("no random numbers for the migration's key: {error}")))?;
    let (id, key) = random.split_at(16);
    let id = MigrationId::from_bytes(id.try_into().expect("16 bytes"));
    Ok((id, MigrationKey::from_bytes(key.try_into().expect("32 bytes"))))
}
