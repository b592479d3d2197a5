//! This process's own memory, as its page tables have it.

use super::{AddressSpace, Fault};

/// This process.
#[derive(Debug, Default)]
pub struct ProcessMemory;

impl AddressSpace for ProcessMemory {
    fn read(&self, address: u64, _into: &mut [u8]) -> Result<(), Fault> {
        Err(Fault { address, write: false, done: 0 })
    }

    fn write(&self, address: u64, _from: &[u8]) -> Result<(), Fault> {
        Err(Fault { address, write: true, done: 0 })
    }

    fn resolve(&self, _address: u64, _write: bool) -> bool {
        false
    }
}
