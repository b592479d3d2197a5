//! `sterna recover` at the destination: listens for the source, where only the source knows the decision.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use sterna_engine::abort::Abort;
use sterna_engine::control_link::{ControlLink, held_back};
use sterna_engine::process;
use sterna_engine::session::{ConnectionEvent, OnConnectionEvent, link_events};
use sterna_engine::switchover::{
    DestinationDriver, DestinationKernel, DestinationOutcome, DestinationSetup, SourceLink, after, run_destination,
};
use sterna_engine::transport::{Limits, Listener, Stop, accept_channel, refuse_channel};
use sterna_wire::control::{ControlMessage, ControlReader};
use sterna_wire::header::ChannelKind;
use sterna_wire::switchover::{
    DestinationEnd, DestinationEvent, DestinationGuest, DestinationState, DestinationSwitchover, Record, RecordState,
};

use super::{CANCELLED, Recovery, TELL_TIME, durable, restore_settings, security, unconnected_peer};
use crate::gateway::destination::LINGER;
use crate::gateway::qemu::{self, QUIT_TIME};
use crate::gateway::{ErrorKind, GatewayError, RecoverOptions};
use crate::qmp::Qmp;

/// Settles the migration from a record in `state`.
pub(super) fn recover(recovery: Recovery<'_>, state: DestinationState) -> Result<String, GatewayError> {
    let guest = guest_state(&recovery, state)?;
    tracing::info!(?state, ?guest, "recovering the destination");
    let Recovery { options, cancel, observer, record, qmp, events, inbox } = recovery;
    let (machine, first) = DestinationSwitchover::recover(state, guest, options.fenced_peer);
    let on_connection = events.on_connection();
    let kernel = DestinationKernel::new(DestinationSetup {
        machine,
        peer: unconnected_peer(),
        ledger: record.into(),
        events,
        abort: Arc::new(Abort::default()),
        cancel,
        observer,
    });
    let until = options.wait.map(after);
    let needs_source = !state.lacks_memory();
    let mut driver = Driver {
        kernel,
        options,
        qmp,
        on_connection,
        listening: None,
        needs_source,
        until,
        given_up: ErrorKind::Failed,
    };
    let outcome = run_destination(&mut driver, &inbox, first);
    driver.kernel.hang_up();
    match outcome {
        DestinationOutcome::Machine(end) => {
            let ledger = &driver.kernel.ledger;
            sentence(&end, ledger.record()).and_then(|text| durable(ledger, text))
        }
        DestinationOutcome::GivenUp(reason) => Err(GatewayError::new(reason).of(driver.given_up)),
    }
}

/// Returns the state of the destination's guest. A settled migration needs none.
fn guest_state(recovery: &Recovery<'_>, state: DestinationState) -> Result<DestinationGuest, GatewayError> {
    let lives = || recovery.record.record().monitor_process.is_some_and(process::lives);
    let qmp = match &recovery.qmp {
        None if RecordState::Destination(state).settled() => return Ok(DestinationGuest::Running),
        // A QEMU that waits for memory need not answer.
        qmp if state.lacks_memory() && lives() => {
            let runs = qmp.as_ref().is_some_and(|qmp| qmp.status().is_ok_and(|status| status == "running"));
            return Ok(if runs { DestinationGuest::Running } else { DestinationGuest::Paused });
        }
        _ if recovery.qemu_gone()? => return Ok(DestinationGuest::Gone),
        Some(qmp) => qmp,
        None => return Ok(DestinationGuest::Gone),
    };
    match qmp.status().map_err(GatewayError::new)?.as_str() {
        "inmigrate" => Ok(DestinationGuest::Incoming),
        "running" => Ok(DestinationGuest::Running),
        "paused" => Ok(DestinationGuest::Paused),
        other => Err(GatewayError::new(format!(
            "QEMU is in the state {other}, which no migration of Sterna leaves behind: somebody else has been at it, and nothing is \
             touched"
        ))),
    }
}

