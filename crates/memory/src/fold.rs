//! CRC-32C during a copy: the part of the checksum that has to be in the copy's own loop.
//!
//! Copying first and then running `crc-fast` over the copy costs twice the time of a copy where the memory is in the
//! cache. With wide carry-less multiplication the checksum of a block costs less than its store, so that inside the
//! loop it is free. Only that step is here; everything else about the checksum remains with `crc-fast`, also on CPUs
//! without such an instruction.
//!
//! A message is reduced modulo the polynomial P without ever being divided: 16 lanes of 128 bits hold the last block, and
//! the next one is added after multiplying them by x^2048, the length of a block. Multiplying a lane's halves by x^2048
//! mod P does that (Intel, *Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction*, 2009, there for one
//! lane and shorter distances). The lanes are at any time a message of 256 bytes with the same remainder as the whole one,
//! whose checksum [`Folded::finish`] computes with `crc-fast`.

use crate::checksum::{Crc32c, POLYNOMIAL};
use crate::cpu::Implementation;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 256;

/// The checksum in progress of a message that comes in blocks.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct Folded([u8; BLOCK]);

impl Folded {
    /// Starts with the checksum of an empty message.
    pub(crate) fn new() -> Self {
        Self::after(0)
    }

    /// Continues a message whose beginning has checksum `crc`.
    pub(crate) fn after(crc: u32) -> Self {
        let mut lanes = [0; BLOCK];
        lanes[BLOCK - 4..].copy_from_slice(&four_bytes_that_leave(!crc).to_le_bytes());
        Self(lanes)
    }

    /// Returns the checksum of all blocks.
    pub(crate) fn finish(&self) -> u32 {
        let mut remainder = Crc32c::with_register(0);
        remainder.update(&self.0);
        remainder.finish()
    }
}

/// Returns the input that leaves `register` in a CRC register that was 0: 32 steps of the shift register backwards.
fn four_bytes_that_leave(register: u32) -> u32 {
    (0..32).fold(register, |register, _| {
        // The polynomial's highest bit is set, so this bit tells whether the step forward added it.
        let added = register >> 31;
        (register ^ POLYNOMIAL & added.wrapping_neg()) << 1 | added
    })
}

/// Returns whether this CPU multiplies without carries in the vectors of `implementation`, and may use them.
pub(crate) fn folds_by(implementation: Implementation) -> bool {
    #[cfg(target_arch = "x86_64")]
    return matches!(implementation, Implementation::Avx2 | Implementation::Avx512)
        && is_x86_feature_detected!("vpclmulqdq")
        && Implementation::available().contains(&implementation);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = implementation;
        false
    }
}

