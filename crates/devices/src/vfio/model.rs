//! A VFIO device in software, for tests of code that migrates devices. The model permits what the header allows and
//! refuses everything else, with the errno of the header or, where the header leaves it open, of the kernel's code.
//!
//! | of a device | in the model |
//! |---|---|
//! | states and paths between them | [`arcs`]: the header's single steps, and the shortest path made of them |
//! | optional states | [`Config::flags`]; a state that is not offered is `EINVAL` |
//! | ERROR | by a [`Fault`], or a state that does not load; everything but a reset is `EINVAL` then |
//! | streams | exist from the step that begins them to the step that ends them; then `ENODEV`. Reading one that is written, or the reverse, is `EBADF` |
//! | pre-copy | the first pass, then what [`ModelDevice::run`] changed; `ENOMSG` when there is nothing, and the end only in STOP_COPY |
//! | `VFIO_MIG_GET_PRECOPY_INFO` | exact here; `EINVAL` outside of PRE_COPY and PRE_COPY_P2P, `ENOTTY` without |
//! | loading | checked at RESUMING → STOP: `EINVAL` unless it is exactly the state of a device of the same size |
//! | short reads and writes | [`Config::max_transfer`] |
//! | reset | RUNNING, the streams are dead, the state is a fresh device's |
//! | DMA logging | [`Config::dma_page_size`]; ranges and page sizes checked as the kernel's core does |
//! | DMA between devices | [`Fabric`] |
//!
//! The model's state is bytes that only [`ModelDevice::run`] changes, and only while the device runs, so the loaded
//! state can be compared with the saved one. Time, drivers' behaviour beyond the header, and real DMA are not modelled.
//!
//! ```
//! use sterna_devices::vfio::model::{Config, ModelDevice};
//! use sterna_devices::vfio::{Chunk, Loader, Saver};
//!
//! let (from, to) = (ModelDevice::new(Config::with_state(vec![7; 5000])), ModelDevice::new(Config::empty(5000)));
//! let (mut saver, mut loader) = (Saver::new(from, "nic")?, Loader::new(to.clone(), "nic")?);
//! loader.begin()?;
//! saver.stop()?;
//! let mut buffer = [0; 1024];
//! while let Chunk::Bytes(bytes) = saver.read(&mut buffer)? {
//!     loader.write(&buffer[..bytes])?;
//! }
//! saver.finish()?;
//! loader.finish()?;
//! assert_eq!(to.contents(), vec![7; 5000]);
//! # Ok::<(), sterna_devices::vfio::VfioError>(())
//! ```

pub mod arcs;
mod dma;
mod fabric;
mod stream;

pub use fabric::{Fabric, Step};

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::{Data, Device, DmaRange, Flags, PrecopyInfo, State};
use stream::Saving;

/// The configuration of a device.
#[derive(Clone, Debug)]
pub struct Config {
    /// The device's features; `None` if it does not migrate (`ENOTTY`).
    pub flags: Option<Flags>,
    /// The device's state.
    pub state: Vec<u8>,
    /// Whether the state is a guest's from the start, as at a source.
    pub live: bool,
    /// Maximum bytes per read and write of a stream; randomly fewer, if [`seed`](Self::seed) is given.
    pub max_transfer: usize,
    /// Makes the length of each read and write random.
    pub seed: Option<u64>,
    /// Returns 0 bytes instead of `ENOMSG` if there is nothing to read in PRE_COPY. This violates the header, but a
    /// driver in the kernel's own tree does it (`samples/vfio-mdev/mtty.c`).
    pub zero_for_nothing: bool,
    /// Whether an invalid state takes the device to ERROR; otherwise the device stays in RESUMING. The header allows
    /// both.
    pub bad_state_is_error: bool,
    /// The smallest page of the DMA log; `None`: the device has no log (`ENOTTY`).
    pub dma_page_size: Option<u64>,
    /// Whether the device reports how much there is to read (Linux 6.2 and later).
    pub reports_size: bool,
    /// The other devices of the guest.
    pub fabric: Fabric,
}

