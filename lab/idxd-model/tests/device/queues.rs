//! Queues, batches, fences, drains, priorities; halt, disable and reset; scripted faults.

use std::collections::HashSet;
use std::sync::Arc;

use sterna_idxd_model::config::{Script, ScriptedFault, Timing};
use sterna_idxd_model::memory::{AddressSpace, PageState, TestMemory};
use sterna_idxd_model::{DeviceConfig, Mode, Model, ModelConfig};

use crate::common::*;

const A: u64 = DATA;
const B: u64 = DATA + 0x4_0000;

#[test]
fn enqcmd_is_retried_from_the_threshold_on() {
    for (threshold, room) in [(0, 8), (8, 8), (5, 5)] {
        let bench = Bench::new(|device| {
            device.queues[0].size = 8;
            device.queues[0].threshold = threshold;
        });
        for taken in 0..12 {
            assert_eq!(bench.queue.enqcmd(&noop(0).0), taken < room, "threshold {threshold}, {taken} before");
        }
        assert_eq!(bench.queue.occupancy(), room);
        assert_eq!(bench.model.counters().retries, u64::from(12 - room));
        bench.model.settle();
        assert!(bench.queue.enqcmd(&noop(0).0), "there is room again");
    }
}

#[test]
fn a_full_dedicated_queue_drops_and_reports_0x53_once() {
    let bench = Bench::new(|device| {
        device.queues[0].mode = Mode::Dedicated;
        device.queues[0].size = 4;
    });
    for _ in 0..7 {
        bench.queue.movdir64b(&noop(0).0);
    }
    let error = bench.model.take_software_error("dsa0").unwrap();
    assert_eq!((error.code, error.queue, error.overflow), (0x53, 0, true));
    bench.model.settle();
    let counters = bench.model.counters();
    assert_eq!((counters.descriptors, counters.overflows), (4, 3));
    assert_eq!(bench.model.take_software_error("dsa0"), None, "taken once");
}

#[test]
fn the_wrong_instruction_for_a_queue_goes_nowhere() {
    let dedicated = Bench::new(|device| device.queues[0].mode = Mode::Dedicated);
    assert!(!dedicated.queue.enqcmd(&noop(RECORDS).0), "ENQCMD to a dedicated queue answers retry");
    let shared = Bench::new(|_| {});
    shared.queue.movdir64b(&noop(RECORDS).0);
    for bench in [dedicated, shared] {
        bench.model.settle();
        assert_eq!(bench.record(RECORDS).status, 0);
        assert_eq!(bench.model.counters().software_errors, 0, "without notification to software (5.3)");
    }
}

#[test]
#[should_panic(expected = "general protection")]
fn enqcmd_with_a_pasid_in_its_source_faults() {
    Bench::new(|_| {}).queue.enqcmd(&noop(0).u32(0, 5).0);
}

#[test]
fn a_dedicated_queue_ignores_pasid_and_priv() {
    let bench = Bench::new(|device| device.queues[0].mode = Mode::Dedicated);
    assert_eq!(bench.run(noop(RECORDS).u32(0, 0x8000_0007)).status, 1);
}

#[test]
fn disabled_halted_and_reset_queues_all_answer_retry() {
    let bench = Bench::new(|_| {});
    bench.submit(noop(RECORDS));
    assert!(bench.model.disable("wq0.0"));
    assert!(!bench.queue.enqcmd(&noop(0).0));
    bench.model.settle();
    assert_eq!(bench.record(RECORDS).status, 1, "descriptors in a disabled queue are completed");
    bench.model.enable("wq0.0");
    bench.memory.put(RECORDS, &[0; 32]);
    bench.submit(noop(RECORDS));
    assert!(bench.model.halt("dsa0"));
    assert!(!bench.queue.enqcmd(&noop(0).0));
    bench.model.settle();
    assert_eq!(bench.record(RECORDS).status, 0, "descriptors in a halted device are lost");
    assert!(bench.model.reset("dsa0"));
    assert!(!bench.queue.enqcmd(&noop(0).0), "a reset disables the queues");
    bench.model.enable("wq0.0");
    assert_eq!(bench.run(noop(RECORDS)).status, 1);
    assert!(!bench.model.halt("dsa7") && !bench.model.disable("wq7.0"), "there is no such device or queue");
}

