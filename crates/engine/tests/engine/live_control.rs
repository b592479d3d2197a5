//! Requests of other threads to a migration that runs: the answers in each phase, and what the migration makes of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Behind, Memory, Monitor, Pace, Running, Signal, Workload, faults_can_be_watched, log_of};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::live_control::{Control, RequestOutcome};
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Phase};
use sterna_engine::report::{Observer, Progress, ReceiveProgress, ReceiveReport, Report};
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_memory::dirty::DirtyLog;
use sterna_test_kit::Random;
use sterna_wire::switchover::{Moment, Step};

/// Pages of the two blocks of a guest.
const PAGES: (usize, usize) = (3000, 1000);
/// More pages than fit the queues, so that a round at the bandwidth `SLOW` can be ended before all of its pages are handed over.
const MANY_PAGES: (usize, usize) = (10_000, 6_000);
/// A guest that converges.
const CALM: Workload = Workload { writers: 1, span: 64, seed: 5, burst: 8 };
/// A guest that dirties its memory faster than any of these channels carries it, however slow the machine is.
const TOO_BUSY: Workload = Workload { writers: 2, span: 3000, seed: 11, burst: 0 };
/// A target that `TOO_BUSY` never meets.
const SHORT: Duration = Duration::from_millis(1);
/// A bandwidth at which the first round takes a few reports of progress.
const SLOW: Option<u64> = Some(8 << 20);

