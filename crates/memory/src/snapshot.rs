//! The one read of guest memory per send.
//!
//! While the guest runs its memory races, so nobody may look at a page twice and expect the same. A batch is copied
//! once into a pooled buffer, and codecs, duplicate search and checksum see only that copy. The zero test is part of the
//! copy: a page is read as "zero so far" until the first block that is not, then the rest is copied; a zero page costs
//! no store and takes no room. The checksum runs over the copy while it is still in the cache.
//!
//! Loads are volatile, so each byte of guest memory is read exactly once and the verdict and the copy are of the same
//! value.

use crate::PAGE_SIZE;
use crate::checksum::Crc32c;

/// What one snapshot found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotResult {
    /// Pages looked at.
    pub pages: usize,
    /// Pages that are not zero; they lie one after another at the start of the destination buffer.
    pub normal: usize,
    /// CRC-32C over exactly these normal pages, in order; 0 without checksums.
    pub checksum: u32,
}

impl SnapshotResult {
    /// The length of the normal pages in the destination buffer, in bytes.
    pub fn normal_bytes(&self) -> usize {
        self.normal * PAGE_SIZE
    }
}

/// A snapshot being taken: runs of pages go in, and come out as a zero map and the normal pages back to back.
///
/// Bit `i % 64` of word `i / 64` of the zero map tells whether the `i`-th page given was zero.
#[derive(Debug)]
pub struct Snapshot<'a> {
    copy: &'a mut [u8],
    zero_map: &'a mut [u64],
    capacity: usize,
    pages: usize,
    normal: usize,
    checksum: Option<Crc32c>,
    copy_page: CopyPage,
}

/// The checksum follows the copy after this many normal pages, while they are in the first-level cache. Of 1 to 128 pages
/// this was the fastest, by a little (`examples/memory_throughput.rs`); prefetching the next page made every case slower.
const CHECKSUM_PAGES: usize = 4;

/// Copies one page unless it is zero, and says whether it was zero.
type CopyPage = unsafe fn(*const u8, *mut u8) -> bool;

impl<'a> Snapshot<'a> {
    /// Starts a snapshot of as many pages as both `copy` (4096 bytes each) and `zero_map` (one bit each) have room for.
    ///
    /// Neither needs to be cleared first. After an all-zero batch `copy` is untouched.
    pub fn new(copy: &'a mut [u8], zero_map: &'a mut [u64]) -> Self {
        let capacity = (copy.len() / PAGE_SIZE).min(zero_map.len() * 64);
        Self { copy, zero_map, capacity, pages: 0, normal: 0, checksum: Some(Crc32c::new()), copy_page: copy_page() }
    }

    /// The same without a checksum, which then is 0.
    #[must_use]
    pub fn unchecked(self) -> Self {
        Self { checksum: None, ..self }
    }

    /// How many more pages there is room for.
    pub fn room(&self) -> usize {
        self.capacity - self.pages
    }

    /// Reads `pages` pages of guest memory at `source`, once.
    ///
    /// # Panics
    /// When `source` is not page-aligned or there is not enough [`Self::room`].
    ///
    /// # Safety
    /// `pages` whole pages at `source` must be mapped and readable during the call, and must not overlap the
    /// destination. They may change meanwhile.
    pub unsafe fn read(&mut self, source: *const u8, pages: usize) {
        self.admit(source, pages);
        let mut first_normal = self.normal;
        for page in 0..pages {
            let target = &mut self.copy[self.normal * PAGE_SIZE..][..PAGE_SIZE];
            // SAFETY: the source page is within what the caller vouches for and is page-aligned; the target is a whole
            // page of our own buffer; `copy_page` was chosen for this CPU.
            let zero = unsafe { (self.copy_page)(source.add(page * PAGE_SIZE), target.as_mut_ptr()) };
            self.note(zero);
            self.normal += usize::from(!zero);
            if self.normal - first_normal >= CHECKSUM_PAGES {
                self.add_to_checksum(first_normal);
                first_normal = self.normal;
            }
        }
        self.add_to_checksum(first_normal);
    }

    /// The result. The destination buffer and the zero map now hold what it describes.
    pub fn finish(self) -> SnapshotResult {
        SnapshotResult { pages: self.pages, normal: self.normal, checksum: self.checksum.map_or(0, Crc32c::finish) }
    }

    fn admit(&self, source: *const u8, pages: usize) {
        assert!(source.addr().is_multiple_of(PAGE_SIZE), "guest page at {source:?} is not page-aligned");
        assert!(pages <= self.room(), "a snapshot with room for {} pages was given {pages}", self.room());
    }

