//! `sterna-bench ram`: the library moves the memory of an idle guest from process to process, beside a plain mover and beside
//! QEMU's multifd.
//!
//! Each cell moves the memory of a source that was filled once to a destination that is new each time; both are processes of
//! their own ([`side`]), so that CPU time and page faults are theirs alone.

pub(crate) mod clock;
pub(crate) mod delta_side;
pub(crate) mod guest;
pub(crate) mod pair;
pub(crate) mod pin;
pub(crate) mod pipeline;
pub(crate) mod plain;
pub(crate) mod qemu;
mod received;
pub(crate) mod side;
mod warm;
pub(crate) mod writer;

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use sterna_engine::cancel::Cancel;
use sterna_qemu_lab::net::Network;
use tempfile::TempDir;

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Row, Spread, Target, interleaved};
use super::measured::Measured;
use crate::hosts::{Hosts, HostsError, Side, doing};
use guest::{Content, Memory};
use pair::{Rig, Shape, SideProcess, took};
use side::{CLIENT, Mover, Order};

/// The columns of the benchmarks with two processes: [`Measured::figures`].
pub(crate) const COLUMNS: &[Column] = &[
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 1 },
    Column { name: "wire_bytes", title: "wire, MB", scale: 1e6, places: 1 },
    Column { name: "cpu_seconds", title: "CPU, s", scale: 1.0, places: 2 },
    Column { name: "source_cpu_seconds", title: "source", scale: 1.0, places: 2 },
    Column { name: "destination_cpu_seconds", title: "dest.", scale: 1.0, places: 2 },
    Column { name: "destination_faults", title: "faults, 1000", scale: 1e3, places: 1 },
    Column { name: "source_memory_bytes", title: "source, MiB", scale: 1048576.0, places: 0 },
    Column { name: "destination_memory_bytes", title: "dest., MiB", scale: 1048576.0, places: 0 },
];

/// Channels of the library, its default, and of the plain mover.
pub(crate) const CHANNELS: u16 = 2;
/// The numbers of multifd channels that are tried for QEMU.
const QEMU_CHANNELS: [u8; 3] = [1, 2, 4];
const GIB: u64 = 1 << 30;
/// Memory of a QEMU beside guest RAM, in bytes.
const BESIDE_RAM: u64 = 128 << 20;

/// One configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Library { checksums: bool, encrypted: bool },
    Plain,
    Qemu { encrypted: bool },
    ReadByTwo,
}

/// The library without and with checksums, plain and encrypted.
const LIBRARY: [Way; 4] = [
    Way::Library { checksums: false, encrypted: false },
    Way::Library { checksums: true, encrypted: false },
    Way::Library { checksums: true, encrypted: true },
    Way::Library { checksums: false, encrypted: true },
];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Library { checksums: true, encrypted: false } => "Sterna",
            Self::Library { checksums: false, encrypted: false } => "no checksums, Sterna",
            Self::Library { checksums: true, encrypted: true } => "TLS, Sterna",
            // TLS authenticates the bytes, so no further checksum against network faults is needed.
            Self::Library { checksums: false, encrypted: true } => "TLS, no checksums, Sterna",
            Self::Plain => "plain mover",
            Self::Qemu { encrypted: false } => "QEMU",
            Self::Qemu { encrypted: true } => "TLS, QEMU",
            Self::ReadByTwo => "read by two threads",
        }
    }
}

/// Cells with one source memory.
struct Part {
    name: &'static str,
    shape: Shape,
    ways: Vec<Way>,
}

impl Part {
    fn cell(&self, way: Way) -> String {
        format!("{}, {}", self.name, way.name())
    }

    /// Returns the bytes that the destination will need.
    fn expected(&self) -> u64 {
        let Shape { bytes, content, .. } = self.shape;
        content.filled(bytes).iter().map(|part| part.end - part.start).sum::<u64>() + BESIDE_RAM
    }
}

