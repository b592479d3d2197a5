//! What every share must keep to, whatever is asked of it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use sterna_test_kit::Random;

use super::ledger::{Ledger, Slot, Table};
use super::*;

/// A table in memory, which anyone may write.
#[derive(Clone, Debug)]
struct Sheet {
    slots: Arc<Mutex<Vec<Slot>>>,
    own: usize,
}

impl Sheet {
    fn all(count: usize) -> Vec<Self> {
        let slots = Arc::new(Mutex::new(vec![Slot::default(); count]));
        (0..count).map(|own| Self { slots: Arc::clone(&slots), own }).collect()
    }
}

impl Table for Sheet {
    fn slots(&self) -> usize {
        self.slots.lock().unwrap().len()
    }
    fn own(&self) -> usize {
        self.own
    }
    fn read(&self, slots: &mut [Slot]) {
        slots.copy_from_slice(&self.slots.lock().unwrap());
    }
    fn write(&self, slot: &Slot) {
        self.slots.lock().unwrap()[self.own] = *slot;
    }
    fn alive(&self, _index: usize) -> bool {
        true
    }
}

fn ask(vm: u32, weight: u32, predicted: Nanos) -> AdmissionRequest {
    AdmissionRequest { vm, channel: 0, weight, predicted, bytes: predicted * 30 }
}

/// Always-hungry flows on a FIFO device of exact speed: device time of each, and the longest wait of any.
fn serve(
    shares: &mut [Box<dyn Share>],
    asks: &[AdmissionRequest],
    process_of: impl Fn(usize) -> usize,
    end: Nanos,
) -> (Vec<f64>, Nanos) {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Next {
        Done(usize),
        Ask(usize),
    }
    let mut events: BinaryHeap<Reverse<(Nanos, Next, u64)>> =
        (0..asks.len()).map(|flow| Reverse((0, Next::Ask(flow), 0))).collect();
    let mut grants: BTreeMap<u64, (Grant, Nanos)> = BTreeMap::new();
    let (mut free, mut serial) = (0, 0);
    let mut had = vec![0.0; asks.len()];
    let mut since = vec![0; asks.len()];
    let mut longest = 0;
    while let Some(Reverse((now, next, id))) = events.pop() {
        if now > end {
            break;
        }
        match next {
            Next::Ask(flow) => match shares[process_of(flow)].ask(&asks[flow], now) {
                AdmissionDecision::Admit(grant) => {
                    longest = longest.max(now - since[flow]);
                    since[flow] = now;
                    free = free.max(now) + asks[flow].predicted;
                    serial += 1;
                    grants.insert(serial, (grant, now));
                    events.push(Reverse((free, Next::Done(flow), serial)));
                    events.push(Reverse((now + 1, Next::Ask(flow), 0)));
                }
                AdmissionDecision::Wait { until } => {
                    assert!(until > now, "a wait into the past never ends");
                    events.push(Reverse((until, Next::Ask(flow), 0)));
                }
                AdmissionDecision::Spill => panic!("not asked to spill"),
            },
            Next::Done(flow) => {
                let (grant, submitted) = grants.remove(&id).unwrap();
                had[flow] += grant.predicted() as f64;
                shares[process_of(flow)].done(grant, now - submitted, now);
            }
        }
    }
    let waiting = since.iter().map(|since| end.saturating_sub(*since)).max().unwrap_or(0);
    (had, longest.max(waiting))
}

fn check_weights(had: &[f64], asks: &[AdmissionRequest], end: Nanos, within: f64) -> Result<(), TestCaseError> {
    let weights: f64 = asks.iter().map(|ask| f64::from(ask.weight)).sum();
    let all: f64 = had.iter().sum();
    prop_assert!(all > 0.97 * end as f64, "the device was idle: {all} of {end}");
    for (had, ask) in had.iter().zip(asks) {
        let due = all * f64::from(ask.weight) / weights;
        // A share is given in whole batches.
        let slack = within * due + 4.0 * ask.predicted as f64;
        prop_assert!((had - due).abs() <= slack, "weight {} of {weights}: {had} for {due}", ask.weight);
    }
    Ok(())
}

fn cases() -> ProptestConfig {
    ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 })
}

