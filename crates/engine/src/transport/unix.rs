//! Unix sockets in the file system: only their owner may connect, and what a dead process left is replaced.

use std::ffi::OsString;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::directory::{Directory, FileIdentity};

/// How long another process may hold the lock, under which it makes only a few system calls.
const TURN_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two attempts to take the lock.
const TURN_PAUSE: Duration = Duration::from_millis(1);

/// Connects to the socket at `path`, waiting at most `limit` for a listener that has too many to accept.
///
/// # Errors
/// No process listens there, or the path is a symbolic link.
pub fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let (directory, name) = Directory::parent_of(path)?;
    directory.connect(name, limit)
}

/// The file of a socket that is listened on. It is removed when this is dropped, which must be after the listener.
#[derive(Debug)]
pub struct SocketFile {
    directory: Directory,
    name: OsString,
    path: PathBuf,
    identity: FileIdentity,
}

impl SocketFile {
    /// Returns the absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file while its socket is still open, unless another file has replaced it.
    pub fn remove(&self) {
        let _lock = lock(&self.directory);
        if self.directory.identity_of(&self.name).is_ok_and(|found| found == self.identity) {
            // A file that stays behind is replaced by the next process that listens there.
            let _ = self.directory.remove(&self.name);
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _lock = lock(&self.directory);
        // The socket is closed, so another file may have its identity by now. The file is removed only if no process
        // listens.
        if self.directory.is_stale_socket(&self.name).unwrap_or(false) {
            let _ = self.directory.remove(&self.name);
        }
    }
}

/// Locks the directory, so that processes take turns: between bind and listen a socket looks like a stale one, and
/// between the check and the removal another socket may replace it. Returns `None` if the directory cannot be read, or
/// if another user who can read it keeps it locked.
fn lock(directory: &Directory) -> Option<Directory> {
    let taken = Directory::open(&directory.reach(".")).ok()?;
    let deadline = Instant::now() + TURN_LIMIT;
    while !taken.try_lock().ok()? {
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(TURN_PAUSE);
    }
    Some(taken)
}

/// Listens at `path`, and replaces a socket on which no process listens any more. The file has mode 0600.
///
/// # Errors
/// `AddrInUse` if another process listens there or another kind of file exists there; the text says what to do.
pub fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let (directory, name) = Directory::parent_of(path)?;
    let _lock = lock(&directory);
    let listener = match directory.listen(&name) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            remove_stale(&directory, &name)?;
            directory.listen(&name)?
        }
        bound => bound?,
    };
    let identity = directory.identity_of(&name)?;
    Ok((listener, SocketFile { directory, name, path: std::path::absolute(path)?, identity }))
}

/// Removes a socket on which no process listens. Anything else at the path is an error.
fn remove_stale(directory: &Directory, name: &OsString) -> io::Result<()> {
    let in_use = |text: &str| Err(io::Error::new(io::ErrorKind::AddrInUse, text.to_owned()));
    match directory.is_socket(name) {
        Ok(true) => {}
        Ok(false) => return in_use("something else than a socket is there; remove it or give another path"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    match directory.is_stale_socket(name) {
        Ok(true) => directory.remove(name),
        Ok(false) => in_use("another process listens there; end it or give another path"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            in_use("a socket of someone else is there; remove it or give another path")
        }
        Err(error) => in_use(&format!("whether the socket there is in use cannot be seen: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in");
        (dir, path)
    }

    #[test]
    fn only_the_owner_may_connect_and_the_file_goes_with_the_listener() {
        let (_dir, path) = place();
        let (listener, file) = listen(&path).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        connect(&path, Duration::from_secs(1)).unwrap();
        drop((listener, file));
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_that_was_left_behind_is_replaced_and_not_removed_by_who_left_it() {
        let (_dir, path) = place();
        let (left, file) = listen(&path).unwrap();
        drop(left);
        assert_eq!(connect(&path, Duration::from_secs(1)).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);

        let (_listener, _file) = listen(&path).unwrap();
        drop(file);
        connect(&path, Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn a_live_socket_and_a_file_that_is_none_are_left_alone() {
        let (_dir, path) = place();
        let (_listener, _file) = listen(&path).unwrap();
        let refused = listen(&path).unwrap_err();
        assert!(refused.to_string().contains("another process listens there"), "{refused}");
        connect(&path, Duration::from_secs(1)).unwrap();

        let (_dir, path) = place();
        fs::write(&path, "precious").unwrap();
        let refused = listen(&path).unwrap_err();
        assert!(refused.to_string().contains("something else than a socket"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn of_many_that_start_at_once_in_place_of_a_dead_one_a_single_one_listens() {
        let (_dir, path) = place();
        drop(UnixListener::bind(&path).unwrap());
        let listening: Vec<_> = std::thread::scope(|scope| {
            let starting: Vec<_> = (0..8).map(|_| scope.spawn(|| listen(&path))).collect();
            starting.into_iter().filter_map(|starting| starting.join().unwrap().ok()).collect()
        });
        assert_eq!(listening.len(), 1);
        connect(&path, Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn a_listener_that_does_not_accept_keeps_nobody_waiting_for_ever() {
        let (_dir, path) = place();
        let (_listener, _file) = listen(&path).unwrap();
        let mut waiting = Vec::new();
        let given_up = loop {
            match connect(&path, Duration::from_millis(20)) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(given_up.kind(), io::ErrorKind::WouldBlock, "{given_up}");
        // It is in use nevertheless.
        listen(&path).unwrap_err();
    }

    #[test]
    fn a_directory_on_the_path_that_is_exchanged_does_not_lead_removal_elsewhere() {
        let (dir, _) = place();
        let (given, victim) = (dir.path().join("given"), dir.path().join("victim"));
        fs::create_dir(&given).unwrap();
        fs::create_dir(&victim).unwrap();
        let (listener, file) = listen(&given.join("in")).unwrap();
        fs::rename(&given, dir.path().join("moved")).unwrap();
        symlink(&victim, &given).unwrap();
        // A socket that root would remove, had the path been followed.
        drop(UnixListener::bind(victim.join("in")).unwrap());

        file.remove();
        drop((listener, file));

        assert!(victim.join("in").exists());
        assert!(!dir.path().join("moved/in").exists());
    }
}
