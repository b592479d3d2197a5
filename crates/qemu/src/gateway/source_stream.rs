//! Reads the source QEMU's connections: one thread for the main channel, one for each multifd channel.
//!
//! Pages go into the pipeline, everything else to the stream channel. **Sync points** are a barrier among these readers
//! only. Between two sync points QEMU sends a page at most once, but the next generation of the page may come on another
//! channel. So a reader continues only after all readers have handed over everything before the sync point, which ends the generation.
//!
//! Without multifd there is one reader, and no sync points are needed.

use std::io::{self, IoSliceMut};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use sterna_engine::entry::{Entry, Pipeline};
use sterna_engine::item::Item;
use sterna_engine::send::SendChannel;
use sterna_engine::window::WindowClosed;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_wire::packet::{BlockShape, RunKind};

use super::layout::{self, MAX_START_BYTES, Prologue, Start, record};
use super::qemu::PAGE_SIZE;
use crate::stream::{
    Event, MainReader, MultifdPacket, MultifdReader, PacketKind, PageBatch, RamStart, SectionKind, StreamError,
};

/// Why a reader ended before the end of its stream.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReaderError {
    #[error("reading the source QEMU's stream: {0}")]
    Stream(#[from] StreamError),
    #[error(transparent)]
    Closed(#[from] WindowClosed),
    #[error("a multifd channel of the source QEMU spoke of a RAM block {0:?} that it did not announce")]
    UnknownBlock(String),
    #[error("a page at offset {offset:#x} lies outside RAM block {block}")]
    OutsideBlock { block: String, offset: u64 },
    #[error("the source QEMU closed its main channel before the end of RAM")]
    Ended,
}

/// The main reader's reports to the driver.
#[derive(Debug)]
pub(super) enum StreamNews {
    /// The RAM setup section has been read and handed on.
    Started {
        /// Bytes of all RAM blocks.
        ram: u64,
        /// Names of the blocks.
        blocks: Vec<String>,
        /// The machine type.
        machine: String,
    },
    /// All of RAM has been handed to the channels; the rest of the stream is opaque.
    RamEnd {
        /// When the last RAM section but one ended: until then the guest ran.
        last_round: Instant,
    },
    /// QEMU closed the main channel: its migration has completed or failed.
    Ended,
}

/// The sync points among the readers, and the gate before the first page.
#[derive(Debug)]
pub(super) struct SyncPoints {
    state: Mutex<SyncState>,
    changed: Condvar,
    readers: usize,
}

#[derive(Debug, Default)]
struct SyncState {
    blocks: Option<Arc<Blocks>>,
    open: bool,
    closed: bool,
    waiting: usize,
    generation: u64,
}

/// The RAM blocks as readers need them.
#[derive(Debug)]
struct Blocks {
    names: Vec<String>,
    lengths: Vec<u64>,
    page_size: usize,
}

impl SyncPoints {
    /// Creates the sync points for `readers` readers, including the main channel's.
    pub(super) fn new(readers: usize) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), readers }
    }

    /// Lets pages pass: the destination is ready.
    pub(super) fn open(&self) {
        self.state.lock().expect("readers do not panic").open = true;
        self.changed.notify_all();
    }

    /// Returns the shapes of the RAM blocks by block number; none if they are not known yet.
    pub(super) fn shapes(&self) -> Option<Vec<BlockShape>> {
        let state = self.state.lock().expect("readers do not panic");
        let Blocks { lengths, page_size, .. } = &**state.blocks.as_ref()?;
        let shape = |length: &u64| BlockShape { pages: length / *page_size as u64, page_size: *page_size as u32 };
        Some(lengths.iter().map(shape).collect())
    }

    /// Makes every waiting reader, and every later wait, fail.
    pub(super) fn close(&self) {
        self.state.lock().expect("readers do not panic").closed = true;
        self.changed.notify_all();
    }

    fn announce(&self, blocks: Blocks) -> Arc<Blocks> {
        let blocks = Arc::new(blocks);
        self.state.lock().expect("readers do not panic").blocks = Some(Arc::clone(&blocks));
        self.changed.notify_all();
        blocks
    }

    /// Waits until the blocks are known and the destination is ready for their pages.
    fn wait_open(&self) -> Result<Arc<Blocks>, WindowClosed> {
        let mut state = self.state.lock().expect("readers do not panic");
        loop {
            match &state.blocks {
                _ if state.closed => return Err(WindowClosed),
                Some(blocks) if state.open => return Ok(Arc::clone(blocks)),
                _ => state = self.changed.wait(state).expect("readers do not panic"),
            }
        }
    }

    /// Waits until all readers have come to the sync point. The last reader to come ends the generation.
    fn reach(&self, pipeline: &Pipeline) -> Result<(), WindowClosed> {
        let mut state = self.state.lock().expect("readers do not panic");
        state.waiting += 1;
        let generation = state.generation;
        if state.waiting == self.readers {
            // The other readers wait until the number changes, so none of their pages precedes the generation's end. The
            // lock is released meanwhile, because handing over may block and `close` must not.
            // The first sync point comes before the first page, and possibly before the destination is ready.
            while !state.open && !state.closed {
                state = self.changed.wait(state).expect("readers do not panic");
            }
            drop(state);
            pipeline.end_generation(generation + 1)?;
            let mut state = self.state.lock().expect("readers do not panic");
            state.waiting = 0;
            state.generation = generation + 1;
            drop(state);
            self.changed.notify_all();
            return Ok(());
        }
        while state.generation == generation && !state.closed {
            state = self.changed.wait(state).expect("readers do not panic");
        }
        if state.generation == generation { Err(WindowClosed) } else { Ok(()) }
    }

    /// Ends the last generation when the main channel has come to the end of RAM. Returns its number.
    fn finish(&self, pipeline: &Pipeline) -> Result<u64, WindowClosed> {
        let generation = self.state.lock().expect("readers do not panic").generation + 1;
        pipeline.end_generation(generation)?;
        Ok(generation)
    }
}

