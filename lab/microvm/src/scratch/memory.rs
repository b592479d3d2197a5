//! The memory of a device: blocks of known content, and which of them a migration still has to save.
//!
//! A block's content follows from the device, the block and how often it was written (its generation), like that of the guest's pages
//! (`guest/src/page.rs`). The generations are also in a table, so that a lost, damaged, misplaced or stale block is detected.

use std::fmt;

use sterna::PageBitmap;
use sterna_guest::content::Page;
use sterna_guest::page::{FIRST_GENERATION, Fault, Fill, Pages};
use sterna_memory::checksum::Crc32c;

/// Bytes of a block.
pub(super) const BLOCK: usize = size_of::<Page>();

/// All of one device.
pub(super) struct Memory {
    device: u32,
    blocks: Vec<Page>,
    generations: Vec<u32>,
    /// Blocks written since they were last saved.
    dirty: PageBitmap,
    written: u64,
    verified: Verified,
}

/// The result of checking a device's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks checked; a block that was checked twice counts twice.
    pub blocks: u64,
    /// Wrong ones, likewise.
    pub wrong: u64,
    /// The first wrong one.
    pub first: Option<WrongBlock>,
}

/// A block that does not have its last written content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongBlock {
    /// Its number.
    pub block: u64,
    /// How its content differs.
    pub fault: Fault,
}

impl fmt::Display for WrongBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} is {}", self.block, self.fault)
    }
}

impl Memory {
    /// Makes a memory of zeros, which is no valid content.
    pub(super) fn new(device: u32, blocks: u64) -> Self {
        Self {
            device,
            blocks: vec![[0; BLOCK]; blocks as usize],
            generations: vec![0; blocks as usize],
            dirty: PageBitmap::new(blocks),
            written: 0,
            verified: Verified::default(),
        }
    }

    pub(super) fn blocks(&self) -> u64 {
        self.generations.len() as u64
    }

