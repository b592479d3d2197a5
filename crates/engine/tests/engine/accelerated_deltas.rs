//! Complete migrations that send deltas of pages, with the software model of DSA as accelerator: a device makes the
//! deltas, correct or wrong, while a guest writes its memory. Whatever the device does, the migration succeeds and
//! memory is equal.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::within_a_minute;
use crate::guest::{Memory, Running, Workload, both_sides, monitors};
use crate::moving::{DEDICATED, SHARED, SMALL, done_by, dsa, start};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::destination::Destination;
use sterna_engine::report::Report;
use sterna_engine::source::Source;
use sterna_engine::transport::Security;
use sterna_offload::{Kind, Offload, OffloadReport, Operation, Settings};

const PAGES: [usize; 2] = [700, 300];
/// So few pages that they fit the downtime in any case.
const WRITES: Workload = Workload { writers: 2, span: 60, seed: 3, burst: 40 };

/// Returns settings with long time limits: the model is a hundred times slower than a device, and slower still on a
/// busy machine.
fn patient() -> Settings {
    let mut settings = Settings::default();
    settings.lateness = Duration::from_secs(1);
    settings.patience = Duration::from_secs(60);
    settings
}

fn offload(queue: &str, faults: &str, seed: u64, settings: &Settings) -> Arc<Offload> {
    start(&dsa(queue), faults, seed, settings)
}

