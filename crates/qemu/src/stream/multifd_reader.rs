//! Reads the packets of one multifd channel of a source QEMU.
//!
//! A packet's header is read first, so that the caller can wait for room before it reads the content.

use std::io::{self, IoSliceMut, Read};

use super::StreamError;
use super::error::{printable, within};
use super::multifd::{
    AT_BLOCK_NAME, AT_DEVICE_INSTANCE, AT_DEVICE_LENGTH, AT_DEVICE_NAME, AT_FLAGS, AT_NORMAL_PAGES, AT_OFFSETS,
    AT_PACKET_NUM, AT_PAGES_ALLOC, AT_ZERO_PAGES, COMMON_LENGTH, COMPRESSION_MASK, DEVICE_STATE_LENGTH,
    FLAG_DEVICE_STATE, FLAG_SYNC, MultifdPacket, NAME_LENGTH, PacketKind, be32, be64, check_magic_and_version,
    check_page_size, header_length, pages_per_packet,
};

/// QEMU sends device state in buffers of at most 1 MiB and a configuration of some kilobytes.
const DEVICE_STATE_LIMIT: u64 = 16 << 20;
/// No guest has more RAM in one block: 48 bits of address.
const OFFSET_LIMIT: u64 = 1 << 48;

/// Reader of one channel, after its [`MultifdInit`](super::MultifdInit).
#[derive(Debug)]
pub struct MultifdReader<R> {
    reader: R,
    page_size: usize,
    /// A buffer for the longest header. A device state header is shorter: bytes read beyond it are content.
    header: Box<[u8]>,
    /// The bytes of `header` that are content and not yet handed out.
    surplus: std::ops::Range<usize>,
    /// Content bytes of the current packet that the caller has not read yet.
    payload_left: usize,
}

impl<R: Read> MultifdReader<R> {
    /// Continues a channel whose init packet has been read. `page_size` is the guest's, bytes.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] for a page size that QEMU cannot have.
    pub fn new(reader: R, page_size: usize) -> Result<Self, StreamError> {
        check_page_size(page_size)?;
        let header = vec![0; header_length(page_size)].into_boxed_slice();
        Ok(Self { reader, page_size, header, surplus: 0..0, payload_left: 0 })
    }

    /// Returns the underlying reader, for example to shut its socket down.
    #[must_use]
    pub fn get_ref(&self) -> &R {
        &self.reader
    }

    /// Returns the content bytes of the current packet that have not been read yet.
    #[must_use]
    pub fn payload_left(&self) -> usize {
        self.payload_left
    }

    /// Reads the next packet's header into `packet`. Offsets are checked to be whole pages below 2^48; the caller, which
    /// knows the blocks, must check that they lie inside their block.
    ///
    /// # Errors
    /// [`StreamError`]; the reader is unusable afterwards. [`StreamError::Misuse`] if content of the last packet was not
    /// read yet.
    pub fn read_header(&mut self, packet: &mut MultifdPacket) -> Result<PacketKind, StreamError> {
        const READING: &str = "multifd packet header";
        if self.payload_left > 0 {
            return Err(StreamError::Misuse("the packet before still has content to be read"));
        }
        clear(packet);
        // Bytes of this header may have been read with a short device state packet.
        let mut have = self.surplus.len();
        self.header.copy_within(self.surplus.clone(), 0);
        self.surplus = 0..0;
        let mut need = COMMON_LENGTH;
        let mut known = false;
        while have < need || !known {
            if have >= COMMON_LENGTH && !known {
                check_magic_and_version(&self.header)?;
                known = true;
                let device_state = be32(&self.header, AT_FLAGS) & FLAG_DEVICE_STATE != 0;
                need = if device_state { DEVICE_STATE_LENGTH } else { self.header.len() };
                continue;
            }
            match self.reader.read(&mut self.header[have..]) {
                Ok(0) if have == 0 => {
                    packet.kind = PacketKind::End;
                    return Ok(PacketKind::End);
                }
                Ok(0) => return Err(StreamError::Truncated { reading: READING }),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(StreamError::Io { doing: "reading a multifd channel", source }),
            }
        }
        self.surplus = need..have;
        if be32(&self.header, AT_FLAGS) & FLAG_DEVICE_STATE != 0 {
            self.device_state(packet)?;
        } else {
            self.ram(packet)?;
        }
        self.payload_left = packet.payload_len;
        Ok(packet.kind)
    }

    /// Reads content of the packet whose header came last: all of `into`, which may be a part of it.
    ///
    /// # Errors
    /// [`StreamError::Truncated`], [`StreamError::Io`]; [`StreamError::Misuse`] when more is asked for than is left.
    pub fn read_payload(&mut self, into: &mut [u8]) -> Result<(), StreamError> {
        self.read_payload_vectored(&mut [IoSliceMut::new(into)])
    }

