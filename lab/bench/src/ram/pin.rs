//! The CPUs on which a thread runs.

use rustix::thread::{CpuSet, sched_setaffinity};

/// Pins this thread, and the threads that it starts later, to these CPUs.
pub(crate) fn pin(cpus: &[usize]) -> Result<(), String> {
    let mut set = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).map_err(|error| format!("cannot run on CPUs {cpus:?} only: {error}"))
}
