//! The unix sockets that the source's proxy listens on, and what the connections on them are.
//!
//! A socket that a QEMU is told to migrate to gets the main channel of a migration and its multifd channels, of several QEMUs at the
//! same time perhaps. A main channel does not say of which QEMU it is, so connections are told apart by the process that made them
//! (unix(7), SO_PEERCRED). QEMU before 9.0 connects its multifd channels after the main channel has been accepted, QEMU from 9.0 on
//! before it sends anything; both have connected all of them, and sent each one's first packet, by the end of the RAM setup
//! section (`multifd_send_sync_main` waits for each channel's thread). So that is when they are collected.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna::cancel::Cancel;
use sterna_wire::limits::{HANDSHAKE_TIME, MAX_RAM_CHANNELS};

use crate::gateway::GatewayError;
use crate::gateway::sockets::first_bytes;
use crate::gateway::source_stream::closer;
use crate::qmp::process_id;
use crate::stream::{ChannelSniff, MultifdInit};

/// How long a connection on a migration socket may take to say what it is, and a multifd channel waits for its main channel.
const SNIFF_TIME: Duration = Duration::from_secs(30);
/// Pause after a failed accept (out of file descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The process at the other end of a connection: none where it is in a process namespace that this one does not see. All such
/// processes count as one, so that each needs a socket of its own to migrate at the same time as others.
pub(super) type PeerProcess = Option<i32>;

/// What connects to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// Migrations, and connections that are none.
    Migrations,
    /// Connections that are carried unchanged.
    Connections,
}

/// What a connection is.
#[derive(Debug)]
pub(super) enum Arrival {
    /// The main channel of a migration, of which nothing has been read.
    Main(UnixStream, PeerProcess),
    /// To be carried unchanged. Nothing has been read of it.
    Connection(UnixStream),
}

/// A unix socket that this proxy listens on; removed at the end.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// The name that both proxies know the socket by.
    pub(super) name: String,
    expected: Expected,
    path: PathBuf,
    listener: UnixListener,
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Arrivals {
    next: u64,
    /// Accepted, and it is not known yet what they are.
    silent: HashMap<u64, PeerProcess>,
    /// Multifd channels whose main channel has not asked for them yet.
    multifd: HashMap<u64, Multifd>,
    stopped: bool,
    abandoned: bool,
}

#[derive(Debug)]
struct Multifd {
    process: PeerProcess,
    stream: UnixStream,
    init: MultifdInit,
}

/// A connection that has been accepted, and has said nothing yet.
#[derive(Debug)]
pub(super) struct Accepted {
    number: u64,
    process: PeerProcess,
    stream: UnixStream,
}

