//! One bit per page: dirty pages, zero pages, received pages.
//!
//! Words of 64 bits, bit `p % 64` of word `p / 64` for page `p`: the layout of KVM's dirty log, so that its words can
//! be used directly. Both kinds skip clean words: the cost depends on the set bits, not on the size of the guest. The
//! caller bounds the number of pages (2^36 pages are 256 TiB of RAM and 8 GiB of bitmap, reserved and not touched).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of a word.
const BITS: u64 = 64;

/// Returns how many words hold `pages` bits.
///
/// # Panics
/// If that is more than this machine can address.
pub fn words_for(pages: u64) -> usize {
    usize::try_from(pages.div_ceil(BITS)).expect("a bitmap of this many pages does not fit the address space")
}

/// Returns the words that `range` touches, each with the mask of its bits inside the range.
fn word_masks(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (range.start / BITS, range.end.div_ceil(BITS).max(range.start / BITS));
    (first..last).map(move |word| {
        let from = range.start.saturating_sub(word * BITS).min(BITS);
        let to = range.end.saturating_sub(word * BITS).min(BITS);
        let below = |bit: u64| if bit == BITS { u64::MAX } else { (1 << bit) - 1 };
        (word as usize, below(to) & !below(from))
    })
}

/// Splits words into runs of set bits and joins adjacent runs across words.
struct RunJoiner<F> {
    open: Range<u64>,
    emit: F,
}

impl<F: FnMut(Range<u64>)> RunJoiner<F> {
    fn new(emit: F) -> Self {
        Self { open: 0..0, emit }
    }

    fn word(&mut self, index: usize, mut bits: u64) {
        let base = index as u64 * BITS;
        while bits != 0 {
            let start = bits.trailing_zeros();
            let length = (bits >> start).trailing_ones();
            let run = base + u64::from(start)..base + u64::from(start + length);
            if self.open.end == run.start && !self.open.is_empty() {
                self.open.end = run.end;
            } else {
                self.close();
                self.open = run;
            }
            bits = if start + length == 64 { 0 } else { bits & (u64::MAX << (start + length)) };
        }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            (self.emit)(self.open.clone());
        }
        self.open = 0..0;
    }
}

/// Checks that `range` is inside a bitmap of `pages`.
#[track_caller]
fn check(range: &Range<u64>, pages: u64) {
    assert!(
        range.start <= range.end && range.end <= pages,
        "pages {}..{} are not within a bitmap of {pages} pages",
        range.start,
        range.end
    );
}

/// A bitmap with one owner.
///
/// Every method with a page or a range panics when it is outside the bitmap: peers' page numbers are checked where they
/// are parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageBitmap {
    words: Vec<u64>,
    pages: u64,
}

impl PageBitmap {
    /// Makes a bitmap of `pages` clean bits. The memory is not touched until bits are set.
    pub fn new(pages: u64) -> Self {
        Self { words: vec![0; words_for(pages)], pages }
    }

    /// Returns the number of pages covered, set or not.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the words, for reading. Bits past the last page are clean.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns whether `page` is set.
    pub fn contains(&self, page: u64) -> bool {
        check(&(page..page.saturating_add(1)), self.pages);
        self.words[(page / BITS) as usize] & (1 << (page % BITS)) != 0
    }

    /// Sets every page of `range`.
    pub fn set(&mut self, range: Range<u64>) {
        check(&range, self.pages);
        for (word, mask) in word_masks(range) {
            self.words[word] |= mask;
        }
    }

    /// Clears every page of `range`.
    pub fn clear(&mut self, range: Range<u64>) {
        check(&range, self.pages);
        for (word, mask) in word_masks(range) {
            // Clean words are not written: an untouched word of a large bitmap stays untouched.
            if self.words[word] & mask != 0 {
                self.words[word] &= !mask;
            }
        }
    }

    /// Adds the words of a dirty log that starts at `first_page`, a multiple of 64. Bits past the last page are ignored.
    pub fn merge_words(&mut self, first_page: u64, log: &[u64]) {
        assert!(first_page.is_multiple_of(BITS), "a dirty log must start at a multiple of 64 pages, not {first_page}");
        check(&(first_page..first_page), self.pages);
        let own = &mut self.words[(first_page / BITS) as usize..];
        for (own, new) in own.iter_mut().zip(log).filter(|(_, new)| **new != 0) {
            *own |= new;
        }
        if !self.pages.is_multiple_of(BITS)
            && let Some(last) = self.words.last_mut()
        {
            *last &= (1 << (self.pages % BITS)) - 1;
        }
    }

