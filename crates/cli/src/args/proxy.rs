//! `sterna proxy`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use sterna_wire::limits::MAX_NAME;

use super::common::{ScreenArgs, TlsAllowArgs, TlsArgs};
use super::link::{LinkArgs, listen_address};
use crate::exit::EXIT_CODES;
use crate::units;

/// Maximum number of sockets of one kind.
pub(super) const MAX_SOCKETS: usize = 256;

/// `sterna proxy send`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES.as_str())]
pub(crate) struct ProxySendArgs {
    /// Unix socket to listen on, to which the source QEMU migrates. Can be given again for QEMUs that migrate at the same
    /// time and cannot share one, each under a name that both sides give
    #[arg(long, value_name = "[NAME=]PATH", required = true, value_parser = unix)]
    pub(crate) unix: Vec<(String, PathBuf)>,
    #[command(flatten)]
    pub(crate) opaque: OpaqueArgs,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    #[command(flatten)]
    pub(crate) wait: ProxyWaitArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) report: ProxyReportArgs,
    #[command(flatten)]
    pub(crate) screen: ScreenArgs,
}

/// `sterna proxy receive`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES.as_str())]
pub(crate) struct ProxyReceiveArgs {
    /// Unix socket on which the destination QEMU listens; can be given again, each time under a name that both sides give
    #[arg(long, value_name = "[NAME=]PATH", required = true, value_parser = unix)]
    pub(crate) unix: Vec<(String, PathBuf)>,
    #[command(flatten)]
    pub(crate) opaque: OpaqueArgs,
    #[command(flatten)]
    pub(crate) wait: ProxyWaitArgs,
    /// Address and port to listen on; port 0: any free one
    #[arg(long, value_name = "ADDR:PORT", value_parser = listen_address)]
    pub(crate) listen: String,
    #[command(flatten)]
    pub(crate) tls: TlsAllowArgs,
    #[command(flatten)]
    pub(crate) report: ProxyReportArgs,
    #[command(flatten)]
    pub(crate) screen: ScreenArgs,
}

/// Connections that are carried unchanged.
#[derive(Debug, Args)]
pub(crate) struct OpaqueArgs {
    /// Carry connections to this unix socket unchanged (NBD, libvirt's control socket), under a name that both sides
    /// give; can be given again
    #[arg(long = "opaque", value_name = "NAME=PATH", value_parser = opaque)]
    pub(crate) sockets: Vec<(String, PathBuf)>,
}

/// How long to wait for the other side.
#[derive(Debug, Args)]
pub(crate) struct ProxyWaitArgs {
    /// How long to wait for the other side if it does not listen yet: the other proxy, or a local socket
    #[arg(long, value_name = "DURATION", default_value = "30s", allow_hyphen_values = true, value_parser = units::wait_of_proxy)]
    pub(crate) wait: Duration,
}

/// Reports of a proxy, for programs.
#[derive(Debug, Args)]
pub(crate) struct ProxyReportArgs {
    /// Append a report of each ended migration as one line of JSON; - is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

fn unix(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        // A path may contain `=`, too.
        Some((name, _)) if !name.contains('/') => named(text, "such as vm1=/run/vm/migration.sock"),
        _ if text.is_empty() => Err("the path may not be empty".into()),
        _ => Ok((String::new(), text.into())),
    }
}

pub(super) fn opaque(text: &str) -> Result<(String, PathBuf), String> {
    named(text, "such as nbd=/run/vm/nbd.sock")
}

fn named(text: &str, example: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or_else(|| format!("it must be NAME=PATH, {example}"))?;
    if name.is_empty() || path.is_empty() {
        return Err(format!("neither the name nor the path may be empty, {example}"));
    }
    if name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(format!("the name may have at most {MAX_NAME} bytes and no control characters, {example}"));
    }
    Ok((name.to_owned(), path.into()))
}

impl OpaqueArgs {
    /// Returns the sockets, after checking that each name occurs once.
    pub(crate) fn checked(&self) -> Result<Vec<(String, PathBuf)>, String> {
        each_name_once("--opaque", &self.sockets)
    }
}

/// Returns `sockets`, after checking that each name occurs once.
pub(crate) fn each_name_once(option: &str, sockets: &[(String, PathBuf)]) -> Result<Vec<(String, PathBuf)>, String> {
    if sockets.len() > MAX_SOCKETS {
        return Err(format!("{option} can be given at most {MAX_SOCKETS} times"));
    }
    for (index, (name, _)) in sockets.iter().enumerate() {
        if sockets[..index].iter().any(|(earlier, _)| earlier == name) {
            let given = if name.is_empty() { "without a name".to_owned() } else { format!("{name}=…") };
            return Err(format!("{option} {given} was given twice; each name stands for one socket"));
        }
    }
    Ok(sockets.to_vec())
}
