//! Determines whether a queue can be used, and if not, why, with a remedy: a sentence and the commands.
//!
//! The sentence covers what an administrator cannot change with `accel-config` (boot parameters, permissions). The
//! option names are those of accel-config 3.5 and later.

use std::fmt;
use std::path::{Path, PathBuf};

use super::info::{DeviceInfo, Kind, Mode, QueueInfo, QueueType};
use crate::flags::Operation;

/// Why a queue cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// The reason, by type.
    pub reason: Reason,
    /// The commands that would help, to be run in this order as root; empty if none would.
    pub commands: Vec<String>,
}

/// A remark about a usable queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// One sentence.
    pub what: String,
    /// The commands that would change it; empty if none would.
    pub commands: Vec<String>,
}

/// Why a queue cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The kernel uses it.
    Kernel {
        /// Its driver, if shown.
        driver: Option<String>,
    },
    /// It is meant for another driver than the one for processes.
    OtherDriver(String),
    /// It has no entries: it has not been configured. Some queues of a device are normally unused.
    NotConfigured,
    /// It has no type, or an unknown one.
    NotForUsers,
    /// Shared virtual addressing is off.
    NoSharedAddressing,
    /// Address translation by the device is off.
    AtsDisabled,
    /// The device is disabled.
    DeviceDisabled,
    /// The queue is disabled.
    QueueDisabled,
    /// The kernel does not show a required attribute.
    Unknown(&'static str),
    /// The kernel does not show a required attribute of its device.
    UnknownOfDevice(&'static str),
    /// It is in no group, or in one without an engine.
    NoEngine,
    /// The device file does not exist.
    NoNode(PathBuf),
    /// The device file may not be opened by this process.
    NoPermission(PathBuf),
    /// It is dedicated and another process has it open.
    InUse,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Kernel { driver: Some(driver) } => write!(f, "it belongs to the kernel (driver {driver})"),
            Reason::Kernel { driver: None } => f.write_str("it belongs to the kernel"),
            Reason::OtherDriver(driver) => {
                write!(f, "it is meant for the driver {driver:?}, not for \"user\", the one that serves processes")
            }
            Reason::NotConfigured => f.write_str("it is not configured: it has no entries"),
            Reason::NotForUsers => f.write_str("it is not configured for processes (type user)"),
            Reason::NoSharedAddressing => f.write_str(
                "the device has no shared virtual addressing (pasid_enabled is 0): boot with intel_iommu=on,sm_on on a \
                 kernel that has it; some stable kernels leave it off even on capable machines",
            ),
            Reason::AtsDisabled => f.write_str(
                "address translation by the device is off (ats_disable is 1), and writes can be lost silently so",
            ),
            Reason::DeviceDisabled => f.write_str("its device is disabled"),
            Reason::QueueDisabled => f.write_str("it is disabled"),
            Reason::Unknown(attribute) => {
                write!(f, "the kernel does not show its {attribute} in a form that makes sense")
            }
            Reason::UnknownOfDevice(attribute) => {
                write!(f, "the kernel does not show its device's {attribute} in a form that makes sense")
            }
            Reason::NoEngine => f.write_str("it is in no group that has an engine"),
            Reason::NoNode(node) => {
                write!(
                    f,
                    "there is no {}: udev has not made it, or it is not visible in this container",
                    node.display()
                )
            }
            Reason::NoPermission(node) => write!(
                f,
                "this process may not open {node} for reading and writing: setfacl -m u:NAME:rw {node}, or a udev rule",
                node = node.display()
            ),
            Reason::InUse => f.write_str("it is dedicated, and another process has it open"),
        }
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if !self.commands.is_empty() {
            write!(f, "; as root: {}", self.commands.join("; "))?;
        }
        if self.commands.iter().any(|line| line.contains("disable-device")) {
            f.write_str(" (disabling a device loses the configuration of its other queues, too)")?;
        }
        Ok(())
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.commands.is_empty() {
            write!(f, "; as root: {}", self.commands.join("; "))?;
        }
        Ok(())
    }
}

/// Determines for each queue of the device whether it can be used.
pub(super) fn judge(info: &mut DeviceInfo) {
    for index in 0..info.queues.len() {
        let queue = &info.queues[index];
        let unusable = reason(info, queue).map(|reason| Unusable { commands: commands(info, queue, &reason), reason });
        let remarks = if unusable.is_none() { remarks(info, queue) } else { Vec::new() };
        let queue = &mut info.queues[index];
        (queue.unusable, queue.remarks) = (unusable, remarks);
    }
}

