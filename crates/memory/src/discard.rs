//! Freeing pages of guest RAM, so that the next access to them is a fault of a missing page.
//!
//! Post-copy needs this: pages that are stale at the destination were received in an earlier round, and userfaultfd
//! reports only absent pages. The method depends on the backing of the RAM block, and a mistake is silent: the guest
//! reads old content or zeros. So [`Discardable`] compares its arguments with `/proc/self/maps`, and checks after a
//! discard whether the pages are gone.
//!
//! | backing of the block | method |
//! |---|---|
//! | private anonymous memory, also of hugetlb (Linux 5.18) | `MADV_DONTNEED`, which only the process itself may advise ([`GuestProcess`]) |
//! | memfd, tmpfs, mapped shared | a hole punched into the file; that unmaps it in every process |
//! | hugetlbfs or memfd of huge pages, mapped shared | the same, for whole huge pages: in parts of them, the kernel only clears bytes |
//! | any of these files, mapped private | both: the hole for the file's page, the advice for the private copy. The file loses the pages for all its users; a file that others use as a template must not be behind migrating guest RAM |
//!
//! **Transparent huge pages.** Where 4 KiB pages were discarded from a huge page, khugepaged may make a huge page again
//! and fill the holes with zeros; then no page is missing and the guest reads zeros. It avoids memory that is watched
//! for missing pages, but not before it is watched, and for shared memory only in newer kernels (`collapse_file` in
//! `mm/khugepaged.c`). So huge pages are forbidden first, [`Discardable::forbid_huge_pages`], as QEMU does before its
//! first discard (`docs/devel/migration/postcopy.rst`, state "Discard").
//! A huge page of shared memory is split by the hole. While it is pinned (VFIO, `O_DIRECT` in progress) it cannot be
//! split, and the kernel only clears the bytes (`truncate_inode_partial_folio` in `mm/truncate.c`). This is detected
//! and reported as [`DiscardError::StillThere`].
//!
//! A freed huge page returns to the pool without its reservation: another user may take it, and placing then fails for
//! lack of huge pages. Leave room in the pool.

use crate::PAGE_SIZE;
use crate::guest_process::{Advice, GuestProcess, HugePageAdvice};
use crate::mappings::{Mapping, Mappings};
use crate::own_files::OwnFiles;
use crate::userfault::{MISSING_HUGETLBFS, MISSING_SHMEM};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstat, fstatfs, major, minor, seek};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use thiserror::Error;

/// Why pages could not be freed, or why that was not attempted. The content of the pages named may be gone.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiscardError {
    /// The mapping does not match the caller's arguments.
    #[error("addresses {:#x}..{:#x} are not {expected}: {found}", .addresses.start, .addresses.end)]
    Different {
        /// Of the RAM block.
        addresses: Range<usize>,
        /// The kind of mapping that the caller named.
        expected: &'static str,
        /// The actual mapping.
        found: String,
    },
    /// Memory of another process with huge pages of a pool.
    #[error(
        "addresses {:#x}..{:#x} of process {pid} have huge pages of {page_size} bytes from a pool, whose missing pages cannot be          watched from outside yet: use ordinary or transparent huge pages for post-copy",
        .addresses.start, .addresses.end
    )]
    HugeElsewhere {
        /// Of the RAM block.
        addresses: Range<usize>,
        /// The process.
        pid: i32,
        /// Of the backing, in bytes.
        page_size: usize,
    },
    /// A file of a kind whose missing pages the kernel does not report.
    #[error(
        "the file behind addresses {:#x}..{:#x} is neither a memfd nor on tmpfs or hugetlbfs (file system type \
         {magic:#x}): its missing pages cannot be watched. Use memory-backed RAM for post-copy",
        .addresses.start, .addresses.end
    )]
    FileSystem {
        /// Of the RAM block.
        addresses: Range<usize>,
        /// `f_type` of `statfs(2)`.
        magic: u64,
    },
    /// The range is not within the block.
    #[error("pages {}..{} are not within a RAM block of {pages} pages", .run.start, .run.end)]
    Outside {
        /// The pages, of 4096 bytes.
        run: Range<u64>,
        /// Of the block.
        pages: u64,
    },
    /// The range covers only parts of pages of the backing.
    #[error("pages {}..{} are not whole pages of {page_size} bytes, which back this RAM block", .run.start, .run.end)]
    NotWhole {
        /// The pages, of 4096 bytes.
        run: Range<u64>,
        /// Of the backing, in bytes.
        page_size: usize,
    },
    /// A system call failed.
    #[error("cannot {what} addresses {:#x}..{:#x}: {source}{}", .addresses.start, .addresses.end, advice(.source))]
    System {
        /// The failed action.
        what: &'static str,
        /// The addresses.
        addresses: Range<usize>,
        /// The system's error.
        source: io::Error,
    },
    /// The kernel kept a page of shared memory.
    #[error(
        "page {page} of a RAM block of shared memory was cleared but not given back: part of a huge page that is pinned \
         (VFIO, direct I/O under way) or written by another process"
    )]
    StillThere {
        /// The first such page, in pages of 4096 bytes of the block.
        page: u64,
    },
}

