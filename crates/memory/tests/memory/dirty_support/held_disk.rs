//! A disk whose reads are held until they are released: a loop device in a cgroup that may read only a few bytes a
//! second. With it, a read by `O_DIRECT` is in flight, with its memory pinned, for as long as a test needs.

use super::memory_file;
use rustix::fs::{OFlags, open};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use sterna_memory::PAGE_SIZE;

/// Bytes of the disk, all of which one read requests.
pub const BYTES: usize = 16 * PAGE_SIZE;
/// The content of the disk.
pub const CONTENT: u8 = b'b';
/// So slow that a read takes a minute if it is not released.
const BYTES_PER_SECOND: usize = BYTES / 64;

pub struct HeldDisk {
    /// The loop device ends with its last descriptor.
    _device: File,
    pub path: PathBuf,
    group: PathBuf,
    /// The file of limits, the text that sets one, and the text that removes it, by the version of cgroups.
    limit: (&'static str, String, String),
    is_version_1: bool,
}

impl Drop for HeldDisk {
    fn drop(&mut self) {
        let _ = self.release();
        let _ = fs::remove_dir(&self.group);
    }
}

impl HeldDisk {
    /// Makes a disk with a cgroup of this name, one for each test. The error says what this machine lacks.
    pub fn new(name: &str) -> Result<Self, String> {
        let (root, is_version_1) = cgroups().ok_or("there is no cgroup hierarchy that limits block I/O")?;
        let group = root.join(format!("sterna-{name}-{}", std::process::id()));
        fs::create_dir(&group).map_err(|error| format!("cannot make cgroup {}: {error}", group.display()))?;
        let made = Self::with_group(group.clone(), is_version_1);
        if made.is_err() {
            let _ = fs::remove_dir(group);
        }
        made
    }

    fn with_group(group: PathBuf, is_version_1: bool) -> Result<Self, String> {
        let (path, device) = loop_device().map_err(|error| format!("no loop device: {error}"))?;
        let number = device.metadata().map_err(|error| error.to_string())?.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        let limit = if is_version_1 {
            ("blkio.throttle.read_bps_device", format!("{number} {BYTES_PER_SECOND}"), format!("{number} 0"))
        } else {
            ("io.max", format!("{number} rbps={BYTES_PER_SECOND}"), format!("{number} rbps=max"))
        };
        let disk = Self { _device: device, path, group, limit, is_version_1 };
        disk.hold().map_err(|error| format!("this cgroup does not limit block I/O ({}): {error}", disk.limit.0))?;
        Ok(disk)
    }

    /// Holds new reads.
    pub fn hold(&self) -> io::Result<()> {
        fs::write(self.group.join(self.limit.0), &self.limit.1)
    }

    /// Holds the reads of process `pid`.
    pub fn hold_process(&self, pid: i32) -> io::Result<()> {
        fs::write(self.group.join("cgroup.procs"), pid.to_string())
    }

    /// Holds the reads that `submit` begins in this thread. Only in version 1 can a thread have its own cgroup.
    pub fn hold_thread<T>(&self, submit: impl FnOnce() -> T) -> Result<T, String> {
        if !self.is_version_1 {
            return Err("a thread cannot be alone in a cgroup of version 2 that limits block I/O".to_owned());
        }
        let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
        let own = fs::read_to_string("/proc/thread-self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.split_once(":blkio:")).map_or("/", |(_, path)| path);
        let home = self.group.parent().unwrap().join(own.trim_start_matches('/')).join("tasks");
        fs::write(self.group.join("tasks"), &thread).map_err(|error| error.to_string())?;
        let result = submit();
        fs::write(home, &thread).map_err(|error| error.to_string())?;
        Ok(result)
    }

    /// Releases held and new reads.
    pub fn release(&self) -> io::Result<()> {
        fs::write(self.group.join(self.limit.0), &self.limit.2)
    }
}

/// Returns the directory for cgroups that limit block I/O, and whether they are of version 1.
fn cgroups() -> Option<(PathBuf, bool)> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut version_2 = None;
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, directory, kind, options, ..] = fields[..] else { continue };
        if kind == "cgroup" && options.split(',').any(|option| option == "blkio") {
            return Some((directory.into(), true));
        }
        let controllers =
            || fs::read_to_string(Path::new(directory).join("cgroup.subtree_control")).unwrap_or_default();
        if kind == "cgroup2" && controllers().split_whitespace().any(|controller| controller == "io") {
            version_2 = Some((directory.into(), false));
        }
    }
    version_2
}

/// Makes a loop device whose content is [`CONTENT`].
fn loop_device() -> io::Result<(PathBuf, File)> {
    let file = memory_file(BYTES / PAGE_SIZE);
    file.write_all_at(&[CONTENT; BYTES], 0)?;
    let control = File::options().read(true).write(true).open("/dev/loop-control")?;
    loop {
        // SAFETY: the operation takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = File::options().read(true).write(true).open(&path)?;
        // `struct loop_config`: the descriptor, and `lo_flags` in the part that is a `struct loop_info64`.
        let mut config = [0_u32; 76];
        config[0] = file.as_raw_fd() as u32;
        config[15] = LO_FLAGS_AUTOCLEAR;
        // SAFETY: the operation reads one `struct loop_config` of 304 bytes.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, config.as_ptr()) } == 0 {
            return Ok((path, device));
        }
        let error = io::Error::last_os_error();
        // Another test was faster.
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
}

/// A read by `O_DIRECT` that the kernel performs asynchronously (io_submit(2)).
pub struct Read {
    context: libc::c_ulong,
    _disk: OwnedFd,
}

impl Read {
    /// Begins to read the whole disk to `address`.
    ///
    /// # Safety
    /// The [`BYTES`] at the address are memory of this process that is mapped until the read has ended and that only
    /// atomics access.
    pub unsafe fn begin(disk: &Path, address: usize) -> io::Result<Self> {
        let disk = open(disk, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
        let mut context = 0;
        // SAFETY: the call stores one context.
        if unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut request = Request {
            data: 0,
            key_and_flags: [0; 2],
            operation: IOCB_CMD_PREAD,
            priority: 0,
            file: disk.as_raw_fd() as u32,
            buffer: address as u64,
            bytes: BYTES as u64,
            offset: 0,
            reserved: 0,
            flags: [0; 2],
        };
        let requests = [&raw mut request];
        // SAFETY: one request, copied by the call; the caller guarantees the memory to which it writes.
        if unsafe { libc::syscall(libc::SYS_io_submit, context, 1, requests.as_ptr()) } != 1 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context, _disk: disk })
    }

    /// Waits until the read has ended, and returns the bytes read.
    pub fn end(self) -> i64 {
        let mut event = [0_i64; 4];
        loop {
            let (none, at) = (std::ptr::null::<u8>(), event.as_mut_ptr());
            // SAFETY: the call stores one `struct io_event` of 32 bytes.
            let got = unsafe { libc::syscall(libc::SYS_io_getevents, self.context, 1, 1, at, none) };
            match got {
                1 => break,
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => panic!("{}", io::Error::last_os_error()),
            }
        }
        // SAFETY: this value's context, with no request in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
        event[2]
    }
}

/// `struct iocb` of `include/uapi/linux/aio_abi.h`.
#[repr(C)]
struct Request {
    data: u64,
    key_and_flags: [u32; 2],
    operation: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: [u32; 2],
}
const _: () = assert!(size_of::<Request>() == 64);
const IOCB_CMD_PREAD: u16 = 0;

// `include/uapi/linux/loop.h`.
const LOOP_CONFIGURE: u64 = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LOOP_CTL_GET_FREE: u64 = 0x4C82;
