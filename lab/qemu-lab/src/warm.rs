//! Warms the host's memory before a measurement.
//!
//! The first access to memory of a virtual host is slow if the memory was not touched since boot, or was given back to the
//! hypervisor (18 GiB took 32 s; 2 s on a warm host). The same migration then takes two or six times as long, depending on the memory
//! that its destination gets. So memory is touched beforehand, and freed little by little while the migration needs it: on a host
//! that reports its free memory (virtio-balloon), free memory becomes cold within two seconds.

use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Error;

/// Warm memory that is kept free, in bytes: many times the demand of a migration between two polls, and so little that the
/// hypervisor gets little of it.
const AHEAD: u64 = 256 << 20;
/// Minimum free memory of the host while memory is touched, in bytes.
const MIN_FREE: u64 = 1 << 30;
/// Bytes that are touched and freed together: whole huge pages.
const PIECE: usize = 32 << 20;
/// Pause between two polls of the free memory.
const POLL_PAUSE: Duration = Duration::from_millis(5);

/// Touched memory, which is freed as other processes use free memory.
#[derive(Debug)]
pub struct WarmMemory {
    limit: Option<u64>,
    held: Arc<Mutex<Held>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Held {
    pieces: Vec<Piece>,
    /// Bytes of memory that must be free.
    free: u64,
    over: bool,
}

/// One piece of memory.
#[derive(Debug)]
struct Piece(usize);

impl WarmMemory {
    /// Creates an empty holder of at most `limit` bytes; without a limit, of all of the host's free memory but 1 GiB.
    pub fn new(limit: Option<u64>) -> Self {
        let held = Arc::new(Mutex::new(Held::default()));
        let shared = Arc::clone(&held);
        let thread = std::thread::spawn(move || {
            loop {
                {
                    let mut held = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    if held.over {
                        return;
                    }
                    while !held.pieces.is_empty() && free_memory() < held.free {
                        held.pieces.pop();
                    }
                }
                std::thread::park_timeout(POLL_PAUSE);
            }
        });
        Self { limit, held, thread: Some(thread) }
    }

    /// Touches free memory by two threads, with huge pages if possible, up to the limit. From then on, as much of it is freed as
    /// other processes use.
    ///
    /// # Errors
    /// [`Error::Io`] if the memory cannot be mapped.
    pub fn fill(&self) -> Result<(), Error> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = self.limit.map_or(usize::MAX, |limit| limit.div_ceil(PIECE as u64) as usize);
        while held.pieces.len() < wanted && free_memory() > MIN_FREE + 2 * PIECE as u64 {
            let other = std::thread::spawn(Piece::touched);
            let one = Piece::touched();
            let other = other.join().expect("touching memory does not panic");
            held.pieces.extend([one?, other?]);
        }
        held.free = free_memory() + AHEAD;
        Ok(())
    }
}

impl Drop for WarmMemory {
    fn drop(&mut self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).over = true;
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Piece {
    fn touched() -> Result<Self, Error> {
        const PAGE: usize = 4096;
        let failed = |error: rustix::io::Errno| Error::Io {
            action: format!("mapping {PIECE} bytes to warm them"),
            source: error.into(),
        };
        // SAFETY: a new private mapping at an address that the kernel chooses; no other code knows of it.
        let start = unsafe { mmap_anonymous(null_mut(), PIECE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
            .map_err(failed)?;
        // SAFETY: advice on the mapping made above. Without huge pages it only takes longer.
        let _ = unsafe { madvise(start, PIECE, Advice::LinuxHugepage) };
        let piece = Self(start.expose_provenance());
        for offset in (0..PIECE).step_by(PAGE) {
            // SAFETY: inside the mapping made above, of which no other code knows.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(piece.0 + offset).write_volatile(1) };
        }
        Ok(piece)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: the mapping that `touched` made, which is not used any more.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.0), PIECE) };
    }
}

/// Returns the bytes of the host's memory that are free; 0 if that is not known.
fn free_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = text.lines().find_map(|line| line.strip_prefix("MemFree:")?.trim().strip_suffix("kB"));
    free.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_held_up_to_the_limit_and_freed_at_the_end() {
        let free = free_memory();
        assert!(free > 0);
        for pieces in [0, 1, 2, 5] {
            let warm = WarmMemory::new(Some((pieces * PIECE) as u64));
            warm.fill().unwrap();
            let held = warm.held.lock().unwrap();
            // An even number, from two threads, unless other processes needed some meanwhile, or none is free.
            assert!(held.pieces.len() <= pieces.next_multiple_of(2));
            assert!(held.free >= AHEAD);
        }
    }
}
