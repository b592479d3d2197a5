//! Accepts many connections at once, bounded in time and in number until each has sent its channel header.

use std::io::{self, IoSlice};
use std::mem;
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::SockRef;
use sterna_wire::header::{ChannelHeader, ChannelReply};

use super::socket::{Host, Sending};
use super::unix::SocketFile;
use super::{Address, Connection, Limits, Security, Socket, TransportError, channel, dial, given, simulated, unix};
use crate::hand_over::NO_THREAD;

/// Stack of a handshake's thread, in bytes: handshakes are not deep, and there may be many at once.
const HANDSHAKE_STACK: usize = 512 << 10;
/// Pause after a failed accept (out of file descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Refused connections that are kept until the owner of [`Incoming`] asks for them. Further ones are counted.
const KEPT_REFUSALS: usize = 4;
/// The answer to a connection for which there is no slot.
const TOO_MANY: &str = "too many connections are being opened at once; try again in a moment";

/// A bound address.
#[derive(Debug)]
pub struct Listener {
    bound: Bound,
    address: Address,
}

/// A listening socket.
#[derive(Debug)]
pub(super) enum Bound {
    Tcp(TcpListener),
    /// The listener is dropped before its file.
    Unix(UnixListener, SocketFile),
    Simulated(simulated::Acceptor),
    Given(given::Acceptor),
}

impl Bound {
    pub(super) fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(address) => TcpListener::bind(&*dial::resolve(address)?).map(Self::Tcp),
            Address::Unix(path) => unix::listen(path).map(|(listener, file)| Self::Unix(listener, file)),
            Address::Simulated(port) => port.listen().map(Self::Simulated),
            Address::Given(given) => given.bind().map(Self::Given),
        }
    }

    pub(super) fn address(&self) -> io::Result<Address> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Address::from),
            Self::Unix(_, file) => Ok(Address::Unix(file.path().to_owned())),
            Self::Simulated(acceptor) => Ok(acceptor.port().into()),
            Self::Given(acceptor) => Ok(Address::Given(acceptor.given().clone())),
        }
    }

    pub(super) fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| stream.into()),
            Self::Unix(listener, _) => listener.accept().map(|(stream, _)| stream.into()),
            Self::Simulated(acceptor) => acceptor.accept().map(Socket::from),
            Self::Given(acceptor) => acceptor.accept(),
        }
    }

    /// Wakes the thread that waits in [`Bound::accept`], and refuses all later connections.
    fn stop(&self) {
        // Linux takes the socket out of the listening state, and a blocked accept fails with EINVAL.
        let _ = match self {
            Self::Tcp(listener) => SockRef::from(listener).shutdown(Shutdown::Both),
            Self::Unix(listener, file) => {
                let ended = SockRef::from(listener).shutdown(Shutdown::Both);
                file.remove();
                ended
            }
            Self::Simulated(acceptor) => {
                acceptor.stop();
                Ok(())
            }
            Self::Given(acceptor) => {
                acceptor.stop();
                Ok(())
            }
        };
    }
}

/// Ends the accepting of connections. Connections that were handed out stay open.
#[derive(Clone, Debug)]
pub struct Stop {
    bound: Arc<Bound>,
    stopped: Arc<AtomicBool>,
    slots: Arc<Mutex<Vec<Slot>>>,
}

impl Stop {
    /// Stops accepting and wakes the accepting thread. Handshakes under way continue; once they have ended,
    /// [`Incoming::next`] returns `None`. Removes a Unix socket's file.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.bound.stop();
    }

    /// Does the same as [`Stop::stop`], and closes all connections that were not yet received from [`Incoming`]:
    /// handshakes under way and their threads end.
    pub fn end(&self) {
        self.stop();
        for slot in lock(&self.slots).iter() {
            // Fails only if the socket is closed already.
            let _ = slot.socket.shutdown(Shutdown::Both);
        }
    }
}

