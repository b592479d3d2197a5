//! Worker threads that own sessions, so that a caller need not wait for a library that returns only when it is done.
//!
//! One bounded queue in, one completion queue per channel out. All buffers are the caller's and are returned with the
//! completion; nothing is allocated per job if their capacity suffices. Every wait has a limit: a worker inside the
//! library may hang for as long as a device does, so [`Pool::shutdown`] waits for a while and then abandons it with its
//! buffers.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Failure, StartError};
use crate::library::Library;
use crate::memory::{Buffer, Bytes};
use crate::session::{By, Done, Params, Session, Work};

/// How long a worker may take to set up its session. A device's start takes well under a second.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long dropping a pool waits for jobs in the library.
const DROP_WAITS: Duration = Duration::from_secs(5);

/// One piece of work with its buffers.
#[derive(Debug)]
pub struct Job {
    /// The caller's own number for it.
    pub tag: u64,
    /// The operation.
    pub work: Work,
    /// The input.
    pub input: Bytes,
    /// The buffer for the result; its content is replaced.
    pub output: Bytes,
    /// The most bytes the result may have.
    pub room: usize,
}

/// A job that was done, or failed; every accepted job produces exactly one of these.
#[derive(Debug)]
pub struct Completion {
    /// The job's number.
    pub tag: u64,
    /// The result.
    pub result: Result<Done, Failure>,
    /// The input as it was given.
    pub input: Bytes,
    /// The result; empty on failure.
    pub output: Bytes,
}

/// Why a job was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The pool's queue is full.
    #[error("the queue of the QATzip workers is full")]
    Full,
    /// This channel has as many jobs in flight as allowed.
    #[error("this channel has as many QATzip jobs in flight as it may")]
    ChannelFull,
    /// All workers have ended.
    #[error("all QATzip workers have ended")]
    NoWorkers,
    /// The pool is being shut down.
    #[error("the QATzip pool is shut down")]
    ShutDown,
    /// This is a child of the process that has the workers.
    #[error("the QATzip workers are in the process that this one was forked from")]
    Forked,
}

/// A job that was not taken, given back.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub reason: Reason,
    /// The job.
    pub job: Job,
}

/// How many workers, and what for.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Worker threads, each with two sessions and two pinned buffers. A device's instances are few: more workers than instances
    /// wait for each other.
    pub workers: NonZeroUsize,
    /// Jobs that may wait for a worker.
    pub queue: NonZeroUsize,
    /// What the sessions are made for.
    pub params: Params,
}

/// What a pool has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Jobs that were compressed.
    pub compressed: u64,
    /// Jobs that were decompressed.
    pub decompressed: u64,
    /// Of both, those done by hardware.
    pub by_hardware: u64,
    /// Of both, those done by the library's software.
    pub by_software: u64,
    /// Compressions whose result was longer than its room: to be sent uncompressed, no error.
    pub too_long: u64,
    /// Jobs that failed otherwise, including those cancelled at shutdown.
    pub failed: u64,
    /// Bytes of input of the jobs that succeeded.
    pub bytes_in: u64,
    /// Bytes of output of the jobs that succeeded.
    pub bytes_out: u64,
    /// How often one of the library's sessions had to be set up again.
    pub renewed: u64,
}

#[derive(Default)]
struct Counters {
    compressed: AtomicU64,
    decompressed: AtomicU64,
    by_hardware: AtomicU64,
    by_software: AtomicU64,
    too_long: AtomicU64,
    failed: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    renewed: AtomicU64,
}

/// Some workers did not end in time. They are abandoned with their buffers; the process's exit ends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{workers} QATzip workers are still inside the library after {} s; they are left behind", waited.as_secs_f64())]
pub struct StillBusy {
    /// Their number.
    pub workers: usize,
    /// The waiting time.
    pub waited: Duration,
}

struct State {
    jobs: VecDeque<(Job, Arc<Completions>)>,
    alive: usize,
    closed: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
    capacity: usize,
    counters: Counters,
    library: Arc<Library>,
    params: Params,
}

struct Completions {
    state: Mutex<Out>,
    arrived: Condvar,
    capacity: usize,
}

struct Out {
    done: VecDeque<Completion>,
    /// Accepted and not yet collected.
    out: usize,
}

