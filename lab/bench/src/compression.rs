//! `sterna-bench compression`: the fastest method for each network, number of channels and content, beside QEMU's own
//! methods.
//!
//! Two processes move memory as in `sterna-bench ram`. The memory holds real content ([`sterna_qemu_lab::corpus`]), or
//! a pattern of published measurements that a thread writes during the migration at a set rate. Networks with a limit
//! are two namespaces with a token bucket between them, for QEMU and for the library alike. The cells are listed in
//! [`plan`].

mod plan;

use std::cell::RefCell;

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::corpus::Corpus;
use sterna_qemu_lab::net::Link;

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Row, Spread, Target, interleaved};
use super::measured::Measured;
use super::ram::guest::{Content, Memory};
use super::ram::pair::{Rig, Shape};
use super::ram::qemu::{Multifd, Source};
use super::ram::side::Mover;
use super::ram::writer::SEED;
use super::ram::writer::Writes;
use crate::hosts::{Hosts, HostsError, Side};
use plan::{Load, Method, Network, Plan, Way};

const COLUMNS: &[Column] = &[
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 },
    Column { name: "downtime_ms", title: "downtime, ms", scale: 1.0, places: 0 },
    Column { name: "throughput", title: "network, Mbit/s", scale: 125e3, places: 0 },
    Column { name: "pages_per_second", title: "pages/s, 1000", scale: 1e3, places: 1 },
    Column { name: "send_cpu", title: "send CPU, %", scale: 0.01, places: 0 },
    Column { name: "receive_cpu", title: "receive CPU, %", scale: 0.01, places: 0 },
    Column { name: "ratio", title: "ratio", scale: 1.0, places: 2 },
    Column { name: "cpu_seconds", title: "CPU, s", scale: 1.0, places: 2 },
];
/// The numbers of multifd channels that are tried for QEMU.
const QEMU_CHANNELS: [u8; 3] = [1, 2, 4];
const PAGE: f64 = 4096.0;
/// Memory of a QEMU beside guest RAM, in bytes.
const BESIDE_RAM: u64 = 128 << 20;
/// The least part of its set rate that a guest must reach for a run to count.
const MIN_ACHIEVED: f64 = 0.95;
/// How many runs may be repeated because the guest was too slow.
const STARVED_RUNS: u32 = 3;
/// Seconds after which the migration of a guest that writes is abandoned.
const GIVE_UP_AFTER: u64 = 10;

/// Returns the names of all cells, including those that this machine may be unable to measure.
pub(crate) fn cells() -> Vec<String> {
    plan::all().iter().map(Plan::name).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let chosen = |plan: &Plan| match args.only.as_slice() {
        [] => plan.is_measured(args.quick, args.long),
        _ => args.wants(&plan.name()),
    };
    let mut plans: Vec<Plan> = plan::all().into_iter().filter(chosen).collect();
    let mut findings =
        Findings { name: "compression", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: Vec::new() };
    if !plan::has_qat() {
        plans.retain(|plan| !plan.needs_qat());
        findings.notes.push("deflate by qat is left out: there is no Intel QAT on this machine.".into());
    }
    while let Some(first) = plans.first() {
        let (network, load) = (first.network, first.load);
        let (part, rest) = plans.into_iter().partition(|plan| (plan.network, plan.load) == (network, load));
        plans = rest;
        match measure_part(args, network, load, &part, cancel, progress, &mut findings.notes) {
            Ok(rows) => findings.rows.extend(rows),
            Err(error) if cancel.is_cancelled() => return Err(error),
            // Too little content or no namespaces: the other parts continue.
            Err(error) => findings.rows.extend(part.iter().map(|plan| Row {
                name: plan.name(),
                detail: String::new(),
                runs: Vec::new(),
                void: Some(error.to_string()),
            })),
        }
    }
    findings.notes.extend(notes(args, cancel));
    judge(&mut findings);
    Ok(findings)
}

