//! `sterna bench qemu`: the same guest moved by QEMU alone and through Sterna.
//!
//! Two parts: *unlimited*, from host to host over a virtual cable as fast as the machine, for each backing of the
//! destination's memory; and *1 Gbit/s*, the same cable behind a token bucket. Source and destination have CPUs of
//! their own, one each unless `--cpus` says more, whoever carries the guest; QEMU has the best of 1, 2 and 4 channels, found beforehand.

use std::cell::RefCell;
use std::path::Path;

use sterna::cancel::Cancel;
use sterna_lab::huge::HugeTmpfs;
use sterna_lab::net::Link;
use sterna_lab::{Backend, Fill, Guest, LinuxGuest, QemuOptions};

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Row, Spread, Target, interleaved};
use super::measured::Measured;
use super::migration::{Bench, Way};
use crate::hosts::{Hosts, HostsError};

const COLUMNS: &[Column] = &[
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 },
    Column { name: "downtime_ms", title: "downtime, ms", scale: 1.0, places: 0 },
    Column { name: "wire_bytes", title: "wire, MB", scale: 1e6, places: 0 },
    Column { name: "cpu_seconds", title: "CPU, s", scale: 1.0, places: 2 },
    Column { name: "source_cpu_seconds", title: "source", scale: 1.0, places: 2 },
    Column { name: "destination_cpu_seconds", title: "dest.", scale: 1.0, places: 2 },
    Column { name: "destination_faults", title: "faults, 1000", scale: 1e3, places: 1 },
    Column { name: "send_memory_bytes", title: "send, MiB", scale: 1048576.0, places: 0 },
    Column { name: "receive_memory_bytes", title: "receive, MiB", scale: 1048576.0, places: 0 },
];

/// RAM channels of Sterna: its default.
const CHANNELS: u16 = 2;
/// QEMU's multifd channels that are tried.
const QEMU_CHANNELS: [u8; 3] = [1, 2, 4];
/// The share of the pages of content `mixed` that are not zero, as `sterna-guest dump mixed` shows.
const NON_ZERO: f64 = 0.54;
const SLOW: u64 = 1_000_000_000;
/// The two parts: their names, and whether the cable is limited.
const PARTS: [(&str, bool); 2] = [("unlimited", false), ("1 Gbit/s", true)];

const NONE: &[&str] = &["--method", "none"];
const LZ4: &[&str] = &["--method", "lz4"];
const ZSTD: &[&str] = &["--method", "zstd", "--level", "1"];
/// No target stands on it: shows what a level less saves where the processor is the limit.
const ZSTD_FAST: &[&str] = &["--method", "zstd", "--level", "-1"];

/// A cell to be: its name, how, and what the destination's memory is.
struct Plan {
    name: String,
    way: Way,
    backend: Backend,
}

