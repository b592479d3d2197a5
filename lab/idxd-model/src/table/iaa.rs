//! The differences of IAA from DSA. Sections are those of the IAA specification (revision 2.1).
//!
//! Two facts are missing in our copy of the specification: the two upper CRC64 flags (table 6-13) and the position of
//! the CRC64 value (figure 6-8). They are taken from Intel's software and are not verified.

use super::dsa::{
    ADDRESS_1_CLASS, ADDRESS_2_CLASS, ADDRESS_3_CLASS, BLOCK_ON_FAULT, CACHE_CONTROL_1, CACHE_CONTROL_2, RECORD_CLASS,
    RECORD_VALID, REQUEST_INTERRUPT, REQUEST_RECORD, STRICT_ORDERING,
};
use super::{Field, Operation, fields};

fields! {
    /// Source 1.
    SOURCE1 = "Source 1 Address", 16, 8, "IAA 6.1.5";
    /// Destination.
    DESTINATION = "Destination Address", 24, 8, "IAA 6.1.6";
    /// Source 1's size.
    SOURCE1_SIZE = "Source 1 Transfer Size", 32, 4, "IAA 6.1.7";
    /// Decompression, compression or CRC flags.
    OPERATION_FLAGS = "Decompression, Compression or CRC Flags", 38, 2, "IAA 6.3.2.1, 6.3.5.1, 6.3.6.1";
    /// Source 2: the AECS.
    SOURCE2 = "Source 2 Address", 40, 8, "IAA 6.1.9";
    /// Room at the destination.
    DESTINATION_SIZE = "Maximum Destination Size", 48, 4, "IAA 6.1.10";
    /// The AECS's size: half of the memory at its address.
    SOURCE2_SIZE = "Source 2 Transfer Size", 52, 4, "IAA 6.1.11";
    /// Of *Compress*: more flags, all of later generations.
    COMPRESSION_FLAGS_2 = "Compression 2 Flags", 56, 4, "IAA 6.3.5.2";
    /// Of *CRC64*.
    POLYNOMIAL = "CRC64 Polynomial", 56, 8, "IAA 6.3.6.2";
}

/// The completion record.
pub mod record {
    use super::{Field, fields};

    /// The record's size and alignment in bytes.
    pub const BYTES: usize = 64;

    fields! {
        /// Error code of status 0x0a.
        ERROR = "Error Code", 1, 1, "IAA 6.2.2";
        /// Bytes completed.
        COMPLETED = "Bytes Completed", 4, 4, "IAA 6.2.4";
        /// Fault address.
        FAULT_ADDRESS = "Fault Address", 8, 8, "IAA 6.2.5";
        /// Invalid flags.
        INVALID_FLAGS = "Invalid Flags", 16, 4, "IAA 6.2.6";
        /// Bytes written to the destination.
        OUTPUT_SIZE = "Output Size", 24, 4, "IAA 6.2.7";
        /// Bits of the last output byte; 0 means all.
        OUTPUT_BITS = "Output Bits", 28, 1, "IAA 6.2.8";
        /// XOR of 16-bit words.
        XOR = "XOR Checksum", 30, 2, "IAA 6.2.9";
        /// CRC of the uncompressed data.
        CRC = "CRC", 32, 4, "IAA 6.2.10";
        /// Of *CRC64*.
        CRC64 = "CRC64", 40, 8, "IAA 6.3.6";
    }
}

/// *Read Source 2*, two bits.
pub const READ_SOURCE2: u32 = 3 << 16;
/// *Read Source 2* = 1: as AECS.
pub const READ_AECS: u32 = 1 << 16;
/// *Write Source 2*, two bits.
pub const WRITE_SOURCE2: u32 = 3 << 18;
/// *Write Source 2* = 1: at completion.
pub const WRITE_AECS: u32 = 1 << 18;
/// *Write Source 2* = 2: only on output overflow.
pub const WRITE_ON_OVERFLOW: u32 = 2 << 18;
/// CRC Select: 0x11edc6f41 in place of 0x104c11db7.
pub const CRC_SELECT: u32 = 1 << 21;
/// AECS R/W Toggle Selector.
pub const TOGGLE: u32 = 1 << 22;

/// Compression flags (table 6-11).
pub mod compression {
    /// Statistics in place of output.
    pub const STATISTICS: u16 = 1 << 0;
    /// A partial word is written.
    pub const FLUSH: u16 = 1 << 1;
    /// End Processing, two bits: 1 EOB, 2 and 3 with a stored block, 3 with bFinal.
    pub const END: u16 = 3 << 2;
    /// Literals only.
    pub const LITERALS: u16 = 1 << 4;
    /// All that this model has.
    pub const KNOWN: u16 = STATISTICS | FLUSH | END | LITERALS;
}

