//! Chooses how pages are written to a RAM block of a destination QEMU.
//!
//! The rule is measured (docs/tuning.md): huge pages are mapped, because one page fault brings 2 MiB and stores then run at
//! memory speed; ordinary shared pages are written by `pwrite`, which fills a fresh page without clearing it first and without a
//! page fault; anonymous memory permits only `/proc/PID/mem`. Everything else goes through QEMU's own stream.

use sterna_memory::place::{FileWrite, Mapped, Place, PlaceError, ProcessWrite, ZeroBy};

use crate::discover::{Backing, FileKind, Location, RamBlock};

/// How a block is filled.
#[derive(Debug)]
pub enum Placement {
    /// Sterna writes into the guest's memory.
    Direct {
        /// Writes the pages.
        place: Box<dyn Place>,
        /// Why this method was chosen, for log and report.
        why: String,
    },
    /// The pages go to QEMU in its migration stream.
    InStream {
        /// Why not directly, for log and report.
        why: String,
    },
}

/// Chooses the placement for `block`.
///
/// All files are opened now, so that later only the guest's own changes (unplugging memory, ending) can make writing fail.
pub fn choose(block: &RamBlock) -> Placement {
    let location = match &block.location {
        Ok(location) => location,
        Err(why) => return Placement::InStream { why: why.clone() },
    };
    match direct(location, block.used) {
        Ok(placement) => placement,
        Err(error) => Placement::InStream { why: error.to_string() },
    }
}

fn direct(location: &Location, size: u64) -> Result<Placement, PlaceError> {
    let (place, why): (Box<dyn Place>, String) = match &location.backing {
        Backing::Anonymous => (process(location, size)?, "anonymous memory".into()),
        Backing::PrivateFile => (process(location, size)?, "a private mapping (share=off)".into()),
        Backing::Shared { file, offset, kind } => match kind {
            FileKind::Hugetlb { page_size } => {
                (Box::new(Mapped::new(file, *offset, size)?), format!("shared huge pages of {} KiB", page_size / 1024))
            }
            FileKind::Tmpfs { huge: true } | FileKind::Memfd { huge: true } => (
                Box::new(Mapped::new(file, *offset, size)?),
                "a shared file in memory with transparent huge pages".into(),
            ),
            FileKind::Tmpfs { huge: false } | FileKind::Memfd { huge: false } => {
                let zero_by =
                    if location.preallocated || location.pinned { ZeroBy::Writing } else { ZeroBy::PunchHole };
                let file = file.try_clone().map_err(|source| PlaceError::Io {
                    what: "duplicating the file of guest RAM",
                    offset: 0,
                    source,
                })?;
                (
                    Box::new(FileWrite::new(file, *offset, size, zero_by)?),
                    "a shared file in memory with ordinary pages".into(),
                )
            }
            FileKind::Disk => {
                let why = "its file is on disk: QEMU would flush all of it while the guest stands still";
                return Ok(Placement::InStream { why: why.into() });
            }
        },
    };
    Ok(Placement::Direct { place, why })
}

fn process(location: &Location, size: u64) -> Result<Box<dyn Place>, PlaceError> {
    Ok(Box::new(ProcessWrite::new(&location.process, location.address, size)?))
}
