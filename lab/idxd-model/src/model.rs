//! Devices and the memory that they access: in real time, with a thread per engine, or stepped by the caller.

pub(crate) mod portals;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::config::{ConfigError, DeviceConfig, MemoryKind, ModelConfig, QueueConfig, Script, Timing};
use crate::core::{Device, Nanos, Payload, Posting, SoftwareError, Step, Submitted};
use crate::memory::{AddressSpace, ProcessMemory};
use crate::ops::Scratch;
use crate::table::dsa::{self, code};
use crate::table::iaa;

/// A set of devices and the memory that they access. Dropping it stops and joins all threads; afterwards its queues
/// accept nothing.
#[derive(Debug)]
pub struct Model {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: ModelConfig,
    cells: Vec<Cell>,
    memory: Arc<dyn AddressSpace>,
    clock: Clock,
    stopped: AtomicBool,
    /// For the thread that steps a manual model.
    scratch: Mutex<Scratch>,
}

#[derive(Debug)]
struct Cell {
    device: Mutex<Device>,
    wake: Condvar,
}

#[derive(Debug)]
enum Clock {
    Real(Instant),
    Manual(AtomicU64),
}

impl Clock {
    fn now(&self) -> Nanos {
        match self {
            Clock::Real(start) => start.elapsed().as_nanos() as Nanos,
            Clock::Manual(now) => now.load(Ordering::Relaxed),
        }
    }
}

/// One work queue's portal.
#[derive(Clone, Debug)]
pub struct ModelQueue {
    shared: Arc<Shared>,
    device: usize,
    queue: usize,
}

/// Counters of the devices' work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Descriptors executed, members of batches included.
    pub descriptors: u64,
    /// Batches.
    pub batches: u64,
    /// Bytes that determined the duration: those written, or, for operations that only read, those read.
    pub bytes: u64,
    /// Page faults that ended a descriptor.
    pub faults: u64,
    /// Page requests made.
    pub page_requests: u64,
    /// Time of the page requests of descriptors and of batches' lists, by the timing, ns. It is part of `device_ns`.
    pub page_request_ns: u64,
    /// The longest page request, ns.
    pub longest_page_request_ns: u64,
    /// How often `ENQCMD` returned retry.
    pub retries: u64,
    /// Descriptors lost because a dedicated queue was full.
    pub overflows: u64,
    /// Errors of the software error register.
    pub software_errors: u64,
    /// Completion records that the kernel copied from the event log.
    pub event_log_records: u64,
    /// Completion records that were never written.
    pub lost_records: u64,
    /// Pages whose translation was not cached.
    pub translation_misses: u64,
    /// Translations that the device had to drop.
    pub translation_flushes: u64,
    /// Time that engines were occupied, by the timing, ns.
    pub device_ns: u64,
}

impl Model {
    /// Starts devices whose engines are threads, on this process's memory.
    pub fn start(config: ModelConfig) -> Result<Arc<Model>, ConfigError> {
        let memory = memory_of(&config)?;
        Model::start_on(config, memory)
    }

