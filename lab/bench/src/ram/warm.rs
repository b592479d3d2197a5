//! Memory for a destination that is warm when it is taken, however long the migration lasts.
//!
//! A virtual machine's host takes back what is free, on the test machines within two seconds, and a page that it has to give
//! again costs up to twenty times as much to clear. So memory that was warmed and let go before a destination began would be
//! warm for those who are fast and cold for the others. Here it is held, and let go by small steps as the system's free
//! memory gets less. What is followed is the system and not the destination, so it makes no difference whether that takes
//! anonymous memory, a mapping's or a file's, nor what else the machine does meanwhile: what others take of it is made up
//! for. The kernel gives first what was let go last, and keeps some of that for the CPU that let it go, without counting it as
//! free; so it is let go on the destination's own CPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_memory::PAGE_SIZE;
use sterna_memory::discard::Discardable;
use sterna_memory::ram::RamBlock;

use super::guest::{Guest, Memory};
use super::side::pin;
use crate::hosts::{HostsError, doing};

/// Free beyond what was free before: more than is taken between two looks on a busy machine. What is let go later is taken
/// earlier, so most of this is only taken where the next comes late.
const AHEAD: u64 = 256 << 20;
const INTERVAL: Duration = Duration::from_millis(1);
/// Let go at once.
const STEP: u64 = 8 << 20;
/// Held beyond what the destination needs, for others who take memory meanwhile.
const SPARE: u64 = 1 << 30;

/// Memory that is let go as memory is taken; all of it at the end.
pub(crate) struct Warmth {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Warmth {
    /// Touches so many bytes and some more, and begins to let them go, on `cpus`.
    pub(crate) fn hold(bytes: u64, cpus: &[usize]) -> Result<Self, HostsError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, cpus) = (Arc::clone(&stop), cpus.to_vec());
        let ready = touch(bytes + AHEAD + SPARE).map_err(doing::<String>("warming memory"))?;
        let (begun, beginning) = channel();
        let thread = std::thread::spawn(move || {
            // Where that is refused it is only less exact.
            let _ = pin(&cpus);
            let ram = ready.ram();
            let block = &ram.blocks()[0];
            let Ok(Some(memory)) = block.discardable() else { return };
            // The most that was free: what others let go meanwhile is less warm, and does not count.
            let mut most = free() + AHEAD;
            let mut released = 0;
            while released < block.bytes() && !stopped.load(Ordering::Relaxed) {
                most = most.max(free());
                while released < block.bytes() && free() + STEP <= most {
                    released = release(&memory, block, released);
                }
                let _ = begun.send(());
                std::thread::sleep(INTERVAL);
            }
        });
        // The first of it is free before anybody takes; where nothing can be let go, there is nothing to wait for.
        let _ = beginning.recv();
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

/// Bytes of the machine's memory that nobody uses, not even for files (sysinfo(2)).
fn free() -> u64 {
    let info = rustix::system::sysinfo();
    info.freeram * u64::from(info.mem_unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_let_go_is_gone_step_by_step() {
        let block = touch(3 * STEP).unwrap();
        assert_eq!(block.populated_bytes(), Ok(3 * STEP));
        let ram = block.ram();
        let memory = ram.blocks()[0].discardable().unwrap().unwrap();
        assert_eq!(release(&memory, &ram.blocks()[0], 0), STEP);
        assert_eq!(block.populated_bytes(), Ok(2 * STEP));
        assert_eq!(release(&memory, &ram.blocks()[0], 2 * STEP), 3 * STEP);
        assert_eq!(block.populated_bytes(), Ok(STEP));
        assert!(free() > 0);
    }
}
