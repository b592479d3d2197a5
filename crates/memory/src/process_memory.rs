//! RAM that lies in another process, such as the anonymous memory of a QEMU: read from outside.
//!
//! `process_vm_readv` copies it, straight into the buffer that is sent from, and is three times as fast as reading
//! `/proc/PID/mem`, which copies each page twice. But it names its target by number, and numbers are reused. So each read is
//! followed by a look at the address space that was held when the process was found ([`TargetProcess`]): as long as that
//! exists, the number has meant this process all the while.

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
    /// Part of the range is not mapped any more, or the kernel does not let it be read.
    #[error("addresses {:#x}..{:#x} of process {pid} cannot be read: {source}", .range.start, .range.end)]
    Refused {
        /// The process.
        pid: i32,
        /// What was to be read.
        range: Range<usize>,
        /// What the kernel said.
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

    /// The same range, to be written.
    pub(crate) fn writer(&self) -> Result<ProcessWrite, PlaceError> {
        ProcessWrite::new(&self.process, self.start as u64, self.bytes as u64)
    }

    /// Fills `buffer` with the bytes from `offset` on, which the process may be writing.
    ///
    /// # Panics
    /// When the range is not within the memory.
    pub(crate) fn read(&self, offset: usize, buffer: &mut [u8]) -> Result<(), ProcessReadError> {
        assert!(offset.checked_add(buffer.len()).is_some_and(|end| end <= self.bytes), "not within the memory");
        let (mut filled, end) = (0, self.start + offset + buffer.len());
        while filled < buffer.len() {
            let at = self.start + offset + filled;
            let refused = |source| ProcessReadError::Refused { pid: self.process.pid(), range: at..end, source };
            match read_once(self.process.pid(), at, &mut buffer[filled..]) {
                Ok(0) => return Err(refused(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => filled += read,
                Err(Errno::INTR) => {}
                Err(errno) => {
                    self.process.check_address_space(at)?;
                    return Err(refused(errno.into()));
                }
            }
        }
        // The page was read just now, so this populates nothing.
        Ok(self.process.check_address_space(self.start + offset)?)
    }
}

/// One process_vm_readv(2): returns how many bytes it has copied.
fn read_once(pid: i32, address: usize, buffer: &mut [u8]) -> Result<usize, Errno> {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: buffer.len() };
    // SAFETY: the kernel writes at most the bytes of `buffer`, which is borrowed for the call; the other address is of
    // another process, whose memory is only read.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
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
    fn what_lies_in_a_process_is_read_from_any_offset() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        area.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 7) as u8);
        let memory = own(&area, 4);
        let mut read = vec![0; 3 * PAGE_SIZE];
        memory.read(100, &mut read).unwrap();
        assert_eq!(read, area.bytes()[100..][..3 * PAGE_SIZE]);
        memory.read(4 * PAGE_SIZE, &mut []).unwrap();
    }

    #[test]
    fn memory_that_is_not_mapped_is_named_by_its_addresses() {
        let area = Area::small_pages(4 * PAGE_SIZE);
        let process = Arc::new(TargetProcess::open(std::process::id() as i32).unwrap());
        let nowhere = ProcessMemory::new(process, PAGE_SIZE, area.bytes().len());
        let error = nowhere.read(0, &mut [0; 16]).unwrap_err().to_string();
        assert!(error.contains("0x1000"), "{error}");
    }

    #[test]
    #[should_panic(expected = "not within the memory")]
    fn nothing_is_read_behind_its_end() {
        let area = Area::small_pages(PAGE_SIZE);
        let _ = own(&area, 1).read(1, &mut [0; PAGE_SIZE]);
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
    fn a_process_that_has_ended_is_told_from_memory_that_is_not_mapped() {
        let (mut child, start) = another();
        let process = Arc::new(TargetProcess::open(child.id() as i32).unwrap());
        let memory = ProcessMemory::new(process, start, PAGE_SIZE);
        child.kill().unwrap();
        child.wait().unwrap();
        let error = memory.read(0, &mut [0; 16]).unwrap_err().to_string();
        assert!(error.contains("has ended or runs another program"), "{error}");
    }
}
