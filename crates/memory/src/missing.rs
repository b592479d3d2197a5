//! The memory part of post-copy: records which pages of a running guest are still at the source, and places them.
//!
//! ```text
//!            vCPU reads a stale page: waits in the kernel
//!                     │ fault                              ▲ awake
//!   fault thread: wait_faults ─> fault() ─> Request        │
//!                                            │ to the source
//!   channel threads:               pages arrive ─> place() ┘     (also without a request)
//! ```
//!
//! **Order at the destination.** Until the source's guest is stopped, it owns the memory. After that, and before any
//! code here touches guest RAM for the new guest (loading device state included):
//! 1. all pages sent before are in place;
//! 2. [`MissingPages::new`] for each block: from now on missing pages are watched;
//! 3. [`MissingPages::declare_stale`] for all pages of which the source has newer content: they are discarded and
//!    marked;
//! 4. fault and channel threads run, the guest starts;
//! 5. when [`MissingPages::stale_count`] is 0, [`MissingPages::finish`].
//!
//! **First arrival wins.** A stale page is claimed by the first thread that has its content, and placed atomically by
//! the kernel. Its stale mark is cleared only after that: a page that the source still has is never both unmarked and
//! missing, so the zero fill of other missing pages never affects one. Content that arrives again is dropped.
//!
//! **No fault is lost.** The kernel wakes the waiting threads when it places the page. If a page could not be placed,
//! or was requested on a connection that is gone, its waiting threads are woken: they fault again, and so the page is
//! requested again.
//!
//! **Memory of another process** is watched and filled in the same way, through a userfaultfd of that process's address
//! space ([`GuestProcess`](crate::guest_process::GuestProcess)). The process itself keeps a copy of the descriptor: if
//! the filling program dies, a thread that touches a missing page waits for ever, and never reads zeros.
//!
//! **Not seen by userfaultfd**, and so forbidden before [`MissingPages::finish`]: accesses through another mapping of
//! the same shared memory, in this process or another (a vhost-user device), unless that mapping is watched too; reads
//! and writes of the file; discarding pages (balloon, free page reporting); `fork` with the child touching guest RAM.
//! They would read zeros, or make other accesses read zeros.

use crate::PAGE_SIZE;
use crate::bitmap::AtomicPageBitmap;
use crate::discard::{DiscardError, Discardable};
use crate::userfault::fill::Filled;
use crate::userfault::{Userfault, UserfaultError};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use thiserror::Error;

/// Why pages could not be placed, or a fault not be resolved.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MissingError {
    /// A userfaultfd call failed.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
    /// Not whole pages of the block, or they could not be discarded.
    #[error(transparent)]
    Discard(#[from] DiscardError),
    /// The length of the content is not a multiple of the page size.
    #[error("{0} bytes are not whole pages of {PAGE_SIZE} bytes")]
    Length(usize),
    /// The fault is not in this block.
    #[error("the fault at address {address:#x} is not within the RAM block at {:#x}..{:#x}", .block.start, .block.end)]
    NotHere {
        /// Address of the fault.
        address: usize,
        /// Addresses of the block.
        block: Range<usize>,
    },
    /// A page that was discarded came back without having been placed, and the guest may have read it: stop the guest.
    #[error(
        "page {page} of the RAM block at {block:#x} is there although its content is still at the source: another mapping \
         or process touched it. The guest may have read zeros; stop it"
    )]
    NotMissing {
        /// In pages of 4096 bytes of the block.
        page: u64,
        /// Address of the block.
        block: usize,
    },
    /// There is no huge page in the pool for the content. Nothing is lost: the page is requested again.
    #[error(
        "no huge page is available for page {page} of the RAM block at {block:#x}: the pool is empty (raise \
         vm.nr_hugepages: pages given back have lost their reservation), or another process touched that page"
    )]
    NoHugePage {
        /// In pages of 4096 bytes of the block.
        page: u64,
        /// Address of the block.
        block: usize,
    },
    /// Not all pages have arrived.
    #[error("{pages} pages of the RAM block at {block:#x} have not come from the source yet")]
    StillStale {
        /// Number of missing pages.
        pages: u64,
        /// Address of the block.
        block: usize,
    },
    /// No address space is left for a page of zeros.
    #[error("cannot map a page of zeros: {0}")]
    Zeros(io::Error),
}

impl MissingError {
    /// Returns whether the system has no memory now, and may have some later.
    pub fn is_no_memory(&self) -> bool {
        match self {
            Self::NoHugePage { .. } => true,
            Self::Userfault(UserfaultError::Range { source, .. }) => source.raw_os_error() == Some(libc::ENOMEM),
            _ => false,
        }
    }
}

