//! The driver and the devices whose state comes apart from the monitor's: they load as it comes, beside each other and beside the last
//! pages, and the guest is prepared when all have.

use std::sync::Arc;

use sterna_wire::control::{ControlMessage, DeviceChannels, Machine};
use sterna_wire::switchover::DestinationEvent;

use super::driver::{Driver, Event};
use crate::device_state::load::{LoadNews, LoadingDevices};
use crate::device_state::{DeviceId, LoadDevice, Threads};
use crate::report::Observer;

/// The devices, and how far they are.
pub(super) struct Devices {
    known: Arc<LoadingDevices>,
    channels: DeviceChannels,
    /// By the source's numbers, until their threads are started.
    waiting: Vec<Box<dyn LoadDevice>>,
    threads: Threads,
    /// How many have not loaded yet.
    missing: usize,
}

impl Devices {
    /// This side's devices, which are those of `source`; each may have `share` bytes on its way or waiting.
    pub(super) fn new(mut devices: Vec<(DeviceId, Box<dyn LoadDevice>)>, source: &Machine, share: u64) -> Self {
        let serial = source.device_channels == DeviceChannels::Serial;
        let known = Arc::new(LoadingDevices::new(source.devices.clone(), share, serial));
        let place = |id: &DeviceId| source.devices.iter().position(|theirs| theirs == id);
        devices.sort_by_key(|(id, _)| place(id));
        let waiting: Vec<_> = devices.into_iter().map(|(_, device)| device).collect();
        let missing = waiting.len();
        Self { known, channels: source.device_channels, waiting, threads: Threads::default(), missing }
    }

    /// Where pieces may come on channels of `channels`, and on no others.
    pub(super) fn on(&self, channels: DeviceChannels) -> Option<Arc<LoadingDevices>> {
        let same = std::mem::discriminant(&channels) == std::mem::discriminant(&self.channels);
        same.then(|| Arc::clone(&self.known))
    }

    pub(super) fn known(&self) -> Arc<LoadingDevices> {
        Arc::clone(&self.known)
    }

    pub(super) fn all_loaded(&self) -> bool {
        self.missing == 0
    }

    /// Waits for the devices' threads. None of them waits for a piece any more.
    pub(super) fn join(&mut self, observer: &dyn Observer) {
        self.known.end();
        self.threads
            .join(|devices| observer.note(&format!("before it ends, devices must return from loading: {devices}")));
    }
}

impl Driver<'_> {
    /// Starts the devices' threads, and says to the source how much may come.
    pub(super) fn start_devices(&mut self) -> Result<(), String> {
        let (events, occupied, abort) = (self.events_in.clone(), self.occupied.clone(), Arc::clone(&self.abort));
        let news = move |news| {
            if abort.is_over() {
                // Whatever it says is an echo of why.
                return;
            }
            let failed = if let LoadNews::Failed(reason) = &news { Some(reason.clone()) } else { None };
            drop(events.send(Event::Device(news)));
            if let Some(reason) = failed {
                // The driver may be loading the monitor's state.
                occupied.raise(reason);
            }
        };
        let Some(sender) = self.peer.sender() else { return Ok(()) };
        let say = move |message| {
            if let Err(error) = sender.send(&message) {
                // The link's reading side reports the loss.
                tracing::info!(%error, "the source did not take a message");
            }
        };
        for credit in self.devices.known.credits() {
            self.peer.say(&credit);
        }
        let devices = std::mem::take(&mut self.devices.waiting);
        let started = self.devices.known.start(devices, &mut self.devices.threads, say, news);
        started.map_err(|error| format!("no thread for a device: {error}"))
    }

    pub(super) fn device_says(&mut self, news: LoadNews) -> Option<DestinationEvent> {
        match news {
            LoadNews::Loaded(device) => {
                self.devices.missing -= 1;
                self.peer.say(&ControlMessage::DeviceLoaded { device });
                self.all_loaded()
            }
            LoadNews::Failed(reason) => self.failed_to_load(&reason),
        }
    }
}
