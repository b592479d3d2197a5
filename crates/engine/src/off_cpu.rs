//! Separates a thread's waits. A thread inside a call is running, is waiting for a CPU, or is waiting for the call's
//! subject: bytes, room, a peer. On a busy machine the two waits look alike from outside; mistaking one for the other
//! blames the network for other programs on the host.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Counts the waits of the thread that made it; no other thread may use it.
#[derive(Debug)]
pub(crate) struct OffCpu {
    /// `/proc/thread-self/schedstat`: three numbers, the second of which is how long the thread has waited for a CPU,
    /// in nanoseconds (the kernel's sched-stats.rst). Without the file, waits for a CPU count as waits for the call's
    /// subject.
    schedstat: Option<File>,
    /// Time off the CPU in the calls since the last [`OffCpu::take`].
    off: Duration,
    /// How long the thread had waited for a CPU at the last [`OffCpu::take`].
    delay: Duration,
}

/// The beginning of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun {
    at: Instant,
    running: Duration,
}

impl OffCpu {
    /// Begins to count for the calling thread. `may_open`: whether it may open the file.
    pub(crate) fn new(may_open: bool) -> Self {
        let schedstat = may_open.then(|| File::open("/proc/thread-self/schedstat").ok()).flatten();
        let delay = schedstat.as_ref().and_then(run_delay).unwrap_or_default();
        Self { schedstat, off: Duration::ZERO, delay }
    }

    /// Begins a call.
    pub(crate) fn begin() -> Begun {
        Begun { at: Instant::now(), running: thread_time() }
    }

    /// Ends a call. Returns how long the thread was running during the call.
    pub(crate) fn end(&mut self, begun: Begun) -> Duration {
        let running = thread_time().saturating_sub(begun.running);
        self.off += begun.at.elapsed().saturating_sub(running);
        running
    }

    /// Returns how long the thread has waited for the subjects of its calls, since the last call of this function.
    pub(crate) fn take(&mut self) -> Duration {
        let delay = self.schedstat.as_ref().and_then(run_delay).unwrap_or_default();
        let delayed = delay.saturating_sub(std::mem::replace(&mut self.delay, delay));
        std::mem::take(&mut self.off).saturating_sub(delayed)
    }
}

/// Returns the time that this thread has been running on a CPU.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn run_delay(schedstat: &File) -> Option<Duration> {
    let mut bytes = [0; 64];
    let length = schedstat.read_at(&mut bytes, 0).ok()?;
    let text = std::str::from_utf8(&bytes[..length]).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn waiting_counts_and_computing_does_not() {
        let mut off_cpu = OffCpu::new(true);
        let begun = OffCpu::begin();
        let mut running = Duration::ZERO;
        while running < Duration::from_millis(20) {
            running = thread_time().saturating_sub(begun.running);
        }
        assert!(off_cpu.end(begun) >= Duration::from_millis(20));
        let elapsed = begun.at.elapsed();
        let waited = off_cpu.take();
        assert!(waited <= elapsed - Duration::from_millis(20), "{waited:?} of {elapsed:?}");

        // Nothing is ever sent.
        let (_silent, nothing) = mpsc::channel::<()>();
        let begun = OffCpu::begin();
        nothing.recv_timeout(Duration::from_millis(20)).unwrap_err();
        let running = off_cpu.end(begun);
        let (elapsed, waited) = (begun.at.elapsed(), off_cpu.take());
        assert!(waited > Duration::ZERO && waited + running <= elapsed, "{waited:?} and {running:?} of {elapsed:?}");
        assert_eq!(off_cpu.take(), Duration::ZERO, "it is counted once");
    }

    #[test]
    fn the_second_number_is_the_wait_for_a_cpu() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("schedstat");
        for (text, delay) in [("7 1500 3\n", Some(1500)), ("", None), ("7", None), ("7 x 3", None)] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(run_delay(&File::open(&path).unwrap()), delay.map(Duration::from_nanos));
        }
    }
}
