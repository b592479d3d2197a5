//! Finds the parts of guest RAM that were ever populated; the rest need not be read at all.
//!
//! Reading a page that was never written would fault it in, at the source, for nothing. There are two kinds of memory,
//! with a method each:
//!
//! * **Private anonymous memory**: by the page tables. A page that is neither present nor swapped was never written.
//!   `PAGEMAP_SCAN` (Linux 6.7, `Documentation/admin-guide/mm/pagemap.rst`) returns ranges; before that,
//!   `/proc/PID/pagemap` returns eight bytes per page.
//! * **Shared files** (memfd, tmpfs, hugetlbfs): by the *file*, through `SEEK_DATA` and `SEEK_HOLE`. Never by the page
//!   tables: another process may have written a page that is not in ours.
//!
//! The result holds for the time of the call. Dirty tracking must be on before, so that pages written meanwhile are
//! sent all the same.

use crate::PAGE_SIZE;
use crate::pagemap_scan::{Query, Scanner};
use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use thiserror::Error;

/// Why holes could not be searched. Send everything instead, or report the cause.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HoleError {
    /// The page map cannot be opened.
    #[error("cannot open {path}: {source}; it needs the same user, or CAP_SYS_PTRACE for another process")]
    Open {
        /// The path.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// The page map cannot be read.
    #[error("cannot read the page map of addresses {:#x}..{:#x}: {source}", .range.start, .range.end)]
    PageMap {
        /// The addresses of the search.
        range: Range<usize>,
        /// The system's error.
        source: io::Error,
    },
    /// The range is not made of whole pages.
    #[error("addresses {:#x}..{:#x} are not a range of whole pages", .0.start, .0.end)]
    Unaligned(Range<usize>),
    /// The file does not report its holes.
    #[error("cannot search bytes {}..{} of a RAM file for holes: {source}", .range.start, .range.end)]
    Seek {
        /// The bytes of the search.
        range: Range<u64>,
        /// The system's error.
        source: io::Error,
    },
}

/// The page map of a process: finds the populated parts of its private anonymous memory.
#[derive(Debug)]
pub struct PageMap {
    scanner: Scanner,
    method: PageMapMethod,
    entries: Box<[u8; ENTRIES * ENTRY]>,
}

/// The method of reading the page map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageMapMethod {
    /// By ranges: `PAGEMAP_SCAN`, Linux 6.7 and newer.
    Scan,
    /// Page by page: reading `/proc/PID/pagemap`. Pages that were only ever read (the zero page) count as populated, as
    /// an unprivileged reader cannot distinguish them.
    Read,
}

impl PageMap {
    /// Opens the page map of this process.
    pub fn own() -> Result<Self, HoleError> {
        Self::open("/proc/self/pagemap".to_owned())
    }

    /// Opens the page map of process `pid`. Needs the right to trace it.
    pub fn of_process(pid: u32) -> Result<Self, HoleError> {
        Self::open(format!("/proc/{pid}/pagemap"))
    }

    fn open(path: String) -> Result<Self, HoleError> {
        File::open(&path).map(Self::of_file).map_err(|source| HoleError::Open { path, source })
    }

    /// Wraps a page map that was opened before.
    pub(crate) fn of_file(file: File) -> Self {
        let mut map =
            Self { scanner: Scanner::new(file), method: PageMapMethod::Scan, entries: Box::new([0; ENTRIES * ENTRY]) };
        // Scanning an empty range tests only whether the operation exists: older kernels return ENOTTY.
        if map.scanner.scan(0..0, Query::POPULATED).is_err() {
            map.method = PageMapMethod::Read;
        }
        map
    }

    /// Returns the method in use.
    pub fn method(&self) -> PageMapMethod {
        self.method
    }

    /// Uses the method that every kernel supports.
    pub fn use_read(&mut self) {
        self.method = PageMapMethod::Read;
    }

