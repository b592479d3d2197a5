//! The engines behind the table of operations: which engine can do which operation, and how a request is begun, looked
//! at and settled.
//!
//! A new engine implements [`Engine`] and is put into the table at start; no caller, and nothing in `channel.rs`,
//! changes.

pub(crate) mod cpu;
pub(crate) mod device;
pub(crate) mod dsa;
pub(crate) mod iaa;
pub(crate) mod lists;
pub(crate) mod parts;
pub(crate) mod queues;

use std::fmt::{Debug, Display, Formatter};

use serde::Serialize;

use crate::channel::Outcome;
use crate::engine::lists::Lists;
use crate::engine::parts::Parts;
use crate::operation::Operation;
use crate::request::{Request, Shape};
use crate::share::Grant;
use crate::time::{NEVER, Nanos};

/// A kind of engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Kind {
    /// The CPU, always available.
    Cpu,
    /// Intel Data Streaming Accelerator.
    Dsa,
    /// Intel In-Memory Analytics Accelerator.
    Iaa,
}

impl Kind {
    /// Returns its name, as in `--accel`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Dsa => "dsa",
            Self::Iaa => "iaa",
        }
    }
}

/// Why work that an accelerator could have done was done by the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// A page was not present for the device.
    PageFault,
    /// The queue stayed full.
    QueueFull,
    /// The device reported an error.
    DeviceError,
    /// The device did not answer.
    Timeout,
    /// The device's result was wrong.
    WrongResult,
    /// No device was in service.
    OutOfService,
    /// The CPU was expected to be faster.
    Spilled,
    /// The device does not accept such items.
    Unsuitable,
}

impl Display for Cause {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::PageFault => "a page was not there for the device",
            Self::QueueFull => "the queue stayed full",
            Self::DeviceError => "the device failed",
            Self::Timeout => "the device did not answer",
            Self::WrongResult => "the device was wrong",
            Self::OutOfService => "no device was in service",
            Self::Spilled => "the CPU was expected to be sooner",
            Self::Unsuitable => "the device does not take such items",
        })
    }
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 8] = [
        Self::PageFault,
        Self::QueueFull,
        Self::DeviceError,
        Self::Timeout,
        Self::WrongResult,
        Self::OutOfService,
        Self::Spilled,
        Self::Unsuitable,
    ];
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
    pub(crate) fn take_lists(&mut self) -> Option<Lists> {
        self.lists.take()
    }

    /// Returns the descriptors and records.
    pub(crate) fn lists(&self) -> &Lists {
        self.lists.as_ref().expect("requests of a process with accelerators have lists")
    }

    /// Returns how many bytes a device may write, without the buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.lists.as_ref().map_or(0, Lists::bytes)
    }
}

/// An engine's decision about a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// A device has it.
    InDevice,
    /// Not yet admitted: ask again at this time.
    Wait(Nanos),
    /// The CPU does it.
    Spill(Cause),
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// A device has it; `work.due` is when to look again.
    Going,
    /// No device has it; `work.rest` is left for the CPU.
    Done,
    /// A device has it and is not expected to return it.
    Lost,
}

/// A submitter that asks for a share of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Whose {
    pub(crate) vm: u32,
    /// Unique in the process.
    pub(crate) channel: u32,
    pub(crate) weight: u32,
    /// A guest's downtime or another caller waits for this work.
    pub(crate) urgent: bool,
}

/// An engine.
pub(crate) trait Engine: Debug + Send + Sync {
    /// Returns its kind.
    fn kind(&self) -> Kind;

    /// Returns whether it can do `operation` at all.
    fn does(&self, operation: Operation) -> bool;

    /// Submits a queued request to a device.
    fn begin(&self, request: &mut Request, whose: Whose, now: Nanos) -> Begun;

    /// Reads the completion records, and submits further parts.
    fn advance(&self, request: &mut Request, now: Nanos) -> Progress;

    /// Converts records to answers, on the caller's thread; may add to `work.rest`.
    fn settle(&self, request: &mut Request);

    /// Returns which of its devices had `request`.
    fn device(&self, request: &Request) -> usize;

    /// Takes its device of this number out of service for a wrong result.
    fn report_wrong_result(&self, device: usize, what: &str);

    /// Asks the device that had `request`, which is owned by the calling thread now, a second time whether page `item`
    /// is zero. Returns none if the device does not answer at once.
    fn still_zero(&self, _request: &Request, _item: usize, _now: Nanos) -> Option<bool> {
        None
    }

    /// Looks at the questions of [`Self::still_zero`] in progress, and returns whether any remain.
    fn second_looks(&self, _now: Nanos) -> bool {
        false
    }

    /// Keeps a request that a device may still write, until the device is proved quiet.
    fn quarantine(&self, request: Box<Request>);

    /// Returns the number of requests in quarantine.
    fn quarantined(&self) -> usize;

    /// Notifies the share of the request's device how long the CPU took for work that the share expected the CPU to do
    /// faster.
    fn spilled(&self, request: &Request, took: Nanos, now: Nanos);
}
