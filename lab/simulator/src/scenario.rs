//! The description of a run: machine, devices, migrations.

use sterna_offload::share::ledger::Ledger;
use sterna_offload::share::{DelayBased, DelaySettings, Fair, Fifo, IN_FLIGHT, Share};

use crate::Nanos;
use crate::costs::Costs;
use crate::device::Shape;
use crate::ledger::Sheet;

/// How a migration's threads are organised, and whether CPU or device searches for zero pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// The sender thread searches, on the CPU.
    Cpu,
    /// The published structure: a sender submits one batch and blocks; one thread for each VM polls for completions while
    /// a batch is in flight.
    CompletionThread,
    /// Sterna's structure: a sender has several batches in the device and collects earlier ones while it submits the next.
    /// With nothing else to do it sleeps until a completion is expected.
    Harvest,
}

/// The policy of admission to the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    Fifo,
    /// Several processes that keep a ledger.
    Ledger,
    /// Several processes, each of which limits itself by the delay that it measures.
    Delay,
    /// One process has all VMs.
    Exact,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Fifo, Self::Ledger, Self::Delay, Self::Exact];

    /// Returns its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fifo => "FIFO",
            Self::Ledger => "ledger",
            Self::Delay => "AIMD",
            Self::Exact => "exact",
        }
    }

    pub(crate) fn share(self, spill: bool, sheet: &Sheet) -> Box<dyn Share> {
        match (self, spill) {
            (Self::Fifo, _) => Box::new(Fifo),
            (Self::Ledger, false) => Box::new(Ledger::new(sheet.slot(false))),
            (Self::Ledger, true) => Box::new(Ledger::new(sheet.slot(false)).spilling()),
            (Self::Delay, spill) => Box::new(DelayBased::new(DelaySettings { spill, ..DelaySettings::default() })),
            (Self::Exact, false) => Box::new(Fair::new(IN_FLIGHT)),
            (Self::Exact, true) => Box::new(Fair::new(IN_FLIGHT).spilling()),
        }
    }
}

/// A VM that is moved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vm {
    /// Pages of 4 KiB.
    pub pages: u64,
    /// Of 1000 pages, how many are sent; the others are zero.
    pub normal_per_mille: u64,
    /// Its weight.
    pub weight: u32,
    /// Sender threads.
    pub channels: usize,
    /// Maximum number of batches that a sender has in flight.
    pub window: usize,
    /// Pages of a batch.
    pub batch: u32,
    /// When it begins.
    pub begins: Nanos,
    /// Whether it publishes nothing in the ledger and takes as much as it can.
    pub lies: bool,
    /// When it is killed.
    pub dies: Option<Nanos>,
}

impl Vm {
    /// Makes a VM of `count` GiB, half of the pages zero, weight 1, one sender with 8 batches of 128 pages.
    pub fn gib(count: u64) -> Self {
        Self {
            pages: count << 18,
            normal_per_mille: 500,
            weight: 1,
            channels: 1,
            window: 8,
            batch: 128,
            begins: 0,
            lies: false,
            dies: None,
        }
    }
}

/// A foreign process that keeps batches in a device without asking for admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hog {
    /// Which device.
    pub device: usize,
    /// Batches that it keeps there.
    pub batches: usize,
    /// Bytes of each.
    pub bytes: u64,
    /// When it begins.
    pub begins: Nanos,
}

/// The description of a run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The costs of operations.
    pub costs: Costs,
    /// Cores for all migrations together.
    pub cores: usize,
    /// The speed and size of each device.
    pub device: Shape,
    /// Number of devices.
    pub devices: usize,
    /// How migrations are organised.
    pub structure: Structure,
    /// Admission.
    pub policy: Policy,
    /// Whether batches go to the CPU where that is faster.
    pub spill: bool,
    /// Whether all records of a batch must be read, because not every page was as predicted.
    pub read_members: bool,
    /// Whether packets of only zero pages share one call.
    pub share_zero_packets: bool,
    /// The VMs that are moved.
    pub vms: Vec<Vm>,
    /// The foreign processes on the devices.
    pub hogs: Vec<Hog>,
    /// Virtual time ends here at the latest.
    pub limit: Nanos,
}

impl Scenario {
    /// Makes a scenario of these VMs, without foreign processes.
    pub fn of(vms: Vec<Vm>) -> Self {
        Self {
            costs: Costs::default(),
            cores: 192,
            device: Shape::default(),
            devices: 1,
            structure: Structure::Harvest,
            policy: Policy::Exact,
            spill: true,
            read_members: true,
            share_zero_packets: true,
            vms,
            hogs: Vec::new(),
            limit: 600_000_000_000,
        }
    }
}
