//! The configuration of a machine and of its guest's work.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sterna_guest::memory::Pattern;
use sterna_guest::page::Fill;

/// The configuration of a machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// RAM, in the order of guest physical memory.
    pub blocks: Vec<BlockConfig>,
    /// vCPUs, 1 to 4.
    pub vcpus: usize,
    /// What runs the vCPUs.
    pub execution: Execution,
    /// How written pages are tracked.
    pub tracking: Tracking,
    /// Devices with a state of their own ([`crate::scratch`]): the bytes of each, whole blocks of 4 KiB. They are no part of
    /// [`Machine::save`](crate::Machine::save).
    pub devices: Vec<u64>,
    /// The file of a disk ([`crate::disk`]), whole blocks of 4 KiB; the disk gets a block of RAM of its own after the others.
    pub disk: Option<PathBuf>,
    /// The guest's work. A machine takes it from a loaded state instead.
    pub workload: Workload,
}

impl Config {
    /// Returns the bytes of RAM that the guest uses.
    pub(crate) fn guest_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.bytes).sum()
    }
}

/// A block of RAM.
#[derive(Clone, Debug)]
pub struct BlockConfig {
    /// Its name, the same at both ends of a migration.
    pub name: String,
    /// Bytes, a multiple of 2 MiB.
    pub bytes: u64,
    /// The backing of its memory.
    pub backing: Backing,
}

/// The backing of a block's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Private memory of this process.
    Anonymous,
    /// The same, with transparent huge pages.
    AnonymousHuge,
    /// A memfd.
    Memfd,
    /// A memfd of huge pages of 2 MiB from the system's pool (`/proc/sys/vm/nr_hugepages`).
    HugeTlb,
}

/// What runs the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// KVM if it is available, else threads.
    Auto,
    /// KVM.
    Kvm,
    /// Threads of this process that do the guest's work on the guest's memory. For a migration that is equivalent: memory that
    /// is written while it moves.
    Threads,
}

/// How written pages are tracked (`sterna::DirtyLog`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracking {
    /// KVM's dirty bitmap.
    Log,
    /// KVM's dirty rings.
    Ring,
    /// Write protection of this process's memory; the only method without KVM.
    WriteProtect,
}

/// The guest's work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// The content of memory.
    #[serde(with = "fill_name")]
    pub fill: Fill,
    /// The order in which pages are rewritten.
    #[serde(with = "pattern_name")]
    pub pattern: Pattern,
    /// Whether a page is rewritten as a whole, or only its first bytes.
    pub whole: bool,
    /// Percent of memory, from the first page of each vCPU, that is rewritten at all; 1 to 100.
    pub span: u8,
    /// How fast pages are rewritten.
    pub write: Rate,
    /// How fast pages are verified.
    pub check: Rate,
    /// Nanoseconds of the guest's own time between the lines that it writes to the serial port; 0: none.
    pub say_every: u64,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            fill: Fill::Mixed,
            pattern: Pattern::Random,
            whole: true,
            span: 100,
            write: Rate::PagesPerSecond(1000),
            check: Rate::PagesPerSecond(2048),
            say_every: 1_000_000_000,
        }
    }
}

/// Pages per second, of all vCPUs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rate {
    /// This number; 0: none.
    PagesPerSecond(u64),
    /// As many as the vCPUs can do.
    Unlimited,
}

/// Fills and patterns are written down by their names.
macro_rules! by_name {
    ($module:ident, $type:ty) => {
        mod $module {
            use serde::{Deserialize, Deserializer, Serializer, de};

            pub(super) fn serialize<S: Serializer>(value: &$type, serializer: S) -> Result<S::Ok, S::Error> {
                let name = <$type>::ALL.iter().find(|(_, known)| known == value).map_or("", |(name, _)| name);
                serializer.serialize_str(name)
            }

            pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                let name = String::deserialize(deserializer)?;
                let found = <$type>::ALL.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| *value).ok_or_else(|| de::Error::custom(format!("'{name}' is not known")))
            }
        }
    };
}
by_name!(fill_name, sterna_guest::page::Fill);
by_name!(pattern_name, sterna_guest::memory::Pattern);
