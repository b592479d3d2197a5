//! A guest's writes: a thread that writes memory at a set rate, in one of the patterns of published measurements, and
//! reports the rate that it reached.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use sterna_guest::content::{PAGE_BYTES, Page, Random};
use sterna_guest::page::{Fill, Pages};
use sterna_memory::ram::{GuestRam, RamBlock};
use sterna_qemu_lab::corpus::Slabs;

use super::pin::pin;

/// The part of a corpus that is used.
pub(crate) const SEED: u64 = 1;

/// How often it checks which writes are due.
const INTERVAL: Duration = Duration::from_millis(1);
/// Writes between two checks for a command.
const AT_ONCE: u64 = 64;

/// A pattern of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Pattern {
    /// Whole pages of equal bytes, one page after another.
    Ones,
    /// Whole pages of sequence numbers, one page after another.
    Sequence,
    /// Of ten requests to a memcached nine set the value of a random item, and one reads and changes nothing. An item lies
    /// in 1.6 pages on average.
    Memcached,
}

/// Pattern and rate of the writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Writes {
    pub(crate) pattern: Pattern,
    /// Bytes per second, counted in whole pages.
    pub(crate) rate: u64,
    /// The part of RAM, in bytes.
    pub(crate) from: u64,
    pub(crate) bytes: u64,
    /// CPUs that it runs on.
    pub(crate) cpus: Vec<usize>,
    /// Seconds after which the migration has failed.
    pub(crate) give_up_after: u64,
}

/// The results of the writer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Wrote {
    /// The part of the due writes that was done; 1: all.
    pub(crate) achieved: f64,
    pub(crate) cpu_seconds: f64,
}

enum Command {
    Pause,
    Resume,
    End,
}

/// The writing thread.
#[derive(Debug)]
pub(crate) struct Writer {
    commands: Sender<Command>,
    paused: Receiver<()>,
    thread: JoinHandle<Wrote>,
}

impl Writer {
    /// Begins to write.
    pub(crate) fn start(ram: GuestRam, writes: &Writes) -> Self {
        let (commands, to_do) = channel();
        let (has_paused, paused) = channel();
        let writes = writes.clone();
        let thread = std::thread::spawn(move || {
            // If pinning is refused, the measurement is only less exact.
            let _ = pin(&writes.cpus);
            run(&ram.blocks()[0], &writes, &to_do, &has_paused)
        });
        Self { commands, paused, thread }
    }

    /// Pauses the guest: nothing is written after this returns.
    pub(crate) fn pause(&mut self) -> Result<(), String> {
        self.send(Command::Pause)?;
        self.paused.recv().map_err(|_| "the guest's thread has ended".into())
    }

    /// Resumes the guest.
    pub(crate) fn resume(&mut self) -> Result<(), String> {
        self.send(Command::Resume)
    }

    fn send(&self, command: Command) -> Result<(), String> {
        self.commands.send(command).map_err(|_| "the guest's thread has ended".into())
    }

    /// Ends the thread and returns its results.
    pub(crate) fn finish(self) -> Wrote {
        let _ = self.commands.send(Command::End);
        self.thread.join().unwrap_or_default()
    }
}

fn run(block: &RamBlock, writes: &Writes, commands: &Receiver<Command>, has_paused: &Sender<()>) -> Wrote {
    let mut memory = Memory::new(block, writes);
    let mut pace = Pace::new(writes.rate as f64 / PAGE_BYTES as f64 / memory.pages_each());
    let mut ran = Duration::ZERO;
    // Since when the guest runs, if it does.
    let mut since = Some(Instant::now());
    loop {
        let command = match since {
            None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(from) => {
                let due = pace.due(ran + from.elapsed()).min(AT_ONCE);
                (0..due).for_each(|_| memory.write_next());
                pace.done += due;
                let wait = if due == AT_ONCE { Duration::ZERO } else { INTERVAL };
                commands.recv_timeout(wait)
            }
        };
        match command {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Command::Resume) => since = since.or_else(|| Some(Instant::now())),
            Ok(Command::Pause) => {
                ran += since.take().map_or(Duration::ZERO, |from| from.elapsed());
                let _ = has_paused.send(());
            }
            Ok(Command::End) | Err(RecvTimeoutError::Disconnected) => {
                ran += since.map_or(Duration::ZERO, |from| from.elapsed());
                let cpu = clock_gettime(ClockId::ThreadCPUTime);
                let cpu_seconds = cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9;
                return Wrote { achieved: pace.achieved(ran), cpu_seconds };
            }
        }
    }
}

/// The writes that were due and done.
#[derive(Debug)]
struct Pace {
    per_second: f64,
    done: u64,
}

impl Pace {
    fn new(per_second: f64) -> Self {
        Self { per_second, done: 0 }
    }

    /// Returns the writes that are due after this running time.
    fn due(&self, ran: Duration) -> u64 {
        ((self.per_second * ran.as_secs_f64()) as u64).saturating_sub(self.done)
    }

    fn achieved(&self, ran: Duration) -> f64 {
        let wanted = self.per_second * ran.as_secs_f64();
        if wanted < 1.0 { 1.0 } else { self.done as f64 / wanted }
    }
}

