//! The largest dirty rate at which a guest of QEMU can be moved: by each method of QEMU, and by Sterna directly.
//!
//! Each pattern has its own source, whose guest is set to each rate that is tried and resumes after each attempt.

use std::path::Path;
use std::time::{Duration, Instant};

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::{Backend, Dirty, Fill, Guest, LinuxGuest, Pattern, QemuOptions};

use super::super::BenchArgs;
use super::super::harness::{Findings, Row};
use super::super::measured::Measured;
use super::super::migration::{Bench, Conditions, Mode, Way};
use super::super::ram::certificates;
use super::attempt::{MAX_DOWNTIME, PAGE};
use super::search::{Outcome, Search};
use super::{DOWNTIME, TOO_SLOW};
use crate::hosts::{Hosts, HostsError};

/// MiB per second that may be sent. An emulated guest can barely exceed the first, and clearly exceeds the second.
const BANDWIDTHS: [u64; 2] = [128, 32];
/// How long sending the written memory once takes.
const TIME_OF_ALL: Duration = Duration::from_secs(4);
const CHANNELS: u16 = 2;
const MIN_ACHIEVED: f64 = 0.95;
/// QEMU's methods.
const PEER: [&str; 3] = ["none", "zstd", "xbzrle"];
const DIRECT: &[&str] = &["--method", "auto", "--delta-cache", "1GiB"];
/// With `--quick`, no further rate is tried for a cell after this time.
const QUICK_CELL: Duration = Duration::from_secs(12);
/// With `--quick`, only these are measured: bandwidth and pattern.
const QUICK: [(u64, &str); 2] = [(128, "ones"), (32, "hot tenth")];
/// The target: Sterna's dirty rate as a multiple of QEMU's best.
const FACTOR: f64 = 1.5;

/// The guest's writes: content, part of a page, order.
#[derive(Clone, Copy, Debug)]
struct Writing {
    name: &'static str,
    fill: Fill,
    dirty: Dirty,
    pattern: Pattern,
}

const WRITINGS: [Writing; 4] = [
    Writing { name: "ones", fill: Fill::Ones, dirty: Dirty::Page, pattern: Pattern::Random },
    Writing { name: "sequence", fill: Fill::Sequence, dirty: Dirty::Page, pattern: Pattern::Random },
    Writing { name: "random words", fill: Fill::Random, dirty: Dirty::Stamp, pattern: Pattern::Random },
    Writing { name: "hot tenth", fill: Fill::Mixed, dirty: Dirty::Page, pattern: Pattern::Hot },
];

/// A guest, and the network's bandwidth while it is moved.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// MiB per second.
    bandwidth: u64,
    writing: Writing,
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        BANDWIDTHS
            .into_iter()
            .flat_map(|bandwidth| WRITINGS.into_iter().map(move |writing| Case { bandwidth, writing }))
    }

    /// Returns its title in the table.
    fn title(&self) -> String {
        format!("{} MiB/s, QEMU guest, {}", self.bandwidth, self.writing.name)
    }

    fn name(&self, way: &str) -> String {
        let Case { bandwidth, writing: Writing { name, .. } } = self;
        match way {
            "direct" => format!("{bandwidth} MiB/s, QEMU guest, direct auto and deltas, {name}"),
            _ => format!("{bandwidth} MiB/s, QEMU guest, QEMU {way}, {name}"),
        }
    }

    fn cells(&self) -> Vec<(String, Way)> {
        let peer = |compression| (self.name(compression), Way::Qemu { channels: 2, compression, encrypted: false });
        let mut cells: Vec<_> = PEER.map(peer).into();
        let way =
            Way::Sterna { mode: Mode::Direct, method: DIRECT, channels: CHANNELS, encrypted: false, in_stream: false };
        cells.push((self.name("direct"), way));
        cells
    }

    /// Returns the bytes per second that may be sent.
    fn bytes_per_second(&self) -> u64 {
        self.bandwidth << 20
    }

    /// Returns the bytes of memory that the guest fills and writes.
    fn span(&self) -> u64 {
        TIME_OF_ALL.as_secs() * self.bytes_per_second()
    }

    /// Returns the bytes of the guest's memory.
    fn ram(&self) -> u64 {
        self.span() + self.span() / 16 + (256 << 20)
    }
}

/// Returns the names of all cells.
pub(super) fn cells() -> impl Iterator<Item = String> {
    Case::all().flat_map(|case| case.cells()).map(|(name, _)| name)
}

