//! Settles a migration from its record, after the process that ran it has ended: `sterna recover`, and monitors that embed the library.
//!
//! The record holds the state that this side had reached, and the monitor reports what is left of the guest. The state machines that
//! drive a migration derive the next actions from both. A source dials the destination until it answers. A destination that does not
//! know the decision listens at its former address until the source connects.
//!
//! `source` and `destination` are the drivers, of any monitor; `embedded` is the interface of a monitor that embeds the library.

mod destination;
mod embedded;
mod source;

use std::time::Duration;

pub use self::destination::{DestinationRemains, GaveUp, RecoveredDestination, recover_destination};
pub use self::embedded::{Recovery, Remains, Settled};
pub use self::source::{RecoveredSource, SourceRemains, recover_source};
use crate::cancel::Cancel;
use crate::record_file::{RecordFile, now_ms};
use crate::report::Observer;
use crate::session::Peer;
use crate::transport::{Address, Security};

/// Longest pause between attempts of a recovery, and of `sterna send`, to reach the destination: a recovery there that has settled the
/// migration answers for [`Means::tell_time`] only. Two recoveries wait for each other, and few of them run at a time.
pub const MAX_DIAL_PAUSE: Duration = Duration::from_secs(1);

/// The reason of a recovery that was cancelled before its end.
pub const CANCELLED: &str = "cancelled; nothing is settled yet";

/// What a recovery of either side needs besides what is left of the monitor.
pub struct Means<'a> {
    /// The record, locked.
    pub record: RecordFile,
    /// An operator asserts that the other host is gone for good and its guest cannot run.
    pub fenced_peer: bool,
    /// Source: where the destination listens. Destination: where to listen.
    pub address: Address,
    /// How connections are secured; or why there cannot be any.
    pub security: Result<Security, String>,
    /// How long a side that is settled tries to report that to the other side, which can ask later. Longer than the longest pause between
    /// two attempts of a source to reach its destination.
    pub tell_time: Duration,
    /// Ends the recovery before its end.
    pub cancel: &'a Cancel,
    /// Receives notes and steps.
    pub observer: &'a dyn Observer,
}

/// Returns a peer without a connection. Its next incarnation is later than any that the other side has seen, since seconds also grow across
/// processes.
fn unconnected_peer() -> Peer {
    const YEAR_2020: u64 = 1_577_836_800_000;
    Peer::unconnected((now_ms().saturating_sub(YEAR_2020) / 1000) as u32)
}
