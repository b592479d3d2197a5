//! Lists the accelerators of this host: devices, groups, engines and work queues as the kernel's `idxd` driver shows
//! them.
//!
//! One parser reads the real tree and fake ones: a value that is missing, unreadable, invalid or absurdly large becomes
//! "unknown" and a remark ([`DeviceInfo::invalid_attributes`]), never a panic and never a number used in calculations. The
//! attributes and their formats are from the kernel's `Documentation/ABI/stable/sysfs-driver-dma-idxd` and
//! `drivers/dma/idxd/sysfs.c`.

mod attribute;
mod capabilities;
mod info;
mod judge;
#[cfg(all(test, not(miri)))]
mod tests;
mod verdict;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use attribute::Attributes;
pub use capabilities::{GeneralCapabilities, IaaCapabilities, OperationSet};
pub use info::{Device, DeviceInfo, EngineInfo, GroupInfo, Kind, Mode, QueueInfo, QueueType};
pub use judge::{USUAL_BATCH, USUAL_TRANSFER, usual_threshold};
pub use verdict::{Reason, Remark, Unusable};

/// The location of the kernel's attributes and of the device files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directories {
    /// The devices of the bus: `/sys/bus/dsa/devices`.
    pub sysfs: PathBuf,
    /// The directory with `dsa/` and `iax/`: `/dev`.
    pub dev: PathBuf,
}

impl Directories {
    /// Returns the system's directories.
    pub fn system() -> Self {
        Self { sysfs: "/sys/bus/dsa/devices".into(), dev: "/dev".into() }
    }

    /// Returns the system's directories, unless `STERNA_IDXD_SYSFS` or `STERNA_IDXD_DEV` name others (tests and
    /// recorded trees).
    pub fn from_environment() -> Self {
        let Self { sysfs, dev } = Self::system();
        let named = |name, otherwise| std::env::var_os(name).map_or(otherwise, PathBuf::from);
        Self { sysfs: named("STERNA_IDXD_SYSFS", sysfs), dev: named("STERNA_IDXD_DEV", dev) }
    }

    /// Returns the device file of a queue: `/dev/dsa/wq0.0`, `/dev/iax/wq1.0`.
    pub fn node(&self, kind: Kind, queue: &str) -> PathBuf {
        self.dev.join(kind.directory()).join(queue)
    }
}

impl Default for Directories {
    fn default() -> Self {
        Self::from_environment()
    }
}

/// Why devices could not be listed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoverError {
    /// The bus does not exist: no such hardware, or no driver for it.
    #[error(
        "there is no {path}: this host has no Intel DSA or IAA, or the kernel's idxd driver is not loaded \
         (modprobe idxd; the device must be enabled in the firmware)"
    )]
    NoBus {
        /// The directory.
        path: PathBuf,
    },
    /// The directory cannot be read.
    #[error("cannot list {path}: {source}")]
    Read {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The most entries of one directory that are read: a bus has a few dozen.
const MAX_ENTRIES: usize = 16_384;
/// The most devices that are read. Hosts have up to sixteen.
const MAX_DEVICES: usize = 256;
/// The highest number of a queue, group or engine: the registers that count them have eight bits (DSA section 9.2.3).
const MAX_MEMBER: u32 = 255;

/// Returns all DSA and IAA devices with their groups, engines and queues, by name.
///
/// An empty list means that the driver is loaded and has no device. Each [`QueueInfo`] states whether it can be used,
/// and if not, why.
pub fn discover(directories: &Directories) -> Result<Vec<DeviceInfo>, DiscoverError> {
    let bus = list(&directories.sysfs)?;
    let mut names: Vec<(Kind, u32, &String)> =
        bus.iter().filter_map(|name| device_name(name).map(|(kind, number)| (kind, number, name))).collect();
    names.sort_unstable();
    let left_out = names.len().saturating_sub(MAX_DEVICES);
    names.truncate(MAX_DEVICES);
    let mut devices: Vec<DeviceInfo> =
        names.into_iter().map(|(kind, number, name)| read_device(directories, &bus, name, kind, number)).collect();
    if left_out > 0
        && let Some(last) = devices.last_mut()
    {
        last.invalid_attributes
            .push(format!("{left_out} more devices are shown than the {MAX_DEVICES} that are examined"));
    }
    Ok(devices)
}

fn read_device(directories: &Directories, bus: &[String], name: &str, kind: Kind, number: u32) -> DeviceInfo {
    let path = directories.sysfs.join(name);
    let mut attributes = Attributes::new(&path, name);
    let device = Arc::new(Device::read(name, kind, number, &mut attributes));
    let mut invalid_attributes = attributes.into_oddities();

    // The same directories appear below the device and beside it on the bus; either works.
    let nested = list(&path).unwrap_or_default();
    let members = |prefix: &str| -> BTreeMap<u32, PathBuf> {
        let flat =
            bus.iter().filter_map(|entry| Some((member_name(entry, prefix, number)?, directories.sysfs.join(entry))));
        let below = nested.iter().filter_map(|entry| Some((member_name(entry, prefix, number)?, path.join(entry))));
        flat.chain(below).collect()
    };

    let mut read = |prefix: &str, index: u32, path: &Path, take: &mut dyn FnMut(&mut Attributes)| {
        let mut attributes = Attributes::new(path, &format!("{prefix}{number}.{index}"));
        take(&mut attributes);
        invalid_attributes.append(&mut attributes.into_oddities());
    };
    let mut groups = Vec::new();
    for (index, path) in members("group") {
        read("group", index, &path, &mut |attributes| groups.push(GroupInfo::read(number, index, attributes)));
    }
    let mut engines = Vec::new();
    for (index, path) in members("engine") {
        read("engine", index, &path, &mut |attributes| engines.push(EngineInfo::read(number, index, attributes)));
    }
    let mut queues = Vec::new();
    for (index, path) in members("wq") {
        read("wq", index, &path, &mut |attributes| {
            queues.push(QueueInfo::read(index, &device, directories, attributes));
        });
    }
    let mut info = DeviceInfo { device, groups, engines, queues, invalid_attributes };
    judge::judge(&mut info);
    info
}

/// `dsa0` and `iax1`.
fn device_name(name: &str) -> Option<(Kind, u32)> {
    [Kind::Dsa, Kind::Iaa].into_iter().find_map(|kind| Some((kind, number(name.strip_prefix(kind.prefix())?)?)))
}

/// Returns the index of `wq0.3`, where the device is 0.
fn member_name(name: &str, prefix: &str, device: u32) -> Option<u32> {
    let (of, index) = name.strip_prefix(prefix)?.split_once('.')?;
    (number(of)? == device).then(|| number(index).filter(|index| *index <= MAX_MEMBER))?
}

/// Accepts only the kernel's spelling: `+1`, ` 1` and `01` would be second names of the same number.
fn number(digits: &str) -> Option<u32> {
    digits.parse().ok().filter(|number: &u32| number.to_string() == digits)
}

fn list(path: &Path) -> Result<Vec<String>, DiscoverError> {
    let entries = std::fs::read_dir(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DiscoverError::NoBus { path: path.to_owned() },
        _ => DiscoverError::Read { path: path.to_owned(), source },
    })?;
    let mut names: Vec<String> =
        entries.take(MAX_ENTRIES).filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}
