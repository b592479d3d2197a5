//! Devices, groups, engines and queues as types.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::Directories;
use super::attribute::{Attributes, Doubt};
use super::capabilities::{GeneralCapabilities, IaaCapabilities, OperationSet};
use super::verdict::{Remark, Unusable};

/// Which accelerator a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Data Streaming Accelerator.
    Dsa,
    /// In-Memory Analytics Accelerator, which the kernel calls `iax`.
    Iaa,
}

impl Kind {
    pub(super) const fn prefix(self) -> &'static str {
        match self {
            Kind::Dsa => "dsa",
            Kind::Iaa => "iax",
        }
    }

    pub(super) const fn directory(self) -> &'static str {
        self.prefix()
    }

    /// Returns the alignment of its completion records, which is also their size.
    pub const fn record_bytes(self) -> u64 {
        match self {
            Kind::Dsa => 32,
            Kind::Iaa => 64,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Dsa => "DSA",
            Kind::Iaa => "IAA",
        })
    }
}

/// A device, without its parts. `None` means unknown: the kernel does not show the attribute or its value is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// The name: `dsa0`, `iax1`.
    pub name: String,
    /// The number in the name, unique over both kinds.
    pub number: u32,
    /// Which accelerator it is.
    pub kind: Kind,
    /// The version register: 0x100 is the first generation (Sapphire and Emerald Rapids), on which processes without
    /// `CAP_SYS_RAWIO` cannot use batches. 0 if not known.
    pub version: u32,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// Whether the device is enabled.
    pub enabled: Option<bool>,
    /// Whether queues may be configured (not on devices passed to a guest).
    pub configurable: Option<bool>,
    /// Whether user-space queues can bind an address space: shared virtual addressing is on.
    pub pasid_enabled: Option<bool>,
    /// An attribute with an invalid value that must be known before anything is submitted.
    pub invalid_attribute: Option<&'static str>,
    /// The most descriptors in a batch; absent on IAA.
    pub max_batch: Option<u32>,
    /// The most bytes of a transfer.
    pub max_transfer: Option<u64>,
    /// Number of work queues.
    pub max_queues: Option<u32>,
    /// Entries of all its queues together.
    pub max_queue_entries: Option<u32>,
    /// Number of engines.
    pub max_engines: Option<u32>,
    /// Number of groups.
    pub max_groups: Option<u32>,
    /// General capabilities.
    pub capabilities: Option<GeneralCapabilities>,
    /// Its operations. For first-generation devices newer kernels omit *batch*, although a portal accepts it.
    pub operations: Option<OperationSet>,
    /// IAA capabilities; only second-generation IAA devices show them.
    pub iaa_capabilities: Option<IaaCapabilities>,
    /// Entries of the event log.
    pub event_log_size: Option<u32>,
    /// Why the last administrative command failed, 0 if it did not (`enum idxd_scmd_stat`).
    pub command_status: Option<u32>,
}

/// Versions up to this are the first generation (`DEVICE_VERSION_1` of the kernel's driver).
pub(crate) const FIRST_GENERATION: u32 = 0x1ff;

impl Device {
    /// Makes a device with only a name and a kind: for queues that do not come from sysfs.
    pub fn new(name: &str, kind: Kind) -> Self {
        Self {
            name: name.to_owned(),
            number: name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0),
            kind,
            version: 0,
            numa_node: None,
            enabled: None,
            configurable: None,
            pasid_enabled: None,
            invalid_attribute: None,
            max_batch: None,
            max_transfer: None,
            max_queues: None,
            max_queue_entries: None,
            max_engines: None,
            max_groups: None,
            capabilities: None,
            operations: None,
            iaa_capabilities: None,
            event_log_size: None,
            command_status: None,
        }
    }

    /// Returns whether it is a device of the first generation, or may be one.
    pub fn is_first_generation(&self) -> bool {
        self.version <= FIRST_GENERATION
    }

    pub(super) fn read(name: &str, kind: Kind, number: u32, attributes: &mut Attributes) -> Self {
        let pasid_enabled = attributes.switch_or_invalid("pasid_enabled");
        Self {
            number,
            version: attributes.number32("version", u32::MAX).unwrap_or(0),
            numa_node: attributes.number_or_none("numa_node", MAX_NODES),
            enabled: attributes.enabled("state"),
            configurable: attributes.switch("configurable"),
            pasid_enabled: pasid_enabled.ok().flatten(),
            invalid_attribute: pasid_enabled.err().map(|Doubt(attribute)| attribute),
            max_batch: attributes.number32("max_batch_size", MAX_BATCH),
            max_transfer: attributes.number("max_transfer_size", MAX_TRANSFER),
            max_queues: attributes.number32("max_work_queues", MAX_MEMBERS),
            max_queue_entries: attributes.number32("max_work_queues_size", MAX_ENTRIES),
            max_engines: attributes.number32("max_engines", MAX_MEMBERS),
            max_groups: attributes.number32("max_groups", MAX_MEMBERS),
            capabilities: attributes.number("gen_cap", u64::MAX).map(GeneralCapabilities),
            operations: operations(attributes, "op_cap"),
            iaa_capabilities: attributes.number("iaa_cap", u64::MAX).map(IaaCapabilities),
            event_log_size: attributes.number32("event_log_size", u32::MAX),
            command_status: attributes.number32("cmd_status", u32::MAX),
            ..Self::new(name, kind)
        }
    }
}

