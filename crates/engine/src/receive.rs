//! The destination's channels: packets from the wire, checked and decoded, into a sink, acknowledged.
//!
//! One thread per channel does all of it in order: read a packet, check header and table, decode, compare the checksum, hand
//! pages to the sink, acknowledge. Where the sink has the memory that the content belongs to, it is read or decoded straight
//! there and compared afterwards; else it goes by way of a buffer that stays in the cache, and nothing is placed before it
//! was compared. Nothing is reserved for a length that was not bounded.

use std::io::{Read, Write};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use arrayvec::ArrayVec;
use sterna_codec::{CodecError, Decoder, Format};
use sterna_memory::raw::RawPiece;
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::PageDeltas;
use sterna_wire::device::Piece;
use sterna_wire::packet::{
    Ack, BlockShape, DeviceLabel, MAX_TABLE, PACKET_HEADER_LENGTH, PacketError, PacketHeader, PacketKind, PageRequest,
    PageTable, Refusal, Run, RunKind,
};
use sterna_wire::sequence::{OutOfSequence, ReceiveSequence};

use crate::off_cpu::OffCpu;
use crate::transport::{Reader, Writer};

/// What a sink reports when it cannot take what arrived.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// Most pieces of guest RAM that the content of one packet is written straight to. With more, each of them small, one read
/// into a buffer is faster than many into memory.
pub const MOST_PLACES: usize = 16;

/// The content of a packet, in the buffer of the thread that has received it.
#[derive(Debug)]
pub struct Content<'a> {
    /// Where it is, at the beginning. Whoever takes the buffer leaves another one of the same length.
    pub buffer: &'a mut Vec<u8>,
    /// Its bytes.
    pub length: usize,
}

impl Deref for Content<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

/// Pieces of guest RAM.
pub type Places<'a> = ArrayVec<RawPiece<'a>, MOST_PLACES>;

/// Where the packets of one channel go. Called by that channel's thread only, in the order of arrival. A sink has the
/// methods of what belongs on its channel; everything else is refused, which ends the migration.
pub trait Sink: Send {
    /// The RAM blocks, by index. Asked before the first page only.
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        misplaced("pages")
    }

    /// Where in guest RAM the content of the normal runs belongs, one piece for each, so that it can be written straight
    /// there; the zero runs are dealt with. None: the content is to be given to [`Sink::pages`]. Asked for packets with at
    /// most [`MOST_PLACES`] normal runs.
    ///
    /// What is written there is checked only afterwards. If it was damaged it is refused ([`Sink::refuse`]), or the channel fails, and
    /// with it the migration.
    fn places(&mut self, _block: u16, _runs: &[Run]) -> Result<Option<Places<'_>>, SinkError> {
        Ok(None)
    }

    /// What was given by [`Sink::places`] is written.
    fn placed(&mut self) {}

    /// Pages of `block`; `content` holds those of the normal runs. Returns when they are placed.
    fn pages(&mut self, _block: u16, _runs: &[Run], _content: &[u8]) -> Result<(), SinkError> {
        misplaced("pages")
    }

    /// The content of a packet with these pages of `block` is not what the source read from the guest, and may have been written
    /// where [`Sink::places`] said. True: the zero runs are dealt with, and the normal pages count as missing until they were sent
    /// again. False: the channel fails.
    fn refuse(&mut self, _block: u16, _runs: &[Run]) -> Result<bool, SinkError> {
        Ok(false)
    }

    /// What has changed in these pages of `block`. False: what results is not what the source has, and the packet is damaged.
    fn deltas(&mut self, _block: u16, _runs: &[Run], _deltas: PageDeltas<'_>) -> Result<bool, SinkError> {
        misplaced("deltas")
    }

    /// What was placed of these pages of `block` is old: it is given up.
    fn discard(&mut self, _block: u16, _runs: &[Run]) -> Result<(), SinkError> {
        misplaced("discards")
    }

    /// All of `generation` that travels on this channel has been handed to [`Sink::pages`].
    fn generation_end(&mut self, _generation: u64) -> Result<(), SinkError> {
        misplaced("the end of a generation")
    }

    /// A record of the virtual machine's own stream.
    fn stream(&mut self, _record: u16, _content: &[u8]) -> Result<(), SinkError> {
        misplaced("a stream record")
    }

    /// A piece of the state of device `device`, in its place among them.
    fn device(&mut self, _device: u16, _place: u64, _piece: Piece<Content<'_>>) -> Result<(), SinkError> {
        misplaced("device state")
    }

    /// A buffer of device state, as a QEMU sends it.
    fn device_state(&mut self, _device: DeviceLabel<'_>, _content: &[u8]) -> Result<(), SinkError> {
        misplaced("device state")
    }

    /// Bytes of an opaque connection; none: the peer has closed its writing half.
    fn opaque(&mut self, _content: &[u8]) -> Result<(), SinkError> {
        misplaced("opaque bytes")
    }
}

