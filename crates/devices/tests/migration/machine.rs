//! A model monitor with VFIO devices, around the guest of the engine's tests; and threads that act like such devices:
//! their state changes, and they write to the guest's memory.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_codec::MethodChoice;
use sterna_devices::migration::{VfioDestination, VfioSource};
use sterna_devices::vfio::model::{Config, Fabric, ModelDevice};
use sterna_devices::vfio::{DmaLog, DmaMapping, DmaRange, Peers, State, VfioError};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::{Before, Destination};
use sterna_engine::device_state::{DeviceChannels, DeviceId, LoadDevice, SaveDevice};
use sterna_engine::migration::{GuestState, MigrationError};
use sterna_engine::report::{ReceiveReport, Report};
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_engine::vmm::{DestinationVmm, ResumeReason, SourceVmm, VmmError};
use sterna_memory::dirty::DirtyLog;
use sterna_memory::dirty::union::UnionLog;
use sterna_test_kit::Random;

use crate::guest::{Memory, Monitor, PAGE, Running, Workload};
use crate::reached::{By, Reached};
use crate::server::Manner;

/// The CPUs write these pages of each block, the devices those behind them, so that each written page must be in its
/// writer's log.
const CPUS: u64 = 40;
const BLOCKS: [usize; 2] = [160, 80];
const WORKLOAD: Workload = Workload { writers: 1, span: CPUS, seed: 7, burst: 8 };

pub(crate) fn id(at: usize) -> DeviceId {
    DeviceId::new("nic", at as u32)
}

/// Returns a state of `size` bytes, of the device with this number.
pub(crate) fn some_state(number: usize, size: usize) -> Vec<u8> {
    (0..size).map(|at| (at ^ (at >> 8).wrapping_mul(31) ^ number.wrapping_mul(77)) as u8).collect()
}

/// Returns the devices' mappings of the guest's memory: each block at a separate address.
fn mappings(pages: &[u64]) -> Vec<DmaMapping> {
    let mapping =
        |(block, pages): (usize, &u64)| DmaMapping { iova: (block as u64) << 32, pages: *pages, block, first_page: 0 };
    pages.iter().enumerate().map(mapping).collect()
}

/// The devices' work.
struct Work {
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Work {
    fn begin(devices: &[ModelDevice], memory: &Arc<Memory>) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (ended, devices, memory) = (Arc::clone(&over), devices.to_vec(), Arc::clone(memory));
        let thread = std::thread::spawn(move || {
            let mut numbers = Random::new(0);
            while !ended.load(Ordering::Relaxed) {
                for (number, device) in devices.iter().enumerate() {
                    let turn = numbers.next_u64();
                    let random = (turn >> 33) as usize;
                    device.run(random % 50_000);
                    let block = random % BLOCKS.len();
                    let page = CPUS as usize + (random >> 4) % (BLOCKS[block] - CPUS as usize);
                    let word = page * (PAGE / 8) + number;
                    let range = DmaRange { iova: ((block as u64) << 32) + word as u64 * 8, length: 8 };
                    device.dma(range, || memory.words(block)[word].store(turn, Ordering::Relaxed));
                }
                std::thread::yield_now();
            }
        });
        Self { over, thread }
    }

    fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

/// The monitor at the source.
pub(crate) struct From {
    pub(crate) monitor: Monitor,
    pub(crate) devices: VfioSource<Reached>,
    reached: Vec<Reached>,
    pub(crate) models: Vec<ModelDevice>,
    pub(crate) fabric: Fabric,
    /// The devices of the other side, which must not run while these do.
    there: Fabric,
    /// Devices that had failed and were reset when the guest was resumed.
    pub(crate) reset: Vec<DeviceId>,
    work: Option<Work>,
}

impl From {
    fn work(&mut self) {
        if self.work.is_none() {
            self.work = Some(Work::begin(&self.models, &self.monitor.memory));
        }
    }

    fn rest(&mut self) {
        self.work.take().into_iter().for_each(Work::end);
    }

    pub(crate) fn start(&mut self) {
        self.monitor.start();
        self.work();
    }

