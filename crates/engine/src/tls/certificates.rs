//! Certificates, keys and whom a side trusts, read from files; and what is wrong with a peer's certificate, in one line.

use std::fmt::{Display, Write as _};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::WebPkiClientVerifier;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use sterna_wire::text::cleaned;
use webpki::EndEntityCert;

use super::{TlsError, TlsPem};

/// One side's certificates and whom it trusts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TlsSettings {
    pub(crate) side: Side,
    /// The sending side: the name that the peer's certificate must carry, if that is not the host's in its address.
    pub(crate) server_name: Option<ServerName<'static>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Side {
    Client(Arc<ClientConfig>),
    Server { config: Arc<ServerConfig>, allow: Arc<[String]> },
}

impl TlsSettings {
    /// The sending side: reads `ca-cert.pem`, `client-cert.pem`, `client-key.pem` and, if present, `ca-crl.pem`.
    ///
    /// # Errors
    /// A file that is missing or unusable.
    pub fn client(dir: &Path) -> Result<Self, TlsError> {
        let files = Files::read(dir, "client")?;
        client(&files.pem()).map_err(|problem| files.explain(problem))
    }

    /// The sending side, from PEM in memory.
    ///
    /// # Errors
    /// [`TlsError::Pem`]: the part that is unusable.
    pub fn client_from_pem(pem: &TlsPem<'_>) -> Result<Self, TlsError> {
        Ok(client(pem)?)
    }

    /// Makes the sending side look for `name`, a DNS name or an IP address, in the receiver's certificate, in place of the host in the
    /// address that it connects to: an address that the certificate does not carry can then be used. The receiving side ignores it.
    ///
    /// # Errors
    /// [`TlsError::ServerName`].
    pub fn with_server_name(self, name: &str) -> Result<Self, TlsError> {
        let parsed = ServerName::try_from(name.to_owned());
        let server_name = parsed.map_err(|_| TlsError::ServerName { name: cleaned(name) })?;
        Ok(Self { server_name: Some(server_name), ..self })
    }

    /// The receiving side: reads `ca-cert.pem`, `server-cert.pem`, `server-key.pem` and, if present, `ca-crl.pem`.
    ///
    /// `allow` lists the client certificates that may send, by DNS name or IP address in their subject alternative
    /// names, or by their common name if they carry no alternative names at all.
    ///
    /// # Errors
    /// A file that is missing or unusable, or an empty `allow`.
    pub fn server(dir: &Path, allow: &[String]) -> Result<Self, TlsError> {
        let allow = allowed(allow)?;
        let files = Files::read(dir, "server")?;
        server(&files.pem(), allow).map_err(|problem| files.explain(problem))
    }

    /// The receiving side, from PEM in memory. `allow` as for [`TlsSettings::server`].
    ///
    /// # Errors
    /// [`TlsError::Pem`]: the part that is unusable; or an empty `allow`.
    pub fn server_from_pem(pem: &TlsPem<'_>, allow: &[String]) -> Result<Self, TlsError> {
        Ok(server(pem, allowed(allow)?)?)
    }
}

fn allowed(allow: &[String]) -> Result<Arc<[String]>, TlsError> {
    let names: Arc<[String]> =
        allow.iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    if names.is_empty() { Err(TlsError::NobodyAllowed) } else { Ok(names) }
}

fn client(pem: &TlsPem<'_>) -> Result<TlsSettings, Problem> {
    let provider = provider();
    let (chain, key) = identity(pem)?;
    let verifier = WebPkiServerVerifier::builder_with_provider(authorities(pem)?, provider.clone())
        .with_crls(revocations(pem)?)
        .enforce_revocation_expiration()
        .build()
        .map_err(|error| Problem::Together(error.to_string()))?;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| Problem::Together(error.to_string()))?
        .with_webpki_verifier(verifier)
        .with_client_auth_cert(chain, key)
        .map_err(Problem::Pair)?;
    // Every channel proves itself anew; a resumed session would skip the look at the certificate.
    config.resumption = Resumption::disabled();
    Ok(TlsSettings { side: Side::Client(Arc::new(config)), server_name: None })
}

