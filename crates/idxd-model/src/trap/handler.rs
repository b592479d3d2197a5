//! The handler of SIGILL.
//!
//! It is entered by the instruction itself, never in the middle of something, so it may take locks and memory like the
//! function call that it stands for.

use std::arch::asm;
use std::cell::UnsafeCell;
use std::fs;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::decode::{Instruction, LONGEST, Undecoded, decode};
use super::{TrapError, Trapped};
use crate::model::{ModelQueue, enqcmd_permits};

static ENQCMDS: AtomicU64 = AtomicU64::new(0);
static RETRIES: AtomicU64 = AtomicU64::new(0);
static MOVDIR64BS: AtomicU64 = AtomicU64::new(0);

/// The handler that was there before: written once, before the new one is in place.
struct Before(UnsafeCell<Option<libc::sigaction>>);

// SAFETY: written by `install` alone, under `OnceLock` and before anybody can read it.
unsafe impl Sync for Before {}

static BEFORE: Before = Before(UnsafeCell::new(None));

pub(super) fn trapped() -> Trapped {
    Trapped {
        enqcmd: ENQCMDS.load(Ordering::Relaxed),
        retries: RETRIES.load(Ordering::Relaxed),
        movdir64b: MOVDIR64BS.load(Ordering::Relaxed),
    }
}

/// CPUID leaf 7: bit 28 of ECX is `MOVDIR64B`, bit 29 `ENQCMD`.
fn present() -> Option<&'static str> {
    let leaf = std::arch::x86_64::__cpuid_count(7, 0);
    [(29, "ENQCMD"), (28, "MOVDIR64B")].into_iter().find(|(bit, _)| leaf.ecx >> bit & 1 == 1).map(|(_, name)| name)
}

pub(super) fn install() -> Result<(), TrapError> {
    /// Whether `MOVDIR64B` traps.
    static DONE: OnceLock<Result<bool, i32>> = OnceLock::new();
    if let Some(name) = present() {
        return Err(TrapError::Present(name));
    }
    let done = DONE.get_or_init(|| {
        let set = set().map(|()| movdir64b_traps());
        set.map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
    });
    match done.map_err(|error| TrapError::Signal(io::Error::from_raw_os_error(error)))? {
        true => Ok(()),
        false => Err(TrapError::Present("MOVDIR64B, although it does not say so")),
    }
}

/// Where a `MOVDIR64B` goes that is only to be seen, and whether it was.
static PROBE: AtomicU64 = AtomicU64::new(0);
static PROBE_TRAPPED: AtomicBool = AtomicBool::new(false);

/// Once the handler is set. A hypervisor can hide the instruction, but not keep anybody from using it.
fn movdir64b_traps() -> bool {
    #[repr(align(64))]
    struct Slot([u8; 64]);
    let (mut to, from) = (Slot([0; 64]), Slot([0; 64]));
    PROBE.store(to.0.as_mut_ptr().expose_provenance() as u64, Ordering::Relaxed);
    // SAFETY: either the instruction moves 64 bytes from one slot to the other, or the handler steps over it.
    unsafe { asm!("movdir64b {to}, [{from}]", to = in(reg) to.0.as_mut_ptr(), from = in(reg) from.0.as_ptr()) };
    PROBE.store(0, Ordering::Relaxed);
    PROBE_TRAPPED.load(Ordering::Relaxed)
}

