//! A guest for tests: memory that threads write as vCPUs would, with a dirty log, and a monitor around it.
//!
//! The guest checks migrations: every word of memory contains the time of its last write (a counter that only grows),
//! the writers' table has the expected content of each page, and the number of monitors that run the guest at the same
//! time is counted.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::fs::File;
use std::io::{Read, Write};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use rustix::mm::{MapFlags, ProtFlags};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Listening;
use sterna_engine::migration::MigrationError;
use sterna_engine::report::ReceiveReport;
use sterna_engine::vmm::{AfterMove, DestinationVmm, ResumeReason, SourceVmm, VmmError};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::reported::{DirtyMarker, ReportedLog};
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_memory::ram::{Backing, GuestRam, RamBlock};
use sterna_memory::userfault::{Faults, Userfault};
use sterna_test_kit::Random;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
/// Words of a page.
const WORDS: usize = PAGE / 8;

/// RAM of a test guest: two blocks, one anonymous, one a shared memfd.
pub(crate) struct Memory {
    mappings: Vec<Mapping>,
    ram: GuestRam,
}

struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: only the address is kept; memory is accessed through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `Memory::new`, of this length, which is not used after this.
        unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) }.unwrap();
    }
}

impl Memory {
    /// Makes blocks of so many pages each, which were never touched.
    pub(crate) fn new(anonymous: usize, shared: usize) -> Arc<Self> {
        let file = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len((shared * PAGE) as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let at = std::ptr::null_mut();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let first = unsafe { rustix::mm::mmap_anonymous(at, anonymous * PAGE, access, MapFlags::PRIVATE) }.unwrap();
        // SAFETY: as above.
        let second = unsafe { rustix::mm::mmap(at, shared * PAGE, access, MapFlags::SHARED, &file, 0) }.unwrap();
        let mapping = |start: *mut std::ffi::c_void, pages: usize| Mapping {
            start: NonNull::new(start.cast()).unwrap(),
            bytes: pages * PAGE,
        };
        let mappings = vec![mapping(first, anonymous), mapping(second, shared)];
        let backings = [Backing::Anonymous, Backing::Shared(Arc::new(file), 0)];
        let blocks = mappings.iter().zip(backings).zip(["low", "high"]).map(|((mapping, backing), name)| {
            // SAFETY: the mappings live as long as this memory, which every user of its RAM holds; only atomics access
            // them.
            unsafe { RamBlock::new(name, mapping.start, mapping.bytes, backing) }
        });
        let ram = GuestRam::new(blocks.collect()).unwrap();
        Arc::new(Self { mappings, ram })
    }

    /// Makes one block that is declared to have huge pages. With `exists` it is ordinary memory; otherwise it is of an
    /// empty pool of huge pages. Fails if the system has no such pool.
    pub(crate) fn of_huge_pages(count: usize, exists: bool) -> std::io::Result<Arc<Self>> {
        const HUGE: usize = 2 << 20;
        let (bytes, access) = (count * HUGE, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address that the kernel chooses, large enough to align to a huge page.
        let room =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes + HUGE, access, MapFlags::PRIVATE) }?;
        let start = room.wrapping_byte_add(room.addr().wrapping_neg() % HUGE);
        let before = start.addr() - room.addr();
        // SAFETY: the parts of this new mapping before and behind the block.
        unsafe {
            if before > 0 {
                rustix::mm::munmap(room, before)?;
            }
            rustix::mm::munmap(start.wrapping_byte_add(bytes), HUGE - before)?;
        }
        let mapping = Mapping { start: NonNull::new(start.cast()).unwrap(), bytes };
        let mut backing = Backing::Anonymous;
        if !exists {
            let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::HUGETLB;
            let file = File::from(rustix::fs::memfd_create("guest", flags | rustix::fs::MemfdFlags::HUGE_2MB)?);
            file.set_len(bytes as u64)?;
            let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
            // SAFETY: replaces the block, which no code uses yet.
            unsafe { rustix::mm::mmap(start, bytes, access, flags, &file, 0) }?;
            backing = Backing::Shared(Arc::new(file), 0);
        }
        // SAFETY: as in `new`.
        let block = unsafe { RamBlock::new("huge", mapping.start, bytes, backing) }.with_page_size(HUGE);
        Ok(Arc::new(Self { mappings: vec![mapping], ram: GuestRam::new(vec![block]).unwrap() }))
    }

