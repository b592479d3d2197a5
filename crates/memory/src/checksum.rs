//! CRC-32C, the checksum of a packet's decoded content.
//!
//! The Castagnoli polynomial (as in iSCSI, RFC 3720 appendix B.4), because that is what the CRC generation operation of
//! Intel DSA computes: an accelerator and a CPU must come to the same number. Value for `"123456789"`: `e306_9283`.
//!
//! `sterna-wire` has the same function for itself: neither crate uses the other (`ARCHITECTURE.md`).
//!
//! `crc-fast` picks its implementation at run time; with carry-less vector multiplication it reads faster than memory.

use crc_fast::{CrcAlgorithm, Digest};

/// A CRC-32C under way: bytes may come in any number of pieces.
#[derive(Debug)]
pub(crate) struct Crc32c(Digest);

impl Crc32c {
    /// The checksum of nothing yet.
    pub(crate) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes.
    pub(crate) fn finish(self) -> u32 {
        u32::try_from(self.0.finalize()).expect("a 32-bit CRC fits 32 bits")
    }
}

/// The CRC-32C of `bytes`.
#[cfg(test)]
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let mut checksum = Crc32c::new();
    checksum.update(bytes);
    checksum.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit from the definition: reflected polynomial 0x82f63b78, start and end inverted.
    fn by_definition(bytes: &[u8]) -> u32 {
        let mut crc = !0u32;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
            }
        }
        !crc
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
    }
}
