//! `sterna accel`: lists accelerators, tests them, and plans the configuration of their queues.

mod list;
#[cfg(feature = "model")]
mod replay;

use std::fmt::Write as _;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use sterna_engine::cancel::Cancel;
use sterna_idxd::{DeviceInfo, Directories, Kind, discover};
use sterna_offload::plan::{Accelerator, Plan, PlanDevice};
use sterna_offload::trace::Trace;
use sterna_offload::{Accelerators, DeviceSelector, QueueTrial, Settings, StartError, Trials};

use super::Failure;
use super::report_file::{Named, ReportFile};
use crate::args::accel::{AccelCommand, CaptureArgs, PlanArgs, TrialArgs};
use crate::exit::Exit;
use crate::signals::{self, Meaning};

pub(super) fn run(command: &AccelCommand) -> Result<Exit, Failure> {
    match command {
        AccelCommand::List(args) => list::run(args),
        AccelCommand::Test(args) => test(&args.trial),
        AccelCommand::Plan(args) => plan(args),
        AccelCommand::Capture(args) => capture(args),
        #[cfg(feature = "model")]
        AccelCommand::Replay(args) => replay::run(args),
        #[cfg(not(feature = "model"))]
        AccelCommand::Replay(args) => Err(Failure::failed(&format!(
            "{}: a trace is checked against the model of the devices, which this build leaves out (feature `model`)",
            args.file.display()
        ))),
    }
}

/// Names the option of an accelerator that is not there.
fn by_option(error: &StartError) -> String {
    match error {
        StartError::Missing { selector, why } => format!("--accel {selector}: {why}"),
        other => other.to_string(),
    }
}

/// Prints on stdout, or on stderr if stdout has the report.
#[derive(Clone, Copy)]
enum Out {
    Stdout,
    Stderr,
}

impl Out {
    fn of(file: Option<&ReportFile>) -> Self {
        if file.is_some_and(ReportFile::is_stdout) { Self::Stderr } else { Self::Stdout }
    }

    fn say(self, text: &str) -> Result<(), Failure> {
        match self {
            Self::Stdout => crate::stdout::print(text)
                .map_err(|error| Failure::failed(&format!("cannot write to standard output: {error}"))),
            Self::Stderr => {
                // A failure to print is ignored, as everywhere on stderr.
                let _ = writeln!(std::io::stderr(), "{}", text.trim_end());
                Ok(())
            }
        }
    }
}

/// Returns the accelerators to try.
fn choice(args: &TrialArgs) -> Accelerators {
    args.model.as_ref().map_or_else(|| args.accel.clone(), Accelerators::model)
}

/// Opens the accelerators. No open queue at all is an error, unless `without_queues`.
fn open(args: &TrialArgs, without_queues: bool) -> Result<Trials, Failure> {
    let trials =
        Trials::open(&choice(args), &Settings::default()).map_err(|error| Failure::failed(&by_option(&error)))?;
    if trials.queues() == 0 && !without_queues {
        return Err(Failure::failed(&format!(
            "no accelerator was tried, because none was opened ({}); `sterna accel list` says what is here, and \
             `sterna accel test --accel cpu` tries the CPU's own code",
            trials.not_used().join("; ")
        )));
    }
    Ok(trials)
}

fn test(args: &TrialArgs) -> Result<Exit, Failure> {
    let trials = open(args, choice(args) == Accelerators::cpu())?;
    try_queues(trials, args, &Settings::default(), &|| true, Out::Stdout)
}

/// Runs the trial, and records every descriptor and completion record.
fn capture(args: &CaptureArgs) -> Result<Exit, Failure> {
    let chosen = choice(&args.trial);
    if let Some(model) = models(&chosen).find(|model| same_file(model, &args.output)) {
        let model = model.display();
        return Err(Failure::usage(&format!("--output: {model} is the model that is to be read; give another file")));
    }
    let trials = open(&args.trial, false)?;
    let file = ReportFile::reserve_for(TRACE, &args.output).map_err(|error| Failure::failed(&error))?;
    let stream = file.stream().map_err(|error| Failure::failed(&error))?;
    let trace = Arc::new(Trace::new(Box::new(BufWriter::new(stream))));
    let mut settings = Settings::default();
    settings.trace = Some(Arc::clone(&trace));

    let cancel = Cancel::new();
    let watch = signals::watch([cancel.clone()], Meaning::CAPTURE, crate::complain);
    let watch = watch.map_err(|error| Failure::failed(&format!("cannot wait for signals: {error}")))?;
    let out = Out::of(Some(&file));
    let tried = try_queues(trials, &args.trial, &settings, &|| !cancel.is_cancelled(), out);
    // The trace is kept whatever the result, and also if the run was stopped: it is the purpose of the run.
    let path = match file.is_stdout() {
        true => "standard output".to_owned(),
        false => args.output.display().to_string(),
    };
    match trace.finish() {
        Ok(()) => file.keep().map_err(|error| Failure::failed(&error))?,
        Err(error) => return Err(Failure::failed(&file.error(error))),
    }
    drop(watch);
    let printed = out.say(&format!("The trace is in {path}; docs/accelerator-trace.md says how to read it."));
    let exit = tried?;
    printed?;
    match cancel.is_cancelled() {
        true => Err(Failure { exit: Exit::Cancelled, text: "stopped before every queue was tried".into() }),
        false => Ok(exit),
    }
}

const TRACE: Named = Named { option: "--output", what: "trace" };
const PLAN: Named = Named { option: "--json", what: "plan" };

