//! The checks of sections 5.4 and 5.5, driven by the table.

use super::invalid::Invalid;
use super::{Limits, overlap};
use crate::config::Kind;
use crate::table::dsa::{self, code};
use crate::table::{Operation, status};

fn invalid<T>(status: u8) -> Result<T, Invalid> {
    Err(Invalid { status, flags: 0 })
}

/// Performs all checks that need no memory. The specification permits any order.
pub(crate) fn check(descriptor: &[u8; 64], in_batch: bool, limits: &Limits) -> Result<&'static Operation, Invalid> {
    if limits.kind == Kind::Iaa {
        return super::iaa::check(descriptor, limits);
    }
    let flags = dsa::FLAGS.get(descriptor) as u32;
    if flags & dsa::RECORD_VALID != 0 && !dsa::RECORD.get(descriptor).is_multiple_of(dsa::record::BYTES as u64) {
        return invalid(status::RECORD_ALIGNMENT);
    }
    let Some(operation) = dsa::operation(dsa::OPERATION.get(descriptor) as u8) else {
        return invalid(status::BAD_OPERATION);
    };
    if in_batch && matches!(operation.code, code::BATCH | code::DRAIN) {
        return invalid(status::BAD_OPERATION);
    }
    flags_allowed(operation, flags, in_batch, limits)?;
    reserved(operation, descriptor, flags)?;
    sizes(operation, descriptor, limits)?;
    buffers(operation, descriptor, flags, limits)?;
    Ok(operation)
}

/// Checks the flags (tables 5-3, 5-4 and 5-5).
fn flags_allowed(operation: &Operation, flags: u32, in_batch: bool, limits: &Limits) -> Result<(), Invalid> {
    let mut allowed = dsa::ANY | operation.flags;
    let mut forbid = |mask: u32, when: bool| {
        if when {
            allowed &= !mask;
        }
    };
    forbid(dsa::FENCE, !in_batch);
    forbid(dsa::BLOCK_ON_FAULT, !limits.block_on_fault);
    forbid(dsa::REQUEST_INTERRUPT, true);
    forbid(dsa::REQUEST_RECORD | dsa::RECORD_CLASS, flags & dsa::RECORD_VALID == 0);
    forbid(dsa::CACHE_CONTROL_1, !limits.cache_control);
    forbid(dsa::CACHE_CONTROL_2, !limits.destination_readback);
    let crc = matches!(operation.code, code::CRC | code::COPY_CRC);
    forbid(dsa::ADDRESS_3_CLASS, crc && flags & dsa::READ_SEED == 0);
    if operation.code == code::BATCH && limits.version >= 0x200 {
        allowed |= dsa::BATCH_ERROR;
    }
    let wrong = flags & !allowed;
    if wrong != 0 {
        return Err(Invalid { status: status::INVALID_FLAGS, flags: wrong });
    }
    let drain = if operation.code == code::DRAIN { dsa::REQUEST_RECORD } else { 0 };
    let missing = (operation.required | drain) & !flags;
    if missing != 0 {
        return Err(Invalid { status: status::INVALID_FLAGS, flags: missing });
    }
    Ok(())
}

fn reserved(operation: &Operation, descriptor: &[u8; 64], flags: u32) -> Result<(), Invalid> {
    let zero = |first: usize, last: usize| descriptor[first..=last].iter().all(|&byte| byte == 0);
    let mut good = operation.reserved.iter().all(|&(first, last)| zero(first, last));
    good &= flags & dsa::REQUEST_INTERRUPT != 0 || dsa::INTERRUPT.get(descriptor) == 0;
    good &= flags & dsa::RECORD_VALID != 0 || dsa::RECORD.get(descriptor) == 0;
    if matches!(operation.code, code::CRC | code::COPY_CRC) {
        let unused = if flags & dsa::READ_SEED == 0 { dsa::CRC_SEED_ADDRESS } else { dsa::CRC_SEED };
        good &= unused.get(descriptor) == 0;
    }
    if good { Ok(()) } else { invalid(status::RESERVED) }
}

fn sizes(operation: &Operation, descriptor: &[u8; 64], limits: &Limits) -> Result<(), Invalid> {
    let size = dsa::SIZE.get(descriptor);
    if operation.sized && (size == 0 || size > limits.max_transfer) {
        return invalid(status::BAD_SIZE);
    }
    match operation.code {
        code::BATCH => {
            let least = if limits.batch_of_one { 1 } else { 2 };
            if size < least || size > limits.max_batch {
                return invalid(status::BAD_COUNT);
            }
            if !dsa::SOURCE.get(descriptor).is_multiple_of(dsa::DESCRIPTOR as u64) {
                return invalid(status::LIST_ALIGNMENT);
            }
        }
        code::CREATE_DELTA | code::APPLY_DELTA => {
            if size > dsa::DELTA_TRANSFER {
                return invalid(status::BAD_SIZE);
            }
            let create = operation.code == code::CREATE_DELTA;
            let (record, least) = if create {
                (dsa::DELTA_LIMIT.get(descriptor), dsa::MIN_DELTA_LIMIT)
            } else {
                (dsa::DELTA_SIZE.get(descriptor), dsa::DELTA as u64)
            };
            if record < least || record > limits.max_transfer {
                return invalid(status::BAD_VALUE);
            }
            let source = if create { dsa::SOURCE.get(descriptor) } else { 0 };
            if !(source | dsa::DESTINATION.get(descriptor) | size).is_multiple_of(8) {
                return invalid(status::ALIGNMENT);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Checks overlaps, and addresses that must agree.
fn buffers(operation: &Operation, descriptor: &[u8; 64], flags: u32, limits: &Limits) -> Result<(), Invalid> {
    let (source, destination) = (dsa::SOURCE.get(descriptor), dsa::DESTINATION.get(descriptor));
    let size = dsa::SIZE.get(descriptor);
    let overlaps = match operation.code {
        code::MOVE => !limits.overlapping_copy && overlap(source, size, destination, size),
        code::COPY_CRC => overlap(source, size, destination, size),
        code::DUALCAST => {
            let second = dsa::DESTINATION2.get(descriptor);
            if (destination ^ second) & 0xfff != 0 {
                return invalid(status::DUALCAST);
            }
            overlap(source, size, destination, size)
                || overlap(source, size, second, size)
                || overlap(destination, size, second, size)
        }
        code::CREATE_DELTA => {
            let (record, limit) = (dsa::DELTA_RECORD.get(descriptor), dsa::DELTA_LIMIT.get(descriptor));
            overlap(record, limit, source, size) || overlap(record, limit, destination, size)
        }
        code::APPLY_DELTA => overlap(source, dsa::DELTA_SIZE.get(descriptor), destination, size),
        _ => false,
    };
    if overlaps {
        return invalid(status::OVERLAP);
    }
    let seeded = matches!(operation.code, code::CRC | code::COPY_CRC) && flags & dsa::READ_SEED != 0;
    if seeded && !dsa::CRC_SEED_ADDRESS.get(descriptor).is_multiple_of(4) {
        return invalid(status::ALIGNMENT);
    }
    Ok(())
}
