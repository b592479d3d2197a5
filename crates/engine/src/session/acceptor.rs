//! The channel acceptor of one migration that has begun: it admits the migration's own channels, each once, and the source when it
//! reconnects.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};

use sterna_wire::control::ControlReader;
use sterna_wire::header::{ChannelHeader, ChannelKind};
use sterna_wire::reason::Reason;

use super::peer::link_events;
use super::{ConnectionEvent, OnConnectionEvent, Session};
use crate::abort::Abort;
use crate::control_link::{Allowance, ControlLink, held_back};
use crate::cpu_time;
use crate::receive::{ChannelSink, PacketRules, ReceiveCounters, ReceiveError, receive_packets};
use crate::transport::{Connection, accept_channel, refuse_channel};

/// The answer to a source that connects during another migration.
pub(super) const UNDER_WAY: &str = "another migration is under way here";

/// Makes the sinks of the migration's channels: called once for each channel, when it has connected.
pub trait Sinks: Send + Sync {
    /// Returns the sink of RAM channel `index`.
    fn ram(&self, index: u16) -> ChannelSink;

    /// Returns the sink of the stream channel.
    fn stream(&self) -> ChannelSink;

    /// Returns the sink of a channel that carries device state only; none where such channels are refused.
    fn devices(&self) -> Option<ChannelSink> {
        None
    }
}

/// A connection that was not admitted, and the reason.
pub type Refused = Box<(Connection, String)>;

/// Handles extra channels: those that are neither RAM channels nor the stream channel. The alarm is that of all channels of the same
/// incarnation.
pub type ExtraChannelHandler =
    Box<dyn Fn(&ChannelHeader, Connection, &Arc<Abort>) -> Result<(), Refused> + Send + Sync>;

/// Admits the channels of one migration and refuses all others.
pub struct ChannelAcceptor {
    session: Session,
    sinks: Box<dyn Sinks>,
    extra_channels: Option<ExtraChannelHandler>,
    on_connection: OnConnectionEvent,
    /// Shared by all control channels on which the source reconnects.
    allowance: Allowance,
    state: Mutex<State>,
}

struct State {
    /// Whether data channels are admitted.
    open: bool,
    /// Incarnation of the newest control channel.
    incarnation: u32,
    /// Incarnation of the data channels that are admitted.
    data_incarnation: u32,
    abort: Arc<Abort>,
    ram: Vec<Option<Arc<ReceiveCounters>>>,
    /// Pages that were placed by RAM channels of earlier incarnations.
    before: PagesPlaced,
    /// Whether the stream channel has connected.
    stream: bool,
    /// Whether each channel of device state has connected; the first has index 1.
    devices: Vec<bool>,
    /// The counters of every channel of the newest incarnation that has connected.
    counters: Vec<Arc<ReceiveCounters>>,
    /// How many packets the channels of earlier incarnations have placed.
    placed_before: u64,
    threads: Vec<JoinHandle<()>>,
}

/// Pages that RAM channels have placed; a page that was sent several times counts each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagesPlaced {
    /// Pages with content.
    pub normal: u64,
    /// Zero pages.
    pub zero: u64,
}

impl State {
    fn pages_placed(&self) -> PagesPlaced {
        self.ram.iter().flatten().fold(self.before, |sum, counters| PagesPlaced {
            normal: sum.normal + counters.normal_pages.load(Ordering::Relaxed),
            zero: sum.zero + counters.zero_pages.load(Ordering::Relaxed),
        })
    }
}

impl State {
    fn packets_placed(&self) -> u64 {
        let placed = |counters: &Arc<ReceiveCounters>| counters.placed.load(Ordering::Acquire);
        self.placed_before + self.counters.iter().map(placed).sum::<u64>()
    }
}

