//! A userfaultfd of another process's address space: made in that process, taken out of it, and closed there at once or later.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::FileType;

use crate::{AttachError, Process, StoppedThread};

/// The target of a userfaultfd's link in `/proc/PID/fd`.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";
/// `include/uapi/linux/userfaultfd.h`: faults of user space only.
const UFFD_USER_MODE_ONLY: i32 = 1;
/// `USERFAULTFD_IOC_NEW`: `_IO(0xAA, 0)`.
const USERFAULTFD_IOC_NEW: u64 = 0xAA00;
/// Major number of the kernel's miscellaneous devices, of which `/dev/userfaultfd` is one (`include/uapi/linux/major.h`).
const MISC_MAJOR: u32 = 10;

/// A userfaultfd of another process's address space. It is unused: `UFFDIO_API` comes first (ioctl_userfaultfd(2)).
///
/// The kernel operates on the address space in which the descriptor was made, whichever process uses it. Closing it undoes all
/// registrations.
#[derive(Debug)]
pub struct TakenUserfault {
    /// The descriptor, close-on-exec and non-blocking. It is the only one: none is open in the process.
    pub descriptor: OwnedFd,
    /// How long the main thread of the process was stopped.
    pub stopped: Duration,
}

/// How a userfaultfd is made in another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserfaultOrigin {
    /// By userfaultfd(2) with `UFFD_USER_MODE_ONLY`, which needs no privilege in the process. Asynchronous write protection detects all
    /// writes, also the kernel's; for *missing* pages only faults of user space become messages.
    SystemCall,
    /// By userfaultfd(2) for all faults, including the kernel's: needs CAP_SYS_PTRACE in the process, or `vm.unprivileged_userfaultfd` = 1.
    PrivilegedSystemCall,
    /// By `/dev/userfaultfd`, which was passed to the process and is open there under this number: also for faults of the kernel.
    Device(i32),
}

/// Makes a userfaultfd in the process, takes it, and closes it there. Only `userfaultfd` (or `ioctl`) and `close` run in the process,
/// with its main thread stopped.
///
/// # Errors
/// Those of [`Process::stop`] and [`StoppedThread::system_call`]; [`AttachError::WrongDescriptor`] if the given number is not that of
/// the device; [`AttachError::DescriptorLeft`] if the descriptor was made and could not be closed. In all cases the process runs on.
pub fn take_userfault(process: &Process, origin: UserfaultOrigin) -> Result<TakenUserfault, AttachError> {
    let mut thread = stop_for(process, origin)?;
    let pid = process.pid();
    let number = make(&mut thread, origin)?;
    let taken = take(&thread, pid, number);
    if let Err(wrong @ AttachError::WrongDescriptor { .. }) = taken {
        return Err(leave_open(thread, wrong));
    }
    close_there(&mut thread, pid, number, taken.as_ref().err())?;
    let descriptor = taken?;
    let stopped = thread.resume()?;
    Ok(TakenUserfault { descriptor, stopped })
}

/// A userfaultfd of another process's address space, of which that process has a copy. So it survives this program, and a thread that waits
/// for a missing page continues to wait; without the copy the page would then read as zero (`userfaultfd_release` in `fs/userfaultfd.c`).
#[derive(Debug)]
pub struct SharedUserfault {
    /// The descriptor, close-on-exec and non-blocking, otherwise as [`TakenUserfault::descriptor`].
    pub descriptor: OwnedFd,
    /// The process's own copy.
    pub copy: UserfaultCopy,
    /// How long the main thread of the process was stopped.
    pub stopped: Duration,
}

/// The copy of a userfaultfd in its process. It stays open until it is closed by [`UserfaultCopy::close`], or the process ends.
#[derive(Debug)]
pub struct UserfaultCopy {
    process: Process,
    number: i32,
    /// Device and inode: each userfaultfd has its own (Linux 5.12).
    identity: (u64, u64),
}

/// Makes and takes a userfaultfd as [`take_userfault`] does, but leaves the descriptor open in the process, too.
///
/// # Errors
/// Those of [`take_userfault`]. After an error no descriptor is left in the process.
pub fn share_userfault(process: &Process, origin: UserfaultOrigin) -> Result<SharedUserfault, AttachError> {
    let mut thread = stop_for(process, origin)?;
    let pid = process.pid();
    let number = make(&mut thread, origin)?;
    let taken = take(&thread, pid, number).and_then(|descriptor| Ok((identity(pid, &descriptor)?, descriptor)));
    match taken {
        Ok((identity, descriptor)) => {
            let copy = UserfaultCopy { process: process.clone(), number, identity };
            Ok(SharedUserfault { descriptor, copy, stopped: thread.resume()? })
        }
        Err(wrong @ AttachError::WrongDescriptor { .. }) => Err(leave_open(thread, wrong)),
        Err(error) => {
            close_there(&mut thread, pid, number, Some(&error))?;
            Err(error)
        }
    }
}

impl UserfaultCopy {
    /// Closes the copy in the process. Returns how long the main thread of the process was stopped for that.
    ///
    /// # Errors
    /// [`AttachError::WrongDescriptor`] if the number means another file by now; [`AttachError::DescriptorLeft`] and the errors of
    /// [`Process::stop`] if the copy could not be closed; [`AttachError::Ended`].
    pub fn close(&self) -> Result<Duration, AttachError> {
        let (process, number, pid) = (&self.process, self.number, self.process.pid());
        let mut thread = process.stop()?;
        let there = thread.take_descriptor(number)?;
        if identity(pid, &there)? != self.identity {
            let found = name_of(&there).unwrap_or_else(|| "something else".into());
            return Err(AttachError::WrongDescriptor { pid, number, found, expected: "the userfaultfd made there" });
        }
        drop(there);
        close_there(&mut thread, pid, number, None)?;
        thread.resume()
    }
}

