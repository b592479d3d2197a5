//! The zero test that every page passes before it is sent.
//!
//! There is an implementation for each [`Implementation`]. All read the first eight bytes, in which nearly every page
//! that is not zero differs, then go through from the start and stop at the first block that is not zero. Probing the
//! middle and the end too was slower by a fifth on zero pages from DRAM, because it breaks the order in which the
//! hardware prefetches, and saves nothing on others: bytes that are not read here are read when the page is sent.
//!
//! The raw-pointer forms read guest memory that the guest may be changing, by volatile loads (`copy.rs`). The result
//! "zero" then means that every byte was zero when it was read, and "not zero" that some byte was not. Both are
//! sufficient for a sender, as a page written meanwhile is in the dirty log and is sent again.

use crate::PAGE_SIZE;
pub use crate::cpu::Implementation;
use crate::cpu::prefetch;
use crate::load::{load, load_block};

/// The shortest length for a vector implementation, and the longest tail handled by one unaligned vector.
const SHORTEST_VECTOR: usize = 64;

/// How many pages ahead a run of pages that are not zero is prefetched. Of 1 to 16 this was the best or near it on
/// every mix. Behind a zero page no page is prefetched: there the hardware's own prefetching is better undisturbed.
const PAGES_AHEAD: usize = 8;

impl Implementation {
    /// As [`is_zero_raw`], by this implementation.
    ///
    /// # Safety
    /// `ptr..ptr + len` must be mapped and readable during the call, and `self` one of [`Self::available`].
    pub unsafe fn is_zero_raw(self, ptr: *const u8, len: usize) -> bool {
        if len < SHORTEST_VECTOR {
            // SAFETY: the caller vouches for the range.
            return unsafe { scalar(ptr, len) };
        }
        // SAFETY: the first eight of at least 64 bytes, for which the caller vouches.
        if unsafe { !starts_zero(ptr) } {
            return false;
        }
        match self {
            // SAFETY: as above; the caller vouches that this CPU has AVX2, and len >= 64.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::avx2(ptr, len) },
            // SAFETY: as above; the caller vouches that this CPU has AVX-512F, and len >= 64.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::avx512(ptr, len) },
            // SAFETY: as above; NEON is part of the target, and len >= 64.
            #[cfg(target_arch = "aarch64")]
            Self::Neon => unsafe { aarch64::neon(ptr, len) },
            // SAFETY: the caller vouches for the range.
            _ => unsafe { scalar(ptr, len) },
        }
    }

    /// As [`zero_map_raw`], by this implementation.
    ///
    /// # Panics
    /// As [`zero_map_raw`].
    ///
    /// # Safety
    /// As [`zero_map_raw`], and `self` is one of [`Self::available`].
    pub unsafe fn zero_map_raw(self, ptr: *const u8, pages: usize, zero_map: &mut [u64]) -> usize {
        assert!(ptr.addr().is_multiple_of(PAGE_SIZE), "guest page at {ptr:?} is not page-aligned");
        let words = pages.div_ceil(64);
        assert!(words <= zero_map.len(), "a zero map of {} words for {pages} pages", zero_map.len());
        let zero_map = &mut zero_map[..words];
        match self {
            // SAFETY: passed on; the caller vouches that this CPU has AVX2.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::avx2_map(ptr, pages, zero_map) },
            // SAFETY: passed on; the caller vouches that this CPU has AVX-512F.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::avx512_map(ptr, pages, zero_map) },
            // SAFETY: passed on; NEON is part of the target.
            #[cfg(target_arch = "aarch64")]
            Self::Neon => unsafe { map_pages(ptr, pages, zero_map, |page| aarch64::neon(page, PAGE_SIZE)) },
            // SAFETY: passed on; a page is given to the closure only within the range.
            _ => unsafe { map_pages(ptr, pages, zero_map, |page| scalar(page, PAGE_SIZE)) },
        }
    }
}

/// Returns whether all of `bytes` is zero. An empty slice is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: a slice is readable over its whole length.
    unsafe { is_zero_raw(bytes.as_ptr(), bytes.len()) }
}

