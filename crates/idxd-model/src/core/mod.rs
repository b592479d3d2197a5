//! A device as a state machine, without threads and without clocks: descriptors and the time are passed in, work and
//! writes come out.

mod script;
mod timing;

pub use script::{Script, What};
pub use timing::{PageRequests, Timing};

/// Nanoseconds of whichever clock the caller has.
pub type Nanos = u64;

/// How 64 bytes reached the portal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posting {
    /// `ENQCMD`: a deferrable memory write, answered.
    NonPosted,
    /// `MOVDIR64B`: a posted write, never answered.
    Posted,
}

/// What is submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A real descriptor.
    Descriptor(Box<[u8; 64]>),
    /// One that only takes the time it would take: for simulators, nothing is read or written.
    Timed(Timed),
}

/// What decides how long a descriptor or batch takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timed {
    /// Given back with the completion.
    pub tag: u64,
    /// Descriptors of a batch; 1 is a descriptor by itself.
    pub members: u32,
    /// Source bytes of each.
    pub bytes: u64,
    /// Pages of each whose translation is not cached.
    pub translation_misses: u32,
    /// Page requests of each (block on fault).
    pub page_requests: u32,
}

/// The answer to a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It has an entry in the queue (a posted write never learns of it).
    Accepted,
    /// Retry: no room, or a queue that takes nothing.
    Retry,
    /// A posted write that went nowhere; dedicated and full is `SWERROR` 0x53.
    Dropped,
}
