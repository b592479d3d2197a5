//! Faults of QEMU's releases by which QEMU loses a guest when it migrates it, with Sterna or without. Those that can be seen before anything is
//! begun are warned of; docs/operating.md lists the others, too.

use serde_json::json;

use crate::discover::{self, ListedBlock};
use crate::qmp::Qmp;

/// A fault of the source's QEMU in a migration by QEMU's own stream.
struct Fault {
    /// The first release that has it, as major and minor number.
    since: (u32, u32),
    /// Whether this QEMU meets it.
    is_met: fn(&Qmp) -> bool,
    /// What happens, why, and what to do.
    text: &'static str,
}

/// No release has mended any of them so far, up to 11.1.
const OF_STREAM: &[Fault] = &[Fault {
    since: (9, 0),
    is_met: tracks_past_the_first_block,
    text: "under TCG this QEMU ends with a failed assertion, and the guest with it, when it collects the pages that the guest has written: a memory \
           device (an NVDIMM, a DIMM, another NUMA node) was made before a larger block of RAM; move the guest by --mode direct",
}];

/// Returns the faults that the source's QEMU meets in a migration by its own stream, for people.
pub(super) fn of_stream(qmp: &Qmp) -> Vec<&'static str> {
    let met = |fault: &&Fault| qmp.version().at_least(fault.since.0, fault.since.1) && (fault.is_met)(qmp);
    OF_STREAM.iter().filter(met).map(|fault| fault.text).collect()
}

/// `physical_memory_sync_dirty_bitmap` (`cpu_physical_memory_sync_dirty_bitmap` in older releases) resets the entries of TCG's TLB for a block as
/// if it began at the address 0 of all RAM, and `tlb_reset_dirty_range_all` asserts that these addresses are within one block.
fn tracks_past_the_first_block(qmp: &Qmp) -> bool {
    let kvm = qmp.execute("query-kvm", json!({}));
    let Ok(blocks) = discover::list(qmp) else { return false };
    kvm.is_ok_and(|kvm| kvm["enabled"] == false) && is_longer_than_the_first(&blocks)
}

/// Returns whether a block is longer than the one at the address 0 of all RAM.
fn is_longer_than_the_first(blocks: &[ListedBlock]) -> bool {
    let first = blocks.iter().find(|block| block.offset == 0);
    first.is_some_and(|first| blocks.iter().any(|block| block.used > first.total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_is_longer_than_the_first_one_is_tracked_past_it() {
        let block = |offset, used| ListedBlock {
            name: "m".into(),
            page_size: 4096,
            offset,
            used,
            total: used,
            address: None,
            read_only: None,
        };
        assert!(is_longer_than_the_first(&[block(8192, 16384), block(0, 8192)]));
        assert!(!is_longer_than_the_first(&[block(8192, 8192), block(0, 8192)]));
        assert!(!is_longer_than_the_first(&[block(4096, 8192)]), "the first one is not migrated");
    }
}
