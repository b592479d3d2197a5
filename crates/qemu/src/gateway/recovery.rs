//! `sterna recover`: settles a migration from its record, after a crash in the commit window.
//!
//! The record holds the state that this side had reached, and QEMU reports the guest's state. The state machines that drive
//! a migration derive the next actions from both. A source dials the destination until it answers. A destination that does
//! not know the decision listens at its former address until the source connects.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::Deserialize;
use sterna_engine::cancel::Cancel;
use sterna_engine::control_link::{ControlLink, held_back};
use sterna_engine::process;
use sterna_engine::record_file::{RecordFile, RecordFileError, Side};
use sterna_engine::report::Observer;
use sterna_engine::session::{
    Backoff, ConnectionEvent, DIAL_PAUSE, OnConnectionEvent, Peer, PeerEvent, Redial, Session, after, link_events,
};
use sterna_engine::transport::{Address, Limits, Listener, Security, Stop, accept_channel, refuse_channel};
use sterna_wire::control::{ControlMessage, ControlReader, Mode};
use sterna_wire::header::ChannelKind;
use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest, DestinationState, DestinationSwitchover,
    Moment, ProcessIdentity, Record, RecordState, SourceAction, SourceAfter, SourceEnd, SourceEvent, SourceGuest,
    SourceState, SourceSwitchover,
};

use super::claim::Claim;
use super::destination::{LINGER, QUIT_TIME};
use super::sockets::SocketPlace;
use super::{ErrorKind, GatewayError, RecoverOptions, SocketDirectory, direct, fault, qemu};
use crate::qmp::{Qmp, QmpError};
use crate::settings::Values;

/// Longest pause between attempts to reach the destination, also in `send`: a `recover` there that has settled the migration answers
/// for [`TELL_TIME`] only. An operator waits for both recoveries, and few of them run at a time.
pub(super) const MAX_DIAL_PAUSE: Duration = Duration::from_secs(1);

/// How long to dial the destination: `recover` may have to be started there first.
const DIAL_TIME: Duration = Duration::from_secs(60);
/// How long a source that is settled here tries to reach the destination, which can ask later.
const TELL_TIME: Duration = Duration::from_secs(3);
/// How often the loops wake when nothing happens.
const IDLE: Duration = Duration::from_millis(200);

enum Event {
    Peer(ConnectionEvent),
    Cancelled,
}

/// Settles a migration at this side. Returns a sentence that describes the outcome.
///
/// # Errors
/// Why the migration is not settled and what to do next. `recover` may be repeated.
pub fn recover(options: &RecoverOptions, cancel: &Cancel, observer: &dyn Observer) -> Result<String, GatewayError> {
    let record = open_record(options)?;
    refuse_if_memory_is_missing(record.record())?;
    // A settled migration needs no QEMU, which may be in use for something else by now.
    let qmp = if record.record().state.settled() { None } else { qemu_of(record.record()) };
    let _claim = qmp.as_ref().map(Claim::of).transpose().map_err(GatewayError::refused)?;
    // Remove the sockets that the dead process left. Those in another --socket-dir are removed by the next migration.
    if let Ok(place) = SocketPlace::find(&SocketDirectory::Temporary, qmp.as_ref().and_then(Qmp::peer_pid)) {
        place.remove_stale();
    }
    let (events_in, events) = channel();
    let cancelled = events_in.clone();
    let _cancelling = cancel.on_cancel(move || {
        let _ = cancelled.send(Event::Cancelled);
    });
    let tell: OnConnectionEvent = Arc::new(move |news| drop(events_in.send(Event::Peer(news))));
    let peer = Peer::unconnected(seconds_since_2020());
    let redial = Redial::with(Backoff::new(DIAL_PAUSE).up_to(MAX_DIAL_PAUSE));
    let common =
        Common { options, observer, record, qmp, tell, events, peer, redial, unwritten: None, source_left: None };
    match common.record.record().state {
        RecordState::Source(state) => common.source(state),
        RecordState::Destination(state) => common.destination(state),
    }
}

