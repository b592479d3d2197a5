//! A device with a large state of its own: memory beside guest RAM that a thread of the monitor writes while the guest runs.
//!
//! It stands for what a graphics card, an accelerator or a file system's back-end keeps. Of a migration it asks what they ask: the
//! state is too much to be sent while the guest stands, and goes on changing while it is sent ahead. `moving.rs` is what the library sees of it.

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
/// Between two goes.
const REST: Duration = Duration::from_millis(20);
/// The most memory of one device: numbers of blocks have 32 bits, and all of it is in this process.
const MOST: u64 = 1 << 40;

/// A device.
pub struct Scratch {
    number: u32,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    memory: Memory,
    /// Its content is that of a device: it was filled, or loaded.
    whole: bool,
    runs: bool,
    quit: bool,
}

impl Scratch {
    /// The device of that number, with so many bytes of memory and nothing in it.
    ///
    /// # Errors
    /// [`Error::Config`] where they are no whole blocks of 4 KiB, none or too many.
    pub(crate) fn new(number: u32, bytes: u64) -> Result<Self, Error> {
        let block = BLOCK as u64;
        if bytes == 0 || !bytes.is_multiple_of(block) || bytes > MOST {
            return Err(Error::Config(format!(
                "device {number} with {bytes} bytes of memory: whole blocks of {block} up to {MOST} are possible"
            )));
        }
        let state = State { memory: Memory::new(number, bytes / block), whole: false, runs: false, quit: false };
        Ok(Self { number, state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What is in there is as good after a panic as before.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which of the machine's devices it is, from 0.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Blocks of 4 KiB.
    pub fn blocks(&self) -> u64 {
        self.lock().memory.blocks()
    }

    /// Blocks that were written again since the device was filled, wherever that was.
    pub fn written(&self) -> u64 {
        self.lock().memory.written()
    }

    /// What was found wrong so far: before blocks were written again, when they were loaded, and by [`Scratch::verify`].
    pub fn verified(&self) -> Verified {
        self.lock().memory.verified()
    }

    /// Looks at all blocks, if there is anything in them.
    pub fn verify(&self) {
        let mut state = self.lock();
        if state.whole {
            state.memory.verify_all();
        }
    }

    /// Whether there is anything in it.
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

    /// When this returns nothing is written any more.
    pub(crate) fn pause(&self) {
        self.lock().runs = false;
    }

    pub(crate) fn quit(&self) {
        self.lock().quit = true;
        self.changed.notify_all();
    }

    /// Writes until [`Self::quit`]; on a thread of its own.
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
