//! The simulator against queueing theory.

use proptest::prelude::*;
use sterna_simulator::device::{Completed, Device, Shape, Timing};
use sterna_simulator::host::run;
use sterna_simulator::resources::Pipe;
use sterna_simulator::scenario::{Hog, Policy, Scenario, Structure, Vm};
use sterna_test_kit::Random;

/// Returns a number of an exponential distribution.
fn exponential(random: &mut Random, mean: f64) -> f64 {
    let unit = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    -mean * (1.0 - unit).ln()
}

struct Measured {
    mean_wait: f64,
    mean_sojourn: f64,
    mean_occupied: f64,
    rate: f64,
    utilisation: f64,
}

/// Poisson arrivals of equal batches.
fn poisson(shape: &Shape, bytes: u64, load: f64, batches: usize, seed: u64) -> Measured {
    let service = Device::service(&shape.timing, bytes);
    let mut random = Random::new(seed);
    let mut device = Device::new(shape);
    let (mut clock, mut now, mut area) = (0.0, 0u64, 0.0);
    let mut arrivals = vec![0u64; batches];
    let mut waits = 0.0;
    let mut sojourns = 0.0;
    let mut done: Vec<Completed> = Vec::new();
    let mut step = |device: &mut Device, now: &mut u64, to: u64, arrivals: &[u64]| {
        while let Some(next) = device.next()
            && next <= to
        {
            area += device.occupied() as f64 * (next - *now) as f64;
            *now = next;
            device.advance(next, &mut done);
            for done in done.drain(..) {
                waits += (done.begun - arrivals[done.tag as usize]) as f64;
                sojourns += (done.at - arrivals[done.tag as usize]) as f64;
            }
        }
        if to != u64::MAX {
            area += device.occupied() as f64 * (to - *now) as f64;
            *now = to;
        }
    };
    for batch in 0..batches {
        clock += exponential(&mut random, service / load);
        let at = clock as u64;
        step(&mut device, &mut now, at, &arrivals);
        arrivals[batch] = at;
        assert!(device.submit(batch as u64, 1, bytes, at));
    }
    step(&mut device, &mut now, u64::MAX, &arrivals);
    let count = batches as f64;
    Measured {
        mean_wait: waits / count,
        mean_sojourn: sojourns / count,
        mean_occupied: area / now as f64,
        rate: count / now as f64,
        utilisation: device.busy() / now as f64,
    }
}

/// One engine, no overhead, room for all.
fn single() -> Shape {
    Shape { timing: Timing::server(33_000), entries: 65_535, engines: 1 }
}

#[test]
fn a_single_server_waits_as_long_as_md1_says() {
    for (load, seed) in [(0.3, 1), (0.5, 2), (0.7, 3), (0.9, 4)] {
        let measured = poisson(&single(), 1000, load, 2_000_000, seed);
        let service = 33_000.0;
        let expected = load * service / (2.0 * (1.0 - load));
        let error = measured.mean_wait / expected - 1.0;
        println!("load {load}, seed {seed}: waits {:.0}, M/D/1 {expected:.0}, error {error:+.4}", measured.mean_wait);
        assert!(error.abs() < 0.02, "load {load}, seed {seed}: {error:+.4}");
    }
}

#[test]
fn littles_law_and_utilisation_hold_with_one_engine_and_with_four() {
    for engines in [1, 4] {
        for (load, seed) in [(0.2, 5), (0.8, 6), (0.95, 7)] {
            let timing = Timing { engine_read_byte_ps: 40_000, ..Timing::server(33_000) };
            let shape = Shape { timing, engines, ..single() };
            let measured = poisson(&shape, 1000, load * 0.8, 300_000, seed);
            let error = measured.mean_occupied / (measured.rate * measured.mean_sojourn) - 1.0;
            assert!(error.abs() < 0.005, "engines {engines}, load {load}, seed {seed}: {error:+.5}");
            assert!(measured.utilisation <= 1.0);
            assert!((measured.utilisation / (load * 0.8) - 1.0).abs() < 0.02);
        }
    }
}

#[test]
fn a_backlogged_device_is_busy_all_the_time_and_never_more() {
    let mut device = Device::new(&Shape::default());
    let mut done = Vec::new();
    let (mut now, mut tag) = (0, 0);
    while tag < 20_000 {
        while device.submit(tag, 128, 4096, now) {
            tag += 1;
        }
        now = device.next().unwrap();
        device.advance(now, &mut done);
    }
    // Batches that are still in the device are not done.
    let done = device.busy() - device.occupied() as f64 * Device::service(&Timing::dsa(), 512 << 10);
    let utilisation = done / now as f64;
    assert!((0.995..1.002).contains(&utilisation), "{utilisation}");
}

#[test]
fn a_pipe_never_moves_more_than_it_can() {
    let mut pipe = Pipe::new(10.0);
    assert_eq!(pipe.reserve(0, 1000.0), 100);
    assert_eq!(pipe.reserve(50, 1000.0), 200);
    assert_eq!(pipe.reserve(1000, 10.0), 1001);
}

#[test]
fn what_finds_the_queue_full_has_waited_until_the_cpu_was_done_with_it() {
    let mut scenario = Scenario::of(vec![Vm { pages: 1 << 14, ..Vm::gib(1) }]);
    scenario.policy = Policy::Fifo;
    scenario.device.entries = 1;
    scenario.hogs = vec![Hog { device: 0, batches: 64, bytes: 64 << 20, begins: 0 }];
    let outcome = run(&scenario);
    let vm = &outcome.vms[0];
    assert_eq!((vm.on_device, vm.on_cpu), (0, 128), "the hog has the only entry all the time");
    let one = scenario.costs.scan_page * 128.0;
    assert!(vm.longest_wait as f64 >= one.floor(), "{} ns, and one batch takes the CPU {one}", vm.longest_wait);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// In every simulation each packet is searched once, no resource is busier than possible, and all migrations end.
    #[test]
    fn a_run_is_complete_and_within_its_means(
        vms in 1usize..12, pages in 1u64..20_000, normal in prop::sample::select(vec![0u64, 130, 500, 1000]),
        cores in 1usize..9, devices in 0usize..4, structure in 0usize..2, policy in 0usize..4, spill: bool,
        window in 1usize..10, batch in 1u32..300, channels in 1usize..5, entries in 1u32..128,
    ) {
        let vm = Vm { pages, normal_per_mille: normal, window, batch, channels, ..Vm::gib(1) };
        let mut scenario = Scenario::of(vec![vm; vms]);
        scenario.cores = cores;
        scenario.devices = devices;
        scenario.structure = if structure == 0 || devices == 0 { Structure::Cpu } else { Structure::Harvest };
        scenario.policy = Policy::ALL[policy];
        scenario.spill = spill;
        scenario.device.entries = entries;
        let outcome = run(&scenario);
        let ended = outcome.ended as f64;
        for vm in &outcome.vms {
            prop_assert!(vm.finished.is_some());
            prop_assert_eq!(vm.on_cpu + vm.on_device, pages.div_ceil(u64::from(batch)));
        }
        prop_assert!(outcome.cpu().total() <= ended * cores as f64 * 1.0001 + 10_000.0);
        prop_assert!(outcome.memory_busy <= ended * 1.0001 + 10_000.0);
        prop_assert!(outcome.network_busy <= ended * 1.0001);
        prop_assert!(outcome.device_busy.iter().all(|&busy| busy <= ended * 1.0001));
        let again = run(&scenario);
        prop_assert_eq!(again.ended, outcome.ended);
        prop_assert_eq!(again.cpu(), outcome.cpu());
    }
}
