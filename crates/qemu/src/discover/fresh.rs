//! Finds the pages of a block that no process has written yet. They read as zeros, so a zero page for one of them needs no work
//! and no memory.
//!
//! The kernel reports them: for shared files by `SEEK_DATA` (pages in the file, from any process; page tables would show only
//! one process's pages), for private memory by `/proc/PID/pagemap` (present or swapped).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;

use super::{Backing, FileKind, Location, RamBlock};

/// Maximum number of touched ranges: memory with more of them does not count as fresh.
const MAX_RANGES: usize = 16 * 1024;

/// Which parts of a block may have been written before the migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Freshness {
    /// All of the block counts as written, for this reason.
    Touched(&'static str),
    /// Only these ranges may have been written (offsets in the block, bytes; in order, not overlapping).
    Fresh(Vec<Range<u64>>),
}

impl Freshness {
    /// Returns the pages of which a byte may have been written, for a block of `pages` pages of `page_size` bytes.
    ///
    /// # Errors
    /// Why all of the block counts as written.
    pub fn written_pages(
        &self,
        pages: u64,
        page_size: u64,
    ) -> Result<impl Iterator<Item = Range<u64>> + '_, &'static str> {
        match self {
            Freshness::Touched(why) => Err(why),
            Freshness::Fresh(touched) => {
                Ok(touched.iter().map(move |range| range.start / page_size..range.end.div_ceil(page_size).min(pages)))
            }
        }
    }

    /// Returns how many bytes of a block of `size` bytes may have been written.
    pub fn touched_bytes(&self, size: u64) -> u64 {
        match self {
            Freshness::Touched(_) => size,
            Freshness::Fresh(touched) => touched.iter().map(|range| range.end - range.start).sum(),
        }
    }
}

impl RamBlock {
    /// Returns which parts of this block may have been written so far. To be called just before the first page is placed.
    pub fn freshness(&self) -> Freshness {
        let Ok(location) = &self.location else {
            return Freshness::Touched("its memory is out of reach");
        };
        location.touched_ranges(self.used).unwrap_or_else(Freshness::Touched)
    }
}

impl Location {
    pub(super) fn touched_ranges(&self, size: u64) -> Result<Freshness, &'static str> {
        if self.preallocated {
            return Err("it was preallocated");
        }
        let mut ranges = Ranges(Vec::new());
        match &self.backing {
            Backing::Anonymous => {
                let pagemap = File::open(format!("/proc/{}/pagemap", self.process.pid()))
                    .map_err(|_| "its page map cannot be read")?;
                present_pages(&pagemap, self.address, size, &mut ranges)?;
            }
            Backing::PrivateFile => return Err("a private file shows what the file contains"),
            Backing::Shared { kind: FileKind::Hugetlb { .. }, .. } => {
                return Err("huge pages of a pool cannot be asked");
            }
            Backing::Shared { kind: FileKind::Disk, .. } => return Err("a file on disk may contain anything"),
            Backing::Shared { file, offset, .. } => written_data(file, *offset, size, &mut ranges)?,
        }
        Ok(Freshness::Fresh(ranges.0))
    }
}

/// Collects ranges in order, merging neighbours.
pub(super) struct Ranges(pub(super) Vec<Range<u64>>);

impl Ranges {
    fn add(&mut self, range: Range<u64>) -> Result<(), &'static str> {
        let full = self.0.len() == MAX_RANGES;
        match self.0.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ if full => return Err("it is written in too many places"),
            _ => self.0.push(range),
        }
        Ok(())
    }
}

/// Collects the data ranges of a part of a file, by `SEEK_DATA`.
pub(super) fn written_data(file: &File, offset: u64, size: u64, ranges: &mut Ranges) -> Result<(), &'static str> {
    let mut at = offset;
    let end = offset + size;
    while at < end {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => return Err("its file cannot be searched for holes"),
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(data)).map_err(|_| "its file cannot be searched for holes")?;
        if data < end {
            ranges.add(data - offset..hole.min(end) - offset)?;
        }
        at = hole.max(data + 1);
    }
    Ok(())
}

/// Collects the pages that are present or swapped, by the kernel's page map (Documentation/admin-guide/mm/pagemap.rst): one native
/// word of 64 bits for each page, bit 63 present, bit 62 swapped.
pub(super) fn present_pages(pagemap: &File, address: u64, size: u64, ranges: &mut Ranges) -> Result<(), &'static str> {
    const IN_USE: u64 = 0b11 << 62;
    let page = rustix::param::page_size() as u64;
    let first = address / page;
    let pages = (address + size).div_ceil(page) - first;
    let mut words = vec![0_u8; 512 * 1024];
    let mut done = 0;
    while done < pages {
        let want = ((pages - done) * 8).min(words.len() as u64) as usize;
        let words = &mut words[..want];
        match pagemap.read_exact_at(words, (first + done) * 8) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return Err("its page map cannot be read"),
        }
        for word in words.as_chunks::<8>().0 {
            if u64::from_ne_bytes(*word) & IN_USE != 0 {
                let start = ((first + done) * page).saturating_sub(address);
                let end = ((first + done + 1) * page - address).min(size);
                ranges.add(start..end)?;
            }
            done += 1;
        }
    }
    Ok(())
}
