//! Connects the source to the destination: the control channel, the handshake, and the other channels.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use sterna_codec::Encoding;
use sterna_wire::control::{Capabilities, ControlMessage, ControlReader, Hello, Machine, Mode};
use sterna_wire::description::Description;
use sterna_wire::handshake::conclude;
use sterna_wire::header::ChannelKind;
use sterna_wire::identity::{MigrationId, MigrationKey};
use sterna_wire::limits::{HANDSHAKE_TIME, PREPARATION_TIME};

use super::handshake::MAX_REFUSALS;
use super::peer::link_events;
use super::{Backoff, Features, OnConnectionEvent, Session, SessionError, program};
use crate::abort::Abort;
use crate::cancel::Cancel;
use crate::control_link::{ControlLink, receive_answer, send_message};
use crate::random;
use crate::send::{SendChannel, SendContext};
use crate::transport::{Address, Closer, Connection, Reader, Security, TransportError, Writer, open_channel};
use crate::wakers::Registration;

/// The first pause of the back-off between attempts to open a channel: that before the third attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// What the source asks for.
#[derive(Debug)]
pub struct Offer<'a> {
    /// Where the destination listens.
    pub to: &'a Address,
    /// TLS or not.
    pub security: &'a Security,
    /// Number of RAM channels.
    pub channels: u16,
    /// Maximum bytes of content in a packet.
    pub packet_size: usize,
    /// The virtual machine to be moved.
    pub machine: Machine,
    /// How the virtual machines are driven.
    pub mode: Mode,
    /// Capabilities beyond the protocol's basis.
    pub features: Features<'a>,
    /// How pages will be compressed.
    pub encoding: Encoding,
    /// How long the source waits for a destination that does not listen yet.
    pub patience: Duration,
}

/// Begins a migration with the destination: control channel, hello, welcome.
///
/// # Errors
/// The destination cannot be reached within `offer.patience`, refuses (with its reason) or cannot decode the format of `offer.encoding`; or
/// the migration was cancelled.
pub fn dial(
    offer: &Offer<'_>,
    cancel: &Cancel,
    on_connection: &OnConnectionEvent,
) -> Result<(ControlLink, Session), SessionError> {
    let HelloAnswered { id, key, opened, messages, offered, answer, interrupting } = exchange_hello(offer, cancel)?;
    let Opened { writer, reader, closer, round_trip } = opened;
    let welcome = match answer {
        ControlMessage::Welcome(welcome) => welcome,
        unexpected => return Err(unexpected_answer(offer, &unexpected)),
    };
    let chosen = conclude(&offered, &welcome).map_err(SessionError::new)?;
    decodable(offer.encoding, &chosen.methods).map_err(|why| SessionError::new(format_args!("{} {why}", offer.to)))?;
    drop(interrupting);
    let link = ControlLink::start(writer, reader, closer, messages, link_events(on_connection, 1))
        .map_err(SessionError::new)?;
    let session = Session {
        id,
        key,
        incarnation: 1,
        channels: offer.channels,
        device_channels: offer.machine.device_channels.own(),
        packet_size: chosen.packet_size as usize,
        features: chosen.features,
        round_trip,
    };
    Ok((link, session))
}

/// What a destination answers to a dry run.
#[derive(Clone, Debug)]
pub struct DryRunAnswer {
    /// Why the destination would refuse the migration, cleaned for people; none if it would accept.
    pub refusals: Vec<String>,
    /// From the channel header to the reply.
    pub round_trip: Duration,
}

/// Asks the destination what it would refuse `offer` for, without beginning a migration. The offer requires [`DRY_RUN`](super::DRY_RUN).
///
/// # Errors
/// The destination cannot be reached, refuses to answer, or does not know dry runs.
pub fn dry_run(offer: &Offer<'_>, cancel: &Cancel) -> Result<DryRunAnswer, SessionError> {
    let HelloAnswered { opened, answer, .. } = exchange_hello(offer, cancel)?;
    match answer {
        ControlMessage::Checked { refusals } => Ok(DryRunAnswer {
            refusals: refusals.iter().take(MAX_REFUSALS).map(|reason| sterna_wire::text::cleaned(reason)).collect(),
            round_trip: opened.round_trip,
        }),
        unexpected => Err(unexpected_answer(offer, &unexpected)),
    }
}

