//! A small wrapper of userfaultfd: the kernel passes page faults of chosen memory to us, or, for dirty tracking, lifts
//! a write protection by itself and records that it did.
//!
//! This file opens a userfaultfd and selects what it watches. [`fill`] places missing pages. [`wait`] receives faults.
//!
//! There are two interfaces. `/dev/userfaultfd` (Linux 6.1): a process that may open the device may use all of it. The
//! system call: without `CAP_SYS_PTRACE` or `vm.unprivileged_userfaultfd=1` only for faults of user space (Linux 5.11);
//! container run times often forbid the call. The device is tried first, then the call.
//!
//! A userfaultfd belongs to the address space in which it was made. Every operation acts on that address space, also
//! when another process holds the descriptor: so a process can watch the memory of another one through a descriptor
//! that was made there ([`Userfault::from_descriptor`]).
//!
//! Source: `include/uapi/linux/userfaultfd.h`, `Documentation/admin-guide/mm/userfaultfd.rst`, `userfaultfd(2)`.

use rustix::io::FdFlags;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use thiserror::Error;

pub mod fill;
pub mod wait;

/// Why a userfaultfd could not be opened, or an operation of it failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UserfaultError {
    /// None could be opened.
    #[error(
        "no userfaultfd: /dev/userfaultfd: {device}; the userfaultfd system call: {call}. \
         Give this user access to /dev/userfaultfd or CAP_SYS_PTRACE, or set vm.unprivileged_userfaultfd=1, and allow \
         the call where a container's seccomp profile forbids it"
    )]
    NotAllowed {
        /// What the device answered.
        device: io::Error,
        /// What the system call answered.
        call: io::Error,
    },
    /// None could be made in the process that guest RAM lies in.
    #[error("no userfaultfd of the guest's process: {0}")]
    NotMade(io::Error),
    /// The kernel has userfaultfd, but not all that is needed.
    #[error("this kernel's userfaultfd lacks {missing}; it needs Linux {since} or newer")]
    Features {
        /// Names of what is missing.
        missing: String,
        /// The first version that has all of it.
        since: &'static str,
    },
    /// An operation on a range of memory failed.
    #[error("cannot {what} addresses {:#x}..{:#x} by userfaultfd: {source}{}", .range.start, .range.end, advice(.source))]
    Range {
        /// What was to be done.
        what: &'static str,
        /// To which addresses.
        range: Range<usize>,
        /// The system's answer.
        source: io::Error,
    },
    /// Page faults could not be read from the kernel.
    #[error("cannot wait for page faults by userfaultfd: {0}")]
    Wait(io::Error),
    /// The kernel reported an event other than a missing page, the only one requested.
    #[error(
        "userfaultfd reported event {event:#x} with flags {flags:#x} instead of a missing page; \
         use one userfaultfd for missing pages only"
    )]
    UnexpectedEvent {
        /// `event` of `struct uffd_msg`.
        event: u8,
        /// `arg.pagefault.flags` of `struct uffd_msg`.
        flags: u64,
    },
    /// The kernel refused the handshake.
    #[error("the userfaultfd handshake failed: {0}")]
    Handshake(io::Error),
    /// A descriptor that was given cannot be used.
    #[error("the given userfaultfd cannot be used: {0}")]
    Given(String),
}

/// Returns the usual cause of an error number of a range operation.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => " (another userfaultfd watches part of it: close that one first)",
        Some(libc::EINVAL) => " (unmapped, not aligned to its page size, or of a kind that userfaultfd cannot watch)",
        Some(libc::EPERM) => " (the mapping is of a file that may not be written)",
        Some(libc::ENOENT) => " (unmapped, more than one mapping, or not watched by this userfaultfd)",
        Some(libc::ESRCH) => " (the process of this memory has ended or has replaced its program)",
        Some(libc::ENOMEM) => " (out of memory, of the memory limit of this cgroup, or of huge pages in the pool)",
        Some(libc::EFAULT) => " (past the end of the file, or the content is not readable)",
        _ => "",
    }
}

/// The faults that are delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    /// Only those of user space; a fault inside a system call or of a KVM guest fails instead. Needs no privilege.
    /// Enough where the kernel resolves all faults by itself, as it does under [`WP_ASYNC`].
    OfUserSpace,
    /// All, including those that the kernel takes on behalf of the process, as KVM does for its guest.
    All,
}

