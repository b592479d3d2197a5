//! A batch in execution: the next member, fences, and the content of its record (3.8, 3.9, 8.3.2).

use super::random::Random;
use crate::memory::Fault;
use crate::ops::Record;
use crate::table::dsa::{self, record};
use crate::table::status;

#[derive(Debug)]
pub(super) struct Batch {
    pub(super) queue: usize,
    pub(super) sequence: u64,
    pub(super) descriptor: Box<[u8; 64]>,
    pub(super) late: super::Nanos,
    pub(super) dropped: bool,
    members: Vec<u8>,
    /// Members of the current stretch between fences, last first.
    stretch: Vec<u32>,
    /// Index of the first member behind the stretch.
    rest: u32,
    /// Members whose record is not yet visible.
    pub(super) pending: u32,
    processed: u32,
    failed: bool,
    abandoned: bool,
    fault: Option<Fault>,
}

/// The next action of a batch's engine.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Execute this member.
    Member(Box<[u8; 64]>),
    /// Wait for records.
    Fence,
    /// No member is left to start.
    Over,
}

impl Batch {
    pub(super) fn new(queue: usize, sequence: u64, descriptor: Box<[u8; 64]>) -> Batch {
        // Batch Error: a continued batch whose earlier part had an error (table 8-14).
        let failed = dsa::FLAGS.get(&descriptor[..]) as u32 & dsa::BATCH_ERROR != 0;
        Batch {
            queue,
            sequence,
            descriptor,
            late: 0,
            dropped: false,
            members: Vec::new(),
            stretch: Vec::new(),
            rest: 0,
            pending: 0,
            processed: 0,
            failed,
            abandoned: false,
            fault: None,
        }
    }

    /// Adds the descriptor list, or the part of it that could be read.
    pub(super) fn fetched(&mut self, members: Vec<u8>, fault: Option<Fault>) {
        self.members = members;
        self.fault = fault;
    }

    pub(super) fn count(&self) -> u32 {
        (self.members.len() / 64) as u32
    }

    fn member(&self, index: u32) -> &[u8; 64] {
        self.members[index as usize * 64..][..64].try_into().unwrap()
    }

    fn fenced(&self, index: u32) -> bool {
        dsa::FLAGS.get(self.member(index)) as u32 & dsa::FENCE != 0
    }

    /// Returns whether [`Batch::next`] would return an action other than waiting.
    pub(super) fn can_go_on(&self) -> bool {
        !self.stretch.is_empty() || self.rest >= self.count() || self.pending == 0 || !self.fenced(self.rest)
    }

    pub(super) fn next(&mut self, reorder: bool, random: &mut Random) -> Next {
        if self.stretch.is_empty() && self.rest < self.count() && !self.abandoned {
            if self.fenced(self.rest) {
                if self.pending > 0 {
                    return Next::Fence;
                }
                if self.failed {
                    self.abandoned = true;
                    return Next::Over;
                }
            }
            let start = self.rest;
            self.rest += 1;
            while self.rest < self.count() && !self.fenced(self.rest) {
                self.rest += 1;
            }
            self.stretch = (start..self.rest).collect();
            if reorder {
                random.shuffle(&mut self.stretch);
            } else {
                self.stretch.reverse();
            }
        }
        match self.stretch.pop() {
            Some(index) => Next::Member(Box::new(*self.member(index))),
            None => Next::Over,
        }
    }

    /// Records that a member has been executed with this status.
    pub(super) fn executed(&mut self, code: u8) {
        self.processed += 1;
        self.failed |= code & 0x3f != status::SUCCESS;
    }

    /// Records that a member's record could not be written at once: the device may count this as a failure (8.3.2).
    pub(super) fn record_faulted(&mut self) {
        self.failed = true;
    }

    /// Returns whether the batch's record can be written now.
    pub(super) fn is_over(&self) -> bool {
        let started = self.abandoned || (self.stretch.is_empty() && self.rest == self.count());
        started && self.pending == 0
    }

    pub(super) fn record(&self, version: u32) -> Record {
        let code = match self.fault {
            Some(_) => status::BATCH_FAULT,
            None if self.failed => status::BATCH_FAIL,
            None => status::SUCCESS,
        };
        let mut record = Record::new(crate::config::Kind::Dsa, code);
        if version >= 0x200 {
            record::RESULT.set(&mut record.bytes, u64::from(self.failed));
        }
        if let Some(fault) = self.fault {
            record::FAULT_ADDRESS.set(&mut record.bytes, fault.address & !0xfff);
            if version >= 0x200 {
                // Table 8-13: the descriptor list is operand 1.
                record::FAULT_INFO.set(&mut record.bytes, 1 << 1);
            }
        }
        record::COMPLETED.set(&mut record.bytes, u64::from(self.processed));
        record
    }
}
