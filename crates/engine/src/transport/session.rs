//! A TLS session without a socket: what arrived is decrypted in the memory it arrived in, what is sent is encrypted into
//! the memory that it is sent from.
//!
//! rustls' buffered connection copies all that arrives into a buffer of its own, 4 KiB at a time, and moves it there
//! once more; its unbuffered interface, used here, leaves where the bytes lie to the caller. Two things differ for whoever
//! uses it:
//!
//! * It must see the beginning of a handshake message again with the rest. After the handshake both directions are used
//!   by two threads, and only one of them has that memory; so a message of TLS's own that is cut in two is refused then.
//!   (The only ones left are key updates and tickets, and nobody cuts those.)
//! * It has no exporter (RFC 8446, section 7.5). The exporter's secret comes from rustls' key log instead, one for each
//!   session, and the material is derived here.

use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::UnbufferedClientConnection;
use rustls::crypto::tls13::{HkdfExpander, OkmBlock};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{ClientConfig, CommonState, Error, KeyLog, ServerConfig};
use rustls_pki_types::ServerName;
use sterna_memory::raw::RawPiece;

use super::encrypted::{Arrived, ENCRYPT_AT_ONCE, Leaving, RECORD};
use super::{Address, TransportError, dial};
use crate::tls::{self, Side, TlsSettings};

/// A TLS error inside an [`io::Error`], said in one line.
#[derive(Debug)]
pub(super) struct Failure(Error);

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&tls::failure(&self.0))
    }
}

impl std::error::Error for Failure {}

/// A TLS error is final.
pub(super) fn failed(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Failure(error))
}

/// One end of a TLS session.
pub(super) struct Session {
    end: End,
    exporter: Arc<ExporterSecret>,
    /// Records of TLS's own, encrypted and not sent yet.
    own_words: Vec<u8>,
    /// The peer has said goodbye.
    ended: bool,
    failure: Option<Error>,
}

enum End {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// What came of processing a piece of what arrived.
enum Step {
    Again,
    /// So much plaintext has been put where it was asked for.
    Plain(usize),
    /// Nothing complete is left.
    Blocked,
    Ended,
}

/// What is to be encrypted.
#[derive(Clone, Copy)]
enum Outgoing<'a> {
    Data(&'a [u8]),
    Goodbye,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("ended", &self.ended).field("failure", &self.failure).finish_non_exhaustive()
    }
}

impl Session {
    pub(super) fn client(config: &ClientConfig, name: ServerName<'static>) -> Result<Self, Error> {
        let exporter = Arc::new(ExporterSecret::default());
        let mut config = config.clone();
        config.key_log = exporter.clone();
        Ok(Self::new(End::Client(UnbufferedClientConnection::new(config.into(), name)?), exporter))
    }

    pub(super) fn server(config: &ServerConfig) -> Result<Self, Error> {
        let exporter = Arc::new(ExporterSecret::default());
        let mut config = config.clone();
        config.key_log = exporter.clone();
        Ok(Self::new(End::Server(UnbufferedServerConnection::new(config.into())?), exporter))
    }

    /// Returns the session of a side that connects to `to`.
    ///
    /// # Errors
    /// The settings are those of a receiving side, or `to` has no name that a certificate could carry.
    pub(super) fn to(to: &Address, settings: &TlsSettings) -> Result<Self, TransportError> {
        let Side::Client(config) = &settings.side else {
            return Err(TransportError::WrongSide("receiving"));
        };
        Self::client(config, server_name(to)?).map_err(|error| refused(to.to_string(), &error))
    }

    /// Returns the session of a side that has accepted `peer`.
    ///
    /// # Errors
    /// The settings are those of a sending side.
    pub(super) fn of(peer: &str, settings: &TlsSettings) -> Result<Self, TransportError> {
        let Side::Server { config, .. } = &settings.side else {
            return Err(TransportError::WrongSide("sending"));
        };
        Self::server(config).map_err(|error| refused(peer.to_owned(), &error))
    }

    /// Returns whether `settings` allow the peer's certificate to send.
    pub(super) fn is_allowed(&self, settings: &TlsSettings) -> bool {
        let Side::Server { allow, .. } = &settings.side else { return false };
        let certificate = self.state().peer_certificates().and_then(|chain| chain.first());
        certificate.is_some_and(|certificate| tls::is_allowed(certificate, allow))
    }

