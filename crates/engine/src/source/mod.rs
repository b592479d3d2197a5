//! The source of an embedded migration: a monitor gives its guest's RAM, a dirty log and itself, and gets a migration.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use sterna_engine::{cancel::Cancel, source::Source, transport::Security, vmm::SourceVmm};
//! # fn migrate(ram: sterna_memory::ram::GuestRam, log: Box<dyn sterna_memory::dirty::DirtyLog>, vmm: &mut dyn SourceVmm)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! let report = Source::new(ram, log)
//!     .channels(2)
//!     .downtime(Duration::from_millis(300))
//!     .run("destination:4920", &Security::Insecure, vmm, &Cancel::new(), &())?;
//! println!("{}", report.text());
//! # Ok(())
//! # }
//! ```
//! `rounds` finds and sends pages on a thread of its own, `convergence` decides when the guest may be stopped, `driver` performs
//! the actions of the switchover's state machine on the caller's thread.

mod convergence;
mod driver;
mod rounds;
mod unsent;

use std::sync::{Arc, Mutex};
use std::time::Duration;

#[cfg(feature = "qatzip")]
use sterna_codec::Qatzip;
use sterna_codec::{Engines, MethodChoice};
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::DirtyLog;
use sterna_memory::ram::GuestRam;
use sterna_offload::Offload;
use sterna_offload::share::MAX_WEIGHT;
use sterna_wire::limits::{DEFAULT_PACKET_SIZE, MAX_CONTENT, MAX_OPENING, MAX_RAM_CHANNELS};

pub use self::convergence::{NotConverging, Throttle};
pub use self::driver::required_features;
use crate::cancel::Cancel;
use crate::device_state::{DeviceChannels, DeviceId, SaveDevice, SharedDevice};
use crate::live_control::Control;
use crate::migration::{ErrorKind, GuestState, MigrationError, Phase, Side, sandbox_refusal};
use crate::monitor::CaughtLog;
use crate::record_file::StateDir;
use crate::report::{Observer, Report};
use crate::session::DIAL_PAUSE;
pub use crate::switchover::MonitorRecord;
use crate::switchover::{ABORT_TIME, DELIVERY_TIME};
use crate::transport::{Address, Security};
use crate::vmm::SourceVmm;

/// The source of a migration: a guest's RAM, dirty log and devices, and settings, which have defaults. [`Source::run`] runs the migration,
/// and may be called again where that has failed.
pub struct Source {
    ram: GuestRam,
    log: CaughtLog,
    devices: Vec<(DeviceId, SharedDevice)>,
    settings: Settings,
    control: Control,
    /// Whether a migration has moved the guest, or may have.
    moved: bool,
}

/// How long a source waits before it gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimeLimits {
    /// Time during which no byte of the guest is sent or acknowledged while its memory is sent; none: no limit.
    pub stall: Option<Duration>,
    /// Time in which a destination that was lost while the guest's memory is sent is dialled, so that the migration goes on with what the
    /// destination has; the destination has to [wait](crate::destination::Destination::retry), too. Zero: the migration ends. Where state was
    /// sent ahead, where devices are sent separately, once the guest is being paused, and in post-copy the loss of the destination has the
    /// effect that it has without this time.
    pub retry: Duration,
    /// Time for each step while the guest is paused: the last pages, loading at the destination. Ten times the target downtime, if that is
    /// longer.
    pub step: Duration,
    /// Time for delivering the decision to a destination that was lost after it. When it is over, the error says that the destination has
    /// not confirmed the decision. The destination's [`linger`](crate::destination::Destination::linger) is to be longer by 10 s.
    pub delivery: Duration,
    /// Time for a destination that is connected to start the guest after the decision: its monitor may wait for storage, for example. None: as
    /// long as [`TimeLimits::delivery`]; a shorter time counts as that long, too.
    pub start: Option<Duration>,
    /// Time for reporting an abort to a destination that was lost before the decision. Without the report the destination presumes the abort.
    pub reporting_abort: Duration,
    /// The pause before the second attempt in a row to reach a destination that was lost; the first is made at once. The pause doubles from
    /// attempt to attempt up to 5 s (or `dial_pause`, if longer), each shortened at random by up to half. The back-off begins anew after
    /// a connection that has lasted for the longest pause.
    pub dial_pause: Duration,
}