/// Returns the model files in a choice.
fn models(choice: &Accelerators) -> impl Iterator<Item = &Path> {
    choice.selectors().iter().filter_map(|selector| match selector {
        DeviceSelector::Model(file) => Some(file.as_path()),
        _ => None,
    })
}

fn same_file(one: &Path, other: &Path) -> bool {
    let file = |path| std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    matches!((file(one), file(other)), (Ok(one), Ok(other)) if one == other)
}

fn try_queues(
    trials: Trials,
    args: &TrialArgs,
    settings: &Settings,
    go_on: &dyn Fn() -> bool,
    out: Out,
) -> Result<Exit, Failure> {
    let summary = trials.summary();
    let tried = trials.run(settings, args.seed, args.rounds, go_on).map_err(|error| Failure::failed(&error))?;
    let faults: Vec<_> = tried.iter().flat_map(QueueTrial::faults).collect();
    let printed = out.say(&format!("{summary}\n{}{}", table(&tried), faults.join("\n")));
    let Some(first) = faults.first() else { return printed.map(|()| Exit::Completed) };
    let failed: Vec<_> = tried.iter().filter(|trial| !trial.faults().is_empty()).map(|trial| &*trial.queue).collect();
    Err(Failure::failed(&format!(
        "{} of {} failed the trial: {}. Do not use what failed, and please report it. The first fault: {first}",
        failed.len(),
        tried.len(),
        failed.join(", ")
    )))
}

fn table(trials: &[QueueTrial]) -> String {
    let width = trials.iter().map(|trial| trial.queue.len()).max().unwrap_or(0).max(5);
    let mut text = format!(
        "{:<width$}  {:<18} {:>8}  {:<24} done by the CPU instead\n",
        "queue", "operation", "items", "by an accelerator"
    );
    for (queue, trial) in trials.iter().flat_map(|queue| queue.operations.iter().map(|trial| (&queue.queue, trial))) {
        let by: Vec<String> = trial.done_by.iter().map(|(kind, items)| format!("{} {items}", kind.name())).collect();
        let by = if by.is_empty() { "none".to_owned() } else { by.join(", ") };
        let instead: Vec<String> = trial.fallbacks.iter().map(|(cause, items)| format!("{items} ({cause})")).collect();
        let verdict = if trial.wrong.is_some() { "  WRONG" } else { "" };
        let _ = writeln!(
            text,
            "{queue:<width$}  {:<18} {:>8}  {by:<24} {}{verdict}",
            trial.operation.name(),
            trial.items,
            if instead.is_empty() { "none".to_owned() } else { instead.join(", ") }
        );
    }
    text
}

fn plan(args: &PlanArgs) -> Result<Exit, Failure> {
    let devices = match args.usual {
        Some(count) => (0..count).map(PlanDevice::usual_dsa).collect(),
        None => of_this_host(&args.devices)?,
    };
    let plan = Plan::new(args.vms, &devices).map_err(|error| Failure::failed(&error))?;
    let file = args.json.as_deref().map(|path| ReportFile::reserve_for(PLAN, path)).transpose();
    let file = file.map_err(|error| Failure::failed(&error))?;
    let notes = plan.notes().iter().map(|note| format!("# {note}"));
    let out = Out::of(file.as_ref());
    match file {
        None => out.say(&plan.commands().into_iter().chain(notes).collect::<Vec<_>>().join("\n"))?,
        Some(file) => {
            match file.write_bytes((plan.json() + "\n").as_bytes()) {
                Err(error) if !error.is_unread() => return Err(Failure::failed(&error)),
                _ => {}
            }
            out.say(&notes.collect::<Vec<_>>().join("\n"))?;
        }
    }
    Ok(Exit::Completed)
}

fn of_this_host(wanted: &[String]) -> Result<Vec<PlanDevice>, Failure> {
    let infos = discover(&Directories::from_environment()).map_err(|error| Failure::failed(&error))?;
    if let Some(missing) = wanted.iter().find(|name| !infos.iter().any(|info| info.device.name == **name)) {
        return Err(Failure::failed(&format!("there is no device {missing}; `sterna accel list` says what is here")));
    }
    let chosen = infos.iter().filter(|info| wanted.is_empty() || wanted.contains(&info.device.name));
    Ok(chosen.map(planned).collect())
}

fn planned(info: &DeviceInfo) -> PlanDevice {
    let device = &info.device;
    PlanDevice {
        name: device.name.clone(),
        kind: if device.kind == Kind::Dsa { Accelerator::Dsa } else { Accelerator::Iaa },
        engines: device.max_engines.unwrap_or(info.engines.len() as u32),
        work_queues: device.max_queues.unwrap_or(info.queues.len() as u32),
        // A value of 0 means that the kernel does not know it: every device has some.
        entries: device.max_queue_entries.filter(|entries| *entries > 0),
        max_batch: device.max_batch.filter(|most| *most > 0),
        max_transfer: device.max_transfer.filter(|most| *most > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_offload::Operation;

    #[test]
    fn the_table_has_a_line_for_every_operation() {
        let trials = Trials::open(&Accelerators::cpu(), &Settings::default()).unwrap();
        let text = table(&trials.run(&Settings::default(), 1, 1, &|| true).unwrap());
        for operation in Operation::ALL {
            assert!(text.lines().any(|line| line.starts_with(&format!("cpu    {}", operation.name()))), "{text}");
        }
    }
}