const HALF_ANONYMOUS: &str = "half filled, anonymous";
const HALF_MEMFD: &str = "half filled, memfd";
const ZERO: &str = "touched and zero";
const UNTOUCHED: &str = "never touched";
const SPARSE: &str = "64 GiB sparse";

fn parts() -> Vec<Part> {
    use Way::{Plain, Qemu, ReadByTwo};
    let shape = |memory, gib: u64, content| Shape { memory, bytes: gib * GIB, content };
    let [unchecked, library, secret, secret_unchecked] = LIBRARY;
    let [plain_qemu, secret_qemu] = [false, true].map(|encrypted| Qemu { encrypted });
    vec![
        Part {
            name: HALF_ANONYMOUS,
            shape: shape(Memory::Anonymous, 4, Content::HalfFilled),
            ways: vec![Plain, unchecked, library, plain_qemu, secret, secret_unchecked, secret_qemu],
        },
        Part {
            name: HALF_MEMFD,
            shape: shape(Memory::Memfd, 4, Content::HalfFilled),
            ways: vec![Plain, unchecked, library, plain_qemu],
        },
        Part { name: ZERO, shape: shape(Memory::Anonymous, 4, Content::TouchedZero), ways: vec![ReadByTwo, library] },
        Part {
            name: UNTOUCHED,
            shape: shape(Memory::Anonymous, 16, Content::Untouched),
            ways: vec![library, plain_qemu],
        },
        Part { name: SPARSE, shape: shape(Memory::Anonymous, 64, Content::Sparse), ways: vec![library] },
    ]
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    parts().iter().flat_map(|part| part.ways.iter().map(|way| part.cell(*way))).collect()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let rig = Rig { hosts: Hosts::loopback(), cpus: args.cpus, cancel };
    let certificates = certificates()?;
    let mut findings =
        Findings { name: "ram", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: notes(args, &rig) };
    for mut part in parts() {
        let name = part.name;
        part.ways.retain(|way| args.wants(&format!("{name}, {}", way.name())));
        if !part.ways.is_empty() {
            findings.rows.extend(measure_part(args, &part, &rig, certificates.path(), progress)?);
        }
    }
    judge(&mut findings);
    Ok(findings)
}

/// Makes certificates for both sides.
pub(crate) fn certificates() -> Result<TempDir, HostsError> {
    let dir = tempfile::Builder::new().prefix("sterna-bench-").tempdir();
    let dir = dir.map_err(doing("making a directory for certificates"))?;
    let mut command = Hosts::loopback().sterna(Side::A)?;
    let names = format!("localhost,127.0.0.1,{}", Network::ADDRESS_B);
    command.args(["cert", "--host", &names, "--client", CLIENT, "--dir"]).arg(dir.path());
    let output = command.output().map_err(doing("making certificates"))?;
    if output.status.success() {
        Ok(dir)
    } else {
        Err(HostsError(format!("making certificates: {}", String::from_utf8_lossy(&output.stderr).trim())))
    }
}