/// Asks the destination for its machine, without beginning a migration. The offer requires [`DESCRIPTION`](super::DESCRIPTION).
///
/// # Errors
/// The destination cannot be reached, refuses to answer, cannot describe its machine, or its answer is beyond the limits.
pub fn describe(offer: &Offer<'_>, cancel: &Cancel) -> Result<Description, SessionError> {
    match exchange_hello(offer, cancel)?.answer {
        ControlMessage::Described(description) => match description.check() {
            Ok(()) => Ok(description),
            Err(error) => Err(SessionError::new(format_args!("{}: {error}", offer.to))),
        },
        unexpected => Err(unexpected_answer(offer, &unexpected)),
    }
}

/// A destination that has received the hello, and its answer.
struct HelloAnswered {
    id: MigrationId,
    key: MigrationKey,
    opened: Opened,
    messages: ControlReader,
    offered: Capabilities,
    answer: ControlMessage,
    /// A cancellation closes the connection until this is dropped: later a cancelled migration still sends messages on it.
    interrupting: Registration,
}

/// Opens the control channel, sends the hello and receives the answer.
fn exchange_hello(offer: &Offer<'_>, cancel: &Cancel) -> Result<HelloAnswered, SessionError> {
    let (id, key) = new_identity()?;
    let subject = Subject { key: &key, id, kind: ChannelKind::Control, index: 0, incarnation: 1 };
    let mut opened = subject.open(offer.to, offer.security, offer.patience, cancel)?;
    let interrupted = opened.closer.clone();
    let interrupting = cancel.on_cancel(move || interrupted.close());
    let offered = offer.features.capabilities(offer.packet_size);
    let hello = Hello {
        program: program(),
        key: key.to_hex(),
        mode: offer.mode,
        channels: offer.channels,
        capabilities: offered.clone(),
        machine: offer.machine.clone(),
    };
    let sent = send_message(&mut opened.writer, &ControlMessage::Hello(Box::new(hello)));
    // The destination asks its monitor before it answers: that may take longer than a bare handshake, and far longer with heartbeats.
    let mut messages = ControlReader::default();
    let received = receive_answer(&mut opened.reader, &mut messages, 2 * HANDSHAKE_TIME, PREPARATION_TIME);
    // Also where sending failed: a destination may send its refusal and close the connection before the offer arrives.
    let lost = |error| SessionError::new(format_args!("{} was lost during the handshake: {error}", offer.to));
    let answer = received.map_err(|error| lost(sent.err().unwrap_or(error)))?;
    if let ControlMessage::Refused(reason) | ControlMessage::Failed(reason) = &answer {
        return Err(SessionError::refused(format_args!("{} refuses: {reason}", offer.to)));
    }
    Ok(HelloAnswered { id, key, opened, messages, offered, answer, interrupting })
}

fn unexpected_answer(offer: &Offer<'_>, answer: &ControlMessage) -> SessionError {
    tracing::warn!("`{}` is not an answer to a hello", answer.kind());
    SessionError::new(format_args!(
        "{} neither accepts nor refuses the offer of a migration: is the program there a `sterna receive`?",
        offer.to
    ))
}

/// Checks that the format of `encoding` is among the `known` formats.
fn decodable(encoding: Encoding, known: &[String]) -> Result<(), String> {
    let format = encoding.format();
    if known.iter().any(|name| name == format.name()) {
        return Ok(());
    }
    let known = known.join(", ");
    Err(match encoding.method().name() == format.name() {
        true => format!("cannot decode {format}; both sides know {known}"),
        false => format!("cannot decode {format}, which {encoding} writes; both sides know {known}"),
    })
}

impl Session {
    /// Opens the RAM channels and the stream channel.
    ///
    /// # Errors
    /// The destination cannot be reached or refuses, or the migration was cancelled.
    pub fn open_channels(
        &self,
        security: &Security,
        to: impl Into<Address>,
        context: &SendContext,
        cancel: &Cancel,
    ) -> Result<(Vec<SendChannel>, SendChannel), SessionError> {
        let to = &to.into();
        let ram = self.open_ram_channels(security, to, context, cancel)?;
        Ok((ram, self.open(security, to, ChannelKind::DeviceState, 0, context)?))
    }

