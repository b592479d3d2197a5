//! vCPUs on KVM: a VM with the machine's RAM, and vCPUs in 64-bit user mode from the first instruction on.
//!
//! Every KVM runs user mode without emulating instructions, even without hardware support (kvm_pvm). The payload needs nothing
//! else: no interrupts, no system calls. An exception has no handler and ends the machine. Devices are accessed by writes to
//! addresses without memory, because ports would need a privilege.

use crate::config::Tracking;
use crate::error::Error;
use crate::kvm_state::{KvmVcpuState, movable_msrs};
use crate::layout::{GuestLayout, PAGE, PAYLOAD_ROOM, ShareLayout};
use crate::ram::GuestRam;
use crate::serial::SerialPort;
use crate::state::VcpuState;
use crate::vcpu::{Exit, Vcpu};
use kvm_bindings::{CpuId, KVM_EXIT_DIRTY_RING_FULL, KVM_MAX_CPUID_ENTRIES, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use sterna::{DirtyLog, KvmLog, KvmRingLog, KvmSlot, RingHarvester};
use sterna_guest::share::{FAILED, RAM_START, SERIAL, SERIAL_BYTES, STEPS_DONE};

/// Entries of 16 bytes in each vCPU's dirty ring, if the machine has them.
const RING_BYTES: u32 = 1 << 20;
/// The payload, which lies at `RAM_START` and is entered at its first byte. Made by `build.rs`.
static PAYLOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload.bin"));
const _: () = assert!(PAYLOAD.len() as u64 <= PAYLOAD_ROOM);

/// Flags of a page table entry: present, writable, for user mode, accessed (set now, so that the CPU does not set it).
const TABLE: u64 = 0x27;
/// The same for 2 MiB, and dirty.
const HUGE_PAGE: u64 = 0xE7;

/// A VM with its vCPUs.
pub(crate) struct KvmMachine {
    pub(crate) vcpus: Vec<KvmVcpu>,
    /// KVM's dirty log, unless write protection tracks the process's own memory.
    pub(crate) log: Option<Box<dyn DirtyLog>>,
}

/// Opens KVM, and makes a VM.
pub(crate) fn open() -> Result<(Kvm, VmFd), Error> {
    let kvm = Kvm::new().map_err(|error| Error::system("open /dev/kvm")(errno(error)))?;
    let vm = kvm.create_vm().map_err(|error| Error::system("create a KVM virtual machine")(errno(error)))?;
    Ok((kvm, vm))
}

fn errno(error: kvm_ioctls::Error) -> std::io::Error {
    std::io::Error::from_raw_os_error(error.errno())
}

/// Converts an error of KVM, for `map_err`.
fn refused(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Error {
    move |error| Error::system(format!("{what} (KVM)"))(errno(error))
}

impl KvmMachine {
    /// Makes a VM with `ram`, whose content is not accessed.
    pub(crate) fn new(
        (kvm, vm): (Kvm, VmFd),
        ram: &Arc<GuestRam>,
        shares: &[ShareLayout],
        tracking: Tracking,
    ) -> Result<Self, Error> {
        // SAFETY: open as long as `vm` is.
        let vm_fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
        if tracking == Tracking::Ring {
            // Must be enabled before vCPUs are made.
            sterna::enable_kvm_ring(vm_fd, RING_BYTES)?;
        }
        let mut slots = Vec::new();
        let mut guest_address = RAM_START;
        for (index, block) in ram.blocks().iter().enumerate() {
            let slot = KvmSlot {
                slot: index as u32,
                flags: 0,
                guest_address,
                userspace_address: block.start().expose_provenance().get() as u64,
                size: block.bytes(),
                block: index,
                first_page: 0,
            };
            let region = kvm_userspace_memory_region {
                slot: slot.slot,
                flags: slot.flags,
                guest_phys_addr: slot.guest_address,
                memory_size: slot.size,
                userspace_addr: slot.userspace_address,
            };
            // SAFETY: the memory is mapped for as long as it may be used: each vCPU holds the RAM.
            unsafe { vm.set_user_memory_region(region) }.map_err(refused("give the machine its RAM"))?;
            slots.push(slot);
            guest_address += block.bytes();
        }
        let cpu_id =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(refused("ask what processors it supports"))?;
        let mut fds = Vec::new();
        for share in shares {
            let vcpu = vm.create_vcpu(share.share.vcpu).map_err(refused("create a vCPU"))?;
            vcpu.set_cpuid2(&cpu_id).map_err(refused("set what processor a vCPU is"))?;
            fds.push(vcpu);
        }
        let blocks: Vec<u64> = ram.blocks().iter().map(|block| block.bytes() / PAGE).collect();
        let mut harvester = None;
        let log: Option<Box<dyn DirtyLog>> = match tracking {
            Tracking::WriteProtect => None,
            // SAFETY: these are the slots just made, and they stay as they are.
            Tracking::Log => Some(Box::new(unsafe { KvmLog::new(vm_fd, &blocks, slots)? })),
            Tracking::Ring => {
                // SAFETY: open as long as `fds` are.
                let vcpus: Vec<_> = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }).collect();
                // SAFETY: these are the slots just made, which stay as they are, all the vCPUs, and the size enabled.
                // No other code harvests them.
                let log = unsafe { KvmRingLog::new(vm_fd, &vcpus, RING_BYTES, &blocks, slots)? };
                harvester = Some(log.harvester());
                Some(Box::new(log))
            }
        };
        let vm = Arc::new(vm);
        let vcpus = fds.into_iter().zip(shares).map(|(fd, share)| KvmVcpu {
            fd,
            cpu_id: cpu_id.clone(),
            _vm: Arc::clone(&vm),
            msrs: movable_msrs(&kvm),
            serial: SERIAL + share.share.vcpu * SERIAL_BYTES,
            harvester: harvester.clone(),
            _ram: Arc::clone(ram),
        });
        Ok(Self { vcpus: vcpus.collect(), log })
    }
}

