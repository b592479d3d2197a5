//! A connection that is lost while the guest's memory is sent only interrupts the migration: it goes on with what has arrived.
//!
//! The destination's monitor compares its memory with that of the paused source when it loads the guest's state (`guest`).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload, faults_can_be_watched, log_of, monitors, witnessed};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::live_control::{Control, RequestOutcome};
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError};
use sterna_engine::report::{Observer, Progress, ReceiveReport, Report};
use sterna_engine::source::{Source, TimeLimits};
use sterna_engine::transport::simulated::{Direction, Faults, Network, Which};
use sterna_engine::transport::{Connection, Security, open_channel};
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::{DirtyLog, DirtyLogError};
use sterna_wire::header::ChannelKind;
use sterna_wire::identity::{MigrationId, MigrationKey};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(3600);
/// What the two sides report, at the beginning of a line.
const DIALS: &str = "the guest runs on and its writes are tracked";
const WAITS: &str = "what has arrived is kept";
const BACK: &str = "the destination is back";

const WORKLOAD: Workload = Workload { writers: 1, span: 300, seed: 11, burst: 20 };

/// Calls `act` when the log has been collected so many times; 0: when it is started. The numbers ascend. After each time, it waits until the
/// migration goes on: a connection that is cut while it is lost would not be lost again.
struct WatchedLog {
    log: Box<dyn DirtyLog>,
    collected: u32,
    moments: Vec<u32>,
    act: Box<dyn Fn() + Send>,
    acted: u32,
    /// How often the migration went on.
    went_on: Arc<AtomicU32>,
}

impl WatchedLog {
    fn moment(&mut self) {
        let due = self.moments.first().is_some_and(|moment| *moment <= self.collected);
        if due && self.went_on.load(Ordering::SeqCst) == self.acted {
            self.moments.remove(0);
            self.acted += 1;
            (self.act)();
        }
    }
}

impl DirtyLog for WatchedLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        let started = self.log.start();
        self.moment();
        started
    }

    fn found_populated(&mut self, block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        self.log.found_populated(block, populated)
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        let collected = self.log.collect(block, dirty);
        if block == 1 {
            self.collected += 1;
            self.moment();
        }
        collected
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}

/// Calls `act` with each note.
struct Notes<F>(F);

impl<F: Fn(&str) + Send + Sync> Observer for Notes<F> {
    fn progress(&self, _: &Progress) {}

    fn note(&self, text: &str) {
        (self.0)(text);
    }
}

type Outcome = (Result<Report, MigrationError>, Result<ReceiveReport, MigrationError>);

/// A migration whose guest is paused only when that is requested.
struct Case {
    network: Network,
    retry: Duration,
    channels: u16,
    /// When the connections are cut, as [`WatchedLog`] counts.
    cuts: Vec<u32>,
    /// Whether all connections are refused from the first cut on.
    for_good: bool,
    /// The number of interruptions after which the guest may be paused.
    interruptions: u32,
    cancel: (Cancel, Cancel),
}

impl Case {
    fn new(seed: u64) -> Self {
        Self {
            network: Network::new(seed),
            retry: LONG,
            channels: 2,
            cuts: Vec::new(),
            for_good: false,
            interruptions: 1,
            cancel: (Cancel::new(), Cancel::new()),
        }
    }

    /// Runs both sides, whose notes are passed to `notes`. Checks that the guest has never run twice and runs once.
    fn run(&self, notes: (impl Fn(&str) + Send + Sync, impl Fn(&str) + Send + Sync)) -> (Outcome, [Monitor; 2]) {
        let (source, destination) = (Memory::new(1500, 700), Memory::new(1500, 700));
        let running = Running::default();
        source.fill();
        let (mut from, log, mut to) = monitors([&source, &destination], &running, WORKLOAD);
        from.start();
        let (network, for_good) = (self.network.clone(), self.for_good);
        let act = Box::new(move || {
            if for_good {
                network.faults(Faults::new().refuse(Which::all()));
            }
            network.cut_all();
        });
        // It never fits the downtime: the guest is paused when that is requested.
        from.state_size = 1 << 40;
        let went_on = Arc::<AtomicU32>::default();
        let (moments, counter) = (self.cuts.clone(), Arc::clone(&went_on));
        let log = WatchedLog { log: Box::new(log), collected: 0, moments, act, acted: 0, went_on: counter };
        let control = Control::new();
        let paused_by = control.clone();
        let at_source = Notes(|text: &str| {
            if text.starts_with(BACK) && went_on.fetch_add(1, Ordering::SeqCst) + 1 == self.interruptions {
                assert_eq!(paused_by.switch_over(), RequestOutcome::Accepted);
            }
            notes.0(text);
        });
        let at_destination = Notes(notes.1);
        // No host is reached any more where all connections are refused.
        let (linger, reporting_abort) =
            if self.for_good { (Duration::ZERO, Duration::from_millis(300)) } else { (LONG, LONG) };
        let listening = Destination::new(destination.ram()).retry(self.retry).linger(linger);
        let listening = listening.listen(self.network.port("there"), &Security::Insecure).unwrap();
        let address = listening.address().clone();
        let limits = TimeLimits::default()
            .retry(self.retry)
            .dial_pause(Duration::from_millis(5))
            .reporting_abort(reporting_abort);
        let mut migration = Source::new(source.ram(), Box::new(log))
            .channels(self.channels)
            .downtime(Duration::from_micros(1))
            .control(&control)
            .time_limits(limits);
        let outcome = std::thread::scope(|scope| {
            let (to, at_destination) = (&mut to, &at_destination);
            let receiving = scope.spawn(move || listening.run(to, &self.cancel.1, at_destination));
            let sent = migration.run(address, &Security::Insecure, &mut from, &self.cancel.0, &at_source);
            (sent, receiving.join().unwrap())
        });
        assert!(running.now() == 1 && !running.ever_twice(), "{outcome:?}");
        (outcome, [from, to])
    }

