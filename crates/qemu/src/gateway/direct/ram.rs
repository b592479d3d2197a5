//! A QEMU's guest RAM from outside: where each block lies, how it is read and written, and the dirty log over it.
//!
//! Shared files are mapped here: then accelerators reach them, and placing is a store. Private memory is read by `process_vm_readv` and
//! written by `/proc/PID/mem`. All blocks are moved by the library, also ROMs and video memory, each as far as it is in use: the
//! stream that the destination's QEMU reads has no page in it.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use sterna_attach::{Process, UserfaultOrigin, take_userfault};
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::DirtyLog;
use sterna_memory::dirty::write_protect::{MappedBlock, MappedPart, WriteProtectLog};
use sterna_memory::ram::{self as memory, GuestRam};
use sterna_memory::userfault::Userfault;
use sterna_wire::control::Block;

use crate::discover::{Backing, FileKind, ListedBlock, MappedRam, list};
use crate::qmp::Qmp;

/// The memory of a source, tracked.
pub(super) struct DirectRam {
    guest: GuestRam,
    log: Box<dyn DirtyLog>,
    listed: Vec<ListedBlock>,
    stopped: Duration,
}

impl std::fmt::Debug for DirectRam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { guest, listed, stopped, .. } = self;
        let mut ram = f.debug_struct("DirectRam");
        ram.field("guest", guest).field("listed", listed).field("stopped", stopped).finish_non_exhaustive()
    }
}

impl DirectRam {
    /// Takes hold of the memory of the QEMU behind `qmp`, and makes it possible to track its writes.
    ///
    /// # Errors
    /// Why that is not possible.
    pub(super) fn of_source(qmp: &Qmp) -> Result<Self, String> {
        let listed = list(qmp).map_err(|error| error.to_string())?;
        let mapped = MappedRam::find(qmp, &listed)?;
        refuse_other_mappers(&mapped)?;
        let guest = guest_ram(&mapped)?;
        let process = mapped.process();
        let pid = process.pid();
        let held = Process::open(pid).map_err(|error| error.to_string())?;
        let taken = take_userfault(&held, UserfaultOrigin::SystemCall).map_err(|error| error.to_string())?;
        // All of the above was about the process that the monitor's socket belongs to.
        process.check_alive().map_err(|error| error.to_string())?;
        let userfault = Userfault::from_descriptor(taken.descriptor, WriteProtectLog::FEATURES)
            .map_err(|error| error.to_string())?;
        let blocks = guest.blocks().iter().zip(mapped.blocks()).map(|(block, mapped)| {
            let start = mapped.address as usize;
            let addresses = start..start + block.bytes() as usize;
            MappedBlock { pages: block.pages(), parts: vec![MappedPart { addresses, first_page: 0 }] }
        });
        let log = WriteProtectLog::of_process(Arc::clone(process), userfault, blocks.collect())
            .map_err(|error| error.to_string())?;
        Ok(Self { guest, log: Box::new(log), listed, stopped: taken.stopped })
    }

    /// How long a thread of QEMU stood for the tracking to be made possible.
    pub(super) fn stopped(&self) -> Duration {
        self.stopped
    }

    /// What QEMU says of its blocks.
    pub(super) fn listed(&self) -> &[ListedBlock] {
        &self.listed
    }

    /// How writes are tracked, for people.
    pub(super) fn tracking(&self) -> String {
        "asynchronous write protection of QEMU's memory from outside (userfaultfd, PAGEMAP_SCAN)".into()
    }

    pub(super) fn into_parts(self) -> (GuestRam, Box<dyn DirtyLog>) {
        (self.guest, self.log)
    }
}

/// The memory of a destination whose QEMU has read the list of blocks, in the order of the source's `wanted`.
///
/// # Errors
/// A block is not there, or cannot be written from outside.
pub(super) fn of_destination(qmp: &Qmp, wanted: &[Block]) -> Result<GuestRam, String> {
    let mut listed = list(qmp).map_err(|error| error.to_string())?;
    let place = |name: &str| wanted.iter().position(|block| block.name == name);
    listed.retain(|block| place(&block.name).is_some());
    listed.sort_by_key(|block| place(&block.name));
    guest_ram(&MappedRam::find(qmp, &listed)?)
}

fn guest_ram(mapped: &MappedRam) -> Result<GuestRam, String> {
    let block = |found: &crate::discover::MappedBlock| -> Result<memory::RamBlock, String> {
        let bytes = found.used.next_multiple_of(PAGE_SIZE as u64) as usize;
        let (name, process, address) = (&found.name, mapped.process(), found.address as usize);
        Ok(match &found.backing {
            Backing::Anonymous => {
                memory::RamBlock::in_process(name, process, address, bytes, memory::Backing::Anonymous)
            }
            Backing::PrivateFile => memory::RamBlock::in_process(name, process, address, bytes, memory::Backing::Other),
            Backing::Shared { kind: FileKind::Disk, .. } => {
                return Err(format!("RAM block {name} is a file on a disk, which QEMU itself has to write"));
            }
            Backing::Shared { file, offset, kind } => {
                let page_size = match kind {
                    FileKind::Hugetlb { page_size } => *page_size as usize,
                    _ => PAGE_SIZE,
                };
                let file = file.try_clone().map_err(|error| format!("RAM block {name}: {error}"))?;
                let block = memory::RamBlock::of_file(name, Arc::new(file), *offset, bytes, page_size);
                block.map_err(|error| format!("the file of RAM block {name} cannot be mapped: {error}"))?
            }
        })
    };
    let blocks = mapped.blocks().iter().map(block).collect::<Result<_, _>>()?;
    GuestRam::new(blocks).map_err(|error| error.to_string())
}

/// Refuses memory that another process has mapped: a vhost-user back end writes it past QEMU's page tables.
fn refuse_other_mappers(mapped: &MappedRam) -> Result<(), String> {
    let files: Vec<(u64, (u32, u32), &str)> =
        mapped.blocks().iter().filter_map(|block| block.file_identity()).collect();
    if files.is_empty() {
        return Ok(());
    }
    let own = std::process::id().to_string();
    let qemu = mapped.process().pid().to_string();
    let processes =
        fs::read_dir("/proc").map_err(|error| format!("the processes of this host cannot be seen: {error}"))?;
    for process in processes.filter_map(Result::ok) {
        let name = process.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else { continue };
        if pid == own || pid == qemu {
            continue;
        }
        // One that has ended, or a thread of the kernel.
        let Ok(maps) = fs::read_to_string(process.path().join("maps")) else { continue };
        if let Some((.., block)) = files.iter().find(|(inode, device, _)| maps_file(&maps, *inode, *device)) {
            let program = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Err(format!(
                "process {pid} ({}) has RAM block {block} mapped too (a vhost-user back end?), and what it writes is not tracked",
                program.trim()
            ));
        }
    }
    Ok(())
}

fn maps_file(maps: &str, inode: u64, (major, minor): (u32, u32)) -> bool {
    // `start-end rwxp offset device inode path` (proc_pid_maps(5)).
    maps.lines().any(|line| {
        let mut words = line.split_whitespace().skip(3);
        let device = words.next().and_then(|device| device.split_once(':'));
        let number = |text: &str| u32::from_str_radix(text, 16).ok();
        device.is_some_and(|(first, second)| (number(first), number(second)) == (Some(major), Some(minor)))
            && words.next().and_then(|found| found.parse().ok()) == Some(inode)
    })
}