/// The part of RAM that is written.
struct Memory<'a> {
    block: &'a RamBlock,
    pattern: Pattern,
    pages: Pages,
    slabs: Slabs,
    first_page: u64,
    page_count: u64,
    bytes: u64,
    /// Writes so far.
    count: u64,
    random: Random,
}

impl<'a> Memory<'a> {
    fn new(block: &'a RamBlock, writes: &Writes) -> Self {
        let fill = if writes.pattern == Pattern::Ones { Fill::Ones } else { Fill::Sequence };
        Self {
            block,
            pattern: writes.pattern,
            pages: Pages::new(fill),
            slabs: Slabs::new(SEED),
            first_page: writes.from / PAGE_BYTES as u64,
            page_count: writes.bytes / PAGE_BYTES as u64,
            bytes: writes.bytes,
            count: 0,
            random: Random::new(1),
        }
    }

    /// Returns the pages that a write makes dirty, on average: an item begins anywhere in a page.
    fn pages_each(&self) -> f64 {
        match self.pattern {
            Pattern::Ones | Pattern::Sequence => 1.0,
            Pattern::Memcached => 1.0 + Slabs::CHUNK as f64 / PAGE_BYTES as f64,
        }
    }

    fn write_next(&mut self) {
        self.count += 1;
        if self.pattern == Pattern::Memcached {
            let item = self.random.next() % Slabs::items(self.bytes);
            return self.set_item(item);
        }
        let (round, page) = (self.count / self.page_count, self.count % self.page_count);
        let mut content: Page = [0; PAGE_BYTES];
        self.pages.write(&mut content, page, round as u32 + 2);
        self.block.write(self.first_page + page, &content);
    }

    fn set_item(&mut self, item: u64) {
        let mut chunk = [0; Slabs::CHUNK];
        self.slabs.write(item, self.count, &mut chunk);
        let offset = Slabs::offset(item);
        let (page, within) = (self.first_page + offset / PAGE_BYTES as u64, (offset % PAGE_BYTES as u64) as usize);
        let mut around = [0; 2 * PAGE_BYTES];
        let touched = (within + Slabs::CHUNK).div_ceil(PAGE_BYTES);
        // No other thread writes these pages.
        for (number, copy) in around.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().take(touched).enumerate() {
            self.block.read_page(page + number as u64, copy).expect("its own memory is read");
        }
        around[within..within + Slabs::CHUNK].copy_from_slice(&chunk);
        self.block.write(page, &around[..touched * PAGE_BYTES]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::guest::{Content, Guest, Memory as Kind};
    use super::*;

    const ALL: Content = Content::Used(4 << 20);

    fn writes(pattern: Pattern) -> Writes {
        Writes { pattern, rate: 64 << 20, from: 1 << 20, bytes: 2 << 20, cpus: Vec::new(), give_up_after: 1 }
    }

    #[test]
    fn what_is_late_is_made_up_for_and_what_was_not_done_shows() {
        let mut pace = Pace::new(1000.0);
        assert_eq!(pace.due(Duration::from_millis(10)), 10);
        pace.done = 8;
        assert_eq!(pace.due(Duration::from_millis(10)), 2);
        assert_eq!(pace.due(Duration::from_millis(5)), 0);
        assert!((pace.achieved(Duration::from_millis(10)) - 0.8).abs() < 1e-9);
        assert_eq!(Pace::new(0.0).achieved(Duration::from_secs(1)), 1.0);
    }

    #[test]
    fn each_pattern_writes_inside_its_part_and_never_the_same_again() {
        for pattern in [Pattern::Ones, Pattern::Sequence, Pattern::Memcached] {
            let guest = Guest::new(Kind::SmallPages, 4 << 20).unwrap();
            let ram = guest.ram();
            let mut memory = Memory::new(&ram.blocks()[0], &writes(pattern));
            let sum = guest.sum(ALL);
            // Enough writes for each page or item to be written more than once.
            (0..2000).for_each(|_| memory.write_next());
            let after = guest.sum(ALL);
            memory.write_next();
            assert!(sum != after && after != guest.sum(ALL), "{pattern:?}");
            let inside = 256..768;
            let outside = (0..1024).filter(|page| !inside.contains(page));
            assert!(outside.into_iter().all(|page| ram.blocks()[0].is_zero(page)), "{pattern:?}");
        }
    }

    #[test]
    fn a_guest_that_is_paused_writes_nothing_until_it_goes_on() {
        let guest = Guest::new(Kind::SmallPages, 4 << 20).unwrap();
        let mut writer = Writer::start(guest.ram(), &writes(Pattern::Sequence));
        while guest.sum(ALL) == 0 || guest.ram().blocks()[0].is_zero(257) {
            std::thread::yield_now();
        }
        writer.pause().unwrap();
        let sum = guest.sum(ALL);
        assert_eq!(guest.sum(ALL), sum);
        writer.resume().unwrap();
        while guest.sum(ALL) == sum {
            std::thread::yield_now();
        }
        assert!(writer.finish().achieved > 0.0);
    }
}