    /// Opens the RAM channels.
    ///
    /// # Errors
    /// The destination cannot be reached or refuses, or the migration was cancelled.
    pub fn open_ram_channels(
        &self,
        security: &Security,
        to: &Address,
        context: &SendContext,
        cancel: &Cancel,
    ) -> Result<Vec<SendChannel>, SessionError> {
        let open = |index| match cancel.is_cancelled() {
            true => Err(SessionError::new("cancelled")),
            false => self.open(security, to, ChannelKind::Ram, index, context),
        };
        (0..self.channels).map(open).collect()
    }

    /// Opens the post-copy channel: the destination's requests arrive on it, and pages are sent.
    ///
    /// # Errors
    /// The destination cannot be reached, or refuses.
    pub fn open_post_copy(
        &self,
        security: &Security,
        to: &Address,
        abort: &Abort,
    ) -> Result<(Writer, Reader), SessionError> {
        let Opened { writer, reader, closer, .. } = self.open_halves(security, to, ChannelKind::PostCopy, 0)?;
        abort.on_end(move || closer.close());
        Ok((writer, reader))
    }

    /// Opens one channel.
    ///
    /// # Errors
    /// The destination cannot be reached, or refuses.
    pub fn open(
        &self,
        security: &Security,
        to: impl Into<Address>,
        kind: ChannelKind,
        index: u16,
        context: &SendContext,
    ) -> Result<SendChannel, SessionError> {
        let Opened { writer, reader, closer, .. } = self.open_halves(security, &to.into(), kind, index)?;
        context.abort.on_end(move || closer.close());
        let name = match kind {
            ChannelKind::Ram => format!("ram-{index}"),
            ChannelKind::DeviceState if index == 0 => "stream".to_owned(),
            ChannelKind::DeviceState => format!("device-{index}"),
            _ => format!("opaque-{index}"),
        };
        SendChannel::start(&name, writer, reader, context.clone()).map_err(SessionError::new)
    }

    /// Opens one channel, for a caller that uses its halves itself.
    ///
    /// # Errors
    /// The destination cannot be reached, or refuses.
    pub fn open_halves(
        &self,
        security: &Security,
        to: &Address,
        kind: ChannelKind,
        index: u16,
    ) -> Result<Opened, SessionError> {
        let subject = Subject { key: &self.key, id: self.id, kind, index, incarnation: self.incarnation };
        subject.open(to, security, Duration::ZERO, &Cancel::new())
    }
}

/// A channel that the destination has accepted.
#[derive(Debug)]
pub struct Opened {
    /// The sending half.
    pub writer: Writer,
    /// The receiving half.
    pub reader: Reader,
    /// Ends the connection from another thread.
    pub closer: Closer,
    /// From the channel header to the answer.
    pub round_trip: Duration,
}

/// Which channel is opened, and for which migration.
struct Subject<'a> {
    key: &'a MigrationKey,
    id: MigrationId,
    kind: ChannelKind,
    index: u16,
    incarnation: u32,
}

impl Subject<'_> {
    /// Opens the channel. Retries for `patience` where the destination does not listen yet, and for the time of a handshake where the
    /// destination has no room for another connection.
    fn open(
        &self,
        to: &Address,
        security: &Security,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Opened, SessionError> {
        let begun = Instant::now();
        let mut backoff = Backoff::new(FIRST_PAUSE);
        loop {
            let error = match self.open_once(to, security) {
                Ok(opened) => return Ok(opened),
                Err(error) => error,
            };
            let retry_for = match () {
                () if error.is_busy() => HANDSHAKE_TIME.max(patience),
                () if error.is_absent() => patience,
                () => Duration::ZERO,
            };
            let left = retry_for.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(error.into());
            }
            wait(backoff.next_pause(Instant::now()).min(left), cancel)?;
        }
    }

    fn open_once(&self, to: &Address, security: &Security) -> Result<Opened, TransportError> {
        let connection = Connection::connect(to, security)?;
        let closer = connection.closer();
        let Self { key, id, kind, index, incarnation } = *self;
        let (writer, reader, round_trip) = open_channel(connection, key, id, kind, index, incarnation)?;
        Ok(Opened { writer, reader, closer, round_trip })
    }
}

