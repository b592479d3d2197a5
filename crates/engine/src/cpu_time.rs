//! Measures the CPU time of a migration. Only its own threads count, because the process may be a monitor whose vCPUs
//! are threads too.
//!
//! A thread that is started by [`spawn`] counts for the migration of the thread that starts it.

use std::cell::RefCell;
use std::io;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

use rustix::thread::{Pid, gettid};

use crate::off_cpu::thread_time;

thread_local! {
    /// The migration for which the thread counts.
    static CURRENT: RefCell<Option<CpuTime>> = const { RefCell::new(None) };
}

/// The CPU time of one migration's threads. Clones belong to the same migration.
#[derive(Clone, Debug, Default)]
pub(crate) struct CpuTime {
    state: Arc<Mutex<State>>,
    /// Whether the migration's threads open no files that they can do without.
    sandboxed: bool,
}

#[derive(Debug, Default)]
struct State {
    /// CPU time of threads that have ended, or do not count any more.
    ended: Duration,
    /// The threads that count, each with the CPU time that it had used before.
    running: Vec<(Pid, Duration)>,
    /// CPU time of these threads inside calls that do not count.
    for_others: Duration,
}

impl CpuTime {
    /// Starts at 0. `sandboxed`: the migration's threads open no files that they can do without.
    pub(crate) fn new(sandboxed: bool) -> Self {
        Self { sandboxed, ..Self::default() }
    }

    /// Returns whether the migration's threads open no files that they can do without.
    pub(crate) fn is_sandboxed(&self) -> bool {
        self.sandboxed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("counting does not panic")
    }

    /// Returns the migration for which the calling thread counts, if any.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Counts the CPU time of the calling thread, and of threads that it starts by [`spawn`], until the returned value
    /// is dropped.
    pub(crate) fn count(&self) -> Counted {
        let (thread, before) = (gettid(), thread_time());
        self.state().running.push((thread, before));
        let outer = CURRENT.replace(Some(self.clone()));
        Counted { time: self.clone(), outer, thread, before, of_this_thread: PhantomData }
    }

    /// Makes a call whose CPU time does not count, on a thread that counts.
    pub(crate) fn for_others<R>(&self, call: impl FnOnce() -> R) -> R {
        let before = thread_time();
        let result = call();
        self.state().for_others += thread_time().saturating_sub(before);
        result
    }

    /// Returns the CPU-seconds so far; of a sandboxed migration without those of other threads that have not ended.
    pub(crate) fn seconds(&self) -> f64 {
        let state = self.state();
        // No thread leaves the list meanwhile, so no thread number is reused.
        let time_of = |thread| if self.sandboxed { own_time_of(thread) } else { time_of(thread) };
        let since = |(thread, before): &(Pid, Duration)| time_of(*thread).saturating_sub(*before);
        let all = state.ended + state.running.iter().map(since).sum::<Duration>();
        all.saturating_sub(state.for_others).as_secs_f64()
    }
}

/// Returns whether the calling thread may open files that it can do without.
pub(crate) fn may_open_files() -> bool {
    CURRENT.with_borrow(|current| current.as_ref().is_none_or(|time| !time.sandboxed))
}

/// Returns how long the calling thread has been running on a CPU; 0 for another thread.
fn own_time_of(thread: Pid) -> Duration {
    if thread == gettid() { thread_time() } else { Duration::ZERO }
}

/// Returns how long a thread of this process has been running on a CPU; 0 if the system does not report it. Source: the
/// first number of `/proc/PID/task/TID/schedstat`, in nanoseconds (the kernel's sched-stats.rst).
fn time_of(thread: Pid) -> Duration {
    if thread == gettid() {
        return thread_time();
    }
    let text = std::fs::read_to_string(format!("/proc/self/task/{}/schedstat", thread.as_raw_nonzero()));
    let nanoseconds = text.ok().and_then(|text| text.split_ascii_whitespace().next()?.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

/// Keeps the calling thread counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    time: CpuTime,
    /// The migration for which the thread counted before.
    outer: Option<CpuTime>,
    thread: Pid,
    before: Duration,
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        CURRENT.set(self.outer.take());
        let mut state = self.time.state();
        state.ended += thread_time().saturating_sub(self.before);
        let place = state.running.iter().position(|(thread, _)| *thread == self.thread);
        place.map(|place| state.running.swap_remove(place));
    }
}

/// Starts a thread that counts for the same migration as the calling one.
///
/// # Errors
/// The system cannot start a thread.
pub(crate) fn spawn<T: Send + 'static>(
    builder: Builder,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let time = CpuTime::current();
    builder.spawn(move || {
        let _counted = time.as_ref().map(CpuTime::count);
        run()
    })
}

/// Starts a thread that may borrow from `scope`. Its CPU time is counted for the caller's [`CpuTime`].
///
/// # Errors
/// The system cannot start a thread.
pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    builder: Builder,
    scope: &'scope Scope<'scope, '_>,
    run: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let time = CpuTime::current();
    builder.spawn_scoped(scope, move || {
        let _counted = time.as_ref().map(CpuTime::count);
        run()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const WORK: Duration = Duration::from_millis(20);
    /// So much that it could not be overlooked beside what a busy machine adds to the rest.
    const MUCH: Duration = Duration::from_millis(400);

    fn work_for(time: Duration) {
        let until = thread_time() + time;
        while thread_time() < until {}
    }

    fn work() {
        work_for(WORK);
    }

    fn work_much() {
        work_for(MUCH);
    }

    #[test]
    fn threads_started_by_a_counted_thread_count_and_others_do_not() {
        let time = CpuTime::default();
        // In a new thread, because the test's thread may be counted already.
        let counted = time.clone();
        std::thread::spawn(move || {
            work_much();
            let count = counted.count();
            work();
            std::thread::spawn(work_much).join().unwrap();
            let nested = || spawn(Builder::new(), work).unwrap().join().unwrap();
            spawn(Builder::new(), nested).unwrap().join().unwrap();
            counted.for_others(work_much);
            drop(count);
            work_much();
            spawn(Builder::new(), work_much).unwrap().join().unwrap();
            assert!(CpuTime::current().is_none());
        })
        .join()
        .unwrap();
        let seconds = time.seconds();
        // Two of the seven, and none of the others.
        assert!(seconds >= 2.0 * WORK.as_secs_f64() && seconds < MUCH.as_secs_f64(), "{seconds}");
        assert!(time.state().running.is_empty());
    }

    #[test]
    fn a_running_thread_counts_with_its_cpu_time_so_far() {
        let time = CpuTime::default();
        let ((worked, has_worked), (end, ends)) = (channel(), channel::<()>());
        let counted = time.clone();
        let thread = std::thread::spawn(move || {
            let _count = counted.count();
            work();
            worked.send(()).unwrap();
            ends.recv().unwrap_err();
        });
        has_worked.recv().unwrap();
        // The kernel's figure for another thread may be a tick old.
        let seconds = time.seconds();
        assert!(seconds > 0.0, "{seconds}");
        drop(end);
        thread.join().unwrap();
        assert!(time.seconds() >= WORK.as_secs_f64());
    }
}
