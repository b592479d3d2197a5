//! The destination's guest RAM: how pages reach its memory, by the rules of [`placer`](crate::receive::placer) before post-copy and by those
//! of `post_copy` after it has begun.
//!
//! Just before a channel writes a run of pages through a mapping, it populates all of them with one system call.

use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, ScopedJoinHandle};

use sterna_memory::PAGE_SIZE;
use sterna_memory::place::{FileWrite, Piece, Place, PlaceError, PlacementMethod, ZeroBy};
use sterna_memory::ram::{Backing, GuestRam, RamBlock, RamError};
use sterna_memory::received::ReceivedBitmap;
use sterna_wire::delta::PageDeltas;
use sterna_wire::packet::{BlockShape, Run, RunKind};

use super::Before;
use super::post_copy::{HugePage, PostCopy};
use crate::cancel::Cancel;
use crate::cpu_time;
use crate::migration::{Cause, ErrorKind, shapes};
use crate::receive::placer::{ChannelPlacer, Closed, PageAgreement, PagePlacer, PlacedBlock, StillWriting};
use crate::receive::{PageSink, Places, SinkError};

/// Pages populated or cleared by one step of preparing, so that several threads share a block: 64 MiB.
const STEP: u64 = (64 << 20) / PAGE_SIZE as u64;

/// Guest RAM that is being filled.
pub(super) struct Target {
    ram: GuestRam,
    placer: Arc<PagePlacer>,
    /// By block: the method by which its pages are written.
    methods: Vec<PlacementMethod>,
    /// Set once post-copy has begun.
    post_copy: OnceLock<Arc<PostCopy>>,
}

impl Target {
    /// Makes a target into which nothing has been placed. `prefault`: all of it is populated before.
    ///
    /// # Errors
    /// A block lies in another process, which has ended or whose memory may not be written.
    pub(super) fn new(ram: GuestRam, prefault: bool) -> Result<Self, PlaceError> {
        let block = |(block, shape): (&RamBlock, BlockShape)| {
            let place = place_of(block, prefault, ram.shared_stays_small())?;
            let memory = Some((place, ReceivedBitmap::new(block.pages())));
            Ok(PlacedBlock { name: block.name().to_owned(), shape, memory })
        };
        let blocks = ram.blocks().iter().zip(shapes(&ram)).map(block).collect::<Result<Vec<_>, PlaceError>>()?;
        let methods =
            blocks.iter().filter_map(|block| block.memory.as_ref()).map(|(place, _)| place.method()).collect();
        let placer = Arc::new(PagePlacer::new(|| {}));
        placer.begin(blocks);
        Ok(Self { ram, placer, methods, post_copy: OnceLock::new() })
    }

    pub(super) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Begins post-copy: from now on pages are placed under a guest that may be waiting for them.
    ///
    /// # Errors
    /// A channel is still writing pages that were sent before.
    pub(super) fn begin_post_copy(&self, post_copy: Arc<PostCopy>) -> Result<(), StillWriting> {
        // Set first, so that no channel finds the placer closed and post-copy not begun. Post-copy begins once.
        let _ = self.post_copy.set(post_copy);
        self.placer.close(Closed::PostCopy)
    }

    /// Refuses all later pages, except those of post-copy: the source has sent the totals, so all pages have been sent, or in post-copy all
    /// discards.
    ///
    /// # Errors
    /// A channel is still writing pages.
    pub(super) fn seal(&self) -> Result<(), StillWriting> {
        self.placer.close(Closed::Totals)
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.placer.is_closed(Closed::Totals)
    }

    /// Returns how many pages arrived damaged and have not been retransmitted. All channels have placed what the source had sent.
    pub(super) fn refused(&self) -> u64 {
        self.placer.refused()
    }

    pub(super) fn post_copy(&self) -> Option<&Arc<PostCopy>> {
        self.post_copy.get()
    }

    /// Makes all of RAM read as zero, and populates it if `prefault`.
    ///
    /// # Errors
    /// There is not that much memory, a process in which it lies has ended, or `cancel` was cancelled.
    pub(super) fn prepare(&self, before: Before, prefault: bool, cancel: &Cancel) -> Result<(), Cause> {
        match before {
            Before::Zero => {}
            Before::Anything => self.for_all_parts(cancel, clear)?,
            Before::Written => self.for_all_parts(cancel, |block, part| block.clear_written(part))?,
        }
        if prefault {
            self.for_all_parts(cancel, populate)?;
        }
        Ok(())
    }