/// The names of all cells, those included that this machine may be unable to measure.
pub(crate) fn cells() -> Vec<String> {
    let named = |(speed, limited)| {
        plans(limited, Some(Path::new(""))).into_iter().map(move |plan| format!("{speed}, {}", plan.name))
    };
    PARTS.into_iter().flat_map(named).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, tell: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let (fast_fill, slow_fill) = if args.quick { (3 << 29, 448 << 20) } else { (7 << 29, 768 << 20) };
    let mut findings =
        Findings { name: "qemu", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: Vec::new() };
    findings.notes.push(format!(
        "QEMU {}; the guest holds {:.0} MiB (unlimited) and {:.0} MiB (1 Gbit/s) that are not zero, and somewhat less that \
         is (content `mixed`), and is idle; each side has {} CPU of its own; downtime limit 300 ms; Sterna with {CHANNELS} channels, not \
         encrypted.",
        args.qemu,
        non_zero(fast_fill),
        non_zero(slow_fill),
        args.cpus
    ));
    findings.notes.push(
        "Total: from QEMU's first migration event (Sterna: from opening its channels, if that is earlier) to the guest \
         running at the destination. CPU and faults: QEMU's and Sterna's together. Memory: anonymous pages at their peak."
            .into(),
    );
    findings.notes.push(
        "4 KiB page faults are several times dearer on a virtual machine like this one than on bare metal, which favours \
         whoever avoids them: Sterna on a plain memfd."
            .into(),
    );

    let huge = HugeTmpfs::mount(ram_for(fast_fill) + (64 << 20));
    let huge = huge.map_err(|error| findings.notes.push(format!("No cells on huge pages: {error}."))).ok();
    let huge_pages = huge.as_ref().map(HugeTmpfs::path);
    for (speed, limited) in PARTS {
        let fill = if limited { slow_fill } else { fast_fill };
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
        if !plans(limited, huge_pages).iter().any(|plan| args.wants(&format!("{speed}, {}", plan.name))) {
            continue;
        }
        tell(&format!(
            "{speed}: booting a guest that fills {} MiB, {:.0} of them not zero",
            fill >> 20,
            non_zero(fill)
        ));
        let guest = LinuxGuest { fill: Fill::Mixed, memory: Some(fill), verify_rate: 0, ..LinuxGuest::default() };
        let mut options = QemuOptions::new(args.qemu, Guest::Linux(guest));
        options.memory = ram_for(fill);
        let bench = RefCell::new(Bench::start(hosts, options, cancel)?);
        findings.rows.extend(part(args, speed, limited, huge_pages, &bench, cancel, tell)?);
    }
    judge(&mut findings, ram_for(fast_fill));
    Ok(findings)
}

/// The RAM of a guest that fills `bytes`: its kernel needs room too, and describes each page of RAM.
const fn ram_for(bytes: u64) -> u64 {
    bytes + bytes / 16 + (256 << 20)
}

/// MiB that are not zero, of a guest that fills `bytes`.
fn non_zero(bytes: u64) -> f64 {
    bytes as f64 * NON_ZERO / 1048576.0
}

/// One part: the best number of channels for QEMU, then all cells in turn.
fn part(
    args: &BenchArgs,
    speed: &str,
    limited: bool,
    huge: Option<&Path>,
    bench: &RefCell<Bench>,
    cancel: &Cancel,
    tell: &dyn Fn(&str),
) -> Result<Vec<Row>, HostsError> {
    let wanted = |plan: &Plan| args.wants(&format!("{speed}, {}", plan.name));
    let mut plans = plans(limited, huge);
    plans.retain(wanted);
    for plan in &mut plans {
        let Way::Qemu { compression, .. } = plan.way else { continue };
        let mut best = (f64::INFINITY, 1);
        for channels in QEMU_CHANNELS {
            let way = Way::Qemu { channels, compression };
            let measured = bench.borrow_mut().migrate(&way, &plan.backend, false, cancel)?;
            tell(&format!("{speed}, {}: {channels} channels: {:.0} ms", plan.name, measured.total_ms));
            if measured.total_ms < best.0 {
                best = (measured.total_ms, channels);
            }
        }
        plan.way = Way::Qemu { channels: best.1, compression };
    }
    let mut cells: Vec<Cell<'_>> = plans
        .iter()
        .map(|plan| {
            let mut first = true;
            Cell {
                name: format!("{speed}, {}", plan.name),
                run: Box::new(move || {
                    // That the guest comes through whole is looked at once for each way.
                    let verify = std::mem::take(&mut first);
                    bench
                        .borrow_mut()
                        .migrate(&plan.way, &plan.backend, verify, cancel)
                        .map(|measured| figures(&measured))
                }),
            }
        })
        .collect();
    let mut rows = interleaved(&mut cells, args.rounds(), cancel, tell)?;
    for (row, plan) in rows.iter_mut().zip(&plans) {
        let channels = match plan.way {
            Way::Qemu { channels, .. } => channels.into(),
            Way::Sterna { channels, .. } => channels,
        };
        row.detail = format!("{channels} channels");
    }
    Ok(rows)
}