    /// As [`read_payload`](Self::read_payload), scattered over several buffers.
    ///
    /// # Errors
    /// As [`read_payload`](Self::read_payload).
    pub fn read_payload_vectored(&mut self, mut into: &mut [IoSliceMut<'_>]) -> Result<(), StreamError> {
        let wanted: usize = into.iter().map(|s| s.len()).sum();
        if wanted > self.payload_left {
            return Err(StreamError::Misuse("more content asked for than the packet has"));
        }
        self.payload_left -= wanted;
        IoSliceMut::advance_slices(&mut into, 0);
        while !into.is_empty() {
            if !self.surplus.is_empty() {
                let slice = &mut into[0];
                let n = slice.len().min(self.surplus.len());
                slice[..n].copy_from_slice(&self.header[self.surplus.start..self.surplus.start + n]);
                self.surplus.start += n;
                IoSliceMut::advance_slices(&mut into, n);
                continue;
            }
            match self.reader.read_vectored(into) {
                Ok(0) => return Err(StreamError::Truncated { reading: "multifd packet content" }),
                Ok(n) => IoSliceMut::advance_slices(&mut into, n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(StreamError::Io { doing: "reading a multifd channel", source }),
            }
        }
        Ok(())
    }

    fn ram(&self, packet: &mut MultifdPacket) -> Result<(), StreamError> {
        let flags = be32(&self.header, AT_FLAGS);
        check_flags(flags)?;
        let room = pages_per_packet(self.page_size) as u64;
        let alloc = within("multifd pages_alloc", be32(&self.header, AT_PAGES_ALLOC).into(), room)?;
        let normal = within("multifd normal_pages", be32(&self.header, AT_NORMAL_PAGES).into(), alloc)?;
        // See the module documentation: a source that never uses this word leaves it 0.
        let zero = within("multifd zero_pages", be32(&self.header, AT_ZERO_PAGES).into(), alloc - normal)?;
        packet.kind = PacketKind::Ram;
        packet.sync = flags & FLAG_SYNC != 0;
        packet.packet_num = be64(&self.header, AT_PACKET_NUM);
        if normal + zero == 0 {
            return Ok(());
        }
        packet.name.push_str(name(&self.header[AT_BLOCK_NAME..AT_BLOCK_NAME + NAME_LENGTH])?);
        let offsets = self.header[AT_OFFSETS..].as_chunks::<8>().0.iter().map(|bytes| u64::from_be_bytes(*bytes));
        for (index, offset) in (0..normal + zero).zip(offsets) {
            if offset & (self.page_size as u64 - 1) != 0 {
                return Err(StreamError::Malformed(format!("multifd page at offset {offset:#x} is not a whole page")));
            }
            within("multifd page offset", offset, OFFSET_LIMIT - 1)?;
            if index < normal { packet.normal.push(offset) } else { packet.zero.push(offset) }
        }
        packet.payload_len = packet.normal.len() * self.page_size;
        Ok(())
    }

    fn device_state(&self, packet: &mut MultifdPacket) -> Result<(), StreamError> {
        let flags = be32(&self.header, AT_FLAGS);
        if flags != FLAG_DEVICE_STATE {
            return Err(StreamError::Malformed(format!("multifd device state packet with flags {flags:#x}")));
        }
        let length = within("device state length", be32(&self.header, AT_DEVICE_LENGTH).into(), DEVICE_STATE_LIMIT)?;
        if length == 0 {
            return Err(StreamError::Malformed("an empty multifd device state packet".into()));
        }
        packet.kind = PacketKind::DeviceState;
        packet.name.push_str(name(&self.header[AT_DEVICE_NAME..AT_DEVICE_NAME + NAME_LENGTH])?);
        packet.instance_id = be32(&self.header, AT_DEVICE_INSTANCE);
        packet.payload_len = usize::try_from(length).unwrap_or(usize::MAX);
        Ok(())
    }
}

fn clear(packet: &mut MultifdPacket) {
    packet.name.clear();
    packet.normal.clear();
    packet.zero.clear();
    (packet.sync, packet.packet_num, packet.instance_id, packet.payload_len) = (false, 0, 0, 0);
}

fn check_flags(flags: u32) -> Result<(), StreamError> {
    let method = match (flags & COMPRESSION_MASK) >> 1 {
        0 => {
            let unknown = flags & !(FLAG_SYNC | COMPRESSION_MASK);
            return match unknown {
                0 => Ok(()),
                _ => Err(StreamError::Malformed(format!("multifd packet with unknown flags {flags:#x}"))),
            };
        }
        1 => "zlib",
        2 => "zstd",
        4 => "qpl",
        8 => "uadk",
        16 => "qatzip",
        _ => "unknown",
    };
    Err(StreamError::refused(
        format!("multifd compression ({method})"),
        "set multifd-compression=none at the source QEMU and let Sterna compress",
    ))
}

/// The name in a field of 256 bytes, which a NUL must end.
fn name(field: &[u8]) -> Result<&str, StreamError> {
    let end = field
        .iter()
        .position(|&b| b == 0)
        .ok_or_else(|| StreamError::Malformed("a name in a multifd packet has no end".into()))?;
    printable("name in a multifd packet", &field[..end])
}
