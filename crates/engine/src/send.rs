//! The source's channels: from a queue of batches to packets on the wire, and acknowledgements back.
//!
//! Each channel has two threads. The *sending* thread owns the queue's end, the encoder and the writing half of the
//! connection; it takes a batch, encodes it, and writes the packet. The *acknowledging* thread blocks in the reading
//! half and lets what was acknowledged leave the window. Packets are never waited for one by one: the window is the only
//! brake.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use sterna_codec::{Adaptive, Encoded, Encoder, MethodChoice};
use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_wire::checksum::crc32c;
use sterna_wire::limits::MAX_RUNS;
use sterna_wire::packet::{
    ACK_LENGTH, Ack, DeviceLabel, MAX_TABLE, PacketHeader, PacketKind, RUN_LENGTH, Run, RunKind,
};
use sterna_wire::sequence::SendSequence;

use crate::abort::Abort;
use crate::batch::{Batch, PooledBatch};
use crate::entry::Overtaken;
use crate::in_place;
use crate::pacer::Pacer;
use crate::reading::Reading;
use crate::receive::PacketRules;
use crate::transport::{Reader, Writer};
use crate::window::{Window, WindowClosed};

/// Batches that wait in a channel's queue. The window bounds bytes; this only has to keep the channel busy.
const QUEUE_LENGTH: usize = 16;

/// Zero pages that were read from guest RAM wait for others before they make a packet, up to this many: a packet of nothing
/// but its table costs a wake-up of the destination, and reading this much takes a few milliseconds.
const MOST_HELD_ZERO_PAGES: u64 = (64 << 20) / PAGE_SIZE as u64;

/// What is handed to a channel.
#[derive(Debug)]
pub enum Item {
    /// Pages.
    Pages(PooledBatch),
    /// Pages that are still to be read from guest RAM.
    Guest(GuestPages),
    /// Pages of which what was sent before is old, as zero runs.
    Discard(PooledBatch),
    /// All pages of this generation that go by this channel have been handed over.
    GenerationEnd(u64),
    /// A record of the virtual machine's own stream.
    Stream {
        /// What kind of record, as the two gateways agree.
        record: u16,
        /// Its bytes.
        content: Vec<u8>,
    },
    /// A buffer of device state.
    DeviceState {
        /// The device's name.
        name: Vec<u8>,
        /// Which of several devices with this name.
        instance: u32,
        /// The buffer.
        content: Vec<u8>,
    },
    /// Bytes of an opaque connection; none: its writing half was closed.
    Opaque(Vec<u8>),
}

/// Pages that are still to be read from guest RAM.
#[derive(Debug)]
pub struct GuestPages {
    /// The RAM.
    pub ram: GuestRam,
    /// Which pages, by normal runs without content.
    pub pages: PooledBatch,
    /// Those of them that need not be sent any more when their turn has come.
    pub overtaken: Option<Arc<Overtaken>>,
}

/// What went over a channel.
#[derive(Debug, Default)]
pub struct SendCounters {
    /// Normal pages.
    pub normal_pages: AtomicU64,
    /// Zero pages.
    pub zero_pages: AtomicU64,
    /// Bytes of content, before compression.
    pub content_bytes: AtomicU64,
    /// Bytes of packets, before TLS.
    pub packet_bytes: AtomicU64,
    /// Bytes on the wire.
    pub wire_bytes: AtomicU64,
    /// Packets whose content did not shrink and went raw.
    pub raw_packets: AtomicU64,
    /// Packets.
    pub packets: AtomicU64,
}

impl SendCounters {
    /// Pages of either kind.
    pub fn pages(&self) -> u64 {
        self.normal_pages.load(Ordering::Relaxed) + self.zero_pages.load(Ordering::Relaxed)
    }

    /// Bytes on the wire.
    pub fn wire(&self) -> u64 {
        self.wire_bytes.load(Ordering::Relaxed)
    }
}