/// The largest plausible values of a kernel's numbers: the registers have no more bits (DSA sections 9.2.2 to 9.2.4).
const MAX_NODES: u32 = 4095;
const MAX_BATCH: u32 = 1 << 15;
const MAX_TRANSFER: u64 = 1 << 31;
const MAX_MEMBERS: u32 = 255;
const MAX_ENTRIES: u32 = 65_535;

fn operations(attributes: &mut Attributes, attribute: &str) -> Option<OperationSet> {
    let text = attributes.text(attribute)?;
    let set = OperationSet::parse(&text);
    if set.is_none() {
        let name = attributes.name().to_owned();
        attributes.odd(format!("{name}/{attribute} is no set of operations"));
    }
    set
}

/// A group: queues and the engines that serve them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupInfo {
    /// The name: `group0.1`.
    pub name: String,
    /// The number within the device.
    pub index: u32,
    /// Traffic class A.
    pub traffic_class_a: Option<u32>,
    /// Traffic class B.
    pub traffic_class_b: Option<u32>,
    /// Fraction of the work descriptors an engine may have in progress: 0 all, 1 half, 2 a quarter, 3 an eighth.
    pub descriptor_limit: Option<u32>,
    /// The same for batches.
    pub batch_limit: Option<u32>,
}

impl GroupInfo {
    pub(super) fn read(device: u32, index: u32, attributes: &mut Attributes) -> Self {
        Self {
            name: format!("group{device}.{index}"),
            index,
            traffic_class_a: attributes.number_or_none("traffic_class_a", 7),
            traffic_class_b: attributes.number_or_none("traffic_class_b", 7),
            descriptor_limit: attributes.number32("desc_progress_limit", 3),
            batch_limit: attributes.number32("batch_progress_limit", 3),
        }
    }
}

/// An engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineInfo {
    /// The name: `engine0.2`.
    pub name: String,
    /// The number within the device.
    pub index: u32,
    /// The group it serves.
    pub group: Option<u32>,
}

impl EngineInfo {
    pub(super) fn read(device: u32, index: u32, attributes: &mut Attributes) -> Self {
        Self {
            name: format!("engine{device}.{index}"),
            index,
            group: attributes.number_or_none("group_id", MAX_MEMBERS),
        }
    }
}

/// The users of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueType {
    /// Processes, through a device file.
    User,
    /// The kernel itself.
    Kernel,
    /// No user: not configured.
    None,
    /// A type that this crate does not know.
    Other(String),
}

/// The mode in which a queue accepts descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// From many processes; reports when it is full.
    Shared,
    /// From one process; drops descriptors that do not fit.
    Dedicated,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Shared => "shared",
            Mode::Dedicated => "dedicated",
        })
    }
}

/// A work queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueInfo {
    /// The name: `wq0.0`.
    pub name: String,
    /// The number within the device.
    pub index: u32,
    /// The device it belongs to.
    pub device: Arc<Device>,
    /// The device file.
    pub node: PathBuf,
    /// Whether the queue is enabled.
    pub enabled: Option<bool>,
    /// The users of the queue.
    pub queue_type: Option<QueueType>,
    /// The kernel driver it is bound to or meant for: `user` for processes.
    pub driver: Option<String>,
    /// The administrator's name for it.
    pub label: Option<String>,
    /// Shared or dedicated; `None` if not known, in which case the queue is not usable.
    pub mode: Option<Mode>,
    /// Entries. 0 if not known.
    pub size: u32,
    /// For a shared queue, the entries that can be filled through a limited portal, the only kind for processes.
    pub threshold: Option<u32>,
    /// Priority within the group, 1 to 15, higher first.
    pub priority: Option<u32>,
    /// The group it is in.
    pub group: Option<u32>,
    /// The most descriptors in a batch; 1 if it accepts no batches.
    pub max_batch: u32,
    /// The most bytes of one transfer.
    pub max_transfer: u64,
    /// Whether descriptors may block on faults.
    pub block_on_fault: bool,
    /// Whether address translation by the device is off. Such queues are refused: writes can be lost silently.
    pub ats_disable: bool,
    /// Whether page requests are off: every fault is reported, none resolved.
    pub prs_disable: bool,
    /// An attribute with an invalid value that must be known before anything is submitted: the queue is not usable.
    pub invalid_attribute: Option<&'static str>,
    /// Operations the queue is configured for; `None` means whatever the device has.
    pub operations: Option<OperationSet>,
    /// Processes that have it open.
    pub clients: Option<u32>,
    /// Why it cannot be used, if it cannot.
    pub unusable: Option<Unusable>,
    /// Remarks about a usable queue.
    pub remarks: Vec<Remark>,
}

