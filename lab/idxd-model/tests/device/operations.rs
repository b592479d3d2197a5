//! Each operation and each status code of the table, by hand-made descriptors.

use std::sync::Arc;

use sterna_idxd_model::memory::{AddressSpace, Fault, PageState, TestMemory};
use sterna_idxd_model::ops::crc::crc32c;
use sterna_idxd_model::{DeviceConfig, Model, ModelConfig};

use crate::common::*;

/// Source, destination and delta record of most tests, far from each other.
const A: u64 = DATA;
const B: u64 = DATA + 0x4_0000;
const C: u64 = DATA + 0x8_0000;

fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed) ^ (index >> 8) as u8).collect()
}

/// Makes the page at this address permanently absent.
fn forbid(bench: &Bench, address: u64) {
    bench.memory.set(address, 1, PageState::Forbidden);
}

#[test]
fn a_noop_completes_with_a_record_only_if_asked() {
    let bench = Bench::new(|_| {});
    assert_eq!(bench.run(noop(RECORDS)).status, 0x01);
    bench.memory.put(RECORDS, &[0; 32]);
    bench.submit(noop(0));
    bench.submit(noop(RECORDS).without(8));
    bench.model.settle();
    assert_eq!(bench.record(RECORDS).status, 0, "without Request Completion Record success is not reported");
    assert_eq!(bench.model.counters().descriptors, 3);
}

#[test]
fn without_request_record_errors_are_still_reported() {
    let bench = Bench::new(|_| {});
    forbid(&bench, B);
    assert_eq!(bench.run(memmove(RECORDS, A, B, 64).without(8)).status, 0x83);
    assert_eq!(bench.run(memmove(RECORDS, A, A + 64, 0).without(8)).status, 0x13);
}

#[test]
fn memory_move_copies_any_size_and_alignment() {
    let bench = Bench::new(|_| {});
    for (from, to, count) in [(0, 0, 4096), (1, 3, 1), (5, 9, 70_001), (4095, 4095, 2), (0, 8, 200_000)] {
        let data = bytes(count, 7);
        bench.memory.put(A + from, &data);
        let record = bench.run(memmove(RECORDS, A + from, B + to, count as u32));
        assert_eq!((record.status, record.completed), (1, 0));
        assert_eq!(bench.memory.get(B + to, count), data);
    }
}

#[test]
fn memory_move_of_overlapping_buffers_is_as_if_by_way_of_a_copy() {
    let bench = Bench::new(|_| {});
    for (from, to) in [(0, 100), (100, 0), (0, 5000), (5000, 0), (0, 0), (8, 4104)] {
        let data = bytes(20_000, 3);
        bench.memory.put(A + from, &data);
        assert_eq!(bench.run(memmove(RECORDS, A + from, A + to, 20_000)).status, 1);
        assert_eq!(bench.memory.get(A + to, 20_000), data, "{from} to {to}");
    }
}

#[test]
fn memory_move_of_overlapping_buffers_is_an_error_without_the_capability() {
    let bench = Bench::new(|device| device.overlapping_copy = false);
    assert_eq!(bench.run(memmove(RECORDS, A, A + 4095, 4096)).status, 0x16);
    assert_eq!(bench.run(memmove(RECORDS, A, A + 4096, 4096)).status, 1, "neighbours do not overlap");
}

#[test]
fn memory_move_stops_at_a_page_fault_and_can_be_resumed() {
    let bench = Bench::new(|_| {});
    let data = bytes(20_000, 9);
    bench.memory.put(A + 100, &data);
    forbid(&bench, A + 8192);
    let record = bench.run(memmove(RECORDS, A + 100, B + 50, 20_000));
    assert_eq!((record.status, record.result), (0x03, 0));
    assert_eq!((record.completed, record.fault), (8092, A + 8192));
    assert_eq!(bench.memory.get(B + 50, 8092), data[..8092]);
    assert_eq!(bench.memory.get(B + 50 + 8092, 100), [0; 100], "nothing behind the fault");
    bench.memory.set(A + 8192, 1, PageState::Present);
    let rest = bench.run(memmove(RECORDS, A + 100 + 8092, B + 50 + 8092, 20_000 - 8092));
    assert_eq!(rest.status, 1);
    assert_eq!(bench.memory.get(B + 50, 20_000), data);
}

#[test]
fn a_fault_is_reported_by_its_page_wherever_in_it() {
    let bench = Bench::new(|_| {});
    forbid(&bench, A);
    let record = bench.run(memmove(RECORDS, A + 100, B, 64));
    assert_eq!((record.status, record.completed, record.fault), (0x03, 0, A));
    let record = bench.run(memmove(RECORDS, B, A + 4095, 64));
    assert_eq!((record.status, record.completed, record.fault), (0x83, 0, A));
}

