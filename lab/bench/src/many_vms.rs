//! `sterna-bench many-vms`: up to a hundred migrations at once on one to eight accelerators, in virtual time.
//!
//! The product's own code decides about admission to a device. Reviewers of the published design asked what the worst
//! of a hundred VMs gets, and whether any of them starves in a queue without shares.

use sterna_engine::cancel::Cancel;
use sterna_simulator::costs::Costs;
use sterna_simulator::host::{Outcome, run};
use sterna_simulator::many_vms::{Content, HEAVY, Mix, Shares, crowd, longest_wait, shares, unequal};
use sterna_simulator::measured;
use sterna_simulator::scenario::{Policy, Scenario};

use super::BenchArgs;
use super::harness::{Cell, Column, Findings, Spread, Target, interleaved};
use crate::hosts::HostsError;

const COLUMNS: &[Column] = &[
    Column { name: "total_ms", title: "total, ms", scale: 1.0, places: 0 },
    Column { name: "worst_vm_ms", title: "worst VM, ms", scale: 1.0, places: 0 },
    Column { name: "mean_vm_ms", title: "average VM, ms", scale: 1.0, places: 0 },
    Column { name: "measured_cpu_s", title: "measured CPU, s", scale: 1.0, places: 2 },
    Column { name: "charged_cpu_s", title: "charged CPU, s", scale: 1.0, places: 2 },
    Column { name: "check_measured_s", title: "of it the check: measured", scale: 1.0, places: 2 },
    Column { name: "check_charged_s", title: "charged", scale: 1.0, places: 2 },
    Column { name: "device_s", title: "device time, s", scale: 1.0, places: 2 },
    Column { name: "device_batches_percent", title: "batches on devices, %", scale: 1.0, places: 0 },
    Column { name: "longest_wait_ms", title: "longest wait, ms", scale: 1.0, places: 2 },
    Column { name: "share_worst_percent", title: "shares off at most, %", scale: 1.0, places: 1 },
    Column { name: "share_windows", title: "windows", scale: 1.0, places: 0 },
    Column { name: "unfinished", title: "unfinished", scale: 1.0, places: 0 },
];

/// Cores for migrations, of 192.
const FEW: usize = 4;
const ALL_CORES: usize = 192;

const WITH_HEAVY: &str = "10 heavy + 90 light";

#[derive(Clone, Copy)]
enum What {
    Crowd { vms: usize, content: Content, cores: usize, devices: usize, policy: Option<Policy>, spill: bool },
    Unequal { mix: Mix, policy: Policy, spill: bool },
}

fn name(what: What) -> String {
    let only = |spill: bool| if spill { "" } else { ", nothing on the CPU" };
    match what {
        What::Crowd { vms, content, cores, devices, policy, spill } => {
            let on = match (policy, devices) {
                (None, _) => "CPU only".to_owned(),
                (Some(policy), 1) => format!("1 device, {}{}", policy.name(), only(spill)),
                (Some(policy), _) => format!("{devices} devices, {}{}", policy.name(), only(spill)),
            };
            format!("{vms} VMs, {}, {cores} cores, {on}", content.name())
        }
        What::Unequal { mix, policy, spill } => {
            format!("{WITH_HEAVY}, {}, {}{}", mix.name(), policy.name(), only(spill))
        }
    }
}

fn whats() -> Vec<What> {
    let mut whats = Vec::new();
    let mut crowd = |vms, content, cores, devices, policy, spill| {
        whats.push(What::Crowd { vms, content, cores, devices, policy, spill });
    };
    for content in [Content::Half, Content::Zero] {
        for cores in [FEW, ALL_CORES] {
            crowd(100, content, cores, 0, None, true);
            for policy in Policy::ALL {
                crowd(100, content, cores, 4, Some(policy), true);
            }
            for devices in [1, 2, 8] {
                crowd(100, content, cores, devices, Some(Policy::Ledger), true);
            }
            crowd(100, content, cores, 4, Some(Policy::Ledger), false);
        }
    }
    for vms in [1, 10, 50] {
        for cores in [FEW, ALL_CORES] {
            crowd(vms, Content::Half, cores, 0, None, true);
            crowd(vms, Content::Half, cores, 4, Some(Policy::Ledger), true);
        }
    }
    for mix in Mix::ALL {
        for policy in Policy::ALL {
            // A FIFO never spills by prediction: only batches that find the queue full go to the CPU.
            whats.push(What::Unequal { mix, policy, spill: true });
            if policy != Policy::Fifo {
                whats.push(What::Unequal { mix, policy, spill: false });
            }
        }
    }
    whats
}

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    whats().into_iter().map(name).collect()
}

