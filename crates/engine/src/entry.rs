//! The pipeline's entries: how pages become batches, and which channel each of them takes.
//!
//! There are two. *Owned bytes*: content that was read before, such as the packets of a QEMU ([`Entry`]).
//! *Guest ranges*: memory of a guest that runs and writes while it is read ([`PageSearch`]). These only list pages; the
//! channel's own thread reads them, exactly once, with the zero test in the same pass. Where no code looks at their
//! content, the thread sends them directly from guest RAM.
//!
//! **Affinity.** All pages of one 2 MiB region take the same channel, and a channel delivers in order, so a newer copy of
//! a page never overtakes an older one and rounds need no barrier across channels.

use std::ops::Range;
use std::sync::Arc;

use sterna_memory::PAGE_SIZE;
use sterna_memory::ram::GuestRam;
use sterna_wire::packet::{Run, RunKind};

use crate::batch::{BatchPool, PooledBatch, REGION};
use crate::item::{GuestPages, Item, PostCopyPages, SendMode};
use crate::send::SendChannel;
use crate::window::{Window, WindowClosed};

/// The part of the pipeline that all entries of one migration share.
#[derive(Debug)]
pub struct Pipeline {
    /// The RAM channels.
    pub channels: Vec<SendChannel>,
    /// The batches.
    pub pool: Arc<BatchPool>,
    /// The window.
    pub window: Arc<Window>,
    /// Bytes in a page.
    pub page_size: usize,
}

impl Pipeline {
    /// Returns the channel of a page, by its offset in bytes.
    pub fn channel_of(&self, block: u16, offset: u64) -> usize {
        // Neighbouring regions take different channels, and so do the first regions of different blocks.
        ((offset / REGION + u64::from(block)) % self.channels.len() as u64) as usize
    }

    /// Queues the end of `generation` on every channel. All entries must have been flushed.
    pub fn end_generation(&self, generation: u64) -> Result<(), WindowClosed> {
        self.channels.iter().try_for_each(|channel| channel.send(Item::GenerationEnd(generation)))
    }
}

/// One thread's entry into the pipeline. Pages wait in open batches, one per channel, until the batch is full or
/// [`Entry::flush`] is called.
#[derive(Debug)]
pub struct Entry {
    pipeline: Arc<Pipeline>,
    open: Vec<Option<PooledBatch>>,
}

impl Entry {
    /// Makes an entry into `pipeline`.
    pub fn new(pipeline: Arc<Pipeline>) -> Self {
        let open = pipeline.channels.iter().map(|_| None).collect();
        Self { pipeline, open }
    }