/// The assumed largest transfer if the kernel does not show it: the kernel's default.
const DEFAULT_TRANSFER: u64 = 2 << 20;

impl QueueInfo {
    /// Makes a queue that does not come from sysfs, for instance a model's: unknown values have the kernel's defaults,
    /// and the queue is usable.
    pub fn new(name: &str, device: Arc<Device>, mode: Mode, size: u32) -> Self {
        let index = name.rsplit('.').next().and_then(|digits| digits.parse().ok()).unwrap_or(0);
        Self {
            name: name.to_owned(),
            index,
            node: Directories::system().node(device.kind, name),
            enabled: Some(true),
            queue_type: Some(QueueType::User),
            driver: Some("user".to_owned()),
            label: None,
            mode: Some(mode),
            size,
            threshold: Some(size),
            priority: Some(10),
            group: Some(0),
            max_batch: if device.kind == Kind::Dsa { 32 } else { 1 },
            max_transfer: DEFAULT_TRANSFER,
            block_on_fault: false,
            ats_disable: false,
            prs_disable: false,
            invalid_attribute: None,
            operations: device.operations,
            clients: None,
            unusable: None,
            remarks: Vec::new(),
            device,
        }
    }

    /// Returns the kind of its accelerator.
    pub fn kind(&self) -> Kind {
        self.device.kind
    }

    /// Returns whether the kernel declares that the queue has the operation. `None` if it declares nothing.
    pub fn declares(&self, code: u8) -> Option<bool> {
        self.operations.or(self.device.operations).map(|set| set.contains_code(code))
    }

    /// Returns `dsa0/wq0.0`, its name in `accel-config`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.device.name, self.name)
    }

    pub(super) fn read(index: u32, device: &Arc<Device>, at: &Directories, attributes: &mut Attributes) -> Self {
        let name = attributes.name().to_owned();
        let mode = attributes.text("mode");
        // Older kernels have neither. On newer ones, a guess could lose writes, or submit to another driver's queue.
        let ats_disable = attributes.switch_or_invalid("ats_disable");
        let driver = attributes.text_or_doubt("driver_name");
        let doubt = ats_disable.as_ref().err().or(driver.as_ref().err());
        let max_transfer = attributes.number("max_transfer_size", MAX_TRANSFER);
        let max_batch = attributes.number32("max_batch_size", MAX_BATCH);
        let size = attributes.number32("size", MAX_ENTRIES).unwrap_or(0);
        Self {
            node: at.node(device.kind, &name),
            enabled: attributes.enabled("state"),
            queue_type: attributes.text("type").map(|text| match text.as_str() {
                "user" => QueueType::User,
                "kernel" => QueueType::Kernel,
                "none" => QueueType::None,
                _ => QueueType::Other(text),
            }),
            invalid_attribute: doubt.map(|Doubt(attribute)| *attribute),
            driver: driver.ok().flatten(),
            label: attributes.text("name"),
            mode: match mode.as_deref() {
                Some("shared") => Some(Mode::Shared),
                Some("dedicated") => Some(Mode::Dedicated),
                _ => None,
            },
            size,
            threshold: attributes.number32("threshold", MAX_ENTRIES).map(|threshold| threshold.min(size)),
            priority: attributes.number32("priority", 15),
            group: attributes.number_or_none("group_id", MAX_MEMBERS),
            // Batches are used only if the kernel shows the attribute, which is hidden where there are none.
            max_batch: max_batch.filter(|_| device.kind == Kind::Dsa).unwrap_or(1).max(1),
            max_transfer: max_transfer.or(device.max_transfer).unwrap_or(DEFAULT_TRANSFER).max(1),
            block_on_fault: attributes.switch("block_on_fault").unwrap_or(false),
            ats_disable: ats_disable == Ok(Some(true)),
            prs_disable: attributes.switch("prs_disable").unwrap_or(false),
            operations: operations(attributes, "op_config"),
            clients: attributes.number32("clients", u32::MAX),
            index,
            ..Self::new(&name, Arc::clone(device), Mode::Shared, 0)
        }
    }
}

/// A device with all its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The device itself.
    pub device: Arc<Device>,
    /// Its groups.
    pub groups: Vec<GroupInfo>,
    /// Its engines.
    pub engines: Vec<EngineInfo>,
    /// Its work queues.
    pub queues: Vec<QueueInfo>,
    /// Attributes with invalid values, one sentence each.
    pub invalid_attributes: Vec<String>,
}
