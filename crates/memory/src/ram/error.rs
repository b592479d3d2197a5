//! Why a RAM block cannot be used.

use std::io;

use thiserror::Error;

use crate::holes::HoleError;
use crate::place::PlaceError;
use crate::process_memory::ProcessReadError;

/// Why a block cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RamError {
    /// The block's address, size or page size is not aligned to its page size.
    #[error(
        "RAM block {name} ({bytes:#x} bytes at {start:#x}, pages of {page_size} bytes) is not whole pages of its page size"
    )]
    Shape {
        /// The block.
        name: String,
        /// Its address.
        start: usize,
        /// Its length in bytes.
        bytes: usize,
        /// Bytes in a page of its backing.
        page_size: usize,
    },
    /// Two blocks with one name.
    #[error("there are two RAM blocks named {0}: each needs a name of its own, the same on both sides")]
    Name(String),
    /// The actual mapping does not match the block's backing.
    #[error("RAM block {name} was given as {given}, but {found}: {instead}")]
    Backing {
        /// The block.
        name: String,
        /// The backing that was given.
        given: &'static str,
        /// The actual mapping.
        found: String,
        /// What to do about it.
        instead: &'static str,
    },
    /// The mapping could not be examined.
    #[error("cannot look at what RAM block {name} is a mapping of ({what}): {source}")]
    NotSeen {
        /// The block.
        name: String,
        /// What was examined.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The populated parts cannot be determined.
    #[error("RAM block {name}: {source}")]
    Holes {
        /// The block.
        name: String,
        /// What went wrong.
        source: HoleError,
    },
    /// Memory of another process could not be read.
    #[error("RAM block {name} cannot be read: {source}")]
    Read {
        /// The block.
        name: String,
        /// What went wrong.
        source: ProcessReadError,
    },
    /// Memory of another process could not be written.
    #[error("RAM block {name} cannot be written: {source}")]
    Write {
        /// The block.
        name: String,
        /// What went wrong.
        source: PlaceError,
    },
    /// Memory for pages could not be allocated.
    #[error(
        "no memory for {bytes} bytes of RAM block {name} from offset {offset:#x} ({source}): the host, a memory limit \
         (cgroup) or the pool of huge pages has none left"
    )]
    NoMemory {
        /// The block.
        name: String,
        /// Offset in the block, in bytes.
        offset: u64,
        /// Length, in bytes.
        bytes: usize,
        /// The kernel's error.
        source: io::Error,
    },
}
