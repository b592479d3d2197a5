//! Huge pages for guest RAM: a tmpfs with transparent huge pages, and reserved ones for hugetlb. Both need root.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::Error;
use crate::error::run;

/// A tmpfs mounted with `huge=always`: a memory file on it gets huge pages, unlike a memfd or `/dev/shm` (whose setting is the
/// machine's, usually `never`). It is unmounted when this is dropped.
#[derive(Debug)]
pub struct HugeTmpfs {
    directory: TempDir,
}

impl HugeTmpfs {
    /// Mounts one for up to `bytes`, without reserving memory.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if this user may not mount or the kernel has no huge pages for tmpfs.
    pub fn mount(bytes: u64) -> Result<HugeTmpfs, Error> {
        let directory = tempfile::Builder::new()
            .prefix("sterna-huge-")
            .tempdir()
            .map_err(Error::io("making a directory to mount on"))?;
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("huge=always,size={bytes},mode=0700"), "tmpfs"])
            .arg(directory.path()))
        .map_err(|error| Error::Unavailable { what: "a tmpfs with huge pages".into(), reason: error.to_string() })?;
        Ok(HugeTmpfs { directory })
    }

    /// Returns where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Returns a path in it for one machine's memory; QEMU creates the file.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for HugeTmpfs {
    fn drop(&mut self) {
        // Lazily: a process that is still ending may have a file open.
        if let Err(error) = run(Command::new("umount").arg("-l").arg(self.directory.path())) {
            tracing::warn!(%error, "a tmpfs stays mounted");
        }
    }
}

const COUNT: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
/// Locked by whoever changes the machine's number of huge pages, as long as they are in use: two programs that did so at a time would take
/// each other's. The tests of crates/memory lock the same file.
const TURN: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";

/// Reserved 2 MiB pages, for [`crate::Backend::MemfdHuge`]. The reservation is the machine's: there is one at a time, which is undone
/// when this is dropped.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
    _turn: File,
}

impl HugePages {
    /// Reserves pages for `bytes` more than are reserved already. Waits until no other program of these tests has reserved any.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if this user may not reserve pages or the kernel finds too few.
    pub fn reserve(bytes: u64) -> Result<HugePages, Error> {
        let unavailable = |reason: String| Error::Unavailable { what: "reserved huge pages".into(), reason };
        let turn = File::open(TURN).map_err(|error| unavailable(format!("{TURN}: {error}")))?;
        turn.lock().map_err(|error| unavailable(format!("locking {TURN}: {error}")))?;
        let before = count().map_err(|error| unavailable(format!("{COUNT}: {error}")))?;
        let wanted = before + bytes.div_ceil(2 << 20);
        let note = note_for_leftovers();
        if let Some(note) = &note {
            std::fs::write(note, before.to_string())
                .map_err(|error| unavailable(format!("{}: {error}", note.display())))?;
        }
        set_count(wanted).map_err(|error| unavailable(format!("{COUNT}: {error}")))?;
        let reserved = HugePages { before, _turn: turn };
        match count() {
            Ok(got) if got >= wanted => Ok(reserved),
            // Dropping restores the number.
            got => Err(unavailable(format!("the kernel reserved {} of {wanted} pages", got.unwrap_or(0)))),
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        match set_count(self.before) {
            Ok(()) => drop(note_for_leftovers().map(std::fs::remove_file)),
            Err(error) => tracing::warn!(%error, "huge pages stay reserved"),
        }
    }
}

/// Returns the file in which `scripts/leftovers` finds the former number of pages after a test that was killed; none outside a run of the
/// scripts. There is one, as there is one reservation at a time.
fn note_for_leftovers() -> Option<PathBuf> {
    std::env::var_os("STERNA_RUN").map(|_| std::env::temp_dir().join("huge-pages"))
}

fn count() -> std::io::Result<u64> {
    let text = std::fs::read_to_string(COUNT)?;
    text.trim().parse().map_err(|_| std::io::ErrorKind::InvalidData.into())
}

fn set_count(count: u64) -> std::io::Result<()> {
    std::fs::write(COUNT, count.to_string())
}