/// No thread leaves these states half changed, so a panic with the lock held does no damage.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The workers.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts the workers and waits until every one has its sessions and buffers.
    ///
    /// # Errors
    /// As [`Library::session`]; or a thread cannot be started or does not become ready. No thread is left running
    /// except those that hang.
    pub fn start(library: &Arc<Library>, options: &Options) -> Result<Pool, StartError> {
        if library.forked() {
            return Err(StartError::Forked);
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State { jobs: VecDeque::with_capacity(options.queue.get()), alive: 0, closed: false }),
            work: Condvar::new(),
            ended: Condvar::new(),
            capacity: options.queue.get(),
            counters: Counters::default(),
            library: Arc::clone(library),
            params: options.params,
        });
        let mut pool = Pool { shared, threads: Vec::with_capacity(options.workers.get()) };
        let (ready, answers) = mpsc::channel();
        for number in 0..options.workers.get() {
            let (shared, ready, params) = (Arc::clone(&pool.shared), ready.clone(), options.params);
            lock(&shared.state).alive += 1;
            let alive = Alive(Arc::clone(&shared));
            let thread = std::thread::Builder::new().name(format!("qatzip-{number}")).spawn(move || {
                let alive = alive;
                match alive.0.library.session(&params) {
                    Ok(session) => {
                        let _ = ready.send(Ok(()));
                        drop(ready);
                        serve(&alive.0, session);
                    }
                    Err(error) => drop(ready.send(Err(error))),
                }
            });
            pool.threads.push(thread.map_err(StartError::Thread)?);
        }
        drop(ready);
        let deadline = Instant::now() + READY_WITHIN;
        for _ in 0..options.workers.get() {
            match answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(answer) => answer?,
                Err(_) => return Err(StartError::NotReady { seconds: READY_WITHIN.as_secs() }),
            }
        }
        Ok(pool)
    }

    /// Makes a channel with its own completion queue. At most `in_flight` of its jobs are in progress at a time,
    /// including those that are done but not collected.
    #[must_use]
    pub fn channel(&self, in_flight: NonZeroUsize) -> Channel {
        Channel {
            shared: Arc::clone(&self.shared),
            completions: Arc::new(Completions {
                state: Mutex::new(Out { done: VecDeque::with_capacity(in_flight.get()), out: 0 }),
                arrived: Condvar::new(),
                capacity: in_flight.get(),
            }),
        }
    }

    /// Allocates the library's memory for the input and the result of one compression, as large as the largest job
    /// needs.
    ///
    /// # Errors
    /// There is none left, or this is a child after a fork.
    pub fn buffers(&self) -> Result<(Buffer, Buffer), StartError> {
        let Shared { library, params, .. } = &*self.shared;
        Ok((Buffer::new(library, params.largest_job)?, Buffer::new(library, params.compressed_room())?))
    }

    /// Returns whether the workers use hardware.
    #[must_use]
    pub fn on_hardware(&self) -> bool {
        self.shared.library.hardware().is_ok()
    }

    /// Returns the counters so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        Statistics {
            compressed: of(&counters.compressed),
            decompressed: of(&counters.decompressed),
            by_hardware: of(&counters.by_hardware),
            by_software: of(&counters.by_software),
            too_long: of(&counters.too_long),
            failed: of(&counters.failed),
            bytes_in: of(&counters.bytes_in),
            bytes_out: of(&counters.bytes_out),
            renewed: of(&counters.renewed),
        }
    }

    /// Accepts no more jobs, cancels those that no worker has begun, and waits up to `patience` for the others.
    ///
    /// # Errors
    /// Some workers are still in the library. Their jobs complete if they ever return.
    pub fn shutdown(mut self, patience: Duration) -> Result<Statistics, StillBusy> {
        let ended = self.end(patience);
        let statistics = self.statistics();
        ended.map(|()| statistics)
    }

    fn end(&mut self, patience: Duration) -> Result<(), StillBusy> {
        let threads = std::mem::take(&mut self.threads);
        // The threads are the parent's, and one of them may have held the lock.
        if threads.is_empty() || self.shared.library.forked() {
            return Ok(());
        }
        let deadline = Instant::now() + patience;
        let mut state = lock(&self.shared.state);
        state.closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        self.shared.work.notify_all();
        self.shared.fail_jobs(jobs, Failure::ShutDown);
        let mut state = lock(&self.shared.state);
        while state.alive > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StillBusy { workers: state.alive, waited: patience });
            }
            (state, _) = self.shared.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        for thread in threads {
            // A worker that panicked has already been counted out.
            let _ = thread.join();
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Err(busy) = self.end(DROP_WAITS) {
            tracing::warn!("{busy}");
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("workers", &self.threads.len()).field("statistics", &self.statistics()).finish()
    }
}

/// One caller's interface to the pool.
pub struct Channel {
    shared: Arc<Shared>,
    completions: Arc<Completions>,
}