    /// Returns how many pages are set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Returns whether no page is set.
    pub fn is_clean(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Calls `run` for each maximal run of set pages, in ascending order.
    pub fn for_each_run(&self, run: impl FnMut(Range<u64>)) {
        self.for_each_run_in(0..self.pages, run);
    }

    /// As [`Self::for_each_run`], for the part of the bitmap within `range`.
    pub fn for_each_run_in(&self, range: Range<u64>, run: impl FnMut(Range<u64>)) {
        check(&range, self.pages);
        let mut joiner = RunJoiner::new(run);
        for (word, mask) in word_masks(range) {
            joiner.word(word, self.words[word] & mask);
        }
        joiner.close();
    }

    /// Returns the first run of set pages at or after `from`, limited to `longest` pages.
    ///
    /// For a caller that fills batches of limited size and continues where it stopped.
    pub fn next_run(&self, from: u64, longest: u64) -> Option<Range<u64>> {
        let start = self.next(from, 0)?;
        let end = self.next(start, u64::MAX).unwrap_or(self.pages);
        Some(start..end.min(start.saturating_add(longest)))
    }

    /// Returns the first page at or after `from` whose bit differs from those of `flip`: set for 0, clean for all ones.
    fn next(&self, from: u64, flip: u64) -> Option<u64> {
        if from >= self.pages {
            return None;
        }
        let first = (from / BITS) as usize;
        let mut bits = (self.words[first] ^ flip) & (u64::MAX << (from % BITS));
        let mut word = first;
        while bits == 0 {
            word += 1;
            bits = self.words.get(word)? ^ flip;
        }
        let page = word as u64 * BITS + u64::from(bits.trailing_zeros());
        (page < self.pages).then_some(page)
    }
}

/// A bitmap that several threads set and clear at once.
///
/// Setting is a release and reading an acquire operation: a thread that sees a bit sees all that was written before it
/// was set. Methods panic outside the bitmap as [`PageBitmap`]'s do.
#[derive(Debug)]
pub struct AtomicPageBitmap {
    words: Box<[AtomicU64]>,
    pages: u64,
}

impl AtomicPageBitmap {
    /// Makes a bitmap of `pages` clean bits. The memory is not touched until bits are set.
    pub fn new(pages: u64) -> Self {
        let words = vec![0u64; words_for(pages)].into_boxed_slice();
        // SAFETY: AtomicU64 has the size, alignment and bit validity of u64 (std's documentation of AtomicU64), so a
        // boxed slice of one is a boxed slice of the other; going through the raw pointer keeps the lazily zeroed pages.
        let words = unsafe { Box::from_raw(Box::into_raw(words) as *mut [AtomicU64]) };
        Self { words, pages }
    }

    /// Returns the number of pages covered, set or not.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns whether `page` is set.
    pub fn contains(&self, page: u64) -> bool {
        check(&(page..page.saturating_add(1)), self.pages);
        self.words[(page / BITS) as usize].load(Ordering::Acquire) & (1 << (page % BITS)) != 0
    }

    /// Sets every page of `range`.
    pub fn set(&self, range: Range<u64>) {
        self.test_and_set(range, |_| {});
    }

    /// Sets every page of `range`, calls `before` for each maximal run of pages that had been set before, and returns
    /// how many had not. Each page is new to exactly one of several threads that set it.
    pub fn test_and_set(&self, range: Range<u64>, before: impl FnMut(Range<u64>)) -> u64 {
        check(&range, self.pages);
        let mut joiner = RunJoiner::new(before);
        let mut new = 0;
        for (index, mask) in word_masks(range) {
            let word = &self.words[index];
            // A plain read first: retransmitted pages are common, and a shared cache line is cheaper than an exclusive
            // one.
            let mut old = word.load(Ordering::Acquire);
            if old & mask != mask {
                old = word.fetch_or(mask, Ordering::AcqRel);
            }
            new += u64::from((mask & !old).count_ones());
            joiner.word(index, old & mask);
        }
        joiner.close();
        new
    }

    /// Clears every page of `range`.
    pub fn clear(&self, range: Range<u64>) {
        self.take_runs(range, |_| {});
    }

    /// Clears the set pages of `range` and calls `run` for each maximal run of them. Clean words are only read.
    pub fn take_runs(&self, range: Range<u64>, run: impl FnMut(Range<u64>)) {
        check(&range, self.pages);
        let mut joiner = RunJoiner::new(run);
        for (index, mask) in word_masks(range) {
            let word = &self.words[index];
            if word.load(Ordering::Relaxed) & mask != 0 {
                joiner.word(index, word.fetch_and(!mask, Ordering::AcqRel) & mask);
            }
        }
        joiner.close();
    }

    /// Calls `run` for each maximal run of set pages in `range`, in ascending order, with bits as they are when
    /// reached.
    pub fn for_each_run_in(&self, range: Range<u64>, run: impl FnMut(Range<u64>)) {
        check(&range, self.pages);
        let mut joiner = RunJoiner::new(run);
        for (index, mask) in word_masks(range) {
            joiner.word(index, self.words[index].load(Ordering::Acquire) & mask);
        }
        joiner.close();
    }

