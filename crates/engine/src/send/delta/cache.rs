//! The pages that a channel has sent, in memory of bounded size.
//!
//! The cache is set-associative: there is no index to grow, and a page has twice [`WAYS`] possible places. Where all are occupied most new
//! pages get none, and pages whose deltas have paid stay longest. Otherwise a guest that writes more memory than fits the cache, in the same
//! order in each round, would replace every page just before it is needed.
//!
//! Neighbouring pages have neighbouring sets, and of neighbouring sets the same ways lie next to each other: so pages that are sent
//! together are found, and mostly lie, together.

use sterna_memory::PAGE_SIZE;
use sterna_memory::delta::DeltaError;
use sterna_offload::Range;

use super::device_readable::DeviceReadable;

/// Places of a set; a page may be kept in either of two sets.
const WAYS: usize = 8;
/// One in so many new pages that find no free place gets an occupied one.
const ADMITTED: u32 = 8;
/// Maximum number of neighbouring sets that lie together.
const MAX_TOGETHER: usize = 64;
/// Stands for the number of a packet that has none yet.
const THIS_BATCH: u64 = u64::MAX;
/// Stands for the packet of a place that was never used.
const NEVER: u64 = 0;
/// Minimum number of groups of neighbours, where there are enough sets: sets that fill no group are not used.
const MIN_GROUPS: usize = 16;

/// Which page is kept in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
    const NONE: Self = Self(u64::MAX);

    /// Pages have 40 bits on the wire, blocks 16.
    pub(super) fn new(block: u16, page: u64) -> Self {
        Self(u64::from(block) << 40 | page)
    }
}

/// What is kept in the places of a set: a line of the CPU's cache.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Keys([Key; WAYS]);

impl Keys {
    fn find(&self, key: Key) -> Option<usize> {
        // All of them: that is fewer instructions than looking for the first.
        let found = (0..WAYS).fold(0u32, |found, way| found | u32::from(self.0[way] == key) << way);
        (found != 0).then(|| found.trailing_zeros() as usize)
    }
}

/// A place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The packet that had this content.
    pub(super) sequence: u64,
    /// Whether a delta against it has paid since another page last asked for the place.
    pub(super) paid: bool,
}

/// The pages that a channel has sent.
#[derive(Debug)]
pub(super) struct Cache {
    keys: Vec<Keys>,
    places: Vec<[Place; WAYS]>,
    content: DeviceReadable,
    /// Sets of neighbouring pages that lie together.
    together: usize,
    kept: usize,
    /// How many places were ever used: using another one touches memory for the first time.
    touched: usize,
    /// How many new pages found no free place.
    turned_away: u32,
    /// Whether there was no memory for the cache.
    lacks_memory: bool,
}

impl Cache {
    /// Makes a cache of at most `bytes`. It holds nothing where there is not so much memory: a lack of memory for deltas must not abort the
    /// process, which may be the guest's own monitor.
    pub(super) fn new(bytes: usize) -> Self {
        let sets = bytes / (WAYS * PAGE_SIZE);
        let together = (sets / MIN_GROUPS).clamp(1, MAX_TOGETHER);
        // The largest power of two in it.
        let together = 1 << together.ilog2();
        let sets = sets / together * together;
        let content = DeviceReadable::new(sets * WAYS * PAGE_SIZE);
        let lacks_memory = content.is_none();
        let (sets, content) = match content {
            Some(content) => (sets, content),
            None => {
                tracing::warn!(bytes, "there is no memory for deltas: pages are sent whole");
                (0, DeviceReadable::new(0).expect("there is memory for a page"))
            }
        };
        let free = Place { sequence: NEVER, paid: false };
        let (keys, places) = (vec![Keys([Key::NONE; WAYS]); sets], vec![[free; WAYS]; sets]);
        Self { keys, places, content, together, kept: 0, touched: 0, turned_away: 0, lacks_memory }
    }