/// Writes the payload and its page tables into RAM.
pub(crate) fn place_payload(ram: &GuestRam, layout: &GuestLayout) {
    let to = ram.at(RAM_START, PAYLOAD.len() as u64);
    // SAFETY: as many bytes of RAM, which is no part of this program's image.
    unsafe { ptr::copy_nonoverlapping(PAYLOAD.as_ptr(), to, PAYLOAD.len()) };
    // Identity mapping, from the devices to the end of RAM, by pages of 2 MiB.
    let (fourth, third) = (layout.page_tables, layout.page_tables + PAGE);
    ram.write(fourth, third | TABLE);
    let gibs = layout.end.div_ceil(1 << 30);
    for gib in 0..gibs {
        let second = third + (1 + gib) * PAGE;
        ram.write(third + gib * 8, second | TABLE);
        for entry in 0..512 {
            ram.write(second + entry * 8, (gib << 30 | entry << 21) | HUGE_PAGE);
        }
    }
}

/// A vCPU.
pub(crate) struct KvmVcpu {
    fd: VcpuFd,
    /// Its CPU features.
    cpu_id: CpuId,
    /// Numbers of the model specific registers that move.
    msrs: Vec<u32>,
    /// Its serial port's address.
    serial: u64,
    harvester: Option<RingHarvester>,
    // Dropped after the vCPU.
    _vm: Arc<VmFd>,
    _ram: Arc<GuestRam>,
}

impl KvmVcpu {
    fn exit(&mut self, serial: &SerialPort) -> Result<Option<Exit>, String> {
        let ports = self.serial..self.serial + SERIAL_BYTES;
        let exit = match self.fd.run() {
            Ok(VcpuExit::MmioWrite(address, data)) => match (address, data) {
                (STEPS_DONE, data) if data.len() == 8 => {
                    let mut steps = [0; 8];
                    steps.copy_from_slice(data);
                    return Ok(Some(Exit::StepDone(u64::from_le_bytes(steps))));
                }
                (FAILED, _) => return Err("the payload failed; the serial port says why".to_owned()),
                (address, &[byte]) if ports.contains(&address) => {
                    serial.write((address - ports.start) as u8, byte);
                    return Ok(Some(Exit::Nothing));
                }
                _ => format!("{} bytes written to {address:#x}, where nothing is", data.len()),
            },
            Ok(VcpuExit::MmioRead(address, [byte])) if ports.contains(&address) => {
                *byte = serial.read((address - ports.start) as u8);
                return Ok(Some(Exit::Nothing));
            }
            Ok(VcpuExit::MmioRead(address, data)) => format!("{} bytes read from {address:#x}", data.len()),
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                let harvester = self.harvester.as_ref().ok_or("it has a dirty ring that no log reads")?;
                harvester.harvest().map_err(|error| error.to_string())?;
                return Ok(Some(Exit::Nothing));
            }
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => return Ok(None),
            Ok(exit) => format!("{exit:?}"),
            Err(error) => error.to_string(),
        };
        let at = self.fd.get_regs().map_or_else(|error| error.to_string(), |registers| format!("{:#x}", registers.rip));
        Err(format!("KVM cannot go on at instruction {at}: {exit}"))
    }
}