impl Config {
    /// Makes a guest's device with all optional features.
    pub fn with_state(state: Vec<u8>) -> Self {
        Self {
            flags: Some(Flags::STOP_COPY.with_p2p().with_pre_copy()),
            state,
            live: true,
            max_transfer: usize::MAX,
            seed: None,
            zero_for_nothing: false,
            bad_state_is_error: false,
            dma_page_size: Some(4096),
            reports_size: true,
            fabric: Fabric::default(),
        }
    }

    /// Makes a device that no guest has used, for `size` bytes of state.
    pub fn empty(size: usize) -> Self {
        Self { live: false, ..Self::with_state(vec![0; size]) }
    }

    /// Sets other flags.
    #[must_use]
    pub fn flags(mut self, flags: Flags) -> Self {
        self.flags = Some(flags);
        self
    }

    /// Adds the device to the fabric of other devices.
    #[must_use]
    pub fn on(mut self, fabric: &Fabric) -> Self {
        self.fabric = fabric.clone();
        self
    }
}

/// A call on a device, for [`Fault`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Device::migration`]
    Migration,
    /// [`Device::state`]
    State,
    /// [`Device::set_state`], to any state.
    SetState,
    /// [`Device::set_state`], to this one.
    SetStateTo(State),
    /// [`Device::data_size`]
    DataSize,
    /// [`Device::reset`]
    Reset,
    /// [`Data::read`]
    Read,
    /// [`Data::write`]
    Write,
    /// [`Data::precopy_info`]
    PrecopyInfo,
    /// [`Device::dma_logging_start`]
    DmaLoggingStart,
    /// [`Device::dma_logging_report`]
    DmaLoggingReport,
    /// [`Device::dma_logging_stop`]
    DmaLoggingStop,
}

/// The state after a failed change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// The old state.
    Unchanged,
    /// After this many steps of its path; at most all but the last.
    Midway(usize),
    /// In ERROR.
    InError,
}

/// One call that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The call.
    pub call: Call,
    /// Number of successful calls before.
    pub after: u32,
    /// The errno of the failure.
    pub errno: i32,
    /// For changes of state.
    pub leaves: Leaves,
}

impl Fault {
    /// Makes the first such call fail once, with `EIO`, without a change of state.
    pub fn of(call: Call) -> Self {
        Self { call, after: 0, errno: libc::EIO, leaves: Leaves::Unchanged }
    }
}

/// The device. A clone is the same device, as a duplicate of its file descriptor would be.
#[derive(Clone, Debug)]
pub struct ModelDevice(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    config: Config,
    number: usize,
    state: State,
    contents: Vec<u8>,
    live: bool,
    stream: Option<Stream>,
    streams: u64,
    chance: u64,
    faults: VecDeque<Fault>,
    log: Option<dma::Log>,
}

