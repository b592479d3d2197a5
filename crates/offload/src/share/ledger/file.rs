//! The ledger's file: a page of slots on a file system in memory, one file for each device.
//!
//! It is read and written by system calls rather than mapped: another process may truncate the file, and a mapping
//! would then kill this process (`SIGBUS`). A batch costs two calls.
//!
//! A slot belongs to the process that holds the open-file-description lock on its first byte (fcntl_locking(2)): the
//! kernel releases it when the last descriptor is closed, however the process ends. The descriptor is closed on exec. A
//! forked child keeps the slot held, but the slot does not change any more, and the other processes ignore it.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};

use super::slot::{Slot, Table, WORDS};

/// Processes that can share one device.
pub const SLOTS: usize = 128;
/// Bytes of a slot: a cache line of its own.
const SLOT_BYTES: usize = 64;
const FILE_BYTES: usize = SLOT_BYTES * (1 + SLOTS);
/// "sterna" and the version of the file format.
const MAGIC: u64 = u64::from_le_bytes(*b"sternaL1");
/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of linux/magic.h.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// Why a ledger cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A device's name must be usable as a file name here.
    #[error("'{0}' is no name of a device")]
    Name(String),
    /// A system call failed.
    #[error("cannot {what} the ledger {path}: {source}", path = path.display())]
    Io {
        /// The failed action.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Other users could write into it, or it is no plain file.
    #[error("the ledger {path} is not to be trusted: {why}; remove it, or have root own it", path = path.display())]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The ledger must not lie on a disk, as every batch writes to it.
    #[error("the ledger {path} would lie on a disk; give a directory on tmpfs, such as /dev/shm", path = path.display())]
    NotInMemory {
        /// The file.
        path: PathBuf,
    },
    /// The file of another program, or of another version.
    #[error("{path} is no ledger of this version; remove it when no process uses it", path = path.display())]
    NotALedger {
        /// The file.
        path: PathBuf,
    },
    /// All slots are in use.
    #[error("all {SLOTS} slots of the ledger {path} are held", path = path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
}

/// An open ledger with a slot in it.
#[derive(Debug)]
pub struct LedgerFile {
    file: OwnedFd,
    path: PathBuf,
    own: usize,
    /// The number of slots that are read each time: beyond these, no slot was in use at the last full read.
    reach: AtomicUsize,
    reads: AtomicUsize,
}

/// One read in this many covers all slots. The lowest free slot is taken, so used slots lie together.
const FULL_READ: usize = 32;

