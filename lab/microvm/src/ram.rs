//! Guest RAM: blocks of memory, one after the other in guest physical memory and also in this process.
//!
//! The guest writes this memory at any time, so there are never references to it, only raw and volatile accesses.

use crate::config::{Backing, BlockConfig};
use crate::error::Error;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use sterna_guest::share::RAM_START;

/// Blocks are multiples of this: a huge page.
pub const BLOCK_UNIT: u64 = 2 << 20;
/// Maximum bytes of RAM: the range of one table of the guest's third level of paging.
const MAX_BYTES: u64 = (512 << 30) - RAM_START;

/// All RAM of a machine. It is unmapped when this is dropped, so every user of its addresses must hold it.
#[derive(Debug)]
pub struct GuestRam {
    /// The reserved range, and its length.
    reserved: *mut c_void,
    reserved_bytes: usize,
    /// Where RAM begins in it, aligned to huge pages.
    start: *mut u8,
    bytes: u64,
    blocks: Vec<Block>,
}

/// A block of guest RAM.
#[derive(Debug)]
pub struct Block {
    name: String,
    start: NonNull<u8>,
    bytes: u64,
    page_size: usize,
    file: Option<Arc<File>>,
}

// SAFETY: the memory belongs to the process, not to a thread; all accesses are raw.
unsafe impl Send for GuestRam {}
// SAFETY: as above; nothing else changes after `new`.
unsafe impl Sync for GuestRam {}

impl Block {
    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns where it is mapped in this process, valid as long as the [`GuestRam`] exists.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the size of its pages: 4096, or 2 MiB from the pool of huge pages.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the memfd that it maps, from offset 0 on.
    pub fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }
}

impl GuestRam {
    /// Maps all blocks; they read as zero.
    ///
    /// # Errors
    /// The blocks are not possible, or the memory is not available.
    pub fn new(configs: &[BlockConfig]) -> Result<Self, Error> {
        let mut bytes = 0u64;
        for (index, block) in configs.iter().enumerate() {
            if block.bytes == 0 || block.bytes % BLOCK_UNIT != 0 {
                let BlockConfig { name, bytes, .. } = block;
                return Err(Error::Config(format!("RAM block {name} of {bytes} bytes is not a multiple of 2 MiB")));
            }
            if block.name.is_empty() || configs[..index].iter().any(|other| other.name == block.name) {
                return Err(Error::Config(format!("RAM block {index} needs a name of its own, not '{}'", block.name)));
            }
            bytes = bytes.saturating_add(block.bytes);
        }
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(Error::Config(format!("{bytes} bytes of RAM: must be 2 MiB to 512 GiB - 2 MiB")));
        }
        // One range for all blocks, so that addresses are contiguous as in the guest, also for threads in place of vCPUs.
        let reserved_bytes = (bytes + BLOCK_UNIT) as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the system's choice disturbs nothing.
        let reserved = unsafe { mmap_anonymous(ptr::null_mut(), reserved_bytes, ProtFlags::empty(), flags) }
            .map_err(Error::system(format!("reserve {reserved_bytes} bytes of addresses for guest RAM")))?;
        let aligned = reserved.addr().next_multiple_of(BLOCK_UNIT as usize);
        let start = reserved.with_addr(aligned).cast::<u8>();
        // From here on, dropping `ram` releases the reserved range.
        let mut ram = Self { reserved, reserved_bytes, start, bytes, blocks: Vec::new() };
        let mut offset = 0;
        for config in configs {
            // SAFETY: the blocks' sizes add up to `bytes`, which fit behind `start` in what was reserved, which is not at 0.
            let block = unsafe { map(config, NonNull::new_unchecked(start.add(offset)))? };
            offset += config.bytes as usize;
            ram.blocks.push(block);
        }
        Ok(ram)
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the block, and the page in it, at a guest physical address.
    ///
    /// # Panics
    /// Outside of RAM: addresses come from the layout, never from the guest.
    pub(crate) fn page_of(&self, address: u64) -> (usize, u64) {
        let mut offset = address - RAM_START;
        for (index, block) in self.blocks.iter().enumerate() {
            if offset < block.bytes {
                return (index, offset / sterna::PAGE_SIZE as u64);
            }
            offset -= block.bytes;
        }
        panic!("guest physical address {address:#x} is not RAM");
    }

