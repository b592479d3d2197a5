//! The sending thread of a channel: takes items from the queue, reads guest RAM where that was asked for, encodes, paces and
//! writes packets.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_offload::Producer;
use sterna_wire::checksum::crc32c;
use sterna_wire::device::Piece;
use sterna_wire::limits::MAX_RUNS;
use sterna_wire::packet::{DeviceLabel, MAX_TABLE, PacketHeader, PacketKind, PageRequest, RUN_LENGTH, Run, RunKind};

use super::ahead::{self, Ahead, Copy, Ready};
use super::blocks::PageNotInPacket;
use super::coding::{Bottleneck, Coding, Kernel, Seen, Times};
use super::delta::{Against, Deltas, Normal, Wrong};
use super::sent_pages::SentPages;
use super::{GuestPages, InFlight, Item, SendContext, SendMode, Shared, Suspect};
use crate::batch::Batch;
use crate::cpu_allowance::CpuAllowance;
use crate::in_place;
use crate::off_cpu::{OffCpu, thread_time};
use crate::reading::Reading;
use crate::transport::Writer;
use crate::window::{Carried, WindowClosed};

/// Zero pages that were read from guest RAM wait for others before they make a packet, up to this many: a packet of nothing
/// but its table costs a wake-up of the destination, and reading this much takes a few milliseconds.
const MAX_HELD_ZERO_PAGES: u64 = (64 << 20) / PAGE_SIZE as u64;

/// What a packet carries.
struct Content<'a> {
    bytes: &'a [u8],
    /// Its CRC-32C, where it is known already.
    checksum: Option<u32>,
    /// Bytes of the window that its acknowledgement frees.
    in_window: u64,
    /// Pages that were handed over, normal and zero ones.
    pages: (u64, u64),
    /// The device that has copied the content.
    maker: Option<Producer>,
    /// For device state: the guest's device.
    device: Option<u16>,
}

/// Where the content of a batch's normal pages lies.
enum ContentPlace<'a> {
    /// In the batch.
    InBatch,
    /// In guest RAM, from where it is sent.
    InPlace(&'a RamBlock),
    /// In a copy that an accelerator has made, with deltas against these.
    Copied(&'a Copy, &'a [Against]),
}

impl ContentPlace<'_> {
    /// Returns the CRC-32C of all content, where that is known.
    fn checksum(&self, batch: &Batch) -> Option<u32> {
        match self {
            Self::InBatch => batch.checksum(),
            Self::Copied(copy, _) => copy.checksum(),
            Self::InPlace(_) => None,
        }
    }
}

impl<'a> Content<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        Self { bytes, checksum: None, in_window: 0, pages: (0, 0), maker: None, device: None }
    }
}

/// Returns how many normal and zero pages `runs` have.
fn pages_of(runs: &[Run]) -> (u64, u64) {
    runs.iter().fold((0, 0), |(normal, zero), run| match run.kind {
        RunKind::Normal => (normal + u64::from(run.count), zero),
        RunKind::Zero => (normal, zero + u64::from(run.count)),
    })
}

/// The state of a sending thread.
pub(super) struct Sending {
    writer: Writer,
    shared: Arc<Shared>,
    context: SendContext,
    coding: Coding,
    /// The limit of CPU time, with what this thread had run at its last packet.
    cpus: Option<(Arc<CpuAllowance>, Duration)>,
    /// How the time since the last packet was spent.
    times: Times,
    /// Measures the waits for the network, where the choice of an encoder needs them. Made by the thread itself.
    waits: Option<OffCpu>,
    /// The kernel's figures of the connection at the last packet.
    kernel: Kernel,
    encoded: Vec<u8>,
    table: Vec<u8>,
    /// Made with the first pages that are read from guest RAM.
    reading: Option<Reading>,
    /// Buffer for the pages that are read at once.
    piece: Vec<Run>,
    /// Buffer for the pages of an item that are still to be sent.
    left: Vec<Run>,
    /// How pages of guest RAM are read and sent now.
    mode: SendMode,
    /// Hashes of the sent pages of blocks with huge pages: made with the first pages that are read from guest RAM. None once it is not known
    /// which pages the destination has.
    sent_pages: Option<SentPages>,
    /// The delta encoder and its cache.
    deltas: Option<Deltas>,
    /// Pages that an accelerator works on: made with the first pages that are read from guest RAM.
    ahead: Option<Ahead>,
}

