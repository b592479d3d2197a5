//! `sterna accel`: what accelerators there are, whether they work, and how their queues should be set up.

mod replay;

use std::fmt::Write as _;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand};
use sterna::cancel::Cancel;
use sterna_idxd::{DeviceInfo, Directories, Kind, Operation, QueueInfo, Reason, WorkQueue, discover, iaa};
use sterna_memory::scan::Implementation;
use sterna_offload::plan::{Accelerator, Plan, PlanDevice};
use sterna_offload::trace::Trace;
use sterna_offload::{Accelerators, QueueTrial, Settings, Trials, Wish};

use super::report_file::{Named, ReportFile};
use super::{Exit, Failure};
use crate::signals::{self, Meaning};

/// What is asked about accelerators.
#[derive(Debug, Subcommand)]
pub(crate) enum AccelCommand {
    /// What is here, what of it opens, what it is used for, and why not the rest
    List(ListArgs),
    /// Run every operation on every queue, and compare what comes out with what plain code says
    Test(TestArgs),
    /// Print how the queues should be set up, as accel-config takes it, and what a number of guests has of them
    Plan(PlanArgs),
    /// Run every operation on every queue, and write down each descriptor and completion record
    Capture(CaptureArgs),
    /// Hold a trace against the specification, and say how long each operation took
    Replay(replay::ReplayArgs),
}

/// `sterna accel list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Queues that could be used are not opened
    #[arg(long)]
    closed: bool,
}

/// `sterna accel test`.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    trial: TrialArgs,
}

#[derive(Debug, Args)]
struct TrialArgs {
    /// What to try: auto, cpu, dsa, iaa, dsa:/dev/dsa/wqX.Y, iaa:/dev/iax/wqX.Y, model:FILE; several separated by commas
    #[arg(long, value_name = "LIST", default_value = "auto")]
    accel: Accelerators,
    /// Try the software model that this file describes, as --accel model:FILE does
    #[arg(long, value_name = "FILE", conflicts_with = "accel")]
    model: Option<PathBuf>,
    /// Batches of each operation on each queue
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// What the content is chosen by
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// `sterna accel plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Guests that are migrated at once: the notes say what each has of the queues, and whether they need ledgers
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    vms: u32,
    /// Only these devices, such as dsa0,iax1
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    devices: Vec<String>,
    /// Plan for a host with so many DSA devices of the usual size, instead of this one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "devices")]
    usual: Option<u32>,
    /// Write the file for accel-config load-config instead of its commands, whole or not at all; `-` is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// `sterna accel capture`.
#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    #[command(flatten)]
    trial: TrialArgs,
    /// The trace: it appears when the run has ended, or was stopped by Ctrl-C; `-` is stdout
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

pub(super) fn run(command: &AccelCommand) -> Result<Exit, Failure> {
    match command {
        AccelCommand::List(args) => list(args),
        AccelCommand::Test(args) => test(&args.trial),
        AccelCommand::Plan(args) => plan(args),
        AccelCommand::Capture(args) => capture(args),
        AccelCommand::Replay(args) => replay::run(args),
    }
}

/// Prints on stdout, or on stderr where stdout is for something else.
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
                // As everywhere: where that fails nothing can be done.
                let _ = writeln!(std::io::stderr(), "{}", text.trim_end());
                Ok(())
            }
        }
    }
}

fn list(args: &ListArgs) -> Result<Exit, Failure> {
    let directories = Directories::from_environment();
    let mut text = String::new();
    match discover(&directories) {
        Ok(devices) if devices.is_empty() => text.push_str("The idxd driver is here and has no device.\n"),
        Ok(devices) => {
            for info in &devices {
                describe(&mut text, info, &directories, args.closed);
            }
        }
        Err(error) => {
            let _ = writeln!(text, "No DSA or IAA can be used: {error}");
        }
    }
    let _ = writeln!(text, "The CPU does what no accelerator does, by {}.", Implementation::chosen().name());
    text.push_str("QAT is not looked for: QATzip uses it where its library finds it (--method qatzip).\n");
    Out::Stdout.say(&text)?;
    Ok(Exit::Completed)
}

fn describe(text: &mut String, info: &DeviceInfo, directories: &Directories, closed: bool) {
    let device = &info.device;
    let node = device.numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
    let _ = writeln!(
        text,
        "{}: {} version {:#x}{node}, {} engines, {} queues",
        device.name,
        device.kind,
        device.version,
        info.engines.len(),
        info.queues.len()
    );
    for queue in &info.queues {
        let _ = writeln!(text, "  {}: {}", queue.name, verdict(queue, directories, closed));
        for remark in &queue.remarks {
            let _ = writeln!(text, "    note: {remark}");
        }
    }
    let empty = |queue: &QueueInfo| queue.unusable.as_ref().is_some_and(|why| why.reason == Reason::NotConfigured);
    if info.queues.iter().all(empty) {
        let _ = writeln!(text, "  to set it up: `sterna accel plan --devices {}` prints how", device.name);
    }
    for oddity in &info.oddities {
        let _ = writeln!(text, "  odd: {oddity}");
    }
}

