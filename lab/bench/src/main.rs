//! `sterna-bench`: the benchmarks of Sterna and of what it is compared with, the demo, and the page of results.
//!
//! Each benchmark is a row of [`BENCHMARKS`] and a file that makes cells and targets; what they share is in `harness`. Two `hosts` on
//! this machine run the `sterna` program, or this program again as a `side` of a benchmark of the library.

mod bandwidth;
mod compression;
mod delta;
mod demo;
mod device_faults;
mod device_state;
mod dirty_rate;
mod harness;
mod hosts;
mod machine;
mod many_vms;
mod measured;
mod memory;
mod migration;
mod offload;
mod options;
mod provenance;
mod qemu;
mod ram;
mod received_bitmap;
mod report;
mod selection;
mod signals;
mod zero_page;

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args, Command, FromArgMatches};
use sterna_engine::cancel::Cancel;

use crate::harness::{Findings, Target};
use crate::hosts::HostsError;
use crate::machine::Machine;
use crate::options::BenchArgs;
use crate::provenance::Provenance;

/// Measures the wanted cells, tells what it does at the moment, and judges the targets.
type Measure = fn(&BenchArgs, &Cancel, &dyn Fn(&str)) -> Result<Findings, HostsError>;

/// A benchmark: a command of this program.
struct Benchmark {
    name: &'static str,
    about: &'static str,
    /// Returns the names of all its cells.
    cells: fn() -> Vec<String>,
    measure: Measure,
    /// Whether `--long` measures more than the usual cells.
    has_long: bool,
}

const BENCHMARKS: &[Benchmark] = &[
    Benchmark {
        name: "qemu",
        about: "The same guest moved by QEMU alone and through Sterna",
        cells: qemu::cells,
        measure: qemu::measure,
        has_long: false,
    },
    Benchmark {
        name: "ram",
        about: "Guest memory moved from process to process by the library, a plain mover and QEMU",
        cells: ram::cells,
        measure: ram::measure,
        has_long: false,
    },
    Benchmark {
        name: "received-bitmap",
        about: "Page faults and time of the library's destination with and without its bitmap of received pages",
        cells: received_bitmap::cells,
        measure: received_bitmap::measure,
        has_long: false,
    },
    Benchmark {
        name: "dirty-rate",
        about: "Largest rate at which a guest may write its memory and still be moved, by the library",
        cells: dirty_rate::cells,
        measure: dirty_rate::measure,
        has_long: false,
    },
    Benchmark {
        name: "bandwidth",
        about: "How closely the library keeps to a bandwidth limit, over every second",
        cells: bandwidth::cells,
        measure: bandwidth::measure,
        has_long: false,
    },
    Benchmark {
        name: "compression",
        about: "Compression methods, channels and networks, beside QEMU's, on real content",
        cells: compression::cells,
        measure: compression::measure,
        has_long: true,
    },
    Benchmark {
        name: "delta",
        about: "Pages a second with and without deltas, and a guest that writes single words faster than the network",
        cells: delta::cells,
        measure: delta::measure,
        has_long: false,
    },
    Benchmark {
        name: "selection",
        about: "How good the method 'auto' is, beside each fixed choice and an oracle: computed, and a \
                dozen real cells",
        cells: selection::cells,
        measure: selection::measure,
        has_long: true,
    },
    Benchmark {
        name: "offload",
        about: "Cost of the work on pages that an accelerator can take over, for the CPU alone and with one",
        cells: offload::cells,
        measure: offload::measure,
        has_long: false,
    },
    Benchmark {
        name: "zero-page",
        about: "Simulated: the search for zero pages with an accelerator, in the published structure and in Sterna's",
        cells: zero_page::cells,
        measure: zero_page::measure,
        has_long: false,
    },
    Benchmark {
        name: "many-vms",
        about: "Simulated: up to 100 VMs at once on one to eight accelerators",
        cells: many_vms::cells,
        measure: many_vms::measure,
        has_long: false,
    },
    Benchmark {
        name: "device-faults",
        about: "Page faults and translation flushes of a device that writes the pages of a migration into fresh memory",
        cells: device_faults::cells,
        measure: device_faults::measure,
        has_long: false,
    },
    Benchmark {
        name: "device-state",
        about: "Downtime with four devices of 100 MiB of state, one after the other and all at once; what that costs; a \
                device that stalls",
        cells: device_state::cells,
        measure: device_state::measure,
        has_long: false,
    },
];

/// The command of one side of a benchmark, which the benchmark itself starts.
const SIDE: &str = "side";