/// What an observer sees.
enum Seen<'a> {
    Progress(&'a Progress),
    Received(&'a ReceiveProgress),
    Step(Moment, Step),
    Note(&'a str),
}

/// Calls its closure with all that it sees.
struct Watching<F>(F);

impl<F: Fn(Seen<'_>) + Send + Sync> Observer for Watching<F> {
    fn progress(&self, progress: &Progress) {
        (self.0)(Seen::Progress(progress));
    }

    fn received(&self, progress: &ReceiveProgress) {
        (self.0)(Seen::Received(progress));
    }

    fn step(&self, moment: Moment, step: Step) {
        (self.0)(Seen::Step(moment, step));
    }

    fn note(&self, text: &str) {
        (self.0)(Seen::Note(text));
    }
}

type Ends = (Result<Report, MigrationError>, Result<ReceiveReport, MigrationError>);

/// Both sides of a migration.
struct Pair {
    memory: Arc<Memory>,
    there: Arc<Memory>,
    running: Running,
    from: Monitor,
    to: Monitor,
    log: Option<Box<dyn DirtyLog>>,
    control: Control,
}

impl Pair {
    /// A guest every page of which has content.
    fn new(workload: Workload) -> Self {
        Self::of(PAGES, workload)
    }

    fn of(pages: (usize, usize), workload: Workload) -> Self {
        let [memory, there] = [(); 2].map(|()| Memory::new(pages.0, pages.1));
        for block in 0..2 {
            for (number, word) in memory.words(block).iter().enumerate() {
                word.store(number as u64 | 1, Ordering::Relaxed);
            }
        }
        let running = Running::default();
        let (mut from, log) = Monitor::new(&memory, &running, workload);
        let (to, _) = Monitor::new(&there, &running, workload);
        let log = log_of(&from, log);
        from.start();
        Self { memory, there, running, from, to, log: Some(log), control: Control::new() }
    }

    /// Returns a source that sends pages as they are, so that a limit of the bandwidth bounds pages.
    fn source(&mut self) -> Source {
        let log = self.log.take().expect("one migration");
        Source::new(self.memory.ram(), log).method("none".parse().unwrap()).control(&self.control)
    }

    fn run(&mut self, mut source: Source, at_source: &dyn Observer, at_destination: &dyn Observer) -> Ends {
        let listening = Destination::new(self.there.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
        let address = listening.address().clone();
        let (from, to) = (&mut self.from, &mut self.to);
        std::thread::scope(|scope| {
            // A source that is cancelled before it has connected leaves a destination that waits.
            let cancel = Cancel::new();
            let receiving = {
                let cancel = cancel.clone();
                scope.spawn(move || listening.run(to, &cancel, at_destination))
            };
            let sent = source.run(address, &Security::Insecure, from, &Cancel::new(), at_source);
            if sent.as_ref().is_err_and(|error| error.guest == GuestState::Untouched) {
                cancel.cancel();
            }
            (sent, receiving.join().unwrap())
        })
    }

    /// Checks that the guest runs at one side: at the destination if `moved`.
    fn check(&self, moved: bool) {
        let runs = (self.from.runs(), self.to.runs());
        assert!(!self.running.ever_twice() && runs == (!moved, moved), "{runs:?}");
    }
}

/// Returns whether this is a report of the first round, some pages of which were sent.
fn is_within_the_first_round(seen: &Seen<'_>) -> bool {
    matches!(seen, Seen::Progress(progress) if progress.phase == Phase::Rounds && progress.round == 1 && progress.normal_pages > 0)
}

#[test]
fn each_phase_has_its_answers() {
    within_a_minute(|| {
        use RequestOutcome::{Accepted, NotAgreed, TooLate};
        let mut pair = Pair::new(CALM);
        let control = pair.control.clone();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let ask = {
            let (control, heard) = (control.clone(), Arc::clone(&heard));
            move |phase: &'static str| {
                let of_rounds = (control.set_bandwidth(None), control.set_downtime(Duration::from_secs(1)));
                // A guest that converges would be paused by itself, too.
                let ended = if phase == "save_ahead" { Accepted } else { control.switch_over() };
                heard.lock().unwrap().push((phase, of_rounds.0, of_rounds.1, ended, control.post_copy()));
            }
        };
        let at_call = ask.clone();
        pair.from.on_call = Some(Box::new(move |method| {
            if ["save_ahead", "pause", "save"].contains(&method) {
                at_call(method);
            }
        }));
        let at_step = ask.clone();
        let observer = Watching(move |seen: Seen<'_>| {
            if let Seen::Step(Moment::Before, Step::SourceRecordCommitted) = seen {
                at_step("decided");
            }
        });
        let source = pair.source();
        let (sent, received) = pair.run(source, &observer, &());
        received.unwrap();
        sent.unwrap();
        pair.check(true);
        ask("ended");
        assert_eq!(control.cancel(), TooLate);
        assert_eq!(
            *heard.lock().unwrap(),
            [
                ("save_ahead", Accepted, Accepted, Accepted, NotAgreed),
                ("pause", Accepted, Accepted, Accepted, NotAgreed),
                ("save", Accepted, TooLate, TooLate, NotAgreed),
                ("decided", TooLate, TooLate, TooLate, NotAgreed),
                ("ended", TooLate, TooLate, TooLate, TooLate),
            ]
        );
    });
}

#[test]
fn a_guest_that_never_converges_is_switched_over_in_the_middle_of_a_round() {
    within_a_minute(|| {
        let mut pair = Pair::of(MANY_PAGES, TOO_BUSY);
        let control = pair.control.clone();
        let (left, asked) = (Arc::new(AtomicU64::new(0)), AtomicBool::new(false));
        let remaining = Arc::clone(&left);
        let observer = Watching(move |seen: Seen<'_>| {
            if is_within_the_first_round(&seen) && !asked.swap(true, Ordering::Relaxed) {
                let Seen::Progress(progress) = seen else { unreachable!() };
                remaining.store(progress.remaining_bytes, Ordering::Relaxed);
                assert_eq!(control.switch_over(), RequestOutcome::Accepted);
            }
        });
        let source = pair.source().bandwidth(SLOW).downtime(SHORT);
        let (sent, received) = pair.run(source, &observer, &());
        received.unwrap();
        let sent = sent.unwrap();
        pair.check(true);
        let (left, ram) = (left.load(Ordering::Relaxed), pair.memory.ram().bytes());
        assert!(left > ram / 8, "the round was far from its end: {left} bytes remained");
        // Not a single page went twice while the guest ran: the round was not finished, and no other was begun.
        assert!(sent.rounds == 1 && sent.downtime_ms > 1.0, "{sent:?}");
    });
}

#[test]
fn a_switchover_that_is_requested_before_the_migration_comes_within_its_first_round() {
    within_a_minute(|| {
        let mut pair = Pair::of(MANY_PAGES, TOO_BUSY);
        assert_eq!(pair.control.switch_over(), RequestOutcome::Accepted);
        let source = pair.source().bandwidth(SLOW).downtime(SHORT);
        let (sent, received) = pair.run(source, &(), &());
        received.unwrap();
        assert_eq!(sent.unwrap().rounds, 1);
        pair.check(true);
    });
}

