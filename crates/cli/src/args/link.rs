//! Options of the connection to the destination and of the pages on it.

use std::ffi::OsStr;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Args, Command, ValueEnum};
use sterna_codec::{ChoiceError, EngineChoice, METHODS, Method, Qatzip, QatzipSoftware};
use sterna_wire::limits::MAX_RAM_CHANNELS;

use crate::units;

/// The connection to the destination and the pages on it.
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
    #[arg(long, default_value = "auto", value_parser = MethodParser)]
    pub(crate) method: Method,
    /// What compresses by deflate; an engine that is named and not there is an error
    #[arg(long, default_value_t = EngineChoice::Auto, requires = "method", value_parser = EngineParser)]
    pub(crate) engine: EngineChoice,
    /// Level of the method, higher is smaller and slower; zstd: -5 to 9, deflate by cpu or qat: 1 to 9 [default for all: 1]
    #[arg(long, allow_hyphen_values = true, requires = "method")]
    pub(crate) level: Option<i32>,
    /// QATzip's library for the engine qat, or its directory [default: what STERNA_QATZIP names, else the system's]
    #[arg(long, value_name = "PATH", requires = "method")]
    pub(crate) qatzip_library: Option<PathBuf>,
    /// What software may compress where the engine is qat
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = QatzipSoftwareArg::WhenBusy, requires = "method")]
    pub(crate) qatzip_software: QatzipSoftwareArg,
    /// CPUs that the sending threads may use on this host, all together, such as 0.5 or 2; not while the guest is paused
    /// [default: no limit]
    #[arg(long, value_name = "N", value_parser = units::cores)]
    pub(crate) max_cpus: Option<f64>,
    /// Maximum bytes per second on the network, such as 1GB/s or 1Gbit/s [default: no limit]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true, value_parser = units::rate)]
    pub(crate) bandwidth: Option<u64>,
    /// Target downtime: how long the guest may be paused for the switchover
    #[arg(long, value_name = "DURATION", default_value = "300ms", allow_hyphen_values = true, value_parser = units::downtime)]
    pub(crate) downtime: Duration,
    /// Maximum bytes of pages in one packet
    #[arg(long, value_name = "SIZE", default_value = "512KiB", allow_hyphen_values = true, value_parser = units::packet_size)]
    pub(crate) packet_size: usize,
}

/// `--qatzip-software`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QatzipSoftwareArg {
    /// Nothing: pages that the hardware does not compress are sent uncompressed
    Forbidden,
    /// The CPU compresses what busy hardware does not
    WhenBusy,
    /// As when-busy; and without hardware, QATzip's own software compresses everything, slowly
    Always,
}

impl LinkArgs {
    /// Returns the settings of the engine `qat`.
    pub(crate) fn qatzip(&self) -> Qatzip {
        let software = match self.qatzip_software {
            QatzipSoftwareArg::Forbidden => QatzipSoftware::Forbidden,
            QatzipSoftwareArg::WhenBusy => QatzipSoftware::WhenBusy,
            QatzipSoftwareArg::Always => QatzipSoftware::Always,
        };
        Qatzip { library: self.qatzip_library.clone(), software, ..Qatzip::default() }
    }
}

/// `--method`.
#[derive(Clone)]
struct MethodParser;

impl TypedValueParser for MethodParser {
    type Value = Method;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<Method, clap::Error> {
        let parse = |name: &str| {
            name.parse().map_err(|error| match error {
                ChoiceError::IsEngine { given, engine } => {
                    format!("{given} is an engine: --method deflate --engine {engine}")
                }
                other => other.to_string(),
            })
        };
        parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(METHODS.iter().map(|row| PossibleValue::new(row.name).help(row.summary))))
    }
}

/// `--engine`.
#[derive(Clone)]
struct EngineParser;

impl TypedValueParser for EngineParser {
    type Value = EngineChoice;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<EngineChoice, clap::Error> {
        EngineChoice::from_str.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = [
            ("auto", "an IAA that --accel opened, else QAT hardware, else the CPU"),
            ("cpu", "gzip by the CPU"),
            ("qat", "gzip by Intel QAT, by way of QATzip"),
            ("iaa", "deflate with a window of 4 KiB by Intel IAA; needs --accel and direct mode"),
        ];
        Some(Box::new(values.into_iter().map(|(name, help)| PossibleValue::new(name).help(help))))
    }
}

pub(super) fn peer_address(text: &str) -> Result<String, String> {
    address(text, "dst-host:4920, 192.0.2.7:4920 or [2001:db8::7]:4920", 1)
}

pub(super) fn listen_address(text: &str) -> Result<String, String> {
    address(text, "0.0.0.0:4920 or [::]:4920 for all addresses of this host", 0)
}

/// Returns `text` if it is a name or an address, a colon and a port of at least `min_port`.
fn address(text: &str, example: &str, min_port: u16) -> Result<String, String> {
    let (host, port) = text.rsplit_once(':').ok_or_else(|| format!("the port is missing; write it as {example}"))?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let ip = |inner: &str| inner.split('%').next().and_then(|ip| ip.parse::<Ipv6Addr>().ok());
    match bracketed.map(|inner| (inner, ip(inner))) {
        Some((inner, Some(ip))) if ip.is_unicast_link_local() && !inner.contains('%') => {
            return Err(format!(
                "a link-local address needs the network interface of this host by which it is reached, such as [{ip}%eth0]:{port}"
            ));
        }
        // Whether the interface exists is found out where the address is used.
        Some((_, Some(_))) => {}
        Some((_, None)) => return Err(format!("what stands in brackets is no IPv6 address; write it as {example}")),
        None if host.is_empty() => return Err(format!("the host is missing; write it as {example}")),
        None if host.contains(':') => {
            return Err(format!("an IPv6 address must be in brackets; write it as {example}"));
        }
        None if host.contains(['[', ']', '/', ' ']) => {
            return Err(format!("this is no host and port; write it as {example}"));
        }
        None => {}
    }
    // `u16` alone would also accept `+4920`.
    match port.parse::<u16>() {
        Ok(number) if number >= min_port && port.bytes().all(|digit| digit.is_ascii_digit()) => Ok(text.to_owned()),
        _ => Err(format!("the port must be a number from {min_port} to 65535; write it as {example}")),
    }
}
