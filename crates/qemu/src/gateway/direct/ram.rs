//! A QEMU's guest RAM, accessed from outside: the location of each block, how it is read and written, and its dirty
//! log.
//!
//! Shared files are mapped into this process: accelerators can then read them, and placing a page is a store. Private
//! memory is read by `process_vm_readv` and written by `/proc/PID/mem`. The library moves all blocks, also ROMs and
//! video memory, each up to its used length: the stream that the destination's QEMU reads contains no page.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_attach::{Process, UserfaultOrigin, take_userfault};
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::DirtyLog;
use sterna_memory::dirty::punched::{PunchedLog, SharedFile};
use sterna_memory::dirty::union::UnionLog;
use sterna_memory::dirty::write_protect::{MappedBlock, MappedPart, WriteProtectLog};
use sterna_memory::guest_process::GuestProcess;
use sterna_memory::place::TargetProcess;
use sterna_memory::ram::{self as memory, GuestRam};
use sterna_memory::userfault::Userfault;
use sterna_wire::control::Block;
use sterna_wire::text::cleaned;

use super::post_copy::QemuProcess;
use crate::discover::{self, Backing, FileKind, ListedBlock, MappedRam, list};
use crate::qmp::{PendingCommand, Qmp, QmpError};

/// The memory of a source, with its dirty log.
pub(super) struct DirectRam {
    guest: GuestRam,
    log: Box<dyn DirtyLog>,
    watched: Watched,
    stopped: Duration,
    tracking: String,
}

/// The conditions for complete tracking. They must still hold when the guest has stopped; else untracked writes are
/// possible.
#[derive(Debug)]
pub(super) struct Watched {
    /// QEMU's list of its blocks.
    listed: Vec<ListedBlock>,
    /// The devices that were plugged in. A new one may come with a process that writes guest RAM.
    plugged: Vec<Value>,
    /// The files of guest RAM, and the other processes that map them.
    files: Vec<FileOfBlock>,
    mappers: Vec<Mapper>,
}

/// The file behind a block of guest RAM. Other processes may map it, too.
#[derive(Clone, Debug)]
struct FileOfBlock {
    /// The block's number.
    block: usize,
    inode: u64,
    device: (u32, u32),
    /// Where the block begins in the file, and its length, in bytes.
    offset: u64,
    bytes: u64,
}

/// Another process that writes guest RAM, and where it has mapped the blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapper {
    pid: i32,
    program: String,
    /// By block.
    blocks: Vec<MappedBlock>,
}

impl std::fmt::Debug for DirectRam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { guest, watched, stopped, .. } = self;
        let mut ram = f.debug_struct("DirectRam");
        ram.field("guest", guest).field("watched", watched).field("stopped", stopped).finish_non_exhaustive()
    }
}

impl DirectRam {
    /// Opens the memory of the QEMU behind `qmp`, and prepares the tracking of its writes.
    ///
    /// # Errors
    /// Why the memory cannot be read or tracked.
    pub(super) fn of_source(qmp: &Qmp) -> Result<Self, String> {
        Survey::of(qmp)?.track()
    }

    /// Returns the longest time that a thread was stopped to set up the tracking.
    pub(super) fn stopped(&self) -> Duration {
        self.stopped
    }

    /// Returns how writes are tracked, for notes and the report.
    pub(super) fn tracking(&self) -> String {
        self.tracking.clone()
    }

    pub(super) fn into_parts(self) -> (GuestRam, Box<dyn DirtyLog>, Watched) {
        (self.guest, self.log, self.watched)
    }
}

/// The memory of a source, found and checked. Nothing of its processes was touched.
pub(super) struct Survey {
    guest: GuestRam,
    mapped: MappedRam,
    watched: Watched,
    /// Whether the guest can give memory back to the host while it runs.
    gives_back: bool,
    /// Whether the host's kernel merges pages of the guest's RAM.
    merges: bool,
}