/// Simulated time of a property.
const LONG: Nanos = if cfg!(miri) { 300_000 } else { 200_000_000 };

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn fair_gives_device_time_by_weight_and_keeps_the_device_busy(
        flows in prop::collection::vec((1u32..20, 5_000u64..60_000), 2..12),
    ) {
        let asks: Vec<AdmissionRequest> =
            flows.iter().enumerate().map(|(vm, &(weight, predicted))| ask(vm as u32, weight, predicted)).collect();
        for fair in [Fair::default(), Fair::default().free_alone()] {
        let mut shares: Vec<Box<dyn Share>> = vec![Box::new(fair)];
        let (had, _) = serve(&mut shares, &asks, |_| 0, LONG);
        if !cfg!(miri) {
            check_weights(&had, &asks, LONG, 0.05)?;
        }
        }
    }

    #[test]
    fn processes_with_a_ledger_share_by_weight_and_keep_the_device_busy(
        flows in prop::collection::vec((1u32..20, 5_000u64..60_000), 2..12),
    ) {
        let asks: Vec<AdmissionRequest> =
            flows.iter().enumerate().map(|(vm, &(weight, predicted))| ask(vm as u32, weight, predicted)).collect();
        let mut shares: Vec<Box<dyn Share>> =
            Sheet::all(asks.len()).into_iter().map(|sheet| Box::new(Ledger::new(sheet)) as _).collect();
        let (had, _) = serve(&mut shares, &asks, |flow| flow, LONG);
        if !cfg!(miri) {
            check_weights(&had, &asks, LONG, 0.05)?;
        }
    }

    /// One with small batches asks more often, and finds each gap that the other sleeps through.
    #[test]
    fn small_batches_of_a_light_process_do_not_take_the_gaps_of_a_heavy_one(
        light in 5_000u64..35_000, heavy in 40_000u64..60_000, weight in 13u32..20,
    ) {
        let asks = [ask(0, 1, light), ask(1, weight, heavy)];
        let mut shares: Vec<Box<dyn Share>> =
            Sheet::all(2).into_iter().map(|sheet| Box::new(Ledger::new(sheet)) as _).collect();
        let (had, _) = serve(&mut shares, &asks, |flow| flow, LONG);
        if !cfg!(miri) {
            check_weights(&had, &asks, LONG, 0.05)?;
        }
    }

    /// Two VMs in one process, one in another: the process counts with the weights of both.
    #[test]
    fn a_process_of_two_vms_has_the_share_of_both(first in 1u32..9, second in 1u32..9, other in 1u32..9) {
        let asks = [ask(0, first, 17_000), ask(1, second, 17_000), ask(2, other, 17_000)];
        let mut shares: Vec<Box<dyn Share>> =
            Sheet::all(2).into_iter().map(|sheet| Box::new(Ledger::new(sheet)) as _).collect();
        let (had, _) = serve(&mut shares, &asks, |flow| flow / 2, LONG);
        if !cfg!(miri) {
            check_weights(&had, &asks, LONG, 0.12)?;
        }
    }

    /// Whatever stands in the table: never a panic, never more than the bound in flight (or one batch), and a batch goes within the
    /// longest turn.
    #[test]
    fn hostile_words_neither_crash_nor_grant_without_limit_nor_starve(
        words in prop::collection::vec(
            prop::collection::vec(prop_oneof![Just(0u64), Just(1), Just(u64::MAX), Just(u64::MAX / 2), any::<u64>(), 0u64..1_000_000], 7),
            1..16,
        ),
        changing: bool, predicted in prop_oneof![Just(0u64), Just(u64::MAX), 1u64..10_000_000], weight: u32,
    ) {
        let sheets = Sheet::all(words.len() + 1);
        let slots = Arc::clone(&sheets[0].slots);
        let mut ledger = Ledger::new(sheets[0].clone());
        let mut now = 1_000_000_000;
        let (mut granted, mut out) = (0u64, Vec::new());
        let mut last = now;
        // Until something was let in, be it only because the longest turn is over: waits may be as short as 5 µs.
        for round in 0..if cfg!(miri) { 20 } else { 40_000u64 } {
            if round >= 400 && granted > 0 {
                break;
            }
            for (index, words) in words.iter().enumerate() {
                let mut hostile: [u64; 7] = words.as_slice().try_into().unwrap();
                if changing {
                    hostile[6] = round;
                    hostile[5] = hostile[5].wrapping_add(now);
                }
                slots.lock().unwrap()[index + 1] = Slot::from_words(hostile);
            }
            let what = AdmissionRequest { vm: 3, channel: 0, weight, predicted, bytes: u64::MAX };
            match ledger.ask(&what, now) {
                AdmissionDecision::Admit(grant) => {
                    granted += 1;
                    last = now;
                    out.push(grant);
                    let batch_or_bound = ledger.in_flight() <= IN_FLIGHT || out.len() == 1;
                    prop_assert!(batch_or_bound || predicted == 0, "{} in {}", ledger.in_flight(), out.len());
                }
                AdmissionDecision::Wait { until } => {
                    prop_assert!(until > now);
                    now = until;
                    if let Some(grant) = out.pop() {
                        ledger.done(grant, 30_000, now);
                    }
                }
                AdmissionDecision::Spill => prop_assert!(false, "not asked to spill"),
            }
            prop_assert!(now - last <= 2 * ledger::MAX_TURN, "starved for {} ns", now - last);
            now += 100;
        }
        // Under Miri there is no time for a longest turn.
        prop_assert!(granted > 0 || cfg!(miri));
    }

    /// No share panics, gives time back in the past or leaks room, in any order of asks, completions and drops.
    #[test]
    fn any_order_of_events_leaves_no_room_behind(
        which in 0usize..4,
        steps in prop::collection::vec((0u32..5, 0u32..3, 0u8..6, 0u64..2_000_000, prop_oneof![Just(0u64), Just(u64::MAX), 1u64..400_000]), 1..200),
    ) {
        let sheet = Sheet::all(3).remove(1);
        let mut share: Box<dyn Share> = match which {
            0 => Box::new(Fifo),
            1 => Box::new(Fair::default().spilling()),
            2 => Box::new(Ledger::new(sheet).spilling()),
            _ => Box::new(DelayBased::default()),
        };
        let mut out = Vec::new();
        let mut now = 5;
        for (vm, channel, what, passes, predicted) in steps {
            now += passes;
            match what {
                0..=2 => match share.ask(&AdmissionRequest { vm, channel, weight: vm * 400, predicted, bytes: predicted }, now) {
                    AdmissionDecision::Admit(grant) => out.push(grant),
                    AdmissionDecision::Wait { until } => prop_assert!(until > now),
                    AdmissionDecision::Spill => share.spilled(predicted, passes, now),
                },
                3 | 4 => if let Some(grant) = out.pop() { share.done(grant, passes, now) },
                _ => if !out.is_empty() { share.dropped(out.swap_remove(0)) },
            }
        }
        for grant in out.drain(..) {
            share.dropped(grant);
        }
        // All is given back: after a while anyone gets in at once.
        now += 10_000_000_000;
        prop_assert!(matches!(
            share.ask(&ask(99, 1, 10_000), now),
            AdmissionDecision::Admit(_)
        ));
    }

    #[test]
    fn the_prediction_finds_both_parts_and_is_not_thrown_off(
        per_byte in 0.02f64..0.2, per_descriptor in 8.0f64..80.0, wild in 0u64..20, seed: u64,
    ) {
        let mut predictor = Predictor::default();
        let (mut now, mut numbers) = (0, Random::new(seed));
        for _ in 0..if cfg!(miri) { 200 } else { 20_000 } {
            let random = numbers.next_u64();
            let descriptors = 1 + (random % 256) as u32;
            let bytes = u64::from(descriptors) * [512, 4096, 16_384][(random >> 20) as usize % 3];
            let mut taken = per_byte * bytes as f64 + per_descriptor * f64::from(descriptors);
            // Up to a fifth of the readings are of somebody else's work as well.
            if (random >> 30) % 100 < wild {
                taken *= 1.0 + ((random >> 40) % 1000) as f64;
            }
            predictor.learn(bytes, descriptors, now, now + taken as u64);
            now += taken as u64 + 10;
        }
        if !cfg!(miri) {
            for (bytes, descriptors) in [(4096, 1), (512 << 10, 128), (4 << 20, 256)] {
                let is = predictor.predict(bytes, descriptors) as f64;
                let should = per_byte * bytes as f64 + per_descriptor * f64::from(descriptors);
                prop_assert!((is / should - 1.0).abs() < 0.15, "{bytes} in {descriptors}: {is} for {should}");
            }
        }
    }
}

