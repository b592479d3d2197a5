//! Randomised migrations with faults: connections cut after any byte, refused, all of them cut at any moment, monitors
//! killed with their guests. On the simulated network and on real sockets.
//!
//! In every case: the guest never runs twice; if no monitor was killed, it runs once; a guest starts with the memory
//! with which it was paused; both sides report what happened, and they agree.
//!
//! `STERNA_SEED` and `STERNA_MIGRATIONS` repeat a run or make it longer, `STERNA_MIGRATION` repeats a single one. The
//! seed decides the faults, not the order of threads.

use std::io::{self, Write};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::common::relay::Relay;
use crate::device::{Device, Devices};
use crate::guest::{Behind, Life, Memory, Monitor, Running, Workload};
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::{Destination, Fence};
use sterna_engine::device_state::DeviceChannels;
use sterna_engine::migration::{GuestState, MigrationError};
use sterna_engine::report::{Observer, Progress, ReceiveReport, Report};
use sterna_engine::source::{NotConverging, Source, TimeLimits};
use sterna_engine::transport::simulated::{Direction, Faults, Network, Which};
use sterna_engine::transport::{Address, Security};
use sterna_memory::userfault::{self, Userfault};
use sterna_test_kit::Random;

/// Number of migrations of a test; those in `soak` make more.
const MIGRATIONS: u64 = 50;
/// Maximum time in which a destination ends after its source: far more than its time limits.
const MAX_WAIT: Duration = Duration::from_secs(120);
/// Concurrent migrations; they mostly wait.
const CONCURRENT: u64 = 8;

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// A fault in addition to those of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Trouble {
    what: What,
    /// The number of the moment, of all that callbacks and observers see, at which the fault happens.
    when: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Nothing,
    CutAll,
    KillSource,
    KillDestination,
    CancelSource,
    CancelDestination,
}

/// The connection between the two sides.
enum Wire {
    Simulated(Network),
    Sockets(Arc<Relay>),
}

impl Wire {
    fn cut_all(&self) {
        match self {
            Self::Simulated(network) => network.cut_all(),
            Self::Sockets(relay) => relay.cut_all(),
        }
    }

    fn refuse_all(&self) {
        match self {
            Self::Simulated(network) => network.faults(Faults::new().refuse(Which::all())),
            Self::Sockets(relay) => relay.refuse_all(),
        }
    }
}

/// Counts the moments that callbacks and observers see, and causes the fault at the chosen one.
struct Troublemaker {
    trouble: Trouble,
    moments: AtomicU64,
    wire: Wire,
    source: Life,
    destination: Life,
    cancel: (Cancel, Cancel),
    done: AtomicBool,
}

impl Troublemaker {
    fn moment(&self) {
        if self.moments.fetch_add(1, Ordering::SeqCst) != self.trouble.when {
            return;
        }
        match self.trouble.what {
            What::Nothing => return,
            What::CutAll => self.wire.cut_all(),
            What::KillSource => self.kill(&self.source),
            What::KillDestination => {
                self.kill(&self.destination);
                // In post-copy the source would wait for its destination for ever; an operator ends that.
                self.cancel.0.cancel();
            }
            What::CancelSource => self.cancel.0.cancel(),
            What::CancelDestination => self.cancel.1.cancel(),
        }
        self.done.store(true, Ordering::SeqCst);
    }

    /// Kills one side, after which nothing passes between the two any more.
    fn kill(&self, life: &Life) {
        life.kill();
        self.wire.refuse_all();
        self.wire.cut_all();
    }
}

impl Observer for Troublemaker {
    fn progress(&self, _: &Progress) {
        self.moment();
    }

    fn note(&self, _: &str) {
        self.moment();
    }
}

/// Returns devices for one of three migrations; now and then one of them fails.
fn some_devices(random: &mut Random) -> Devices {
    if !random.percent(33) {
        return Devices::default();
    }
    let count = 1 + random.below(5) as u32;
    let device = |instance| {
        let sizes = [0, 1, 4096, 50_000, 400_000];
        let mut device = Device::new("device", instance, random.one_of(&sizes), random.one_of(&sizes));
        device.turns = 1 + random.below(3);
        let mut fails = || random.percent(3).then(|| random.below(100_000));
        (device.save_fails, device.load_fails) = (fails(), fails());
        device
    };
    Devices((0..count).map(device).collect())
}

