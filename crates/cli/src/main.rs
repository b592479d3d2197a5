//! The `sterna` program: moves running guests between hosts.
//!
//! Of a migration it decides nothing: options are read (`args`, `units`), handed to the library (`commands`), and what
//! happens is shown (`progress`) until it ends or is cancelled (`signals`). Whatever goes wrong ends in one message that
//! begins with `sterna: ` and in an exit code that says where the guest is. `demo` and `bench` start the program itself as
//! processes on two `hosts`.

mod args;
mod bench;
mod cert;
mod commands;
mod demo;
mod hosts;
mod progress;
mod signals;
mod stdout;
mod units;

use std::io::{IsTerminal, Write};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, LogFilter};
use crate::commands::Exit;

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
    // Nothing is known about the guest after a panic, which is what "unconfirmed" says.
    let exit = match catch_unwind(AssertUnwindSafe(|| commands::run(&cli))) {
        Ok(Ok(exit)) => exit,
        Ok(Err(failure)) => {
            // It may quote QEMU or the peer, whose words are on one line already.
            let lines: Vec<_> = failure.text.lines().map(sterna_wire::text::printable).collect();
            complain(&lines.join("\n"));
            failure.exit
        }
        Err(_) => Exit::Unconfirmed,
    };
    exit.into()
}

/// Prints a message; there is nothing to be done where that fails.
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

/// One line instead of a backtrace: it is for the person at the terminal, and says what to do about the guest.
fn explain_panic(info: &PanicHookInfo<'_>) {
    let what = info.payload_as_str().unwrap_or("no message").replace(char::is_control, " ");
    let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
    complain(&format!(
        "internal error{place}: {what}; please report it. If a migration was under way, `sterna recover ID` on both \
         hosts settles where the guest runs"
    ));
}
