//! `PAGEMAP_SCAN` (Linux 6.7): finds ranges of pages by category in the page tables of a process, and can write-protect
//! them in the same step. Shared by the hole search and by the write-protecting dirty log.
//!
//! Source: `include/uapi/linux/fs.h`, `Documentation/admin-guide/mm/pagemap.rst`, `PAGEMAP_SCAN(2const)`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// The pages that a scan finds, and its effect on them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Query {
    /// `PM_SCAN_*`.
    pub(crate) flags: u64,
    /// Categories that are inverted before the masks are applied.
    pub(crate) inverted: u64,
    /// Categories that a page must all have.
    pub(crate) all_of: u64,
    /// Categories of which a page must have one; 0 for no such condition.
    pub(crate) any_of: u64,
    /// Categories returned in the result. Pages that differ in them are separate regions.
    pub(crate) returned: u64,
}

impl Query {
    /// Populated pages: not the zero page, and either present or swapped.
    pub(crate) const POPULATED: Self = Self {
        flags: 0,
        inverted: PAGE_IS_PFNZERO,
        all_of: PAGE_IS_PFNZERO,
        any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        returned: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
    };
    /// Pages of a private mapping that belong to the process, and not to the file.
    pub(crate) const OWN: Self = Self {
        flags: 0,
        inverted: PAGE_IS_FILE,
        all_of: PAGE_IS_PRESENT | PAGE_IS_FILE,
        any_of: 0,
        returned: PAGE_IS_PRESENT,
    };
    /// Pages without a page table entry. A mark that userfaultfd has left in place of a page is an entry.
    pub(crate) const ABSENT: Self = Self {
        flags: 0,
        inverted: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        all_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        any_of: 0,
        returned: PAGE_IS_PRESENT,
    };
}

/// An open page map with a buffer for one call's result.
#[derive(Debug)]
pub(crate) struct Scanner {
    file: File,
    regions: Box<[PageRegion; Scanner::REGIONS]>,
}

impl Scanner {
    /// Regions fetched by one call: 24 bytes each.
    pub(crate) const REGIONS: usize = 512;

    /// Makes a scanner for an open `/proc/PID/pagemap`.
    pub(crate) fn new(file: File) -> Self {
        Self { file, regions: Box::new([PageRegion::default(); Self::REGIONS]) }
    }

    /// Returns the page map.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Scans the addresses `range`, whole pages, once. Returns the regions found, in ascending order, and the address
    /// up to which the range was walked: less than its end if the buffer was full.
    pub(crate) fn scan(&mut self, range: Range<usize>, query: Query) -> io::Result<(&[PageRegion], usize)> {
        let regions = (self.regions.as_mut_ptr().expose_provenance() as u64, Self::REGIONS);
        let (found, walked_to) = self.call(range, query, regions)?;
        Ok((&self.regions[..found.min(Self::REGIONS)], walked_to))
    }

    /// Calls `found` for each region of `range` that the query finds, in ascending order. Only for queries without
    /// flags: one that protects may end early.
    ///
    /// # Errors
    /// The remaining range, with the system's error; the error that `found` returns.
    pub(crate) fn each<E>(
        &mut self,
        range: Range<usize>,
        query: Query,
        failed: impl Fn(Range<usize>, io::Error) -> E,
        mut found: impl FnMut(Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = range.start;
        while at < range.end {
            let rest = at..range.end;
            let (regions, walked_to) = self.scan(rest.clone(), query).map_err(|error| failed(rest.clone(), error))?;
            for region in regions {
                found(region.start as usize..region.end as usize)?;
            }
            if walked_to <= at {
                return Err(failed(rest, io::Error::other("PAGEMAP_SCAN made no progress")));
            }
            at = walked_to;
        }
        Ok(())
    }

    /// Makes one call that only applies the query's flags, without returning regions. Returns the address up to which
    /// the range was walked.
    pub(crate) fn apply(&mut self, range: Range<usize>, query: Query) -> io::Result<usize> {
        Ok(self.call(range, query, (0, 0))?.1)
    }

    fn call(&mut self, range: Range<usize>, query: Query, regions: (u64, usize)) -> io::Result<(usize, usize)> {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: query.flags,
            start: range.start as u64,
            end: range.end as u64,
            walk_end: 0,
            vec: regions.0,
            vec_len: regions.1 as u64,
            max_pages: 0,
            category_inverted: query.inverted,
            category_mask: query.all_of,
            category_anyof_mask: query.any_of,
            return_mask: query.returned,
        };
        // SAFETY: the argument is the structure this operation takes; `vec` is null or points to `vec_len` regions that
        // we own and that nothing else accesses during the call. The flags may ask for write protection of pages that
        // an asynchronous userfaultfd watches: the kernel lifts it on a write by itself, so no access changes meaning.
        let found = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut argument) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((found as usize, argument.walk_end as usize))
    }
}

/// `struct page_region` of `include/uapi/linux/fs.h`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct PageRegion {
    /// First address.
    pub(crate) start: u64,
    /// One past the last.
    pub(crate) end: u64,
    /// The returned categories, which all regions of one of our queries share.
    _categories: u64,
}

/// `struct pm_scan_arg` of `include/uapi/linux/fs.h`.
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}
const _: () = assert!(size_of::<PageRegion>() == 24 && size_of::<ScanArgument>() == 96);

/// Page categories of `include/uapi/linux/fs.h`.
pub(crate) const PAGE_IS_WRITTEN: u64 = 1 << 1;
pub(crate) const PAGE_IS_FILE: u64 = 1 << 2;
pub(crate) const PAGE_IS_PRESENT: u64 = 1 << 3;
pub(crate) const PAGE_IS_SWAPPED: u64 = 1 << 4;
pub(crate) const PAGE_IS_PFNZERO: u64 = 1 << 5;

/// Write-protect what matches, in the same step.
pub(crate) const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
/// Fail with `EPERM` where memory is not watched by an asynchronous userfaultfd.
pub(crate) const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 3 << 30 | (size_of::<ScanArgument>() as u64) << 16 | (b'f' as u64) << 8 | 16;