/// Missing pages of hugetlb (Linux 4.11).
pub const MISSING_HUGETLBFS: u64 = 1 << 4;
/// Missing pages of shared memory: memfd, tmpfs (Linux 4.11). Those of anonymous memory need no feature.
pub const MISSING_SHMEM: u64 = 1 << 5;
/// Protection of shared memory and hugetlb (Linux 5.19).
pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// Protection of anonymous pages that do not exist yet (Linux 6.4).
pub const WP_UNPOPULATED: u64 = 1 << 13;
/// A write lifts the protection in the kernel, without waiting (Linux 6.7).
pub const WP_ASYNC: u64 = 1 << 15;

/// Features by name and the version they came with, oldest first.
const FEATURES: [(u64, &str, &str); 5] = [
    (MISSING_HUGETLBFS, "MISSING_HUGETLBFS", "4.11"),
    (MISSING_SHMEM, "MISSING_SHMEM", "4.11"),
    (WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM", "5.19"),
    (WP_UNPOPULATED, "WP_UNPOPULATED", "6.4"),
    (WP_ASYNC, "WP_ASYNC", "6.7"),
];

/// Events of the address space besides page faults: fork, mremap, madvise, munmap. A thread that causes one waits until
/// it is read.
const EVENTS: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6;

/// The kernel's abilities in a range that is watched for missing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Whether [`Userfault::zero`] works there. It does not on hugetlb, nor on shared memory before Linux 4.14: copy zeros.
    pub zero_page: bool,
}

/// An open userfaultfd. Closing its last descriptor ends every registration and protection, and wakes all waiting
/// threads: missing pages read as zero from then on.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    features: u64,
}

impl Userfault {
    /// Opens a userfaultfd that has all of `features`, a sum of this module's constants.
    pub fn open(faults: Faults, features: u64) -> Result<Self, UserfaultError> {
        let fd = match open_by_device(faults) {
            Ok(fd) => fd,
            Err(device) => open_by_call(faults).map_err(|call| UserfaultError::NotAllowed { device, call })?,
        };
        let userfault = Self { fd, features };
        match userfault.handshake(features) {
            Ok(_) => Ok(userfault),
            Err(error) => Err(userfault.handshake_refused(error)),
        }
    }