    /// Calls `work` for all of RAM in parts, on a thread per CPU.
    fn for_all_parts(
        &self,
        cancel: &Cancel,
        work: impl Fn(&RamBlock, Range<u64>) -> Result<(), RamError> + Sync,
    ) -> Result<(), Cause> {
        let work = |block: &RamBlock, part| match cancel.is_cancelled() {
            true => Err(Cause::new(ErrorKind::Cancelled, "cancelled while guest RAM was being prepared")),
            false => work(block, part).map_err(|error| Cause::of(ErrorKind::Memory, error)),
        };
        let parts = |block: &RamBlock| (0..block.pages().div_ceil(STEP)).map(|part| part * STEP).collect::<Vec<_>>();
        let parts: Vec<_> =
            self.ram.blocks().iter().flat_map(|block| parts(block).into_iter().map(move |at| (block, at))).collect();
        // Unlike `available_parallelism`, this reads no file.
        let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count() as usize);
        let threads = cpus.min(parts.len()).max(1);
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let (parts, work, next) = (&parts, &work, &next);
            let some = move || {
                let take = || parts.get(next.fetch_add(1, Ordering::Relaxed));
                iter::from_fn(take).try_for_each(|(block, at)| work(block, *at..(at + STEP).min(block.pages())))
            };
            // Where the system has no more threads, fewer do the same work.
            let helper = |_| cpu_time::spawn_scoped(Builder::new().name("prepare-ram".into()), scope, some).ok();
            let helpers: Vec<_> = (1..threads).map_while(helper).collect();
            let join = |outcome: Result<(), Cause>, helper: ScopedJoinHandle<'_, Result<(), Cause>>| {
                outcome.and(helper.join().expect("preparing RAM does not panic"))
            };
            helpers.into_iter().fold(some(), join)
        })
    }

    /// Returns a line for each block about how it is filled, for the report.
    pub(super) fn placement(&self) -> Vec<String> {
        let line = |(block, method): (&RamBlock, &PlacementMethod)| {
            let backing = match block.backing() {
                Backing::Anonymous => "anonymous memory",
                Backing::Shared(..) => "a shared file in memory",
                Backing::Other => "memory of another kind",
            };
            format!("{}: {method}, {backing} with pages of {} bytes", block.name(), block.page_size())
        };
        self.ram.blocks().iter().zip(&self.methods).map(line).collect()
    }

    /// Returns whether this process writes the block through a mapping.
    fn is_mapped(&self, number: u16) -> bool {
        self.methods[usize::from(number)] == PlacementMethod::OwnMemory
    }

    /// Returns the memory of the normal runs of a block that is mapped.
    fn pieces(&self, number: u16, runs: &[Run]) -> Result<Places<'_>, RamError> {
        let block = &self.ram.blocks()[usize::from(number)];
        let mut places = Places::new();
        for run in runs.iter().filter(|run| run.kind == RunKind::Normal) {
            let pages = run.first..run.end();
            block.populate(pages.clone())?;
            places.push(block.piece(pages));
        }
        Ok(places)
    }
}

/// Returns how the pages of a block are written. `prefault`: all of the block is populated already, so that no page fault makes the mapping
/// the slower method.
fn place_of(block: &RamBlock, prefault: bool, shared_stays_small: bool) -> Result<Box<dyn Place>, PlaceError> {
    if let Some(place) = block.process_write()? {
        return Ok(Box::new(place));
    }
    let file = if prefault { None } else { by_file(block, shared_stays_small) };
    Ok(match file {
        Some(file) => Box::new(file),
        None => Box::new(MappedBlock(block.clone())),
    })
}

/// A block that this process writes through a mapping.
#[derive(Debug)]
struct MappedBlock(RamBlock);

impl MappedBlock {
    /// Returns the pages of `bytes` bytes at `offset`, both multiples of a page's size.
    fn pages(offset: u64, bytes: u64) -> Range<u64> {
        offset / PAGE_SIZE as u64..(offset + bytes) / PAGE_SIZE as u64
    }
}

fn failed(error: &RamError) -> PlaceError {
    PlaceError::Unusable(error.to_string())
}

impl Place for MappedBlock {
    fn size(&self) -> u64 {
        self.0.bytes()
    }

    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), PlaceError> {
        for piece in pieces {
            let pages = Self::pages(piece.offset, piece.data.len() as u64);
            self.0.populate(pages.clone()).map_err(|error| failed(&error))?;
            self.0.write(pages.start, piece.data);
        }
        Ok(())
    }

    fn read_pages(&self, offsets: &[u64], pages: &mut [u8]) -> Result<(), PlaceError> {
        let copies = offsets.iter().zip(pages.chunks_exact_mut(PAGE_SIZE));
        copies
            .into_iter()
            .try_for_each(|(at, page)| self.0.read_page(at / PAGE_SIZE as u64, page))
            .map_err(|error| failed(&error))
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), PlaceError> {
        self.0.zero(Self::pages(offset, len));
        Ok(())
    }

    fn method(&self) -> PlacementMethod {
        PlacementMethod::OwnMemory
    }
}

/// Populates `part` of `block`, which was never written, or was cleared.
fn populate(block: &RamBlock, part: Range<u64>) -> Result<(), RamError> {
    match block.process() {
        Some(_) => block.populate_zeros(part),
        None => block.populate(part),
    }
}

