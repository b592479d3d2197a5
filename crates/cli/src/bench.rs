//! `sterna bench`: measurements beside what Sterna is compared with, and the targets that they must meet.
//!
//! Each benchmark is a file that makes cells and targets; what they share is in `harness`.

mod bandwidth;
mod compression;
mod delta;
#[cfg(feature = "model")]
mod device_faults;
mod device_state;
mod dirty_rate;
mod harness;
mod machine;
#[cfg(feature = "model")]
mod many_vms;
mod measured;
mod memory;
mod migration;
#[cfg(feature = "model")]
mod offload;
mod qemu;
mod ram;
mod received_bitmap;
#[cfg(feature = "model")]
mod selection;
#[cfg(feature = "model")]
mod zero_page;

use std::io::Write;
use std::path::PathBuf;

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::QemuVersion;

use crate::commands::{Exit, Failure};
use crate::signals;
use harness::Target;
use machine::Machine;

/// `sterna bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_name = "NAME")]
    benchmark: Benchmark,
    /// Smaller guests and fewer runs: at most 5 minutes on two cores
    #[arg(long)]
    quick: bool,
    /// All cells that there are, for hours ('compression' and 'selection' only)
    #[arg(long, conflicts_with = "quick")]
    long: bool,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only the cells whose name contains this; can be given again. Targets that need other cells are not measured
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Rounds over all cells [default: 5; 3 with --quick]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// CPUs that the source side has to itself, and as many that the destination side has
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    cpus: u16,
    /// Hold all of this machine's free memory, and let it go only as migrations take it: for a virtual machine that gives free
    /// memory back to its hypervisor, where each page that is touched anew is many times slower ('qemu' and 'dirty-rate' only)
    #[arg(long)]
    hold_free_memory: bool,
    /// Release of QEMU that is moved and compared with
    #[arg(long, default_value = "10.0", value_parser = release)]
    qemu: QemuVersion,
}

/// The benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Benchmark {
    /// The same guest moved by QEMU alone and through Sterna
    Qemu,
    /// Guest memory moved from process to process by the library, a plain mover and QEMU
    Ram,
    /// Page faults and time of the library's destination with and without its bitmap of received pages
    ReceivedBitmap,
    /// Largest rate at which a guest may write its memory and still be moved, by the library
    DirtyRate,
    /// How closely the library keeps to a bandwidth limit, over every second
    Bandwidth,
    /// Compression methods, channels and networks, beside QEMU's, on content that machines really have
    Compression,
    /// Pages a second with and without deltas, and a guest that writes a word here and there faster than the network
    Delta,
    /// How good the method 'auto' is, beside each fixed choice and one that knows everything: computed, and a dozen real cells
    Selection,
    /// Cost of the work on pages that an accelerator can take over, for the CPU alone and with one
    Offload,
    /// Simulated: looking for zero pages with an accelerator, in the published structure and in Sterna's
    ZeroPage,
    /// Simulated: up to 100 VMs at once on one to eight accelerators
    ManyVms,
    /// Page faults and translation flushes of a device that writes the pages of a migration into fresh memory
    DeviceFaults,
    /// Downtime with four devices of 100 MiB of state, one after the other and all at once; what that costs; a device that stalls
    DeviceState,
}

fn release(text: &str) -> Result<QemuVersion, String> {
    let known = QemuVersion::ALL.into_iter().find(|version| version.to_string() == text);
    known.ok_or_else(|| format!("known are {}", QemuVersion::ALL.map(|version| version.to_string()).join(", ")))
}

impl BenchArgs {
    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 3 } else { 5 })
    }

    /// How much memory is kept warm for a guest that populates `bytes`: no limit where all that is free is held.
    fn warmed(&self, bytes: u64) -> Option<u64> {
        (!self.hold_free_memory).then_some(bytes)
    }

    fn wants(&self, cell: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| cell.contains(part.as_str()))
    }

    /// Every `--only` must mean something: a typing error would else measure less than was asked for, or nothing.
    fn check_only(&self, cells: &[String]) -> Result<(), Failure> {
        match self.only.iter().find(|part| !cells.iter().any(|cell| cell.contains(part.as_str()))) {
            None => Ok(()),
            Some(part) => Err(Failure {
                exit: Exit::Usage,
                text: format!("--only: no cell's name contains '{part}'; the cells are\n  {}", cells.join("\n  ")),
            }),
        }
    }
}