/// Decompression flags (table 6-8).
pub mod decompression {
    /// Must be 1.
    pub const ENABLE: u16 = 1 << 0;
    /// A partial word is written.
    pub const FLUSH: u16 = 1 << 1;
    /// Stops at an end of block.
    pub const STOP: u16 = 1 << 2;
    /// The last token has to be an end of block.
    pub const CHECK: u16 = 1 << 3;
    /// Only the end of a final block counts.
    pub const FINAL: u16 = 1 << 4;
    /// Bits to ignore at the end, three bits.
    pub const IGNORE: u16 = 7 << 6;
    /// Nothing is written.
    pub const SUPPRESS: u16 = 1 << 9;
    /// All that this model has.
    pub const KNOWN: u16 = ENABLE | FLUSH | STOP | CHECK | FINAL | IGNORE | SUPPRESS;
}

/// CRC64 flags (table 6-13; these two are illegible in our copy).
pub mod crc64 {
    /// Starts with ones, and the result is inverted.
    pub const INVERT: u16 = 1 << 14;
    /// Bit 0 of a byte is the most significant.
    pub const BIT_ORDER: u16 = 1 << 15;
    /// All that this model has.
    pub const KNOWN: u16 = INVERT | BIT_ORDER;
}

/// The AECS of *Compress* (table 6-20).
pub mod compress_aecs {
    use super::{Field, fields};

    /// Its size.
    pub const BYTES: usize = 1568;
    /// Bytes that are written back without header generation (table 3-3).
    pub const WRITTEN: usize = 64;
    /// Output accumulator.
    pub const ACCUMULATOR: usize = 0x20;
    /// Size of the output accumulator in bits.
    pub const ACCUMULATOR_BITS: u64 = 2048;
    /// Literal and length codes, 286 times 4 bytes.
    pub const LITERALS: usize = 0x120;
    /// Distance codes, 30 times 4 bytes.
    pub const DISTANCES: usize = 0x5a0;

    fields! {
        /// CRC so far.
        CRC = "CRC", 0x00, 4, "IAA 6.4.2";
        /// XOR so far.
        XOR = "XOR Checksum", 0x04, 2, "IAA 6.4.2";
        /// Bits in the accumulator.
        BITS = "Num Acc Bits Valid", 0x1c, 2, "IAA 6.4.2";
    }
}

/// The AECS of *Decompress* (table 6-14).
pub mod decompress_aecs {
    use super::{Field, fields};

    /// Its size.
    pub const BYTES: usize = 5376;
    /// Output accumulator: whole bytes that do not form a word yet.
    pub const OUTPUT: usize = 0xa8;
    /// Input accumulator.
    pub const INPUT: usize = 0xb8;
    /// Bits in each of its 32 quadwords.
    pub const INPUT_SIZES: usize = 0x1b8;
    /// Where this model keeps the counterpart of a real device's internal state (opaque to software, 6.4.1.1).
    pub const STATE: usize = 0x1e0;
    /// History buffer.
    pub const HISTORY: usize = 0x4e8;

    fields! {
        /// CRC so far.
        CRC = "CRC", 0x00, 4, "IAA 6.4.1";
        /// XOR so far.
        XOR = "XOR Checksum", 0x04, 2, "IAA 6.4.1";
        /// Bits in the output accumulator.
        OUTPUT_BITS = "Output Bits Valid", 0xb0, 1, "IAA 6.4.1";
        /// The parser's state; bit 0 start of a header, bit 1 stored, bit 2 final, bit 3 ended.
        PARSER = "Decompress State", 0x434, 1, "IAA 6.4.1.1";
        /// Remaining bytes of a stored block.
        STORED = "Stored Block Bytes Remaining", 0x438, 2, "IAA 6.4.1.1";
        /// Bytes of history that are valid.
        HISTORY_POINTER = "History Buffer Write Pointer", 0x4e4, 2, "IAA 6.4.1.1";
    }
}

/// The window of deflate (2.1, 3.3).
pub const WINDOW: usize = 4096;
/// Words of the statistics (table 3-4).
pub const STATISTICS_WORDS: usize = 318;
/// Maximum count (3.4.1).
pub const MAX_STATISTICS_COUNT: u32 = (1 << 19) - 1;

