//! What a process says of itself, and the table of all that do.

use super::super::MAX_WEIGHT;

/// One process, as it says. Words of 64 bits, so that a reader sees an old one or a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Weight of the VMs that are active in it; 0 in a free slot.
    pub weight: u64,
    /// Device time in flight, in nanoseconds.
    pub in_flight: u64,
    /// Device time wanted; 0 when it waits for nothing.
    pub wants: u64,
    /// Start tag of the batch that waits, or of the last one that went.
    pub start: u64,
    /// When the device will have done all that is in flight, on the system's monotonic clock.
    pub until: u64,
    /// When it will ask again for what it wants, on the same clock.
    pub again: u64,
    /// Changes with every word that is written: who waits and is alive is seen to be.
    pub beat: u64,
}

/// Words of a slot.
pub(super) const WORDS: usize = 7;

impl Slot {
    /// From what lies in the table, whatever it is.
    pub fn from_words(words: [u64; WORDS]) -> Self {
        let [weight, in_flight, wants, start, until, again, beat] = words;
        Self { weight, in_flight, wants, start, until, again, beat }
    }

    /// As it lies in the table.
    pub fn words(&self) -> [u64; WORDS] {
        [self.weight, self.in_flight, self.wants, self.start, self.until, self.again, self.beat]
    }

    pub(super) fn active(&self) -> bool {
        self.weight > 0 && (self.in_flight > 0 || self.wants > 0)
    }

    pub(super) fn weight(&self) -> u64 {
        // A process of many VMs has the weight of all; no more than a hundred of the heaviest.
        self.weight.clamp(1, u64::from(MAX_WEIGHT) * 100)
    }
}

/// Where the slots lie. Words are read and written one by one; nothing holds several of them together.
pub trait Table: Send {
    /// How many slots there are.
    fn slots(&self) -> usize;

    /// The slot that this process holds.
    fn own(&self) -> usize;

    /// Reads all slots. What cannot be read is free.
    fn read(&self, slots: &mut [Slot]);

    /// Writes the own slot.
    fn write(&self, slot: &Slot);

    /// Whether the owner of a slot still lives. One that does not is cleared.
    fn alive(&self, index: usize) -> bool;
}