impl Survey {
    /// Finds the memory of the QEMU behind `qmp`, and the other processes that write it.
    ///
    /// # Errors
    /// Why the memory cannot be read or tracked.
    pub(super) fn of(qmp: &Qmp) -> Result<Self, String> {
        let listed = list(qmp).map_err(|error| error.to_string())?;
        let mapped = MappedRam::find(qmp, &listed)?;
        let merged = merged(mapped.process().pid());
        let guest = guest_ram(&mapped, &merged)?;
        let files = files_of(&guest, &mapped);
        let mappers = other_mappers(&files, &guest, mapped.process().pid())?;
        mappers.iter().try_for_each(refuse_unknown)?;
        let devices = devices(qmp)?;
        check_count(back_ends(qmp, &devices)?, mappers.len())?;
        let gives_back = devices.iter().any(|device| gives_memory_back(device));
        if gives_back
            && let Some(block) =
                guest.blocks().iter().find(|block| block.page_size() > PAGE_SIZE && block.process().is_some())
        {
            return Err(format!(
                "RAM block {} has private huge pages, and a balloon gives some of them back",
                block.name()
            ));
        }
        let plugged = plugged(qmp)?;
        let merges = guest.blocks().iter().any(|block| is_merged(&merged, &block.addresses()));
        Ok(Self { guest, mapped, watched: Watched { listed, plugged, files, mappers }, gives_back, merges })
    }

    /// Returns the guest's RAM.
    pub(super) fn guest(&self) -> &GuestRam {
        &self.guest
    }

    /// Returns how many bytes of the guest's RAM are populated: what the guest, or somebody for it, has ever written.
    ///
    /// # Errors
    /// The system does not tell.
    pub(super) fn populated(&self) -> io::Result<u64> {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", self.mapped.process().pid()))?;
        let blocks = self.mapped.blocks().iter().zip(self.guest.blocks());
        let of_block = |(mapped, block): (&discover::MappedBlock, &memory::RamBlock)| match &mapped.backing {
            // What others have populated counts too, so the file is asked, of which the block may be a part.
            Backing::Shared { file, .. } => Ok((file.metadata()?.blocks() * BLOCK_OF_STAT).min(block.bytes())),
            _ => Ok(resident(&smaps, mapped.address, block.bytes()).min(block.bytes())),
        };
        blocks.map(of_block).sum()
    }

    /// Prepares the tracking of the writes: has QEMU, and each other process that writes the memory, make a userfaultfd.
    ///
    /// # Errors
    /// Why the memory cannot be tracked.
    pub(super) fn track(self) -> Result<DirectRam, String> {
        let Self { guest, mapped, watched, gives_back, merges } = self;
        let blocks: Vec<_> = guest
            .blocks()
            .iter()
            .zip(mapped.blocks())
            .map(|(block, mapped)| {
                let start = mapped.address as usize;
                let addresses = start..start + block.bytes() as usize;
                MappedBlock { pages: block.pages(), parts: vec![MappedPart { addresses, first_page: 0 }] }
            })
            .collect();
        let mappers = &watched.mappers;
        let (mut logs, mut stopped) = (Vec::new(), Duration::ZERO);
        let (log, thread_stopped) = track(mapped.process(), blocks)?;
        logs.push(log);
        stopped = stopped.max(thread_stopped);
        for mapper in mappers {
            let failed =
                |why: String| format!("process {} ({}), which writes guest RAM too: {why}", mapper.pid, mapper.program);
            let process = TargetProcess::open(mapper.pid).map_err(|error| failed(error.to_string()))?;
            let (log, thread_stopped) = track(&Arc::new(process), mapper.blocks.clone()).map_err(failed)?;
            logs.push(log);
            stopped = stopped.max(thread_stopped);
        }
        let mut tracking =
            "asynchronous write protection of QEMU's memory from outside (userfaultfd, PAGEMAP_SCAN)".to_owned();
        mappers.iter().for_each(|mapper| tracking += &format!(", and of process {} ({})", mapper.pid, mapper.program));
        let mut log: Box<dyn DirtyLog> = match logs.len() {
            1 => logs.remove(0),
            _ => Box::new(UnionLog::new(logs)),
        };
        if gives_back && guest.blocks().iter().any(|block| shared_file(block).is_some()) {
            log = Box::new(PunchedLog::new(log, guest.blocks().iter().map(shared_file).collect()));
            tracking += "; memory that is given back is looked for";
        }
        if merges {
            tracking += "; this host merges equal pages (KSM), which then count as written, so pages are compared with what was sent";
        }
        Ok(DirectRam { guest, log, watched, stopped, tracking })
    }
}