impl LedgerFile {
    /// Opens the ledger of `device` in `directory`, creates it if necessary, and takes a free slot.
    ///
    /// A new file belongs to this user alone. For processes of several users, root creates an empty one (mode 660 and
    /// their group), which the first process initialises.
    ///
    /// # Errors
    /// [`OpenError`]: without a ledger, use [`DelayBased`](super::super::DelayBased).
    pub fn open(directory: &Path, device: &str) -> Result<Self, OpenError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if device.is_empty() || device.len() > 64 || device.starts_with('.') || !device.bytes().all(plain) {
            return Err(OpenError::Name(device.into()));
        }
        let path = directory.join(format!("{device}.ledger"));
        let io = |what, source: rustix::io::Errno| OpenError::Io { what, path: path.clone(), source: source.into() };
        let open = || rustix::fs::open(&path, OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        let file = match open() {
            Err(rustix::io::Errno::NOENT) => {
                make(directory, &path).map_err(|error| io("make", error))?;
                open()
            }
            other => other,
        };
        let file = file.map_err(|error| io("open", error))?;
        check(&file, &path).map_err(|error| error.unwrap_or_else(|errno| io("look at", errno)))?;
        let mut own = None;
        for slot in 0..SLOTS {
            if lock(&file, slot, libc::F_WRLCK).map_err(|error| io("lock", error))? {
                own = Some(slot);
                break;
            }
        }
        let Some(own) = own else { return Err(OpenError::Full { path }) };
        let ledger = Self { file, path, own, reach: AtomicUsize::new(SLOTS), reads: AtomicUsize::new(0) };
        ledger.put(own, &Slot::default());
        Ok(ledger)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn put(&self, index: usize, slot: &Slot) {
        let mut bytes = [0u8; SLOT_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(slot.words()) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        // A failed write shows the others too little, as the missing slot of a process without a ledger does.
        let _ = rustix::io::pwrite(&self.file, &bytes, offset(index));
    }
}

fn offset(index: usize) -> u64 {
    ((1 + index) * SLOT_BYTES) as u64
}

/// Returns the content of a ledger without owners of slots.
fn empty() -> [u8; FILE_BYTES] {
    let mut bytes = [0u8; FILE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..16].copy_from_slice(&(SLOTS as u64).to_le_bytes());
    bytes
}

/// Writes the file completely before it gets its name: no process sees half a file, and of two creators one wins.
fn make(directory: &Path, path: &Path) -> Result<(), rustix::io::Errno> {
    let mode = Mode::RUSR | Mode::WUSR;
    let file = rustix::fs::open(directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode)?;
    if rustix::io::pwrite(&file, &empty(), 0)? != FILE_BYTES {
        return Err(rustix::io::Errno::NOSPC);
    }
    let own = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|_| rustix::io::Errno::INVAL)?;
    match rustix::fs::linkat(CWD, own.as_c_str(), CWD, path, AtFlags::SYMLINK_FOLLOW) {
        Err(rustix::io::Errno::EXIST) => Ok(()),
        other => other,
    }
}

fn check(file: &OwnedFd, path: &Path) -> Result<(), Result<OpenError, rustix::io::Errno>> {
    let stat = rustix::fs::fstat(file).map_err(Err)?;
    let untrusted = |why| Err(Ok(OpenError::Untrusted { path: path.into(), why }));
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return untrusted("it is no plain file");
    }
    if stat.st_uid != 0 && stat.st_uid != rustix::process::geteuid().as_raw() {
        return untrusted("it belongs to another user");
    }
    if stat.st_mode & 0o002 != 0 {
        return untrusted("everybody may write to it");
    }
    let system = rustix::fs::fstatfs(file).map_err(Err)?;
    #[allow(clippy::unnecessary_cast, reason = "the type differs between architectures")]
    let kind = system.f_type as i64;
    if !IN_MEMORY.contains(&kind) {
        return Err(Ok(OpenError::NotInMemory { path: path.into() }));
    }
    if stat.st_size == 0 {
        // An empty file that root has created. Two processes that initialise it at once write the same head; slots are
        // written under their locks only.
        rustix::io::pwrite(file, &empty()[..SLOT_BYTES], 0).map_err(Err)?;
    }
    let mut head = [0u8; 16];
    let read = rustix::io::pread(file, &mut head, 0).map_err(Err)?;
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    if read < 16 || word(0) != MAGIC || word(8) != SLOTS as u64 {
        return Err(Ok(OpenError::NotALedger { path: path.into() }));
    }
    Ok(())
}

/// Locks or unlocks the first byte of a slot for this open file. Returns false if another process holds it.
fn lock(file: impl AsFd, slot: usize, kind: libc::c_int) -> Result<bool, rustix::io::Errno> {
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset(slot) as libc::off_t,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open for as long as it is borrowed, and the kernel only reads the range.
    let outcome = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if outcome == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        code => Err(rustix::io::Errno::from_raw_os_error(code.unwrap_or(libc::EIO))),
    }
}

impl Table for LedgerFile {
    fn slots(&self) -> usize {
        SLOTS
    }

    fn own(&self) -> usize {
        self.own
    }

    fn read(&self, slots: &mut [Slot]) {
        let full = self.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(FULL_READ);
        let reach = if full { SLOTS } else { self.reach.load(Ordering::Relaxed).min(SLOTS) };
        let mut bytes = [0u8; SLOT_BYTES * SLOTS];
        let wanted = &mut bytes[..SLOT_BYTES * reach];
        // Missing bytes read as free slots.
        let read = rustix::io::pread(&self.file, &mut *wanted, offset(0)).unwrap_or(0);
        wanted[read..].fill(0);
        slots.iter_mut().skip(reach).for_each(|slot| *slot = Slot::default());
        let mut last = self.own;
        for (index, (slot, bytes)) in slots.iter_mut().zip(wanted.chunks_exact(SLOT_BYTES)).enumerate() {
            let mut words = [0u64; WORDS];
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
                *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            }
            *slot = Slot::from_words(words);
            if slot.weight != 0 {
                last = last.max(index);
            }
        }
        if full {
            self.reach.store(last + 1, Ordering::Relaxed);
        }
    }

    fn write(&self, slot: &Slot) {
        self.put(self.own, slot);
    }

    fn alive(&self, index: usize) -> bool {
        // A process that gets the lock of a slot may write it: clear the slot, then release it.
        if index == self.own || index >= SLOTS {
            return true;
        }
        match lock(&self.file, index, libc::F_WRLCK) {
            Ok(true) => {
                self.put(index, &Slot::default());
                let _ = lock(&self.file, index, libc::F_UNLCK);
                false
            }
            _ => true,
        }
    }
}
