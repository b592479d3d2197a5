//! The monitor as a program: boots a guest, lets it work for a while, and says what it found.

use clap::Parser;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;
use sterna_microvm::{
    Backing, BlockConfig, Config, Error, Execution, Fill, Machine, Pattern, Rate, Tracking, Workload,
};

/// Runs a bare guest that fills, writes and verifies its memory.
#[derive(Parser)]
#[command(name = "sterna-microvm")]
struct Options {
    /// RAM in MiB, a multiple of 2
    #[arg(long, default_value_t = 256)]
    memory: u64,
    /// anonymous, anonymous-huge, memfd or hugetlb
    #[arg(long, default_value = "memfd", value_parser = |name: &str| choice(&BACKINGS, name))]
    backing: Backing,
    /// vCPUs, 1 to 4
    #[arg(long, default_value_t = 2)]
    vcpus: usize,
    /// auto, kvm or threads
    #[arg(long, default_value = "auto", value_parser = |name: &str| choice(&EXECUTIONS, name))]
    execution: Execution,
    /// How written pages are noted: log, ring or write-protect
    #[arg(long, default_value = "write-protect", value_parser = |name: &str| choice(&TRACKINGS, name))]
    tracking: Tracking,
    /// What memory is filled with: zeros, ones, sequence, random, text, corpus or mixed
    #[arg(long, default_value = "mixed", value_parser = |name: &str| choice(&Fill::ALL, name))]
    fill: Fill,
    /// The order in which pages are written again: sequential, random or hot
    #[arg(long, default_value = "random", value_parser = |name: &str| choice(&Pattern::ALL, name))]
    pattern: Pattern,
    /// Pages written again per second, or 'unlimited'
    #[arg(long, default_value = "1000", value_parser = rate)]
    write_rate: Rate,
    /// Pages verified per second, or 'unlimited'
    #[arg(long, default_value = "2048", value_parser = rate)]
    check_rate: Rate,
    /// Percent of memory that are ever written again
    #[arg(long, default_value_t = 100)]
    span: u8,
    /// Hold the vCPUs for so many percent of the time
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=99))]
    throttle: u8,
    /// How long the guest runs once its memory is filled
    #[arg(long, default_value_t = 5)]
    seconds: u64,
}

const BACKINGS: [(&str, Backing); 4] = [
    ("anonymous", Backing::Anonymous),
    ("anonymous-huge", Backing::AnonymousHuge),
    ("memfd", Backing::Memfd),
    ("hugetlb", Backing::HugeTlb),
];
const EXECUTIONS: [(&str, Execution); 3] =
    [("auto", Execution::Auto), ("kvm", Execution::Kvm), ("threads", Execution::Threads)];
const TRACKINGS: [(&str, Tracking); 3] =
    [("log", Tracking::Log), ("ring", Tracking::Ring), ("write-protect", Tracking::WriteProtect)];

fn choice<T: Copy>(choices: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = choices.iter().find(|(known, _)| *known == name).map(|(_, choice)| *choice);
    found.ok_or_else(|| {
        format!("expected one of {}", choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "))
    })
}

fn rate(text: &str) -> Result<Rate, String> {
    match text {
        "unlimited" => Ok(Rate::Unlimited),
        number => number.parse().map(Rate::PagesPerSecond).map_err(|_| "expected a number or 'unlimited'".to_owned()),
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(faults) => ExitCode::from(u8::from(faults != 0)),
        Err(error) => {
            eprintln!("sterna-microvm: {error}");
            ExitCode::from(2)
        }
    }
}

/// Returns how many faults the guest found.
fn run(options: &Options) -> Result<u64, Error> {
    let Options { backing, vcpus, execution, tracking, .. } = *options;
    let bytes = options.memory.saturating_mul(1 << 20);
    let workload = Workload {
        fill: options.fill,
        pattern: options.pattern,
        span: options.span,
        write: options.write_rate,
        check: options.check_rate,
        ..Workload::default()
    };
    let blocks = vec![BlockConfig { name: "ram".to_owned(), bytes, backing }];
    let config = Config { blocks, vcpus, execution, tracking, workload };
    let machine = Machine::new(&config, Box::new(io::stdout()))?;
    say(format_args!("{}", machine.description()));
    machine.boot()?;
    machine.resume()?;
    // At least 20 MiB a second.
    let filled = machine.wait_until(Duration::from_secs(10 + options.memory / 20), |report| report.is_filled())?;
    let start = machine.clock();
    say(format_args!("{} pages filled after {:.3} s", filled.pages(), start.as_secs_f64()));
    machine.throttle(options.throttle);
    let end = start + Duration::from_secs(options.seconds);
    let late = Duration::from_secs(options.seconds + 10);
    let report = machine.wait_until(late, |_| machine.clock() >= end)?;
    let seconds = (machine.clock() - start).as_secs_f64();
    machine.pause()?;
    let per_second = |pages: u64| pages as f64 / seconds;
    let (written, checked) = (report.written() - filled.written(), report.checked() - filled.checked());
    say(format_args!("{:.0} pages written and {:.0} verified per second", per_second(written), per_second(checked)));
    say(format_args!("{report}"));
    Ok(report.faults())
}

/// A line to whoever still reads.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "{line}");
}
