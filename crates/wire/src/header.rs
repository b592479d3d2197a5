//! The channel header, which every connection sends first, and the reply to it.
//!
//! The receiver never guesses from content what a connection is for (requirement V1). A header that is not understood
//! is refused with a reason as text, in a form that every version can read: the reply's layout never changes.
//!
//! ```text
//!  0  magic "STERNA\r\n"         12  index u16        24  migration id [16]
//!  8  version u16 (1)            14  reserved u16     40  proof [32]
//! 10  kind u8                    16  incarnation u32  72  CRC-32C of bytes 0..72, u32
//! 11  reserved u8                20  reserved u32     76  reserved u32
//! ```
//! Integers are little-endian here and in all that follows; reserved fields are written 0 and not read.

pub use crate::channel_kind::ChannelKind;
use crate::checksum::crc32c;
use crate::identity::{MigrationId, MigrationKey, Proof, ProofSubject, prove, verify};
use crate::limits::MAX_TEXT;
use crate::text::cleaned_bytes;

/// Length of an encoded [`ChannelHeader`], in bytes.
pub const CHANNEL_HEADER_LENGTH: usize = 80;
/// The version of the protocol that this crate implements.
pub const PROTOCOL_VERSION: u16 = 1;
/// The first bytes of every connection. The line break reveals a connection that was treated as text.
pub const MAGIC: [u8; 8] = *b"STERNA\r\n";

/// The first message of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelHeader {
    /// The migration that the channel belongs to.
    pub id: MigrationId,
    /// What it carries.
    pub kind: ChannelKind,
    /// Index of the channel among those of its kind, from 0.
    pub index: u16,
    /// Incarnation of the migration's connections, from 1.
    pub incarnation: u32,
    /// The proof that it belongs to the migration.
    pub proof: Proof,
}

/// Why a connection's first bytes are no channel header.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The magic is missing: another program is connecting.
    #[error("this is not a Sterna channel: the connection does not begin with Sterna's magic")]
    Magic,
    /// Another version of the protocol.
    #[error("protocol version {0} is not spoken here, only version {PROTOCOL_VERSION}")]
    Version(u16),
    /// The bytes were damaged in transit.
    #[error("the channel header is damaged: its checksum does not match")]
    Checksum,
    /// A kind of channel that this version does not know.
    #[error("channel kind {0} is unknown here")]
    Kind(u8),
    /// An index beyond the limit of its kind.
    #[error("channel index {index} is beyond the limit of {most} channels of its kind")]
    Index {
        /// The requested index.
        index: u16,
        /// The most channels of this kind.
        most: u16,
    },
    /// Incarnations are counted from 1.
    #[error("incarnation 0 does not exist")]
    Incarnation,
}

impl ChannelHeader {
    /// Makes a header with its proof.
    pub fn new(key: &MigrationKey, subject: &ProofSubject<'_>) -> Self {
        let ProofSubject { id, kind, index, incarnation, .. } = *subject;
        Self { id, kind, index, incarnation, proof: prove(key, subject) }
    }

    /// Returns whether the proof matches the migration's key and the TLS session (`exporter`, empty without TLS).
    pub fn belongs(&self, key: &MigrationKey, exporter: &[u8]) -> bool {
        let Self { id, kind, index, incarnation, proof } = self;
        let subject = ProofSubject { id: *id, kind: *kind, index: *index, incarnation: *incarnation, exporter };
        verify(key, &subject, proof)
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; CHANNEL_HEADER_LENGTH] {
        let mut bytes = [0; CHANNEL_HEADER_LENGTH];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        bytes[10] = self.kind as u8;
        bytes[12..14].copy_from_slice(&self.index.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[24..40].copy_from_slice(self.id.as_bytes());
        bytes[40..72].copy_from_slice(&self.proof);
        let checksum = crc32c(&bytes[..72]);
        bytes[72..76].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes a header. Its fields are well-formed afterwards, but not yet proved: see [`ChannelHeader::belongs`].
    pub fn decode(bytes: &[u8; CHANNEL_HEADER_LENGTH]) -> Result<Self, HeaderError> {
        if bytes[0..8] != MAGIC {
            return Err(HeaderError::Magic);
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != PROTOCOL_VERSION {
            return Err(HeaderError::Version(version));
        }
        if field::<4>(bytes, 72) != crc32c(&bytes[..72]).to_le_bytes() {
            return Err(HeaderError::Checksum);
        }
        let kind = ChannelKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[10]);
        let kind = kind.ok_or(HeaderError::Kind(bytes[10]))?;
        let index = u16::from_le_bytes(field(bytes, 12));
        if index >= kind.max_channels() {
            return Err(HeaderError::Index { index, most: kind.max_channels() });
        }
        let incarnation = u32::from_le_bytes(field(bytes, 16));
        if incarnation == 0 {
            return Err(HeaderError::Incarnation);
        }
        Ok(Self { id: MigrationId::from_bytes(field(bytes, 24)), kind, index, incarnation, proof: field(bytes, 40) })
    }
}

fn field<const N: usize>(bytes: &[u8; CHANNEL_HEADER_LENGTH], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the header's fields lie inside it")
}

/// Length of the fixed part of a [`ChannelReply`], in bytes.
pub const REPLY_PREFIX_LENGTH: usize = 4;

/// The reply to a channel header: `status u8 (0 accepted, 1 refused), again u8, length u16, reason`. `again` is 1 if
/// the same header may be accepted a little later; versions that do not know it read a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChannelReply {
    /// The channel may be used.
    Accepted,
    /// The channel may not be used, for this reason. The connection is closed after it.
    Refused(String),
    /// There is no room for the channel at the moment, for this reason: the same header may be accepted a little later.
    /// The connection is closed after it.
    Busy(String),
}

/// The peer's reply to a channel header is malformed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "the peer's answer to the channel header is not one (status {status}, length {length}): not a Sterna receiver?"
)]
pub struct BadReply {
    status: u8,
    length: u16,
}

