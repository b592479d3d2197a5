//! A disk that is read into guest RAM, and written from it, past the page cache (`O_DIRECT`), as production monitors do.
//!
//! The kernel pins the pages at the beginning of a read and writes them at its end, without a page fault. A dirty log by write protection
//! records them only when the read begins. So after each collection of the log, a migration waits for the reads in flight
//! ([`Disk::settle`]) before it reads the pages. KVM's logs do not contain such a read at all; its pages are marked when it has ended.
//!
//! The disk has a block of RAM of its own after the guest's. Its first page is a table: how many reads and writes have ended, then for each
//! further page which block of the file the page holds, and in which generation. Its last page has the generations of the blocks that are
//! written: those in the last half of the file, 512 at most. So the content of pages and file moves with the guest. It is checked before a
//! page is reused, or when a block is read again, which may happen at the destination.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_guest::content::{Page, mix};
use sterna_guest::disk::{check_block, poison, write_block};
use sterna_guest::page::FIRST_GENERATION;

use crate::error::Error;
use crate::layout::PAGE;
use crate::ram::BLOCK_UNIT;
use crate::vcpu::Common;

/// Bytes of its block of RAM: a table, 510 pages, and the generations.
pub(crate) const DISK_RAM: u64 = BLOCK_UNIT;
/// The name of that block.
pub(crate) const DISK_RAM_NAME: &str = "disk";
/// Entries of a page of numbers.
const ENTRIES: u64 = PAGE / 8;
/// The page of the generations.
const GENERATIONS: u64 = ENTRIES - 1;
/// Pages of a read or a write; 510 is a multiple.
const RUN: u64 = 6;
/// Of this number of reads and writes, one is a write.
const WRITES: u64 = 4;
/// Pause between two reads or writes.
const REST: Duration = Duration::from_millis(1);

/// A disk. A thread reads and writes it while the guest runs.
pub struct Disk {
    common: Arc<Common>,
    /// Guest physical address of its block of RAM.
    address: u64,
    file: File,
    /// Blocks of the file, of 4 KiB.
    blocks: u64,
    /// The first block that is written, and how many are.
    written: (u64, u64),
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    runs: bool,
    quit: bool,
    /// A read or a write is in flight.
    working: bool,
    done: DiskReport,
}

/// Statistics of a disk in this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskReport {
    /// Reads that have ended.
    pub reads: u64,
    /// Writes that have ended.
    pub writes: u64,
    /// Pages that were compared with the file's content.
    pub checked: u64,
    /// Pages that differed from it.
    pub bad: u64,
    /// Why the disk is not used any more.
    pub failed: Option<String>,
}

impl DiskReport {
    fn ended(&self) -> u64 {
        self.reads + self.writes
    }
}

