//! A session in memory against rustls' buffered connection: each understands what the other sends.

use std::io::{IoSlice, Read, Write};

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    CipherSuiteCommon, ClientConfig, ClientConnection, ServerConfig, ServerConnection, SupportedCipherSuite,
    Tls13CipherSuite,
};

use sterna_test_kit::Random;

use super::*;
use crate::tls::{EXPORTER_LABEL, Side};
use crate::transport::encrypted::{Arrived, Leaving};
use crate::transport::session::Session;

/// A session, the bytes that it has received but not processed, and the other end.
struct Pair {
    session: Session,
    arrived: Arrived,
    leaving: Leaving,
    other: rustls::Connection,
}

fn side(security: Security) -> Side {
    match security {
        Security::Tls(settings) => settings.side,
        Security::Insecure => unreachable!("the sites of these tests have TLS"),
    }
}

/// Returns a server of rustls with this suite, one ticket, and no client authentication.
fn other_server(site: &Site, suite: SupportedCipherSuite, longest_record: Option<usize>) -> ServerConfig {
    let provider = CryptoProvider { cipher_suites: vec![suite], ..aws_lc_rs::default_provider() };
    let chain = CertificateDer::from_pem_file(site.path().join("server-cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(site.path().join("server-key.pem")).unwrap();
    let mut config = ServerConfig::builder_with_provider(provider.into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![chain], key)
        .unwrap();
    config.send_tls13_tickets = 1;
    config.max_fragment_size = longest_record;
    config
}

impl Pair {
    fn client_of(server: ServerConfig, site: &Site) -> Self {
        let Side::Client(config) = side(site.client()) else { unreachable!() };
        let session = Session::client(&config, "localhost".try_into().unwrap()).unwrap();
        Self::new(session, ServerConnection::new(server.into()).unwrap().into())
    }

    fn server() -> Self {
        let site = Site::new();
        let Side::Client(client) = side(site.client()) else { unreachable!() };
        let Side::Server { config, .. } = side(site.server("source.example")) else { unreachable!() };
        let client = ClientConnection::new(client, "localhost".try_into().unwrap()).unwrap();
        Self::new(Session::server(&config).unwrap(), client.into())
    }

    fn client() -> Self {
        let site = Site::new();
        Self::client_of(other_server(&site, aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256, None), &site)
    }

    fn new(session: Session, other: rustls::Connection) -> Self {
        Self { session, arrived: Arrived::for_tls(), leaving: Leaving::for_tls(), other }
    }

    fn shaken(mut self) -> Self {
        while self.session.state().is_handshaking() || self.other.is_handshaking() {
            let sent_by_other = self.sent_by_other();
            self.arrive(&sent_by_other);
            self.session.shake(&mut self.arrived).unwrap();
            let answer = self.session.own_messages();
            self.deliver(&answer);
        }
        self
    }

    /// Returns the bytes that the other end wants to send.
    fn sent_by_other(&mut self) -> Vec<u8> {
        let mut sent_by_other = Vec::new();
        while self.other.wants_write() {
            self.other.write_tls(&mut sent_by_other).unwrap();
        }
        sent_by_other
    }

    fn encrypt_at_other(&mut self, content: &[u8]) -> Vec<u8> {
        self.other.writer().write_all(content).unwrap();
        self.sent_by_other()
    }

    /// Passes bytes to the other end and returns the plaintext that it has received.
    fn deliver(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.try_deliver(bytes).unwrap()
    }

    fn try_deliver(&mut self, mut bytes: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        let mut received = Vec::new();
        while !bytes.is_empty() {
            self.other.read_tls(&mut bytes).unwrap();
            self.other.process_new_packets()?;
            let _ = self.other.reader().read_to_end(&mut received); // until there is nothing more for now
        }
        Ok(received)
    }

    fn arrive(&mut self, bytes: &[u8]) {
        self.arrived.room()[..bytes.len()].copy_from_slice(bytes);
        self.arrived.came(bytes.len());
    }

    fn decrypt(&mut self, into: &mut [u8]) -> Result<usize, rustls::Error> {
        self.session.decrypt(&mut self.arrived, into.into())
    }

    fn encrypt(&mut self, content: &[u8]) -> Vec<u8> {
        let (mut parts, mut encrypted) = (vec![IoSlice::new(content)], Vec::new());
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let taken = self.session.encrypt(parts, &mut self.leaving).unwrap();
            IoSlice::advance_slices(&mut parts, taken);
            encrypted.extend_from_slice(self.leaving.bytes());
        }
        encrypted
    }
}

#[test]
fn the_exporter_equals_that_of_rustls() {
    let site = Site::new();
    let suites = aws_lc_rs::default_provider().cipher_suites.into_iter().filter(|suite| suite.tls13().is_some());
    let clients = suites.map(|suite| Pair::client_of(other_server(&site, suite, None), &site));
    for pair in clients.chain([Pair::server()]) {
        assert_eq!(pair.session.exporter(EXPORTER_LABEL), None, "before the handshake");
        let pair = pair.shaken();
        let expected = pair.other.export_keying_material([0; 32], EXPORTER_LABEL, None).unwrap();
        let suite = pair.session.state().negotiated_cipher_suite();
        assert_eq!(pair.session.exporter(EXPORTER_LABEL), Some(expected), "{suite:?}");
    }
}

#[test]
fn records_that_arrive_byte_by_byte_are_put_together() {
    for pair in [Pair::client(), Pair::server()] {
        let mut pair = pair.shaken();
        let content = pattern(20_000, 1);
        let sent_by_other = pair.encrypt_at_other(&content);
        let (mut received, mut piece) = (Vec::new(), [0; 999]);
        for byte in sent_by_other.chunks(1) {
            pair.arrive(byte);
            while let Ok(count @ 1..) = pair.decrypt(&mut piece) {
                received.extend_from_slice(&piece[..count]);
            }
        }
        assert!(received == content);
    }
}

#[test]
fn parts_of_all_sizes_leave_in_full_records() {
    for pair in [Pair::client(), Pair::server()] {
        let mut pair = pair.shaken();
        let content = pattern(400_000, 2);
        for lengths in [vec![64, 1000, 300_000], vec![0, 16_384, 1, 16_383, 0, 1], vec![131_072, 7], vec![5; 40]] {
            let mut rest = &content[..];
            let mut parts = Vec::new();
            for length in &lengths {
                let (part, after) = rest.split_at(*length);
                parts.push(IoSlice::new(part));
                rest = after;
            }
            let total: usize = lengths.iter().sum();
            let (mut parts, mut received, mut records) = (&mut parts[..], Vec::new(), 0);
            IoSlice::advance_slices(&mut parts, 0);
            while !parts.is_empty() {
                let taken = pair.session.encrypt(parts, &mut pair.leaving).unwrap();
                IoSlice::advance_slices(&mut parts, taken);
                let bytes = pair.leaving.bytes().to_vec();
                records += (bytes.len() - taken) / 22;
                received.extend(pair.deliver(&bytes));
            }
            assert!(received == content[..total], "{lengths:?}");
            assert!(records <= total.div_ceil(16_384), "{lengths:?}: {records} records");
        }
    }
}

#[test]
fn a_close_notify_amid_received_bytes_ends_the_session_and_later_bytes_are_ignored() {
    for pair in [Pair::client(), Pair::server()] {
        let mut pair = pair.shaken();
        let mut sent_by_other = pair.encrypt_at_other(b"last words");
        pair.other.send_close_notify();
        sent_by_other.extend(pair.sent_by_other());
        sent_by_other.extend([0xff; 100]);
        pair.arrive(&sent_by_other);
        let mut received = [0; 64];
        assert_eq!(pair.decrypt(&mut received), Ok(10));
        assert_eq!(pair.decrypt(&mut received), Ok(0));
        assert!(pair.session.has_ended());
        assert_eq!(pair.decrypt(&mut received), Ok(0));

        let answer = pair.encrypt(b"still heard");
        assert_eq!(pair.deliver(&answer), b"still heard");
        pair.session.goodbye(&mut pair.leaving);
        let goodbye = pair.leaving.bytes().to_vec();
        pair.deliver(&goodbye);
        assert_eq!(pair.other.reader().read(&mut received).unwrap(), 0, "a clean end");
    }
}

#[test]
fn after_good_records_a_damaged_or_invalid_one_is_an_error() {
    for pair in [Pair::client, Pair::server] {
        for too_long in [true, false] {
            let mut pair = pair().shaken();
            let mut sent_by_other = pair.encrypt_at_other(b"good");
            if too_long {
                sent_by_other.extend([23, 3, 3, 0xff, 0xff, 1, 2, 3]);
            } else {
                sent_by_other.extend(pair.encrypt_at_other(b"changed"));
                *sent_by_other.last_mut().unwrap() ^= 1;
            }
            pair.arrive(&sent_by_other);
            let mut received = [0; 64];
            assert_eq!(pair.decrypt(&mut received), Ok(4));
            let failure = pair.decrypt(&mut received).unwrap_err();
            assert_eq!(pair.decrypt(&mut received), Err(failure.clone()), "it is final");
            // The half that writes notices, and tells the peer.
            let refused = pair.session.encrypt(&[IoSlice::new(b"more")], &mut pair.leaving);
            assert_eq!(refused, Err(failure));
            pair.session.goodbye(&mut pair.leaving);
            let mut alert = pair.leaving.bytes();
            pair.other.read_tls(&mut alert).unwrap();
            let told = pair.other.process_new_packets();
            assert!(matches!(told, Err(rustls::Error::AlertReceived(_))), "{told:?}");
        }
    }
}

#[test]
fn a_key_update_is_followed_and_answered() {
    for pair in [Pair::client(), Pair::server()] {
        let mut pair = pair.shaken();
        for round in 0..3 {
            pair.other.refresh_traffic_keys().unwrap();
            let sent_by_other = pair.encrypt_at_other(b"under new keys");
            pair.arrive(&sent_by_other);
            let mut received = [0; 64];
            assert_eq!(pair.decrypt(&mut received), Ok(14), "round {round}");
            assert_eq!(&received[..14], b"under new keys");

            let answer = pair.encrypt(b"so is this");
            assert!(answer.len() > 10 + 22, "there is an answer before it");
            assert_eq!(pair.deliver(&answer), b"so is this");
        }
    }
}

#[test]
fn keys_are_updated_before_they_have_been_used_too_often() {
    let site = Site::new();
    let suite = aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13().unwrap();
    let common = CipherSuiteCommon { confidentiality_limit: 20, ..suite.common };
    let few: &'static Tls13CipherSuite = Box::leak(Box::new(Tls13CipherSuite { common, ..*suite }));
    let server = other_server(&site, SupportedCipherSuite::Tls13(few), None);
    // The session is the server here, because its configuration determines how long keys last.
    let Side::Client(client) = side(site.client()) else { unreachable!() };
    let client = ClientConnection::new(client, "localhost".try_into().unwrap()).unwrap();
    let mut pair = Pair::new(Session::server(&server).unwrap(), client.into()).shaken();

    let content = pattern(3 << 20, 3);
    let mut received = Vec::new();
    let mut words = 0;
    for piece in content.chunks(100_000) {
        let encrypted = pair.encrypt(piece);
        words += encrypted.len() - piece.len() - piece.len().div_ceil(16_384) * 22;
        received.extend(pair.deliver(&encrypted));
    }
    assert!(received == content);
    assert!(words > 0, "no key was updated");
}

#[test]
fn a_message_of_tls_cut_in_two_after_the_handshake_is_refused() {
    let site = Site::new();
    let server = || other_server(&site, aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256, Some(32));
    let Side::Client(config) = side(site.client()) else { unreachable!() };
    let mut config = ClientConfig::clone(&config);
    config.resumption = Resumption::in_memory_sessions(1); // else there are no tickets
    for whole in [true, false] {
        let session = Session::client(&config, "localhost".try_into().unwrap()).unwrap();
        let mut pair = Pair::new(session, ServerConnection::new(server().into()).unwrap().into()).shaken();
        let mut tickets = pair.sent_by_other();
        assert!(tickets.len() > 64, "a ticket in several records");
        if whole {
            tickets.extend(pair.encrypt_at_other(b"data"));
        } else {
            tickets.pop();
        }
        pair.arrive(&tickets);
        let result = pair.decrypt(&mut [0; 8]);
        match whole {
            true => assert_eq!(result, Ok(4)),
            false => {
                let sent_by_other = result.unwrap_err().to_string();
                assert!(sent_by_other.contains("cut a message"), "{sent_by_other}");
                pair.session.encrypt(&[IoSlice::new(b"more")], &mut pair.leaving).unwrap_err();
            }
        }
    }
}

#[test]
fn however_the_bytes_are_split_or_changed_only_sent_plaintext_is_returned() {
    let mut random = Random::announced();
    let mut below = move |limit: usize| random.index(limit);
    let mut changed = 0;
    for round in 0..60 {
        let mut pair = if round % 2 == 0 { Pair::client() } else { Pair::server() };
        // In a third of the rounds a byte is changed in transit, perhaps during the handshake.
        let mut changed_at = if round % 3 == 0 { below(8000) } else { usize::MAX };
        let (mut sent, mut received, mut failed) = (Vec::new(), Vec::new(), false);
        for _ in 0..30 {
            if !pair.other.is_handshaking() && below(4) == 0 {
                pair.other.refresh_traffic_keys().unwrap();
            }
            let content = pattern(below(3000), round);
            let mut sent_by_other = if pair.other.is_handshaking() {
                pair.sent_by_other()
            } else {
                sent.extend_from_slice(&content);
                pair.encrypt_at_other(&content)
            };
            if let Some(byte) = sent_by_other.get_mut(changed_at) {
                *byte ^= 1 << below(8);
            }
            changed_at = changed_at.checked_sub(sent_by_other.len()).unwrap_or(usize::MAX);
            let mut rest = &sent_by_other[..];
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(1 + below(rest.len().min(2000)));
                rest = after;
                pair.arrive(piece);
                if pair.session.state().is_handshaking() {
                    failed |= pair.session.shake(&mut pair.arrived).is_err();
                    let answer = pair.session.own_messages();
                    // The other end may be the one that notices.
                    failed |= pair.try_deliver(&answer).is_err();
                    continue;
                }
                let mut into = vec![0; 1 + below(4000)];
                match pair.decrypt(&mut into) {
                    Ok(count) => received.extend_from_slice(&into[..count]),
                    Err(_) => failed = true,
                }
                let answer = pair.session.encrypt(&[IoSlice::new(b"seen")], &mut pair.leaving);
                assert!(answer.is_err() || !failed, "round {round}: a failure is final");
                failed |= answer.is_err();
                if !failed {
                    let answer = pair.leaving.bytes().to_vec();
                    assert_eq!(pair.deliver(&answer), b"seen");
                }
            }
            if failed {
                break;
            }
        }
        let mut left = vec![0; sent.len() + 1];
        if let Ok(count) = pair.decrypt(&mut left) {
            received.extend_from_slice(&left[..count]);
        }
        assert!(sent.starts_with(&received), "round {round}");
        if round % 3 == 0 {
            changed += usize::from(failed);
        } else {
            assert!(!failed && received == sent, "round {round}: all of it");
        }
    }
    assert!(changed > 0, "no change was noticed");
}
