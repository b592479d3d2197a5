use std::sync::Barrier;
use std::sync::atomic::AtomicU32;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// The answers to bandwidth, downtime, switchover and post-copy, in this order.
fn answers(control: &Control) -> [RequestOutcome; 4] {
    [control.set_bandwidth(Some(1)), control.set_downtime(SECOND), control.switch_over(), control.post_copy()]
}

/// A control at the stage that `steps` lead to, with the migration's hold on it.
fn at(steps: &[fn(&Control)]) -> (Control, Steering) {
    let control = Control::new();
    let steering = Steering::begin(&control, &Cancel::new()).unwrap();
    steps.iter().for_each(|step| step(&control));
    (control, steering)
}

const AGREED: fn(&Control) = |control| control.agreed(true);
const PAUSING: fn(&Control) = |control| {
    control.begin_ending(RoundsEnd::SwitchOver);
};
const PAUSED: fn(&Control) = |control| assert!(control.stays_paused(true));
const DECIDED: fn(&Control) = |control| control.decide().unwrap();

/// A stage of a migration, the steps that lead there, the answers to four requests, and the answer to a cancellation.
type Row<'a> = (&'a str, &'a [fn(&Control)], [RequestOutcome; 4], RequestOutcome);

#[test]
fn each_stage_has_its_answers() {
    use RequestOutcome::{Accepted, NotAgreed, TooLate};
    let post_copy: fn(&Control) = |control| {
        control.begin_ending(RoundsEnd::PostCopy);
    };
    let runs_on: fn(&Control) = |control| assert!(!control.stays_paused(false));
    let interrupted: fn(&Control) = Control::rounds_go_on;
    let table: [Row<'_>; 10] = [
        ("being connected", &[], [Accepted, Accepted, Accepted, NotAgreed], Accepted),
        ("rounds", &[AGREED], [Accepted; 4], Accepted),
        ("pausing", &[AGREED, PAUSING], [Accepted, Accepted, Accepted, TooLate], Accepted),
        ("running on", &[AGREED, PAUSING, runs_on], [Accepted; 4], Accepted),
        ("interrupted before the pause", &[AGREED, PAUSING, interrupted], [Accepted; 4], Accepted),
        ("interrupted before post-copy", &[AGREED, post_copy, interrupted], [Accepted; 4], Accepted),
        ("paused", &[AGREED, PAUSING, PAUSED], [Accepted, TooLate, TooLate, TooLate], Accepted),
        ("decided", &[AGREED, PAUSING, PAUSED, DECIDED], [TooLate; 4], TooLate),
        ("post-copy begins", &[AGREED, post_copy], [Accepted, TooLate, TooLate, TooLate], Accepted),
        ("post-copy", &[AGREED, post_copy, DECIDED], [Accepted, TooLate, TooLate, TooLate], TooLate),
    ];
    for (stage, steps, expected, cancelled) in table {
        let (control, steering) = at(steps);
        assert_eq!((answers(&control), control.cancel()), (expected, cancelled), "{stage}");
        assert!(steering.cancel().is_cancelled(), "{stage}: a lost destination is not waited for in vain");
        drop(steering);
        assert_eq!((answers(&control), control.cancel()), ([TooLate; 4], TooLate), "after the end of {stage}");
    }
}

#[test]
fn post_copy_that_was_not_agreed_on_is_refused_at_every_stage() {
    let not_agreed: fn(&Control) = |control| control.agreed(false);
    for steps in [&[not_agreed][..], &[not_agreed, PAUSING], &[not_agreed, PAUSING, PAUSED, DECIDED]] {
        let (control, _steering) = at(steps);
        assert_eq!(control.post_copy(), RequestOutcome::NotAgreed);
        assert_eq!(control.requests().ending, None);
    }
}

#[test]
fn the_last_way_to_end_the_rounds_counts_until_they_end() {
    let (control, _steering) = at(&[AGREED]);
    assert_eq!((control.switch_over(), control.post_copy()), (RequestOutcome::Accepted, RequestOutcome::Accepted));
    assert_eq!(control.begin_ending(RoundsEnd::SwitchOver), RoundsEnd::PostCopy);
}

#[test]
fn a_guest_that_does_not_fit_stays_paused_where_that_was_requested_meanwhile() {
    let (control, _steering) = at(&[AGREED, PAUSING]);
    assert_eq!(control.switch_over(), RequestOutcome::Accepted);
    assert!(control.stays_paused(false));
    assert_eq!(control.switch_over(), RequestOutcome::TooLate);
}

#[test]
fn requests_are_noticed_once_and_refused_ones_never() {
    let (control, _steering) = at(&[AGREED]);
    let mut seen = 0;
    assert_eq!(control.changed(&mut seen), None);
    assert_eq!(
        (control.set_bandwidth(Some(0)), control.set_downtime(SECOND)),
        (RequestOutcome::Accepted, RequestOutcome::Accepted)
    );
    let requests = Requests { bandwidth: Some(None), downtime: Some(SECOND), ending: None };
    assert_eq!((control.changed(&mut seen), control.changed(&mut seen)), (Some(requests), None));
    PAUSING(&control);
    PAUSED(&control);
    assert_eq!(control.set_downtime(SECOND * 2), RequestOutcome::TooLate);
    assert_eq!((control.changed(&mut seen), control.requests()), (None, requests));
}

