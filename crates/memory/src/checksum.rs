//! CRC-32C, the checksum of a packet's decoded content.
//!
//! The Castagnoli polynomial (as in iSCSI, RFC 3720 appendix B.4), because the CRC generation operation of Intel DSA
//! computes it: an accelerator and a CPU must get the same number. Value for `"123456789"`: `e306_9283`.
//!
//! `sterna-wire` has its own copy of this function: neither crate uses the other (`ARCHITECTURE.md`).
//!
//! `crc-fast` selects its implementation at run time; with carry-less vector multiplication it reads faster than
//! memory. It needs slices, which memory that is being written cannot be: the raw forms ([`crate::copy`]) read such memory once.

use crc_fast::{CrcAlgorithm, Digest};

/// The Castagnoli polynomial with its bits reflected: bit 31 is x^0.
pub(crate) const POLYNOMIAL: u32 = 0x82f6_3b78;

/// A CRC-32C in progress: bytes may come in any number of pieces.
#[derive(Debug)]
pub struct Crc32c(Digest);

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

impl Crc32c {
    /// Starts with the checksum of an empty message.
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Continues a message whose beginning has checksum `crc`.
    pub fn after(crc: u32) -> Self {
        Self::with_register(!crc)
    }

    /// Starts with a shift register that is not all ones.
    pub(crate) fn with_register(register: u32) -> Self {
        Self(Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, register.into()))
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all bytes.
    pub fn finish(self) -> u32 {
        u32::try_from(self.0.finalize()).expect("a 32-bit CRC fits 32 bits")
    }
}

/// Returns the CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut checksum = Crc32c::new();
    checksum.update(bytes);
    checksum.finish()
}

/// Returns the CRC-32C of two concatenated messages, from the CRC-32C of each and the length of the second in bytes.
///
/// `crc-fast` has this too, but needs several thousand operations on matrices; this is at most 64 multiplications.
pub fn crc32c_combine(first: u32, second: u32, second_len: u64) -> u32 {
    shifted(first, second_len) ^ second
}

/// Returns `crc` times x^(8 `bytes`) mod P.
fn shifted(crc: u32, mut bytes: u64) -> u32 {
    /// x^(8 * 2^i) mod P: a byte, two, four and so on.
    const BYTES: [u32; 64] = {
        let mut table = [power_of_x(8); 64];
        let mut i = 1;
        while i < table.len() {
            table[i] = product(table[i - 1], table[i - 1]);
            i += 1;
        }
        table
    };
    let mut crc = crc;
    for power in BYTES {
        if bytes == 0 {
            break;
        }
        if bytes & 1 == 1 {
            crc = product(crc, power);
        }
        bytes >>= 1;
    }
    crc
}

/// Returns x^`power` mod P, reflected.
pub(crate) const fn power_of_x(power: u32) -> u32 {
    let mut value = 1u32 << 31;
    let mut done = 0;
    while done < power {
        value = (value >> 1) ^ POLYNOMIAL & (value & 1).wrapping_neg();
        done += 1;
    }
    value
}

/// Returns the product mod P of two reflected polynomials.
const fn product(a: u32, mut b: u32) -> u32 {
    let mut sum = 0u32;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        sum ^= b & ((a >> bit) & 1).wrapping_neg();
        b = (b >> 1) ^ POLYNOMIAL & (b & 1).wrapping_neg();
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_definition(bytes: &[u8]) -> u32 {
        sterna_test_kit::checksum::crc32c(0, bytes)
    }

    #[test]
    fn the_published_vectors_hold() {
        // The check value, and RFC 3720 B.4: 32 zeros, 32 ones, 0..31, 31..0.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46dd_794e);
        let falling: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(&falling), 0x113f_db5c);
        assert_eq!(Crc32c::new().finish(), 0);
    }

    proptest! {
        #[test]
        fn pieces_give_the_checksum_of_the_whole_and_that_is_the_definition(
            bytes in proptest::collection::vec(any::<u8>(), 0..5000),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..5),
        ) {
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let mut pieces = Crc32c::new();
            at.windows(2).for_each(|cut| pieces.update(&bytes[cut[0]..cut[1]]));
            prop_assert_eq!(pieces.finish(), by_definition(&bytes));
            prop_assert_eq!(crc32c(&bytes), by_definition(&bytes));
        }

        #[test]
        fn the_checksums_of_two_parts_give_that_of_both(
            bytes in proptest::collection::vec(any::<u8>(), 0..9000),
            cut in any::<prop::sample::Index>(),
        ) {
            let (first, second) = bytes.split_at(cut.index(bytes.len() + 1));
            let combined = crc32c_combine(crc32c(first), crc32c(second), second.len() as u64);
            prop_assert_eq!(combined, crc32c(&bytes));
        }

        #[test]
        fn combining_agrees_with_crc_fast_at_any_length(first: u32, second: u32, len in 0u64..1 << 61) {
            let expected =
                crc_fast::checksum_combine(CrcAlgorithm::Crc32Iscsi, first.into(), second.into(), len);
            prop_assert_eq!(u64::from(crc32c_combine(first, second, len)), expected);
        }
    }
}
