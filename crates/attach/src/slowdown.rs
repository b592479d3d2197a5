//! Threads of another process, slowed down: held by ptrace(2) for a slice of time, let run for a slice, and so on.
//!
//! A control group's `cpu.max` would do the same, but a limit that was written stays when its writer is killed. A thread that is held by
//! ptrace(2) is let go by the kernel when its tracer ends, however that ends. So the threads are attached to only while they are held:
//! in between they run as if there were no tracer, and signals that come then are of no concern here.
//!
//! One thread of this program does it all ([`Slower`]), because the kernel takes ptrace(2) requests from the thread that attached. A thread
//! that was asked to stop and has not done so by the end of the slice cannot be detached. It is detached as soon as it stops, or by the end
//! of the tracing thread.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libc::{c_int, c_long};

use crate::system::{self, Resume, Tid};
use crate::tracee::{self, LIMIT};
use crate::{AttachError, Process};

/// How long the threads run between two slices in which they are held: QEMU's own throttle has the same slice
/// (`CPU_THROTTLE_TIMESLICE_NS` in system/cpu-throttle.c).
const RUN_SLICE: Duration = Duration::from_millis(10);
/// The longest slice in which threads are held. QEMU's own throttle holds for 990 ms at 99 %, which timers of a guest take badly.
const MAX_HOLD_SLICE: Duration = Duration::from_millis(100);
/// The largest share of the time in which threads are held, percent.
const MAX_PERCENT: u8 = 99;
/// How long the stops that were asked for are waited for at once.
const STOPPING_TIME: Duration = Duration::from_millis(2);
/// How long such a wait does without sleeping, and the longest sleep within it.
const SPIN: Duration = Duration::from_micros(20);
const MAX_PAUSE: Duration = Duration::from_micros(200);
/// After so long a thread that could not be held is looked at again, twice as long each time.
const MIN_BETWEEN_LOOKS: Duration = Duration::from_micros(100);
/// The longest such time, and the time between two looks at a thread that has not stopped.
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
/// The pause before a look is at least so many times as long as the look before it took.
const MIN_PAUSE_RATIO: u32 = 4;
/// A thread that has not stopped after this long may have ended, which no report of a stop says.
const MAY_HAVE_ENDED: Duration = Duration::from_millis(20);
/// How long a process may take to die, or to become another program, once its threads have begun to end.
const TRANSITION: Duration = Duration::from_millis(250);
/// How long the tracing thread may take for one order: it does everything in far less, unless the kernel keeps it.
const PATIENCE: Duration = LIMIT.saturating_mul(3);
/// What is being done, for errors.
const DURING: &str = "its threads were slowed down";

/// Where a thread was when it was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoppedAt {
    /// The address of the instruction that it executes next; behind the `syscall` instruction within a system call.
    pub instruction: u64,
    /// The system call that it was in, and the six arguments; `None` where it ran code of its own.
    pub system_call: Option<(c_long, [u64; 6])>,
}

/// What a [`Slowdown`] has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Slices in which threads were to be held, the one under way not counted.
    pub slices: u64,
    /// How long threads were held in these slices, the sum over all threads.
    pub time: Duration,
    /// How often a thread was found where it may not be held, and let run on at once.
    pub let_run: u64,
}

/// Threads of another process that are held for a share of the time. Dropped: all of them run, and none is attached to.
///
/// All threads are held at the same time. Up to 50 % they run for 10 ms at a time; a slice in which they are held lasts 100 ms at most, so
/// that above 91 % they run for less than 10 ms at a time (1 ms at 99 %). What a thread does in a system call when it is stopped goes
/// on afterwards by the same rules as for [`Process::stop`]: it is run again, with the time that was left, or returns `EINTR` where
/// signal(7) says so, as ioctl(2) with `KVM_RUN` does.
///
/// While a slice lasts no debugger can attach to the threads. Where the thread that holds them does not get a CPU, or this program is
/// stopped (SIGSTOP), a slice lasts until it runs again. Where this program ends, of whatever cause, the kernel lets the threads run.
///
/// Not for a program that executes another one (execve(2)) while it has several threads: attaching to its threads and the exec may wait
/// for each other in the kernel until this program ends.
#[derive(Debug)]
pub struct Slowdown {
    process: Process,
    orders: Option<Sender<Order>>,
    ended: Receiver<Ended>,
    thread: Option<JoinHandle<()>>,
    held: Arc<Mutex<Held>>,
}