/// Returns whether `len` bytes at `ptr` are all zero, in memory that other threads may be writing at the same time.
///
/// Any alignment, any length. Reading faults in memory that was never populated: search for holes first
/// ([`crate::holes`]).
///
/// # Safety
/// `ptr..ptr + len` must be mapped and readable during the call. It may change meanwhile.
pub unsafe fn is_zero_raw(ptr: *const u8, len: usize) -> bool {
    // SAFETY: the caller vouches for the range; `chosen` is one that this CPU can run.
    unsafe { Implementation::chosen().is_zero_raw(ptr, len) }
}

/// Tests each of `pages` pages of [`PAGE_SIZE`] bytes at `ptr` for zero, and returns how many are zero.
///
/// Bit `i % 64` of word `i / 64` of `zero_map` is set when page `i` is zero. As many words as the pages need are
/// written, with bits beyond the last page clear; further words are not changed. As for [`is_zero_raw`], the memory may
/// change meanwhile, and unpopulated memory is faulted in.
///
/// # Panics
/// If `ptr` is not page-aligned or `zero_map` has fewer than `pages` bits.
///
/// # Safety
/// `pages` whole pages at `ptr` must be mapped and readable during the call.
pub unsafe fn zero_map_raw(ptr: *const u8, pages: usize, zero_map: &mut [u64]) -> usize {
    // SAFETY: passed on from the caller; `chosen` is one that this CPU can run.
    unsafe { Implementation::chosen().zero_map_raw(ptr, pages, zero_map) }
}

/// Returns whether the first eight bytes are zero.
///
/// # Safety
/// They must be readable.
#[inline(always)]
unsafe fn starts_zero(ptr: *const u8) -> bool {
    // SAFETY: the caller vouches for them.
    unsafe { load::<u64>(ptr) == 0 }
}

/// The loop over a run of pages that all implementations share. Inlined, so that `page_is_zero` may be too: a call for
/// each page costs as much as the test of a page that is not zero.
///
/// # Safety
/// `pages` whole pages at `ptr` must be readable; `zero_map` has exactly the words for them.
#[inline(always)]
unsafe fn map_pages(
    ptr: *const u8,
    pages: usize,
    zero_map: &mut [u64],
    page_is_zero: impl Fn(*const u8) -> bool,
) -> usize {
    let mut zero_pages = 0;
    let mut last_was_zero = false;
    for (word_number, word) in zero_map.iter_mut().enumerate() {
        let first = word_number * 64;
        let mut bits = 0u64;
        for number in first..pages.min(first + 64) {
            if !last_was_zero && number + PAGES_AHEAD < pages {
                prefetch(ptr.wrapping_add((number + PAGES_AHEAD) * PAGE_SIZE));
            }
            // SAFETY: `number` is below `pages`, for all of which the caller vouches.
            let page = unsafe { ptr.add(number * PAGE_SIZE) };
            // SAFETY: a page has eight bytes.
            last_was_zero = unsafe { starts_zero(page) } && page_is_zero(page);
            bits |= u64::from(last_was_zero) << (number - first);
        }
        zero_pages += bits.count_ones() as usize;
        *word = bits;
    }
    zero_pages
}

