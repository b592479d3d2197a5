//! The traced programs. Each prints `ready`, does its work until its standard input ends, checks it, and prints `result …`.
//! An error is printed, and the program ends with 3.

use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use libc::{c_int, c_long};
use sterna_attach::{AttachError, Process, UserfaultOrigin, take_userfault};

/// Plays a role, with its arguments.
pub(crate) fn play(words: &[String]) {
    let arguments: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
    // A role that hangs is ended, and its test with it.
    // SAFETY: takes a number.
    unsafe { libc::alarm(300) };
    match (words[0].as_str(), arguments.as_slice()) {
        ("memory", []) => memory(),
        ("timed", [kind, milliseconds]) => timed(kind, milliseconds.parse().unwrap()),
        ("endless", [kind]) => endless(kind),
        ("confined", [how]) => confined(how),
        ("busy", []) => busy(false),
        ("dispatched", []) => busy(true),
        ("sequence", []) => sequence(),
        ("storm", [count]) => storm(count.parse().unwrap()),
        ("masked", []) => masked(),
        ("threads", []) => threads(),
        ("vfork", []) => vfork(),
        ("tracer", [pid]) => tracer(pid.parse().unwrap()),
        ("seccomp", [action]) => seccomp(action),
        ("exec", [by]) => exec(by),
        ("execs", [left, by]) => execs(left.parse().unwrap(), by),
        ("main-thread-ended", []) => main_thread_ended(),
        ("full", []) => full(),
        ("workers", [count]) => workers(count.parse().unwrap()),
        ("slower", [pid, threads @ ..]) => slower(pid, threads),
        ("kvm", []) => kvm(),
        ("attacher", [how, pid]) => attacher(how, pid.parse().unwrap()),
        (role, _) => panic!("no role {role}: {arguments:?}"),
    }
}

/// Sends a signal.
pub(crate) fn kill(pid: i32, signal: c_int) {
    // SAFETY: kill takes numbers.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    out.write_all(format!("{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Makes a system call without a library that might run it again.
fn system_call(number: c_long, arguments: [usize; 6]) -> (i64, i32) {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the callers pass what the call asks for.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    (result, if result < 0 { std::io::Error::last_os_error().raw_os_error().unwrap() } else { 0 })
}

fn wait_for_line() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line
}

/// Returns the address of a value that the kernel reads.
fn address<T>(of: &T) -> usize {
    std::ptr::from_ref(of).expose_provenance()
}

/// Returns the address of a value that the kernel writes.
fn place<T>(of: &mut T) -> usize {
    std::ptr::from_mut(of).expose_provenance()
}

/// One call with a time limit, which expires; then waits for a line. The result: its return value, its errno, its duration in milliseconds.
fn timed(kind: &str, milliseconds: u64) {
    let mut time =
        libc::timespec { tv_sec: (milliseconds / 1000) as i64, tv_nsec: (milliseconds % 1000 * 1_000_000) as i64 };
    let mut pipe = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let mut poll = libc::pollfd { fd: pipe[0], events: libc::POLLIN, revents: 0 };
    let word = AtomicU32::new(1);
    let time_at = place(&mut time);
    say("ready");
    let started = Instant::now();
    let (result, errno) = match kind {
        "poll" => system_call(libc::SYS_poll, [place(&mut poll), 1, milliseconds as usize, 0, 0, 0]),
        "ppoll" => system_call(libc::SYS_ppoll, [place(&mut poll), 1, time_at, 0, 0, 0]),
        "pselect" => system_call(libc::SYS_pselect6, [0, 0, 0, 0, time_at, 0]),
        "nanosleep" => system_call(libc::SYS_nanosleep, [time_at, 0, 0, 0, 0, 0]),
        "clock_nanosleep" => {
            system_call(libc::SYS_clock_nanosleep, [libc::CLOCK_MONOTONIC as usize, 0, time_at, 0, 0, 0])
        }
        "futex" => system_call(libc::SYS_futex, [address(&word), libc::FUTEX_WAIT as usize, 1, time_at, 0, 0]),
        "epoll_wait" => {
            let mut event = [0_u8; 16];
            // SAFETY: takes a number.
            let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) } as usize;
            system_call(libc::SYS_epoll_wait, [epoll, place(&mut event), 1, milliseconds as usize, 0, 0])
        }
        _ => panic!("{kind}"),
    };
    let took = started.elapsed().as_millis();
    wait_for_line();
    say(&format!("result {result} {errno} {took}"));
}

