//! The driver's part for the devices whose state is sent separately from the monitor's: it starts them with the channels, saves them when
//! the guest is paused, and waits for them.

use std::sync::Arc;

use sterna_wire::control::DeviceChannels;
use sterna_wire::header::ChannelKind;
use sterna_wire::switchover::SourceEvent;

use super::{Driver, Event};
use crate::device_state::save::{self, PieceTarget, Route, SaveEvent};
use crate::device_state::{SavingDevices, SharedDevice, Threads};
use crate::entry::Pipeline;
use crate::send::{SendChannel, SendContext};
use crate::source::rounds::Order;
use crate::switchover::after;

/// The devices and their progress.
pub(super) struct Devices {
    pub(super) known: Arc<SavingDevices>,
    /// The devices, until their threads are started.
    waiting: Vec<SharedDevice>,
    threads: Threads,
    /// How many devices have not saved.
    unsaved: usize,
}

impl Devices {
    pub(super) fn new(known: Arc<SavingDevices>, devices: Vec<SharedDevice>) -> Self {
        Self { known, unsaved: devices.len(), waiting: devices, threads: Threads::default() }
    }
}

impl Driver<'_> {
    /// Waits for the devices' threads. The alarm has been raised, or all devices have saved.
    pub(super) fn end_devices(&mut self) {
        self.devices.known.end();
        let (observer, reason) = (self.kernel.observer, self.kernel.reason());
        self.devices.threads.join(|devices| {
            observer.note(&format!("{reason}; before it ends, devices must return from saving: {devices}"));
        });
    }

    /// Opens the channels that carry device state only, if there are any.
    pub(super) fn open_device_channels(&self, context: &SendContext) -> Result<Arc<Vec<SendChannel>>, String> {
        let open =
            |index| self.kernel.session.open(self.security, self.kernel.to(), ChannelKind::DeviceState, index, context);
        let channels = (1..=self.kernel.session.device_channels).map(open).collect::<Result<_, _>>();
        Ok(Arc::new(channels.map_err(|error| error.to_string())?))
    }

    /// Starts the devices' threads, which save the state that can be sent before the guest is paused.
    pub(super) fn start_devices(
        &mut self,
        pipeline: &Arc<Pipeline>,
        own: &Arc<Vec<SendChannel>>,
        stream: &Arc<SendChannel>,
    ) -> Result<(), String> {
        let known = Arc::clone(&self.devices.known);
        self.kernel.abort.on_end(move || known.end());
        let target = || PieceTarget {
            devices: Arc::clone(&self.devices.known),
            route: match self.settings.device_channels {
                DeviceChannels::Mixed => Route::Mixed(Arc::clone(pipeline)),
                DeviceChannels::Own(_) => Route::Own(Arc::clone(own)),
                DeviceChannels::Serial => Route::Serial(Arc::clone(stream)),
            },
            packet_size: self.kernel.session.packet_size,
        };
        let (events, occupied, abort) =
            (self.kernel.events.clone(), self.occupied.clone(), Arc::clone(&self.kernel.abort));
        let news = move |news| {
            if abort.is_over() {
                // An echo: the alarm has the reason.
                return;
            }
            let failed = if let SaveEvent::Failed(reason) = &news { Some(reason.clone()) } else { None };
            events.send(Event::Device(news));
            if let Some(reason) = failed {
                // The driver may be saving the monitor's state.
                occupied.raise(reason);
            }
        };
        let devices = std::mem::take(&mut self.devices.waiting);
        let started = save::start(devices, &mut self.devices.threads, target, news);
        started.map_err(|error| format!("no thread for a device: {error}"))
    }

    /// Records that the destination has loaded what the monitor saved ahead, or that it saved nothing.
    pub(super) fn monitor_loaded_ahead(&mut self) {
        self.devices.known.monitor_loaded_ahead();
        self.permit_stop();
    }

    /// As [`Driver::monitor_loaded_ahead`], for a device.
    pub(super) fn device_loaded_ahead(&mut self, device: u16) {
        self.devices.known.loaded_ahead(device);
        self.permit_stop();
    }

    /// Returns whether everything that was saved ahead has been loaded, so that the guest may be stopped.
    pub(super) fn may_stop(&self) -> bool {
        self.devices.known.all_loaded_ahead()
    }

    fn permit_stop(&self) {
        if let Some(moving) = self.moving.as_ref().filter(|_| self.may_stop()) {
            moving.order(Order::MayStop);
        }
    }

    pub(super) fn handle_device(&mut self, news: SaveEvent) -> Option<SourceEvent> {
        match news {
            SaveEvent::NothingAhead(device) => {
                self.device_loaded_ahead(device);
                None
            }
            SaveEvent::Saved => {
                self.devices.unsaved -= 1;
                let next = self.devices.unsaved == 0 && self.devices.known.precede_monitor();
                let saved = if next { self.save_monitor() } else { Ok(()) };
                saved.err().map(|reason| SourceEvent::Failed { reason })
            }
            SaveEvent::Failed(reason) => Some(SourceEvent::Failed { reason }),
        }
    }

    /// Returns the event by which the destination may prepare: all state was handed over, and after that the last page was acknowledged.
    pub(super) fn final_state_sent(&mut self) -> Option<SourceEvent> {
        if self.kernel.abort.is_over() {
            return None;
        }
        let saved = self.devices.known.all_saved().flatten();
        self.kernel.moments.saved = self.kernel.moments.saved.max(saved);
        self.kernel.due = Some((after(self.step_time()), "loading at the destination"));
        Some(SourceEvent::FinalStateSent)
    }
}