/// Returns the first obstacle, the most fundamental one first.
fn reason(info: &DeviceInfo, queue: &QueueInfo) -> Option<Reason> {
    let device = &info.device;
    if device.pasid_enabled == Some(false) {
        return Some(Reason::NoSharedAddressing);
    }
    if queue.size == 0 && queue.enabled != Some(true) {
        return Some(Reason::NotConfigured);
    }
    if let Some(attribute) = device.invalid_attribute {
        return Some(Reason::UnknownOfDevice(attribute));
    }
    match &queue.queue_type {
        Some(QueueType::User) => {}
        Some(QueueType::Kernel) => return Some(Reason::Kernel { driver: queue.driver.clone() }),
        Some(QueueType::None | QueueType::Other(_)) => return Some(Reason::NotForUsers),
        None => return Some(Reason::Unknown("type")),
    }
    if let Some(driver) = queue.driver.as_ref().filter(|driver| *driver != "user") {
        return Some(Reason::OtherDriver(driver.clone()));
    }
    if queue.ats_disable {
        return Some(Reason::AtsDisabled);
    }
    if let Some(attribute) = queue.invalid_attribute {
        return Some(Reason::Unknown(attribute));
    }
    match device.enabled {
        Some(true) => {}
        Some(false) => return Some(Reason::DeviceDisabled),
        None => return Some(Reason::UnknownOfDevice("state")),
    }
    match queue.enabled {
        Some(true) => {}
        Some(false) => return Some(Reason::QueueDisabled),
        None => return Some(Reason::Unknown("state")),
    }
    if queue.mode.is_none() {
        return Some(Reason::Unknown("mode"));
    }
    if queue.size == 0 {
        return Some(Reason::Unknown("size"));
    }
    if !info.engines.is_empty() && !queue.group.is_some_and(|group| served(info, group)) {
        return Some(Reason::NoEngine);
    }
    if let Err(reason) = node(&queue.node) {
        return Some(reason);
    }
    (queue.mode == Some(Mode::Dedicated) && queue.clients.is_some_and(|clients| clients > 0)).then_some(Reason::InUse)
}

fn node(path: &Path) -> Result<(), Reason> {
    use rustix::fs::{Access, access};
    use rustix::io::Errno;
    match access(path, Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => Ok(()),
        Err(Errno::NOENT | Errno::NOTDIR) => Err(Reason::NoNode(path.to_owned())),
        Err(_) => Err(Reason::NoPermission(path.to_owned())),
    }
}

/// Returns the commands that would help.
///
/// Two properties of the kernel's driver (`drivers/dma/idxd`, `sysfs.c` and `device.c`) determine them. Disabling a
/// queue loses its configuration (type, mode, threshold, priority, name, limits), so all of it is set again, not only
/// the changed part. And sizes and groups can be changed only while the *device* is disabled, which loses those of all
/// its queues and engines.
fn commands(info: &DeviceInfo, queue: &QueueInfo, reason: &Reason) -> Vec<String> {
    match reason {
        Reason::NoSharedAddressing | Reason::NoNode(_) | Reason::NoPermission(_) | Reason::UnknownOfDevice(_) => {
            Vec::new()
        }
        // The right number of entries depends on the purpose of all other queues of the device: that is a plan, not a
        // repair.
        _ if queue.size == 0 => Vec::new(),
        Reason::DeviceDisabled | Reason::QueueDisabled if configured(info, queue) => enable(info, queue),
        Reason::AtsDisabled | Reason::Unknown("ats_disable") => {
            reconfigure(info, queue, &Wanted { also: " --ats-disable=0", ..Wanted::of(queue) })
        }
        _ => reconfigure(info, queue, &Wanted { mode: Mode::Shared, also: "" }),
    }
}

fn reconfigure(info: &DeviceInfo, queue: &QueueInfo, wanted: &Wanted) -> Vec<String> {
    let (device, enabled) = (&info.device.name, info.device.enabled == Some(true));
    let anew = !enabled || !placed(info, queue);
    let group = queue.group.unwrap_or(0);
    let mut lines = Vec::new();
    if queue.enabled == Some(true) {
        lines.push(format!("accel-config disable-wq {}", queue.full_name()));
    }
    if enabled && anew {
        lines.push(format!("accel-config disable-device {device}"));
        lines.extend(engine_lines(info, group));
    } else if anew && !served(info, group) {
        lines.extend(engine_lines(info, group));
    }
    lines.push(config_line(info, queue, wanted, anew));
    if anew {
        lines.push(format!("accel-config enable-device {device}"));
    }
    lines.push(format!("accel-config enable-wq {}", queue.full_name()));
    lines
}

/// A configured queue only needs to be enabled.
fn enable(info: &DeviceInfo, queue: &QueueInfo) -> Vec<String> {
    let device =
        (info.device.enabled != Some(true)).then(|| format!("accel-config enable-device {}", info.device.name));
    device.into_iter().chain([format!("accel-config enable-wq {}", queue.full_name())]).collect()
}

/// Returns whether only enabling is missing.
fn configured(info: &DeviceInfo, queue: &QueueInfo) -> bool {
    queue.mode.is_some() && placed(info, queue)
}

/// Returns whether it has the settings that can only be made while its device is disabled: entries, and a group with an
/// engine.
fn placed(info: &DeviceInfo, queue: &QueueInfo) -> bool {
    queue.size > 0 && queue.group.is_some_and(|group| served(info, group) || info.engines.is_empty())
}

