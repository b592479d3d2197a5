//! Connects this monitor to Sterna: all the code that a monitor needs for migrations.
//!
//! The library needs three things: the RAM ([`guest_ram`]), a dirty log ([`Machine::take_dirty_log`] returns a ready-made one), and a
//! type that pauses, resumes, saves and loads ([`Movable`]). Devices with a large state of their own are optional
//! ([`devices_to_save`], [`devices_to_load`]). `sterna::Source` and `sterna::Destination` do the rest;
//! `program/moving.rs` shows both calls.

use crate::machine::Machine;
use crate::ram::Block;
use crate::scratch::{LoadScratch, SaveScratch, Scratch};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::sync::Arc;
use sterna::{
    Backing, DestinationVmm, DeviceId, GuestRam, LoadDevice, Opening, Prepared, RamBlock, RamError, ResumeReason,
    SaveDevice, SourceVmm, VmmError,
};

/// Approximate output of [`Machine::save`] for four vCPUs on KVM, for the prediction of the downtime.
const STATE_BYTES: u64 = 100 << 10;

/// A machine that Sterna moves, from or to this host.
///
/// The machine is shared, so that the program can observe its guest while the library moves it. The library calls one method
/// at a time, and no method waits for a lock that is held while guest RAM is accessed: in post-copy an access to RAM may wait for
/// a page that comes only after [`DestinationVmm::resume`] has returned.
#[derive(Clone)]
pub struct Movable(Arc<Machine>);

impl Movable {
    /// Wraps this machine.
    pub fn new(machine: &Arc<Machine>) -> Self {
        Self(Arc::clone(machine))
    }
}

impl SourceVmm for Movable {
    fn name(&self) -> String {
        name()
    }

    fn settle_io(&mut self) -> Result<(), VmmError> {
        self.0.disk().into_iter().for_each(|disk| disk.settle());
        Ok(())
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        Ok(self.0.pause()?)
    }

    fn resume(&mut self, _: ResumeReason) -> Result<(), VmmError> {
        Ok(self.0.resume()?)
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        Ok(self.0.save(state)?)
    }

    fn state_size(&self) -> u64 {
        STATE_BYTES
    }

    fn throttle(&mut self, percent: u8) -> Result<(), VmmError> {
        self.0.throttle(percent);
        Ok(())
    }
}

impl DestinationVmm for Movable {
    fn name(&self) -> String {
        name()
    }

    /// Compares what would otherwise show only when the guest's state is loaded, while the guest is paused.
    fn prepare(&mut self, opening: &Opening) -> Result<Prepared, VmmError> {
        let theirs: Shape = serde_json::from_slice(&opening.message)
            .map_err(|error| format!("the opening message is none of a microvm: {error}"))?;
        let ours = Shape::of(&self.0);
        if theirs != ours {
            let (was, is) = (theirs.vcpus, ours.vcpus);
            return Err(format!("the source's machine has {was} vCPUs, this one has {is}").into());
        }
        Ok(Prepared::AsGiven)
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        Ok(self.0.load(state)?)
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        Ok(self.0.resume()?)
    }
}

/// What both machines have in common besides RAM and devices, which the library compares.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    vcpus: usize,
}

impl Shape {
    fn of(machine: &Machine) -> Self {
        Self { vcpus: machine.vcpus() }
    }
}

/// Returns the opening message for a source.
pub fn opening_message(machine: &Machine) -> Vec<u8> {
    serde_json::to_vec(&Shape::of(machine)).expect("numbers only")
}

fn name() -> String {
    concat!("microvm ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// Returns the machine's devices for a source; [`SourceVmm::save`] does not include them.
pub fn devices_to_save(machine: &Machine) -> impl Iterator<Item = (DeviceId, Box<dyn SaveDevice>)> {
    let device =
        |device: &Arc<Scratch>| -> (_, Box<dyn SaveDevice>) { (device.id(), Box::new(SaveScratch::new(device))) };
    machine.devices().iter().map(device)
}

/// Returns the machine's devices for a destination.
pub fn devices_to_load(machine: &Machine) -> impl Iterator<Item = (DeviceId, Box<dyn LoadDevice>)> {
    let device =
        |device: &Arc<Scratch>| -> (_, Box<dyn LoadDevice>) { (device.id(), Box::new(LoadScratch::new(device))) };
    machine.devices().iter().map(device)
}

/// Returns the machine's RAM for the library: the same blocks in the same order as in its dirty log. They keep the RAM mapped as
/// long as the migration needs it.
///
/// # Errors
/// Never: the machine's blocks are whole pages and have names of their own.
pub fn guest_ram(machine: &Machine) -> Result<GuestRam, RamError> {
    let ram = machine.ram();
    let block = |block: &Block| {
        let backing = match block.file() {
            Some(file) => Backing::Shared(Arc::clone(file), 0),
            None => Backing::Anonymous,
        };
        // SAFETY: mapped readable and writable as long as `ram` is held, as it is by the block. The monitor
        // accesses it by raw reads and writes, and none of its threads writes it before a guest is booted or loaded. (Without
        // KVM, threads in place of vCPUs have references to it, as a vCPU has: `threads.rs`.)
        unsafe { RamBlock::new(block.name(), block.start(), block.bytes() as usize, backing) }
            .with_page_size(block.page_size())
            .owned_by(ram.clone())
    };
    let blocks = ram.blocks().iter().map(block).collect();
    GuestRam::new(blocks)
}
