//! An opened work queue: opened once per process, tested before its first use, shared by reference count.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode as FileMode, OFlags};
use tracing::{debug, warn};

use crate::credits::Credits;
use crate::descriptor::Descriptor;
use crate::error::{NoBatches, NotProven, OpenError, SubmitError};
use crate::flags::Operation;
use crate::fork;
use crate::iaa;
use crate::instructions::{Instructions, store_fence};
use crate::portal::{MappedPortal, Portal, Submission, SubmitMethod, WritePortal};
use crate::status::Status;
use crate::sysfs::{Directories, Kind, Mode, QueueInfo, Reason, Unusable};

/// How to open a queue.
#[derive(Clone, Debug)]
pub struct Opening {
    /// The instructions that may be executed: according to CPUID, unless a test simulates the device.
    pub instructions: Instructions,
    /// Whether to map the portal; otherwise `write(2)` is the only method.
    pub map: bool,
    /// How long the no-op that tests the queue may take.
    pub deadline: Duration,
}

impl Default for Opening {
    fn default() -> Self {
        // A no-op takes a microsecond. It may have to wait for the other submitters of a shared queue: at most 128
        // batches.
        Self { instructions: Instructions::detect(), map: true, deadline: Duration::from_secs(1) }
    }
}

/// A work queue that works: a no-op has completed on it.
///
/// It belongs to the process that opened it. In a child every submission fails ([`SubmitError::Forked`]).
#[derive(Debug)]
pub struct WorkQueue {
    info: QueueInfo,
    portal: Arc<dyn Portal>,
    /// Only for a dedicated queue.
    credits: Option<Credits>,
    batches: Result<u32, NoBatches>,
    owner: u32,
}

impl WorkQueue {
    /// Opens a queue that [`discover`](crate::discover) found, maps its portal where the kernel and the CPU allow it,
    /// uses `write(2)` otherwise, and tests it with a no-op. `directories` has the location of the device files.
    pub fn open(info: QueueInfo, directories: &Directories) -> Result<Arc<WorkQueue>, OpenError> {
        Self::open_with(info, directories, &Opening::default())
    }

    /// As [`open`](Self::open), with options.
    pub fn open_with(
        mut info: QueueInfo,
        directories: &Directories,
        opening: &Opening,
    ) -> Result<Arc<WorkQueue>, OpenError> {
        info.node = directories.node(info.kind(), &info.name);
        // Whether the file may be opened is the kernel's decision now; the other reasons still apply.
        let verdict = info
            .unusable
            .clone()
            .filter(|why| !matches!(why.reason, Reason::NoNode(_) | Reason::NoPermission(_) | Reason::InUse));
        if let Some(why) = verdict {
            return Err(OpenError::Unusable { queue: info.full_name(), why });
        }
        let mode = checked(&info)?;

        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(&info.node, flags, FileMode::empty())
            .map_err(|error| OpenError::Open { path: info.node.clone(), source: error.into() })?;
        // If `directories` names another place, the 64 bytes must not be written into an unrelated file.
        let status = rustix::fs::fstat(&file)
            .map_err(|error| OpenError::Open { path: info.node.clone(), source: error.into() })?;
        if FileType::from_raw_mode(status.st_mode) != FileType::CharacterDevice && !opening.instructions.are_trapped() {
            return Err(OpenError::NotADevice { path: info.node });
        }
        let (portal, not_mapped) = portal(file, mode, opening);
        let queue = Self::proven(info, mode, portal, opening.deadline);
        match (queue, not_mapped) {
            // The kernel refuses the first write if it does not support this method: report also why the portal was not
            // mapped.
            (Err(OpenError::NotProven { queue, why: NotProven::Refused(source), .. }), Some(mapping)) => {
                Err(OpenError::NoWay { queue, mapping, source })
            }
            (queue, _) => queue,
        }
    }

    /// Makes a queue behind any other portal, for instance a model's, with the same test.
    pub fn with_portal(info: QueueInfo, portal: Arc<dyn Portal>) -> Result<Arc<WorkQueue>, OpenError> {
        let mode = checked(&info)?;
        Self::proven(info, mode, portal, Opening::default().deadline)
    }

    /// As [`with_portal`](Self::with_portal), with another deadline for the test.
    pub fn with_portal_within(
        info: QueueInfo,
        portal: Arc<dyn Portal>,
        deadline: Duration,
    ) -> Result<Arc<WorkQueue>, OpenError> {
        let mode = checked(&info)?;
        Self::proven(info, mode, portal, deadline)
    }