/// How one migration ended, for the statistics.
#[derive(Debug, Default)]
struct Ends {
    moved: AtomicU32,
    stayed: AtomicU32,
    unconfirmed: AtomicU32,
    lost: AtomicU32,
    post_copies: AtomicU32,
    reconnected: AtomicU32,
    interruptions: AtomicU32,
}

type Sent = Result<Report, MigrationError>;
type Received = Result<ReceiveReport, MigrationError>;

fn one(seed: u64, on_sockets: bool, ends: &Ends) {
    let mut random = Random::new(seed);
    let (low, high) = (100 + random.below(200) as usize, 20 + random.below(100) as usize);
    let (source, destination) = (Memory::new(low, high), Memory::new(low, high));
    let running = Running::default();
    let workload = Workload { writers: 1, span: 20 + random.below(200), seed, burst: 1 + random.below(50) };
    let (mut from, log) = Monitor::new(&source, &running, workload);
    let (mut to, _) = Monitor::new(&destination, &running, workload);
    from.ahead = random.percent(20);
    from.state_bytes = random.below(20_000) as usize;
    let post_copy = random.percent(25) && Userfault::open(userfault::Faults::All, 0).is_ok();
    let behind = post_copy.then(|| Behind::new(&source));
    to.behind = behind.clone();
    from.start();

    let when = random.below(16);
    let what = match random.below(10) {
        0..3 => What::Nothing,
        3..5 => What::CutAll,
        // In post-copy the guest's memory is lost if a source dies after the decision: the guest's threads wait for
        // ever.
        5..6 if !post_copy => What::KillSource,
        6..8 => What::KillDestination,
        8 => What::CancelSource,
        _ => What::CancelDestination,
    };
    let trouble = Trouble { what, when };
    // The connections that break, and after how many bytes.
    let cuts: Vec<_> = (0..random.below(3))
        .map(|_| (random.below(8), random.below(200_000) >> random.one_of(&[0, 0, 6, 12])))
        .collect();

    let cancel = (Cancel::new(), Cancel::new());
    let network = Network::new(seed);
    let address: Address = if on_sockets { "127.0.0.1:0".into() } else { (&network.port("destination")).into() };
    let devices = some_devices(&mut random);
    // The same seeds as without it, and the connection is dialled again in one half of them. A side that was killed is never reached.
    let retry = match what {
        _ if seed.is_multiple_of(2) => Duration::ZERO,
        What::KillSource | What::KillDestination => Duration::from_millis(200),
        _ => Duration::from_secs(3),
    };
    let destination_listens = Destination::new(destination.ram()).linger(Duration::from_millis(300)).retry(retry);
    let destination_listens = devices.at_destination(destination_listens).device_queue(1 << 20);
    let listening = destination_listens.listen(address, &Security::Insecure).unwrap();
    let fence = listening.fence();
    let (address, wire) = if on_sockets {
        let relay = Relay::start(listening.address().to_string().parse().unwrap(), cuts);
        (Address::from(relay.address()), Wire::Sockets(relay))
    } else {
        let cut = |faults: Faults, (number, bytes)| {
            let direction = if bytes % 2 == 0 { Direction::Forth } else { Direction::Back };
            faults.cut(Which::all().number(number), direction, bytes)
        };
        let mut faults = cuts.into_iter().fold(Faults::new(), cut);
        if random.percent(10) {
            faults = faults.refuse(Which::all().number(random.below(6)));
        }
        network.faults(faults);
        (listening.address().clone(), Wire::Simulated(network))
    };

    let troublemaker = Arc::new(Troublemaker {
        trouble,
        moments: AtomicU64::new(0),
        wire,
        source: from.life(),
        destination: to.life(),
        cancel: cancel.clone(),
        done: AtomicBool::new(false),
    });
    let called = |troublemaker: &Arc<Troublemaker>| {
        let troublemaker = Arc::clone(troublemaker);
        Some(Box::new(move |_: &'static str| troublemaker.moment()) as Box<dyn Fn(&'static str) + Send>)
    };
    (from.on_call, to.on_call) = (called(&troublemaker), called(&troublemaker));

    let method = random.one_of(&["none", "lz4", "zstd"]);
    // A prepared destination that was not reached waits for an operator, who is not here. A killed one is never reached.
    let (reporting_abort, delivery) = if what == What::KillDestination { (200, 2_000) } else { (10_000, 20_000) };
    let limits = TimeLimits::default()
        .reporting_abort(Duration::from_millis(reporting_abort))
        .delivery(Duration::from_millis(delivery))
        .retry(retry)
        .dial_pause(Duration::from_millis(5));
    let answer = if post_copy { NotConverging::PostCopyAfter(1 + random.below(2) as u32) } else { NotConverging::GoOn };
    let device_channels = match random.below(4) {
        0 => DeviceChannels::Serial,
        1 => DeviceChannels::Own(1 + random.below(3) as u16),
        _ => DeviceChannels::Mixed,
    };
    let mut migration = devices
        .at_source(Source::new(source.ram(), Box::new(log)))
        .device_channels(device_channels)
        .channels(1 + random.below(3) as u16)
        .method(method.parse().unwrap())
        .checksums(!random.percent(25))
        .downtime(if post_copy { Duration::from_micros(1) } else { Duration::from_millis(300) })
        .when_not_converging(answer)
        .time_limits(limits);

    let (sent, received) = std::thread::scope(|scope| {
        let (to, observer_there, cancel_there) = (&mut to, Arc::clone(&troublemaker), &cancel.1);
        let (ended, has_ended) = mpsc::channel::<()>();
        let receiving = scope.spawn(move || {
            // Dropped at the end, also by a panic.
            let _ended = ended;
            listening.run(to, cancel_there, &*observer_there)
        });
        let sent = migration.run(address, &Security::Insecure, &mut from, &cancel.0, &*troublemaker);
        end_receiving(&sent, &troublemaker, &fence, &receiving);
        if has_ended.recv_timeout(MAX_WAIT) == Err(RecvTimeoutError::Timeout) {
            // Neither a panic nor a captured line: the scope would wait for the destination for ever.
            let trouble = troublemaker.trouble;
            let _ = writeln!(
                io::stderr(),
                "the destination does not end: seed {seed:#x}, {trouble:?}, post-copy {post_copy}, source: {sent:?}"
            );
            std::process::abort();
        }
        (sent, receiving.join().unwrap())
    });
    let lacks_memory = received.as_ref().is_err_and(|error| error.guest == GuestState::LacksMemory);
    if lacks_memory {
        // The source was cancelled while the two were disconnected, which the user accepts.
        assert!(troublemaker.trouble.what == What::CancelSource || to.life().is_dead(), "{sent:?}; {received:?}");
        to.life().kill();
    }
    if let Ok(sent) = &sent {
        ends.interruptions.fetch_add(sent.interruptions, Ordering::Relaxed);
    }
    judge(&sent, &received, &troublemaker, &running, (&from.life(), &to.life()), ends);
    if to.called.contains(&"start") {
        assert!(devices.all_whole(), "{:?}", troublemaker.trouble);
    }
    to.stop();
    if let Some(behind) = behind {
        assert_eq!(behind.wrong.load(Ordering::Relaxed), 0, "the guest read what it never had");
        if let Ok(sent) = &sent {
            assert_eq!(behind.differing_pages(&destination), 0);
            ends.post_copies.fetch_add(1, Ordering::Relaxed);
            let reconnected = sent.post_copy.map_or(0, |report| report.reconnected);
            ends.reconnected.fetch_add(reconnected, Ordering::Relaxed);
        }
    }
}

