//! The destination's driver: listens for the source, where only the source knows the decision.

use std::convert::Infallible;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use sterna_wire::control::{ControlMessage, ControlReader};
use sterna_wire::header::ChannelKind;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{
    DestinationEnd, DestinationEvent, DestinationGuest, DestinationState, DestinationSwitchover,
};

use super::{CANCELLED, Means, unconnected_peer};
use crate::abort::Abort;
use crate::control_link::{ControlLink, held_back};
use crate::session::{ConnectionEvent, OnConnectionEvent, link_events};
use crate::switchover::{
    CLOSING_TIME, DestinationDriver, DestinationKernel, DestinationOutcome, DestinationSetup, Ending, Events,
    LastAnswer, Ledger, SourceLink, after, run_destination,
};
use crate::transport::{Address, Limits, Listener, Security, Stop, TransportError, accept_channel, refuse_channel};

/// What is left of the destination's monitor.
pub trait DestinationRemains {
    /// Starts the guest and returns its state.
    ///
    /// # Errors
    /// Why the guest does not run: nothing is settled.
    fn start_guest(&mut self) -> Result<DestinationGuest, Reason>;

    /// Called when this recovery has started the guest.
    fn guest_started(&mut self);

    /// Watches the first moment of the guest. Returns why it certainly does not run, if that is so.
    fn why_not_running(&mut self) -> Option<String> {
        None
    }

    /// Called when it is settled that the guest runs here.
    fn runs(&mut self) {}

    /// Ends the monitor: its copy of the guest never ran and never will.
    ///
    /// # Errors
    /// Why the copy may still be there.
    fn discard(&mut self) -> Result<(), Reason>;
}

/// Why a destination's recovery has settled nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GaveUp {
    /// It was cancelled.
    Cancelled,
    /// The source has not sent its decision in time.
    NoDecision,
    /// It cannot listen for the source.
    NoListener,
}

/// How a destination's recovery ended.
#[derive(Debug)]
pub struct RecoveredDestination {
    /// The end of the state machine; or why there is none, in words.
    pub outcome: DestinationOutcome,
    /// Why there is no end, if there is none.
    pub gave_up: Option<GaveUp>,
    /// What the outcome means.
    pub ending: Ending,
    /// The record.
    pub ledger: Ledger,
}

/// Settles a migration at the destination, from its record in `state`. `wait`: how long the source may take to send its decision; none:
/// no limit.
pub fn recover_destination(
    means: Means<'_>,
    state: DestinationState,
    guest: DestinationGuest,
    wait: Option<Duration>,
    remains: &mut dyn DestinationRemains,
) -> RecoveredDestination {
    tracing::info!(?state, ?guest, "recovering the destination");
    let Means { record, fenced_peer, address, security, tell_time, cancel, observer } = means;
    let (events, inbox) = Events::channel();
    let _cancelling = events.on_cancel(cancel, || {});
    let (machine, first) = DestinationSwitchover::recover(state, guest, fenced_peer);
    let on_connection = events.on_connection();
    let kernel = DestinationKernel::new(DestinationSetup {
        // A recovery receives no memory.
        retry: Duration::ZERO,
        machine,
        peer: unconnected_peer(),
        ledger: record.into(),
        events,
        abort: Arc::new(Abort::default()),
        cancel,
        observer,
    });
    let mut driver = Driver {
        kernel,
        address,
        security,
        remains,
        on_connection,
        listening: None,
        needs_source: !state.lacks_memory(),
        until: wait.map(after),
        tell_time,
        gave_up: None,
    };
    let outcome = run_destination(&mut driver, &inbox, first);
    let Driver { mut kernel, gave_up, .. } = driver;
    kernel.hang_up();
    RecoveredDestination { ending: kernel.ending(outcome.clone()), outcome, gave_up, ledger: kernel.ledger }
}

struct Driver<'a, 'r> {
    kernel: DestinationKernel<'a, Infallible>,
    address: Address,
    security: Result<Security, String>,
    remains: &'r mut dyn DestinationRemains,
    on_connection: OnConnectionEvent,
    listening: Option<Listening>,
    /// Whether only the source may know how this ends.
    needs_source: bool,
    /// When the source must have sent its decision.
    until: Option<Instant>,
    /// How long a lost source is waited for after the end.
    tell_time: Duration,
    gave_up: Option<GaveUp>,
}

impl<'a> DestinationDriver<'a> for Driver<'a, '_> {
    type Event = Infallible;

