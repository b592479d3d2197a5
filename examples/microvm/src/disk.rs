//! A disk that is read into guest RAM past the page cache (`O_DIRECT`), as monitors read disks for guests in production.
//!
//! The kernel pins the pages at the beginning of a read and writes them at its end, without a page fault. So a dirty log by write protection
//! names them when the read begins, and never again: whoever moves the guest waits for the reads that are under way ([`Disk::settle`])
//! after each collecting of the log, before the pages are read. KVM's logs do not see such a read at all; they are told when it has ended.
//!
//! The disk has a block of RAM of its own behind the guest's. Its first page is a table: how many reads have ended, then for each further
//! page the number, plus one, of the block of the file that the page holds. So what was read is moved with what it must be, and is checked
//! before the page is used again, by then perhaps at the destination.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_guest::content::mix;
use sterna_guest::disk::{check_block, poison};
use sterna_guest::page::FIRST_GENERATION;

use crate::error::Error;
use crate::layout::PAGE;
use crate::ram::BLOCK_UNIT;
use crate::vcpu::Common;

/// Bytes of its block of RAM: a table and 511 pages.
pub(crate) const DISK_RAM: u64 = BLOCK_UNIT;
/// The name of that block.
pub(crate) const DISK_RAM_NAME: &str = "disk";
/// Pages of a read; 511 is a multiple.
const RUN: u64 = 7;
/// Between two reads.
const REST: Duration = Duration::from_millis(1);

/// A disk. A thread reads it while the guest runs.
pub struct Disk {
    common: Arc<Common>,
    /// Guest physical address of its block of RAM.
    address: u64,
    file: File,
    /// Of the file, of 4 KiB.
    blocks: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    runs: bool,
    quit: bool,
    /// A read is under way.
    reading: bool,
    done: DiskReport,
}

/// What a disk has done in this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskReport {
    /// Reads that have ended.
    pub reads: u64,
    /// Pages that were compared with what the file holds.
    pub checked: u64,
    /// Pages that did not hold that.
    pub bad: u64,
    /// Why the disk is read no more.
    pub failed: Option<String>,
}

impl Disk {
    pub(crate) fn new(common: &Arc<Common>, address: u64, path: &Path) -> Result<Self, Error> {
        let failed = || Error::system(format!("open the disk {}", path.display()));
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).map_err(failed())?;
        let blocks = file.metadata().map_err(failed())?.size() / PAGE;
        if blocks < RUN {
            return Err(Error::Config(format!("the disk {} has fewer than {RUN} blocks of 4 KiB", path.display())));
        }
        Ok(Self { common: Arc::clone(common), address, file, blocks, state: Mutex::default(), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What is in there is as good after a panic as before.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        self.changed.wait_while(state, |state| !until(state)).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the read that is under way, if there is one, has ended. Others may have begun by then.
    pub fn settle(&self) {
        let state = self.lock();
        let before = state.done.reads;
        drop(self.wait(state, |state| !state.reading || state.done.reads > before));
    }

    /// What was done so far.
    pub fn report(&self) -> DiskReport {
        self.lock().done.clone()
    }

    /// Checks all that was read, between two reads.
    pub fn verify(&self) -> DiskReport {
        let mut state = self.wait(self.lock(), |state| !state.reading);
        self.check(1..PAGE / 8, &mut state.done);
        state.done.clone()
    }

    pub(crate) fn resume(&self) {
        self.lock().runs = true;
        self.changed.notify_all();
    }

    /// When this returns no read is under way.
    pub(crate) fn pause(&self) {
        let mut state = self.lock();
        state.runs = false;
        drop(self.wait(state, |state| !state.reading));
    }

    pub(crate) fn quit(&self) {
        self.lock().quit = true;
        self.changed.notify_all();
    }

    /// Reads until [`Self::quit`], or until a read fails; on a thread of its own.
    pub(crate) fn run(&self) {
        loop {
            let mut state = self.wait(self.lock(), |state| state.runs || state.quit);
            if state.quit {
                return;
            }
            let first = 1 + self.entry(0) % ((PAGE / 8 - 1) / RUN) * RUN;
            self.check(first..first + RUN, &mut state.done);
            state.reading = true;
            drop(state);
            let read = self.read(first);
            state = self.lock();
            state.reading = false;
            state.done.reads += 1;
            state.done.failed = read.err().map(|error| error.to_string());
            let failed = state.done.failed.is_some();
            self.changed.notify_all();
            if failed {
                return;
            }
            drop(self.changed.wait_timeout(state, REST).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Reads blocks of the file into the pages from `first` on.
    fn read(&self, first: u64) -> io::Result<()> {
        let number = self.entry(0);
        let block = mix(number) % (self.blocks - RUN + 1);
        let mut page = [0; PAGE as usize];
        // A page whose read is lost differs from all that the file holds.
        poison(&mut page, number as u32);
        for at in first..first + RUN {
            self.set_entry(at, 0);
            for (word, bytes) in (0..).zip(page.as_chunks::<8>().0) {
                self.common.ram.write(self.address + at * PAGE + word * 8, u64::from_le_bytes(*bytes));
            }
        }
        let to = self.common.ram.at(self.address + first * PAGE, RUN * PAGE);
        // SAFETY: these pages are mapped as long as `common` is held, and nothing refers to them: the kernel writes them as a device would.
        let read = unsafe {
            libc::pread(self.file.as_raw_fd(), to.cast(), (RUN * PAGE) as usize, (block * PAGE).cast_signed())
        };
        match read {
            -1 => return Err(io::Error::last_os_error()),
            read if read as u64 != RUN * PAGE => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => {}
        }
        (first..first + RUN).zip(block + 1..).for_each(|(at, block)| self.set_entry(at, block));
        self.set_entry(0, number + 1);
        for at in (first..first + RUN).chain([0]) {
            let (block, page) = self.common.ram.page_of(self.address + at * PAGE);
            self.common.marker.mark(block, page..page + 1);
        }
        Ok(())
    }

    /// Compares pages with what the file holds, by the table.
    fn check(&self, pages: std::ops::Range<u64>, done: &mut DiskReport) {
        for at in pages {
            let Some(block) = self.entry(at).checked_sub(1) else { continue };
            let mut page = [0; PAGE as usize];
            for (word, bytes) in (0..).zip(page.as_chunks_mut::<8>().0) {
                *bytes = self.common.ram.read::<u64>(self.address + at * PAGE + word * 8).to_le_bytes();
            }
            done.checked += 1;
            done.bad += u64::from(check_block(&page, 0, block, FIRST_GENERATION).is_err());
        }
    }

    fn entry(&self, at: u64) -> u64 {
        self.common.ram.read(self.address + at * 8)
    }

    fn set_entry(&self, at: u64, value: u64) {
        self.common.ram.write(self.address + at * 8, value);
    }
}
