//! Helpers that the tests of missing pages share: memory of every kind behind a RAM block, pages whose content shows
//! their origin, and threads that must not hang.

// Each test file uses a part of this.
#![allow(dead_code, unreachable_pub)]

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;
use sterna_memory::PAGE_SIZE;
use sterna_memory::discard::Discardable;
use sterna_memory::missing::{FaultAction, MissingPages};
use sterna_memory::userfault::wait::{FaultBuffer, Stop};
use sterna_memory::userfault::{Faults, Userfault, UserfaultError};

pub const HUGE: usize = 2 << 20;
pub const WORDS: usize = PAGE_SIZE / 8;
/// The word of each page that the "guest" writes.
pub const WRITTEN: usize = WORDS - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Anonymous,
    /// Anonymous with advice for huge pages.
    TransparentHuge,
    Memfd,
    /// Shared, with advice for huge pages.
    MemfdTransparentHuge,
    PrivateMemfd,
    HugetlbMemfd,
    HugetlbAnonymous,
}

impl Kind {
    pub const ALL: [Self; 7] = [
        Self::Anonymous,
        Self::TransparentHuge,
        Self::Memfd,
        Self::MemfdTransparentHuge,
        Self::PrivateMemfd,
        Self::HugetlbMemfd,
        Self::HugetlbAnonymous,
    ];

    pub fn is_hugetlb(self) -> bool {
        matches!(self, Self::HugetlbMemfd | Self::HugetlbAnonymous)
    }

    pub fn is_private(self) -> bool {
        !matches!(self, Self::Memfd | Self::MemfdTransparentHuge | Self::HugetlbMemfd)
    }
}

