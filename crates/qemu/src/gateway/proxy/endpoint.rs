//! The unix sockets on which the source's proxy listens, and the classification of their connections.
//!
//! A migration socket receives the main channel of a migration and its multifd channels, possibly of several QEMUs at the same
//! time. A main channel does not identify its QEMU, so connections are grouped by the process that made them (unix(7), SO_PEERCRED).
//! QEMU before 9.0 connects its multifd channels after the main channel has been accepted; QEMU from 9.0 on connects them before it
//! sends anything. Both have connected all channels, and sent the first packet on each, by the end of the RAM setup section
//! (`multifd_send_sync_main` waits for each channel's thread). The proxy collects the channels then.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna_engine::cancel::Cancel;
use sterna_engine::transport::peer_process;
use sterna_engine::transport::unix::{self, SocketFile};
use sterna_wire::limits::{HANDSHAKE_TIME, MAX_RAM_CHANNELS};

use crate::gateway::GatewayError;
use crate::gateway::sockets::first_bytes;
use crate::gateway::source_stream::closer;
use crate::stream::{ChannelSniff, MultifdInit};

/// How long a connection on a migration socket may take to send its first bytes, and how long a multifd channel waits for its main channel.
const SNIFF_TIME: Duration = Duration::from_secs(30);
/// Pause after a failed accept (out of file descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The process at the other end of a connection; none if it is in a process namespace that this process does not see. All such
/// processes count as one, so each needs a socket of its own to migrate at the same time as others.
pub(super) type PeerProcess = Option<i32>;

/// The kind of connections that a socket accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// Channels of migrations, and other connections.
    Migrations,
    /// Connections that are carried unchanged.
    Connections,
}

/// A classified connection, from which nothing has been read.
#[derive(Debug)]
pub(super) enum Arrival {
    /// The main channel of a migration.
    Main(UnixStream, PeerProcess),
    /// A connection to be carried unchanged.
    Connection(UnixStream),
}

/// A unix socket on which this proxy listens, removed when this is dropped.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// The name under which both proxies know the socket.
    pub(super) name: String,
    expected: Expected,
    file: SocketFile,
    listener: UnixListener,
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Arrivals {
    next: u64,
    /// Accepted connections that are not classified yet.
    silent: HashMap<u64, PeerProcess>,
    /// Multifd channels that have not been moved to their migration yet.
    multifd: HashMap<u64, Multifd>,
    stopped: bool,
    /// After the stop: every earlier connection has been accepted.
    queue_is_empty: bool,
    abandoned: bool,
}

#[derive(Debug)]
struct Multifd {
    process: PeerProcess,
    stream: UnixStream,
    init: MultifdInit,
}

/// An accepted connection that is not classified yet.
#[derive(Debug)]
pub(super) struct Accepted {
    number: u64,
    process: PeerProcess,
    stream: UnixStream,
}

