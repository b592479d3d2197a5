//! Slows threads of another process down: holds them by ptrace(2) for a slice of time, lets them run for a slice, and so on.
//!
//! A control group's `cpu.max` would do the same, but its limit would stay if this program were killed. The kernel releases a thread that is
//! held by ptrace(2) whenever its tracer ends. The threads are attached to only while they are held: in between they run without a tracer,
//! and need no handling of their signals.
//!
//! One thread of this program does all of this ([`Slower`]), because the kernel accepts ptrace(2) requests only from the thread that attached.
//! A thread that has not stopped by the end of the slice cannot be detached. It is detached as soon as it stops, or by the end of the
//! tracing thread.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libc::c_int;

use crate::system::{self, Resume, Tid};
use crate::tracee::{self, LIMIT};
use crate::{AttachError, Process, StoppedAt};

/// How long the threads run between two slices in which they are held, as in QEMU's own throttle (`CPU_THROTTLE_TIMESLICE_NS` in
/// system/cpu-throttle.c).
const RUN_SLICE: Duration = Duration::from_millis(10);
/// The longest slice in which threads are held. QEMU's own throttle holds for 990 ms at 99 %, which disturbs a guest's timers.
const MAX_HOLD_SLICE: Duration = Duration::from_millis(100);
/// The largest share of the time in which threads are held, percent.
const MAX_PERCENT: u8 = 99;
/// How long to wait for requested stops before other work.
const STOPPING_TIME: Duration = Duration::from_millis(2);
/// How long such a wait spins before it sleeps, and its longest sleep.
const SPIN: Duration = Duration::from_micros(20);
const MAX_PAUSE: Duration = Duration::from_micros(200);
/// First interval after which a thread that could not be held is stopped again; it doubles each time.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// The longest such interval, and the interval of polling a thread that has not stopped.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The pause before a poll is at least this many times as long as the poll before it took.
const MIN_PAUSE_RATIO: u32 = 4;
/// After this time without a stop a thread is checked for its end, of which ptrace(2) gives no report.
const MAY_HAVE_ENDED: Duration = Duration::from_millis(20);
/// How long a process may take to die, or to become another program, once its threads have begun to end.
const TRANSITION: Duration = Duration::from_millis(250);
/// How long the tracing thread may take for one order. It needs far less, unless it is blocked in the kernel.
const PATIENCE: Duration = LIMIT.saturating_mul(3);
/// The step in progress, for errors.
const DURING: &str = "its threads were slowed down";

/// Statistics of a [`Slowdown`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlowdownStats {
    /// Completed slices in which threads were to be held.
    pub slices: u64,
    /// How long threads were held in these slices, summed over all threads.
    pub time: Duration,
    /// How often a thread was stopped at a place where it may not be held, and released at once.
    pub let_run: u64,
}

/// Holds threads of another process for a share of the time. When this is dropped, all of them run, and none is traced.
///
/// All threads are held at the same time. They run for 10 ms at a time; a slice in which they are held lasts 100 ms at most, so above 91 %
/// they run for less than 10 ms at a time (1 ms at 99 %). A system call that is interrupted by a stop continues by the same rules as for
/// [`Process::stop`]: it is run again, with the remaining time, or returns `EINTR` according to signal(7), as ioctl(2) with `KVM_RUN`
/// does.
///
/// During a slice no debugger can attach to the threads. If the tracing thread gets no CPU, or this program is stopped (SIGSTOP), a slice
/// lasts until it runs again. If this program ends for any reason, the kernel releases the threads.
///
/// Not for a program that calls execve(2) while it has several threads: attaching to its threads and the exec may wait for each other in
/// the kernel until this program ends.
#[derive(Debug)]
pub struct Slowdown {
    process: Process,
    orders: Option<Sender<Order>>,
    ended: Receiver<Ended>,
    thread: Option<JoinHandle<()>>,
    held: Arc<Mutex<SlowdownStats>>,
}

