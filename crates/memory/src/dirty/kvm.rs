//! The common part of both KVM dirty logs: switching logging of memory slots on and off, and the few operations, on raw
//! file descriptors, since monitors use KVM wrappers of many versions.
//!
//! Source: `include/uapi/linux/kvm.h`, `Documentation/virt/kvm/api.rst`.

use super::DirtyLogError;
use crate::PAGE_SIZE;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// A KVM memory slot that holds part of a RAM block, as it was set by `KVM_SET_USER_MEMORY_REGION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmSlot {
    /// Slot number; the upper 16 bits are the address space, as in `kvm_userspace_memory_region`.
    pub slot: u32,
    /// The slot's flags without `KVM_MEM_LOG_DIRTY_PAGES`.
    pub flags: u32,
    /// Guest physical address.
    pub guest_address: u64,
    /// Address in this process.
    pub userspace_address: u64,
    /// Bytes, a multiple of 4096.
    pub size: u64,
    /// The RAM block that holds this memory.
    pub block: usize,
    /// The page of the block at which the slot begins.
    pub first_page: u64,
}

impl KvmSlot {
    /// Returns its length in pages.
    pub(super) fn pages(&self) -> u64 {
        self.size / PAGE_SIZE as u64
    }

    pub(super) fn error(&self, problem: impl Into<String>) -> DirtyLogError {
        DirtyLogError::Slot { slot: self.slot, problem: problem.into() }
    }
}

/// A VM and its memory slots.
#[derive(Debug)]
pub(super) struct Vm {
    pub(super) fd: OwnedFd,
    pub(super) slots: Vec<KvmSlot>,
    /// Pages of each block.
    pub(super) blocks: Vec<u64>,
}

impl Vm {
    /// Checks that the slots fit the blocks, of `blocks` pages each.
    ///
    /// # Safety
    /// Each slot must be one that the VM `fd` has, with exactly these values, for as long as the `Vm` is used.
    pub(super) unsafe fn new(fd: OwnedFd, blocks: &[u64], slots: Vec<KvmSlot>) -> Result<Self, DirtyLogError> {
        for (index, slot) in slots.iter().enumerate() {
            let page = PAGE_SIZE as u64;
            if slot.size == 0 || [slot.size, slot.guest_address, slot.userspace_address].iter().any(|v| v % page != 0) {
                return Err(slot.error("its addresses and size are not of whole pages of 4 KiB"));
            }
            if slot.flags & KVM_MEM_LOG_DIRTY_PAGES != 0 {
                return Err(slot.error("dirty logging is on already; give its flags without KVM_MEM_LOG_DIRTY_PAGES"));
            }
            let pages =
                blocks.get(slot.block).ok_or(DirtyLogError::NoSuchBlock { block: slot.block, blocks: blocks.len() })?;
            if slot.first_page.checked_add(slot.pages()).is_none_or(|end| end > *pages) {
                let (first, count) = (slot.first_page, slot.pages());
                return Err(slot.error(format!(
                    "its {count} pages from page {first} on are not within RAM block {} of {pages} pages",
                    slot.block
                )));
            }
            if slots[..index].iter().any(|other| other.slot == slot.slot) {
                return Err(slot.error("given twice"));
            }
        }
        Ok(Self { fd, slots, blocks: blocks.to_vec() })
    }

