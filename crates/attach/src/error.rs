//! The errors: what happened to which process, in which state the process is, and what to do.

use std::io;
use std::time::Duration;

/// Why a request for another process failed. Unless the error states otherwise, the process runs on unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// There is no process of this number.
    #[error("there is no process {pid}")]
    NoProcess {
        /// The given number.
        pid: i32,
    },
    /// The number is that of a thread which is not the main thread of its process.
    #[error("{pid} is a thread, not a process: give the number of its process (Tgid in /proc/{pid}/status)")]
    NotAProcess {
        /// The given number.
        pid: i32,
    },
    /// The process is the caller's own.
    #[error("process {pid} is this process itself: a process cannot trace its own threads")]
    Myself {
        /// The given number.
        pid: i32,
    },
    /// This kernel lacks a system call.
    #[error("this kernel has no {call}: Linux {since} or newer is needed")]
    Kernel {
        /// The system call.
        call: &'static str,
        /// The release that has it.
        since: &'static str,
    },
    /// This program was built for an unsupported CPU.
    #[error("system calls in another process are written for x86-64 only; this program was built for {0}")]
    Architecture(&'static str),
    /// The kernel does not permit this program to trace the process.
    #[error("it is not permitted to trace process {pid}: {reason}")]
    NotPermitted {
        /// The process.
        pid: i32,
        /// Why, as far as that is known, and what to do.
        reason: String,
    },
    /// Another process traces this one already: a debugger, `strace`.
    #[error(
        "process {pid} is traced by process {tracer} ({name}) already, and a process has one tracer: end that one first"
    )]
    AlreadyTraced {
        /// The process.
        pid: i32,
        /// The tracer's number.
        tracer: i32,
        /// The tracer's name.
        name: String,
    },
    /// The main thread of the process has ended; only its other threads run.
    #[error("the main thread of process {pid} has ended, only its other threads run: there is no thread to stop")]
    MainThreadEnded {
        /// The process.
        pid: i32,
    },
    /// A thread that was slowed down has ended, or never existed.
    #[error("process {pid} has no thread {tid}: the thread has ended, or the process executed another program")]
    ThreadEnded {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// The thread did not stop in time: it waits in the kernel where it cannot be interrupted.
    #[error(
        "the main thread of process {pid} did not stop within {limit:?} (state {state}{place}): it waits in the kernel where nothing interrupts it, \
         as after vfork or on a disk. It was left alone; try again later"
    )]
    DoesNotStop {
        /// The process.
        pid: i32,
        /// The time limit.
        limit: Duration,
        /// The thread's state, from `/proc/PID/status`.
        state: String,
        /// Where in the kernel it waits: `, in FUNCTION`, or empty if that is not known.
        place: String,
    },
    /// Because of signals or user code, the thread did not reach a place where a system call can be injected.
    #[error(
        "the main thread of process {pid} was not found at a place where a system call can be put in within {limit:?} ({why}); it runs on unchanged, try again later"
    )]
    Unsettled {
        /// The process.
        pid: i32,
        /// The time limit.
        limit: Duration,
        /// What intervened each time.
        why: &'static str,
    },
    /// The thread runs 32-bit code.
    #[error("the main thread of process {pid} runs 32-bit code: only 64-bit processes are supported")]
    ThirtyTwoBit {
        /// The process.
        pid: i32,
    },
    /// The process is under a seccomp filter, which could not be suspended for our call.
    #[error(
        "process {pid} is under seccomp, whose filter might kill it for a system call that it does not expect, and the kernel does not let us \
         suspend the filter ({source}): CAP_SYS_ADMIN is needed, no seccomp filter on this program itself, and a kernel with CONFIG_CHECKPOINT_RESTORE"
    )]
    Seccomp {
        /// The process.
        pid: i32,
        /// The kernel's answer to `PTRACE_O_SUSPEND_SECCOMP`.
        source: io::Error,
    },
    /// The process or its main thread ended during the request.
    #[error("process {pid} ended while {during}")]
    Ended {
        /// The process.
        pid: i32,
        /// The step that was in progress.
        during: &'static str,
    },
    /// Another thread of the process executed a new program, which ended the held thread.
    #[error("process {pid} executed another program while {during}; the new program runs untouched")]
    Replaced {
        /// The process.
        pid: i32,
        /// The step that was in progress.
        during: &'static str,
    },
    /// No `syscall` instruction was found in the executable mappings of the process, or the one found could not be executed.
    #[error("no `syscall` instruction can be executed in process {pid}: {why}")]
    NoInstruction {
        /// The process.
        pid: i32,
        /// Why none can be executed.
        why: String,
    },
    /// The system call would not return to the place where it was injected, or would create a second process.
    #[error("{call} is not run in another process: it does not return, or makes a second process there")]
    Unsuitable {
        /// The call.
        call: String,
    },
    /// The system call ran in the process, and failed.
    #[error("{call} in process {pid} failed: {source}")]
    Refused {
        /// The call.
        call: String,
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The system call did not return in time.
    #[error(
        "{call} in process {pid} did not return within {limit:?}: its main thread is in that call. As soon as the call returns, and while this program runs, \
         the thread is put back and released"
    )]
    Stuck {
        /// The call.
        call: String,
        /// The process.
        pid: i32,
        /// The time limit.
        limit: Duration,
    },
    /// Advice about memory took too long.
    #[error(
        "advice about memory of process {pid} took longer than {limit:?}: it was given about {done} of {of} ranges"
    )]
    Slow {
        /// The process.
        pid: i32,
        /// The time limit.
        limit: Duration,
        /// Ranges about which advice was given.
        done: usize,
        /// All ranges, long ones in parts.
        of: usize,
    },
    /// A descriptor that was made in the process could not be closed there.
    #[error(
        "descriptor {number} ({what}) is left open in process {pid}, where it does nothing until the process ends: it could not be closed: {close}; {first}"
    )]
    DescriptorLeft {
        /// The process.
        pid: i32,
        /// The descriptor's number there.
        number: i32,
        /// What the descriptor is.
        what: &'static str,
        /// Why it could not be closed.
        close: Box<AttachError>,
        /// The earlier error, or that there was none.
        first: String,
    },
    /// A descriptor of the process is not the expected one.
    #[error("descriptor {number} of process {pid} is {found}, not {expected}; it was left as it is")]
    WrongDescriptor {
        /// The process.
        pid: i32,
        /// The number there.
        number: i32,
        /// What it is.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// Another operation failed.
    #[error("process {pid}: cannot {what}: {source}")]
    Io {
        /// The process.
        pid: i32,
        /// What failed.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl AttachError {
    /// Returns the error for a process or thread that has this tracer.
    pub(crate) fn already_traced(pid: i32, tracer: i32) -> AttachError {
        let name = std::fs::read_to_string(format!("/proc/{tracer}/comm")).unwrap_or_default();
        AttachError::AlreadyTraced { pid, tracer, name: name.trim().to_owned() }
    }
}
