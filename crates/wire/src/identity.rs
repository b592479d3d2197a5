//! The identity of a migration: its id, its key, and the proof that a connection belongs to it.
//!
//! TLS authenticates a *peer*. It does not show that a connection belongs to *this migration*. The proof in the channel
//! header does: a keyed hash over everything that identifies the channel and over the TLS session it travels in, so
//! that a header seen elsewhere is useless. Without TLS the key crosses the network in clear, and the proof only
//! protects against accidents; the documents say so.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::header::ChannelKind;

/// Length of a [`Proof`] and of a [`MigrationKey`], in bytes.
pub const KEY_LENGTH: usize = 32;

/// Names one migration on both hosts; what a person passes to `sterna recover`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MigrationId([u8; 16]);

impl MigrationId {
    /// Makes an id of 16 bytes, which should be random.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the id's 16 bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MigrationId({self})")
    }
}

/// The text is not a migration id: 32 hexadecimal digits.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not a migration id: expected 32 hexadecimal digits, as `sterna send` and `sterna receive` print it")]
pub struct BadMigrationId;

impl std::str::FromStr for MigrationId {
    type Err = BadMigrationId;

    fn from_str(text: &str) -> Result<Self, BadMigrationId> {
        from_hex(text).map(Self).ok_or(BadMigrationId)
    }
}

/// The secret of one migration, made by the source and sent to the destination on the control channel.
#[derive(Clone, PartialEq, Eq)]
pub struct MigrationKey([u8; KEY_LENGTH]);

impl MigrationKey {
    /// Makes a key of 32 random bytes.
    pub const fn from_bytes(bytes: [u8; KEY_LENGTH]) -> Self {
        Self(bytes)
    }

    /// Returns the key as 64 hexadecimal digits, for the hello message and for the record on disk.
    pub fn to_hex(&self) -> String {
        to_hex(&self.0)
    }

    /// Parses a key of 64 hexadecimal digits; `None` if the text is anything else.
    pub fn from_hex(text: &str) -> Option<Self> {
        from_hex(text).map(Self)
    }
}

impl fmt::Debug for MigrationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MigrationKey(…)")
    }
}

/// The data that the proof covers.
#[derive(Clone, Copy, Debug)]
pub struct ProofSubject<'a> {
    /// The migration that the channel belongs to.
    pub id: MigrationId,
    /// What the channel carries.
    pub kind: ChannelKind,
    /// Index of the channel among those of its kind.
    pub index: u16,
    /// Incarnation of the connection.
    pub incarnation: u32,
    /// The TLS exporter of the connection (RFC 8446, section 7.5); empty without TLS.
    pub exporter: &'a [u8],
}

/// A channel's proof that it belongs to a migration.
pub type Proof = [u8; KEY_LENGTH];

/// Makes the proof that `subject` belongs to the migration with `key`.
pub fn prove(key: &MigrationKey, subject: &ProofSubject<'_>) -> Proof {
    keyed(key, subject).finalize().into_bytes().into()
}

/// Returns whether `proof` is right; compares in constant time.
pub fn verify(key: &MigrationKey, subject: &ProofSubject<'_>, proof: &Proof) -> bool {
    keyed(key, subject).verify_slice(proof).is_ok()
}

fn keyed(key: &MigrationKey, subject: &ProofSubject<'_>) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&key.0).expect("HMAC takes keys of any length");
    mac.update(b"sterna channel 1");
    mac.update(subject.id.as_bytes());
    mac.update(&[subject.kind as u8]);
    mac.update(&subject.index.to_le_bytes());
    mac.update(&subject.incarnation.to_le_bytes());
    mac.update(subject.exporter);
    mac
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = (high << 4 | low) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: MigrationKey = MigrationKey::from_bytes([7; 32]);

    fn subject(exporter: &[u8]) -> ProofSubject<'_> {
        let id = MigrationId::from_bytes([3; 16]);
        ProofSubject { id, kind: ChannelKind::Ram, index: 2, incarnation: 1, exporter }
    }

    #[test]
    fn a_proof_is_good_for_its_own_subject_only() {
        let proof = prove(&KEY, &subject(b"session"));

        assert!(verify(&KEY, &subject(b"session"), &proof));
        let others = [
            ProofSubject { index: 3, ..subject(b"session") },
            ProofSubject { incarnation: 2, ..subject(b"session") },
            ProofSubject { kind: ChannelKind::Control, ..subject(b"session") },
            ProofSubject { id: MigrationId::from_bytes([4; 16]), ..subject(b"session") },
            subject(b"another session"),
        ];
        for other in others {
            assert!(!verify(&KEY, &other, &proof), "{other:?}");
        }
        assert!(!verify(&MigrationKey::from_bytes([8; 32]), &subject(b"session"), &proof));
    }

    #[test]
    fn ids_and_keys_read_back_what_they_print() {
        let id = MigrationId::from_bytes(*b"0123456789abcdef");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(MigrationKey::from_hex(&KEY.to_hex()), Some(KEY));
        assert_eq!("xyz".parse::<MigrationId>(), Err(BadMigrationId));
        assert_eq!("é".repeat(16).parse::<MigrationId>(), Err(BadMigrationId));
    }

    #[test]
    fn a_key_is_not_printed_by_debug() {
        assert!(!format!("{KEY:?}").contains("07"));
    }
}
