//! Placing into another process's memory by `process_vm_writev` (Linux 3.2).
//!
//! For anonymous guest RAM, the default of QEMU, there is no file to open; but a process that may ptrace another may
//! write its memory. The kernel faults the pages in on behalf of the target, so huge pages, NUMA policy and cgroup charge
//! are those of the target, and private file mappings are copied on write as if the target had stored itself.
//!
//! The call names the target by process id, and ids are reused. A pidfd taken at the start tells whether that very
//! process still runs; it is asked before each call.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::{Piece, Place, PlaceError, VECTOR, Way, ZEROS, check, check_pages, check_pieces, together};
use crate::PAGE_SIZE;

/// Another process, held so that its id cannot come to mean a different one unnoticed.
///
/// Facts that were looked up by process id (its mappings, its files) after `open` are facts about this process if
/// `check_alive` succeeds after the look-up.
#[derive(Debug)]
pub struct TargetProcess {
    pid: i32,
    pidfd: OwnedFd,
}

impl TargetProcess {
    /// Takes hold of the process that has this id now.
    pub fn open(pid: i32) -> Result<Self, PlaceError> {
        let target = Pid::from_raw(pid).ok_or(PlaceError::Gone { pid })?;
        let pidfd = rustix::process::pidfd_open(target, PidfdFlags::empty()).map_err(|errno| not_held(pid, errno))?;
        Ok(Self { pid, pidfd })
    }

    /// Its id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Says whether the process still runs.
    pub fn check_alive(&self) -> Result<(), PlaceError> {
        let mut polled = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // A pidfd is readable once the process has ended.
        match rustix::event::poll(&mut polled, Some(&now)) {
            Ok(0) | Err(Errno::INTR) => Ok(()),
            Ok(_) => Err(PlaceError::Gone { pid: self.pid }),
            Err(errno) => Err(not_held(self.pid, errno)),
        }
    }
}

/// A range of another process's address space.
#[derive(Debug)]
pub struct ProcessWrite {
    process: Arc<TargetProcess>,
    base: u64,
    size: u64,
}

impl ProcessWrite {
    /// Takes `size` bytes at address `base` of `process`, and asks the kernel whether its memory may be accessed: by
    /// reading one byte, which needs the same permission as writing and changes nothing.
    ///
    /// The caller has made sure that the range is what it takes it for.
    pub fn new(process: &Arc<TargetProcess>, base: u64, size: u64) -> Result<Self, PlaceError> {
        if size == 0 || base.checked_add(size).is_none() {
            return Err(PlaceError::Unusable(format!("{size} bytes at {base:#x} are no range of an address space")));
        }
        let place = Self { process: Arc::clone(process), base, size };
        place.probe()?;
        Ok(place)
    }

    fn probe(&self) -> Result<(), PlaceError> {
        let mut byte = 0_u8;
        let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let remote = libc::iovec { iov_base: self.base as *mut libc::c_void, iov_len: 1 };
        // SAFETY: the kernel writes at most one byte into `byte`, which outlives the call; the remote address belongs to
        // the other process and is checked by the kernel.
        let read = unsafe { libc::process_vm_readv(self.process.pid, &local, 1, &remote, 1, 0) };
        if read < 0 {
            return Err(explain(self.process.pid, self.base, 0, io::Error::last_os_error()));
        }
        self.process.check_alive()
    }

    /// Copies `local` into `remote`, or the other way; the two have the same total length. Goes on after partial copies.
    ///
    /// # Safety
    /// Every entry of `local` describes a live slice of the caller, which may be written where `call` reads the other process.
    unsafe fn transfer(
        &self,
        call: Call,
        mut local: &mut [libc::iovec],
        mut remote: &mut [libc::iovec],
    ) -> Result<(), PlaceError> {
        self.process.check_alive()?;
        while !remote.is_empty() {
            // SAFETY: local entries are as the caller has promised; remote addresses belong to the other process and are
            // checked by the kernel. Both counts are the slices' own lengths.
            let copied = unsafe {
                call(
                    self.process.pid,
                    local.as_ptr(),
                    local.len() as libc::c_ulong,
                    remote.as_ptr(),
                    remote.len() as libc::c_ulong,
                    0,
                )
            };
            if copied > 0 {
                advance(&mut local, copied as usize);
                advance(&mut remote, copied as usize);
                continue;
            }
            let address = remote[0].iov_base as u64;
            let error = if copied == 0 {
                // Never seen; no progress must not become an endless loop.
                io::Error::from(io::ErrorKind::WriteZero)
            } else {
                io::Error::last_os_error()
            };
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            // A process that dies in the middle loses its address space first: say that, not "not mapped".
            self.process.check_alive()?;
            return Err(explain(self.process.pid, address, address - self.base, error));
        }
        Ok(())
    }
}

