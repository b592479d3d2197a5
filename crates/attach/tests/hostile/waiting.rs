//! A main thread that waits in the kernel, or never enters it, continues as if it had not been stopped.

use std::time::{Duration, Instant};

use sterna_attach::{AttachError, UserfaultOrigin, take_userfault};

use crate::target::Target;

pub(crate) const CASES: &[(&str, fn())] = &[
    ("a_call_with_a_time_limit_does_not_end_before_it", time_is_kept),
    ("a_call_whose_time_left_is_not_known_is_interrupted", time_is_not_known),
    ("a_call_without_a_time_limit_goes_on_and_returns_what_it_waited_for", endless_calls_go_on),
    ("user_code_finds_every_register_and_all_memory_as_it_was", registers_are_kept),
    ("a_restartable_sequence_is_not_forgotten", sequences_are_kept),
    ("the_registers_of_a_waiting_thread_are_the_same_after", waiting_registers_are_kept),
    ("threads_that_come_and_go_do_not_matter", threads_come_and_go),
    ("a_thread_in_vfork_is_left_alone_after_a_time_limit", vfork_is_left_alone),
    ("a_call_that_does_not_return_is_ended_and_undone", stuck_call_is_ended),
    ("several_calls_may_run_in_one_stop_and_dropping_releases_the_thread", calls_in_one_stop),
];

/// The calls with a time limit, and their numbers.
pub(crate) const TIMED: [(&str, libc::c_long); 6] = [
    ("poll", libc::SYS_poll),
    ("ppoll", libc::SYS_ppoll),
    ("pselect", libc::SYS_pselect6),
    ("nanosleep", libc::SYS_nanosleep),
    ("clock_nanosleep", libc::SYS_clock_nanosleep),
    ("futex", libc::SYS_futex),
];

