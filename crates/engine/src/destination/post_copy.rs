//! Post-copy at the destination: the guest runs, and missing pages that it touches are requested from the source.
//!
//! ```text
//! vCPU ─ fault ─> fault thread ─ request ─> source        pages ─ RAM channels, post-copy channel ─> place ─> vCPU wakes
//! ```
//! `memory::missing` knows which pages are stale and places them. This file has the thread that handles faults, the channel on which
//! pages are requested, and the end: when no page is stale any more. The guest may run in another process
//! (`memory::guest_process`): then a userfaultfd of that process reports its faults and fills its pages.

use std::collections::HashMap;
use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_memory::discard::DiscardError;
use sterna_memory::guest_process::HugePageAdvice;
use sterna_memory::missing::{FaultAction, MissingError, MissingPages};
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_memory::userfault::Userfault;
use sterna_memory::userfault::wait::{FaultBuffer, Stop};
use sterna_wire::control::PostCopyFigures;
use sterna_wire::packet::{PageRequest, Run, RunKind};
use sterna_wire::reason::{ErrorKind, Reason};

use crate::cpu_time;
use crate::receive::SinkError;
use crate::transport::Writer;

/// Maximum bytes of a backing's page, for which the guest waits as a whole: one of 1 GiB would take seconds.
const MAX_PAGE: usize = 2 << 20;
/// Pause between two attempts to allocate memory for a page.
const NO_MEMORY_PAUSE: Duration = Duration::from_millis(100);
/// Buffer for the list of missing pages, in bytes: a TLS record is at most 16 KiB, and a system call for several is cheap.
const LIST_BUFFER: usize = 64 << 10;
/// Maximum number of latencies that are kept for the report.
const MAX_LATENCIES: usize = 1 << 20;

/// A message of post-copy to the driver.
#[derive(Debug)]
pub(super) enum PostCopyEvent {
    /// No page is missing any more.
    Complete,
    /// Missing memory cannot be placed, with the reason.
    Failed(Reason),
    /// The guest waits for memory of this host, with the reason. Sent once.
    NoMemory(String),
    /// A line for people.
    Note(String),
}

/// The pages that are being requested, and how long earlier requests took.
#[derive(Debug, Default)]
struct Requested {
    since: HashMap<(u16, u64), Instant>,
    /// In microseconds.
    latencies: Vec<u32>,
}

/// How far loading the guest's state is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Load {
    #[default]
    NotDone,
    /// Given up: missing pages read as zero.
    Released,
    Done,
}

/// RAM of which pages are missing.
pub(super) struct PostCopy {
    ram: GuestRam,
    missing: Vec<MissingPages>,
    /// The setting for huge pages before post-copy, which is restored at its end.
    huge_pages: HugePageAdvice,
    userfault: Arc<Userfault>,
    stop: Stop,
    /// The channel on which pages are requested; none while the source is lost.
    requests: Mutex<Option<Writer>>,
    requested: Mutex<Requested>,
    /// Number of pages that are being requested.
    awaited: AtomicUsize,
    /// Whether all discards have arrived: then no page is missing when none is stale.
    armed: AtomicBool,
    complete: AtomicBool,
    /// Whether a lack of memory has been reported.
    no_memory: AtomicBool,
    load: Mutex<Load>,
    news: Box<dyn Fn(PostCopyEvent) + Send + Sync>,
}

fn failed(text: impl Display) -> PostCopyEvent {
    PostCopyEvent::Failed(Reason::new(ErrorKind::Memory, text))
}

/// Returns why `ram` cannot be filled after the guest has started; none if it can. Does nothing in another process that runs the guest:
/// the caller must know whether a userfaultfd can be made there. `sandboxed`: this process can open none.
pub(super) fn refusal(ram: &GuestRam, sandboxed: bool) -> Option<String> {
    let features = match features(ram) {
        Ok(features) => features,
        Err(reason) => return Some(reason),
    };
    if ram.guest().is_some() {
        return None;
    }
    if sandboxed && !ram.has_userfault() {
        return Some("the destination is sandboxed, and has no userfaultfd (GuestRam::with_userfault)".into());
    }
    ram.open_userfault(features).err().map(|error| error.to_string())
}

