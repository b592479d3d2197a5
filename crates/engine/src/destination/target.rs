//! The destination's guest RAM, and the sinks that place pages in it.
//!
//! A page whose content did not arrive as the source read it counts as missing until it was retransmitted.
//!
//! A page is marked as received before its content is written, so a zero page costs a page fault only where the page had
//! other content before. Just before a channel writes a run, it populates all pages of the run with one system call.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::AtomicPageBitmap;
use sterna_memory::delta::apply;
use sterna_memory::place::{FileWrite, Place, PlaceError, PlacementMethod, ZeroBy};
use sterna_memory::ram::{Backing, GuestRam, RamBlock, RamError};
use sterna_memory::received::{Freshness, ReceivedBitmap};
use sterna_wire::checksum::crc32c;
use sterna_wire::delta::{PageDelta, PageDeltas};
use sterna_wire::packet::{BlockShape, Run, RunKind};

use super::Before;
use super::post_copy::{HugePage, PostCopy};
use crate::batch::{AlignedBuffer, REGION};
use crate::migration::shapes;
use crate::receive::{PageSink, Places, SinkError};

/// Pages populated or cleared by one step of preparing, so that several threads share a block: 64 MiB.
const STEP: u64 = (64 << 20) / PAGE_SIZE as u64;

/// Guest RAM that is being filled.
pub(super) struct Target {
    ram: GuestRam,
    received: Vec<ReceivedBitmap>,
    shapes: Arc<[BlockShape]>,
    /// By block: how it is written, where that is not by this process through a mapping.
    written_by: Vec<Option<Box<dyn Place>>>,
    /// Set once post-copy has begun.
    post_copy: OnceLock<Arc<PostCopy>>,
    /// By block and region: the number of the RAM channel that carries its pages, plus 1; 0 before the first page.
    channels: Vec<Vec<AtomicU16>>,
    /// Number of channels that are writing directly into RAM.
    writing: AtomicU32,
    /// By block: pages that arrived damaged and have not been retransmitted; unset before the first.
    refused: OnceLock<Vec<AtomicPageBitmap>>,
    /// Whether the source has sent the totals: all pages have been sent, or in post-copy all discards.
    sealed: AtomicBool,
}

impl Target {
    /// Makes a target into which nothing has been placed. `prefault`: all of it is populated before.
    ///
    /// # Errors
    /// A block lies in another process, which has ended or whose memory may not be written.
    pub(super) fn new(ram: GuestRam, prefault: bool) -> Result<Self, PlaceError> {
        let written_by = ram
            .blocks()
            .iter()
            .map(|block| writer(block, prefault, ram.shared_stays_small()))
            .collect::<Result<_, _>>()?;
        let received = ram.blocks().iter().map(|block| ReceivedBitmap::new(block.pages())).collect();
        let shapes = shapes(&ram).into();
        let regions = |block: &RamBlock| (0..block.bytes().div_ceil(REGION)).map(|_| AtomicU16::new(0)).collect();
        let channels = ram.blocks().iter().map(regions).collect();
        Ok(Self {
            ram,
            received,
            shapes,
            written_by,
            post_copy: OnceLock::new(),
            channels,
            writing: AtomicU32::new(0),
            refused: OnceLock::new(),
            sealed: AtomicBool::new(false),
        })
    }