#[test]
fn one_that_comes_late_begins_beside_the_others_and_owes_nothing() {
    let mut fair = Fair::new(20_000);
    let mut admitted = |vm, now| match fair.ask(&ask(vm, 1, 10_000), now) {
        AdmissionDecision::Admit(grant) => {
            fair.done(grant, 10_000, now + 10_000);
            true
        }
        _ => false,
    };
    for round in 0..1000 {
        assert!(admitted(1, round * 10_000));
    }
    // It does not get a thousand batches in one go: they take turns at once.
    let mut turns = 0;
    for round in 1000..1100 {
        let now = round * 10_000;
        turns += i32::from(admitted(2, now)) - i32::from(admitted(1, now));
        assert!(turns.abs() <= 3);
    }
}

#[test]
fn flows_of_vms_that_are_gone_are_forgotten() {
    let mut turns = turns::Turns::default();
    for vm in 0..100u32 {
        let now = u64::from(vm) * 100_000_000;
        let _ = turns.ask(&ask(vm, 1, 1000), now);
        turns.admit(&ask(vm, 1, 1000));
        turns.left(vm);
    }
    assert!(turns.flows() < 30, "{}", turns.flows());
}

#[test]
fn what_is_far_away_goes_to_the_cpu_and_keeps_its_turn() {
    let mut fair = Fair::new(50_000).spilling();
    let ask = |vm| AdmissionRequest { vm, channel: 0, weight: 1, predicted: 40_000, bytes: 512 << 10 };
    let AdmissionDecision::Admit(first) = fair.ask(&ask(1), 0) else { panic!("the device is free") };
    let AdmissionDecision::Spill = fair.ask(&ask(2), 0) else { panic!("30 µs are longer than the CPU takes") };
    // On a host whose cores are taken the CPU is no way out.
    for now in (0..10).map(|step| step * 1000) {
        fair.spilled(512 << 10, 4_000_000, now);
    }
    let AdmissionDecision::Wait { .. } = fair.ask(&ask(3), 10_000) else { panic!("the CPU is slower now") };
    fair.done(first, 40_000, 40_000);
    let AdmissionDecision::Wait { .. } = fair.ask(&ask(3), 40_000) else { panic!("it is the other's turn") };
    let AdmissionDecision::Admit(_) = fair.ask(&ask(2), 41_000) else { panic!("it kept its turn") };
}

