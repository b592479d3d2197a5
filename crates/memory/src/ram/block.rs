//! One RAM block: where its memory lies, what backs it, and reading and writing its pages.
//!
//! The guest writes this memory while it is read, so the code here never makes a reference to it.

mod clear;

use std::any::Any;
use std::fmt::{Debug, Formatter};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::RamError;
use crate::PAGE_SIZE;
use crate::copy::{store_raw, zero_raw};
use crate::discard::{DiscardError, Discardable};
use crate::guest_process::GuestProcess;
use crate::holes::{HoleError, PageMap, file_data};
use crate::mappings::{Mapping, Mappings};
use crate::own_files::OwnFiles;
use crate::place::{PlaceError, ProcessWrite, TargetProcess};
use crate::process_memory::ProcessMemory;
use crate::raw::{KernelPart, RawPiece};
use crate::scan::is_zero_raw;
use crate::snapshot::Snapshot;

/// The backing of a block's mapping. [`GuestRam::new`](super::GuestRam::new) compares it with the actual mapping.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Private anonymous memory, with ordinary, transparent huge or hugetlb pages.
    Anonymous,
    /// A shared mapping (`MAP_SHARED`) of a file in memory (memfd, tmpfs, hugetlbfs) from this offset on, in bytes. A private
    /// mapping of a file, such as that of a guest that was restored from a snapshot, is [`Backing::Other`]: what the guest
    /// has written is not in the file.
    Shared(Arc<File>, u64),
    /// Any other mapping: all of it is read and sent, and none of it can be freed.
    Other,
}

/// A mapping that belongs to a block.
struct OwnMapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the address is used only to end the mapping, once.
unsafe impl Send for OwnMapping {}
// SAFETY: as above.
unsafe impl Sync for OwnMapping {}

impl Drop for OwnMapping {
    fn drop(&mut self) {
        // SAFETY: the block that used the mapping is gone, and nothing else knows of it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// The location of a block's memory.
#[derive(Clone, Debug)]
enum Location {
    /// Mapped in this process.
    Here(NonNull<u8>),
    /// In another process.
    Process(ProcessMemory),
}

/// A named, contiguous piece of guest RAM.
#[derive(Clone)]
pub struct RamBlock {
    name: String,
    home: Location,
    bytes: usize,
    page_size: usize,
    backing: Backing,
    reports_unchanged: bool,
    /// The block's address in the guest's process, if that is another process and this process has its own mapping.
    elsewhere: Option<ProcessMemory>,
    /// Of this process; none before the block is part of guest RAM, or where they could not be opened.
    pub(super) own_files: Option<Arc<OwnFiles>>,
    /// Unmaps the memory when the last clone of the block is dropped.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl Debug for RamBlock {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { name, page_size, backing, .. } = self;
        let (addresses, process) = (self.addresses(), self.process().map(|process| process.pid()));
        write!(f, "RamBlock({name:?} at {addresses:#x?}, ")?;
        process.map_or(Ok(()), |pid| write!(f, "process {pid}, "))?;
        write!(f, "pages of {page_size} bytes, {backing:?})")
    }
}

// SAFETY: the pointer is only used for raw reads and writes inside the range that the creator vouched for, from any
// thread; nothing is ever borrowed from it.
unsafe impl Send for RamBlock {}
// SAFETY: as above. Reads race with the guest, and may race with each other and with writes: the compiler takes nothing for granted of
// what they access (`copy.rs`), and none leaves a reference behind.
unsafe impl Sync for RamBlock {}

impl RamBlock {
    /// Makes a block of `bytes` bytes of guest RAM at `start`, backed by pages of 4 KiB (transparent huge pages
    /// included).
    ///
    /// # Safety
    /// The range stays mapped, readable and writable, with this backing, until the value and its clones are dropped. No
    /// Rust reference to it exists meanwhile, except to atomics. At a destination no other thread or process accesses
    /// it before the guest's state is loaded.
    pub unsafe fn new(name: impl Into<String>, start: NonNull<u8>, bytes: usize, backing: Backing) -> Self {
        let (name, home, page_size) = (name.into(), Location::Here(start), PAGE_SIZE);
        let (reports_unchanged, elsewhere) = (false, None);
        Self { name, home, bytes, page_size, backing, reports_unchanged, elsewhere, own_files: None, _owner: None }
    }