#[test]
fn memory_move_reports_the_fault_that_comes_first() {
    let bench = Bench::new(|_| {});
    forbid(&bench, A + 0x3000);
    bench.memory.set(B + 0x2000, 1, PageState::ReadOnly);
    let record = bench.run(memmove(RECORDS, A, B, 0x5000));
    assert_eq!((record.status, record.completed, record.fault), (0x83, 0x2000, B + 0x2000), "the write comes first");
    forbid(&bench, A + 0x1000);
    let record = bench.run(memmove(RECORDS, A, B, 0x5000));
    assert_eq!((record.status, record.completed, record.fault), (0x03, 0x1000, A + 0x1000));
}

#[test]
fn a_reversed_move_resumes_with_the_same_addresses_and_a_smaller_size() {
    let bench = Bench::new(|_| {});
    let data = bytes(0x6000, 1);
    bench.memory.put(A, &data);
    bench.memory.set(A + 0x4000, 1, PageState::ReadOnly);
    let record = bench.run(memmove(RECORDS, A, A + 0x1800, 0x6000));
    assert_eq!((record.status, record.result), (0x83, 1));
    let left = 0x6000 - record.completed;
    assert_eq!(A + 0x1800 + u64::from(left), A + 0x5000, "all behind the read-only page is done");
    bench.memory.set(A + 0x4000, 1, PageState::Present);
    assert_eq!(bench.run(memmove(RECORDS, A, A + 0x1800, left)).status, 1);
    assert_eq!(bench.memory.get(A + 0x1800, 0x6000), data);
}

#[test]
fn fill_repeats_eight_bytes_and_stops_at_a_fault() {
    let bench = Bench::new(|_| {});
    let pattern = 0x0807_0605_0403_0201_u64;
    assert_eq!(bench.run(fill(RECORDS, pattern, B + 3, 13)).status, 1);
    assert_eq!(bench.memory.get(B + 2, 15), [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 0]);
    forbid(&bench, B + 0x1000);
    let record = bench.run(fill(RECORDS, pattern, B + 0x800, 0x1000));
    assert_eq!((record.status, record.completed), (0x83, 0x800));
}

#[test]
fn compare_finds_the_first_difference() {
    let bench = Bench::new(|_| {});
    let data = bytes(100_000, 5);
    bench.memory.put(A, &data);
    bench.memory.put(B + 1, &data);
    let record = bench.run(compare(RECORDS, A, B + 1, 100_000));
    assert_eq!((record.status, record.result, record.completed), (1, 0, 0));
    for at in [0, 1, 63, 4095, 65_535, 65_536, 99_999] {
        bench.memory.put(B + 1 + at, &[data[at as usize] ^ 1]);
        let record = bench.run(compare(RECORDS, A, B + 1, 100_000));
        assert_eq!((record.status, record.result, u64::from(record.completed)), (1, 1, at));
        bench.memory.put(B + 1 + at, &[data[at as usize]]);
    }
}

#[test]
fn compare_reports_a_difference_rather_than_a_fault_behind_it() {
    let bench = Bench::new(|_| {});
    forbid(&bench, B + 0x1000);
    let record = bench.run(compare(RECORDS, A, B, 0x2000));
    assert_eq!((record.status, record.result, record.completed), (0x03, 0, 0x1000));
    bench.memory.put(A + 0xfff, &[1]);
    let record = bench.run(compare(RECORDS, A, B, 0x2000));
    assert_eq!((record.status, record.result, record.completed), (1, 1, 0xfff));
}

#[test]
fn check_result_compares_with_bit_0_of_the_expected_result() {
    let bench = Bench::new(|_| {});
    for (different, expected, status) in [(0, 0, 1), (1, 0, 2), (0, 1, 2), (1, 1, 1), (0, 0xfe, 1), (1, 0xff, 1)] {
        bench.memory.put(A, &[different]);
        let plain = bench.run(compare(RECORDS, A, B, 8).u8(40, expected));
        assert_eq!((plain.status, plain.result), (1, different), "without the flag it is ignored");
        for raw in [compare(RECORDS, A, B, 8), compare_pattern(RECORDS, A, 0, 8)] {
            let record = bench.run(raw.u8(40, expected).flags(CHECK));
            assert_eq!((record.status, record.result), (status, different), "{different} expected {expected}");
        }
    }
}