/// Sets another share of the time. It is acknowledged when no thread is held any more.
struct Order {
    percent: u8,
    done: Sender<()>,
}

/// How the tracing thread has ended.
#[derive(Debug)]
struct Ended {
    tracer: Tid,
    /// Threads that had not stopped yet, and are detached by the end of the tracing thread.
    left: Vec<Tid>,
    failure: Option<Failure>,
}

/// Why the tracing thread has ended by itself.
#[derive(Debug)]
struct Failure {
    tid: Tid,
    what: &'static str,
    source: std::io::Error,
}

impl Process {
    /// Holds these threads of the process for `percent` of the time (0 to 99, more counts as 99) until the returned value is dropped. The
    /// first slice begins at once. `may_hold` is called, on the tracing thread, for each thread that has stopped. If it returns false, the
    /// thread runs on and is stopped again 0.1 to 1 ms later, as long as the slice lasts.
    ///
    /// With 0 % no thread is traced.
    ///
    /// # Errors
    /// [`AttachError::ThreadEnded`] if a number is not that of a thread of the process; [`AttachError::AlreadyTraced`];
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
        let held = Arc::new(Mutex::new(SlowdownStats::default()));
        let (process, statistics) = (self.clone(), Arc::clone(&held));
        let threads = threads.iter().map(|&tid| Thread { tid, state: State::Free }).collect();
        let run = move || {
            system::be_prompt();
            let tracer = system::this_thread();
            let mut slower = Slower { process, threads, may_hold, held: statistics };
            let failure = slower.run(&orders_out).err();
            let left = slower.finish();
            // An owner that waits no longer has dropped the receiver.
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
    /// Changes the share of the time, 0 to 99 percent. When this returns, slices have the new length; with 0 % all threads run.
    ///
    /// # Errors
    /// Why the threads are not held any more, as for [`Slowdown::check`].
    pub fn set(self, percent: u8) -> Result<Slowdown, AttachError> {
        let (done, answer) = mpsc::channel();
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(Order { percent, done }).is_ok());
        if sent && answer.recv_timeout(PATIENCE).is_ok() {
            return Ok(self);
        }
        Err(self.failure())
    }

