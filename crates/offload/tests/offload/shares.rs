//! What those who share a queue can rely on: in one process, and between processes by a ledger in a file in memory. Time is passed in.

use sterna_offload::share::ledger::{Ledger, LedgerFile, Slot, Table};
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, Fair, Grant, IN_FLIGHT, Nanos, Share};
use sterna_test_kit::tools::directory_in_memory;

const BATCH: Nanos = 50_000;
const START: Nanos = 1_000_000_000;

fn ask(share: &mut impl Share, predicted: Nanos, now: Nanos) -> Option<Grant> {
    match share.ask(&AdmissionRequest { vm: 1, channel: 0, weight: 1, predicted, bytes: 512 << 10 }, now) {
        AdmissionDecision::Admit(grant) => Some(grant),
        AdmissionDecision::Wait { until } => {
            assert!(until > now);
            None
        }
        AdmissionDecision::Spill => panic!("nobody asked it to"),
    }
}

fn fill(share: &mut impl Share, predicted: Nanos, now: Nanos) -> Vec<Grant> {
    std::iter::from_fn(|| ask(share, predicted, now)).take(100).collect()
}

#[test]
fn one_process_lets_no_more_into_the_hardware_than_the_bound() {
    for predicted in [BATCH, 70_000, IN_FLIGHT, 2 * IN_FLIGHT] {
        let mut share = Fair::default();
        let mut grants = fill(&mut share, predicted, START);
        assert_eq!(grants.len() as Nanos, (IN_FLIGHT / predicted).max(1), "{predicted} ns each");
        share.done(grants.remove(0), predicted, START + predicted);
        assert_eq!(fill(&mut share, predicted, START + predicted).len(), 1, "one has left");
    }
}

#[test]
fn what_all_processes_have_in_flight_is_bounded_and_what_completes_makes_room() {
    let directory = directory_in_memory();
    let join = || Ledger::new(LedgerFile::open(directory.path(), "wq0.0").unwrap());
    let (mut first, mut second) = (join(), join());
    let grants = fill(&mut first, BATCH, START);
    assert_eq!(grants.len() as Nanos, IN_FLIGHT / BATCH);
    // What another claims is believed up to its part and one batch.
    let beside = fill(&mut second, BATCH, START);
    assert!(beside.len() as Nanos * BATCH <= IN_FLIGHT / 2 - BATCH, "{} batches beside {}", beside.len(), grants.len());
    grants.into_iter().for_each(|grant| first.dropped(grant));
    beside.into_iter().for_each(|grant| second.dropped(grant));
    assert!(ask(&mut second, BATCH, START + 2 * IN_FLIGHT).is_some());
}

#[test]
fn two_that_always_want_more_get_the_same() {
    let directory = directory_in_memory();
    let join = || Ledger::new(LedgerFile::open(directory.path(), "wq0.0").unwrap());
    let mut sharers = [join(), join()];
    let mut in_flight: std::collections::VecDeque<(usize, Nanos, Grant)> = Default::default();
    let (mut now, mut free_at, mut served) = (START, START, [0_u32; 2]);
    while served[0] + served[1] < 400 {
        now += 10_000;
        while in_flight.front().is_some_and(|(_, end, _)| *end <= now) {
            let (who, _, grant) = in_flight.pop_front().unwrap();
            sharers[who].done(grant, IN_FLIGHT, now);
            served[who] += 1;
        }
        // The first comes first each time.
        for (who, sharer) in sharers.iter_mut().enumerate() {
            while let Some(grant) = ask(sharer, BATCH, now) {
                free_at = free_at.max(now) + BATCH;
                in_flight.push_back((who, free_at, grant));
            }
        }
    }
    assert!(served[0].abs_diff(served[1]) <= 40, "{served:?}");
}

#[test]
fn the_part_of_one_who_died_with_work_in_flight_falls_to_the_others() {
    let directory = directory_in_memory();
    let open = || LedgerFile::open(directory.path(), "wq0.0").unwrap();
    let (living, doomed) = (open(), open());
    doomed.write(&Slot { weight: 1, in_flight: IN_FLIGHT, until: u64::MAX, beat: 1, ..Slot::default() });
    let mut heir = Ledger::new(living);
    let before = fill(&mut heir, BATCH, START);
    assert!((before.len() as Nanos) < IN_FLIGHT / BATCH, "it may live");
    drop(doomed);
    before.into_iter().for_each(|grant| heir.dropped(grant));
    // Looked at now and then, as work comes.
    for step in 1..5 {
        let grant = ask(&mut heir, BATCH, START + step * 1_000_000).expect("it has nothing in flight");
        heir.dropped(grant);
    }
    assert_eq!(fill(&mut heir, BATCH, START + 5_000_000).len() as Nanos, IN_FLIGHT / BATCH);
}