/// How a command failed.
enum Failure {
    /// The options are wrong; nothing was measured.
    Usage(String),
    Failed(String),
}

fn main() -> ExitCode {
    let (code, text) = match run(&program().get_matches()) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Failed(text)) => (1, text),
        Err(Failure::Usage(text)) => (2, text),
    };
    progress(&format!("sterna-bench: {text}"));
    ExitCode::from(code)
}

fn program() -> Command {
    let benchmark =
        |benchmark: &Benchmark| BenchArgs::augment_args(Command::new(benchmark.name)).about(benchmark.about);
    Command::new("sterna-bench")
        .about("Measures Sterna beside what it is compared with")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(BENCHMARKS.iter().map(benchmark))
        .subcommand(demo::DemoArgs::augment_args(Command::new("demo")))
        .subcommand(report::ReportArgs::augment_args(Command::new("report")))
        .subcommand(Command::new(SIDE).hide(true))
}

fn run(matches: &ArgMatches) -> Result<(), Failure> {
    match matches.subcommand() {
        Some(("demo", options)) => demo::run(&parsed(options)?).map_err(Failure::Failed),
        Some(("report", options)) => report::run(&parsed(options)?).map_err(Failure::Failed),
        Some((SIDE, _)) => ram::side::run().map_err(Failure::Failed),
        Some((name, options)) => {
            let benchmark = BENCHMARKS.iter().find(|benchmark| benchmark.name == name);
            measure(benchmark.expect("clap accepts only names of the table"), &parsed(options)?)
        }
        None => unreachable!("clap requires a command"),
    }
}

fn parsed<T: FromArgMatches>(options: &ArgMatches) -> Result<T, Failure> {
    T::from_arg_matches(options).map_err(|error| Failure::Usage(error.to_string()))
}

/// Runs a benchmark. A missed target is no failure of the program; the table shows it.
fn measure(benchmark: &Benchmark, args: &BenchArgs) -> Result<(), Failure> {
    args.check_only(&(benchmark.cells)()).map_err(Failure::Usage)?;
    if args.long && !benchmark.has_long {
        let others: Vec<_> =
            BENCHMARKS.iter().filter(|other| other.has_long).map(|other| format!("'{}'", other.name)).collect();
        return Err(Failure::Usage(format!(
            "--long: this benchmark has no more cells than it always measures; {} do",
            others.join(" and ")
        )));
    }
    let cancel = Cancel::new();
    signals::cancel_on_signals(cancel.clone(), progress)
        .map_err(|error| Failure::Failed(format!("cannot wait for signals: {error}")))?;
    let mut machine = Machine::describe();
    let findings = (benchmark.measure)(args, &cancel, &progress)
        .map_err(|error| Failure::Failed(format!("the benchmark ended: {error}")))?;
    if findings.rows.is_empty() {
        return Err(Failure::Failed(format!("nothing could be measured: {}", findings.notes.join(" "))));
    }
    machine.add_load();
    let _ = writeln!(std::io::stdout(), "{}", findings.text(&machine));
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{:#}\n", findings.json(&machine, &Provenance::of_this_run())))
            .map_err(|error| Failure::Failed(format!("cannot write {}: {error}", path.display())))?;
    }
    for (met, what) in [(Some(false), "targets missed"), (None, "targets not measured")] {
        let names = findings.targets.iter().filter(|target| target.met() == met).map(|target: &Target| &*target.name);
        let names: Vec<&str> = names.collect();
        if !names.is_empty() {
            progress(&format!("{what}: {}", names.join("; ")));
        }
    }
    Ok(())
}

/// Prints a progress line to standard error; results go to standard output.
fn progress(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_benchmark_is_a_command_with_the_same_options_and_the_sides_are_hidden() {
        for benchmark in BENCHMARKS {
            let line = ["sterna-bench", benchmark.name, "--quick", "--json", "f", "--rounds", "2", "--cpus", "2"];
            let matches = program().try_get_matches_from(line).unwrap();
            let (name, options) = matches.subcommand().unwrap();
            assert_eq!(name, benchmark.name);
            assert_eq!(BenchArgs::from_arg_matches(options).unwrap().rounds(), 2);
        }
        assert!(program().try_get_matches_from(["sterna-bench", SIDE]).is_ok());
        assert!(!program().render_long_help().to_string().contains("  side"));
        assert!(program().try_get_matches_from(["sterna-bench", "rum"]).is_err());
    }

    #[test]
    fn the_command_line_is_consistent() {
        program().debug_assert();
    }
}