    pub(crate) fn stop(&mut self) {
        self.monitor.stop();
        self.rest();
    }
}

impl SourceVmm for From {
    fn name(&self) -> String {
        "with devices 1".into()
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        SourceVmm::pause(&mut self.monitor)?;
        self.devices.stop()?;
        assert_eq!(self.fabric.running(), 0);
        self.rest();
        Ok(())
    }

    fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError> {
        assert_eq!(self.there.running(), 0);
        let mut tries = 0;
        while let Err(error) = self.devices.run_on() {
            tries += 1;
            match error {
                VfioError::NeedsReset { .. } => self.reset.extend(self.devices.reset_failed().unwrap_or_default()),
                // A retry may succeed, but not if a server is gone.
                _ if tries < 20 => {}
                error => return Err(error.into()),
            }
        }
        SourceVmm::resume(&mut self.monitor, reason)?;
        self.work();
        Ok(())
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.monitor.save(state)
    }
}

/// The monitor at the destination.
pub(crate) struct To {
    pub(crate) monitor: Monitor,
    pub(crate) devices: VfioDestination<Reached>,
    pub(crate) models: Vec<ModelDevice>,
    pub(crate) fabric: Fabric,
    there: Fabric,
}

impl DestinationVmm for To {
    fn name(&self) -> String {
        "with devices 1".into()
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.monitor.load(state)
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        assert_eq!(self.there.running(), 0);
        self.devices.run()?;
        DestinationVmm::resume(&mut self.monitor)
    }
}

/// A guest with devices, on both hosts.
pub(crate) struct Guest {
    pub(crate) running: Running,
    pub(crate) from: From,
    pub(crate) to: To,
    pub(crate) cancel: Cancel,
    peers: Peers,
}

pub(crate) type Ends = (Result<Report, MigrationError>, Result<ReceiveReport, MigrationError>);

/// A test's wrapper around the engine's devices.
pub(crate) type Around<T> = dyn Fn(usize, Box<T>) -> Box<T>;

impl Guest {
    /// Makes a guest with these devices at the source, and those at the destination.
    pub(crate) fn new(here: Vec<Config>, there: Vec<Config>, peers: Peers) -> Self {
        Self::reached(here, there, peers, &[By::Calls, By::Calls])
    }

    /// Makes a guest with devices behind vfio-user servers, each with this manner.
    pub(crate) fn by_servers(here: Vec<Config>, there: Vec<Config>, manners: [Manner; 2]) -> Self {
        Self::reached(here, there, Peers::Separate, &manners.map(By::VfioUser))
    }

    fn reached(here: Vec<Config>, there: Vec<Config>, peers: Peers, by: &[By; 2]) -> Self {
        let fabrics = [Fabric::default(), Fabric::default()];
        let models = |configs: Vec<Config>, fabric| -> Vec<ModelDevice> {
            configs.into_iter().map(|config| ModelDevice::new(config.on(fabric))).collect()
        };
        let (here, there) = (models(here, &fabrics[0]), models(there, &fabrics[1]));
        let reached = |models: &[ModelDevice], by: &By| -> Vec<_> {
            models.iter().map(|model| Reached::new(model.clone(), by.clone())).collect()
        };
        let named = |devices: &[Reached]| -> Vec<_> {
            devices.iter().cloned().enumerate().map(|(at, device)| (id(at), device)).collect()
        };
        let (source, destination) = (reached(&here, &by[0]), reached(&there, &by[1]));
        let running = Running::default();
        let monitor = || Monitor::new(&Memory::new(BLOCKS[0], BLOCKS[1]), &running, WORKLOAD).0;
        let from = From {
            monitor: monitor(),
            devices: VfioSource::new(named(&source), peers).unwrap(),
            reached: source,
            models: here,
            fabric: fabrics[0].clone(),
            there: fabrics[1].clone(),
            reset: Vec::new(),
            work: None,
        };
        let to = To {
            monitor: monitor(),
            devices: VfioDestination::new(named(&destination)).unwrap(),
            models: there,
            fabric: fabrics[1].clone(),
            there: fabrics[0].clone(),
        };
        Self { running, from, to, cancel: Cancel::new(), peers }
    }

    /// Makes a guest with so many devices that have all optional features, each with a state of `size` bytes.
    pub(crate) fn with(count: usize, size: usize) -> Self {
        let here = (0..count).map(|number| Config::with_state(some_state(number, size)));
        Self::new(here.collect(), (0..count).map(|_| Config::empty(size)).collect(), Peers::MayWrite)
    }