/// What the fault thread has to do after a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// Request these pages of the block from the source: one page of the backing. Returned once per page, until
    /// [`MissingPages::forget_requests`].
    Request(Range<u64>),
    /// Nothing: the page was requested before, or is being placed right now.
    Waiting,
    /// Nothing: the page was never written at the source, so a page of zeros was placed.
    ZeroFilled,
    /// Nothing: the page is present by now.
    Present,
}

/// The pages of one RAM block that are still at the source. See the [module](self). Shared by all threads. Uses three
/// bits per page of 4096 bytes.
///
/// **Dropping** it with stale pages, without [`Self::finish`], leaves the block watched and its userfaultfd open until
/// the process ends, in another process for ever: a thread that touches a missing page waits until it is killed.
/// Otherwise the guest would read zeros as if they were its memory. Use [`Self::finish`], or [`Self::abandon`] where no
/// guest runs.
#[derive(Debug)]
pub struct MissingPages {
    backing: Discardable,
    userfault: Arc<Userfault>,
    /// Not placed yet.
    stale: AtomicPageBitmap,
    /// Stale, and not claimed by a thread.
    unclaimed: AtomicPageBitmap,
    /// Returned as to be requested.
    asked: AtomicPageBitmap,
    stale_count: AtomicU64,
    dropped: AtomicU64,
    /// A page of zeros, where the kernel cannot place zero pages by itself.
    zeros: Option<Zeros>,
    ended: AtomicBool,
}

impl MissingPages {
    /// Watches a RAM block for missing pages, with transparent huge pages forbidden. No page is stale yet.
    ///
    /// `userfault` is of the process that the block is mapped in, has [`Discardable::userfault_features`] and, for a guest, [all faults](crate::userfault::Faults::All). One
    /// may watch several blocks; [`Self::contains`] tells whose a fault is.
    pub fn new(backing: Discardable, userfault: Arc<Userfault>) -> Result<Self, MissingError> {
        backing.forbid_huge_pages()?;
        let bitmap = || AtomicPageBitmap::new(backing.pages());
        let (stale, unclaimed, asked) = (bitmap(), bitmap(), bitmap());
        // Made whether or not it is needed: no step may fail once the block is watched.
        let zeros = Zeros::new(backing.page_size()).map_err(MissingError::Zeros)?;
        let registered = userfault.register_missing(backing.addresses())?;
        let zeros = Some(zeros).filter(|_| !registered.zero_page);
        let (stale_count, dropped, ended) = Default::default();
        Ok(Self { backing, userfault, stale, unclaimed, asked, stale_count, dropped, zeros, ended })
    }

    /// Returns the memory of the block.
    pub fn backing(&self) -> &Discardable {
        &self.backing
    }

    /// Returns whether `address` is in this block.
    pub fn contains(&self, address: usize) -> bool {
        self.backing.addresses().contains(&address)
    }

    /// Discards the pages of `run`, of which the source has newer content, and marks them stale. Call it before the new
    /// guest touches the block or content arrives for it.
    ///
    /// `run` is whole pages of the backing: see [`Discardable::widen`]. After an error the content of the block is
    /// lost; [abandon] it and leave the guest at the source.
    ///
    /// [abandon]: Self::abandon
    pub fn declare_stale(&self, run: Range<u64>) -> Result<(), MissingError> {
        self.declare_all_stale(std::slice::from_ref(&run))
    }

    /// As [`Self::declare_stale`], for all of `runs` at once: where the block lies in another process, that process is
    /// stopped for each call.
    pub fn declare_all_stale(&self, runs: &[Range<u64>]) -> Result<(), MissingError> {
        self.backing.discard_all(runs)?;
        for run in runs {
            // Counted before they are marked, and in `fill` by the marks that it clears: the count is never below the truth, even where a
            // hostile source sends the content of a page while it has the page discarded.
            let pages = run.end - run.start;
            self.stale_count.fetch_add(pages, Ordering::AcqRel);
            let new = self.stale.test_and_set(run.clone(), |_| {});
            self.stale_count.fetch_sub(pages - new, Ordering::AcqRel);
            self.asked.clear(run.clone());
            self.unclaimed.set(run.clone());
        }
        Ok(())
    }

    /// Returns how many pages are not placed yet.
    pub fn stale_count(&self) -> u64 {
        self.stale_count.load(Ordering::Acquire)
    }

    /// Calls `run` for each run of pages that are not placed yet: request these from a source that has reconnected.
    /// Complete when no thread is placing.
    pub fn for_each_stale_run(&self, run: impl FnMut(Range<u64>)) {
        self.stale.for_each_run_in(0..self.backing.pages(), run);
    }

