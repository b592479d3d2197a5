//! The slot in which a process publishes its state, and the table of all slots.

use super::super::MAX_WEIGHT;

/// The state of one process, as published. Words of 64 bits, so that a reader gets an old or a new value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Weight of the VMs that are active in it; 0 in a free slot.
    pub weight: u64,
    /// Device time in flight, in nanoseconds.
    pub in_flight: u64,
    /// Device time wanted; 0 when no batch waits.
    pub wants: u64,
    /// Start tag of the waiting batch, or of the last one admitted.
    pub start: u64,
    /// When the device will have done everything in flight, on the system's monotonic clock.
    pub until: u64,
    /// When the process will ask again, on the same clock.
    pub again: u64,
    /// Changes with every write: shows that a waiting process is alive.
    pub beat: u64,
}

/// Words of a slot.
pub(super) const WORDS: usize = 7;

impl Slot {
    /// Makes a slot from the words of the table, whatever they contain.
    pub fn from_words(words: [u64; WORDS]) -> Self {
        let [weight, in_flight, wants, start, until, again, beat] = words;
        Self { weight, in_flight, wants, start, until, again, beat }
    }

    /// Returns the words for the table.
    pub fn words(&self) -> [u64; WORDS] {
        [self.weight, self.in_flight, self.wants, self.start, self.until, self.again, self.beat]
    }

    pub(super) fn active(&self) -> bool {
        self.weight > 0 && (self.in_flight > 0 || self.wants > 0)
    }

    pub(super) fn weight(&self) -> u64 {
        // A process of many VMs has the weight of all; at most that of a hundred of the heaviest.
        self.weight.clamp(1, u64::from(MAX_WEIGHT) * 100)
    }
}

/// Access to the slots. Words are read and written individually; several words are not consistent with each other.
pub trait Table: Send {
    /// Returns how many slots there are.
    fn slots(&self) -> usize;

    /// Returns the slot that this process holds.
    fn own(&self) -> usize;

    /// Reads all slots. A slot that cannot be read counts as free.
    fn read(&self, slots: &mut [Slot]);

    /// Writes this process's slot.
    fn write(&self, slot: &Slot);

    /// Returns whether the owner of a slot is alive. The slot of a dead owner is cleared.
    fn alive(&self, index: usize) -> bool;
}
