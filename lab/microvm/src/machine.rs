//! The machine: RAM, vCPUs, serial ports and devices, with the operations that a migration needs.

use crate::config::{Backing, BlockConfig, Config, Execution, Rate, Tracking, Workload};
use crate::disk::{DISK_RAM, DISK_RAM_NAME, Disk};
use crate::error::Error;
use crate::gate::Gate;
use crate::layout::{GuestLayout, PAGE};
use crate::ram::{Block, GuestRam};
use crate::scratch::Scratch;
use crate::serial::SerialPort;
use crate::state::Saved;
use crate::threads::ThreadVcpu;
use crate::vcpu::{self, Common, Rates, SharedVcpu};
use std::fmt;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use sterna::{DirtyLog, DirtyLogError, PageBitmap, ReportedLog, UnionLog, WriteProtectLog};
use sterna_guest::memory::Bad;
use sterna_guest::share::{Counters, RAM_START};

/// A machine. A new one is paused and empty. [`boot`](Self::boot) begins a new guest in it; [`load`](Self::load) continues a guest
/// whose RAM is copied into [`blocks`](Self::blocks).
///
/// All methods may be called from any thread.
pub struct Machine {
    common: Arc<Common>,
    vcpus: Vec<SharedVcpu>,
    devices: Vec<Arc<Scratch>>,
    disk: Option<Arc<Disk>>,
    on_kvm: bool,
    description: String,
    tracking: Tracking,
    log: Mutex<Option<Box<dyn DirtyLog>>>,
    guest: Mutex<Option<Guest>>,
    config: Config,
}

/// The machine's guest, once it has one.
struct Guest {
    layout: GuestLayout,
    workload: Workload,
    threads: Vec<JoinHandle<()>>,
}