/// What went over several channels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// Normal pages.
    pub normal_pages: u64,
    /// Zero pages.
    pub zero_pages: u64,
    /// Bytes of content, before compression.
    pub content_bytes: u64,
    /// Bytes of packets, before TLS.
    pub packet_bytes: u64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
}

impl std::ops::Add for Sent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            normal_pages: self.normal_pages + other.normal_pages,
            zero_pages: self.zero_pages + other.zero_pages,
            content_bytes: self.content_bytes + other.content_bytes,
            packet_bytes: self.packet_bytes + other.packet_bytes,
            wire_bytes: self.wire_bytes + other.wire_bytes,
        }
    }
}

impl Sent {
    /// The sum over `channels` so far.
    pub fn over<'a>(channels: impl IntoIterator<Item = &'a SendChannel>) -> Self {
        let mut sent = Self::default();
        for channel in channels {
            let counters = channel.counters();
            sent.normal_pages += counters.normal_pages.load(Ordering::Relaxed);
            sent.zero_pages += counters.zero_pages.load(Ordering::Relaxed);
            sent.content_bytes += counters.content_bytes.load(Ordering::Relaxed);
            sent.packet_bytes += counters.packet_bytes.load(Ordering::Relaxed);
            sent.wire_bytes += counters.wire_bytes.load(Ordering::Relaxed);
        }
        sent
    }

    /// Content bytes / packet bytes; 1 before anything was sent.
    pub fn ratio(&self) -> f64 {
        if self.packet_bytes > 0 { self.content_bytes as f64 / self.packet_bytes as f64 } else { 1.0 }
    }
}

#[derive(Debug, Default)]
struct Progress {
    sequence: SendSequence,
    /// Items of the queue all of whose packets are written.
    sent_items: u64,
    /// Window bytes of each packet not yet acknowledged, oldest first.
    in_flight: VecDeque<u64>,
    /// Nothing more will be sent: the peer may close the channel.
    finished: bool,
    ended: bool,
    /// Threads that wait for a change: waking costs a system call even where nobody waits.
    waiting: u32,
}

#[derive(Debug)]
struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
    counters: SendCounters,
}

/// What the channels of one migration have in common.
#[derive(Debug, Clone)]
pub struct SendContext {
    /// The window.
    pub window: Arc<Window>,
    /// The bandwidth limit.
    pub pacer: Arc<Pacer>,
    /// The alarm.
    pub abort: Arc<Abort>,
    /// How content is compressed.
    pub method: MethodChoice,
    /// What was agreed on with the peer.
    pub rules: PacketRules,
}

/// One channel of the source. Dropping it ends its queue; [`SendChannel::join`] waits for its threads.
#[derive(Debug)]
pub struct SendChannel {
    queue: SyncSender<Item>,
    shared: Arc<Shared>,
    handed_over: AtomicU64,
    threads: Vec<JoinHandle<()>>,
}

impl SendChannel {
    /// Starts the threads of a channel that the peer has accepted. `name` is for thread names and errors.
    pub fn start(name: &str, writer: Writer, reader: Reader, context: SendContext) -> io::Result<Self> {
        let (queue, items) = sync_channel(QUEUE_LENGTH);
        let shared =
            Arc::new(Shared { progress: Mutex::default(), changed: Condvar::new(), counters: SendCounters::default() });
        let abort = Arc::clone(&context.abort);
        let waker = Arc::clone(&shared);
        abort.on_end(move || waker.end());

        let sender = Sending::new(writer, Arc::clone(&shared), context.clone()).map_err(io::Error::other)?;
        let sending = {
            let (abort, name, shared) = (Arc::clone(&abort), name.to_owned(), Arc::clone(&shared));
            std::thread::Builder::new().name(format!("send-{name}")).spawn(move || {
                if let Err(error) = sender.run(&items, &shared) {
                    let reason = format!("channel {name}: sending failed: {error}");
                    if error.is::<io::Error>() {
                        abort.lost(reason)
                    } else {
                        abort.raise(reason)
                    };
                }
            })?
        };
        let acknowledging = {
            let (shared, window, name) = (Arc::clone(&shared), context.window, name.to_owned());
            std::thread::Builder::new().name(format!("ack-{name}")).spawn(move || {
                if let Err(error) = shared.take_acknowledgements(reader, &window) {
                    abort.lost(format_args!("channel {name}: the destination was lost: {error}"));
                }
                shared.end();
            })?
        };
        Ok(Self { queue, shared, handed_over: AtomicU64::new(0), threads: vec![sending, acknowledging] })
    }

