//! `sterna-bench bandwidth`: how closely the library keeps to a bandwidth limit.
//!
//! A guest that writes all of its memory moves from process to process at a limit. The kernel of the destination counts
//! what arrives ([`received`](super::ram)), not the sender. The figures are the smallest and the largest second after
//! the first, each against the limit.

use std::cell::RefCell;

use sterna_engine::cancel::Cancel;

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Spread, Target, interleaved};
use super::ram::guest::{Content, Memory};
use super::ram::pair::{Rig, Shape};
use super::ram::side::Mover;
use super::ram::{CHANNELS, certificates};
use crate::hosts::{Hosts, HostsError, Side};

const COLUMNS: &[Column] = &[
    Column { name: "worst_deviation", title: "worst second off the limit, %", scale: 0.01, places: 1 },
    Column { name: "least_second", title: "least, %", scale: 0.01, places: 1 },
    Column { name: "most_second", title: "most, %", scale: 0.01, places: 1 },
    Column { name: "mean", title: "mean, %", scale: 0.01, places: 1 },
    Column { name: "seconds", title: "seconds", scale: 1.0, places: 1 },
    Column { name: "longest_gap_ms", title: "longest between two looks, ms", scale: 1.0, places: 0 },
    Column { name: "cpu_seconds", title: "CPU, s", scale: 1.0, places: 2 },
];

/// How far a second may be off.
const ALLOWED: f64 = 0.05;
const MIB: u64 = 1 << 20;
/// About the ratio of zstd on this content.
const RATIO: u64 = 2;

/// One configuration.
#[derive(Clone, Copy, Debug)]
struct Way {
    megabytes: u64,
    method: &'static str,
    encrypted: bool,
    quick: bool,
}

impl Way {
    fn name(self) -> String {
        format!("{} MB/s, {}{}", self.megabytes, self.method, if self.encrypted { ", TLS" } else { "" })
    }

    /// Bytes of memory, whole huge pages. Sending it takes less than a second, so that the destination's memory is
    /// populated before the first second that counts, and more than the downtime, so that rounds continue.
    fn memory(self) -> u64 {
        let ratio = if self.method == "none" { 1 } else { RATIO };
        (self.megabytes * 900_000 * ratio).next_multiple_of(2 * MIB)
    }
}

/// Compressed cells need no more than a core: zstd compresses some 350 MB of memory per second to half.
fn ways() -> Vec<Way> {
    let mut ways = Vec::new();
    for (megabytes, method) in [(20, "none"), (125, "none"), (500, "none"), (20, "zstd"), (60, "zstd")] {
        for encrypted in [false, true] {
            // Each limit once, and each method with TLS and without.
            let quick = encrypted == matches!(megabytes, 60 | 125);
            ways.push(Way { megabytes, method, encrypted, quick });
        }
    }
    ways
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    ways().into_iter().map(Way::name).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    // A sender that is too slow shows nothing about the limit, so by default each side has half of the machine.
    let half = std::thread::available_parallelism().map_or(1, usize::from) / 2;
    let rig = Rig { hosts: Hosts::loopback(), cpus: args.cpus.max(half.clamp(1, 64) as u16), cancel };
    let seconds = if args.quick { 4 } else { 10 };
    let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 3 }).max(1);
    let certificates = certificates()?;
    let mut findings = Findings {
        name: "bandwidth",
        columns: COLUMNS,
        rows: Vec::new(),
        targets: Vec::new(),
        notes: notes(&rig, seconds),
    };
    for way in ways() {
        let chosen = if args.only.is_empty() { way.quick || !args.quick } else { args.wants(&way.name()) };
        if !chosen {
            continue;
        }
        let bytes = way.memory();
        let shape = Shape { memory: Memory::Anonymous, bytes, content: Content::Used(bytes) };
        let source = RefCell::new(rig.side(Side::A, shape)?);
        let limit = way.megabytes * 1_000_000;
        let tls = way.encrypted.then(|| certificates.path().to_owned());
        let by = Mover::Limited { bytes_per_second: limit, method: way.method.into(), seconds, tls };
        let run = || {
            let measured = rig.migrate(&source, shape, bytes, &by, CHANNELS, false)?;
            let windows = Windows::of(&measured.received, 1.0, seconds as f64)
                .ok_or_else(|| HostsError("the migration ended before two seconds had passed".into()))?;
            let limit = limit as f64;
            let (least, most) = (windows.least / limit, windows.most / limit);
            Ok(vec![
                (1.0 - least).max(most - 1.0),
                least,
                most,
                windows.mean / limit,
                measured.total_ms / 1e3,
                windows.longest_gap * 1e3,
                measured.source_cpu + measured.destination_cpu,
            ])
        };
        let mut cells = [Cell { name: way.name(), run: Box::new(run) }];
        let mut rows = interleaved(&mut cells, rounds, cancel, &mut |_: &str| {})?;
        for row in &mut rows {
            row.detail = format!("{} MiB", bytes / MIB);
            let worst: Vec<String> = row.runs.iter().map(|run| format!("{:.1} %", run[0] * 100.0)).collect();
            progress(&format!("{}: worst second off by {}", row.name, worst.join(", ")));
        }
        findings.rows.extend(rows);
    }
    judge(&mut findings);
    Ok(findings)
}

/// The bytes of all seconds that lie in a time, with a second's beginning at each sample.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Windows {
    least: f64,
    most: f64,
    /// Bytes per second over the whole time.
    mean: f64,
    /// The longest time between two samples, in seconds; within it the bytes count as evenly spread.
    longest_gap: f64,
}

