//! Post-copy of a destination QEMU: performs the library's calls in QEMU's process, and checks beforehand that this is
//! possible.
//!
//! ```text
//!  /dev/userfaultfd, opened here ── getfd ──> QEMU: ioctl USERFAULTFD_IOC_NEW, by injection ── pidfd_getfd ──> register, copy, wake: here
//!  stale pages of private memory ───────────> QEMU: process_madvise(MADV_DONTNEED), by injection      of shared memory: a hole in the file
//! ```
//! KVM handles a guest's page faults in the kernel, so the userfaultfd must cover kernel faults, too. It is made by the
//! device or, if this process may not open the device, by the system call, if QEMU has the privilege.
//!
//! QEMU keeps a copy of the descriptor until no page is missing. So a guest whose `sterna receive` was killed waits for
//! its memory for ever, which [`waits_for_memory`] shows to an operator's `recover`; it never reads zeros in place of
//! missing pages.
//!
//! A balloon at the destination may free pages meanwhile. A missing page that is not stale is filled with zeros here,
//! as QEMU expects; a stale page cannot be freed, because it is not present.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_attach::{AttachError, Process, UserfaultCopy, UserfaultOrigin, advise, share_userfault};
use sterna_engine::destination::Destination;
use sterna_memory::guest_process::{Advice, GuestProcess};
use sterna_memory::place::TargetProcess;
use sterna_wire::control::{Hello, Mode};
use sterna_wire::switchover::ProcessIdentity;

use super::{eligible, ram};
use crate::qmp::Qmp;

const DEVICE: &str = "/dev/userfaultfd";
/// QEMU's name for the device's descriptor while the userfaultfd is made.
const DESCRIPTOR: &str = "sterna-userfaultfd";
/// How long QEMU's main thread may be stopped in total to free memory; the guest is paused meanwhile.
const FREEING_TIME: Duration = Duration::from_secs(10);
/// How long QEMU's main thread may be stopped for one `madvise` call about huge pages.
const ADVISING_TIME: Duration = Duration::from_secs(5);

/// Returns why the post-copy that a source requests is not possible; `None` if it is possible, or not requested.
pub(in crate::gateway) fn refusal(qmp: &Qmp, hello: &Hello) -> Option<String> {
    if hello.mode != Mode::Direct || !Destination::wants_post_copy(hello) {
        return None;
    }
    let reason = check(qmp, hello).err()?;
    Some(format!("post-copy is not possible at the destination: {reason}"))
}

fn check(qmp: &Qmp, hello: &Hello) -> Result<(), String> {
    eligible::check_nothing_pins(qmp)?;
    let guest = ram::check_waits(qmp, &hello.machine.blocks)?;
    Destination::post_copy_refusal(&guest).map_or(Ok(()), Err)?;
    let process = guest.guest().ok_or("its process is not known")?.process().pid();
    if let Err(device) = open_device() {
        check_system_call(process, &device)?;
    }
    // A trial now shows whether system calls can be injected; after the guest's memory was sent it would be too late.
    let try_one = || -> Result<(), AttachError> {
        let process = Process::open(process)?;
        let mut thread = process.stop()?;
        thread.system_call(libc::SYS_getpid, [0; 6])?;
        thread.resume().map(drop)
    };
    try_one().map_err(|error| error.to_string())
}

/// Opens the device. Returns it and its device number.
fn open_device() -> io::Result<(File, u64)> {
    let device = File::options().read(true).write(true).open(DEVICE)?;
    let metadata = device.metadata()?;
    match metadata.file_type().is_char_device() {
        true => Ok((device, metadata.rdev())),
        false => Err(io::Error::other("it is not the device of that name")),
    }
}

/// Checks that process `pid` may make a userfaultfd for all faults by the system call (userfaultfd(2)).
fn check_system_call(pid: i32, device: &io::Error) -> Result<(), String> {
    let all_may = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|value| value.trim() == "1");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    const CAP_SYS_PTRACE: u64 = 1 << 19;
    let may =
        capabilities.is_some_and(|set| u64::from_str_radix(set.trim(), 16).is_ok_and(|set| set & CAP_SYS_PTRACE != 0));
    match all_may || may {
        true => Ok(()),
        false => Err(format!(
            "accesses to missing pages of QEMU's memory cannot be watched: {DEVICE} cannot be opened ({device}), and QEMU (process {pid}) has no \
             CAP_SYS_PTRACE. Give the user of `sterna receive` access to {DEVICE} (Linux 6.1 or newer), or set vm.unprivileged_userfaultfd to 1"
        )),
    }
}

/// Returns whether this process waits for missing memory: its post-copy has not ended.
///
/// # Errors
/// Its mappings cannot be read.
pub(in crate::gateway) fn waits_for_memory(process: ProcessIdentity) -> io::Result<bool> {
    // proc_pid_smaps(5): `um` marks memory registered with a userfaultfd for missing pages. Names of mapped files may be any bytes.
    let smaps = fs::read(format!("/proc/{}/smaps", process.pid))?;
    let smaps = String::from_utf8_lossy(&smaps);
    let mut flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    let waits = flags.any(|flags| flags.split_whitespace().any(|flag| flag == "um"));
    Ok(waits && sterna_engine::process::lives(process))
}