    /// Hands `item` over; waits while the queue is full. Fails when the migration is being taken down.
    pub fn send(&self, item: Item) -> Result<(), WindowClosed> {
        self.handed_over.fetch_add(1, Ordering::Relaxed);
        self.queue.send(item).map_err(|_| WindowClosed)
    }

    /// Waits until everything that was handed over is acknowledged, and gives the last sequence number. Nobody hands
    /// anything over meanwhile.
    pub fn drained(&self) -> Result<u64, WindowClosed> {
        let expected = self.handed_over.load(Ordering::Relaxed);
        let is_done = |progress: &Progress| progress.sent_items == expected && progress.sequence.outstanding() == 0;
        let mut progress = self.shared.progress.lock().expect("no thread of the channel panics");
        while !progress.ended && !is_done(&progress) {
            progress.waiting += 1;
            progress = self.shared.changed.wait(progress).expect("no thread of the channel panics");
            progress.waiting -= 1;
        }
        if is_done(&progress) { Ok(progress.sequence.last()) } else { Err(WindowClosed) }
    }

    /// What went over the channel so far.
    pub fn counters(&self) -> &SendCounters {
        &self.shared.counters
    }

    /// Ends the queue and waits for the threads. The connection must have been closed, or the peer must close it.
    pub fn join(self) {
        drop(self.queue);
        for thread in self.threads {
            // A panic of a channel thread has already been printed; the migration was aborted by its closed connection.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn end(&self) {
        self.progress.lock().expect("no thread of the channel panics").ended = true;
        self.changed.notify_all();
    }

    /// All packets of `items` more items are written; none are left to be counted then.
    fn sent(&self, items: &mut u64) {
        if *items > 0 {
            let mut progress = self.progress.lock().expect("no thread of the channel panics");
            progress.sent_items += std::mem::take(items);
            self.wake(progress);
        }
    }

    fn wake(&self, progress: MutexGuard<'_, Progress>) {
        let waiting = progress.waiting;
        drop(progress);
        if waiting > 0 {
            self.changed.notify_all();
        }
    }

    fn take_acknowledgements(&self, mut reader: Reader, window: &Window) -> Result<(), Box<dyn std::error::Error>> {
        let mut bytes = [0; ACK_LENGTH];
        while reader.read_packet_start(&mut bytes)? {
            let ack = Ack::decode(&bytes)?;
            let mut released = 0;
            let mut progress = self.progress.lock().expect("no thread of the channel panics");
            let before = progress.sequence.acknowledged();
            progress.sequence.acknowledge(ack.sequence)?;
            for _ in before..ack.sequence {
                released += progress.in_flight.pop_front().unwrap_or(0);
            }
            self.wake(progress);
            if released > 0 {
                window.leave(released);
            }
        }
        let progress = self.progress.lock().expect("no thread of the channel panics");
        if progress.finished && progress.sequence.outstanding() == 0 {
            return Ok(());
        }
        Err("it closed the channel before the end".into())
    }
}

/// What a packet carries.
struct Content<'a> {
    bytes: &'a [u8],
    /// Its CRC-32C, where it is known already.
    checksum: Option<u32>,
    /// Bytes of the window that its acknowledgement frees.
    in_window: u64,
}

impl<'a> Content<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        Self { bytes, checksum: None, in_window: 0 }
    }
}

