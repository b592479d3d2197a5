//! The memory that a descriptor makes a device read and write. A fault address must be in one of these buffers.

use crate::config::Kind;
use crate::table::dsa::{self, code};
use crate::table::iaa;

/// One buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    /// The number in table 8-13.
    pub(super) id: u8,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) read: bool,
    pub(super) written: bool,
    /// Whether *Bytes Completed* counts from the start of this operand.
    pub(super) counted: bool,
}

impl Operand {
    fn read(id: u8, address: u64, bytes: u64) -> Operand {
        Operand { id, address, bytes, read: true, written: false, counted: true }
    }

    fn written(id: u8, address: u64, bytes: u64) -> Operand {
        Operand { id, address, bytes, read: false, written: true, counted: true }
    }

    fn apart(self) -> Operand {
        Operand { counted: false, ..self }
    }

    /// Returns whether the page of `address` contains a byte of this operand at or behind `from`. Bits 11:0 may be
    /// reported as 0 (8.2.5).
    pub(super) fn has_page(&self, address: u64, from: u64) -> bool {
        let page = u128::from(address & !0xfff);
        let (start, end) =
            (u128::from(self.address) + u128::from(from), u128::from(self.address) + u128::from(self.bytes));
        // Addresses wrap at the end of the address space.
        let meets = |page: u128| start < page + 0x1000 && page < end;
        self.bytes > 0 && (meets(page) || meets(page + (1 << 64)))
    }
}

/// Returns all operands of a descriptor.
pub(super) fn operands(descriptor: &[u8; 64], kind: Kind) -> Vec<Operand> {
    let operation = dsa::OPERATION.get(descriptor) as u8;
    if kind == Kind::Iaa {
        return analytics(descriptor, operation);
    }
    let flags = dsa::FLAGS.get(descriptor) as u32;
    let size = dsa::SIZE.get(descriptor);
    let (first, second) = (dsa::SOURCE.get(descriptor), dsa::DESTINATION.get(descriptor));
    let mut operands = match operation {
        code::BATCH => vec![Operand::read(1, first, size * dsa::DESCRIPTOR as u64)],
        code::MOVE => vec![Operand::read(1, first, size), Operand::written(3, second, size)],
        code::FILL => vec![Operand::written(3, second, size)],
        code::COMPARE => vec![Operand::read(1, first, size), Operand::read(2, second, size)],
        code::COMPARE_PATTERN => vec![Operand::read(1, first, size)],
        code::CREATE_DELTA => {
            let (record, limit) = (dsa::DELTA_RECORD.get(descriptor), dsa::DELTA_LIMIT.get(descriptor));
            let record = Operand::written(3, record, limit).apart();
            vec![Operand::read(1, first, size), Operand::read(2, second, size), record]
        }
        code::APPLY_DELTA => {
            let record = Operand::read(1, first, dsa::DELTA_SIZE.get(descriptor));
            vec![record, Operand::written(3, second, size).apart()]
        }
        code::DUALCAST => {
            let third = Operand::written(4, dsa::DESTINATION2.get(descriptor), size);
            vec![Operand::read(1, first, size), Operand::written(3, second, size), third]
        }
        code::CRC => vec![Operand::read(1, first, size)],
        code::COPY_CRC => vec![Operand::read(1, first, size), Operand::written(3, second, size)],
        code::CACHE_FLUSH => vec![Operand { read: true, ..Operand::written(3, second, size) }],
        _ => Vec::new(),
    };
    if matches!(operation, code::CRC | code::COPY_CRC) && flags & dsa::READ_SEED != 0 {
        operands.push(Operand::read(2, dsa::CRC_SEED_ADDRESS.get(descriptor), 4).apart());
    }
    if flags & dsa::CACHE_CONTROL_2 != 0 {
        // The destination is read back.
        operands.iter_mut().for_each(|operand| operand.read |= operand.written);
    }
    operands
}

fn analytics(descriptor: &[u8; 64], operation: u8) -> Vec<Operand> {
    if !matches!(operation, iaa::code::COMPRESS | iaa::code::DECOMPRESS | iaa::code::CRC64) {
        return Vec::new();
    }
    let flags = dsa::FLAGS.get(descriptor) as u32;
    let source = Operand::read(0, iaa::SOURCE1.get(descriptor), iaa::SOURCE1_SIZE.get(descriptor));
    let mut operands = vec![source];
    if operation != iaa::code::CRC64 {
        let room = iaa::DESTINATION_SIZE.get(descriptor);
        let destination = Operand::written(0, iaa::DESTINATION.get(descriptor), room);
        operands.push(Operand { read: flags & dsa::CACHE_CONTROL_2 != 0, ..destination });
    }
    let (reads, writes) = (flags & iaa::READ_SOURCE2 != 0, flags & iaa::WRITE_SOURCE2 != 0);
    if operation != iaa::code::CRC64 && (reads || writes) {
        // Twice its size: one half is read, the other written (IAA 3.2).
        let state = Operand::read(0, iaa::SOURCE2.get(descriptor), 2 * iaa::SOURCE2_SIZE.get(descriptor));
        operands.push(Operand { read: reads, written: writes, ..state });
    }
    operands.into_iter().map(Operand::apart).collect()
}
