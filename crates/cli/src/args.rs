//! What can be typed: every option of every command, its default and its help.
//!
//! The option's own help text is the documentation; values that cannot work are refused here, before any socket is
//! opened, by an error that names the option. What the options amount to is made in `commands`.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};
use sterna_codec::{METHODS, Qatzip, QatzipSoftware};
use sterna_qemu::gateway::{Placement, SendMode, SocketDirectory, WaitLimits};
use sterna_wire::identity::MigrationId;
use sterna_wire::limits::{MAX_NAME, MAX_RAM_CHANNELS};
use sterna_wire::switchover::SourceAfter;
use tracing_subscriber::EnvFilter;

use crate::bench::BenchArgs;
use crate::cert::CertArgs;
use crate::commands::accel::AccelCommand;
use crate::demo::DemoArgs;
use crate::units;

/// Most sockets of one kind that a proxy is given.
const MAX_SOCKETS: usize = 256;

const EXIT_CODES: &str = "\
Exit codes:
  0  completed; recover: settled
  1  failed or refused, the guest runs on at the source; recover: not settled
  2  the options are wrong, nothing was done
  3  cancelled (Ctrl-C, SIGTERM, SIGHUP), the guest runs on at the source
  4  unconfirmed: the switchover was begun, but not confirmed; run `sterna recover ID` on both hosts
  5  lost: the source's QEMU died during the migration; the report says what can be done
A report file that cannot be written is an error message, but does not change the code.";

/// Moves running virtual machines between hosts.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Log to stderr: off, error, warn, info, debug or trace, also by module, such as warn,sterna_qemu=debug
    #[arg(long, global = true, value_name = "LEVEL", value_parser = log_filter, display_order = 900)]
    pub(crate) log: Option<LogFilter>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// On the source host: move the guest of a QEMU to where `sterna receive` runs
    Send(Box<SendArgs>),
    /// On the destination host: receive a guest into a QEMU that was started with -incoming defer
    Receive(Box<ReceiveArgs>),
    /// Carry a migration that someone else drives, such as libvirt; no guarantee about the switchover
    #[command(subcommand)]
    Proxy(ProxyCommand),
    /// After a crash during the switchover: bring back exactly one guest
    Recover(RecoverArgs),
    /// Make certificates for --tls, for a trial or a small site
    Cert(CertArgs),
    /// Move a real Linux guest between two QEMUs on this machine, and prove that it came through whole
    Demo(DemoArgs),
    /// Look at the accelerators of this host, try them, plan their queues
    #[command(subcommand)]
    Accel(AccelCommand),
    /// Measure Sterna beside what it is compared with, and say which targets are met
    Bench(BenchArgs),
    /// One side of a benchmark, which starts it itself
    #[command(hide = true)]
    BenchSide,
}

/// The two sides of `sterna proxy`.
#[derive(Debug, Subcommand)]
pub(crate) enum ProxyCommand {
    /// On the source host: listen on a unix socket that the source QEMU is told to migrate to
    Send(Box<ProxySendArgs>),
    /// On the destination host: connect to the unix socket that the destination QEMU listens on
    Receive(Box<ProxyReceiveArgs>),
}

/// `sterna send`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct SendArgs {
    /// QMP socket of the source QEMU; nobody else may use it meanwhile
    #[arg(long, value_name = "PATH")]
    pub(crate) qmp: PathBuf,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    /// Keep up to so much of what was sent, such as 1GiB, and send of a page that changed since only what changed [default: none]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true, value_parser = units::size)]
    pub(crate) delta_cache: u64,
    /// How the guest's memory is taken: direct (read from outside QEMU) where that is possible, else by QEMU's own migration stream
    #[arg(long, value_enum, value_name = "MODE", default_value_t = ModeArg::Auto)]
    pub(crate) mode: ModeArg,
    /// What becomes of the source QEMU, which keeps a stopped copy of the guest, when the guest runs at the destination
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = SourceAfterArg::Quit)]
    pub(crate) source_after: SourceAfterArg,
    #[command(flatten)]
    pub(crate) waits: WaitArgs,
    /// For tests: send this share of the zero pages, in percent, as if they were not zero
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) normal_page_ratio: u8,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) state: StateArgs,
    #[command(flatten)]
    pub(crate) sockets: SocketArgs,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) screen: ScreenArgs,
}