#[test]
fn compare_pattern_takes_any_size() {
    let bench = Bench::new(|_| {});
    let pattern = 0x8877_6655_4433_2211_u64;
    let data: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(70_003).collect();
    bench.memory.put(A + 5, &data);
    for size in [1, 7, 8, 9, 65_537, 70_003] {
        let record = bench.run(compare_pattern(RECORDS, A + 5, pattern, size));
        assert_eq!((record.status, record.result), (1, 0), "{size}");
    }
    let record = bench.run(compare_pattern(RECORDS, A + 5, pattern, 70_004));
    assert_eq!((record.status, record.result), (1, 1), "one byte more");
}

#[test]
fn compare_pattern_reports_at_most_the_first_difference() {
    for granule in [1, 8, 64] {
        let bench = Bench::new(|device| device.pattern_granule = granule);
        bench.memory.put(A + 4096 + 77, &[1]);
        let record = bench.run(compare_pattern(RECORDS, A, 0, 0x4000));
        assert_eq!(record.result, 1);
        assert_eq!(record.completed, (4096 + 77) / granule * granule, "granule {granule}");
    }
}

#[test]
fn create_delta_has_source_2s_words_with_offsets_in_words() {
    let bench = Bench::new(|_| {});
    let record = bench.run(create_delta(RECORDS, A, B, 0x2000, C, 800));
    assert_eq!((record.status, record.result, record.completed, record.detail), (1, 0, 0, 0));
    bench.memory.put(B + 16, &[1, 2, 3]);
    bench.memory.put(B + 0x1ff8, &[9; 8]);
    let record = bench.run(create_delta(RECORDS, A, B, 0x2000, C, 800));
    assert_eq!((record.status, record.result, record.completed, record.detail), (1, 1, 0, 20));
    let mut expected = vec![2, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0xff, 0x03];
    expected.extend([9; 8]);
    assert_eq!(bench.memory.get(C, 20), expected);
}

#[test]
fn create_delta_that_overflows_reports_how_far_it_came() {
    let bench = Bench::new(|_| {});
    bench.memory.put(B, &[7; 0x1000]);
    let record = bench.run(create_delta(RECORDS, A, B, 0x1000, C, 85));
    assert_eq!((record.status, record.result), (1, 2));
    assert_eq!((record.completed, record.detail), (64, 80));
    assert_eq!(bench.memory.get(C + 80, 5), [0; 5], "no part of a delta");
}

#[test]
fn create_delta_fills_its_record_to_the_last_byte() {
    let bench = Bench::new(|_| {});
    bench.memory.put(B, &[7; 64]);
    let record = bench.run(create_delta(RECORDS, A, B, 0x1000, C, 80));
    assert_eq!((record.status, record.result, record.completed, record.detail), (1, 1, 0, 80));
}

#[test]
fn create_delta_checks_its_result_against_a_mask() {
    let bench = Bench::new(|_| {});
    let limits = [800, 800, 80];
    for result in 0..3_u8 {
        bench.memory.put(B, &if result == 0 { [0; 0x1000] } else { [0; 0x1000].map(|_: u8| 1) }[..]);
        let size = if result == 2 { 0x1000 } else { 64 };
        for mask in 0..8_u8 {
            let raw = create_delta(RECORDS, A, B, size, C, limits[usize::from(result)]);
            let record = bench.run(raw.u8(56, mask).flags(CHECK));
            assert_eq!(record.result, result);
            assert_eq!(record.status, if mask >> result & 1 == 1 { 1 } else { 2 }, "result {result} mask {mask:03b}");
            assert_eq!(bench.run(raw.u8(56, mask)).status, 1, "without the flag");
        }
    }
}

#[test]
fn create_delta_at_a_fault_loses_no_difference() {
    let bench = Bench::new(|_| {});
    bench.memory.put(B + 8, &[1]);
    bench.memory.put(B + 0x1000, &[2]);
    forbid(&bench, A + 0x2000);
    let record = bench.run(create_delta(RECORDS, A, B, 0x3000, C, 800));
    assert_eq!((record.status, record.result, record.completed, record.detail), (0x03, 1, 0x2000, 20));
    // The record crosses into a page that is not there: 12 bytes fit, so one delta is written.
    forbid(&bench, C + 0x1000);
    let record = bench.run(create_delta(RECORDS, A, B, 0x1008, C + 0x1000 - 12, 800));
    assert_eq!((record.status, record.result), (0x83, 1));
    assert_eq!((record.completed, record.detail), (0x1000, 10), "the second difference is found again when resumed");
}