impl Disk {
    pub(crate) fn new(common: &Arc<Common>, address: u64, path: &Path) -> Result<Self, Error> {
        let failed = || Error::system(format!("open the disk {}", path.display()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(path).map_err(failed())?;
        let blocks = file.metadata().map_err(failed())?.size() / PAGE;
        if blocks < 2 * RUN {
            let least = 2 * RUN;
            return Err(Error::Config(format!("the disk {} has fewer than {least} blocks of 4 KiB", path.display())));
        }
        let count = (blocks / 2).min(ENTRIES);
        let written = (blocks - count, count);
        let (common, state) = (Arc::clone(common), Mutex::default());
        Ok(Self { common, address, file, blocks, written, state, changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent even after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        self.changed.wait_while(state, |state| !until(state)).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the read or write in flight, if any, has ended. Another one may have begun by then.
    pub fn settle(&self) {
        let state = self.lock();
        let before = state.done.ended();
        drop(self.wait(state, |state| !state.working || state.done.ended() > before));
    }

    /// Returns the statistics so far.
    pub fn report(&self) -> DiskReport {
        self.lock().done.clone()
    }

    /// Checks all pages that were read, between two reads or writes.
    pub fn verify(&self) -> DiskReport {
        let mut state = self.wait(self.lock(), |state| !state.working);
        self.check(1..GENERATIONS, &mut state.done);
        state.done.clone()
    }

    pub(crate) fn resume(&self) {
        self.lock().runs = true;
        self.changed.notify_all();
    }

    /// Pauses the disk. When this returns, no read or write is in flight.
    pub(crate) fn pause(&self) {
        let mut state = self.lock();
        state.runs = false;
        drop(self.wait(state, |state| !state.working));
    }

    pub(crate) fn quit(&self) {
        self.lock().quit = true;
        self.changed.notify_all();
    }

    /// Reads and writes, on a thread of its own, until [`Self::quit`] or a failure.
    pub(crate) fn run(&self) {
        loop {
            let mut state = self.wait(self.lock(), |state| state.runs || state.quit);
            if state.quit {
                return;
            }
            let number = self.entry(0);
            let first = 1 + number % ((GENERATIONS - 1) / RUN) * RUN;
            let writes = number % WRITES == WRITES - 1;
            self.check(first..first + RUN, &mut state.done);
            state.working = true;
            drop(state);
            let ended = if writes { self.write(number, first) } else { self.read(number, first) };
            state = self.lock();
            state.working = false;
            *(if writes { &mut state.done.writes } else { &mut state.done.reads }) += 1;
            state.done.failed = ended.err().map(|error| error.to_string());
            let failed = state.done.failed.is_some();
            self.changed.notify_all();
            if failed {
                return;
            }
            drop(self.changed.wait_timeout(state, REST).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Reads blocks of the file into the pages from `first` on, as read or write `number`.
    fn read(&self, number: u64, first: u64) -> io::Result<()> {
        let block = mix(number) % (self.blocks - RUN + 1);
        let mut page = [0; PAGE as usize];
        // A page whose read is lost differs from every block of the file.
        poison(&mut page, number as u32);
        for at in first..first + RUN {
            self.set_entry(at, 0);
            self.set_page(at, &page);
        }
        let to = self.common.ram.at(self.address + first * PAGE, RUN * PAGE);
        // SAFETY: these pages are mapped as long as `common` is held, and nothing refers to them: the kernel writes them as a device would.
        let read = unsafe {
            libc::pread(self.file.as_raw_fd(), to.cast(), (RUN * PAGE) as usize, (block * PAGE).cast_signed())
        };
        whole(read)?;
        (first..first + RUN).zip(block..).for_each(|(at, block)| self.holds(at, block, self.generation(block)));
        self.ended(number, first);
        Ok(())
    }

    /// Writes the next generation of blocks of the file from the pages from `first` on, as read or write `number`.
    fn write(&self, number: u64, first: u64) -> io::Result<()> {
        let (first_written, count) = self.written;
        let block = first_written + mix(number) % (count - RUN + 1);
        for (at, block) in (first..first + RUN).zip(block..) {
            let mut page = [0; PAGE as usize];
            let generation = self.generation(block) + 1;
            write_block(&mut page, 0, block, generation);
            self.set_page(at, &page);
            self.holds(at, block, generation);
        }
        let from = self.common.ram.at(self.address + first * PAGE, RUN * PAGE);
        // SAFETY: these pages are mapped as long as `common` is held; the kernel reads them as a device would.
        let written = unsafe {
            libc::pwrite(self.file.as_raw_fd(), from.cast(), (RUN * PAGE) as usize, (block * PAGE).cast_signed())
        };
        whole(written)?;
        for block in block..block + RUN {
            let generation = self.generation(block) + 1;
            let at = GENERATIONS * ENTRIES + (block - first_written);
            self.set_entry(at, u64::from(generation - FIRST_GENERATION));
        }
        self.ended(number, first);
        Ok(())
    }

    /// Returns the generation of a block of the file.
    fn generation(&self, block: u64) -> u32 {
        let writings = block.checked_sub(self.written.0).map_or(0, |at| self.entry(GENERATIONS * ENTRIES + at));
        FIRST_GENERATION + writings as u32
    }

    fn set_page(&self, at: u64, page: &Page) {
        for (word, bytes) in (0..).zip(page.as_chunks::<8>().0) {
            self.common.ram.write(self.address + at * PAGE + word * 8, u64::from_le_bytes(*bytes));
        }
    }

    /// Records the content of page `at`.
    fn holds(&self, at: u64, block: u64, generation: u32) {
        self.set_entry(at, u64::from(generation) << 32 | (block + 1));
    }

    /// Records the end of read or write `number`, and the pages that were written meanwhile.
    fn ended(&self, number: u64, first: u64) {
        self.set_entry(0, number + 1);
        for at in (first..first + RUN).chain([0, GENERATIONS]) {
            let (block, page) = self.common.ram.page_of(self.address + at * PAGE);
            self.common.marker.mark(block, page..page + 1);
        }
    }

    /// Compares pages with the file's content, by the table.
    fn check(&self, pages: std::ops::Range<u64>, done: &mut DiskReport) {
        for at in pages {
            let (generation, block) = ((self.entry(at) >> 32) as u32, self.entry(at) as u32);
            let Some(block) = block.checked_sub(1) else { continue };
            let mut page = [0; PAGE as usize];
            for (word, bytes) in (0..).zip(page.as_chunks_mut::<8>().0) {
                *bytes = self.common.ram.read::<u64>(self.address + at * PAGE + word * 8).to_le_bytes();
            }
            done.checked += 1;
            done.bad += u64::from(check_block(&page, 0, block.into(), generation).is_err());
        }
    }

    fn entry(&self, at: u64) -> u64 {
        self.common.ram.read(self.address + at * 8)
    }

    fn set_entry(&self, at: u64, value: u64) {
        self.common.ram.write(self.address + at * 8, value);
    }
}

/// Checks by the system call's result that all of a run was read or written.
fn whole(moved: isize) -> io::Result<()> {
    match moved {
        -1 => Err(io::Error::last_os_error()),
        moved if moved as u64 != RUN * PAGE => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}