/// Returns the file behind a block of ordinary pages of shared memory. Writing the file fills a new page at once, where through a
/// mapping a page fault would first clear it (`place::FileWrite` has the measurements). With huge pages one fault
/// brings 2 MiB, which is faster still, so such blocks have none here.
fn by_file(block: &RamBlock, shared_stays_small: bool) -> Option<FileWrite> {
    let Backing::Shared(file, offset) = block.backing() else { return None };
    if block.page_size() > PAGE_SIZE || !shared_stays_small {
        return None;
    }
    let file = file.try_clone().ok()?;
    FileWrite::new(file, *offset, block.bytes(), ZeroBy::Writing).ok()
}

/// Makes `part` of `block` read as zero: releases it to the system, or where that is not possible clears the pages that are not zero.
fn clear(block: &RamBlock, part: Range<u64>) -> Result<(), RamError> {
    if block.process().is_some() {
        return block.clear_written(part);
    }
    if let Ok(Some(memory)) = block.discardable()
        && memory.discard(part.clone()).is_ok()
    {
        return Ok(());
    }
    for page in part {
        if !block.is_zero(page) {
            block.zero(page..page + 1);
        }
    }
    Ok(())
}

/// The sink of one RAM channel, or of the post-copy channel.
pub(super) struct RamSink {
    target: Arc<Target>,
    placer: ChannelPlacer,
    huge: HugePage,
    /// Whether the channel is the post-copy channel.
    is_post_copy: bool,
}

impl RamSink {
    /// Makes the sink of the RAM channel with the number `channel`.
    pub(super) fn new(target: &Arc<Target>, channel: u16, agreement: PageAgreement) -> Self {
        let placer = ChannelPlacer::new(&target.placer, channel, agreement);
        Self { target: Arc::clone(target), placer, huge: HugePage::default(), is_post_copy: false }
    }

    /// Makes the sink of the post-copy channel.
    pub(super) fn of_post_copy(target: &Arc<Target>) -> Self {
        Self { is_post_copy: true, ..Self::new(target, 0, PageAgreement::default()) }
    }
}

impl PageSink for RamSink {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        self.target.placer.shapes()
    }

    fn places(&mut self, block: u16, runs: &[Run]) -> Result<Option<Places<'_>>, SinkError> {
        if self.target.post_copy().is_some() || !self.target.is_mapped(block) {
            return Ok(None);
        }
        if !self.placer.begin_in_place(block, runs)? {
            return Ok(None);
        }
        // This thread is the only writer: nothing else writes a destination's RAM before its guest was started; before that the placer is
        // closed, which fails while this thread is writing; and this thread's channel is the only one that may write the region.
        Ok(Some(self.target.pieces(block, runs)?))
    }

    fn placed(&mut self) {
        self.placer.end_in_place();
    }

    fn pages(&mut self, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        match self.target.post_copy() {
            Some(post_copy) => post_copy.place(block, runs, content, &mut self.huge),
            None => self.placer.place(block, runs, content),
        }
    }

    fn deltas(&mut self, block: u16, runs: &[Run], deltas: PageDeltas<'_>) -> Result<bool, SinkError> {
        match self.target.post_copy() {
            Some(_) => Err("deltas in post-copy".into()),
            None => self.placer.apply(block, runs, deltas),
        }
    }

    fn refuse(&mut self, block: u16, runs: &[Run]) -> Result<bool, SinkError> {
        match self.target.post_copy() {
            // The channels are opened anew, and all missing pages are requested.
            Some(_) => Ok(false),
            None => self.placer.refuse(block, runs),
        }
    }

    fn discard(&mut self, block: u16, runs: &[Run]) -> Result<(), SinkError> {
        // The totals count the packets of the RAM channels. Nothing would wait for a discard on the other channel before the guest starts.
        if self.is_post_copy {
            return Err("discards on the post-copy channel".into());
        }
        let _permit = self.target.placer.permit_discard()?;
        let Some(post_copy) = self.target.post_copy() else { return Err("discards before post-copy was begun".into()) };
        self.target.placer.discard(block, runs);
        post_copy.discard(block, runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::tests::ram_of;

    #[test]
    fn a_cancellation_ends_the_preparation_of_ram() {
        let target = Target::new(ram_of(&[&[1]]), true).unwrap();
        let cancel = Cancel::new();
        assert!(target.prepare(Before::Written, true, &cancel).is_ok());
        cancel.cancel();
        for (before, prefault) in [(Before::Written, false), (Before::Anything, false), (Before::Zero, true)] {
            assert_eq!(target.prepare(before, prefault, &cancel).unwrap_err().reason.kind, ErrorKind::Cancelled);
        }
    }

    #[test]
    fn discards_are_refused_on_the_post_copy_channel_and_before_post_copy() {
        let target = Arc::new(Target::new(ram_of(&[&[1]]), false).unwrap());
        let page = [Run { kind: RunKind::Zero, first: 0, count: 1 }];
        let refused = |mut sink: RamSink| sink.discard(0, &page).unwrap_err().to_string();
        assert_eq!(refused(RamSink::of_post_copy(&target)), "discards on the post-copy channel");
        let ram = RamSink::new(&target, 0, PageAgreement::default());
        assert_eq!(refused(ram), "discards before post-copy was begun");
    }
}
