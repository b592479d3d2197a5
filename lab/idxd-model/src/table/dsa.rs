//! DSA: descriptors (chapter 8.1 and 8.3), flags (tables 8-3, 5-3 and 5-5), completion records (chapter 8.2).

use super::{Field, Flag, Operation, fields};

fields! {
    /// Trusted fields: PASID, reserved bits and privilege.
    TRUSTED = "PASID and Priv", 0, 4, "8.1.1";
    /// Flags.
    FLAGS = "Flags", 4, 3, "8.1.3";
    /// Operation.
    OPERATION = "Operation", 7, 1, "8.1.2";
    /// Completion record address.
    RECORD = "Completion Record Address", 8, 8, "8.1.4";
    /// Source, source 1, pattern lower, descriptor list, delta record of *Apply*.
    SOURCE = "Source Address", 16, 8, "8.1.5";
    /// Destination, destination 1, source 2, pattern of *Compare Pattern*.
    DESTINATION = "Destination Address", 24, 8, "8.1.6";
    /// Transfer size, or descriptor count.
    SIZE = "Transfer Size", 32, 4, "8.1.7";
    /// Completion interrupt handle.
    INTERRUPT = "Completion Interrupt Handle", 36, 2, "8.1.8";
    /// Upper half of a 16-byte fill pattern.
    PATTERN_UPPER = "Pattern Upper", 40, 8, "8.3.5";
    /// Of *Compare* and *Compare Pattern*; bit 0.
    EXPECTED_RESULT = "Expected Result", 40, 1, "8.3.6";
    /// Of *Create Delta Record*.
    DELTA_RECORD = "Delta Record Address", 40, 8, "8.3.8";
    /// Of *Create Delta Record*.
    DELTA_LIMIT = "Maximum Delta Record Size", 48, 4, "8.3.8";
    /// Of *Create Delta Record*.
    EXPECTED_MASK = "Expected Result Mask", 56, 1, "8.3.8";
    /// Of *Apply Delta Record*.
    DELTA_SIZE = "Delta Record Size", 40, 4, "8.3.9";
    /// Of *Memory Copy with Dualcast*.
    DESTINATION2 = "Destination2 Address", 40, 8, "8.3.10";
    /// Of the CRC operations.
    CRC_SEED = "CRC Seed", 40, 4, "8.3.12";
    /// Of the CRC operations.
    CRC_SEED_ADDRESS = "CRC Seed Address", 48, 8, "8.3.12";
}

/// The completion record.
pub mod record {
    use super::{Field, fields};

    /// The record's size and alignment in bytes.
    pub const BYTES: usize = 32;

    fields! {
        /// Status.
        STATUS = "Status", 0, 1, "8.2.1";
        /// Result.
        RESULT = "Result", 1, 1, "8.2.2";
        /// Fault info, of version 2.
        FAULT_INFO = "Fault Info", 2, 1, "8.2.3";
        /// Bytes completed; of a batch, descriptors completed.
        COMPLETED = "Bytes Completed", 4, 4, "8.2.4";
        /// Fault address.
        FAULT_ADDRESS = "Fault Address", 8, 8, "8.2.5";
        /// Invalid flags.
        INVALID_FLAGS = "Invalid Flags", 16, 3, "8.2.6";
        /// Of *Create Delta Record*.
        DELTA_SIZE = "Delta Record Size", 16, 4, "8.3.8";
        /// Of the CRC operations.
        CRC = "CRC Value", 16, 4, "8.3.12";
    }
}

