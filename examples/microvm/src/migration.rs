//! What joins this monitor to Sterna: all that a monitor writes to have its guests moved.
//!
//! The library asks for three things: where RAM is ([`guest_ram`]), a dirty log ([`Machine::take_dirty_log`] has a ready-made
//! one), and someone who pauses, resumes, saves and loads ([`Movable`]); and takes devices with a large state of their own
//! ([`devices_to_save`], [`devices_to_load`]). With them `sterna::source::Source` and
//! `sterna::destination::Destination` do the rest; `program/moving.rs` shows both calls.

use crate::machine::Machine;
use crate::ram::Block;
use crate::scratch::{LoadScratch, SaveScratch, Scratch};
use std::io::{Read, Write};
use std::sync::Arc;
use sterna::device_state::{DeviceId, LoadDevice, SaveDevice};
use sterna::vmm::{DestinationVmm, SourceVmm, VmmError};
use sterna_memory::ram::{Backing, GuestRam, RamBlock, RamError};

/// About what [`Machine::save`] writes for four vCPUs on KVM. It goes into the prediction of the downtime.
const STATE_BYTES: u64 = 100 << 10;

/// A machine that Sterna moves, from or to here.
///
/// The machine is shared, so that the program can look at its guest while the library moves it. The library calls one method
/// at a time, and none of them waits for a lock that is held while guest RAM is touched: in post-copy whoever touches RAM
/// waits for pages, and they might come only after [`DestinationVmm::resume`] has returned.
#[derive(Clone)]
pub struct Movable(Arc<Machine>);

impl Movable {
    /// This machine.
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

    fn resume(&mut self) -> Result<(), VmmError> {
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

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        Ok(self.0.load(state)?)
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        Ok(self.0.resume()?)
    }
}

fn name() -> String {
    concat!("microvm ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// The machine's devices, for a source: what [`SourceVmm::save`] leaves out.
pub fn devices_to_save(machine: &Machine) -> impl Iterator<Item = (DeviceId, Box<dyn SaveDevice>)> {
    let device =
        |device: &Arc<Scratch>| -> (_, Box<dyn SaveDevice>) { (device.id(), Box::new(SaveScratch::new(device))) };
    machine.devices().iter().map(device)
}

/// The machine's devices, for a destination.
pub fn devices_to_load(machine: &Machine) -> impl Iterator<Item = (DeviceId, Box<dyn LoadDevice>)> {
    let device =
        |device: &Arc<Scratch>| -> (_, Box<dyn LoadDevice>) { (device.id(), Box::new(LoadScratch::new(device))) };
    machine.devices().iter().map(device)
}

/// The machine's RAM as the library takes it: the same blocks in the same order, which are the blocks of its dirty log. They keep
/// it mapped for as long as anything of a migration is left.
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
        // SAFETY: mapped readable and writable as long as anybody holds `ram`, as the block does. The monitor
        // accesses it by raw reads and writes, and none of its threads writes it before a guest is booted or loaded. (Without
        // KVM, threads in place of vCPUs have references to it, as a vCPU has: `threads.rs`.)
        unsafe { RamBlock::new(block.name(), block.start(), block.bytes() as usize, backing) }
            .with_page_size(block.page_size())
            .kept_by(ram.clone())
    };
    let blocks = ram.blocks().iter().map(block).collect();
    GuestRam::new(blocks)
}
