//! Chooses the source that may begin a migration here: the first that sends an acceptable hello in time.
//!
//! A thread of its own waits for each hello, so that a stranger who connects and sends nothing delays no source. The number of such
//! pending handshakes is bounded.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sterna_wire::control::{ControlMessage, ControlReader, Hello, Machine, Mode, Welcome};
use sterna_wire::description::Description;
use sterna_wire::handshake::{Refusal, choose};
use sterna_wire::header::{ChannelHeader, ChannelKind};
use sterna_wire::limits::{HANDSHAKE_TIME, MAX_CONTENT};
use sterna_wire::reason::Reason;

use super::acceptor::UNDER_WAY;
use super::{DESCRIPTION, DRY_RUN, Features, Session, program};
use crate::cancel::Cancel;
use crate::control_link::{receive_message, send_message};
use crate::hand_over::{NO_THREAD, spawn_with};
use crate::migration::DEVICE_STATE;
use crate::transport::{
    Closer, Connection, Incoming, Reader, RefusedConnections, TransportError, Writer, accept_channel, postpone_channel,
    refuse_channel,
};

/// Maximum number of connections that have not sent their hello yet.
pub(super) const MAX_PENDING: usize = 32;
/// Maximum number of reasons in the answer to a dry run.
pub(super) const MAX_REFUSALS: usize = 64;
/// How often the destination looks for new connections while handshakes are pending.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// How often it looks for connections that were refused, otherwise. So often they are reported at most.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// The connections that have not sent their hello yet, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct PendingHandshakes(Mutex<PendingState>);

#[derive(Debug, Default)]
struct PendingState {
    next: u64,
    cancelled: bool,
    closers: BTreeMap<u64, Closer>,
}

/// One of the pending handshakes; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct PendingHandshake {
    number: u64,
    all: Arc<PendingHandshakes>,
}

impl PendingHandshakes {
    fn state(&self) -> MutexGuard<'_, PendingState> {
        self.0.lock().expect("closing does not panic")
    }

    pub(super) fn add(self: &Arc<Self>, closer: Closer) -> PendingHandshake {
        let mut state = self.state();
        if state.cancelled {
            closer.close();
        }
        let number = state.next;
        state.next += 1;
        state.closers.insert(number, closer);
        PendingHandshake { number, all: Arc::clone(self) }
    }

    pub(super) fn close_oldest(&self) {
        // The entry stays until its thread has noticed.
        if let Some(oldest) = self.state().closers.first_entry() {
            oldest.get().close();
        }
    }

    /// Closes the oldest connections until at most `max` handshakes are pending.
    pub(super) fn close_beyond(&self, max: usize) {
        let mut state = self.state();
        while state.closers.len() > max
            && let Some((_, oldest)) = state.closers.pop_first()
        {
            oldest.close();
        }
    }

    pub(super) fn close_all(&self) {
        let mut state = self.state();
        state.cancelled = true;
        state.closers.values().for_each(Closer::close);
    }
}

impl Drop for PendingHandshake {
    fn drop(&mut self) {
        self.all.state().closers.remove(&self.number);
    }
}

/// A migration that a source has begun. The driver sends the welcome when it is ready for channels.
#[derive(Debug)]
pub struct AcceptedSource {
    /// What was agreed on.
    pub session: Session,
    /// How the source's virtual machine is driven.
    pub mode: Mode,
    /// The source's description of the virtual machine.
    pub machine: Machine,
    /// The source's address and certificate.
    pub peer: String,
    /// The sending half of the control channel.
    pub writer: Writer,
    /// The receiving half of the control channel.
    pub reader: Reader,
    /// Ends the control channel from another thread.
    pub closer: Closer,
    /// What has arrived on the control channel after the hello.
    pub messages: ControlReader,
    /// The answer to be sent.
    pub welcome: Welcome,
}

/// Which migrations a destination accepts.
pub struct Handshake<'a> {
    /// How the virtual machine here may be driven, and for each mode this side's capabilities beyond the protocol's basis.
    pub takes: &'a [(Mode, Features<'a>)],
    /// Returns further reasons to refuse a source. The source receives the first; a source that makes a dry run receives all.
    pub refusals: &'a (dyn Fn(&Hello) -> Vec<String> + Sync),
    /// Describes the machine here to sources that ask for it; none where the capabilities do not have [`DESCRIPTION`].
    pub describe: Option<Describe<'a>>,
}