    /// Checks that the threads are still held for their share of the time.
    ///
    /// # Errors
    /// Why they are not: [`AttachError::ThreadEnded`] if one of them has ended, [`AttachError::AlreadyTraced`] if a debugger has
    /// attached, [`AttachError::NotPermitted`], [`AttachError::Ended`], [`AttachError::Io`]. All threads run then.
    pub fn check(self) -> Result<Slowdown, AttachError> {
        match self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            true => Ok(self),
            false => Err(self.failure()),
        }
    }

    /// Returns the statistics so far.
    #[must_use]
    pub fn held(&self) -> SlowdownStats {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns why the tracing thread has ended by itself, or does not answer.
    fn failure(mut self) -> AttachError {
        let pid = self.process.pid();
        match self.end() {
            Some(Failure { tid, what, source }) => explain(&self.process, tid, what, source),
            None if self.process.has_ended() => AttachError::Ended { pid, during: DURING },
            None => AttachError::Io {
                pid,
                what: "slow its threads down",
                source: std::io::Error::other("the thread that holds them does not answer"),
            },
        }
    }

    /// Ends the tracing thread, and waits until the kernel has detached all threads.
    fn end(&mut self) -> Option<Failure> {
        self.orders = None;
        let thread = self.thread.take()?;
        let Ok(Ended { tracer, left, failure }) = self.ended.recv_timeout(PATIENCE) else {
            // The thread has panicked, so the kernel has detached all, or it is blocked in the kernel, and joining it would block as long.
            tracing::warn!(pid = self.process.pid(), "the thread that slows threads down does not end");
            return None;
        };
        // The thread has nothing left to do. A panic has been printed.
        let _ = thread.join();
        let SlowdownStats { slices, time, let_run } = self.held();
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

/// Returns the error that a failed request for a thread means. The tracing thread has ended.
fn explain(process: &Process, tid: Tid, what: &'static str, source: std::io::Error) -> AttachError {
    let pid = process.pid();
    let deadline = Instant::now() + TRANSITION;
    // Threads end before their process, and an ending thread may not be traced any more: the cause becomes visible a little later.
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

/// How long threads run and how long they are held, alternately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slices {
    run: Duration,
    hold: Duration,
}

impl Slices {
    /// Returns the slices for `percent`; none for 0 %.
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
    /// Attached to since then, and asked to stop.
    Stopping(Instant),
    /// Stopped; attached to since then.
    SlowdownStats(Instant),
}

/// Why a wait has ended.
enum Woken {
    TimeIsUp,
    Ordered(Order),
    /// The owner has dropped the slowdown.
    Dropped,
}

/// The state of the tracing thread.
struct Slower<F> {
    process: Process,
    threads: Vec<Thread>,
    may_hold: F,
    held: Arc<Mutex<SlowdownStats>>,
}

impl<F: FnMut(&StoppedAt) -> bool> Slower<F> {
    /// Runs until the owner drops the slowdown, or a request fails. Threads may still be held then.
    fn run(&mut self, orders: &Receiver<Order>) -> Result<(), Failure> {
        let mut slices: Option<Slices> = None;
        // The first order is acknowledged after its first slice has begun, so that its caller gets any error.
        let mut first = true;
        loop {
            let woken = match slices {
                Some(Slices { run, .. }) => self.let_run(run, orders)?,
                None => self.wait_for_order(orders)?,
            };
            match woken {
                Woken::Dropped => return Ok(()),
                Woken::Ordered(Order { percent, done }) => {
                    slices = Slices::of(percent);
                    if std::mem::take(&mut first) && slices.is_some() {
                        self.stop_free_threads()?;
                    }
                    // An owner that waits no longer has dropped the receiver.
                    let _ = done.send(());
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
                Woken::Ordered(Order { percent, done }) => {
                    slices = Slices::of(percent);
                    let _ = done.send(());
                }
                Woken::Dropped => return Ok(()),
            }
        }
    }

    /// Lets the threads run for `time`. Threads that stop only now are released at once.
    fn let_run(&mut self, time: Duration, orders: &Receiver<Order>) -> Result<Woken, Failure> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let woken = match self.is_stopping() {
                true => wait(orders, left.min(MAX_POLL_INTERVAL)),
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
        while self.is_stopping() {
            match wait(orders, MAX_POLL_INTERVAL) {
                Woken::TimeIsUp => self.take_stops(false)?,
                woken => return Ok(woken),
            }
        }
        Ok(orders.recv().map_or(Woken::Dropped, Woken::Ordered))
    }

    /// Holds the threads until `time` has passed, each from the moment at which it is found where it may be held.
    fn hold(&mut self, time: Duration, orders: &Receiver<Order>) -> Result<Woken, Failure> {
        let until = Instant::now() + time;
        let mut interval = MIN_POLL_INTERVAL;
        loop {
            let begun = Instant::now();
            self.stop_free_threads()?;
            let now = Instant::now();
            let left = until.saturating_duration_since(now);
            let all = self.threads.iter().all(|thread| matches!(thread.state, State::SlowdownStats(_)));
            let next = if all { left } else { left.min(interval.max((now - begun) * MIN_PAUSE_RATIO)) };
            interval = (interval * 2).min(MAX_POLL_INTERVAL);
            match wait(orders, next) {
                Woken::TimeIsUp if Instant::now() < until => {}
                woken => return Ok(woken),
            }
        }
    }

    /// Stops all free threads. Those that may not be held where they were are free again.
    fn stop_free_threads(&mut self) -> Result<(), Failure> {
        for thread in self.threads.iter_mut().filter(|thread| thread.state == State::Free) {
            let tid = thread.tid;
            system::seize(tid, 0).map_err(failed(tid, "attach to a thread of it"))?;
            thread.state = State::Stopping(Instant::now());
            // The number means another process's thread by now, which is not stopped, and detached by the end of this thread.
            if !self.process.has_thread(tid) {
                return Err(ended(tid, "attach to a thread of it"));
            }
        }
        // Interrupted together, so that all are held at the same time.
        for Thread { tid, state } in &self.threads {
            if matches!(state, State::Stopping(_)) {
                system::interrupt(*tid).map_err(failed(*tid, "stop a thread of it"))?;
            }
        }
        let begun = Instant::now();
        let mut pause = SPIN;
        loop {
            self.take_stops(true)?;
            let waited = begun.elapsed();
            if !self.is_stopping() || waited >= STOPPING_TIME {
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

    /// Takes the reports of threads that have stopped. With `hold`, holds those that may be held where they are, and releases the others.
    fn take_stops(&mut self, hold: bool) -> Result<(), Failure> {
        for Thread { tid, state } in &mut self.threads {
            let State::Stopping(since) = *state else { continue };
            let stop = match system::take_stop(*tid) {
                Ok(Some(stop)) => stop,
                Ok(None) if since.elapsed() < MAY_HAVE_ENDED || !self.process.thread_has_ended(*tid) => continue,
                Ok(None) => return Err(ended(*tid, "stop a thread of it")),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                Err(error) => return Err(failed(*tid, "wait for the stop of a thread of it")(error)),
            };
            let (signal, event) = (stop & 0xff, stop >> 8);
            let is_interrupted = event == libc::PTRACE_EVENT_STOP && signal == libc::SIGTRAP;
            // A process that is stopped by job control (SIGSTOP) may be held: its threads would not run anyway.
            let may_be_held = match event == libc::PTRACE_EVENT_STOP {
                true if is_interrupted => {
                    let at = tracee::at_rest(*tid).map_err(failed(*tid, "read the registers of a thread of it"))?;
                    at.is_some_and(|at| (self.may_hold)(&at))
                }
                stopped_by_job_control => stopped_by_job_control,
            };
            if hold && may_be_held {
                *state = State::SlowdownStats(since);
                continue;
            }
            // Detaching delivers a signal that was about to be delivered.
            let signal = if event == 0 { signal } else { 0 };
            detach(*tid, signal)?;
            *state = State::Free;
            if hold {
                self.held.lock().unwrap_or_else(PoisonError::into_inner).let_run += 1;
            }
        }
        Ok(())
    }

    /// Releases all held threads.
    fn release(&mut self) -> Result<(), Failure> {
        let mut outcome = Ok(());
        for index in 0..self.threads.len() {
            let Thread { tid, state: State::SlowdownStats(since) } = self.threads[index] else { continue };
            // The other threads are released even if this one fails.
            outcome = outcome.and(detach(tid, 0));
            self.threads[index].state = State::Free;
            self.held().time += since.elapsed();
        }
        outcome
    }

    /// Releases all held threads. Returns those that only the end of the tracing thread detaches.
    fn finish(&mut self) -> Vec<Tid> {
        // Releasing fails only for a thread that has ended.
        let _ = self.release();
        self.threads.iter().filter(|thread| thread.state != State::Free).map(|thread| thread.tid).collect()
    }

    /// Returns whether a thread was asked to stop and has not stopped yet.
    fn is_stopping(&self) -> bool {
        self.threads.iter().any(|thread| matches!(thread.state, State::Stopping(_)))
    }

    fn held(&self) -> std::sync::MutexGuard<'_, SlowdownStats> {
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

/// Detaches a thread. That wakes it as a signal does, so the kernel's signal code restarts an interrupted system call.
fn detach(tid: Tid, signal: c_int) -> Result<(), Failure> {
    system::resume(tid, Resume::Detach, signal).map_err(failed(tid, "let a thread of it run"))
}

fn failed(tid: Tid, what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |source| Failure { tid, what, source }
}

/// Returns the failure for a thread that has ended, or that belongs to another process.
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
