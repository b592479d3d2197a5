//! `sterna list`.

use clap::Args;

use super::common::StateArgs;

/// `sterna list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Migrations that are settled, too
    #[arg(long)]
    pub(crate) all: bool,
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) state: StateArgs,
}
