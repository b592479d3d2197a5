//! Bytes to compress and to move, the same for the same seed.

use crate::Random;

/// Returns bytes that shrink about as machine code does: runs, repeats and noise.
#[must_use]
pub fn code_like(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut next = || random.next_u64();
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 64);
    while bytes.len() < len {
        let run = (next() % 48 + 4) as usize;
        match next() % 4 {
            0 => bytes.extend(std::iter::repeat_n((next() % 8) as u8, run)),
            1 if bytes.len() > 4096 => {
                let from = bytes.len() - 1 - (next() % 4000) as usize - 52;
                bytes.extend_from_within(from..from + run);
            }
            2 => bytes.extend((0..run).map(|_| (next() % 12) as u8 + b'a')),
            _ => bytes.extend((0..run).map(|_| (next() >> 32) as u8)),
        }
    }
    bytes.truncate(len);
    bytes
}

/// Returns bytes that do not shrink.
#[must_use]
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len).map(|_| (random.next_u64() >> 32) as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_bytes_and_another_has_others() {
        for make in [code_like, noise] {
            assert_eq!((make(3, 5000), make(3, 5000).len()), (make(3, 5000), 5000));
            assert_ne!(make(3, 5000), make(4, 5000));
        }
        let kinds = |bytes: &[u8]| bytes.iter().collect::<std::collections::HashSet<_>>().len();
        assert_eq!(kinds(&noise(1, 1 << 16)), 256);
    }
}
