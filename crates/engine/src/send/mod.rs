//! The source's channels: from a queue of batches to packets on the wire, and acknowledgements back.
//!
//! Each channel has two threads. The *sending* thread owns the queue's end, the encoder and the writing half of the
//! connection: it encodes each batch of the queue and writes the packet. The *acknowledging* thread reads acknowledgements
//! and lets acknowledged bytes leave the window. The source never waits for single packets: only the window limits it.

mod again;
mod ahead;
mod blocks;
mod choices;
mod coding;
mod compression;
mod delta;
mod sent_pages;
mod thread;

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_memory::ram::GuestRam;
use sterna_offload::Producer;
use sterna_wire::device::Piece;
use sterna_wire::packet::{ACK_LENGTH, Answer, BlockShape, PAGE_REQUEST_LENGTH, PageRequest, Refusal};
use sterna_wire::sequence::SendSequence;

pub use self::again::{MAX_REFUSED, Retransmit, TooManyRefused};
pub use self::blocks::DeltaBlocks;
pub use self::compression::Compression;
use self::delta::Deltas;
pub use self::sent_pages::HashKey;
use self::thread::Sending;
use crate::abort::Abort;
use crate::accelerator::Accelerator;
use crate::batch::PooledBatch;
use crate::cpu_time;
use crate::device_state::{DeviceBytes, SavingDevices};
use crate::entry::Overtaken;
use crate::pacer::Pacer;
use crate::receive::PacketRules;
use crate::transport::{Reader, Writer};
use crate::window::{Carried, Window, WindowClosed};

/// Batches that wait in a channel's queue. The window bounds bytes; the queue only has to keep the channel busy.
const QUEUE_LENGTH: usize = 16;

/// An item of a channel's queue.
#[derive(Debug)]
pub enum Item {
    /// Pages.
    Pages(PooledBatch),
    /// Pages that the channel's thread reads from guest RAM.
    Guest(GuestPages),
    /// Pages whose earlier content the destination is to discard, as zero runs.
    Discard(PooledBatch),
    /// Nothing new: the channel retransmits the pages that were refused meanwhile.
    Again,
    /// All pages of this generation that take this channel have been handed over.
    GenerationEnd(u64),
    /// A record of the virtual machine's own stream.
    Stream {
        /// The kind of the record.
        record: u16,
        /// The record's bytes.
        content: Vec<u8>,
    },
    /// A piece of a device's state.
    Device {
        /// The device's number.
        device: u16,
        /// The piece's place among those of the device.
        place: u64,
        /// The piece.
        piece: Piece<DeviceBytes>,
        /// Bytes of the window that the piece needs.
        in_window: u64,
    },
    /// A buffer of device state, as a QEMU sends it.
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

/// How pages are read from guest RAM and sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendMode {
    /// With the channel's accelerator and method.
    #[default]
    Usual,
    /// Without an accelerator: an error of its zero test could not be corrected any more, or the accelerator is suspect.
    ByCpu,
    /// Without an accelerator and uncompressed: the pages were refused after they were sent the usual way.
    Plain,
}

/// Pages that the channel's thread reads from guest RAM.
#[derive(Debug)]
pub struct GuestPages {
    /// The RAM.
    pub ram: GuestRam,
    /// The pages, as normal runs without content.
    pub pages: PooledBatch,
    /// Pages that have been sent on another channel meanwhile, and are left out.
    pub overtaken: Option<Arc<Overtaken>>,
    /// How the pages are read and sent.
    pub way: SendMode,
}

/// Maximum number of methods that `auto` chooses from.
const MAX_AUTO_METHODS: usize = 8;