/// Starts the sources of a part and runs its cells in turn.
fn measure_part(
    args: &BenchArgs,
    part: &Part,
    rig: &Rig<'_>,
    certificates: &Path,
    progress: &dyn Fn(&str),
) -> Result<Vec<Row>, HostsError> {
    progress(&format!("{}: filling memory", part.name));
    let own = part.ways.iter().any(|way| !matches!(way, Way::Qemu { .. }));
    let source = own.then(|| rig.side(Side::A, part.shape)).transpose()?.map(RefCell::new);
    let with_qemu = part.ways.iter().any(|way| matches!(way, Way::Qemu { .. }));
    let start = || qemu::Source::start(rig, args.qemu, part.shape, Some(certificates.to_owned()));
    // Without a QEMU its cells are void, and the others continue.
    let qemu = with_qemu.then(start);
    let mut channels = Vec::new();
    for way in &part.ways {
        let best = match (way, &qemu) {
            (Way::Qemu { encrypted }, Some(Ok(qemu))) => best_channels(part, qemu, *encrypted, progress)?,
            _ => CHANNELS as u8,
        };
        channels.push(best);
    }
    let mut cells: Vec<Cell<'_>> = part
        .ways
        .iter()
        .zip(&channels)
        .map(|(way, channels)| {
            let (source, qemu) = (&source, &qemu);
            let mut first = true;
            let run = move || {
                // The arrived memory is verified once for each kind of migration.
                let verify = std::mem::take(&mut first);
                let measured = match (way, source, qemu) {
                    (Way::Qemu { encrypted }, _, Some(Ok(qemu))) => {
                        qemu.migrate(multifd(*channels, *encrypted), part.expected(), verify)
                    }
                    (Way::Qemu { .. }, _, Some(Err(error))) => Err(HostsError(error.to_string())),
                    (Way::ReadByTwo, Some(source), _) => read_by_two(&mut source.borrow_mut()),
                    (way, Some(source), _) => {
                        let by = mover(way, certificates);
                        rig.migrate(source, part.shape, part.expected(), &by, CHANNELS, verify)
                    }
                    _ => Err(HostsError("its source was not started".into())),
                };
                measured.map(|measured| measured.figures())
            };
            Cell { name: part.cell(*way), run: Box::new(run) }
        })
        .collect();
    let mut rows = interleaved(&mut cells, args.rounds(), rig.cancel, progress)?;
    for ((row, way), channels) in rows.iter_mut().zip(&part.ways).zip(&channels) {
        if *way != Way::ReadByTwo {
            row.detail = format!("{channels} channels");
        }
    }
    Ok(rows)
}

fn mover(way: &Way, certificates: &Path) -> Mover {
    let encrypted = |yes: bool| -> Option<PathBuf> { yes.then(|| certificates.to_owned()) };
    match way {
        Way::Library { checksums, encrypted: yes } => Mover::Sterna { checksums: *checksums, tls: encrypted(*yes) },
        Way::Plain | Way::Qemu { .. } | Way::ReadByTwo => Mover::Plain,
    }
}

fn multifd(channels: u8, encrypted: bool) -> qemu::Multifd {
    qemu::Multifd { channels, compression: "none", encrypted }
}

/// Returns the number of channels with which QEMU is fastest.
fn best_channels(
    part: &Part,
    qemu: &qemu::Source<'_>,
    encrypted: bool,
    progress: &dyn Fn(&str),
) -> Result<u8, HostsError> {
    let mut best = (f64::INFINITY, QEMU_CHANNELS[0]);
    for channels in QEMU_CHANNELS {
        let measured = qemu.migrate(multifd(channels, encrypted), part.expected(), false)?;
        progress(&format!("{}: {channels} channels: {:.0} ms", part.cell(Way::Qemu { encrypted }), measured.total_ms));
        if measured.total_ms < best.0 {
            best = (measured.total_ms, channels);
        }
    }
    Ok(best.1)
}

fn read_by_two(source: &mut SideProcess<'_>) -> Result<Measured, HostsError> {
    let read = took(source.request(&Order::ReadByTwo)?)?;
    Ok(Measured {
        total_ms: (read.ended_ns - read.begun_ns) as f64 / 1e6,
        source_cpu: read.cpu_seconds,
        ..Measured::default()
    })
}

fn notes(args: &BenchArgs, rig: &Rig<'_>) -> Vec<String> {
    vec![
        format!(
            "An idle guest of 4 GiB (half filled: 2 GiB that are not zero, the rest never touched), 16 GiB (never touched) \
             and 64 GiB (sparse: 2 MiB of each GiB); the source on CPUs {:?}, the destination on {:?}; TCP over the loopback \
             interface; QEMU {} with the best of {QEMU_CHANNELS:?} channels and the same content and memory.",
            rig.cpus(Side::A),
            rig.cpus(Side::B),
            args.qemu
        ),
        "Sterna checks every page by its own checksum, except in cells named \"no checksums\".".into(),
        "Plain mover: the same search for populated memory, sockets and placement, and nothing else. It copies nothing \
         and checks nothing, so it could not move a guest that runs."
            .into(),
        "Total: from connecting to the guest running at the destination (plain mover: to everything at its place; QEMU: \
         from its first migration event). Memory: the most that was resident, without guest RAM, in the process's life."
            .into(),
    ]
}

