//! Both ends of real connections over the loopback interface, each in its own thread.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use sterna_wire::header::{ChannelHeader, ChannelKind, ChannelReply, MAGIC};
use sterna_wire::identity::{MigrationId, MigrationKey};

use super::*;
use crate::tls::{Side, TlsError};

const KEY: MigrationKey = MigrationKey::from_bytes([5; 32]);
const ID: MigrationId = MigrationId::from_bytes([6; 16]);
/// Long enough that a correct test never reaches it, short enough that a hanging one ends.
const PATIENCE: Duration = Duration::from_secs(10);

// ---- Certificates ----------------------------------------------------------------------------------------------------

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes `{side}-cert.pem` and `{side}-key.pem`, changed by `change` before they are signed.
    fn sign(&self, dir: &Path, side: &str, names: &[&str], change: impl FnOnce(&mut CertificateParams)) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = match side {
            "server" => vec![ExtendedKeyUsagePurpose::ServerAuth],
            _ => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(dir.join(format!("{side}-cert.pem")), certificate.pem()).unwrap();
        std::fs::write(dir.join(format!("{side}-key.pem")), key.serialize_pem()).unwrap();
    }

    fn revoke(&self, dir: &Path, serials: &[SerialNumber]) {
        let now = SystemTime::now();
        let revoked = |serial: &SerialNumber| RevokedCertParams {
            serial_number: serial.clone(),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: now.into(),
            next_update: (now + Duration::from_secs(3600)).into(),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        std::fs::write(dir.join("ca-crl.pem"), list.signed_by(&self.issuer).unwrap().pem().unwrap()).unwrap();
    }
}

/// A directory with both sides' certificates from one authority.
struct Site {
    dir: tempfile::TempDir,
    authority: Authority,
}

impl Site {
    fn new() -> Self {
        let site = Self { dir: tempfile::tempdir().unwrap(), authority: Authority::new() };
        std::fs::write(site.path().join("ca-cert.pem"), &site.authority.pem).unwrap();
        site.authority.sign(site.path(), "server", &["localhost", "127.0.0.1"], |_| {});
        site.authority.sign(site.path(), "client", &["source.example"], |_| {});
        site
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn client(&self) -> Security {
        Security::Tls(TlsSettings::client(self.path()).unwrap())
    }

    fn server(&self, allow: &str) -> Security {
        Security::Tls(TlsSettings::server(self.path(), &[allow.to_owned()]).unwrap())
    }
}

// ---- Both ends -------------------------------------------------------------------------------------------------------

type Opened = Result<(Writer, Reader, Duration), TransportError>;
type Received = Result<(Connection, ChannelHeader), TransportError>;

/// Accepts one connection and reads its header.
fn receive_one(listener: &TcpListener, security: &Security, limits: &Limits) -> Received {
    let (tcp, _) = listener.accept().unwrap();
    let mut connection = Connection::accept_within(tcp, security, limits)?;
    let header = read_header(&mut connection)?;
    Ok((connection, header))
}

fn open(to: &str, security: &Security) -> Opened {
    open_channel(Connection::connect(to, security)?, &KEY, ID, ChannelKind::Ram, 2, 1)
}

/// Runs both ends; the receiver does `then` with what it got.
fn meet<T: Send>(
    source: &Security,
    destination: &Security,
    host: &str,
    then: impl FnOnce(Received) -> T + Send,
) -> (Opened, T) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("{host}:{}", listener.local_addr().unwrap().port());
    thread::scope(|scope| {
        let receiving = scope.spawn(move || then(receive_one(&listener, destination, &Limits::default())));
        let opened = open(&to, source);
        (opened, receiving.join().unwrap())
    })
}

type Halves = (Writer, Reader);

/// An accepted channel: the source's halves, the destination's.
fn channel(source: &Security, destination: &Security) -> (Halves, Halves) {
    let (opened, accepted) = meet(source, destination, "localhost", |received| accept_channel(received.unwrap().0));
    let (writer, reader, _) = opened.unwrap();
    ((writer, reader), accepted.unwrap())
}