/// Runs a benchmark. A missed target is no failure of the program: the table says so.
pub(crate) fn run(args: &BenchArgs) -> Result<Exit, Failure> {
    let failed = |text: String| Failure { exit: Exit::Failed, text };
    args.check_only(&match args.benchmark {
        Benchmark::Qemu => qemu::cells(),
        Benchmark::Ram => ram::cells(),
        Benchmark::ReceivedBitmap => received_bitmap::cells(),
        Benchmark::DirtyRate => dirty_rate::cells(),
        Benchmark::Bandwidth => bandwidth::cells(),
        Benchmark::Compression => compression::cells(),
        Benchmark::Delta => delta::cells(),
        #[cfg(feature = "model")]
        Benchmark::Selection => selection::cells(),
        #[cfg(feature = "model")]
        Benchmark::Offload => offload::cells(),
        #[cfg(feature = "model")]
        Benchmark::ZeroPage => zero_page::cells(),
        #[cfg(feature = "model")]
        Benchmark::ManyVms => many_vms::cells(),
        #[cfg(feature = "model")]
        Benchmark::DeviceFaults => device_faults::cells(),
        Benchmark::DeviceState => device_state::cells(),
        #[cfg(not(feature = "model"))]
        _ => return Err(left_out()),
    })?;
    if args.long && !matches!(args.benchmark, Benchmark::Compression | Benchmark::Selection) {
        let text =
            "--long: this benchmark has no more cells than it always measures; 'compression' and 'selection' do".into();
        return Err(Failure { exit: Exit::Usage, text });
    }
    let cancel = Cancel::new();
    let watch = signals::watch([cancel.clone()], signals::Meaning::TRIAL, tell);
    let _watch = watch.map_err(|error| failed(format!("cannot wait for signals: {error}")))?;
    let mut machine = Machine::look();
    let findings = match args.benchmark {
        Benchmark::Qemu => qemu::measure(args, &cancel, &tell),
        Benchmark::Ram => ram::measure(args, &cancel, &tell),
        Benchmark::ReceivedBitmap => received_bitmap::measure(args, &cancel, &tell),
        Benchmark::DirtyRate => dirty_rate::measure(args, &cancel, &tell),
        Benchmark::Bandwidth => bandwidth::measure(args, &cancel, &tell),
        Benchmark::Compression => compression::measure(args, &cancel, &tell),
        Benchmark::Delta => delta::measure(args, &cancel, &tell),
        #[cfg(feature = "model")]
        Benchmark::Selection => selection::measure(args, &cancel, &tell),
        #[cfg(feature = "model")]
        Benchmark::Offload => offload::measure(args, &cancel, &tell),
        #[cfg(feature = "model")]
        Benchmark::ZeroPage => zero_page::measure(args, &cancel, &tell),
        #[cfg(feature = "model")]
        Benchmark::ManyVms => many_vms::measure(args, &cancel, &tell),
        #[cfg(feature = "model")]
        Benchmark::DeviceFaults => device_faults::measure(args, &cancel, &tell),
        Benchmark::DeviceState => device_state::measure(args, &cancel, &tell),
        #[cfg(not(feature = "model"))]
        _ => return Err(left_out()),
    };
    let findings = findings.map_err(|error| failed(format!("the benchmark ended: {error}")))?;
    if findings.rows.is_empty() {
        return Err(failed(format!("nothing could be measured: {}", findings.notes.join(" "))));
    }
    machine.look_again();
    let _ = writeln!(std::io::stdout(), "{}", findings.text(&machine));
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{:#}\n", findings.json(&machine)))
            .map_err(|error| failed(format!("cannot write {}: {error}", path.display())))?;
    }
    for (met, what) in [(Some(false), "targets missed"), (None, "targets not measured")] {
        let names = findings.targets.iter().filter(|target| target.met() == met).map(|target: &Target| &*target.name);
        let names: Vec<&str> = names.collect();
        if !names.is_empty() {
            tell(&format!("{what}: {}", names.join("; ")));
        }
    }
    Ok(Exit::Completed)
}

/// For a benchmark that simulates accelerators, in a build without their model.
#[cfg(not(feature = "model"))]
fn left_out() -> Failure {
    let text =
        "this benchmark simulates accelerators, and this build has no model of them: build it with `--features model`"
            .into();
    Failure { exit: Exit::Usage, text }
}

/// One side of a benchmark, for the benchmark that started it.
pub(crate) fn run_side() -> Result<Exit, Failure> {
    ram::side::run().map(|()| Exit::Completed).map_err(|text| Failure { exit: Exit::Failed, text })
}

fn tell(text: &str) {
    // Only for whoever watches; the table goes to standard output.
    let _ = writeln!(std::io::stderr(), "{text}");
}
