//! Errors of a migration stream, with what to do about them.
//!
//! Names from the stream appear in these messages only after they were checked to be short and printable.

use std::io;

/// Why a stream could not be read or written further. After any of these the reader or writer must be dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The underlying reader or writer failed.
    #[error("{doing} failed: {source}")]
    Io {
        /// What was being read or written.
        doing: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The stream ended within an item.
    #[error(
        "the stream ended while reading {reading}: the QEMU that writes it has failed or cancelled the migration, or has ended"
    )]
    Truncated {
        /// What was being read.
        reading: &'static str,
    },
    /// The bytes do not belong to this kind of channel.
    #[error("{what}: found {found:#x}, expected {expected:#x}; is this the right socket?")]
    Unexpected {
        /// The field.
        what: &'static str,
        /// The value read.
        found: u64,
        /// The value that belongs there.
        expected: u64,
    },
    /// The stream breaks a rule of its format.
    #[error("malformed migration stream: {0}")]
    Malformed(String),
    /// A length or count is larger than any QEMU would send; nothing was reserved for it.
    #[error("{what} is {value}, the limit is {limit}; the stream is damaged or hostile")]
    OverLimit {
        /// The field.
        what: &'static str,
        /// The value read.
        value: u64,
        /// The largest value accepted.
        limit: u64,
    },
    /// A page lies outside its RAM block.
    #[error("page at offset {offset:#x} lies outside RAM block \"{block}\" of {used_length:#x} bytes")]
    PageOutsideBlock {
        /// Name of the block.
        block: String,
        /// Offset of the page in the block, bytes.
        offset: u64,
        /// Length of the block, bytes.
        used_length: u64,
    },
    /// A page names a RAM block that is not in the block list.
    #[error("RAM block \"{0}\" is not in the stream's block list")]
    UnknownBlock(String),
    /// The stream uses something that is deliberately not carried.
    #[error("{feature} cannot be carried; {advice}")]
    Refused {
        /// What the stream uses.
        feature: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// The caller broke the order or the sizes that the functions ask for.
    #[error("stream used wrongly: {0}")]
    Misuse(&'static str),
}

impl StreamError {
    pub(crate) fn refused(feature: impl Into<String>, advice: &'static str) -> Self {
        Self::Refused { feature: feature.into(), advice }
    }
}

/// Checks `value <= limit` before anything is reserved for it.
pub(crate) fn within(what: &'static str, value: u64, limit: u64) -> Result<u64, StreamError> {
    if value > limit {
        return Err(StreamError::OverLimit { what, value, limit });
    }
    Ok(value)
}

/// A name from the stream, refused when it is empty or not printable so that it may appear in messages and logs.
pub(crate) fn printable<'a>(what: &'static str, bytes: &'a [u8]) -> Result<&'a str, StreamError> {
    match std::str::from_utf8(bytes) {
        Ok(name) if !name.is_empty() && !name.chars().any(char::is_control) => Ok(name),
        _ => Err(StreamError::Malformed(format!("{what} is empty or not printable: {}", bytes.escape_ascii()))),
    }
}
