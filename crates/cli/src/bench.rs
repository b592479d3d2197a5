//! `sterna bench`: measurements beside what Sterna is compared with, and the targets that they must meet.

use std::path::PathBuf;

use crate::commands::{Exit, Failure};

/// Measure Sterna beside what it is compared with, and say which targets are met
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) json: Option<PathBuf>,
}

pub(crate) fn run(_args: &BenchArgs) -> Result<Exit, Failure> {
    Ok(Exit::Completed)
}
