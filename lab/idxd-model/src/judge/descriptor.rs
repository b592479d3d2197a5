//! Checks whether a queue may receive a descriptor. Returns all violations, each with the status with which a device
//! may refuse the descriptor.

use super::Queue;
use super::Violation;
use crate::config::Kind;
use crate::table::dsa::{self, code};
use crate::table::iaa::{self, compress_aecs, compression, crc64, decompression};
use crate::table::{Field, Operation, status};

/// Returns the table's row of the descriptor's operation.
pub(super) fn operation(descriptor: &[u8; 64], kind: Kind) -> Option<&'static Operation> {
    let code = dsa::OPERATION.get(descriptor) as u8;
    if kind == Kind::Dsa { dsa::operation(code) } else { iaa::operation(code) }
}

pub(super) fn check(descriptor: &[u8; 64], queue: &Queue, in_batch: bool) -> Vec<Violation> {
    let mut check = Check { descriptor, queue, flags: dsa::FLAGS.get(descriptor) as u32, violations: Vec::new() };
    check.all(in_batch);
    check.violations
}

/// A buffer's name, address and length in bytes.
type Buffer = (&'static str, u64, u64);

struct Check<'a> {
    descriptor: &'a [u8; 64],
    queue: &'a Queue,
    flags: u32,
    violations: Vec<Violation>,
}

