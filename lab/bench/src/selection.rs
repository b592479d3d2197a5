//! `sterna-bench selection`: how good `auto` is, beside every fixed choice and beside an oracle that knows the cost of
//! each encoding.
//!
//! Most cells are computed ([`plan`]): the costs of the encodings on real content are measured on this machine
//! ([`costs`]), and the product's own selection then drives a migration in virtual time ([`sterna_simulator::path`])
//! over networks, CPUs and accelerators that this machine does not have. A dozen cells are real ([`real`]), to check
//! the computed ones.

mod costs;
mod plan;
mod real;

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::corpus::Corpus;
use sterna_simulator::path::Took;
use sterna_simulator::path::choices::Trace;

use super::BenchArgs;
use super::harness::{Column, Findings, Row, Spread, Target};
use super::ram::pair::Rig;
use crate::hosts::{Hosts, HostsError, Side};
use costs::Bytes;
use plan::{Network, Plan};
use real::Real;

const COLUMNS: &[Column] = &[
    Column { name: "auto_ms", title: "auto, ms", scale: 1.0, places: 0 },
    Column { name: "best_ms", title: "best fixed, ms", scale: 1.0, places: 0 },
    Column { name: "none_ms", title: "none, ms", scale: 1.0, places: 0 },
    Column { name: "oracle_ms", title: "oracle, ms", scale: 1.0, places: 0 },
    Column { name: "to_best", title: "auto to best", scale: 1.0, places: 3 },
    Column { name: "to_oracle", title: "auto to oracle", scale: 1.0, places: 3 },
    Column { name: "auto_cpus", title: "auto's CPUs", scale: 1.0, places: 2 },
    Column { name: "modelled_device_ms", title: "modelled device, ms", scale: 1.0, places: 0 },
    Column { name: "modelled_queue_ms", title: "modelled queue, ms", scale: 1.0, places: 0 },
];
const AUTO: usize = 0;
const NONE: usize = 2;
const TO_BEST: usize = 4;
const CPUS: usize = 6;

/// The remark on a cell in which every encoding uses more CPU than is allowed.
const NOTHING_FITS: &str = " (every choice takes more CPU than is allowed)";
/// A choice that uses more than this multiple of the allowed CPU does not fit.
const SLACK: f64 = 1.05;
const MIB: u64 = 1 << 20;

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    plan::all().iter().map(Plan::name).chain(real::named().iter().map(Real::name)).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let is_chosen = |name: &str, usually: bool| if args.only.is_empty() { usually } else { args.wants(name) };
    let mut computed = if args.long { plan::all() } else { plan::named() };
    if !computed.iter().any(|plan| is_chosen(&plan.name(), true)) {
        // The named cells are among those of the product only.
        computed = plan::all();
    }
    computed.retain(|plan| is_chosen(&plan.name(), true));
    let real = real::named().into_iter().filter(|real| is_chosen(&real.name(), !args.quick || real.is_quick()));
    let real: Vec<Real> = real.collect();
    let mut findings =
        Findings { name: "selection", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: Vec::new() };
    let rig = Rig { hosts: Hosts::loopback(), cpus: args.cpus, cancel };
    let cpus = [Side::A, Side::B].map(|side| rig.cpus(side)[0]);
    let bytes = Bytes::measure(cpus)?;
    findings.notes.push(format!(
        "Measured, ns for each byte: read {:.3} and written {:.3} at the source, received {:.3} and summed up {:.3} at the destination.",
        bytes.read, bytes.written, bytes.received, bytes.placed
    ));
    let (size, rounds) = if args.quick { (24 * MIB, 3) } else { (64 * MIB, 5) };
    for corpus in Corpus::ALL {
        let plans: Vec<Plan> = computed.iter().copied().filter(|plan| plan.corpus == corpus).collect();
        let real: Vec<Real> = real.iter().copied().filter(|real| real.corpus == corpus).collect();
        if plans.is_empty() && real.is_empty() {
            continue;
        }
        progress(&format!("{}: the ways of auto are measured", corpus.name()));
        let trace = match costs::trace(corpus, size, rounds, cpus[0], &bytes) {
            Ok((trace, origin)) => {
                findings.notes.push(format!("{}: {}; {origin}.", corpus.name(), of_encodings(&trace)));
                trace
            }
            Err(error) => {
                // Too little content here: the other corpora continue.
                let names = plans.iter().map(Plan::name).chain(real.iter().map(Real::name));
                findings.rows.extend(names.map(|name| void(name, &error)));
                continue;
            }
        };
        for plan in &plans {
            findings.rows.push(compute(plan, &trace, &bytes));
            if cancel.is_cancelled() {
                return Err(HostsError("cancelled".into()));
            }
        }
        for cell in &real {
            let row = real::measure(args, cell, &compared(&cell.plan(), &trace, &bytes), cancel, progress);
            findings.rows.push(match row {
                Err(error) if cancel.is_cancelled() => return Err(error),
                Err(error) => void(cell.name(), &error),
                Ok(row) => row,
            });
        }
    }
    findings.rows.sort_by_key(|row| !row.name.starts_with("virtual"));
    findings.notes.extend(notes(args, &rig));
    judge(&mut findings);
    Ok(findings)
}

