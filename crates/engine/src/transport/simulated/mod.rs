//! A network in memory with planned faults, for the tests of this library and of monitors that embed it.
//!
//! Its connections are used like TCP connections: by threads that block, with the same errors. They have no file
//! descriptors, so thousands of migrations fit into one test. A seed determines which bytes arrive together and where a
//! connection is cut. It does not determine the order of threads, so a test must pass in any order, and prints the
//! seed.
//!
//! ```
//! use std::io::{Read, Write};
//! use sterna_engine::transport::simulated::{Direction, Faults, Network, Which};
//! use sterna_engine::transport::{Connection, Limits, Listener, Security, open_channel};
//! # use sterna_wire::{header::ChannelKind, identity::{MigrationId, MigrationKey}};
//! # let (key, id) = (MigrationKey::from_bytes([1; 32]), MigrationId::from_bytes([2; 16]));
//!
//! let network = Network::new(7);
//! let port = network.port("destination.example");
//! let incoming = Listener::bind(&port)?.start(Security::Insecure, Limits::default())?;
//!
//! // The first connection breaks somewhere within the channel's header.
//! network.faults(Faults::new().cut(Which::all().number(0), Direction::Forth, 1..50));
//! let connection = Connection::connect(&port, &Security::Insecure)?;
//! let error = open_channel(connection, &key, id, ChannelKind::Control, 0, 1).unwrap_err();
//! assert!(error.to_string().contains("simulated:destination.example"));
//! # drop(incoming);
//! # Ok::<(), sterna_engine::transport::TransportError>(())
//! ```

mod faults;
pub(super) mod random;
mod wire;

use std::collections::{HashMap, VecDeque};
use std::fmt::{Debug, Display, Formatter};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

pub use self::faults::{After, Direction, Faults, Which};
use self::random::Seeded;
pub(super) use self::wire::End;
use self::wire::{Name, Wire};

/// Default of the maximum number of bytes in transit in one direction of a connection.
pub const DEFAULT_CAPACITY: usize = 256 << 10;
/// How the text of a port begins.
const SIMULATED: &str = "simulated:";
/// Maximum number of connections that wait to be accepted; Linux's default is of this order.
const BACKLOG: usize = 128;

/// A network in memory. Clones are the same network.
#[derive(Clone)]
pub struct Network {
    shared: Arc<Shared>,
}

struct Shared {
    seed: u64,
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    faults: Faults,
    connections: u64,
    ports: HashMap<Arc<str>, PortState>,
    /// The connections that may still be open.
    wires: Vec<Weak<Wire>>,
}

#[derive(Default)]
struct PortState {
    connections: u64,
    listening: Option<Arc<Queue>>,
}

impl Network {
    /// Returns a network without faults, with [`DEFAULT_CAPACITY`]. All random choices follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Self::with_capacity(seed, DEFAULT_CAPACITY)
    }

    /// Returns a network like that of [`Network::new`], with room for `capacity` bytes (at least one) in transit in
    /// each direction of a connection.
    pub fn with_capacity(seed: u64, capacity: usize) -> Self {
        Self { shared: Arc::new(Shared { seed, capacity: capacity.max(1), state: Mutex::default() }) }
    }

    /// Returns the seed, for a failing test to print.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Returns the port of this name: an address to listen on and to connect to. With TLS, the listener's certificate
    /// must be for this name, as it must be for a host's name with TCP.
    pub fn port(&self, name: &str) -> Port {
        Port { network: self.clone(), name: name.into() }
    }

    /// Returns how many connections have been made so far, refused ones included. This is the number of the next one.
    pub fn connections(&self) -> u64 {
        self.shared.state().connections
    }

    /// Replaces the plan of faults for connections made from now on. Existing connections keep the plan under which
    /// they were made.
    pub fn faults(&self, faults: Faults) {
        self.shared.state().faults = faults;
    }

    /// Cuts all connections. New ones can be made.
    pub fn cut_all(&self) {
        self.cut(&Which::all());
    }

    /// Cuts these connections immediately.
    pub fn cut(&self, which: &Which) {
        self.each(which, Wire::cut);
    }

    /// Stops delivery in `direction` on these connections until [`Network::resume`]. Their end is not delivered either.
    pub fn stall(&self, which: &Which, direction: Direction) {
        self.each(which, |wire| wire.stall(direction));
    }

    /// Resumes delivery on all stalled connections. Planned stalls that have not occurred yet still will.
    pub fn resume(&self) {
        self.each(&Which::all(), Wire::resume);
    }

    /// Removes all planned faults and stalls, also from existing connections. Connections that were cut stay cut.
    pub fn heal(&self) {
        self.faults(Faults::new());
        self.each(&Which::all(), Wire::heal);
    }

    fn each(&self, which: &Which, act: impl Fn(&Wire)) {
        let wires: Vec<_> = self.shared.state().wires.iter().filter_map(Weak::upgrade).collect();
        wires.iter().filter(|wire| which.means(&wire.name)).for_each(|wire| act(wire));
    }
}

