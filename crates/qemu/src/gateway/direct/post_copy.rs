//! Post-copy of a destination QEMU: what the library needs done in its process, and whether that is possible.
//!
//! ```text
//!  /dev/userfaultfd, opened here ── getfd ──> QEMU: ioctl USERFAULTFD_IOC_NEW, by injection ── pidfd_getfd ──> register, copy, wake: here
//!  stale pages of private memory ───────────> QEMU: process_madvise(MADV_DONTNEED), by injection      of shared memory: a hole in the file
//! ```
//! KVM takes a guest's page faults in the kernel, so the userfaultfd must be one for all faults: by the device, or where it may not be
//! opened here, by the system call, where QEMU itself has the right to it.
//!
//! QEMU keeps a copy of the descriptor until nothing is missing any more. So a guest whose `sterna receive` was killed waits for its
//! memory for good, and [`waits_for_memory`] tells an operator's `recover` so; it never reads zeros in its place.
//!
//! A balloon at the destination may give pages back meanwhile: what is missing then and not stale is filled with zeros here, as QEMU would
//! have it, and a stale page is not there to be given back.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna::destination::Destination;
use sterna_attach::{AttachError, Process, UserfaultCopy, UserfaultOrigin, advise, share_userfault};
use sterna_memory::guest_process::{Advice, GuestProcess};
use sterna_memory::place::TargetProcess;
use sterna_wire::control::{Hello, Mode};
use sterna_wire::switchover::ProcessIdentity;

use super::{eligible, ram};
use crate::qmp::Qmp;

const DEVICE: &str = "/dev/userfaultfd";
/// What QEMU knows the device by, for a moment.
const DESCRIPTOR: &str = "sterna-userfaultfd";
/// How long QEMU's main thread may be stopped to give memory back, all together: the guest is paused meanwhile.
const GIVING_BACK_TIME: Duration = Duration::from_secs(10);
/// How long it may be stopped for one call about huge pages.
const ADVISING_TIME: Duration = Duration::from_secs(5);

/// Why a source that wants post-copy cannot have it; none if it can, or does not want it.
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
    // By then it is known that a system call can be run there: nothing of that may be found out once the guest's memory was sent.
    let try_one = || -> Result<(), AttachError> {
        let process = Process::open(process)?;
        let mut thread = process.stop()?;
        thread.system_call(libc::SYS_getpid, [0; 6])?;
        thread.resume().map(drop)
    };
    try_one().map_err(|error| error.to_string())
}

/// The device, open, and its number.
fn open_device() -> io::Result<(File, u64)> {
    let device = File::options().read(true).write(true).open(DEVICE)?;
    let metadata = device.metadata()?;
    match metadata.file_type().is_char_device() {
        true => Ok((device, metadata.rdev())),
        false => Err(io::Error::other("it is not the device of that name")),
    }
}

/// Whether process `pid` may make a userfaultfd for all faults by the system call (userfaultfd(2)).
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

/// Whether memory of this process is missing and waited for: one whose post-copy has not come to its end.
pub(in crate::gateway) fn waits_for_memory(process: ProcessIdentity) -> bool {
    // proc_pid_smaps(5): `um` is of a userfaultfd that is registered for missing pages.
    let waits = fs::read_to_string(format!("/proc/{}/smaps", process.pid)).is_ok_and(|smaps| {
        let mut flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
        flags.any(|flags| flags.split_whitespace().any(|flag| flag == "um"))
    });
    waits && sterna::process::lives(process)
}

/// A destination QEMU, in whose process the library has done what only that process may do.
#[derive(Debug)]
pub(super) struct QemuProcess {
    qmp: Qmp,
    target: Arc<TargetProcess>,
    process: Process,
    copy: Mutex<Option<UserfaultCopy>>,
    given_back: Mutex<GivenBack>,
}

/// What giving memory back has cost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GivenBack {
    pub(super) ranges: usize,
    pub(super) stopped: Duration,
}

impl QemuProcess {
    /// The process `target`, which `qmp` is the monitor of.
    ///
    /// # Errors
    /// It has ended.
    pub(super) fn new(qmp: &Qmp, target: &Arc<TargetProcess>) -> Result<Self, String> {
        let process = Process::open(target.pid()).map_err(|error| error.to_string())?;
        target.check_alive().map_err(|error| error.to_string())?;
        let (copy, given_back) = Default::default();
        Ok(Self { qmp: qmp.clone(), target: Arc::clone(target), process, copy, given_back })
    }

    /// What giving private memory back has cost so far; the guest was stopped meanwhile.
    pub(super) fn given_back(&self) -> GivenBack {
        *self.given_back.lock().expect("nobody panics with it")
    }

    fn copy(&self) -> MutexGuard<'_, Option<UserfaultCopy>> {
        self.copy.lock().expect("nobody panics with it")
    }

    /// By the device, which is handed to QEMU and taken back from it.
    fn by_device(&self) -> Result<(OwnedFd, UserfaultCopy), String> {
        let (device, number) = open_device().map_err(|error| format!("{DEVICE}: {error}"))?;
        let given = self.qmp.execute_with_descriptor("getfd", json!({ "fdname": DESCRIPTOR }), device.as_fd());
        given.map_err(|error| format!("QEMU does not take {DEVICE}: {error}"))?;
        let made = self.number_of(number).and_then(|there| self.make(UserfaultOrigin::Device(there)));
        if let Err(error) = self.qmp.execute("closefd", json!({ "fdname": DESCRIPTOR })) {
            tracing::warn!(%error, "QEMU keeps {DEVICE} open");
        }
        made
    }

    /// The number under which QEMU has the device open. Which does not matter where there are several.
    fn number_of(&self, device: u64) -> Result<i32, String> {
        let failed = |error: io::Error| format!("the files of QEMU cannot be seen: {error}");
        let files = fs::read_dir(format!("/proc/{}/fd", self.target.pid())).map_err(failed)?;
        let is_it = |path: &std::path::Path| {
            fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device() && found.rdev() == device)
        };
        let number =
            files.flatten().filter(|file| is_it(&file.path())).find_map(|file| file.file_name().to_str()?.parse().ok());
        number.ok_or_else(|| format!("QEMU does not have {DEVICE} open, which it was given"))
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
        let made = self.by_device().or_else(|device| {
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
            // With the process, or the program that it ran, the descriptor is gone.
            Err(AttachError::Ended { .. } | AttachError::Replaced { .. }) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn advise(&self, addresses: &[Range<usize>], advice: Advice) -> io::Result<()> {
        let ranges: Vec<_> = addresses.iter().map(|range| range.start as u64..range.end as u64).collect();
        let give = |limit| {
            advise(&self.process, &ranges, advice.code(), limit).map_err(|error| match error {
                // What it means depends on the number.
                AttachError::Refused { source, .. } => source,
                error => io::Error::other(error),
            })
        };
        if advice != Advice::DontNeed {
            return give(ADVISING_TIME).map(drop);
        }
        // One call at a time, as a process has one main thread.
        let mut given_back = self.given_back.lock().expect("nobody panics with it");
        let begun = Instant::now();
        let outcome = give(GIVING_BACK_TIME.saturating_sub(given_back.stopped));
        given_back.stopped += begun.elapsed();
        given_back.ranges += ranges.len();
        tracing::debug!(ranges = ranges.len(), ?outcome, "memory given back in QEMU");
        outcome.map(drop)
    }
}