/// Measures all cells of one network and one load, in turns.
fn measure_part(
    args: &BenchArgs,
    network: Network,
    load: Load,
    plans: &[Plan],
    cancel: &Cancel,
    progress: &dyn Fn(&str),
    notes: &mut Vec<String>,
) -> Result<Vec<Row>, HostsError> {
    let hosts = match network.bits() {
        None => Hosts::loopback(),
        bits => Hosts::namespaces(Link { bits_per_second: bits, delay: None })?,
    };
    let rig = Rig { hosts, cpus: args.cpus, cancel };
    let filled = network.memory(load, args.quick);
    let content = Content::Corpus { corpus: load.corpus(), bytes: filled };
    let shape = Shape { memory: Memory::Anonymous, bytes: Content::around_corpus(filled), content };
    let about = format!("{}, {}", network.name(), load.name());
    progress(&format!("{about}: {} MiB are put together", filled >> 20));
    // Opened here first, so that both movers and all processes find it.
    let origin = load.corpus().open(filled, SEED)?.origin().to_owned();
    let note = format!("{about}: {} MiB; {origin}.", filled >> 20);
    if !notes.contains(&note) {
        notes.push(note);
    }
    let is_qemu = |plan: &&Plan| matches!(plan.way, Way::Qemu(_));
    let own = plans.iter().any(|plan| !is_qemu(&plan));
    let source = own.then(|| rig.side(Side::A, shape)).transpose()?.map(RefCell::new);
    let qemu = plans.iter().any(|plan| is_qemu(&plan)).then(|| Source::start(&rig, args.qemu, shape, None));
    let expected = filled + BESIDE_RAM;
    let mut channels = Vec::new();
    for plan in plans {
        channels.push(match (plan.way, &qemu) {
            (Way::Sterna(_, channels), _) => channels,
            (Way::Qemu(compression), Some(Ok(qemu))) => {
                best_channels(plan, qemu, compression, expected, progress)?.into()
            }
            (Way::Qemu(_), _) => 0,
        });
    }
    let seen = RefCell::new(vec![Seen::default(); plans.len()]);
    let mut cells: Vec<Cell<'_>> = Vec::new();
    for (index, (plan, channels)) in plans.iter().zip(&channels).enumerate() {
        let (source, qemu, rig, seen) = (&source, &qemu, &rig, &seen);
        let mut first = true;
        let mut once = move || {
            // The arrived memory is verified once for each kind of migration.
            let verify = std::mem::take(&mut first);
            match (plan.way, source, qemu) {
                (Way::Qemu(compression), _, Some(Ok(qemu))) => {
                    let how = Multifd { channels: *channels as u8, compression, encrypted: false };
                    qemu.migrate(how, expected, verify)
                }
                (Way::Sterna(method, _), Some(source), _) => {
                    let by = mover(method, load, filled, rig);
                    rig.migrate(source, shape, expected, &by, *channels, verify)
                }
                (_, _, Some(Err(error))) => Err(HostsError(error.to_string())),
                _ => Err(HostsError("its source was not started".into())),
            }
        };
        let run = move || {
            let mut measured = once()?;
            // A run whose guest was too slow does not count and is repeated, a few times.
            for _ in 0..STARVED_RUNS {
                if !is_starved(&measured) {
                    break;
                }
                measured = once()?;
            }
            seen.borrow_mut()[index].note(&measured)?;
            Ok(figures(&measured))
        };
        cells.push(Cell { name: plan.name(), run: Box::new(run) });
    }
    let mut rows = interleaved(&mut cells, args.rounds(), cancel, progress)?;
    drop(cells);
    for (((row, plan), channels), seen) in rows.iter_mut().zip(plans).zip(channels).zip(seen.into_inner()) {
        row.detail = match plan.way {
            Way::Qemu(_) => format!("{channels} channels"),
            Way::Sterna(..) => seen.detail(),
        };
    }
    Ok(rows)
}

fn is_starved(measured: &Measured) -> bool {
    measured.achieved.is_some_and(|achieved| achieved < MIN_ACHIEVED)
}

