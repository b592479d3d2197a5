//! Random kills of any of the four processes of a migration, in both modes, at any moment. The two guests never run at
//! the same time, and nothing is corrupted; exactly one guest runs in the end, unless the killed QEMU had the only
//! copy. The same holds for processes that are stopped for a while (SIGSTOP), after which exactly one guest always
//! runs.
//!
//! `STERNA_KILLS=200` for the full proof; `STERNA_SEED=…` repeats a run. `STERNA_STOPS=40 STERNA_STOPPED=30` stops 40
//! processes for 30 seconds each.

use std::sync::Mutex;
use std::time::Duration;

use crate::support::pair::{Pair, eventually};
use crate::support::settle::{Migration, Side, outcome};
use crate::support::{FAILED, LOST, nothing_was_touched};
use sterna_qemu_lab::QemuVersion;
use sterna_test_kit::Random;
use sterna_wire::switchover::{DestinationState, RecordState, SourceState};

/// Number of kills by default, in each mode.
const DEFAULT_KILLS: u64 = 20;
/// Number of processes that are stopped by default, and for how many seconds.
const DEFAULT_STOPS: u64 = 4;
const DEFAULT_STOPPED: u64 = 2;
/// Concurrent cases; most of the time each of them waits.
const WORKERS: u64 = 3;
/// A bandwidth at which a migration of the 100 MiB takes about as long as [`last_moment`].
const BANDWIDTH: &[&str] = &["--bandwidth", "150MB/s", "--method", "none"];
/// Returns the last moment after the start of `send` at which a process is killed; some migrations have ended by then.
/// Direct mode sends all of the memory twice, because it is written all the time.
fn last_moment(mode: &str) -> Duration {
    Duration::from_millis(if mode == "direct" { 3000 } else { 1600 })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Send,
    Receive,
    SourceGuest,
    DestinationGuest,
}

/// Makes one kill. Returns how the migration ended.
fn kill(mode: &str, pair: Pair, victim: Victim, moment: Duration) -> Result<String, String> {
    let mut migration = Migration::start_by(mode, pair, BANDWIDTH, None, None);
    // The test kills at a moment, not at an event; a migration may also end earlier.
    eventually(moment, || false);
    match victim {
        Victim::Send | Victim::Receive => {
            let process = if victim == Victim::Send { &mut migration.sender } else { &mut migration.receiver };
            let mut process = process.take().expect("it was started");
            // A migration that has ended by itself needs no recovery, but tolerates it.
            process.kill();
            drop(process);
            migration.settle()?;
            Ok(format!("guest at the {}", migration.exactly_one()?.name()))
        }
        Victim::SourceGuest => {
            migration.pair.source.kill();
            without_source(migration)
        }
        Victim::DestinationGuest => {
            migration.pair.destination.kill();
            without_destination(migration)
        }
    }
}

/// The source QEMU has ended. An operator may start a prepared destination; any other is incomplete.
fn without_source(mut migration: Migration) -> Result<String, String> {
    let (status, _) = migration.sender.take().expect("it was started").finish();
    let decided = matches!(
        Side::Source.state(&migration.pair),
        Some(RecordState::Source(SourceState::Committed | SourceState::Finished))
    );
    let mut receiver = migration.receiver.take().expect("it was started");
    // A receiver that no source reached waits for one.
    let reached = Side::Destination.record(&migration.pair).is_some();
    if !reached {
        receiver.kill();
    }
    let prepared = Some(RecordState::Destination(DestinationState::Prepared));
    // The receiver ends by itself unless it is prepared and its source is gone.
    eventually(LIMIT, || receiver.poll().is_some() || Side::Destination.state(&migration.pair) == prepared);
    if decided {
        receiver.finish();
        return Ok(format!("guest at the {}", migration.exactly_one()?.name()));
    }
    if receiver.poll().is_none() {
        receiver.kill();
        let recovery = Side::Destination.recover(&migration.pair, &["--fenced-peer"], None).ok_or("no record")?;
        let (recovered, _) = recovery.finish();
        if !recovered.success() {
            return Err(format!("recover --fenced-peer at the destination: {recovered}"));
        }
        if migration.exactly_one()? == Side::Source {
            return Err("a dead source runs".into());
        }
        return Ok("guest started at the destination by its operator".into());
    }
    // Before the migration has begun, the source's QEMU is refused as one that does not answer.
    let code = status.code();
    if !([FAILED, LOST].contains(&code) || nothing_was_touched(code)) || migration.pair.destination.runs() {
        return Err(format!("send {status}, destination {:?}", migration.pair.destination.status()));
    }
    Ok("the only copy is gone".into())
}

/// How long a process may take to notice the kill.
const LIMIT: Duration = Duration::from_secs(300);

