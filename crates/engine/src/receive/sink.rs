//! What a channel of the destination hands its packets to.
//!
//! Each kind of content has a trait of its own, and a channel has a sink for each kind that it carries ([`ChannelSink`]): a RAM channel for
//! pages, and for pieces of device state where these travel on RAM channels; the stream channel for records. A packet of any other kind is
//! refused, which ends the migration.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use arrayvec::ArrayVec;
use sterna_memory::raw::RawPiece;
use sterna_wire::delta::PageDeltas;
use sterna_wire::device::Piece;
use sterna_wire::packet::{BlockShape, DeviceLabel, PacketKind, Run};

/// Why a sink could not handle a packet.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// Maximum number of pieces of guest RAM that the content of one packet is written to directly. With more, smaller pieces, one read
/// into a buffer is faster than many into memory.
pub const MAX_PLACES: usize = 16;

/// The content of a packet, in the buffer of the thread that has received it.
#[derive(Debug)]
pub struct Content<'a> {
    /// The buffer that begins with the content. A sink that moves the buffer out must leave another one of the same length.
    pub buffer: &'a mut Vec<u8>,
    /// Length of the content in bytes.
    pub length: usize,
}

impl Deref for Content<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

/// Pieces of guest RAM.
pub type Places<'a> = ArrayVec<RawPiece<'a>, MAX_PLACES>;

/// The sinks of one channel, by what they accept. Called by that channel's thread only, in the order of arrival.
#[derive(Default)]
pub struct ChannelSink {
    pages: Option<Box<dyn PageSink>>,
    stream: Option<Box<dyn StreamSink>>,
    device_pieces: Option<Box<dyn DevicePieceSink>>,
    device_buffers: Option<Box<dyn DeviceBufferSink>>,
    opaque: Option<Box<dyn OpaqueSink>>,
}

impl fmt::Debug for ChannelSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelSink")
            .field("pages", &self.pages.is_some())
            .field("stream", &self.stream.is_some())
            .field("device_pieces", &self.device_pieces.is_some())
            .field("device_buffers", &self.device_buffers.is_some())
            .field("opaque", &self.opaque.is_some())
            .finish()
    }
}

impl ChannelSink {
    /// Makes a sink that refuses every packet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Passes pages to `sink`.
    pub fn with_pages(self, sink: impl PageSink + 'static) -> Self {
        Self { pages: Some(Box::new(sink)), ..self }
    }

    /// Passes records of the virtual machine's own stream to `sink`.
    pub fn with_stream(self, sink: impl StreamSink + 'static) -> Self {
        Self { stream: Some(Box::new(sink)), ..self }
    }

    /// Passes pieces of device state to `sink`; none where the channel carries none.
    pub fn with_device_pieces(self, sink: Option<impl DevicePieceSink + 'static>) -> Self {
        Self { device_pieces: sink.map(|sink| Box::new(sink) as Box<dyn DevicePieceSink>), ..self }
    }

    /// Passes buffers of device state, as a QEMU sends them, to `sink`.
    pub fn with_device_buffers(self, sink: impl DeviceBufferSink + 'static) -> Self {
        Self { device_buffers: Some(Box::new(sink)), ..self }
    }

    /// Passes the bytes of an opaque connection to `sink`.
    pub fn with_opaque(self, sink: impl OpaqueSink + 'static) -> Self {
        Self { opaque: Some(Box::new(sink)), ..self }
    }

    /// Returns the sink of pages, for a packet of this kind.
    pub(super) fn pages(&mut self, kind: PacketKind) -> Result<&mut (dyn PageSink + 'static), SinkError> {
        part(&mut self.pages, kind)
    }

    /// Returns the sink of the virtual machine's own stream, for a packet of this kind; likewise the following.
    pub(super) fn stream(&mut self, kind: PacketKind) -> Result<&mut (dyn StreamSink + 'static), SinkError> {
        part(&mut self.stream, kind)
    }

    pub(super) fn device_pieces(
        &mut self,
        kind: PacketKind,
    ) -> Result<&mut (dyn DevicePieceSink + 'static), SinkError> {
        part(&mut self.device_pieces, kind)
    }

