//! Retransmission of pages that did not arrive as they were read.
//!
//! The destination compares a packet's content with its checksum. Where the two differ, the destination refuses the packet and requests its
//! normal pages again. Whatever damaged them (an accelerator that copies or compresses wrongly, memory, the network below TCP's checksum)
//! ends the migration only if it happens again and again.
//!
//! 1. The acknowledging thread reads the refusal ([`Refusals::read`]): counts it against the one budget of the migration
//!    ([`MAX_REFUSED`]), checks that the packet had so many pages, and enters the pages in the channel's ledger.
//! 2. The sending thread takes them from the ledger ([`Retransmitter::run`]) before its next batch of pages, and before the channel has
//!    drained. They are sent in packets of their own: whole, uncompressed and read by the CPU, so that no encoder or accelerator that may
//!    have damaged them touches them again. They take no room in the window: the budget bounds how many there can be.
//!
//! **Two sources of bytes**, because not every source can read a page twice ([`PageSource`]):
//!
//! * *Guest RAM* is read again. It has the newest content, so it does not matter what was sent of the page since. The channel of a page
//!   never changes, so no older content can follow on another one. A batch of pages that was read before and is sent after the page has
//!   older content only where the guest has written the page meanwhile; then the dirty log names the page, and a later round sends it.
//! * *Kept pages*: what a gateway reads from its QEMU's stream comes only once. Its channels keep each page until it is acknowledged
//!   ([`super::delta`]), and retransmit the content that was sent. Where newer content was sent in a later packet, the page is left out.
//!
//! Guest RAM that is read again may have newer content than the channel has recorded of the page: the record is dropped, so that the page
//! is neither the base of a delta nor left out as unchanged ([`super::sent_pages`]) before it was retransmitted.

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_wire::packet::{BlockShape, PAGE_REQUEST_LENGTH, PageRequest, Refusal, Run, RunKind};

use super::blocks::DeltaBlocks;
use super::delta::Deltas;
use super::error::{AnswerError, MAX_REFUSED, PageNotInPacket, SendError, TooManyRefused};
use super::ledger::{ChannelLedger, InFlight, RefusedPages};
use super::packet::{Packet, PacketWriter};
use super::sent_pages::SentPages;
use crate::reading::Reading;
use crate::receive::PacketRules;
use crate::transport::Reader;

/// From where refused pages are retransmitted.
#[derive(Debug)]
enum PageSource {
    GuestRam(GuestRam, Vec<BlockShape>),
    Kept(Arc<DeltaBlocks>),
}

/// The refusals of one migration, by the packets of all its channels.
#[derive(Debug)]
pub struct Refusals {
    source: PageSource,
    packets: AtomicU32,
    pages: AtomicU64,
}

impl Refusals {
    /// Refused pages are read again from `ram`.
    pub fn of_guest_ram(ram: GuestRam) -> Self {
        let shape = |block: &RamBlock| BlockShape { pages: block.pages(), page_size: PAGE_SIZE as u32 };
        let shapes = ram.blocks().iter().map(shape).collect();
        Self::new(PageSource::GuestRam(ram, shapes))
    }

    /// Refused pages are those of `blocks`, which the channels keep until they are acknowledged.
    pub fn of_kept_pages(blocks: Arc<DeltaBlocks>) -> Self {
        Self::new(PageSource::Kept(blocks))
    }

    fn new(source: PageSource) -> Self {
        Self { source, packets: AtomicU32::new(0), pages: AtomicU64::new(0) }
    }

    /// Returns how many packets were refused so far, at most [`MAX_REFUSED`].
    pub fn packets(&self) -> u32 {
        self.packets.load(Ordering::Relaxed).min(MAX_REFUSED)
    }

    /// Returns how many pages were requested again so far.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Counts the refusal of `packet`, and reads from `reader` which of its pages the destination requests again, for `ledger`.
    pub(super) fn read(
        &self,
        reader: &mut Reader,
        refusal: &Refusal,
        packet: &InFlight,
        ledger: &ChannelLedger,
    ) -> Result<(), AnswerError> {
        let before = self.packets.fetch_add(1, Ordering::Relaxed);
        if before >= MAX_REFUSED {
            return Err(TooManyRefused.into());
        }
        let shapes = match &self.source {
            PageSource::GuestRam(_, shapes) => shapes,
            PageSource::Kept(blocks) => blocks.shapes(),
        };
        // As many as a packet has runs, at most.
        let mut refused = Vec::with_capacity(refusal.requests as usize);
        let mut left = packet.content_pages;
        let mut bytes = [0; PAGE_REQUEST_LENGTH];
        for _ in 0..refusal.requests {
            reader.read_exact(&mut bytes)?;
            let pages = PageRequest::decode(&bytes, shapes)?;
            left = left.checked_sub(pages.count.into()).ok_or(AnswerError::TooManyPages)?;
            refused.push(RefusedPages { packet: refusal.sequence, pages });
        }
        self.pages.fetch_add(packet.content_pages - left, Ordering::Relaxed);
        ledger.refuse(&mut refused);
        Ok(())
    }
}

