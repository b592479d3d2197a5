//! An open directory: files are made, found and removed in exactly that directory.
//!
//! The owner of a directory can replace its content between two calls that use the same path. So a path is resolved
//! once, and all later names are relative to the open directory. The last name of a path is never followed if it is a
//! symbolic link, nor is a link that appears in the path later.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;
use socket2::{Domain, SockAddr, Socket, Type};

/// Maximum number of connections that wait to be accepted, if the kernel allows as many (`net.core.somaxconn`).
const BACKLOG: i32 = 128;
/// Access for the owner only: sockets, and files with secrets.
const OWNER_READS_AND_WRITES: Mode = Mode::RUSR.union(Mode::WUSR);
/// The kernel's directory of this process's descriptors, as links to the open files.
const OWN_DESCRIPTORS: &str = "/proc/self/fd";

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    file: OwnedFd,
    path: PathBuf,
}

/// Identifies a file independently of its name: device and inode. No other file has the same identity while this one is
/// open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    /// Returns the identity of an open file.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn of_file(file: &impl AsFd) -> io::Result<Self> {
        Ok(Self::of(&rustix::fs::fstat(file)?))
    }

    fn of(stat: &Stat) -> Self {
        // The fields' types differ between architectures.
        #[allow(clippy::unnecessary_cast, reason = "not on every architecture")]
        Self { device: stat.st_dev as u64, inode: stat.st_ino as u64 }
    }
}

