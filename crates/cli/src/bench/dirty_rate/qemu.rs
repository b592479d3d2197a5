//! The largest dirty rate at which a guest of QEMU can be moved: by QEMU in each of its ways, and by Sterna directly.
//!
//! Each pattern has a source of its own, whose guest is set to the rates that are tried and goes on after each attempt.

use std::path::Path;
use std::time::{Duration, Instant};

use sterna::cancel::Cancel;
use sterna_lab::{Backend, Dirty, Fill, Guest, LinuxGuest, Pattern, QemuOptions};

use super::super::BenchArgs;
use super::super::harness::{Findings, Row};
use super::super::measured::Measured;
use super::super::migration::{Bench, Conditions, Mode, Way};
use super::super::ram::certificates;
use super::attempt::{LONGEST_DOWNTIME, PAGE};
use super::search::{Outcome, Search};
use super::{DOWNTIME, TOO_SLOW};
use crate::hosts::{Hosts, HostsError};

/// Bytes a second that may be sent.
const BANDWIDTH: u64 = 128 << 20;
/// Memory that the guest fills and writes: four times what is sent in a second.
const SPAN: u64 = 512 << 20;
const RAM: u64 = SPAN + SPAN / 16 + (256 << 20);
const CHANNELS: u16 = 2;
const LEAST_ACHIEVED: f64 = 0.95;
/// QEMU's ways.
const PEER: [&str; 3] = ["none", "zstd", "xbzrle"];
const DIRECT: &[&str] = &["--method", "auto", "--delta-cache", "1GiB"];
/// With `--quick`, no new rate is tried for a cell that has taken so long.
const QUICK_CELL: Duration = Duration::from_secs(12);
/// And only what is written so is measured.
const QUICK: [&str; 2] = ["ones", "hot tenth"];
/// How many times QEMU's best dirty rate Sterna's is to be.
const FACTOR: f64 = 1.5;

/// What the guest writes: the content, how much of a page, and in which order.
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

impl Writing {
    fn cells(&self) -> Vec<(String, Way)> {
        let peer =
            |compression| (name(compression, self.name), Way::Qemu { channels: 2, compression, encrypted: false });
        let mut cells: Vec<_> = PEER.map(peer).into();
        let way =
            Way::Sterna { mode: Mode::Direct, method: DIRECT, channels: CHANNELS, encrypted: false, in_stream: false };
        cells.push((name("direct", self.name), way));
        cells
    }
}

fn name(way: &str, writing: &str) -> String {
    match way {
        "direct" => format!("128 MiB/s, QEMU guest, direct auto and deltas, {writing}"),
        _ => format!("128 MiB/s, QEMU guest, QEMU {way}, {writing}"),
    }
}

/// The names of all cells.
pub(super) fn cells() -> impl Iterator<Item = String> {
    WRITINGS.iter().flat_map(Writing::cells).map(|(name, _)| name)
}