impl Default for TimeLimits {
    /// No limit, zero, 30 s, 60 s, none, 5 s, and 100 ms.
    fn default() -> Self {
        Self {
            stall: None,
            retry: Duration::ZERO,
            step: Duration::from_secs(30),
            delivery: DELIVERY_TIME,
            start: None,
            reporting_abort: ABORT_TIME,
            dial_pause: DIAL_PAUSE,
        }
    }
}

impl TimeLimits {
    /// Sets [`TimeLimits::stall`].
    #[must_use]
    pub fn stall(self, stall: Option<Duration>) -> Self {
        Self { stall, ..self }
    }

    /// Sets [`TimeLimits::retry`].
    #[must_use]
    pub fn retry(self, retry: Duration) -> Self {
        Self { retry, ..self }
    }

    /// Sets [`TimeLimits::step`].
    #[must_use]
    pub fn step(self, step: Duration) -> Self {
        Self { step, ..self }
    }

    /// Sets [`TimeLimits::delivery`].
    #[must_use]
    pub fn delivery(self, delivery: Duration) -> Self {
        Self { delivery, ..self }
    }

    /// Sets [`TimeLimits::start`].
    #[must_use]
    pub fn start(self, start: Option<Duration>) -> Self {
        Self { start, ..self }
    }

    /// Sets [`TimeLimits::reporting_abort`].
    #[must_use]
    pub fn reporting_abort(self, reporting_abort: Duration) -> Self {
        Self { reporting_abort, ..self }
    }

    /// Sets [`TimeLimits::dial_pause`].
    #[must_use]
    pub fn dial_pause(self, dial_pause: Duration) -> Self {
        Self { dial_pause, ..self }
    }
}

/// When the output of an IAA device is decoded and compared at the source ([`Source::iaa_verify`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum IaaVerify {
    /// Only where packets have no checksums ([`Source::checksums`]). With checksums the destination finds a wrong stream, and its pages
    /// are retransmitted.
    #[default]
    WithoutChecksums,
    /// Always.
    Always,
    /// Never. Without checksums either, a stream that a device compresses wrongly becomes wrong memory at the destination.
    Never,
}

impl IaaVerify {
    fn verifies(self, checksums: bool) -> bool {
        match self {
            Self::WithoutChecksums => !checksums,
            Self::Always => true,
            Self::Never => false,
        }
    }
}

#[derive(Clone, Debug)]
struct Settings {
    limits: TimeLimits,
    channels: u16,
    method: MethodChoice,
    #[cfg(feature = "qatzip")]
    qatzip: Qatzip,
    max_cpus: Option<f64>,
    bandwidth: Option<u64>,
    downtime: Duration,
    packet_size: usize,
    checksums: bool,
    not_converging: NotConverging,
    allow_post_copy: bool,
    give_up_after: Option<Duration>,
    state_dir: Option<StateDir>,
    sandboxed: bool,
    offload: Option<Arc<Offload>>,
    iaa_verify: IaaVerify,
    delta_cache: u64,
    accelerator_weight: u32,
    normal_page_ratio: u8,
    device_channels: DeviceChannels,
    opening: Vec<u8>,
    monitor: MonitorRecord,
}

impl Settings {
    /// Returns the encoders that the method needs besides the CPU's, which are there before anything is begun.
    ///
    /// # Errors
    /// The method is `qatzip`, software is forbidden, and there is no device.
    #[cfg(feature = "qatzip")]
    fn engines(&self, observer: &dyn Observer) -> Result<Engines, String> {
        if self.sandboxed {
            // Finding a device and the library opens files.
            return Ok(Engines::default());
        }
        let engines = self.qatzip.engines(self.method, self.channels);
        let (engines, line) = engines.map_err(|refused| refused.to_string())?;
        line.iter().for_each(|line| observer.note(line));
        Ok(engines)
    }

    /// Returns no encoders besides the CPU's.
    #[cfg(not(feature = "qatzip"))]
    fn engines(&self, _: &dyn Observer) -> Result<Engines, String> {
        Ok(Engines::default())
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let devices: Vec<_> = self.devices.iter().map(|(id, _)| id).collect();
        let mut source = f.debug_struct("Source");
        source.field("ram", &self.ram).field("devices", &devices).field("settings", &self.settings);
        source.finish_non_exhaustive()
    }
}