    /// Returns the pipeline behind this entry.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        &self.pipeline
    }

    /// Returns the channel that all pages at `offsets` (bytes in the block) take, if they take the same one and ascend: then
    /// [`Entry::bytes`] moves them without a copy.
    pub fn common_channel(&self, block: u16, offsets: impl IntoIterator<Item = u64>) -> Option<usize> {
        let mut offsets = offsets.into_iter();
        let mut last = offsets.next()?;
        let channel = self.pipeline.channel_of(block, last);
        let fits = offsets.all(|offset| {
            let ascends = offset > last;
            last = offset;
            ascends && self.pipeline.channel_of(block, offset) == channel
        });
        fits.then_some(channel)
    }

    /// Waits until `bytes` may be in flight. Before waiting, hands over the open batches, which would otherwise never be acknowledged.
    pub fn enter(&mut self, bytes: u64) -> Result<(), WindowClosed> {
        if self.pipeline.window.try_enter(bytes)? {
            return Ok(());
        }
        self.flush()?;
        self.pipeline.window.enter(bytes)
    }

    /// Hands owned bytes over without a copy: one batch of `pages` (offset in bytes, and whether the page is zero), directly to `channel`
    /// (from [`Entry::common_channel`]). `fill` writes the content of the pages that are not zero, in this order. Their bytes have entered
    /// the window.
    pub fn bytes<E: From<WindowClosed>>(
        &mut self,
        channel: usize,
        block: u16,
        pages: impl IntoIterator<Item = (u64, RunKind)>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.flush_channel(channel)?;
        let page_size = self.pipeline.page_size;
        let mut batch = self.pipeline.pool.take(block)?;
        for (offset, kind) in pages {
            let page = offset / page_size as u64;
            match kind {
                RunKind::Normal => {
                    batch.push_normal(page, 1, page_size);
                }
                RunKind::Zero => batch.push_zero(page, 1),
            }
        }
        fill(batch.content_mut())?;
        let in_window = batch.content().len() as u64;
        batch.set_in_window(in_window);
        self.pipeline.channels[channel].send(Item::Pages(batch))?;
        Ok(())
    }

    /// Copies one page of owned bytes into its batch. Its bytes have entered the window.
    pub fn page(&mut self, block: u16, offset: u64, content: &[u8]) -> Result<(), WindowClosed> {
        let page = offset / self.pipeline.page_size as u64;
        let batch = self.batch_for(block, offset, page, content.len())?;
        batch.push_normal(page, 1, content.len()).copy_from_slice(content);
        let in_window = batch.in_window() + content.len() as u64;
        batch.set_in_window(in_window);
        Ok(())
    }

    /// Adds a zero page to its batch. A zero page needs no room in the window.
    pub fn zero_page(&mut self, block: u16, offset: u64) -> Result<(), WindowClosed> {
        let page = offset / self.pipeline.page_size as u64;
        self.batch_for(block, offset, page, 0)?.push_zero(page, 1);
        Ok(())
    }

    /// Hands all open batches to their channels.
    pub fn flush(&mut self) -> Result<(), WindowClosed> {
        (0..self.open.len()).try_for_each(|channel| self.flush_channel(channel))
    }

    fn flush_channel(&mut self, channel: usize) -> Result<(), WindowClosed> {
        match self.open[channel].take() {
            Some(batch) => self.pipeline.channels[channel].send(Item::Pages(batch)),
            None => Ok(()),
        }
    }

    /// Returns the open batch for `page`, a new one where the old has no room for it.
    fn batch_for(
        &mut self,
        block: u16,
        offset: u64,
        page: u64,
        content: usize,
    ) -> Result<&mut PooledBatch, WindowClosed> {
        let channel = self.pipeline.channel_of(block, offset);
        let fits = |batch: &PooledBatch| {
            batch.block == block
                && batch.takes(page, content)
                && batch.runs().last().is_none_or(|run| run.count < Run::MAX_COUNT)
        };
        if !self.open[channel].as_ref().is_some_and(fits) {
            self.flush_channel(channel)?;
            self.open[channel] = Some(self.pipeline.pool.take(block)?);
        }
        Ok(self.open[channel].as_mut().expect("a batch was put there above"))
    }
}

/// What the channel does with pages of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageAction {
    /// Read the pages and send them in this mode.
    Send(SendMode),
    /// Have the destination discard their earlier content.
    Discard,
}

/// The entry for guest ranges: pages that the channels read and send. They wait in open batches, one per
/// channel, until the batch is full or [`PageSearch::flush`] is called.
#[derive(Debug)]
pub struct PageSearch {
    pipeline: Arc<Pipeline>,
    ram: GuestRam,
    open: Vec<Option<(PageAction, PooledBatch)>>,
    /// Pages in a full batch: those of a region, or of one packet if that is more. The channel makes packets of it.
    batch_pages: u64,
    handed_over: u64,
    post_copy: Option<Arc<PostCopyPages>>,
}

impl PageSearch {
    /// Makes an entry for pages of `ram` into `pipeline`, `packet_size` bytes at a time. The pipeline's batches need no room for
    /// content.
    pub fn new(pipeline: Arc<Pipeline>, ram: GuestRam, packet_size: usize) -> Self {
        let open = pipeline.channels.iter().map(|_| None).collect();
        let batch_pages = (packet_size.max(REGION as usize) / PAGE_SIZE) as u64;
        Self { pipeline, ram, open, batch_pages, handed_over: 0, post_copy: None }
    }

    /// Has the channels, from now on, leave out pages that the post-copy channel has sent, and record in `pages` what they read.
    pub fn share(&mut self, pages: &Arc<PostCopyPages>) {
        self.post_copy = Some(Arc::clone(pages));
    }