macro_rules! flags {
    ($($(#[$doc:meta])* $constant:ident = $name:literal, $bit:literal, $section:literal;)*) => {
        $($(#[$doc])* pub const $constant: u32 = 1 << $bit;)*
        /// All rows.
        pub const ALL_FLAGS: &[Flag] = &[$(Flag { name: $name, mask: 1 << $bit, section: $section }),*];
    };
}

flags! {
    /// Waits for those before it in the batch.
    FENCE = "Fence", 0, "8.1.3";
    /// Waits for page faults to be resolved.
    BLOCK_ON_FAULT = "Block On Fault", 1, "8.1.3";
    /// The record's address is valid.
    RECORD_VALID = "Completion Record Address Valid", 2, "8.1.3";
    /// A record in any case.
    REQUEST_RECORD = "Request Completion Record", 3, "8.1.3";
    /// An interrupt.
    REQUEST_INTERRUPT = "Request Completion Interrupt", 4, "8.1.3";
    /// Cache hint.
    CACHE_CONTROL_3 = "Cache Control 3", 5, "8.1.3";
    /// The status depends on the result.
    CHECK_RESULT = "Check Result", 7, "8.1.3";
    /// Cache hint.
    CACHE_CONTROL_1 = "Cache Control 1", 8, "8.1.3";
    /// Traffic class.
    ADDRESS_1_CLASS = "Address 1 TC Selector", 9, "8.1.3";
    /// Traffic class.
    ADDRESS_2_CLASS = "Address 2 TC Selector", 10, "8.1.3";
    /// Traffic class.
    ADDRESS_3_CLASS = "Address 3 TC Selector", 11, "8.1.3";
    /// Traffic class.
    RECORD_CLASS = "Completion Record TC Selector", 12, "8.1.3";
    /// Writes in order.
    STRICT_ORDERING = "Strict Ordering", 13, "8.1.3";
    /// Cache hint: destination readback.
    CACHE_CONTROL_2 = "Cache Control 2", 14, "8.1.3";
    /// For a continued batch: an earlier part had an error.
    BATCH_ERROR = "Batch Error", 16, "8.3.2";
    /// For *CRC*: the seed is in memory.
    READ_SEED = "Read CRC Seed", 16, "8.3.12";
    /// For *CRC*: seed and result are used unchanged.
    BYPASS_INVERSION = "Bypass CRC Inversion and Reflection", 17, "8.3.12";
    /// For *CRC*: bit 7 first.
    BYPASS_REFLECTION = "Bypass Data Reflection", 18, "8.3.12";
}

/// Flags that any operation may have (table 5-3: flags not listed are allowed for all). The conditions of table 5-4
/// apply in addition.
pub const ANY: u32 = FENCE | RECORD_VALID | REQUEST_RECORD | REQUEST_INTERRUPT | RECORD_CLASS;

const CACHE: u32 = CACHE_CONTROL_1 | CACHE_CONTROL_2;
const RECORD_REQUIRED: u32 = RECORD_VALID | REQUEST_RECORD;
const CRC_FLAGS: u32 = READ_SEED | BYPASS_INVERSION | BYPASS_REFLECTION;

/// Operation codes.
pub mod code {
    /// No-op.
    pub const NOOP: u8 = 0x00;
    /// Batch.
    pub const BATCH: u8 = 0x01;
    /// Drain.
    pub const DRAIN: u8 = 0x02;
    /// Memory Move.
    pub const MOVE: u8 = 0x03;
    /// Fill.
    pub const FILL: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Compare Pattern.
    pub const COMPARE_PATTERN: u8 = 0x06;
    /// Create Delta Record.
    pub const CREATE_DELTA: u8 = 0x07;
    /// Apply Delta Record.
    pub const APPLY_DELTA: u8 = 0x08;
    /// Memory Copy with Dualcast.
    pub const DUALCAST: u8 = 0x09;
    /// CRC Generation.
    pub const CRC: u8 = 0x10;
    /// Copy with CRC Generation.
    pub const COPY_CRC: u8 = 0x11;
    /// Cache flush.
    pub const CACHE_FLUSH: u8 = 0x20;
}

/// The operations of a device of version 1.0 (tables 8-2, 5-3, 5-5). The DIF operations and those of later versions are
/// not modelled: they are unsupported operation codes, as the specification permits (OPCAP).
pub const OPERATIONS: &[Operation] = &[
    Operation {
        code: code::NOOP,
        name: "No-op",
        section: "8.3.1",
        flags: 0,
        required: 0,
        reserved: &[(16, 35), (38, 63)],
        writes: false,
        sized: false,
    },
    Operation {
        code: code::BATCH,
        name: "Batch",
        section: "8.3.2",
        flags: ADDRESS_1_CLASS,
        required: 0,
        reserved: &[(24, 31), (38, 63)],
        writes: false,
        sized: false,
    },
    Operation {
        code: code::DRAIN,
        name: "Drain",
        section: "8.3.3",
        flags: 0,
        required: 0,
        reserved: &[(16, 35), (38, 63)],
        writes: false,
        sized: false,
    },
    Operation {
        code: code::MOVE,
        name: "Memory Move",
        section: "8.3.4",
        flags: BLOCK_ON_FAULT | CACHE | STRICT_ORDERING | ADDRESS_1_CLASS | ADDRESS_2_CLASS,
        required: 0,
        reserved: &[(38, 63)],
        writes: true,
        sized: true,
    },
    Operation {
        code: code::FILL,
        name: "Fill",
        section: "8.3.5",
        flags: BLOCK_ON_FAULT | CACHE | STRICT_ORDERING | ADDRESS_2_CLASS,
        required: 0,
        reserved: &[(38, 63)],
        writes: true,
        sized: true,
    },
    Operation {
        code: code::COMPARE,
        name: "Compare",
        section: "8.3.6",
        flags: BLOCK_ON_FAULT | CHECK_RESULT | ADDRESS_1_CLASS | ADDRESS_2_CLASS,
        required: RECORD_REQUIRED,
        reserved: &[(38, 39), (41, 63)],
        writes: false,
        sized: true,
    },
    Operation {
        code: code::COMPARE_PATTERN,
        name: "Compare Pattern",
        section: "8.3.7",
        flags: BLOCK_ON_FAULT | CHECK_RESULT | ADDRESS_1_CLASS,
        required: RECORD_REQUIRED,
        reserved: &[(38, 39), (41, 63)],
        writes: false,
        sized: true,
    },
    Operation {
        code: code::CREATE_DELTA,
        name: "Create Delta Record",
        section: "8.3.8",
        flags: BLOCK_ON_FAULT
            | CHECK_RESULT
            | CACHE
            | STRICT_ORDERING
            | ADDRESS_1_CLASS
            | ADDRESS_2_CLASS
            | ADDRESS_3_CLASS,
        required: RECORD_REQUIRED,
        reserved: &[(38, 39), (52, 55), (57, 63)],
        writes: true,
        sized: true,
    },
    Operation {
        code: code::APPLY_DELTA,
        name: "Apply Delta Record",
        section: "8.3.9",
        flags: BLOCK_ON_FAULT | CACHE | STRICT_ORDERING | ADDRESS_1_CLASS | ADDRESS_2_CLASS,
        required: 0,
        reserved: &[(38, 39), (44, 63)],
        writes: true,
        sized: true,
    },
    Operation {
        code: code::DUALCAST,
        name: "Memory Copy with Dualcast",
        section: "8.3.10",
        flags: BLOCK_ON_FAULT | CACHE | STRICT_ORDERING | ADDRESS_1_CLASS | ADDRESS_2_CLASS | ADDRESS_3_CLASS,
        required: 0,
        reserved: &[(38, 39), (48, 63)],
        writes: true,
        sized: true,
    },
    // Table 5-3 reserves bytes 44 to 63 without the flag *Read CRC Seed*; 8.3.12 gives 48 to 55 to the seed's address.
    Operation {
        code: code::CRC,
        name: "CRC Generation",
        section: "8.3.12",
        flags: BLOCK_ON_FAULT | ADDRESS_1_CLASS | ADDRESS_3_CLASS | CRC_FLAGS,
        required: RECORD_REQUIRED,
        reserved: &[(24, 31), (38, 39), (44, 47), (56, 63)],
        writes: false,
        sized: true,
    },
    Operation {
        code: code::COPY_CRC,
        name: "Copy with CRC Generation",
        section: "8.3.13",
        flags: BLOCK_ON_FAULT
            | CACHE
            | STRICT_ORDERING
            | ADDRESS_1_CLASS
            | ADDRESS_2_CLASS
            | ADDRESS_3_CLASS
            | CRC_FLAGS,
        required: RECORD_REQUIRED,
        reserved: &[(38, 39), (44, 47), (56, 63)],
        writes: true,
        sized: true,
    },
    Operation {
        code: code::CACHE_FLUSH,
        name: "Cache flush",
        section: "8.3.26",
        flags: BLOCK_ON_FAULT | CACHE_CONTROL_2 | STRICT_ORDERING | ADDRESS_2_CLASS,
        required: 0,
        reserved: &[(16, 23), (38, 63)],
        writes: true,
        sized: true,
    },
];

/// Largest transfer of the delta operations: the largest offset is `0xffff * 8` (8.3.8).
pub const DELTA_TRANSFER: u64 = 0x80000;
/// Bytes of one delta: offset / 8 in 2 bytes, 8 bytes of data (8.3.8).
pub const DELTA: usize = 10;
/// Minimum of *Maximum Delta Record Size* (8.3.8).
pub const MIN_DELTA_LIMIT: u64 = 80;
/// Bytes of a descriptor, and the alignment of a list of them (8.3.2).
pub const DESCRIPTOR: usize = 64;

/// Returns the row of an operation code.
pub fn operation(code: u8) -> Option<&'static Operation> {
    OPERATIONS.iter().find(|operation| operation.code == code)
}