fn server(pem: &TlsPem<'_>, allow: Arc<[String]>) -> Result<TlsSettings, Problem> {
    let provider = provider();
    let (chain, key) = identity(pem)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(authorities(pem)?, provider.clone())
        .with_crls(revocations(pem)?)
        .enforce_revocation_expiration()
        .build()
        .map_err(|error| Problem::Together(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| Problem::Together(error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(Problem::Pair)?;
    config.send_tls13_tickets = 0;
    config.ignore_client_order = true;
    Ok(TlsSettings { side: Side::Server { config: Arc::new(config), allow }, server_name: None })
}

/// The cryptography in use, fastest suite first.
fn provider() -> Arc<CryptoProvider> {
    use aws_lc_rs::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    let cipher_suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    Arc::new(CryptoProvider { cipher_suites, ..aws_lc_rs::default_provider() })
}

/// What is wrong with one side's PEM.
enum Problem {
    Part(Part, String),
    /// The certificate or the key is unusable, or they do not belong together.
    Pair(rustls::Error),
    /// The parts cannot be used together, for this reason.
    Together(String),
}

#[derive(Clone, Copy)]
enum Part {
    Authority,
    Certificate,
    Key,
    Revoked,
}

impl Part {
    const fn name(self) -> &'static str {
        match self {
            Self::Authority => "the authority's certificate",
            Self::Certificate => "this side's certificate",
            Self::Key => "this side's private key",
            Self::Revoked => "the list of revoked certificates",
        }
    }
}

impl From<Problem> for TlsError {
    /// Explains what is wrong with PEM from memory.
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Part(Part::Revoked, reason) => {
                Self::Pem { what: Part::Revoked.name(), reason: format!("it {reason}") }
            }
            Problem::Part(part, reason) => Self::Pem { what: part.name(), reason },
            Problem::Pair(rustls::Error::InconsistentKeys(_)) => {
                Self::Pem { what: Part::Key.name(), reason: "it is not the private key of the certificate".into() }
            }
            Problem::Pair(other) => Self::Pem { what: "this side's certificate or its key", reason: other.to_string() },
            Problem::Together(reason) => Self::Pem { what: "the certificates", reason },
        }
    }
}

/// The content of one side's files.
struct Files<'a> {
    dir: &'a Path,
    side: &'static str,
    authority: Vec<u8>,
    certificate: Vec<u8>,
    key: Vec<u8>,
    revoked: Option<Vec<u8>>,
}

const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

impl<'a> Files<'a> {
    fn read(dir: &'a Path, side: &'static str) -> Result<Self, TlsError> {
        let file = |part: Part, name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|error| file_error(part, &path, error))
        };
        let certificate = file(Part::Certificate, &format!("{side}-cert.pem"))?;
        let path = dir.join(format!("{side}-key.pem"));
        let mut key = Vec::new();
        let mut opened = File::open(&path).map_err(|error| file_error(Part::Key, &path, error))?;
        check_private(&opened, &path)?;
        opened.read_to_end(&mut key).map_err(|error| file_error(Part::Key, &path, error))?;
        let authority = file(Part::Authority, AUTHORITY)?;
        let revoked = match std::fs::read(dir.join(REVOKED)) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(revoked_error(dir, &format!("cannot be read: {error}"))),
        };
        Ok(Self { dir, side, authority, certificate, key, revoked })
    }

    fn pem(&self) -> TlsPem<'_> {
        let Self { authority, certificate, key, revoked, .. } = self;
        TlsPem { authority, certificate, key, revoked: revoked.as_deref() }
    }

    /// Explains what is wrong, by the files' names.
    fn explain(&self, problem: Problem) -> TlsError {
        let Self { dir, side, .. } = self;
        let unusable = |reason: String| TlsError::Unusable { dir: (*dir).to_owned(), reason };
        match problem {
            // No `File` error: the advice to make certificates would not help.
            Problem::Part(Part::Revoked, reason) => revoked_error(dir, &reason),
            Problem::Part(part, reason) => {
                let name = match part {
                    Part::Certificate => &format!("{side}-cert.pem"),
                    Part::Key => &format!("{side}-key.pem"),
                    Part::Authority | Part::Revoked => AUTHORITY,
                };
                file_error(part, &dir.join(name), reason)
            }
            Problem::Pair(rustls::Error::InconsistentKeys(_)) => {
                unusable(format!("{side}-key.pem is not the private key of {side}-cert.pem"))
            }
            Problem::Pair(other) => unusable(format!("{side}-cert.pem or {side}-key.pem: {other}")),
            Problem::Together(reason) => unusable(reason),
        }
    }
}

