//! Finds a QEMU's guest RAM: each RAM block with its address in the QEMU process and its backing.
//!
//! Names and sizes come from QEMU (`info ramblock`, `query-memdev`), addresses from `info ramblock` (since 8.0) or from the
//! flat memory view and `gpa2hva` (before), backing and permissions from `/proc`. A wrong guess here would let Sterna write
//! to foreign memory, so nothing is guessed: a block that cannot be located with certainty goes in-stream, with the reason.
//!
//! [`discover`] locates only memory backends (`-m`, `-object memory-backend-*`). ROMs, video memory and firmware tables are small,
//! may be resized while loading, and always go in-stream.

mod fresh;
mod maps;
mod monitor;
#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use sterna_memory::PAGE_SIZE;
use sterna_memory::place::TargetProcess;

use crate::qmp::{Qmp, QmpError};
use crate::vcpus;

pub use fresh::Freshness;
use maps::{Area, Maps};
pub use monitor::ListedBlock;
use monitor::Memdev;

/// A RAM block of QEMU.
#[derive(Debug)]
pub struct RamBlock {
    /// Name as in the migration stream.
    pub name: String,
    /// Bytes in use, as in the migration stream.
    pub used: u64,
    /// Size of a page of its backing, bytes.
    pub page_size: u64,
    /// Where the block is, or why only QEMU itself can fill it (the second half of a sentence, for log and report).
    pub location: Result<Location, String>,
}

/// Where a RAM block is.
#[derive(Debug)]
pub struct Location {
    /// The QEMU process.
    pub process: Arc<TargetProcess>,
    /// Address of the block's first byte in that process.
    pub address: u64,
    /// The memory mapped there.
    pub backing: Backing,
    /// Whether QEMU allocated all of it at start.
    pub preallocated: bool,
    /// Whether the process has locked or pinned memory (mem-lock, device assignment), which must not be given back.
    pub pinned: bool,
}

/// What backs a RAM block.
#[derive(Debug)]
#[non_exhaustive]
pub enum Backing {
    /// Private anonymous memory: QEMU's default.
    Anonymous,
    /// A private mapping of a file (`share=off`): written pages are QEMU's own, like anonymous memory.
    PrivateFile,
    /// A file that other processes can map (`share=on`).
    Shared {
        /// The file, open for reading and writing.
        file: File,
        /// Offset of the block's first byte in it.
        offset: u64,
        /// What kind of file.
        kind: FileKind,
    },
}

/// The kinds of files that guest RAM may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A memfd of ordinary pages; `huge`: the kernel may give it huge pages.
    Memfd {
        /// Whether huge pages are possible.
        huge: bool,
    },
    /// A file on tmpfs; `huge`: its mount asks for huge pages.
    Tmpfs {
        /// Whether huge pages are possible.
        huge: bool,
    },
    /// A file (or memfd) of huge pages of a pool.
    Hugetlb {
        /// Size of one, bytes.
        page_size: u64,
    },
    /// A file on a disk, or on a file system that is not known to be memory.
    Disk,
}

/// Why the RAM blocks could not be listed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoverError {
    /// QMP failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU's list is not as any known release writes it.
    #[error("cannot read the RAM blocks from QEMU's answer to {command}: \"{line}\"")]
    NotUnderstood {
        /// The command.
        command: &'static str,
        /// The line that is not understood.
        line: String,
    },
}

/// Lists the RAM blocks of the QEMU behind `qmp`.
pub fn discover(qmp: &Qmp) -> Result<Vec<RamBlock>, DiscoverError> {
    let listed = monitor::ram_blocks(&qmp.human("info ramblock")?)?;
    let memdevs = monitor::memdevs(&qmp.execute("query-memdev", json!({}))?);
    let owned = monitor::device_memory(&qmp.execute("query-memory-devices", json!({}))?);
    let process = Process::behind(qmp);
    let mut flat_view = None;
    let mut blocks = Vec::with_capacity(listed.len());
    for block in listed {
        let location = match backend_of(&block, &memdevs, &owned) {
            Err(reason) => Err(reason),
            Ok(memdev) => match &process {
                Err(reason) => Err(reason.clone()),
                Ok(process) => {
                    let address = match block.address {
                        Some(address) => Ok(address),
                        None => {
                            let view = match &mut flat_view {
                                Some(view) => view,
                                none => none.insert(qmp.human("info mtree -f")?),
                            };
                            monitor::address_from_view(view, &block, |gpa| qmp.human(&format!("gpa2hva {gpa:#x}")))?
                        }
                    };
                    address.and_then(|address| process.locate(address, &block, memdev))
                }
            },
        };
        blocks.push(RamBlock { name: block.name, used: block.used, page_size: block.page_size, location });
    }
    Ok(blocks)
}

/// Lists the RAM blocks of the QEMU behind `qmp`, as QEMU reports them.
pub fn list(qmp: &Qmp) -> Result<Vec<ListedBlock>, DiscoverError> {
    listed(&qmp.human(LIST)?)
}

