//! IAA's operations. They are checked, executed and recorded separately from DSA's, because hardly any field has the
//! same offset.

mod deflate;
mod inflate;

use super::access::{Access, Stop};
use super::invalid::Invalid;
use super::{Limits, Outcome, Record, Scratch, overlap, target};
use crate::table::dsa::{
    ADDRESS_3_CLASS, BLOCK_ON_FAULT, CACHE_CONTROL_1, CACHE_CONTROL_2, FLAGS, INTERRUPT, OPERATION, RECORD,
    RECORD_CLASS, RECORD_VALID, REQUEST_INTERRUPT, REQUEST_RECORD,
};
use crate::table::iaa::{self, code, compress_aecs, compression, crc64, decompression, record};
use crate::table::{Operation, status};

pub(super) fn check(descriptor: &[u8; 64], limits: &Limits) -> Result<&'static Operation, Invalid> {
    let fail = |status: u8| Err(Invalid { status, flags: 0 });
    let flags = FLAGS.get(descriptor) as u32;
    if flags & RECORD_VALID != 0 && !RECORD.get(descriptor).is_multiple_of(record::BYTES as u64) {
        return fail(status::RECORD_ALIGNMENT);
    }
    let Some(operation) = iaa::operation(OPERATION.get(descriptor) as u8) else {
        return fail(status::BAD_OPERATION);
    };
    let extra = iaa::OPERATION_FLAGS.get(descriptor) as u16;
    flags_allowed(operation, flags, extra, limits)?;
    extra_flags(operation.code, descriptor, extra)?;
    let zero = |first: usize, last: usize| descriptor[first..=last].iter().all(|&byte| byte == 0);
    let uses_aecs = flags & (iaa::READ_SOURCE2 | iaa::WRITE_SOURCE2) != 0;
    let mut good = operation.reserved.iter().all(|&(first, last)| zero(first, last));
    good &= INTERRUPT.get(descriptor) == 0;
    good &= flags & RECORD_VALID != 0 || RECORD.get(descriptor) == 0;
    good &= uses_aecs || (iaa::SOURCE2.get(descriptor) == 0 && iaa::SOURCE2_SIZE.get(descriptor) == 0);
    if !good {
        return fail(status::RESERVED);
    }
    sizes(operation, descriptor, uses_aecs, limits)?;
    Ok(operation)
}

/// Checks the flags (6.1.3 and table 4-1).
fn flags_allowed(operation: &Operation, flags: u32, extra: u16, limits: &Limits) -> Result<(), Invalid> {
    let mut allowed = iaa::ANY | operation.flags;
    let mut forbid = |mask: u32, when: bool| {
        if when {
            allowed &= !mask;
        }
    };
    let (reads, writes) = (flags & iaa::READ_SOURCE2, flags & iaa::WRITE_SOURCE2);
    let statistics = operation.code == code::COMPRESS && extra & compression::STATISTICS != 0;
    forbid(BLOCK_ON_FAULT, !limits.block_on_fault);
    forbid(REQUEST_INTERRUPT, true);
    forbid(REQUEST_RECORD | RECORD_CLASS, flags & RECORD_VALID == 0);
    forbid(CACHE_CONTROL_1, !limits.cache_control);
    forbid(CACHE_CONTROL_2, !limits.destination_readback);
    forbid(iaa::READ_SOURCE2, reads != iaa::READ_AECS || statistics);
    forbid(iaa::WRITE_SOURCE2, writes == iaa::WRITE_SOURCE2 || statistics);
    forbid(iaa::WRITE_SOURCE2, operation.code == code::COMPRESS && writes == iaa::WRITE_ON_OVERFLOW);
    forbid(iaa::TOGGLE | ADDRESS_3_CLASS, reads == 0 && writes == 0);
    let mut wrong = flags & !allowed;
    let reads_required = operation.code == code::COMPRESS && !statistics;
    let required = operation.required | if reads_required { iaa::READ_AECS } else { 0 };
    if wrong == 0 {
        wrong = required & !flags;
    }
    if wrong != 0 { Err(Invalid { status: status::INVALID_FLAGS, flags: wrong }) } else { Ok(()) }
}

