//! A lock (flock(2)) on a name in a directory, which every owner may remove together with the file.
//!
//! The kernel locks files, not names. Between opening a file and locking it, its previous owner may remove it: the lock is then one of a
//! file that no other process will ever open. So a lock counts only if the name still names the locked file.

use std::fs::File;
use std::io;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::directory::{Directory, FileIdentity};

/// Locks `name` in `directory`, and makes the file if there is none. The lock lasts as long as the returned file is open; its owner may
/// remove the name meanwhile. Returns none if another process has it.
///
/// # Errors
/// The file cannot be made, opened or locked.
pub fn lock_name(directory: &Directory, name: &str) -> io::Result<Option<File>> {
    lock_opened(directory, name, || directory.lock_file(name))
}

fn lock_opened(
    directory: &Directory,
    name: &str,
    mut open: impl FnMut() -> io::Result<File>,
) -> io::Result<Option<File>> {
    loop {
        let file = open()?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
        match directory.identity_of(name) {
            Ok(named) if named == FileIdentity::of_file(&file)? => return Ok(Some(file)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_its_owner_removed_between_opening_and_locking_is_no_lock() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = Directory::open(scratch.path()).unwrap();
        let mut owner = lock_name(&directory, "one.lock").unwrap();
        assert!(owner.is_some() && lock_name(&directory, "one.lock").unwrap().is_none());
        let mut opened = 0;
        let locked = lock_opened(&directory, "one.lock", || {
            opened += 1;
            let file = directory.lock_file("one.lock")?;
            if owner.is_some() {
                // The owner ends its work in the meantime.
                directory.remove("one.lock").unwrap();
                drop(owner.take());
            }
            Ok(file)
        });
        let locked = locked.unwrap().expect("no other process has the lock");
        assert_eq!(opened, 2, "the first file was locked, and named no longer");
        let named = directory.identity_of("one.lock").unwrap();
        assert_eq!(named, FileIdentity::of_file(&locked).unwrap());
        assert!(lock_name(&directory, "one.lock").unwrap().is_none(), "it excludes others");
    }

    #[test]
    fn a_file_that_another_process_made_anew_is_its_own() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = Directory::open(scratch.path()).unwrap();
        let mut other = None;
        let locked = lock_opened(&directory, "one.lock", || {
            let file = directory.lock_file("one.lock")?;
            if other.is_none() {
                directory.remove("one.lock").unwrap();
                other = lock_name(&directory, "one.lock").unwrap();
            }
            Ok(file)
        });
        assert!(locked.unwrap().is_none() && other.is_some());
    }
}
