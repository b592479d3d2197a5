//! Warms the host's memory before a measurement.
//!
//! Memory of a virtual host that was not touched since boot, or was given back to the hypervisor, is slow the first time
//! (18 GiB took 32 s where a warm host takes 2). The same migration then takes two or six times as long, by where its
//! destination happens to land. Touching as much memory beforehand and letting it go makes runs alike.

use std::ptr::null_mut;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Error;

/// Touches `bytes` of memory with huge pages where there are any, by two threads, and gives it back.
///
/// # Errors
/// [`Error::Io`] where so much memory cannot be mapped.
pub fn warm_memory(bytes: usize) -> Result<(), Error> {
    const PAGE: usize = 4096;
    const THREADS: usize = 2;
    if bytes == 0 {
        return Ok(());
    }
    let failed = |error: rustix::io::Errno| Error::Io {
        action: format!("mapping {bytes} bytes to warm them"),
        source: error.into(),
    };
    // SAFETY: a new private mapping at an address that the kernel chooses; nobody else knows of it.
    let start = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
        .map_err(failed)?;
    // SAFETY: advice on the mapping made above. Without huge pages it only takes longer.
    let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
    let address = start.expose_provenance();
    let share = bytes.div_ceil(THREADS).next_multiple_of(PAGE);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for offset in ((thread * share).min(bytes)..((thread + 1) * share).min(bytes)).step_by(PAGE) {
                    // SAFETY: inside the mapping made above, which outlives this scope; each byte is written by one thread.
                    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address + offset).write_volatile(1) };
                }
            });
        }
    });
    // SAFETY: the mapping made above, whole; the threads that used it have ended.
    unsafe { munmap(start, bytes) }.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_are_no_multiple_of_anything_are_warmed_and_given_back() {
        for bytes in [0, 1, 4095, (8 << 20) + 17] {
            warm_memory(bytes).expect("warmed");
        }
        assert!(warm_memory(usize::MAX / 2).is_err());
    }
}
