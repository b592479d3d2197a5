//! The one read of guest memory per send.
//!
//! While the guest runs its memory races, so two reads of a page may differ. A batch is copied once into a pooled
//! buffer, and codecs and duplicate search see only that copy. The zero test is part of the copy: a page counts as zero
//! until the first block that is not, then the rest is copied; a zero page costs no store and takes no space. So is the
//! checksum where the CPU can compute it during the copy (`fold.rs`); elsewhere it runs over the copy while that is
//! still in the cache.
//!
//! Each byte of guest memory is loaded exactly once (`copy.rs`): the zero test, the copy and the checksum see the same
//! value.

use crate::PAGE_SIZE;
use crate::checksum::Crc32c;
use crate::copy::CopyMethod;
use crate::fold::Folded;
use crate::normal_page_ratio::NormalPageRatio;
use crate::scan::is_zero;

/// The result of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotResult {
    /// Pages read.
    pub pages: usize,
    /// Pages that are not zero; they are contiguous at the start of the destination buffer.
    pub normal: usize,
    /// CRC-32C over exactly these normal pages, in order; 0 without checksums.
    pub checksum: u32,
}

impl SnapshotResult {
    /// Returns the length of the normal pages in the destination buffer, in bytes.
    pub fn normal_bytes(&self) -> usize {
        self.normal * PAGE_SIZE
    }
}

/// A snapshot in progress: runs of pages are added, and become a zero map and contiguous normal pages.
///
/// Bit `i % 64` of word `i / 64` of the zero map is set if the `i`-th page was zero.
#[derive(Debug)]
pub struct Snapshot<'a> {
    copy: &'a mut [u8],
    zero_map: &'a mut [u64],
    capacity: usize,
    pages: usize,
    normal: usize,
    method: CopyMethod,
    checksums: bool,
    /// Selects zero pages that count as normal.
    kept: Option<&'a mut NormalPageRatio>,
    /// The checksum, where the method computes it during the copy.
    folded: Folded,
    /// The checksum, where it is computed over the copy.
    behind: Crc32c,
}

/// Where the checksum is computed over the copy, it follows after this many normal pages, while they are in the
/// first-level cache. Of 1 to 128 pages this was the fastest, by a little (`examples/memory_throughput.rs`).
const CHECKSUM_PAGES: usize = 4;

impl<'a> Snapshot<'a> {
    /// Starts a snapshot of as many pages as both `copy` (4096 bytes each) and `zero_map` (one bit each) have room for.
    ///
    /// Neither needs to be cleared first. After an all-zero batch `copy` is untouched.
    pub fn new(copy: &'a mut [u8], zero_map: &'a mut [u64]) -> Self {
        let capacity = (copy.len() / PAGE_SIZE).min(zero_map.len() * 64);
        Self {
            copy,
            zero_map,
            capacity,
            pages: 0,
            normal: 0,
            method: CopyMethod::best(true),
            checksums: true,
            kept: None,
            folded: Folded::new(),
            behind: Crc32c::new(),
        }
    }

    /// Omits the checksum, which then is 0.
    #[must_use]
    pub fn unchecked(self) -> Self {
        Self { checksums: false, method: CopyMethod::best(false), ..self }
    }

    /// Makes some of the zero pages count as normal: they are in the copy and in the checksum.
    #[must_use]
    pub fn keeping(self, ratio: &'a mut NormalPageRatio) -> Self {
        Self { kept: Some(ratio), ..self }
    }

    /// Returns how many more pages there is room for.
    pub fn room(&self) -> usize {
        self.capacity - self.pages
    }

