//! The destination of an embedded migration: a monitor gives RAM to be filled and itself, and gets a running guest.
//!
//! ```no_run
//! # use sterna_engine::{cancel::Cancel, destination::Destination, transport::Security, vmm::DestinationVmm};
//! # fn receive(ram: sterna_memory::ram::GuestRam, vmm: &mut dyn DestinationVmm)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! let destination = Destination::new(ram).listen("0.0.0.0:4920", &Security::Insecure)?;
//! let report = destination.run(vmm, &Cancel::new(), &())?;
//! println!("{}", report.text());
//! # Ok(())
//! # }
//! ```
//! `driver` performs the actions of the switchover's state machine on the caller's thread; `target` places pages in RAM.

mod begin;
mod channels;
mod driver;
mod monitor_calls;
mod post_copy;
mod target;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sterna_memory::ram::GuestRam;
use sterna_wire::control::{Hello, Machine};
use sterna_wire::handshake::check_devices;

use self::target::Target;
use crate::cancel::Cancel;
use crate::device_state::load::share;
use crate::device_state::{DeviceId, LoadDevice};
use crate::migration::{
    DELTA, DEVICE_STATE, GUEST_STATE, MigrationError, POST_COPY, PROGRESS, RETRANSMIT, sandbox_refusal,
};
use crate::record_file::StateDir;
use crate::report::{Observer, ReceiveReport};
use crate::session::{AcceptedSource, Features, UNCHECKED};
use crate::switchover::{LINGER, MonitorRecord};
use crate::transport::{Address, Incoming, Limits, Listener, Security};
use crate::vmm::DestinationVmm;

/// What the memory of the RAM blocks holds before the migration. Every page that the source does not send must read as
/// zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Before {
    /// The memory was never touched, or reads as zero.
    #[default]
    Zero,
    /// The memory may hold anything. It is released to the system where that is possible, which makes it zero, and otherwise cleared
    /// where it is not zero already.
    Anything,
    /// The memory reads as zero except for pages that were written: those are cleared, and nothing is released.
    Written,
}

/// A migration at the destination, before it begins. Settings have defaults; [`Destination::listen`] waits for a source.
pub struct Destination {
    /// None where the monitor makes the RAM once a source has come.
    ram: Option<GuestRam>,
    devices: Vec<(DeviceId, Box<dyn LoadDevice>)>,
    preparation: Preparation,
    settings: Settings,
}

/// The settings of the migration itself.
struct Settings {
    state_dir: Option<StateDir>,
    sandboxed: bool,
    linger: Duration,
    retry: Duration,
    stall: Option<Duration>,
    give_up_after: Option<Duration>,
    monitor: MonitorRecord,
}

/// The default of [`Destination::device_queue`].
const DEVICE_QUEUE: u64 = 256 << 20;

/// A destination that sources can connect to.
pub struct Listening {
    ready: ReadyDestination,
    address: Address,
    incoming: Incoming,
}

/// A destination that is ready for a migration, without its connections.
struct ReadyDestination {
    /// The machine, unless the monitor makes it for the source that comes.
    given: Option<ReadyMachine>,
    preparation: Preparation,
    settings: Settings,
    fence: Fence,
}

/// How a machine is prepared.
#[derive(Clone, Copy, Debug)]
struct Preparation {
    device_queue: u64,
    before: Before,
    prefault: bool,
}

/// RAM and devices that are ready for a guest.
struct ReadyMachine {
    target: Arc<Target>,
    devices: Vec<(DeviceId, Box<dyn LoadDevice>)>,
    /// Bytes of state that each device may have on their way or waiting.
    device_share: u64,
}

impl Preparation {
    /// Prepares RAM and devices, which takes long where all of the RAM is cleared or populated.
    ///
    /// # Errors
    /// There is not that much memory, the queue for devices is too small, two devices are the same, or `cancel` was cancelled.
    fn prepare(
        self,
        ram: GuestRam,
        devices: Vec<(DeviceId, Box<dyn LoadDevice>)>,
        cancel: &Cancel,
    ) -> Result<ReadyMachine, MigrationError> {
        let Self { device_queue, before, prefault } = self;
        let device_share = share(device_queue, devices.len()).map_err(MigrationError::not_accepted)?;
        let ids = devices.iter().map(|(id, _)| id.clone()).collect();
        check_devices(&Machine { devices: ids, ..Machine::default() }).map_err(MigrationError::not_accepted)?;
        let target = Arc::new(Target::new(ram, prefault).map_err(MigrationError::not_accepted)?);
        target.prepare(before, prefault, cancel).map_err(MigrationError::not_accepted)?;
        Ok(ReadyMachine { target, devices, device_share })
    }
}

/// An operator's confirmation that the source is gone for good and its guest cannot run: see [`Listening::fence`].
#[derive(Clone, Debug, Default)]
pub struct Fence(Arc<Cancel>);