    pub(super) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Begins post-copy: from now on pages are placed under a guest that may be waiting for them. Fails where a channel is still writing
    /// pages that were sent before.
    pub(super) fn begin_post_copy(&self, post_copy: Arc<PostCopy>) -> Result<(), String> {
        // Set before `writing` is read, so that no channel begins to write after that. Post-copy begins once.
        let _ = self.post_copy.set(post_copy);
        match self.writing.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err("pages that were sent before it are still on their way".into()),
        }
    }

    /// Refuses all later pages, except those of post-copy.
    pub(super) fn seal(&self) {
        self.sealed.store(true, Ordering::Release);
    }

    fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// Counts the pages of `runs`, which arrived damaged, as missing.
    fn refuse(&self, number: u16, runs: impl Iterator<Item = Range<u64>>) {
        let none = || self.ram.blocks().iter().map(|block| AtomicPageBitmap::new(block.pages())).collect();
        let refused = &self.refused.get_or_init(none)[usize::from(number)];
        runs.for_each(|pages| refused.set(pages));
    }

    /// Counts the pages of `runs`, which are placed or discarded, as missing no more.
    fn settle(&self, number: u16, runs: &[Run]) {
        if let Some(refused) = self.refused.get() {
            runs.iter().for_each(|run| refused[usize::from(number)].clear(run.first..run.end()));
        }
    }

    /// Returns how many pages arrived damaged and have not been retransmitted. All channels have placed what the source had sent.
    pub(super) fn refused(&self) -> u64 {
        self.refused.get().map_or(0, |blocks| blocks.iter().map(AtomicPageBitmap::count).sum())
    }

    /// Fails where the pages belong to a region that another channel carries: only one thread may write a page.
    fn claim(&self, number: u16, runs: &[Run], channel: u16) -> Result<(), SinkError> {
        let regions = &self.channels[usize::from(number)];
        for run in runs {
            let first = run.first * PAGE_SIZE as u64 / REGION;
            let last = (run.end() * PAGE_SIZE as u64).div_ceil(REGION);
            for region in &regions[first as usize..last as usize] {
                let claimed = region.compare_exchange(0, channel + 1, Ordering::Relaxed, Ordering::Relaxed);
                if claimed.is_err_and(|owner| owner != channel + 1) {
                    return Err("pages of one region arrive on several channels".into());
                }
            }
        }
        Ok(())
    }

    pub(super) fn post_copy(&self) -> Option<&Arc<PostCopy>> {
        self.post_copy.get()
    }

    /// Makes all of RAM read as zero, and populates it if `prefault`.
    pub(super) fn prepare(&self, before: Before, prefault: bool) -> Result<(), String> {
        match before {
            Before::Zero => {}
            Before::Anything => self.for_all_parts(clear)?,
            Before::Written => {
                let clear = |block: &RamBlock| block.clear_written(0..block.pages());
                self.ram.blocks().iter().try_for_each(clear).map_err(|error| error.to_string())?;
            }
        }
        if prefault {
            self.for_all_parts(populate)?;
        }
        Ok(())
    }

    /// Calls `work` for all of RAM in parts, on a thread per CPU.
    fn for_all_parts(&self, work: impl Fn(&RamBlock, Range<u64>) -> Result<(), String> + Sync) -> Result<(), String> {
        let parts = |block: &RamBlock| (0..block.pages().div_ceil(STEP)).map(|part| part * STEP).collect::<Vec<_>>();
        let parts: Vec<_> =
            self.ram.blocks().iter().flat_map(|block| parts(block).into_iter().map(move |at| (block, at))).collect();
        // Unlike `available_parallelism`, this reads no file.
        let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count() as usize);
        let threads = cpus.min(parts.len()).max(1);
        std::thread::scope(|scope| {
            let (parts, work) = (&parts, &work);
            let one = |thread: usize| {
                parts
                    .iter()
                    .skip(thread)
                    .step_by(threads)
                    .try_for_each(|(block, at)| work(block, *at..(at + STEP).min(block.pages())))
            };
            let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || one(thread))).collect();
            running.into_iter().try_for_each(|thread| thread.join().expect("preparing RAM does not panic"))
        })
    }

    /// Returns a line for each block about how it is filled, for the report.
    pub(super) fn placement(&self) -> Vec<String> {
        let line = |(block, place): (&RamBlock, &Option<Box<dyn Place>>)| {
            let method = place.as_ref().map_or(PlacementMethod::OwnMemory, |place| place.method());
            let backing = match block.backing() {
                Backing::Anonymous => "anonymous memory",
                Backing::Shared(..) => "a shared file in memory",
                Backing::Other => "memory of another kind",
            };
            format!("{}: {method}, {backing} with pages of {} bytes", block.name(), block.page_size())
        };
        self.ram.blocks().iter().zip(&self.written_by).map(line).collect()
    }

    /// Returns the memory of the normal runs, and zeroes the zero runs. None where the block is not written through a mapping.
    fn places(&self, number: u16, runs: &[Run]) -> Result<Option<Places<'_>>, RamError> {
        if self.written_by[usize::from(number)].is_some() {
            return Ok(None);
        }
        let block = &self.ram.blocks()[usize::from(number)];
        let received = &self.received[usize::from(number)];
        let mut places = Places::new();
        for run in runs {
            let pages = run.first..run.end();
            match run.kind {
                RunKind::Normal => {
                    received.mark(pages.clone());
                    block.populate(pages.clone())?;
                    // This thread is the only writer: nothing else writes a destination's RAM before its guest was started; before that
                    // all channels' threads have ended, or in post-copy have ended such writing (`begin_post_copy`); and this thread's
                    // channel is the only one that may write the region (`claim`).
                    places.push(block.piece(pages));
                }
                RunKind::Zero => received.zero(pages, Freshness::Fresh, |part| block.zero(part)),
            }
        }
        Ok(Some(places))
    }

    fn place(&self, number: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        let block = &self.ram.blocks()[usize::from(number)];
        let received = &self.received[usize::from(number)];
        let mut rest = content;
        for run in runs {
            let pages = run.first..run.end();
            match run.kind {
                RunKind::Normal => {
                    let (now, later) = rest.split_at(run.count as usize * PAGE_SIZE);
                    rest = later;
                    received.mark(pages.clone());
                    match &self.written_by[usize::from(number)] {
                        Some(place) => place.write(run.first * PAGE_SIZE as u64, now)?,
                        None => {
                            block.populate(pages)?;
                            block.write(run.first, now);
                        }
                    }
                }
                RunKind::Zero => {
                    let (place, mut outcome) = (&self.written_by[usize::from(number)], Ok(()));
                    received.zero(pages, Freshness::Fresh, |part| match place {
                        Some(place) if outcome.is_ok() => outcome = zero_by(&**place, part),
                        Some(_) => {}
                        None => block.zero(part),
                    });
                    outcome?;
                }
            }
        }
        Ok(())
    }

    /// Copies the content of page `page` of block `number`.
    fn read_page(&self, number: u16, page: u64, copy: &mut [u8]) -> Result<(), SinkError> {
        Ok(self.ram.blocks()[usize::from(number)].read_page(page, copy)?)
    }
}

