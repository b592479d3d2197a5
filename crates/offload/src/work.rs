//! An accelerator's part of a request: the parts in which the request passes through a device, the memory through which both communicate,
//! and what is left for the CPU.

#[cfg(feature = "accel")]
mod lists;

use crate::share::Grant;
use crate::time::{NEVER, Nanos};
#[cfg(feature = "accel")]
pub(crate) use lists::Lists;

/// How a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// All of it is done. The counters show by which engine.
    Done,
    /// None of it is done: it was cancelled before a device had seen it, at shutdown.
    Cancelled,
    /// The batch writes guest memory, and a device out of service may still write that memory, now or later. Its ranges
    /// are leased ([`Leases`](crate::Leases)) until that device is proved quiet; their content is undefined. The
    /// batch's inputs are undefined too: fill it again before submitting it again.
    Leased,
}

/// The sizes of the requests of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// The most pages, and the most items, of a batch.
    pub(crate) pages: usize,
    /// Whether an accelerator may process the request: then it has descriptors and records.
    pub(crate) device: bool,
    /// The NUMA node of its memory.
    pub(crate) node: Option<u32>,
}

impl Shape {
    /// Returns the most bytes of a batch.
    pub(crate) fn bytes(self) -> usize {
        self.pages * sterna_memory::PAGE_SIZE
    }
}

/// The most parts of one request in a device at once.
pub(crate) const PARTS: usize = 8;

/// The form of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Form {
    /// Items as members of a batch.
    #[default]
    Batch,
    /// One item.
    Single,
    /// Adjacent pages, as one range.
    Range,
}

/// The position of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Place {
    #[default]
    Nowhere,
    /// To be submitted.
    Waiting,
    /// With the device.
    InDevice,
}

/// A part.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    pub(crate) place: Place,
    pub(crate) form: Form,
    pub(crate) run: (u32, u32),
    pub(crate) submitted: Nanos,
    /// Its number in the trace.
    pub(crate) traced: u64,
    pub(crate) due: Nanos,
    pub(crate) deadline: Nanos,
}

/// The parts of a request.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) parts: [Part; PARTS],
    pub(crate) device: usize,
    pub(crate) queue: usize,
    /// Items before this one have been assigned to parts.
    pub(crate) cursor: u32,
    /// Consecutive refused submissions, and when the next may be tried.
    pub(crate) refusals: u32,
    pub(crate) not_before: Nanos,
    /// The share of `device` has made it wait, and expects another request for admission.
    pub(crate) waits: bool,
    /// The most bytes of a part, where the share reports that others wait.
    pub(crate) max_bytes: u64,
    /// Whether pages are expected to be zero.
    pub(crate) expect_zero: bool,
    /// Whether nearly all of them are.
    pub(crate) expect_run: bool,
    /// Pages of the next range.
    pub(crate) stride: u32,
    /// Measured device time, summed over all parts.
    pub(crate) nanos: Nanos,
}

impl Parts {
    /// Returns when the first of them is worth a look; [`NEVER`] when there is none.
    pub(crate) fn due(&self) -> Nanos {
        let with = |place| self.parts.iter().filter(move |part| part.place == place).map(|part| part.due);
        // Parts are submitted in order: those behind a waiting part wait for it.
        with(Place::InDevice).chain(with(Place::Waiting).take(1)).min().unwrap_or(NEVER)
    }

    /// Returns whether a device has any of them.
    pub(crate) fn with_device(&self) -> bool {
        self.parts.iter().any(|part| part.place == Place::InDevice)
    }
}

/// Consecutive items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// An accelerator's part of a request.
#[derive(Debug)]
pub(crate) struct Work {
    #[cfg(feature = "accel")]
    lists: Option<Lists>,
    /// The engine that has it, as an index into the table.
    pub(crate) engine: usize,
    /// When to look at it again.
    pub(crate) due: Nanos,
    /// Completions of its channel when it was made to wait.
    pub(crate) seen: u64,
    /// The items left for the CPU.
    pub(crate) rest: Vec<Run>,
    /// The outcome to report.
    pub(crate) outcome: Outcome,
    /// The positions of its parts.
    pub(crate) parts: Parts,
    /// Members of batches whose records have to be read.
    pub(crate) review: Vec<Run>,
    /// The share's permission, while a device has the request.
    pub(crate) grant: Option<Grant>,
    /// When a device first got a part of it.
    pub(crate) begun: Nanos,
    /// The share expected the CPU to be faster: it is notified how long the CPU took.
    pub(crate) spilled: bool,
    /// No device has had any of it: the CPU does all of it, and it is counted as such.
    pub(crate) by_cpu: bool,
}

impl Work {
    pub(crate) fn new(shape: Shape) -> Self {
        Self {
            #[cfg(feature = "accel")]
            lists: shape.device.then(|| Lists::new(shape)),
            engine: 0,
            due: NEVER,
            seen: 0,
            rest: Vec::with_capacity(shape.pages),
            outcome: Outcome::Done,
            parts: Parts::default(),
            review: Vec::with_capacity(shape.pages),
            grant: None,
            begun: 0,
            spilled: false,
            by_cpu: false,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.due = NEVER;
        self.rest.clear();
        self.outcome = Outcome::Done;
        self.parts = Parts::default();
        self.review.clear();
        (self.spilled, self.by_cpu) = (false, false);
        debug_assert!(self.grant.is_none(), "a grant is released when the device is done");
    }

    /// Takes the descriptors and records, to be leaked.
    #[cfg(feature = "accel")]
    pub(crate) fn take_lists(&mut self) -> Option<Lists> {
        self.lists.take()
    }

    /// Returns the descriptors and records.
    #[cfg(feature = "accel")]
    pub(crate) fn lists(&self) -> &Lists {
        self.lists.as_ref().expect("requests of a process with accelerators have lists")
    }

    /// Returns how many bytes a device may write, without the buffer.
    #[cfg(feature = "accel")]
    pub(crate) fn bytes(&self) -> usize {
        self.lists.as_ref().map_or(0, Lists::bytes)
    }
}
