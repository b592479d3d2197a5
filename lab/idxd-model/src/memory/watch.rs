//! What an IOMMU is told about memory that a process shares with devices.
//!
//! The kernel does not know which translations a device holds. Whenever a page that was mapped is mapped otherwise, or no
//! longer, it has the address invalidated for all devices bound to the address space, and that is what its counters of IOTLB
//! flushes show. [`Translations::flushes`](super::Translations::flushes) counts fewer: only what a device had translated and
//! met again. So the page tables themselves are watched here.
//!
//! A look shows each page's change since the last one: a page that changed twice in between counts once, and each page of a
//! range that was taken away at once counts, though the kernel may flush the range in one go. A huge page is as many pages as
//! it has.

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
    /// Watches the pages that the range touches, from now on. Fails where `/proc` is not mounted.
    pub fn new(address: u64, bytes: usize) -> io::Result<Watch> {
        assert!(bytes > 0, "a range of no bytes at {address:#x}");
        let (first, count) = pages(address, bytes);
        let (entries, looked) = (vec![0; count * ENTRY], vec![0; count * ENTRY]);
        let mut watch = Watch { pagemap: File::open("/proc/self/pagemap")?, first, entries, looked };
        watch.look()?;
        Ok(watch)
    }

    /// How many pages that were mapped at the last look are mapped otherwise now, or no longer.
    pub fn look(&mut self) -> io::Result<u64> {
        self.look_at(0..self.entries.len() / ENTRY)
    }

    /// The same of some of its pages, counted from the range's first.
    pub fn look_at(&mut self, pages: Range<usize>) -> io::Result<u64> {
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

    /// Bytes that are watched.
    pub fn bytes(&self) -> u64 {
        (self.entries.len() / ENTRY) as u64 * PAGE
    }
}
