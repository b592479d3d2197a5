//! Lets only one sterna at a time work on a QEMU, regardless of the QMP socket and the state directory it uses.
//!
//! A claim is a lock (flock(2)) on a file in a directory that only this user can reach, so another user cannot take the lock
//! first. The kernel releases the lock when the process ends. It excludes all processes of one user that see the same directory,
//! in any network namespace; root and other users have directories of their own.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use sterna_engine::directory::Directory;
use sterna_engine::name_lock::lock_name;
use sterna_engine::process;
use sterna_wire::reason::ErrorKind;
use sterna_wire::switchover::ProcessIdentity;

use super::{GatewayError, qemu};
use crate::qmp::Qmp;

/// Keeps every other sterna of this user from the QEMU as long as it lives.
#[derive(Debug)]
pub(super) struct Claim {
    directory: Directory,
    name: String,
    _lock: File,
}

impl Claim {
    /// Claims the QEMU behind `qmp`; none if its process cannot be seen.
    pub(super) fn of(qmp: &Qmp) -> Result<Option<Self>, GatewayError> {
        qemu::identity(qmp).map(Self::of_process).transpose()
    }

    /// Claims the QEMU with this process identity.
    pub(super) fn of_process(identity: ProcessIdentity) -> Result<Self, GatewayError> {
        let failed = |error: io::Error, directory: &Path| {
            let (pid, directory) = (identity.pid, directory.display());
            let text = format!("QEMU (process {pid}) cannot be claimed by a lock in {directory}: {error}");
            GatewayError::new(text).of(ErrorKind::of_io(&error, ErrorKind::Settings))
        };
        let path = place()?;
        let directory = Directory::private(&path).map_err(|error| failed(error, &path))?;
        remove_stale(&directory);
        match Self::take(directory, identity).map_err(|error| failed(error, &path))? {
            Some(claim) => Ok(claim),
            None => {
                Err(GatewayError::new(format!("another sterna is at work on this QEMU (process {})", identity.pid)))
            }
        }
    }

    /// Takes the lock in `directory`; none if another process has it.
    fn take(directory: Directory, identity: ProcessIdentity) -> io::Result<Option<Self>> {
        let name = name_of(identity);
        Ok(lock_name(&directory, &name)?.map(|lock| Self { directory, name, _lock: lock }))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The file is still locked, so no other process has claimed it.
        let _ = self.directory.remove(&self.name);
    }
}

/// Returns the directory of the locks.
pub(super) fn place() -> Result<PathBuf, GatewayError> {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return Ok("/run/sterna".into());
    }
    let session = PathBuf::from(format!("/run/user/{}", user.as_raw()));
    if Directory::open(&session).is_ok_and(|directory| directory.check_private().is_ok()) {
        return Ok(session.join("sterna"));
    }
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
    home.map(|home| home.join(".local/state/sterna/claims")).ok_or_else(|| {
        GatewayError::new(format!(
            "there is no directory for the lock that keeps others from this QEMU: neither {} nor a home directory (HOME)",
            session.display()
        ))
    })
}

fn name_of(identity: ProcessIdentity) -> String {
    format!("qemu-{}-{}.lock", identity.pid, identity.start_ticks)
}

fn identity_in(name: &str) -> Option<ProcessIdentity> {
    let (pid, start_ticks) = name.strip_prefix("qemu-")?.strip_suffix(".lock")?.split_once('-')?;
    Some(ProcessIdentity { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? })
}

/// Removes the lock files of killed processes whose QEMU has ended as well.
fn remove_stale(directory: &Directory) {
    for name in directory.names().unwrap_or_default() {
        let Some(name) = name.to_str() else { continue };
        if identity_in(name).is_some_and(|qemu| !process::lives(qemu))
            && let Ok(Some(_lock)) = lock_name(directory, name)
        {
            let _ = directory.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> ProcessIdentity {
        process::identity(std::process::id()).unwrap()
    }

    #[test]
    fn a_claim_keeps_others_out_until_it_ends_and_leaves_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let take = || Claim::take(Directory::private(&scratch.path().join("run")).unwrap(), own()).unwrap();
        let claim = take().expect("no other claim");
        assert!(take().is_none());
        drop(claim);
        assert_eq!(std::fs::read_dir(scratch.path().join("run")).unwrap().count(), 0);
        drop(take().expect("the lock is free again"));
    }

    #[test]
    fn threads_that_claim_and_release_concurrently_never_hold_a_claim_together() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let scratch = tempfile::tempdir().unwrap();
        let (holders, claims) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let directory = Directory::open(scratch.path()).unwrap();
                        let Some(claim) = Claim::take(directory, own()).unwrap() else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        claims.fetch_add(1, Ordering::SeqCst);
                        holders.fetch_sub(1, Ordering::SeqCst);
                        drop(claim);
                    }
                });
            }
        });
        assert!(claims.into_inner() > 0);
    }

    #[test]
    fn files_of_ended_qemus_are_removed_and_no_others() {
        let scratch = tempfile::tempdir().unwrap();
        let ended = name_of(ProcessIdentity { start_ticks: own().start_ticks + 1, ..own() });
        let living = name_of(own());
        for name in [ended.as_str(), &living, "notes", "qemu-1.lock"] {
            std::fs::write(scratch.path().join(name), "").unwrap();
        }
        remove_stale(&Directory::open(scratch.path()).unwrap());
        assert!(!scratch.path().join(ended).exists());
        assert!([living.as_str(), "notes", "qemu-1.lock"].iter().all(|name| scratch.path().join(name).exists()));
    }
}