    pub(super) fn device_buffers(
        &mut self,
        kind: PacketKind,
    ) -> Result<&mut (dyn DeviceBufferSink + 'static), SinkError> {
        part(&mut self.device_buffers, kind)
    }

    pub(super) fn opaque(&mut self, kind: PacketKind) -> Result<&mut (dyn OpaqueSink + 'static), SinkError> {
        part(&mut self.opaque, kind)
    }
}

/// Returns `sink`, or refuses a packet of this kind where the channel has none for it.
fn part<S: ?Sized>(sink: &mut Option<Box<S>>, kind: PacketKind) -> Result<&mut S, SinkError> {
    match sink {
        Some(sink) => Ok(sink),
        None => unexpected(kind),
    }
}

/// Refuses a packet of a kind that was not agreed on for its channel.
fn unexpected<T>(kind: PacketKind) -> Result<T, SinkError> {
    Err(format!("a packet of kind {kind:?} on a channel that is not for it").into())
}

/// Places the pages of one channel.
pub trait PageSink: Send {
    /// Returns the RAM blocks, by index. Called before the first page only.
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError>;

    /// Places pages of `block`; `content` holds those of the normal runs.
    fn pages(&mut self, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError>;

    /// Returns the guest RAM of the normal runs, one piece for each, so that the content can be written directly
    /// there; handles the zero runs itself. None: the content is passed to [`PageSink::pages`]. Called for packets with at
    /// most [`MAX_PLACES`] normal runs.
    ///
    /// The content is checked only after it was written. If it is damaged it is refused ([`PageSink::refuse`]), or the channel fails, and
    /// with it the migration.
    fn places(&mut self, _block: u16, _runs: &[Run]) -> Result<Option<Places<'_>>, SinkError> {
        Ok(None)
    }

    /// Called when the memory that [`PageSink::places`] returned is written.
    fn placed(&mut self) {}

    /// Refuses a packet with these pages of `block`: its content is not what the source read from the guest, and may have been written
    /// to the memory that [`PageSink::places`] returned. True: the zero runs are handled, and the normal pages count as missing until they
    /// were retransmitted. False: the channel fails.
    fn refuse(&mut self, _block: u16, _runs: &[Run]) -> Result<bool, SinkError> {
        Ok(false)
    }

    /// Applies deltas to these pages of `block`. False: the results are not the source's pages, so the packet is damaged. Refused unless
    /// implemented.
    fn deltas(&mut self, _block: u16, _runs: &[Run], _deltas: PageDeltas<'_>) -> Result<bool, SinkError> {
        unexpected(PacketKind::Deltas)
    }

    /// Discards the earlier content of these pages of `block`, as post-copy begins. Refused unless implemented.
    fn discard(&mut self, _block: u16, _runs: &[Run]) -> Result<(), SinkError> {
        unexpected(PacketKind::Discard)
    }

    /// Called when all pages of `generation` that take this channel have been handed to [`PageSink::pages`]. Refused unless implemented.
    fn generation_end(&mut self, _generation: u64) -> Result<(), SinkError> {
        unexpected(PacketKind::GenerationEnd)
    }
}

/// Handles records of the virtual machine's own stream.
pub trait StreamSink: Send {
    /// Handles a record of the kind `record`.
    fn stream(&mut self, record: u16, content: &[u8]) -> Result<(), SinkError>;
}

/// Handles pieces of device state.
pub trait DevicePieceSink: Send {
    /// Handles a piece of the state of device `device`, with its place among the device's pieces.
    fn piece(&mut self, device: u16, place: u64, piece: Piece<Content<'_>>) -> Result<(), SinkError>;
}

/// Handles buffers of device state, as a QEMU sends them.
pub trait DeviceBufferSink: Send {
    /// Handles a buffer of the state of `device`.
    fn buffer(&mut self, device: DeviceLabel<'_>, content: &[u8]) -> Result<(), SinkError>;
}

/// Handles the bytes of an opaque connection.
pub trait OpaqueSink: Send {
    /// Handles bytes; none: the peer has closed its writing half.
    fn opaque(&mut self, content: &[u8]) -> Result<(), SinkError>;
}