/// Ends the destination after the source: a destination that waits for the source is fenced, as by an operator.
fn end_receiving<T>(
    sent: &Sent,
    troublemaker: &Troublemaker,
    fence: &Fence,
    receiving: &std::thread::ScopedJoinHandle<'_, T>,
) {
    if sent.is_ok() {
        return;
    }
    // A destination without a migration waits for another source.
    troublemaker.cancel.1.cancel();
    // Its process ends, and so does its part of the guest's memory.
    let given_away = sent
        .as_ref()
        .is_err_and(|error| matches!(error.guest, GuestState::LacksMemory | GuestState::BelongsToDestination));
    let source_is_gone = given_away || troublemaker.source.is_dead() || troublemaker.destination.is_dead();
    if source_is_gone && !receiving.is_finished() {
        fence.source_is_gone();
    }
}

fn judge(
    sent: &Sent,
    received: &Received,
    troublemaker: &Troublemaker,
    running: &Running,
    (source, destination): (&Life, &Life),
    ends: &Ends,
) {
    let details = format!("{:?}: source: {sent:?}; destination: {received:?}", troublemaker.trouble);
    assert!(!running.ever_twice(), "the guest ran twice: {details}");
    for error in [sent.as_ref().err(), received.as_ref().err()].into_iter().flatten() {
        assert!(!error.reason.is_empty() && error.to_string().contains(" at the "), "{details}");
    }
    let killed = source.is_dead() || destination.is_dead();
    match (source.runs(), destination.runs()) {
        (true, false) => {
            ends.stayed.fetch_add(1, Ordering::Relaxed);
            let error = sent.as_ref().expect_err("the guest runs at the source");
            let untouched = [GuestState::RunsAtSource, GuestState::Untouched].contains(&error.guest);
            assert!(untouched && received.is_err(), "{details}");
        }
        (false, true) => {
            ends.moved.fetch_add(1, Ordering::Relaxed);
            assert!(received.is_ok(), "{details}");
            let given_away = [GuestState::BelongsToDestination, GuestState::LacksMemory];
            let unconfirmed = sent.as_ref().is_err_and(|error| given_away.contains(&error.guest));
            assert!(sent.is_ok() || unconfirmed || source.is_dead(), "{details}");
            ends.unconfirmed.fetch_add(u32::from(unconfirmed), Ordering::Relaxed);
        }
        (false, false) => {
            ends.lost.fetch_add(1, Ordering::Relaxed);
            assert!(killed, "no monitor was killed, and the guest runs nowhere: {details}");
        }
        (true, true) => panic!("the guest runs on both sides: {details}"),
    }
}

