//! A file whose reads can be held: each read waits until a test releases it, with the reader's pages pinned if the reader opened the file
//! with `O_DIRECT`. So a test controls the moment at which a slow disk answers; a fixed delay is possible, too.
//!
//! The file lies in a file system of its own, which this process serves by FUSE. It implements the part of `linux/fuse.h` (7.31) that one
//! file in one directory needs. Needs root, `/dev/fuse` and the right to mount.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::time::Timespec;
use tempfile::TempDir;

use crate::Error;

/// The file's name.
const NAME: &str = "disk";
/// Maximum bytes of a read or write in one request.
const MAX_TRANSFER: usize = 1 << 20;
/// Maximum bytes of a request: the header, its arguments, and the written data.
const REQUEST_BYTES: usize = MAX_TRANSFER + 4096;

/// A read that is held or delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldRead {
    /// Its offset in the file, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u32,
    /// The request's number.
    unique: u64,
}

/// A file system of one file, whose reads can be held. Clones share it. When the last clone is dropped, it is unmounted, and held reads fail.
/// The kernel also fails them if this process dies.
#[derive(Clone, Debug)]
pub struct HeldDisk {
    served: Arc<Served>,
}

#[derive(Debug)]
struct Served {
    server: Arc<Server>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    mounted: Mounted,
    path: PathBuf,
}

/// The directory on which the file system is mounted.
#[derive(Debug)]
struct Mounted(TempDir);

impl Drop for Mounted {
    fn drop(&mut self) {
        // Detached: a process that is still ending may have the file open.
        if let Err(error) = unmount(self.0.path(), UnmountFlags::DETACH) {
            tracing::warn!(%error, path = %self.0.path().display(), "a file system in user space stays mounted");
        }
    }
}

