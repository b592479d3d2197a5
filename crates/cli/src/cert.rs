//! `sterna cert`: certificates for a trial or a small site.
//!
//! A site with an authority of its own needs none of this: the files have QEMU's names, so those made for QEMU's TLS
//! serve here too. What is made here is plain: one authority that lives in the directory, a certificate for the host
//! that receives, and one for the host that sends. Nothing that exists is overwritten unasked, and the authority never:
//! every certificate it has signed would be worth nothing.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use sterna_engine::directory::Directory;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The authority outlives what it signs several times over.
const AUTHORITY_DAYS: u32 = 3650;
/// Two years and a month: renewed every second year without haste.
const CERTIFICATE_DAYS: u32 = 760;
/// Clocks of hosts differ a little; a certificate used at once should be valid on the other host too.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(60 * 60);

const CA_CERT: &str = "ca-cert.pem";
const CA_KEY: &str = "ca-key.pem";
const SERVER: [&str; 2] = ["server-cert.pem", "server-key.pem"];
const CLIENT: [&str; 2] = ["client-cert.pem", "client-key.pem"];

/// Make certificates for `--tls`, for a trial or a small site.
#[derive(Debug, clap::Args)]
pub(crate) struct CertArgs {
    /// Directory for the certificates; made if it is missing. Its authority (ca-cert.pem, ca-key.pem) is used if it
    /// has one, and made otherwise.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Names and IP addresses under which senders reach the receiving host (what stands in `--to`), separated by
    /// commas.
    #[arg(long, value_name = "NAME[,NAME|IP…]", value_delimiter = ',', required = true)]
    host: Vec<String>,
    /// Name in the sender's certificate: what the receiver's `--allow` is given.
    #[arg(long, value_name = "NAME", default_value = "sterna-sender")]
    client: String,
    /// Replace the server's and the client's certificate if they exist. The authority is kept in any case.
    #[arg(long)]
    force: bool,
}

/// Why no certificates were made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CertError {
    /// A file cannot be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    /// Something is there already.
    #[error("{path} exists already; --force replaces it (the authority is kept in any case)", path = path.display())]
    Exists { path: PathBuf },
    /// Half of an authority.
    #[error(
        "{dir} holds {present} but not {missing}: copy the authority's {missing} there, or use an empty directory",
        dir = dir.display()
    )]
    HalfAuthority { dir: PathBuf, present: &'static str, missing: &'static str },
    /// The authority's files are not usable.
    #[error("the authority in {dir} cannot sign: {reason}", dir = dir.display())]
    Authority { dir: PathBuf, reason: String },
    /// A name that a certificate cannot carry.
    #[error("\"{name}\" cannot be put into a certificate: {reason}")]
    Name { name: String, reason: String },
    /// Making a key or a signature failed.
    #[error("cannot make a certificate: {0}")]
    Make(#[from] rcgen::Error),
}

/// Makes the missing files, and prints what to copy where.
///
/// # Errors
/// See [`CertError`]; nothing is overwritten then.
pub(crate) fn run(args: &CertArgs) -> Result<(), CertError> {
    let made = make(args)?;
    let mut out = io::stdout().lock();
    // A closed pipe behind the program is no reason to call the certificates a failure.
    let _ = out.write_all(describe(args, made).as_bytes());
    Ok(())
}

/// Makes the missing files. Returns whether the authority was made as well.
fn make(args: &CertArgs) -> Result<bool, CertError> {
    let dir = &args.dir;
    // Everything that can be refused is refused before the first file is written.
    let server = leaf(&args.host, ExtendedKeyUsagePurpose::ServerAuth)?;
    let client = leaf(std::slice::from_ref(&args.client), ExtendedKeyUsagePurpose::ClientAuth)?;
    if !args.force {
        for name in SERVER.into_iter().chain(CLIENT) {
            let path = dir.join(name);
            if path.exists() {
                return Err(CertError::Exists { path });
            }
        }
    }
    // Keys are made here: no other user may be able to replace them.
    let dir = &Directory::private(dir).map_err(|source| CertError::File {
        action: "use the directory",
        path: dir.clone(),
        source,
    })?;
    let (issuer, made) = authority(dir)?;
    for (params, [certificate, key_file]) in [(server, SERVER), (client, CLIENT)] {
        let key = KeyPair::generate()?;
        let signed = params.signed_by(&key, &issuer)?;
        put(dir, key_file, &key.serialize_pem(), 0o600)?;
        put(dir, certificate, &signed.pem(), 0o644)?;
    }
    Ok(made)
}

