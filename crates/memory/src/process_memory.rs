//! RAM that lies in another process, such as the anonymous memory of a QEMU: read from outside.
//!
//! `process_vm_readv` copies it, straight into the buffer that is sent from, and is three times as fast as reading
//! `/proc/PID/mem`, which copies each page twice. But it identifies its target by id, and ids are reused. So after each
//! read the address space is checked that was opened when the process was found ([`TargetProcess`]): as long as that
//! exists, the id has meant this process all the time.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use rustix::io::Errno;
use thiserror::Error;

use crate::place::{PlaceError, ProcessWrite, TargetProcess};

/// Why memory of another process could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcessReadError {
    /// The process has ended, or runs another program.
    #[error(transparent)]
    Process(#[from] PlaceError),
    /// Part of the range is not mapped any more, or the kernel forbids reading it.
    #[error("addresses {:#x}..{:#x} of process {pid} cannot be read: {source}", .range.start, .range.end)]
    Refused {
        /// The process.
        pid: i32,
        /// The addresses to be read.
        range: Range<usize>,
        /// The kernel's error.
        source: io::Error,
    },
}

/// A range of another process's address space.
#[derive(Clone, Debug)]
pub(crate) struct ProcessMemory {
    process: Arc<TargetProcess>,
    start: usize,
    bytes: usize,
}

impl ProcessMemory {
    pub(crate) fn new(process: Arc<TargetProcess>, start: usize, bytes: usize) -> Self {
        Self { process, start, bytes }
    }

    pub(crate) fn process(&self) -> &Arc<TargetProcess> {
        &self.process
    }

    pub(crate) fn addresses(&self) -> Range<usize> {
        self.start..self.start + self.bytes
    }

    /// Returns the same range for writing.
    pub(crate) fn writer(&self) -> Result<ProcessWrite, PlaceError> {
        ProcessWrite::new(&self.process, self.start as u64, self.bytes as u64)
    }

    /// Fills `buffer` with the bytes of `parts`, one part after another, which the process may be writing. `parts` are
    /// offsets in the memory.
    ///
    /// # Panics
    /// If a part is not within the memory, or the parts together are not as long as `buffer`.
    pub(crate) fn read(
        &self,
        mut parts: impl Iterator<Item = Range<usize>>,
        buffer: &mut [u8],
    ) -> Result<(), ProcessReadError> {
        let (mut filled, mut remote) = (0, Remote::default());
        while filled < buffer.len() {
            if remote.is_empty() {
                for part in parts.by_ref().filter(|part| !part.is_empty()).take(READ_PARTS) {
                    assert!(part.start < part.end && part.end <= self.bytes, "not within the memory");
                    remote.push(self.start + part.start..self.start + part.end);
                }
                assert!(!remote.is_empty(), "the parts are shorter than the buffer");
            }
            let (at, bytes) = (remote.first(), remote.bytes());
            let refused = |source| ProcessReadError::Refused { pid: self.process.pid(), range: at.clone(), source };
            match read_once(self.process.pid(), remote.left(), &mut buffer[filled..][..bytes]) {
                Ok(0) => return Err(refused(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => {
                    filled += read;
                    remote.advance(read);
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    self.process.check_address_space(at.start)?;
                    return Err(refused(errno.into()));
                }
            }
        }
        // Once for all parts: an id that was reused would still mean the other process now.
        Ok(self.process.check_address_space(self.start)?)
    }
}

/// The most parts of another process's memory in one call: the array stays on the stack (2 KiB).
const READ_PARTS: usize = 128;

/// Addresses that remain to be read, in order.
struct Remote {
    parts: [libc::iovec; READ_PARTS],
    next: usize,
    end: usize,
}

impl Default for Remote {
    fn default() -> Self {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { parts: [none; READ_PARTS], next: 0, end: 0 }
    }
}

impl Remote {
    fn is_empty(&self) -> bool {
        self.next == self.end
    }

    /// Adds a part. All of the parts before were read, or there is room behind them.
    fn push(&mut self, addresses: Range<usize>) {
        if self.is_empty() {
            (self.next, self.end) = (0, 0);
        }
        let iov_base = std::ptr::without_provenance_mut(addresses.start);
        self.parts[self.end] = libc::iovec { iov_base, iov_len: addresses.len() };
        self.end += 1;
    }

    fn left(&self) -> &[libc::iovec] {
        &self.parts[self.next..self.end]
    }

    fn bytes(&self) -> usize {
        self.left().iter().map(|part| part.iov_len).sum()
    }

    /// Returns the addresses that are read next.
    fn first(&self) -> Range<usize> {
        self.left().first().map_or(0..0, |part| part.iov_base.addr()..part.iov_base.addr() + part.iov_len)
    }

    /// Removes the first `read` bytes.
    fn advance(&mut self, mut read: usize) {
        while let Some(part) = self.parts[self.next..self.end].first_mut() {
            let step = read.min(part.iov_len);
            part.iov_base = part.iov_base.wrapping_byte_add(step);
            part.iov_len -= step;
            read -= step;
            if part.iov_len > 0 {
                return;
            }
            self.next += 1;
        }
    }
}

/// Calls process_vm_readv(2) once for `remote`, which is as long as `buffer`: returns how many bytes it has copied.
fn read_once(pid: i32, remote: &[libc::iovec], buffer: &mut [u8]) -> Result<usize, Errno> {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the kernel writes at most the bytes of `buffer`, which is borrowed for the call; the other addresses are of
    // another process, whose memory is only read, and `remote` is as many as is said.
    let read =
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    if read < 0 {
        let error = io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(read as usize)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;
    use crate::PAGE_SIZE;
    use crate::test_util::Area;

    fn own(area: &Area, pages: usize) -> ProcessMemory {
        let process = Arc::new(TargetProcess::open(std::process::id() as i32).unwrap());
        ProcessMemory::new(process, area.ptr().addr(), pages * PAGE_SIZE)
    }

    #[test]
    fn memory_of_a_process_is_read_from_any_offset() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        area.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 7) as u8);
        let memory = own(&area, 4);
        let mut read = vec![0; 3 * PAGE_SIZE];
        memory.read(std::iter::once(100..100 + 3 * PAGE_SIZE), &mut read).unwrap();
        assert_eq!(read, area.bytes()[100..][..3 * PAGE_SIZE]);
        memory.read(std::iter::empty(), &mut []).unwrap();
    }

