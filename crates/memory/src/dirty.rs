//! Which pages of guest RAM are written: the dirty logs that the rounds of a migration read.
//!
//! One small interface, [`DirtyLog`], and its implementations:
//!
//! | log | sees writes of | cost |
//! |---|---|---|
//! | [`write_protect`] | a process, this one or another, and KVM vCPUs that run on its memory | a fault per page and round |
//! | [`kvm_log`] | KVM vCPUs | a fault per page and round (or the CPU's own log); a bitmap of the guest's size per round |
//! | [`kvm_ring`] | KVM vCPUs | as above, but by what is dirty, not by the size of the guest |
//! | [`reported`] | writers that report their writes: device models, DMA | an atomic operation per write |
//! | [`punched`] | freed pages of shared memory, and the writes that the wrapped log sees | a mapping of the memory; a walk of its page tables per round |
//! | [`union`] | all writers of several logs | their sum |
//!
//! The log of a guest is the union of the logs of all writers. A write that no log sees is lost to the destination:
//! writes of the monitor's own threads and vhost devices where a KVM log is used (it sees vCPUs only), and always of
//! devices into memory pinned for DMA. Those writers must report their writes.
//!
//! The reader of a log calls `start`, then searches for the pages that the first round sends, and passes them to the
//! log with `found_populated`. Then, in each round, it calls `collect`, **waits** until all writes that were in
//! progress have ended, and reads the named pages. The last `collect` follows after every writer has stopped. The first
//! round waits too, between `start` and its first read.
//!
//! **Writes in progress** are the reason for the wait. Logs that protect pages (write protection; KVM's, for vCPUs) see
//! a writer at its page fault. A device or a system call that has *pinned* the page before takes no fault when it
//! writes: a read by `O_DIRECT` (a disk with `cache=none`), an io_uring with registered buffers, process_vm_writev(2).
//! The pinning was the fault, so the `collect` after it names the page and protects it again. If the page is read now,
//! its old content is sent; then the data arrives, and no later `collect` names the page (`tests/memory/dirty_in_flight.rs`
//! shows it). A reader that waits between `collect` and reading, until all I/O in flight has ended, reads the data. I/O
//! that begins after the `collect` faults again, and the next one names it. A writer that keeps pages pinned for longer
//! (device DMA, VFIO, permanently registered buffers) must report its writes, after each write.
//!
//! **Freed memory**: pages that are freed while the guest runs (balloons, free page reporting, virtio-mem) read as zero
//! from then on, and the destination must learn that, although freeing is no write. [`write_protect`] names such pages
//! for anonymous memory, [`punched`] for shared memory; KVM's logs never do. A monitor that frees memory itself can
//! report it instead, afterwards.

mod kvm;

pub mod kvm_log;
pub mod kvm_ring;
pub mod punched;
pub mod reported;
pub mod union;
pub mod write_protect;

pub use kvm::KvmSlot;

use crate::bitmap::PageBitmap;
use crate::userfault::UserfaultError;
use std::io;
use std::ops::Range;
use thiserror::Error;

/// Records which pages of guest RAM are written. RAM is made of blocks, numbered from 0; pages are of
/// [`PAGE_SIZE`](crate::PAGE_SIZE), numbered from 0 in each block.
pub trait DirtyLog: Send {
    /// Starts recording. Earlier writes are not recorded: the first round sends everything.
    ///
    /// After an error nothing is recorded and memory is as before.
    fn start(&mut self) -> Result<(), DirtyLogError>;

    /// Passes to the log the pages of RAM block `block` that the first round sends: those that a search after `start`,
    /// and before the first `collect`, has found populated. Needed by logs that name freed memory; others ignore it.
    ///
    /// Without this call such a log knows only the pages that were populated when it was started. A page that is
    /// populated between `start` and the search, and freed before the first `collect`, is then not named.
    fn found_populated(&mut self, block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        let _ = (block, populated);
        Ok(())
    }

    /// Adds to `dirty` the pages of RAM block `block` written since `start` or the last call, and starts recording them
    /// anew. Pages already set in `dirty` stay set.
    ///
    /// A page written during the call is in this result or in the next. Read its content only after the call has
    /// returned, and after all writes in progress at that time have ended (see the [module](self)). A log may name a
    /// page that was not written; each documents when.
    ///
    /// After an error `dirty` may hold part of the result, and those pages are not named again: keep it, or give up.
    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError>;

    /// Stops recording, and restores memory to its state before `start`. Does nothing on a log that is not started.
    fn stop(&mut self) -> Result<(), DirtyLogError>;
}