/// `sterna receive`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct ReceiveArgs {
    /// QMP socket of the destination QEMU; nobody else may use it meanwhile
    #[arg(long, value_name = "PATH")]
    pub(crate) qmp: PathBuf,
    /// Address and port to listen on; port 0: any free one
    #[arg(long, value_name = "ADDR:PORT", value_parser = listen_address)]
    pub(crate) listen: String,
    /// How pages reach guest RAM; the report says which way was taken and why
    #[arg(long, value_enum, default_value_t = PlacementArg::Auto)]
    pub(crate) placement: PlacementArg,
    /// End where no source has begun a migration in this time, such as 10min; QEMU is left as it is [default: no limit]
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

/// `sterna proxy send`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct ProxySendArgs {
    /// Unix socket to listen on; tell the source QEMU to migrate to it. Can be given again for guests that are moved at the same
    /// time by QEMUs that cannot share one, each under a name that both sides give
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
#[command(after_help = EXIT_CODES)]
pub(crate) struct ProxyReceiveArgs {
    /// Unix socket that the destination QEMU listens on; can be given again, each time under a name that both sides give
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

/// `sterna recover`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct RecoverArgs {
    /// The migration's id, as `sterna send` and `sterna receive` printed it
    #[arg(value_name = "ID")]
    pub(crate) id: MigrationId,
    /// Which side's record, where this host has both
    #[arg(long, value_enum)]
    pub(crate) side: Option<SideArg>,
    /// You assert that the other host is gone for good: its guest does not run and never will again
    #[arg(long)]
    pub(crate) fenced_peer: bool,
    /// Directory with certificates, to ask the other host; with --allow this host's server certificate is used,
    /// without it the client certificate
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    pub(crate) tls: Option<PathBuf>,
    /// Name in the certificate of a host that may connect here; on the host that received, as with `sterna receive`
    #[arg(long, value_name = "NAME", requires = "tls")]
    pub(crate) allow: Vec<String>,
    /// Ask the other host without TLS
    #[arg(long)]
    pub(crate) insecure: bool,
    /// On the host that received: end where the source has not said in this time what was decided [default: no limit]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::wait)]
    pub(crate) wait: Option<Duration>,
    #[command(flatten)]
    pub(crate) state: StateArgs,
}

/// A side of a migration.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SideArg {
    /// Where the guest came from
    Source,
    /// Where it was going
    Destination,
}

/// Where to, and how the pages get there.
#[derive(Debug, Args)]
pub(crate) struct LinkArgs {
    /// Where `sterna receive` (or `sterna proxy receive`) listens
    #[arg(long, value_name = "HOST:PORT", value_parser = peer_address)]
    pub(crate) to: String,
    /// Connections that carry pages, 1 to 64
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_RAM_CHANNELS))
    )]
    pub(crate) channels: u16,
    /// How pages are compressed
    #[arg(long, default_value = "auto", value_parser = method_names())]
    pub(crate) method: String,
    /// Level of the method, higher is smaller and slower; zstd: -5 to 9, zlib and qatzip: 1 to 9 [default for all: 1]
    #[arg(long, allow_hyphen_values = true, requires = "method")]
    pub(crate) level: Option<String>,
    /// The method qatzip's library, or its directory [default: what STERNA_QATZIP names, else the system's]
    #[arg(long, value_name = "PATH", requires = "method")]
    pub(crate) qatzip_library: Option<PathBuf>,
    /// What the method qatzip may do in software
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = QatzipSoftwareArg::WhenBusy, requires = "method")]
    pub(crate) qatzip_software: QatzipSoftwareArg,
    /// CPUs that the sending threads may use together, such as 1.5, where the method is auto [default: no limit]
    #[arg(long, value_name = "CORES", value_parser = units::cores)]
    pub(crate) cpu: Option<f64>,
    /// Most bytes per second on the network, such as 1GB/s or 1Gbit/s [default: no limit]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true, value_parser = units::rate)]
    pub(crate) bandwidth: Option<u64>,
    /// Longest time without a running guest that is aimed at
    #[arg(long, value_name = "DURATION", default_value = "300ms", allow_hyphen_values = true, value_parser = units::downtime)]
    pub(crate) downtime: Duration,
    /// Most bytes of pages in one packet
    #[arg(long, value_name = "SIZE", default_value = "512KiB", allow_hyphen_values = true, value_parser = units::packet_size)]
    pub(crate) packet_size: usize,
}

