//! Deltas at a source that cannot read its pages again, as a gateway that has received them from its QEMU.
//!
//! The destination accepts deltas of some blocks only (QEMU's own stream has no place for them), and sends their numbers when it knows its
//! blocks. A refused page cannot be read again. So until a page is acknowledged its channel keeps a copy, in the cache for deltas or
//! besides ([`super::delta`]), and retransmits the page from there ([`super::retransmit`]).

use std::sync::OnceLock;

use sterna_wire::packet::BlockShape;

/// The RAM blocks of which deltas are sent.
#[derive(Debug, Default)]
pub struct DeltaBlocks {
    /// Set before the first page is sent.
    agreed: OnceLock<AgreedBlocks>,
}

#[derive(Debug)]
struct AgreedBlocks {
    /// The blocks, by number.
    shapes: Vec<BlockShape>,
    /// Whether the destination accepts deltas of each block.
    accepted: Vec<bool>,
    /// Maximum bytes that a channel keeps.
    cache: usize,
}

impl DeltaBlocks {
    /// Sets the guest's blocks `shapes`, the numbers of those whose deltas the destination has `accepted`, and the bytes `cache` that all
    /// `channels` may keep together. Returns the maximum that they will keep. Only the first call counts.
    pub fn set(&self, shapes: Vec<BlockShape>, accepted: &[u16], cache: u64, channels: u16) -> u64 {
        let accepted: Vec<_> =
            (0..shapes.len()).map(|number| accepted.iter().any(|block| usize::from(*block) == number)).collect();
        let with_deltas = shapes.iter().zip(&accepted).filter(|(_, accepted)| **accepted);
        let bytes: u64 = with_deltas.map(|(shape, _)| shape.pages.saturating_mul(shape.page_size.into())).sum();
        // More than all pages and some spare places is of no use. Without the spare ones, one page in fifty would find all of its possible
        // places occupied.
        let places = cache.min(bytes.saturating_add(bytes / 8)) / u64::from(channels.max(1));
        let agreed = AgreedBlocks { shapes, accepted, cache: usize::try_from(places).unwrap_or(usize::MAX) };
        // A later call must not change what pages may have been sent by.
        let _ = self.agreed.set(agreed);
        cache.min(bytes)
    }

    /// Returns whether deltas of `block` may be sent.
    pub(super) fn accepts(&self, block: u16) -> bool {
        self.agreed.get().and_then(|agreed| agreed.accepted.get(usize::from(block))).copied().unwrap_or(false)
    }

    /// Returns the maximum bytes that a channel keeps.
    pub(super) fn cache(&self) -> usize {
        self.agreed.get().map_or(0, |agreed| agreed.cache)
    }

    /// Returns the shapes of the blocks, against which requests are checked.
    pub(super) fn shapes(&self) -> &[BlockShape] {
        self.agreed.get().map_or(&[], |agreed| &agreed.shapes)
    }
}
