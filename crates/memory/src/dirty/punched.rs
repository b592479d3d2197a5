//! Names the pages of shared memory that were freed: holes punched into its file (balloons, free page reporting,
//! virtio-mem), which read as zero afterwards.
//!
//! No other log has them. A write-protecting log sees writes only, and the kernel leaves its protection in place of a page
//! that was punched out; KVM's logs see what vCPUs write. Without this log the destination keeps the old content of such
//! pages where the guest reads zeros.
//!
//! **How**: the log has a mapping of its own of each file, in which all data of the file is mapped, read-only, and which
//! only this log uses. The kernel takes a page out of every mapping when the page leaves the file, so a page that was mapped
//! here and is not any more was punched out, even if it was read or written since and the file has data there again. The
//! file's own list of holes (`SEEK_HOLE`) would miss such pages: where a hole is read through a mapping, the kernel fills
//! it with a page of zeros.
//!
//! **Order**: the log wraps the one that sees the writes, and looks after it. A page that is written after one answer of
//! that log is named in its next answer, even if the page was punched out in between; so what this log must find is only
//! what was data at its last look. What is read before both have answered is not sent.
//!
//! **Named without being punched**: pages that left the mapping for another reason, such as being swapped out or made part
//! of a huge page, and the whole of a huge page that was punched in part. Of a file on a disk also pages that were dropped
//! from memory, as the disk has them.
//!
//! **Not seen**: content that is removed by other means than punching: writes by system calls on the file, of which zeroing
//! a part of a page by `fallocate` is one.
//!
//! **Cost**: the mapping has page tables, 2 MiB per GiB of data in pages of 4 KiB. `start` fills the mapping while the guest
//! runs: 83 ms per GiB. The last look is made while the guest is paused: 1.8 ms per GiB (1.7 to 5.9), on a virtual machine
//! with two CPUs, by `cargo run --release -p sterna-bench --example given_back`. A file on hugetlbfs does not report its
//! holes: there `start` populates the file.

