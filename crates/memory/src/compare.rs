//! Finds where two pieces of memory first differ.
//!
//! The raw-pointer forms compare memory that may be changing: every byte is loaded once, and the result is about the
//! loaded values. "Equal" then means that each byte was equal when its two copies were read, at different times for
//! different bytes.

use std::ops::ControlFlow;

use crate::cpu::{Implementation, prefetch};
use crate::load::load_block;

/// The longest block that is compared at once, in bytes.
const BLOCK: usize = 256;
/// Bytes of a cache line.
const LINE: usize = 64;

impl Implementation {
    /// As [`first_difference_raw`], by this implementation.
    ///
    /// # Safety
    /// As [`first_difference_raw`], and `self` is one of [`Self::available`].
    pub unsafe fn first_difference_raw(self, first: *const u8, second: *const u8, len: usize) -> Option<usize> {
        let mut place = None;
        let find = |at: usize, _: u32, first: &[u8], second: &[u8]| {
            place = first.iter().zip(second).position(|(a, b)| a != b).map(|within| at + within);
            ControlFlow::Break(())
        };
        // SAFETY: passed on.
        unsafe { self.differences(first, second, len, None, find) };
        place
    }

    /// Goes through both ranges in order and calls `found` for each block that differs: with the block's offset, a bit
    /// for each of its words that differs (the first word's is the lowest), and the values read from the first and from
    /// the second range. Blocks begin at multiples of 8 and are whole words of 8 bytes, except for the last `len % 8`
    /// bytes. Continues until `found` stops it.
    ///
    /// `ahead` is the memory that will be read next, of the same length, and is prefetched: the hardware's prefetchers
    /// stop at a page's end. It need not be readable.
    ///
    /// # Safety
    /// Both ranges must be readable for `len` bytes, and `self` one of [`Self::available`].
    #[inline(always)]
    pub(crate) unsafe fn differences(
        self,
        first: *const u8,
        second: *const u8,
        len: usize,
        ahead: Option<*const u8>,
        found: impl FnMut(usize, u32, &[u8], &[u8]) -> ControlFlow<()>,
    ) {
        match self {
            // SAFETY: passed on; the caller vouches that this CPU has AVX2.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::avx2(first, second, len, ahead, found) },
            // SAFETY: passed on; the caller vouches that this CPU has AVX-512F.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::avx512(first, second, len, ahead, found) },
            // SAFETY: passed on; NEON is part of the target.
            #[cfg(target_arch = "aarch64")]
            Self::Neon => unsafe { aarch64::neon(first, second, len, ahead, found) },
            // SAFETY: passed on.
            _ => unsafe {
                let differ = |a: [u64; 8], b: [u64; 8]| (0..8).fold(0, |mask, i| mask | u32::from(a[i] != b[i]) << i);
                walk(first, second, len, ahead, differ, found);
            },
        }
    }
}

/// Returns the offset of the first byte in which `first` and `second` differ; none if they are equal.
///
/// # Panics
/// If they are not of the same length.
pub fn first_difference(first: &[u8], second: &[u8]) -> Option<usize> {
    assert_eq!(first.len(), second.len(), "slices of different lengths are compared");
    // SAFETY: slices are readable over their whole length.
    unsafe { first_difference_raw(first.as_ptr(), second.as_ptr(), first.len()) }
}

/// As [`first_difference`], for `len` bytes of memory that other threads may be writing. Any alignment, any length.
///
/// # Safety
/// Both ranges must be mapped and readable during the call.
pub unsafe fn first_difference_raw(first: *const u8, second: *const u8, len: usize) -> Option<usize> {
    // SAFETY: passed on; `chosen` is one that this CPU can run.
    unsafe { Implementation::chosen().first_difference_raw(first, second, len) }
}