#[test]
fn a_requested_switchover_waits_for_what_was_saved_ahead() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        pair.from.ahead = true;
        let (order, may_load) = (Arc::new(Mutex::new(Vec::new())), Signal::default());
        let (control, called, blocked) = (pair.control.clone(), Arc::clone(&order), may_load.clone());
        pair.to.on_call = Some(Box::new(move |method| {
            if method == "load_ahead" {
                assert_eq!(control.switch_over(), RequestOutcome::Accepted);
                called.lock().unwrap().push("requested");
                blocked.wait();
                called.lock().unwrap().push("loads");
            }
        }));
        let called = Arc::clone(&order);
        pair.from.on_call = Some(Box::new(move |method| {
            if method == "pause" {
                called.lock().unwrap().push("pauses");
            }
        }));
        let (requested, reports) = (Arc::clone(&order), AtomicU64::new(0));
        let observer = Watching(move |seen: Seen<'_>| {
            // The rounds have had every opportunity to pause the guest.
            if matches!(seen, Seen::Progress(_))
                && !requested.lock().unwrap().is_empty()
                && reports.fetch_add(1, Ordering::Relaxed) == 2
            {
                may_load.set();
            }
        });
        let source = pair.source();
        let (sent, received) = pair.run(source, &observer, &());
        received.unwrap();
        sent.unwrap();
        pair.check(true);
        assert_eq!(*order.lock().unwrap(), ["requested", "loads", "pauses"]);
    });
}

#[test]
fn a_guest_that_is_being_paused_stays_paused_if_that_is_requested_meanwhile() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        // Until it is paused, the guest writes so much that it would run on.
        pair.from.last_writes = 3000;
        let control = pair.control.clone();
        pair.from.on_call = Some(Box::new(move |method| {
            if method == "pause" {
                assert_eq!(control.switch_over(), RequestOutcome::Accepted);
            }
        }));
        let source = pair.source().bandwidth(SLOW);
        let (sent, received) = pair.run(source, &(), &());
        received.unwrap();
        sent.unwrap();
        pair.check(true);
        assert!(!pair.from.called.contains(&"resume"), "{:?}", pair.from.called);
    });
}

#[test]
fn a_longer_target_downtime_ends_the_rounds_of_a_guest_that_does_not_converge() {
    within_a_minute(|| {
        let mut pair = Pair::new(TOO_BUSY);
        let (control, noted) = (pair.control.clone(), Arc::new(AtomicBool::new(false)));
        let is_noted = Arc::clone(&noted);
        let observer = Watching(move |seen: Seen<'_>| match seen {
            Seen::Progress(progress) if progress.round >= 3 && progress.phase == Phase::Rounds => {
                assert_eq!(control.set_downtime(Duration::from_secs(60)), RequestOutcome::Accepted);
            }
            Seen::Note(text) if text.contains("the target downtime is 60000 ms") => {
                is_noted.store(true, Ordering::Relaxed);
            }
            _ => {}
        });
        let source = pair.source().bandwidth(Some(64 << 20)).downtime(SHORT);
        let (sent, received) = pair.run(source, &observer, &());
        received.unwrap();
        let sent = sent.unwrap();
        pair.check(true);
        assert!(noted.load(Ordering::Relaxed));
        assert_eq!(sent.convergence, None, "it converges with the target that counts");
    });
}

#[test]
fn a_limit_that_is_lifted_frees_threads_that_would_wait_for_hours() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        let control = pair.control.clone();
        let (before, reports) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
        let sent_before = Arc::clone(&before);
        let (lift, lifted) = channel();
        let observer = Watching(move |seen: Seen<'_>| {
            if let Seen::Progress(progress) = seen
                && reports.fetch_add(1, Ordering::Relaxed) == 3
            {
                sent_before.store(progress.wire_bytes, Ordering::Relaxed);
                lift.send(()).unwrap();
            }
        });
        let lifting = std::thread::spawn(move || {
            lifted.recv().unwrap();
            control.set_bandwidth(None)
        });
        // Each piece of 4 KiB after the first takes more than an hour.
        let source = pair.source().bandwidth(Some(1));
        let (sent, received) = pair.run(source, &observer, &());
        received.unwrap();
        let (sent, before) = (sent.unwrap(), before.load(Ordering::Relaxed));
        assert_eq!(lifting.join().unwrap(), RequestOutcome::Accepted);
        pair.check(true);
        assert!(
            before < 64 << 10 && sent.wire_bytes > pair.memory.ram().bytes(),
            "{before} bytes with the limit, {} in all",
            sent.wire_bytes
        );
    });
}