/// The destination QEMU has ended. The source's guest continues: by itself before the decision, by its operator after
/// it.
fn without_destination(mut migration: Migration) -> Result<String, String> {
    let (_, output) = migration.sender.take().expect("it was started").finish();
    let mut receiver = migration.receiver.take().expect("it was started");
    // A receiver that no source reached waits for one.
    if Side::Destination.record(&migration.pair).is_none() {
        receiver.kill();
    }
    receiver.finish();
    if outcome(&migration.pair.report()).as_deref() == Some("completed") {
        migration.pair.never_both()?;
        // It ran the guest already, and died as any QEMU may.
        return if migration.pair.source.runs() {
            Err(format!("both had it: {output}"))
        } else {
            Ok("the only copy is gone".into())
        };
    }
    if let Some(RecordState::Source(SourceState::Committed)) = Side::Source.state(&migration.pair) {
        if migration.pair.source.runs() {
            return Err("the guest was handed over, and resumed without an operator's consent".into());
        }
        let recovery = Side::Source.recover(&migration.pair, &["--fenced-peer"], None).ok_or("no record")?;
        let (recovered, _) = recovery.finish();
        if !recovered.success() {
            return Err(format!("recover --fenced-peer at the source: {recovered}"));
        }
        migration.exactly_one()?;
        return Ok("guest resumed at the source by its operator".into());
    }
    match migration.exactly_one()? {
        Side::Source => Ok("guest at the source".into()),
        Side::Destination => Err("a dead destination runs".into()),
    }
}

/// Stops one process for `time`, and then continues it. Returns where the guest is.
fn stop(mode: &str, pair: Pair, victim: Victim, moment: Duration, time: Duration) -> Result<String, String> {
    let mut migration = Migration::start_by(mode, pair, BANDWIDTH, None, None);
    eventually(moment, || false);
    let process = match victim {
        Victim::Send => migration.sender.as_ref().expect("it was started").pid(),
        Victim::Receive => migration.receiver.as_ref().expect("it was started").pid(),
        Victim::SourceGuest => migration.pair.source.qemu.pid(),
        Victim::DestinationGuest => migration.pair.destination.qemu.pid(),
    };
    let process = rustix::process::Pid::from_raw(process as i32).expect("a process number");
    // A process that has ended by itself cannot be stopped, and need not be.
    let stopped = rustix::process::kill_process(process, rustix::process::Signal::STOP).is_ok();
    if stopped {
        eventually(time, || false);
        let _ = rustix::process::kill_process(process, rustix::process::Signal::CONT);
    }
    migration.settle()?;
    Ok(format!("guest at the {}", migration.exactly_one()?.name()))
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Does `case` to `count` processes of migrations, at random moments.
fn at_random_moments(
    what: &str,
    count: u64,
    longest: Duration,
    case: impl Fn(Pair, Victim, Duration) -> Result<String, String> + Sync,
) {
    let Some(probe) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    drop(probe);
    let seed = number("STERNA_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 20);
    println!("{what}: STERNA_SEED={seed}, {count} of them");
    let mut random = Random::new(seed);
    let victims = [Victim::Send, Victim::Receive, Victim::SourceGuest, Victim::DestinationGuest];
    let cases: Vec<_> = (0..count)
        .map(|number| {
            let victim = victims[random.below(4) as usize];
            (number, victim, Duration::from_micros(random.below(longest.as_micros() as u64)))
        })
        .collect();
    let (queue, ends) = (Mutex::new(cases.into_iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let Some((number, victim, moment)) = queue.lock().unwrap().next() else { return };
                    let pair = Pair::boot_sector(QemuVersion::V10_0).expect("there were tools before");
                    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(pair, victim, moment)))
                        .unwrap_or_else(|_| Err("the test panicked, see above".into()));
                    ends.lock().unwrap().push((number, victim, moment, end));
                }
            });
        }
    });
    let mut ends = ends.into_inner().unwrap();
    ends.sort_by_key(|end| end.0);
    let mut failed = 0;
    for (number, victim, moment, end) in &ends {
        failed += usize::from(end.is_err());
        println!("{what} {number}: {victim:?} after {moment:?}: {end:?}");
    }
    assert_eq!(failed, 0, "{failed} of {count} failed; STERNA_SEED={seed} repeats them");
    assert_eq!(ends.len() as u64, count);
}

fn kills(mode: &str) {
    let count = number("STERNA_KILLS").unwrap_or(DEFAULT_KILLS);
    at_random_moments("kill", count, last_moment(mode), |pair, victim, moment| kill(mode, pair, victim, moment));
}

fn stops(mode: &str) {
    let count = number("STERNA_STOPS").unwrap_or(DEFAULT_STOPS);
    let time = Duration::from_secs(number("STERNA_STOPPED").unwrap_or(DEFAULT_STOPPED));
    at_random_moments("stop", count, last_moment(mode), |pair, victim, moment| stop(mode, pair, victim, moment, time));
}

#[test]
fn a_kill_of_any_process_at_any_moment_leaves_one_whole_guest() {
    kills("stream");
}

#[test]
fn a_kill_of_any_process_at_any_moment_of_a_direct_migration_leaves_one_whole_guest() {
    kills("direct");
}

#[test]
fn a_process_that_is_stopped_for_a_while_leaves_one_whole_guest() {
    stops("stream");
}

#[test]
fn a_process_that_is_stopped_for_a_while_during_a_direct_migration_leaves_one_whole_guest() {
    stops("direct");
}
