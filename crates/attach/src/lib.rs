//! System calls in a thread of another process, a descriptor taken out of that process, and threads of it slowed down. Stands alone:
//! nothing here knows of migration.
//!
//! A program that was not written for Sterna is tracked by a userfaultfd of its own address space, and userfaultfd(2) makes one for
//! the caller's address space only. So that one call, and the `close` after it, must run in the program itself. [`take_userfault`] does
//! this; [`share_userfault`] leaves the process a copy, [`advise`] runs madvise(2) there, and [`Process::stop`] is for other calls. Everything after that, `UFFDIO_API`, `UFFDIO_REGISTER` and `PAGEMAP_SCAN` included, works
//! from outside through the descriptor that was taken: the kernel works on the address space that the descriptor was made in.
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
//! [`Process::slow_down`] is another use of the same stop: it holds threads for a share of the time, runs nothing in them, and changes
//! nothing of them. Its rules are those of [`Slowdown`].
//!
//! x86-64 only. On other CPUs the crate compiles, and both answer with [`AttachError::Architecture`].
//!
//! # How it works
//!
//! ```text
//! PTRACE_SEIZE, PTRACE_INTERRUPT ─> at rest: PTRACE_EVENT_STOP, the thread's own registers
//!   registers set: the call's number, its arguments, the place of a `syscall` instruction      ┐
//!   PTRACE_SYSCALL ─> it stands at the entry of the call                                       │ lent
//!   PTRACE_SYSCALL ─> it stands at the end of the call; the result is read                     │
//!   the thread's own registers set                                                             ┘
//! PTRACE_INTERRUPT, PTRACE_CONT ─> at rest again (from here the next call, as often as wanted)
//! PTRACE_DETACH
//! ```
//!
//! **At rest** is the one stop from which all is as it was. It is in the kernel's signal code, between an interrupted system call and
//! the return to the program. With the thread's own registers in place the kernel goes on there as after any interruption: it runs the
//! interrupted call again, with the time that was left (`-ERESTARTSYS`, `-ERESTART_RESTARTBLOCK` and their like in `rax` are part of the
//! registers that are put back), and delivers the signals that have come. This is why the thread is brought back to rest after each call
//! and not just released at the call's end, where the kernel would hand the program a -512.
//!
//! **No single steps.** A step ends with a SIGTRAP that the kernel forces upon the thread, and forcing a signal that the program ignores
//! or blocks resets what the program had set for it. Stops at system calls are no signals.
//!
//! **No memory of the program is written**, the red zone below the stack included: all arguments are numbers. What one call of
//! [`advise`] needs in memory lies in a mapping that is made for it.
//!
//! **The instruction** is the one of the thread's own interrupted system call, two bytes before its instruction pointer. A thread that
//! runs user code is let run on and looked at again, five times in 30 ms, until it stands in a system call; only then, or where
//! the whole process is stopped by SIGSTOP, another instruction is taken, from the vDSO or a mapped file that cannot be written.
//!
//! **Signals** are not blocked, because a dead tracer would leave them so. One that comes before the call has begun makes the thread stop;
//! its own registers are put back, the signal is delivered with everything that came with it, and the thread is brought to rest before the
//! handler's first instruction; then the call is tried anew. After eight in a row the thread runs for a millisecond, so that the
//! handlers' frames do not pile up on its stack.
//!
//! **Seccomp** is suspended for the thread while its registers are lent (`PTRACE_O_SUSPEND_SECCOMP`), and only then. A filter can
//! kill the process for a call it does not expect, and cannot be read without the very right (CAP_SYS_ADMIN) that suspending it takes. Where
//! the kernel does not permit it and the thread is under seccomp, nothing is run ([`AttachError::Seccomp`]).
//!
//! **How long the thread stands**: about 0.1 ms for [`take_userfault`] (QEMU 10.0 in its sandbox: median of 400 takes 92 µs, longest
//! 453 µs; page tables do not matter, as nothing is registered meanwhile). The thread and this program take turns seven times, so where all
//! CPUs are taken by others it is that many waits for a CPU: 20 ms in the median, 240 ms at the longest, with three busy loops on two CPUs.
//! `cargo test -p sterna-attach --test hostile` prints the figures of its own stops.
//!
//! # What can go wrong, and what is done
//!
//! | what | what is done |
//! |---|---|
//! | The number comes to mean another process | a pidfd and the directory in `/proc` are held; whether the process lives is looked at after attaching, before anything is stopped |
//! | The thread does not stop: vfork(2), a disk that does not answer | after 2 s [`AttachError::DoesNotStop`]; the tracing thread ends, with which the kernel detaches |
//! | The interrupted call returns `EINTR` for a stop alone, as `epoll_wait`, `semop`, `sigtimedwait`, `io_uring_enter` do (signal(7)) | without a time limit it is run again (`-ERESTARTNOHAND`), as if there had been no stop; with one the program sees `EINTR`, as after SIGSTOP and SIGCONT, because the time that is left is not known |
//! | The call that was put in does not return | after 2 s it is interrupted, after 2 s more [`AttachError::Stuck`]; the tracing thread goes on waiting, and puts the thread back when the call returns |
//! | The whole process is stopped (SIGSTOP), before or amid | our calls run all the same, nothing else does, and the process stays stopped |
//! | The process is killed, or ends | [`AttachError::Ended`]. Its end is never taken: its parent hears of it, also where this program is its parent |
//! | Another thread executes a program, which ends the thread that is held | [`AttachError::Replaced`]; the new program was never traced |
//! | The main thread has ended and other threads run | [`AttachError::MainThreadEnded`] |
//! | A debugger is attached | [`AttachError::AlreadyTraced`] names it |
//! | Another user, Yama, a namespace, a security module | [`AttachError::NotPermitted`] names what can be found out, and what to do |
//! | 32-bit code | [`AttachError::ThirtyTwoBit`] |
//! | The control group is frozen | [`AttachError::Unsettled`] after 2 s, registers put back |
//! | The thread is in a restartable sequence (rseq(2)) | it is let run on: the kernel would not notice with other registers that the sequence must be aborted |
//! | System calls are sent back to the program (`PR_SET_SYSCALL_USER_DISPATCH`) | the signal is kept from it; [`AttachError::NoInstruction`] |
//! | The descriptor was made and cannot be taken | it is closed there; [`AttachError::DescriptorLeft`] where that fails too |
//! | Another thread of the process forks between the two calls | the child has the userfaultfd open until it executes a program or ends. Nothing can be done about it; it does nothing there |
//! | Other code of this program waits for any child (`waitpid(-1)`) without `__WNOTHREAD` | it may take the report of a stop; then this waits until its limit, undoes and says so. Do not do that meanwhile |
//! | This program gets SIGCHLD for each stop | as any tracer does |
//!
//! # Threads that are slowed down
//!
//! ```text
//! PTRACE_SEIZE (all threads), PTRACE_INTERRUPT (all threads) ─> at rest: the caller says whether the thread may be held there
//!   held until the end of the slice, at most 100 ms ─> PTRACE_DETACH, and 1 to 10 ms without any tracer
//! ```
//!
//! | what | what is done |
//! |---|---|
//! | A thread is where the caller does not want it held | detached at once, stopped again 0.1 to 1 ms later, as long as the slice lasts |
//! | A signal is about to be delivered when the thread stops | delivered with the detaching. One that comes while the thread is held is delivered after it |
//! | The interrupted call returns `EINTR` for a stop alone | as above; ioctl(2) with `KVM_RUN` returns it, and every program that makes virtual machines calls it again |
//! | A thread does not stop: vfork(2), a disk that does not answer | it is not waited for. Detached when it has stopped, or by the end of the tracing thread |
//! | The process is stopped (SIGSTOP), before or amid | it stays stopped, and goes on when it is continued: at the end of the slice at the latest |
//! | A thread ends, a debugger attaches, the process is killed or executes a program | all threads are let go, and an error says why |
//! | This program is killed, at any moment | the kernel lets the threads run; nothing of them was changed |
//! | This program is stopped (SIGSTOP), or gets no CPU, while threads are held | they are held until it runs again. Nothing can be done about it from within |
//!
//! # If this program dies amid it
//!
//! The kernel detaches whatever a dead tracer traced, and the process goes on (`PTRACE_O_EXITKILL` is not set). At rest that is as good as
//! a release. What cannot be undone then is what was lent: from the change of the registers until they are put back, once for
//! `userfaultfd` and once for `close`, about 50 µs each (median of 991 calls on two busy cores, one in a hundred took more than 270 µs). An
//! end of this program in that time leaves the thread behind its own `syscall` instruction, with its own stack and program: its interrupted call seems
//! to have returned the number of a descriptor, or 0, and up to three argument registers differ. An event loop in `ppoll`, which is where a
//! QEMU's main thread stands, takes that for a time-out or for a wake-up for nothing; a `read` would be taken for that many bytes, and a thread that was found in user
//! code for 30 ms goes on behind an instruction that is not its own, and crashes. Between the
//! two calls a userfaultfd stays open in the process, to which nothing is registered; amid [`advise`], a pidfd of the process
//! itself and a mapping of 16 KiB stay. An error or a panic in
//! this program does not matter, as the thread is put back then; the end of the whole program does, of whatever cause. Whoever must exclude the rest runs [`take_userfault`] in a process of its own that no one
//! kills, and has the descriptor sent over a socket. `tests/hostile/deaths.rs` kills tracers at random moments: each process went on.

mod advise;
mod error;
// Elsewhere only its types are of use.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod process;
mod slowdown;
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
pub use slowdown::{Held, Slowdown, StoppedAt};
pub use thread::StoppedThread;
pub use userfault::{SharedUserfault, TakenUserfault, UserfaultCopy, UserfaultOrigin, share_userfault, take_userfault};