/// The guest's results of a cell, over all rounds.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// The smallest part of its rate that it reached, if it writes.
    achieved: Option<f64>,
    /// Runs that count.
    runs: u32,
    /// How many of them were abandoned, and why the last one was.
    given_up: (u32, String),
}

impl Seen {
    /// Adds a run if its guest was fast enough for the run to count.
    fn note(&mut self, measured: &Measured) -> Result<(), HostsError> {
        if let Some(achieved) = measured.achieved {
            if is_starved(measured) {
                return Err(HostsError(format!("the guest achieved only {:.0} % of its rate", achieved * 100.0)));
            }
            self.achieved = Some(self.achieved.map_or(achieved, |least| least.min(achieved)));
        }
        if let Some(reason) = &measured.given_up {
            // The rest of the text is advice.
            let what = reason.split(':').next().unwrap_or_default();
            self.given_up = (self.given_up.0 + 1, what.to_owned());
        }
        self.runs += 1;
        Ok(())
    }

    fn detail(&self) -> String {
        let Some(achieved) = self.achieved else { return String::new() };
        let end = match &self.given_up {
            (0, _) => String::new(),
            (count, reason) if *count == self.runs => format!("never ends: {reason}; "),
            (count, reason) => format!("{count} of {} runs do not end: {reason}; ", self.runs),
        };
        format!("{end}the guest at {:.0} %", achieved * 100.0)
    }
}

fn mover(method: Method, load: Load, filled: u64, rig: &Rig<'_>) -> Mover {
    let writes = load.writes().map(|(pattern, rate)| Writes {
        pattern,
        rate,
        from: Content::corpus_at(),
        bytes: filled,
        cpus: rig.guest_cpus(),
        give_up_after: GIVE_UP_AFTER,
    });
    Mover::Method { method: method.name.into(), level: method.level.map(str::to_owned), writes }
}

/// Returns the number of channels with which QEMU is fastest.
fn best_channels(
    plan: &Plan,
    qemu: &Source<'_>,
    compression: &'static str,
    expected: u64,
    progress: &dyn Fn(&str),
) -> Result<u8, HostsError> {
    let mut best = (f64::INFINITY, QEMU_CHANNELS[0]);
    for channels in QEMU_CHANNELS {
        let measured = qemu.migrate(Multifd { channels, compression, encrypted: false }, expected, false)?;
        progress(&format!("{}: {channels} channels: {:.0} ms", plan.name(), measured.total_ms));
        if measured.total_ms < best.0 {
            best = (measured.total_ms, channels);
        }
    }
    Ok(best.1)
}

/// Returns the figures in the order of [`COLUMNS`].
fn figures(measured: &Measured) -> Vec<f64> {
    let Measured { total_ms, downtime_ms, wire_bytes, pages, source_cpu, destination_cpu, .. } = *measured;
    let seconds = total_ms / 1e3;
    vec![
        total_ms,
        downtime_ms,
        wire_bytes / seconds,
        pages / seconds,
        source_cpu / seconds,
        destination_cpu / seconds,
        pages * PAGE / wire_bytes,
        source_cpu + destination_cpu,
    ]
}

/// Returns the name of the cell with the shortest median.
fn fastest<'a>(findings: &Findings, cells: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    let rate = |cell: &&String| findings.spread(cell, "pages_per_second").map(|spread| spread.median);
    cells.filter_map(|cell| Some((cell, rate(&cell)?))).max_by(|a, b| a.1.total_cmp(&b.1)).map(|(cell, _)| cell)
}

/// Returns how many times faster a network of this rate could have moved pages at the ratio of `best` than `cell` moved
/// them.
fn short_of_network(findings: &Findings, cell: &str, best: &str, bytes_per_second: f64) -> Option<Spread> {
    let ratio = findings.spread(best, "ratio")?.median;
    let rate = findings.spread(cell, "pages_per_second")?;
    let short = |pages: f64| bytes_per_second * ratio / PAGE / pages;
    Some(Spread { median: short(rate.median), min: short(rate.max), max: short(rate.min) })
}