impl Place for ProcessWrite {
    fn size(&self) -> u64 {
        self.size
    }

    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), PlaceError> {
        check_pieces(pieces, self.size)?;
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut rest = pieces;
        while !rest.is_empty() {
            let mut local = [empty; VECTOR];
            let mut remote = [empty; VECTOR];
            let (mut used, mut ranges, mut taken) = (0, 0, 0);
            for piece in rest {
                if used == VECTOR {
                    break;
                }
                taken += 1;
                if piece.data.is_empty() {
                    continue;
                }
                local[used] =
                    libc::iovec { iov_base: piece.data.as_ptr().cast_mut().cast(), iov_len: piece.data.len() };
                used += 1;
                let address = self.base + piece.offset;
                // Neighbours in the block are one remote range: fewer page table walks.
                match remote[..ranges].last_mut() {
                    Some(last) if last.iov_base as u64 + last.iov_len as u64 == address => {
                        last.iov_len += piece.data.len();
                    }
                    _ => {
                        remote[ranges] =
                            libc::iovec { iov_base: address as *mut libc::c_void, iov_len: piece.data.len() };
                        ranges += 1;
                    }
                }
            }
            // SAFETY: the entries are the pieces' slices, which are only read.
            unsafe { self.transfer(libc::process_vm_writev, &mut local[..used], &mut remote[..ranges])? };
            rest = &rest[taken..];
        }
        Ok(())
    }

    fn read_pages(&self, offsets: &[u64], mut pages: &mut [u8]) -> Result<(), PlaceError> {
        check_pages(offsets, pages, self.size)?;
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut next = 0;
        while next < offsets.len() {
            let mut remote = [empty; VECTOR];
            let (mut ranges, first) = (0, next);
            while ranges < VECTOR && next < offsets.len() {
                let run = together(offsets, next);
                let address = self.base + offsets[next];
                remote[ranges] = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: run * PAGE_SIZE };
                (ranges, next) = (ranges + 1, next + run);
            }
            let (part, rest) = std::mem::take(&mut pages).split_at_mut((next - first) * PAGE_SIZE);
            let mut local = [libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() }];
            // SAFETY: the entry is a slice that is borrowed for writing.
            unsafe { self.transfer(libc::process_vm_readv, &mut local, &mut remote[..ranges])? };
            pages = rest;
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> Result<(), PlaceError> {
        check(offset, len, self.size)?;
        let (mut offset, mut left) = (offset, len);
        while left > 0 {
            let step = left.min(ZEROS.len() as u64);
            self.write(offset, &ZEROS[..step as usize])?;
            offset += step;
            left -= step;
        }
        Ok(())
    }

    fn way(&self) -> Way {
        Way::ProcessWrite
    }
}

/// Drops the first `bytes` bytes from a vector, and entries that became empty.
fn advance(vector: &mut &mut [libc::iovec], mut bytes: usize) {
    let mut whole = 0;
    for entry in vector.iter() {
        if entry.iov_len > bytes {
            break;
        }
        bytes -= entry.iov_len;
        whole += 1;
    }
    let rest = &mut std::mem::take(vector)[whole..];
    if let Some(first) = rest.first_mut() {
        first.iov_base = first.iov_base.cast::<u8>().wrapping_add(bytes).cast();
        first.iov_len -= bytes;
    }
    *vector = rest;
}

fn not_held(pid: i32, errno: Errno) -> PlaceError {
    if errno == Errno::SRCH { PlaceError::Gone { pid } } else { PlaceError::NotHeld { pid, source: errno.into() } }
}

/// `process_vm_writev` or `process_vm_readv`.
type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

fn explain(pid: i32, address: u64, offset: u64, error: io::Error) -> PlaceError {
    match error.raw_os_error() {
        Some(libc::ESRCH) => PlaceError::Gone { pid },
        Some(libc::EPERM | libc::EACCES) => PlaceError::Denied { pid },
        Some(libc::EFAULT) => PlaceError::Unmapped { pid, address },
        Some(libc::ENOMEM) => PlaceError::NoMemory { offset, source: error },
        _ => PlaceError::Io {
            what: "process_vm_writev or process_vm_readv of the guest's memory",
            offset,
            source: error,
        },
    }
}