struct Driver<'a> {
    kernel: DestinationKernel<'a, Infallible>,
    options: &'a RecoverOptions,
    qmp: Option<Qmp>,
    on_connection: OnConnectionEvent,
    listening: Option<Listening>,
    /// Whether only the source may know how this ends.
    needs_source: bool,
    /// When the source must have sent its decision.
    until: Option<Instant>,
    /// The kind of the failure, once this side gives up.
    given_up: ErrorKind,
}

impl<'a> DestinationDriver<'a> for Driver<'a> {
    type Event = Infallible;

    fn kernel(&mut self) -> &mut DestinationKernel<'a, Infallible> {
        &mut self.kernel
    }

    fn clear_autostart(&mut self) -> Result<(), String> {
        Err("a recovery loads no guest".into())
    }

    fn accept_stream(&mut self) -> Result<(), String> {
        Err("a recovery loads no guest".into())
    }

    fn start_guest(&mut self) -> Result<DestinationGuest, String> {
        match self.qmp.as_ref().map(qemu::cont) {
            Some(Ok(())) => Ok(DestinationGuest::Running),
            Some(Err(error)) => Err(format!("QEMU does not start the guest: {error}")),
            None => Ok(DestinationGuest::Gone),
        }
    }

    fn guest_started(&mut self) {
        self.qmp.iter().for_each(qemu::announce);
    }

    fn discard(&mut self) -> Result<(), String> {
        let process = self.kernel.ledger.record().monitor_process;
        match (&self.qmp, process) {
            (Some(qmp), _) => qemu::quit(qmp, process, QUIT_TIME),
            (None, Some(qemu)) if process::lives(qemu) => {
                let pid = qemu.pid;
                Err(format!("QEMU (process {pid}) does not answer, and must be ended: kill -KILL {pid}"))
            }
            (None, _) => Ok(()),
        }
    }

    fn await_source(&mut self) {
        if self.listening.is_some() || self.kernel.end().is_some() {
            return;
        }
        match self.listen() {
            Ok(listening) => self.listening = Some(listening),
            Err(error) if self.needs_source => return self.give_up(error.kind, &error.text),
            Err(_) => return,
        }
        if !self.needs_source {
            return;
        }
        self.kernel.observer.note(&format!(
            "waiting at {} for the source's decision; run `sterna recover {}` there",
            self.kernel.ledger.record().peer,
            self.options.id
        ));
    }

    fn ended(&mut self, end: &DestinationEnd) {
        if *end == DestinationEnd::Running {
            restore_settings(self.qmp.as_ref(), self.kernel.ledger.record(), self.kernel.observer);
        }
        let contradicted = matches!(end, DestinationEnd::Stuck { .. } | DestinationEnd::Conflict);
        if self.listening.is_none() && !contradicted {
            // Without a listener only this side is settled: the source can run `recover` later.
            self.listening = self.listen().ok();
        }
    }

    /// A source that missed `Running` dials again. It is answered for a while, so that the operator need not run `recover` here again.
    fn hang_up_at(&self, end: &DestinationEnd, link: SourceLink, since: Instant) -> Instant {
        let latest = since + LINGER;
        match (end, link) {
            (_, SourceLink::Connected) => latest,
            (DestinationEnd::Stuck { .. } | DestinationEnd::Conflict, _) => since,
            _ if self.listening.is_none() => since,
            _ => latest.min(Instant::now() + TELL_TIME),
        }
    }

    fn receive(&mut self, message: ControlMessage) -> Option<DestinationEvent> {
        tracing::debug!(?message, "a message about a migration that is being recovered");
        None
    }

    fn handle(&mut self, event: Infallible) -> Option<DestinationEvent> {
        match event {}
    }

    fn idle(&mut self) -> Option<DestinationEvent> {
        if self.kernel.end().is_none() && self.until.is_some_and(|until| Instant::now() >= until) {
            self.give_up(
                ErrorKind::Unreachable,
                "no source has sent its decision in time (--wait): nothing is settled yet",
            );
        }
        None
    }

    fn too_late_to_cancel(&mut self) {
        self.give_up(ErrorKind::Cancelled, CANCELLED);
    }
}