/// Judges the targets of requirement Q and of the claims beside QEMU.
fn judge(findings: &mut Findings) {
    let cell = |network, way| Plan { network, load: Load::Still(Corpus::Mixed), way }.name();
    let sterna = |network, method| cell(network, Way::Sterna(method, 2));
    let [slow, unlimited] = [Network::Gigabit, Network::Unlimited];
    let (auto, zstd) = (sterna(slow, Method::AUTO), cell(slow, Way::Qemu("zstd")));

    let fixed: Vec<String> = Method::FIXED.iter().map(|method| sterna(slow, *method)).collect();
    let best = fastest(findings, fixed.iter()).cloned();
    let bytes_per_second = slow.bits().unwrap_or(0) as f64 / 8.0;
    findings.targets.push(Target {
        name: format!(
            "1 Gbit/s, auto: network × ratio of the best fixed choice ({}) to its pages/s (at least 0.95 of it)",
            best.as_deref().and_then(|name| name.rsplit(", ").next()).unwrap_or("not measured")
        ),
        limit: 1.053,
        value: best.and_then(|best| short_of_network(findings, &auto, &best, bytes_per_second)),
        unit: "times",
    });
    let (name, limit) = ("1 Gbit/s, QEMU's zstd to auto, pages/s (at least 1.05 times QEMU's)", 0.952);
    findings.at_most(name, limit, &zstd, &auto, "pages_per_second");
    findings.at_most("1 Gbit/s, auto to QEMU's zstd, CPU of both sides", 0.8, &auto, &zstd, "cpu_seconds");
    let (auto, none) = (sterna(unlimited, Method::AUTO), sterna(unlimited, Method::NONE));
    findings.at_most("unlimited, auto to none, time", 1.05, &auto, &none, "total_ms");
    let (ours, theirs) = (sterna(unlimited, Method::ZLIB), cell(unlimited, Way::Qemu("zlib")));
    let name = "unlimited, QEMU's zlib to zlib, pages/s (at least twice QEMU's)";
    findings.at_most(name, 0.5, &theirs, &ours, "pages_per_second");
    findings.at_most("unlimited, QEMU's zlib to zlib, ratio", 1.0, &theirs, &ours, "ratio");
}

