//! Many incoming connections at once, each bounded in time, all bounded in number, until they have said what they are.

use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::SendFlags;
use socket2::SockRef;
use sterna_wire::header::{ChannelHeader, ChannelReply};

use super::{Connection, Limits, Security, TransportError, channel, socket};

/// The handshake is not deep, and there may be many at once.
const HANDSHAKE_STACK: usize = 512 << 10;
/// Pause after a failed accept (out of file descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound address.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

/// Ends the accepting. What it has already handed out, and handshakes under way, go on.
#[derive(Clone, Debug)]
pub struct Stop {
    socket: Arc<TcpListener>,
    stopped: Arc<AtomicBool>,
}

impl Stop {
    /// Stops accepting and wakes the thread that does it; [`Incoming::next`] then ends.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Linux takes the socket out of the listening state, and a blocked accept fails with EINVAL.
        let _ = SockRef::from(&*self.socket).shutdown(Shutdown::Both);
    }
}

/// The connections that have said what they are for. Dropping it stops the listener.
#[derive(Debug)]
pub struct Incoming {
    arrived: Receiver<(Connection, ChannelHeader)>,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Binds `address`, `HOST:PORT`; port 0 lets the kernel choose.
    ///
    /// # Errors
    /// The address is not one of this host's, or in use, or forbidden.
    pub fn bind(address: &str) -> Result<Self, TransportError> {
        let failed = |source| TransportError::Listen { address: address.to_owned(), source };
        let socket = TcpListener::bind(address).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { socket, address })
    }

    /// The address with its real port.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Starts accepting on a thread of its own. Each connection is shaken hands with on another one, within
    /// `limits.handshake`; at most `limits.pending` at once, counted until they have been taken from [`Incoming`];
    /// further ones are refused in words.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(self, security: Security, limits: Limits) -> Result<Incoming, TransportError> {
        let failed = |source| TransportError::Listen { address: self.address.to_string(), source };
        let socket = Arc::new(self.socket);
        let stop = Stop { socket: Arc::clone(&socket), stopped: Arc::new(AtomicBool::new(false)) };
        // A rendezvous: a handshake's thread keeps its place until the connection has been taken.
        let (arrive, arrived) = sync_channel(0);
        let doorman = Doorman { security: Arc::new(security), limits, arrive, pending: Arc::new(AtomicUsize::new(0)) };
        let stopped = Arc::clone(&stop.stopped);
        let thread = thread::Builder::new()
            .name("listener".to_owned())
            .spawn(move || doorman.run(&socket, &stopped))
            .map_err(failed)?;
        Ok(Incoming { arrived, stop, thread: Some(thread) })
    }
}

impl Incoming {
    /// The next connection and its (not yet proved) header; waits for it. `None` once the listener has been stopped.
    pub fn next(&self) -> Option<(Connection, ChannelHeader)> {
        self.arrived.recv().ok()
    }

    /// [`Incoming::next`] that waits at most `timeout`.
    ///
    /// # Errors
    /// Nothing came in that time, or the listener has been stopped.
    pub fn next_within(&self, timeout: Duration) -> Result<(Connection, ChannelHeader), RecvTimeoutError> {
        self.arrived.recv_timeout(timeout)
    }

    /// A handle that stops the listener from another thread.
    pub fn stop_handle(&self) -> Stop {
        self.stop.clone()
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // It only accepts; a panic there has already been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

struct Doorman {
    security: Arc<Security>,
    limits: Limits,
    arrive: SyncSender<(Connection, ChannelHeader)>,
    pending: Arc<AtomicUsize>,
}

/// One of the places for connections that have not been taken yet; given back when dropped.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Doorman {
    fn run(&self, socket: &TcpListener, stopped: &AtomicBool) {
        loop {
            let accepted = socket.accept();
            if stopped.load(Ordering::Acquire) {
                return;
            }
            match accepted {
                Ok((tcp, peer)) => self.admit(tcp, peer),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(&self, tcp: TcpStream, peer: SocketAddr) {
        // Only this thread adds, so the count cannot pass the limit between the look and the addition.
        if self.pending.load(Ordering::Acquire) >= self.limits.pending {
            tracing::warn!(%peer, limit = self.limits.pending, "too many connections at once, refused one");
            refuse_unread(&tcp, "too many connections are being opened at once; try again in a moment");
            return;
        }
        self.pending.fetch_add(1, Ordering::AcqRel);
        let place = Place(Arc::clone(&self.pending));
        let (security, limits, arrive) = (Arc::clone(&self.security), self.limits, self.arrive.clone());
        let serve = move || {
            let _place = place;
            match serve(tcp, &security, &limits) {
                // The receiver is gone if the listener's owner is; the connection is then dropped, which ends it.
                Ok(arrival) => drop(arrive.send(arrival)),
                Err(error) => tracing::warn!("{error}"),
            }
        };
        let spawned = thread::Builder::new().name("handshake".to_owned()).stack_size(HANDSHAKE_STACK).spawn(serve);
        if let Err(error) = spawned {
            tracing::warn!(%peer, %error, "cannot start a thread for a connection");
        }
    }
}

fn serve(tcp: TcpStream, security: &Security, limits: &Limits) -> Result<(Connection, ChannelHeader), TransportError> {
    let mut connection = Connection::accept_within(tcp, security, limits)?;
    let header = channel::read_header(&mut connection)?;
    Ok((connection, header))
}

/// Refuses without a handshake, in clear text also where TLS is expected (the sender understands it), without waiting.
fn refuse_unread(mut tcp: &TcpStream, reason: &str) {
    let reply = ChannelReply::Refused(reason.to_owned()).encode();
    let _ = socket::send_all(tcp, &mut [IoSlice::new(&reply)], SendFlags::DONTWAIT);
    let _ = tcp.shutdown(Shutdown::Write);
    // What has arrived by now is taken, because closing over unread bytes resets the connection.
    if tcp.set_nonblocking(true).is_ok() {
        let _ = tcp.read(&mut [0; 4096]);
    }
}
