//! Runs madvise(2) in another process, for that process's memory.
//!
//! The kernel accepts some advice only from the process itself: `MADV_DONTNEED`, `MADV_NOHUGEPAGE`, `MADV_HUGEPAGE`. A call costs some tens
//! of microseconds of turns between two programs, so thousands of ranges are not passed one by one: process_madvise(2) accepts up to 1024
//! ranges in one call, and since Linux 6.13 all advice if a process advises itself (`process_madvise_remote_valid` in `mm/madvise.c` is checked
//! for other processes only). Its vector must lie in that process's memory: in a mapping that is made for it and unmapped afterwards. On
//! older kernels madvise(2) is run for each range.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use libc::c_int;

use crate::{AttachError, Process, StoppedThread};

/// Maximum number of ranges in one call, from the kernel (`UIO_MAXIOV`).
const MAX_RANGES: usize = 1024;
/// Bytes of a `struct iovec`.
const ENTRY: usize = 16;
/// Maximum bytes of the ranges in one call: the kernel takes up to 0.3 s to free that many pages of 4 KiB, and a call may take 2 s.
const MAX_BYTES: u64 = 1 << 30;
/// Up to this number of ranges, single calls are as fast as a vector with its five extra calls.
const MAX_SINGLE_CALLS: usize = 6;

/// The cost of giving advice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Advised {
    /// How long the main thread of the process was stopped.
    pub stopped: Duration,
    /// System calls that ran in the process.
    pub calls: u32,
}

/// Makes the process give the kernel `advice` (of madvise(2)) about `ranges` of its memory, with its main thread stopped meanwhile. Ranges
/// are whole pages, in addresses of the process.
///
/// # Errors
/// Those of [`Process::stop`] and [`StoppedThread::system_call`]; [`AttachError::Slow`] after `limit`, and [`AttachError::Refused`] if
/// the kernel refuses a range. Some of the ranges may then have been advised.
pub fn advise(
    process: &Process,
    ranges: &[Range<u64>],
    advice: c_int,
    limit: Duration,
) -> Result<Advised, AttachError> {
    let parts: Vec<Range<u64>> = ranges.iter().flat_map(parts).collect();
    if parts.is_empty() {
        return Ok(Advised::default());
    }
    let mut session = Session { thread: process.stop()?, process, calls: 0 };
    let deadline = Instant::now() + limit;
    let slow = |done: usize| AttachError::Slow { pid: process.pid(), limit, done, of: parts.len() };
    let mut done = if parts.len() > MAX_SINGLE_CALLS { session.by_vector(&parts, advice, deadline)? } else { 0 };
    // The vector call handles all ranges before the deadline, or none if this kernel does not support it.
    if done > 0 && done < parts.len() {
        return Err(slow(done));
    }
    while let Some(part) = parts.get(done) {
        if Instant::now() >= deadline {
            return Err(slow(done));
        }
        session.call(libc::SYS_madvise, [part.start, part.end - part.start, advice as u64, 0, 0, 0])?;
        done += 1;
    }
    let calls = session.calls;
    Ok(Advised { stopped: session.thread.resume()?, calls })
}

/// Splits `range` into parts of at most [`MAX_BYTES`].
fn parts(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let Range { start, end } = *range;
    (start..end).step_by(MAX_BYTES as usize).map(move |at| at..(at + MAX_BYTES).min(end))
}

/// A stopped thread, and the number of calls that ran in it.
struct Session<'a> {
    thread: StoppedThread<'a>,
    process: &'a Process,
    calls: u32,
}

impl Session<'_> {
    fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<u64, AttachError> {
        self.calls += 1;
        self.thread.system_call(number, arguments)
    }

    /// Gives advice about `parts` by vectors, until `deadline`. Returns the number of parts advised; 0 if the kernel does not support it.
    fn by_vector(&mut self, parts: &[Range<u64>], advice: c_int, deadline: Instant) -> Result<usize, AttachError> {
        let memory = self.process.open_to_write("mem").map_err(|source| AttachError::Io {
            pid: self.process.pid(),
            what: "open its memory for writing",
            source,
        })?;
        // The process's number in its own pid namespace.
        let own = self.call(libc::SYS_getpid, [0; 6])?;
        let pidfd = self.call(libc::SYS_pidfd_open, [own, 0, 0, 0, 0, 0])?;
        let length = (MAX_RANGES * ENTRY) as u64;
        let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let outcome = match self.call(libc::SYS_mmap, [0, length, access, flags, u64::MAX, 0]) {
            Ok(room) => {
                let given = self.advise_through(&memory, (pidfd, room), parts, advice, deadline);
                let unmapped = self.call(libc::SYS_munmap, [room, length, 0, 0, 0, 0]);
                given.and_then(|done| unmapped.map(|_| done))
            }
            Err(error) => Err(error),
        };
        let closed = self.call(libc::SYS_close, [pidfd, 0, 0, 0, 0, 0]);
        outcome.and_then(|done| closed.map(|_| done))
    }

    /// Gives advice by vectors, which are written to address `room` in the process. `pidfd` is its own pidfd of itself.
    fn advise_through(
        &mut self,
        memory: &File,
        (pidfd, room): (u64, u64),
        parts: &[Range<u64>],
        advice: c_int,
        deadline: Instant,
    ) -> Result<usize, AttachError> {
        let pid = self.process.pid();
        let mut done = 0;
        let mut vector = Vec::with_capacity(MAX_RANGES * ENTRY);
        while done < parts.len() && Instant::now() < deadline {
            vector.clear();
            let (mut bytes, mut count) = (0, 0);
            for part in &parts[done..] {
                let length = part.end - part.start;
                if count == MAX_RANGES || count > 0 && bytes + length > MAX_BYTES {
                    break;
                }
                (bytes, count) = (bytes + length, count + 1);
                vector.extend(part.start.to_ne_bytes());
                vector.extend(length.to_ne_bytes());
            }
            memory.write_all_at(&vector, room).map_err(|source| AttachError::Io {
                pid,
                what: "write to a mapping that was made in it",
                source,
            })?;
            let call = [pidfd, room, count as u64, advice as u64, 0, 0];
            let mut left = match self.call(libc::SYS_process_madvise, call) {
                Ok(given) => given,
                // Before Linux 6.13, and before 5.10.
                Err(AttachError::Refused { source, .. })
                    if done == 0 && matches!(source.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) =>
                {
                    return Ok(0);
                }
                Err(error) => return Err(error),
            };
            // The kernel returns the bytes of the ranges before a refused one. A range that was done in part is done again.
            let before = done;
            for part in &parts[done..done + count] {
                let length = part.end - part.start;
                if left < length {
                    break;
                }
                (left, done) = (left - length, done + 1);
            }
            if done == before {
                let part = &parts[done];
                let call = [part.start, part.end - part.start, advice as u64, 0, 0, 0];
                self.call(libc::SYS_madvise, call)?;
                done += 1;
            }
        }
        Ok(done)
    }
}