/// Describes a destination's machine, or fails with the reason.
pub type Describe<'a> = &'a (dyn Fn() -> Result<Description, String> + Sync);

/// What a source asks for in its hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceRequest {
    /// A connection, which was refused before anything could be asked for.
    Connection,
    /// A migration.
    Migration,
    /// Whether a migration would begin.
    DryRun,
    /// The destination's machine.
    Description,
}

/// A source with which no migration begins.
#[derive(Debug)]
pub struct Declined {
    /// What the source asked for.
    pub request: SourceRequest,
    /// Which source, and the reason or the answer.
    pub reason: String,
}

impl Declined {
    fn of_connections(refused: RefusedConnections) -> Vec<Self> {
        let RefusedConnections { first, more } = refused;
        let more = (more > 0).then(|| format!("{more} more in the last second"));
        let reasons = first.iter().map(TransportError::to_string).chain(more);
        reasons.map(|reason| Self { request: SourceRequest::Connection, reason }).collect()
    }

    fn refused(reason: impl Into<String>) -> Self {
        Self { request: SourceRequest::Migration, reason: reason.into() }
    }
}

/// For the log: a refusal, a dry run, or a description.
impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answer = match self.request {
            SourceRequest::Connection => "turned away",
            SourceRequest::Migration => "refused",
            SourceRequest::DryRun => "dry run",
            SourceRequest::Description => "described",
        };
        write!(f, "{answer}: {}", self.reason)
    }
}

/// Returns whether a source requires a capability.
fn requires(hello: &Hello, capability: &str) -> bool {
    hello.capabilities.required.iter().any(|feature| feature == capability)
}

/// Returns whether a source only asks whether a migration would begin.
pub fn is_dry_run(hello: &Hello) -> bool {
    requires(hello, DRY_RUN)
}

