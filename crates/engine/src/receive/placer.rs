//! The rules by which received pages are written into guest RAM, the same for every destination. A destination adds how the bytes of a
//! page reach the memory of its guest ([`Place`]).
//!
//! * **When.** Pages are accepted from the announcement of the RAM blocks until the source's totals, or until post-copy, which places
//!   pages by rules of its own (`memory::missing`). [`PagePlacer::close`] fails where a channel is still writing, so nothing is written
//!   behind it: neither under devices that are being loaded nor under a running guest.
//! * **By whom.** All pages of a region arrive on one channel. The first page decides which; a page on another channel is refused. So one
//!   thread writes a page, in the order in which the source sent its contents.
//! * **Zero pages.** A page is marked as received before content is written to it, and a zero page is written only over such a page: the
//!   memory of all others reads as zero.
//! * **Deltas.** A delta applies to what the memory of the page holds. The result is made in a buffer, and written only where it has the
//!   checksum of the source's page.
//! * **Refused pages.** Pages that arrived damaged count as missing from the refusal until their content has been written. The zero pages of
//!   a damaged packet are written at once: the packet's table is undamaged, and they are not retransmitted.
//!
//! Some RAM blocks have no memory that the destination writes, because their pages are forwarded to the monitor. Of these rules, the one
//! about time applies to such a block ([`PagePlacer::permit`]).
//!
//! The caller has checked that runs lie within their block and ascend, and that content is as long as the normal runs
//! ([`sterna_wire::packet::PageTable`]).

use std::fmt;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::AtomicPageBitmap;
use sterna_memory::delta::apply;
use sterna_memory::place::{Piece, Place, PlaceError, PlacementMethod};
use sterna_memory::received::{Freshness, ReceivedBitmap};
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::PageDeltas;
use sterna_wire::packet::{BlockShape, Run, RunKind};

use super::SinkError;
use crate::batch::{AlignedBuffer, REGION};

/// Maximum number of pieces of a packet that are written together.
const MAX_PIECES: usize = 64;

/// A RAM block of which pages arrive.
#[derive(Debug)]
pub struct PlacedBlock {
    /// The block's name, for errors.
    pub name: String,
    /// The block's size.
    pub shape: BlockShape,
    /// The block's memory, and its pages that may hold content already, marked. None where the destination does not write the memory itself.
    pub memory: Option<(Box<dyn Place>, ReceivedBitmap)>,
}

/// What the two sides agreed on about pages.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageAgreement {
    /// Pages may arrive as deltas.
    pub deltas: bool,
    /// The source retransmits the pages of a packet that is refused.
    pub retransmission: bool,
}

/// Why no more pages are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Closed {
    /// The source has sent its totals.
    Totals = 1 << 31,
    /// Post-copy has begun.
    PostCopy = 1 << 30,
}

/// A channel was still writing pages when no more were to be accepted.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("pages that the source sent before are still being written")]
pub struct StillWriting;

/// Guest RAM of one migration that is being filled. Shared by the channels: each has a [`ChannelPlacer`].
pub struct PagePlacer {
    /// Number of channels that are writing, and the bits of [`Closed`]. One word, so that a channel either sees a bit or is counted by the
    /// thread that sets it.
    gate: AtomicU32,
    blocks: OnceLock<Blocks>,
    /// Number of pages that were refused and have not been written since.
    refused: AtomicU64,
    on_complete: Box<dyn Fn() + Send + Sync>,
}

struct Blocks {
    shapes: Arc<[BlockShape]>,
    blocks: Vec<Block>,
}

struct Block {
    name: String,
    memory: Option<BlockMemory>,
}

struct BlockMemory {
    place: Box<dyn Place>,
    received: ReceivedBitmap,
    /// By region: the number of the channel that carries its pages, plus 1; 0 before the first page.
    channels: Box<[AtomicU16]>,
    /// Pages that were refused and have not been written since; unset before the first.
    refused: OnceLock<AtomicPageBitmap>,
}

impl fmt::Debug for PagePlacer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePlacer").field("gate", &self.gate).field("refused", &self.refused).finish_non_exhaustive()
    }
}

impl PagePlacer {
    /// Makes a placer that knows no RAM blocks yet. `on_complete` is called when the last refused page has been written, on the thread of its
    /// channel.
    pub fn new(on_complete: impl Fn() + Send + Sync + 'static) -> Self {
        let (gate, refused) = (AtomicU32::new(0), AtomicU64::new(0));
        Self { gate, blocks: OnceLock::new(), refused, on_complete: Box::new(on_complete) }
    }