/// Another share of the time. The answer comes when no thread is held any more.
struct Order {
    percent: u8,
    obeyed: Sender<()>,
}

/// How the tracing thread has ended.
#[derive(Debug)]
struct Ended {
    tracer: Tid,
    /// Threads that had not stopped yet, and are detached by the end of the thread.
    left: Vec<Tid>,
    failure: Option<Failure>,
}

/// Why it has ended by itself.
#[derive(Debug)]
struct Failure {
    tid: Tid,
    what: &'static str,
    source: std::io::Error,
}

impl Process {
    /// Holds these threads of the process for `percent` of the time (0 to 99, more counts as 99) until the answer is dropped. The first
    /// slice begins at once. `may_hold` is asked, in a thread of its own, about each thread that has stopped: one that may not be held
    /// where it was found runs on, and is stopped again 0.1 to 1 ms later, as long as the slice lasts.
    ///
    /// With 0 % no thread is attached to.
    ///
    /// # Errors
    /// [`AttachError::ThreadEnded`] where a number is not that of a thread of the process; [`AttachError::AlreadyTraced`];
    /// [`AttachError::NotPermitted`]; [`AttachError::Ended`]; [`AttachError::Architecture`]; [`AttachError::Io`]. No thread is held then.
    pub fn slow_down(
        &self,
        threads: &[i32],
        percent: u8,
        may_hold: impl FnMut(&StoppedAt) -> bool + Send + 'static,
    ) -> Result<Slowdown, AttachError> {
        tracee::check_architecture()?;
        if let Some(&tid) = threads.iter().find(|tid| !self.has_thread(**tid)) {
            return Err(AttachError::ThreadEnded { pid: self.pid(), tid });
        }
        let (orders, orders_out) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let held = Arc::new(Mutex::new(Held::default()));
        let (process, stand) = (self.clone(), Arc::clone(&held));
        let threads = threads.iter().map(|&tid| Thread { tid, state: State::Free }).collect();
        let run = move || {
            system::be_prompt();
            let tracer = system::this_thread();
            let mut slower = Slower { process, threads, may_hold, held: stand };
            let failure = slower.run(&orders_out).err();
            let left = slower.let_go();
            // Where the owner has given up waiting there is no receiver.
            let _ = end.send(Ended { tracer, left, failure });
        };
        let thread = std::thread::Builder::new()
            .name("slowdown".into())
            .spawn(run)
            .map_err(|source| AttachError::Io { pid: self.pid(), what: "start a thread that slows it down", source })?;
        let slowdown = Slowdown { process: self.clone(), orders: Some(orders), ended, thread: Some(thread), held };
        slowdown.set(percent)
    }
}

