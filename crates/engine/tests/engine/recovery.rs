//! A monitor settles a migration from its records, after the process that ran it has ended. Here the guests outlive that process, or not,
//! as each test chooses; `examples/embedded/tests/recovers.rs` kills real processes.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sterna_engine::cancel::Cancel;
use sterna_engine::migration::{ErrorKind, GuestState, MigrationError, Side};
use sterna_engine::record_file::{RecordFile, now_ms};
use sterna_engine::recovery::{Recovery, Remains, Settled};
use sterna_engine::transport::Security;
use sterna_engine::transport::simulated::Network;
use sterna_engine::vmm::{DestinationVmm, SourceVmm};
use sterna_wire::control::Mode;
use sterna_wire::identity::{MigrationId, MigrationKey};
use sterna_wire::switchover::{DestinationState, RECORD_VERSION, Record, RecordState, SourceAfter, SourceState};

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload};

const CALM: Workload = Workload { writers: 1, span: 10, seed: 1, burst: 8 };

/// Writes a record as a process that died in `state` has left it.
fn left(dir: &Path, state: RecordState, mode: Mode) {
    let record = Record {
        version: RECORD_VERSION,
        migration: MigrationId::from_bytes([1; 16]),
        state,
        fenced_peer: false,
        peer: "there".into(),
        mode,
        monitor_socket: String::new(),
        monitor_process: None,
        settings_before: None,
        completion_permitted: false,
        pausing: true,
        disputed: None,
        does_not_run: None,
        source_after: SourceAfter::Keep,
        key: MigrationKey::from_bytes([2; 32]),
        pid: 0,
        created_ms: now_ms(),
        updated_ms: now_ms(),
    };
    RecordFile::create(dir, record).unwrap().write(state).unwrap();
}

/// Both sides after the death of both processes.
struct Sides {
    directory: tempfile::TempDir,
    network: Network,
    running: Running,
    from: Monitor,
    to: Monitor,
}

impl Sides {
    fn new(source: SourceState, destination: DestinationState) -> Self {
        let directory = tempfile::tempdir().unwrap();
        left(directory.path(), RecordState::Source(source), Mode::Embedded);
        left(directory.path(), RecordState::Destination(destination), Mode::Embedded);
        let running = Running::default();
        let monitor = || Monitor::new(&Memory::new(10, 10), &running, CALM).0;
        let (from, to) = (monitor(), monitor());
        Self { directory, network: Network::new(1), running, from, to }
    }

    /// Returns the record of a side, to be settled.
    fn record(&self, side: Side) -> Recovery {
        let all = Recovery::unsettled(self.directory.path()).unwrap();
        let of_side = all.into_iter().find(|recovery| recovery.side() == side);
        of_side.expect("it is unsettled").at(self.network.port("there"))
    }

    fn is_settled(&self) -> bool {
        Recovery::unsettled(self.directory.path()).unwrap().is_empty()
    }

    /// Settles both sides at the same time.
    #[track_caller]
    fn settle(&mut self, left: (bool, bool)) -> [Result<Settled, MigrationError>; 2] {
        let (source, destination) = (self.record(Side::Source), self.record(Side::Destination));
        let (from, to) = (&mut self.from, &mut self.to);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || {
                let guest = if left.1 { Remains::Paused(to as &mut dyn DestinationVmm) } else { Remains::Nothing };
                destination.settle_destination(&Security::Insecure, guest, &Cancel::new(), &())
            });
            let guest = if left.0 { Remains::Paused(from as &mut dyn SourceVmm) } else { Remains::Nothing };
            let source = source.settle_source(&Security::Insecure, guest, &Cancel::new(), &());
            [source, waiting.join().unwrap()]
        })
    }

    fn fenced_source(&mut self) -> Result<Settled, MigrationError> {
        let record = self.record(Side::Source).fenced_peer(true);
        let guest = Remains::Paused(&mut self.from as &mut dyn SourceVmm);
        record.settle_source(&Security::Insecure, guest, &Cancel::new(), &())
    }

    #[track_caller]
    fn runs(&self, at_source: bool, at_destination: bool) {
        assert_eq!((self.from.runs(), self.to.runs()), (at_source, at_destination));
        assert!(!self.running.ever_twice());
    }
}

#[test]
fn a_decided_migration_is_completed_by_both_sides() {
    within_a_minute(|| {
        for source_left in [true, false] {
            let mut sides = Sides::new(SourceState::Committed, DestinationState::Prepared);
            let [source, destination] = sides.settle((source_left, true));
            assert_eq!(source.unwrap(), Settled::RunsAtDestination);
            assert_eq!(destination.unwrap(), Settled::RunsAtDestination);
            sides.runs(false, true);
            assert!(sides.is_settled());
        }
    });
}

#[test]
fn a_destination_whose_claim_the_source_disputed_is_not_asked_again() {
    within_a_minute(|| {
        let mut sides = Sides::new(SourceState::Committed, DestinationState::Running);
        let id = MigrationId::from_bytes([1; 16]);
        let dispute = |directory: &Path| {
            let mut record = RecordFile::open(directory, id, sterna_engine::record_file::Side::Source).unwrap();
            record.amend(|record| record.disputed = Some("it claims to have all".into()));
            record.write(RecordState::Source(SourceState::Committed)).unwrap();
        };
        dispute(sides.directory.path());
        // Nothing listens there, and nothing is dialled.
        let source = sides.record(Side::Source);
        let guest = Remains::Paused(&mut sides.from as &mut dyn SourceVmm);
        let error = source.settle_source(&Security::Insecure, guest, &Cancel::new(), &()).unwrap_err();
        assert_eq!((error.guest, &*error.reason), (GuestState::LacksMemory, "it claims to have all"));
        assert!(sides.from.called.is_empty(), "{:?}", sides.from.called);
        assert!(!sides.is_settled());
        // Only an operator who asserts that the guest there cannot run has the copy here resumed.
        assert_eq!(sides.fenced_source().unwrap(), Settled::RunsAtSource);
        sides.runs(true, false);
    });
}

