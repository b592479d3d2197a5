//! This process's memory, as its page tables describe it.
//!
//! A device with shared virtual memory walks the process's page tables: a page that was never touched is not present
//! for the device, even in a valid mapping. So every access first reads `/proc/self/pagemap`, and only pages that are
//! present are read or written, with `process_vm_readv` and `process_vm_writev` on this process. These calls return an
//! error number for memory that is forbidden or was unmapped in the meantime, never a signal.
//!
//! Known to be less exact than hardware: a page made read-only by `fork` counts as writable again once the child is
//! gone, although its page table entry stays read-only until the CPU writes; pages that NUMA balancing hides for a
//! moment count as present; and the page can vanish between the lookup and the access, in which case the kernel brings
//! it back (on memory registered with userfaultfd the engine then waits for the handler of its page faults).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::regions::Regions;
use super::{AddressSpace, Fault, PAGE, Translations, bytes_before, pages};

// Bits of a pagemap entry (Documentation/admin-guide/mm/pagemap.rst).
const EXCLUSIVE: u64 = 1 << 56;
const WRITE_PROTECTED: u64 = 1 << 57;
const FILE: u64 = 1 << 61;
pub(super) const PRESENT: u64 = 1 << 63;
/// The bits whose change means a different translation: all except soft-dirty.
pub(super) const IDENTITY: u64 = !(1 << 55);

/// Number of pages looked up at once.
const ENTRIES: usize = 64;
/// Maximum number of cached translations.
const CACHE: usize = 1 << 16;

/// This process.
#[derive(Debug)]
pub struct ProcessMemory {
    pagemap: File,
    regions: Regions,
    cache: Mutex<HashMap<u64, u64>>,
    hits: AtomicU64,
    misses: AtomicU64,
    flushes: AtomicU64,
    faults: AtomicU64,
    resolved: AtomicU64,
}

impl ProcessMemory {
    /// Opens the page tables. Fails if `/proc` is not mounted.
    pub fn new() -> io::Result<ProcessMemory> {
        Ok(ProcessMemory {
            pagemap: File::open("/proc/self/pagemap")?,
            regions: Regions::new()?,
            cache: Mutex::default(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            resolved: AtomicU64::new(0),
        })
    }

    /// Returns whether the device could write to a page with this entry. `mapping`: the mapping of the last lookup.
    fn writable(&self, entry: u64, page: u64, mapping: &mut Option<(Range<u64>, bool)>) -> bool {
        if entry & WRITE_PROTECTED != 0 {
            return false;
        }
        if entry & FILE != 0 {
            // A page of a file: written in place if the mapping is shared, copied on write if it is private.
            let address = page * PAGE;
            if !mapping.as_ref().is_some_and(|(range, _)| range.contains(&address)) {
                *mapping = self.regions.shared(address);
            }
            return mapping.as_ref().is_some_and(|&(_, shared)| shared);
        }
        // Anonymous: the shared zero page, pages shared with a child, and merged pages also have other mappings.
        entry & EXCLUSIVE != 0
    }

    /// Returns how many bytes of the range can be accessed, and the first page that cannot.
    fn translate(&self, address: u64, bytes: usize, write: bool, misses: &mut u32) -> (usize, Option<u64>) {
        let (first, count) = pages(address, bytes);
        let mut buffer = [0_u8; ENTRIES * 8];
        let mut mapping = None;
        let mut cache = self.cache.lock().unwrap();
        for start in (0..count).step_by(ENTRIES) {
            let part = ENTRIES.min(count - start);
            let from = (first + start as u64).saturating_mul(8);
            // Beyond the end of the address space the file is shorter: nothing is present there.
            let got = self.pagemap.read_at(&mut buffer[..part * 8], from).unwrap_or(0);
            buffer[got - got % 8..part * 8].fill(0);
            for (index, entry) in buffer[..part * 8].chunks_exact(8).enumerate() {
                let entry = u64::from_le_bytes(entry.try_into().unwrap());
                let page = first + (start + index) as u64;
                let usable = entry & PRESENT != 0 && (!write || self.writable(entry, page, &mut mapping));
                match cache.get(&page) {
                    Some(&known) if known & IDENTITY == entry & IDENTITY => {
                        self.hits.fetch_add(1, Ordering::Relaxed);
                    }
                    known => {
                        if known.is_some() {
                            self.flushes.fetch_add(1, Ordering::Relaxed);
                            cache.remove(&page);
                        }
                        *misses += 1;
                        self.misses.fetch_add(1, Ordering::Relaxed);
                        if entry & PRESENT != 0 {
                            if cache.len() >= CACHE {
                                cache.clear();
                            }
                            cache.insert(page, entry);
                        }
                    }
                }
                if !usable {
                    self.faults.fetch_add(1, Ordering::Relaxed);
                    return (bytes_before(address, first, start + index), Some((page * PAGE).max(address)));
                }
            }
        }
        (bytes, None)
    }

    /// Transfers bytes with `call`, which moves at most the given number and returns how many, or less than 0.
    fn transfer(
        &self,
        address: u64,
        bytes: usize,
        write: bool,
        mut call: impl FnMut(usize, usize) -> isize,
    ) -> Result<u32, Fault> {
        let mut misses = 0;
        if bytes == 0 {
            return Ok(0);
        }
        let (reachable, fault) = self.translate(address, bytes, write, &mut misses);
        let mut done = 0;
        while done < reachable {
            match call(done, reachable - done) {
                moved if moved > 0 => done += moved as usize,
                _ => {
                    // Forbidden, or unmapped since the lookup.
                    self.faults.fetch_add(1, Ordering::Relaxed);
                    return Err(Fault { address: address + done as u64, done });
                }
            }
        }
        match fault {
            None => Ok(misses),
            Some(address) => Err(Fault { address, done }),
        }
    }
}

/// Reads from this process through the kernel: unreadable memory is an error, not a signal.
fn read_self(address: u64, into: &mut [u8]) -> isize {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: `local` is the caller's buffer, for as long as the call takes; the remote address is checked by the
    // kernel.
    unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) }
}

