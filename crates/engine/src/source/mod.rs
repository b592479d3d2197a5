//! The source of an embedded migration: a monitor gives its guest's RAM, a dirty log and itself, and gets a migration.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use sterna::{cancel::Cancel, source::Source, transport::Security, vmm::SourceVmm};
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
//! `rounds` finds and sends pages on a thread of its own, `convergence` says when the guest may be stopped, `driver` does
//! what the switchover's state machine says on the caller's thread.

mod convergence;
mod driver;
mod rounds;
mod unsent;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_codec::{MethodChoice, Qatzip};
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::DirtyLog;
use sterna_memory::ram::GuestRam;
use sterna_offload::Offload;
use sterna_offload::share::MAX_WEIGHT;
use sterna_wire::limits::{DEFAULT_PACKET_SIZE, MAX_CONTENT, MAX_RAM_CHANNELS};

pub use self::convergence::{NotConverging, Throttle};
use crate::cancel::Cancel;
use crate::device_state::{DeviceChannels, DeviceId, SaveDevice};
pub use crate::ledger::MonitorRecord;
use crate::migration::MigrationError;
use crate::report::{Observer, Report};
use crate::session::DIAL_PAUSE;
use crate::transport::{Address, Security};
use crate::vmm::SourceVmm;

/// A migration to be made, at the source. Settings have defaults; [`Source::run`] makes it.
pub struct Source {
    ram: GuestRam,
    log: Box<dyn DirtyLog>,
    devices: Vec<(DeviceId, Box<dyn SaveDevice>)>,
    settings: Settings,
}

/// How long a source waits for what, before it takes it for lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLimits {
    /// Without a byte of the guest sent or taken while its memory is sent; none: no limit.
    pub stall: Option<Duration>,
    /// For each step while the guest stands: the last pages, loading at the destination. Ten times the downtime that is
    /// aimed at if that is longer.
    pub step: Duration,
    /// For a destination that was lost after the decision to be told of it; then the error says that it is not confirmed.
    pub delivery: Duration,
    /// For a destination that was lost before the decision to be told that the migration has ended, which it presumes anyway.
    pub telling: Duration,
    /// The pause before the second attempt in a row to reach a destination that was lost; the first is made at once. It doubles from
    /// attempt to attempt up to 5 s (or this, where it is longer), each shortened at random by up to half, and begins anew after a
    /// connection that has lasted for so long.
    pub dial_pause: Duration,
}

impl Default for TimeLimits {
    /// No limit, 30 s, 60 s, 5 s, and 100 ms.
    fn default() -> Self {
        Self {
            stall: None,
            step: Duration::from_secs(30),
            delivery: Duration::from_secs(60),
            telling: Duration::from_secs(5),
            dial_pause: DIAL_PAUSE,
        }
    }
}

