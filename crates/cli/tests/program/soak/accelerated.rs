//! How much of a guest's memory an accelerator handles. The CPU does what the accelerator is too late for, so that depends on how busy this
//! machine is.

use crate::direct_options::{CASE, Case, DELTAS_BY_DSA};
use sterna_qemu_lab::Fill;

#[test]
fn deltas_of_shared_memory_are_made_by_a_dsa() {
    let Some(moved) = (Case { fill: Fill::Random, send: DELTAS_BY_DSA, ..CASE }).moved() else { return };
    assert!(moved.report["device_deltas"].as_u64().is_some_and(|pages| pages > 0), "{}", moved.report);
}
