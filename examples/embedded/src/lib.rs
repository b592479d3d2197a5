//! A small monitor that embeds Sterna, with guest RAM from rust-vmm's `vm-memory`.
//!
//! In place of vCPUs a thread writes guest RAM through `vm-memory`, whose bitmaps record the writes; a monitor with KVM joins KVM's log
//! to them (`sterna::vm_memory`). The guest's work is a function of one register, the number of its steps, so that its whole memory can be
//! verified wherever it runs.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use sterna::vm_memory::guest_ram;
use sterna::{DestinationVmm, GuestRam, RamError, ResumeReason, SourceVmm, VmmError};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::FromRangesError;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Pages of guest RAM: 64 MiB below a hole, as a PC has one, and 16 MiB above it.
const LOW: u64 = 16 << 10;
const HIGH: u64 = 4 << 10;
const HIGH_START: u64 = 4 << 30;
const PAGE: u64 = 4096;
const REGIONS: [(GuestAddress, usize); 2] =
    [(GuestAddress(0), (LOW * PAGE) as usize), (GuestAddress(HIGH_START), (HIGH * PAGE) as usize)];
/// The guest's n-th step writes page n * STRIDE. The stride is odd and the number of pages has no other factor in common with it.
const STRIDE: u64 = 7919;

/// A machine: its RAM, the registers of its one vCPU, and the vCPU's thread while it runs.
pub struct Machine {
    /// Guest RAM, with a bitmap of the written pages.
    pub memory: GuestMemoryMmap<AtomicBitmap>,
    steps: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    vcpu: Option<JoinHandle<()>>,
}

/// Returns the address of a page.
fn address(page: u64) -> u64 {
    if page < LOW { page * PAGE } else { HIGH_START + (page - LOW) * PAGE }
}

/// Returns the address that step `step` writes, and the value.
fn work(step: u64) -> (GuestAddress, u64) {
    let page = step * STRIDE % (LOW + HIGH);
    (GuestAddress(address(page) + step % 512 * 8), (step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl Machine {
    /// Makes a machine whose vCPU is paused before its first step.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn new() -> Result<Self, FromRangesError> {
        let memory = GuestMemoryMmap::from_ranges(&REGIONS)?;
        Ok(Self { memory, steps: Arc::default(), stop: Arc::default(), vcpu: None })
    }

    /// Returns the RAM in the form that a migration needs.
    ///
    /// # Errors
    /// As [`guest_ram`].
    pub fn ram(&self) -> Result<GuestRam, RamError> {
        guest_ram(&self.memory)
    }

    /// Returns how many steps the guest has done.
    pub fn steps(&self) -> u64 {
        self.steps.load(Relaxed)
    }

    /// Lets the vCPU run: at most 16 pages a millisecond, so that any network can keep up.
    pub fn run(&mut self) {
        let (memory, steps, stop) = (self.memory.clone(), Arc::clone(&self.steps), Arc::clone(&self.stop));
        self.vcpu = Some(spawn(move || {
            while !stop.load(Relaxed) {
                for _ in 0..16 {
                    let (address, value) = work(steps.load(Relaxed));
                    memory.write_obj(value, address).expect("the guest writes its own RAM");
                    steps.fetch_add(1, Relaxed);
                }
                sleep(Duration::from_millis(1));
            }
        }));
    }

    /// Pauses the vCPU, if it runs.
    pub fn halt(&mut self) {
        self.stop.store(true, Relaxed);
        self.vcpu.take().map(JoinHandle::join);
        self.stop.store(false, Relaxed);
    }

    /// Waits until the running guest has done `count` more steps.
    pub fn wait_for(&self, count: u64) {
        let end = self.steps() + count;
        while self.steps() < end {
            sleep(Duration::from_millis(1));
        }
    }

    /// Compares all of RAM with what the paused guest has written. Returns the number of pages, or the first difference.
    ///
    /// # Errors
    /// The address of a word with a wrong value.
    pub fn verify(&self) -> Result<u64, String> {
        let expected = GuestMemoryMmap::<()>::from_ranges(&REGIONS).map_err(|error| error.to_string())?;
        let failed = |error: vm_memory::GuestMemoryError| error.to_string();
        for step in 0..self.steps() {
            let (address, value) = work(step);
            expected.write_obj(value, address).map_err(failed)?;
        }
        for page in 0..LOW + HIGH {
            let address = GuestAddress(address(page));
            let (mut found, mut wanted) = ([0; 4096], [0; 4096]);
            self.memory.read_slice(&mut found, address).map_err(failed)?;
            expected.read_slice(&mut wanted, address).map_err(failed)?;
            if found != wanted {
                return Err(format!("the page at {:#x} is wrong after {} steps", address.0, self.steps()));
            }
        }
        Ok(LOW + HIGH)
    }
}

impl SourceVmm for Machine {
    fn name(&self) -> String {
        "embedded 1".into()
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        self.halt();
        Ok(())
    }

    fn resume(&mut self, _: ResumeReason) -> Result<(), VmmError> {
        self.run();
        Ok(())
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        Ok(state.write_all(&self.steps().to_le_bytes())?)
    }
}

impl DestinationVmm for Machine {
    fn name(&self) -> String {
        "embedded 1".into()
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        let mut steps = [0; 8];
        state.read_exact(&mut steps)?;
        self.steps.store(u64::from_le_bytes(steps), Relaxed);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        self.run();
        Ok(())
    }
}
