//! Mappings for this crate's tests.

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};

/// An anonymous mapping, page-aligned and all zero.
pub(crate) struct Area {
    ptr: *mut u8,
    len: usize,
}

impl Area {
    pub(crate) fn anonymous(len: usize) -> Self {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nothing.
        let ptr = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).unwrap()
        };
        Self { ptr: ptr.cast(), len }
    }

    /// Without transparent huge pages: a store populates one 4 KiB page.
    pub(crate) fn small_pages(len: usize) -> Self {
        let area = Self::anonymous(len);
        // SAFETY: the range is our own mapping; the advice changes no content. A kernel without huge pages refuses it,
        // and needs it not.
        let _ = unsafe { madvise(area.ptr.cast(), len, Advice::LinuxNoHugepage) };
        area
    }

    /// Makes a part inaccessible.
    pub(crate) fn forbid(&self, at: usize, len: usize) {
        assert!(at + len <= self.len);
        // SAFETY: the part is our own; tests touch it no more.
        unsafe { mprotect(self.ptr.add(at).cast(), len, MprotectFlags::empty()).unwrap() };
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped and initialised; tests that share it between threads use `ptr` instead.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    #[expect(clippy::mut_from_ref, reason = "tests take one slice at a time")]
    pub(crate) fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

// SAFETY: plain memory; tests access it from several threads through `ptr` and atomics only.
unsafe impl Sync for Area {}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and no borrow outlives the owner.
        unsafe { munmap(self.ptr.cast(), self.len).unwrap() };
    }
}
