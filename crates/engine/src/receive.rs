//! The destination's channels: packets from the wire are checked, decoded, handed to a sink and acknowledged.
//!
//! One thread per channel does all of it in order: read a packet, check header and table, decode, compare the checksum, hand
//! pages to the sink, acknowledge. Where the sink offers the memory of the pages, the content is read or decoded directly
//! there and compared afterwards. Otherwise it is received into a buffer that stays in the cache, and placed after it
//! was compared. No memory is reserved for a length that was not bounded.

pub mod placer;
mod sink;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use sterna_codec::{CodecError, Decoder, Format};
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::PageDeltas;
use sterna_wire::device::Piece;
use sterna_wire::packet::{
    Ack, DeviceLabel, MAX_TABLE, PACKET_HEADER_LENGTH, PacketError, PacketHeader, PacketKind, PageRequest, PageTable,
    Refusal, Run, RunKind,
};
use sterna_wire::sequence::{OutOfSequence, ReceiveSequence};

pub use self::sink::{
    ChannelSink, Content, DeviceBufferSink, DevicePieceSink, MAX_PLACES, OpaqueSink, PageSink, Places, SinkError,
    StreamSink,
};
use crate::cpu_time;
use crate::off_cpu::OffCpu;
use crate::transport::{Reader, Writer};

/// Maximum number of packets of full size that one acknowledgement covers.
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
        /// The decoder's error.
        error: CodecError,
    },
    /// Decoded content that is not what the source read from the guest.
    #[error(
        "packet {0} was decoded twice and its content is not what the source read: the source's codec, its memory or \
         the network damaged it"
    )]
    Content(u64),
    /// The sink could not handle the packet.
    #[error("packet {sequence}: {error}")]
    Sink {
        /// The packet's number.
        sequence: u64,
        /// The sink's error.
        error: SinkError,
    },
}

impl ReceiveError {
    /// Returns whether all of the packet has arrived, and its content is not what the source read.
    fn is_damage(&self) -> bool {
        matches!(self, Self::Decode { .. } | Self::Content(_))
    }
}

/// The counters of a channel.
#[derive(Debug, Default)]
pub struct ReceiveCounters {
    /// The last packet placed.
    pub placed: AtomicU64,
    /// Bytes of content, decoded.
    pub content_bytes: AtomicU64,
    /// Pages with content that were placed; a page that was sent several times counts each time.
    pub normal_pages: AtomicU64,
    /// Zero pages that were placed; likewise.
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
    /// Maximum bytes of content in a packet.
    pub packet_size: usize,
    /// Whether packets have checksums of their content.
    pub checksums: bool,
}

/// Receives packets until the source closes the channel cleanly, and acknowledges them on the writer, if there is one. Both halves stay
/// open, so that the caller can send the reason of a failure before the peer sees the channel's end.
pub fn receive_packets(
    reader: &mut Reader,
    acknowledgements: Option<&mut Writer>,
    sink: &mut ChannelSink,
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
        waits: OffCpu::new(cpu_time::may_open_files()),
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
    /// Measures the waits for bytes.
    waits: OffCpu,
    /// When packets were last acknowledged.
    answered: Instant,
}