/// A destination QEMU's process, in which the library's calls on its address space are performed.
#[derive(Debug)]
pub(super) struct QemuProcess {
    qmp: Qmp,
    target: Arc<TargetProcess>,
    process: Process,
    copy: Mutex<Option<UserfaultCopy>>,
    freed: Mutex<FreedMemory>,
}

/// The cost of freeing memory: how many ranges, and how long the thread was stopped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FreedMemory {
    pub(super) ranges: usize,
    pub(super) stopped: Duration,
}

impl QemuProcess {
    /// Opens the process `target`, whose monitor is `qmp`.
    ///
    /// # Errors
    /// The process has ended.
    pub(super) fn new(qmp: &Qmp, target: &Arc<TargetProcess>) -> Result<Self, String> {
        let process = Process::open(target.pid()).map_err(|error| error.to_string())?;
        target.check_alive().map_err(|error| error.to_string())?;
        let (copy, freed) = Default::default();
        Ok(Self { qmp: qmp.clone(), target: Arc::clone(target), process, copy, freed })
    }

    /// Returns the cost of freeing private memory so far.
    pub(super) fn freed(&self) -> FreedMemory {
        *self.freed.lock().expect("no thread panics with it locked")
    }

    fn copy(&self) -> MutexGuard<'_, Option<UserfaultCopy>> {
        self.copy.lock().expect("no thread panics with it locked")
    }

    /// Makes the userfaultfd by the device, whose descriptor QEMU has for this time.
    fn make_by_device(&self) -> Result<(OwnedFd, UserfaultCopy), String> {
        let (device, number) = open_device().map_err(|error| format!("{DEVICE}: {error}"))?;
        let given = self.qmp.execute_with_descriptor("getfd", json!({ "fdname": DESCRIPTOR }), device.as_fd());
        given.map_err(|error| format!("QEMU does not take {DEVICE}: {error}"))?;
        let made = self.number_of(number).and_then(|there| self.make(UserfaultOrigin::Device(there)));
        if let Err(error) = self.qmp.execute("closefd", json!({ "fdname": DESCRIPTOR })) {
            tracing::warn!(%error, "QEMU keeps {DEVICE} open");
        }
        made
    }

    /// Returns the number of a descriptor by which QEMU has the device open. If there are several, any will do.
    fn number_of(&self, device: u64) -> Result<i32, String> {
        let failed = |error: io::Error| format!("the files of QEMU cannot be seen: {error}");
        let files = fs::read_dir(format!("/proc/{}/fd", self.target.pid())).map_err(failed)?;
        let is_it = |path: &std::path::Path| {
            fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device() && found.rdev() == device)
        };
        let number =
            files.flatten().filter(|file| is_it(&file.path())).find_map(|file| file.file_name().to_str()?.parse().ok());
        number.ok_or_else(|| format!("QEMU does not have {DEVICE} open, although it received the descriptor"))
    }

    fn make(&self, origin: UserfaultOrigin) -> Result<(OwnedFd, UserfaultCopy), String> {
        let shared = share_userfault(&self.process, origin).map_err(|error| error.to_string())?;
        tracing::debug!(stopped = ?shared.stopped, ?origin, "QEMU has a userfaultfd");
        Ok((shared.descriptor, shared.copy))
    }
}

impl GuestProcess for QemuProcess {
    fn process(&self) -> &Arc<TargetProcess> {
        &self.target
    }

    fn open_userfault(&self) -> io::Result<OwnedFd> {
        let made = self.make_by_device().or_else(|device| {
            let made = self.make(UserfaultOrigin::PrivilegedSystemCall);
            made.map_err(|call| io::Error::other(format!("{device}; by the system call: {call}")))
        });
        let (descriptor, copy) = made?;
        *self.copy() = Some(copy);
        Ok(descriptor)
    }

    fn close_userfault(&self) -> io::Result<()> {
        let Some(copy) = self.copy().take() else { return Ok(()) };
        match copy.close() {
            Ok(stopped) => {
                tracing::debug!(?stopped, "QEMU's userfaultfd is closed");
                Ok(())
            }
            // The descriptor ended with the process or its program.
            Err(AttachError::Ended { .. } | AttachError::Replaced { .. }) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn advise(&self, addresses: &[Range<usize>], advice: Advice) -> io::Result<()> {
        let ranges: Vec<_> = addresses.iter().map(|range| range.start as u64..range.end as u64).collect();
        let call = |limit| {
            advise(&self.process, &ranges, advice.code(), limit).map_err(|error| match error {
                // The library needs the error number.
                AttachError::Refused { source, .. } => source,
                error => io::Error::other(error),
            })
        };
        if advice != Advice::DontNeed {
            return call(ADVISING_TIME).map(drop);
        }
        // The lock admits one call at a time, since a process has one main thread.
        let mut freed = self.freed.lock().expect("no thread panics with it locked");
        let begun = Instant::now();
        let outcome = call(FREEING_TIME.saturating_sub(freed.stopped));
        freed.stopped += begun.elapsed();
        freed.ranges += ranges.len();
        tracing::debug!(ranges = ranges.len(), ?outcome, "memory given back in QEMU");
        outcome.map(drop)
    }
}
