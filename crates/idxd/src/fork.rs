//! The process id, cheaply: queried once per process and not again for each submission.
//!
//! A work queue belongs to the process that opened it: the kernel bound its address space, the portal is not mapped in
//! a child, and a descriptor sent from a child would name the parent's memory. So each submission compares the process
//! id. `getpid` is a system call; instead, a page that is zeroed in children (`MADV_WIPEONFORK`, Linux 4.14) caches its
//! result. If that is refused the system call is made each time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns the id of this process.
pub(crate) fn process() -> u32 {
    let Some(kept) = kept() else { return std::process::id() };
    match kept.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            kept.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// Returns a word that reads 0 in a child, until the child writes its own id.
fn kept() -> Option<&'static AtomicU32> {
    static WORD: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    *WORD.get_or_init(|| {
        if cfg!(miri) {
            return None;
        }
        let bytes = rustix::param::page_size();
        // SAFETY: a new anonymous mapping at an address of the kernel's choice; never unmapped.
        let page = unsafe {
            let page = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if page == libc::MAP_FAILED || libc::madvise(page, bytes, libc::MADV_WIPEONFORK) != 0 {
                return None;
            }
            page
        };
        // SAFETY: page-aligned, zeroed, mapped for as long as the process lives, used as this atomic only.
        Some(unsafe { &*page.cast::<AtomicU32>() })
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_answer_is_the_process_id_each_time() {
        assert_eq!(super::process(), std::process::id());
        assert_eq!(super::process(), std::process::id());
    }

    #[test]
    #[cfg(not(miri))]
    fn a_child_has_another_answer() {
        let parent = super::process();
        // SAFETY: the child calls only async-signal-safe functions (getpid, _exit) and touches one atomic.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let own = super::process();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(own == parent || own != libc::getpid() as u32)) }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
    }
}
