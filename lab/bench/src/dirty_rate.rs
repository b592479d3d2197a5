//! `sterna-bench dirty-rate`: the largest rate at which a guest may write its memory and still be moved.
//!
//! Guests of `lab/microvm` write page after page at a set rate. For each method, the search ([`mod@search`]) finds the
//! largest rate at which the migration still ends in time; each rate is tried with two new processes ([`attempt`]). The
//! same is done with guests of QEMU ([`qemu`]).

pub(super) mod attempt;
mod qemu;
mod search;

use std::time::{Duration, Instant};

use sterna_engine::cancel::Cancel;

use super::BenchArgs;
use super::harness::{Column, Findings, Row, Spread, Target};
use crate::hosts::HostsError;
use attempt::{Attempt, Guest, MAX_DOWNTIME, PAGE, Setting, Site};
use search::{Outcome, Search, WIDTH};

const COLUMNS: &[Column] = &[
    Column { name: "dirty_rate", title: "largest dirty rate, MB/s", scale: 1e6, places: 0 },
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 },
    Column { name: "downtime_ms", title: "downtime, ms", scale: 1.0, places: 0 },
    Column { name: "rounds", title: "rounds", scale: 1.0, places: 0 },
    Column { name: "ratio", title: "ratio", scale: 1.0, places: 2 },
    Column { name: "achieved", title: "achieved, %", scale: 0.01, places: 0 },
    Column { name: "to_bandwidth", title: "of size/bandwidth", scale: 1.0, places: 2 },
];

const LINKS: [(&str, u64); 2] = [("1 Gbit/s", 125_000_000), ("500 MB/s", 500_000_000)];
const FILLS: [&str; 3] = ["ones", "sequence", "random"];
const DOWNTIME: Duration = Duration::from_millis(300);
/// How many times a rate is tried again if the guest was too slow, because of other work on the machine.
const TOO_SLOW: usize = 2;
/// With `--quick`, no further rate is tried for a cell after this time.
const QUICK_CELL: Duration = Duration::from_secs(25);
/// Post-copy is tried with a guest that writes this many times the network's rate.
const FAR_TOO_FAST: f64 = 2.0;

/// The method of the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    None,
    Lz4,
    Zstd,
    Throttle,
    PostCopy,
}

impl Way {
    const ALL: [Way; 5] = [Way::None, Way::Lz4, Way::Zstd, Way::Throttle, Way::PostCopy];

    fn name(self) -> &'static str {
        match self {
            Way::None => "none",
            Way::Lz4 => "lz4",
            Way::Zstd => "zstd",
            Way::Throttle => "throttle",
            Way::PostCopy => "post-copy",
        }
    }

    fn method(self) -> &'static str {
        match self {
            Way::None | Way::Throttle | Way::PostCopy => "none",
            Way::Lz4 => "lz4",
            Way::Zstd => "zstd",
        }
    }

    fn options(self) -> &'static str {
        match self {
            Way::None | Way::Lz4 | Way::Zstd => "--not-converging give-up",
            Way::Throttle => "--not-converging throttle",
            Way::PostCopy => "--post-copy-after 1",
        }
    }
}

/// One cell.
#[derive(Clone, Copy, Debug)]
struct Cell {
    link: (&'static str, u64),
    way: Way,
    fill: &'static str,
}

impl Cell {
    fn name(&self) -> String {
        format!("{}, {}, {}", self.link.0, self.way.name(), self.fill)
    }

    /// MiB of memory: large against what fits into the downtime, and small enough for a first round of seconds.
    fn memory(&self, quick: bool) -> u64 {
        let shrinks = matches!(self.way, Way::Lz4 | Way::Zstd);
        let usual = match (self.fill, self.link.1) {
            ("ones", _) if shrinks => 2048,
            ("sequence", _) if shrinks => 1024,
            (_, bandwidth) if bandwidth > 200_000_000 => 1024,
            _ => 512,
        };
        if quick { usual / 2 } else { usual }
    }