#[test]
fn without_a_ledger_the_wait_is_kept_near_what_is_aimed_at() {
    // Eight processes, each by itself, and all always hungry.
    let asks: Vec<AdmissionRequest> = (0..8).map(|vm| ask(vm, 1, 17_000)).collect();
    let settings = DelaySettings { spill: false, ..DelaySettings::default() };
    let mut shares: Vec<Box<dyn Share>> = asks.iter().map(|_| Box::new(DelayBased::new(settings)) as _).collect();
    let end = LONG;
    let (had, longest) = serve(&mut shares, &asks, |flow| flow, end);
    assert!(longest < 5_000_000, "somebody waited {longest} ns");
    if !cfg!(miri) {
        assert!(had.iter().sum::<f64>() > 0.9 * end as f64);
    }
}

#[test]
fn batches_are_small_while_others_wait() {
    let mut fair = Fair::default();
    let AdmissionDecision::Admit(first) = fair.ask(&ask(1, 1, 100_000), 0) else { panic!("free") };
    assert_eq!(fair.largest_batch(), u64::MAX);
    let AdmissionDecision::Admit(second) = fair.ask(&ask(2, 1, 100_000), 0) else { panic!("free") };
    assert_eq!(fair.largest_batch(), CONTENDED_BATCH);
    fair.done(first, 1, 1);
    fair.dropped(second);
    assert_eq!((fair.largest_batch(), fair.in_flight()), (u64::MAX, 0));
}

#[test]
fn a_batch_that_the_queue_refused_costs_its_flow_nothing() {
    let mut turns = turns::Turns::default();
    let [first, second] = [0, 1].map(|vm| ask(vm, 1, 100_000));
    for _ in 0..10 {
        assert_eq!(turns.ask(&second, 0), 0);
        turns.admit(&second);
        turns.returned(second.vm, second.predicted);
    }
    assert_eq!(turns.ask(&first, 0), 0);
    turns.admit(&first);
    turns.left(first.vm);
    // Who has had nothing yet is before who has, even if that one was there sooner.
    assert_eq!(turns.ask(&first, 0), 0);
    assert_eq!(turns.ask(&second, 0), 0);
    assert_eq!(turns.ask(&first, 0), second.predicted);
}