/// The counters of a channel.
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
    /// Normal pages that were sent as deltas.
    pub delta_pages: AtomicU64,
    /// Normal pages that the destination had already, and that were not sent.
    pub same_pages: AtomicU64,
    /// Pages of both kinds whose changes an accelerator has found.
    pub device_deltas: AtomicU64,
    /// Whether there was no memory for deltas: 1 or 0.
    pub lacks_delta_cache: AtomicU64,
    /// Where `auto` chooses a method for each batch: bytes of content by method.
    pub by_way: [AtomicU64; MAX_AUTO_METHODS],
    /// Packets whose content did not shrink and was sent uncompressed.
    pub raw_packets: AtomicU64,
    /// Packets.
    pub packets: AtomicU64,
}

impl SendCounters {
    /// Records whether the channel has memory for deltas.
    fn has_deltas(&self, deltas: &Deltas) {
        self.lacks_delta_cache.store(deltas.lacks_memory().into(), Ordering::Relaxed);
    }
}

/// The sums of the counters of several channels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// Normal pages.
    pub normal_pages: u64,
    /// Normal pages that were sent as deltas.
    pub delta_pages: u64,
    /// Normal pages that the destination had already.
    pub same_pages: u64,
    /// Pages of both kinds whose changes an accelerator has found.
    pub device_deltas: u64,
    /// Zero pages.
    pub zero_pages: u64,
    /// Bytes of content, before compression.
    pub content_bytes: u64,
    /// Bytes of packets, before TLS.
    pub packet_bytes: u64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Channels that had no memory for deltas.
    pub lack_delta_cache: u64,
    /// Where `auto` chooses a method for each batch: bytes of content by method.
    pub by_way: [u64; MAX_AUTO_METHODS],
}

impl std::ops::Add for Sent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            normal_pages: self.normal_pages + other.normal_pages,
            delta_pages: self.delta_pages + other.delta_pages,
            same_pages: self.same_pages + other.same_pages,
            device_deltas: self.device_deltas + other.device_deltas,
            zero_pages: self.zero_pages + other.zero_pages,
            content_bytes: self.content_bytes + other.content_bytes,
            packet_bytes: self.packet_bytes + other.packet_bytes,
            wire_bytes: self.wire_bytes + other.wire_bytes,
            lack_delta_cache: self.lack_delta_cache + other.lack_delta_cache,
            by_way: std::array::from_fn(|way| self.by_way[way] + other.by_way[way]),
        }
    }
}

impl Sent {
    /// Returns the sums over `channels` so far.
    pub fn over<'a>(channels: impl IntoIterator<Item = &'a SendChannel>) -> Self {
        let mut sent = Self::default();
        for channel in channels {
            let counters = channel.counters();
            sent.normal_pages += counters.normal_pages.load(Ordering::Relaxed);
            sent.delta_pages += counters.delta_pages.load(Ordering::Relaxed);
            sent.same_pages += counters.same_pages.load(Ordering::Relaxed);
            sent.device_deltas += counters.device_deltas.load(Ordering::Relaxed);
            sent.zero_pages += counters.zero_pages.load(Ordering::Relaxed);
            sent.content_bytes += counters.content_bytes.load(Ordering::Relaxed);
            sent.packet_bytes += counters.packet_bytes.load(Ordering::Relaxed);
            sent.wire_bytes += counters.wire_bytes.load(Ordering::Relaxed);
            sent.lack_delta_cache += counters.lacks_delta_cache.load(Ordering::Relaxed);
            for (sum, bytes) in sent.by_way.iter_mut().zip(&counters.by_way) {
                *sum += bytes.load(Ordering::Relaxed);
            }
        }
        sent
    }

    /// Returns how many of the `requested` bytes for deltas `channels` channels have got, and the reason if a lack of memory has prevented
    /// deltas.
    pub fn delta_cache(&self, requested: u64, channels: u16) -> (u64, Option<&'static str>) {
        if self.lack_delta_cache == 0 {
            return (requested, None);
        }
        let channels = u64::from(channels.max(1));
        let had = requested / channels * channels.saturating_sub(self.lack_delta_cache);
        let none = had == 0 && self.delta_pages + self.same_pages == 0;
        (had, none.then_some("the source has no memory for what was sent"))
    }

    /// Returns content bytes / packet bytes; 1 before anything was sent.
    pub fn ratio(&self) -> f64 {
        if self.packet_bytes > 0 { self.content_bytes as f64 / self.packet_bytes as f64 } else { 1.0 }
    }
}

