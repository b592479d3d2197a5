//! Time and CPU time, so that figures of several processes of one machine can be compared.

use rustix::time::{ClockId, clock_gettime};

fn read_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Returns nanoseconds on the clock that all processes of the machine share.
pub(crate) fn now_ns() -> u64 {
    read_ns(ClockId::Monotonic)
}

/// Returns the CPU time of this process in nanoseconds, all threads, ended ones included.
pub(crate) fn cpu_ns() -> u64 {
    read_ns(ClockId::ProcessCPUTime)
}
