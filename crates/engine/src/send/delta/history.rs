//! Whether deltas pay: compares, for each region of memory, the outcome of earlier deltas with the cost of a page that is sent whole.
//!
//! Trying costs a pass over the page and over the destination's copy of it, and keeping that copy costs a pass too. Where this is more
//! than deltas save, a region **rests**: no more of its pages are kept, except one of [`SAMPLED`], chosen at random. A kept page is
//! tried when it is sent again, so a page whose deltas pay is still sent as deltas in a region that rests; and the outcome of the samples
//! shows when to keep all of the region again. The sums depend on the link and the compressor, so they are made for each batch.
//!
//! There are no clocks here: times are passed in.

use sterna_wire::delta::{DELTA_HEADER_LENGTH, MAX_RECORD};

/// One in so many sent pages of a resting region is kept.
pub(super) const SAMPLED: u32 = 32;
/// Weight of each page that was tried in a region's estimates.
const REGION_FOLLOWS: f64 = 1.0 / 32.0;
/// Weight of each page that was tried in the estimates for all regions.
const ALL_FOLLOW: f64 = 1.0 / 512.0;
/// Weight of the newest value in other moving averages.
const SMOOTH: f64 = 1.0 / 16.0;
/// Minimum and maximum number of regions with histories of their own.
const REGIONS: (usize, usize) = (1 << 12, 1 << 17);
/// Assumed nanoseconds of a pass over a page before it was measured.
const FIRST_PASS: f64 = 400.0;
/// A batch counts as at most so many times slower than those before.
const SLOWEST: f64 = 4.0;
/// How much of a pass time that is too slow is forgotten with each batch that does not measure it: at first, and at last, where the time
/// proves true each time that it was forgotten.
const FORGETS: (f64, f64) = (1.0 / 64.0, 1.0 / 4096.0);
/// The shortest record: one word.
const MIN_RECORD: f64 = 10.0;

/// The average costs of a page that is sent whole now.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Whole {
    /// Nanoseconds to encode it.
    pub(in super::super) nanos: f64,
    /// Encoded bytes.
    pub(in super::super) bytes: f64,
    /// Nanoseconds that a byte on the wire costs.
    pub(in super::super) price: f64,
}

/// The outcomes of deltas that were tried.
#[derive(Clone, Copy, Debug)]
struct Outcomes {
    /// The part of the pages that were unchanged.
    same: f64,
    /// The part of the pages that were sent as deltas.
    delta: f64,
    /// The bytes of such a delta.
    bytes: f64,
}

/// Counts of one batch in one region.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tried {
    pub(super) pages: u32,
    pub(super) same: u32,
    pub(super) deltas: u32,
    /// Bytes of the deltas' records.
    pub(super) bytes: usize,
}

impl Outcomes {
    fn follow(&mut self, tried: Tried, each: f64) {
        let pages = f64::from(tried.pages);
        let by = 1.0 - (1.0 - each).powf(pages);
        self.same += (f64::from(tried.same) / pages - self.same) * by;
        self.delta += (f64::from(tried.deltas) / pages - self.delta) * by;
        if tried.deltas > 0 {
            let by = 1.0 - (1.0 - each).powf(f64::from(tried.deltas));
            self.bytes += (tried.bytes as f64 / f64::from(tried.deltas) - self.bytes) * by;
        }
    }
}

/// The history of a region.
#[derive(Clone, Copy, Debug)]
struct Region {
    key: u64,
    outcomes: Outcomes,
    /// Encoded bytes of its pages that are sent whole, relative to those of all regions.
    whole: f64,
}

/// How the pages of a region are handled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Plan {
    /// Whether all pages that are sent whole are kept, to be tried next time; otherwise only samples.
    pub(super) keeps: bool,
    /// Whether kept pages are tried, and samples are kept; otherwise not even samples could pay.
    pub(super) tries: bool,
    /// Maximum length of a record that pays.
    pub(super) most: usize,
}