impl Check<'_> {
    fn wrong(&mut self, status: u8, field: &'static str, section: &'static str, text: String) {
        self.violations.push(Violation { status, flags: 0, field, text, section });
    }

    fn of(&mut self, status: u8, field: &Field, why: &str) {
        let text = format!("is {:#x}, {why}", field.get(self.descriptor));
        self.wrong(status, field.name, field.section, text);
    }

    fn flag(&mut self, bits: u32, section: &'static str, why: &str) {
        for bit in (0..24).filter(|bit| bits >> bit & 1 == 1) {
            let name = dsa::ALL_FLAGS.iter().find(|flag| flag.mask == 1 << bit && bit < 16);
            let name = name.map_or_else(|| format!("bit {bit}"), |flag| format!("bit {bit}, {}", flag.name));
            let text = format!("has {name}, as {}: {why}", u8::from(self.flags >> bit & 1 == 1));
            let wrong = Violation { status: status::INVALID_FLAGS, flags: 1 << bit, field: "Flags", text, section };
            self.violations.push(wrong);
        }
    }

    fn all(&mut self, in_batch: bool) {
        if dsa::TRUSTED.get(self.descriptor) != 0 {
            self.of(0, &dsa::TRUSTED, "and software leaves that to the processor");
        }
        let dsa = self.queue.kind == Kind::Dsa;
        let (align, section) = if dsa { (dsa::record::BYTES, "8.1.4") } else { (iaa::record::BYTES, "IAA 6.1.4") };
        let record = dsa::RECORD.get(self.descriptor);
        if self.flags & dsa::RECORD_VALID != 0 && !record.is_multiple_of(align as u64) {
            let text = format!("is {record:#x}, which is not aligned to {align}");
            self.wrong(status::RECORD_ALIGNMENT, dsa::RECORD.name, section, text);
        }
        if self.flags & dsa::RECORD_VALID == 0 && record != 0 {
            self.of(status::RESERVED, &dsa::RECORD, "and said not to be valid");
        }
        if self.flags & dsa::REQUEST_INTERRUPT == 0 && dsa::INTERRUPT.get(self.descriptor) != 0 {
            self.of(status::RESERVED, &dsa::INTERRUPT, "and no interrupt is asked for");
        }
        let Some(row) = operation(self.descriptor, self.queue.kind) else {
            self.of(status::BAD_OPERATION, &dsa::OPERATION, "which is none");
            return;
        };
        if in_batch && matches!(row.code, code::BATCH | code::DRAIN) {
            self.of(status::BAD_OPERATION, &dsa::OPERATION, "which may not be in a batch");
        }
        self.reserved(row);
        if dsa {
            self.dsa_flags(row, in_batch);
            self.dsa_sizes(row);
            self.dsa_buffers(row);
        } else {
            self.iaa_flags(row);
            self.iaa_sizes(row);
        }
    }

    fn reserved(&mut self, row: &Operation) {
        for &(first, last) in row.reserved {
            let bytes = &self.descriptor[first..=last];
            if let Some(at) = bytes.iter().position(|&byte| byte != 0) {
                let text = format!("has {:#04x} at byte {} of {}", bytes[at], first + at, row.name);
                self.wrong(status::RESERVED, "reserved field", row.section, text);
            }
        }
    }

    /// Checks the flags (tables 5-3, 5-4 and 5-5).
    fn dsa_flags(&mut self, row: &Operation, in_batch: bool) {
        let flags = self.flags;
        let mut allowed = dsa::ANY | row.flags;
        if row.code == code::BATCH && self.queue.version >= 0x200 {
            allowed |= dsa::BATCH_ERROR;
        }
        self.flag(flags & !allowed, "table 5-3", &format!("reserved in {}", row.name));
        if !in_batch {
            self.flag(flags & dsa::FENCE, "table 5-4", "only members of batches may have it");
        }
        if !self.queue.block_on_fault {
            self.flag(flags & row.flags & dsa::BLOCK_ON_FAULT, "table 5-4", "the queue does not block on faults");
        }
        self.flag(flags & dsa::REQUEST_INTERRUPT, "table 5-4", "a process has no interrupts");
        if flags & dsa::RECORD_VALID == 0 {
            let bits = flags & (dsa::REQUEST_RECORD | dsa::RECORD_CLASS);
            self.flag(bits, "table 5-4", "there is no valid record address");
        }
        if matches!(row.code, code::CRC | code::COPY_CRC) && flags & dsa::READ_SEED == 0 {
            self.flag(flags & dsa::ADDRESS_3_CLASS & row.flags, "table 5-4", "there is no third address");
        }
        let drain = if row.code == code::DRAIN { dsa::REQUEST_RECORD } else { 0 };
        self.flag((row.required | drain) & !flags, "table 5-5", &format!("required for {}", row.name));
    }

    fn dsa_sizes(&mut self, row: &Operation) {
        let size = dsa::SIZE.get(self.descriptor);
        if row.sized && (size == 0 || size > self.queue.max_transfer) {
            let text = format!("is {size}, and 1 to {} are permitted", self.queue.max_transfer);
            self.wrong(status::BAD_SIZE, dsa::SIZE.name, "5.4", text);
        }
        match row.code {
            // Batches of one are for devices with GENCAP Batch1. A trace does not contain it; only later versions have
            // it.
            code::BATCH => {
                let least = if self.queue.version > 0x1ff { 1 } else { 2 };
                if size < least || size > self.queue.max_batch {
                    let text = format!("is {size}, and {least} to {} are permitted", self.queue.max_batch);
                    self.wrong(status::BAD_COUNT, "Descriptor Count", "8.3.2", text);
                }
                let list = dsa::SOURCE.get(self.descriptor);
                if !list.is_multiple_of(dsa::DESCRIPTOR as u64) {
                    let text = format!("is {list:#x}, which is not aligned to 64");
                    self.wrong(status::LIST_ALIGNMENT, "Descriptor List Address", "8.3.2", text);
                }
            }
            code::CREATE_DELTA | code::APPLY_DELTA => self.delta_sizes(row.code == code::CREATE_DELTA, size),
            _ => {}
        }
    }

    fn delta_sizes(&mut self, create: bool, size: u64) {
        if size > dsa::DELTA_TRANSFER {
            let text = format!("is {size}, and an offset of 16 bits reaches {}", dsa::DELTA_TRANSFER);
            self.wrong(status::BAD_SIZE, dsa::SIZE.name, "8.3.8", text);
        }
        let (field, least) =
            if create { (&dsa::DELTA_LIMIT, dsa::MIN_DELTA_LIMIT) } else { (&dsa::DELTA_SIZE, dsa::DELTA as u64) };
        let bytes = field.get(self.descriptor);
        if bytes < least || bytes > self.queue.max_transfer {
            let text = format!("is {bytes}, and {least} to {} are permitted", self.queue.max_transfer);
            self.wrong(status::BAD_VALUE, field.name, field.section, text);
        }
        let section = if create { "8.3.8" } else { "8.3.9" };
        let fields = [(&dsa::SOURCE, create), (&dsa::DESTINATION, true), (&dsa::SIZE, true)];
        for field in fields.into_iter().filter_map(|(field, aligned)| aligned.then_some(field)) {
            let value = field.get(self.descriptor);
            if !value.is_multiple_of(8) {
                let text = format!("is {value:#x}, which is no multiple of 8");
                self.wrong(status::ALIGNMENT, field.name, section, text);
            }
        }
    }

    fn dsa_buffers(&mut self, row: &Operation) {
        let (source, destination) = (dsa::SOURCE.get(self.descriptor), dsa::DESTINATION.get(self.descriptor));
        let size = dsa::SIZE.get(self.descriptor);
        let source = ("source", source, size);
        let target = ("destination", destination, size);
        let pairs = match row.code {
            code::COPY_CRC => vec![(source, target)],
            code::DUALCAST => {
                let second = dsa::DESTINATION2.get(self.descriptor);
                if (destination ^ second) & 0xfff != 0 {
                    let why = format!("and destination 1 is {destination:#x}: they differ in bits 11:0");
                    self.of(status::DUALCAST, &dsa::DESTINATION2, &why);
                }
                let second = ("destination 2", second, size);
                vec![(source, target), (source, second), (target, second)]
            }
            code::CREATE_DELTA => {
                let limit = dsa::DELTA_LIMIT.get(self.descriptor);
                let record = ("delta record", dsa::DELTA_RECORD.get(self.descriptor), limit);
                vec![(record, source), (record, ("source 2", destination, size))]
            }
            code::APPLY_DELTA => {
                vec![(("delta record", source.1, dsa::DELTA_SIZE.get(self.descriptor)), target)]
            }
            _ => Vec::new(),
        };
        self.apart(&pairs, row.section);
        let crc = matches!(row.code, code::CRC | code::COPY_CRC);
        if !crc {
            return;
        }
        let seeded = self.flags & dsa::READ_SEED != 0;
        let unused = if seeded { &dsa::CRC_SEED } else { &dsa::CRC_SEED_ADDRESS };
        if unused.get(self.descriptor) != 0 {
            self.of(status::RESERVED, unused, "and reserved by the flag Read CRC Seed");
        }
        if seeded && !dsa::CRC_SEED_ADDRESS.get(self.descriptor).is_multiple_of(4) {
            self.of(status::ALIGNMENT, &dsa::CRC_SEED_ADDRESS, "which is not aligned to 4");
        }
    }

    fn apart(&mut self, pairs: &[(Buffer, Buffer)], section: &'static str) {
        for (one, two) in pairs {
            let end = |of: &Buffer| u128::from(of.1) + u128::from(of.2);
            if one.2 > 0 && two.2 > 0 && u128::from(one.1) < end(two) && u128::from(two.1) < end(one) {
                let text = format!("{:#x} + {:#x} and {} {:#x} + {:#x} overlap", one.1, one.2, two.0, two.1, two.2);
                self.wrong(status::OVERLAP, "Buffers", section, format!("{} {text}", one.0));
            }
        }
    }

    /// Checks the flags (IAA 6.1.3 and table 4-1; tables 6-8, 6-11 and 6-13).
    fn iaa_flags(&mut self, row: &Operation) {
        let flags = self.flags;
        let extra = iaa::OPERATION_FLAGS.get(self.descriptor) as u16;
        let statistics = row.code == iaa::code::COMPRESS && extra & compression::STATISTICS != 0;
        let (reads, writes) = (flags & iaa::READ_SOURCE2, flags & iaa::WRITE_SOURCE2);
        self.flag(flags & !(iaa::ANY | row.flags), "IAA table 4-1", &format!("reserved in {}", row.name));
        if !self.queue.block_on_fault {
            let bits = flags & row.flags & dsa::BLOCK_ON_FAULT;
            self.flag(bits, "IAA 6.1.3", "the queue does not block on faults");
        }
        self.flag(flags & dsa::REQUEST_INTERRUPT, "IAA 6.1.3", "a process has no interrupts");
        if flags & dsa::RECORD_VALID == 0 {
            let bits = flags & (dsa::REQUEST_RECORD | dsa::RECORD_CLASS);
            self.flag(bits, "IAA 6.1.3", "there is no valid record address");
        }
        let data = row.flags & iaa::READ_SOURCE2 != 0;
        if data && reads != 0 && (reads != iaa::READ_AECS || statistics) {
            self.flag(reads, "IAA 6.1.3", "Source 2 can only be read as AECS, and not for statistics");
        }
        let overflow = row.code == iaa::code::COMPRESS && writes == iaa::WRITE_ON_OVERFLOW;
        if data && writes != 0 && (writes == iaa::WRITE_SOURCE2 || statistics || overflow) {
            self.flag(writes, "IAA 6.1.3", "the AECS is not written like that");
        }
        if data && reads == 0 && writes == 0 {
            let bits = flags & (iaa::TOGGLE | dsa::ADDRESS_3_CLASS);
            self.flag(bits, "IAA 6.1.3", "there is no Source 2");
        }
        let state = if row.code == iaa::code::COMPRESS && !statistics { iaa::READ_AECS } else { 0 };
        self.flag((row.required | state) & !flags, "IAA 6.1.3", &format!("required for {}", row.name));
        let (known, required) = match row.code {
            iaa::code::DECOMPRESS => (decompression::KNOWN, decompression::ENABLE),
            iaa::code::COMPRESS => (compression::KNOWN, 0),
            iaa::code::CRC64 => (crc64::KNOWN, 0),
            _ => (u16::MAX, 0),
        };
        if extra & !known | required & !extra != 0 {
            self.of(status::IAA_COMPRESSION_FLAGS, &iaa::OPERATION_FLAGS, "with a flag reserved or missing");
        }
        if row.code == iaa::code::COMPRESS && iaa::COMPRESSION_FLAGS_2.get(self.descriptor) != 0 {
            let why = "which only later generations have";
            self.of(status::IAA_COMPRESSION_FLAGS + 1, &iaa::COMPRESSION_FLAGS_2, why);
        }
    }

    fn iaa_sizes(&mut self, row: &Operation) {
        if matches!(row.code, iaa::code::NOOP | iaa::code::DRAIN) {
            return;
        }
        let most = self.queue.max_transfer;
        let source = (iaa::SOURCE1.get(self.descriptor), iaa::SOURCE1_SIZE.get(self.descriptor));
        if source.1 > most || (row.sized && source.1 == 0) {
            self.of(status::BAD_SIZE, &iaa::SOURCE1_SIZE, &format!("and up to {most:#x} are permitted"));
        }
        if row.code == iaa::code::CRC64 {
            return;
        }
        let target = (iaa::DESTINATION.get(self.descriptor), iaa::DESTINATION_SIZE.get(self.descriptor));
        if target.1 > most || (source.1 == 0 && target.1 == 0) {
            self.of(status::BAD_SIZE, &iaa::DESTINATION_SIZE, &format!("and up to {most:#x} are permitted"));
        }
        let state = (iaa::SOURCE2.get(self.descriptor), iaa::SOURCE2_SIZE.get(self.descriptor));
        let mut pairs = vec![(("source 1", source.0, source.1), ("destination", target.0, target.1))];
        if self.flags & (iaa::READ_SOURCE2 | iaa::WRITE_SOURCE2) == 0 {
            for field in [&iaa::SOURCE2, &iaa::SOURCE2_SIZE] {
                if field.get(self.descriptor) != 0 {
                    self.of(status::RESERVED, field, "and Source 2 is not used");
                }
            }
        } else {
            if !state.0.is_multiple_of(32) {
                self.of(status::ALIGNMENT, &iaa::SOURCE2, "which is not aligned to 32");
            }
            if !state.1.is_multiple_of(32) {
                self.of(status::ALIGNMENT, &iaa::SOURCE2_SIZE, "which is no multiple of 32");
            }
            let compress = row.code == iaa::code::COMPRESS && state.1 != compress_aecs::BYTES as u64;
            if state.1 == 0 || state.1 > (64 << 10).min(most) || compress {
                self.of(status::BAD_SIZE, &iaa::SOURCE2_SIZE, "which no AECS has");
            }
            let state = ("AECS", state.0, 2 * state.1);
            pairs.push((("source 1", source.0, source.1), state));
            pairs.push((("destination", target.0, target.1), state));
        }
        self.apart(&pairs, "IAA 6.1.6, 6.1.9");
    }
}