fn both_kinds() -> [(Halves, Halves); 2] {
    let site = Site::new();
    [channel(&Security::Insecure, &Security::Insecure), channel(&site.client(), &site.server("source.example"))]
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

fn text<T>(result: Result<T, TransportError>) -> String {
    result.map(drop).unwrap_err().to_string()
}

// ---- What works ------------------------------------------------------------------------------------------------------

#[test]
fn a_tls_channel_opens_and_both_ends_know_the_same_session() {
    let site = Site::new();
    let (opened, (peer, exporter)) = meet(&site.client(), &site.server("source.example"), "localhost", |received| {
        let (connection, header) = received.unwrap();
        assert!(header.belongs(&KEY, connection.exporter()), "the proof covers the exporter");
        assert!(!header.belongs(&KEY, b""));
        assert_eq!((header.kind, header.index, header.id), (ChannelKind::Ram, 2, ID));
        let known = (connection.peer(), connection.exporter().to_vec());
        accept_channel(connection).unwrap();
        known
    });

    opened.unwrap();
    assert_eq!(exporter.len(), 32);
    assert!(peer.contains("127.0.0.1") && peer.contains("source.example"), "{peer}");
}

#[test]
fn parts_arrive_as_one_piece_and_are_counted() {
    for ((mut writer, _back), (_forth, mut reader)) in both_kinds() {
        let content = pattern(700_001, 1);
        let mut parts: Vec<&[u8]> = content.chunks(40_000).collect(); // more parts than one system call takes
        parts.insert(3, &[]);
        let (before, total) = (writer.bytes_written(), content.len());

        let writing = thread::scope(|scope| {
            let writing = scope.spawn(|| {
                writer.write_all_vectored(&parts).unwrap();
                writer.bytes_written() - before
            });
            let mut arrived = vec![0; total];
            reader.read_exact(&mut arrived).unwrap();
            assert!(arrived == content);
            writing.join().unwrap()
        });

        assert!(writing >= total as u64 && writing < total as u64 * 101 / 100, "{writing} on the wire");
        assert!(reader.bytes_read() >= total as u64);
    }
}

#[test]
fn both_directions_flow_at_once_and_neither_waits_for_the_other() {
    let send = |mut writer: Writer, seed| move || writer.write_all(&pattern(6 << 20, seed)).unwrap();
    let receive = |mut reader: Reader, seed| {
        move || {
            let mut arrived = vec![0; 6 << 20];
            reader.read_exact(&mut arrived).unwrap();
            assert!(arrived == pattern(6 << 20, seed));
        }
    };
    for ((source_writer, source_reader), (destination_writer, destination_reader)) in both_kinds() {
        thread::scope(|scope| {
            scope.spawn(send(source_writer, 1));
            scope.spawn(send(destination_writer, 2));
            scope.spawn(receive(source_reader, 2));
            scope.spawn(receive(destination_reader, 1));
        });
    }
}

#[test]
fn a_clean_end_is_false_at_a_packet_boundary_and_an_error_inside_of_a_packet() {
    for boundary in [true, false] {
        for ((mut writer, _back), (_forth, mut reader)) in both_kinds() {
            writer.write_all(if boundary { b"packet" } else { b"packetpac" }).unwrap();
            drop(writer);

            let mut packet = [0; 6];
            assert!(reader.read_packet_start(&mut packet).unwrap());
            assert_eq!(&packet, b"packet");
            let end = reader.read_packet_start(&mut packet);
            match boundary {
                true => assert!(!end.unwrap()),
                false => assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
            }
        }
    }
}

// ---- Who is turned away, and what they are told ----------------------------------------------------------------------

#[test]
fn a_server_from_another_authority_is_not_trusted() {
    let (site, other) = (Site::new(), Site::new());
    let (opened, received) = meet(&site.client(), &other.server("source.example"), "localhost", text);

    let said = text(opened);
    assert!(said.contains("same ca-cert.pem"), "{said}");
    assert!(received.contains("ca-cert.pem"), "the receiver learns it by TLS's alert: {received}");
}

#[test]
fn a_client_from_another_authority_is_told_so() {
    let (site, other) = (Site::new(), Site::new());
    other.authority.sign(site.path(), "client", &["source.example"], |_| {});
    let (opened, received) = meet(&site.client(), &site.server("source.example"), "localhost", text);

    let said = text(opened);
    assert!(said.contains("this side's certificate") && said.contains("ca-cert.pem"), "{said}");
    assert!(received.contains("the peer's certificate is not from the authority"), "{received}");
}

#[test]
fn a_host_name_that_is_not_in_the_certificate_is_refused() {
    let site = Site::new();
    site.authority.sign(site.path(), "server", &["elsewhere.example"], |_| {});
    let (opened, _) = meet(&site.client(), &site.server("source.example"), "localhost", text);

    let said = text(opened);
    assert!(said.contains("host name") && said.contains("elsewhere.example"), "{said}");
}

#[test]
fn an_address_in_the_certificate_is_as_good_as_a_name() {
    let site = Site::new();
    let (opened, _) =
        meet(&site.client(), &site.server("source.example"), "127.0.0.1", |received| accept_channel(received?.0));
    opened.unwrap();
}

#[test]
fn a_client_that_is_not_allowed_is_told_so_in_words() {
    let site = Site::new();
    let (opened, received) = meet(&site.client(), &site.server("another.example"), "localhost", |received| received);

    let opened = opened.unwrap_err();
    assert!(matches!(opened, TransportError::Refused { .. }));
    assert!(opened.to_string().contains("source.example") && opened.to_string().contains("--allow"), "{opened}");
    assert!(matches!(received, Err(TransportError::NotAllowed { .. })));
}

#[test]
fn a_common_name_counts_only_without_a_dns_name() {
    for (names, allowed) in [(&[][..], true), (&["other.example"][..], false)] {
        let site = Site::new();
        site.authority.sign(site.path(), "client", names, |params| {
            params.distinguished_name.push(DnType::CommonName, "source-host");
        });
        let (opened, _) =
            meet(&site.client(), &site.server("source-host"), "localhost", |received| accept_channel(received?.0));
        assert_eq!(opened.is_ok(), allowed, "{names:?}");
    }
}

#[test]
fn expired_certificates_are_named_as_such_on_both_sides() {
    let long_ago = |params: &mut CertificateParams| {
        params.not_before = (SystemTime::now() - Duration::from_secs(200_000)).into();
        params.not_after = (SystemTime::now() - Duration::from_secs(100_000)).into();
    };
    let site = Site::new();
    site.authority.sign(site.path(), "server", &["localhost"], long_ago);
    let (opened, received) = meet(&site.client(), &site.server("source.example"), "localhost", text);
    let said = text(opened);
    assert!(said.contains("the peer's certificate has expired"), "{said}");
    assert!(received.contains("this side's certificate has expired"), "{received}");

    let site = Site::new();
    site.authority.sign(site.path(), "client", &["source.example"], long_ago);
    let (opened, received) = meet(&site.client(), &site.server("source.example"), "localhost", text);
    let said = text(opened);
    assert!(said.contains("this side's certificate has expired"), "{said}");
    assert!(received.contains("the peer's certificate has expired"), "{received}");
}

#[test]
fn a_revoked_certificate_is_refused_and_others_are_not() {
    for (revoked, refused) in [(7u64, true), (8, false)] {
        let site = Site::new();
        site.authority.sign(site.path(), "client", &["source.example"], |params| {
            params.serial_number = Some(SerialNumber::from(7u64));
        });
        site.authority.revoke(site.path(), &[SerialNumber::from(revoked)]);
        let (opened, received) = meet(&site.client(), &site.server("source.example"), "localhost", |received| {
            received.map(|(connection, _)| drop(accept_channel(connection)))
        });
        assert_eq!(opened.is_err(), refused, "revoked: {revoked}");
        if refused {
            let (said, received) = (text(opened), text(received));
            assert!(said.contains("revoked") && received.contains("revoked"), "{said} / {received}");
        }
    }
}

#[test]
fn an_empty_revocation_list_does_not_pass_for_nobody_is_revoked() {
    let site = Site::new();
    std::fs::write(site.path().join("ca-crl.pem"), "").unwrap();
    let refused = TlsSettings::server(site.path(), &["a".to_owned()]).unwrap_err();
    assert!(matches!(refused, TlsError::Unusable { .. }) && refused.to_string().contains("ca-crl.pem"), "{refused}");
}

#[test]
fn a_key_of_another_certificate_is_named() {
    let (site, other) = (Site::new(), Site::new());
    std::fs::copy(other.path().join("client-key.pem"), site.path().join("client-key.pem")).unwrap();
    let refused = TlsSettings::client(site.path()).unwrap_err().to_string();
    assert!(refused.contains("client-key.pem is not the private key of client-cert.pem"), "{refused}");
}

#[test]
fn a_client_without_a_certificate_is_told_that_one_is_required() {
    let site = Site::new();
    let Security::Tls(TlsSettings { side: Side::Client(config) }) = site.client() else { unreachable!() };
    let mut config = Arc::unwrap_or_clone(config);
    config.client_auth_cert_resolver = Arc::new(NoCertificate);
    let nameless = Security::Tls(TlsSettings { side: Side::Client(Arc::new(config)) });
    let (opened, received) = meet(&nameless, &site.server("source.example"), "localhost", text);

    let said = text(opened);
    assert!(said.contains("requires a certificate"), "{said}");
    assert!(received.contains("presented no certificate"), "{received}");
}

#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[test]
fn tls_on_one_side_only_is_said_in_words_on_the_other() {
    let site = Site::new();
    let (opened, _) = meet(&Security::Insecure, &site.server("source.example"), "localhost", text);
    let said = text(opened);
    assert!(said.contains("takes TLS only"), "{said}");

    let (opened, received) = meet(&site.client(), &Security::Insecure, "localhost", text);
    let said = text(opened);
    assert!(said.contains("does not take TLS") && said.contains("--insecure"), "{said}");
    assert!(received.contains("does not begin with Sterna's magic"), "{received}");
}

#[test]
fn the_receivers_reason_for_refusing_arrives() {
    let site = Site::new();
    for (source, destination) in
        [(Security::Insecure, Security::Insecure), (site.client(), site.server("source.example"))]
    {
        let (opened, ()) = meet(&source, &destination, "localhost", |received| {
            refuse_channel(received.unwrap().0, "another migration is running");
        });
        let opened = opened.unwrap_err();
        assert!(matches!(&opened, TransportError::Refused { reason, .. } if reason == "another migration is running"));
    }
}

#[test]
fn settings_of_the_wrong_side_are_an_error() {
    let site = Site::new();
    let refused = Connection::connect("localhost:1", &site.server("a")).unwrap_err();
    assert!(matches!(refused, TransportError::WrongSide(_)), "{refused}");
    let refused = Connection::connect("localhost", &site.client()).unwrap_err();
    assert!(matches!(refused, TransportError::Address { .. }), "{refused}");
}

#[test]
fn an_address_that_leads_nowhere_is_named_once_and_with_the_right_reason() {
    let said = |to: &str| Connection::connect(to, &Security::Insecure).unwrap_err().to_string();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = said(&nobody.to_string());
    assert_eq!(refused.matches(&nobody.to_string()).count(), 1, "{refused}");
    let refused = said(&format!("localhost:{}", nobody.port()));
    assert!(
        refused.contains("localhost") && (refused.contains("127.0.0.1") || refused.contains("[::1]")),
        "which of its addresses: {refused}"
    );
    // RFC 6761: never the name of a host.
    let unknown = said("no-such-host.invalid:4920");
    assert!(unknown.contains("cannot find the host") && !unknown.contains("expected HOST:PORT"), "{unknown}");
    for port in ["", "x", "65536"] {
        let bad = said(&format!("127.0.0.1:{port}"));
        assert!(bad.contains("expected HOST:PORT"), "{bad}");
    }
}

// ---- Hostile and broken peers ----------------------------------------------------------------------------------------

/// What the receiving side makes of a peer that sends `bytes` and then waits for the end.
fn hostile(security: &Security, bytes: &[u8], limits: &Limits) -> (TransportError, Vec<u8>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    peer.write_all(bytes).unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_one(&listener, security, limits).map(drop).unwrap_err());
        let mut answer = Vec::new();
        // The end may be a reset: what was answered before it counts.
        let _ = peer.read_to_end(&mut answer);
        drop(peer);
        (receiving.join().unwrap(), answer)
    })
}

