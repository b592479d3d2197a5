//! A device with a large state of its own: memory beside guest RAM that a thread of the monitor writes while the guest runs.
//!
//! It represents a graphics card, an accelerator or a file system's back-end. A migration has the same problem with it: the state is
//! too large to be sent while the guest is paused, and changes while it is sent before. `moving.rs` implements the library's interface.

mod memory;
mod moving;

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_guest::content::mix;

use self::memory::{BLOCK, Memory};
pub use self::memory::{Verified, WrongBlock};
pub use self::moving::{LoadScratch, SaveScratch};
use crate::config::Rate;
use crate::error::Error;
use crate::pace::Pace;

/// Blocks that are written per second: 1 MiB.
const RATE: Rate = Rate::PagesPerSecond(256);
/// Pause between two bursts of writes.
const REST: Duration = Duration::from_millis(20);
/// Maximum bytes of one device: block numbers have 32 bits, and all of the memory is in this process.
const MAX_BYTES: u64 = 1 << 40;

/// A device.
pub struct Scratch {
    number: u32,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    memory: Memory,
    /// The device has content: it was filled, or loaded.
    whole: bool,
    runs: bool,
    quit: bool,
}

impl Scratch {
    /// Makes the device of this number, with this many bytes of memory and no content.
    ///
    /// # Errors
    /// [`Error::Config`] if the bytes are not whole blocks of 4 KiB, none or too many.
    pub(crate) fn new(number: u32, bytes: u64) -> Result<Self, Error> {
        let block = BLOCK as u64;
        if bytes == 0 || !bytes.is_multiple_of(block) || bytes > MAX_BYTES {
            return Err(Error::Config(format!(
                "device {number} with {bytes} bytes of memory: whole blocks of {block} up to {MAX_BYTES} are possible"
            )));
        }
        let state = State { memory: Memory::new(number, bytes / block), whole: false, runs: false, quit: false };
        Ok(Self { number, state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent even after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns its number among the machine's devices, from 0.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of its blocks of 4 KiB.
    pub fn blocks(&self) -> u64 {
        self.lock().memory.blocks()
    }

    /// Returns how many blocks were rewritten since the device was filled, on any host.
    pub fn written(&self) -> u64 {
        self.lock().memory.written()
    }

    /// Returns the errors found so far: before blocks were rewritten, when they were loaded, and by [`Scratch::verify`].
    pub fn verified(&self) -> Verified {
        self.lock().memory.verified()
    }

    /// Checks all blocks, if the device has content.
    pub fn verify(&self) {
        let mut state = self.lock();
        if state.whole {
            state.memory.verify_all();
        }
    }

    /// Returns whether the device has content.
    pub(crate) fn is_whole(&self) -> bool {
        self.lock().whole
    }

    /// Begins a new device.
    pub(crate) fn fill(&self) {
        let mut state = self.lock();
        state.memory.fill();
        state.whole = true;
    }

    pub(crate) fn resume(&self) {
        self.lock().runs = true;
        self.changed.notify_all();
    }

    /// Pauses the device. When this returns, it writes nothing.
    pub(crate) fn pause(&self) {
        self.lock().runs = false;
    }

    pub(crate) fn quit(&self) {
        self.lock().quit = true;
        self.changed.notify_all();
    }

    /// Writes, on a thread of its own, until [`Self::quit`].
    pub(crate) fn run(&self) {
        let mut pace = Pace::new();
        let mut state = self.lock();
        while !state.quit {
            if !state.runs {
                let begun = Instant::now();
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                pace.held(begun.elapsed());
                continue;
            }
            let blocks = state.memory.blocks();
            for _ in 0..pace.due(RATE, 1, Instant::now()) {
                let block = mix(state.memory.written()) % blocks;
                state.memory.rewrite(block);
            }
            state = self.changed.wait_timeout(state, REST).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