    /// Switches logging on for all slots, or for none if one fails.
    pub(super) fn start_logging(&self) -> Result<(), DirtyLogError> {
        for (index, slot) in self.slots.iter().enumerate() {
            if let Err(error) = self.set_flags(slot, slot.flags | KVM_MEM_LOG_DIRTY_PAGES) {
                for started in &self.slots[..index] {
                    // The first error is the one to report.
                    let _ = self.set_flags(started, started.flags);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Switches logging off for all slots, even if one fails.
    pub(super) fn stop_logging(&self) -> Result<(), DirtyLogError> {
        self.slots.iter().map(|slot| self.set_flags(slot, slot.flags)).fold(Ok(()), Result::and)
    }

    fn set_flags(&self, slot: &KvmSlot, flags: u32) -> Result<(), DirtyLogError> {
        let mut region = UserspaceMemoryRegion {
            slot: slot.slot,
            flags,
            guest_phys_addr: slot.guest_address,
            memory_size: slot.size,
            userspace_addr: slot.userspace_address,
        };
        let switched = if flags == slot.flags { "off" } else { "on" };
        // SAFETY: the operation reads one `kvm_userspace_memory_region`. The slot exists with these values (promised to
        // `new`), so only its flags change and the guest gets no other memory.
        unsafe { self.call(KVM_SET_USER_MEMORY_REGION, (&raw mut region).expose_provenance()) }
            .map(|_| ())
            .map_err(DirtyLogError::system(format!("switch the dirty log of KVM memory slot {} {switched}", slot.slot)))
    }

    /// Returns the VM's value of a capability: 0 where the VM lacks it.
    pub(super) fn capability(&self, capability: u32) -> Result<u64, DirtyLogError> {
        capability_of(&self.fd, capability)
    }

    /// Enables a capability with its first argument.
    pub(super) fn enable(&self, capability: u32, argument: u64) -> io::Result<()> {
        enable_on(&self.fd, capability, argument)
    }

    /// Calls one operation of the VM.
    ///
    /// # Safety
    /// `argument` must be what `operation` takes: a number, or the exposed address of its structure.
    pub(super) unsafe fn call(&self, operation: u64, argument: usize) -> io::Result<u64> {
        // SAFETY: as the caller promises.
        unsafe { call(&self.fd, operation, argument) }
    }
}

/// As [`Vm::capability`], for any descriptor of a VM.
pub(super) fn capability_of(vm: &impl AsRawFd, capability: u32) -> Result<u64, DirtyLogError> {
    // SAFETY: the operation takes a number.
    unsafe { call(vm, KVM_CHECK_EXTENSION, capability as usize) }
        .map_err(DirtyLogError::system("ask the VM for its capabilities (is it a VM file descriptor?)"))
}

/// As [`Vm::enable`], for any descriptor of a VM.
pub(super) fn enable_on(vm: &impl AsRawFd, capability: u32, argument: u64) -> io::Result<()> {
    let mut enable = EnableCapability { cap: capability, flags: 0, args: [argument, 0, 0, 0], pad: [0; 64] };
    // SAFETY: the operation reads one `kvm_enable_cap`. The capabilities of this module change how writes are logged,
    // not what memory the guest has.
    unsafe { call(vm, KVM_ENABLE_CAP, (&raw mut enable).expose_provenance()) }.map(|_| ())
}

/// # Safety
/// `argument` must be what `operation` takes: a number, or the exposed address of its structure.
unsafe fn call(fd: &impl AsRawFd, operation: u64, argument: usize) -> io::Result<u64> {
    // SAFETY: as the caller promises.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), operation as _, argument) };
    u64::try_from(answer).map_err(|_| io::Error::last_os_error())
}

/// `struct kvm_userspace_memory_region`.
#[repr(C)]
struct UserspaceMemoryRegion {
    slot: u32,
    flags: u32,
    guest_phys_addr: u64,
    memory_size: u64,
    userspace_addr: u64,
}

/// `struct kvm_enable_cap`.
#[repr(C)]
struct EnableCapability {
    cap: u32,
    flags: u32,
    args: [u64; 4],
    pad: [u8; 64],
}

/// `struct kvm_dirty_log`.
#[repr(C)]
pub(super) struct GetDirtyLog {
    pub(super) slot: u32,
    pub(super) padding: u32,
    /// Address of one bit per page, in words of 64 bits.
    pub(super) dirty_bitmap: u64,
}

/// `struct kvm_clear_dirty_log`.
#[repr(C)]
pub(super) struct ClearDirtyLog {
    pub(super) slot: u32,
    /// A multiple of 64, or up to the end of the slot.
    pub(super) num_pages: u32,
    /// A multiple of 64.
    pub(super) first_page: u64,
    /// Address of the bits from `first_page` on.
    pub(super) dirty_bitmap: u64,
}
const _: () = assert!(size_of::<UserspaceMemoryRegion>() == 32 && size_of::<EnableCapability>() == 104);
const _: () = assert!(size_of::<GetDirtyLog>() == 16 && size_of::<ClearDirtyLog>() == 24);

const KVM_MEM_LOG_DIRTY_PAGES: u32 = 1 << 0;
pub(super) const KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: u32 = 168;
pub(super) const KVM_CAP_DIRTY_LOG_RING: u32 = 192;
pub(super) const KVM_CAP_DIRTY_LOG_RING_ACQ_REL: u32 = 223;
pub(super) const KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE: u64 = 1 << 0;
pub(super) const KVM_DIRTY_LOG_INITIALLY_SET: u64 = 1 << 1;

const KVM_CHECK_EXTENSION: u64 = operation(0, 0x03, 0);
const KVM_ENABLE_CAP: u64 = operation(WRITE, 0xa3, size_of::<EnableCapability>());
const KVM_SET_USER_MEMORY_REGION: u64 = operation(WRITE, 0x46, size_of::<UserspaceMemoryRegion>());
pub(super) const KVM_GET_DIRTY_LOG: u64 = operation(WRITE, 0x42, size_of::<GetDirtyLog>());
pub(super) const KVM_CLEAR_DIRTY_LOG: u64 = operation(READ | WRITE, 0xc0, size_of::<ClearDirtyLog>());
pub(super) const KVM_RESET_DIRTY_RINGS: u64 = operation(0, 0xc7, 0);

const WRITE: u64 = 1;
const READ: u64 = 2;

/// `_IOC` of `include/uapi/asm-generic/ioctl.h` with KVM's type.
const fn operation(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xAE << 8 | number
}
