//! The devices of a model: a JSON file, in its own format or in the one that `accel-config` saves.
//!
//! ```
//! let text = r#"{
//!   "seed": 7, "paced": false, "memory": "process",
//!   "devices": [
//!     { "name": "dsa0", "kind": "dsa", "version": 256, "numa_node": 0, "engines": 4, "event_log": false,
//!       "queues": [
//!         { "name": "wq0.0", "mode": "shared", "size": 16, "threshold": 15, "priority": 10, "group_id": 0,
//!           "block_on_fault": 0, "max_batch_size": 32, "max_transfer_size": 2097152 },
//!         { "name": "wq0.1", "mode": "dedicated", "size": 32 } ] },
//!     { "name": "iax1", "kind": "iaa", "engines": 8, "queues": [ { "name": "wq1.0", "block_on_fault": 1 } ] } ],
//!   "faults": [
//!     { "every": 10, "what": { "page_fault": { "per_mille": 500 } } },
//!     { "queue": "wq0.0", "opcode": 6, "per_mille": 1, "what": "wrong_result" },
//!     { "device": "dsa0", "nth": 1000, "what": { "late": { "delay_ns": 50000000 } } } ]
//! }"#;
//! let config = sterna_idxd_model::ModelConfig::from_json(text)?;
//! assert_eq!(config.devices[0].queues[1].size, 32);
//! sterna_idxd_model::Model::manual(config)?;
//! # Ok::<(), sterna_idxd_model::ConfigError>(())
//! ```
//!
//! Every field has a default, given with the fields below; an unknown field is an error. Faults are [`Script`]s. A file
//! that begins with `[` has the format of `accel-config save-config`: devices with `groups`, each with
//! `grouped_workqueues` and `grouped_engines`; fields that do not concern the model are ignored there. In both formats
//! comments and a comma after the last element are accepted, as by `accel-config`.

mod script;
mod timing;

use serde::{Deserialize, Deserializer, Serialize};

pub use self::script::{Script, ScriptedFault};
pub use self::timing::{PageRequests, Timing};

use crate::lenient::to_json;

/// The kind of accelerator of a device.
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

/// The mode in which a queue accepts descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// By `ENQCMD`, which reports whether there was room.
    #[default]
    Shared,
    /// By `MOVDIR64B`, which reports nothing: the only client counts the entries.
    Dedicated,
}

/// The memory that the devices reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// The memory of this process, through its real page tables.
    #[default]
    Process,
}

/// A whole model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Determines every order and every random event.
    pub seed: u64,
    /// Whether completions wait until the time given by [`Timing`] has really passed. If off, they come as fast as
    /// possible, in the order that the timing gives.
    pub paced: bool,
    /// The memory.
    pub memory: MemoryKind,
    /// The devices.
    pub devices: Vec<DeviceConfig>,
    /// Faults, each on all devices or on the one that it names.
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
    /// Version of the hardware: `0x100` is version 1.0.
    pub version: u32,
    /// NUMA node; -1 is none.
    pub numa_node: i32,
    /// Number of engines.
    pub engines: u32,
    /// Group of each engine; those not named are in group 0.
    pub engine_groups: Vec<u32>,
    /// Entries of all queues together.
    pub max_work_queues_size: u32,
    /// Largest batch that any queue can be given.
    pub max_batch_size: u32,
    /// Largest transfer that any queue can be given, bytes.
    pub max_transfer_size: u64,
    /// Page request service: whether the device can request that a page be made present.
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
    /// Whether completions of different engines, and of the members of a batch, may overtake each other.
    pub reorder: bool,
    /// *Compare Pattern* reports its difference rounded down to a multiple of this; 1 is exact.
    pub pattern_granule: u32,
    /// The device's speed; the default is [`Timing::of`] its kind.
    pub timing: Option<Timing>,
    /// The device's queues.
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
            pattern_granule: 8,
            timing: None,
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
    /// Shared: from this occupancy on, `ENQCMD` through an unprivileged portal returns retry. 0 means the size.
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
    /// The name that the administrator gave the queue.
    pub label: String,
    /// The kernel driver to which the queue is bound.
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

/// Why a configuration is not valid for a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON, or fields that do not exist.
    #[error("the model's configuration cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// The process's page tables cannot be read.
    #[error("the model's devices cannot see this process's memory: {0}")]
    Memory(std::io::Error),
    /// A thread for an engine cannot be started.
    #[error("{device}: a thread for an engine cannot be started: {error}")]
    Threads {
        /// Device.
        device: String,
        /// Why.
        error: std::io::Error,
    },
    /// The kernel or the device would refuse the configuration.
    #[error("{what}: {why}")]
    Refused {
        /// Device or queue.
        what: String,
        /// The rule that is broken.
        why: String,
    },
}

