//! Methods of placing received pages into guest RAM.
//!
//! The destination's decode threads end here, with a decoded batch and its offsets. [`Place`] hides the location of the
//! RAM (a file that the VMM shares, another process's anonymous memory, our own memory) and the fastest system call for
//! that backing: a decoder has one method to call, and the report one name for the method used.
//!
//! Every implementation takes `&self` and may be called from many threads at once. Calls on disjoint ranges do not
//! disturb each other. Calls on overlapping ranges leave one of the two contents per byte, in no defined order (region
//! affinity on the wire keeps a page on one channel, so this does not happen in a migration).

mod file;
mod mapped;
mod own;
mod process;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, IoSlice};

use crate::PAGE_SIZE;

pub use file::{FileWrite, ZeroBy};
pub use mapped::Mapped;
pub use own::OwnMemory;
pub use process::{ProcessWrite, TargetProcess};

/// One contiguous piece of a batch: bytes, and their place in the block.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Offset in the block, bytes.
    pub offset: u64,
    /// The bytes to place there.
    pub data: &'a [u8],
}

/// The method by which pages reach the guest's memory. Named in the log and in the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlacementMethod {
    /// Stores into a shared mapping of the backing file.
    Mapping,
    /// `pwritev` into the backing file, without mapping it.
    FileWrite,
    /// `pwritev` into `/proc/PID/mem`, the VMM's address space.
    ProcessWrite,
    /// Stores into memory of this process.
    OwnMemory,
}

impl PlacementMethod {
    /// Returns the name used in reports, one word.
    pub fn name(self) -> &'static str {
        match self {
            PlacementMethod::Mapping => "mapping",
            PlacementMethod::FileWrite => "file-write",
            PlacementMethod::ProcessWrite => "process-write",
            PlacementMethod::OwnMemory => "own-memory",
        }
    }
}

impl fmt::Display for PlacementMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Guest RAM of one block, as memory into which pages can be written.
///
/// Offsets count bytes from the start of the block. A call that would leave the block is refused before anything is
/// written. When a call fails in the middle, the content of its range is undefined: write those pages again, or abandon
/// the migration.
pub trait Place: Send + Sync + fmt::Debug {
    /// Size of the block in bytes.
    fn size(&self) -> u64;

    /// Writes `data` at `offset`.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), PlaceError> {
        self.write_pieces(&[Piece { offset, data }])
    }

    /// Writes several pieces, in as few system calls as the method allows. Empty pieces are allowed.
    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), PlaceError>;

    /// Reads back the pages at `offsets` into `pages`: as many pages of [`PAGE_SIZE`] bytes, in the same order.
    fn read_pages(&self, offsets: &[u64], pages: &mut [u8]) -> Result<(), PlaceError>;

    /// Makes `len` bytes at `offset` read as zeros: by writing zeros or by freeing the memory, whichever is right for
    /// the backing. The caller decides whether a page that was never written needs this at all.
    fn zero(&self, offset: u64, len: u64) -> Result<(), PlaceError>;

    /// Returns the method by which this place writes.
    fn method(&self) -> PlacementMethod;
}