/// Returns the address ranges of a process in which the kernel merges equal pages; none where it merges no pages at present
/// (`Documentation/admin-guide/mm/ksm.rst`). QEMU permits that for guest RAM by default (`mem-merge`).
fn merged(pid: i32) -> Vec<Range<usize>> {
    let runs = fs::read_to_string("/sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim() == "1");
    let smaps = if runs { fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default() } else { String::new() };
    mergeable(&smaps)
}

/// Returns the mappings in `/proc/PID/smaps` whose pages may be merged: those with the flag `mg` (proc_pid_smaps(5)).
fn mergeable(smaps: &str) -> Vec<Range<usize>> {
    let (mut range, mut found) = (0..0, Vec::new());
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-')
            && let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
        {
            range = start..end;
        } else if first == "VmFlags:" && words.any(|flag| flag == "mg") {
            found.push(range.clone());
        }
    }
    found
}

fn is_merged(merged: &[Range<usize>], addresses: &Range<usize>) -> bool {
    merged.iter().any(|range| range.start < addresses.end && addresses.start < range.end)
}

/// Bytes of a block in the figures of stat(2).
const BLOCK_OF_STAT: u64 = 512;

/// Returns how many bytes from `start` on, `bytes` at most, are in memory or swapped out: the sum over the mappings that begin there
/// (`/proc/PID/smaps`, proc_pid_smaps(5)).
fn resident(smaps: &str, start: u64, bytes: u64) -> u64 {
    let (mut inside, mut kib) = (false, 0);
    for line in smaps.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or_default();
        if let Some((from, _)) = first.split_once('-')
            && let Ok(from) = u64::from_str_radix(from, 16)
        {
            inside = (start..start + bytes).contains(&from);
        } else if inside && ["Rss:", "Swap:", "Private_Hugetlb:"].contains(&first) {
            kib += line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    kib << 10
}

impl Watched {
    /// Checks that the guest's memory is still at the same addresses, that its devices are the same, and that no new process writes its
    /// memory.
    ///
    /// # Errors
    /// What has changed.
    pub(super) fn check(&self, qmp: &Qmp, guest: &GuestRam) -> Result<(), String> {
        let answers = Self::ask(qmp).and_then(|mut asked| qmp.answers(&mut asked));
        self.check_answers(&answers.map_err(|error| error.to_string())?, guest)
    }

    /// Asks QEMU what [`Watched::check_answers`] checks.
    pub(super) fn ask(qmp: &Qmp) -> Result<[PendingCommand; 3], QmpError> {
        let [named, unnamed] = PLUGGED.map(|path| qmp.begin("qom-list", json!({ "path": path })));
        Ok([qmp.begin("human-monitor-command", json!({ "command-line": discover::LIST }))?, named?, unnamed?])
    }

    /// As [`Watched::check`], with QEMU's answers.
    pub(super) fn check_answers(&self, [blocks, plugged @ ..]: &[Value; 3], guest: &GuestRam) -> Result<(), String> {
        let changed = |what: &str, names: &[String]| {
            format!(
                "{what} during the migration ({}), and the destination's QEMU has what the guest had before: start that with what the guest has \
                 now, and send again",
                names.join(", ")
            )
        };
        let listed = discover::listed(blocks.as_str().unwrap_or_default()).map_err(|error| error.to_string())?;
        if listed != self.listed {
            let names = differing(&self.listed, &listed, |block| format!("RAM block {}", cleaned(&block.name)));
            return Err(changed("memory was plugged in or out", &names));
        }
        let plugged = entries(plugged);
        if plugged != self.plugged {
            let names = differing(&self.plugged, &plugged, |device| {
                let text = |key: &str| cleaned(device[key].as_str().unwrap_or_default());
                format!("{}, {}", text("name"), text("type"))
            });
            return Err(changed("a device was plugged in or out", &names));
        }
        for mapper in &self.mappers {
            let blocks = mapped_by(mapper.pid, &self.files, guest).map_err(|error| error.to_string())?;
            if blocks.is_some_and(|blocks| blocks != mapper.blocks) {
                let Mapper { pid, program, .. } = mapper;
                return Err(format!(
                    "process {pid} ({program}) has mapped guest RAM anew, and its writes were not tracked"
                ));
            }
        }
        Ok(())
    }
}

/// Creates a log of the writes of `process` to `blocks`. Returns it and how long a thread of the process was stopped.
fn track(process: &Arc<TargetProcess>, blocks: Vec<MappedBlock>) -> Result<(Box<dyn DirtyLog>, Duration), String> {
    let held = Process::open(process.pid()).map_err(|error| error.to_string())?;
    let taken = take_userfault(&held, UserfaultOrigin::SystemCall).map_err(|error| error.to_string())?;
    // Still alive, so the number has always meant this process.
    process.check_alive().map_err(|error| error.to_string())?;
    let userfault =
        Userfault::from_descriptor(taken.descriptor, WriteProtectLog::FEATURES).map_err(|error| error.to_string())?;
    let log = WriteProtectLog::of_process(Arc::clone(process), userfault, blocks).map_err(|error| error.to_string())?;
    // Checked now, while the stream mode can still be chosen.
    log.check().map_err(|error| error.to_string())?;
    Ok((Box::new(log), taken.stopped))
}

fn shared_file(block: &memory::RamBlock) -> Option<SharedFile> {
    match block.backing() {
        memory::Backing::Shared(file, offset) => {
            Some(SharedFile { file: Arc::clone(file), offset: *offset, pages: block.pages() })
        }
        _ => None,
    }
}

/// Returns the types and names of QEMU's devices.
fn devices(qmp: &Qmp) -> Result<Vec<String>, String> {
    let tree = qmp.human("info qtree").map_err(|error| error.to_string())?;
    Ok(tree.lines().filter_map(|line| line.trim_start().strip_prefix("dev: ")).map(str::to_owned).collect())
}

/// Maximum number of blocks or devices that an error names.
const MAX_NAMED: usize = 8;

/// Where QEMU has the devices that options or `device_add` have made, with and without an id. No other device is plugged in or out.
const PLUGGED: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// Returns the devices that were plugged in. [`devices`] takes 5 to 16 ms of a machine with 60 devices, because QEMU prints all properties of
/// each.
fn plugged(qmp: &Qmp) -> Result<Vec<Value>, String> {
    let list = |path: &str| qmp.execute("qom-list", json!({ "path": path })).map_err(|error| error.to_string());
    let lists: Result<Vec<_>, _> = PLUGGED.into_iter().map(list).collect();
    Ok(entries(&lists?))
}

fn entries(lists: &[Value]) -> Vec<Value> {
    lists.iter().filter_map(Value::as_array).flatten().cloned().collect()
}

/// Names what only one of two lists has.
fn differing<T: PartialEq>(before: &[T], now: &[T], name: impl Fn(&T) -> String) -> Vec<String> {
    let gone = before.iter().filter(|one| !now.contains(one));
    let mut names: Vec<String> = gone.chain(now.iter().filter(|one| !before.contains(one))).map(name).collect();
    names.dedup();
    names.truncate(MAX_NAMED);
    names
}

/// Returns whether the guest can give memory back to the host by this device while it runs.
fn gives_memory_back(device: &str) -> bool {
    ["virtio-balloon", "virtio-mem"].iter().any(|kind| device.starts_with(kind))
}

/// Returns the number of vhost-user back ends that share guest RAM with QEMU: of devices, of network interfaces, and of
/// objects.
fn back_ends(qmp: &Qmp, devices: &[String]) -> Result<usize, String> {
    let networks = qmp.human("info network").map_err(|error| error.to_string())?;
    let objects = qmp.execute("qom-list", json!({ "path": "/objects" })).map_err(|error| error.to_string())?;
    let of_object = |object: &&Value| object["type"].as_str().is_some_and(|kind| kind.contains("vhost-user"));
    // A PCI device and the virtio device on it are two entries; only the PCI device counts.
    let of_device = |device: &&String| device.starts_with("vhost-user") && device.contains("-pci");
    let others = devices.iter().any(|device| device.starts_with("vhost-user"));
    let on_pci = devices.iter().filter(of_device).count();
    let of_devices = if on_pci == 0 && others { 1 } else { on_pci };
    Ok(of_devices
        + networks.matches("type=vhost-user").count()
        + objects.as_array().map_or(0, |all| all.iter().filter(of_object).count()))
}

/// Fails if fewer mappers than back ends are seen: a back end in a pid namespace that this process does not see would
/// write guest RAM untracked.
fn check_count(back_ends: usize, seen: usize) -> Result<(), String> {
    match seen < back_ends {
        true => Err(format!(
            "QEMU gives guest RAM to {back_ends} vhost-user back ends, and {seen} processes that have it mapped are seen from here"
        )),
        false => Ok(()),
    }
}

fn files_of(guest: &GuestRam, mapped: &MappedRam) -> Vec<FileOfBlock> {
    let file = |(block, (ram, mapped)): (usize, (&memory::RamBlock, &discover::MappedBlock))| {
        let memory::Backing::Shared(_, offset) = ram.backing() else { return None };
        let (inode, device, _) = mapped.file_identity()?;
        Some(FileOfBlock { block, inode, device, offset: *offset, bytes: ram.bytes() })
    };
    guest.blocks().iter().zip(mapped.blocks()).enumerate().filter_map(file).collect()
}

/// Returns the processes besides this one and QEMU with a writable mapping of a file of guest RAM: vhost-user back
/// ends, which write past QEMU's page tables.
fn other_mappers(files: &[FileOfBlock], guest: &GuestRam, qemu: i32) -> Result<Vec<Mapper>, String> {
    let mut mappers = Vec::new();
    if files.is_empty() {
        return Ok(mappers);
    }
    let own = std::process::id() as i32;
    let unseen = |error: io::Error| format!("the processes of this host cannot be seen: {error}");
    for process in fs::read_dir("/proc").map_err(unseen)?.filter_map(Result::ok) {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()).filter(|pid| ![own, qemu].contains(pid))
        else {
            continue;
        };
        // An unreadable process is skipped. If it is a back end, `check_count` finds it missing.
        let Ok(blocks) = mapped_by(pid, files, guest) else { continue };
        if let Some(blocks) = blocks.filter(|blocks| blocks.iter().any(|block| !block.parts.is_empty())) {
            let program = fs::read_to_string(process.path().join("comm")).unwrap_or_default().trim().to_owned();
            mappers.push(Mapper { pid, program, blocks });
        }
    }
    Ok(mappers)
}

