//! The timing: against the published figures to which it was fitted, against queueing theory, and the speed of the model itself.

use sterna_idxd_model::config::Timing;
use sterna_idxd_model::core::{Completed, Device, Payload, Posting, Step, Submitted, Timed};
use sterna_idxd_model::{DeviceConfig, Kind, Mode, QueueConfig};
use sterna_test_kit::Random;

use crate::common::queue;

fn device(kind: Kind, timing: Option<Timing>, engines: u32) -> Device {
    let name = if kind == Kind::Dsa { "dsa0" } else { "iax0" };
    let queues = vec![QueueConfig { size: 128, max_batch_size: 1024, ..queue("wq0.0") }];
    let config =
        DeviceConfig { name: name.into(), kind, engines, reorder: false, timing, queues, ..DeviceConfig::default() };
    Device::new(&config, 1, true).unwrap()
}

/// Polls until `now` and calls `each` with every completion.
fn run_until(device: &mut Device, now: u64, mut each: impl FnMut(Completed)) {
    loop {
        match device.poll(now) {
            Step::Completed(completed) => each(completed),
            Step::Idle { .. } => return,
            other => panic!("only timed work was submitted: {other:?}"),
        }
    }
}

fn submit(device: &mut Device, timed: Timed, now: u64) -> Submitted {
    device.submit(0, Posting::NonPosted, Payload::Timed(timed), now)
}

/// Returns bytes per ns with `depth` jobs in flight; each completion submits the next.
fn throughput(mut device: Device, depth: u32, timed: Timed) -> f64 {
    const COUNT: u64 = 2000;
    let (mut done, mut last) = (0, 0);
    for _ in 0..depth {
        assert_eq!(submit(&mut device, timed, 0), Submitted::Accepted);
    }
    while done < COUNT {
        let next = device.next_event().expect("there is always something in flight");
        let mut again = Vec::new();
        run_until(&mut device, next, |completed| again.push(completed.at));
        for at in again {
            done += 1;
            last = at;
            assert_eq!(submit(&mut device, timed, at), Submitted::Accepted);
        }
    }
    (COUNT * u64::from(timed.members.max(1)) * timed.bytes) as f64 / last as f64
}

fn off(measured: f64, published: f64) -> f64 {
    (measured / published - 1.0).abs()
}

#[test]
fn dsa_moves_of_1_mib_are_as_fast_as_published() {
    let timed = Timed { bytes: 1 << 20, writes: true, ..Timed::default() };
    let rate = |depth: u32| throughput(device(Kind::Dsa, None, 4), depth, timed);
    let sync = rate(1);
    assert!(off(sync, 20.1) < 0.01, "one at a time: {sync:.2} GB/s, published 20.1");
    let several = rate(16);
    for published in [22.0, 23.2, 23.0] {
        assert!(off(several, published) < 0.04, "{several:.2} GB/s, published {published}");
    }
}

#[test]
fn dsa_reads_at_least_as_fast_as_was_seen() {
    let timed = Timed { members: 128, bytes: 4096, ..Timed::default() };
    let rate = throughput(device(Kind::Dsa, None, 4), 16, timed);
    assert!(rate >= 27.0, "zero pages in batches of 128: {rate:.1} GB/s, at least 27 seen");
    assert!(rate <= 32.0, "{rate:.1} GB/s, about 30 remembered");
}

#[test]
fn iaa_deflates_in_the_published_time() {
    for (bytes, published) in [(4096, 3250.0), (16_384, 9400.0)] {
        let mut device = device(Kind::Iaa, None, 8);
        submit(&mut device, Timed { bytes, writes: true, ..Timed::default() }, 0);
        let mut at = 0;
        run_until(&mut device, u64::MAX, |completed| at = completed.at);
        assert!(off(at as f64, published) < 0.02, "{bytes} bytes: {at} ns, published {published}");
    }
}

#[test]
fn one_core_with_enqcmd_cannot_fill_4_kib_but_four_can() {
    let timing = Timing::dsa();
    let needed = 4096 * timing.byte_ps / 1000;
    assert!(timing.enqcmd_ns > needed && timing.enqcmd_ns / 4 < needed && timing.movdir64b_ns < needed);
}