impl HeldDisk {
    /// Serves the file `image`; nothing is held yet.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is no `/dev/fuse` or this user may not mount; [`Error::Io`] if the image cannot be opened.
    pub fn serve(image: &Path) -> Result<HeldDisk, Error> {
        let backing =
            File::options().read(true).write(true).open(image).map_err(Error::path("opening the image", image))?;
        let size = backing.metadata().map_err(Error::path("reading the size of", image))?.size();
        let unavailable =
            |reason: String| Error::Unavailable { what: "a file system in user space (FUSE)".into(), reason };
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|error| unavailable(format!("/dev/fuse: {error}")))?;
        rustix::io::ioctl_fionbio(&device, true).map_err(|error| unavailable(format!("/dev/fuse: {error}")))?;
        let directory = tempfile::Builder::new()
            .prefix("sterna-held-")
            .tempdir()
            .map_err(Error::io("making a directory to mount on"))?;
        // For all users: a test may run QEMU as another user.
        let data = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={MAX_TRANSFER}",
            device.as_raw_fd()
        );
        let data = std::ffi::CString::new(data).expect("there is no zero in it");
        mount("sterna-held", directory.path(), "fuse", MountFlags::NOSUID | MountFlags::NODEV, data.as_c_str())
            .map_err(|error| unavailable(format!("mounting: {error}")))?;
        let mounted = Mounted(directory);
        let path = mounted.0.path().join(NAME);
        let stop = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| Error::Io { action: "making an eventfd".into(), source: error.into() })?;
        let stop = Arc::new(stop);
        let server = Arc::new(Server { device, backing, size, state: Mutex::default(), changed: Condvar::new() });
        let thread = std::thread::Builder::new()
            .name("lab-held-disk".into())
            .spawn({
                let (server, stop) = (Arc::clone(&server), Arc::clone(&stop));
                move || server.serve(&stop)
            })
            .map_err(Error::io("starting the thread of a held disk"))?;
        Ok(HeldDisk { served: Arc::new(Served { server, stop, thread: Some(thread), mounted, path }) })
    }

    /// Returns the path of the file, which has the image's length and is readable and writable by all users.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.served.path
    }

    /// Holds the next `count` reads that begin in the bytes `within`, in the order of their arrival. All others are answered; a read of
    /// more than 1 MiB arrives in pieces. This replaces an earlier order, whose held reads stay held.
    pub fn hold(&self, count: usize, within: Range<u64>) {
        self.state().order = Some((count, within));
    }

    /// Holds every read from now on.
    pub fn hold_all(&self) {
        self.hold(usize::MAX, 0..u64::MAX);
    }

    /// From now on, answers reads that are not held `delay` after their arrival, in the order of their arrival. If a guest reads by several
    /// threads, reads are then in flight nearly all the time. Zero is no delay.
    pub fn delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// Holds no further read. Those that are held stay held.
    pub fn stop_holding(&self) {
        self.state().order = None;
    }

    /// Returns the reads that are held now, in the order of their arrival.
    #[must_use]
    pub fn held(&self) -> Vec<HeldRead> {
        self.state().held.iter().copied().collect()
    }

    /// Returns the reads that are held or delayed now: first the held ones.
    #[must_use]
    pub fn in_flight(&self) -> Vec<HeldRead> {
        let state = self.state();
        state.held.iter().chain(state.delayed.iter().map(|(_, read)| read)).copied().collect()
    }

    /// Returns how many reads were answered since the start.
    #[must_use]
    pub fn answered(&self) -> u64 {
        self.state().answered
    }

    /// Waits until at least `count` reads are held.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `limit`, with the held reads.
    pub fn wait_held(&self, count: usize, limit: Duration) -> Result<Vec<HeldRead>, Error> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        while state.held.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waiting_for = format!("{count} held reads");
                return Err(Error::Timeout { waiting_for, limit, last: format!("held: {:?}", state.held) });
            }
            let waited = self.served.server.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(state.held.iter().copied().collect())
    }

    /// Answers one held read, with the image's present content. Returns whether the read was still held.
    pub fn release(&self, read: HeldRead) -> bool {
        let mut state = self.state();
        let Some(place) = state.held.iter().position(|held| *held == read) else { return false };
        state.held.remove(place);
        drop(state);
        self.served.server.answer_read(read);
        true
    }

    /// Answers all reads that are held or delayed now, and returns their number. An order to [hold](HeldDisk::hold) further reads and a
    /// [delay](HeldDisk::delay) stay in force.
    pub fn release_all(&self) -> usize {
        let mut state = self.state();
        let mut reads = std::mem::take(&mut state.held);
        reads.extend(state.delayed.drain(..).map(|(_, read)| read));
        drop(state);
        reads.iter().for_each(|&read| self.served.server.answer_read(read));
        reads.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.served.server.state()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The eventfd is empty, so this neither waits nor fails.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // Then the last descriptor of the device is closed, which ends the connection and fails what is held, and the directory is unmounted.
        tracing::debug!(path = %self.mounted.0.path().display(), "a held disk ends");
    }
}

#[derive(Debug)]
struct Server {
    device: File,
    backing: File,
    size: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    order: Option<(usize, Range<u64>)>,
    held: VecDeque<HeldRead>,
    delay: Duration,
    /// Delayed reads, each with the time of its answer.
    delayed: VecDeque<(Instant, HeldRead)>,
    answered: u64,
}

impl State {
    /// Returns whether a read that begins at `offset` is to be held.
    fn must_hold(&mut self, offset: u64) -> bool {
        match &mut self.order {
            Some((count, within)) if *count > 0 && within.contains(&offset) => {
                *count -= 1;
                true
            }
            _ => false,
        }
    }
}

/// The operations of `linux/fuse.h` that are answered; others are refused with `ENOSYS`, after which the kernel does without them.
mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