/// Writes to this process through the kernel.
///
/// A device writes to the memory that its submitter has named. As for a real portal, the submitter guarantees that this
/// memory may be given to a device; this is why the submitting functions of drivers are `unsafe`.
fn write_self(address: u64, from: &[u8]) -> isize {
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: from.len() };
    // SAFETY: `local` is only read; the remote address is checked by the kernel.
    unsafe { libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) }
}

impl AddressSpace for ProcessMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<u32, Fault> {
        self.transfer(address, into.len(), false, |done, left| {
            read_self(address + done as u64, &mut into[done..done + left])
        })
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<u32, Fault> {
        self.transfer(address, from.len(), true, |done, left| {
            write_self(address + done as u64, &from[done..done + left])
        })
    }

    fn resolve(&self, address: u64, write: bool) -> bool {
        // The IOMMU's fault path cannot wait, as userfaultfd would require, so it answers *invalid*.
        if self.regions.userfault(address) {
            return false;
        }
        // The page must become writable without a change of its content. A write from here could race with one of the
        // CPU, so the kernel populates the page. The page is not read before: that would map the zero page, only to be
        // replaced.
        if !write {
            let mut byte = [0];
            if read_self(address, &mut byte) != 1 {
                return false;
            }
        } else {
            let page = (address & !(PAGE - 1)) as *mut libc::c_void;
            // SAFETY: populating faults the page in as an access would; no content is changed.
            if unsafe { libc::madvise(page, PAGE as usize, libc::MADV_POPULATE_WRITE) } != 0 {
                return false;
            }
        }
        self.resolved.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn write_record(&self, address: u64, record: &[u8]) -> Result<u32, Fault> {
        // One translation for the record, which never crosses a page; two writes, the status last.
        let misses = self.write(address + 1, &record[1..])?;
        std::sync::atomic::fence(Ordering::SeqCst);
        if write_self(address, &record[..1]) == 1 { Ok(misses) } else { Err(Fault { address, done: 0 }) }
    }

    fn translations(&self) -> Translations {
        Translations {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            flushes: self.flushes.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
            resolved: self.resolved.load(Ordering::Relaxed),
        }
    }
}