impl Receiving<'_> {
    fn run(&mut self, mut acknowledgements: Option<&mut Writer>, sink: &mut ChannelSink) -> Result<(), ReceiveError> {
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
                    None => {
                        let shapes = sink.pages(header.kind).and_then(|sink| sink.blocks());
                        blocks.insert(shapes.map_err(|error| refused(&header, error))?)
                    }
                };
                pages.read(&header, table, blocks)?;
            }
            match header.kind {
                PacketKind::Pages | PacketKind::Deltas => {
                    let page_sink = sink.pages(header.kind).map_err(|error| refused(&header, error))?;
                    match (self.pages(&header, pages.runs(), page_sink), &mut acknowledgements) {
                        (Err(damage), Some(writer)) if damage.is_damage() => {
                            let refuses = page_sink.refuse(header.subject, pages.runs());
                            if !refuses.map_err(|error| refused(&header, error))? {
                                return Err(damage);
                            }
                            tracing::warn!(%damage, "a packet is refused, and its pages are requested again");
                            self.counters.refused.fetch_add(1, Ordering::Relaxed);
                            send_refusal(writer, &header, pages.runs())?;
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

    /// Returns how long this thread was busy since the last acknowledgement: all time except waits for bytes.
    fn busy_us(&mut self) -> u32 {
        let now = Instant::now();
        let busy = (now - std::mem::replace(&mut self.answered, now)).saturating_sub(self.waits.take());
        u32::try_from(busy.as_micros()).unwrap_or(u32::MAX)
    }

    /// Returns whether packets of `withheld` bytes are acknowledged now. An acknowledgement costs both sides a wake-up, so it waits while
    /// there is more to do here: another packet has arrived, and with it half as many bytes as are withheld. So a source whose window
    /// is full receives one while there is still a packet to be placed here, even if its window has room for two only; and the last
    /// acknowledgement is sent at once.
    fn is_due(&self, withheld: u64) -> bool {
        let packet = self.rules.packet_size as u64;
        withheld >= MAX_WITHHELD * packet || self.reader.arrived() < packet + withheld / 2
    }

    /// Places pages: directly in guest RAM if that is a few pieces of memory, else through a buffer.
    fn pages(&mut self, header: &PacketHeader, runs: &[Run], sink: &mut dyn PageSink) -> Result<(), ReceiveError> {
        if header.kind == PacketKind::Deltas {
            let content = self.read_content(header)?;
            let deltas = PageDeltas::new(&content, runs.iter().map(|run| u64::from(run.count)).sum());
            let right = sink.deltas(header.subject, runs, deltas).map_err(|error| refused(header, error))?;
            return if right { Ok(()) } else { Err(ReceiveError::Content(header.sequence)) };
        }
        let normal = runs.iter().filter(|run| run.kind == RunKind::Normal).count();
        // A decoder writes one piece.
        let most = if header.method == 0 { MAX_PLACES } else { 1 };
        if normal <= most && self.place_directly(header, runs, sink)? {
            sink.placed();
            return Ok(());
        }
        let content = self.read_content(header)?;
        sink.pages(header.subject, runs, &content).map_err(|error| refused(header, error))
    }

    /// Writes the content to the memory that the sink offers. Returns false if it offers none.
    fn place_directly(
        &mut self,
        header: &PacketHeader,
        runs: &[Run],
        sink: &mut dyn PageSink,
    ) -> Result<bool, ReceiveError> {
        let places = sink.places(header.subject, runs).map_err(|error| refused(header, error))?;
        let Some(mut places) = places else { return Ok(false) };
        debug_assert_eq!(places.iter().map(|place| place.len()).sum::<usize>(), header.content_length as usize);
        match (header.method, places.first_mut()) {
            (_, None) => {}
            (0, Some(_)) => self.read_directly(header, &mut places)?,
            (_, Some(place)) => {
                let begun = OffCpu::begin();
                self.reader.read_exact(&mut self.payload[..header.payload_length as usize])?;
                self.waits.end(begun);
                let checks = self.rules.checksums;
                self.decoders.decode(header, &self.payload, self.counters, |decoder, payload| {
                    decoder.decode_into(payload, place.reborrow())?;
                    Ok(checks.then(|| place.crc32c(0)))
                })?;
            }
        }
        Ok(true)
    }

    fn read_directly(&mut self, header: &PacketHeader, places: &mut Places<'_>) -> Result<(), ReceiveError> {
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

    /// Handles every packet that has no pages with content.
    fn other(
        &mut self,
        header: &PacketHeader,
        table: &[u8],
        runs: &[Run],
        sink: &mut ChannelSink,
    ) -> Result<(), ReceiveError> {
        let content = self.read_content(header)?;
        let (kind, subject, place) = (header.kind, header.subject, header.detail);
        let mut piece = |piece| sink.device_pieces(kind).and_then(|sink| sink.piece(subject, place, piece));
        let handled = match kind {
            PacketKind::Pages | PacketKind::Deltas => unreachable!("handled apart"),
            PacketKind::DeviceBuffer => piece(Piece::Bytes(content)),
            PacketKind::DeviceAhead if content.is_empty() => piece(Piece::Ahead),
            PacketKind::DeviceEnd if content.is_empty() => piece(Piece::End),
            PacketKind::Discard if content.is_empty() => sink.pages(kind).and_then(|sink| sink.discard(subject, runs)),
            PacketKind::Discard => return Err(PacketError::Table("discards with content").into()),
            PacketKind::GenerationEnd => sink.pages(kind).and_then(|sink| sink.generation_end(header.detail)),
            PacketKind::Stream => sink.stream(kind).and_then(|sink| sink.stream(subject, &content)),
            PacketKind::DeviceState => {
                let label = DeviceLabel::decode(table)?;
                sink.device_buffers(kind).and_then(|sink| sink.buffer(label, &content))
            }
            PacketKind::DeviceAhead | PacketKind::DeviceEnd => {
                return Err(PacketError::Table("a mark in a device's state with content").into());
            }
            PacketKind::Opaque if content.is_empty() => {
                return Err(PacketError::Table("an opaque packet without content").into());
            }
            PacketKind::Opaque => sink.opaque(kind).and_then(|sink| sink.opaque(&content)),
            PacketKind::OpaqueEnd => sink.opaque(kind).and_then(|sink| sink.opaque(&[])),
        };
        handled.map_err(|error| refused(header, error))
    }

    /// The content of a packet, decoded and checked.
    fn read_content(&mut self, header: &PacketHeader) -> Result<Content<'_>, ReceiveError> {
        let length = header.payload_length as usize;
        let begun = OffCpu::begin();
        self.reader.read_exact(&mut self.payload[..length])?;
        self.waits.end(begun);
        if header.method != 0 {
            let (place, checks) = (&mut self.content[..header.content_length as usize], self.rules.checksums);
            self.decoders.decode(header, &self.payload, self.counters, |decoder, payload| {
                decoder.decode(payload, place)?;
                Ok(checks.then(|| crc32c(place)))
            })?;
            return Ok(Content { buffer: &mut self.content, length: header.content_length as usize });
        }
        if self.rules.checksums && crc32c(&self.payload[..length]) != header.content_checksum {
            return Err(ReceiveError::Content(header.sequence));
        }
        Ok(Content { buffer: &mut self.payload, length })
    }
}

/// Asks for the normal pages of a packet again.
fn send_refusal(writer: &mut Writer, header: &PacketHeader, runs: &[Run]) -> std::io::Result<()> {
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
    /// Decodes the payload of a packet, at the beginning of `payload`, and decodes a second time if the content is not what the source
    /// read: right then means that this side's first decoding erred; wrong again, that the source's encoding did.
    fn decode(
        &mut self,
        header: &PacketHeader,
        payload: &[u8],
        counters: &ReceiveCounters,
        mut decode: impl FnMut(&mut dyn Decoder, &[u8]) -> Result<Option<u32>, CodecError>,
    ) -> Result<(), ReceiveError> {
        let failed = |error| ReceiveError::Decode { sequence: header.sequence, error };
        let payload = &payload[..header.payload_length as usize];
        let format = Format::from_wire(header.method);
        let format = format.ok_or(ReceiveError::Method { sequence: header.sequence, method: header.method })?;
        let decoder = self.of(format).map_err(failed)?;
        for attempt in 0..2 {
            let checksum = decode(decoder, payload).map_err(failed)?;
            if checksum.is_none_or(|checksum| checksum == header.content_checksum) {
                counters.decoded_again.fetch_add(attempt, Ordering::Relaxed);
                return Ok(());
            }
        }
        Err(ReceiveError::Content(header.sequence))
    }

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
