//! Memory of one thread that devices may read too.
//!
//! A device reads it at any time between a request and its answer, whatever the thread does meanwhile: the answer is right only
//! where the memory was not written since. The memory stays mapped until the last such work has ended.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;
use std::sync::Arc;

use sterna_memory::PAGE_SIZE;
use sterna_memory::copy::store_raw;
use sterna_memory::delta::{DeltaError, apply_raw};
use sterna_memory::huge::prefer_huge_pages;
use sterna_offload::{Range, Region};

/// Page-aligned memory that devices may read, zero at first.
#[derive(Debug)]
pub(super) struct DeviceReadable {
    region: Arc<Region>,
}

/// Frees the memory when dropped.
struct Owner(NonNull<[u8]>);

// SAFETY: it only frees the memory, which any thread may do, once.
unsafe impl Send for Owner {}
// SAFETY: shared, it gives access to nothing.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: allocated in `DeviceReadable::new` as a box of bytes is. It is dropped with the region, which is kept by `DeviceReadable` and by whatever is under way
        // on it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl DeviceReadable {
    /// Allocates `bytes` bytes; none where that is too much.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        // Without alignment: then zeroed memory of this size comes from the kernel untouched, and is populated at its first use.
        let layout = Layout::array::<u8>(bytes.checked_add(PAGE_SIZE - 1)?).ok()?;
        // SAFETY: of a size that is not zero.
        let all = NonNull::slice_from_raw_parts(NonNull::new(unsafe { alloc_zeroed(layout) })?, layout.size());
        let owner = Arc::new(Owner(all));
        let first = all.cast::<u8>();
        // SAFETY: less than a page further, and so within it.
        let start = unsafe { first.add(first.align_offset(PAGE_SIZE)) };
        // SAFETY: `bytes` of it are left from there on, and nobody else has them yet.
        prefer_huge_pages(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) });
        // SAFETY: the owner keeps it allocated as long as the region or any work on it. All work on a range of it reads (ranges are for
        // deltas from what it keeps), also that of devices, which runs beside this thread. So references to it are shared ones, and it is
        // written by raw stores only (`sterna_memory::copy`).
        let region = unsafe { Region::new(start, bytes, Some(owner)) };
        Some(Self { region })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the region is this long, initialised (zero at first), and written only by what needs the only reference to this.
        unsafe { std::slice::from_raw_parts(self.region.start().as_ptr(), self.region.bytes()) }
    }

    /// Writes `bytes` from `offset` on. A device that reads there meanwhile finds the old or the new value of each byte.
    ///
    /// # Panics
    /// Panics if the bytes are not all within the memory.
    pub(super) fn store(&mut self, offset: usize, bytes: &[u8]) {
        let at = self.at(offset, bytes.len());
        // SAFETY: that many bytes are within the region, and no other reference to it exists: `self` is the only one.
        unsafe { store_raw(bytes, at) };
    }

    /// Applies a delta record to the `bytes` bytes from `offset` on, as [`sterna_memory::delta::apply`] does, each word by one store.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// Panics if the bytes are not all within the memory.
    pub(super) fn apply(&mut self, offset: usize, bytes: usize, record: &[u8]) -> Result<(), DeltaError> {
        let at = self.at(offset, bytes);
        // SAFETY: as in `store`.
        unsafe { apply_raw(record, at, bytes) }
    }

    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.region.bytes()), "{bytes} bytes at {offset} are not within it");
        self.region.start().as_ptr().wrapping_add(offset)
    }

    /// Returns a part of the memory, for a device to read.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Range {
        self.region.range(offset, bytes).expect("a part of it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zero_begins_with_a_page_and_stays_as_long_as_a_range_of_it() {
        let mut memory = DeviceReadable::new(3 * PAGE_SIZE).unwrap();
        assert!(
            memory.bytes().iter().all(|byte| *byte == 0) && memory.bytes().as_ptr().addr().is_multiple_of(PAGE_SIZE)
        );
        memory.store(PAGE_SIZE + 5, &[7]);
        // Word 0 of that page.
        memory.apply(PAGE_SIZE, PAGE_SIZE, &[0, 0, 1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        assert_eq!(memory.bytes()[PAGE_SIZE - 1..PAGE_SIZE + 10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]);
        memory.store(PAGE_SIZE + 5, &[7]);
        let range = memory.range(PAGE_SIZE, PAGE_SIZE);
        drop(memory);
        // SAFETY: the range keeps it.
        assert_eq!(unsafe { range.region().start().add(range.offset() + 5).read() }, 7);
        assert!(DeviceReadable::new(0).unwrap().bytes().is_empty());
    }

    #[test]
    fn more_than_an_address_space_cannot_be_allocated() {
        // No address space is as large.
        for bytes in [1 << 60, isize::MAX as usize, usize::MAX] {
            assert!(DeviceReadable::new(bytes).is_none());
        }
    }
}
