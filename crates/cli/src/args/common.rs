//! Options that several commands share.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use sterna_qemu::gateway::{SocketDirectory, WaitLimits};

use crate::units;

/// Time limits before the switchover.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Give the migration up if no byte of the guest has moved for this time
    #[arg(long, value_name = "DURATION", default_value = "2min", allow_hyphen_values = true, value_parser = units::wait)]
    pub(crate) stall_limit: Duration,
    /// How long a lost connection is dialled again, or waited for, in direct mode while the guest's memory is sent; 0s: not at all
    #[arg(long, value_name = "DURATION", default_value = "5min", allow_hyphen_values = true, value_parser = units::duration)]
    pub(crate) retry: Duration,
    /// Give the migration up if the switchover has not come in this time [default: no limit]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::wait)]
    pub(crate) time_limit: Option<Duration>,
}

impl From<&WaitArgs> for WaitLimits {
    fn from(args: &WaitArgs) -> Self {
        Self { stall: args.stall_limit, total: args.time_limit, retry: args.retry }
    }
}

/// TLS or not, at the source.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// Mutual TLS 1.3 with ca-cert.pem, client-cert.pem and client-key.pem of this directory
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    pub(crate) tls: Option<PathBuf>,
    /// Name that the destination's certificate must carry [default: the host in --to]
    #[arg(long, value_name = "NAME", requires = "tls", conflicts_with = "insecure")]
    pub(crate) tls_server_name: Option<String>,
    /// No TLS: everyone on the network path can read and change the guest's memory
    #[arg(long)]
    pub(crate) insecure: bool,
}

/// TLS or not, at the destination.
#[derive(Debug, Args)]
pub(crate) struct TlsAllowArgs {
    /// Mutual TLS 1.3 with ca-cert.pem, server-cert.pem and server-key.pem of this directory; needs --allow
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    pub(crate) tls: Option<PathBuf>,
    /// Name in the certificate of a host that may send a guest here; can be given again
    #[arg(long, value_name = "NAME", requires = "tls", conflicts_with = "insecure")]
    pub(crate) allow: Vec<String>,
    /// No TLS: everyone on the network path can read and change the guest's memory, and anyone can send a guest
    #[arg(long)]
    pub(crate) insecure: bool,
}

/// The directory of the records.
#[derive(Debug, Args)]
pub(crate) struct StateArgs {
    /// Directory of the records that `sterna recover` needs [default: /var/lib/sterna for root, else
    /// $XDG_STATE_HOME/sterna or ~/.local/state/sterna]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// The directory of the sockets for QEMU.
#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// Directory for the private sockets between this program and QEMU, by its path for QEMU; if it has another path here
    /// and cannot be found through /proc/PID/root, HERE=THERE gives both [default: that for temporary files, TMPDIR]
    #[arg(long, value_name = "DIR", value_parser = socket_directory)]
    socket_dir: Option<SocketDirectory>,
}

impl SocketArgs {
    pub(crate) fn directory(&self) -> SocketDirectory {
        self.socket_dir.clone().unwrap_or_default()
    }
}

fn socket_directory(text: &str) -> Result<SocketDirectory, String> {
    let absolute = |path: &str| match Path::new(path).is_absolute() {
        true => Ok(PathBuf::from(path)),
        false => Err(format!("'{path}' is not an absolute path")),
    };
    match text.split_once('=') {
        Some((here, there)) => Ok(SocketDirectory::Two { here: absolute(here)?, for_qemu: absolute(there)? }),
        None => absolute(text).map(SocketDirectory::One),
    }
}

/// Reports for programs.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Write the report as JSON, whatever the outcome; the file appears whole or not at all; - is stdout (the text then
    /// goes to stderr)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// What is shown during the migration.
#[derive(Debug, Args)]
pub(crate) struct ScreenArgs {
    /// Show no progress and no notes; errors, the report and the line `listening on ADDR:PORT` remain
    #[arg(long, short)]
    pub(crate) quiet: bool,
}
