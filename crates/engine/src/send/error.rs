//! Why a channel of the source failed.

use std::io;

use sterna_codec::CodecError;
use sterna_memory::ram::RamError;
use sterna_wire::packet::{BadAck, PacketError};
use sterna_wire::sequence::BadAcknowledgement;

use crate::window::WindowClosed;

/// Why the sending thread of a channel failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] io::Error),
    /// The migration is being taken down.
    #[error(transparent)]
    Closed(#[from] WindowClosed),
    /// An encoder failed.
    #[error(transparent)]
    Encode(#[from] CodecError),
    /// Guest RAM that lies in another process cannot be read.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The destination requests pages that it cannot have refused.
    #[error(transparent)]
    PageNotInPacket(#[from] PageNotInPacket),
    /// Content that cannot be split, such as a record of the virtual machine's stream.
    #[error("{length} bytes that go in one packet do not fit one of {limit}; use a larger packet size")]
    TooLarge {
        /// Bytes of content.
        length: usize,
        /// Maximum bytes of content in a packet.
        limit: usize,
    },
}

/// Why the acknowledging thread of a channel failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// The connection failed or fell silent within a message.
    #[error(transparent)]
    Connection(#[from] io::Error),
    /// A message that is neither an acknowledgement nor a refusal.
    #[error(transparent)]
    Malformed(#[from] BadAck),
    /// An acknowledgement of packets that are not outstanding.
    #[error(transparent)]
    Acknowledgement(#[from] BadAcknowledgement),
    /// A refusal although the two sides have not agreed on refusals.
    #[error("it refuses a packet, which was not agreed on")]
    NotAgreed,
    /// A refusal of a packet that is not in flight.
    #[error("it refuses a packet that is not in flight")]
    NotInFlight,
    /// A request of pages that do not exist.
    #[error(transparent)]
    Request(#[from] PacketError),
    /// A request of more pages than the packet had: each costs time, and one request could name a whole guest.
    #[error("it requests again more pages than were in the packet that it refuses")]
    TooManyPages,
    /// More refusals than a migration survives.
    #[error(transparent)]
    TooManyRefused(#[from] TooManyRefused),
    /// The channel ended before everything was sent and acknowledged.
    #[error("it closed the channel before the end")]
    ClosedEarly,
}

/// Maximum number of packets of one migration that may be refused. A path or a host that damages more must not be trusted with a
/// guest, and a destination that refuses without end is faulty.
pub const MAX_REFUSED: u32 = 64;

/// The destination has refused more than [`MAX_REFUSED`] packets.
#[derive(Debug, thiserror::Error)]
#[error(
    "the destination has refused more than {MAX_REFUSED} packets, whose content is not what was read from the guest: an \
     accelerator, the memory or the network of one of the two hosts damages data"
)]
pub struct TooManyRefused;

/// The destination has refused a page that was not in the packet it names.
#[derive(Debug, thiserror::Error)]
#[error(
    "the destination requests again page {page} of RAM block {block}, which was not in the packet that it refuses; its sterna, or the \
     memory of one of the two hosts, is at fault"
)]
pub struct PageNotInPacket {
    /// The RAM block's index.
    pub block: u16,
    /// The page.
    pub page: u64,
}