/// Returns the userfaultfd features that the blocks' backings need.
fn features(ram: &GuestRam) -> Result<u64, String> {
    let of = |block: &RamBlock| {
        let name = block.name();
        if block.page_size() > MAX_PAGE {
            return Err(format!(
                "RAM block {name} has pages of {} bytes, too large to wait for one",
                block.page_size()
            ));
        }
        match ram.discardable(block) {
            Ok(Some(memory)) => Ok(memory.userfault_features()),
            Ok(None) => Err(format!("RAM block {name} is of a kind whose missing pages cannot be watched")),
            Err(error) => Err(format!("RAM block {name}: {error}")),
        }
    };
    ram.blocks().iter().try_fold(0, |features, block| Ok(features | of(block)?))
}

impl PostCopy {
    /// Begins to watch for missing pages of `ram`: all pages that were sent so far are in place.
    pub(super) fn begin(ram: &GuestRam, news: Box<dyn Fn(PostCopyEvent) + Send + Sync>) -> Result<Arc<Self>, String> {
        let features = features(ram)?;
        let huge_pages = ram.huge_page_advice().map_err(|error| format!("the mappings of guest RAM: {error}"))?;
        let userfault = ram.open_userfault(features).map_err(|error| error.to_string())?;
        let watch = |block: &RamBlock| {
            let failed = |error: DiscardError| format!("RAM block {}: {error}", block.name());
            if ram.guest().is_some()
                && let Some(own) = block.discardable().map_err(failed)?
            {
                // Through this process's mapping, too, the kernel could make a huge page over the holes.
                own.forbid_huge_pages().map_err(failed)?;
            }
            let memory = ram.discardable(block).map_err(failed)?.ok_or("it cannot be watched")?;
            MissingPages::new(memory, Arc::clone(&userfault)).map_err(|error| error.to_string())
        };
        let missing = ram.blocks().iter().map(watch).collect::<Result<_, String>>()?;
        let stop = Stop::new().map_err(|error| format!("no eventfd: {error}"))?;
        Ok(Arc::new(Self {
            ram: ram.clone(),
            missing,
            huge_pages,
            userfault,
            stop,
            requests: Mutex::default(),
            requested: Mutex::default(),
            awaited: AtomicUsize::new(0),
            armed: AtomicBool::new(false),
            complete: AtomicBool::new(false),
            no_memory: AtomicBool::new(false),
            load: Mutex::default(),
            news,
        }))
    }

    /// Starts the thread that handles faults.
    pub(super) fn handle_faults(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let post_copy = Arc::clone(self);
        cpu_time::spawn(Builder::new().name("faults".into()), move || {
            let mut buffer = FaultBuffer::new();
            loop {
                match post_copy.userfault.wait_faults(&post_copy.stop, &mut buffer) {
                    Ok(None) => return,
                    Ok(Some(faults)) => {
                        let outcome = faults.iter().try_for_each(|fault| post_copy.answer(fault.address()));
                        if let Err(error) = outcome {
                            (post_copy.news)(failed(format_args!("a page fault could not be answered: {error}")));
                            return;
                        }
                    }
                    Err(error) => {
                        (post_copy.news)(failed(error));
                        return;
                    }
                }
            }
        })
    }

    /// Answers a fault. Retries while the system has no memory for a page that was never written; the faulting thread waits meanwhile.
    fn answer(&self, address: usize) -> Result<(), MissingError> {
        loop {
            match self.fault(address) {
                Err(error) if error.is_no_memory() => {
                    if !self.no_memory.swap(true, Ordering::Relaxed) {
                        (self.news)(PostCopyEvent::NoMemory(error.to_string()));
                    }
                    if self.stop.within(NO_MEMORY_PAUSE) {
                        return Ok(());
                    }
                }
                outcome => return outcome,
            }
        }
    }

