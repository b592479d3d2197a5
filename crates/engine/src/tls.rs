//! Who may speak to whom: mutual TLS 1.3 from a directory of files named as QEMU names them, or from the same PEM in memory.
//!
//! One directory holds `ca-cert.pem`, optionally `ca-crl.pem`, and the pair of the side it is read for:
//! `server-cert.pem` and `server-key.pem` on the receiving host, `client-cert.pem` and `client-key.pem` on the sending
//! one (QEMU, `docs/system/tls.rst`). A certificate from the authority says who a peer *is*; which of them may send a
//! guest here is a list of its own, checked after the handshake so that the refusal arrives in words.
//!
//! AES-128-GCM comes first: with AES instructions it is the fastest suite that TLS 1.3 has.

#[cfg(feature = "tls")]
mod certificates;
#[cfg(not(feature = "tls"))]
mod left_out;

use std::path::PathBuf;

#[cfg(feature = "tls")]
pub use self::certificates::TlsSettings;
#[cfg(feature = "tls")]
pub(crate) use self::certificates::{Side, certificate_name, failure, is_allowed};
#[cfg(not(feature = "tls"))]
pub use self::left_out::TlsSettings;

/// What the TLS exporter (RFC 8446, section 7.5) is asked for; the proof in a channel header covers its answer.
pub const EXPORTER_LABEL: &[u8] = b"EXPORTER-sterna-channel";

/// One side's certificates and private key as PEM, from which [`TlsSettings`] are made without opening a file.
#[derive(Clone, Copy)]
pub struct TlsPem<'a> {
    /// The certificates of the authorities that the peer's certificate may be from (`ca-cert.pem`).
    pub authority: &'a [u8],
    /// This side's certificate, and those between it and the authority (`client-cert.pem`, `server-cert.pem`).
    pub certificate: &'a [u8],
    /// The certificate's private key (`client-key.pem`, `server-key.pem`). It is copied; wiping it is the caller's task.
    pub key: &'a [u8],
    /// The authorities' lists of revoked certificates (`ca-crl.pem`), if there are any.
    pub revoked: Option<&'a [u8]>,
}

impl std::fmt::Debug for TlsPem<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsPem(…)")
    }
}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file is missing, unreadable, or not the PEM that it should be.
    #[error(
        "cannot read {what} from {path}: {reason}",
        path = path.display()
    )]
    File {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A private key that others can read or exchange proves nothing.
    #[error("the private key {path} is not private: {why}", path = path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Who can do what, and what to do about it.
        why: String,
    },
    /// The files were read, but do not fit together or cannot be used.
    #[error("the certificates in {dir} cannot be used: {reason}", dir = dir.display())]
    Unusable {
        /// The directory.
        dir: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The receiving side names no sender that is allowed.
    #[error(
        "no name is allowed to send: with TLS the receiver needs at least one name in the sender's certificate (any host \
         with a certificate from the authority could send a guest here otherwise)"
    )]
    NobodyAllowed,
    /// PEM from memory is not the PEM that it should be, or its parts do not fit together.
    #[error("cannot use {what}: {reason}")]
    Pem {
        /// The part.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The name for the receiver's certificate can be in none.
    #[error("{name:?} is neither a host name nor an IP address, so that no certificate has it")]
    ServerName {
        /// The name.
        name: String,
    },
    /// This build has no TLS.
    #[error("this build has no TLS: it needs the feature `tls`")]
    LeftOut,
}
