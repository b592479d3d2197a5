//! Memory that a device may touch, and pieces of it.
//!
//! Nobody gets a slice of such memory. A request names it by [`Range`], and while it is with a device it holds the region:
//! the region counts what is under way ([`Region::uses`]), and memory is unmapped or unplugged only after
//! [`Region::retire`] has said that this is zero and stays zero.

use std::any::Any;
use std::fmt::{Debug, Formatter};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_memory::ram::RamBlock;
use thiserror::Error;

use crate::arena::Slab;
use crate::time::{Bell, Nanos, Time};

/// Set in the count of uses of a region that takes no new work.
const RETIRED: u64 = 1 << 63;

/// A region still has work under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{uses} batches on memory at {start:#x} ({bytes} bytes) are still with a device: it must stay mapped (try again; if a \
     device was taken out of service, when it has been closed)"
)]
pub struct RegionBusy {
    /// Requests under way.
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
    /// Offset asked for.
    pub offset: usize,
    /// Length asked for.
    pub len: usize,
    /// Length of the region.
    pub bytes: usize,
}

/// Memory that a device may touch: guest RAM, as a rule one region per RAM block.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    node: Option<u32>,
    races: AtomicBool,
    uses: AtomicU64,
    left: Bell,
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the pointer is only handed to devices and to raw, volatile copies inside the range that the creator vouched for;
// nothing is ever borrowed from it.
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
    /// The `bytes` bytes at `start`. `owner` is kept as long as the region or any work on it, and is what unmaps the memory
    /// when it is dropped; without one the creator does, after [`Self::retire`].
    ///
    /// # Safety
    /// The range stays mapped, readable and (for work that writes) writable until the region is retired with success or
    /// dropped. No Rust reference to it exists meanwhile, except to atomics.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, owner: Option<Arc<dyn Any + Send + Sync>>) -> Arc<Self> {
        Self::made(start, bytes, owner, None)
    }

    /// A RAM block of a guest, on NUMA node `node` where that is known; none where it lies in another process, which no device
    /// of this one reaches. The block is kept as long as the region or any work on it: its own contract is the region's.
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

    /// The buffer of a batch, on `node`, for others that read what came to lie there.
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

    /// Says whether somebody may write this memory while work on it is under way, as a guest does that runs; so it is at first. In
    /// memory that lies still, what a device said and the CPU sees can be compared.
    pub fn set_racing(&self, races: bool) {
        self.races.store(races, Ordering::Relaxed);
    }

    /// Whether somebody may write it.
    pub fn races(&self) -> bool {
        self.races.load(Ordering::Relaxed)
    }

    /// Where it is.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The NUMA node of its pages, where known.
    pub fn node(&self) -> Option<u32> {
        self.node
    }

    /// Whether this is an address in it.
    pub(crate) fn contains(&self, address: *const u8) -> bool {
        address.addr().checked_sub(self.start.as_ptr().addr()).is_some_and(|offset| offset < self.bytes)
    }

    /// `len` bytes from `offset`.
    pub fn range(self: &Arc<Self>, offset: usize, len: usize) -> Result<Range, OutOfRegion> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(Range { region: Arc::clone(self), offset, len }),
            _ => Err(OutOfRegion { offset, len, bytes: self.bytes }),
        }
    }

    /// Requests under way on it, quarantined ones included.
    pub fn uses(&self) -> u64 {
        self.uses.load(Ordering::Acquire) & !RETIRED
    }

    /// Takes no new work from now on, and says whether all work has left. After success no device and no engine touches
    /// the memory again, and it may be unmapped.
    pub fn retire(&self) -> Result<(), RegionBusy> {
        let uses = self.uses.fetch_or(RETIRED, Ordering::AcqRel) & !RETIRED;
        if uses == 0 { Ok(()) } else { Err(RegionBusy { uses, start: self.start.as_ptr().addr(), bytes: self.bytes }) }
    }

    /// As [`Self::retire`], waiting until `deadline` for the work to leave. Somebody must be collecting completions
    /// meanwhile: another thread's channels, or the backstop.
    pub fn retire_by(&self, deadline: Nanos, time: &dyn Time) -> Result<(), RegionBusy> {
        loop {
            let heard = self.left.heard();
            match self.retire() {
                Err(_) if time.now() < deadline => time.wait(&self.left, heard, deadline),
                said => return said,
            }
        }
    }

    /// One request more, unless the region is retired.
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

    /// One request more, of which the region has another form already.
    pub(crate) fn enter_again(&self) {
        let before = self.uses.fetch_add(1, Ordering::AcqRel);
        debug_assert!(before & !RETIRED > 0, "nobody is in the region");
    }

    /// One request less.
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
    /// The region it is a piece of.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Where it begins in the region, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its first byte.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.region.start.as_ptr().wrapping_add(self.offset)
    }
}
