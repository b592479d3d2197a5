//! What can be asked for. One operation per batch.

use serde::Serialize;

/// An operation, on every item of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Operation {
    /// Which pages are all zero: one bit per page.
    ZeroMap,
    /// Where two ranges first differ, if they do.
    Compare,
    /// The CRC-32C of each range.
    Checksum,
    /// Each range into the batch's own buffer.
    Copy,
    /// Each range into the batch's own buffer, with the CRC-32C of what came to lie there: a snapshot.
    CopyChecksum,
    /// What turns the first range into the second, as a delta record (pairs of 16-bit word offset and 8 bytes).
    CreateDelta,
    /// A delta record onto a range. Writes guest memory.
    ApplyDelta,
    /// From the batch's own buffer to a range. Writes guest memory.
    Place,
    /// Each range as a deflate stream of its own with a window of 4 KiB at most, or as a part of one
    /// ([`Batch::push_continued`](crate::Batch::push_continued)).
    Deflate,
    /// A deflate stream (window of 4 KiB at most) onto a range. Writes guest memory.
    Inflate,
}

impl Operation {
    /// All of them.
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

    /// Its place in tables.
    pub(crate) fn index(self) -> usize {
        self as usize
    }

    /// Its name in reports.
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

    /// Whether it writes guest memory: then it is never done twice as long as a device might still be at it.
    pub fn writes_guest(self) -> bool {
        matches!(self, Self::ApplyDelta | Self::Place | Self::Inflate)
    }

    /// Whether it needs a buffer of the batch's own, for what comes out or goes in.
    pub fn has_buffer(self) -> bool {
        !matches!(self, Self::ZeroMap | Self::Compare | Self::Checksum)
    }
}
