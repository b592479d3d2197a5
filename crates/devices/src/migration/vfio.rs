//! The VFIO devices of one guest, shared by the monitor, which stops and runs all of them, and by the engine's threads,
//! one for each device, which save and load.

use std::fmt;
use std::io::{BufRead, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_engine::device_state::{Ahead, DeviceId, LoadDevice, SaveDevice};
use sterna_engine::vmm::VmmError;

use super::CHUNK;
use crate::vfio::{
    Chunk, Device, Loader, Peers, PrecopyInfo, Saver, State, VfioError, abort_together, check_peers, run_together,
    stop_together,
};

/// A guest's VFIO devices at the source. Clones are the same devices.
///
/// | when | the monitor calls |
/// |---|---|
/// | before [`Source::run`](sterna_engine::source::Source::run) | [`save_devices`](Self::save_devices), whose devices it passes to the source |
/// | [`SourceVmm::pause`](sterna_engine::vmm::SourceVmm::pause), the guest's CPUs are stopped | [`stop`](Self::stop) |
/// | [`SourceVmm::resume`](sterna_engine::vmm::SourceVmm::resume), before the CPUs run | [`run_on`](Self::run_on) |
/// | [`Source::run`](sterna_engine::source::Source::run) has returned an error, and the guest runs | [`reset_failed`](Self::reset_failed) |
///
/// A migration that fails before the guest was paused calls no `resume`: the devices have been running all the time,
/// and the engine stops reading them. After any failure the same devices can be moved again.
pub struct VfioSource<D: Device> {
    devices: Arc<[Outgoing<D>]>,
    peers: Peers,
    ahead: u64,
}

struct Outgoing<D: Device> {
    id: DeviceId,
    state: Mutex<Saved<D>>,
}

struct Saved<D: Device> {
    saver: Saver<D>,
    /// Whether the monitor has begun to stop the devices and has not resumed them since.
    stopped: bool,
}

impl<D: Device> Outgoing<D> {
    fn lock(&self) -> MutexGuard<'_, Saved<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> Clone for VfioSource<D> {
    fn clone(&self) -> Self {
        Self { devices: Arc::clone(&self.devices), ..*self }
    }
}

impl<D: Device> fmt::Debug for VfioSource<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.devices.iter().map(|device| &device.id)).finish()
    }
}

impl<D: Device> VfioSource<D> {
    /// Makes the source of all of a guest's VFIO devices, each in RUNNING and known to the destination by the same name
    /// and instance.
    ///
    /// # Errors
    /// One of them cannot be migrated, or not together with the others ([`Peers`]). This is detected here, before
    /// anything is begun.
    pub fn new(devices: impl IntoIterator<Item = (DeviceId, D)>, peers: Peers) -> Result<Self, VfioError> {
        let outgoing = |(id, device): (DeviceId, D)| {
            let saver = Saver::new(device, id.to_string())?;
            Ok(Outgoing { id, state: Mutex::new(Saved { saver, stopped: false }) })
        };
        let devices = devices.into_iter().map(outgoing).collect::<Result<Arc<[_]>, VfioError>>()?;
        let mut all: Vec<_> = devices.iter().map(Outgoing::lock).collect();
        check_peers(&savers(&mut all), peers)?;
        drop(all);
        Ok(Self { devices, peers, ahead: u64::MAX })
    }

    /// Limits the bytes of each device that are sent while the guest runs; no limit by default.
    #[must_use]
    pub fn ahead_at_most(self, bytes: u64) -> Self {
        Self { ahead: bytes, ..self }
    }

    /// Returns the devices, each for [`Source::device`](sterna_engine::source::Source::device).
    pub fn save_devices(&self) -> Vec<(DeviceId, Box<dyn SaveDevice>)>
    where
        D: 'static,
    {
        let save_device = |at: usize| -> (DeviceId, Box<dyn SaveDevice>) {
            let devices = Arc::clone(&self.devices);
            let saving =
                Saving { devices, at, ahead: self.ahead, begun: false, estimate: 0, since_dry: 0, buffer: Vec::new() };
            (self.devices[at].id.clone(), Box::new(saving))
        };
        (0..self.devices.len()).map(save_device).collect()
    }

    /// Stops all devices, after the guest's CPUs: first all of them stop writing to each other, then all stop. When
    /// this returns no device writes guest RAM any more, and the last report of each one's
    /// [`DmaLog`](crate::vfio::DmaLog) can be collected.
    ///
    /// # Errors
    /// Some devices are stopped and others not: call [`run_on`](Self::run_on), and resume the CPUs only after that.
    pub fn stop(&self) -> Result<(), VfioError> {
        let mut all = self.lock_all();
        all.iter_mut().for_each(|device| device.stopped = true);
        stop_together(&mut savers(&mut all), self.peers)
    }

