//! The format of a multifd channel: the init packet, and the layout of the packets that follow.
//!
//! A packet is a header of fixed length with offsets for 512 KiB of pages, however many are used, and then the content of the
//! normal pages. Source: `migration/multifd.h`.

use std::io::{Read, Write};

use super::error::within;
use super::output::write_all_vectored;
use super::{MULTIFD_MAGIC, MULTIFD_VERSION, StreamError};

/// Length of the init packet, bytes.
pub const MULTIFD_INIT_LENGTH: usize = 64;

/// Content of one full packet, bytes; fixed in every QEMU.
const PACKET_CONTENT: usize = 512 * 1024;

pub(crate) const FLAG_SYNC: u32 = 1;
pub(crate) const COMPRESSION_MASK: u32 = 0x1f << 1;
pub(crate) const FLAG_DEVICE_STATE: u32 = 32 << 1;

// Offsets of the header's fields, bytes.
pub(crate) const AT_FLAGS: usize = 8;
pub(crate) const AT_PAGES_ALLOC: usize = 12;
pub(crate) const AT_NORMAL_PAGES: usize = 16;
pub(crate) const AT_NEXT_PACKET_SIZE: usize = 20;
pub(crate) const AT_PACKET_NUM: usize = 24;
pub(crate) const AT_ZERO_PAGES: usize = 32;
pub(crate) const AT_BLOCK_NAME: usize = 64;
pub(crate) const AT_OFFSETS: usize = 320;

/// Magic, version and flags: common to both kinds of packet and enough to tell them apart.
pub(crate) const COMMON_LENGTH: usize = 12;
/// Device state packet: 12 common, 256 name, instance, length.
pub(crate) const DEVICE_STATE_LENGTH: usize = 276;
pub(crate) const AT_DEVICE_NAME: usize = 12;
pub(crate) const AT_DEVICE_INSTANCE: usize = 268;
pub(crate) const AT_DEVICE_LENGTH: usize = 272;
pub(crate) const NAME_LENGTH: usize = 256;

/// Pages in one full packet: 128 for 4 KiB pages.
#[must_use]
pub fn pages_per_packet(page_size: usize) -> usize {
    PACKET_CONTENT / page_size
}

/// Length of a RAM packet's header, bytes: 1344 for 4 KiB pages.
pub(crate) fn header_length(page_size: usize) -> usize {
    AT_OFFSETS + 8 * pages_per_packet(page_size)
}

/// A guest page size that QEMU can have: a power of two from 1 KiB to 64 KiB.
pub(crate) fn check_page_size(page_size: usize) -> Result<(), StreamError> {
    if page_size.is_power_of_two() && (1024..=65536).contains(&page_size) {
        Ok(())
    } else {
        Err(StreamError::Misuse("the guest page size is not a power of two from 1 KiB to 64 KiB"))
    }
}

/// The first 64 bytes of a multifd channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultifdInit {
    /// The guest's UUID; zeros if it has none. The destination refuses any but its own.
    pub uuid: [u8; 16],
    /// Number of the channel, from 0.
    pub id: u8,
}

impl MultifdInit {
    /// Reads the init packet of one of `channels` channels.
    ///
    /// # Errors
    /// [`StreamError`]: wrong magic or version, a number that is not below `channels`, end of stream.
    pub fn read<R: Read>(mut reader: R, channels: u8) -> Result<Self, StreamError> {
        const READING: &str = "multifd init packet";
        let mut bytes = [0; MULTIFD_INIT_LENGTH];
        reader.read_exact(&mut bytes).map_err(|source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => StreamError::Truncated { reading: READING },
            _ => StreamError::Io { doing: "reading the multifd init packet", source },
        })?;
        check_magic_and_version(&bytes)?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[8..24]);
        let id = bytes[24];
        // QEMU itself accepts id == channels and then indexes past its array.
        if id >= channels {
            within("multifd channel number", id.into(), u64::from(channels).saturating_sub(1))?;
            return Err(StreamError::Malformed("a multifd channel where none was announced".into()));
        }
        Ok(Self { uuid, id })
    }

    /// Writes the init packet; to be done as soon as the channel is connected, because QEMU waits for it.
    ///
    /// # Errors
    /// [`StreamError::Io`].
    pub fn write<W: Write>(&self, mut writer: W) -> Result<(), StreamError> {
        let mut bytes = [0; MULTIFD_INIT_LENGTH];
        bytes[..4].copy_from_slice(&MULTIFD_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&MULTIFD_VERSION.to_be_bytes());
        bytes[8..24].copy_from_slice(&self.uuid);
        bytes[24] = self.id;
        write_all_vectored(&mut writer, &mut [std::io::IoSlice::new(&bytes)], "writing the multifd init packet")
    }
}

/// What a packet is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PacketKind {
    /// Pages of RAM, a SYNC, or (7.2) both.
    #[default]
    Ram,
    /// State of a device (QEMU from 10.0).
    DeviceState,
    /// The channel was closed between packets: the source has sent all.
    End,
}

/// A packet's header. Reused from packet to packet so that nothing is allocated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MultifdPacket {
    /// What the packet is; the fields below belong to one or the other.
    pub kind: PacketKind,
    /// RAM: after this packet's pages, and only after them, the channel waits for the main channel's sync point.
    pub sync: bool,
    /// RAM: number of the packet, for statistics only.
    pub packet_num: u64,
    /// RAM: name of the block that all pages are of, empty when there are none. Device state: the device's name.
    pub name: String,
    /// RAM: offset in the block of each page whose content follows, bytes.
    pub normal: Vec<u64>,
    /// RAM: offset in the block of each page of zeros, bytes.
    pub zero: Vec<u64>,
    /// Device state: instance number of the device.
    pub instance_id: u32,
    /// How many bytes follow: the normal pages in their order, or the device state.
    pub payload_len: usize,
}

pub(crate) fn check_magic_and_version(bytes: &[u8]) -> Result<(), StreamError> {
    let (magic, version) = (be32(bytes, 0), be32(bytes, 4));
    if magic != MULTIFD_MAGIC {
        let (found, expected) = (magic.into(), MULTIFD_MAGIC.into());
        return Err(StreamError::Unexpected { what: "multifd magic", found, expected });
    }
    if version != MULTIFD_VERSION {
        let (found, expected) = (version.into(), MULTIFD_VERSION.into());
        return Err(StreamError::Unexpected { what: "multifd version", found, expected });
    }
    Ok(())
}

/// A field of a header that has been read whole.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// As [`be32`].
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}