impl Source {
    /// Prepares a migration of the guest whose RAM is `ram`. `log` records all writes to it: of vCPUs, of the monitor's
    /// own threads and of devices. The log is not started yet; its blocks are those of `ram`, by number.
    pub fn new(ram: GuestRam, log: Box<dyn DirtyLog>) -> Self {
        let settings = Settings {
            limits: TimeLimits::default(),
            channels: 2,
            method: MethodChoice::auto(),
            #[cfg(feature = "qatzip")]
            qatzip: Qatzip::default(),
            max_cpus: None,
            bandwidth: None,
            downtime: Duration::from_millis(300),
            packet_size: DEFAULT_PACKET_SIZE,
            checksums: true,
            not_converging: NotConverging::default(),
            allow_post_copy: false,
            give_up_after: None,
            state_dir: None,
            sandboxed: false,
            offload: None,
            iaa_verify: IaaVerify::default(),
            delta_cache: 0,
            accelerator_weight: 1,
            normal_page_ratio: 0,
            device_channels: DeviceChannels::default(),
            opening: Vec::new(),
            monitor: MonitorRecord::default(),
        };
        let control = Control::new();
        Self { ram, log: CaughtLog::new(log), devices: Vec::new(), settings, control, moved: false }
    }

    /// Sets the number of RAM channels, 1 … 64; 2 by default.
    #[must_use]
    pub fn channels(mut self, channels: u16) -> Self {
        self.settings.channels = channels;
        self
    }

    /// Sets how pages are compressed; `auto` by default. Where the choice names an engine that is not there, [`Source::run`] fails before
    /// anything is begun.
    #[must_use]
    pub fn method(mut self, method: MethodChoice) -> Self {
        self.settings.method = method;
        self
    }

    /// Sets where the engine `qat` finds QATzip, and whether software may compress what a device does not. By default any library is
    /// used, and the CPU compresses what a busy device does not. Where the engine `qat` is named and there is no device, [`Source::run`]
    /// fails before anything is begun.
    #[cfg(feature = "qatzip")]
    #[must_use]
    pub fn qatzip(mut self, qatzip: Qatzip) -> Self {
        self.settings.qatzip = qatzip;
        self
    }

    /// Sets how many CPUs of this side the sending threads (which read, compress, encrypt and write pages) may use together, on average,
    /// while the guest runs. Near the limit `auto` chooses cheaper methods, down to uncompressed pages; beyond it the threads pause. The
    /// search for dirty pages, accelerators and workers of QATzip are not limited. No limit by default.
    #[must_use]
    pub fn max_cpus(mut self, cores: Option<f64>) -> Self {
        self.settings.max_cpus = cores;
        self
    }

    /// Sets the maximum bytes per second on the wire; no limit by default.
    #[must_use]
    pub fn bandwidth(mut self, bytes_per_second: Option<u64>) -> Self {
        self.settings.bandwidth = bytes_per_second;
        self
    }

    /// Sets the target downtime; 300 ms by default.
    #[must_use]
    pub fn downtime(mut self, downtime: Duration) -> Self {
        self.settings.downtime = downtime;
        self
    }

    /// Sets the bytes of content in a packet: whole pages, 4 KiB … 16 MiB; 512 KiB by default.
    #[must_use]
    pub fn packet_size(mut self, bytes: usize) -> Self {
        self.settings.packet_size = bytes;
        self
    }

    /// Sets whether the content of packets is checked from end to end; it is by default. Without checksums a wrong codec or
    /// bad memory goes unnoticed; TCP and TLS still notice errors of the network. Pages that are not compressed, not
    /// encrypted and not paced by a limit are then sent directly from guest RAM, without a copy.
    #[must_use]
    pub fn checksums(mut self, checksums: bool) -> Self {
        self.settings.checksums = checksums;
        self
    }

    /// Sets what is done when the rounds do not converge; by default that is only reported.
    #[must_use]
    pub fn when_not_converging(mut self, answer: NotConverging) -> Self {
        self.settings.not_converging = answer;
        self
    }

    /// Sets whether both sides agree on post-copy, so that [`Control::post_copy`] may begin it; not by default. Where post-copy is
    /// [chosen](Source::when_not_converging) for rounds that do not converge, they agree on it in any case.
    #[must_use]
    pub fn allow_post_copy(mut self, allow: bool) -> Self {
        self.settings.allow_post_copy = allow;
        self
    }