static HANDLED: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
static SUMS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// Counts a real-time signal, and sums up its values.
extern "C" fn count(signal: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let which = (signal - libc::SIGRTMIN()) as usize;
    HANDLED[which].fetch_add(1, Ordering::SeqCst);
    // SAFETY: the kernel hands a handler with SA_SIGINFO a siginfo_t.
    let value = unsafe { (*info).si_value() };
    SUMS[which].fetch_add(value.sival_ptr as u64, Ordering::SeqCst);
}

fn handle(signal: c_int, flags: c_int) {
    // SAFETY: the handler has the form that SA_SIGINFO wants and does nothing but count.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | flags;
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// The set of one signal, as the kernel has it.
fn set_of(signal: c_int) -> u64 {
    1 << (signal - 1)
}

fn set_mask(set: u64) {
    let result = system_call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as usize, address(&set), 0, 8, 0, 0]);
    assert_eq!(result, (0, 0));
}

fn mask() -> u64 {
    let mut set = 0_u64;
    assert_eq!(
        system_call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as usize, 0, place(&mut set), 8, 0, 0]),
        (0, 0)
    );
    set
}

/// One call without a time limit, which ends when a line comes. The result: its return value, and its errno.
fn endless(kind: &str) {
    let pid = std::process::id() as i32;
    let word: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(1)));
    let signal = libc::SIGRTMIN();
    let semaphore = if kind == "semop" {
        // SAFETY: takes numbers.
        unsafe { libc::semget(libc::IPC_PRIVATE, 1, 0o600) }
    } else {
        -1
    };
    match kind {
        "sigtimedwait" => set_mask(set_of(signal)),
        "sigsuspend" => {
            set_mask(set_of(signal));
            handle(signal, libc::SA_RESTART);
        }
        _ => {}
    }
    // Ends the call, if the line itself does not.
    let own = kind.to_owned();
    let waker = std::thread::spawn(move || match own.as_str() {
        "futex" => {
            wait_for_line();
            word.store(0, Ordering::SeqCst);
            system_call(libc::SYS_futex, [address(word), libc::FUTEX_WAKE as usize, 1, 0, 0, 0]);
        }
        "semop" => {
            wait_for_line();
            let up = libc::sembuf { sem_num: 0, sem_op: 1, sem_flg: 0 };
            assert_eq!(system_call(libc::SYS_semop, [semaphore as usize, address(&up), 1, 0, 0, 0]), (0, 0));
        }
        "sigtimedwait" | "sigsuspend" => {
            set_mask(set_of(signal));
            wait_for_line();
            kill(pid, signal);
        }
        _ => {}
    });
    let mut poll = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    let mut readable = 1_u64;
    let mut buffer = [0_u8; 16];
    let set = set_of(signal);
    let nothing = 0_u64;
    // SAFETY: takes numbers; the event is ours.
    let epoll = unsafe {
        let epoll = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
        assert_eq!(libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, 0, &raw mut event), 0);
        epoll as usize
    };
    let down = libc::sembuf { sem_num: 0, sem_op: -1, sem_flg: 0 };
    say("ready");
    let (result, errno) = match kind {
        "read" => system_call(libc::SYS_read, [0, place(&mut buffer), 16, 0, 0, 0]),
        "poll" => system_call(libc::SYS_poll, [place(&mut poll), 1, usize::MAX, 0, 0, 0]),
        "ppoll" => system_call(libc::SYS_ppoll, [place(&mut poll), 1, 0, 0, 0, 0]),
        "select" => system_call(libc::SYS_select, [1, place(&mut readable), 0, 0, 0, 0]),
        "epoll_wait" => system_call(libc::SYS_epoll_wait, [epoll, place(&mut buffer), 1, usize::MAX, 0, 0]),
        "epoll_pwait" => {
            system_call(libc::SYS_epoll_pwait, [epoll, place(&mut buffer), 1, usize::MAX, address(&nothing), 8])
        }
        "epoll_pwait2" => system_call(libc::SYS_epoll_pwait2, [epoll, place(&mut buffer), 1, 0, 0, 0]),
        "futex" => system_call(libc::SYS_futex, [address(word), libc::FUTEX_WAIT as usize, 1, 0, 0, 0]),
        "semop" => system_call(libc::SYS_semop, [semaphore as usize, address(&down), 1, 0, 0, 0]),
        "sigtimedwait" => system_call(libc::SYS_rt_sigtimedwait, [address(&set), 0, 0, 8, 0, 0]),
        "sigsuspend" => system_call(libc::SYS_rt_sigsuspend, [address(&nothing), 8, 0, 0, 0, 0]),
        _ => panic!("{kind}"),
    };
    if kind == "read" {
        assert_eq!(&buffer[..3], b"go\n");
    }
    if kind == "sigsuspend" {
        assert_eq!(HANDLED[0].load(Ordering::SeqCst), 1);
        assert_eq!(mask(), set_of(signal));
    }
    waker.join().unwrap();
    if semaphore >= 0 {
        system_call(libc::SYS_semctl, [semaphore as usize, 0, libc::IPC_RMID as usize, 0, 0, 0]);
    }
    say(&format!("result {result} {errno}"));
}

