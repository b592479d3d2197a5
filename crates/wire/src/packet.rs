//! Packets: the messages of every channel but the control channel.
//!
//! ```text
//!  0  magic u32 "STPK"      8  sequence u64       24  content length u32 (decoded)
//!  4  kind u8              16  table length u32   28  CRC-32C of the decoded content u32
//!  5  method u8            20  payload length u32 32  CRC-32C of header and table, u32 (taken as 0 in it)
//!  6  subject u16                                 36  reserved u32
//!                                                 40  detail u64
//! 48  table, then payload
//! ```
//! A page packet's table is a list of [`Run`]s; the content is the pages of its normal runs in the table's order. Each
//! packet decodes alone, and its pages all belong to one RAM block (`subject`), in ascending order. The checksum of
//! the content is that of the source's snapshot: it is exact although the guest goes on writing.

use crate::checksum::Crc32c;
use crate::limits::{MAX_CONTENT, MAX_NAME, MAX_RUNS};

/// Length of an encoded [`PacketHeader`], in bytes.
pub const PACKET_HEADER_LENGTH: usize = 48;
/// Length of an encoded [`Run`], in bytes.
pub const RUN_LENGTH: usize = 8;
/// Longest table of any packet, in bytes.
pub const MAX_TABLE: usize = MAX_RUNS * RUN_LENGTH;

const MAGIC: [u8; 4] = *b"STPK";
const HEADER_CHECKSUM_AT: usize = 32;

/// The kind of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PacketKind {
    /// Pages of the RAM block named by `subject`.
    Pages = 1,
    /// The end of generation `detail` on this channel: all its pages there have been sent. A page is sent at most once
    /// in a generation.
    GenerationEnd = 2,
    /// A record of the virtual machine's own stream: `subject` is its kind, the content is the record's.
    Stream = 3,
    /// A buffer of device state; the table names the device: see [`DeviceLabel`].
    DeviceState = 4,
    /// Bytes of an opaque connection, unchanged.
    Opaque = 5,
    /// The peer has closed its writing half of an opaque connection.
    OpaqueEnd = 6,
    /// Stale pages of the RAM block named by `subject`: the source has newer content than it sent before, so the
    /// receiver must discard them. The table is that of zero pages; there is no content.
    Discard = 7,
    /// Pages of the RAM block named by `subject`, as changes. The table is that of normal pages; see
    /// [`PageDeltas`](crate::delta::PageDeltas) for the content.
    Deltas = 8,
    /// Bytes of the state of device `subject`, as numbered in the hello. `detail` is the position among the packets of
    /// this and the next two kinds for the device, on all channels, from 0. There is no table.
    DeviceBuffer = 9,
    /// The end of the state of device `subject` that was saved while the guest runs, and is to be loaded before it is
    /// paused; at position `detail` among its buffers. There is no content.
    DeviceAhead = 10,
    /// The end of the state of device `subject`, at position `detail` behind its last buffer. There is no content.
    DeviceEnd = 11,
}

impl PacketKind {
    const ALL: [Self; 11] = [
        Self::Pages,
        Self::GenerationEnd,
        Self::Stream,
        Self::DeviceState,
        Self::Opaque,
        Self::OpaqueEnd,
        Self::Discard,
        Self::Deltas,
        Self::DeviceBuffer,
        Self::DeviceAhead,
        Self::DeviceEnd,
    ];
}

/// The fixed part of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketHeader {
    /// The kind of packet.
    pub kind: PacketKind,
    /// The number of the compression method of the payload (`sterna-codec` has the table); 0 is none.
    pub method: u8,
    /// The RAM block's index, the stream record's kind, or the device's number.
    pub subject: u16,
    /// Counted per channel from 1.
    pub sequence: u64,
    /// Bytes of table that follow the header.
    pub table_length: u32,
    /// Bytes of payload that follow the table.
    pub payload_length: u32,
    /// Bytes of the decoded content.
    pub content_length: u32,
    /// CRC-32C of the decoded content.
    pub content_checksum: u32,
    /// Further data, by kind: the generation of a [`PacketKind::GenerationEnd`], the position of a
    /// [`PacketKind::DeviceBuffer`].
    pub detail: u64,
}