/// Measures the selected cells.
pub(super) fn measure(
    args: &BenchArgs,
    runs: usize,
    cancel: &Cancel,
    progress: &dyn Fn(&str),
) -> Result<Vec<Row>, HostsError> {
    let mut rows = Vec::new();
    let certificates = certificates()?;
    for case in Case::all() {
        let mut cells = case.cells();
        let left_out = args.quick && args.only.is_empty() && !QUICK.contains(&(case.bandwidth, case.writing.name));
        cells.retain(|(name, _)| args.wants(name) && !left_out);
        if cells.is_empty() {
            continue;
        }
        progress(&format!("{}: booting", case.title()));
        let mut bench = start(args, &case, certificates.path(), cancel)?;
        for (name, way) in cells {
            let mut row = Row { name, detail: String::new(), runs: Vec::new(), void: None };
            match search(&mut bench, &case, &row.name, &way, (args.quick, runs), cancel, progress) {
                Ok((lines, detail)) => (row.runs, row.detail) = (lines, detail),
                Err(_) if cancel.is_cancelled() => return Err(HostsError("cancelled".into())),
                Err(error) => row.void = Some(error.to_string()),
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

fn start(args: &BenchArgs, case: &Case, certificates: &Path, cancel: &Cancel) -> Result<Bench, HostsError> {
    let Writing { fill, dirty, pattern, .. } = case.writing;
    let guest = LinuxGuest { fill, dirty, pattern, memory: Some(case.span()), verify_rate: 0, ..LinuxGuest::default() };
    let mut options = QemuOptions::new(args.qemu, Guest::Linux(guest));
    options.memory = case.ram();
    Bench::start(Hosts::loopback().pinned(args.cpus), options, args.warmed(case.ram()), certificates, cancel)
}

/// Searches the largest rate at which `way` moves the guest. Returns a line of figures for each run, and the remark.
fn search(
    bench: &mut Bench,
    case: &Case,
    name: &str,
    way: &Way,
    (quick, runs): (bool, usize),
    cancel: &Cancel,
    progress: &dyn Fn(&str),
) -> Result<(Vec<Vec<f64>>, String), HostsError> {
    let (since, mut late) = (Instant::now(), "");
    let mut search = Search::new(0.9 * case.bytes_per_second() as f64 / PAGE);
    let (mut lines, mut tried) = (Vec::new(), 0);
    while let Some(rate) = search.next() {
        if quick && since.elapsed() > QUICK_CELL {
            late = ", not to ±5 %: --quick ended the search";
            break;
        }
        let bytes = rate * PAGE;
        let (outcome, attempts) = all_of(bench, case, way, bytes, (quick, runs), cancel)?;
        tried += 1;
        let last = attempts.last().cloned().unwrap_or_default();
        progress(&format!(
            "{name}: {:.0} MB/s: {outcome:?} ({:.1} s, downtime {:.0} ms, {:.0} rounds, achieved {:.0} %)",
            bytes / 1e6,
            last.total_ms / 1e3,
            last.downtime_ms,
            last.rounds,
            last.achieved.unwrap_or(0.0) * 100.0
        ));
        if outcome == Outcome::Works {
            lines = attempts.iter().map(|attempt| figures(bytes, attempt)).collect();
        }
        search.tried(rate, outcome);
    }
    let above = match search.above() {
        Some((rate, Outcome::OutOfReach)) => format!("at least: the guest does not reach {:.0}", rate * PAGE / 1e6),
        Some((rate, _)) => format!("not {:.0}", rate * PAGE / 1e6),
        None => "at least".into(),
    };
    let detail = format!("{tried} rates, {above}{late}");
    if lines.is_empty() {
        Err(HostsError(format!("no rate that was tried works ({detail})")))
    } else {
        Ok((lines, detail))
    }
}

/// Tries one rate until it fails or has worked `runs` times.
fn all_of(
    bench: &mut Bench,
    case: &Case,
    way: &Way,
    bytes_per_second: f64,
    (quick, runs): (bool, usize),
    cancel: &Cancel,
) -> Result<(Outcome, Vec<Measured>), HostsError> {
    let conditions = Conditions {
        dirty_rate: bytes_per_second as u64,
        bandwidth: Some(case.bytes_per_second()),
        give_up_after: Some(if quick { 4 } else { 8 } * TIME_OF_ALL),
    };
    let (mut worked, mut slow) = (Vec::new(), 0);
    while worked.len() < runs {
        let measured = bench.migrate(way, &Backend::Anonymous, conditions, false, cancel)?;
        let is_short = measured.downtime_ms <= MAX_DOWNTIME * DOWNTIME.as_secs_f64() * 1e3;
        if measured.achieved.is_some_and(|achieved| achieved < MIN_ACHIEVED) {
            slow += 1;
            if slow > TOO_SLOW {
                return Ok((Outcome::OutOfReach, vec![measured]));
            }
        } else if measured.given_up.is_none() && is_short {
            worked.push(measured);
        } else {
            return Ok((Outcome::Fails, vec![measured]));
        }
    }
    Ok((Outcome::Works, worked))
}

/// Returns the figures in the order of [`super::COLUMNS`].
fn figures(bytes_per_second: f64, measured: &Measured) -> Vec<f64> {
    vec![
        bytes_per_second,
        measured.total_ms,
        measured.downtime_ms,
        measured.rounds,
        // QEMU does not report it.
        0.0,
        measured.achieved.unwrap_or(1.0),
        measured.total_ms / (TIME_OF_ALL.as_secs_f64() * 1e3),
    ]
}

/// Adds the targets: the ratio of QEMU's best rate to Sterna's.
pub(super) fn judge(findings: &mut Findings) {
    for case in Case::all() {
        let rate = |way: &&str| findings.spread(&case.name(way), "dirty_rate").map_or(0.0, |rate| rate.median);
        let best = PEER.into_iter().max_by(|a, b| rate(a).total_cmp(&rate(b))).expect("there are ways");
        let (ours, theirs) = (case.name("direct"), case.name(best));
        let title =
            format!("{}: dirty rate of QEMU's best way to direct (direct at least {FACTOR} times)", case.title());
        findings.at_most(&title, 1.0 / FACTOR, &theirs, &ours, "dirty_rate");
    }
}