fn void(name: String, error: &HostsError) -> Row {
    Row { name, detail: String::new(), runs: Vec::new(), void: Some(error.to_string()) }
}

/// Returns a note about the encodings' costs on a content.
fn of_encodings(trace: &Trace) -> String {
    let all = trace.batches.len() as f64;
    let each = trace.encodings.iter().enumerate().skip(1).map(|(at, encoding)| {
        let sum = |of: &dyn Fn(&sterna_simulator::path::Encoded) -> f64| {
            trace.batches.iter().map(|batch| of(&batch.encoded[at]) / batch.encoded[at].size as f64).sum::<f64>() / all
        };
        let nanos = sum(&|made| made.thread + made.engine);
        format!(
            "{encoding} {nanos:.2} ns/B to {:.3}, decoded in {:.2}",
            sum(&|made| made.bytes as f64),
            sum(&|made| made.decoding)
        )
    });
    format!("{}; a sample {:.1} µs", each.collect::<Vec<_>>().join("; "), trace.sampling / 1e3)
}

/// The times of fixed choices and of the oracle.
struct Compared {
    /// Each fixed choice, and whether it stays within the allowed CPU.
    fixed: Vec<(String, Took, bool)>,
    /// The index of the fastest that does; if none does, that of `none`, which uses the least CPU.
    best: usize,
    oracle: Took,
}

fn compared(plan: &Plan, trace: &Trace, bytes: &Bytes) -> Compared {
    let trace = trace.only(|encoding| plan.accelerator.has(encoding));
    let (path, batches) = (plan.path(bytes), plan.batches());
    let fits = |took: &Took| plan.cpu.allowed().is_none_or(|allowed| took.cpus() <= SLACK * allowed);
    let fixed: Vec<(String, Took, bool)> = (0..trace.encodings.len())
        .map(|encoding| {
            let took = trace.fixed(encoding, &path, batches);
            (trace.encodings[encoding].to_string(), took, fits(&took))
        })
        .collect();
    let best = best_of(&fixed);
    let known = trace.oracle(&path, batches, fits).filter(|known| known.time < fixed[best].1.time || !fixed[best].2);
    let oracle = known.unwrap_or(fixed[best].1);
    Compared { fixed, best, oracle }
}

fn best_of(fixed: &[(String, Took, bool)]) -> usize {
    let fit = fixed.iter().enumerate().filter(|(_, (.., fits))| *fits);
    fit.min_by(|a, b| a.1.1.time.total_cmp(&b.1.1.time)).map_or(0, |(at, _)| at)
}

/// Computes a cell in virtual time.
fn compute(plan: &Plan, trace: &Trace, bytes: &Bytes) -> Row {
    let Compared { fixed, best, oracle } = compared(plan, trace, bytes);
    let (path, batches) = (plan.path(bytes), plan.batches());
    let (auto, price) = trace.only(|encoding| plan.accelerator.has(encoding)).selected(&path, batches);
    let (name, fastest, fits) = &fixed[best];
    let none = fixed[0].1;
    let within = if *fits { "" } else { NOTHING_FITS };
    let ms = |took: &Took| took.time / 1e6;
    Row {
        name: plan.name(),
        detail: format!("best: {name}{within}; price {price:.1}"),
        runs: vec![vec![
            ms(&auto),
            ms(fastest),
            ms(&none),
            ms(&oracle),
            auto.time / fastest.time,
            auto.time / oracle.time,
            auto.cpus(),
            auto.engines / 1e6,
            auto.queued / 1e6,
        ]],
        void: None,
    }
}

/// The geometric mean of a figure over some cells, by their medians; the least and the most of them beside it.
fn geometric_mean(findings: &Findings, column: usize, of: impl Fn(&str) -> bool) -> Option<Spread> {
    let figures = medians(findings, column, of);
    let values: Vec<f64> = figures.into_iter().map(|(_, value)| value).collect();
    let logs = values.iter().map(|value| value.ln()).sum::<f64>();
    Some(Spread { median: f64::exp(logs / values.len() as f64), ..Spread::of(&values)? })
}

