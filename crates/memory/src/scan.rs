//! Is this memory all zero? The zero test every page passes before it is sent.
//!
//! One question, several implementations, one of them chosen once per process by what the CPU offers. All of them look
//! first at a few places far apart, because a page that is not zero nearly always shows it there, and leave at the
//! first non-zero block.
//!
//! The raw-pointer form reads guest memory that its guest may be changing. A verdict "zero" then means that every byte
//! was zero when it was read, and "not zero" that some byte was not: both are all a sender needs, as a page written
//! meanwhile is in the dirty log and is sent again.

use std::sync::LazyLock;

/// The shortest length given to a vector implementation, and the longest tail handled by one unaligned vector.
const SHORTEST_VECTOR: usize = 64;

/// One way to do the zero test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// 64-bit words, on every CPU.
    Scalar,
    /// 256-bit vectors.
    Avx2,
    /// 512-bit vectors (AVX-512F).
    Avx512,
}

impl Implementation {
    /// Every implementation this CPU can run; the scalar one always.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                all.push(Self::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Self::Avx512);
            }
        }
        all
    }

    /// The one in use.
    ///
    /// AVX2 goes before AVX-512: where it was measured (Zen 4, `examples/memory_throughput.rs`) the wider one was slower
    /// from DRAM and no faster on early exits beyond noise, and on some older CPUs 512-bit vectors lower the clock.
    pub fn chosen() -> Self {
        static CHOSEN: LazyLock<Implementation> = LazyLock::new(|| {
            let available = Implementation::available();
            [Implementation::Avx2, Implementation::Avx512]
                .into_iter()
                .find(|wanted| available.contains(wanted))
                .unwrap_or(Implementation::Scalar)
        });
        *CHOSEN
    }

    /// As [`is_zero_raw`], by this implementation.
    ///
    /// # Safety
    /// `ptr..ptr + len` must be mapped and readable during the call, and `self` one of [`Self::available`].
    pub unsafe fn is_zero_raw(self, ptr: *const u8, len: usize) -> bool {
        // SAFETY: the caller vouches for the range; `looks_zero` stays inside it.
        if !unsafe { looks_zero(ptr, len) } {
            return false;
        }
        if len < SHORTEST_VECTOR {
            // SAFETY: the caller vouches for the range.
            return unsafe { scalar(ptr, len) };
        }
        match self {
            // SAFETY: the caller vouches for the range.
            Self::Scalar => unsafe { scalar(ptr, len) },
            // SAFETY: as above; the caller vouches that this CPU has AVX2, and len >= 64.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::avx2(ptr, len) },
            // SAFETY: as above; the caller vouches that this CPU has AVX-512F, and len >= 64.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::avx512(ptr, len) },
            // SAFETY: the caller vouches for the range.
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => unsafe { scalar(ptr, len) },
        }
    }
}

/// Whether all of `bytes` is zero. Empty is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: a slice is readable over its whole length.
    unsafe { is_zero_raw(bytes.as_ptr(), bytes.len()) }
}

/// Whether `len` bytes at `ptr` are all zero, in memory that someone else may be writing at the same time.
///
/// Any alignment, any length. Memory that was never populated is faulted in by reading it: search for holes first
/// ([`crate::holes`]).
///
/// # Safety
/// `ptr..ptr + len` must be mapped and readable during the call. It may change meanwhile.
pub unsafe fn is_zero_raw(ptr: *const u8, len: usize) -> bool {
    // SAFETY: the caller vouches for the range; `chosen` is one that this CPU can run.
    unsafe { Implementation::chosen().is_zero_raw(ptr, len) }
}

/// Looks at the first, middle and last eight bytes, or says true for what is too short to have them.
///
/// # Safety
/// As [`is_zero_raw`].
#[inline]
unsafe fn looks_zero(ptr: *const u8, len: usize) -> bool {
    if len < 24 {
        return true;
    }
    // SAFETY: 8 bytes from 0, len/2 and len-8 lie within len >= 24 bytes, which the caller vouches for.
    unsafe {
        let word = |at: usize| ptr.add(at).cast::<u64>().read_unaligned();
        word(0) | word(len / 2) | word(len - 8) == 0
    }
}

/// # Safety
/// As [`is_zero_raw`].
unsafe fn scalar(ptr: *const u8, len: usize) -> bool {
    let mut at = 0;
    // SAFETY: every read below lies within `len` bytes of `ptr`.
    unsafe {
        while at + 32 <= len {
            let word = |i: usize| ptr.add(at + 8 * i).cast::<u64>().read_unaligned();
            if word(0) | word(1) | word(2) | word(3) != 0 {
                return false;
            }
            at += 32;
        }
        while at < len {
            if ptr.add(at).read() != 0 {
                return false;
            }
            at += 1;
        }
    }
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`super::is_zero_raw`], with `len >= 32`.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(ptr: *const u8, len: usize) -> bool {
        let mut at = 0;
        // SAFETY: every load ends at or before `len`; the last one starts at len - 32 >= 0.
        unsafe {
            let load = |at: usize| _mm256_loadu_si256(ptr.add(at).cast());
            while at + 256 <= len {
                let a = _mm256_or_si256(load(at), load(at + 32));
                let b = _mm256_or_si256(load(at + 64), load(at + 96));
                let c = _mm256_or_si256(load(at + 128), load(at + 160));
                let d = _mm256_or_si256(load(at + 192), load(at + 224));
                let all = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
                if _mm256_testz_si256(all, all) == 0 {
                    return false;
                }
                at += 256;
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
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(ptr: *const u8, len: usize) -> bool {
        let mut at = 0;
        // SAFETY: every load ends at or before `len`; the last one starts at len - 64 >= 0.
        unsafe {
            let load = |at: usize| _mm512_loadu_si512(ptr.add(at).cast());
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by(implementation: Implementation, bytes: &[u8]) -> bool {
        // SAFETY: a slice is readable; callers take the implementation from `available`.
        unsafe { implementation.is_zero_raw(bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn one_set_bit_at_any_place_of_any_length_is_seen_by_every_implementation() {
        for implementation in Implementation::available() {
            for len in (0..600).chain([4095, 4096, 4097]) {
                let mut bytes = vec![0u8; len + 3];
                // Neighbours are not zero: reading outside would be noticed.
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
        let page = crate::PAGE_SIZE;
        let area = crate::test_util::Area::anonymous(2 * page);
        area.forbid(page, page);
        for implementation in Implementation::available() {
            for len in 0..=page {
                // SAFETY: the first page of the area is readable, and `len` is within it.
                let zero = unsafe { implementation.is_zero_raw(area.ptr().add(page - len), len) };
                assert!(zero, "{implementation:?}, {len} bytes");
            }
        }
    }

    proptest! {
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
            for implementation in Implementation::available() {
                prop_assert_eq!(by(implementation, &bytes[offset..]), expected, "{:?}", implementation);
            }
            prop_assert_eq!(is_zero(&bytes[offset..]), expected);
        }
    }
}
