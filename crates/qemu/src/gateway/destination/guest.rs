//! What the destination's QEMU must have in common with the source's: the source is refused before anything is begun, with what to
//! change.

use std::time::Duration;

use sterna_wire::control::{Block, Hello};
use sterna_wire::text::cleaned;

use crate::discover::{ListedBlock, list};
use crate::gateway::qemu;
use crate::qmp::Qmp;

/// Bytes of a page, to which a source rounds the lengths of its blocks.
const PAGE_SIZE: u64 = qemu::PAGE_SIZE as u64;

/// What the destination's QEMU must have in common with the source's.
pub(super) struct Guest {
    machine_type: String,
    /// Empty where QEMU does not list them.
    blocks: Vec<ListedBlock>,
}

impl Guest {
    pub(super) fn of(qmp: &Qmp) -> Self {
        Self { machine_type: qemu::machine(qmp, Duration::ZERO).machine_type, blocks: list(qmp).unwrap_or_default() }
    }

    /// Returns all reasons why the source of `hello` cannot send its guest here.
    pub(super) fn refusals(&self, hello: &Hello) -> Vec<String> {
        let mut reasons = Vec::new();
        // The text is shown in the log here and on the terminal there.
        let theirs = cleaned(&hello.machine.machine_type);
        if theirs != self.machine_type && !theirs.is_empty() && !self.machine_type.is_empty() {
            let ours = &self.machine_type;
            reasons.push(format!(
                "the source's machine type is {theirs}, the destination's {ours}: start it with -M {theirs}"
            ));
        }
        // Only a source that moves its guest directly names its blocks.
        reasons.extend(hello.machine.blocks.iter().filter_map(|block| self.block_refusal(block)));
        reasons
    }

    /// Returns why QEMU would refuse a block of the source. QEMU itself only prints that, and ends.
    fn block_refusal(&self, theirs: &Block) -> Option<String> {
        let name = cleaned(&theirs.name);
        if self.blocks.is_empty() {
            return None;
        }
        let Some(ours) = self.blocks.iter().find(|ours| ours.name == theirs.name) else {
            return Some(format!(
                "the source's RAM block {name} is missing at the destination: start it with the same devices"
            ));
        };
        // QEMU resizes a block that may grow, within what it may have.
        let resizable = ours.total > ours.used;
        let fits = theirs.bytes == ours.used.next_multiple_of(PAGE_SIZE) || (resizable && theirs.bytes <= ours.total);
        (!fits).then(|| {
            let (theirs, ours) = (theirs.bytes, ours.used);
            format!("RAM block {name} has {theirs} bytes at the source and {ours} at the destination: give both the same memory and devices")
        })
    }
}
