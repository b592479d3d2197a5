//! `sterna-bench device-faults`: page faults and IOMMU flushes of a device that writes a migration's pages into
//! untouched memory.
//!
//! A device with shared virtual memory walks the process's page tables. For a missing page a device issues a page
//! request or ends the descriptor early, and both cost more than a page fault of the CPU; a translation that changes is
//! flushed from the IOMMU and from every device. Reading an untouched page leads to both: it maps the kernel's zero
//! page, which the next write replaces. This benchmark receives what a migration sends ([`arrivals`]), by the product's
//! own offload code on the model of a device, which uses this process's real page tables.

mod arrivals;
mod blocking;
mod receiver;

use sterna_engine::cancel::Cancel;
use sterna_memory::PAGE_SIZE;

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Target, interleaved};
use crate::hosts::HostsError;
use arrivals::Arrivals;
use receiver::{Contents, Counts, Setting, Way};

const GIB: f64 = (1u64 << 30) as f64;

const COLUMNS: &[Column] = &[
    Column { name: "device_faults_per_gib", title: "device faults / GiB", scale: 1.0, places: 0 },
    Column { name: "flushes_per_gib", title: "flushes / GiB", scale: 1.0, places: 0 },
    Column { name: "met_flushes_per_gib", title: "met by the device / GiB", scale: 1.0, places: 0 },
    Column { name: "page_requests_per_gib", title: "page requests / GiB", scale: 1.0, places: 0 },
    Column { name: "request_seconds_per_gib", title: "device time waiting, ms / GiB", scale: 1e-3, places: 1 },
    Column { name: "longest_request_seconds", title: "longest, device time, µs", scale: 1e-6, places: 0 },
    Column { name: "cpu_faults_per_gib", title: "CPU faults / GiB", scale: 1.0, places: 0 },
    Column { name: "ns_per_page", title: "measured CPU of the placing thread, ns per page", scale: 1.0, places: 0 },
    Column { name: "cpu_finished_per_gib", title: "pages finished by the CPU / GiB", scale: 1.0, places: 0 },
    Column { name: "device_faults_per_normal", title: "device faults / page to be written", scale: 1.0, places: 3 },
];

/// A part; published figures are for 64 GiB: without the bitmap and with it.
struct Part {
    name: &'static str,
    normal_of_64: u64,
    flushes: [f64; 2],
    faults: [f64; 2],
}

const PARTS: [Part; 2] = [
    Part { name: "idle", normal_of_64: 2, flushes: [80_756.0, 410.0], faults: [38_655.0, 27_429.0] },
    Part { name: "full", normal_of_64: 56, flushes: [1_647_701.0, 890.0], faults: [981_899.0, 937_105.0] },
];

/// The largest permitted part of the device's writes that fault where all pages were populated just before.
const ABOUT_NONE: f64 = 0.001;

fn settings() -> Vec<Setting> {
    let mut all = Vec::new();
    for way in [Way::Place, Way::Inflate] {
        for block in [true, false] {
            for populate in [false, true] {
                all.extend([false, true].map(|bitmap| Setting { way, bitmap, populate, block, huge: false }));
            }
        }
    }
    // The set-up of the published run.
    for populate in [false, true] {
        let block = true;
        all.extend([false, true].map(|bitmap| Setting { way: Way::Inflate, bitmap, populate, block, huge: true }));
    }
    all
}

fn name(part: &Part, setting: Setting) -> String {
    let way = match setting.way {
        Way::Place => "DSA moves",
        Way::Inflate => "IAA inflates",
    };
    let bitmap = if setting.bitmap { "bitmap" } else { "no bitmap" };
    let populate = if setting.populate { "populated ahead" } else { "fresh" };
    let block = if setting.block { "page requests" } else { "CPU finishes" };
    let huge = if setting.huge { "huge pages, " } else { "" };
    format!("{}, {way}, {huge}{block}, {populate}, {bitmap}", part.name)
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    PARTS.iter().flat_map(|part| settings().into_iter().map(|setting| name(part, setting))).collect()
}

fn bytes(quick: bool) -> u64 {
    if quick { 128 << 20 } else { 512 << 20 }
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let contents = &Contents::new(arrivals::contents())?;
    let mut findings =
        Findings { name: "device-faults", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: notes(args) };
    for part in PARTS {
        let arrivals = Arrivals { pages: bytes(args.quick) / PAGE_SIZE as u64, normal_of_64: part.normal_of_64 };
        let wanted = settings().into_iter().filter(|setting| args.wants(&name(&part, *setting)));
        let mut cells: Vec<Cell<'_>> = wanted
            .map(|setting| Cell {
                name: name(&part, setting),
                run: Box::new(move || Ok(figures(&receiver::receive(setting, arrivals, contents)?, arrivals))),
            })
            .collect();
        findings.rows.extend(interleaved(&mut cells, args.rounds(), cancel, progress)?);
    }
    judge(&mut findings);
    Ok(findings)
}

fn figures(counts: &Counts, arrivals: Arrivals) -> Vec<f64> {
    let per_gib = |count: u64| count as f64 * GIB / (arrivals.pages * PAGE_SIZE as u64) as f64;
    vec![
        per_gib(counts.device_faults),
        per_gib(counts.flushes),
        per_gib(counts.used_flushes),
        per_gib(counts.page_requests),
        per_gib(counts.page_request_ns) / 1e9,
        counts.longest_request_ns as f64 / 1e9,
        per_gib(counts.cpu_faults),
        counts.cpu_ns / counts.arrived as f64,
        per_gib(counts.cpu_finished),
        counts.device_faults as f64 / counts.normal as f64,
    ]
}

