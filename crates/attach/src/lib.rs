//! Runs system calls in a thread of another process, takes descriptors out of that process, and slows its threads down. The crate stands
//! alone: it contains nothing of migration.
//!
//! A program that was not written for Sterna is tracked by a userfaultfd of its own address space, and userfaultfd(2) makes one for
//! the caller's address space only. So this call, and the `close` after it, must run in the program itself. [`take_userfault`] does
//! this; [`share_userfault`] also leaves the process a copy, [`advise()`] runs madvise(2) there, and [`Process::stop`] is for other calls.
//! Everything after that, including `UFFDIO_API`, `UFFDIO_REGISTER` and `PAGEMAP_SCAN`, works from outside through the taken descriptor:
//! the kernel applies them to the address space in which the descriptor was made.
//!
//! ```no_run
//! use sterna_attach::{Process, UserfaultOrigin, take_userfault};
//!
//! let process = Process::open(4711)?;
//! let taken = take_userfault(&process, UserfaultOrigin::SystemCall)?;
//! println!("its main thread was stopped for {:?}", taken.stopped);
//! # Ok::<(), sterna_attach::AttachError>(())
//! ```
//!
//! [`Process::slow_down`] uses the same stop to hold threads for a share of the time. It runs nothing in the threads and changes nothing
//! of them; [`Slowdown`] has the rules.
//!
//! The crate works on x86-64 only. On other CPUs it compiles, and its functions return [`AttachError::Architecture`].
//!
//! # How it works
//!
//! ```text
//! PTRACE_SEIZE, PTRACE_INTERRUPT ─> at rest: PTRACE_EVENT_STOP, the thread's own registers
//!   registers set: the call's number, its arguments, the place of a `syscall` instruction      ┐
//!   PTRACE_SYSCALL ─> stopped at the entry of the call                                         │ lent
//!   PTRACE_SYSCALL ─> stopped at the end of the call; the result is read                       │
//!   the thread's own registers set                                                             ┘
//! PTRACE_INTERRUPT, PTRACE_CONT ─> at rest again (from here the next call, as often as needed)
//! PTRACE_DETACH
//! ```
//!
//! **At rest** is the only stop after which the thread continues as if it had not been stopped. It is in the kernel's signal code, between
//! an interrupted system call and the return to the program. With the thread's own registers in place, the kernel continues there as after
//! any interruption: it runs the interrupted call again, with the remaining time (`-ERESTARTSYS`, `-ERESTART_RESTARTBLOCK` and similar values
//! in `rax` are part of the restored registers), and delivers pending signals. So the thread is brought back to rest after each call. If it
//! were released at the call's end, the program would get a -512 from the kernel.
//!
//! **No single steps.** A step ends with a SIGTRAP that the kernel forces upon the thread, and forcing a signal that the program ignores
//! or blocks resets the program's setting for it. Stops at system calls are no signals.
//!
//! **No memory of the program is written**, the red zone below the stack included: all arguments are numbers. What one call of
//! [`advise()`] needs in memory lies in a mapping that is made for it.
//!
//! **The instruction** is that of the thread's own interrupted system call, two bytes before its instruction pointer. A thread that runs
//! user code continues and is stopped again, five times in 30 ms, until it is in a system call. After that, or if the whole process is
//! stopped by SIGSTOP, another instruction is used, from the vDSO or a mapped file that cannot be written.
//!
//! **Signals** are not blocked, because they would stay blocked if the tracer died. A signal before the call has begun stops the thread.
//! Its own registers are then restored, the signal is delivered with its data, and the thread is brought to rest before the handler's first
//! instruction; then the call is tried again. After eight signals in a row the thread runs for a millisecond, so that the handlers'
//! frames do not pile up on its stack.
//!
//! **Seccomp** is suspended for the thread only while its registers are lent (`PTRACE_O_SUSPEND_SECCOMP`). A filter can kill the
//! process for an unexpected call, and reading the filter needs the same right (CAP_SYS_ADMIN) as suspending it. If the kernel does not
//! permit the suspension and the thread is under seccomp, no call is run ([`AttachError::Seccomp`]).
//!
//! **How long the thread is stopped**: about 0.1 ms for [`take_userfault`] (QEMU 10.0 in its sandbox: median of 400 calls 92 µs, longest
//! 453 µs, independent of page tables, since nothing is registered meanwhile). The thread and this program take turns seven times. If all
//! CPUs are busy, each turn waits for a CPU: 20 ms in the median, 240 ms at the longest, with three busy loops on two CPUs.
//! `cargo test -p sterna-attach --test hostile` prints the figures of its own stops.
//!
//! # Failures and their handling
//!
//! | failure | handling |
//! |---|---|
//! | The number comes to mean another process | a pidfd and the directory in `/proc` are held; after attaching, before anything is stopped, the process is checked to be alive |
//! | The thread does not stop: vfork(2), a disk that does not answer | after 2 s [`AttachError::DoesNotStop`]; the tracing thread ends, at which the kernel detaches |
//! | The interrupted call returns `EINTR` for a stop alone, as `epoll_wait`, `semop`, `sigtimedwait`, `io_uring_enter` do (signal(7)) | a call without a time limit is run again (`-ERESTARTNOHAND`), as if there had been no stop; with one the program sees `EINTR`, as after SIGSTOP and SIGCONT, because the remaining time is not known |
//! | The injected call does not return | after 2 s it is interrupted, after 2 s more [`AttachError::Stuck`]; the tracing thread continues to wait, and restores the registers when the call returns |
//! | The whole process is stopped (SIGSTOP), before or during a call | our calls still run, nothing else does, and the process stays stopped |
//! | The process is killed, or ends | [`AttachError::Ended`]. The report of its end is left to its parent, even if this program is the parent |
//! | Another thread executes a program, which ends the held thread | [`AttachError::Replaced`]; the new program was never traced |
//! | The main thread has ended and other threads run | [`AttachError::MainThreadEnded`] |
//! | A debugger is attached | [`AttachError::AlreadyTraced`] names it |
//! | Another user, Yama, a namespace, a security module | [`AttachError::NotPermitted`] names the known reasons, and what to do |
//! | 32-bit code | [`AttachError::ThirtyTwoBit`] |
//! | The control group is frozen | [`AttachError::Unsettled`] after 2 s, registers restored |
//! | The thread is in a restartable sequence (rseq(2)) | it continues to run: with other registers the kernel would not notice that the sequence must be aborted |
//! | System calls are sent back to the program (`PR_SET_SYSCALL_USER_DISPATCH`) | the signal is not delivered; [`AttachError::NoInstruction`] |
//! | The descriptor was made and cannot be taken | it is closed there; [`AttachError::DescriptorLeft`] if that fails, too |
//! | Another thread of the process forks between the two calls | the child has the userfaultfd open, without any effect, until it executes a program or ends. This cannot be prevented |
//! | Other code of this program waits for any child (`waitpid(-1)`) without `__WNOTHREAD` | it may consume the report of a stop; this crate then waits until its limit, restores the registers and fails. Do not wait for any child meanwhile |
//! | This program gets SIGCHLD for each stop | as any tracer does |
//!
//! # Slowing threads down
//!
//! ```text
//! PTRACE_SEIZE (all threads), PTRACE_INTERRUPT (all threads) ─> at rest: the caller decides whether the thread may be held there
//!   held until the end of the slice, at most 100 ms ─> PTRACE_DETACH, and 1 to 10 ms without any tracer
//! ```
//!
//! | failure | handling |
//! |---|---|
//! | A thread is at a place where it must not be held | detached at once, stopped again 0.1 to 1 ms later, as long as the slice lasts |
//! | A signal is about to be delivered when the thread stops | delivered by the detach. A signal that comes while the thread is held is delivered after the detach |
//! | The interrupted call returns `EINTR` for a stop alone | as above; ioctl(2) with `KVM_RUN` returns it, and every program that runs virtual machines calls it again |
//! | A thread does not stop: vfork(2), a disk that does not answer | not waited for; detached when it has stopped, or by the end of the tracing thread |
//! | The process is stopped (SIGSTOP), before or during a slice | it stays stopped, and runs after SIGCONT: at the end of the slice at the latest |
//! | A thread ends, a debugger attaches, the process is killed or executes a program | all threads are released, with an error that has the reason |
//! | This program is killed, at any moment | the kernel releases the threads; nothing of them was changed |
//! | This program is stopped (SIGSTOP), or gets no CPU, while threads are held | they are held until it runs again. This cannot be prevented from within |
//!
//! # If this program dies during a call
//!
//! The kernel detaches all threads of a dead tracer, and the process continues (`PTRACE_O_EXITKILL` is not set). At rest that equals a
//! release. Lent registers, however, are not restored. They are lent once for `userfaultfd` and once for `close`, for about 50 µs each
//! (median of 991 calls on two busy cores; one in a hundred took more than 270 µs). If this program dies in that time, the thread continues
//! after its own `syscall` instruction, with its own stack and program: its interrupted call seems to have returned the number of a
//! descriptor, or 0, and up to three argument registers differ. An event loop in `ppoll`, as in a QEMU's main thread, treats that as a
//! time-out or a spurious wake-up. A `read` would seem to have read that many bytes. A thread that was in user code for 30 ms continues
//! after an instruction that is not its own, and crashes. Between the two calls a userfaultfd stays open in the process, to which nothing
//! is registered; during [`advise()`], a pidfd of the process itself and a mapping of 16 KiB stay.
//!
//! An error or a panic in this program is harmless, since the registers are then restored; only the end of the whole program is not. To
//! exclude this as well, run [`take_userfault`] in a process of its own that nothing kills, and send the descriptor over a socket.
//! `tests/hostile/deaths.rs` kills tracers at random moments: each process continued.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod advise;
mod error;
// On other CPUs only its types are used.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod process;
mod slowdown;
mod stopped_at;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod system;
mod thread;
#[cfg(target_arch = "x86_64")]
mod tracee;
#[cfg(not(target_arch = "x86_64"))]
#[path = "tracee_elsewhere.rs"]
mod tracee;
mod userfault;

pub use advise::{Advised, advise};
pub use error::AttachError;
pub use process::Process;
pub use slowdown::{Slowdown, SlowdownStats};
pub use stopped_at::StoppedAt;
pub use thread::StoppedThread;
pub use userfault::{SharedUserfault, TakenUserfault, UserfaultCopy, UserfaultOrigin, share_userfault, take_userfault};
