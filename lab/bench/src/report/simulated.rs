//! `docs/benchmarks-simulated.md`: results of the simulator, not of hardware.

use std::fmt::Write as _;

use sterna_simulator::zero_page::PUBLISHED;

use super::page::{GENERATED, shown};
use super::results::Set;
use crate::harness::Spread;
use crate::zero_page::{published_figure, published_name};

const INTRODUCTION: &str = "\
**Nothing on this page ran on an accelerator.** The machines on which Sterna was made have none. Migrations, cores, memory, network and
devices are simulated event by event in virtual time (`lab/simulator`). The product's own code, linked and not imitated, decides about
admission to a device; the devices are the software model's own state machine (`sterna-idxd-model`), with the timing of published figures.
Simulated figures have no targets. They have an error, which is given beside them.

Three accounts are kept apart: **measured CPU**, by figures that were measured here or in a published run; **charged CPU**, for what was not
measured here (`ENQCMD`, lines that a device wrote, blocking and waking, system calls), at published prices; **device time**. A simulation
is deterministic, so each cell is run once.

";

/// The figures of published runs to which the simulator is not fitted.
const HELD_OUT: [(&str, &str, f64); 4] = [
    ("total_ms", "time, ms", 1.0),
    ("main_ns_per_page", "CPU of the main thread, ns/page", 1.0),
    ("senders_ns_per_page", "CPU of the senders, ns/page", 1.0),
    ("polling_ns_per_page", "CPU of polling, ns/page", 1.0),
];

/// A table of cells.
struct Table {
    title: &'static str,
    benchmark: &'static str,
    text: &'static str,
    /// Column of the JSON, title, divisor, decimal places.
    columns: &'static [(&'static str, &'static str, f64, usize)],
    cells: &'static [&'static str],
    /// Sentences about the cells.
    findings: &'static [&'static str],
}

const TABLES: &[Table] = &[
    Table {
        title: "Zero pages of one large VM, in Sterna's structure",
        benchmark: "zero-page",
        text: "The same work as above: 100 GB, 8 channels, batches of 128 pages. Read each figure with the errors above.",
        columns: &[
            ("total_ms", "time, ms", 1.0, 0),
            ("measured_ns_per_page", "measured CPU, ns/page", 1.0, 0),
            ("charged_ns_per_page", "charged CPU, ns/page", 1.0, 0),
            ("device_ns_per_page", "device time, ns/page", 1.0, 0),
        ],
        cells: &[
            "half normal, Sterna, CPU",
            "half normal, Sterna, 1 device",
            "all zero, Sterna, CPU",
            "all zero, Sterna, 1 device",
            "all zero, Sterna, 4 devices",
        ],
        findings: &[
            "Where half of the pages are sent, sending takes most of the time, and a device shortens the total by a few per cent: less than \
             the error above.",
            "Where all pages are zero, the search is all the work, and the CPU and the devices share it.",
        ],
    },
    Table {
        title: "A hundred VMs at once",
        benchmark: "many-vms",
        text: "Each VM has 1 GiB and one sender; every second page is zero; migrations have four cores of the host. There are no published \
               figures of many VMs on shared devices to compare with. The error above is the only known one.",
        columns: &[
            ("total_ms", "time, ms", 1.0, 0),
            ("measured_cpu_s", "measured CPU, s", 1.0, 1),
            ("charged_cpu_s", "charged CPU, s", 1.0, 1),
            ("device_s", "device time, s", 1.0, 1),
            ("longest_wait_ms", "longest wait, ms", 1.0, 2),
        ],
        cells: &[
            "100 VMs, half zero, 4 cores, CPU only",
            "100 VMs, half zero, 4 cores, 1 device, ledger",
            "100 VMs, half zero, 4 cores, 4 devices, ledger",
            "100 VMs, half zero, 4 cores, 4 devices, FIFO",
            "100 VMs, half zero, 4 cores, 8 devices, ledger",
        ],
        findings: &[
            "Devices free CPU time; with few cores that is also time.",
            "A queue without shares (FIFO) gives most to the VM that submits most; batches that find the queue full go to the CPU.",
        ],
    },
    Table {
        title: "`auto`, in virtual time",
        benchmark: "selection",
        text: "The costs of each method on real content are measured, and the product's own selection then drives a migration over \
               networks, CPUs and accelerators that the machine does not have. *Best fixed* is the fastest single method of the same cell. IAA and QAT are \
               modelled; no published run has these cells, so their error is unknown.",
        columns: &[
            ("auto_ms", "auto, ms", 1.0, 0),
            ("best_ms", "best fixed, ms", 1.0, 0),
            ("to_best", "ratio", 1.0, 2),
            ("auto_cpus", "CPUs used", 1.0, 2),
        ],
        cells: &[
            "virtual: mixed, 1 Gbit/s × 2",
            "virtual: mixed, 10 Gbit/s × 2",
            "virtual: mixed, 10 Gbit/s × 2, 1 CPUs allowed",
            "virtual: mixed, 25 Gbit/s × 4, IAA",
            "virtual: mixed, 10 Gbit/s × 4, QAT",
        ],
        findings: &[
            "Where accelerators deflate, `auto` can be far behind the best fixed choice: it prices the time of the source, and not that \
                 of the destination's CPU, which inflates at 0.5 to 0.7 GB/s for each channel.",
        ],
    },
    Table {
        title: "A device that writes into fresh memory",
        benchmark: "device-faults",
        text: "The software model writes the pages of a migration over this process's real page tables, so faults and flushes are counted, not \
               simulated; their times are. A guest of which 2 of 64 pages are not zero. Published for an idle guest on hardware, without and \
               with a bitmap of received pages: 604 and 429 faults, 1262 and 6 flushes, all per GiB.",
        columns: &[
            ("device_faults_per_gib", "device faults, per GiB", 1.0, 0),
            ("flushes_per_gib", "flushes, per GiB", 1.0, 0),
            ("cpu_finished_per_gib", "pages finished by the CPU, per GiB", 1.0, 0),
        ],
        cells: &[
            "idle, IAA inflates, page requests, fresh, no bitmap",
            "idle, IAA inflates, page requests, fresh, bitmap",
            "idle, IAA inflates, CPU finishes, fresh, bitmap",
            "idle, IAA inflates, CPU finishes, populated ahead, bitmap",
        ],
        findings: &[
            "The bitmap avoids flushes, populating ahead avoids faults. No destination of this version has a device write guest RAM: its CPU \
                 inflates and places.",
        ],
    },
];