    /// Calls `populated` for each part of the addresses `range` that was ever populated, in ascending order, whole
    /// pages. Adjacent parts may come as several calls.
    ///
    /// Only for private anonymous mappings; parts of `range` that are not mapped count as never populated.
    pub fn populated(&mut self, range: Range<usize>, mut populated: impl FnMut(Range<usize>)) -> Result<(), HoleError> {
        if range.start > range.end || !range.start.is_multiple_of(PAGE_SIZE) || !range.end.is_multiple_of(PAGE_SIZE) {
            return Err(HoleError::Unaligned(range));
        }
        let mut at = range.start;
        while at < range.end {
            let rest = at..range.end;
            at = match self.method {
                PageMapMethod::Scan => self.scan(rest, &mut populated),
                PageMapMethod::Read => self.read(rest, &mut populated),
            }
            .map_err(|source| HoleError::PageMap { range: range.clone(), source })?;
        }
        Ok(())
    }

    /// Makes one step by `PAGEMAP_SCAN`; returns where to continue.
    fn scan(&mut self, range: Range<usize>, populated: &mut impl FnMut(Range<usize>)) -> io::Result<usize> {
        let start = range.start;
        let (regions, walked_to) = self.scanner.scan(range, Query::POPULATED)?;
        for region in regions {
            populated(region.start as usize..region.end as usize);
        }
        if walked_to <= start {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        Ok(walked_to)
    }

    /// Makes one step by reading entries; returns where to continue.
    fn read(&mut self, range: Range<usize>, populated: &mut impl FnMut(Range<usize>)) -> io::Result<usize> {
        let pages = (range.len() / PAGE_SIZE).min(ENTRIES);
        let entries = &mut self.entries[..pages * ENTRY];
        self.scanner.file().read_exact_at(entries, (range.start / PAGE_SIZE * ENTRY) as u64)?;
        let mut run = range.start..range.start;
        for entry in entries.chunks_exact(ENTRY) {
            let entry = u64::from_ne_bytes(entry.try_into().expect("chunks are as long as an entry"));
            if entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 {
                run.end += PAGE_SIZE;
                continue;
            }
            if !run.is_empty() {
                populated(run.clone());
            }
            run = run.end + PAGE_SIZE..run.end + PAGE_SIZE;
        }
        if !run.is_empty() {
            populated(run.clone());
        }
        Ok(range.start + pages * PAGE_SIZE)
    }
}

/// Calls `data` for each part of the bytes `range` of a shared RAM file that holds data, in ascending order.
///
/// Works on the file, not on a mapping. Moves the descriptor's file offset, which mappings do not use. A file system
/// without holes reports that all is data; bytes past the end of the file are a hole.
pub fn file_data(file: impl AsFd, range: Range<u64>, mut data: impl FnMut(Range<u64>)) -> Result<(), HoleError> {
    let failed = |source: rustix::io::Errno| HoleError::Seek { range: range.clone(), source: source.into() };
    let mut at = range.start;
    while at < range.end {
        let start = match seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // ENXIO: no data at or after this offset.
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(failed(error)),
        };
        if start >= range.end {
            return Ok(());
        }
        let end = match seek(&file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(range.end),
            // Truncated since: the data is a hole now.
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(failed(error)),
        };
        // A hole punched between the two calls may begin where the data began.
        if end > start {
            data(start..end);
        }
        at = end.max(start + 1);
    }
    Ok(())
}

