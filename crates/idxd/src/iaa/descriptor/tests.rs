//! Each descriptor byte by byte, compared with IAA's section 6.

use super::*;

const A: u64 = 0x1111_2222_3333_4440;
const B: u64 = 0x5555_6666_7777_8880;
const C: u64 = 0x9999_aaaa_bbbb_ccc0;
const RECORD: u64 = 0x7f00_1234_5640;

fn bytes(fields: &[(usize, &[u8])]) -> [u8; 64] {
    let mut bytes = [0; 64];
    for (at, value) in fields {
        bytes[*at..*at + value.len()].copy_from_slice(value);
    }
    bytes
}

#[test]
fn noop_and_drain() {
    assert_eq!(Descriptor::noop().as_bytes(), &[0; 64]);
    let drain = Descriptor::drain().with_record(RECORD);
    assert_eq!(drain.as_bytes(), &bytes(&[(4, &[0x0c]), (7, &[0x02]), (8, &RECORD.to_le_bytes())]));
    assert_eq!(drain.blocking_on_fault().to_cache().with_crc32c().keeping_state(A), drain, "reserved for them");
}

#[test]
fn compress_reads_its_codes_and_ends_the_block() {
    let descriptor = Descriptor::compress(A, 16384, B, 16512, C).with_record(RECORD);
    let expected = [
        (4, &[0x0c, 0x00, 0x01][..]),
        (7, &[0x43]),
        (8, &RECORD.to_le_bytes()),
        (16, &A.to_le_bytes()),
        (24, &B.to_le_bytes()),
        (32, &16384_u32.to_le_bytes()),
        (38, &[0b0110, 0]),
        (40, &C.to_le_bytes()),
        (48, &16512_u32.to_le_bytes()),
        (52, &1568_u32.to_le_bytes()),
    ];
    assert_eq!(descriptor.as_bytes(), &bytes(&expected));
    assert_eq!(descriptor.with_crc32c().as_bytes()[6], 0x21, "bit 21 selects the CRC of RFC 3720");
    assert_eq!(descriptor.to_cache().blocking_on_fault().as_bytes()[4..6], [0x0e, 0x01]);
}

#[test]
fn statistics_use_no_second_source() {
    let descriptor = Descriptor::statistics(A, 4096, B).with_record(RECORD);
    let expected = [
        (4, &[0x0c][..]),
        (7, &[0x43]),
        (8, &RECORD.to_le_bytes()),
        (16, &A.to_le_bytes()),
        (24, &B.to_le_bytes()),
        (32, &4096_u32.to_le_bytes()),
        (38, &[0b0001, 0]),
        (48, &1272_u32.to_le_bytes()),
    ];
    assert_eq!(descriptor.as_bytes(), &bytes(&expected));
}

#[test]
fn decompress_stops_at_the_final_end_of_block_and_requires_it() {
    let descriptor = Descriptor::decompress(A, 5000, B, 16384).with_record(RECORD);
    let expected = [
        (4, &[0x0c][..]),
        (7, &[0x42]),
        (8, &RECORD.to_le_bytes()),
        (16, &A.to_le_bytes()),
        (24, &B.to_le_bytes()),
        (32, &5000_u32.to_le_bytes()),
        (38, &[0b1_1111, 0]),
        (48, &16384_u32.to_le_bytes()),
    ];
    assert_eq!(descriptor.as_bytes(), &bytes(&expected));
    let verify = Descriptor::verify(A, 5000).with_record(RECORD);
    let mut without_output = bytes(&expected);
    without_output[24..32].fill(0);
    without_output[48..52].fill(0);
    without_output[39] = 0x02;
    assert_eq!(verify.as_bytes(), &without_output);
}

#[test]
fn a_decompression_that_overflowed_continues_with_the_other_half_of_its_state() {
    let first = Descriptor::decompress(A, 5000, B, 4096).keeping_state(C).with_record(RECORD);
    assert_eq!(first.as_bytes()[6], 0b0000_1000, "source 2 written only on overflow");
    assert_eq!(first.as_bytes()[40..48], C.to_le_bytes());
    assert_eq!(first.as_bytes()[52..56], 5376_u32.to_le_bytes());
    let second = first.continued(1200, B + 4096, 8192).unwrap();
    assert_eq!(second.as_bytes()[6], 0b0100_1001, "read from the half that was written, which is the second");
    assert_eq!(second.as_bytes()[16..24], (A + 1200).to_le_bytes());
    assert_eq!(second.bytes(), 3800);
    assert_eq!(second.as_bytes()[24..32], (B + 4096).to_le_bytes());
    assert_eq!(second.as_bytes()[48..52], 8192_u32.to_le_bytes());
    let third = second.continued(800, B, 8192).unwrap();
    assert_eq!(third.as_bytes()[6], 0b0000_1001, "and back");
    assert_eq!(third.as_bytes()[7], 0x42);
    assert_eq!(first.continued(5001, B, 1), None, "more than the input");
    assert_eq!(Descriptor::decompress(A, 10, B, 10).continued(1, B, 10), None, "its state was not kept");
}

#[test]
fn crc64_has_no_output_and_its_polynomial_at_the_end() {
    let descriptor = Descriptor::crc64(A, 777, 0x1edc_6f41_0000_0000, BitOrder::Bit0First, true).with_record(RECORD);
    let expected = [
        (4, &[0x0c][..]),
        (7, &[0x44]),
        (8, &RECORD.to_le_bytes()),
        (16, &A.to_le_bytes()),
        (32, &777_u32.to_le_bytes()),
        (38, &[0x00, 0xc0]),
        (56, &0x1edc_6f41_0000_0000_u64.to_le_bytes()),
    ];
    assert_eq!(descriptor.as_bytes(), &bytes(&expected));
    assert_eq!(Descriptor::crc64(A, 1, 1, BitOrder::Bit7First, false).as_bytes()[38..40], [0, 0]);
    assert_eq!(descriptor.to_cache(), descriptor, "it writes no output");
    assert_eq!(descriptor.with_crc32c(), descriptor, "reserved for it on first-generation devices");
}
