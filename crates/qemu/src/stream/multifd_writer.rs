//! Writes the packets of one multifd channel to a destination QEMU.

use std::io::{IoSlice, Write};

use super::multifd::{
    AT_BLOCK_NAME, AT_DEVICE_INSTANCE, AT_DEVICE_LENGTH, AT_DEVICE_NAME, AT_FLAGS, AT_NEXT_PACKET_SIZE,
    AT_NORMAL_PAGES, AT_OFFSETS, AT_PACKET_NUM, AT_PAGES_ALLOC, AT_ZERO_PAGES, DEVICE_STATE_LENGTH, FLAG_DEVICE_STATE,
    FLAG_SYNC, NAME_LENGTH, check_page_size, header_length, pages_per_packet,
};
use super::output::write_all_vectored;
use super::{MULTIFD_MAGIC, MULTIFD_VERSION, StreamError, WireVariant};

const DOING: &str = "writing a multifd channel to QEMU";

/// Maximum number of slices of the caller's page data: a full packet of separate 4 KiB pages.
const SLICES: usize = 128;

/// Writer of one channel, after its [`MultifdInit`](super::MultifdInit).
#[derive(Debug)]
pub struct MultifdWriter<W> {
    writer: W,
    variant: WireVariant,
    page_size: usize,
    header: Box<[u8]>,
    packet_num: u64,
    syncs: u64,
}

impl<W: Write> MultifdWriter<W> {
    /// Continues a channel whose init packet has been written. `page_size` is the guest's, bytes.
    ///
    /// # Errors
    /// [`StreamError::Misuse`] for a page size that QEMU cannot have.
    pub fn new(writer: W, variant: WireVariant, page_size: usize) -> Result<Self, StreamError> {
        check_page_size(page_size)?;
        let mut header = vec![0; header_length(page_size)].into_boxed_slice();
        put32(&mut header, 0, MULTIFD_MAGIC);
        put32(&mut header, 4, MULTIFD_VERSION);
        put32(&mut header, AT_PAGES_ALLOC, count(pages_per_packet(page_size)));
        Ok(Self { writer, variant, page_size, header, packet_num: 0, syncs: 0 })
    }

    /// Returns the underlying writer, for example to shut its socket down.
    #[must_use]
    pub fn get_ref(&self) -> &W {
        &self.writer
    }

    /// Ends writing and returns the underlying writer.
    pub fn into_inner(self) -> W {
        self.writer
    }

