//! The bits and codes of the descriptor's first eight bytes, by name. Source: DSA specification tables 8-2, 8-3, 8-4, 8-14.

/// Operation codes (byte 7) that this crate builds descriptors for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Operation {
    /// Only completes.
    Noop = 0x00,
    /// Runs an array of descriptors.
    Batch = 0x01,
    /// Completes when everything submitted before it to the same queue has completed.
    Drain = 0x02,
    /// Copies, also between overlapping buffers if the device supports that.
    Memmove = 0x03,
    /// Compares two buffers.
    Compare = 0x05,
    /// Compares a buffer with an 8-byte pattern.
    ComparePattern = 0x06,
    /// Writes the differences between two buffers.
    CreateDelta = 0x07,
    /// Applies the output of *create delta*.
    ApplyDelta = 0x08,
    /// CRC-32C of a buffer.
    Crc = 0x10,
    /// Copies, and computes the CRC-32C of the copied bytes.
    CopyCrc = 0x11,
}

impl Operation {
    /// All operations, by code.
    pub const ALL: [Operation; 10] = [
        Operation::Noop,
        Operation::Batch,
        Operation::Drain,
        Operation::Memmove,
        Operation::Compare,
        Operation::ComparePattern,
        Operation::CreateDelta,
        Operation::ApplyDelta,
        Operation::Crc,
        Operation::CopyCrc,
    ];

    /// Returns the operation of a code, if it is one of this crate's.
    pub fn from_code(code: u8) -> Option<Operation> {
        Operation::ALL.into_iter().find(|operation| *operation as u8 == code)
    }

    /// Returns whether it may have cache control flags: only operations that write to memory may (table 5-3).
    pub const fn allows_cache_control(self) -> bool {
        matches!(self, Operation::Memmove | Operation::CreateDelta | Operation::ApplyDelta | Operation::CopyCrc)
    }

    /// Returns whether it may block on a page fault: never no-op, batch and drain (table 8-3).
    pub const fn allows_block_on_fault(self) -> bool {
        !matches!(self, Operation::Noop | Operation::Batch | Operation::Drain)
    }

    /// Returns whether it may be in a batch: batch and drain may not (section 8.3.2, 8.3.3).
    pub const fn allowed_in_batch(self) -> bool {
        !matches!(self, Operation::Batch | Operation::Drain)
    }
}

/// Flags, bits 23:0 of bytes 4 to 6.
pub mod flag {
    /// Wait for all earlier descriptors of the batch; legal only inside a batch.
    pub const FENCE: u32 = 1 << 0;
    /// Wait for page faults to be resolved instead of completing in part.
    pub const BLOCK_ON_FAULT: u32 = 1 << 1;
    /// The completion record address is valid.
    pub const RECORD_ADDRESS_VALID: u32 = 1 << 2;
    /// Write the completion record in any case, not only on failure.
    pub const REQUEST_RECORD: u32 = 1 << 3;
    /// Interrupt on completion; reserved to the kernel's own descriptors unless user interrupts are enabled.
    pub const REQUEST_INTERRUPT: u32 = 1 << 4;
    /// Cache control 3: durable memory or memory with readback, see table 8-4.
    pub const CACHE_CONTROL_3: u32 = 1 << 5;
    /// The result decides between success and false predicate.
    pub const CHECK_RESULT: u32 = 1 << 7;
    /// Cache control 1: write to the cache instead of memory.
    pub const CACHE_CONTROL_1: u32 = 1 << 8;
    /// Traffic class B for address 1. This crate leaves it 0: ordering of record and data needs one class for both.
    pub const ADDRESS_1_TC_B: u32 = 1 << 9;
    /// Traffic class B for address 2; see [`ADDRESS_1_TC_B`].
    pub const ADDRESS_2_TC_B: u32 = 1 << 10;
    /// Traffic class B for address 3; see [`ADDRESS_1_TC_B`].
    pub const ADDRESS_3_TC_B: u32 = 1 << 11;
    /// Traffic class B for the completion record; see [`ADDRESS_1_TC_B`].
    pub const RECORD_TC_B: u32 = 1 << 12;
    /// All writes become visible in order.
    pub const STRICT_ORDERING: u32 = 1 << 13;
    /// Cache control 2: destination readback.
    pub const CACHE_CONTROL_2: u32 = 1 << 14;
    /// Batch only: members of the part already run had failed (bit 16 is operation-specific, table 8-14).
    pub const BATCH_ERROR: u32 = 1 << 16;
}
