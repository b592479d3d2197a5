//! The bare payload: what the vCPUs run. It is the guest's own work (`guest/src/share.rs`) with nothing underneath: no
//! kernel, no interrupts, no allocator, in 64-bit user mode from the first instruction on. `build.rs` compiles it.
#![no_std]
#![no_main]

use core::fmt::{self, Write};
use core::{arch, ptr, slice};
use sterna_guest::share::{Counters, FAILED, Layout, Orders, SERIAL, SERIAL_BYTES, STEPS_DONE, Share};

/// The entry point of each vCPU, on a stack of its own. The monitor passes the addresses of its control pages.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".start")]
unsafe extern "sysv64" fn start(layout: *const Layout, orders: *const Orders, counters: *mut Counters) -> ! {
    // SAFETY: written by the monitor before the guest started, and not any more.
    let layout = unsafe { layout.read() };
    let Some(plan) = layout.plan() else { panic!("vcpu {}: {layout:?} is not understood", layout.vcpu) };
    // SAFETY: the monitor has set aside this memory for this vCPU alone, identity mapped. That it is moved to another host
    // while the guest is paused makes no difference to the guest.
    let (pages, table) = unsafe {
        (
            slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(layout.pages as usize), layout.count as usize),
            slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(layout.table as usize), layout.count as usize),
        )
    };
    let mut share = Share { vcpu: layout.vcpu, pages, table, plan, whole: layout.whole != 0 };
    loop {
        // SAFETY: the device's register; orders and counters are at the passed addresses. Volatile, because the monitor
        // writes and reads them while this vCPU is stopped at the register, and counters are read at any time.
        unsafe {
            register::<u64>(STEPS_DONE).write_volatile(counters.read_volatile().steps);
            let (orders, mut done) = (orders.read_volatile(), counters.read_volatile());
            // A serial port accepts every byte.
            let _ = share.step(&orders, &mut done, &mut Serial { vcpu: layout.vcpu });
            counters.write_volatile(done);
        }
    }
}

fn register<T>(address: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(address as usize)
}

struct Serial {
    vcpu: u64,
}

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the device's transmit register, which is always ready.
            unsafe { register::<u8>(SERIAL + self.vcpu * SERIAL_BYTES).write_volatile(byte) };
        }
        Ok(())
    }
}

#[panic_handler]
fn panic(information: &core::panic::PanicInfo<'_>) -> ! {
    // The vCPU's number is not known here; there will be no other line.
    let _ = writeln!(Serial { vcpu: 0 }, "{information}");
    loop {
        // SAFETY: the device's register. The monitor does not come back.
        unsafe { register::<u64>(FAILED).write_volatile(1) };
    }
}

// Functions that the compiler calls and that a C library would provide. They use string instructions, because loops
// would be compiled to calls of the functions themselves.

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller's promise for both ranges; the direction flag is clear at function calls.
    unsafe { arch::asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _) };
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= count {
        // SAFETY: the caller's promise; nothing is overwritten before it is read.
        return unsafe { memcpy(to, from, count) };
    }
    // SAFETY: the caller's promise; from the end, where `to` is within what is read. The flag is cleared again.
    unsafe {
        let (last_to, last_from) = (to.wrapping_add(count).wrapping_sub(1), from.wrapping_add(count).wrapping_sub(1));
        arch::asm!("std", "rep movsb", "cld",
            inout("rcx") count => _, inout("rdi") last_to => _, inout("rsi") last_from => _);
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller's promise; the direction flag is clear at function calls.
    unsafe { arch::asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") byte as u8) };
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    for at in 0..count {
        // SAFETY: the caller's promise for both ranges. Volatile, so that this is not compiled to a call of itself.
        let (left, right) = unsafe { (left.add(at).read_volatile(), right.add(at).read_volatile()) };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    // SAFETY: the same promise.
    unsafe { memcmp(left, right, count) }
}
