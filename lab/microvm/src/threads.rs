//! Threads in place of vCPUs, for hosts without KVM: they do the guest's work on the guest's memory.

use crate::layout::{GuestLayout, PAGE, ShareLayout};
use crate::ram::GuestRam;
use crate::serial::SerialPort;
use crate::state::VcpuState;
use crate::vcpu::{Exit, Vcpu};
use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use sterna_guest::share::{Counters, Orders, Share};

/// A thread in place of a vCPU. All its state but `begun` is in the guest's memory.
pub(crate) struct ThreadVcpu {
    ram: Arc<GuestRam>,
    share: ShareLayout,
    /// Whether it has asked for orders, so that there are some when it goes on.
    begun: bool,
}

impl ThreadVcpu {
    pub(crate) fn new(ram: Arc<GuestRam>, share: ShareLayout) -> Self {
        Self { ram, share, begun: false }
    }
}

impl Vcpu for ThreadVcpu {
    fn run(&mut self, serial: &SerialPort) -> Result<Exit, String> {
        let share = &self.share.share;
        let mut counters = self.ram.read::<Counters>(self.share.counters);
        if !self.begun {
            self.begun = true;
            return Ok(Exit::StepDone(counters.steps));
        }
        let plan = share.plan().ok_or("its layout is not understood")?;
        let orders = self.ram.read::<Orders>(self.share.orders);
        let pages = self.ram.at(share.pages, share.count * PAGE);
        let table = self.ram.at(share.table, share.count * 4);
        let count = share.count as usize;
        // SAFETY: in RAM by the layout, aligned to pages, any bits are values, and no other vCPU's. A migration reads and
        // places pages by raw and volatile accesses only. The references end with the step: while the vCPU is held, the
        // memory belongs to its holder.
        let (pages, table) =
            unsafe { (slice::from_raw_parts_mut(pages.cast(), count), slice::from_raw_parts_mut(table.cast(), count)) };
        let mut work = Share { vcpu: share.vcpu, pages, table, plan, whole: share.whole != 0 };
        work.step(&orders, &mut counters, &mut Line(serial)).map_err(|_| "the serial port fails".to_owned())?;
        self.ram.write(self.share.counters, counters);
        Ok(Exit::StepDone(counters.steps))
    }

    fn finish(&mut self, _: &SerialPort) -> Result<Option<Exit>, String> {
        Ok(None)
    }

    fn immediate_exit(&mut self) -> Option<NonNull<AtomicU8>> {
        None
    }

    fn save(&self) -> Result<VcpuState, String> {
        Ok(VcpuState::Thread { begun: self.begun })
    }

    fn boot(&mut self, _: &GuestLayout, share: &ShareLayout) -> Result<(), String> {
        self.share = *share;
        Ok(())
    }

    fn load(&mut self, state: &VcpuState, share: &ShareLayout) -> Result<(), String> {
        match state {
            VcpuState::Thread { begun } => (self.begun, self.share) = (*begun, *share),
            #[cfg(has_kvm)]
            VcpuState::Kvm(_) => return Err("it is of a machine that runs on KVM, and this one does not".to_owned()),
        }
        Ok(())
    }
}

/// The serial port for the guest's work.
struct Line<'a>(&'a SerialPort);

impl fmt::Write for Line<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.0.write(0, byte));
        Ok(())
    }
}