impl ModelConfig {
    /// Parses either format.
    pub fn from_json(text: &str) -> Result<ModelConfig, ConfigError> {
        let json = to_json(text);
        if json.trim_start().starts_with('[') {
            let devices: Vec<saved::Device> = serde_json::from_str(&json)?;
            let devices = devices.into_iter().map(saved::Device::into_config).collect();
            return Ok(ModelConfig { devices, ..ModelConfig::default() });
        }
        Ok(serde_json::from_str(&json)?)
    }

    /// Checks what concerns more than one device: names, and faults.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let refuse = |what: String, why: String| Err(ConfigError::Refused { what, why });
        if self.devices.len() > MAX_DEVICES {
            return refuse("devices".into(), format!("{} of them: at most {MAX_DEVICES}", self.devices.len()));
        }
        for (index, device) in self.devices.iter().enumerate() {
            if self.devices[..index].iter().any(|other| other.name == device.name) {
                return refuse(device.name.clone(), "there are two of that name".into());
            }
        }
        for (index, script) in self.faults.iter().enumerate() {
            if let Err(why) = self.check_script(script) {
                return refuse(format!("faults[{index}]"), why);
            }
        }
        Ok(())
    }

    /// A fault that never occurs would make its user believe that it is harmless.
    fn check_script(&self, script: &Script) -> Result<(), String> {
        let one_of = |names: Vec<&str>| if names.is_empty() { "none".into() } else { names.join(", ") };
        let here = |device: &&DeviceConfig| script.device.as_ref().is_none_or(|name| *name == device.name);
        let devices: Vec<&DeviceConfig> = self.devices.iter().filter(here).collect();
        if let Some(name) = script.device.as_ref().filter(|_| devices.is_empty()) {
            let there = one_of(self.devices.iter().map(|device| device.name.as_str()).collect());
            return Err(format!("there is no device {name:?}; there is {there}"));
        }
        let queues = || devices.iter().flat_map(|device| &device.queues).map(|queue| queue.name.as_str());
        if let Some(name) = script.queue.as_ref().filter(|name| queues().all(|queue| queue != name.as_str())) {
            return Err(format!("there is no queue {name:?}; there is {}", one_of(queues().collect())));
        }
        if script.every == Some(0) {
            return Err("every is 0: it is 1 (each) or more".into());
        }
        let share = match script.what {
            ScriptedFault::PageFault { per_mille, .. } => per_mille,
            _ => 0,
        };
        if let Some(share) = [script.per_mille.unwrap_or(0), share].into_iter().find(|share| *share > 1000) {
            return Err(format!("per_mille is {share}: 0 to 1000"));
        }
        match script.what {
            ScriptedFault::Late { delay_ns } | ScriptedFault::LateData { delay_ns } if delay_ns > MAX_DELAY => {
                Err(format!("delay_ns is {delay_ns}: at most {MAX_DELAY}"))
            }
            ScriptedFault::Slow { factor } if !(1..=1_000_000).contains(&factor) => {
                Err(format!("factor is {factor}: 1 to 1000000"))
            }
            _ => Ok(()),
        }
    }

    /// Returns one DSA device with one shared queue and default limits.
    pub fn dsa() -> ModelConfig {
        ModelConfig { devices: vec![DeviceConfig::default()], ..ModelConfig::default() }
    }
}

/// Maximum number of groups: more than any device has.
const MAX_GROUPS: u32 = 64;
/// Maximum number of devices: more than any host has.
const MAX_DEVICES: usize = 64;
/// Maximum number of a queue: the register that counts them has eight bits (DSA 9.2.3).
const MAX_QUEUE_NUMBER: u32 = 254;
/// Maximum configurable duration, ns; for times per byte, ps.
const MAX_DURATION: u64 = 1_000_000_000;
/// Maximum configurable delay, ns.
const MAX_DELAY: u64 = 1_000_000_000_000;

/// Parses a number in the kernel's spelling in names: `+1` and `01` would be second names of the same number.
fn number(digits: &str) -> Option<u32> {
    digits.parse().ok().filter(|number: &u32| number.to_string() == digits)
}

impl DeviceConfig {
    /// Returns an IAA device, `iax1`, with the limits of such devices.
    pub fn iaa() -> DeviceConfig {
        let queue = QueueConfig { name: "wq1.0".into(), block_on_fault: true, ..QueueConfig::default() };
        DeviceConfig {
            name: "iax1".into(),
            kind: Kind::Iaa,
            engines: 8,
            queues: vec![queue],
            ..DeviceConfig::default()
        }
    }