/// A packet that is not acknowledged.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// Bytes of the window that its acknowledgement frees.
    in_window: u64,
    /// Pages in it that were handed over.
    carried: Carried,
    /// Pages in it that are not zero, handed over or retransmitted: the maximum that the destination may request again.
    normal_pages: u64,
    /// The device that is distrusted if the packet is refused.
    suspect: Option<Suspect>,
    /// For a piece of a device's state: the device, and how many bytes.
    device: Option<(u16, u32)>,
}

impl InFlight {
    /// Reads from `reader` which pages of this packet the destination requests again. Fails where they are more than the packet had: each
    /// costs time, and one request could name a whole guest.
    fn read_requests(
        &self,
        reader: &mut Reader,
        refusal: &Refusal,
        shapes: &[BlockShape],
        mut take: impl FnMut(PageRequest),
    ) -> Result<(), Box<dyn std::error::Error>> {
        let mut bytes = [0; PAGE_REQUEST_LENGTH];
        let mut left = self.normal_pages;
        for _ in 0..refusal.requests {
            reader.read_exact(&mut bytes)?;
            let request = PageRequest::decode(&bytes, shapes)?;
            let after = left.checked_sub(request.count.into());
            left = after.ok_or("it requests again more pages than were in the packet that it refuses")?;
            take(request);
        }
        Ok(())
    }
}

/// The device that has made a packet's content.
#[derive(Clone, Copy, Debug)]
enum Suspect {
    /// The device has copied the content.
    Copied(Producer),
    /// The device has compressed the content, and the result was not verified. Where another device has copied the content, that copy was
    /// verified as a rule. If the copy was wrong all the same, the copying device is the only suspect from the next time on.
    Compressed(Producer),
}

impl Suspect {
    /// Returns the device, and why it is distrusted.
    fn charge(self) -> (Producer, &'static str) {
        match self {
            Self::Copied(maker) => (maker, "what it had copied was refused by the destination"),
            Self::Compressed(maker) => (maker, "what it had compressed was refused by the destination"),
        }
    }
}

#[derive(Debug, Default)]
struct Progress {
    sequence: SendSequence,
    /// Number of items of the queue whose packets are all written; pieces of device state do not count.
    sent_items: u64,
    /// Each packet not yet acknowledged, oldest first.
    in_flight: VecDeque<InFlight>,
    /// Pages to retransmit from the copies that the channel keeps, each with the number of the refused packet.
    refused: Vec<(u64, PageRequest)>,
    /// Nothing more will be sent: the peer may close the channel.
    finished: bool,
    ended: bool,
    /// Number of threads that wait for a change: waking costs a system call even where no thread waits.
    waiting: u32,
}

#[derive(Debug)]
struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
    counters: SendCounters,
    /// How long the receiver was busy since the last [`Shared::placing`], in microseconds.
    placing: AtomicU64,
}

