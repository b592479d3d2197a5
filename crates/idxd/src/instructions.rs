//! The instructions that send 64 bytes to a device atomically, and whether this CPU has them.
//!
//! `ENQCMD` (shared queues; its zero flag reports whether the queue accepted) and `MOVDIR64B` (dedicated queues;
//! reports nothing). CPUID alone is weak evidence: `ENQCMD` faults in a process that has no address space bound to a
//! device, and a hypervisor may set the bit without passing a device through. CPUID decides which instruction may be
//! tried; only a completed no-op is proof.

use crate::descriptor::Descriptor;

/// Which of the two instructions may be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instructions {
    enqcmd: bool,
    movdir64b: bool,
    /// A test simulates the device.
    trapped: bool,
}

impl Instructions {
    /// No instruction: all submissions go through `write(2)`.
    pub const NONE: Instructions = Instructions { enqcmd: false, movdir64b: false, trapped: false };

    /// Detects the instructions by CPUID (leaf 7, subleaf 0, ECX bits 28 and 29). Other architectures have none.
    pub fn detect() -> Instructions {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::x86_64::{__cpuid, __cpuid_count};
            if __cpuid(0).eax >= 7 {
                let leaf = __cpuid_count(7, 0);
                let (enqcmd, movdir64b) = (leaf.ecx & 1 << 29 != 0, leaf.ecx & 1 << 28 != 0);
                return Instructions { enqcmd, movdir64b, trapped: false };
            }
        }
        Instructions::NONE
    }

    /// Allows both, whatever CPUID reports: for tests that catch the signals that the instructions raise and simulate
    /// the device.
    ///
    /// On architectures other than x86-64 the instructions do not exist; neither is ever executed there.
    ///
    /// # Safety
    ///
    /// While anything is opened with this, handlers must be installed that execute both instructions in the process's
    /// stead: of SIGILL for a CPU that lacks them, and for one that has them of the signals that storing to a mapping
    /// of the opened file raises.
    pub const unsafe fn trapped() -> Instructions {
        let there = cfg!(target_arch = "x86_64");
        Instructions { enqcmd: there, movdir64b: there, trapped: true }
    }

    /// Returns whether `ENQCMD` may be executed.
    pub const fn enqcmd(self) -> bool {
        self.enqcmd
    }

    /// Returns whether a test simulates the device, so that its file may be any file.
    pub(crate) const fn are_trapped(self) -> bool {
        self.trapped
    }

    /// Returns whether `MOVDIR64B` may be executed.
    pub const fn movdir64b(self) -> bool {
        self.movdir64b
    }
}

/// Makes earlier writes visible before later stores: record and descriptors before the submission.
#[inline]
pub(crate) fn store_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: SFENCE is part of SSE, which every x86-64 CPU has; it has no operands.
        unsafe { std::arch::x86_64::_mm_sfence() }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

/// Sends `descriptor` to a shared work queue. Returns true if the queue accepted it, false if it must be sent again.
///
/// # Safety
///
/// `portal` is 64-byte aligned in a mapped portal page, the CPU has the instruction (or it is trapped), the process has
/// an address space bound to the device, and the device may execute the descriptor.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn enqcmd(portal: *mut u8, descriptor: &Descriptor) -> bool {
    let retry: u8;
    // SAFETY: as this function's caller promises. The instruction reads the 64 bytes of the descriptor and writes no memory
    // but the portal; it clears all arithmetic flags but ZF, which is 1 if the queue did not accept it (SDM, ENQCMD).
    unsafe {
        std::arch::asm!(
            "enqcmd {portal}, [{descriptor}]",
            "setz {retry}",
            portal = in(reg) portal,
            descriptor = in(reg) descriptor.as_bytes().as_ptr(),
            retry = out(reg_byte) retry,
            options(nostack),
        );
    }
    retry == 0
}

/// Sends `descriptor` to a dedicated work queue, which accepts or drops it without a reply.
///
/// # Safety
///
/// As for [`enqcmd`].
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn movdir64b(portal: *mut u8, descriptor: &Descriptor) {
    // SAFETY: as this function's caller promises. The instruction reads the 64 bytes of the descriptor and stores them to
    // the portal, which is 64-byte aligned; it changes no flags.
    unsafe {
        std::arch::asm!(
            "movdir64b {portal}, [{descriptor}]",
            portal = in(reg) portal,
            descriptor = in(reg) descriptor.as_bytes().as_ptr(),
            options(nostack, preserves_flags),
        );
    }
}

/// The instruction does not exist here, and [`Instructions`] never allows it.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn enqcmd(_portal: *mut u8, _descriptor: &Descriptor) -> bool {
    unreachable!("ENQCMD exists on x86-64 only, and no queue is opened with it elsewhere");
}

/// The instruction does not exist here, and [`Instructions`] never allows it.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn movdir64b(_portal: *mut u8, _descriptor: &Descriptor) {
    unreachable!("MOVDIR64B exists on x86-64 only, and no queue is opened with it elsewhere");
}