/// Starts a role for each of these calls, all with this time limit.
pub(crate) fn start_timed(limit: Duration) -> Vec<(&'static str, Target, Instant)> {
    let limit = limit.as_millis().to_string();
    let start =
        |(kind, _): (&'static str, libc::c_long)| (kind, Target::start(&["timed", kind, &limit]), Instant::now());
    TIMED.into_iter().map(start).collect()
}

/// Ends a role, whose call must have ended because its time was over. Returns how long that took.
pub(crate) fn finish_timed(kind: &str, target: Target) -> Duration {
    let result = target.finish();
    let [result, errno, took] = result.split(' ').map(|word| word.parse::<i64>().unwrap()).collect::<Vec<_>>()[..]
    else {
        panic!()
    };
    if kind == "futex" {
        assert_eq!((result, errno), (-1, i64::from(libc::ETIMEDOUT)));
    } else {
        assert_eq!((result, errno), (0, 0), "{kind}");
    }
    Duration::from_millis(took as u64)
}

/// `soak` shows that it ends no later either. That depends on the machine, too: here some stops may come before the call, or after it.
fn time_is_kept() {
    const LIMIT: Duration = Duration::from_secs(1);
    for (kind, target, _) in start_timed(LIMIT) {
        target.take(10);
        let took = finish_timed(kind, target);
        assert!(took >= LIMIT, "{kind} ended after {took:?}");
    }
}

fn time_is_not_known() {
    let target = Target::start(&["timed", "epoll_wait", "100000"]);
    target.wait_for_call(libc::SYS_epoll_wait);
    target.note(&take_userfault(&target.hold(), UserfaultOrigin::SystemCall).unwrap());
    let result = target.finish();
    assert!(result.starts_with(&format!("-1 {} ", libc::EINTR)), "{result}");
}

fn endless_calls_go_on() {
    let eintr = i64::from(libc::EINTR);
    let kinds: [(&str, libc::c_long, (i64, i64)); 11] = [
        ("read", libc::SYS_read, (3, 0)),
        ("poll", libc::SYS_poll, (1, 0)),
        ("ppoll", libc::SYS_ppoll, (1, 0)),
        ("select", libc::SYS_select, (1, 0)),
        ("epoll_wait", libc::SYS_epoll_wait, (1, 0)),
        ("epoll_pwait", libc::SYS_epoll_pwait, (1, 0)),
        ("epoll_pwait2", libc::SYS_epoll_pwait2, (1, 0)),
        ("futex", libc::SYS_futex, (0, 0)),
        ("semop", libc::SYS_semop, (0, 0)),
        ("sigtimedwait", libc::SYS_rt_sigtimedwait, (i64::from(libc::SIGRTMIN()), 0)),
        // It returns only because of its handler.
        ("sigsuspend", libc::SYS_rt_sigsuspend, (-1, eintr)),
    ];
    for (kind, call, expected) in kinds {
        let mut target = Target::start(&["endless", kind]);
        target.wait_for_call(call);
        target.take(10);
        // It waits again.
        target.wait_for_call(call);
        target.tell("go");
        let result = target.finish();
        assert_eq!(result, format!("{} {}", expected.0, expected.1), "{kind}");
    }
}

fn registers_are_kept() {
    let target = Target::start(&["busy"]);
    target.take(30);
    assert_eq!(target.finish(), "0");
}

fn sequences_are_kept() {
    let target = Target::start(&["sequence"]);
    if target.ready == "none" {
        println!("skipped: the C library registers no restartable sequences");
    }
    target.take(40);
    let result = target.finish();
    println!("  {result}");
    assert!(result.starts_with("0 "), "{result}");
}

fn waiting_registers_are_kept() {
    let mut target = Target::start(&["endless", "read"]);
    target.wait_for_call(libc::SYS_read);
    let before = target.file("syscall");
    for _ in 0..100 {
        target.take(1);
        // The kernel restarts the call: the thread runs for a moment before it waits again, as it did before.
        target.wait_until(|target| target.file("syscall") == before);
    }
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

fn threads_come_and_go() {
    let target = Target::start(&["threads"]);
    target.take(50);
    target.finish();
}

fn vfork_is_left_alone() {
    let mut target = Target::start(&["vfork"]);
    target.wait_until(|target| target.status("State").starts_with('D'));
    let error = target.cannot_take();
    assert!(matches!(error, AttachError::DoesNotStop { .. }));
    assert_eq!(target.status("TracerPid"), "0");
    target.tell("go");
    assert_eq!(target.finish(), "true 7");
}

fn stuck_call_is_ended() {
    let mut target = Target::start(&["endless", "read"]);
    target.wait_for_call(libc::SYS_read);
    let process = target.hold();
    let mut thread = process.stop().unwrap();
    let error = thread.system_call(libc::SYS_pause, [0; 6]).unwrap_err();
    println!("  {error}");
    assert!(matches!(&error, AttachError::Refused { source, .. } if source.raw_os_error() == Some(libc::EINTR)));
    // Further calls are possible.
    assert_eq!(thread.system_call(libc::SYS_getpid, [0; 6]).unwrap(), target.pid() as u64);
    let error = thread.system_call(libc::SYS_exit_group, [0; 6]).unwrap_err();
    assert!(matches!(error, AttachError::Unsuitable { .. }));
    thread.resume().unwrap();
    target.take(1);
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

fn calls_in_one_stop() {
    let mut target = Target::start(&["endless", "ppoll"]);
    target.wait_for_call(libc::SYS_ppoll);
    let process = target.hold();
    let mut thread = process.stop().unwrap();
    assert_eq!(target.status("State"), "t (tracing stop)");
    for _ in 0..100 {
        assert_eq!(thread.system_call(libc::SYS_getpid, [0; 6]).unwrap(), target.pid() as u64);
    }
    let error = thread.system_call(libc::SYS_close, [4711, 0, 0, 0, 0, 0]).unwrap_err();
    println!("  {error}");
    assert!(matches!(&error, AttachError::Refused { source, .. } if source.raw_os_error() == Some(libc::EBADF)));
    drop(thread.take_descriptor(0).unwrap());
    // A second one is refused while the first holds the thread.
    let second = take_userfault(&process, UserfaultOrigin::SystemCall).unwrap_err();
    println!("  {second}");
    assert!(matches!(second, AttachError::AlreadyTraced { .. }));
    drop(thread);
    assert_eq!(target.status("TracerPid"), "0");
    target.tell("go");
    assert_eq!(target.finish(), "1 0");
}
