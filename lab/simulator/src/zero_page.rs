//! One large VM and one device: the published run, and the same work in Sterna's structure.
//!
//! The software's costs are fitted to one published run ([`fit`]: 50 % normal pages,
//! looked at by the CPU). The other three are held out: what the simulator says of them, beside what was measured, is the
//! error that every other figure here must be read with.

use crate::Nanos;
use crate::costs::{Costs, fit, fitted_connection};
use crate::host::{Outcome, run};
use crate::scenario::{Policy, Scenario, Structure, Vm};

/// A published run, in milliseconds of CPU and of time.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// What it is called here.
    pub name: &'static str,
    /// Of 1000 pages, how many were sent.
    pub normal_per_mille: u64,
    /// Whether the device looked.
    pub device: bool,
    /// The main thread.
    pub main: f64,
    /// All senders.
    pub senders: f64,
    /// The polling thread.
    pub polling: f64,
    /// From beginning to end.
    pub total: f64,
    /// Whether the costs were fitted to it.
    pub fitted: bool,
}

/// Seed Z: two Xeon Platinum 8457C, 100 GB, 8 channels, one device, batches of 128.
pub const PUBLISHED: [Published; 4] = [
    Published {
        name: "half normal, CPU",
        normal_per_mille: 500,
        device: false,
        main: fit::MAIN_MS,
        senders: fit::SENDERS_MS,
        polling: 0.0,
        total: fit::TOTAL_MS,
        fitted: true,
    },
    Published {
        name: "half normal, device",
        normal_per_mille: 500,
        device: true,
        main: 6_129.0,
        senders: 32_568.0 - 6_129.0 - 3_613.0,
        polling: 3_613.0,
        total: 9_535.0,
        fitted: false,
    },
    Published {
        name: "all zero, CPU",
        normal_per_mille: 0,
        device: false,
        main: 4_861.0,
        senders: 11_154.0 - 4_861.0,
        polling: 0.0,
        total: 4_867.0,
        fitted: false,
    },
    Published {
        name: "all zero, device",
        normal_per_mille: 0,
        device: true,
        main: 3_847.0,
        senders: 8_700.0 - 3_847.0 - 3_429.0,
        polling: 3_429.0,
        total: 3_888.0,
        fitted: false,
    },
];

/// The VM of the published runs, or a part of it: a `part`-th.
fn vm(normal_per_mille: u64, window: usize, part: u64) -> Vm {
    Vm {
        pages: fit::PAGES as u64 / part,
        normal_per_mille,
        weight: 1,
        channels: 8,
        window,
        batch: 128,
        begins: 0,
        lies: false,
        dies: None,
    }
}

/// A published run, with these costs.
pub fn published(run: &Published, costs: &Costs, part: u64) -> Scenario {
    let mut scenario = Scenario::of(vec![vm(run.normal_per_mille, 1, part)]);
    scenario.costs = costs.clone();
    // The network was not full, and no thread either: each connection's receiver is what the senders wait for.
    scenario.costs.connection_page = fitted_connection();
    scenario.structure = if run.device { Structure::CompletionThread } else { Structure::Cpu };
    scenario.policy = Policy::Fifo;
    scenario.spill = false;
    scenario.share_zero_packets = false;
    scenario
}

/// The same work in Sterna's structure, looked at by the CPU alone or by devices.
pub fn sterna(normal_per_mille: u64, devices: usize, spill: bool, costs: &Costs, part: u64) -> Scenario {
    let mut scenario = Scenario::of(vec![vm(normal_per_mille, 8, part)]);
    scenario.costs = costs.clone();
    scenario.costs.connection_page = fitted_connection();
    scenario.structure = if devices > 0 { Structure::Harvest } else { Structure::Cpu };
    scenario.devices = devices;
    scenario.spill = spill;
    // Where all is as predicted, only the batch's record is read.
    scenario.read_members = normal_per_mille > 0;
    scenario
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// From beginning to end.
    pub total: Nanos,
    /// CPU of the main thread for each page, ns.
    pub main: f64,
    /// Of the senders.
    pub senders: f64,
    /// Of the polling thread.
    pub polling: f64,
    /// Of all, by measured figures.
    pub measured: f64,
    /// Of all, charged.
    pub charged: f64,
    /// Device time for each page.
    pub device: f64,
    /// How much of the time the devices were busy.
    pub utilisation: f64,
}

