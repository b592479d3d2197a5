//! Who may come in once a migration has begun: its own channels, each once, and its source when it comes back.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};

use sterna_wire::control::ControlReader;
use sterna_wire::header::{ChannelHeader, ChannelKind};

use super::peer::link_events;
use super::{PeerNews, Session, TellPeer};
use crate::abort::Abort;
use crate::control_link::{Allowance, ControlLink, held_back};
use crate::cpu_time;
use crate::receive::{PacketRules, ReceiveCounters, ReceiveError, Sink, receive_packets};
use crate::transport::{Connection, accept_channel, refuse_channel};

/// What is said to whoever comes during another migration.
pub(super) const UNDER_WAY: &str = "another migration is under way here";

/// Where the packets of the migration's channels go. Asked once for each channel, when it has come.
pub trait Sinks: Send + Sync {
    /// Of RAM channel `index`.
    fn ram(&self, index: u16) -> Box<dyn Sink>;

    /// Of the stream channel.
    fn stream(&self) -> Box<dyn Sink>;

    /// Of a channel of device state alone, where such may come.
    fn devices(&self) -> Option<Box<dyn Sink>> {
        None
    }
}

/// A connection that may not come in, and why.
pub type Refused = Box<(Connection, String)>;

/// Takes channels that are neither of RAM nor of the stream, where there are any; the alarm is that of all channels of the
/// same incarnation.
pub type OtherDoor = Box<dyn Fn(&ChannelHeader, Connection, &Arc<Abort>) -> Result<(), Refused> + Send + Sync>;

/// Matches connections to the migration.
pub struct Doorman {
    session: Session,
    sinks: Box<dyn Sinks>,
    other: Option<OtherDoor>,
    tell: TellPeer,
    /// For all control channels that the source comes back with.
    allowance: Allowance,
    state: Mutex<State>,
}

struct State {
    open: bool,
    /// Of the control channel that came last.
    incarnation: u32,
    /// Of data channels.
    data_incarnation: u32,
    abort: Arc<Abort>,
    ram: Vec<Option<Arc<ReceiveCounters>>>,
    stream: bool,
    /// By index, less one: whether it has come.
    devices: Vec<bool>,
    threads: Vec<JoinHandle<()>>,
}