impl Endpoint {
    /// Listens on `path`, in place of a socket that a killed process has left there.
    pub(super) fn listen(name: &str, path: &Path, expected: Expected) -> Result<Self, GatewayError> {
        let failed =
            |error: &dyn std::fmt::Display| GatewayError(format!("cannot listen on {}: {error}", path.display()));
        let bound = match bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_left(path).map_err(|reason| failed(&reason))?;
                bind(path)
            }
            bound => bound,
        };
        Ok(Self {
            name: name.to_owned(),
            expected,
            path: path.to_owned(),
            listener: bound.map_err(|error| failed(&error))?,
            arrivals: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().expect("no thread panics with it locked")
    }

    /// Accepts no more: [`Endpoint::accept`] ends, and the path is free for others.
    pub(super) fn stop(&self) {
        let mut arrivals = self.arrivals();
        if !arrivals.stopped {
            arrivals.stopped = true;
            // Linux takes the socket out of the listening state, which wakes the thread that waits for connections.
            let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// What waits for a connection to say what it is, or for the other connections of a migration, waits no longer.
    pub(super) fn abandon(&self) {
        self.arrivals().abandoned = true;
        self.changed.notify_all();
    }

    /// The next connection; waits for it. None once the endpoint has been stopped.
    ///
    /// Called by one thread only.
    pub(super) fn accept(&self) -> Option<Accepted> {
        loop {
            let mut descriptors = [PollFd::new(&self.listener, PollFlags::IN)];
            let _ = poll(&mut descriptors, None);
            // Locked from here on, so that a connection is either in the kernel's queue or registered.
            let mut arrivals = self.arrivals();
            if arrivals.stopped {
                return None;
            }
            if !is_readable(&self.listener) {
                continue;
            }
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let number = arrivals.next;
                    arrivals.next += 1;
                    let process = process_id(&stream);
                    arrivals.silent.insert(number, process);
                    self.changed.notify_all();
                    return Some(Accepted { number, process, stream });
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    drop(arrivals);
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// A connection is not dealt with: no main channel is to wait for what it says.
    pub(super) fn forget(&self, accepted: &Accepted) {
        self.arrivals().silent.remove(&accepted.number);
        self.changed.notify_all();
    }

    /// Finds out what a connection is; waits until it has said so. A multifd channel waits here until its main channel has taken it.
    ///
    /// # Errors
    /// The connection said nothing before `cancel`, or nothing that makes sense, and was closed; why, for a note.
    pub(super) fn classify(&self, accepted: Accepted, cancel: &Cancel) -> Result<Option<Arrival>, String> {
        let Accepted { number, process, stream } = accepted;
        let _closing = closer(&stream).ok().map(|close| cancel.on_cancel(close));
        let kind = match self.expected {
            Expected::Connections => Ok(ChannelSniff::Other),
            Expected::Migrations => first_bytes(&stream, SNIFF_TIME).map(ChannelSniff::of),
        };
        let multifd = match kind {
            Ok(ChannelSniff::Multifd) => Some(read_init(&stream)),
            _ => None,
        };
        let mut arrivals = self.arrivals();
        arrivals.silent.remove(&number);
        self.changed.notify_all();
        match (kind, multifd) {
            (Ok(ChannelSniff::Main), _) => Ok(Some(Arrival::Main(stream, process))),
            (_, Some(Ok(init))) => {
                arrivals.multifd.insert(number, Multifd { process, stream, init });
                let waits = |arrivals: &mut Arrivals| arrivals.multifd.contains_key(&number) && !arrivals.abandoned;
                let (mut arrivals, _) = self
                    .changed
                    .wait_timeout_while(arrivals, SNIFF_TIME, waits)
                    .expect("no thread panics with it locked");
                match arrivals.multifd.remove(&number) {
                    Some(_) => Err("a multifd channel came without its main channel: closed".into()),
                    None => Ok(None),
                }
            }
            (_, Some(Err(error))) => Err(format!("a multifd channel does not begin as one: closed ({error})")),
            (Ok(_), None) => Ok(Some(Arrival::Connection(stream))),
            (Err(error), None) => Err(format!("a connection said nothing: closed ({error})")),
        }
    }

    /// The multifd channels of `process`, whose main channel has been read to the end of the RAM setup section.
    pub(super) fn take_multifd(&self, process: PeerProcess) -> Result<Vec<(UnixStream, MultifdInit)>, String> {
        let deadline = Instant::now() + HANDSHAKE_TIME;
        let mut arrivals = self.arrivals();
        // All of them are connected. The kernel's queue is empty only once they have been accepted, too.
        while !arrivals.abandoned
            && (!arrivals.stopped && is_readable(&self.listener)
                || arrivals.silent.values().any(|silent| *silent == process))
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err("one of its multifd channels says nothing".into());
            }
            (arrivals, _) = self.changed.wait_timeout(arrivals, left).expect("no thread panics with it locked");
        }
        let numbers: Vec<_> =
            arrivals.multifd.iter().filter(|(_, found)| found.process == process).map(|(number, _)| *number).collect();
        let mut channels: Vec<(UnixStream, MultifdInit)> = Vec::new();
        for found in numbers.iter().filter_map(|number| arrivals.multifd.remove(number)) {
            // Left by an attempt of the same QEMU that failed.
            if is_hung_up(&found.stream) {
                continue;
            }
            if channels.iter().any(|(_, known)| known.id == found.init.id) {
                return Err("two multifd channels with the same number".into());
            }
            channels.push((found.stream, found.init));
        }
        self.changed.notify_all();
        let most = usize::from(MAX_RAM_CHANNELS);
        match channels.len() {
            count if count > most => {
                Err(format!("{count} multifd channels are more than the {most} that can be carried"))
            }
            _ => Ok(channels),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop();
    }
}

fn read_init(stream: &UnixStream) -> Result<MultifdInit, String> {
    stream.set_read_timeout(Some(HANDSHAKE_TIME)).map_err(|error| error.to_string())?;
    let init = MultifdInit::read(stream, u8::MAX).map_err(|error| error.to_string())?;
    stream.set_read_timeout(None).map_err(|error| error.to_string())?;
    Ok(init)
}

fn is_readable(listener: &UnixListener) -> bool {
    has_events(&mut [PollFd::new(listener, PollFlags::IN)])
}

/// Whether the other end has been closed.
fn is_hung_up(stream: &UnixStream) -> bool {
    has_events(&mut [PollFd::new(stream, PollFlags::empty())])
}

fn has_events(descriptors: &mut [PollFd<'_>]) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match poll(descriptors, Some(&now)) {
            Ok(count) => return count > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Removes a socket that a process which was killed has left at `path`; says why not where it is anything else.
fn remove_left(path: &Path) -> Result<(), String> {
    let found = std::fs::symlink_metadata(path).map_err(|error| error.to_string())?;
    if !found.file_type().is_socket() {
        return Err("something else than a socket is there; remove it or give another path".into());
    }
    // Asked as a datagram socket: whoever listens there notices nothing, because the kernel refuses the type, with
    // another error than for a socket that no process has any more (unix(7): EPROTOTYPE, ECONNREFUSED).
    match UnixDatagram::unbound().and_then(|probe| probe.connect(path)) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|error| format!("the socket left there cannot be removed: {error}"))
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err("a socket of someone else is there; remove it or give another path".into())
        }
        _ => Err("another process listens there; end it or give another path".into()),
    }
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(path: &Path) -> Result<Endpoint, GatewayError> {
        Endpoint::listen("", path, Expected::Migrations)
    }

    #[test]
    fn a_socket_that_a_killed_process_left_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the kernel leaves the name");

        let socket = listen(&path).unwrap();

        drop(UnixStream::connect(&path).unwrap());
        drop(socket.accept().unwrap());
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_in_use_is_left_alone_and_not_even_disturbed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        let socket = listen(&path).unwrap();

        let error = listen(&path).err().expect("it is in use").to_string();

        assert!(error.contains("from.sock") && error.contains("another process listens there"), "{error}");
        socket.listener.set_nonblocking(true).unwrap();
        assert_eq!(socket.listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody has connected");
    }

    #[test]
    fn what_is_no_socket_is_never_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        std::fs::write(&path, "precious").unwrap();

        let error = listen(&path).err().expect("it is a file").to_string();

        assert!(error.contains("something else than a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
