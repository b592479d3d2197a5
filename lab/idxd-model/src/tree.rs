//! A directory that imitates the kernel's: sysfs attributes of devices, queues, engines and groups, and device files
//! that can be mapped. Drivers use it in place of `/sys/bus/dsa/devices` and `/dev`.
//!
//! A device file is empty, so a store to a mapping of it faults; [`crate::trap`] makes it a portal. A `write` has no
//! effect.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::config::{DeviceConfig, Kind, Mode, QueueConfig};
use crate::model::{Model, portals};
use crate::table::{dsa, iaa};

/// The location of a fake tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Replaces `/sys/bus/dsa/devices`.
    pub sysfs: PathBuf,
    /// Replaces `/dev`.
    pub dev: PathBuf,
}

impl Model {
    /// Writes the tree into an existing directory.
    pub fn write_tree(&self, directory: &Path) -> io::Result<Tree> {
        let tree = Tree { sysfs: directory.join("sys"), dev: directory.join("dev") };
        for queue in self.queues() {
            let file = tree.dev.join(class(queue.device().kind)).join(queue.name());
            fs::create_dir_all(file.parent().expect("it has just been joined"))?;
            fs::write(&file, [])?;
            portals::add(&fs::metadata(&file)?, &queue);
        }
        for device in &self.config().devices {
            write_device(&tree.sysfs, device)?;
        }
        Ok(tree)
    }
}

fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Dsa => "dsa",
        Kind::Iaa => "iax",
    }
}

/// Writes attributes, each with the kernel's final newline.
fn attributes(directory: &Path, values: &[(&str, String)]) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    values.iter().try_for_each(|(name, value)| fs::write(directory.join(name), format!("{value}\n")))
}

fn write_device(sysfs: &Path, device: &DeviceConfig) -> io::Result<()> {
    let directory = sysfs.join(&device.name);
    let number: String = device.name.chars().filter(char::is_ascii_digit).collect();
    let groups = device.queues.iter().map(|queue| queue.group_id + 1).max().unwrap_or(1).max(4);
    let mut values = vec![
        ("version", format!("{:#x}", device.version)),
        ("cdev_major", "241".into()),
        ("errors", "0x0 0x0 0x0 0x0".into()),
        ("max_work_queues_size", device.max_work_queues_size.to_string()),
        ("max_engines", device.engines.to_string()),
        ("max_groups", groups.to_string()),
        ("max_read_buffers", "96".into()),
        ("max_transfer_size", device.max_transfer_size.to_string()),
        ("max_work_queues", work_queues(device).to_string()),
        ("numa_node", device.numa_node.to_string()),
        ("op_cap", op_cap(device)),
        ("gen_cap", format!("{:#x}", gen_cap(device))),
        ("pasid_enabled", "1".into()),
        ("state", "enabled".into()),
        ("configurable", "1".into()),
        ("read_buffer_limit", "0".into()),
        ("cmd_status", "0x0".into()),
        ("clients", "0".into()),
        ("event_log_size", if device.event_log { "64" } else { "0" }.into()),
    ];
    match device.kind {
        Kind::Dsa => values.push(("max_batch_size", device.max_batch_size.to_string())),
        Kind::Iaa => values.push(("iaa_cap", "0x0".into())),
    }
    attributes(&directory, &values)?;
    for (minor, queue) in device.queues.iter().enumerate() {
        write_queue(&directory, device, queue, minor)?;
        link(sysfs, &device.name, &queue.name)?;
    }
    for index in 0..work_queues(device) {
        let name = format!("wq{number}.{index}");
        if device.queues.iter().all(|queue| queue.name != name) {
            write_spare_queue(&directory, device, &name)?;
            link(sysfs, &device.name, &name)?;
        }
    }
    for engine in 0..device.engines {
        let name = format!("engine{number}.{engine}");
        let group = device.engine_groups.get(engine as usize).copied().unwrap_or(0);
        attributes(&directory.join(&name), &[("group_id", group.to_string())])?;
        link(sysfs, &device.name, &name)?;
    }
    for group in 0..groups {
        let name = format!("group{number}.{group}");
        let of = |names: Vec<String>| names.join(" ");
        let queues = device.queues.iter().filter(|queue| queue.group_id == group).map(|queue| queue.name.clone());
        let engine_group = |engine: &u32| device.engine_groups.get(*engine as usize).copied().unwrap_or(0) == group;
        let engines = (0..device.engines).filter(engine_group).map(|engine| format!("engine{number}.{engine}"));
        let values = [
            ("work_queues", of(queues.collect())),
            ("engines", of(engines.collect())),
            ("use_read_buffer_limit", "0".into()),
            ("read_buffers_allowed", "96".into()),
            ("read_buffers_reserved", "0".into()),
            ("traffic_class_a", "1".into()),
            ("traffic_class_b", "1".into()),
            ("desc_progress_limit", "0".into()),
            ("batch_progress_limit", "0".into()),
        ];
        attributes(&directory.join(&name), &values)?;
        link(sysfs, &device.name, &name)?;
    }
    Ok(())
}

