//! `sterna-bench zero-page`: the gain of an accelerator that searches for zero pages, in virtual time.
//!
//! First the published structure, with costs fitted to one published run: the error in the other published runs is the
//! error to expect in all other figures here. Then the same work in Sterna's structure.

use sterna_engine::cancel::Cancel;
use sterna_memory::bitmap::PageBitmap;
use sterna_simulator::costs::{Costs, fit};
use sterna_simulator::host::run;
use sterna_simulator::measured;
use sterna_simulator::scenario::Scenario;
use sterna_simulator::zero_page::{Figures, PUBLISHED, Published, published, sensitivity, sterna};

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Spread, Target, interleaved};
use crate::hosts::HostsError;

const COLUMNS: &[Column] = &[
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 },
    Column { name: "measured_ns_per_page", title: "measured CPU, ns/page", scale: 1.0, places: 1 },
    Column { name: "charged_ns_per_page", title: "charged CPU, ns/page", scale: 1.0, places: 1 },
    Column { name: "device_ns_per_page", title: "device time, ns/page", scale: 1.0, places: 1 },
    Column { name: "main_ns_per_page", title: "CPU of main, ns/page", scale: 1.0, places: 1 },
    Column { name: "senders_ns_per_page", title: "of senders", scale: 1.0, places: 1 },
    Column { name: "polling_ns_per_page", title: "of polling", scale: 1.0, places: 1 },
    Column { name: "utilisation_percent", title: "device busy, %", scale: 1.0, places: 0 },
];

/// CPU or devices, in Sterna's structure.
#[derive(Clone, Copy)]
enum Looks {
    Cpu,
    Devices { count: usize, spill: bool },
}

const LOOKS: [(&str, Looks); 5] = [
    ("CPU", Looks::Cpu),
    ("1 device", Looks::Devices { count: 1, spill: true }),
    ("1 device, nothing on the CPU", Looks::Devices { count: 1, spill: false }),
    ("4 devices", Looks::Devices { count: 4, spill: true }),
    ("4 devices, nothing on the CPU", Looks::Devices { count: 4, spill: false }),
];

const CONTENTS: [(&str, u64); 2] = [("half normal", 500), ("all zero", 0)];
const QEMU_SEARCH: &str = "Sterna with QEMU's search";
const STERNA: &str = "Sterna";

/// Returns the name of the cell that simulates a published run.
pub(crate) fn published_name(run: &Published) -> String {
    format!("{}, published structure", run.name)
}

fn name(content: &str, structure: &str, looks: &str) -> String {
    format!("{content}, {structure}, {looks}")
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    let mut cells: Vec<String> = PUBLISHED.iter().map(published_name).collect();
    for (content, _) in CONTENTS {
        for structure in [QEMU_SEARCH, STERNA] {
            cells.extend(LOOKS.iter().map(|(looks, _)| name(content, structure, looks)));
        }
    }
    cells
}

/// Returns the cost of finding pages with Sterna's bitmap, in packets of 128, in nanoseconds per page. Other work of
/// the rounds' thread (passing runs to channels, waiting for them) is not included.
fn search() -> f64 {
    const PAGES: u64 = 1 << 20;
    let mut bitmap = PageBitmap::new(PAGES);
    // The worst case: no two neighbouring pages.
    (0..PAGES).step_by(2).for_each(|page| bitmap.set(page..page + 1));
    let mut all: Vec<f64> = (0..9)
        .map(|_| {
            let begun = measured::thread_cpu();
            let (mut from, mut found) = (0, 0u64);
            while let Some(run) = bitmap.next_run(from, 128) {
                found += run.end - run.start;
                from = run.end;
            }
            (measured::thread_cpu() - begun) / std::hint::black_box(found) as f64
        })
        .collect();
    all.sort_by(f64::total_cmp);
    all[4]
}

fn figures(scenario: &Scenario, part: u64) -> Vec<f64> {
    let pages = scenario.vms[0].pages;
    let figures = Figures::of(&run(scenario), pages);
    vec![
        // Scaled from the simulated part of the memory to all of it.
        figures.total as f64 * part as f64 / 1e6,
        figures.measured,
        figures.charged,
        figures.device,
        figures.main,
        figures.senders,
        figures.polling,
        figures.utilisation * 100.0,
    ]
}

/// Simulates all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let part = if args.quick { 10 } else { 1 };
    let costs = measured::here(&Costs::default());
    let own = Costs { search_page: search(), ..costs.clone() };
    let mut findings =
        Findings { name: "zero-page", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: Vec::new() };
    let mut scenarios: Vec<(String, Scenario)> =
        PUBLISHED.iter().map(|run| (published_name(run), published(run, &costs, part))).collect();
    for (content, normal) in CONTENTS {
        for (structure, costs) in [(QEMU_SEARCH, &costs), (STERNA, &own)] {
            for (looks, who) in LOOKS {
                let (devices, spill) = match who {
                    Looks::Cpu => (0, false),
                    Looks::Devices { count, spill } => (count, spill),
                };
                scenarios.push((name(content, structure, looks), sterna(normal, devices, spill, costs, part)));
            }
        }
    }
    let mut cells: Vec<Cell<'_>> = scenarios
        .into_iter()
        .filter(|(name, _)| args.wants(name))
        .map(|(name, scenario)| Cell { name, run: Box::new(move || Ok(figures(&scenario, part))) })
        .collect();
    // The simulation is deterministic, so one run is enough.
    findings.rows = interleaved(&mut cells, 1, cancel, progress)?;
    findings.notes = notes(&costs, &own, &findings);
    if args.only.is_empty() {
        for (content, normal) in CONTENTS {
            findings.notes.push(sensitivity_note(content, &sterna(normal, 1, true, &own, 20)));
        }
    }
    judge(&mut findings);
    Ok(findings)
}