/// Why a packet is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PacketError {
    /// The stream of packets is out of sync.
    #[error("what should be a packet does not begin like one: the channel is out of step")]
    Magic,
    /// An unknown kind.
    #[error("packet kind {0} is unknown here")]
    Kind(u8),
    /// Header or table were damaged.
    #[error("the packet's header is damaged: its checksum does not match")]
    HeaderChecksum,
    /// A length beyond its limit, detected before anything is reserved for it.
    #[error("the packet's {what} of {length} bytes is beyond the limit of {limit}")]
    TooLong {
        /// Which length.
        what: &'static str,
        /// Its value.
        length: u64,
        /// Its limit.
        limit: u64,
    },
    /// The table does not fit its kind.
    #[error("the packet's table is malformed: {0}")]
    Table(&'static str),
    /// A run outside its RAM block, or a block that does not exist.
    #[error("the packet has pages outside RAM: block {block}, page {page}, count {count}")]
    OutsideRam {
        /// The block's index.
        block: u16,
        /// The first page of the run.
        page: u64,
        /// The number of pages.
        count: u64,
    },
    /// Content and table contradict each other.
    #[error("the packet's content is {content} bytes, its table lists {table}")]
    ContentLength {
        /// Bytes according to the header.
        content: u64,
        /// Bytes according to the table.
        table: u64,
    },
}

impl PacketHeader {
    /// Encodes the header, with the checksum of itself and of `table`, which will follow.
    pub fn encode(&self, table: &[u8]) -> [u8; PACKET_HEADER_LENGTH] {
        debug_assert_eq!(self.table_length as usize, table.len());
        let mut bytes = [0; PACKET_HEADER_LENGTH];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = self.method;
        bytes[6..8].copy_from_slice(&self.subject.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.table_length.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.payload_length.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.content_length.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.content_checksum.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.detail.to_le_bytes());
        let checksum = header_checksum(&bytes, table);
        bytes[HEADER_CHECKSUM_AT..HEADER_CHECKSUM_AT + 4].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes a header. Its lengths may be used for reserving memory, but the table behind it is not checked yet: see
    /// [`PacketHeader::check_table`]. `content_limit` is the agreed packet size, in bytes.
    pub fn decode(bytes: &[u8; PACKET_HEADER_LENGTH], content_limit: usize) -> Result<Self, PacketError> {
        if bytes[0..4] != MAGIC {
            return Err(PacketError::Magic);
        }
        let kind = PacketKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[4]);
        let header = Self {
            kind: kind.ok_or(PacketError::Kind(bytes[4]))?,
            method: bytes[5],
            subject: u16::from_le_bytes(field(bytes, 6)),
            sequence: u64::from_le_bytes(field(bytes, 8)),
            table_length: u32::from_le_bytes(field(bytes, 16)),
            payload_length: u32::from_le_bytes(field(bytes, 20)),
            content_length: u32::from_le_bytes(field(bytes, 24)),
            content_checksum: u32::from_le_bytes(field(bytes, 28)),
            detail: u64::from_le_bytes(field(bytes, 40)),
        };
        let content_limit = content_limit.min(MAX_CONTENT);
        bounded("table", header.table_length, MAX_TABLE)?;
        bounded("content", header.content_length, content_limit)?;
        // Content that does not shrink is sent uncompressed, so a payload is never longer than its content.
        bounded("payload", header.payload_length, header.content_length as usize)?;
        Ok(header)
    }

    /// Checks header and table together against the header's checksum. `bytes` are those that the header was decoded
    /// from.
    pub fn check_table(bytes: &[u8; PACKET_HEADER_LENGTH], table: &[u8]) -> Result<(), PacketError> {
        if header_checksum(bytes, table).to_le_bytes() == field(bytes, HEADER_CHECKSUM_AT) {
            Ok(())
        } else {
            Err(PacketError::HeaderChecksum)
        }
    }
}

fn bounded(what: &'static str, length: u32, limit: usize) -> Result<(), PacketError> {
    if length as usize > limit {
        return Err(PacketError::TooLong { what, length: length.into(), limit: limit as u64 });
    }
    Ok(())
}

fn header_checksum(header: &[u8; PACKET_HEADER_LENGTH], table: &[u8]) -> u32 {
    let mut checksum = Crc32c::new();
    checksum.update(&header[..HEADER_CHECKSUM_AT]);
    checksum.update(&[0; 4]);
    checksum.update(&header[HEADER_CHECKSUM_AT + 4..]);
    checksum.update(table);
    checksum.finish()
}

fn field<const N: usize>(bytes: &[u8; PACKET_HEADER_LENGTH], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the header's fields lie inside it")
}