fn scenario(what: What, quick: bool, costs: &Costs, ledger: f64) -> Scenario {
    let (mut scenario, policy) = match what {
        What::Crowd { vms, content, cores, devices, policy, spill } => {
            let mib = if quick { 256 } else { 1024 };
            (crowd(vms, mib, content, cores, devices, policy, spill), policy)
        }
        What::Unequal { mix, policy, spill } => (unequal(mix, policy, spill), Some(policy)),
    };
    scenario.costs = costs.clone();
    if policy == Some(Policy::Ledger) {
        scenario.costs.ask = ledger;
    }
    scenario
}

fn figures(scenario: &Scenario, outcome: &Outcome, unequal: bool) -> Vec<f64> {
    let alive: Vec<_> = outcome.vms.iter().filter(|vm| !vm.died).collect();
    let took: Vec<f64> = alive.iter().map(|vm| vm.took(outcome.ended) as f64 / 1e6).collect();
    let (on_device, on_cpu) =
        outcome.vms.iter().fold((0, 0), |(device, cpu), vm| (device + vm.on_device, cpu + vm.on_cpu));
    let shares = if unequal { shares(scenario, outcome) } else { Shares::default() };
    vec![
        outcome.total() as f64 / 1e6,
        took.iter().copied().fold(0.0, f64::max),
        took.iter().sum::<f64>() / took.len().max(1) as f64,
        outcome.cpu().measured / 1e9,
        outcome.cpu().charged / 1e9,
        outcome.check().measured / 1e9,
        outcome.check().charged / 1e9,
        outcome.vms.iter().map(|vm| vm.device).sum::<f64>() / 1e9,
        on_device as f64 * 100.0 / (on_device + on_cpu).max(1) as f64,
        longest_wait(scenario, outcome) as f64 / 1e6,
        shares.worst * 100.0,
        shares.windows as f64,
        alive.iter().filter(|vm| vm.finished.is_none()).count() as f64,
    ]
}

/// Simulates all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let costs = measured::here(&Costs::default());
    let ledger = measured::asking_ledger(std::path::Path::new("/dev/shm")).unwrap_or(costs.ask);
    let mut cells: Vec<Cell<'_>> = whats()
        .into_iter()
        .filter(|&what| args.wants(&name(what)))
        .map(|what| {
            let scenario = scenario(what, args.quick, &costs, ledger);
            let unequal = matches!(what, What::Unequal { .. });
            Cell { name: name(what), run: Box::new(move || Ok(figures(&scenario, &run(&scenario), unequal))) }
        })
        .collect();
    let mut findings =
        Findings { name: "many-vms", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: Vec::new() };
    // The simulation is deterministic, so one run is enough.
    findings.rows = interleaved(&mut cells, 1, cancel, progress)?;
    findings.notes = notes(args, &costs, ledger);
    judge(&mut findings);
    Ok(findings)
}

fn notes(args: &BenchArgs, costs: &Costs, ledger: f64) -> Vec<String> {
    vec![
        "Simulated in virtual time; nothing here ran on an accelerator. The code that decides who may use a device is the \
         product's own. Measured CPU is by figures that were measured, charged CPU is for costs that were not measured here; device \
         time is the accelerators'."
            .into(),
        format!(
            "Each VM has {} MiB (the unequal ones always 1024), one sender with 8 batches of 512 KiB under way, and looks at \
             every page whole; half zero: every second page is sent. Search {:.0}, check {:.0}, sending {:.0} ns for each \
             page, as in the published runs; asking for a share {:.0} ns for each batch, with the ledger's file {:.0}. \
             Memory {:.0} GB/s, network {:.1} GB/s.",
            if args.quick { 256 } else { 1024 },
            costs.search_page,
            costs.scan_page,
            costs.send_page,
            costs.ask,
            ledger,
            costs.dram,
            costs.link,
        ),
        format!(
            "Heavy VMs have weight {HEAVY}, four senders and 32 batches each; all VMs are zero, so that all want the \
             one device all the time. Shares are compared in windows of 100 ms in which all wanted it, the first of the run \
             left out; where spilling ends the run sooner there are none. Nothing on the CPU: work waits for the device \
             however long that takes."
        ),
        "Longest wait: of any batch from wanting to go to being done, the wait for a share and the queue together, or for a \
         share and the CPU that did it in the end."
            .into(),
    ]
}

