//! The engines behind the table of operations: who can do what, how a request is begun, looked at and settled.
//!
//! A new engine implements [`Engine`] and is put into the table at start; no caller and nothing in `channel.rs` changes.

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
    /// The CPU, always there.
    Cpu,
    /// Intel Data Streaming Accelerator.
    Dsa,
    /// Intel In-Memory Analytics Accelerator.
    Iaa,
}

impl Kind {
    /// Its name, as `--accel` has it.
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
    /// A page was not there for the device.
    PageFault,
    /// The queue stayed full.
    QueueFull,
    /// The device said that it failed.
    DeviceError,
    /// The device said nothing.
    Timeout,
    /// What the device gave was not so.
    WrongResult,
    /// No device was in service.
    OutOfService,
    /// The CPU was expected to be sooner.
    Spilled,
    /// The device does not take items like this one.
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
    /// All of them.
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

/// Items one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// An accelerator's part of a request.
#[derive(Debug)]
pub(crate) struct Work {
    lists: Option<Lists>,
    /// Which engine has it, by its place in the table.
    pub(crate) engine: usize,
    /// When it is worth looking at again.
    pub(crate) due: Nanos,
    /// Completions of its channel when it was told to wait.
    pub(crate) told: u64,
    /// What is left for the CPU.
    pub(crate) rest: Vec<Run>,
    /// How it will have ended.
    pub(crate) outcome: Outcome,
    /// Where its parts are.
    pub(crate) parts: Parts,
    /// Members whose records have to be read.
    pub(crate) review: Vec<Run>,
    /// The share's permission, as long as a device has it.
    pub(crate) grant: Option<Grant>,
    /// When a device first got anything of it.
    pub(crate) begun: Nanos,
    /// The CPU was said to be sooner: it is told how long it took.
    pub(crate) spilled: bool,
    /// No device has had any of it: all of it is the CPU's, and counted as such.
    pub(crate) by_cpu: bool,
}

impl Work {
    pub(crate) fn new(shape: Shape) -> Self {
        Self {
            lists: shape.device.then(|| Lists::new(shape)),
            engine: 0,
            due: NEVER,
            told: 0,
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
        debug_assert!(self.grant.is_none(), "a grant goes back when the device is done");
    }

    /// Descriptors and records, to be kept for ever.
    pub(crate) fn take_lists(&mut self) -> Option<Lists> {
        self.lists.take()
    }

    /// Descriptors and records.
    pub(crate) fn lists(&self) -> &Lists {
        self.lists.as_ref().expect("requests of a process with accelerators have lists")
    }

    /// Bytes that a device may write, without the buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.lists.as_ref().map_or(0, Lists::bytes)
    }
}

/// What an engine made of a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// A device has it.
    InDevice,
    /// Not its turn yet: ask again then.
    Wait(Nanos),
    /// The CPU shall do it.
    Spill(Cause),
}

/// How a request is getting on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// A device has it; `work.due` says when to look again.
    Going,
    /// No device has it; `work.rest` is the CPU's.
    Done,
    /// A device has it and is not expected to give it back.
    Lost,
}

/// Who asks for a share of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Whose {
    pub(crate) vm: u32,
    /// Unique in the process.
    pub(crate) channel: u32,
    pub(crate) weight: u32,
    /// Somebody waits for it.
    pub(crate) urgent: bool,
}

/// An engine.
pub(crate) trait Engine: Debug + Send + Sync {
    /// What kind it is.
    fn kind(&self) -> Kind;

    /// Whether it can do `operation` at all.
    fn does(&self, operation: Operation) -> bool;

    /// Gives a queued request to a device.
    fn begin(&self, request: &mut Request, whose: Whose, now: Nanos) -> Begun;

    /// Looks at the records that say whether anything is finished, and submits what is still to be submitted.
    fn advance(&self, request: &mut Request, now: Nanos) -> Progress;

    /// Turns records into answers, on the caller's thread; may add to `work.rest`.
    fn settle(&self, request: &mut Request);

    /// Which of its devices had `request`.
    fn device(&self, request: &Request) -> usize;

    /// Its device of this number gave a wrong result: it is taken out of service.
    fn distrust(&self, device: usize, what: &str);

    /// Asks the device that had `request`, which nobody has any more, once more whether page `item` is zero. None if it does
    /// not say so at once.
    fn still_zero(&self, _request: &Request, _item: usize, _now: Nanos) -> Option<bool> {
        None
    }

    /// Looks at what [`Self::still_zero`] has left under way, and says whether anything of it still is.
    fn second_looks(&self, _now: Nanos) -> bool {
        false
    }

    /// Keeps a request that a device may still write, until the device is proved quiet.
    fn quarantine(&self, request: Box<Request>);

    /// Requests in quarantine.
    fn quarantined(&self) -> usize;

    /// The CPU did what the share of the request's device had said it would be sooner at, and took so long.
    fn spilled(&self, request: &Request, took: Nanos, now: Nanos);
}
