//! Who may begin a migration here: the first source that says a hello in time and that nothing speaks against.
//!
//! Each hello is waited for on a thread of its own, so that a stranger who connects and says nothing keeps no source
//! waiting; there is room for a bounded number of them.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sterna_wire::control::{ControlMessage, ControlReader, Hello, Machine, Mode, Welcome};
use sterna_wire::handshake::choose;
use sterna_wire::header::{ChannelHeader, ChannelKind};
use sterna_wire::limits::{HANDSHAKE_TIME, MAX_CONTENT};

use super::doorman::UNDER_WAY;
use super::{Features, Session, program};
use crate::cancel::Cancel;
use crate::control_link::{hear, say};
use crate::migration::DEVICE_STATE;
use crate::transport::{Closer, Connection, Incoming, Reader, Writer, accept_channel, refuse_channel};

/// Connections whose hello is waited for at once.
pub(super) const MAX_PENDING: usize = 32;
/// How often new connections are looked for while others have not said their hello.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// The connections whose hello is waited for, by the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Greeters(Mutex<GreetersState>);

#[derive(Debug, Default)]
struct GreetersState {
    next: u64,
    cancelled: bool,
    waited_for: BTreeMap<u64, Closer>,
}

/// One of them, until this is dropped.
#[derive(Debug)]
pub(super) struct Greeter {
    number: u64,
    all: Arc<Greeters>,
}

impl Greeters {
    fn state(&self) -> MutexGuard<'_, GreetersState> {
        self.0.lock().expect("closing does not panic")
    }

    pub(super) fn add(self: &Arc<Self>, closer: Closer) -> Greeter {
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

    /// Closes the oldest connections until no more than `most` are waited for.
    pub(super) fn close_beyond(&self, most: usize) {
        let mut state = self.state();
        while state.waited_for.len() > most
            && let Some((_, oldest)) = state.waited_for.pop_first()
        {
            oldest.close();
        }
    }

    pub(super) fn close_all(&self) {
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

/// A migration that a source has begun. The driver says the welcome when it is ready for channels.
#[derive(Debug)]
pub struct Greeted {
    /// What was agreed on.
    pub session: Session,
    /// How its virtual machine is driven.
    pub mode: Mode,
    /// What it says of the virtual machine.
    pub machine: Machine,
    /// The source's address and certificate.
    pub peer: String,
    /// The control channel's halves, and what ends it.
    pub writer: Writer,
    /// See `writer`.
    pub reader: Reader,
    /// See `writer`.
    pub closer: Closer,
    /// What has arrived on the control channel after the hello.
    pub messages: ControlReader,
    /// The answer to be said.
    pub welcome: Welcome,
}

/// What a destination takes.
pub struct Greeting<'a> {
    /// How the virtual machine here may be driven, and what this side can do then beyond the protocol's basis.
    pub takes: &'a [(Mode, Features<'a>)],
    /// What else speaks against a source, in words that it is told.
    pub refusal: &'a (dyn Fn(&Hello) -> Option<String> + Sync),
}

