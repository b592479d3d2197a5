//! Threads that are held for a share of the time: their results stay correct, they run when they are released, and signals and other events
//! keep their usual effects.

use std::sync::mpsc;
use std::time::Duration;

use sterna_attach::{AttachError, Slowdown, SlowdownStats, StoppedAt};

use crate::target::{Target, eventually};

pub(crate) const CASES: &[(&str, fn())] = &[
    ("slowed_threads_are_held_and_run_by_turns_until_they_are_let_go", held_and_run),
    ("at_no_percent_no_thread_is_attached_to", no_percent),
    ("a_thread_is_held_only_where_that_is_permitted", places),
    ("calls_that_are_interrupted_by_slowing_down_go_on", calls_go_on),
    ("slowed_user_code_keeps_its_registers_and_sequences", registers_are_kept),
    ("every_signal_of_a_storm_reaches_a_slowed_thread_once", storm),
    ("a_slowed_process_that_is_stopped_stays_stopped_and_goes_on_when_it_is_continued", job_control),
    ("threads_that_are_traced_already_are_not_slowed_down", traced_before),
    ("a_debugger_that_comes_ends_the_slowing_down_of_all_threads", traced_amid),
    ("a_thread_that_ends_ends_the_slowing_down_of_all_threads", thread_ends),
    ("a_slowed_process_that_is_killed_is_reported_as_ended", killed),
    ("a_thread_that_cannot_be_stopped_is_not_waited_for", cannot_be_stopped),
    ("a_slowing_program_that_is_killed_leaves_threads_that_run", killed_tracer),
    ("a_vcpu_of_kvm_is_held_in_kvm_run_and_runs_on", kvm),
];

pub(crate) fn anywhere(_: &StoppedAt) -> bool {
    true
}

/// Returns the threads of the role `workers`.
pub(crate) fn workers_of(target: &Target) -> Vec<i32> {
    target.ready.split(' ').map(|word| word.parse().unwrap()).collect()
}

/// Returns the rounds of work that each has done.
pub(crate) fn counts(target: &mut Target) -> Vec<u64> {
    target.ask("count").split(' ').map(|word| word.parse().unwrap()).collect()
}

pub(crate) fn tracer_of(target: &Target, tid: i32) -> String {
    let status = target.file(&format!("task/{tid}/status"));
    let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    line.unwrap_or_default().trim().to_owned()
}

/// Starts a program that slows these threads of the target down.
pub(crate) fn slower_of(target: &Target, threads: &[i32]) -> Target {
    let words: Vec<String> = [target.pid()].iter().chain(threads).map(i32::to_string).collect();
    Target::start(&[&["slower"][..], &words.iter().map(String::as_str).collect::<Vec<_>>()].concat())
}

#[track_caller]
pub(crate) fn assert_free(target: &Target, threads: &[i32]) {
    for &tid in threads {
        assert_eq!(tracer_of(target, tid), "0", "thread {tid}");
    }
}

/// Waits until `more` further slices are over.
pub(crate) fn wait_for_slices(slowdown: &Slowdown, more: u64) -> SlowdownStats {
    let end = slowdown.held().slices + more;
    assert!(eventually(|| slowdown.held().slices >= end), "{:?}", slowdown.held());
    slowdown.held()
}

/// Waits until a slowdown has ended by itself.
pub(crate) fn wait_for_failure(slowdown: Slowdown) -> AttachError {
    let mut checked = Some(Ok(slowdown));
    eventually(|| {
        checked = checked.take().map(|checked| checked.and_then(Slowdown::check));
        checked.as_ref().is_some_and(Result::is_err)
    });
    checked.unwrap().expect_err("it has not ended")
}

/// Returns whether each thread has worked since then.
pub(crate) fn all_worked(target: &mut Target, before: &[u64]) -> bool {
    before.iter().zip(counts(target)).all(|(before, after)| *before < after)
}

/// `soak` compares the times with their shares. How long a thread runs and is held depends on the machine, too.
fn held_and_run() {
    let mut target = Target::start(&["workers", "3"]);
    let threads = workers_of(&target);
    let process = target.hold();
    let mut slowdown = process.slow_down(&threads, 50, anywhere).unwrap();
    for percent in [50, 90, 99, 10] {
        slowdown = slowdown.set(percent).unwrap();
        let (before, held_before) = (counts(&mut target), wait_for_slices(&slowdown, 1));
        let held_and_run = eventually(|| slowdown.held().time > held_before.time && all_worked(&mut target, &before));
        assert!(held_and_run, "{percent} %: {:?}", slowdown.held());
    }
    drop(slowdown);
    assert_free(&target, &threads);
    let before = counts(&mut target);
    while !all_worked(&mut target, &before) {}
    assert_eq!(target.finish(), "right");
}

