//! A destination that accepts any number of migrations, one after the other and at the same time.
//!
//! The header of every connection names its migration. Where that migration is under way, its own [`ChannelAcceptor`] admits or refuses the
//! connection. The handshake of a new migration runs on a thread of its own, which then serves the migration to its end. So migrations
//! have nothing in common but the listener, and none can break another.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use sterna_wire::header::{ChannelHeader, ChannelKind};
use sterna_wire::identity::MigrationId;

use super::handshake::{Handshake, MAX_PENDING, PendingHandshakes};
use super::{AcceptedSource, ChannelAcceptor};
use crate::hand_over::{NO_THREAD, spawn_with};
use crate::transport::{Connection, Incoming, Stop, postpone_channel, refuse_channel};

/// Maximum number of migrations under way at once. Each costs a few threads and connections.
pub const MAX_SESSIONS: usize = 256;

/// The answer to a new migration once the destination is being stopped.
const STOPPING: &str = "this receiver is being stopped and accepts no new migrations";
/// The answer to a new migration while [`MAX_SESSIONS`] are under way.
const FULL: &str = "the maximum number of migrations is under way here; try again in a moment";

/// The migrations that are under way at a destination.
pub struct Sessions {
    state: Mutex<State>,
    pending: Arc<PendingHandshakes>,
    listening: Stop,
}

#[derive(Default)]
struct State {
    acceptors: HashMap<MigrationId, Arc<ChannelAcceptor>>,
    /// Number of [`Slot`]s in use: migrations under way, and connections whose handshake is pending.
    under_way: usize,
    stopping: bool,
}

/// One migration's entry among the sessions. Dropping it removes the entry.
#[derive(Debug)]
pub struct Entered<'a> {
    sessions: &'a Sessions,
    id: MigrationId,
}

/// One of the [`MAX_SESSIONS`] slots. Dropping it frees the slot.
struct Slot<'a>(&'a Sessions);

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("under_way", &self.state().under_way).finish_non_exhaustive()
    }
}

impl Sessions {
    /// Starts without a migration. `incoming` is where connections arrive.
    pub fn new(incoming: &Incoming) -> Self {
        Self { state: Mutex::default(), pending: Arc::default(), listening: incoming.stop_handle() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with the sessions locked")
    }

    /// Accepts no new migration from now on. Migrations under way still get their channels; [`Sessions::serve`] returns when the last of
    /// them has ended.
    pub fn stop(&self) {
        let mut state = self.state();
        state.stopping = true;
        self.pending.close_all();
        if state.under_way == 0 {
            self.listening.stop();
        }
    }

    /// Passes the channels of the acceptor's migration to `acceptor`, until the entry is dropped.
    ///
    /// # Errors
    /// A migration with the same id is under way: two sources had made their hello before either was entered. Returns the reason, for the
    /// second one.
    pub fn enter(&self, acceptor: &Arc<ChannelAcceptor>) -> Result<Entered<'_>, String> {
        let id = acceptor.session().id;
        match self.state().acceptors.entry(id) {
            Entry::Occupied(_) => Err(format!("a migration with the id {id} is under way here already")),
            Entry::Vacant(vacant) => {
                vacant.insert(Arc::clone(acceptor));
                Ok(Entered { sessions: self, id })
            }
        }
    }

    /// Accepts sources until [`Sessions::stop`], and calls `serve` for each migration, on a thread of its own. Returns when the last
    /// migration has ended. Calls `refused` with the reason for each source that is refused.
    pub fn serve(
        &self,
        incoming: &Incoming,
        handshake: &Handshake<'_>,
        refused: impl Fn(&str) + Sync,
        serve: impl Fn(AcceptedSource) + Sync,
    ) {
        std::thread::scope(|scope| {
            while let Some((connection, header)) = incoming.next() {
                let acceptor = self.state().acceptors.get(&header.id).cloned();
                if let Some(acceptor) = acceptor {
                    acceptor.admit(connection, &header);
                    continue;
                }
                let Some((connection, slot)) = self.slot(connection, &header) else { continue };
                let pending = self.pending.add(connection.closer());
                let (refused, serve) = (&refused, &serve);
                let session = move |connection| {
                    let _slot = slot;
                    match handshake.accept(connection, &header, pending) {
                        Ok(accepted) => serve(accepted),
                        Err(source) => refused(&source.reason),
                    }
                };
                if let Err((error, connection)) = spawn_with(scope, "session", connection, session) {
                    // The connection that has been silent for longest leaves its thread to the next attempt.
                    self.pending.close_oldest();
                    postpone_channel(connection, NO_THREAD);
                    refused(&format!("no thread for a connection: {error}"));
                }
            }
        });
    }

