//! Controls when vCPUs run: pause and resume, throttling, and the end of a machine.
//!
//! Each vCPU thread asks the gate before it enters the guest. To make a vCPU leave the guest, the gate sets its `immediate_exit` and
//! sends its thread a signal: before the entry of `KVM_RUN` the one is effective, after it the other
//! (`Documentation/virt/kvm/api.rst`, on `immediate_exit`). Both happen under the gate's lock, as does clearing `immediate_exit`
//! when the vCPU continues, so no request is lost.

use crate::clock::Clock;
use crate::error::Error;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

/// The sum of the time in which throttling holds the vCPUs and the time in which it lets them run.
const THROTTLE_PERIOD: Duration = Duration::from_millis(10);
/// If the vCPUs ran for longer than intended, at most this many times the intended time is compensated.
const MAX_OVERRUN: u32 = 20;
/// The vCPUs always run at least this long at a time: less would be spent on starting.
const MIN_THROTTLE_RUN: Duration = Duration::from_millis(1);

/// The gate of one machine.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    paused: bool,
    /// Throttling holds the vCPUs.
    held: bool,
    percent: u8,
    quit: bool,
    vcpus: Vec<Vcpu>,
    clock: Clock,
    failed: Option<(usize, String)>,
    /// How often a vCPU has made progress.
    progress: u64,
    /// Threads in `wait_until`.
    waiting: usize,
}

#[derive(Debug, Default)]
struct Vcpu {
    inside: bool,
    /// Its thread, while it can be signalled.
    thread: Option<libc::pthread_t>,
    /// `immediate_exit` in its `kvm_run`, while its thread runs.
    immediate_exit: Option<NonNull<AtomicU8>>,
}

// SAFETY: the pointers are to atomics in memory that is mapped as long as they exist, see `enlist`.
unsafe impl Send for State {}

impl Vcpu {
    /// Cancels a request to leave the guest.
    fn cancel_exit(&self) {
        if let Some(immediate_exit) = self.immediate_exit {
            // SAFETY: valid as long as it exists, by the promise of `enlist`.
            unsafe { immediate_exit.as_ref() }.store(0, Ordering::Relaxed);
        }
    }
}

impl State {
    fn stops(&self) -> bool {
        self.paused || self.held || self.quit
    }

    fn kick(&self) {
        for vcpu in self.vcpus.iter().filter(|vcpu| vcpu.inside) {
            if let Some(immediate_exit) = vcpu.immediate_exit {
                // SAFETY: valid as long as it exists, by the promise of `enlist`.
                unsafe { immediate_exit.as_ref() }.store(1, Ordering::Relaxed);
            }
            if let Some(thread) = vcpu.thread {
                // SAFETY: the thread takes itself off the list before it ends, under the lock that is held here. It fails
                // only for signals that do not exist.
                unsafe { libc::pthread_kill(thread, kick_signal()) };
            }
        }
    }
}

/// The signal that gets a thread out of `KVM_RUN`.
fn kick_signal() -> c_int {
    libc::SIGRTMIN()
}

