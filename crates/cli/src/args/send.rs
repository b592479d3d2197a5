//! `sterna send`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use sterna_engine::source::{IaaVerify, NotConverging, Throttle};
use sterna_offload::Accelerators;
use sterna_offload::share::MAX_WEIGHT;
use sterna_qemu::gateway::{DirectOptions, Monitor, SendMode};
use sterna_wire::switchover::SourceAfter;

use super::common::{ReportArgs, ScreenArgs, SocketArgs, StateArgs, TlsArgs, WaitArgs};
use super::link::LinkArgs;
use crate::exit::EXIT_CODES;
use crate::units;

/// `sterna send`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES.as_str())]
pub(crate) struct SendArgs {
    /// QMP socket of the source QEMU; no other program may use it meanwhile
    #[arg(long, value_name = "PATH", required_unless_present = "libvirt", conflicts_with = "libvirt")]
    pub(crate) qmp: Option<PathBuf>,
    /// The QEMU belongs to libvirt, at this URI or at the one that libvirt chooses; the destination needs --libvirt, too
    #[arg(long, value_name = "URI", num_args = 0..=1, default_missing_value = "", requires = "domain")]
    pub(crate) libvirt: Option<String>,
    /// Name or UUID of the domain, with --libvirt
    #[arg(long, value_name = "NAME", requires = "libvirt", conflicts_with = "qmp")]
    pub(crate) domain: Option<String>,
    #[command(flatten)]
    pub(crate) link: LinkArgs,
    /// Begin nothing: report every refusal of both sides, the mode, the memory to send, and how long that takes
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Keep up to this much of the sent pages, such as 1GiB, and send only the changes of a page that is sent again [default: none]
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true, value_parser = units::size)]
    pub(crate) delta_cache: u64,
    /// Send the guest although the destination's machine differs in this: a name from a refusal, or its beginning, such as disk; may be
    /// given several times
    #[arg(long, value_name = "NAME", conflicts_with = "libvirt")]
    pub(crate) allow_difference: Vec<String>,
    /// Send the guest although the destination's CPU lacks features that it has: it is lost as soon as it uses one of them
    #[arg(long, conflicts_with = "libvirt")]
    pub(crate) force_cpu: bool,
    /// How the guest's memory is read: direct (from outside QEMU) where that is possible, else by QEMU's own migration stream
    #[arg(long, value_enum, value_name = "MODE", default_value_t = ModeArg::Auto)]
    pub(crate) mode: ModeArg,
    #[command(flatten)]
    pub(crate) direct: DirectArgs,
    /// Whether the source QEMU, which has a stopped copy of the guest, is ended once the guest runs at the destination
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = SourceAfterArg::Quit)]
    pub(crate) source_after: SourceAfterArg,
    /// Wait up to this time for a destination that does not listen yet, such as 1min [default: not at all]
    #[arg(long, value_name = "DURATION", default_value = "0s", hide_default_value = true, conflicts_with = "dry_run", allow_hyphen_values = true, value_parser = units::duration)]
    pub(crate) wait: Duration,
    #[command(flatten)]
    pub(crate) waits: WaitArgs,
    /// For tests and measurements: send this share of the zero pages, in percent, as if they were not zero
    #[arg(long, hide = true, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
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

/// Heading of the options that need direct mode.
const DIRECT: &str = "Direct mode only";