/// Returns the page.
pub(super) fn page(set: &Set) -> String {
    let mut page = format!("{GENERATED}# Simulated results\n\n{INTRODUCTION}");
    write_held_out(&mut page, set);
    let mut missing = Vec::new();
    for table in TABLES {
        if !write_table(&mut page, table, set) {
            missing.push(format!("`sterna-bench {}`", table.benchmark));
        }
    }
    if !missing.is_empty() {
        let _ = writeln!(page, "Not in this set: {}.\n", missing.join(", "));
    }
    page.push_str(
        "## How the simulator is checked\n\n`cargo test -p sterna-simulator`: the wait for a single server is that of M/D/1, within 2 % at loads \
         of 0.3 to 0.9; Little's law holds within 0.5 % with one engine and with four; no resource is ever busier than possible; every \
         page is searched once; a run repeats exactly.\n",
    );
    page
}

/// Writes the simulator's error in the held-out figures.
fn write_held_out(page: &mut String, set: &Set) {
    let Some(results) = set.of("zero-page") else { return };
    page.push_str(
        "## How far off: four published runs\n\nQEMU with DSA, as published with the fifth version of its patches (two Xeon Platinum 8457C, \
         100 GB, 8 channels, batches of 128 pages), simulated in QEMU's structure. The software's costs are fitted to the first run; the \
         other three are held out.\n\n| run | figure | simulated | published | error |\n|---|---|---|---|---|\n",
    );
    let mut largest: f64 = 0.0;
    for run in &PUBLISHED {
        for (column, title, scale) in HELD_OUT {
            let published = published_figure(run, column) / scale;
            let values = results.row(&published_name(run)).and_then(|row| row.values(column));
            let Some(simulated) = values.and_then(|values| Spread::of(&values)).filter(|_| published > 0.0) else {
                continue;
            };
            let error = (simulated.median / scale / published - 1.0) * 100.0;
            let kind = if run.fitted { "fitted" } else { "held out" };
            let _ = writeln!(
                page,
                "| {} ({kind}) | {title} | {:.0} | {published:.0} | {error:+.0} % |",
                run.name,
                simulated.median / scale
            );
            if !run.fitted {
                largest = if error.abs() > largest.abs() { error } else { largest };
            }
        }
    }
    let _ = writeln!(page, "\nThe largest error of a held-out figure is {largest:+.0} %.\n\n{}\n", results.origin());
}

/// Writes a table, if at least one of its cells was run.
fn write_table(page: &mut String, table: &Table, set: &Set) -> bool {
    let Some(results) = set.of(table.benchmark) else { return false };
    let rows: Vec<_> = table.cells.iter().filter_map(|cell| results.row(cell)).collect();
    if rows.is_empty() {
        return false;
    }
    let _ = writeln!(page, "## {}\n\n{}\n", table.title, table.text);
    let titles: Vec<_> = table.columns.iter().map(|(_, title, ..)| *title).collect();
    let _ = writeln!(page, "| | {} |\n|{}", titles.join(" | "), "---|".repeat(titles.len() + 1));
    for row in rows {
        let name = row.name.trim_start_matches("virtual: ");
        let _ = write!(page, "| {name} |");
        for (column, _, scale, places) in table.columns {
            let scaled = row.values(column).map(|values| values.iter().map(|value| value / scale).collect::<Vec<_>>());
            let _ = write!(page, " {} |", shown(scaled.and_then(|values| Spread::of(&values)), *places));
        }
        page.push('\n');
    }
    let _ = writeln!(page, "\n{}\n", results.origin());
    for point in table.findings {
        let _ = writeln!(page, "* {point}");
    }
    page.push('\n');
    true
}

#[cfg(test)]
mod tests {
    use super::TABLES;
    use crate::BENCHMARKS;

    #[test]
    fn every_table_names_cells_that_its_benchmark_has() {
        for table in TABLES {
            let benchmark = BENCHMARKS.iter().find(|benchmark| benchmark.name == table.benchmark).unwrap();
            let cells = (benchmark.cells)();
            for cell in table.cells {
                assert!(cells.iter().any(|name| name == cell), "{} has no cell '{cell}'", benchmark.name);
            }
        }
    }
}