    /// Makes a block of `bytes` bytes of guest RAM at `address` of another process, which the kernel reads and writes
    /// for this process (this requires ptrace access). For shared memory use a mapping here ([`RamBlock::new`]):
    /// accelerators can reach it, and no byte is copied twice.
    ///
    /// Such a block's pages cannot be sent without a copy, and post-copy needs [`GuestRam::run_by`](super::GuestRam::run_by).
    pub fn in_process(
        name: impl Into<String>,
        process: &Arc<TargetProcess>,
        address: usize,
        bytes: usize,
        backing: Backing,
    ) -> Self {
        let home = Location::Process(ProcessMemory::new(Arc::clone(process), address, bytes));
        let (name, page_size) = (name.into(), PAGE_SIZE);
        let (reports_unchanged, elsewhere) = (false, None);
        Self { name, home, bytes, page_size, backing, reports_unchanged, elsewhere, own_files: None, _owner: None }
    }

    /// Makes a block of `bytes` bytes from `offset` of a file in memory (memfd, tmpfs, hugetlbfs), such as another
    /// process's guest RAM. The file is mapped here, shared, while the block or a clone lives. `page_size` is the size
    /// in bytes of the file's pages.
    ///
    /// # Errors
    /// The file cannot be mapped.
    pub fn of_file(
        name: impl Into<String>,
        file: Arc<File>,
        offset: u64,
        bytes: usize,
        page_size: usize,
    ) -> io::Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, &*file, offset)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let owner = Arc::new(OwnMapping { start, bytes });
        // SAFETY: the mapping was made just now for the block alone, which keeps it; what the file is of is compared by `GuestRam`.
        let block = unsafe { Self::new(name, start, bytes, Backing::Shared(file, offset)) };
        Ok(block.with_page_size(page_size).owned_by(owner))
    }

    /// Returns the block, a file in memory that is mapped here ([`RamBlock::of_file`]), with its address in the guest's
    /// process: there post-copy watches its missing pages.
    #[must_use]
    pub fn mapped_in(self, process: &Arc<TargetProcess>, address: usize) -> Self {
        let elsewhere = Some(ProcessMemory::new(Arc::clone(process), address, self.bytes));
        Self { elsewhere, ..self }
    }

    /// Returns the block, backed by huge pages of `bytes` each (hugetlb, not transparent huge pages).
    #[must_use]
    pub fn with_page_size(self, bytes: usize) -> Self {
        Self { page_size: bytes, ..self }
    }

    /// Returns the block, of which a dirty log also reports pages that have not changed, as where the kernel merges equal pages. A source
    /// compares such pages with what it has sent, for 8 bytes of memory for each page.
    #[must_use]
    pub fn reporting_unchanged_pages(self) -> Self {
        Self { reports_unchanged: true, ..self }
    }

    /// Returns the block, which with its clones keeps `owner` alive. If dropping `owner` unmaps the memory, the first
    /// promise of [`RamBlock::new`] is kept.
    #[must_use]
    pub fn owned_by(self, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _owner: Some(owner), ..self }
    }

    /// Returns the block's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its address in this process, if it is mapped here.
    pub fn start(&self) -> Option<NonNull<u8>> {
        match &self.home {
            Location::Here(start) => Some(*start),
            Location::Process(_) => None,
        }
    }

    /// Returns the process that it lies in, if that is another one.
    pub fn process(&self) -> Option<&Arc<TargetProcess>> {
        match &self.home {
            Location::Here(_) => None,
            Location::Process(memory) => Some(memory.process()),
        }
    }

    /// Returns its addresses in the process that it lies in.
    pub fn addresses(&self) -> Range<usize> {
        match &self.home {
            Location::Here(start) => start.as_ptr().addr()..start.as_ptr().addr() + self.bytes,
            Location::Process(memory) => memory.addresses(),
        }
    }

    /// Returns the block as memory that the kernel writes for this process; none where this process has it mapped.
    ///
    /// # Errors
    /// The process has ended, or its memory may not be accessed.
    pub fn process_write(&self) -> Result<Option<ProcessWrite>, PlaceError> {
        match &self.home {
            Location::Here(_) => Ok(None),
            Location::Process(memory) => memory.writer().map(Some),
        }
    }

    /// Returns its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Returns its length in pages of 4 KiB.
    pub fn pages(&self) -> u64 {
        (self.bytes / PAGE_SIZE) as u64
    }

    /// Returns the size in bytes of the pages of its backing.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns whether a dirty log reports pages of it that have not changed: for one written word all of a huge page, or
    /// [others](Self::reporting_unchanged_pages).
    pub fn reports_unchanged_pages(&self) -> bool {
        self.reports_unchanged || self.page_size > PAGE_SIZE
    }

    /// Returns its backing.
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Compares the backing with the mapping. A wrong backing would lose pages silently: written pages of a private
    /// file mapping are not in the file, and pages of shared memory that another process wrote are not in this
    /// process's page tables.
    pub(super) fn check_backing(&self, mappings: &Mappings) -> Result<(), RamError> {
        let (given, instead, result) = match &self.backing {
            Backing::Anonymous => (
                "private anonymous memory",
                "give a shared mapping of a file in memory as Backing::Shared with that file, and anything else as \
                 Backing::Other",
                mappings.check(self.addresses(), |mapping| mapping.is_anonymous()),
            ),
            Backing::Shared(file, offset) => {
                let status = rustix::fs::fstat(file).map_err(|errno| RamError::NotSeen {
                    name: self.name.clone(),
                    what: "fstat of its file",
                    source: errno.into(),
                })?;
                let device = (rustix::fs::major(status.st_dev), rustix::fs::minor(status.st_dev));
                let start = self.addresses().start;
                let is_shared = |mapping: &Mapping<'_>| {
                    !mapping.private && mapping.is_of_file(start, (device, status.st_ino), *offset)
                };
                (
                    "a shared mapping of its file from its offset on",
                    "give a private mapping of a file as Backing::Other, since pages that were written are not in the file",
                    mappings.check(self.addresses(), is_shared),
                )
            }
            Backing::Other => {
                ("memory of another kind", "map all of it first", mappings.check(self.addresses(), |_| true))
            }
        };
        result.map_err(|found| RamError::Backing { name: self.name.clone(), given, found, instead })
    }

    /// Checks that the block is whole pages of its backing, and that transparent or hugetlb pages are a power of two.
    pub fn check(&self) -> Result<(), RamError> {
        let (start, page_size) = (self.addresses().start, self.page_size);
        let whole = page_size.is_power_of_two()
            && page_size >= PAGE_SIZE
            && start.is_multiple_of(page_size)
            && self.bytes.is_multiple_of(page_size)
            && self.bytes > 0;
        let error = || RamError::Shape { name: self.name.clone(), start, bytes: self.bytes, page_size };
        if whole { Ok(()) } else { Err(error()) }
    }

    /// Calls `run` with the runs of pages that may hold anything but zeros, in ascending order: the pages that were
    /// ever populated. `own` is the page map of this process.
    ///
    /// The result holds for the time of the call: dirty tracking must be on before.
    pub fn populated(&self, own: &mut PageMap, run: impl FnMut(Range<u64>)) -> Result<(), RamError> {
        self.populated_of(0..self.pages(), own, run)
    }

    /// As [`RamBlock::populated`], of `pages` only, which are in the block.
    fn populated_of(
        &self,
        pages: Range<u64>,
        own: &mut PageMap,
        mut run: impl FnMut(Range<u64>),
    ) -> Result<(), RamError> {
        let failed = |source| RamError::Holes { name: self.name.clone(), source };
        let first = self.addresses().start;
        let page = |offset: u64| offset / PAGE_SIZE as u64;
        match &self.backing {
            Backing::Anonymous => {
                let of_process = self.process().map(|process| {
                    let map = PageMap::of_process(process.pid() as u32).map_err(failed)?;
                    let alive = process.check_alive().map_err(|source| self.not_read(source));
                    alive.map(|()| map)
                });
                let mut of_process = of_process.transpose()?;
                let map = of_process.as_mut().unwrap_or(own);
                let address = |page: u64| first + page as usize * PAGE_SIZE;
                let populated = map.populated(address(pages.start)..address(pages.end), |part| {
                    run(page((part.start - first) as u64)..page((part.end - first) as u64));
                });
                populated.map_err(failed)
            }
            Backing::Shared(file, offset) => file_runs(file, *offset, pages, run).map_err(failed),
            Backing::Other => {
                run(pages);
                Ok(())
            }
        }
    }

    /// Maps those pages of `run` in this process that the block's file has. A device walks this process's page tables, where pages that only
    /// the guest's process has touched are missing. Pages that the file does not have stay so: mapping one would allocate it. Other memory is
    /// left as it is, because only this process populates it.
    ///
    /// Where pages cannot be mapped, the device leaves them to the CPU.
    ///
    /// # Panics
    /// If the pages are not in the block.
    pub fn map_populated(&self, run: Range<u64>) {
        self.check_run(run.start, run.end - run.start);
        if let (Backing::Shared(file, offset), Location::Here(_)) = (&self.backing, &self.home)
            && let Err(error) = file_runs(file, *offset, run, |part| self.map_read(part))
        {
            tracing::debug!(%error, block = self.name, "pages are not mapped for accelerators");
        }
    }

    /// Returns the error for a process that has ended.
    fn not_read(&self, source: PlaceError) -> RamError {
        RamError::Read { name: self.name.clone(), source: source.into() }
    }

    fn not_written(&self, source: PlaceError) -> RamError {
        RamError::Write { name: self.name.clone(), source }
    }

    /// Reads the pages of `runs` into `snapshot`, once each, in as few system calls as possible.
    ///
    /// # Errors
    /// They lie in another process, which has ended or has unmapped them.
    ///
    /// # Panics
    /// If the pages are not in the block, or the snapshot has no room for them.
    pub fn read(
        &self,
        runs: impl Iterator<Item = Range<u64>> + Clone,
        snapshot: &mut Snapshot<'_>,
    ) -> Result<(), RamError> {
        match &self.home {
            Location::Here(_) => {
                for run in runs {
                    let pages = run.end - run.start;
                    let at = self.at(run.start, pages);
                    // SAFETY: the pages were checked to lie inside the block, which is readable by the contract of `new`; what the
                    // snapshot copies to is a buffer, and so not part of it.
                    unsafe { snapshot.read(at, pages as usize) };
                }
                Ok(())
            }
            Location::Process(memory) => {
                let pages = runs.clone().map(|run| run.end - run.start).sum::<u64>();
                let parts = runs.map(|run| {
                    self.check_run(run.start, run.end - run.start);
                    run.start as usize * PAGE_SIZE..run.end as usize * PAGE_SIZE
                });
                let read = snapshot.fill(pages as usize, |buffer| memory.read(parts, buffer));
                read.map_err(|source| RamError::Read { name: self.name.clone(), source })
            }
        }
    }

    /// Returns the pages of `run` for sendmsg(2), where the kernel reads them, since the guest may be writing them.
    ///
    /// # Panics
    /// If they are not in the block, or it lies in another process.
    pub fn kernel_part(&self, run: Range<u64>) -> KernelPart<'_> {
        let (start, bytes) = self.place(run);
        // SAFETY: the pages were checked to lie inside the block, which is mapped by the contract of `new` as long as it lives.
        unsafe { KernelPart::new(start, bytes) }
    }

    /// Returns the pages of `run`, to be filled.
    ///
    /// # Panics
    /// If they are not in the block, or it lies in another process.
    pub fn piece(&self, run: Range<u64>) -> RawPiece<'_> {
        let (start, bytes) = self.place(run);
        // SAFETY: as in `kernel_part`; and no reference to the block exists by the contract of `new`.
        unsafe { RawPiece::new(start, bytes) }
    }

    fn place(&self, run: Range<u64>) -> (NonNull<u8>, usize) {
        let pages = run.end - run.start;
        let start = NonNull::new(self.at(run.start, pages)).expect("a block is not at address 0");
        (start, pages as usize * PAGE_SIZE)
    }

    /// Copies the page `page`, which other threads may be writing.
    ///
    /// # Errors
    /// As [`RamBlock::read`].
    ///
    /// # Panics
    /// If it is not in the block, or `copy` is not a page long.
    pub fn read_page(&self, page: u64, copy: &mut [u8]) -> Result<(), RamError> {
        let mut zero = [0];
        let mut snapshot = Snapshot::new(copy, &mut zero).unchecked();
        self.read(std::iter::once(page..page + 1), &mut snapshot)?;
        if snapshot.finish().normal_bytes() == 0 {
            copy.fill(0);
        }
        Ok(())
    }

    /// Copies `content` to the pages from `first` on.
    ///
    /// # Panics
    /// If it does not fit the block, or the block lies in another process.
    pub fn write(&self, first: u64, content: &[u8]) {
        let at = self.at(first, content.len().div_ceil(PAGE_SIZE) as u64);
        // SAFETY: the target was checked to lie inside the block, which is writable by the contract of `new`; the source is
        // a live slice, and no reference to guest RAM exists, so the two do not overlap.
        unsafe { store_raw(content, at) };
    }

    /// Fills the pages of `run` with zeros.
    ///
    /// # Panics
    /// If they are not in the block, or the block lies in another process.
    pub fn zero(&self, run: Range<u64>) {
        let at = self.at(run.start, run.end - run.start);
        // SAFETY: the target was checked to lie inside the block, which is writable by the contract of `new`.
        unsafe { zero_raw(at, (run.end - run.start) as usize * PAGE_SIZE) };
    }

    /// Returns whether page `page` is zero. Faults it in if it was never populated.
    ///
    /// # Panics
    /// If it is not in the block, or the block lies in another process.
    pub fn is_zero(&self, page: u64) -> bool {
        let at = self.at(page, 1);
        // SAFETY: the page was checked to lie inside the block, which is readable by the contract of `new`.
        unsafe { is_zero_raw(at, PAGE_SIZE) }
    }

    /// Returns the block, as mapped in this process, as memory whose pages can be freed; none where its backing is of
    /// another kind, or where it lies in another process.
    ///
    /// # Errors
    /// The backing does not match the mapping.
    pub fn discardable(&self) -> Result<Option<Discardable>, DiscardError> {
        if self.process().is_some() {
            return Ok(None);
        }
        let files = self.own_files.as_deref();
        match &self.backing {
            Backing::Anonymous => {
                // SAFETY: by the contract of `new` the mapping stays as it is, and nobody has a reference to it.
                unsafe { Discardable::anonymous_here(self.addresses(), self.page_size, files) }.map(Some)
            }
            Backing::Shared(file, offset) => {
                // SAFETY: as above.
                unsafe { Discardable::file_here(self.addresses(), file.as_fd(), *offset, files) }.map(Some)
            }
            Backing::Other => Ok(None),
        }
    }

    /// As [`RamBlock::discardable`], for the mapping in `guest`, the process that runs the guest; none where another
    /// process maps it.
    pub(super) fn discardable_in(&self, guest: &Arc<dyn GuestProcess>) -> Result<Option<Discardable>, DiscardError> {
        let memory = match &self.home {
            Location::Process(memory) => memory,
            Location::Here(_) => match &self.elsewhere {
                Some(memory) => memory,
                None => return Ok(None),
            },
        };
        if !Arc::ptr_eq(memory.process(), guest.process()) {
            return Ok(None);
        }
        match &self.backing {
            Backing::Anonymous => {
                // SAFETY: `GuestRam::open_userfault` opens the userfaultfd of this very process.
                unsafe { Discardable::anonymous_elsewhere(guest, memory.addresses(), self.page_size) }.map(Some)
            }
            Backing::Shared(file, offset) => {
                // SAFETY: as above; and by the contract of `new` no reference to what is mapped here exists.
                unsafe { Discardable::file_elsewhere(guest, memory.addresses(), file.as_fd(), *offset) }.map(Some)
            }
            Backing::Other => Ok(None),
        }
    }

    /// Takes the page faults of `run` now, in one system call, so that later writes cause none.
    ///
    /// # Errors
    /// No memory is left. Without this call, the write itself would end in SIGBUS on shared memory and hugetlb.
    ///
    /// # Panics
    /// If it is not in the block, or the block lies in another process.
    pub fn populate(&self, run: Range<u64>) -> Result<(), RamError> {
        let pages = run.end - run.start;
        if pages == 0 {
            return Ok(());
        }
        let (at, bytes) = (self.at(run.start, pages), pages as usize * PAGE_SIZE);
        loop {
            // SAFETY: the range was checked to lie inside the block; the advice changes no content (madvise(2)).
            let done = unsafe { rustix::mm::madvise(at.cast(), bytes, Advice::LinuxPopulateWrite) };
            return match done {
                Ok(()) => Ok(()),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
                // Before Linux 5.14: the write itself takes the fault.
                Err(rustix::io::Errno::INVAL) => Ok(()),
                Err(errno) => Err(RamError::NoMemory {
                    name: self.name.clone(),
                    offset: run.start * PAGE_SIZE as u64,
                    bytes,
                    source: errno.into(),
                }),
            };
        }
    }

    /// Maps the pages of `run`, which exist, by one call in place of a page fault for each. Where the kernel does not (before Linux 5.14),
    /// reading takes the faults.
    fn map_read(&self, run: Range<u64>) {
        let pages = run.end - run.start;
        let at = self.at(run.start, pages);
        // SAFETY: the range was checked to lie inside the block; the advice changes no content (madvise(2)).
        let mapped = unsafe { rustix::mm::madvise(at.cast(), pages as usize * PAGE_SIZE, Advice::LinuxPopulateRead) };
        if let Err(error) = mapped {
            tracing::debug!(%error, "pages are mapped one by one");
        }
    }

    /// Returns the address of page `first` in this process.
    #[track_caller]
    fn at(&self, first: u64, pages: u64) -> *mut u8 {
        self.check_run(first, pages);
        let start = self.start().expect("RAM of another process has no address here");
        start.as_ptr().wrapping_add(first as usize * PAGE_SIZE)
    }

    #[track_caller]
    fn check_run(&self, first: u64, pages: u64) {
        let end = first.checked_add(pages);
        assert!(
            end.is_some_and(|end| end <= self.pages()),
            "{pages} pages from {first} are not within RAM block {} of {} pages",
            self.name,
            self.pages()
        );
    }
}

