//! One thread of another process under ptrace(2): brought to rest, its registers lent for a system call and restored, released.
//!
//! A [`Tracee`] lives in the thread that attached it ([`crate::thread`]), because the kernel accepts requests only from that thread. A
//! stopped thread has two states. **At rest** is a ptrace-stop in the kernel's signal code (`PTRACE_EVENT_STOP`) with the thread's own
//! registers: however the stop ends, the kernel then restarts an interrupted system call and delivers signals as if there had been no
//! stop. **Lent** is the time from the first change of the registers until they are restored. [`Lent`] has the thread's own registers;
//! while it exists, every end of the `Tracee` restores them first.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::time::{Duration, Instant};

use libc::{c_int, c_long, user_regs_struct};

use crate::process::read_memory;
use crate::system::{self, Resume, Tid};
use crate::{AttachError, Process, StoppedAt};

/// How long each step may take: the thread's stop, the search for an instruction, one system call.
pub(crate) const LIMIT: Duration = Duration::from_secs(2);
/// How long a thread is stopped repeatedly, running in between, until it is in a system call of its own.
const PATIENCE: Duration = Duration::from_millis(30);
/// How long it runs after the first stop; twice as long each time.
const MIN_RUN: Duration = Duration::from_millis(1);
/// How long it runs between two stops at most.
const MAX_RUN: Duration = Duration::from_millis(8);
/// How long a process may take to die, or to become another program, once that has begun: until then the kernel refuses all requests.
const TRANSITION: Duration = Duration::from_millis(250);
/// How long a wait for a stop spins before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// The longest sleep between two polls for a stop.
const MAX_PAUSE: Duration = Duration::from_millis(1);
/// How many signals may intervene before the thread runs for a while.
const MAX_SIGNALS_IN_A_ROW: u32 = 8;

/// The machine code of `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The kernel-internal error for "run this call again unless a handler runs" (`include/linux/errno.h`).
const ERESTARTNOHAND: i64 = 514;
/// The kernel-internal errors of that kind, from `ERESTARTSYS` to `ERESTART_RESTARTBLOCK`.
const RESTARTS: std::ops::RangeInclusive<i64> = 512..=516;
/// Code segments of 64-bit programs: on hardware, and under Xen without it (`USER_CS`, `FLAT_USER_CS64`).
const LONG_MODE: [u64; 2] = [0x33, 0xe033];
/// The trap flag, by which a program steps through itself.
const TRAP_FLAG: u64 = 1 << 8;

/// A thread that this thread traces.
pub(crate) struct Tracee {
    process: Process,
    tid: Tid,
    /// The thread of this program that traces it.
    tracer: Tid,
    /// The thread's own registers, as of its last rest.
    own: user_regs_struct,
    /// `Some` while the thread's registers are not its own.
    lent: Option<Lent>,
    /// The thread is in a stop whose report was taken.
    stopped: bool,
    /// The process is stopped by job control (SIGSTOP), so its thread must not run code of its own.
    group_stopped: bool,
    /// Start of the time in which the thread is stopped or runs only our calls: the last moment when it was seen running.
    since: Option<Instant>,
    /// How long it was stopped before that.
    stopped_before: Duration,
    /// Until when a thread in user code may run on.
    patient_until: Instant,
    /// How long it runs before the next stop.
    run_time: Duration,
    /// A `syscall` instruction found in the mappings.
    found: Option<u64>,
}

/// Registers that must be restored.
struct Lent {
    own: user_regs_struct,
}

/// Why a thread stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// For our interrupt, or for job control.
    Event,
    /// Because this signal is about to be delivered.
    Signal(c_int),
    /// At the entry or the end of a system call.
    SystemCall,
    /// The thread did not stop before the deadline.
    TimedOut,
}

/// How a successful attempt to enter a system call ended.
enum Entry {
    Entered,
    /// A signal came first, and has been delivered.
    Signalled,
}

