//! A work queue: its capacity, its waiting entries, its incomplete descriptors.

use std::collections::{BTreeSet, VecDeque};

use super::{Nanos, Payload};
use crate::config::{Mode, QueueConfig};
use crate::ops::Limits;

/// An entry of a queue.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) sequence: u64,
    pub(super) payload: Payload,
    pub(super) arrived: Nanos,
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) config: QueueConfig,
    pub(super) limits: Limits,
    pub(super) enabled: bool,
    pub(super) entries: VecDeque<Entry>,
    /// Accepted and not complete, by sequence number.
    pub(super) outstanding: BTreeSet<u64>,
    /// Drains that wait for everything before them.
    pub(super) drains: Vec<Entry>,
    /// Sum of the turns so far, each counted as the inverse of the priority: the queue with the smallest sum is next.
    pub(super) turns: u64,
    sequence: u64,
}

impl Queue {
    pub(super) fn new(config: QueueConfig, limits: Limits) -> Queue {
        Queue {
            config,
            limits,
            enabled: true,
            entries: VecDeque::new(),
            outstanding: BTreeSet::new(),
            drains: Vec::new(),
            turns: 0,
            sequence: 0,
        }
    }

    /// Returns the number of entries that a client may use: 5.3, *limited portal*.
    pub(super) fn room(&self) -> usize {
        match self.config.mode {
            Mode::Shared if self.config.threshold > 0 => self.config.threshold as usize,
            _ => self.config.size as usize,
        }
    }

    pub(super) fn push(&mut self, payload: Payload, arrived: Nanos) {
        self.outstanding.insert(self.sequence);
        self.entries.push_back(Entry { sequence: self.sequence, payload, arrived });
        self.sequence += 1;
    }

    /// Removes an entry; returns the drains that have waited for it.
    pub(super) fn complete(&mut self, sequence: u64) -> Vec<Entry> {
        self.outstanding.remove(&sequence);
        if self.drains.is_empty() {
            return Vec::new();
        }
        let mut ready = Vec::new();
        let mut index = 0;
        while index < self.drains.len() {
            if self.clear_before(self.drains[index].sequence) {
                ready.push(self.drains.swap_remove(index));
            } else {
                index += 1;
            }
        }
        ready
    }

    /// Returns whether everything before this entry is complete.
    pub(super) fn clear_before(&self, sequence: u64) -> bool {
        self.outstanding.first().is_none_or(|&first| first >= sequence)
    }

    /// Removes everything: reset or halt.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.outstanding.clear();
        self.drains.clear();
    }
}