fn misplaced<T>(what: &str) -> Result<T, SinkError> {
    Err(format!("{what} on a channel that is not for it").into())
}

/// An acknowledgement may stand for so many packets of full size at most.
const MAX_WITHHELD: u64 = 8;

/// Why a channel of the destination failed. Nothing after the packet at fault was placed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The connection failed or fell silent within a packet.
    #[error("the source was lost: {0}")]
    Connection(#[from] std::io::Error),
    /// A malformed packet.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// A packet was lost or repeated.
    #[error(transparent)]
    Sequence(#[from] OutOfSequence),
    /// A method that this side does not have.
    #[error("packet {sequence} is compressed by method {method}, which is unknown here and was not agreed on")]
    Method {
        /// The packet's number.
        sequence: u64,
        /// The method's number.
        method: u8,
    },
    /// A payload that does not decode.
    #[error("packet {sequence} does not decode: {error}")]
    Decode {
        /// The packet's number.
        sequence: u64,
        /// What the decoder says.
        error: CodecError,
    },
    /// Decoded content that is not what the source read from the guest.
    #[error(
        "packet {0} was decoded twice and its content is not what the source read: the source's codec, its memory or \
         the network damaged it"
    )]
    Content(u64),
    /// The sink could not take it.
    #[error("packet {sequence}: {error}")]
    Sink {
        /// The packet's number.
        sequence: u64,
        /// What the sink says.
        error: SinkError,
    },
}

impl ReceiveError {
    /// Whether all of the packet has arrived, and its content is not what the source read.
    fn is_damage(&self) -> bool {
        matches!(self, Self::Decode { .. } | Self::Content(_))
    }
}

/// What arrived on a channel.
#[derive(Debug, Default)]
pub struct ReceiveCounters {
    /// The last packet placed.
    pub placed: AtomicU64,
    /// Bytes of content, decoded.
    pub content_bytes: AtomicU64,
    /// Pages with content that were placed, as often as they came.
    pub normal_pages: AtomicU64,
    /// Zero pages, likewise.
    pub zero_pages: AtomicU64,
    /// Packets that decoded wrongly once and rightly the second time.
    pub decoded_again: AtomicU64,
    /// Packets that were refused.
    pub refused: AtomicU64,
}

impl ReceiveCounters {
    fn placed_pages(&self, runs: &[Run]) {
        let pages = |kind| runs.iter().filter(|run| run.kind == kind).map(|run| u64::from(run.count)).sum();
        self.normal_pages.fetch_add(pages(RunKind::Normal), Ordering::Relaxed);
        self.zero_pages.fetch_add(pages(RunKind::Zero), Ordering::Relaxed);
    }
}

/// What the two sides agreed on about packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketRules {
    /// Most bytes of content in one.
    pub packet_size: usize,
    /// Whether their content is checked.
    pub checksums: bool,
}

/// Receives packets until the source closes the channel cleanly. Where there is a writer for them, packets are
/// acknowledged. Both halves stay open: what failed is to be told before the peer sees the channel's end, which says less.
pub fn receive_packets(
    reader: &mut Reader,
    acknowledgements: Option<&mut Writer>,
    sink: &mut dyn Sink,
    rules: PacketRules,
    counters: &ReceiveCounters,
) -> Result<(), ReceiveError> {
    let mut receiving = Receiving {
        reader,
        rules,
        counters,
        decoders: Decoders::default(),
        payload: vec![0; rules.packet_size],
        content: vec![0; rules.packet_size],
        waits: OffCpu::new(),
        answered: Instant::now(),
    };
    receiving.run(acknowledgements, sink)
}