/// Waits as a process that has given up its rights.
fn confined(how: &str) {
    // SAFETY: all take numbers.
    let given_up = unsafe {
        match how {
            "nobody" => libc::setresgid(65534, 65534, 65534) == 0 && libc::setresuid(65534, 65534, 65534) == 0,
            "namespace" => libc::unshare(libc::CLONE_NEWUSER) == 0,
            "undumpable" => libc::prctl(libc::PR_SET_DUMPABLE, 0) == 0,
            _ => panic!("{how}"),
        }
    };
    assert_eq!(system_call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0, 0]), (0, 0));
    if given_up {
        return endless("read");
    }
    say("ready not permitted");
    wait_for_line();
    say("result 3 0");
}

static STOP: AtomicBool = AtomicBool::new(false);

/// User code that has a known value in each register, in the red zone and far below the stack, and checks them all the time.
/// `dispatched`: its system calls are sent back to it as signals (prctl(2)).
fn busy(dispatched: bool) {
    static SELECTOR: AtomicBool = AtomicBool::new(false);
    if dispatched {
        const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
        let arguments = [PR_SET_SYSCALL_USER_DISPATCH, 1, 0, 0, address(&SELECTOR), 0];
        assert_eq!(system_call(libc::SYS_prctl, arguments), (0, 0));
    }
    let waker = std::thread::spawn(move || {
        while SELECTOR.load(Ordering::SeqCst) != dispatched {
            std::thread::yield_now();
        }
        say("ready");
        wait_for_line();
        SELECTOR.store(false, Ordering::SeqCst);
        STOP.store(true, Ordering::SeqCst);
    });
    SELECTOR.store(dispatched, Ordering::SeqCst);
    let wrong: u64;
    let rounds: u64;
    // SAFETY: changes the registers that it names, rbx and rbp, which it puts back, and memory below the stack, which nothing uses:
    // this program has no handlers. It reads STOP, whose address it is given.
    unsafe {
        std::arch::asm!(
            "push rbx",
            "push rbp",
            "mov rbx, 0x11110003",
            "mov rbp, 0x11110005",
            "mov rcx, 0x11110001",
            "mov rsi, 0x11110006",
            "mov r8, 0x11110008",
            "mov r9, 0x11110009",
            "mov r10, 0x1111000a",
            "mov r11, 0x1111000b",
            "mov r12, 0x1111000c",
            "mov r13, 0x1111000d",
            "mov r14, 0x1111000e",
            "mov r15, 0x1111000f",
            "movq xmm0, r8",
            "movq xmm7, r9",
            "movq xmm15, r15",
            "mov [rsp - 8], r8",
            "mov [rsp - 128], r9",
            "mov [rsp - 136], r10",
            "mov [rsp - 1024], r11",
            "mov [rsp - 4096], r12",
            "xor eax, eax",
            "2:",
            "inc rax",
            "cmp rbx, 0x11110003",
            "jne 3f",
            "cmp rbp, 0x11110005",
            "jne 3f",
            "cmp rcx, 0x11110001",
            "jne 3f",
            "cmp rsi, 0x11110006",
            "jne 3f",
            "cmp r8, 0x11110008",
            "jne 3f",
            "cmp r9, 0x11110009",
            "jne 3f",
            "cmp r10, 0x1111000a",
            "jne 3f",
            "cmp r11, 0x1111000b",
            "jne 3f",
            "cmp r12, 0x1111000c",
            "jne 3f",
            "cmp r13, 0x1111000d",
            "jne 3f",
            "cmp r14, 0x1111000e",
            "jne 3f",
            "cmp r15, 0x1111000f",
            "jne 3f",
            "movq rdx, xmm0",
            "cmp rdx, r8",
            "jne 3f",
            "movq rdx, xmm7",
            "cmp rdx, r9",
            "jne 3f",
            "movq rdx, xmm15",
            "cmp rdx, r15",
            "jne 3f",
            "cmp [rsp - 8], r8",
            "jne 3f",
            "cmp [rsp - 128], r9",
            "jne 3f",
            "cmp [rsp - 136], r10",
            "jne 3f",
            "cmp [rsp - 1024], r11",
            "jne 3f",
            "cmp [rsp - 4096], r12",
            "jne 3f",
            "cmp byte ptr [rdi], 0",
            "je 2b",
            "xor edx, edx",
            "jmp 4f",
            "3:",
            "mov edx, 1",
            "4:",
            "pop rbp",
            "pop rbx",
            in("rdi") address(&STOP),
            out("rax") rounds, out("rdx") wrong, out("rcx") _, out("rsi") _,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _, out("r12") _, out("r13") _, out("r14") _, out("r15") _,
            out("xmm0") _, out("xmm7") _, out("xmm15") _,
        );
    }
    SELECTOR.store(false, Ordering::SeqCst);
    waker.join().unwrap();
    assert!(rounds > 0);
    say(&format!("result {wrong}"));
}