    /// Sets how other threads control the migration while it runs. Each migration needs a [`Control`] of its own; one whose migration has
    /// failed before anything was begun ([`Untouched`](crate::migration::GuestState::Untouched)) may be used again unless it was cancelled.
    #[must_use]
    pub fn control(mut self, control: &Control) -> Self {
        self.control = control.clone();
        self
    }

    /// Sets how long the guest's memory is sent before the migration is given up; no limit by default.
    #[must_use]
    pub fn give_up_after(mut self, time: Option<Duration>) -> Self {
        self.settings.give_up_after = time;
        self
    }

    /// Sets how long the source waits before it gives up.
    #[must_use]
    pub fn time_limits(mut self, limits: TimeLimits) -> Self {
        self.settings.limits = limits;
        self
    }

    /// Sets the directory of the migration's record. With it a destination can still learn the decision if this process dies. By default
    /// the record is kept in memory.
    #[must_use]
    pub fn state_dir(mut self, dir: impl Into<StateDir>) -> Self {
        self.settings.state_dir = Some(dir.into());
        self
    }

    /// Sets whether this process has given up making sockets and opening paths; it has not by default. Then the migration
    /// does neither: it needs [`Address::connecting`], an open directory if there is to be a record, and guest RAM and a
    /// dirty log that were made before. Otherwise [`Source::run`] fails before anything is begun. Files that a migration
    /// can do without are not opened: reports lack the CPU time of threads that have not ended, and waits for a CPU count
    /// as waits for the network.
    #[must_use]
    pub fn sandboxed(mut self, sandboxed: bool) -> Self {
        self.settings.sandboxed = sandboxed;
        self
    }

    /// Lets accelerators find zero pages, copy the others, and compress by the engine `iaa`, each where `offload` has a device that can.
    /// The CPU does what no device does. One [`Offload`] serves all migrations of a process.
    #[cfg(feature = "accel")]
    #[must_use]
    pub fn offload(mut self, offload: Arc<Offload>) -> Self {
        self.settings.offload = Some(offload);
        self
    }

    /// Sets when the output of an IAA device is decoded and compared before it is sent; by default where packets have no checksums, by
    /// which the destination would find a wrong stream.
    #[cfg(feature = "accel")]
    #[must_use]
    pub fn iaa_verify(mut self, verify: IaaVerify) -> Self {
        self.settings.iaa_verify = verify;
        self
    }

    /// Sends pages that were sent before as deltas against their earlier content, where deltas are smaller. For that the source keeps the
    /// sent content in at most so many bytes of memory (a page for each 4 KiB). With 0, the default, it sends no deltas.
    #[must_use]
    pub fn delta_cache(mut self, bytes: u64) -> Self {
        self.settings.delta_cache = bytes;
        self
    }

    /// Sets this guest's weight among the guests that use an accelerator at the same time, 1 … 1000; 1 by default. Of two guests of weights
    /// 3 and 1 the first gets three quarters of the device's time, as it does with weights 30 and 10. A guest alone gets all that it wants.
    /// The weight counts among the migrations of one [`Offload`], and where devices are shared by a ledger
    /// ([`Shares::of_host`](sterna_offload::Shares::of_host)) among those of all processes that use the ledger.
    #[cfg(feature = "accel")]
    #[must_use]
    pub fn accelerator_weight(mut self, weight: u32) -> Self {
        self.settings.accelerator_weight = weight;
        self
    }

    /// For tests and measurements: sends this share of the zero pages, in percent, as if they were not zero; 0 by default. Pages that the
    /// guest never used are not examined.
    #[must_use]
    pub fn normal_page_ratio(mut self, percent: u8) -> Self {
        self.settings.normal_page_ratio = percent;
        self
    }

    /// Adds a device whose state is sent separately from the monitor's. All such devices are saved, sent and loaded at the same time. The
    /// destination must have the same ([`Destination::device`](crate::destination::Destination::device)), else nothing is begun. A guest
    /// with such devices stays stopped once it was stopped for the switchover, however much it dirtied until then: state that a device has
    /// saved cannot be returned to it.
    #[must_use]
    pub fn device(mut self, id: DeviceId, device: Box<dyn SaveDevice>) -> Self {
        self.devices.push((id, Arc::new(Mutex::new(device))));
        self
    }

