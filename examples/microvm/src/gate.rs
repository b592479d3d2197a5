//! When vCPUs run: pause and resume, throttling, and what ends a machine.
//!
//! Each vCPU thread asks at the gate before it enters the guest. To have one leave the guest, the gate sets its
//! `immediate_exit` and sends it a signal: whichever side of `KVM_RUN`'s entry it is on, one of the two gets it out
//! (`Documentation/virt/kvm/api.rst`, on `immediate_exit`). Both are done under the gate's lock, and so is clearing it
//! when the vCPU goes on, so no request is lost.

use crate::clock::Clock;
use crate::error::Error;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

/// How long throttling holds and runs the vCPUs, together.
const THROTTLE_PERIOD: Duration = Duration::from_millis(10);
/// They are never taken to have run for longer than this many times what was meant.
const MOST_LATE: u32 = 20;
/// They run at least so long at a time, however much they are throttled: less would be spent on starting.
const THROTTLE_RUN: Duration = Duration::from_millis(1);

/// Of one machine.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    paused: bool,
    /// By throttling.
    held: bool,
    percent: u8,
    quit: bool,
    vcpus: Vec<Vcpu>,
    clock: Clock,
    failed: Option<(usize, String)>,
    /// How often a vCPU got somewhere.
    progress: u64,
    /// Threads in `wait_until`.
    waiting: usize,
}

#[derive(Debug, Default)]
struct Vcpu {
    inside: bool,
    /// Its thread, while that is there to be signalled.
    thread: Option<libc::pthread_t>,
    /// `immediate_exit` in its `kvm_run`, while its thread is there.
    immediate_exit: Option<NonNull<AtomicU8>>,
}

// SAFETY: the pointers are to atomics in memory that is mapped while they are there, see `enlist`.
unsafe impl Send for State {}