/// Returns how a block is written, where that is not by this process through a mapping. `prefault`: all of the block is populated already,
/// so that no page fault makes the mapping the slower method.
fn writer(block: &RamBlock, prefault: bool, shared_stays_small: bool) -> Result<Option<Box<dyn Place>>, PlaceError> {
    if let Some(place) = block.process_write()? {
        return Ok(Some(Box::new(place)));
    }
    let file = if prefault { None } else { by_file(block, shared_stays_small) };
    Ok(file.map(|file| Box::new(file) as Box<dyn Place>))
}

/// Makes the pages of `part` read as zero.
fn zero_by(place: &dyn Place, part: Range<u64>) -> Result<(), PlaceError> {
    place.zero(part.start * PAGE_SIZE as u64, (part.end - part.start) * PAGE_SIZE as u64)
}

/// Populates `part` of `block`.
fn populate(block: &RamBlock, part: Range<u64>) -> Result<(), String> {
    match block.process_write().map_err(|error| error.to_string())? {
        // Zeroing keeps the content: the part was never written, or was cleared.
        Some(place) => zero_by(&place, part).map_err(|error| error.to_string()),
        None => block.populate(part).map_err(|error| error.to_string()),
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
fn clear(block: &RamBlock, part: Range<u64>) -> Result<(), String> {
    if block.process().is_some() {
        return block.clear_written(part).map_err(|error| error.to_string());
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
    /// Whether the source retransmits refused pages.
    may_refuse: bool,
    /// Number of the RAM channel; not used in post-copy.
    channel: u16,
    /// Whether this channel is writing directly into RAM.
    writing: bool,
    huge: HugePage,
    /// Buffer in which deltas are applied; made with the first.
    page: Option<AlignedBuffer>,
}

impl RamSink {
    pub(super) fn new(target: &Arc<Target>, channel: u16, may_refuse: bool) -> Self {
        let huge = HugePage::default();
        Self { target: Arc::clone(target), may_refuse, channel, writing: false, huge, page: None }
    }

    /// Before post-copy: checks that the source may send these pages now, on this channel.
    fn check(&self, block: u16, runs: &[Run]) -> Result<(), SinkError> {
        if self.target.is_sealed() {
            return Err("pages after the source's totals".into());
        }
        self.target.claim(block, runs, self.channel)
    }
}

impl Drop for RamSink {
    fn drop(&mut self) {
        self.placed();
    }
}

impl PageSink for RamSink {
    fn blocks(&self) -> Result<Arc<[BlockShape]>, SinkError> {
        Ok(Arc::clone(&self.target.shapes))
    }

    fn places(&mut self, block: u16, runs: &[Run]) -> Result<Option<Places<'_>>, SinkError> {
        // Counted before `post_copy` is read, so that the thread that begins post-copy sees it.
        self.target.writing.fetch_add(1, Ordering::SeqCst);
        self.writing = true;
        if self.target.post_copy().is_some() {
            self.placed();
            return Ok(None);
        }
        self.check(block, runs)?;
        // If the content proves damaged, it is refused after this.
        self.target.settle(block, runs);
        // `None`: the content is received into a buffer.
        Ok(self.target.places(block, runs)?)
    }

    fn placed(&mut self) {
        if std::mem::take(&mut self.writing) {
            self.target.writing.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn pages(&mut self, block: u16, runs: &[Run], content: &[u8]) -> Result<(), SinkError> {
        match self.target.post_copy() {
            Some(post_copy) => post_copy.place(block, runs, content, &mut self.huge),
            None => {
                self.placed();
                self.check(block, runs)?;
                self.target.settle(block, runs);
                self.target.place(block, runs, content)
            }
        }
    }

    fn deltas(&mut self, block: u16, runs: &[Run], mut deltas: PageDeltas<'_>) -> Result<bool, SinkError> {
        self.placed();
        if self.target.post_copy().is_some() {
            return Err("deltas in post-copy".into());
        }
        self.check(block, runs)?;
        let page = self.page.get_or_insert_with(|| AlignedBuffer::new(PAGE_SIZE));
        for number in runs.iter().flat_map(|run| run.first..run.end()) {
            let Some(Ok(PageDelta { checksum, record })) = deltas.next() else { return Ok(false) };
            self.target.read_page(block, number, page)?;
            if apply(record, page).is_err() || crc32c(page) != checksum {
                return Ok(false);
            }
            let run = [Run { kind: RunKind::Normal, first: number, count: 1 }];
            self.target.settle(block, &run);
            self.target.place(block, &run, page)?;
        }
        Ok(deltas.next().is_none())
    }

    fn refuse(&mut self, block: u16, runs: &[Run]) -> Result<bool, SinkError> {
        self.placed();
        // In post-copy the channels are opened anew, and all missing pages are requested.
        if !self.may_refuse || self.target.post_copy().is_some() {
            return Ok(false);
        }
        self.check(block, runs)?;
        let (zero, normal): (Vec<_>, Vec<_>) = runs.iter().copied().partition(|run| run.kind == RunKind::Zero);
        self.target.settle(block, &zero);
        self.target.place(block, &zero, &[])?;
        self.target.refuse(block, normal.iter().map(|run| run.first..run.end()));
        Ok(true)
    }

    fn discard(&mut self, block: u16, runs: &[Run]) -> Result<(), SinkError> {
        match self.target.post_copy() {
            Some(_) if self.target.is_sealed() => Err("discards after the source's totals".into()),
            Some(post_copy) => {
                self.target.settle(block, runs);
                post_copy.discard(block, runs)
            }
            None => Err("discards before post-copy was begun".into()),
        }
    }
}
