//! Private unix sockets between Sterna and a QEMU on the same host.
//!
//! The migration stream on these sockets is not encrypted, so no other user may connect. The sockets live in a directory of their own
//! that only this user, or QEMU's user, can write to, and each socket has mode 0600. If QEMU runs as another user than Sterna (under
//! libvirt), Sterna gives that user the socket to which QEMU connects, or the directory in which QEMU makes its own socket, as its last
//! operation there. QEMU's user can then replace files in that directory, but gains nothing: Sterna holds the directory open, follows
//! no name in it, and removes only two names.
//!
//! QEMU may see other files than Sterna does: a container has its own mount namespace. Sterna resolves QEMU's paths through
//! `/proc/PID/root`, or the operator gives both paths ([`SocketDirectory::Two`]). QEMU itself tries the path before a migration begins.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_engine::directory::Directory;
use sterna_engine::transport::unix;
use sterna_wire::identity::MigrationId;

use super::SocketDirectory;
use crate::qmp::{Qmp, QmpError};

/// The socket in a directory.
const SOCKET: &str = "qemu.sock";
/// Prefix of the directories' names. Earlier versions did not lock their directories, whose names are `sterna-` and the migration's id:
/// nothing shows whether such a directory is in use, so it is never removed as stale.
const PREFIX: &str = "sterna-held-";
/// Longest path of a unix socket, bytes: `sun_path` of unix(7) without the final 0.
const MAX_SOCKET_PATH: usize = 107;
/// How long a QEMU that listens may take to accept a connection.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// How often to make a directory that another sterna took for a stale one and removes, with a pause of 1 to 5 ms before each attempt: 0.6 s
/// in all, which is enough for the removal.
const MAKE_ATTEMPTS: u64 = 200;

/// Who listens on the socket, and so has to be able to make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listens {
    /// Sterna, at the source.
    Sterna,
    /// QEMU, at the destination.
    Qemu,
}

impl Listens {
    const fn side(self) -> &'static str {
        match self {
            Self::Sterna => "source",
            Self::Qemu => "destination",
        }
    }
}

/// The user that QEMU runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct User {
    user: u32,
    group: u32,
}

/// The directory in which private directories are made: open for Sterna, and by its path for QEMU.
#[derive(Debug)]
pub(super) struct SocketPlace {
    directory: Directory,
    /// The directory's path for QEMU.
    path: PathBuf,
    /// QEMU's user, if it differs from this process's.
    other_user: Option<User>,
    /// How certain it is that QEMU finds this directory by the path.
    path_check: PathCheck,
    qemu: Option<i32>,
}

/// How certain it is that the path leads to the same directory for QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathCheck {
    /// The directory was found in QEMU's own root directory.
    Found,
    /// This process may not look at QEMU's root directory.
    Unseen,
    /// The operator gave both paths.
    GivenByOperator,
}