fn no_percent() {
    let target = Target::start(&["workers", "2"]);
    let threads = workers_of(&target);
    let slowdown = target.hold().slow_down(&threads, 0, anywhere).unwrap();
    assert_free(&target, &threads);
    assert_eq!(slowdown.held(), SlowdownStats::default());
    let slowdown = slowdown.set(80).unwrap();
    wait_for_slices(&slowdown, 3);
    assert!(eventually(|| slowdown.held().time > Duration::ZERO), "{:?}", slowdown.held());
    let slowdown = slowdown.set(0).unwrap();
    assert_free(&target, &threads);
    let held = slowdown.held();
    assert!(held.slices >= 3 && held.time > Duration::ZERO, "{held:?}");
    let slowdown = slowdown.set(99).unwrap();
    wait_for_slices(&slowdown, 1);
    drop(slowdown);
    assert_free(&target, &threads);
    assert_eq!(target.finish(), "right");
}

fn places() {
    // User code that may not be held runs on.
    let mut target = Target::start(&["workers", "2"]);
    let threads = workers_of(&target);
    let (found, places) = mpsc::channel();
    let nowhere = move |at: &StoppedAt| {
        found.send(*at).unwrap();
        false
    };
    let slowdown = target.hold().slow_down(&threads, 90, nowhere).unwrap();
    let before = counts(&mut target);
    wait_for_slices(&slowdown, 3);
    let ran = eventually(|| slowdown.held().let_run > 0 && all_worked(&mut target, &before));
    assert!(ran && slowdown.held().time == Duration::ZERO, "{:?}", slowdown.held());
    drop(slowdown);
    assert_free(&target, &threads);
    assert!(places.iter().any(|at| at.system_call.is_none()), "it works in user code");
    assert_eq!(target.finish(), "right");

    // The call is identified by its number and arguments, and the thread is held there.
    let mut target = Target::start(&["endless", "read"]);
    target.wait_for_call(libc::SYS_read);
    let in_read = |at: &StoppedAt| matches!(at.system_call, Some((libc::SYS_read, [0, _, 16, ..])));
    let slowdown = target.hold().slow_down(&[target.pid()], 90, in_read).unwrap();
    assert!(eventually(|| slowdown.held().time > Duration::ZERO), "{:?}", slowdown.held());
    drop(slowdown);
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

fn calls_go_on() {
    let kinds: [(&str, (i64, i64)); 10] = [
        ("read", (3, 0)),
        ("poll", (1, 0)),
        ("ppoll", (1, 0)),
        ("select", (1, 0)),
        ("epoll_wait", (1, 0)),
        ("epoll_pwait2", (1, 0)),
        ("futex", (0, 0)),
        ("semop", (0, 0)),
        ("sigtimedwait", (i64::from(libc::SIGRTMIN()), 0)),
        ("sigsuspend", (-1, i64::from(libc::EINTR))),
    ];
    for (kind, expected) in kinds {
        let mut target = Target::start(&["endless", kind]);
        let slowdown = target.hold().slow_down(&[target.pid()], 50, anywhere).unwrap();
        wait_for_slices(&slowdown, 3);
        target.tell("go");
        let result = target.finish();
        // A thread that is held while the word changes and begins its call anew finds another word (futex(2), EAGAIN).
        let held = kind == "futex" && result == format!("-1 {}", libc::EAGAIN);
        assert!(held || result == format!("{} {}", expected.0, expected.1), "{kind}: {result}");
    }
}

fn registers_are_kept() {
    for (role, right) in [("busy", "0"), ("sequence", "0 ")] {
        let target = Target::start(&[role]);
        let slowdown = target.hold().slow_down(&[target.pid()], 50, anywhere).unwrap();
        wait_for_slices(&slowdown, 20);
        let result = target.finish();
        assert!(result.starts_with(right), "{role}: {result}");
    }
}

fn storm() {
    const COUNT: u64 = 20_000;
    let target = Target::start(&["storm", &COUNT.to_string()]);
    let slowdown = target.hold().slow_down(&[target.pid()], 50, anywhere).unwrap();
    wait_for_slices(&slowdown, 5);
    println!("  {:?}", slowdown.held());
    let result = target.finish();
    let mut expected = [(0, 0); 6];
    for number in 0..COUNT {
        expected[(number % 5) as usize].0 += 1;
        expected[(number % 5) as usize].1 += number;
    }
    let expected: Vec<String> = expected.iter().map(|(count, sum)| format!("{count}:{sum}")).collect();
    assert_eq!(result, expected.join(" "));
}

fn job_control() {
    let mut target = Target::start(&["workers", "2"]);
    let threads = workers_of(&target);
    let is_stopped = |target: &Target| {
        let stopped = |tid: &i32| target.file(&format!("task/{tid}/status")).contains("State:\tT");
        threads.iter().all(stopped)
    };
    let slowdown = target.hold().slow_down(&threads, 50, anywhere).unwrap();
    wait_for_slices(&slowdown, 2);
    target.signal(libc::SIGSTOP);
    target.wait_until(is_stopped);
    wait_for_slices(&slowdown, 5);
    target.wait_until(is_stopped);
    // Continued while it is slowed down.
    target.signal(libc::SIGCONT);
    let before = counts(&mut target);
    wait_for_slices(&slowdown, 3);
    assert!(eventually(|| all_worked(&mut target, &before)));
    // Released while it is stopped.
    target.signal(libc::SIGSTOP);
    target.wait_until(is_stopped);
    wait_for_slices(&slowdown, 2);
    drop(slowdown);
    assert_free(&target, &threads);
    target.wait_until(is_stopped);
    target.signal(libc::SIGCONT);
    assert_eq!(target.finish(), "right");
}

fn traced_before() {
    let target = Target::start(&["workers", "2"]);
    let threads = workers_of(&target);
    let tracer = Target::start(&["tracer", &threads[1].to_string()]);
    let error = target.hold().slow_down(&threads, 50, anywhere).unwrap_err();
    println!("  {error}");
    assert!(matches!(&error, AttachError::AlreadyTraced { tracer: found, .. } if *found == tracer.pid()));
    assert_free(&target, &threads[..1]);
    // Threads of other processes are never attached to.
    let error = target.hold().slow_down(&[threads[0], 1], 50, anywhere).unwrap_err();
    println!("  {error}");
    assert!(matches!(error, AttachError::ThreadEnded { tid: 1, .. }));
    tracer.finish();
    assert_eq!(target.finish(), "right");
}

fn traced_amid() {
    let target = Target::start(&["workers", "3"]);
    let threads = workers_of(&target);
    let slowdown = target.hold().slow_down(&threads, 10, anywhere).unwrap();
    let tracer = Target::start(&["tracer", &threads[1].to_string()]);
    let error = wait_for_failure(slowdown);
    println!("  {error}");
    assert!(matches!(&error, AttachError::AlreadyTraced { tracer: found, .. } if *found == tracer.pid()));
    assert_free(&target, &[threads[0], threads[2]]);
    assert_eq!(tracer_of(&target, threads[1]), tracer.pid().to_string());
    tracer.finish();
    assert_eq!(target.finish(), "right");
}

fn thread_ends() {
    let mut target = Target::start(&["workers", "3"]);
    let threads = workers_of(&target);
    let slowdown = target.hold().slow_down(&threads, 50, anywhere).unwrap();
    target.tell("end 1");
    let error = wait_for_failure(slowdown);
    println!("  {error}");
    assert!(matches!(error, AttachError::ThreadEnded { tid, .. } if tid == threads[1]));
    assert_free(&target, &[threads[0], threads[2]]);
    assert_eq!(target.line(), "ended");
    assert_eq!(target.finish(), "right");
}

fn killed() {
    for round in 0..6 {
        let target = Target::start(&["workers", "2"]);
        let slowdown = target.hold().slow_down(&workers_of(&target), 90, anywhere).unwrap();
        wait_for_slices(&slowdown, round % 3);
        target.kill();
        let error = wait_for_failure(slowdown);
        assert!(matches!(error, AttachError::Ended { .. }), "round {round}: {error:?}");
    }
}

fn cannot_be_stopped() {
    let mut target = Target::start(&["vfork"]);
    target.wait_until(|target| target.status("State").starts_with('D'));
    let slowdown = target.hold().slow_down(&[target.pid()], 50, anywhere).unwrap();
    let held = wait_for_slices(&slowdown, 3);
    assert_eq!(held.time, Duration::ZERO, "it never stopped");
    drop(slowdown);
    assert_eq!(target.status("TracerPid"), "0");
    // Requests from while it waited have no effect later.
    target.tell("go");
    assert_eq!(target.finish(), "true 7");
}

fn killed_tracer() {
    let mut target = Target::start(&["workers", "2"]);
    let threads = workers_of(&target);
    for _ in 0..6 {
        let slower = slower_of(&target, &threads);
        target.wait_until(|target| threads.iter().any(|&tid| tracer_of(target, tid) != "0"));
        slower.kill();
        target.wait_until(|target| threads.iter().all(|&tid| tracer_of(target, tid) == "0"));
        let before = counts(&mut target);
        while !all_worked(&mut target, &before) {}
    }
    assert_eq!(target.finish(), "right");
}

fn kvm() {
    let mut target = Target::start(&["kvm"]);
    let Ok(vcpu) = target.ready.parse::<i32>() else {
        println!("skipped: no virtual machine can be made here: {}", target.ready);
        return;
    };
    // `KVM_RUN` (include/uapi/linux/kvm.h).
    let in_guest = |at: &StoppedAt| matches!(at.system_call, Some((libc::SYS_ioctl, [_, 0xAE80, ..])));
    let slowdown = target.hold().slow_down(&[vcpu], 90, in_guest).unwrap();
    let before = target.ask("count");
    let held_and_run = eventually(|| slowdown.held().time > Duration::ZERO && target.ask("count") != before);
    println!("  {:?}", slowdown.held());
    assert!(held_and_run, "it is held, and runs in between");
    drop(slowdown);
    assert_free(&target, &[vcpu]);
    let before = target.ask("count");
    while target.ask("count") == before {}
    target.finish();
}