    /// Starts devices as [`Self::start`] does, on another memory.
    pub fn start_on(config: ModelConfig, memory: Arc<dyn AddressSpace>) -> Result<Arc<Model>, ConfigError> {
        let paced = config.paced;
        let shared = Shared::new(config, memory, Clock::Real(Instant::now()), paced)?;
        let model = Model { shared, threads: Mutex::default() };
        let mut threads = Vec::new();
        for (index, device) in model.shared.config.devices.iter().enumerate() {
            for engine in 0..device.engines {
                let shared = model.shared.clone();
                let name = format!("{}-engine{engine}", device.name);
                let thread = thread::Builder::new().name(name).spawn(move || shared.engine(index));
                // Threads that have been started are joined when `model` is dropped here.
                let thread = thread.map_err(|error| ConfigError::Threads { device: device.name.clone(), error });
                match thread {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        *model.threads.lock().unwrap() = threads;
                        return Err(error);
                    }
                }
            }
        }
        *model.threads.lock().unwrap() = threads;
        Ok(Arc::new(model))
    }

    /// Makes devices that do nothing until [`Model::step`] is called: no threads, a clock that only the steps move, and
    /// one order per seed. The timing always determines the order.
    pub fn manual(config: ModelConfig) -> Result<Arc<Model>, ConfigError> {
        let memory = memory_of(&config)?;
        Model::manual_on(config, memory)
    }

    /// Makes devices as [`Self::manual`] does, on another memory.
    pub fn manual_on(config: ModelConfig, memory: Arc<dyn AddressSpace>) -> Result<Arc<Model>, ConfigError> {
        let shared = Shared::new(config, memory, Clock::Manual(AtomicU64::new(0)), true)?;
        Ok(Arc::new(Model { shared, threads: Mutex::default() }))
    }

    /// Manual only: handles the next event of a device, however far in the future. Returns `false` if there is none.
    pub fn step(&self) -> bool {
        self.shared.step_until(Nanos::MAX)
    }

    /// Manual only: advances the clock by this time, and handles all events that become due.
    pub fn advance(&self, ns: Nanos) {
        let until = self.shared.clock.now() + ns;
        while self.shared.step_until(until) {}
        self.shared.set_time(until);
    }

    /// Manual only: steps until no event is left.
    pub fn settle(&self) {
        while self.step() {}
    }

    /// Returns the devices' clock, ns.
    pub fn now(&self) -> Nanos {
        self.shared.clock.now()
    }

    /// Returns the queue with this name: `wq0.0`.
    pub fn queue(&self, name: &str) -> Option<ModelQueue> {
        self.queues().into_iter().find(|queue| queue.config().name == name)
    }

    /// Returns all queues.
    pub fn queues(&self) -> Vec<ModelQueue> {
        let mut all = Vec::new();
        for (device, config) in self.shared.config.devices.iter().enumerate() {
            for queue in 0..config.queues.len() {
                all.push(ModelQueue { shared: self.shared.clone(), device, queue });
            }
        }
        all
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.shared.config
    }

    /// Adds a fault.
    pub fn inject(&self, script: &Script) {
        for cell in &self.shared.cells {
            cell.device.lock().unwrap().add_script(script.clone());
        }
    }

    /// Removes all faults, injected or configured.
    pub fn clear_scripts(&self) {
        for cell in &self.shared.cells {
            cell.device.lock().unwrap().clear_scripts();
        }
    }

    /// Puts a device into the halt state. Returns false if there is no such device.
    pub fn halt(&self, device: &str) -> bool {
        self.on_device(device, Device::halt)
    }

    /// Resets a device: its content is lost, and its queues are disabled.
    pub fn reset(&self, device: &str) -> bool {
        self.on_device(device, Device::reset)
    }

    /// Switches the event log on or off.
    pub fn event_log(&self, device: &str, on: bool) -> bool {
        self.on_device(device, |device| device.set_event_log(on))
    }

    /// Returns the software error register of a device and clears it.
    pub fn take_software_error(&self, device: &str) -> Option<SoftwareError> {
        let mut error = None;
        self.on_device(device, |device| error = device.take_software_error());
        error
    }

    fn on_device(&self, name: &str, act: impl FnOnce(&mut Device)) -> bool {
        let Some(index) = self.shared.config.devices.iter().position(|device| device.name == name) else {
            return false;
        };
        act(&mut self.shared.cells[index].device.lock().unwrap());
        self.shared.cells[index].wake.notify_all();
        true
    }

    /// Disables a queue: `ENQCMD` returns retry, its descriptors are completed. Returns false if there is no such
    /// queue.
    pub fn disable(&self, queue: &str) -> bool {
        self.set_enabled(queue, false)
    }

    /// Enables a queue.
    pub fn enable(&self, queue: &str) -> bool {
        self.set_enabled(queue, true)
    }

    fn set_enabled(&self, name: &str, enabled: bool) -> bool {
        let Some(queue) = self.queue(name) else { return false };
        queue.lock().enable(queue.queue, enabled);
        true
    }

    /// Returns the counters of all devices.
    pub fn counters(&self) -> Counters {
        let translations = self.shared.memory.translations();
        let mut sum = Counters {
            translation_misses: translations.misses,
            translation_flushes: translations.flushes,
            ..Counters::default()
        };
        for cell in &self.shared.cells {
            let of = cell.device.lock().unwrap().accounts();
            sum.descriptors += of.descriptors;
            sum.batches += of.batches;
            sum.bytes += of.bytes;
            sum.faults += of.faults;
            sum.page_requests += of.page_requests;
            sum.page_request_ns += of.page_request_ns;
            sum.longest_page_request_ns = sum.longest_page_request_ns.max(of.longest_page_request_ns);
            sum.retries += of.retries;
            sum.overflows += of.overflows;
            sum.software_errors += of.software_errors;
            sum.event_log_records += of.event_log_records;
            sum.lost_records += of.lost_records;
            sum.device_ns += of.engine_ns;
        }
        sum
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        for cell in &self.shared.cells {
            // With the lock, so that no thread is between checking `stopped` and going to sleep.
            let device = cell.device.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            cell.wake.notify_all();
            drop(device);
        }
        portals::forget(&self.shared);
        for thread in self.threads.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).drain(..) {
            // A panic of an engine has been printed already; it must not cause a second one here.
            let _ = thread.join();
        }
    }
}

