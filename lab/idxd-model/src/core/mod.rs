//! A device as a state machine, without threads and without clocks: descriptors and the time are passed in, work and
//! writes are returned.
//!
//! ```text
//! submit ─> queue (size, threshold) ─> engine of the group ─> Step::Execute ─> finish ─┬─> engine free again
//!           by priority                fetches a batch's list                          └─> Step::Write ─> written
//! ```
//!
//! The owner calls [`Device::poll`] with the time until it returns [`Step::Idle`]. A job to execute may be executed
//! elsewhere and is reported with [`Device::finish`]; a write is done at once and reported with [`Device::written`].
//! With [`Payload::Timed`] nothing is read or written: that is the mode for simulators.

mod batch;
mod device;
mod page_requests;
mod queue;
mod random;
mod script;

pub use device::{Accounts, Device, SoftwareError};

use crate::memory::{AddressSpace, Fault};
use crate::ops::{self, Effects, Limits, Outcome, Record, Scratch};

/// Nanoseconds of the caller's clock.
pub type Nanos = u64;

/// The kind of write by which 64 bytes reached the portal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posting {
    /// `ENQCMD`: a deferrable memory write with a reply.
    NonPosted,
    /// `MOVDIR64B`: a posted write without a reply.
    Posted,
}

/// A submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A real descriptor.
    Descriptor(Box<[u8; 64]>),
    /// Takes only time, for simulators: nothing is read or written.
    Timed(Timed),
}

/// The properties that determine how long a descriptor or batch takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timed {
    /// Returned with the completion.
    pub tag: u64,
    /// Descriptors of a batch; 0 and 1 mean a single descriptor.
    pub members: u32,
    /// Bytes of each: those written, or, for operations that only read, all bytes read.
    pub bytes: u64,
    /// Whether it writes to a destination.
    pub writes: bool,
    /// Pages of each whose translation is not cached.
    pub translation_misses: u32,
    /// Page requests of each (block on fault).
    pub page_requests: u32,
}

/// The result of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The descriptor has an entry in the queue (the sender of a posted write does not learn this).
    Accepted,
    /// Retry: the queue has no room, or accepts nothing.
    Retry,
    /// A posted write was dropped; on a full dedicated queue this is software error 0x53.
    Dropped,
}

/// The next action of a device's owner.
#[derive(Debug)]
pub enum Step {
    /// Execute this and report with [`Device::finish`].
    Execute(Job),
    /// Do this write now and report with [`Device::written`].
    Write(Write),
    /// A [`Payload::Timed`] is complete.
    Completed(Completed),
    /// Nothing is due before this time, or before the next submission.
    Idle {
        /// The time.
        next: Option<Nanos>,
    },
}

/// A completed [`Payload::Timed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The tag of the submission.
    pub tag: u64,
    /// The queue to which it was submitted.
    pub queue: usize,
    /// When its record became visible.
    pub at: Nanos,
    /// When an engine removed it from the queue.
    pub started: Nanos,
}

/// Work for an engine.
#[derive(Debug)]
pub struct Job {
    pub(super) id: u64,
    pub(super) engine: usize,
    pub(super) task: Task,
}

#[derive(Debug)]
pub(super) enum Task {
    Descriptor {
        bytes: Box<[u8; 64]>,
        in_batch: bool,
        limits: Limits,
        effects: Effects,
    },
    /// A batch's descriptor list. Its address always blocks on fault if page requests are on (8.1.3, bit 1).
    List {
        address: u64,
        count: usize,
        page_requests: bool,
    },
}

/// The result of a [`Job`].
#[derive(Debug)]
pub struct Done {
    pub(super) id: u64,
    pub(super) engine: usize,
    pub(super) result: JobResult,
}

#[derive(Debug)]
pub(super) enum JobResult {
    Descriptor(Box<Outcome>),
    List { descriptors: Vec<u8>, fault: Option<Fault>, page_requests: u32 },
}

impl Job {
    /// Returns the engine that executes the job.
    pub fn engine(&self) -> usize {
        self.engine
    }

    /// Executes the job.
    pub fn run(&self, memory: &dyn AddressSpace, scratch: &mut Scratch) -> Done {
        let result = match &self.task {
            Task::Descriptor { bytes, in_batch, limits, effects } => {
                JobResult::Descriptor(Box::new(ops::execute(bytes, *in_batch, limits, memory, scratch, effects)))
            }
            &Task::List { address, count, page_requests } => fetch(memory, address, count, page_requests),
        };
        Done { id: self.id, engine: self.engine, result }
    }
}

/// Reads as many whole descriptors as can be read.
fn fetch(memory: &dyn AddressSpace, address: u64, count: usize, page_requests: bool) -> JobResult {
    let mut descriptors = vec![0; count * 64];
    let (mut done, mut requests) = (0, 0);
    let (mut asked, mut in_a_row) = (None, 0);
    loop {
        match memory.read(address + done as u64, &mut descriptors[done..]) {
            Ok(_) => return JobResult::List { descriptors, fault: None, page_requests: requests },
            Err(fault) => {
                done += fault.done;
                requests += u32::from(page_requests);
                let page = Some(fault.address / 0x1000);
                in_a_row = if asked == page { in_a_row + 1 } else { 1 };
                asked = page;
                if page_requests && in_a_row <= ops::MAX_PAGE_REQUESTS && memory.resolve(fault.address, false) {
                    continue;
                }
                descriptors.truncate(done / 64 * 64);
                return JobResult::List { descriptors, fault: Some(fault), page_requests: requests };
            }
        }
    }
}

/// A write that becomes visible now: a completion record, or data that a script has delayed.
#[derive(Debug)]
pub struct Write {
    pub(super) id: u64,
    pub(super) what: Writing,
}

#[derive(Debug)]
pub(super) enum Writing {
    /// `page_requests`: whether the device may ask for the page; `kernel`: the event log's handler writes it.
    Record {
        address: u64,
        record: Record,
        page_requests: bool,
        kernel: bool,
    },
    Data {
        address: u64,
        bytes: Vec<u8>,
    },
}

/// The result of a [`Write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It was written.
    Done,
    /// It was written, after a page request.
    Requested,
    /// The address could not be translated.
    Faulted,
}

impl Write {
    /// Executes it.
    pub fn perform(&self, memory: &dyn AddressSpace) -> Written {
        match &self.what {
            Writing::Data { address, bytes } => match memory.write(*address, bytes) {
                Ok(_) => Written::Done,
                Err(_) => Written::Faulted,
            },
            Writing::Record { address, record, page_requests, kernel } => {
                if memory.write_record(*address, record.as_bytes()).is_ok() {
                    return Written::Done;
                }
                let may = *page_requests || *kernel;
                if may && memory.resolve(*address, true) && memory.write_record(*address, record.as_bytes()).is_ok() {
                    return Written::Requested;
                }
                Written::Faulted
            }
        }
    }
}
