//! Who may come in: a control channel's hello at the beginning, then the channels of that migration and no others.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna::abort::Abort;
use sterna::control_link::{Allowance, ControlEvent, ControlLink, hear, held_back, say};
use sterna::receive::{ReceiveCounters, Sink, receive_packets};
use sterna::transport::{Closer, Connection, Incoming, Reader, Writer, accept_channel, refuse_channel};
use sterna_wire::control::{ControlMessage, ControlReader, Hello, Mode, Welcome};
use sterna_wire::handshake::choose;
use sterna_wire::header::{ChannelHeader, ChannelKind};
use sterna_wire::limits::{HANDSHAKE_TIME, MAX_CONTENT};

use super::Cancel;
use super::feeder::{Feeder, FeederNews, RamSink, StreamSink};
use super::peer::{Dialed, own_capabilities, program};

/// Connections whose hello is waited for at once.
const MOST_GREETED: usize = 32;
/// How often new connections are looked for while others have not said their hello.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// What is said to whoever comes during another migration.
const UNDER_WAY: &str = "another migration is under way here";

/// The connections whose hello is waited for, by the order of their arrival.
#[derive(Default)]
struct Greeters(Mutex<GreetersState>);

#[derive(Default)]
struct GreetersState {
    next: u64,
    cancelled: bool,
    waited_for: BTreeMap<u64, Closer>,
}

/// One of them, until this is dropped.
struct Greeter {
    number: u64,
    all: Arc<Greeters>,
}

impl Greeters {
    fn state(&self) -> MutexGuard<'_, GreetersState> {
        self.0.lock().expect("closing does not panic")
    }

    fn add(self: &Arc<Self>, closer: Closer) -> Greeter {
        let mut state = self.state();
        if state.cancelled {
            closer.close();
        }
        let number = state.next;
        state.next += 1;
        state.waited_for.insert(number, closer);
        Greeter { number, all: Arc::clone(self) }
    }

    fn close_oldest(&self) {
        // It stays until its thread has noticed.
        if let Some(oldest) = self.state().waited_for.first_entry() {
            oldest.get().close();
        }
    }

    fn close_all(&self) {
        let mut state = self.state();
        state.cancelled = true;
        state.waited_for.values().for_each(Closer::close);
    }
}

impl Drop for Greeter {
    fn drop(&mut self) {
        self.all.state().waited_for.remove(&self.number);
    }
}

/// A migration that a source has begun.
pub(super) struct Session {
    pub(super) dialed: Dialed,
    pub(super) peer: String,
    pub(super) writer: Writer,
    pub(super) reader: Reader,
    pub(super) closer: Closer,
    pub(super) messages: ControlReader,
    pub(super) welcome: Welcome,
}

impl Session {
    /// The first migration that a source begins here; none once it is cancelled. Each hello is waited for on a thread of
    /// its own, so that a stranger who connects and says nothing keeps no source waiting. `refused` hears of the others.
    pub(super) fn first(
        incoming: &Incoming,
        mode: Mode,
        cancel: &Cancel,
        refusal: impl Fn(&Hello) -> Option<String> + Send + Sync + 'static,
        refused: impl Fn(&str),
    ) -> Option<Self> {
        let refusal = Arc::new(refusal);
        let (greeted, sessions) = channel::<Result<Self, String>>();
        let greeters = Arc::new(Greeters::default());
        // Only until a hello has been heard: later it is for the driver to say how a cancellation ends.
        let interrupted = Arc::clone(&greeters);
        cancel.on_cancel(move || interrupted.close_all());
        let mut waited_for = 0;
        loop {
            // Nobody to wait for: then without looking again and again.
            let arrived = if waited_for == 0 {
                incoming.next().ok_or(RecvTimeoutError::Disconnected)
            } else {
                match sessions.recv_timeout(LOOK_PAUSE) {
                    Ok(Ok(session)) => {
                        sessions.try_iter().flatten().for_each(Self::too_late);
                        return Some(session);
                    }
                    Ok(Err(reason)) => {
                        waited_for -= 1;
                        refused(&reason);
                    }
                    Err(_) => {}
                }
                incoming.next_within(Duration::ZERO)
            };
            let (connection, header) = match arrived {
                Ok(arrived) => arrived,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return None,
            };
            while waited_for == MOST_GREETED {
                // A source says its hello at once, so who has been silent for longest makes room.
                greeters.close_oldest();
                match sessions.recv().expect("this function itself holds a sender") {
                    Ok(session) => {
                        refuse_channel(connection, UNDER_WAY);
                        sessions.try_iter().flatten().for_each(Self::too_late);
                        return Some(session);
                    }
                    Err(reason) => {
                        waited_for -= 1;
                        refused(&reason);
                    }
                }
            }
            waited_for += 1;
            let greeter = greeters.add(connection.closer());
            let (greeted, refusal) = (greeted.clone(), Arc::clone(&refusal));
            std::thread::spawn(move || {
                let session = Self::accept(connection, &header, mode, greeter, &*refusal);
                if let Err(unheard) = greeted.send(session) {
                    unheard.0.into_iter().for_each(Self::too_late);
                }
            });
        }
    }