/// The loop of [`Implementation::differences`], in blocks of `N` vectors `V`; `differ` returns which words of two
/// blocks differ.
///
/// # Safety
/// Both ranges must be readable for `len` bytes; `V` is made of plain bytes.
#[inline(always)]
unsafe fn walk<V: Copy, const N: usize>(
    first: *const u8,
    second: *const u8,
    len: usize,
    ahead: Option<*const u8>,
    differ: impl Fn([V; N], [V; N]) -> u32,
    mut found: impl FnMut(usize, u32, &[u8], &[u8]) -> ControlFlow<()>,
) {
    let step = N * size_of::<V>();
    let mut at = 0;
    // SAFETY: every read below ends at or before `len`.
    unsafe {
        while at + step <= len {
            if let Some(ahead) = ahead {
                (0..step).step_by(LINE).for_each(|line| prefetch(ahead.wrapping_add(at + line)));
            }
            let (a, b): ([V; N], [V; N]) = (load_block(first.add(at)), load_block(second.add(at)));
            let mask = differ(a, b);
            if mask != 0 && found(at, mask, &bytes_of(a)[..step], &bytes_of(b)[..step]).is_break() {
                return;
            }
            at += step;
        }
        while at + 8 <= len {
            let ([a], [b]): ([u64; 1], [u64; 1]) = (load_block(first.add(at)), load_block(second.add(at)));
            if a != b && found(at, 1, &a.to_ne_bytes(), &b.to_ne_bytes()).is_break() {
                return;
            }
            at += 8;
        }
        while at < len {
            let (a, b) = (first.add(at).read_volatile(), second.add(at).read_volatile());
            if a != b && found(at, 1, &[a], &[b]).is_break() {
                return;
            }
            at += 1;
        }
    }
}