#[test]
fn garbage_is_refused_with_and_without_tls() {
    let site = Site::new();
    let garbage = pattern(100, 77);
    let (error, answer) = hostile(&Security::Insecure, &garbage, &Limits::default());
    assert!(matches!(error, TransportError::Header { .. }), "{error}");
    assert_eq!(ChannelReply::reason_length(answer[..4].try_into().unwrap()), Ok(answer.len() - 4), "it is told so");

    let (error, _) = hostile(&site.server("a"), &garbage, &Limits::default());
    assert!(matches!(error, TransportError::Tls { .. }), "{error}");
}

#[test]
fn a_peer_that_says_too_little_is_given_up() {
    let site = Site::new();
    let limits = Limits { handshake: Duration::from_millis(40), ..Limits::default() };
    for (security, bytes) in [
        (Security::Insecure, &b""[..]),
        (Security::Insecure, &MAGIC[..]),
        (site.server("a"), &b""[..]),
        (site.server("a"), &[0x16, 3, 1, 2, 0, 1][..]), // the start of a ClientHello
    ] {
        let (error, _) = hostile(&security, bytes, &limits);
        assert!(matches!(error, TransportError::TooSlow { .. }), "{bytes:?}: {error}");
    }
}

#[test]
fn a_receiver_that_does_not_answer_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("localhost:{}", listener.local_addr().unwrap().port());
    let limits = Limits { handshake: Duration::from_millis(40), ..Limits::default() };
    let connection = Connection::connect_within(&to, &Security::Insecure, &limits).unwrap();
    let given_up = open_channel(connection, &KEY, ID, ChannelKind::Control, 0, 1).unwrap_err();
    assert!(matches!(given_up, TransportError::TooSlow { .. }), "{given_up}");

    let given_up = Connection::connect_within(&to, &Site::new().client(), &limits).unwrap_err();
    assert!(matches!(given_up, TransportError::TooSlow { .. }), "{given_up}");
}

