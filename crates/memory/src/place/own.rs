//! Placing into memory of this process: the way of a VMM that embeds the library.

use super::{Piece, Place, PlaceError, Way, check, check_pages, check_pieces};
use crate::PAGE_SIZE;

/// Guest RAM that is mapped in this process.
#[derive(Debug)]
pub struct OwnMemory {
    start: *mut u8,
    size: u64,
}

// SAFETY: the pointer is only used for raw stores inside the range that the creator of the value vouched for, from any
// thread; nothing is ever borrowed from it.
unsafe impl Send for OwnMemory {}
// SAFETY: as above; stores by several threads to disjoint ranges do not interfere, and overlapping ranges are excluded by
// the contract of `new`.
unsafe impl Sync for OwnMemory {}

impl OwnMemory {
    /// Takes `size` bytes of guest RAM at `start`.
    ///
    /// # Safety
    /// The range stays mapped and writable until the value is dropped. No Rust reference to it exists meanwhile, except
    /// to atomics that nobody accesses during a call, and no two calls write the same bytes at the same time.
    pub unsafe fn new(start: *mut u8, size: usize) -> Self {
        Self { start, size: size as u64 }
    }

    fn at(&self, offset: u64) -> *mut u8 {
        self.start.wrapping_add(offset as usize)
    }
}

impl Place for OwnMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), PlaceError> {
        check_pieces(pieces, self.size)?;
        for piece in pieces {
            // SAFETY: the target was checked to lie inside the range that the contract of `new` keeps writable; the source
            // is a live slice, and no reference to guest RAM exists, so the two do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.data.as_ptr(), self.at(piece.offset), piece.data.len());
            }
        }
        Ok(())
    }

    fn read_pages(&self, offsets: &[u64], pages: &mut [u8]) -> Result<(), PlaceError> {
        check_pages(offsets, pages, self.size)?;
        for (offset, page) in offsets.iter().zip(pages.chunks_exact_mut(PAGE_SIZE)) {
            // SAFETY: the page was checked to lie inside the range that the contract of `new` keeps mapped; the target is a
            // live slice, and no reference to guest RAM exists, so the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(self.at(*offset).cast_const(), page.as_mut_ptr(), PAGE_SIZE) };
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), PlaceError> {
        check(offset, len, self.size)?;
        // SAFETY: the range was checked to lie inside what the contract of `new` keeps writable.
        unsafe { std::ptr::write_bytes(self.at(offset), 0, len as usize) };
        Ok(())
    }

    fn way(&self) -> Way {
        Way::OwnMemory
    }
}