impl Slowdown {
    /// Holds the threads for another share of the time, from 0 to 99 percent. When this returns, slices have the new length; with 0 % all
    /// threads run.
    ///
    /// # Errors
    /// Why the threads are not held any more: as [`Slowdown::check`].
    pub fn set(self, percent: u8) -> Result<Slowdown, AttachError> {
        let (obeyed, answer) = mpsc::channel();
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(Order { percent, obeyed }).is_ok());
        if sent && answer.recv_timeout(PATIENCE).is_ok() {
            return Ok(self);
        }
        Err(self.failure())
    }

    /// Looks whether the threads are still held for their share of the time.
    ///
    /// # Errors
    /// Why they are not any more: [`AttachError::ThreadEnded`] where one of them has ended, [`AttachError::AlreadyTraced`] where a
    /// debugger came, [`AttachError::NotPermitted`], [`AttachError::Ended`], [`AttachError::Io`]. All of them run then.
    pub fn check(self) -> Result<Slowdown, AttachError> {
        match self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            true => Ok(self),
            false => Err(self.failure()),
        }
    }

    /// What was done so far.
    #[must_use]
    pub fn held(&self) -> Held {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the tracing thread has ended by itself, or does not answer.
    fn failure(mut self) -> AttachError {
        let pid = self.process.pid();
        match self.end() {
            Some(Failure { tid, what, source }) => why_lost(&self.process, tid, what, source),
            None if self.process.has_ended() => AttachError::Ended { pid, during: DURING },
            None => AttachError::Io {
                pid,
                what: "slow its threads down",
                source: std::io::Error::other("the thread that holds them does not answer"),
            },
        }
    }

    /// Ends the tracing thread, and waits until the kernel has detached what that had attached to.
    fn end(&mut self) -> Option<Failure> {
        self.orders = None;
        let thread = self.thread.take()?;
        let Ok(Ended { tracer, left, failure }) = self.ended.recv_timeout(PATIENCE) else {
            // It panicked, in which case the kernel has detached all, or waits in the kernel: then joining it would take as long.
            tracing::warn!(pid = self.process.pid(), "the thread that slows threads down does not end");
            return None;
        };
        // It has nothing left to do. A panic has been printed.
        let _ = thread.join();
        let Held { slices, time, let_run } = self.held();
        tracing::debug!(pid = self.process.pid(), slices, ?time, let_run, "threads are not slowed down any more");
        let deadline = Instant::now() + LIMIT;
        let is_traced = |&tid: &Tid| self.process.tracer_of(tid) == tracer;
        while left.iter().any(is_traced) && Instant::now() < deadline {
            std::thread::yield_now();
        }
        failure
    }
}

impl Drop for Slowdown {
    fn drop(&mut self) {
        self.end();
    }
}

/// What a failed request for a thread means. The tracing thread has ended.
fn why_lost(process: &Process, tid: Tid, what: &'static str, source: std::io::Error) -> AttachError {
    let pid = process.pid();
    let deadline = Instant::now() + TRANSITION;
    // Threads end before their process, and one that is about to end may not be traced any more: what it is shows a little later.
    loop {
        if process.has_ended() {
            return AttachError::Ended { pid, during: DURING };
        }
        let tracer = process.tracer_of(tid);
        if tracer != 0 {
            return AttachError::already_traced(pid, tracer);
        }
        if Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if process.thread_has_ended(tid) {
        return AttachError::ThreadEnded { pid, tid };
    }
    match source.raw_os_error() {
        Some(libc::EPERM) => AttachError::NotPermitted { pid, reason: process.why_not_permitted() },
        _ => AttachError::Io { pid, what, source },
    }
}

/// How long threads run, and how long they are held, by turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slices {
    run: Duration,
    hold: Duration,
}

impl Slices {
    /// None for 0 %.
    fn of(percent: u8) -> Option<Slices> {
        let percent = u32::from(percent.min(MAX_PERCENT));
        if percent == 0 {
            return None;
        }
        let hold = RUN_SLICE * percent / (100 - percent);
        if hold <= MAX_HOLD_SLICE {
            return Some(Slices { run: RUN_SLICE, hold });
        }
        Some(Slices { run: MAX_HOLD_SLICE * (100 - percent) / percent, hold: MAX_HOLD_SLICE })
    }
}

/// A thread that is slowed down.
struct Thread {
    tid: Tid,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not attached to.
    Free,
    /// Attached to, and asked to stop.
    Asked(Instant),
    /// Stopped, since then.
    Held(Instant),
}

/// Why a wait has ended.
enum Woken {
    TimeIsUp,
    Ordered(Order),
    /// The owner is gone, or wants the end.
    Dropped,
}

/// What the tracing thread works with.
struct Slower<F> {
    process: Process,
    threads: Vec<Thread>,
    may_hold: F,
    held: Arc<Mutex<Held>>,
}

