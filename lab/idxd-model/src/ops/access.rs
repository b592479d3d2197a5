//! An operation's access to memory: translation, faults, page requests, and scripted faults.

use super::Limits;
use crate::memory::AddressSpace;
use crate::table::status;

/// The effects of scripts on one descriptor while it is executed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Effects {
    /// A page fault after so many bytes have been read and written.
    pub fault_after: Option<u64>,
    /// Whether a page request resolves that fault.
    pub resolvable: bool,
    /// One bit of the output is wrong, or of the result if there is no output.
    pub corrupt: bool,
    /// Writes are returned instead of being performed.
    pub defer: bool,
    /// Fails with this status.
    pub status: Option<u8>,
}

/// Maximum number of page requests for one page, answered without effect, before the descriptor fails (table 5-6,
/// 0x04).
pub(crate) const MAX_PAGE_REQUESTS: u32 = 64;

/// An access that was not completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    /// Bytes of this access that were completed.
    pub(crate) done: usize,
    pub(crate) address: u64,
    pub(crate) status: u8,
}

/// Addresses are the submitter's and wrap at the end of the address space, where nothing is mapped.
pub(crate) struct Access<'a> {
    memory: &'a dyn AddressSpace,
    translation: bool,
    block: bool,
    effects: &'a Effects,
    moved: u64,
    trapped: bool,
    corrupted: bool,
    /// The page of the last page request, and how often in a row it was requested.
    requested: (u64, u32),
    pub(super) requests: u32,
    pub(super) misses: u32,
    pub(super) late: Vec<(u64, Vec<u8>)>,
}

impl<'a> Access<'a> {
    pub(super) fn new(memory: &'a dyn AddressSpace, limits: &Limits, block: bool, effects: &'a Effects) -> Access<'a> {
        Access {
            memory,
            translation: limits.translation,
            block,
            effects,
            moved: 0,
            trapped: false,
            corrupted: false,
            requested: (0, 0),
            requests: 0,
            misses: 0,
            late: Vec::new(),
        }
    }

    /// Returns whether a scripted wrong result is due in the record, because no data was written.
    pub(super) fn corrupt_record(&self) -> bool {
        self.effects.corrupt && !self.corrupted
    }

    /// Returns the bytes until the scripted fault.
    fn until_trap(&self, len: usize) -> usize {
        match self.effects.fault_after {
            Some(after) if !self.trapped => len.min(usize::try_from(after.saturating_sub(self.moved)).unwrap_or(len)),
            _ => len,
        }
    }

    /// Handles a fault. Returns `Ok` if the page was made present.
    fn fault(&mut self, done: usize, address: u64, write: bool, resolves: impl FnOnce() -> bool) -> Result<(), Stop> {
        let bit = if write { status::WRITE } else { 0 };
        if !self.translation {
            // 5.8.1, 0x20: a read that faults when translation is off. Writes do not get here.
            return Err(Stop { done, address, status: status::HARDWARE_READ });
        }
        if !self.block {
            return Err(Stop { done, address, status: status::PAGE_FAULT | bit });
        }
        self.requests += 1;
        let page = address / 0x1000;
        self.requested = (page, if self.requested.0 == page { self.requested.1 + 1 } else { 1 });
        if self.requested.1 <= MAX_PAGE_REQUESTS && resolves() {
            return Ok(());
        }
        Err(Stop { done, address, status: status::INVALID_RESPONSE | bit })
    }

    pub(crate) fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Stop> {
        let mut done = 0;
        loop {
            let part = self.until_trap(into.len() - done);
            let at = address.wrapping_add(done as u64);
            match self.memory.read(at, &mut into[done..done + part]) {
                Ok(misses) => {
                    self.misses += misses;
                    self.moved += part as u64;
                    done += part;
                }
                Err(fault) => {
                    self.moved += fault.done as u64;
                    done += fault.done;
                    let memory = self.memory;
                    self.fault(done, fault.address, false, || memory.resolve(fault.address, false))?;
                    continue;
                }
            }
            if done == into.len() {
                return Ok(());
            }
            self.trapped = true;
            let resolvable = self.effects.resolvable;
            self.fault(done, address.wrapping_add(done as u64), false, || resolvable)?;
        }
    }

    pub(crate) fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Stop> {
        let wrong;
        let mut from = from;
        if self.effects.corrupt && !self.corrupted && !from.is_empty() {
            self.corrupted = true;
            let mut copy = from.to_vec();
            copy[from.len() / 2] ^= 0x10;
            wrong = copy;
            from = &wrong;
        }
        let mut done = 0;
        loop {
            let part = self.until_trap(from.len() - done);
            let at = address.wrapping_add(done as u64);
            if self.effects.defer {
                self.late.push((at, from[done..done + part].to_vec()));
                self.moved += part as u64;
                done += part;
            } else {
                match self.memory.write(at, &from[done..done + part]) {
                    Ok(misses) => {
                        self.misses += misses;
                        self.moved += part as u64;
                        done += part;
                    }
                    // 3.13.1: without translation service the fault is not reported; the rest of the page is lost.
                    Err(fault) if !self.translation => {
                        let lost = (0x1000 - (fault.address & 0xfff)) as usize;
                        done = (done + fault.done + lost).min(from.len());
                        if done < from.len() {
                            continue;
                        }
                    }
                    Err(fault) => {
                        self.moved += fault.done as u64;
                        done += fault.done;
                        let memory = self.memory;
                        self.fault(done, fault.address, true, || memory.resolve(fault.address, true))?;
                        continue;
                    }
                }
            }
            if done == from.len() {
                return Ok(());
            }
            self.trapped = true;
            let resolvable = self.effects.resolvable;
            self.fault(done, address.wrapping_add(done as u64), true, || resolvable)?;
        }
    }
}
