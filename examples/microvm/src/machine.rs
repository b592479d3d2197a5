//! The machine: RAM, vCPUs, serial ports and devices put together, and what a migration asks of them.

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
use sterna_guest::memory::Bad;
use sterna_guest::share::{Counters, RAM_START};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::handed_in::HandedInLog;
use sterna_memory::dirty::union::UnionLog;
use sterna_memory::dirty::write_protect::WriteProtectLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

/// A machine. Made paused and empty; [`boot`](Self::boot) begins a new guest in it, [`load`](Self::load) goes on with one
/// whose RAM is brought into [`blocks`](Self::blocks).
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

/// What is there once there is a guest.
struct Guest {
    layout: GuestLayout,
    workload: Workload,
    threads: Vec<JoinHandle<()>>,
}

impl Machine {
    /// A machine whose guest's lines go to `output`.
    ///
    /// # Errors
    /// What cannot be as configured, or is not to be had here.
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
        let handed_in = HandedInLog::new(&pages);
        let marker = handed_in.marker();
        let Engine { vcpus, on_kvm, tracking, description, log } = Engine::new(config, &ram, &layout)?;
        let log: Box<dyn DirtyLog> = match log {
            // KVM's logs do not see the monitor's own writes.
            Some(log) => Box::new(UnionLog::new(vec![log, Box::new(handed_in)])),
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
        let behind = RAM_START + config.guest_bytes();
        let disk = config.disk.as_ref().map(|path| Disk::new(&common, behind, path).map(Arc::new)).transpose()?;
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

    /// In one line, what runs the vCPUs and how written pages are noted.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Whether KVM runs the vCPUs.
    pub fn is_on_kvm(&self) -> bool {
        self.on_kvm
    }

    /// How written pages are noted.
    pub fn tracking(&self) -> Tracking {
        self.tracking
    }

    /// Devices with a state of their own, by number.
    pub fn devices(&self) -> &[Arc<Scratch>] {
        &self.devices
    }

    /// The disk, where there is one.
    pub fn disk(&self) -> Option<&Disk> {
        self.disk.as_deref()
    }

    /// RAM, for whoever moves it.
    pub fn blocks(&self) -> &[Block] {
        self.common.ram.blocks()
    }

    /// The same RAM, for whoever uses it longer than this machine: it stays mapped as long as this is held.
    pub fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.common.ram)
    }

    /// The dirty log of this RAM, by blocks as in [`blocks`](Self::blocks). There is one: none after the first call.
    /// It keeps the RAM mapped, also beyond the machine.
    pub fn take_dirty_log(&self) -> Option<Box<dyn DirtyLog>> {
        lock(&self.log).take()
    }

    /// Begins a new guest; it stays paused.
    ///
    /// # Errors
    /// [`Error::Order`] where there is a guest already.
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
    /// [`Error::Order`] where there is none or a device lacks its state, [`Error::Vcpu`] where it has ended by itself.
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

    /// Stops the guest. When this returns no vCPU and no device runs, all that they did is in RAM and in what [`save`](Self::save)
    /// writes, and nothing changes until [`resume`](Self::resume).
    ///
    /// # Errors
    /// [`Error::Vcpu`] where it has ended by itself. It stands then, too.
    pub fn pause(&self) -> Result<(), Error> {
        let paused = self.common.gate.pause();
        self.devices.iter().for_each(|device| device.pause());
        self.disk.iter().for_each(|disk| disk.pause());
        paused
    }

    /// Writes the state of a paused guest, all but its RAM and its [`devices`](Self::devices).
    ///
    /// # Errors
    /// [`Error::Order`] where there is no guest or it runs; what `to` or KVM say.
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

    /// Goes on with a saved guest: reads its state, and no byte more. It stays paused. RAM may come before or after this,
    /// but before [`resume`](Self::resume).
    ///
    /// # Errors
    /// [`Error::State`] where the state is none or of another machine; then the machine is as before. [`Error::Vcpu`]
    /// where KVM does not take it; then this machine is of no use any more. [`Error::Order`] where there is a guest.
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

    /// Holds the vCPUs for so many percent of the time, at most 99; 0 lets them run.
    pub fn throttle(&self, percent: u8) {
        self.common.gate.throttle(percent.min(99));
    }

    /// Changes how fast the guest writes pages again.
    pub fn set_write_rate(&self, rate: Rate) {
        self.common.rates.set_write(rate);
    }

    /// Changes how fast the guest verifies its pages.
    pub fn set_check_rate(&self, rate: Rate) {
        self.common.rates.set_check(rate);
    }

    /// How far the guest is. Read from its memory: without a guest, or before its RAM is there, it says so.
    pub fn report(&self) -> Report {
        self.report_of(&self.shares())
    }

    /// Waits until `reached` says so of a report, which it is asked whenever vCPUs get somewhere.
    ///
    /// # Errors
    /// [`Error::Late`] where it does not in `time`, [`Error::Vcpu`] where the guest ended by itself.
    pub fn wait_until(&self, time: Duration, mut reached: impl FnMut(&Report) -> bool) -> Result<Report, Error> {
        let shares = self.shares();
        let mut report = self.report_of(&shares);
        let arrived = self.common.gate.wait_until(Instant::now() + time, || {
            report = self.report_of(&shares);
            reached(&report)
        })?;
        if arrived { Ok(report) } else { Err(Error::Late { seconds: time.as_secs_f64(), report: report.to_string() }) }
    }

    /// Where counters are, and how many pages each counts. Read without a lock, as a migration may have to bring the page
    /// first, and others need the lock to get on with that.
    fn shares(&self) -> Vec<(u64, u64)> {
        let guest = lock(&self.guest);
        let shares = guest.as_ref().map_or(&[][..], |guest| &guest.layout.shares);
        shares.iter().map(|share| (share.counters, share.share.count)).collect()
    }

    fn report_of(&self, shares: &[(u64, u64)]) -> Report {
        let vcpus = shares.iter().map(|&(counters, pages)| (self.common.ram.read::<Counters>(counters), pages));
        Report { vcpus: vcpus.collect() }
    }

    /// Where a page lies that the guest numbers so (as in [`Report::first_bad`]): block, and page of 4096 bytes in it.
    pub fn place_of(&self, page: u64) -> Option<(usize, u64)> {
        let guest = lock(&self.guest);
        let mut shares = guest.as_ref()?.layout.shares.iter().map(|share| share.share);
        let share = shares.find(|share| (share.first..share.first + share.count).contains(&page))?;
        Some(self.common.ram.page_of(share.pages + (page - share.first) * PAGE))
    }

    /// The guest's own time: it stands while the guest does, and moves with it.
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

    /// Starts the threads of a guest that is all there.
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

    /// Has all threads end.
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
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What runs the vCPUs.
struct Engine {
    vcpus: Vec<SharedVcpu>,
    on_kvm: bool,
    tracking: Tracking,
    description: String,
    /// KVM's.
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

