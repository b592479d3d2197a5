//! A device's view of memory: a translation that can fail, then bytes.

mod double;
mod process;
mod regions;
mod scripted;
mod watch;

pub use double::{PageState, TestMemory};
pub use process::ProcessMemory;
pub use scripted::{Rule, ScriptedMemory};
pub use watch::Watch;

/// The fault that stopped an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The first address that could not be reached.
    pub address: u64,
    /// Bytes before it that were read or written.
    pub done: usize,
}

/// The memory that a device accesses, through page tables that it does not own.
pub trait AddressSpace: Send + Sync + std::fmt::Debug {
    /// Reads. On a fault the bytes before the fault are valid. Returns how many pages had no cached translation.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<u32, Fault>;
    /// Writes. On a fault the bytes before the fault are written. Returns how many pages had no cached translation.
    fn write(&self, address: u64, from: &[u8]) -> Result<u32, Fault>;
    /// Handles a page request: makes the page present as the kernel would. `false` is an *invalid request* response.
    fn resolve(&self, address: u64, write: bool) -> bool;

    /// Writes a completion record: its first byte is seen last.
    fn write_record(&self, address: u64, record: &[u8]) -> Result<u32, Fault> {
        self.write(address + 1, &record[1..])?;
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.write(address, &record[..1])
    }

    /// Returns the counters of the device's translation cache.
    fn translations(&self) -> Translations {
        Translations::default()
    }
}

/// Counters of the device's translation cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Translations {
    /// Pages found in the cache.
    pub hits: u64,
    /// Pages requested from the IOMMU.
    pub misses: u64,
    /// Pages whose cached translation was no longer valid at a later access: it was invalidated in between.
    pub flushes: u64,
    /// Accesses that could not be translated.
    pub faults: u64,
    /// Page requests that made a page present.
    pub resolved: u64,
}

const PAGE: u64 = 4096;

/// Returns the pages that a range touches: the first page number, and the number of pages.
fn pages(address: u64, bytes: usize) -> (u64, usize) {
    let first = address / PAGE;
    let last = address.saturating_add(bytes as u64 - 1) / PAGE;
    (first, (last - first + 1) as usize)
}

/// Returns how many bytes of a range are before page number `first + index`.
fn bytes_before(address: u64, first: u64, index: usize) -> usize {
    ((first + index as u64) * PAGE).saturating_sub(address) as usize
}