impl Windows {
    /// From ordered pairs (seconds, bytes so far); `None` if no whole second lies between `from` and `to`.
    fn of(samples: &[(f64, f64)], from: f64, to: f64) -> Option<Self> {
        let inside: Vec<(f64, f64)> = samples.iter().copied().filter(|(at, _)| (from..=to).contains(at)).collect();
        let (first, last) = (inside.first()?, inside.last()?);
        let mut windows = Windows {
            least: f64::INFINITY,
            most: 0.0,
            mean: (last.1 - first.1) / (last.0 - first.0),
            longest_gap: inside.array_windows().map(|[a, b]| b.0 - a.0).fold(0.0, f64::max),
        };
        let mut next = 0;
        for (begin, before) in &inside {
            let end = begin + 1.0;
            next += inside[next..].iter().take_while(|(at, _)| *at < end).count();
            let Some((at, after)) = inside.get(next) else { break };
            let (earlier, then) = inside[next - 1];
            let bytes = then + (after - then) * (end - earlier) / (at - earlier) - before;
            windows.least = windows.least.min(bytes);
            windows.most = windows.most.max(bytes);
        }
        windows.least.is_finite().then_some(windows)
    }
}

fn judge(findings: &mut Findings) {
    let name = |row: &str| format!("{row}: worst second after the first, off the limit");
    let targets: Vec<Target> = findings
        .rows
        .iter()
        .map(|row| {
            // Every second of every run: the worst run is judged.
            let value = findings.spread(&row.name, "worst_deviation");
            let value = value.map(|spread| Spread { median: spread.max, ..spread });
            Target { name: name(&row.name), limit: ALLOWED, value, unit: "of it" }
        })
        .collect();
    findings.targets.extend(targets);
}

fn notes(rig: &Rig<'_>, seconds: u64) -> Vec<String> {
    vec![
        format!(
            "A guest that writes all of its memory for {seconds} s, so that round follows round; the source on CPUs {:?}, the \
             destination on {:?}; {CHANNELS} channels over the loopback interface. Limits are in millions of bytes per second.",
            rig.cpus(Side::A),
            rig.cpus(Side::B)
        ),
        "Counted is what TCP has received at the destination (tcpi_bytes_received of all its sockets), each 5 ms: with what \
         TLS adds, without headers of TCP and IP. Seconds begin at every such moment, from one second after the source began \
         to connect; the last ends when the guest ceases to write."
            .into(),
        "What other processes take of these CPUs is missing from the least second: a thread that was to run and could not is \
         made up for if that was 30 ms. Looks that lie far apart show it."
            .into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::harness::Row;
    use super::*;

    fn samples(rate: impl Fn(f64) -> f64, seconds: f64) -> Vec<(f64, f64)> {
        let mut bytes = 0.0;
        (0..(seconds * 100.0) as usize)
            .map(|step| {
                let at = step as f64 / 100.0;
                bytes += rate(at) / 100.0;
                (at, bytes)
            })
            .collect()
    }

    fn near(a: f64, b: f64) -> bool {
        (a / b - 1.0).abs() < 1e-3
    }

    #[test]
    fn an_even_stream_has_even_seconds_whatever_came_before_and_after() {
        let stream = |at: f64| if (1.0..=4.0).contains(&at) { 100.0 } else { 900.0 };
        let windows = Windows::of(&samples(stream, 6.0), 1.0, 4.0).unwrap();
        assert!(near(windows.least, 100.0) && near(windows.most, 100.0) && near(windows.mean, 100.0), "{windows:?}");
        assert!(near(windows.longest_gap, 0.01));
    }

    #[test]
    fn a_pause_and_a_burst_are_found_wherever_they_are() {
        for begin in [1.3, 1.97, 2.5] {
            // The tolerance is one step of the samples.
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.03;
            let pause = |at: f64| if (begin..begin + 0.2).contains(&at) { 0.0 } else { 100.0 };
            let windows = Windows::of(&samples(pause, 5.0), 1.0, 4.0).unwrap();
            assert!(near(windows.least, 80.0) && near(windows.most, 100.0), "{begin}: {windows:?}");
            let burst = |at: f64| if (begin..begin + 0.1).contains(&at) { 300.0 } else { 100.0 };
            let windows = Windows::of(&samples(burst, 5.0), 1.0, 4.0).unwrap();
            assert!(near(windows.most, 120.0) && near(windows.least, 100.0), "{begin}: {windows:?}");
        }
    }

    #[test]
    fn bytes_between_two_samples_that_lie_apart_are_spread_over_the_time_between() {
        let few = [(0.0, 0.0), (0.7, 70.0), (1.4, 140.0), (2.1, 210.0)];
        let windows = Windows::of(&few, 0.0, 3.0).unwrap();
        assert!(near(windows.least, 100.0) && near(windows.most, 100.0) && near(windows.longest_gap, 0.7));
    }

    #[test]
    fn where_there_is_no_whole_second_there_is_no_figure() {
        assert_eq!(Windows::of(&[], 1.0, 4.0), None);
        assert_eq!(Windows::of(&samples(|_| 100.0, 1.9), 1.0, 4.0), None);
    }

    #[test]
    fn a_target_judges_the_worst_run_of_its_cell() {
        let run = |off: f64| vec![off, 1.0 - off, 1.0, 1.0, 10.0, 10.0, 1.0];
        let rows = cells()
            .into_iter()
            .map(|name| Row { name, detail: String::new(), runs: [0.01, 0.02, 0.06].map(run).to_vec(), void: None })
            .collect();
        let mut findings =
            Findings { name: "bandwidth", columns: COLUMNS, rows, targets: Vec::new(), notes: Vec::new() };
        judge(&mut findings);
        assert_eq!(findings.targets.len(), ways().len());
        assert!(findings.targets.iter().all(|target| target.met() == Some(false)));
        assert!(ways().iter().any(|way| way.quick && way.encrypted && way.method == "zstd"));
    }
}
