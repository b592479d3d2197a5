//! One side of `sterna-bench delta`, in the process that [`side`](super::side) is.
//!
//! The guest at the source writes every page exactly once in each round, while its log is collected, so that every page
//! is dirty in every round with just the measured change. The time of these writes is not counted. Guests that write at
//! any time are the subject of the cells with a microvm.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_guest::content::{PAGE_BYTES, Page, mix};
use sterna_guest::page::{Fill, Pages};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::checksum::{Crc32c, crc32c_combine};
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

use super::super::measured::check_method;
use super::clock::cpu_ns;
use super::guest::{Guest, Memory, Monitor};
use super::pin::pin;

/// Words of a page.
const WORDS: u64 = (PAGE_BYTES / 8) as u64;
/// Short enough that no round is the last while the guest writes, and long enough for an idle guest's state.
const DOWNTIME: Duration = Duration::from_millis(50);

/// The content of the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Content {
    /// Incompressible.
    Random,
    /// As in a guest's RAM: shrinks to a third.
    Corpus,
}

impl Content {
    fn pages(self) -> Pages {
        Pages::new(match self {
            Self::Random => Fill::Random,
            Self::Corpus => Fill::Corpus,
        })
    }
}

/// The change of a page from round to round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Change {
    /// One to four words next to each other: a counter, a list's links.
    Small,
    /// Seven of ten pages 1–8 words, two 32 words, one all of it.
    Mixed,
    /// 300 words, here and there: more than half of the page.
    Scattered,
    /// All of it.
    Rewritten,
}

/// A command to a side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Listen at this address and receive one migration.
    Receive { at: String, bytes: u64, cpus: Vec<usize> },
    /// Send to that address.
    Send { to: String, job: Job, cpus: Vec<usize> },
}

/// One migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) bytes: u64,
    pub(crate) content: Content,
    pub(crate) change: Change,
    pub(crate) method: String,
    pub(crate) deltas: bool,
    /// How long the guest goes on writing after the first round, without the time of the writes themselves.
    pub(crate) seconds: f64,
    pub(crate) channels: u16,
}

/// The results of a side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Checksum of guest RAM, once the guest was paused.
    pub(crate) checksum: u32,
    /// CPU time of the whole migration.
    pub(crate) cpu_seconds: f64,
    pub(crate) total_ms: f64,
    /// Pages of all rounds, and how they were sent.
    pub(crate) pages: u64,
    pub(crate) delta_pages: u64,
    pub(crate) same_pages: u64,
    pub(crate) wire_bytes: u64,
    /// The figures of the rounds after the first.
    pub(crate) counted: Counted,
}

/// Counted between the log's first collection and the last one before which the guest wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counted {
    pub(crate) pages: u64,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) rounds: u64,
}

