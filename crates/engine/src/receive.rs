//! The destination's channels: packets from the wire, checked and decoded, into a sink, acknowledged.
//!
//! One thread per channel does all of it in order: read a packet, check header and table, decode into a staging buffer
//! that stays in the cache, compare the checksum, hand pages to the sink, acknowledge. Nothing that a peer sends is
//! placed before it was checked, and nothing is reserved for a length that was not bounded.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_codec::{CodecError, Decoder, Method};
use sterna_wire::checksum::crc32c;
use sterna_wire::packet::{
    Ack, BlockShape, DeviceLabel, MAX_TABLE, PACKET_HEADER_LENGTH, PacketError, PacketHeader, PacketKind, PageTable,
    Run,
};
use sterna_wire::sequence::{OutOfSequence, ReceiveSequence};

use crate::transport::{Reader, Writer};

/// What a sink reports when it cannot take what arrived.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// Where the packets of one channel go. Called by that channel's thread only, in the order of arrival. A sink has the
/// methods of what belongs on its channel; everything else is refused, which ends the migration.
pub trait Sink: Send {
    /// The RAM blocks, by index. Asked before the first page only.
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        misplaced("pages")
    }

    /// Pages of `block`; `content` holds those of the normal runs. Returns when they are placed.
    fn pages(&mut self, _block: u16, _runs: &[Run], _content: &[u8]) -> Result<(), SinkError> {
        misplaced("pages")
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

    /// A buffer of device state.
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

/// What arrived on a channel.
#[derive(Debug, Default)]
pub struct ReceiveCounters {
    /// The last packet placed.
    pub placed: AtomicU64,
    /// Bytes of content, decoded.
    pub content_bytes: AtomicU64,
    /// Packets that decoded wrongly once and rightly the second time.
    pub decoded_again: AtomicU64,
}

/// Receives packets until the source closes the channel cleanly. Where there is a writer for them, packets are acknowledged.
/// `packet_size` is the content limit agreed on.
pub fn receive_packets(
    mut reader: Reader,
    mut acknowledgements: Option<Writer>,
    sink: &mut dyn Sink,
    packet_size: usize,
    counters: &ReceiveCounters,
) -> Result<(), ReceiveError> {
    let mut decoders = Decoders::default();
    let mut sequence = ReceiveSequence::default();
    let mut blocks = None;
    let mut pages = PageTable::new();
    let mut header_bytes = [0; PACKET_HEADER_LENGTH];
    let mut table_buffer = vec![0; MAX_TABLE];
    let mut payload_buffer = vec![0; packet_size];
    let mut content_buffer = vec![0; packet_size];

    while reader.read_packet_start(&mut header_bytes)? {
        let header = PacketHeader::decode(&header_bytes, packet_size)?;
        let table = &mut table_buffer[..header.table_length as usize];
        let payload = &mut payload_buffer[..header.payload_length as usize];
        reader.read_exact(table)?;
        PacketHeader::check_table(&header_bytes, table)?;
        sequence.expect(header.sequence)?;
        reader.read_exact(payload)?;

        let content: &[u8] = if header.method == 0 {
            if header.payload_length != header.content_length {
                let (content, table) = (header.content_length.into(), header.payload_length.into());
                return Err(PacketError::ContentLength { content, table }.into());
            }
            if crc32c(payload) != header.content_checksum {
                return Err(ReceiveError::Content(header.sequence));
            }
            payload
        } else {
            let content = &mut content_buffer[..header.content_length as usize];
            decode_checked(&mut decoders, &header, payload, content, counters)?;
            content
        };

        let refused = |error| ReceiveError::Sink { sequence: header.sequence, error };
        match header.kind {
            PacketKind::Pages | PacketKind::Discard => {
                let blocks = match &blocks {
                    Some(blocks) => blocks,
                    None => blocks.insert(sink.blocks().map_err(refused)?),
                };
                pages.read(&header, table, blocks)?;
                match header.kind {
                    PacketKind::Pages => sink.pages(header.subject, pages.runs(), content).map_err(refused)?,
                    _ if content.is_empty() => sink.discard(header.subject, pages.runs()).map_err(refused)?,
                    _ => return Err(PacketError::Table("discards with content").into()),
                }
            }
            PacketKind::GenerationEnd => sink.generation_end(header.detail).map_err(refused)?,
            PacketKind::Stream => sink.stream(header.subject, content).map_err(refused)?,
            PacketKind::DeviceState => {
                sink.device_state(DeviceLabel::decode(table)?, content).map_err(refused)?;
            }
            PacketKind::Opaque if content.is_empty() => {
                return Err(PacketError::Table("an opaque packet without content").into());
            }
            PacketKind::Opaque => sink.opaque(content).map_err(refused)?,
            PacketKind::OpaqueEnd => sink.opaque(&[]).map_err(refused)?,
        }
        counters.content_bytes.fetch_add(content.len() as u64, Ordering::Relaxed);
        counters.placed.store(sequence.placed(), Ordering::Release);
        if let Some(writer) = &mut acknowledgements {
            writer.write_all(&Ack { sequence: sequence.last() }.encode())?;
        }
    }
    Ok(())
}

/// Decodes, and decodes once more if the content is not what the source read: right then means that this side's first
/// decoding erred; wrong again, that the source's encoding did.
fn decode_checked(
    decoders: &mut Decoders,
    header: &PacketHeader,
    payload: &[u8],
    content: &mut [u8],
    counters: &ReceiveCounters,
) -> Result<(), ReceiveError> {
    let failed = |error| ReceiveError::Decode { sequence: header.sequence, error };
    let method = Method::from_wire(header.method);
    let method = method.ok_or(ReceiveError::Method { sequence: header.sequence, method: header.method })?;
    let decoder = decoders.of(method).map_err(failed)?;
    for attempt in 0..2 {
        decoder.decode(payload, content).map_err(failed)?;
        if crc32c(content) == header.content_checksum {
            counters.decoded_again.fetch_add(attempt, Ordering::Relaxed);
            return Ok(());
        }
    }
    Err(ReceiveError::Content(header.sequence))
}

/// The decoders of one channel, each made when it is first needed.
#[derive(Default)]
struct Decoders(Vec<(Method, Box<dyn Decoder>)>);

impl Decoders {
    fn of(&mut self, method: Method) -> Result<&mut dyn Decoder, CodecError> {
        let position = match self.0.iter().position(|(known, _)| *known == method) {
            Some(position) => position,
            None => {
                self.0.push((method, method.decoder()?));
                self.0.len() - 1
            }
        };
        Ok(&mut *self.0[position].1)
    }
}