/// Waits for `pause`, or fails as soon as the migration is cancelled.
fn wait(pause: Duration, cancel: &Cancel) -> Result<(), SessionError> {
    let (cancelled, waiting) = channel::<()>();
    let _cancelling = cancel.on_cancel(move || {
        // Fails where the wait is over already.
        let _ = cancelled.send(());
    });
    match waiting.recv_timeout(pause) {
        Ok(()) => Err(SessionError::new("cancelled")),
        Err(_) => Ok(()),
    }
}

fn new_identity() -> Result<(MigrationId, MigrationKey), SessionError> {
    let mut bytes = [0; 48];
    random::fill(&mut bytes)
        .map_err(|error| SessionError::new(format_args!("no random numbers for the migration's key: {error}")))?;
    let (id, key) = bytes.split_at(16);
    let id = MigrationId::from_bytes(id.try_into().expect("16 bytes"));
    Ok((id, MigrationKey::from_bytes(key.try_into().expect("32 bytes"))))
}

#[cfg(test)]
mod tests {
    use std::thread::scope;

    use sterna_codec::MethodChoice;

    use super::*;
    use crate::transport::{Limits, Listener, accept_channel};

    const KEY: MigrationKey = MigrationKey::from_bytes([7; 32]);

    fn subject() -> Subject<'static> {
        let id = MigrationId::from_bytes([1; 16]);
        Subject { key: &KEY, id, kind: ChannelKind::Control, index: 0, incarnation: 1 }
    }

    #[test]
    fn sources_that_find_no_room_try_again_until_there_is_some() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = &listener.local_address();
        let one = Limits { max_pending: 1, ..Limits::default() };
        let incoming = &listener.start(Security::Insecure, one).unwrap();
        scope(|scope| {
            // One of them has the only place until its connection is accepted; the others are answered that the destination is busy.
            let open = || subject().open(to, &Security::Insecure, Duration::ZERO, &Cancel::new()).map(drop);
            let opening = [(); 4].map(|()| scope.spawn(open));
            for _ in &opening {
                accept_channel(incoming.next().unwrap().0).unwrap();
            }
            opening.into_iter().for_each(|opening| opening.join().unwrap().unwrap());
        });
    }

    #[test]
    fn a_destination_that_does_not_listen_yet_is_waited_for_or_not() {
        let directory = tempfile::tempdir().unwrap();
        let to = Address::Unix(directory.path().join("in"));
        let open = |patience, cancel: &Cancel| subject().open(&to, &Security::Insecure, patience, cancel).map(drop);
        let error = open(Duration::ZERO, &Cancel::new()).unwrap_err();
        assert!(error.to_string().contains("cannot connect"), "{error}");

        let cancel = Cancel::new();
        cancel.cancel();
        let error = open(Duration::from_secs(3600), &cancel).unwrap_err();
        assert_eq!(error.to_string(), "cancelled");

        scope(|scope| {
            let waiting = scope.spawn(|| open(Duration::from_secs(3600), &Cancel::new()));
            let listener = Listener::bind(to.clone()).unwrap();
            let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
            accept_channel(incoming.next().unwrap().0).unwrap();
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_format_that_an_older_destination_lacks_is_named_with_what_there_is() {
        let old = ["none", "lz4", "zstd"].map(str::to_owned);
        let encoding = |text: &str| text.parse::<MethodChoice>().unwrap().encodings().next().unwrap();
        let refused = |text| decodable(encoding(text), &old);
        for known in ["none", "lz4", "zstd"] {
            assert_eq!(refused(known), Ok(()));
        }
        for (written, format) in [("deflate 1 by cpu", "gzip"), ("deflate 9 by qat", "gzip")] {
            let text = format!("cannot decode {format}, which {written} writes; both sides know none, lz4, zstd");
            assert_eq!(refused(written), Err(text));
        }
        assert_eq!(refused("deflate by iaa"), Err("cannot decode deflate; both sides know none, lz4, zstd".into()));
        assert_eq!(decodable(encoding("zstd"), &old[..2]), Err("cannot decode zstd; both sides know none, lz4".into()));
    }
}