/// The connections that have sent their channel header. Dropping it stops the listener and ends the handshakes under
/// way.
#[derive(Debug)]
pub struct Incoming {
    arrived: Receiver<(Connection, ChannelHeader)>,
    refused: Arc<Mutex<RefusedConnections>>,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens on `address`. A TCP port of 0 lets the kernel choose. The file of a Unix socket is made for its owner
    /// only (mode 0600), replaces one on which no process listens any more, and is removed with the listener.
    ///
    /// # Errors
    /// The address does not belong to this host, is in use, or is forbidden.
    pub fn bind(address: impl Into<Address>) -> Result<Self, TransportError> {
        let address = address.into();
        let failed = |source| TransportError::Listen { address: address.to_string(), source };
        let bound = Bound::bind(&address).map_err(failed)?;
        let address = bound.address().map_err(failed)?;
        Ok(Self { bound, address })
    }

    /// Returns the address, with TCP's real port, or a Unix socket's absolute path.
    pub fn local_address(&self) -> Address {
        self.address.clone()
    }

    /// Starts a thread that accepts connections. Each connection's handshake runs on another thread and takes at most
    /// `limits.handshake`. At most `limits.max_pending` connections exist at once; a connection counts until it is received
    /// from [`Incoming`].
    ///
    /// A further connection replaces one that has not sent its channel header yet: the oldest from the host that has
    /// the most of them. So silent strangers cannot keep a source out. The replaced connection receives the reason; if
    /// there is none to replace, the new connection receives it.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(self, security: Security, limits: Limits) -> Result<Incoming, TransportError> {
        let failed = |source| TransportError::Listen { address: self.address.to_string(), source };
        let bound = Arc::new(self.bound);
        let (stopped, slots) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let stop = Stop { bound: Arc::clone(&bound), stopped: Arc::clone(&stopped), slots: Arc::clone(&slots) };
        // A rendezvous: a handshake's thread keeps its slot until the connection has been received.
        let (arrive, arrived) = sync_channel(0);
        let refused = Arc::default();
        let acceptor =
            Acceptor { security: Arc::new(security), limits, arrive, refused: Arc::clone(&refused), stopped, slots };
        let thread =
            thread::Builder::new().name("listener".to_owned()).spawn(move || acceptor.run(&bound)).map_err(failed)?;
        Ok(Incoming { arrived, refused, stop, thread: Some(thread) })
    }
}

impl Incoming {
    /// Waits for the next connection and its (not yet proved) header. `None` once the listener has been stopped.
    pub fn next(&self) -> Option<(Connection, ChannelHeader)> {
        self.arrived.recv().ok()
    }

    /// Waits for the next connection as [`Incoming::next`] does, but at most for `timeout`.
    ///
    /// # Errors
    /// No connection came in that time, or the listener has been stopped.
    pub fn next_within(&self, timeout: Duration) -> Result<(Connection, ChannelHeader), RecvTimeoutError> {
        self.arrived.recv_timeout(timeout)
    }

    /// Returns the connections that were refused since the last call: their peers spoke, but may not send here, or do not speak this protocol.
    pub fn refused(&self) -> RefusedConnections {
        mem::take(&mut lock(&self.refused))
    }

    /// Returns a handle that stops the listener from another thread.
    pub fn stop_handle(&self) -> Stop {
        self.stop.clone()
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.stop.end();
        if let Some(thread) = self.thread.take() {
            // The thread only accepts; the panic hook has already reported a panic.
            let _ = thread.join();
        }
    }
}

/// Connections that were refused before they belonged to a migration.
#[derive(Debug, Default)]
pub struct RefusedConnections {
    /// Why the first of them were refused, each with its peer.
    pub first: Vec<TransportError>,
    /// How many more there were.
    pub more: u64,
}

impl RefusedConnections {
    /// Keeps an error that an operator can mend: a certificate, or an option of one side, is wrong. Others, such as connections that end
    /// by themselves, come from programs that only look whether the port is open.
    fn keep(&mut self, error: TransportError) {
        use TransportError as E;
        match error {
            E::Tls { .. } | E::NotAllowed { .. } | E::Header { .. } if self.first.len() < KEPT_REFUSALS => {
                self.first.push(error);
            }
            E::Tls { .. } | E::NotAllowed { .. } | E::Header { .. } => self.more += 1,
            _ => {}
        }
    }
}

/// The thread that accepts connections.
struct Acceptor {
    security: Arc<Security>,
    limits: Limits,
    arrive: SyncSender<(Connection, ChannelHeader)>,
    refused: Arc<Mutex<RefusedConnections>>,
    stopped: Arc<AtomicBool>,
    slots: Arc<Mutex<Vec<Slot>>>,
}