impl Vcpu {
    /// Takes back that it is to leave.
    fn let_in(&self) {
        if let Some(immediate_exit) = self.immediate_exit {
            // SAFETY: valid while it is there, by the promise of `enlist`.
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
                // SAFETY: valid while it is there, by the promise of `enlist`.
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

/// That the signal arrives is all that is wanted of it.
extern "C" fn nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Gate {
    /// Closed, for so many vCPUs.
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
        // What is in there is as good after a panic as before.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, most: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
    }

    // What vCPU threads call.

    /// This thread runs vCPU `vcpu` from now on, until [`Self::retire`].
    ///
    /// # Safety
    /// `immediate_exit` is valid until then.
    pub(crate) unsafe fn enlist(&self, vcpu: usize, immediate_exit: Option<NonNull<AtomicU8>>) {
        let entry = &mut self.lock().vcpus[vcpu];
        // SAFETY: has no preconditions.
        entry.thread = Some(unsafe { libc::pthread_self() });
        entry.immediate_exit = immediate_exit;
    }

    /// This thread does not run `vcpu` any more.
    pub(crate) fn retire(&self, vcpu: usize) {
        self.lock().vcpus[vcpu] = Vcpu::default();
        self.changed.notify_all();
    }

    /// Waits until the vCPU may run. No: its thread is to end.
    pub(crate) fn enter(&self, vcpu: usize) -> bool {
        let mut state = self.lock();
        while !state.quit && state.stops() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let entry = &mut state.vcpus[vcpu];
        entry.inside = true;
        entry.let_in();
        !state.quit
    }

    /// Whether the vCPU is to leave the guest. If not, it may enter it again: also where it was asked to leave, but is so
    /// late that it need not any more.
    pub(crate) fn stops(&self, vcpu: usize) -> bool {
        let state = self.lock();
        let stops = state.stops();
        if !stops {
            state.vcpus[vcpu].let_in();
        }
        stops
    }

    /// The vCPU has left the guest, and everything that it did is done.
    pub(crate) fn leave(&self, vcpu: usize) {
        self.lock().vcpus[vcpu].inside = false;
        self.changed.notify_all();
    }

    /// Waits, but not longer than the vCPU may run.
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

    /// A vCPU got somewhere: who waits for that looks again. Returns the guest's time.
    pub(crate) fn progress(&self) -> u64 {
        let mut state = self.lock();
        state.progress = state.progress.wrapping_add(1);
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        state.clock.now()
    }

    /// The vCPU cannot go on. All others stop.
    pub(crate) fn fail(&self, vcpu: usize, why: String) {
        let mut state = self.lock();
        state.failed.get_or_insert((vcpu, why));
        state.paused = true;
        state.kick();
        self.changed.notify_all();
    }

    // What the machine's owner calls.

    fn check(state: &State) -> Result<(), Error> {
        match &state.failed {
            Some((vcpu, why)) => Err(Error::Vcpu { vcpu: *vcpu, why: why.clone() }),
            None => Ok(()),
        }
    }

    /// Stops all vCPUs; when this returns, none runs, also if it returns an error.
    pub(crate) fn pause(&self) -> Result<(), Error> {
        let mut state = self.lock();
        state.paused = true;
        state.kick();
        self.changed.notify_all();
        while state.vcpus.iter().any(|vcpu| vcpu.inside) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.clock.stand();
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

    /// Whether the machine is paused.
    pub(crate) fn is_paused(&self) -> bool {
        let state = self.lock();
        state.paused && !state.vcpus.iter().any(|vcpu| vcpu.inside)
    }

    /// Holds the vCPUs for so many percent of the time, 0 to 99.
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

    /// Waits until `reached` says so, which is asked whenever vCPUs get somewhere; no: not by the deadline.
    pub(crate) fn wait_until(&self, deadline: Instant, mut reached: impl FnMut() -> bool) -> Result<bool, Error> {
        self.lock().waiting += 1;
        let result = loop {
            let seen = self.lock().progress;
            // Without the lock: whoever asks may ask the gate, too.
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
            // Also who rests.
            self.changed.notify_all();
            while !state.quit && state.vcpus.iter().any(|vcpu| vcpu.inside) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            // On a busy machine this thread may come late: then they have run for longer, and are held for longer.
            state = self.until(state, hold_after(begun.elapsed(), percent), percent);
            state.held = false;
            self.changed.notify_all();
        }
    }

    /// Waits for `time`, or until something else is asked of throttling.
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

/// How long vCPUs are held and then run, at so many percent.
fn slices(percent: u8) -> (Duration, Duration) {
    let percent = u32::from(percent.min(99));
    let run = (THROTTLE_PERIOD * (100 - percent) / 100).max(THROTTLE_RUN);
    (run * percent / (100 - percent), run)
}

/// How long vCPUs are held that have run for so long.
fn hold_after(ran: Duration, percent: u8) -> Duration {
    let (hold, run) = slices(percent);
    hold.mul_f64((ran.as_secs_f64() / run.as_secs_f64()).min(f64::from(MOST_LATE)))
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
            assert!(run >= THROTTLE_RUN);
            assert!(hold + run >= THROTTLE_PERIOD - Duration::from_micros(1));
        }
        assert_eq!(slices(50), (Duration::from_millis(5), Duration::from_millis(5)));
        assert_eq!(slices(99), (Duration::from_millis(99), Duration::from_millis(1)));
        assert_eq!(hold_after(Duration::from_millis(15), 50), Duration::from_millis(15));
        assert_eq!(hold_after(Duration::from_secs(9), 99), Duration::from_millis(99 * u64::from(MOST_LATE)));
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
    fn paused_vcpus_stand_and_resumed_ones_go_on() {
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
                assert!(gate.wait_until(Instant::now() + Duration::from_secs(20), reached).expect("not failed"));
                gate.pause().expect("not failed");
                assert!(gate.is_paused());
                let (stood, time) = (count.load(Ordering::Relaxed), gate.clock());
                std::thread::yield_now();
                assert_eq!((count.load(Ordering::Relaxed), gate.clock()), (stood, time));
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
    fn a_failed_vcpu_stops_the_others_and_is_told_to_all_who_ask() {
        let gate = Gate::new(1).expect("made");
        gate.resume().expect("not failed");
        gate.fail(0, "because".to_owned());
        for error in [gate.pause(), gate.resume(), gate.wait_until(Instant::now(), || false).map(drop)] {
            assert_eq!(error.expect_err("failed").to_string(), "vCPU 0 stopped: because");
        }
        assert!(gate.is_paused());
    }
}