/// The histories of one channel's regions.
#[derive(Debug)]
pub(super) struct History {
    /// By a hash of their number; of two regions with the same hash the newer one stays.
    regions: Vec<Region>,
    /// The outcomes of all regions, with which a new region begins.
    all: Outcomes,
    /// Nanoseconds of a pass over a page.
    pass: f64,
    /// Whether the last batch has measured `pass`.
    measured: bool,
    /// How fast `pass` is forgotten.
    forgets: f64,
    /// Number of pages until the next sample.
    skip: u32,
    random: u64,
}

impl History {
    /// Makes the histories for a cache of so many pages.
    pub(super) fn new(cached_pages: usize) -> Self {
        // Assumed until measured: a few words change in every second page.
        let all = Outcomes { same: 0.0, delta: 0.5, bytes: 3.0 * MIN_RECORD };
        let regions = (cached_pages / 128).next_power_of_two().clamp(REGIONS.0, REGIONS.1);
        let unknown = Region { key: u64::MAX, outcomes: all, whole: 1.0 };
        Self {
            regions: vec![unknown; regions],
            all,
            pass: FIRST_PASS,
            measured: true,
            forgets: FORGETS.0,
            skip: SAMPLED,
            random: 1,
        }
    }

    fn region(&mut self, key: u64) -> &mut Region {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - self.regions.len().ilog2());
        let region = &mut self.regions[hash as usize];
        if region.key != key {
            *region = Region { key, outcomes: self.all, whole: 1.0 };
        }
        region
    }

    /// What to do with pages of a region.
    pub(super) fn plan(&mut self, region: u64, whole: Whole) -> Plan {
        let pass = self.pass;
        let Region { outcomes: Outcomes { same, delta, bytes }, whole: factor, .. } = *self.region(region);
        let price = whole.price.max(f64::MIN_POSITIVE);
        let costs = whole.nanos + price * whole.bytes * factor;
        let header = DELTA_HEADER_LENGTH as f64;
        let saved = same * costs + delta * (costs - price * (header + bytes)).max(0.0);
        let failed = (1.0 - same - delta).max(0.0);
        Plan {
            keeps: saved > pass * (1.0 + failed),
            tries: costs - price * (header + MIN_RECORD) > pass,
            most: (costs / price - header).clamp(0.0, MAX_RECORD as f64) as usize,
        }
    }

    /// Whether a page of a region that rests is kept.
    pub(super) fn samples(&mut self) -> bool {
        self.skip -= 1;
        if self.skip > 0 {
            return false;
        }
        // At random: a guest's rounds have a period too.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.skip = 1 + (self.random % u64::from(2 * SAMPLED - 1)) as u32;
        true
    }

    /// What became of pages of a region that were tried.
    pub(super) fn tried(&mut self, region: u64, tried: Tried) {
        if tried.pages > 0 {
            self.region(region).outcomes.follow(tried, REGION_FOLLOWS);
            self.all.follow(tried, ALL_FOLLOW);
        }
    }

    /// A batch of so many pages took so long, with so many passes over them.
    pub(super) fn took(&mut self, nanos: f64, passes: usize, pages: usize) {
        if pages == 0 {
            return;
        }
        // With few of them it is the time of the rest that was measured.
        if 2 * passes >= pages {
            let pass = (nanos / passes as f64).min(SLOWEST * self.pass);
            if !std::mem::replace(&mut self.measured, true) {
                let (first, last) = FORGETS;
                self.forgets = if pass > self.pass { (self.forgets / 2.0).max(last) } else { first };
            }
            self.pass += (pass - self.pass) * SMOOTH;
        } else {
            self.measured = false;
            if self.pass > FIRST_PASS {
                // Else a pass that was once too slow to be tried again would be so for ever.
                self.pass += (FIRST_PASS - self.pass) * self.forgets;
            }
        }
    }

    /// A pass takes so long, whatever the clock says.
    #[cfg(test)]
    pub(super) fn set_pass(&mut self, nanos: f64) {
        self.pass = nanos;
    }

    /// Pages of a region that went whole took so many bytes each, where all do `average`.
    pub(super) fn went_whole(&mut self, region: u64, bytes: f64, average: f64) {
        let region = self.region(region);
        region.whole += (bytes / average.max(1.0) - region.whole) * SMOOTH;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A region in virtual time: what each of its pages takes.
    struct World {
        history: History,
        kept: HashSet<u64>,
        /// Of them, those whose deltas have paid.
        paid: HashSet<u64>,
        /// Nanoseconds of a pass.
        pass: f64,
    }

    /// How a guest changes a page.
    #[derive(Clone, Copy, PartialEq)]
    enum Change {
        Words(u32),
        All,
    }

    const PASS: f64 = 300.0;
    const PAGES: u64 = 512;
    /// At 1 Gbit/s, and as `none` and as a fast compressor has it.
    const GIGABIT: f64 = 8.0;
    const NONE: Whole = Whole { nanos: 0.0, bytes: 4096.0, price: GIGABIT };
    /// What goes over a wire that is nearly free.
    const FREE: Whole = Whole { nanos: 0.0, bytes: 4096.0, price: 0.02 };
    const SMALL: Whole = Whole { nanos: 900.0, bytes: 60.0, price: GIGABIT };

    impl World {
        fn new() -> Self {
            Self { history: History::new(4096), kept: HashSet::new(), paid: HashSet::new(), pass: PASS }
        }

        /// Sends all pages once; says what that cost, and how many went as deltas.
        fn round(&mut self, whole: Whole, change: impl Fn(u64) -> Change) -> (f64, u64) {
            let plan = self.history.plan(0, whole);
            let (mut cost, mut deltas, mut passes, mut tried) = (0.0, 0, 0, Tried::default());
            for page in 0..PAGES {
                let usable = plan.tries && self.kept.contains(&page);
                let counts = plan.keeps || !self.paid.contains(&page);
                tried.pages += u32::from(usable && counts);
                passes += usize::from(usable);
                match change(page) {
                    Change::Words(words) if usable && 10 * words as usize <= plan.most => {
                        deltas += 1;
                        tried.deltas += u32::from(counts);
                        tried.bytes += if counts { 10 * words as usize } else { 0 };
                        cost += whole.price * f64::from(8 + 10 * words);
                        self.paid.insert(page);
                    }
                    _ => {
                        cost += whole.nanos + whole.price * whole.bytes;
                        self.paid.remove(&page);
                        if plan.tries && (plan.keeps || self.history.samples()) {
                            self.kept.insert(page);
                            passes += 1;
                        } else {
                            self.kept.remove(&page);
                        }
                    }
                }
            }
            self.history.tried(0, tried);
            self.history.took(self.pass * passes as f64, passes, PAGES as usize);
            (cost + self.pass * passes as f64, deltas)
        }

        fn rounds(&mut self, rounds: usize, whole: Whole, change: impl Fn(u64) -> Change) -> (f64, u64) {
            (0..rounds).map(|_| self.round(whole, &change)).fold((0.0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
        }
    }

    fn words(_: u64) -> Change {
        Change::Words(3)
    }

    fn all(_: u64) -> Change {
        Change::All
    }

    /// What all of it costs that goes whole and is neither kept nor tried.
    fn never(rounds: usize, whole: Whole) -> f64 {
        rounds as f64 * PAGES as f64 * (whole.nanos + whole.price * whole.bytes)
    }

    #[test]
    fn deltas_give_way_to_whole_pages_when_the_guest_rewrites_them_and_come_back_when_it_ceases() {
        for whole in [NONE, SMALL] {
            let mut world = World::new();
            for _ in 0..3 {
                let (_, deltas) = world.rounds(20, whole, words);
                assert!(deltas > 14 * PAGES, "{deltas}");
                world.rounds(5, whole, all);
                let (cost, deltas) = world.rounds(20, whole, all);
                assert_eq!(deltas, 0);
                // Hardly tried: what exploring costs is bounded.
                let passes = (cost - never(20, whole)) / PASS;
                assert!(passes < 20.0 * PAGES as f64 * 3.0 / f64::from(SAMPLED), "{passes}");
                assert!(passes > 0.0, "or it would never come back");
            }
        }
    }

    #[test]
    fn deltas_give_way_when_pages_get_cheap_and_come_back_when_they_get_dear() {
        let mut world = World::new();
        for _ in 0..3 {
            assert!(world.rounds(10, NONE, words).1 > 7 * PAGES);
            // A page on its way costs less than a look at it.
            let (cost, deltas) = world.rounds(10, FREE, words);
            assert_eq!((cost.round(), deltas), (never(10, FREE).round(), 0));
        }
    }

    #[test]
    fn passes_that_were_slow_for_a_while_do_not_end_deltas_for_ever() {
        let mut world = World::new();
        world.rounds(4, NONE, words);
        (0..1000).for_each(|_| world.history.took(1e7, 128, 128));
        let stalled = world.history.plan(0, SMALL);
        assert!(!stalled.keeps && !stalled.tries);
        world.rounds(400, SMALL, words);
        assert!(world.rounds(20, SMALL, words).1 > 14 * PAGES);
    }

    #[test]
    fn passes_that_are_slow_are_tried_ever_more_rarely() {
        // A page goes in 1380 ns, and a pass takes longer than that.
        let mut world = World { pass: 2000.0, ..World::new() };
        let (cost, _) = world.rounds(4000, SMALL, |page| if page % 2 == 0 { words(page) } else { all(page) });
        assert!(cost < 1.25 * never(4000, SMALL), "{}", cost / never(4000, SMALL));
    }

    #[test]
    fn a_pass_that_is_fast_is_so_after_a_rest() {
        // What is nearly free on its way, and yet dearer than a pass.
        let fast = Whole { nanos: 0.0, bytes: 4096.0, price: 0.085 };
        let mut world = World { pass: 100.0, ..World::new() };
        world.rounds(50, NONE, words);
        assert_eq!(world.rounds(50, fast, words).1, 50 * PAGES);
        world.rounds(200, NONE, all);
        world.rounds(2000, fast, words);
        assert_eq!(world.rounds(50, fast, words).1, 50 * PAGES);
    }

    #[test]
    fn few_passes_say_nothing_of_how_long_one_takes() {
        let mut history = History::new(4096);
        // What is looked up and copied of the pages that go whole is no pass.
        (0..1000).for_each(|_| history.took(20e3, 4, 128));
        assert!(history.plan(0, SMALL).tries);
    }

    #[test]
    fn what_shrinks_to_less_than_its_delta_goes_whole() {
        let mut world = World::new();
        let tiny = Whole { nanos: 200.0, bytes: 40.0, price: GIGABIT };
        let many = |_| Change::Words(9);
        world.rounds(10, tiny, many);
        let (cost, deltas) = world.rounds(20, tiny, many);
        assert_eq!(deltas, 0);
        assert!(cost < 1.08 * never(20, tiny), "{}", cost / never(20, tiny));
        assert!(world.rounds(20, NONE, many).1 > 14 * PAGES);
    }

    #[test]
    fn the_few_pages_whose_deltas_pay_go_on_as_deltas_in_a_region_that_rests() {
        let mut world = World::new();
        let fast = Whole { nanos: 300.0, bytes: 2000.0, price: 0.1 };
        // One of 16 has a counter in it, the others are rewritten.
        let mixed = |page: u64| if page.is_multiple_of(16) { Change::Words(1) } else { Change::All };
        world.rounds(200, fast, mixed);
        let deltas = world.rounds(10, fast, mixed).1;
        assert!(deltas > 8 * PAGES / 16, "{deltas}");
        assert!(!world.history.plan(0, fast).keeps);
    }

    #[test]
    fn a_new_region_begins_with_what_was_learned_of_others() {
        let mut world = World::new();
        assert!(world.history.plan(99, NONE).keeps);
        let tried = Tried { pages: 128, same: 0, deltas: 0, bytes: 0 };
        (0..40).for_each(|region| world.history.tried(region, tried));
        let plan = world.history.plan(100, NONE);
        assert!(!plan.keeps && plan.tries);
    }

    #[test]
    fn regions_whose_pages_shrink_are_told_from_those_whose_pages_do_not() {
        let mut history = History::new(4096);
        let whole = Whole { nanos: 0.0, bytes: 1000.0, price: GIGABIT };
        for _ in 0..100 {
            history.went_whole(1, 50.0, 1000.0);
            history.went_whole(2, 3000.0, 1000.0);
        }
        assert!(history.plan(1, whole).most < 50 && history.plan(2, whole).most == MAX_RECORD);
    }
}
