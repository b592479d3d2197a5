//! The dirty log of any memory of a process: asynchronous userfaultfd write protection and `PAGEMAP_SCAN` (Linux 6.7).
//!
//! Pages are write-protected. A write lifts the protection of its page, in the kernel, without waiting. The scan finds
//! the unprotected pages and protects them again in one step under the page table lock, so no write is lost between two
//! results. It works on anonymous memory, transparent huge pages, shared memory (memfd, tmpfs), hugetlb and mappings of
//! files on a disk, and needs no privilege. KVM follows the page tables of the process, so writes of vCPUs to this
//! memory are seen too.
//!
//! The memory belongs to this process ([`WriteProtectLog::new`]) or to another one ([`WriteProtectLog::of_process`]): a
//! monitor that Sterna migrates from outside, or a vhost-user back end that maps the guest's RAM. One log sees the
//! writes of one process; the guest's log is the [union](super::union) for all processes that map the memory.
//!
//! **Not seen**: writes by another process or through another mapping, by system calls on the file of shared memory,
//! and by devices (VFIO). Report those. Writes by system calls into memory that they had pinned before (`O_DIRECT`) are
//! named when the memory is pinned, **not when the data arrives**: collect, wait until the I/O in flight has ended,
//! then read. The [module of logs](super) explains why.
//!
//! **Freed memory** (balloons, free page reporting, virtio-mem) reads as zero afterwards. Freed anonymous memory
//! (`MADV_DONTNEED`) is named: a page that the destination may have and that has no page table entry any more was
//! freed. The destination may have the pages that were populated at the start, those that the first round sends
//! ([`DirtyLog::found_populated`]) and those that were named since. For other memory the kernel leaves the protection
//! in place of the page:
//! * Private mappings of files: named, as the process's own page is gone. The page then has the file's content.
//! * Private hugetlb: named, as above; but **not named** where the page is read before the next scan, since that makes
//!   a new page of the process. Stop balloons there, or report the pages that they free.
//! * Shared memory: **not named**. [`punched`](super::punched) names it.
//!
//! **Named without being written**:
//! * The whole of a huge page, written in any part: always on hugetlb; on transparent huge pages when the huge page is
//!   new (a protected one is split at the first write, and then counts by 4 KiB).
//! * A page of private memory that was populated by a read.
//!
//! **Cost besides faults**: each scan walks the page tables twice, once for written pages and once for freed ones:
//! together 3 ms per GiB in pages of 4 KiB (1.7 to 5.8), 0.04 ms in huge pages, as the example `given_back` measures on
//! a virtual machine with two CPUs. Private memory that was never touched costs nothing. Shared memory gets page tables
//! for all of it, 2 MiB per GiB: reclaim can remove its page table entries, and a missing entry means a written page
//! only if every other page has a mark.

use super::{DirtyLog, DirtyLogError, check_collect, next_gap};
use crate::PAGE_SIZE;
use crate::bitmap::PageBitmap;
use crate::mappings::{Mapping, Mappings};
use crate::own_files::OwnFiles;
use crate::pagemap_scan::{
    PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, Query, Scanner,
};
use crate::place::{PlaceError, TargetProcess};
use crate::userfault::{Faults, Userfault, UserfaultError, WP_ASYNC, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A RAM block as a process maps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedBlock {
    /// Pages of the whole block.
    pub pages: u64,
    /// The parts of it that the process maps, in any order. Pages in no part are never named; pages in several parts
    /// are named when they are written through any of them.
    pub parts: Vec<MappedPart>,
}

/// The location of a part of a RAM block in a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedPart {
    /// Addresses in that process: whole pages, for hugetlb whole huge pages.
    pub addresses: Range<usize>,
    /// The page of the block at the first address.
    pub first_page: u64,
}

impl MappedPart {
    fn pages(&self) -> u64 {
        (self.addresses.len() / PAGE_SIZE) as u64
    }
}

