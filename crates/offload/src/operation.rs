//! The operations. A batch has one operation.

use serde::Serialize;

/// An operation, applied to every item of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Operation {
    /// Determines which pages are all zero: one bit per page.
    ZeroMap,
    /// Finds where two ranges first differ.
    Compare,
    /// Computes the CRC-32C of each range.
    Checksum,
    /// Copies each range into the batch's own buffer.
    Copy,
    /// Copies each range into the batch's own buffer, with the CRC-32C of the copy: a snapshot.
    CopyChecksum,
    /// Computes how to turn the first range into the second, as a delta record (pairs of 16-bit word offset and 8
    /// bytes).
    CreateDelta,
    /// Applies a delta record to a range. Writes guest memory.
    ApplyDelta,
    /// Copies from the batch's own buffer to a range. Writes guest memory.
    Place,
    /// Compresses each range to a deflate stream with a window of 4 KiB at most, or to a part of one
    /// ([`Batch::push_continued`](crate::Batch::push_continued)).
    Deflate,
    /// Decompresses a deflate stream (window of 4 KiB at most) into a range. Writes guest memory.
    Inflate,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 10] = [
        Self::ZeroMap,
        Self::Compare,
        Self::Checksum,
        Self::Copy,
        Self::CopyChecksum,
        Self::CreateDelta,
        Self::ApplyDelta,
        Self::Place,
        Self::Deflate,
        Self::Inflate,
    ];

    /// Returns its index in tables.
    pub(crate) fn index(self) -> usize {
        self as usize
    }

    /// Returns its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::ZeroMap => "zero map",
            Self::Compare => "compare",
            Self::Checksum => "checksum",
            Self::Copy => "copy",
            Self::CopyChecksum => "copy and checksum",
            Self::CreateDelta => "create delta",
            Self::ApplyDelta => "apply delta",
            Self::Place => "place",
            Self::Deflate => "deflate",
            Self::Inflate => "inflate",
        }
    }

    /// Returns whether it writes guest memory: then it is never repeated while a device might still write.
    pub fn writes_guest(self) -> bool {
        matches!(self, Self::ApplyDelta | Self::Place | Self::Inflate)
    }

    /// Returns whether it needs a buffer of the batch's own, for output or input.
    pub fn has_buffer(self) -> bool {
        !matches!(self, Self::ZeroMap | Self::Compare | Self::Checksum)
    }
}