/// Links a directory into the bus, where all devices and queues are side by side.
fn link(sysfs: &Path, device: &str, name: &str) -> io::Result<()> {
    let at = sysfs.join(name);
    match fs::remove_file(&at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    symlink(Path::new(device).join(name), at)
}

fn write_queue(directory: &Path, device: &DeviceConfig, queue: &QueueConfig, minor: usize) -> io::Result<()> {
    let flag = |on: bool| u8::from(on).to_string();
    let mode = if queue.mode == Mode::Shared { "shared" } else { "dedicated" };
    let threshold = match (queue.mode, queue.threshold) {
        (Mode::Dedicated, _) => 0,
        (Mode::Shared, 0) => queue.size,
        (Mode::Shared, threshold) => threshold,
    };
    let mut values = vec![
        ("block_on_fault", flag(queue.block_on_fault)),
        ("group_id", queue.group_id.to_string()),
        ("size", queue.size.to_string()),
        ("type", queue.owner.clone()),
        ("cdev_minor", minor.to_string()),
        ("mode", mode.into()),
        ("priority", queue.priority.to_string()),
        ("state", "enabled".into()),
        ("threshold", threshold.to_string()),
        ("max_transfer_size", queue.max_transfer_size.to_string()),
        ("ats_disable", flag(queue.ats_disable)),
        ("prs_disable", flag(queue.prs_disable)),
        ("occupancy", "0".into()),
        ("enqcmds_retries", "32".into()),
        ("op_config", op_cap(device)),
        ("driver_name", queue.driver_name.clone()),
        ("name", queue.label.clone()),
        ("clients", "0".into()),
    ];
    if device.kind == Kind::Dsa {
        values.push(("max_batch_size", queue.max_batch_size.to_string()));
    }
    attributes(&directory.join(&queue.name), &values)
}

/// Returns the number of queues: the kernel shows every queue of the hardware, in use or not, eight on every device so
/// far.
fn work_queues(device: &DeviceConfig) -> u32 {
    let index = |queue: &QueueConfig| queue.name.rsplit('.').next().and_then(|digits| digits.parse::<u32>().ok());
    device.queues.iter().filter_map(index).map(|index| index + 1).max().unwrap_or(0).max(8)
}

/// Writes a queue that is not configured, as the kernel's `idxd_wq_disable_cleanup` and `idxd_setup_wqs` leave it.
fn write_spare_queue(directory: &Path, device: &DeviceConfig, name: &str) -> io::Result<()> {
    let mut values = vec![
        ("block_on_fault", "0".into()),
        ("group_id", "-1".into()),
        ("size", "0".into()),
        ("type", "none".into()),
        ("cdev_minor", "-1".into()),
        ("mode", "shared".into()),
        ("priority", "0".into()),
        ("state", "disabled".into()),
        ("threshold", "0".into()),
        ("max_transfer_size", device.max_transfer_size.min(2 << 20).to_string()),
        ("ats_disable", "0".into()),
        ("prs_disable", "0".into()),
        ("occupancy", "0".into()),
        ("enqcmds_retries", "32".into()),
        ("op_config", op_cap(device)),
        ("driver_name", String::new()),
        ("name", String::new()),
        ("clients", "0".into()),
    ];
    if device.kind == Kind::Dsa {
        values.push(("max_batch_size", device.max_batch_size.min(32).to_string()));
    }
    attributes(&directory.join(name), &values)
}

/// Returns 256 bits, one per operation code, as the kernel prints bitmaps. On version 1 of DSA the kernel hides
/// batches, because it does not accept them from `write`.
fn op_cap(device: &DeviceConfig) -> String {
    let operations = if device.kind == Kind::Dsa { dsa::OPERATIONS } else { iaa::OPERATIONS };
    let mut words = [0_u32; 8];
    for operation in operations {
        let hidden = device.kind == Kind::Dsa && device.version <= 0x100 && operation.code == dsa::code::BATCH;
        if !hidden {
            words[usize::from(operation.code) / 32] |= 1 << (operation.code % 32);
        }
    }
    let text: Vec<String> = words.iter().rev().map(|word| format!("{word:08x}")).collect();
    text.join(",")
}

/// Returns the bits of GENCAP (DSA 9.2.2): the configured capabilities, and the two limits as logarithms.
fn gen_cap(device: &DeviceConfig) -> u64 {
    let bit = |on: bool, at: u32| u64::from(on) << at;
    let logarithm = |value: u64| u64::from(value.max(1).ilog2());
    let batch = if device.kind == Kind::Dsa { logarithm(u64::from(device.max_batch_size)) } else { 0 };
    let log = if device.version >= 0x200 || device.event_log { 1 } else { 0 };
    let decompress = device.kind == Kind::Iaa;
    bit(device.page_requests, 0)
        | bit(device.overlapping_copy, 1)
        | bit(device.cache_control, 2)
        | bit(device.destination_readback, 8)
        | log << 13
        | bit(device.version >= 0x200, 15)
        | logarithm(device.max_transfer_size) << 16
        | batch << 21
        | bit(true, 31)
        | bit(decompress, 40)
        | bit(device.batch_of_one, 52)
}
