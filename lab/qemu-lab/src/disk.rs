//! A disk that a test can fill: a tmpfs of its own, of few pages. Needs root.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::error::run;

/// Its size in bytes: enough for several records of migrations, each of one page of 4 KiB.
const SIZE: u64 = 64 << 10;

/// A small file system, mounted at a directory and unmounted when this is dropped.
#[derive(Debug)]
pub struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Makes the directory `path` and mounts a disk of 64 KiB there.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if this user may not mount.
    pub fn mount(path: &Path) -> Result<Self, Error> {
        fs::create_dir_all(path).map_err(Error::io("making a directory to mount on"))?;
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={SIZE},mode=0700"), "tmpfs"]).arg(path))
            .map_err(|error| Error::Unavailable { what: "a small tmpfs".into(), reason: error.to_string() })?;
        Ok(Self { path: path.to_owned() })
    }

    fn filling(&self) -> PathBuf {
        self.path.join("filling")
    }

    /// Fills all free space.
    ///
    /// # Errors
    /// Every error but a full disk.
    pub fn fill(&self) -> Result<(), Error> {
        let mut file = File::create(self.filling()).map_err(Error::io("filling a disk"))?;
        loop {
            match file.write_all(&[0; 4096]) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(Error::io("filling a disk")(error)),
            }
        }
    }

    /// Frees the space that [`SmallDisk::fill`] filled.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn free(&self) -> Result<(), Error> {
        fs::remove_file(self.filling()).map_err(Error::io("freeing a disk"))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a process that is still ending may have a file open.
        if let Err(error) = run(Command::new("umount").arg("-l").arg(&self.path)) {
            tracing::warn!(%error, "a tmpfs stays mounted");
        }
    }
}
