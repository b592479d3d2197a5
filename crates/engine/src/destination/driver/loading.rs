//! The driver's part for the monitor's own state: what of it has arrived, and loading it once all of RAM is here.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use sterna_wire::control::{ControlMessage, Totals};
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::DestinationEvent;

use super::{Driver, Event};
use crate::migration::Phase;
use crate::state::{Part, StateReader, StateSink, state_sink};
use crate::switchover::Events;
use crate::vmm::VmmError;

/// How far loading the guest is.
pub(in crate::destination) enum Loading {
    /// The guest's memory and state arrive.
    Arriving {
        /// The state that is sent ahead, until it was read.
        ahead: Option<StateReader>,
        /// The final state.
        last: StateReader,
        /// Whether the final state has begun to arrive.
        begun: bool,
        /// Whether all of RAM is here, by the source's totals.
        complete: bool,
    },
    /// The monitor has loaded its state, which it began at `since`. Devices may still be loading.
    Monitor { since: Instant },
    /// The guest was loaded, or will not be.
    Over,
}

/// The sink of a stream channel.
type Sink = StateSink<Box<dyn FnMut(Part) + Send>>;

/// Makes the sinks of the stream channels, of which there is one at a time.
#[derive(Clone)]
pub(in crate::destination) struct StateSinks {
    events: Events<Event>,
    /// The sink of the next stream channel.
    next: Arc<Mutex<Option<Sink>>>,
}

impl StateSinks {
    pub(in crate::destination) fn new(events: Events<Event>) -> Self {
        Self { events, next: Arc::default() }
    }

    /// Makes the sink of the next stream channel. Returns what reads from it; the sink before it fails.
    pub(in crate::destination) fn renew(&self) -> Loading {
        let events = self.events.clone();
        let begun = Box::new(move |part: Part| {
            events.send(Event::State(part));
        });
        let (sink, ahead, last) = state_sink(begun as Box<dyn FnMut(Part) + Send>);
        *self.next.lock().expect("no thread panics with the lock held") = Some(sink);
        Loading::Arriving { ahead: Some(ahead), last, begun: false, complete: false }
    }

    /// Returns the sink of the stream channel that was admitted.
    pub(in crate::destination) fn take(&self) -> Sink {
        let sink = self.next.lock().expect("no thread panics with the lock held").take();
        sink.expect("the acceptor admits one stream channel")
    }
}

/// Reads what the monitor has left of `state` once it has loaded.
fn finished(loaded: Result<(), VmmError>, state: &mut StateReader) -> Result<u64, Reason> {
    loaded.map_err(|error| Reason::new(ErrorKind::Monitor, error))?;
    state.finish().map_err(Reason::other)
}

impl Driver<'_> {
    /// Handles the beginning of a part of the state.
    pub(super) fn handle_state(&mut self, part: Part) -> Option<DestinationEvent> {
        self.kernel.forgo_resuming();
        let Loading::Arriving { begun, .. } = &mut self.loading else { return None };
        match part {
            Part::Ahead if *begun => {
                Some(self.failed_to_load(Reason::other("the source sends state ahead of what it has sent already")))
            }
            Part::Ahead => self.load_ahead(),
            Part::Final => {
                *begun = true;
                self.kernel.phase = Phase::SwitchingOver;
                self.load_if_complete()
            }
        }
    }

    /// Handles the source's totals: all of RAM must be here.
    pub(super) fn handle_totals(&mut self, totals: &Totals) -> Option<DestinationEvent> {
        self.kernel.forgo_resuming();
        if let Err(reason) = self.receiving.check(totals) {
            return Some(DestinationEvent::Failed { reason });
        }
        let refused = self.target.refused();
        if refused > 0 {
            let text = format_args!("{refused} pages arrived damaged, and the source has not sent them again");
            return Some(DestinationEvent::Failed { reason: Reason::other(text) });
        }
        if let Err(error) = self.target.seal() {
            return Some(DestinationEvent::Failed { reason: Reason::other(error) });
        }
        if let Loading::Arriving { complete, .. } = &mut self.loading {
            *complete = true;
        }
        self.load_if_complete()
    }

    fn load_ahead(&mut self) -> Option<DestinationEvent> {
        let Loading::Arriving { ahead, .. } = &mut self.loading else { return None };
        let mut reader = ahead.take()?;
        let inside = self.occupied.enter(&self.kernel.abort);
        let (mut reader, loaded) = self.vmm.call(move |vmm| {
            let loaded = vmm.load_ahead(&mut reader);
            (reader, loaded)
        });
        let loaded = finished(loaded, &mut reader);
        drop(inside);
        match loaded {
            Ok(_) => {
                self.kernel.peer.send(&ControlMessage::SwitchoverAck);
                None
            }
            Err(_) if reader.was_lost() => self.state_incomplete(),
            Err(reason) => Some(self.failed_to_load(reason.within("loading state ahead failed"))),
        }
    }

    /// Loads the guest's state once all of its RAM is here.
    fn load_if_complete(&mut self) -> Option<DestinationEvent> {
        let Loading::Arriving { begun: true, complete: true, .. } = &self.loading else { return None };
        let Loading::Arriving { mut last, .. } = std::mem::replace(&mut self.loading, Loading::Over) else {
            return None;
        };
        let since = Instant::now();
        let inside = self.occupied.enter(&self.kernel.abort);
        let abort = Arc::clone(&self.kernel.abort);
        let (mut last, loaded) = self.vmm.call(move |vmm| {
            let canceller = vmm.load_canceller().unwrap_or_default();
            let _cancelling = canceller.map(|cancel| abort.on_end_while_held(cancel));
            let loaded = vmm.load(&mut last);
            (last, loaded)
        });
        let loaded = finished(loaded, &mut last);
        drop(inside);
        match loaded {
            Ok(_) if self.target.post_copy().is_some_and(|post_copy| !post_copy.loaded()) => {
                let text = "loading the guest's state failed: pages that it needs did not arrive";
                Some(self.failed_to_load(Reason::new(ErrorKind::Memory, text)))
            }
            Ok(_) => {
                self.loading = Loading::Monitor { since };
                self.all_loaded()
            }
            Err(_) if last.was_lost() => self.state_incomplete(),
            Err(reason) => Some(self.failed_to_load(reason.within("loading the guest's state failed"))),
        }
    }

    /// Returns the event that all state is loaded, once the monitor and all devices have loaded.
    pub(super) fn all_loaded(&mut self) -> Option<DestinationEvent> {
        let Loading::Monitor { since } = self.loading else { return None };
        if !self.devices.all_loaded() {
            return None;
        }
        self.loading = Loading::Over;
        self.receiving.figures.load_ms = since.elapsed().as_secs_f64() * 1e3;
        Some(DestinationEvent::AllPlacedAndLoaded)
    }

    /// Handles the loss of the stream channel amid the state. The reason arrives on the control channel, or the control channel is lost.
    fn state_incomplete(&self) -> Option<DestinationEvent> {
        self.kernel.abort.lost("the source closed the stream channel before the end of the guest's state");
        None
    }

    /// Sends the source why the guest cannot be loaded and returns the event of it.
    pub(super) fn failed_to_load(&self, reason: Reason) -> DestinationEvent {
        // Where the migration is being taken down already, the alarm's reason explains more.
        self.kernel.fail(self.kernel.abort.reason().unwrap_or(reason))
    }
}