/// Error codes of status 0x0a (table 4-8).
pub mod error {
    /// Header does not fit into the input accumulator.
    pub const HEADER_TOO_LARGE: u8 = 0x01;
    /// No such code length code.
    pub const UNDEFINED_CL: u8 = 0x02;
    /// The first literal/length code repeats.
    pub const FIRST_REPEATS: u8 = 0x03;
    /// No literal/length codes.
    pub const NO_LITERALS: u8 = 0x05;
    /// A repeat count goes beyond the literal/length codes and the distance codes.
    pub const WRONG_NUMBER: u8 = 0x07;
    /// Code length codes do not fit.
    pub const CL_LENGTHS: u8 = 0x08;
    /// Literal/length codes do not fit.
    pub const LL_LENGTHS: u8 = 0x09;
    /// Distance codes do not fit.
    pub const D_LENGTHS: u8 = 0x0a;
    /// No such literal/length code.
    pub const BAD_LL: u8 = 0x0b;
    /// No such distance code.
    pub const BAD_D: u8 = 0x0c;
    /// Block type 3.
    pub const BLOCK_TYPE: u8 = 0x0d;
    /// Stored length and its inverse.
    pub const STORED_LENGTH: u8 = 0x0e;
    /// No end of block at the end.
    pub const BAD_END: u8 = 0x0f;
    /// Length symbol that does not exist.
    pub const BAD_LENGTH: u8 = 0x10;
    /// Distance beyond the window.
    pub const BAD_DISTANCE: u8 = 0x11;
    /// Distance before the start.
    pub const BEFORE_START: u8 = 0x12;
    /// Invalid value in the AECS.
    pub const AECS: u8 = 0x16;
    /// The output does not fit, and the operation is not *Decompress*.
    pub const UNRECOVERABLE_OVERFLOW: u8 = 0x19;
    /// A code of length 0 was needed.
    pub const INVALID_CODE: u8 = 0x1e;
    /// More than 286 literal/length codes.
    pub const MANY_LL: u8 = 0x23;
    /// More than 30 distance codes.
    pub const MANY_D: u8 = 0x24;
}

/// Operation codes.
pub mod code {
    /// No-op.
    pub const NOOP: u8 = 0x00;
    /// Drain.
    pub const DRAIN: u8 = 0x02;
    /// Decompress.
    pub const DECOMPRESS: u8 = 0x42;
    /// Compress.
    pub const COMPRESS: u8 = 0x43;
    /// CRC64.
    pub const CRC64: u8 = 0x44;
}

/// Flags that any operation may have.
pub const ANY: u32 = RECORD_VALID | REQUEST_RECORD | REQUEST_INTERRUPT | RECORD_CLASS;

const DATA: u32 = BLOCK_ON_FAULT
    | CACHE_CONTROL_1
    | CACHE_CONTROL_2
    | STRICT_ORDERING
    | ADDRESS_1_CLASS
    | ADDRESS_2_CLASS
    | ADDRESS_3_CLASS
    | READ_SOURCE2
    | WRITE_SOURCE2
    | CRC_SELECT
    | TOGGLE;
const RECORD_REQUIRED: u32 = RECORD_VALID | REQUEST_RECORD;

/// Rows of tables 4-1 and 4-3. There is no batch and no memory move (table 6-2); filters and ciphers are not modelled.
pub const OPERATIONS: &[Operation] = &[
    Operation {
        code: code::NOOP,
        name: "No-op",
        section: "IAA 6.3.1",
        flags: 0,
        required: 0,
        reserved: &[(16, 35), (38, 63)],
        writes: false,
        sized: false,
    },
    Operation {
        code: code::DRAIN,
        name: "Drain",
        section: "IAA 6.3.1",
        flags: 0,
        required: REQUEST_RECORD,
        reserved: &[(16, 35), (38, 63)],
        writes: false,
        sized: false,
    },
    Operation {
        code: code::DECOMPRESS,
        name: "Decompress",
        section: "IAA 6.3.2",
        flags: DATA,
        required: RECORD_REQUIRED,
        reserved: &[(56, 63)],
        writes: true,
        sized: false,
    },
    Operation {
        code: code::COMPRESS,
        name: "Compress",
        section: "IAA 6.3.5",
        flags: DATA,
        required: RECORD_REQUIRED,
        reserved: &[(60, 63)],
        writes: true,
        sized: false,
    },
    Operation {
        code: code::CRC64,
        name: "CRC64",
        section: "IAA 6.3.6",
        flags: BLOCK_ON_FAULT | ADDRESS_1_CLASS,
        required: RECORD_REQUIRED,
        reserved: &[(24, 31), (40, 55)],
        writes: false,
        sized: true,
    },
];

/// Returns the row of an operation code.
pub fn operation(code: u8) -> Option<&'static Operation> {
    OPERATIONS.iter().find(|operation| operation.code == code)
}
