//! Warms the host's memory before a measurement.
//!
//! Memory of a virtual host that was not touched since boot, or was given back to the hypervisor, is slow the first time
//! (18 GiB took 32 s where a warm host takes 2). The same migration then takes two or six times as long, by where its
//! destination happens to land. So memory is touched beforehand, and let go little by little while the migration needs it: a host
//! that reports its free memory (virtio-balloon) has free memory go cold within two seconds.

use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Error;

/// Warm memory that lies free at a time, in bytes: what a migration takes between two looks, many times over, and little
/// enough that the hypervisor gets little of it.
const AHEAD: u64 = 256 << 20;
/// Free memory that is left to the host when all of it is held, in bytes.
const LEFT: u64 = 1 << 30;
/// What is touched and let go at once, in bytes: whole huge pages.
const PIECE: usize = 32 << 20;
/// Between two looks at how much is free.
const LOOK_PAUSE: Duration = Duration::from_millis(5);

/// Memory that was touched and is let go as others take free memory.
#[derive(Debug)]
pub struct WarmMemory {
    limit: Option<u64>,
    held: Arc<Mutex<Held>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Held {
    pieces: Vec<Piece>,
    /// So much memory is to be free, in bytes.
    free: u64,
    over: bool,
}

/// One piece of memory.
#[derive(Debug)]
struct Piece(usize);

impl WarmMemory {
    /// Will hold at most `limit` bytes, and all of the host's free memory but 1 GiB without a limit. Nothing is held yet.
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
                std::thread::park_timeout(LOOK_PAUSE);
            }
        });
        Self { limit, held, thread: Some(thread) }
    }

    /// Touches free memory, with huge pages where there are any, by two threads, until as much is held as may be. From then on as much
    /// of it is let go as others take.
    ///
    /// # Errors
    /// [`Error::Io`] where the memory cannot be mapped.
    pub fn fill(&self) -> Result<(), Error> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = self.limit.map_or(usize::MAX, |limit| limit.div_ceil(PIECE as u64) as usize);
        while held.pieces.len() < wanted && free_memory() > LEFT + 2 * PIECE as u64 {
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
        // SAFETY: a new private mapping at an address that the kernel chooses; nobody else knows of it.
        let start = unsafe { mmap_anonymous(null_mut(), PIECE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
            .map_err(failed)?;
        // SAFETY: advice on the mapping made above. Without huge pages it only takes longer.
        let _ = unsafe { madvise(start, PIECE, Advice::LinuxHugepage) };
        let piece = Self(start.expose_provenance());
        for offset in (0..PIECE).step_by(PAGE) {
            // SAFETY: inside the mapping made above, of which nobody else knows.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(piece.0 + offset).write_volatile(1) };
        }
        Ok(piece)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: the mapping that `touched` made, which nobody uses any more.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.0), PIECE) };
    }
}

/// Bytes of the host's memory that are free; 0 where that cannot be told.
fn free_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = text.lines().find_map(|line| line.strip_prefix("MemFree:")?.trim().strip_suffix("kB"));
    free.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_is_held_as_was_said_and_let_go_at_the_end() {
        let free = free_memory();
        assert!(free > 0);
        for pieces in [0, 1, 2, 5] {
            let warm = WarmMemory::new(Some((pieces * PIECE) as u64));
            warm.fill().unwrap();
            let held = warm.held.lock().unwrap();
            // An even number, of two threads, unless others needed some meanwhile, or none is free.
            assert!(held.pieces.len() <= pieces.next_multiple_of(2));
            assert!(held.free >= AHEAD);
        }
    }
}