#[test]
fn a_halt_in_mid_flight_leaves_no_record_behind() {
    for steps in 0..40 {
        let bench = Bench::new(|_| {});
        let members: Vec<Raw> = (0..8).map(|index| memmove(member_record(index), A, B, 4096)).collect();
        bench.memory.put(RECORDS + 0x8000, &members.iter().flat_map(|raw| raw.0).collect::<Vec<u8>>());
        bench.submit(batch(RECORDS, RECORDS + 0x8000, 8));
        let ended = (0..steps).any(|_| !bench.model.step());
        bench.model.halt("dsa0");
        let before = bench.memory.get(RECORDS, 0x200);
        bench.model.settle();
        assert_eq!(bench.memory.get(RECORDS, 0x200), before, "after {steps} steps");
        assert_eq!(bench.queue.in_flight(), 0);
        if ended {
            return;
        }
    }
    panic!("the batch takes fewer steps than that");
}

#[test]
fn a_batch_is_a_success_if_all_members_are() {
    let bench = Bench::new(|_| {});
    let members: Vec<Raw> =
        (0..9).map(|index| memmove(member_record(index), A, B + 8192 * index as u64, 4096)).collect();
    let record = bench.run_batch(&members);
    assert_eq!((record.status, record.completed), (1, 9));
    assert!((0..9).all(|index| bench.member(index).status == 1));
    let counters = bench.model.counters();
    assert_eq!((counters.batches, counters.descriptors), (1, 9));
}

#[test]
fn a_false_predicate_makes_a_batch_05() {
    let bench = Bench::new(|_| {});
    bench.memory.put(A + 4096, &[1]);
    let member = |index: usize, at: u64| compare_pattern(member_record(index), at, 0, 4096).flags(CHECK);
    let record = bench.run_batch(&[member(0, A), member(1, A + 4096), member(2, A)]);
    assert_eq!((record.status, record.completed), (5, 3));
    assert_eq!([0, 1, 2].map(|index| bench.member(index).status), [1, 2, 1]);
    let record = bench.run_batch(&[member(0, A), member(1, A + 4096).u8(40, 1)]);
    assert_eq!(record.status, 1, "as predicted");
}

#[test]
fn without_a_fence_the_others_run_though_one_has_failed() {
    let bench = Bench::new(|_| {});
    let record =
        bench.run_batch(&[memmove(member_record(0), A, 0x10, 64), noop(member_record(1)), noop(member_record(2))]);
    assert_eq!((record.status, record.completed), (5, 3));
    assert_eq!([0, 1, 2].map(|index| bench.member(index).status), [0x83, 1, 1]);
}

#[test]
fn a_fence_abandons_itself_and_all_behind_it() {
    let bench = Bench::new(|_| {});
    let record = bench.run_batch(&[
        noop(member_record(0)),
        memmove(member_record(1), A, 0x10, 64),
        noop(member_record(2)),
        noop(member_record(3)).flags(FENCE),
        noop(member_record(4)),
    ]);
    assert_eq!((record.status, record.completed), (5, 3), "processed, not successful");
    assert_eq!([0, 1, 2, 3, 4].map(|index| bench.member(index).status), [1, 0x83, 1, 0, 0]);
}

#[test]
fn a_fence_waits_for_everything_before_it() {
    for seed in 0..200 {
        let bench = Bench::with_seed(seed, |_| {});
        bench.memory.put(A, &[9; 4096]);
        // A chain of copies, each of which needs the one before.
        let members: Vec<Raw> = (0..6)
            .map(|index| {
                let to = B + 4096 * index as u64;
                let from = if index == 0 { A } else { to - 4096 };
                memmove(member_record(index), from, to, 4096).flags(FENCE)
            })
            .collect();
        let record = bench.run_batch(&members);
        assert_eq!((record.status, record.completed), (1, 6), "seed {seed}");
        assert_eq!(bench.memory.get(B + 5 * 4096, 4096), [9; 4096], "seed {seed}");
    }
}

#[test]
fn nothing_behind_a_fence_is_done_before_the_records_before_it_are_there() {
    for seed in 0..20 {
        let bench = Bench::with_seed(seed, |_| {});
        bench.memory.put(A, &[9; 64]);
        let list = RECORDS + 0x8000;
        for index in 0..6 {
            let member = memmove(member_record(index), A, B + 4096 * index as u64, 64).flags(FENCE);
            bench.memory.put(list + 64 * index as u64, &member.0);
            bench.memory.put(member_record(index), &[0; 32]);
        }
        bench.submit(batch(RECORDS, list, 6));
        while bench.model.step() {
            for index in 1..6 {
                if bench.memory.get(B + 4096 * index as u64, 1) == [9] {
                    assert_eq!(bench.member(index - 1).status, 1, "seed {seed}, member {index}");
                }
            }
        }
        assert_eq!(bench.member(5).status, 1);
    }
}