    /// Sets which channels the state of such devices takes; the RAM channels by default.
    #[must_use]
    pub fn device_channels(mut self, channels: DeviceChannels) -> Self {
        self.settings.device_channels = channels;
        self
    }

    /// Sets the opening message: bytes of the monitor's own, for instance its configuration, which the destination's monitor receives
    /// before it makes its RAM and accepts the migration ([`DestinationVmm::prepare`](crate::vmm::DestinationVmm::prepare)). At most
    /// 64 KiB; empty by default. A destination that does not know opening messages refuses a source that has one.
    #[must_use]
    pub fn opening_message(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.settings.opening = bytes.into();
        self
    }

    /// Sets the record's entries about a monitor that this process drives from outside. The destination receives its mode.
    /// By default this process embeds the monitor.
    #[must_use]
    pub fn monitor(mut self, monitor: MonitorRecord) -> Self {
        self.settings.monitor = monitor;
        self
    }

    /// Moves the guest to the [`Destination`](crate::destination::Destination) at `to`. Blocks until the migration has ended, and calls the
    /// monitor's methods on this thread.
    ///
    /// After an error that leaves the guest here, the dirty log is stopped and the devices have ended saving, and this may be called
    /// again at once, for the same destination or another.
    ///
    /// # Errors
    /// The migration failed: the error says in which phase, why, and where the guest is. After a run that has moved the guest, or may have,
    /// each further one fails.
    pub fn run(
        &mut self,
        to: impl Into<Address>,
        security: &Security,
        vmm: &mut dyn SourceVmm,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<Report, MigrationError> {
        if self.moved {
            let reason = "an earlier run of this source has moved the guest, or may have";
            let (phase, guest) = (Phase::SettingUp, GuestState::BelongsToDestination);
            return Err(MigrationError::new(Side::Source, phase, guest, ErrorKind::Settings, reason));
        }
        self.check()?;
        let (to, settings) = (&to.into(), &self.settings);
        if settings.sandboxed
            && let Some(reason) = sandbox_refusal(to, settings.state_dir.as_ref())
        {
            return Err(MigrationError::untouched(reason));
        }
        let result = driver::run(self, to, security, vmm, cancel, observer);
        if self.control.has_ended() {
            self.control = Control::new();
        }
        self.moved = result.as_ref().err().is_none_or(|error| {
            !matches!(
                error.guest,
                GuestState::Untouched
                    | GuestState::RunsAtSource
                    | GuestState::PausedAtSource
                    | GuestState::EndedAtSource
            )
        });
        result
    }

    fn check(&self) -> Result<(), MigrationError> {
        let Settings { channels, packet_size, accelerator_weight, max_cpus, .. } = self.settings;
        if !(1..=MAX_RAM_CHANNELS).contains(&channels) {
            let reason = format!("{channels} channels were asked for; between 1 and {MAX_RAM_CHANNELS} are possible");
            return Err(MigrationError::untouched(reason));
        }
        if !(1..=MAX_WEIGHT).contains(&accelerator_weight) {
            let reason = format!(
                "a weight of {accelerator_weight} at accelerators was asked for; between 1 and {MAX_WEIGHT} are possible"
            );
            return Err(MigrationError::untouched(reason));
        }
        let opening = self.settings.opening.len();
        if opening > MAX_OPENING {
            let reason = format!("the opening message has {opening} bytes; up to {MAX_OPENING} are possible");
            return Err(MigrationError::untouched(reason));
        }
        if let Some(cores) = max_cpus.filter(|cores| !(cores.is_finite() && *cores > 0.0)) {
            let reason = format!("{cores} CPUs were allowed for sending; a number above 0 is possible");
            return Err(MigrationError::untouched(reason));
        }
        if packet_size == 0 || !packet_size.is_multiple_of(PAGE_SIZE) || packet_size > MAX_CONTENT {
            let reason = format!(
                "a packet size of {packet_size} bytes was asked for; whole pages of {PAGE_SIZE} up to {MAX_CONTENT} are \
                 possible"
            );
            return Err(MigrationError::untouched(reason));
        }
        Ok(())
    }
}
