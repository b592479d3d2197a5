//! `sterna show`, `set`, `cancel`, `switch-over` and `post-copy`: what is done with migrations that run.

use std::time::Duration;

use clap::Args;

use super::common::StateArgs;
use crate::units;

/// Which of the running migrations of this host.
#[derive(Debug, Args)]
pub(crate) struct WhichArgs {
    /// The migration's id or its beginning, the QMP socket of its QEMU, or its domain with libvirt; may be left out if only one runs
    #[arg(value_name = "WHICH")]
    pub(crate) which: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) state: StateArgs,
}

/// `sterna set`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("settings").args(["bandwidth", "downtime"]).required(true).multiple(true))]
pub(crate) struct SetArgs {
    /// Maximum bytes per second on the network from now on, such as 1GB/s or 1Gbit/s; none: no limit
    #[arg(long, value_name = "RATE", value_parser = limit)]
    pub(crate) bandwidth: Option<u64>,
    /// Target downtime from now on: how long the guest may be paused for the switchover
    #[arg(long, value_name = "DURATION", value_parser = units::downtime)]
    pub(crate) downtime: Option<Duration>,
    #[command(flatten)]
    pub(crate) which: WhichArgs,
}

/// Returns the limit in bytes per second; 0: there is none.
fn limit(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(0),
        rate => units::rate(rate).map_err(|error| error.to_string()),
    }
}