/// Returns the loaded values as bytes, followed by zeros.
///
/// # Safety
/// `V` is made of plain bytes.
#[inline(always)]
unsafe fn bytes_of<V: Copy, const N: usize>(block: [V; N]) -> [u8; BLOCK] {
    const { assert!(N * size_of::<V>() <= BLOCK) };
    let mut bytes = [0; BLOCK];
    // SAFETY: the assertion above says that it fits.
    unsafe { bytes.as_mut_ptr().cast::<[V; N]>().write_unaligned(block) };
    bytes
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ControlFlow, walk};
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`super::walk`]; AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(
        first: *const u8,
        second: *const u8,
        len: usize,
        ahead: Option<*const u8>,
        found: impl FnMut(usize, u32, &[u8], &[u8]) -> ControlFlow<()>,
    ) {
        let differ = |a: [__m256i; 4], b: [__m256i; 4]| {
            let xor = |i: usize| _mm256_xor_si256(a[i], b[i]);
            let all = _mm256_or_si256(_mm256_or_si256(xor(0), xor(1)), _mm256_or_si256(xor(2), xor(3)));
            if _mm256_testz_si256(all, all) != 0 {
                return 0;
            }
            let same = |i: usize| _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(a[i], b[i]))) as u32;
            (0..4).fold(0, |mask, i| mask | (!same(i) & 0xf) << (4 * i))
        };
        // SAFETY: passed on; vectors are plain bytes.
        unsafe { walk(first, second, len, ahead, differ, found) };
    }

    /// # Safety
    /// As [`super::walk`]; AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(
        first: *const u8,
        second: *const u8,
        len: usize,
        ahead: Option<*const u8>,
        found: impl FnMut(usize, u32, &[u8], &[u8]) -> ControlFlow<()>,
    ) {
        let differ = |a: [__m512i; 4], b: [__m512i; 4]| {
            let word = |i: usize| u32::from(_mm512_cmpneq_epi64_mask(a[i], b[i]));
            word(0) | word(1) << 8 | word(2) << 16 | word(3) << 24
        };
        // SAFETY: passed on; vectors are plain bytes.
        unsafe { walk(first, second, len, ahead, differ, found) };
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::{ControlFlow, walk};
    use std::arch::aarch64::*;

    /// # Safety
    /// As [`super::walk`].
    pub(super) unsafe fn neon(
        first: *const u8,
        second: *const u8,
        len: usize,
        ahead: Option<*const u8>,
        found: impl FnMut(usize, u32, &[u8], &[u8]) -> ControlFlow<()>,
    ) {
        // SAFETY: NEON is part of the target.
        let differ = |a: [uint8x16_t; 8], b: [uint8x16_t; 8]| unsafe {
            let all = a.into_iter().zip(b).fold(vdupq_n_u8(0), |all, (a, b)| vorrq_u8(all, veorq_u8(a, b)));
            if vmaxvq_u32(vreinterpretq_u32_u8(all)) == 0 {
                return 0;
            }
            a.into_iter().zip(b).enumerate().fold(0, |mask, (i, (a, b))| {
                let xor = vreinterpretq_u64_u8(veorq_u8(a, b));
                let (low, high) = (vgetq_lane_u64::<0>(xor) != 0, vgetq_lane_u64::<1>(xor) != 0);
                mask | (u32::from(low) | u32::from(high) << 1) << (2 * i)
            })
        };
        // SAFETY: passed on; vectors are plain bytes.
        unsafe { walk(first, second, len, ahead, differ, found) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;
    use crate::test_util::Area;
    use proptest::prelude::*;

    fn by(implementation: Implementation, first: &[u8], second: &[u8]) -> Option<usize> {
        assert_eq!(first.len(), second.len());
        // SAFETY: slices are readable; callers take the implementation from `available`.
        unsafe { implementation.first_difference_raw(first.as_ptr(), second.as_ptr(), first.len()) }
    }

    #[test]
    fn one_differing_bit_at_any_place_of_any_length_is_found_by_every_implementation() {
        for &implementation in Implementation::available() {
            for len in (0..600).chain([4095, 4096, 4097]) {
                let first: Vec<u8> = (0..len + 3).map(|i| (i * 7) as u8).collect();
                let mut second = first.clone();
                // The bytes before and behind differ, so that a read outside would be noticed.
                second[0] ^= 1;
                second[len + 2] ^= 1;
                let range = 1..len + 1;
                assert_eq!(by(implementation, &first[range.clone()], &second[range.clone()]), None);
                for at in 0..len {
                    second[1 + at] ^= 1 << (at % 8);
                    let found = by(implementation, &first[range.clone()], &second[range.clone()]);
                    assert_eq!(found, Some(at), "{implementation:?}, {len} bytes");
                    second[1 + at] ^= 1 << (at % 8);
                }
            }
        }
    }

    #[test]
    fn ranges_that_end_at_an_unmapped_page_are_read_to_their_last_byte_only() {
        let (first, second) = (Area::anonymous(2 * PAGE_SIZE), Area::anonymous(2 * PAGE_SIZE));
        first.forbid(PAGE_SIZE, PAGE_SIZE);
        second.forbid(PAGE_SIZE, PAGE_SIZE);
        for &implementation in Implementation::available() {
            for len in 0..=PAGE_SIZE {
                let at = PAGE_SIZE - len;
                // SAFETY: the first page of each area is readable, and `len` is within it.
                let found =
                    unsafe { implementation.first_difference_raw(first.ptr().add(at), second.ptr().add(at), len) };
                assert_eq!(found, None, "{implementation:?}, {len} bytes");
            }
        }
    }

    proptest! {
        #[test]
        fn every_implementation_agrees_with_looking_at_each_byte(
            bytes in proptest::collection::vec(any::<u8>(), 0..3000),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            offset in any::<prop::sample::Index>(),
        ) {
            let mut other = bytes.clone();
            for (place, value) in &changes {
                if !other.is_empty() {
                    let at = place.index(other.len());
                    other[at] = *value;
                }
            }
            let offset = offset.index(bytes.len() + 1);
            let (first, second) = (&bytes[offset..], &other[offset..]);
            let expected = first.iter().zip(second).position(|(a, b)| a != b);
            for &implementation in Implementation::available() {
                prop_assert_eq!(by(implementation, first, second), expected, "{:?}", implementation);
            }
            prop_assert_eq!(first_difference(first, second), expected);
        }
    }
}