impl Handshake<'_> {
    /// Waits for the first migration that a source begins here, and calls `declined` for each source with which none begins.
    /// Returns none once it is cancelled, which also ends the listening.
    pub fn first(&self, incoming: &Incoming, cancel: &Cancel, declined: impl Fn(&Declined)) -> Option<AcceptedSource> {
        let pending = Arc::new(PendingHandshakes::default());
        // Only until a hello has been accepted: later the driver decides how a cancellation ends, and the source must
        // be able to reconnect.
        let (interrupted, stop) = (Arc::clone(&pending), incoming.stop_handle());
        let interrupting = cancel.on_cancel(move || {
            interrupted.close_all();
            stop.stop();
        });
        std::thread::scope(|scope| {
            let (accepted, sessions) = channel::<Result<AcceptedSource, Declined>>();
            let mut waiting = 0;
            let mut look_at = Instant::now();
            let first = loop {
                if look_at <= Instant::now() {
                    look_at = Instant::now() + REFUSED_PAUSE;
                    Declined::of_connections(incoming.refused()).iter().for_each(&declined);
                }
                let arrived = if waiting == 0 {
                    incoming.next_within(REFUSED_PAUSE)
                } else {
                    match sessions.recv_timeout(LOOK_PAUSE) {
                        Ok(Ok(first)) => break Some(first),
                        Ok(Err(source)) => {
                            waiting -= 1;
                            declined(&source);
                        }
                        Err(_) => {}
                    }
                    incoming.next_within(Duration::ZERO)
                };
                let (connection, header) = match arrived {
                    Ok(arrived) => arrived,
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => break None,
                };
                let mut first = None;
                while waiting == MAX_PENDING && first.is_none() {
                    // A source sends its hello at once, so the connection that has been silent for longest makes room.
                    pending.close_oldest();
                    waiting -= 1;
                    match sessions.recv().expect("this function itself holds a sender") {
                        Ok(accepted) => first = Some(accepted),
                        Err(source) => declined(&source),
                    }
                }
                if first.is_some() {
                    refuse_channel(connection, UNDER_WAY);
                    break first;
                }
                let handshake = pending.add(connection.closer());
                let accepted = accepted.clone();
                let accept = move |connection| {
                    if let Err(unsent) = accepted.send(self.accept(connection, &header, handshake)) {
                        unsent.0.into_iter().for_each(AcceptedSource::too_late);
                    }
                };
                match spawn_with(scope, "hello", connection, accept) {
                    Ok(()) => waiting += 1,
                    Err((error, connection)) => {
                        // The connection that has been silent for longest leaves its thread to the next attempt.
                        pending.close_oldest();
                        let reason = format!("{}: no thread for the connection: {error}", connection.peer());
                        postpone_channel(connection, NO_THREAD);
                        declined(&Declined::refused(reason));
                    }
                }
            };
            drop(interrupting);
            pending.close_all();
            sessions.try_iter().flatten().for_each(AcceptedSource::too_late);
            first
        })
    }

    /// Waits for a control channel's hello and accepts or refuses it, or answers a dry run. The source has been sent the reason or the
    /// answer; the error is for the log.
    pub(super) fn accept(
        &self,
        connection: Connection,
        header: &ChannelHeader,
        handshake: PendingHandshake,
    ) -> Result<AcceptedSource, Declined> {
        let peer = connection.peer();
        let refused = |reason: &dyn fmt::Display| Declined::refused(format!("{peer}: {reason}"));
        if header.kind != ChannelKind::Control || header.incarnation != 1 {
            let reason = "no migration with this id is under way here";
            refuse_channel(connection, reason);
            return Err(refused(&reason));
        }
        let exporter = connection.exporter().to_vec();
        let closer = connection.closer();
        let (mut writer, mut reader) =
            accept_channel(connection).map_err(|error| Declined::refused(error.to_string()))?;
        let mut messages = ControlReader::default();
        let first = receive_message(&mut reader, &mut messages, Instant::now() + HANDSHAKE_TIME);
        drop(handshake);
        let hello = match first {
            Ok(ControlMessage::Hello(hello)) => *hello,
            Ok(_) => return Err(refused(&"the first message is no hello")),
            Err(error) => return Err(refused(&error)),
        };
        let same_mode = self.takes.iter().find(|(mode, _)| *mode == hello.mode);
        let (_, features) = same_mode.unwrap_or(&self.takes[0]);
        let chosen = choose(&features.capabilities(MAX_CONTENT), header, &exporter, &hello);
        if let (true, Ok(_), Some(_), Some(describe)) =
            (requires(&hello, DESCRIPTION), &chosen, same_mode, self.describe)
        {
            // Sending fails where the peer is gone, which needs no answer.
            return Err(match describe() {
                Ok(description) => {
                    let _ = send_message(&mut writer, &ControlMessage::Described(description));
                    Declined { request: SourceRequest::Description, reason: format!("{peer}; nothing was begun") }
                }
                Err(reason) => {
                    let declined = refused(&reason);
                    let _ = send_message(&mut writer, &ControlMessage::Refused(Reason::other(reason)));
                    declined
                }
            });
        }
        let mut objections: Vec<String> = Vec::new();
        objections.extend(same_mode.is_none().then(|| wrong_mode(hello.mode, self.takes[0].0)));
        // A reason in the destination's own words explains more than the name of a capability.
        objections.extend((self.refusals)(&hello));
        // In another mode other capabilities are required.
        objections.extend(same_mode.and(chosen.as_ref().err()).map(ToString::to_string));
        let knows_dry_runs = features.offered.contains(&DRY_RUN);
        let is_itself = !matches!(chosen, Err(Refusal::Key | Refusal::Proof));
        objections.truncate(MAX_REFUSALS);
        if is_dry_run(&hello) && knows_dry_runs && is_itself {
            let answer = match objections.len() {
                0 => "a migration would begin".to_owned(),
                _ => format!("a migration would be refused: {}", objections.join("; ")),
            };
            // Fails where the peer is gone, which needs no answer.
            let _ = send_message(&mut writer, &ControlMessage::Checked { refusals: objections });
            return Err(Declined {
                request: SourceRequest::DryRun,
                reason: format!("{peer}: {answer}; nothing was begun"),
            });
        }
        let (key, chosen) = match (objections.is_empty(), chosen) {
            (true, Ok(chosen)) => chosen,
            _ => {
                let reason = objections.swap_remove(0);
                let declined = refused(&reason);
                // Fails where the peer is gone, which needs no answer.
                let _ = send_message(&mut writer, &ControlMessage::Refused(Reason::other(reason)));
                return Err(declined);
            }
        };
        let knows_devices = chosen.features.iter().any(|name| name == DEVICE_STATE);
        let session = Session {
            id: header.id,
            key,
            incarnation: 1,
            channels: hello.channels,
            device_channels: if knows_devices { hello.machine.device_channels.own() } else { 0 },
            packet_size: chosen.packet_size as usize,
            features: chosen.features.clone(),
            round_trip: Duration::ZERO,
        };
        let welcome = Welcome { program: program(), chosen };
        Ok(AcceptedSource {
            session,
            mode: hello.mode,
            machine: hello.machine,
            peer,
            writer,
            reader,
            closer,
            messages,
            welcome,
        })
    }
}