/// Returns the parts of guest RAM of which process `pid` has writable mappings; none if the process has ended.
fn mapped_by(pid: i32, files: &[FileOfBlock], guest: &GuestRam) -> io::Result<Option<Vec<MappedBlock>>> {
    let maps = match fs::read_to_string(format!("/proc/{pid}/maps")) {
        Ok(maps) => maps,
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let mut blocks: Vec<_> =
        guest.blocks().iter().map(|block| MappedBlock { pages: block.pages(), parts: Vec::new() }).collect();
    maps.lines().for_each(|line| files.iter().for_each(|file| blocks[file.block].parts.extend(file.part(line))));
    Ok(Some(blocks))
}

impl FileOfBlock {
    /// Returns the part of the block that a line of `/proc/PID/maps` maps writable and shared:
    /// `start-end rwxp offset device inode path` (proc_pid_maps(5)).
    fn part(&self, line: &str) -> Option<MappedPart> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let permissions = words.next()?.as_bytes();
        let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end, offset) = (hexadecimal(start)?, hexadecimal(end)?, hexadecimal(words.next()?)?);
        let (major, minor) = words.next()?.split_once(':')?;
        let device = (hexadecimal(major)? as u32, hexadecimal(minor)? as u32);
        let inode: u64 = words.next()?.parse().ok()?;
        let writes = permissions.get(1) == Some(&b'w') && permissions.get(3) == Some(&b's');
        if !writes || device != self.device || inode != self.inode {
            return None;
        }
        // The overlap in the file: from the later start to the earlier end.
        let first = offset.max(self.offset);
        let last = (offset + (end - start)).min(self.offset + self.bytes);
        if first >= last {
            return None;
        }
        let address = |at: u64| (start + (at - offset)) as usize;
        let addresses = address(first)..address(last);
        Some(MappedPart { addresses, first_page: (first - self.offset) / PAGE_SIZE as u64 })
    }
}