#[test]
fn a_limit_that_is_set_holds_all_channels_and_a_cancellation_does_not_wait_for_it() {
    within_a_minute(|| {
        let mut pair = Pair::new(TOO_BUSY);
        let control = pair.control.clone();
        let (limited, wire) = (AtomicBool::new(false), Mutex::new((0, 0)));
        let observer = Watching(move |seen: Seen<'_>| {
            let Seen::Progress(progress) = seen else { return };
            if progress.round < 2 {
                return;
            }
            if !limited.swap(true, Ordering::Relaxed) {
                assert_eq!(control.set_bandwidth(Some(1)), RequestOutcome::Accepted);
                return;
            }
            // The packets that were being written are finished; then the figure does not change any more, in three reports in a row.
            let mut wire = wire.lock().unwrap();
            *wire = if wire.0 == progress.wire_bytes { (wire.0, wire.1 + 1) } else { (progress.wire_bytes, 0) };
            if wire.1 == 3 {
                assert_eq!(control.cancel(), RequestOutcome::Accepted);
                // The channels are being closed, and never wait again.
                assert_eq!(control.set_bandwidth(Some(1)), RequestOutcome::Accepted);
            }
        });
        let source = pair.source().channels(3).bandwidth(Some(64 << 20)).downtime(SHORT);
        let (sent, received) = pair.run(source, &observer, &());
        let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
        assert_eq!(
            (sent.kind, sent.guest, received.guest),
            (ErrorKind::Cancelled, GuestState::RunsAtSource, GuestState::NotHere)
        );
        pair.check(false);
    });
}

/// What both sides report in post-copy.
#[derive(Debug, Default)]
struct Reported {
    at_source: Vec<Progress>,
    at_destination: Vec<ReceiveProgress>,
    /// The answers to requests for post-copy and for a bandwidth, at each of the source's reports.
    answers: Vec<(RequestOutcome, RequestOutcome)>,
}

impl Reported {
    /// Returns whether both sides have reported that less is left than before, and how long the rest takes.
    fn is_enough(&self) -> bool {
        self.at_source.windows(2).any(|pair| pair[0].remaining_bytes > pair[1].remaining_bytes)
            && self.at_source.iter().any(|progress| progress.time_left_ms.is_some())
            && self.at_destination.windows(2).any(|pair| pair[0].missing_bytes > pair[1].missing_bytes)
            && self.at_destination.iter().any(|progress| progress.time_left_ms.is_some())
    }
}

