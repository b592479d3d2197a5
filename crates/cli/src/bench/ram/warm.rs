//! Memory for a destination that is warm when it is taken, however long the migration lasts.
//!
//! A virtual machine's host takes back what is free, on the test machines within two seconds, and a page that it has to give
//! again costs seven times as much to clear. So memory that was warmed and let go before a destination began would be warm
//! for those who are fast and cold for the others. Here it is held, and let go by steps, a little ahead of the process that
//! takes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_memory::PAGE_SIZE;
use sterna_memory::discard::Discardable;
use sterna_memory::ram::RamBlock;

use super::guest::{Guest, Memory};
use crate::hosts::{HostsError, doing};

/// What is free beyond what was taken: more than is taken between two looks, and little enough to be warm.
const AHEAD: u64 = 256 << 20;
const INTERVAL: Duration = Duration::from_millis(2);
/// Let go at once.
const STEP: u64 = 32 << 20;

/// Memory that is let go as a process takes it; all of it at the end.
pub(crate) struct Warmth {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Warmth {
    /// Touches so many bytes, and begins to let them go to process `pid`.
    pub(crate) fn hold(bytes: u64, pid: u32) -> Result<Self, HostsError> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let before = resident(pid).unwrap_or(0);
        let ready = touch(bytes).map_err(doing::<String>("warming memory"))?;
        let thread = std::thread::spawn(move || {
            let ram = ready.ram();
            let block = &ram.blocks()[0];
            let Ok(Some(memory)) = block.discardable() else { return };
            let mut released = 0;
            while released < block.bytes() && !stopped.load(Ordering::Relaxed) {
                // A process that has ended takes nothing more.
                let Some(now) = resident(pid) else { return };
                let wanted = (now.saturating_sub(before) + AHEAD).min(block.bytes());
                while released < wanted {
                    released = release(&memory, block, released);
                }
                std::thread::sleep(INTERVAL);
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Warmth {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Memory of which every page was touched, by two threads.
fn touch(bytes: u64) -> Result<Guest, String> {
    let guest = Guest::new(Memory::Anonymous, bytes.next_multiple_of(STEP)).map_err(|error| error.to_string())?;
    let ram = guest.ram();
    let block = &ram.blocks()[0];
    let half = block.pages() / 2;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| block.populate(half..block.pages()));
        let own = block.populate(0..half);
        own.and(other.join().expect("populating does not panic"))
    })
    .map_err(|error| error.to_string())?;
    Ok(guest)
}

/// Lets the next step go; gives where the one after it begins.
fn release(memory: &Discardable, block: &RamBlock, from: u64) -> u64 {
    let end = (from + STEP).min(block.bytes());
    let page = |offset: u64| offset / PAGE_SIZE as u64;
    // What is not let go now is let go at the end.
    let _ = memory.discard(page(from)..page(end));
    end
}

/// Bytes of a process that are in memory (proc_pid_statm(5)).
fn resident(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_takes_is_let_go_and_nothing_waits_for_what_it_leaves() {
        let block = touch(3 * STEP).unwrap();
        assert_eq!(block.populated_bytes(), Ok(3 * STEP));
        let ram = block.ram();
        let memory = ram.blocks()[0].discardable().unwrap().unwrap();
        assert_eq!(release(&memory, &ram.blocks()[0], 0), STEP);
        assert_eq!(block.populated_bytes(), Ok(2 * STEP));
        assert_eq!(release(&memory, &ram.blocks()[0], 2 * STEP), 3 * STEP);
        assert_eq!(block.populated_bytes(), Ok(STEP));
        drop(Warmth::hold(STEP, std::process::id()).unwrap());
        assert!(resident(std::process::id()).unwrap() > 0 && resident(u32::MAX).is_none());
    }
}
