//! The memory part of post-copy: which pages of a running guest are still at the source, and putting them in place.
//!
//! ```text
//!            vCPU reads a stale page: waits in the kernel
//!                     │ fault                        ▲ awake
//!   fault thread: wait_faults ─> fault() ─> Ask      │
//!                                            │ to the source
//!   channel threads:         pages arrive ─> place() ┘     (also without having been asked for)
//! ```
//!
//! **Order at the destination.** Until it is stopped the source's guest owns the memory; then, before anything here touches
//! guest RAM for the new guest (loading device state included):
//! 1. all pages sent before are in place;
//! 2. [`MissingPages::new`] for each block: from now on missing pages are watched;
//! 3. [`MissingPages::declare_stale`] for all that the source has newer: discarded, and marked;
//! 4. fault and channel threads run, the guest starts;
//! 5. when [`MissingPages::stale_count`] is 0, [`MissingPages::finish`].
//!
//! **First arrival wins.** A stale page is claimed by the first thread that has its content, and put in place by the
//! kernel all at once. Its stale mark goes only after that: at no moment is a page both unmarked and missing that the
//! source still has, so the zero fill of other missing pages never hits one. Content that comes again is dropped.
//!
//! **No fault is lost.** The kernel wakes who waits when it puts the page in place. Where a page could not be placed, or was
//! asked for on a connection that is gone, whoever waits is woken to take the fault anew, and so to have it asked again.
//!
//! **Memory of another process** is watched and filled in the same way, through a userfaultfd of that process's address space
//! ([`GuestProcess`](crate::guest_process::GuestProcess)), of which the process itself keeps a copy: if the filling program dies, a thread
//! that touches a missing page waits for good, and never reads zeros.
//!
//! **What userfaultfd does not see**, and so must not happen before [`MissingPages::finish`]: accesses through another
//! mapping of the same shared memory, in this process or another (a vhost-user device), unless that is watched as well;
//! reads and writes of the file; discarding pages (balloon, free page reporting); `fork` with the child touching guest
//! RAM. They find zeros, or have zeros found.

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

/// Why pages could not be put in place, or a fault not be answered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MissingError {
    /// The kernel did not do it.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
    /// Not whole pages of the block, or they could not be discarded.
    #[error(transparent)]
    Discard(#[from] DiscardError),
    /// Content of a length that is no number of pages.
    #[error("{0} bytes are not whole pages of {PAGE_SIZE} bytes")]
    Length(usize),
    /// The address is not in this block.
    #[error("the fault at address {address:#x} is not within the RAM block at {:#x}..{:#x}", .block.start, .block.end)]
    NotHere {
        /// Of the fault.
        address: usize,
        /// Addresses of the block.
        block: Range<usize>,
    },
    /// A page that was discarded came back by itself, and the guest may have read it: stop the guest.
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
    /// There is no huge page in the pool for what is to be placed. Nothing is lost: it is asked for again.
    #[error(
        "no huge page is to be had for page {page} of the RAM block at {block:#x}: the pool is empty (raise \
         vm.nr_hugepages: pages given back have lost their reservation), or another process touched that page"
    )]
    NoHugePage {
        /// In pages of 4096 bytes of the block.
        page: u64,
        /// Address of the block.
        block: usize,
    },
    /// Not all pages have come.
    #[error("{pages} pages of the RAM block at {block:#x} have not come from the source yet")]
    StillStale {
        /// How many.
        pages: u64,
        /// Address of the block.
        block: usize,
    },
    /// No address space for a page of zeros.
    #[error("cannot map a page of zeros: {0}")]
    Zeros(io::Error),
}

impl MissingError {
    /// Whether the system has no memory now, and may have some later.
    pub fn is_no_memory(&self) -> bool {
        match self {
            Self::NoHugePage { .. } => true,
            Self::Userfault(UserfaultError::Range { source, .. }) => source.raw_os_error() == Some(libc::ENOMEM),
            _ => false,
        }
    }
}

/// What is to be done about a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Ask the source for these pages of the block: one page of the backing. Told once per page, until
    /// [`MissingPages::forget_asked`].
    Ask(Range<u64>),
    /// Nothing: the page was asked for, or is being placed right now.
    Waiting,
    /// Nothing: it was never written at the source, so a page of zeros was placed.
    ZeroFilled,
    /// Nothing: the page was there by now.
    Present,
}