impl Driver<'_> {
    /// Ends this run without a settled migration.
    fn give_up(&mut self, kind: ErrorKind, reason: &str) {
        self.given_up = kind;
        self.kernel.give_up(reason);
    }

    /// Listens at the migration's address, for control channels of this migration only.
    fn listen(&self) -> Result<Listening, GatewayError> {
        let record = self.kernel.ledger.record();
        let listener = Listener::bind(&record.peer).map_err(GatewayError::new)?;
        let security = security(self.options).map_err(GatewayError::new)?;
        let incoming = listener.start(security, Limits::default()).map_err(GatewayError::new)?;
        let listening = Listening(incoming.stop_handle());
        let (id, key) = (record.migration, record.key.clone());
        let tell = Arc::clone(&self.on_connection);
        std::thread::spawn(move || {
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
                let (gated, gate) = held_back(link_events(&tell, header.incarnation));
                let link =
                    accept_channel(connection).map_err(|error| error.to_string()).and_then(|(writer, reader)| {
                        ControlLink::start(writer, reader, closer, ControlReader::default(), gated)
                            .map_err(|error| error.to_string())
                    });
                tell(match link {
                    Ok(link) => ConnectionEvent::Connected(header.incarnation, link),
                    Err(reason) => ConnectionEvent::Unreachable(reason),
                });
                drop(gate);
            }
        });
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

/// Returns the sentence about `end`.
///
/// # Errors
/// Why the migration is not settled, or the guest is lost.
fn sentence(end: &DestinationEnd, record: &Record) -> Result<String, GatewayError> {
    let failed = |kind, text: String| Err(GatewayError::new(text).of(kind));
    match end {
        DestinationEnd::Running => Ok("the guest runs here, at the destination".into()),
        DestinationEnd::Discarded { reason } => Ok(format!("the copy here was discarded ({reason})")),
        DestinationEnd::Lost { reason } => failed(
            ErrorKind::Lost,
            format!(
                "the guest was given to this host, but its QEMU is gone ({reason}): `sterna recover --fenced-peer` at the source lets it \
                 go on from where it stopped there"
            ),
        ),
        DestinationEnd::MemoryLost { .. } => failed(ErrorKind::Lost, memory_lost(record)),
        DestinationEnd::Stuck { reason } => {
            failed(ErrorKind::Failed, format!("{reason}; put that right and run this again"))
        }
        DestinationEnd::Conflict => failed(
            ErrorKind::Failed,
            "the record and QEMU contradict each other: somebody else has started or restarted the guest here".into(),
        ),
    }
}

/// Returns the sentence about a guest of which only the process that died could have placed the rest of its memory.
fn memory_lost(record: &Record) -> String {
    let next = match record.state {
        RecordState::Destination(DestinationState::RunningIncomplete | DestinationState::Running) => {
            "The guest has run here, and what its source has is older: start it anew from its disks, as after a power failure"
        }
        _ => "Then run this again: without its QEMU this side reports to the source that the guest is lost here",
    };
    let (process, kill) = match record.monitor_process {
        Some(qemu) => (format!(" (process {})", qemu.pid), format!("kill -KILL {}; ", qemu.pid)),
        None => Default::default(),
    };
    format!(
        "part of the guest's memory had not arrived (post-copy) when `sterna receive` ended, and nothing can bring it now: whatever in \
         QEMU{process} touches it waits for good; it never reads zeros in its place. The guest is lost here: end that QEMU ({kill}QMP \
         may not answer). {next}"
    )
}
