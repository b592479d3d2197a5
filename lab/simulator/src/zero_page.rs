//! One large VM and one device: the published run, and the same work in Sterna's structure.
//!
//! The software's costs are fitted to one published run ([`fit`]: 50 % normal pages, searched by the CPU). The other
//! three are held out: the difference between the simulated and the measured figures is the error to expect in every
//! other figure here.

use crate::Nanos;
use crate::costs::{Costs, fit, fitted_connection};
use crate::host::{Outcome, run};
use crate::scenario::{Policy, Scenario, Structure, Vm};

/// A published run, in milliseconds of CPU and of time.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// Its name in tables.
    pub name: &'static str,
    /// Of 1000 pages, how many were sent.
    pub normal_per_mille: u64,
    /// Whether the device searched for zero pages.
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

/// Makes the VM of the published runs, or a `part`-th of it.
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

/// Makes the scenario of a published run, with these costs.
pub fn published(run: &Published, costs: &Costs, part: u64) -> Scenario {
    let mut scenario = Scenario::of(vec![vm(run.normal_per_mille, 1, part)]);
    scenario.costs = costs.clone();
    // Neither the network nor a thread was saturated: the senders wait for the receiver of their connection.
    scenario.costs.connection_page = fitted_connection();
    scenario.structure = if run.device { Structure::CompletionThread } else { Structure::Cpu };
    scenario.policy = Policy::Fifo;
    scenario.spill = false;
    scenario.share_zero_packets = false;
    scenario
}

/// Makes a scenario of the same work in Sterna's structure, searched by the CPU alone or by devices.
pub fn sterna(normal_per_mille: u64, devices: usize, spill: bool, costs: &Costs, part: u64) -> Scenario {
    let mut scenario = Scenario::of(vec![vm(normal_per_mille, 8, part)]);
    scenario.costs = costs.clone();
    scenario.costs.connection_page = fitted_connection();
    scenario.structure = if devices > 0 { Structure::Harvest } else { Structure::Cpu };
    scenario.devices = devices;
    scenario.spill = spill;
    // If every page is as predicted, only the batch's record is read.
    scenario.read_members = normal_per_mille > 0;
    scenario
}

/// The figures that are compared.
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
    /// Returns the figures of a run of one VM with this many pages.
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

    /// Returns the CPU time of all threads per page, both accounts added, as the name states.
    pub fn measured_and_charged(&self) -> f64 {
        self.measured + self.charged
    }
}

/// A cost, and how it is changed by a factor.
type Knob = (&'static str, fn(&mut Scenario, f64));

/// Every cost on which a result may depend.
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

/// The effect of half and of twice a cost on a run: CPU of both accounts and time, as multiples.
#[derive(Clone, Debug)]
pub struct Sensitivity {
    /// The cost.
    pub figure: &'static str,
    /// CPU and time with half of the cost.
    pub half: (f64, f64),
    /// CPU and time with twice the cost.
    pub twice: (f64, f64),
}

/// Returns the sensitivity to every cost.
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