    /// Returns how many SYNC packets were sent so far.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.syncs
    }

    /// Sends one packet of pages of one block: `normal` with their content in `data`, in the same order, then `zero`.
    /// Offsets are bytes in the block. `data` may be cut anywhere.
    ///
    /// # Errors
    /// [`StreamError::Io`]; [`StreamError::Misuse`] for no or too many pages, data of another length or in more than 128
    /// slices, an offset that is not a whole page, a name over 255 bytes, or zero pages to a destination that does not
    /// know them (they go to [`MainWriter::zero_pages`](super::MainWriter::zero_pages) then).
    pub fn pages(&mut self, block: &str, normal: &[u64], data: &[&[u8]], zero: &[u64]) -> Result<(), StreamError> {
        let pages = normal.len() + zero.len();
        if pages == 0 || pages > pages_per_packet(self.page_size) {
            return Err(StreamError::Misuse("a multifd packet has 1 to 512 KiB worth of pages"));
        }
        if !zero.is_empty() && !self.variant.zero_pages_in_packets() {
            return Err(StreamError::Misuse("this destination ignores zero pages in multifd packets"));
        }
        let length: usize = data.iter().map(|s| s.len()).sum();
        if length != normal.len() * self.page_size || data.len() > SLICES {
            return Err(StreamError::Misuse("page data does not have the length of its pages, or too many slices"));
        }
        for (slot, &offset) in
            self.header[AT_OFFSETS..].as_chunks_mut::<8>().0.iter_mut().zip(normal.iter().chain(zero))
        {
            if offset & (self.page_size as u64 - 1) != 0 {
                return Err(StreamError::Misuse("a page offset is not a whole page"));
            }
            *slot = offset.to_be_bytes();
        }
        put_name(&mut self.header[AT_BLOCK_NAME..AT_BLOCK_NAME + NAME_LENGTH], block)?;
        self.finish_header(0, normal.len(), zero.len());
        let mut slices = [IoSlice::new(&[]); SLICES + 1];
        slices[0] = IoSlice::new(&self.header);
        for (slice, part) in slices[1..].iter_mut().zip(data) {
            *slice = IoSlice::new(part);
        }
        write_all_vectored(&mut self.writer, &mut slices[..=data.len()], DOING)
    }

    /// Sends SYNC packets until the channel has carried `sync_points` of them, the main channel's count. Between two
    /// generations: after the last page of the one and before the first of the next.
    ///
    /// # Errors
    /// [`StreamError::Io`]; [`StreamError::Misuse`] when the channel has carried more than that already: the destination
    /// would wait for ever.
    pub fn sync_to(&mut self, sync_points: u64) -> Result<(), StreamError> {
        if self.syncs > sync_points {
            return Err(StreamError::Misuse("the channel has carried more SYNCs than there are sync points"));
        }
        while self.syncs < sync_points {
            // SYNC packets are empty, as since QEMU 9.0; older destinations accept them as well.
            self.finish_header(FLAG_SYNC, 0, 0);
            write_all_vectored(&mut self.writer, &mut [IoSlice::new(&self.header)], DOING)?;
            self.syncs += 1;
        }
        self.writer.flush().map_err(|source| StreamError::Io { doing: DOING, source })
    }

    /// Sends one packet of a device's state. Never run against a real device here.
    ///
    /// # Errors
    /// [`StreamError::Io`]; [`StreamError::Misuse`] for an empty or too long state, a name over 255 bytes, or a
    /// destination that does not know such packets.
    pub fn device_state(&mut self, name: &str, instance_id: u32, data: &[u8]) -> Result<(), StreamError> {
        if !self.variant.switchover_start() {
            return Err(StreamError::Misuse("this destination does not know device state in multifd packets"));
        }
        let length = match u32::try_from(data.len()) {
            Ok(length) if length > 0 => length,
            _ => return Err(StreamError::Misuse("device state is empty or longer than 4 GiB")),
        };
        let mut header = [0; DEVICE_STATE_LENGTH];
        put32(&mut header, 0, MULTIFD_MAGIC);
        put32(&mut header, 4, MULTIFD_VERSION);
        put32(&mut header, AT_FLAGS, FLAG_DEVICE_STATE);
        put_name(&mut header[AT_DEVICE_NAME..AT_DEVICE_NAME + NAME_LENGTH], name)?;
        put32(&mut header, AT_DEVICE_INSTANCE, instance_id);
        put32(&mut header, AT_DEVICE_LENGTH, length);
        write_all_vectored(&mut self.writer, &mut [IoSlice::new(&header), IoSlice::new(data)], DOING)
    }

    fn finish_header(&mut self, flags: u32, normal: usize, zero: usize) {
        put32(&mut self.header, AT_FLAGS, flags);
        put32(&mut self.header, AT_NORMAL_PAGES, count(normal));
        put32(&mut self.header, AT_NEXT_PACKET_SIZE, count(normal * self.page_size));
        self.header[AT_PACKET_NUM..AT_PACKET_NUM + 8].copy_from_slice(&self.packet_num.to_be_bytes());
        put32(&mut self.header, AT_ZERO_PAGES, count(zero));
        self.packet_num += 1;
    }
}

/// Page counts and packet lengths are at most 512 KiB.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// Writes a name to its field of 256 bytes, followed by NUL.
fn put_name(field: &mut [u8], name: &str) -> Result<(), StreamError> {
    if name.is_empty() || name.len() >= field.len() {
        return Err(StreamError::Misuse("a block or device name has 1 to 255 bytes"));
    }
    field.fill(0);
    field[..name.len()].copy_from_slice(name.as_bytes());
    Ok(())
}