/// User code that is in a restartable sequence (rseq(2)) half of the time, and checks that the sequence is still registered: the kernel must
/// not have forgotten it while the thread is in it. The result: whether it had, and how often the kernel aborted it.
fn sequence() {
    // SAFETY: names that end with zero.
    let (offset, size) = unsafe {
        let symbol = |name: &std::ffi::CStr| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        (symbol(c"__rseq_offset").cast::<isize>(), symbol(c"__rseq_size").cast::<u32>())
    };
    // SAFETY: variables of the C library, where it has them.
    if offset.is_null() || size.is_null() || unsafe { *size } == 0 {
        say("ready none");
        wait_for_line();
        return say("result 0 0");
    }
    let waker = std::thread::spawn(|| {
        say("ready");
        wait_for_line();
        STOP.store(true, Ordering::SeqCst);
    });
    let (lost, aborts): (u64, u64);
    // SAFETY: changes the registers that it names and this thread's pointer to its sequence, which is none in the end. It reads STOP.
    unsafe {
        std::arch::asm!(
            ".pushsection .data.sequence, \"aw\"",
            ".balign 32",
            "29:",
            ".long 0, 0",
            ".quad 22f, 25f - 22f, 28f",
            ".popsection",
            "xor eax, eax",
            "mov r8, fs:[0]",
            "add r8, rsi",
            "lea r9, [rip + 29b]",
            "2:",
            "mov ecx, 300000",
            "21:",
            "dec ecx",
            "jnz 21b",
            "mov ecx, 300000",
            "mov [r8 + 8], r9",
            "22:",
            "cmp [r8 + 8], r9",
            "jne 26f",
            "dec ecx",
            "jnz 22b",
            "25:",
            "mov qword ptr [r8 + 8], 0",
            "cmp byte ptr [rdi], 0",
            "je 2b",
            "xor edx, edx",
            "jmp 27f",
            "26:",
            "mov edx, 1",
            "mov qword ptr [r8 + 8], 0",
            "jmp 27f",
            // The signature that glibc registers (RSEQ_SIG).
            ".long 0x53053053",
            "28:",
            "inc rax",
            "jmp 2b",
            "27:",
            in("rdi") address(&STOP), in("rsi") *offset,
            out("rax") aborts, out("rdx") lost, out("rcx") _, out("r8") _, out("r9") _,
        );
    }
    waker.join().unwrap();
    say(&format!("result {lost} {aborts}"));
}