impl ChannelAcceptor {
    /// Makes the acceptor for the migration of `session`. It refuses data channels until [`ChannelAcceptor::open`].
    pub fn new(
        session: Session,
        sinks: Box<dyn Sinks>,
        abort: &Arc<Abort>,
        extra_channels: Option<ExtraChannelHandler>,
        on_connection: OnConnectionEvent,
    ) -> Self {
        let ram = vec![None; session.channels.into()];
        let state = State {
            open: false,
            incarnation: 1,
            data_incarnation: 1,
            abort: Arc::clone(abort),
            ram,
            before: PagesPlaced::default(),
            stream: false,
            devices: vec![false; session.device_channels.into()],
            counters: Vec::new(),
            placed_before: 0,
            threads: Vec::new(),
        };
        Self {
            session,
            sinks,
            extra_channels,
            on_connection,
            allowance: Allowance::default(),
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the channel acceptor does not panic")
    }

    /// Returns the migration.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Admits data channels from now on.
    pub fn open(&self) {
        self.state().open = true;
    }

    /// Admits no data channels from now on, and waits for the threads of those that there were, whose alarm has been raised.
    pub fn close(&self) {
        self.state().open = false;
        self.join();
    }

    /// Waits for the threads of the data channels that there were, whose alarm has been raised. From then on admits the data channels
    /// of `incarnation`, which share `abort`; the stream channel, too, if the stream begins again.
    pub fn renew(&self, incarnation: u32, abort: &Arc<Abort>, with_stream: bool) {
        self.close();
        let mut state = self.state();
        (state.before, state.placed_before) = (state.pages_placed(), state.packets_placed());
        state.counters.clear();
        state.ram.fill(None);
        state.stream &= !with_stream;
        (state.data_incarnation, state.abort, state.open) = (incarnation, Arc::clone(abort), true);
    }

    /// Returns how many packets each RAM channel has placed.
    pub fn placed(&self) -> Vec<u64> {
        let placed = |counters: &Option<Arc<ReceiveCounters>>| {
            counters.as_ref().map_or(0, |counters| counters.placed.load(Ordering::Acquire))
        };
        self.state().ram.iter().map(placed).collect()
    }

    /// Returns how many pages the RAM channels have placed so far.
    pub fn pages_placed(&self) -> PagesPlaced {
        self.state().pages_placed()
    }

    /// Returns how many packets all channels together have placed so far. The number grows as long as anything arrives.
    pub fn received(&self) -> u64 {
        self.state().packets_placed()
    }

    /// Waits for the channels' threads, whose connections have been closed.
    pub fn join(&self) {
        let threads = std::mem::take(&mut self.state().threads);
        for thread in threads {
            // A panic of the thread has been printed, and its closed connection was noticed.
            let _ = thread.join();
        }
    }

    /// Admits a connection, or refuses it and sends the reason.
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
                if let Some(connected @ false) = state.devices.get_mut(usize::from(header.index).wrapping_sub(1))
                    && let Some(sink) = self.sinks.devices() =>
            {
                *connected = true;
                self.serve(&mut state, connection, format!("device-{}", header.index), sink);
                Ok(())
            }
            ChannelKind::Opaque | ChannelKind::PostCopy if let Some(handle) = &self.extra_channels => {
                let abort = Arc::clone(&state.abort);
                drop(state);
                handle(header, connection, &abort)
            }
            kind => Err(Box::new((connection, format!("a channel for {kind} is not expected here")))),
        }
    }

    fn serve(
        &self,
        state: &mut State,
        connection: Connection,
        name: String,
        sink: ChannelSink,
    ) -> Arc<ReceiveCounters> {
        let counters = Arc::new(ReceiveCounters::default());
        state.counters.push(Arc::clone(&counters));
        match receive_thread(connection, name, sink, self.session.rules(), &state.abort, Arc::clone(&counters)) {
            Ok(thread) => state.threads.push(thread),
            Err(error) => drop(state.abort.raise(Reason::other(format_args!("no thread for a channel: {error}")))),
        }
        counters
    }

    fn admit_control(&self, connection: Connection, incarnation: u32) {
        let closer = connection.closer();
        let (events, gate) = held_back(link_events(&self.on_connection, incarnation));
        let accepted = accept_channel(connection).map_err(|error| error.to_string()).and_then(|(writer, reader)| {
            ControlLink::start_within(&self.allowance, writer, reader, closer, ControlReader::default(), events)
                .map_err(|error| error.to_string())
        });
        match accepted {
            Ok(link) => (self.on_connection)(ConnectionEvent::Connected(incarnation, link)),
            Err(error) => tracing::info!(error, "the source's new connection failed"),
        }
        drop(gate);
    }
}

/// Starts a thread that accepts the channel and receives its packets.
///
/// # Errors
/// The thread cannot be started.
pub fn receive_thread(
    connection: Connection,
    name: String,
    mut sink: ChannelSink,
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
                match receive_packets(&mut reader, Some(&mut writer), &mut sink, rules, &counters) {
                    Ok(()) => {}
                    Err(error @ ReceiveError::Connection(_)) => {
                        abort.lost(format_args!("channel {name}: {error}"));
                    }
                    Err(error) => drop(abort.raise(Reason::other(format_args!("channel {name}: {error}")))),
                }
            }
            Err(error) => drop(abort.lost(format_args!("channel {name}: {error}"))),
        }
    })
}