/// The order in which the records of a batch's members became visible.
fn order_of(bench: &Bench, count: usize) -> Vec<usize> {
    let members: Vec<Raw> = (0..count).map(|index| memmove(member_record(index), A, B, 64)).collect();
    for (index, member) in members.iter().enumerate() {
        bench.memory.put(RECORDS + 0x8000 + 64 * index as u64, &member.0);
        bench.memory.put(member_record(index), &[0; 32]);
    }
    bench.memory.put(RECORDS, &[0; 32]);
    bench.submit(batch(RECORDS, RECORDS + 0x8000, count as u32));
    let mut order = Vec::new();
    while bench.model.step() {
        for index in (0..count).filter(|&index| bench.member(index).status != 0) {
            if !order.contains(&index) {
                assert_eq!(bench.record(RECORDS).status, 0, "the batch's record comes last");
                order.push(index);
            }
        }
    }
    assert_eq!(bench.record(RECORDS).status, 1);
    assert_eq!(order.len(), count);
    order
}

#[test]
fn members_complete_in_an_order_that_the_seed_chooses_and_the_batch_after_them() {
    let orders: HashSet<Vec<usize>> = (0..50).map(|seed| order_of(&Bench::with_seed(seed, |_| {}), 5)).collect();
    assert!(orders.len() > 20, "only {} of 50 seeds differ", orders.len());
    assert_eq!(order_of(&Bench::with_seed(3, |_| {}), 5), order_of(&Bench::with_seed(3, |_| {}), 5), "repeatable");
    let bench = Bench::new(|device| device.reorder = false);
    assert_eq!(order_of(&bench, 5), [0, 1, 2, 3, 4], "or in their order");
}

#[test]
fn the_descriptor_count_is_limited() {
    let bench = Bench::new(|device| device.queues[0].max_batch_size = 4);
    let list = RECORDS + 0x8000;
    let counted = |count: u32| bench.run(batch(RECORDS, list, count)).status;
    assert_eq!([0, 1, 2, 4, 5, 0x1_0002].map(counted), [0x14, 0x14, 1, 1, 0x14, 0x14]);
    let bench = Bench::new(|device| device.batch_of_one = true);
    assert_eq!(bench.run(batch(RECORDS, list, 1)).status, 1, "with Batch1 Support");
    assert_eq!(bench.run(batch(RECORDS, list + 32, 2)).status, 0x18, "the list's alignment");
}

#[test]
fn batch_and_drain_are_no_operations_within_a_batch() {
    let bench = Bench::new(|_| {});
    let record = bench.run_batch(&[batch(member_record(0), A, 2), drain(member_record(1))]);
    assert_eq!(record.status, 5);
    assert_eq!([0, 1].map(|index| bench.member(index).status), [0x10, 0x10]);
}

#[test]
fn a_list_that_faults_is_06_and_can_be_continued() {
    let bench = Bench::new(|_| {});
    let list = RECORDS + 0x1_0000 - 3 * 64;
    for index in 0..6 {
        bench.memory.put(list + 64 * index as u64, &noop(member_record(index)).0);
    }
    bench.memory.set(RECORDS + 0x1_0000, 1, PageState::Forbidden);
    let record = bench.run(batch(RECORDS, list, 6));
    assert_eq!((record.status, record.completed, record.fault), (6, 3, RECORDS + 0x1_0000));
    assert_eq!([2, 3].map(|index| bench.member(index).status), [1, 0]);
    bench.memory.set(RECORDS + 0x1_0000, 1, PageState::Present);
    let record = bench.run(batch(RECORDS, list + 3 * 64, 3));
    assert_eq!((record.status, record.completed), (1, 3));
    assert_eq!(bench.member(5).status, 1);
}

#[test]
fn a_lists_page_is_requested_even_without_block_on_fault() {
    let bench = Bench::new(|_| {});
    bench.memory.put(0x5_0000, &[noop(member_record(0)).0, noop(member_record(1)).0].concat());
    bench.memory.set(0x5_0000, 1, PageState::Absent);
    assert_eq!(bench.run(batch(RECORDS, 0x5_0000, 2)).status, 1);
    assert_eq!(bench.model.counters().page_requests, 1);
}