/// # Safety
/// As [`is_zero_raw`].
#[inline]
unsafe fn scalar(ptr: *const u8, len: usize) -> bool {
    let mut at = 0;
    // SAFETY: every read below lies within `len` bytes of `ptr`.
    unsafe {
        while at + 64 <= len {
            let words: [u64; 8] = load_block(ptr.add(at));
            if words.into_iter().fold(0, |all, word| all | word) != 0 {
                return false;
            }
            at += 64;
        }
        while at < len {
            if ptr.add(at).read_volatile() != 0 {
                return false;
            }
            at += 1;
        }
    }
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{PAGE_SIZE, load, map_pages};
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`super::map_pages`].
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2_map(ptr: *const u8, pages: usize, zero_map: &mut [u64]) -> usize {
        // SAFETY: passed on; the closure gets whole pages within the range.
        unsafe { map_pages(ptr, pages, zero_map, |page| avx2(page, PAGE_SIZE)) }
    }

    /// # Safety
    /// As [`super::map_pages`].
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512_map(ptr: *const u8, pages: usize, zero_map: &mut [u64]) -> usize {
        // SAFETY: passed on; the closure gets whole pages within the range.
        unsafe { map_pages(ptr, pages, zero_map, |page| avx512(page, PAGE_SIZE)) }
    }

    /// # Safety
    /// As [`super::is_zero_raw`], with `len >= 32`.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(ptr: *const u8, len: usize) -> bool {
        let mut at = 0;
        // SAFETY: every load ends at or before `len`; the last one starts at len - 32 >= 0.
        unsafe {
            let load = |at: usize| load::<__m256i>(ptr.add(at));
            while at + 128 <= len {
                let a = _mm256_or_si256(load(at), load(at + 32));
                let b = _mm256_or_si256(load(at + 64), load(at + 96));
                let all = _mm256_or_si256(a, b);
                if _mm256_testz_si256(all, all) == 0 {
                    return false;
                }
                at += 128;
            }
            let mut all = load(len - 32);
            while at + 32 <= len {
                all = _mm256_or_si256(all, load(at));
                at += 32;
            }
            _mm256_testz_si256(all, all) != 0
        }
    }

    /// # Safety
    /// As [`super::is_zero_raw`], with `len >= 64`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(ptr: *const u8, len: usize) -> bool {
        let mut at = 0;
        // SAFETY: every load ends at or before `len`; the last one starts at len - 64 >= 0.
        unsafe {
            let load = |at: usize| load::<__m512i>(ptr.add(at));
            while at + 256 <= len {
                let a = _mm512_or_si512(load(at), load(at + 64));
                let b = _mm512_or_si512(load(at + 128), load(at + 192));
                let all = _mm512_or_si512(a, b);
                if _mm512_test_epi64_mask(all, all) != 0 {
                    return false;
                }
                at += 256;
            }
            let mut all = load(len - 64);
            while at + 64 <= len {
                all = _mm512_or_si512(all, load(at));
                at += 64;
            }
            _mm512_test_epi64_mask(all, all) == 0
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::load_block;
    use std::arch::aarch64::*;

    /// # Safety
    /// As [`super::is_zero_raw`], with `len >= 64`.
    #[inline]
    pub(super) unsafe fn neon(ptr: *const u8, len: usize) -> bool {
        let mut at = 0;
        // SAFETY: every load ends at or before `len`; the last one starts at len - 64 >= 0.
        unsafe {
            let or = |a, b| vorrq_u8(a, b);
            let load = |at: usize| {
                let [a, b, c, d]: [uint8x16_t; 4] = load_block(ptr.add(at));
                or(or(a, b), or(c, d))
            };
            let zero = |all: uint8x16_t| vmaxvq_u32(vreinterpretq_u32_u8(all)) == 0;
            while at + 128 <= len {
                if !zero(or(load(at), load(at + 64))) {
                    return false;
                }
                at += 128;
            }
            let mut all = load(len - 64);
            if at + 64 <= len {
                all = or(all, load(at));
            }
            zero(all)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by(implementation: Implementation, bytes: &[u8]) -> bool {
        // SAFETY: a slice is readable; callers take the implementation from `available`.
        unsafe { implementation.is_zero_raw(bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn one_set_bit_at_any_place_of_any_length_is_found_by_every_implementation() {
        for &implementation in Implementation::available() {
            for len in (0..600).chain([4095, 4096, 4097]) {
                let mut bytes = vec![0u8; len + 3];
                // Neighbours are not zero, so that a read outside would be noticed.
                bytes[..3].fill(0xff);
                assert!(by(implementation, &bytes[3..]), "{implementation:?}, {len} zero bytes");
                for at in 0..len {
                    bytes[3 + at] = 1 << (at % 8);
                    assert!(!by(implementation, &bytes[3..]), "{implementation:?}, {len} bytes, set at {at}");
                    bytes[3 + at] = 0;
                }
            }
        }
    }

    #[test]
    fn a_range_that_ends_at_an_unmapped_page_is_read_to_its_last_byte_only() {
        let page = PAGE_SIZE;
        let area = crate::test_util::Area::anonymous(2 * page);
        area.forbid(page, page);
        for &implementation in Implementation::available() {
            for len in 0..=page {
                // SAFETY: the first page of the area is readable, and `len` is within it.
                let zero = unsafe { implementation.is_zero_raw(area.ptr().add(page - len), len) };
                assert!(zero, "{implementation:?}, {len} bytes");
            }
        }
    }

    #[test]
    fn a_zero_map_reads_no_page_beyond_the_run_and_writes_no_word_beyond_its_bits() {
        let area = crate::test_util::Area::anonymous(100 * PAGE_SIZE);
        area.forbid(99 * PAGE_SIZE, PAGE_SIZE);
        for &implementation in Implementation::available() {
            for pages in [0, 1, 63, 64, 65, 99] {
                let mut map = [0xdead_beef; 3];
                // SAFETY: the pages before the forbidden one are readable.
                let zero =
                    unsafe { implementation.zero_map_raw(area.ptr().add((99 - pages) * PAGE_SIZE), pages, &mut map) };
                assert_eq!(zero, pages, "{implementation:?}");
                for (number, word) in map.iter().enumerate() {
                    let bits = pages.saturating_sub(64 * number).min(64);
                    let expected = if bits == 0 { 0xdead_beef } else { u64::MAX >> (64 - bits) };
                    assert_eq!(*word, expected, "{implementation:?}, {pages} pages, word {number}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a zero map of 1 words for 65 pages")]
    fn a_zero_map_that_is_too_short_is_refused() {
        let area = crate::test_util::Area::anonymous(65 * PAGE_SIZE);
        // SAFETY: the area has 65 pages.
        unsafe { zero_map_raw(area.ptr(), 65, &mut [0]) };
    }

    #[test]
    #[should_panic(expected = "is not page-aligned")]
    fn a_zero_map_of_an_unaligned_address_is_refused() {
        let area = crate::test_util::Area::anonymous(2 * PAGE_SIZE);
        // SAFETY: the area has the page and eight bytes more.
        unsafe { zero_map_raw(area.ptr().add(8), 1, &mut [0]) };
    }

    proptest! {
        #[test]
        fn every_zero_map_agrees_with_the_bytes_of_each_page(
            kinds in proptest::collection::vec((prop_oneof![Just(0u8), 1u8..], 0..PAGE_SIZE), 0..150),
        ) {
            let area = crate::test_util::Area::anonymous(kinds.len().max(1) * PAGE_SIZE);
            for (page, (value, at)) in kinds.iter().enumerate() {
                area.bytes_mut()[page * PAGE_SIZE + at] = *value;
            }
            for &implementation in Implementation::available() {
                let mut map = vec![u64::MAX; kinds.len().div_ceil(64)];
                // SAFETY: the area has as many pages as there are kinds.
                let zero = unsafe { implementation.zero_map_raw(area.ptr(), kinds.len(), &mut map) };
                prop_assert_eq!(zero, kinds.iter().filter(|(value, _)| *value == 0).count());
                let set: u32 = map.iter().map(|word| word.count_ones()).sum();
                prop_assert_eq!(set as usize, zero);
                for (page, (value, _)) in kinds.iter().enumerate() {
                    prop_assert_eq!(map[page / 64] >> (page % 64) & 1 == 1, *value == 0, "page {}", page);
                }
            }
        }

        #[test]
        fn every_implementation_agrees_with_looking_at_each_byte(
            len in 0usize..9000,
            offset in 0usize..64,
            set in proptest::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..3),
        ) {
            let mut bytes = vec![0u8; offset + len];
            for (place, value) in &set {
                if len > 0 {
                    bytes[offset + place.index(len)] = *value;
                }
            }
            let expected = bytes[offset..].iter().all(|byte| *byte == 0);
            for &implementation in Implementation::available() {
                prop_assert_eq!(by(implementation, &bytes[offset..]), expected, "{:?}", implementation);
            }
            prop_assert_eq!(is_zero(&bytes[offset..]), expected);
        }
    }
}