impl ChannelReply {
    /// Encodes the reply.
    pub fn encode(&self) -> Vec<u8> {
        let (status, again, reason) = match self {
            Self::Accepted => (0, 0, String::new()),
            Self::Refused(reason) => (1, 0, crate::text::cleaned(reason)),
            Self::Busy(reason) => (1, 1, crate::text::cleaned(reason)),
        };
        let mut bytes = vec![status, again];
        bytes.extend_from_slice(&(reason.len() as u16).to_le_bytes());
        bytes.extend_from_slice(reason.as_bytes());
        bytes
    }

    /// Returns how many bytes of reason follow the fixed part.
    pub fn reason_length(prefix: [u8; REPLY_PREFIX_LENGTH]) -> Result<usize, BadReply> {
        let (status, length) = (prefix[0], u16::from_le_bytes([prefix[2], prefix[3]]));
        let possible = match status {
            0 => length == 0,
            1 => usize::from(length) <= MAX_TEXT,
            _ => false,
        };
        if possible { Ok(length.into()) } else { Err(BadReply { status, length }) }
    }

    /// Decodes the reply from its fixed part (already checked by [`ChannelReply::reason_length`]) and its reason.
    pub fn decode(prefix: [u8; REPLY_PREFIX_LENGTH], reason: &[u8]) -> Self {
        match prefix {
            [0, ..] => Self::Accepted,
            [_, 1, ..] => Self::Busy(cleaned_bytes(reason)),
            _ => Self::Refused(cleaned_bytes(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> ChannelHeader {
        let id = MigrationId::from_bytes([9; 16]);
        let key = MigrationKey::from_bytes([1; 32]);
        ChannelHeader::new(&key, &ProofSubject { id, kind: ChannelKind::Ram, index: 3, incarnation: 1, exporter: b"" })
    }

    /// Applies `change` and corrects the checksum, so that the later checks are reached.
    fn altered(change: impl FnOnce(&mut [u8; CHANNEL_HEADER_LENGTH])) -> [u8; CHANNEL_HEADER_LENGTH] {
        let mut bytes = header().encode();
        change(&mut bytes);
        let checksum = crc32c(&bytes[..72]);
        bytes[72..76].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn a_header_reads_back_what_was_written() {
        assert_eq!(ChannelHeader::decode(&header().encode()), Ok(header()));
        assert!(header().belongs(&MigrationKey::from_bytes([1; 32]), b""));
        assert!(!header().belongs(&MigrationKey::from_bytes([1; 32]), b"tls"));
    }

    #[test]
    fn every_wrong_field_is_refused_by_its_name() {
        let decode = |change: fn(&mut [u8; CHANNEL_HEADER_LENGTH])| ChannelHeader::decode(&altered(change));

        assert_eq!(decode(|b| b[0] = b'X'), Err(HeaderError::Magic));
        assert_eq!(decode(|b| b[8] = 2), Err(HeaderError::Version(2)));
        assert_eq!(decode(|b| b[10] = 77), Err(HeaderError::Kind(77)));
        assert_eq!(decode(|b| b[12] = 64), Err(HeaderError::Index { index: 64, most: 64 }));
        assert_eq!(decode(|b| b[16] = 0), Err(HeaderError::Incarnation));
    }

    #[test]
    fn any_single_flipped_bit_in_the_covered_part_is_noticed() {
        let good = header().encode();
        for bit in 0..72 * 8 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(ChannelHeader::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn replies_read_back_and_lies_about_their_length_are_refused() {
        for reply in [ChannelReply::Accepted, ChannelReply::Refused("no".into()), ChannelReply::Busy("later".into())] {
            let bytes = reply.encode();
            let prefix = bytes[..4].try_into().unwrap();
            assert_eq!(ChannelReply::reason_length(prefix), Ok(bytes.len() - 4));
            assert_eq!(ChannelReply::decode(prefix, &bytes[4..]), reply);
        }
        assert!(ChannelReply::reason_length([0, 0, 1, 0]).is_err());
        assert!(ChannelReply::reason_length([1, 0, 255, 255]).is_err());
        assert!(ChannelReply::reason_length([2, 0, 0, 0]).is_err());
    }
}
