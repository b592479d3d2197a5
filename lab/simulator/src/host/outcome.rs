//! The results of a run.

use crate::Nanos;
use crate::costs::Cpu;
use crate::scenario::Scenario;

/// Length of the windows in which shares are compared: 100 ms.
pub const WINDOW: Nanos = 100_000_000;

/// The results of one migration.
#[derive(Clone, Debug, Default)]
pub struct VmOutcome {
    /// When it began.
    pub begun: Nanos,
    /// When its last byte had left; none if it was killed.
    pub finished: Option<Nanos>,
    /// Whether it was killed.
    pub died: bool,
    /// CPU of the search.
    pub search: Cpu,
    /// CPU of searching for zero pages, or of having a device do it.
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
    /// The longest time from submission to completion.
    pub longest_sojourn: Nanos,
    /// The longest time from the admission request to admission.
    pub longest_admission: Nanos,
    /// The longest time of one batch from the admission request to its end, also where the CPU did it.
    pub longest_wait: Nanos,
    /// Sum of all times from submission to completion.
    pub sojourns: f64,
}

impl VmOutcome {
    /// Returns its duration, up to `ended` if it has not finished.
    pub fn took(&self, ended: Nanos) -> Nanos {
        self.finished.unwrap_or(ended).saturating_sub(self.begun)
    }

    /// Returns all its CPU time.
    pub fn cpu(&self) -> Cpu {
        self.search.and(self.check).and(self.send).and(self.poll)
    }

    /// Records a batch that was admitted after `admission` and completed `sojourn` after its submission.
    pub(super) fn waited(&mut self, admission: Nanos, sojourn: Nanos) {
        self.longest_admission = self.longest_admission.max(admission);
        self.longest_sojourn = self.longest_sojourn.max(sojourn);
        self.longest_wait = self.longest_wait.max(admission + sojourn);
        self.sojourns += sojourn as f64;
    }

    /// Records a batch that was meant for a device and was done by the CPU: its wait for admission, and the CPU's time.
    pub(super) fn diverted(&mut self, admission: Nanos, took: Nanos) {
        self.longest_admission = self.longest_admission.max(admission);
        self.longest_wait = self.longest_wait.max(admission + took);
    }
}

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// When the last migration ended.
    pub ended: Nanos,
    /// Each migration.
    pub vms: Vec<VmOutcome>,
    /// Device time of foreign processes (hogs).
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

    /// Returns the time from the first beginning to the last end.
    pub fn total(&self) -> Nanos {
        let first = self.vms.iter().map(|vm| vm.begun).min().unwrap_or(0);
        let last = self.vms.iter().filter(|vm| !vm.died).map(|vm| vm.finished.unwrap_or(self.ended)).max();
        last.unwrap_or(self.ended).saturating_sub(first)
    }

    /// Returns the CPU time of all migrations.
    pub fn cpu(&self) -> Cpu {
        self.vms.iter().fold(Cpu::default(), |sum, vm| sum.and(vm.cpu()))
    }

    /// Returns the CPU time of searching for zero pages, of all migrations.
    pub fn check(&self) -> Cpu {
        self.vms.iter().fold(Cpu::default(), |sum, vm| sum.and(vm.check).and(vm.poll))
    }

    /// Returns the mean part of the time in which a device was busy.
    pub fn utilisation(&self) -> f64 {
        let devices = self.device_busy.len().max(1) as f64;
        self.device_busy.iter().sum::<f64>() / devices / (self.ended.max(1) as f64)
    }
}