fn single(value: f64) -> Option<Spread> {
    Some(Spread { median: value, min: value, max: value })
}

fn judge(findings: &mut Findings) {
    let cell =
        |content, cores, devices, policy| name(What::Crowd { vms: 100, content, cores, devices, policy, spill: true });
    for content in [Content::Half, Content::Zero] {
        let cpu = cell(content, FEW, 0, None);
        for policy in [Policy::Ledger, Policy::Delay, Policy::Exact] {
            let what =
                format!("100 VMs, {}, {FEW} cores, 4 devices, {}: time to CPU only", content.name(), policy.name());
            findings.at_most(&what, 1.0, &cell(content, FEW, 4, Some(policy)), &cpu, "total_ms");
        }
        let what = format!("100 VMs, {}, {FEW} cores, 1 device, ledger: time to CPU only", content.name());
        findings.at_most(&what, 1.0, &cell(content, FEW, 1, Some(Policy::Ledger)), &cpu, "total_ms");
        let (cpu, ours) = (cell(content, ALL_CORES, 0, None), cell(content, ALL_CORES, 4, Some(Policy::Ledger)));
        let what = format!("100 VMs, {}, {ALL_CORES} cores, 4 devices, ledger", content.name());
        findings.at_most(&format!("{what}: time to CPU only"), 1.02, &ours, &cpu, "total_ms");
        for (which, measured, charged) in [
            ("CPU-seconds of the check", "check_measured_s", "check_charged_s"),
            ("all CPU-seconds", "measured_cpu_s", "charged_cpu_s"),
        ] {
            let sum = |row: &str| Some(findings.spread(row, measured)?.median + findings.spread(row, charged)?.median);
            let value = sum(&ours).zip(sum(&cpu)).and_then(|(ours, cpu)| single(ours / cpu));
            findings.targets.push(Target {
                name: format!("{what}: {which} to CPU only"),
                limit: 0.5,
                value,
                unit: "times",
            });
        }
    }
    for mix in Mix::ALL {
        for policy in [Policy::Ledger, Policy::Exact] {
            let row = name(What::Unequal { mix, policy, spill: false });
            // Without a window the target is not measured.
            let windows = findings.spread(&row, "share_windows").is_some_and(|windows| windows.median > 0.0);
            let value = findings.spread(&row, "share_worst_percent").filter(|_| windows);
            let what = format!("{WITH_HEAVY}, {}, {}: furthest from a share in 100 ms", mix.name(), policy.name());
            findings.targets.push(Target { name: what, limit: 10.0, value, unit: "%" });
        }
    }
    // As in the product: batches that would wait too long go to the CPU.
    for mix in Mix::ALL {
        for policy in [Policy::Ledger, Policy::Delay, Policy::Exact] {
            let row = name(What::Unequal { mix, policy, spill: true });
            let value = findings.spread(&row, "longest_wait_ms");
            let what = format!("{WITH_HEAVY}, {}, {}: longest wait", mix.name(), policy.name());
            findings.targets.push(Target { name: what, limit: 5.0, value, unit: "ms" });
        }
    }
    let unfinished: f64 = findings
        .rows
        .iter()
        .filter_map(|row| findings.spread(&row.name, "unfinished"))
        .map(|unfinished| unfinished.median)
        .sum();
    let value = if findings.rows.is_empty() { None } else { single(unfinished) };
    findings.targets.push(Target { name: "VMs that starved, in all cells".into(), limit: 0.0, value, unit: "" });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_about_cells_that_there_are_and_no_two_have_one_name() {
        let names = cells();
        let distinct: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        let mut findings = Findings::all_ones("many-vms", COLUMNS, cells());
        judge(&mut findings);
        assert!(findings.has_all_values(), "{:?}", findings.targets);
    }
}