fn set() -> io::Result<()> {
    // SAFETY: all bytes zero is a valid sigaction; the calls are given valid pointers; `BEFORE` is written before the new
    // handler exists, by the only thread that is in the `OnceLock`.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGILL, std::ptr::null(), &raw mut before) != 0 {
            return Err(io::Error::last_os_error());
        }
        *BEFORE.0.get() = Some(before);
        let mut new: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = handle as *const () as usize;
        // Not SA_ONSTACK: the instruction is where a call would be, so there is as much stack as for a call, and the
        // alternative stacks that Rust's threads have are too small for what is done here.
        new.sa_flags = libc::SA_SIGINFO;
        if libc::sigaction(libc::SIGILL, &raw const new, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Register numbers as instructions count them, as indices of the saved context.
const REGISTERS: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// CF, PF, AF, ZF, SF and OF.
const STATUS_FLAGS: i64 = 1 | 1 << 2 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 11;
const ZF: i64 = 1 << 6;

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
    // SAFETY: the kernel hands a handler with SA_SIGINFO a ucontext_t that is this frame's alone.
    let done = unsafe { execute(&mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs) };
    if !done {
        // SAFETY: written before this handler was set, never after.
        let before = unsafe { (*BEFORE.0.get()).as_ref() };
        pass_on(before, signal, info, context);
    }
    // SAFETY: the address is this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Executes the instruction. False if it is none of ours.
///
/// # Safety
///
/// The registers are those of the thread that runs this, stopped at an instruction it has fetched.
unsafe fn execute(context: &mut [i64; 23]) -> bool {
    let address = context[libc::REG_RIP as usize].cast_unsigned();
    let registers = REGISTERS.map(|register| context[register as usize].cast_unsigned());
    // The instruction may end at the end of its page: no further than that unless it has to be.
    let mut code = [0; LONGEST];
    let in_page = LONGEST.min((0x1000 - (address & 0xfff)) as usize);
    // SAFETY: the processor has fetched from this address, and the bytes are in the same page.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, code.as_mut_ptr(), in_page) };
    let decoded = match decode(&code[..in_page], address, &registers) {
        // Others may end with the last page that there is. Of this one the processor has seen enough not to have it, or it
        // faults here as it would have there.
        Err(Undecoded::CutOff) if in_page < LONGEST => {
            // SAFETY: the instruction goes on in the next page.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, code.as_mut_ptr(), LONGEST) };
            decode(&code, address, &registers)
        }
        decoded => decoded,
    };
    let Ok(decoded) = decoded else { return false };
    if decoded.destination % 64 != 0 {
        // A general protection fault of the real instruction.
        return false;
    }
    if decoded.destination == PROBE.load(Ordering::Relaxed) {
        PROBE_TRAPPED.store(true, Ordering::Relaxed);
        context[libc::REG_RIP as usize] += decoded.length as i64;
        return true;
    }
    let Some(queue) = queue_at(decoded.destination) else { return false };
    let mut bytes = [0; 64];
    // SAFETY: the instruction reads these 64 bytes; if they cannot be read, it faults as well.
    unsafe { std::ptr::copy_nonoverlapping(decoded.source as *const u8, bytes.as_mut_ptr(), 64) };
    match decoded.instruction {
        Instruction::Enqcmd => {
            if !enqcmd_permits(&bytes) {
                return false;
            }
            ENQCMDS.fetch_add(1, Ordering::Relaxed);
            let accepted = queue.enqcmd(&bytes);
            let flags = &mut context[libc::REG_EFL as usize];
            *flags &= !STATUS_FLAGS;
            if !accepted {
                RETRIES.fetch_add(1, Ordering::Relaxed);
                *flags |= ZF;
            }
        }
        Instruction::Movdir64b => {
            MOVDIR64BS.fetch_add(1, Ordering::Relaxed);
            queue.movdir64b(&bytes);
        }
    }
    context[libc::REG_RIP as usize] += decoded.length as i64;
    true
}

/// The queue whose device file is mapped there, by the process's own list of mappings: nothing has to be told where a
/// driver has mapped it.
fn queue_at(address: u64) -> Option<ModelQueue> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        if !(start..end).contains(&address) {
            continue;
        }
        let permissions = words.next()?;
        let (_offset, device, inode) = (words.next()?, words.next()?, words.next()?);
        if !permissions.contains('w') {
            return None;
        }
        let (major, minor) = device.split_once(':')?;
        let number = libc::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        return crate::tree::portal(number, inode.parse().ok()?);
    }
    None
}

fn pass_on(
    before: Option<&libc::sigaction>,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    match before {
        Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: a handler set with SA_SIGINFO is a function of these three.
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal, info, context);
            } else {
                // SAFETY: a handler set without SA_SIGINFO is a function of the signal's number.
                let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal);
            }
        }
        // The default: back in the instruction it is raised again, and ends the process.
        // SAFETY: setting the default handler has no other effect.
        _ => unsafe {
            libc::signal(libc::SIGILL, libc::SIG_DFL);
        },
    }
}