/// State that every reader needs.
#[derive(Debug)]
struct Common {
    entry: Entry,
    sync: Arc<SyncPoints>,
    ratio: NormalPageRatio,
    zeros: Vec<u8>,
}

impl Common {
    fn new(pipeline: &Arc<Pipeline>, sync: &Arc<SyncPoints>, ratio: NormalPageRatio) -> Self {
        let zeros = if ratio.is_none() { Vec::new() } else { vec![0; pipeline.page_size] };
        Self { entry: Entry::new(Arc::clone(pipeline)), sync: Arc::clone(sync), ratio, zeros }
    }

    fn zero_page(&mut self, block: u16, offset: u64) -> Result<(), WindowClosed> {
        if !self.ratio.takes_next() {
            return self.entry.zero_page(block, offset);
        }
        self.entry.enter(self.zeros.len() as u64)?;
        self.entry.page(block, offset, &self.zeros)
    }

    fn sync_point(&mut self) -> Result<(), WindowClosed> {
        self.entry.flush()?;
        self.sync.reach(self.entry.pipeline())
    }
}

/// Reads a multifd channel, after its init packet, until QEMU closes it.
pub(super) fn read_multifd(
    stream: UnixStream,
    pipeline: &Arc<Pipeline>,
    sync: &Arc<SyncPoints>,
    ratio: NormalPageRatio,
) -> Result<(), ReaderError> {
    let page_size = pipeline.page_size;
    let mut reader = MultifdReader::new(stream, page_size)?;
    let mut packet = MultifdPacket::default();
    let mut common = Common::new(pipeline, sync, ratio);
    let mut scratch = Scratch::default();
    let mut blocks = None;
    loop {
        match reader.read_header(&mut packet)? {
            PacketKind::End => return Ok(()),
            PacketKind::DeviceState => {
                let mut content = vec![0; packet.payload_len];
                reader.read_payload(&mut content)?;
                let (name, instance) = (packet.name.as_bytes().to_vec(), packet.instance_id);
                pipeline.channels[0].send(Item::DeviceState { name, instance, content })?;
            }
            PacketKind::Ram => {
                if !packet.normal.is_empty() || !packet.zero.is_empty() {
                    let blocks = match &blocks {
                        Some(blocks) => blocks,
                        None => blocks.insert(sync.wait_open()?),
                    };
                    let block = blocks.check(&packet)?;
                    read_pages(&mut reader, &packet, block, &mut common, &mut scratch)?;
                }
                if packet.sync {
                    common.sync_point()?;
                }
            }
        }
    }
}