/// The command of the human monitor that lists the RAM blocks.
pub(crate) const LIST: &str = "info ramblock";

/// Returns the RAM blocks of what QEMU has printed for [`LIST`].
///
/// # Errors
/// The text is not what QEMU prints.
pub(crate) fn listed(text: &str) -> Result<Vec<ListedBlock>, DiscoverError> {
    monitor::ram_blocks(text)
}

/// All RAM blocks of a QEMU with their mapped memory, including ROMs and video memory.
#[derive(Debug)]
pub struct MappedRam {
    process: Arc<TargetProcess>,
    locked: bool,
    blocks: Vec<MappedBlock>,
}

/// A RAM block with the memory mapped at its address.
#[derive(Debug)]
pub struct MappedBlock {
    /// Name as in the migration stream.
    pub name: String,
    /// Bytes in use.
    pub used: u64,
    /// Size of a page of its backing, bytes.
    pub page_size: u64,
    /// Address of the block's first byte in QEMU's process.
    pub address: u64,
    /// The memory mapped there.
    pub backing: Backing,
    /// Inode and device of the file, if there is one.
    file: Option<(u64, (u32, u32))>,
}

impl MappedBlock {
    /// Returns inode, device and the block's name if its memory is a file that other processes may have mapped, too.
    pub fn file_identity(&self) -> Option<(u64, (u32, u32), &str)> {
        let (inode, device) = self.file.filter(|_| matches!(self.backing, Backing::Shared { .. }))?;
        Some((inode, device, &self.name))
    }
}

impl MappedRam {
    /// Finds the memory of the `listed` blocks in the process behind `qmp`.
    ///
    /// # Errors
    /// Why the process or one of the blocks cannot be found with certainty.
    pub fn find(qmp: &Qmp, listed: &[ListedBlock]) -> Result<Self, String> {
        let process = Process::behind(qmp)?;
        let find = |block: &ListedBlock| -> Result<MappedBlock, String> {
            let failed = |reason: String| format!("RAM block {}: {reason}", block.name);
            let no_address = || failed(format!("QEMU {} does not tell its address (8.0 and newer do)", qmp.version()));
            let address = block.address.ok_or_else(no_address)?;
            let area = process.maps.area(address, block.total).map_err(failed)?;
            let file = (area.inode != 0).then(|| (area.inode, area.device()));
            let backing = process.backing(&area).map_err(failed)?;
            let &ListedBlock { used, page_size, .. } = block;
            Ok(MappedBlock { name: block.name.clone(), used, page_size, address, backing, file })
        };
        let blocks = listed.iter().map(find).collect::<Result<_, _>>()?;
        Ok(Self { process: process.target, locked: process.locked, blocks })
    }

    /// Finds the memory of blocks whose addresses in process `pid` were found. `blocks`: name, bytes, bytes in a page if it is one of a pool of
    /// huge pages, and address of each.
    ///
    /// # Errors
    /// Why the process cannot be reached, or is not what the addresses were found in.
    pub fn at(pid: i32, blocks: &[(&str, u64, u64, u64)]) -> Result<Self, String> {
        let process = Process::of(pid)?;
        let find = |&(name, used, page_size, address): &(&str, u64, u64, u64)| -> Result<MappedBlock, String> {
            let failed = |reason: String| format!("RAM block {name}: {reason}");
            let area = process.maps.area(address, used).map_err(failed)?;
            let file = (area.inode != 0).then(|| (area.inode, area.device()));
            let backing = process.backing(&area).map_err(failed)?;
            let page_size = match &backing {
                Backing::Shared { kind: FileKind::Hugetlb { page_size }, .. } => *page_size,
                Backing::PrivateFile => page_size,
                _ => PAGE_SIZE as u64,
            };
            Ok(MappedBlock { name: name.to_owned(), used, page_size, address, backing, file })
        };
        let blocks = blocks.iter().map(find).collect::<Result<_, _>>()?;
        Ok(Self { process: process.target, locked: process.locked, blocks })
    }

    /// Returns the process in which the blocks lie.
    pub fn process(&self) -> &Arc<TargetProcess> {
        &self.process
    }

    /// Returns whether the process has locked memory, which cannot be given back.
    pub fn locked(&self) -> bool {
        self.locked
    }

    /// Returns the blocks, in the order of the list.
    pub fn blocks(&self) -> &[MappedBlock] {
        &self.blocks
    }
}

