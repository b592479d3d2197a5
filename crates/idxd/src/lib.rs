//! Intel DSA and IAA from user space on Linux, driven directly: no library of Intel's underneath.
//!
//! The parts, in the order of their use:
//!
//! * [`discover`] lists devices and work queues from sysfs. For each queue it reports whether the queue can be used,
//!   and if not, why, and the commands that would help.
//! * [`WorkQueue::open`] opens one, selects the best submission method ([`SubmitMethod`]) and tests it with a no-op.
//! * [`Descriptor`] and [`iaa::Descriptor`] are the instructions for the device; the device writes its result to
//!   [`CompletionRecord`] and [`iaa::CompletionRecord`]; [`Status`] is the result's status.
//! * [`WorkQueue::submit`] submits. It is `unsafe`: until it has completed, the device works on this process's memory
//!   without the compiler's knowledge, and only the caller can keep that memory in place. Everything else here is safe.
//! * [`resume`] computes the rest of an operation that met a page fault.
//!
//! The crate knows nothing of migration, allocates nothing per submission, and starts no thread. Retries, time-outs,
//! pools and the choice of a device belong to its user.
//!
//! **Checked against**: the specifications, section by section, by tests that contain the bytes independently; the
//! kernel's `linux/idxd.h`, by a test that compiles a C program with it; a model of the devices that shares no
//! definition with this crate and executes the real instructions by trapping them. **Never run on hardware.**
//!
//! Specifications: Intel DSA architecture 341204 rev. 3.0, Intel IAA architecture 721858; section and table numbers in this
//! crate refer to them.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod credits;
mod descriptor;
mod error;
pub mod flags;
mod fork;
pub mod iaa;
mod instructions;
mod portal;
mod queue;
mod record;
pub mod resume;
mod status;
mod sysfs;

pub use descriptor::{
    DELTA_ENTRY_BYTES, DESCRIPTOR_BYTES, Descriptor, MAX_DELTA_TRANSFER, MIN_DELTA_CAPACITY,
    offset as descriptor_offset,
};
pub use error::{NoBatches, NotProven, OpenError, SubmitError};
pub use flags::Operation;
pub use instructions::Instructions;
pub use portal::{Portal, Submission, SubmitMethod};
pub use queue::{Opening, WorkQueue};
pub use record::{Completion, CompletionRecord, Fault, offset as record_offset};
pub use status::Status;
pub use sysfs::{
    Device, DeviceInfo, Directories, DiscoverError, EngineInfo, GeneralCapabilities, GroupInfo, IaaCapabilities, Kind,
    Mode, OperationSet, QueueInfo, QueueType, Reason, Remark, USUAL_BATCH, USUAL_TRANSFER, Unusable, discover,
    usual_threshold,
};

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