/// Fails for every back end but virtiofsd, which writes guest RAM by copying, unless it passes the guest's own
/// `O_DIRECT` on. A back end with a device of its own (SPDK, DPDK) may have pinned guest RAM for DMA, which causes no
/// page fault.
fn refuse_unknown(mapper: &Mapper) -> Result<(), String> {
    let Mapper { pid, program, .. } = mapper;
    if program != "virtiofsd" {
        return Err(format!(
            "process {pid} ({program}) has guest RAM mapped, and whether it writes by DMA into pages that it has pinned cannot be told"
        ));
    }
    let words =
        fs::read(format!("/proc/{pid}/cmdline")).map_err(|error| format!("process {pid} (virtiofsd): {error}"))?;
    let words = String::from_utf8_lossy(&words).replace('_', "-");
    match words.contains("allow-direct-io") {
        true => Err(format!("process {pid} (virtiofsd) reads files into guest RAM by O_DIRECT (--allow-direct-io)")),
        false => Ok(()),
    }
}

/// Returns the memory of a destination's QEMU, in the order of the source's `wanted`. Blocks have the source's lengths
/// only once QEMU has read the list of blocks.
///
/// # Errors
/// A block is missing, or cannot be written from outside.
pub(super) fn of_destination(qmp: &Qmp, wanted: &[Block]) -> Result<(GuestRam, Arc<QemuProcess>), String> {
    let mut listed = list(qmp).map_err(|error| error.to_string())?;
    let place = |name: &str| wanted.iter().position(|block| block.name == name);
    listed.retain(|block| place(&block.name).is_some());
    listed.sort_by_key(|block| place(&block.name));
    let mapped = MappedRam::find(qmp, &listed)?;
    let process = Arc::new(QemuProcess::new(qmp, mapped.process())?);
    let guest = guest_ram(&mapped, &[])?.run_by(Arc::clone(&process) as Arc<dyn GuestProcess>);
    for block in guest.blocks() {
        block.process_write().map_err(|error| error.to_string())?;
    }
    Ok((guest, process))
}

