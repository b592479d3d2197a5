//! The interface of a vCPU, and its thread.

use crate::config::Rate;
use crate::gate::Gate;
use crate::layout::{GuestLayout, PAGE, ShareLayout};
use crate::pace::{BATCH, Pace, SLICE};
use crate::ram::GuestRam;
use crate::serial::SerialPort;
use crate::state::VcpuState;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sterna::DirtyMarker;
use sterna_guest::share::{Counters, Orders};

/// Runs a vCPU. Errors are texts for the user.
pub(crate) trait Vcpu: Send {
    /// Runs until the next exit.
    fn run(&mut self, serial: &SerialPort) -> Result<Exit, String>;

    /// Completes the last exit without running the guest, so that the state is complete. Called until there is no further
    /// exit.
    fn finish(&mut self, serial: &SerialPort) -> Result<Option<Exit>, String>;

    /// Returns the flag by which another thread makes `run` return soon; valid as long as this vCPU.
    fn immediate_exit(&mut self) -> Option<NonNull<AtomicU8>>;

    /// Returns its state. To be called after `finish`.
    fn save(&self) -> Result<VcpuState, String>;

    /// Sets it to the beginning of a guest's work on `share`.
    fn boot(&mut self, layout: &GuestLayout, share: &ShareLayout) -> Result<(), String>;

    /// Loads a state and `share`, before it first runs.
    fn load(&mut self, state: &VcpuState, share: &ShareLayout) -> Result<(), String>;
}

/// Why a vCPU left the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It has done this step and needs orders.
    StepDone(u64),
    /// It was asked to leave, or the exit has been handled already.
    Nothing,
}

/// State that all threads of a machine share.
pub(crate) struct Common {
    pub(crate) gate: Gate,
    pub(crate) ram: Arc<GuestRam>,
    /// One for each vCPU.
    pub(crate) serial: Vec<SerialPort>,
    pub(crate) rates: Rates,
    /// Marks the pages of the orders, which the monitor writes into the guest's memory.
    pub(crate) marker: DirtyMarker,
}

/// How fast the guest works. May be changed at any time.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    write: AtomicU64,
    check: AtomicU64,
    say_every: AtomicU64,
}

impl Rates {
    const UNLIMITED: u64 = u64::MAX;

    fn number(rate: Rate) -> u64 {
        match rate {
            Rate::PagesPerSecond(rate) => rate.min(Self::UNLIMITED - 1),
            Rate::Unlimited => Self::UNLIMITED,
        }
    }

    fn rate(number: u64) -> Rate {
        if number == Self::UNLIMITED { Rate::Unlimited } else { Rate::PagesPerSecond(number) }
    }

    pub(crate) fn set_write(&self, rate: Rate) {
        self.write.store(Self::number(rate), Ordering::Relaxed);
    }

    pub(crate) fn set_check(&self, rate: Rate) {
        self.check.store(Self::number(rate), Ordering::Relaxed);
    }