impl Tracee {
    /// Attaches to the process's main thread and brings it to rest.
    pub(crate) fn attach(process: &Process) -> Result<Tracee, AttachError> {
        let tid = process.pid();
        seize(process)?;
        let now = Instant::now();
        let mut tracee = Tracee {
            process: process.clone(),
            tid,
            tracer: system::this_thread(),
            own: blank(),
            lent: None,
            stopped: false,
            group_stopped: false,
            since: None,
            stopped_before: Duration::ZERO,
            patient_until: now + PATIENCE,
            run_time: MIN_RUN,
            found: None,
        };
        // The number means another process by now, which is not stopped, and detached by the end of this thread.
        if process.has_ended() {
            return Err(AttachError::Ended { pid: tid, during: "it was attached to" });
        }
        tracee.stop("its main thread was stopped", now + LIMIT)?;
        if LONG_MODE.contains(&tracee.own.cs) { Ok(tracee) } else { Err(AttachError::ThirtyTwoBit { pid: tid }) }
    }

    /// Runs a system call in the thread, which is at rest before and after, even if the call failed.
    pub(crate) fn system_call(&mut self, number: c_long, arguments: [u64; 6]) -> Result<u64, AttachError> {
        let call = name(number);
        if is_unsuitable(number) {
            return Err(AttachError::Unsuitable { call });
        }
        let deadline = Instant::now() + LIMIT;
        if !self.stopped {
            self.stop("its main thread was stopped again", deadline)?;
        }
        let mut signals = 0;
        let mut why = "it ran code of its own each time it was looked at";
        loop {
            if Instant::now() >= deadline {
                return Err(AttachError::Unsettled { pid: self.tid, limit: LIMIT, why });
            }
            let Some(instruction) = self.instruction()? else {
                if self.group_stopped {
                    let why = "it was stopped by a signal within a restartable sequence";
                    return Err(AttachError::Unsettled { pid: self.tid, limit: LIMIT, why });
                }
                self.run_a_little(deadline)?;
                continue;
            };
            self.lend(number, &arguments, instruction)?;
            match self.enter(&call, instruction, deadline)? {
                Entry::Entered => break,
                Entry::Signalled => {
                    why = "signals came in between each time";
                    signals += 1;
                    if signals % MAX_SIGNALS_IN_A_ROW == 0 && !self.group_stopped {
                        // Each signal may have put a frame on the stack, which its handler removes when it runs.
                        self.run_a_little(deadline)?;
                    }
                }
            }
        }
        let result = self.leave(&call)?;
        self.restore_registers()?;
        // An interrupted call continues only from the kernel's signal code.
        let rested = self.interrupt("stop it").and_then(|()| self.resume(Resume::Continue, 0));
        match rested.and_then(|()| self.settle("it was put back", Instant::now() + LIMIT)) {
            // Our call has run, and the next one may have to undo it, so this is no error: the next call waits for the thread again.
            Ok(()) | Err(AttachError::DoesNotStop { .. }) => {}
            Err(error) => return Err(error),
        }
        let errno = -(result as i64);
        match errno {
            1..=4095 => {
                let errno = if RESTARTS.contains(&errno) { libc::EINTR } else { errno as i32 };
                Err(AttachError::Refused { call, pid: self.tid, source: io::Error::from_raw_os_error(errno) })
            }
            _ => Ok(result),
        }
    }

    /// Detaches the thread, which runs on. Returns how long it was stopped in all.
    pub(crate) fn release(mut self) -> Result<Duration, AttachError> {
        self.undo()?;
        self.end_stopped_time();
        Ok(self.stopped_before)
    }

    /// Returns whether the thread's registers are lent, because it is inside a system call of ours that has not returned.
    pub(crate) fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Interrupts the running thread and brings it to rest.
    fn stop(&mut self, during: &'static str, deadline: Instant) -> Result<(), AttachError> {
        self.interrupt("stop it")?;
        self.settle(during, deadline)
    }

    /// Waits until an interrupted thread is at rest. Signals that come first are delivered: each may end the process, stop it, or bring
    /// the thread to the beginning of a handler.
    fn settle(&mut self, during: &'static str, deadline: Instant) -> Result<(), AttachError> {
        loop {
            match self.wait(during, deadline)? {
                Stop::Event => break,
                Stop::Signal(signal) => self.deliver(signal)?,
                Stop::SystemCall => self.resume(Resume::Continue, 0)?,
                Stop::TimedOut => return Err(self.does_not_stop()),
            }
        }
        self.own = registers_at_rest(self.tid).map_err(|error| self.lost(error, "read its registers"))?;
        Ok(())
    }