#[test]
fn an_undecided_migration_is_undone_and_the_copy_discarded() {
    within_a_minute(|| {
        let mut sides = Sides::new(SourceState::Started, DestinationState::Prepared);
        let [source, destination] = sides.settle((true, true));
        assert_eq!(source.unwrap(), Settled::RunsAtSource);
        assert_eq!(destination.unwrap(), Settled::NothingHere);
        sides.runs(true, false);
    });
}

#[test]
fn a_source_that_gave_its_guest_to_a_destination_that_lost_it_resumes_it_when_told_so() {
    within_a_minute(|| {
        for (state, ran) in [(DestinationState::Prepared, "never ran"), (DestinationState::Committed, "may have run")] {
            let mut sides = Sides::new(SourceState::Committed, state);
            let [source, destination] = sides.settle((true, false));
            let refused = source.unwrap_err();
            assert_eq!((refused.side, refused.guest), (Side::Source, GuestState::BelongsToDestination));
            assert!(refused.reason.contains(ran), "{refused}");
            match state {
                DestinationState::Prepared => assert_eq!(destination.unwrap(), Settled::NothingHere),
                _ => assert_eq!(destination.unwrap_err().guest, GuestState::NotHere),
            }
            sides.runs(false, false);

            assert_eq!(sides.fenced_source().unwrap(), Settled::RunsAtSource);
            sides.runs(true, false);
        }
    });
}

#[test]
fn a_destination_whose_source_is_gone_waits_until_it_is_told_so() {
    within_a_minute(|| {
        let mut sides = Sides::new(SourceState::Started, DestinationState::Prepared);
        let source = sides.record(Side::Source);
        let gone = source.settle_source(&Security::Insecure, Remains::Nothing, &Cancel::new(), &());
        assert_eq!(gone.unwrap(), Settled::NothingHere);

        let settle = |record: Recovery, to: &mut Monitor| {
            let guest = Remains::Paused(to as &mut dyn DestinationVmm);
            record.settle_destination(&Security::Insecure, guest, &Cancel::new(), &())
        };
        let brief = sides.record(Side::Destination).give_up_after(Some(Duration::from_millis(10)));
        let waited = settle(brief, &mut sides.to).unwrap_err();
        assert_eq!((waited.side, waited.guest), (Side::Destination, GuestState::PausedAtDestination));
        assert!(waited.reason.contains("nothing is settled yet"), "{waited}");
        sides.runs(false, false);

        let fenced = sides.record(Side::Destination).fenced_peer(true);
        assert_eq!(settle(fenced, &mut sides.to).unwrap(), Settled::RunsAtDestination);
        sides.runs(false, true);
        assert!(sides.is_settled());
    });
}

#[test]
fn a_guest_that_was_started_by_hand_is_reported_and_not_touched() {
    within_a_minute(|| {
        let mut sides = Sides::new(SourceState::Committed, DestinationState::Prepared);
        sides.from.start();
        let record = sides.record(Side::Source);
        let guest = Remains::Running(&mut sides.from as &mut dyn SourceVmm);
        let conflict = record.settle_source(&Security::Insecure, guest, &Cancel::new(), &()).unwrap_err();
        assert_eq!(conflict.guest, GuestState::RunsTwice);
        assert!(sides.from.called.is_empty(), "{:?}", sides.from.called);
    });
}

#[test]
fn a_recovery_can_be_cancelled_repeated_and_is_alone_with_its_record() {
    within_a_minute(|| {
        let mut sides = Sides::new(SourceState::Committed, DestinationState::Prepared);
        let first = sides.record(Side::Destination);
        assert!(Recovery::unsettled(sides.directory.path()).unwrap().iter().all(|other| other.side() == Side::Source));
        assert_eq!(first.migration(), MigrationId::from_bytes([1; 16]).to_string());
        let cancel = Arc::new(Cancel::new());
        cancel.cancel();
        let guest = Remains::Paused(&mut sides.to as &mut dyn DestinationVmm);
        let cancelled = first.settle_destination(&Security::Insecure, guest, &cancel, &()).unwrap_err();
        assert_eq!((cancelled.kind, cancelled.guest), (ErrorKind::Cancelled, GuestState::PausedAtDestination));

        let [source, destination] = sides.settle((true, true));
        assert_eq!((source.unwrap(), destination.unwrap()), (Settled::RunsAtDestination, Settled::RunsAtDestination));
        sides.runs(false, true);
    });
}

#[test]
fn records_of_other_monitors_are_left_to_their_programs_and_sides_are_not_mixed_up() {
    let directory = tempfile::tempdir().unwrap();
    left(directory.path(), RecordState::Source(SourceState::Committed), Mode::Direct);
    assert!(Recovery::unsettled(directory.path()).unwrap().is_empty());
    assert!(Recovery::unsettled(directory.path().join("missing")).unwrap().is_empty());

    let sides = Sides::new(SourceState::Committed, DestinationState::Prepared);
    let record = sides.record(Side::Source);
    let refused = record.settle_destination(&Security::Insecure, Remains::Nothing, &Cancel::new(), &()).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Settings);
    assert!(refused.reason.contains("use settle_source"), "{refused}");
}