/// How long the other side is waited for before the switchover.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Give the migration up where nothing of the guest has moved for so long
    #[arg(long, value_name = "DURATION", default_value = "2min", allow_hyphen_values = true, value_parser = units::wait)]
    pub(crate) stall_limit: Duration,
    /// Give the migration up where the switchover has not come in this time [default: no limit]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = units::wait)]
    pub(crate) time_limit: Option<Duration>,
}

impl From<&WaitArgs> for WaitLimits {
    fn from(args: &WaitArgs) -> Self {
        Self { stall: args.stall_limit, total: args.time_limit }
    }
}

/// `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// Direct where that is possible, else by QEMU's stream; a line says which, and why
    Auto,
    /// Direct, or not at all
    Direct,
    /// By QEMU's own migration stream
    Stream,
}

impl From<ModeArg> for SendMode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Auto => Self::Auto,
            ModeArg::Direct => Self::Direct,
            ModeArg::Stream => Self::Stream,
        }
    }
}

/// `--source-after`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SourceAfterArg {
    /// It is ended
    Quit,
    /// It is kept; whoever resumes its guest runs the guest twice
    Keep,
}

impl From<SourceAfterArg> for SourceAfter {
    fn from(after: SourceAfterArg) -> Self {
        match after {
            SourceAfterArg::Quit => Self::Quit,
            SourceAfterArg::Keep => Self::Keep,
        }
    }
}

/// TLS or not, at the source.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// Mutual TLS 1.3 with ca-cert.pem, client-cert.pem and client-key.pem of this directory
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    pub(crate) tls: Option<PathBuf>,
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

/// Connections that are carried unchanged.
#[derive(Debug, Args)]
pub(crate) struct OpaqueArgs {
    /// Carry connections to this unix socket unchanged (NBD, libvirt's control socket), under a name that both sides
    /// give; can be given again
    #[arg(long = "opaque", value_name = "NAME=PATH", value_parser = opaque)]
    pub(crate) sockets: Vec<(String, PathBuf)>,
}

/// How long what is not there yet is waited for.
#[derive(Debug, Args)]
pub(crate) struct ProxyWaitArgs {
    /// How long the other side is waited for where it does not listen yet: the other proxy, or a local socket
    #[arg(long, value_name = "DURATION", default_value = "30s", allow_hyphen_values = true, value_parser = units::wait_of_proxy)]
    pub(crate) wait: Duration,
}

