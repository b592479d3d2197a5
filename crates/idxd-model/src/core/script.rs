//! What goes wrong, when a test says so.

use serde::{Deserialize, Serialize};

/// One thing that goes wrong, and when.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// Only on this device.
    pub device: Option<String>,
    /// Only on this queue.
    pub queue: Option<String>,
    /// Only operations with this code.
    pub opcode: Option<u8>,
    /// The n-th matching descriptor (from 0).
    pub nth: Option<u64>,
    /// Every n-th matching descriptor.
    pub every: Option<u64>,
    /// Per mille of the matching descriptors, by seed.
    pub per_mille: Option<u32>,
    /// At most so many times.
    pub limit: Option<u64>,
    /// What happens to it.
    pub what: What,
}

/// What happens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A page fault that cannot be resolved, at this share (per mille) of the transfer.
    #[default]
    PageFault,
    /// One bit of the result is wrong: of the data written if there is any, else of the record.
    WrongResult,
    /// The data is written so many ns after the record.
    LateData {
        /// How long after.
        delay_ns: u64,
    },
    /// Data and record come so many ns later than they should.
    Late {
        /// How much later.
        delay_ns: u64,
    },
    /// Takes this many times as long.
    Slow {
        /// How many times.
        factor: u32,
    },
    /// Never completes, and keeps its engine.
    Hang,
    /// Is done, but its record is never written.
    DropCompletion,
    /// The hardware says so: this status.
    Status {
        /// The code.
        code: u8,
    },
    /// The device halts when it comes to this descriptor.
    Halt,
}