/// The handler does nothing: only the arrival of the signal matters.
extern "C" fn nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Gate {
    /// Creates a closed gate for this number of vCPUs.
    pub(crate) fn new(vcpus: usize) -> Result<Self, Error> {
        static HANDLER: Once = Once::new();
        let mut registered = Ok(());
        HANDLER.call_once(|| registered = vmm_sys_util::signal::register_signal_handler(kick_signal(), nothing));
        registered.map_err(Error::system("register the signal that stops vCPUs"))?;
        let state = State {
            paused: true,
            held: false,
            percent: 0,
            quit: false,
            vcpus: (0..vcpus).map(|_| Vcpu::default()).collect(),
            clock: Clock::default(),
            failed: None,
            progress: 0,
            waiting: 0,
        };
        Ok(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent even after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    // Called by vCPU threads.

    /// Registers this thread as the one of `vcpu`, until [`Self::retire`].
    ///
    /// # Safety
    /// `immediate_exit` is valid until then.
    pub(crate) unsafe fn enlist(&self, vcpu: usize, immediate_exit: Option<NonNull<AtomicU8>>) {
        let entry = &mut self.lock().vcpus[vcpu];
        // SAFETY: has no preconditions.
        entry.thread = Some(unsafe { libc::pthread_self() });
        entry.immediate_exit = immediate_exit;
    }

    /// Removes the thread of `vcpu`.
    pub(crate) fn retire(&self, vcpu: usize) {
        self.lock().vcpus[vcpu] = Vcpu::default();
        self.changed.notify_all();
    }

    /// Waits until the vCPU may run. Returns false if its thread must end.
    pub(crate) fn enter(&self, vcpu: usize) -> bool {
        let mut state = self.lock();
        while !state.quit && state.stops() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let entry = &mut state.vcpus[vcpu];
        entry.inside = true;
        entry.cancel_exit();
        !state.quit
    }

    /// Returns whether the vCPU must leave the guest. If not, it may enter again, even after a request to leave that is obsolete by
    /// now.
    pub(crate) fn stops(&self, vcpu: usize) -> bool {
        let state = self.lock();
        let stops = state.stops();
        if !stops {
            state.vcpus[vcpu].cancel_exit();
        }
        stops
    }

    /// Records that the vCPU has left the guest and that its state is complete.
    pub(crate) fn leave(&self, vcpu: usize) {
        self.lock().vcpus[vcpu].inside = false;
        self.changed.notify_all();
    }

    /// Waits for `time`, but not longer than the vCPU may run.
    pub(crate) fn rest(&self, time: Duration) {
        let end = Instant::now() + time;
        let mut state = self.lock();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.stops() {
                return;
            }
            state = self.wait(state, left);
        }
    }

    /// Records that a vCPU has made progress, and wakes the threads that wait for it. Returns the guest's time.
    pub(crate) fn progress(&self) -> u64 {
        let mut state = self.lock();
        state.progress = state.progress.wrapping_add(1);
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        state.clock.now()
    }

    /// Records that the vCPU cannot continue, and stops all others.
    pub(crate) fn fail(&self, vcpu: usize, why: String) {
        let mut state = self.lock();
        state.failed.get_or_insert((vcpu, why));
        state.paused = true;
        state.kick();
        self.changed.notify_all();
    }

    // Called by the machine's owner.

    fn check(state: &State) -> Result<(), Error> {
        match &state.failed {
            Some((vcpu, why)) => Err(Error::Vcpu { vcpu: *vcpu, why: why.clone() }),
            None => Ok(()),
        }
    }

    /// Stops all vCPUs. When this returns, none runs, even after an error.
    pub(crate) fn pause(&self) -> Result<(), Error> {
        let mut state = self.lock();
        state.paused = true;
        state.kick();
        self.changed.notify_all();
        while state.vcpus.iter().any(|vcpu| vcpu.inside) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.clock.stop();
        Self::check(&state)
    }

    pub(crate) fn resume(&self) -> Result<(), Error> {
        let mut state = self.lock();
        Self::check(&state)?;
        state.paused = false;
        state.clock.run();
        self.changed.notify_all();
        Ok(())
    }

    /// Returns whether the machine is paused.
    pub(crate) fn is_paused(&self) -> bool {
        let state = self.lock();
        state.paused && !state.vcpus.iter().any(|vcpu| vcpu.inside)
    }

    /// Holds the vCPUs for `percent` of the time, 0 to 99.
    pub(crate) fn throttle(&self, percent: u8) {
        self.lock().percent = percent;
        self.changed.notify_all();
    }

    pub(crate) fn clock(&self) -> u64 {
        self.lock().clock.now()
    }

    pub(crate) fn set_clock(&self, nanoseconds: u64) {
        self.lock().clock = Clock::at(nanoseconds);
    }

    /// Waits until `reached` returns true; it is called whenever a vCPU has made progress. Returns false at the deadline.
    pub(crate) fn wait_until(&self, deadline: Instant, mut reached: impl FnMut() -> bool) -> Result<bool, Error> {
        self.lock().waiting += 1;
        let result = loop {
            let seen = self.lock().progress;
            // Without the lock: `reached` may call the gate, too.
            if reached() {
                break Ok(true);
            }
            let mut state = self.lock();
            let mut left = deadline.saturating_duration_since(Instant::now());
            while state.progress == seen && state.failed.is_none() && !left.is_zero() {
                state = self.wait(state, left);
                left = deadline.saturating_duration_since(Instant::now());
            }
            match Self::check(&state) {
                Ok(()) if left.is_zero() => break Ok(false),
                Ok(()) => {}
                Err(error) => break Err(error),
            }
        };
        self.lock().waiting -= 1;
        result
    }

    /// Ends all threads, also the one in [`Self::run_throttle`].
    pub(crate) fn quit(&self) {
        let mut state = self.lock();
        state.quit = true;
        state.kick();
        self.changed.notify_all();
    }

    /// Throttles until [`Self::quit`]; on a thread of its own.
    pub(crate) fn run_throttle(&self) {
        let mut state = self.lock();
        while !state.quit {
            if state.percent == 0 || state.paused {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (percent, begun) = (state.percent, Instant::now());
            state = self.until(state, slices(percent).1, percent);
            state.held = true;
            state.kick();
            // Also wakes vCPUs that rest.
            self.changed.notify_all();
            while !state.quit && state.vcpus.iter().any(|vcpu| vcpu.inside) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            // On a busy machine this thread may be late: the vCPUs have then run for longer, and are held for longer.
            state = self.until(state, hold_after(begun.elapsed(), percent), percent);
            state.held = false;
            self.changed.notify_all();
        }
    }

    /// Waits for `time`, or until the throttling changes.
    fn until<'a>(&self, mut state: MutexGuard<'a, State>, time: Duration, percent: u8) -> MutexGuard<'a, State> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.quit || state.percent != percent {
                return state;
            }
            state = self.wait(state, left);
        }
    }
}