    /// Returns the pipeline behind this entry.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        &self.pipeline
    }

    /// Lets go of the channels, and passes the pages of open batches to `add`.
    pub(crate) fn detach(&mut self, mut add: impl FnMut(u16, Range<u64>)) {
        for (_, batch) in self.open.drain(..).flatten() {
            batch.runs().iter().for_each(|run| add(batch.block, run.first..run.end()));
        }
        let Pipeline { pool, window, page_size, .. } = &*self.pipeline;
        let (channels, pool, window) = (Vec::new(), Arc::clone(pool), Arc::clone(window));
        self.pipeline = Arc::new(Pipeline { channels, pool, window, page_size: *page_size });
    }

    /// Goes on with the channels of `pipeline`. Of the pages that were handed over, `arrived` have arrived, and no more are on their way.
    pub(crate) fn attach(&mut self, pipeline: Arc<Pipeline>, arrived: u64) {
        self.open = pipeline.channels.iter().map(|_| None).collect();
        (self.pipeline, self.handed_over) = (pipeline, arrived);
    }

    /// Returns how many pages were handed over so far to be sent, those in open batches included.
    pub fn handed_over(&self) -> u64 {
        self.handed_over
    }

    /// Has the pages of `run` in `block` read and sent. Waits while the channels are busy.
    pub fn pages(&mut self, block: u16, run: Range<u64>) -> Result<(), WindowClosed> {
        self.pages_by(SendMode::Usual, block, run)
    }

    /// As [`PageSearch::pages`], in the mode `mode`.
    pub fn pages_by(&mut self, mode: SendMode, block: u16, run: Range<u64>) -> Result<(), WindowClosed> {
        self.handed_over += run.end - run.start;
        self.add(PageAction::Send(mode), block, run)
    }

    /// Has the destination discard the earlier content of the pages of `run` in `block`, after everything that was handed over
    /// before.
    pub fn discard(&mut self, block: u16, run: Range<u64>) -> Result<(), WindowClosed> {
        self.add(PageAction::Discard, block, run)
    }

    fn add(&mut self, action: PageAction, block: u16, run: Range<u64>) -> Result<(), WindowClosed> {
        const REGION_PAGES: u64 = REGION / PAGE_SIZE as u64;
        let mut at = run.start;
        while at < run.end {
            let channel = self.pipeline.channel_of(block, at * PAGE_SIZE as u64);
            let region_end = (at / REGION_PAGES + 1) * REGION_PAGES;
            let takes = |(what, batch): &(PageAction, PooledBatch)| {
                *what == action && batch.block == block && batch.takes(at, 0)
            };
            if !self.open[channel].as_ref().is_some_and(takes) {
                self.flush_channel(channel)?;
                self.open[channel] = Some((action, self.pipeline.pool.take(block)?));
            }
            let (_, batch) = self.open[channel].as_mut().expect("a batch was put there above");
            let end = region_end.min(run.end);
            match action {
                PageAction::Send(_) => {
                    let room = self.batch_pages - batch.pages();
                    let count = room.min(end - at);
                    batch.push_normal(at, count as u32, 0);
                    at += count;
                    if count == room {
                        self.flush_channel(channel)?;
                    }
                }
                PageAction::Discard => {
                    batch.push_zero(at, (end - at) as u32);
                    at = end;
                }
            }
        }
        Ok(())
    }

    /// Hands all open batches to their channels.
    pub fn flush(&mut self) -> Result<(), WindowClosed> {
        (0..self.open.len()).try_for_each(|channel| self.flush_channel(channel))
    }

    fn flush_channel(&mut self, channel: usize) -> Result<(), WindowClosed> {
        let item = match self.open[channel].take() {
            Some((PageAction::Send(mode), pages)) => {
                Item::Guest(GuestPages { ram: self.ram.clone(), pages, post_copy: self.post_copy.clone(), mode })
            }
            Some((PageAction::Discard, batch)) => Item::Discard(batch),
            None => return Ok(()),
        };
        self.pipeline.channels[channel].send(item)
    }
}