impl SocketPlace {
    /// Finds the place for the sockets of the QEMU with this process number.
    pub(super) fn find(chosen: &SocketDirectory, qemu: Option<i32>) -> io::Result<Self> {
        let (here, path) = match chosen {
            SocketDirectory::Temporary => (None, std::env::temp_dir()),
            SocketDirectory::One(path) => (None, path.clone()),
            SocketDirectory::Two { here, for_qemu } => (Some(here), for_qemu.clone()),
        };
        if !path.is_absolute() {
            // QEMU may have another working directory.
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not absolute", path.display())));
        }
        let socket = path.join(name_of(MigrationId::from_bytes([0; 16]), Listens::Qemu)).join(SOCKET);
        if socket.as_os_str().len() > MAX_SOCKET_PATH {
            let long = format!("{} is too long for a unix socket (at most {MAX_SOCKET_PATH} bytes)", socket.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, long));
        }
        let named =
            |error: io::Error, path: &Path| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let root = qemu.map_or(Ok(Root::Same), root_of)?;
        let (directory, path_check) = match (here, &root) {
            (Some(here), _) => (Directory::open(here).map_err(|error| named(error, here))?, PathCheck::GivenByOperator),
            (None, Root::Other(root)) => {
                let found = root.open_in_root(&path).map_err(|error| {
                    let where_it_is = "QEMU runs in another mount namespace (a container), where this directory";
                    io::Error::new(error.kind(), format!("{where_it_is} cannot be used: {}: {error}", path.display()))
                })?;
                (found, PathCheck::Found)
            }
            (None, Root::Same) => (Directory::open(&path).map_err(|error| named(error, &path))?, PathCheck::Found),
            (None, Root::Unseen) => (Directory::open(&path).map_err(|error| named(error, &path))?, PathCheck::Unseen),
        };
        let ours = rustix::process::geteuid().as_raw();
        let user = qemu.and_then(user_of);
        // A user who may become root in QEMU's container controls QEMU anyway.
        let root_owner = if let Root::Other(root) = &root { Some(root.owner()?) } else { None };
        let owners: Vec<u32> =
            [Some(0), Some(ours), user.map(|user| user.user), root_owner].into_iter().flatten().collect();
        directory.check_shared(&owners).map_err(|error| named(error, directory.path()))?;
        Ok(Self { directory, path, other_user: user.filter(|user| user.user != ours), path_check, qemu })
    }

    /// Removes the directories that killed processes left behind: those that no process has locked.
    pub(super) fn remove_stale(&self) {
        // A directory that cannot be listed or removed does no harm.
        for name in self.directory.names().unwrap_or_default() {
            let Some(text) = name.to_str().filter(|text| is_ours(text)) else { continue };
            let Ok(stale) = self.directory.subdirectory(text) else { continue };
            if stale.try_lock().is_ok_and(|locked| locked) {
                let _ = stale.remove(SOCKET);
                let _ = self.directory.remove_directory(text);
            }
        }
    }

    /// Checks before a migration that QEMU can use a socket in this directory: adds a character device on such a socket, to which
    /// no device of the guest is connected, and removes it.
    ///
    /// # Errors
    /// Why QEMU cannot use the socket, and what to do.
    pub(super) fn try_with(&self, qmp: &Qmp, listens: Listens) -> Result<(), String> {
        let mut id = [0xff; 16];
        id[..4].copy_from_slice(&std::process::id().to_le_bytes());
        let id = MigrationId::from_bytes(id);
        let failed = |error: io::Error| match self.other_user {
            Some(User { user, .. }) if error.kind() == io::ErrorKind::PermissionDenied => {
                format!(
                    "QEMU runs as user {user}, who must be given a socket: run this as root or as that user ({error})"
                )
            }
            _ => format!("cannot make private sockets in {}: {error}", self.directory.path().display()),
        };
        let (made, _listener) = match listens {
            Listens::Sterna => SocketDir::listening(self, id).map(|(made, listener)| (made, Some(listener))),
            Listens::Qemu => SocketDir::for_qemu(self, id).map(|made| (made, None)),
        }
        .map_err(failed)?;
        let path = made.path_for_qemu();
        let name = format!("sterna-trial-{}", std::process::id());
        let address = json!({ "type": "unix", "data": { "path": path } });
        let mut data = json!({ "addr": address, "server": listens == Listens::Qemu });
        if listens == Listens::Qemu {
            data["wait"] = false.into();
        }
        let backend = json!({ "type": "socket", "data": data });
        match qmp.execute("chardev-add", json!({ "id": name, "backend": backend })) {
            Ok(_) => {}
            Err(QmpError::Refused { description, .. }) => return Err(self.out_of_reach(&path, &description)),
            Err(error) => return Err(error.to_string()),
        }
        let there = listens == Listens::Sterna || made.directory.is_socket(SOCKET).unwrap_or(false);
        if let Err(error) = qmp.execute("chardev-remove", json!({ "id": name })) {
            tracing::warn!(%error, "the trial's character device stays in QEMU");
        }
        if there { Ok(()) } else { Err(self.out_of_reach(&path, "it made its socket in another directory")) }
    }

    fn out_of_reach(&self, path: &Path, words: &str) -> String {
        let who = self.qemu.map_or("QEMU".to_owned(), |pid| format!("QEMU (process {pid})"));
        let (shown, here) = (path.display(), self.directory.path().display());
        let why = match self.path_check {
            PathCheck::Found => "a security module (AppArmor, SELinux) or QEMU's user may be kept from that directory: give \
                            --socket-dir DIR, one that QEMU may use"
                .to_owned(),
            PathCheck::Unseen => "it may see other files than this program, which is not permitted to look (another mount \
                              namespace, a container): run this as root, or give --socket-dir HERE=THERE, one directory \
                              by its path here and by its path for QEMU"
                .to_owned(),
            PathCheck::GivenByOperator => format!("in --socket-dir HERE=THERE both paths must lead to the same directory; HERE is {here}"),
        };
        format!("{who} cannot use the private socket {shown}: {words}; {why}")
    }
}

