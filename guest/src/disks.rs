//! What the guest does with its disks: several threads for each read and write it past the guest's page cache (`O_DIRECT`), so a disk's
//! data land in the guest's memory without any instruction of the guest. What was read stays in its buffer and is checked twice: when the
//! read has ended, and before the buffer is used again, possibly on another machine by then. A page that a disk wrote and a move has lost is
//! found there; before every other read the buffer is filled with poison, so that a lost page differs.
//!
//! The first half of a disk is only read. The second is written, too: each thread has a part of its own there.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Error, Result, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use sterna_guest::content::{PAGE_BYTES, Page, Random};
use sterna_guest::disk::{BLOCK_BYTES, check_block, poison, write_block};
use sterna_guest::page::FIRST_GENERATION;

use crate::BAD_LINES;
use crate::system;

/// Blocks of the longest read: 1 MiB.
const MAX_BLOCKS: usize = (1 << 20) / BLOCK_BYTES;
/// How often a paused thread looks whether it may go on.
const PAUSE: Duration = Duration::from_millis(5);
/// A thread that is so much behind its rate does not make up for it.
const MAX_LAG: Duration = Duration::from_millis(100);

/// How the disks are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Disks, from `/dev/vda` on; 0 is none.
    pub disks: u8,
    /// Bytes of all buffers of all disks together.
    pub buffers: u64,
    /// Threads for each disk; each has one read or write under way at a time.
    pub threads: u64,
    /// Bytes a second that all threads together read and write.
    pub rate: u64,
}

/// The threads' buffers, and what was done.
pub struct Disks {
    shared: Arc<Shared>,
    buffers: Vec<Arc<[Mutex<Buffer>]>>,
}

#[derive(Default)]
struct Shared {
    reads: AtomicU64,
    writes: AtomicU64,
    bytes: AtomicU64,
    checked: AtomicU64,
    bad: AtomicU64,
    in_flight: AtomicU64,
    paused: AtomicBool,
    wrong: Mutex<Vec<String>>,
}

/// Pages that a disk writes, with what they must hold since.
struct Buffer {
    disk: u8,
    pages: &'static mut [Page],
    /// The first block.
    first: u64,
    /// The generation of each block that was read; none before the first read.
    generations: Vec<u32>,
}

impl Disks {
    /// Opens the disks and begins. The modules are loaded.
    pub fn begin(load: Load) -> Result<Disks> {
        let all = usize::from(load.disks) * load.threads as usize;
        let pages_each = load.buffers as usize / PAGE_BYTES / all.max(1);
        if pages_each < MAX_BLOCKS || load.rate == 0 {
            return Err(Error::other(format!("each of {all} threads needs a buffer of 1 MiB, and a rate")));
        }
        let mut disks = Disks { shared: Arc::default(), buffers: Vec::new() };
        for number in 0..load.disks {
            let name = name(number);
            let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(&name);
            let mut file = file.map_err(|error| Error::other(format!("{name}: {error}")))?;
            let blocks = file.seek(SeekFrom::End(0))? / BLOCK_BYTES as u64;
            let part = blocks / 2 / load.threads;
            if part < MAX_BLOCKS as u64 {
                return Err(Error::other(format!("{name}: {blocks} blocks are too few for {} threads", load.threads)));
            }
            let file = Arc::new(file);
            for thread in 0..load.threads {
                let mut random = Random::new(u64::from(number) << 32 | thread);
                let buffers = divide(system::allocate_pages(pages_each)?, number, &mut random);
                disks.buffers.push(Arc::clone(&buffers));
                let start = blocks / 2 + thread * part;
                let worker = Worker {
                    shared: Arc::clone(&disks.shared),
                    disk: number,
                    file: Arc::clone(&file),
                    buffers,
                    given: 0..blocks / 2,
                    own: start..start + part,
                    generations: vec![FIRST_GENERATION; part as usize],
                    random,
                };
                let rate = (load.rate / all as u64).max(1);
                std::thread::spawn(move || worker.work(rate));
            }
        }
        Ok(disks)
    }

    /// Begins no read and no write until [`Disks::resume`]; those under way end.
    pub fn pause(&self) {
        self.shared.paused.store(true, Ordering::SeqCst);
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.shared.paused.store(false, Ordering::SeqCst);
    }

    /// Checks all that was read and is still in its buffer. A buffer that is in use is left out: its thread checks it.
    pub fn check_all(&self) -> CheckedBuffers {
        let mut checked = CheckedBuffers::default();
        for buffer in self.buffers.iter().flat_map(|buffers| buffers.iter()) {
            match buffer.try_lock() {
                Ok(mut buffer) => {
                    checked.buffers += 1;
                    checked.pages += buffer.generations.len() as u64;
                    checked.bad += self.shared.check(&mut buffer, "later");
                }
                Err(TryLockError::WouldBlock) => checked.busy += 1,
                Err(TryLockError::Poisoned(_)) => unreachable!("the program aborts where a thread panics"),
            }
        }
        checked
    }

    /// What went wrong since the last call.
    pub fn wrong(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.shared.wrong))
    }
}

/// What [`Disks::check_all`] has looked at.
#[derive(Default)]
pub struct CheckedBuffers {
    buffers: u64,
    busy: u64,
    pages: u64,
    bad: u64,
}

impl fmt::Display for CheckedBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffers={} busy={} pages={} bad={}", self.buffers, self.busy, self.pages, self.bad)
    }
}

impl fmt::Display for Disks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { reads, writes, bytes, checked, bad, in_flight, .. } = &*self.shared;
        let [reads, writes, bytes, checked, in_flight, bad] =
            [reads, writes, bytes, checked, in_flight, bad].map(|counter| counter.load(Ordering::SeqCst));
        write!(f, "reads={reads} writes={writes} bytes={bytes} checked={checked} in-flight={in_flight} bad={bad}")
    }
}