    /// Reads `pages` pages of guest memory at `source`, once.
    ///
    /// # Panics
    /// If `source` is not page-aligned or there is not enough [`Self::room`].
    ///
    /// # Safety
    /// `pages` whole pages at `source` must be mapped and readable during the call, and must not overlap the
    /// destination. They may change meanwhile.
    pub unsafe fn read(&mut self, source: *const u8, pages: usize) {
        self.admit(source, pages);
        let mut first_normal = self.normal;
        for page in 0..pages {
            let target = &mut self.copy[self.normal * PAGE_SIZE..][..PAGE_SIZE];
            let ahead = source.wrapping_add((page + 1).min(pages - 1) * PAGE_SIZE);
            // SAFETY: the source page is within what the caller vouches for; the target is a whole page of our own buffer;
            // the method is one of those that this CPU has.
            let mut zero = unsafe {
                (self.method.copy_page)(source.add(page * PAGE_SIZE), target.as_mut_ptr(), ahead, &mut self.folded)
            };
            if zero && self.keeps_next() {
                zero = false;
                self.copy[self.normal * PAGE_SIZE..][..PAGE_SIZE].fill(0);
                self.fold(self.normal, self.normal + 1);
            }
            self.note(zero);
            self.normal += usize::from(!zero);
            if self.normal - first_normal >= CHECKSUM_PAGES {
                self.add_to_checksum(first_normal);
                first_normal = self.normal;
            }
        }
        self.add_to_checksum(first_normal);
    }

    /// Has `fill` copy `pages` pages into place in one call, and removes those that are zero: for memory that only the
    /// kernel can reach.
    ///
    /// # Errors
    /// Those of `fill`: no page has been added then.
    ///
    /// # Panics
    /// If there is not enough [`Self::room`].
    pub fn fill<E>(&mut self, pages: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
        assert!(pages <= self.room(), "a snapshot with room for {} pages was given {pages}", self.room());
        let first_normal = self.normal;
        let start = first_normal * PAGE_SIZE;
        fill(&mut self.copy[start..start + pages * PAGE_SIZE])?;
        for page in 0..pages {
            let at = start + page * PAGE_SIZE;
            let zero = is_zero(&self.copy[at..at + PAGE_SIZE]) && !self.keeps_next();
            let target = self.normal * PAGE_SIZE;
            if !zero && at != target {
                self.copy.copy_within(at..at + PAGE_SIZE, target);
            }
            self.note(zero);
            self.normal += usize::from(!zero);
        }
        self.fold(first_normal, self.normal);
        self.add_to_checksum(first_normal);
        Ok(())
    }

    /// Returns the result, which describes the destination buffer and the zero map.
    pub fn finish(self) -> SnapshotResult {
        let checksum = match (self.checksums, self.method.folds) {
            (false, _) => 0,
            (true, true) => self.folded.finish(),
            (true, false) => self.behind.finish(),
        };
        SnapshotResult { pages: self.pages, normal: self.normal, checksum }
    }

    fn admit(&self, source: *const u8, pages: usize) {
        assert!(source.addr().is_multiple_of(PAGE_SIZE), "guest page at {source:?} is not page-aligned");
        assert!(pages <= self.room(), "a snapshot with room for {} pages was given {pages}", self.room());
    }

    fn note(&mut self, zero: bool) {
        let (word, bit) = (self.pages / 64, self.pages % 64);
        // The first page of a word initialises it, whatever the caller's buffer held.
        let before = if bit == 0 { 0 } else { self.zero_map[word] };
        self.zero_map[word] = before | u64::from(zero) << bit;
        self.pages += 1;
    }

    /// Returns whether the next zero page counts as normal.
    fn keeps_next(&mut self) -> bool {
        self.kept.as_deref_mut().is_some_and(NormalPageRatio::takes_next)
    }

    /// Adds the normal pages `first..end` to the checksum where that is computed during the copy, which these skipped.
    fn fold(&mut self, first: usize, end: usize) {
        if self.checksums && self.method.folds {
            let mut all = Crc32c::after(self.folded.finish());
            all.update(&self.copy[first * PAGE_SIZE..end * PAGE_SIZE]);
            self.folded = Folded::after(all.finish());
        }
    }

    fn add_to_checksum(&mut self, first_normal: usize) {
        if self.checksums && !self.method.folds {
            self.behind.update(&self.copy[first_normal * PAGE_SIZE..self.normal * PAGE_SIZE]);
        }
    }
}

