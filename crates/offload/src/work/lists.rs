//! The memory through which a request and a device communicate: descriptors, one record per item for the members of
//! batches, and one record per part for what is submitted.

use std::sync::atomic::{AtomicU64, Ordering};

use sterna_idxd::{CompletionRecord, Descriptor, Status, iaa, record_offset};

use crate::arena::Slab;
use crate::work::{PARTS, Shape};

/// Bytes of a descriptor, and of a part's record: the larger of the two kinds.
const LINE: usize = 64;
/// Bytes of a member's record.
const MEMBER: usize = 32;

/// The lists of a request.
#[derive(Debug)]
pub(crate) struct Lists {
    slab: Slab,
    items: usize,
}

impl Lists {
    pub(crate) fn new(shape: Shape) -> Self {
        let bytes = shape.pages * (LINE + MEMBER) + LINE + PARTS * LINE;
        Self { slab: Slab::new(bytes, shape.node), items: shape.pages }
    }

    /// Returns its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.slab.bytes()
    }

    /// Returns the descriptor of item `item`.
    pub(crate) fn descriptor(&self, item: usize) -> *mut Descriptor {
        assert!(item < self.items);
        self.slab.pointer().wrapping_add(item * LINE).cast()
    }

    /// Returns the record of item `item`, which is a member of a batch.
    pub(crate) fn member(&self, item: usize) -> &CompletionRecord {
        assert!(item < self.items);
        let at = self.items * LINE + item * MEMBER;
        // SAFETY: within the slab (see `new`), 32-byte aligned as both factors are, initialised (zero at first), and a record
        // is made of atomics: the device may write it at any time.
        unsafe { &*self.slab.pointer().wrapping_add(at).cast::<CompletionRecord>() }
    }

    /// Returns the result of item `item`, a member of a batch, if it was done completely. Reads one word.
    pub(crate) fn member_result(&self, item: usize) -> Option<u8> {
        let word = std::ptr::from_ref(self.member(item)).cast::<AtomicU64>();
        // SAFETY: a record is made of such words, and begins with one.
        let bytes = unsafe { &*word }.load(Ordering::Acquire).to_le_bytes();
        Status::from_code(bytes[record_offset::STATUS]).is_done().then_some(bytes[record_offset::RESULT])
    }

    /// Returns the record of part `part`, as a DSA device writes it.
    pub(crate) fn part(&self, part: usize) -> &CompletionRecord {
        // SAFETY: as for `member`; 64 bytes each.
        unsafe { &*self.part_at(part).cast::<CompletionRecord>() }
    }

    /// Returns the record of part `part`, as an IAA device writes it.
    pub(crate) fn iaa_part(&self, part: usize) -> &iaa::CompletionRecord {
        // SAFETY: as above.
        unsafe { &*self.part_at(part).cast::<iaa::CompletionRecord>() }
    }

    /// Returns the descriptor of item `item`, for the trace.
    pub(crate) fn descriptor_bytes(&self, item: usize) -> [u8; LINE] {
        // SAFETY: inside the slab, aligned, initialised; devices only read descriptors.
        unsafe { *(*self.descriptor(item)).as_bytes() }
    }

    /// Returns the record of item `item`, for the trace.
    pub(crate) fn member_bytes(&self, item: usize) -> [u8; MEMBER] {
        let words = std::ptr::from_ref(self.member(item)).cast::<AtomicU64>();
        let mut bytes = [0; MEMBER];
        for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            // SAFETY: four aligned words, which only ever are accessed as atomics here.
            chunk.copy_from_slice(&unsafe { &*words.add(at) }.load(Ordering::Acquire).to_ne_bytes());
        }
        bytes
    }

    /// Returns the record of part `part`, for the trace.
    pub(crate) fn part_bytes(&self, part: usize) -> [u8; LINE] {
        let words = self.part_at(part).cast::<AtomicU64>();
        let mut bytes = [0; LINE];
        for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            // SAFETY: eight aligned words inside the slab, which only ever are accessed as atomics here.
            chunk.copy_from_slice(&unsafe { &*words.add(at) }.load(Ordering::Acquire).to_ne_bytes());
        }
        bytes
    }

    fn part_at(&self, part: usize) -> *mut u8 {
        assert!(part < PARTS);
        let members = (self.items * (LINE + MEMBER)).next_multiple_of(LINE);
        self.slab.pointer().wrapping_add(members + part * LINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_everything_is_aligned_and_inside() {
        for pages in [1, 3, 128, 1024] {
            let lists = Lists::new(Shape { pages, device: true, node: None });
            let start = lists.slab.pointer().addr();
            let mut parts = Vec::new();
            for item in 0..pages {
                parts.push((lists.descriptor(item).addr() - start, LINE));
                parts.push((lists.member(item).address() as usize - start, MEMBER));
            }
            for part in 0..PARTS {
                parts.push((lists.part(part).address() as usize - start, LINE));
            }
            parts.sort_unstable();
            assert!(parts.iter().all(|(at, bytes)| at.is_multiple_of(*bytes)));
            assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
            assert!(parts.last().unwrap().0 + LINE <= lists.bytes());
        }
    }
}
