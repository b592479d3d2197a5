//! Receiving the faults of missing pages from the kernel, in a thread that can be stopped.

use super::{Userfault, UserfaultError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ends [`Userfault::wait_faults`] in all threads, permanently. Clones are the same handle.
#[derive(Clone, Debug)]
pub struct Stop {
    event: Arc<OwnedFd>,
}

impl Stop {
    /// Makes a handle that has not stopped anything yet. Needs one file descriptor.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event: Arc::new(event) })
    }

    /// Makes every thread that waits with this handle, now or later, return.
    pub fn stop(&self) {
        // Refused only where the counter is at its maximum: then it is readable, as intended.
        let _ = rustix::io::write(&*self.event, &1u64.to_ne_bytes());
    }
}

impl Stop {
    /// Waits for `time`, or until stopped. Returns true if stopped.
    pub fn within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            let mut waits = [PollFd::new(&self.event, PollFlags::IN)];
            match poll(&mut waits, left.as_ref()) {
                Ok(ready) => return ready > 0,
                Err(Errno::INTR) => {}
                // A thread that cannot wait must not loop for ever.
                Err(_) => return true,
            }
        }
    }
}

/// The fault of a thread that waits for a missing page: `struct uffd_msg`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}
const _: () = assert!(size_of::<Fault>() == 32);

impl Fault {
    /// Returns the accessed address, rounded down to a page (of 4096 bytes, on hugetlb perhaps more).
    pub fn address(&self) -> usize {
        self.address as usize
    }
}

/// Buffer for the faults that are received at once.
#[derive(Debug)]
pub struct FaultBuffer {
    faults: [Fault; Self::FAULTS],
}

impl FaultBuffer {
    /// The most faults received at once. Each stands for a waiting thread, so few guests ever fill it.
    pub const FAULTS: usize = 64;

    /// Makes an empty buffer.
    pub fn new() -> Self {
        Self { faults: [Fault { event: 0, reserved: [0; 7], flags: 0, address: 0, thread: 0 }; Self::FAULTS] }
    }
}

impl Default for FaultBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl Userfault {
    /// Waits for faults of missing pages and receives them; none when `stop` was called, even if there are faults.
    ///
    /// A received fault is reported again only after its thread was [woken](Self::wake) and still misses the page.
    /// Several threads may wait at once: each fault goes to one of them.
    pub fn wait_faults<'b>(
        &self,
        stop: &Stop,
        buffer: &'b mut FaultBuffer,
    ) -> Result<Option<&'b [Fault]>, UserfaultError> {
        loop {
            let mut both = [PollFd::new(self, PollFlags::IN), PollFd::new(&*stop.event, PollFlags::IN)];
            match poll(&mut both, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(UserfaultError::Wait(errno.into())),
            }
            if !both[1].revents().is_empty() {
                return Ok(None);
            }
            if both[0].revents().contains(PollFlags::ERR) {
                return Err(UserfaultError::Wait(io::Error::other("the descriptor is in no state to be read")));
            }
            let bytes = size_of_val(&buffer.faults);
            // SAFETY: any bytes are a valid `Fault`, which has no padding, and the slice covers the array exactly.
            let room = unsafe { std::slice::from_raw_parts_mut(buffer.faults.as_mut_ptr().cast::<u8>(), bytes) };
            match rustix::io::read(self.as_fd(), room) {
                Ok(length) => return missing_pages(&buffer.faults[..length / size_of::<Fault>()]).map(Some),
                // The page was placed, or another thread received the fault, between poll and read.
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(UserfaultError::Wait(errno.into())),
            }
        }
    }
}

/// Returns `faults` if all are of missing pages. Other events are sent only if their features were requested, other
/// page faults only for ranges registered for them: both are errors here.
fn missing_pages(faults: &[Fault]) -> Result<&[Fault], UserfaultError> {
    match faults.iter().find(|fault| fault.event != EVENT_PAGEFAULT || fault.flags & (FLAG_WP | FLAG_MINOR) != 0) {
        None => Ok(faults),
        Some(other) => Err(UserfaultError::UnexpectedEvent { event: other.event, flags: other.flags }),
    }
}

// Values of `include/uapi/linux/userfaultfd.h`.
const EVENT_PAGEFAULT: u8 = 0x12;
const FLAG_WP: u64 = 1 << 1;
const FLAG_MINOR: u64 = 1 << 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anything_but_a_missing_page_is_an_error() {
        let fault = |event, flags| Fault { event, reserved: [0; 7], flags, address: 0x1000, thread: 0 };
        // A read and a write.
        assert_eq!(missing_pages(&[fault(0x12, 0), fault(0x12, 1)]).unwrap().len(), 2);
        for other in [fault(0x15, 0), fault(0x12, 1 << 1), fault(0x12, 1 << 2)] {
            let error = missing_pages(&[fault(0x12, 0), other]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("userfaultfd reported event {:#x} with flags", other.event)), "{error}");
        }
    }
}
