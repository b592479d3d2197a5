//! `sterna receive`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use sterna_qemu::gateway::Placement;

use super::common::{ReportArgs, ScreenArgs, SocketArgs, StateArgs, TlsAllowArgs, WaitArgs};
use super::link::listen_address;
use crate::exit::EXIT_CODES;
use crate::units;

/// `sterna receive`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES.as_str())]
pub(crate) struct ReceiveArgs {
    /// QMP socket of the destination QEMU; no other program may use it meanwhile
    #[arg(long, value_name = "PATH", required_unless_present = "libvirt", conflicts_with = "libvirt")]
    pub(crate) qmp: Option<PathBuf>,
    /// Have libvirt run the guest, at this URI or at the one that libvirt chooses; the source needs --libvirt, too
    #[arg(long, value_name = "URI", num_args = 0..=1, default_missing_value = "", conflicts_with = "placement")]
    pub(crate) libvirt: Option<String>,
    /// Start the domain by the description in this file, in place of the source's: other paths of disks, for example, as for virsh
    /// migrate --xml
    #[arg(long, value_name = "FILE", requires = "libvirt", conflicts_with = "qmp")]
    pub(crate) xml: Option<PathBuf>,
    /// Address and port to listen on; port 0: any free one
    #[arg(long, value_name = "ADDR:PORT", value_parser = listen_address)]
    pub(crate) listen: String,
    /// Write the address and a line feed to this open file descriptor, a pipe or a file, as soon as sources can connect
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) ready_fd: Option<u16>,
    /// How pages reach guest RAM; the report names the method of each RAM block and the reason
    #[arg(long, value_enum, default_value_t = PlacementArg::Auto)]
    pub(crate) placement: PlacementArg,
    /// Populate all of guest RAM before a source in direct mode may begin, so that nothing waits for page faults later;
    /// costs the memory of pages that the guest never used
    #[arg(long)]
    pub(crate) prefault: bool,
    /// End if no source has begun a migration in this time, such as 10min; QEMU is left as it is [default: no limit]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::wait)]
    pub(crate) wait: Option<Duration>,
    #[command(flatten)]
    pub(crate) waits: WaitArgs,
    #[command(flatten)]
    pub(crate) tls: TlsAllowArgs,
    #[command(flatten)]
    pub(crate) state: StateArgs,
    #[command(flatten)]
    pub(crate) sockets: SocketArgs,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) screen: ScreenArgs,
}

/// `--placement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlacementArg {
    /// The fastest method that each RAM block permits
    Auto,
    /// All pages through QEMU's own migration sockets
    InStream,
}

impl From<PlacementArg> for Placement {
    fn from(placement: PlacementArg) -> Self {
        match placement {
            PlacementArg::Auto => Self::Auto,
            PlacementArg::InStream => Self::InStream,
        }
    }
}