    pub(crate) fn migrate(&mut self, ways: DeviceChannels) -> Ends {
        self.migrate_with(ways, &|_, device| device, &|_, device| device)
    }

    /// Moves the guest, with a wrapper around each device at the source and at the destination.
    pub(crate) fn migrate_with(
        &mut self,
        ways: DeviceChannels,
        saving: &Around<dyn SaveDevice>,
        loading: &Around<dyn LoadDevice>,
    ) -> Ends {
        // The log of the CPUs belongs to a monitor; the guest's memory stays.
        let (monitor, cpus) = Monitor::new(&self.from.monitor.memory, &self.running, WORKLOAD);
        self.from.stop();
        self.from.monitor = monitor;
        let pages = self.from.monitor.memory.pages();
        let dma_log = |(at, device): (usize, &Reached)| -> Box<dyn DirtyLog> {
            Box::new(DmaLog::new(device.clone(), id(at).to_string(), &pages, mappings(&pages)).unwrap())
        };
        let mut logs: Vec<Box<dyn DirtyLog>> = vec![Box::new(cpus)];
        logs.extend(self.from.reached.iter().enumerate().map(dma_log));
        self.from.start();

        let mut destination = Destination::new(self.to.monitor.memory.ram()).memory_before(Before::Anything);
        destination = destination.linger(Duration::from_millis(200));
        for (number, (id, device)) in self.to.devices.load_devices().into_iter().enumerate().rev() {
            destination = destination.device(id, loading(number, device));
        }
        let listening = destination.listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();

        let mut source = Source::new(self.from.monitor.memory.ram(), Box::new(UnionLog::new(logs)));
        // So long that the guest is paused also on a busy machine.
        source = source.method(MethodChoice::default()).downtime(Duration::from_secs(20)).device_channels(ways);
        for (number, (id, device)) in self.from.devices.save_devices().into_iter().enumerate() {
            source = source.device(id, saving(number, device));
        }
        std::thread::scope(|scope| {
            let to = &mut self.to;
            let receiving = scope.spawn(move || listening.run(to, &Cancel::new(), &()));
            let sent = source.run(address, &Security::Insecure, &mut self.from, &self.cancel, &());
            let received = receiving.join().unwrap();
            if sent.as_ref().is_err_and(|error| error.guest == GuestState::RunsAtSource) {
                // A device may have failed while the guest ran.
                self.from.reset.extend(self.from.devices.reset_failed().unwrap());
            }
            (sent, received)
        })
    }

    pub(crate) fn has_moved(&self) {
        assert!(!self.from.monitor.runs() && self.to.monitor.runs());
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
        assert!(self.from.models.iter().all(|model| !model.is_in().runs()));
        assert_eq!((self.from.fabric.running(), self.to.fabric.running()), (0, self.to.models.len()));
        for (from, to) in self.from.models.iter().zip(&self.to.models) {
            assert_eq!(from.contents(), to.contents());
        }
        self.no_violations();
    }

    pub(crate) fn stays(&self) {
        assert!(self.from.monitor.runs() && !self.to.monitor.runs());
        assert_eq!((self.running.now(), self.running.ever_twice()), (1, false));
        let states: Vec<_> = self.from.models.iter().map(ModelDevice::is_in).collect();
        assert!(states.iter().all(|state| *state == State::Running), "{states:?}");
        assert_eq!(self.to.fabric.running(), 0);
        self.no_violations();
    }

    /// Checks that no device could have written to a stopped one. Devices that are stopped one after another must not
    /// write to each other; their targets are unknown here.
    pub(crate) fn no_violations(&self) {
        if self.peers == Peers::Separate {
            return;
        }
        assert_eq!(self.from.fabric.violations(), [""; 0]);
        assert_eq!(self.to.fabric.violations(), [""; 0]);
    }

    /// Restores the destination as it was before.
    pub(crate) fn clear_destination(&mut self) {
        self.to.devices.abort().unwrap();
        assert!(self.to.models.iter().all(|model| model.is_in() == State::Running && !model.runs_guest()));
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.from.stop();
    }
}
