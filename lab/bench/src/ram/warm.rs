//! Keeps the host's memory warm for a destination, however long the migration lasts.
//!
//! A virtual machine's hypervisor reclaims free memory, on the test machines within two seconds, and clearing a page
//! that it must provide again costs up to twenty times as much. Memory that was warmed and freed before a destination
//! begins would be warm for a fast mover and cold for a slow one. So this module holds memory and frees it in small
//! steps as the system's free memory shrinks. It follows the system and not the destination, so the kind of the
//! destination's memory does not matter, and memory that other programs take is replaced. The kernel allocates first
//! what was freed last, and keeps some of it on the CPU that freed it without counting it as free; so the memory is
//! freed on the destination's own CPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_memory::PAGE_SIZE;
use sterna_memory::discard::Discardable;
use sterna_memory::ram::RamBlock;

use super::guest::{Guest, Memory};
use super::pin::pin;
use crate::hosts::{HostsError, doing};

/// Warm memory that is kept free in advance: more than is allocated between two steps on a busy machine. Memory freed
/// later is allocated first, so most of this is used only if the next step is late.
const AHEAD: u64 = 256 << 20;
const INTERVAL: Duration = Duration::from_millis(1);
/// Bytes freed in one step.
const STEP: u64 = 8 << 20;
/// Held beyond what the destination needs, for other programs that allocate memory meanwhile.
const SPARE: u64 = 1 << 30;

/// Memory that is freed as the system's memory is allocated, and completely at the end.
pub(crate) struct Warmth {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Warmth {
    /// Touches this many bytes and some more, and begins to free them, on `cpus`.
    pub(crate) fn hold(bytes: u64, cpus: &[usize]) -> Result<Self, HostsError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, cpus) = (Arc::clone(&stop), cpus.to_vec());
        let ready = touch(bytes + AHEAD + SPARE).map_err(doing::<String>("warming memory"))?;
        let (begun, beginning) = channel();
        let thread = std::thread::spawn(move || {
            // If pinning is refused, the measurement is only less exact.
            let _ = pin(&cpus);
            let ram = ready.ram();
            let block = &ram.blocks()[0];
            let Ok(Some(memory)) = block.discardable() else { return };
            // The largest amount of free memory: memory that other programs free meanwhile is less warm, and does not
            // count.
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
        // Waits until the first part is free; an error means that nothing can be freed.
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

/// Makes memory and touches every page of it, by two threads.
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

/// Frees the next step. Returns where the step after it begins.
fn release(memory: &Discardable, block: &RamBlock, from: u64) -> u64 {
    let end = (from + STEP).min(block.bytes());
    let page = |offset: u64| offset / PAGE_SIZE as u64;
    // Memory that cannot be freed now is freed at the end.
    let _ = memory.discard(page(from)..page(end));
    end
}

/// Returns the machine's unused memory in bytes, without the page cache (sysinfo(2)).
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