/// Moves a guest that writes single words. The destination's monitor compares memory before it starts the guest.
fn migrate(what: &str, offload: &Arc<Offload>, settings: impl FnOnce(Source) -> Source) -> (Report, OffloadReport) {
    let (source, destination) = (Memory::new(PAGES[0], PAGES[1]), Memory::new(PAGES[0], PAGES[1]));
    for block in 0..2 {
        for (at, word) in source.words(block).iter().enumerate() {
            word.store((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Ordering::Relaxed);
        }
    }
    let running = Running::default();
    let (mut from, log, mut to) = monitors([&source, &destination], &running, WRITES);
    // Also if the writers never run meanwhile: writes a word in each of as many pages that were sent before.
    from.last_writes = 120;
    from.start();
    let listening = Destination::new(destination.ram()).listen("127.0.0.1:0", &Security::Insecure).unwrap();
    let address = listening.address().clone();
    let source = Source::new(source.ram(), Box::new(log)).method(MethodChoice::default());
    // Slow enough that there are rounds in which the guest writes what was sent before.
    let source = source.bandwidth(Some(16 << 20)).downtime(Duration::from_secs(1)).delta_cache(64 << 20);
    let mut migration = settings(source.offload(Arc::clone(offload)));
    let (sent, received) =
        both_sides(listening, &mut to, || migration.run(address, &Security::Insecure, &mut from, &Cancel::new(), &()));
    let sent = sent.unwrap_or_else(|error| panic!("{what}: {error}"));
    received.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(to.runs() && !from.runs() && !running.ever_twice(), "{what}");
    let report = offload.report();
    let pages = (sent.normal_pages, sent.delta_pages, sent.same_pages, sent.device_deltas);
    println!("{what}: {pages:?} (normal, deltas, same, of these by device), {:?}", report.taken_out);
    assert!(sent.device_deltas <= sent.delta_pages + sent.same_pages, "{what}: {pages:?}");
    (sent, report)
}

/// Returns the number of deltas that were requested from devices.
fn requested_deltas(report: &OffloadReport) -> u64 {
    done_by(report, Kind::Dsa, Operation::CreateDelta)
}

#[test]
fn the_device_makes_deltas_for_every_method_of_sending_pages() {
    within_a_minute(|| {
        let mut made = 0;
        for (number, (method, channels, checksums)) in
            [("none", 1, true), ("none", 3, false), ("lz4", 2, true), ("zstd", 4, true), ("auto", 2, true)]
                .into_iter()
                .enumerate()
        {
            let mut settings = patient();
            // No delta is late, however busy the machine is.
            settings.lateness = settings.patience;
            let offload = offload([SHARED, DEDICATED, SMALL][number % 3], "[]", 1, &settings);
            let choice = method.parse().unwrap();
            let (sent, report) =
                migrate(method, &offload, |source| source.method(choice).channels(channels).checksums(checksums));
            made += sent.device_deltas;
            assert!(
                requested_deltas(&report) >= sent.device_deltas && report.taken_out.is_empty(),
                "{method}: {report:?}"
            );
            assert_eq!(sent.refused_packets, 0, "{method}");
        }
        // The number of rounds of one migration depends on timing.
        assert!(made > 0);
    });
}

/// A name, the faults in deltas and the copies that they are made for, and whether they take the device out of service.
const TROUBLES: &[(&str, &str, Option<bool>)] = &[
    ("wrong deltas", r#"[{"opcode":7,"what":"wrong_result"}]"#, Some(true)),
    ("a wrong delta now and then", r#"[{"opcode":7,"every":15,"what":"wrong_result"}]"#, Some(true)),
    ("pages that are not there", r#"[{"opcode":7,"every":3,"what":{"page_fault":{"per_mille":0}}}]"#, Some(false)),
    ("pages that go in the middle", r#"[{"opcode":7,"every":5,"what":{"page_fault":{"per_mille":500}}}]"#, Some(false)),
    ("pages of copies that go", r#"[{"opcode":17,"every":3,"what":{"page_fault":{"per_mille":500}}}]"#, Some(false)),
    ("wrong copies", r#"[{"opcode":17,"every":60,"what":"wrong_result"}]"#, Some(true)),
    ("overlaps that are none", r#"[{"opcode":7,"per_mille":100,"what":{"status":{"code":22}}}]"#, None),
    ("hardware errors", r#"[{"opcode":7,"nth":40,"what":{"status":{"code":32}}}]"#, None),
    ("halt", r#"[{"opcode":7,"nth":60,"what":"halt"}]"#, None),
    ("hang", r#"[{"opcode":7,"nth":60,"what":"hang"}]"#, None),
    ("lost completion", r#"[{"opcode":7,"nth":50,"what":"drop_completion"}]"#, None),
    ("late completions", r#"[{"opcode":7,"per_mille":50,"what":{"late":{"delay_ns":2000000}}}]"#, None),
    ("slow", r#"[{"opcode":7,"what":{"slow":{"factor":50}}}]"#, Some(false)),
];

/// Runs every fault on one kind of queue.
fn with_each_fault(kind: &str, queue: &str) {
    for (seed, (what, faults, taken_out)) in TROUBLES.iter().enumerate() {
        let what = format!("{what}, {kind}");
        let mut settings = patient();
        if taken_out.is_none() {
            settings.patience = Duration::from_secs(1);
        }
        let offload = offload(queue, faults, seed as u64, &settings);
        let (sent, report) = migrate(&what, &offload, |source| source);
        // A device may be out of service before the first delta: for its copies, or because it seems to hang on a busy
        // machine.
        assert!(requested_deltas(&report) > 0 || !report.taken_out.is_empty(), "{what}: {report:?}");
        assert_eq!(sent.refused_packets, 0, "{what}: no wrong delta was sent");
        if let Some(expected) = taken_out {
            assert_eq!(!report.taken_out.is_empty(), *expected, "{what}: {report:?}");
        }
    }
}

#[test]
fn with_any_fault_in_deltas_on_a_shared_queue_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault("shared", SHARED));
}

#[test]
fn with_any_fault_in_deltas_on_a_dedicated_queue_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault("dedicated", DEDICATED));
}

#[test]
fn with_any_fault_in_deltas_on_a_small_queue_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault("small", SMALL));
}

#[test]
fn a_wrong_delta_is_named_as_the_reason_why_the_device_was_taken_out() {
    within_a_minute(|| {
        let offload = offload(SHARED, r#"[{"opcode":7,"every":2,"what":"wrong_result"}]"#, 5, &patient());
        let (_, report) = migrate("every second delta wrong", &offload, |source| source);
        let reasons: Vec<_> = report.taken_out.iter().map(|out| out.reason.as_str()).collect();
        // The second reason applies if the pages were equal: then there is no delta record that could be wrong.
        let expected = [
            "a delta that it made does not lead to the page",
            "a record says that all is done, with a result that cannot be",
        ];
        assert!(reasons.len() == 1 && expected.contains(&reasons[0]), "{report:?}");
    });
}

/// If the CPU does not compute checksums of copies, a delta to a wrong copy does not match its checksum, and a whole
/// page is refused.
#[test]
fn wrong_copies_that_are_not_checked_are_not_placed_as_deltas() {
    within_a_minute(|| {
        for (seed, nth) in [20, 60, 200].into_iter().enumerate() {
            let mut settings = patient();
            settings.recheck_copies = false;
            let faults = format!(r#"[{{"opcode":17,"nth":{nth},"what":"wrong_result"}}]"#);
            let offload = offload(SHARED, &faults, seed as u64, &settings);
            migrate(&format!("copy {nth}"), &offload, |source| source);
        }
    });
}

/// Deltas that are late are made without the device.
#[test]
fn late_deltas_are_not_waited_for() {
    within_a_minute(|| {
        for (seed, factor) in [1, 200, 2000].into_iter().enumerate() {
            let mut settings = Settings::default();
            settings.lateness = Duration::from_millis(3);
            let faults = format!(r#"[{{"opcode":7,"what":{{"slow":{{"factor":{factor}}}}}}}]"#);
            let offload = offload(SHARED, &faults, seed as u64, &settings);
            let (sent, _) = migrate(&format!("{factor} times slower"), &offload, |source| source);
            assert_eq!(sent.refused_packets, 0);
        }
    });
}
