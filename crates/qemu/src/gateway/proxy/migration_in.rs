//! One migration at the destination's proxy: what the source's proxy sends is fed to the destination QEMU, what that QEMU answers is
//! sent back.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use sterna::abort::Abort;
use sterna::control_link::{ControlEvent, ControlLink};
use sterna::session::{Doorman, LAST_WORDS};
use sterna_wire::control::ControlMessage;
use sterna_wire::text::cleaned;

use super::receive::Event;
use crate::gateway::GatewayError;
use crate::gateway::backlog::Backlog;
use crate::gateway::feeder::FeederNews;
use crate::stream::{ReturnMessage, ReturnPathReader};

/// How long the source's proxy may take to end the session once the source QEMU has sent everything. It needs to wait for nothing but
/// our acknowledgements; then the session is ended without it.
const FAREWELL_TIME: Duration = Duration::from_secs(15);

/// How long, after the destination QEMU has closed its socket without a word, the end of the source QEMU's stream may take to come:
/// without a return path a QEMU closes it as soon as it has read all that it needs.
const STREAM_END_TIME: Duration = Duration::from_secs(2);

/// A migration whose channels are fed to a QEMU.
pub(super) struct Migration<'a> {
    pub(super) abort: Arc<Abort>,
    pub(super) doorman: Arc<Doorman>,
    pub(super) link: &'a ControlLink,
    pub(super) events_in: Sender<Event>,
    stage: Stage,
    /// Of the return path's messages.
    backlog: Backlog,
}

/// How far the migration has come, as far as it bounds the wait for what comes next.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Carried,
    /// The destination QEMU has closed its socket without a word.
    ClosedSince(Instant),
    /// The source QEMU's stream has come to its end.
    EndedSince(Instant),
}

impl<'a> Migration<'a> {
    pub(super) fn new(
        abort: Arc<Abort>,
        doorman: Arc<Doorman>,
        link: &'a ControlLink,
        events_in: Sender<Event>,
    ) -> Self {
        Self { abort, doorman, link, events_in, stage: Stage::Carried, backlog: Backlog::default() }
    }

    /// Carries it to its end; all its connections are closed then.
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
                // Everything has been delivered; only the farewell is missing.
                (Err(_), Stage::EndedSince(_)) => break Ok(()),
                (Err(_), _) => break Err(GatewayError("the destination QEMU closed its migration socket".into())),
            };
            match self.take(event) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        let result =
            result.map_err(|error| if self.abort.was_lost() { last_words(events).unwrap_or(error) } else { error });
        if let Err(error) = &result {
            self.send(&ControlMessage::Failed { reason: error.to_string() });
        }
        self.abort.finish();
        self.doorman.join();
        result
    }

    /// Returns whether everything has come to its end.
    fn take(&mut self, event: Event) -> Result<bool, GatewayError> {
        match event {
            Event::Control(ControlEvent::Message(ControlMessage::Failed { reason }, _)) => {
                return Err(of_the_source(&reason));
            }
            Event::Control(ControlEvent::Lost(_)) if matches!(self.stage, Stage::EndedSince(_)) => return Ok(true),
            Event::Control(ControlEvent::Lost(reason)) => {
                return Err(GatewayError(format!("the source's proxy was lost: {reason}")));
            }
            Event::Control(ControlEvent::Message(message, _)) => {
                tracing::warn!(?message, "not expected from a source's proxy");
            }
            Event::Feeder(FeederNews::Ready { placement, return_path, .. }) => {
                self.send(&ControlMessage::Ready { placement, deltas: Vec::new() });
                self.relay_return_path(return_path)?;
            }
            Event::Feeder(FeederNews::RamPlaced) => {}
            Event::Feeder(FeederNews::Ended) => self.stage = Stage::EndedSince(Instant::now()),
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
                    return Err(GatewayError(reason));
                }
            }
            Event::Cancelled => return Err(GatewayError("the proxy was told to close its connections".into())),
            Event::Channel(..) | Event::DirectionEnded => {}
        }
        Ok(false)
    }

    fn send(&self, message: &ControlMessage) {
        if let Err(error) = self.link.send(message) {
            // The link's reading side reports the loss.
            tracing::info!(%error, "the source's proxy did not take a message");
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

fn of_the_source(reason: &str) -> GatewayError {
    GatewayError(format!("the source's proxy: {}", cleaned(reason)))
}

/// What the source's proxy says of a channel that broke: the reason travels on another connection.
fn last_words(events: &Receiver<Event>) -> Option<GatewayError> {
    let deadline = Instant::now() + LAST_WORDS;
    loop {
        let event = events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
        if let Event::Control(ControlEvent::Message(ControlMessage::Failed { reason }, _)) = event {
            return Some(of_the_source(&reason));
        }
    }
}