#[test]
fn a_continued_batch_remembers_its_error() {
    let bench = Bench::new(|device| device.version = 0x200);
    bench.memory.put(RECORDS + 0x8000, &[noop(member_record(0)).0, noop(member_record(1)).0].concat());
    let continued = batch(RECORDS, RECORDS + 0x8000, 2).flags(1 << 16);
    let record = bench.run(continued);
    assert_eq!((record.status, record.result), (5, 1));
    assert_eq!(Bench::new(|_| {}).run(continued).status, 0x11, "not on version 1");
}

#[test]
fn a_members_record_that_needed_a_page_request_may_make_the_batch_05() {
    let statuses: HashSet<(u8, u8)> = (0..40)
        .map(|seed| {
            let bench = Bench::with_seed(seed, |_| {});
            bench.memory.set(0x5_0000, 1, PageState::Absent);
            let record = bench.run_batch(&[noop(0x5_0000), noop(member_record(1))]);
            assert_eq!(bench.member(1).status, 1);
            (record.status, bench.record(0x5_0000).status)
        })
        .collect();
    assert_eq!(statuses, HashSet::from([(1, 1), (5, 1)]), "both are legal (8.3.2)");
}

#[test]
fn a_drain_completes_after_everything_that_was_before_it() {
    for seed in 0..50 {
        let bench = Bench::with_seed(seed, |_| {});
        for index in 0..6 {
            bench.submit(memmove(member_record(index), A, B + 0x2000 * index as u64, 4096));
        }
        bench.submit(drain(RECORDS));
        bench.submit(noop(member_record(6)));
        while bench.record(RECORDS).status == 0 {
            assert!(bench.model.step());
        }
        assert!((0..6).all(|index| bench.member(index).status == 1), "seed {seed}");
        bench.model.settle();
        assert_eq!(bench.member(6).status, 1);
        assert_eq!(bench.queue.in_flight(), 0);
    }
}

#[test]
fn a_drain_needs_a_record_or_an_interrupt() {
    let bench = Bench::new(|_| {});
    assert_eq!(bench.run(drain(RECORDS).without(8)).status, 0x11);
}

/// A device with two shared queues, both full of copies.
fn two_queues(low: u32, high: u32) -> (Arc<Model>, Arc<TestMemory>) {
    let mut device = DeviceConfig { engines: 1, reorder: false, ..DeviceConfig::default() };
    device.queues = [("wq0.0", low), ("wq0.1", high)]
        .map(|(name, priority)| {
            let mut queue = queue(name);
            queue.priority = priority;
            queue.size = 60;
            queue
        })
        .to_vec();
    let memory = Arc::new(TestMemory::new());
    memory.set(RECORDS, 0x1_0000, PageState::Present);
    memory.set(DATA, 0x10_0000, PageState::Present);
    let config = ModelConfig { devices: vec![device], ..ModelConfig::default() };
    let model = Model::manual_on(config, memory.clone() as Arc<dyn AddressSpace>).unwrap();
    (model, memory)
}

#[test]
fn priorities_share_by_their_ratio_and_starve_no_queue() {
    let (model, memory) = two_queues(1, 3);
    for (queue, base) in [("wq0.0", 0), ("wq0.1", 60)] {
        for index in 0..60 {
            let record = RECORDS + 64 + 32 * (base + index);
            assert!(model.queue(queue).unwrap().enqcmd(&memmove(record, DATA, DATA + 0x8000, 4096).0));
        }
    }
    let done = |base: u64| (0..60).filter(|index| memory.get(RECORDS + 64 + 32 * (base + index), 1)[0] != 0).count();
    while done(60) < 30 {
        assert!(model.step());
    }
    assert!((9..=11).contains(&done(0)), "{} of the low queue beside 30 of the high one", done(0));
}

#[test]
fn engines_serve_only_their_group() {
    let bench = Bench::new(|device| {
        device.engines = 2;
        device.engine_groups = vec![0, 1];
        device.queues.push(sterna_idxd_model::QueueConfig { group_id: 1, ..queue("wq0.1") });
    });
    bench.model.inject(&Script { queue: Some("wq0.1".into()), what: ScriptedFault::Hang, ..Script::default() });
    assert!(bench.model.queue("wq0.1").unwrap().enqcmd(&noop(0).0));
    bench.model.settle();
    assert_eq!(bench.run(noop(RECORDS)).status, 1, "the other group's engine is not affected");
    assert!(bench.model.queue("wq0.1").unwrap().enqcmd(&noop(RECORDS + 64).0));
    bench.model.settle();
    assert_eq!(bench.record(RECORDS + 64).status, 0, "the hung engine's group has no other");
}

