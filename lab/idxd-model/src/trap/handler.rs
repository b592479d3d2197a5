//! The handler of SIGILL, SIGBUS and SIGSEGV.
//!
//! The instruction itself enters the handler, never in the middle of other code. So the handler may use locks and
//! allocate memory, like the function call that it replaces.

use std::cell::UnsafeCell;
use std::fs;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::decode::{Instruction, MAX_INSTRUCTION_BYTES, Undecoded, decode};
use super::{TrapError, Trapped};
use crate::model::{ModelQueue, enqcmd_permits};

static ENQCMDS: AtomicU64 = AtomicU64::new(0);
static RETRIES: AtomicU64 = AtomicU64::new(0);
static MOVDIR64BS: AtomicU64 = AtomicU64::new(0);

/// The signals that the instruction raises: on a processor without it, on a portal without memory, for `ENQCMD` without
/// an address space.
const SIGNALS: [libc::c_int; 3] = [libc::SIGILL, libc::SIGBUS, libc::SIGSEGV];

/// The previous handlers: written once, before the new ones are set.
struct PreviousHandlers(UnsafeCell<Option<[libc::sigaction; SIGNALS.len()]>>);

// SAFETY: only `install` writes this, under `OnceLock` and before any handler that reads it exists.
unsafe impl Sync for PreviousHandlers {}

static PREVIOUS: PreviousHandlers = PreviousHandlers(UnsafeCell::new(None));

pub(super) fn trapped() -> Trapped {
    Trapped {
        enqcmd: ENQCMDS.load(Ordering::Relaxed),
        retries: RETRIES.load(Ordering::Relaxed),
        movdir64b: MOVDIR64BS.load(Ordering::Relaxed),
    }
}

pub(super) fn install() -> Result<(), TrapError> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = DONE.get_or_init(|| set().map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL)));
    done.map_err(|error| TrapError::Signal(io::Error::from_raw_os_error(error)))
}

