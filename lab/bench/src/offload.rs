//! `sterna-bench offload`: the CPU's cost of work on pages, done by the CPU and by an accelerator.

mod cpu;
mod device;

use sterna_engine::cancel::Cancel;

use super::BenchArgs;
use super::harness::{Column, Findings};
use crate::hosts::HostsError;

/// The figures of every cell. The CPU's cells have no charged part and no device.
const COLUMNS: &[Column] = &[
    Column { name: "ns_per_page", title: "measured CPU, ns per page", scale: 1.0, places: 1 },
    Column { name: "bytes_per_second", title: "GB/s of one core", scale: 1e9, places: 1 },
    Column { name: "charged_ns", title: "charged CPU, ns", scale: 1.0, places: 1 },
    Column { name: "all_ns", title: "both, ns", scale: 1.0, places: 1 },
    Column { name: "device_ns", title: "device, ns", scale: 1.0, places: 1 },
    Column { name: "completion_ns", title: "of it completion, ns", scale: 1.0, places: 1 },
    Column { name: "completion_core", title: "completion at 25 GB/s, cores", scale: 1.0, places: 3 },
];

/// Returns the names of all cells.
pub(crate) fn cells() -> Vec<String> {
    [cpu::cells(), device::cells()].concat()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, progress: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let notes = [cpu::notes(), device::notes()].concat();
    let mut findings = Findings { name: "offload", columns: COLUMNS, rows: Vec::new(), targets: Vec::new(), notes };
    cpu::measure(args, cancel, progress, &mut findings)?;
    device::measure(args, cancel, progress, &mut findings)?;
    cpu::judge(&mut findings);
    device::judge(&mut findings);
    Ok(findings)
}