    fn proven(
        info: QueueInfo,
        mode: Mode,
        portal: Arc<dyn Portal>,
        deadline: Duration,
    ) -> Result<Arc<WorkQueue>, OpenError> {
        let credits = (mode == Mode::Dedicated).then(|| Credits::new(info.size));
        let mut queue =
            WorkQueue { info, portal, credits, batches: Err(NoBatches::NotOffered), owner: fork::process() };
        queue.prove(deadline).map_err(|why| OpenError::NotProven {
            queue: queue.info.full_name(),
            method: queue.portal.submit_method(),
            why,
        })?;
        queue.batches = queue.find_batches(deadline);
        debug!(queue = queue.info.name, method = %queue.portal.submit_method(), batches = ?queue.batches, "work queue proved");
        Ok(Arc::new(queue))
    }

    /// Returns the properties of the queue.
    pub fn info(&self) -> &QueueInfo {
        &self.info
    }

    /// Returns the submission method.
    pub fn submit_method(&self) -> SubmitMethod {
        self.portal.submit_method()
    }

    /// Returns how descriptors are submitted, as text for people.
    pub fn description(&self) -> String {
        self.portal.description()
    }

    /// Returns the most descriptors of one batch, or why there can be none.
    pub fn max_batch(&self) -> Result<u32, NoBatches> {
        self.batches
    }

    /// Returns, for a dedicated queue, how many descriptors it can accept now. `None` for a shared one, which reports
    /// that itself.
    pub fn credits(&self) -> Option<u32> {
        self.credits.as_ref().map(Credits::free)
    }

    /// Returns, for a dedicated queue, how many descriptors were sent whose records have not been seen yet.
    pub fn outstanding(&self) -> Option<u32> {
        self.credits.as_ref().map(Credits::outstanding)
    }

    /// Submits a descriptor. On a dedicated queue this takes a credit, which is returned with
    /// [`seen_complete`](Self::seen_complete). All stores made before are visible to the device before the descriptor
    /// is.
    ///
    /// # Safety
    ///
    /// Until the completion record of the descriptor has been seen (for a batch: the batch's own, or every member's),
    /// everything it names — record, descriptor list, sources, destinations — must stay mapped in this process and be
    /// memory that the device may read or write without the compiler's knowledge. The record must have been cleared. No
    /// other code waits on the same record.
    pub unsafe fn submit(&self, descriptor: &Descriptor) -> Result<(), SubmitError> {
        let here = fork::process();
        if here != self.owner {
            return Err(SubmitError::Forked { owner: self.owner, here });
        }
        if descriptor.operation_code() == Operation::Batch as u8
            && let Err(why) = self.batches
        {
            return Err(SubmitError::NoBatches(why));
        }
        // SAFETY: the caller's promise.
        unsafe { self.send(descriptor) }
    }

    /// Returns the credits of `n` descriptors whose records were **seen** complete. Do not call this for time-outs,
    /// cancelled requests or dropped tickets: their entries may still be in the queue.
    pub fn seen_complete(&self, n: u32) {
        let Some(credits) = &self.credits else { return };
        let too_many = credits.return_credits(n);
        if too_many > 0 {
            warn!(queue = self.info.name, too_many, "more completions were counted than descriptors submitted");
        }
    }

    /// # Safety
    ///
    /// As for [`submit`](Self::submit).
    unsafe fn send(&self, descriptor: &Descriptor) -> Result<(), SubmitError> {
        if let Some(credits) = &self.credits
            && !credits.take()
        {
            return Err(SubmitError::Busy);
        }
        store_fence();
        // SAFETY: the caller's promise; the store fence makes the memory that the descriptor names visible before the
        // descriptor.
        let error = match unsafe { self.portal.submit(descriptor) } {
            Submission::Accepted => return Ok(()),
            Submission::Retry => SubmitError::Busy,
            Submission::Refused(error) => SubmitError::Refused(error),
        };
        // The descriptor never reached the queue.
        self.seen_complete(1);
        Err(error)
    }

    /// Sends a no-op and waits for its completion.
    fn prove(&self, deadline: Duration) -> Result<(), NotProven> {
        let record = Arc::new(iaa::CompletionRecord::new());
        let noop = Descriptor::noop().with_record(record.address());
        match self.run(&noop, record, (), deadline)? {
            Status::Success => Ok(()),
            status => Err(NotProven::Answered(status)),
        }
    }

    /// Determines whether batches may be sent. If the kernel declares them and a portal is mapped, they may. If the
    /// kernel hides them on a first-generation device, the portal may accept them all the same (the kernel hides its
    /// own `write`), so one is tried.
    fn find_batches(&self, deadline: Duration) -> Result<u32, NoBatches> {
        if self.info.kind() == Kind::Iaa {
            return Err(NoBatches::Iaa);
        }
        if self.info.max_batch < 2 {
            return Err(NoBatches::Maximum(self.info.max_batch));
        }
        let declared = self.info.declares(Operation::Batch as u8);
        let first = self.info.device.is_first_generation();
        match (self.portal.submit_method(), declared) {
            (SubmitMethod::Write, _) if first => return Err(NoBatches::FirstGeneration),
            (SubmitMethod::Write, Some(false)) => return Err(NoBatches::NotOffered),
            (SubmitMethod::Enqcmd | SubmitMethod::Movdir64b, Some(false)) if !first => {
                return Err(NoBatches::NotOffered);
            }
            (SubmitMethod::Enqcmd | SubmitMethod::Movdir64b, Some(true)) => return Ok(self.info.max_batch),
            _ => {}
        }
        let members = Arc::new([Descriptor::noop(), Descriptor::noop()]);
        let record = Arc::new(iaa::CompletionRecord::new());
        let list = members.as_ptr().expose_provenance() as u64;
        let batch = Descriptor::batch(list, members.len() as u32).with_record(record.address());
        match self.run(&batch, record, members, deadline) {
            Ok(Status::Success) => Ok(self.info.max_batch),
            Ok(status) => Err(NoBatches::RefusedByDevice(status.code())),
            Err(NotProven::Refused(_)) => Err(NoBatches::RefusedByKernel),
            Err(_) => Err(NoBatches::NotAnswered),
        }
    }

