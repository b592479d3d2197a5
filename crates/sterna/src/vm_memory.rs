//! RAM blocks and a dirty log from rust-vmm's `vm-memory`.
//!
//! [`guest_ram`] makes a RAM block of each region. [`BitmapLog`] collects the bitmaps in which `vm-memory` records the writes of the
//! monitor's own threads: device models, firmware loading. It does not see vCPUs. A monitor with KVM puts both into a
//! [`UnionLog`](crate::UnionLog):
//!
//! ```
//! # use sterna::{DirtyLogError, KvmLog, KvmSlot, PAGE_SIZE, UnionLog, vm_memory::BitmapLog};
//! # use std::os::fd::BorrowedFd;
//! # use vm_memory::{GuestMemory, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, bitmap::AtomicBitmap};
//! # fn log(memory: &GuestMemoryMmap<AtomicBitmap>, vm_fd: BorrowedFd<'_>) -> Result<UnionLog, DirtyLogError> {
//! let (mut blocks, mut slots) = (Vec::new(), Vec::new());
//! for (block, region) in memory.iter().enumerate() {
//!     let (guest_address, size) = (region.start_addr().0, region.len());
//!     let userspace_address = region.as_ptr().expose_provenance() as u64;
//!     // With the values that KVM_SET_USER_MEMORY_REGION was called with.
//!     slots.push(KvmSlot { slot: block as u32, flags: 0, guest_address, userspace_address, size, block, first_page: 0 });
//!     blocks.push(size / PAGE_SIZE as u64);
//! }
//! // SAFETY: the VM has exactly these slots as long as the log exists.
//! let vcpus = unsafe { KvmLog::new(vm_fd, &blocks, slots)? };
//! let log = UnionLog::new(vec![Box::new(vcpus), Box::new(BitmapLog::new(memory)?)]);
//! # Ok(log)
//! # }
//! ```
//! Here each region has one slot, so that slots, blocks and regions have the same numbers.

use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;

use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, MmapRegion};

use crate::{Backing, DirtyLog, DirtyLogError, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, RamError};

/// Returns the RAM of `memory`: a block for each region, in the order of their addresses, named `ram0`, `ram1` and so on. The blocks keep
/// the regions mapped as long as the migration needs them.
///
/// A region without a file is [`Backing::Anonymous`], a shared mapping of a file [`Backing::Shared`], anything else [`Backing::Other`]. The
/// page size of a region that was declared as hugetlbfs is that of its file system.
///
/// # Errors
/// A region cannot be read and written, or [`GuestRam::new`] refuses its block.
pub fn guest_ram<B>(memory: &GuestMemoryMmap<B>) -> Result<GuestRam, RamError>
where
    B: Bitmap + Send + Sync + 'static,
{
    let regions = memory.iter().map(|region| region.get_mmap());
    GuestRam::new(regions.enumerate().map(|(number, region)| block(number, &region)).collect::<Result<_, _>>()?)
}

fn block<B: Bitmap + Send + Sync + 'static>(number: usize, region: &Arc<MmapRegion<B>>) -> Result<RamBlock, RamError> {
    let name = format!("ram{number}");
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    let start = NonNull::new(region.as_ptr()).filter(|_| region.prot() & read_write == read_write);
    let Some(start) = start else {
        let (given, found) = ("guest RAM", "cannot be read and written".to_owned());
        return Err(RamError::Backing {
            name,
            given,
            found,
            instead: "leave it out, or map it for reading and writing",
        });
    };
    let shared = region.flags() & libc::MAP_SHARED != 0;
    let (backing, page_size) = match region.file_offset() {
        None if !shared => (Backing::Anonymous, PAGE_SIZE),
        Some(file) if shared => {
            let huge = region.is_hugetlbfs() == Some(true);
            // Without the size the block is refused by `GuestRam::new`, or treated as pages of 4 KiB.
            let size =
                file.file().metadata().ok().filter(|_| huge).map_or(PAGE_SIZE, |status| status.blksize() as usize);
            (Backing::Shared(Arc::clone(file.arc()), file.start()), size)
        }
        _ => (Backing::Other, PAGE_SIZE),
    };
    // SAFETY: the region is mapped for reading and writing until it is dropped, which the block delays. `vm-memory` accesses it by raw and
    // volatile reads and writes only; no reference into it can be had from safe code.
    let block = unsafe { RamBlock::new(name, start, region.size(), backing) };
    Ok(block.with_page_size(page_size).owned_by(Arc::clone(region) as _))
}

/// Collects the writes that `vm-memory` has recorded in the bitmaps of its regions: those through its own interface. Names exactly these
/// pages.
///
/// While the migration runs, nothing else may reset the bitmaps (a snapshot of what has changed, for instance).
#[derive(Debug)]
pub struct BitmapLog {
    regions: Vec<Arc<MmapRegion<AtomicBitmap>>>,
    started: bool,
}

impl BitmapLog {
    /// Makes a log of the regions of `memory`: the blocks of [`guest_ram`], by number.
    ///
    /// # Errors
    /// A bitmap has pages of another size than 4 KiB.
    pub fn new(memory: &GuestMemoryMmap<AtomicBitmap>) -> Result<Self, DirtyLogError> {
        let regions: Vec<_> = memory.iter().map(|region| region.get_mmap()).collect();
        for (block, region) in regions.iter().enumerate() {
            let (pages, given) = (pages(region), region.bitmap().len() as u64);
            if pages != given {
                return Err(DirtyLogError::BitmapSize { block, pages, given });
            }
        }
        Ok(Self { regions, started: false })
    }
}

fn pages<B: Bitmap>(region: &MmapRegion<B>) -> u64 {
    region.size().div_ceil(PAGE_SIZE) as u64
}

impl DirtyLog for BitmapLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        if self.started {
            return Err(DirtyLogError::AlreadyStarted);
        }
        // Pages marked so far were written before they were marked, and so before the first round reads them.
        self.regions.iter().for_each(|region| region.bitmap().reset());
        self.started = true;
        Ok(())
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        if !self.started {
            return Err(DirtyLogError::NotStarted);
        }
        let blocks = self.regions.len();
        let region = self.regions.get(block).ok_or(DirtyLogError::NoSuchBlock { block, blocks })?;
        if dirty.pages() != pages(region) {
            return Err(DirtyLogError::BitmapSize { block, pages: pages(region), given: dirty.pages() });
        }
        dirty.merge_words(0, &region.bitmap().get_and_reset());
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.started = false;
        Ok(())
    }
}
