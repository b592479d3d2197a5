//! `sterna bench offload`: what the work on pages costs that an accelerator can take over.

mod cpu;

use sterna::cancel::Cancel;

use super::BenchArgs;
use super::harness::Findings;
use crate::hosts::HostsError;

/// The names of all cells.
pub(crate) fn cells() -> Vec<String> {
    cpu::cells()
}

/// Measures all cells and judges the targets.
pub(crate) fn measure(args: &BenchArgs, cancel: &Cancel, tell: &dyn Fn(&str)) -> Result<Findings, HostsError> {
    let mut findings =
        Findings { name: "offload", columns: cpu::COLUMNS, rows: Vec::new(), targets: Vec::new(), notes: cpu::notes() };
    cpu::measure(args, cancel, tell, &mut findings)?;
    cpu::judge(&mut findings);
    Ok(findings)
}