/// What the channels of one migration have in common.
#[derive(Debug, Clone)]
pub struct SendContext {
    /// Zero pages of guest ranges that count as normal: for tests and measurements.
    pub normal_page_ratio: NormalPageRatio,
    /// With a key, only the changed 4 KiB pages are sent of RAM blocks whose own pages are larger.
    pub hash_key: Option<HashKey>,
    /// The window.
    pub window: Arc<Window>,
    /// The bandwidth limit.
    pub pacer: Arc<Pacer>,
    /// The alarm.
    pub abort: Arc<Abort>,
    /// How content is compressed.
    pub compression: Compression,
    /// What was agreed on with the peer.
    pub rules: PacketRules,
    /// The accelerator that helps to read guest RAM.
    pub accelerator: Option<Accelerator>,
    /// The refused pages, where the peer may refuse packets.
    pub again: Option<Arc<Retransmit>>,
    /// Where the peer accepts deltas of all blocks: maximum bytes of sent pages that a channel keeps; 0: no deltas are made.
    pub delta_cache: usize,
    /// Where the peer takes deltas of some blocks only, and pages cannot be read again: of which.
    pub delta_blocks: Option<Arc<DeltaBlocks>>,
    /// Where the state of devices travels too: who is told of what has arrived of it.
    pub devices: Option<Arc<SavingDevices>>,
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
        let shared = Arc::new(Shared {
            progress: Mutex::default(),
            changed: Condvar::new(),
            counters: SendCounters::default(),
            placing: AtomicU64::new(0),
        });
        let abort = Arc::clone(&context.abort);
        let waker = Arc::clone(&shared);
        abort.on_end(move || waker.end());

