//! The driver's part for the devices whose state is sent separately from the monitor's. They load their state as it arrives, at the same
//! time as each other and the last pages; the guest is prepared when all have loaded.

use std::sync::Arc;

use sterna_wire::control::{ControlMessage, DeviceChannels, Machine};
use sterna_wire::reason::Reason;
use sterna_wire::switchover::DestinationEvent;

use super::{Driver, Event};
use crate::device_state::load::{LoadEvent, LoadingDevices};
use crate::device_state::{DeviceId, LoadDevice, Threads};
use crate::report::Observer;

/// The devices and their progress.
pub(in crate::destination) struct Devices {
    known: Arc<LoadingDevices>,
    channels: DeviceChannels,
    /// The devices in the source's order, until their threads are started.
    waiting: Vec<Box<dyn LoadDevice>>,
    threads: Threads,
    /// How many devices have not loaded yet.
    missing: usize,
}

impl Devices {
    /// Sorts this side's devices as `source` numbers them. Each may have `share` bytes on their way or waiting.
    pub(in crate::destination) fn new(
        mut devices: Vec<(DeviceId, Box<dyn LoadDevice>)>,
        source: &Machine,
        share: u64,
    ) -> Self {
        let serial = source.device_channels == DeviceChannels::Serial;
        let known = Arc::new(LoadingDevices::new(source.devices.clone(), share, serial));
        let place = |id: &DeviceId| source.devices.iter().position(|theirs| theirs == id);
        devices.sort_by_key(|(id, _)| place(id));
        let waiting: Vec<_> = devices.into_iter().map(|(_, device)| device).collect();
        let missing = waiting.len();
        Self { known, channels: source.device_channels, waiting, threads: Threads::default(), missing }
    }

    /// Returns the devices, if their state arrives on channels of this kind.
    pub(in crate::destination) fn on(&self, channels: DeviceChannels) -> Option<Arc<LoadingDevices>> {
        let same = std::mem::discriminant(&channels) == std::mem::discriminant(&self.channels);
        same.then(|| Arc::clone(&self.known))
    }

    pub(in crate::destination) fn known(&self) -> Arc<LoadingDevices> {
        Arc::clone(&self.known)
    }

    pub(super) fn all_loaded(&self) -> bool {
        self.missing == 0
    }

    /// Ends the devices' waits for pieces, and waits for their threads.
    pub(super) fn join(&mut self, observer: &dyn Observer) {
        self.known.end();
        self.threads
            .join(|devices| observer.note(&format!("before it ends, devices must return from loading: {devices}")));
    }
}

impl Driver<'_> {
    /// Starts the devices' threads, and sends the source their credits.
    pub(super) fn start_devices(&mut self) -> Result<(), Reason> {
        let (events, occupied, abort) =
            (self.kernel.events.clone(), self.occupied.clone(), Arc::clone(&self.kernel.abort));
        let news = move |news| {
            if abort.is_over() {
                // An echo: the alarm has the reason.
                return;
            }
            let failed = if let LoadEvent::Failed(reason) = &news { Some(reason.clone()) } else { None };
            events.send(Event::Device(news));
            if let Some(reason) = failed {
                // The driver may be loading the monitor's state.
                occupied.raise(reason);
            }
        };
        let Some(sender) = self.kernel.peer.sender() else { return Ok(()) };
        let send = move |message| {
            if let Err(error) = sender.send(&message) {
                // The link's reading side reports the loss.
                tracing::info!(%error, "a message could not be sent to the source");
            }
        };
        for credit in self.devices.known.credits() {
            self.kernel.peer.send(&credit);
        }
        let devices = std::mem::take(&mut self.devices.waiting);
        let started = self.devices.known.start(devices, &mut self.devices.threads, send, news);
        started.map_err(|error| Reason::other(format_args!("no thread for a device: {error}")))
    }

    pub(super) fn handle_device(&mut self, news: LoadEvent) -> Option<DestinationEvent> {
        match news {
            LoadEvent::Loaded(device) => {
                self.devices.missing -= 1;
                self.kernel.peer.send(&ControlMessage::DeviceLoaded { device });
                self.all_loaded()
            }
            LoadEvent::Failed(reason) => Some(self.failed_to_load(reason)),
        }
    }
}
