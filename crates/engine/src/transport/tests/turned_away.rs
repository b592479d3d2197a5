//! Which peers are refused, and which reason both sides receive: certificates, names, addresses. Over TCP only, because
//! the kind of socket makes no difference.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::SystemTime;

use rcgen::{CertificateParams, DnType, SerialNumber};

use super::*;
use crate::tls::{Side, TlsError, TlsSettings};

#[test]
fn a_tls_channel_opens_and_both_ends_know_the_same_session() {
    let site = Site::new();
    let (opened, (peer, exporter)) =
        meet_by_name(&site.client(), &site.server("source.example"), "localhost", |received| {
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
fn a_server_from_another_authority_is_not_trusted() {
    let (site, other) = (Site::new(), Site::new());
    let (opened, received) = meet_by_name(&site.client(), &other.server("source.example"), "localhost", text);

    let said = text(opened);
    assert!(said.contains("same ca-cert.pem"), "{said}");
    assert!(received.contains("ca-cert.pem"), "the receiver learns it by TLS's alert: {received}");
}

#[test]
fn a_client_from_another_authority_receives_the_reason() {
    let (site, other) = (Site::new(), Site::new());
    other.authority.sign(site.path(), "client", &["source.example"], |_| {});
    let (opened, received) = meet_by_name(&site.client(), &site.server("source.example"), "localhost", text);

    let said = text(opened);
    assert!(said.contains("this side's certificate") && said.contains("ca-cert.pem"), "{said}");
    assert!(received.contains("the peer's certificate is not from the authority"), "{received}");
}

#[test]
fn a_host_name_that_is_not_in_the_certificate_is_refused() {
    let site = Site::new();
    site.authority.sign(site.path(), "server", &["elsewhere.example"], |_| {});
    let (opened, _) = meet_by_name(&site.client(), &site.server("source.example"), "localhost", text);

    let said = text(opened);
    assert!(said.contains("host name") && said.contains("elsewhere.example"), "{said}");
    assert!(said.contains("--tls-server-name"), "{said}");
}

#[test]
fn a_name_that_is_given_apart_is_looked_for_in_the_certificate_and_no_other() {
    let site = Site::new();
    site.authority.sign(site.path(), "server", &["elsewhere.example"], |_| {});
    let Security::Tls(settings) = site.client() else { unreachable!() };
    for (name, good) in [("elsewhere.example", true), ("localhost", false), ("127.0.0.1", false)] {
        let named = Security::Tls(settings.clone().with_server_name(name).unwrap());
        let (opened, _) =
            meet_by_name(&named, &site.server("source.example"), "localhost", |received| accept_channel(received?.0));
        assert_eq!(opened.is_ok(), good, "{name}");
    }
    let refused = settings.with_server_name("not a name").unwrap_err().to_string();
    assert!(refused.contains("\"not a name\" is neither a host name nor an IP address"), "{refused}");
}

#[test]
fn an_address_in_the_certificate_is_as_good_as_a_name() {
    let site = Site::new();
    let (opened, _) = meet_by_name(&site.client(), &site.server("source.example"), "127.0.0.1", |received| {
        accept_channel(received?.0)
    });
    opened.unwrap();
}

#[test]
fn a_client_that_is_not_allowed_receives_the_reason() {
    let site = Site::new();
    let (opened, received) =
        meet_by_name(&site.client(), &site.server("another.example"), "localhost", |received| received);

    let opened = opened.unwrap_err();
    assert!(matches!(opened, TransportError::Refused { .. }));
    assert!(
        opened.to_string().contains("source.example") && opened.to_string().contains("not allowed to send"),
        "{opened}"
    );
    assert!(matches!(received, Err(TransportError::NotAllowed { .. })));
}

#[test]
fn a_common_name_counts_only_without_a_dns_name() {
    for (names, allowed) in [(&[][..], true), (&["other.example"][..], false)] {
        let site = Site::new();
        site.authority.sign(site.path(), "client", names, |params| {
            params.distinguished_name.push(DnType::CommonName, "source-host");
        });
        let (opened, _) = meet_by_name(&site.client(), &site.server("source-host"), "localhost", |received| {
            accept_channel(received?.0)
        });
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
    let (opened, received) = meet_by_name(&site.client(), &site.server("source.example"), "localhost", text);
    let said = text(opened);
    assert!(said.contains("the peer's certificate has expired"), "{said}");
    assert!(received.contains("this side's certificate has expired"), "{received}");

    let site = Site::new();
    site.authority.sign(site.path(), "client", &["source.example"], long_ago);
    let (opened, received) = meet_by_name(&site.client(), &site.server("source.example"), "localhost", text);
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
        let (opened, received) =
            meet_by_name(&site.client(), &site.server("source.example"), "localhost", |received| {
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
fn an_empty_revocation_list_is_an_error() {
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
fn a_client_without_a_certificate_receives_that_one_is_required() {
    let site = Site::new();
    let Security::Tls(TlsSettings { side: Side::Client(config), .. }) = site.client() else { unreachable!() };
    let mut config = Arc::unwrap_or_clone(config);
    config.client_auth_cert_resolver = Arc::new(NoCertificate);
    let nameless = Security::Tls(TlsSettings { side: Side::Client(Arc::new(config)), server_name: None });
    let (opened, received) = meet_by_name(&nameless, &site.server("source.example"), "localhost", text);

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
fn settings_of_the_wrong_side_are_an_error() {
    let site = Site::new();
    let refused = Connection::connect("localhost:1", &site.server("a")).unwrap_err();
    assert!(matches!(refused, TransportError::WrongSide(_)), "{refused}");
    let refused = Connection::connect("localhost", &site.client()).unwrap_err();
    assert!(matches!(refused, TransportError::Address { .. }), "{refused}");
}

#[test]
fn an_unreachable_address_is_named_once_and_with_the_right_reason() {
    let said = |to: &str| Connection::connect(to, &Security::Insecure).unwrap_err().to_string();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = said(&nobody.to_string());
    assert_eq!(refused.matches(&nobody.to_string()).count(), 1, "{refused}");
    let refused = said(&format!("localhost:{}", nobody.port()));
    assert!(
        refused.contains("localhost") && (refused.contains("127.0.0.1") || refused.contains("[::1]")),
        "which of its addresses: {refused}"
    );
    // RFC 6761: no host has this name.
    let unknown = said("no-such-host.invalid:4920");
    assert!(unknown.contains("cannot find the host") && !unknown.contains("expected HOST:PORT"), "{unknown}");
    for port in ["", "x", "65536"] {
        let bad = said(&format!("127.0.0.1:{port}"));
        assert!(bad.contains("expected HOST:PORT"), "{bad}");
    }
}

#[test]
fn a_byte_changed_in_transit_is_noticed_by_tls() {
    // A man in the middle that flips one bit late in the stream.
    let site = Site::new();
    let (front, back) = (TcpListener::bind("127.0.0.1:0").unwrap(), ManualListener::open(Kind::Tcp));
    let to = by_name(&front.local_addr().unwrap().into());
    let middle_to = back.to.to_string();
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
            let (connection, _) = receive_one(&back.bound, &destination, &Limits::default()).unwrap();
            let (_writer, mut reader) = accept_channel(connection).unwrap();
            reader.read_exact(&mut vec![0; 200_000]).unwrap_err()
        });
        let (mut writer, _reader, _) = open(&to, &source).unwrap();
        // The receiver may have ended the connection before everything was written.
        let _ = writer.write_all(&pattern(200_000, 3));
        let noticed = receiving.join().unwrap();
        assert_eq!(noticed.kind(), io::ErrorKind::InvalidData, "{noticed}");
    });
}