/// Returns what a published run had in a column; 0 where it had no such thread.
pub(crate) fn published_figure(run: &Published, column: &str) -> f64 {
    let page = |ms: f64| ms * 1e6 / fit::PAGES;
    match column {
        "total_ms" => run.total,
        "main_ns_per_page" => page(run.main),
        "senders_ns_per_page" => page(run.senders),
        _ => page(run.polling),
    }
}

fn notes(costs: &Costs, own: &Costs, findings: &Findings) -> Vec<String> {
    let mut notes = vec![
        "Simulated in virtual time; nothing here ran on an accelerator. Measured CPU is CPU time by figures that were \
         measured, here or in the published run; charged CPU is for costs that were not measured here (ENQCMD, lines that a device \
         wrote, blocking and waking, system calls); device time is the accelerator's."
            .into(),
        format!(
            "Fitted to one published run (half normal, CPU): search {:.0} ns and sending {:.0} ns for each page, and {:.0} ns \
             that a connection blocks for each normal page. Measured here: Sterna's search {:.1} (walking the bitmap alone; the \
             published figure is all that QEMU's main thread does for a page), filling a descriptor {:.1}, asking for a share \
             {:.0} ns for each batch. Charged: ENQCMD {:.0}, sleeping and waking {:.0}, a line of records \
             {:.0} ns.",
            costs.search_page,
            costs.send_page,
            sterna_simulator::costs::fitted_connection(),
            own.search_page,
            costs.fill_descriptor,
            costs.ask,
            costs.enqcmd,
            costs.wake,
            costs.record_line,
        ),
    ];
    for run in &PUBLISHED {
        let errors: Vec<String> = [
            ("total_ms", "total"),
            ("main_ns_per_page", "main"),
            ("senders_ns_per_page", "senders"),
            ("polling_ns_per_page", "polling"),
        ]
        .into_iter()
        .filter_map(|(column, what)| {
            let was = published_figure(run, column);
            let is = findings.spread(&published_name(run), column)?.median;
            (was > 0.0).then(|| format!("{what} {is:.0} for {was:.0} ({:+.0} %)", (is / was - 1.0) * 100.0))
        })
        .collect();
        if !errors.is_empty() {
            let kind = if run.fitted { "fitted" } else { "held out" };
            notes.push(format!("Simulated for published, {} ({kind}): {}.", run.name, errors.join(", ")));
        }
    }
    notes
}

/// Returns the effect of half and of twice each cost on Sterna's run with one device.
fn sensitivity_note(content: &str, scenario: &Scenario) -> String {
    let lines = sensitivity(scenario).into_iter().map(|of| {
        let ((half_cpu, half_time), (twice_cpu, twice_time)) = (of.half, of.twice);
        format!("  {:<28} {half_cpu:.2} {half_time:.2}   {twice_cpu:.2} {twice_time:.2}", of.figure)
    });
    let lines: Vec<String> = lines.collect();
    format!(
        "{content}, Sterna, 1 device: CPU and time, as multiples, with half of a figure and with twice of it\n\n{}\n",
        lines.join("\n")
    )
}

/// Returns the ratio of a figure to that of the baseline.
fn ratio(findings: &Findings, row: &str, base: &str, columns: &[&str]) -> Option<Spread> {
    let sum = |row: &str| -> Option<f64> {
        columns.iter().map(|column| findings.spread(row, column).map(|spread| spread.median)).sum()
    };
    let value = sum(row)? / sum(base)?;
    Some(Spread { median: value, min: value, max: value })
}

fn judge(findings: &mut Findings) {
    const CPU: &[&str] = &["measured_ns_per_page", "charged_ns_per_page"];
    let looks = "1 device";
    for (content, cpu, total) in [("half normal", 0.77, 0.92), ("all zero", 0.78, 0.80)] {
        // The baseline of the published ratios is the published structure, searched by the CPU.
        let base = format!("{content}, CPU, published structure");
        for structure in [QEMU_SEARCH, STERNA] {
            let row = name(content, structure, looks);
            let value = ratio(findings, &row, &base, CPU);
            let what = format!("{content}, {structure}, {looks}, to the published structure on the CPU");
            findings.targets.push(Target {
                name: format!("{what}: measured + charged CPU"),
                limit: cpu,
                value,
                unit: "times",
            });
            let value = ratio(findings, &row, &base, &["total_ms"]);
            findings.targets.push(Target { name: format!("{what}: time"), limit: total, value, unit: "times" });
        }
        // Harder: against Sterna's own CPU path.
        for looks in ["1 device", "4 devices"] {
            let (row, base) = (name(content, STERNA, looks), name(content, STERNA, "CPU"));
            let what = format!("{content}, {STERNA}, {looks}, to Sterna on the CPU");
            let value = ratio(findings, &row, &base, CPU);
            findings.targets.push(Target {
                name: format!("{what}: measured + charged CPU"),
                limit: cpu,
                value,
                unit: "times",
            });
            let value = ratio(findings, &row, &base, &["total_ms"]);
            findings.targets.push(Target { name: format!("{what}: time"), limit: total, value, unit: "times" });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_there_are() {
        let mut findings = Findings::all_ones("zero-page", COLUMNS, cells());
        judge(&mut findings);
        assert_eq!(findings.targets.len(), 16);
        assert!(findings.has_all_values());
        assert_eq!(notes(&Costs::default(), &Costs::default(), &findings).len(), 6);
    }
}
