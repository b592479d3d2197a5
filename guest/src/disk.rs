//! What the blocks of a test disk hold, and what is wrong with a page of guest RAM into which one was read.
//!
//! A block's content follows from its disk, its number and its generation, so host and guest make the same blocks. A page that
//! a disk's read must overwrite can be filled with poison before: a page that still holds poison was never written by the read,
//! or was copied to another machine before the read's data came.

use core::fmt;

use crate::content::{PAGE_BYTES, Page};
use crate::page::{Fault, Fill, Pages};

/// Bytes in a block: one block fills one page.
pub const BLOCK_BYTES: usize = PAGE_BYTES;

/// The high half of each word of poison; the low half is the number of the read that must overwrite it.
const POISON: u64 = 0x7e1d_0bad << 32;
const BLOCKS: Pages = Pages::new(Fill::Random);

/// The number in a block's stamp: disks have fewer than 2^40 blocks.
const fn index(disk: u8, block: u64) -> u64 {
    (disk as u64) << 40 | block
}

/// Writes block `block` of disk number `disk` as it is in `generation`. A new disk has
/// [`FIRST_GENERATION`](crate::page::FIRST_GENERATION) everywhere.
pub fn write_block(page: &mut Page, disk: u8, block: u64, generation: u32) {
    BLOCKS.write(page, index(disk, block), generation);
}

/// Fills `page` with the poison of read number `read`.
pub fn poison(page: &mut Page, read: u32) {
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&(POISON | u64::from(read)).to_le_bytes());
    }
}

/// What a page holds instead of its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Poison, in the whole page or in a part of it.
    Poison {
        /// The read before which the poison was written.
        read: u32,
        /// How many of the page's 512 words are poison.
        words: usize,
    },
    /// The content of another block or generation, or a damaged one.
    Fault(Fault),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Found::Poison { read, words } => write!(f, "poison of read {read} in {words} words"),
            Found::Fault(Fault::Foreign { index }) => {
                write!(f, "foreign: block {} of disk {}", index & ((1 << 40) - 1), index >> 40)
            }
            Found::Fault(fault) => fault.fmt(f),
        }
    }
}

/// Checks that `page` holds block `block` of disk number `disk` in `generation`.
///
/// # Errors
/// What it holds instead.
pub fn check_block(page: &Page, disk: u8, block: u64, generation: u32) -> Result<(), Found> {
    let Err(fault) = BLOCKS.check(page, index(disk, block), generation) else { return Ok(()) };
    let (mut words, mut read) = (0, 0);
    for word in page.as_chunks::<8>().0 {
        let word = u64::from_le_bytes(*word);
        if word & !0xffff_ffff == POISON {
            (words, read) = (words + 1, word as u32);
        }
    }
    Err(if words > 0 { Found::Poison { read, words } } else { Found::Fault(fault) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_told_from_other_blocks_disks_and_generations() {
        let mut page = [0; PAGE_BYTES];
        write_block(&mut page, 1, 7, 3);
        assert_eq!(check_block(&page, 1, 7, 3), Ok(()));
        assert_eq!(check_block(&page, 1, 7, 4), Err(Found::Fault(Fault::Stale { generation: 3 })));
        let foreign = check_block(&page, 0, 7, 3).expect_err("of another disk");
        assert_eq!(foreign.to_string(), "foreign: block 7 of disk 1");
        assert_eq!(check_block(&[0; PAGE_BYTES], 1, 7, 3), Err(Found::Fault(Fault::Lost)));
    }

    #[test]
    fn a_page_that_is_poison_in_part_is_named_so() {
        let (mut page, mut other) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        write_block(&mut page, 0, 7, 1);
        poison(&mut other, 99);
        assert_eq!(check_block(&other, 0, 7, 1), Err(Found::Poison { read: 99, words: 512 }));
        page[4080..].copy_from_slice(&other[4080..]);
        assert_eq!(check_block(&page, 0, 7, 1), Err(Found::Poison { read: 99, words: 2 }));
    }
}
