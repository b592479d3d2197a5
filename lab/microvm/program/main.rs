//! The monitor as a program: boots or receives a guest, lets it work, moves it if the options ask for it, and reports the result.

mod devices;
mod moving;
mod options;
mod outcome;
mod signals;

use clap::Parser;
use devices::Devices;
use moving::NotBegun;
use options::Options;
use outcome::{Moved, Outcome, Snapshot};
use serde_json::json;
use signals::Requests;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use sterna::{GuestState, LEDGERS, Offload, OffloadSettings, Shares};
use sterna_microvm::{Error, Machine};

/// No limit, for waits of unknown length such as a number of passes at any rate.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = match run(&options) {
        Ok(outcome) => outcome,
        Err(error) => {
            eprintln!("microvm: {error}");
            return ExitCode::from(2);
        }
    };
    if let Some(guest) = &outcome.guest {
        print_line(format_args!("{guest}"));
    }
    if let Some(devices) = outcome.devices.text() {
        print_line(format_args!("{devices}"));
    }
    if let Some(path) = &options.json
        && let Err(error) = std::fs::write(path, format!("{:#}\n", outcome.json()))
    {
        eprintln!("microvm: cannot write {}: {error}", path.display());
    }
    outcome.exit()
}

fn run(options: &Options) -> Result<Outcome, NotBegun> {
    let moves = options.incoming.is_some() || options.migrate_to.is_some();
    let requests = Requests::listen(moves)?;
    let machine = Arc::new(Machine::new(&options.config(), Box::new(io::stdout()))?);
    print_line(format_args!("{}", machine.description()));
    match &options.incoming {
        Some(at) => take(options, &machine, at, &requests),
        None => begin(options, &machine, &requests),
    }
}

/// Boots a guest, lets it work, and moves it.
fn begin(options: &Options, machine: &Arc<Machine>, requests: &Requests) -> Result<Outcome, NotBegun> {
    // Wrong options are refused before the guest has done its work.
    let security = options.migrate_to.as_ref().map(|_| options.security()).transpose()?;
    options.source.method()?;
    let mut shared = OffloadSettings::default();
    shared.shares = Shares::of_host(LEDGERS);
    let offload = Offload::start(&options.source.accel, &shared)?;
    machine.boot()?;
    machine.resume()?;
    // At least 20 MiB a second.
    let late = Duration::from_secs(10 + options.machine.memory / 20);
    machine.wait_until(late, |report| report.is_filled() || requests.end())?;
    let filled = Snapshot::of(machine);
    print_line(format_args!("{} pages filled after {:.3} s", filled.report.pages(), machine.clock().as_secs_f64()));
    machine.throttle(options.work.throttle);
    let mut outcome = Outcome {
        machine: machine.description().to_owned(),
        moved: Moved::NotAttempted,
        before: None,
        during: None,
        after: None,
        guest: None,
        devices: Devices::default(),
    };
    let (Some(to), Some(security)) = (&options.migrate_to, security) else {
        return stay(options, machine, &filled, requests, outcome);
    };
    wait_to_begin(options, machine, &filled, requests)?;
    let begun = Snapshot::of(machine);
    outcome.before = Some(begun.since(&filled));
    print_line(format_args!("{}", offload.summary()));
    let moved = moving::send(machine, to, options, &security, offload, requests)?;
    requests.moved();
    let ended = Snapshot::of(machine);
    outcome.during = Some(ended.since(&begun));
    match moved {
        Ok(report) => {
            print_line(format_args!("{}", report.text()));
            outcome.moved = Moved::Completed(json!(report));
        }
        Err(error) => {
            print_line(format_args!("{error}"));
            let runs_here = matches!(error.guest, GuestState::Untouched | GuestState::RunsAtSource);
            outcome.moved = Moved::Failed(Box::new(error));
            if runs_here {
                return stay(options, machine, &ended, requests, outcome);
            }
        }
    }
    Ok(Outcome { guest: Some(ended.report), devices: Devices::verified(machine), ..outcome })
}

/// Receives a guest from another microvm, and lets it work.
fn take(options: &Options, machine: &Arc<Machine>, at: &str, requests: &Requests) -> Result<Outcome, NotBegun> {
    let security = options.security()?;
    let moved = moving::receive(machine, at, options, &security, requests)?;
    requests.moved();
    let mut outcome = Outcome {
        machine: machine.description().to_owned(),
        moved: Moved::NotAttempted,
        before: None,
        during: None,
        after: None,
        guest: None,
        devices: Devices::default(),
    };
    match moved {
        Ok(report) => {
            print_line(format_args!("{}", report.text()));
            outcome.moved = Moved::Completed(json!(report));
            stay(options, machine, &Snapshot::of(machine), requests, outcome)
        }
        Err(error) => {
            print_line(format_args!("{error}"));
            let lacks_memory = error.guest == GuestState::LacksMemory;
            outcome.moved = Moved::Failed(Box::new(error));
            outcome.devices = Devices::of(machine);
            if lacks_memory {
                // An access to a missing page waits for ever, possibly in the vCPUs' threads: these must not be joined.
                std::mem::forget(Arc::clone(machine));
            }
            Ok(outcome)
        }
    }
}

/// Waits until the migration is to begin, or is cancelled before.
fn wait_to_begin(options: &Options, machine: &Machine, filled: &Snapshot, requests: &Requests) -> Result<(), Error> {
    let when = &options.when;
    let after = machine.clock() + Duration::from_secs(when.after_seconds.unwrap_or(0));
    let passes = when.after_passes.unwrap_or(1);
    let reached = |report: &sterna_microvm::Report| match when {
        _ if requests.cancel().is_cancelled() => true,
        when if when.on_signal => requests.begin(),
        when if when.after_seconds.is_some() => machine.clock() >= after,
        _ => report.passes_since(&filled.report) >= passes,
    };
    machine.wait_until(FOR_EVER, reached).map(drop)
}

/// Lets the guest work here for the chosen time, and collects its results.
fn stay(
    options: &Options,
    machine: &Machine,
    since: &Snapshot,
    requests: &Requests,
    outcome: Outcome,
) -> Result<Outcome, NotBegun> {
    let end = machine.clock() + Duration::from_secs(options.seconds);
    machine.wait_until(FOR_EVER, |report| {
        let done = match options.passes {
            Some(passes) => report.passes_since(&since.report) >= passes && since.devices.all_wrote(machine),
            None => machine.clock() >= end,
        };
        done || requests.end()
    })?;
    machine.pause()?;
    let ended = Snapshot::of(machine);
    let after = ended.since(since);
    print_line(format_args!("{}", after.text()));
    Ok(Outcome { after: Some(after), guest: Some(ended.report), devices: Devices::verified(machine), ..outcome })
}

/// Prints a line. A closed pipe is ignored.
fn print_line(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Prints a step of the migration.
pub(crate) fn note(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}