#[test]
fn silence_inside_of_a_packet_is_an_error_after_the_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let limits = Limits { silence: Duration::from_millis(40), ..Limits::default() };
    let accepted = Connection::accept_within(listener.accept().unwrap().0, &Security::Insecure, &limits).unwrap();
    let (_writer, mut reader) = accepted.split();

    peer.write_all(b"pac").unwrap();
    let lost = reader.read_packet_start(&mut [0; 6]).unwrap_err();
    assert_eq!(lost.kind(), io::ErrorKind::TimedOut, "{lost}");

    peer.write_all(b"packet").unwrap();
    assert!(reader.read_packet_start(&mut [0; 6]).unwrap());
    let lost = reader.read_exact(&mut [0; 1]).unwrap_err();
    assert_eq!(lost.kind(), io::ErrorKind::TimedOut, "{lost}");
}

#[test]
fn a_tls_connection_that_is_cut_is_not_a_clean_end() {
    let site = Site::new();
    let ((writer, _back), (_forth, mut reader)) = channel(&site.client(), &site.server("source.example"));
    Closer::of(&writer).close();
    let cut = reader.read_packet_start(&mut [0; 6]).unwrap_err();
    assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof, "{cut}");
}

#[test]
fn a_changed_byte_on_the_way_is_noticed_by_tls() {
    // A man in the middle that flips one bit late in the stream.
    let site = Site::new();
    let (front, back) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let to = format!("localhost:{}", front.local_addr().unwrap().port());
    let middle_to = back.local_addr().unwrap();
    let (source, destination) = (site.client(), site.server("source.example"));
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut from, mut onward) = (front.accept().unwrap().0, TcpStream::connect(middle_to).unwrap());
            let (mut answers, mut answered) = (onward.try_clone().unwrap(), from.try_clone().unwrap());
            scope.spawn(move || drop(io::copy(&mut answers, &mut answered)));
            let (mut bytes, mut passed) = ([0; 4096], 0);
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                if passed < 50_000 && passed + count >= 50_000 {
                    bytes[50_000 - passed - 1] ^= 1;
                }
                passed += count;
                if onward.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        });
        let receiving = scope.spawn(move || {
            let (connection, _) = receive_one(&back, &destination, &Limits::default()).unwrap();
            let (_writer, mut reader) = accept_channel(connection).unwrap();
            reader.read_exact(&mut vec![0; 200_000]).unwrap_err()
        });
        let (mut writer, _reader, _) = open(&to, &source).unwrap();
        // The receiver may have given up before everything was written.
        let _ = writer.write_all(&pattern(200_000, 3));
        let noticed = receiving.join().unwrap();
        assert_eq!(noticed.kind(), io::ErrorKind::InvalidData, "{noticed}");
    });
}

