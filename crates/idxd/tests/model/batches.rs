//! Batches: where they are permitted, their record, and the members' records.

use std::sync::Arc;
use std::time::Duration;

use sterna_idxd::resume::{Rest, rest};
use sterna_idxd::{CompletionRecord, Descriptor, NoBatches, Status, SubmitMethod};
use sterna_idxd_model::Model;

use crate::support::*;

/// Descriptors in memory that a device may read, and a record for each.
struct List {
    area: Area,
    records: Arc<[CompletionRecord]>,
    count: usize,
}

impl List {
    fn new(members: impl IntoIterator<Item = Descriptor>) -> Self {
        let members: Vec<Descriptor> = members.into_iter().collect();
        let records: Arc<[CompletionRecord]> = members.iter().map(|_| CompletionRecord::new()).collect();
        let area = Area::new((members.len() * 64).div_ceil(PAGE));
        for (index, (member, record)) in members.iter().zip(records.iter()).enumerate() {
            area.put(index * 64, member.with_record(record.address()).as_bytes());
        }
        Self { area, records, count: members.len() }
    }

    fn batch(&self) -> Descriptor {
        Descriptor::batch(self.area.at(0), self.count as u32)
    }

    fn statuses(&self) -> Vec<u8> {
        self.records.iter().map(|record| record.poll().map_or(0, |completion| completion.status.code())).collect()
    }
}

#[test]
fn a_batch_of_predictions_that_all_hold_is_one_success() {
    for rig in Rig::all() {
        assert_eq!(rig.queue.max_batch(), Ok(128), "{}", rig.what);
        let pages = Area::new(128);
        for page in (0..128).step_by(3) {
            pages.put(page * PAGE + 77, &[1]);
        }
        let predict = |wrong: Option<usize>| {
            let predicted = move |page: usize| u8::from(page.is_multiple_of(3)) ^ u8::from(wrong == Some(page));
            List::new((0..128).map(|page| {
                Descriptor::compare_pattern(pages.at(page * PAGE), 0, PAGE as u32).expecting(predicted(page))
            }))
        };
        let right = predict(None);
        assert_done(&rig.run(right.batch()), rig.what);
        let wrong = predict(Some(50));
        let failed = rig.run(wrong.batch());
        assert_eq!((failed.status, failed.descriptors_completed()), (Status::BatchMemberFailed, 128), "{}", rig.what);
        let statuses = wrong.statuses();
        assert!(statuses.iter().enumerate().all(|(page, status)| *status == if page == 50 { 2 } else { 1 }));
        assert_eq!(rest(&wrong.batch(), &failed, false), Rest::Members { processed: 128 });
    }
}

#[test]
fn members_after_a_fence_are_abandoned_if_one_before_it_did_not_succeed() {
    for rig in Rig::all() {
        let area = Area::new(3);
        let (zero, copy) = (area.at(0), area.at(2 * PAGE));
        let list = |expected: u8| {
            List::new([
                Descriptor::compare_pattern(zero, 0, PAGE as u32).expecting(expected),
                Descriptor::memmove(zero, copy, 64).fenced(),
                Descriptor::noop(),
            ])
        };
        assert_done(&rig.run(list(0).batch()), rig.what);
        let stopped = list(1);
        let completion = rig.run(stopped.batch());
        assert_eq!((completion.status, completion.descriptors_completed()), (Status::BatchMemberFailed, 1));
        assert_eq!(stopped.statuses(), [2, 0, 0], "{}", rig.what);
    }
}

#[test]
fn records_only_on_failure_stay_untouched_when_all_goes_well() {
    for rig in Rig::all() {
        let area = Area::new(2);
        let record = Arc::new(CompletionRecord::new());
        let copy = Descriptor::memmove(area.at(0), area.at(PAGE), 64);
        let list = Area::new(1);
        list.put(0, copy.with_record_on_failure(record.address()).as_bytes());
        list.put(64, copy.with_record_on_failure(record.address()).as_bytes());
        assert_done(&rig.run(Descriptor::batch(list.at(0), 2)), rig.what);
        assert_eq!(record.poll(), None);
        list.put(
            64,
            Descriptor::memmove(area.at(0), area.at(PAGE), 0).with_record_on_failure(record.address()).as_bytes(),
        );
        assert_eq!(rig.run(Descriptor::batch(list.at(0), 2)).status, Status::BatchMemberFailed);
        assert_eq!(record.poll().unwrap().status, Status::BadSize);
    }
}

#[test]
fn what_may_not_be_in_a_batch_or_be_one() {
    for rig in Rig::all() {
        let drain = List::new([Descriptor::noop(), Descriptor::drain()]);
        assert_eq!(rig.run(drain.batch()).status, Status::BatchMemberFailed);
        assert_eq!(drain.statuses(), [1, Status::BadOperation.code()]);
        assert_eq!(rig.run(Descriptor::batch(drain.area.at(0), 1)).status, Status::BadCount, "{}", rig.what);
        assert_eq!(rig.run(Descriptor::batch(drain.area.at(0), 129)).status, Status::BadCount);
        assert_eq!(rig.run(Descriptor::batch(drain.area.at(32), 2)).status, Status::ListAlignment);
    }
}

#[test]
fn a_list_that_cannot_be_read_to_its_end_is_gone_on_with() {
    for (members, batches) in [(100, 2), (65, 1)] {
        // Without page requests a fault on the list ends the batch.
        let mut config = config(0x200);
        config.devices[0].page_requests = false;
        for rig in Rig::all_of(&config) {
            let list = List::new((0..members).map(|_| Descriptor::noop()));
            list.area.allow(1, false);
            let first = rig.run(list.batch());
            list.area.allow(1, true);
            assert_eq!((first.status, first.descriptors_completed()), (Status::BatchListFault, 64), "{}", rig.what);
            let fault = first.fault.unwrap();
            assert_eq!((fault.address & !0xfff, fault.write), (list.area.at(PAGE), false));
            match rest(&list.batch(), &first, false) {
                Rest::Part { descriptor, skipped: 64 } if batches == 2 => assert_done(&rig.run(descriptor), rig.what),
                Rest::One { descriptor } if batches == 1 => {
                    let bytes = list.area.get((descriptor - list.area.at(0)) as usize, 64);
                    let alone = Descriptor::from_bytes(bytes.try_into().unwrap());
                    submit(&rig.queue, &alone);
                    assert_done(&wait(&rig.queue, &list.records[64]), rig.what);
                }
                other => panic!("{other:?}"),
            }
            assert!(list.statuses().iter().all(|status| *status == 1));
        }
    }
}

#[test]
fn first_generation_devices_take_batches_by_portal_and_never_by_write() {
    let model = Model::start(config(0x100)).unwrap();
    let deadline = Duration::from_secs(10);
    assert_eq!(open(&model, "wq0.0", SubmitMethod::Enqcmd, deadline).unwrap().max_batch(), Ok(128));
    assert_eq!(open(&model, "wq0.1", SubmitMethod::Movdir64b, deadline).unwrap().max_batch(), Ok(128));
    let batches = model.counters().batches;
    let written = open(&model, "wq0.0", SubmitMethod::Write, deadline).unwrap();
    assert_eq!(written.max_batch(), Err(NoBatches::FirstGeneration));
    assert_eq!(model.counters().batches, batches, "not even tried");
    // And through discovery, where the kernel hides the operation.
    if let Some(rig) = Rig::trapped(&config(0x100), "wq0.0", "ENQCMD trapped, first generation") {
        assert_eq!(rig.queue.info().declares(1), Some(false));
        assert_eq!(rig.queue.max_batch(), Ok(128));
    }
}