fn set() -> io::Result<()> {
    let done = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: all bytes zero is a valid sigaction; the calls are given valid pointers; `PREVIOUS` is written before the
    // new handlers exist, by the only thread that is in the `OnceLock`.
    unsafe {
        let mut before: [libc::sigaction; SIGNALS.len()] = std::mem::zeroed();
        for (signal, before) in SIGNALS.iter().zip(&mut before) {
            done(libc::sigaction(*signal, std::ptr::null(), before))?;
        }
        *PREVIOUS.0.get() = Some(before);
        let mut new: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = handle as *const () as usize;
        // Not SA_ONSTACK: the instruction stands for a call, so there is as much stack as for a call, and the
        // alternative stacks of Rust's threads are too small for this handler.
        new.sa_flags = libc::SA_SIGINFO;
        for signal in SIGNALS {
            done(libc::sigaction(signal, &raw const new, std::ptr::null_mut()))?;
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
    // SAFETY: the kernel passes a handler with SA_SIGINFO a ucontext_t that belongs to this frame alone.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    // SAFETY: for these signals the field contains the address.
    let about = unsafe { (*info).si_addr() }.addr() as u64;
    // A jump to an invalid address: there is no instruction to decode.
    let not_fetched = signal != libc::SIGILL && about == registers[libc::REG_RIP as usize].cast_unsigned();
    // SAFETY: the registers are those of this thread, which has fetched the instruction that it is stopped at.
    let done = !not_fetched && unsafe { execute(registers) };
    if !done {
        // SAFETY: written before this handler was set, never after.
        let before = unsafe { (*PREVIOUS.0.get()).as_ref() };
        let before = before.and_then(|all| SIGNALS.iter().position(|each| *each == signal).map(|at| &all[at]));
        forward(before, signal, info, context);
    }
    // SAFETY: the address is this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Executes the instruction. Returns `false` if it is not one of the two.
///
/// # Safety
///
/// The registers are those of the calling thread, stopped at an instruction that the processor has fetched.
unsafe fn execute(context: &mut [i64; 23]) -> bool {
    let address = context[libc::REG_RIP as usize].cast_unsigned();
    let registers = REGISTERS.map(|register| context[register as usize].cast_unsigned());
    // The instruction may end at the end of its page, so the next page is read only if necessary.
    let mut code = [0; MAX_INSTRUCTION_BYTES];
    let in_page = MAX_INSTRUCTION_BYTES.min((0x1000 - (address & 0xfff)) as usize);
    // SAFETY: the processor has fetched from this address, and the bytes are in the same page.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, code.as_mut_ptr(), in_page) };
    let decoded = match decode(&code[..in_page], address, &registers) {
        // Other instructions may end with the last mapped page. For this one the read faults here as the processor's
        // would have.
        Err(Undecoded::CutOff) if in_page < MAX_INSTRUCTION_BYTES => {
            // SAFETY: the instruction continues in the next page.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, code.as_mut_ptr(), MAX_INSTRUCTION_BYTES) };
            decode(&code, address, &registers)
        }
        decoded => decoded,
    };
    let Ok(decoded) = decoded else { return false };
    if decoded.destination % 64 != 0 {
        // The real instruction raises a general protection fault.
        return false;
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

/// Returns the queue whose device file is mapped at the address, found in the process's list of mappings: the driver
/// does not have to register its mapping.
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
        return crate::model::portals::find(number, inode.parse().ok()?);
    }
    None
}

fn forward(
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
        // The default action: the instruction raises the signal again, which ends the process.
        // SAFETY: setting the default handler has no other effect.
        _ => unsafe {
            libc::signal(signal, libc::SIG_DFL);
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::{Model, ModelConfig};

    #[repr(align(64))]
    struct Aligned([u8; 64]);

    /// The beginning of a `siginfo_t` of a signal with an address (`sigaction(2)`).
    #[repr(C)]
    struct About {
        head: [libc::c_int; 4],
        address: u64,
        rest: [u64; 13],
    }

    /// Enters the handler as the kernel does, by each signal that a processor may raise at `ENQCMD`.
    #[test]
    fn the_instruction_reaches_the_model_by_each_of_the_signals() {
        let model = Model::manual(ModelConfig::dsa()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let tree = model.write_tree(directory.path()).unwrap();
        let file = fs::OpenOptions::new().read(true).write(true).open(tree.dev.join("dsa/wq0.0")).unwrap();
        let (kind, access) = (libc::MAP_SHARED, libc::PROT_WRITE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let portal = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, kind, file.as_raw_fd(), 0) };
        assert_ne!(portal, libc::MAP_FAILED);
        // enqcmd rax, [rcx]
        let code = [0xf2_u8, 0x0f, 0x38, 0xf8, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut noop = Aligned([0; 64]);
        // A record is requested at an address where none can be written: the model counts the submission.
        noop.0[4] = 0x0c;
        for (number, (signal, address)) in
            [(libc::SIGILL, code.as_ptr().addr()), (libc::SIGBUS, portal.addr()), (libc::SIGSEGV, 0)]
                .into_iter()
                .enumerate()
        {
            // SAFETY: all bytes zero is a valid ucontext_t.
            let mut context: libc::ucontext_t = unsafe { std::mem::zeroed() };
            let registers = &mut context.uc_mcontext.gregs;
            registers[libc::REG_RIP as usize] = code.as_ptr().addr() as i64;
            registers[libc::REG_RAX as usize] = portal.addr() as i64;
            registers[libc::REG_RCX as usize] = noop.0.as_ptr().addr() as i64;
            registers[libc::REG_EFL as usize] = STATUS_FLAGS;
            let mut about = About { head: [signal, 0, 0, 0], address: address as u64, rest: [0; 13] };

            handle(signal, (&raw mut about).cast(), (&raw mut context).cast());

            let registers = &context.uc_mcontext.gregs;
            assert_eq!(registers[libc::REG_RIP as usize], code.as_ptr().addr() as i64 + 5, "signal {signal}");
            assert_eq!(registers[libc::REG_EFL as usize], 0, "signal {signal}: accepted");
            assert_eq!(model.queue("wq0.0").unwrap().in_flight(), number as u32 + 1);
        }
        // SAFETY: mapped above.
        unsafe { libc::munmap(portal, 4096) };
    }
}
