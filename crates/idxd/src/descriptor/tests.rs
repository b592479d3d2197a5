//! Each descriptor byte by byte, as in the figures of the specification's section 8.3. Nothing here uses the crate's
//! own offsets or flag names.

#[cfg(not(miri))]
use proptest::prelude::*;

use super::*;

const A: u64 = 0x1111_2222_3333_4444;
const B: u64 = 0x5555_6666_7777_8888;
const C: u64 = 0x9999_aaaa_bbbb_cccc;
const N: u32 = 0x0012_3456;
const RECORD: u64 = 0x7f00_1234_5660;

/// Returns 64 zero bytes with these fields set.
fn bytes(fields: &[(usize, &[u8])]) -> [u8; 64] {
    let mut bytes = [0; 64];
    for (at, value) in fields {
        assert!(bytes[*at..*at + value.len()].iter().all(|byte| *byte == 0), "two fields at {at}");
        bytes[*at..*at + value.len()].copy_from_slice(value);
    }
    bytes
}

#[test]
fn noop_is_all_zero_but_for_its_record() {
    assert_eq!(Descriptor::noop().as_bytes(), &[0; 64]);
    let with = Descriptor::noop().with_record(RECORD);
    assert_eq!(with.as_bytes(), &bytes(&[(4, &[0x0c, 0, 0]), (8, &RECORD.to_le_bytes())]));
}

#[test]
fn drain() {
    let drain = Descriptor::drain().with_record(RECORD);
    assert_eq!(drain.as_bytes(), &bytes(&[(4, &[0x0c]), (7, &[0x02]), (8, &RECORD.to_le_bytes())]));
}

#[test]
fn batch() {
    let batch = Descriptor::batch(A, 128).with_record(RECORD);
    let expected =
        [(4, &[0x0c][..]), (7, &[0x01]), (8, &RECORD.to_le_bytes()), (16, &A.to_le_bytes()), (32, &[128, 0, 0, 0])];
    assert_eq!(batch.as_bytes(), &bytes(&expected));
    assert_eq!(batch.after_failure().as_bytes()[6], 0x01, "bit 16 is batch error");
}

#[test]
fn memmove() {
    let descriptor = Descriptor::memmove(A, B, N);
    let expected = [(7, &[0x03][..]), (16, &A.to_le_bytes()), (24, &B.to_le_bytes()), (32, &N.to_le_bytes())];
    assert_eq!(descriptor.as_bytes(), &bytes(&expected));
}

#[test]
fn compare_and_its_expected_result() {
    let fields = [
        (4, &[0x0c][..]),
        (7, &[0x05]),
        (8, &RECORD.to_le_bytes()),
        (16, &A.to_le_bytes()),
        (24, &B.to_le_bytes()),
        (32, &N.to_le_bytes()),
    ];
    assert_eq!(Descriptor::compare(A, B, N).with_record(RECORD).as_bytes(), &bytes(&fields));
    let expecting = Descriptor::compare(A, B, N).with_record(RECORD).expecting(1);
    let mut expected = bytes(&fields);
    expected[4] = 0x8c;
    expected[40] = 1;
    assert_eq!(expecting.as_bytes(), &expected);
}

#[test]
fn compare_pattern_has_the_pattern_where_the_destination_is() {
    let descriptor = Descriptor::compare_pattern(A, C, N).expecting(0);
    let expected =
        [(4, &[0x8c][..]), (7, &[0x06]), (16, &A.to_le_bytes()), (24, &C.to_le_bytes()), (32, &N.to_le_bytes())];
    assert_eq!(descriptor.as_bytes(), &bytes(&expected));
}

#[test]
fn create_delta_and_its_mask_of_expected_results() {
    let fields = [
        (4, &[0x0c][..]),
        (7, &[0x07]),
        (16, &A.to_le_bytes()),
        (24, &B.to_le_bytes()),
        (32, &N.to_le_bytes()),
        (40, &C.to_le_bytes()),
        (48, &800_u32.to_le_bytes()),
    ];
    let descriptor = Descriptor::create_delta(A, B, N, C, 800);
    assert_eq!(descriptor.as_bytes(), &bytes(&fields));
    let mut expected = bytes(&fields);
    expected[4] = 0x8c;
    expected[56] = 0b011;
    assert_eq!(descriptor.expecting(0b011).as_bytes(), &expected);
}

#[test]
fn apply_delta_has_the_record_as_source() {
    let descriptor = Descriptor::apply_delta(C, 810, B, N);
    let expected = [
        (7, &[0x08][..]),
        (16, &C.to_le_bytes()),
        (24, &B.to_le_bytes()),
        (32, &N.to_le_bytes()),
        (40, &810_u32.to_le_bytes()),
    ];
    assert_eq!(descriptor.as_bytes(), &bytes(&expected));
}

#[test]
fn crc_and_copy_with_crc() {
    let seed = 0xdead_beef_u32;
    let fields =
        [(4, &[0x0c][..]), (7, &[0x10]), (16, &A.to_le_bytes()), (32, &N.to_le_bytes()), (40, &seed.to_le_bytes())];
    assert_eq!(Descriptor::crc(A, N, seed).as_bytes(), &bytes(&fields));
    let mut expected = bytes(&fields);
    expected[7] = 0x11;
    expected[24..32].copy_from_slice(&B.to_le_bytes());
    assert_eq!(Descriptor::copy_crc(A, B, N, seed).as_bytes(), &expected);
}