/// Measures the cells that are wanted.
pub(super) fn measure(
    args: &BenchArgs,
    runs: usize,
    cancel: &Cancel,
    tell: &dyn Fn(&str),
) -> Result<Vec<Row>, HostsError> {
    let mut rows = Vec::new();
    let certificates = certificates()?;
    for writing in WRITINGS {
        let mut cells = writing.cells();
        let left_out = args.quick && args.only.is_empty() && !QUICK.contains(&writing.name);
        cells.retain(|(name, _)| args.wants(name) && !left_out);
        if cells.is_empty() {
            continue;
        }
        tell(&format!("128 MiB/s, QEMU guest, {}: booting", writing.name));
        let mut bench = start(args, &writing, certificates.path(), cancel)?;
        for (name, way) in cells {
            let mut row = Row { name, detail: String::new(), runs: Vec::new(), void: None };
            match search(&mut bench, &row.name, &way, (args.quick, runs), cancel, tell) {
                Ok((lines, detail)) => (row.runs, row.detail) = (lines, detail),
                Err(_) if cancel.is_cancelled() => return Err(HostsError("cancelled".into())),
                Err(error) => row.void = Some(error.to_string()),
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

fn start(args: &BenchArgs, writing: &Writing, certificates: &Path, cancel: &Cancel) -> Result<Bench, HostsError> {
    let &Writing { fill, dirty, pattern, .. } = writing;
    let guest = LinuxGuest { fill, dirty, pattern, memory: Some(SPAN), verify_rate: 0, ..LinuxGuest::default() };
    let mut options = QemuOptions::new(args.qemu, Guest::Linux(guest));
    options.memory = RAM;
    Bench::start(Hosts::loopback().pinned(args.cpus), options, args.warmed(RAM), certificates, cancel)
}

/// The largest rate at which `way` moves the guest, a line of figures for each run of it, and what else the table says.
fn search(
    bench: &mut Bench,
    name: &str,
    way: &Way,
    (quick, runs): (bool, usize),
    cancel: &Cancel,
    tell: &dyn Fn(&str),
) -> Result<(Vec<Vec<f64>>, String), HostsError> {
    let (since, mut late) = (Instant::now(), "");
    let mut search = Search::new(0.9 * BANDWIDTH as f64 / PAGE);
    let (mut lines, mut tried) = (Vec::new(), 0);
    while let Some(rate) = search.next() {
        if quick && since.elapsed() > QUICK_CELL {
            late = ", not to ±5 %: --quick ended the search";
            break;
        }
        let bytes = rate * PAGE;
        let (outcome, attempts) = all_of(bench, way, bytes, runs, quick, cancel)?;
        tried += 1;
        let last = attempts.last().cloned().unwrap_or_default();
        tell(&format!(
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

/// Tries one rate until it fails, or has worked so often as it must.
fn all_of(
    bench: &mut Bench,
    way: &Way,
    bytes_per_second: f64,
    runs: usize,
    quick: bool,
    cancel: &Cancel,
) -> Result<(Outcome, Vec<Measured>), HostsError> {
    let conditions = Conditions {
        dirty_rate: bytes_per_second as u64,
        bandwidth: Some(BANDWIDTH),
        give_up_after: Some(Duration::from_secs(if quick { 15 } else { 60 })),
    };
    let (mut worked, mut slow) = (Vec::new(), 0);
    while worked.len() < runs {
        let measured = bench.migrate(way, &Backend::Anonymous, conditions, false, cancel)?;
        let is_short = measured.downtime_ms <= LONGEST_DOWNTIME * DOWNTIME.as_secs_f64() * 1e3;
        if measured.achieved.is_some_and(|achieved| achieved < LEAST_ACHIEVED) {
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

/// In the order of [`super::COLUMNS`].
fn figures(bytes_per_second: f64, measured: &Measured) -> Vec<f64> {
    let at_bandwidth_ms = SPAN as f64 / BANDWIDTH as f64 * 1e3;
    vec![
        bytes_per_second,
        measured.total_ms,
        measured.downtime_ms,
        measured.rounds,
        // QEMU does not tell.
        0.0,
        measured.achieved.unwrap_or(1.0),
        measured.total_ms / at_bandwidth_ms,
    ]
}

/// The targets: the ratio of QEMU's best rate to Sterna's, which is small where Sterna's is large.
pub(super) fn judge(findings: &mut Findings) {
    for Writing { name: writing, .. } in WRITINGS {
        let rate = |way: &&str| findings.spread(&name(way, writing), "dirty_rate").map_or(0.0, |rate| rate.median);
        let best = PEER.into_iter().max_by(|a, b| rate(a).total_cmp(&rate(b))).expect("there are ways");
        let (ours, theirs) = (name("direct", writing), name(best, writing));
        let title =
            format!("QEMU guest, {writing}: dirty rate of QEMU's best way to direct (direct at least {FACTOR} times)");
        findings.at_most(&title, 1.0 / FACTOR, &theirs, &ours, "dirty_rate");
    }
}
