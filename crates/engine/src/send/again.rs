//! Retransmission of pages that did not arrive as they were read: the destination has refused their packets, and they are read by the CPU
//! and sent uncompressed.
//!
//! Whatever damaged them (an accelerator that copies or compresses wrongly, memory, the network below TCP's checksum) ends
//! the migration only if it happens again and again.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use sterna_memory::bitmap::AtomicPageBitmap;
use sterna_wire::packet::{BlockShape, PageRequest};

/// Maximum number of packets of one migration that may be refused. A path or a host that damages more must not be trusted with a
/// guest, and a destination that refuses without end is faulty.
pub const MAX_REFUSED: u32 = 64;

/// The destination has refused more than [`MAX_REFUSED`] packets.
#[derive(Debug, thiserror::Error)]
#[error(
    "the destination has refused more than {MAX_REFUSED} packets, whose content is not what was read from the guest: an \
     accelerator, the memory or the network of one of the two hosts damages data"
)]
pub struct TooManyRefused;

/// The pages of one guest to retransmit.
#[derive(Debug)]
pub struct Retransmit {
    shapes: Vec<BlockShape>,
    pages: Vec<AtomicPageBitmap>,
    /// Refused pages that have not been retransmitted: the destination does not have the content that was sent of them.
    stale: Vec<AtomicPageBitmap>,
    any: AtomicBool,
    packets: AtomicU32,
}

impl Retransmit {
    /// Makes an empty list for a guest with these blocks.
    pub fn none_of(shapes: Vec<BlockShape>) -> Self {
        let none = || shapes.iter().map(|block| AtomicPageBitmap::new(block.pages)).collect();
        Self { pages: none(), stale: none(), shapes, any: AtomicBool::new(false), packets: AtomicU32::new(0) }
    }

    /// Returns the shapes of the blocks, against which requests are checked.
    pub(super) fn shapes(&self) -> &[BlockShape] {
        &self.shapes
    }

    /// Counts a refused packet.
    pub(super) fn packet(&self) -> Result<(), TooManyRefused> {
        let before = self.packets.fetch_add(1, Ordering::Relaxed);
        if before < MAX_REFUSED { Ok(()) } else { Err(TooManyRefused) }
    }

    /// Adds pages of a refused packet.
    pub(super) fn add(&self, request: &PageRequest) {
        let pages = request.first..request.first + u64::from(request.count);
        self.stale[usize::from(request.block)].set(pages.clone());
        self.pages[usize::from(request.block)].set(pages);
        self.any.store(true, Ordering::Release);
    }

    /// Returns whether the content that was sent last of `page` may have been refused.
    pub(super) fn is_stale(&self, block: u16, page: u64) -> bool {
        self.stale[usize::from(block)].contains(page)
    }

    /// Records that these pages are about to be retransmitted.
    pub(super) fn mark_resent(&self, block: u16, pages: Range<u64>) {
        self.stale[usize::from(block)].clear(pages);
    }

    /// Returns how many packets were refused so far.
    pub fn packets(&self) -> u32 {
        self.packets.load(Ordering::Relaxed)
    }

    /// Removes all pages from the list and calls `run` for each run of them. Returns how many pages there were.
    pub fn take(&self, mut run: impl FnMut(u16, Range<u64>)) -> u64 {
        if !self.any.swap(false, Ordering::Acquire) {
            return 0;
        }
        let mut taken = 0;
        for (number, pages) in self.pages.iter().enumerate() {
            pages.take_runs(0..pages.pages(), |pages| {
                taken += pages.end - pages.start;
                run(number as u16, pages);
            });
        }
        taken
    }
}
