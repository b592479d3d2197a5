//! Write leases: guest memory that a device may still write although the CPU has finished with the batch.
//!
//! No newer content is placed there, and a destination is not prepared while a lease exists: a late write would
//! overwrite the newer content. A lease ends only when the device is proved quiet.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::region::Range;
use crate::request::Request;
use crate::sync::lock_std;

/// The ranges of guest memory that a device may still write.
#[derive(Debug, Default)]
pub struct Leases {
    held: Mutex<Vec<Lease>>,
    count: AtomicUsize,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    device: u64,
    start: usize,
    end: usize,
}

impl Leases {
    /// Returns how many ranges are leased.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the leased addresses.
    pub fn ranges(&self) -> Vec<std::ops::Range<usize>> {
        lock_std(&self.held).iter().map(|lease| lease.start..lease.end).collect()
    }

    /// Returns whether any byte of `range` is leased.
    pub fn covers(&self, range: &Range) -> bool {
        let start = range.pointer().addr();
        self.touches(start, start + range.len())
    }

    fn touches(&self, start: usize, end: usize) -> bool {
        self.count() != 0 && lock_std(&self.held).iter().any(|lease| lease.start < end && start < lease.end)
    }

    /// Returns whether `request` would write leased memory.
    pub(crate) fn forbid(&self, request: &Request) -> bool {
        request.operation.writes_guest()
            && self.count() != 0
            && request.items.iter().any(|item| {
                let start = item.first.addr();
                self.touches(start, start + item.bytes as usize)
            })
    }

    /// Leases to `device` the ranges that `request` writes.
    pub(crate) fn add(&self, device: u64, request: &Request) {
        let mut held = lock_std(&self.held);
        held.extend(request.items.iter().map(|item| {
            let start = item.first.addr();
            Lease { device, start, end: start + item.bytes as usize }
        }));
        self.count.store(held.len(), Ordering::Release);
    }

    /// Ends the leases of `device`, which is quiet.
    pub(crate) fn release(&self, device: u64) {
        let mut held = lock_std(&self.held);
        held.retain(|lease| lease.device != device);
        self.count.store(held.len(), Ordering::Release);
    }
}