    /// Sends one descriptor of the queue's own and waits for its record. `named` is the other memory that the
    /// descriptor names. If there is no result both are leaked: the device may still write them. (Behind an `Arc`
    /// rather than a `Box`, which may not be moved while the device has the address: a box claims to be the only path
    /// to its contents.)
    fn run<N>(
        &self,
        descriptor: &Descriptor,
        record: Arc<iaa::CompletionRecord>,
        named: N,
        deadline: Duration,
    ) -> Result<Status, NotProven> {
        let end = Instant::now() + deadline;
        record.clear();
        loop {
            // SAFETY: the descriptor is a no-op or a batch of no-ops; its record and list are on the heap and are leaked below
            // unless the record was seen.
            match unsafe { self.send(descriptor) } {
                Ok(()) => break,
                Err(SubmitError::Refused(error)) => return Err(NotProven::Refused(error)),
                Err(_) if Instant::now() >= end => return Err(NotProven::NotAccepted(deadline)),
                Err(_) => std::thread::sleep(Duration::from_micros(20)),
            }
        }
        let mut polls = 0_u32;
        let answer = loop {
            if let Some(completion) = record.poll() {
                break Some(completion.status);
            }
            if Instant::now() >= end {
                // Poll a second time: this thread may have been off the CPU between the poll and the clock.
                break record.poll().map(|completion| completion.status);
            }
            polls += 1;
            if polls < 1_000 { std::hint::spin_loop() } else { std::thread::sleep(Duration::from_micros(20)) }
        };
        match answer {
            Some(status) => {
                self.seen_complete(1);
                Ok(status)
            }
            None => {
                std::mem::forget((record, named));
                Err(NotProven::NoAnswer(deadline))
            }
        }
    }
}

/// Checks the properties of a queue before anything is sent to it.
fn checked(info: &QueueInfo) -> Result<Mode, OpenError> {
    let unusable =
        |reason| OpenError::Unusable { queue: info.full_name(), why: Unusable { reason, commands: Vec::new() } };
    if info.ats_disable {
        return Err(unusable(Reason::AtsDisabled));
    }
    if let Some(attribute) = info.invalid_attribute {
        return Err(unusable(Reason::Unknown(attribute)));
    }
    if info.size == 0 {
        return Err(unusable(Reason::Unknown("size")));
    }
    info.mode.ok_or_else(|| unusable(Reason::Unknown("mode")))
}

/// Returns the best portal for an opened queue, and the reason if it is not a mapped one.
fn portal(file: OwnedFd, mode: Mode, opening: &Opening) -> (Arc<dyn Portal>, Option<String>) {
    let (method, there) = match mode {
        Mode::Shared => (SubmitMethod::Enqcmd, opening.instructions.enqcmd()),
        Mode::Dedicated => (SubmitMethod::Movdir64b, opening.instructions.movdir64b()),
    };
    if !opening.map {
        return (Arc::new(WritePortal { file }), Some("not asked for".to_owned()));
    }
    if !there {
        let why = match method {
            SubmitMethod::Enqcmd => "this CPU has no ENQCMD",
            _ => "this CPU has no MOVDIR64B",
        };
        return (Arc::new(WritePortal { file }), Some(why.to_owned()));
    }
    match MappedPortal::map(file, method) {
        Ok(portal) => (Arc::new(portal), None),
        Err((file, error)) => {
            let hint = match error.raw_os_error() {
                Some(libc::EPERM) => " (it needs CAP_SYS_RAWIO)",
                _ => "",
            };
            debug!(%error, "portal not mapped, using write(2)");
            (Arc::new(WritePortal { file }), Some(format!("{error}{hint}")))
        }
    }
}

impl From<SubmitError> for io::Error {
    fn from(error: SubmitError) -> io::Error {
        match error {
            SubmitError::Refused(error) => error,
            SubmitError::Busy => io::Error::new(io::ErrorKind::WouldBlock, error),
            other => io::Error::other(other),
        }
    }
}

#[cfg(test)]
mod tests;