/// A page that the guest needs is sent whatever the bandwidth is. So, until both sides have reported enough, the guest looks at a few words
/// for each report, and the rest trickles.
#[test]
fn post_copy_begins_in_the_middle_of_a_round_and_both_sides_tell_how_long_it_takes() {
    /// A bandwidth at which the rest takes minutes, and each piece of a packet follows soon.
    const TRICKLE: Option<u64> = Some(256 << 10);
    /// So many that some of their pages are missing, and so few that their pages do not hold up the packets for long.
    const FEW_WORDS: u64 = 32;
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let mut pair = Pair::of(MANY_PAGES, TOO_BUSY);
        let pace = Pace::default();
        let behind = Behind { pace: Some(pace.clone()), ..Behind::new(&pair.memory) };
        pair.to.behind = Some(behind.clone());
        let control = pair.control.clone();
        let asked = AtomicBool::new(false);
        let reported = Arc::new(Mutex::new(Reported::default()));
        let (of_source, allowed) = (Arc::clone(&reported), pace.clone());
        let at_source = Watching(move |seen: Seen<'_>| {
            if is_within_the_first_round(&seen) && !asked.swap(true, Ordering::Relaxed) {
                assert_eq!(control.post_copy(), RequestOutcome::Accepted);
            }
            match seen {
                // Nothing has been sent after the guest yet.
                Seen::Step(Moment::After, Step::SourceRecordCommitted) => {
                    assert_eq!(control.set_bandwidth(TRICKLE), RequestOutcome::Accepted);
                }
                Seen::Progress(progress) if progress.phase == Phase::PostCopy => {
                    let mut reported = of_source.lock().unwrap();
                    reported.at_source.push(progress.clone());
                    let (limit, words) = if reported.is_enough() { (None, u64::MAX) } else { (TRICKLE, FEW_WORDS) };
                    reported.answers.push((control.post_copy(), control.set_bandwidth(limit)));
                    allowed.allow(words);
                }
                _ => {}
            }
        });
        let of_destination = Arc::clone(&reported);
        let at_destination = Watching(move |seen: Seen<'_>| {
            if let Seen::Received(progress) = seen
                && progress.phase == Phase::PostCopy
            {
                of_destination.lock().unwrap().at_destination.push(progress.clone());
                pace.allow(FEW_WORDS);
            }
        });
        let source = pair.source().bandwidth(SLOW).downtime(SHORT).allow_post_copy(true);
        let (sent, arrived) = pair.run(source, &at_source, &at_destination);
        arrived.unwrap();
        let sent = sent.unwrap();
        pair.check(true);
        assert!(sent.rounds == 1 && sent.post_copy.is_some_and(|post_copy| post_copy.requests > 0), "{sent:?}");
        pair.to.stop();
        assert_eq!((behind.wrong.load(Ordering::Relaxed), behind.differing_pages(&pair.there)), (0, 0));

        let reported = reported.lock().unwrap();
        assert!(reported.is_enough(), "{reported:?}");
        let answers = (RequestOutcome::TooLate, RequestOutcome::Accepted);
        assert!(reported.answers.iter().all(|answered| *answered == answers), "{reported:?}");
        for progress in &reported.at_destination {
            assert_eq!(progress.remaining_bytes, Some(progress.missing_bytes));
        }
    });
}

#[test]
fn a_destination_that_cannot_do_post_copy_refuses_a_source_that_allows_it() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        pair.to.no_post_copy = Some("its devices cannot wait");
        let source = pair.source().allow_post_copy(true);
        let (sent, _) = pair.run(source, &(), &());
        let sent = sent.unwrap_err();
        assert!(sent.kind == ErrorKind::Refused && sent.reason.contains("its devices cannot wait"), "{sent}");
        pair.check(false);
    });
}

#[test]
fn a_control_of_a_migration_that_has_begun_serves_no_other() {
    within_a_minute(|| {
        let mut pair = Pair::new(CALM);
        let control = pair.control.clone();
        let source = pair.source();
        let (sent, received) = pair.run(source, &(), &());
        received.unwrap();
        sent.unwrap();
        let mut other = Pair::new(CALM);
        other.control = control;
        let source = other.source();
        let (sent, _) = other.run(source, &(), &());
        let sent = sent.unwrap_err();
        assert_eq!((sent.kind, sent.guest), (ErrorKind::Settings, GuestState::Untouched), "{sent}");
        other.check(false);
    });
}

/// The moments of a migration at which other threads make requests.
const MOMENTS: [&str; 12] = [
    "progress",
    "save_ahead",
    "pause",
    "save",
    "Before SourceStartMigration",
    "After SourceStartMigration",
    "After SourceSendPrepare",
    "Before SourceRelayShut",
    "After SourceRelayShut",
    "Before SourceRecordCommitted",
    "After SourceRecordCommitted",
    "After SourceSendCommit",
];

/// Runs a migration and calls `at` with the name of each moment.
fn run_observed(pair: &mut Pair, source: Source, at: impl Fn(&str) + Clone + Send + Sync + 'static) -> Ends {
    let at_call = at.clone();
    pair.from.on_call = Some(Box::new(at_call));
    let observer = Watching(move |seen: Seen<'_>| match seen {
        Seen::Step(moment, step) => at(&format!("{moment:?} {step:?}")),
        Seen::Progress(_) => at("progress"),
        Seen::Received(_) | Seen::Note(_) => {}
    });
    pair.run(source, &observer, &())
}

