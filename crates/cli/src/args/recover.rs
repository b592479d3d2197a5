//! `sterna recover`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use sterna_wire::identity::MigrationId;

use super::common::StateArgs;
use crate::exit::EXIT_CODES;
use crate::units;

/// `sterna recover`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES.as_str())]
pub(crate) struct RecoverArgs {
    /// The migration's id, as `sterna send`, `sterna receive` and `sterna list` print it; without it, all that are not settled on this host,
    /// one after the other
    #[arg(value_name = "ID")]
    pub(crate) id: Option<MigrationId>,
    /// Which side's record, if this host has both
    #[arg(long, value_enum)]
    pub(crate) side: Option<SideArg>,
    /// You assert that the other host is gone for good: its guest does not run and never will again
    #[arg(long, requires = "id")]
    pub(crate) fenced_peer: bool,
    /// Directory with certificates. On the host that sent, `recover` connects with the client certificate. On the host that
    /// received, where --allow is given, it listens with the server certificate
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    pub(crate) tls: Option<PathBuf>,
    /// Name in the certificate of a host that may connect here; on the host that received, as with `sterna receive`
    #[arg(long, value_name = "NAME", requires = "tls")]
    pub(crate) allow: Vec<String>,
    /// On the host that sent: name that the destination's certificate must carry, as with `sterna send`
    #[arg(long, value_name = "NAME", requires = "tls", conflicts_with = "allow")]
    pub(crate) tls_server_name: Option<String>,
    /// Ask the other host without TLS
    #[arg(long)]
    pub(crate) insecure: bool,
    /// On the host that received: end if the source has not sent its decision in this time [default: no limit]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::wait)]
    pub(crate) wait: Option<Duration>,
    #[command(flatten)]
    pub(crate) state: StateArgs,
}

/// A side of a migration.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SideArg {
    /// The host that the guest came from
    Source,
    /// The host that it was moving to
    Destination,
}