    /// Runs both sides. Checks that the guest has moved after the planned interruptions.
    fn moves(&self) {
        let ((sent, received), [from, to]) = self.run((|_: &str| {}, |_: &str| {}));
        let (sent, received) = (sent.unwrap(), received.unwrap());
        assert!(!from.runs() && to.runs());
        assert_eq!(sent.interruptions, self.interruptions);
        // A connection that breaks as soon as it is made interrupts it once more for the destination.
        assert!(received.interruptions >= self.interruptions);
        assert!(sent.interrupted_ms > 0.0);
        assert!(from.resumed.is_empty(), "the guest was paused once");
    }
}

fn assert_stays(outcome: &Outcome, [from, to]: &[Monitor; 2]) {
    let (Err(sent), Err(received)) = outcome else { panic!("{outcome:?}") };
    assert_eq!((sent.guest, received.guest), (GuestState::RunsAtSource, GuestState::NotHere), "{outcome:?}");
    assert!(from.runs() && !to.runs());
}

#[test]
fn the_rounds_go_on_after_every_cut_at_the_beginning_in_and_at_the_end_of_a_round() {
    within_a_minute(|| {
        for (seed, cuts) in [vec![0], vec![1], vec![2, 3, 4], vec![0, 1, 6]].into_iter().enumerate() {
            let interruptions = cuts.len() as u32;
            Case { cuts, interruptions, ..Case::new(seed as u64) }.moves();
        }
    });
}

#[test]
fn a_broken_channel_interrupts_the_migration_while_the_control_channel_is_still_there() {
    within_a_minute(|| {
        // Connection 0 is the control channel, 1 the RAM channel: pages are lost, or acknowledgements.
        for (direction, bytes) in [(Direction::Forth, 300_000), (Direction::Back, 100)] {
            let case = Case { channels: 1, ..Case::new(bytes) };
            case.network.faults(Faults::new().cut(Which::all().number(1), direction, bytes));
            case.moves();
        }
    });
}

#[test]
fn connections_that_break_while_they_are_opened_again_are_dialled_again() {
    within_a_minute(|| {
        // Of the second and third incarnation: the control channel, a RAM channel, the stream channel.
        for number in 3..6 {
            let case = Case { channels: 1, cuts: vec![1], ..Case::new(number) };
            let plan = Faults::new().cut(Which::all().number(number), Direction::Forth, 50);
            case.network.faults(plan.refuse(Which::all().number(6)));
            case.moves();
        }
    });
}

#[test]
fn a_destination_that_is_not_reached_in_time_is_given_up_and_gives_up() {
    within_a_minute(|| {
        let retry = Duration::from_millis(100);
        let case = Case { retry, cuts: vec![2], for_good: true, ..Case::new(3) };
        let (outcome, monitors) = case.run((|_: &str| {}, |_: &str| {}));
        assert_stays(&outcome, &monitors);
        let (Err(sent), Err(received)) = outcome else { unreachable!("checked above") };
        assert_eq!((sent.kind, received.kind), (ErrorKind::ConnectionLost, ErrorKind::ConnectionLost));
        assert!(sent.reason.contains("not reached again"), "{sent}");
        assert!(received.reason.contains("did not come back"), "{received}");
        assert_eq!(sent.report.unwrap().interruptions, 1);
    });
}

#[test]
fn a_cancellation_while_the_migration_is_interrupted_ends_it_at_once_on_either_side() {
    within_a_minute(|| {
        for at_source in [true, false] {
            let case = Case { cuts: vec![1], for_good: true, ..Case::new(4) };
            let (here, there) =
                if at_source { (&case.cancel.0, &case.cancel.1) } else { (&case.cancel.1, &case.cancel.0) };
            // The other side, which is not reached, has to be cancelled as well.
            let seen = AtomicU32::new(0);
            let cancel = |text: &str| {
                if (text.starts_with(DIALS) || text.starts_with(WAITS)) && seen.fetch_add(1, Ordering::SeqCst) == 1 {
                    here.cancel();
                    there.cancel();
                }
            };
            let (outcome, monitors) = case.run((cancel, cancel));
            assert_stays(&outcome, &monitors);
            let (Err(sent), Err(received)) = outcome else { unreachable!("checked above") };
            assert_eq!((sent.kind, received.kind), (ErrorKind::Cancelled, ErrorKind::Cancelled));
        }
    });
}