    fn fault(&self, address: usize) -> Result<(), MissingError> {
        let Some((number, block)) = self.missing.iter().enumerate().find(|(_, block)| block.contains(address)) else {
            return Ok(());
        };
        if let FaultAction::Request(pages) = block.fault(address)? {
            let block = number as u16;
            {
                let mut requested = self.requested();
                requested.since.insert((block, pages.start), Instant::now());
                self.awaited.store(requested.since.len(), Ordering::Release);
            }
            let request = PageRequest { block, first: pages.start, count: (pages.end - pages.start) as u32 };
            let mut requests = self.requests();
            // Without a source the page is requested when the source has reconnected: its fault is repeated then.
            if let Some(writer) = &mut *requests
                && writer.write_all_vectored(&[&request.encode()]).is_err()
            {
                *requests = None;
            }
        }
        Ok(())
    }

    fn requested(&self) -> MutexGuard<'_, Requested> {
        self.requested.lock().expect("no thread panics with the lock held")
    }

    fn requests(&self) -> MutexGuard<'_, Option<Writer>> {
        self.requests.lock().expect("no thread panics with the lock held")
    }

    /// Uses the first post-copy channel.
    pub(super) fn connected(&self, writer: Writer) -> Result<(), MissingError> {
        *self.requests() = Some(writer);
        // Faults before this channel have not been requested, and are repeated now.
        self.missing.iter().try_for_each(MissingPages::forget_requests)
    }

    /// Uses the post-copy channel of a source that has reconnected: sends the list of missing pages, then the requests.
    pub(super) fn reconnected(&self, mut writer: Writer) -> io::Result<()> {
        // Buffered: where the missing pages are scattered there are as many runs as pages, and vCPUs wait for them.
        let mut list = BufWriter::with_capacity(LIST_BUFFER, &mut writer);
        let mut outcome = Ok(());
        for (block, missing) in self.missing.iter().enumerate() {
            missing.for_each_stale_run(|mut run| {
                while outcome.is_ok() && !run.is_empty() {
                    let count = (run.end - run.start).min(u32::MAX.into());
                    let request = PageRequest { block: block as u16, first: run.start, count: count as u32 };
                    outcome = list.write_all(&request.encode());
                    run.start += count;
                }
            });
        }
        outcome?;
        list.write_all(&PageRequest { block: 0, first: 0, count: 0 }.encode())?;
        list.flush()?;
        drop(list);
        *self.requests() = Some(writer);
        self.missing.iter().try_for_each(MissingPages::forget_requests).map_err(io::Error::other)
    }

    /// Records that the source is lost: pages are requested when it has reconnected.
    pub(super) fn disconnected(&self) {
        *self.requests() = None;
    }

    pub(super) fn discard(&self, block: u16, runs: &[Run]) -> Result<(), SinkError> {
        let missing = &self.missing[usize::from(block)];
        let runs: Vec<_> = runs.iter().map(|run| run.first..run.end()).collect();
        Ok(missing.declare_all_stale(&runs)?)
    }

    /// Pages have come. `huge` puts together those of a huge page; it is the channel's own.
    pub(super) fn place(&self, block: u16, runs: &[Run], content: &[u8], huge: &mut HugePage) -> Result<(), SinkError> {
        let placed = self.place_runs(block, runs, content, huge);
        if let Err(PlaceError::Missing(error @ MissingError::NotMissing { .. })) = &placed {
            (self.news)(failed(error));
        }
        self.if_complete();
        Ok(placed?)
    }

    fn place_runs(&self, block: u16, runs: &[Run], content: &[u8], huge: &mut HugePage) -> Result<(), PlaceError> {
        let missing = &self.missing[usize::from(block)];
        let whole = missing.backing().page_size() / PAGE_SIZE;
        let mut rest = content;
        for run in runs {
            let content = match run.kind {
                RunKind::Normal => {
                    let (now, later) = rest.split_at(run.count as usize * PAGE_SIZE);
                    rest = later;
                    Some(now)
                }
                RunKind::Zero => None,
            };
            match content {
                _ if whole > 1 => huge.take(block, run, content, whole, |first, page| {
                    self.arrived(block, first..first + whole as u64);
                    missing.place(first, page).map(drop)
                })?,
                Some(content) => drop(missing.place(run.first, content)?),
                None => drop(missing.place_zero(run.first..run.end())?),
            }
            if whole == 1 {
                self.arrived(block, run.first..run.end());
            }
        }
        Ok(())
    }

    fn arrived(&self, block: u16, pages: std::ops::Range<u64>) {
        if self.awaited.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut requested = self.requested();
        for page in pages {
            if let Some(since) = requested.since.remove(&(block, page))
                && requested.latencies.len() < MAX_LATENCIES
            {
                requested.latencies.push(u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX));
            }
        }
        self.awaited.store(requested.since.len(), Ordering::Release);
    }

    /// Begins to watch for completion: all discards have arrived and the guest runs.
    pub(super) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
        self.if_complete();
    }

    fn if_complete(&self) {
        let ready = self.armed.load(Ordering::SeqCst) && self.missing.iter().all(|block| block.stale_count() == 0);
        if ready && !self.complete.swap(true, Ordering::SeqCst) {
            (self.news)(match self.missing.iter().try_for_each(MissingPages::finish) {
                Ok(()) => {
                    self.leave();
                    PostCopyEvent::Complete
                }
                Err(error) => failed(error),
            });
        }
    }

    /// Restores the setting for huge pages, and removes the userfaultfd from the guest's process. Where that fails, the guest has all of
    /// its memory all the same.
    fn leave(&self) {
        for block in &self.missing {
            if let Err(error) = block.backing().restore_huge_pages(&self.huge_pages) {
                (self.news)(PostCopyEvent::Note(format!("the guest goes on without transparent huge pages: {error}")));
            }
        }
        if let Some(Err(error)) = self.ram.guest().map(|guest| guest.close_userfault()) {
            (self.news)(PostCopyEvent::Note(format!(
                "a userfaultfd that nothing uses stays open in the guest's process: {error}"
            )));
        }
    }

    /// Returns whether the process that runs the guest has ended, where it is another process.
    pub(super) fn guest_has_ended(&self) -> bool {
        self.ram.guest().is_some() && self.userfault.is_orphaned()
    }

    /// Returns how many pages are still at the source.
    pub(super) fn missing(&self) -> u64 {
        self.missing.iter().map(MissingPages::stale_count).sum()
    }

    /// Returns the number of requests and how long they took.
    pub(super) fn figures(&self) -> PostCopyFigures {
        let mut latencies = self.requested().latencies.clone();
        latencies.sort_unstable();
        let at = |part: f64| latencies.get((latencies.len() as f64 * part) as usize).copied().unwrap_or(0);
        PostCopyFigures { requests: latencies.len() as u64, latency_p50_us: at(0.5), latency_p99_us: at(0.99) }
    }

    /// Ends the thread that handles faults.
    pub(super) fn stop(&self) {
        self.stop.stop();
    }

    /// Ends all waits for missing pages, unless the guest's state is loaded: the migration is being taken down.
    pub(super) fn release_if_not_loaded(&self) {
        let mut load = self.load.lock().expect("no thread panics with the lock held");
        if *load == Load::NotDone {
            *load = Load::Released;
            self.release();
        }
    }

    /// Records that the guest's state is loaded. Returns false if missing pages were released meanwhile, so that the loading may have read
    /// zeros.
    pub(super) fn loaded(&self) -> bool {
        let mut load = self.load.lock().expect("no thread panics with the lock held");
        if *load == Load::NotDone {
            *load = Load::Done;
        }
        *load == Load::Done
    }

    /// Ends all waits for missing pages, which read as zero then: no guest has run on this memory and none will.
    pub(super) fn release(&self) {
        for block in &self.missing {
            if let Err(error) = block.abandon()
                && !self.guest_has_ended()
            {
                tracing::warn!(%error, "missing pages are still watched");
            }
        }
    }
}

