//! The AECS word by word, compared with IAA's table 6-20 and the kernel's fixed table.

use super::*;

fn word(aecs: &CompressAecs, at: usize) -> u32 {
    u32::from_le_bytes(aecs.as_bytes()[at..at + 4].try_into().unwrap())
}

#[test]
fn the_fixed_table_is_the_kernels() {
    let aecs = CompressAecs::fixed(true);
    let literal = |symbol: usize| word(&aecs, 0x120 + 4 * symbol);
    // First and last of each range of RFC 1951, section 3.2.6, in the form length << 15 | code.
    for (symbol, expected) in [
        (0, 0x4_0030),
        (1, 0x4_0031),
        (143, 0x4_00bf),
        (144, 0x4_8190),
        (255, 0x4_81ff),
        (256, 0x3_8000),
        (279, 0x3_8017),
        (280, 0x4_00c0),
        (285, 0x4_00c5),
    ] {
        assert_eq!(literal(symbol), expected, "{symbol}");
    }
    for symbol in 0..30 {
        assert_eq!(word(&aecs, 0x5a0 + 4 * symbol), 0x2_8000 + symbol as u32);
    }
    assert_eq!((word(&aecs, 0x1c), aecs.as_bytes()[0x20]), (3, 0b011), "final block, fixed codes");
    assert_eq!(CompressAecs::fixed(false).as_bytes()[0x20], 0b010);
    for reserved in [0x00..0x1c, 0x21..0x120, 0x598..0x5a0, 0x618..0x620] {
        assert!(aecs.as_bytes()[reserved.clone()].iter().all(|byte| *byte == 0), "{reserved:x?}");
    }
}

#[test]
fn the_histogram_has_distances_behind_two_reserved_words() {
    let histogram = Histogram::new();
    histogram.counts[0].store(1, Ordering::Relaxed);
    histogram.counts[1140 / 4].store(2, Ordering::Relaxed);
    histogram.counts[1144 / 4].store(99, Ordering::Relaxed);
    histogram.counts[1148 / 4].store(99, Ordering::Relaxed);
    histogram.counts[1152 / 4].store(3, Ordering::Relaxed);
    histogram.counts[1268 / 4].store(4, Ordering::Relaxed);
    let (literals, distances) = histogram.counts();
    assert_eq!((literals[0], literals[285], literals.iter().sum::<u32>()), (1, 2, 3));
    assert_eq!((distances[0], distances[29], distances.iter().sum::<u32>()), (3, 4, 7));
    assert_eq!(histogram.address() % 64, 0);
    let copy = Histogram::new();
    copy.set(&literals, &distances);
    assert_eq!(copy.counts(), (literals, distances));
}

#[test]
fn a_second_table_replaces_the_first_completely() {
    let histogram = Histogram::new();
    histogram.set(&std::array::from_fn(|symbol| symbol as u32 + 1), &[5; 30]);
    let mut aecs = CompressAecs::dynamic(&histogram, true).unwrap();
    assert_eq!(aecs.as_bytes()[0x20] & 7, 0b101, "final block, dynamic codes");
    aecs.seed_crc(0x1234_5678);
    assert_eq!(word(&aecs, 0), 0x1234_5678);
    aecs.set(&Codes::fixed(), true).unwrap();
    assert_eq!(aecs.as_bytes(), CompressAecs::fixed(true).as_bytes());
}

#[test]
fn both_halves_are_at_the_addresses_that_a_device_uses() {
    let pair = CompressAecsPair::new(CompressAecs::fixed(true));
    let read = std::ptr::from_ref(&pair.read) as u64;
    assert_eq!(read, pair.address());
    assert_eq!(std::ptr::from_ref(&pair.written) as u64, pair.address() + 1568);
    assert_eq!(pair.address() % 32, 0);
    let state = DecompressAecsPair::new();
    assert_eq!(std::ptr::from_ref(&state.halves[1]) as u64, state.address() + 5376);
}