    fn setting(&self, quick: bool) -> Setting {
        Setting {
            bandwidth: Some(self.link.1),
            memory: self.memory(quick),
            fill: self.fill,
            guest: Guest::Kvm,
            method: self.way.method(),
            how: self.way.options(),
            throttles: self.way == Way::Throttle,
            downtime: DOWNTIME,
            give_up_after: Duration::from_secs(if quick { 20 } else { 60 }),
        }
    }
}

/// Content matters only where it is compressed; throttling and post-copy are measured with one kind.
fn all_cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for link in LINKS {
        for way in Way::ALL {
            let fills = FILLS.into_iter().filter(|fill| way != Way::Throttle || *fill == "random");
            cells.extend(fills.map(|fill| Cell { link, way, fill }));
        }
    }
    cells
}

/// Returns whether `--quick` measures the cell: those of the targets.
fn is_quick(cell: &Cell) -> bool {
    cell.link == LINKS[0]
        && match cell.way {
            Way::None | Way::Zstd => cell.fill != "random",
            Way::PostCopy => cell.fill == "random",
            Way::Lz4 | Way::Throttle => false,
        }
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    all_cells().iter().map(Cell::name).chain(qemu::cells()).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let half = std::thread::available_parallelism().map_or(1, usize::from) / 2;
    let runs = args.rounds.unwrap_or(if args.quick { 1 } else { 3 }).max(1);
    let mut findings =
        Findings { name: "dirty-rate", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: Vec::new() };
    let mut chosen = all_cells();
    chosen.retain(|cell| if args.only.is_empty() { !args.quick || is_quick(cell) } else { args.wants(&cell.name()) });
    // Guests of QEMU need no microvm.
    let site = (!chosen.is_empty()).then(|| Site::new(args.cpus.max(half.clamp(1, 64) as u16), cancel)).transpose()?;
    if let Some(site) = &site {
        findings.notes = notes(site, runs, args.quick);
    }
    for (cell, site) in chosen.iter().zip(site.iter().cycle()) {
        let mut row = Row { name: cell.name(), detail: String::new(), runs: Vec::new(), void: None };
        let measured = match cell.way {
            Way::PostCopy => post_copy(site, cell, args.quick, runs, progress),
            _ => boundary(site, cell, args.quick, runs, progress),
        };
        if cancel.is_cancelled() {
            return Err(HostsError("cancelled".into()));
        }
        match measured {
            Ok((runs, detail)) => (row.runs, row.detail) = (runs, detail),
            Err(error) => row.void = Some(error.to_string()),
        }
        findings.rows.push(row);
    }
    findings.rows.extend(qemu::measure(args, runs, cancel, progress)?);
    judge(&mut findings);
    qemu::judge(&mut findings);
    Ok(findings)
}

/// A line of figures for each run, and the remark in the table.
type Measured = (Vec<Vec<f64>>, String);

/// Searches the largest rate: with a guest on KVM, or of threads where the guest on KVM is too slow.
fn boundary(
    site: &Site<'_>,
    cell: &Cell,
    quick: bool,
    runs: usize,
    progress: &dyn Fn(&str),
) -> Result<Measured, HostsError> {
    let mut setting = cell.setting(quick);
    // The search begins near the rate at which the pages of an idle guest are sent.
    let idle = site.attempt(&setting, 0.0)?;
    if !idle.moved {
        return Err(HostsError("not even an idle guest was moved".into()));
    }
    let leave = idle.content_bytes / (idle.total_ms / 1e3).max(1e-3);
    progress(&format!("{}: {:.0} MB/s of pages leave while the guest is idle", cell.name(), leave / 1e6));
    let mut best = Found::default();
    for guest in Guest::ALL {
        setting.guest = guest;
        let first = best.rate.map_or(0.9 * leave / PAGE, |rate| rate * WIDTH);
        let found = search(site, cell, &setting, first, (quick, runs), progress)?;
        let in_reach = found.why != Some(Outcome::OutOfReach);
        if found.rate > best.rate || best.detail.is_empty() {
            best = found;
        }
        if in_reach {
            break;
        }
    }
    match best.rate {
        Some(_) => Ok((best.lines, best.detail)),
        None => Err(HostsError(format!("no rate that was tried is known to work ({})", best.detail))),
    }
}

/// The result of a search.
#[derive(Debug, Default)]
struct Found {
    /// The largest rate that works, and the figures of its runs.
    rate: Option<f64>,
    lines: Vec<Vec<f64>>,
    /// Why the next larger rate does not work.
    why: Option<Outcome>,
    detail: String,
}