/// The features of a userfaultfd for this process's memory.
const OWN_FEATURES: u64 = WriteProtectLog::FEATURES | WP_HUGETLBFS_SHMEM;

/// The dirty log of a process's memory. See the [module](self).
#[derive(Debug)]
pub struct WriteProtectLog {
    memory: Memory,
    blocks: Vec<MappedBlock>,
    /// The length of each block.
    pages: Vec<u64>,
    started: Option<Started>,
}

/// The process whose memory is tracked.
#[derive(Debug)]
enum Memory {
    Own,
    /// Of this process, which opened before all that tracking needs.
    Opened {
        files: OwnFiles,
        userfault: Arc<Userfault>,
    },
    OfProcess {
        process: Arc<TargetProcess>,
        userfault: Arc<Userfault>,
    },
}

#[derive(Debug)]
struct Started {
    userfault: Arc<Userfault>,
    scanner: Scanner,
    blocks: Vec<BlockState>,
    /// Buffer for a block's pages.
    scratch: PageBitmap,
}

/// A part of a block within one mapping, and so with one kind of backing.
#[derive(Debug)]
struct Part {
    pid: i32,
    addresses: Range<usize>,
    first_page: u64,
    kind: Kind,
}

/// The kinds of mapping in which the kernel treats protection differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Private memory without a file, of ordinary or transparent huge pages.
    Anonymous,
    /// A private mapping of a file, or private hugetlb.
    Private,
    /// Shared memory.
    Shared,
}

impl Kind {
    fn of(mapping: &Mapping<'_>) -> Self {
        if !mapping.private {
            Self::Shared
        } else if mapping.is_anonymous() && !mapping.is_anonymous_hugetlb() {
            Self::Anonymous
        } else {
            Self::Private
        }
    }
}

/// The recorded state of a block.
#[derive(Debug)]
struct BlockState {
    parts: Vec<Part>,
    /// Pages that the destination may have with content other than zeros.
    held: PageBitmap,
    /// In [`Kind::Private`] parts: pages that belonged to the process at the last look, and not to the file.
    own: PageBitmap,
}

impl WriteProtectLog {
    /// The features that a [given userfaultfd](Self::of_process) must have.
    pub const FEATURES: u64 = WP_ASYNC | WP_UNPOPULATED;

    /// Makes a log for the RAM blocks at these addresses of this process, mapped from `start` to `stop` and not
    /// remapped meanwhile. Ranges are of whole pages, for hugetlb of whole huge pages.
    pub fn new(blocks: Vec<Range<usize>>) -> Result<Self, DirtyLogError> {
        let blocks = blocks.into_iter().map(|addresses| MappedBlock {
            pages: (addresses.len() / PAGE_SIZE) as u64,
            parts: vec![MappedPart { addresses, first_page: 0 }],
        });
        Self::of(Memory::Own, blocks.collect())
    }

    /// Returns the log of this process's memory with a userfaultfd of this process, which `start` would open otherwise.
    /// Opens now what `start` would open of `/proc`, for a process that will not be able to open files.
    ///
    /// A userfaultfd for faults of user space only (`UFFD_USER_MODE_ONLY`) is enough. Its handshake is made here, unless
    /// it was made before with [`Self::FEATURES`] and protection of shared memory. The log keeps it from `stop` to the
    /// next `start`.
    ///
    /// # Errors
    /// [`UserfaultError`] if the descriptor is no userfaultfd or the kernel is too old; a file of `/proc` cannot be
    /// opened; or the log was started already.
    ///
    /// # Panics
    /// If the log is of another process.
    pub fn with_userfault(mut self, userfault: impl Into<OwnedFd>) -> Result<Self, DirtyLogError> {
        assert!(!matches!(self.memory, Memory::OfProcess { .. }), "a log of another process has a userfaultfd");
        if self.started.is_some() {
            return Err(DirtyLogError::AlreadyStarted);
        }
        let userfault = Arc::new(Userfault::from_descriptor(userfault.into(), OWN_FEATURES)?);
        let files = OwnFiles::open().map_err(DirtyLogError::system("open /proc/self/maps and pagemap"))?;
        self.memory = Memory::Opened { files, userfault };
        Ok(self)
    }

