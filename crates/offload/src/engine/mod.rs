//! The engines behind the table of operations: which engine can do which operation, and how a request is begun, looked
//! at and settled.
//!
//! A new engine implements [`OffloadEngine`], is put into the table at start (`start/devices.rs`) and has a variant of [`Kind`], which the
//! parser of `--accel`, the report, the plan and traces know. Callers of channels, and `channel.rs`, do not change.

pub(crate) mod cpu;
#[cfg(feature = "accel")]
pub(crate) mod device;
#[cfg(feature = "accel")]
pub(crate) mod dsa;
#[cfg(feature = "accel")]
pub(crate) mod iaa;
#[cfg(feature = "accel")]
pub(crate) mod parts;
#[cfg(feature = "accel")]
pub(crate) mod queues;

use std::fmt::Debug;

use crate::kind::{Cause, Kind};
use crate::operation::Operation;
use crate::request::Request;
use crate::time::Nanos;

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

/// An engine that does operations on pages. The engines that encode packets are an enum of `sterna-codec`.
pub(crate) trait OffloadEngine: Debug + Send + Sync {
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