/// Why pages could not be placed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlaceError {
    /// The system call failed.
    #[error(transparent)]
    Missing(#[from] MissingError),
    /// The pages do not make up a huge page.
    #[error("the pages of a huge page did not arrive one after the other")]
    TornHugePage,
}

/// A huge page that arrives in several packets of one channel: it can be placed only as a whole.
#[derive(Debug, Default)]
pub(super) struct HugePage {
    content: Vec<u8>,
    block: u16,
    first: u64,
    /// How many pages of 4 KiB have arrived, from the first on.
    filled: usize,
}

impl HugePage {
    fn take(
        &mut self,
        block: u16,
        run: &Run,
        content: Option<&[u8]>,
        whole: usize,
        mut place: impl FnMut(u64, &[u8]) -> Result<(), MissingError>,
    ) -> Result<(), PlaceError> {
        self.content.resize(whole * PAGE_SIZE, 0);
        let mut done = 0;
        while done < run.count as usize {
            let page = run.first + done as u64;
            if self.filled == 0 && page.is_multiple_of(whole as u64) {
                (self.block, self.first) = (block, page);
            } else if (self.block, self.first + self.filled as u64) != (block, page) || self.filled == 0 {
                return Err(PlaceError::TornHugePage);
            }
            let count = (run.count as usize - done).min(whole - self.filled);
            let target = &mut self.content[self.filled * PAGE_SIZE..][..count * PAGE_SIZE];
            match content {
                Some(content) => target.copy_from_slice(&content[done * PAGE_SIZE..][..count * PAGE_SIZE]),
                None => target.fill(0),
            }
            self.filled += count;
            done += count;
            if self.filled == whole {
                self.filled = 0;
                place(self.first, &self.content)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(kind: RunKind, first: u64, count: u32) -> Run {
        Run { kind, first, count }
    }

    #[test]
    fn a_huge_page_is_placed_when_its_last_piece_has_arrived() {
        let mut placed = Vec::new();
        let mut huge = HugePage::default();
        let ones = vec![1; 8 * PAGE_SIZE];
        let mut take = |run: &Run, content: Option<&[u8]>| {
            huge.take(0, run, content, 4, |first, page| {
                placed.push((first, page[0], page[3 * PAGE_SIZE]));
                Ok(())
            })
        };
        take(&run(RunKind::Normal, 8, 3), Some(&ones[..3 * PAGE_SIZE])).unwrap();
        take(&run(RunKind::Zero, 11, 1), None).unwrap();
        take(&run(RunKind::Normal, 12, 8), Some(&ones)).unwrap();
        assert!(take(&run(RunKind::Normal, 21, 1), Some(&ones[..PAGE_SIZE])).is_err(), "not from the page's beginning");
        assert_eq!(placed, [(8, 1, 0), (12, 1, 1), (16, 1, 1)]);
    }

    #[test]
    fn a_huge_page_with_a_gap_is_refused() {
        let mut huge = HugePage::default();
        let ones = vec![1; PAGE_SIZE];
        let never = |_: u64, _: &[u8]| -> Result<(), MissingError> { panic!("nothing is whole") };
        huge.take(0, &run(RunKind::Normal, 0, 1), Some(&ones), 4, never).unwrap();
        assert!(huge.take(0, &run(RunKind::Normal, 2, 1), Some(&ones), 4, never).is_err());
        assert!(huge.take(1, &run(RunKind::Normal, 1, 1), Some(&ones), 4, never).is_err());
    }
}