    /// Returns the names in the peer's certificate, once the handshake is finished.
    pub(super) fn peer_name(&self) -> Option<String> {
        self.state().peer_certificates().and_then(|chain| chain.first()).map(tls::certificate_name)
    }

    /// Returns whether the handshake is running.
    pub(super) fn is_handshaking(&self) -> bool {
        self.state().is_handshaking()
    }

    fn new(end: End, exporter: Arc<ExporterSecret>) -> Self {
        Self { end, exporter, own_words: Vec::new(), ended: false, failure: None }
    }

    pub(super) fn state(&self) -> &CommonState {
        match &self.end {
            End::Client(tls) => tls,
            End::Server(tls) => tls,
        }
    }

    /// The peer has said goodbye: nothing more comes after what has been handed out.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    fn check(&self) -> Result<(), Error> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Takes the handshake as far as what has arrived allows; [`Session::own_words`] are then to be sent.
    pub(super) fn shake(&mut self, arrived: &mut Arrived) -> Result<(), Error> {
        // To the end of what has arrived, so that no part of a message is left for the time of two threads.
        while !matches!(self.step(arrived, nowhere())?, Step::Blocked | Step::Ended) {}
        Ok(())
    }

    /// What TLS has to say for itself, which must leave before anything that is encrypted later.
    pub(super) fn own_words(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.own_words)
    }

    /// Decrypts into `into` until it is full or nothing complete is left.
    ///
    /// An error is final; what came before it has been handed out.
    pub(super) fn decrypt(&mut self, arrived: &mut Arrived, mut into: RawPiece<'_>) -> Result<usize, Error> {
        let mut filled = arrived.take_plain(into.reborrow());
        into.advance(filled);
        while !into.is_empty() && !self.ended {
            match self.step(arrived, into.reborrow()) {
                Ok(Step::Again) => {}
                Ok(Step::Plain(count)) => {
                    filled += count;
                    into.advance(count);
                }
                Ok(Step::Blocked | Step::Ended) => break,
                Err(error) if filled == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(filled)
    }

    fn step(&mut self, arrived: &mut Arrived, into: RawPiece<'_>) -> Result<Step, Error> {
        self.check()?;
        let mut bytes = std::mem::take(&mut arrived.bytes);
        let incoming = &mut bytes[arrived.start..arrived.end];
        let own_words = &mut self.own_words;
        let (discard, step) = match &mut self.end {
            End::Client(tls) => process(tls.process_tls_records(incoming), own_words, arrived, into),
            End::Server(tls) => process(tls.process_tls_records(incoming), own_words, arrived, into),
        };
        arrived.bytes = bytes;
        arrived.start += discard;
        let step = match step {
            Ok(Step::Blocked) if !self.state().is_handshaking() && arrived.has_whole_record() => {
                Err(Error::General("the peer cut a message of TLS's own in two after the handshake".to_owned()))
            }
            step => step,
        };
        match &step {
            Ok(Step::Ended) => self.ended = true,
            Ok(_) => {}
            Err(error) => {
                self.failure = Some(error.clone());
                self.collect_own_words();
            }
        }
        step
    }

    /// Fetches the alert after a failure. rustls looks for such words first, so it does not miss what arrived.
    fn collect_own_words(&mut self) {
        while self.state().wants_write() {
            let (own_words, nothing) = (&mut self.own_words, &mut Arrived::default());
            let (_, step) = match &mut self.end {
                End::Client(tls) => process(tls.process_tls_records(&mut []), own_words, nothing, nowhere()),
                End::Server(tls) => process(tls.process_tls_records(&mut []), own_words, nothing, nowhere()),
            };
            if !matches!(step, Ok(Step::Again)) {
                return;
            }
        }
    }

    /// Encrypts the beginning of `parts` into `leaving`, after what TLS has to say for itself, and says how much of it.
    pub(super) fn encrypt(&mut self, parts: &[IoSlice<'_>], leaving: &mut Leaving) -> Result<usize, Error> {
        // Before TLS's own words are taken: an alert among them is for the goodbye.
        self.check()?;
        self.begin(leaving);
        let mut taken = 0;
        let mut parts = parts.iter().map(|part| &part[..]);
        let mut part: &[u8] = &[];
        while taken < ENCRYPT_AT_ONCE {
            // Whole records, because all but the last are full.
            let room = ENCRYPT_AT_ONCE - taken;
            if part.is_empty() {
                let Some(next) = parts.next() else { break };
                part = next;
            } else if part.len() >= RECORD {
                let (now, rest) = part.split_at(part.len().min(room) / RECORD * RECORD);
                self.put(Outgoing::Data(now), leaving)?;
                taken += now.len();
                part = rest;
            } else {
                // A record for each small piece would cost more than putting them together.
                let mut gathered = std::mem::take(&mut leaving.gathered);
                gathered.clear();
                while gathered.len() < RECORD {
                    let (now, rest) = part.split_at(part.len().min(RECORD - gathered.len()));
                    gathered.extend_from_slice(now);
                    part = rest;
                    if part.is_empty() {
                        let Some(next) = parts.next() else { break };
                        part = next;
                    }
                }
                let put = self.put(Outgoing::Data(&gathered), leaving);
                taken += gathered.len();
                leaving.gathered = gathered;
                put?;
            }
        }
        Ok(taken)
    }

    /// The last thing that is sent: TLS's goodbye or, after a failure, what it has to say about that.
    pub(super) fn goodbye(&mut self, leaving: &mut Leaving) {
        self.begin(leaving);
        if self.failure.is_none() {
            // Only a session that is broken has no goodbye, and its end shows that.
            let _ = self.put(Outgoing::Goodbye, leaving);
        }
    }

    fn begin(&mut self, leaving: &mut Leaving) {
        leaving.length = self.own_words.len();
        leaving.bytes.resize(leaving.bytes.len().max(leaving.length), 0);
        leaving.bytes[..leaving.length].copy_from_slice(&self.own_words);
        self.own_words.clear();
    }

    fn put(&mut self, what: Outgoing<'_>, leaving: &mut Leaving) -> Result<(), Error> {
        // After a failure rustls might look for the rest of a message where it arrived, which is not at hand here.
        self.check()?;
        loop {
            let done = match &mut self.end {
                End::Client(tls) => put(tls.process_tls_records(&mut []), what, leaving),
                End::Server(tls) => put(tls.process_tls_records(&mut []), what, leaving),
            };
            match done {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    self.failure = Some(error.clone());
                    return Err(error);
                }
            }
        }
    }

    /// 32 bytes that only both ends of a finished handshake know (RFC 8446, section 7.5, without a context).
    pub(super) fn exporter(&self, label: &[u8]) -> Option<[u8; 32]> {
        let suite = self.state().negotiated_cipher_suite()?.tls13()?;
        let secret = self.exporter.0.lock().unwrap_or_else(PoisonError::into_inner);
        let empty = suite.common.hash_provider.hash(&[]);
        let mut derived = [0; OkmBlock::MAX_LEN];
        let derived = &mut derived[..empty.as_ref().len()];
        expand_label(&*suite.hkdf_provider.expander_for_okm(secret.as_ref()?), label, empty.as_ref(), derived)?;
        let expander = suite.hkdf_provider.expander_for_okm(&OkmBlock::new(derived));
        let mut material = [0; 32];
        expand_label(&*expander, b"exporter", empty.as_ref(), &mut material)?;
        Some(material)
    }
}

fn refused(peer: String, error: &Error) -> TransportError {
    TransportError::Tls { peer, reason: tls::failure(error) }
}

/// The name that the peer's certificate must carry.
fn server_name(to: &Address) -> Result<ServerName<'static>, TransportError> {
    let unusable = |reason: &str| TransportError::Address { address: to.to_string(), reason: reason.to_owned() };
    let host = match to {
        Address::Tcp(text) => dial::host_of(text)?,
        Address::Simulated(port) => port.name(),
        Address::Unix(_) => {
            let reason = "TLS looks for the host's name in the peer's certificate, and a Unix socket has none (its \
                          mode says who may connect, so it can be used without TLS)";
            return Err(unusable(reason));
        }
    };
    ServerName::try_from(host.to_owned()).map_err(|_| unusable("it is neither a host name nor an IP address"))
}

