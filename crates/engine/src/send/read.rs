//! The first stage of a channel's sending thread for guest ranges: reads pages of guest RAM, which the guest may be writing, and hands them
//! to the next stage ([`super::pages`]) a packet's worth at a time. This thread reads the pages, encodes and writes them, so that they stay
//! in this core's cache and one buffer per channel is enough.
//!
//! Pages come from four sources, of which this file has three; the fourth are batches of owned bytes, which nothing needs to read.
//!
//! | source | where | the content is |
//! |---|---|---|
//! | CPU copy | [`OpenPacket::read`] | copied into this thread's buffer, with the zero test and the checksum in the same pass |
//! | in place | [`OpenPacket::read`] | written from guest RAM by the kernel, where no stage looks at it |
//! | accelerator | [`PageReader::send_oldest`] | searched and copied by a device, a few packets ahead ([`super::ahead`]) |
//! | owned bytes | [`super::thread`] | in the batch that was queued |
//!
//! Zero pages need no packet of their own: they are held in the [`OpenPacket`] and sent with the next pages, of this item or of a later one.

use std::sync::Arc;

use sterna_memory::PAGE_SIZE;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_memory::ram::GuestRam;
use sterna_wire::limits::MAX_RUNS;
use sterna_wire::packet::Run;

use super::SendContext;
use super::ahead::{Ahead, CopyMode, Ready};
use super::error::SendError;
use super::pages::{PageContent, PageSender, ReadPages};
use crate::accelerator::Accelerator;
use crate::item::{GuestPages, SendMode};
use crate::reading::Reading;
use crate::receive::PacketRules;

/// Zero pages that were read from guest RAM wait for others before they make a packet, up to this many: a packet of nothing
/// but its table costs a wake-up of the destination, and reading this much takes a few milliseconds.
const MAX_HELD_ZERO_PAGES: u64 = (64 << 20) / PAGE_SIZE as u64;

/// Reads the pages of guest ranges.
pub(super) struct PageReader {
    rules: PacketRules,
    ratio: NormalPageRatio,
    accelerator: Option<Accelerator>,
    open: OpenPacket,
    /// Pages that an accelerator works on: made with the first pages that it may search.
    ahead: Option<Ahead>,
    /// Buffers for the pages of an item that are still to be sent, and for those that are read at once.
    left: Vec<Run>,
    piece: Vec<Run>,
}

impl PageReader {
    pub(super) fn new(context: &SendContext) -> Self {
        let reading = Reading::new(context.rules).with_ratio(context.normal_page_ratio.clone());
        Self {
            rules: context.rules,
            ratio: context.normal_page_ratio.clone(),
            accelerator: context.accelerator.clone().filter(Accelerator::finds_zero_pages),
            open: OpenPacket { reading, mode: SendMode::Usual },
            ahead: None,
            left: Vec::with_capacity(MAX_RUNS),
            piece: Vec::with_capacity(MAX_RUNS),
        }
    }

    /// Reads and sends the pages of `wanted`; zero pages, and pages that an accelerator works on, may be held.
    pub(super) fn read(&mut self, wanted: &GuestPages, out: &mut PageSender) -> Result<(), SendError> {
        let GuestPages { ram, pages, post_copy, mode } = wanted;
        out.begin_ram(ram);
        if *mode != self.open.mode {
            // All pages of a packet are sent in one mode.
            self.flush(out)?;
            self.open.mode = *mode;
        }
        self.left.clear();
        match post_copy {
            Some(post_copy) => post_copy.remaining(pages.block, pages.runs(), &mut self.left),
            None => self.left.extend_from_slice(pages.runs()),
        }
        match mode {
            SendMode::Usual if self.accelerator.is_some() => {
                post_copy.iter().for_each(|post_copy| post_copy.begin(pages.block, &self.left));
                self.read_by_accelerator(pages.block, out)
            }
            SendMode::Usual | SendMode::ByCpu => self.read_by_cpu(wanted, out),
        }
    }

    fn packet_pages(&self) -> u64 {
        (self.rules.packet_size / PAGE_SIZE) as u64
    }

    fn read_by_cpu(&mut self, wanted: &GuestPages, out: &mut PageSender) -> Result<(), SendError> {
        let (GuestPages { ram, post_copy, .. }, block) = (wanted, wanted.pages.block);
        let (pages, in_place) = (self.packet_pages(), out.sends_in_place());
        let mut rest = Piecewise::new(&self.left);
        while rest.next(pages, &mut self.piece) {
            post_copy.iter().for_each(|post_copy| post_copy.begin(block, &self.piece));
            self.open.read(ram, block, &self.piece, in_place, out)?;
        }
        Ok(())
    }

    /// Queues the pages for the accelerator, and sends the pieces that it has finished. The last few stay in flight.
    fn read_by_accelerator(&mut self, block: u16, out: &mut PageSender) -> Result<(), SendError> {
        let (pages, accelerator) = (self.packet_pages(), self.accelerator.as_ref());
        let ahead = self.ahead.get_or_insert_with(|| {
            let accelerator = accelerator.expect("the caller has checked that there is one").clone();
            let copies = if out.sends_in_place() {
                CopyMode::InPlace
            } else if self.rules.checksums {
                CopyMode::Checked
            } else {
                CopyMode::Unchecked
            };
            Ahead::new(accelerator, copies, pages, self.ratio.clone())
        });
        let mut rest = Piecewise::new(&self.left);
        loop {
            while ahead.has_room() {
                if !rest.next(ahead.piece_pages(), &mut self.piece) {
                    return Ok(());
                }
                ahead.queue(block, &self.piece);
            }
            Self::send_oldest(ahead, &mut self.open, out)?;
        }
    }