fn medians(findings: &Findings, column: usize, of: impl Fn(&str) -> bool) -> Vec<(String, f64)> {
    let name = COLUMNS[column].name;
    let rows = findings.rows.iter().filter(|row| of(&row.name));
    rows.filter_map(|row| Some((row.name.clone(), findings.spread(&row.name, name)?.median))).collect()
}

/// Adds the target that the largest of some figures, over some cells, is at most this, and names the cell.
fn worst(findings: &mut Findings, name: &str, limit: f64, of: Vec<(String, f64)>) {
    let worst = of.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let whose = worst.as_ref().map_or("not measured", |(cell, _)| cell.as_str());
    findings.targets.push(Target {
        name: format!("{name} ({whose})"),
        limit,
        value: worst.as_ref().map(|(_, value)| Spread { median: *value, min: *value, max: *value }),
        unit: "times",
    });
}

/// Adds the targets of requirement S1, for the computed cells and for the real ones.
fn judge(findings: &mut Findings) {
    for kind in ["virtual", "real"] {
        let of = |name: &str| name.starts_with(kind);
        let mean = geometric_mean(findings, TO_BEST, of);
        let target = |name: &str, limit, value| Target { name: format!("{kind}, {name}"), limit, value, unit: "times" };
        findings.targets.push(target("auto to the best fixed choice, geometric mean", 1.05, mean));
        let all = medians(findings, TO_BEST, of);
        worst(findings, &format!("{kind}, auto to the best fixed choice, worst cell"), 1.10, all);
        let is_mixed = |name: &str| of(name) && name.contains(": mixed, ") && !name.contains("unlimited");
        let mixed = geometric_mean(findings, TO_BEST, is_mixed);
        findings.targets.push(target(
            "auto to the best fixed choice, mixed content on networks, geometric mean",
            0.95,
            mixed,
        ));
        let unlimited = findings.rows.iter().filter(|row| of(&row.name) && row.name.contains("unlimited"));
        let to_none = |row: &Row| {
            let [auto, none] = [AUTO, NONE].map(|column| findings.spread(&row.name, COLUMNS[column].name));
            Some((row.name.clone(), auto?.median / none?.median))
        };
        let to_none: Vec<(String, f64)> = unlimited.filter_map(to_none).collect();
        worst(findings, &format!("{kind}, auto to none where the network is unlimited, worst cell"), 1.05, to_none);
    }
    let possible = |row: &&Row| !row.detail.contains(NOTHING_FITS);
    let possible: Vec<String> = findings.rows.iter().filter(possible).map(|row| row.name.clone()).collect();
    let used =
        medians(findings, CPUS, |name| name.contains("CPUs allowed") && possible.iter().any(|cell| cell == name));
    let part = |(name, used): (String, f64)| {
        let allowed: f64 = name.split(", ").find_map(|part| part.strip_suffix(" CPUs allowed"))?.parse().ok()?;
        Some((name, used / allowed))
    };
    worst(
        findings,
        "virtual, CPU used by auto to what is allowed, worst cell",
        SLACK,
        used.into_iter().filter_map(part).collect(),
    );
}

fn notes(args: &BenchArgs, rig: &Rig<'_>) -> Vec<String> {
    let networks = Network::ALL.map(Network::name).join(", ");
    vec![
        format!(
            "Costs are CPU time of one thread on CPU {}, the least of several rounds, batch by batch of 512 KiB; with the classes by the \
             engine's own sample. Networks ({networks}) carry 1448 of 1538 bytes. ×: channels. A cell moves 1 GiB up to 1 Gbit/s and 4 GiB \
             beyond, the measured content again and again.",
            rig.cpus(Side::A)[0]
        ),
        "Virtual: the product's selection drives threads, sockets, window and receivers in virtual time, without scheduling delays. CPUs \
         allowed: as by --max-cpus; best fixed and oracle are the fastest of those that keep to it within 5 %. On one core: all sending \
         threads, and all receiving ones on another."
            .into(),
        "Oracle: for each batch the encoding that would be best at one price of a byte, by the costs that it will really have; the best of \
         92 prices and mixtures of neighbouring ones; where the best price changes meanwhile, auto can do better. In real cells: as much faster than the best fixed choice as it is in virtual time."
            .into(),
        "Modelled: IAA takes 0.4 µs and 0.495 ns/B for a batch on one of its engines (the device model's timing), QAT 1/3.5 ns/B as one \
         server (3.5 GB/s were published from end to end), first come, first served; bytes are those of zlib-rs with a window of 4 KiB and of gzip on \
         the CPU, where a device with fixed codes writes more. Nothing of that is a result of hardware."
            .into(),
        format!(
            "Real: two processes, two channels, {} CPU for each side; every choice in turn, {} rounds.",
            args.cpus,
            args.rounds()
        ),
    ]
}

#[cfg(test)]
mod tests;