/// A main thread that does all kinds of work in turn while another thread sends it `count` real-time signals with values; the test may
/// send more. The result: for each signal how many came, and the sum of their values.
fn storm(count: u64) {
    for which in 0..6 {
        handle(libc::SIGRTMIN() + which, if which % 2 == 0 { libc::SA_RESTART } else { 0 });
    }
    let pid = std::process::id() as i32;
    let mut pipe = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    say("ready");
    let sender = std::thread::spawn(move || {
        // Handlers run in the main thread.
        set_mask(!0);
        for number in 0..count {
            let which = (number % 5) as i32;
            let info = [
                libc::SIGRTMIN() as u64 + which as u64,
                u64::from(libc::SI_QUEUE as u32),
                0,
                number,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
            ];
            let signal = (libc::SIGRTMIN() + which) as usize;
            loop {
                match system_call(
                    libc::SYS_rt_tgsigqueueinfo,
                    [pid as usize, pid as usize, signal, address(&info), 0, 0],
                ) {
                    (0, 0) => break,
                    (_, libc::EAGAIN) => std::thread::yield_now(),
                    other => panic!("{other:?}"),
                }
            }
        }
        wait_for_line();
        STOP.store(true, Ordering::SeqCst);
    });
    let short = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    let mut poll = libc::pollfd { fd: pipe[0], events: libc::POLLIN, revents: 0 };
    let mut written = 0_u64;
    let mut sum = 0_u64;
    let retry = |call: &mut dyn FnMut() -> (i64, i32)| loop {
        match call() {
            (_, libc::EINTR) => {}
            other => break other,
        }
    };
    while !STOP.load(Ordering::SeqCst) {
        let number = written;
        assert_eq!(
            retry(&mut || system_call(libc::SYS_write, [pipe[1] as usize, address(&number), 8, 0, 0, 0])),
            (8, 0)
        );
        let (result, errno) = system_call(libc::SYS_ppoll, [place(&mut poll), 1, 0, 0, 0, 0]);
        assert!((result, errno) == (1, 0) || errno == libc::EINTR, "ppoll {result} {errno}");
        let mut got = u64::MAX;
        assert_eq!(retry(&mut || system_call(libc::SYS_read, [pipe[0] as usize, place(&mut got), 8, 0, 0, 0])), (8, 0));
        assert_eq!(got, written);
        let (result, errno) = system_call(libc::SYS_nanosleep, [address(&short), 0, 0, 0, 0, 0]);
        assert!((result, errno) == (0, 0) || errno == libc::EINTR, "nanosleep {result} {errno}");
        for value in 0..2000_u64 {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(value ^ written));
        }
        written += 1;
    }
    let mut again = 0_u64;
    for round in 0..written {
        for value in 0..2000_u64 {
            again = again.wrapping_mul(31).wrapping_add(value ^ round);
        }
    }
    assert_eq!(sum, again);
    sender.join().unwrap();
    let counts: Vec<String> = HANDLED
        .iter()
        .zip(&SUMS)
        .take(6)
        .map(|(count, sum)| format!("{}:{}", count.load(Ordering::SeqCst), sum.load(Ordering::SeqCst)))
        .collect();
    say(&format!("result {}", counts.join(" ")));
}

/// `ppoll` unblocks a signal that is blocked otherwise, and ends for nothing else. The result: its return value, its errno, how often the
/// handler ran, whether the signal is blocked afterwards.
fn masked() {
    let signal = libc::SIGRTMIN();
    handle(signal, libc::SA_RESTART);
    set_mask(set_of(signal));
    let nothing = 0_u64;
    say("ready");
    let (result, errno) = system_call(libc::SYS_ppoll, [0, 0, 0, address(&nothing), 8, 0]);
    wait_for_line();
    say(&format!("result {result} {errno} {} {}", HANDLED[0].load(Ordering::SeqCst), mask() == set_of(signal)));
}

/// Threads that come and go, each with a sum to work out.
fn threads() {
    say("ready");
    let waker = std::thread::spawn(|| {
        wait_for_line();
        STOP.store(true, Ordering::SeqCst);
    });
    let sum =
        |from: u64| (from..from + 5000).fold(0_u64, |sum, value| std::hint::black_box(sum.wrapping_mul(33) ^ value));
    let mut made = 0_u64;
    while !STOP.load(Ordering::SeqCst) || made < 100 {
        let running: Vec<_> = (0..4).map(|of| std::thread::spawn(move || sum(made + of))).collect();
        for (of, thread) in running.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), sum(made + of as u64));
        }
        made += 4;
    }
    waker.join().unwrap();
    say(&format!("result {made}"));
}

/// A child that shares the memory holds the main thread in the kernel until a line comes.
fn vfork() {
    extern "C" fn child(_: *mut libc::c_void) -> c_int {
        let mut byte = 0_u8;
        system_call(libc::SYS_read, [0, place(&mut byte), 1, 0, 0, 0]);
        7
    }
    let mut stack = vec![0_u8; 64 << 10];
    say("ready");
    let mut status = 0;
    // SAFETY: the child has a stack of its own and ends before this thread runs on.
    let ended = unsafe {
        let top = stack.as_mut_ptr().add(stack.len() & !15);
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let pid = libc::clone(child, top.cast(), flags, std::ptr::null_mut());
        assert!(pid > 0);
        libc::waitpid(pid, &raw mut status, 0) == pid
    };
    say(&format!("result {ended} {}", libc::WEXITSTATUS(status)));
}

/// Traces a process until a line comes.
fn tracer(pid: i32) {
    // Another tracer may be attached for a moment.
    while system_call(libc::SYS_ptrace, [libc::PTRACE_SEIZE as usize, pid as usize, 0, 0, 0, 0]) != (0, 0) {
        std::thread::yield_now();
    }
    say("ready");
    wait_for_line();
    say("result done");
}

