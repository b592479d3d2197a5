//! Placing into memory of this process, for a VMM that embeds the library.

use super::{Piece, Place, PlaceError, PlacementMethod, check, check_pages, check_pieces};
use crate::PAGE_SIZE;
use crate::copy::{copy_raw, store_raw, zero_raw};

/// Guest RAM that is mapped in this process.
#[derive(Debug)]
pub struct OwnMemory {
    start: *mut u8,
    size: u64,
}

// SAFETY: the pointer is only used for raw stores inside the range that the creator of the value vouched for, from any
// thread; nothing is ever borrowed from it.
unsafe impl Send for OwnMemory {}
// SAFETY: as above; several threads may write the same bytes, and others may access them: the compiler takes
// nothing for granted of what is accessed (`copy.rs`).
unsafe impl Sync for OwnMemory {}

impl OwnMemory {
    /// Uses `size` bytes of guest RAM at `start`.
    ///
    /// # Safety
    /// The range stays mapped and writable until the value is dropped. No Rust reference to it exists meanwhile, except
    /// to atomics.
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
            unsafe { store_raw(piece.data, self.at(piece.offset)) };
        }
        Ok(())
    }

    fn read_pages(&self, offsets: &[u64], pages: &mut [u8]) -> Result<(), PlaceError> {
        check_pages(offsets, pages, self.size)?;
        for (offset, page) in offsets.iter().zip(pages.chunks_exact_mut(PAGE_SIZE)) {
            // SAFETY: the page was checked to lie inside the range that the contract of `new` keeps mapped; the target is a
            // live slice, and no reference to guest RAM exists, so the two do not overlap.
            unsafe { copy_raw(self.at(*offset).cast_const(), page.as_mut_ptr(), PAGE_SIZE) };
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), PlaceError> {
        check(offset, len, self.size)?;
        // SAFETY: the range was checked to lie inside what the contract of `new` keeps writable.
        unsafe { zero_raw(self.at(offset), len as usize) };
        Ok(())
    }

    fn method(&self) -> PlacementMethod {
        PlacementMethod::OwnMemory
    }
}
