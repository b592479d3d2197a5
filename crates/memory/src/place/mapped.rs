//! Placing through a shared mapping of the file that backs guest RAM.
//!
//! The faster method where the backing has huge pages: one fault per 2 MiB, then stores at memory speed. hugetlbfs has
//! no other method: it does not implement `write`.
//!
//! A store into a shared mapping ends in SIGBUS if the backing has no page available (tmpfs full, huge page pool empty)
//! or was truncated. So each range is populated by `MADV_POPULATE_WRITE` (Linux 5.14) before it is stored to: the same
//! fault, but its failure is an error code, and one system call takes the faults of a whole batch.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{Piece, Place, PlaceError, PlacementMethod, check, check_pages, check_pieces, kernel_page_size, together};
use crate::PAGE_SIZE;
use crate::copy::{copy_raw, store_raw, zero_raw};

/// A shared, writable mapping of (part of) a file.
#[derive(Debug)]
pub struct Mapped {
    start: NonNull<c_void>,
    size: u64,
}

// SAFETY: the mapping belongs to this value until drop; it is only written through raw pointers and never borrowed.
unsafe impl Send for Mapped {}
// SAFETY: as above. Other processes share these bytes, and threads may write the same ones: the compiler takes nothing for granted of
// what is accessed (`copy.rs`), and nothing here makes a reference to it.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `size` bytes of `file` from `file_offset`. The file must be open for reading and writing, and
    /// `file_offset` a multiple of its page size. The mapping keeps the file alive; `file` may be closed afterwards.
    pub fn new(file: &File, file_offset: u64, size: u64) -> Result<Self, PlaceError> {
        let length = usize::try_from(size)
            .ok()
            .filter(|length| *length > 0)
            .ok_or_else(|| PlaceError::Unusable(format!("cannot map {size} bytes")))?;
        let end = file_offset.checked_add(size);
        let have = file
            .metadata()
            .map_err(|source| PlaceError::Io { what: "fstat of the file behind guest RAM", offset: 0, source })?
            .len();
        if end.is_none_or(|end| end > have) {
            return Err(PlaceError::Unusable(format!(
                "the file behind guest RAM has {have} bytes, too few for {size} from offset {file_offset}"
            )));
        }
        // SAFETY: a new mapping at an address that the kernel chooses; it replaces nothing of ours.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                file_offset,
            )
        }
        .map_err(|errno| PlaceError::Io {
            what: "mapping the file behind guest RAM",
            offset: 0,
            source: errno.into(),
        })?;
        // With `shmem_enabled=advise` and tmpfs `huge=advise`, huge pages must be requested. A refusal (hugetlbfs, no
        // such pages) changes nothing, so it is not an error.
        // SAFETY: advice on the whole of the mapping made above.
        let _ = unsafe { rustix::mm::madvise(start, length, Advice::LinuxHugepage) };
        let start = NonNull::new(start)
            .ok_or_else(|| PlaceError::Unusable("the kernel mapped guest RAM at address 0".into()))?;
        Ok(Self { start, size })
    }

    fn at(&self, offset: u64) -> *mut u8 {
        self.start.as_ptr().cast::<u8>().wrapping_add(offset as usize)
    }

    /// Takes the page faults of a range now, so that no store can end in SIGBUS for lack of a page.
    fn populate(&self, offset: u64, len: u64) -> Result<(), PlaceError> {
        if len == 0 {
            return Ok(());
        }
        let page = kernel_page_size();
        let first = offset - offset % page;
        // The kernel rounds the length up to whole pages itself; the mapping is whole pages.
        let length = (offset + len - first) as usize;
        loop {
            // SAFETY: the range was checked to lie inside the mapping; the advice changes no content.
            let done = unsafe { rustix::mm::madvise(self.at(first).cast(), length, Advice::LinuxPopulateWrite) };
            return match done {
                Ok(()) => Ok(()),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
                // Before Linux 5.14: the store itself takes the fault.
                Err(rustix::io::Errno::INVAL) => Ok(()),
                Err(errno) => Err(PlaceError::NoMemory { offset, source: io::Error::from(errno) }),
            };
        }
    }
}

impl Place for Mapped {
    fn size(&self) -> u64 {
        self.size
    }

    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), PlaceError> {
        check_pieces(pieces, self.size)?;
        let mut rest = pieces;
        while let Some(first) = rest.first() {
            // Consecutive pieces in the block need one populate call.
            let mut end = first.offset + first.data.len() as u64;
            let mut run = 1;
            while let Some(next) = rest.get(run).filter(|next| next.offset == end) {
                end += next.data.len() as u64;
                run += 1;
            }
            self.populate(first.offset, end - first.offset)?;
            for piece in &rest[..run] {
                // SAFETY: the target was checked to lie inside the mapping, which lives as long as `self`; the source is
                // a live slice, and no slice of the mapping is ever made, so the two do not overlap.
                unsafe { store_raw(piece.data, self.at(piece.offset)) };
            }
            rest = &rest[run..];
        }
        Ok(())
    }

    fn read_pages(&self, offsets: &[u64], pages: &mut [u8]) -> Result<(), PlaceError> {
        check_pages(offsets, pages, self.size)?;
        let mut pages = pages.chunks_exact_mut(PAGE_SIZE);
        let mut next = 0;
        while next < offsets.len() {
            let run = &offsets[next..][..together(offsets, next)];
            // A hole is a page fault here too.
            self.populate(run[0], (run.len() * PAGE_SIZE) as u64)?;
            for (offset, page) in run.iter().zip(&mut pages) {
                // SAFETY: the page was checked to lie inside the mapping, which lives as long as `self`; the target is a
                // live slice, and no slice of the mapping is ever made, so the two do not overlap.
                unsafe { copy_raw(self.at(*offset).cast_const(), page.as_mut_ptr(), PAGE_SIZE) };
            }
            next += run.len();
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), PlaceError> {
        check(offset, len, self.size)?;
        self.populate(offset, len)?;
        // SAFETY: the range was checked to lie inside the mapping, which lives as long as `self`.
        unsafe { zero_raw(self.at(offset), len as usize) };
        Ok(())
    }

    fn method(&self) -> PlacementMethod {
        PlacementMethod::Mapping
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, of the same length, is not used after this.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.size as usize) };
    }
}