/// The pages of one RAM block that are still at the source. See the [module](self). Shared by all threads. Costs three
/// bits per page of 4096 bytes.
///
/// **Dropping** it unfinished, with stale pages, leaves the block watched and its userfaultfd open until the process ends, in another
/// process for good: who touches a missing page waits for ever, and can be killed. Else the guest would go on and read zeros as if they were
/// its memory. Use [`Self::finish`], or [`Self::abandon`] where no guest runs.
#[derive(Debug)]
pub struct MissingPages {
    backing: Discardable,
    userfault: Arc<Userfault>,
    /// Not in place yet.
    stale: AtomicPageBitmap,
    /// Stale, and no thread has begun to place it.
    unclaimed: AtomicPageBitmap,
    /// Told to be asked for.
    asked: AtomicPageBitmap,
    stale_count: AtomicU64,
    dropped: AtomicU64,
    /// Where the kernel cannot place zero pages by itself.
    zeros: Option<Zeros>,
    ended: AtomicBool,
}

impl MissingPages {
    /// Watches a RAM block for missing pages, with transparent huge pages forbidden. None is stale yet.
    ///
    /// `userfault` is of the process that the block is mapped in, has [`Discardable::userfault_features`] and, for a guest, [all faults](crate::userfault::Faults::All). One
    /// may watch several blocks; [`Self::contains`] tells whose a fault is.
    pub fn new(backing: Discardable, userfault: Arc<Userfault>) -> Result<Self, MissingError> {
        backing.forbid_huge_pages()?;
        let bitmap = || AtomicPageBitmap::new(backing.pages());
        let (stale, unclaimed, asked) = (bitmap(), bitmap(), bitmap());
        // Made before it is known whether it is needed: nothing fails once the block is watched.
        let zeros = Zeros::new(backing.page_size()).map_err(MissingError::Zeros)?;
        let registered = userfault.register_missing(backing.addresses())?;
        let zeros = Some(zeros).filter(|_| !registered.zero_page);
        let (stale_count, dropped, ended) = Default::default();
        Ok(Self { backing, userfault, stale, unclaimed, asked, stale_count, dropped, zeros, ended })
    }

    /// The memory of the block.
    pub fn backing(&self) -> &Discardable {
        &self.backing
    }

    /// Whether `address` is in this block.
    pub fn contains(&self, address: usize) -> bool {
        self.backing.addresses().contains(&address)
    }

    /// The source has newer content of `run`: gives its pages back and marks them stale. Before anything of the new guest
    /// touches the block or arrives for it.
    ///
    /// Whole pages of the backing: see [`Discardable::widen`]. On an error the content of the block is lost; [abandon] it and
    /// leave the guest at the source.
    ///
    /// [abandon]: Self::abandon
    pub fn declare_stale(&self, run: Range<u64>) -> Result<(), MissingError> {
        self.declare_all_stale(std::slice::from_ref(&run))
    }

    /// As [`Self::declare_stale`], all of `runs` at once: where the block lies in another process, that process is stopped for each call.
    pub fn declare_all_stale(&self, runs: &[Range<u64>]) -> Result<(), MissingError> {
        self.backing.discard_all(runs)?;
        for run in runs {
            let new = self.stale.test_and_set(run.clone(), |_| {});
            self.stale_count.fetch_add(new, Ordering::AcqRel);
            self.asked.clear(run.clone());
            self.unclaimed.set(run.clone());
        }
        Ok(())
    }

    /// How many pages are not in place yet.
    pub fn stale_count(&self) -> u64 {
        self.stale_count.load(Ordering::Acquire)
    }

    /// Calls `run` for each run of pages that are not in place yet: what to ask a source for that has connected again.
    /// Complete when no thread is placing.
    pub fn for_each_stale_run(&self, run: impl FnMut(Range<u64>)) {
        self.stale.for_each_run_in(0..self.backing.pages(), run);
    }

    /// How many pages came that were not stale (any more) and were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Content arrived for the pages from `first_page` on: places what is stale of it, drops the rest, and returns how many
    /// pages it placed.
    ///
    /// On hugetlb whole huge pages only: parts cannot be placed. `content` is not in watched memory. Pages that could
    /// not be placed because of an error stay stale, and will be asked for again when they are missed.
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