#[derive(Debug)]
enum Stream {
    Saving(Saving),
    Loading(Vec<u8>),
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl ModelDevice {
    /// Makes a device in RUNNING.
    pub fn new(config: Config) -> Self {
        let number = config.fabric.add(config.live);
        let contents = config.state.clone();
        let chance = config.seed.unwrap_or_default();
        Self(Arc::new(Mutex::new(Inner {
            number,
            state: State::Running,
            contents,
            live: config.live,
            stream: None,
            streams: 0,
            chance,
            faults: VecDeque::new(),
            log: None,
            config,
        })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call fail. Faults of the same call apply one after the other.
    pub fn fail(&self, fault: Fault) {
        self.inner().faults.push_back(fault);
    }

    /// Returns its content.
    pub fn contents(&self) -> Vec<u8> {
        self.inner().contents.clone()
    }

    /// Returns its state: as [`Device::state`], but without faults.
    pub fn is_in(&self) -> State {
        self.inner().state
    }

    /// Returns whether it runs with a guest's state.
    pub fn runs_guest(&self) -> bool {
        let inner = self.inner();
        inner.live && inner.state.runs()
    }

    /// Lets the device work: changes the byte at `at` of its content. Returns false if it is stopped.
    pub fn run(&self, at: usize) -> bool {
        let mut inner = self.inner();
        if !inner.state.runs() || at >= inner.contents.len() {
            return false;
        }
        inner.contents[at] = inner.contents[at].wrapping_add(1);
        if let Some(Stream::Saving(saving)) = &mut inner.stream {
            saving.changed(at);
        }
        true
    }

    /// Lets the device write to memory. Returns false if it is stopped.
    pub fn dma_write(&self, range: DmaRange) -> bool {
        self.dma(range, || {})
    }

    /// Does the same as [`dma_write`](Self::dma_write) with real memory: `write` writes the memory, and the device is
    /// not stopped meanwhile.
    pub fn dma(&self, range: DmaRange, write: impl FnOnce()) -> bool {
        let mut inner = self.inner();
        if !inner.state.runs() {
            return false;
        }
        write();
        if let Some(log) = &mut inner.log {
            log.note(range);
        }
        true
    }
}

impl Inner {
    /// Returns the fault that applies to this call, if any.
    fn fault(&mut self, calls: &[Call]) -> Option<Fault> {
        let at = self.faults.iter().position(|fault| calls.contains(&fault.call))?;
        match self.faults[at].after.checked_sub(1) {
            Some(less) => {
                self.faults[at].after = less;
                None
            }
            None => self.faults.remove(at),
        }
    }

    fn apply_fault(&mut self, call: Call) -> io::Result<()> {
        self.fault(&[call]).map_or(Ok(()), |fault| Err(errno(fault.errno)))
    }

    fn flags(&self) -> io::Result<Flags> {
        self.config.flags.ok_or_else(|| errno(libc::ENOTTY))
    }

    fn fail_into_error(&mut self) {
        self.state = State::Error;
        self.stream = None;
        self.config.fabric.moved(self.number, State::Error, self.live, false);
    }

    /// Makes one step: the device's work before it is in the new state.
    fn step(&mut self, to: State) -> io::Result<()> {
        let from = self.state;
        if let (State::Resuming, Some(Stream::Loading(bytes))) = (from, &self.stream) {
            match stream::parse(bytes, self.contents.len()) {
                Some(contents) => self.contents = contents,
                None => {
                    if self.config.bad_state_is_error {
                        self.fail_into_error();
                    }
                    return Err(errno(libc::EINVAL));
                }
            }
            self.live = true;
        }
        if arcs::ends_stream(from, to) {
            self.stream = None;
        }
        if arcs::begins_stream(from, to) {
            self.streams += 1;
            self.stream = Some(if to == State::Resuming {
                self.contents.fill(0);
                self.live = false;
                Stream::Loading(Vec::new())
            } else {
                Stream::Saving(Saving::new(&self.contents))
            });
        }
        self.state = to;
        self.config.fabric.moved(self.number, to, self.live, true);
        Ok(())
    }

    /// Returns how many bytes a read or write of `asked` may have.
    fn most(&mut self, asked: usize) -> usize {
        let most = asked.min(self.config.max_transfer);
        if self.config.seed.is_none() || most <= 1 {
            return most;
        }
        // Knuth's 64-bit generator: the upper bits are good enough here.
        self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (self.chance >> 33) as usize % most
    }
}

impl Device for ModelDevice {
    type Data = ModelData;

    fn migration(&self) -> io::Result<Flags> {
        let mut inner = self.inner();
        inner.apply_fault(Call::Migration)?;
        inner.flags()
    }

    fn state(&self) -> io::Result<State> {
        let mut inner = self.inner();
        inner.apply_fault(Call::State)?;
        inner.flags()?;
        Ok(inner.state)
    }

    fn set_state(&self, to: State) -> io::Result<Option<ModelData>> {
        let mut inner = self.inner();
        let flags = inner.flags()?;
        let way = arcs::path(flags, inner.state, to).ok_or_else(|| errno(libc::EINVAL))?;
        let fault = inner.fault(&[Call::SetState, Call::SetStateTo(to)]);
        let steps = match fault.map(|fault| fault.leaves) {
            None => way.len(),
            Some(Leaves::Midway(steps)) => steps.min(way.len().saturating_sub(1)),
            Some(Leaves::Unchanged | Leaves::InError) => 0,
        };
        let streams = inner.streams;
        for next in &way[..steps] {
            inner.step(*next)?;
        }
        if let Some(fault) = fault {
            if fault.leaves == Leaves::InError {
                inner.fail_into_error();
            }
            return Err(errno(fault.errno));
        }
        Ok((inner.streams != streams).then(|| ModelData { device: self.0.clone(), number: inner.streams }))
    }

    fn data_size(&self) -> io::Result<u64> {
        let mut inner = self.inner();
        inner.apply_fault(Call::DataSize)?;
        inner.flags()?;
        if !inner.config.reports_size {
            return Err(errno(libc::ENOTTY));
        }
        Ok(match &inner.stream {
            Some(Stream::Saving(saving)) => saving.left(&inner.contents),
            _ => Saving::new(&inner.contents).left(&inner.contents),
        })
    }

    fn reset(&self) -> io::Result<()> {
        let mut inner = self.inner();
        inner.apply_fault(Call::Reset)?;
        inner.stream = None;
        inner.contents.fill(0);
        inner.live = false;
        inner.state = State::Running;
        inner.config.fabric.moved(inner.number, State::Running, false, false);
        Ok(())
    }

    fn dma_logging_start(&self, page_size: u64, ranges: &[DmaRange]) -> io::Result<u64> {
        let mut inner = self.inner();
        inner.apply_fault(Call::DmaLoggingStart)?;
        let smallest = inner.config.dma_page_size.ok_or_else(|| errno(libc::ENOTTY))?;
        if inner.log.is_some() {
            return Err(errno(libc::EINVAL));
        }
        let log = dma::Log::new(page_size, smallest, ranges).map_err(errno)?;
        let chosen = log.page_size();
        inner.log = Some(log);
        Ok(chosen)
    }

    fn dma_logging_report(&self, range: DmaRange, page_size: u64, bitmap: &mut [u64]) -> io::Result<()> {
        let mut inner = self.inner();
        inner.apply_fault(Call::DmaLoggingReport)?;
        if inner.config.dma_page_size.is_none() {
            return Err(errno(libc::ENOTTY));
        }
        let log = inner.log.as_mut().ok_or_else(|| errno(libc::EINVAL))?;
        log.report(range, page_size, bitmap).map_err(errno)
    }

    fn dma_logging_stop(&self) -> io::Result<()> {
        let mut inner = self.inner();
        inner.apply_fault(Call::DmaLoggingStop)?;
        if inner.config.dma_page_size.is_none() {
            return Err(errno(libc::ENOTTY));
        }
        inner.log.take().map(|_| ()).ok_or_else(|| errno(libc::EINVAL))
    }
}

/// A stream of a [`ModelDevice`].
#[derive(Debug)]
pub struct ModelData {
    device: Arc<Mutex<Inner>>,
    /// The number of the stream among the device's streams, from 1.
    number: u64,
}

impl ModelData {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that the device still has this stream.
    fn check(&self, inner: &Inner) -> io::Result<()> {
        if inner.stream.is_some() && inner.streams == self.number { Ok(()) } else { Err(errno(libc::ENODEV)) }
    }
}

impl Data for ModelData {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut inner = self.inner();
        self.check(&inner)?;
        inner.apply_fault(Call::Read)?;
        let most = inner.most(buffer.len());
        let inner = &mut *inner;
        let stopped = inner.state == State::StopCopy;
        match &mut inner.stream {
            Some(Stream::Saving(saving)) => match saving.read(&inner.contents, stopped, most, buffer) {
                0 if !stopped && !buffer.is_empty() && !inner.config.zero_for_nothing => Err(errno(libc::ENOMSG)),
                bytes => Ok(bytes),
            },
            _ => Err(errno(libc::EBADF)),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut inner = self.inner();
        self.check(&inner)?;
        inner.apply_fault(Call::Write)?;
        let most = inner.most(bytes.len());
        match &mut inner.stream {
            Some(Stream::Loading(taken)) => {
                taken.extend(&bytes[..most]);
                Ok(most)
            }
            _ => Err(errno(libc::EBADF)),
        }
    }

    fn precopy_info(&self) -> io::Result<PrecopyInfo> {
        let mut inner = self.inner();
        if !inner.flags()?.pre_copy() {
            return Err(errno(libc::ENOTTY));
        }
        self.check(&inner)?;
        inner.apply_fault(Call::PrecopyInfo)?;
        match (&inner.stream, inner.state) {
            (Some(Stream::Saving(saving)), State::PreCopy | State::PreCopyP2p) => Ok(PrecopyInfo {
                initial_bytes: saving.initial_bytes(&inner.contents),
                dirty_bytes: saving.dirty_bytes(&inner.contents),
            }),
            _ => Err(errno(libc::EINVAL)),
        }
    }
}