    /// Refuses a source that another one came before.
    fn too_late(mut self) {
        let reason = UNDER_WAY.to_owned();
        // It may be gone; then nobody misses the answer.
        let _ = say(&mut self.writer, &ControlMessage::Refused { reason });
    }

    /// Takes a control channel's hello, unless `refusal` has something against it. What is refused has been told so; the
    /// error is for the log.
    fn accept(
        connection: Connection,
        header: &ChannelHeader,
        mode: Mode,
        greeter: Greeter,
        refusal: impl Fn(&Hello) -> Option<String>,
    ) -> Result<Self, String> {
        let peer = connection.peer();
        if header.kind != ChannelKind::Control || header.incarnation != 1 {
            let reason = "no migration with this id is under way here";
            refuse_channel(connection, reason);
            return Err(format!("{peer}: {reason}"));
        }
        let exporter = connection.exporter().to_vec();
        let closer = connection.closer();
        let (mut writer, mut reader) = accept_channel(connection).map_err(|error| error.to_string())?;
        let mut messages = ControlReader::default();
        let heard = hear(&mut reader, &mut messages, Instant::now() + HANDSHAKE_TIME);
        drop(greeter);
        let hello = match heard {
            Ok(ControlMessage::Hello(hello)) => hello,
            Ok(_) => return Err(format!("{peer}: the first message is no hello")),
            Err(error) => return Err(format!("{peer}: {error}")),
        };
        let wrong_mode = match (hello.mode, mode) {
            (Mode::Proxy, Mode::Owner) => {
                Some("the source is a proxy, and here a QEMU is owned: use `sterna proxy receive` here".to_owned())
            }
            (Mode::Owner, Mode::Proxy) => {
                Some("the source owns its QEMU, and here is a proxy: use `sterna receive` here".to_owned())
            }
            _ => None,
        };
        let chosen = choose(&own_capabilities(MAX_CONTENT), header, &exporter, &hello);
        let objection =
            wrong_mode.or_else(|| chosen.as_ref().err().map(ToString::to_string)).or_else(|| refusal(&hello));
        let (key, chosen) = match (objection, chosen) {
            (None, Ok(chosen)) => chosen,
            (objection, _) => {
                let reason = objection.unwrap_or_default();
                // The peer may be gone; then nobody misses the answer.
                let _ = say(&mut writer, &ControlMessage::Refused { reason: reason.clone() });
                return Err(format!("{peer}: {reason}"));
            }
        };
        let dialed = Dialed {
            id: header.id,
            key,
            incarnation: 1,
            channels: hello.channels,
            packet_size: chosen.packet_size as usize,
            round_trip: Duration::ZERO,
        };
        let welcome = Welcome { program: program(), chosen };
        Ok(Self { dialed, peer, writer, reader, closer, messages, welcome })
    }
}

/// What the doorman tells the driver.
pub(super) enum DoorNews {
    /// From the feeder, on the stream channel's thread.
    Feeder(FeederNews),
    /// The source has come back with a new control channel.
    Reconnected(u32, ControlLink),
    /// From such a control channel.
    Control(u32, ControlEvent),
}

/// A connection that may not come in, and why.
pub(super) type Refused = Box<(Connection, String)>;

/// Takes opaque channels, where there are any.
pub(super) type OpaqueDoor = Box<dyn Fn(u16, Connection) -> Result<(), Refused> + Send + Sync>;

