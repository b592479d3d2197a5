//! A bare KVM guest in 64-bit user mode, which every KVM runs without emulating instructions. The guest has no kernel,
//! and writes pages of its memory.

use super::{Memory, Writer, Writers};
use kvm_bindings::{KVM_EXIT_DIRTY_RING_FULL, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use sterna_memory::PAGE_SIZE;
use sterna_memory::dirty::KvmSlot;
use sterna_memory::dirty::kvm_ring::RingHarvester;

/// The first page that the guest does not need for itself: code in page 0, page tables in the next three.
pub const FIRST_FREE: u64 = 4;
/// Pages of the two RAM blocks. They follow each other in guest physical memory.
pub const BLOCKS: [u64; 2] = [4096, 600];
/// The first page of the second slot of block 0: not a multiple of 64.
const CUT: u64 = 1037;
/// The first page of block 0 that the guest's loop writes.
pub const FIRST_WRITTEN: u64 = 512;
/// The number of pages that it writes, which includes pages of block 1.
pub const WRITTEN: u64 = 4096;
/// Writes between two exits of the loop.
const BATCH: u64 = 256;

/// Counts in `eax` and writes the count to page `eax >> cl`: each page for a while and then no more, so that a lost
/// write stays lost. Writes to `BATCH_DONE` after each `BATCH` writes. `ebx`: pages - 1, `esi`: address of the first
/// page, `ebp` and `edi`: `BATCH`.
#[rustfmt::skip]
const LOOP: [u8; 34] = [
    0xFF, 0xC0, 0x89, 0xC2, 0xD3, 0xEA,        // inc eax; mov edx,eax; shr edx,cl
    0x21, 0xDA, 0xC1, 0xE2, 12, 0x01, 0xF2,    // and edx,ebx; shl edx,12; add edx,esi
    0x89, 0x82, 8, 0, 0, 0,                    // mov [rdx+8],eax
    0xFF, 0xCD, 0x75, 0xE9,                    // dec ebp; jnz to the beginning
    0x89, 0xFD,                                // mov ebp,edi
    0x89, 0x04, 0x25, 0, 0, 0, 0x30,           // mov [BATCH_DONE],eax
    0xEB, 0xDE,                                // jmp to the beginning
];
/// Number of writes of each vCPU to one page before the next, as a power of two: some fill rings, some are in the
/// middle of a page whenever rounds begin.
const STAYS: [u64; 3] = [4, 14, 9];
/// Writes `eax` to the address `rdx` and to `ONCE_DONE`.
const ONCE: [u8; 9] = [0x89, 0x02, 0x89, 0x04, 0x25, 0, 0x10, 0, 0x30];
const ONCE_AT: u64 = 0x200;
/// Guest physical addresses without memory: the guest leaves `KVM_RUN` when it writes there. (Ports would need a
/// privilege that kvm_pvm forgets.)
const BATCH_DONE: u64 = 0x3000_0000;
const ONCE_DONE: u64 = 0x3000_1000;

/// Fields are dropped in this order: memory last.
pub struct Guest {
    pub vcpus: Vec<VcpuFd>,
    pub vm: VmFd,
    pub slots: Vec<KvmSlot>,
    pub memories: [Memory; 2],
}

/// Returns the VM's descriptor.
pub fn fd_of(vm: &VmFd) -> BorrowedFd<'_> {
    // SAFETY: open as long as the VM is borrowed.
    unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) }
}

impl Guest {
    /// Makes a guest with `vcpus` vCPUs, after `prepare` was called for the VM; or prints why that is not possible.
    pub fn new(memories: [Memory; 2], vcpus: u64, prepare: impl FnOnce(&VmFd) -> bool) -> Option<Self> {
        let made = Kvm::new().and_then(|kvm| kvm.create_vm());
        let vm = match made {
            Ok(vm) => vm,
            Err(error) => {
                println!("skipped: no virtual machine can be made through /dev/kvm: {error}");
                return None;
            }
        };
        if !prepare(&vm) {
            return None;
        }
        assert_eq!([memories[0].pages(), memories[1].pages()], BLOCKS);
        let page = PAGE_SIZE as u64;
        let slot = |slot: u32, block: usize, first_page: u64, pages: u64| KvmSlot {
            slot,
            flags: 0,
            guest_address: (first_page + BLOCKS[0] * block as u64) * page,
            userspace_address: memories[block].addresses().start as u64 + first_page * page,
            size: pages * page,
            block,
            first_page,
        };
        let slots = vec![slot(0, 0, 0, CUT), slot(1, 0, CUT, BLOCKS[0] - CUT), slot(7, 1, 0, BLOCKS[1])];
        for slot in &slots {
            let region = kvm_userspace_memory_region {
                slot: slot.slot,
                flags: 0,
                guest_phys_addr: slot.guest_address,
                memory_size: slot.size,
                userspace_addr: slot.userspace_address,
            };
            // SAFETY: the memory is mapped for as long as the guest exists: it is dropped after VM and vCPUs.
            unsafe { vm.set_user_memory_region(region).unwrap() };
        }
        for (index, byte) in LOOP.iter().enumerate() {
            poke(&memories[0], index, *byte);
        }
        for (index, byte) in ONCE.iter().enumerate() {
            poke(&memories[0], ONCE_AT as usize + index, *byte);
        }
        // All of the first GiB, identity mapped by huge pages. Accessed and dirty bits are set, so that the CPU does
        // not set them.
        let table = |page: u64, entry: usize, value: u64| memories[0].word(page, entry).store(value, Ordering::Relaxed);
        table(1, 0, (2 * page) | 0x27);
        table(2, 0, (3 * page) | 0x27);
        (0..512).for_each(|entry| table(3, entry, (entry as u64) << 21 | 0xE7));
        let vcpus = (0..vcpus).map(|index| vcpu(&vm, index)).collect();
        Some(Self { memories, slots, vcpus, vm })
    }

