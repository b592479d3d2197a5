//! The kernel that all drivers share: one loop for sources and one for destinations.
//!
//! ```text
//! threads: peer, monitor, channels, signals ── Event ──> run_source / run_destination ── events ──> state machine (sterna-wire)
//!                                                              │  ^                                       │
//!                                              SourceDriver /  v  │ answers                  actions      │
//!                                              DestinationDriver  <───────────────────────────────────────┘
//! ```
//! A loop passes events to the switchover's state machine and has a driver perform the actions that the machine returns, in their order.
//! [`SourceKernel`] and [`DestinationKernel`] hold what every driver has: the peer and the attempts to reconnect to it, the record, the
//! alarm of the data channels, the time limits, cancellation. A driver is a table of what its monitor does. There are three drivers on
//! each side: the library's, the gateway's beside QEMU, and that of a recovery.

mod destination;
mod ends;
mod events;
mod interruptions;
mod ledger;
mod limits;
mod placing;
mod receiving;
mod source;

use std::time::{Duration, Instant};

use sterna_wire::reason::{ErrorKind, Reason};

pub use self::destination::{
    DestinationDriver, DestinationKernel, DestinationOutcome, DestinationSetup, run_destination,
};
pub use self::ends::Ending;
pub use self::events::{Event, Events};
pub(crate) use self::interruptions::Interruptions;
pub use self::ledger::{Ledger, MonitorRecord};
pub use self::limits::{ABORT_TIME, CLOSING_TIME, DELIVERY_TIME, LINGER, LastAnswer, START_TIME, SourceLink};
pub use self::receiving::Receiving;
pub(crate) use self::source::too_long;
pub use self::source::{DeliveryLimits, Reconnection, SourceDriver, SourceKernel, SourceSetup, Unserved, run_source};

/// How often a loop reports progress and looks at its time limits.
const TICK: Duration = Duration::from_millis(250);

/// How many queued events a loop handles before it looks at its time limits: what has arrived in time counts although the loop's thread was
/// late, and a peer that never stops sending delays no limit for long.
const QUEUED_EVENTS: u32 = 64;

/// Returns the reason of a migration that was cancelled on this side.
pub fn cancelled() -> Reason {
    Reason::new(ErrorKind::Cancelled, "cancelled")
}

/// The longest wait. A setting may be longer, and then means for ever; an [`Instant`] cannot hold every duration.
const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Returns the moment `time` from now, at most a year ahead: `time` may be of any length.
pub fn after(time: Duration) -> Instant {
    Instant::now() + time.min(MAX_WAIT)
}

fn passed(deadline: Instant) -> bool {
    Instant::now() >= deadline
}

fn time_left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