impl Directory {
    /// Opens the directory at `path`, following symbolic links.
    ///
    /// # Errors
    /// The path does not exist, is not a directory, or may not be searched.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let file = match rustix::fs::open(path, flags | OFlags::RDONLY, Mode::empty()) {
            // Sufficient for everything except locking and listing.
            Err(Errno::ACCESS) => rustix::fs::open(path, flags | OFlags::PATH, Mode::empty()),
            opened => opened,
        };
        Ok(Self { file: file?, path: path.to_owned() })
    }

    /// Wraps a directory that was opened elsewhere, which messages name as `path`.
    pub fn given(file: OwnedFd, path: impl Into<PathBuf>) -> Self {
        Self { file, path: path.into() }
    }

    /// Fails unless it is a directory, as one that was opened elsewhere may not be.
    ///
    /// # Errors
    /// `NotADirectory`, or those of fstat(2).
    pub fn check_directory(&self) -> io::Result<()> {
        match file_type(&self.stat()?) {
            FileType::Directory => Ok(()),
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// Opens the directory at the absolute `path` as a process with the root directory `self` sees it. Links cannot
    /// lead out of that root (openat2(2), `RESOLVE_IN_ROOT`, Linux 5.6).
    ///
    /// # Errors
    /// Those of [`Directory::open`]; and the kernel is older.
    pub fn open_in_root(&self, path: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let file = rustix::fs::openat2(&self.file, path, flags, Mode::empty(), resolve)?;
        let shown = self.path.join(path.strip_prefix("/").unwrap_or(path));
        Ok(Self { file, path: shown })
    }

    /// Opens the directory that contains the file at `path`, and returns it with the file's name.
    ///
    /// # Errors
    /// Those of [`Directory::open`]; or `path` names no file.
    pub fn parent_of(path: &Path) -> io::Result<(Self, OsString)> {
        let name = path.file_name().ok_or_else(|| invalid("it is not the path of a file"))?;
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        Ok((Self::open(parent)?, name.to_owned()))
    }

    /// Opens the directory at `path`, makes it (mode 0700) if it is missing, and checks that it is
    /// [private](Self::check_private).
    ///
    /// # Errors
    /// The directory cannot be made or opened, or it is not private.
    pub fn private(path: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let directory = Self::open(path)?;
        directory.check_private()?;
        Ok(directory)
    }

    /// Returns the path by which the directory was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a path to the file `name` in the directory whose resolution reads only this name.
    ///
    /// The kernel follows `/proc/self/fd/N` to the open directory, whatever its path is by now. Without `/proc` (a
    /// jail) this is the ordinary path. The path is valid in this process while the directory is open.
    pub fn reach(&self, name: impl AsRef<Path>) -> PathBuf {
        match Path::new(OWN_DESCRIPTORS).exists() {
            true => Path::new(OWN_DESCRIPTORS).join(self.file.as_raw_fd().to_string()).join(name),
            false => self.path.join(name),
        }
    }

    /// Fails unless the directory belongs to this process's user and no other user may change its content.
    ///
    /// # Errors
    /// `PermissionDenied`, whose text says what is wrong and what to do.
    pub fn check_private(&self) -> io::Result<()> {
        self.check(&[rustix::process::geteuid().as_raw()], false)
    }

    /// Fails unless the directory belongs to one of `owners` (user numbers) and other users can remove or replace only
    /// their own files: it is not writable for others, or has the sticky bit, as `/tmp` does.
    ///
    /// # Errors
    /// `PermissionDenied`, whose text says what is wrong and what to do.
    pub fn check_shared(&self, owners: &[u32]) -> io::Result<()> {
        self.check(owners, true)
    }

    fn check(&self, owners: &[u32], sticky_is_enough: bool) -> io::Result<()> {
        let stat = self.stat()?;
        let denied = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        if !owners.contains(&stat.st_uid) {
            return denied(format!(
                "it belongs to user {}, who could replace what is in it; give a directory of your own",
                stat.st_uid
            ));
        }
        let mode = Mode::from_raw_mode(stat.st_mode);
        let sticky = sticky_is_enough && mode.contains(Mode::SVTX);
        if mode.intersects(Mode::WGRP | Mode::WOTH) && !sticky {
            return denied(format!(
                "others may write to it (mode {:04o}) and replace what is in it; take that from them (chmod go-w) or give \
                 another directory",
                mode.as_raw_mode() & 0o7777
            ));
        }
        Ok(())
    }

    /// Returns the owner's user number.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn owner(&self) -> io::Result<u32> {
        Ok(self.stat()?.st_uid)
    }

    fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.file)?)
    }

    /// Returns the directory's identity.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity::of(&self.stat()?))
    }

    /// Returns the identity of the file `name`, without following a symbolic link.
    ///
    /// # Errors
    /// There is no such file.
    pub fn identity_of(&self, name: impl AsRef<OsStr>) -> io::Result<FileIdentity> {
        Ok(FileIdentity::of(&self.stat_of(name.as_ref())?))
    }

    fn stat_of(&self, name: &OsStr) -> io::Result<Stat> {
        Ok(rustix::fs::statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Returns whether `name` is a socket.
    ///
    /// # Errors
    /// There is nothing of this name.
    pub fn is_socket(&self, name: impl AsRef<OsStr>) -> io::Result<bool> {
        Ok(file_type(&self.stat_of(name.as_ref())?) == FileType::Socket)
    }

    /// Makes an empty subdirectory (mode 0700) and opens it.
    ///
    /// # Errors
    /// The name exists already, or the new directory was replaced by another while it was opened.
    pub fn make(&self, name: impl AsRef<OsStr>) -> io::Result<Self> {
        let name = name.as_ref();
        rustix::fs::mkdirat(&self.file, name, Mode::RWXU)?;
        let made = self.subdirectory(name)?;
        // If the parent directory belongs to another user, a different directory may have replaced the new one. Any
        // empty directory of this user serves as well.
        made.check_private()?;
        if !made.names()?.is_empty() {
            return Err(io::Error::other("a directory that was just made is not empty"));
        }
        Ok(made)
    }

    /// Opens a subdirectory, without following a symbolic link.
    ///
    /// # Errors
    /// There is no directory of this name, or it may not be read.
    pub fn subdirectory(&self, name: impl AsRef<OsStr>) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let file = rustix::fs::openat(&self.file, name.as_ref(), flags, Mode::empty())?;
        Ok(Self { file, path: self.path.join(name.as_ref()) })
    }

    /// Returns the names in the directory.
    ///
    /// # Errors
    /// The directory may not be read.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        use std::os::unix::ffi::OsStrExt;
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.file)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        Ok(names)
    }

    /// Makes an empty file, open for writing; never one that exists.
    ///
    /// # Errors
    /// There is something of this name.
    pub fn create_new(&self, name: impl AsRef<OsStr>, mode: u32) -> io::Result<File> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.file, name.as_ref(), flags, Mode::from_raw_mode(mode))?.into())
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// There is no file of this name, it is a symbolic link, or it may not be read.
    pub fn open_file(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.file, name.as_ref(), flags, Mode::empty())?.into())
    }

    /// Makes an empty file (mode 0600), open for writing, or empties an existing one.
    ///
    /// # Errors
    /// The file cannot be made, or there is a symbolic link of this name.
    pub fn create_or_empty(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.file, name.as_ref(), flags, OWNER_READS_AND_WRITES)?.into())
    }

    /// Makes all changes of the names in the directory durable.
    ///
    /// # Errors
    /// Those of fsync(2); or the directory may not be read.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.file)?)
    }

    /// Returns when the file `name` was last written, in milliseconds since 1970.
    ///
    /// # Errors
    /// There is no such file.
    pub fn modified_ms(&self, name: impl AsRef<OsStr>) -> io::Result<u64> {
        let stat = self.stat_of(name.as_ref())?;
        // The fields' types differ between architectures.
        #[allow(clippy::unnecessary_cast, reason = "not on every architecture")]
        let (seconds, nanoseconds) = (stat.st_mtime as i64, stat.st_mtime_nsec as u64);
        Ok(u64::try_from(seconds).unwrap_or(0) * 1000 + nanoseconds / 1_000_000)
    }

    /// Opens a file of this process's user, for locking, and makes it (mode 0600) if it is missing.
    ///
    /// # Errors
    /// The file cannot be made or opened.
    pub fn lock_file(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        let flags = OFlags::CREATE | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.file, name.as_ref(), flags, OWNER_READS_AND_WRITES)?.into())
    }

    /// Returns the target of the symbolic link `name` and the user number of its owner; `None` if there is no such name
    /// or it is not a link.
    ///
    /// # Errors
    /// Those of readlink(2).
    pub fn link(&self, name: impl AsRef<OsStr>) -> io::Result<Option<(PathBuf, u32)>> {
        use std::os::unix::ffi::OsStringExt;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.file, name.as_ref(), flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened?,
        };
        let stat = rustix::fs::fstat(&file)?;
        if file_type(&stat) != FileType::Symlink {
            return Ok(None);
        }
        let target = rustix::fs::readlinkat(&file, "", Vec::new())?;
        Ok(Some((PathBuf::from(OsString::from_vec(target.into_bytes())), stat.st_uid)))
    }

    /// Renames a file in the directory, replacing an existing one.
    ///
    /// # Errors
    /// Those of rename(2).
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.file, from.as_ref(), &self.file, to.as_ref())?)
    }

    /// Removes a name in the directory that is not a directory.
    ///
    /// # Errors
    /// Those of unlink(2).
    pub fn remove(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.file, name.as_ref(), AtFlags::empty())?)
    }

    /// Removes an empty subdirectory.
    ///
    /// # Errors
    /// Those of rmdir(2).
    pub fn remove_directory(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.file, name.as_ref(), AtFlags::REMOVEDIR)?)
    }

    /// Changes the owner and group of the directory itself. Afterwards this process may be unable to change its
    /// content.
    ///
    /// # Errors
    /// Those of fchown(2).
    pub fn change_owner(&self, user: u32, group: u32) -> io::Result<()> {
        Ok(rustix::fs::fchown(&self.file, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?)
    }

    /// Changes the owner and group of a file in the directory; of a symbolic link itself, not of its target.
    ///
    /// # Errors
    /// Those of chown(2).
    pub fn change_file_owner(&self, name: impl AsRef<OsStr>, user: u32, group: u32) -> io::Result<()> {
        let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
        Ok(rustix::fs::chownat(&self.file, name.as_ref(), user, group, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Lets all users reach names that they know through the directory; only the owner may list or change it.
    ///
    /// # Errors
    /// Those of fchmod(2).
    pub fn let_pass(&self) -> io::Result<()> {
        Ok(rustix::fs::fchmod(&self.file, Mode::RWXU | Mode::XGRP | Mode::XOTH)?)
    }

    /// Locks the directory until it is closed, unless another process holds the lock. Returns whether it is locked now.
    /// Any user who may read a directory may lock it.
    ///
    /// # Errors
    /// The directory was opened without permission to read.
    pub fn try_lock(&self) -> io::Result<bool> {
        match rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Listens on a new socket in the directory, which has mode 0600 from the start.
    ///
    /// # Errors
    /// `AddrInUse` if the name exists already.
    pub fn listen(&self, name: impl AsRef<OsStr>) -> io::Result<UnixListener> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // Linux gives the file the mode of the socket, less the umask (`unix_bind_bsd` in net/unix/af_unix.c); a
        // `chmod` after binding could hit another file.
        rustix::fs::fchmod(&socket, OWNER_READS_AND_WRITES)?;
        socket.bind(&SockAddr::unix(self.reach(name.as_ref()))?)?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    }

    /// Connects to a socket in the directory, waiting at most `limit` while the listener's backlog is full. A symbolic
    /// link is refused.
    ///
    /// # Errors
    /// `NotFound`, `ConnectionRefused` if no process listens, `WouldBlock` after `limit`.
    pub fn connect(&self, name: impl AsRef<OsStr>, limit: Duration) -> io::Result<UnixStream> {
        let found = self.find(name.as_ref())?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_write_timeout(Some(limit))?;
        let address = SockAddr::unix(found.reach())?;
        while let Err(error) = socket.connect(&address) {
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        socket.set_write_timeout(None)?;
        Ok(socket.into())
    }

    /// Returns whether `name` is a socket that no process has open any more.
    ///
    /// The test connects a datagram socket. A listener does not notice it, because the kernel refuses the type, and
    /// with another error than for a stale socket (unix(7): `EPROTOTYPE`, `ECONNREFUSED`).
    ///
    /// # Errors
    /// The name does not exist, is not a socket, or this user may not connect to it.
    pub fn is_stale_socket(&self, name: impl AsRef<OsStr>) -> io::Result<bool> {
        let found = self.find(name.as_ref())?;
        let probe = Socket::new(Domain::UNIX, Type::DGRAM, None)?;
        probe.set_nonblocking(true)?;
        match probe.connect(&SockAddr::unix(found.reach())?) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error),
            _ => Ok(false),
        }
    }

    /// Opens the socket file of this name, so that it cannot be replaced by a link before the connection is made.
    fn find(&self, name: &OsStr) -> io::Result<Found> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.file, name, flags, Mode::empty())?;
        match file_type(&rustix::fs::fstat(&file)?) {
            FileType::Socket => Ok(Found { file, path: self.path.join(name) }),
            FileType::Symlink => Err(invalid("it is a symbolic link; give the path of the socket itself")),
            _ => Err(io::Error::new(io::ErrorKind::ConnectionRefused, "it is something else than a socket")),
        }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A socket's file, open by a descriptor that can only name it (`O_PATH`).
struct Found {
    file: OwnedFd,
    path: PathBuf,
}

impl Found {
    fn reach(&self) -> PathBuf {
        match Path::new(OWN_DESCRIPTORS).exists() {
            true => Path::new(OWN_DESCRIPTORS).join(self.file.as_raw_fd().to_string()),
            false => self.path.clone(),
        }
    }
}

fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn files_stay_in_the_open_directory_after_its_path_was_replaced() {
        let scratch = tempfile::tempdir().unwrap();
        let (path, victim) = (scratch.path().join("given"), scratch.path().join("victim"));
        fs::create_dir(&path).unwrap();
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("socket"), "precious").unwrap();
        let directory = Directory::open(&path).unwrap();
        fs::rename(&path, scratch.path().join("moved")).unwrap();
        symlink(&victim, &path).unwrap();

        let _listener = directory.listen("socket").unwrap();
        directory.connect("socket", Duration::from_secs(5)).unwrap();
        directory.make("inner").unwrap();
        directory.create_new("file", 0o600).unwrap();

        assert_eq!(mode(&scratch.path().join("moved/socket")), 0o600);
        directory.remove("socket").unwrap();
        assert_eq!(fs::read_to_string(victim.join("socket")).unwrap(), "precious");
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 1, "nothing was made there");
    }

    #[test]
    fn a_name_that_is_a_link_is_not_followed() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = Directory::open(scratch.path()).unwrap();
        let _listener = directory.listen("socket").unwrap();
        symlink(scratch.path().join("socket"), scratch.path().join("link")).unwrap();

        let refused = directory.connect("link", Duration::from_secs(5)).unwrap_err();
        assert!(refused.to_string().contains("symbolic link"), "{refused}");
        assert_eq!(directory.listen("link").unwrap_err().kind(), io::ErrorKind::AddrInUse);
        directory.create_new("link", 0o600).unwrap_err();
        directory.lock_file("link").unwrap_err();
        directory.subdirectory("link").unwrap_err();
        directory.is_stale_socket("link").unwrap_err();
        // At most the link's owner changes, never its target's.
        directory
            .change_file_owner("link", rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
            .unwrap();
    }

    #[test]
    fn in_another_root_a_link_to_an_absolute_path_stays_in_that_root() {
        let scratch = tempfile::tempdir().unwrap();
        let inside = scratch.path().join("etc");
        fs::create_dir(&inside).unwrap();
        symlink("/etc", scratch.path().join("link")).unwrap();
        symlink("../../../../etc", scratch.path().join("up")).unwrap();
        let root = Directory::open(scratch.path()).unwrap();
        let expected = Directory::open(&inside).unwrap().identity().unwrap();
        for path in ["/link", "/up", "/etc", "/../etc"] {
            let found = root.open_in_root(Path::new(path)).unwrap();
            assert_eq!(found.identity().unwrap(), expected, "{path}");
        }
    }

    #[test]
    fn a_directory_that_others_own_or_may_write_is_not_private() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("state");
        Directory::private(&path).unwrap();
        assert_eq!(mode(&path), 0o700);
        for (bits, private, shared) in [
            (0o755, true, true),
            (0o770, false, false),
            (0o702, false, false),
            (0o1777, false, true),
            (0o2750, true, true),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
            let directory = Directory::open(&path).unwrap();
            let us = rustix::process::geteuid().as_raw();
            assert_eq!(Directory::private(&path).is_ok(), private, "{bits:o}");
            assert_eq!(directory.check_shared(&[us]).is_ok(), shared, "{bits:o}");
            let refused = directory.check_shared(&[us + 1]).unwrap_err().to_string();
            assert!(refused.contains("belongs to user"), "{refused}");
        }
    }

    #[test]
    fn a_socket_in_use_is_distinguished_from_a_stale_one_and_not_disturbed() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = Directory::open(scratch.path()).unwrap();
        let listener = directory.listen("socket").unwrap();
        assert!(!directory.is_stale_socket("socket").unwrap());
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "no client has connected");
        drop(listener);
        assert!(directory.is_stale_socket("socket").unwrap());
    }
}