#[test]
fn a_page_request_holds_up_the_engine() {
    let bench = Bench::new(|device| {
        device.engines = 1;
        device.reorder = false;
        device.queues[0].block_on_fault = true;
    });
    bench.memory.set(B, 1, PageState::Absent);
    bench.submit(memmove(RECORDS, A, B, 64).flags(BLOCK));
    bench.submit(noop(member_record(0)));
    bench.model.advance(1500);
    assert_eq!(bench.member(0).status, 0, "without the page request the no-op would be done");
    bench.model.settle();
    assert_eq!((bench.record(RECORDS).status, bench.member(0).status), (1, 1));
}

#[test]
fn write_follows_the_kernels_rules() {
    let bench = Bench::new(|device| device.queues[0].size = 3);
    let two = [noop(0).0, noop(RECORDS).0].concat();
    assert_eq!(bench.queue.write(&two[..100]), Err(libc::EINVAL), "whole descriptors");
    assert_eq!(bench.queue.write(&batch(RECORDS, RECORDS, 2).0), Err(libc::EINVAL), "no batches on version 1");
    assert_eq!(
        bench.queue.write(&noop(0).u64(8, 16).0),
        Err(libc::EINVAL),
        "the address must be aligned although it is not used"
    );
    assert_eq!(bench.queue.write(&[noop(0).0, noop(0).u64(8, 16).0].concat()), Ok(64), "accepted descriptors count");
    assert_eq!(bench.queue.write(&two), Ok(128));
    assert_eq!(bench.queue.write(&two), Err(libc::EAGAIN));
    bench.model.settle();
    assert_eq!(bench.record(RECORDS).status, 1);
    assert_eq!(bench.queue.write(&noop(0).u32(0, 0x8000_0001).0), Ok(64), "the kernel fills in PASID and Priv");

    let second = Bench::new(|device| device.version = 0x200);
    assert_eq!(second.queue.write(&batch(RECORDS, RECORDS + 0x8000, 2).0), Ok(64));

    let dedicated = Bench::new(|device| {
        device.queues[0].mode = Mode::Dedicated;
        device.queues[0].size = 1;
    });
    assert_eq!(dedicated.queue.write(&[noop(0).0; 4].concat()), Ok(256), "no flow control");
    assert_eq!(dedicated.model.counters().overflows, 3);
}

fn script(what: ScriptedFault) -> Script {
    Script { limit: Some(1), what, ..Script::default() }
}

#[test]
fn a_scripted_fault_ends_the_descriptor_at_the_scripted_byte() {
    let bench = Bench::new(|_| {});
    bench.memory.put(A, &[5; 4096]);
    bench.model.inject(&script(ScriptedFault::PageFault { per_mille: 1000, resolvable: false }));
    let record = bench.run(memmove(RECORDS, A, B, 4096));
    assert_eq!((record.status, record.completed), (0x83, 0), "read whole, nothing written");
    assert_eq!(bench.run(memmove(RECORDS, A, B, 4096)).status, 1, "once");
    bench.model.inject(&script(ScriptedFault::PageFault { per_mille: 500, resolvable: false }));
    let record = bench.run(compare_pattern(RECORDS, B, 0x0505_0505_0505_0505, 4096));
    assert_eq!((record.status, record.completed), (0x03, 2048));
}

#[test]
fn a_scripted_fault_is_resolved_if_it_can_be() {
    let bench = Bench::blocking();
    for (resolvable, status) in [(true, 1), (false, 0x04)] {
        bench.model.inject(&script(ScriptedFault::PageFault { per_mille: 100, resolvable }));
        assert_eq!(bench.run(memmove(RECORDS, A, B, 4096).flags(BLOCK)).status, status);
    }
    assert_eq!(bench.model.counters().page_requests, 2);
}

