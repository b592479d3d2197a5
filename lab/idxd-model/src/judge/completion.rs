//! Checks that a record follows from its descriptor: which statuses an operation can have, and which values of the
//! other fields go with each.

use super::operands::{Operand, operands};
use super::{Queue, Violation, descriptor};
use crate::config::Kind;
use crate::table::dsa::{self, code, record};
use crate::table::iaa::compression;
use crate::table::{Field, iaa, status};

/// The outcome that the status reports.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    Fault,
    /// Stopped at *Bytes Completed*, without a fault.
    Stopped,
    Refused,
    Hardware,
    /// A status that this operation cannot have.
    Impossible,
}

/// Checks a record; `seen` has the size of the device's records.
pub(super) fn check(descriptor: &[u8; 64], seen: &[u8], queue: &Queue, in_batch: bool) -> Vec<Violation> {
    let mut check = Check { descriptor, seen, queue, flags: dsa::FLAGS.get(descriptor) as u32, violations: Vec::new() };
    check.all(in_batch);
    check.violations
}

struct Check<'a> {
    descriptor: &'a [u8; 64],
    seen: &'a [u8],
    queue: &'a Queue,
    flags: u32,
    violations: Vec<Violation>,
}

impl Check<'_> {
    fn wrong(&mut self, field: &'static str, section: &'static str, text: String) {
        self.violations.push(Violation::new(field, section, text));
    }

    fn of(&mut self, field: &Field, section: &'static str, why: &str) {
        let text = format!("is {:#x}, {why}", field.get(self.seen));
        self.wrong(field.name, section, text);
    }

    fn all(&mut self, in_batch: bool) {
        let operation = dsa::OPERATION.get(self.descriptor) as u8;
        let end = self.status(operation, in_batch);
        if self.flags & dsa::RECORD_VALID == 0 {
            self.wrong("completion record", "8.1.4", "is there, and its address was not valid".into());
        }
        let good = [status::SUCCESS, status::FALSE_PREDICATE, status::BATCH_FAIL].contains(&(self.seen[0] & 0x3f));
        if good && self.flags & dsa::REQUEST_RECORD == 0 {
            self.wrong("completion record", "table 8-3", "is there without an error, and was not asked for".into());
        }
        match end {
            End::Fault => self.fault(operation),
            End::Refused => self.refused(operation, in_batch),
            End::Impossible | End::Hardware => {}
            End::Done | End::Stopped if self.queue.kind == Kind::Iaa => self.analytics(operation),
            End::Done | End::Stopped => self.done(operation, end),
        }
    }

    /// Checks the status (tables 5-6 and 8-10, and IAA 4-7).
    fn status(&mut self, operation: u8, in_batch: bool) -> End {
        let seen = self.seen[0];
        let code = seen & 0x3f;
        let dsa = self.queue.kind == Kind::Dsa;
        let operands = operands(self.descriptor, self.queue.kind);
        let blocks = self.flags & dsa::BLOCK_ON_FAULT != 0;
        let row = descriptor::operation(self.descriptor, self.queue.kind);
        let batch = dsa && operation == code::BATCH;
        let moves = !operands.is_empty() && !batch;
        let writes = row.is_some_and(|row| row.writes);
        let known = row.is_some() && !(in_batch && matches!(operation, code::BATCH | code::DRAIN));
        let checks = dsa && self.flags & dsa::CHECK_RESULT != 0;
        let checked = matches!(operation, code::COMPARE | code::COMPARE_PATTERN | code::CREATE_DELTA);
        let end = match code {
            status::SUCCESS if known => End::Done,
            status::FALSE_PREDICATE if checks && checked => End::Done,
            // If page requests are off, a descriptor that would wait for one faults nevertheless.
            status::PAGE_FAULT if moves => End::Fault,
            // Only descriptors that block on faults make page requests. IAA 6.2.1 reports all faults by this code.
            status::INVALID_RESPONSE if moves && (blocks || !dsa) => End::Fault,
            status::BATCH_FAIL if batch => End::Done,
            status::BATCH_FAULT if batch => End::Fault,
            status::DELTA_ORDER | status::DELTA_RANGE if dsa && operation == code::APPLY_DELTA => End::Stopped,
            status::ANALYTICS if !dsa && moves => End::Stopped,
            status::OUTPUT_OVERFLOW if !dsa && operation == iaa::code::DECOMPRESS => End::Stopped,
            status::BAD_OPERATION..=0x19 | status::ALIGNMENT | 0x30..=0x35 if dsa || !(0x17..=0x18).contains(&code) => {
                if dsa && code >= 0x30 {
                    End::Impossible
                } else {
                    End::Refused
                }
            }
            // Traffic class; hardware errors; for IAA the time limits of a page request and of the engine.
            0x1e | status::HARDWARE_READ => End::Hardware,
            status::HARDWARE_WRITE if writes => End::Hardware,
            0x22 if moves || batch => End::Hardware,
            0x23 | 0x24 if !dsa => End::Hardware,
            _ => End::Impossible,
        };
        if end == End::Impossible {
            let name = row.map_or("an unknown operation", |row| row.name);
            let text = format!("is {seen:#04x}, which {name} (flags {:#x}) cannot have", self.flags);
            self.wrong(record::STATUS.name, if dsa { "5.8.1" } else { "IAA 4.4.1" }, text);
        }
        end
    }

    fn fault(&mut self, operation: u8) {
        let write = self.seen[0] & status::WRITE != 0;
        let dsa = self.queue.kind == Kind::Dsa;
        // Only later devices report which operand faulted, and that they hide the address (8.2.3).
        let info = if dsa && self.queue.version >= 0x200 { record::FAULT_INFO.get(self.seen) as u8 } else { 0 };
        let named = info >> 1 & 7;
        let all = operands(self.descriptor, self.queue.kind);
        let by_access = |operand: &&Operand| if write { operand.written } else { operand.read };
        let of_access: Vec<&Operand> = all.iter().filter(by_access).collect();
        if of_access.is_empty() {
            let text = format!("is {:#04x}, a {}, which it does not do", self.seen[0], access(write));
            self.wrong(record::STATUS.name, "table 8-10", text);
            return;
        }
        if named != 0 && !of_access.iter().any(|operand| operand.id == named) {
            self.of(&record::FAULT_INFO, "8.2.3", &format!("operand {named}, of which there is no {}", access(write)));
            return;
        }
        let completed = self.completed_at_fault(operation);
        if info & 1 == 1 {
            return;
        }
        let address = record::FAULT_ADDRESS.get(self.seen);
        let possible = of_access.iter().filter(|operand| named == 0 || operand.id == named);
        let reversed = dsa && operation == code::MOVE && self.seen[1] == 1;
        let inside = possible.clone().any(|operand| operand.has_page(address, 0));
        if !inside {
            let text = format!("and no operand of a {} is there", access(write));
            self.of(&record::FAULT_ADDRESS, "8.2.5", &text);
            return;
        }
        // Bytes that count as complete have not faulted.
        let Some(done) = completed else { return };
        let behind = possible.clone().any(|operand| match (operand.counted, reversed) {
            (false, _) => operand.has_page(address, 0),
            (true, false) => operand.has_page(address, done),
            (true, true) => Operand { bytes: operand.bytes - done, ..**operand }.has_page(address, 0),
        });
        if !behind {
            self.of(&record::FAULT_ADDRESS, "8.2.4", &format!("which is among the {done:#x} bytes called complete"));
        }
    }

    /// Returns *Bytes Completed* at a fault, whose unit depends on the operation; `None` if the value is impossible.
    fn completed_at_fault(&mut self, operation: u8) -> Option<u64> {
        let done = record::COMPLETED.get(self.seen);
        let size = dsa::SIZE.get(self.descriptor);
        if self.queue.kind == Kind::Iaa {
            // Bytes written to the output (IAA 6.2.4).
            let room = if operation == iaa::code::CRC64 { 0 } else { iaa::DESTINATION_SIZE.get(self.descriptor) };
            if done > room {
                self.of(&iaa::record::COMPLETED, "IAA 6.2.4", &format!("and the destination has {room:#x} bytes"));
            }
            return None;
        }
        let (limit, unit) = match operation {
            code::APPLY_DELTA => (dsa::DELTA_SIZE.get(self.descriptor), dsa::DELTA as u64),
            code::CREATE_DELTA => (size, 8),
            _ => (size, 1),
        };
        if done >= limit {
            self.of(&record::COMPLETED, "8.2.4", &format!("and a fault ended {limit:#x} before they were all done"));
            return None;
        }
        if !done.is_multiple_of(unit) {
            self.of(&record::COMPLETED, "8.3.8, 8.3.9", &format!("which is no multiple of {unit}"));
        }
        let result = record::RESULT.get(self.seen);
        match operation {
            code::BATCH => return Some(done * dsa::DESCRIPTOR as u64),
            code::MOVE if result > 1 => self.of(&record::RESULT, "8.3.4", "and a direction is 0 or 1"),
            code::COMPARE | code::COMPARE_PATTERN if result != 0 => {
                self.of(&record::RESULT, "8.3.6, 8.3.7", "and a difference is reported in place of a fault");
            }
            code::CREATE_DELTA => {
                let deltas = self.deltas();
                // A difference that was not written is not counted as compared.
                if result > 1 || (result == 1) != (deltas > 0) || deltas > done / 8 * dsa::DELTA as u64 {
                    self.of(&record::RESULT, "8.3.8", &format!("with {deltas} bytes of deltas"));
                }
            }
            _ => {}
        }
        Some(done)
    }

    fn done(&mut self, operation: u8, end: End) {
        let size = dsa::SIZE.get(self.descriptor);
        let done = record::COMPLETED.get(self.seen);
        let result = record::RESULT.get(self.seen) as u8;
        match operation {
            // Table 8-17.
            code::COMPARE | code::COMPARE_PATTERN => {
                match result {
                    0 if done != 0 => self.of(&record::COMPLETED, "8.2.4", "and all was equal"),
                    1 if done >= size => {
                        self.of(&record::COMPLETED, "8.3.6, 8.3.7", &format!("and only {size:#x} bytes were compared"));
                    }
                    0 | 1 => {}
                    _ => self.of(&record::RESULT, "8.3.6, 8.3.7", "and is 0 or 1"),
                }
                let expected = dsa::EXPECTED_RESULT.get(self.descriptor) as u8 & 1;
                self.predicate(result == expected, "table 8-17");
            }
            code::CREATE_DELTA => {
                let deltas = self.deltas();
                let fits = match result {
                    0 => done == 0 && deltas == 0,
                    1 => done == 0 && deltas > 0,
                    2 => done < size && done.is_multiple_of(8) && deltas > 0 && deltas <= done / 8 * dsa::DELTA as u64,
                    _ => false,
                };
                if !fits {
                    self.of(&record::RESULT, "8.3.8", &format!("with {done:#x} bytes compared and {deltas} of deltas"));
                }
                let expected = result < 3 && dsa::EXPECTED_MASK.get(self.descriptor) >> result & 1 == 1;
                self.predicate(expected, "8.3.8");
            }
            code::APPLY_DELTA if end == End::Stopped => {
                let limit = dsa::DELTA_SIZE.get(self.descriptor);
                if done >= limit || !done.is_multiple_of(dsa::DELTA as u64) {
                    self.of(&record::COMPLETED, "8.3.9", &format!("of a delta record of {limit} bytes"));
                }
            }
            // No size, or descriptors in place of bytes.
            code::NOOP | code::DRAIN | code::BATCH => {}
            _ if done != 0 => self.of(&record::COMPLETED, "8.2.4", "and the operation is complete"),
            _ => {}
        }
    }

    /// Returns the bytes of deltas that were written, and checks them.
    fn deltas(&mut self) -> u64 {
        let deltas = record::DELTA_SIZE.get(self.seen);
        let limit = dsa::DELTA_LIMIT.get(self.descriptor);
        let most = dsa::SIZE.get(self.descriptor) / 8 * dsa::DELTA as u64;
        if deltas > limit.min(most) || !deltas.is_multiple_of(dsa::DELTA as u64) {
            let text = format!("and deltas have 10 bytes each, all together {} at most", limit.min(most));
            self.of(&record::DELTA_SIZE, "8.3.8", &text);
        }
        deltas
    }

    fn predicate(&mut self, expected: bool, section: &'static str) {
        let checks = self.flags & dsa::CHECK_RESULT != 0;
        let right = if checks && !expected { status::FALSE_PREDICATE } else { status::SUCCESS };
        if self.seen[0] & 0x3f != right {
            let result = record::RESULT.get(self.seen);
            self.of(&record::STATUS, section, &format!("and with result {result} it is {right:#04x}"));
        }
    }

    /// Checks that a refused descriptor violates the specification, for the reason that the record gives.
    fn refused(&mut self, operation: u8, in_batch: bool) {
        let code = self.seen[0] & 0x3f;
        // Whether a device or queue supports the operation (OPCAP, 5.4) is not known here.
        if code == status::BAD_OPERATION {
            return;
        }
        let reasons = descriptor::check(self.descriptor, self.queue, in_batch);
        let mut flags = reasons.iter().filter(|wrong| wrong.status == code).fold(0, |flags, wrong| flags | wrong.flags);
        let mut reasoned = reasons.iter().any(|wrong| wrong.status == code);
        // Optional capabilities (GENCAP): cache control, destination readback, overlapping copies, batches of one.
        let capabilities = self.flags & (dsa::CACHE_CONTROL_1 | dsa::CACHE_CONTROL_2);
        if code == status::INVALID_FLAGS {
            flags |= capabilities;
            if operation == code::BATCH {
                flags |= self.flags & dsa::BATCH_ERROR;
            }
            reasoned |= flags != 0;
        }
        let size = dsa::SIZE.get(self.descriptor);
        let dsa = self.queue.kind == Kind::Dsa;
        reasoned |= dsa && code == status::BAD_COUNT && operation == code::BATCH && size == 1;
        if dsa && code == status::OVERLAP && operation == code::MOVE {
            let distance = dsa::SOURCE.get(self.descriptor).abs_diff(dsa::DESTINATION.get(self.descriptor));
            reasoned |= distance < size;
        }
        if !reasoned {
            let section = if dsa { "5.4, 5.8.1" } else { "IAA 4.1, 4.4.1" };
            self.of(&record::STATUS, section, "and nothing in the descriptor is a reason for that");
            return;
        }
        if code == status::INVALID_FLAGS {
            let named = record::INVALID_FLAGS.get(self.seen) as u32;
            if named == 0 || named & !flags != 0 {
                let section = if dsa { "8.2.6" } else { "IAA 6.2.6" };
                self.of(&record::INVALID_FLAGS, section, &format!("and {flags:#x} are invalid"));
            }
        }
    }

    /// Checks the fields of IAA 6.2.4, 6.2.7 and 6.2.8.
    fn analytics(&mut self, operation: u8) {
        if matches!(operation, iaa::code::NOOP | iaa::code::DRAIN) {
            return;
        }
        let code = self.seen[0] & 0x3f;
        let done = iaa::record::COMPLETED.get(self.seen);
        let source = iaa::SOURCE1_SIZE.get(self.descriptor);
        if code == status::OUTPUT_OVERFLOW {
            if done > source {
                self.of(&iaa::record::COMPLETED, "IAA 6.2.4", &format!("and source 1 has {source:#x} bytes"));
            }
        } else if done != 0 {
            self.of(&iaa::record::COMPLETED, "IAA 6.2.4", "and the operation was not ended by a fault or overflow");
        }
        if code == status::ANALYTICS {
            // Table 4-8: 0x21 and 0x22 are not used. Only Decompress reads a deflate stream; for it 0x19 is not.
            let error = iaa::record::ERROR.get(self.seen) as u8;
            let stream = matches!(error, 0x01..=0x12 | 0x23 | 0x24);
            let known = matches!(error, 0x01..=0x20 | 0x23..=0x2e);
            let decompress = operation == iaa::code::DECOMPRESS;
            if !known || (stream && !decompress) || (error == iaa::error::UNRECOVERABLE_OVERFLOW && decompress) {
                self.of(&iaa::record::ERROR, "IAA table 4-8", "which this operation does not have");
            }
            return;
        }
        if operation == iaa::code::CRC64 {
            return;
        }
        let output = iaa::record::OUTPUT_SIZE.get(self.seen);
        let room = iaa::DESTINATION_SIZE.get(self.descriptor);
        if output > room {
            self.of(&iaa::record::OUTPUT_SIZE, "IAA 6.2.7", &format!("and the destination has {room:#x} bytes"));
        }
        let flags = iaa::OPERATION_FLAGS.get(self.descriptor) as u16;
        if operation == iaa::code::COMPRESS && code == status::SUCCESS {
            let statistics = flags & compression::STATISTICS != 0;
            let ends = flags & compression::FLUSH != 0 && flags & compression::END != 0;
            if statistics && output != 4 * iaa::STATISTICS_WORDS as u64 {
                self.of(&iaa::record::OUTPUT_SIZE, "IAA 3.4.1", "and statistics have 1272 bytes");
            } else if !statistics && ends && output == 0 {
                self.of(&iaa::record::OUTPUT_SIZE, "IAA table 6-11", "and an end of block was written");
            }
        }
        let bits = iaa::record::OUTPUT_BITS.get(self.seen);
        if bits > 7 || (bits > 0 && output == 0) {
            self.of(&iaa::record::OUTPUT_BITS, "IAA 6.2.8", &format!("of the last of {output} bytes"));
        }
    }
}

fn access(write: bool) -> &'static str {
    if write { "write" } else { "read" }
}