const ROOT_NODE: u64 = 1;
const FILE_NODE: u64 = 2;
const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;
/// Reads and writes of the file never go through the kernel's page cache.
const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// Several reads of a caller may be in flight: else Linux AIO waits for each in `io_submit`.
const ASYNC_DIO: u32 = 1 << 15;
/// Writes, and with `MAX_PAGES` also reads, may be longer than 4 and 128 KiB.
const BIG_WRITES: u32 = 1 << 5;
const MAX_PAGES: u32 = 1 << 22;
/// Reads that may be in flight at once by Linux AIO.
const MAX_BACKGROUND: u16 = 1024;
/// Seconds for which the kernel keeps names and attributes, which never change.
const VALID: u64 = 3600;

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests until `stop` is written to, or the file system is unmounted.
    fn serve(&self, stop: &OwnedFd) {
        let mut request = vec![0; REQUEST_BYTES];
        loop {
            let next = self
                .answer_delayed()
                .map(|next| Timespec { tv_sec: next.as_secs().cast_signed(), tv_nsec: next.subsec_nanos().into() });
            let mut events = [PollFd::new(&self.device, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match poll(&mut events, next.as_ref()) {
                Err(Errno::INTR) => continue,
                Err(error) => return tracing::error!(%error, "a held disk ends: its thread cannot wait"),
                Ok(_) if !events[1].revents().is_empty() => return,
                Ok(_) => {}
            }
            match (&self.device).read(&mut request) {
                Ok(length) => self.answer(&request[..length]),
                // ENOENT: the request was cancelled before it was read.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                // ENODEV: unmounted.
                Err(error) => return tracing::debug!(%error, "a held disk ends"),
            }
        }
    }

    /// Answers the delayed reads whose time has come. Returns the time until the next one.
    fn answer_delayed(&self) -> Option<Duration> {
        loop {
            let mut state = self.state();
            let &(when, read) = state.delayed.front()?;
            let left = when.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                return Some(left);
            }
            state.delayed.pop_front();
            drop(state);
            self.answer_read(read);
        }
    }

    fn answer(&self, request: &[u8]) {
        let Some((header, arguments)) = request.split_at_checked(IN_HEADER) else { return };
        let (operation, unique, node) = (u32_at(header, 4), u64_at(header, 8), u64_at(header, 16));
        let answer = match operation {
            // These have no answer. A read that is interrupted stays held.
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return,
            opcode::READ => return self.read(unique, arguments),
            opcode::INIT => self.init(arguments),
            opcode::LOOKUP if node == ROOT_NODE && arguments == format!("{NAME}\0").as_bytes() => Ok(self.entry()),
            opcode::LOOKUP => Err(Errno::NOENT),
            opcode::GETATTR | opcode::SETATTR => Ok(self.attributes(node)),
            opcode::OPEN => Ok(opened(FOPEN_DIRECT_IO)),
            opcode::OPENDIR => Ok(opened(0)),
            opcode::WRITE => self.write(arguments),
            opcode::FSYNC | opcode::FLUSH | opcode::RELEASE | opcode::RELEASEDIR => Ok(Vec::new()),
            opcode::STATFS => Ok(statistics()),
            _ => Err(Errno::NOSYS),
        };
        match answer {
            Ok(body) => self.reply(unique, 0, &body),
            Err(errno) => self.reply(unique, -errno.raw_os_error(), &[]),
        }
    }

    fn init(&self, arguments: &[u8]) -> Result<Vec<u8>, Errno> {
        let (major, offered) = (u32_at(arguments, 0), u32_at(arguments, 12));
        if major != 7 {
            return Err(Errno::PROTO);
        }
        let mut answer = Fields::default();
        answer.u32(7).u32(31).u32(0).u32(offered & (ASYNC_DIO | BIG_WRITES | MAX_PAGES));
        answer.u16(MAX_BACKGROUND).u16(MAX_BACKGROUND).u32(MAX_TRANSFER as u32).u32(1);
        answer.u16((MAX_TRANSFER / 4096) as u16).zeros(64 - 30);
        Ok(answer.0)
    }

    fn entry(&self) -> Vec<u8> {
        let mut answer = Fields::default();
        answer.u64(FILE_NODE).u64(0).u64(VALID).u64(VALID).u32(0).u32(0);
        self.attribute_fields(&mut answer, FILE_NODE);
        answer.0
    }

    fn attributes(&self, node: u64) -> Vec<u8> {
        let mut answer = Fields::default();
        answer.u64(VALID).u32(0).u32(0);
        self.attribute_fields(&mut answer, node);
        answer.0
    }

    fn attribute_fields(&self, answer: &mut Fields, node: u64) {
        let (size, mode, links) = if node == ROOT_NODE { (0, 0o040_755, 2) } else { (self.size, 0o100_666, 1) };
        // Number, length, blocks of 512 bytes, times; then their nanoseconds, mode, links, user, group, device, block size, flags.
        answer.u64(node).u64(size).u64(size / 512).zeros(3 * 8);
        answer.zeros(3 * 4).u32(mode).u32(links).zeros(3 * 4).u32(4096).u32(0);
    }

    fn write(&self, arguments: &[u8]) -> Result<Vec<u8>, Errno> {
        let (offset, length) = (u64_at(arguments, 8), u32_at(arguments, 16));
        let data = arguments.get(40..40 + length as usize).ok_or(Errno::INVAL)?;
        if offset.checked_add(u64::from(length)).is_none_or(|end| end > self.size) {
            return Err(Errno::NOSPC);
        }
        self.backing.write_all_at(data, offset).map_err(|_| Errno::IO)?;
        let mut answer = Fields::default();
        answer.u32(length).u32(0);
        Ok(answer.0)
    }

    fn read(&self, unique: u64, arguments: &[u8]) {
        let read = HeldRead { offset: u64_at(arguments, 8), length: u32_at(arguments, 16), unique };
        let mut state = self.state();
        if state.must_hold(read.offset) {
            state.held.push_back(read);
            drop(state);
            return self.changed.notify_all();
        }
        if !state.delay.is_zero() {
            let when = Instant::now() + state.delay;
            return state.delayed.push_back((when, read));
        }
        drop(state);
        self.answer_read(read);
    }

    fn answer_read(&self, read: HeldRead) {
        let length = u64::from(read.length).min(self.size.saturating_sub(read.offset)).min(MAX_TRANSFER as u64);
        let mut data = vec![0; length as usize];
        // Counted before the reader can go on.
        self.state().answered += 1;
        match self.backing.read_exact_at(&mut data, read.offset) {
            Ok(()) => self.reply(read.unique, 0, &data),
            Err(_) => self.reply(read.unique, -Errno::IO.raw_os_error(), &[]),
        }
    }

    fn reply(&self, unique: u64, error: i32, body: &[u8]) {
        let mut answer = Fields(Vec::with_capacity(OUT_HEADER + body.len()));
        answer.u32((OUT_HEADER + body.len()) as u32).u32(error.cast_unsigned()).u64(unique);
        answer.0.extend_from_slice(body);
        // ENOENT if the request was cancelled, ENODEV if the file system is unmounted: then no process waits for the answer.
        if let Err(error) = (&self.device).write(&answer.0) {
            tracing::debug!(%error, unique, "an answer of a held disk was not delivered");
        }
    }
}

fn opened(flags: u32) -> Vec<u8> {
    let mut answer = Fields::default();
    answer.u64(0).u32(flags).u32(0);
    answer.0
}

/// Returns an answer to `statfs` with all zeros: the values do not matter, but some programs fail without an answer.
fn statistics() -> Vec<u8> {
    let mut answer = Fields::default();
    answer.zeros(5 * 8).u32(4096).u32(255).u32(4096).zeros(7 * 4);
    answer.0
}

/// The bytes of an answer, in the order of the fields in `linux/fuse.h`, in this machine's byte order.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn zeros(&mut self, bytes: usize) -> &mut Self {
        self.0.resize(self.0.len() + bytes, 0);
        self
    }
}

/// Returns a field of a request; 0 beyond the request's end, which a kernel never sends.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |field| u32::from_ne_bytes(std::array::from_fn(|byte| field[byte])))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |field| u64::from_ne_bytes(std::array::from_fn(|byte| field[byte])))
}
