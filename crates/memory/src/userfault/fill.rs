//! Placing missing pages: a whole page atomically, and only where there is none yet.
//!
//! No thread sees half a page, and an existing page is never replaced: the first to place it wins, as decided by the
//! kernel (`Documentation/admin-guide/mm/userfaultfd.rst`, "Resolving Userfaults").

use super::{RawRange, UFFDIO_COPY, UFFDIO_WAKE, UFFDIO_ZEROPAGE, Userfault, UserfaultError, call};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

/// The result of placing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// All are placed, and the threads that waited for them are awake.
    Placed,
    /// The page after the first `placed` bytes exists already. It is unchanged, and so are all pages after it; threads
    /// that waited there are awake.
    AlreadyThere {
        /// Bytes placed before that, whole pages.
        placed: usize,
    },
}

impl Userfault {
    /// Places `content` at address `to`, within one mapping that is watched for missing pages. Both are multiples of
    /// the page size of its backing.
    ///
    /// # Safety
    /// The pages are of memory that is accessed by raw pointers only: in a missing page the content changes, to Rust
    /// from zero, without a store. `content` itself must not lie in watched memory.
    pub unsafe fn copy(&self, to: usize, content: &[u8]) -> Result<Filled, UserfaultError> {
        self.fill("place pages at", to..to + content.len(), |done| {
            let rest = &content[done..];
            let (dst, src, len) = ((to + done) as u64, rest.as_ptr().addr() as u64, rest.len() as u64);
            let mut argument = Copy { dst, src, len, mode: 0, copy: 0 };
            // SAFETY: the operation reads and writes one `struct uffdio_copy`, reads `rest` and stores to the range that
            // the caller vouches for, only where nothing is mapped.
            let result = unsafe { call(self.as_fd(), UFFDIO_COPY, (&raw mut argument).cast()) };
            (result, argument.copy)
        })
    }

    /// Places zero pages in `range`, within one mapping where the kernel [can](super::Registered::zero_page).
    ///
    /// # Safety
    /// As for [`Self::copy`].
    pub unsafe fn zero(&self, range: Range<usize>) -> Result<Filled, UserfaultError> {
        self.fill("place zero pages at", range.clone(), |done| {
            let rest = range.start + done..range.end;
            let mut argument = ZeroPage { range: rest.into(), mode: 0, zeropage: 0 };
            // SAFETY: the operation reads and writes one `struct uffdio_zeropage` and maps zero pages in the range that
            // the caller vouches for, only where nothing is mapped.
            let result = unsafe { call(self.as_fd(), UFFDIO_ZEROPAGE, (&raw mut argument).cast()) };
            (result, argument.zeropage)
        })
    }

    /// Wakes all threads that wait for a page of `range`: they retry, and if the page is still missing, their fault is
    /// reported again.
    pub fn wake(&self, range: Range<usize>) -> Result<(), UserfaultError> {
        let mut argument = RawRange::from(range.clone());
        // SAFETY: the operation reads one `struct uffdio_range` and changes no memory.
        unsafe { call(self.as_fd(), UFFDIO_WAKE, (&raw mut argument).cast()) }.map_err(|source| UserfaultError::Range {
            what: "wake threads that wait at",
            range,
            source,
        })
    }

    /// Repeats `step`, which continues after `done` bytes and returns how many it did, until all are done or a page
    /// exists.
    ///
    /// A positive count with `EAGAIN` is progress; without progress `EAGAIN` means that the address space is changing,
    /// and some kernels write no count at all then (so it starts as 0).
    fn fill(
        &self,
        what: &'static str,
        range: Range<usize>,
        mut step: impl FnMut(usize) -> (io::Result<()>, i64),
    ) -> Result<Filled, UserfaultError> {
        let mut placed = 0;
        loop {
            let (result, count) = step(placed);
            let Err(source) = result else { return Ok(Filled::Placed) };
            placed += usize::try_from(count).unwrap_or(0);
            match source.raw_os_error() {
                Some(libc::EAGAIN) if count > 0 => {}
                Some(libc::EAGAIN) => std::thread::yield_now(),
                Some(libc::EEXIST) => {
                    // Placing a page through this descriptor wakes its waiters; a page that appeared otherwise, say by
                    // a write to the file of shared memory, woke no thread.
                    self.wake(range.start + placed..range.end)?;
                    return Ok(Filled::AlreadyThere { placed });
                }
                _ => return Err(UserfaultError::Range { what, range: range.start + placed..range.end, source }),
            }
        }
    }
}

/// `struct uffdio_copy`.
#[repr(C)]
pub(super) struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
pub(super) struct ZeroPage {
    range: RawRange,
    mode: u64,
    zeropage: i64,
}
const _: () = assert!(size_of::<Copy>() == 40 && size_of::<ZeroPage>() == 32);