fn search(
    site: &Site<'_>,
    cell: &Cell,
    setting: &Setting,
    first: f64,
    (quick, runs): (bool, usize),
    progress: &dyn Fn(&str),
) -> Result<Found, HostsError> {
    let since = Instant::now();
    let mut search = Search::new(first);
    let (mut found, mut tried, mut late) = (Found::default(), 0, "");
    while let Some(rate) = search.next() {
        if quick && since.elapsed() > QUICK_CELL {
            late = ", not to ±5 %: --quick ended the search";
            break;
        }
        let (outcome, attempts) = all_of(site, setting, rate, runs)?;
        tried += 1;
        let last = attempts.last().copied().unwrap_or_default();
        progress(&format!(
            "{}: {:.0} MB/s: {} ({:.1} s, downtime {:.0} ms, {:.0} rounds, achieved {:.0} %)",
            cell.name(),
            rate * PAGE / 1e6,
            match outcome {
                Outcome::Works => "moved",
                Outcome::Fails => "not moved",
                Outcome::OutOfReach => "void, the guest does not reach it",
            },
            last.total_ms / 1e3,
            last.downtime_ms,
            last.rounds,
            last.achieved * 100.0
        ));
        if outcome == Outcome::Works {
            found.lines = attempts.iter().map(|attempt| figures(rate, attempt, cell, setting)).collect();
        }
        search.tried(rate, outcome);
    }
    let above = match search.above() {
        Some((rate, Outcome::OutOfReach)) => format!("at least: the guest does not reach {:.0}", rate * PAGE / 1e6),
        Some((rate, _)) => format!("not {:.0}", rate * PAGE / 1e6),
        None => "at least".into(),
    };
    found.rate = search.works();
    found.why = search.above().map(|(_, why)| why);
    found.detail = format!("{} MiB, {}, {tried} rates, {above}{late}", setting.memory, setting.guest.name());
    Ok(found)
}

/// Tries one rate until it fails or has worked `runs` times.
fn all_of(site: &Site<'_>, setting: &Setting, rate: f64, runs: usize) -> Result<(Outcome, Vec<Attempt>), HostsError> {
    let (mut worked, mut slow) = (Vec::new(), 0);
    while worked.len() < runs {
        let attempt = site.attempt(setting, rate)?;
        if !attempt.counts() {
            slow += 1;
            if slow > TOO_SLOW {
                return Ok((Outcome::OutOfReach, vec![attempt]));
            }
        } else if attempt.moved {
            worked.push(attempt);
        } else {
            return Ok((Outcome::Fails, vec![attempt]));
        }
    }
    Ok((Outcome::Works, worked))
}

/// Measures post-copy, which has no boundary: it moves a guest that is far too fast, and the figure is the time.
fn post_copy(
    site: &Site<'_>,
    cell: &Cell,
    quick: bool,
    runs: usize,
    progress: &dyn Fn(&str),
) -> Result<Measured, HostsError> {
    let setting = cell.setting(quick);
    let rate = FAR_TOO_FAST * cell.link.1 as f64 / PAGE;
    let (outcome, attempts) = all_of(site, &setting, rate, runs)?;
    match outcome {
        Outcome::Works => {
            let lines: Vec<_> = attempts.iter().map(|attempt| figures(rate, attempt, cell, &setting)).collect();
            let [after, half, nearly_all] = [
                attempts.iter().filter_map(|attempt| attempt.post_copy_ms).fold(0.0, f64::max),
                attempts.iter().map(|attempt| attempt.latency_p50_ms).fold(0.0, f64::max),
                attempts.iter().map(|attempt| attempt.latency_p99_ms).fold(0.0, f64::max),
            ];
            let detail = format!(
                "{} MiB, at this rate; at most {after:.0} ms after the start, pages waited for p50 {half:.2} ms, p99 \
                 {nearly_all:.2} ms",
                setting.memory
            );
            progress(&format!("{}: {detail}", cell.name()));
            Ok((lines, detail))
        }
        Outcome::Fails => Err(HostsError("it did not end well".into())),
        Outcome::OutOfReach => Err(HostsError(format!(
            "the guest achieved {:.0} % of its {:.0} MB/s",
            attempts[0].achieved * 100.0,
            rate * PAGE / 1e6
        ))),
    }
}