/// The state of a sending thread.
struct Sending {
    writer: Writer,
    shared: Arc<Shared>,
    context: SendContext,
    encoder: Adaptive,
    method: u8,
    encoded: Vec<u8>,
    table: Vec<u8>,
    /// Made when the first pages are to be read from guest RAM.
    reading: Option<Reading>,
    /// Pages that are read at once.
    piece: Vec<Run>,
    /// What of an item is still to be sent.
    left: Vec<Run>,
}

/// Runs, taken a number of pages at a time.
struct Piecewise<'a> {
    runs: &'a [Run],
    /// Pages of the first run that were taken.
    taken: u32,
}

impl<'a> Piecewise<'a> {
    fn new(runs: &'a [Run]) -> Self {
        Self { runs, taken: 0 }
    }

    /// Fills `piece` with the next runs, `pages` pages together at most; false at the end.
    fn next(&mut self, pages: u64, piece: &mut Vec<Run>) -> bool {
        piece.clear();
        let mut room = pages;
        while let Some(run) = self.runs.first().filter(|_| room > 0) {
            let count = u64::from(run.count - self.taken).min(room) as u32;
            piece.push(Run { first: run.first + u64::from(self.taken), count, ..*run });
            room -= u64::from(count);
            self.taken += count;
            if self.taken == run.count {
                self.runs = &self.runs[1..];
                self.taken = 0;
            }
        }
        !piece.is_empty()
    }
}

impl Sending {
    fn new(writer: Writer, shared: Arc<Shared>, context: SendContext) -> Result<Self, sterna_codec::CodecError> {
        let encoder = context.method.encoder()?;
        let method = context.method.method().wire();
        let encoded = vec![0; context.rules.packet_size];
        Ok(Self {
            writer,
            shared,
            context,
            encoder,
            method,
            encoded,
            table: Vec::with_capacity(MAX_TABLE),
            reading: None,
            piece: Vec::with_capacity(MAX_RUNS),
            left: Vec::with_capacity(MAX_RUNS),
        })
    }