/// Options that need direct mode.
#[derive(Debug, Args)]
pub(crate) struct DirectArgs {
    /// Accelerators that find zero pages and copy (dsa), or compress (iaa): cpu, auto, dsa, iaa, dsa:/dev/dsa/wqX.Y,
    /// iaa:/dev/iax/wqX.Y, model:FILE; several separated by commas
    #[arg(long, help_heading = DIRECT, value_name = "LIST", default_value = "cpu")]
    accel: Accelerators,
    /// This guest's share of an accelerator that other guests use at the same time, as a weight from 1 to 1000: with weights 3 and 1 the
    /// first gets three quarters
    #[arg(
        long,
        help_heading = DIRECT,
        value_name = "N",
        default_value_t = 1,
        requires = "accel",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WEIGHT))
    )]
    accel_weight: u32,
    /// When the output of an iaa is decompressed and compared
    #[arg(long, help_heading = DIRECT, value_enum, value_name = "WHEN", default_value_t = IaaVerifyArg::WithoutChecksums, requires = "accel")]
    iaa_verify: IaaVerifyArg,
    /// Check the content of packets from end to end; off: damage by a codec, an accelerator or bad memory goes unnoticed
    #[arg(long, help_heading = DIRECT, value_enum, value_name = "ON|OFF", default_value_t = OnOff::On)]
    checksums: OnOff,
    /// If the guest writes faster than its pages can be sent: tell (report it and go on), throttle (slow it down, by default at first for
    /// 20 % of the time, then 10 % more each time, up to 99 %), post-copy (at once, or after ROUNDS rounds at the latest), give-up
    #[arg(
        long,
        help_heading = DIRECT,
        value_name = "tell|throttle[:FIRST,STEP,MOST]|post-copy[:ROUNDS]|give-up",
        default_value = "tell",
        value_parser = no_convergence
    )]
    on_no_convergence: NotConverging,
}

impl From<&DirectArgs> for DirectOptions {
    fn from(args: &DirectArgs) -> Self {
        Self {
            accelerators: args.accel.clone(),
            accelerator_weight: args.accel_weight,
            iaa_verify: args.iaa_verify.into(),
            checksums: args.checksums == OnOff::On,
            not_converging: args.on_no_convergence,
        }
    }
}

/// `--checksums`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnOff {
    On,
    Off,
}

/// `--iaa-verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum IaaVerifyArg {
    /// If packets have no checksums, by which the destination would find a wrong stream
    WithoutChecksums,
    /// Always
    Always,
    /// Never
    Never,
}

impl From<IaaVerifyArg> for IaaVerify {
    fn from(when: IaaVerifyArg) -> Self {
        match when {
            IaaVerifyArg::WithoutChecksums => Self::WithoutChecksums,
            IaaVerifyArg::Always => Self::Always,
            IaaVerifyArg::Never => Self::Never,
        }
    }
}

/// A value of `--on-no-convergence`.
fn no_convergence(text: &str) -> Result<NotConverging, String> {
    let (what, with) = text.split_once(':').map_or((text, None), |(what, with)| (what, Some(with)));
    match (what, with) {
        ("tell", None) => Ok(NotConverging::GoOn),
        ("throttle", None) => Ok(NotConverging::Throttle(Throttle::default())),
        ("throttle", Some(percents)) => throttle(percents).map(NotConverging::Throttle),
        ("post-copy", None) => Ok(NotConverging::PostCopy),
        ("post-copy", Some(rounds)) => match rounds.parse() {
            Ok(rounds) if rounds > 0 => Ok(NotConverging::PostCopyAfter(rounds)),
            _ => Err("post-copy: is followed by a number of rounds from 1 on, such as post-copy:3".into()),
        },
        ("give-up", None) => Ok(NotConverging::GiveUp),
        _ => Err("expected tell, throttle, throttle:FIRST,STEP,MOST, post-copy, post-copy:ROUNDS or give-up".into()),
    }
}

/// Parses the three percentages of `throttle:`.
fn throttle(text: &str) -> Result<Throttle, String> {
    let percents: Result<Vec<u8>, _> = text.split(',').map(str::parse).collect();
    match percents.as_deref() {
        Ok(&[initial, step, max]) if (1..=max).contains(&initial) && step > 0 && max <= 99 => {
            Ok(Throttle { initial, step, max })
        }
        _ => Err("throttle: is followed by three numbers of percent: at first, more with each step, at most (up to 99), such as \
                  throttle:20,10,99"
            .into()),
    }
}

impl SendArgs {
    /// Returns the monitor of the source's QEMU.
    pub(crate) fn monitor(&self) -> Monitor {
        match (&self.qmp, &self.domain) {
            (None, Some(domain)) => {
                Monitor::Libvirt { uri: self.libvirt.clone().filter(|uri| !uri.is_empty()), domain: domain.clone() }
            }
            (socket, _) => Monitor::Socket(socket.clone().unwrap_or_default()),
        }
    }
}

/// `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// Direct where that is possible, else by QEMU's stream; a note names the mode and the reason
    Auto,
    /// Direct, or the migration is refused
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
    /// It is kept; never resume its guest, or the guest runs twice
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
