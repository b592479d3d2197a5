//! `sterna-bench qemu`: the same guest moved by QEMU alone, and by Sterna directly and through QEMU's stream.
//!
//! The parts, each with its own source: *unlimited*, over a virtual cable as fast as the machine, for each backing of
//! memory (the same on both sides), with an idle guest and with one that writes; *sparse*, a large guest that has
//! touched little of its memory; and *1 Gbit/s*, the same cable behind a token bucket. In all cells source and
//! destination have their own CPUs, one each without `--cpus`; QEMU has the best of 1, 2 and 4 channels, found
//! beforehand.

use std::cell::RefCell;

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::huge::HugeTmpfs;
use sterna_qemu_lab::net::Link;
use sterna_qemu_lab::{Backend, Fill, Guest, LinuxGuest, QemuOptions};

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Row, Spread, Target, interleaved};
use super::measured::Measured;
use super::migration::{Bench, Conditions, Mode, Way};
use super::ram::certificates;
use crate::hosts::{Hosts, HostsError};

const COLUMNS: &[Column] = &[
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 },
    Column { name: "downtime_ms", title: "downtime, ms", scale: 1.0, places: 0 },
    Column { name: "wire_bytes", title: "wire, MB", scale: 1e6, places: 0 },
    Column { name: "cpu_seconds", title: "CPU, s", scale: 1.0, places: 2 },
    Column { name: "source_cpu_seconds", title: "source", scale: 1.0, places: 2 },
    Column { name: "destination_cpu_seconds", title: "dest.", scale: 1.0, places: 2 },
    Column { name: "achieved", title: "guest, %", scale: 0.01, places: 0 },
    Column { name: "destination_faults", title: "faults, 1000", scale: 1e3, places: 1 },
    Column { name: "send_memory_bytes", title: "send, MiB", scale: 1048576.0, places: 0 },
    Column { name: "receive_memory_bytes", title: "receive, MiB", scale: 1048576.0, places: 0 },
];

/// RAM channels of Sterna: its default.
const CHANNELS: u16 = 2;
/// The numbers of multifd channels that are tried for QEMU.
const QEMU_CHANNELS: [u8; 3] = [1, 2, 4];
/// The share of the pages of content `mixed` that are not zero, as `sterna-guest dump mixed` shows.
const NON_ZERO: f64 = 0.54;
const SLOW: u64 = 1_000_000_000;
/// Bytes per second that the writing guest writes.
const DIRTY_RATE: u64 = 50_000_000;
/// The least part of its rate that a guest must reach for a run to count. It shares its CPU with the mover.
const MIN_ACHIEVED: f64 = 0.5;
/// A sparse guest's RAM, and what it fills of it: with its kernel's tables about 256 MiB, and twice that much RAM.
const SPARSE: [(u64, u64); 2] = [(16 << 30, 16 << 20), (8 << 30, 128 << 20)];
/// The most memory that a sparse guest populates.
const SPARSE_POPULATED: u64 = 1 << 30;
/// A machine with less memory has a sparse guest of half the size.
const MEMORY_FOR_SPARSE: u64 = 20 << 30;

const NONE: &[&str] = &["--method", "none"];
const ZSTD: &[&str] = &["--method", "zstd", "--level", "1"];
const AUTO: &[&str] = &["--method", "auto"];

/// The backing of guest memory, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Anonymous,
    Memfd,
    /// tmpfs with huge pages.
    HugePages,
}

/// A source, and the cells that are measured with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    name: &'static str,
    memory: Memory,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unlimited,
    Sparse,
    Slow,
}

const PARTS: [Part; 5] = [
    Part { name: "unlimited, anonymous", memory: Memory::Anonymous, kind: Kind::Unlimited },
    Part { name: "unlimited, memfd", memory: Memory::Memfd, kind: Kind::Unlimited },
    Part { name: "unlimited, huge pages", memory: Memory::HugePages, kind: Kind::Unlimited },
    Part { name: "sparse", memory: Memory::Anonymous, kind: Kind::Sparse },
    Part { name: "1 Gbit/s", memory: Memory::Anonymous, kind: Kind::Slow },
];

/// A cell before it is measured: its name, the mover, and whether the guest writes.
struct Plan {
    name: String,
    way: Way,
    writes: bool,
}