    /// Sends the oldest of the pieces in flight, or holds it if all of it is zero.
    fn send_oldest(ahead: &mut Ahead, open: &mut OpenPacket, out: &mut PageSender) -> Result<(), SendError> {
        let needed = ahead.window_needed();
        if needed > 0 {
            open.enter_window(needed, out)?;
        }
        let window = Arc::clone(out.packets().window());
        let (piece, ready) = ahead.take(out.delta_bases(), |bytes| window.try_enter(bytes))?;
        let (ram, block) = (ahead.ram(), piece.block);
        if !matches!(ready, Ready::NotSearched) {
            open.make_room(block, &piece.runs, out)?;
        }
        match ready {
            Ready::NotSearched => open.read(ram, block, &piece.runs, ahead.in_place(), out)?,
            Ready::NotCopied => {
                open.reading.read(ram, &piece.runs)?;
                window.release(piece.normal - open.reading.batch().in_window());
                open.send_if_due(out)?;
            }
            Ready::Searched if piece.normal == 0 => {
                open.reading.add(&piece.runs);
                open.send_if_due(out)?;
            }
            Ready::Searched => {
                let content = PageContent::InPlace(&ram.blocks()[usize::from(block)]);
                open.send_with(&piece.runs, content, out)?;
            }
            Ready::Copied(copy) => {
                let content = PageContent::Copied { copy: &copy, bases: &piece.bases };
                open.send_with(&piece.runs, content, out)?;
            }
        }
        ahead.recycle(piece);
        Ok(())
    }

    /// Returns whether pages of earlier items are not sent yet.
    pub(super) fn holds_pages(&self) -> bool {
        !self.open.reading.batch().is_empty() || self.ahead.as_ref().is_some_and(|ahead| !ahead.is_empty())
    }

    /// Sends all pages of earlier items: those that an accelerator works on, and zero pages that are held.
    pub(super) fn flush(&mut self, out: &mut PageSender) -> Result<(), SendError> {
        if let Some(ahead) = &mut self.ahead {
            while !ahead.is_empty() {
                Self::send_oldest(ahead, &mut self.open, out)?;
            }
        }
        self.open.send(out)
    }
}

/// The packet that is being filled: zero pages that wait for others, and pages that were just read.
struct OpenPacket {
    reading: Reading,
    /// How its pages are sent.
    mode: SendMode,
}

impl OpenPacket {
    /// Reads a packet's worth of pages, and sends them unless all of them are zero.
    fn read(
        &mut self,
        ram: &GuestRam,
        block: u16,
        piece: &[Run],
        in_place: bool,
        out: &mut PageSender,
    ) -> Result<(), SendError> {
        self.make_room(block, piece, out)?;
        let asked = piece.iter().map(|run| u64::from(run.count)).sum::<u64>() * PAGE_SIZE as u64;
        // The pages count as in flight from here, because from here on their content grows old.
        self.enter_window(asked, out)?;
        // A batch stays in place or copied, even if a limit was set or removed since. Only memory that this process has mapped can be sent
        // in place.
        let here = ram.blocks()[usize::from(block)].start().is_some();
        if here && (in_place || self.reading.in_place().is_some()) {
            self.reading.find_zero_pages(ram, piece);
        } else {
            self.reading.read(ram, piece)?;
        }
        out.packets().window().release(asked - self.reading.batch().in_window());
        self.send_if_due(out)
    }

    /// Sends the pages so far unless `runs` of `block` fit the packet too.
    fn make_room(&mut self, block: u16, runs: &[Run], out: &mut PageSender) -> Result<(), SendError> {
        if !self.reading.takes(block, runs) {
            self.send(out)?;
            self.reading.begin(block);
        }
        Ok(())
    }

    /// Waits until `bytes` may be in flight. Sends the pages so far before waiting: they would never be acknowledged.
    fn enter_window(&mut self, bytes: u64, out: &mut PageSender) -> Result<(), SendError> {
        if !out.packets().window().try_enter(bytes)? {
            self.send(out)?;
            out.packets().wait_for_window(bytes)?;
        }
        Ok(())
    }

    fn send_if_due(&mut self, out: &mut PageSender) -> Result<(), SendError> {
        let batch = self.reading.batch();
        if batch.in_window() > 0 || batch.pages() >= MAX_HELD_ZERO_PAGES { self.send(out) } else { Ok(()) }
    }

    /// Sends the pages so far, and empties the packet.
    fn send(&mut self, out: &mut PageSender) -> Result<(), SendError> {
        let batch = self.reading.batch();
        if batch.is_empty() {
            return Ok(());
        }
        let block = batch.block;
        out.send(&match self.reading.in_place() {
            Some(block) => ReadPages::with(batch, PageContent::InPlace(block), self.mode),
            None => ReadPages::of(batch, self.mode),
        })?;
        self.reading.begin(block);
        Ok(())
    }

    /// Sends the pages so far with `runs`, for which there is room and whose content is `content`, and empties the packet.
    fn send_with(&mut self, runs: &[Run], content: PageContent<'_>, out: &mut PageSender) -> Result<(), SendError> {
        self.reading.add(runs);
        let batch = self.reading.batch();
        let block = batch.block;
        out.send(&ReadPages::with(batch, content, self.mode))?;
        self.reading.begin(block);
        Ok(())
    }
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
