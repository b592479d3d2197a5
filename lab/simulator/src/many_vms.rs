//! Many VMs at once on few devices.

use crate::Nanos;
use crate::host::{Outcome, WINDOW};
use crate::scenario::{Hog, Policy, Scenario, Structure, Vm};

/// The content of the VMs' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Every page is scanned completely, and every second one is sent: as in the published run.
    Half,
    /// All pages are zero: scanning only.
    Zero,
}

impl Content {
    /// Returns its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Half => "half zero",
            Self::Zero => "all zero",
        }
    }

    fn per_mille(self) -> u64 {
        match self {
            Self::Half => 500,
            Self::Zero => 0,
        }
    }
}

/// Makes a scenario of this many VMs of `mib` MiB, all at once, on `cores`; without a policy only the CPU is used.
pub fn crowd(
    vms: usize,
    mib: u64,
    content: Content,
    cores: usize,
    devices: usize,
    policy: Option<Policy>,
    spill: bool,
) -> Scenario {
    let vm = Vm { pages: mib << 8, normal_per_mille: content.per_mille(), ..Vm::gib(1) };
    let mut scenario = Scenario::of(vec![vm; vms]);
    scenario.cores = cores;
    scenario.read_members = content == Content::Half;
    scenario.spill = spill;
    match policy {
        Some(policy) => {
            scenario.policy = policy;
            scenario.devices = devices;
        }
        None => {
            scenario.structure = Structure::Cpu;
            scenario.devices = 0;
        }
    }
    scenario
}

/// The mixes of unequal VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// All VMs start at the beginning.
    Together,
    /// Half of the light ones start after 200 ms.
    Late,
    /// Another program keeps 32 batches of 512 KiB in the device.
    Hog,
    /// One of the light ones takes as much as it can and publishes that it has nothing.
    Liar,
    /// One of the heavy ones is killed after 150 ms.
    Death,
}

impl Mix {
    /// All mixes.
    pub const ALL: [Self; 5] = [Self::Together, Self::Late, Self::Hog, Self::Liar, Self::Death];

    /// Returns its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Together => "together",
            Self::Late => "late arrivals",
            Self::Hog => "a foreign hog",
            Self::Liar => "a liar",
            Self::Death => "a dead holder",
        }
    }
}

/// Weight of a heavy VM; a light one has 1.
pub const HEAVY: u32 = 10;
const HEAVIES: usize = 10;
const ALL: usize = 100;

/// Makes ten heavy VMs, with four senders and 32 batches each, and ninety light ones, on one device that all of them
/// want all the time: all pages are zero, and there are enough cores.
pub fn unequal(mix: Mix, policy: Policy, spill: bool) -> Scenario {
    let light = Vm { normal_per_mille: 0, ..Vm::gib(1) };
    let heavy = Vm { weight: HEAVY, channels: 4, window: 32, ..light };
    let mut vms = vec![heavy; HEAVIES];
    vms.extend(vec![light; ALL - HEAVIES]);
    match mix {
        Mix::Together | Mix::Hog => {}
        Mix::Late => vms.iter_mut().skip(HEAVIES).step_by(2).for_each(|vm| vm.begins = 200_000_000),
        Mix::Liar => vms[ALL - 1].lies = true,
        Mix::Death => vms[0].dies = Some(150_000_000),
    }
    let mut scenario = Scenario::of(vms);
    scenario.read_members = false;
    scenario.policy = policy;
    scenario.spill = spill;
    if mix == Mix::Hog {
        scenario.hogs.push(Hog { device: 0, batches: 32, bytes: 512 << 10, begins: 0 });
    }
    scenario
}

/// The deviation of the device's shares from the weights, in windows of 100 ms.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// Windows in which all examined VMs wanted the device all the time.
    pub windows: usize,
    /// The largest deviation of any VM in any window, as a part of its due share.
    pub worst: f64,
    /// The mean deviation.
    pub mean: f64,
}

/// Compares device time with weights, among the honest VMs, in the windows from when all had started until the first
/// was done. A VM that died is excluded, and so is the window of its death.
pub fn shares(scenario: &Scenario, outcome: &Outcome) -> Shares {
    let honest: Vec<usize> =
        (0..scenario.vms.len()).filter(|&vm| !scenario.vms[vm].lies && scenario.vms[vm].dies.is_none()).collect();
    let begun = scenario.vms.iter().map(|vm| vm.begins.max(vm.dies.unwrap_or(0))).max().unwrap_or(0);
    let done = honest.iter().map(|&vm| outcome.vms[vm].finished.unwrap_or(outcome.ended)).min().unwrap_or(0);
    // The first window is excluded: the batches that all have in the device at the very beginning follow no order yet.
    let (first, last) = (begun.div_ceil(WINDOW).max(1), done / WINDOW);
    let weights: f64 = honest.iter().map(|&vm| f64::from(scenario.vms[vm].weight)).sum();
    let mut shares = Shares::default();
    let mut sum = 0.0;
    for window in first..last {
        let had = |vm: usize| outcome.vms[vm].windows.get(window as usize).copied().unwrap_or(0.0);
        let all: f64 = honest.iter().map(|&vm| had(vm)).sum();
        shares.windows += 1;
        for &vm in &honest {
            let due = all * f64::from(scenario.vms[vm].weight) / weights;
            let off = if due > 0.0 { (had(vm) / due - 1.0).abs() } else { 1.0 };
            shares.worst = shares.worst.max(off);
            sum += off / honest.len() as f64;
        }
    }
    shares.mean = sum / shares.windows.max(1) as f64;
    shares
}

/// Returns the longest wait of any batch of an honest VM: for admission, and then until done.
pub fn longest_wait(scenario: &Scenario, outcome: &Outcome) -> Nanos {
    let honest = scenario.vms.iter().zip(&outcome.vms).filter(|(vm, _)| !vm.lies);
    honest.map(|(_, vm)| vm.longest_wait).max().unwrap_or(0)
}
