//! How long things take, as parameters.

use serde::{Deserialize, Serialize};

/// A device's speed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timing {
    /// Engine time of every descriptor, ns.
    pub descriptor_ns: u64,
    /// From the end of the work to the record being visible, ns; keeps no engine busy.
    pub latency_ns: u64,
    /// Of the whole device, picoseconds per source byte.
    pub byte_ps: u64,
    /// Of one engine, picoseconds per source byte.
    pub engine_byte_ps: u64,
    /// Reading a batch's list: once, ns.
    pub batch_ns: u64,
    /// Reading a batch's list: per descriptor, ns.
    pub batch_descriptor_ns: u64,
    /// A page whose translation is not cached, ns.
    pub translation_miss_ns: u64,
    /// A page request.
    pub page_requests: PageRequests,
}

/// How long page requests take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PageRequests {
    /// (per mille of the requests, least ns, most ns).
    pub classes: Vec<(u32, u64, u64)>,
}