/// A process under seccomp, for which `userfaultfd` and `close` end badly.
fn seccomp(action: &str) {
    say("ready");
    let mut byte = [0_u8; 4];
    if action == "strict" {
        assert_eq!(system_call(libc::SYS_prctl, [libc::PR_SET_SECCOMP as usize, 1, 0, 0, 0, 0]), (0, 0));
        system_call(libc::SYS_write, [1, "armed\n".as_ptr() as usize, 6, 0, 0, 0]);
        // Only read, write and exit are left.
        system_call(libc::SYS_read, [0, place(&mut byte), 1, 0, 0, 0]);
        system_call(libc::SYS_write, [1, "result alive\n".as_ptr() as usize, 13, 0, 0, 0]);
        system_call(libc::SYS_exit, [0; 6]);
    }
    let action = match action {
        "errno" => libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        "trap" => libc::SECCOMP_RET_TRAP,
        "kill-thread" => libc::SECCOMP_RET_KILL_THREAD,
        "kill-process" => libc::SECCOMP_RET_KILL_PROCESS,
        _ => panic!("{action}"),
    };
    filter(&[libc::SYS_userfaultfd, libc::SYS_close], action);
    say("armed");
    system_call(libc::SYS_read, [0, place(&mut byte), 1, 0, 0, 0]);
    say("result alive");
    system_call(libc::SYS_exit_group, [0; 6]);
}

/// Makes a system call fail in this program.
fn refuse_here(call: c_long, errno: i32) {
    filter(&[call], libc::SECCOMP_RET_ERRNO | errno as u32);
}

/// Puts this thread, and those that it starts, under a seccomp filter that does `action` for some calls.
fn filter(calls: &[c_long], action: u32) {
    let statement = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = vec![statement(LOAD, 0, 0, 0)];
    for &call in calls {
        program.push(statement(EQUAL, call as u32, 0, 1));
        program.push(statement(RETURN, action, 0, 0));
    }
    program.push(statement(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0));
    let mut filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    assert_eq!(system_call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0, 0]), (0, 0));
    assert_eq!(system_call(libc::SYS_seccomp, [1, 0, place(&mut filter), 0, 0, 0]), (0, 0));
}

/// Threads that compute in user code until they must end, and check their results.
fn workers(count: usize) {
    static WORKERS: [(AtomicU64, AtomicI32, AtomicBool); 8] =
        [const { (AtomicU64::new(0), AtomicI32::new(0), AtomicBool::new(false)) }; 8];
    let sum = || (0..5000_u64).fold(0_u64, |sum, value| std::hint::black_box(sum.wrapping_mul(33) ^ value));
    let right = sum();
    let work = move |(rounds, tid, ends): &'static (AtomicU64, AtomicI32, AtomicBool)| {
        tid.store(system_call(libc::SYS_gettid, [0; 6]).0 as i32, Ordering::SeqCst);
        while !ends.load(Ordering::Relaxed) {
            assert_eq!(sum(), right);
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    };
    let mut running: Vec<_> =
        WORKERS.iter().take(count).map(|worker| Some(std::thread::spawn(move || work(worker)))).collect();
    let words = |of: &dyn Fn(&(AtomicU64, AtomicI32, AtomicBool)) -> String| {
        WORKERS.iter().take(count).map(of).collect::<Vec<_>>().join(" ")
    };
    while WORKERS.iter().take(count).any(|(_, tid, _)| tid.load(Ordering::SeqCst) == 0) {
        std::thread::yield_now();
    }
    say(&format!("ready {}", words(&|(_, tid, _)| tid.load(Ordering::SeqCst).to_string())));
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["count"] => say(&words(&|(rounds, ..)| rounds.load(Ordering::SeqCst).to_string())),
            ["end", which] => {
                let which: usize = which.parse().unwrap();
                WORKERS[which].2.store(true, Ordering::SeqCst);
                running[which].take().unwrap().join().unwrap();
                say("ended");
            }
            _ => panic!("{line}"),
        }
    }
    WORKERS.iter().for_each(|(.., ends)| ends.store(true, Ordering::SeqCst));
    running.into_iter().flatten().for_each(|thread| thread.join().unwrap());
    say("result right");
}

