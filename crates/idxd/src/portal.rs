//! The path of 64 bytes to a device: the interface between this driver and the hardware, and its three real
//! implementations.
//!
//! * A **mapped portal** of a shared queue is written by `ENQCMD`, one of a dedicated queue by `MOVDIR64B`. Any of the
//!   page's 64 slots works; a CPU can have several `MOVDIR64B` to *different* slots in flight at once, so the slots are
//!   used in rotation. (`ENQCMD` has one in flight per core whatever the slot, and stays on the first.) The order of
//!   descriptors sent through different slots is undefined (DSA section 3.9).
//! * **`write(2)`** on the queue's device file: the kernel checks and submits. For processes that may not map portals
//!   (INTEL-SA-01084: `CAP_SYS_RAWIO`), and for CPUs without the instructions.
//!
//! The mapped page is the *limited* portal: a shared queue accepts descriptors from it only up to its threshold. The
//! kernel maps no other for user space.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};
use crate::fork;
use crate::instructions::{enqcmd, movdir64b};

/// The method of submission to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SubmitMethod {
    /// `ENQCMD` on a mapped portal of a shared queue.
    Enqcmd,
    /// `MOVDIR64B` on a mapped portal of a dedicated queue.
    Movdir64b,
    /// `write(2)` on the queue's device file.
    Write,
}

impl fmt::Display for SubmitMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SubmitMethod::Enqcmd => "mapped portal, ENQCMD",
            SubmitMethod::Movdir64b => "mapped portal, MOVDIR64B",
            SubmitMethod::Write => "write(2)",
        })
    }
}

/// The result of one submission.
#[derive(Debug)]
pub enum Submission {
    /// The queue accepted it, or (`MOVDIR64B`) it was sent and there will be no reply.
    Accepted,
    /// Not now: the queue is full up to its threshold, or disabled, or the device has halted. The three cannot be
    /// distinguished, so retries must be bounded.
    Retry,
    /// The kernel will not submit it.
    Refused(io::Error),
}

/// Sends 64 bytes to a device.
pub trait Portal: Send + Sync + fmt::Debug {
    /// Sends a descriptor.
    ///
    /// # Safety
    ///
    /// Until the completion record is written, the device reads and writes the memory that the descriptor names: all of
    /// it must stay mapped and may be accessed without the compiler's knowledge for that time.
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission;

    /// Returns the submission method.
    fn submit_method(&self) -> SubmitMethod;

    /// Returns how descriptors are submitted, as text for people.
    fn description(&self) -> String {
        self.submit_method().to_string()
    }
}

/// Bytes of a portal page, whatever the page size of the host.
const PORTAL_BYTES: usize = 4096;

/// A mapped portal page. Unmapped before the device file is closed.
pub(crate) struct MappedPortal {
    page: NonNull<u8>,
    method: SubmitMethod,
    slot: AtomicU32,
    owner: u32,
    file: OwnedFd,
}

// SAFETY: the page is written only by ENQCMD and MOVDIR64B, 64 bytes at a time, which the device receives whole from
// any thread; no code reads it.
unsafe impl Send for MappedPortal {}
// SAFETY: as above.
unsafe impl Sync for MappedPortal {}

impl MappedPortal {
    /// Maps the portal of an opened queue. `method` is [`SubmitMethod::Enqcmd`] or [`SubmitMethod::Movdir64b`].
    pub(crate) fn map(file: OwnedFd, method: SubmitMethod) -> Result<Self, (OwnedFd, io::Error)> {
        // SAFETY: a new shared mapping of one page at an address of the kernel's choice.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PORTAL_BYTES,
                libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err((file, io::Error::last_os_error()));
        }
        match NonNull::new(page.cast()) {
            Some(page) => Ok(Self { page, method, slot: AtomicU32::new(0), owner: fork::process(), file }),
            None => Err((file, io::Error::other("the kernel mapped the portal at address zero"))),
        }
    }

    /// Returns the next slot in rotation: 64 bytes each.
    fn next_slot(&self) -> *mut u8 {
        let turn = self.slot.fetch_add(1, Ordering::Relaxed) as usize;
        let offset = turn * DESCRIPTOR_BYTES % PORTAL_BYTES;
        // SAFETY: the offset is within the mapped page.
        unsafe { self.page.as_ptr().add(offset) }
    }
}