        let sender = Sending::new(writer, Arc::clone(&shared), context.clone()).map_err(io::Error::other)?;
        let sending = {
            let (abort, name, shared) = (Arc::clone(&abort), name.to_owned(), Arc::clone(&shared));
            cpu_time::spawn(Builder::new().name(format!("send-{name}")), move || {
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
            let (shared, name) = (Arc::clone(&shared), name.to_owned());
            cpu_time::spawn(Builder::new().name(format!("ack-{name}")), move || {
                if let Err(error) = shared.read_acknowledgements(reader, &context) {
                    if error.is::<TooManyRefused>() {
                        abort.raise(format_args!("channel {name}: {error}"))
                    } else {
                        abort.lost(format_args!("channel {name}: the destination was lost: {error}"))
                    };
                }
                shared.end();
            })?
        };
        Ok(Self { queue, shared, handed_over: AtomicU64::new(0), threads: vec![sending, acknowledging] })
    }

    /// Queues `item`. Waits while the queue is full. Fails when the migration is being taken down.
    pub fn send(&self, item: Item) -> Result<(), WindowClosed> {
        if !matches!(item, Item::Device { .. }) {
            self.handed_over.fetch_add(1, Ordering::Relaxed);
        }
        self.queue.send(item).map_err(|_| WindowClosed)
    }

    /// As [`SendChannel::send`] of a piece of device state, but returns the piece where the queue is full.
    pub(crate) fn try_send(&self, piece: Item) -> Result<Option<Item>, WindowClosed> {
        debug_assert!(matches!(piece, Item::Device { .. }));
        match self.queue.try_send(piece) {
            Ok(()) => Ok(None),
            Err(TrySendError::Full(piece)) => Ok(Some(piece)),
            Err(TrySendError::Disconnected(_)) => Err(WindowClosed),
        }
    }

    /// Waits until everything that was handed over is acknowledged, and returns the last sequence number. Meanwhile no other thread may
    /// hand anything over except pieces of device state, which this does not wait for.
    pub fn drained(&self) -> Result<u64, WindowClosed> {
        loop {
            let expected = self.handed_over.load(Ordering::Relaxed);
            let progress = self.shared.progress.lock().expect("no thread of the channel panics");
            let progress = self.shared.wait(progress, |progress| progress.sent_items == expected)?;
            let last = progress.sequence.last();
            let progress = self.shared.wait(progress, |progress| progress.sequence.acknowledged() >= last)?;
            if progress.refused.is_empty() {
                return Ok(last);
            }
            drop(progress);
            self.send(Item::Again)?;
        }
    }

    /// Returns the counters of the channel.
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

    /// Waits until `is_done`.
    fn wait<'a>(
        &self,
        mut progress: MutexGuard<'a, Progress>,
        is_done: impl Fn(&Progress) -> bool,
    ) -> Result<MutexGuard<'a, Progress>, WindowClosed> {
        while !progress.ended && !is_done(&progress) {
            progress.waiting += 1;
            progress = self.changed.wait(progress).expect("no thread of the channel panics");
            progress.waiting -= 1;
        }
        if is_done(&progress) { Ok(progress) } else { Err(WindowClosed) }
    }

    /// Records that all packets of `items` more items are written, and sets `items` to 0.
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

    /// Returns how long the receiver was busy since the last call.
    fn placing(&self) -> Duration {
        Duration::from_micros(self.placing.swap(0, Ordering::Relaxed))
    }

    fn in_flight(&self, sequence: u64) -> Option<InFlight> {
        let progress = self.progress.lock().expect("no thread of the channel panics");
        let before = sequence.checked_sub(progress.sequence.acknowledged() + 1)?;
        progress.in_flight.get(usize::try_from(before).ok()?).copied()
    }

    /// Reads the pages of a refused packet, which the sending thread retransmits from its copies.
    fn read_refusal(
        &self,
        reader: &mut Reader,
        refusal: &Refusal,
        packet: &InFlight,
        blocks: &DeltaBlocks,
    ) -> Result<(), Box<dyn std::error::Error>> {
        blocks.packet()?;
        let mut pages = Vec::with_capacity(refusal.requests as usize);
        packet.read_requests(reader, refusal, blocks.shapes(), |request| pages.push((refusal.sequence, request)))?;
        // Before the acknowledgement that covers the packet, so that a thread which sees that one sees these pages.
        self.progress.lock().expect("no thread of the channel panics").refused.append(&mut pages);
        Ok(())
    }

    fn read_acknowledgements(
        &self,
        mut reader: Reader,
        context: &SendContext,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let mut bytes = [0; ACK_LENGTH];
        while reader.read_packet_start(&mut bytes)? {
            let ack = match Answer::decode(&bytes)? {
                Answer::Placed(ack) => ack,
                Answer::Refused(refusal) => {
                    let packet = self.in_flight(refusal.sequence);
                    let packet = packet.ok_or("it refuses a packet that is not in flight")?;
                    if let Some(blocks) = &context.delta_blocks {
                        self.read_refusal(&mut reader, &refusal, &packet, blocks)?;
                        continue;
                    }
                    let again = context.again.as_ref().ok_or("it refuses a packet, which was not agreed on")?;
                    again.packet()?;
                    if let (Some(suspect), Some(accelerator)) = (packet.suspect, &context.accelerator) {
                        let (maker, what) = suspect.charge();
                        accelerator.offload().report_wrong_result(maker, what);
                    }
                    packet.read_requests(&mut reader, &refusal, again.shapes(), |request| again.add(&request))?;
                    continue;
                }
            };
            self.placing.fetch_add(ack.busy_us.into(), Ordering::Relaxed);
            let (mut released, mut carried, mut with_pages) = (0, Carried::default(), 0);
            let mut progress = self.progress.lock().expect("no thread of the channel panics");
            let before = progress.sequence.acknowledged();
            progress.sequence.acknowledge(ack.sequence)?;
            for _ in before..ack.sequence {
                let Some(packet) = progress.in_flight.pop_front() else { break };
                released += packet.in_window;
                carried.normal_pages += packet.carried.normal_pages;
                carried.zero_pages += packet.carried.zero_pages;
                carried.bytes += packet.carried.bytes;
                with_pages += u64::from(packet.carried.pages() > 0);
                if let (Some((device, bytes)), Some(devices)) = (packet.device, &context.devices) {
                    devices.arrived(device, bytes);
                }
            }
            self.wake(progress);
            if released > 0 || with_pages > 0 {
                context.window.leave(released, &carried, with_pages);
            }
        }
        let progress = self.progress.lock().expect("no thread of the channel panics");
        if progress.finished && progress.sequence.outstanding() == 0 {
            return Ok(());
        }
        Err("it closed the channel before the end".into())
    }
}