    /// Returns how many pages arrived that were not stale (any more) and were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Places the stale pages of content that arrived for the pages from `first_page` on, drops the others, and returns
    /// how many pages it placed.
    ///
    /// On hugetlb whole huge pages only: parts cannot be placed. `content` is not in watched memory. Pages that could
    /// not be placed because of an error stay stale, and are requested again at the next fault.
    pub fn place(&self, first_page: u64, content: &[u8]) -> Result<u64, MissingError> {
        if !content.len().is_multiple_of(PAGE_SIZE) {
            return Err(MissingError::Length(content.len()));
        }
        let run = first_page..first_page.saturating_add((content.len() / PAGE_SIZE) as u64);
        self.fill(run, |piece| {
            let start = (piece.start - first_page) as usize * PAGE_SIZE;
            let content = &content[start..][..(piece.end - piece.start) as usize * PAGE_SIZE];
            // SAFETY: the piece is of the block, which the creator of the backing vouches for; it was discarded and marked
            // stale, and `content` is a live slice outside of guest RAM.
            unsafe { self.userfault.copy(self.backing.addresses_of(&piece).start, content) }
        })
    }

    /// As [`Self::place`], for pages that are zero at the source.
    pub fn place_zero(&self, run: Range<u64>) -> Result<u64, MissingError> {
        self.fill(run, |piece| self.zero(&piece))
    }

    /// Returns what to do about a fault at `address`, received from the userfaultfd, and resolves it if possible.
    ///
    /// After an error the faulting thread still waits; [`Self::forget_requests`] makes it fault again.
    pub fn fault(&self, address: usize) -> Result<FaultAction, MissingError> {
        if !self.contains(address) {
            return Err(MissingError::NotHere { address, block: self.backing.addresses() });
        }
        let page = ((address - self.backing.addresses().start) / PAGE_SIZE) as u64;
        let page = self.backing.widen(page..page + 1);
        if self.stale.contains(page.start) {
            // If the claiming thread fails to place the page, it wakes the waiting threads, which fault again.
            let is_new = self.unclaimed.contains(page.start) && self.asked.test_and_set(page.clone(), |_| {}) > 0;
            return Ok(if is_new { FaultAction::Request(page) } else { FaultAction::Waiting });
        }
        match self.zero(&page) {
            Ok(Filled::Placed) => Ok(FaultAction::ZeroFilled),
            Ok(Filled::AlreadyThere { .. }) if self.lacks_huge_page(page.start) => Err(self.no_huge_page(page.start)),
            Ok(Filled::AlreadyThere { .. }) => Ok(FaultAction::Present),
            // The watching ended after the fault was received, which woke the faulting thread.
            Err(error) if is_enoent(&error) && self.ended.load(Ordering::Acquire) => Ok(FaultAction::Present),
            Err(error) => Err(error.into()),
        }
    }

    /// Forgets all requests, because the connection they were sent on is gone. Wakes every waiting thread, so that it
    /// faults again and the page is requested again.
    ///
    /// Call it when a new connection accepts requests, and again if that was lost before all of them were sent.
    pub fn forget_requests(&self) -> Result<(), MissingError> {
        self.asked.clear(0..self.backing.pages());
        Ok(self.userfault.wake(self.backing.addresses())?)
    }

    /// Stops watching the block after all pages have been placed. Pages that the source never wrote read as zero from
    /// now on.
    ///
    /// Repeating it is harmless. Call [`Discardable::restore_huge_pages`] afterwards if wanted.
    pub fn finish(&self) -> Result<(), MissingError> {
        match self.stale_count() {
            0 => Ok(self.end()?),
            pages => Err(MissingError::StillStale { pages, block: self.backing.addresses().start }),
        }
    }

    /// Stops watching the block although pages are missing, which read as zero from now on.
    ///
    /// Only where no guest has run on this memory and none will, as when post-copy is cancelled before the guest was
    /// started here.
    pub fn abandon(&self) -> Result<(), MissingError> {
        self.end()?;
        Ok(())
    }

    fn end(&self) -> Result<(), UserfaultError> {
        // First, so that threads that find the block unwatched see the reason.
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.userfault.unregister(self.backing.addresses()).inspect_err(|_| self.ended.store(false, Ordering::Release))
    }

    /// Claims the stale pages of `run` and places them by `step`; returns how many.
    fn fill(
        &self,
        run: Range<u64>,
        step: impl Fn(Range<u64>) -> Result<Filled, UserfaultError>,
    ) -> Result<u64, MissingError> {
        self.backing.check_run(&run)?;
        let (mut placed, mut failure) = (0, None);
        self.unclaimed.take_runs(run.clone(), |claimed| {
            let mut at = claimed.start;
            if failure.is_none() {
                failure = self.fill_claimed(&mut at, claimed.end, &step).err();
                // Only after placing; no other thread clears these, as this one has claimed them.
                let mut cleared = 0;
                self.stale.take_runs(claimed.start..at, |run| cleared += run.end - run.start);
                self.stale_count.fetch_sub(cleared, Ordering::AcqRel);
                placed += at - claimed.start;
            }
            self.release(at..claimed.end);
        });
        match failure {
            Some(error) => Err(error),
            None => {
                self.dropped.fetch_add(run.end - run.start - placed, Ordering::Relaxed);
                Ok(placed)
            }
        }
    }