    /// Resumes all devices with their present state. It may be called repeatedly; the guest's CPUs stay stopped until
    /// it has succeeded.
    ///
    /// # Errors
    /// Every device is tried, and the first error returned; none may write to others then. [`VfioError::NeedsReset`]:
    /// see [`reset_failed`](Self::reset_failed).
    pub fn run_on(&self) -> Result<(), VfioError> {
        let mut all = self.lock_all();
        abort_together(&mut savers(&mut all))?;
        all.iter_mut().for_each(|device| device.stopped = false);
        Ok(())
    }

    /// Resets the devices that are in ERROR, which loses their state, and returns their names: the guest must be
    /// notified, for example by unplugging and plugging them. If the guest is paused, call [`run_on`](Self::run_on)
    /// afterwards.
    ///
    /// # Errors
    /// A device cannot be reset.
    pub fn reset_failed(&self) -> Result<Vec<DeviceId>, VfioError> {
        let mut failed = Vec::new();
        for device in self.devices.iter() {
            let mut saved = device.lock();
            if saved.saver.state() == Some(State::Error) {
                saved.saver.reset()?;
                failed.push(device.id.clone());
            }
        }
        Ok(failed)
    }

    /// The only place where more than one lock is taken, always in this order.
    fn lock_all(&self) -> Vec<MutexGuard<'_, Saved<D>>> {
        self.devices.iter().map(Outgoing::lock).collect()
    }
}

fn savers<'a, D: Device>(all: &'a mut [MutexGuard<'_, Saved<D>>]) -> Vec<&'a mut Saver<D>> {
    all.iter_mut().map(|device| &mut device.saver).collect()
}

/// Maximum bytes read ahead at once from a device that does not report how much state it has.
const UNREPORTED_AHEAD: u64 = 64 << 20;

/// One device, for one migration.
struct Saving<D: Device> {
    devices: Arc<[Outgoing<D>]>,
    at: usize,
    ahead: u64,
    begun: bool,
    estimate: u64,
    /// For a device that does not report how much state it has: bytes read since it last had none.
    since_dry: u64,
    buffer: Vec<u8>,
}

impl<D: Device> Saving<D> {
    fn lock(&self) -> MutexGuard<'_, Saved<D>> {
        self.devices[self.at].lock()
    }

    /// Reads the next chunk if the device is stopped, or running, as `stopped` requires.
    fn read(&mut self, stopped: bool) -> Result<Chunk, VfioError> {
        self.buffer.resize(CHUNK, 0);
        let mut saved = self.devices[self.at].lock();
        if saved.stopped == stopped { saved.saver.read(&mut self.buffer) } else { Ok(Chunk::NothingNow) }
    }
}

impl<D: Device> SaveDevice for Saving<D> {
    fn save_ahead(&mut self, state: &mut dyn Write) -> Result<Ahead, VmmError> {
        let mut saved = self.devices[self.at].lock();
        if !std::mem::replace(&mut self.begun, true) {
            saved.saver.begin(self.ahead)?;
        }
        // No more than there is now: a device that changes as fast as it is read would otherwise keep the guest from
        // ever being paused.
        let reported = saved.saver.remaining().unwrap_or_default().ahead;
        drop(saved);
        let most = reported.map_or(UNREPORTED_AHEAD, sum).max(CHUNK as u64);
        let mut read = 0;
        let mut dry = false;
        while read < most && !dry {
            match self.read(false)? {
                Chunk::Bytes(count) => {
                    state.write_all(&self.buffer[..count])?;
                    read += count as u64;
                }
                Chunk::NothingNow | Chunk::End => dry = true,
            }
        }
        let more = {
            let saved = self.lock();
            !saved.stopped && saved.saver.may_read_ahead()
        };
        if reported.is_none() {
            // The bytes read since the device last had none estimate how many it will have the next time.
            self.since_dry += read;
            self.estimate = self.since_dry;
            if dry && more {
                self.since_dry = 0;
            }
        }
        Ok(if more { Ahead::Later } else { Ahead::Nothing })
    }

    /// Returns the device's estimate. If it fails, the last one applies.
    fn remaining(&mut self) -> u64 {
        let now = self.lock().saver.remaining();
        if let Ok(now) = now
            && let Some(left) = now.ahead.map(sum).max(now.stopped)
        {
            self.estimate = left;
        }
        self.estimate
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        loop {
            match self.read(true)? {
                Chunk::Bytes(count) => state.write_all(&self.buffer[..count])?,
                Chunk::End => break,
                Chunk::NothingNow => {
                    let device = self.devices[self.at].id.to_string();
                    let phase = "running: the monitor did not stop it (VfioSource::stop) when it paused the guest";
                    return Err(VfioError::Order { device, call: "save", phase }.into());
                }
            }
        }
        Ok(())
    }

