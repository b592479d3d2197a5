//! At random moments, and with times compared: the results depend on luck, or on the machine's speed. `make soak` runs them, `make test` does
//! not (.config/nextest.toml).

use std::time::{Duration, Instant};

use sterna_attach::{AttachError, UserfaultOrigin, take_userfault};
use sterna_test_kit::Random;

use crate::slowdown::{
    all_worked, anywhere, assert_free, counts, slower_of, tracer_of, wait_for_failure, wait_for_slices, workers_of,
};
use crate::target::Target;
use crate::waiting::{TIMED, finish_timed, start_timed};

pub(crate) const CASES: &[(&str, fn())] = &[
    ("soak::a_call_with_a_time_limit_keeps_the_time_that_is_left", time_is_kept),
    ("soak::a_process_that_is_killed_amid_is_reported_as_ended", killed_amid),
    ("soak::a_program_that_executes_itself_again_and_again_goes_on", execs_by_main_thread),
    ("soak::a_program_whose_other_thread_executes_a_new_one_goes_on", execs_by_another_thread),
    ("soak::a_tracer_that_is_killed_at_any_moment_leaves_a_process_that_runs", killed_tracer),
    ("soak::slowed_threads_are_held_for_their_share_of_the_time", shares),
    ("soak::a_slowed_process_that_is_killed_at_any_moment_is_reported_as_ended", killed_slowed),
    ("soak::a_slowing_program_that_is_killed_at_any_moment_leaves_threads_that_run", killed_slower),
];

/// Returns random numbers from a seed that is printed; `STERNA_SEED` repeats a run.
fn numbers() -> Random {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("STERNA_SEED").ok().map_or(now, |seed| seed.parse().unwrap());
    println!("  STERNA_SEED={seed}");
    Random::new(seed)
}

/// Passes a random time, of less than so many microseconds.
fn pass_less_than(numbers: &mut Random, microseconds: u64) {
    let (begun, delay) = (Instant::now(), Duration::from_micros(numbers.below(microseconds)));
    while begun.elapsed() < delay {
        std::thread::yield_now();
    }
}

fn time_is_kept() {
    const LIMIT: Duration = Duration::from_millis(3000);
    let mut targets: Vec<_> =
        start_timed(LIMIT).into_iter().map(|(kind, target, started)| (kind, target, started, Duration::ZERO)).collect();
    for ((_, target, ..), (_, call)) in targets.iter().zip(TIMED) {
        target.wait_for_call(call);
    }
    // Until two thirds are over.
    while targets[0].2.elapsed() < LIMIT * 2 / 3 {
        for (_, target, started, last) in &mut targets {
            target.take(1);
            *last = started.elapsed();
        }
    }
    for (kind, target, _, last) in targets {
        let took = finish_timed(kind, target);
        assert!(took >= LIMIT, "{kind} ended after {took:?}");
        // If the last stop had restarted the time limit, the call would have ended no earlier than this.
        assert!(took < last + LIMIT, "{kind} ended after {took:?}, the last stop was after {last:?}");
    }
}

fn killed_amid() {
    let mut numbers = numbers();
    let mut taken = 0;
    for round in 0..60 {
        let kind = ["read", "futex", "epoll_wait"][round % 3];
        let target = Target::start(&["endless", kind]);
        let process = target.hold();
        let mut moment = Random::new(numbers.next_u64());
        let killer = std::thread::spawn(move || {
            pass_less_than(&mut moment, 4000);
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
        pass_less_than(&mut numbers, 5000);
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

fn shares() {
    let mut target = Target::start(&["workers", "3"]);
    let threads = workers_of(&target);
    let process = target.hold();
    let mut slowdown = process.slow_down(&threads, 50, anywhere).unwrap();
    for (percent, hold, slices) in [(50, 10, 20), (90, 90, 5), (99, 100, 5), (10, 1, 20)] {
        slowdown = slowdown.set(percent).unwrap();
        let (before, held_before, begun) = (counts(&mut target), wait_for_slices(&slowdown, 1), Instant::now());
        let held = wait_for_slices(&slowdown, slices);
        let (all_worked, time) = (all_worked(&mut target, &before), held.time - held_before.time);
        let share = time.as_secs_f64() / begun.elapsed().as_secs_f64() / threads.len() as f64;
        println!("  {percent} %: held for {:.1} % of the time", share * 100.0);
        // All threads, in each slice.
        let expected = Duration::from_millis(hold) * (slices * threads.len() as u64) as u32;
        assert!(time > expected / 2, "{percent} %: {time:?}, not about {expected:?}");
        assert!(all_worked, "{percent} %: {before:?}");
    }
    drop(slowdown);
    assert_free(&target, &threads);
    assert_eq!(target.finish(), "right");
}

fn killed_slowed() {
    let mut numbers = numbers();
    for round in 0..20 {
        let target = Target::start(&["workers", "2"]);
        let slowdown = target.hold().slow_down(&workers_of(&target), 90, anywhere).unwrap();
        pass_less_than(&mut numbers, 30_000);
        target.kill();
        let error = wait_for_failure(slowdown);
        assert!(matches!(error, AttachError::Ended { .. }), "round {round}: {error:?}");
    }
}

fn killed_slower() {
    let mut numbers = numbers();
    let mut target = Target::start(&["workers", "2"]);
    let threads = workers_of(&target);
    let mut amid = 0;
    for _ in 0..40 {
        let slower = slower_of(&target, &threads);
        pass_less_than(&mut numbers, 150_000);
        amid += u32::from(threads.iter().any(|&tid| tracer_of(&target, tid) != "0"));
        slower.kill();
        target.wait_until(|target| threads.iter().all(|&tid| tracer_of(target, tid) == "0"));
        let before = counts(&mut target);
        while !all_worked(&mut target, &before) {}
    }
    println!("  of 40 that were killed {amid} were holding threads");
    assert_eq!(target.finish(), "right");
}