// ---- Ending it from outside ------------------------------------------------------------------------------------------

#[test]
fn a_closer_wakes_a_waiting_reader_and_a_waiting_writer() {
    for ((mut writer, mut reader), _destination) in both_kinds() {
        let closer = Closer::of(&writer);
        thread::scope(|scope| {
            let reading = scope.spawn(move || reader.read_packet_start(&mut [0; 8]).unwrap_err());
            let (started, has_started) = std::sync::mpsc::channel();
            let writing = scope.spawn(move || {
                let content = [1; 16 << 10];
                loop {
                    // Nobody reads at the other end, so sooner or later a write waits.
                    if let Err(error) = writer.write_all(&content) {
                        return error;
                    }
                    let _ = started.send(());
                }
            });
            has_started.recv_timeout(PATIENCE).unwrap();
            closer.close();
            assert_eq!(reading.join().unwrap().kind(), io::ErrorKind::ConnectionAborted);
            assert_eq!(writing.join().unwrap().kind(), io::ErrorKind::ConnectionAborted);
        });
    }
}

#[test]
fn a_closer_does_not_keep_the_connection_open() {
    let ((writer, reader), (_forth, mut other)) = channel(&Security::Insecure, &Security::Insecure);
    let closer = Closer::of(&writer);
    drop((writer, reader));
    assert!(!other.read_packet_start(&mut [0; 1]).unwrap());
    closer.close();
}