/// Returns the directory's authority, made if it has none, and whether it was made.
fn authority(open: &Directory) -> Result<(Issuer<'static, KeyPair>, bool), CertError> {
    let dir = open.path();
    match (dir.join(CA_CERT).exists(), dir.join(CA_KEY).exists()) {
        (true, true) => {
            let unusable =
                |error: rcgen::Error| CertError::Authority { dir: dir.to_owned(), reason: error.to_string() };
            let certificate = get(dir, CA_CERT)?;
            let key = KeyPair::from_pem(&get(dir, CA_KEY)?).map_err(unusable)?;
            Ok((Issuer::from_ca_cert_pem(&certificate, key).map_err(unusable)?, false))
        }
        (true, false) => Err(CertError::HalfAuthority { dir: dir.to_owned(), present: CA_CERT, missing: CA_KEY }),
        (false, true) => Err(CertError::HalfAuthority { dir: dir.to_owned(), present: CA_KEY, missing: CA_CERT }),
        (false, false) => {
            // Between two authorities of one name, only a signature that does not fit would show the difference.
            let made = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
            let mut params = named(&format!("Sterna authority {made}"), AUTHORITY_DAYS);
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            let key = KeyPair::generate()?;
            let certificate = params.self_signed(&key)?;
            put(open, CA_KEY, &key.serialize_pem(), 0o600)?;
            put(open, CA_CERT, &certificate.pem(), 0o644)?;
            Ok((Issuer::new(params, key), true))
        }
    }
}

/// Returns the parameters of a certificate for one host, with all its names as subject alternative names.
fn leaf(names: &[String], usage: ExtendedKeyUsagePurpose) -> Result<CertificateParams, CertError> {
    let names: Vec<String> = names.iter().map(|name| name.trim().to_owned()).collect();
    for name in &names {
        let bad = |reason: &str| Err(CertError::Name { name: name.clone(), reason: reason.to_owned() });
        if name.parse::<std::net::IpAddr>().is_ok() {
            continue;
        }
        let letters = |label: &str| label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        let labels = || name.split('.').all(|label| (1..=63).contains(&label.len()) && letters(label));
        if name.len() > 253 || !labels() {
            return bad("neither an IP address nor a host name (letters, digits, '-' and '.', without a port)");
        }
    }
    // Common names end at 64 characters (RFC 5280, upper bounds); the alternative names are what counts.
    let mut params = named(&names[0].chars().take(64).collect::<String>(), CERTIFICATE_DAYS);
    params.subject_alt_names = CertificateParams::new(names)?.subject_alt_names;
    params.is_ca = IsCa::ExplicitNoCa;
    // QEMU's own TLS, which TLS 1.3 gives no use for the second, refuses a certificate without it (qcrypto_tls_creds_check_cert_key_usage
    // in its crypto/tlscredsx509.c).
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn named(common_name: &str, days: u32) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, common_name);
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_DIFFERENCE).into();
    params.not_after = (now + DAY * days).into();
    params
}

fn get(dir: &Path, name: &str) -> Result<String, CertError> {
    let path = dir.join(name);
    fs::read_to_string(&path).map_err(|source| CertError::File { action: "read", path, source })
}