impl Part {
    /// Its cells; QEMU's channels are still to be chosen.
    fn plans(self) -> Vec<Plan> {
        let named = |name: &str, way, writes| {
            let rest = if writes { ", writing" } else { "" };
            Plan { name: format!("{}{rest}, {name}", self.name), way, writes }
        };
        let qemu = |name: &str, compression, encrypted, writes| {
            // Replaced by the best number of channels before anything is counted.
            named(&format!("QEMU {name}"), Way::Qemu { channels: QEMU_CHANNELS[0], compression, encrypted }, writes)
        };
        let sterna = |mode, name: &str, method, encrypted, writes| {
            let by = if mode == Mode::Direct { "direct" } else { "stream" };
            let way = Way::Sterna { mode, method, channels: CHANNELS, encrypted, in_stream: false };
            named(&format!("{by} {name}"), way, writes)
        };
        let (direct, stream) = (Mode::Direct, Mode::Stream);
        let mut plans = Vec::new();
        for writes in [false, true] {
            match self.kind {
                Kind::Slow => {
                    if !writes {
                        plans.push(qemu("none", "none", false, writes));
                    }
                    plans.push(qemu("zstd", "zstd", false, writes));
                    plans.push(sterna(stream, "zstd", ZSTD, false, writes));
                    plans.push(sterna(direct, "auto", AUTO, false, writes));
                }
                Kind::Sparse if writes => {}
                Kind::Sparse | Kind::Unlimited => {
                    plans.push(qemu("none", "none", false, writes));
                    plans.push(sterna(stream, "none", NONE, false, writes));
                    plans.push(sterna(direct, "none", NONE, false, writes));
                }
            }
        }
        if self.kind == Kind::Unlimited && self.memory == Memory::Anonymous {
            plans.push(qemu("TLS", "none", true, false));
            plans.push(sterna(direct, "TLS", NONE, true, false));
            plans.push(qemu("zstd", "zstd", false, false));
            plans.push(sterna(stream, "zstd", ZSTD, false, false));
            plans.push(sterna(direct, "zstd", ZSTD, false, false));
        }
        plans
    }
}

/// Returns the names of all cells, including those that this machine may be unable to measure.
pub(crate) fn cells() -> Vec<String> {
    PARTS.into_iter().flat_map(Part::plans).map(|plan| plan.name).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let (fast_fill, slow_fill) = if args.quick { (3 << 29, 448 << 20) } else { (7 << 29, 768 << 20) };
    let (sparse_ram, sparse_fill) = SPARSE[usize::from(machine_memory() < MEMORY_FOR_SPARSE)];
    let mut findings =
        Findings { name: "qemu", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: Vec::new() };
    findings.notes.push(format!(
        "QEMU {}; the guest holds {:.0} MiB (unlimited) and {:.0} MiB (1 Gbit/s) that are not zero, and somewhat less that \
         is (content `mixed`), and is idle or writes {:.0} MB/s of whole pages at random; the sparse one has {} GiB of RAM and fills {} MiB; \
         each side has {} CPU of its own; the same memory on both sides; downtime limit 300 ms; Sterna with {CHANNELS} channels, not \
         encrypted unless TLS is named.",
        args.qemu,
        non_zero(fast_fill),
        non_zero(slow_fill),
        DIRTY_RATE as f64 / 1e6,
        sparse_ram >> 30,
        sparse_fill >> 20,
        args.cpus
    ));
    findings.notes.push(
        "Total: from QEMU's first migration event (stream: from opening its channels, if that is earlier; direct: from the start of the \
         process of `sterna send`) to the guest running at the destination. Guest: what it has written of what it was to write. CPU and \
         faults: QEMU's and Sterna's together. Memory: anonymous pages at their peak."
            .into(),
    );
    findings.notes.push(
        "4 KiB page faults are several times dearer on a virtual machine like this one than on bare metal, which favours \
         the mover that avoids them: Sterna on a plain memfd."
            .into(),
    );
    let certificates = certificates()?;
    for part in PARTS {
        let mut plans = part.plans();
        plans.retain(|plan| args.wants(&plan.name));
        if plans.is_empty() {
            continue;
        }
        let (fill, ram, populated) = match part.kind {
            Kind::Unlimited => (fast_fill, ram_for(fast_fill), ram_for(fast_fill)),
            Kind::Slow => (slow_fill, ram_for(slow_fill), ram_for(slow_fill)),
            Kind::Sparse => (sparse_fill, sparse_ram, SPARSE_POPULATED),
        };
        // Room for source, destination, and the next destination while the last one ends.
        let huge = (part.memory == Memory::HugePages).then(|| HugeTmpfs::mount(3 * ram + (64 << 20)));
        let huge = match huge.transpose() {
            Ok(huge) => huge,
            Err(error) => {
                findings.notes.push(format!("No cells on huge pages: {error}."));
                continue;
            }
        };
        let backend = match (part.memory, &huge) {
            (Memory::Anonymous, _) => Backend::Anonymous,
            (Memory::Memfd, _) | (Memory::HugePages, None) => Backend::Memfd,
            (Memory::HugePages, Some(huge)) => Backend::File { path: huge.path().to_owned() },
        };
        let limited = part.kind == Kind::Slow;
        let link = if limited { Link { bits_per_second: Some(SLOW), delay: None } } else { Link::default() };
        let hosts = match Hosts::namespaces(link) {
            Ok(hosts) => hosts.pinned(args.cpus),
            Err(error) if limited => {
                findings.notes.push(format!("No cells at 1 Gbit/s: {error}."));
                continue;
            }
            Err(error) => {
                findings.notes.push(format!("Over the loopback interface, QEMU's wire bytes unknown: {error}."));
                Hosts::loopback().pinned(args.cpus)
            }
        };
        progress(&format!("{}: booting a guest that fills {} MiB of {}", part.name, fill >> 20, ram >> 20));
        let guest = LinuxGuest { fill: Fill::Mixed, memory: Some(fill), verify_rate: 0, ..LinuxGuest::default() };
        let mut options = QemuOptions::new(args.qemu, Guest::Linux(guest));
        options.memory = ram;
        // The source has a file of its own beside those of its destinations.
        options.backend = match &backend {
            Backend::File { path } => Backend::File { path: path.join("source") },
            other => other.clone(),
        };
        let bench = RefCell::new(Bench::start(hosts, options, args.warmed(populated), certificates.path(), cancel)?);
        findings.rows.extend(measure_part(args, plans, &backend, &bench, cancel, progress)?);
    }
    judge(&mut findings, ram_for(fast_fill));
    Ok(findings)
}