fn judge(findings: &mut Findings) {
    let cell = |part: &str, way: Way| format!("{part}, {}", way.name());
    let [unchecked, library, secret, _] = LIBRARY;
    let [qemu, secret_qemu] = [false, true].map(|encrypted| Way::Qemu { encrypted });
    for part in [HALF_ANONYMOUS, HALF_MEMFD] {
        let (own, theirs) = (cell(part, library), cell(part, qemu));
        for (what, percent, way) in [("without", 90.0_f64, unchecked), ("with", 75.0, library)] {
            // p % of the throughput are 100 / p of the time.
            let name = format!("{part}, time {what} checksums to the plain mover's ({percent} % of its throughput)");
            let limit = (1e4 / percent).round() / 100.0;
            findings.at_most(&name, limit, &cell(part, way), &cell(part, Way::Plain), "total_ms");
        }
        for (what, limit, column) in [
            ("time", 0.9, "total_ms"),
            ("source CPU", 0.85, "source_cpu_seconds"),
            ("CPU of both sides", 0.95, "cpu_seconds"),
        ] {
            findings.at_most(&format!("{part}, {what} to QEMU's"), limit, &own, &theirs, column);
        }
    }
    let secret = cell(HALF_ANONYMOUS, secret);
    for (what, limit, theirs) in [("QEMU's without", 1.45, qemu), ("QEMU's with TLS", 0.9, secret_qemu)] {
        let name = format!("{HALF_ANONYMOUS}, time with TLS to {what}");
        findings.at_most(&name, limit, &secret, &cell(HALF_ANONYMOUS, theirs), "total_ms");
    }
    let (own, read) = (cell(ZERO, library), cell(ZERO, Way::ReadByTwo));
    findings.at_most(&format!("{ZERO}, time to reading it"), 1.25, &own, &read, "total_ms");
    let own = cell(UNTOUCHED, library);
    findings.at_most(&format!("{UNTOUCHED}, time to QEMU's"), 0.05, &own, &cell(UNTOUCHED, qemu), "total_ms");
    let value = findings.spread(&own, "total_ms");
    let name = format!("{UNTOUCHED}, time: 25 ms and 1 ms for each GiB");
    findings.targets.push(Target { name, limit: 25.0 + 16.0, value, unit: "ms" });
    let own = cell(SPARSE, library);
    for (side, column) in [("source", "source_memory_bytes"), ("destination", "destination_memory_bytes")] {
        let mib = |bytes: f64| bytes / 1048576.0;
        let value = findings.spread(&own, column);
        let value =
            value.map(|Spread { median, min, max }| Spread { median: mib(median), min: mib(min), max: mib(max) });
        findings.targets.push(Target {
            name: format!("{SPARSE}, memory of the {side} beside guest RAM, window not counted in the limit"),
            limit: 64.0 + mib(64.0 * GIB as f64) / 1000.0,
            value,
            unit: "MiB",
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_there_are() {
        let mut findings = Findings::all_ones("ram", COLUMNS, cells());
        judge(&mut findings);
        assert!(findings.has_all_values(), "{:?}", findings.targets);
        assert_eq!(findings.targets.len(), 17);
    }

    #[test]
    fn a_part_with_a_qemu_has_content_that_leaves_its_firmware_alone() {
        for part in parts() {
            let qemu = part.ways.iter().any(|way| matches!(way, Way::Qemu { .. }));
            let filled = part.shape.content.filled(part.shape.bytes);
            // The firmware's tables lie below 2 GiB in a machine of this size.
            assert!(!qemu || filled.iter().all(|part| part.start >= 2 * GIB), "{}", part.name);
        }
    }
}