/// Slows threads of a process down until it is killed.
fn slower(pid: &str, threads: &[&str]) {
    let threads: Vec<i32> = threads.iter().map(|tid| tid.parse().unwrap()).collect();
    let slowdown = Process::open(pid.parse().unwrap()).unwrap().slow_down(&threads, 90, |_| true).unwrap();
    say("ready");
    wait_for_line();
    drop(slowdown);
}

/// A virtual machine of KVM whose one vCPU counts in its memory. Prints which thread runs the vCPU, and its count.
fn kvm() {
    const MEMORY: usize = 4 * 4096;
    const COUNTER: usize = 0x2000;
    /// 16-bit code at 0x1000: `inc dword [0x2000]`, and back.
    const CODE: [u8; 7] = [0x66, 0xff, 0x06, 0x00, 0x20, 0xeb, 0xf9];
    let ioctl = |descriptor: i64, request: usize, argument: usize| {
        let (result, errno) = system_call(libc::SYS_ioctl, [descriptor as usize, request, argument, 0, 0, 0]);
        if result < 0 { Err(errno) } else { Ok(result) }
    };
    // Requests by include/uapi/linux/kvm.h.
    let make = || -> Result<(i64, *mut u8), i32> {
        // SAFETY: a name that ends with zero.
        let kvm = i64::from(unsafe { libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) });
        let machine = ioctl(kvm, 0xAE01, 0)?;
        // SAFETY: a new mapping, whose address the kernel chooses.
        let memory = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), MEMORY, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let memory = memory.cast::<u8>();
        // SAFETY: within the mapping, which nothing else uses yet.
        unsafe { std::ptr::copy_nonoverlapping(CODE.as_ptr(), memory.add(0x1000), CODE.len()) };
        // Slot and flags, then where it is in the guest, its length and where it is here.
        let region = [0_u64, 0, MEMORY as u64, memory as u64];
        ioctl(machine, 0x4020_AE46, address(&region))?;
        let vcpu = ioctl(machine, 0xAE41, 0)?;
        // Before all others the code segment: its base first, its selector at 12.
        let mut segments = [0_u8; 312];
        ioctl(vcpu, 0x8138_AE83, place(&mut segments))?;
        segments[..8].fill(0);
        segments[12..14].fill(0);
        ioctl(vcpu, 0x4138_AE84, address(&segments))?;
        let mut registers = [0_u64; 18];
        (registers[16], registers[17]) = (0x1000, 2);
        ioctl(vcpu, 0x4090_AE82, address(&registers))?;
        Ok((vcpu, memory))
    };
    let (vcpu, memory) = match make() {
        Ok(made) => made,
        Err(errno) => {
            say(&format!("ready none: errno {errno}"));
            wait_for_line();
            return say("result none");
        }
    };
    std::thread::spawn(move || {
        say(&format!("ready {}", system_call(libc::SYS_gettid, [0; 6]).0));
        loop {
            let ended = ioctl(vcpu, 0xAE80, 0);
            assert_eq!(ended, Err(libc::EINTR), "the guest has stopped");
        }
    });
    for line in std::io::stdin().lock().lines() {
        assert_eq!(line.unwrap(), "count");
        // SAFETY: within the mapping, and aligned; the guest writes it, which a volatile read expects.
        let count = unsafe { memory.add(COUNTER).cast::<u32>().read_volatile() };
        say(&count.to_string());
    }
    say("result counted");
    system_call(libc::SYS_exit_group, [0; 6]);
}

/// Executes itself in another role when a line comes, from its main thread or from another one.
fn exec(by: &str) {
    fn when_told() {
        wait_for_line();
        panic!("{}", std::process::Command::new("/proc/self/exe").args(["--role", "endless", "read"]).exec());
    }
    say("ready");
    if by == "main" {
        return when_told();
    }
    std::thread::spawn(when_told);
    loop {
        system_call(libc::SYS_pause, [0; 6]);
    }
}

/// Executes itself `left` more times, from its main thread or from another one.
fn execs(left: u32, by: &str) {
    if left == 300 {
        say("ready");
    }
    if left == 0 {
        return say("result done");
    }
    let mut command = std::process::Command::new("/proc/self/exe");
    command.args(["--role", "execs", &(left - 1).to_string(), by]);
    if by == "main" {
        panic!("{}", command.exec());
    }
    std::thread::spawn(move || {
        // A little work, of a length that differs.
        let work =
            (0..(u64::from(left) * 7919) % 3_000_000).fold(0, |sum: u64, value| std::hint::black_box(sum ^ value));
        std::hint::black_box(work);
        panic!("{}", command.exec());
    });
    loop {
        system_call(libc::SYS_pause, [0; 6]);
    }
}

