//! The process dies or becomes another program, or the tracer dies. `soak` has the same at random moments.

use sterna_attach::{AttachError, UserfaultOrigin, take_userfault};

use crate::target::Target;

pub(crate) const CASES: &[(&str, fn())] = &[
    ("a_process_that_was_killed_is_reported_as_ended", killed),
    ("a_program_that_was_executed_by_the_main_thread_is_worked_with", executed_by_main_thread),
    ("a_program_that_was_executed_by_another_thread_is_worked_with", executed_by_another_thread),
    ("a_tracer_that_is_killed_leaves_a_process_that_runs", killed_tracer),
];

fn killed() {
    for kind in ["read", "futex", "epoll_wait"] {
        let target = Target::start(&["endless", kind]);
        let process = target.hold();
        target.take(3);
        target.kill();
        let error = take_userfault(&process, UserfaultOrigin::SystemCall).unwrap_err();
        assert!(matches!(error, AttachError::Ended { .. }), "{kind}: {error:?}");
    }
}

fn executed(by: &str) {
    let mut target = Target::start(&["exec", by]);
    let process = target.hold();
    target.take(3);
    target.tell("go");
    // The new program says so too.
    assert_eq!(target.line(), "ready");
    target.note(&take_userfault(&process, UserfaultOrigin::SystemCall).unwrap());
    target.wait_for_call(libc::SYS_read);
    target.take(3);
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

fn executed_by_main_thread() {
    executed("main");
}

fn executed_by_another_thread() {
    executed("another");
}

fn killed_tracer() {
    for _ in 0..20 {
        let mut target = Target::start(&["endless", "ppoll"]);
        target.wait_for_call(libc::SYS_ppoll);
        let attacher = Target::start(&["attacher", "loop", &target.pid().to_string()]);
        target.wait_until(|target| target.status("TracerPid") != "0");
        attacher.kill();
        target.wait_until(|target| target.status("TracerPid") == "0");
        target.tell_if_it_lives("go");
        // It continues to its end: ppoll returned its own result or that of the tracer's call, and no error.
        let result = target.finish();
        assert!(result.ends_with(" 0"), "{result}");
    }
}