/// Splits runs into pieces of a number of pages.
struct Piecewise<'a> {
    runs: &'a [Run],
    /// Pages of the first run that earlier pieces have.
    used: u32,
}

impl<'a> Piecewise<'a> {
    fn new(runs: &'a [Run]) -> Self {
        Self { runs, used: 0 }
    }

    /// Fills `piece` with the next runs, `pages` pages together at most. Returns false at the end.
    fn next(&mut self, pages: u64, piece: &mut Vec<Run>) -> bool {
        piece.clear();
        let mut room = pages;
        while let Some(run) = self.runs.first().filter(|_| room > 0) {
            let count = u64::from(run.count - self.used).min(room) as u32;
            piece.push(Run { first: run.first + u64::from(self.used), count, ..*run });
            room -= u64::from(count);
            self.used += count;
            if self.used == run.count {
                self.runs = &self.runs[1..];
                self.used = 0;
            }
        }
        !piece.is_empty()
    }
}

impl Sending {
    pub(super) fn new(
        writer: Writer,
        shared: Arc<Shared>,
        context: SendContext,
    ) -> Result<Self, sterna_codec::CodecError> {
        let coding = Coding::new(&context.compression)?;
        let encoded = vec![0; context.rules.packet_size];
        // Where the peer accepts deltas of some blocks only, these are made with the first page of such a block.
        let deltas = (context.delta_cache > 0).then(|| {
            let deltas = Deltas::new(context.delta_cache, context.rules.packet_size);
            shared.counters.has_deltas(&deltas);
            deltas
        });
        Ok(Self {
            writer,
            shared,
            context,
            coding,
            cpus: None,
            times: Times::default(),
            waits: None,
            kernel: Kernel::default(),
            encoded,
            table: Vec::with_capacity(MAX_TABLE),
            reading: None,
            piece: Vec::with_capacity(MAX_RUNS),
            left: Vec::with_capacity(MAX_RUNS),
            mode: SendMode::Usual,
            sent_pages: None,
            deltas,
            ahead: None,
        })
    }