    /// Announces the RAM blocks, by index. From now on their pages are accepted. Returns false, and changes nothing, where blocks were
    /// announced before.
    pub fn begin(&self, blocks: Vec<PlacedBlock>) -> bool {
        let shapes = blocks.iter().map(|block| block.shape).collect();
        let block = |PlacedBlock { name, shape, memory }| {
            let regions = (shape.pages * PAGE_SIZE as u64).div_ceil(REGION);
            let memory = memory.map(|(place, received)| BlockMemory {
                place,
                received,
                channels: (0..regions).map(|_| AtomicU16::new(0)).collect(),
                refused: OnceLock::new(),
            });
            Block { name, memory }
        };
        self.blocks.set(Blocks { shapes, blocks: blocks.into_iter().map(block).collect() }).is_ok()
    }

    fn blocks(&self) -> Result<&Blocks, SinkError> {
        self.blocks.get().ok_or_else(|| "pages before the announcement of the RAM blocks".into())
    }

    fn block(&self, number: u16) -> Result<&Block, SinkError> {
        Ok(&self.blocks()?.blocks[usize::from(number)])
    }

    /// Returns the sizes of the RAM blocks, by index.
    ///
    /// # Errors
    /// The blocks have not been announced.
    pub fn shapes(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(Arc::clone(&self.blocks()?.shapes))
    }

    /// Returns the memory of block `number`, where pages are written to it.
    pub fn memory(&self, number: u16) -> Option<&dyn Place> {
        let block = &self.blocks.get()?.blocks[usize::from(number)];
        block.memory.as_ref().map(|memory| &*memory.place)
    }

    /// Returns how many pages were refused and have not been written since.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Acquire)
    }

    /// Accepts no more pages, for this reason.
    ///
    /// # Errors
    /// A channel is writing pages that it was permitted before.
    pub fn close(&self, why: Closed) -> Result<(), StillWriting> {
        let before = self.gate.fetch_or(why as u32, Ordering::AcqRel);
        if before & !(Closed::Totals as u32 | Closed::PostCopy as u32) == 0 { Ok(()) } else { Err(StillWriting) }
    }

    /// Returns whether pages are refused for this reason.
    pub fn is_closed(&self, why: Closed) -> bool {
        self.gate.load(Ordering::Acquire) & why as u32 != 0
    }

    /// Counts the caller among the channels that are writing. A channel asks for this itself only where it forwards the pages of a block
    /// without memory.
    ///
    /// # Errors
    /// No more pages are accepted.
    pub fn permit(&self) -> Result<Permit<'_>, SinkError> {
        let (permit, before) = self.enter();
        if before & Closed::Totals as u32 != 0 {
            return Err("pages after the source's totals".into());
        }
        if before & Closed::PostCopy as u32 != 0 {
            return Err("pages of a round after post-copy was begun".into());
        }
        Ok(permit)
    }

    /// Counts the caller among the channels that are writing, to discard pages: post-copy permits this until the source's totals.
    ///
    /// # Errors
    /// Post-copy has not begun, or the source has sent its totals.
    pub fn permit_discard(&self) -> Result<Permit<'_>, SinkError> {
        let (permit, before) = self.enter();
        if before & Closed::Totals as u32 != 0 {
            return Err("discards after the source's totals".into());
        }
        if before & Closed::PostCopy as u32 == 0 {
            return Err("discards before post-copy was begun".into());
        }
        Ok(permit)
    }

    /// Counts the caller among the channels that are writing. Returns what the gate held before.
    fn enter(&self) -> (Permit<'_>, u32) {
        let before = self.gate.fetch_add(1, Ordering::AcqRel);
        (Permit(self), before)
    }

    fn leave(&self) {
        self.gate.fetch_sub(1, Ordering::AcqRel);
    }

    /// Counts the normal pages of `runs` as missing.
    fn refuse(&self, memory: &BlockMemory, runs: &[Run]) {
        let pages = memory.refused.get_or_init(|| AtomicPageBitmap::new(memory.received.pages()));
        for run in runs.iter().filter(|run| run.kind == RunKind::Normal) {
            let new = pages.test_and_set(run.first..run.end(), |_| {});
            self.refused.fetch_add(new, Ordering::AcqRel);
        }
    }

    /// Counts pages of block `number` as missing no more: they have been written, or discarded.
    fn settle(&self, memory: &BlockMemory, runs: &[Run]) {
        let Some(refused) = memory.refused.get().filter(|_| self.refused() > 0) else { return };
        let mut settled = 0;
        for run in runs {
            refused.take_runs(run.first..run.end(), |pages| settled += pages.end - pages.start);
        }
        if settled > 0 && self.refused.fetch_sub(settled, Ordering::AcqRel) == settled {
            (self.on_complete)();
        }
    }

    /// Counts pages of block `number` as missing no more, because post-copy discards their content.
    pub fn discard(&self, number: u16, runs: &[Run]) {
        let block = self.blocks.get().map(|blocks| &blocks.blocks[usize::from(number)]);
        if let Some(memory) = block.and_then(|block| block.memory.as_ref()) {
            self.settle(memory, runs);
        }
    }
}