/// The kind of the pages of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RunKind {
    /// Their content is in the packet.
    Normal = 0,
    /// They are zero.
    Zero = 1,
}

/// Consecutive pages of the same kind: `kind` in the upper 4 bits, `count - 1` in the next 20, `first` in 40.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// What the pages are.
    pub kind: RunKind,
    /// The first page, counted from the start of the RAM block in the block's pages.
    pub first: u64,
    /// How many pages, 1 … [`Run::MAX_COUNT`].
    pub count: u32,
}

impl Run {
    /// Most pages in one run.
    pub const MAX_COUNT: u32 = 1 << 20;
    const FIRST_BITS: u32 = 40;
    const KIND_SHIFT: u32 = 60;

    /// Encodes the run.
    pub fn encode(&self) -> [u8; RUN_LENGTH] {
        debug_assert!(self.count >= 1 && self.count <= Self::MAX_COUNT && self.first >> Self::FIRST_BITS == 0);
        let count = u64::from(self.count - 1);
        let word = (self.kind as u64) << Self::KIND_SHIFT | count << Self::FIRST_BITS | self.first;
        word.to_le_bytes()
    }

    /// Decodes a run.
    pub fn decode(bytes: [u8; RUN_LENGTH]) -> Result<Self, PacketError> {
        let word = u64::from_le_bytes(bytes);
        let kind = match word >> Self::KIND_SHIFT {
            0 => RunKind::Normal,
            1 => RunKind::Zero,
            _ => return Err(PacketError::Table("a run of an unknown kind")),
        };
        let count = (word >> Self::FIRST_BITS) as u32 & (Self::MAX_COUNT - 1);
        Ok(Self { kind, first: word & ((1 << Self::FIRST_BITS) - 1), count: count + 1 })
    }

    /// Returns the page after the last.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// The shape of a RAM block, which a receiver needs for checking a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// Length in pages.
    pub pages: u64,
    /// Bytes in a page, a power of two.
    pub page_size: u32,
}

/// The checked page table of one packet. Reused from packet to packet.
#[derive(Debug, Default)]
pub struct PageTable {
    runs: Vec<Run>,
}

impl PageTable {
    /// Makes an empty table that will never need to grow.
    pub fn new() -> Self {
        Self { runs: Vec::with_capacity(MAX_RUNS) }
    }

    /// Parses `table` and checks that every page lies in the block, that pages ascend, and, except for deltas, that the
    /// content has the length of the normal runs.
    pub fn read(&mut self, header: &PacketHeader, table: &[u8], blocks: &[BlockShape]) -> Result<(), PacketError> {
        self.runs.clear();
        let (runs, rest) = table.as_chunks::<RUN_LENGTH>();
        if !rest.is_empty() || runs.is_empty() || runs.len() > MAX_RUNS {
            return Err(PacketError::Table("not a whole number of runs within the limit"));
        }
        let block = blocks.get(usize::from(header.subject));
        let mut normal_pages = 0;
        let mut next_free = 0;
        for run in runs {
            let run = Run::decode(*run)?;
            if block.is_none_or(|block| run.end() > block.pages) {
                let (page, count) = (run.first, run.count.into());
                return Err(PacketError::OutsideRam { block: header.subject, page, count });
            }
            if run.first < next_free {
                return Err(PacketError::Table("pages that do not ascend"));
            }
            next_free = run.end();
            if run.kind == RunKind::Normal {
                normal_pages += u64::from(run.count);
            }
            self.runs.push(run);
        }
        if header.kind == PacketKind::Deltas {
            // The length of each delta is in the content.
            let any_zero = self.runs.iter().any(|run| run.kind == RunKind::Zero);
            return if any_zero { Err(PacketError::Table("deltas of zero pages")) } else { Ok(()) };
        }
        let table = normal_pages * u64::from(block.map_or(0, |block| block.page_size));
        if table != u64::from(header.content_length) {
            return Err(PacketError::ContentLength { content: header.content_length.into(), table });
        }
        Ok(())
    }

    /// Returns the runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }
}

/// Length of an encoded [`PageRequest`], in bytes.
pub const PAGE_REQUEST_LENGTH: usize = 16;

/// A destination's request for pages, in post-copy or after it has refused a packet: `block u16`, reserved `u16`,
/// `count u32`, `first u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// The RAM block's index.
    pub block: u16,
    /// The first page, in the block's pages.
    pub first: u64,
    /// Number of pages; 0 ends the list of missing pages.
    pub count: u32,
}