    /// Returns a pointer to `bytes` of RAM at a guest physical address.
    ///
    /// # Panics
    /// If they are not RAM, see [`Self::page_of`].
    pub(crate) fn at(&self, address: u64, bytes: u64) -> *mut u8 {
        let offset = address.checked_sub(RAM_START).filter(|offset| offset.saturating_add(bytes) <= self.bytes);
        let offset = offset.unwrap_or_else(|| panic!("{bytes} bytes at {address:#x} are not RAM"));
        // SAFETY: within the mapping, as just seen.
        unsafe { self.start.add(offset as usize) }
    }

    /// Writes plain numbers at a guest physical address that is aligned for them.
    pub(crate) fn write<T: Plain>(&self, address: u64, value: T) {
        let to = self.at(address, size_of::<T>() as u64).cast::<T>();
        assert!(to.is_aligned(), "{address:#x}");
        // SAFETY: within RAM, aligned, and volatile since the guest may read at any time.
        unsafe { to.write_volatile(value) };
    }

    /// Reads plain numbers from a guest physical address that is aligned for them. Numbers that the guest writes meanwhile
    /// are old or new, each for itself.
    pub(crate) fn read<T: Plain>(&self, address: u64) -> T {
        let from = self.at(address, size_of::<T>() as u64).cast::<T>();
        assert!(from.is_aligned(), "{address:#x}");
        // SAFETY: within RAM, aligned, any bits are such a value, and volatile since the guest may write at any time.
        unsafe { from.read_volatile() }
    }
}

/// Structures of 64-bit numbers only: any bits are a value.
///
/// # Safety
/// The type is that.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: 64-bit numbers only.
unsafe impl Plain for u64 {}
// SAFETY: `repr(C)`, 64-bit numbers only.
unsafe impl Plain for sterna_guest::share::Orders {}
// SAFETY: `repr(C)`, 64-bit numbers only.
unsafe impl Plain for sterna_guest::share::Counters {}
// SAFETY: `repr(C)`, 64-bit numbers only.
unsafe impl Plain for sterna_guest::share::Layout {}

impl Drop for GuestRam {
    fn drop(&mut self) {
        // SAFETY: reserved in `new` with this size; users of addresses in it hold the `GuestRam`. Unmapping what is
        // mapped cannot fail.
        let _ = unsafe { munmap(self.reserved, self.reserved_bytes) };
    }
}

/// Maps a block at `start`.
///
/// # Safety
/// The block's bytes from `start` on are reserved for it.
unsafe fn map(config: &BlockConfig, start: NonNull<u8>) -> Result<Block, Error> {
    let BlockConfig { name, bytes, backing } = config;
    let (length, protection) = (*bytes as usize, ProtFlags::READ | ProtFlags::WRITE);
    let file = match backing {
        Backing::Anonymous | Backing::AnonymousHuge => None,
        Backing::Memfd | Backing::HugeTlb => {
            let huge = match backing {
                Backing::HugeTlb => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
                _ => MemfdFlags::empty(),
            };
            let file = memfd_create(name.as_str(), MemfdFlags::CLOEXEC | huge)
                .map_err(Error::system(format!("create a memfd for RAM block {name}")))?;
            ftruncate(&file, *bytes).map_err(Error::system(format!("size the memfd of RAM block {name}")))?;
            Some(Arc::new(File::from(file)))
        }
    };
    let failed = || Error::system(format!("map {bytes} bytes ({backing:?}) for RAM block {name}"));
    match &file {
        None => {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
            // SAFETY: over addresses reserved for this, by the caller's promise.
            unsafe { mmap_anonymous(start.as_ptr().cast(), length, protection, flags) }.map_err(failed())?;
            let advice = match backing {
                Backing::AnonymousHuge => Advice::LinuxHugepage,
                _ => Advice::LinuxNoHugepage,
            };
            // SAFETY: just mapped; it only changes how memory is found for it. Systems without huge pages refuse: then
            // there are none anyway.
            let _ = unsafe { madvise(start.as_ptr().cast(), length, advice) };
        }
        Some(file) => {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: over addresses reserved for this, by the caller's promise.
            unsafe { mmap(start.as_ptr().cast(), length, protection, flags, file, 0) }.map_err(failed())?;
        }
    }
    let page_size = if *backing == Backing::HugeTlb { BLOCK_UNIT as usize } else { sterna::PAGE_SIZE };
    Ok(Block { name: name.clone(), start, bytes: *bytes, page_size, file })
}