/// Reports of a proxy, for machines.
#[derive(Debug, Args)]
pub(crate) struct ProxyReportArgs {
    /// Append a report of each migration as one line of JSON, when it has ended; - is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Where records are kept.
#[derive(Debug, Args)]
pub(crate) struct StateArgs {
    /// Where the records are kept that `sterna recover` needs [default: /var/lib/sterna for root, else
    /// $XDG_STATE_HOME/sterna or ~/.local/state/sterna]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Where the sockets for QEMU are made.
#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    /// Directory for the private sockets between this program and QEMU, by its path for QEMU; where it has another path here
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

/// Reports for machines.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Write the report as JSON, whatever the outcome; the file appears whole or not at all; - is stdout (the text then
    /// goes to stderr)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// What is shown on the way.
#[derive(Debug, Args)]
pub(crate) struct ScreenArgs {
    /// Show no progress and no notes; errors, the report and the line `listening on ADDR:PORT` remain
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// `--qatzip-software`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QatzipSoftwareArg {
    /// Nothing: without QAT hardware nothing is begun, and what it does not do goes uncompressed
    Forbidden,
    /// What no hardware does, by the CPU
    WhenBusy,
    /// Without hardware all of it, by QATzip's own software, which is slow
    Always,
}

impl LinkArgs {
    /// How the method `qatzip` does its work.
    pub(crate) fn qatzip(&self) -> Qatzip {
        let software = match self.qatzip_software {
            QatzipSoftwareArg::Forbidden => QatzipSoftware::Forbidden,
            QatzipSoftwareArg::WhenBusy => QatzipSoftware::WhenBusy,
            QatzipSoftwareArg::Always => QatzipSoftware::Always,
        };
        Qatzip { library: self.qatzip_library.clone(), software, ..Qatzip::default() }
    }
}

/// `--placement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlacementArg {
    /// The fastest way that each RAM block permits
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

/// A value of `--log`, known to be good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogFilter(String);

impl LogFilter {
    /// The filter for the subscriber.
    pub(crate) fn filter(&self) -> EnvFilter {
        EnvFilter::new(&self.0)
    }
}

fn log_filter(text: &str) -> Result<LogFilter, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    // EnvFilter takes any word alone for the name of a module, so a mistyped level would log nothing.
    let stray = text.split(',').find(|part| !part.contains('=') && !LEVELS.contains(part));
    if let Some(stray) = stray {
        return Err(format!("'{stray}' is no level; the levels are off, error, warn, info, debug, trace"));
    }
    EnvFilter::from_str(text).map_err(|error| error.to_string())?;
    Ok(LogFilter(text.to_owned()))
}

fn method_names() -> PossibleValuesParser {
    PossibleValuesParser::new(METHODS.iter().map(|row| PossibleValue::new(row.name).help(row.summary)))
}

fn peer_address(text: &str) -> Result<String, String> {
    address(text, "dst-host:4920, 192.0.2.7:4920 or [2001:db8::7]:4920", 1)
}

fn listen_address(text: &str) -> Result<String, String> {
    address(text, "0.0.0.0:4920 or [::]:4920 for all addresses of this host", 0)
}

/// `text` if it is a name or an address, a colon and a port of at least `least_port`.
fn address(text: &str, example: &str, least_port: u16) -> Result<String, String> {
    let (host, port) = text.rsplit_once(':').ok_or_else(|| format!("the port is missing; write it as {example}"))?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match bracketed {
        // A zone (`fe80::1%eth0`) is the resolver's business.
        Some(inner) if inner.split('%').next().is_some_and(|ip| ip.parse::<std::net::Ipv6Addr>().is_ok()) => {}
        Some(_) => return Err(format!("what stands in brackets is no IPv6 address; write it as {example}")),
        None if host.is_empty() => return Err(format!("the host is missing; write it as {example}")),
        None if host.contains(':') => {
            return Err(format!("an IPv6 address must be in brackets; write it as {example}"));
        }
        None if host.contains(['[', ']', '/', ' ']) => {
            return Err(format!("this is no host and port; write it as {example}"));
        }
        None => {}
    }
    // `u16` alone would also take `+4920`.
    match port.parse::<u16>() {
        Ok(number) if number >= least_port && port.bytes().all(|digit| digit.is_ascii_digit()) => Ok(text.to_owned()),
        _ => Err(format!("the port must be a number from {least_port} to 65535; write it as {example}")),
    }
}

fn unix(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        // A path may have the sign, too.
        Some((name, _)) if !name.contains('/') => named(text, "such as vm1=/run/vm/migration.sock"),
        _ if text.is_empty() => Err("the path may not be empty".into()),
        _ => Ok((String::new(), text.into())),
    }
}

fn opaque(text: &str) -> Result<(String, PathBuf), String> {
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
    /// The sockets, each name once.
    pub(crate) fn checked(&self) -> Result<Vec<(String, PathBuf)>, String> {
        each_name_once("--opaque", &self.sockets)
    }
}

/// `sockets`, unless a name is among them twice.
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

