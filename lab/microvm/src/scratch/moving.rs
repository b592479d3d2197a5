//! The library's interface of a device: a source saves its state while the guest runs and at the end, and a destination loads it.
//!
//! ```text
//! magic (8), version (4), number (4), blocks (8)
//! block (8), content (4096)         any number; if a block comes twice, the later content counts
//! !0 (8), written (8), generation of each block (4 each), checksum over all of it (4)
//! ```
//! Numbers are little-endian.

use std::io::{BufRead, Read, Write};
use std::sync::Arc;

use sterna::{Ahead, DeviceId, LoadDevice, SaveDevice, VmmError};

use super::memory::BLOCK;
use super::{Scratch, State};

const MAGIC: [u8; 8] = *b"scratch\0";
const VERSION: u32 = 1;
/// In place of a block's number: marks the end of the blocks.
const END: u64 = u64::MAX;

impl Scratch {
    /// Returns the device's identity on both sides.
    pub fn id(&self) -> DeviceId {
        DeviceId::new("scratch", self.number)
    }
}

/// Saves a device's state: all blocks once, and then those written since.
pub struct SaveScratch {
    device: Arc<Scratch>,
    begun: bool,
}

impl SaveScratch {
    /// Saves this device.
    pub fn new(device: &Arc<Scratch>) -> Self {
        device.lock().memory.all_dirty();
        Self { device: Arc::clone(device), begun: false }
    }

    /// Saves dirty blocks in one pass from the first block to the last. A block that is written meanwhile may be left to the next pass.
    fn save_dirty(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        if !self.begun {
            self.begun = true;
            state.write_all(&MAGIC)?;
            state.write_all(&VERSION.to_le_bytes())?;
            state.write_all(&self.device.number.to_le_bytes())?;
            state.write_all(&self.device.blocks().to_le_bytes())?;
        }
        let (mut from, mut content) = (0, [0; BLOCK]);
        loop {
            // The lock is held for one block at a time, so the device continues to write while blocks are sent.
            let Some(block) = self.device.lock().memory.take_dirty(from, &mut content) else { return Ok(()) };
            from = block + 1;
            state.write_all(&block.to_le_bytes())?;
            state.write_all(&content)?;
        }
    }
}

impl SaveDevice for SaveScratch {
    fn save_ahead(&mut self, state: &mut dyn Write) -> Result<Ahead, VmmError> {
        self.save_dirty(state)?;
        Ok(Ahead::Later)
    }

    fn remaining(&mut self) -> u64 {
        self.device.lock().memory.dirty_bytes()
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.save_dirty(state)?;
        let (written, generations, checksum) = {
            let State { memory, .. } = &*self.device.lock();
            (memory.written(), memory.generations().to_vec(), memory.checksum())
        };
        state.write_all(&END.to_le_bytes())?;
        state.write_all(&written.to_le_bytes())?;
        for generation in generations {
            state.write_all(&generation.to_le_bytes())?;
        }
        Ok(state.write_all(&checksum.to_le_bytes())?)
    }

    fn saving_ended(&mut self) {
        // Another migration sends everything again.
        self.begun = false;
        self.device.lock().memory.all_dirty();
    }
}

/// Loads a device's state.
pub struct LoadScratch(Arc<Scratch>);

impl LoadScratch {
    /// Loads into this device, which has no content yet.
    pub fn new(device: &Arc<Scratch>) -> Self {
        Self(Arc::clone(device))
    }

    fn load_head(&self, state: &mut dyn Read) -> Result<(), VmmError> {
        let mut magic = [0; 8];
        state.read_exact(&mut magic)?;
        if magic != MAGIC {
            return Err("its state does not begin as one".into());
        }
        let version = u32::from_le_bytes(read(state)?);
        if version != VERSION {
            return Err(format!("its state is of version {version}, this program knows {VERSION}").into());
        }
        let (number, blocks) = (u32::from_le_bytes(read(state)?), u64::from_le_bytes(read(state)?));
        if (number, blocks) != (self.0.number, self.0.blocks()) {
            let (is, has) = (self.0.number, self.0.blocks());
            let theirs = format!("number {number} with {blocks} blocks");
            return Err(format!("its state is of the device of {theirs}, this one is number {is} with {has}").into());
        }
        Ok(())
    }
}

impl LoadDevice for LoadScratch {
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
        if self.0.is_whole() {
            return Err("there is something in it already".into());
        }
        self.load_head(state)?;
        let blocks = self.0.blocks();
        let mut content = [0; BLOCK];
        loop {
            let block = u64::from_le_bytes(read(state)?);
            if block == END {
                break;
            }
            if block >= blocks {
                return Err(format!("there is no block {block}: it has {blocks}").into());
            }
            state.read_exact(&mut content)?;
            self.0.lock().memory.place(block, &content);
        }
        let written = u64::from_le_bytes(read(state)?);
        let generations = (0..blocks).map(|_| read(state).map(u32::from_le_bytes)).collect::<Result<_, _>>()?;
        let expected = u32::from_le_bytes(read(state)?);
        let mut device = self.0.lock();
        device.memory.set_generations(generations, written);
        device.memory.verify_all();
        let verified = device.memory.verified();
        if let Some(first) = verified.first {
            return Err(format!("{} of its {blocks} blocks are wrong: {first}", verified.wrong).into());
        }
        let found = device.memory.checksum();
        if found != expected {
            let differs = format!("its checksum is {found:08x}, and was {expected:08x} when it was stopped");
            return Err(differs.into());
        }
        device.whole = true;
        Ok(())
    }
}