/// The main thread ends, another one runs on.
fn main_thread_ended() {
    std::thread::spawn(|| {
        say("ready");
        wait_for_line();
        say("result done");
        system_call(libc::SYS_exit_group, [0; 6]);
    });
    // Of the process, only this thread.
    system_call(libc::SYS_exit, [0; 6]);
}

/// A process that may open no further descriptor.
fn full() {
    // SAFETY: takes a number.
    let next = unsafe { libc::dup(0) };
    // SAFETY: takes a number.
    unsafe { libc::close(next) };
    limit_descriptors(next as u64);
    say("ready");
    wait_for_line();
    say("result done");
}

fn limit_descriptors(number: u64) {
    let limit = libc::rlimit { rlim_cur: number, rlim_max: number };
    // SAFETY: reads the structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// Attaches to a process: without the right to, or repeatedly.
fn attacher(how: &str, pid: i32) {
    static DONE: AtomicI32 = AtomicI32::new(0);
    let process = Process::open(pid).unwrap();
    match how {
        "as-nobody" => {
            // SAFETY: takes numbers.
            assert_eq!(unsafe { libc::setresuid(65534, 65534, 65534) }, 0);
        }
        "without-admin" => {
            // Version 3 of the header, this thread; then effective, permitted and inheritable, low words before high ones.
            let mut header = [0x2008_0522_u32, 0];
            let mut sets = [0_u32; 6];
            assert_eq!(system_call(libc::SYS_capget, [place(&mut header), place(&mut sets), 0, 0, 0, 0]), (0, 0));
            const CAP_SYS_ADMIN: u32 = 21;
            sets[0] &= !(1 << CAP_SYS_ADMIN);
            sets[1] &= !(1 << CAP_SYS_ADMIN);
            assert_eq!(system_call(libc::SYS_capset, [place(&mut header), address(&sets), 0, 0, 0, 0]), (0, 0));
        }
        // As on a kernel before 5.6.
        "without-getfd" => refuse_here(libc::SYS_pidfd_getfd, libc::ENOSYS),
        "without-room" => refuse_here(libc::SYS_pidfd_getfd, libc::EMFILE),
        "loop" => {
            say("ready");
            loop {
                take_userfault(&process, UserfaultOrigin::SystemCall).unwrap();
                DONE.fetch_add(1, Ordering::Relaxed);
            }
        }
        _ => panic!("{how}"),
    }
    say("ready");
    let kind = |error: &AttachError| format!("{error:?}").split([' ', '(']).next().unwrap().to_owned();
    let result = match take_userfault(&process, UserfaultOrigin::SystemCall) {
        Ok(_) => "taken".into(),
        Err(error) => format!("{}: {error}", kind(&error)),
    };
    wait_for_line();
    say(&format!("result {result}"));
}

/// Memory of both kinds, written by the test's commands.
fn memory() {
    const LENGTH: usize = 64 * 4096;
    let map = |flags, descriptor| {
        // SAFETY: a new mapping, whose address the kernel chooses.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), LENGTH, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>()
    };
    // SAFETY: a name that ends with zero.
    let memfd = unsafe { libc::memfd_create(c"memory".as_ptr(), 0) };
    // SAFETY: takes numbers.
    assert_eq!(unsafe { libc::ftruncate(memfd, LENGTH as i64) }, 0);
    let regions = [map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1), map(libc::MAP_SHARED, memfd)];
    say(&format!("ready {:x} {:x}", regions[0] as usize, regions[1] as usize));
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if words[0] == "open-device" {
            // SAFETY: a name that ends with zero.
            let number = unsafe { libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
            say(&if number < 0 { "none".into() } else { number.to_string() });
            continue;
        }
        let (region, page) = (words[1].parse::<usize>().unwrap(), words[2].parse::<usize>().unwrap());
        // SAFETY: within the mapping.
        let at = unsafe { regions[region].add(page * 4096) };
        match words[0] {
            "read" => {
                // SAFETY: within the mapping.
                say(&unsafe { at.read_volatile() }.to_string());
                continue;
            }
            // SAFETY: within the mapping.
            "write" => unsafe { at.write_volatile(at.read_volatile().wrapping_add(1)) },
            "read-into" => {
                // SAFETY: a name that ends with zero; the buffer is within the mapping.
                let got = unsafe {
                    let zero = libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
                    let got = libc::read(zero, at.cast(), 100);
                    libc::close(zero);
                    got
                };
                assert_eq!(got, 100);
            }
            word => panic!("{word}"),
        }
        say("done");
    }
    say("result done");
}