impl Shared {
    /// Checks what was read into `buffer`; returns how many pages are wrong. These are reported once: the buffer is empty then.
    fn check(&self, buffer: &mut Buffer, when: &str) -> u64 {
        let mut bad = 0;
        for ((block, &generation), page) in (buffer.first..).zip(&buffer.generations).zip(buffer.pages.iter()) {
            if let Err(found) = check_block(page, buffer.disk, block, generation) {
                bad += 1;
                self.report(format_args!(
                    "{} offset {} page {} expected generation {generation} found {found}, {when}",
                    name(buffer.disk),
                    block * BLOCK_BYTES as u64,
                    block - buffer.first,
                ));
            }
        }
        self.checked.fetch_add(buffer.generations.len() as u64, Ordering::Relaxed);
        if bad > 0 {
            buffer.generations.clear();
        }
        bad
    }

    fn report(&self, text: fmt::Arguments<'_>) {
        if self.bad.fetch_add(1, Ordering::SeqCst) < BAD_LINES {
            lock(&self.wrong).push(text.to_string());
        }
    }
}

/// One thread of a disk.
struct Worker {
    shared: Arc<Shared>,
    disk: u8,
    file: Arc<File>,
    buffers: Arc<[Mutex<Buffer>]>,
    /// The blocks that are only read.
    given: Range<u64>,
    /// The blocks that this thread writes and no other thread uses, and their generations.
    own: Range<u64>,
    generations: Vec<u32>,
    random: Random,
}

impl Worker {
    /// Reads and writes `rate` bytes a second until the machine stops, or until a read or write fails.
    fn work(mut self, rate: u64) {
        let mut due = Instant::now();
        for number in 0.. {
            // Counted before the pause is looked at: none is begun once a pause was ordered and none is in flight.
            self.shared.in_flight.fetch_add(1, Ordering::SeqCst);
            while self.shared.paused.load(Ordering::SeqCst) {
                self.shared.in_flight.fetch_sub(1, Ordering::SeqCst);
                std::thread::sleep(PAUSE);
                self.shared.in_flight.fetch_add(1, Ordering::SeqCst);
            }
            let done = self.step(number);
            self.shared.in_flight.fetch_sub(1, Ordering::SeqCst);
            match done {
                Ok(bytes) => {
                    self.shared.bytes.fetch_add(bytes, Ordering::Relaxed);
                    due += Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / rate);
                    let now = Instant::now();
                    due = due.max(now.checked_sub(MAX_LAG).unwrap_or(now));
                    std::thread::sleep(due.saturating_duration_since(now));
                }
                Err(error) => {
                    self.shared.report(format_args!("{} read or write {number}: {error}", name(self.disk)));
                    return;
                }
            }
        }
    }

    /// Reads or writes as many blocks as a random buffer has pages; returns how many bytes that are.
    fn step(&mut self, number: u32) -> Result<u64> {
        let bits = self.random.next();
        let chance = |shift: u32, of: u64| (bits >> shift).is_multiple_of(of);
        let (write, own, fresh) = (chance(32, 4), chance(40, 2), chance(48, 2));
        let buffer = &mut *lock(&self.buffers[(bits & 0xffff_ffff) as usize % self.buffers.len()]);
        self.shared.check(buffer, "later");
        let region = if write || own { &self.own } else { &self.given };
        let count = buffer.pages.len() as u64;
        buffer.first = region.start + self.random.next() % (region.end - region.start - count + 1);
        let blocks = buffer.first..buffer.first + count;
        let offset = buffer.first * BLOCK_BYTES as u64;
        // A read or write that fails leaves nothing to check.
        buffer.generations.clear();
        let own =
            (write || own).then(|| (blocks.start - self.own.start) as usize..(blocks.end - self.own.start) as usize);
        if write {
            let generations = &mut self.generations[own.clone().expect("only a thread's own blocks are written")];
            for ((block, generation), page) in blocks.zip(generations).zip(buffer.pages.iter_mut()) {
                *generation += 1;
                write_block(page, self.disk, block, *generation);
            }
            self.file.write_all_at(buffer.pages.as_flattened(), offset)?;
        } else {
            if fresh {
                buffer.pages.iter_mut().for_each(|page| poison(page, number));
            }
            self.file.read_exact_at(buffer.pages.as_flattened_mut(), offset)?;
        }
        match own {
            Some(own) => buffer.generations.extend_from_slice(&self.generations[own]),
            None => buffer.generations.resize(count as usize, FIRST_GENERATION),
        }
        if !write {
            self.shared.check(buffer, "at once");
        }
        let counter = if write { &self.shared.writes } else { &self.shared.reads };
        counter.fetch_add(1, Ordering::SeqCst);
        Ok(count * BLOCK_BYTES as u64)
    }
}

/// Divides `pages` into buffers of 1 to 256 pages, small ones more often than large ones.
fn divide(mut pages: &'static mut [Page], disk: u8, random: &mut Random) -> Arc<[Mutex<Buffer>]> {
    let mut buffers = Vec::new();
    while !pages.is_empty() {
        let bits = random.next();
        let count = (1 << (bits % 9).min((bits >> 32) % 9)).min(pages.len());
        let (own, rest) = pages.split_at_mut(count);
        pages = rest;
        // Written once, so that this memory is no longer free.
        own.iter_mut().for_each(|page| poison(page, u32::MAX));
        let generations = Vec::with_capacity(count);
        buffers.push(Mutex::new(Buffer { disk, pages: own, first: 0, generations }));
    }
    buffers.into()
}

fn name(disk: u8) -> String {
    format!("/dev/vd{}", char::from(b'a' + disk))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("the program aborts where a thread panics")
}