fn file_error(part: Part, path: &Path, reason: impl Display) -> TlsError {
    TlsError::File { what: part.name(), path: path.to_owned(), reason: reason.to_string() }
}

fn revoked_error(dir: &Path, reason: &str) -> TlsError {
    TlsError::Unusable { dir: dir.to_owned(), reason: format!("the list of revoked ones, {REVOKED}, {reason}") }
}

fn certificates(part: Part, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Problem> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| Problem::Part(part, error.to_string()))?;
    if found.is_empty() { Err(Problem::Part(part, "there is no certificate in it".into())) } else { Ok(found) }
}

fn authorities(pem: &TlsPem<'_>) -> Result<Arc<RootCertStore>, Problem> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(Part::Authority, pem.authority)? {
        roots.add(certificate).map_err(|error| Problem::Part(Part::Authority, error.to_string()))?;
    }
    Ok(Arc::new(roots))
}

fn revocations(pem: &TlsPem<'_>) -> Result<Vec<CertificateRevocationListDer<'static>>, Problem> {
    let Some(text) = pem.revoked else { return Ok(Vec::new()) };
    let unusable = |reason: String| Problem::Part(Part::Revoked, reason);
    let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(text).collect();
    let found = found.map_err(|error| unusable(format!("is damaged: {error}")))?;
    // An empty list must not pass for "nobody is revoked".
    if found.is_empty() { Err(unusable("has no list in it: remove it if nobody is revoked".into())) } else { Ok(found) }
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn identity(pem: &TlsPem<'_>) -> Result<Identity, Problem> {
    let chain = certificates(Part::Certificate, pem.certificate)?;
    let key = PrivateKeyDer::from_pem_slice(pem.key).map_err(|error| Problem::Part(Part::Key, error.to_string()))?;
    Ok((chain, key))
}

/// Refuses a key that others than root, this user and a group can read, or others than root and this user can change. A group
/// is whom the administrator gives QEMU's own TLS keys to read.
fn check_private(key: &File, path: &Path) -> Result<(), TlsError> {
    let exposed = |why: String| TlsError::Exposed { path: path.to_owned(), why };
    let found = key.metadata().map_err(|error| exposed(format!("its permissions cannot be seen: {error}")))?;
    let mode = found.mode() & 0o7777;
    if mode & 0o027 != 0 {
        return Err(exposed(format!(
            "its mode {mode:04o} lets others {}; take that from them (chmod 0600), and make a new key if somebody may have \
             read it",
            if mode & 0o022 != 0 { "change it" } else { "read it" }
        )));
    }
    if ![0, rustix::process::geteuid().as_raw()].contains(&found.uid()) {
        return Err(exposed(format!("it belongs to user {}; give it to root or to this user", found.uid())));
    }
    Ok(())
}

/// The names in a peer's certificate, for people: its DNS names, or its common name where it has no alternative names.
pub(crate) fn certificate_name(certificate: &CertificateDer<'_>) -> String {
    let Ok(parsed) = EndEntityCert::try_from(certificate) else {
        return "unreadable".to_owned();
    };
    let mut names = String::new();
    for name in parsed.valid_dns_names() {
        let separator = if names.is_empty() { "" } else { ", " };
        let _ = write!(names, "{separator}{name}");
    }
    if names.is_empty() {
        names = match has_alternative_names(certificate) {
            true => "without a DNS name",
            false => common_name(parsed.subject()).unwrap_or("without a name"),
        }
        .to_owned();
    }
    cleaned(&names)
}

/// Whether the (already verified) client certificate carries one of the allowed names.
pub(crate) fn is_allowed(certificate: &CertificateDer<'_>, allow: &[String]) -> bool {
    let Ok(parsed) = EndEntityCert::try_from(certificate) else {
        return false;
    };
    // A common name counts only where there are no alternative names of any kind (RFC 6125, section 6.4.4; RFC 9525 drops it;
    // QEMU's own recipes still use it).
    let common = if has_alternative_names(certificate) { None } else { common_name(parsed.subject()) };
    allow.iter().any(|allowed| {
        let by_alternative_name = ServerName::try_from(allowed.as_str())
            .is_ok_and(|name| parsed.verify_is_valid_for_subject_name(&name).is_ok());
        by_alternative_name || common.is_some_and(|common| common.eq_ignore_ascii_case(allowed))
    })
}

/// Whether a certificate has subject alternative names, of whatever kind. What is not as expected counts as having them: then
/// its common name is not believed.
fn has_alternative_names(certificate: &[u8]) -> bool {
    const SEQUENCE: u8 = 0x30;
    const EXTENSIONS: u8 = 0xa3; // [3], RFC 5280, section 4.1
    const OBJECT_IDENTIFIER: u8 = 0x06;
    const SUBJECT_ALT_NAME: [u8; 3] = [0x55, 0x1d, 0x11]; // 2.5.29.17

    let sequence = |bytes| element(bytes).filter(|(tag, ..)| *tag == SEQUENCE);
    let search = || {
        let (_, certificate, _) = sequence(certificate)?;
        let (_, mut fields, _) = sequence(certificate)?;
        while !fields.is_empty() {
            let (tag, content, rest) = element(fields)?;
            fields = rest;
            if tag != EXTENSIONS {
                continue;
            }
            let (_, mut extensions, _) = sequence(content)?;
            while !extensions.is_empty() {
                let (_, extension, rest) = sequence(extensions)?;
                extensions = rest;
                let (tag, identifier, _) = element(extension)?;
                if tag != OBJECT_IDENTIFIER || identifier == SUBJECT_ALT_NAME {
                    return Some(true);
                }
            }
        }
        Some(false)
    };
    search().unwrap_or(true)
}

/// The one common name in a distinguished name; `None` if there is none, more than one, or the DER is not as expected.
///
/// `subject` is the content of the `Name` sequence (RFC 5280, section 4.1.2.4): sets of (type, value) pairs.
fn common_name(mut subject: &[u8]) -> Option<&str> {
    const SEQUENCE: u8 = 0x30;
    const SET: u8 = 0x31;
    const OBJECT_IDENTIFIER: u8 = 0x06;
    const STRINGS: [u8; 3] = [0x0c, 0x13, 0x16]; // UTF8String, PrintableString, IA5String
    const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03]; // 2.5.4.3

    let mut found = None;
    while !subject.is_empty() {
        let (set, mut pairs, rest) = element(subject)?;
        subject = rest;
        if set != SET {
            return None;
        }
        while !pairs.is_empty() {
            let (sequence, pair, rest) = element(pairs)?;
            pairs = rest;
            let (kind, identifier, value) = element(pair)?;
            if sequence != SEQUENCE || kind != OBJECT_IDENTIFIER {
                return None;
            }
            if identifier != COMMON_NAME {
                continue;
            }
            let (tag, text, rest) = element(value)?;
            if found.is_some() || !rest.is_empty() || !STRINGS.contains(&tag) {
                return None;
            }
            found = Some(std::str::from_utf8(text).ok()?);
        }
    }
    found
}

/// Splits the first DER element off: its tag, its content, what follows. Lengths up to 65535 (two length bytes).
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, first], rest) = bytes.split_first_chunk::<2>()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81 => {
            let (&[low], rest) = rest.split_first_chunk::<1>()?;
            (usize::from(low), rest)
        }
        0x82 => {
            let (&length, rest) = rest.split_first_chunk::<2>()?;
            (usize::from(u16::from_be_bytes(length)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// One line on why TLS failed, and what to do, for the person at this end.
pub(crate) fn failure(error: &rustls::Error) -> String {
    use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage, NoCertificatesPresented, PeerIncompatible};
    match error {
        InvalidCertificate(problem) => certificate_failure(problem),
        NoCertificatesPresented => "the peer presented no certificate; both sides need one".to_owned(),
        AlertReceived(alert) => alert_failure(*alert),
        InvalidMessage(_) | rustls::Error::InappropriateMessage { .. } => {
            "what the peer sent is not TLS: does one side use TLS and the other not?".to_owned()
        }
        PeerIncompatible(_) => format!("no common ground with the peer, TLS 1.3 is required: {error}"),
        other => other.to_string(),
    }
}

fn certificate_failure(problem: &CertificateError) -> String {
    use CertificateError as E;
    match problem {
        E::Expired | E::ExpiredContext { .. } => {
            format!("the peer's certificate has expired ({problem}); renew it, or set the clocks right")
        }
        E::NotValidYet | E::NotValidYetContext { .. } => {
            format!("the peer's certificate is not valid yet ({problem}); are the clocks of both hosts right?")
        }
        E::UnknownIssuer | E::BadSignature => {
            "the peer's certificate is not from the authority in ca-cert.pem: do both hosts have the same ca-cert.pem?"
                .to_owned()
        }
        E::Revoked => "the peer's certificate has been revoked (ca-crl.pem)".to_owned(),
        E::ExpiredRevocationList | E::ExpiredRevocationListContext { .. } => {
            format!("the list of revoked certificates, ca-crl.pem, is out of date ({problem}); fetch a new one")
        }
        E::UnknownRevocationStatus => {
            "ca-crl.pem does not cover the authority that signed the peer's certificate".to_owned()
        }
        E::NotValidForName | E::NotValidForNameContext { .. } => {
            format!(
                "the host name given is not in the peer's certificate ({problem}); use a name that is, or give it with \
                 --tls-server-name (TlsSettings::with_server_name)"
            )
        }
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => {
            format!("the peer's certificate is not made for this use ({problem}): client and server exchanged?")
        }
        other => format!("the peer's certificate is not acceptable: {other}"),
    }
}

fn alert_failure(alert: AlertDescription) -> String {
    use AlertDescription as A;
    match alert {
        A::CertificateRequired => "the peer requires a certificate of this side and got none".to_owned(),
        // A signature that does not fit: two authorities of the same name look like this.
        A::UnknownCA | A::DecryptError => "the peer does not know the authority that signed this side's certificate: \
             do both hosts have the same ca-cert.pem?"
            .to_owned(),
        A::CertificateExpired => "the peer says that this side's certificate has expired, or is not valid yet by its \
             clock"
            .to_owned(),
        A::CertificateRevoked => "the peer says that this side's certificate has been revoked".to_owned(),
        A::BadCertificate | A::UnsupportedCertificate | A::CertificateUnknown | A::AccessDenied => {
            format!("the peer does not accept this side's certificate (TLS alert {})", alert_name(alert))
        }
        A::ProtocolVersion | A::HandshakeFailure => {
            format!(
                "the peer and this side have no TLS version or cipher in common, TLS 1.3 is required (TLS alert {})",
                alert_name(alert)
            )
        }
        other => format!("the peer ended TLS with the alert {}", alert_name(other)),
    }
}

/// The alert's name in RFC 8446, section 6, or its number.
fn alert_name(alert: AlertDescription) -> String {
    alert.as_str().map_or_else(|| u8::from(alert).to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Name` content with the given (last identifier byte, tag, text) attributes, each in its own set.
    fn name(attributes: &[(u8, u8, &[u8])]) -> Vec<u8> {
        let wrap = |tag: u8, content: &[u8]| [&[tag, content.len() as u8], content].concat();
        attributes
            .iter()
            .flat_map(|(identifier, tag, text)| {
                let pair = [wrap(6, &[0x55, 4, *identifier]), wrap(*tag, text)].concat();
                wrap(0x31, &wrap(0x30, &pair))
            })
            .collect()
    }

    #[test]
    fn the_common_name_is_found_among_other_attributes() {
        assert_eq!(common_name(&name(&[(10, 0x0c, b"Site"), (3, 0x0c, b"host-a")])), Some("host-a"));
        assert_eq!(common_name(&name(&[(3, 0x13, b"host-b"), (6, 0x13, b"DE")])), Some("host-b"));
    }

    #[test]
    fn a_subject_that_is_ambiguous_or_damaged_has_no_common_name() {
        assert_eq!(common_name(&name(&[(10, 0x0c, b"host-a")])), None);
        assert_eq!(common_name(&name(&[(3, 0x0c, b"a"), (3, 0x0c, b"b")])), None);
        assert_eq!(common_name(&name(&[(3, 0x1e, b"\0a")])), None);
        assert_eq!(common_name(&name(&[(3, 0x0c, b"\xff")])), None);
        let good = name(&[(10, 0x0c, b"Site"), (3, 0x0c, b"host-a")]);
        for cut in 1..good.len() {
            let name = common_name(&good[..cut]);
            assert!(name.is_none(), "cut at {cut}: {name:?}");
        }
    }

    /// A certificate with the common name `host-a` and these alternative names.
    fn certificate(names: Vec<rcgen::SanType>) -> CertificateDer<'static> {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, "host-a");
        params.subject_alt_names = names;
        params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn a_common_name_counts_beside_no_alternative_name_of_any_kind() {
        use rcgen::SanType;
        let allow = ["host-a".to_owned()];
        let bare = certificate(Vec::new());
        assert!(is_allowed(&bare, &allow));
        assert_eq!(certificate_name(&bare), "host-a");
        for name in [
            SanType::DnsName("host-b".try_into().unwrap()),
            SanType::IpAddress([192, 0, 2, 7].into()),
            SanType::Rfc822Name("a@example.org".try_into().unwrap()),
            SanType::URI("spiffe://example.org/b".try_into().unwrap()),
        ] {
            let named = certificate(vec![name.clone()]);
            assert!(!is_allowed(&named, &allow), "{name:?}");
            assert_ne!(certificate_name(&named), "host-a");
        }
        let addressed = certificate(vec![SanType::IpAddress([192, 0, 2, 7].into())]);
        assert!(is_allowed(&addressed, &["192.0.2.7".to_owned()]));
        // Damaged ones have no common name that would be believed.
        for cut in 0..bare.len() {
            assert!(!is_allowed(&CertificateDer::from(bare[..cut].to_vec()), &allow), "cut at {cut}");
            assert!(has_alternative_names(&bare[..cut]), "cut at {cut}");
        }
    }

    #[test]
    fn a_private_key_that_others_may_read_or_change_is_refused_with_what_to_do() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("client-key.pem");
        std::fs::write(&path, "").unwrap();
        let checked = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            check_private(&File::open(&path).unwrap(), &path).map_err(|error| error.to_string())
        };
        for good in [0o600, 0o400, 0o640, 0o440] {
            assert_eq!(checked(good), Ok(()), "{good:o}");
        }
        for (bad, word) in [(0o644, "read it"), (0o604, "read it"), (0o660, "change it"), (0o666, "change it")] {
            let refused = checked(bad).unwrap_err();
            assert!(refused.contains(word) && refused.contains("client-key.pem"), "{refused}");
            assert!(refused.contains("chmod"), "{refused}");
        }
    }

    #[test]
    fn an_empty_list_of_allowed_names_is_refused_in_words() {
        let refused = TlsSettings::server(Path::new("unread"), &[" ".to_owned()]).unwrap_err();
        assert!(matches!(refused, TlsError::NobodyAllowed));
        assert!(refused.to_string().contains("no name is allowed"));
    }

    #[test]
    fn pem_in_memory_makes_the_settings_of_either_side_and_its_faults_are_named() {
        let signed = || {
            let key = rcgen::KeyPair::generate().unwrap();
            let params = rcgen::CertificateParams::new(vec!["host-a".to_owned()]).unwrap();
            (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
        };
        let ((certificate, key), (_, other_key)) = (signed(), signed());
        let (certificate, key) = (certificate.as_bytes(), key.as_bytes());
        let good = TlsPem { authority: certificate, certificate, key, revoked: None };
        let allow = ["host-b".to_owned()];
        assert!(matches!(TlsSettings::client_from_pem(&good).unwrap().side, Side::Client(_)));
        assert!(matches!(TlsSettings::server_from_pem(&good, &allow).unwrap().side, Side::Server { .. }));
        assert!(matches!(TlsSettings::server_from_pem(&good, &[]), Err(TlsError::NobodyAllowed)));
        assert!(!format!("{good:?}").contains("PRIVATE"));
        let bad = [
            (
                TlsPem { authority: b"", ..good },
                "cannot use the authority's certificate: there is no certificate in it",
            ),
            (TlsPem { certificate: key, ..good }, "cannot use this side's certificate: there is no certificate in it"),
            (TlsPem { key: b"", ..good }, "cannot use this side's private key: "),
            (
                TlsPem { key: other_key.as_bytes(), ..good },
                "cannot use this side's private key: it is not the private key of the certificate",
            ),
            (
                TlsPem { revoked: Some(b""), ..good },
                "cannot use the list of revoked certificates: it has no list in it",
            ),
        ];
        for (pem, text) in bad {
            for refused in [TlsSettings::client_from_pem(&pem), TlsSettings::server_from_pem(&pem, &allow)] {
                let refused = refused.unwrap_err().to_string();
                assert!(refused.starts_with(text), "{refused}");
            }
        }
    }

    #[test]
    fn a_missing_file_is_named_with_what_it_should_hold() {
        let dir = tempfile::tempdir().unwrap();
        let text = TlsSettings::client(dir.path()).unwrap_err().to_string();
        assert!(text.contains("client-cert.pem") && text.contains("cannot read"), "{text}");
    }
}