/// Returns the memory backend of a block that may be filled from outside, or why it may not.
fn backend_of<'a>(
    block: &ListedBlock,
    memdevs: &'a [Memdev],
    owned: &[(String, String)],
) -> Result<&'a Memdev, String> {
    // Machine types up to 4.0 name the block of a backend by its path.
    let id = block.name.strip_prefix("/objects/").unwrap_or(&block.name);
    let mut named = memdevs.iter().filter(|memdev| memdev.id == id);
    let memdev = match (named.next(), named.next()) {
        (Some(memdev), None) => memdev,
        (Some(_), Some(_)) => return Err("several memory backends have its name".into()),
        (None, _) => return Err("it belongs to a device or the firmware".into()),
    };
    if let Some((_, kind)) = owned.iter().find(|(memdev, kind)| memdev == id && kind != "dimm") {
        return Err(format!("it belongs to a device of type {kind}, which decides what is plugged in"));
    }
    if block.read_only == Some(true) {
        return Err("it is read-only".into());
    }
    if block.used != block.total {
        return Err("it may be resized".into());
    }
    if memdev.size != block.total {
        return Err("its size is not that of its memory backend".into());
    }
    Ok(memdev)
}

/// The QEMU process, as `/proc` shows it.
struct Process {
    target: Arc<TargetProcess>,
    maps: Maps,
    pinned: bool,
    locked: bool,
}

impl Process {
    /// Finds the process behind the monitor.
    ///
    /// # Errors
    /// Why it cannot be reached.
    fn behind(qmp: &Qmp) -> Result<Self, String> {
        let pid = qmp.peer_pid().ok_or("the QEMU process cannot be seen from here (another pid namespace)")?;
        // Only a process that runs this guest's vCPU threads is its QEMU, whose pid namespace may be another one.
        Self::opened(pid, || vcpus::check(qmp, pid).map_err(|error| error.to_string()))
    }

    /// Opens the process that has this number.
    ///
    /// # Errors
    /// Why it cannot be reached.
    fn of(pid: i32) -> Result<Self, String> {
        Self::opened(pid, || Ok(()))
    }

    /// Opens a process. `check`: whether the number is that of the right one.
    fn opened(pid: i32, check: impl FnOnce() -> Result<(), String>) -> Result<Self, String> {
        let target = TargetProcess::open(pid).map_err(|error| error.to_string())?;
        check()?;
        let text = fs::read_to_string(format!("/proc/{pid}/maps"))
            .map_err(|error| format!("the mappings of process {pid} cannot be read: {error}"))?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))
            .map_err(|error| format!("the status of process {pid} cannot be read: {error}"))?;
        // Still alive, so everything above is about this process and not about a later one with the same id.
        target.check_alive().map_err(|error| error.to_string())?;
        let (pinned, locked) = (maps::has_pinned_memory(&status), maps::has_locked_memory(&status));
        Ok(Self { target: Arc::new(target), maps: Maps::parse(&text), pinned, locked })
    }

    /// Finds the memory mapped at a block's address.
    fn locate(&self, address: u64, block: &ListedBlock, memdev: &Memdev) -> Result<Location, String> {
        let area = self.maps.area(address, block.total)?;
        if area.shared != memdev.share {
            return Err(format!(
                "QEMU says share={} but its mapping is {}",
                if memdev.share { "on" } else { "off" },
                if area.shared { "shared" } else { "private" }
            ));
        }
        let backing = self.backing(&area)?;
        Ok(Location {
            process: Arc::clone(&self.target),
            address,
            backing,
            preallocated: memdev.prealloc,
            pinned: self.pinned,
        })
    }

    fn backing(&self, area: &Area) -> Result<Backing, String> {
        Ok(match (area.shared, area.inode) {
            (false, 0) => Backing::Anonymous,
            (false, _) => Backing::PrivateFile,
            (true, _) => {
                let file = self.open(area)?;
                let kind = maps::file_kind(&file, area, self.target.pid())?;
                Backing::Shared { file, offset: area.offset, kind }
            }
        })
    }

    /// Opens the mapped file by QEMU's own descriptor, else by the mapping. Its path may name another file by now, or none.
    fn open(&self, area: &Area) -> Result<File, String> {
        let (start, end) = area.first_mapping;
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.target.pid()))
            .map_err(|error| format!("the files of process {} cannot be seen: {error}", self.target.pid()))?;
        let candidates = descriptors
            .filter_map(|entry| Some(entry.ok()?.path()))
            .chain([PathBuf::from(format!("/proc/{}/map_files/{start:x}-{end:x}", self.target.pid()))]);
        let mut refused = None;
        for path in candidates {
            let is_it = |metadata: fs::Metadata| {
                // Only regular files are opened: opening a device or a pipe can have effects.
                metadata.is_file() && metadata.ino() == area.inode && area.is_device(metadata.dev())
            };
            if !fs::metadata(&path).is_ok_and(is_it) {
                continue;
            }
            match OpenOptions::new().read(true).write(true).open(&path) {
                Ok(file) if file.metadata().is_ok_and(is_it) => return Ok(file),
                Ok(_) => {}
                Err(error) => refused = Some(error),
            }
        }
        Err(match refused {
            Some(error) => format!("its file cannot be opened for writing: {error}"),
            None => "its file was not found among the files of the QEMU process".into(),
        })
    }
}