/// Returns the memory of this machine, in bytes.
fn machine_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB"));
    total.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Returns the RAM of a guest that fills `bytes`: its kernel needs memory too, some of it per page of RAM.
const fn ram_for(bytes: u64) -> u64 {
    bytes + bytes / 16 + (256 << 20)
}

/// Returns the MiB that are not zero in a guest that fills `bytes`.
fn non_zero(bytes: u64) -> f64 {
    bytes as f64 * NON_ZERO / 1048576.0
}

/// Measures one part: finds the best number of channels for QEMU, then runs all cells in turn.
fn measure_part(
    args: &BenchArgs,
    mut plans: Vec<Plan>,
    backend: &Backend,
    bench: &RefCell<Bench>,
    cancel: &Cancel,
    progress: &dyn Fn(&str),
) -> Result<Vec<Row>, HostsError> {
    let conditions = |plan: &Plan| Conditions {
        dirty_rate: if plan.writes { DIRTY_RATE } else { 0 },
        // QEMU may be unable to move a guest that writes; then the cell is void.
        ..Conditions::REST
    };
    for plan in &mut plans {
        let Way::Qemu { compression, encrypted, .. } = plan.way else { continue };
        let mut best = (f64::INFINITY, 1);
        for channels in QEMU_CHANNELS {
            let way = Way::Qemu { channels, compression, encrypted };
            let measured = bench.borrow_mut().migrate(&way, backend, conditions(plan), false, cancel)?;
            progress(&format!("{}: {channels} channels: {:.0} ms", plan.name, measured.total_ms));
            if measured.total_ms < best.0 {
                best = (measured.total_ms, channels);
            }
        }
        plan.way = Way::Qemu { channels: best.1, compression, encrypted };
    }
    let mut cells: Vec<Cell<'_>> = plans
        .iter()
        .map(|plan| {
            let mut first = true;
            let conditions = conditions(plan);
            Cell {
                name: plan.name.clone(),
                run: Box::new(move || {
                    // The arrived guest's memory is verified once for each cell.
                    let verify = std::mem::take(&mut first);
                    bench
                        .borrow_mut()
                        .migrate(&plan.way, backend, conditions, verify, cancel)
                        .map(|measured| figures(&measured))
                }),
            }
        })
        .collect();
    let mut rows = interleaved(&mut cells, args.rounds(), cancel, progress)?;
    let achieved = COLUMNS.iter().position(|column| column.name == "achieved").expect("a column of this benchmark");
    for (row, plan) in rows.iter_mut().zip(&plans) {
        let channels = match plan.way {
            Way::Qemu { channels, .. } => channels.into(),
            Way::Sterna { channels, .. } => channels,
        };
        row.detail = format!("{channels} channels");
        let least = Spread::of(&row.runs.iter().map(|run| run[achieved]).collect::<Vec<_>>());
        if let Some(least) = least.filter(|achieved| achieved.median < MIN_ACHIEVED) {
            row.void = Some(format!("the guest wrote only {:.0} % of what it was to write", least.median * 100.0));
        }
    }
    Ok(rows)
}