/// Takes a snapshot of one contiguous range: `zero_map` and `copy` as in [`Snapshot::new`].
///
/// # Panics
/// As [`Snapshot::read`].
///
/// # Safety
/// As [`Snapshot::read`].
pub unsafe fn snapshot(source: *const u8, pages: usize, copy: &mut [u8], zero_map: &mut [u64]) -> SnapshotResult {
    let mut snapshot = Snapshot::new(copy, zero_map);
    // SAFETY: passed on from the caller.
    unsafe { snapshot.read(source, pages) };
    snapshot.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::crc32c;
    use crate::test_util::Area;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    fn pages_of(kinds: &[(u8, usize)]) -> Area {
        let area = Area::anonymous(kinds.len().max(1) * PAGE_SIZE);
        for (page, (value, at)) in kinds.iter().enumerate() {
            area.bytes_mut()[page * PAGE_SIZE + at] = *value;
        }
        area
    }

    proptest! {
        #[test]
        fn a_snapshot_is_the_normal_pages_back_to_back_with_their_map_and_checksum(
            kinds in proptest::collection::vec((prop_oneof![Just(0u8), 1u8..], 0..PAGE_SIZE), 0..150),
            cut in any::<prop::sample::Index>(),
        ) {
            let guest = pages_of(&kinds);
            let cut = cut.index(kinds.len() + 1);
            let normal: Vec<u8> = kinds.iter().zip(guest.bytes().chunks(PAGE_SIZE))
                .filter(|((value, _), _)| *value != 0)
                .flat_map(|(_, page)| page.to_vec())
                .collect();
            let mut copy = vec![0xaa; kinds.len() * PAGE_SIZE];
            let mut map = vec![u64::MAX; kinds.len().div_ceil(64)];
            let mut taking = Snapshot::new(&mut copy, &mut map);
            prop_assert_eq!(taking.room(), kinds.len());
            // SAFETY: the area has as many pages as there are kinds.
            unsafe {
                taking.read(guest.ptr(), cut);
                taking.read(guest.ptr().add(cut * PAGE_SIZE), kinds.len() - cut);
            }
            let result = taking.finish();
            prop_assert_eq!((result.pages, result.normal_bytes()), (kinds.len(), normal.len()));
            prop_assert_eq!(&copy[..normal.len()], &normal[..]);
            prop_assert_eq!(result.checksum, crc32c(&normal));
            for (page, (value, _)) in kinds.iter().enumerate() {
                prop_assert_eq!(map[page / 64] >> (page % 64) & 1 == 1, *value == 0, "page {}", page);
            }
        }
    }

    #[test]
    fn zero_pages_that_count_as_normal_are_in_the_copy_and_in_the_checksum() {
        let kinds: Vec<_> = [0, 7, 0, 0, 9, 0, 0].map(|value| (value, 5)).into();
        let guest = pages_of(&kinds);
        let kept = [1, 2, 4, 5];
        let expected: Vec<u8> =
            kept.iter().flat_map(|page| guest.bytes()[page * PAGE_SIZE..][..PAGE_SIZE].to_vec()).collect();
        for filled in [false, true] {
            // Every second one of pages 0, 2, 3, 5 and 6.
            let mut ratio = NormalPageRatio::new(50);
            let (mut copy, mut map) = (vec![0xaa; kinds.len() * PAGE_SIZE], [0; 1]);
            let mut taking = Snapshot::new(&mut copy, &mut map).keeping(&mut ratio);
            match filled {
                false => {
                    // SAFETY: the area has as many pages as there are kinds.
                    unsafe { taking.read(guest.ptr(), kinds.len()) }
                }
                true => {
                    let fill = |target: &mut [u8]| -> Result<(), ()> {
                        target.copy_from_slice(guest.bytes());
                        Ok(())
                    };
                    taking.fill(kinds.len(), fill).unwrap();
                }
            }
            let result = taking.finish();
            assert_eq!((result.normal, result.checksum), (kept.len(), crc32c(&expected)));
            assert_eq!((&copy[..expected.len()], map[0]), (&expected[..], 0b100_1001));
        }
    }

    proptest! {
        #[test]
        fn pages_that_were_filled_in_are_a_snapshot_like_those_that_were_read(
            kinds in proptest::collection::vec((prop_oneof![Just(0u8), 1u8..], 0..PAGE_SIZE), 0..150),
            cuts in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let guest = pages_of(&kinds);
            let (cut, again) = (cuts.0.index(kinds.len() + 1), cuts.1.index(kinds.len() + 1));
            let (first, second) = (cut.min(again), cut.max(again));
            let mut copies = [vec![0xaa; kinds.len() * PAGE_SIZE], vec![0xbb; kinds.len() * PAGE_SIZE]];
            let mut maps = [vec![u64::MAX; kinds.len().div_ceil(64)], vec![0; kinds.len().div_ceil(64)]];
            let [read, filled] = &mut copies;
            let [read_map, filled_map] = &mut maps;
            // SAFETY: the area has as many pages as there are kinds.
            let expected = unsafe { snapshot(guest.ptr(), kinds.len(), read, read_map) };
            let mut taking = Snapshot::new(filled, filled_map);
            let part = |pages: std::ops::Range<usize>| {
                let bytes = &guest.bytes()[pages.start * PAGE_SIZE..pages.end * PAGE_SIZE];
                move |room: &mut [u8]| { room.copy_from_slice(bytes); Ok::<(), ()>(()) }
            };
            taking.fill(first, part(0..first)).unwrap();
            prop_assert_eq!(taking.fill(second - first, |_| Err(7)), Err(7));
            // SAFETY: as above.
            unsafe { taking.read(guest.ptr().add(first * PAGE_SIZE), second - first) };
            taking.fill(kinds.len() - second, part(second..kinds.len())).unwrap();
            let result = taking.finish();
            prop_assert_eq!(result, expected);
            prop_assert_eq!(&copies[0][..result.normal_bytes()], &copies[1][..result.normal_bytes()]);
            for page in 0..kinds.len() {
                prop_assert_eq!(maps[0][page / 64] >> (page % 64) & 1, maps[1][page / 64] >> (page % 64) & 1);
            }
        }
    }

    #[test]
    #[should_panic(expected = "room for 1 pages was given 2")]
    fn more_pages_than_there_is_room_for_are_refused() {
        let guest = pages_of(&[(1, 0), (1, 0)]);
        // SAFETY: the area has two pages.
        unsafe { snapshot(guest.ptr(), 2, &mut [0; 2 * PAGE_SIZE - 1], &mut [0]) };
    }

    #[test]
    fn while_the_guest_writes_the_verdict_the_copy_and_the_checksum_still_fit_each_other() {
        const PAGES: usize = 128;
        let guest = Area::anonymous(PAGES * PAGE_SIZE);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut word = 0usize;
                while !stop.load(Ordering::Relaxed) {
                    // Words all over the area go on and off, page by page.
                    word = (word + 521) % (PAGES * PAGE_SIZE / 8);
                    // SAFETY: the word is within the area, aligned, and only ever accessed atomically or volatile here.
                    let word = unsafe { &*guest.ptr().cast::<AtomicU64>().add(word) };
                    word.store(word.load(Ordering::Relaxed) ^ 1 << 33, Ordering::Relaxed);
                }
            });
            let (mut copy, mut map) = (vec![0; PAGES * PAGE_SIZE], [0; PAGES / 64]);
            for _ in 0..300 {
                // SAFETY: the area has that many pages and outlives the call.
                let result = unsafe { snapshot(guest.ptr(), PAGES, &mut copy, &mut map) };
                let normal = &copy[..result.normal_bytes()];
                assert_eq!(result.checksum, crc32c(normal));
                assert!(normal.chunks(PAGE_SIZE).all(|page| !is_zero(page)));
                let zero: u32 = map.iter().map(|word| word.count_ones()).sum();
                assert_eq!(result.normal + zero as usize, PAGES);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