    /// Makes a log for memory of another process, mapped there from `start` to `stop` and not remapped meanwhile.
    ///
    /// `userfault` was made in that process and has [`Self::FEATURES`] ([`Userfault::from_descriptor`]). A userfaultfd
    /// for faults of user space only is enough, since the kernel resolves all faults by itself. Its earlier
    /// registrations in these ranges end with `start`: a range that was registered for missing pages too would make
    /// threads of that process wait for pages that are never placed. This process needs the right to trace the other
    /// one (`/proc/PID/pagemap`, ptrace(2)).
    ///
    /// The log keeps the descriptor from `stop` to the next `start`. When the log is dropped, or this process dies,
    /// nothing remains in the other process, provided that no other copy of the descriptor is open.
    ///
    /// # Errors
    /// The parts overlap in addresses or do not fit their blocks, or the userfaultfd lacks a feature. `start`,
    /// `collect` and `stop` report [`DirtyLogError::Gone`] and [`DirtyLogError::NotWatched`]; `stop` succeeds when the
    /// process has ended.
    pub fn of_process(
        process: Arc<TargetProcess>,
        userfault: Userfault,
        blocks: Vec<MappedBlock>,
    ) -> Result<Self, DirtyLogError> {
        if userfault.features() & Self::FEATURES != Self::FEATURES {
            let problem = "it was opened without WP_ASYNC and WP_UNPOPULATED, which a dirty log needs";
            return Err(UserfaultError::Given(problem.to_owned()).into());
        }
        Self::of(Memory::OfProcess { process, userfault: Arc::new(userfault) }, blocks)
    }

    /// Checks whether the log could be started, and leaves the memory unchanged.
    ///
    /// # Errors
    /// Those of [`DirtyLog::start`]: the kernel is too old, part of the memory is watched by another userfaultfd or cannot be watched, the
    /// process has ended.
    pub fn check(&self) -> Result<(), DirtyLogError> {
        if self.started.is_some() {
            return Err(DirtyLogError::AlreadyStarted);
        }
        let userfault = self.userfault()?;
        self.scanner(self.look_up()?.0)?;
        let ranges = self.blocks.iter().flat_map(|block| &block.parts).map(|part| part.addresses.clone());
        for range in ranges {
            let watched = userfault.register_write_protect(range.clone());
            watched.and_then(|()| userfault.unregister(range)).map_err(|error| self.explain(error.into()))?;
        }
        Ok(())
    }

    fn scanner(&self, page_map: File) -> Result<Scanner, DirtyLogError> {
        let mut scanner = Scanner::new(page_map);
        match scanner.scan(0..0, Query::default()) {
            Ok(_) => Ok(scanner),
            Err(_) => Err(DirtyLogError::Missing {
                what: "PAGEMAP_SCAN",
                instead: match self.memory {
                    Memory::Own | Memory::Opened { .. } => "it needs Linux 6.7 or newer; use a KVM dirty log",
                    Memory::OfProcess { .. } => "it needs Linux 6.7 or newer; use the migration of the monitor itself",
                },
            }),
        }
    }

    fn userfault(&self) -> Result<Arc<Userfault>, DirtyLogError> {
        match &self.memory {
            // The kernel resolves all faults, so faults of user space are enough, and need no privilege.
            Memory::Own => Ok(Arc::new(Userfault::open(Faults::OfUserSpace, OWN_FEATURES)?)),
            Memory::Opened { userfault, .. } | Memory::OfProcess { userfault, .. } => Ok(Arc::clone(userfault)),
        }
    }

    fn of(memory: Memory, blocks: Vec<MappedBlock>) -> Result<Self, DirtyLogError> {
        check_blocks(&blocks)?;
        let pages = blocks.iter().map(|block| block.pages).collect();
        Ok(Self { memory, blocks, pages, started: None })
    }

