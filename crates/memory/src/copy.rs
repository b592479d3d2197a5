//! Reading memory that is being written: every byte is loaded once, and the zero test, the copy and the checksum use
//! the value that was loaded.
//!
//! One loop serves all vector types; the vector type and the further work on each block come from the caller, and
//! everything is inlined. Stores to memory that other threads may access are the C library's, which the compiler does not see into.

use std::ffi::{c_int, c_void};

use crate::PAGE_SIZE;
use crate::checksum::Crc32c;
use crate::cpu::{Implementation, prefetch};
use crate::fold::{self, Folded, fold_raw};
use crate::load::load_block;

/// Copies the page at the first pointer to the second unless it is zero, and returns whether it was zero.
///
/// The third is the page that is read next. It need not be readable: methods that fold prefetch it while this page is
/// copied, because the hardware's prefetchers stop at a page's end, and that was faster by up to a sixth from memory in
/// huge pages; methods that only copy were slower by as much. A page that is not zero is added to the checksum if the
/// method folds.
///
/// # Safety
/// The first must be readable and the second writable for a page, and they must not overlap; this CPU must have what
/// the method needs.
pub(crate) type CopyPage = unsafe fn(*const u8, *mut u8, *const u8, &mut Folded) -> bool;

/// A method of copying pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyMethod {
    pub(crate) copy_page: CopyPage,
    /// Whether it includes the checksum.
    pub(crate) folds: bool,
}

impl CopyMethod {
    /// Returns the method of this implementation without the checksum.
    fn plain(implementation: Implementation) -> Option<Self> {
        let copy_page: CopyPage = match implementation {
            #[cfg(target_arch = "x86_64")]
            Implementation::Avx2 => x86::copy_page_avx2,
            #[cfg(target_arch = "aarch64")]
            Implementation::Neon => aarch64::copy_page,
            Implementation::Scalar => copy_page_scalar,
            _ => return None,
        };
        Some(Self { copy_page, folds: false })
    }

    /// Returns the method of this implementation with the checksum.
    fn folding(implementation: Implementation) -> Option<Self> {
        let copy_page: Option<CopyPage> = match implementation {
            #[cfg(target_arch = "x86_64")]
            Implementation::Avx2 => Some(x86::copy_page_folding_avx2),
            #[cfg(target_arch = "x86_64")]
            Implementation::Avx512 => Some(x86::copy_page_folding_avx512),
            _ => None,
        };
        copy_page.filter(|_| fold::folds_by(implementation)).map(|copy_page| Self { copy_page, folds: true })
    }

    /// Returns the best that this CPU has and `STERNA_CPU` allows.
    pub(crate) fn best(with_checksum: bool) -> Self {
        let mut best_first = Implementation::available().iter().rev().copied();
        let method = |implementation| {
            let folding = if with_checksum { Self::folding(implementation) } else { None };
            folding.or_else(|| Self::plain(implementation))
        };
        best_first.find_map(method).expect("the scalar method is always there")
    }

    /// Returns all methods.
    #[cfg(test)]
    fn all() -> impl Iterator<Item = Self> {
        let all = Implementation::available().iter();
        all.flat_map(|implementation| [Self::plain(*implementation), Self::folding(*implementation)]).flatten()
    }
}

/// Copies `len` bytes from memory that may change meanwhile, each loaded once. Any alignment.
///
/// # Safety
/// `source` must be readable and `target` writable for `len` bytes, and they must not overlap.
pub unsafe fn copy_raw(source: *const u8, target: *mut u8, len: usize) {
    match Implementation::chosen() {
        // SAFETY: passed on; the implementation is one that this CPU has.
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2 | Implementation::Avx512 => unsafe { x86::copy_avx2(source, target, len) },
        // SAFETY: passed on; NEON is part of the target.
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon => unsafe { copy_by::<std::arch::aarch64::uint8x16_t, 8>(source, target, len) },
        // SAFETY: passed on.
        _ => unsafe { copy_by::<u64, 8>(source, target, len) },
    }
}

/// Bytes that are copied before the checksum is computed over the copy, in the first-level cache.
const PIECE: usize = 16 << 10;