    /// What to do about a fault at `address`, taken from the userfaultfd. Does what can be done here.
    ///
    /// On an error its thread still waits; [`Self::forget_asked`] makes the fault come again.
    pub fn fault(&self, address: usize) -> Result<Answer, MissingError> {
        if !self.contains(address) {
            return Err(MissingError::NotHere { address, block: self.backing.addresses() });
        }
        let page = ((address - self.backing.addresses().start) / PAGE_SIZE) as u64;
        let page = self.backing.widen(page..page + 1);
        if self.stale.contains(page.start) {
            // If the one that claimed it fails, it wakes the waiter, who then comes here again.
            let is_new = self.unclaimed.contains(page.start) && self.asked.test_and_set(page.clone(), |_| {}) > 0;
            return Ok(if is_new { Answer::Ask(page) } else { Answer::Waiting });
        }
        match self.zero(&page) {
            Ok(Filled::Placed) => Ok(Answer::ZeroFilled),
            Ok(Filled::AlreadyThere { .. }) if self.lacks_huge_page(page.start) => Err(self.no_huge_page(page.start)),
            Ok(Filled::AlreadyThere { .. }) => Ok(Answer::Present),
            // Ended since the fault was taken: that woke its thread.
            Err(error) if is_enoent(&error) && self.ended.load(Ordering::Acquire) => Ok(Answer::Present),
            Err(error) => Err(error.into()),
        }
    }

    /// The connection on which pages were asked for is gone: faults are asked again. Every thread that waits is woken for
    /// that, and its fault comes anew.
    ///
    /// Call it when a new connection takes requests, and again if it was lost before all of them were sent.
    pub fn forget_asked(&self) -> Result<(), MissingError> {
        self.asked.clear(0..self.backing.pages());
        Ok(self.userfault.wake(self.backing.addresses())?)
    }

    /// All pages are in place: watches the block no longer. Pages that the source never wrote read as zero from now on.
    ///
    /// Repeating it is harmless. Afterwards, [`Discardable::restore_huge_pages`] may be wanted.
    pub fn finish(&self) -> Result<(), MissingError> {
        match self.stale_count() {
            0 => Ok(self.end()?),
            pages => Err(MissingError::StillStale { pages, block: self.backing.addresses().start }),
        }
    }

    /// Gives up: watches the block no longer although pages are missing, which read as zero from now on.
    ///
    /// Only where no guest has run on this memory and none will, as when post-copy is called off before the guest was
    /// started here.
    pub fn abandon(&self) -> Result<(), MissingError> {
        self.end()?;
        Ok(())
    }

    fn end(&self) -> Result<(), UserfaultError> {
        // First: who finds the block unwatched can see why.
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
                // Only now, and each by this thread alone, which claimed it.
                self.stale.clear(claimed.start..at);
                self.stale_count.fetch_sub(at - claimed.start, Ordering::AcqRel);
                placed += at - claimed.start;
            }
            self.give_back(at..claimed.end);
        });
        match failure {
            Some(error) => Err(error),
            None => {
                self.dropped.fetch_add(run.end - run.start - placed, Ordering::Relaxed);
                Ok(placed)
            }
        }
    }

    /// Places pages from `at` on, which follows.
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
                // More than one mapping, as a block has after mbind(2) of parts: by single pages.
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

    /// Whether "there already" means that there is no huge page: where the pool is empty, the kernel says `EEXIST`
    /// (`hugetlb_mfill_atomic_pte` in `mm/hugetlb.c`, seen with Linux 6.18). What is there indeed is mapped here.
    fn lacks_huge_page(&self, page: u64) -> bool {
        self.backing.is_hugetlb() && !self.backing.is_mapped(page)
    }

    fn no_huge_page(&self, page: u64) -> MissingError {
        MissingError::NoHugePage { page, block: self.backing.addresses().start }
    }

    /// Claimed pages that were not placed: to be claimed by the next, and asked for when they are missed.
    fn give_back(&self, rest: Range<u64>) {
        if rest.is_empty() {
            return;
        }
        self.unclaimed.set(rest.clone());
        self.asked.clear(rest.clone());
        // Last, so that who is woken finds the above. Its failure is no news: it follows another, which is reported.
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
            // It fails where the memory is unmapped by now, which ended the watching.
            let _ = self.end();
        } else {
            // Closing the last one would let the guest read zeros: see the type.
            std::mem::forget(Arc::clone(&self.userfault));
        }
    }
}

fn is_enoent(error: &UserfaultError) -> bool {
    matches!(error, UserfaultError::Range { source, .. } if source.raw_os_error() == Some(libc::ENOENT))
}

/// Pages of `piece` that were placed before the error, which names the rest.
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