/// Checks the operation's own flags (tables 6-8, 6-11 and 6-13). Flags that this model lacks are refused as
/// unsupported.
fn extra_flags(code: u8, descriptor: &[u8; 64], extra: u16) -> Result<(), Invalid> {
    let (known, required) = match code {
        code::DECOMPRESS => (decompression::KNOWN, decompression::ENABLE),
        code::COMPRESS => (compression::KNOWN, 0),
        code::CRC64 => (crc64::KNOWN, 0),
        _ => (u16::MAX, 0),
    };
    let wrong = extra & !known | required & !extra;
    if wrong != 0 {
        return Err(Invalid { status: status::IAA_COMPRESSION_FLAGS, flags: u32::from(wrong) });
    }
    if code == code::COMPRESS && iaa::COMPRESSION_FLAGS_2.get(descriptor) != 0 {
        let flags = iaa::COMPRESSION_FLAGS_2.get(descriptor) as u32;
        return Err(Invalid { status: status::IAA_COMPRESSION_FLAGS + 1, flags });
    }
    Ok(())
}

fn sizes(operation: &Operation, descriptor: &[u8; 64], uses_aecs: bool, limits: &Limits) -> Result<(), Invalid> {
    let fail = |status: u8| Err(Invalid { status, flags: 0 });
    if matches!(operation.code, code::NOOP | code::DRAIN) {
        return Ok(());
    }
    let source = (iaa::SOURCE1.get(descriptor), iaa::SOURCE1_SIZE.get(descriptor));
    if operation.code == code::CRC64 {
        let bad = source.1 == 0 || source.1 > limits.max_transfer;
        return if bad { fail(status::BAD_SIZE) } else { Ok(()) };
    }
    let destination = (iaa::DESTINATION.get(descriptor), iaa::DESTINATION_SIZE.get(descriptor));
    let aecs = (iaa::SOURCE2.get(descriptor), iaa::SOURCE2_SIZE.get(descriptor));
    let largest = source.1.max(destination.1).max(aecs.1);
    if largest > limits.max_transfer || (source.1 == 0 && destination.1 == 0) {
        return fail(status::BAD_SIZE);
    }
    if uses_aecs {
        if !aecs.0.is_multiple_of(32) || !aecs.1.is_multiple_of(32) {
            return fail(status::ALIGNMENT);
        }
        let compress = operation.code == code::COMPRESS;
        if aecs.1 == 0 || aecs.1 > 64 << 10 || (compress && aecs.1 != compress_aecs::BYTES as u64) {
            return fail(status::BAD_SIZE);
        }
    }
    // An AECS occupies twice its size (3.2).
    let second = if uses_aecs { (aecs.0, 2 * aecs.1) } else { (0, 0) };
    let pairs = [(source, destination), (source, second), (destination, second)];
    if pairs.iter().any(|&(one, two)| one.1 > 0 && two.1 > 0 && overlap(one.0, one.1, two.0, two.1)) {
        return fail(status::OVERLAP);
    }
    Ok(())
}

/// The result of an operation.
#[derive(Debug, Default)]
struct Report {
    status: u8,
    error: u8,
    completed: u64,
    fault: Option<Stop>,
    output: u64,
    output_bits: u8,
    xor: u16,
    crc: u32,
    crc64: u64,
    bytes: u64,
}

impl Report {
    fn fault(stop: Stop, completed: u64) -> Report {
        Report { status: stop.status, completed, fault: Some(stop), ..Report::default() }
    }

    fn error(error: u8) -> Report {
        Report { status: status::ANALYTICS, error, ..Report::default() }
    }
}

pub(super) fn execute(
    descriptor: &[u8; 64],
    limits: &Limits,
    mut access: Access<'_>,
    scratch: &mut Scratch,
) -> Outcome {
    let operation = OPERATION.get(descriptor) as u8;
    let mut report = match operation {
        code::COMPRESS => deflate::compress(descriptor, &mut access, scratch),
        code::DECOMPRESS => inflate::decompress(descriptor, &mut access, scratch),
        code::CRC64 => crc64_operation(descriptor, &mut access, scratch),
        _ => Report { status: status::SUCCESS, ..Report::default() },
    };
    if access.corrupt_record() {
        report.crc ^= 1 << 9;
        report.crc64 ^= 1 << 9;
    }
    let mut written = Record::new(limits.kind, report.status);
    let bytes = &mut written.bytes;
    record::ERROR.set(bytes, u64::from(report.error));
    record::COMPLETED.set(bytes, report.completed);
    if let Some(stop) = report.fault {
        record::FAULT_ADDRESS.set(bytes, stop.address & !0xfff);
    }
    record::OUTPUT_SIZE.set(bytes, report.output);
    record::OUTPUT_BITS.set(bytes, u64::from(report.output_bits));
    if operation == code::CRC64 {
        record::CRC64.set(bytes, report.crc64);
    } else {
        record::XOR.set(bytes, u64::from(report.xor));
        record::CRC.set(bytes, u64::from(report.crc));
    }
    Outcome {
        status: report.status,
        record: written,
        target: target(descriptor, report.status),
        bytes: report.bytes,
        writes: true,
        page_requests: access.requests,
        misses: access.misses,
        faulted: report.fault.is_some(),
        late: access.late,
    }
}

