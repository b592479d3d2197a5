//! Memory that a device may touch, and ranges of it.
//!
//! No code gets a slice of such memory. A request names it by [`Range`], and holds the region while a device has the
//! request: the region counts its requests in progress ([`Region::uses`]). Memory is unmapped or unplugged only after
//! [`Region::retire`] has returned success: then the count is zero and stays zero.

use std::any::Any;
use std::fmt::{Debug, Formatter};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_memory::ram::RamBlock;
use thiserror::Error;

use crate::arena::Slab;
use crate::time::{Bell, Nanos, Time};

/// Flag in the count of uses: the region accepts no new work.
const RETIRED: u64 = 1 << 63;

/// A region still has work in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{uses} batches on memory at {start:#x} ({bytes} bytes) are still with a device: it must stay mapped (try again; if a \
     device was taken out of service, when it has been closed)"
)]
pub struct RegionBusy {
    /// Requests in progress.
    pub uses: u64,
    /// Address of the region.
    pub start: usize,
    /// Its length in bytes.
    pub bytes: usize,
}

/// A range that is not in its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{len} bytes from offset {offset:#x} are not within a region of {bytes} bytes")]
pub struct OutOfRegion {
    /// Requested offset.
    pub offset: usize,
    /// Requested length.
    pub len: usize,
    /// Length of the region.
    pub bytes: usize,
}

/// Memory that a device may touch: guest RAM, normally one region per RAM block.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    node: Option<u32>,
    races: AtomicBool,
    uses: AtomicU64,
    left: Bell,
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the pointer is only handed to devices and to raw, volatile copies inside the range that the creator vouched
// for; nothing is ever borrowed from it.
unsafe impl Send for Region {}
// SAFETY: as above; the counter is atomic.
unsafe impl Sync for Region {}

impl Debug for Region {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { start, bytes, node, .. } = self;
        write!(f, "Region({bytes} bytes at {start:?}, node {node:?}, {} uses)", self.uses())
    }
}

impl Region {
    /// Makes a region of `bytes` bytes at `start`. The region, and any work on it, keep `owner`, whose drop unmaps the
    /// memory. Without an owner the creator unmaps it, after [`Self::retire`].
    ///
    /// # Safety
    /// The range stays mapped, readable and (for work that writes) writable until the region is retired with success or
    /// dropped. No Rust reference to it exists meanwhile, except to atomics.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, owner: Option<Arc<dyn Any + Send + Sync>>) -> Arc<Self> {
        Self::made(start, bytes, owner, None)
    }

    /// Makes a region of a guest's RAM block, on NUMA node `node` where that is known. Returns none if the block lies
    /// in another process, which no device of this process reaches. The region, and any work on it, keep the block: the
    /// block's own contract is the region's.
    pub fn of_block(block: &RamBlock, node: Option<u32>) -> Option<Arc<Self>> {
        let start = block.start()?;
        Some(Self::made(start, block.addresses().len(), Some(Arc::new(block.clone())), node))
    }

    /// As [`Self::new`], for memory whose pages are on NUMA node `node`: its work goes to devices of that node.
    ///
    /// # Safety
    /// As [`Self::new`].
    pub unsafe fn on_node(
        start: NonNull<u8>,
        bytes: usize,
        owner: Option<Arc<dyn Any + Send + Sync>>,
        node: u32,
    ) -> Arc<Self> {
        Self::made(start, bytes, owner, Some(node))
    }

    /// Makes a region of a batch's buffer on `node`, for other batches that read its contents.
    pub(crate) fn of_slab(slab: &Arc<Slab>, node: Option<u32>) -> Arc<Self> {
        let start = NonNull::new(slab.pointer()).expect("a slab is not at address 0");
        let owner: Arc<dyn Any + Send + Sync> = Arc::<Slab>::clone(slab);
        Self::made(start, slab.bytes(), Some(owner), node)
    }

    fn made(
        start: NonNull<u8>,
        bytes: usize,
        owner: Option<Arc<dyn Any + Send + Sync>>,
        node: Option<u32>,
    ) -> Arc<Self> {
        let (races, uses, left) = (AtomicBool::new(true), AtomicU64::new(0), Bell::default());
        Arc::new(Self { start, bytes, node, races, uses, left, _owner: owner })
    }

    /// Sets whether other threads may write this memory while work on it is in progress, as a running guest does;
    /// initially they may. In memory that is not written, a device's result and the CPU's can be compared.
    pub fn set_racing(&self, races: bool) {
        self.races.store(races, Ordering::Relaxed);
    }

    /// Returns whether other threads may write the memory.
    pub fn races(&self) -> bool {
        self.races.load(Ordering::Relaxed)
    }

    /// Returns its address.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the NUMA node of its pages, where known.
    pub fn node(&self) -> Option<u32> {
        self.node
    }

    /// Returns whether `address` lies in the region.
    pub(crate) fn contains(&self, address: *const u8) -> bool {
        address.addr().checked_sub(self.start.as_ptr().addr()).is_some_and(|offset| offset < self.bytes)
    }

    /// Returns the range of `len` bytes from `offset`.
    pub fn range(self: &Arc<Self>, offset: usize, len: usize) -> Result<Range, OutOfRegion> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(Range { region: Arc::clone(self), offset, len }),
            _ => Err(OutOfRegion { offset, len, bytes: self.bytes }),
        }
    }

    /// Returns the number of requests in progress on the region, including quarantined ones.
    pub fn uses(&self) -> u64 {
        self.uses.load(Ordering::Acquire) & !RETIRED
    }

    /// Accepts no new work from now on, and returns success once no request is in progress. After success no device and
    /// no engine touches the memory again, and it may be unmapped.
    pub fn retire(&self) -> Result<(), RegionBusy> {
        let uses = self.uses.fetch_or(RETIRED, Ordering::AcqRel) & !RETIRED;
        if uses == 0 { Ok(()) } else { Err(RegionBusy { uses, start: self.start.as_ptr().addr(), bytes: self.bytes }) }
    }

    /// As [`Self::retire`], but waits until `deadline` for the work to end. Another thread must collect completions
    /// meanwhile: another channel's, or the backstop.
    pub fn retire_by(&self, deadline: Nanos, time: &dyn Time) -> Result<(), RegionBusy> {
        loop {
            let heard = self.left.heard();
            match self.retire() {
                Err(_) if time.now() < deadline => time.wait(&self.left, heard, deadline),
                said => return said,
            }
        }
    }

    /// Adds one request, unless the region is retired.
    pub(crate) fn enter(&self) -> bool {
        let mut now = self.uses.load(Ordering::Relaxed);
        loop {
            if now & RETIRED != 0 {
                return false;
            }
            match self.uses.compare_exchange_weak(now, now + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(other) => now = other,
            }
        }
    }

    /// Adds one request that replaces another one in the region; possible also while the region is being retired.
    pub(crate) fn enter_again(&self) {
        let before = self.uses.fetch_add(1, Ordering::AcqRel);
        debug_assert!(before & !RETIRED > 0, "a region without requests was entered again");
    }

    /// Removes one request.
    pub(crate) fn leave(&self) {
        let before = self.uses.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before & !RETIRED > 0, "a region was left more often than entered");
        if before == RETIRED | 1 {
            self.left.ring();
        }
    }
}

/// A piece of a region.
#[derive(Clone, Debug)]
pub struct Range {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl Range {
    /// Returns the region that this is a range of.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns its offset in the region, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of its first byte.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.region.start.as_ptr().wrapping_add(self.offset)
    }
}