    /// Lets the thread at rest run for a moment, and brings it to rest again.
    fn run_a_little(&mut self, deadline: Instant) -> Result<(), AttachError> {
        self.resume(Resume::Continue, 0)?;
        self.end_stopped_time();
        std::thread::sleep(self.run_time);
        self.run_time = (self.run_time * 2).min(MAX_RUN);
        self.stop("its main thread was stopped again", deadline)
    }

    /// Ends a stop for a signal: the signal is delivered, and the thread comes to rest before it runs any code.
    fn deliver(&mut self, signal: c_int) -> Result<(), AttachError> {
        self.interrupt("stop it")?;
        self.resume(Resume::Continue, signal)
    }

    /// Returns the `syscall` instruction to execute, or `None` if the thread should run on a little first.
    ///
    /// A thread that was interrupted in a system call executes the instruction of that call again. If this program dies meanwhile, the
    /// thread continues after its own instruction, as if its call had returned the result of ours.
    fn instruction(&mut self) -> Result<Option<u64>, AttachError> {
        let pid = self.tid;
        let failed = |what| move |source| AttachError::Io { pid, what, source };
        // Opened each time: the open file belongs to the address space that the process has now.
        let memory = self.process.open_file("mem").map_err(|error| self.lost(error, "open its memory for reading"))?;
        let own = self.own.rip.wrapping_sub(SYSCALL.len() as u64);
        if self.own.orig_rax as i64 >= 0 && is_syscall(&memory, own) {
            return Ok(Some(own));
        }
        // Under job control the thread must not run.
        if !self.group_stopped && Instant::now() < self.patient_until {
            return Ok(None);
        }
        if self.is_in_restartable_sequence(&memory) {
            return Ok(None);
        }
        if self.found.is_none_or(|found| !is_syscall(&memory, found)) {
            let maps = self.process.open_file("maps").map_err(|error| self.lost(error, "read its mappings"))?;
            self.found = find_syscall(&memory, maps).map_err(failed("read its mappings"))?;
        }
        let Some(found) = self.found else {
            // If the thread has ended, and its mappings with it, this returns that error.
            self.registers()?;
            let why = "there is none in its vDSO and in the libraries that it has mapped".into();
            return Err(AttachError::NoInstruction { pid, why });
        };
        Ok(Some(found))
    }

    /// Returns whether the thread is in a critical section of rseq(2). The kernel aborts such a section if the thread is in it after a
    /// pause. With other registers the kernel would not notice that, and the section would continue as if it had not been interrupted.
    fn is_in_restartable_sequence(&self, memory: &File) -> bool {
        let word = |at: u64| {
            let mut bytes = [0; 8];
            read_memory(memory, at, &mut bytes).ok().map(|()| u64::from_ne_bytes(bytes))
        };
        // struct rseq has its pointer to struct rseq_cs at 8; that has start and length at 8 and 16 (include/uapi/linux/rseq.h).
        let section =
            system::rseq_area(self.tid).and_then(|area| word(area.wrapping_add(8))).filter(|&section| section != 0);
        let bounds =
            section.and_then(|section| Some((word(section.wrapping_add(8))?, word(section.wrapping_add(16))?)));
        bounds.is_some_and(|(start, length)| self.own.rip.wrapping_sub(start) < length)
    }

    /// Sets the thread's registers for a system call.
    fn lend(&mut self, number: c_long, arguments: &[u64; 6], instruction: u64) -> Result<(), AttachError> {
        self.suspend_seccomp()?;
        let own = self.own;
        let [rdi, rsi, rdx, r10, r8, r9] = *arguments;
        // With a call's number in orig_rax, the kernel would restart that call.
        let ours = user_regs_struct {
            rax: number as u64,
            orig_rax: u64::MAX,
            rip: instruction,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            eflags: own.eflags & !TRAP_FLAG,
            ..own
        };
        self.lent = Some(Lent { own });
        self.set_registers(&ours)
    }