/// The state of a receiving thread.
struct Receiving<'a> {
    reader: &'a mut Reader,
    rules: PacketRules,
    counters: &'a ReceiveCounters,
    decoders: Decoders,
    payload: Vec<u8>,
    content: Vec<u8>,
    /// The waits for bytes.
    waits: OffCpu,
    /// When packets were last acknowledged.
    answered: Instant,
}

impl Receiving<'_> {
    fn run(&mut self, mut acknowledgements: Option<&mut Writer>, sink: &mut dyn Sink) -> Result<(), ReceiveError> {
        let mut sequence = ReceiveSequence::default();
        let mut blocks = None;
        let mut pages = PageTable::new();
        let mut header_bytes = [0; PACKET_HEADER_LENGTH];
        let mut table_buffer = vec![0; MAX_TABLE];
        // Bytes of packets that were placed and are not acknowledged.
        let mut withheld = 0;

        while self.next_packet(&mut header_bytes)? {
            let header = PacketHeader::decode(&header_bytes, self.rules.packet_size)?;
            let table = &mut table_buffer[..header.table_length as usize];
            self.reader.read_exact(table)?;
            PacketHeader::check_table(&header_bytes, table)?;
            sequence.expect(header.sequence)?;
            if header.method == 0 && header.payload_length != header.content_length {
                let (content, table) = (header.content_length.into(), header.payload_length.into());
                return Err(PacketError::ContentLength { content, table }.into());
            }

            if matches!(header.kind, PacketKind::Pages | PacketKind::Deltas | PacketKind::Discard) {
                let blocks = match &blocks {
                    Some(blocks) => blocks,
                    None => blocks.insert(sink.blocks().map_err(|error| refused(&header, error))?),
                };
                pages.read(&header, table, blocks)?;
            }
            match header.kind {
                PacketKind::Pages | PacketKind::Deltas => {
                    match (self.pages(&header, pages.runs(), sink), &mut acknowledgements) {
                        (Err(damage), Some(writer)) if damage.is_damage() => {
                            let refuses = sink.refuse(header.subject, pages.runs());
                            if !refuses.map_err(|error| refused(&header, error))? {
                                return Err(damage);
                            }
                            tracing::warn!(%damage, "its pages are asked for again");
                            self.counters.refused.fetch_add(1, Ordering::Relaxed);
                            say_refusal(writer, &header, pages.runs())?;
                        }
                        (outcome, _) => {
                            outcome?;
                            self.counters.placed_pages(pages.runs());
                        }
                    }
                }
                _ => self.other(&header, table, pages.runs(), sink)?,
            }
            self.counters.content_bytes.fetch_add(header.content_length.into(), Ordering::Relaxed);
            self.counters.placed.store(sequence.placed(), Ordering::Release);
            if let Some(writer) = &mut acknowledgements {
                withheld += (PACKET_HEADER_LENGTH + table.len()) as u64 + u64::from(header.payload_length);
                if self.is_due(withheld) {
                    withheld = 0;
                    let ack = Ack { sequence: sequence.last(), busy_us: self.busy_us() };
                    writer.write_all(&ack.encode())?;
                }
            }
        }
        Ok(())
    }

    fn next_packet(&mut self, header: &mut [u8; PACKET_HEADER_LENGTH]) -> std::io::Result<bool> {
        let begun = OffCpu::begin();
        let begins = self.reader.read_packet_start(header);
        self.waits.end(begun);
        begins
    }

    /// Since the last acknowledgement, how long there was something to do here other than wait for bytes.
    fn busy_us(&mut self) -> u32 {
        let now = Instant::now();
        let busy = (now - std::mem::replace(&mut self.answered, now)).saturating_sub(self.waits.take());
        u32::try_from(busy.as_micros()).unwrap_or(u32::MAX)
    }

    /// Whether packets of `withheld` bytes are to be acknowledged now. To say it costs both sides a wake-up, so it waits while
    /// there is more to do here: another packet has arrived, and with it half as much as is withheld. So a source whose window
    /// is full is told while there is still a packet to be placed here, even if its window has room for two only, and whoever
    /// waits for the last acknowledgement gets it at once.
    fn is_due(&self, withheld: u64) -> bool {
        let packet = self.rules.packet_size as u64;
        withheld >= MAX_WITHHELD * packet || self.reader.arrived() < packet + withheld / 2
    }

    /// Straight to where it belongs if that is a few pieces of memory, else by way of a buffer.
    fn pages(&mut self, header: &PacketHeader, runs: &[Run], sink: &mut dyn Sink) -> Result<(), ReceiveError> {
        if header.kind == PacketKind::Deltas {
            let content = self.read_content(header)?;
            let deltas = PageDeltas::new(&content, runs.iter().map(|run| u64::from(run.count)).sum());
            let right = sink.deltas(header.subject, runs, deltas).map_err(|error| refused(header, error))?;
            return if right { Ok(()) } else { Err(ReceiveError::Content(header.sequence)) };
        }
        let normal = runs.iter().filter(|run| run.kind == RunKind::Normal).count();
        // A decoder writes one piece.
        let most = if header.method == 0 { MOST_PLACES } else { 1 };
        if normal <= most && self.straight(header, runs, sink)? {
            sink.placed();
            return Ok(());
        }
        let content = self.read_content(header)?;
        sink.pages(header.subject, runs, &content).map_err(|error| refused(header, error))
    }

    /// Writes the content where the sink says; false if it does not say.
    fn straight(&mut self, header: &PacketHeader, runs: &[Run], sink: &mut dyn Sink) -> Result<bool, ReceiveError> {
        let places = sink.places(header.subject, runs).map_err(|error| refused(header, error))?;
        let Some(mut places) = places else { return Ok(false) };
        debug_assert_eq!(places.iter().map(|place| place.len()).sum::<usize>(), header.content_length as usize);
        match (header.method, places.first_mut()) {
            (_, None) => {}
            (0, Some(_)) => self.read_straight(header, &mut places)?,
            (_, Some(place)) => {
                let begun = OffCpu::begin();
                self.reader.read_exact(&mut self.payload[..header.payload_length as usize])?;
                self.waits.end(begun);
                let checks = self.rules.checksums;
                self.decode(header, |decoder, payload| {
                    decoder.decode_into(payload, place.reborrow())?;
                    Ok(checks.then(|| place.crc32c(0)))
                })?;
            }
        }
        Ok(true)
    }

    fn read_straight(&mut self, header: &PacketHeader, places: &mut Places<'_>) -> Result<(), ReceiveError> {
        let mut checksum = 0;
        let begun = OffCpu::begin();
        for place in places {
            self.reader.read_piece(place.reborrow())?;
            if self.rules.checksums {
                checksum = place.crc32c(checksum);
            }
        }
        self.waits.end(begun);
        if self.rules.checksums && checksum != header.content_checksum {
            return Err(ReceiveError::Content(header.sequence));
        }
        Ok(())
    }

    /// Everything that is not pages.
    fn other(
        &mut self,
        header: &PacketHeader,
        table: &[u8],
        runs: &[Run],
        sink: &mut dyn Sink,
    ) -> Result<(), ReceiveError> {
        let content = self.read_content(header)?;
        let taken = match header.kind {
            PacketKind::Pages | PacketKind::Deltas => unreachable!("handled apart"),
            PacketKind::Discard if content.is_empty() => sink.discard(header.subject, runs),
            PacketKind::Discard => return Err(PacketError::Table("discards with content").into()),
            PacketKind::GenerationEnd => sink.generation_end(header.detail),
            PacketKind::Stream => sink.stream(header.subject, &content),
            PacketKind::DeviceState => sink.device_state(DeviceLabel::decode(table)?, &content),
            PacketKind::DeviceBuffer => sink.device(header.subject, header.detail, Piece::Bytes(content)),
            PacketKind::DeviceAhead if content.is_empty() => sink.device(header.subject, header.detail, Piece::Ahead),
            PacketKind::DeviceEnd if content.is_empty() => sink.device(header.subject, header.detail, Piece::End),
            PacketKind::DeviceAhead | PacketKind::DeviceEnd => {
                return Err(PacketError::Table("a mark in a device's state with content").into());
            }
            PacketKind::Opaque if content.is_empty() => {
                return Err(PacketError::Table("an opaque packet without content").into());
            }
            PacketKind::Opaque => sink.opaque(&content),
            PacketKind::OpaqueEnd => sink.opaque(&[]),
        };
        taken.map_err(|error| refused(header, error))
    }

    /// The content of a packet, decoded and checked.
    fn read_content(&mut self, header: &PacketHeader) -> Result<Content<'_>, ReceiveError> {
        let length = header.payload_length as usize;
        let begun = OffCpu::begin();
        self.reader.read_exact(&mut self.payload[..length])?;
        self.waits.end(begun);
        if header.method != 0 {
            let mut content = std::mem::take(&mut self.content);
            let (place, checks) = (&mut content[..header.content_length as usize], self.rules.checksums);
            let decoded = self.decode(header, |decoder, payload| {
                decoder.decode(payload, place)?;
                Ok(checks.then(|| crc32c(place)))
            });
            self.content = content;
            decoded?;
            return Ok(Content { buffer: &mut self.content, length: header.content_length as usize });
        }
        if self.rules.checksums && crc32c(&self.payload[..length]) != header.content_checksum {
            return Err(ReceiveError::Content(header.sequence));
        }
        Ok(Content { buffer: &mut self.payload, length })
    }

    /// Decodes the payload, and decodes once more if the content is not what the source read: right then means that this
    /// side's first decoding erred; wrong again, that the source's encoding did.
    fn decode(
        &mut self,
        header: &PacketHeader,
        mut decode: impl FnMut(&mut dyn Decoder, &[u8]) -> Result<Option<u32>, CodecError>,
    ) -> Result<(), ReceiveError> {
        let failed = |error| ReceiveError::Decode { sequence: header.sequence, error };
        let payload = &self.payload[..header.payload_length as usize];
        let format = Format::from_wire(header.method);
        let format = format.ok_or(ReceiveError::Method { sequence: header.sequence, method: header.method })?;
        let decoder = self.decoders.of(format).map_err(failed)?;
        for attempt in 0..2 {
            let checksum = decode(decoder, payload).map_err(failed)?;
            if checksum.is_none_or(|checksum| checksum == header.content_checksum) {
                self.counters.decoded_again.fetch_add(attempt, Ordering::Relaxed);
                return Ok(());
            }
        }
        Err(ReceiveError::Content(header.sequence))
    }
}

/// Asks for the normal pages of a packet again.
fn say_refusal(writer: &mut Writer, header: &PacketHeader, runs: &[Run]) -> std::io::Result<()> {
    let normal = || runs.iter().filter(|run| run.kind == RunKind::Normal);
    let refusal = Refusal { sequence: header.sequence, requests: normal().count() as u32 };
    let request = |run: &Run| PageRequest { block: header.subject, first: run.first, count: run.count }.encode();
    let mut bytes = refusal.encode().to_vec();
    bytes.extend(normal().flat_map(request));
    writer.write_all(&bytes)
}

fn refused(header: &PacketHeader, error: SinkError) -> ReceiveError {
    ReceiveError::Sink { sequence: header.sequence, error }
}

/// The decoders of one channel, each made when it is first needed.
#[derive(Default)]
struct Decoders(Vec<(Format, Box<dyn Decoder>)>);

impl Decoders {
    fn of(&mut self, format: Format) -> Result<&mut dyn Decoder, CodecError> {
        let position = match self.0.iter().position(|(known, _)| *known == format) {
            Some(position) => position,
            None => {
                self.0.push((format, format.decoder()?));
                self.0.len() - 1
            }
        };
        Ok(&mut *self.0[position].1)
    }
}
