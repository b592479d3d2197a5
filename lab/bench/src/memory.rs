//! The peak of a process's own memory while it is watched: anonymous pages, without mapped guest RAM.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The interval of sampling. A buffer that lives shorter than this can be missed.
const INTERVAL: Duration = Duration::from_millis(5);

/// Watches processes until the peaks are requested.
pub(crate) struct MemoryWatch {
    stop: Arc<AtomicBool>,
    peaks: Vec<Arc<AtomicU64>>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryWatch {
    /// Begins to watch `processes`; one that ends is no error.
    pub(crate) fn start(processes: &[u32]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let peaks: Vec<_> = processes.iter().map(|_| Arc::new(AtomicU64::new(0))).collect();
        let watched: Vec<_> = processes.iter().copied().zip(peaks.iter().cloned()).collect();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for (process, peak) in &watched {
                    peak.fetch_max(anonymous(*process).unwrap_or(0), Ordering::Relaxed);
                }
                std::thread::sleep(INTERVAL);
            }
        });
        Self { stop, peaks, thread: Some(thread) }
    }

    /// Returns the memory that a process holds now, in bytes; 0 if it has ended.
    pub(crate) fn of(process: u32) -> u64 {
        anonymous(process).unwrap_or(0)
    }

    /// Returns the peaks in bytes, in the order of the processes.
    pub(crate) fn peaks(mut self) -> Vec<u64> {
        self.end();
        self.peaks.iter().map(|peak| peak.load(Ordering::Relaxed)).collect()
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.end();
    }
}

/// `RssAnon` of `/proc/PID/status` (proc_pid_status(5)).
fn anonymous(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(value.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_held_while_watched_is_seen() {
        let own = std::process::id();
        let held = vec![1u8; 64 << 20];
        let now = anonymous(own).unwrap();
        assert!(now >= 64 << 20, "{now}");
        let watch = MemoryWatch::start(&[own, u32::MAX]);
        while watch.peaks[0].load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let peaks = watch.peaks();
        assert!(peaks[0] >= 64 << 20 && peaks[1] == 0, "{peaks:?}");
        assert_eq!(held[12345], 1);
    }
}