impl Fence {
    /// Confirms that the source is gone for good. A destination that is prepared and waits for the decision runs the guest; otherwise the
    /// migration fails.
    pub fn source_is_gone(&self) {
        self.0.cancel();
    }
}

impl Destination {
    /// The features of a migration that is [accepted](Destination::take) after its handshake was made elsewhere.
    pub const FEATURES: Features<'static> = Features {
        offered: &[GUEST_STATE, UNCHECKED, RETRANSMIT, DELTA, DEVICE_STATE, PROGRESS],
        required: &[GUEST_STATE],
    };

    /// [`Destination::FEATURES`] and post-copy, for a caller that refuses a source that [wants](Destination::wants_post_copy) it where it is not
    /// possible.
    pub const FEATURES_WITH_POST_COPY: Features<'static> = Features {
        offered: &[GUEST_STATE, UNCHECKED, RETRANSMIT, DELTA, DEVICE_STATE, PROGRESS, POST_COPY],
        required: Self::FEATURES.required,
    };

    /// Returns whether a source may let its guest go on at the destination before all of its memory is there.
    pub fn wants_post_copy(hello: &Hello) -> bool {
        hello.capabilities.required.iter().any(|name| name == POST_COPY)
    }

    /// Returns why `ram` cannot be filled after the guest has started; none if it can.
    pub fn post_copy_refusal(ram: &GuestRam) -> Option<String> {
        post_copy::refusal(ram, false)
    }

    /// Prepares a destination that fills `ram`. Nothing else may write `ram` before the guest was started, or read it before
    /// [`DestinationVmm::load`].
    pub fn new(ram: GuestRam) -> Self {
        Self { ram: Some(ram), ..Self::without_ram() }
    }

    /// Prepares a destination whose monitor makes RAM and devices in [`DestinationVmm::prepare`], once a source has come and has described
    /// what it needs. The RAM is then prepared by the settings of this destination, before the source is accepted.
    pub fn without_ram() -> Self {
        Self {
            ram: None,
            devices: Vec::new(),
            preparation: Preparation { device_queue: DEVICE_QUEUE, before: Before::default(), prefault: false },
            settings: Settings {
                state_dir: None,
                sandboxed: false,
                linger: LINGER,
                retry: Duration::ZERO,
                stall: None,
                give_up_after: None,
                monitor: MonitorRecord::default(),
            },
        }
    }

    /// Sets what the memory holds before the migration; zeros by default.
    #[must_use]
    pub fn memory_before(mut self, before: Before) -> Self {
        self.preparation.before = before;
        self
    }

    /// Adds a device whose state is sent separately from the monitor's. The source must have the same devices
    /// ([`Source::device`](crate::source::Source::device)), in any order, else it is refused before anything is begun. Without effect
    /// where the monitor makes the machine ([`Destination::without_ram`]).
    #[must_use]
    pub fn device(mut self, id: DeviceId, device: Box<dyn LoadDevice>) -> Self {
        self.devices.push((id, device));
        self
    }

    /// Sets the maximum bytes of memory for state of all such devices that has arrived and waits to be loaded or to be put in order;
    /// 256 MiB by default, and at least 64 KiB for each device. Each device may use its part: a device that loads slowly delays only its
    /// own saving.
    #[must_use]
    pub fn device_queue(mut self, bytes: u64) -> Self {
        self.preparation.device_queue = bytes;
        self
    }

    /// Sets whether all of RAM is populated before the source may begin, so that nothing waits for a page fault later. This costs
    /// the memory of pages that the guest never used.
    #[must_use]
    pub fn prefault(mut self, prefault: bool) -> Self {
        self.preparation.prefault = prefault;
        self
    }

    /// Sets how long, once the migration has ended here, a source that was lost can reconnect to receive the outcome; 70 s by default, which
    /// is the time for which a source dials ([`TimeLimits::delivery`](crate::source::TimeLimits::delivery)) and the 10 s of silence after
    /// which it notices the loss. Where the source receives no answer, its guest stays paused until an operator settles the migration.
    /// [`Listening::run`] returns as soon as the source has confirmed the outcome. A lost source that depends on no answer, or has closed the
    /// connection, can reconnect for 5 s at most; one that stays connected without confirming the outcome is waited for at most 22 s. The guest
    /// does not wait for this.
    #[must_use]
    pub fn linger(mut self, time: Duration) -> Self {
        self.settings.linger = time;
        self
    }

    /// Sets how long a source that was lost while the guest's memory arrives is waited for, so that the migration goes on with what is here; no
    /// longer than the source [dials](crate::source::TimeLimits::retry). Zero, the default: the migration ends. Where state has arrived ahead, where
    /// devices are sent separately, once the final state arrives, and in post-copy the loss of the source has the effect that it has without
    /// this time.
    ///
    /// A destination that is [accepted](Destination::take) by a handshake made elsewhere waits only if that handshake has offered the capability
    /// [`RESUME`](crate::migration::RESUME).
    #[must_use]
    pub fn retry(mut self, time: Duration) -> Self {
        self.settings.retry = time;
        self
    }

    /// Sets how long nothing of the guest may arrive, from the acceptance of the migration until the guest is prepared, before the
    /// migration is given up; no limit by default.
    #[must_use]
    pub fn stall_limit(mut self, time: Option<Duration>) -> Self {
        self.settings.stall = time;
        self
    }

    /// Sets how long preparing the guest may take, from the acceptance of the migration, before the migration is given up; no limit by
    /// default.
    #[must_use]
    pub fn give_up_after(mut self, time: Option<Duration>) -> Self {
        self.settings.give_up_after = time;
        self
    }

    /// Sets the directory of the migration's record; by default the record is kept in memory.
    #[must_use]
    pub fn state_dir(mut self, dir: impl Into<StateDir>) -> Self {
        self.settings.state_dir = Some(dir.into());
        self
    }

    /// Sets whether this process has given up making sockets and opening paths, as
    /// [`Source::sandboxed`](crate::source::Source::sandboxed). It needs [`Address::listening`] or [`Address::accepted`], and
    /// guest RAM that was made before; without a userfaultfd ([`GuestRam::with_userfault`]) it refuses post-copy. Page faults
    /// are not reported.
    #[must_use]
    pub fn sandboxed(mut self, sandboxed: bool) -> Self {
        self.settings.sandboxed = sandboxed;
        self
    }

    /// Sets the record's entries about a monitor that this process drives from outside. By default this process embeds the monitor.
    #[must_use]
    pub fn monitor(mut self, monitor: MonitorRecord) -> Self {
        self.settings.monitor = monitor;
        self
    }

    /// Prepares the memory, if there is some already, which takes long where all of it is cleared or populated, and then listens for a
    /// source.
    ///
    /// # Errors
    /// There is not that much memory, [`Destination::device_queue`] is too small, two devices are the same, or the address cannot be
    /// listened on.
    pub fn listen(self, address: impl Into<Address>, security: &Security) -> Result<Listening, MigrationError> {
        let address = address.into();
        if self.settings.sandboxed
            && let Some(reason) = sandbox_refusal(&address, self.settings.state_dir.as_ref())
        {
            return Err(MigrationError::not_accepted(reason));
        }
        // Before a source can connect: it waits for its welcome no longer than a handshake may take.
        let ready = self.prepare(&Cancel::new())?;
        let listener = Listener::bind(address).map_err(MigrationError::not_accepted)?;
        let address = listener.local_address();
        let incoming = listener.start(security.clone(), Limits::default()).map_err(MigrationError::not_accepted)?;
        Ok(Listening { ready, address, incoming })
    }

    fn prepare(self, cancel: &Cancel) -> Result<ReadyDestination, MigrationError> {
        let Self { ram, devices, preparation, settings } = self;
        let given = ram.map(|ram| preparation.prepare(ram, devices, cancel)).transpose()?;
        Ok(ReadyDestination { given, preparation, settings, fence: Fence::default() })
    }

    /// Runs the migration of a source whose hello was accepted already, where the RAM depends on that hello. `address`: where
    /// `incoming` listens, for a source that reconnects and for the record. The source gets heartbeats while the memory is prepared. As
    /// [`Listening::run`] otherwise.
    ///
    /// The handshake ([`Handshake::first`](crate::session::Handshake::first)) uses [`Destination::FEATURES`].
    ///
    /// # Errors
    /// As [`Listening::run`]. A source whose RAM blocks have other names or sizes is refused, and so is one for which the memory cannot be
    /// prepared; either receives the reason.
    pub fn take(
        self,
        source: AcceptedSource,
        incoming: Incoming,
        address: &Address,
        vmm: &mut dyn DestinationVmm,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<ReceiveReport, MigrationError> {
        begin::run_accepted(self, address, source, incoming, vmm, cancel, observer)
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices: Vec<_> = self.devices.iter().map(|(id, _)| id).collect();
        f.debug_struct("Destination").field("ram", &self.ram).field("devices", &devices).finish_non_exhaustive()
    }
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Listening {
    /// Returns the address that this listens on, with the port that the system has chosen.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Returns a handle by which an operator makes a prepared guest run although its source does not answer any more. Use it only once it
    /// is certain that the source's guest cannot run: else two copies of the guest run.
    pub fn fence(&self) -> Fence {
        self.ready.fence.clone()
    }

    /// Runs one migration. Blocks until it has ended, and calls the monitor's methods on this thread. A refused source does not end
    /// the wait, also where it is the monitor that refuses ([`DestinationVmm::prepare`]).
    ///
    /// A destination that is prepared, with the guest loaded, waits for its source without a limit: only the source
    /// knows which side runs the guest.
    ///
    /// # Errors
    /// The migration failed. After it was accepted, RAM and monitor are of no use for another try.
    pub fn run(
        self,
        vmm: &mut dyn DestinationVmm,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<ReceiveReport, MigrationError> {
        begin::run(self, vmm, cancel, observer)
    }
}