impl Machine {
    /// Makes a machine whose guest's lines go to `output`.
    ///
    /// # Errors
    /// The configuration is not possible, or this host lacks something.
    pub fn new(config: &Config, output: Box<dyn Write + Send>) -> Result<Self, Error> {
        let mut blocks = config.blocks.clone();
        if config.disk.is_some() {
            blocks.push(BlockConfig { name: DISK_RAM_NAME.to_owned(), bytes: DISK_RAM, backing: Backing::Anonymous });
        }
        let ram = Arc::new(GuestRam::new(&blocks)?);
        let layout = GuestLayout::new(config.guest_bytes(), config.vcpus, &config.workload)?;
        let device = |(number, bytes)| Scratch::new(number, bytes).map(Arc::new);
        let devices = (0..).zip(config.devices.iter().copied()).map(device).collect::<Result<_, _>>()?;
        let gate = Gate::new(config.vcpus)?;
        let pages: Vec<u64> = ram.blocks().iter().map(|block| block.bytes() / PAGE).collect();
        let reported = ReportedLog::new(&pages);
        let marker = reported.marker();
        let Engine { vcpus, on_kvm, tracking, description, log } = Engine::new(config, &ram, &layout)?;
        let log: Box<dyn DirtyLog> = match log {
            // KVM's logs do not contain the monitor's own writes.
            Some(log) => Box::new(UnionLog::new(vec![log, Box::new(reported)])),
            None => {
                let start = |block: &Block| block.start().expose_provenance().get();
                let ranges = ram.blocks().iter().map(|block| start(block)..start(block) + block.bytes() as usize);
                Box::new(WriteProtectLog::new(ranges.collect())?)
            }
        };
        let log = Box::new(LogOfRam { log, _ram: Arc::clone(&ram) });
        let output = Arc::new(Mutex::new(output));
        let serial = (0..config.vcpus).map(|_| SerialPort::new(&output)).collect();
        let common = Arc::new(Common { gate, ram, serial, rates: Rates::default(), marker });
        let end = RAM_START + config.guest_bytes();
        let disk = config.disk.as_ref().map(|path| Disk::new(&common, end, path).map(Arc::new)).transpose()?;
        let machine = Self {
            common,
            vcpus,
            devices,
            disk,
            on_kvm,
            description,
            tracking,
            log: Mutex::new(Some(log)),
            guest: Mutex::new(None),
            config: config.clone(),
        };
        Ok(machine)
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// Returns one line about what runs the vCPUs and how written pages are tracked.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Returns whether KVM runs the vCPUs.
    pub fn is_on_kvm(&self) -> bool {
        self.on_kvm
    }

    /// Returns how written pages are tracked.
    pub fn tracking(&self) -> Tracking {
        self.tracking
    }

    /// Returns the devices with a state of their own, by number.
    pub fn devices(&self) -> &[Arc<Scratch>] {
        &self.devices
    }

    /// Returns the disk, if there is one.
    pub fn disk(&self) -> Option<&Disk> {
        self.disk.as_deref()
    }

    /// Returns the blocks of RAM.
    pub fn blocks(&self) -> &[Block] {
        self.common.ram.blocks()
    }

    /// Returns the RAM, which stays mapped as long as the returned value is held, also beyond the machine's end.
    pub fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.common.ram)
    }

    /// Takes the only dirty log of this RAM, by blocks as in [`blocks`](Self::blocks); none after the first call.
    /// The log keeps the RAM mapped, also beyond the machine's end.
    pub fn take_dirty_log(&self) -> Option<Box<dyn DirtyLog>> {
        lock(&self.log).take()
    }

    /// Begins a new guest, which stays paused.
    ///
    /// # Errors
    /// [`Error::Order`] if there is a guest already.
    pub fn boot(&self) -> Result<(), Error> {
        let mut guest = self.no_guest()?;
        let workload = self.config.workload;
        let layout = GuestLayout::new(self.config.guest_bytes(), self.vcpus.len(), &workload)?;
        for share in &layout.shares {
            self.common.ram.write(share.layout, share.share);
        }
        #[cfg(has_kvm)]
        if self.on_kvm {
            crate::kvm::place_payload(&self.common.ram, &layout);
        }
        for (vcpu, share) in self.vcpus.iter().zip(&layout.shares) {
            vcpu::lock(vcpu)
                .boot(&layout, share)
                .map_err(|why| Error::Vcpu { vcpu: share.share.vcpu as usize, why })?;
        }
        self.devices.iter().for_each(|device| device.fill());
        *guest = Some(self.begin(layout, workload)?);
        Ok(())
    }

    /// Lets the guest run.
    ///
    /// # Errors
    /// [`Error::Order`] if there is no guest or a device lacks its state, [`Error::Vcpu`] if a vCPU has ended by itself.
    pub fn resume(&self) -> Result<(), Error> {
        if lock(&self.guest).is_none() {
            return Err(Error::Order("there is no guest to resume: boot or load one"));
        }
        if !self.devices.iter().all(|device| device.is_whole()) {
            return Err(Error::Order("there is nothing in one of the devices: load it before the guest is resumed"));
        }
        self.common.gate.resume()?;
        self.devices.iter().for_each(|device| device.resume());
        self.disk.iter().for_each(|disk| disk.resume());
        Ok(())
    }

    /// Pauses the guest. When this returns, no vCPU and no device runs, all their effects are in RAM and in the output of
    /// [`save`](Self::save), and nothing changes until [`resume`](Self::resume).
    ///
    /// # Errors
    /// [`Error::Vcpu`] if a vCPU has ended by itself. The guest is paused then, too.
    pub fn pause(&self) -> Result<(), Error> {
        let paused = self.common.gate.pause();
        self.devices.iter().for_each(|device| device.pause());
        self.disk.iter().for_each(|disk| disk.pause());
        paused
    }

    /// Writes the state of a paused guest, without its RAM and its [`devices`](Self::devices).
    ///
    /// # Errors
    /// [`Error::Order`] if there is no guest or it runs; the errors of `to` and KVM.
    pub fn save(&self, to: &mut dyn Write) -> Result<(), Error> {
        let guest = lock(&self.guest);
        let guest = guest.as_ref().ok_or(Error::Order("there is no guest to save: boot or load one"))?;
        if !self.common.gate.is_paused() {
            return Err(Error::Order("the guest runs: pause it before its state is saved"));
        }
        let rates = &self.common.rates;
        let workload =
            Workload { write: rates.write(), check: rates.check(), say_every: rates.say_every(), ..guest.workload };
        let save = |(index, vcpu): (usize, &SharedVcpu)| {
            vcpu::lock(vcpu).save().map_err(|why| Error::Vcpu { vcpu: index, why })
        };
        let saved = Saved {
            blocks: self.blocks().iter().map(|block| (block.name().to_owned(), block.bytes())).collect(),
            workload,
            clock: self.common.gate.clock(),
            serial: self.common.serial.iter().map(SerialPort::save).collect(),
            vcpus: self.vcpus.iter().enumerate().map(save).collect::<Result<_, _>>()?,
        };
        saved.write(to)
    }

    /// Continues a saved guest, which stays paused: reads its state, and no byte more. RAM may come before or after this,
    /// but before [`resume`](Self::resume).
    ///
    /// # Errors
    /// [`Error::State`] if the state is invalid or of another machine; the machine is then unchanged. [`Error::Vcpu`] if KVM
    /// refuses the state; the machine is then unusable. [`Error::Order`] if there is a guest already.
    pub fn load(&self, from: &mut dyn Read) -> Result<(), Error> {
        let mut guest = self.no_guest()?;
        let saved = Saved::read(from)?;
        let has: Vec<_> = self.blocks().iter().map(|block| (block.name(), block.bytes())).collect();
        if !saved.blocks.iter().map(|(name, bytes)| (name.as_str(), *bytes)).eq(has.iter().copied()) {
            return Err(Error::State(format!("it is of RAM blocks {:?}, this machine has {has:?}", saved.blocks)));
        }
        if [saved.vcpus.len(), saved.serial.len()] != [self.vcpus.len(); 2] {
            let (was, is) = (saved.vcpus.len(), self.vcpus.len());
            return Err(Error::State(format!("it is of {was} vCPUs, this machine has {is}")));
        }
        let layout = GuestLayout::new(self.config.guest_bytes(), self.vcpus.len(), &saved.workload)
            .map_err(|error| Error::State(error.to_string()))?;
        for (port, saved) in self.common.serial.iter().zip(&saved.serial) {
            port.load(saved)?;
        }
        for ((vcpu, state), share) in self.vcpus.iter().zip(&saved.vcpus).zip(&layout.shares) {
            vcpu::lock(vcpu)
                .load(state, share)
                .map_err(|why| Error::Vcpu { vcpu: share.share.vcpu as usize, why: format!("its state: {why}") })?;
        }
        self.common.gate.set_clock(saved.clock);
        *guest = Some(self.begin(layout, saved.workload)?);
        Ok(())
    }

    /// Holds the vCPUs for `percent` of the time, at most 99; 0 lets them run.
    pub fn throttle(&self, percent: u8) {
        self.common.gate.throttle(percent.min(99));
    }

    /// Changes how fast the guest rewrites pages.
    pub fn set_write_rate(&self, rate: Rate) {
        self.common.rates.set_write(rate);
    }

    /// Changes how fast the guest verifies its pages.
    pub fn set_check_rate(&self, rate: Rate) {
        self.common.rates.set_check(rate);
    }

    /// Returns the guest's progress, read from its memory; without a guest, or before its RAM has arrived, there is none.
    pub fn report(&self) -> Report {
        self.report_of(&self.shares())
    }

    /// Waits until `reached` returns true for a report. It is called whenever a vCPU has made progress.
    ///
    /// # Errors
    /// [`Error::Late`] if that does not happen within `time`, [`Error::Vcpu`] if a vCPU has ended by itself.
    pub fn wait_until(&self, time: Duration, mut reached: impl FnMut(&Report) -> bool) -> Result<Report, Error> {
        let shares = self.shares();
        let mut report = self.report_of(&shares);
        let arrived = self.common.gate.wait_until(Instant::now() + time, || {
            report = self.report_of(&shares);
            reached(&report)
        })?;
        if arrived { Ok(report) } else { Err(Error::Late { seconds: time.as_secs_f64(), report: report.to_string() }) }
    }

    /// Returns where the counters are, and how many pages each counts. Counters are read without the lock: a migration may have to
    /// bring their page first, and needs the lock for that.
    fn shares(&self) -> Vec<(u64, u64)> {
        let guest = lock(&self.guest);
        let shares = guest.as_ref().map_or(&[][..], |guest| &guest.layout.shares);
        shares.iter().map(|share| (share.counters, share.share.count)).collect()
    }

    fn report_of(&self, shares: &[(u64, u64)]) -> Report {
        let vcpus = shares.iter().map(|&(counters, pages)| (self.common.ram.read::<Counters>(counters), pages));
        Report { vcpus: vcpus.collect() }
    }

    /// Returns the block of a page by the guest's number of it (as in [`Report::first_bad`]), and the page of 4096 bytes in the block.
    pub fn place_of(&self, page: u64) -> Option<(usize, u64)> {
        let guest = lock(&self.guest);
        let mut shares = guest.as_ref()?.layout.shares.iter().map(|share| share.share);
        let share = shares.find(|share| (share.first..share.first + share.count).contains(&page))?;
        Some(self.common.ram.page_of(share.pages + (page - share.first) * PAGE))
    }

    /// Returns the guest's own time. It stops while the guest is paused, and moves with it.
    pub fn clock(&self) -> Duration {
        Duration::from_nanos(self.common.gate.clock())
    }

    fn no_guest(&self) -> Result<MutexGuard<'_, Option<Guest>>, Error> {
        let guest = lock(&self.guest);
        if guest.is_some() {
            Err(Error::Order("this machine has a guest already; make another one"))
        } else {
            Ok(guest)
        }
    }

    /// Starts the threads of a complete guest.
    fn begin(&self, layout: GuestLayout, workload: Workload) -> Result<Guest, Error> {
        let rates = &self.common.rates;
        rates.set_write(workload.write);
        rates.set_check(workload.check);
        rates.set_say_every(workload.say_every);
        let mut threads = Vec::new();
        let mut spawn = |name: String, work: Box<dyn FnOnce() + Send>| {
            let thread = thread::Builder::new().name(name).spawn(work);
            thread.map(|thread| threads.push(thread)).map_err(Error::system("start a thread"))
        };
        let common = Arc::clone(&self.common);
        let mut spawned = spawn("throttle".to_owned(), Box::new(move || common.gate.run_throttle()));
        for (vcpu, share) in self.vcpus.iter().zip(&layout.shares) {
            let (common, vcpu, share, vcpus) = (Arc::clone(&self.common), Arc::clone(vcpu), *share, self.vcpus.len());
            let work = Box::new(move || vcpu::run(&common, &vcpu, &share, vcpus));
            spawned = spawned.and_then(|()| spawn(format!("vcpu-{}", share.share.vcpu), work));
        }
        for device in &self.devices {
            let (number, device) = (device.number(), Arc::clone(device));
            spawned = spawned.and_then(|()| spawn(format!("scratch-{number}"), Box::new(move || device.run())));
        }
        if let Some(disk) = self.disk.clone() {
            spawned = spawned.and_then(|()| spawn("disk".to_owned(), Box::new(move || disk.run())));
        }
        if let Err(error) = spawned {
            self.quit();
            return Err(error);
        }
        Ok(Guest { layout, workload, threads })
    }

    /// Ends all threads.
    fn quit(&self) {
        self.common.gate.quit();
        self.devices.iter().for_each(|device| device.quit());
        self.disk.iter().for_each(|disk| disk.quit());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.quit();
        for thread in lock(&self.guest).take().into_iter().flat_map(|guest| guest.threads) {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the vCPUs.
struct Engine {
    vcpus: Vec<SharedVcpu>,
    on_kvm: bool,
    tracking: Tracking,
    description: String,
    /// KVM's dirty log.
    log: Option<Box<dyn DirtyLog>>,
}

impl Engine {
    fn new(config: &Config, ram: &Arc<GuestRam>, layout: &GuestLayout) -> Result<Self, Error> {
        let why_not = match config.execution {
            Execution::Threads => "as asked for".to_owned(),
            Execution::Auto | Execution::Kvm => match Self::on_kvm(config, ram, layout)? {
                Ok(engine) => return Ok(engine),
                Err(error) if config.execution == Execution::Kvm => return Err(error),
                Err(error) => error.to_string(),
            },
        };
        if config.execution == Execution::Threads && config.tracking != Tracking::WriteProtect {
            return Err(Error::Config("without KVM only write protection notes written pages".to_owned()));
        }
        let vcpu = |share| -> SharedVcpu { Arc::new(Mutex::new(Box::new(ThreadVcpu::new(Arc::clone(ram), share)))) };
        Ok(Self {
            vcpus: layout.shares.iter().copied().map(vcpu).collect(),
            on_kvm: false,
            tracking: Tracking::WriteProtect,
            description: format!(
                "{} threads of this process do the guest's work, no KVM ({why_not}); written pages by write protection",
                config.vcpus
            ),
            log: None,
        })
    }

    /// Makes the vCPUs on KVM. The inner error means that there is no KVM here.
    #[cfg(has_kvm)]
    fn on_kvm(config: &Config, ram: &Arc<GuestRam>, layout: &GuestLayout) -> Result<Result<Self, Error>, Error> {
        let kvm = match crate::kvm::open() {
            Ok(kvm) => kvm,
            Err(error) => return Ok(Err(error)),
        };
        let machine = crate::kvm::KvmMachine::new(kvm, ram, &layout.shares, config.tracking)?;
        let vcpu = |vcpu| -> SharedVcpu { Arc::new(Mutex::new(Box::new(vcpu))) };
        let tracking = match config.tracking {
            Tracking::Log => "KVM's dirty log",
            Tracking::Ring => "KVM's dirty rings",
            Tracking::WriteProtect => "write protection",
        };
        Ok(Ok(Self {
            vcpus: machine.vcpus.into_iter().map(vcpu).collect(),
            on_kvm: true,
            tracking: config.tracking,
            description: format!("{} vCPUs on KVM; written pages by {tracking}", config.vcpus),
            log: machine.log,
        }))
    }

    #[cfg(not(has_kvm))]
    fn on_kvm(_: &Config, _: &Arc<GuestRam>, _: &GuestLayout) -> Result<Result<Self, Error>, Error> {
        Ok(Err(Error::Config("the payload is for x86-64 only".to_owned())))
    }
}

/// A dirty log and the memory that it watches.
struct LogOfRam {
    // Dropped in this order.
    log: Box<dyn DirtyLog>,
    _ram: Arc<GuestRam>,
}

impl DirtyLog for LogOfRam {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.log.start()
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        self.log.collect(block, dirty)
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}

/// A guest's progress: its own counters. They lie in the guest's memory, so they are only as correct as that; but a guest that
/// lost a page counts the fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The counters of each vCPU, and the number of its pages.
    vcpus: Vec<(Counters, u64)>,
}

impl Report {
    fn sum(&self, of: impl Fn(&Counters) -> u64) -> u64 {
        self.vcpus.iter().map(|(counters, _)| of(counters)).sum()
    }

    /// Returns the number of pages that the guest works on.
    pub fn pages(&self) -> u64 {
        self.vcpus.iter().map(|(_, pages)| pages).sum()
    }

    /// Returns whether all pages are filled.
    pub fn is_filled(&self) -> bool {
        self.vcpus.iter().all(|(counters, pages)| counters.progress.filled == *pages)
    }

    /// Returns how many pages were rewritten after filling; a page that was written twice counts twice.
    pub fn written(&self) -> u64 {
        self.sum(|counters| counters.written)
    }

    /// Returns how many pages were verified.
    pub fn checked(&self) -> u64 {
        self.sum(|counters| counters.checked)
    }

    /// Returns the number of steps of the slowest vCPU; a paused guest makes no steps.
    pub fn steps(&self) -> u64 {
        self.vcpus.iter().map(|(counters, _)| counters.steps).min().unwrap_or(0)
    }

    /// Returns the number of steps that every vCPU has made since `earlier`. After two, each has done all orders that it had then.
    pub fn steps_since(&self, earlier: &Report) -> u64 {
        let steps = self.vcpus.iter().zip(&earlier.vcpus);
        steps.map(|((now, _), (then, _))| now.steps.saturating_sub(then.steps)).min().unwrap_or(0)
    }

    /// Returns how often every vCPU has come to the end of its pages since `earlier`. After two passes, each page was verified at
    /// least once since then.
    pub fn passes_since(&self, earlier: &Report) -> u64 {
        let passes = self.vcpus.iter().zip(&earlier.vcpus);
        passes.map(|((now, _), (then, _))| now.passes.saturating_sub(then.passes)).min().unwrap_or(0)
    }

    /// Returns how many wrong pages were found; a page that stays wrong counts each time.
    pub fn bad_pages(&self) -> u64 {
        self.sum(|counters| counters.bad)
    }

    /// Returns the first wrong page of the first vCPU that found any.
    pub fn first_bad(&self) -> Option<Bad> {
        self.vcpus.iter().find_map(|(counters, _)| counters.first_bad.get())
    }

    /// Returns the number of all faults that the guest found: wrong pages, tables, orders or counters.
    pub fn faults(&self) -> u64 {
        self.sum(|counters| counters.bad + counters.table_broken + counters.out_of_step)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pages, filled) = (self.pages(), self.sum(|counters| counters.progress.filled));
        let (written, checked, faults) = (self.written(), self.checked(), self.faults());
        write!(f, "{filled} of {pages} pages filled, {written} written, {checked} verified, {faults} faults")?;
        match self.first_bad() {
            Some(bad) => {
                write!(f, ", first page {} expected generation {} found {}", bad.index, bad.expected, bad.fault)
            }
            None => Ok(()),
        }
    }
}
