//! The engine's own memory for what a device reads and writes: descriptors, completion records, buffers.
//!
//! The memory has its own pages, locked where the limit allows it (a device's page fault costs more than the work), not
//! inherited over `fork` (a child's copy-on-write would move the page away under the device), and on the device's node.

use std::ptr::NonNull;

/// Page-aligned memory, initially zero.
#[derive(Debug)]
pub(crate) struct Slab {
    start: NonNull<u8>,
    bytes: usize,
    /// The process that mapped it. In its children other memory may be at the address.
    owner: u32,
}

// SAFETY: a slab is owned memory; whoever holds the slab decides who accesses it.
unsafe impl Send for Slab {}
// SAFETY: shared references give no access to the bytes but through raw pointers.
unsafe impl Sync for Slab {}

impl Slab {
    /// Maps `bytes` bytes, rounded up to pages, on `node` where one is named.
    ///
    /// # Panics
    /// If the system has no address space left, as any allocation does.
    pub(crate) fn new(bytes: usize, node: Option<u32>) -> Self {
        let bytes = bytes.max(1).next_multiple_of(4096);
        system::map(bytes, node)
    }

    /// Returns its first byte.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns its length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        system::unmap(self);
    }
}

#[cfg(not(miri))]
mod system {
    use super::{NonNull, Slab};
    use rustix::mm::{Advice, MapFlags, ProtFlags};

    pub(super) fn map(bytes: usize, node: Option<u32>) -> Slab {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }
            .unwrap_or_else(|errno| panic!("no memory for {bytes} bytes of an accelerator's arena: {errno}"));
        // Both are optional for correctness: without `DontFork` the caller has to avoid forks; without the lock the
        // device takes page faults, which the CPU finishes.
        // SAFETY: the range is the mapping just made; this advice changes no content.
        let _ = unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontFork) };
        if let Some(node) = node {
            bind(start.cast(), bytes, node);
        }
        // SAFETY: as above.
        let locked = unsafe { rustix::mm::mlock(start, bytes) }.is_ok();
        if !locked {
            // SAFETY: as above; populating changes no content.
            let _ = unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxPopulateWrite) };
        }
        let start = NonNull::new(start.cast()).expect("mmap never gives address 0");
        Slab { start, bytes, owner: std::process::id() }
    }

    /// Prefers `node` for pages not present yet. A preference, not a binding: memory on another node is slow, but no
    /// memory is worse.
    fn bind(start: *mut u8, bytes: usize, node: u32) {
        const MPOL_PREFERRED: libc::c_ulong = 1;
        let mut mask = [0 as libc::c_ulong; 16];
        let bits = libc::c_ulong::BITS;
        let Some(word) = mask.get_mut((node / bits) as usize) else { return };
        *word = 1 << (node % bits);
        // SAFETY: the range is the caller's mapping, the mask is as long as is said (the kernel counts one bit less).
        unsafe {
            libc::syscall(libc::SYS_mbind, start, bytes, MPOL_PREFERRED, mask.as_ptr(), 16 * bits + 1, 0);
        }
    }

    pub(super) fn unmap(slab: &Slab) {
        if slab.owner != std::process::id() {
            return;
        }
        // SAFETY: the mapping is the slab's own, made in `map` with this length, and the slab is being dropped: its state is
        // not one in which a device may write it (`State`).
        let _ = unsafe { rustix::mm::munmap(slab.start.as_ptr().cast(), slab.bytes) };
    }
}

/// Miri has no mmap with these options: allocate instead.
#[cfg(miri)]
mod system {
    use super::{NonNull, Slab};
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 4096).expect("a slab's size is a multiple of the page")
    }

    pub(super) fn map(bytes: usize, _node: Option<u32>) -> Slab {
        // SAFETY: the layout is of at least a page.
        let start = unsafe { alloc_zeroed(layout(bytes)) };
        Slab { start: NonNull::new(start).expect("out of memory"), bytes, owner: 0 }
    }

    pub(super) fn unmap(slab: &Slab) {
        debug_assert_eq!(slab.owner, 0, "nobody forks here");
        // SAFETY: allocated in `map` with this layout.
        unsafe { dealloc(slab.start.as_ptr(), layout(slab.bytes)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_is_zero_page_aligned_and_of_the_requested_length() {
        let slab = Slab::new(5000, Some(0));
        assert_eq!(slab.bytes(), 8192);
        assert!(slab.pointer().addr().is_multiple_of(4096));
        // SAFETY: the slab is ours alone and 8192 bytes long.
        assert!(unsafe { std::slice::from_raw_parts(slab.pointer(), 8192) }.iter().all(|byte| *byte == 0));
    }

    #[test]
    #[cfg(not(miri))]
    fn a_child_does_not_unmap_its_own_memory_at_the_same_address() {
        let slab = Slab::new(4096, None);
        let start = slab.pointer().cast::<libc::c_void>();
        // SAFETY: the child calls only async-signal-safe functions and touches memory of its own.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            // SAFETY: a new mapping, where the child has none: it has not inherited the slab.
            let own = unsafe { libc::mmap(start, 4096, protection, flags, -1, 0) };
            drop(slab);
            // SAFETY: asks whether it is mapped; ends the child without the parent's exit handlers.
            unsafe {
                libc::_exit(i32::from(own != start) + 2 * i32::from(libc::msync(start, 4096, libc::MS_ASYNC) != 0))
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    }
}