/// Returns the usual cause of an error number.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => {
            " (locked by mlock: unlock guest RAM before post-copy; or private hugetlb before Linux 5.18)"
        }
        Some(libc::EPERM | libc::EBADF) => " (the file is sealed or was not opened for writing)",
        _ => "",
    }
}

/// The memory of one RAM block, in this process or another one.
#[derive(Debug)]
pub struct Discardable {
    /// The addresses, in the process that maps it.
    addresses: Range<usize>,
    /// That process, if it is not this one.
    guest: Option<Arc<dyn GuestProcess>>,
    page_size: usize,
    /// Whether the mapping has private pages, which the advice frees.
    private: bool,
    file: Option<RamFile>,
}

#[derive(Debug)]
struct RamFile {
    file: File,
    /// Offset of the block in the file, in bytes.
    offset: u64,
    huge: bool,
}

impl Discardable {
    /// Describes private anonymous memory with pages of `page_size` bytes: [`kernel_page_size`] bytes (with or without
    /// transparent huge pages), or the size of the pages of a mapping by `MAP_HUGETLB`.
    ///
    /// # Safety
    /// `addresses` stays mapped as it is until the value is dropped, and is accessed by raw pointers only: content
    /// vanishes and appears without a store.
    pub unsafe fn anonymous(addresses: Range<usize>, page_size: usize) -> Result<Self, DiscardError> {
        Self::anonymous_of(addresses, page_size, None, None)
    }

    /// As [`Self::anonymous`], in another process.
    ///
    /// # Safety
    /// Only a userfaultfd of that process is used with it.
    pub unsafe fn anonymous_elsewhere(
        guest: &Arc<dyn GuestProcess>,
        addresses: Range<usize>,
        page_size: usize,
    ) -> Result<Self, DiscardError> {
        Self::anonymous_of(addresses, page_size, Some(Arc::clone(guest)), None)
    }

    /// `files`: those of this process, if they are open already.
    ///
    /// # Safety
    /// As for [`Self::anonymous`].
    pub(crate) unsafe fn anonymous_here(
        addresses: Range<usize>,
        page_size: usize,
        files: Option<&OwnFiles>,
    ) -> Result<Self, DiscardError> {
        Self::anonymous_of(addresses, page_size, None, files)
    }

    fn anonymous_of(
        addresses: Range<usize>,
        page_size: usize,
        guest: Option<Arc<dyn GuestProcess>>,
        files: Option<&OwnFiles>,
    ) -> Result<Self, DiscardError> {
        let backing = Self { addresses, guest, page_size, private: true, file: None };
        let expected = "private anonymous memory of this page size";
        backing.check(expected, files, |mapping| {
            let huge = mapping.is_anonymous_hugetlb();
            mapping.is_anonymous()
                && if page_size == kernel_page_size() { !huge } else { huge && page_size > PAGE_SIZE }
        })?;
        Ok(backing)
    }