/// Executes a command. `listening` sends the address at which this side, if it is a destination, waits for the source.
pub(crate) fn execute(order: Order, listening: impl FnOnce(String) -> Result<(), String>) -> Result<Found, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    match order {
        Order::Receive { at, bytes, cpus } => {
            pin(&cpus)?;
            let guest = Guest::new(Memory::Anonymous, bytes).map_err(|error| text(&error))?;
            // Populated before, because fresh memory is not part of the measurement.
            let ram = guest.ram();
            ram.blocks()[0].populate(0..ram.blocks()[0].pages()).map_err(|error| text(&error))?;
            let destination =
                Destination::new(guest.ram()).listen(&at, &Security::Insecure).map_err(|error| text(&error))?;
            listening(destination.address().to_string())?;
            let before = cpu_ns();
            destination.run(&mut Monitor::default(), &Cancel::new(), &()).map_err(|error| text(&error))?;
            let cpu_seconds = (cpu_ns() - before) as f64 / 1e9;
            Ok(Found { checksum: checksum(&guest), cpu_seconds, ..Found::default() })
        }
        Order::Send { to, job, cpus } => {
            pin(&cpus)?;
            let guest = Arc::new(Guest::new(Memory::Anonymous, job.bytes).map_err(|error| text(&error))?);
            let writer = Writer { guest: Arc::clone(&guest), content: job.content, change: job.change };
            writer.fill();
            let counted = Arc::new(Mutex::new(Counted::default()));
            let log = WritingLog::new(writer, Duration::from_secs_f64(job.seconds), Arc::clone(&counted));
            let method: MethodChoice = job.method.parse().map_err(|error| text(&error))?;
            let source =
                Source::new(guest.ram(), Box::new(log)).method(method).channels(job.channels).downtime(DOWNTIME);
            let mut source = if job.deltas { source.delta_cache(u64::MAX) } else { source };
            let before = cpu_ns();
            let report = source.run(to, &Security::Insecure, &mut Monitor::default(), &Cancel::new(), &());
            let report = report.map_err(|error| text(&error))?;
            check_method(method, &report.method).map_err(|error| text(&error))?;
            let cpu_seconds = (cpu_ns() - before) as f64 / 1e9;
            let counted = *counted.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(Found {
                checksum: checksum(&guest),
                cpu_seconds,
                total_ms: report.total_ms,
                pages: report.normal_pages,
                delta_pages: report.delta_pages,
                same_pages: report.same_pages,
                wire_bytes: report.wire_bytes,
                counted,
            })
        }
    }
}

/// Returns the checksum of all RAM.
fn checksum(guest: &Guest) -> u32 {
    let ram = guest.ram();
    let block = &ram.blocks()[0];
    let mut page = [0; PAGE_BYTES];
    (0..block.pages()).fold(0, |all, number| {
        block.read_page(number, &mut page).expect("its own memory is read");
        let mut one = Crc32c::new();
        one.update(&page);
        crc32c_combine(all, one.finish(), PAGE_BYTES as u64)
    })
}

/// Writes the guest's memory.
struct Writer {
    guest: Arc<Guest>,
    content: Content,
    change: Change,
}

impl Writer {
    fn fill(&self) {
        (0..self.pages()).for_each(|page| self.rewrite(page, 1));
    }

    fn pages(&self) -> u64 {
        self.guest.ram().bytes() / PAGE_BYTES as u64
    }

    fn rewrite(&self, page: u64, generation: u32) {
        let mut bytes: Page = [0; PAGE_BYTES];
        self.content.pages().write(&mut bytes, page, generation);
        self.guest.ram().blocks()[0].write(page, &bytes);
    }

    fn change_words(&self, page: u64, count: u64, seed: u64, apart: bool) {
        let first = mix(seed) % (WORDS - 8);
        for number in 0..count {
            let at = if apart { mix(seed + number) % WORDS } else { first + number };
            // Small values, as guests mostly write.
            self.guest.word(page * WORDS + at).store(mix(seed ^ number) >> 40, Ordering::Relaxed);
        }
    }

    /// Writes each page once.
    fn round(&self, round: u64) {
        for page in 0..self.pages() {
            let seed = mix(round << 32 | page);
            match (self.change, seed % 10) {
                (Change::Small, _) => self.change_words(page, 1 + seed % 4, seed, false),
                (Change::Mixed, 0..=6) => self.change_words(page, 1 + seed / 10 % 8, seed, true),
                (Change::Mixed, 7..=8) => self.change_words(page, 32, seed, true),
                (Change::Scattered, _) => self.change_words(page, 300, seed, true),
                (Change::Mixed | Change::Rewritten, _) => self.rewrite(page, 1 + round as u32),
            }
        }
    }
}

/// The dirty log of a guest that writes all of its pages in each round.
struct WritingLog {
    idle: ReportedLog,
    writer: Writer,
    time: Duration,
    counted: Arc<Mutex<Counted>>,
    /// The time of the first collection and the CPU time used by then; after it, the CPU time of the guest's writes.
    first: Option<(Instant, u64)>,
    writing: (Duration, u64),
    /// Whether the guest has stopped writing.
    over: bool,
}