/// Returns the memory of a destination whose blocks were found without its monitor.
///
/// # Errors
/// A block cannot be written from outside.
pub(super) fn of_mapped(mapped: &MappedRam) -> Result<GuestRam, String> {
    let guest = guest_ram(mapped, &[])?;
    for block in guest.blocks() {
        block.process_write().map_err(|error| error.to_string())?;
    }
    Ok(guest)
}

/// Checks that a destination's memory is accessed through QEMU's page tables only, where missing pages cause page
/// faults.
///
/// # Errors
/// Another process maps, or will map, the memory, or QEMU has locked it.
pub(super) fn check_waits(qmp: &Qmp, wanted: &[Block]) -> Result<GuestRam, String> {
    let back_ends = back_ends(qmp, &devices(qmp)?)?;
    if back_ends > 0 {
        return Err(format!(
            "QEMU gives guest RAM to {back_ends} vhost-user back ends (virtiofsd is one), which would read zeros where pages are missing"
        ));
    }
    let mut listed = list(qmp).map_err(|error| error.to_string())?;
    listed.retain(|listed| wanted.iter().any(|block| block.name == listed.name));
    let mapped = MappedRam::find(qmp, &listed)?;
    if mapped.locked() {
        return Err(
            "QEMU has its memory locked, so that none can be given back: start it without -overcommit mem-lock=on"
                .into(),
        );
    }
    let guest = guest_ram(&mapped, &[])?;
    let mappers = other_mappers(&files_of(&guest, &mapped), &guest, mapped.process().pid())?;
    match mappers.first() {
        Some(Mapper { pid, program, .. }) => Err(format!(
            "process {pid} ({program}) has guest RAM mapped too, and would read zeros where pages are missing"
        )),
        None => {
            let process = QemuProcess::new(qmp, mapped.process())?;
            Ok(guest.run_by(Arc::new(process)))
        }
    }
}

