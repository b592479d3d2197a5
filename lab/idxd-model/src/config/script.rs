//! Scripted faults: what occurs, and when.

use serde::{Deserialize, Serialize};

/// A fault, and when it occurs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// Only on this device.
    pub device: Option<String>,
    /// Only on this queue.
    pub queue: Option<String>,
    /// Only operations with this code. Batches and drains match only if they are named here.
    pub opcode: Option<u8>,
    /// The n-th matching descriptor (from 0).
    pub nth: Option<u64>,
    /// Every n-th matching descriptor.
    pub every: Option<u64>,
    /// Per mille of the matching descriptors, by seed.
    pub per_mille: Option<u32>,
    /// Maximum number of times that the fault occurs.
    pub limit: Option<u64>,
    /// The fault.
    pub what: ScriptedFault,
}

/// A kind of fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScriptedFault {
    /// A page fault.
    PageFault {
        /// After this share of the transfer size has been read and written.
        #[serde(default)]
        per_mille: u32,
        /// Whether a page request resolves the fault, if the descriptor blocks on faults.
        #[serde(default)]
        resolvable: bool,
    },
    /// One bit of the result is wrong: of the data written, or of the record if no data is written.
    WrongResult,
    /// The data is written after the record.
    LateData {
        /// The delay after the record, ns.
        delay_ns: u64,
    },
    /// Data and record are late; the engine continues to work.
    Late {
        /// The delay, ns.
        delay_ns: u64,
    },
    /// The operation takes longer.
    Slow {
        /// How many times as long.
        factor: u32,
    },
    /// The operation never completes, and occupies its engine until the device is reset.
    Hang,
    /// The operation is executed, but its record is never written.
    DropCompletion,
    /// The operation fails with this status.
    Status {
        /// The code.
        code: u8,
    },
    /// The device halts when it starts this descriptor.
    Halt,
}

impl Default for ScriptedFault {
    fn default() -> ScriptedFault {
        ScriptedFault::PageFault { per_mille: 0, resolvable: false }
    }
}
