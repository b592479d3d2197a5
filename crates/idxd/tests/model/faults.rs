//! Page faults in the real page tables of this process, and operations that are resumed after them.

use std::time::Duration;

use sterna_idxd::resume::{Rest, rest};
use sterna_idxd::{Completion, Descriptor, Status, SubmitMethod};
use sterna_idxd_model::Model;
use sterna_idxd_model::config::{Script, ScriptedFault};

use crate::support::*;

/// Runs to a fault on `page`, makes the page accessible, and runs the rest. Returns the completion, and how much of the
/// input was done before the fault.
fn through_a_fault(rig: &Rig, area: &Area, page: usize, descriptor: Descriptor, write: bool) -> (Completion, u32) {
    area.allow(page, false);
    let first = rig.run(descriptor);
    area.allow(page, true);
    assert_eq!(first.status, Status::PageFault, "{} {descriptor:?}", rig.what);
    let fault = first.fault.unwrap();
    assert_eq!((fault.address & !0xfff, fault.write), (area.at(page * PAGE), write), "{}", rig.what);
    match rest(&descriptor, &first, false) {
        Rest::Part { descriptor, skipped } => (rig.run(descriptor), skipped),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_operation_goes_on_where_a_fault_stopped_it() {
    let data = noise(7, 4 * PAGE);
    for rig in Rig::all() {
        // Source from 100 in page 0; page 2 faults.
        let (source, other) = (Area::with(&data), Area::new(6));
        let bytes = 3 * PAGE as u32;

        let (done, _) =
            through_a_fault(&rig, &source, 2, Descriptor::memmove(source.at(100), other.at(9), bytes), false);
        assert_done(&done, rig.what);
        assert_eq!(other.get(9, 3 * PAGE), data[100..100 + 3 * PAGE]);
        let (done, _) = through_a_fault(&rig, &other, 1, Descriptor::memmove(source.at(0), other.at(9), bytes), true);
        assert_done(&done, rig.what);
        assert_eq!(other.get(9, 3 * PAGE), data[..3 * PAGE]);

        let (done, _) = through_a_fault(&rig, &source, 2, Descriptor::crc(source.at(100), bytes, 0), false);
        assert_eq!(done.crc(), crc32c(0, &data[100..100 + 3 * PAGE]), "{}", rig.what);
        let (done, _) =
            through_a_fault(&rig, &other, 2, Descriptor::copy_crc(source.at(100), other.at(50), bytes, 0), true);
        assert_eq!(done.crc(), crc32c(0, &data[100..100 + 3 * PAGE]));
        assert_eq!(other.get(50, 3 * PAGE), data[100..100 + 3 * PAGE]);

        other.put(0, &data);
        other.put(2 * PAGE + 500, &[!data[2 * PAGE + 500]]);
        let (done, skipped) =
            through_a_fault(&rig, &other, 2, Descriptor::compare(source.at(3), other.at(3), bytes), false);
        assert_eq!((done.result, done.bytes_completed + skipped), (1, 2 * PAGE as u32 + 497), "{}", rig.what);

        let pattern = 0x1122_3344_5566_7788_u64;
        let (filled, at) = (Area::new(3), 13);
        filled.put(at, &pattern.to_le_bytes().repeat(3 * PAGE / 8)[..2 * PAGE]);
        let compare = Descriptor::compare_pattern(filled.at(at), pattern, 2 * PAGE as u32);
        let (done, _) = through_a_fault(&rig, &filled, 1, compare, false);
        assert_eq!((done.status, done.result), (Status::Success, 0), "{}: the pattern goes on in its middle", rig.what);
    }
}

#[test]
fn deltas_made_and_applied_across_faults() {
    let first = noise(8, 4 * PAGE);
    let mut second = first.clone();
    for at in (0..4 * PAGE).step_by(600) {
        second[at] ^= 1;
    }
    let bytes = 4 * PAGE as u32;
    for rig in Rig::all() {
        let (a, b, record) = (Area::with(&first), Area::with(&second), Area::new(2));
        let create = Descriptor::create_delta(a.at(0), b.at(0), bytes, record.at(0), 1000);
        b.allow(2, false);
        let begun = rig.run(create);
        b.allow(2, true);
        assert_eq!((begun.status, begun.result), (Status::PageFault, 1));
        let Rest::Part { descriptor, skipped } = rest(&create, &begun, false) else { panic!("{}", rig.what) };
        let ended = rig.run(descriptor);
        assert_eq!((ended.status, ended.result), (Status::Success, 1));
        // Two records, the second for the buffer from the point of resumption.
        let apply = Descriptor::apply_delta(record.at(0), begun.delta_size(), a.at(0), bytes);
        let (done, _) = through_a_fault(&rig, &a, 1, apply, true);
        assert_done(&done, rig.what);
        let behind = record.at(begun.delta_size() as usize);
        let apply = Descriptor::apply_delta(behind, ended.delta_size(), a.at(skipped as usize), bytes - skipped);
        assert_done(&rig.run(apply), rig.what);
        assert_eq!(a.get(0, 4 * PAGE), second, "{}", rig.what);
    }
}

#[test]
fn a_move_that_runs_backwards_keeps_its_start() {
    let data = noise(9, 3 * PAGE);
    for rig in Rig::all() {
        let area = Area::new(6);
        area.put(0, &data);
        let descriptor = Descriptor::memmove(area.at(0), area.at(PAGE), 3 * PAGE as u32);
        // Backwards, so the last page is done when the middle one of the source faults.
        area.allow(1, false);
        let begun = rig.run(descriptor);
        area.allow(1, true);
        assert_eq!((begun.status, begun.result), (Status::PageFault, 1), "{}", rig.what);
        let Rest::Part { descriptor, skipped: 0 } = rest(&descriptor, &begun, false) else { panic!("{}", rig.what) };
        assert_done(&rig.run(descriptor), rig.what);
        assert_eq!(area.get(PAGE, 3 * PAGE), data, "{}", rig.what);
    }
}

#[test]
fn blocking_on_a_fault_that_nobody_serves_ends_as_a_failed_page_request() {
    let mut config = config(0x200);
    config.devices[0].queues.iter_mut().for_each(|queue| queue.block_on_fault = true);
    for rig in Rig::all_of(&config) {
        let area = Area::new(3);
        area.allow(1, false);
        let descriptor = Descriptor::memmove(area.at(0), area.at(PAGE), 64).blocking_on_fault();
        let failed = rig.run(descriptor);
        area.allow(1, true);
        assert_eq!(failed.status, Status::PageRequestFailed, "{}", rig.what);
        assert!(failed.fault.unwrap().write);
        assert_eq!(rest(&descriptor, &failed, false), Rest::Part { descriptor, skipped: 0 });
    }
}

#[test]
fn scripted_faults_anywhere_give_the_same_result_in_the_end() {
    let model = Model::start(config(0x200)).unwrap();
    let queue = open(&model, "wq0.0", SubmitMethod::Enqcmd, Duration::from_secs(10)).unwrap();
    let data = noise(10, 4 * PAGE);
    let (source, copy) = (Area::with(&data), Area::new(4));
    for per_mille in [0, 1, 250, 333, 999] {
        for descriptor in [
            Descriptor::copy_crc(source.at(0), copy.at(0), 4 * PAGE as u32, 0),
            Descriptor::crc(source.at(0), 4 * PAGE as u32, 0),
        ] {
            let code = descriptor.operation_code();
            let what = ScriptedFault::PageFault { per_mille, resolvable: false };
            model.inject(&Script { opcode: Some(code), limit: Some(2), what, ..Script::default() });
            let (mut next, mut parts) = (descriptor, 0);
            let last = loop {
                let completion = run(&queue, next);
                parts += 1;
                match rest(&next, &completion, false) {
                    Rest::Part { descriptor, .. } => next = descriptor,
                    Rest::Nothing => break completion,
                    other => panic!("{other:?}"),
                }
            };
            assert_eq!(last.crc(), crc32c(0, &data), "{per_mille} {code:#x}");
            assert_eq!(parts, 3, "{per_mille} {code:#x}");
            model.clear_scripts();
        }
        assert_eq!(copy.get(0, 4 * PAGE), data);
        copy.put(0, &[0; 4 * PAGE]);
    }
}