#[test]
fn apply_delta_writes_the_words() {
    let bench = Bench::new(|_| {});
    let base = bytes(0x3000, 11);
    let mut wanted = base.clone();
    for at in [0, 8, 16, 0x800, 0x1000, 0x2ff8] {
        wanted[at] ^= 0xff;
    }
    bench.memory.put(A, &base);
    bench.memory.put(B, &wanted);
    let made = bench.run(create_delta(RECORDS, A, B, 0x3000, C, 4096));
    assert_eq!((made.result, made.detail), (1, 60));
    let record = bench.run(apply_delta(RECORDS, C, 60, A, 0x3000));
    assert_eq!((record.status, record.completed), (1, 0));
    assert_eq!(bench.memory.get(A, 0x3000), wanted);
}

#[test]
fn apply_delta_refuses_offsets_that_do_not_ascend_or_are_too_large() {
    let bench = Bench::new(|_| {});
    let record_of = |offsets: &[u16]| -> Vec<u8> {
        offsets.iter().flat_map(|offset| [offset.to_le_bytes().to_vec(), vec![5; 8]].concat()).collect()
    };
    for (offsets, status, done) in [
        (&[1, 2, 2, 3][..], 0x07, 20),
        (&[4, 3], 0x07, 10),
        (&[0, 1, 512], 0x08, 20),
        (&[0xffff], 0x08, 0),
        (&[0, 511], 0x01, 0),
    ] {
        bench.memory.put(C, &record_of(offsets));
        let record = bench.run(apply_delta(RECORDS, C, 10 * offsets.len() as u32, A, 4096));
        assert_eq!((record.status, record.completed), (status, done), "{offsets:?}");
    }
}

#[test]
fn apply_delta_counts_bytes_of_the_record_at_a_fault() {
    let bench = Bench::new(|_| {});
    bench.memory.put(C, &[[1, 0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 2, 2, 2, 2, 2, 2, 2, 2, 2]].concat());
    forbid(&bench, A + 0x1000);
    let record = bench.run(apply_delta(RECORDS, C, 20, A, 0x2000));
    assert_eq!((record.status, record.completed, record.fault), (0x83, 10, A + 0x1000));
    bench.memory.set(A + 0x1000, 1, PageState::Present);
    assert_eq!(bench.run(apply_delta(RECORDS, C + 10, 10, A, 0x2000)).status, 1);
    assert_eq!(bench.memory.get(A + 0x1000, 8), [2; 8]);
}

#[test]
fn deltas_are_limited_in_size_and_alignment() {
    let bench = Bench::new(|_| {});
    let create = |size: u32, limit: u32| create_delta(RECORDS, A, B, size, C, limit);
    assert_eq!(bench.run(create(0x80008, 800)).status, 0x13);
    assert_eq!(bench.run(create(64, 79)).status, 0x15);
    assert_eq!(bench.run(create(64, 80)).status, 0x01);
    assert_eq!(bench.run(create(64, (2 << 20) + 10)).status, 0x15, "above the largest transfer");
    assert_eq!(bench.run(create(65, 800)).status, 0x1c);
    assert_eq!(bench.run(create_delta(RECORDS, A + 4, B, 64, C, 800)).status, 0x1c);
    assert_eq!(bench.run(create_delta(RECORDS, A, B + 1, 64, C, 800)).status, 0x1c);
    assert_eq!(bench.run(create_delta(RECORDS, A, B, 64, B + 63, 800)).status, 0x16);
    assert_eq!(bench.run(create_delta(RECORDS, A, B, 64, A - 799, 800)).status, 0x16);
    assert_eq!(bench.run(apply_delta(RECORDS, C, 9, A, 64)).status, 0x15);
    assert_eq!(bench.run(apply_delta(RECORDS, C, 10, A + 4, 64)).status, 0x1c);
    assert_eq!(bench.run(apply_delta(RECORDS, A + 60, 10, A, 64)).status, 0x16);
    assert_eq!(bench.run(apply_delta(RECORDS, C, 10, A, 0x80008)).status, 0x13);
}

#[test]
fn dualcast_writes_both_or_neither_byte() {
    let bench = Bench::new(|_| {});
    let data = bytes(9000, 2);
    bench.memory.put(A + 1, &data);
    assert_eq!(bench.run(dualcast(RECORDS, A + 1, B + 5, C + 5, 9000)).status, 1);
    assert_eq!(bench.memory.get(B + 5, 9000), data);
    assert_eq!(bench.memory.get(C + 5, 9000), data);
    assert_eq!(bench.run(dualcast(RECORDS, A, B, C + 64, 64)).status, 0x17);
    assert_eq!(bench.run(dualcast(RECORDS, A, A + 0x1000, C, 0x1001)).status, 0x16);
    assert_eq!(bench.run(dualcast(RECORDS, A, B, B + 0x1000, 0x1001)).status, 0x16);
    forbid(&bench, C + 0x1000);
    let record = bench.run(dualcast(RECORDS, A, B, C, 0x2000));
    assert_eq!((record.status, record.completed, record.fault), (0x83, 0x1000, C + 0x1000));
}

