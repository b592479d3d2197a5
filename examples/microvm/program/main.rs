//! The monitor as a program: boots a guest or takes one, lets it work, moves it if asked to, and says what it found.

mod devices;
mod moving;
mod options;
mod outcome;
mod signals;

use clap::Parser;
use devices::Devices;
use moving::NotBegun;
use options::Options;
use outcome::{Mark, Moved, Outcome};
use serde_json::json;
use signals::Told;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use sterna::migration::GuestState;
use sterna_microvm::{Error, Machine};
use sterna_offload::{LEDGERS, Offload, Settings, Shares};

/// For what takes as long as it takes, such as a number of passes at any rate.
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
        say(format_args!("{guest}"));
    }
    if let Some(devices) = outcome.devices.text() {
        say(format_args!("{devices}"));
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
    let told = Told::listen(moves)?;
    let machine = Arc::new(Machine::new(&options.config(), Box::new(io::stdout()))?);
    say(format_args!("{}", machine.description()));
    match &options.incoming {
        Some(at) => take(options, &machine, at, &told),
        None => begin(options, &machine, &told),
    }
}

/// A guest of this machine's own.
fn begin(options: &Options, machine: &Arc<Machine>, told: &Told) -> Result<Outcome, NotBegun> {
    // What would be refused later is refused before the guest has done its work.
    let security = options.migrate_to.as_ref().map(|_| options.security()).transpose()?;
    options.source.method()?;
    let mut shared = Settings::default();
    shared.shares = Shares::of_host(LEDGERS);
    let offload = Offload::start(&options.source.accel, &shared)?;
    machine.boot()?;
    machine.resume()?;
    // At least 20 MiB a second.
    let late = Duration::from_secs(10 + options.machine.memory / 20);
    machine.wait_until(late, |report| report.is_filled() || told.end())?;
    let filled = Mark::of(machine);
    say(format_args!("{} pages filled after {:.3} s", filled.report.pages(), machine.clock().as_secs_f64()));
    machine.throttle(options.work.throttle);
    let mut outcome = Outcome {
        machine: machine.description().to_owned(),
        moved: Moved::No,
        before: None,
        during: None,
        after: None,
        guest: None,
        devices: Devices::default(),
    };
    let (Some(to), Some(security)) = (&options.migrate_to, security) else {
        return stay(options, machine, &filled, told, outcome);
    };
    wait_to_begin(options, machine, &filled, told)?;
    let begun = Mark::of(machine);
    outcome.before = Some(begun.since(&filled));
    say(format_args!("{}", offload.summary()));
    let moved = moving::send(machine, to, options, &security, offload, told)?;
    told.moved();
    let ended = Mark::of(machine);
    outcome.during = Some(ended.since(&begun));
    match moved {
        Ok(report) => {
            say(format_args!("{}", report.text()));
            outcome.moved = Moved::Well(json!(report));
        }
        Err(error) => {
            say(format_args!("{error}"));
            let runs_here = matches!(error.guest, GuestState::Untouched | GuestState::RunsAtSource);
            outcome.moved = Moved::Badly(Box::new(error));
            if runs_here {
                return stay(options, machine, &ended, told, outcome);
            }
        }
    }
    Ok(Outcome { guest: Some(ended.report), devices: Devices::verified(machine), ..outcome })
}

/// A guest of another.
fn take(options: &Options, machine: &Arc<Machine>, at: &str, told: &Told) -> Result<Outcome, NotBegun> {
    let security = options.security()?;
    let moved = moving::receive(machine, at, options, &security, told)?;
    told.moved();
    let mut outcome = Outcome {
        machine: machine.description().to_owned(),
        moved: Moved::No,
        before: None,
        during: None,
        after: None,
        guest: None,
        devices: Devices::default(),
    };
    match moved {
        Ok(report) => {
            say(format_args!("{}", report.text()));
            outcome.moved = Moved::Well(json!(report));
            stay(options, machine, &Mark::of(machine), told, outcome)
        }
        Err(error) => {
            say(format_args!("{error}"));
            let lacks_memory = error.guest == GuestState::LacksMemory;
            outcome.moved = Moved::Badly(Box::new(error));
            outcome.devices = Devices::of(machine);
            if lacks_memory {
                // Whoever touches what is missing waits for ever, and the vCPUs' threads may: nobody may wait for them.
                std::mem::forget(Arc::clone(machine));
            }
            Ok(outcome)
        }
    }
}

/// Waits until the migration is to begin, or was cancelled before that.
fn wait_to_begin(options: &Options, machine: &Machine, filled: &Mark, told: &Told) -> Result<(), Error> {
    let when = &options.when;
    let after = machine.clock() + Duration::from_secs(when.after_seconds.unwrap_or(0));
    let passes = when.after_passes.unwrap_or(1);
    let reached = |report: &sterna_microvm::Report| match when {
        _ if told.cancel().is_cancelled() => true,
        when if when.on_signal => told.begin(),
        when if when.after_seconds.is_some() => machine.clock() >= after,
        _ => report.passes_since(&filled.report) >= passes,
    };
    machine.wait_until(FOR_EVER, reached).map(drop)
}

/// Lets the guest work here for as long as was asked for, and looks what it has found.
fn stay(
    options: &Options,
    machine: &Machine,
    since: &Mark,
    told: &Told,
    outcome: Outcome,
) -> Result<Outcome, NotBegun> {
    let end = machine.clock() + Duration::from_secs(options.seconds);
    machine.wait_until(FOR_EVER, |report| {
        let done = match options.passes {
            Some(passes) => report.passes_since(&since.report) >= passes && since.devices.all_wrote(machine),
            None => machine.clock() >= end,
        };
        done || told.end()
    })?;
    machine.pause()?;
    let ended = Mark::of(machine);
    let after = ended.since(since);
    say(format_args!("{}", after.text()));
    Ok(Outcome { after: Some(after), guest: Some(ended.report), devices: Devices::verified(machine), ..outcome })
}

/// A line to whoever still reads.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// A step of the migration, for whoever watches.
pub(crate) fn note(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}
