//! Write leases: guest memory that a device may still write although nobody waits for it any more.
//!
//! Nothing newer is placed there, and a destination is not prepared as long as there is one: a late write would undo what
//! came after it. A lease ends when the device is proved quiet, and by nothing else.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::region::Range;
use crate::request::Request;
use crate::sync::lock_std;

/// Guest memory that may still be written.
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
    /// How many ranges are leased.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The addresses that are leased.
    pub fn ranges(&self) -> Vec<std::ops::Range<usize>> {
        lock_std(&self.held).iter().map(|lease| lease.start..lease.end).collect()
    }

    /// Whether any byte of `range` is leased.
    pub fn covers(&self, range: &Range) -> bool {
        let start = range.pointer().addr();
        self.touches(start, start + range.len())
    }

    fn touches(&self, start: usize, end: usize) -> bool {
        self.count() != 0 && lock_std(&self.held).iter().any(|lease| lease.start < end && start < lease.end)
    }

    /// Whether `request` would write leased memory.
    pub(crate) fn forbid(&self, request: &Request) -> bool {
        request.operation.writes_guest()
            && self.count() != 0
            && request.items.iter().any(|item| {
                let start = item.first.addr();
                self.touches(start, start + item.bytes as usize)
            })
    }

    /// Leases what `request` writes to `device`.
    pub(crate) fn add(&self, device: u64, request: &Request) {
        let mut held = lock_std(&self.held);
        held.extend(request.items.iter().map(|item| {
            let start = item.first.addr();
            Lease { device, start, end: start + item.bytes as usize }
        }));
        self.count.store(held.len(), Ordering::Release);
    }

    /// `device` is quiet.
    pub(crate) fn release(&self, device: u64) {
        let mut held = lock_std(&self.held);
        held.retain(|lease| lease.device != device);
        self.count.store(held.len(), Ordering::Release);
    }
}
