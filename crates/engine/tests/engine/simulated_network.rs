//! The simulated network does what its fault plans say, and nothing else.
//!
//! Seeds are printed; `STERNA_TEST_SEED` repeats a run.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use sterna_engine::transport::simulated::{DEFAULT_CAPACITY, Direction, Faults, Network, Port, Which};
use sterna_engine::transport::{
    Connection, Incoming, Limits, Listener, Reader, Security, TransportError, Writer, accept_channel, open_channel,
};
use sterna_test_kit::random::announced_seed;
use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelKind, REPLY_PREFIX_LENGTH};
use sterna_wire::identity::{MigrationId, MigrationKey};

/// Long enough that a correct test never reaches it, short enough that a hanging one ends.
const PATIENCE: Duration = Duration::from_secs(100);
/// Long enough to see that nothing arrives.
const A_MOMENT: Duration = Duration::from_millis(20);
/// Bytes that were transferred in each direction once a channel is open.
const OPENED: [u64; 2] = [CHANNEL_HEADER_LENGTH as u64, REPLY_PREFIX_LENGTH as u64];

/// A port with a listener.
struct ListeningPort {
    port: Port,
    incoming: Incoming,
}

type Halves = (Writer, Reader);

impl ListeningPort {
    fn open(network: &Network, name: &str) -> Self {
        let port = network.port(name);
        let limits = Limits { silence: PATIENCE, ..Limits::default() };
        let incoming = Listener::bind(&port).unwrap().start(Security::Insecure, limits).unwrap();
        Self { port, incoming }
    }

    /// Returns the halves of a channel: the connecting side's and the listening side's.
    fn channel(&self) -> Result<(Halves, Halves), TransportError> {
        self.channel_within(&Limits { silence: PATIENCE, ..Limits::default() })
    }

    fn channel_within(&self, limits: &Limits) -> Result<(Halves, Halves), TransportError> {
        let connection = Connection::connect_within(&self.port, &Security::Insecure, limits)?;
        std::thread::scope(|scope| {
            let (key, id) = (MigrationKey::from_bytes([1; 32]), MigrationId::from_bytes([2; 16]));
            let opening = scope.spawn(move || open_channel(connection, &key, id, ChannelKind::Ram, 0, 1));
            let accepted = self.incoming.next_within(PATIENCE).ok().map(|(connection, _)| accept_channel(connection));
            let (writer, reader, _) = opening.join().unwrap()?;
            Ok(((writer, reader), accepted.unwrap()?))
        })
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8).collect()
}

/// Reads to the end. Returns the bytes, and the error unless the end was clean.
fn drain(reader: &mut Reader) -> (Vec<u8>, Option<ErrorKind>) {
    let mut arrived = Vec::new();
    let end = reader.read_to_end(&mut arrived).err().map(|error| error.kind());
    assert_ne!(end, Some(ErrorKind::TimedOut), "the connection does not end");
    (arrived, end)
}