impl Blocks {
    /// Returns the number of a packet's block, after checking that all pages lie inside the block.
    fn check(&self, packet: &MultifdPacket) -> Result<u16, ReaderError> {
        let position = self.names.iter().position(|name| *name == packet.name);
        let block = position.ok_or_else(|| ReaderError::UnknownBlock(packet.name.clone()))?;
        let outside = |offset: &&u64| **offset + self.page_size as u64 > self.lengths[block];
        match packet.normal.iter().chain(&packet.zero).find(outside) {
            Some(offset) => Err(ReaderError::OutsideBlock { block: packet.name.clone(), offset: *offset }),
            None => Ok(block as u16),
        }
    }
}

/// Maximum pages of a packet that are read straight into a batch. QEMU's packets have no more pages of 4 KiB.
const MAX_PAGES: usize = 128;

/// Buffers that a multifd reader reuses, so that a packet needs no allocation.
#[derive(Default)]
struct Scratch {
    /// The pages of a packet by ascending offset: offset, and position among the packet's normal pages (none: a zero page).
    pages: Vec<(u64, Option<usize>)>,
    bytes: Vec<u8>,
}

/// Hands over the pages of a packet: as one batch if all of them belong to one channel.
///
/// Since QEMU 9.0 the multifd threads themselves look for zero pages and move the normal pages of a packet to its front,
/// so a packet's offsets may not ascend. A batch accepts ascending pages only; without sorting, every few pages would need
/// a new batch.
fn read_pages(
    reader: &mut MultifdReader<UnixStream>,
    packet: &MultifdPacket,
    block: u16,
    common: &mut Common,
    scratch: &mut Scratch,
) -> Result<(), ReaderError> {
    let page_size = common.entry.pipeline().page_size;
    let length = packet.payload_len;
    // If tests have some zero pages sent as normal pages, all zero pages are handed over one by one.
    let zeros_singly = !common.ratio.is_none();
    let pages = &mut scratch.pages;
    pages.clear();
    pages.extend(packet.normal.iter().enumerate().map(|(position, offset)| (*offset, Some(position))));
    if zeros_singly {
        for offset in &packet.zero {
            common.zero_page(block, *offset)?;
        }
    } else {
        pages.extend(packet.zero.iter().map(|offset| (*offset, None)));
    }
    pages.sort_unstable_by_key(|(offset, _)| *offset);

    if length > 0 {
        common.entry.enter(length as u64)?;
    }
    let fits = length <= common.entry.pipeline().pool.capacity() && packet.normal.len() <= MAX_PAGES;
    match common.entry.common_channel(block, pages.iter().map(|(offset, _)| *offset)) {
        Some(channel) if fits => {
            let kind = |position: Option<usize>| if position.is_some() { RunKind::Normal } else { RunKind::Zero };
            let kinds = pages.iter().map(|(offset, position)| (*offset, kind(*position)));
            common.entry.bytes(channel, block, kinds, |content| read_into_places(reader, content, pages, page_size))?;
        }
        _ => {
            scratch.bytes.resize(length, 0);
            reader.read_payload(&mut scratch.bytes)?;
            for (offset, position) in pages {
                match position {
                    Some(position) => {
                        let page = &scratch.bytes[*position * page_size..][..page_size];
                        common.entry.page(block, *offset, page)?;
                    }
                    None => common.entry.zero_page(block, *offset)?,
                }
            }
        }
    }
    // No page waits here for further pages: QEMU counts these as sent, and may send no others.
    Ok(common.entry.flush()?)
}