/// Hands news to the driver.
pub(super) type Tell = Arc<dyn Fn(DoorNews) + Send + Sync>;

/// Matches connections to the migration.
pub(super) struct Doorman {
    pub(super) dialed: Dialed,
    feeder: Arc<Feeder>,
    abort: Arc<Abort>,
    opaque: Option<OpaqueDoor>,
    tell: Tell,
    /// For all control channels that the source comes back with.
    allowance: Allowance,
    state: Mutex<State>,
}

struct State {
    open: bool,
    incarnation: u32,
    ram: Vec<Option<Arc<ReceiveCounters>>>,
    stream: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Doorman {
    /// A doorman for the migration of `dialed`. Data channels are refused until [`Doorman::open`].
    pub(super) fn new(
        dialed: Dialed,
        feeder: Arc<Feeder>,
        abort: &Arc<Abort>,
        opaque: Option<OpaqueDoor>,
        tell: Tell,
    ) -> Self {
        let ram = vec![None; dialed.channels.into()];
        let state = State { open: false, incarnation: 1, ram, stream: false, threads: Vec::new() };
        Self {
            dialed,
            feeder,
            abort: Arc::clone(abort),
            opaque,
            tell,
            allowance: Allowance::default(),
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the doorman does not panic")
    }

    /// Data channels may come.
    pub(super) fn open(&self) {
        self.state().open = true;
    }

    /// How many packets each RAM channel has placed.
    pub(super) fn placed(&self) -> Vec<u64> {
        let placed = |counters: &Option<Arc<ReceiveCounters>>| {
            counters.as_ref().map_or(0, |counters| counters.placed.load(Ordering::Acquire))
        };
        self.state().ram.iter().map(placed).collect()
    }

    /// Waits for the channels' threads, whose connections have been closed.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut self.state().threads);
        for thread in threads {
            // A panic there has been printed, and its closed connection was noticed.
            let _ = thread.join();
        }
    }

    /// Lets a connection in, or tells it why not.
    pub(super) fn admit(&self, connection: Connection, header: &ChannelHeader) {
        if let Err(refused) = self.try_admit(connection, header) {
            let (connection, reason) = *refused;
            tracing::info!(peer = connection.peer(), reason, "refused a connection");
            refuse_channel(connection, &reason);
        }
    }

    fn try_admit(&self, connection: Connection, header: &ChannelHeader) -> Result<(), Refused> {
        if header.id != self.dialed.id {
            return Err(Box::new((connection, UNDER_WAY.into())));
        }
        if !header.belongs(&self.dialed.key, connection.exporter()) {
            return Err(Box::new((connection, "the channel's proof does not belong to this migration".into())));
        }
        let mut state = self.state();
        match header.kind {
            ChannelKind::Control if header.incarnation > state.incarnation => {
                state.incarnation = header.incarnation;
                drop(state);
                self.admit_control(connection, header.incarnation);
                Ok(())
            }
            ChannelKind::Ram | ChannelKind::DeviceState | ChannelKind::Opaque
                if !state.open || header.incarnation != 1 =>
            {
                Err(Box::new((connection, "no data channels are expected now".into())))
            }
            ChannelKind::Ram => match state.ram.get(usize::from(header.index)) {
                None => Err(Box::new((connection, format!("only {} RAM channels were agreed on", state.ram.len())))),
                Some(Some(_)) => Err(Box::new((connection, format!("RAM channel {} exists already", header.index)))),
                Some(None) => {
                    let sink = RamSink::new(&self.feeder, header.index);
                    let counters = self.serve(&mut state, connection, format!("ram-{}", header.index), sink);
                    state.ram[usize::from(header.index)] = Some(counters);
                    Ok(())
                }
            },
            ChannelKind::DeviceState if header.index == 0 && !state.stream => {
                state.stream = true;
                let tell = Arc::clone(&self.tell);
                let sink = StreamSink::new(&self.feeder, move |news| tell(DoorNews::Feeder(news)));
                self.serve(&mut state, connection, "stream".into(), sink);
                Ok(())
            }
            ChannelKind::Opaque if let Some(door) = &self.opaque => {
                drop(state);
                door(header.index, connection)
            }
            kind => Err(Box::new((connection, format!("a channel of kind {kind:?} is not expected here")))),
        }
    }

    fn serve(
        &self,
        state: &mut State,
        connection: Connection,
        name: String,
        sink: impl Sink + 'static,
    ) -> Arc<ReceiveCounters> {
        let counters = Arc::new(ReceiveCounters::default());
        match receive_thread(connection, name, sink, self.dialed.packet_size, &self.abort, Arc::clone(&counters)) {
            Ok(thread) => state.threads.push(thread),
            Err(error) => drop(self.abort.raise(format_args!("no thread for a channel: {error}"))),
        }
        counters
    }

    fn admit_control(&self, connection: Connection, incarnation: u32) {
        let closer = connection.closer();
        let told = Arc::clone(&self.tell);
        let (events, gate) = held_back(move |event| told(DoorNews::Control(incarnation, event)));
        let accepted = accept_channel(connection).map_err(|error| error.to_string()).and_then(|(writer, reader)| {
            ControlLink::start_within(&self.allowance, writer, reader, closer, ControlReader::default(), events)
                .map_err(|error| error.to_string())
        });
        match accepted {
            Ok(link) => (self.tell)(DoorNews::Reconnected(incarnation, link)),
            Err(error) => tracing::info!(error, "the source's new connection failed"),
        }
        drop(gate);
    }
}

/// Accepts the channel and receives its packets on a thread of their own.
pub(super) fn receive_thread(
    connection: Connection,
    name: String,
    mut sink: impl Sink + 'static,
    packet_size: usize,
    abort: &Arc<Abort>,
    counters: Arc<ReceiveCounters>,
) -> std::io::Result<JoinHandle<()>> {
    let closer = connection.closer();
    abort.on_end(move || closer.close());
    let abort = Arc::clone(abort);
    std::thread::Builder::new().name(name.clone()).spawn(move || {
        let outcome = match accept_channel(connection) {
            Ok((writer, reader)) => {
                receive_packets(reader, writer, &mut sink, packet_size, &counters).map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(reason) = outcome {
            abort.raise(format_args!("channel {name}: {reason}"));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use sterna::transport::{Limits, Listener, Security};
    use sterna_wire::control::Machine;
    use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};

    use super::*;

    #[test]
    fn however_many_are_silent_a_source_is_heard_and_nothing_of_them_is_left() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_address();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let cancel = Cancel::new();
        let waiting = std::thread::spawn({
            let cancel = cancel.clone();
            move || Session::first(&incoming, Mode::Owner, &cancel, |_| None, |_| {})
        });
        let (id, key) = (MigrationId::from_bytes([1; 16]), MigrationKey::from_bytes([2; 32]));
        let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"" };
        let header = ChannelHeader::new(&key, &subject).encode();
        let connect = || {
            let mut stream = TcpStream::connect(to).unwrap();
            stream.set_read_timeout(Some(HANDSHAKE_TIME)).unwrap();
            stream.write_all(&header).unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            stream
        };
        let mut silent: Vec<_> = (0..2 * MOST_GREETED).map(|_| connect()).collect();
        // The oldest have made room: they are at their end before the time for a hello is over.
        let mut rest = Vec::new();
        silent[0].read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"");

        let hello = ControlMessage::Hello(Hello {
            program: "a source".into(),
            key: key.to_hex(),
            mode: Mode::Owner,
            channels: 1,
            capabilities: own_capabilities(MAX_CONTENT),
            machine: Machine::default(),
        });
        connect().write_all(&hello.encode()).unwrap();
        let session = waiting.join().unwrap().expect("the source is heard");
        assert_eq!(session.dialed.id, id);
        assert_eq!(cancel.0.lock().unwrap().wakers.len(), 1, "one for all of them");
    }

    #[test]
    fn cancelling_ends_the_wait_for_a_hello() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_address();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let mut stream = TcpStream::connect(to).unwrap();
        let key = MigrationKey::from_bytes([2; 32]);
        let id = MigrationId::from_bytes([1; 16]);
        let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"" };
        stream.write_all(&ChannelHeader::new(&key, &subject).encode()).unwrap();
        let (connection, _) = incoming.next().unwrap();
        let greeters = Arc::new(Greeters::default());
        let greeter = greeters.add(connection.closer());
        greeters.close_all();
        stream.set_read_timeout(Some(HANDSHAKE_TIME)).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
        drop(greeter);
        assert!(greeters.state().waited_for.is_empty());
    }
}