/// Returns the addresses at which the AECS is read and written: the two halves, exchanged by the toggle (3.2).
fn halves(descriptor: &[u8; 64]) -> (u64, u64) {
    let (address, size) = (iaa::SOURCE2.get(descriptor), iaa::SOURCE2_SIZE.get(descriptor));
    let second = address.wrapping_add(size);
    if FLAGS.get(descriptor) as u32 & iaa::TOGGLE == 0 { (address, second) } else { (second, address) }
}

/// Reads all of source 1. No operation is completed in part, so this comes before any write.
fn source(descriptor: &[u8; 64], access: &mut Access<'_>, into: &mut Vec<u8>) -> Result<(), Stop> {
    into.clear();
    into.resize(iaa::SOURCE1_SIZE.get(descriptor) as usize, 0);
    if into.is_empty() { Ok(()) } else { access.read(iaa::SOURCE1.get(descriptor), into) }
}

/// Continues a CRC-32 (V.42) or CRC-32C (RFC 3720).
fn crc32(descriptor: &[u8; 64], seed: u32, bytes: &[u8]) -> u32 {
    if FLAGS.get(descriptor) as u32 & iaa::CRC_SELECT != 0 {
        return super::crc::crc32c(seed, bytes);
    }
    let mut value = !seed;
    for &byte in bytes {
        value ^= u32::from(byte);
        value = V42[(value & 0xff) as usize] ^ value >> 8;
    }
    !value
}

static V42: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
};

/// Returns the XOR of 16-bit words, the last byte extended by zero (3.6).
fn xor(seed: u16, bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(seed, |sum, word| sum ^ u16::from_le_bytes([word[0], word.get(1).copied().unwrap_or(0)]))
}

/// Executes CRC64 (3.10.3): any polynomial, in the upper bits of the field.
fn crc64_operation(descriptor: &[u8; 64], access: &mut Access<'_>, scratch: &mut Scratch) -> Report {
    if let Err(stop) = source(descriptor, access, &mut scratch.output) {
        return Report::fault(stop, 0);
    }
    let polynomial = iaa::POLYNOMIAL.get(descriptor);
    let flags = iaa::OPERATION_FLAGS.get(descriptor) as u16;
    let reversed = flags & crc64::BIT_ORDER != 0;
    // Ones from the polynomial's lowest one upwards.
    let ones = if polynomial == 0 { 0 } else { !0 << polynomial.trailing_zeros() };
    let initial = if flags & crc64::INVERT != 0 { ones } else { 0 };
    let mut register = initial;
    for &byte in &scratch.output {
        let byte = if reversed { byte.reverse_bits() } else { byte };
        register ^= u64::from(byte) << 56;
        for _ in 0..8 {
            register = if register >> 63 == 1 { register << 1 ^ polynomial } else { register << 1 };
        }
    }
    register ^= initial;
    let value = if reversed { register.reverse_bits() } else { register };
    Report { status: status::SUCCESS, crc64: value, bytes: scratch.output.len() as u64, ..Report::default() }
}

/// Base and extra bits of length symbols 257 to 285 (RFC 1951, 3.2.5).
const LENGTHS: [(u16, u8); 29] = [
    (3, 0),
    (4, 0),
    (5, 0),
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
    (11, 1),
    (13, 1),
    (15, 1),
    (17, 1),
    (19, 2),
    (23, 2),
    (27, 2),
    (31, 2),
    (35, 3),
    (43, 3),
    (51, 3),
    (59, 3),
    (67, 4),
    (83, 4),
    (99, 4),
    (115, 4),
    (131, 5),
    (163, 5),
    (195, 5),
    (227, 5),
    (258, 0),
];

/// Base and extra bits of distance symbols (RFC 1951, 3.2.5).
const DISTANCES: [(u16, u8); 30] = [
    (1, 0),
    (2, 0),
    (3, 0),
    (4, 0),
    (5, 1),
    (7, 1),
    (9, 2),
    (13, 2),
    (17, 3),
    (25, 3),
    (33, 4),
    (49, 4),
    (65, 5),
    (97, 5),
    (129, 6),
    (193, 6),
    (257, 7),
    (385, 7),
    (513, 8),
    (769, 8),
    (1025, 9),
    (1537, 9),
    (2049, 10),
    (3073, 10),
    (4097, 11),
    (6145, 11),
    (8193, 12),
    (12289, 12),
    (16385, 13),
    (24577, 13),
];