    fn kernel(&mut self) -> &mut DestinationKernel<'a, Infallible> {
        &mut self.kernel
    }

    fn clear_autostart(&mut self) -> Result<(), Reason> {
        Err(Reason::other("a recovery loads no guest"))
    }

    fn accept_stream(&mut self) -> Result<(), Reason> {
        Err(Reason::other("a recovery loads no guest"))
    }

    fn start_guest(&mut self) -> Result<Option<DestinationGuest>, Reason> {
        self.remains.start_guest().map(Some)
    }

    fn guest_started(&mut self) {
        self.remains.guest_started();
    }

    fn why_not_running(&mut self) -> Option<String> {
        self.remains.why_not_running()
    }

    fn discard(&mut self) -> Result<(), Reason> {
        self.remains.discard()
    }

    fn await_source(&mut self) {
        if self.listening.is_some() || self.kernel.end().is_some() {
            return;
        }
        match self.listen() {
            Ok(listening) => self.listening = Some(listening),
            Err(reason) if self.needs_source => return self.give_up(GaveUp::NoListener, reason),
            Err(_) => return,
        }
        if !self.needs_source {
            return;
        }
        self.kernel.observer.note(&format!(
            "waiting at {} for the source's decision; recover migration {} there too",
            self.address,
            self.kernel.ledger.record().migration
        ));
    }

    fn ended(&mut self, end: &DestinationEnd) {
        if *end == DestinationEnd::Running {
            self.remains.runs();
        }
        let contradicted = matches!(end, DestinationEnd::Stuck { .. } | DestinationEnd::Conflict);
        if self.listening.is_none() && !contradicted {
            // Without a listener only this side is settled: the source can be recovered later.
            self.listening = self.listen().ok();
        }
    }

    /// A source that missed `Running` dials again. It is answered for a while, so that this need not be repeated.
    fn hang_up_at(&self, answer: &LastAnswer) -> Instant {
        let LastAnswer { end, since, link, .. } = answer;
        let latest = *since + CLOSING_TIME;
        match (end, link) {
            (_, SourceLink::Connected) => latest,
            (DestinationEnd::Stuck { .. } | DestinationEnd::Conflict, _) => *since,
            _ if self.listening.is_none() => *since,
            _ => latest.min(Instant::now() + self.tell_time),
        }
    }

    fn receive(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        tracing::debug!("`{}`, about a migration that is being recovered", message.kind());
        None
    }

    fn handle(&mut self, event: Infallible) -> Option<DestinationEvent> {
        match event {}
    }

    fn idle(&mut self) -> Option<DestinationEvent> {
        if self.kernel.end().is_none() && self.until.is_some_and(|until| Instant::now() >= until) {
            let text = "no source has sent its decision in time: nothing is settled yet";
            self.give_up(GaveUp::NoDecision, Reason::new(ErrorKind::Network, text));
        }
        None
    }

    fn too_late_to_cancel(&mut self) {
        self.give_up(GaveUp::Cancelled, Reason::new(ErrorKind::Cancelled, CANCELLED));
    }
}

impl Driver<'_, '_> {
    /// Ends this run without a settled migration.
    fn give_up(&mut self, why: GaveUp, reason: Reason) {
        self.gave_up.get_or_insert(why);
        self.kernel.give_up(reason);
    }

    /// Listens at the migration's address, for control channels of this migration only.
    fn listen(&self) -> Result<Listening, Reason> {
        let failed = |error: TransportError| Reason::new(error.kind(), error);
        let security = self.security.clone().map_err(|text| Reason::new(ErrorKind::Settings, text))?;
        let listener = Listener::bind(&self.address).map_err(failed)?;
        let incoming = listener.start(security, Limits::default()).map_err(failed)?;
        let listening = Listening(incoming.stop_handle());
        let record = self.kernel.ledger.record();
        let (id, key) = (record.migration, record.key.clone());
        let on_connection = Arc::clone(&self.on_connection);
        let admit = move || {
            let mut latest = 1;
            while let Some((connection, header)) = incoming.next() {
                let wanted = header.id == id
                    && header.kind == ChannelKind::Control
                    && header.incarnation > latest
                    && header.belongs(&key, connection.exporter());
                if !wanted {
                    refuse_channel(connection, "only the source of the migration being recovered may connect here");
                    continue;
                }
                latest = header.incarnation;
                let closer = connection.closer();
                let (gated, gate) = held_back(link_events(&on_connection, header.incarnation));
                let link =
                    accept_channel(connection).map_err(|error| error.to_string()).and_then(|(writer, reader)| {
                        ControlLink::start(writer, reader, closer, ControlReader::default(), gated)
                            .map_err(|error| error.to_string())
                    });
                on_connection(match link {
                    Ok(link) => ConnectionEvent::Connected(header.incarnation, link),
                    Err(reason) => ConnectionEvent::Unreachable(reason),
                });
                drop(gate);
            }
        };
        Builder::new()
            .name("admit".into())
            .spawn(admit)
            .map_err(|error| Reason::new(ErrorKind::Network, error).within("no thread for the source's connections"))?;
        Ok(listening)
    }
}

/// A listener that stops when this is dropped.
struct Listening(Stop);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.stop();
    }
}
