//! Sections of VFIO devices before the RAM end: the only device sections there whose ends are marked.
//!
//! Never run with a real device: no development machine has one. Written from `hw/vfio/migration.c`.

use std::io::Read;

use super::StreamError;
use super::input::Input;

/// A DATA record's bytes are passed on in pieces of at most this length, so that no length in the stream determines how much memory
/// is reserved.
const PIECE: usize = 64 * 1024;

const END_OF_STATE: u64 = 0xffff_ffff_ef10_0001;
const CONFIG_STATE: u64 = 0xffff_ffff_ef10_0002;
const SETUP_STATE: u64 = 0xffff_ffff_ef10_0003;
const DATA_STATE: u64 = 0xffff_ffff_ef10_0004;
const INIT_DATA_SENT: u64 = 0xffff_ffff_ef10_0005;
const CONFIG_LOAD_READY: u64 = 0xffff_ffff_ef10_0006;

/// Part of a device section, verbatim. Written one after the other the pieces are the section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePiece {
    /// The section's number.
    pub section_id: u32,
    /// The bytes as they were read: the first piece has the section's header, the last its footer.
    pub bytes: Vec<u8>,
    /// Whether the section ends with this piece.
    pub last: bool,
}

/// Whether a section with this name has the format read here.
pub(crate) fn is_vfio(name: &str) -> bool {
    name == "vfio" || name.ends_with("/vfio")
}

/// Where a device section is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceSection {
    pub(crate) section_id: u32,
    /// Bytes left of the DATA record at hand.
    data_left: u64,
}

impl DeviceSection {
    pub(crate) fn new(section_id: u32) -> Self {
        Self { section_id, data_left: 0 }
    }

    /// Takes the next record or piece of one; true when the section has ended (its footer is still to come).
    pub(crate) fn piece<R: Read>(&mut self, input: &mut Input<R>) -> Result<bool, StreamError> {
        const READING: &str = "VFIO device state";
        if self.data_left == 0 {
            match input.be64(READING)? {
                END_OF_STATE => return Ok(true),
                SETUP_STATE | INIT_DATA_SENT | CONFIG_LOAD_READY => return Ok(false),
                DATA_STATE => self.data_left = input.be64(READING)?,
                CONFIG_STATE => {
                    return Err(StreamError::refused(
                        "VFIO configuration state before the end of RAM",
                        "no known QEMU sends it there; its length cannot be told",
                    ));
                }
                other => return Err(StreamError::Malformed(format!("VFIO device state record {other:#x}"))),
            }
        }
        let length = self.data_left.min(PIECE as u64);
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(PIECE)];
        input.take(&mut bytes, READING)?;
        self.data_left -= length;
        Ok(false)
    }
}
