//! Signals before, during and after a call: each is delivered exactly once, with its usual effect.

use sterna_attach::{AttachError, UserfaultOrigin, take_userfault};

use crate::target::{Target, eventually};

pub(crate) const CASES: &[(&str, fn())] = &[
    ("every_signal_of_a_storm_is_delivered_once", storm),
    ("a_signal_that_only_ppoll_lets_through_ends_ppoll_and_stays_blocked_elsewhere", masked),
    ("a_stopped_process_is_worked_with_and_stays_stopped", stopped_before),
    ("stopped_user_code_is_worked_with_and_stays_stopped", stopped_user_code),
    ("a_stop_that_comes_amid_is_heeded_after", stopped_amid),
    ("a_deadly_signal_that_comes_amid_ends_the_process", deadly_signal),
];

fn storm() {
    const COUNT: u64 = 20_000;
    const MINE: u64 = 300;
    let target = Target::start(&["storm", &COUNT.to_string()]);
    let process = target.hold();
    let before = target.descriptors();
    let mut sum = 0;
    let mut refused = 0;
    for round in 0..MINE {
        // SAFETY: takes numbers.
        while unsafe { libc::sigqueue(target.pid(), libc::SIGRTMIN() + 5, libc::sigval { sival_ptr: round as *mut _ }) }
            != 0
        {
            std::thread::yield_now();
        }
        sum += round;
        match take_userfault(&process, UserfaultOrigin::SystemCall) {
            Ok(taken) => target.note(&taken),
            // On a busy machine the thread may handle signals for as long as it has to stop.
            Err(AttachError::Unsettled { .. } | AttachError::DoesNotStop { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused < MINE, "the storm let none through");
    println!("  {refused} of {MINE} were refused");
    assert_eq!(target.descriptors(), before);
    let result = target.finish();
    let mut expected = [(0, 0); 6];
    for number in 0..COUNT {
        expected[(number % 5) as usize].0 += 1;
        expected[(number % 5) as usize].1 += number;
    }
    expected[5] = (MINE, sum);
    let expected: Vec<String> = expected.iter().map(|(count, sum)| format!("{count}:{sum}")).collect();
    assert_eq!(result, expected.join(" "));
}

fn masked() {
    for amid in [false, true] {
        let target = Target::start(&["masked"]);
        target.wait_for_call(libc::SYS_ppoll);
        target.take(5);
        if amid {
            let process = target.hold();
            let mut thread = process.stop().unwrap();
            target.signal(libc::SIGRTMIN());
            assert_eq!(thread.system_call(libc::SYS_getpid, [0; 6]).unwrap(), target.pid() as u64);
            thread.resume().unwrap();
        } else {
            target.wait_for_call(libc::SYS_ppoll);
            target.signal(libc::SIGRTMIN());
        }
        assert_eq!(target.finish(), format!("-1 {} 1 true", libc::EINTR), "amid: {amid}");
    }
}

fn is_stopped(target: &Target) -> bool {
    target.status("State").starts_with('T')
}

fn stopped_before() {
    let mut target = Target::start(&["endless", "read"]);
    target.wait_for_call(libc::SYS_read);
    target.signal(libc::SIGSTOP);
    target.wait_until(is_stopped);
    for _ in 0..10 {
        target.take(1);
        target.wait_until(is_stopped);
    }
    target.tell("go");
    target.wait_until(is_stopped);
    target.signal(libc::SIGCONT);
    assert_eq!(target.finish(), "3 0");
}

fn stopped_user_code() {
    let target = Target::start(&["busy"]);
    target.signal(libc::SIGSTOP);
    target.wait_until(is_stopped);
    target.take(10);
    target.wait_until(is_stopped);
    target.signal(libc::SIGCONT);
    assert_eq!(target.finish(), "0");
}

fn stopped_amid() {
    let mut target = Target::start(&["endless", "read"]);
    target.wait_for_call(libc::SYS_read);
    let process = target.hold();
    let mut thread = process.stop().unwrap();
    target.signal(libc::SIGSTOP);
    for _ in 0..5 {
        assert_eq!(thread.system_call(libc::SYS_getpid, [0; 6]).unwrap(), target.pid() as u64);
    }
    thread.resume().unwrap();
    target.wait_until(is_stopped);
    // And the other way round: continued while it is held.
    let mut thread = process.stop().unwrap();
    target.signal(libc::SIGCONT);
    assert_eq!(thread.system_call(libc::SYS_getpid, [0; 6]).unwrap(), target.pid() as u64);
    thread.resume().unwrap();
    target.wait_for_call(libc::SYS_read);
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

fn deadly_signal() {
    let mut target = Target::start(&["endless", "read"]);
    target.wait_for_call(libc::SYS_read);
    let process = target.hold();
    let mut thread = process.stop().unwrap();
    target.signal(libc::SIGTERM);
    let error = thread.system_call(libc::SYS_getpid, [0; 6]).unwrap_err();
    println!("  {error}");
    assert!(matches!(error, AttachError::Ended { .. }));
    drop(thread);
    assert!(eventually(|| target.has_ended()));
}
