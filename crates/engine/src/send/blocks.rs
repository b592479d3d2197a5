//! Deltas at a source that has its pages from somebody else, as a gateway has them from its QEMU.
//!
//! The destination takes deltas of some blocks only (QEMU's own stream has no place for them), and says of which when it knows its
//! blocks. And a page that was refused cannot be read again: until a page is acknowledged its channel has it, in the cache for deltas or
//! besides ([`super::delta`]), and sends it again from there.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use sterna_wire::packet::BlockShape;

use super::{MOST_REFUSED, TooManyRefused};

/// Of which RAM blocks deltas are sent.
#[derive(Debug, Default)]
pub struct DeltaBlocks {
    /// Known before the first page is sent.
    known: OnceLock<Known>,
    refused: AtomicU32,
}

#[derive(Debug)]
struct Known {
    /// By number: the blocks.
    shapes: Vec<BlockShape>,
    /// Whether the destination takes deltas of them.
    takes: Vec<bool>,
    /// Most bytes that a channel keeps.
    cache: usize,
}

/// The destination has refused a page that was not in the packet it names.
#[derive(Debug, thiserror::Error)]
#[error(
    "the destination asks again for page {page} of RAM block {block}, which was not in the packet that it refuses; its sterna, or the \
     memory of one of the two hosts, is at fault"
)]
pub(super) struct NotInIt {
    pub(super) block: u16,
    pub(super) page: u64,
}

impl DeltaBlocks {
    /// The guest's blocks are `shapes`, deltas are taken of those whose numbers are in `taken`, and the `channels` may keep `cache`
    /// bytes together. Gives how many they will keep at most. What is said again later does not count.
    pub fn set(&self, shapes: Vec<BlockShape>, taken: &[u16], cache: u64, channels: u16) -> u64 {
        let takes: Vec<_> =
            (0..shapes.len()).map(|number| taken.iter().any(|block| usize::from(*block) == number)).collect();
        let of_taken = shapes.iter().zip(&takes).filter(|(_, takes)| **takes);
        let bytes: u64 = of_taken.map(|(shape, _)| shape.pages.saturating_mul(shape.page_size.into())).sum();
        // More than all of them and some places to spare is of no use: with as many, one page in fifty would find those taken that it
        // may have.
        let places = cache.min(bytes.saturating_add(bytes / 8)) / u64::from(channels.max(1));
        let known = Known { shapes, takes, cache: usize::try_from(places).unwrap_or(usize::MAX) };
        // Pages may have gone by what was said first.
        let _ = self.known.set(known);
        cache.min(bytes)
    }

    /// Whether deltas of `block` may be sent.
    pub(super) fn take(&self, block: u16) -> bool {
        self.known.get().and_then(|known| known.takes.get(usize::from(block))).copied().unwrap_or(false)
    }

    /// Most bytes that a channel keeps.
    pub(super) fn cache(&self) -> usize {
        self.known.get().map_or(0, |known| known.cache)
    }

    /// By block, what requests are checked against.
    pub(super) fn shapes(&self) -> &[BlockShape] {
        self.known.get().map_or(&[], |known| &known.shapes)
    }

    /// A packet was refused.
    pub(super) fn packet(&self) -> Result<(), TooManyRefused> {
        let before = self.refused.fetch_add(1, Ordering::Relaxed);
        if before < MOST_REFUSED { Ok(()) } else { Err(TooManyRefused) }
    }

    /// Packets refused so far.
    pub fn packets(&self) -> u32 {
        self.refused.load(Ordering::Relaxed).min(MOST_REFUSED)
    }
}
