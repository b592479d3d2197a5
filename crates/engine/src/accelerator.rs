//! A guest's RAM as accelerators see it, for one migration.

use std::sync::Arc;
use std::time::Duration;

use sterna_memory::node::node_of;
use sterna_memory::ram::GuestRam;
use sterna_offload::{Offload, Operation, Region, RegionBusy, SystemTime};

/// How long work that nobody waits for any more may take to leave a guest's RAM at the end.
const LEAVING: Duration = Duration::from_secs(2);

/// An accelerator that a migration uses, with the guest's RAM shown to it.
#[derive(Clone, Debug)]
pub struct Accelerator {
    offload: Arc<Offload>,
    ram: GuestRam,
    regions: Arc<[Arc<Region>]>,
}

impl Accelerator {
    /// `offload` for the guest whose RAM is `ram`; none where only the CPU would do the work: it has its own, shorter way.
    pub fn new(offload: &Arc<Offload>, ram: &GuestRam) -> Option<Self> {
        if !offload.accelerates(Operation::ZeroMap) {
            return None;
        }
        let regions = ram.blocks().iter().map(|block| Region::of_block(block, node_of(block.addresses()))).collect();
        Some(Self { offload: Arc::clone(offload), ram: ram.clone(), regions })
    }

    /// What does the work.
    pub fn offload(&self) -> &Arc<Offload> {
        &self.offload
    }

    /// The guest's RAM.
    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Its blocks, by number.
    pub(crate) fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Takes no new work on this RAM, and waits a little for what is under way.
    ///
    /// # Errors
    /// A device out of service may still read this RAM (a source gives no device anything to write).
    pub fn retire(&self) -> Result<(), RegionBusy> {
        let deadline = self.offload.deadline(LEAVING);
        self.regions.iter().try_for_each(|region| region.retire_by(deadline, &SystemTime))
    }
}