    /// Makes one block that is a private mapping of `file`, like that of a guest restored from a snapshot.
    pub(crate) fn of_private_file(file: &File) -> Arc<Self> {
        let bytes = file.metadata().unwrap().len() as usize;
        let (at, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { rustix::mm::mmap(at, bytes, access, MapFlags::PRIVATE, file, 0) }.unwrap();
        let mapping = Mapping { start: NonNull::new(start.cast()).unwrap(), bytes };
        // SAFETY: as in `new`.
        let block = unsafe { RamBlock::new("restored", mapping.start, bytes, Backing::Other) };
        Arc::new(Self { mappings: vec![mapping], ram: GuestRam::new(vec![block]).unwrap() })
    }

    pub(crate) fn ram(&self) -> GuestRam {
        self.ram.clone()
    }

    /// Gives every page content that differs from page to page and hardly shrinks.
    pub(crate) fn fill(&self) {
        for block in 0..self.mappings.len() {
            for (at, word) in self.words(block).iter().enumerate() {
                word.store((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Ordering::Relaxed);
            }
        }
    }

    /// Returns the number of pages of each block.
    pub(crate) fn pages(&self) -> Vec<u64> {
        self.ram.blocks().iter().map(RamBlock::pages).collect()
    }

    pub(crate) fn words(&self, block: usize) -> &[AtomicU64] {
        let mapping = &self.mappings[block];
        // SAFETY: the mapping is whole words, aligned to pages, lives as long as `self`, and is accessed by atomics
        // here and by the library through raw pointers.
        unsafe { std::slice::from_raw_parts(mapping.start.as_ptr().cast(), mapping.bytes / 8) }
    }

    /// Returns how many pages differ from `other`'s.
    pub(crate) fn differing_pages(&self, other: &Self) -> usize {
        let blocks = 0..self.mappings.len();
        let differs = |(ours, theirs): (&[AtomicU64], &[AtomicU64])| {
            ours.iter().zip(theirs).any(|(our, their)| our.load(Ordering::Relaxed) != their.load(Ordering::Relaxed))
        };
        blocks
            .map(|block| {
                self.words(block)
                    .chunks(WORDS)
                    .zip(other.words(block).chunks(WORDS))
                    .filter(|pair| differs(*pair))
                    .count()
            })
            .sum()
    }

    /// Returns a number computed from all of the memory.
    pub(crate) fn digest(&self) -> u64 {
        let words = (0..self.mappings.len()).flat_map(|block| self.words(block));
        words.fold(0xcbf2_9ce4_8422_2325, |digest, word| {
            (digest ^ word.load(Ordering::Relaxed)).wrapping_mul(0x100_0000_01b3)
        })
    }
}

/// Counts the places where the guest runs. It must never run twice at the same time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Running(Arc<(AtomicI32, AtomicBool)>);

impl Running {
    fn begin(&self) {
        if self.0.0.fetch_add(1, Ordering::SeqCst) != 0 {
            self.0.1.store(true, Ordering::SeqCst);
        }
    }

    fn end(&self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn now(&self) -> i32 {
        self.0.0.load(Ordering::SeqCst)
    }

    pub(crate) fn ever_twice(&self) -> bool {
        self.0.1.load(Ordering::SeqCst)
    }
}

/// The work of the writers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) writers: usize,
    /// Pages of each block that are written, from the first on.
    pub(crate) span: u64,
    pub(crate) seed: u64,
    /// Writes between two waits for the pace; 0: as fast as possible.
    pub(crate) burst: u64,
}

/// A monitor with its guest.
pub(crate) struct Monitor {
    pub(crate) memory: Arc<Memory>,
    running: Running,
    workload: Workload,
    marker: DirtyMarker,
    life: Life,
    /// Writes so far, over the guest's whole life; part of its state.
    pub(crate) writes: Arc<AtomicU64>,
    /// What it expects its state to have, in bytes. It has little.
    pub(crate) state_size: u64,
    /// The name of the method that fails.
    pub(crate) fails: Option<&'static str>,
    /// Whether the failure is a panic instead of an error.
    pub(crate) panics: bool,
    /// Bytes of state in addition to the counter.
    pub(crate) state_bytes: usize,
    pub(crate) ahead: bool,
    /// The throttle in percent. Pausing the guest ends it.
    pub(crate) throttled: u8,
    /// The span of the writers once the guest is slowed down.
    pub(crate) span_when_throttled: Option<u64>,
    /// Pages that are written between the call of `pause` and its return.
    pub(crate) last_writes: u64,
    /// Pages of each block that `save` writes: from the first on, and as many from the last on.
    pub(crate) save_writes: u64,
    pub(crate) no_post_copy: Option<&'static str>,
    pub(crate) called: Vec<&'static str>,
    /// Why the guest was resumed at the source, each time.
    pub(crate) resumed: Vec<ResumeReason>,
    /// Whether this monitor was told that its guest runs at the destination, so that it may end.
    pub(crate) moved: bool,
    /// Is called before each method is executed.
    pub(crate) on_call: Option<Box<dyn Fn(&'static str) + Send>>,
    digest: u64,
    /// In post-copy: the memory of the paused source, and the guest's comparisons with it.
    pub(crate) behind: Option<Behind>,
}

/// The check of post-copy: at the destination the guest reads its memory and compares it with that of the source, and
/// writes the pages whose number is 3 modulo 4.
#[derive(Clone)]
pub(crate) struct Behind {
    pub(crate) source: Arc<Memory>,
    pub(crate) wrong: Arc<AtomicU64>,
    pub(crate) compared: Arc<AtomicU64>,
    /// Without one, the guest is as fast as it can be.
    pub(crate) pace: Option<Pace>,
}

impl Behind {
    pub(crate) fn new(source: &Arc<Memory>) -> Self {
        Self { source: Arc::clone(source), wrong: Arc::default(), compared: Arc::default(), pace: None }
    }

    /// Waits until the guest has looked at its memory.
    pub(crate) fn wait_until_compared(&self) {
        while self.compared.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
    }

    fn run(&self, memory: &Memory, seed: u64, stop: &AtomicBool) {
        let pages = memory.pages();
        let mut random = Random::new(seed);
        let mut written = std::collections::HashMap::new();
        while !stop.load(Ordering::Relaxed) {
            self.pace.iter().for_each(Pace::take);
            let block = random.index(pages.len());
            let page = random.below(pages[block]) as usize;
            let word = page * WORDS + random.index(WORDS);
            let here = memory.words(block)[word].load(Ordering::Relaxed);
            if page % 4 == 3 {
                let expected = written.get(&(block, word)).copied();
                let expected = expected.unwrap_or_else(|| self.source.words(block)[word].load(Ordering::Relaxed));
                self.wrong.fetch_add(u64::from(here != expected), Ordering::Relaxed);
                let value = random.next_u64();
                memory.words(block)[word].store(value, Ordering::Relaxed);
                written.insert((block, word), value);
            } else {
                let there = self.source.words(block)[word].load(Ordering::Relaxed);
                self.wrong.fetch_add(u64::from(here != there), Ordering::Relaxed);
            }
            self.compared.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how many pages differ although the guest has not written them here.
    pub(crate) fn differing_pages(&self, memory: &Memory) -> usize {
        let differs = |block: usize, page: usize| {
            let words = page * WORDS..(page + 1) * WORDS;
            let pair = memory.words(block)[words.clone()].iter().zip(&self.source.words(block)[words]);
            page % 4 != 3
                && pair.into_iter().any(|(here, there)| here.load(Ordering::Relaxed) != there.load(Ordering::Relaxed))
        };
        let pages = memory.pages();
        (0..pages.len()).map(|block| (0..pages[block] as usize).filter(|page| differs(block, *page)).count()).sum()
    }
}

/// How many words the guest may look at; while there are none it waits.
#[derive(Clone, Default)]
pub(crate) struct Pace(Arc<(Mutex<u64>, Condvar)>);

impl Pace {
    /// Lets the guest look at so many words, if it has not as many left; `u64::MAX`: at all.
    pub(crate) fn allow(&self, words: u64) {
        let mut left = self.0.0.lock().unwrap();
        *left = words.max(*left);
        self.0.1.notify_all();
    }

    fn take(&self) {
        let mut left = self.0.1.wait_while(self.0.0.lock().unwrap(), |left| *left == 0).unwrap();
        *left -= 1;
    }
}

/// The dirty log of a guest that never converges, however slow the machine is: while the guest runs, each collecting also names every page
/// that its writers may write.
pub(crate) struct Restless {
    log: Box<dyn DirtyLog>,
    life: Life,
}

impl Restless {
    pub(crate) fn new(log: Box<dyn DirtyLog>, monitor: &Monitor) -> Self {
        Self { log, life: monitor.life() }
    }
}

/// Returns the log of `monitor`'s guest: that of one that never converges, if its writers never pause.
pub(crate) fn log_of(monitor: &Monitor, log: ReportedLog) -> Box<dyn DirtyLog> {
    if monitor.workload.burst == 0 { Box::new(Restless::new(Box::new(log), monitor)) } else { Box::new(log) }
}

impl DirtyLog for Restless {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        self.log.start()
    }

    fn found_populated(&mut self, block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        self.log.found_populated(block, populated)
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        if let Some(span) = self.life.span() {
            dirty.set(0..span.min(dirty.pages()));
        }
        self.log.collect(block, dirty)
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}

/// The life of a monitor's process, which may be killed from outside.
#[derive(Clone, Default)]
pub(crate) struct Life(Arc<Mutex<LifeState>>);

#[derive(Default)]
struct LifeState {
    dead: bool,
    writers: Option<Writers>,
}

struct Writers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    running: Running,
    may_wait: bool,
    span: u64,
    pace: Option<Pace>,
}

impl Life {
    /// Kills the process and its guest.
    pub(crate) fn kill(&self) {
        self.0.lock().unwrap().dead = true;
        self.end(true);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.0.lock().unwrap().dead
    }

    pub(crate) fn runs(&self) -> bool {
        self.0.lock().unwrap().writers.is_some()
    }

    /// Returns the span of the writers, while the guest runs.
    fn span(&self) -> Option<u64> {
        self.0.lock().unwrap().writers.as_ref().map(|writers| writers.span)
    }

    fn stop(&self) {
        self.end(false);
    }

    fn end(&self, killed: bool) {
        let writers = self.0.lock().unwrap().writers.take();
        if let Some(writers) = writers {
            writers.stop.store(true, Ordering::Relaxed);
            writers.pace.iter().for_each(|pace| pace.allow(u64::MAX));
            // In post-copy a thread may be waiting for a page that will never arrive. A real thread would end with its
            // process; here the thread and its memory are leaked.
            if !(killed && writers.may_wait) {
                writers.threads.into_iter().for_each(|thread| thread.join().unwrap());
            }
            writers.running.end();
        }
    }
}

impl Monitor {
    /// Makes a monitor whose guest does not run yet, and its dirty log.
    pub(crate) fn new(memory: &Arc<Memory>, running: &Running, workload: Workload) -> (Self, ReportedLog) {
        let log = ReportedLog::new(&memory.pages());
        let monitor = Self {
            memory: Arc::clone(memory),
            running: running.clone(),
            workload,
            marker: log.marker(),
            life: Life::default(),
            writes: Arc::default(),
            state_size: 0,
            fails: None,
            panics: false,
            state_bytes: 100,
            ahead: false,
            throttled: 0,
            span_when_throttled: None,
            last_writes: 0,
            save_writes: 0,
            no_post_copy: None,
            called: Vec::new(),
            resumed: Vec::new(),
            moved: false,
            on_call: None,
            digest: 0,
            behind: None,
        };
        (monitor, log)
    }

    pub(crate) fn runs(&self) -> bool {
        self.life.runs()
    }

    pub(crate) fn life(&self) -> Life {
        self.life.clone()
    }

    pub(crate) fn start(&mut self) {
        let mut life = self.life.0.lock().unwrap();
        assert!(life.writers.is_none(), "it runs already");
        if life.dead {
            return;
        }
        self.running.begin();
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..self.workload.writers).map(|writer| {
            let (stop, memory, marker) = (Arc::clone(&stop), Arc::clone(&self.memory), self.marker.clone());
            let (writes, workload) = (Arc::clone(&self.writes), self.workload);
            // One writer only: each must know what it has written.
            let behind = self.behind.clone().filter(|_| writer == 0);
            let only_compares = self.behind.is_some();
            std::thread::spawn(move || match behind {
                Some(behind) => behind.run(&memory, workload.seed, &stop),
                None if only_compares => {}
                None => write(&memory, &marker, &writes, workload, writer as u64, &stop),
            })
        });
        life.writers = Some(Writers {
            threads: threads.collect(),
            stop,
            running: self.running.clone(),
            may_wait: self.behind.is_some(),
            span: self.workload.span,
            pace: self.behind.as_ref().and_then(|behind| behind.pace.clone()),
        });
    }

    pub(crate) fn stop(&mut self) {
        self.life.stop();
    }

    fn may_fail(&mut self, what: &'static str) -> Result<(), VmmError> {
        self.called.push(what);
        if let Some(called) = &self.on_call {
            called(what);
        }
        if self.life.is_dead() {
            return Err("the process is dead".into());
        }
        self.fails_at(what)
    }

    fn fails_at(&self, what: &'static str) -> Result<(), VmmError> {
        match (self.fails == Some(what), self.panics) {
            (false, _) => Ok(()),
            (true, false) => Err(format!("{what} was made to fail").into()),
            (true, true) => panic!("{what} was made to fail"),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop();
    }
}

fn write(
    memory: &Memory,
    marker: &DirtyMarker,
    writes: &AtomicU64,
    workload: Workload,
    writer: u64,
    stop: &AtomicBool,
) {
    let seed = workload.seed ^ (writer + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ writes.load(Ordering::Relaxed);
    let mut random = Random::new(seed);
    let pages = memory.pages();
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..workload.burst.max(1) {
            let block = random.index(pages.len());
            let page = random.below(pages[block].min(workload.span));
            let word = page as usize * WORDS + random.index(WORDS);
            // Now and then a page becomes zero again.
            if random.once_in(97) {
                memory.words(block)[page as usize * WORDS..][..WORDS]
                    .iter()
                    .for_each(|word| word.store(0, Ordering::Relaxed));
            } else {
                memory.words(block)[word].store(random.next_u64(), Ordering::Relaxed);
            }
            marker.mark(block, page..page + 1);
            writes.fetch_add(1, Ordering::Relaxed);
        }
        if workload.burst > 0 {
            std::thread::yield_now();
        }
    }
}

impl SourceVmm for Monitor {
    fn name(&self) -> String {
        self.fails_at("name").unwrap();
        "test monitor 1".into()
    }

    fn state_size(&self) -> u64 {
        self.fails_at("state_size").unwrap();
        self.state_size
    }

    fn pause(&mut self) -> Result<(), VmmError> {
        self.may_fail("pause")?;
        for page in 0..self.last_writes {
            self.memory.words(0)[page as usize * WORDS].fetch_add(1, Ordering::Relaxed);
        }
        self.marker.mark(0, 0..self.last_writes);
        self.stop();
        self.throttled = 0;
        self.fails_at("paused")
    }

    fn resume(&mut self, reason: ResumeReason) -> Result<(), VmmError> {
        self.resumed.push(reason);
        self.may_fail("resume")?;
        // Pausing may have failed.
        if !self.runs() {
            self.start();
        }
        Ok(())
    }

    fn save(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.may_fail("save")?;
        for (block, pages) in self.memory.pages().into_iter().enumerate() {
            for page in (0..self.save_writes).chain(pages - self.save_writes..pages) {
                self.memory.words(block)[page as usize * WORDS].fetch_add(1, Ordering::Relaxed);
                self.marker.mark(block, page..page + 1);
            }
        }
        state.write_all(&self.writes.load(Ordering::Relaxed).to_le_bytes())?;
        state.write_all(&self.memory.digest().to_le_bytes())?;
        state.write_all(&vec![0x5a; self.state_bytes])?;
        Ok(())
    }

    fn save_ahead(&mut self, state: &mut dyn Write) -> Result<(), VmmError> {
        self.may_fail("save_ahead")?;
        if self.ahead {
            state.write_all(b"sent ahead")?;
        }
        Ok(())
    }

    fn throttle(&mut self, percent: u8) -> Result<(), VmmError> {
        self.may_fail("throttle")?;
        self.throttled = percent;
        if percent > 0
            && let Some(span) = self.span_when_throttled.take()
        {
            self.stop();
            self.workload.span = span;
            self.start();
        }
        Ok(())
    }

    fn post_copy_refusal(&self) -> Option<String> {
        self.fails_at("post_copy_refusal").unwrap();
        self.no_post_copy.map(str::to_owned)
    }

    fn guest_moved(&mut self) -> Result<AfterMove, VmmError> {
        self.moved = true;
        Ok(AfterMove::Kept)
    }
}

impl DestinationVmm for Monitor {
    fn name(&self) -> String {
        self.fails_at("name").unwrap();
        "test monitor 2".into()
    }

    fn load_ahead(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.may_fail("load_ahead")?;
        let mut text = String::new();
        state.read_to_string(&mut text)?;
        if text == "sent ahead" { Ok(()) } else { Err(format!("not what was sent: {text}").into()) }
    }

    fn load(&mut self, state: &mut dyn Read) -> Result<(), VmmError> {
        self.may_fail("load")?;
        let mut number = [0; 8];
        state.read_exact(&mut number)?;
        self.writes.store(u64::from_le_bytes(number), Ordering::Relaxed);
        state.read_exact(&mut number)?;
        self.digest = u64::from_le_bytes(number);
        let mut rest = Vec::new();
        state.read_to_end(&mut rest)?;
        if rest.iter().any(|byte| *byte != 0x5a) {
            return Err("the state is damaged".into());
        }
        if self.behind.is_some() {
            return Ok(());
        }
        // The guest is paused and all of its memory has arrived: the two must be equal.
        if self.memory.digest() == self.digest { Ok(()) } else { Err("the memory is not what the source had".into()) }
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        self.may_fail("start")?;
        self.start();
        Ok(())
    }

    fn post_copy_refusal(&self) -> Option<String> {
        self.fails_at("post_copy_refusal").unwrap();
        self.no_post_copy.map(str::to_owned)
    }
}

/// A signal that one thread waits for and another sets.
#[derive(Clone, Default)]
pub(crate) struct Signal(Arc<(Mutex<bool>, Condvar)>);

impl Signal {
    pub(crate) fn set(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub(crate) fn wait(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |set| !*set).unwrap());
    }
}

/// The monitors of both sides of a move, and the source's dirty log. The guest, which moves by post-copy if its writers never pause, does
/// not run yet.
pub(crate) fn monitors(
    [source, destination]: [&Arc<Memory>; 2],
    running: &Running,
    workload: Workload,
) -> (Monitor, ReportedLog, Monitor) {
    let (from, log) = Monitor::new(source, running, workload);
    let (mut to, _) = Monitor::new(destination, running, workload);
    if workload.burst == 0 {
        to.behind = Some(Behind::new(source));
    }
    (from, log, to)
}

/// What is known of a guest that moves: from its start at the destination, the guest compares its memory with the source's.
pub(crate) struct Witness {
    pub(crate) source: Arc<Memory>,
    pub(crate) destination: Arc<Memory>,
    pub(crate) behind: Behind,
    running: Running,
}

/// Starts a guest every page of which has content, and returns its monitor, its dirty log, the monitor of the destination and the witness
/// of the move.
pub(crate) fn witnessed(workload: Workload) -> (Monitor, ReportedLog, Monitor, Witness) {
    let (source, destination, running) = (Memory::new(3000, 1000), Memory::new(3000, 1000), Running::default());
    source.fill();
    let (mut from, log, mut to) = monitors([&source, &destination], &running, workload);
    let behind = Behind::new(&source);
    to.behind = Some(behind.clone());
    from.start();
    (from, log, to, Witness { source, destination, behind, running })
}

impl Witness {
    /// Checks that the guest has moved with all of its memory, and stops it.
    pub(crate) fn check(&self, from: &Monitor, to: &mut Monitor) {
        assert!(to.runs() && !from.runs() && !self.running.ever_twice());
        self.behind.wait_until_compared();
        to.stop();
        let wrong = self.behind.wrong.load(Ordering::Relaxed);
        assert_eq!((wrong, self.behind.differing_pages(&self.destination)), (0, 0));
    }
}

/// Returns whether page faults can be watched here; prints the reason if not.
pub(crate) fn faults_can_be_watched() -> bool {
    let opened = Userfault::open(Faults::All, 0);
    if let Err(error) = &opened {
        println!("skipped: {error}");
    }
    opened.is_ok()
}

/// Runs both sides of a migration: `send`, while `to` receives.
pub(crate) fn both_sides<R>(
    listening: Listening,
    to: &mut Monitor,
    send: impl FnOnce() -> R,
) -> (R, Result<ReceiveReport, MigrationError>) {
    std::thread::scope(|scope| {
        let receiving = scope.spawn(move || listening.run(to, &Cancel::new(), &()));
        let sent = send();
        (sent, receiving.join().unwrap())
    })
}