impl AcceptedSource {
    /// Refuses this source, because another one was faster.
    fn too_late(mut self) {
        // Fails where the source is gone, which needs no answer.
        let _ = send_message(&mut self.writer, &ControlMessage::Refused(Reason::other(UNDER_WAY)));
    }
}

/// Returns the refusal of a source whose mode `theirs` differs from the destination's mode `ours`.
fn wrong_mode(theirs: Mode, ours: Mode) -> String {
    let words = |mode| match mode {
        Mode::Owner => ("owns a QEMU", "`sterna send` and `sterna receive`"),
        Mode::Direct => ("moves a QEMU's memory from outside", "`sterna send` and `sterna receive` of one version"),
        Mode::Proxy => ("is a proxy for a QEMU", "`sterna proxy send` and `sterna proxy receive`"),
        Mode::Embedded => ("is a monitor with Sterna in it", "two monitors of the same kind"),
    };
    let ((source, _), (destination, both)) = (words(theirs), words(ours));
    format!("the source {source}, the destination {destination}: use the same on both sides, here {both}")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use sterna_test_kit::threads::no_more_threads;
    use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};

    use sterna_codec::Encoding;

    use super::*;
    use crate::session::{Offer, describe};
    use crate::transport::{Limits, Listener, Security};

    const FEATURES: Features<'static> = Features { offered: &[], required: &[] };

    #[test]
    fn a_source_is_accepted_however_many_silent_connections_there_are() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_address().to_string();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let cancel = Cancel::new();
        let waiting = std::thread::spawn({
            let cancel = cancel.clone();
            move || {
                let handshake =
                    Handshake { takes: &[(Mode::Owner, FEATURES)], refusals: &|_| Vec::new(), describe: None };
                handshake.first(&incoming, &cancel, |_| {})
            }
        });
        let (id, key) = (MigrationId::from_bytes([1; 16]), MigrationKey::from_bytes([2; 32]));
        let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"" };
        let header = ChannelHeader::new(&key, &subject).encode();
        let connect = || {
            let mut stream = TcpStream::connect(&to).unwrap();
            stream.set_read_timeout(Some(HANDSHAKE_TIME)).unwrap();
            stream.write_all(&header).unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            stream
        };
        let mut silent: Vec<_> = (0..2 * MAX_PENDING).map(|_| connect()).collect();
        // The oldest were closed to make room, before the time for a hello was over.
        let mut rest = Vec::new();
        silent[0].read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"");

        let hello = ControlMessage::Hello(Box::new(Hello {
            program: "a source".into(),
            key: key.to_hex(),
            mode: Mode::Owner,
            channels: 1,
            capabilities: FEATURES.capabilities(MAX_CONTENT),
            machine: Machine::default(),
        }));
        connect().write_all(&hello.encode()).unwrap();
        let accepted = waiting.join().unwrap().expect("the source is accepted");
        assert_eq!(accepted.session.id, id);
    }

    #[test]
    fn where_there_is_no_thread_a_connection_is_asked_to_come_again_and_listening_goes_on() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_address().to_string();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let cancel = Cancel::new();
        let waiting = std::thread::spawn({
            let cancel = cancel.clone();
            move || {
                no_more_threads();
                let handshake =
                    Handshake { takes: &[(Mode::Owner, FEATURES)], refusals: &|_| Vec::new(), describe: None };
                let declined = Mutex::new(Vec::new());
                let first =
                    handshake.first(&incoming, &cancel, |source| declined.lock().unwrap().push(source.to_string()));
                (first.is_some(), declined.into_inner().unwrap())
            }
        });
        let (id, key) = (MigrationId::from_bytes([1; 16]), MigrationKey::from_bytes([2; 32]));
        let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"" };
        let header = ChannelHeader::new(&key, &subject).encode();
        for _ in 0..3 {
            let mut stream = TcpStream::connect(&to).unwrap();
            stream.set_read_timeout(Some(HANDSHAKE_TIME)).unwrap();
            stream.write_all(&header).unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            // A source dials again after this answer.
            assert_eq!((answer[..2].to_vec(), &answer[4..]), (vec![1, 1], NO_THREAD.as_bytes()));
        }
        cancel.cancel();
        let (accepted, declined) = waiting.join().unwrap();
        assert!(!accepted && declined.len() == 3, "{declined:?}");
        assert!(declined.iter().all(|line| line.contains("no thread for the connection")), "{declined:?}");
    }

    #[test]
    fn a_source_that_asks_for_the_machine_gets_it_or_the_reason_and_listening_goes_on() {
        let asks = Features { offered: &[DESCRIPTION], required: &[DESCRIPTION] };
        let knows = Features { offered: &[DESCRIPTION], required: &[] };
        let fact = |name: &str| Description {
            families: ["uuid".to_owned()].into(),
            facts: [(name.to_owned(), "1".to_owned())].into(),
        };
        // What the destination answers, and what the source gets.
        let cases: [(Features<'static>, Result<Description, String>, &str); 4] = [
            (knows, Ok(fact("uuid")), ""),
            (knows, Err("QEMU does not answer".into()), "refuses: QEMU does not answer"),
            (knows, Ok(fact(&"n".repeat(5000))), "a name of 5000 bytes"),
            (FEATURES, Ok(fact("uuid")), "\"description-1\", which the destination does not have"),
        ];
        for (features, answer, expected) in cases {
            let listener = Listener::bind("127.0.0.1:0").unwrap();
            let to = listener.local_address();
            let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
            let cancel = Cancel::new();
            let (asked, declined) = std::thread::scope(|scope| {
                let (answer, cancel) = (&answer, &cancel);
                let waiting = scope.spawn(move || {
                    let declined = Mutex::new(Vec::new());
                    let describe = || answer.clone();
                    let takes = [(Mode::Owner, features)];
                    let handshake = Handshake { takes: &takes, refusals: &|_| Vec::new(), describe: Some(&describe) };
                    let first =
                        handshake.first(&incoming, cancel, |source| declined.lock().unwrap().push(source.request));
                    assert!(first.is_none(), "cancelled");
                    declined.into_inner().unwrap()
                });
                let offer = Offer {
                    to: &to,
                    security: &Security::Insecure,
                    channels: 1,
                    packet_size: MAX_CONTENT,
                    machine: Machine::default(),
                    mode: Mode::Owner,
                    features: asks,
                    encoding: Encoding::default(),
                    patience: Duration::ZERO,
                };
                // Twice: the first one did not end the listening.
                let asked = [(); 2].map(|()| describe(&offer, &Cancel::new()).map_err(|error| error.to_string()));
                cancel.cancel();
                (asked, waiting.join().unwrap())
            });
            assert_eq!(declined.len(), 2);
            for asked in asked {
                match asked {
                    Ok(description) => assert_eq!((Ok(description), ""), (answer.clone(), expected)),
                    Err(error) => assert!(!expected.is_empty() && error.contains(expected), "{error}"),
                }
            }
        }
    }

    #[test]
    fn a_source_of_another_mode_is_refused_with_both_modes_named() {
        let words = wrong_mode(Mode::Proxy, Mode::Owner);
        assert!(words.contains("the source is a proxy") && words.contains("`sterna receive`"), "{words}");
    }

    #[test]
    fn cancelling_ends_the_wait_for_a_hello() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_address().to_string();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let mut stream = TcpStream::connect(&to).unwrap();
        let key = MigrationKey::from_bytes([2; 32]);
        let id = MigrationId::from_bytes([1; 16]);
        let subject = ProofSubject { id, kind: ChannelKind::Control, index: 0, incarnation: 1, exporter: b"" };
        stream.write_all(&ChannelHeader::new(&key, &subject).encode()).unwrap();
        let (connection, _) = incoming.next().unwrap();
        let pending = Arc::new(PendingHandshakes::default());
        let handshake = pending.add(connection.closer());
        pending.close_all();
        stream.set_read_timeout(Some(HANDSHAKE_TIME)).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
        drop(handshake);
        assert!(pending.state().closers.is_empty());
    }
}