#[test]
fn a_wrong_result_is_wrong_in_one_bit_of_data_or_in_the_record() {
    let bench = Bench::new(|_| {});
    let wrong = || bench.model.inject(&script(ScriptedFault::WrongResult));
    wrong();
    assert_eq!(bench.run(memmove(RECORDS, A, B, 4096)).status, 1);
    let bits: u32 = bench.memory.get(B, 4096).iter().map(|byte| byte.count_ones()).sum();
    assert_eq!(bits, 1);
    wrong();
    assert_eq!(bench.run(compare_pattern(RECORDS, A, 0, 4096)).result, 1, "zeros reported as different");
    wrong();
    let record = bench.run(compare_pattern(RECORDS, B, 0, 4096));
    assert_eq!((record.result, record.completed), (0, 0), "a page that is not zero reported as zero");
    wrong();
    let record = bench.run(compare_pattern(RECORDS, B, 0, 4096).flags(CHECK));
    assert_eq!((record.status, record.result), (1, 0), "and so does its predicate");
    wrong();
    assert_ne!(bench.run(crc(RECORDS, A, 8, 0)).detail, bench.run(crc(RECORDS, A, 8, 0)).detail);
}

#[test]
fn data_can_land_after_the_record_of_a_partial_completion() {
    let bench = Bench::new(|_| {});
    bench.memory.put(A, &[5; 0x2000]);
    bench.memory.set(B + 0x1000, 1, PageState::Present);
    bench.memory.set(A + 0x1000, 1, PageState::Forbidden);
    bench.model.inject(&script(ScriptedFault::LateData { delay_ns: 50_000 }));
    bench.submit(memmove(RECORDS, A, B, 0x2000));
    bench.model.advance(20_000);
    let record = bench.record(RECORDS);
    assert_eq!((record.status, record.completed), (0x03, 0x1000));
    assert_eq!(bench.memory.get(B, 1), [0], "not yet");
    bench.model.settle();
    assert_eq!(bench.memory.get(B, 0x1000), [5; 0x1000]);
}

#[test]
fn a_late_completion_writes_its_data_then() {
    let bench = Bench::new(|_| {});
    bench.memory.put(A, &[5; 4096]);
    bench.model.inject(&script(ScriptedFault::Late { delay_ns: 50_000_000 }));
    bench.submit(memmove(RECORDS, A, B, 4096));
    bench.model.advance(49_000_000);
    assert_eq!((bench.record(RECORDS).status, bench.memory.get(B, 1)[0]), (0, 0));
    assert_eq!(bench.queue.in_flight(), 1);
    bench.model.advance(2_000_000);
    assert_eq!((bench.record(RECORDS).status, bench.memory.get(B, 1)[0]), (1, 5));
}

#[test]
fn hangs_drops_statuses_and_halts() {
    let bench = Bench::new(|device| device.engines = 1);
    bench.model.inject(&script(ScriptedFault::DropCompletion));
    bench.memory.put(A, &[5; 64]);
    assert_eq!(bench.run(memmove(RECORDS, A, B, 64)).status, 0);
    assert_eq!(bench.memory.get(B, 64), [5; 64], "the data is written although the record is not");
    assert_eq!((bench.model.counters().lost_records, bench.queue.in_flight()), (1, 0));
    bench.model.inject(&script(ScriptedFault::Status { code: 0x21 }));
    assert_eq!(bench.run(memmove(RECORDS, A, B + 64, 64)).status, 0x21);
    bench.model.inject(&script(ScriptedFault::Hang));
    assert_eq!(bench.run(noop(RECORDS)).status, 0);
    assert_eq!(bench.run(noop(RECORDS)).status, 0, "its only engine hangs");
    assert_eq!(bench.queue.in_flight(), 2);
    bench.model.reset("dsa0");
    bench.model.enable("wq0.0");
    assert_eq!(bench.run(noop(RECORDS)).status, 1);
    bench.model.inject(&script(ScriptedFault::Halt));
    assert_eq!(bench.run(noop(RECORDS)).status, 0);
    assert!(!bench.queue.enqcmd(&noop(0).0), "halted");
}

#[test]
fn a_slow_engine_takes_its_time() {
    let time = |what: Option<ScriptedFault>| {
        let bench = Bench::new(|device| device.reorder = false);
        what.into_iter().for_each(|what| bench.model.inject(&script(what)));
        assert_eq!(bench.run(memmove(RECORDS, A, B, 4096)).status, 1);
        bench.model.now()
    };
    let (normal, slow) = (time(None), time(Some(ScriptedFault::Slow { factor: 100 })));
    assert!(slow > 20 * normal, "{slow} ns after {normal} ns");
}