    /// Describes a memfd or a file on tmpfs or hugetlbfs, opened for writing and mapped from `offset` on, shared or
    /// private. The page size is that of the file. The descriptor is duplicated; its position, shared with the
    /// original, moves.
    ///
    /// # Safety
    /// As for [`Self::anonymous`].
    pub unsafe fn file(addresses: Range<usize>, file: BorrowedFd<'_>, offset: u64) -> Result<Self, DiscardError> {
        Self::file_of(addresses, file, offset, None, None)
    }

    /// `files`: those of this process, if they are open already.
    ///
    /// # Safety
    /// As for [`Self::anonymous`].
    pub(crate) unsafe fn file_here(
        addresses: Range<usize>,
        file: BorrowedFd<'_>,
        offset: u64,
        files: Option<&OwnFiles>,
    ) -> Result<Self, DiscardError> {
        Self::file_of(addresses, file, offset, None, files)
    }

    /// As [`Self::file`], mapped in another process.
    ///
    /// # Safety
    /// Only a userfaultfd of that process is used with it, and what this process has mapped of the file is accessed by raw pointers only.
    pub unsafe fn file_elsewhere(
        guest: &Arc<dyn GuestProcess>,
        addresses: Range<usize>,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<Self, DiscardError> {
        Self::file_of(addresses, file, offset, Some(Arc::clone(guest)), None)
    }

    fn file_of(
        addresses: Range<usize>,
        file: BorrowedFd<'_>,
        offset: u64,
        guest: Option<Arc<dyn GuestProcess>>,
        files: Option<&OwnFiles>,
    ) -> Result<Self, DiscardError> {
        let failed = |what| {
            let addresses = addresses.clone();
            move |source| DiscardError::System { what, addresses, source }
        };
        let file = file.try_clone_to_owned().map_err(failed("keep the descriptor of the file behind"))?;
        let status = fstat(&file).map_err(|errno| failed("look at the file behind")(errno.into()))?;
        let system = fstatfs(&file).map_err(|errno| failed("look at the file behind")(errno.into()))?;
        let (huge, page_size) = match system.f_type as u64 {
            TMPFS_MAGIC => (false, kernel_page_size()),
            HUGETLBFS_MAGIC => (true, system.f_bsize as usize),
            magic => return Err(DiscardError::FileSystem { addresses, magic }),
        };
        let device = (major(status.st_dev), minor(status.st_dev));
        let mut private = false;
        let start = addresses.start;
        let file = Some(RamFile { file: file.into(), offset, huge });
        let mut backing = Self { addresses, guest, page_size, private, file };
        backing.check("a mapping of that file from that offset on", files, |mapping| {
            private |= mapping.private;
            mapping.is_of_file(start, (device, status.st_ino), offset)
        })?;
        backing.private = private;
        Ok(backing)
    }

    /// Checks size and alignment, that huge pages are in this process, and that every mapping in the range is as
    /// expected.
    fn check(
        &self,
        expected: &'static str,
        files: Option<&OwnFiles>,
        is: impl FnMut(&Mapping<'_>) -> bool,
    ) -> Result<(), DiscardError> {
        let different = |found: String| DiscardError::Different { addresses: self.addresses.clone(), expected, found };
        let Range { start, end } = self.addresses;
        let size = self.page_size;
        if start >= end || !size.is_power_of_two() || !start.is_multiple_of(size) || !end.is_multiple_of(size) {
            return Err(different(format!("they are not whole pages of {size} bytes")));
        }
        let mappings = match &self.guest {
            None => files.filter(|files| files.are_own()).map_or_else(Mappings::own, OwnFiles::mappings),
            Some(guest) if self.is_hugetlb() => {
                let (addresses, pid) = (self.addresses.clone(), guest.process().pid());
                return Err(DiscardError::HugeElsewhere { addresses, pid, page_size: size });
            }
            Some(guest) => Mappings::of_process(guest.process().pid())
                .and_then(|mappings| guest.process().check_alive().map(|()| mappings).map_err(io::Error::other)),
        };
        let mappings = mappings.map_err(|source| DiscardError::System {
            what: "read /proc/PID/maps for",
            addresses: self.addresses.clone(),
            source,
        })?;
        mappings.check(start..end, is).map_err(different)
    }

    /// Returns the addresses of the RAM block, in the process that maps it.
    pub fn addresses(&self) -> Range<usize> {
        self.addresses.clone()
    }

    /// Returns the length of the RAM block, in pages of 4096 bytes.
    pub fn pages(&self) -> u64 {
        (self.addresses.len() / PAGE_SIZE) as u64
    }

    /// Returns the bytes of a page of the backing: only multiples of it can be discarded and placed.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the features that a userfaultfd which watches this memory for missing pages must have.
    pub fn userfault_features(&self) -> u64 {
        match &self.file {
            Some(RamFile { huge: false, .. }) => MISSING_SHMEM,
            _ if self.is_hugetlb() => MISSING_HUGETLBFS,
            _ => 0,
        }
    }

    /// Returns whether the backing is hugetlb.
    pub fn is_hugetlb(&self) -> bool {
        self.file.as_ref().map_or(self.page_size != kernel_page_size(), |file| file.huge)
    }

    /// Widens `run` to whole pages of the backing. Both sides of a migration have to agree on which pages are stale.
    pub fn widen(&self, run: Range<u64>) -> Range<u64> {
        let unit = (self.page_size / PAGE_SIZE) as u64;
        run.start / unit * unit..run.end.next_multiple_of(unit).min(self.pages())
    }

    /// Checks that `run` is whole pages of the backing within the block.
    pub fn check_run(&self, run: &Range<u64>) -> Result<(), DiscardError> {
        if run.start > run.end || run.end > self.pages() {
            return Err(DiscardError::Outside { run: run.clone(), pages: self.pages() });
        }
        let unit = (self.page_size / PAGE_SIZE) as u64;
        if !run.start.is_multiple_of(unit) || !run.end.is_multiple_of(unit) {
            return Err(DiscardError::NotWhole { run: run.clone(), page_size: self.page_size });
        }
        Ok(())
    }

    /// Returns the addresses of `run`, which is within the block.
    pub(crate) fn addresses_of(&self, run: &Range<u64>) -> Range<usize> {
        let address = |page: u64| self.addresses.start + page as usize * PAGE_SIZE;
        address(run.start)..address(run.end)
    }

    /// Returns whether a page is in memory: for hugetlb, in the page tables of this process (`mincore_hugetlb` in
    /// `mm/mincore.c`), in which such a block is mapped.
    pub(crate) fn is_mapped(&self, page: u64) -> bool {
        let address = self.addresses_of(&(page..page + 1)).start;
        let mut resident = 0_u8;
        // SAFETY: the call writes one byte for the one page asked about.
        let result = unsafe { libc::mincore(std::ptr::without_provenance_mut(address), PAGE_SIZE, &raw mut resident) };
        result == 0 && resident & 1 != 0
    }

    /// Forbids transparent huge pages from now on: call it before the first discard. Existing ones stay until parts of
    /// them are discarded. Changes nothing on hugetlb.
    pub fn forbid_huge_pages(&self) -> Result<(), DiscardError> {
        self.advise_huge_pages(
            std::slice::from_ref(&self.addresses),
            Advice::NoHugePage,
            "forbid transparent huge pages at",
        )
    }

    /// Allows transparent huge pages again, also where the system uses them only on advice. For after post-copy, unless
    /// the VMM does not want them.
    pub fn allow_huge_pages(&self) -> Result<(), DiscardError> {
        self.advise_huge_pages(
            std::slice::from_ref(&self.addresses),
            Advice::HugePage,
            "allow transparent huge pages at",
        )
    }

    /// Allows transparent huge pages again where they were allowed `before`. For after post-copy.
    pub fn restore_huge_pages(&self, before: &HugePageAdvice) -> Result<(), DiscardError> {
        let parts = before.within(&self.addresses);
        self.advise_huge_pages(&parts, Advice::HugePage, "allow transparent huge pages at")
    }

    fn advise_huge_pages(
        &self,
        parts: &[Range<usize>],
        advice: Advice,
        what: &'static str,
    ) -> Result<(), DiscardError> {
        if self.is_hugetlb() {
            return Ok(());
        }
        match self.advise(parts, advice, what) {
            // The kernel has no transparent huge pages.
            Err(DiscardError::System { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            result => result,
        }
    }

    /// Frees the pages of `run`, counted in pages of 4096 bytes, whole pages of the backing.
    ///
    /// After an error, the content of any part of `run` may be gone.
    pub fn discard(&self, run: Range<u64>) -> Result<(), DiscardError> {
        self.discard_all(std::slice::from_ref(&run))
    }

    /// As [`Self::discard`], for all of `runs`.
    pub fn discard_all(&self, runs: &[Range<u64>]) -> Result<(), DiscardError> {
        runs.iter().try_for_each(|run| self.check_run(run))?;
        let runs = || runs.iter().filter(|run| !run.is_empty());
        if let Some(file) = &self.file {
            runs().try_for_each(|run| self.punch(file, run))?;
        }
        if self.private {
            // After the hole: without the private copy, a read in between would fetch the file's old page.
            let addresses: Vec<_> = runs().map(|run| self.addresses_of(run)).collect();
            self.advise(&addresses, Advice::DontNeed, "discard")?;
        }
        Ok(())
    }

    fn punch(&self, RamFile { file, offset, huge }: &RamFile, run: &Range<u64>) -> Result<(), DiscardError> {
        let failed = |what| {
            let addresses = self.addresses_of(run);
            move |errno: Errno| DiscardError::System { what, addresses, source: errno.into() }
        };
        let start = offset + run.start * PAGE_SIZE as u64;
        let length = (run.end - run.start) * PAGE_SIZE as u64;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match fallocate(file, flags, start, length) {
                Err(Errno::INTR) => {}
                result => break result.map_err(failed("punch a hole into the file behind"))?,
            }
        }
        // hugetlbfs frees all whole pages, and does not distinguish data from holes.
        if *huge {
            return Ok(());
        }
        match seek(file, SeekFrom::Data(start)) {
            Ok(data) if data < start + length => {
                Err(DiscardError::StillThere { page: (data - offset) / PAGE_SIZE as u64 })
            }
            Ok(_) | Err(Errno::NXIO) => Ok(()),
            Err(errno) => Err(failed("search for data in the file behind")(errno)),
        }
    }

    fn advise(&self, parts: &[Range<usize>], advice: Advice, what: &'static str) -> Result<(), DiscardError> {
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Ok(()) };
        let failed = |addresses| move |source| DiscardError::System { what, addresses, source };
        if let Some(guest) = &self.guest {
            return guest.advise(parts, advice).map_err(failed(first.start..last.end));
        }
        let advise = |part: &Range<usize>| {
            // SAFETY: the range is within the block, which the creator of the value keeps mapped and vouches that only raw
            // pointers access; so advice that discards content is allowed too.
            let result =
                unsafe { libc::madvise(std::ptr::without_provenance_mut(part.start), part.len(), advice.code()) };
            let result = if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
            result.map_err(failed(part.clone()))
        };
        parts.iter().try_for_each(advise)
    }
}

/// Returns the bytes of an ordinary page: 4096, on some ARM machines more.
pub fn kernel_page_size() -> usize {
    rustix::param::page_size()
}

// Values of `include/uapi/linux/magic.h`. A memfd has one or the other.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