    /// Returns the connection with a slot for one more migration; none where the connection was refused.
    fn slot(&self, connection: Connection, header: &ChannelHeader) -> Option<(Connection, Slot<'_>)> {
        let mut state = self.state();
        let begins = header.kind == ChannelKind::Control && header.incarnation == 1;
        if state.stopping && begins {
            drop(state);
            refuse_channel(connection, STOPPING);
            return None;
        }
        if state.under_way >= MAX_SESSIONS {
            drop(state);
            postpone_channel(connection, FULL);
            return None;
        }
        state.under_way += 1;
        drop(state);
        // A source sends its hello at once, so the connection that has been silent for longest makes room.
        self.pending.close_beyond(MAX_PENDING - 1);
        Some((connection, Slot(self)))
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.under_way -= 1;
        if state.stopping && state.under_way == 0 {
            self.0.listening.stop();
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.sessions.state().acceptors.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use sterna_codec::Encoding;
    use sterna_wire::control::{ControlMessage, Machine, Mode};

    use super::*;
    use crate::abort::Abort;
    use crate::cancel::Cancel;
    use crate::control_link::send_message;
    use crate::receive::ChannelSink;
    use crate::session::{Features, Offer, OnConnectionEvent, SessionError, Sinks, dial};
    use crate::transport::{Address, Limits, Listener, Security};

    const FEATURES: Features<'static> = Features { offered: &[], required: &[] };

    struct Nothing;

    impl Sinks for Nothing {
        fn ram(&self, _: u16) -> ChannelSink {
            ChannelSink::new()
        }

        fn stream(&self) -> ChannelSink {
            ChannelSink::new()
        }
    }

    fn begin(to: &Address) -> Result<(crate::control_link::ControlLink, crate::session::Session), SessionError> {
        let offer = Offer {
            to,
            security: &Security::Insecure,
            channels: 1,
            packet_size: 4096,
            machine: Machine::default(),
            mode: Mode::Proxy,
            features: FEATURES,
            encoding: Encoding::default(),
            patience: Duration::ZERO,
        };
        let on_connection: OnConnectionEvent = Arc::new(|_| ());
        dial(&offer, &Cancel::new(), &on_connection)
    }

    #[test]
    fn migrations_have_their_own_channels_and_stopping_waits_for_those_under_way() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_address();
        let incoming = listener.start(Security::Insecure, Limits::default()).unwrap();
        let sessions = Sessions::new(&incoming);
        let handshake = Handshake { takes: &[(Mode::Proxy, FEATURES)], refusals: &|_| Vec::new(), describe: None };
        let (end, ended) = channel::<()>();
        let ended = Mutex::new(ended);
        // Each migration is served until the test lets one end.
        let serve = |accepted: AcceptedSource| {
            let AcceptedSource { session, mut writer, reader: _reader, welcome, .. } = accepted;
            let abort = Arc::new(Abort::default());
            let acceptor = Arc::new(ChannelAcceptor::new(session, Box::new(Nothing), &abort, None, Arc::new(|_| ())));
            let _entered = sessions.enter(&acceptor).unwrap();
            // A second source with its id neither takes its channels nor ends its entry.
            assert!(sessions.enter(&acceptor).is_err());
            acceptor.open();
            send_message(&mut writer, &ControlMessage::Welcome(welcome)).unwrap();
            ended.lock().unwrap().recv().unwrap();
            abort.finish();
            acceptor.join();
        };
        std::thread::scope(|scope| {
            let (sessions, handshake) = (&sessions, &handshake);
            let serving = scope.spawn(move || sessions.serve(&incoming, handshake, |_| (), serve));
            let (first, second) = (begin(&to).unwrap(), begin(&to).unwrap());
            let open =
                |session: &crate::session::Session| session.open_halves(&Security::Insecure, &to, ChannelKind::Ram, 0);
            let channels = (open(&first.1).unwrap(), open(&second.1).unwrap());
            let error = open(&first.1).unwrap_err().to_string();
            assert!(error.contains("RAM channel 0 exists already"), "{error}");

            sessions.stop();
            let error = begin(&to).unwrap_err().to_string();
            assert!(error.contains("is being stopped"), "{error}");
            assert!(!serving.is_finished());
            end.send(()).unwrap();
            end.send(()).unwrap();
            serving.join().unwrap();
            drop((first, second, channels));
        });
        assert!(begin(&to).is_err(), "no process listens any more");
    }
}