#[test]
fn crc_is_crc32c_and_continues_from_a_seed() {
    let bench = Bench::new(|_| {});
    bench.memory.put(A, b"123456789");
    assert_eq!(bench.run(crc(RECORDS, A, 9, 0)).detail, 0xe306_9283, "the check value of CRC-32C");
    let first = bench.run(crc(RECORDS, A, 4, 0)).detail;
    assert_eq!(bench.run(crc(RECORDS, A + 4, 5, first)).detail, 0xe306_9283);
    // From memory: flag bit 16, seed address at 48.
    bench.memory.put(C, &first.to_le_bytes());
    assert_eq!(bench.run(crc(RECORDS, A + 4, 5, 0).flags(1 << 16).u64(48, C)).detail, 0xe306_9283);
    assert_eq!(bench.run(crc(RECORDS, A + 4, 5, 0).flags(1 << 16).u64(48, C + 2)).status, 0x1c);
    assert_eq!(bench.run(crc(RECORDS, A, 9, 1).flags(1 << 16).u64(48, C)).status, 0x12, "the other seed is reserved");
    assert_eq!(bench.run(crc(RECORDS, A, 9, 0).u64(48, C)).status, 0x12, "so is the address without the flag");
}

#[test]
fn crc_without_inversion_and_reflection() {
    // Register and data most significant bit first: the plain remainder, here computed bit by bit.
    let bench = Bench::new(|_| {});
    let data = b"abcdefgh";
    bench.memory.put(A, data);
    let remainder = |reflect: bool| {
        let mut register = 0x1234_5678_u32;
        for &byte in data {
            let byte = if reflect { byte.reverse_bits() } else { byte };
            for bit in (0..8).rev() {
                let top = register >> 31 ^ u32::from(byte >> bit & 1);
                register = register << 1 ^ if top == 1 { 0x1edc_6f41 } else { 0 };
            }
        }
        register
    };
    let raw = crc(RECORDS, A, 8, 0x1234_5678);
    assert_eq!(bench.run(raw.flags(3 << 17)).detail, remainder(false));
    assert_eq!(bench.run(raw.flags(1 << 17)).detail, remainder(true));
}

#[test]
fn copy_crc_copies_and_reports_a_partial_crc_at_a_fault() {
    let bench = Bench::new(|_| {});
    let data = bytes(0x3000, 4);
    bench.memory.put(A, &data);
    let record = bench.run(copy_crc(RECORDS, A, B, 0x3000, 0));
    assert_eq!((record.status, record.detail), (1, crc32c(0, &data)));
    assert_eq!(bench.memory.get(B, 0x3000), data);
    forbid(&bench, B + 0x2000);
    let record = bench.run(copy_crc(RECORDS, A, B, 0x3000, 0));
    assert_eq!((record.status, record.completed), (0x83, 0x2000));
    assert_eq!(record.detail, crc32c(0, &data[..0x2000]));
    assert_eq!(bench.run(copy_crc(RECORDS, A, A + 8, 64, 0)).status, 0x16);
}

#[test]
fn cache_flush_translates_its_range() {
    let bench = Bench::new(|_| {});
    assert_eq!(bench.run(cache_flush(RECORDS, A + 10, 0x5000)).status, 1);
    forbid(&bench, A + 0x2000);
    let record = bench.run(cache_flush(RECORDS, A + 10, 0x5000));
    assert_eq!((record.status & 0x3f, record.completed), (0x03, 0x2000 - 10));
}

#[test]
fn every_operation_of_the_table_is_there_and_no_other() {
    let bench = Bench::new(|_| {});
    let known = [0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x10, 0x11, 0x20];
    for operation in 0..=255 {
        let status = bench.run(Raw::new(operation, RECORDS)).status;
        assert_ne!(status, 0, "{operation:#x} completes");
        assert_eq!(status != 0x10, known.contains(&operation), "{operation:#x}: {status:#x}");
    }
}

/// Valid descriptors, one of each operation.
fn samples() -> Vec<Raw> {
    vec![
        noop(RECORDS),
        batch(RECORDS, RECORDS + 0x8000, 2),
        drain(RECORDS),
        memmove(RECORDS, A, B, 64),
        fill(RECORDS, 0, B, 64),
        compare(RECORDS, A, B, 64),
        compare_pattern(RECORDS, A, 0, 64),
        create_delta(RECORDS, A, B, 64, C, 80),
        apply_delta(RECORDS, C, 10, A, 64),
        dualcast(RECORDS, A, B, C, 64),
        crc(RECORDS, A, 64, 0),
        copy_crc(RECORDS, A, B, 64, 0),
        cache_flush(RECORDS, A, 64),
    ]
}