/// What the channel has recorded of the content that the destination has.
pub(super) struct Caches<'a> {
    pub(super) sent_pages: Option<&'a mut SentPages>,
    pub(super) deltas: Option<&'a mut Deltas>,
}

impl Caches<'_> {
    /// Forgets pages whose content at the destination is no longer known.
    pub(super) fn forget(&mut self, block: u16, runs: &[Run]) {
        if let Some(sent_pages) = &mut self.sent_pages {
            sent_pages.forget(block, runs);
        }
        if let Some(deltas) = &mut self.deltas {
            runs.iter().for_each(|run| deltas.forget(block, run));
        }
    }
}

/// Retransmits the refused pages of one channel.
pub(super) struct Retransmitter {
    ledger: Arc<ChannelLedger>,
    source: Option<Arc<Refusals>>,
    rules: PacketRules,
    /// Buffer for guest RAM that is read again; made with the first refused page.
    reading: Option<Reading>,
    /// Pages that were taken from the ledger.
    refused: Vec<RefusedPages>,
}

impl Retransmitter {
    /// Makes it for the channel of `ledger`; without `source` the destination may refuse nothing.
    pub(super) fn new(ledger: Arc<ChannelLedger>, source: Option<Arc<Refusals>>, rules: PacketRules) -> Self {
        Self { ledger, source, rules, reading: None, refused: Vec::new() }
    }

    /// Retransmits the refused pages. Returns a packet up to which the destination has placed everything.
    pub(super) fn run(&mut self, mut caches: Caches<'_>, packets: &mut PacketWriter) -> Result<u64, SendError> {
        loop {
            let acknowledged = self.ledger.take_refused(&mut self.refused);
            let Some(source) = self.source.as_ref().filter(|_| !self.refused.is_empty()) else {
                return Ok(acknowledged);
            };
            for RefusedPages { packet, pages: PageRequest { block, first, count } } in self.refused.drain(..) {
                let mut pages = first..first + u64::from(count);
                while !pages.is_empty() {
                    let piece = pages.start..pages.end.min(pages.start + (self.rules.packet_size / PAGE_SIZE) as u64);
                    pages.start = piece.end;
                    match &source.source {
                        PageSource::GuestRam(ram, _) => {
                            let reading = self.reading.get_or_insert_with(|| Reading::new(self.rules));
                            send_from_ram(ram, reading, block, piece, &mut caches, packets)?;
                        }
                        PageSource::Kept(_) => send_kept(caches.deltas.as_deref_mut(), block, piece, packet, packets)?,
                    }
                }
            }
        }
    }
}

/// Sends the pages as they are in guest RAM now.
fn send_from_ram(
    ram: &GuestRam,
    reading: &mut Reading,
    block: u16,
    pages: Range<u64>,
    caches: &mut Caches<'_>,
    packets: &mut PacketWriter,
) -> Result<(), SendError> {
    let run = [Run { kind: RunKind::Normal, first: pages.start, count: (pages.end - pages.start) as u32 }];
    caches.forget(block, &run);
    reading.begin(block);
    reading.read(ram, &run)?;
    let batch = reading.batch();
    packets
        .write(&Packet { checksum: batch.checksum(), ..Packet::retransmitted(block, batch.runs(), batch.content()) })?;
    Ok(())
}

/// Sends those of the pages whose newest content was in the packet `refused`, from the channel's own copies.
fn send_kept(
    deltas: Option<&mut Deltas>,
    block: u16,
    pages: Range<u64>,
    refused: u64,
    packets: &mut PacketWriter,
) -> Result<(), SendError> {
    // A channel without deltas keeps nothing.
    let deltas = deltas.ok_or(PageNotInPacket { block, page: pages.start })?;
    deltas.collect_refused(block, pages, refused).map_err(|page| PageNotInPacket { block, page })?;
    let (runs, content) = deltas.rest(&[]);
    if !runs.is_empty() {
        packets.write(&Packet::retransmitted(block, runs, content))?;
        deltas.retransmitted(block, packets.last());
    }
    Ok(())
}
