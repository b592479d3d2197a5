//! A userfaultfd of another process's address space: made there, taken, and closed there.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::FileType;

use crate::{AttachError, Process, StoppedThread};

/// What the descriptor is there, as `/proc/PID/fd` has it.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";
/// `include/uapi/linux/userfaultfd.h`: faults of user space only.
const UFFD_USER_MODE_ONLY: i32 = 1;
/// `USERFAULTFD_IOC_NEW`: `_IO(0xAA, 0)`.
const USERFAULTFD_IOC_NEW: u64 = 0xAA00;
/// Major number of the kernel's miscellaneous devices, of which `/dev/userfaultfd` is one (`include/uapi/linux/major.h`).
const MISC_MAJOR: u32 = 10;

/// A userfaultfd of another process's address space. Nothing has been asked of it yet: `UFFDIO_API` comes first (ioctl_userfaultfd(2)).
///
/// The kernel works on the address space that the descriptor was made in, whichever process uses it. Closing it undoes all that was
/// registered through it.
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
    /// By userfaultfd(2) with `UFFD_USER_MODE_ONLY`, which needs no privilege in the process. Asynchronous write protection sees all
    /// writes, also the kernel's; of *missing* pages only faults of user space become messages.
    SystemCall,
    /// By `/dev/userfaultfd`, which is open in the process under this number (somebody handed it in): faults of the kernel become
    /// messages too.
    Device(i32),
}

/// Makes a userfaultfd in the process, takes it, and closes it there. Only `userfaultfd` (or `ioctl`) and `close` run in the process,
/// with its main thread stopped.
///
/// # Errors
/// Those of [`Process::stop`] and [`StoppedThread::system_call`]; [`AttachError::WrongDescriptor`] where the number of the device is
/// that of something else; [`AttachError::DescriptorLeft`] where the descriptor was made and could not be closed. In all cases the
/// process runs on.
pub fn take_userfault(process: &Process, origin: UserfaultOrigin) -> Result<TakenUserfault, AttachError> {
    if let UserfaultOrigin::Device(number) = origin {
        is_the_device(process, number)?;
    }
    let mut thread = process.stop()?;
    let descriptor = make_and_take(&mut thread, process.pid(), origin)?;
    let stopped = thread.resume()?;
    Ok(TakenUserfault { descriptor, stopped })
}

fn make_and_take(thread: &mut StoppedThread<'_>, pid: i32, origin: UserfaultOrigin) -> Result<OwnedFd, AttachError> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let made = match origin {
        UserfaultOrigin::SystemCall => {
            thread.system_call(libc::SYS_userfaultfd, [flags | UFFD_USER_MODE_ONLY as u64, 0, 0, 0, 0, 0])
        }
        UserfaultOrigin::Device(number) => {
            thread.system_call(libc::SYS_ioctl, [number as u64, USERFAULTFD_IOC_NEW, flags, 0, 0, 0])
        }
    };
    let number = match made {
        Ok(number) => number as i32,
        Err(AttachError::Refused { source, .. })
            if origin == UserfaultOrigin::SystemCall
                && matches!(source.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) =>
        {
            return Err(AttachError::Kernel {
                call: "userfaultfd with UFFD_USER_MODE_ONLY",
                since: "5.11 with CONFIG_USERFAULTFD",
            });
        }
        Err(error) => return Err(error),
    };
    let taken = thread.take_descriptor(number).and_then(|descriptor| {
        let found = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
        match found.as_ref().map(|found| found.to_string_lossy()) {
            Ok(found) if found == USERFAULTFD => Ok(descriptor),
            Ok(found) => {
                Err(AttachError::WrongDescriptor { pid, number, found: found.into_owned(), expected: USERFAULTFD })
            }
            Err(_) => Ok(descriptor),
        }
    });
    if let Err(AttachError::WrongDescriptor { .. }) = taken {
        return taken;
    }
    match thread.system_call(libc::SYS_close, [number as u64, 0, 0, 0, 0, 0]) {
        Ok(_) => taken,
        // With the process, or the program that it ran, the descriptor is gone.
        Err(error @ (AttachError::Ended { .. } | AttachError::Replaced { .. })) => Err(error),
        Err(close) => {
            let first = match taken {
                Ok(_) => "nothing else had failed".into(),
                Err(error) => format!("before that: {error}"),
            };
            Err(AttachError::DescriptorLeft { pid, number, what: "a userfaultfd", close: Box::new(close), first })
        }
    }
}

/// Proves that a number is that of `/dev/userfaultfd` in the process, before anything is asked of it.
fn is_the_device(process: &Process, number: i32) -> Result<(), AttachError> {
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
    let found = match std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())) {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(_) => "something else".into(),
    };
    Err(AttachError::WrongDescriptor { pid, number, found, expected: "/dev/userfaultfd" })
}