#[test]
fn flags_are_those_of_table_5_3() {
    // Block, check result, cache control (8, 14), strict ordering, address 1, 2 and 3 selectors; then the operation's own.
    let allowed: [(u8, &[u32]); 13] = [
        (0x00, &[]),
        (0x01, &[9]),
        (0x02, &[]),
        (0x03, &[1, 8, 14, 13, 9, 10]),
        (0x04, &[1, 8, 14, 13, 10]),
        (0x05, &[1, 7, 9, 10]),
        (0x06, &[1, 7, 9]),
        (0x07, &[1, 7, 8, 14, 13, 9, 10, 11]),
        (0x08, &[1, 8, 14, 13, 9, 10]),
        (0x09, &[1, 8, 14, 13, 9, 10, 11]),
        (0x10, &[1, 9, 17, 18]),
        (0x11, &[1, 8, 14, 13, 9, 10, 17, 18]),
        (0x20, &[1, 14, 13, 10]),
    ];
    let bench = Bench::blocking();
    for raw in samples() {
        let (_, own) = allowed.iter().find(|(operation, _)| *operation == raw.0[7]).unwrap();
        for bit in 0..24 {
            // Bit 16 of the CRC operations changes what is reserved: another test.
            if [2, 3].contains(&bit) || (bit == 16 && [0x10, 0x11].contains(&raw.0[7])) {
                continue;
            }
            let record = bench.run(raw.flags(1 << bit));
            let good = own.contains(&bit) || bit == 12;
            assert_eq!(record.status != 0x11, good, "operation {:#x} flag {bit}: {record:?}", raw.0[7]);
            if !good {
                assert_eq!(record.detail, 1 << bit, "the record names the flag");
                assert_eq!(record.completed, 0);
            }
        }
    }
}

#[test]
fn reserved_bytes_are_those_of_table_5_3() {
    let reserved: [(u8, &[(usize, usize)]); 13] = [
        (0x00, &[(16, 35), (38, 63)]),
        (0x01, &[(24, 31), (38, 63)]),
        (0x02, &[(16, 35), (38, 63)]),
        (0x03, &[(38, 63)]),
        (0x04, &[(38, 63)]),
        (0x05, &[(38, 39), (41, 63)]),
        (0x06, &[(38, 39), (41, 63)]),
        (0x07, &[(38, 39), (52, 55), (57, 63)]),
        (0x08, &[(38, 39), (44, 63)]),
        (0x09, &[(38, 39), (48, 63)]),
        (0x10, &[(24, 31), (38, 39), (44, 63)]),
        (0x11, &[(38, 39), (44, 63)]),
        (0x20, &[(16, 23), (38, 63)]),
    ];
    let bench = Bench::new(|_| {});
    for raw in samples() {
        let (_, ranges) = reserved.iter().find(|(operation, _)| *operation == raw.0[7]).unwrap();
        for at in 16..64 {
            // The interrupt handle is reserved for all, because no interrupt is requested.
            let is_reserved =
                ranges.iter().any(|&(first, last)| (first..=last).contains(&at)) || [36, 37].contains(&at);
            let record = bench.run(raw.u8(at, raw.0[at] ^ 0x40));
            assert_ne!(record.status, 0);
            assert_eq!(record.status == 0x12, is_reserved, "operation {:#x} byte {at}: {record:?}", raw.0[7]);
        }
    }
}

#[test]
fn operations_with_a_result_require_a_record() {
    let bench = Bench::new(|_| {});
    for raw in samples() {
        let required = [0x02, 0x05, 0x06, 0x07, 0x10, 0x11].contains(&raw.0[7]);
        let record = bench.run(raw.without(8));
        assert_eq!(record.status == 0x11, required, "operation {:#x}: {record:?}", raw.0[7]);
        if required {
            assert_eq!(record.detail, 8, "the missing flag is named");
        }
    }
}

