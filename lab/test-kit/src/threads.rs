//! A system that has no thread left.

use std::io;
use std::thread::Builder;

/// Makes the kernel refuse every thread that the calling thread starts from now on, with `EAGAIN`: what a process sees at its limit of
/// processes (`RLIMIT_NPROC`, a control group's `pids.max`), without a limit that other processes share. There is no way back.
///
/// # Panics
/// The system has no seccomp filters, or the filter does not work.
pub fn no_more_threads() {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let is = |number: libc::c_long, then: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: then,
        jf: 0,
        k: number as u32,
    };
    // The number of the system call is the first word of `seccomp_data`. Jumps are counted in instructions.
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        is(libc::SYS_clone3, 2),
        is(libc::SYS_clone, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the arguments are numbers; this thread and those it starts give up new privileges by `exec`.
    let result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    // SAFETY: the kernel copies the program, which outlives the call.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    let error = Builder::new().spawn(|| ()).expect_err("the filter refuses threads");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
}
