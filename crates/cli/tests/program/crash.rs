//! Every named crash point of the switchover, of either sterna, in either mode: the process dies there as by SIGKILL,
//! while the other sterna and both real QEMUs continue. Then `sterna recover` runs on its host. The guests never run at
//! the same time; in the end exactly one runs, its memory is intact, and nothing that tracked its writes is left in
//! QEMU.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::support::pair::Pair;
use crate::support::settle::{Migration, Side, killed};
use sterna_qemu_lab::QemuVersion;
use sterna_wire::switchover::{CrashPoint, RecordState, SourceState, Step};

/// Concurrent cases of a test; each mostly waits.
const WORKERS: usize = 2;
/// In so many tests the points of a mode are passed, so that none of them takes minutes.
const PARTS: usize = 4;
/// So slow that a migration is certainly active when it is cancelled.
const SLOW: &[&str] = &["--bandwidth", "20MB/s", "--method", "none", "--downtime", "2s"];

/// How a migration reaches a crash point.
#[derive(Clone, Copy, Debug)]
enum Scenario {
    /// By an undisturbed migration.
    Migration,
    /// By a migration that is cancelled at the point's own side.
    Cancelled,
    /// By `recover` of the point's side, after its migration crashed at the point of this name.
    Recovery(&'static str),
    /// By a recovery as in [`Scenario::Recovery`], after the destination's QEMU was killed.
    RecoveryWithoutQemu(&'static str),
    /// By a recovery as in [`Scenario::Recovery`], after the source's QEMU was killed.
    RecoveryWithoutSource(&'static str),
    /// In post-copy only, where the guest may be lost: `post_copy.rs` has these.
    PostCopy,
}

/// Returns the scenario that reaches a step, the same in both modes: the library's drivers of direct mode use the same
/// state machine as those of QEMU's stream, and pass all of its steps. A new step without a scenario does not compile.
fn scenario(step: Step) -> Scenario {
    use Step::*;
    match step {
        SourceRecordStarted
        | SourceStartMigration
        | SourceSendPrepare
        | SourceRelayShut
        | SourceRecordCommitted
        | SourceSendCommit
        | SourceEndGuest
        | SourceRecordFinished => Scenario::Migration,
        SourceRecordAborted | SourceEndMigration | SourceSendAbort | SourceRecordResumed => Scenario::Cancelled,
        // QEMU completed and the decision was not written: `recover` takes the guest back.
        SourceCont | SourceSendOutcomeAborted => Scenario::Recovery("source.before-record-committed"),
        // The destination is prepared and holds the only copy.
        SourceRecordGone => Scenario::RecoveryWithoutSource("source.before-record-committed"),
        SourceSendOutcomeCommitted => Scenario::Recovery("source.after-record-committed"),
        DestinationRecordStarted
        | DestinationClearAutostart
        | DestinationAcceptStream
        | DestinationRecordPrepared
        | DestinationSendPrepared
        | DestinationRecordCommitted
        | DestinationCont
        | DestinationRecordRunning
        | DestinationSendRunning => Scenario::Migration,
        DestinationRecordAborted | DestinationQuit | DestinationSendAbort => Scenario::Cancelled,
        DestinationAskOutcome => Scenario::Recovery("destination.after-record-prepared"),
        DestinationSendLost => Scenario::RecoveryWithoutQemu("destination.after-record-committed"),
        SourceSendPostCopy
        | SourceStartPostCopy
        | SourceServePages
        | SourceSendMemoryLost
        | DestinationWatchMissingPages
        | DestinationSendPostCopyReady
        | DestinationRecordPreparedIncomplete
        | DestinationRecordCommittedIncomplete
        | DestinationRecordRunningIncomplete
        | DestinationSendRunningIncomplete
        | DestinationRenewChannels
        | DestinationSendMemoryLost => Scenario::PostCopy,
    }
}

fn side(point: CrashPoint) -> Side {
    if point.to_string().starts_with("source.") { Side::Source } else { Side::Destination }
}

fn start(mode: &str, pair: Pair, words: &[&str], side: Side, fault: &str) -> Migration {
    let (source, destination) = match side {
        Side::Source => (Some(fault), None),
        Side::Destination => (None, Some(fault)),
    };
    Migration::start_by(mode, pair, words, source, destination)
}

/// Crashes at `point`, and recovers. Returns the side that runs the guest in the end.
fn case(mode: &str, pair: Pair, point: CrashPoint) -> Result<Side, String> {
    let crashing = side(point);
    let fault = format!("{point}:crash");
    let settings = pair.source.migration_settings();
    let mut migration;
    match scenario(point.step) {
        Scenario::Migration => {
            migration = start(mode, pair, &[], crashing, &fault);
            migration.wait_crash(crashing)?;
        }
        Scenario::Cancelled => {
            migration = start(mode, pair, SLOW, crashing, &fault);
            let (Some(sender), Some(receiver)) = (&migration.sender, &migration.receiver) else { unreachable!() };
            sender.wait_for("placement: ");
            if crashing == Side::Source {
                sender.interrupt();
            } else {
                receiver.interrupt();
            }
            migration.wait_crash(crashing)?;
        }
        Scenario::Recovery(first) => {
            migration = start(mode, pair, &[], crashing, &format!("{first}:crash"));
            migration.wait_crash(crashing)?;
            let recovery = crashing.recover(&migration.pair, &[], Some(&fault)).ok_or("no record was left")?;
            killed(recovery.finish().0)?;
        }
        Scenario::RecoveryWithoutQemu(first) => {
            migration = start(mode, pair, &[], crashing, &format!("{first}:crash"));
            migration.wait_crash(crashing)?;
            migration.pair.destination.kill();
            let recovery = crashing.recover(&migration.pair, &[], Some(&fault)).ok_or("no record was left")?;
            killed(recovery.finish().0)?;
            return without_qemu(migration);
        }
        Scenario::RecoveryWithoutSource(first) => {
            migration = start(mode, pair, &[], crashing, &format!("{first}:crash"));
            migration.wait_crash(crashing)?;
            migration.pair.source.kill();
            let recovery = crashing.recover(&migration.pair, &[], Some(&fault)).ok_or("no record was left")?;
            killed(recovery.finish().0)?;
            return without_source(migration);
        }
        Scenario::PostCopy => return Err("this point is passed in post-copy only".into()),
    }
    migration.pair.never_both()?;
    migration.settle()?;
    let side = migration.exactly_one()?;
    if side == Side::Source && migration.pair.source.migration_settings() != settings {
        return Err("QEMU's migration settings are not as they were".into());
    }
    if side == Side::Destination && migration.pair.source.status().is_some() {
        return Err("the source's QEMU still holds the guest that runs at the destination".into());
    }
    if let Some(record) = crashing.record(&migration.pair) {
        let left = std::env::temp_dir().join(format!("sterna-held-{}-{}", record.migration, crashing.name()));
        if left.exists() {
            return Err(format!("{} was left", left.display()));
        }
    }
    Ok(side)
}

/// The guest belongs to a destination whose QEMU has ended: no side may start it by itself, but an operator does.
fn without_qemu(mut migration: Migration) -> Result<Side, String> {
    let settled = migration.settle();
    if settled.is_ok() || migration.pair.source.runs() {
        return Err("the guest was handed over, and resumed without an operator's consent".into());
    }
    let recovery = Side::Source.recover(&migration.pair, &["--fenced-peer"], None).ok_or("no record was left")?;
    let (status, _) = recovery.finish();
    if !status.success() {
        return Err(format!("recover --fenced-peer: {status}"));
    }
    migration.exactly_one()
}

/// The source QEMU has ended before the decision: its record is settled, and an operator starts the only copy.
fn without_source(mut migration: Migration) -> Result<Side, String> {
    let recovery = Side::Source.recover(&migration.pair, &[], None).ok_or("no record was left")?;
    let (status, _) = recovery.finish();
    let state = Side::Source.state(&migration.pair);
    if !status.success() || state != Some(RecordState::Source(SourceState::Gone)) {
        return Err(format!("recover without a QEMU: {status}, the record is {state:?}"));
    }
    migration.receiver.take().expect("it waits for its source").kill();
    let recovery = Side::Destination.recover(&migration.pair, &["--fenced-peer"], None).ok_or("no record was left")?;
    let (status, _) = recovery.finish();
    if !status.success() {
        return Err(format!("recover --fenced-peer at the destination: {status}"));
    }
    migration.exactly_one()
}

macro_rules! after_a_crash_exactly_one_guest_runs_and_is_whole {
    ($($name:ident: $mode:literal $part:literal;)*) => {$(
        #[test]
        fn $name() {
            table($mode, $part);
        }
    )*};
}

after_a_crash_exactly_one_guest_runs_and_is_whole! {
    after_a_crash_in_the_stream_exactly_one_guest_runs_and_is_whole_0: "stream" 0;
    after_a_crash_in_the_stream_exactly_one_guest_runs_and_is_whole_1: "stream" 1;
    after_a_crash_in_the_stream_exactly_one_guest_runs_and_is_whole_2: "stream" 2;
    after_a_crash_in_the_stream_exactly_one_guest_runs_and_is_whole_3: "stream" 3;
    after_a_crash_in_direct_mode_exactly_one_guest_runs_and_is_whole_0: "direct" 0;
    after_a_crash_in_direct_mode_exactly_one_guest_runs_and_is_whole_1: "direct" 1;
    after_a_crash_in_direct_mode_exactly_one_guest_runs_and_is_whole_2: "direct" 2;
    after_a_crash_in_direct_mode_exactly_one_guest_runs_and_is_whole_3: "direct" 3;
}

/// Crashes at each point of this part, in migrations of this mode.
fn table(mode: &str, part: usize) {
    assert!(part < PARTS);
    let Some(probe) = Pair::boot_sector(QemuVersion::V10_0) else { return };
    drop(probe);
    // Runs a single case: STERNA_CRASH_POINT=source.before-cont.
    let wanted = std::env::var("STERNA_CRASH_POINT").ok();
    let points: Vec<_> = CrashPoint::ALL.iter().skip(part).step_by(PARTS).collect();
    let chosen = points.iter().filter(|point| wanted.as_ref().is_none_or(|name| *name == point.to_string()));
    let queue = Mutex::new(chosen);
    let ends = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let Some(point) = queue.lock().unwrap().next() else { return };
                    let pair = Pair::boot_sector(QemuVersion::V10_0).expect("there were tools before");
                    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(mode, pair, **point)))
                        .unwrap_or_else(|_| Err("the test panicked, see above".into()));
                    ends.lock().unwrap().insert(**point, end);
                }
            });
        }
    });
    let ends = ends.into_inner().unwrap();
    for (point, end) in &ends {
        match end {
            Ok(side) => println!("{mode}: {point}: the guest runs at the {}", side.name()),
            Err(error) => println!("{mode}: {point}: FAILED: {error}"),
        }
    }
    let failed: Vec<_> = ends.iter().filter(|(_, end)| end.is_err()).map(|(point, _)| point.to_string()).collect();
    assert!(failed.is_empty(), "{} of {} crash points failed: {failed:?}", failed.len(), ends.len());
    if wanted.is_none() {
        assert_eq!(ends.len(), points.len(), "each point was passed");
        // The decision determines the side.
        for (name, side) in
            [("source.before-record-committed", Side::Source), ("source.after-record-committed", Side::Destination)]
        {
            let end = ends.get(&name.parse::<CrashPoint>().unwrap());
            assert!(end.is_none_or(|end| *end == Ok(side)), "{name}: {end:?}");
        }
    }
}