/// Why pages could not be placed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// A range that is not inside the block.
    #[error("{len} bytes at offset {offset:#x} are not inside a block of {size:#x} bytes")]
    OutOfBounds {
        /// Requested offset, bytes.
        offset: u64,
        /// Requested length, bytes.
        len: u64,
        /// Size of the block, bytes.
        size: u64,
    },
    /// The process whose memory is written has ended, or has called execve(2).
    #[error("process {pid} has ended or runs another program: its memory can no longer be written")]
    Gone {
        /// The process.
        pid: i32,
    },
    /// The process cannot be pinned down by descriptors, so another process with its id could be mistaken for it.
    #[error(
        "cannot hold process {pid} by a pidfd and /proc/{pid}/mem, which needs Linux 5.3 and free file descriptors: {source}"
    )]
    NotHeld {
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel does not let us write this process's memory.
    #[error(
        "not permitted to write the memory of process {pid}: run as the same user with equal capabilities, or as root \
         (the kernel asks for ptrace access: Yama's ptrace_scope, a seccomp filter or a container can forbid it)"
    )]
    Denied {
        /// The process.
        pid: i32,
    },
    /// The address range is not mapped in that process (any more), or there is no memory for it: the kernel returns the
    /// same error for both.
    #[error(
        "address {address:#x} of process {pid} cannot be accessed: the guest's memory there moved or was unplugged, or a memory \
         limit (cgroup, huge page pool) was met"
    )]
    Unmapped {
        /// The process.
        pid: i32,
        /// First address that could not be written.
        address: u64,
    },
    /// No memory is left for a page of a shared backing: the file system is full, or a memory limit was reached.
    #[error(
        "no memory for the guest page at offset {offset:#x} ({source}): the file system that backs guest RAM is full, \
         or a memory limit (cgroup, huge page pool) was met"
    )]
    NoMemory {
        /// Offset in the block, bytes.
        offset: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// Any other failure of a system call.
    #[error("{what} at offset {offset:#x} failed: {source}")]
    Io {
        /// The operation.
        what: &'static str,
        /// Offset in the block, bytes.
        offset: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// A parameter that can never work.
    #[error("{0}")]
    Unusable(String),
}

/// Refuses a range that is not inside a block of `size` bytes.
fn check(offset: u64, len: u64, size: u64) -> Result<(), PlaceError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(PlaceError::OutOfBounds { offset, len, size }),
    }
}

/// Checks all pieces before the first is written.
fn check_pieces(pieces: &[Piece<'_>], size: u64) -> Result<(), PlaceError> {
    pieces.iter().try_for_each(|piece| check(piece.offset, piece.data.len() as u64, size))
}

/// Checks all pages before the first is read.
fn check_pages(offsets: &[u64], pages: &[u8], size: u64) -> Result<(), PlaceError> {
    if pages.len() != offsets.len() * PAGE_SIZE {
        let (room, asked) = (pages.len(), offsets.len());
        return Err(PlaceError::Unusable(format!("{asked} pages are not read into {room} bytes")));
    }
    offsets.iter().try_for_each(|offset| check(*offset, PAGE_SIZE as u64, size))
}

/// Returns how many pages from `first` are consecutive in the block.
fn together(offsets: &[u64], first: usize) -> usize {
    let follows = |pair: &&[u64]| pair[0].checked_add(PAGE_SIZE as u64) == Some(pair[1]);
    1 + offsets[first..].windows(2).take_while(follows).count()
}

/// Writes pieces in their order. Those that are adjacent in the block share a call of `write_run`.
fn write_adjacent(
    pieces: &[Piece<'_>],
    mut write_run: impl FnMut(u64, &mut [IoSlice<'_>]) -> Result<(), PlaceError>,
) -> Result<(), PlaceError> {
    let mut rest = pieces;
    while let Some(first) = rest.first() {
        let mut slices = [IoSlice::new(&[]); VECTOR];
        let mut end = first.offset;
        let mut run = 0;
        while let Some(piece) = rest.get(run).filter(|piece| run < VECTOR && piece.offset == end) {
            slices[run] = IoSlice::new(piece.data);
            end += piece.data.len() as u64;
            run += 1;
        }
        write_run(first.offset, &mut slices[..run])?;
        rest = &rest[run..];
    }
    Ok(())
}

/// Returns the page size of this machine's kernel, bytes.
fn kernel_page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// The most pieces in one system call: the two arrays stay on the stack (8 KiB) and below the kernel's limit of 1024.
const VECTOR: usize = 256;

/// Source of zeros for the methods that must write them.
static ZEROS: [u8; 128 * 1024] = [0; 128 * 1024];
