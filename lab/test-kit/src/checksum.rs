//! CRC-32C from its definition: slow, and independent of every implementation that it is compared with.

/// Returns the CRC-32C (Castagnoli, RFC 3720 appendix B.4) of `bytes`, bit by bit. `seed` is 0, or the value of what comes before.
#[must_use]
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!seed, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn it_is_the_one_of_the_standard_in_one_piece_or_in_two() {
        assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(crc32c(0, b"12345"), b"6789"), 0xe306_9283);
    }
}
