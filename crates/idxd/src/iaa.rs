//! IAA: deflate, inflate and CRC64.
//!
//! An IAA device compresses and decompresses standard deflate (RFC 1951) with a window of 4 KiB: every inflater can
//! read its output, and it refuses to read streams with a larger window. The device has no batches. Apart from a
//! decompression whose output was too small, no job is completed in part: a job that met a fault is repeated from its
//! start.
//!
//! **Compression** takes its Huffman codes from a structure in memory, the [AECS](CompressAecs). With the [fixed
//! codes](CompressAecs::fixed) one descriptor is enough. Codes made for the data take two passes on first-generation
//! devices: a *statistics* pass ([`Descriptor::statistics`]) that writes a [`Histogram`], from which
//! [`CompressAecs::dynamic`] builds codes and block header on the CPU, and the compression itself. Software makes the
//! block header in both cases: the header is in the AECS's output accumulator, and the device writes it first.
//!
//! A compression whose output does not fit cannot be continued: give it the length of the input plus [`STORED_SLACK`],
//! and send the data uncompressed if that is not enough.
//!
//! # Sources
//!
//! * Descriptor, record, AECS, histogram offsets, flags and status codes: the IAA specification (sections 3.2, 3.4,
//!   4.4, 6.1 to 6.4). The kernel's header agrees as far as it defines them, except that it names only two values of
//!   the source-2 flags.
//! * That the AECS holds codes *not* bit-reversed in bits 14:0, the length in bits 18:15: our copy of the specification
//!   lacks the row for bits 14:0; the kernel's fixed table (`iaa_crypto_comp_fixed.c`) shows it, and also that the
//!   fixed block header is the three bits `0b011`, first bit lowest.
//! * The position of the CRC64 value (bytes 40 to 47): missing in that copy, too; taken from Intel's libraries (QPL,
//!   accel-config), which agree. Bits 14 and 15 of the CRC64 flags: from QPL alone.
//! * Bits 2 and 3 of the decompression flags: the specification has *stop* at 2 and *check* at 3, the kernel's driver
//!   the other way round. This crate always sets both, where the order does not matter.
//! * That a *final stored block* counts as an end of block to stop at: assumed from QPL, which relies on it.

mod aecs;
mod deflate;
mod descriptor;
mod huffman;
mod record;

pub use aecs::{
    COMPRESS_AECS_BYTES, CompressAecs, CompressAecsPair, DECOMPRESS_AECS_BYTES, DecompressAecs, DecompressAecsPair,
    HISTOGRAM_BYTES, Histogram, TableError,
};
pub use deflate::Codes;
pub use descriptor::{BitOrder, Descriptor, Operation, STORED_SLACK, flag};
pub use record::{AnalyticsError, Completion, CompletionRecord};
