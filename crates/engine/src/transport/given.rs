//! Sockets that the embedder makes, for a process that may not: a monitor in a sandbox gets them from outside, or made
//! them before.
//!
//! A source calls a function for each connection. A destination has a listening socket, or a queue of connections that
//! were accepted elsewhere. The embedder's listening socket and queue outlive the migration: another one may follow.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use socket2::{Domain, SockRef};

use super::Socket;
use crate::panics::caught;

/// Maximum number of connections in a [`SocketQueue`]: as many as a listening socket has that wait to be accepted.
const MAX_QUEUED: usize = 128;

/// Where sockets come from that Sterna neither makes nor connects.
#[derive(Clone)]
pub struct Given {
    name: String,
    origin: Origin,
}

type Connect = dyn Fn() -> io::Result<OwnedFd> + Send + Sync;

#[derive(Clone)]
enum Origin {
    /// The embedder's function connects.
    Function(Arc<Connect>),
    Listening(Arc<Listening>),
    Queue(Arc<Queue>),
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Given({:?})", self.name)
    }
}

impl PartialEq for Given {
    /// Two are equal if their sockets have the same origin.
    fn eq(&self, other: &Self) -> bool {
        match (&self.origin, &other.origin) {
            (Origin::Function(one), Origin::Function(other)) => Arc::ptr_eq(one, other),
            (Origin::Listening(one), Origin::Listening(other)) => Arc::ptr_eq(one, other),
            (Origin::Queue(one), Origin::Queue(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for Given {}

impl Given {
    pub(super) fn connecting(name: String, connect: Arc<Connect>) -> Self {
        Self { name, origin: Origin::Function(connect) }
    }

    /// # Errors
    /// It is not a listening stream socket.
    pub(super) fn listening(socket: OwnedFd) -> io::Result<Self> {
        let options = SockRef::from(&socket);
        if options.r#type()? != socket2::Type::STREAM || !options.is_listener()? {
            return Err(invalid("it is not a stream socket that listens: call listen(2) first"));
        }
        // A connection may be gone again when it is accepted.
        options.set_nonblocking(true)?;
        let name = match options.domain()? {
            Domain::IPV4 | Domain::IPV6 => TcpListener::from(socket.try_clone()?).local_addr()?.to_string(),
            Domain::UNIX => match UnixListener::from(socket.try_clone()?).local_addr()?.as_pathname() {
                Some(path) => format!("unix:{}", path.display()),
                None => "a given socket".to_owned(),
            },
            _ => "a given socket".to_owned(),
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let listening = Listening { socket, wake, stopped: AtomicBool::new(false), in_use: AtomicBool::new(false) };
        Ok(Self { name, origin: Origin::Listening(Arc::new(listening)) })
    }

    pub(super) fn queue(name: String) -> (Self, SocketQueue) {
        let queue = Arc::<Queue>::default();
        (Self { name, origin: Origin::Queue(Arc::clone(&queue)) }, SocketQueue(queue))
    }

    /// Returns the name for messages and records; with TLS, the destination's host.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Has a connection made.
    ///
    /// # Errors
    /// The function's error or panic; what it returned is no connected stream socket; or the address is a
    /// destination's.
    pub(super) fn connect(&self) -> io::Result<Socket> {
        let Origin::Function(connect) = &self.origin else {
            return Err(invalid("it accepts connections: a source connects by Address::connecting"));
        };
        let socket = caught(|| connect());
        let socket = socket.map_err(|text| io::Error::other(format!("the function that connects panicked: {text}")))?;
        given(socket?)
    }

    /// Accepts from now on.
    ///
    /// # Errors
    /// The address is a source's, or another destination uses it now.
    pub(super) fn bind(&self) -> io::Result<Acceptor> {
        let taken = match &self.origin {
            Origin::Function(_) => {
                let text = "it connects: a destination needs Address::listening or Address::accepted";
                return Err(invalid(text));
            }
            Origin::Listening(listening) => listening.begin(),
            Origin::Queue(queue) => queue.begin(),
        };
        match taken {
            true => Ok(Acceptor(self.clone())),
            false => Err(io::Error::new(io::ErrorKind::AddrInUse, "another destination uses it now")),
        }
    }
}

/// Accepts the connections of one destination, until it is dropped.
#[derive(Debug)]
pub(super) struct Acceptor(Given);

impl Acceptor {
    pub(super) fn given(&self) -> &Given {
        &self.0
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// The acceptor was stopped, or the connection is none that can be used.
    pub(super) fn accept(&self) -> io::Result<Socket> {
        match &self.0.origin {
            Origin::Function(_) => unreachable!("it was not bound"),
            Origin::Listening(listening) => listening.accept(),
            Origin::Queue(queue) => queue.accept(),
        }
    }

    /// Wakes the thread that waits, and lets it accept no more. Connections that were not accepted stay where they are.
    pub(super) fn stop(&self) {
        match &self.0.origin {
            Origin::Function(_) => {}
            Origin::Listening(listening) => listening.stop(),
            Origin::Queue(queue) => {
                queue.state().stopped = true;
                queue.changed.notify_all();
            }
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        match &self.0.origin {
            Origin::Function(_) => {}
            Origin::Listening(listening) => listening.in_use.store(false, Ordering::Release),
            Origin::Queue(queue) => queue.state().in_use = false,
        }
    }
}

/// A listening socket.
struct Listening {
    socket: OwnedFd,
    /// Readable once the acceptor was stopped. The socket itself is left listening.
    wake: OwnedFd,
    stopped: AtomicBool,
    in_use: AtomicBool,
}

impl Listening {
    fn begin(&self) -> bool {
        if self.in_use.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.stopped.store(false, Ordering::Release);
        // Fails where there is nothing to read: the last destination was not stopped.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        true
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn accept(&self) -> io::Result<Socket> {
        loop {
            if self.stopped.load(Ordering::Acquire) {
                return Err(stopped());
            }
            let fds = [self.socket.as_fd(), self.wake.as_fd()];
            let mut waited = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut waited, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            match SockRef::from(&self.socket).accept() {
                Ok((socket, _)) => return given(socket.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Connections that were accepted elsewhere.
#[derive(Default)]
struct Queue {
    state: Mutex<Queued>,
    changed: Condvar,
}

#[derive(Default)]
struct Queued {
    sockets: VecDeque<Socket>,
    stopped: bool,
    in_use: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, Queued> {
        self.state.lock().expect("no thread panics with the queue locked")
    }

    fn begin(&self) -> bool {
        let mut state = self.state();
        let free = !state.in_use;
        if free {
            (state.in_use, state.stopped) = (true, false);
        }
        free
    }

    fn accept(&self) -> io::Result<Socket> {
        let mut state = self.state();
        loop {
            if state.stopped {
                return Err(stopped());
            }
            if let Some(socket) = state.sockets.pop_front() {
                return Ok(socket);
            }
            state = self.changed.wait(state).expect("no thread panics with the queue locked");
        }
    }
}

/// Takes the connections of an [`Address::accepted`](super::Address::accepted), which a destination serves one after the
/// other. Clones belong to the same address.
#[derive(Clone)]
pub struct SocketQueue(Arc<Queue>);

impl fmt::Debug for SocketQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SocketQueue({} waiting)", self.0.state().sockets.len())
    }
}

impl SocketQueue {
    /// Adds a connected stream socket: TCP, Unix or another kind (vsock). It may be added before the destination
    /// listens. A destination that has ended leaves what it has not accepted to the next one.
    ///
    /// # Errors
    /// `InvalidInput` if it is no connected stream socket; `WouldBlock` if 128 are waiting already. The socket is closed
    /// then.
    pub fn push(&self, socket: impl Into<OwnedFd>) -> io::Result<()> {
        let socket = given(socket.into())?;
        let mut state = self.0.state();
        if state.sockets.len() >= MAX_QUEUED {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "128 connections wait to be accepted already"));
        }
        state.sockets.push_back(socket);
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }
}

/// Checks a socket that was connected elsewhere, and prepares it for blocking calls.
fn given(socket: OwnedFd) -> io::Result<Socket> {
    let options = SockRef::from(&socket);
    let stream = options.r#type().is_ok_and(|kind| kind == socket2::Type::STREAM);
    if !stream || options.peer_addr().is_err() {
        return Err(invalid("what was given is no connected stream socket"));
    }
    options.set_cloexec(true)?;
    options.set_nonblocking(false)?;
    let tcp = matches!(options.domain()?, Domain::IPV4 | Domain::IPV6);
    // Of a Unix socket nothing is used that other kinds of stream sockets lack.
    Ok(if tcp { std::net::TcpStream::from(socket).into() } else { std::os::unix::net::UnixStream::from(socket).into() })
}

fn stopped() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "no more connections are accepted")
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpStream, UdpSocket};
    use std::os::unix::net::UnixStream;

    use crate::transport::{Address, Connection, Limits, Listener, Security, accept_channel, open_channel};
    use sterna_wire::header::ChannelKind;
    use sterna_wire::identity::{MigrationId, MigrationKey};

    use super::*;

    /// Opens a channel from `from` to a listener at `at`.
    fn opens(from: Address, at: &Address) {
        let incoming = Listener::bind(at.clone()).unwrap().start(Security::Insecure, Limits::default()).unwrap();
        std::thread::scope(|scope| {
            let (id, key) = (MigrationId::from_bytes([1; 16]), MigrationKey::from_bytes([2; 32]));
            let opening = scope.spawn(move || {
                let connection = Connection::connect(from, &Security::Insecure).unwrap();
                open_channel(connection, &key, id, ChannelKind::Control, 0, 1).map(drop).unwrap();
            });
            accept_channel(incoming.next().unwrap().0).unwrap();
            opening.join().unwrap();
        });
    }

    #[test]
    fn a_queue_and_a_listening_socket_serve_one_destination_after_the_other() {
        let (accepted, queue) = Address::accepted("there");
        for _ in 0..2 {
            let queue = queue.clone();
            let connect = move || {
                let (ours, theirs) = UnixStream::pair()?;
                theirs.set_nonblocking(true)?;
                queue.push(theirs)?;
                Ok(ours.into())
            };
            opens(Address::connecting("there", connect), &accepted);
        }
        let listening = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listening.local_addr().unwrap();
        let at = Address::listening(listening.try_clone().unwrap()).unwrap();
        assert_eq!(at.to_string(), to.to_string());
        for _ in 0..2 {
            opens(Address::connecting("there", move || Ok(TcpStream::connect(to)?.into())), &at);
        }
        // It is the embedder's, and still listens.
        TcpStream::connect(to).unwrap();
        listening.accept().unwrap();
    }

    #[test]
    fn an_address_is_bound_by_one_destination_at_a_time_and_stopping_wakes_it() {
        let (accepted, _queue) = Address::accepted("there");
        let listening = Address::listening(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        for address in [accepted, listening] {
            let incoming =
                Listener::bind(address.clone()).unwrap().start(Security::Insecure, Limits::default()).unwrap();
            let refused = Listener::bind(address.clone()).unwrap_err().to_string();
            assert!(refused.contains("another destination uses it now"), "{refused}");
            incoming.stop_handle().stop();
            assert!(incoming.next().is_none());
            drop(incoming);
            Listener::bind(address).unwrap();
        }
    }

    #[test]
    fn what_is_no_connected_socket_is_refused_in_words() {
        let (accepted, queue) = Address::accepted("there");
        let unconnected = || socket2::Socket::new(Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let each: [OwnedFd; 3] = [unconnected().into(), datagrams.into(), file.into()];
        for socket in each {
            let refused = queue.push(socket).unwrap_err();
            assert_eq!(refused.to_string(), "what was given is no connected stream socket");
        }
        let refused = Address::listening(unconnected()).unwrap_err().to_string();
        assert!(refused.contains("call listen(2) first"), "{refused}");

        let connecting = |address: Address| Connection::connect(address, &Security::Insecure).unwrap_err().to_string();
        let refused = connecting(accepted);
        assert!(refused.contains("cannot connect to there") && refused.contains("Address::connecting"), "{refused}");
        let panics = Address::connecting("there", || panic!("no socket today"));
        let refused = connecting(panics.clone());
        assert!(refused.contains("panicked: no socket today"), "{refused}");
        let refused = Listener::bind(panics).unwrap_err().to_string();
        assert!(refused.contains("Address::listening"), "{refused}");
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let (_accepted, queue) = Address::accepted("there");
        let mut ends = Vec::new();
        for _ in 0..MAX_QUEUED {
            let (ours, theirs) = UnixStream::pair().unwrap();
            queue.push(theirs).unwrap();
            ends.push(ours);
        }
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        assert_eq!(queue.push(theirs).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(ours.write_all(&[1]).is_err() || ours.read(&mut [0]).unwrap() == 0, "it is closed");
    }
}