/// Poisson arrivals to a server with a fixed service time: M/D/1.
#[test]
fn a_single_server_waits_as_theory_says() {
    const SERVICE: u64 = 1000;
    for load in [0.3_f64, 0.6, 0.8] {
        let mut device = device(Kind::Dsa, Some(Timing::server(1000)), 1);
        let timed = Timed { bytes: SERVICE, writes: true, ..Timed::default() };
        let (mut random, mut now, mut sum, mut count) = (Random::new(1), 0.0_f64, 0_u64, 0_u64);
        let mut arrivals = Vec::new();
        for tag in 0..300_000 {
            let uniform = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
            now += -(1.0 - uniform).ln() * SERVICE as f64 / load;
            let at = now as u64;
            run_until(&mut device, at, |completed| {
                sum += completed.at - arrivals[completed.tag as usize];
                count += 1;
            });
            arrivals.push(at);
            if submit(&mut device, Timed { tag, ..timed }, at) != Submitted::Accepted {
                panic!("128 entries are enough at load {load}");
            }
        }
        let busy = device.accounts().engine_ns as f64 / now;
        assert!(busy <= 1.0 && off(busy, load) < 0.02, "utilisation {busy:.3} at load {load}");
        let mean = sum as f64 / count as f64;
        let theory = SERVICE as f64 * (1.0 + load / (2.0 * (1.0 - load)));
        assert!(off(mean, theory) < 0.02, "load {load}: {mean:.0} ns, theory {theory:.0} ns");
    }
}

#[test]
fn a_dedicated_queue_takes_timed_work_as_well() {
    let queues = vec![QueueConfig { mode: Mode::Dedicated, size: 2, ..queue("wq0.0") }];
    let mut device = Device::new(&DeviceConfig { queues, ..DeviceConfig::default() }, 1, true).unwrap();
    let mut submit = || device.submit(0, Posting::Posted, Payload::Timed(Timed::default()), 0);
    assert_eq!([submit(), submit(), submit()], [Submitted::Accepted, Submitted::Accepted, Submitted::Dropped]);
}

#[test]
fn the_next_event_is_never_before_what_it_is_about() {
    let mut device = device(Kind::Dsa, Some(Timing::server(1000)), 1);
    assert_eq!(device.next_event(), None);
    submit(&mut device, Timed { tag: 1, bytes: 100, ..Timed::default() }, 5_000);
    submit(&mut device, Timed { tag: 2, bytes: 100, ..Timed::default() }, 5_010);
    let mut seen = Vec::new();
    while let Some(at) = device.next_event() {
        run_until(&mut device, at, |completed| seen.push((completed.tag, completed.started, completed.at)));
    }
    assert_eq!(seen, [(1, 5_000, 5_100), (2, 5_100, 5_200)]);
}

#[test]
fn page_requests_and_misses_take_their_time() {
    let time = |timed: Timed| {
        let mut device = device(Kind::Dsa, None, 1);
        submit(&mut device, timed, 0);
        let mut at = 0;
        run_until(&mut device, u64::MAX, |completed| at = completed.at);
        at
    };
    let plain = time(Timed { bytes: 4096, ..Timed::default() });
    assert_eq!(time(Timed { bytes: 4096, translation_misses: 2, ..Timed::default() }), plain + 240);
    assert!(time(Timed { bytes: 4096, page_requests: 1, ..Timed::default() }) >= plain + 1000);
    let one = time(Timed { bytes: 4096, members: 2, ..Timed::default() });
    let two = time(Timed { bytes: 4096, members: 3, ..Timed::default() });
    assert!(two > one && one > plain, "{plain} {one} {two}");
}

/// Runs what the randomised tests of the offload engine repeat for 10 000 seeds, and prints how long those would take.
#[test]
fn manual_models_run_batch_after_batch() {
    use crate::common::*;
    let started = std::time::Instant::now();
    let records = Mapping::anonymous(4096, libc::PROT_READ | libc::PROT_WRITE);
    let data = Mapping::anonymous(16 * 4096, libc::PROT_READ | libc::PROT_WRITE);
    records.put(0, &[0; 4096]);
    data.put(0, &[0; 16 * 4096]);
    const SEEDS: u64 = 20;
    for seed in 0..SEEDS {
        let config = sterna_idxd_model::ModelConfig { seed, ..sterna_idxd_model::ModelConfig::dsa() };
        let model = sterna_idxd_model::Model::manual(config).unwrap();
        let queue = model.queue("wq0.0").unwrap();
        for round in 0..64 {
            records.put(0, &[0; 32]);
            for member in 0..16_usize {
                let page = data.address + 4096 * member as u64;
                let raw = compare_pattern(records.address + 32 + 32 * member as u64, page, 0, 4096);
                records.put(2048 + 64 * member, &raw.0);
            }
            assert!(queue.enqcmd(&batch(records.address, records.address + 2048, 16).0));
            model.settle();
            assert_eq!(records.get(0, 1), [1], "seed {seed} batch {round}");
        }
    }
    let all = started.elapsed().as_secs_f64() / SEEDS as f64 * 10_000.0;
    println!("10 000 seeds of 64 batches of 16 pages would take {all:.0} s");
}