fn memory_of(config: &ModelConfig) -> Result<Arc<dyn AddressSpace>, ConfigError> {
    match config.memory {
        MemoryKind::Process => Ok(Arc::new(ProcessMemory::new().map_err(ConfigError::Memory)?)),
    }
}

impl Shared {
    fn new(
        config: ModelConfig,
        memory: Arc<dyn AddressSpace>,
        clock: Clock,
        paced: bool,
    ) -> Result<Arc<Shared>, ConfigError> {
        config.check()?;
        let mut cells = Vec::new();
        for (index, device) in config.devices.iter().enumerate() {
            let seed = config.seed.wrapping_mul(0x9e37_79b9).wrapping_add(index as u64);
            let mut core = Device::new(device, seed, paced)?;
            for script in &config.faults {
                core.add_script(script.clone());
            }
            cells.push(Cell { device: Mutex::new(core), wake: Condvar::new() });
        }
        Ok(Arc::new(Shared {
            config,
            cells,
            memory,
            clock,
            stopped: AtomicBool::new(false),
            scratch: Mutex::default(),
        }))
    }

    /// Runs one engine's thread.
    fn engine(&self, index: usize) {
        let cell = &self.cells[index];
        let mut scratch = Scratch::default();
        let mut device = cell.device.lock().unwrap();
        while !self.stopped.load(Ordering::SeqCst) {
            match device.poll(self.clock.now()) {
                Step::Execute(job) => {
                    // There may be more events than this thread can handle.
                    if device.next_event().is_some_and(|at| at <= self.clock.now()) {
                        cell.wake.notify_one();
                    }
                    drop(device);
                    let done = job.run(&*self.memory, &mut scratch);
                    device = cell.device.lock().unwrap();
                    device.finish(done);
                }
                // Under the lock: records are written in the device's order.
                Step::Write(write) => {
                    let came = write.perform(&*self.memory);
                    device.written(&write, came);
                }
                Step::Completed(_) => {}
                Step::Idle { next } => {
                    device = match next {
                        None => cell.wake.wait(device).unwrap(),
                        Some(at) => {
                            let wait = Duration::from_nanos(at.saturating_sub(self.clock.now()));
                            cell.wake.wait_timeout(device, wait).unwrap().0
                        }
                    };
                }
            }
        }
    }

    fn set_time(&self, to: Nanos) {
        if let Clock::Manual(now) = &self.clock {
            now.fetch_max(to, Ordering::Relaxed);
        }
    }

    /// Handles the first event that is due by the given time. Returns `false` if there is none.
    fn step_until(&self, until: Nanos) -> bool {
        assert!(matches!(self.clock, Clock::Manual(_)), "only a manual model is stepped");
        loop {
            let due = |cell: &Cell| cell.device.lock().unwrap().next_event();
            let first = self.cells.iter().enumerate().filter_map(|(index, cell)| Some((due(cell)?, index))).min();
            let Some((at, index)) = first.filter(|&(at, _)| at <= until) else { return false };
            self.set_time(at);
            let mut device = self.cells[index].device.lock().unwrap();
            match device.poll(self.clock.now()) {
                Step::Execute(job) => {
                    drop(device);
                    let done = job.run(&*self.memory, &mut self.scratch.lock().unwrap());
                    self.cells[index].device.lock().unwrap().finish(done);
                    return true;
                }
                Step::Write(write) => {
                    let came = write.perform(&*self.memory);
                    device.written(&write, came);
                    return true;
                }
                Step::Completed(_) => return true,
                // The event required no action of the owner; the next may.
                Step::Idle { .. } => {}
            }
        }
    }
}

impl ModelQueue {
    /// Returns the queue's name, such as `wq0.0`.
    pub fn name(&self) -> &str {
        &self.config().name
    }

    /// Returns the queue's configuration.
    pub fn config(&self) -> &QueueConfig {
        &self.device().queues[self.queue]
    }

    /// Returns the configuration of the queue's device.
    pub fn device(&self) -> &DeviceConfig {
        &self.shared.config.devices[self.device]
    }

