//! Status codes (table 5-6, IAA table 4-7) and software errors (table 5-7).

/// One status code.
#[derive(Clone, Copy, Debug)]
pub struct Status {
    /// Bits 5:0 of the record's first byte, or the code in the software error register.
    pub code: u8,
    /// The meaning.
    pub meaning: &'static str,
    /// The section.
    pub section: &'static str,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $constant:ident = $code:literal, $section:literal, $meaning:literal;)*) => {
        $($(#[$doc])* pub const $constant: u8 = $code;)*
        /// All rows.
        pub const CODES: &[Status] = &[$(Status { code: $code, meaning: $meaning, section: $section }),*];
    };
}

/// Bit 7: the access that faulted was a write (table 8-10).
pub const WRITE: u8 = 0x80;

codes! {
    /// Success.
    SUCCESS = 0x01, "5.8.1", "success";
    /// Success, but not as expected.
    FALSE_PREDICATE = 0x02, "5.8.1", "success with false predicate";
    /// Page fault without Block On Fault.
    PAGE_FAULT = 0x03, "5.8.1", "page fault, Block On Fault 0";
    /// The page request was answered *invalid*.
    INVALID_RESPONSE = 0x04, "5.8.1", "invalid response to a page request";
    /// A member of the batch had another status than success.
    BATCH_FAIL = 0x05, "5.8.1", "a descriptor of the batch without success";
    /// The list of a batch cannot be read.
    BATCH_FAULT = 0x06, "5.8.1", "page fault on the descriptor list";
    /// Delta offsets do not ascend.
    DELTA_ORDER = 0x07, "5.8.1", "delta offsets not increasing";
    /// Delta offset beyond the transfer.
    DELTA_RANGE = 0x08, "5.8.1", "delta offset beyond the transfer size";
    /// IAA: analytics error; the error code says which.
    ANALYTICS = 0x0a, "IAA 4.4.1", "analytics error";
    /// IAA: the output does not fit.
    OUTPUT_OVERFLOW = 0x0b, "IAA 4.4.1", "output buffer overflow";
    /// No such operation, or not here.
    BAD_OPERATION = 0x10, "5.8.1", "unsupported operation code";
    /// Flags.
    INVALID_FLAGS = 0x11, "5.8.1", "invalid flags";
    /// Reserved field not zero.
    RESERVED = 0x12, "5.8.1", "non-zero reserved field";
    /// Transfer size.
    BAD_SIZE = 0x13, "5.8.1", "invalid transfer size";
    /// Descriptor count.
    BAD_COUNT = 0x14, "5.8.1", "descriptor count out of range";
    /// Another field's value, such as the delta record's size.
    BAD_VALUE = 0x15, "5.8.1", "unsupported value of a field";
    /// Buffers overlap.
    OVERLAP = 0x16, "5.8.1", "overlapping buffers";
    /// The two destinations differ in bits 11:0.
    DUALCAST = 0x17, "5.8.1", "dualcast destinations differ in bits 11:0";
    /// Descriptor list.
    LIST_ALIGNMENT = 0x18, "5.8.1", "misaligned descriptor list";
    /// Interrupt handle.
    BAD_HANDLE = 0x19, "5.8.1", "invalid completion interrupt handle";
    /// Page fault on the record's address; never in a record.
    RECORD_FAULT = 0x1a, "5.8.1", "page fault on the completion record";
    /// The record's address; never in a record.
    RECORD_ALIGNMENT = 0x1b, "5.8.1", "misaligned completion record";
    /// Another address.
    ALIGNMENT = 0x1c, "5.8.1", "misaligned address or size";
    /// Privilege; never in a record.
    PRIVILEGE = 0x1d, "5.8.1", "Priv set in a descriptor of a user";
    /// Hardware error on a read; also a read that faults without address translation service.
    HARDWARE_READ = 0x20, "5.8.1", "hardware error on a read";
    /// Hardware error on a write.
    HARDWARE_WRITE = 0x21, "5.8.1", "hardware error on a write";
    /// IAA: *Decompression*, *Compression* flags.
    IAA_COMPRESSION_FLAGS = 0x30, "IAA 4.4.1", "invalid decompression or compression flags";
    /// Software error: a dedicated queue was full.
    QUEUE_OVERFLOW = 0x53, "5.8.2", "dedicated queue had no space";
}