/// Opens the record of the chosen side, or of the only side that this host has.
fn open_record(options: &RecoverOptions) -> Result<RecordFile, GatewayError> {
    let open = |side| RecordFile::open(&options.state_dir, options.id, side);
    if let Some(side) = options.side {
        return open(side).map_err(GatewayError::refused);
    }
    match (open(Side::Source), open(Side::Destination)) {
        (Err(RecordFileError::Missing { .. }), other) | (other, Err(RecordFileError::Missing { .. })) => {
            other.map_err(GatewayError::refused)
        }
        _ => Err(GatewayError::new("this host has the records of both sides: say which with --side")),
    }
}

/// Fails if a destination's QEMU waits for memory that only the dead `receive` could have placed: whatever the record's state, its guest must
/// not run, and cannot be saved.
fn refuse_if_memory_is_missing(record: &Record) -> Result<(), GatewayError> {
    let RecordState::Destination(state) = record.state else { return Ok(()) };
    let may_run = matches!(state, DestinationState::Prepared | DestinationState::Committed | DestinationState::Running);
    let waits = |qemu: &ProcessIdentity| record.mode == Mode::Direct && may_run && direct::waits_for_memory(*qemu);
    let Some(qemu) = record.qemu.filter(waits) else { return Ok(()) };
    // Fails if a living `receive` still has the QEMU.
    let _claim = Claim::of_process(qemu)?;
    let next = match state {
        DestinationState::Running => {
            "The guest has run here, and what its source has is older: start it anew from its disks, as after a power failure"
        }
        _ => "Then run this again: without its QEMU this side tells the source that the guest is lost here",
    };
    let pid = qemu.pid;
    Err(GatewayError::new(format!(
        "part of the guest's memory had not come (post-copy) when `sterna receive` ended, and nothing can bring it now: whatever in QEMU (process {pid}) \
         touches it waits for good; it never reads zeros in its place. The guest is lost here: end that QEMU (kill -KILL {pid}; QMP may not \
         answer). {next}"
    ))
    .of(ErrorKind::Lost))
}

/// Connects to the QEMU of the record; none if it has ended, or if another process serves its socket.
fn qemu_of(record: &Record) -> Option<Qmp> {
    if record.qemu.is_some_and(|identity| !process::lives(identity)) {
        return None;
    }
    let qmp = Qmp::connect(Path::new(&record.qmp)).ok()?;
    let same = record.qemu.is_none() || qemu::identity(&qmp) == record.qemu;
    same.then_some(qmp)
}

struct Common<'a> {
    options: &'a RecoverOptions,
    observer: &'a dyn Observer,
    record: RecordFile,
    qmp: Option<Qmp>,
    tell: OnConnectionEvent,
    events: Receiver<Event>,
    peer: Peer,
    redial: Redial,
    /// Why the last attempt to write the record failed.
    unwritten: Option<String>,
    /// Why the source QEMU still lives although it was to be ended.
    source_left: Option<String>,
}