impl Vcpu for KvmVcpu {
    fn run(&mut self, serial: &SerialPort) -> Result<Exit, String> {
        Ok(self.exit(serial)?.unwrap_or(Exit::Nothing))
    }

    /// Memory accesses to devices are completed by entering KVM again; `immediate_exit` limits it to that
    /// (`Documentation/virt/kvm/api.rst`, on `KVM_EXIT_MMIO`).
    fn finish(&mut self, serial: &SerialPort) -> Result<Option<Exit>, String> {
        self.fd.set_kvm_immediate_exit(1);
        self.exit(serial)
    }

    fn immediate_exit(&mut self) -> Option<NonNull<AtomicU8>> {
        // An atomic of the same size, as this is written by one thread and read by the kernel for another.
        NonNull::new(&raw mut self.fd.get_kvm_run().immediate_exit).map(NonNull::cast)
    }

    fn save(&self) -> Result<VcpuState, String> {
        let state = KvmVcpuState::save(&self.fd, &self.cpu_id, &self.msrs)?;
        Ok(VcpuState::Kvm(Box::new(state)))
    }

    fn boot(&mut self, layout: &GuestLayout, share: &ShareLayout) -> Result<(), String> {
        let failed = |error: kvm_ioctls::Error| format!("KVM does not return its registers: {error}");
        let taken = |error: kvm_ioctls::Error| format!("KVM does not take its registers: {error}");
        let mut special = self.fd.get_sregs().map_err(failed)?;
        special.cs = flat_segment(0b1011);
        for segment in [&mut special.ds, &mut special.es, &mut special.fs, &mut special.gs, &mut special.ss] {
            *segment = flat_segment(0b0011);
        }
        special.cr3 = layout.page_tables;
        // Physical address extension, SSE and its exceptions.
        special.cr4 |= 1 << 5 | 1 << 9 | 1 << 10;
        // Paging, protected mode, and a numeric unit that is there.
        special.cr0 = (special.cr0 | 1 << 31 | 1 << 1 | 1) & !(1 << 2);
        // Long mode, enabled and active.
        special.efer |= 1 << 8 | 1 << 10;
        self.fd.set_sregs(&special).map_err(taken)?;
        let mut registers = self.fd.get_regs().map_err(failed)?;
        registers.rip = RAM_START;
        registers.rflags = 2;
        // As if called: a return address is on the stack (System V ABI), though none to return to.
        registers.rsp = share.stack - 8;
        (registers.rdi, registers.rsi, registers.rdx) = (share.layout, share.orders, share.counters);
        self.fd.set_regs(&registers).map_err(taken)
    }

    fn load(&mut self, state: &VcpuState, _: &ShareLayout) -> Result<(), String> {
        let VcpuState::Kvm(state) = state else {
            return Err("it is of a machine that runs without KVM, and this one has it".to_owned());
        };
        self.cpu_id = state.load(&self.fd, &self.cpu_id)?;
        Ok(())
    }
}

/// A segment of user mode that covers everything; `kind` is code or data.
fn flat_segment(kind: u8) -> kvm_segment {
    let code = u8::from(kind & 8 != 0);
    kvm_segment {
        limit: u32::MAX,
        selector: 8 | 3,
        dpl: 3,
        type_: kind,
        present: 1,
        l: code,
        s: 1,
        g: 1,
        ..Default::default()
    }
}
