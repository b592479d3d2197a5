//! One migration at the destination's proxy: feeds the source's packets to the destination QEMU, and sends that QEMU's answers
//! back.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use sterna_engine::abort::Abort;
use sterna_engine::control_link::{ControlEvent, ControlLink, out_of_phase};
use sterna_engine::session::{ChannelAcceptor, LAST_WORDS};
use sterna_wire::control::ControlMessage;

use super::receive::Event;
use crate::gateway::GatewayError;
use crate::gateway::backlog::Backlog;
use crate::gateway::feeder::FeederEvent;
use crate::stream::{ReturnMessage, ReturnPathReader};
use sterna_wire::reason::Reason;

/// How long the source's proxy may take to end the session once the source QEMU has sent everything. It only waits for our
/// acknowledgements. After this time the session ends without it.
const FAREWELL_TIME: Duration = Duration::from_secs(15);

/// How long the end of the source QEMU's stream may take to arrive after the destination QEMU has closed its socket without SHUT.
/// Without a return path, QEMU closes the socket as soon as it has loaded the guest.
const STREAM_END_TIME: Duration = Duration::from_secs(2);

/// A migration whose channels are fed to a QEMU.
pub(super) struct Migration<'a> {
    pub(super) abort: Arc<Abort>,
    pub(super) acceptor: Arc<ChannelAcceptor>,
    pub(super) link: &'a ControlLink,
    pub(super) events_in: Sender<Event>,
    stage: Stage,
    /// Bounds the queue of the return path's messages.
    backlog: Backlog,
}

/// The migration's stage, which bounds the wait for the next event.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Carried,
    /// The destination QEMU has closed its socket without SHUT.
    ClosedSince(Instant),
    /// The source QEMU's stream has ended.
    EndedSince(Instant),
}

impl<'a> Migration<'a> {
    pub(super) fn new(
        abort: Arc<Abort>,
        acceptor: Arc<ChannelAcceptor>,
        link: &'a ControlLink,
        events_in: Sender<Event>,
    ) -> Self {
        Self { abort, acceptor, link, events_in, stage: Stage::Carried, backlog: Backlog::default() }
    }

    /// Carries the migration to its end, and closes all its connections.
    pub(super) fn carry(mut self, events: &Receiver<Event>) -> Result<(), GatewayError> {
        let result = loop {
            let limit = match self.stage {
                Stage::Carried => None,
                Stage::ClosedSince(closed) => Some(STREAM_END_TIME.saturating_sub(closed.elapsed())),
                Stage::EndedSince(ended) => Some(FAREWELL_TIME.saturating_sub(ended.elapsed())),
            };
            let event = match limit {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(limit) => events.recv_timeout(limit),
            };
            let event = match (event, self.stage) {
                (Ok(event), _) => event,
                // Everything has been delivered; only the end of the session is missing.
                (Err(_), Stage::EndedSince(_)) => break Ok(()),
                (Err(_), _) => break Err(GatewayError::new("the destination QEMU closed its migration socket")),
            };
            match self.handle(event) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        let result =
            result.map_err(|error| if self.abort.was_lost() { last_words(events).unwrap_or(error) } else { error });
        if let Err(error) = &result {
            self.send(&ControlMessage::Failed(Reason::new(error.kind, error)));
        }
        self.abort.finish();
        self.acceptor.join();
        result
    }

    /// Handles one event. Returns whether the migration has ended.
    fn handle(&mut self, event: Event) -> Result<bool, GatewayError> {
        match event {
            Event::Control(ControlEvent::Message(ControlMessage::Failed(reason), _)) => {
                return Err(source_error(reason));
            }
            Event::Control(ControlEvent::Lost(_)) if matches!(self.stage, Stage::EndedSince(_)) => return Ok(true),
            Event::Control(ControlEvent::Lost(reason)) => {
                return Err(GatewayError::new(format!("the source's proxy was lost: {reason}")));
            }
            Event::Control(ControlEvent::Message(message, _)) => {
                return Err(GatewayError::new(out_of_phase("the source's proxy", &message)));
            }
            Event::Feeder(FeederEvent::Ready { placement, return_path, .. }) => {
                self.send(&ControlMessage::Ready { placement, deltas: Vec::new() });
                self.relay_return_path(return_path)?;
            }
            Event::Feeder(FeederEvent::RamPlaced) => {}
            Event::Feeder(FeederEvent::Ended) => self.stage = Stage::EndedSince(Instant::now()),
            Event::ReturnPath(message) => {
                self.send(&ControlMessage::ReturnPath(message.into()));
                self.backlog.handled();
            }
            Event::ClosedWithoutShut => {
                if matches!(self.stage, Stage::Carried) {
                    self.stage = Stage::ClosedSince(Instant::now());
                }
            }
            Event::Broken if self.abort.was_lost() && matches!(self.stage, Stage::EndedSince(_)) => return Ok(true),
            Event::Broken => {
                if let Some(reason) = self.abort.reason() {
                    return Err(GatewayError::new(&reason).of(reason.kind));
                }
            }
            Event::Cancelled => return Err(GatewayError::new("the proxy was told to close its connections")),
            Event::Channel(..) | Event::DirectionEnded => {}
        }
        Ok(false)
    }

    fn send(&self, message: &ControlMessage) {
        if let Err(error) = self.link.send(message) {
            // The link's reading side reports the loss.
            tracing::info!(%error, "a message to the source's proxy was not sent");
        }
    }

    fn relay_return_path(&self, mut reader: ReturnPathReader<UnixStream>) -> Result<(), GatewayError> {
        let (events, backlog) = (self.events_in.clone(), self.backlog.entry());
        let relay = move || {
            let mut shut = false;
            loop {
                match reader.next_message() {
                    Ok(Some(message)) => {
                        shut |= matches!(message, ReturnMessage::Shut(_));
                        if !backlog.wait() || events.send(Event::ReturnPath(message)).is_err() {
                            return;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::info!(%error, "the return path broke");
                        break;
                    }
                }
            }
            if !shut {
                let _ = events.send(Event::ClosedWithoutShut);
            }
        };
        std::thread::Builder::new().name("return-path".into()).spawn(relay).map(drop).map_err(GatewayError::new)
    }
}

fn source_error(reason: Reason) -> GatewayError {
    let reason = reason.from_peer().within("the source's proxy");
    GatewayError::new(&reason).of(reason.kind)
}

/// Waits for the source's reason for a broken channel, which comes on the control channel.
fn last_words(events: &Receiver<Event>) -> Option<GatewayError> {
    let deadline = Instant::now() + LAST_WORDS;
    loop {
        let event = events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
        if let Event::Control(ControlEvent::Message(ControlMessage::Failed(reason), _)) = event {
            return Some(source_error(reason));
        }
    }
}
