//! Complete migrations with the software model of DSA as accelerator: every fault of a device, and a guest that writes
//! all the time. Whatever the device does, the migration succeeds and memory is equal.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload, both_sides, monitors};
use crate::moving::{DEDICATED, SHARED, SMALL, done_by, dsa, has_silence, migrate_seen, migrate_with, offload_of};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::migration::ErrorKind;
use sterna_engine::report::{Observer, Progress};
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Fifo, Grant, Share};
use sterna_offload::trace::Trace;
use sterna_offload::{Kind, Nanos, Offload, OffloadReport, Operation, Recheck, Settings, Shares};
use tempfile::NamedTempFile;

/// A name, the faults, and whether they must take the device out of service.
const TROUBLES: &[(&str, &str, Option<bool>)] = &[
    ("nothing", "[]", Some(false)),
    ("pages that are not there", r#"[{"every":3,"what":{"page_fault":{"per_mille":0}}}]"#, Some(false)),
    ("pages that go in the middle", r#"[{"every":5,"what":{"page_fault":{"per_mille":500}}}]"#, Some(false)),
    ("all pages gone", r#"[{"what":{"page_fault":{"per_mille":0}}}]"#, None),
    ("wrong zero maps", r#"[{"opcode":6,"per_mille":20,"what":"wrong_result"}]"#, None),
    ("wrong copies", r#"[{"opcode":17,"per_mille":100,"what":"wrong_result"}]"#, Some(true)),
    ("wrong records", r#"[{"per_mille":10,"what":{"status":{"code":16}}}]"#, None),
    ("hardware errors", r#"[{"nth":40,"what":{"status":{"code":32}}}]"#, None),
    ("halt", r#"[{"nth":60,"what":"halt"}]"#, Some(true)),
    ("hang", r#"[{"nth":60,"what":"hang"}]"#, None),
    ("lost completion", r#"[{"nth":50,"what":"drop_completion"}]"#, None),
    ("late completions", r#"[{"per_mille":50,"what":{"late":{"delay_ns":2000000}}}]"#, None),
    ("slow", r#"[{"what":{"slow":{"factor":50}}}]"#, Some(false)),
];

const WRITES: Workload = Workload { writers: 2, span: 500, seed: 7, burst: 40 };

fn offload(queue: &str, faults: &str, seed: u64) -> Arc<Offload> {
    let mut settings = Settings::default();
    // The documents list the faults that are not detected; this test shows that checked results are.
    settings.recheck = Recheck::All;
    offload_with(queue, faults, seed, settings)
}

fn offload_with(queue: &str, faults: &str, seed: u64, settings: Settings) -> Arc<Offload> {
    offload_of(&dsa(queue), faults, seed, settings)
}

fn done_by_device(report: &OffloadReport, operation: Operation) -> u64 {
    done_by(report, Kind::Dsa, operation)
}

/// Moves a guest that writes, and returns the accelerator's report.
fn migrate(what: &str, offload: &Arc<Offload>, settings: impl FnOnce(Source) -> Source) -> OffloadReport {
    migrate_with(what, offload, WRITES, settings)
}

/// Runs every fault on one kind of queue.
fn with_each_fault(kind: &str, queue: &str) {
    for (seed, (what, faults, taken_out)) in TROUBLES.iter().enumerate() {
        let what = format!("{what}, {kind}");
        let offload = offload(queue, faults, seed as u64);
        let report = migrate(&what, &offload, |source| source);
        // A device that may be silent is given up soon: on a busy machine before it has done anything.
        let given_up = has_silence(faults) && !report.taken_out.is_empty();
        assert!(given_up || done_by_device(&report, Operation::ZeroMap) > 0, "{what}: {report:?}");
        if let Some(expected) = taken_out {
            assert_eq!(!report.taken_out.is_empty(), *expected, "{what}: {report:?}");
        }
    }
}

#[test]
fn with_any_device_fault_on_a_shared_queue_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault("shared", SHARED));
}

#[test]
fn with_any_device_fault_on_a_dedicated_queue_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault("dedicated", DEDICATED));
}

#[test]
fn with_any_device_fault_on_a_small_queue_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault("small", SMALL));
}

#[test]
fn every_method_of_sending_pages_uses_the_devices_results() {
    within_a_minute(|| {
        for (method, checksums) in [("none", true), ("none", false), ("lz4", true), ("zstd", false)] {
            let what = format!("{method}, checksums {checksums}");
            let offload = offload(SHARED, TROUBLES[1].1, 1);
            let choice = method.parse().unwrap();
            let report = migrate(&what, &offload, |source| source.method(choice).checksums(checksums).channels(3));
            let copy = if checksums { Operation::CopyChecksum } else { Operation::Copy };
            let in_place = method == "none" && !checksums;
            assert_eq!(done_by_device(&report, copy) > 0, !in_place, "{what}: {report:?}");
        }
    });
}

#[test]
fn one_offload_serves_several_guests_at_once_and_one_after_the_other() {
    within_a_minute(|| {
        let offload = offload(SMALL, TROUBLES[2].1, 1);
        for _ in 0..2 {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| migrate("several", &offload, |source| source.bandwidth(Some(200_000_000))));
                }
            });
        }
        let requests = offload.report().requests;
        assert_eq!(requests.made, requests.free, "nothing is left over: {requests:?}");
    });
}

/// The requests for a share: by guest, its weight and its channels.
type Requests = Arc<Mutex<BTreeMap<u32, (u32, Vec<u32>)>>>;

struct RecordingShare(Requests);

impl Share for RecordingShare {
    fn ask(&mut self, ask: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        let mut share_requests = self.0.lock().unwrap();
        let (weight, channels) = share_requests.entry(ask.vm).or_default();
        *weight = ask.weight;
        if !channels.contains(&ask.channel) {
            channels.push(ask.channel);
        }
        Fifo.ask(ask, now)
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        Fifo.done(grant, sojourn, now);
    }

    fn dropped(&mut self, grant: Grant) {
        Fifo.dropped(grant);
    }
}

#[test]
fn each_guest_requests_one_share_for_any_number_of_channels() {
    within_a_minute(|| {
        let share_requests = Requests::default();
        let mut settings = Settings::default();
        let recorded = Arc::clone(&share_requests);
        settings.shares = Shares::new(move |_| Box::new(RecordingShare(Arc::clone(&recorded))));
        let offload = offload_with(SHARED, TROUBLES[0].1, 1, settings);
        std::thread::scope(|scope| {
            for (channels, weight) in [(1, 7), (3, 1000)] {
                let offload = &offload;
                let settings = move |source: Source| source.channels(channels).accelerator_weight(weight);
                scope.spawn(move || migrate("shares", offload, settings));
            }
        });
        let share_requests = share_requests.lock().unwrap();
        let mut guests: Vec<_> = share_requests.values().map(|(weight, channels)| (channels.len(), *weight)).collect();
        guests.sort_unstable();
        assert_eq!(guests, [(1, 7), (3, 1000)], "channels and weight of each guest: {share_requests:?}");
    });
}

#[test]
fn a_weight_that_no_guest_can_have_is_refused_before_anything_is_touched() {
    for weight in [0, 1001, u32::MAX] {
        let memory = Memory::new(1, 1);
        let (mut from, log) = Monitor::new(&memory, &Running::default(), WRITES);
        let mut migration =
            Source::new(memory.ram(), Box::new(log)).method(MethodChoice::default()).accelerator_weight(weight);
        let refused = migration.run("127.0.0.1:1", &Security::Insecure, &mut from, &Cancel::new(), &());
        let reason = refused.unwrap_err().to_string();
        assert!(reason.contains(&weight.to_string()) && reason.contains("between 1 and 1000"), "{reason}");
        assert!(from.called.is_empty());
    }
}

/// Counts the submissions to the two queues when the guest is about to be paused.
struct AtTheStop {
    /// The trace of all submissions.
    trace: NamedTempFile,
    submitted: Mutex<Vec<[usize; 2]>>,
}

impl AtTheStop {
    fn submitted(&self) -> [usize; 2] {
        let trace = std::fs::read_to_string(self.trace.path()).unwrap();
        let submissions = |queue| {
            let to_it = |line: &&str| line.starts_with("s ") && line.split(' ').nth(3) == Some(queue);
            trace.lines().filter(to_it).count()
        };
        ["dsa0/wq0.0", "dsa0/wq0.1"].map(submissions)
    }
}

impl Observer for AtTheStop {
    fn progress(&self, _: &Progress) {}

    fn note(&self, text: &str) {
        if text == "stopping the guest" {
            self.submitted.lock().unwrap().push(self.submitted());
        }
    }
}

#[test]
fn only_a_guests_last_pages_use_the_switchovers_queue() {
    within_a_minute(|| {
        let observer = AtTheStop { trace: NamedTempFile::new().unwrap(), submitted: Mutex::default() };
        let mut settings = Settings::default();
        settings.trace = Some(Arc::new(Trace::new(Box::new(observer.trace.reopen().unwrap()))));
        let queues = r#"{"name":"wq0.0","size":24,"max_batch_size":128,"priority":5,"label":"sterna-bulk"},
            {"name":"wq0.1","size":8,"max_batch_size":128,"priority":15,"label":"sterna-switchover"}"#;
        let offload = offload_with(queues, TROUBLES[0].1, 1, settings);
        migrate_seen("queues", &offload, WRITES, &observer, |source| source);
        let [bulk, switchover] = observer.submitted();
        let stops = observer.submitted.lock().unwrap();
        assert!(bulk > 0 && switchover > 0, "{bulk}, {switchover}");
        assert_eq!(stops[0][1], 0, "before the guest was stopped: {stops:?}");
        assert!(stops[0][0] > 0 && stops[0][0] <= bulk, "{stops:?}, then {bulk}");
    });
}

/// Cancels in the middle of the first round.
struct Cancelling(Cancel);

impl Observer for Cancelling {
    fn progress(&self, progress: &Progress) {
        if progress.wire_bytes > 1 << 20 {
            self.0.cancel();
        }
    }

    fn note(&self, _: &str) {}
}

#[test]
fn a_cancelled_migration_leaves_no_work_with_a_device_and_its_memory_can_be_unmapped() {
    within_a_minute(|| {
        for what in ["nothing", "late completions", "hang", "slow", "halt"] {
            let faults = TROUBLES.iter().find(|(name, ..)| *name == what).unwrap().1;
            let offload = offload(SHARED, faults, 1);
            let (source, destination) = (Memory::new(1500, 700), Memory::new(1500, 700));
            let running = Running::default();
            let (mut from, log, mut to) = monitors([&source, &destination], &running, WRITES);
            for block in 0..2 {
                source.words(block).iter().for_each(|word| word.store(1, std::sync::atomic::Ordering::Relaxed));
            }
            from.start();
            let cancel = Cancel::new();
            let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
            let address = listening.address().clone();
            let mut migration = Source::new(source.ram(), Box::new(log))
                .method(MethodChoice::default())
                .bandwidth(Some(4_000_000))
                .offload(Arc::clone(&offload));
            let cancelling = Cancelling(cancel.clone());
            let (sent, received) = both_sides(listening, &mut to, || {
                migration.run(address, &Security::Insecure, &mut from, &cancel, &cancelling)
            });
            assert!(sent.unwrap_err().kind == ErrorKind::Cancelled && received.is_err() && from.runs(), "{what}");
            let report = offload.report();
            let given_up = has_silence(faults) && !report.taken_out.is_empty();
            assert!(given_up || done_by_device(&report, Operation::ZeroMap) > 0, "{what}: {report:?}");
            // Unmaps the guest's memory. A device that still worked on it would access unmapped memory, or the next
            // mapping.
            drop((from, to, source, destination));
            offload.shutdown();
            let requests = offload.report().requests;
            assert_eq!(requests.made, requests.free + requests.quarantined, "{what}: {requests:?}");
        }
    });
}

#[test]
fn a_small_window_and_a_bandwidth_limit_do_not_stop_what_is_under_way() {
    within_a_minute(|| {
        let offload = offload(SHARED, TROUBLES[0].1, 1);
        let slow = |source: Source| source.bandwidth(Some(20_000_000)).packet_size(4096);
        let calm = Workload { span: 20, burst: 1, ..WRITES };
        let report = migrate_with("small packets", &offload, calm, slow);
        assert!(done_by_device(&report, Operation::ZeroMap) > 0, "{report:?}");
    });
}

/// Between the CPU's samples wrong results of a device are used. Once one is detected, all of the device's results are
/// discarded.
#[test]
fn zero_pages_found_before_a_device_was_refuted_are_read_again() {
    within_a_minute(|| {
        for (what, faults, one_in) in [
            ("always", r#"[{"opcode":6,"what":"wrong_result"}]"#, 64),
            // The first page is in the sample and correct; many unverified results are used until the next sample.
            ("every second time", r#"[{"opcode":6,"every":2,"what":"wrong_result"}]"#, 30),
            // A second request returns the correct result. But the guest's dirty log shows that no thread has written
            // the page.
            ("now and then", r#"[{"opcode":6,"per_mille":20,"what":"wrong_result"}]"#, 1),
        ] {
            for seed in 1..4 {
                let mut settings = Settings::default();
                settings.recheck = Recheck::OneIn(one_in);
                let offload = offload_with(SHARED, faults, seed, settings);
                let report = migrate(what, &offload, |source| source);
                assert!(offload.wrong_results() > 0, "{what}, seed {seed}: {report:?}");
                assert_eq!(report.taken_out.len(), 1, "{what}, seed {seed}: {report:?}");
            }
        }
    });
}

/// If the CPU does not check copies, the destination detects wrong ones.
#[test]
fn wrong_copies_are_refused_by_the_destination_and_the_device_is_taken_out() {
    within_a_minute(|| {
        for method in ["none", "lz4"] {
            let mut settings = Settings::default();
            settings.recheck_copies = false;
            let offload = offload_with(SHARED, r#"[{"opcode":17,"nth":3,"what":"wrong_result"}]"#, 5, settings);
            let choice = method.parse().unwrap();
            let report = migrate(method, &offload, |source| source.method(choice));
            let reasons: Vec<_> = report.taken_out.iter().map(|out| out.reason.as_str()).collect();
            assert_eq!(reasons, ["what it had copied was refused by the destination"], "{method}: {report:?}");
        }
    });
}