/// QEMU's root directory and mounts.
enum Root {
    /// The same as this process's.
    Same,
    /// Others; this is QEMU's root directory.
    Other(Directory),
    /// Unknown: this process may not look.
    Unseen,
}

/// Compares QEMU's root directory and mount namespace with this process's.
fn root_of(qemu: i32) -> io::Result<Root> {
    let identity = |path: String| std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let both =
        |who: &str| io::Result::Ok((identity(format!("/proc/{who}/ns/mnt"))?, identity(format!("/proc/{who}/root"))?));
    let theirs = match both(&qemu.to_string()) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(Root::Unseen),
        Err(error) => {
            return Err(io::Error::new(error.kind(), format!("QEMU (process {qemu}) cannot be looked at: {error}")));
        }
        Ok(theirs) => theirs,
    };
    match both("self") {
        Ok(ours) if ours == theirs => Ok(Root::Same),
        Ok(_) => Directory::open(Path::new(&format!("/proc/{qemu}/root"))).map(Root::Other),
        Err(error) => Err(error),
    }
}

fn user_of(qemu: i32) -> Option<User> {
    // The directory itself always belongs to the process's effective user, even if the process is not dumpable (proc(5)).
    let found = std::fs::metadata(format!("/proc/{qemu}")).ok()?;
    Some(User { user: found.uid(), group: found.gid() })
}

fn name_of(id: MigrationId, listens: Listens) -> String {
    format!("{PREFIX}{id}-{}", listens.side())
}

/// Returns whether a name has the form of [`name_of`].
fn is_ours(name: &str) -> bool {
    let parts = name.strip_prefix(PREFIX).and_then(|rest| rest.rsplit_once('-'));
    parts.is_some_and(|(id, side)| {
        id.parse::<MigrationId>().is_ok() && [Listens::Sterna, Listens::Qemu].iter().any(|known| known.side() == side)
    })
}

/// A directory for the socket of one migration, removed when this is dropped.
///
/// The directory is locked as long as it is in use; an unlocked one is stale.
#[derive(Debug)]
pub(super) struct SocketDir {
    /// The parent directory.
    place: Directory,
    name: String,
    directory: Directory,
    path: PathBuf,
}

impl SocketDir {
    /// Makes the directory, and in it a socket on which Sterna listens and to which only QEMU's user and root can connect.
    pub(super) fn listening(place: &SocketPlace, id: MigrationId) -> io::Result<(Self, UnixListener)> {
        let made = Self::make(place, id, Listens::Sterna)?;
        let listener = made.directory.listen(SOCKET)?;
        if let Some(User { user, group }) = place.other_user {
            // No other user can write to the directory, so the name still means this socket.
            made.directory.change_file_owner(SOCKET, user, group)?;
            made.directory.let_pass()?;
        }
        Ok((made, listener))
    }

