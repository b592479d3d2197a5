//! The dirty log of any memory of this process: asynchronous userfaultfd write protection and `PAGEMAP_SCAN` (Linux 6.7).
//!
//! Pages are write-protected; a write lifts the protection of its page, in the kernel, without waiting for anyone; the
//! scan finds the unprotected pages and protects them again in one step under the page table lock. So no write is between
//! two answers. Works on anonymous memory, transparent huge pages, shared memory (memfd, tmpfs) and hugetlb, and needs no
//! privilege. KVM follows the page tables of the process, so vCPUs on this memory are seen too.
//!
//! **Not seen**: writes through another mapping or another process, by system calls on the file of shared memory, and by
//! devices or system calls into memory they had pinned before (VFIO, `O_DIRECT` under way). Hand those in.
//!
//! **What may be named without being written**:
//! * The whole of a huge page, written in any part: always on hugetlb; on transparent huge pages when the huge page is
//!   new (a protected one is split at the first write, and then counts by 4 KiB).
//! * A page of private memory that appeared by being read, or that was discarded (`MADV_DONTNEED`) and touched again: it
//!   reads as zero now. A discarded page that nobody touches is not named.
//! * A page of shared memory that was discarded.
//!
//! **Cost besides faults**: private memory that was never touched costs nothing. Shared memory gets page tables for all of
//! it, 2 MiB per GiB: its pages can lose their page table entries to reclaim, and only where every other page has a mark
//! does a missing entry tell that the page was written.

use super::{DirtyLog, DirtyLogError, check_collect};
use crate::PAGE_SIZE;
use crate::bitmap::PageBitmap;
use crate::pagemap_scan::{
    PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, PageRegion, Query,
    Scanner,
};
use crate::userfault::{Faults, Userfault, WP_ASYNC, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED};
use std::fs::{self, File};
use std::io;
use std::ops::Range;

/// The dirty log of this process's memory. See the [module](self).
#[derive(Debug)]
pub struct WriteProtectLog {
    blocks: Vec<Range<usize>>,
    pages: Vec<u64>,
    started: Option<Started>,
}

#[derive(Debug)]
struct Started {
    userfault: Userfault,
    scanner: Scanner,
    /// Of each block.
    parts: Vec<Vec<Part>>,
}

/// A part of a block within one mapping: all of it has one kind of backing.
#[derive(Debug)]
struct Part {
    addresses: Range<usize>,
    shared: bool,
}

impl WriteProtectLog {
    /// For the RAM blocks at these addresses, mapped from `start` to `stop` and not remapped meanwhile. Ranges are of
    /// whole pages, for hugetlb of whole huge pages.
    pub fn new(blocks: Vec<Range<usize>>) -> Result<Self, DirtyLogError> {
        for (block, range) in blocks.iter().enumerate() {
            let whole = range.start.is_multiple_of(PAGE_SIZE) && range.end.is_multiple_of(PAGE_SIZE);
            if range.is_empty() || !whole {
                return Err(DirtyLogError::Unaligned { block, range: range.clone() });
            }
        }
        let pages = blocks.iter().map(|range| (range.len() / PAGE_SIZE) as u64).collect();
        Ok(Self { blocks, pages, started: None })
    }
}

impl DirtyLog for WriteProtectLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        if self.started.is_some() {
            return Err(DirtyLogError::AlreadyStarted);
        }
        let page_map = File::open("/proc/self/pagemap").map_err(DirtyLogError::system("open /proc/self/pagemap"))?;
        let mut scanner = Scanner::new(page_map);
        if scanner.scan(0..0, Query::default()).is_err() {
            return Err(DirtyLogError::Missing {
                what: "PAGEMAP_SCAN",
                instead: "it needs Linux 6.7 or newer; use a KVM dirty log",
            });
        }
        // All faults are answered by the kernel, so those of user space are enough, and need no privilege. When dropped
        // on an error below, it takes its registrations and protections with it.
        let userfault = Userfault::open(Faults::OfUserSpace, WP_ASYNC | WP_UNPOPULATED | WP_HUGETLBFS_SHMEM)?;
        let maps = fs::read_to_string("/proc/self/maps").map_err(DirtyLogError::system("read /proc/self/maps"))?;
        let mut parts = Vec::new();
        for (block, range) in self.blocks.iter().enumerate() {
            let of_block =
                parts_of(range, &maps).ok_or_else(|| DirtyLogError::Unmapped { block, range: range.clone() })?;
            userfault.register_write_protect(range.clone())?;
            for part in &of_block {
                part.protect(&mut scanner, &userfault)?;
            }
            parts.push(of_block);
        }
        self.started = Some(Started { userfault, scanner, parts });
        Ok(())
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        check_collect(self.started.is_some(), &self.pages, block, dirty)?;
        let Started { userfault, scanner, parts } = self.started.as_mut().ok_or(DirtyLogError::NotStarted)?;
        let base = self.blocks[block].start;
        for part in &parts[block] {
            part.collect(scanner, userfault, |region| {
                let page = |address: u64| (address as usize - base) as u64 / PAGE_SIZE as u64;
                dirty.set(page(region.start)..page(region.end));
            })?;
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        let Some(started) = self.started.take() else { return Ok(()) };
        let mut result = Ok(());
        for range in &self.blocks {
            // Unprotected first: older kernels leave protections behind when only the registration ends.
            let lifted = started.userfault.write_protect(range.clone(), false);
            let ended = started.userfault.unregister(range.clone());
            result = result.and(lifted).and(ended);
        }
        Ok(result?)
    }
}