/// Reads a packet's content, whose pages come in the packet's order, into `content` in the order of `pages`.
fn read_into_places(
    reader: &mut MultifdReader<UnixStream>,
    content: &mut [u8],
    pages: &[(u64, Option<usize>)],
    page_size: usize,
) -> Result<(), ReaderError> {
    let positions = pages.iter().filter_map(|(_, position)| *position);
    if positions.clone().enumerate().all(|(place, position)| place == position) {
        return Ok(reader.read_payload(content)?);
    }
    let mut places = [const { None }; MAX_PAGES];
    for (position, place) in positions.zip(content.chunks_exact_mut(page_size)) {
        places[position] = Some(place);
    }
    let mut slices = std::array::from_fn::<_, MAX_PAGES, _>(|_| IoSliceMut::new(&mut []));
    let mut count = 0;
    for place in places.into_iter().flatten() {
        slices[count] = IoSliceMut::new(place);
        count += 1;
    }
    Ok(reader.read_payload_vectored(&mut slices[..count])?)
}

/// What the main reader needs besides its socket.
#[derive(Debug)]
pub(super) struct MainContext {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) sync: Arc<SyncPoints>,
    pub(super) stream_channel: Arc<SendChannel>,
    pub(super) ratio: NormalPageRatio,
}

/// Reads the main channel to its end, after [`read_start`]. `news` is called on this thread.
pub(super) fn read_main(
    mut reader: MainReader<UnixStream>,
    start: &Start,
    context: MainContext,
    mut news: impl FnMut(StreamNews),
) -> Result<(), ReaderError> {
    let MainContext { pipeline, sync, stream_channel, ratio } = context;
    let multifd_channels = start.multifd_channels;
    let page_size = pipeline.page_size;
    let mut common = Common::new(&pipeline, &sync, ratio);
    let send = |record, content| stream_channel.send(Item::Stream { record, content });

    let blocks = sync.announce(Blocks::of(&start.ram, page_size));
    let (ram, machine) = (blocks.lengths.iter().sum(), start.configuration.machine.clone());
    send(record::START, start.encode())?;
    news(StreamNews::Started { ram, blocks: blocks.names.clone(), machine });
    let flush_is_sync_point = start.flush_in_setup;
    if multifd_channels > 0 {
        // The sync point of the setup section: each multifd channel has one SYNC for it.
        common.sync_point()?;
    }
    sync.wait_open()?;

    let mut buffer = vec![0; pipeline.pool.capacity()];
    let mut batch = PageBatch::default();
    let mut last_round = Instant::now();
    loop {
        let pages = reader.next_pages(&mut buffer, &mut batch)?;
        if pages > 0 {
            // Entered after reading: the amount is not known before, and the pages may take long to arrive.
            common.entry.enter((pages * page_size) as u64)?;
            for (offset, page) in batch.offsets.iter().zip(buffer.chunks_exact(page_size)) {
                common.entry.page(batch.block as u16, *offset, page)?;
            }
            continue;
        }
        match reader.next_event(&mut buffer)? {
            Event::Page { block, offset } => {
                common.entry.enter(page_size as u64)?;
                common.entry.page(block as u16, offset, &buffer[..page_size])?;
            }
            Event::ZeroPage { block, offset } => common.zero_page(block as u16, offset)?,
            Event::Flush if flush_is_sync_point && multifd_channels > 0 => common.sync_point()?,
            Event::Flush => common.entry.flush()?,
            Event::EndOfSection { .. } => {
                if !flush_is_sync_point && multifd_channels > 0 {
                    common.sync_point()?;
                } else {
                    common.entry.flush()?;
                }
                last_round = Instant::now();
            }
            Event::Command(command) if command.to_be_stripped() => {}
            Event::Command(command) => send(record::COMMAND, command.bytes)?,
            Event::DeviceSection(piece) => {
                for part in layout::encode_device_section(&piece, pipeline.pool.capacity()) {
                    send(record::DEVICE_SECTION, part)?;
                }
            }
            Event::RamEnd => break,
            unexpected => {
                return Err(StreamError::Malformed(format!("{} within the RAM sections", unexpected.name())).into());
            }
        }
    }
    common.entry.flush()?;
    let generation = sync.finish(&pipeline)?;
    send(record::RAM_END, generation.to_le_bytes().to_vec())?;
    news(StreamNews::RamEnd { last_round });

    loop {
        match reader.read_opaque(&mut buffer)? {
            0 => break,
            length => send(record::OPAQUE, buffer[..length].to_vec())?,
        }
    }
    send(record::END, Vec::new())?;
    news(StreamNews::Ended);
    Ok(())
}

