//! The process dies or becomes another program, or the tracer dies, at random moments.

use std::time::{Duration, Instant};

use sterna_attach::{AttachError, UserfaultOrigin, take_userfault};
use sterna_test_kit::Random;

use crate::target::Target;

pub(crate) const CASES: &[(&str, fn())] = &[
    ("a_process_that_is_killed_amid_is_reported_as_ended", killed_amid),
    ("a_program_that_executes_itself_again_and_again_goes_on", execs_by_main_thread),
    ("a_program_whose_other_thread_executes_a_new_one_goes_on", execs_by_another_thread),
    ("a_tracer_that_is_killed_at_any_moment_leaves_a_process_that_runs", killed_tracer),
];

/// Returns random numbers from a seed that is printed; `STERNA_SEED` repeats a run.
pub(crate) fn numbers() -> Random {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("STERNA_SEED").ok().map_or(now, |seed| seed.parse().unwrap());
    println!("  STERNA_SEED={seed}");
    Random::new(seed)
}

fn killed_amid() {
    let mut numbers = numbers();
    let mut taken = 0;
    for round in 0..60 {
        let kind = ["read", "futex", "epoll_wait"][round % 3];
        let target = Target::start(&["endless", kind]);
        let process = target.hold();
        let delay = Duration::from_micros(numbers.below(4000));
        let killer = std::thread::spawn(move || {
            let started = Instant::now();
            while started.elapsed() < delay {
                std::thread::yield_now();
            }
            target.kill();
        });
        let error = loop {
            match take_userfault(&process, UserfaultOrigin::SystemCall) {
                Ok(_) => taken += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, AttachError::Ended { .. }), "round {round}: {error:?}");
        killer.join().unwrap();
    }
    println!("  taken {taken} times before");
}

fn execs(by: &str) {
    let target = Target::start(&["execs", "300", by]);
    let process = target.hold();
    let (mut taken, mut replaced) = (0, 0);
    loop {
        match take_userfault(&process, UserfaultOrigin::SystemCall) {
            Ok(_) => taken += 1,
            Err(AttachError::Replaced { .. }) => replaced += 1,
            Err(AttachError::Ended { .. }) => break,
            Err(error) => panic!("after {taken} and {replaced}: {error:?}"),
        }
    }
    println!("  taken {taken} times, another program came {replaced} times");
    assert_eq!(target.finish(), "done");
}

fn execs_by_main_thread() {
    execs("main");
}

fn execs_by_another_thread() {
    execs("another");
}

/// The one effect that cannot be undone: a tracer that dies while registers are lent leaves them changed. The thread then continues after
/// its own `syscall` instruction, as if its call had returned the result of ours.
fn killed_tracer() {
    let mut numbers = numbers();
    let rounds = 200;
    let (mut early, mut left) = (0, 0);
    for round in 0..rounds {
        let mut target = Target::start(&["endless", "ppoll"]);
        target.wait_for_call(libc::SYS_ppoll);
        let attacher = Target::start(&["attacher", "loop", &target.pid().to_string()]);
        let started = Instant::now();
        let delay = Duration::from_micros(numbers.below(5000));
        while started.elapsed() < delay {
            std::thread::yield_now();
        }
        attacher.kill();
        target.wait_until(|target| target.status("TracerPid") == "0");
        left += u32::from(target.descriptors().iter().any(|(_, what)| what.contains("userfaultfd")));
        target.tell_if_it_lives("go");
        // It continues to its end: ppoll returned its own result or that of our call, and no error.
        let result = target.finish();
        assert!(result.ends_with(" 0"), "round {round}: {result}");
        early += u32::from(result != "1 0");
    }
    println!("  of {rounds} tracers killed, {early} left a call that returned early, {left} left a descriptor");
}