/// For what has no plaintext.
fn nowhere() -> RawPiece<'static> {
    RawPiece::from(&mut [][..])
}

/// Takes one piece of what arrived out of rustls' hands.
fn process<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    own_words: &mut Vec<u8>,
    arrived: &mut Arrived,
    mut into: RawPiece<'_>,
) -> (usize, Result<Step, Error>) {
    let mut discard = status.discard;
    let step = status.state.and_then(|state| match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            let mut filled = 0;
            while let Some(record) = traffic.next_record() {
                let record = record?;
                let (now, rest) = record.payload.split_at(record.payload.len().min(into.len()));
                into.write(now);
                into.advance(now.len());
                filled += now.len();
                arrived.keep_plain(rest);
                discard += record.discard;
            }
            Ok(Step::Plain(filled))
        }
        ConnectionState::EncodeTlsData(mut encode) => {
            if let Err(EncodeError::InsufficientSize(needed)) = encode.encode(&mut []) {
                let from = own_words.len();
                own_words.resize(from + needed.required_size, 0);
                encode.encode(&mut own_words[from..]).map_err(|error| Error::General(error.to_string()))?;
            }
            Ok(Step::Again)
        }
        // Sent later, but in order, which is all that matters to TLS.
        ConnectionState::TransmitTlsData(transmit) => {
            transmit.done();
            Ok(Step::Again)
        }
        ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_) => Ok(Step::Blocked),
        ConnectionState::PeerClosed | ConnectionState::Closed => Ok(Step::Ended),
        other => Err(unexpected(&other)),
    });
    (discard, step)
}

