//! Determines whether a queue can be used, and if not, why, and which commands would help.
//!
//! The option names are those of accel-config 3.5 and later.

use std::path::Path;

use super::info::{DeviceInfo, Kind, Mode, QueueInfo, QueueType};
use super::verdict::{Reason, Remark, Unusable};
use crate::flags::Operation;

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