/// Why a dirty log does not work.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DirtyLogError {
    /// `start` on a started log.
    #[error("the dirty log is started already; stop it first")]
    AlreadyStarted,
    /// `collect` on a log that is not started.
    #[error("the dirty log is not started, so it knows of no writes; start it first")]
    NotStarted,
    /// No such RAM block.
    #[error("there is no RAM block {block}; the dirty log has {blocks}")]
    NoSuchBlock {
        /// The number that was given.
        block: usize,
        /// How many blocks the log has.
        blocks: usize,
    },
    /// The bitmap does not match the block.
    #[error("RAM block {block} has {pages} pages, but the bitmap to fill has {given}")]
    BitmapSize {
        /// The block.
        block: usize,
        /// Its pages.
        pages: u64,
        /// Pages of the bitmap.
        given: u64,
    },
    /// A block is not made of whole pages.
    #[error("RAM block {block} at addresses {:#x}..{:#x} is not a range of whole pages of 4 KiB", .range.start, .range.end)]
    Unaligned {
        /// The block.
        block: usize,
        /// Its addresses.
        range: Range<usize>,
    },
    /// Part of a block is not mapped.
    #[error("RAM block {block} at addresses {:#x}..{:#x} is not mapped in process {pid}, or not all of it", .range.start, .range.end)]
    Unmapped {
        /// The block.
        block: usize,
        /// Its addresses.
        range: Range<usize>,
        /// The process.
        pid: i32,
    },
    /// A part of a block lies outside the block, or overlaps another part.
    #[error("the part of RAM block {block} at addresses {:#x}..{:#x} {problem}", .range.start, .range.end)]
    Part {
        /// The block.
        block: usize,
        /// Its addresses.
        range: Range<usize>,
        /// What is wrong.
        problem: String,
    },
    /// The process whose memory is tracked has ended.
    #[error(
        "process {pid}, whose memory is tracked, has ended or has replaced its program: its memory is gone, and what it \
         wrote last is not known"
    )]
    Gone {
        /// The process.
        pid: i32,
    },
    /// A range is not registered with the log's userfaultfd.
    #[error(
        "addresses {:#x}..{:#x} of process {pid} are not watched, or not all of them: they were mapped anew since the dirty \
         log was started, or the userfaultfd belongs to another process; what was written there is not known",
        .range.start, .range.end
    )]
    NotWatched {
        /// The process.
        pid: i32,
        /// The addresses.
        range: Range<usize>,
    },
    /// A KVM memory slot does not fit its RAM block.
    #[error("KVM memory slot {slot}: {problem}")]
    Slot {
        /// Slot number, with the address space in the upper 16 bits.
        slot: u32,
        /// What is wrong.
        problem: String,
    },
    /// The system lacks something that this log needs.
    #[error("{what} is not available here: {instead}")]
    Missing {
        /// What is missing.
        what: &'static str,
        /// What to do about it.
        instead: &'static str,
    },
    /// A KVM dirty ring was full, so KVM has overwritten entries.
    #[error(
        "the dirty ring of vCPU {vcpu} overflowed: KVM did not stop the vCPU in time and pages are lost (the kernel log \
         has a warning from kvm_dirty_ring_push). This VM's rings cannot be used any more; use KVM's dirty log"
    )]
    RingOverflow {
        /// Index of the vCPU in the list that was given, from 0.
        vcpu: usize,
    },
    /// A method of a log that the embedding monitor supplied panicked.
    #[error("it panicked in {method}: {said}")]
    Panicked {
        /// The method.
        method: &'static str,
        /// The panic's message.
        said: String,
    },
    /// A userfaultfd call failed.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The failed action and its object.
        what: String,
        /// The system's error.
        source: io::Error,
    },
}

impl DirtyLogError {
    /// For `map_err`.
    fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}

/// Makes the checks with which every log begins a `collect`.
fn check_collect(started: bool, blocks: &[u64], block: usize, dirty: &PageBitmap) -> Result<(), DirtyLogError> {
    if !started {
        return Err(DirtyLogError::NotStarted);
    }
    let pages = *blocks.get(block).ok_or(DirtyLogError::NoSuchBlock { block, blocks: blocks.len() })?;
    if dirty.pages() != pages {
        return Err(DirtyLogError::BitmapSize { block, pages, given: dirty.pages() });
    }
    Ok(())
}

/// Returns the first run of `range` that is not in `pages`.
fn next_gap(pages: &PageBitmap, range: Range<u64>) -> Option<Range<u64>> {
    let mut at = range.start;
    while at < range.end {
        match pages.next_run(at, u64::MAX) {
            Some(run) if run.start == at => at = run.end,
            Some(run) => return Some(at..run.start.min(range.end)),
            None => return Some(at..range.end),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_of_a_range_are_its_pages_that_are_not_set() {
        let mut pages = PageBitmap::new(300);
        pages.set(10..20);
        pages.set(100..200);
        let gaps = |range: Range<u64>| {
            let mut rest = range;
            let next = || next_gap(&pages, rest.clone()).inspect(|gap| rest.start = gap.end);
            std::iter::from_fn(next).map(|gap| (gap.start, gap.end)).collect::<Vec<_>>()
        };
        assert_eq!(gaps(0..300), [(0, 10), (20, 100), (200, 300)]);
        assert_eq!(gaps(10..200), [(20, 100)]);
        assert_eq!(gaps(15..18), []);
        assert_eq!(gaps(30..40), [(30, 40)]);
        assert_eq!(gaps(5..5), []);
    }
}