    fn pid(&self) -> i32 {
        match &self.memory {
            Memory::Own | Memory::Opened { .. } => std::process::id() as i32,
            Memory::OfProcess { process, .. } => process.pid(),
        }
    }

    /// Opens the page map of the process, and reads its mappings.
    fn look_up(&self) -> Result<(File, Mappings), DirtyLogError> {
        let of_process = match &self.memory {
            Memory::Opened { files, .. } => {
                let page_map = files.page_map().map_err(DirtyLogError::system("use /proc/self/pagemap"))?;
                return Ok((page_map, files.mappings().map_err(DirtyLogError::system("read /proc/self/maps"))?));
            }
            Memory::Own => "self".to_owned(),
            Memory::OfProcess { process, .. } => process.pid().to_string(),
        };
        let path = format!("/proc/{of_process}/pagemap");
        let page_map = File::open(&path);
        let page_map = page_map.map_err(DirtyLogError::system(format!("open {path} (who may trace the process may)")));
        let mappings = match &self.memory {
            Memory::Own | Memory::Opened { .. } => Mappings::own(),
            Memory::OfProcess { process, .. } => Mappings::of_process(process.pid()),
        };
        let mappings = mappings.map_err(DirtyLogError::system(format!("read /proc/{of_process}/maps")));
        // Before the results are used: if the process has ended, that is the reason for missing entries, and data of
        // the next process with its id is invalid.
        if let Memory::OfProcess { process, .. } = &self.memory {
            check_alive(process)?;
        }
        Ok((page_map?, mappings?))
    }

    /// Registers and protects all parts; returns the initial state of each block. `watched` lists the registered
    /// ranges, also after an error.
    fn watch(
        &self,
        scanner: &mut Scanner,
        userfault: &Userfault,
        mappings: &Mappings,
        watched: &mut Vec<Range<usize>>,
    ) -> Result<Vec<BlockState>, DirtyLogError> {
        let pid = self.pid();
        let mut blocks = Vec::new();
        for (block, mapped) in self.blocks.iter().enumerate() {
            let mut parts = Vec::new();
            for part in &mapped.parts {
                let range = part.addresses.clone();
                let cut = parts_of(pid, part, mappings);
                parts.extend(cut.ok_or_else(|| DirtyLogError::Unmapped { block, range: range.clone(), pid })?);
                userfault.register_write_protect(range.clone())?;
                watched.push(range.clone());
                if !matches!(self.memory, Memory::Own) {
                    // No other userfaultfd watches the range, or registering it would have failed. An earlier
                    // registration of this one persists through the new one.
                    userfault.unregister(range.clone())?;
                    userfault.register_write_protect(range)?;
                }
            }
            let (mut held, mut own) = (PageBitmap::new(mapped.pages), PageBitmap::new(mapped.pages));
            for part in &parts {
                part.protect(scanner, userfault)?;
                // A page populated from now on is found written, unless it is freed first: the caller reports such
                // pages (`found_populated`).
                if part.kind != Kind::Shared {
                    part.find(scanner, Query::POPULATED, |pages| {
                        held.set(pages);
                        Ok(())
                    })?;
                }
                part.find_own(scanner, &mut own)?;
            }
            blocks.push(BlockState { parts, held, own });
        }
        Ok(blocks)
    }

    /// Returns the error, or its cause if the process has ended.
    fn explain(&self, error: DirtyLogError) -> DirtyLogError {
        match &self.memory {
            Memory::OfProcess { process, userfault } if userfault.is_orphaned() => {
                DirtyLogError::Gone { pid: process.pid() }
            }
            _ => error,
        }
    }
}