impl<F: FnMut(&StoppedAt) -> bool> Slower<F> {
    /// Works until the owner wants the end, or something fails. Threads may be left held.
    fn run(&mut self, orders: &Receiver<Order>) -> Result<(), Failure> {
        let mut slices: Option<Slices> = None;
        // The first order is obeyed when its first slice has begun, so that whatever forbids it is its answer.
        let mut first = true;
        loop {
            let woken = match slices {
                Some(Slices { run, .. }) => self.let_run(run, orders)?,
                None => self.wait_for_order(orders)?,
            };
            match woken {
                Woken::Dropped => return Ok(()),
                Woken::Ordered(Order { percent, obeyed }) => {
                    slices = Slices::of(percent);
                    if std::mem::take(&mut first) && slices.is_some() {
                        self.stop_those_that_run()?;
                    }
                    // An owner that has given up waiting hears of nothing.
                    let _ = obeyed.send(());
                }
                Woken::TimeIsUp => {}
            }
            let Some(Slices { hold, .. }) = slices else {
                self.release()?;
                continue;
            };
            let woken = self.hold(hold, orders)?;
            self.release()?;
            self.held().slices += 1;
            match woken {
                Woken::TimeIsUp => {}
                Woken::Ordered(Order { percent, obeyed }) => {
                    slices = Slices::of(percent);
                    let _ = obeyed.send(());
                }
                Woken::Dropped => return Ok(()),
            }
        }
    }