/// Stops the process's main thread, after checking that a given device is `/dev/userfaultfd`.
fn stop_for(process: &Process, origin: UserfaultOrigin) -> Result<StoppedThread<'_>, AttachError> {
    if let UserfaultOrigin::Device(number) = origin {
        check_device(process, number)?;
    }
    process.stop()
}

/// Makes a userfaultfd in the process, and returns its number there.
fn make(thread: &mut StoppedThread<'_>, origin: UserfaultOrigin) -> Result<i32, AttachError> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let made = match origin {
        UserfaultOrigin::SystemCall => {
            thread.system_call(libc::SYS_userfaultfd, [flags | UFFD_USER_MODE_ONLY as u64, 0, 0, 0, 0, 0])
        }
        UserfaultOrigin::PrivilegedSystemCall => thread.system_call(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]),
        UserfaultOrigin::Device(number) => {
            thread.system_call(libc::SYS_ioctl, [number as u64, USERFAULTFD_IOC_NEW, flags, 0, 0, 0])
        }
    };
    match made {
        Ok(number) => Ok(number as i32),
        Err(AttachError::Refused { source, .. })
            if origin == UserfaultOrigin::SystemCall
                && matches!(source.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) =>
        {
            Err(AttachError::Kernel {
                call: "userfaultfd with UFFD_USER_MODE_ONLY",
                since: "5.11 with CONFIG_USERFAULTFD",
            })
        }
        Err(error) => Err(error),
    }
}

/// Takes the userfaultfd of this number.
fn take(thread: &StoppedThread<'_>, pid: i32, number: i32) -> Result<OwnedFd, AttachError> {
    let descriptor = thread.take_descriptor(number)?;
    match name_of(&descriptor) {
        Some(found) if found != USERFAULTFD => {
            Err(AttachError::WrongDescriptor { pid, number, found, expected: USERFAULTFD })
        }
        _ => Ok(descriptor),
    }
}

/// Lets the thread run on, and leaves a descriptor open that is not ours. Returns the reason: another thread may have executed a program
/// meanwhile, in which the number means another file.
fn leave_open(thread: StoppedThread<'_>, wrong: AttachError) -> AttachError {
    match thread.resume() {
        Err(gone @ (AttachError::Ended { .. } | AttachError::Replaced { .. })) => gone,
        _ => wrong,
    }
}

/// Returns the target of a descriptor's link in `/proc/PID/fd`.
fn name_of(descriptor: &OwnedFd) -> Option<String> {
    let found = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok()?;
    Some(found.to_string_lossy().into_owned())
}

fn identity(pid: i32, descriptor: &OwnedFd) -> Result<(u64, u64), AttachError> {
    let status = rustix::fs::fstat(descriptor).map_err(|error| AttachError::Io {
        pid,
        what: "look at a descriptor of it",
        source: error.into(),
    })?;
    Ok((status.st_dev, status.st_ino))
}

/// Closes the userfaultfd of this number in the process. `before` is an earlier error.
fn close_there(
    thread: &mut StoppedThread<'_>,
    pid: i32,
    number: i32,
    before: Option<&AttachError>,
) -> Result<(), AttachError> {
    match thread.system_call(libc::SYS_close, [number as u64, 0, 0, 0, 0, 0]) {
        Ok(_) => Ok(()),
        // The descriptor ended with the process or its program.
        Err(error @ (AttachError::Ended { .. } | AttachError::Replaced { .. })) => Err(error),
        Err(close) => {
            let first = match before {
                None => "nothing else had failed".into(),
                Some(error) => format!("before that: {error}"),
            };
            Err(AttachError::DescriptorLeft { pid, number, what: "a userfaultfd", close: Box::new(close), first })
        }
    }
}

/// Checks that a number is that of `/dev/userfaultfd` in the process, before it is used.
fn check_device(process: &Process, number: i32) -> Result<(), AttachError> {
    let pid = process.pid();
    let failed = |what| move |source| AttachError::Io { pid, what, source };
    let descriptor = process.take_descriptor(number)?;
    let found = rustix::fs::fstat(&descriptor).map_err(|error| failed("look at the descriptor")(error.into()))?;
    let misc = std::fs::read_to_string("/proc/misc").map_err(failed("read /proc/misc"))?;
    let minor = misc.lines().find_map(|line| {
        let (minor, name) = line.trim().split_once(' ')?;
        (name == "userfaultfd").then(|| minor.parse::<u32>().ok())?
    });
    let Some(minor) = minor else {
        return Err(AttachError::Kernel { call: "/dev/userfaultfd", since: "6.1 with CONFIG_USERFAULTFD" });
    };
    let (device, kind) = (found.st_rdev, FileType::from_raw_mode(found.st_mode));
    if kind == FileType::CharacterDevice
        && (rustix::fs::major(device), rustix::fs::minor(device)) == (MISC_MAJOR, minor)
    {
        return Ok(());
    }
    let found = name_of(&descriptor).unwrap_or_else(|| "something else".into());
    Err(AttachError::WrongDescriptor { pid, number, found, expected: "/dev/userfaultfd" })
}
