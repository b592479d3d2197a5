//! Guest RAM: bitmaps, page scans, snapshots, and the methods of placing pages into it.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod bitmap;
pub mod checksum;
pub mod compare;
pub mod copy;
pub mod cpu;
pub mod delta;
pub mod dirty;
pub mod discard;
mod fold;
pub mod guest_process;
pub mod holes;
pub mod huge;
mod load;
pub mod mappings;
pub mod missing;
pub mod node;
pub mod normal_page_ratio;
mod own_files;
mod pagemap_scan;
pub mod place;
mod process_memory;
pub mod ram;
pub mod raw;
pub mod received;
pub mod scan;
pub mod snapshot;
pub mod userfault;

#[cfg(test)]
mod test_util;

/// Bytes of a page: the unit of dirty logs, bitmaps and packets, also where the host backs guest RAM with larger pages.
pub const PAGE_SIZE: usize = 4096;