/// Writes a file beside its place and moves it there, so that no incomplete key and no key with the wrong mode is ever visible.
fn put(dir: &Directory, name: &str, text: &str, mode: u32) -> Result<(), CertError> {
    let beside = format!(".{name}.new");
    let write = || {
        // Left over from a program that was killed; opening below insists on a new file, with the mode it is given.
        match dir.remove(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = dir.create_new(&beside, mode)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        dir.rename(&beside, name)
    };
    write().map_err(|source| CertError::File { action: "write", path: dir.path().join(name), source })
}

fn describe(args: &CertArgs, made_authority: bool) -> String {
    let dir = args.dir.display();
    let hosts = args.host.join(", ");
    let first = args.host[0].trim();
    let to = if first.contains(':') { format!("[{first}]") } else { first.to_owned() };
    let client = &args.client;
    let authority = if made_authority { "made, for ten years" } else { "used as it was" };
    format!(
        "In {dir}:\n\
         \x20 ca-cert.pem, ca-key.pem          the authority: {authority}\n\
         \x20 server-cert.pem, server-key.pem  made for the receiving host: {hosts}\n\
         \x20 client-cert.pem, client-key.pem  made for the sending host: {client}\n\
         Both are valid for {CERTIFICATE_DAYS} days.\n\
         \n\
         Copy to the receiving host:  ca-cert.pem  server-cert.pem  server-key.pem\n\
         Copy to the sending host:    ca-cert.pem  client-cert.pem  client-key.pem\n\
         Keep ca-key.pem to yourself: who has it can make certificates that both hosts trust.\n\
         \n\
         Then:  sterna receive --tls DIR --allow {client} …\n\
         \x20      sterna send --tls DIR --to {to}:PORT …\n\
         For a further host, run this again with its names and another directory that has copies of ca-cert.pem and \
         ca-key.pem.\n"
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use sterna_engine::tls::TlsSettings;

    use super::*;

    fn args(dir: &Path, host: &[&str], force: bool) -> CertArgs {
        let host = host.iter().map(|name| (*name).to_owned()).collect();
        CertArgs { dir: dir.to_owned(), host, client: "source".to_owned(), force }
    }

    #[test]
    fn what_is_made_serves_both_sides_and_keys_are_private() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("certs");

        assert!(make(&args(&dir, &["host-b.example", "192.0.2.7", "2001:db8::7"], false)).unwrap());

        TlsSettings::client(&dir).unwrap();
        TlsSettings::server(&dir, &["source".to_owned()]).unwrap();
        for key in [CA_KEY, SERVER[1], CLIENT[1]] {
            let mode = fs::metadata(dir.join(key)).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{key}");
        }
        let files = fs::read_dir(&dir).unwrap().count();
        assert_eq!(files, 6, "nothing is left beside the six files");
    }

    #[test]
    fn nothing_is_overwritten_unasked_and_the_authority_never() {
        let dir = tempfile::tempdir().unwrap();
        make(&args(dir.path(), &["a"], false)).unwrap();
        let before: Vec<_> = [CA_CERT, CA_KEY, SERVER[0], CLIENT[0]].map(|name| get(dir.path(), name).unwrap()).into();

        let refused = make(&args(dir.path(), &["b"], false)).unwrap_err();
        assert!(matches!(refused, CertError::Exists { .. }) && refused.to_string().contains("--force"));
        assert_eq!(get(dir.path(), SERVER[0]).unwrap(), before[2]);

        assert!(!make(&args(dir.path(), &["b"], true)).unwrap());
        assert_eq!(get(dir.path(), CA_CERT).unwrap(), before[0]);
        assert_eq!(get(dir.path(), CA_KEY).unwrap(), before[1]);
        assert_ne!(get(dir.path(), SERVER[0]).unwrap(), before[2]);
        assert_ne!(get(dir.path(), CLIENT[0]).unwrap(), before[3]);
        TlsSettings::client(dir.path()).unwrap();
    }

    #[test]
    fn half_an_authority_is_not_completed() {
        let dir = tempfile::tempdir().unwrap();
        make(&args(dir.path(), &["a"], false)).unwrap();
        fs::remove_file(dir.path().join(CA_KEY)).unwrap();

        let refused = make(&args(dir.path(), &["a"], true)).unwrap_err();

        assert!(matches!(refused, CertError::HalfAuthority { missing: CA_KEY, .. }), "{refused}");
    }

    #[test]
    fn names_that_are_none_are_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["", "host:4444", "two words", "a..b", "ü.example"] {
            let refused = make(&args(dir.path(), &[name], false)).unwrap_err();
            assert!(matches!(refused, CertError::Name { .. }), "{name:?}: {refused}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_description_says_what_to_copy_and_how_to_go_on() {
        let text = describe(&args(Path::new("certs"), &["2001:db8::7"], false), true);
        for part in ["ca-cert.pem  server-cert.pem", "--allow source", "--to [2001:db8::7]:PORT"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
