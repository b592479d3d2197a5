//! Placing into another process's memory by `/proc/PID/mem` (proc(5)).
//!
//! For anonymous guest RAM, the default of QEMU, there is no file to open; but a process that may ptrace another may
//! write its memory. The kernel faults the pages in on behalf of the target, so huge pages, NUMA policy and cgroup charge
//! are those of the target, and private file mappings are copied on write as if the target had stored itself.
//!
//! Process ids are reused, and a process may replace its program (execve). The file is opened once and refers to the
//! address space that the process had then (`mm_struct`, `proc_mem_open` in the kernel's `fs/proc/base.c`): no other
//! address space is ever read or written. When that address space is gone, the kernel transfers 0 bytes.
//! `process_vm_writev` identifies its target by id in each call, and so could reach an unrelated process: for example a
//! more privileged program, started by whoever ended QEMU.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::{
    Piece, Place, PlaceError, PlacementMethod, ZEROS, check, check_pages, check_pieces, together, write_adjacent,
};
use crate::PAGE_SIZE;

/// Another process and its address space, held by descriptors, so that reuse of its id is noticed.
///
/// Facts that were looked up by process id (its mappings, its files) after `open` are facts about this process if
/// `check_alive` succeeds after the look-up.
#[derive(Debug)]
pub struct TargetProcess {
    pid: i32,
    pidfd: OwnedFd,
    /// Its address space, or the reason why it cannot be accessed.
    memory: Result<File, Errno>,
}

impl TargetProcess {
    /// Opens the process that has this id now.
    pub fn open(pid: i32) -> Result<Self, PlaceError> {
        let target = Pid::from_raw(pid).ok_or(PlaceError::Gone { pid })?;
        let pidfd = rustix::process::pidfd_open(target, PidfdFlags::empty()).map_err(|errno| not_held(pid, errno))?;
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let target = Self { pid, pidfd, memory };
        // The process lived through both calls, so the address space is its own.
        target.check_alive()?;
        Ok(target)
    }

    /// Returns its id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns an error if the process has ended.
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

    /// Returns an error if the process no longer has the address space that it had when it was opened. Reads one byte
    /// at `address`, which is mapped there.
    pub(crate) fn check_address_space(&self, address: usize) -> Result<(), PlaceError> {
        loop {
            match self.memory()?.read_at(&mut [0], address as u64) {
                Ok(0) => return Err(PlaceError::Gone { pid: self.pid }),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The address space exists; whether the address is mapped does not matter.
                Ok(_) | Err(_) => return self.check_alive(),
            }
        }
    }

    fn memory(&self) -> Result<&File, PlaceError> {
        match &self.memory {
            Ok(file) => Ok(file),
            Err(Errno::NOENT | Errno::SRCH) => Err(PlaceError::Gone { pid: self.pid }),
            Err(Errno::PERM | Errno::ACCESS) => Err(PlaceError::Denied { pid: self.pid }),
            Err(errno) => Err(PlaceError::NotHeld { pid: self.pid, source: (*errno).into() }),
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
    /// Uses `size` bytes at address `base` of `process`. Checks that its memory may be accessed by reading one byte:
    /// reading needs the same permission as writing and changes nothing.
    ///
    /// The caller has verified that the range is the intended memory, and that the process may write there: the kernel
    /// does not check that (`FOLL_FORCE`), and overwrites even private read-only pages.
    pub fn new(process: &Arc<TargetProcess>, base: u64, size: u64) -> Result<Self, PlaceError> {
        let end = base.checked_add(size).filter(|end| i64::try_from(*end).is_ok());
        if size == 0 || end.is_none() {
            return Err(PlaceError::Unusable(format!("{size} bytes at {base:#x} are no range of an address space")));
        }
        let place = Self { process: Arc::clone(process), base, size };
        place.read(0, &mut [0])?;
        place.process.check_alive()?;
        Ok(place)
    }

    /// Writes consecutive slices at `offset`, continuing after partial writes.
    fn write_run(&self, mut offset: u64, mut slices: &mut [IoSlice<'_>]) -> Result<(), PlaceError> {
        let memory = self.process.memory()?;
        // Drops leading empty slices, so that 0 bytes written always means that the address space is gone.
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match rustix::io::pwritev(memory, slices, self.base + offset) {
                Ok(0) => return Err(self.gone()),
                Ok(written) => {
                    offset += written as u64;
                    IoSlice::advance_slices(&mut slices, written);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.explain(offset, errno.into())),
            }
        }
        Ok(())
    }

    fn read(&self, mut offset: u64, mut bytes: &mut [u8]) -> Result<(), PlaceError> {
        let memory = self.process.memory()?;
        while !bytes.is_empty() {
            match memory.read_at(bytes, self.base + offset) {
                Ok(0) => return Err(self.gone()),
                Ok(read) => {
                    offset += read as u64;
                    bytes = &mut bytes[read..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.explain(offset, error)),
            }
        }
        Ok(())
    }

    /// Returns the error for a vanished address space: the process has ended, or has replaced its program.
    fn gone(&self) -> PlaceError {
        PlaceError::Gone { pid: self.process.pid }
    }

    fn explain(&self, offset: u64, source: io::Error) -> PlaceError {
        // A dying process loses its address space first: report its end, not "not mapped".
        if let Err(gone) = self.process.check_alive() {
            return gone;
        }
        let pid = self.process.pid;
        match Errno::from_io_error(&source) {
            // The kernel returns one error for several causes (`mem_rw`).
            Some(Errno::IO | Errno::FAULT) => PlaceError::Unmapped { pid, address: self.base + offset },
            Some(Errno::PERM | Errno::ACCESS) => PlaceError::Denied { pid },
            Some(Errno::NOMEM) => PlaceError::NoMemory { offset, source },
            _ => PlaceError::Io { what: "reading or writing the guest's memory by /proc/PID/mem", offset, source },
        }
    }
}

impl Place for ProcessWrite {
    fn size(&self) -> u64 {
        self.size
    }

    fn write_pieces(&self, pieces: &[Piece<'_>]) -> Result<(), PlaceError> {
        check_pieces(pieces, self.size)?;
        write_adjacent(pieces, |offset, slices| self.write_run(offset, slices))
    }

    fn read_pages(&self, offsets: &[u64], mut pages: &mut [u8]) -> Result<(), PlaceError> {
        check_pages(offsets, pages, self.size)?;
        let mut next = 0;
        while next < offsets.len() {
            let run = together(offsets, next);
            let (part, rest) = std::mem::take(&mut pages).split_at_mut(run * PAGE_SIZE);
            self.read(offsets[next], part)?;
            (pages, next) = (rest, next + run);
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

    fn method(&self) -> PlacementMethod {
        PlacementMethod::ProcessWrite
    }
}

fn not_held(pid: i32, errno: Errno) -> PlaceError {
    if errno == Errno::SRCH { PlaceError::Gone { pid } } else { PlaceError::NotHeld { pid, source: errno.into() } }
}
