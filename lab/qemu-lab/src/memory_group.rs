//! A control group with little memory, like that of a container or of a systemd unit with `MemoryMax=`. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Error;

/// The mount point of the memory hierarchy of version 1, and the file of the limit.
const VERSION_1: (&str, &str) = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes");
/// The same of version 2.
const VERSION_2: (&str, &str) = ("/sys/fs/cgroup", "memory.max");

/// A control group that limits the memory of its processes together. Memory from before they were moved there does not count.
/// It is removed when this is dropped.
#[derive(Debug)]
pub struct MemoryGroup {
    path: PathBuf,
    top: &'static str,
}

impl MemoryGroup {
    /// Makes a group with a limit of `bytes`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if this machine has no such control groups, or this user may not make one.
    pub fn new(bytes: u64) -> Result<Self, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let unavailable = |error: std::io::Error| Error::Unavailable {
            what: "a control group with a limit of memory".into(),
            reason: error.to_string(),
        };
        let (top, limit) = if Path::new(VERSION_1.0).exists() { VERSION_1 } else { VERSION_2 };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(top).join(format!("sterna-qemu-lab-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(unavailable)?;
        let group = Self { path, top };
        fs::write(group.path.join(limit), bytes.to_string()).map_err(unavailable)?;
        Ok(group)
    }

    /// Moves a process with all its threads to this group.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn add(&self, pid: u32) -> Result<(), Error> {
        self.write(&self.path, pid)
    }

    fn write(&self, group: &Path, pid: u32) -> Result<(), Error> {
        let path = group.join("cgroup.procs");
        fs::write(&path, pid.to_string()).map_err(Error::path("moving a process by", &path))
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Processes that still live are moved back.
        let left = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        for pid in left.lines().filter_map(|line| line.parse().ok()) {
            let _ = self.write(Path::new(self.top), pid);
        }
        if let Err(error) = fs::remove_dir(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "a control group is left");
        }
    }
}