impl Channel {
    /// Submits a job; never waits for the library.
    ///
    /// # Errors
    /// It was not accepted; the job is returned.
    pub fn submit(&self, job: Job) -> Result<(), Refused> {
        let refused = |reason, job| Err(Refused { reason, job });
        if self.shared.library.forked() {
            return refused(Reason::Forked, job);
        }
        let mut state = lock(&self.shared.state);
        if state.closed {
            return refused(Reason::ShutDown, job);
        }
        if state.alive == 0 {
            return refused(Reason::NoWorkers, job);
        }
        if state.jobs.len() == self.shared.capacity {
            return refused(Reason::Full, job);
        }
        {
            let mut out = lock(&self.completions.state);
            if out.out == self.completions.capacity {
                return refused(Reason::ChannelFull, job);
            }
            out.out += 1;
        }
        state.jobs.push_back((job, Arc::clone(&self.completions)));
        drop(state);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Returns a finished job, if there is one.
    #[must_use]
    pub fn poll(&self) -> Option<Completion> {
        if self.shared.library.forked() {
            return None;
        }
        lock(&self.completions.state).collect()
    }

    /// Returns the next finished job, or nothing if there is none in flight or none is done by the deadline.
    #[must_use]
    pub fn wait(&self, deadline: Instant) -> Option<Completion> {
        if self.shared.library.forked() {
            return None;
        }
        let mut state = lock(&self.completions.state);
        loop {
            if let Some(completion) = state.collect() {
                return Some(completion);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.out == 0 || left.is_zero() {
                return None;
            }
            (state, _) = self.completions.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns how many jobs are accepted and not yet collected.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        if self.shared.library.forked() { 0 } else { lock(&self.completions.state).out }
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

impl Out {
    fn collect(&mut self) -> Option<Completion> {
        let completion = self.done.pop_front()?;
        self.out -= 1;
        Some(completion)
    }
}

impl Shared {
    fn fail_jobs(&self, jobs: VecDeque<(Job, Arc<Completions>)>, failure: Failure) {
        for (job, completions) in jobs {
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            complete(&completions, job, Err(failure));
        }
    }

    fn count(&self, work: Work, input: usize, result: &Result<Done, Failure>) {
        let add = |counter: &AtomicU64, by: u64| counter.fetch_add(by, Ordering::Relaxed);
        let counters = &self.counters;
        match result {
            Ok(done) => {
                add(if work == Work::Compress { &counters.compressed } else { &counters.decompressed }, 1);
                add(if done.by == By::Hardware { &counters.by_hardware } else { &counters.by_software }, 1);
                add(&counters.bytes_in, input as u64);
                add(&counters.bytes_out, done.bytes as u64);
            }
            Err(Failure::TooLong { .. }) if work == Work::Compress => drop(add(&counters.too_long, 1)),
            Err(_) => drop(add(&counters.failed, 1)),
        }
    }
}

fn complete(completions: &Completions, job: Job, result: Result<Done, Failure>) {
    let Job { tag, input, mut output, .. } = job;
    if result.is_err() {
        output.clear();
    }
    lock(&completions.state).done.push_back(Completion { tag, result, input, output });
    completions.arrived.notify_one();
}

/// Counts a worker as alive, however its thread ends. The last one completes all remaining jobs.
struct Alive(Arc<Shared>);

impl Drop for Alive {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.alive -= 1;
        let jobs = if state.alive == 0 { std::mem::take(&mut state.jobs) } else { VecDeque::new() };
        drop(state);
        self.0.fail_jobs(jobs, Failure::WorkerLost);
        self.0.ended.notify_all();
    }
}

/// A job that a worker works on; completed however the worker ends.
struct InHand<'a> {
    job: Option<(Job, Arc<Completions>)>,
    shared: &'a Shared,
}

impl InHand<'_> {
    fn finish(&mut self, result: Result<Done, Failure>) {
        if let Some((job, completions)) = self.job.take() {
            self.shared.count(job.work, job.input.len(), &result);
            complete(&completions, job, result);
        }
    }
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        self.finish(Err(Failure::WorkerLost));
    }
}

fn serve(shared: &Shared, mut session: Session) {
    let mut renewed = 0;
    loop {
        let mut state = lock(&shared.state);
        let taken = loop {
            if let Some(taken) = state.jobs.pop_front() {
                break taken;
            }
            if state.closed {
                return;
            }
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        let mut hand = InHand { job: Some(taken), shared };
        let (job, _) = hand.job.as_mut().expect("put there above");
        let result = match job.work {
            Work::Compress | Work::Decompress => session.work(job.work, &job.input, &mut job.output, job.room),
            #[cfg(test)]
            Work::Die => panic!("a worker dies, as the test wants"),
            #[cfg(test)]
            Work::Hang => loop {
                std::thread::park();
            },
        };
        // Before the completion, so that a caller that has the completion finds it counted.
        shared.counters.renewed.fetch_add(session.renewed() - renewed, Ordering::Relaxed);
        renewed = session.renewed();
        hand.finish(result);
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
