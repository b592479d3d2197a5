//! What is simulated.

use sterna_offload::share::ledger::Ledger;
use sterna_offload::share::{DelayBased, DelaySettings, Fair, Fifo, IN_FLIGHT, Share};

use crate::Nanos;
use crate::costs::Costs;
use crate::device::Shape;
use crate::ledger::Sheet;

/// How a migration is organised, and who looks whether a page is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    /// The sender thread, on the CPU.
    Cpu,
    /// The published one: a sender submits one batch and blocks; one thread for each VM polls for completions while
    /// there is any batch.
    CompletionThread,
    /// Sterna's: a sender has several batches in the device and takes the earlier ones back while it hands in the next; it
    /// sleeps until a completion is expected where there is nothing else to do.
    Harvest,
}

/// Who may use the devices when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Whoever is first.
    Fifo,
    /// Processes that keep a ledger.
    Ledger,
    /// Each by what it measures.
    Delay,
    /// One process has all VMs.
    Exact,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Fifo, Self::Ledger, Self::Delay, Self::Exact];

    /// As tables name it.
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
    /// Batches that a sender has under way at most.
    pub window: usize,
    /// Pages of a batch.
    pub batch: u32,
    /// When it begins.
    pub begins: Nanos,
    /// It claims nothing in the ledger and takes what it can.
    pub lies: bool,
    /// It is killed at this moment.
    pub dies: Option<Nanos>,
}

impl Vm {
    /// So many GiB, half of the pages zero, weight 1, one sender with 8 batches of 128 pages.
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

/// Someone else on a device, who keeps so many batches in it and asks nobody.
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

/// Everything about a run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What takes how long.
    pub costs: Costs,
    /// Cores for all migrations together.
    pub cores: usize,
    /// What every device is like.
    pub device: Shape,
    /// How many.
    pub devices: usize,
    /// How migrations are organised.
    pub structure: Structure,
    /// Admission.
    pub policy: Policy,
    /// Whether work goes to the CPU where that is quicker.
    pub spill: bool,
    /// Whether all records of a batch must be read, because not every page was as predicted.
    pub read_members: bool,
    /// Whether packets of nothing but zero pages go together in one call.
    pub share_zero_packets: bool,
    /// Who is moved.
    pub vms: Vec<Vm>,
    /// Who else is there.
    pub hogs: Vec<Hog>,
    /// Virtual time ends here at the latest.
    pub limit: Nanos,
}

impl Scenario {
    /// With these VMs and nothing else.
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