    pub(super) fn run(mut self, items: &Receiver<Item>, shared: &Shared) -> Result<(), Box<dyn std::error::Error>> {
        self.waits = self.coding.is_auto().then(OffCpu::new);
        self.cpus = self.context.compression.cpus().map(|cpus| (Arc::clone(cpus), thread_time()));
        // Items whose last zero pages are still held.
        let mut unsent = 0;
        loop {
            let item = match items.try_recv() {
                Ok(item) => item,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    self.send_all()?;
                    shared.sent(&mut unsent);
                    let begun = Instant::now();
                    let Ok(item) = items.recv() else { break };
                    self.times.starved += begun.elapsed();
                    item
                }
            };
            unsent += u64::from(!matches!(item, Item::Device { .. }));
            self.item(item)?;
            if !self.holds() {
                shared.sent(&mut unsent);
            }
        }
        self.send_all()?;
        shared.sent(&mut unsent);
        // Before dropping the writing half closes it, so that the peer's closing in return does not count as a failure.
        shared.progress.lock().expect("no thread of the channel panics").finished = true;
        Ok(())
    }

    fn item(&mut self, item: Item) -> Result<(), Box<dyn std::error::Error>> {
        if let Item::Guest(wanted) = item {
            return self.guest(&wanted);
        }
        // The pages before this item are sent first.
        self.send_all()?;
        self.table.clear();
        match item {
            Item::Guest(..) => unreachable!("done above"),
            Item::Pages(batch) => self.all_pages(&batch, &ContentPlace::InBatch),
            Item::Again => self.refused().map(drop),
            Item::Discard(batch) => {
                // Post-copy begins: it is not known any more which pages the destination has.
                self.deltas = None;
                (self.sent_pages, self.context.hash_key) = (None, None);
                batch.runs().iter().for_each(|run| self.table.extend_from_slice(&run.encode()));
                self.packet(PacketKind::Discard, batch.block, 0, &Content::of(&[]))
            }
            Item::GenerationEnd(generation) => self.packet(PacketKind::GenerationEnd, 0, generation, &Content::of(&[])),
            Item::Stream { record, content } => self.packet(PacketKind::Stream, record, 0, &Content::of(&content)),
            Item::Device { device, place, piece, in_window } => {
                // Not before: in the queue the piece would hold bytes of the window that the item before it waits for.
                if in_window > 0 {
                    self.wait_for_window(in_window)?;
                }
                let (kind, bytes) = match &piece {
                    Piece::Bytes(bytes) => (PacketKind::DeviceBuffer, &**bytes),
                    Piece::Ahead => (PacketKind::DeviceAhead, &[][..]),
                    Piece::End => (PacketKind::DeviceEnd, &[][..]),
                };
                self.packet(kind, device, place, &Content { in_window, device: Some(device), ..Content::of(bytes) })
            }
            Item::DeviceState { name, instance, content } => {
                self.table.extend_from_slice(&DeviceLabel { name: &name, instance }.encode());
                self.packet(PacketKind::DeviceState, 0, 0, &Content::of(&content))
            }
            Item::Opaque(content) if content.is_empty() => self.packet(PacketKind::OpaqueEnd, 0, 0, &Content::of(&[])),
            Item::Opaque(content) => self.packet(PacketKind::Opaque, 0, 0, &Content::of(&content)),
        }
    }

    /// Reads the pages of `wanted` from guest RAM, which the guest may be writing, and sends them. This thread reads the pages, encodes and
    /// writes them, so that they stay in this core's cache and one buffer per channel is enough.
    ///
    /// Zero pages need no packet of their own: they are held back, and sent with the next pages, of this item or of
    /// a later one.
    fn guest(&mut self, wanted: &GuestPages) -> Result<(), Box<dyn std::error::Error>> {
        let GuestPages { ram, pages: wanted, overtaken, way: mode } = wanted;
        if let Some(key) = self.context.hash_key.take() {
            self.sent_pages = SentPages::new(key, ram, self.context.rules.packet_size);
        }
        if *mode != self.mode {
            // All pages of a packet are sent in one mode.
            self.send_all()?;
            self.mode = *mode;
        }
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
        let usual = self.mode == SendMode::Usual;
        if let Some(accelerator) = self.context.accelerator.as_ref().filter(|it| usual && it.finds_zero_pages()) {
            let content = match () {
                () if self.in_place() => ahead::Content::InPlace,
                () if self.context.rules.checksums => ahead::Content::Checked,
                () => ahead::Content::Copied,
            };
            let ahead = self.ahead.take();
            let mut ahead = ahead.unwrap_or_else(|| {
                let ratio = self.context.normal_page_ratio.clone();
                Ahead::new(accelerator.clone(), content, self.packet_pages(), ratio)
            });
            let sent = self.runs_ahead(&mut ahead, block, runs);
            self.ahead = Some(ahead);
            return sent;
        }
        let mut reading = self.take_reading();
        let mut rest = Piecewise::new(runs);
        let mut piece = std::mem::take(&mut self.piece);
        let in_place = self.in_place();
        while rest.next(self.packet_pages(), &mut piece) {
            self.read_piece(&mut reading, ram, block, &piece, in_place)?;
        }
        self.piece = piece;
        self.reading = Some(reading);
        Ok(())
    }

    fn take_reading(&mut self) -> Reading {
        let context = &self.context;
        let new = || Reading::new(context.rules).with_ratio(context.normal_page_ratio.clone());
        self.reading.take().unwrap_or_else(new)
    }

    /// Returns whether pages are sent directly from guest RAM. Not with a bandwidth limit: its small pieces are easier cut from a copy.
    fn in_place(&self) -> bool {
        self.coding.is_none()
            && self.deltas.is_none()
            && self.sent_pages.is_none()
            && !self.context.rules.checksums
            && self.writer.passes_on()
            && self.context.pacer.limit().is_none()
    }

    fn packet_pages(&self) -> u64 {
        (self.context.rules.packet_size / PAGE_SIZE) as u64
    }

    /// Reads a packet's worth of pages, and sends them unless all of them are zero.
    fn read_piece(
        &mut self,
        reading: &mut Reading,
        ram: &GuestRam,
        block: u16,
        piece: &[Run],
        in_place: bool,
    ) -> Result<(), Box<dyn std::error::Error>> {
        self.make_room(reading, block, piece)?;
        let asked = piece.iter().map(|run| u64::from(run.count)).sum::<u64>() * PAGE_SIZE as u64;
        // The pages count as in flight from here, because from here on their content grows old.
        self.enter_window(reading, asked)?;
        // A batch stays in place or copied, even if a limit was set or removed since. Only memory that this process has mapped can be sent
        // in place.
        let here = ram.blocks()[usize::from(block)].start().is_some();
        if here && (in_place || reading.in_place().is_some()) {
            reading.look(ram, piece);
        } else {
            reading.read(ram, piece)?;
        }
        self.context.window.give_back(asked - reading.batch().in_window());
        self.send_if_due(reading)
    }

    /// Sends the pages of `reading` unless there is room for `runs` of `block` too.
    fn make_room(&mut self, reading: &mut Reading, block: u16, runs: &[Run]) -> Result<(), Box<dyn std::error::Error>> {
        if !reading.takes(block, runs) {
            self.pages_read(reading)?;
            reading.begin(block);
        }
        Ok(())
    }

    /// Waits until `bytes` may be in flight. Sends the pages that are held back before waiting.
    fn enter_window(&mut self, reading: &mut Reading, bytes: u64) -> Result<(), Box<dyn std::error::Error>> {
        if !self.context.window.try_enter(bytes)? {
            self.pages_read(reading)?;
            self.wait_for_window(bytes)?;
        }
        Ok(())
    }

    fn wait_for_window(&mut self, bytes: u64) -> Result<(), WindowClosed> {
        let begun = OffCpu::begin();
        self.context.window.enter(bytes)?;
        if let Some(waits) = &mut self.waits {
            waits.end(begun);
        }
        Ok(())
    }

    fn send_if_due(&mut self, reading: &mut Reading) -> Result<(), Box<dyn std::error::Error>> {
        if reading.batch().in_window() > 0 || reading.batch().pages() >= MAX_HELD_ZERO_PAGES {
            self.pages_read(reading)?;
        }
        Ok(())
    }

    /// Queues `runs` for the accelerator, and sends the pieces that it has finished. The last few stay under way.
    fn runs_ahead(&mut self, ahead: &mut Ahead, block: u16, runs: &[Run]) -> Result<(), Box<dyn std::error::Error>> {
        let mut rest = Piecewise::new(runs);
        loop {
            while ahead.has_room() {
                if !rest.next(ahead.piece_pages(), &mut self.piece) {
                    return Ok(());
                }
                ahead.look(block, &self.piece);
            }
            self.send_oldest(ahead)?;
        }
    }

    /// Sends the oldest of the pieces that are under way, or holds it if all of it is zero.
    fn send_oldest(&mut self, ahead: &mut Ahead) -> Result<(), Box<dyn std::error::Error>> {
        let mut reading = self.take_reading();
        let needs = ahead.needs();
        if needs > 0 {
            self.enter_window(&mut reading, needs)?;
        }
        let window = Arc::clone(&self.context.window);
        let costs = self.coding.costs();
        let deltas = self.deltas.as_mut().map(|deltas| {
            let whole = deltas.whole(costs);
            (deltas, whole)
        });
        let (piece, ready) = ahead.take(deltas, |bytes| window.try_enter(bytes))?;
        let ram = ahead.ram().clone();
        if !matches!(ready, Ready::Unasked) {
            self.make_room(&mut reading, piece.block, &piece.runs)?;
        }
        match ready {
            Ready::Unasked => self.read_piece(&mut reading, &ram, piece.block, &piece.runs, ahead.in_place())?,
            Ready::Uncopied => {
                reading.read(&ram, &piece.runs)?;
                self.context.window.give_back(piece.normal - reading.batch().in_window());
                self.send_if_due(&mut reading)?;
            }
            Ready::Known if piece.normal == 0 => {
                reading.know(&piece.runs);
                self.send_if_due(&mut reading)?;
            }
            Ready::Known => {
                reading.know(&piece.runs);
                let block = &ram.blocks()[usize::from(piece.block)];
                self.pages(reading.batch(), &ContentPlace::InPlace(block))?;
                reading.begin(piece.block);
            }
            Ready::Here(copy) => {
                reading.know(&piece.runs);
                self.pages(reading.batch(), &ContentPlace::Copied(&copy, &piece.against))?;
                reading.begin(piece.block);
            }
        }
        ahead.put(piece);
        self.reading = Some(reading);
        Ok(())
    }

    /// Returns whether pages that were handed over are not sent yet.
    fn holds(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| !reading.batch().is_empty())
            || self.ahead.as_ref().is_some_and(|ahead| !ahead.is_empty())
    }

    /// Sends all pages that were handed over: those that an accelerator works on, and zero pages that are held back.
    fn send_all(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        if let Some(mut ahead) = self.ahead.take() {
            let mut sent = Ok(());
            while sent.is_ok() && !ahead.is_empty() {
                sent = self.send_oldest(&mut ahead);
            }
            self.ahead = Some(ahead);
            sent?;
        }
        let Some(mut reading) = self.reading.take() else { return Ok(()) };
        let sent = self.pages_read(&mut reading);
        self.reading = Some(reading);
        sent
    }

    /// Sends the pages of `reading` and empties it.
    fn pages_read(&mut self, reading: &mut Reading) -> Result<(), Box<dyn std::error::Error>> {
        if !reading.batch().is_empty() {
            let place = reading.in_place().map_or(ContentPlace::InBatch, ContentPlace::InPlace);
            self.pages(reading.batch(), &place)?;
            reading.begin(reading.batch().block);
        }
        Ok(())
    }

    /// Sends `batch`, which was read from guest RAM; of blocks with huge pages only the pages that have changed since they were sent.
    fn pages(&mut self, batch: &Batch, place: &ContentPlace<'_>) -> Result<(), Box<dyn std::error::Error>> {
        let Some(mut sent_pages) = self.sent_pages.take() else { return self.all_pages(batch, place) };
        let sent = self.changed_pages(&mut sent_pages, batch, place);
        self.sent_pages = Some(sent_pages);
        sent
    }

    fn changed_pages(
        &mut self,
        sent_pages: &mut SentPages,
        batch: &Batch,
        place: &ContentPlace<'_>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let again = self.context.again.as_deref();
        let content = match place {
            ContentPlace::InBatch => batch.content(),
            ContentPlace::Copied(copy, _) => copy.bytes(),
            ContentPlace::InPlace(_) => {
                sent_pages.forget(batch.block, batch.runs());
                return self.all_pages(batch, place);
            }
        };
        if self.mode != SendMode::Usual {
            sent_pages.forget(batch.block, batch.runs());
            if let Some(again) = again {
                // Before they are sent, because they may be refused again.
                batch.runs().iter().for_each(|run| again.mark_resent(batch.block, run.first..run.end()));
            }
            return self.all_pages(batch, place);
        }
        let same = sent_pages.look(batch.block, batch.runs(), content, again);
        // Deltas find their bases by position in the batch, so the batch stays whole; they leave out unchanged pages themselves.
        if same == 0 || matches!(place, ContentPlace::Copied(_, against) if !against.is_empty()) {
            return self.all_pages(batch, place);
        }
        let counters = &self.shared.counters;
        counters.normal_pages.fetch_add(same, Ordering::Relaxed);
        counters.same_pages.fetch_add(same, Ordering::Relaxed);
        self.context.window.give_back(same * PAGE_SIZE as u64);
        self.context.window.was_there(same);
        let changed = sent_pages.changed(batch, content);
        if changed.is_empty() { Ok(()) } else { self.all_pages(changed, &ContentPlace::InBatch) }
    }

    /// Sends `batch`.
    fn all_pages(&mut self, batch: &Batch, place: &ContentPlace<'_>) -> Result<(), Box<dyn std::error::Error>> {
        self.table.clear();
        batch.runs().iter().for_each(|run| self.table.extend_from_slice(&run.encode()));
        let pages @ (normal, zero) = pages_of(batch.runs());
        debug_assert_eq!(self.table.len(), batch.runs().len() * RUN_LENGTH);
        let counters = &self.shared.counters;
        counters.normal_pages.fetch_add(normal, Ordering::Relaxed);
        counters.zero_pages.fetch_add(zero, Ordering::Relaxed);
        let in_window = batch.in_window();
        let (bytes, maker) = match place {
            ContentPlace::InBatch => (batch.content(), None),
            ContentPlace::Copied(copy, _) => (copy.bytes(), copy.maker()),
            ContentPlace::InPlace(block) => return self.pages_in_place(batch, block),
        };
        debug_assert_eq!(bytes.len() as u64 / PAGE_SIZE as u64, normal);
        if let Some(mut deltas) = self.deltas_of(batch.block) {
            let sent = self.pages_or_deltas(&mut deltas, batch, bytes, place);
            self.deltas = Some(deltas);
            return sent;
        }
        let checksum = place.checksum(batch);
        self.packet(
            PacketKind::Pages,
            batch.block,
            0,
            &Content { checksum, in_window, pages, maker, ..Content::of(bytes) },
        )
    }

    /// Moves the delta encoder out, if deltas of `block` may be sent.
    fn deltas_of(&mut self, block: u16) -> Option<Deltas> {
        if let Some(blocks) = &self.context.delta_blocks {
            if !blocks.accepts(block) {
                return None;
            }
            let rules = self.context.rules;
            let counters = &self.shared.counters;
            self.deltas.get_or_insert_with(|| {
                let deltas = Deltas::new(blocks.cache(), rules.packet_size).holding();
                counters.has_deltas(&deltas);
                deltas
            });
        }
        self.deltas.take()
    }

    /// Retransmits refused pages. Returns the number of the last acknowledged packet and of the last packet.
    fn refused(&mut self) -> Result<(u64, u64), Box<dyn std::error::Error>> {
        let mut deltas = self.deltas.take();
        let up_to = self.send_refused(deltas.as_mut());
        self.deltas = deltas;
        up_to
    }

    fn send_refused(&mut self, mut deltas: Option<&mut Deltas>) -> Result<(u64, u64), Box<dyn std::error::Error>> {
        loop {
            let (refused, acknowledged, last) = {
                let mut progress = self.shared.progress.lock().expect("no thread of the channel panics");
                let refused = std::mem::take(&mut progress.refused);
                (refused, progress.sequence.acknowledged(), progress.sequence.last())
            };
            if refused.is_empty() {
                return Ok((acknowledged, last));
            }
            for (packet, request) in refused {
                let PageRequest { block, first, count } = request;
                let Some(deltas) = deltas.as_deref_mut() else {
                    return Err(PageNotInPacket { block, page: first }.into());
                };
                let mut pages = first..first + u64::from(count);
                while !pages.is_empty() {
                    let piece = pages.start..pages.end.min(pages.start + self.packet_pages());
                    pages.start = piece.end;
                    self.retransmit_kept(deltas, block, piece, packet)?;
                }
            }
        }
    }

    /// Retransmits, uncompressed, those of `pages` that were sent last in the packet with the number `refused`.
    fn retransmit_kept(
        &mut self,
        deltas: &mut Deltas,
        block: u16,
        pages: Range<u64>,
        refused: u64,
    ) -> Result<(), Box<dyn std::error::Error>> {
        deltas.again(block, pages, refused).map_err(|page| PageNotInPacket { block, page })?;
        let (runs, content) = deltas.rest(&[]);
        if runs.is_empty() {
            return Ok(());
        }
        self.set_table(runs);
        let number = self.shared.progress.lock().expect("no thread of the channel panics").sequence.last() + 1;
        let mode = std::mem::replace(&mut self.mode, SendMode::Plain);
        let sent = self.packet(PacketKind::Pages, block, 0, &Content::of(content));
        self.mode = mode;
        deltas.sent_again(block, number);
        sent
    }

    /// Sends `batch`, whose normal pages are `content`, as deltas where these pay.
    fn pages_or_deltas(
        &mut self,
        deltas: &mut Deltas,
        batch: &Batch,
        content: &[u8],
        place: &ContentPlace<'_>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let block = batch.block;
        let (normal, maker) = match place {
            ContentPlace::Copied(copy, against) => (Normal::with_answers(content, *copy, against), copy.maker()),
            ContentPlace::InBatch | ContentPlace::InPlace(_) => (Normal::of(content), None),
        };
        if self.mode != SendMode::Usual {
            for run in batch.runs() {
                deltas.forget(block, run);
                if let Some(again) = &self.context.again {
                    // Before they are sent, because they may be refused again.
                    again.mark_resent(block, run.first..run.end());
                }
            }
            let (in_window, pages, checksum) = (batch.in_window(), pages_of(batch.runs()), place.checksum(batch));
            let content = Content { checksum, in_window, pages, maker, ..Content::of(content) };
            return self.packet(PacketKind::Pages, block, 0, &content);
        }
        let (acknowledged, last) = self.send_refused(Some(deltas))?;
        let (again, costs) = (self.context.again.as_deref(), deltas.whole(self.coding.costs()));
        let split = deltas.split(block, batch.runs(), normal, acknowledged, again, costs);
        let mut by_device = 0;
        if let ContentPlace::Copied(copy, _) = place {
            split.wrong.into_iter().for_each(|wrong| self.report_wrong_result(wrong, copy));
            by_device = copy.deltas_maker().map_or(0, |_| split.by_device);
        }
        let first = last + 1;
        deltas.sent(block, content, first, first + u64::from(split.deltas > 0));
        let counters = &self.shared.counters;
        counters.delta_pages.fetch_add(split.deltas, Ordering::Relaxed);
        counters.same_pages.fetch_add(split.same, Ordering::Relaxed);
        counters.device_deltas.fetch_add(by_device, Ordering::Relaxed);
        let window = |pages: u64| pages * PAGE_SIZE as u64;
        if split.same > 0 {
            self.context.window.give_back(window(split.same));
            self.context.window.was_there(split.same);
        }
        if split.deltas > 0 {
            let (runs, records) = deltas.deltas();
            self.set_table(runs);
            let (in_window, pages) = (window(split.deltas), (split.deltas, 0));
            let content = Content { in_window, pages, maker, ..Content::of(records) };
            self.packet(PacketKind::Deltas, block, 0, &content)?;
        }
        let (runs, rest) = deltas.rest(content);
        if runs.is_empty() {
            return Ok(());
        }
        let pages = pages_of(runs);
        self.set_table(runs);
        let of_all = || (rest.len() == content.len()).then(|| place.checksum(batch)).flatten();
        let checksum = deltas.rest_checksum().or_else(of_all);
        let in_window = window(split.whole);
        let before = self.shared.counters.packet_bytes.load(Ordering::Relaxed);
        self.packet(PacketKind::Pages, block, 0, &Content { checksum, in_window, pages, maker, ..Content::of(rest) })?;
        let bytes = self.shared.counters.packet_bytes.load(Ordering::Relaxed) - before;
        deltas.went_whole(split.whole, bytes as usize);
        Ok(())
    }

    /// Distrusts the device whose wrong result was found before it was sent.
    fn report_wrong_result(&self, wrong: Wrong, copy: &Copy) {
        let (maker, what) = match wrong {
            Wrong::Delta => (copy.deltas_maker(), "a delta that it made does not lead to the page"),
            Wrong::Copy => (copy.maker(), "its copy is not what it has read"),
        };
        if let (Some(maker), Some(accelerator)) = (maker, &self.context.accelerator) {
            accelerator.offload().report_wrong_result(maker, what);
        }
    }

    fn set_table(&mut self, runs: &[Run]) {
        self.table.clear();
        runs.iter().for_each(|run| self.table.extend_from_slice(&run.encode()));
    }

    /// Writes one packet with `self.table` and the pages of `batch`, directly from `block`.
    fn pages_in_place(&mut self, batch: &Batch, block: &RamBlock) -> Result<(), Box<dyn std::error::Error>> {
        let bytes = batch.in_window();
        let (normal_pages, zero_pages) = pages_of(batch.runs());
        let carried = Carried { normal_pages, zero_pages, bytes: self.table.len() as u64 + bytes };
        let header = PacketHeader {
            kind: PacketKind::Pages,
            method: 0,
            subject: batch.block,
            sequence: self.next_sequence(InFlight {
                in_window: bytes,
                carried,
                normal_pages,
                suspect: None,
                device: None,
            }),
            table_length: self.table.len() as u32,
            payload_length: bytes as u32,
            content_length: bytes as u32,
            content_checksum: 0,
            detail: 0,
        };
        let header = header.encode(&self.table);
        in_place::write(&mut self.writer, &header, &self.table, block, batch.runs())?;
        self.count(bytes, (header.len() + self.table.len()) as u64 + bytes);
        Ok(())
    }

    /// Writes one packet with `self.table`.
    fn packet(
        &mut self,
        kind: PacketKind,
        subject: u16,
        detail: u64,
        content: &Content<'_>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let &Content { bytes: content, checksum, in_window, pages: (normal_pages, zero_pages), maker, device } =
            content;
        if content.len() > self.context.rules.packet_size {
            let (length, limit) = (content.len(), self.context.rules.packet_size);
            return Err(format!(
                "{length} bytes that go in one packet do not fit one of {limit}; use a larger --packet-size"
            )
            .into());
        }
        if kind == PacketKind::GenerationEnd || kind == PacketKind::OpaqueEnd {
            self.table.clear();
        }
        let mut suspect = maker.map(Suspect::Copied);
        let coded =
            kind == PacketKind::Pages && !content.is_empty() && !self.coding.is_none() && self.mode != SendMode::Plain;
        let (method, payload) = match coded {
            true => {
                let left = |bottleneck| match bottleneck {
                    Bottleneck::Network => self.writer.send_times()?.left,
                    Bottleneck::Limit => self.context.pacer.left(),
                };
                let encoded = self.coding.encode(content, &mut self.encoded, left)?;
                if let Some(chosen) = self.coding.chosen() {
                    self.shared.counters.by_way[chosen].fetch_add(content.len() as u64, Ordering::Relaxed);
                }
                match encoded {
                    Some((format, length)) => {
                        suspect = self.coding.maker().map(Suspect::Compressed).or(suspect);
                        (format, &self.encoded[..length])
                    }
                    None => {
                        self.shared.counters.raw_packets.fetch_add(1, Ordering::Relaxed);
                        (0, content)
                    }
                }
            }
            false => (0, content),
        };
        let carried = Carried { normal_pages, zero_pages, bytes: (self.table.len() + payload.len()) as u64 };
        let refusable = match kind {
            // Retransmitted pages, too, which `normal_pages` does not count.
            PacketKind::Pages => (content.len() / PAGE_SIZE) as u64,
            _ => normal_pages,
        };
        let header = PacketHeader {
            kind,
            method,
            subject,
            sequence: self.next_sequence(InFlight {
                in_window,
                carried,
                normal_pages: refusable,
                suspect,
                device: device.map(|device| (device, content.len() as u32)),
            }),
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
        let begun = self.waits.is_some().then(|| {
            self.context.window.on_wire(in_window);
            self.coding.writes();
            OffCpu::begin()
        });
        let (first, rest) = payload.split_at(piece.min(payload.len()));
        self.times.limited += self.context.pacer.pace(header.len() + self.table.len() + first.len());
        self.writer.write_all_vectored(&[&header, &self.table, first])?;
        for part in rest.chunks(piece.max(1)) {
            self.times.limited += self.context.pacer.pace(part.len());
            self.writer.write_all_vectored(&[part])?;
        }
        if let (Some(waits), Some(begun)) = (&mut self.waits, begun) {
            self.times.writing += waits.end(begun);
            self.times.written += header.len() + self.table.len() + payload.len();
            // For other packets no encoder was chosen: their time and bytes count with the next packet that has one.
            if coded {
                let mut times = std::mem::take(&mut self.times);
                times.waited = waits.take();
                times.placing = self.shared.placing();
                times.kernel = self.kernel.since(&self.writer);
                let window = &self.context.window;
                let unused = self.context.pacer.unused();
                let seen = Seen { idle: window.idle(), unused, full: window.full() };
                self.coding.sent(times, seen, content.len());
            }
        }
        self.count(content.len() as u64, (header.len() + self.table.len() + payload.len()) as u64);
        self.keep_to_cpus();
        Ok(())
    }

    /// Pauses while the sending threads are beyond their limit of CPU time.
    fn keep_to_cpus(&mut self) {
        let Some((cpus, before)) = &mut self.cpus else { return };
        let now = thread_time();
        let running = now.saturating_sub(std::mem::replace(before, now));
        let pause = cpus.use_up(running);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }

    /// Records the next packet as in flight, and returns its number.
    fn next_sequence(&self, packet: InFlight) -> u64 {
        let mut progress = self.shared.progress.lock().expect("no thread of the channel panics");
        progress.in_flight.push_back(packet);
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

#[cfg(test)]
mod tests;