/// Adds the whole blocks at `source` to the message with checksum `crc`, where [`folds_by`] AVX-512, and copies them to
/// `target` if there is one. Returns how many bytes these were and the checksum including them. The memory may change
/// meanwhile: each byte is loaded once.
///
/// # Safety
/// `source` must be readable and `target` writable for `len` bytes, and they must not overlap.
pub(crate) unsafe fn fold_raw(source: *const u8, target: Option<*mut u8>, len: usize, crc: u32) -> (usize, u32) {
    let blocks = len / BLOCK;
    if blocks == 0 || !folds_by(Implementation::Avx512) {
        return (0, crc);
    }
    let mut folded = Folded::after(crc);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: so many blocks are within the length; the CPU has what it needs.
    unsafe {
        x86::fold_blocks(source, target, blocks, &mut folded);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, target, &mut folded);
    (blocks * BLOCK, folded.finish())
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use super::{BLOCK, Folded};
    use crate::checksum::power_of_x;
    use crate::load::load_block;
    use std::arch::x86_64::*;

    const DISTANCE: u32 = 8 * BLOCK as u32;
    /// For a lane's first 8 bytes, which stand for the higher powers: x^64 more than the others. Of a product of reflected
    /// numbers of 64 and 32 bits in 128 bits, the lowest power stands 33 places from where it belongs.
    const FIRST_HALF: u32 = power_of_x(DISTANCE + 64 - 33);
    const SECOND_HALF: u32 = power_of_x(DISTANCE - 33);

    impl Folded {
        /// The lanes, in four vectors or eight.
        #[inline(always)]
        pub(crate) fn lanes<V: Vectors>(&self) -> V {
            // SAFETY: both are 256 bytes of which every value is valid, and the struct is aligned for it.
            unsafe { (&raw const self.0).cast::<V>().read() }
        }

        #[inline(always)]
        pub(crate) fn set_lanes<V: Vectors>(&mut self, lanes: V) {
            // SAFETY: as above.
            unsafe { (&raw mut self.0).cast::<V>().write(lanes) };
        }
    }

    /// 256 bytes in vectors.
    pub(crate) trait Vectors: Copy {}
    impl Vectors for [__m512i; 4] {}
    impl Vectors for [__m256i; 8] {}

    /// The lanes after one more block.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(crate) fn fold_block(lanes: [__m512i; 4], block: [__m512i; 4]) -> [__m512i; 4] {
        let halves = _mm_set_epi64x(i64::from(SECOND_HALF), i64::from(FIRST_HALF));
        let halves = _mm512_broadcast_i32x4(halves);
        let fold = |lane, next| {
            let first = _mm512_clmulepi64_epi128::<0x00>(lane, halves);
            let second = _mm512_clmulepi64_epi128::<0x11>(lane, halves);
            _mm512_ternarylogic_epi64::<0x96>(first, second, next)
        };
        let ([a, b, c, d], [e, f, g, h]) = (lanes, block);
        [fold(a, e), fold(b, f), fold(c, g), fold(d, h)]
    }

    /// The same in vectors of 256 bits. Half as fast where the multiplication is the limit, as it is in the cache, but no
    /// slower than a second pass, and faster from memory.
    #[inline]
    #[target_feature(enable = "avx2,vpclmulqdq")]
    pub(crate) fn fold_block_avx2(mut lanes: [__m256i; 8], block: [__m256i; 8]) -> [__m256i; 8] {
        let halves = _mm_set_epi64x(i64::from(SECOND_HALF), i64::from(FIRST_HALF));
        let halves = _mm256_broadcastsi128_si256(halves);
        for (lane, next) in lanes.iter_mut().zip(block) {
            let first = _mm256_clmulepi64_epi128::<0x00>(*lane, halves);
            let second = _mm256_clmulepi64_epi128::<0x11>(*lane, halves);
            *lane = _mm256_xor_si256(_mm256_xor_si256(first, second), next);
        }
        lanes
    }

    /// Adds `blocks` blocks from memory that may change meanwhile, each byte loaded once, and stores them at `target`
    /// where there is one.
    ///
    /// # Safety
    /// The source must be readable, a target writable for so many blocks without overlap; AVX-512F and VPCLMULQDQ.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) unsafe fn fold_blocks(source: *const u8, target: Option<*mut u8>, blocks: usize, folded: &mut Folded) {
        let mut lanes: [__m512i; 4] = folded.lanes();
        for at in (0..blocks).map(|number| number * BLOCK) {
            // SAFETY: the block lies within what the caller vouches for.
            let block: [__m512i; 4] = unsafe { load_block(source.add(at)) };
            if let Some(target) = target {
                // SAFETY: as above.
                unsafe { target.add(at).cast::<[__m512i; 4]>().write_unaligned(block) };
            }
            lanes = fold_block(lanes, block);
        }
        folded.set_lanes(lanes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_beginning_without_blocks_keeps_its_checksum(crc: u32) {
            prop_assert_eq!(Folded::after(crc).finish(), crc);
        }

        #[test]
        fn folded_blocks_have_the_checksum_of_their_bytes_and_are_copied(
            bytes in proptest::collection::vec(any::<u8>(), 0..30 * BLOCK),
            crc: u32,
        ) {
            let mut copy = vec![0xaa; bytes.len()];
            // SAFETY: both are as long as the bytes.
            let (len, folded) = unsafe { fold_raw(bytes.as_ptr(), Some(copy.as_mut_ptr()), bytes.len(), crc) };
            prop_assert_eq!(len, if folds_by(Implementation::Avx512) { bytes.len() / BLOCK * BLOCK } else { 0 });
            let mut expected = Crc32c::after(crc);
            expected.update(&bytes[..len]);
            prop_assert_eq!(folded, expected.finish());
            prop_assert_eq!(&copy[..len], &bytes[..len]);
            prop_assert!(copy[len..].iter().all(|byte| *byte == 0xaa));
        }
    }
}