#[test]
fn a_record_needs_its_address_to_be_valid() {
    let bench = Bench::new(|_| {});
    // Address without the flag: reserved field; request without the address: flag. Only SWERROR can report it.
    bench.submit(noop(0).u64(8, RECORDS));
    bench.model.settle();
    assert_eq!(bench.model.take_software_error("dsa0").map(|error| error.code), Some(0x12));
    bench.submit(noop(0).flags(8));
    bench.model.settle();
    assert_eq!(bench.model.take_software_error("dsa0").map(|error| error.code), Some(0x11));
    // Not aligned to 32 bytes: no record is written.
    for misaligned in [1, 8, 16, 31] {
        bench.submit(noop(RECORDS + misaligned));
        bench.model.settle();
        assert_eq!(bench.model.take_software_error("dsa0").map(|error| error.code), Some(0x1b));
    }
    assert_eq!(bench.memory.get(RECORDS, 96), [0; 96]);
}

#[test]
fn sizes_are_limited_by_the_queue() {
    let bench = Bench::new(|device| device.queues[0].max_transfer_size = 0x2000);
    for raw in samples().into_iter().filter(|raw| ![0, 1, 2].contains(&raw.0[7])) {
        assert_eq!(bench.run(raw.u32(32, 0)).status, 0x13, "operation {:#x}, size 0", raw.0[7]);
        assert_eq!(bench.run(raw.u32(32, 0x2008)).status, 0x13, "operation {:#x}, too large", raw.0[7]);
        assert_ne!(bench.run(raw.u32(32, 0x2000)).status, 0x13, "operation {:#x}, largest", raw.0[7]);
    }
}

#[test]
fn block_on_fault_waits_for_the_page() {
    let bench = Bench::blocking();
    bench.memory.set(B, 0x3000, PageState::Absent);
    let data = bytes(0x3000, 6);
    bench.memory.put(A, &data);
    let record = bench.run(memmove(RECORDS, A, B, 0x3000).flags(BLOCK));
    assert_eq!((record.status, record.completed), (1, 0));
    assert_eq!(bench.memory.get(B, 0x3000), data);
    assert_eq!(bench.model.counters().page_requests, 3);
    assert!(bench.model.now() > 3000, "three page requests take at least a microsecond each: {}", bench.model.now());
}

#[test]
fn a_descriptor_may_need_any_number_of_page_requests() {
    let (bench, pages) = (Bench::blocking(), 100);
    bench.memory.set(0x800_0000, pages * 0x1000, PageState::Absent);
    let record = bench.run(fill(RECORDS, 7, 0x800_0000, pages as u32 * 0x1000).flags(BLOCK));
    assert_eq!((record.status, bench.model.counters().page_requests), (1, pages));
}

/// Reports every page request as resolved, and resolves none.
#[derive(Debug)]
struct NeverResolves(Arc<TestMemory>);

impl AddressSpace for NeverResolves {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<u32, Fault> {
        self.0.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<u32, Fault> {
        self.0.write(address, from)
    }