/// Returns the figures in the order of [`COLUMNS`].
fn figures(measured: &Measured) -> Vec<f64> {
    let mut figures = measured.figures();
    figures.insert(1, measured.downtime_ms);
    // A migration that is shorter than a tick of the guest has no figure.
    figures.insert(6, measured.achieved.unwrap_or(1.0));
    figures
}

/// Adds the targets of direct mode, and of memory.
fn judge(findings: &mut Findings, ram: u64) {
    let (time, cpu, downtime) = ("total_ms", "cpu_seconds", "downtime_ms");
    let [none, tls, auto] = [["direct none", "QEMU none"], ["direct TLS", "QEMU TLS"], ["direct auto", "QEMU zstd"]];
    for (name, limit, cell, [ours, theirs], column) in [
        ("time: anonymous memory", 0.9, "unlimited, anonymous", none, time),
        ("CPU: anonymous memory", 1.0, "unlimited, anonymous", none, cpu),
        ("time: plain memfd", 0.6, "unlimited, memfd", none, time),
        ("time: huge pages", 1.0, "unlimited, huge pages", none, time),
        ("time: TLS", 0.5, "unlimited, anonymous", tls, time),
        ("CPU: TLS", 0.5, "unlimited, anonymous", tls, cpu),
        ("time: sparse", 0.1, "sparse", none, time),
        ("time: 1 Gbit/s, auto to QEMU's zstd", 1.0, "1 Gbit/s", auto, time),
        ("CPU: 1 Gbit/s, auto to QEMU's zstd", 0.85, "1 Gbit/s", auto, cpu),
        ("downtime: writing, anonymous memory", 0.3, "unlimited, anonymous, writing", none, downtime),
        ("downtime: writing, plain memfd", 0.3, "unlimited, memfd, writing", none, downtime),
        ("downtime: writing, huge pages", 0.3, "unlimited, huge pages, writing", none, downtime),
        ("downtime: writing, 1 Gbit/s", 1.0, "1 Gbit/s, writing", auto, downtime),
        ("downtime: at rest, anonymous memory", 1.0, "unlimited, anonymous", none, downtime),
        ("downtime: at rest, plain memfd", 1.0, "unlimited, memfd", none, downtime),
        ("downtime: at rest, huge pages", 1.0, "unlimited, huge pages", none, downtime),
        ("downtime: TLS", 1.0, "unlimited, anonymous", tls, downtime),
        ("downtime: sparse", 1.0, "sparse", none, downtime),
        ("downtime: 1 Gbit/s", 1.0, "1 Gbit/s", auto, downtime),
    ] {
        findings.at_most(name, limit, &format!("{cell}, {ours}"), &format!("{cell}, {theirs}"), column);
    }
    // Without the window, which may hold up to 256 MiB more.
    let limit = 64.0 + 8.0 * f64::from(CHANNELS) + ram as f64 / 1000.0 / 1048576.0;
    for (name, column) in [("sterna send", "send_memory_bytes"), ("sterna receive", "receive_memory_bytes")] {
        let most = findings.rows.iter().filter_map(|row| findings.spread(&row.name, column)).map(|spread| spread.max);
        let value = most.fold(None, |most: Option<f64>, bytes| Some(most.unwrap_or(0.0).max(bytes)));
        let value = value.filter(|&bytes| bytes > 0.0).map(|bytes| bytes / 1048576.0);
        findings.targets.push(Target {
            name: format!("memory of {name}, most of all runs, window not counted in the limit"),
            limit,
            value: value.map(|bytes| Spread { median: bytes, min: bytes, max: bytes }),
            unit: "MiB",
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_are_measured() {
        let mut findings = Findings::all_ones("qemu", COLUMNS, cells());
        judge(&mut findings, 1 << 30);
        assert!(findings.has_all_values(), "{:?}", findings.targets);
    }

    #[test]
    fn figures_are_in_the_order_of_the_columns() {
        let measured = Measured { downtime_ms: 5.0, achieved: Some(0.5), ..Measured::default() };
        let figures = figures(&measured);
        let at = |name: &str| COLUMNS.iter().position(|column| column.name == name).unwrap();
        assert_eq!((figures.len(), figures[at("downtime_ms")], figures[at("achieved")]), (COLUMNS.len(), 5.0, 0.5));
    }
}
