//! The destination of an embedded migration: a monitor gives RAM to be filled and itself, and gets a running guest.
//!
//! ```no_run
//! # use sterna::{cancel::Cancel, destination::Destination, transport::Security, vmm::DestinationVmm};
//! # fn receive(ram: sterna_memory::ram::GuestRam, vmm: &mut dyn DestinationVmm)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! let destination = Destination::new(ram).listen("0.0.0.0:4920", &Security::Insecure)?;
//! let report = destination.run(vmm, &Cancel::new(), &())?;
//! println!("{}", report.text());
//! # Ok(())
//! # }
//! ```
//! `driver` does what the switchover's state machine says on the caller's thread; `target` puts pages into RAM.

mod channels;
mod devices;
mod driver;
mod post_copy;
mod target;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_memory::ram::GuestRam;
use sterna_wire::control::{Hello, Machine};
use sterna_wire::handshake::check_devices;

use self::target::Target;
use crate::cancel::Cancel;
use crate::device_state::load::share;
use crate::device_state::{DeviceId, LoadDevice};
use crate::ledger::MonitorRecord;
use crate::migration::{DELTA, DEVICE_STATE, GUEST_STATE, MigrationError, POST_COPY, SEND_AGAIN};
use crate::report::{Observer, ReceiveReport};
use crate::session::{Features, Greeted, UNCHECKED};
use crate::transport::{Address, Incoming, Limits, Listener, Security};
use crate::vmm::DestinationVmm;

/// What the memory of the RAM blocks holds before the migration. Everything that the source does not send must read as
/// zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Before {
    /// It was never touched, or reads as zero.
    #[default]
    Zero,
    /// Anything: it is given back to the system where that is possible, which makes it zero, and otherwise cleared where
    /// it is not zero already.
    Anything,
    /// Zeros but for pages that somebody has written: those are cleared, and nothing is given back.
    Written,
}

/// A migration to be taken. Settings have defaults; [`Destination::listen`] opens the door.
pub struct Destination {
    ram: GuestRam,
    devices: Vec<(DeviceId, Box<dyn LoadDevice>)>,
    device_queue: u64,
    before: Before,
    prefault: bool,
    state_dir: Option<PathBuf>,
    linger: Duration,
    stall: Option<Duration>,
    give_up_after: Option<Duration>,
    monitor: MonitorRecord,
}

/// Memory for device state that waits to be loaded, unless said otherwise.
const DEVICE_QUEUE: u64 = 256 << 20;
/// How long a destination whose migration has ended lets a source come back that may not have heard of it.
const LINGER: Duration = Duration::from_secs(5);

/// A destination that sources can connect to.
pub struct Listening {
    taking: Taking,
    address: Address,
    incoming: Incoming,
}

/// All that a migration is taken with but its connections.
struct Taking {
    target: Arc<Target>,
    devices: Vec<(DeviceId, Box<dyn LoadDevice>)>,
    /// What each of them may have on its way or waiting, in bytes.
    device_share: u64,
    state_dir: Option<PathBuf>,
    linger: Duration,
    stall: Option<Duration>,
    give_up_after: Option<Duration>,
    monitor: MonitorRecord,
    fence: Fence,
}

/// An operator's word that the source is gone for good and its guest cannot run: see [`Listening::fence`].
#[derive(Clone, Debug, Default)]
pub struct Fence(Arc<Cancel>);

impl Fence {
    /// The source is gone for good. A destination that stands prepared and waits to be told runs the guest; one that does
    /// not, fails.
    pub fn source_is_gone(&self) {
        self.0.cancel();
    }
}

impl Destination {
    /// What a source must have, and may have, whose migration is [taken](Destination::take) after it was greeted elsewhere.
    pub const FEATURES: Features<'static> =
        Features { offered: &[GUEST_STATE, UNCHECKED, SEND_AGAIN, DELTA, DEVICE_STATE], required: &[GUEST_STATE] };