fn read<const N: usize>(state: &mut dyn Read) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    state.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Verified;

    const BLOCKS: u64 = 10;

    fn device(number: u32, blocks: u64) -> Arc<Scratch> {
        Arc::new(Scratch::new(number, blocks * BLOCK as u64).expect("whole blocks"))
    }

    fn rewrite(device: &Scratch, block: u64) {
        device.lock().memory.rewrite(block);
    }

    /// A device that is written between the looks, and its whole state.
    fn saved() -> (Arc<Scratch>, Vec<u8>) {
        let device = device(5, BLOCKS);
        device.fill();
        let mut state = Vec::new();
        let mut save = SaveScratch::new(&device);
        assert_eq!(save.remaining(), BLOCKS * BLOCK as u64);
        assert_eq!(save.save_ahead(&mut state).expect("taken"), Ahead::Later);
        assert_eq!(save.remaining(), 0);
        [3, 7, 3].iter().for_each(|&block| rewrite(&device, block));
        assert_eq!(save.remaining(), 2 * BLOCK as u64);
        save.save_ahead(&mut state).expect("taken");
        rewrite(&device, 9);
        save.save(&mut state).expect("taken");
        (device, state)
    }

    fn load(into: &Arc<Scratch>, state: &[u8]) -> Result<(), String> {
        let mut rest = state;
        LoadScratch::new(into).load(&mut rest).map_err(|error| error.to_string())?;
        assert!(rest.is_empty());
        Ok(())
    }

    #[test]
    fn what_was_written_between_looks_arrives_and_the_device_goes_on() {
        let (from, state) = saved();
        let repeated = 8 + BLOCK;
        let end = 8 + 8 + 4 * BLOCKS as usize + 4;
        assert_eq!(state.len(), 24 + (BLOCKS as usize + 2 + 1) * repeated + end);
        let to = device(5, BLOCKS);
        load(&to, &state).expect("whole");
        assert_eq!(to.verified(), Verified { blocks: BLOCKS, wrong: 0, first: None });
        assert_eq!((to.written(), to.lock().memory.checksum()), (4, from.lock().memory.checksum()));
        rewrite(&to, 3);
        to.verify();
        assert_eq!((to.verified().wrong, to.written()), (0, 5));
        assert_eq!(load(&to, &state).expect_err("refused"), "there is something in it already");
    }

    #[test]
    fn a_device_that_was_stopped_at_once_and_one_that_saves_nothing_ahead_arrive() {
        let from = device(0, 1);
        from.fill();
        let mut state = Vec::new();
        SaveScratch::new(&from).save(&mut state).expect("taken");
        // And once more, after a migration that failed.
        state.clear();
        SaveScratch::new(&from).save(&mut state).expect("taken");
        let to = device(0, 1);
        load(&to, &state).expect("whole");
        assert!(to.is_whole());
    }

    #[test]
    fn a_block_that_is_older_than_when_the_device_was_stopped_is_found() {
        let (_, mut state) = saved();
        // The last block that was saved is the one that was written last.
        let end = state.len() - (8 + 8 + 4 * BLOCKS as usize + 4);
        state.drain(end - 8 - BLOCK..end);
        let to = device(5, BLOCKS);
        let error = load(&to, &state).expect_err("found");
        assert_eq!(error, "1 of its 10 blocks are wrong: block 9 is stale: generation 1");
        assert_eq!((to.verified().wrong, to.is_whole()), (1, false));
    }

    #[test]
    fn a_state_that_is_none_of_this_device_is_refused_in_words() {
        let (_, state) = saved();
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut state = state.clone();
            change(&mut state);
            load(&device(5, BLOCKS), &state).expect_err("refused")
        };
        type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
        let last = state.len() - 1;
        let cases: [(Change<'_>, &str); 7] = [
            (&|state| state[0] = 0, "does not begin as one"),
            (&|state| state[8] = 2, "version 2"),
            (&|state| state[12] = 4, "number 4 with 10 blocks, this one is number 5 with 10"),
            (&|state| state[24 + 7] = 1, "there is no block 72057594037927936"),
            (&|state| state[24 + 8 + 100] ^= 1, "block 0 is corrupt"),
            (&|state| state[last] ^= 1, "checksum"),
            (&|state| state.truncate(last), "failed to fill whole buffer"),
        ];
        for (change, words) in cases {
            let error = refused(change);
            assert!(error.contains(words), "{error}");
        }
    }
}