/// Entries read by one call.
const ENTRIES: usize = 4096;
/// Bytes of an entry of `/proc/PID/pagemap`.
const ENTRY: usize = 8;
/// Entry bits, `Documentation/admin-guide/mm/pagemap.rst`.
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_util::Area;
    use proptest::prelude::*;
    use proptest::test_runner::contextualize_config;

    /// Both methods, or the one that this kernel has.
    fn ways() -> Vec<PageMap> {
        let mut read = PageMap::own().unwrap();
        read.use_read();
        let own = PageMap::own().unwrap();
        if own.method() == PageMapMethod::Scan { vec![own, read] } else { vec![read] }
    }

    /// Page numbers relative to the area.
    fn populated(map: &mut PageMap, area: &Area, pages: Range<usize>) -> Vec<usize> {
        let base = area.ptr().addr();
        let mut all = Vec::new();
        map.populated(base + pages.start * PAGE_SIZE..base + pages.end * PAGE_SIZE, |range| {
            assert!(range.start < range.end && range.start % PAGE_SIZE == 0 && range.end % PAGE_SIZE == 0);
            all.extend((range.start - base) / PAGE_SIZE..(range.end - base) / PAGE_SIZE);
        })
        .unwrap();
        all
    }

    proptest! {
        // A default, which PROPTEST_CASES replaces.
        #![proptest_config(contextualize_config(ProptestConfig::with_cases(40)))]
        #[test]
        fn exactly_the_pages_ever_written_are_found(
            written in proptest::collection::btree_set(0usize..9000, 0..700),
            bounds in (0usize..9000, 0usize..9000),
        ) {
            let area = Area::small_pages(9000 * PAGE_SIZE);
            for page in &written {
                // The byte written is zero: populated means touched, not non-zero.
                area.bytes_mut()[page * PAGE_SIZE] = 0;
            }
            let range = bounds.0.min(bounds.1)..bounds.0.max(bounds.1);
            let expected: Vec<usize> = written.range(range.clone()).copied().collect();
            for mut map in ways() {
                prop_assert_eq!(&populated(&mut map, &area, range.clone()), &expected, "{:?}", map.method());
            }
        }

        #[test]
        fn the_data_of_a_shared_file_is_found_whichever_process_wrote_it(
            written in proptest::collection::btree_set(0u64..2000, 0..200),
            bounds in (0u64..2100, 0u64..2100),
        ) {
            let file = memory_file(2000 * PAGE_SIZE as u64);
            for page in &written {
                file.write_all_at(&[0], page * PAGE_SIZE as u64).unwrap();
            }
            let range = bounds.0.min(bounds.1)..bounds.0.max(bounds.1);
            let mut found = Vec::new();
            file_data(&file, range.start * PAGE_SIZE as u64..range.end * PAGE_SIZE as u64, |bytes| {
                found.extend(bytes.start / PAGE_SIZE as u64..bytes.end / PAGE_SIZE as u64);
            }).unwrap();
            prop_assert_eq!(found, written.range(range).copied().collect::<Vec<_>>());
        }
    }

    fn memory_file(len: u64) -> File {
        let file = File::from(rustix::fs::memfd_create("holes", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn searching_populates_nothing() {
        let area = Area::anonymous(4096 * PAGE_SIZE);
        for mut map in ways() {
            assert!(populated(&mut map, &area, 0..4096).is_empty());
            assert!(populated(&mut map, &area, 0..4096).is_empty());
        }
    }

    #[test]
    fn pages_that_were_only_read_are_holes_to_the_scan() {
        let area = Area::small_pages(64 * PAGE_SIZE);
        // SAFETY: the area is mapped and readable.
        assert!(unsafe { crate::scan::is_zero_raw(area.ptr(), 64 * PAGE_SIZE) });
        area.bytes_mut()[5 * PAGE_SIZE] = 1;
        let mut map = PageMap::own().unwrap();
        if map.method() == PageMapMethod::Scan {
            assert_eq!(populated(&mut map, &area, 0..64), [5]);
        }
        map.use_read();
        assert!(populated(&mut map, &area, 0..64).contains(&5));
    }

    #[test]
    fn a_page_map_opened_by_process_number_is_searched_and_a_missing_process_is_named() {
        let area = Area::small_pages(16 * PAGE_SIZE);
        area.bytes_mut()[3 * PAGE_SIZE] = 1;
        let mut map = PageMap::of_process(std::process::id()).unwrap();
        assert_eq!(populated(&mut map, &area, 0..16), [3]);
        let error = PageMap::of_process(u32::MAX).unwrap_err();
        assert!(error.to_string().starts_with("cannot open /proc/4294967295/pagemap"), "{error}");
    }

    #[test]
    fn a_range_of_broken_pages_is_refused() {
        let mut map = PageMap::own().unwrap();
        for (start, end) in [(1, PAGE_SIZE), (0, PAGE_SIZE + 1), (PAGE_SIZE, 0)] {
            assert!(matches!(map.populated(start..end, |_| {}), Err(HoleError::Unaligned(_))));
        }
    }

    #[test]
    fn a_file_that_cannot_seek_is_an_error() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let error = file_data(&reader, 0..4096, |_| {}).unwrap_err();
        assert!(error.to_string().contains("cannot search bytes 0..4096"), "{error}");
    }
}