impl PageRequest {
    /// Encodes the request.
    pub fn encode(&self) -> [u8; PAGE_REQUEST_LENGTH] {
        let mut bytes = [0; PAGE_REQUEST_LENGTH];
        bytes[0..2].copy_from_slice(&self.block.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.count.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.first.to_le_bytes());
        bytes
    }

    /// Decodes a request and checks that its pages are in RAM.
    pub fn decode(bytes: &[u8; PAGE_REQUEST_LENGTH], blocks: &[BlockShape]) -> Result<Self, PacketError> {
        let part = |at: usize, length: usize| &bytes[at..at + length];
        let block = u16::from_le_bytes(part(0, 2).try_into().expect("2 bytes"));
        let count = u32::from_le_bytes(part(4, 4).try_into().expect("4 bytes"));
        let first = u64::from_le_bytes(part(8, 8).try_into().expect("8 bytes"));
        let end = first.checked_add(count.into());
        if blocks.get(usize::from(block)).is_none_or(|shape| end.is_none_or(|end| end > shape.pages)) {
            return Err(PacketError::OutsideRam { block, page: first, count: count.into() });
        }
        Ok(Self { block, first, count })
    }
}

/// Identifies the device that a buffer of device state belongs to: `instance u32, name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLabel<'a> {
    /// The device's name, at most [`MAX_NAME`] bytes.
    pub name: &'a [u8],
    /// Which of several devices with this name.
    pub instance: u32,
}

impl<'a> DeviceLabel<'a> {
    /// Encodes the label, for a packet's table.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.instance.to_le_bytes().to_vec();
        bytes.extend_from_slice(self.name);
        bytes
    }

    /// Decodes a label.
    pub fn decode(table: &'a [u8]) -> Result<Self, PacketError> {
        let Some((instance, name)) = table.split_first_chunk() else {
            return Err(PacketError::Table("a device label without its instance"));
        };
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(PacketError::Table("a device name that is empty or too long"));
        }
        Ok(Self { name, instance: u32::from_le_bytes(*instance) })
    }
}

/// Length of an encoded [`Ack`], in bytes.
pub const ACK_LENGTH: usize = 16;
const ACK_MAGIC: [u8; 4] = *b"STAK";

/// The receiver's acknowledgement on a channel: everything up to and including `sequence` has been placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The last packet placed.
    pub sequence: u64,
    /// Microseconds since its last acknowledgement in which the receiver did something other than wait for bytes: lets
    /// a source determine whether the network or the receiver limits it. 0 from a receiver that does not report it.
    pub busy_us: u32,
}

/// The bytes are neither an acknowledgement nor a refusal.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("what should be an acknowledgement or a refusal does not begin like one: the channel is out of step")]
pub struct BadAck;