/// One sentence about a queue.
fn verdict(queue: &QueueInfo, directories: &Directories, closed: bool) -> String {
    if let Some(unusable) = &queue.unusable {
        return format!("not used: {unusable}");
    }
    let uses = uses(queue);
    if closed {
        return format!("would be used for {uses}");
    }
    match WorkQueue::open(queue.clone(), directories) {
        Ok(opened) => format!("opens (by {}); used for {uses}", opened.way()),
        Err(error) => format!("not used: {error}"),
    }
}

/// What a queue is used for, by what the kernel says that it is configured for.
fn uses(queue: &QueueInfo) -> String {
    const BY_DSA: &[(&str, &[u8])] = &[
        ("zero maps", &[Operation::ComparePattern as u8]),
        ("compares", &[Operation::Compare as u8]),
        ("copies", &[Operation::Memmove as u8]),
        ("copies with checksums", &[Operation::CopyCrc as u8]),
        ("checksums", &[Operation::Crc as u8]),
        ("deltas", &[Operation::CreateDelta as u8, Operation::ApplyDelta as u8]),
    ];
    const BY_IAA: &[(&str, &[u8])] = &[
        ("deflate with a window of 4 KiB", &[iaa::Operation::Compress as u8]),
        ("inflate with such a window", &[iaa::Operation::Decompress as u8]),
    ];
    let all = if queue.kind() == Kind::Dsa { BY_DSA } else { BY_IAA };
    let (has, lacks): (Vec<_>, Vec<_>) =
        all.iter().partition(|(_, codes)| codes.iter().all(|code| queue.declares(*code) != Some(false)));
    let names = |uses: &[&(&str, &[u8])]| uses.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let has_names = if has.is_empty() { "nothing".to_owned() } else { names(&has) };
    match lacks.len() {
        0 => has_names,
        _ => format!("{has_names}; not configured (op_config) for {}", names(&lacks)),
    }
}

/// What is to be tried.
fn choice(args: &TrialArgs) -> Accelerators {
    args.model.as_ref().map_or_else(|| args.accel.clone(), Accelerators::model)
}

/// Opens it. Nothing that opens is an error too, unless only the CPU is meant.
fn open(args: &TrialArgs, without_queues: bool) -> Result<Trials, Failure> {
    let trials = Trials::open(&choice(args), &Settings::default()).map_err(|error| Failure::failed(&error))?;
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

/// The trial, with everything written down that goes to devices and comes back.
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
    // Whatever came out, and where the run was stopped: what was written down is what it was run for.
    let path = match file.is_stdout() {
        true => "standard output".to_owned(),
        false => args.output.display().to_string(),
    };
    match trace.finish() {
        Ok(()) => file.keep().map_err(|error| Failure::failed(&error))?,
        Err(error) => return Err(Failure::failed(&file.error(error))),
    }
    drop(watch);
    let said = out.say(&format!("The trace is in {path}; docs/accelerator-trace.md says how to read it."));
    let exit = tried?;
    said?;
    match cancel.is_cancelled() {
        true => Err(Failure { exit: Exit::Cancelled, text: "stopped before every queue was tried".into() }),
        false => Ok(exit),
    }
}

const TRACE: Named = Named { option: "--output", what: "trace" };
const PLAN: Named = Named { option: "--json", what: "plan" };

/// The files of models in a choice.
fn models(choice: &Accelerators) -> impl Iterator<Item = &Path> {
    choice.wishes().iter().filter_map(|wish| match wish {
        Wish::Model(file) => Some(file.as_path()),
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
    let said = out.say(&format!("{summary}\n{}{}", table(&tried), faults.join("\n")));
    let Some(first) = faults.first() else { return said.map(|()| Exit::Completed) };
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
        // No device has none of these: that is a kernel that does not know.
        entries: device.max_queue_entries.filter(|entries| *entries > 0),
        max_batch: device.max_batch.filter(|most| *most > 0),
        max_transfer: device.max_transfer.filter(|most| *most > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_idxd::{Device, Mode, OperationSet};
    use sterna_offload::Operation;

    #[test]
    fn a_queue_is_said_to_be_used_for_what_it_is_configured_for() {
        let mut queue = QueueInfo::new("wq0.0", Arc::new(Device::new("dsa0", Kind::Dsa)), Mode::Shared, 16);
        let all = "zero maps, compares, copies, copies with checksums, checksums, deltas";
        assert_eq!(uses(&queue), all, "where the kernel says nothing");
        // No-op, batch, compare, compare pattern; only one of the two that deltas need.
        queue.operations = OperationSet::parse("0,0,0,0,0,0,0,000000e3");
        let some =
            "zero maps, compares; not configured (op_config) for copies, copies with checksums, checksums, deltas";
        assert_eq!(uses(&queue), some);
        queue.operations = OperationSet::parse("0,0,0,0,0,0,0,3");
        assert_eq!(uses(&queue), format!("nothing; not configured (op_config) for {all}"));
    }

    #[test]
    fn the_table_has_a_line_for_every_operation() {
        let trials = Trials::open(&Accelerators::cpu(), &Settings::default()).unwrap();
        let text = table(&trials.run(&Settings::default(), 1, 1, &|| true).unwrap());
        for operation in Operation::ALL {
            assert!(text.lines().any(|line| line.starts_with(&format!("cpu    {}", operation.name()))), "{text}");
        }
    }
}