    /// Lets the threads run for so long. Those that stop only now are let go at once.
    fn let_run(&mut self, time: Duration, orders: &Receiver<Order>) -> Result<Woken, Failure> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let woken = match self.asked() {
                true => wait(orders, left.min(BETWEEN_LOOKS)),
                false => wait(orders, left),
            };
            self.take_stops(false)?;
            match woken {
                Woken::TimeIsUp if Instant::now() < until => {}
                woken => return Ok(woken),
            }
        }
    }

    fn wait_for_order(&mut self, orders: &Receiver<Order>) -> Result<Woken, Failure> {
        while self.asked() {
            match wait(orders, BETWEEN_LOOKS) {
                Woken::TimeIsUp => self.take_stops(false)?,
                woken => return Ok(woken),
            }
        }
        Ok(orders.recv().map_or(Woken::Dropped, Woken::Ordered))
    }

    /// Holds the threads for so long, each from the moment on at which it is found where it may be held.
    fn hold(&mut self, time: Duration, orders: &Receiver<Order>) -> Result<Woken, Failure> {
        let until = Instant::now() + time;
        let mut between = MIN_BETWEEN_LOOKS;
        loop {
            let begun = Instant::now();
            self.stop_those_that_run()?;
            let now = Instant::now();
            let left = until.saturating_duration_since(now);
            let all = self.threads.iter().all(|thread| matches!(thread.state, State::Held(_)));
            let next = if all { left } else { left.min(between.max((now - begun) * MIN_PAUSE_RATIO)) };
            between = (between * 2).min(BETWEEN_LOOKS);
            match wait(orders, next) {
                Woken::TimeIsUp if Instant::now() < until => {}
                woken => return Ok(woken),
            }
        }
    }

    /// Stops all threads that are free, and looks where each was. Those that may not be held there are free again.
    fn stop_those_that_run(&mut self) -> Result<(), Failure> {
        for thread in self.threads.iter_mut().filter(|thread| thread.state == State::Free) {
            let tid = thread.tid;
            system::seize(tid, 0).map_err(failed(tid, "attach to a thread of it"))?;
            thread.state = State::Asked(Instant::now());
            // A number that has come to mean another process's thread: attached to, not stopped, and let go with the end of this thread.
            if !self.process.has_thread(tid) {
                return Err(ended(tid, "attach to a thread of it"));
            }
        }
        // All in one go.
        for Thread { tid, state } in &self.threads {
            if matches!(state, State::Asked(_)) {
                system::interrupt(*tid).map_err(failed(*tid, "stop a thread of it"))?;
            }
        }
        let begun = Instant::now();
        let mut pause = SPIN;
        loop {
            self.take_stops(true)?;
            let waited = begun.elapsed();
            if !self.asked() || waited >= STOPPING_TIME {
                return Ok(());
            }
            if waited < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(MAX_PAUSE);
            }
        }
    }

    /// Looks which threads have stopped. `holds`: those that may be held where they are, are.
    fn take_stops(&mut self, holds: bool) -> Result<(), Failure> {
        for Thread { tid, state } in &mut self.threads {
            let State::Asked(since) = *state else { continue };
            let stop = match system::take_stop(*tid) {
                Ok(Some(stop)) => stop,
                Ok(None) if since.elapsed() < MAY_HAVE_ENDED || !self.process.thread_has_ended(*tid) => continue,
                Ok(None) => return Err(ended(*tid, "stop a thread of it")),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => return Err(failed(*tid, "wait for the stop of a thread of it")(error)),
            };
            let (signal, event) = (stop & 0xff, stop >> 8);
            let is_interrupted = event == libc::PTRACE_EVENT_STOP && signal == libc::SIGTRAP;
            // Which includes a process that is stopped by job control (SIGSTOP), whose thread has nowhere to go.
            let may_be_held = match event == libc::PTRACE_EVENT_STOP {
                true if is_interrupted => {
                    let at = tracee::at_rest(*tid).map_err(failed(*tid, "read the registers of a thread of it"))?;
                    at.is_some_and(|at| (self.may_hold)(&at))
                }
                stopped_by_job_control => stopped_by_job_control,
            };
            if holds && may_be_held {
                *state = State::Held(since);
                continue;
            }
            // A signal that was about to be delivered is delivered now.
            let signal = if event == 0 { signal } else { 0 };
            detach(*tid, signal)?;
            *state = State::Free;
            if holds {
                self.held.lock().unwrap_or_else(PoisonError::into_inner).let_run += 1;
            }
        }
        Ok(())
    }

    /// Lets all threads run that are held.
    fn release(&mut self) -> Result<(), Failure> {
        let mut outcome = Ok(());
        for index in 0..self.threads.len() {
            let Thread { tid, state: State::Held(since) } = self.threads[index] else { continue };
            // The others are let go even where this one cannot be.
            outcome = outcome.and(detach(tid, 0));
            self.threads[index].state = State::Free;
            self.held().time += since.elapsed();
        }
        outcome
    }

    /// The end: returns the threads that only the end of this thread detaches.
    fn let_go(&mut self) -> Vec<Tid> {
        // A thread that cannot be let go is one that is no more.
        let _ = self.release();
        self.threads.iter().filter(|thread| thread.state != State::Free).map(|thread| thread.tid).collect()
    }

    /// Whether a thread was asked to stop and has not done so.
    fn asked(&self) -> bool {
        self.threads.iter().any(|thread| matches!(thread.state, State::Asked(_)))
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wait(orders: &Receiver<Order>, time: Duration) -> Woken {
    match orders.recv_timeout(time) {
        Ok(order) => Woken::Ordered(order),
        Err(RecvTimeoutError::Timeout) => Woken::TimeIsUp,
        Err(RecvTimeoutError::Disconnected) => Woken::Dropped,
    }
}

/// Detaching wakes the thread as a signal does, so the kernel's signal code sees its registers and restarts what was interrupted.
fn detach(tid: Tid, signal: c_int) -> Result<(), Failure> {
    system::resume(tid, Resume::Detach, signal).map_err(failed(tid, "let a thread of it run"))
}

fn failed(tid: Tid, what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |source| Failure { tid, what, source }
}

/// The thread is no more, or is another process's.
fn ended(tid: Tid, what: &'static str) -> Failure {
    Failure { tid, what, source: std::io::Error::from_raw_os_error(libc::ESRCH) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_held_for_their_share_and_never_for_longer_than_100_ms() {
        assert_eq!(Slices::of(0), None);
        for percent in 1..=99 {
            let Slices { run, hold } = Slices::of(percent).unwrap();
            assert!(hold <= MAX_HOLD_SLICE && run <= RUN_SLICE && run >= Duration::from_millis(1), "{percent} %");
            let share = hold.as_secs_f64() / (hold + run).as_secs_f64();
            assert!((share - f64::from(percent) / 100.0).abs() < 1e-6, "{percent} %: {share}");
        }
        assert_eq!(Slices::of(50).unwrap().hold, RUN_SLICE);
        assert_eq!(Slices::of(255), Slices::of(99));
    }
}
