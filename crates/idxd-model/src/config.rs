//! What devices a model has: a JSON file, in a form of its own or in the one that `accel-config` saves.
//!
//! ```json
//! { "seed": 7, "paced": false, "memory": "process",
//!   "devices": [ { "name": "dsa0", "kind": "dsa", "version": 256, "numa_node": 0, "engines": 4,
//!                  "queues": [ { "name": "wq0.0", "mode": "shared", "size": 16, "threshold": 15,
//!                                "priority": 10, "group_id": 0, "block_on_fault": 0,
//!                                "max_batch_size": 32, "max_transfer_size": 2097152 } ] } ],
//!   "faults": [ { "what": "page_fault", "every": 10 } ] }
//! ```
//!
//! Every field but the names has a default. A file that begins with `[` is what `accel-config save-config` writes:
//! devices with `groups`, each with `grouped_workqueues` and `grouped_engines`.

use serde::{Deserialize, Deserializer, Serialize};

use crate::core::{Script, Timing};

/// Which of the two accelerators a device is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Data Streaming Accelerator.
    #[default]
    Dsa,
    /// In-Memory Analytics Accelerator (the kernel's old name is `iax`).
    #[serde(alias = "iax")]
    Iaa,
}

/// How a queue takes descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// By `ENQCMD`, which says whether there was room.
    #[default]
    Shared,
    /// By `MOVDIR64B`, which says nothing: the one client counts.
    Dedicated,
}

/// Whose memory the devices reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// This process's, through its real page tables.
    #[default]
    Process,
}

/// A whole model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Chooses every order and every random moment.
    pub seed: u64,
    /// Whether completions wait until the time that [`Timing`] gives has really passed. Off: as fast as they can be,
    /// in the order that the timing gives.
    pub paced: bool,
    /// Whose memory.
    pub memory: MemoryKind,
    /// The devices.
    pub devices: Vec<DeviceConfig>,
    /// What goes wrong, on every device whose name it does not exclude.
    pub faults: Vec<Script>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceConfig {
    /// `dsa0`, `iax1`.
    pub name: String,
    /// DSA or IAA.
    pub kind: Kind,
    /// Of the hardware: `0x100` is version 1.0.
    pub version: u32,
    /// NUMA node; -1 is none.
    pub numa_node: i32,
    /// Number of engines.
    pub engines: u32,
    /// Group of each engine; those not named are in group 0.
    pub engine_groups: Vec<u32>,
    /// Entries for all queues together.
    pub max_work_queues_size: u32,
    /// Largest batch that any queue can be given.
    pub max_batch_size: u32,
    /// Largest transfer that any queue can be given, bytes.
    pub max_transfer_size: u64,
    /// Page request service: whether the device can ask for a page to be made present.
    pub page_requests: bool,
    /// Event log of version 2 devices: completion records that fault are copied by the kernel later.
    pub event_log: bool,
    /// GENCAP: overlapping copies are done, not refused.
    pub overlapping_copy: bool,
    /// GENCAP: batches of one descriptor.
    pub batch_of_one: bool,
    /// GENCAP: Cache Control (writes to cache).
    pub cache_control: bool,
    /// GENCAP: Destination Readback.
    pub destination_readback: bool,
    /// Order: how completions of different engines, and of the members of a batch, may overtake each other.
    pub reorder: bool,
    /// Its speed.
    pub timing: Timing,
    /// Its queues.
    pub queues: Vec<QueueConfig>,
}

impl Default for DeviceConfig {
    fn default() -> DeviceConfig {
        DeviceConfig {
            name: "dsa0".into(),
            kind: Kind::Dsa,
            version: 0x100,
            numa_node: 0,
            engines: 4,
            engine_groups: Vec::new(),
            max_work_queues_size: 128,
            max_batch_size: 1024,
            max_transfer_size: 1 << 31,
            page_requests: true,
            event_log: false,
            overlapping_copy: true,
            batch_of_one: false,
            cache_control: true,
            destination_readback: true,
            reorder: true,
            timing: Timing::default(),
            queues: vec![QueueConfig::default()],
        }
    }
}

/// One work queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueueConfig {
    /// `wq0.0`.
    pub name: String,
    /// Shared or dedicated.
    pub mode: Mode,
    /// Entries.
    pub size: u32,
    /// Shared: `ENQCMD` through an unprivileged portal is retried from this occupancy on. 0 is the size.
    pub threshold: u32,
    /// 1 (lowest) to 15.
    pub priority: u32,
    /// The group whose engines serve it.
    #[serde(alias = "group")]
    pub group_id: u32,
    /// Whether descriptors may block on fault.
    #[serde(deserialize_with = "flag")]
    pub block_on_fault: bool,
    /// Largest batch.
    pub max_batch_size: u32,
    /// Largest transfer, bytes.
    pub max_transfer_size: u64,
    /// Address translation service off.
    #[serde(deserialize_with = "flag")]
    pub ats_disable: bool,
    /// Page request service off.
    #[serde(deserialize_with = "flag")]
    pub prs_disable: bool,
    /// `user`, `kernel`.
    #[serde(rename = "type")]
    pub owner: String,
    /// What the administrator called it.
    pub label: String,
    /// The kernel driver it is bound to.
    pub driver_name: String,
}

impl Default for QueueConfig {
    fn default() -> QueueConfig {
        QueueConfig {
            name: "wq0.0".into(),
            mode: Mode::Shared,
            size: 16,
            threshold: 0,
            priority: 10,
            group_id: 0,
            block_on_fault: false,
            max_batch_size: 32,
            max_transfer_size: 2 << 20,
            ats_disable: false,
            prs_disable: false,
            owner: "user".into(),
            label: "sterna".into(),
            driver_name: "user".into(),
        }
    }
}

/// `accel-config` writes 0 and 1 where JSON has false and true.
fn flag<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Flag {
        Bool(bool),
        Number(u64),
    }
    Ok(match Flag::deserialize(from)? {
        Flag::Bool(value) => value,
        Flag::Number(value) => value != 0,
    })
}

/// Why a configuration cannot be a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON, or fields that do not exist.
    #[error("the model's configuration cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// The kernel or the device would refuse it.
    #[error("{what}: {why}")]
    Refused {
        /// Device or queue.
        what: String,
        /// The rule it breaks.
        why: String,
    },
}

impl ModelConfig {
    /// Reads either form.
    pub fn from_json(text: &str) -> Result<ModelConfig, ConfigError> {
        Ok(serde_json::from_str(text)?)
    }

    /// One DSA device with one shared queue and default limits.
    pub fn dsa() -> ModelConfig {
        ModelConfig { devices: vec![DeviceConfig::default()], ..ModelConfig::default() }
    }
}