/// Returns the figures in the order of [`COLUMNS`].
fn figures(rate: f64, attempt: &Attempt, cell: &Cell, setting: &Setting) -> Vec<f64> {
    let at_bandwidth_ms = (setting.memory << 20) as f64 / cell.link.1 as f64 * 1e3;
    vec![
        rate * PAGE,
        attempt.total_ms,
        attempt.downtime_ms,
        attempt.rounds,
        attempt.ratio,
        attempt.achieved,
        attempt.post_copy_ms.unwrap_or(attempt.total_ms) / at_bandwidth_ms,
    ]
}

fn judge(findings: &mut Findings) {
    let link = LINKS[0];
    for (fill, limit) in [("sequence", 0.5), ("ones", 0.1)] {
        let [none, zstd] = [Way::None, Way::Zstd].map(|way| Cell { link, way, fill }.name());
        let name = format!("{}, {fill}, dirty rate with none to that with zstd ({} times more)", link.0, 1.0 / limit);
        findings.at_most(&name, limit, &none, &zstd, "dirty_rate");
    }
    let post_copy = all_cells().into_iter().filter(|cell| cell.way == Way::PostCopy).map(|cell| cell.name());
    let measured: Vec<Spread> = post_copy.filter_map(|cell| findings.spread(&cell, "to_bandwidth")).collect();
    // The worst run of all cells is judged, also with `--quick`.
    let worst = measured.iter().copied().max_by(|a, b| a.max.total_cmp(&b.max));
    findings.targets.push(Target {
        name: "post-copy, worst time after the start to size/bandwidth".into(),
        limit: 1.3,
        value: worst.map(|spread| Spread { median: spread.max, ..spread }),
        unit: "times",
    });
}

fn notes(site: &Site<'_>, runs: usize, quick: bool) -> Vec<String> {
    let [source, destination] = site.cpus();
    vec![
        format!(
            "A guest of lab/microvm with one vCPU, on KVM with its dirty log; where KVM is missing, or its guest does not \
             reach the rates in question, a thread does the same with write protection. Memory is written page after page, the \
             first bytes of each. Source on CPUs {source}, destination on \
             {destination}; 2 channels over the loopback interface, not encrypted; downtime {} ms; given up when rounds do \
             not shrink, or after {} s.",
            DOWNTIME.as_millis(),
            if quick { 20 } else { 60 }
        ),
        format!(
            "Largest dirty rate: the largest of the rates that were tried at which {runs} of {runs} guests were moved, \
             were paused for at most {MAX_DOWNTIME} times the downtime, and had reached at least 95 % of their rate before \
             (throttle: only before) and during the migration; the next rate above, which fails, is at most 10 % more. \
             Total, downtime and the rest are of those migrations. Of size/bandwidth: the total time to that in which all \
             of RAM goes over the network once; in post-copy, only the time after the start."
        ),
        "Post-copy goes on at the destination after one round, with a guest that writes twice what the network carries; its \
         time is that from the guest's start there to all of its memory being there, the round before not counted."
            .into(),
        "Published (2 × Xeon E5-2699 v4, 4 vCPU and 32 GB, 40 Gbit/s, downtime 300 ms; largest migratable dirty rate, MB/s): \
         ones: no compression 1100, 16 CPU threads 1900, QAT 5000; sequence numbers: 1100, 700, 4200. There the network is 40 \
         Gbit/s and the guest 4 vCPUs: compare the columns' proportions, not their figures."
            .into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_are_measured_also_with_quick() {
        for quick in [false, true] {
            let row = |cell: &Cell| Row {
                name: cell.name(),
                detail: String::new(),
                runs: vec![vec![1.0; COLUMNS.len()]],
                void: None,
            };
            let mut findings = Findings {
                name: "dirty-rate",
                columns: COLUMNS,
                rows: all_cells().iter().filter(|cell| !quick || is_quick(cell)).map(row).collect(),
                targets: Vec::new(),
                notes: Vec::new(),
            };
            judge(&mut findings);
            assert_eq!(findings.targets.len(), 3);
            assert!(findings.targets.iter().all(|target| target.value.is_some()), "{:?}", findings.targets);
        }
    }

    #[test]
    fn what_fits_into_the_downtime_is_a_small_part_of_the_memory() {
        for cell in all_cells() {
            for quick in [false, true] {
                let Setting { memory, downtime, .. } = cell.setting(quick);
                let fits = cell.link.1 as f64 * downtime.as_secs_f64();
                assert!((memory << 20) as f64 > 3.0 * fits, "{}", cell.name());
            }
        }
    }
}