/// Calls `run` with the runs of `pages` that `file` has, where page 0 is at `offset` of the file.
fn file_runs(file: &File, offset: u64, pages: Range<u64>, mut run: impl FnMut(Range<u64>)) -> Result<(), HoleError> {
    let position = |page: u64| offset + page * PAGE_SIZE as u64;
    // A hole may begin within a page only at the end of the file; the rest of that page is zero.
    file_data(file, position(pages.start)..position(pages.end), |part| {
        run((part.start - offset) / PAGE_SIZE as u64..(part.end - offset).div_ceil(PAGE_SIZE as u64));
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;
    use crate::test_util::Area;

    pub(super) fn block(area: &Area, bytes: usize) -> RamBlock {
        // SAFETY: the area outlives the block in every test, and is accessed through raw pointers only.
        unsafe { RamBlock::new("ram", NonNull::new(area.ptr()).unwrap(), bytes, Backing::Anonymous) }
    }

    #[test]
    fn only_what_was_written_is_populated_and_reads_back() {
        let area = Area::small_pages(64 * PAGE_SIZE);
        let block = block(&area, 64 * PAGE_SIZE);
        block.write(3, &[7; 2 * PAGE_SIZE]);
        block.populate(40..42).unwrap();
        block.write(41, &[9; PAGE_SIZE]);

        let mut found = Vec::new();
        block.populated(&mut PageMap::own().unwrap(), |run| found.push((run.start, run.end))).unwrap();
        assert_eq!(found, [(3, 5), (40, 42)]);
        let (mut copy, mut zero) = (vec![0; 64 * PAGE_SIZE], [0]);
        let mut read = |run| {
            let mut snapshot = Snapshot::new(&mut copy, &mut zero);
            block.read(std::iter::once(run), &mut snapshot).unwrap();
            snapshot.finish().normal
        };
        assert_eq!((read(40..42), read(3..5)), (1, 2));
        block.zero(3..5);
        assert_eq!((read(40..42), read(3..5)), (1, 0));
        assert_eq!(copy[0], 9, "zero pages are not copied, so what the read before left is still there");
    }

    #[test]
    #[should_panic(expected = "not within RAM block ram")]
    fn pages_outside_the_block_are_never_touched() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        block(&area, 4 * PAGE_SIZE).write(3, &[1; 2 * PAGE_SIZE]);
    }

    #[test]
    fn what_another_process_has_written_is_mapped_here_and_no_hole_of_the_file_is_filled() {
        const PAGES: u64 = 256;
        let file = File::from(rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len((PAGES + 1) * PAGE_SIZE as u64).unwrap();
        // By the file, as by another process's mapping: this process's page tables know nothing of it. The block begins at the second page.
        let written: Vec<u64> = (40..80).chain(100..101).chain(200..PAGES).collect();
        written.iter().for_each(|page| file.write_all_at(&[7], (page + 1) * PAGE_SIZE as u64).unwrap());
        let allocated = || file.metadata().unwrap().blocks();
        let before = allocated();
        let (shared, bytes) = (Arc::new(file.try_clone().unwrap()), PAGES as usize * PAGE_SIZE);
        let block = RamBlock::of_file("ram", shared, PAGE_SIZE as u64, bytes, PAGE_SIZE).unwrap();
        let mapped = |block: &RamBlock| {
            let mut map = PageMap::own().unwrap();
            map.use_read();
            let (first, mut found) = (block.addresses().start, Vec::new());
            let run =
                |part: Range<usize>| found.extend((part.start - first) / PAGE_SIZE..(part.end - first) / PAGE_SIZE);
            map.populated(block.addresses(), run).unwrap();
            found.into_iter().map(|page| page as u64).collect::<Vec<_>>()
        };
        assert_eq!(mapped(&block), [0; 0]);
        block.map_populated(60..PAGES);
        let found = mapped(&block);
        assert!(written.iter().filter(|page| **page >= 60).all(|page| found.contains(page)), "{found:?}");
        block.map_populated(0..60);
        assert_eq!(mapped(&block), written);
        assert_eq!(allocated(), before);
    }
}
