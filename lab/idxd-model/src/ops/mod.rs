//! The execution of one descriptor: it is checked against the table, executed on an address space, and turned into a
//! completion record.
//!
//! This module knows only memory, neither queues nor time. An [`Outcome`] contains what the engine needs for both.

mod access;
mod check;
mod compare;
mod copy;
pub mod crc;
mod delta;
pub mod iaa;
mod invalid;

use access::{Access, Stop};
pub(crate) use access::{Effects, MAX_PAGE_REQUESTS};
pub(crate) use check::check;
pub(crate) use invalid::Invalid;

use crate::config::Kind;
use crate::memory::AddressSpace;
use crate::table::dsa::{self, code, record};
use crate::table::status;

/// The limits of the queue and the device.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// DSA or IAA.
    pub kind: Kind,
    /// Hardware version, `0x100` is 1.0.
    pub version: u32,
    /// Bytes.
    pub max_transfer: u64,
    /// Descriptors.
    pub max_batch: u64,
    /// The queue's *Block On Fault Enable*.
    pub block_on_fault: bool,
    /// Whether page requests are answered for this queue.
    pub page_requests: bool,
    /// Whether address translation service is on; without it faulting writes are lost.
    pub translation: bool,
    /// GENCAP *Overlapping Copy Support*.
    pub overlapping_copy: bool,
    /// GENCAP *Batch1 Support*.
    pub batch_of_one: bool,
    /// GENCAP *Cache Control Support*.
    pub cache_control: bool,
    /// GENCAP *Destination Readback Support*.
    pub destination_readback: bool,
    /// *Compare Pattern* reports its difference rounded down to a multiple of this.
    pub pattern_granule: u32,
}

/// The destination of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The descriptor requests no record.
    Nowhere,
    /// The record's address.
    Address(u64),
    /// The software error register, or the event log: there is no usable address.
    SoftwareError,
}

/// A completion record: 32 bytes of a DSA, 64 of an IAA.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The bytes; for DSA the first 32 of them.
    pub bytes: [u8; 64],
    /// 32 or 64.
    pub len: usize,
}

impl Record {
    /// Returns a record that contains only this status.
    pub fn new(kind: Kind, status: u8) -> Record {
        let mut bytes = [0; 64];
        record::STATUS.set(&mut bytes, u64::from(status));
        Record { bytes, len: if kind == Kind::Dsa { record::BYTES } else { crate::table::iaa::record::BYTES } }
    }

    /// Returns the status, the first byte.
    pub fn status(&self) -> u8 {
        self.bytes[0]
    }

    /// Returns the bytes that are written.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Record({:02x?})", self.as_bytes())
    }
}

/// The result of one descriptor.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Status with the write bit.
    pub status: u8,
    /// The record, written or not.
    pub record: Record,
    /// Where the record is written.
    pub target: Target,
    /// The bytes that determine the duration: all sources of operations that only read, otherwise the bytes written.
    pub bytes: u64,
    /// Whether the operation wrote to a destination.
    pub writes: bool,
    /// Page requests made.
    pub page_requests: u32,
    /// Pages whose translation was not cached.
    pub misses: u32,
    /// Whether a page fault ended the operation.
    pub faulted: bool,
    /// Writes that are performed later.
    pub late: Vec<(u64, Vec<u8>)>,
}

/// Buffers that an engine keeps.
#[derive(Debug)]
pub struct Scratch {
    first: Vec<u8>,
    second: Vec<u8>,
    output: Vec<u8>,
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch { first: vec![0; CHUNK], second: vec![0; CHUNK], output: Vec::new() }
    }
}

/// Maximum bytes read or written at once.
pub(crate) const CHUNK: usize = 64 << 10;

/// The result of an operation, before it is encoded as a record.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    status: u8,
    result: u8,
    completed: u64,
    fault: Option<Stop>,
    operand: u8,
    detail: Option<(crate::table::Field, u64)>,
    bytes: u64,
}

impl Report {
    fn ok() -> Report {
        Report { status: status::SUCCESS, ..Report::default() }
    }

    fn error(status: u8) -> Report {
        Report { status, ..Report::default() }
    }

    /// Returns the report of a fault. `operand` is a number of table 8-13.
    fn fault(stop: Stop, operand: u8, completed: u64) -> Report {
        Report { status: stop.status, completed, fault: Some(stop), operand, ..Report::default() }
    }
}

