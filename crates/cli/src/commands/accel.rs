//! `sterna accel`: what accelerators there are, whether they work, and how their queues should be set up.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use sterna_idxd::{DeviceInfo, Directories, Kind, Operation, QueueInfo, Reason, WorkQueue, discover, iaa};
use sterna_memory::scan::Implementation;
use sterna_offload::plan::{Accelerator, Plan, PlanDevice};
use sterna_offload::trace::Trace;
use sterna_offload::{Accelerators, Offload, Settings, Trial, try_all};

use super::{Exit, Failure};

/// What is asked about accelerators.
#[derive(Debug, Subcommand)]
pub(crate) enum AccelCommand {
    /// What is here, what of it opens, what it is used for, and why not the rest
    List(ListArgs),
    /// Run every operation, and compare what comes out with what plain code says
    Test(TestArgs),
    /// Print how the queues should be set up, as accel-config takes it, and what a number of guests has of them
    Plan(PlanArgs),
    /// Run every operation, and write down each descriptor and completion record
    Capture(CaptureArgs),
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
    /// What to try: auto, cpu, dsa, iaa, dsa:/dev/dsa/wqX.Y, iaa:/dev/iax/wqX.Y; several separated by commas
    #[arg(long, value_name = "LIST", default_value = "auto")]
    accel: Accelerators,
    /// Try the software model that this file describes
    #[arg(long, value_name = "FILE", conflicts_with = "accel")]
    model: Option<PathBuf>,
    /// Batches of each operation
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
    /// Write the file for accel-config load-config instead of its commands
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// `sterna accel capture`.
#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    #[command(flatten)]
    trial: TrialArgs,
    /// The trace
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

pub(super) fn run(command: &AccelCommand) -> Result<Exit, Failure> {
    match command {
        AccelCommand::List(args) => list(args),
        AccelCommand::Test(args) => test(&args.trial, None),
        AccelCommand::Plan(args) => plan(args),
        AccelCommand::Capture(args) => capture(args),
    }
}

fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
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
    text.push_str("QAT comes with compression and is not looked for yet.\n");
    say(&text);
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

fn start(args: &TrialArgs, trace: Option<&Arc<Trace>>) -> Result<Arc<Offload>, Failure> {
    let choice = match &args.model {
        Some(file) => Accelerators::model(file),
        None => args.accel.clone(),
    };
    let mut settings = Settings::default();
    settings.trace = trace.map(Arc::clone);
    Offload::start(&choice, &settings).map_err(|error| Failure::failed(&error))
}

/// The trial, with everything written down that goes to devices and comes back.
fn capture(args: &CaptureArgs) -> Result<Exit, Failure> {
    let failed = |error: std::io::Error| Failure::failed(&format!("cannot write {}: {error}", args.output.display()));
    let file = std::fs::File::create(&args.output).map_err(failed)?;
    let trace = Arc::new(Trace::new(Box::new(std::io::BufWriter::new(file))));
    let exit = test(&args.trial, Some(&trace));
    trace.finish().map_err(failed)?;
    let exit = exit?;
    say(&format!("The trace is in {}; docs/accelerator-trace.md says how to read it.", args.output.display()));
    Ok(exit)
}

fn test(args: &TrialArgs, trace: Option<&Arc<Trace>>) -> Result<Exit, Failure> {
    let offload = start(args, trace)?;
    let trials = try_all(&offload, args.seed, args.rounds);
    say(&offload.summary());
    say(&table(&trials));
    offload.shutdown();
    let report = offload.report();
    for taken in &report.taken_out {
        say(&format!("{} was taken out of service: {}", taken.device, taken.reason));
    }
    match trials.iter().find_map(|trial| Some((trial, trial.wrong.as_ref()?))) {
        None => Ok(Exit::Completed),
        Some((trial, wrong)) => {
            let what = trial.operation.name();
            Err(Failure::failed(&format!("{what} is wrong ({wrong}); do not use these queues, and please report it")))
        }
    }
}

fn table(trials: &[Trial]) -> String {
    let mut text = format!("{:<18} {:>8}  {:<24} done by the CPU instead\n", "operation", "items", "by an accelerator");
    for trial in trials {
        let by: Vec<String> = trial.done_by.iter().map(|(kind, items)| format!("{} {items}", kind.name())).collect();
        let by = if by.is_empty() { "none".to_owned() } else { by.join(", ") };
        let instead: Vec<String> = trial.fallbacks.iter().map(|(cause, items)| format!("{items} ({cause})")).collect();
        let verdict = if trial.wrong.is_some() { "  WRONG" } else { "" };
        let _ = writeln!(
            text,
            "{:<18} {:>8}  {by:<24} {}{verdict}",
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
    match &args.json {
        Some(path) => std::fs::write(path, plan.json() + "\n")
            .map_err(|error| Failure::failed(&format!("cannot write {}: {error}", path.display())))?,
        None => say(&plan.commands().join("\n")),
    }
    for note in plan.notes() {
        say(&format!("# {note}"));
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
        let offload = Offload::start(&Accelerators::cpu(), &Settings::default()).unwrap();
        let text = table(&try_all(&offload, 1, 1));
        for operation in Operation::ALL {
            assert!(text.lines().any(|line| line.starts_with(operation.name())), "{text}");
        }
    }
}