    /// [`Destination::FEATURES`] and post-copy, for a caller that refuses a source that [wants](Destination::wants_post_copy) it where it is not
    /// possible.
    pub const FEATURES_WITH_POST_COPY: Features<'static> = Features {
        offered: &[GUEST_STATE, UNCHECKED, SEND_AGAIN, DELTA, DEVICE_STATE, POST_COPY],
        required: Self::FEATURES.required,
    };

    /// Whether a source may have its guest go on at the destination before all of its memory is there.
    pub fn wants_post_copy(hello: &Hello) -> bool {
        hello.capabilities.required.iter().any(|name| name == POST_COPY)
    }

    /// Why `ram` cannot be filled after the guest has started; none if it can.
    pub fn post_copy_refusal(ram: &GuestRam) -> Option<String> {
        post_copy::refusal(ram)
    }

    /// A destination that fills `ram`. Nobody else writes it before the guest was started, and nobody reads it before
    /// [`DestinationVmm::load`].
    pub fn new(ram: GuestRam) -> Self {
        Self {
            ram,
            devices: Vec::new(),
            device_queue: DEVICE_QUEUE,
            before: Before::default(),
            prefault: false,
            state_dir: None,
            linger: LINGER,
            stall: None,
            give_up_after: None,
            monitor: MonitorRecord::default(),
        }
    }

    /// What the memory holds before; zeros unless said otherwise.
    #[must_use]
    pub fn memory_before(mut self, before: Before) -> Self {
        self.before = before;
        self
    }

    /// A device whose state comes apart from the monitor's. The source must have the same
    /// ([`Source::device`](crate::source::Source::device)), in whatever order, else it is refused before anything is begun.
    #[must_use]
    pub fn device(mut self, id: DeviceId, device: Box<dyn LoadDevice>) -> Self {
        self.devices.push((id, device));
        self
    }

    /// Most bytes of memory for the state of such devices, all together, that has come and waits to be loaded or to be put in order;
    /// 256 MiB unless said otherwise, and at least 64 KiB for each. Each device may use its part of it: one that loads slowly holds up
    /// its own saving, and nothing else.
    #[must_use]
    pub fn device_queue(mut self, bytes: u64) -> Self {
        self.device_queue = bytes;
        self
    }

    /// Whether all of RAM is populated before the source may begin, so that nothing waits for a page fault later. It costs
    /// the memory of pages that the guest never used.
    #[must_use]
    pub fn prefault(mut self, prefault: bool) -> Self {
        self.prefault = prefault;
        self
    }

    /// How long, once the migration has ended, the source has to take note and hang up, or to come back if it was lost
    /// before it could hear; 5 s unless said otherwise. [`Listening::run`] returns so much later at most, and 10 s more (the
    /// silence by which a loss is noticed) where the guest runs here and the source, seemingly connected, says nothing. The
    /// guest is not kept waiting.
    #[must_use]
    pub fn linger(mut self, time: Duration) -> Self {
        self.linger = time;
        self
    }

    /// How long nothing of the guest may arrive, from the acceptance of the migration until the guest is prepared, before it is given
    /// up; for ever unless said otherwise.
    #[must_use]
    pub fn stall_limit(mut self, time: Option<Duration>) -> Self {
        self.stall = time;
        self
    }

    /// How long the guest may take to be prepared, from the acceptance of the migration, before it is given up; for ever unless said
    /// otherwise.
    #[must_use]
    pub fn give_up_after(mut self, time: Option<Duration>) -> Self {
        self.give_up_after = time;
        self
    }

    /// Where the record of the migration is kept on disk; in memory unless said otherwise.
    #[must_use]
    pub fn state_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.state_dir = Some(dir.into());
        self
    }

    /// The monitor is not this process, which drives it from outside: what the record says of it. This process embeds it unless said
    /// otherwise.
    #[must_use]
    pub fn monitor(mut self, monitor: MonitorRecord) -> Self {
        self.monitor = monitor;
        self
    }

    /// Prepares the memory, which takes its time where all of it is to be cleared or populated, and opens the door for one
    /// source.
    ///
    /// # Errors
    /// There is not that much memory, [`Destination::device_queue`] is too small, two devices are the same, or the address cannot be
    /// listened on.
    pub fn listen(self, address: impl Into<Address>, security: &Security) -> Result<Listening, MigrationError> {
        // Before anybody can come: a source waits for its welcome, and no longer than for a handshake.
        let taking = self.prepare()?;
        let listener = Listener::bind(address).map_err(MigrationError::not_accepted)?;
        let address = listener.local_address();
        let incoming = listener.start(security.clone(), Limits::default()).map_err(MigrationError::not_accepted)?;
        Ok(Listening { taking, address, incoming })
    }

    fn prepare(self) -> Result<Taking, MigrationError> {
        let Self { ram, devices, device_queue, before, prefault, state_dir, linger, stall, give_up_after, monitor } =
            self;
        let device_share = share(device_queue, devices.len()).map_err(MigrationError::not_accepted)?;
        let ids = devices.iter().map(|(id, _)| id.clone()).collect();
        check_devices(&Machine { devices: ids, ..Machine::default() }).map_err(MigrationError::not_accepted)?;
        let target = Arc::new(Target::new(ram, prefault).map_err(MigrationError::not_accepted)?);
        target.prepare(before, prefault).map_err(MigrationError::not_accepted)?;
        Ok(Taking {
            target,
            devices,
            device_share,
            state_dir,
            linger,
            stall,
            give_up_after,
            monitor,
            fence: Fence::default(),
        })
    }

    /// Takes the migration of a source that was greeted already: where only its hello says what RAM there is to be. `address`: where
    /// `incoming` listens, for the source to come back, and for the record. As [`Listening::run`] otherwise.
    ///
    /// Sources are greeted ([`Greeting::first`](crate::session::Greeting::first)) with [`Destination::FEATURES`].
    ///
    /// # Errors
    /// As [`Listening::run`]. A source whose RAM blocks have other names or sizes is refused, and told so.
    pub fn take(
        self,
        greeted: Greeted,
        incoming: Incoming,
        address: &Address,
        vmm: &mut dyn DestinationVmm,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<ReceiveReport, MigrationError> {
        driver::run_greeted(self.prepare()?, address, greeted, incoming, vmm, cancel, observer)
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
    /// Where it listens, the port chosen by the system included.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// By which an operator makes a prepared guest run although its source does not answer any more. Only once it is
    /// certain that the source's guest cannot run: else there are two of it.
    pub fn fence(&self) -> Fence {
        self.taking.fence.clone()
    }

    /// Takes one migration. Blocks until it has ended; the monitor's methods are called on this thread. Sources that are
    /// refused do not end it.
    ///
    /// A destination that stands prepared, with the guest loaded, waits for its source as long as it takes: only the source
    /// knows who runs the guest.
    ///
    /// # Errors
    /// Every end but the good one. After the migration was accepted, RAM and monitor are of no use for another try.
    pub fn run(
        self,
        vmm: &mut dyn DestinationVmm,
        cancel: &Cancel,
        observer: &dyn Observer,
    ) -> Result<ReceiveReport, MigrationError> {
        driver::run(self, vmm, cancel, observer)
    }
}