/// Permission to write pages, while it exists.
#[derive(Debug)]
#[must_use]
pub struct Permit<'a>(&'a PagePlacer);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl BlockMemory {
    /// Fails where pages belong to a region that another channel carries.
    fn claim(&self, runs: &[Run], channel: u16) -> Result<(), SinkError> {
        for run in runs {
            let first = run.first * PAGE_SIZE as u64 / REGION;
            let last = (run.end() * PAGE_SIZE as u64).div_ceil(REGION);
            for region in &self.channels[first as usize..last as usize] {
                let claimed = region.compare_exchange(0, channel + 1, Ordering::Relaxed, Ordering::Relaxed);
                if claimed.is_err_and(|owner| owner != channel + 1) {
                    return Err("pages of one region arrive on several channels".into());
                }
            }
        }
        Ok(())
    }

    /// Writes `content` to the normal pages of `runs`, and zeros to those zero pages that hold anything else.
    fn write(&self, runs: &[Run], content: &[u8]) -> Result<(), PlaceError> {
        let mut pieces = [Piece { offset: 0, data: &[] }; MAX_PIECES];
        let (mut filled, mut rest) = (0, content);
        for run in runs {
            match run.kind {
                RunKind::Normal => {
                    let (data, behind) = rest.split_at(run.count as usize * PAGE_SIZE);
                    rest = behind;
                    self.received.mark(run.first..run.end());
                    pieces[filled] = Piece { offset: run.first * PAGE_SIZE as u64, data };
                    filled += 1;
                    if filled == MAX_PIECES {
                        self.place.write_pieces(&pieces)?;
                        filled = 0;
                    }
                }
                RunKind::Zero => self.zero(run)?,
            }
        }
        self.place.write_pieces(&pieces[..filled])
    }

    /// Writes zeros to those pages of `run` that have received content. All others read as zero already.
    fn zero(&self, run: &Run) -> Result<(), PlaceError> {
        let mut outcome = Ok(());
        self.received.zero(run.first..run.end(), Freshness::Fresh, |part| {
            if outcome.is_ok() {
                let (page, pages) = (PAGE_SIZE as u64, part.end - part.start);
                outcome = self.place.zero(part.start * page, pages * page);
            }
        });
        outcome
    }

    /// Applies `deltas` to the pages of `runs`. Returns false if a delta is damaged or its result does not have the checksum of the
    /// source's page; earlier pages may then have been written, correctly.
    fn apply(&self, buffer: &mut AlignedBuffer, runs: &[Run], mut deltas: PageDeltas<'_>) -> Result<bool, PlaceError> {
        let at_once = pages_at_once(&*self.place);
        let mut numbers = runs.iter().flat_map(|run| run.first..run.end()).peekable();
        let mut offsets = [0; MAX_PIECES];
        while numbers.peek().is_some() {
            let mut count = 0;
            for (offset, number) in offsets[..at_once].iter_mut().zip(&mut numbers) {
                *offset = number * PAGE_SIZE as u64;
                count += 1;
            }
            let offsets = &offsets[..count];
            let pages = &mut buffer[..count * PAGE_SIZE];
            self.place.read_pages(offsets, pages)?;
            for page in pages.chunks_exact_mut(PAGE_SIZE) {
                let Some(Ok(delta)) = deltas.next() else { return Ok(false) };
                if apply(delta.record, page).is_err() || crc32c(page) != delta.checksum {
                    return Ok(false);
                }
            }
            let mut pieces = [Piece { offset: 0, data: &[] }; MAX_PIECES];
            for (piece, (offset, data)) in pieces.iter_mut().zip(offsets.iter().zip(pages.chunks_exact(PAGE_SIZE))) {
                let page = offset / PAGE_SIZE as u64;
                self.received.mark(page..page + 1);
                *piece = Piece { offset: *offset, data };
            }
            self.place.write_pieces(&pieces[..count])?;
        }
        Ok(deltas.next().is_none())
    }
}

/// Returns how many pages are read, changed by their deltas and written together: several where each call is a system call; else one, which
/// stays in the CPU's first cache meanwhile.
fn pages_at_once(place: &dyn Place) -> usize {
    if place.method() == PlacementMethod::OwnMemory { 1 } else { MAX_PIECES }
}

/// Places the pages of one channel.
#[derive(Debug)]
pub struct ChannelPlacer {
    placer: Arc<PagePlacer>,
    channel: u16,
    agreement: PageAgreement,
    /// Whether content is being received directly into guest RAM.
    in_place: bool,
    /// Where deltas are applied; made with the first.
    buffer: Option<AlignedBuffer>,
}

