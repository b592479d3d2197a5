//! Private unix sockets between Sterna and a QEMU on the same host.
//!
//! The migration stream on them is in clear, so nobody else may connect: they live in a directory of their own with
//! mode 0700, and each socket has mode 0600. Where QEMU runs as another user than Sterna (under libvirt), the directory
//! is given to that user: root still reaches it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use sterna_wire::identity::MigrationId;

/// A directory for the sockets of one migration, removed at its end.
#[derive(Debug)]
pub(super) struct SocketDir {
    path: PathBuf,
}

impl SocketDir {
    /// Makes the directory. `qemu` is the process that must be able to use it.
    pub(super) fn create(id: MigrationId, side: &str, qemu: Option<i32>) -> io::Result<Self> {
        let path = Self::path(id, side);
        DirBuilder::new().mode(0o700).create(&path)?;
        let dir = Self { path };
        if let Some(pid) = qemu
            && let Ok(owner) = fs::metadata(format!("/proc/{pid}"))
            && owner.uid() != rustix::process::geteuid().as_raw()
        {
            chown(&dir.path, Some(owner.uid()), Some(owner.gid()))?;
        }
        Ok(dir)
    }

    /// Finds out whether such a directory can be made and used, before there is a migration.
    pub(super) fn probe(qemu: Option<i32>) -> io::Result<()> {
        // As long as a migration's, and different from those of other processes and threads.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mut id = [0xff; 16];
        id[..4].copy_from_slice(&std::process::id().to_le_bytes());
        id[4..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        let id = MigrationId::from_bytes(id);
        let path = Self::path(id, "destination");
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot make private sockets in {}: {error}", path.display()))
        };
        if !path.is_absolute() {
            // QEMU may have another working directory.
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "the path is not absolute")));
        }
        Self::remove_left(id, "destination");
        Self::create(id, "destination", qemu).and_then(|dir| dir.listen("qemu.sock").map(drop)).map_err(failed)
    }

    fn path(id: MigrationId, side: &str) -> PathBuf {
        // Unix socket paths are short (107 bytes), so not below the state directory, which the user chooses.
        std::env::temp_dir().join(format!("sterna-{id}-{side}"))
    }

    /// Removes what a process that crashed has left.
    pub(super) fn remove_left(id: MigrationId, side: &str) {
        // Usually there is nothing; and what cannot be removed does no harm.
        let _ = fs::remove_dir_all(Self::path(id, side));
    }

    /// The path of a socket in it.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Listens on a socket that only QEMU's user and root can connect to.
    pub(super) fn listen(&self, name: &str) -> io::Result<UnixListener> {
        let path = self.socket(name);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        if let Ok(owner) = fs::metadata(&self.path) {
            chown(&path, Some(owner.uid()), Some(owner.gid()))?;
        }
        Ok(listener)
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        // Left behind only if something else was put into it.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Connects to a socket that QEMU is listening on.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(path)
}

/// First pause between attempts to connect to a socket that nothing listens on yet; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Longest pause between such attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// [`connect`], where a socket that is not there, or that nothing listens on, is tried again for `patience`, unless `is_over` says that
/// there is no need any more.
pub(super) fn connect_within(path: &Path, patience: Duration, is_over: impl Fn() -> bool) -> io::Result<UnixStream> {
    let deadline = Instant::now() + patience;
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let absent = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        let left = deadline.saturating_duration_since(Instant::now());
        if !absent || left.is_zero() || is_over() {
            return Err(error);
        }
        std::thread::sleep(pause.min(left));
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Accepts a connection until `deadline`, then fails with `TimedOut`. The listener stays blocking.
pub(super) fn accept_until(listener: &UnixListener, deadline: Instant) -> io::Result<UnixStream> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return listener.accept().map(|(stream, _)| stream),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reads the first four bytes of a connection without taking them, within `limit`.
pub(super) fn first_bytes(stream: &UnixStream, limit: Duration) -> io::Result<[u8; 4]> {
    use rustix::net::{RecvFlags, recv};
    stream.set_read_timeout(Some(limit))?;
    let mut bytes = [0; 4];
    let outcome = loop {
        match recv(stream, &mut bytes, RecvFlags::PEEK | RecvFlags::WAITALL) {
            Ok((4, _)) => break Ok(bytes),
            Ok(_) => break Err(io::ErrorKind::UnexpectedEof.into()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => break Err(errno.into()),
        }
    };
    stream.set_read_timeout(None)?;
    outcome
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn directory_and_socket_are_private_and_gone_at_the_end() {
        let dir = SocketDir::create(MigrationId::from_bytes([0xd1; 16]), "test", None).unwrap();
        let _listener = dir.listen("main.sock").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir.path), mode(&dir.socket("main.sock"))), (0o700, 0o600));
        let path = dir.path.clone();
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn first_bytes_are_looked_at_and_left_in_place() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.write_all(b"QEVM and more").unwrap();
        assert_eq!(&first_bytes(&far, Duration::from_secs(5)).unwrap(), b"QEVM");
        let mut bytes = [0; 6];
        far.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"QEVM a");
    }

    #[test]
    fn nobody_connecting_is_a_timeout() {
        let dir = SocketDir::create(MigrationId::from_bytes([0xd2; 16]), "test", None).unwrap();
        let listener = dir.listen("main.sock").unwrap();
        let error = accept_until(&listener, Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