    /// Checks the rules of *Enable Device* and *Enable WQ* (DSA 5.1, 5.2), and of the kernel's attributes.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |what: &str, why: String| Err(ConfigError::Refused { what: what.into(), why });
        let prefix = if self.kind == Kind::Dsa { "dsa" } else { "iax" };
        let Some(of) = self.name.strip_prefix(prefix).and_then(number) else {
            return refuse(&self.name, format!("a {prefix} device is called {prefix} and a number"));
        };
        if !(1..=64).contains(&self.engines) {
            return refuse(&self.name, format!("{} engines: there are 1 to 64", self.engines));
        }
        if let Some(group) = self.engine_groups.iter().find(|group| **group >= MAX_GROUPS) {
            return refuse(&self.name, format!("an engine is in group {group}: there are 0 to {}", MAX_GROUPS - 1));
        }
        if self.engine_groups.len() > self.engines as usize {
            let (groups, engines) = (self.engine_groups.len(), self.engines);
            return refuse(&self.name, format!("engine_groups has {groups}, and there are {engines} engines"));
        }
        if !(-1..=4095).contains(&self.numa_node) {
            return refuse(&self.name, format!("numa_node {}: -1 (none) to 4095", self.numa_node));
        }
        // Registers VERSION (9.2.1) and WQCAP (9.2.3): 16 bits, the upper eight of a version being 1 or more; and 16
        // bits.
        if !(0x100..=0xffff).contains(&self.version) {
            return refuse(&self.name, format!("version {:#x}: 0x100 to 0xffff", self.version));
        }
        if self.max_work_queues_size > 0xffff {
            return refuse(&self.name, format!("max_work_queues_size {}: at most 65535", self.max_work_queues_size));
        }
        if !(1..=4096).contains(&self.pattern_granule) {
            return refuse(&self.name, format!("pattern_granule {}: 1 to 4096", self.pattern_granule));
        }
        if let Some(wrong) = self.timing.as_ref().and_then(out_of_range) {
            return refuse(&self.name, wrong);
        }
        // Fields of GENCAP (9.2.2): logarithms of 4 and 5 bits.
        if self.max_batch_size > 1 << 15 || self.max_transfer_size > 1 << 31 {
            let (batch, transfer) = (self.max_batch_size, self.max_transfer_size);
            return refuse(
                &self.name,
                format!("max_batch_size {batch}, max_transfer_size {transfer}: a device can say 2^15 and 2^31 at most"),
            );
        }
        let total: u64 = self.queues.iter().map(|queue| u64::from(queue.size)).sum();
        if total > u64::from(self.max_work_queues_size) {
            let most = self.max_work_queues_size;
            return refuse(&self.name, format!("its queues have {total} entries together, the device has {most}"));
        }
        for (index, queue) in self.queues.iter().enumerate() {
            let name = queue.name.as_str();
            let index_of = name.strip_prefix(&format!("wq{of}.")).and_then(number);
            if index_of.is_none_or(|index| index > MAX_QUEUE_NUMBER) {
                return refuse(name, format!("a queue of {} is called wq{of}. and 0 to {MAX_QUEUE_NUMBER}", self.name));
            }
            if self.queues[..index].iter().any(|other| other.name == queue.name) {
                return refuse(name, "there are two of that name".into());
            }
            if queue.size == 0 {
                return refuse(name, "it has no entries (size)".into());
            }
            if queue.threshold > queue.size {
                return refuse(name, format!("threshold {} is above its size {}", queue.threshold, queue.size));
            }
            if !(1..=15).contains(&queue.priority) {
                return refuse(name, format!("priority {}: 1 to 15", queue.priority));
            }
            let serves = |engine: u32| self.engine_groups.get(engine as usize).copied().unwrap_or(0) == queue.group_id;
            if !(0..self.engines).any(serves) {
                return refuse(name, format!("no engine is in its group {}", queue.group_id));
            }
            let batch = queue.max_batch_size;
            if self.kind == Kind::Dsa && (batch == 0 || batch > self.max_batch_size) {
                return refuse(name, format!("max_batch_size {batch}: 1 to {}", self.max_batch_size));
            }
            if queue.max_transfer_size == 0 || queue.max_transfer_size > self.max_transfer_size {
                let most = self.max_transfer_size;
                return refuse(name, format!("max_transfer_size {}: 1 to {most}", queue.max_transfer_size));
            }
            if queue.block_on_fault && !self.page_requests {
                return refuse(name, "block_on_fault needs page requests (WQ command error 0x25)".into());
            }
            if queue.prs_disable && (!self.event_log || queue.block_on_fault) {
                let why = "prs_disable needs the event log and no block_on_fault (WQ command error 0x2e)";
                return refuse(name, why.into());
            }
        }
        Ok(())
    }
}