/// Guest RAM, unmapped when dropped.
pub struct Memory {
    pub kind: Kind,
    base: *mut u8,
    len: usize,
    mapped: (*mut u8, usize),
    pub file: Option<File>,
    _surplus: Option<Surplus>,
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
    /// Maps memory of this kind. Returns `None`, and prints the reason, if the machine has none.
    pub fn new(kind: Kind, pages: u64) -> Option<Self> {
        let len = pages as usize * PAGE_SIZE;
        let surplus = if kind.is_hugetlb() { Some(Surplus::allow(len / HUGE)?) } else { None };
        let file = match kind {
            Kind::Anonymous | Kind::TransparentHuge | Kind::HugetlbAnonymous => None,
            _ => {
                let huge = if kind.is_hugetlb() { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
                let file = File::from(memfd_create("missing", MemfdFlags::CLOEXEC | huge).unwrap());
                file.set_len(len as u64).unwrap();
                Some(file)
            }
        };
        let sharing = if kind.is_private() { MapFlags::PRIVATE } else { MapFlags::SHARED };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Room to align to 2 MiB; hugetlb is always aligned.
        let room = if kind.is_hugetlb() { 0 } else { HUGE };
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let reserved: *mut u8 = unsafe {
            let huge = if kind == Kind::HugetlbAnonymous { MapFlags::HUGETLB } else { MapFlags::empty() };
            match kind {
                Kind::HugetlbMemfd => mmap(std::ptr::null_mut(), len, protection, sharing, file.as_ref()?, 0),
                _ => mmap_anonymous(std::ptr::null_mut(), len + room, protection, MapFlags::PRIVATE | huge),
            }
        }
        .inspect_err(|error| println!("skipped: {kind:?}: {error}"))
        .ok()?
        .cast();
        let mut base = reserved;
        if room > 0 {
            base = reserved.wrapping_add(reserved.addr().next_multiple_of(HUGE) - reserved.addr());
            if let Some(file) = &file {
                // SAFETY: over a part of the mapping just made.
                unsafe { mmap(base.cast(), len, protection, sharing | MapFlags::FIXED, file, 0).unwrap() };
            }
            let huge = matches!(kind, Kind::TransparentHuge | Kind::MemfdTransparentHuge);
            let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
            // SAFETY: advice on our own mapping.
            unsafe { madvise(base.cast(), len, advice).unwrap() };
        }
        Some(Self { kind, base, len, mapped: (reserved, len + room), file, _surplus: surplus })
    }

    pub fn pages(&self) -> u64 {
        (self.len / PAGE_SIZE) as u64
    }

    /// Returns the number of 4096-byte pages in a page of the backing.
    pub fn unit(&self) -> u64 {
        if self.kind.is_hugetlb() { (HUGE / PAGE_SIZE) as u64 } else { 1 }
    }

    pub fn addresses(&self) -> Range<usize> {
        self.base.expose_provenance()..self.base.addr() + self.len
    }

    pub fn address(&self, page: u64) -> usize {
        self.base.addr() + page as usize * PAGE_SIZE
    }

    pub fn backing(&self) -> Discardable {
        let page_size = self.unit() as usize * PAGE_SIZE;
        match &self.file {
            // SAFETY: mapped until dropped, which tests do last; only atomics access it.
            Some(file) => unsafe { Discardable::file(self.addresses(), file.as_fd(), 0).unwrap() },
            // SAFETY: as above.
            None => unsafe { Discardable::anonymous(self.addresses(), page_size).unwrap() },
        }
    }

    pub fn word(&self, page: u64, word: usize) -> &AtomicU64 {
        assert!(page < self.pages() && word < WORDS);
        // SAFETY: within the mapping, aligned, and borrowed from `self`; all accesses are atomic.
        unsafe { &*self.base.add(page as usize * PAGE_SIZE + word * 8).cast::<AtomicU64>() }
    }

    pub fn read(&self, page: u64, word: usize) -> u64 {
        self.word(page, word).load(Ordering::Relaxed)
    }

    /// Returns the first word, and checks that all words except the written one are equal.
    pub fn stamp(&self, page: u64) -> u64 {
        let first = self.read(page, 0);
        for word in 1..WRITTEN {
            assert_eq!(self.read(page, word), first, "page {page}, word {word}: of another page or version");
        }
        first
    }

    /// Fills a page as if it was sent before post-copy.
    pub fn fill(&self, page: u64, version: u64) {
        for word in 0..WORDS {
            self.word(page, word).store(stamp(page, version), Ordering::Relaxed);
        }
    }

    /// Runs `body` while no huge page beyond those in use is available.
    pub fn without_spare_huge_pages(&self, body: impl FnOnce()) {
        let allowed = std::fs::read_to_string(OVERCOMMIT).unwrap();
        std::fs::write(OVERCOMMIT, "0").unwrap();
        body();
        std::fs::write(OVERCOMMIT, allowed).unwrap();
    }

    /// Returns whether transparent huge pages are forbidden for all of it: "nh" of proc_pid_smaps(5).
    pub fn has_huge_pages_forbidden(&self) -> bool {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let head = format!("{:x}-{:x} ", self.addresses().start, self.addresses().end);
        let ours = smaps.lines().skip_while(|line| !line.starts_with(&head));
        ours.into_iter().find_map(|line| line.strip_prefix("VmFlags:")).is_some_and(|flags| flags.contains(" nh"))
    }

    pub fn advise(&self, pages: Range<u64>, advice: u32) -> std::io::Result<()> {
        let len = (pages.end - pages.start) as usize * PAGE_SIZE;
        // SAFETY: advice on our own mapping; the tests' advice discards no content.
        match unsafe { libc::madvise(self.word(pages.start, 0).as_ptr().cast(), len, advice as libc::c_int) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

/// Returns each word of a page of this version.
pub fn stamp(page: u64, version: u64) -> u64 {
    (page + 1) << 8 | version
}

/// Returns the bytes of consecutive pages.
pub fn content(pages: Range<u64>, version: u64) -> Vec<u8> {
    pages.flat_map(|page| std::iter::repeat_n(stamp(page, version).to_ne_bytes(), WORDS)).flatten().collect()
}

/// Permits more huge pages until it is dropped. Tests that need them take turns, also those of other programs (sterna-qemu-lab).
struct Surplus {
    allowed: u64,
    _turn: File,
}

const OVERCOMMIT: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";

impl Surplus {
    fn allow(pages: usize) -> Option<Self> {
        let turn = File::open(OVERCOMMIT).ok()?;
        turn.lock().ok()?;
        let before: u64 = std::fs::read_to_string(OVERCOMMIT).ok()?.trim().parse().ok()?;
        // One more than mapped: a discarded page is freed only after a while.
        let allowed = pages as u64 + 1;
        std::fs::write(OVERCOMMIT, (before + allowed).to_string())
            .inspect_err(|error| println!("skipped: {OVERCOMMIT}: {error}"))
            .ok()?;
        Some(Self { allowed, _turn: turn })
    }
}

impl Drop for Surplus {
    fn drop(&mut self) {
        let now = std::fs::read_to_string(OVERCOMMIT).ok().and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(now) = now {
            let _ = std::fs::write(OVERCOMMIT, now.saturating_sub(self.allowed).to_string());
        }
    }
}

/// Opens a userfaultfd for this memory, or prints why there is none.
pub fn open(memory: &Memory) -> Option<Arc<Userfault>> {
    match Userfault::open(Faults::All, memory.backing().userfault_features()) {
        Ok(userfault) => Some(Arc::new(userfault)),
        Err(error @ (UserfaultError::NotAllowed { .. } | UserfaultError::Features { .. })) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Runs the fault thread: passes each fault to `act` until stopped.
pub fn answer_faults(userfault: &Userfault, missing: &MissingPages, stop: &Stop, mut act: impl FnMut(FaultAction)) {
    let mut buffer = FaultBuffer::new();
    while let Some(faults) = userfault.wait_faults(stop, &mut buffer).unwrap() {
        for fault in faults {
            act(missing.fault(fault.address()).unwrap());
        }
    }
}

/// Ends the process when a test hangs: there is no other way to end a thread that waits for a page.
pub struct Watchdog(Option<Sender<()>>);

impl Watchdog {
    pub fn new(what: &'static str) -> Self {
        let (sender, receiver) = channel::<()>();
        std::thread::spawn(move || {
            if receiver.recv_timeout(Duration::from_secs(280)) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{what}: hangs: a wake-up was lost");
                std::process::abort();
            }
        });
        Self(Some(sender))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // After a panic, threads may wait for ever, so the watchdog stays active.
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}
