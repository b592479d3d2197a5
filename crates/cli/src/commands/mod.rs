//! The commands: each makes the library's options from the parsed ones, runs, and returns an exit code.
//!
//! A further command is a variant of [`Command`], a file here and a line in [`run`].

mod accel;
mod control;
mod generate;
mod list;
mod proxy;
mod ready_fd;
mod receive;
mod recover;
mod recover_command;
mod report_file;
mod security;
mod send;
mod state_dir;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use sterna_codec::{ChoiceError, MethodChoice};
use sterna_engine::cancel::Cancel;
use sterna_engine::report::Outcome;
use sterna_qemu::gateway::GatewayError;
use sterna_wire::reason::ErrorKind;

use crate::args::{Cli, Command, LinkArgs, ProxyCommand, ReportArgs, ScreenArgs};
use crate::exit::Exit;
use crate::progress::{Screen, with_options};
use crate::signals::{self, Meaning, Watch};
use recover_command::RecoverCommand;
use report_file::ReportFile;

/// The end of a command that has no report: a message and a code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    pub(crate) text: String,
}

impl Failure {
    /// The options are wrong.
    fn usage(what: &impl ToString) -> Self {
        Self { exit: Exit::Usage, text: what.to_string() }
    }

    /// This host refuses, and nothing was touched.
    fn refused(what: &impl ToString) -> Self {
        Self { exit: Exit::Refused, text: what.to_string() }
    }

    /// The options are right, but the command failed.
    fn failed(what: &impl ToString) -> Self {
        Self { exit: Exit::Failed, text: what.to_string() }
    }
}

/// Runs the command.
pub(crate) fn run(cli: &Cli) -> Result<Exit, Failure> {
    let logging = cli.log.is_some();
    match &cli.command {
        Command::Send(args) => send::run(args, logging),
        Command::Receive(args) => receive::run(args, logging),
        Command::Proxy(ProxyCommand::Send(args)) => proxy::run_send(args, logging),
        Command::Proxy(ProxyCommand::Receive(args)) => proxy::run_receive(args, logging),
        Command::Recover(args) => recover::run(args, logging),
        Command::List(args) => list::run(args),
        Command::Show(args) => control::show(args),
        Command::Set(args) => control::set(args),
        Command::Cancel(args) => control::cancel(args),
        Command::SwitchOver(args) => control::switch_over(args),
        Command::PostCopy(args) => control::post_copy(args),
        Command::Cert(args) => {
            crate::cert::run(args).map(|()| Exit::Completed).map_err(|error| Failure::failed(&error))
        }
        Command::Accel(command) => accel::run(command),
        Command::Completions(args) => generate::completions(args),
        Command::Man(args) => generate::man_pages(args),
    }
}

/// The screen, and the signals that cancel a migration.
struct Session {
    cancel: Cancel,
    screen: Arc<Screen>,
    watch: Watch,
}

impl Session {
    fn start(screen: &ScreenArgs, logging: bool, cancelling: Meaning) -> Result<Self, Failure> {
        let cancel = Cancel::new();
        Self::start_with([cancel], screen, logging, cancelling)
    }

    /// Starts a session in which the first signal cancels the first of `cancels`, and so on.
    fn start_with<const N: usize>(
        cancels: [Cancel; N],
        screen: &ScreenArgs,
        logging: bool,
        cancelling: Meaning,
    ) -> Result<Self, Failure> {
        let cancel = cancels[0].clone();
        let screen = Arc::new(Screen::new(screen.quiet, logging, cancel.clone()));
        let watch = signals::watch(cancels, cancelling, {
            let screen = screen.clone();
            move |text| screen.say(text)
        });
        let watch = watch.map_err(|error| Failure::failed(&format!("cannot wait for signals: {error}")))?;
        Ok(Self { cancel, screen, watch })
    }

    /// Ends the session: signals are no longer handled, and the screen is free. Returns whether it was cancelled.
    fn end(self) -> bool {
        drop(self.watch);
        self.screen.finish();
        self.cancel.is_cancelled()
    }
}

/// Returns the failure for a gateway's error. After the decision the gateway returns a report instead, so the guest is at the source.
fn gateway_failure(error: &GatewayError, cancelled: bool) -> Failure {
    Failure { exit: if cancelled { Exit::Cancelled } else { error.into() }, text: error.to_string() }
}

fn method_choice(link: &LinkArgs) -> Result<MethodChoice, Failure> {
    MethodChoice::new(link.method, link.engine, link.level).map_err(|error| {
        let option = if matches!(error, ChoiceError::NoEngine { .. }) { "--engine" } else { "--level" };
        Failure::usage(&format!("{option}: {error}"))
    })
}

/// A gateway's report.
trait Summary: Serialize {
    fn exit(&self) -> Exit;
    fn text(&self) -> String;

    /// Returns the command that helps, where the report leaves something to an operator.
    fn advice(&self) -> Option<String> {
        None
    }
}

/// The content of `--json` if there is no report.
#[derive(Serialize)]
struct NoReport<'a> {
    outcome: Outcome,
    kind: ErrorKind,
    reason: &'a str,
    exit_code: u8,
}

/// Runs `migrate` with a screen and signals, and reports its end in both forms. `recover`: the command that settles it, where it has to be settled.
fn migration<R: Summary>(
    screen: &ScreenArgs,
    report: &ReportArgs,
    recover: &RecoverCommand,
    logging: bool,
    migrate: impl FnOnce(&Cancel, &Screen) -> Result<R, GatewayError>,
) -> Result<Exit, Failure> {
    // An unwritable report must be an error before the guest is touched.
    let file = report.json.as_deref().map(ReportFile::reserve).transpose().map_err(|error| Failure::refused(&error))?;
    let session = Session::start(screen, logging, Meaning::MIGRATION)?;
    let result = migrate(&session.cancel, &session.screen);
    let cancelled = session.end();

    let on_stdout = file.as_ref().is_some_and(ReportFile::is_stdout);
    match result {
        Ok(summary) => {
            let advice = summary.advice().map_or(String::new(), |advice| format!("\n{advice}"));
            let text = recover.after(with_options(&summary.text())) + &advice;
            let _ =
                if on_stdout { writeln!(std::io::stderr(), "{text}") } else { writeln!(std::io::stdout(), "{text}") };
            write_json(file, &summary);
            Ok(summary.exit())
        }
        Err(error) => {
            let failure = gateway_failure(&error, cancelled);
            let outcome = if cancelled { Outcome::Cancelled } else { Outcome::Failed };
            write_json(
                file,
                &NoReport { outcome, kind: error.kind, reason: &failure.text, exit_code: failure.exit as u8 },
            );
            Err(Failure { text: recover.after(failure.text), ..failure })
        }
    }
}

/// Returns the absolute path of a QMP socket, for `sterna show`.
fn absolute(qmp: Option<&Path>) -> String {
    let qmp = qmp.unwrap_or(Path::new(""));
    std::path::absolute(qmp).unwrap_or_else(|_| qmp.to_owned()).display().to_string()
}

/// Writes the report for programs. The exit code shows where the guest is, so a full disk must not change it.
fn write_json(file: Option<ReportFile>, content: &impl Serialize) {
    if let Some(Err(error)) = file.map(|file| file.write(content)) {
        crate::complain(&format!("{error}; the migration itself ended as reported"));
    }
}