#[test]
fn a_side_that_is_connected_again_learns_that_the_other_was_cancelled() {
    within_a_minute(|| {
        for at_source in [true, false] {
            let case = Case { cuts: vec![1], ..Case::new(5) };
            let cancelling = |begins: &'static str, cancel: &Cancel| {
                let cancel = cancel.clone();
                move |text: &str| {
                    if text.starts_with(begins) {
                        cancel.cancel();
                    }
                }
            };
            let none = Cancel::new();
            let (at, there) = if at_source { (&case.cancel.0, &none) } else { (&none, &case.cancel.1) };
            let (outcome, monitors) = case.run((cancelling(DIALS, at), cancelling(WAITS, there)));
            assert_stays(&outcome, &monitors);
            let (Err(sent), Err(received)) = outcome else { unreachable!("checked above") };
            let (cancelled, other) = if at_source { (sent, received) } else { (received, sent) };
            assert_eq!((cancelled.kind, other.kind), (ErrorKind::Cancelled, ErrorKind::OtherSide), "{other}");
        }
    });
}

#[test]
fn a_stranger_who_does_not_have_the_key_cannot_take_the_place_of_a_lost_source() {
    within_a_minute(|| {
        let case = Case { cuts: vec![2], ..Case::new(6) };
        let (id, refusals) = (Mutex::new(None), Mutex::new(Vec::new()));
        let dials = |text: &str| {
            if let Some(rest) = text.strip_prefix("migration ") {
                *id.lock().unwrap() = Some(rest.split(' ').next().unwrap().parse::<MigrationId>().unwrap());
            }
            if text.starts_with(WAITS) {
                let id = id.lock().unwrap().expect("the migration was accepted before");
                for kind in [ChannelKind::Control, ChannelKind::Ram] {
                    let connection = Connection::connect(case.network.port("there"), &Security::Insecure).unwrap();
                    let key = MigrationKey::from_bytes([1; 32]);
                    let error = open_channel(connection, &key, id, kind, 0, 1000).unwrap_err();
                    refusals.lock().unwrap().push(error.to_string());
                }
            }
        };
        let ((sent, received), _) = case.run((|_: &str| {}, dials));
        assert!(sent.is_ok() && received.is_ok(), "{sent:?}; {received:?}");
        let refusals = refusals.into_inner().unwrap();
        assert_eq!(refusals.len(), 2);
        assert!(refusals.iter().all(|error| error.contains("proof")), "{refusals:?}");
    });
}

#[test]
fn a_lost_connection_ends_the_migration_if_either_side_does_not_wait() {
    within_a_minute(|| {
        let case = Case { retry: Duration::ZERO, cuts: vec![2], ..Case::new(7) };
        let (outcome, monitors) = case.run((|_: &str| {}, |_: &str| {}));
        assert_stays(&outcome, &monitors);
    });
}

/// The guest goes on in post-copy after its rounds were interrupted.
#[test]
fn post_copy_begins_over_the_channels_of_a_later_incarnation() {
    within_a_minute(|| {
        if !faults_can_be_watched() {
            return;
        }
        let (mut from, log, mut to, witness) = witnessed(Workload { writers: 2, span: 3000, seed: 7, burst: 0 });
        let network = Network::new(8);
        let cut = network.clone();
        let log = WatchedLog {
            log: log_of(&from, log),
            collected: 0,
            moments: vec![2],
            act: Box::new(move || cut.cut_all()),
            acted: 0,
            went_on: Arc::default(),
        };
        let control = Control::new();
        let post_copy = control.clone();
        let at_source = Notes(move |text: &str| {
            if text.starts_with(BACK) {
                assert_eq!(post_copy.post_copy(), RequestOutcome::Accepted);
            }
        });
        let listening = Destination::new(witness.destination.ram()).retry(LONG);
        let listening = listening.listen(network.port("there"), &Security::Insecure).unwrap();
        let address = listening.address().clone();
        let mut migration = Source::new(witness.source.ram(), Box::new(log))
            .bandwidth(Some(40 << 20))
            .downtime(Duration::from_millis(10))
            .allow_post_copy(true)
            .control(&control)
            .time_limits(TimeLimits::default().retry(LONG).dial_pause(Duration::from_millis(5)));
        let (sent, received) = std::thread::scope(|scope| {
            let to = &mut to;
            let receiving = scope.spawn(move || listening.run(to, &Cancel::new(), &()));
            let sent = migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &at_source);
            (sent, receiving.join().unwrap())
        });
        let sent = sent.unwrap();
        received.unwrap();
        assert_eq!((sent.interruptions, sent.post_copy.unwrap().reconnected), (1, 0));
        witness.check(&from, &mut to);
        drop(Arc::clone(&witness.source));
    });
}
