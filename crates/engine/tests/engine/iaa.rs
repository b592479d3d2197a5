//! Complete migrations whose packets an IAA device of the software model compresses, alone and beside a DSA: every
//! fault of the device, and a guest that writes all the time. Whatever the device does, the migration succeeds, memory
//! is equal, and the faulty device is named.

use crate::common::within_a_minute;
use crate::guest::{Memory, Monitor, Running, Workload};
use crate::moving::{done_by, has_silence, migrate_with, offload_of, report_of};
use sterna_codec::MethodChoice;
use sterna_engine::cancel::Cancel;
use sterna_engine::migration::GuestState;
use sterna_engine::source::{IaaVerify, Source};
use sterna_engine::transport::Security;
use sterna_offload::{Kind, Operation, Settings};

const IAA: &str = r#"[{"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":16}]}]"#;
const BOTH: &str = r#"[{"name":"dsa0","queues":[{"name":"wq0.0","size":16}]},
    {"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":16}]}]"#;
const DSA: &str = r#"[{"name":"dsa0","queues":[{"name":"wq0.0","size":16}]}]"#;

const WRONG_STREAMS: &str = r#"[{"opcode":67,"every":10,"what":"wrong_result"}]"#;

/// A name, and the faults of compressions (67) and decompressions (66).
const TROUBLES: &[(&str, &str)] = &[
    ("nothing", "[]"),
    ("pages that are not there", r#"[{"opcode":67,"every":2,"what":{"page_fault":{"per_mille":0}}}]"#),
    ("pages that go in the middle", r#"[{"opcode":67,"every":5,"what":{"page_fault":{"per_mille":500}}}]"#),
    ("wrong streams", WRONG_STREAMS),
    ("streams that are read wrongly", r#"[{"opcode":66,"nth":2,"what":"wrong_result"}]"#),
    ("wrong records", r#"[{"opcode":67,"per_mille":50,"what":{"status":{"code":16}}}]"#),
    ("no IAA that works", r#"[{"opcode":67,"what":{"status":{"code":32}}}]"#),
    ("halt", r#"[{"opcode":67,"nth":20,"what":"halt"}]"#),
    ("hang", r#"[{"opcode":67,"nth":20,"what":"hang"}]"#),
    ("lost completion", r#"[{"opcode":67,"nth":20,"what":"drop_completion"}]"#),
    ("lost completion of a decompression", r#"[{"opcode":66,"nth":2,"what":"drop_completion"}]"#),
    ("late completions", r#"[{"opcode":67,"per_mille":50,"what":{"late":{"delay_ns":2000000}}}]"#),
    ("slow", r#"[{"opcode":67,"what":{"slow":{"factor":5}}}]"#),
];

/// The model deflates slowly: with the other tests' workload the rounds would not converge.
const FEW_WRITES: Workload = Workload { writers: 1, span: 60, seed: 7, burst: 1 };

fn iaa() -> MethodChoice {
    "deflate by iaa".parse().unwrap()
}

fn with_each_fault(devices: &str, verify: IaaVerify) {
    for (seed, (what, faults)) in TROUBLES.iter().enumerate() {
        let what = format!("{what}, {verify:?}");
        let offload = offload_of(devices, faults, seed as u64, Settings::default());
        let report = migrate_with(&what, &offload, FEW_WRITES, |source| source.method(iaa()).iaa_verify(verify));
        // Devices that may be silent are given up soon: on a busy machine before they have done anything.
        let given_up =
            |is_iaa| has_silence(faults) && report.taken_out.iter().any(|out| (out.device == "iax1") == is_iaa);
        assert!(given_up(true) || done_by(&report, Kind::Iaa, Operation::Deflate) > 0, "{what}: {report:?}");
        let verified = done_by(&report, Kind::Iaa, Operation::Inflate) > 0;
        assert!(verify == IaaVerify::Always || !verified, "{what}: {report:?}");
        let searched = done_by(&report, Kind::Dsa, Operation::ZeroMap) > 0;
        assert!(given_up(false) || searched == (devices == BOTH), "{what}: {report:?}");
        let only_late = |reason: &str| has_silence(faults) && reason.starts_with("no answer ");
        let others = report.taken_out.iter().filter(|out| out.device != "iax1");
        assert!(others.map(|out| &*out.reason).all(only_late), "{what}: {report:?}");
        assert_eq!(offload.wrong_results(), 0, "{what}: an IAA does not report zero pages");
    }
}

#[test]
fn with_any_fault_of_an_iaa_alone_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault(IAA, IaaVerify::Never));
}

#[test]
fn with_any_fault_of_a_verified_iaa_alone_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault(IAA, IaaVerify::Always));
}

#[test]
fn with_any_fault_of_an_iaa_beside_a_dsa_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault(BOTH, IaaVerify::WithoutChecksums));
}

#[test]
fn with_any_fault_of_a_verified_iaa_beside_a_dsa_the_guest_arrives_intact() {
    within_a_minute(|| with_each_fault(BOTH, IaaVerify::Always));
}

/// Which check finds a wrong stream, and which reason is reported for which device.
#[test]
fn a_wrong_stream_is_attributed_to_the_iaa_and_not_to_the_device_that_copied_its_content() {
    within_a_minute(|| {
        let (by_destination, by_source) = (
            "what it had compressed was refused by the destination",
            "what it had compressed decompresses to something else",
        );
        for (verify, checksums, reason) in [
            (IaaVerify::WithoutChecksums, true, by_destination),
            (IaaVerify::Never, true, by_destination),
            (IaaVerify::Always, true, by_source),
            (IaaVerify::WithoutChecksums, false, by_source),
        ] {
            for (devices, recheck_copies) in [(IAA, true), (BOTH, true), (BOTH, false)] {
                let what = format!("{verify:?}, checksums {checksums}, {devices}");
                let mut settings = Settings::default();
                settings.recheck_copies = recheck_copies;
                let offload = offload_of(devices, WRONG_STREAMS, 1, settings);
                let report = migrate_with(&what, &offload, FEW_WRITES, |source| {
                    source.method(iaa()).iaa_verify(verify).checksums(checksums)
                });
                let out: Vec<_> =
                    report.taken_out.iter().map(|out| (out.device.as_str(), out.reason.as_str())).collect();
                assert_eq!(out, [("iax1", reason)], "{what}: {report:?}");
                assert_eq!(offload.wrong_results(), 0, "{what}");
            }
        }
    });
}

/// An unchecked copy, compressed by a device: either device may be wrong, so one is taken out of service first and
/// then, if the faults continue, the other.
#[test]
fn wrong_copies_that_were_compressed_are_attributed_to_the_dsa_in_the_end() {
    within_a_minute(|| {
        let mut settings = Settings::default();
        settings.recheck_copies = false;
        let offload = offload_of(BOTH, r#"[{"opcode":17,"every":3,"what":"wrong_result"}]"#, 5, settings);
        let report = migrate_with("wrong copies", &offload, FEW_WRITES, |source| source.method(iaa()));
        let out: Vec<_> = report.taken_out.iter().map(|out| out.device.as_str()).collect();
        assert!(out.contains(&"dsa0"), "{report:?}");
    });
}

#[test]
fn the_report_names_the_engine_that_compressed() {
    within_a_minute(|| {
        let words = |devices, verify| {
            let offload = offload_of(devices, "[]", 1, Settings::default());
            let settings = |source: Source| source.method(iaa()).iaa_verify(verify);
            report_of("report", &offload, FEW_WRITES, &(), settings).method
        };
        // On a busy machine the model may be late, and the CPU compresses a part.
        for (devices, verify, expected) in
            [(IAA, IaaVerify::WithoutChecksums, "IAA "), (BOTH, IaaVerify::Always, "IAA, verified ")]
        {
            let words = words(devices, verify);
            assert!(words.starts_with(&format!("deflate by iaa: {expected}")), "{words}");
        }
    });
}

#[test]
fn an_engine_that_is_named_and_not_there_is_refused_and_one_that_is_not_named_is_the_cpu() {
    within_a_minute(|| {
        let memory = Memory::new(1 << 20, 1 << 20);
        let (mut from, log) = Monitor::new(&memory, &Running::default(), FEW_WRITES);
        let offload = offload_of(DSA, "[]", 1, Settings::default());
        let mut source = Source::new(memory.ram(), Box::new(log)).method(iaa()).offload(offload);
        let sent = source.run("127.0.0.1:1", &Security::Insecure, &mut from, &Cancel::new(), &());
        let error = sent.unwrap_err();
        assert_eq!(error.guest, GuestState::Untouched);
        assert!(error.reason.starts_with("engine iaa is not there: "), "{error}");

        let offload = offload_of(DSA, "[]", 1, Settings::default());
        let any = |source: Source| source.method("deflate".parse().unwrap());
        assert_eq!(report_of("the CPU", &offload, FEW_WRITES, &(), any).method, "deflate 1 by cpu");
        let offload = offload_of(IAA, "[]", 1, Settings::default());
        let report = report_of("an IAA", &offload, FEW_WRITES, &(), any);
        assert!(report.method.starts_with("deflate by iaa: IAA "), "{}", report.method);
    });
}

#[test]
fn with_an_iaa_alone_the_cpu_finds_zero_pages() {
    within_a_minute(|| {
        let offload = offload_of(IAA, "[]", 1, Settings::default());
        let report = migrate_with("auto", &offload, FEW_WRITES, |source| source.method(MethodChoice::auto()));
        assert!(report.operations.iter().all(|one| one.operation != Operation::ZeroMap), "{report:?}");
    });
}