/// Runs migrations on several threads; a failure names its seed.
fn run(migrations: u64, on_sockets: bool) {
    if let Ok(seed) = std::env::var("STERNA_MIGRATION") {
        let seed = u64::from_str_radix(seed.trim_start_matches("0x"), 16).expect("a seed, as a failure names it");
        return one(seed, on_sockets, &Ends::default());
    }
    let seed = from_environment("STERNA_SEED", 1);
    let migrations = from_environment("STERNA_MIGRATIONS", migrations);
    println!("seed {seed}, {migrations} migrations");
    let (next, ends) = (AtomicU64::new(0), Ends::default());
    std::thread::scope(|scope| {
        let work = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= migrations {
                    return;
                }
                let seed = Random::new(seed.wrapping_mul(1_000_003).wrapping_add(number)).next_u64();
                let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| one(seed, on_sockets, &ends)));
                if let Err(panic) = outcome {
                    println!("failed: migration {number}, its seed {seed:#x}");
                    std::panic::resume_unwind(panic);
                }
            }
        };
        (0..CONCURRENT).for_each(|_| drop(scope.spawn(work)));
    });
    println!("{ends:?}");
    // Every kind of outcome must occur, or the test shows less than it claims.
    if migrations >= 50 {
        assert!(ends.moved.load(Ordering::Relaxed) > 0 && ends.stayed.load(Ordering::Relaxed) > 0, "{ends:?}");
        assert!(
            ends.interruptions.load(Ordering::Relaxed) > 0,
            "no migration went on after a lost connection: {ends:?}"
        );
    }
}

#[test]
fn with_any_fault_on_a_simulated_network_one_guest_runs_on_its_own_memory() {
    run(4 * MIGRATIONS, false);
}

#[test]
fn with_any_fault_on_sockets_one_guest_runs_on_its_own_memory() {
    run(MIGRATIONS, true);
}

mod soak {
    use super::*;

    #[test]
    fn with_any_of_many_faults_on_a_simulated_network_one_guest_runs_on_its_own_memory() {
        run(20 * MIGRATIONS, false);
    }

    #[test]
    fn with_any_of_many_faults_on_sockets_one_guest_runs_on_its_own_memory() {
        run(4 * MIGRATIONS, true);
    }
}
