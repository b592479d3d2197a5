//! Completions for shells, and manual pages.

use clap::CommandFactory;

use super::Failure;
use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::exit::Exit;

pub(super) fn completions(args: &CompletionsArgs) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sterna", &mut script);
    let script = String::from_utf8_lossy(&script);
    let printed = crate::stdout::print(script.trim_end());
    printed.map(|()| Exit::Completed).map_err(|error| Failure::failed(&format!("cannot print the script: {error}")))
}

pub(super) fn man_pages(args: &ManArgs) -> Result<Exit, Failure> {
    let made = clap_mangen::generate_to(Cli::command(), &args.dir);
    made.map(|()| Exit::Completed)
        .map_err(|error| Failure::failed(&format!("cannot write manual pages to {}: {error}", args.dir.display())))
}