    /// Wraps a userfaultfd that another program has made: the process whose memory it watches, or a helper that acted
    /// in that process. `features` is a sum of this module's constants.
    ///
    /// The handshake (`UFFDIO_API`) is made here, unless it was made before. A program that has made it must have
    /// requested all of `features`, and no events (fork, mremap, remove, unmap): threads of that process that cause an
    /// event would wait until it is read. More features than `features` are allowed otherwise.
    ///
    /// The descriptor is made non-blocking, as waiting for faults needs it.
    ///
    /// All copies of the descriptor together count as the last descriptor ([`Userfault`]): a program that keeps a copy
    /// keeps the registrations and protections alive when this value is dropped or this process dies. It should close
    /// its copies.
    ///
    /// # Errors
    /// [`UserfaultError::Given`] if the descriptor is no userfaultfd, or its handshake was made with other features;
    /// [`UserfaultError::Features`] if the kernel lacks some.
    pub fn from_descriptor(fd: OwnedFd, features: u64) -> Result<Self, UserfaultError> {
        // A copy that a child of this process inherits would outlive this one.
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|error| UserfaultError::Handshake(error.into()))?;
        // Polling a descriptor that blocks fails (`userfaultfd_poll` in `fs/userfaultfd.c`).
        rustix::io::ioctl_fionbio(&fd, true).map_err(|error| UserfaultError::Handshake(error.into()))?;
        let made = made_with(fd.as_fd())?;
        let mut userfault = Self { fd, features };
        if made == 0 {
            return match userfault.handshake(features) {
                Ok(_) => Ok(userfault),
                Err(error) => Err(userfault.handshake_refused(error)),
            };
        }
        let missing = features & !made;
        if missing != 0 {
            let (names, _) = names_of(missing);
            return Err(UserfaultError::Given(format!(
                "its handshake was made without {names}; make it with these features, or leave it to Sterna"
            )));
        }
        if made & EVENTS & !features != 0 {
            return Err(UserfaultError::Given(
                "its handshake asked for events of fork, mremap, madvise or munmap, and threads that cause one wait until \
                 it is read; make it without events"
                    .to_owned(),
            ));
        }
        userfault.features = made;
        Ok(userfault)
    }

    /// Returns the features of its handshake.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns whether its address space is gone: the process has ended or has replaced its program (execve).
    pub fn is_orphaned(&self) -> bool {
        // Registering and unregistering return ENOMEM then, which has other causes too; this operation returns ESRCH.
        // The range lies below all mappings (`vm.mmap_min_addr`), so nothing changes.
        let nowhere = self.write_protect(crate::PAGE_SIZE..2 * crate::PAGE_SIZE, false);
        matches!(nowhere, Err(UserfaultError::Range { source, .. }) if source.raw_os_error() == Some(libc::ESRCH))
    }

    /// Returns why a handshake that ended in `error` was refused. The refusal did not change the descriptor: query its
    /// features.
    fn handshake_refused(&self, error: io::Error) -> UserfaultError {
        if error.raw_os_error() != Some(libc::EINVAL) {
            return UserfaultError::Handshake(error);
        }
        match self.handshake(0) {
            Ok(offered) => match names_of(self.features & !offered) {
                (missing, Some(since)) => UserfaultError::Features { missing, since },
                (_, None) => UserfaultError::Handshake(error),
            },
            Err(error) => UserfaultError::Handshake(error),
        }
    }

    /// Calls `UFFDIO_API`, which fixes the features, once; returns those that the kernel knows.
    fn handshake(&self, features: u64) -> io::Result<u64> {
        let mut api = Api { api: UFFD_API, features, ioctls: 0 };
        // SAFETY: the operation reads and writes one `struct uffdio_api`.
        unsafe { call(self.fd.as_fd(), UFFDIO_API, (&raw mut api).cast())? };
        Ok(api.features)
    }

    /// Watches `range` for writes to pages that [`Self::write_protect`] protects. The range is aligned to the page size
    /// of its backing.
    ///
    /// Skips parts that are not mapped, without an error, as long as something in the range is mapped.
    pub fn register_write_protect(&self, range: Range<usize>) -> Result<(), UserfaultError> {
        self.register(range, UFFDIO_REGISTER_MODE_WP).map(|_| ())
    }

    /// Watches `range` for accesses to absent pages. A thread that accesses one waits until it is placed ([`fill`]),
    /// and [`Self::wait_faults`] returns the fault. The range is aligned to the page size of its backing. Open the
    /// userfaultfd with [`MISSING_SHMEM`] or [`MISSING_HUGETLBFS`] for such a range.
    ///
    /// Skips parts that are not mapped, without an error, as long as something in the range is mapped.
    pub fn register_missing(&self, range: Range<usize>) -> Result<Registered, UserfaultError> {
        let offered = self.register(range, UFFDIO_REGISTER_MODE_MISSING)?;
        Ok(Registered { zero_page: offered & (1 << (UFFDIO_ZEROPAGE & 0xFF)) != 0 })
    }

    /// Registers `range`. Returns the operations that work in it, bit `n` for the operation of number `n`.
    fn register(&self, range: Range<usize>, mode: u64) -> Result<u64, UserfaultError> {
        let mut register = Register { range: range.clone().into(), mode, ioctls: 0 };
        // SAFETY: the operation reads and writes one `struct uffdio_register`. It changes no content and no permission.
        unsafe { call(self.fd.as_fd(), UFFDIO_REGISTER, (&raw mut register).cast()) }
            .map_err(|source| UserfaultError::Range { what: "watch", range, source })?;
        Ok(register.ioctls)
    }

    /// Stops watching `range`, and wakes all threads that wait for a page of it: absent pages read as zero.
    pub fn unregister(&self, range: Range<usize>) -> Result<(), UserfaultError> {
        let mut argument = RawRange::from(range.clone());
        // SAFETY: the operation reads one `struct uffdio_range`.
        unsafe { call(self.fd.as_fd(), UFFDIO_UNREGISTER, (&raw mut argument).cast()) }
            .map_err(|source| UserfaultError::Range { what: "stop watching", range, source })
    }

    /// Protects the pages of a watched range, or lifts their protection and wakes all threads that wait for that.
    pub fn write_protect(&self, range: Range<usize>, protect: bool) -> Result<(), UserfaultError> {
        let mode = if protect { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = WriteProtect { range: range.clone().into(), mode };
        loop {
            // SAFETY: the operation reads one `struct uffdio_writeprotect`. A write to a protected page waits or, under
            // WP_ASYNC, goes on at once; content stays as it is.
            match unsafe { call(self.fd.as_fd(), UFFDIO_WRITEPROTECT, (&raw mut argument).cast()) } {
                // The address space is changing (userfaultfd(2)): retry.
                Err(source) if source.raw_os_error() == Some(libc::EAGAIN) => {}
                result => {
                    let what = if protect { "write-protect" } else { "unprotect" };
                    return result.map_err(|source| UserfaultError::Range { what, range, source });
                }
            }
        }
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the names of features, and the first version that has all of them; none where this module knows none of
/// them.
fn names_of(features: u64) -> (String, Option<&'static str>) {
    let known = FEATURES.iter().filter(|(bit, ..)| features & bit != 0);
    let names: Vec<&str> = known.clone().map(|(_, name, _)| *name).collect();
    (names.join(" and "), known.map(|(_, _, since)| *since).next_back())
}

/// Returns the features of a userfaultfd's earlier handshake, with internal bits of the kernel; 0 where none was made.
///
/// `UFFDIO_API` returns `EINVAL` both for a repeated handshake and for an unknown feature, so the kernel's description
/// of the descriptor is read: `API:\taa:FEATURES:OPERATIONS`, in hexadecimal (`userfaultfd_show_fdinfo` in
/// `fs/userfaultfd.c`). Any handshake sets a bit there.
fn made_with(fd: BorrowedFd<'_>) -> Result<u64, UserfaultError> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    let info = fs::read_to_string(&path)
        .map_err(|error| UserfaultError::Given(format!("its features cannot be read from {path}: {error}")))?;
    parse_fdinfo(&info).ok_or_else(|| UserfaultError::Given("it is no userfaultfd".to_owned()))
}

fn parse_fdinfo(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("API:"))?;
    // One protocol so far; more would be separated by spaces.
    let mut fields = line.split_whitespace().find_map(|api| api.strip_prefix("aa:"))?.split(':');
    u64::from_str_radix(fields.next()?, 16).ok()
}

/// The flags of the device's operation and of the system call are the same.
fn flags(faults: Faults) -> libc::c_int {
    let user_only = if faults == Faults::OfUserSpace { UFFD_USER_MODE_ONLY } else { 0 };
    libc::O_CLOEXEC | libc::O_NONBLOCK | user_only
}

fn open_by_device(faults: Faults) -> io::Result<OwnedFd> {
    let device = File::open("/dev/userfaultfd")?;
    // SAFETY: the operation takes an integer and returns a new descriptor or an error.
    owned(unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags(faults)) })
}