    /// Returns how many pages are set; while other threads set and clear pages, a number between those before and
    /// after.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn runs_of(flags: &[bool], within: Range<u64>) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for page in within {
            match runs.last_mut() {
                _ if !flags[page as usize] => {}
                Some(last) if last.end == page => last.end = page + 1,
                _ => runs.push(page..page + 1),
            }
        }
        runs
    }

    fn range_in(pages: u64) -> impl Strategy<Value = Range<u64>> {
        (0..=pages, 0..=pages).prop_map(|(a, b)| a.min(b)..a.max(b))
    }

    fn steps() -> impl Strategy<Value = (u64, Vec<(bool, Range<u64>)>)> {
        (1u64..400)
            .prop_flat_map(|pages| (Just(pages), proptest::collection::vec((any::<bool>(), range_in(pages)), 0..12)))
    }

    proptest! {
        #[test]
        fn both_kinds_agree_with_a_list_of_flags((pages, steps) in steps()) {
            let mut flags = vec![false; pages as usize];
            let mut plain = PageBitmap::new(pages);
            let atomic = AtomicPageBitmap::new(pages);
            for (set, range) in steps {
                let old = flags.clone();
                flags[range.start as usize..range.end as usize].fill(set);
                let mut seen = Vec::new();
                if set {
                    plain.set(range.clone());
                    let new = atomic.test_and_set(range.clone(), |run| seen.push(run));
                    prop_assert_eq!(new, range.clone().filter(|page| !old[*page as usize]).count() as u64);
                } else {
                    plain.clear(range.clone());
                    atomic.take_runs(range.clone(), |run| seen.push(run));
                }
                prop_assert_eq!(seen, runs_of(&old, range.clone()));
                let (mut of_plain, mut of_atomic) = (Vec::new(), Vec::new());
                plain.for_each_run_in(range.clone(), |run| of_plain.push(run));
                atomic.for_each_run_in(range.clone(), |run| of_atomic.push(run));
                prop_assert_eq!(&of_plain, &runs_of(&flags, range));
                prop_assert_eq!(of_plain, of_atomic);
            }
            let set = flags.iter().filter(|flag| **flag).count() as u64;
            prop_assert_eq!((plain.count(), atomic.count(), plain.is_clean()), (set, set, set == 0));
            for page in 0..pages {
                prop_assert_eq!((plain.contains(page), atomic.contains(page)), (flags[page as usize], flags[page as usize]));
            }
            let mut all = Vec::new();
            plain.for_each_run(|run| all.push(run));
            prop_assert_eq!(&all, &runs_of(&flags, 0..pages));
            let (mut stepped, mut from) = (Vec::new(), 0);
            while let Some(run) = plain.next_run(from, u64::MAX) {
                from = run.end;
                stepped.push(run);
            }
            prop_assert_eq!(stepped, all);
        }

        #[test]
        fn a_dirty_log_is_merged_word_by_word(pages in 1u64..300, log in proptest::collection::vec(any::<u64>(), 0..6)) {
            let mut bitmap = PageBitmap::new(pages);
            let at = pages / 64 / 2 * 64;
            bitmap.merge_words(at, &log);
            for page in 0..pages {
                let expected = page >= at
                    && log.get(((page - at) / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 == 1);
                prop_assert_eq!(bitmap.contains(page), expected, "page {}", page);
            }
            prop_assert_eq!(bitmap.count(), (0..pages).filter(|page| bitmap.contains(*page)).count() as u64);
        }
    }

    #[test]
    fn a_long_run_is_limited_to_the_requested_length_and_continues_after_it() {
        let mut bitmap = PageBitmap::new(1000);
        bitmap.set(100..700);
        assert_eq!(bitmap.next_run(0, 128), Some(100..228));
        assert_eq!(bitmap.next_run(228, 128), Some(228..356));
        assert_eq!(bitmap.next_run(699, 128), Some(699..700));
        assert_eq!(bitmap.next_run(700, 128), None);
        assert_eq!(bitmap.next_run(5000, 128), None);
    }

    #[test]
    fn each_page_is_new_to_exactly_one_of_many_threads() {
        let bitmap = AtomicPageBitmap::new(10_000);
        let new: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4u64)
                .map(|thread| {
                    let bitmap = &bitmap;
                    scope.spawn(move || {
                        let step = |i: u64| (i * 37 + thread * 11) % 9_900;
                        (0..3000).map(|i| bitmap.test_and_set(step(i)..step(i) + 100, |_| {})).sum::<u64>()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(new, bitmap.count());
    }

    #[test]
    #[should_panic(expected = "pages 64..129 are not within a bitmap of 128 pages")]
    fn a_range_past_the_end_is_refused() {
        PageBitmap::new(128).set(64..129);
    }

    #[test]
    fn a_bitmap_for_a_very_large_guest_is_not_touched_by_being_made() {
        // 64 TiB of RAM: 2 GiB of bitmap, far more than the test may use.
        let bitmap = AtomicPageBitmap::new(1 << 34);
        bitmap.set((1 << 33)..(1 << 33) + 2);
        assert!(bitmap.contains(1 << 33) && !bitmap.contains((1 << 33) + 2));
    }
}