    /// Returns the timing of the queue's device.
    pub fn timing(&self) -> Timing {
        self.device().timing.clone().unwrap_or_else(|| Timing::of(self.device().kind))
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn of(shared: &Arc<Shared>, device: usize, queue: usize) -> ModelQueue {
        ModelQueue { shared: shared.clone(), device, queue }
    }

    pub(crate) fn parts(&self) -> (&Arc<Shared>, usize, usize) {
        (&self.shared, self.device, self.queue)
    }

    fn cell(&self) -> &Cell {
        &self.shared.cells[self.device]
    }

    fn lock(&self) -> MutexGuard<'_, Device> {
        self.cell().device.lock().unwrap()
    }

    fn submit(&self, posting: Posting, bytes: &[u8; 64]) -> Submitted {
        if self.shared.stopped.load(Ordering::SeqCst) {
            return if posting == Posting::Posted { Submitted::Dropped } else { Submitted::Retry };
        }
        let answer =
            self.lock().submit(self.queue, posting, Payload::Descriptor(Box::new(*bytes)), self.shared.clock.now());
        self.cell().wake.notify_one();
        answer
    }

    /// Submits by `ENQCMD`: returns true if accepted (ZF = 0), false for retry.
    ///
    /// # Panics
    ///
    /// If the first four bytes are not zero: the instruction raises a general protection fault then, because PASID and
    /// Priv come from the processor.
    pub fn enqcmd(&self, bytes: &[u8; 64]) -> bool {
        assert!(enqcmd_permits(bytes), "ENQCMD with PASID or Priv set is a general protection fault: {bytes:02x?}");
        self.submit(Posting::NonPosted, bytes) == Submitted::Accepted
    }

    /// Submits by `MOVDIR64B`, which has no result.
    pub fn movdir64b(&self, bytes: &[u8; 64]) {
        self.submit(Posting::Posted, bytes);
    }

    /// Submits by `write(2)` on the character device: returns the bytes accepted, or the error number. The rules are
    /// the kernel's: whole descriptors; no batch on DSA of version 1, where the kernel cannot check the members; the
    /// record's address aligned even if the descriptor has none; `EAGAIN` when a shared queue stays full; no flow
    /// control on a dedicated one.
    pub fn write(&self, bytes: &[u8]) -> Result<usize, i32> {
        if !bytes.len().is_multiple_of(64) {
            return Err(libc::EINVAL);
        }
        let mut taken = 0;
        for descriptor in bytes.chunks_exact(64) {
            match self.write_one(descriptor.try_into().expect("chunks of 64")) {
                Ok(()) => taken += 64,
                Err(error) if taken == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(taken)
    }

    fn write_one(&self, descriptor: &[u8; 64]) -> Result<(), i32> {
        let (dsa, version) = (self.device().kind == crate::config::Kind::Dsa, self.device().version);
        if dsa && dsa::OPERATION.get(descriptor) as u8 == code::BATCH && version <= 0x100 {
            return Err(libc::EINVAL);
        }
        let alignment = if dsa { dsa::record::BYTES } else { iaa::record::BYTES };
        if !dsa::RECORD.get(descriptor).is_multiple_of(alignment as u64) {
            return Err(libc::EINVAL);
        }
        let mut bytes = *descriptor;
        // The kernel fills in PASID and privilege.
        dsa::TRUSTED.set(&mut bytes, 0);
        if self.config().mode == crate::config::Mode::Dedicated {
            self.submit(Posting::Posted, &bytes);
            return Ok(());
        }
        for _ in 0..RETRIES {
            if self.submit(Posting::NonPosted, &bytes) == Submitted::Accepted {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        Err(libc::EAGAIN)
    }

    /// Returns the entries in use.
    pub fn occupancy(&self) -> u32 {
        self.lock().occupancy(self.queue) as u32
    }

    /// Returns how many descriptors are accepted and not complete.
    pub fn in_flight(&self) -> u32 {
        self.lock().in_flight(self.queue) as u32
    }

    /// Returns whether the queue accepts descriptors.
    pub fn is_enabled(&self) -> bool {
        !self.shared.stopped.load(Ordering::SeqCst) && self.lock().is_enabled(self.queue)
    }
}

/// The kernel's default of `enqcmds_retries`.
const RETRIES: u32 = 32;

/// Returns whether `ENQCMD` permits these bytes (Intel SDM: the low 32 bits are reserved).
pub(crate) fn enqcmd_permits(bytes: &[u8; 64]) -> bool {
    dsa::TRUSTED.get(bytes) == 0
}