// ---- The listener ----------------------------------------------------------------------------------------------------

fn listening(security: Security, limits: Limits) -> (Incoming, String) {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let to = format!("localhost:{}", listener.local_address().port());
    (listener.start(security, limits).unwrap(), to)
}

#[test]
fn a_listener_hands_out_channels_with_their_headers() {
    let site = Site::new();
    let (incoming, to) = listening(site.server("source.example"), Limits::default());
    let source = site.client();
    thread::scope(|scope| {
        let opening: Vec<_> = (0..4).map(|_| scope.spawn(|| open(&to, &source))).collect();
        for _ in 0..4 {
            let (connection, header) = incoming.next_within(PATIENCE).unwrap();
            assert!(header.belongs(&KEY, connection.exporter()));
            accept_channel(connection).unwrap();
        }
        for opened in opening {
            opened.join().unwrap().unwrap();
        }
    });
}

#[test]
fn beyond_the_limit_the_oldest_silent_connection_is_told_so_and_makes_room() {
    let site = Site::new();
    let source = site.client();
    for (security, source) in [(Security::Insecure, &Security::Insecure), (site.server("source.example"), &source)] {
        let (incoming, to) = listening(security, Limits { pending: 2, ..Limits::default() });
        let mut silent = [TcpStream::connect(&to).unwrap(), TcpStream::connect(&to).unwrap()];
        thread::scope(|scope| {
            let opening = scope.spawn(|| open(&to, source));
            accept_channel(incoming.next_within(PATIENCE).unwrap().0).unwrap();
            opening.join().unwrap().unwrap();
        });
        let mut said = Vec::new();
        silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
        silent[0].read_to_end(&mut said).unwrap();
        assert!(String::from_utf8_lossy(&said).contains("too many connections"), "{said:?}");
        silent[1].set_nonblocking(true).unwrap();
        assert_eq!(silent[1].read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock, "it may still speak");
    }
}

#[test]
fn where_nothing_can_make_room_a_connection_is_refused_in_words() {
    let site = Site::new();
    let source = site.client();
    for (security, source) in [(Security::Insecure, &Security::Insecure), (site.server("source.example"), &source)] {
        let (_incoming, to) = listening(security, Limits { pending: 0, ..Limits::default() });
        let refused = open(&to, source).unwrap_err();
        assert!(matches!(refused, TransportError::Refused { .. }), "{refused}");
        assert!(refused.to_string().contains("too many connections"), "{refused}");
    }
}

#[test]
fn stopping_a_listener_wakes_whoever_waits_for_it() {
    let (incoming, to) = listening(Security::Insecure, Limits::default());
    let stop = incoming.stop_handle();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || incoming.next().is_none());
        stop.stop();
        assert!(waiting.join().unwrap());
    });
    assert!(TcpStream::connect(&to).is_err(), "nobody listens any more");
}