    fn resolve(&self, _address: u64, _write: bool) -> bool {
        true
    }
}

#[test]
fn endless_page_requests_for_one_page_are_abandoned() {
    let memory = Arc::new(TestMemory::new());
    memory.set(RECORDS, 0x1000, PageState::Present);
    let mut device = DeviceConfig::default();
    device.queues[0].block_on_fault = true;
    let config = ModelConfig { devices: vec![device], ..ModelConfig::default() };
    let model = Model::manual_on(config, Arc::new(NeverResolves(memory.clone()))).unwrap();
    for (raw, status) in [(fill(RECORDS, 7, B, 64).flags(BLOCK), 0x84), (batch(RECORDS, B, 2), 0x06)] {
        memory.put(RECORDS, &[0; 32]);
        assert!(model.queue("wq0.0").unwrap().enqcmd(&raw.0));
        model.settle();
        assert_eq!(seen(&memory.get(RECORDS, 32)).status, status);
    }
}

#[test]
fn addresses_at_the_end_of_the_address_space_fault_like_others() {
    const END: u64 = u64::MAX - 100;
    for ats_disable in [false, true] {
        let bench = Bench::new(|device| {
            device.overlapping_copy = true;
            device.queues[0].ats_disable = ats_disable;
        });
        bench.memory.put(A, &[7; 0x2000]);
        bench.memory.put(B, &[0xff, 0x3]);
        let read = if ats_disable { 0x20 } else { 3 };
        let write = if ats_disable { 1 } else { 0x83 };
        for (raw, status) in [
            (memmove(RECORDS, END, A, 0x2000), read),
            (memmove(RECORDS, A, END, 0x2000), write),
            (memmove(RECORDS, END, END + 50, 0x2000), read),
            (fill(RECORDS, 7, END, 0x2000), write),
            (compare(RECORDS, END, A, 0x2000), read),
            (compare_pattern(RECORDS, END, 0, 0x2000), read),
            (dualcast(RECORDS, A, END, END - 0x10_0000, 0x1000), write),
            (create_delta(RECORDS, END & !7, A, 0x2000, B, 80), read),
            (apply_delta(RECORDS, END, 100, A, 0x2000), read),
            (apply_delta(RECORDS, B, 10, END & !7, 0x2000), write),
            (crc(RECORDS, END, 0x2000, 0), read),
        ] {
            assert_eq!(bench.run(raw).status, status, "{:02x?}", raw.0);
        }
    }
}

#[test]
fn block_on_fault_is_refused_where_the_queue_forbids_it() {
    let bench = Bench::new(|_| {});
    let record = bench.run(memmove(RECORDS, A, B, 64).flags(BLOCK));
    assert_eq!((record.status, record.detail), (0x11, BLOCK));
}

#[test]
fn block_on_fault_that_cannot_be_resolved_is_an_invalid_response() {
    let bench = Bench::blocking();
    bench.memory.set(B + 0x1000, 1, PageState::ReadOnly);
    let record = bench.run(memmove(RECORDS, A, B, 0x3000).flags(BLOCK));
    assert_eq!((record.status, record.completed, record.fault), (0x84, 0x1000, B + 0x1000));
    forbid(&bench, A);
    assert_eq!(bench.run(compare_pattern(RECORDS, A, 0, 64).flags(BLOCK)).status, 0x04);
}

#[test]
fn fault_info_is_of_version_2() {
    for (version, info, list) in [(0x100, 0, 0), (0x200, 3 << 1, 1 << 1)] {
        let bench = Bench::new(|device| device.version = version);
        forbid(&bench, B);
        assert_eq!(bench.run(memmove(RECORDS, A, B, 64)).info, info);
        assert_eq!(bench.run(batch(RECORDS, B, 2)).info, list);
    }
}

#[test]
fn without_translation_service_a_faulting_write_is_lost_without_a_report() {
    let bench = Bench::new(|device| device.queues[0].ats_disable = true);
    bench.memory.put(A, &[7; 0x2000]);
    forbid(&bench, B);
    let record = bench.run(memmove(RECORDS, A, B, 0x2000));
    assert_eq!(record.status, 1);
    assert_eq!(bench.memory.get(B, 4), [0; 4]);
    assert_eq!(bench.memory.get(B + 0x1000, 4), [7; 4]);
    forbid(&bench, A);
    assert_eq!(bench.run(memmove(RECORDS, A, B, 64)).status, 0x20);
}

#[test]
fn without_translation_service_a_record_that_faults_is_lost_without_a_report() {
    let bench = Bench::new(|device| (device.queues[0].ats_disable, device.event_log) = (true, true));
    bench.memory.set(0x9000, 1, PageState::Absent);
    bench.submit(noop(0x9000));
    bench.model.settle();
    assert_eq!(bench.record(0x9000).status, 0);
    assert_eq!(bench.model.take_software_error("dsa0"), None);
    let counters = bench.model.counters();
    assert_eq!((counters.lost_records, counters.page_requests, counters.event_log_records), (1, 0, 0));
    assert_eq!(bench.queue.in_flight(), 0, "its entry is free all the same");
}

#[test]
fn the_record_of_a_fault_without_a_page_for_it_goes_to_the_software_error_register() {
    let bench = Bench::new(|device| device.page_requests = false);
    bench.memory.set(0x9000, 1, PageState::Absent);
    bench.submit(noop(0x9000));
    bench.model.settle();
    assert_eq!(bench.model.take_software_error("dsa0").map(|error| error.code), Some(0x1a));
    assert_eq!(bench.model.counters().lost_records, 1);
}

#[test]
fn record_addresses_always_block_on_fault() {
    let bench = Bench::new(|_| {});
    bench.memory.set(0x9000, 1, PageState::Absent);
    bench.submit(noop(0x9000));
    bench.model.settle();
    assert_eq!(bench.record(0x9000).status, 1);
    assert_eq!(bench.model.counters().page_requests, 1);
}

#[test]
fn with_the_event_log_the_kernel_copies_the_record_later() {
    let bench = Bench::new(|device| {
        device.version = 0x200;
        device.event_log = true;
        device.queues[0].prs_disable = true;
    });
    bench.memory.set(0x9000, 1, PageState::Absent);
    bench.submit(noop(0x9000));
    bench.model.advance(5_000);
    assert_eq!(bench.record(0x9000).status, 0, "not yet");
    assert_eq!(bench.queue.in_flight(), 0, "for the device it is complete");
    bench.model.settle();
    assert_eq!(bench.record(0x9000).status, 1);
    assert_eq!(bench.model.counters().event_log_records, 1);
    assert!(bench.memory.read(0x9000, &mut [0; 32]).is_ok());
}