/// Copies the bytes at `source` to `target` and returns the CRC-32C of exactly these, as the continuation of `crc` (0
/// to begin with). The memory may change meanwhile: each byte is loaded once. Any alignment.
///
/// # Safety
/// `source` must be readable for the length of `target` and not overlap it.
pub unsafe fn copy_crc32c_raw(source: *const u8, target: &mut [u8], crc: u32) -> u32 {
    // SAFETY: passed on; the target is writable over its length.
    let (mut at, crc) = unsafe { fold_raw(source, Some(target.as_mut_ptr()), target.len(), crc) };
    let mut rest = Crc32c::after(crc);
    for piece in target[at..].chunks_mut(PIECE) {
        // SAFETY: the source is as long as the target, by the caller's word.
        unsafe { copy_raw(source.add(at), piece.as_mut_ptr(), piece.len()) };
        rest.update(piece);
        at += piece.len();
    }
    rest.finish()
}

/// Returns the CRC-32C of `len` bytes at `source`, as the continuation of `crc` (0 to begin with). The memory may
/// change meanwhile: each byte is loaded once. Any alignment.
///
/// # Safety
/// `source` must be readable for `len` bytes.
pub unsafe fn crc32c_raw(source: *const u8, len: usize, crc: u32) -> u32 {
    // SAFETY: passed on.
    let (mut at, crc) = unsafe { fold_raw(source, None, len, crc) };
    let mut rest = Crc32c::after(crc);
    let mut copy = [0; 4096];
    while at < len {
        let piece = &mut copy[..(len - at).min(4096)];
        // SAFETY: the piece lies within the length.
        unsafe { copy_raw(source.add(at), piece.as_mut_ptr(), piece.len()) };
        rest.update(piece);
        at += piece.len();
    }
    rest.finish()
}

/// The C library's functions for copying and filling memory. They are called through addresses that are read from here
/// each time, so the compiler knows neither the function nor that other threads do not access the memory. They are as
/// fast as the machine allows, which volatile stores are not: for ranges larger than the cache they use stores that do
/// not fetch the overwritten lines.
static COPY: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void = libc::memcpy;
static FILL: unsafe extern "C" fn(*mut c_void, c_int, usize) -> *mut c_void = libc::memset;

/// Copies `bytes` to memory that other threads may access meanwhile. Any alignment. A concurrent reader gets the old or
/// a new value of each byte.
///
/// # Safety
/// `target` must be writable for the length of `bytes`, and not overlap them.
pub unsafe fn store_raw(bytes: &[u8], target: *mut u8) {
    // SAFETY: a static that nothing writes.
    let copy = unsafe { (&raw const COPY).read_volatile() };
    // SAFETY: a slice is readable; the caller vouches for the target.
    unsafe { copy(target.cast(), bytes.as_ptr().cast(), bytes.len()) };
}

/// Fills `len` bytes with zeros in memory that other threads may access meanwhile. Any alignment.
///
/// # Safety
/// `target` must be writable for `len` bytes.
pub unsafe fn zero_raw(target: *mut u8, len: usize) {
    // SAFETY: a static that nothing writes.
    let fill = unsafe { (&raw const FILL).read_volatile() };
    // SAFETY: the caller vouches for the target.
    unsafe { fill(target.cast(), 0, len) };
}

/// # Safety
/// `N` vectors at `ptr` must be writable.
#[inline(always)]
unsafe fn store_block<V: Copy, const N: usize>(ptr: *mut u8, block: [V; N]) {
    // SAFETY: the caller vouches for the room.
    unsafe { ptr.cast::<[V; N]>().write_unaligned(block) };
}

/// The loop of a [`CopyPage`], in blocks of `N` vectors `V`, of which `nothing` is the zero one. `each` is called with
/// every block of a page that is not zero, in order.
///
/// # Safety
/// As [`CopyPage`]; blocks divide a page.
#[inline(always)]
unsafe fn copy_page_by<V: Copy, const N: usize>(
    source: *const u8,
    target: *mut u8,
    ahead: Option<*const u8>,
    nothing: V,
    is_zero: impl Fn([V; N]) -> bool,
    mut each: impl FnMut([V; N]),
) -> bool {
    let step = N * size_of::<V>();
    debug_assert!(PAGE_SIZE.is_multiple_of(step));
    let mut at = 0;
    // SAFETY: `at` goes in blocks, which divide a page, from 0 to the page's end, on both sides.
    unsafe {
        let mut block = loop {
            let block = load_block(source.add(at));
            if !is_zero(block) {
                break block;
            }
            at += step;
            if at == PAGE_SIZE {
                return true;
            }
        };
        // Blocks that were read as zero are not read again.
        for before in (0..at).step_by(step) {
            store_block(target.add(before), [nothing; N]);
            each([nothing; N]);
        }
        loop {
            if let Some(ahead) = ahead {
                for line in (0..step).step_by(64) {
                    prefetch(ahead.wrapping_add(at + line));
                }
            }
            store_block(target.add(at), block);
            each(block);
            at += step;
            if at == PAGE_SIZE {
                return false;
            }
            block = load_block(source.add(at));
        }
    }
}