impl WritingLog {
    fn new(writer: Writer, time: Duration, counted: Arc<Mutex<Counted>>) -> Self {
        let idle = ReportedLog::new(&[writer.pages()]);
        Self { idle, writer, time, counted, first: None, writing: (Duration::ZERO, 0), over: false }
    }
}

impl DirtyLog for WritingLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.idle.start()
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        self.idle.collect(block, dirty)?;
        if self.over {
            return Ok(());
        }
        let (now, used) = (Instant::now(), cpu_ns());
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, used_first) = *self.first.get_or_insert((now, used));
        let elapsed = (now - first).saturating_sub(self.writing.0);
        // The pages that were written at each collection before this one.
        counted.pages = counted.rounds * dirty.pages();
        counted.seconds = elapsed.as_secs_f64();
        counted.cpu_seconds = (used - used_first).saturating_sub(self.writing.1) as f64 / 1e9;
        if elapsed >= self.time {
            self.over = true;
            return Ok(());
        }
        counted.rounds += 1;
        self.writer.round(counted.rounds);
        dirty.set(0..dirty.pages());
        self.writing.0 += now.elapsed();
        self.writing.1 += cpu_ns() - used;
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.idle.stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(content: Content, change: Change) -> Writer {
        let guest = Arc::new(Guest::new(Memory::SmallPages, 2 << 20).unwrap());
        let writer = Writer { guest, content, change };
        writer.fill();
        writer
    }

    fn differing_words(writer: &Writer, round: u64) -> Vec<usize> {
        let all = |writer: &Writer| -> Vec<u64> {
            (0..writer.pages() * WORDS).map(|at| writer.guest.word(at).load(Ordering::Relaxed)).collect()
        };
        let before = all(writer);
        writer.round(round);
        let words = WORDS as usize;
        let pages =
            before.chunks_exact(words).zip(all(writer).chunks_exact(words).map(<[u64]>::to_vec).collect::<Vec<_>>());
        pages.map(|(a, b)| a.iter().zip(&b).filter(|(a, b)| a != b).count()).collect()
    }

    #[test]
    fn each_page_is_changed_as_its_cell_says() {
        for (change, range) in [
            (Change::Small, 1..=4),
            (Change::Scattered, 200..=300),
            (Change::Rewritten, 400..=512),
            (Change::Mixed, 1..=512),
        ] {
            for content in [Content::Random, Content::Corpus] {
                let changed = differing_words(&writer(content, change), 1);
                assert_eq!(changed.len(), 512);
                assert!(changed.iter().all(|words| range.contains(words)), "{change:?} {content:?}: {changed:?}");
                if change == Change::Mixed {
                    let few = changed.iter().filter(|words| **words <= 8).count();
                    assert!((300..420).contains(&few), "{few}");
                }
            }
        }
    }

    #[test]
    fn the_log_counts_the_rounds_that_were_sent_and_none_after() {
        let counted = Arc::new(Mutex::new(Counted::default()));
        let mut log = WritingLog::new(writer(Content::Random, Change::Small), Duration::ZERO, Arc::clone(&counted));
        log.start().unwrap();
        let mut dirty = PageBitmap::new(512);
        log.collect(0, &mut dirty).unwrap();
        assert_eq!((dirty.count(), counted.lock().unwrap().rounds), (0, 0));
        let mut log = WritingLog::new(writer(Content::Random, Change::Small), Duration::MAX, Arc::clone(&counted));
        log.start().unwrap();
        for round in 1..4 {
            let mut dirty = PageBitmap::new(512);
            log.collect(0, &mut dirty).unwrap();
            let counted = *counted.lock().unwrap();
            assert_eq!((dirty.count(), counted.pages, counted.rounds), (512, 512 * (round - 1), round));
        }
    }
}