fn notes(args: &BenchArgs, cancel: &Cancel) -> Vec<String> {
    let rig = Rig { hosts: Hosts::loopback(), cpus: args.cpus, cancel };
    vec![
        format!(
            "Source on CPUs {:?}, destination on {:?}, a guest that writes on {:?}; unlimited is the loopback interface, the others \
             two network namespaces with a token bucket each way; not encrypted; pages checked by Sterna's own checksums. \
             QEMU {} with the best of {QEMU_CHANNELS:?} channels, the same content at the same place, and the same memory \
             at the destination. Method × channels; levels are 1 unless they are named.",
            rig.cpus(Side::A),
            rig.cpus(Side::B),
            rig.guest_cpus(),
            args.qemu
        ),
        "Total: from connecting to the guest running at the destination (QEMU: from its first migration event). Pages: those that \
         are not zero, again in each round. Network: bytes out of the source's interface with headers (unlimited: as the mover \
         counts them). Ratio: bytes of pages to bytes on the network. CPU %: CPU-seconds to total; those of the thread that writes the guest's memory are left out, with the \
         faults at which its writes are noted."
            .into(),
        format!(
            "A guest that writes: pages of ones and of sequence numbers, whole and one after another; a memcached at 9:1 set and get, \
             128-byte keys, 2048-byte values. Given up when rounds do not shrink, or after {GIVE_UP_AFTER} s. It has no QEMU \
             beside it: QEMU notes only what its own vCPUs write."
        ),
        "iaa runs on the CPU, for want of the device: deflate with a window of 4 KiB.".into(),
        "Published (64 GB guest, 60 GB of a repeated corpus, 50 Gbit/s; s and Mbit/s with 4, 8, 16 channels): none 12.5/43 740, \
         11.8/46 073, 16.8/32 363; zstd 54.5/3 443, 27.6/6 823, 14.2/13 291; zlib 254/772, 130/1 509, 66/2 956; QATzip \
         23.1/8 750, 16.9/12 307, 18.6/11 045. Limited to 1250 MB/s, 8 channels, pages/s: QATzip 2 940 235, zstd 2 391 465, none \
         330 240. There each channel has a core of its own."
            .into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(rows: Vec<(String, Vec<f64>)>) -> Findings {
        let row = |(name, figures)| Row { name, detail: String::new(), runs: vec![figures], void: None };
        let rows = rows.into_iter().map(row).collect();
        Findings { name: "compression", columns: COLUMNS, rows, targets: Vec::new(), notes: Vec::new() }
    }

    #[test]
    fn every_target_is_about_cells_that_are_measured_also_with_quick() {
        for quick in [false, true] {
            let plans = plan::all().into_iter().filter(|plan| plan.is_measured(quick, false));
            let mut findings = findings(plans.map(|plan| (plan.name(), vec![1.0; COLUMNS.len()])).collect());
            judge(&mut findings);
            assert_eq!(findings.targets.len(), 6);
            assert!(findings.targets.iter().all(|target| target.value.is_some()), "{:?}", findings.targets);
        }
    }

    #[test]
    fn a_guest_that_is_starved_makes_its_cell_void_and_one_that_was_given_up_is_a_result() {
        let ran = |achieved, given_up: Option<&str>| Measured {
            achieved: Some(achieved),
            given_up: given_up.map(str::to_owned),
            ..Measured::default()
        };
        let mut seen = Seen::default();
        seen.note(&ran(0.99, None)).unwrap();
        seen.note(&ran(0.96, Some("given up after 6 rounds: the guest is too fast"))).unwrap();
        assert_eq!(seen.detail(), "1 of 2 runs do not end: given up after 6 rounds; the guest at 96 %");
        let mut never = Seen::default();
        never.note(&ran(1.0, Some("given up after 10 s"))).unwrap();
        assert_eq!(never.detail(), "never ends: given up after 10 s; the guest at 100 %");
        let error = seen.note(&ran(0.94, None)).unwrap_err();
        assert_eq!(error.to_string(), "the guest achieved only 94 % of its rate");
        assert_eq!(Seen::default().detail(), "");
    }

    #[test]
    fn figures_are_per_second_and_the_ratio_is_of_pages_to_the_network() {
        let measured = Measured {
            total_ms: 2000.0,
            downtime_ms: 7.0,
            wire_bytes: 1e6,
            pages: 1000.0,
            source_cpu: 1.5,
            destination_cpu: 0.5,
            ..Measured::default()
        };
        assert_eq!(figures(&measured), [2000.0, 7.0, 5e5, 500.0, 0.75, 0.25, 4.096, 2.0]);
    }

    #[test]
    fn auto_is_compared_with_what_the_network_could_do_at_the_ratio_of_the_fastest_fixed_choice() {
        let name = |method| {
            Plan { network: Network::Gigabit, load: Load::Still(Corpus::Mixed), way: Way::Sterna(method, 2) }.name()
        };
        // 125 MB/s are 30518 pages a second; at the ratio of 2, 61035.
        let cell = |method, rate: f64, ratio| (name(method), vec![1.0, 1.0, 1.0, rate, 1.0, 1.0, ratio, 1.0]);
        let mut findings = findings(vec![
            cell(Method::NONE, 30_000.0, 1.0),
            cell(Method::ZSTD, 60_000.0, 2.0),
            cell(Method::ZLIB, 20_000.0, 2.2),
            cell(Method::AUTO, 50_000.0, 1.9),
        ]);
        judge(&mut findings);
        let target = &findings.targets[0];
        assert!(target.name.contains("(zstd × 2)"), "{}", target.name);
        assert!((target.value.unwrap().median - 61_035.0 / 50_000.0).abs() < 1e-3, "{target:?}");
        assert_eq!(target.met(), Some(false));
    }
}