/// What clap says about wrong options, on one line; none where it is help that was asked for (or is all there is to say).
pub(crate) fn usage_error(error: &clap::Error) -> Option<String> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return None;
        }
        _ => {}
    }
    let rendered = error.render().to_string();
    let lines = rendered.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let mut text = String::new();
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with("For more information")) {
        if let Some(tip) = line.strip_prefix("tip: ") {
            text.push_str(&format!(" ({tip})"));
        } else {
            let separator = match text.chars().last() {
                None => "",
                Some(':') => " ",
                Some(_) if line.starts_with('[') => " ",
                Some(_) => ", ",
            };
            text.push_str(separator);
            text.push_str(line.strip_prefix("error: ").unwrap_or(line));
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, String> {
        Cli::try_parse_from(line.split_whitespace()).map_err(|error| usage_error(&error).expect("an error, not help"))
    }

    fn error(line: &str) -> String {
        let error = parse(line).expect_err("wrong options");
        assert!(!error.contains('\n') && !error.contains('\x1b'), "one plain line: {error:?}");
        error
    }

    fn send(line: &str) -> SendArgs {
        match parse(&format!("sterna send --qmp q --to h:1 {line}")).unwrap().command {
            Command::Send(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_defaults_are_those_of_the_help() {
        let args = send("--insecure");
        assert_eq!(args.link.qatzip(), Qatzip::default());
        assert_eq!((args.link.channels, args.link.method.as_str(), args.link.level), (2, "auto", None));
        assert_eq!((args.link.cpu, args.link.bandwidth, args.link.downtime), (None, None, Duration::from_millis(300)));
        assert_eq!(args.link.packet_size, sterna_wire::limits::DEFAULT_PACKET_SIZE);
        assert_eq!((args.normal_page_ratio, args.screen.quiet), (0, false));
        assert_eq!((args.report.json, args.state.state_dir), (None, None));
        assert_eq!((args.source_after, args.waits.time_limit), (SourceAfterArg::Quit, None));
        assert_eq!(args.waits.stall_limit, Duration::from_secs(120));
    }

    #[test]
    fn what_may_be_used_of_the_cpu_needs_no_method() {
        assert_eq!(send("--insecure --cpu 1.5").link.cpu, Some(1.5));
    }

    #[test]
    fn how_qatzip_works_arrives() {
        let args = send("--insecure --method qatzip --qatzip-library /opt/qat --qatzip-software forbidden");
        let Qatzip { library, software, .. } = args.link.qatzip();
        assert_eq!((library, software), (Some("/opt/qat".into()), QatzipSoftware::Forbidden));
        let args = send("--insecure --method qatzip --qatzip-software always");
        assert_eq!(args.link.qatzip(), Qatzip { software: QatzipSoftware::Always, ..Qatzip::default() });
    }

    #[test]
    fn every_option_of_send_arrives() {
        let args = send(
            "--channels 64 --method zstd --level -5 --bandwidth 1GB/s --downtime 2s --packet-size 1MiB \
             --normal-page-ratio 100 --delta-cache 3GiB --tls d --state-dir s --json - --quiet --log debug \
             --source-after keep --stall-limit 5s --time-limit 1min",
        );
        assert_eq!(
            (args.link.channels, args.link.method.as_str(), args.link.level.as_deref()),
            (64, "zstd", Some("-5"))
        );
        assert_eq!((args.link.bandwidth, args.link.downtime), (Some(1_000_000_000), Duration::from_secs(2)));
        assert_eq!((args.link.packet_size, args.normal_page_ratio, args.screen.quiet), (1 << 20, 100, true));
        assert_eq!((args.delta_cache, send("").delta_cache), (3 << 30, 0));
        assert_eq!(args.source_after, SourceAfterArg::Keep);
        let WaitLimits { stall, total } = WaitLimits::from(&args.waits);
        assert_eq!((stall, total), (Duration::from_secs(5), Some(Duration::from_secs(60))));
        assert_eq!((args.tls.tls, args.tls.insecure), (Some("d".into()), false));
        assert_eq!((args.state.state_dir, args.report.json), (Some("s".into()), Some("-".into())));
    }

    #[test]
    fn every_option_of_receive_arrives() {
        let line = "sterna receive --qmp q --listen [::]:0 --tls d --allow a --allow b --placement in-stream --json f";
        let Command::Receive(args) = parse(line).unwrap().command else { panic!("another command") };
        assert_eq!((args.listen.as_str(), args.tls.allow), ("[::]:0", vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(Placement::from(args.placement), Placement::InStream);
        assert_eq!(args.wait, None);
        let line = "sterna receive --qmp q --listen a:1 --insecure --wait 90s";
        let Command::Receive(args) = parse(line).unwrap().command else { panic!("another command") };
        assert_eq!(Placement::from(args.placement), Placement::Auto);
        assert_eq!((args.wait, args.waits.time_limit), (Some(Duration::from_secs(90)), None));
    }

    #[test]
    fn every_option_of_proxy_and_recover_arrives() {
        let line = "sterna proxy send --unix u --to h:1 --opaque nbd=/n --opaque ctl=/c=d --insecure --method lz4";
        let Command::Proxy(ProxyCommand::Send(args)) = parse(line).unwrap().command else { panic!("another command") };
        assert_eq!(args.opaque.checked().unwrap(), [("nbd".into(), "/n".into()), ("ctl".into(), "/c=d".into())]);
        let line = "sterna proxy receive --unix u --listen h:1 --opaque nbd=/n --opaque nbd=/c --insecure";
        let Command::Proxy(ProxyCommand::Receive(args)) = parse(line).unwrap().command else {
            panic!("another command")
        };
        assert_eq!(
            args.opaque.checked().unwrap_err(),
            "--opaque nbd=… was given twice; each name stands for one socket"
        );

        let line = "sterna recover 000102030405060708090a0b0c0d0e0f --fenced-peer --tls d --allow a --state-dir s";
        let Command::Recover(args) = parse(line).unwrap().command else { panic!("another command") };
        assert_eq!(args.id.to_string(), "000102030405060708090a0b0c0d0e0f");
        assert!(args.fenced_peer && !args.insecure && args.tls.is_some() && args.allow == ["a"]);
    }

    #[test]
    fn wrong_values_are_refused_by_one_line_that_names_the_option() {
        let send = "sterna send --qmp q --to h:1 --insecure";
        for (option, value, reason) in [
            ("--channels", "0", "0 is not in 1..=64"),
            ("--channels", "65", "65 is not in 1..=64"),
            ("--channels", "two", "invalid digit"),
            ("--method", "lzma", "possible values: none, lz4, zstd, zlib, auto, iaa, qatzip"),
            ("--bandwidth", "1000", "the unit is missing"),
            ("--bandwidth", "1GB", "the unit 'GB' is unknown or could mean two things"),
            ("--bandwidth", "0B/s", "leave the option out for no limit"),
            ("--downtime", "300", "the unit is missing"),
            ("--downtime", "0ms", "1ms to 2000s"),
            ("--downtime", "-5ms", "it cannot be negative"),
            ("--bandwidth", "-1GB/s", "it cannot be negative"),
            ("--downtime", "--quiet", "it must begin with a number, followed by us, ms, s or min, such as 300ms"),
            ("--stall-limit", "0s", "1ms"),
            ("--time-limit", "5", "the unit is missing"),
            ("--source-after", "stop", "possible values: quit, keep"),
            ("--packet-size", "-1", "it cannot be negative"),
            ("--packet-size", "512K", "such as 512KiB"),
            ("--packet-size", "1GiB", "4KiB to 16MiB"),
            ("--normal-page-ratio", "101", "101 is not in 0..=100"),
            ("--delta-cache", "1g", "GiB"),
            ("--log", "loud", "the levels are off, error, warn, info, debug, trace"),
            ("--log", "sterna=loud", "'--log <LEVEL>'"),
        ] {
            let error = error(&format!("{send} {option} {value}"));
            assert!(error.starts_with(&format!("invalid value '{value}' for '{option} <")), "{error}");
            assert!(error.contains(reason), "{error}");
        }
        let error_of_to = error("sterna send --qmp q --to host --insecure");
        assert!(
            error_of_to.starts_with("invalid value 'host' for '--to <HOST:PORT>': the port is missing"),
            "{error_of_to}"
        );
        let error = error("sterna proxy send --unix u --to h:1 --insecure --opaque nbd");
        assert!(
            error.contains("'--opaque <NAME=PATH>': it must be NAME=PATH, such as nbd=/run/vm/nbd.sock"),
            "{error}"
        );
    }

    #[test]
    fn options_that_contradict_each_other_are_refused_by_name() {
        let send = "sterna send --qmp q --to h:1";
        let receive = "sterna receive --qmp q --listen h:1";
        assert_eq!(
            error(&format!("{send} --tls d --insecure")),
            "the argument '--tls <DIR>' cannot be used with '--insecure'"
        );
        let contradiction = error(&format!("{receive} --insecure --allow a --tls d"));
        assert!(contradiction.starts_with("the argument '--insecure' cannot be used with: "), "{contradiction}");
        assert!(contradiction.contains("--tls <DIR>") && contradiction.contains("--allow <NAME>"), "{contradiction}");
        assert_eq!(
            error(&format!("{receive} --allow a")),
            "the following required arguments were not provided: --tls <DIR>"
        );
        assert_eq!(
            error(&format!("{send} --insecure --level 3")),
            "the following required arguments were not provided: --method <METHOD>"
        );
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        assert_eq!(
            error("sterna send"),
            "the following required arguments were not provided: --qmp <PATH>, --to <HOST:PORT>"
        );
        assert_eq!(
            error("sterna send --qmp q --to h:1 --chanels 3"),
            "unexpected argument '--chanels' found (a similar argument exists: '--channels')"
        );
        assert_eq!(error("sterna sent"), "unrecognized subcommand 'sent' (a similar subcommand exists: 'send')");
        assert!(error("sterna recover 12").contains("expected 32 hexadecimal digits"));
    }

    #[test]
    fn help_is_no_error() {
        for line in ["sterna --help", "sterna --version", "sterna", "sterna proxy", "sterna send --help"] {
            let error = Cli::try_parse_from(line.split_whitespace()).unwrap_err();
            assert_eq!(usage_error(&error), None, "{line}");
        }
    }

    #[test]
    fn the_benchmarks_have_names_and_their_sides_are_hidden() {
        for name in ["qemu", "ram", "received-bitmap", "dirty-rate", "bandwidth", "device-faults", "device-state"] {
            let parsed = parse(&format!("sterna bench {name} --quick --json f --rounds 2 --cpus 2"));
            assert!(matches!(parsed.unwrap().command, Command::Bench(_)), "{name}");
        }
        assert!(error("sterna bench rum").contains("possible values: qemu, ram, received-bitmap"));
        assert!(matches!(parse("sterna bench-side").unwrap().command, Command::BenchSide));
        assert!(!Cli::command().render_long_help().to_string().contains("bench-side"));
    }

    #[test]
    fn addresses_are_a_host_and_a_port() {
        for good in ["dst-host:4920", "192.0.2.7:1", "[2001:db8::7]:65535", "[fe80::1%eth0]:4920"] {
            assert_eq!(peer_address(good).as_deref(), Ok(good));
        }
        for (bad, reason) in [
            ("4920", "the port is missing"),
            (":4920", "the host is missing"),
            ("2001:db8::7:4920", "must be in brackets"),
            ("[2001:db8::7]4920", "must be in brackets"),
            ("[host]:4920", "no IPv6 address"),
            ("[]:4920", "no IPv6 address"),
            ("tcp://host:4920", "must be in brackets"),
            ("host/x:4920", "no host and port"),
            ("host:", "number from 1 to 65535"),
            ("host:0", "number from 1 to 65535"),
            ("host:+1", "number from 1 to 65535"),
            ("host:65536", "number from 1 to 65535"),
            ("host:http", "number from 1 to 65535"),
        ] {
            let error = peer_address(bad).unwrap_err();
            assert!(error.contains(reason) && error.contains("dst-host:4920"), "{bad}: {error}");
        }
        assert_eq!(listen_address("0.0.0.0:0").as_deref(), Ok("0.0.0.0:0"));
        assert!(listen_address(":4920").unwrap_err().contains("0.0.0.0:4920"));
    }

    #[test]
    fn opaque_names_are_bounded_in_length_and_number() {
        assert!(opaque("=path").is_err() && opaque("name=").is_err() && opaque("a\x1bb=path").is_err());
        assert!(opaque(&format!("{}=p", "n".repeat(MAX_NAME))).is_ok());
        assert!(opaque(&format!("{}=p", "n".repeat(MAX_NAME + 1))).is_err());
        let many = (0..=MAX_SOCKETS).map(|index| (index.to_string(), PathBuf::from("p")));
        let args = OpaqueArgs { sockets: many.collect() };
        assert_eq!(args.checked().unwrap_err(), "--opaque can be given at most 256 times");
    }
}