#[test]
fn a_fair_share_neither_reckons_with_what_never_went_nor_counts_it() {
    let mut share = Fair::default();
    let AdmissionDecision::Admit(first) = share.ask(&ask(1, 1, 150_000), 0) else { panic!("the device is free") };
    for time in 0..100 {
        // A hundred times 0.1 ms would be beyond any bound.
        let AdmissionDecision::Admit(refused) = share.ask(&ask(0, 1, 100_000), 0) else {
            panic!("refused {time} times")
        };
        assert_eq!((refused.expected, share.in_flight()), (250_000, 250_000), "refused {time} times");
        share.dropped(refused);
    }
    for vm in [1, 0] {
        assert!(matches!(share.ask(&ask(vm, 1, 200_000), 1_000), AdmissionDecision::Wait { .. }));
    }
    share.done(first, 60_000, 60_000);
    assert!(
        matches!(share.ask(&ask(1, 1, 200_000), 61_000), AdmissionDecision::Wait { .. }),
        "the other has had nothing yet"
    );
    assert!(matches!(share.ask(&ask(0, 1, 200_000), 62_000), AdmissionDecision::Admit(_)));
}

#[test]
fn a_process_pays_in_the_ledger_for_nothing_that_its_queue_refused() {
    let sheets = Sheet::all(2);
    let slots = Arc::clone(&sheets[0].slots);
    let shown = move || {
        let Slot { in_flight, until, .. } = slots.lock().unwrap()[1];
        (in_flight, until)
    };
    let [mut first, mut second] = [0, 1].map(|own| Ledger::new(sheets[own].clone()));
    let AdmissionDecision::Admit(went) = first.ask(&ask(1, 1, 150_000), 1_000) else { panic!("the device is free") };
    for time in 0..100 {
        // The first has no more than half of the bound and a batch of the second's size, and both together are within it.
        let AdmissionDecision::Admit(refused) = second.ask(&ask(2, 1, 100_000), 1_000) else {
            panic!("refused {time} times")
        };
        assert_eq!((refused.expected, second.in_flight()), (250_000, 100_000), "refused {time} times");
        assert_eq!(shown(), (100_000, 251_000));
        second.dropped(refused);
        assert_eq!(shown(), (0, 151_000));
    }
    for (vm, share) in [(1, &mut first), (2, &mut second)] {
        assert!(matches!(share.ask(&ask(vm, 1, 200_000), 2_000), AdmissionDecision::Wait { .. }));
    }
    first.done(went, 60_000, 60_000);
    assert!(
        matches!(first.ask(&ask(1, 1, 200_000), 61_000), AdmissionDecision::Wait { .. }),
        "the other has had nothing yet"
    );
    assert!(matches!(second.ask(&ask(2, 1, 200_000), 62_000), AdmissionDecision::Admit(_)));
}

#[test]
fn who_has_the_device_to_itself_is_not_held_back_until_another_comes() {
    let mut share = Fair::default().free_alone();
    let mut grants: Vec<Grant> = (0..100)
        .map(|time| match share.ask(&ask(1, 1, 100_000), time) {
            AdmissionDecision::Admit(grant) => grant,
            other => panic!("{other:?} after {time}"),
        })
        .collect();
    // The other waits for what is there already, and from now on the first waits too.
    assert!(matches!(share.ask(&ask(2, 1, 100_000), 1_000), AdmissionDecision::Wait { .. }));
    assert!(matches!(share.ask(&ask(1, 1, 100_000), 2_000), AdmissionDecision::Wait { .. }));
    let now = 10_000_000;
    grants.drain(..).for_each(|grant| share.done(grant, 100_000, now));
    let AdmissionDecision::Admit(of_other) = share.ask(&ask(2, 1, 100_000), now) else { panic!("its turn has come") };
    share.done(of_other, 100_000, now + 100_000);
    // Between two batches it still counts.
    let mut first = (0..20).map(|step| share.ask(&ask(1, 1, 100_000), now + 200_000 + step));
    assert_eq!(first.by_ref().filter(|verdict| matches!(verdict, AdmissionDecision::Admit(_))).count(), 3);
    // It has gone.
    let later = now + 200_000_000;
    assert!((0..20).all(|step| matches!(share.ask(&ask(1, 1, 100_000), later + step), AdmissionDecision::Admit(_))));
}
