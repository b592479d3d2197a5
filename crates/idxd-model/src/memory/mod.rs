//! What a device sees of memory: a translation that can fail, then bytes.

mod process;

pub use process::ProcessMemory;

/// Why an access stopped, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The first address that could not be reached.
    pub address: u64,
    /// Whether it was to be written.
    pub write: bool,
    /// Bytes before it that were read or written.
    pub done: usize,
}

/// The memory that a device reaches, through page tables that it does not own.
pub trait AddressSpace: Send + Sync + std::fmt::Debug {
    /// Reads; on a fault the bytes before it are valid.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Fault>;
    /// Writes; on a fault the bytes before it are written.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), Fault>;
    /// Page request: makes the page present as the kernel would. False is an *invalid request* response.
    fn resolve(&self, address: u64, write: bool) -> bool;
    /// What the device's translation cache has seen.
    fn translations(&self) -> Translations {
        Translations::default()
    }
}

/// Of the device's translation cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Translations {
    /// Pages found in it.
    pub hits: u64,
    /// Pages asked of the IOMMU.
    pub misses: u64,
    /// Pages that had been translated and are no longer so.
    pub flushes: u64,
    /// Accesses that could not be translated.
    pub faults: u64,
}