/// Returns the memory as RAM blocks. `merged`: where the kernel merges equal pages.
fn guest_ram(mapped: &MappedRam, merged: &[Range<usize>]) -> Result<GuestRam, String> {
    let block = |found: &discover::MappedBlock| -> Result<memory::RamBlock, String> {
        let bytes = found.used.next_multiple_of(PAGE_SIZE as u64) as usize;
        let (name, process, address) = (&found.name, mapped.process(), found.address as usize);
        // A private mapping may have huge pages of a pool; its writes are then tracked per huge page.
        let in_process = |backing| {
            let block = memory::RamBlock::in_process(name, process, address, bytes, backing);
            let block = block.with_page_size(found.page_size as usize);
            if is_merged(merged, &block.addresses()) { block.reporting_unchanged_pages() } else { block }
        };
        Ok(match &found.backing {
            Backing::Anonymous => in_process(memory::Backing::Anonymous),
            Backing::PrivateFile => in_process(memory::Backing::Other),
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
                let block = block.map_err(|error| format!("the file of RAM block {name} cannot be mapped: {error}"))?;
                block.mapped_in(process, address)
            }
        })
    };
    let blocks = mapped.blocks().iter().map(block).collect::<Result<_, _>>()?;
    GuestRam::new(blocks).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileOfBlock {
        let (offset, bytes) = (0x2000, 0x4000);
        FileOfBlock { block: 0, inode: 7, device: (0, 1), offset, bytes }
    }

    #[test]
    fn what_is_resident_or_swapped_of_the_mappings_of_a_block_counts() {
        let smaps = "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nSize:  1024 kB\nRss:   512 kB\nSwap:   4 kB\n\
                     7f0000100000-7f0000200000 rw-p 00000000 00:00 0 \nRss:    16 kB\nVmFlags: rd wr\n\
                     7f0000300000-7f0000400000 rw-p 00000000 00:00 0 \nRss:   999 kB\n";
        assert_eq!(resident(smaps, 0x7f00_0000_0000, 2 << 20), (512 + 4 + 16) << 10);
        assert_eq!(resident(smaps, 0x7f00_0030_0000, 1 << 20), 999 << 10);
        assert_eq!(resident("", 0, 1), 0);
    }

    #[test]
    fn mappings_whose_pages_may_be_merged_are_found() {
        let smaps = "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nRss: 4 kB\nVmFlags: rd wr mr mw me ac mg hg\n\
                     7f0000100000-7f0000200000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr\n\
                     7f0000300000-7f0000400000 rw-p 00000000 00:00 0 \nVmFlags: mg\n";
        let merged = mergeable(smaps);
        assert_eq!(merged, [0x7f00_0000_0000..0x7f00_0010_0000, 0x7f00_0030_0000..0x7f00_0040_0000]);
        for (addresses, expected) in [
            (0x7f00_0010_0000..0x7f00_0020_0000, false),
            (0x7f00_0000_0000..0x7f00_0010_0000, true),
            (0x7f00_0020_0000..0x7f00_0030_1000, true),
        ] {
            assert_eq!(is_merged(&merged, &addresses), expected, "{addresses:#x?}");
        }
    }

    #[test]
    fn only_the_writable_part_of_the_block_counts_in_another_mapping() {
        let part = |line| file().part(line).map(|MappedPart { addresses, first_page }| (addresses, first_page));
        let whole = "10000-18000 rw-s 00000000 00:01 7 /memfd:ram (deleted)";
        assert_eq!(part(whole), Some((0x12000..0x16000, 0)));
        assert_eq!(part("10000-12000 rw-s 00004000 00:01 7 /memfd:ram"), Some((0x10000..0x12000, 2)));
        let others = [
            "10000-12000 rw-s 00000000 00:01 7 /memfd:ram",
            "10000-12000 rw-s 00006000 00:01 7 /memfd:ram",
            "10000-18000 r--s 00000000 00:01 7 /memfd:ram",
            "10000-18000 rw-p 00000000 00:01 7 /memfd:ram",
            "10000-18000 rw-s 00000000 00:02 7 /memfd:ram",
            "10000-18000 rw-s 00000000 00:01 8 /memfd:ram",
            "not a line",
        ];
        for line in others {
            assert_eq!(part(line), None, "{line}");
        }
    }
}