    fn note(&mut self, zero: bool) {
        let (word, bit) = (self.pages / 64, self.pages % 64);
        // The first page of a word starts it afresh, whatever the caller's buffer held.
        let before = if bit == 0 { 0 } else { self.zero_map[word] };
        self.zero_map[word] = before | u64::from(zero) << bit;
        self.pages += 1;
    }

    fn add_to_checksum(&mut self, first_normal: usize) {
        if let Some(checksum) = &mut self.checksum {
            checksum.update(&self.copy[first_normal * PAGE_SIZE..self.normal * PAGE_SIZE]);
        }
    }
}

/// One contiguous range as a whole snapshot: `zero_map` and `copy` as in [`Snapshot::new`].
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

/// The way this CPU copies a page best.
fn copy_page() -> CopyPage {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        return x86::copy_page;
    }
    copy_page_scalar
}

/// # Safety
/// `source` readable and 8-byte aligned, `target` writable, both for a page, not overlapping.
unsafe fn copy_page_scalar(source: *const u8, target: *mut u8) -> bool {
    const WORDS: usize = PAGE_SIZE / 8;
    let (source, target) = (source.cast::<u64>(), target.cast::<u64>());
    // SAFETY: all indices are below WORDS; the caller vouches for a page on both sides and for alignment of the source.
    unsafe {
        let mut at = 0;
        let first = loop {
            if at == WORDS {
                return true;
            }
            let word = source.add(at).read_volatile();
            if word != 0 {
                break word;
            }
            at += 1;
        };
        target.cast::<u8>().write_bytes(0, at * 8);
        target.add(at).write_unaligned(first);
        for at in at + 1..WORDS {
            target.add(at).write_unaligned(source.add(at).read_volatile());
        }
    }
    false
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::PAGE_SIZE;
    use std::arch::x86_64::*;

    /// Bytes looked at together.
    const BLOCK: usize = 128;

    /// # Safety
    /// `source` readable and 32-byte aligned, `target` writable, both for a page, not overlapping; AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_page(source: *const u8, target: *mut u8) -> bool {
        // SAFETY: every block lies within the page that the caller vouches for; loads are aligned because the source is
        // and offsets are multiples of 32; stores need no alignment.
        unsafe {
            let load = |at: usize| source.add(at).cast::<__m256i>().read_volatile();
            let store = |at: usize, value| _mm256_storeu_si256(target.add(at).cast(), value);
            let mut at = 0;
            while at < PAGE_SIZE {
                let (a, b, c, d) = (load(at), load(at + 32), load(at + 64), load(at + 96));
                let all = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
                if _mm256_testz_si256(all, all) == 0 {
                    target.write_bytes(0, at);
                    store(at, a);
                    store(at + 32, b);
                    store(at + 64, c);
                    store(at + 96, d);
                    at += BLOCK;
                    while at < PAGE_SIZE {
                        let (a, b, c, d) = (load(at), load(at + 32), load(at + 64), load(at + 96));
                        store(at, a);
                        store(at + 32, b);
                        store(at + 64, c);
                        store(at + 96, d);
                        at += BLOCK;
                    }
                    return false;
                }
                at += BLOCK;
            }
        }
        true
    }
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

        #[test]
        fn both_ways_to_copy_a_page_agree(value in any::<u8>(), at in 0..PAGE_SIZE, offset in 0usize..64) {
            let guest = pages_of(&[(value, at)]);
            for way in [copy_page_scalar as CopyPage, copy_page()] {
                let mut copy = vec![0xaa; PAGE_SIZE + 64 + 1];
                // SAFETY: the source is one aligned page, the target has a page after its offset.
                let zero = unsafe { way(guest.ptr(), copy.as_mut_ptr().add(offset)) };
                prop_assert_eq!(zero, value == 0);
                let expected: &[u8] = if zero { &[0xaa; PAGE_SIZE] } else { guest.bytes() };
                prop_assert_eq!(&copy[offset..offset + PAGE_SIZE], expected);
                prop_assert!(copy[..offset].iter().chain(&copy[offset + PAGE_SIZE..]).all(|byte| *byte == 0xaa));
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
                assert!(normal.chunks(PAGE_SIZE).all(|page| !crate::scan::is_zero(page)));
                let zero: u32 = map.iter().map(|word| word.count_ones()).sum();
                assert_eq!(result.normal + zero as usize, PAGES);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