/// Returns how long vCPUs are held and then run, at `percent`.
fn slices(percent: u8) -> (Duration, Duration) {
    let percent = u32::from(percent.min(99));
    let run = (THROTTLE_PERIOD * (100 - percent) / 100).max(MIN_THROTTLE_RUN);
    (run * percent / (100 - percent), run)
}

/// Returns how long vCPUs are held after they have run for `ran`.
fn hold_after(ran: Duration, percent: u8) -> Duration {
    let (hold, run) = slices(percent);
    hold.mul_f64((ran.as_secs_f64() / run.as_secs_f64()).min(f64::from(MAX_OVERRUN)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn throttling_holds_for_the_percentage_and_runs_at_least_a_millisecond() {
        for percent in 1..=99 {
            let (hold, run) = slices(percent);
            let share = hold.as_secs_f64() / (hold + run).as_secs_f64();
            assert!((share - f64::from(percent) / 100.0).abs() < 0.001, "{percent}: {share}");
            assert!(run >= MIN_THROTTLE_RUN);
            assert!(hold + run >= THROTTLE_PERIOD - Duration::from_micros(1));
        }
        assert_eq!(slices(50), (Duration::from_millis(5), Duration::from_millis(5)));
        assert_eq!(slices(99), (Duration::from_millis(99), Duration::from_millis(1)));
        assert_eq!(hold_after(Duration::from_millis(15), 50), Duration::from_millis(15));
        assert_eq!(hold_after(Duration::from_secs(9), 99), Duration::from_millis(99 * u64::from(MAX_OVERRUN)));
    }

    /// Runs a vCPU that counts.
    fn counts(gate: &Gate, vcpu: usize, count: &AtomicU64) {
        // SAFETY: there is no `immediate_exit`.
        unsafe { gate.enlist(vcpu, None) };
        while gate.enter(vcpu) {
            while !gate.stops(vcpu) {
                count.fetch_add(1, Ordering::Relaxed);
                gate.progress();
            }
            gate.leave(vcpu);
        }
        gate.leave(vcpu);
        gate.retire(vcpu);
    }

    #[test]
    fn paused_vcpus_stop_and_resumed_ones_continue() {
        let gate = Gate::new(2).expect("made");
        let count = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for vcpu in 0..2 {
                let (gate, count) = (&gate, &count);
                scope.spawn(move || counts(gate, vcpu, count));
            }
            scope.spawn(|| gate.run_throttle());
            for percent in [0, 0, 80, 99, 0] {
                gate.throttle(percent);
                let before = count.load(Ordering::Relaxed);
                gate.resume().expect("not failed");
                let reached = || count.load(Ordering::Relaxed) > before + 100;
                assert!(gate.wait_until(Instant::now() + Duration::from_secs(300), reached).expect("not failed"));
                gate.pause().expect("not failed");
                assert!(gate.is_paused());
                let (held, time) = (count.load(Ordering::Relaxed), gate.clock());
                std::thread::yield_now();
                assert_eq!((count.load(Ordering::Relaxed), gate.clock()), (held, time));
            }
            gate.quit();
        });
    }

    #[test]
    fn a_vcpu_that_notices_too_late_that_it_was_held_runs_on() {
        let gate = Gate::new(1).expect("made");
        gate.resume().expect("not failed");
        let immediate_exit = AtomicU8::new(0);
        // SAFETY: lives longer than the gate is used.
        unsafe { gate.enlist(0, Some(NonNull::from(&immediate_exit))) };
        assert!(gate.enter(0));
        gate.lock().held = true;
        gate.lock().kick();
        assert_eq!(immediate_exit.load(Ordering::Relaxed), 1);
        assert!(gate.stops(0));
        assert_eq!(immediate_exit.load(Ordering::Relaxed), 1);
        gate.lock().held = false;
        assert!(!gate.stops(0));
        assert_eq!(immediate_exit.load(Ordering::Relaxed), 0, "it would never enter the guest");
        gate.leave(0);
        gate.retire(0);
    }

    #[test]
    fn a_failed_vcpu_stops_the_others_and_is_reported_to_every_caller() {
        let gate = Gate::new(1).expect("made");
        gate.resume().expect("not failed");
        gate.fail(0, "because".to_owned());
        for error in [gate.pause(), gate.resume(), gate.wait_until(Instant::now(), || false).map(drop)] {
            assert_eq!(error.expect_err("failed").to_string(), "vCPU 0 stopped: because");
        }
        assert!(gate.is_paused());
    }
}