#[test]
fn scripts_choose_by_queue_operation_and_count() {
    let bench = Bench::new(|device| device.queues.push(queue("wq0.1")));
    let what = ScriptedFault::Status { code: 0x20 };
    bench.model.inject(&Script { opcode: Some(0), nth: Some(2), what: what.clone(), ..Script::default() });
    let statuses: Vec<u8> = (0..4).map(|_| bench.run(noop(RECORDS)).status).collect();
    assert_eq!(statuses, [1, 1, 0x20, 1]);
    bench.model.clear_scripts();
    bench.model.inject(&Script { every: Some(3), what: what.clone(), ..Script::default() });
    let statuses: Vec<u8> = (0..7).map(|_| bench.run(noop(RECORDS)).status).collect();
    assert_eq!(statuses, [1, 1, 0x20, 1, 1, 0x20, 1]);
    bench.model.clear_scripts();
    bench.model.inject(&Script { queue: Some("wq0.1".into()), what: what.clone(), ..Script::default() });
    assert_eq!(bench.run(noop(RECORDS)).status, 1);
    bench.model.clear_scripts();
    bench.model.inject(&Script { device: Some("dsa9".into()), what: what.clone(), ..Script::default() });
    assert_eq!(bench.run(noop(RECORDS)).status, 1);
    bench.model.inject(&Script { per_mille: Some(300), what, ..Script::default() });
    let hit = (0..1000).filter(|_| bench.run(noop(RECORDS)).status == 0x20).count();
    assert!((230..370).contains(&hit), "{hit} of 1000");
}

#[test]
fn configurations_that_the_kernel_would_refuse_are_refused() {
    let refused = |change: fn(&mut DeviceConfig), why: &str| {
        let mut device = DeviceConfig::default();
        change(&mut device);
        let config = ModelConfig { devices: vec![device], ..ModelConfig::default() };
        let error = Model::manual(config).expect_err(why).to_string();
        assert!(error.contains(why), "{error:?} does not contain {why:?}");
    };
    refused(|device| device.queues[0].size = 129, "129 entries together, the device has 128");
    refused(|device| device.queues[0].size = 0, "no entries");
    refused(|device| device.queues[0].threshold = 17, "threshold 17");
    refused(|device| device.queues[0].priority = 16, "priority 16");
    refused(|device| device.queues[0].group_id = 1, "no engine");
    refused(|device| device.queues[0].max_batch_size = 1025, "max_batch_size 1025");
    refused(|device| device.engine_groups = vec![0, u32::MAX], "an engine is in group 4294967295");
    refused(|device| device.max_batch_size = u32::MAX, "max_batch_size 4294967295");
    refused(|device| device.max_transfer_size = 1 << 32, "max_transfer_size 4294967296");
    refused(|device| device.queues[0].prs_disable = true, "event log");
    refused(|device| device.queues[0].name = "wq1.0".into(), "wq0.");
    refused(|device| device.name = "gpu0".into(), "dsa and a number");
    for name in ["dsa+1", "dsa01", "dsa", "dsa4294967296"] {
        let devices = vec![DeviceConfig { name: name.into(), queues: Vec::new(), ..DeviceConfig::default() }];
        let error = Model::manual(ModelConfig { devices, ..ModelConfig::default() }).expect_err(name).to_string();
        assert!(error.contains("dsa and a number"), "{name}: {error}");
    }
    refused(|device| device.queues[0].name = "wq0.+1".into(), "wq0. and 0 to 254");
    refused(|device| device.queues[0].name = "wq0.4294967295".into(), "wq0. and 0 to 254");
    refused(|device| device.engine_groups = vec![0; 5], "engine_groups has 5, and there are 4 engines");
    refused(|device| device.engines = u32::MAX, "4294967295 engines");
    refused(|device| device.numa_node = i32::MAX, "numa_node 2147483647");
    refused(|device| device.version = 1 << 16, "version 0x10000");
    refused(|device| device.version = 1, "version 0x1:");
    refused(|device| device.max_work_queues_size = 65_536, "max_work_queues_size 65536");
    refused(|device| device.pattern_granule = 0, "pattern_granule 0");
    refused(|device| device.timing = Some(Timing { byte_ps: u64::MAX, ..Timing::dsa() }), "byte_ps");
    refused(|device| device.queues.push(queue("wq0.0")), "two of that name");
    refused(
        |device| {
            device.page_requests = false;
            device.queues[0].block_on_fault = true;
        },
        "0x25",
    );
}