    /// Restores the own registers of the thread, which is in a stop.
    fn restore_registers(&mut self) -> Result<(), AttachError> {
        if let Some(Lent { own }) = &self.lent {
            let own = *own;
            self.set_registers(&own)?;
            self.lent = None;
            let tid = self.tid;
            system::set_options(tid, system::MARK_SYSTEM_CALLS)
                .map_err(|error| self.lost(error, "resume its seccomp filter"))?;
        }
        Ok(())
    }

    /// Runs the thread with lent registers to the entry of the system call.
    fn enter(&mut self, call: &str, instruction: u64, deadline: Instant) -> Result<Entry, AttachError> {
        let during = "a system call was put in";
        loop {
            self.resume(Resume::UntilSystemCall, 0)?;
            match self.wait(during, deadline)? {
                Stop::SystemCall => return Ok(Entry::Entered),
                // A stop by job control: no instruction was executed.
                Stop::Event => {}
                Stop::Signal(signal) => {
                    let ours = self.is_fault_of_ours(signal, instruction)?;
                    self.restore_registers()?;
                    self.deliver(if ours { 0 } else { signal })?;
                    self.settle(during, Instant::now() + LIMIT)?;
                    if ours {
                        let why = format!("the one at {instruction:#x} raised signal {signal}");
                        return Err(AttachError::NoInstruction { pid: self.tid, why });
                    }
                    return Ok(Entry::Signalled);
                }
                Stop::TimedOut => {
                    // The thread does not run: its control group is frozen, or has no CPU time left.
                    self.interrupt("stop it")?;
                    return match self.wait(during, Instant::now() + LIMIT)? {
                        Stop::SystemCall => Ok(Entry::Entered),
                        Stop::TimedOut => {
                            Err(AttachError::Stuck { call: call.to_owned(), pid: self.tid, limit: 2 * LIMIT })
                        }
                        stop @ (Stop::Event | Stop::Signal(_)) => {
                            self.restore_registers()?;
                            if let Stop::Signal(signal) = stop {
                                self.deliver(signal)?;
                                self.settle(during, Instant::now() + LIMIT)?;
                            }
                            let why = "it is not run: its control group is frozen, or has no CPU time left";
                            Err(AttachError::Unsettled { pid: self.tid, limit: LIMIT, why })
                        }
                    };
                }
            }
        }
    }

    /// Runs the thread from the entry of the system call to its end. Returns the call's result.
    fn leave(&mut self, call: &str) -> Result<u64, AttachError> {
        let during = "a system call ran in it";
        self.resume(Resume::UntilSystemCall, 0)?;
        let mut stop = self.wait(during, Instant::now() + LIMIT)?;
        if stop == Stop::TimedOut {
            self.interrupt("stop it")?;
            stop = self.wait(during, Instant::now() + LIMIT)?;
        }
        match stop {
            Stop::TimedOut => Err(AttachError::Stuck { call: call.to_owned(), pid: self.tid, limit: 2 * LIMIT }),
            // The end of the call always comes first; even after another stop the call would be over.
            Stop::SystemCall | Stop::Event | Stop::Signal(_) => Ok(self.registers()?.rax),
        }
    }