impl Accepted {
    /// Returns the endpoint's number for the connection.
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Endpoint {
    /// Listens on `path`. A socket that a killed process has left there is replaced.
    pub(super) fn listen(name: &str, path: &Path, expected: Expected) -> Result<Self, GatewayError> {
        let failed = |error: &dyn std::fmt::Display| {
            GatewayError::refused(format!("cannot listen on {}: {error}", path.display()))
        };
        let (listener, file) = unix::listen(path).map_err(|error| failed(&error))?;
        // The one thread that accepts waits in poll.
        listener.set_nonblocking(true).map_err(|error| failed(&error))?;
        Ok(Self {
            name: name.to_owned(),
            expected,
            file,
            listener,
            arrivals: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().expect("no thread panics with it locked")
    }

    /// Stops accepting: [`Endpoint::accept`] returns none, and the path is free for others.
    pub(super) fn stop(&self) {
        let mut arrivals = self.arrivals();
        if !arrivals.stopped {
            arrivals.stopped = true;
            // Refuses later connections and wakes the accepting thread.
            let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
            self.file.remove();
        }
    }

    /// Ends all waits for a connection's first bytes and for the other channels of a migration.
    pub(super) fn abandon(&self) {
        self.arrivals().abandoned = true;
        self.changed.notify_all();
    }

    /// Waits for the next connection; none once the endpoint has been stopped.
    ///
    /// Only one thread may call this.
    pub(super) fn accept(&self) -> Option<Accepted> {
        loop {
            let mut descriptors = [PollFd::new(&self.listener, PollFlags::IN)];
            let _ = poll(&mut descriptors, None);
            // The lock is held from here on, so that a connection is either in the kernel's queue or registered.
            let mut arrivals = self.arrivals();
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if let Err(error) = stream.set_nonblocking(false) {
                        tracing::warn!(%error, "a connection cannot be used");
                        continue;
                    }
                    let number = arrivals.next;
                    arrivals.next += 1;
                    let process = peer_process(&stream);
                    arrivals.silent.insert(number, process);
                    self.changed.notify_all();
                    return Some(Accepted { number, process, stream });
                }
                // All connections from before the stop have been accepted: the kernel keeps them in the queue.
                Err(_) if arrivals.stopped => {
                    arrivals.queue_is_empty = true;
                    self.changed.notify_all();
                    return None;
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    drop(arrivals);
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Removes a connection that is not served, so that no main channel waits for its classification.
    pub(super) fn forget(&self, number: u64) {
        self.arrivals().silent.remove(&number);
        self.changed.notify_all();
    }

    /// Classifies a connection by its first bytes. For a multifd channel, waits until the main channel's thread has taken it, and returns
    /// none.
    ///
    /// # Errors
    /// Why the connection was closed: it sent nothing in time or before `cancel`, or no valid beginning.
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
            (_, Some(Err(error))) => Err(format!("a multifd channel has no valid first packet: closed ({error})")),
            (Ok(_), None) => Ok(Some(Arrival::Connection(stream))),
            (Err(error), None) => Err(format!("a connection sent nothing: closed ({error})")),
        }
    }

    /// Takes the multifd channels of `process`, whose main channel has been read to the end of the RAM setup section. [`check_channels`]
    /// checks that they belong to one migration.
    ///
    /// # Errors
    /// A connection of the process has not sent its first bytes in time.
    pub(super) fn take_multifd(&self, process: PeerProcess) -> Result<Vec<(UnixStream, MultifdInit)>, String> {
        let deadline = Instant::now() + HANDSHAKE_TIME;
        let mut arrivals = self.arrivals();
        // All channels are connected by now. Once the kernel's queue is empty, all have been accepted, too.
        while !arrivals.abandoned
            && (!arrivals.queue_is_empty && is_readable(&self.listener)
                || arrivals.silent.values().any(|silent| *silent == process))
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err("one of its multifd channels sends nothing".into());
            }
            (arrivals, _) = self.changed.wait_timeout(arrivals, left).expect("no thread panics with it locked");
        }
        let numbers: Vec<_> =
            arrivals.multifd.iter().filter(|(_, found)| found.process == process).map(|(number, _)| *number).collect();
        let found = numbers.iter().filter_map(|number| arrivals.multifd.remove(number));
        // Channels that are hung up are left from a failed attempt of the same QEMU.
        let channels =
            found.filter(|found| !is_hung_up(&found.stream)).map(|found| (found.stream, found.init)).collect();
        self.changed.notify_all();
        Ok(channels)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Checks that these are the multifd channels of one migration, and not too many.
///
/// # Errors
/// There are too many channels, or they belong to several migrations.
pub(super) fn check_channels(channels: &[(UnixStream, MultifdInit)]) -> Result<(), String> {
    let max = usize::from(MAX_RAM_CHANNELS);
    if channels.len() > max {
        return Err(format!("{} multifd channels are more than the {max} that can be carried", channels.len()));
    }
    for (position, (_, init)) in channels.iter().enumerate() {
        let before = &channels[..position];
        if before.iter().any(|(_, earlier)| earlier.id == init.id) {
            return Err("two multifd channels with the same number".into());
        }
        if before.iter().any(|(_, earlier)| earlier.uuid != init.uuid) {
            return Err("multifd channels of several guests: give each a socket of its own (--unix NAME=PATH)".into());
        }
    }
    Ok(())
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

/// Returns whether the other end has been closed.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(path: &Path) -> Result<Endpoint, GatewayError> {
        Endpoint::listen("", path, Expected::Migrations)
    }

    #[test]
    fn the_socket_of_a_killed_process_is_replaced() {
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
    fn a_socket_in_use_is_neither_replaced_nor_connected_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        let socket = listen(&path).unwrap();

        let error = listen(&path).expect_err("it is in use").to_string();

        assert!(error.contains("from.sock") && error.contains("another process listens there"), "{error}");
        socket.listener.set_nonblocking(true).unwrap();
        assert_eq!(socket.listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "no connection was made");
    }

    #[test]
    fn a_file_that_is_no_socket_is_never_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("from.sock");
        std::fs::write(&path, "precious").unwrap();

        let error = listen(&path).expect_err("it is a file").to_string();

        assert!(error.contains("something else than a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
