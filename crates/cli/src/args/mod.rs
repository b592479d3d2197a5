//! The command line: every option of every command, its default and its help.
//!
//! An option's help text is its documentation. Impossible values are refused here, before any socket is opened, by an error
//! that names the option. `commands` turns the parsed options into those of the library.
//!
//! Each command has its own file; `link` and `common` have the groups of options that several commands share.

pub(crate) mod accel;
mod common;
mod control;
mod generate;
mod link;
mod list;
mod proxy;
mod receive;
mod recover;
mod send;

use std::str::FromStr;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use self::accel::AccelCommand;
pub(crate) use self::common::{ReportArgs, ScreenArgs, StateArgs, TlsAllowArgs, TlsArgs};
pub(crate) use self::control::{SetArgs, WhichArgs};
pub(crate) use self::generate::{CompletionsArgs, ManArgs};
pub(crate) use self::link::LinkArgs;
pub(crate) use self::list::ListArgs;
pub(crate) use self::proxy::{ProxyReceiveArgs, ProxyReportArgs, ProxySendArgs, each_name_once};
pub(crate) use self::receive::ReceiveArgs;
pub(crate) use self::recover::{RecoverArgs, SideArg};
pub(crate) use self::send::{ModeArg, SendArgs};
use crate::cert::CertArgs;
use crate::exit::EXIT_CODES;

/// Moves running virtual machines between hosts.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, after_help = EXIT_CODES.as_str())]
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
    /// Carry a migration that another program drives, such as libvirt; no guarantee about the switchover
    #[command(subcommand)]
    Proxy(ProxyCommand),
    /// After a crash during the switchover: bring back exactly one guest
    Recover(RecoverArgs),
    /// Show this host's migrations that are under way or not settled, and what each of them needs
    List(ListArgs),
    /// Show the migrations that run on this host, with their figures
    Show(WhichArgs),
    /// At the source, while a migration runs: set its limits
    Set(SetArgs),
    /// Cancel a migration that runs, as Ctrl-C does
    Cancel(WhichArgs),
    /// At the source: pause the guest now, however long the rest of its memory takes then
    SwitchOver(WhichArgs),
    /// At the source: let the guest go on at the destination now, before all of its memory is there
    PostCopy(WhichArgs),
    /// Make certificates for --tls, for a trial or a small site
    Cert(CertArgs),
    /// Look at the accelerators of this host, try them, plan their queues
    #[command(subcommand)]
    Accel(AccelCommand),
    /// Print what a shell needs to complete sterna's commands and options
    Completions(CompletionsArgs),
    /// Write manual pages
    Man(ManArgs),
}

/// The two sides of `sterna proxy`.
#[derive(Debug, Subcommand)]
pub(crate) enum ProxyCommand {
    /// On the source host: listen on a unix socket to which the source QEMU migrates
    Send(Box<ProxySendArgs>),
    /// On the destination host: connect to the unix socket on which the destination QEMU listens
    Receive(Box<ProxyReceiveArgs>),
}

/// A valid value of `--log`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogFilter(String);

impl LogFilter {
    /// Returns the filter for the subscriber.
    pub(crate) fn filter(&self) -> EnvFilter {
        EnvFilter::new(&self.0)
    }
}

fn log_filter(text: &str) -> Result<LogFilter, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    // EnvFilter treats any single word as the name of a module, so a mistyped level would log nothing.
    let stray = text.split(',').find(|part| !part.contains('=') && !LEVELS.contains(part));
    if let Some(stray) = stray {
        return Err(format!("'{stray}' is no level; the levels are off, error, warn, info, debug, trace"));
    }
    EnvFilter::from_str(text).map_err(|error| error.to_string())?;
    Ok(LogFilter(text.to_owned()))
}

/// Returns clap's error about wrong options on one line; none if clap prints help or the version instead.
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
mod tests;