impl Part {
    /// Protects all there is: of shared memory also what is not there yet. What appears later in private memory appears
    /// unprotected, and so as written.
    fn protect(&self, scanner: &mut Scanner, userfault: &Userfault) -> Result<(), DirtyLogError> {
        let all = self.addresses.clone();
        // Very large pages are left out by the scan, see `collect`.
        if self.shared || scanner.apply(all.clone(), self.query()).map_err(scan_failed(&all))? < all.end {
            userfault.write_protect(all, true)?;
        }
        Ok(())
    }

    /// Calls `written` for each run of pages written, all of them protected again when this returns.
    fn collect(
        &self,
        scanner: &mut Scanner,
        userfault: &Userfault,
        mut written: impl FnMut(&PageRegion),
    ) -> Result<(), DirtyLogError> {
        let end = self.addresses.end;
        let mut at = self.addresses.start;
        let mut query = self.query();
        while at < end {
            let (regions, walked_to) = scanner.scan(at..end, query).map_err(scan_failed(&(at..end)))?;
            for region in regions {
                written(region);
            }
            let protects = query.flags & PM_SCAN_WP_MATCHING != 0;
            if !protects {
                for region in regions {
                    userfault.write_protect(region.start as usize..region.end as usize, true)?;
                }
            }
            let ended_early = walked_to < end && regions.len() < Scanner::REGIONS;
            if protects && ended_early {
                // The scan does not protect hugetlb pages larger than 2 MiB: it leaves them out and says where the last
                // one left out begins. Find and protect in two steps then. A page written in between is in this answer,
                // is protected before this returns and is read later: nothing is lost.
                query.flags &= !PM_SCAN_WP_MATCHING;
            } else if walked_to <= at {
                return Err(scan_failed(&(at..end))(io::Error::other("PAGEMAP_SCAN made no progress")));
            } else {
                at = walked_to;
            }
        }
        Ok(())
    }

    /// Finds written pages, tells and protects them.
    ///
    /// Whether a page without a page table entry counts as written differs: always where exactly `PAGE_IS_WRITTEN` is
    /// asked for and returned, else with newer kernels only (`pagemap_scan_pmd_entry` and `pagemap_page_category` in
    /// `fs/proc/task_mmu.c`; "matching the pte_none case" in a fix of 2026). So both questions are put such that all
    /// kernels agree.
    /// Shared memory: it counts, since reclaim drops the entry of a written page without a trace. All that was not written
    /// was marked at the start. Private memory: it does not, since reclaim leaves a swap entry there; what is missing
    /// was never used, or was discarded.
    fn query(&self) -> Query {
        let flags = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC;
        let any_of = if self.shared { 0 } else { PAGE_IS_PRESENT | PAGE_IS_SWAPPED };
        Query { flags, all_of: PAGE_IS_WRITTEN, any_of, returned: PAGE_IS_WRITTEN, ..Query::default() }
    }
}

/// Cuts `range` by the mappings of `/proc/self/maps`; none where part of it is not mapped.
fn parts_of(range: &Range<usize>, maps: &str) -> Option<Vec<Part>> {
    let mut parts = Vec::new();
    let mut at = range.start;
    // Lines are sorted: `start-end rwxp offset device inode path` (proc_pid_maps(5)).
    for line in maps.lines() {
        let (start, rest) = line.split_once('-')?;
        let (end, rest) = rest.split_once(' ')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?.min(range.end);
        if end <= at {
            continue;
        }
        if start > at {
            return None;
        }
        parts.push(Part { addresses: at..end, shared: rest.as_bytes().get(3) == Some(&b's') });
        at = end;
        if at == range.end {
            return Some(parts);
        }
    }
    None
}

/// For `map_err`.
fn scan_failed(range: &Range<usize>) -> impl FnOnce(io::Error) -> DirtyLogError + use<> {
    DirtyLogError::system(format!("scan addresses {:#x}..{:#x} for written pages", range.start, range.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "1000-3000 rw-p 00000000 00:00 0 \n\
                        3000-4000 rw-s 00000000 00:01 7 /memfd:ram (deleted)\n\
                        5000-6000 r--p 00000000 08:01 9 /usr/lib/x\n";

    #[test]
    fn a_block_is_cut_by_mappings_and_one_with_a_gap_is_not_mapped() {
        let cut = |range: Range<usize>| {
            let parts = parts_of(&range, MAPS)?;
            Some(parts.into_iter().map(|part| (part.addresses, part.shared)).collect::<Vec<_>>())
        };
        assert_eq!(cut(0x2000..0x4000), Some(vec![(0x2000..0x3000, false), (0x3000..0x4000, true)]));
        assert_eq!(cut(0x1000..0x2000), Some(vec![(0x1000..0x2000, false)]));
        for unmapped in [0x3000..0x6000, 0x5000..0x7000, 0x0..0x2000, 0x4000..0x5000, 0x8000..0x9000] {
            assert_eq!(cut(unmapped), None);
        }
    }
}
