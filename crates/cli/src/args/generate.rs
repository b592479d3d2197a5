//! `sterna completions` and `sterna man`: made from the options themselves, so that they are as complete as `--help`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// `sterna completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell; for bash: source <(sterna completions bash)
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// `sterna man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory that exists; one page for each command, sterna.1 first
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
}
