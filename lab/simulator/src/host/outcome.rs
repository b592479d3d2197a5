//! What a run has come to.

use crate::Nanos;
use crate::costs::Cpu;
use crate::scenario::Scenario;

/// Shares are looked at in windows of this length: 100 ms.
pub const WINDOW: Nanos = 100_000_000;

/// One migration.
#[derive(Clone, Debug, Default)]
pub struct VmOutcome {
    /// When it began.
    pub begun: Nanos,
    /// When its last byte had left, if it came to that.
    pub finished: Option<Nanos>,
    /// It was killed.
    pub died: bool,
    /// CPU of the search.
    pub search: Cpu,
    /// CPU of looking whether pages are zero, or of having it done.
    pub check: Cpu,
    /// CPU of sending.
    pub send: Cpu,
    /// CPU of the polling thread, where there is one.
    pub poll: Cpu,
    /// Device time.
    pub device: f64,
    /// Device time in each [`WINDOW`].
    pub windows: Vec<f64>,
    /// Batches that the device did.
    pub on_device: u64,
    /// Batches that the CPU did.
    pub on_cpu: u64,
    /// The longest from submission to completion.
    pub longest_sojourn: Nanos,
    /// The longest from wanting to go to being let in.
    pub longest_admission: Nanos,
    /// The longest from wanting to go to being done, of one batch, also where the CPU did it in the end.
    pub longest_wait: Nanos,
    /// Sum of all times from submission to completion.
    pub sojourns: f64,
}

impl VmOutcome {
    /// How long it took, or has taken until `ended`.
    pub fn took(&self, ended: Nanos) -> Nanos {
        self.finished.unwrap_or(ended).saturating_sub(self.begun)
    }

    /// All its CPU time.
    pub fn cpu(&self) -> Cpu {
        self.search.and(self.check).and(self.send).and(self.poll)
    }

    /// A batch was let in after `admission` and was done `sojourn` after it was submitted.
    pub(super) fn waited(&mut self, admission: Nanos, sojourn: Nanos) {
        self.longest_admission = self.longest_admission.max(admission);
        self.longest_sojourn = self.longest_sojourn.max(sojourn);
        self.longest_wait = self.longest_wait.max(admission + sojourn);
        self.sojourns += sojourn as f64;
    }

    /// A batch that was to go to a device was let in after `admission`, or not at all, and the CPU took so long for it.
    pub(super) fn diverted(&mut self, admission: Nanos, took: Nanos) {
        self.longest_admission = self.longest_admission.max(admission);
        self.longest_wait = self.longest_wait.max(admission + took);
    }
}

/// Everything.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// When the last one ended.
    pub ended: Nanos,
    /// Each migration.
    pub vms: Vec<VmOutcome>,
    /// Device time that others had.
    pub hog_device: f64,
    /// Busy time of each device.
    pub device_busy: Vec<f64>,
    /// Busy time of memory.
    pub memory_busy: f64,
    /// Busy time of the network.
    pub network_busy: f64,
    /// Submissions that found a queue full.
    pub refused: u64,
    pub(super) just_finished: usize,
}

impl Outcome {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let vms = scenario.vms.iter().map(|vm| VmOutcome { begun: vm.begins, ..VmOutcome::default() }).collect();
        Self { vms, ..Self::default() }
    }

    pub(super) fn finished(&mut self, vm: usize, at: Nanos) {
        self.vms[vm].finished = Some(at);
        self.just_finished += 1;
    }

    pub(super) fn device_time(&mut self, vm: usize, now: Nanos, busy: f64) {
        let window = (now / WINDOW) as usize;
        let vm = &mut self.vms[vm];
        if vm.windows.len() <= window {
            vm.windows.resize(window + 1, 0.0);
        }
        vm.windows[window] += busy;
        vm.device += busy;
    }

    /// From the first beginning to the last end.
    pub fn total(&self) -> Nanos {
        let first = self.vms.iter().map(|vm| vm.begun).min().unwrap_or(0);
        let last = self.vms.iter().filter(|vm| !vm.died).map(|vm| vm.finished.unwrap_or(self.ended)).max();
        last.unwrap_or(self.ended).saturating_sub(first)
    }

    /// CPU time of all.
    pub fn cpu(&self) -> Cpu {
        self.vms.iter().fold(Cpu::default(), |sum, vm| sum.and(vm.cpu()))
    }

    /// CPU time of looking whether pages are zero, of all.
    pub fn check(&self) -> Cpu {
        self.vms.iter().fold(Cpu::default(), |sum, vm| sum.and(vm.check).and(vm.poll))
    }

    /// How much of the time the devices were busy, on average.
    pub fn utilisation(&self) -> f64 {
        let devices = self.device_busy.len().max(1) as f64;
        self.device_busy.iter().sum::<f64>() / devices / (self.ended.max(1) as f64)
    }
}