/// Each operation: its code, whether it must have a record, and by table 5-3 whether it may have block on fault, check
/// result, cache control.
const TABLE: [(u8, bool, bool, bool, bool); 10] = [
    (0x00, false, false, false, false),
    (0x01, false, false, false, false),
    (0x02, false, false, false, false),
    (0x03, false, true, false, true),
    (0x05, true, true, true, false),
    (0x06, true, true, true, false),
    (0x07, true, true, true, true),
    (0x08, false, true, false, true),
    (0x10, true, true, false, false),
    (0x11, true, true, false, true),
];

fn one_of_each() -> [Descriptor; 10] {
    [
        Descriptor::noop(),
        Descriptor::batch(A, 2),
        Descriptor::drain(),
        Descriptor::memmove(A, B, N),
        Descriptor::compare(A, B, N),
        Descriptor::compare_pattern(A, C, N),
        Descriptor::create_delta(A, B, N, C, 80),
        Descriptor::apply_delta(C, 10, B, N),
        Descriptor::crc(A, N, 0),
        Descriptor::copy_crc(A, B, N, 0),
    ]
}

#[test]
fn flags_are_set_where_the_operation_allows_them_and_nowhere_else() {
    for (descriptor, (code, record, block, check, cache)) in one_of_each().into_iter().zip(TABLE) {
        assert_eq!(descriptor.as_bytes()[7], code);
        assert_eq!(descriptor.operation(), Some(Operation::from_code(code).unwrap()));
        assert_eq!(descriptor.flags(), if record { 0x0c } else { 0 }, "{code:#x}");
        assert_eq!(descriptor.blocking_on_fault().flags() & 0x02 != 0, block, "{code:#x}");
        assert_eq!(descriptor.expecting(1).flags() & 0x80 != 0, check, "{code:#x}");
        assert_eq!(descriptor.to_cache().flags() & 0x100 != 0, cache, "{code:#x}");
        assert_eq!(descriptor.fenced().flags() & 0x01 != 0, !matches!(code, 1 | 2), "{code:#x}");
        assert_eq!(descriptor.after_failure().flags() & 0x1_0000 != 0, code == 1, "{code:#x}");
        if !check {
            assert_eq!(descriptor.expecting(1), descriptor, "no stray expected result");
        }
        let failure = descriptor.with_record_on_failure(RECORD).flags();
        assert_eq!(failure, if record { 0x0c } else { 0x04 }, "what must have a record asks for it in any case");
    }
}

/// Table 5-3's last column: fields that must be zero for each operation, whatever builder methods were called.
#[test]
fn reserved_bytes_stay_zero() {
    let reserved: [&[std::ops::Range<usize>]; 10] = [
        &[16..36, 38..64],
        &[24..32, 38..64],
        &[32..36, 38..64],
        &[38..50, 50..64],
        &[38..40, 41..64],
        &[38..40, 41..64],
        &[38..40, 52..56, 57..64],
        &[38..40, 44..64],
        &[24..32, 38..40, 44..64],
        &[38..40, 44..64],
    ];
    for (descriptor, reserved) in one_of_each().into_iter().zip(reserved) {
        let full =
            descriptor.with_record(RECORD).expecting(0xff).fenced().blocking_on_fault().to_cache().after_failure();
        for range in reserved {
            assert!(full.as_bytes()[range.clone()].iter().all(|byte| *byte == 0), "{full:?} {range:?}");
        }
        assert_eq!(full.as_bytes()[0..4], [0; 4], "PASID and privilege are the CPU's");
        assert_eq!(full.as_bytes()[36..38], [0; 2], "no interrupt handle");
        // Bits 4 (interrupt), 6 and 15 (reserved), 9 to 12 (traffic classes), 5, 13, 14 (never set), 17 to 23.
        assert_eq!(full.flags() & 0xfe_fe70, 0, "{full:?}");
    }
}

#[test]
fn a_descriptor_is_64_bytes_on_a_64_byte_boundary() {
    let pair = [Descriptor::noop(), Descriptor::drain()];
    assert_eq!(std::ptr::from_ref(&pair[0]) as usize % 64, 0);
    assert_eq!(std::ptr::from_ref(&pair[1]) as usize - std::ptr::from_ref(&pair[0]) as usize, 64);
}

#[cfg(not(miri))]
proptest! {
    #[test]
    fn fields_read_back(source: u64, destination: u64, size: u32, record: u64, seed: u32) {
        let descriptor = Descriptor::copy_crc(source, destination, size, seed).with_record(record);
        prop_assert_eq!(descriptor.source(), source);
        prop_assert_eq!(descriptor.destination(), destination);
        prop_assert_eq!(descriptor.bytes(), size);
        prop_assert_eq!(descriptor.record(), Some(record));
        prop_assert_eq!(Descriptor::from_bytes(*descriptor.as_bytes()), descriptor);
        prop_assert_eq!(Descriptor::memmove(source, destination, size).record(), None);
    }
}