    /// Returns the number of blocks rewritten since the beginning.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn verified(&self) -> Verified {
        self.verified.clone()
    }

    /// Returns the number of a block for its content. Each device has other numbers, so that blocks of two devices differ.
    fn number(&self, block: u64) -> u64 {
        (u64::from(self.device) << 32) | block
    }

    fn content() -> Pages {
        Pages::new(Fill::Random)
    }

    fn write(&mut self, block: u64, generation: u32) {
        let number = self.number(block);
        Self::content().write(&mut self.blocks[block as usize], number, generation);
        self.generations[block as usize] = generation;
        self.dirty.set(block..block + 1);
    }

    /// Writes all blocks for the first time.
    pub(super) fn fill(&mut self) {
        (0..self.blocks()).for_each(|block| self.write(block, FIRST_GENERATION));
    }

    /// Rewrites a block, after checking its content.
    pub(super) fn rewrite(&mut self, block: u64) {
        self.verify(block);
        let generation = self.generations[block as usize].wrapping_add(1).max(FIRST_GENERATION);
        self.write(block, generation);
        // A number from another host may have any value.
        self.written = self.written.wrapping_add(1);
    }

    fn verify(&mut self, block: u64) {
        let (page, generation) = (&self.blocks[block as usize], self.generations[block as usize]);
        self.verified.blocks += 1;
        if let Err(fault) = Self::content().check(page, self.number(block), generation) {
            self.verified.wrong += 1;
            self.verified.first.get_or_insert(WrongBlock { block, fault });
        }
    }

    /// Checks all blocks.
    pub(super) fn verify_all(&mut self) {
        (0..self.blocks()).for_each(|block| self.verify(block));
    }

    /// Marks all blocks as to be saved.
    pub(super) fn all_dirty(&mut self) {
        let blocks = self.blocks();
        self.dirty.set(0..blocks);
    }

    /// Returns the number of bytes to be saved.
    pub(super) fn dirty_bytes(&self) -> u64 {
        self.dirty.count() * BLOCK as u64
    }

    /// Returns the first block from `from` on that is to be saved, with its content, and marks it as saved.
    pub(super) fn take_dirty(&mut self, from: u64, content: &mut Page) -> Option<u64> {
        let block = self.dirty.next_run(from, 1)?.start;
        self.dirty.clear(block..block + 1);
        *content = self.blocks[block as usize];
        Some(block)
    }

    /// Returns the generations, which are saved last.
    pub(super) fn generations(&self) -> &[u32] {
        &self.generations
    }

    /// Sets a block's content from another host; it is checked once the generations have arrived.
    pub(super) fn place(&mut self, block: u64, content: &Page) {
        self.blocks[block as usize] = *content;
    }

    /// Sets the counters and generations from another host.
    pub(super) fn set_generations(&mut self, generations: Vec<u32>, written: u64) {
        assert_eq!(generations.len(), self.generations.len());
        (self.generations, self.written) = (generations, written);
    }

    /// Returns the checksum over all blocks and generations.
    pub(super) fn checksum(&self) -> u32 {
        let mut checksum = Crc32c::new();
        checksum.update(self.blocks.as_flattened());
        self.generations.iter().for_each(|generation| checksum.update(&generation.to_le_bytes()));
        checksum.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(device: u32) -> Memory {
        let mut memory = Memory::new(device, 10);
        memory.fill();
        memory
    }

    #[test]
    fn every_way_in_which_a_block_can_be_wrong_is_told() {
        let found = |change: &dyn Fn(&mut Memory)| {
            let mut memory = filled(3);
            memory.rewrite(4);
            change(&mut memory);
            memory.verify_all();
            let Verified { blocks, wrong, first } = memory.verified();
            assert_eq!((blocks, wrong), (11, u64::from(first.is_some())));
            first.map(|first| first.to_string())
        };
        assert_eq!(found(&|_| ()), None);
        assert_eq!(found(&|memory| memory.blocks[4] = [0; BLOCK]).unwrap(), "block 4 is lost: zeros");
        assert_eq!(found(&|memory| memory.blocks[4] = filled(3).blocks[4]).unwrap(), "block 4 is stale: generation 1");
        assert_eq!(
            found(&|memory| memory.blocks[4] = memory.blocks[5]).unwrap(),
            "block 4 is foreign: page 12884901893"
        );
        assert!(found(&|memory| memory.blocks[4] = filled(2).blocks[4]).unwrap().contains("foreign"));
        assert!(found(&|memory| memory.blocks[9][4000] ^= 1).unwrap().contains("block 9 is corrupt"));
        // Also where it is overwritten before anybody looks at all of them.
        let mut memory = filled(3);
        memory.blocks[7] = [0; BLOCK];
        memory.rewrite(7);
        assert_eq!(memory.verified().wrong, 1);
    }

    #[test]
    fn what_was_written_is_taken_once_until_it_is_written_again() {
        let mut memory = filled(0);
        let taken = |memory: &mut Memory| {
            let (mut blocks, mut from) = (Vec::new(), 0);
            while let Some(block) = memory.take_dirty(from, &mut [0; BLOCK]) {
                blocks.push(block);
                from = block + 1;
            }
            blocks
        };
        assert_eq!(memory.dirty_bytes(), 10 * BLOCK as u64);
        assert_eq!(taken(&mut memory), (0..10).collect::<Vec<_>>());
        memory.rewrite(8);
        memory.rewrite(2);
        memory.rewrite(8);
        assert_eq!(memory.dirty_bytes(), 2 * BLOCK as u64);
        assert_eq!((taken(&mut memory), memory.dirty_bytes(), memory.written()), (vec![2, 8], 0, 3));
        memory.all_dirty();
        assert_eq!(memory.dirty_bytes(), 10 * BLOCK as u64);
    }

    #[test]
    fn the_checksum_is_over_content_and_generations() {
        let mut memory = filled(0);
        let right = memory.checksum();
        assert_eq!(right, filled(0).checksum());
        memory.blocks[9][4095] ^= 1;
        let damaged = memory.checksum();
        memory.blocks[9][4095] ^= 1;
        memory.generations[0] += 1;
        assert!(![damaged, memory.checksum()].contains(&right));
    }
}
