//! The `sterna` program: moves running guests between hosts.
//!
//! The program makes no decisions about a migration: it parses options (`args`, `units`), passes them to the library (`commands`),
//! and shows the progress (`progress`) until the migration ends or is cancelled (`signals`). Every failure ends in one message that
//! begins with `sterna: ` and in an exit code that shows where the guest is (`exit`).

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod args;
mod cert;
mod commands;
mod control;
mod exit;
mod progress;
mod signals;
mod stdout;
mod units;

use std::io::{IsTerminal, Write};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, LogFilter};
use crate::exit::Exit;

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(explain_panic));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return wrong_options(&error).into(),
    };
    if let Some(filter) = &cli.log {
        start_log(filter);
    }
    if let Some(warning) = sterna_memory::cpu::warning() {
        complain(warning);
    }
    // After a panic nothing is known about the guest, so the outcome is "unconfirmed".
    let exit = match catch_unwind(AssertUnwindSafe(|| commands::run(&cli))) {
        Ok(Ok(exit)) => exit,
        Ok(Err(failure)) => {
            // The text may quote QEMU or the peer, so control characters are removed from each line.
            let lines: Vec<_> = failure.text.lines().map(sterna_wire::text::printable).collect();
            complain(&lines.join("\n"));
            failure.exit
        }
        Err(_) => Exit::Unconfirmed,
    };
    exit.into()
}

/// Prints a message. A failure to print is ignored.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "sterna: {text}");
}

fn wrong_options(error: &clap::Error) -> Exit {
    match args::usage_error(error) {
        Some(text) => complain(&text),
        None => {
            let _ = error.print();
        }
    }
    if error.exit_code() == 0 { Exit::Completed } else { Exit::Usage }
}

fn start_log(filter: &LogFilter) {
    tracing_subscriber::fmt()
        .with_env_filter(filter.filter())
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Prints one line instead of a backtrace, for the user at the terminal: it includes what to do about the guest.
fn explain_panic(info: &PanicHookInfo<'_>) {
    let what = info.payload_as_str().unwrap_or("no message").replace(char::is_control, " ");
    let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
    complain(&format!(
        "internal error{place}: {what}; please report it. If a migration was under way, `sterna recover ID` on both \
         hosts settles where the guest runs"
    ));
}