fn served(info: &DeviceInfo, group: u32) -> bool {
    info.engines.iter().any(|engine| engine.group == Some(group))
}

/// Returns the commands for the group's engines: those that it has; else one without a group, or any.
fn engine_lines(info: &DeviceInfo, group: u32) -> Vec<String> {
    let line = |name: &str| format!("accel-config config-engine {}/{name} --group-id={group}", info.device.name);
    let own = info.engines.iter().filter(|engine| engine.group == Some(group));
    let lines: Vec<String> = own.map(|engine| line(&engine.name)).collect();
    if !lines.is_empty() {
        return lines;
    }
    let free = info.engines.iter().find(|engine| engine.group.is_none()).or(info.engines.first());
    vec![free.map_or_else(|| line(&format!("engine{}.0", info.device.number)), |engine| line(&engine.name))]
}

/// Descriptors in a batch that suit migration: the pages of a packet of the usual 512 KiB. The kernel's default of 32
/// would split them into four batches.
pub const USUAL_BATCH: u32 = 128;
/// Bytes of a transfer that suit migration: the kernel's default, and four such packets.
pub const USUAL_TRANSFER: u64 = 2 << 20;

/// Returns the threshold that suits a shared queue of this size: at least one entry, normally a twelfth of them, is
/// reserved for the kernel's own commands (config-wq(1), `--threshold`).
pub const fn usual_threshold(size: u32) -> u32 {
    let kept = if size < 24 { 1 } else { size / 12 };
    size.saturating_sub(kept)
}

/// The desired settings of a queue, where they differ from its present or the usual ones.
struct Wanted {
    mode: Mode,
    also: &'static str,
}

impl Wanted {
    fn of(queue: &QueueInfo) -> Self {
        let also = if queue.block_on_fault { " --block-on-fault=1" } else { "" };
        Self { mode: queue.mode.unwrap_or(Mode::Shared), also }
    }
}

fn config_line(info: &DeviceInfo, queue: &QueueInfo, wanted: &Wanted, with_size: bool) -> String {
    let size = info.device.max_queue_entries.filter(|most| *most > 0).map_or(queue.size, |most| queue.size.min(most));
    let batch = match queue.kind() {
        Kind::Dsa => {
            let most = info.device.max_batch.unwrap_or(USUAL_BATCH);
            format!(" --max-batch-size={}", queue.max_batch.max(USUAL_BATCH).min(most.max(1)))
        }
        Kind::Iaa => String::new(),
    };
    let threshold = match wanted.mode {
        Mode::Shared => format!(
            " --threshold={}",
            queue.threshold.filter(|threshold| *threshold > 0).unwrap_or_else(|| usual_threshold(size))
        ),
        Mode::Dedicated => String::new(),
    };
    format!(
        "accel-config config-wq {} --group-id={} --mode={} --type=user --driver-name=user --name={}{}{threshold} \
         --priority={} --max-transfer-size={}{batch}{}",
        queue.full_name(),
        queue.group.unwrap_or(0),
        wanted.mode,
        queue.label.as_deref().filter(|label| plain(label)).unwrap_or("sterna"),
        if with_size { format!(" --wq-size={size}") } else { String::new() },
        queue.priority.filter(|priority| *priority > 0).unwrap_or(10),
        info.device.max_transfer.unwrap_or(USUAL_TRANSFER).min(USUAL_TRANSFER),
        wanted.also,
    )
}

/// Returns whether a label from sysfs is safe in a command that people paste into a root shell.
fn plain(label: &str) -> bool {
    !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

fn remarks(info: &DeviceInfo, queue: &QueueInfo) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if queue.kind() == Kind::Dsa {
        // The command has a suitable batch size in any case.
        let larger = || reconfigure(info, queue, &Wanted::of(queue));
        let declared = queue.declares(Operation::Batch as u8);
        let most = queue.device.max_batch.unwrap_or(1);
        if queue.max_batch < 2 {
            remarks.push(Remark {
                what: "it takes no batches, so every page is a submission of its own".to_owned(),
                commands: if most > 1 { larger() } else { Vec::new() },
            });
        } else if declared == Some(false) {
            remarks.push(Remark {
                what: if queue.device.is_first_generation() {
                    "the kernel offers no batches on this generation of the device; only a process with CAP_SYS_RAWIO, \
                     which may map the portal, can have them"
                } else {
                    "it is not configured for batches (op_config)"
                }
                .to_owned(),
                commands: Vec::new(),
            });
        } else if queue.max_batch < USUAL_BATCH.min(most) {
            remarks.push(Remark {
                what: format!("batches are limited to {} descriptors of {most} possible", queue.max_batch),
                commands: larger(),
            });
        }
    }
    if queue.block_on_fault && queue.mode == Some(Mode::Shared) {
        remarks.push(Remark {
            what: "block-on-fault is enabled on a shared queue: one program's page fault can delay all others"
                .to_owned(),
            commands: reconfigure(info, queue, &Wanted { also: " --block-on-fault=0", ..Wanted::of(queue) }),
        });
    }
    remarks
}