    /// Makes the directory for a socket that QEMU makes.
    pub(super) fn for_qemu(place: &SocketPlace, id: MigrationId) -> io::Result<Self> {
        let made = Self::make(place, id, Listens::Qemu)?;
        if let Some(User { user, group }) = place.other_user {
            made.directory.change_owner(user, group)?;
        }
        Ok(made)
    }

    fn make(place: &SocketPlace, id: MigrationId, listens: Listens) -> io::Result<Self> {
        let around = place.directory.subdirectory(".")?;
        let name = name_of(id, listens);
        let mut in_the_way = None;
        for attempt in 0..MAKE_ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(1 + attempt % 5));
            }
            let directory = match around.make(&name) {
                // Another sterna found the directory before it was locked, and has removed it or is about to.
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {
                    in_the_way = Some(error);
                    continue;
                }
                made => made?,
            };
            in_the_way = None;
            let is_in_place = || Some(around.identity_of(&name).ok()? == directory.identity().ok()?);
            if directory.try_lock()? && is_in_place().unwrap_or(false) {
                let path = place.path.join(&name);
                return Ok(Self { place: around, name, directory, path });
            }
        }
        Err(in_the_way.unwrap_or_else(|| {
            io::Error::other("another process locks or removes the directory whenever it has been made")
        }))
    }

    /// The path of the socket for QEMU.
    pub(super) fn path_for_qemu(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// The path of the socket for this process, valid while this lives.
    pub(super) fn path(&self) -> PathBuf {
        self.directory.reach(SOCKET)
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        let _ = self.directory.remove(SOCKET);
        // Fails only if another file was put into the directory, which then stays.
        let _ = self.place.remove_directory(&self.name);
    }
}

/// Connects to a socket on which QEMU listens. A symbolic link in its place is refused.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    unix::connect(path, CONNECT_TIME)
}

/// First pause between attempts to connect to a socket on which nothing listens yet; each further pause is twice as long.
const MIN_PAUSE: Duration = Duration::from_millis(10);
/// Longest pause between such attempts.
const MAX_PAUSE: Duration = Duration::from_millis(500);