impl Doorman {
    /// A doorman for the migration of `session`. Data channels are refused until [`Doorman::open`].
    pub fn new(
        session: Session,
        sinks: Box<dyn Sinks>,
        abort: &Arc<Abort>,
        other: Option<OtherDoor>,
        tell: TellPeer,
    ) -> Self {
        let ram = vec![None; session.channels.into()];
        let state = State {
            open: false,
            incarnation: 1,
            data_incarnation: 1,
            abort: Arc::clone(abort),
            ram,
            stream: false,
            devices: vec![false; session.device_channels.into()],
            threads: Vec::new(),
        };
        Self { session, sinks, other, tell, allowance: Allowance::default(), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the doorman does not panic")
    }

    /// The migration.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Data channels may come.
    pub fn open(&self) {
        self.state().open = true;
    }

    /// The data channels of an earlier incarnation are over, their alarm has been raised: waits for their threads, and from
    /// now on lets in those of `incarnation`, which share `abort`.
    pub fn renew(&self, incarnation: u32, abort: &Arc<Abort>) {
        self.state().open = false;
        self.join();
        let mut state = self.state();
        state.ram.fill(None);
        // The stream has been read to its end.
        (state.data_incarnation, state.abort, state.open) = (incarnation, Arc::clone(abort), true);
    }

    /// How many packets each RAM channel has placed.
    pub fn placed(&self) -> Vec<u64> {
        let placed = |counters: &Option<Arc<ReceiveCounters>>| {
            counters.as_ref().map_or(0, |counters| counters.placed.load(Ordering::Acquire))
        };
        self.state().ram.iter().map(placed).collect()
    }

    /// Waits for the channels' threads, whose connections have been closed.
    pub fn join(&self) {
        let threads = std::mem::take(&mut self.state().threads);
        for thread in threads {
            // A panic there has been printed, and its closed connection was noticed.
            let _ = thread.join();
        }
    }

    /// Lets a connection in, or tells it why not.
    pub fn admit(&self, connection: Connection, header: &ChannelHeader) {
        if let Err(refused) = self.try_admit(connection, header) {
            let (connection, reason) = *refused;
            tracing::info!(peer = connection.peer(), reason, "refused a connection");
            refuse_channel(connection, &reason);
        }
    }

    fn try_admit(&self, connection: Connection, header: &ChannelHeader) -> Result<(), Refused> {
        if header.id != self.session.id {
            return Err(Box::new((connection, UNDER_WAY.into())));
        }
        if !header.belongs(&self.session.key, connection.exporter()) {
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
            ChannelKind::Ram | ChannelKind::DeviceState | ChannelKind::PostCopy | ChannelKind::Opaque
                if !state.open || header.incarnation != state.data_incarnation =>
            {
                Err(Box::new((connection, "no data channels are expected now".into())))
            }
            ChannelKind::Ram => match state.ram.get(usize::from(header.index)) {
                None => Err(Box::new((connection, format!("only {} RAM channels were agreed on", state.ram.len())))),
                Some(Some(_)) => Err(Box::new((connection, format!("RAM channel {} exists already", header.index)))),
                Some(None) => {
                    let sink = self.sinks.ram(header.index);
                    let counters = self.serve(&mut state, connection, format!("ram-{}", header.index), sink);
                    state.ram[usize::from(header.index)] = Some(counters);
                    Ok(())
                }
            },
            ChannelKind::DeviceState if header.index == 0 && !state.stream => {
                state.stream = true;
                self.serve(&mut state, connection, "stream".into(), self.sinks.stream());
                Ok(())
            }
            ChannelKind::DeviceState
                if let Some(come @ false) = state.devices.get_mut(usize::from(header.index).wrapping_sub(1))
                    && let Some(sink) = self.sinks.devices() =>
            {
                *come = true;
                self.serve(&mut state, connection, format!("device-{}", header.index), sink);
                Ok(())
            }
            ChannelKind::Opaque | ChannelKind::PostCopy if let Some(door) = &self.other => {
                let abort = Arc::clone(&state.abort);
                drop(state);
                door(header, connection, &abort)
            }
            kind => Err(Box::new((connection, format!("a channel of kind {kind:?} is not expected here")))),
        }
    }

    fn serve(
        &self,
        state: &mut State,
        connection: Connection,
        name: String,
        sink: Box<dyn Sink>,
    ) -> Arc<ReceiveCounters> {
        let counters = Arc::new(ReceiveCounters::default());
        match receive_thread(connection, name, sink, self.session.rules(), &state.abort, Arc::clone(&counters)) {
            Ok(thread) => state.threads.push(thread),
            Err(error) => drop(state.abort.raise(format_args!("no thread for a channel: {error}"))),
        }
        counters
    }

    fn admit_control(&self, connection: Connection, incarnation: u32) {
        let closer = connection.closer();
        let (events, gate) = held_back(link_events(&self.tell, incarnation));
        let accepted = accept_channel(connection).map_err(|error| error.to_string()).and_then(|(writer, reader)| {
            ControlLink::start_within(&self.allowance, writer, reader, closer, ControlReader::default(), events)
                .map_err(|error| error.to_string())
        });
        match accepted {
            Ok(link) => (self.tell)(PeerNews::Connected(incarnation, link)),
            Err(error) => tracing::info!(error, "the source's new connection failed"),
        }
        drop(gate);
    }
}

/// Accepts the channel and receives its packets on a thread of their own.
///
/// # Errors
/// The system has no thread.
pub fn receive_thread(
    connection: Connection,
    name: String,
    mut sink: Box<dyn Sink>,
    rules: PacketRules,
    abort: &Arc<Abort>,
    counters: Arc<ReceiveCounters>,
) -> std::io::Result<JoinHandle<()>> {
    let closer = connection.closer();
    let closing = abort.on_end_while_held(move || closer.close());
    let abort = Arc::clone(abort);
    cpu_time::spawn(Builder::new().name(name.clone()), move || {
        let _closing = closing;
        match accept_channel(connection) {
            Ok((mut writer, mut reader)) => {
                match receive_packets(&mut reader, Some(&mut writer), &mut *sink, rules, &counters) {
                    Ok(()) => {}
                    Err(error @ ReceiveError::Connection(_)) => {
                        abort.lost(format_args!("channel {name}: {error}"));
                    }
                    Err(error) => drop(abort.raise(format_args!("channel {name}: {error}"))),
                }
            }
            Err(error) => drop(abort.lost(format_args!("channel {name}: {error}"))),
        }
    })
}