impl Common<'_> {
    /// Writes the record. Returns whether that succeeded.
    fn write(&mut self, state: RecordState) -> bool {
        let fenced = self.options.fenced_peer;
        self.record.amend(|record| record.fenced_peer |= fenced);
        self.unwritten = self.record.write(state).err().map(|error| error.to_string());
        self.unwritten.iter().for_each(|error| self.observer.note(error));
        self.unwritten.is_none()
    }

    /// Returns `text` if the record on the disk is settled; else an error.
    fn durable(&self, text: String) -> Result<String, GatewayError> {
        let state = self.record.record().state;
        if state.settled() || state == RecordState::Destination(DestinationState::Aborted) {
            return Ok(text);
        }
        let why = self.unwritten.as_deref().unwrap_or("the disk did not take it");
        Err(GatewayError::new(format!(
            "{text}; but this could not be written to the record: {why}. Put that right and run this again: the migration is \
             not settled before"
        )))
    }

    /// Returns the outcome of a source, with a warning about its QEMU where one is due.
    fn source_settled(&self, end: &SourceEnd) -> Result<String, GatewayError> {
        let mut text = source_end(end)?;
        let record = self.record.record();
        match end {
            // A record without a QEMU belongs to a monitor that embeds the library and decides itself.
            SourceEnd::Finished if !record.qmp.is_empty() => {
                // An earlier run may have failed to end this QEMU. If its process is not known, only this run's failure counts.
                let kept = self.source_left.is_some() || record.source_after == SourceAfter::Keep;
                if record.qemu.map_or(kept, process::lives) {
                    text += &format!(
                        "; WARNING: {}",
                        qemu::kept_warning(record.qemu, record.source_after, self.source_left.as_deref())
                    );
                }
            }
            SourceEnd::Aborted { .. } => self.warn_of_held_migration(&mut text),
            _ => {}
        }
        self.durable(text)
    }

    /// Returns the outcome if the guest continues at the source and the destination was not reached.
    fn resumed(&self) -> Result<String, GatewayError> {
        let mut text = RESUMED.to_owned();
        self.warn_of_held_migration(&mut text);
        self.durable(text)
    }

    fn warn_of_held_migration(&self, text: &mut String) {
        if let Some(Err(held)) = self.qmp.as_ref().map(qemu::clean_up) {
            *text += &format!("; WARNING: {held}");
        }
    }

    fn security(&self) -> Result<Security, GatewayError> {
        self.options.security.clone().ok_or_else(|| {
            GatewayError::new(
                "the other host must be asked: give --tls DIR (with --allow NAME on the host that received) or --insecure",
            )
        })
    }

    /// Returns the error for a QEMU that lives but cannot be reached.
    fn no_qemu(&self) -> GatewayError {
        let record = self.record.record();
        if record.qmp.is_empty() {
            return GatewayError::new(format!(
                "the migration was embedded in process {}, which lives and has the guest: let it resume the guest or end it, \
                 then run this again",
                record.pid
            ));
        }
        GatewayError::new(format!(
            "QEMU's QMP socket {} does not answer although QEMU lives: is another program connected to it?",
            self.record.record().qmp
        ))
    }

    /// Returns whether the record's QEMU has ended.
    ///
    /// # Errors
    /// QEMU lives but cannot be reached.
    fn qemu_gone(&self) -> Result<bool, GatewayError> {
        match (&self.qmp, self.record.record().qemu) {
            (Some(_), _) => Ok(false),
            (None, Some(identity)) if process::lives(identity) => Err(self.no_qemu()),
            (None, Some(_)) => Ok(true),
            // The process is not known: QEMU has ended only if no process serves its socket.
            (None, None) => match std::os::unix::net::UnixStream::connect(&self.record.record().qmp) {
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                    Ok(true)
                }
                _ => Err(self.no_qemu()),
            },
        }
    }

    /// Fails if QEMU has an active or completed migration that cannot be the record's. Ending that migration, or resuming its guest,
    /// could make the guest run on two hosts.
    fn refuse_if_not_ours(&self, state: SourceGuest) -> Result<(), GatewayError> {
        let Some(qmp) = &self.qmp else { return Ok(()) };
        let record = self.record.record();
        let permitted = record.completion_permitted || record.mode == Mode::Direct;
        let whose = match state {
            SourceGuest::Completed if !permitted => {
                "was moved away by another migration; end this QEMU if it runs there"
            }
            SourceGuest::Migrating if !permitted && qemu::goes_on(qmp).map_err(GatewayError::new)? => {
                "is being moved by another migration; wait for its end or cancel it, then try again"
            }
            _ => return Ok(()),
        };
        Err(GatewayError::new(format!("the guest {whose}. Nothing was touched")))
    }

    fn source(mut self, state: SourceState) -> Result<String, GatewayError> {
        let settled = RecordState::Source(state).settled();
        let qemu_state = match &self.qmp {
            None if settled => SourceGuest::Running,
            _ if self.qemu_gone()? => SourceGuest::Gone,
            Some(qmp) => qemu::recorded_state(qmp, self.record.record()).map_err(GatewayError::new)?,
            None => SourceGuest::Gone,
        };
        tracing::info!(?state, ?qemu_state, "recovering the source");
        if matches!(state, SourceState::Started | SourceState::Aborted) {
            self.refuse_if_not_ours(qemu_state)?;
        }
        let (mut machine, mut actions) = SourceSwitchover::recover(Some(state), qemu_state, self.options.fenced_peer);
        let mut give_up = None;
        loop {
            let mut answers = Vec::new();
            for action in actions {
                let step = action.step();
                fault::point(Moment::Before, step);
                match &action {
                    SourceAction::Done(end) => return self.source_settled(end),
                    SourceAction::Connect => {
                        let time = if machine.decided() { DIAL_TIME } else { TELL_TIME };
                        give_up.get_or_insert(Instant::now() + time);
                        self.peer.hang_up();
                        match self.security() {
                            Ok(security) => self.dial(security),
                            // The guest runs here, and a destination that was not reached can ask.
                            Err(_) if machine.may_stop() => return self.resumed(),
                            Err(error) => return Err(error),
                        }
                    }
                    _ => answers.extend(self.perform_source(action)?),
                }
                fault::point(Moment::After, step);
            }
            actions = Vec::new();
            for answer in answers {
                actions.extend(machine.on(answer));
            }
            if !actions.is_empty() {
                continue;
            }
            if give_up.is_some_and(|deadline| Instant::now() >= deadline) {
                if machine.may_stop() {
                    return self.resumed();
                }
                let to = &self.record.record().peer;
                return Err(GatewayError::new(format!(
                    "the guest belongs to the destination, but {to} cannot be reached: run `sterna recover {}` there at \
                     the same time; only if that host is gone for good, add --fenced-peer here",
                    self.options.id
                ))
                .of(ErrorKind::Unreachable));
            }
            let event = match self.events.recv_timeout(IDLE) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => unreachable!("a sender is kept here"),
            };
            actions = match event {
                Event::Peer(news) => match self.peer.handle(news) {
                    Some(PeerEvent::Message(ControlMessage::Switchover(message), _)) => {
                        machine.on(SourceEvent::Message(message))
                    }
                    Some(PeerEvent::Lost(_)) => machine.on(SourceEvent::ConnectionLost),
                    Some(PeerEvent::Connected) => {
                        self.redial.connected();
                        machine.on(SourceEvent::Connected)
                    }
                    Some(PeerEvent::Unreachable(reason)) => {
                        tracing::info!(reason, "the destination cannot be reached yet");
                        self.dial(self.security()?);
                        Vec::new()
                    }
                    Some(PeerEvent::Message(..)) | None => Vec::new(),
                },
                Event::Cancelled if machine.may_stop() => return self.resumed(),
                Event::Cancelled => {
                    return Err(GatewayError::new("cancelled; nothing is settled yet").of(ErrorKind::Cancelled));
                }
            };
        }
    }

    /// Restores the migration settings of a QEMU whose guest runs here.
    fn restore_settings(&self) {
        let (Some(qmp), Some(before)) = (&self.qmp, &self.record.record().settings_before) else { return };
        let values = Values::deserialize(before).map_err(|error| error.to_string());
        if let Err(error) = values.and_then(|before| before.set(qmp).map_err(|error| error.to_string())) {
            self.observer.note(&format!("QEMU's migration settings could not be put back: {error}"));
        }
    }

    fn perform_source(&mut self, action: SourceAction) -> Result<Option<SourceEvent>, GatewayError> {
        tracing::debug!(?action, "recovering");
        let failed =
            |what: &str, error: &dyn std::fmt::Display| SourceEvent::Failed { reason: format!("{what}: {error}") };
        Ok(match action {
            SourceAction::WriteRecord(state) => Some(match self.write(RecordState::Source(state)) {
                true => SourceEvent::RecordWritten,
                false => SourceEvent::RecordFailed,
            }),
            SourceAction::Send(message) => {
                self.peer.send(&ControlMessage::Switchover(message));
                None
            }
            SourceAction::EndMigration => {
                let qmp = self.qmp.as_ref().ok_or_else(|| self.no_qemu())?;
                let direct = self.record.record().mode == Mode::Direct;
                // In direct mode, the tracking of the guest's writes has ended with the process that died.
                let ended =
                    if direct { qemu::recorded_state(qmp, self.record.record()) } else { qemu::end_migration(qmp) };
                Some(match ended {
                    Ok(state) => SourceEvent::Guest(state),
                    Err(QmpError::Closed { .. }) if qemu::has_ended(self.record.record().qemu) => {
                        SourceEvent::Guest(SourceGuest::Gone)
                    }
                    Err(error) => failed("the source QEMU does not end its migration", &error),
                })
            }
            SourceAction::Cont => {
                let qmp = self.qmp.as_ref().ok_or_else(|| self.no_qemu())?;
                Some(match qemu::cont(qmp) {
                    Ok(()) => SourceEvent::Guest(SourceGuest::Running),
                    Err(error) => failed("the source QEMU does not resume the guest", &error),
                })
            }
            SourceAction::AnnounceSelf => {
                self.restore_settings();
                self.qmp.iter().for_each(qemu::announce);
                None
            }
            SourceAction::EndGuest => Some(match &self.qmp {
                Some(qmp) => {
                    let event = qemu::end_source(qmp, self.record.record());
                    if let SourceEvent::Failed { reason } = &event {
                        self.source_left = Some(reason.clone());
                    }
                    event
                }
                None => SourceEvent::Guest(SourceGuest::Gone),
            }),
            SourceAction::StartMigration | SourceAction::RelayShut | SourceAction::Connect | SourceAction::Done(_) => {
                tracing::error!(?action, "unexpected action during recovery");
                None
            }
        })
    }

    /// Dials the destination on a thread of its own. The outcome comes as an event.
    fn dial(&mut self, security: Security) {
        let record = self.record.record();
        let session = Session {
            id: record.migration,
            key: record.key.clone(),
            incarnation: self.peer.begin_anew(),
            channels: 0,
            device_channels: 0,
            packet_size: 0,
            features: Vec::new(),
            round_trip: Duration::ZERO,
        };
        let to = Address::from(&record.peer);
        self.redial.dial(to, security, session, Arc::clone(&self.tell));
    }

    fn destination(mut self, state: DestinationState) -> Result<String, GatewayError> {
        let settled = RecordState::Destination(state).settled();
        let qemu_state = match &self.qmp {
            None if settled => DestinationGuest::Running,
            _ if self.qemu_gone()? => DestinationGuest::Gone,
            Some(qmp) => match qmp.status().map_err(GatewayError::new)?.as_str() {
                "inmigrate" => DestinationGuest::Incoming,
                "running" => DestinationGuest::Running,
                "paused" => DestinationGuest::Paused,
                other => {
                    return Err(GatewayError::new(format!(
                        "QEMU is in the state {other}, which no migration of Sterna leaves behind: somebody else has been at \
                         it, and nothing is touched"
                    )));
                }
            },
            None => DestinationGuest::Gone,
        };
        tracing::info!(?state, ?qemu_state, "recovering the destination");
        let (mut machine, mut actions) = DestinationSwitchover::recover(state, qemu_state, self.options.fenced_peer);
        let mut listening = None;
        let mut end: Option<DestinationEnd> = None;
        let mut hang_up_at = None;
        let until = self.options.wait.map(after);
        loop {
            let mut answers = Vec::new();
            for action in actions {
                let step = action.step();
                fault::point(Moment::Before, step);
                match action {
                    DestinationAction::Done(reached) => {
                        if reached == DestinationEnd::Running {
                            self.restore_settings();
                        }
                        hang_up_at.get_or_insert_with(|| Instant::now() + LINGER);
                        end = Some(reached);
                    }
                    DestinationAction::AwaitSource if listening.is_none() && end.is_none() => {
                        listening = Some(self.listen()?);
                        self.observer.note(&format!(
                            "waiting at {} for the source to say what was decided; run `sterna recover {}` there",
                            self.record.record().peer,
                            self.options.id
                        ));
                    }
                    DestinationAction::AwaitSource => {}
                    action => answers.extend(self.perform_destination(action)),
                }
                fault::point(Moment::After, step);
            }
            actions = Vec::new();
            for answer in answers {
                actions.extend(machine.on(answer));
            }
            if !actions.is_empty() {
                continue;
            }
            let hang_up = hang_up_at.is_some_and(|at| Instant::now() >= at);
            if let Some(end) = &end
                && (hang_up || !self.peer.is_connected())
            {
                // Settled here, or lost. A committed source may still ask, so this side answers for a while.
                let answer = destination_end(end);
                if !hang_up && (answer.is_ok() || matches!(end, DestinationEnd::Lost { .. })) {
                    self.answer_late_source(&mut machine, listening.take());
                }
                return answer.and_then(|text| self.durable(text));
            }
            if end.is_none() && until.is_some_and(|until| Instant::now() >= until) {
                let text = "no source has said in time (--wait) what was decided: nothing is settled yet";
                return Err(GatewayError::new(text).of(ErrorKind::Unreachable));
            }
            let event = match self.events.recv_timeout(IDLE) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => unreachable!("a sender is kept here"),
            };
            if matches!(event, Event::Cancelled) {
                return match &end {
                    Some(end) => destination_end(end).and_then(|text| self.durable(text)),
                    None => Err(GatewayError::new("cancelled; nothing is settled yet").of(ErrorKind::Cancelled)),
                };
            }
            actions = self.destination_event(&mut machine, event);
        }
    }

    fn destination_event(&mut self, machine: &mut DestinationSwitchover, event: Event) -> Vec<DestinationAction> {
        match event {
            Event::Peer(news) => match self.peer.handle(news) {
                Some(PeerEvent::Message(ControlMessage::Switchover(message), _)) => {
                    machine.on(DestinationEvent::Message(message))
                }
                Some(PeerEvent::Lost(_)) => machine.on(DestinationEvent::ConnectionLost),
                Some(PeerEvent::Connected) => machine.on(DestinationEvent::Connected),
                Some(PeerEvent::Unreachable(reason)) => {
                    self.observer.note(&format!("a connection was refused: {reason}"));
                    Vec::new()
                }
                Some(PeerEvent::Message(..)) | None => Vec::new(),
            },
            Event::Cancelled => Vec::new(),
        }
    }

    /// Answers a source that missed `Running` and dials again. Otherwise the operator would have to run `recover` here again.
    fn answer_late_source(&mut self, machine: &mut DestinationSwitchover, listening: Option<Listening>) {
        let Ok(_listening) = listening.map_or_else(|| self.listen(), Ok) else { return };
        let mut deadline = Instant::now() + TELL_TIME;
        let hang_up_at = Instant::now() + LINGER;
        while Instant::now() < hang_up_at && (Instant::now() < deadline || self.peer.is_connected()) {
            let Ok(event) = self.events.recv_timeout(IDLE) else { continue };
            if matches!(event, Event::Cancelled) {
                return;
            }
            for action in self.destination_event(machine, event) {
                let step = action.step();
                fault::point(Moment::Before, step);
                self.perform_destination(action);
                fault::point(Moment::After, step);
            }
            deadline = Instant::now() + TELL_TIME;
        }
    }

    fn perform_destination(&mut self, action: DestinationAction) -> Option<DestinationEvent> {
        tracing::debug!(?action, "recovering");
        let failed =
            |what: &str, error: &dyn std::fmt::Display| DestinationEvent::Failed { reason: format!("{what}: {error}") };
        match action {
            DestinationAction::WriteRecord(state) => Some(match self.write(RecordState::Destination(state)) {
                true => DestinationEvent::RecordWritten,
                false => DestinationEvent::RecordFailed,
            }),
            DestinationAction::Send(message) => {
                self.peer.send(&ControlMessage::Switchover(message));
                None
            }
            DestinationAction::Cont => Some(match self.qmp.as_ref().map(qemu::cont) {
                Some(Ok(())) => DestinationEvent::Guest(DestinationGuest::Running),
                Some(Err(error)) => failed("QEMU does not start the guest", &error),
                None => DestinationEvent::Guest(DestinationGuest::Gone),
            }),
            DestinationAction::AnnounceSelf => {
                self.qmp.iter().for_each(qemu::announce);
                None
            }
            DestinationAction::Quit => {
                Some(match self.qmp.as_ref().map(|qmp| qemu::quit(qmp, self.record.record().qemu, QUIT_TIME)) {
                    Some(Err(reason)) => DestinationEvent::Failed { reason },
                    Some(Ok(())) | None => DestinationEvent::Guest(DestinationGuest::Gone),
                })
            }
            DestinationAction::ClearAutostart
            | DestinationAction::AcceptStream
            | DestinationAction::AwaitSource
            | DestinationAction::Done(_) => None,
        }
    }

    /// Listens at the migration's address, for control channels of this migration only.
    fn listen(&self) -> Result<Listening, GatewayError> {
        let record = self.record.record();
        let listener = Listener::bind(&record.peer).map_err(GatewayError::new)?;
        let incoming = listener.start(self.security()?, Limits::default()).map_err(GatewayError::new)?;
        let listening = Listening(incoming.stop_handle());
        let (id, key) = (record.migration, record.key.clone());
        let tell = Arc::clone(&self.tell);
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

const RESUMED: &str = "the guest runs on at the source; a destination that was not told may be ended, or asks by its own \
                       `sterna recover`";

pub(super) fn source_end(end: &SourceEnd) -> Result<String, GatewayError> {
    match end {
        SourceEnd::Finished => Ok("the guest runs at the destination".into()),
        SourceEnd::Aborted { .. } => Ok("the guest runs here, at the source".into()),
        SourceEnd::NotStarted => Ok("nothing was begun; the guest was not touched".into()),
        SourceEnd::GuestGone => {
            Ok("the source's QEMU has ended, and nothing of the guest is left here: if the destination is \
                                    prepared, `sterna recover --fenced-peer` there starts the guest from its copy"
                .into())
        }
        SourceEnd::DestinationLost { never_ran, reason } => Err(GatewayError::new(format!(
            "the guest was given to the destination, whose QEMU is gone ({reason}); it {} there. \
             `sterna recover --fenced-peer` here lets it go on from where it stopped",
            if *never_ran { "never ran" } else { "may have run, and written to shared disks," }
        ))
        .of(ErrorKind::Lost)),
        SourceEnd::Stuck { reason } => Err(GatewayError::new(format!("{reason}; put that right and run this again"))),
        SourceEnd::Conflict => Err(GatewayError::new(
            "the guest runs here although it was given to the destination: somebody started it by hand. If it runs there \
             too, stop one of the two",
        )),
    }
}

fn destination_end(end: &DestinationEnd) -> Result<String, GatewayError> {
    match end {
        DestinationEnd::Running => Ok("the guest runs here, at the destination".into()),
        DestinationEnd::Discarded { reason } => Ok(format!("the copy here was discarded ({reason})")),
        DestinationEnd::Lost { reason } => Err(GatewayError::new(format!(
            "the guest was given to this host, but its QEMU is gone ({reason}): `sterna recover --fenced-peer` at the \
             source lets it go on from where it stopped there"
        ))
        .of(ErrorKind::Lost)),
        DestinationEnd::Stuck { reason } => {
            Err(GatewayError::new(format!("{reason}; put that right and run this again")))
        }
        DestinationEnd::Conflict => Err(GatewayError::new(
            "the record and QEMU contradict each other: somebody else has started or restarted the guest here",
        )),
    }
}

/// Returns an incarnation later than any that the peer has seen, since seconds also grow across processes.
fn seconds_since_2020() -> u32 {
    const YEAR_2020: u64 = 1_577_836_800_000;
    (sterna_engine::record_file::now_ms().saturating_sub(YEAR_2020) / 1000) as u32
}