    /// Returns whether a signal was raised by the instruction that we chose, and not by the process itself.
    fn is_fault_of_ours(&self, signal: c_int, instruction: u64) -> Result<bool, AttachError> {
        let fault = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS].contains(&signal);
        if !fault || !system::signal_is_a_fault(self.tid).map_err(|error| self.lost(error, "read its signal"))? {
            return Ok(false);
        }
        // At the instruction, or after it if the system call was sent back (prctl(2), PR_SET_SYSCALL_USER_DISPATCH).
        Ok(self.registers()?.rip.wrapping_sub(instruction) <= SYSCALL.len() as u64)
    }

    /// Suspends seccomp for our call. If the kernel does not permit that, a thread without seccomp does not need it.
    fn suspend_seccomp(&self) -> Result<(), AttachError> {
        match system::set_options(self.tid, system::MARK_SYSTEM_CALLS | system::SUSPEND_SECCOMP) {
            Ok(()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                Err(self.lost(error, "suspend its seccomp filter"))
            }
            Err(_) if self.has_no_seccomp() => Ok(()),
            Err(source) => Err(AttachError::Seccomp { pid: self.tid, source }),
        }
    }

    /// Returns whether the thread is known to be without seccomp.
    fn has_no_seccomp(&self) -> bool {
        match &*self.process.status("Seccomp") {
            "0" => true,
            // Kernels without seccomp have no such line.
            "" => !self.process.status("State").is_empty(),
            _ => false,
        }
    }

    /// Waits for the thread's next stop.
    fn wait(&mut self, during: &'static str, deadline: Instant) -> Result<Stop, AttachError> {
        let pid = self.tid;
        let asked = Instant::now();
        let mut seen_running = asked;
        let mut pause = SPIN;
        loop {
            let now = Instant::now();
            match system::take_stop(pid) {
                Ok(Some(status)) => {
                    self.stopped = true;
                    self.since.get_or_insert(seen_running);
                    let (signal, event) = (status & 0xff, status >> 8);
                    if event == libc::PTRACE_EVENT_STOP {
                        self.group_stopped = signal != libc::SIGTRAP;
                        return Ok(Stop::Event);
                    }
                    return Ok(if signal == libc::SIGTRAP | 0x80 { Stop::SystemCall } else { Stop::Signal(signal) });
                }
                Ok(None) => seen_running = now,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Err(self.gone(during)),
                Err(source) => return Err(AttachError::Io { pid, what: "wait for its stop", source }),
            }
            // Usually the thread stops within microseconds, and sooner on this CPU. Yielding for longer would cost whole time slices if
            // other programs want the CPU.
            if asked.elapsed() < SPIN {
                std::thread::yield_now();
                continue;
            }
            if self.process.has_ended() {
                return Err(AttachError::Ended { pid, during });
            }
            // If this program is the process's parent, waiting would not fail for an untraced thread that has taken the number.
            if pause == MAX_PAUSE && !self.is_ours() {
                return Err(self.gone(during));
            }
            if now >= deadline {
                return if self.process.main_thread_has_ended() { Err(self.gone(during)) } else { Ok(Stop::TimedOut) };
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    fn interrupt(&self, what: &'static str) -> Result<(), AttachError> {
        system::interrupt(self.tid).map_err(|error| self.lost(error, what))
    }

    fn resume(&mut self, how: Resume, signal: c_int) -> Result<(), AttachError> {
        self.stopped = false;
        system::resume(self.tid, how, signal).map_err(|error| self.lost(error, "run it on"))
    }

    fn registers(&self) -> Result<user_regs_struct, AttachError> {
        system::registers(self.tid).map_err(|error| self.lost(error, "read its registers"))
    }

    fn set_registers(&self, registers: &user_regs_struct) -> Result<(), AttachError> {
        system::set_registers(self.tid, registers).map_err(|error| self.lost(error, "set its registers"))
    }

    fn end_stopped_time(&mut self) {
        if let Some(since) = self.since.take() {
            self.stopped_before += since.elapsed();
        }
    }

    /// Returns the error that a failed request means. `ESRCH` for a thread in a stop means that it was killed.
    fn lost(&self, error: io::Error, what: &'static str) -> AttachError {
        // The files in `/proc` of an ended process do not exist, and those of an ending one return ESRCH.
        if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) {
            self.gone(what)
        } else {
            AttachError::Io { pid: self.tid, what, source: error }
        }
    }

    /// Returns why the thread has ended: its process ended, or executed another program, or only this thread ended. The cause becomes
    /// visible a little later than the end.
    fn gone(&self, during: &'static str) -> AttachError {
        let pid = self.tid;
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            if self.process.has_ended() {
                return AttachError::Ended { pid, during };
            }
            // A thread that executes a program takes the main thread's number, and is not traced. Neither is a main thread that has just
            // ended, so whether it has is looked at last.
            if !self.is_ours() && !self.process.main_thread_has_ended() && !self.process.has_ended() {
                return AttachError::Replaced { pid, during };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        AttachError::MainThreadEnded { pid }
    }

    /// Returns whether the thread of this number is the one that was attached to.
    fn is_ours(&self) -> bool {
        self.process.tracer() == self.tracer
    }

    fn does_not_stop(&self) -> AttachError {
        let place = self.process.read(&format!("task/{}/wchan", self.tid)).unwrap_or_default();
        let place = match String::from_utf8_lossy(&place).trim() {
            "" | "0" => String::new(),
            function => format!(", in {function}"),
        };
        AttachError::DoesNotStop { pid: self.tid, limit: LIMIT, state: self.process.status("State"), place }
    }

    /// Restores lent registers, however long that takes, and detaches.
    fn undo(&mut self) -> Result<(), AttachError> {
        let mut signal = 0;
        while self.lent.is_some() {
            if self.stopped {
                self.restore_registers()?;
                break;
            }
            // The thread is inside a call of ours that has not returned.
            self.interrupt("stop it")?;
            if let Stop::Signal(number) = self.wait("it was put back", Instant::now() + LIMIT)? {
                signal = number;
            }
        }
        if !self.stopped {
            // The thread runs with its own registers; the end of the tracing thread detaches it.
            return Ok(());
        }
        // Detaching wakes the thread as a signal does, so the kernel's signal code restarts an interrupted system call.
        self.resume(Resume::Detach, signal)
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        if self.lent.is_some()
            && let Err(error) = self.undo()
        {
            tracing::debug!(pid = self.tid, %error, "the thread's registers could not be restored");
        }
    }
}

/// Checks that this CPU is supported.
pub(crate) fn check_architecture() -> Result<(), AttachError> {
    Ok(())
}

/// Returns where a thread at rest was stopped; `None` if it runs 32-bit code.
pub(crate) fn at_rest(tid: Tid) -> io::Result<Option<StoppedAt>> {
    let registers = registers_at_rest(tid)?;
    let user_regs_struct { rdi, rsi, rdx, r10, r8, r9, .. } = registers;
    let number = registers.orig_rax as c_long;
    let system_call = (number >= 0).then_some((number, [rdi, rsi, rdx, r10, r8, r9]));
    Ok(LONG_MODE.contains(&registers.cs).then_some(StoppedAt { instruction: registers.rip, system_call }))
}

/// Returns the registers with which a thread at rest continues as if there had been no stop.
fn registers_at_rest(tid: Tid) -> io::Result<user_regs_struct> {
    let mut registers = system::registers(tid)?;
    if registers.rax as i64 == -i64::from(libc::EINTR) && waits_without_end(&registers) {
        // The kernel ended the call only for our stop, which the program does not expect without a handler. So the call is run again; if
        // a handler is about to run, the kernel turns this value into EINTR.
        registers.rax = (-ERESTARTNOHAND) as u64;
        system::set_registers(tid, &registers)?;
    }
    Ok(registers)
}

/// Attaches to the process's main thread, which runs on.
fn seize(process: &Process) -> Result<(), AttachError> {
    let pid = process.pid();
    let during = "it was attached to";
    let deadline = Instant::now() + TRANSITION;
    loop {
        let Err(error) = system::seize(pid, system::MARK_SYSTEM_CALLS) else { return Ok(()) };
        let code = error.raw_os_error();
        if process.has_ended() {
            return Err(AttachError::Ended { pid, during });
        }
        if !matches!(code, Some(libc::EPERM | libc::ESRCH)) {
            return Err(AttachError::Io { pid, what: "attach to it", source: error });
        }
        let tracer = process.tracer();
        if tracer != 0 {
            return Err(AttachError::already_traced(pid, tracer));
        }
        // A thread that has ended, or is about to become another one (execve(2)), may not be traced either, for an unknown time.
        if Instant::now() >= deadline {
            if process.main_thread_has_ended() {
                return Err(AttachError::MainThreadEnded { pid });
            }
            return Err(AttachError::NotPermitted { pid, reason: process.why_not_permitted() });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_syscall(memory: &File, at: u64) -> bool {
    let mut bytes = [0; SYSCALL.len()];
    read_memory(memory, at, &mut bytes).is_ok() && bytes == SYSCALL
}

/// Finds a `syscall` instruction in executable mappings that cannot be written: first in the vDSO, then in files.
fn find_syscall(memory: &File, maps: File) -> io::Result<Option<u64>> {
    let mut candidates = Vec::new();
    for line in BufReader::new(maps).lines() {
        let line = line?;
        let mut words = line.split_whitespace();
        let (Some(range), Some("r-xp"), Some(name)) = (words.next(), words.next(), words.nth(3)) else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else { continue };
        match name {
            "[vdso]" => candidates.insert(0, (start, end)),
            _ if name.starts_with('/') => candidates.push((start, end)),
            _ => {}
        }
    }
    // One extra byte: the instruction may cross the boundary of two pieces.
    const PIECE: usize = 64 << 10;
    let mut buffer = vec![0; PIECE + 1];
    for (start, end) in candidates {
        for at in (start..end).step_by(PIECE) {
            let length = (end - at).min(buffer.len() as u64) as usize;
            let piece = &mut buffer[..length];
            if read_memory(memory, at, piece).is_ok()
                && let Some(offset) = piece.windows(2).position(|pair| pair == SYSCALL)
            {
                return Ok(Some(at + offset as u64));
            }
        }
    }
    Ok(None)
}

/// Returns whether the registers are those of a call that the kernel ends with `EINTR` for a stop alone (signal(7), "Interruption of
/// system calls and library functions by stop signals"), that had no effect yet, and that waits without a limit: the program does not
/// notice if it is run again. A call with a time limit keeps its `EINTR`, because the remaining time is not known.
fn waits_without_end(registers: &user_regs_struct) -> bool {
    let no_limit = match registers.orig_rax as c_long {
        // Arguments in order: rdi, rsi, rdx, r10, r8, r9.
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => (registers.r10 as i32) < 0,
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => registers.r10 == 0,
        libc::SYS_rt_sigtimedwait => registers.rdx == 0,
        libc::SYS_io_getevents => registers.r8 == 0,
        // IORING_ENTER_EXT_ARG may bring a limit.
        libc::SYS_io_uring_enter => registers.r10 & 1 << 3 == 0,
        libc::SYS_semop => true,
        _ => false,
    };
    no_limit && registers.orig_rax as i64 >= 0
}

/// Returns whether a call does not return to the place where it was injected, or returns twice.
fn is_unsuitable(number: c_long) -> bool {
    let calls = [
        libc::SYS_clone,
        libc::SYS_clone3,
        libc::SYS_fork,
        libc::SYS_vfork,
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_rt_sigreturn,
        libc::SYS_restart_syscall,
    ];
    number < 0 || calls.contains(&number)
}

/// Returns a call's name, for error texts.
fn name(number: c_long) -> String {
    match number {
        libc::SYS_userfaultfd => "userfaultfd".into(),
        libc::SYS_ioctl => "ioctl".into(),
        libc::SYS_close => "close".into(),
        libc::SYS_madvise => "madvise".into(),
        libc::SYS_process_madvise => "process_madvise".into(),
        libc::SYS_mmap => "mmap".into(),
        libc::SYS_munmap => "munmap".into(),
        number => format!("system call {number}"),
    }
}

/// Returns all registers as 0.
fn blank() -> user_regs_struct {
    user_regs_struct {
        r15: 0,
        r14: 0,
        r13: 0,
        r12: 0,
        rbp: 0,
        rbx: 0,
        r11: 0,
        r10: 0,
        r9: 0,
        r8: 0,
        rax: 0,
        rcx: 0,
        rdx: 0,
        rsi: 0,
        rdi: 0,
        orig_rax: 0,
        rip: 0,
        cs: 0,
        eflags: 0,
        rsp: 0,
        ss: 0,
        fs_base: 0,
        gs_base: 0,
        ds: 0,
        es: 0,
        fs: 0,
        gs: 0,
    }
}