/// Connects as [`connect`] does, and retries for `patience` while the socket is absent or nothing listens on it, until `is_over`
/// returns true.
pub(super) fn connect_within(path: &Path, patience: Duration, is_over: impl Fn() -> bool) -> io::Result<UnixStream> {
    let deadline = Instant::now() + patience;
    let mut pause = MIN_PAUSE;
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
        pause = (2 * pause).min(MAX_PAUSE);
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

/// Peeks at the first four bytes of a connection, within `limit`.
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
    use std::fs;
    use std::io::{Read, Write};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const NOBODY: User = User { user: 65534, group: 65534 };

    /// Returns a place in `directory` for a QEMU of another user, or of this one.
    fn place(directory: &Path, other_user: Option<User>) -> SocketPlace {
        SocketPlace {
            directory: Directory::open(directory).unwrap(),
            path: directory.to_owned(),
            other_user,
            path_check: PathCheck::Found,
            qemu: None,
        }
    }

    fn id(byte: u8) -> MigrationId {
        MigrationId::from_bytes([byte; 16])
    }

    fn owner_and_mode(path: &Path) -> (u32, u32) {
        let found = fs::symlink_metadata(path).unwrap();
        (found.uid(), found.mode() & 0o7777)
    }

    fn is_root() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            eprintln!("skipped: only root has files to take and can become another user");
        }
        root
    }

    #[test]
    fn directory_and_socket_are_private_and_gone_at_the_end() {
        let scratch = tempfile::tempdir().unwrap();
        let (dir, listener) = SocketDir::listening(&place(scratch.path(), None), id(0xd1)).unwrap();
        let path = dir.path_for_qemu();
        let us = rustix::process::geteuid().as_raw();
        assert_eq!(owner_and_mode(path.parent().unwrap()), (us, 0o700));
        assert_eq!(owner_and_mode(&path), (us, 0o600));
        UnixStream::connect(&path).unwrap();
        drop((dir, listener));
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_qemu_of_another_user_gets_the_socket_or_the_directory_and_no_more() {
        if !is_root() {
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        let place = place(scratch.path(), Some(NOBODY));
        let (dir, _listener) = SocketDir::listening(&place, id(1)).unwrap();
        let socket = dir.path_for_qemu();
        assert_eq!(owner_and_mode(socket.parent().unwrap()), (0, 0o711), "its user cannot change it");
        assert_eq!(owner_and_mode(&socket), (NOBODY.user, 0o600));
        let dir = SocketDir::for_qemu(&place, id(1)).unwrap();
        assert_eq!(owner_and_mode(dir.path_for_qemu().parent().unwrap()), (NOBODY.user, 0o700));
    }

    /// Runs `work` while a thread with the rights of QEMU's user does `attack` again and again.
    fn attacked(attack: impl Fn() + Send + Sync + 'static, work: impl FnOnce()) {
        let over = std::sync::Arc::new(AtomicBool::new(false));
        let seen = std::sync::Arc::clone(&over);
        let attacker = std::thread::spawn(move || {
            // SAFETY: plain system calls. Without the C library around them they change this thread's rights alone.
            let became = unsafe {
                libc::syscall(libc::SYS_setresgid, NOBODY.group, NOBODY.group, NOBODY.group)
                    | libc::syscall(libc::SYS_setresuid, NOBODY.user, NOBODY.user, NOBODY.user)
            };
            assert_eq!(became, 0);
            while !seen.load(Ordering::Relaxed) {
                attack();
            }
        });
        work();
        over.store(true, Ordering::Relaxed);
        attacker.join().unwrap();
    }

    #[test]
    fn whatever_qemus_user_puts_in_its_place_no_file_of_root_changes_hands() {
        if !is_root() {
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        // A directory like /tmp, and one that belongs to QEMU's user, as in its container.
        for (mode, owner) in [(0o1777, 0), (0o755, NOBODY.user)] {
            let base = scratch.path().join(format!("base-{owner}"));
            let victims = scratch.path().join(format!("victims-{owner}"));
            fs::create_dir(&base).unwrap();
            fs::create_dir(&victims).unwrap();
            fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
            fs::set_permissions(&base, fs::Permissions::from_mode(mode)).unwrap();
            std::os::unix::fs::chown(&base, Some(owner), Some(owner)).unwrap();
            let victim = victims.join(SOCKET);
            fs::write(&victim, "precious").unwrap();
            fs::set_permissions(&victim, fs::Permissions::from_mode(0o640)).unwrap();
            let (attacked_base, link, target) = (base.clone(), victims.clone(), victim.clone());
            let attack = move || {
                for entry in fs::read_dir(&attacked_base).into_iter().flatten().flatten() {
                    let socket = entry.path().join(SOCKET);
                    let _ = fs::remove_file(&socket);
                    let _ = symlink(&target, &socket);
                    // Replace the whole directory, if the parent directory allows that.
                    let aside = attacked_base.join("aside");
                    if entry.path() != aside && fs::rename(entry.path(), &aside).is_ok() {
                        let _ = symlink(&link, entry.path());
                        let _ = fs::remove_file(entry.path());
                        let _ = fs::remove_file(aside.join(SOCKET));
                        let _ = fs::remove_dir(&aside);
                    }
                }
            };
            let place = place(&base, Some(NOBODY));
            attacked(attack, || {
                for round in 0..200 {
                    // Either may fail under the attack, which is harmless.
                    drop(SocketDir::listening(&place, id(round)));
                    drop(SocketDir::for_qemu(&place, id(round)));
                    place.remove_stale();
                }
            });
            assert_eq!(owner_and_mode(&victim), (0, 0o640));
            assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
            assert_eq!(owner_and_mode(&victims), (0, 0o755));
            assert_eq!(fs::read_dir(&victims).unwrap().count(), 1);
        }
    }

    #[test]
    fn a_link_to_another_socket_in_the_place_of_qemus_is_not_connected_to() {
        let scratch = tempfile::tempdir().unwrap();
        let elsewhere = UnixListener::bind(scratch.path().join("root-only")).unwrap();
        let dir = SocketDir::for_qemu(&place(scratch.path(), None), id(3)).unwrap();
        symlink(scratch.path().join("root-only"), dir.path_for_qemu()).unwrap();

        let refused = connect(&dir.path()).unwrap_err();

        assert!(refused.to_string().contains("symbolic link"), "{refused}");
        elsewhere.set_nonblocking(true).unwrap();
        assert_eq!(elsewhere.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "no connection was made");
    }

    #[test]
    fn stale_directories_are_removed_and_those_in_use_or_of_others_are_not() {
        let scratch = tempfile::tempdir().unwrap();
        let place = place(scratch.path(), None);
        let used = SocketDir::for_qemu(&place, id(1)).unwrap();
        let left = scratch.path().join(name_of(id(2), Listens::Qemu));
        let full = scratch.path().join(name_of(id(3), Listens::Sterna));
        let foreign = ["sterna-notes", "sterna-00-source", "other"].map(|name| scratch.path().join(name));
        for path in foreign.iter().chain([&left, &full]) {
            fs::create_dir(path).unwrap();
            fs::write(path.join(SOCKET), "").unwrap();
        }
        fs::write(full.join("precious"), "").unwrap();
        // In use by a version that did not lock its directory.
        let older = scratch.path().join(format!("sterna-{}-destination", id(4)));
        fs::create_dir(&older).unwrap();

        place.remove_stale();

        assert!(!left.exists() && older.exists());
        assert!(used.path_for_qemu().parent().unwrap().exists() && full.join("precious").exists());
        assert!(foreign.iter().all(|path| path.join(SOCKET).exists()));
    }

    #[test]
    fn a_directory_is_made_although_others_remove_stale_ones_all_the_time() {
        let scratch = tempfile::tempdir().unwrap();
        let over = AtomicBool::new(false);
        let failed = std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let place = place(scratch.path(), None);
                    while !over.load(Ordering::Relaxed) {
                        place.remove_stale();
                    }
                });
            }
            let place = place(scratch.path(), None);
            let failed = (0..500).find_map(|_| SocketDir::for_qemu(&place, id(1)).err());
            over.store(true, Ordering::Relaxed);
            failed
        });
        assert!(failed.is_none(), "{failed:?}");
    }

    #[test]
    fn a_directory_that_a_third_user_can_change_is_no_place_for_sockets() {
        let scratch = tempfile::tempdir().unwrap();
        let find = |path: &Path| SocketPlace::find(&SocketDirectory::One(path.to_owned()), None);
        find(scratch.path()).unwrap();
        for (mode, good) in [(0o777, false), (0o770, false), (0o1777, true), (0o755, true)] {
            fs::set_permissions(scratch.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(find(scratch.path()).is_ok(), good, "{mode:o}");
        }
        if is_root() {
            std::os::unix::fs::chown(scratch.path(), Some(NOBODY.user), None).unwrap();
            let refused = find(scratch.path()).unwrap_err().to_string();
            assert!(refused.contains("belongs to user 65534"), "{refused}");
        }
    }

    #[test]
    fn first_bytes_are_peeked_at_and_stay_in_the_connection() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.write_all(b"QEVM and more").unwrap();
        assert_eq!(&first_bytes(&far, Duration::from_secs(5)).unwrap(), b"QEVM");
        let mut bytes = [0; 6];
        far.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"QEVM a");
    }

    #[test]
    fn accepting_times_out_without_a_connection() {
        let scratch = tempfile::tempdir().unwrap();
        let (_dir, listener) = SocketDir::listening(&place(scratch.path(), None), id(0xd2)).unwrap();
        let error = accept_until(&listener, Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
