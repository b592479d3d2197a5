//! Helpers that the tests of dirty logs share: memory of every kind, and the rounds of a migration with racing writers.

// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub)]

#[cfg(target_arch = "x86_64")]
pub mod guest;
pub mod held_disk;
pub mod process;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};

pub const HUGE: usize = 2 << 20;
pub const WORDS: usize = PAGE_SIZE / 8;

/// Starts a log, or prints why this machine cannot have it.
pub fn works(log: &mut dyn DirtyLog) -> bool {
    match log.start() {
        Ok(()) => true,
        Err(error @ (DirtyLogError::Missing { .. } | DirtyLogError::Userfault(_))) => {
            println!("skipped: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Memory that is unmapped when dropped.
pub struct Memory {
    base: *mut u8,
    len: usize,
    mapped: (*mut u8, usize),
}

// SAFETY: plain memory, accessed by atomics only.
unsafe impl Sync for Memory {}
// SAFETY: as above; the mapping belongs to the process.
unsafe impl Send for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; borrows of it have ended.
        unsafe { munmap(self.mapped.0.cast(), self.mapped.1).unwrap() };
    }
}

impl Memory {
    /// Maps private anonymous memory at a multiple of 2 MiB.
    fn anonymous(pages: usize, advice: Advice) -> Self {
        let (len, mapped) = (pages * PAGE_SIZE, pages * PAGE_SIZE + HUGE);
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let start: *mut u8 = unsafe {
            mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
                .unwrap()
                .cast()
        };
        let base = start.wrapping_add(start.addr().next_multiple_of(HUGE) - start.addr());
        // SAFETY: advice on our own mapping.
        unsafe { madvise(base.cast(), len, advice).unwrap() };
        Self { base, len, mapped: (start, mapped) }
    }

    pub fn small(pages: usize) -> Self {
        Self::anonymous(pages, Advice::LinuxNoHugepage)
    }

    pub fn transparent_huge(pages: usize) -> Self {
        Self::anonymous(pages, Advice::LinuxHugepage)
    }

    pub fn shared_file(file: impl AsFd, pages: usize) -> Self {
        Self::file(file, pages, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
    }

    /// Maps a file that is open for reading only, shared.
    pub fn read_only_file(file: impl AsFd, pages: usize) -> Self {
        Self::file(file, pages, ProtFlags::READ, MapFlags::SHARED)
    }

    fn file(file: impl AsFd, pages: usize, protection: ProtFlags, sharing: MapFlags) -> Self {
        let len = pages * PAGE_SIZE;
        // SAFETY: as in `anonymous`.
        let base: *mut u8 = unsafe { mmap(std::ptr::null_mut(), len, protection, sharing, file, 0).unwrap().cast() };
        Self { base, len, mapped: (base, len) }
    }

    /// Replaces some pages by others: private, anonymous, zero.
    pub fn map_anew(&self, pages: Range<u64>) {
        assert!(pages.end <= self.pages());
        let (start, len) = (pages.start as usize * PAGE_SIZE, (pages.end - pages.start) as usize * PAGE_SIZE);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: within our own mapping, which tests access by atomics only.
        unsafe { mmap_anonymous(self.base.add(start).cast(), len, ProtFlags::READ | ProtFlags::WRITE, flags).unwrap() };
    }

    /// Maps a shared file in the build directory, usually on a disk.
    pub fn disk(pages: usize) -> Self {
        let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.set_len((pages * PAGE_SIZE) as u64).unwrap();
        Self::shared_file(file, pages)
    }

    pub fn memfd(pages: usize) -> Self {
        Self::shared_file(memory_file(pages), pages)
    }

    /// Maps a memory file privately.
    pub fn private_file(pages: usize) -> Self {
        Self::private_mapping(memory_file(pages), pages)
    }

    pub fn private_mapping(file: impl AsFd, pages: usize) -> Self {
        Self::file(file, pages, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }

    /// Maps a memfd with huge pages, if the kernel gives them to shared memory on advice.
    pub fn memfd_transparent_huge(pages: usize) -> Self {
        let memory = Self::memfd(pages);
        // SAFETY: advice on our own mapping.
        let _ = unsafe { madvise(memory.base.cast(), memory.len, Advice::LinuxHugepage) };
        memory
    }

    /// Maps a file on tmpfs; `None` if there is no tmpfs.
    pub fn tmpfs(pages: usize) -> Option<Self> {
        let file = tempfile::tempfile_in("/dev/shm").ok()?;
        file.set_len((pages * PAGE_SIZE) as u64).ok()?;
        Some(Self::shared_file(file, pages))
    }

    /// Maps hugetlb pages of 2 MiB, from the pool or, if permitted, as surplus while the test runs.
    pub fn hugetlb(pages: usize) -> Option<Self> {
        let _surplus = Surplus::allow(pages * PAGE_SIZE / HUGE);
        Self::hugetlb_of(pages, libc::MAP_HUGE_2MB | libc::MAP_PRIVATE)
    }

    /// Maps memory as [`Self::hugetlb`] does, shared.
    pub fn hugetlb_shared(pages: usize) -> Option<Self> {
        let _surplus = Surplus::allow(pages * PAGE_SIZE / HUGE);
        Self::hugetlb_of(pages, libc::MAP_HUGE_2MB | libc::MAP_SHARED)
    }

    /// Maps hugetlb pages of 1 GiB, from the pool: the kernel finds room for them only after boot.
    pub fn hugetlb_1_gib(pages: usize, sharing: libc::c_int) -> Option<Self> {
        Self::hugetlb_of(pages, libc::MAP_HUGE_1GB | sharing)
    }

    fn hugetlb_of(pages: usize, flags: libc::c_int) -> Option<Self> {
        let len = pages * PAGE_SIZE;
        // SAFETY: as in `anonymous`.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB,
                -1,
                0,
            )
        };
        (base != libc::MAP_FAILED).then(|| Self { base: base.cast(), len, mapped: (base.cast(), len) })
    }

    pub fn pages(&self) -> u64 {
        (self.len / PAGE_SIZE) as u64
    }

    pub fn addresses(&self) -> Range<usize> {
        self.base.expose_provenance()..self.base.addr() + self.len
    }

    pub fn word(&self, page: u64, word: usize) -> &AtomicU64 {
        assert!(page < self.pages() && word < WORDS);
        // SAFETY: within the mapping, aligned, and borrowed from `self`; all accesses are atomic.
        unsafe { &*self.base.add(page as usize * PAGE_SIZE + word * 8).cast::<AtomicU64>() }
    }

    pub fn write(&self, page: u64) {
        self.word(page, page as usize % WORDS).fetch_add(1, Ordering::Relaxed);
    }

    pub fn populate(&self) {
        (0..self.pages()).for_each(|page| self.write(page));
    }

    pub fn advise(&self, pages: Range<u64>, advice: Advice) -> rustix::io::Result<()> {
        assert!(pages.end <= self.pages());
        let len = (pages.end - pages.start) as usize * PAGE_SIZE;
        // SAFETY: advice on our own mapping; the test expects discarded content to be gone.
        unsafe { madvise(self.base.add(pages.start as usize * PAGE_SIZE).cast(), len, advice) }
    }

    /// Returns whether the page is in memory.
    pub fn is_resident(&self, page: u64) -> bool {
        let mut resident = 0_u8;
        // SAFETY: within our mapping; the call writes one byte per page.
        let result =
            unsafe { libc::mincore(self.base.add(page as usize * PAGE_SIZE).cast(), PAGE_SIZE, &raw mut resident) };
        assert_eq!(result, 0);
        resident & 1 != 0
    }

    pub fn bytes(&self) -> *mut u8 {
        self.base
    }
}

/// Returns a memory file of which everything is a hole.
pub fn memory_file(pages: usize) -> File {
    let file = File::from(memfd_create("dirty", MemfdFlags::CLOEXEC).unwrap());
    file.set_len((pages * PAGE_SIZE) as u64).unwrap();
    file
}

/// Returns a file as [`memory_file`] does, of huge pages of 2 MiB, which are available while the second value lives.
pub fn huge_memory_file(pages: usize) -> Option<(File, Surplus)> {
    let surplus = Surplus::allow(pages * PAGE_SIZE / HUGE);
    let file =
        File::from(memfd_create("dirty", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).ok()?);
    file.set_len((pages * PAGE_SIZE) as u64).ok()?;
    // The kernel reports at mapping whether there are enough.
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let mapped = unsafe { mmap(std::ptr::null_mut(), pages * PAGE_SIZE, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
    // SAFETY: just mapped, not used yet.
    unsafe { munmap(mapped.ok()?, pages * PAGE_SIZE).unwrap() };
    Some((file, surplus))
}

/// Permits more huge pages until it is dropped; pages that are mapped by then stay. Only one process with these tests
/// has this at a time: withdrawing pages that another one relies on would end it by SIGBUS.
pub struct Surplus {
    /// The locked file, and the number of pages.
    allowed: Option<(File, u64)>,
}

const OVERCOMMIT: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";

impl Surplus {
    fn allow(pages: usize) -> Self {
        let locked = File::options().read(true).write(true).open(OVERCOMMIT).ok();
        let locked = locked.filter(|file| file.lock().is_ok());
        let allowed = locked.filter(|_| Self::change(|now| now + pages as u64).is_some());
        Self { allowed: allowed.map(|file| (file, pages as u64)) }
    }

    fn change(by: impl FnOnce(u64) -> u64) -> Option<()> {
        let now = std::fs::read_to_string(OVERCOMMIT).ok()?.trim().parse().ok()?;
        std::fs::write(OVERCOMMIT, by(now).to_string()).ok()
    }
}

impl Drop for Surplus {
    fn drop(&mut self) {
        if let Some((_locked, pages)) = self.allowed.take() {
            let _ = Self::change(|now| now.saturating_sub(pages));
        }
    }
}

/// Returns the pages that one `collect` names.
pub fn collected(log: &mut dyn DirtyLog, block: usize, pages: u64) -> Vec<u64> {
    let mut dirty = PageBitmap::new(pages);
    log.collect(block, &mut dirty).unwrap();
    let mut all = Vec::new();
    dirty.for_each_run(|run| all.extend(run));
    all
}

/// The function of a thread that writes until it is stopped.
pub type Writer<'a> = Box<dyn FnOnce(&Writers) + Send + 'a>;

/// State that writers and rounds share.
pub struct Writers {
    /// Number of writes, updated at each write or every few.
    pub writes: AtomicU64,
    pub stop: AtomicBool,
}

impl Writers {
    pub fn new() -> Self {
        Self { writes: AtomicU64::new(0), stop: AtomicBool::new(false) }
    }

    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Ends the writers when the rounds panic, so that the test fails instead of hanging.
struct StopOnDrop<'a>(&'a Writers);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// The result of the rounds.
pub struct Outcome {
    /// Pages named by each round while writers ran.
    pub named: Vec<u64>,
}

/// Checks the key property: after rounds of "collect, then copy the named pages" while `threads` write, and one more
/// round with the writers stopped, the copy equals the memory.
pub fn rounds_against_writers(
    log: &mut dyn DirtyLog,
    memories: &[&Memory],
    rounds: usize,
    writes_per_round: u64,
    threads: Vec<Writer<'_>>,
) -> Outcome {
    let writers = Writers::new();
    let mut copies: Vec<Vec<u64>> = memories.iter().map(|memory| vec![0; memory.pages() as usize * WORDS]).collect();
    let mut named = Vec::new();
    std::thread::scope(|scope| {
        let handles: Vec<_> = threads
            .into_iter()
            .map(|thread| {
                let writers = &writers;
                scope.spawn(move || thread(writers))
            })
            .collect();
        let stop = StopOnDrop(&writers);
        wait_for(&writers, writes_per_round, &handles);
        log.start().unwrap();
        for (block, (memory, copy)) in memories.iter().zip(&mut copies).enumerate() {
            let mut all = PageBitmap::new(memory.pages());
            all.set(0..memory.pages());
            log.found_populated(block, &all).unwrap();
            copy_pages(memory, 0..memory.pages(), copy);
        }
        for _ in 0..rounds {
            wait_for(&writers, writes_per_round, &handles);
            named.push(round(log, memories, &mut copies));
        }
        drop(stop);
        for handle in handles {
            handle.join().unwrap();
        }
    });
    round(log, memories, &mut copies);
    for (block, (memory, copy)) in memories.iter().zip(&copies).enumerate() {
        for page in 0..memory.pages() {
            for word in 0..WORDS {
                let (there, here) =
                    (memory.word(page, word).load(Ordering::Relaxed), copy[page as usize * WORDS + word]);
                assert_eq!(there, here, "block {block}, page {page}, word {word}: a write was lost");
            }
        }
    }
    Outcome { named }
}

/// Waits until so many more writes were made; panics if a writer ends by itself.
fn wait_for<T>(writers: &Writers, count: u64, handles: &[std::thread::ScopedJoinHandle<'_, T>]) {
    let target = writers.writes.load(Ordering::Relaxed) + count;
    while writers.writes.load(Ordering::Relaxed) < target {
        assert!(!handles.iter().any(|handle| handle.is_finished()), "a writer ended before it was stopped");
        std::thread::yield_now();
    }
}

fn round(log: &mut dyn DirtyLog, memories: &[&Memory], copies: &mut [Vec<u64>]) -> u64 {
    let mut named = 0;
    for (block, (memory, copy)) in memories.iter().zip(copies).enumerate() {
        let mut dirty = PageBitmap::new(memory.pages());
        log.collect(block, &mut dirty).unwrap();
        dirty.for_each_run(|run| copy_pages(memory, run, copy));
        named += dirty.count();
    }
    named
}

fn copy_pages(memory: &Memory, pages: Range<u64>, copy: &mut [u64]) {
    for page in pages {
        for word in 0..WORDS {
            copy[page as usize * WORDS + word] = memory.word(page, word).load(Ordering::Relaxed);
        }
    }
}

/// Checks what all logs have in common: wrong order, wrong block and wrong bitmap are refused; stop is always allowed,
/// and start works again.
pub fn misuse_is_refused(log: &mut dyn DirtyLog, pages: &[u64]) {
    let mut dirty = PageBitmap::new(pages[0]);
    log.stop().unwrap();
    assert!(matches!(log.collect(0, &mut dirty), Err(DirtyLogError::NotStarted)));
    log.start().unwrap();
    assert!(matches!(log.start(), Err(DirtyLogError::AlreadyStarted)));
    let error = log.collect(pages.len(), &mut dirty).unwrap_err();
    assert!(matches!(error, DirtyLogError::NoSuchBlock { block, blocks } if block == pages.len() && blocks == block));
    let error = log.collect(0, &mut PageBitmap::new(pages[0] + 1)).unwrap_err();
    assert!(matches!(error, DirtyLogError::BitmapSize { block: 0, .. }), "{error}");
    log.collect(0, &mut dirty).unwrap();
    log.stop().unwrap();
    log.stop().unwrap();
    assert!(matches!(log.collect(0, &mut dirty), Err(DirtyLogError::NotStarted)));
    log.start().unwrap();
    log.collect(0, &mut dirty).unwrap();
    log.stop().unwrap();
}