/// Minimum bytes that an item before RAM is counted as: a short item takes more bytes in memory than on the wire.
const MIN_ITEM_BYTES: usize = 256;

/// Reads the main channel up to the end of the RAM setup section. By then QEMU has connected all multifd channels; the
/// caller fills in their number and the guest's UUID.
pub(super) fn read_start(reader: &mut MainReader<UnixStream>) -> Result<Start, ReaderError> {
    let mut configuration = None;
    let mut ram = None;
    let mut prologue = Vec::new();
    let mut prologue_bytes = 0;
    let mut page = [0; PAGE_SIZE];
    loop {
        match reader.next_event(&mut page)? {
            Event::Header | Event::Flush => {}
            Event::Configuration(section) => configuration = Some(section),
            // Refused here rather than when post-copy begins, which would cost the user minutes.
            Event::Command(command) if command.to_be_stripped() => {
                let advice = "turn the capability postcopy-ram off (with libvirt: leave out --postcopy)";
                return Err(StreamError::refused("post-copy", advice).into());
            }
            Event::Command(command) => {
                prologue_bytes += MIN_ITEM_BYTES.max(command.bytes.len());
                prologue.push(Prologue::Command(command));
            }
            Event::DeviceSection(piece) => {
                prologue_bytes += MIN_ITEM_BYTES.max(piece.bytes.len());
                prologue.push(Prologue::DeviceSection(piece));
            }
            Event::RamStart(start) => ram = Some(start),
            Event::EndOfSection { kind: SectionKind::Setup } => break,
            unexpected => {
                return Err(StreamError::Malformed(format!(
                    "{} before the RAM setup section's end",
                    unexpected.name()
                ))
                .into());
            }
        }
        if prologue_bytes > MAX_START_BYTES {
            let what = format!("more than {MAX_START_BYTES} bytes before the RAM setup section's end");
            return Err(StreamError::Malformed(what).into());
        }
    }
    let (Some(configuration), Some(ram)) = (configuration, ram) else { return Err(ReaderError::Ended) };
    let flush_in_setup = reader.setup_had_flush();
    Ok(Start { configuration, prologue, ram, ram_channels: 0, multifd_channels: 0, uuid: [0; 16], flush_in_setup })
}

impl Blocks {
    fn of(ram: &RamStart, page_size: usize) -> Self {
        Self {
            names: ram.blocks.iter().map(|block| block.name.clone()).collect(),
            lengths: ram.blocks.iter().map(|block| block.used_length).collect(),
            page_size,
        }
    }
}

/// Returns a function that shuts the socket down, which wakes its reader.
pub(super) fn closer(stream: &UnixStream) -> io::Result<impl Fn() + Send + 'static> {
    let stream = stream.try_clone()?;
    Ok(move || {
        // The other side may have closed it already.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    })
}