#[test]
fn each_accepted_request_wakes_the_loop() {
    let (control, _steering) = at(&[|control| control.agreed(false)]);
    let woken = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&woken);
    control.on_request(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let accepted = answers(&control).iter().filter(|answer| **answer == RequestOutcome::Accepted).count();
    assert_eq!((accepted, woken.load(Ordering::Relaxed)), (3, 3));
    drop(_steering);
    assert_eq!(Arc::strong_count(&woken), 1, "the closure is not kept after the end");
}

#[test]
fn a_limit_reaches_the_pacer_of_now_and_that_of_later_channels() {
    let (control, _steering) = at(&[AGREED]);
    let [first, second] = [Some(7), None].map(|limit| Arc::new(Pacer::new(limit)));
    control.pace_by(&first);
    assert_eq!(first.limit(), Some(7), "nothing was requested");
    assert_eq!(control.set_bandwidth(Some(5)), RequestOutcome::Accepted);
    control.pace_by(&second);
    assert_eq!((first.limit(), second.limit()), (Some(5), Some(5)));
    assert_eq!(control.set_bandwidth(None), RequestOutcome::Accepted);
    assert_eq!((first.limit(), second.limit()), (Some(5), None), "the channels of the first are gone");
}

#[test]
fn channels_that_are_being_closed_never_wait_for_a_limit_again() {
    let (control, _steering) = at(&[AGREED]);
    let pacer = Arc::new(Pacer::new(Some(1)));
    control.pace_by(&pacer);
    pacer.release();
    assert_eq!(control.set_bandwidth(Some(1)), RequestOutcome::Accepted);
    pacer.pace(usize::MAX);
    assert_eq!(pacer.limit(), None);
}

#[test]
fn a_control_serves_one_migration_and_again_only_one_that_follows_where_nothing_was_begun() {
    let control = Control::new();
    let first = Steering::begin(&control, &Cancel::new()).unwrap();
    assert_eq!(Steering::begin(&control, &Cancel::new()).err(), Some(InUse));
    assert_eq!(control.set_downtime(SECOND), RequestOutcome::Accepted);
    drop(first);
    let second = Steering::begin(&control, &Cancel::new()).unwrap();
    assert_eq!(control.requests().downtime, Some(SECOND), "it counts for the next attempt");
    control.agreed(false);
    drop(second);
    assert_eq!(Steering::begin(&control, &Cancel::new()).err(), Some(InUse));
}

#[test]
fn what_is_requested_before_the_migration_counts_a_cancellation_too() {
    let control = Control::new();
    assert_eq!(
        answers(&control),
        [RequestOutcome::Accepted, RequestOutcome::Accepted, RequestOutcome::Accepted, RequestOutcome::NotAgreed]
    );
    assert_eq!(control.cancel(), RequestOutcome::Accepted);
    let steering = Steering::begin(&control, &Cancel::new()).unwrap();
    assert!(steering.cancel().is_cancelled());
    drop(steering);
    assert_eq!(control.cancel(), RequestOutcome::TooLate, "the cancelled migration has ended");
}

#[test]
fn a_cancel_that_serves_many_migrations_cancels_this_one_as_the_control_does() {
    let (cancel, control) = (Cancel::new(), Control::new());
    let steering = Steering::begin(&control, &cancel).unwrap();
    control.agreed(false);
    cancel.cancel();
    assert!(steering.cancel().is_cancelled());
    assert_eq!(control.decide(), Err(WasCancelled));
    drop(steering);
    let next = Control::new();
    let steering = Steering::begin(&next, &Cancel::new()).unwrap();
    assert!(!steering.cancel().is_cancelled(), "the control of another migration is none of its business");
}

#[test]
fn of_a_cancellation_and_the_decision_exactly_one_is_in_time() {
    let mut cancelled = 0;
    for _ in 0..2000 {
        let (control, _steering) = at(&[AGREED, PAUSING, PAUSED]);
        let start = Barrier::new(3);
        let (decided, answers) = std::thread::scope(|scope| {
            let cancels = [(); 2].map(|()| {
                scope.spawn(|| {
                    start.wait();
                    control.cancel()
                })
            });
            start.wait();
            let decided = control.decide();
            (decided, cancels.map(|thread| thread.join().unwrap()))
        });
        let in_time = answers.contains(&RequestOutcome::Accepted);
        assert_eq!(decided.is_err(), in_time, "{decided:?}, {answers:?}");
        cancelled += u32::from(in_time);
    }
    println!("{cancelled} of 2000 were cancelled in time");
}
