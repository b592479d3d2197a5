//! Placing by `pwritev` into the file that backs guest RAM.
//!
//! For plain memfd and tmpfs this costs less than a mapping: the kernel fills a fresh page at once instead of clearing
//! it in a page fault and then letting us store to it. More threads do not make it faster, because the kernel admits
//! one writer at a time to a file; a mapping needs two or more threads, and 1.7 times the CPU, to be as fast.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{
    Piece, Place, PlaceError, PlacementMethod, ZEROS, check, check_pages, check_pieces, kernel_page_size, together,
    write_adjacent,
};
use crate::PAGE_SIZE;

/// How a range is made to read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroBy {
    /// `fallocate(FALLOC_FL_PUNCH_HOLE)`: frees the memory. Wrong for memory that was preallocated on purpose, or that
    /// a device has pinned for DMA: the device would keep using the old page.
    PunchHole,
    /// Writes zeros. Always right.
    Writing,
}

/// Below this many bytes writing zeros is cheaper than punching a hole, which removes the page from every mapping.
const MIN_PUNCH: u64 = 64 * 1024;

/// A file (memfd, tmpfs) that is guest RAM, written by system calls.
#[derive(Debug)]
pub struct FileWrite {
    file: File,
    base: u64,
    size: u64,
    zero_by: ZeroBy,
    /// One writer at a time: the kernel allows no more, and threads that wait for the file's own lock burn CPU (it
    /// spins), while threads that wait here sleep.
    turn: Mutex<()>,
}

impl FileWrite {
    /// Uses `size` bytes of `file` from `file_offset`. The file must be open for writing and not in append mode.
    pub fn new(file: File, file_offset: u64, size: u64, zero_by: ZeroBy) -> Result<Self, PlaceError> {
        let have = file
            .metadata()
            .map_err(|source| PlaceError::Io { what: "fstat of the file behind guest RAM", offset: 0, source })?
            .len();
        // A write past the end would grow the file, and the guest would not have those pages.
        if file_offset.checked_add(size).is_none_or(|end| end > have) {
            return Err(PlaceError::Unusable(format!(
                "the file behind guest RAM has {have} bytes, too few for {size} from offset {file_offset}"
            )));
        }
        Ok(Self { file, base: file_offset, size, zero_by, turn: Mutex::new(()) })
    }

    /// Writes consecutive slices at `offset`, continuing after short writes.
    fn write_run(&self, mut offset: u64, mut slices: &mut [IoSlice<'_>]) -> Result<(), PlaceError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Drops leading empty slices, so that 0 bytes written always means no progress.
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match rustix::io::pwritev(&self.file, slices, self.base + offset) {
                Ok(0) => {
                    return Err(failed("writing guest RAM", offset, io::ErrorKind::WriteZero.into()));
                }
                Ok(written) => {
                    offset += written as u64;
                    IoSlice::advance_slices(&mut slices, written);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("writing guest RAM", offset, errno.into())),
            }
        }
        Ok(())
    }

    fn write_zeros(&self, mut offset: u64, mut len: u64) -> Result<(), PlaceError> {
        while len > 0 {
            let step = len.min(ZEROS.len() as u64);
            self.write_run(offset, &mut [IoSlice::new(&ZEROS[..step as usize])])?;
            offset += step;
            len -= step;
        }
        Ok(())
    }
}

impl Place for FileWrite {
    fn size(&self) -> u64 {
        self.size
    }

    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), PlaceError> {
        check_pieces(pieces, self.size)?;
        write_adjacent(pieces, |offset, slices| self.write_run(offset, slices))
    }

    fn read_pages(&self, offsets: &[u64], mut pages: &mut [u8]) -> Result<(), PlaceError> {
        check_pages(offsets, pages, self.size)?;
        let mut next = 0;
        while next < offsets.len() {
            let run = together(offsets, next);
            let (part, rest) = std::mem::take(&mut pages).split_at_mut(run * PAGE_SIZE);
            self.file
                .read_exact_at(part, self.base + offsets[next])
                .map_err(|error| failed("reading guest RAM back", offsets[next], error))?;
            (pages, next) = (rest, next + run);
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), PlaceError> {
        check(offset, len, self.size)?;
        let page = kernel_page_size();
        let start = offset.next_multiple_of(page);
        let end = (offset + len) / page * page;
        if self.zero_by == ZeroBy::Writing || end <= start || end - start < MIN_PUNCH {
            return self.write_zeros(offset, len);
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&self.file, flags, self.base + start, end - start) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                // The file system cannot punch, or a seal forbids it: writing zeros has the same effect.
                Err(Errno::OPNOTSUPP | Errno::PERM) => return self.write_zeros(offset, len),
                Err(errno) => {
                    return Err(failed("punching a hole in guest RAM", offset, errno.into()));
                }
            }
        }
        self.write_zeros(offset, start - offset)?;
        self.write_zeros(end, offset + len - end)
    }

    fn method(&self) -> PlacementMethod {
        PlacementMethod::FileWrite
    }
}

fn failed(what: &'static str, offset: u64, source: io::Error) -> PlaceError {
    match Errno::from_io_error(&source) {
        Some(Errno::NOSPC | Errno::NOMEM | Errno::DQUOT) => PlaceError::NoMemory { offset, source },
        _ => PlaceError::Io { what, offset, source },
    }
}
