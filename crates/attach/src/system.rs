//! The system calls that have no safe form: ptrace(2), and waitid(2) for ptrace-stops. All `unsafe` of this crate is here.
//!
//! ptrace(2) is called by its number and not by the C library's function, whose types differ between C libraries. All arguments are
//! numbers, or structures that live in the calling function. The kernel itself checks that the thread is a tracee of the calling
//! thread in ptrace-stop, and else returns `ESRCH`: no call here can harm memory safety.

use std::io;

use libc::{c_int, c_long, c_void};

/// A thread's number, as ptrace(2) takes it.
pub(crate) type Tid = libc::pid_t;

/// The kernel's `PTRACE_O_TRACESYSGOOD`: marks stops at system calls, which distinguishes them from signals.
pub(crate) const MARK_SYSTEM_CALLS: c_long = 1;
/// The kernel's `PTRACE_O_SUSPEND_SECCOMP` (`include/uapi/linux/ptrace.h`).
pub(crate) const SUSPEND_SECCOMP: c_long = 1 << 21;

/// How a ptrace-stop ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    /// The thread runs on, traced.
    Continue,
    /// The thread runs on until it enters or leaves a system call.
    UntilSystemCall,
    /// The thread runs on and is not traced any more.
    Detach,
}

/// Attaches to a thread without stopping it.
pub(crate) fn seize(tid: Tid, options: c_long) -> io::Result<()> {
    request(c_long::from(libc::PTRACE_SEIZE), tid, 0, options)
}

/// Makes a traced thread stop soon. A thread that is already in a stop stops again after it was resumed.
pub(crate) fn interrupt(tid: Tid) -> io::Result<()> {
    request(c_long::from(libc::PTRACE_INTERRUPT), tid, 0, 0)
}

/// Ends a stop. `signal` is delivered with it, unless it is 0; it has an effect only if the thread stopped for a signal.
pub(crate) fn resume(tid: Tid, how: Resume, signal: c_int) -> io::Result<()> {
    let code = match how {
        Resume::Continue => libc::PTRACE_CONT,
        Resume::UntilSystemCall => libc::PTRACE_SYSCALL,
        Resume::Detach => libc::PTRACE_DETACH,
    };
    request(c_long::from(code), tid, 0, c_long::from(signal))
}

/// Sets the tracing options of a traced thread that is in a stop.
pub(crate) fn set_options(tid: Tid, options: c_long) -> io::Result<()> {
    request(c_long::from(libc::PTRACE_SETOPTIONS), tid, 0, options)
}

/// Makes a request that accesses no memory of this process.
fn request(code: c_long, tid: Tid, address: c_long, data: c_long) -> io::Result<()> {
    // SAFETY: the requests of this function's callers take numbers only; the kernel checks the thread.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, code, c_long::from(tid), address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the general registers of a stopped thread.
#[cfg(target_arch = "x86_64")]
pub(crate) fn registers(tid: Tid) -> io::Result<libc::user_regs_struct> {
    let mut registers = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
    let to: *mut c_void = registers.as_mut_ptr().cast();
    // SAFETY: PTRACE_GETREGS writes one user_regs_struct at `to`, which has room for it.
    let result = unsafe {
        libc::syscall(libc::SYS_ptrace, c_long::from(libc::PTRACE_GETREGS), c_long::from(tid), 0 as c_long, to)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed before and then written by the kernel; the structure is of integers only.
    Ok(unsafe { registers.assume_init() })
}

/// Replaces the general registers of a stopped thread.
#[cfg(target_arch = "x86_64")]
pub(crate) fn set_registers(tid: Tid, registers: &libc::user_regs_struct) -> io::Result<()> {
    let from: *const libc::user_regs_struct = registers;
    // SAFETY: PTRACE_SETREGS reads one user_regs_struct at `from`, which is borrowed for this call.
    let result = unsafe {
        libc::syscall(libc::SYS_ptrace, c_long::from(libc::PTRACE_SETREGS), c_long::from(tid), 0 as c_long, from)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns whether the signal for which a thread is in a stop was raised by the kernel for an action of the thread (`si_code` above 0:
/// sigaction(2)), and not sent by a process.
pub(crate) fn signal_is_a_fault(tid: Tid) -> io::Result<bool> {
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let to: *mut c_void = info.as_mut_ptr().cast();
    // SAFETY: PTRACE_GETSIGINFO writes one siginfo_t at `to`, which has room for it.
    let result = unsafe {
        libc::syscall(libc::SYS_ptrace, c_long::from(libc::PTRACE_GETSIGINFO), c_long::from(tid), 0 as c_long, to)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed before and then written by the kernel; the structure is of integers and a union of plain data.
    Ok(unsafe { info.assume_init() }.si_code > 0)
}

/// Returns the address of a thread's restartable-sequences area (rseq(2)); `None` if it has none, or before Linux 5.13.
pub(crate) fn rseq_area(tid: Tid) -> Option<u64> {
    /// `struct ptrace_rseq_configuration`.
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        area: u64,
        size: u32,
        signature: u32,
        flags: u32,
        padding: u32,
    }
    const PTRACE_GET_RSEQ_CONFIGURATION: c_long = 0x420f;
    let mut configuration = Configuration::default();
    let size = size_of::<Configuration>() as c_long;
    let to: *mut Configuration = &raw mut configuration;
    // SAFETY: PTRACE_GET_RSEQ_CONFIGURATION writes at most `size` bytes at `to`, which is a structure of that size.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, PTRACE_GET_RSEQ_CONFIGURATION, c_long::from(tid), size, to) };
    (result >= 0 && configuration.area != 0).then_some(configuration.area)
}

/// Checks whether a traced thread has stopped, and takes the report: the signal in bits 0 to 7, an event in bits 8 to 15.
/// Returns `None` if it has not stopped, or has ended. The report of an end is left to the process's parent, which may be this process.
///
/// # Errors
/// `ECHILD` if this process does not trace the thread any more.
pub(crate) fn take_stop(tid: Tid) -> io::Result<Option<c_int>> {
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
    // SAFETY: waitid writes one siginfo_t at the pointer, which has room for it.
    let result = unsafe { libc::waitid(libc::P_PID, tid as libc::id_t, info.as_mut_ptr(), options) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed before, so that it is all zero where the kernel had nothing to report, or written by the kernel; si_pid and
    // si_status are the fields that waitid(2) fills.
    let (pid, status) = unsafe {
        let info = info.assume_init();
        (info.si_pid(), info.si_status())
    };
    Ok((pid != 0).then_some(status))
}

/// Prepares the calling thread for tracing, since a stopped thread waits for it: no signal handler of this program runs in it, and its
/// sleeps do not last too long.
pub(crate) fn be_prompt() {
    let nanosecond = std::num::NonZeroU64::new(1);
    // If this fails, the kernel's default of 50 µs remains.
    let _ = rustix::thread::set_current_timer_slack(nanosecond);
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: sigfillset fills the set that it is given; pthread_sigmask reads it; no old set is asked for.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// Returns the calling thread's number.
pub(crate) fn this_thread() -> Tid {
    rustix::thread::gettid().as_raw_nonzero().get()
}
