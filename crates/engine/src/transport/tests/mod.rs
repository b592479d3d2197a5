//! Both ends of real connections, each in its own thread: over TCP's loopback interface, Unix sockets, and the
//! simulated network, which splits reads into random pieces.

mod certificates;
mod kinds;
mod session;
mod turned_away;

use std::time::{Duration, Instant};
use std::{io, thread};

use sterna_test_kit::random::announced_seed;
use sterna_wire::header::{ChannelHeader, ChannelKind};
use sterna_wire::identity::{MigrationId, MigrationKey};

use self::certificates::Site;
use super::listener::Bound;
use super::simulated::Network;
use super::socket::{Sending, Wait};
use super::*;

const KEY: MigrationKey = MigrationKey::from_bytes([5; 32]);
const ID: MigrationId = MigrationId::from_bytes([6; 16]);
/// Long enough that a correct test never reaches it, short enough that a hanging one ends.
const PATIENCE: Duration = Duration::from_secs(100);

/// The kind of socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Tcp,
    Unix,
    Simulated,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Tcp, Self::Unix, Self::Simulated];

    /// Returns an address of this kind to listen on, and the directory that it needs, if any.
    fn address(self) -> (Address, Option<tempfile::TempDir>) {
        match self {
            Self::Tcp => ("127.0.0.1:0".into(), None),
            Self::Unix => {
                let dir = tempfile::tempdir().unwrap();
                (Address::Unix(dir.path().join("in")), Some(dir))
            }
            Self::Simulated => (Network::new(announced_seed()).port("localhost").into(), None),
        }
    }
}

/// Returns the address to connect to: with the name in the certificates.
fn by_name(address: &Address) -> Address {
    match address {
        Address::Tcp(address) => address.replace("127.0.0.1", "localhost").into(),
        other => other.clone(),
    }
}

/// A kind of transport, and the security of both sides.
struct Setup {
    kind: Kind,
    source: Security,
    destination: Security,
}

/// Returns all kinds without TLS, and those that have names with TLS.
fn setups() -> Vec<Setup> {
    let site = Site::new();
    let plain = Kind::ALL.map(|kind| Setup { kind, source: Security::Insecure, destination: Security::Insecure });
    let named = [Kind::Tcp, Kind::Simulated];
    let tls = named.map(|kind| Setup { kind, source: site.client(), destination: site.server("source.example") });
    let secured = |setup: &Setup| if matches!(setup.source, Security::Insecure) { "plain" } else { "TLS" };
    plain.into_iter().chain(tls).inspect(|setup| println!("{:?}, {}", setup.kind, secured(setup))).collect()
}

/// A listening socket on which the test accepts each connection itself.
struct ManualListener {
    bound: Bound,
    to: Address,
    _dir: Option<tempfile::TempDir>,
}

impl ManualListener {
    fn open(kind: Kind) -> Self {
        let (address, dir) = kind.address();
        let bound = Bound::bind(&address).unwrap();
        let to = by_name(&bound.address().unwrap());
        Self { bound, to, _dir: dir }
    }

    /// Connects a socket that sends nothing by itself.
    fn connect_raw(&self) -> Socket {
        connect_raw(&self.to)
    }
}

fn connect_raw(to: &Address) -> Socket {
    dial::dial(to, PATIENCE).unwrap()
}

fn send_raw(socket: &Socket, bytes: &[u8]) {
    socket.send_all(&mut [io::IoSlice::new(bytes)], Sending::Waits).unwrap();
}

/// Reads until the end, which may be a reset.
fn hear(socket: &Socket) -> Vec<u8> {
    let deadline = Instant::now() + PATIENCE;
    let (mut heard, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match socket.read((&mut piece[..]).into(), Wait::Until(deadline), 1) {
            Ok(count @ 1..) => heard.extend(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => panic!("the connection does not end"),
            Ok(0) | Err(_) => return heard,
        }
    }
}

type Opened = Result<(Writer, Reader, Duration), TransportError>;
type Received = Result<(Connection, ChannelHeader), TransportError>;

/// Accepts one connection and reads its header.
fn receive_one(bound: &Bound, security: &Security, limits: &Limits) -> Received {
    let mut connection = Connection::accept_within(bound.accept().unwrap(), security, limits)?;
    let header = read_header(&mut connection)?;
    Ok((connection, header))
}

fn open(to: &Address, security: &Security) -> Opened {
    open_channel(Connection::connect(to, security)?, &KEY, ID, ChannelKind::Ram, 2, 1)
}

/// Runs both ends; the receiver passes its connection to `then`.
fn meet<T: Send>(setup: &Setup, then: impl FnOnce(Received) -> T + Send) -> (Opened, T) {
    let listener = ManualListener::open(setup.kind);
    meet_at(&listener, &listener.to, (&setup.source, &setup.destination), then)
}

/// Runs both ends as `meet` does, over TCP, with this name of the host.
fn meet_by_name<T: Send>(
    source: &Security,
    destination: &Security,
    host: &str,
    then: impl FnOnce(Received) -> T + Send,
) -> (Opened, T) {
    let listener = ManualListener::open(Kind::Tcp);
    let to = listener.to.to_string().replace("localhost", host).into();
    meet_at(&listener, &to, (source, destination), then)
}

fn meet_at<T: Send>(
    listener: &ManualListener,
    to: &Address,
    (source, destination): (&Security, &Security),
    then: impl FnOnce(Received) -> T + Send,
) -> (Opened, T) {
    thread::scope(|scope| {
        let receiving = scope.spawn(move || then(receive_one(&listener.bound, destination, &Limits::default())));
        let opened = open(to, source);
        (opened, receiving.join().unwrap())
    })
}

type Halves = (Writer, Reader);

/// Returns the halves of an accepted channel: the source's and the destination's.
fn channel(setup: &Setup) -> (Halves, Halves) {
    let (opened, accepted) = meet(setup, |received| accept_channel(received.unwrap().0));
    let (writer, reader, _) = opened.unwrap();
    ((writer, reader), accepted.unwrap())
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

fn text<T>(result: Result<T, TransportError>) -> String {
    result.map(drop).unwrap_err().to_string()
}
