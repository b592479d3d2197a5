//! Counts the invalidations that an IOMMU receives for memory that a process shares with devices.
//!
//! The kernel does not know which translations a device holds. Whenever a mapped page is remapped or unmapped, the
//! kernel invalidates the address for all devices bound to the address space; its counters of IOTLB flushes show these
//! invalidations. [`Translations::flushes`](super::Translations::flushes) counts fewer: only translations that a device
//! had cached and used again. So this module watches the page tables themselves.
//!
//! Each call compares each page with its state at the call before. A page that changed twice in between counts once. Each page of a range
//! that was unmapped at once counts, although the kernel may flush the range with one command. A huge page counts as
//! all its small pages.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::process::{IDENTITY, PRESENT};
use super::{PAGE, pages};

/// A range of this process's memory whose translations are watched.
#[derive(Debug)]
pub struct Watch {
    pagemap: File,
    first: u64,
    entries: Vec<u8>,
    looked: Vec<u8>,
}

/// Bytes of an entry of the pagemap.
const ENTRY: usize = 8;

impl Watch {
    /// Watches the pages that the range touches, from now on. Fails if `/proc` is not mounted.
    pub fn new(address: u64, bytes: usize) -> io::Result<Watch> {
        assert!(bytes > 0, "a range of no bytes at {address:#x}");
        let (first, count) = pages(address, bytes);
        let (entries, looked) = (vec![0; count * ENTRY], vec![0; count * ENTRY]);
        let mut watch = Watch { pagemap: File::open("/proc/self/pagemap")?, first, entries, looked };
        watch.count_changes()?;
        Ok(watch)
    }

    /// Returns how many pages that were mapped at the last call are now remapped or unmapped.
    pub fn count_changes(&mut self) -> io::Result<u64> {
        self.count_changes_in(0..self.entries.len() / ENTRY)
    }

    /// Does the same as [`Self::count_changes`] for some pages, counted from the range's first.
    pub fn count_changes_in(&mut self, pages: Range<usize>) -> io::Result<u64> {
        let (first, bytes) = (self.first + pages.start as u64, pages.start * ENTRY..pages.end * ENTRY);
        let (before, now) = (&mut self.entries[bytes.clone()], &mut self.looked[bytes]);
        self.pagemap.read_exact_at(now, first * ENTRY as u64)?;
        let entry = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("entries are of 8 bytes")) & IDENTITY;
        let both = before.chunks_exact(ENTRY).zip(now.chunks_exact(ENTRY));
        let changed = both.map(|(before, now)| (entry(before), entry(now)));
        let changed = changed.filter(|(before, now)| before & PRESENT != 0 && before != now).count();
        before.copy_from_slice(now);
        Ok(changed as u64)
    }

    /// Returns the number of watched bytes.
    pub fn bytes(&self) -> u64 {
        (self.entries.len() / ENTRY) as u64 * PAGE
    }
}