    fn saving_ended(&mut self) {
        let begun = std::mem::take(&mut self.begun);
        (self.estimate, self.since_dry) = (0, 0);
        let mut saved = self.lock();
        if saved.stopped {
            // From STOP_COPY to STOP, since saving is over. Its whole state was read, or it will be resumed after an
            // error: in both cases an error here does not matter.
            let _ = saved.saver.finish();
        } else if begun {
            // If a migration ends before the guest was paused, `run_on` is not called, and the device is still in
            // PRE_COPY. It runs in any case; an obstacle to moving it again is reported by the next attempt.
            let _ = saved.saver.abort();
        }
    }
}

/// Returns all bytes that can be read ahead.
fn sum(ahead: PrecopyInfo) -> u64 {
    ahead.initial_bytes.saturating_add(ahead.dirty_bytes)
}

/// A guest's VFIO devices at the destination. Clones are the same devices.
///
/// The monitor passes the devices of [`load_devices`](Self::load_devices) to its
/// [`Destination`](sterna_engine::destination::Destination), and calls [`run`](Self::run) in
/// [`DestinationVmm::resume`](sterna_engine::vmm::DestinationVmm::resume), before the guest's CPUs run. All devices are
/// loaded and stopped then.
pub struct VfioDestination<D: Device> {
    devices: Arc<[Incoming<D>]>,
}

struct Incoming<D: Device> {
    id: DeviceId,
    loader: Mutex<Loader<D>>,
}

impl<D: Device> Incoming<D> {
    fn lock(&self) -> MutexGuard<'_, Loader<D>> {
        self.loader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> Clone for VfioDestination<D> {
    fn clone(&self) -> Self {
        Self { devices: Arc::clone(&self.devices) }
    }
}

impl<D: Device> fmt::Debug for VfioDestination<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.devices.iter().map(|device| &device.id)).finish()
    }
}

impl<D: Device> VfioDestination<D> {
    /// Takes devices as they were opened, in RUNNING. Loading a state discards their content.
    ///
    /// # Errors
    /// One of them cannot be migrated.
    pub fn new(devices: impl IntoIterator<Item = (DeviceId, D)>) -> Result<Self, VfioError> {
        let incoming = |(id, device): (DeviceId, D)| {
            let loader = Mutex::new(Loader::new(device, id.to_string())?);
            Ok(Incoming { id, loader })
        };
        Ok(Self { devices: devices.into_iter().map(incoming).collect::<Result<_, VfioError>>()? })
    }

    /// Returns the devices, each for [`Destination::device`](sterna_engine::destination::Destination::device), for one
    /// migration.
    pub fn load_devices(&self) -> Vec<(DeviceId, Box<dyn LoadDevice>)>
    where
        D: 'static,
    {
        let load_device = |at: usize| -> (DeviceId, Box<dyn LoadDevice>) {
            (self.devices[at].id.clone(), Box::new(Loading { devices: Arc::clone(&self.devices), at }))
        };
        (0..self.devices.len()).map(load_device).collect()
    }

    /// Runs all devices with the loaded state: the guest belongs to this host, and its CPUs do not run yet. This cannot
    /// be undone.
    ///
    /// # Errors
    /// Every device is tried, and the first error returned; it can be called again.
    pub fn run(&self) -> Result<(), VfioError> {
        let mut all: Vec<_> = self.devices.iter().map(Incoming::lock).collect();
        run_together(&mut all.iter_mut().map(|loader| &mut **loader).collect::<Vec<_>>())
    }

    /// Resets all devices after a failed migration, to their state after opening, for another attempt or another guest.
    ///
    /// # Errors
    /// Every device is tried, and the first error returned. A device that runs for the guest is not reset.
    pub fn abort(&self) -> Result<(), VfioError> {
        self.devices.iter().map(|device| device.lock().abort()).fold(Ok(()), Result::and)
    }
}

/// One device, for one migration.
struct Loading<D: Device> {
    devices: Arc<[Incoming<D>]>,
    at: usize,
}

impl<D: Device> LoadDevice for Loading<D> {
    fn load(&mut self, state: &mut dyn BufRead) -> Result<(), VmmError> {
        let device = &self.devices[self.at];
        device.lock().begin()?;
        loop {
            let bytes = state.fill_buf()?;
            let count = bytes.len();
            if count == 0 {
                break;
            }
            device.lock().write(bytes)?;
            state.consume(count);
        }
        Ok(device.lock().finish()?)
    }
}