/// The cells of a part; QEMU's channels are still to be chosen.
fn plans(limited: bool, huge: Option<&Path>) -> Vec<Plan> {
    let qemu = |compression: &'static str, place: &str, backend: &Backend| Plan {
        name: format!("QEMU {compression}{place}"),
        // Until the best number is known.
        way: Way::Qemu { channels: QEMU_CHANNELS[0], compression },
        backend: backend.clone(),
    };
    let sterna = |name: &str, method, in_stream, place: &str, backend: &Backend| Plan {
        name: format!("Sterna {name}{place}"),
        way: Way::Sterna { method, channels: CHANNELS, in_stream },
        backend: backend.clone(),
    };
    let anonymous = &Backend::Anonymous;
    if limited {
        return vec![
            qemu("none", "", anonymous),
            qemu("zstd", "", anonymous),
            sterna("none", NONE, false, "", anonymous),
            sterna("lz4", LZ4, false, "", anonymous),
            sterna("zstd", ZSTD, false, "", anonymous),
        ];
    }
    let mut plans = vec![
        qemu("none", ", anonymous", anonymous),
        sterna("none", NONE, false, ", anonymous", anonymous),
        sterna("none", NONE, true, ", in-stream", anonymous),
        qemu("zstd", ", anonymous", anonymous),
        sterna("lz4", LZ4, false, ", anonymous", anonymous),
        sterna("zstd", ZSTD, false, ", anonymous", anonymous),
        sterna("zstd -1", ZSTD_FAST, false, ", anonymous", anonymous),
        qemu("none", ", memfd", &Backend::Memfd),
        sterna("none", NONE, false, ", memfd", &Backend::Memfd),
    ];
    if let Some(huge) = huge {
        let backend = Backend::File { path: huge.to_owned() };
        plans.push(qemu("none", ", huge pages", &backend));
        plans.push(sterna("none", NONE, false, ", huge pages", &backend));
    }
    plans
}

/// In the order of [`COLUMNS`].
fn figures(measured: &Measured) -> Vec<f64> {
    let mut figures = measured.figures();
    figures.insert(1, measured.downtime_ms);
    figures
}

/// The targets of the first issue about QEMU.
fn judge(findings: &mut Findings, ram: u64) {
    let fast = |name: &str| format!("unlimited, {name}");
    let slow = |name: &str| format!("1 Gbit/s, {name}");
    for (name, limit, ours, theirs) in [
        ("uncompressed, in-stream", 1.6, "Sterna none, in-stream", "QEMU none, anonymous"),
        ("uncompressed, plain memfd", 0.6, "Sterna none, memfd", "QEMU none, memfd"),
        ("uncompressed, anonymous memory", 1.25, "Sterna none, anonymous", "QEMU none, anonymous"),
        ("uncompressed, huge pages", 1.25, "Sterna none, huge pages", "QEMU none, huge pages"),
        ("zstd 1 to QEMU's zstd", 0.7, "Sterna zstd, anonymous", "QEMU zstd, anonymous"),
        ("lz4 to QEMU's zstd", 0.45, "Sterna lz4, anonymous", "QEMU zstd, anonymous"),
    ] {
        findings.at_most(&format!("unlimited, time: {name}"), limit, &fast(ours), &fast(theirs), "total_ms");
    }
    for (name, limit, theirs, column) in [
        ("time: zstd 1 to QEMU's zstd", 1.05, "QEMU zstd", "total_ms"),
        ("CPU: zstd 1 to QEMU's zstd", 0.8, "QEMU zstd", "cpu_seconds"),
        ("time: zstd 1 to QEMU uncompressed", 0.5, "QEMU none", "total_ms"),
    ] {
        findings.at_most(&format!("1 Gbit/s, {name}"), limit, &slow("Sterna zstd"), &slow(theirs), column);
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