impl Figures {
    /// Of a run of one VM with so many pages.
    pub fn of(outcome: &Outcome, pages: u64) -> Self {
        let (vm, pages) = (&outcome.vms[0], pages as f64);
        Self {
            total: outcome.total(),
            main: vm.search.total() / pages,
            senders: vm.check.and(vm.send).total() / pages,
            polling: vm.poll.total() / pages,
            measured: outcome.cpu().measured / pages,
            charged: outcome.cpu().charged / pages,
            device: vm.device / pages,
            utilisation: if outcome.device_busy.is_empty() { 0.0 } else { outcome.utilisation() },
        }
    }

    /// CPU of all threads for each page, both accounts: the only place where they are added, and named for it.
    pub fn measured_and_charged(&self) -> f64 {
        self.measured + self.charged
    }
}

/// A figure, and how it is set.
type Knob = (&'static str, fn(&mut Scenario, f64));

/// Every figure that a result may hang on.
const KNOBS: [Knob; 16] = [
    ("search_page", |scenario, factor| scenario.costs.search_page *= factor),
    ("send_page", |scenario, factor| scenario.costs.send_page *= factor),
    ("send_packet", |scenario, factor| scenario.costs.send_packet *= factor),
    ("zero_packets_shared", |scenario, factor| scenario.costs.zero_packets_shared *= factor),
    ("scan_page", |scenario, factor| scenario.costs.scan_page *= factor),
    ("fill_descriptor", |scenario, factor| scenario.costs.fill_descriptor *= factor),
    ("ask", |scenario, factor| scenario.costs.ask *= factor),
    ("harvest", |scenario, factor| scenario.costs.harvest *= factor),
    ("enqcmd", |scenario, factor| scenario.costs.enqcmd *= factor),
    ("record_line, record_first", |scenario, factor| {
        scenario.costs.record_line *= factor;
        scenario.costs.record_first *= factor;
    }),
    ("wake", |scenario, factor| scenario.costs.wake *= factor),
    ("timer_slack", |scenario, factor| scenario.costs.timer_slack *= factor),
    ("connection_page", |scenario, factor| scenario.costs.connection_page *= factor),
    ("memory bandwidth", |scenario, factor| scenario.costs.dram *= factor),
    ("device, time per byte", |scenario, factor| {
        let timing = &mut scenario.device.timing;
        timing.read_byte_ps = (timing.read_byte_ps as f64 * factor) as u64;
        timing.engine_read_byte_ps = (timing.engine_read_byte_ps as f64 * factor) as u64;
    }),
    ("device, time per descriptor", |scenario, factor| {
        let timing = &mut scenario.device.timing;
        timing.descriptor_ns = (timing.descriptor_ns as f64 * factor) as u64;
    }),
];

/// What half and twice a figure make of a run: CPU of both accounts and time, as multiples.
#[derive(Clone, Debug)]
pub struct Sensitivity {
    /// Which figure.
    pub figure: &'static str,
    /// CPU and time with half of it.
    pub half: (f64, f64),
    /// And with twice.
    pub twice: (f64, f64),
}

/// Of every figure.
pub fn sensitivity(scenario: &Scenario) -> Vec<Sensitivity> {
    let result = |scenario: &Scenario| {
        let figures = Figures::of(&run(scenario), scenario.vms[0].pages);
        (figures.measured_and_charged(), figures.total as f64)
    };
    let (cpu, time) = result(scenario);
    let with = |set: fn(&mut Scenario, f64), factor: f64| {
        let mut changed = scenario.clone();
        set(&mut changed, factor);
        let result = result(&changed);
        (result.0 / cpu, result.1 / time)
    };
    KNOBS.iter().map(|&(figure, set)| Sensitivity { figure, half: with(set, 0.5), twice: with(set, 2.0) }).collect()
}