/// Returns whether an end has noticed a cut: as with TCP, by a reset or by an early end.
fn is_cut((writer, reader): &mut Halves) -> bool {
    let read = drain(reader);
    assert!(read.0.is_empty(), "bytes in transit are lost");
    let reset = matches!(read.1, None | Some(ErrorKind::ConnectionReset));
    reset && matches!(writer.write_all(b"x").unwrap_err().kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

fn works((near, far): &mut (Halves, Halves)) -> bool {
    let mut byte = [0];
    near.0.write_all(b"f").unwrap();
    far.1.read_exact(&mut byte).unwrap();
    far.0.write_all(&byte).unwrap();
    near.1.read_exact(&mut byte).unwrap();
    byte == *b"f"
}

#[test]
fn a_planned_cut_comes_after_exactly_so_many_bytes_in_its_direction() {
    for direction in [Direction::Forth, Direction::Back] {
        let network = Network::new(announced_seed());
        let listening = ListeningPort::open(&network, "a");
        let after = OPENED[direction as usize] + 100_000;
        network.faults(Faults::new().cut(Which::all().number(1), direction, after));
        let mut before = listening.channel().unwrap();
        let (mut near, mut far) = listening.channel().unwrap();
        let mut later = listening.channel().unwrap();

        let content = pattern(150_000);
        let (writing, reading) = match direction {
            Direction::Forth => (&mut near, &mut far),
            Direction::Back => (&mut far, &mut near),
        };
        writing.0.write_all(&content).unwrap();
        reading.0.write_all(b"lost in transit").unwrap();
        let (arrived, _) = drain(&mut reading.1);
        assert!(arrived == content[..100_000], "{} bytes", arrived.len());
        assert!(is_cut(writing) && is_cut(reading));
        assert!(works(&mut before) && works(&mut later), "the others go on");
    }
}

#[test]
fn a_connection_cut_at_once_is_made_and_then_broken() {
    let network = Network::new(announced_seed());
    let listening = ListeningPort::open(&network, "a");
    network.faults(Faults::new().cut(Which::all(), Direction::Back, 0));
    let connection = Connection::connect(&listening.port, &Security::Insecure).unwrap();
    assert!(is_cut(&mut connection.split()));
}

#[test]
fn the_seed_determines_where_in_a_range_a_connection_is_cut() {
    let arrived = |seed: u64| {
        let network = Network::new(seed);
        let listening = ListeningPort::open(&network, "a");
        let opened = OPENED[0];
        network.faults(Faults::new().cut(Which::all(), Direction::Forth, opened + 10..opened + 100_000));
        (0..3)
            .map(|_| {
                let ((mut writer, _back), (_forth, mut reader)) = listening.channel().unwrap();
                writer.write_all(&pattern(120_000)).unwrap();
                let (arrived, _) = drain(&mut reader);
                assert!((10..100_000).contains(&arrived.len()), "{}", arrived.len());
                assert!(arrived == pattern(arrived.len()), "what arrives is a beginning");
                arrived.len()
            })
            .collect::<Vec<_>>()
    };
    let seed = announced_seed();
    let runs: Vec<_> = (0..8).map(|run| arrived(seed.wrapping_add(run))).collect();
    assert_eq!(runs[0], arrived(seed));
    assert!(runs.iter().flatten().collect::<HashSet<_>>().len() > 12, "{runs:?}");
}

#[test]
fn the_seed_determines_the_sizes_of_pieces_and_all_sizes_occur() {
    let pieces = |seed: u64| {
        let network = Network::new(seed);
        let listening = ListeningPort::open(&network, "a");
        let ((mut writer, _back), (_forth, mut reader)) = listening.channel().unwrap();
        // All of it has arrived before the first read.
        writer.write_all(&pattern(DEFAULT_CAPACITY)).unwrap();
        drop(writer);
        let (mut pieces, mut buffer) = (Vec::new(), vec![0; 4096]);
        while let count @ 1.. = reader.read(&mut buffer).unwrap() {
            pieces.push(count);
        }
        assert_eq!(pieces.iter().sum::<usize>(), DEFAULT_CAPACITY);
        pieces
    };
    let seed = announced_seed();
    let first = pieces(seed);
    assert_eq!(first, pieces(seed));
    assert_ne!(first, pieces(seed.wrapping_add(1)));
    assert!(first.iter().any(|&piece| piece <= 16) && first.iter().any(|&piece| piece > 2048), "{first:?}");
}

#[test]
fn a_refused_connection_counts_and_the_next_one_is_made() {
    let network = Network::new(announced_seed());
    let (first, second) = (ListeningPort::open(&network, "a"), ListeningPort::open(&network, "b"));
    network.faults(Faults::new().refuse(Which::to(&second.port).number(1)));
    for listening in [&first, &second, &first] {
        assert!(works(&mut listening.channel().unwrap()));
    }
    let refused = second.channel().unwrap_err();
    let TransportError::Connect { address, source } = refused else { panic!("{refused}") };
    assert_eq!((address.as_str(), source.kind()), ("simulated:b", ErrorKind::ConnectionRefused));
    assert!(works(&mut second.channel().unwrap()));
    assert_eq!(network.connections(), 5);

    // A port without a listener counts no connection.
    let nowhere = network.port("c");
    Connection::connect(&nowhere, &Security::Insecure).unwrap_err();
    assert_eq!(network.connections(), 5);
}

#[test]
fn cutting_now_breaks_connections_loses_bytes_in_transit_and_wakes_waiting_threads() {
    let network = Network::new(announced_seed());
    let (first, second) = (ListeningPort::open(&network, "a"), ListeningPort::open(&network, "b"));
    let ((mut near, mut far), mut other) = (first.channel().unwrap(), second.channel().unwrap());
    near.0.write_all(b"lost").unwrap();
    network.cut(&Which::to(&first.port));
    assert!(is_cut(&mut near) && is_cut(&mut far) && works(&mut other));

    let ((mut writer, mut waiting), _far) = first.channel().unwrap();
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || drain(&mut waiting));
        let (filled, is_full) = std::sync::mpsc::channel();
        let writing = scope.spawn(move || {
            writer.write_all(&vec![0; DEFAULT_CAPACITY]).unwrap();
            filled.send(()).unwrap();
            writer.write_all(b"x").unwrap_err()
        });
        is_full.recv_timeout(PATIENCE).unwrap();
        network.cut_all();
        assert!(reading.join().unwrap().0.is_empty());
        assert_ne!(writing.join().unwrap().kind(), ErrorKind::TimedOut);
    });
    assert!(is_cut(&mut other.0) && is_cut(&mut other.1));
    assert!(works(&mut second.channel().unwrap()), "new ones can be made");
}