use super::{DirtyLog, DirtyLogError, next_gap};
use crate::PAGE_SIZE;
use crate::bitmap::PageBitmap;
use crate::holes::file_data;
use crate::pagemap_scan::{PAGE_IS_PRESENT, PAGE_IS_SWAPPED, Query, Scanner};
use crate::userfault::{Faults, Userfault, WP_ASYNC, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The part of a file that is a RAM block: of one in memory (memfd, tmpfs, hugetlbfs), or on a disk.
#[derive(Clone, Debug)]
pub struct SharedFile {
    /// The file, opened for reading and writing. It is not written.
    pub file: Arc<File>,
    /// Offset of the block in the file, in bytes; a multiple of its page size.
    pub offset: u64,
    /// Pages of the block.
    pub pages: u64,
}

/// A log that names the pages that another log names and those that were punched out. See the [module](self).
pub struct PunchedLog {
    writes: Box<dyn DirtyLog>,
    files: Vec<Option<SharedFile>>,
    started: Option<Started>,
}

struct Started {
    scanner: Scanner,
    /// One for each block with a file.
    views: Vec<Option<View>>,
    /// Registered for the views, so that the kernel maps only the requested pages there (`uffd_disable_fault_around` in
    /// `include/linux/userfaultfd_k.h`). It protects nothing.
    _userfault: Userfault,
}

impl PunchedLog {
    /// Makes a log for the RAM blocks of `writes`, the log of their writers. `files` has the file of each block, or
    /// none where the block is not shared memory; blocks beyond the list are not.
    pub fn new(writes: Box<dyn DirtyLog>, files: Vec<Option<SharedFile>>) -> Self {
        Self { writes, files, started: None }
    }

    fn look_first(&self) -> Result<Started, DirtyLogError> {
        let page_map = File::open("/proc/self/pagemap").map_err(DirtyLogError::system("open /proc/self/pagemap"))?;
        let mut scanner = Scanner::new(page_map);
        if scanner.scan(0..0, Query::default()).is_err() {
            return Err(DirtyLogError::Missing {
                what: "PAGEMAP_SCAN",
                instead: "it needs Linux 6.7 or newer; before that, keep balloons and free page reporting still",
            });
        }
        let userfault = Userfault::open(Faults::OfUserSpace, WP_ASYNC | WP_UNPOPULATED | WP_HUGETLBFS_SHMEM)?;
        let mut views = Vec::new();
        for (block, file) in self.files.iter().enumerate() {
            let Some(file) = file else {
                views.push(None);
                continue;
            };
            let mut view = View::new(block, file)?;
            // Before the registration, so that the kernel may map neighbouring pages too, which is faster.
            view.for_each_data(0..file.pages, |view, pages| populate(&view.addresses, &pages))?;
            userfault.register_write_protect(view.addresses.clone())?;
            view.remember(&mut scanner, 0..file.pages)?;
            views.push(Some(view));
        }
        Ok(Started { scanner, views, _userfault: userfault })
    }
}

impl DirtyLog for PunchedLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.writes.start()?;
        match self.look_first() {
            Ok(started) => self.started = Some(started),
            Err(error) => {
                // The first error is the one to report.
                let _ = self.writes.stop();
                return Err(error);
            }
        }
        Ok(())
    }

    fn found_populated(&mut self, block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        self.writes.found_populated(block, populated)
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        let started = self.started.as_mut().ok_or(DirtyLogError::NotStarted)?;
        if let Some(Some(view)) = started.views.get(block) {
            let (pages, given) = (view.file.pages, dirty.pages());
            if pages != given {
                return Err(DirtyLogError::BitmapSize { block, pages, given });
            }
        }
        self.writes.collect(block, dirty)?;
        match started.views.get_mut(block) {
            Some(Some(view)) => view.look(&mut started.scanner, dirty),
            _ => Ok(()),
        }
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.started = None;
        self.writes.stop()
    }
}

/// A mapping of a block's file that only this log uses.
struct View {
    block: usize,
    file: SharedFile,
    addresses: Range<usize>,
    /// Pages that were mapped at the end of the last look.
    mapped: PageBitmap,
    /// Buffer for the pages that are mapped at this look.
    now: PageBitmap,
}

impl Drop for View {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.addresses.start);
        // SAFETY: mapped by `new` with this length, and nothing has a pointer into it. It fails only for a wrong range.
        let _ = unsafe { munmap(start, self.addresses.len()) };
    }
}