    /// Returns whether the cache holds nothing because there was no memory.
    pub(super) fn lacks_memory(&self) -> bool {
        self.lacks_memory
    }

    /// Returns the set of a page, and the set for it where the first is full.
    fn sets_of(&self, key: Key) -> [usize; 2] {
        let (group, within) = (key.0 / self.together as u64, (key.0 % self.together as u64) as usize);
        let groups = (self.keys.len() / self.together) as u128;
        // Fibonacci hashing: one group after another is put where most room is between those before. The second is another number of
        // that kind, the square root of two.
        [0x9e37_79b9_7f4a_7c15u64, 0x6a09_e667_f3bc_c909].map(|factor| {
            let group = (u128::from(group.wrapping_mul(factor)) * groups) >> 64;
            group as usize * self.together + within
        })
    }

    /// Returns whether the cache keeps no page.
    pub(super) fn is_empty(&self) -> bool {
        self.kept == 0
    }

    /// Returns how many places were ever used.
    pub(super) fn touched(&self) -> usize {
        self.touched
    }

    /// Returns how many pages are kept.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.kept
    }

    /// Returns the place of a page, if it is kept.
    pub(super) fn find(&self, key: Key) -> Option<usize> {
        let [first, second] = self.sets_of(key);
        // Nothing is known of the second from the first: what made it full may have been forgotten.
        let in_set = |set: usize| self.keys.get(set)?.find(key).map(|way| way * self.keys.len() + set);
        in_set(first).or_else(|| in_set(second))
    }

    /// Whether that page is kept there.
    pub(super) fn keeps(&self, at: usize, key: Key) -> bool {
        let sets = self.keys.len();
        self.keys[at % sets].0[at / sets] == key
    }

    /// A place for a page that is not kept, if there is one. What is not acknowledged keeps its place.
    pub(super) fn make_room(&mut self, key: Key, acknowledged: u64) -> Option<usize> {
        let (both, sets) = (self.sets_of(key), self.keys.len());
        let free = |set: usize| self.keys.get(set)?.find(Key::NONE).map(|way| (set, way));
        let (set, way) = match free(both[0]).or_else(|| free(both[1])) {
            Some(free) => {
                self.kept += 1;
                free
            }
            // The oldest of those that have not paid.
            None => {
                let places = self.places.get_mut(both[0])?;
                self.turned_away = self.turned_away.wrapping_add(1);
                if !self.turned_away.is_multiple_of(ADMITTED) {
                    return None;
                }
                let arrived = |place: &Place| !place.paid && place.sequence <= acknowledged;
                let unpaid = places.iter().enumerate().filter(|(_, place)| arrived(place));
                let oldest = unpaid.min_by_key(|(_, place)| place.sequence).map(|(way, _)| way);
                places.iter_mut().for_each(|place| place.paid = false);
                (both[0], oldest?)
            }
        };
        self.keys[set].0[way] = key;
        let place = &mut self.places[set][way];
        self.touched += usize::from(place.sequence == NEVER);
        *place = Place { sequence: THIS_BATCH, paid: false };
        Some(way * sets + set)
    }

    /// What is there belongs to the batch at hand, and stays until that has arrived.
    pub(super) fn claim(&mut self, at: usize) -> usize {
        self.place_mut(at).sequence = THIS_BATCH;
        at
    }

    pub(super) fn place(&self, at: usize) -> Place {
        let sets = self.places.len();
        self.places[at % sets][at / sets]
    }

    pub(super) fn place_mut(&mut self, at: usize) -> &mut Place {
        let sets = self.places.len();
        &mut self.places[at % sets][at / sets]
    }

    /// What is kept there.
    pub(super) fn page(&self, at: usize) -> &[u8] {
        &self.content.bytes()[at * PAGE_SIZE..][..PAGE_SIZE]
    }

    /// Keeps `page` there. A device may be reading what was there before.
    pub(super) fn store(&mut self, at: usize, page: &[u8]) {
        debug_assert_eq!(page.len(), PAGE_SIZE);
        self.content.store(at * PAGE_SIZE, page);
    }

    /// Applies a delta record to what is kept there, likewise.
    ///
    /// # Errors
    /// As [`sterna_memory::delta::apply`].
    pub(super) fn apply(&mut self, at: usize, record: &[u8]) -> Result<(), DeltaError> {
        self.content.apply(at * PAGE_SIZE, PAGE_SIZE, record)
    }

    /// The same for a device, which reads it while this thread may go on to change it: what it says of it is to be doubted.
    pub(super) fn range(&self, at: usize) -> Range {
        self.content.range(at * PAGE_SIZE, PAGE_SIZE)
    }

    pub(super) fn forget(&mut self, key: Key) {
        if let Some(at) = self.find(key) {
            let sets = self.keys.len();
            self.keys[at % sets].0[at / sets] = Key::NONE;
            self.kept -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps all pages of `regions`, each 512 pages, and says for how many there was no room.
    fn turned_away(cache: &mut Cache, block: u16, regions: impl Iterator<Item = u64>) -> usize {
        let keys = regions.flat_map(|region| (512 * region..512 * (region + 1)).map(|page| Key::new(block, page)));
        keys.filter(|key| cache.make_room(*key, 0).is_none()).count()
    }

    #[test]
    fn a_page_is_found_where_it_was_put_and_nowhere_once_it_is_forgotten() {
        for pages in [0, 7, 8, 100, 1024, 8192] {
            let mut cache = Cache::new(pages * PAGE_SIZE);
            let room = cache.content.bytes().len() / PAGE_SIZE;
            assert!(room <= pages && room + pages / MIN_GROUPS + WAYS > pages, "{room} of {pages}");
            let mut there = Vec::new();
            for page in 0..2 * pages as u64 {
                let key = Key::new(3, page);
                assert_eq!(cache.find(key), None);
                if cache.turned_away < ADMITTED - 1
                    && let Some(at) = cache.make_room(key, 0)
                {
                    assert!(cache.page(at).len() == PAGE_SIZE && cache.keeps(at, key));
                    there.push((key, at));
                }
            }
            assert_eq!(cache.kept, there.len());
            let places: std::collections::HashSet<_> = there.iter().map(|(_, at)| *at).collect();
            assert_eq!(places.len(), there.len());
            for (key, at) in there {
                assert_eq!(cache.find(key), Some(at));
                assert_eq!(cache.find(Key::new(4, key.0 & 0xff_ffff_ffff)), None);
                cache.forget(key);
                assert_eq!(cache.find(key), None);
            }
            assert!(cache.is_empty());
        }
    }

    #[test]
    fn a_cache_for_which_there_is_no_memory_keeps_nothing() {
        let mut cache = Cache::new(1 << 60);
        assert!(cache.lacks_memory() && !Cache::new(0).lacks_memory() && !Cache::new(1 << 20).lacks_memory());
        let key = Key::new(0, 1);
        assert!(cache.make_room(key, 0).is_none() && cache.find(key).is_none() && cache.is_empty());
        cache.forget(key);
    }

    /// However regions are dealt out to channels.
    #[test]
    fn a_cache_with_a_little_to_spare_has_room_for_nearly_all_of_what_a_channel_sends() {
        for channels in [1, 2, 3, 4, 8, 16] {
            for first in 0..channels {
                let regions = 256 / channels.min(4);
                let mut cache = Cache::new(regions as usize * 512 * PAGE_SIZE / 8 * 9);
                let lost = turned_away(&mut cache, 0, (first..).step_by(channels as usize).take(regions as usize));
                let part = lost as f64 / (regions as f64 * 512.0);
                println!("{channels} channels, the {first}th: {part:.3} have no room");
                assert!(part < 0.04, "{channels} channels, the {first}th: {part}");
            }
        }
    }
}