fn open_by_call(faults: Faults) -> io::Result<OwnedFd> {
    // SAFETY: the call takes an integer and returns a new descriptor or an error.
    owned(unsafe { libc::syscall(libc::SYS_userfaultfd, flags(faults)) } as libc::c_int)
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// # Safety
/// `argument` must point to the structure that `operation` reads and writes.
unsafe fn call(fd: BorrowedFd<'_>, operation: u64, argument: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: as the caller promises.
    if unsafe { libc::ioctl(fd.as_raw_fd(), operation as _, argument) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct RawRange {
    start: u64,
    len: u64,
}

impl From<Range<usize>> for RawRange {
    fn from(range: Range<usize>) -> Self {
        Self { start: range.start as u64, len: range.len() as u64 }
    }
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: RawRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: RawRange,
    mode: u64,
}
const _: () = assert!(size_of::<Api>() == 24 && size_of::<RawRange>() == 16);
const _: () = assert!(size_of::<Register>() == 32 && size_of::<WriteProtect>() == 24);

// Values of `include/uapi/linux/userfaultfd.h`. The header explains why UNREGISTER is "read" where it should be
// "write".
const UFFD_API: u64 = 0xAA;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1 << 0;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const USERFAULTFD_IOC_NEW: u64 = operation(0, 0x00, 0);
const UFFDIO_API: u64 = operation(READ | WRITE, 0x3F, size_of::<Api>());
const UFFDIO_REGISTER: u64 = operation(READ | WRITE, 0x00, size_of::<Register>());
const UFFDIO_UNREGISTER: u64 = operation(READ, 0x01, size_of::<RawRange>());
const UFFDIO_WAKE: u64 = operation(READ, 0x02, size_of::<RawRange>());
const UFFDIO_COPY: u64 = operation(READ | WRITE, 0x03, size_of::<fill::Copy>());
const UFFDIO_ZEROPAGE: u64 = operation(READ | WRITE, 0x04, size_of::<fill::ZeroPage>());
const UFFDIO_WRITEPROTECT: u64 = operation(READ | WRITE, 0x06, size_of::<WriteProtect>());

const WRITE: u64 = 1;
const READ: u64 = 2;

/// `_IOC` of `include/uapi/asm-generic/ioctl.h` with userfaultfd's type.
const fn operation(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xAA << 8 | number
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;
    use crate::test_util::Area;

    #[test]
    fn a_feature_that_no_kernel_has_is_refused_and_known_ones_are_named() {
        let unknown = Userfault::open(Faults::OfUserSpace, 1 << 63).unwrap_err();
        assert!(matches!(unknown, UserfaultError::Handshake(_) | UserfaultError::NotAllowed { .. }), "{unknown}");
        let missing = UserfaultError::Features { missing: "WP_ASYNC".to_owned(), since: "6.7" };
        assert_eq!(missing.to_string(), "this kernel's userfaultfd lacks WP_ASYNC; it needs Linux 6.7 or newer");
    }

    #[test]
    fn a_given_descriptor_is_used_with_its_handshake_or_gets_one_and_others_are_refused() {
        let raw = || match open_by_call(Faults::OfUserSpace) {
            Ok(fd) => Some(fd),
            Err(error) => {
                println!("skipped: the userfaultfd system call is not available here: {error}");
                None
            }
        };
        let wanted = WP_ASYNC | WP_UNPOPULATED;
        let Some(fd) = raw() else { return };
        let fresh = match Userfault::from_descriptor(fd, wanted) {
            Err(error @ UserfaultError::Features { .. }) => return println!("skipped: {error}"),
            fresh => fresh.unwrap(),
        };
        assert_eq!(fresh.features() & wanted, wanted);

        let given = |features| {
            let made = Userfault { fd: raw().unwrap(), features };
            made.handshake(features).unwrap();
            Userfault::from_descriptor(made.fd, wanted)
        };
        assert_eq!(given(wanted | MISSING_SHMEM).unwrap().features() & wanted, wanted);
        let error = given(0).unwrap_err().to_string();
        assert!(error.contains("made without WP_UNPOPULATED and WP_ASYNC"), "{error}");
        let error = given(WP_HUGETLBFS_SHMEM | WP_UNPOPULATED).unwrap_err().to_string();
        assert!(error.contains("made without WP_ASYNC"), "{error}");
        let remove = 1 << 3;
        let error = given(wanted | remove).unwrap_err().to_string();
        assert!(error.contains("asked for events"), "{error}");

        let file = File::open("/proc/self/exe").unwrap();
        let error = Userfault::from_descriptor(file.into(), wanted).unwrap_err();
        assert_eq!(error.to_string(), "the given userfaultfd cannot be used: it is no userfaultfd");
        let unknown = Userfault::from_descriptor(raw().unwrap(), 1 << 63).unwrap_err();
        assert!(matches!(unknown, UserfaultError::Handshake(_)), "{unknown}");
    }

    #[test]
    fn the_kernels_description_of_a_descriptor_is_parsed() {
        let info = "pos:\t0\nflags:\t02004002\nmnt_id:\t17\nino:\t1062\npending:\t0\ntotal:\t0\n";
        assert_eq!(parse_fdinfo(&format!("{info}API:\taa:8000a000:8000000000000ffb\n")), Some(0x8000_A000));
        assert_eq!(parse_fdinfo(&format!("{info}API:\taa:0:8000000000000ffb\n")), Some(0));
        for unknown in ["", "API:\t\n", "API:\tab:1:2\n", "API:\taa:x:2\n"] {
            assert_eq!(parse_fdinfo(&format!("{info}{unknown}")), None, "{unknown:?}");
        }
    }

    #[test]
    fn the_system_call_needs_no_privilege_for_faults_of_user_space() {
        match open_by_call(Faults::OfUserSpace) {
            Ok(_) => {}
            Err(error) => println!("skipped: the userfaultfd system call is not available here: {error}"),
        }
    }

    #[test]
    fn errors_of_a_range_explain_the_cause() {
        let userfault = match Userfault::open(Faults::OfUserSpace, 0) {
            Ok(userfault) => userfault,
            Err(error) => return println!("skipped: {error}"),
        };
        let area = Area::small_pages(4 * PAGE_SIZE);
        let start = area.ptr().addr();
        let unaligned = userfault.register_write_protect(start..start + 100).unwrap_err().to_string();
        assert!(unaligned.starts_with("cannot watch addresses 0x"), "{unaligned}");
        assert!(unaligned.contains("not aligned to its page size"), "{unaligned}");
        let unwatched = userfault.write_protect(start..start + PAGE_SIZE, true).unwrap_err().to_string();
        assert!(unwatched.starts_with("cannot write-protect addresses 0x"), "{unwatched}");

        let other = Userfault::open(Faults::OfUserSpace, 0).unwrap();
        other.register_write_protect(start..start + PAGE_SIZE).unwrap();
        let taken = userfault.register_write_protect(start..start + PAGE_SIZE).unwrap_err().to_string();
        assert!(taken.contains("another userfaultfd watches part of it"), "{taken}");
        other.unregister(start..start + PAGE_SIZE).unwrap();
        userfault.register_write_protect(start..start + PAGE_SIZE).unwrap();
    }
}