    #[test]
    fn more_parts_than_one_call_takes_are_read_one_after_another() {
        const PAGES: usize = 3 * READ_PARTS + 7;
        let area = Area::small_pages(2 * PAGES * PAGE_SIZE);
        area.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 4099) as u8);
        // Every other page, and an empty part at times.
        let parts = (0..PAGES).flat_map(|page| {
            let start = 2 * page * PAGE_SIZE;
            [start..start + PAGE_SIZE, start..start + if page % 5 == 0 { 0 } else { 1 }]
        });
        let expected: Vec<u8> = parts.clone().flat_map(|part| area.bytes()[part].to_vec()).collect();
        let mut read = vec![0; expected.len()];
        own(&area, 2 * PAGES).read(parts, &mut read).unwrap();
        assert!(read == expected);
    }

    #[test]
    fn a_part_that_is_not_mapped_is_named_also_behind_others() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        let memory = own(&area, 4);
        let start = memory.addresses().start;
        let process = Arc::clone(memory.process());
        // From the null page to the end of the area: its beginning is not mapped.
        let all = ProcessMemory::new(process, PAGE_SIZE, start + 4 * PAGE_SIZE - PAGE_SIZE);
        let at = start - PAGE_SIZE;
        let parts = [at..at + PAGE_SIZE, 0..PAGE_SIZE, at + PAGE_SIZE..at + 2 * PAGE_SIZE];
        let error = all.read(parts.into_iter(), &mut [0; 3 * PAGE_SIZE]).unwrap_err().to_string();
        assert!(error.contains("0x1000..0x2000"), "{error}");
    }

    #[test]
    fn memory_that_is_not_mapped_is_named_by_its_addresses() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        let process = Arc::new(TargetProcess::open(std::process::id() as i32).unwrap());
        let nowhere = ProcessMemory::new(process, PAGE_SIZE, area.bytes().len());
        let error = nowhere.read(std::iter::once(0..16), &mut [0; 16]).unwrap_err().to_string();
        assert!(error.contains("0x1000"), "{error}");
    }

    #[test]
    #[should_panic(expected = "not within the memory")]
    fn nothing_is_read_behind_its_end() {
        let area = Area::small_pages(PAGE_SIZE);
        let _ = own(&area, 1).read(std::iter::once(1..1 + PAGE_SIZE), &mut [0; PAGE_SIZE]);
    }

    /// A process that waits for its input, and a page of it.
    fn another() -> (Child, usize) {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
        let stack = maps.lines().find(|line| line.ends_with("[stack]") || line.contains(" rw-p ")).unwrap();
        let start = usize::from_str_radix(stack.split_once('-').unwrap().0, 16).unwrap();
        (child, start)
    }

    #[test]
    fn a_process_that_has_ended_is_distinguished_from_memory_that_is_not_mapped() {
        let (mut child, start) = another();
        let process = Arc::new(TargetProcess::open(child.id() as i32).unwrap());
        let memory = ProcessMemory::new(process, start, PAGE_SIZE);
        child.kill().unwrap();
        child.wait().unwrap();
        let error = memory.read(std::iter::once(0..16), &mut [0; 16]).unwrap_err().to_string();
        assert!(error.contains("has ended or runs another program"), "{error}");
    }
}