/// Adds the targets: flushes and faults are reduced at least as much as in the published table.
fn judge(findings: &mut Findings) {
    for part in &PARTS {
        for (kind, way, huge) in
            [("DSA", Way::Place, false), ("IAA", Way::Inflate, false), ("IAA, huge pages", Way::Inflate, true)]
        {
            let setting = |populate, bitmap| Setting { way, bitmap, populate, block: true, huge };
            let without = name(part, setting(false, false));
            let ratio = |of: [f64; 2]| of[1] / of[0];
            for (what, populate) in [("bitmap alone", false), ("bitmap and populated ahead", true)] {
                let with = name(part, setting(populate, true));
                let title = format!("{}, {kind}, {what}: flushes to those without", part.name);
                findings.at_most(&title, rounded(ratio(part.flushes)), &with, &without, "flushes_per_gib");
                let title = format!("{}, {kind}, {what}: device faults to those without", part.name);
                findings.at_most(&title, rounded(ratio(part.faults)), &with, &without, "device_faults_per_gib");
            }
            for block in [true, false].into_iter().filter(|block| *block || !huge) {
                let row = name(part, Setting { block, ..setting(true, true) });
                let value = findings.spread(&row, "device_faults_per_normal");
                findings.targets.push(Target {
                    name: format!("{row}: device faults"),
                    limit: ABOUT_NONE,
                    value,
                    unit: "of a page to be written",
                });
            }
        }
    }
}

/// Rounds to the table's precision, downwards, so that no target is easier than it reads.
fn rounded(ratio: f64) -> f64 {
    (ratio * 1e4).floor() / 1e4
}

fn notes(args: &BenchArgs) -> Vec<String> {
    let per_gib = |of: [f64; 2]| format!("{:.0} -> {:.0}", of[0] / 64.0, of[1] / 64.0);
    let published = PARTS
        .map(|part| format!("{} {} flushes and {} faults", part.name, per_gib(part.flushes), per_gib(part.faults)));
    vec![
        format!(
            "{} MiB of fresh private memory, of 4 KiB pages unless huge pages are named; idle: 2 of 64 pages are not zero, full: 56 \
             of 64; then three rounds of a working set of one page in 64, a quarter of it zero each time. Packets of 128 pages. \
             Written by the product's offload on the software model of a device, over this process's real page tables: nothing \
             here was run on hardware. At the end of each run all of the memory was compared with what was sent.",
            bytes(args.quick) >> 20
        ),
        "No bitmap: each zero page is read, and cleared if it is not zero. Bitmap: the library's. Populated ahead: \
         by one system call for each run of pages, just before they are handed to the device, as the library's destination \
         does. Page requests: descriptors block on fault; the product never asks for that, the benchmark sets the bit on the \
         way to the device. CPU finishes: what offload does where a device met a fault. No destination of this version has \
         a device write guest RAM; one that had would be the cell \"CPU finishes, populated ahead, bitmap\"."
            .into(),
        "Counted: device faults are pages that the model found missing or not writable. Flushes are pages that were mapped and \
         came to be mapped otherwise, a huge page once: for each the kernel invalidates the IOMMU; met by the device are \
         4 KiB pages that it had translated and came by again. CPU faults are minor faults of the thread that places, \
         populating included, which takes them without a trap for each; the model's threads are the device."
            .into(),
        "Device time, not measured: the model draws the time of each page request from the published distribution (mean 9 µs, \
         at most 556 µs). So \"longest\" shows nothing about a bitmap: the cause of a fault of 18 ms, contention in the kernel, is \
         not in the model. CPU time of the placing thread is measured: copying into the batch, zero pages, populating, \
         finishing what the device left."
            .into(),
        format!(
            "Published (QEMU patch, 64 GB guest, QPL on IAA), per GiB of guest, without the bitmap -> with: {}; longest IO fault \
             18349 -> 447 and 21018 -> 9581 µs. The faults of the idle guest are as few as with huge pages here. In 4 KiB \
             pages the first write to a page is a fault with a bitmap or without. In huge pages there is one for each, or \
             several, where several engines come to it at once. A kernel that splits a huge zero page when it is written \
             to has more of them without the bitmap; this one replaces it whole. Only populating spares them.",
            published.join("; ")
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_there_are() {
        let mut findings = Findings::all_ones("device-faults", COLUMNS, cells());
        assert_eq!(findings.rows.len(), 40);
        judge(&mut findings);
        assert_eq!(findings.targets.len(), 34);
        assert!(findings.has_all_values());
        assert!(findings.targets.iter().all(|target| target.limit > 0.0 && target.limit < 1.0));
    }

    #[test]
    fn figures_are_one_for_each_column() {
        let arrivals = Arrivals { pages: 1 << 18, normal_of_64: 2 };
        let counts = Counts { device_faults: 7, arrived: 1, normal: 14, ..Counts::default() };
        let figures = figures(&counts, arrivals);
        assert_eq!(figures.len(), COLUMNS.len());
        assert_eq!((figures[0], figures[9]), (7.0, 0.5), "1 GiB");
    }
}