/// # Safety
/// As [`CopyPage`].
unsafe fn copy_page_scalar(source: *const u8, target: *mut u8, _: *const u8, _: &mut Folded) -> bool {
    // SAFETY: passed on.
    unsafe {
        copy_page_by::<u64, 8>(
            source,
            target,
            None,
            0,
            |block| block.iter().fold(0, |all, word| all | word) == 0,
            |_| (),
        )
    }
}

/// # Safety
/// As [`copy_raw`].
#[inline(always)]
unsafe fn copy_by<V: Copy, const N: usize>(source: *const u8, target: *mut u8, len: usize) {
    let step = N * size_of::<V>();
    let mut at = 0;
    // SAFETY: every access below ends at or before `len`.
    unsafe {
        while at + step <= len {
            store_block(target.add(at), load_block::<V, N>(source.add(at)));
            at += step;
        }
        while at + 8 <= len {
            store_block(target.add(at), load_block::<u64, 1>(source.add(at)));
            at += 8;
        }
        while at < len {
            target.add(at).write(source.add(at).read_volatile());
            at += 1;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{copy_by, copy_page_by};
    use crate::fold::{Folded, x86::fold_block, x86::fold_block_avx2};
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`super::CopyPage`]; AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_page_avx2(source: *const u8, target: *mut u8, _: *const u8, _: &mut Folded) -> bool {
        let is_zero = |[a, b, c, d]: [__m256i; 4]| {
            let all = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
            _mm256_testz_si256(all, all) != 0
        };
        // SAFETY: passed on; 128 bytes divide a page.
        unsafe { copy_page_by(source, target, None, _mm256_setzero_si256(), is_zero, |_| ()) }
    }

    /// # Safety
    /// As [`super::CopyPage`]; AVX2 and VPCLMULQDQ.
    #[target_feature(enable = "avx2,vpclmulqdq")]
    pub(super) unsafe fn copy_page_folding_avx2(
        source: *const u8,
        target: *mut u8,
        ahead: *const u8,
        folded: &mut Folded,
    ) -> bool {
        let is_zero = |[a, b, c, d, e, f, g, h]: [__m256i; 8]| {
            let or = |a, b| _mm256_or_si256(a, b);
            let all = or(or(or(a, b), or(c, d)), or(or(e, f), or(g, h)));
            _mm256_testz_si256(all, all) != 0
        };
        let mut lanes = folded.lanes();
        let fold = |block| lanes = fold_block_avx2(lanes, block);
        // SAFETY: passed on; 256 bytes divide a page.
        let zero = unsafe { copy_page_by(source, target, Some(ahead), _mm256_setzero_si256(), is_zero, fold) };
        if !zero {
            folded.set_lanes(lanes);
        }
        zero
    }

    /// # Safety
    /// As [`super::CopyPage`]; AVX-512F and VPCLMULQDQ.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) unsafe fn copy_page_folding_avx512(
        source: *const u8,
        target: *mut u8,
        ahead: *const u8,
        folded: &mut Folded,
    ) -> bool {
        let is_zero = |[a, b, c, d]: [__m512i; 4]| {
            let all = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
            _mm512_test_epi64_mask(all, all) == 0
        };
        let mut lanes = folded.lanes();
        let fold = |block| lanes = fold_block(lanes, block);
        // SAFETY: passed on; 256 bytes divide a page.
        let zero = unsafe { copy_page_by(source, target, Some(ahead), _mm512_setzero_si512(), is_zero, fold) };
        if !zero {
            folded.set_lanes(lanes);
        }
        zero
    }

    /// # Safety
    /// As [`super::copy_raw`]; AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_avx2(source: *const u8, target: *mut u8, len: usize) {
        // SAFETY: passed on.
        unsafe { copy_by::<__m256i, 4>(source, target, len) };
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::copy_page_by;
    use crate::fold::Folded;
    use std::arch::aarch64::*;

    /// # Safety
    /// As [`super::CopyPage`].
    pub(super) unsafe fn copy_page(source: *const u8, target: *mut u8, _: *const u8, _: &mut Folded) -> bool {
        // SAFETY: NEON is part of the target.
        let is_zero = |block: [uint8x16_t; 8]| unsafe {
            let all = block.into_iter().fold(vdupq_n_u8(0), |all, vector| vorrq_u8(all, vector));
            vmaxvq_u32(vreinterpretq_u32_u8(all)) == 0
        };
        // SAFETY: passed on; 128 bytes divide a page.
        unsafe { copy_page_by(source, target, None, vdupq_n_u8(0), is_zero, |_| ()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::crc32c;
    use crate::test_util::Area;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_method_copies_a_page_that_is_not_zero_and_writes_nothing_else(
            content in proptest::collection::vec((0..PAGE_SIZE, any::<u8>()), 0..4),
            offset in 0usize..64,
        ) {
            let guest = Area::anonymous(PAGE_SIZE);
            for (at, value) in &content {
                guest.bytes_mut()[*at] = *value;
            }
            let is_zero = guest.bytes().iter().all(|byte| *byte == 0);
            for method in CopyMethod::all() {
                let mut copy = vec![0xaa; PAGE_SIZE + 64 + 1];
                let mut folded = Folded::new();
                // SAFETY: the source is one aligned page, the target has a page after its offset.
                let zero = unsafe {
                    (method.copy_page)(guest.ptr(), copy.as_mut_ptr().add(offset), std::ptr::null(), &mut folded)
                };
                prop_assert_eq!(zero, is_zero);
                let expected: &[u8] = if zero { &[0xaa; PAGE_SIZE] } else { guest.bytes() };
                prop_assert_eq!(&copy[offset..offset + PAGE_SIZE], expected);
                prop_assert!(copy[..offset].iter().chain(&copy[offset + PAGE_SIZE..]).all(|byte| *byte == 0xaa));
                if method.folds {
                    prop_assert_eq!(folded.finish(), if zero { 0 } else { crc32c(guest.bytes()) });
                }
            }
        }

        #[test]
        fn a_raw_copy_is_the_bytes_and_writes_no_others(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            offset in 0usize..64,
        ) {
            let mut copy = vec![0xaa; offset + bytes.len() + 64];
            // SAFETY: the target has room for the bytes after its offset.
            unsafe { copy_raw(bytes.as_ptr(), copy.as_mut_ptr().add(offset), bytes.len()) };
            prop_assert_eq!(&copy[offset..offset + bytes.len()], &bytes[..]);
            prop_assert!(copy[..offset].iter().chain(&copy[offset + bytes.len()..]).all(|byte| *byte == 0xaa));
        }

        #[test]
        fn the_checksum_of_raw_memory_and_of_its_copy_is_that_of_the_bytes(
            bytes in proptest::collection::vec(any::<u8>(), 0..40_000),
            before in proptest::collection::vec(any::<u8>(), 0..9),
            offset in any::<prop::sample::Index>(),
        ) {
            let source = &bytes[offset.index(bytes.len() + 1)..];
            let mut copy = vec![0xaa; source.len()];
            let mut whole = before.clone();
            whole.extend_from_slice(source);
            // SAFETY: slices are readable over their whole length.
            let (read, copied) = unsafe {
                (
                    crc32c_raw(source.as_ptr(), source.len(), crc32c(&before)),
                    copy_crc32c_raw(source.as_ptr(), &mut copy, crc32c(&before)),
                )
            };
            prop_assert_eq!((read, copied), (crc32c(&whole), crc32c(&whole)));
            prop_assert_eq!(&copy[..], source);
        }

        #[test]
        fn a_raw_store_is_the_bytes_or_zeros_and_writes_no_others(
            bytes in proptest::collection::vec(any::<u8>(), 0..10_000),
            offset in 0usize..64,
        ) {
            let mut target = vec![0xaa; offset + bytes.len() + 64];
            let around = |target: &[u8]| {
                target[..offset].iter().chain(&target[offset + bytes.len()..]).all(|byte| *byte == 0xaa)
            };
            // SAFETY: the target has room for the bytes after its offset.
            unsafe { store_raw(&bytes, target.as_mut_ptr().add(offset)) };
            prop_assert!(target[offset..offset + bytes.len()] == bytes[..] && around(&target));
            // SAFETY: as above.
            unsafe { zero_raw(target.as_mut_ptr().add(offset), bytes.len()) };
            prop_assert!(target[offset..offset + bytes.len()].iter().all(|byte| *byte == 0) && around(&target));
        }
    }
}