/// When what an IAA device has compressed is read again at the source ([`Source::iaa_verify`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IaaVerify {
    /// Where packets have no checksums ([`Source::checksums`]): with them a wrong stream is found at the destination, and its pages are
    /// sent again.
    #[default]
    WithoutChecksums,
    /// Every stream.
    Always,
    /// None. Without checksums either, what a device compresses wrongly is wrong memory at the destination.
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
    qatzip: Qatzip,
    cpu: Option<f64>,
    bandwidth: Option<u64>,
    downtime: Duration,
    packet_size: usize,
    checksums: bool,
    not_converging: NotConverging,
    give_up_after: Option<Duration>,
    state_dir: Option<PathBuf>,
    offload: Option<Arc<Offload>>,
    iaa_verify: IaaVerify,
    delta_cache: u64,
    accelerator_weight: u32,
    normal_page_ratio: u8,
    device_channels: DeviceChannels,
    monitor: MonitorRecord,
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
    /// A migration of the guest whose RAM is `ram`, and whose writes `log` notes: all of them, of vCPUs, of the monitor's
    /// own threads and of devices. The log is not started yet; its blocks are those of `ram`, by number.
    pub fn new(ram: GuestRam, log: Box<dyn DirtyLog>) -> Self {
        let settings = Settings {
            limits: TimeLimits::default(),
            channels: 2,
            method: MethodChoice::auto(),
            qatzip: Qatzip::default(),
            cpu: None,
            bandwidth: None,
            downtime: Duration::from_millis(300),
            packet_size: DEFAULT_PACKET_SIZE,
            checksums: true,
            not_converging: NotConverging::default(),
            give_up_after: None,
            state_dir: None,
            offload: None,
            iaa_verify: IaaVerify::default(),
            delta_cache: 0,
            accelerator_weight: 1,
            normal_page_ratio: 0,
            device_channels: DeviceChannels::default(),
            monitor: MonitorRecord::default(),
        };
        Self { ram, log, devices: Vec::new(), settings }
    }

    /// RAM channels, 1 … 64; 2 unless said otherwise.
    #[must_use]
    pub fn channels(mut self, channels: u16) -> Self {
        self.settings.channels = channels;
        self
    }

    /// How pages are compressed; `auto` unless said otherwise.
    #[must_use]
    pub fn method(mut self, method: MethodChoice) -> Self {
        self.settings.method = method;
        self
    }

    /// Where the method `qatzip` finds its library, and what software may do: any library, and software where no device does it,
    /// unless said otherwise. Where software is forbidden and there is no device, [`Source::run`] fails before anything is begun.
    #[must_use]
    pub fn qatzip(mut self, qatzip: Qatzip) -> Self {
        self.settings.qatzip = qatzip;
        self
    }

    /// CPUs of this side that the sending threads may use together, where the method is `auto`: beyond them it chooses what costs less,
    /// down to pages as they are. No limit unless said otherwise.
    #[must_use]
    pub fn cpu(mut self, cores: Option<f64>) -> Self {
        self.settings.cpu = cores;
        self
    }

    /// Most bytes per second on the wire; no limit unless said otherwise.
    #[must_use]
    pub fn bandwidth(mut self, bytes_per_second: Option<u64>) -> Self {
        self.settings.bandwidth = bytes_per_second;
        self
    }

    /// Longest downtime that is aimed at; 300 ms unless said otherwise.
    #[must_use]
    pub fn downtime(mut self, downtime: Duration) -> Self {
        self.settings.downtime = downtime;
        self
    }

    /// Bytes of content in a packet, whole pages, 4 KiB … 16 MiB; 512 KiB unless said otherwise.
    #[must_use]
    pub fn packet_size(mut self, bytes: usize) -> Self {
        self.settings.packet_size = bytes;
        self
    }

    /// Whether the content of packets is checked from end to end; it is unless said otherwise. Without it a wrong codec or
    /// bad memory goes unnoticed; TCP and TLS still notice what happens between them. Pages that are not compressed, not
    /// encrypted and not paced by a limit are then sent from where they lie, without a copy.
    #[must_use]
    pub fn checksums(mut self, checksums: bool) -> Self {
        self.settings.checksums = checksums;
        self
    }

    /// What is done when the rounds do not converge; it is only said, unless said otherwise.
    #[must_use]
    pub fn when_not_converging(mut self, answer: NotConverging) -> Self {
        self.settings.not_converging = answer;
        self
    }

    /// How long the guest's memory is sent before the migration is given up; for ever unless said otherwise.
    #[must_use]
    pub fn give_up_after(mut self, time: Option<Duration>) -> Self {
        self.settings.give_up_after = time;
        self
    }

    /// How long it waits for what.
    #[must_use]
    pub fn time_limits(mut self, limits: TimeLimits) -> Self {
        self.settings.limits = limits;
        self
    }

    /// Where the record of the migration is kept on disk, so that a destination can still be told what was decided if this
    /// process dies; in memory unless said otherwise.
    #[must_use]
    pub fn state_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.settings.state_dir = Some(dir.into());
        self
    }

    /// Lets accelerators look for zero pages, take snapshots of the others, and compress by the method `iaa`, each where `offload` has
    /// any that can; without, and whatever they leave undone, the CPU does it. One [`Offload`] serves all migrations of a process.
    #[must_use]
    pub fn offload(mut self, offload: Arc<Offload>) -> Self {
        self.settings.offload = Some(offload);
        self
    }

    /// Whether what an IAA device has compressed is read again and compared before it is sent; unless said otherwise, where packets have
    /// no checksums that would find a wrong stream at the destination.
    #[must_use]
    pub fn iaa_verify(mut self, verify: IaaVerify) -> Self {
        self.settings.iaa_verify = verify;
        self
    }

    /// Sends of pages that were sent before only what has changed in them, where that is less. For that the source keeps what it has
    /// sent, in at most so many bytes of memory (a page for each 4 KiB); 0, as it is unless said otherwise: it does not.
    #[must_use]
    pub fn delta_cache(mut self, bytes: u64) -> Self {
        self.settings.delta_cache = bytes;
        self
    }

    /// How much of an accelerator this guest may have beside others that want it at the same time, 1 … 1000; 1 unless said otherwise.
    /// It has no unit: of two guests of weights 3 and 1 the one gets three quarters of the device's time, of two of weights 30 and
    /// 10 likewise. Alone a guest gets all that it wants. It counts among the migrations of one [`Offload`], and where devices are
    /// shared by a ledger ([`Shares::of_host`](sterna_offload::Shares::of_host)) among those of all processes that keep it.
    #[must_use]
    pub fn accelerator_weight(mut self, weight: u32) -> Self {
        self.settings.accelerator_weight = weight;
        self
    }

    /// For tests and measurements: this share of the zero pages that are looked at, in percent, is sent as if they were not zero; 0 unless
    /// said otherwise. Pages that the guest never used are not looked at.
    #[must_use]
    pub fn normal_page_ratio(mut self, percent: u8) -> Self {
        self.settings.normal_page_ratio = percent;
        self
    }

    /// A device whose state travels apart from the monitor's: all such devices are saved, sent and loaded at the same time. The destination
    /// must have the same ([`Destination::device`](crate::destination::Destination::device)), else nothing is begun. A guest with such devices
    /// stays stopped once it was stopped for the switchover, however much it dirtied until then: their state cannot be taken back.
    #[must_use]
    pub fn device(mut self, id: DeviceId, device: Box<dyn SaveDevice>) -> Self {
        self.devices.push((id, device));
        self
    }

    /// Which channels the state of such devices takes: those of RAM unless said otherwise.
    #[must_use]
    pub fn device_channels(mut self, channels: DeviceChannels) -> Self {
        self.settings.device_channels = channels;
        self
    }

    /// The monitor is not this process, which drives it from outside: what the record says of it, and the destination hears.
    /// This process embeds it unless said otherwise.
    #[must_use]
    pub fn monitor(mut self, monitor: MonitorRecord) -> Self {
        self.settings.monitor = monitor;
        self
    }

    /// Moves the guest to the [`Destination`](crate::destination::Destination) at `to`. Blocks until that has ended; the
    /// monitor's methods are called on this thread.
    ///
    /// # Errors
    /// Every end but the good one: the error says in which phase, why, and where the guest is.
    pub fn run(
        self,
        to: impl Into<Address>,
        security: &Security,
        vmm: &mut dyn SourceVmm,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<Report, MigrationError> {
        self.check()?;
        driver::run(self, &to.into(), security, vmm, cancel, observer)
    }

    fn check(&self) -> Result<(), MigrationError> {
        let Settings { channels, packet_size, accelerator_weight, cpu, .. } = self.settings;
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
        if let Some(cores) = cpu.filter(|cores| !(cores.is_finite() && *cores > 0.0)) {
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
