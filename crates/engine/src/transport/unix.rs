//! Unix sockets in the file system: only their owner may connect, and what a dead process left is replaced.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use socket2::{Domain, SockAddr, Socket, Type};

/// Connections that wait to be accepted, at most, where the kernel allows as many (`net.core.somaxconn`).
const BACKLOG: i32 = 128;

/// Connects to the socket at `path`, waiting at most `limit` for a listener that has too many to accept.
pub(super) fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_write_timeout(Some(limit))?;
    socket.connect(&SockAddr::unix(path)?)?;
    socket.set_write_timeout(None)?;
    Ok(socket.into())
}

/// The file of a socket that is listened on. It is removed when this is dropped, which must be after the listener.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
}

impl SocketFile {
    /// The absolute path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, now that nobody listens; but not if somebody else has begun to, in its place.
    pub(super) fn remove(&self) {
        // What stays behind is replaced by whoever listens there next.
        let _ = lock(&self.path).and_then(|_lock| remove_if_left(&self.path));
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Between binding and listening a socket looks like one that was left behind, and between looking and removing it may
/// become another: processes take turns, by a lock on the directory. Where it cannot be opened there is no such order.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let Ok(directory) = File::open(directory) else { return Ok(None) };
    flock(&directory, FlockOperation::LockExclusive)?;
    Ok(Some(directory))
}

/// Listens at `path`, in place of a socket that nobody listens on any more.
pub(super) fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let _lock = lock(path)?;
    let address = SockAddr::unix(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Linux gives the file the mode of the socket, less the umask (`unix_bind_bsd` in net/unix/af_unix.c); a `chmod`
    // after binding could hit another file.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    match socket.bind(&address) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            remove_if_left(path)?;
            socket.bind(&address)?;
        }
        bound => bound?,
    }
    socket.listen(BACKLOG)?;
    Ok((socket.into(), SocketFile { path: std::path::absolute(path)? }))
}

/// Removes a socket that nobody listens on; everything else is an error.
fn remove_if_left(path: &Path) -> io::Result<()> {
    let in_use = |text: &str| Err(io::Error::new(io::ErrorKind::AddrInUse, text.to_owned()));
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return in_use("there is a file of this name that is not a socket");
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Not to wait where its listener has too many to accept.
    probe.set_nonblocking(true)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(()) => in_use("somebody listens on it already"),
        Err(error) => {
            in_use(&format!("there is a socket of this name, and whether it is in use cannot be seen: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
        assert!(refused.to_string().contains("listens on it already"), "{refused}");
        connect(&path, Duration::from_secs(1)).unwrap();

        let (_dir, path) = place();
        fs::write(&path, "precious").unwrap();
        let refused = listen(&path).unwrap_err();
        assert!(refused.to_string().contains("not a socket"), "{refused}");
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
}