impl DirtyLog for WriteProtectLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        if self.started.is_some() {
            return Err(DirtyLogError::AlreadyStarted);
        }
        let (page_map, mappings) = self.look_up()?;
        let mut scanner = self.scanner(page_map)?;
        let userfault = self.userfault()?;
        let mut watched = Vec::new();
        match self.watch(&mut scanner, &userfault, &mappings, &mut watched) {
            Ok(blocks) => {
                let scratch = PageBitmap::new(self.pages.iter().copied().max().unwrap_or(0));
                self.started = Some(Started { userfault, scanner, blocks, scratch });
            }
            Err(error) => {
                // The first error is the one to report.
                let _ = release(&userfault, watched);
                return Err(self.explain(error));
            }
        }
        Ok(())
    }

    fn found_populated(&mut self, block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        check_collect(self.started.is_some(), &self.pages, block, populated)?;
        let Started { blocks, .. } = self.started.as_mut().ok_or(DirtyLogError::NotStarted)?;
        populated.for_each_run(|run| blocks[block].held.set(run));
        Ok(())
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        check_collect(self.started.is_some(), &self.pages, block, dirty)?;
        let Started { userfault, scanner, blocks, scratch } = self.started.as_mut().ok_or(DirtyLogError::NotStarted)?;
        let state = &mut blocks[block];
        if let Err(error) = state.collect(scanner, userfault, scratch, dirty) {
            return Err(self.explain(error));
        }
        if let (Memory::OfProcess { process, .. }, Some(part)) = (&self.memory, state.parts.first()) {
            // The scan of a vanished address space finds no written page and no error. Reading its page map reveals it:
            // 0 bytes are read (`pagemap_read` in `fs/proc/task_mmu.c`).
            let mut entry = [0; 8];
            let at = (part.addresses.start / PAGE_SIZE * entry.len()) as u64;
            let read = scanner.file().read_at(&mut entry, at);
            if read.map_err(DirtyLogError::system(format!("read /proc/{}/pagemap", process.pid())))? == 0 {
                return Err(DirtyLogError::Gone { pid: process.pid() });
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        let Some(Started { userfault, .. }) = self.started.take() else { return Ok(()) };
        let parts = self.blocks.iter().flat_map(|block| &block.parts);
        Ok(release(&userfault, parts.map(|part| part.addresses.clone()))?)
    }
}

impl Drop for WriteProtectLog {
    fn drop(&mut self) {
        // A given descriptor may have other copies, and then closing this one ends nothing.
        let _ = self.stop();
    }
}

/// Ends protections and registrations of all ranges, even if one fails.
fn release(userfault: &Userfault, ranges: impl IntoIterator<Item = Range<usize>>) -> Result<(), UserfaultError> {
    let mut result = Ok(());
    for range in ranges {
        // Unprotects first: older kernels leave protections behind when only the registration ends.
        let lifted = userfault.write_protect(range.clone(), false);
        let ended = userfault.unregister(range);
        result = result.and(lifted).and(ended);
    }
    // They ended with the address space.
    if result.is_err() && userfault.is_orphaned() {
        return Ok(());
    }
    result
}

fn check_alive(process: &TargetProcess) -> Result<(), DirtyLogError> {
    process.check_alive().map_err(|error| match error {
        PlaceError::Gone { pid } => DirtyLogError::Gone { pid },
        error => DirtyLogError::system(format!("look at process {}", process.pid()))(io::Error::other(error)),
    })
}

/// Checks that parts are whole pages within their blocks, and that no two overlap in addresses: a write there would be
/// named for the first of them only.
fn check_blocks(blocks: &[MappedBlock]) -> Result<(), DirtyLogError> {
    let mut all = Vec::new();
    for (block, mapped) in blocks.iter().enumerate() {
        for part in &mapped.parts {
            let range = part.addresses.clone();
            let whole = range.start.is_multiple_of(PAGE_SIZE) && range.end.is_multiple_of(PAGE_SIZE);
            if range.is_empty() || !whole {
                return Err(DirtyLogError::Unaligned { block, range });
            }
            if part.first_page.checked_add(part.pages()).is_none_or(|end| end > mapped.pages) {
                let (first, pages) = (part.first_page, part.pages());
                let problem = format!("is {pages} pages from page {first}, but the block has {}", mapped.pages);
                return Err(DirtyLogError::Part { block, range, problem });
            }
            all.push((range, block));
        }
    }
    all.sort_unstable_by_key(|(range, _)| range.start);
    for pair in all.windows(2) {
        let [(before, _), (range, block)] = pair else { continue };
        if range.start < before.end {
            let problem = "lies where another part of RAM lies; give each address once".to_owned();
            return Err(DirtyLogError::Part { block: *block, range: range.clone(), problem });
        }
    }
    Ok(())
}

impl BlockState {
    fn collect(
        &mut self,
        scanner: &mut Scanner,
        userfault: &Userfault,
        scratch: &mut PageBitmap,
        dirty: &mut PageBitmap,
    ) -> Result<(), DirtyLogError> {
        let Self { parts, held, own } = self;
        for part in &*parts {
            part.collect(scanner, userfault, |pages| {
                held.set(pages.clone());
                dirty.set(pages);
            })?;
            part.find_given_back(scanner, userfault, held, dirty)?;
        }
        for part in parts.iter().filter(|part| part.kind == Kind::Private) {
            // The kernel leaves the protection in place of a freed page, but not the page.
            let pages = part.pages_of(&part.addresses);
            scratch.clear(pages.clone());
            part.find_own(scanner, scratch)?;
            own.for_each_run_in(pages.clone(), |run| {
                let mut rest = run;
                while let Some(gone) = next_gap(scratch, rest.clone()) {
                    rest.start = gone.end;
                    dirty.set(gone);
                }
            });
            own.clear(pages.clone());
            scratch.for_each_run_in(pages, |run| own.set(run));
        }
        Ok(())
    }
}

impl Part {
    /// Protects all pages; of shared memory also absent ones. Pages that appear later in private memory are
    /// unprotected, and so count as written.
    fn protect(&self, scanner: &mut Scanner, userfault: &Userfault) -> Result<(), DirtyLogError> {
        let all = self.addresses.clone();
        // The scan skips very large pages, see `collect`.
        if self.kind == Kind::Shared
            || scanner.apply(all.clone(), self.query()).map_err(self.scan_failed(&all))? < all.end
        {
            userfault.write_protect(all.clone(), true)?;
        }
        // No call so far fails if the userfaultfd belongs to another process with memory at the same addresses.
        let watched = Query { flags: PM_SCAN_CHECK_WPASYNC, all_of: PAGE_IS_WRITTEN, ..Query::default() };
        scanner.apply(all.start..all.start + PAGE_SIZE, watched).map_err(self.scan_failed(&all))?;
        Ok(())
    }

    /// Calls `written` for each run of pages of the block that were written; all are protected again when this returns.
    fn collect(
        &self,
        scanner: &mut Scanner,
        userfault: &Userfault,
        mut written: impl FnMut(Range<u64>),
    ) -> Result<(), DirtyLogError> {
        let end = self.addresses.end;
        let mut at = self.addresses.start;
        let mut query = self.query();
        while at < end {
            let (regions, walked_to) = scanner.scan(at..end, query).map_err(self.scan_failed(&(at..end)))?;
            for region in regions {
                written(self.pages_of(&(region.start as usize..region.end as usize)));
            }
            let protects = query.flags & PM_SCAN_WP_MATCHING != 0;
            if !protects {
                for region in regions {
                    userfault.write_protect(region.start as usize..region.end as usize, true)?;
                }
            }
            let ended_early = walked_to < end && regions.len() < Scanner::REGIONS;
            if protects && ended_early {
                // The scan does not protect hugetlb pages larger than 2 MiB: it skips them and returns where the last
                // skipped one begins. Find and protect in two steps then. A page written in between is in this result,
                // is protected before this returns and is read later: nothing is lost.
                query.flags &= !PM_SCAN_WP_MATCHING;
            } else if walked_to <= at {
                return Err(self.scan_failed(&(at..end))(io::Error::other("PAGEMAP_SCAN made no progress")));
            } else {
                at = walked_to;
            }
        }
        Ok(())
    }

    /// Adds to `dirty` the held pages that were freed and not touched again, each once: they have no page table entry,
    /// and get a mark instead, which ends with the next write or when the page is freed again.
    ///
    /// In shared memory every page had a mark at the start: a page without an entry was written before it was freed.
    /// `collect` has named it where the kernel counts a missing entry as a write; it does not for hugetlb, nor, before
    /// a fix of 2026, for a missing page table.
    fn find_given_back(
        &self,
        scanner: &mut Scanner,
        userfault: &Userfault,
        held: &PageBitmap,
        dirty: &mut PageBitmap,
    ) -> Result<(), DirtyLogError> {
        let mut mark = |pages: Range<u64>| {
            // A page that is written before it gets the mark is protected although written; it is named and read all
            // the same.
            userfault.write_protect(self.addresses_of(&pages), true)?;
            dirty.set(pages);
            Ok::<(), DirtyLogError>(())
        };
        self.find(scanner, Query::ABSENT, |pages| {
            if self.kind == Kind::Shared {
                return mark(pages);
            }
            let mut outcome = Ok(());
            held.for_each_run_in(pages, |run| {
                if outcome.is_ok() {
                    outcome = mark(run);
                }
            });
            outcome
        })
    }

    /// Adds to `own` the pages of a private mapping that belong to the process.
    fn find_own(&self, scanner: &mut Scanner, own: &mut PageBitmap) -> Result<(), DirtyLogError> {
        if self.kind != Kind::Private {
            return Ok(());
        }
        self.find(scanner, Query::OWN, |pages| {
            own.set(pages);
            Ok(())
        })
    }

    /// Calls `found` for each run of pages of the block that the query finds.
    fn find(
        &self,
        scanner: &mut Scanner,
        query: Query,
        mut found: impl FnMut(Range<u64>) -> Result<(), DirtyLogError>,
    ) -> Result<(), DirtyLogError> {
        let failed = |rest, error| self.scan_failed(&rest)(error);
        scanner.each(self.addresses.clone(), query, failed, |addresses| found(self.pages_of(&addresses)))
    }

    fn pages_of(&self, addresses: &Range<usize>) -> Range<u64> {
        let page = |address: usize| self.first_page + ((address - self.addresses.start) / PAGE_SIZE) as u64;
        page(addresses.start)..page(addresses.end)
    }

    fn addresses_of(&self, pages: &Range<u64>) -> Range<usize> {
        let address = |page: u64| self.addresses.start + (page - self.first_page) as usize * PAGE_SIZE;
        address(pages.start)..address(pages.end)
    }

    /// For `map_err`.
    fn scan_failed(&self, range: &Range<usize>) -> impl FnOnce(io::Error) -> DirtyLogError + use<> {
        let (pid, range) = (self.pid, range.clone());
        move |error| match error.raw_os_error() {
            Some(libc::EPERM) => DirtyLogError::NotWatched { pid, range },
            Some(libc::ESRCH) => DirtyLogError::Gone { pid },
            _ => DirtyLogError::system(format!(
                "scan addresses {:#x}..{:#x} of process {pid} for written pages",
                range.start, range.end
            ))(error),
        }
    }

    /// Finds written pages, reports and protects them.
    ///
    /// Kernels differ in whether a page without a page table entry counts as written: always where exactly
    /// `PAGE_IS_WRITTEN` is requested and returned, otherwise with newer kernels only (`pagemap_scan_pmd_entry` and
    /// `pagemap_page_category` in `fs/proc/task_mmu.c`; "matching the pte_none case" in a fix of 2026). So both queries
    /// are written such that all kernels agree.
    /// In shared memory it counts, since reclaim drops the entry of a written page without a trace, and all unwritten
    /// pages were marked at the start. In private memory it does not, since reclaim leaves a swap entry there; a page
    /// without an entry was never used, or was freed (`find_given_back`).
    fn query(&self) -> Query {
        let flags = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC;
        let any_of = if self.kind == Kind::Shared { 0 } else { PAGE_IS_PRESENT | PAGE_IS_SWAPPED };
        Query { flags, all_of: PAGE_IS_WRITTEN, any_of, returned: PAGE_IS_WRITTEN, ..Query::default() }
    }
}

/// Splits a part by the mappings of its process; returns none where a part of it is not mapped.
fn parts_of(pid: i32, part: &MappedPart, mappings: &Mappings) -> Option<Vec<Part>> {
    let mut parts = Vec::new();
    let range = &part.addresses;
    let mapped = mappings.check(range.clone(), |mapping| {
        let addresses = mapping.start.max(range.start)..mapping.end.min(range.end);
        let first_page = part.first_page + ((addresses.start - range.start) / PAGE_SIZE) as u64;
        parts.push(Part { pid, addresses, first_page, kind: Kind::of(mapping) });
        true
    });
    mapped.ok().map(|()| parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "1000-3000 rw-p 00000000 00:00 0 \n\
                        3000-4000 rw-s 00000000 00:01 7 /memfd:ram (deleted)\n\
                        5000-6000 r--p 00000000 08:01 9 /usr/lib/x\n";

    #[test]
    fn a_part_is_split_by_mappings_and_one_with_a_gap_is_not_mapped() {
        let mappings = Mappings::from(MAPS.to_owned());
        let cut = |addresses: Range<usize>| {
            let parts = parts_of(1, &MappedPart { addresses, first_page: 7 }, &mappings)?;
            Some(parts.into_iter().map(|part| (part.addresses, part.first_page, part.kind)).collect::<Vec<_>>())
        };
        let two = vec![(0x2000..0x3000, 7, Kind::Anonymous), (0x3000..0x4000, 8, Kind::Shared)];
        assert_eq!(cut(0x2000..0x4000), Some(two));
        assert_eq!(cut(0x1000..0x2000), Some(vec![(0x1000..0x2000, 7, Kind::Anonymous)]));
        assert_eq!(cut(0x5000..0x6000), Some(vec![(0x5000..0x6000, 7, Kind::Private)]));
        for unmapped in [0x3000..0x6000, 0x5000..0x7000, 0x0..0x2000, 0x4000..0x5000, 0x8000..0x9000] {
            assert_eq!(cut(unmapped), None);
        }
    }

    #[test]
    fn parts_are_within_their_blocks_and_at_addresses_of_their_own() {
        let part = |addresses: Range<usize>, first_page| MappedPart { addresses, first_page };
        let check = |parts: Vec<Vec<MappedPart>>| {
            check_blocks(&parts.into_iter().map(|parts| MappedBlock { pages: 4, parts }).collect::<Vec<_>>())
        };
        // The same page at two addresses, and a block that the process does not map.
        check(vec![vec![part(0x1000..0x3000, 2), part(0x5000..0x6000, 3)], vec![], vec![part(0x3000..0x4000, 0)]])
            .unwrap();
        let error = check(vec![vec![part(0x1000..0x3000, 3)]]).unwrap_err().to_string();
        assert!(error.contains("0x1000..0x3000 is 2 pages from page 3, but the block has 4"), "{error}");
        assert!(matches!(check(vec![vec![part(0x1000..0x3000, u64::MAX)]]), Err(DirtyLogError::Part { block: 0, .. })));
        let error = check(vec![vec![part(0x4000..0x6000, 0)], vec![part(0x3000..0x5000, 0)]]).unwrap_err().to_string();
        assert!(error.contains("RAM block 0 at addresses 0x4000..0x6000 lies where another part"), "{error}");
        assert!(matches!(check(vec![vec![part(0x1000..0x1800, 0)]]), Err(DirtyLogError::Unaligned { block: 0, .. })));
    }
}
