//! `sterna accel`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sterna_offload::Accelerators;

/// The commands of `sterna accel`.
#[derive(Debug, Subcommand)]
pub(crate) enum AccelCommand {
    /// List devices and queues, whether they open, what they are used for, and why others are not
    List(ListArgs),
    /// Run every operation on every queue, and compare the results with those of plain code
    Test(TestArgs),
    /// Print how the queues should be set up, as accel-config reads it, and each guest's share of them
    Plan(PlanArgs),
    /// Run every operation on every queue, and record each descriptor and completion record
    Capture(CaptureArgs),
    /// Check a trace against the specification, and report how long each operation took
    Replay(ReplayArgs),
}

/// `sterna accel list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Do not open queues that could be used
    #[arg(long)]
    pub(crate) closed: bool,
    /// Write the list as JSON, whole or not at all; `-` is stdout (the text is then left out)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// `sterna accel test`.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    pub(crate) trial: TrialArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TrialArgs {
    /// What to try: auto, cpu, dsa, iaa, dsa:/dev/dsa/wqX.Y, iaa:/dev/iax/wqX.Y, model:FILE; several separated by commas
    #[arg(long, value_name = "LIST", default_value = "auto")]
    pub(crate) accel: Accelerators,
    /// Try the software model that this file describes, as --accel model:FILE does
    #[arg(long, value_name = "FILE", conflicts_with = "accel")]
    pub(crate) model: Option<PathBuf>,
    /// Batches of each operation on each queue
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) rounds: u32,
    /// Seed of the random content
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

/// `sterna accel plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Guests that are migrated at once: the notes give each guest's share of the queues, and whether ledgers are needed
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) vms: u32,
    /// Only these devices, such as dsa0,iax1
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) devices: Vec<String>,
    /// Plan for a host with so many DSA devices of the usual size, instead of this one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "devices")]
    pub(crate) usual: Option<u32>,
    /// Write the file for accel-config load-config instead of its commands, whole or not at all; `-` is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// `sterna accel capture`.
#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    #[command(flatten)]
    pub(crate) trial: TrialArgs,
    /// The trace: it appears when the run has ended, or was stopped by Ctrl-C; `-` is stdout
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

/// `sterna accel replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The trace
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}