/// Executes one descriptor that is neither a batch nor a drain.
pub(crate) fn execute(
    descriptor: &[u8; 64],
    in_batch: bool,
    limits: &Limits,
    memory: &dyn AddressSpace,
    scratch: &mut Scratch,
    effects: &Effects,
) -> Outcome {
    let flags = dsa::FLAGS.get(descriptor) as u32;
    let operation = match check(descriptor, in_batch, limits) {
        Ok(operation) => operation,
        Err(invalid) => return refused(descriptor, limits, invalid),
    };
    if let Some(code) = effects.status {
        return finish(
            descriptor,
            limits,
            operation.writes,
            Report::error(code),
            Access::new(memory, limits, false, effects),
        );
    }
    let block = flags & dsa::BLOCK_ON_FAULT != 0 && limits.page_requests;
    let mut access = Access::new(memory, limits, block, effects);
    if limits.kind == Kind::Iaa {
        return iaa::execute(descriptor, limits, access, scratch);
    }
    let report = match operation.code {
        code::MOVE => copy::memory_move(descriptor, limits, &mut access, scratch),
        code::FILL => copy::fill(descriptor, &mut access, scratch),
        code::COMPARE => compare::compare(descriptor, &mut access, scratch),
        code::COMPARE_PATTERN => compare::pattern(descriptor, limits, &mut access, scratch),
        code::CREATE_DELTA => delta::create(descriptor, &mut access, scratch),
        code::APPLY_DELTA => delta::apply(descriptor, &mut access, scratch),
        code::DUALCAST => copy::dualcast(descriptor, &mut access, scratch),
        code::CRC => crc::generate(descriptor, false, &mut access, scratch),
        code::COPY_CRC => crc::generate(descriptor, true, &mut access, scratch),
        code::CACHE_FLUSH => copy::cache_flush(descriptor, &mut access),
        _ => Report::ok(),
    };
    finish(descriptor, limits, operation.writes, report, access)
}

/// Returns the outcome of a descriptor that failed a check of 5.4.
pub(crate) fn refused(descriptor: &[u8; 64], limits: &Limits, invalid: Invalid) -> Outcome {
    let mut record = Record::new(limits.kind, invalid.status);
    if invalid.flags != 0 {
        record::INVALID_FLAGS.set(&mut record.bytes, u64::from(invalid.flags));
    }
    let unusable = matches!(invalid.status, status::RECORD_ALIGNMENT | status::PRIVILEGE);
    let target = if unusable { Target::SoftwareError } else { target(descriptor, invalid.status) };
    Outcome {
        status: invalid.status,
        record,
        target,
        bytes: 0,
        writes: false,
        page_requests: 0,
        misses: 0,
        faulted: false,
        late: Vec::new(),
    }
}

/// Returns the target of a record with this status (flags *Completion Record Address Valid* and *Request Completion
/// Record*).
pub(crate) fn target(descriptor: &[u8; 64], code: u8) -> Target {
    let flags = dsa::FLAGS.get(descriptor) as u32;
    let good = matches!(code & 0x3f, status::SUCCESS | status::FALSE_PREDICATE | status::BATCH_FAIL);
    if flags & dsa::RECORD_VALID == 0 {
        return if good { Target::Nowhere } else { Target::SoftwareError };
    }
    if flags & dsa::REQUEST_RECORD == 0 && good {
        return Target::Nowhere;
    }
    Target::Address(dsa::RECORD.get(descriptor))
}

fn finish(descriptor: &[u8; 64], limits: &Limits, writes: bool, mut report: Report, access: Access<'_>) -> Outcome {
    let mut record = Record::new(limits.kind, 0);
    if access.corrupt_record() && report.status <= status::FALSE_PREDICATE {
        // No data was written that could carry the scripted error, so the reported result does.
        report.result ^= 1;
        report.completed = 0;
        if let Some((field, value)) = &mut report.detail
            && *field == record::CRC
        {
            *value ^= 1 << 3;
        }
        if dsa::FLAGS.get(descriptor) as u32 & dsa::CHECK_RESULT != 0 {
            report.status ^= status::SUCCESS | status::FALSE_PREDICATE;
        }
    }
    record::STATUS.set(&mut record.bytes, u64::from(report.status));
    record::RESULT.set(&mut record.bytes, u64::from(report.result));
    record::COMPLETED.set(&mut record.bytes, report.completed);
    if let Some(stop) = report.fault {
        record::FAULT_ADDRESS.set(&mut record.bytes, stop.address & !0xfff);
        if limits.version >= 0x200 {
            record::FAULT_INFO.set(&mut record.bytes, u64::from(report.operand) << 1);
        }
    }
    if let Some((field, value)) = report.detail {
        field.set(&mut record.bytes, value);
    }
    Outcome {
        status: report.status,
        record,
        target: target(descriptor, report.status),
        bytes: report.bytes,
        writes,
        page_requests: access.requests,
        misses: access.misses,
        faulted: report.fault.is_some(),
        late: access.late,
    }
}

/// Returns the status of an operation with *Check Result* (tables 8-17 and 8.3.8).
fn predicate(descriptor: &[u8; 64], as_expected: bool) -> u8 {
    let checked = dsa::FLAGS.get(descriptor) as u32 & dsa::CHECK_RESULT != 0;
    if checked && !as_expected { status::FALSE_PREDICATE } else { status::SUCCESS }
}

/// Fills with a pattern of 8 bytes; the last repetition may be partial.
fn tile(buffer: &mut [u8], pattern: [u8; 8]) {
    let mut filled = buffer.len().min(8);
    buffer[..filled].copy_from_slice(&pattern[..filled]);
    while filled < buffer.len() {
        let part = filled.min(buffer.len() - filled);
        buffer.copy_within(..part, filled);
        filled += part;
    }
}

/// Returns whether two ranges share a byte.
fn overlap(first: u64, first_bytes: u64, second: u64, second_bytes: u64) -> bool {
    u128::from(first) < u128::from(second) + u128::from(second_bytes)
        && u128::from(second) < u128::from(first) + u128::from(first_bytes)
}