impl Debug for Network {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Network").field("seed", &self.seed()).finish_non_exhaustive()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics with the network's state in hand")
    }
}

/// A port of a network, to listen on and to connect to.
#[derive(Clone)]
pub struct Port {
    network: Network,
    name: Arc<str>,
}

impl Port {
    /// Returns the port's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Connects to the port's listener.
    pub(super) fn connect(&self) -> io::Result<End> {
        let network = &self.network.shared;
        let mut state = network.state();
        let state = &mut *state;
        let port =
            state.ports.get_mut(&self.name).and_then(|port| Some((&mut port.connections, port.listening.as_ref()?)));
        let Some((of_port, queue)) = port else { return Err(io::ErrorKind::ConnectionRefused.into()) };
        let name = Name { port: Arc::clone(&self.name), of_network: state.connections, of_port: *of_port };
        state.connections += 1;
        *of_port += 1;
        let mut random = Seeded::new(network.seed, name.of_network);
        let Some(troubles) = state.faults.of(&name, &mut random) else {
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        let [near, far] = Wire::connect(name, network.capacity, &troubles, random);
        queue.push(far)?;
        state.wires.retain(|wire| wire.strong_count() > 0);
        state.wires.push(Arc::downgrade(near.wire()));
        Ok(near)
    }

    /// Listens on the port.
    pub(super) fn listen(&self) -> io::Result<Acceptor> {
        let queue = Arc::new(Queue::default());
        let mut state = self.network.shared.state();
        let port = state.ports.entry(Arc::clone(&self.name)).or_default();
        if port.listening.is_some() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        port.listening = Some(Arc::clone(&queue));
        Ok(Acceptor { queue, port: self.clone() })
    }
}

impl PartialEq for Port {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.network.shared, &other.network.shared) && self.name == other.name
    }
}

impl Eq for Port {}

impl Display for Port {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SIMULATED}{}", self.name)
    }
}

impl Debug for Port {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Port({self})")
    }
}

/// Connections that wait to be accepted.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<End>,
    stopped: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().expect("nothing panics with the queue in hand")
    }

    fn push(&self, end: End) -> io::Result<()> {
        let mut state = self.state();
        if state.stopped || state.waiting.len() >= BACKLOG {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        state.waiting.push_back(end);
        self.changed.notify_one();
        Ok(())
    }
}

/// The listener of a port.
#[derive(Debug)]
pub(super) struct Acceptor {
    queue: Arc<Queue>,
    port: Port,
}

impl Acceptor {
    pub(super) fn port(&self) -> &Port {
        &self.port
    }

    /// Waits for a connection. Fails once the listener has been stopped.
    pub(super) fn accept(&self) -> io::Result<End> {
        let mut state = self.queue.state();
        loop {
            if state.stopped {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            if let Some(end) = state.waiting.pop_front() {
                return Ok(end);
            }
            state = self.queue.changed.wait(state).expect("nothing panics with the queue in hand");
        }
    }

    /// Frees the port, wakes the thread that waits for connections, and resets connections that were not accepted.
    pub(super) fn stop(&self) {
        let mut network = self.port.network.shared.state();
        if let Some(port) = network.ports.get_mut(&self.port.name)
            && port.listening.as_ref().is_some_and(|queue| Arc::ptr_eq(queue, &self.queue))
        {
            port.listening = None;
        }
        drop(network);
        let mut state = self.queue.state();
        state.stopped = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.queue.changed.notify_all();
        waiting.iter().for_each(|end| end.wire().cut());
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop();
    }
}
