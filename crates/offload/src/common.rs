//! The state of a process's offload that its engines use, and the threads that close devices.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::lease::Leases;
use crate::pools::ByNode;
use crate::report::Statistics;
use crate::settings::Settings;
use crate::sync::lock_std;
use crate::time::{Bell, Nanos};

/// The process's offload state that engines use.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) settings: Settings,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) pools: ByNode,
    pub(crate) closers: Arc<Closers>,
}

impl Common {
    pub(crate) fn patience(&self) -> Nanos {
        // Limited so that the multiplication of deadlines cannot overflow.
        u64::try_from(self.settings.patience.as_nanos()).unwrap_or(Nanos::MAX).clamp(1, Nanos::MAX / 16)
    }
}

/// Closes devices, on threads of its own or when called.
#[derive(Debug)]
pub(crate) struct Closers {
    threads: bool,
    jobs: Mutex<Jobs>,
    ended: Bell,
}

#[derive(Default)]
struct Jobs {
    waiting: Vec<Job>,
    running: usize,
}

type Job = Box<dyn FnOnce() + Send>;

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} waiting, {} running", self.waiting.len(), self.running)
    }
}

impl Closers {
    pub(crate) fn new(threads: bool) -> Arc<Self> {
        Arc::new(Self { threads, jobs: Mutex::default(), ended: Bell::default() })
    }

    pub(crate) fn run(self: &Arc<Self>, job: Job) {
        if !self.threads {
            lock_std(&self.jobs).waiting.push(job);
            return;
        }
        lock_std(&self.jobs).running += 1;
        let closers = Arc::clone(self);
        let started = std::thread::Builder::new().name("offload-close".into()).spawn(move || {
            job();
            lock_std(&closers.jobs).running -= 1;
            closers.ended.ring();
        });
        if let Err(error) = started {
            // The job is lost and with it the proof: memory that the device may write is kept for ever.
            tracing::error!(%error, "no thread to close an accelerator with");
            lock_std(&self.jobs).running -= 1;
        }
    }

    /// Closes the devices that wait to be closed, where there are no threads.
    pub(crate) fn run_waiting(&self) {
        let waiting = std::mem::take(&mut lock_std(&self.jobs).waiting);
        waiting.into_iter().for_each(|job| job());
    }

    /// Waits until all devices are closed, at most `at_most`. Returns whether they are.
    pub(crate) fn wait(&self, at_most: Duration) -> bool {
        let end = std::time::Instant::now() + at_most;
        loop {
            let heard = self.ended.heard();
            let left = end.saturating_duration_since(std::time::Instant::now());
            if lock_std(&self.jobs).running == 0 {
                return true;
            }
            if left.is_zero() {
                return false;
            }
            self.ended.wait(heard, Some(left));
        }
    }
}

impl Drop for Closers {
    fn drop(&mut self) {
        // A device is closed by running a job. Dropping the job would close the device without ending its quarantine.
        std::mem::forget(std::mem::take(&mut lock_std(&self.jobs).waiting));
    }
}