impl Ack {
    /// Encodes the acknowledgement: `magic u32 "STAK", busy u32 (microseconds), sequence u64`.
    pub fn encode(&self) -> [u8; ACK_LENGTH] {
        let mut bytes = [0; ACK_LENGTH];
        bytes[0..4].copy_from_slice(&ACK_MAGIC);
        bytes[4..8].copy_from_slice(&self.busy_us.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// Decodes an acknowledgement.
    pub fn decode(bytes: &[u8; ACK_LENGTH]) -> Result<Self, BadAck> {
        if bytes[0..4] != ACK_MAGIC {
            return Err(BadAck);
        }
        let busy_us = u32::from_le_bytes(bytes[4..8].try_into().expect("four bytes"));
        let sequence = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        Ok(Self { sequence, busy_us })
    }
}

const REFUSAL_MAGIC: [u8; 4] = *b"STRF";

/// The receiver's refusal, if both sides have agreed on it: the content of packet `sequence` differs from what the
/// source read from the guest. `requests` [`PageRequest`]s follow: its normal pages, which must be retransmitted. The
/// packet nevertheless counts as placed with the next acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The packet, not acknowledged yet.
    pub sequence: u64,
    /// How many requests follow, 1 to [`MAX_RUNS`].
    pub requests: u32,
}

impl Refusal {
    /// Encodes the refusal: `magic u32 "STRF", requests u32, sequence u64`.
    pub fn encode(&self) -> [u8; ACK_LENGTH] {
        let mut bytes = [0; ACK_LENGTH];
        bytes[0..4].copy_from_slice(&REFUSAL_MAGIC);
        bytes[4..8].copy_from_slice(&self.requests.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }
}

/// A message of the receiver of a packet channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelAnswer {
    /// Packets were placed.
    Placed(Ack),
    /// A packet was refused.
    Refused(Refusal),
}

impl ChannelAnswer {
    /// Decodes an answer; the requests of a refusal follow it.
    pub fn decode(bytes: &[u8; ACK_LENGTH]) -> Result<Self, BadAck> {
        if bytes[0..4] != REFUSAL_MAGIC {
            return Ack::decode(bytes).map(Self::Placed);
        }
        let requests = u32::from_le_bytes(bytes[4..8].try_into().expect("four bytes"));
        let sequence = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        if !(1..=MAX_RUNS as u32).contains(&requests) {
            return Err(BadAck);
        }
        Ok(Self::Refused(Refusal { sequence, requests }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCKS: &[BlockShape] = &[BlockShape { pages: 1000, page_size: 4096 }];

    fn header(table: &[u8], content: u32) -> PacketHeader {
        PacketHeader {
            kind: PacketKind::Pages,
            method: 0,
            subject: 0,
            sequence: 1,
            table_length: table.len() as u32,
            payload_length: content,
            content_length: content,
            content_checksum: 5,
            detail: 0,
        }
    }

    fn table(runs: &[Run]) -> Vec<u8> {
        runs.iter().flat_map(Run::encode).collect()
    }

    const fn normal(first: u64, count: u32) -> Run {
        Run { kind: RunKind::Normal, first, count }
    }

    const fn zero(first: u64, count: u32) -> Run {
        Run { kind: RunKind::Zero, first, count }
    }

    fn read(runs: &[Run], content: u32) -> Result<Vec<Run>, PacketError> {
        let table = table(runs);
        let mut pages = PageTable::new();
        pages.read(&header(&table, content), &table, BLOCKS)?;
        Ok(pages.runs().to_vec())
    }

    #[test]
    fn a_packet_reads_back_what_was_written() {
        let runs = [normal(3, 2), zero(5, 900)];
        let table = table(&runs);
        let header = header(&table, 8192);
        let bytes = header.encode(&table);

        assert_eq!(PacketHeader::decode(&bytes, 1 << 19), Ok(header));
        assert_eq!(PacketHeader::check_table(&bytes, &table), Ok(()));
        assert_eq!(read(&runs, 8192), Ok(runs.to_vec()));
    }

    #[test]
    fn pages_outside_the_block_or_in_no_block_are_refused() {
        assert!(matches!(read(&[zero(999, 2)], 0), Err(PacketError::OutsideRam { page: 999, .. })));
        let table = table(&[zero(0, 1)]);
        let elsewhere = PacketHeader { subject: 1, ..header(&table, 0) };
        let outcome = PageTable::new().read(&elsewhere, &table, BLOCKS);
        assert!(matches!(outcome, Err(PacketError::OutsideRam { block: 1, .. })));
    }

    #[test]
    fn tables_that_overlap_lie_or_are_cut_are_refused() {
        assert_eq!(read(&[zero(5, 2), zero(6, 1)], 0), Err(PacketError::Table("pages that do not ascend")));
        assert!(matches!(read(&[normal(5, 2)], 4096), Err(PacketError::ContentLength { .. })));
        assert!(read(&[], 0).is_err());
        let cut = &table(&[zero(5, 2)])[..7];
        assert!(PageTable::new().read(&header(cut, 0), cut, BLOCKS).is_err());
    }

    #[test]
    fn lengths_beyond_their_limits_are_refused_before_anything_is_reserved() {
        let refused = |header: PacketHeader| {
            let mut bytes = [0; PACKET_HEADER_LENGTH];
            bytes.copy_from_slice(&PacketHeader { table_length: 0, ..header }.encode(&[]));
            bytes[16..20].copy_from_slice(&header.table_length.to_le_bytes());
            matches!(PacketHeader::decode(&bytes, 8192), Err(PacketError::TooLong { .. }))
        };
        assert!(refused(PacketHeader { table_length: MAX_TABLE as u32 + 1, ..header(&[], 0) }));
        assert!(refused(header(&[], 8193)));
        assert!(refused(PacketHeader { payload_length: 4097, ..header(&[], 4096) }));
        assert!(!refused(header(&[], 8192)));
    }

    #[test]
    fn any_flipped_bit_in_header_or_table_is_noticed() {
        let table = table(&[normal(1, 1)]);
        let good = header(&table, 4096).encode(&table);
        for bit in 0..(good.len() + table.len()) * 8 {
            let (mut header, mut table) = (good, table.clone());
            let byte = bit / 8;
            if byte < header.len() { &mut header[byte] } else { &mut table[byte - good.len()] }.bitxor(bit % 8);
            assert!(PacketHeader::check_table(&header, &table).is_err(), "bit {bit}");
        }
    }

    trait BitXor {
        fn bitxor(&mut self, bit: usize);
    }
    impl BitXor for u8 {
        fn bitxor(&mut self, bit: usize) {
            *self ^= 1 << bit;
        }
    }

    #[test]
    fn device_labels_read_back_and_bad_ones_are_refused() {
        let label = DeviceLabel { name: b"0000:00:02.0/vfio", instance: 7 };
        assert_eq!(DeviceLabel::decode(&label.encode()), Ok(label));
        assert!(DeviceLabel::decode(&[0; 4]).is_err());
        assert!(DeviceLabel::decode(&[0; 3]).is_err());
        assert!(DeviceLabel::decode(&[0; 4 + MAX_NAME + 1]).is_err());
    }

    #[test]
    fn acks_read_back() {
        let ack = Ack { sequence: 1 << 40, busy_us: 1 << 20 };
        assert_eq!(Ack::decode(&ack.encode()), Ok(ack));
        assert_eq!(Ack::decode(&[0; ACK_LENGTH]), Err(BadAck));
    }

    #[test]
    fn requests_read_back_and_ask_for_nothing_outside_of_ram() {
        let blocks = [BlockShape { pages: 10, page_size: 4096 }, BlockShape { pages: 1 << 40, page_size: 4096 }];
        for request in [
            PageRequest { block: 0, first: 0, count: 10 },
            PageRequest { block: 1, first: (1 << 40) - 1, count: 1 },
            PageRequest { block: 0, first: 0, count: 0 },
        ] {
            assert_eq!(PageRequest::decode(&request.encode(), &blocks), Ok(request));
        }
        for request in [
            PageRequest { block: 0, first: 1, count: 10 },
            PageRequest { block: 2, first: 0, count: 0 },
            PageRequest { block: 1, first: u64::MAX, count: 2 },
        ] {
            let refused = PageRequest::decode(&request.encode(), &blocks).unwrap_err();
            assert!(matches!(refused, PacketError::OutsideRam { .. }), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn runs_read_back(first in 0u64..1 << 40, count in 1u32..=Run::MAX_COUNT, zero: bool) {
            let run = Run { kind: if zero { RunKind::Zero } else { RunKind::Normal }, first, count };
            prop_assert_eq!(Run::decode(run.encode()), Ok(run));
        }

        #[test]
        fn answers_read_back_and_nothing_else_is_one(sequence: u64, busy_us: u32, requests in 1..=MAX_RUNS as u32, bytes: [u8; ACK_LENGTH]) {
            let (placed, refused) = (Ack { sequence, busy_us }, Refusal { sequence, requests });
            prop_assert_eq!(ChannelAnswer::decode(&placed.encode()), Ok(ChannelAnswer::Placed(placed)));
            prop_assert_eq!(ChannelAnswer::decode(&refused.encode()), Ok(ChannelAnswer::Refused(refused)));
            for requests in [0, MAX_RUNS as u32 + 1, u32::MAX] {
                prop_assert_eq!(ChannelAnswer::decode(&Refusal { sequence, requests }.encode()), Err(BadAck));
            }
            let begins_like_one = bytes[0..4] == ACK_MAGIC || bytes[0..4] == REFUSAL_MAGIC;
            prop_assert!(begins_like_one || ChannelAnswer::decode(&bytes) == Err(BadAck));
        }

        #[test]
        fn no_bytes_make_the_reader_panic_or_accept_pages_outside(bytes: [u8; PACKET_HEADER_LENGTH], tail: Vec<u8>) {
            let mut bytes = bytes;
            bytes[0..4].copy_from_slice(&MAGIC);
            if let Ok(header) = PacketHeader::decode(&bytes, MAX_CONTENT) {
                let mut pages = PageTable::new();
                if pages.read(&header, &tail, BLOCKS).is_ok() {
                    prop_assert!(pages.runs().iter().all(|run| run.end() <= 1000));
                }
            }
        }
    }
}
