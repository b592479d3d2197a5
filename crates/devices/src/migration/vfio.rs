//! VFIO devices of one guest, shared by the monitor, which stops all of them and lets all of them run, and by the engine's threads, one
//! for each, which save and load.

use std::fmt;
use std::io::{BufRead, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna::device_state::{Ahead, DeviceId, LoadDevice, SaveDevice};
use sterna::vmm::VmmError;

use super::CHUNK;
use crate::vfio::{
    Chunk, Device, Loader, Peers, PrecopyInfo, Saver, State, VfioError, abort_together, check_peers, run_together,
    stop_together,
};

/// A guest's VFIO devices at the source. Clones are the same devices.
///
/// | when | the monitor calls |
/// |---|---|
/// | before [`Source::run`](sterna::source::Source::run) | [`save_devices`](Self::save_devices), and gives each to the source |
/// | [`SourceVmm::pause`](sterna::vmm::SourceVmm::pause), the guest's CPUs stand | [`stop`](Self::stop) |
/// | [`SourceVmm::resume`](sterna::vmm::SourceVmm::resume), before the CPUs run | [`run_on`](Self::run_on) |
/// | [`Source::run`](sterna::source::Source::run) has returned an error, and the guest runs | [`reset_failed`](Self::reset_failed) |
///
/// A migration that fails before the guest was paused resumes nothing: the devices have run all the while, and cease to be read by
/// themselves. After any failure the same devices can be moved again.
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
    /// The monitor has begun to stop the devices, and has not let them run on.
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
    /// All of a guest's VFIO devices, each in RUNNING and known to the destination by the same name and instance.
    ///
    /// # Errors
    /// One of them cannot be migrated, or not beside the others ([`Peers`]). That is found here, before anything is begun.
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

    /// At most so many bytes of each device are sent while the guest runs; no limit unless said otherwise.
    #[must_use]
    pub fn ahead_at_most(self, bytes: u64) -> Self {
        Self { ahead: bytes, ..self }
    }

    /// The devices, each for [`Source::device`](sterna::source::Source::device), for one migration.
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

    /// Stops all devices: first all of them keep from writing to each other, then all stop. The guest's CPUs have stopped. When this
    /// returns no device writes guest RAM any more, and the last report of each one's [`DmaLog`](crate::vfio::DmaLog) can be had.
    ///
    /// # Errors
    /// Some devices are stopped and some are not: [`run_on`](Self::run_on), and only then may the CPUs run.
    pub fn stop(&self) -> Result<(), VfioError> {
        let mut all = self.lock_all();
        all.iter_mut().for_each(|device| device.stopped = true);
        stop_together(&mut savers(&mut all), self.peers)
    }

    /// Has all devices run on with the state that they have. Any number of times; the guest's CPUs stand until it has succeeded.
    ///
    /// # Errors
    /// Every device is tried, and the first error given; none may write to others then. [`VfioError::NeedsReset`]: see
    /// [`reset_failed`](Self::reset_failed).
    pub fn run_on(&self) -> Result<(), VfioError> {
        let mut all = self.lock_all();
        abort_together(&mut savers(&mut all))?;
        all.iter_mut().for_each(|device| device.stopped = false);
        Ok(())
    }

    /// Resets the devices that are in ERROR, which loses their state, and names them: the guest has to be told, as by unplugging and
    /// plugging them. Where the guest stands, [`run_on`](Self::run_on) comes after it.
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

/// The most that is read ahead at once of a device that does not say how much it has, in bytes.
const UNTOLD: u64 = 64 << 20;

/// One device, for one migration.
struct Saving<D: Device> {
    devices: Arc<[Outgoing<D>]>,
    at: usize,
    ahead: u64,
    begun: bool,
    estimate: u64,
    /// Of a device that does not say how much it has, bytes read since it last had nothing.
    since_dry: u64,
    buffer: Vec<u8>,
}

impl<D: Device> Saving<D> {
    fn lock(&self) -> MutexGuard<'_, Saved<D>> {
        self.devices[self.at].lock()
    }

    /// Reads what comes next, if the device is stopped or, as is wanted, is not.
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
        // No more than there is now: a device that changes as fast as it is read would keep the guest from ever being stopped.
        let told = saved.saver.remaining().unwrap_or_default().ahead;
        drop(saved);
        let most = told.map_or(UNTOLD, sum).max(CHUNK as u64);
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
        if told.is_none() {
            // What it had since it last had nothing, by the next time it may have again. Until it has nothing there is more to come.
            self.since_dry += read;
            self.estimate = self.since_dry;
            if dry && more {
                self.since_dry = 0;
            }
        }
        Ok(if more { Ahead::Later } else { Ahead::Nothing })
    }

    /// An estimate that cannot be had ends nothing: the last one counts.
    fn remaining(&mut self) -> u64 {
        let now = self.lock().saver.remaining();
        if let Ok(now) = now
            && let Some(told) = now.ahead.map(sum).max(now.stopped)
        {
            self.estimate = told;
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
}

/// Of what is to be read ahead, all.
fn sum(ahead: PrecopyInfo) -> u64 {
    ahead.initial_bytes.saturating_add(ahead.dirty_bytes)
}

impl<D: Device> Drop for Saving<D> {
    fn drop(&mut self) {
        let mut saved = self.lock();
        if saved.stopped {
            // From STOP_COPY to STOP, now that nobody waits for it any more. All of its state was read, or it runs on after an error: either way
            // nothing depends on it.
            let _ = saved.saver.finish();
        } else if self.begun {
            // Where a migration ends before the guest was paused nobody calls `run_on`, and the device is still in PRE_COPY. It runs in any
            // case; what keeps it from being moved again is said when that is tried.
            let _ = saved.saver.abort();
        }
    }
}

/// A guest's VFIO devices at the destination. Clones are the same devices.
///
/// The monitor gives what [`load_devices`](Self::load_devices) has to its [`Destination`](sterna::destination::Destination), and calls
/// [`run`](Self::run) in [`DestinationVmm::resume`](sterna::vmm::DestinationVmm::resume), before the guest's CPUs run. All devices have
/// loaded by then, and stand.
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
    /// Devices as they were opened, in RUNNING. What they hold is lost when their state comes.
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

    /// The devices, each for [`Destination::device`](sterna::destination::Destination::device), for one migration.
    pub fn load_devices(&self) -> Vec<(DeviceId, Box<dyn LoadDevice>)>
    where
        D: 'static,
    {
        let load_device = |at: usize| -> (DeviceId, Box<dyn LoadDevice>) {
            (self.devices[at].id.clone(), Box::new(Loading { devices: Arc::clone(&self.devices), at }))
        };
        (0..self.devices.len()).map(load_device).collect()
    }

    /// Has all devices run with what was loaded: the guest belongs here, and its CPUs do not run yet. There is no way back.
    ///
    /// # Errors
    /// Every device is tried, and the first error given; it can be called again.
    pub fn run(&self) -> Result<(), VfioError> {
        let mut all: Vec<_> = self.devices.iter().map(Incoming::lock).collect();
        run_together(&mut all.iter_mut().map(|loader| &mut **loader).collect::<Vec<_>>())
    }

    /// After a migration that failed: resets all devices, which are as they were opened then, for another try or another guest.
    ///
    /// # Errors
    /// Every device is tried, and the first error given. A device that runs for the guest is not reset.
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