impl Portal for MappedPortal {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        match self.method {
            SubmitMethod::Enqcmd => {
                // SAFETY: the page is mapped and 64-byte aligned; the queue was opened by this process (its address space is
                // bound) with this instruction allowed; the caller vouches for the descriptor.
                if unsafe { enqcmd(self.page.as_ptr(), descriptor) } { Submission::Accepted } else { Submission::Retry }
            }
            _ => {
                // SAFETY: as above.
                unsafe { movdir64b(self.next_slot(), descriptor) };
                Submission::Accepted
            }
        }
    }

    fn submit_method(&self) -> SubmitMethod {
        self.method
    }
}

impl Drop for MappedPortal {
    fn drop(&mut self) {
        // Children do not inherit the mapping (VM_DONTCOPY): in a child, another mapping may be at the address.
        if fork::process() == self.owner {
            // SAFETY: mapped by `map` with this length; no thread submits any more, since submitting borrows `self`.
            unsafe { libc::munmap(self.page.as_ptr().cast(), PORTAL_BYTES) };
        }
    }
}

impl fmt::Debug for MappedPortal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedPortal").field("method", &self.method).field("file", &self.file.as_raw_fd()).finish()
    }
}

/// `write(2)` on the device file.
#[derive(Debug)]
pub(crate) struct WritePortal {
    pub(crate) file: OwnedFd,
}

impl Portal for WritePortal {
    unsafe fn submit(&self, descriptor: &Descriptor) -> Submission {
        loop {
            return match rustix::io::write(&self.file, descriptor.as_bytes()) {
                Ok(DESCRIPTOR_BYTES) => Submission::Accepted,
                Ok(written) => Submission::Refused(io::Error::new(
                    io::ErrorKind::WriteZero,
                    format!("the kernel took {written} of the descriptor's {DESCRIPTOR_BYTES} bytes"),
                )),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => Submission::Retry,
                Err(error) => Submission::Refused(error.into()),
            };
        }
    }

    fn submit_method(&self) -> SubmitMethod {
        SubmitMethod::Write
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::io::{Read, Seek, SeekFrom};

    use super::*;

    fn portal_file() -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PORTAL_BYTES as u64).unwrap();
        file
    }

    #[test]
    fn slots_are_used_in_rotation_through_the_whole_page_and_stay_aligned() {
        let portal = MappedPortal::map(portal_file().into(), SubmitMethod::Movdir64b).unwrap();
        let base = portal.page.as_ptr() as usize;
        let slots: Vec<usize> = (0..130).map(|_| portal.next_slot() as usize - base).collect();
        for (turn, slot) in slots.iter().enumerate() {
            assert_eq!(*slot, turn % 64 * 64);
        }
        portal.slot.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(portal.next_slot() as usize - base, 63 * 64);
        assert_eq!(portal.next_slot() as usize - base, 0);
    }

    #[test]
    fn a_file_that_cannot_be_mapped_is_returned_with_the_reason() {
        let (read, _write) = io::pipe().unwrap();
        let (_file, error) = MappedPortal::map(read.into(), SubmitMethod::Enqcmd).unwrap_err();
        assert!(error.raw_os_error().is_some());
    }

    #[test]
    fn write_sends_exactly_the_descriptor() {
        let mut file = portal_file();
        let portal = WritePortal { file: file.try_clone().unwrap().into() };
        let descriptor = Descriptor::noop().with_record(0x40);
        // SAFETY: the file is no device: nothing acts on the descriptor.
        assert!(matches!(unsafe { portal.submit(&descriptor) }, Submission::Accepted));
        let mut bytes = [0; 64];
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, descriptor.as_bytes());
    }

    #[test]
    fn a_refused_write_has_a_reason() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let portal = WritePortal { file: file.into() };
        // SAFETY: as above.
        match unsafe { portal.submit(&Descriptor::noop()) } {
            Submission::Refused(error) => assert_eq!(error.raw_os_error(), Some(libc::EBADF)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_full_file_descriptor_that_does_not_block_means_retry() {
        let (_read, write) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&write, true).unwrap();
        let portal = WritePortal { file: write.into() };
        let mut accepted = 0;
        loop {
            // SAFETY: as above.
            match unsafe { portal.submit(&Descriptor::noop()) } {
                Submission::Accepted => accepted += 1,
                Submission::Retry => break,
                Submission::Refused(error) => panic!("{error}"),
            }
        }
        assert!(accepted > 0);
    }
}