    fn run(mut self, items: &Receiver<Item>, shared: &Shared) -> Result<(), Box<dyn std::error::Error>> {
        // Items whose last zero pages are still held.
        let mut unsent = 0;
        loop {
            let item = match items.try_recv() {
                Ok(item) => item,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    self.send_held()?;
                    shared.sent(&mut unsent);
                    let Ok(item) = items.recv() else { break };
                    item
                }
            };
            self.item(item)?;
            unsent += 1;
            if !self.holds() {
                shared.sent(&mut unsent);
            }
        }
        self.send_held()?;
        shared.sent(&mut unsent);
        // Before the writing half is closed by dropping it, so that the peer's closing in return is no surprise.
        shared.progress.lock().expect("no thread of the channel panics").finished = true;
        Ok(())
    }

    fn item(&mut self, item: Item) -> Result<(), Box<dyn std::error::Error>> {
        if let Item::Guest(wanted) = item {
            return self.guest(&wanted);
        }
        // Whatever it is, it comes after the pages before it.
        self.send_held()?;
        self.table.clear();
        match item {
            Item::Guest(..) => unreachable!("done above"),
            Item::Pages(batch) => self.pages(&batch, None),
            Item::Discard(batch) => {
                batch.runs().iter().for_each(|run| self.table.extend_from_slice(&run.encode()));
                self.packet(PacketKind::Discard, batch.block, 0, &Content::of(&[]))
            }
            Item::GenerationEnd(generation) => self.packet(PacketKind::GenerationEnd, 0, generation, &Content::of(&[])),
            Item::Stream { record, content } => self.packet(PacketKind::Stream, record, 0, &Content::of(&content)),
            Item::DeviceState { name, instance, content } => {
                self.table.extend_from_slice(&DeviceLabel { name: &name, instance }.encode());
                self.packet(PacketKind::DeviceState, 0, 0, &Content::of(&content))
            }
            Item::Opaque(content) if content.is_empty() => self.packet(PacketKind::OpaqueEnd, 0, 0, &Content::of(&[])),
            Item::Opaque(content) => self.packet(PacketKind::Opaque, 0, 0, &Content::of(&content)),
        }
    }

    /// Reads what `wanted` says from guest RAM, which the guest may be writing, and sends it. It is read here, by the
    /// thread that encodes and writes it, so that it stays in this core's cache and one buffer per channel is enough.
    ///
    /// Zero pages need no packet of their own: they are held back, and go with those that come next, of this item or of
    /// one that follows.
    fn guest(&mut self, wanted: &GuestPages) -> Result<(), Box<dyn std::error::Error>> {
        let GuestPages { ram, pages: wanted, overtaken } = wanted;
        let mut left = std::mem::take(&mut self.left);
        left.clear();
        match overtaken {
            Some(overtaken) => overtaken.leave(wanted.block, wanted.runs(), &mut left),
            None => left.extend_from_slice(wanted.runs()),
        }
        let sent = self.runs_of_guest(ram, wanted.block, &left);
        self.left = left;
        sent
    }

    fn runs_of_guest(&mut self, ram: &GuestRam, block: u16, runs: &[Run]) -> Result<(), Box<dyn std::error::Error>> {
        let packet_pages = (self.context.rules.packet_size / PAGE_SIZE) as u64;
        let mut reading = self.reading.take().unwrap_or_else(|| Reading::new(self.context.rules));
        let mut rest = Piecewise::new(runs);
        // A limit is kept by small pieces, which are easier cut from a copy.
        let in_place = self.method == 0
            && !self.context.rules.checksums
            && self.writer.passes_on()
            && (reading.in_place().is_some() || self.context.pacer.limit().is_none());
        while rest.next(packet_pages, &mut self.piece) {
            if !reading.takes(block, &self.piece) {
                self.pages_read(&mut reading)?;
                reading.begin(block);
            }
            let asked = self.piece.iter().map(|run| u64::from(run.count)).sum::<u64>() * PAGE_SIZE as u64;
            // What is in flight is counted from here, because from here on it grows old. Nothing is held while waiting.
            if !self.context.window.try_enter(asked)? {
                self.pages_read(&mut reading)?;
                reading.begin(block);
                self.context.window.enter(asked)?;
            }
            if in_place {
                reading.look(ram, &self.piece);
            } else {
                reading.read(ram, &self.piece);
            }
            self.context.window.give_back(asked - reading.batch().in_window());
            if reading.batch().in_window() > 0 || reading.batch().pages() >= MOST_HELD_ZERO_PAGES {
                self.pages_read(&mut reading)?;
            }
        }
        self.reading = Some(reading);
        Ok(())
    }

    /// Whether zero pages wait for others.
    fn holds(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| !reading.batch().is_empty())
    }

    /// Sends the zero pages that wait for others.
    fn send_held(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let Some(mut reading) = self.reading.take() else { return Ok(()) };
        let sent = self.pages_read(&mut reading);
        self.reading = Some(reading);
        sent
    }

    /// Sends what `reading` has, which is empty then.
    fn pages_read(&mut self, reading: &mut Reading) -> Result<(), Box<dyn std::error::Error>> {
        if !reading.batch().is_empty() {
            self.pages(reading.batch(), reading.in_place())?;
            reading.begin(reading.batch().block);
        }
        Ok(())
    }

    /// Sends `batch`. Its content lies in `in_place`, if that is given.
    fn pages(&mut self, batch: &Batch, in_place: Option<&RamBlock>) -> Result<(), Box<dyn std::error::Error>> {
        self.table.clear();
        let (mut normal, mut zero) = (0, 0);
        for run in batch.runs() {
            self.table.extend_from_slice(&Run::encode(run));
            match run.kind {
                RunKind::Normal => normal += u64::from(run.count),
                RunKind::Zero => zero += u64::from(run.count),
            }
        }
        debug_assert_eq!(self.table.len(), batch.runs().len() * RUN_LENGTH);
        let counters = &self.shared.counters;
        counters.normal_pages.fetch_add(normal, Ordering::Relaxed);
        counters.zero_pages.fetch_add(zero, Ordering::Relaxed);
        let in_window = batch.in_window();
        if let Some(block) = in_place {
            let header = PacketHeader {
                kind: PacketKind::Pages,
                method: 0,
                subject: batch.block,
                sequence: self.next_sequence(in_window),
                table_length: self.table.len() as u32,
                payload_length: in_window as u32,
                content_length: in_window as u32,
                content_checksum: 0,
                detail: 0,
            };
            let header = header.encode(&self.table);
            in_place::write(&mut self.writer, &header, &self.table, block, batch.runs())?;
            self.count(in_window, (header.len() + self.table.len()) as u64 + in_window);
            return Ok(());
        }
        let content = Content { bytes: batch.content(), checksum: batch.checksum(), in_window };
        self.packet(PacketKind::Pages, batch.block, 0, &content)
    }

    /// Writes one packet with `self.table`.
    fn packet(
        &mut self,
        kind: PacketKind,
        subject: u16,
        detail: u64,
        content: &Content<'_>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let &Content { bytes: content, checksum, in_window } = content;
        if content.len() > self.context.rules.packet_size {
            let (length, limit) = (content.len(), self.context.rules.packet_size);
            return Err(format!(
                "a {kind:?} of {length} bytes does not fit a packet of {limit}; use a larger --packet-size"
            )
            .into());
        }
        if kind == PacketKind::GenerationEnd || kind == PacketKind::OpaqueEnd {
            self.table.clear();
        }
        let (method, payload) = match kind {
            PacketKind::Pages if !content.is_empty() && self.method != 0 => {
                match self.encoder.encode(content, &mut self.encoded)? {
                    Encoded::Shrunk(length) => (self.method, &self.encoded[..length]),
                    Encoded::Incompressible => {
                        self.shared.counters.raw_packets.fetch_add(1, Ordering::Relaxed);
                        (0, content)
                    }
                }
            }
            _ => (0, content),
        };
        let header = PacketHeader {
            kind,
            method,
            subject,
            sequence: self.next_sequence(in_window),
            table_length: self.table.len() as u32,
            payload_length: payload.len() as u32,
            content_length: content.len() as u32,
            content_checksum: match checksum {
                _ if !self.context.rules.checksums => 0,
                Some(checksum) => checksum,
                None => crc32c(content),
            },
            detail,
        };
        let header = header.encode(&self.table);
        // A limit is kept by small pieces: a whole packet at once would be many milliseconds of a slow link.
        let piece = self.context.pacer.limit().map_or(payload.len(), |_| self.context.pacer.piece());
        let (first, rest) = payload.split_at(piece.min(payload.len()));
        self.context.pacer.pace(header.len() + self.table.len() + first.len());
        self.writer.write_all_vectored(&[&header, &self.table, first])?;
        for part in rest.chunks(piece.max(1)) {
            self.context.pacer.pace(part.len());
            self.writer.write_all_vectored(&[part])?;
        }

        self.count(content.len() as u64, (header.len() + self.table.len() + payload.len()) as u64);
        Ok(())
    }

    /// The number of the next packet, which holds so many bytes of the window.
    fn next_sequence(&self, in_window: u64) -> u64 {
        let mut progress = self.shared.progress.lock().expect("no thread of the channel panics");
        progress.in_flight.push_back(in_window);
        progress.sequence.advance()
    }

    /// Counts a packet that was written.
    fn count(&self, content_bytes: u64, packet_bytes: u64) {
        let counters = &self.shared.counters;
        counters.packets.fetch_add(1, Ordering::Relaxed);
        counters.content_bytes.fetch_add(content_bytes, Ordering::Relaxed);
        counters.packet_bytes.fetch_add(packet_bytes, Ordering::Relaxed);
        counters.wire_bytes.store(self.writer.bytes_written(), Ordering::Relaxed);
    }
}