    /// The inner error: there is no KVM here.
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

/// How far a guest is: its own counters. They are the guest's memory, and so are only as right as that; but no guest that
/// lost a page counts as if it had not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Of each vCPU, and its pages.
    vcpus: Vec<(Counters, u64)>,
}

impl Report {
    fn sum(&self, of: impl Fn(&Counters) -> u64) -> u64 {
        self.vcpus.iter().map(|(counters, _)| of(counters)).sum()
    }

    /// Pages that the guest works on.
    pub fn pages(&self) -> u64 {
        self.vcpus.iter().map(|(_, pages)| pages).sum()
    }

    /// Whether all of them were filled.
    pub fn is_filled(&self) -> bool {
        self.vcpus.iter().all(|(counters, pages)| counters.progress.filled == *pages)
    }

    /// Pages written again after filling; one that was written twice counts twice.
    pub fn written(&self) -> u64 {
        self.sum(|counters| counters.written)
    }

    /// Pages verified.
    pub fn checked(&self) -> u64 {
        self.sum(|counters| counters.checked)
    }

    /// Steps that the vCPU that did the fewest has done; a guest that stands still does none.
    pub fn steps(&self) -> u64 {
        self.vcpus.iter().map(|(counters, _)| counters.steps).min().unwrap_or(0)
    }

    /// How often every vCPU has come to the end of its pages since `earlier`. After two, each page was verified at least
    /// once since then.
    pub fn passes_since(&self, earlier: &Report) -> u64 {
        let passes = self.vcpus.iter().zip(&earlier.vcpus);
        passes.map(|((now, _), (then, _))| now.passes.saturating_sub(then.passes)).min().unwrap_or(0)
    }

    /// Wrong pages found, one that stays wrong each time.
    pub fn bad_pages(&self) -> u64 {
        self.sum(|counters| counters.bad)
    }

    /// The first wrong page of the first vCPU that found any.
    pub fn first_bad(&self) -> Option<Bad> {
        self.vcpus.iter().find_map(|(counters, _)| counters.first_bad.get())
    }

    /// Everything that the guest found wrong: pages, tables, orders or counters that were not what was written last.
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
