//! The only source of random numbers of a simulated network: all follow from the seed.

use std::ops::Range;

/// A sequence of numbers that is determined by its seed (SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub(in crate::transport) struct Seeded(u64);

impl Seeded {
    /// Sequence `number` of those that follow from `seed`.
    pub(in crate::transport) fn new(seed: u64, number: u64) -> Self {
        let mut mixed = Self(seed ^ Self(number).next());
        mixed.next();
        mixed
    }

    pub(in crate::transport) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number of `range`, or its start if the range is empty. The bias of the modulus does not matter here.
    pub(in crate::transport) fn of(&mut self, range: &Range<u64>) -> u64 {
        range.start + self.next() % range.end.saturating_sub(range.start).max(1)
    }

    /// Returns how many of `most` bytes one read returns (at least one). One read in eight returns very few, so that
    /// messages are split at any point; the others return any number.
    pub(in crate::transport) fn piece(&mut self, most: usize) -> usize {
        let most = if self.next().is_multiple_of(8) { most.min(16) } else { most };
        1 + (self.next() % most as u64) as usize
    }
}