    pub(crate) fn set_say_every(&self, nanoseconds: u64) {
        self.say_every.store(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn write(&self) -> Rate {
        Self::rate(self.write.load(Ordering::Relaxed))
    }

    pub(crate) fn check(&self) -> Rate {
        Self::rate(self.check.load(Ordering::Relaxed))
    }

    pub(crate) fn say_every(&self) -> u64 {
        self.say_every.load(Ordering::Relaxed)
    }
}

/// A vCPU. Its thread has the lock while the vCPU runs, and the machine while it does not.
pub(crate) type SharedVcpu = Arc<Mutex<Box<dyn Vcpu>>>;

pub(crate) fn lock(vcpu: &SharedVcpu) -> MutexGuard<'_, Box<dyn Vcpu>> {
    vcpu.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a vCPU, on a thread of its own, until the machine ends.
pub(crate) fn run(common: &Common, vcpu: &SharedVcpu, share: &ShareLayout, vcpus: usize) {
    let index = share.share.vcpu as usize;
    let gate = &common.gate;
    let mut foreman = Foreman::new(share, vcpus);
    let immediate_exit = lock(vcpu).immediate_exit();
    // SAFETY: the vCPU lives until this returns, and is retired before.
    unsafe { gate.enlist(index, immediate_exit) };
    let _retire = Retire { gate, vcpu: index };
    loop {
        let asked = Instant::now();
        if !gate.enter(index) {
            break;
        }
        foreman.held(asked.elapsed());
        // The lock is released before `leave`, so that it is free once no vCPU runs.
        if let Err(why) = run_until_stopped(common, &mut lock(vcpu), &mut foreman) {
            gate.fail(index, why);
        }
        gate.leave(index);
    }
}

/// Removes a thread's vCPU from the gate, even if the thread panics.
struct Retire<'a> {
    gate: &'a Gate,
    vcpu: usize,
}

impl Drop for Retire<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.gate.fail(self.vcpu, "its thread panicked".to_owned());
        }
        self.gate.retire(self.vcpu);
    }
}

/// Runs the vCPU until it has left the guest and its state is complete.
fn run_until_stopped(common: &Common, vcpu: &mut Box<dyn Vcpu>, foreman: &mut Foreman<'_>) -> Result<(), String> {
    let index = foreman.share.share.vcpu as usize;
    let serial = &common.serial[index];
    loop {
        let exit = if common.gate.stops(index) {
            match vcpu.finish(serial)? {
                Some(exit) => exit,
                None => return Ok(()),
            }
        } else {
            vcpu.run(serial)?
        };
        if let Exit::StepDone(step) = exit {
            foreman.order(common, step);
        }
    }
}

const _: () = assert!(size_of::<Orders>() as u64 <= PAGE && size_of::<Counters>() as u64 <= PAGE);

/// Gives a vCPU its orders.
struct Foreman<'a> {
    share: &'a ShareLayout,
    vcpus: usize,
    write: Pace,
    check: Pace,
    /// When the guest was last ordered to print its progress, in its own time.
    last_print: Option<u64>,
}

impl<'a> Foreman<'a> {
    fn new(share: &'a ShareLayout, vcpus: usize) -> Self {
        Self { share, vcpus, write: Pace::new(), check: Pace::new(), last_print: None }
    }

    /// Records that the vCPU was paused or throttled for `time`.
    fn held(&mut self, time: Duration) {
        self.write.held(time);
        self.check.held(time);
    }

    /// Writes the orders for the step after `done`. If little is due, rests first.
    fn order(&mut self, common: &Common, done: u64) {
        let filled = common.ram.read::<Counters>(self.share.counters).progress.filled;
        let fill = self.share.share.count.saturating_sub(filled).min(BATCH);
        let (mut write, mut check) = (0, 0);
        if fill > 0 {
            // While memory is filled, no rewriting or verification is due.
            (self.write, self.check) = (Pace::new(), Pace::new());
        } else {
            (write, check) = self.due(common);
            if write + check < BATCH / 4 {
                common.gate.rest(SLICE);
                let more = self.due(common);
                (write, check) = (write + more.0, check + more.1);
            }
        }
        let clock = common.gate.progress();
        let every = common.rates.say_every();
        let say = every != 0 && clock.saturating_sub(*self.last_print.get_or_insert(clock)) >= every;
        if say {
            self.last_print = Some(clock);
        }
        let orders = Orders { step: done.wrapping_add(1), clock, fill, write, check, say: u64::from(say) };
        common.ram.write(self.share.orders, orders);
        // KVM's log does not contain the monitor's own writes. Marked after the write.
        let (block, page) = common.ram.page_of(self.share.orders);
        common.marker.mark(block, page..page + 1);
    }

    fn due(&mut self, common: &Common) -> (u64, u64) {
        let now = Instant::now();
        let write = self.write.due(common.rates.write(), self.vcpus, now);
        (write, self.check.due(common.rates.check(), self.vcpus, now))
    }
}