/// Encrypts `what` if rustls is ready for it, or else does what is to be done before: then `false`.
fn put<Data>(status: UnbufferedStatus<'_, '_, Data>, what: Outgoing<'_>, leaving: &mut Leaving) -> Result<bool, Error> {
    let room = &mut leaving.bytes[leaving.length..];
    let needed = match status.state? {
        ConnectionState::WriteTraffic(mut traffic) => {
            let put = match what {
                Outgoing::Data(data) => traffic.encrypt(data, room),
                Outgoing::Goodbye => traffic.queue_close_notify(room),
            };
            match put {
                Ok(count) => {
                    leaving.length += count;
                    return Ok(true);
                }
                Err(EncryptError::InsufficientSize(needed)) => needed.required_size,
                Err(error @ EncryptError::EncryptExhausted) => return Err(Error::General(error.to_string())),
            }
        }
        ConnectionState::EncodeTlsData(mut encode) => {
            // The words are lost if there is no room for them, so they make it.
            match encode.encode(&mut []) {
                Err(EncodeError::InsufficientSize(needed)) => {
                    let end = leaving.length + needed.required_size;
                    leaving.bytes.resize(leaving.bytes.len().max(end), 0);
                    let room = &mut leaving.bytes[leaving.length..];
                    leaving.length += encode.encode(room).map_err(|error| Error::General(error.to_string()))?;
                    0
                }
                _ => 0,
            }
        }
        ConnectionState::TransmitTlsData(transmit) => {
            transmit.done();
            0
        }
        other => return Err(unexpected(&other)),
    };
    leaving.bytes.resize(leaving.bytes.len().max(leaving.length + needed), 0);
    Ok(false)
}

fn unexpected<Data>(state: &ConnectionState<'_, '_, Data>) -> Error {
    tracing::warn!(?state, "TLS is in an unexpected state");
    Error::General(
        "TLS is in a state that it cannot be in here; this is an error of the program (its log has the state)".into(),
    )
}

/// HKDF-Expand-Label (RFC 8446, section 7.1).
fn expand_label(expander: &dyn HkdfExpander, label: &[u8], context: &[u8], output: &mut [u8]) -> Option<()> {
    const PREFIX: &[u8] = b"tls13 ";
    let length = u16::try_from(output.len()).ok()?.to_be_bytes();
    let label_length = [u8::try_from(PREFIX.len() + label.len()).ok()?];
    let context_length = [u8::try_from(context.len()).ok()?];
    expander.expand_slice(&[&length, &label_length, PREFIX, label, &context_length, context], output).ok()
}

/// The one secret of a session that this program asks rustls' key log for.
#[derive(Default)]
struct ExporterSecret(Mutex<Option<OkmBlock>>);

impl std::fmt::Debug for ExporterSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExporterSecret")
    }
}

impl KeyLog for ExporterSecret {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if self.will_log(label) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(OkmBlock::new(secret));
        }
    }

    fn will_log(&self, label: &str) -> bool {
        label == "EXPORTER_SECRET"
    }
}