/// Two threads cancel at the same time as the migration goes on.
#[test]
fn an_accepted_cancellation_keeps_the_guest_at_the_source_and_a_late_one_does_not() {
    within_a_minute(|| {
        for moment in MOMENTS.into_iter().chain(MOMENTS) {
            let mut pair = Pair::new(CALM);
            let source = pair.source();
            let (now, when): (Vec<_>, Vec<Receiver<()>>) = [(); 2].map(|()| channel()).into_iter().unzip();
            let control = pair.control.clone();
            let (ends, answers) = std::thread::scope(|scope| {
                let cancel = |when: Receiver<()>| {
                    let control = &control;
                    scope.spawn(move || when.recv().ok().map(|()| control.cancel()))
                };
                let threads: Vec<_> = when.into_iter().map(cancel).collect();
                let now = Arc::new(Mutex::new(now));
                let at = move |name: &str| {
                    if name == moment {
                        now.lock().unwrap().drain(..).for_each(|now| now.send(()).expect("the thread waits"));
                    }
                };
                let ends = run_observed(&mut pair, source, at);
                // Where the moment did not come, the threads are released by the closures' end.
                pair.from.on_call = None;
                (ends, threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect::<Vec<_>>())
            });
            let in_time = answers.contains(&RequestOutcome::Accepted);
            match ends.0 {
                Ok(_) => assert!(!in_time, "at {moment}: {answers:?}"),
                Err(error) => {
                    assert!(in_time && error.kind == ErrorKind::Cancelled, "at {moment}: {error}, {answers:?}");
                }
            }
            pair.check(!in_time);
        }
    });
}

#[test]
fn any_requests_of_several_threads_leave_one_guest_that_is_whole() {
    any_requests(6, Random::new(1));
}

/// Moves so many guests while several threads make requests.
fn any_requests(migrations: u32, mut random: Random) {
    within_a_minute(move || {
        for _ in 0..migrations {
            let mut pair = Pair::new(random.one_of(&[CALM, TOO_BUSY]));
            let source = pair.source().bandwidth(Some(32 << 20)).downtime(Duration::from_millis(20));
            let (events, inboxes): (Vec<_>, Vec<Receiver<()>>) = [(); 3].map(|()| channel()).into_iter().unzip();
            let control = pair.control.clone();
            let (ends, cancelled) = std::thread::scope(|scope| {
                let requesting = |inbox: Receiver<()>| -> ScopedJoinHandle<'_, bool> {
                    let (control, mut random) = (&control, Random::new(random.next_u64()));
                    scope.spawn(move || {
                        let mut cancelled = false;
                        for (number, ()) in inbox.iter().enumerate() {
                            let megabytes = random.below(64);
                            let _ = match random.below(12) {
                                0..=3 => control.set_bandwidth((megabytes > 8).then_some(megabytes << 20)),
                                4..=7 => control.set_downtime(Duration::from_millis(random.below(100))),
                                8 => control.post_copy(),
                                9 if random.once_in(4) => {
                                    let answer = control.cancel();
                                    cancelled |= answer == RequestOutcome::Accepted;
                                    answer
                                }
                                _ if number > 8 => control.switch_over(),
                                _ => control.set_bandwidth(None),
                            };
                        }
                        cancelled
                    })
                };
                let threads: Vec<_> = inboxes.into_iter().map(requesting).collect();
                let events = Arc::new(Mutex::new(events));
                let at = move |_: &str| {
                    for thread in &*events.lock().unwrap() {
                        thread.send(()).expect("the thread waits");
                    }
                };
                let ends = run_observed(&mut pair, source, at);
                pair.from.on_call = None;
                let cancelled: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
                (ends, cancelled.contains(&true))
            });
            match ends.0 {
                Ok(_) => assert!(!cancelled),
                Err(error) => assert!(cancelled && error.kind == ErrorKind::Cancelled, "{error}"),
            }
            pair.check(!cancelled);
        }
    });
}

mod soak {
    use super::*;

    #[test]
    fn any_requests_from_a_fresh_seed_leave_one_guest_that_is_whole() {
        any_requests(24, Random::announced());
    }
}
