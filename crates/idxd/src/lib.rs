//! Intel DSA and IAA from user space on Linux, driven directly: no library of Intel's underneath.
//!
//! What a reader finds here, in the order in which it is used:
//!
//! * [`discover`] lists devices and work queues from sysfs and says of each queue whether it can be used, and if not why and what
//!   to type.
//! * [`WorkQueue::open`] opens one, finds the best way in ([`Way`]) and proves it with a no-op.
//! * [`Descriptor`] and [`iaa::Descriptor`] say what to do; [`CompletionRecord`] and [`iaa::CompletionRecord`] are where the
//!   device answers; [`Status`] is the answer.
//! * [`WorkQueue::submit`] sends. It is `unsafe`: the device works on this process's memory behind the compiler's back until it
//!   has answered, and only the caller can keep that memory in place for so long. Everything else here is safe.
//! * [`resume`] says what is left of an operation that met a page fault.
//!
//! The crate knows nothing of migration, allocates nothing per submission, and starts no thread. Retries, time-outs, pools and
//! the choice of a device belong to whoever uses it.
//!
//! **Checked against**: the specifications, section by section, by tests that write the bytes down anew; the kernel's
//! `linux/idxd.h`, by a test that compiles a C program over it; a model of the devices that shares no definition with this crate
//! and executes the real instructions by trapping them. **Never run on hardware.**
//!
//! Specifications: Intel DSA architecture 341204 rev. 3.0, Intel IAA architecture 721858; section and table numbers in this
//! crate refer to them.

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
pub use portal::{Portal, Submission, Way};
pub use queue::{Opening, WorkQueue};
pub use record::{Completion, CompletionRecord, Fault, offset as record_offset};
pub use status::Status;
pub use sysfs::{
    Device, DeviceInfo, Directories, DiscoverError, EngineInfo, GeneralCapabilities, GroupInfo, IaaCapabilities, Kind,
    Mode, OperationSet, QueueInfo, QueueType, Reason, Remark, USUAL_BATCH, USUAL_TRANSFER, Unusable, discover,
    usual_threshold,
};
