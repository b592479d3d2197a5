//! IAA: deflate, inflate and CRC64.
//!
//! An IAA device compresses and decompresses standard deflate (RFC 1951) with a window of 4 KiB: what it writes every
//! inflater reads, and it refuses to read streams with a larger window. It has no batches, and apart from an output that was too small
//! for a decompression nothing is ever completed in part: a job that met a fault is done again from its start.
//!
//! **Compression** takes its Huffman codes from a structure in memory, the [AECS](CompressAecs). With the
//! [fixed codes](CompressAecs::fixed) one descriptor is enough. Codes made for the data take two passes on first-generation devices: a
//! *statistics* pass ([`Descriptor::statistics`]) that writes a [`Histogram`], from which [`CompressAecs::dynamic`] builds codes
//! and block header on the CPU, and the compression itself. The block header is software's work in both: it stands in the AECS's output
//! accumulator, and the device writes it out first.
//!
//! An output that does not fit is an error from which a compression cannot be continued: give it as much room as the input plus
//! [`STORED_SLACK`] and send the data as it is if that is not enough.
//!
//! # What was checked where
//!
//! * Descriptor, record, AECS, histogram offsets, flags and status codes: the IAA specification (sections 3.2, 3.4, 4.4, 6.1 to 6.4).
//!   The kernel's header agrees where it has them, except that it marks only two of the source-2 flags' values.
//! * That the AECS holds codes *not* bit-reversed in bits 14:0, the length in bits 18:15: the copy of the specification at hand
//!   has lost the row for bits 14:0; the kernel's own fixed table (`iaa_crypto_comp_fixed.c`) shows it, and it says that its fixed
//!   block header is the three bits `0b011`, first bit lowest.
//! * The place of the CRC64 value (bytes 40 to 47): lost in that copy, too; taken from Intel's own libraries (QPL, accel-config),
//!   which agree. Bits 14 and 15 of the CRC64 flags: from QPL alone.
//! * Bits 2 and 3 of the decompression flags: the specification has *stop* at 2 and *check* at 3, the kernel's driver the other way
//!   round. This crate always sets both, where the order does not matter.
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