#[test]
fn stalled_bytes_arrive_after_resume_and_the_sender_waits_for_room() {
    let capacity = 5000;
    let network = Network::with_capacity(announced_seed(), capacity);
    let listening = ListeningPort::open(&network, "a");
    network.faults(Faults::new().stall(Which::all(), Direction::Forth, OPENED[0] + 1000));
    let ((mut writer, mut back), (mut forth, mut reader)) = listening.channel().unwrap();
    let content = pattern(20_000);
    std::thread::scope(|scope| {
        let (progress, written) = std::sync::mpsc::channel();
        let content = &content;
        scope.spawn(move || {
            for piece in content.chunks(1000) {
                writer.write_all(piece).unwrap();
                // Checked only while the direction is stalled.
                let _ = progress.send(piece.len());
            }
        });
        let mut arrived = vec![0; 1000];
        reader.read_exact(&mut arrived).unwrap();
        assert!(arrived == content[..1000]);
        let room = (0..6).map(|_| written.recv_timeout(PATIENCE).unwrap()).sum::<usize>();
        assert_eq!(room, capacity + 1000);
        reader.set_timeout(Some(A_MOMENT)).unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(written.try_recv().is_err(), "there is no room for more");
        forth.write_all(b"the other direction").unwrap();
        back.read_exact(&mut [0; 19]).unwrap();

        network.resume();
        reader.set_timeout(Some(PATIENCE)).unwrap();
        let mut arrived = vec![0; 19_000];
        reader.read_exact(&mut arrived).unwrap();
        assert!(arrived == content[1000..]);
    });
}

#[test]
fn neither_an_end_nor_a_reset_passes_a_stalled_direction() {
    for unread in [false, true] {
        let network = Network::new(announced_seed());
        let listening = ListeningPort::open(&network, "a");
        let ((mut writer, mut reader), mut far) = listening.channel().unwrap();
        if unread {
            writer.write_all(b"unread").unwrap();
        }
        far.0.write_all(b"last words").unwrap();
        network.stall(&Which::all().number(0), Direction::Back);
        drop(far);
        reader.set_timeout(Some(A_MOMENT)).unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
        writer.write_all(b"into the void").unwrap();

        network.resume();
        reader.set_timeout(Some(PATIENCE)).unwrap();
        let (arrived, end) = drain(&mut reader);
        assert_eq!((arrived.as_slice(), end), (&b"last words"[..], unread.then_some(ErrorKind::ConnectionReset)));
        writer.write_all(b"x").unwrap_err();
    }
}

#[test]
fn a_stalled_peer_is_disconnected_at_the_limits_as_over_tcp() {
    let capacity = 1000;
    let network = Network::with_capacity(announced_seed(), capacity);
    let listening = ListeningPort::open(&network, "a");
    let limits = Limits { silence: A_MOMENT, ..Limits::default() };
    let ((mut writer, mut reader), _far) = listening.channel_within(&limits).unwrap();
    network.stall(&Which::all(), Direction::Forth);
    writer.write_all(&vec![0; capacity]).unwrap();
    assert_eq!(writer.write_all(b"x").unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(reader.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);

    // A listener whose answers do not arrive.
    network.faults(Faults::new().stall(Which::all(), Direction::Back, 0));
    let limits = Limits { handshake: A_MOMENT, ..Limits::default() };
    let error = listening.channel_within(&limits).unwrap_err();
    assert!(matches!(error, TransportError::TooSlow { .. }), "{error}");
}

#[test]
fn healing_removes_all_planned_faults_and_all_stalls() {
    let network = Network::new(announced_seed());
    let listening = ListeningPort::open(&network, "a");
    let plan = Faults::new().cut(Which::all(), Direction::Forth, OPENED[0] + 10).refuse(Which::all().number(1));
    network.faults(plan.stall(Which::all(), Direction::Back, OPENED[1]));
    let mut existing = listening.channel().unwrap();
    network.heal();
    for _ in 0..20 {
        assert!(works(&mut existing));
    }
    assert!(works(&mut listening.channel().unwrap()), "nothing is refused");

    let mut cut = listening.channel().unwrap();
    network.cut(&Which::all().number(2));
    network.heal();
    assert!(is_cut(&mut cut.0), "what was cut stays cut");
}

#[test]
fn networks_and_ports_are_independent() {
    let (one, two) = (Network::new(announced_seed()), Network::new(1));
    let (here, there) = (ListeningPort::open(&one, "a"), ListeningPort::open(&two, "a"));
    let (mut near, mut far) = (here.channel().unwrap(), there.channel().unwrap());
    one.cut_all();
    assert!(is_cut(&mut near.0) && works(&mut far));
    assert!(Listener::bind(&here.port).unwrap_err().to_string().contains("simulated:a"), "in use");
    drop(here);
    Listener::bind(one.port("a")).expect("free again");
}

#[test]
fn a_connection_that_was_not_accepted_is_reset_when_its_listener_is_dropped() {
    let network = Network::new(announced_seed());
    let port = network.port("a");
    let listener = Listener::bind(&port).unwrap();
    let connection = Connection::connect(&port, &Security::Insecure).unwrap();
    drop(listener);
    assert!(is_cut(&mut connection.split()));
    Connection::connect(&port, &Security::Insecure).unwrap_err();
}
