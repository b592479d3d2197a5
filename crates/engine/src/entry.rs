//! The pipeline's entries: how pages become batches, and which channel each of them takes.
//!
//! There are two. *Owned bytes*: content that somebody has already read, such as the packets of a QEMU ([`Entry::bytes`]
//! and [`Entry::page`]). *Guest ranges*: memory of a guest that runs and writes while it is read ([`Entry::guest`]); it
//! is read exactly once, into the batch, with the zero test in the same pass.
//!
//! **Affinity.** All pages of one 2 MiB region take the same channel, and a channel delivers in order, so a newer copy of
//! a page never overtakes an older one and rounds need no barrier across channels.

use std::sync::Arc;

use sterna_memory::snapshot::snapshot;
use sterna_wire::packet::{Run, RunKind};

use crate::batch::{BatchPool, PooledBatch};
use crate::send::{Item, SendChannel};
use crate::window::{Window, WindowClosed};

/// Pages of a region of this many bytes travel on one channel.
pub const REGION: u64 = 2 << 20;

/// What all entries of one migration share.
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
    /// The channel of a page, by its offset in bytes.
    pub fn channel_of(&self, block: u16, offset: u64) -> usize {
        // Neighbouring regions take different channels, and so do the first regions of different blocks.
        ((offset / REGION + u64::from(block)) % self.channels.len() as u64) as usize
    }

    /// Tells every channel that `generation` has ended. All entries must have been flushed.
    pub fn end_generation(&self, generation: u64) -> Result<(), WindowClosed> {
        self.channels.iter().try_for_each(|channel| channel.send(Item::GenerationEnd(generation)))
    }
}

/// One thread's way into the pipeline. Pages wait in open batches, one per channel, until [`Entry::flush`] or until
/// they are full.
#[derive(Debug)]
pub struct Entry {
    pipeline: Arc<Pipeline>,
    open: Vec<Option<PooledBatch>>,
    /// Scratch for the zero map of a snapshot: one bit per page of a batch.
    zero_map: Vec<u64>,
}

impl Entry {
    /// An entry into `pipeline`.
    pub fn new(pipeline: Arc<Pipeline>) -> Self {
        let open = pipeline.channels.iter().map(|_| None).collect();
        Self { pipeline, open, zero_map: Vec::new() }
    }

    /// The pipeline behind.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        &self.pipeline
    }

    /// The channel that all pages at `offsets` (bytes in the block) take, if it is one and they ascend: then
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

    /// Waits until `bytes` may be in flight. What waits here in open batches is handed over first if need be: it would
    /// otherwise never be acknowledged.
    pub fn enter(&mut self, bytes: u64) -> Result<(), WindowClosed> {
        if self.pipeline.window.try_enter(bytes)? {
            return Ok(());
        }
        self.flush()?;
        self.pipeline.window.enter(bytes)
    }

    /// Owned bytes, without a copy: one batch of `pages` (offset in bytes, and whether it is zero), straight to `channel`
    /// (from [`Entry::common_channel`]). `fill` is given the place for the content of those that are not zero, in this
    /// order. Their bytes have entered the window.
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

    /// Owned bytes, one page, copied. Its bytes have entered the window.
    pub fn page(&mut self, block: u16, offset: u64, content: &[u8]) -> Result<(), WindowClosed> {
        let page = offset / self.pipeline.page_size as u64;
        let batch = self.batch_for(block, offset, page, content.len())?;
        batch.push_normal(page, 1, content.len()).copy_from_slice(content);
        let in_window = batch.in_window() + content.len() as u64;
        batch.set_in_window(in_window);
        Ok(())
    }

    /// A zero page. It takes nothing of the window.
    pub fn zero_page(&mut self, block: u16, offset: u64) -> Result<(), WindowClosed> {
        let page = offset / self.pipeline.page_size as u64;
        self.batch_for(block, offset, page, 0)?.push_zero(page, 1);
        Ok(())
    }

    /// Guest ranges: `pages` pages at `memory`, which are those from `offset` on in `block`. Reads each byte once, while
    /// the guest may be writing it; enters the window itself.
    ///
    /// # Safety
    /// `memory` must be readable for `pages` pages while this runs. Others may write it meanwhile.
    pub unsafe fn guest(
        &mut self,
        block: u16,
        offset: u64,
        memory: *const u8,
        pages: usize,
    ) -> Result<(), WindowClosed> {
        let page_size = self.pipeline.page_size;
        let mut done = 0;
        while done < pages {
            let at = offset + (done * page_size) as u64;
            let region_end = (at / REGION + 1) * REGION;
            let channel = self.pipeline.channel_of(block, at);
            self.flush_channel(channel)?;
            let mut batch = self.pipeline.pool.take(block)?;
            let to_region_end = (region_end - at) as usize / page_size;
            let count = (pages - done).min(to_region_end.max(1)).min(batch.capacity() / page_size);
            self.enter((count * page_size) as u64)?;
            // SAFETY: the caller vouches for `pages` pages at `memory`; `done + count` stays within them.
            let content = unsafe { self.snapshot_into(&mut batch, at, memory.add(done * page_size), count) };
            self.pipeline.window.give_back((count * page_size) as u64 - content);
            batch.set_in_window(content);
            self.pipeline.channels[channel].send(Item::Pages(batch))?;
            done += count;
        }
        Ok(())
    }

    /// Reads `count` pages into `batch`; gives the bytes of content.
    ///
    /// # Safety
    /// As [`Entry::guest`].
    unsafe fn snapshot_into(&mut self, batch: &mut PooledBatch, offset: u64, memory: *const u8, count: usize) -> u64 {
        let page_size = self.pipeline.page_size;
        self.zero_map.clear();
        self.zero_map.resize(count.div_ceil(64), 0);
        // SAFETY: the caller's promise about `memory` is the one that is asked for here.
        let result = unsafe { snapshot(memory, count, batch.spare_mut(), &mut self.zero_map) };
        let first = offset / page_size as u64;
        for page in 0..count {
            if self.zero_map[page / 64] >> (page % 64) & 1 == 1 {
                batch.push_zero(first + page as u64, 1);
            } else {
                batch.push_normal(first + page as u64, 1, page_size);
            }
        }
        debug_assert_eq!(result.normal_bytes(), batch.content().len());
        batch.set_checksum(result.checksum);
        batch.content().len() as u64
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

    /// The open batch that takes `page`, a new one where the old cannot.
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
        Ok(self.open[channel].as_mut().expect("just put there"))
    }
}