/// Returns the first value of a timing that is out of range.
fn out_of_range(timing: &Timing) -> Option<String> {
    let figures = [
        ("descriptor_ns", timing.descriptor_ns),
        ("latency_ns", timing.latency_ns),
        ("byte_ps", timing.byte_ps),
        ("read_byte_ps", timing.read_byte_ps),
        ("engine_byte_ps", timing.engine_byte_ps),
        ("engine_read_byte_ps", timing.engine_read_byte_ps),
        ("batch_ns", timing.batch_ns),
        ("batch_descriptor_ns", timing.batch_descriptor_ns),
        ("translation_miss_ns", timing.translation_miss_ns),
        ("event_log_ns", timing.event_log_ns),
        ("enqcmd_ns", timing.enqcmd_ns),
        ("movdir64b_ns", timing.movdir64b_ns),
    ];
    if let Some((name, value)) = figures.into_iter().find(|(_, value)| *value > MAX_DURATION) {
        return Some(format!("{name} {value}: at most {MAX_DURATION}"));
    }
    let unfit = |class: &&(u32, u64, u64)| class.1 > class.2 || class.2 > MAX_DURATION;
    timing.page_requests.classes.iter().find(unfit).map(|(_, least, most)| {
        format!(
            "page requests of {least} to {most} ns: the first is no more than the second, both at most {MAX_DURATION}"
        )
    })
}

/// The format of `accel-config save-config`.
mod saved {
    use super::{DeviceConfig, Kind, QueueConfig, flag};
    use serde::Deserialize;

    #[derive(Deserialize)]
    pub(super) struct Device {
        dev: String,
        #[serde(default)]
        groups: Vec<Group>,
    }

    #[derive(Deserialize)]
    struct Group {
        dev: String,
        #[serde(default)]
        grouped_workqueues: Vec<Queue>,
        #[serde(default)]
        grouped_engines: Vec<Engine>,
    }

    #[derive(Deserialize)]
    struct Engine {
        dev: String,
    }

    /// Fields that do not concern the model are ignored.
    #[derive(Deserialize)]
    struct Queue {
        dev: String,
        #[serde(default)]
        mode: super::Mode,
        size: u32,
        #[serde(default)]
        threshold: u32,
        priority: Option<u32>,
        #[serde(default, deserialize_with = "flag")]
        block_on_fault: bool,
        #[serde(default, deserialize_with = "flag")]
        ats_disable: bool,
        #[serde(default, deserialize_with = "flag")]
        prs_disable: bool,
        // For IAA, whose queues lack this attribute, `accel-config` 3.5 saves the error number instead: -2.
        max_batch_size: Option<i64>,
        max_transfer_size: Option<u64>,
        #[serde(rename = "type")]
        owner: Option<String>,
        name: Option<String>,
        driver_name: Option<String>,
    }

    impl Device {
        pub(super) fn into_config(self) -> DeviceConfig {
            let kind = if self.dev.starts_with("iax") { Kind::Iaa } else { Kind::Dsa };
            let mut config = DeviceConfig { name: self.dev, kind, queues: Vec::new(), ..DeviceConfig::default() };
            let mut engines = Vec::new();
            for group in self.groups {
                // group0.3 is group 3.
                let id = group.dev.rsplit('.').next().and_then(|id| id.parse().ok()).unwrap_or(0);
                for engine in group.grouped_engines {
                    let index = engine.dev.rsplit('.').next().and_then(|id| id.parse().ok()).unwrap_or(engines.len());
                    engines.push((index, id));
                }
                for queue in group.grouped_workqueues {
                    config.queues.push(queue.into_config(id));
                }
            }
            // Engines that no group names do nothing; they are omitted.
            engines.sort_unstable();
            config.engine_groups = engines.iter().map(|&(_, group)| group).collect();
            config.engines = engines.len() as u32;
            config
        }
    }

    impl Queue {
        fn into_config(self, group_id: u32) -> QueueConfig {
            let default = QueueConfig::default();
            QueueConfig {
                name: self.dev,
                mode: self.mode,
                size: self.size,
                threshold: self.threshold,
                priority: self.priority.unwrap_or(default.priority),
                group_id,
                block_on_fault: self.block_on_fault,
                ats_disable: self.ats_disable,
                prs_disable: self.prs_disable,
                max_batch_size: self
                    .max_batch_size
                    .and_then(|size| u32::try_from(size).ok())
                    .unwrap_or(default.max_batch_size),
                max_transfer_size: self.max_transfer_size.unwrap_or(default.max_transfer_size),
                owner: self.owner.unwrap_or(default.owner),
                label: self.name.unwrap_or(default.label),
                driver_name: self.driver_name.unwrap_or(default.driver_name),
            }
        }
    }
}