    /// Places claimed pages and advances `at` past them.
    fn fill_claimed(
        &self,
        at: &mut u64,
        end: u64,
        step: impl Fn(Range<u64>) -> Result<Filled, UserfaultError>,
    ) -> Result<(), MissingError> {
        let unit = (self.backing.page_size() / PAGE_SIZE) as u64;
        let mut longest = u64::MAX;
        while *at < end {
            let piece = *at..end.min(at.saturating_add(longest));
            match step(piece.clone()) {
                Ok(Filled::Placed) => *at = piece.end,
                Ok(Filled::AlreadyThere { placed }) => {
                    *at += (placed / PAGE_SIZE) as u64;
                    if self.lacks_huge_page(*at) {
                        return Err(self.no_huge_page(*at));
                    }
                    return Err(MissingError::NotMissing { page: *at, block: self.backing.addresses().start });
                }
                // More than one mapping, as in a block after mbind(2) of parts: place single pages.
                Err(error) if is_enoent(&error) && piece.end - piece.start > unit => {
                    longest = unit;
                    *at += placed_before(&error, &self.backing.addresses_of(&piece));
                }
                Err(error) => {
                    *at += placed_before(&error, &self.backing.addresses_of(&piece));
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Returns whether `EEXIST` means that there is no huge page: the kernel returns it where the pool is empty
    /// (`hugetlb_mfill_atomic_pte` in `mm/hugetlb.c`, seen with Linux 6.18). A page that does exist is mapped here.
    fn lacks_huge_page(&self, page: u64) -> bool {
        self.backing.is_hugetlb() && !self.backing.is_mapped(page)
    }

    fn no_huge_page(&self, page: u64) -> MissingError {
        MissingError::NoHugePage { page, block: self.backing.addresses().start }
    }

    /// Releases claimed pages that were not placed: another thread may claim them, and they are requested at the next
    /// fault.
    fn release(&self, rest: Range<u64>) {
        if rest.is_empty() {
            return;
        }
        self.unclaimed.set(rest.clone());
        self.asked.clear(rest.clone());
        // Last, so that a woken thread sees the marks above. An error here follows another one, which is reported.
        let _ = self.userfault.wake(self.backing.addresses_of(&rest));
    }

    /// Places zeros in missing pages of the block.
    fn zero(&self, run: &Range<u64>) -> Result<Filled, UserfaultError> {
        let range = self.backing.addresses_of(run);
        let Some(zeros) = &self.zeros else {
            // SAFETY: the range is of the block, which the creator of the backing vouches for.
            return unsafe { self.userfault.zero(range) };
        };
        for at in range.clone().step_by(self.backing.page_size()) {
            // SAFETY: as above; the zeros are a mapping of their own.
            match unsafe { self.userfault.copy(at, zeros.bytes())? } {
                Filled::Placed => {}
                Filled::AlreadyThere { placed } => {
                    return Ok(Filled::AlreadyThere { placed: at - range.start + placed });
                }
            }
        }
        Ok(Filled::Placed)
    }
}

impl Drop for MissingPages {
    fn drop(&mut self) {
        if self.ended.load(Ordering::Acquire) {
            return;
        }
        if self.stale_count() == 0 {
            // Fails if the memory is unmapped by now, which ended the watching.
            let _ = self.end();
        } else {
            // Closing the last descriptor would let the guest read zeros: see the type.
            std::mem::forget(Arc::clone(&self.userfault));
        }
    }
}

fn is_enoent(error: &UserfaultError) -> bool {
    matches!(error, UserfaultError::Range { source, .. } if source.raw_os_error() == Some(libc::ENOENT))
}

/// Returns how many pages of `piece` were placed before the error, which names the rest.
fn placed_before(error: &UserfaultError, piece: &Range<usize>) -> u64 {
    match error {
        UserfaultError::Range { range, .. } => ((range.start - piece.start) / PAGE_SIZE) as u64,
        _ => 0,
    }
}

/// A page of zeros, of any size, that takes no memory.
#[derive(Debug)]
struct Zeros {
    start: *mut u8,
    length: usize,
}

impl Zeros {
    fn new(length: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE)? };
        Ok(Self { start: start.cast(), length })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped with this length for as long as the value lives, readable, and written by nobody.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}

impl Drop for Zeros {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and no borrow outlives the owner.
        let _ = unsafe { munmap(self.start.cast(), self.length) };
    }
}

// SAFETY: memory that is only read.
unsafe impl Send for Zeros {}
// SAFETY: as above.
unsafe impl Sync for Zeros {}