impl Greeting<'_> {
    /// The first migration that a source begins here; none once it is cancelled, which also ends the listening. `refused` hears of the others.
    pub fn first(&self, incoming: &Incoming, cancel: &Cancel, refused: impl Fn(&str)) -> Option<Greeted> {
        let greeters = Arc::new(Greeters::default());
        // Only until a hello has been heard: later it is for the driver to say how a cancellation ends, and the source must
        // be able to come back.
        let (interrupted, stop) = (Arc::clone(&greeters), incoming.stop_handle());
        let interrupting = cancel.on_cancel(move || {
            interrupted.close_all();
            stop.stop();
        });
        std::thread::scope(|scope| {
            let (greeted, sessions) = channel::<Result<Greeted, String>>();
            let mut waited_for = 0;
            let first = loop {
                // Nobody to wait for: then without looking again and again.
                let arrived = if waited_for == 0 {
                    incoming.next().ok_or(RecvTimeoutError::Disconnected)
                } else {
                    match sessions.recv_timeout(LOOK_PAUSE) {
                        Ok(Ok(first)) => break Some(first),
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
                    Err(RecvTimeoutError::Disconnected) => break None,
                };
                let mut first = None;
                while waited_for == MAX_PENDING && first.is_none() {
                    // A source says its hello at once, so who has been silent for longest makes room.
                    greeters.close_oldest();
                    waited_for -= 1;
                    match sessions.recv().expect("this function itself holds a sender") {
                        Ok(greeted) => first = Some(greeted),
                        Err(reason) => refused(&reason),
                    }
                }
                if first.is_some() {
                    refuse_channel(connection, UNDER_WAY);
                    break first;
                }
                waited_for += 1;
                let greeter = greeters.add(connection.closer());
                let greeted = greeted.clone();
                scope.spawn(move || {
                    if let Err(unheard) = greeted.send(self.accept(connection, &header, greeter)) {
                        unheard.0.into_iter().for_each(Greeted::too_late);
                    }
                });
            };
            drop(interrupting);
            // Those that have not said their hello by now need not.
            greeters.close_all();
            sessions.try_iter().flatten().for_each(Greeted::too_late);
            first
        })
    }

    /// Takes a control channel's hello, unless something speaks against it. What is refused has been told so; the error
    /// is for the log.
    pub(super) fn accept(
        &self,
        connection: Connection,
        header: &ChannelHeader,
        greeter: Greeter,
    ) -> Result<Greeted, String> {
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
            Ok(ControlMessage::Hello(hello)) => *hello,
            Ok(_) => return Err(format!("{peer}: the first message is no hello")),
            Err(error) => return Err(format!("{peer}: {error}")),
        };
        let taken = self.takes.iter().find(|(mode, _)| *mode == hello.mode);
        let (_, features) = taken.unwrap_or(&self.takes[0]);
        let chosen = choose(&features.capabilities(MAX_CONTENT), header, &exporter, &hello);
        let objection = (taken.is_none().then(|| wrong_mode(hello.mode, self.takes[0].0)))
            // A reason in the destination's own words says more than the name of a capability.
            .or_else(|| (self.refusal)(&hello))
            .or_else(|| chosen.as_ref().err().map(ToString::to_string));
        let (key, chosen) = match (objection, chosen) {
            (None, Ok(chosen)) => chosen,
            (objection, _) => {
                let reason = objection.unwrap_or_default();
                // The peer may be gone; then nobody misses the answer.
                let _ = say(&mut writer, &ControlMessage::Refused { reason: reason.clone() });
                return Err(format!("{peer}: {reason}"));
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
        Ok(Greeted {
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

impl Greeted {
    /// Refuses a source that another one came before.
    fn too_late(mut self) {
        let reason = UNDER_WAY.to_owned();
        // It may be gone; then nobody misses the answer.
        let _ = say(&mut self.writer, &ControlMessage::Refused { reason });
    }
}

/// What speaks against a source that is driven as `theirs` at a destination that is driven as `ours`, another way.
fn wrong_mode(theirs: Mode, ours: Mode) -> String {
    let said = |mode| match mode {
        Mode::Owner => ("owns a QEMU", "`sterna send` and `sterna receive`"),
        Mode::Direct => ("moves a QEMU's memory from outside", "`sterna send` and `sterna receive` of one version"),
        Mode::Proxy => ("is a proxy for a QEMU", "`sterna proxy send` and `sterna proxy receive`"),
        Mode::Embedded => ("is a monitor with Sterna in it", "two monitors of the same kind"),
    };
    let ((source, _), (destination, both)) = (said(theirs), said(ours));
    format!("the source {source}, the destination {destination}: use the same on both sides, here {both}")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};

    use super::*;
    use crate::transport::{Limits, Listener, Security};

    const FEATURES: Features<'static> = Features { offered: &[], required: &[] };

    #[test]
    fn however_many_are_silent_a_source_is_heard_and_nothing_of_them_is_left() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_address().to_string();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let cancel = Cancel::new();
        let waiting = std::thread::spawn({
            let cancel = cancel.clone();
            move || {
                let greeting = Greeting { takes: &[(Mode::Owner, FEATURES)], refusal: &|_| None };
                greeting.first(&incoming, &cancel, |_| {})
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
        // The oldest have made room: they are at their end before the time for a hello is over.
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
        let greeted = waiting.join().unwrap().expect("the source is heard");
        assert_eq!(greeted.session.id, id);
    }

    #[test]
    fn sides_that_are_driven_differently_are_told_apart() {
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
        let greeters = Arc::new(Greeters::default());
        let greeter = greeters.add(connection.closer());
        greeters.close_all();
        stream.set_read_timeout(Some(HANDSHAKE_TIME)).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
        drop(greeter);
        assert!(greeters.state().waited_for.is_empty());
    }
}