#[test]
fn faults_that_could_never_come_are_refused() {
    let script = |script: Script| ModelConfig { faults: vec![Script::default(), script], ..ModelConfig::dsa() };
    for (wrong, why) in [
        (
            Script { device: Some("dsa7".into()), ..Script::default() },
            "faults[1]: there is no device \"dsa7\"; there is dsa0",
        ),
        (
            Script { queue: Some("wq0.1".into()), ..Script::default() },
            "faults[1]: there is no queue \"wq0.1\"; there is wq0.0",
        ),
        (Script { every: Some(0), ..Script::default() }, "every is 0"),
        (Script { per_mille: Some(1001), ..Script::default() }, "per_mille is 1001"),
        (
            Script { what: ScriptedFault::PageFault { per_mille: 2000, resolvable: false }, ..Script::default() },
            "per_mille is 2000",
        ),
        (Script { what: ScriptedFault::Late { delay_ns: u64::MAX }, ..Script::default() }, "delay_ns"),
        (Script { what: ScriptedFault::Slow { factor: 0 }, ..Script::default() }, "factor is 0"),
    ] {
        let error = Model::manual(script(wrong)).expect_err(why).to_string();
        assert!(error.contains(why), "{error:?} does not contain {why:?}");
    }
    let right = Script { device: Some("dsa0".into()), queue: Some("wq0.0".into()), ..Script::default() };
    Model::manual(script(right)).unwrap();
}

#[test]
fn both_forms_of_configuration_are_read() {
    let own = r#"{ "seed": 7, "devices": [ { "name": "dsa0", "engines": 2, "queues": [
        { "name": "wq0.1", "mode": "dedicated", "size": 32, "group": 0, "block_on_fault": 1 } ] } ],
        "faults": [ { "every": 10, "what": { "page_fault": { "per_mille": 500 } } }, { "what": "hang", "nth": 3 } ] }"#;
    let config = ModelConfig::from_json(own).unwrap();
    assert_eq!((config.seed, config.faults.len(), config.devices[0].engines), (7, 2, 2));
    let queue = &config.devices[0].queues[0];
    assert_eq!((queue.mode, queue.size, queue.block_on_fault), (Mode::Dedicated, 32, true));
    Model::manual(config.clone()).unwrap();
    let again = ModelConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);

    let saved = r#"[ { "dev": "dsa0", "read_buffer_limit": 0, "groups": [ { "dev": "group0.1", "traffic_class_a": 1,
        "grouped_workqueues": [ { "dev": "wq0.0", "mode": "shared", "size": 16, "group_id": 1, "priority": 10,
          "block_on_fault": 1, "type": "user", "name": "app1", "driver_name": "user", "threshold": 15 } ],
        "grouped_engines": [ { "dev": "engine0.0", "group_id": 1 }, { "dev": "engine0.1", "group_id": 1 } ] } ] } ]"#;
    let config = ModelConfig::from_json(saved).unwrap();
    let device = &config.devices[0];
    assert_eq!((device.engines, &device.engine_groups[..]), (2, &[1, 1][..]));
    assert_eq!((device.queues[0].threshold, device.queues[0].label.as_str()), (15, "app1"));
    Model::manual(config).unwrap();
    assert!(ModelConfig::from_json(r#"{ "devicez": [] }"#).is_err());
}

/// In the form of `contrib/configs/net_profile.conf` and `test/configs/2g2q_user_2.conf` of idxd-config 4.1.6, which
/// `accel-config load-config` takes: a comma behind the last element, groups with nothing in them.
#[test]
fn a_file_of_accel_config_with_trailing_commas_is_read() {
    let file = r#"[
  {
    "dev":"iax1",
    "groups":[
      {
        "dev":"group1.0",
      },
      {
        "dev":"group1.2",
        "grouped_workqueues":[
          {
            "dev":"wq1.4",
            "mode":"shared",
            "size":40,
            "block_on_fault":1,
            "type":"user",
            "name":"a,]b",
            "threshold":40,
          },
        ],
        "grouped_engines":[
          { "dev":"engine1.2", "group_id":2 },
          { "dev":"engine1.3", "group_id":2 },
        ]
      },
    ]
  }
]
"#;
    let config = ModelConfig::from_json(file).unwrap();
    let device = &config.devices[0];
    assert_eq!((device.name.as_str(), device.engines, &device.engine_groups[..]), ("iax1", 2, &[2, 2][..]));
    let queue = &device.queues[0];
    assert_eq!((queue.name.as_str(), queue.size, queue.threshold, queue.label.as_str()), ("wq1.4", 40, 40, "a,]b"));
    Model::manual(config).unwrap();
    let error = ModelConfig::from_json(&file.replace("40,\n", "40,,\n")).unwrap_err().to_string();
    assert!(error.contains("line 14"), "{error}");
}