impl Drop for ChannelPlacer {
    fn drop(&mut self) {
        self.end_in_place();
    }
}

impl ChannelPlacer {
    /// Makes the placer of the channel with this number.
    pub fn new(placer: &Arc<PagePlacer>, channel: u16, agreement: PageAgreement) -> Self {
        Self { placer: Arc::clone(placer), channel, agreement, in_place: false, buffer: None }
    }

    /// Places pages of `block`, which has memory; `content` holds those of the normal runs.
    ///
    /// # Errors
    /// The pages may not be written now, or by this channel; or writing failed.
    pub fn place(&mut self, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        self.end_in_place();
        let _permit = self.placer.permit()?;
        let block = self.placer.block(block)?;
        let Some(memory) = &block.memory else { return Err(block.not_placed("pages")) };
        memory.claim(runs, self.channel)?;
        memory.write(runs, content).map_err(|error| block.failed("placing pages", &error))?;
        self.placer.settle(memory, runs);
        Ok(())
    }

    /// Begins to receive the content of the normal pages of `runs` directly into the memory of `block`, and places the zero pages. The caller
    /// writes the content, and then calls [`Self::end_in_place`].
    ///
    /// Returns false where pages are missing because they arrived damaged: then the content is received into a buffer and
    /// [placed](Self::place), so that only undamaged content ends the wait for them.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn begin_in_place(&mut self, block: u16, runs: &[Run]) -> Result<bool, SinkError> {
        self.end_in_place();
        let permit = self.placer.permit()?;
        let block = self.placer.block(block)?;
        let Some(memory) = &block.memory else { return Err(block.not_placed("pages")) };
        memory.claim(runs, self.channel)?;
        if self.placer.refused() > 0 {
            return Ok(false);
        }
        for run in runs {
            match run.kind {
                RunKind::Normal => memory.received.mark(run.first..run.end()),
                RunKind::Zero => memory.zero(run).map_err(|error| block.failed("placing pages", &error))?,
            }
        }
        // Given back by `end_in_place`.
        std::mem::forget(permit);
        self.in_place = true;
        Ok(true)
    }

    /// Ends what [`Self::begin_in_place`] began; without effect if that has ended.
    pub fn end_in_place(&mut self) {
        if std::mem::take(&mut self.in_place) {
            self.placer.leave();
        }
    }

    /// Applies deltas to pages of `block`. Returns false where a result is not the source's page: the packet is damaged.
    ///
    /// # Errors
    /// Deltas of the block were not agreed on, or as [`Self::place`].
    pub fn apply(&mut self, block: u16, runs: &[Run], deltas: PageDeltas<'_>) -> Result<bool, SinkError> {
        self.end_in_place();
        let _permit = self.placer.permit()?;
        let block = self.placer.block(block)?;
        let Some(memory) = block.memory.as_ref().filter(|_| self.agreement.deltas) else {
            return Err(block.not_placed("deltas"));
        };
        memory.claim(runs, self.channel)?;
        let buffer = self.buffer.get_or_insert_with(|| AlignedBuffer::new(MAX_PIECES * PAGE_SIZE));
        let right = memory.apply(buffer, runs, deltas);
        let right = right.map_err(|error| block.failed("applying deltas to pages", &error))?;
        if right {
            self.placer.settle(memory, runs);
        }
        Ok(right)
    }

    /// Refuses a packet with these pages of `block`, whose content is damaged: the zero pages are placed, and the normal ones count as
    /// missing until they were placed. Returns false, and does nothing, where the source does not retransmit them.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn refuse(&mut self, block: u16, runs: &[Run]) -> Result<bool, SinkError> {
        self.end_in_place();
        let _permit = self.placer.permit()?;
        let block = self.placer.block(block)?;
        let Some(memory) = block.memory.as_ref().filter(|_| self.agreement.retransmission) else { return Ok(false) };
        memory.claim(runs, self.channel)?;
        self.placer.refuse(memory, runs);
        for run in runs.iter().filter(|run| run.kind == RunKind::Zero) {
            memory.zero(run).map_err(|error| block.failed("placing pages", &error))?;
            self.placer.settle(memory, std::slice::from_ref(run));
        }
        Ok(true)
    }
}

impl Block {
    fn not_placed(&self, what: &str) -> SinkError {
        format!("{what} of RAM block {}, which are not accepted", self.name).into()
    }

    fn failed(&self, what: &str, error: &PlaceError) -> SinkError {
        format!("{what} of {}: {error}", self.name).into()
    }
}

#[cfg(test)]
mod tests;