/// A connection whose thread has not ended. Slots are kept oldest first.
#[derive(Debug)]
struct Slot {
    socket: Arc<Socket>,
    host: Host,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The channel header has not arrived.
    Silent,
    /// The channel header has arrived, and the connection waits in [`Incoming`].
    Arrived,
    /// The connection was closed to make room.
    Closed,
}

/// Why a connection gets no slot.
enum NoSlot {
    /// The listener was stopped while the connection was accepted.
    Stopped,
    /// There are as many connections as may be.
    TooMany,
}

/// A thread's hold on its slot. Dropping it releases the slot.
struct Hold {
    socket: Arc<Socket>,
    slots: Arc<Mutex<Vec<Slot>>>,
}

impl Hold {
    /// Records that the channel header has arrived. Returns `false` if the connection was closed before, to make room: its peer was answered.
    fn arrived(&self) -> bool {
        let mut slots = lock(&self.slots);
        let slot = slots.iter_mut().find(|slot| Arc::ptr_eq(&slot.socket, &self.socket));
        let open = slot.filter(|slot| slot.stage == Stage::Silent);
        open.map(|slot| slot.stage = Stage::Arrived).is_some()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        lock(&self.slots).retain(|slot| !Arc::ptr_eq(&slot.socket, &self.socket));
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().expect("no thread panics with the lock held")
}

/// Closes the connection that makes room for another one. Returns `false` if there is none.
fn make_room(slots: &mut [Slot]) -> bool {
    let silent = |slot: &&Slot| slot.stage == Stage::Silent;
    let from = |host: Host| slots.iter().filter(silent).filter(|slot| slot.host == host).count();
    // The first of several with the same count, which is the oldest.
    let most = slots.iter().filter(silent).map(|slot| from(slot.host)).max();
    let chosen = slots.iter().position(|slot| silent(&slot) && Some(from(slot.host)) == most);
    let Some(chosen) = chosen else { return false };
    postpone_unread(&slots[chosen].socket, TOO_MANY);
    // The shutdown wakes the thread that waits for the connection's channel header.
    let _ = slots[chosen].socket.shutdown(Shutdown::Both);
    slots[chosen].stage = Stage::Closed;
    true
}

impl Acceptor {
    fn run(&self, bound: &Bound) {
        loop {
            let accepted = bound.accept();
            if self.stopped.load(Ordering::Acquire) {
                return;
            }
            match accepted {
                Ok(socket) => self.admit(socket),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(&self, socket: Socket) {
        let hold = match self.slot(&socket) {
            Ok(hold) => hold,
            // Closed without an answer: the source would try again in vain.
            Err(NoSlot::Stopped) => return,
            Err(NoSlot::TooMany) => {
                tracing::warn!(
                    peer = socket.peer(),
                    limit = self.limits.max_pending,
                    "too many connections at once, refused one"
                );
                postpone_unread(&socket, TOO_MANY);
                return;
            }
        };
        let (security, limits, arrive) = (Arc::clone(&self.security), self.limits, self.arrive.clone());
        let refused = Arc::clone(&self.refused);
        let held = Arc::clone(&hold.socket);
        let serve = move || {
            match serve(socket, &security, &limits) {
                // Sending fails if the listener's owner is gone; then the connection is dropped, which ends it.
                Ok(arrival) if hold.arrived() => drop(arrive.send(arrival)),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!("{error}");
                    lock(&refused).keep(error);
                }
            }
        };
        let spawned = thread::Builder::new().name("handshake".to_owned()).stack_size(HANDSHAKE_STACK).spawn(serve);
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot start a thread for a connection");
            // A silent connection leaves its thread to the next attempt.
            make_room(&mut lock(&self.slots));
            postpone_unread(&held, NO_THREAD);
        }
    }

    /// Returns a slot for a connection, if one is free or can be freed.
    fn slot(&self, socket: &Socket) -> Result<Hold, NoSlot> {
        let mut slots = lock(&self.slots);
        // `Stop::end` either has closed the connections that have slots before this lock, or will also close this one.
        if self.stopped.load(Ordering::Acquire) {
            return Err(NoSlot::Stopped);
        }
        let open = slots.iter().filter(|slot| slot.stage != Stage::Closed).count();
        // The threads of closed connections end as soon as they get a CPU, so twice the number is allowed.
        let room =
            slots.len() < 2 * self.limits.max_pending && (open < self.limits.max_pending || make_room(&mut slots));
        let clone = room.then(|| socket.try_clone().ok()).flatten().ok_or(NoSlot::TooMany)?;
        let clone = Arc::new(clone);
        slots.push(Slot { socket: Arc::clone(&clone), host: socket.host(), stage: Stage::Silent });
        Ok(Hold { socket: clone, slots: Arc::clone(&self.slots) })
    }
}

fn serve(socket: Socket, security: &Security, limits: &Limits) -> Result<(Connection, ChannelHeader), TransportError> {
    let mut connection = Connection::accept_within(socket, security, limits)?;
    let header = channel::read_header(&mut connection)?;
    Ok((connection, header))
}

/// Answers, before anything is read and without waiting, that there is no room. The answer is in clear text also with
/// TLS, because the sender understands it.
fn postpone_unread(socket: &Socket, reason: &str) {
    let reply = ChannelReply::Busy(reason.to_owned()).encode();
    let _ = socket.send_all(&mut [IoSlice::new(&reply)], Sending::DoesNotWait);
    let _ = socket.shutdown(Shutdown::Write);
    socket.take_unread();
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::IpAddr;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn slots(hosts: &[&str]) -> Vec<Slot> {
        let slot = |address: &&str| Slot {
            socket: Arc::new(UnixStream::pair().unwrap().0.into()),
            host: address.parse::<IpAddr>().unwrap().into(),
            stage: Stage::Silent,
        };
        hosts.iter().map(slot).collect()
    }

    /// Returns the order in which connections are closed to make room.
    fn order(mut slots: Vec<Slot>) -> Vec<usize> {
        let mut order = Vec::new();
        while make_room(&mut slots) {
            let closed = |at: &usize| slots[*at].stage == Stage::Closed && !order.contains(at);
            order.extend((0..slots.len()).find(closed));
        }
        order
    }

    #[test]
    fn the_host_with_the_most_silent_connections_makes_room_and_of_those_the_oldest() {
        let known = ["192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.3", "192.0.2.2"];
        assert_eq!(order(slots(&known)), [1, 2, 0, 3, 4]);
        let networks = ["2001:db8::1", "2001:db8:1::1", "2001:db8:1::2", "::ffff:192.0.2.1"];
        assert_eq!(order(slots(&networks)), [1, 0, 2, 3]);
    }

    #[test]
    fn a_connection_that_was_accepted_while_the_listener_stopped_gets_no_answer() {
        let answer = |stopped, max_pending| {
            let acceptor = Acceptor {
                security: Arc::new(Security::Insecure),
                limits: Limits { max_pending, ..Limits::default() },
                arrive: sync_channel(0).0,
                refused: Arc::default(),
                stopped: Arc::new(AtomicBool::new(stopped)),
                slots: Arc::default(),
            };
            let (mut near, far) = UnixStream::pair().unwrap();
            acceptor.admit(far.into());
            let mut answer = Vec::new();
            near.read_to_end(&mut answer).unwrap();
            answer
        };
        assert!(answer(true, 1).is_empty());
        assert_eq!(answer(false, 0), ChannelReply::Busy(TOO_MANY.to_owned()).encode());
    }

    #[test]
    fn a_connection_that_made_room_does_not_arrive() {
        let slots = Arc::new(Mutex::new(slots(&["192.0.2.1", "192.0.2.2"])));
        let holds = [0, 1].map(|at| {
            let socket = Arc::clone(&lock(&slots)[at].socket);
            Hold { socket, slots: Arc::clone(&slots) }
        });
        assert!(make_room(&mut lock(&slots)));
        assert_eq!(holds.each_ref().map(Hold::arrived), [false, true]);
        assert!(!make_room(&mut lock(&slots)));
    }

    #[test]
    fn a_connection_that_has_sent_its_header_is_not_closed_to_make_room() {
        let mut slots = slots(&["192.0.2.1", "192.0.2.1", "192.0.2.2"]);
        slots[0].stage = Stage::Arrived;
        slots[1].stage = Stage::Arrived;
        assert_eq!(order(slots), [2]);
    }
}