    /// Returns the writers of the racing test: each vCPU on a thread.
    pub fn writers<'a>(vcpus: &'a mut [VcpuFd], harvester: Option<&RingHarvester>) -> Vec<Writer<'a>> {
        vcpus
            .iter_mut()
            .map(|vcpu| {
                let harvester = harvester.cloned();
                Box::new(move |writers: &Writers| {
                    while !writers.stopped() {
                        match vcpu.run() {
                            Ok(VcpuExit::MmioWrite(BATCH_DONE, _)) => {
                                writers.writes.fetch_add(BATCH, Ordering::Relaxed);
                            }
                            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                                RING_FULL.fetch_add(1, Ordering::Relaxed);
                                harvester.as_ref().expect("only with rings").harvest().unwrap();
                            }
                            Err(error) if error.errno() == libc::EINTR => {}
                            exit => panic!("unexpected exit: {exit:?}"),
                        }
                    }
                }) as Writer<'a>
            })
            .collect()
    }

    /// Makes the first vCPU write these pages, numbered as in guest physical memory.
    pub fn write_pages(&mut self, pages: impl IntoIterator<Item = u64>, harvester: Option<&RingHarvester>) {
        let vcpu = &mut self.vcpus[0];
        for page in pages {
            let mut registers = vcpu.get_regs().unwrap();
            (registers.rip, registers.rdx) = (ONCE_AT, page * PAGE_SIZE as u64);
            registers.rax += 1;
            vcpu.set_regs(&registers).unwrap();
            loop {
                match vcpu.run().unwrap() {
                    VcpuExit::MmioWrite(ONCE_DONE, _) => break,
                    VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL) => {
                        harvester.expect("only with rings").harvest().unwrap();
                    }
                    exit => panic!("unexpected exit: {exit:?}"),
                }
            }
        }
    }
}

/// Counts how often a ring was full, in this process.
pub static RING_FULL: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

fn poke(memory: &Memory, at: usize, byte: u8) {
    // SAFETY: within the first page, and the guest does not run yet.
    unsafe { memory.bytes().add(at).write_volatile(byte) };
}

fn vcpu(vm: &VmFd, index: u64) -> VcpuFd {
    let vcpu = vm.create_vcpu(index).unwrap();
    let mut special = vcpu.get_sregs().unwrap();
    let flat = |type_: u8| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 8 | 3,
        dpl: 3,
        type_,
        present: 1,
        db: 0,
        l: u8::from(type_ & 8 != 0),
        s: 1,
        g: 1,
        ..Default::default()
    };
    special.cs = flat(0b1011);
    for segment in [&mut special.ds, &mut special.es, &mut special.fs, &mut special.gs, &mut special.ss] {
        *segment = flat(0b0011);
    }
    special.cr3 = PAGE_SIZE as u64;
    special.cr4 |= 1 << 5;
    special.cr0 |= 1 << 31 | 1;
    special.efer |= 1 << 8 | 1 << 10;
    vcpu.set_sregs(&special).unwrap();
    let mut registers = vcpu.get_regs().unwrap();
    registers.rip = 0;
    registers.rflags = 2;
    registers.rcx = STAYS[index as usize % STAYS.len()];
    registers.rax = (index * 1000) << registers.rcx;
    registers.rbx = WRITTEN - 1;
    // vCPUs write different words, so that each page has writers of its own.
    registers.rsi = FIRST_WRITTEN * PAGE_SIZE as u64 + index * 64;
    (registers.rbp, registers.rdi) = (BATCH, BATCH);
    vcpu.set_regs(&registers).unwrap();
    vcpu
}