impl View {
    fn new(block: usize, file: &SharedFile) -> Result<Self, DirtyLogError> {
        let failed = DirtyLogError::system(format!("map the file of RAM block {block} a second time"));
        let len = usize::try_from(file.pages).ok().and_then(|pages| pages.checked_mul(PAGE_SIZE));
        let Some(len) = len else {
            return Err(failed(io::Error::other("it is larger than an address space")));
        };
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let mapped =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &*file.file, file.offset) };
        let start = mapped.map_err(|error| failed(error.into()))?.expose_provenance();
        Ok(Self {
            block,
            file: file.clone(),
            addresses: start..start + len,
            mapped: PageBitmap::new(file.pages),
            now: PageBitmap::new(file.pages),
        })
    }

    /// Names pages that were mapped and are not any more, and maps those named now that are data.
    fn look(&mut self, scanner: &mut Scanner, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        let all = 0..self.file.pages;
        self.now.clear(all.clone());
        let (addresses, now) = (&self.addresses, &mut self.now);
        find_mapped(scanner, addresses, all, |pages| now.set(pages))?;
        let mut from = 0;
        while let Some(run) = self.mapped.next_run(from, u64::MAX) {
            while let Some(gone) = next_gap(&self.now, run.start.max(from)..run.end) {
                from = gone.end;
                dirty.set(gone);
            }
            from = run.end;
        }
        std::mem::swap(&mut self.mapped, &mut self.now);
        self.map_data(scanner, dirty)
    }

    /// Maps and records the pages among `wanted` that are not mapped and are data.
    ///
    /// Others stay unmapped: mapping one could hide that it was punched out since the look.
    fn map_data(&mut self, scanner: &mut Scanner, wanted: &PageBitmap) -> Result<(), DirtyLogError> {
        let mut from = 0;
        while let Some(run) = wanted.next_run(from, u64::MAX) {
            from = run.end;
            let mut rest = run;
            while let Some(gap) = next_gap(&self.mapped, rest.clone()) {
                rest.start = gap.end;
                self.for_each_data(gap, |view, pages| {
                    populate(&view.addresses, &pages)?;
                    view.remember(scanner, pages)
                })?;
            }
        }
        Ok(())
    }

    /// Records which of `pages` are mapped.
    fn remember(&mut self, scanner: &mut Scanner, pages: Range<u64>) -> Result<(), DirtyLogError> {
        let mapped = &mut self.mapped;
        find_mapped(scanner, &self.addresses, pages, |pages| mapped.set(pages))
    }

    /// Calls `data` for each run of `pages` that is data in the file.
    fn for_each_data(
        &mut self,
        pages: Range<u64>,
        mut data: impl FnMut(&mut Self, Range<u64>) -> Result<(), DirtyLogError>,
    ) -> Result<(), DirtyLogError> {
        let (file, offset, page) = (Arc::clone(&self.file.file), self.file.offset, PAGE_SIZE as u64);
        let mut outcome = Ok(());
        let found = file_data(&*file, offset + pages.start * page..offset + pages.end * page, |bytes| {
            if outcome.is_ok() {
                outcome = data(self, (bytes.start - offset) / page..(bytes.end - offset).div_ceil(page));
            }
        });
        let what = format!("search the file of RAM block {} for data", self.block);
        found.map_err(|error| DirtyLogError::system(what)(io::Error::other(error)))?;
        outcome
    }
}

/// Maps `pages` of a view at `addresses`.
fn populate(addresses: &Range<usize>, pages: &Range<u64>) -> Result<(), DirtyLogError> {
    let start = addresses.start + pages.start as usize * PAGE_SIZE;
    let len = (pages.end - pages.start) as usize * PAGE_SIZE;
    loop {
        let pointer = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: within our own mapping of the file, which is only read; the advice changes no content.
        match unsafe { madvise(pointer, len, Advice::LinuxPopulateRead) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Past the end of a truncated file, or a hole of hugetlb without an available huge page: no page with
            // content that was sent can be there.
            Err(Errno::FAULT) => return Ok(()),
            Err(error) => {
                let what = format!("map {len} bytes of shared memory at {start:#x}");
                return Err(DirtyLogError::system(what)(error.into()));
            }
        }
    }
}

/// Calls `found` for each run among `pages` of a view at `addresses` that is mapped.
fn find_mapped(
    scanner: &mut Scanner,
    addresses: &Range<usize>,
    pages: Range<u64>,
    mut found: impl FnMut(Range<u64>),
) -> Result<(), DirtyLogError> {
    let address = |page: u64| addresses.start + page as usize * PAGE_SIZE;
    let page = |address: usize| ((address - addresses.start) / PAGE_SIZE) as u64;
    let failed = |rest: Range<usize>, error| {
        DirtyLogError::system(format!("scan addresses {:#x}..{:#x} for pages that are mapped", rest.start, rest.end))(
            error,
        )
    };
    scanner.each(address(pages.start)..address(pages.end), MAPPED, failed, |region| {
        found(page(region.start)..page(region.end));
        Ok(())
    })
}

/// A page that the kernel is migrating counts as swapped meanwhile.
const MAPPED: Query = Query {
    any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
    returned: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
    flags: 0,
    inverted: 0,
    all_of: 0,
};
