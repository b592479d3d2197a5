//! Reads and writes QEMU's pre-copy migration stream.
//!
//! The source's gateway reads the source QEMU's main channel and multifd channels; the destination's gateway writes those of the
//! destination QEMU. Both are here, over any [`Read`](std::io::Read) and [`Write`](std::io::Write): no sockets, no threads, no clock.
//!
//! ```text
//! main channel     header · configuration · commands · RAM setup · RAM iterate … · RAM complete · opaque device state
//! multifd channel  64-byte init · packet(pages) … · packet(SYNC) · packet(pages) … · end of stream
//! return path      PONG, SWITCHOVER_ACK, SHUT; from the destination, on the main channel's socket
//! ```
//!
//! # What the readers learn from the stream itself
//!
//! The format differs by *machine type*, not by QEMU version, and `-global migration.…` may override even that. So the
//! readers do not depend on the machine type:
//!
//! * The RAM setup section shows whether synchronisation is per section or per round: an [`Event::Flush`] before its end means
//!   per round ([`MainReader::setup_had_flush`]).
//! * Zero pages in a multifd packet are counted in its header. A QEMU that never puts them there leaves the word 0
//!   (7.2 clears the whole packet when it is allocated), so reading it always is right and also covers a
//!   `zero-page-detection` set by hand on an old machine type.
//! * Page sizes in the block list (post-copy capability on) are recognised by their value: see [`RamStart`].
//! * `SWITCHOVER_START` is a command like others and is passed on when it comes.
//!
//! Only the writers need a [`WireVariant`]: the destination QEMU does not announce which format it expects.
//!
//! # The rule of SYNC
//!
//! A multifd channel of the destination stops after each SYNC packet until the main channel reaches its sync point, and
//! the main channel stops at the sync point until each channel has delivered one SYNC. So each channel must carry
//! **exactly one SYNC per sync point**. [`MainWriter::sync_points`] counts the points written,
//! [`MultifdWriter::sync_to`] brings a channel up to that count; using the two together keeps the rule.
//!
//! | sync point | machine ≤ 8.0 | machine ≥ 8.1 |
//! |---|---|---|
//! | setup | the setup section's end | FLUSH record in the setup section |
//! | change of generation | each iterate section's end | FLUSH record |
//! | complete | the complete section's end | FLUSH record (QEMU may omit it there; ours is always written) |
//!
//! A source without multifd shows no sync points; its pages come in order. Where its destination has multifd, the end of
//! each RAM section is the place for a [`MainWriter::generation_boundary`]: QEMU looks for newly written pages only between
//! sections, so no page comes twice in one.
//!
//! Sources: QEMU `migration/savevm.c`, `migration/ram.c`, `migration/multifd.c`, `migration/multifd-nocomp.c`,
//! `migration/migration.c`, `hw/vfio/migration.c`, releases 7.2 to 10.2.

mod blocks;
mod command;
mod configuration;
mod device;
mod error;
mod input;
mod main_reader;
mod main_writer;
mod multifd;
mod multifd_reader;
mod multifd_writer;
mod output;
mod return_path;
mod variant;

pub use blocks::{RamBlockInfo, RamStart};
pub use command::{Command, CommandKind};
pub use configuration::Configuration;
pub use device::DevicePiece;
pub use error::StreamError;
pub use main_reader::{Event, MainReader, PageBatch, SectionKind};
pub use main_writer::MainWriter;
pub use multifd::{MULTIFD_INIT_LENGTH, MultifdInit, MultifdPacket, PacketKind, pages_per_packet};
pub use multifd_reader::MultifdReader;
pub use multifd_writer::MultifdWriter;
pub use return_path::{ReturnMessage, ReturnPathReader};
pub use variant::WireVariant;

/// First word of the main channel, "QEVM".
pub(crate) const MAIN_MAGIC: u32 = 0x5145_564d;
/// The only main channel version since 2009.
pub(crate) const MAIN_VERSION: u32 = 3;
/// First word of a multifd channel and of each of its packets.
pub(crate) const MULTIFD_MAGIC: u32 = 0x1122_3344;
/// Version of the multifd init packet and of each packet.
pub(crate) const MULTIFD_VERSION: u32 = 1;

/// What a new connection from a source QEMU carries, by its first four bytes.
///
/// The same test that QEMU's destination makes since 8.0. A channel whose first bytes are encrypted, a post-copy preempt
/// channel, NBD and everything else is `Other`, whose bytes are not interpreted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelSniff {
    /// The main migration channel.
    Main,
    /// A multifd channel, starting with its init packet.
    Multifd,
    /// Something else, to be carried unread or refused.
    Other,
}

impl ChannelSniff {
    /// Returns the kind of the channel that starts with `first`.
    #[must_use]
    pub fn of(first: [u8; 4]) -> Self {
        match u32::from_be_bytes(first) {
            MAIN_MAGIC => Self::Main,
            MULTIFD_MAGIC => Self::Multifd,
            _ => Self::Other,
        }
    }
}
