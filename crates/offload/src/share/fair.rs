//! Exact shares between the VMs of one process.

use super::pace::Pace;
use super::spill::CpuCost;
use super::turns::Turns;
use super::{AdmissionDecision, AdmissionRequest, CONTENDED_BATCH, Grant, IN_FLIGHT, Nanos, Share};

/// Minimum wait: asking again has a cost.
const MIN_WAIT: Nanos = 5_000;
/// Maximum wait, in case the device is faster than predicted.
const MAX_WAIT: Nanos = 2_000_000;

/// A grant is returned when its completion is noticed, and a thread that waits for a core notices late. So the work in
/// the hardware is computed from predicted times. The outstanding grants may exceed the bound by this factor at most,
/// in case the device is slower than predicted.
const OUTSTANDING: Nanos = 4;

/// Start-time fair queueing by predicted device time, with a bound on what is in the hardware.
#[derive(Debug)]
pub struct Fair {
    turns: Turns,
    bound: Nanos,
    /// Of the grants that have not been returned.
    in_flight: Nanos,
    batches: u64,
    /// When the device is predicted to have done all of it.
    drained: Nanos,
    pace: Pace,
    cpu: CpuCost,
    spill: bool,
    free_alone: bool,
}

impl Default for Fair {
    fn default() -> Self {
        Self::new(IN_FLIGHT)
    }
}

impl Fair {
    /// Allows at most `bound` of device time in the hardware; a single batch that is larger goes alone.
    pub fn new(bound: Nanos) -> Self {
        Self {
            turns: Turns::default(),
            bound,
            in_flight: 0,
            batches: 0,
            drained: 0,
            pace: Pace::default(),
            cpu: CpuCost::default(),
            spill: false,
            free_alone: false,
        }
    }

    /// Sends batches to the CPU when their turn is further away than the CPU would need. A VM whose batch spills keeps
    /// its turn.
    #[must_use]
    pub fn spilling(mut self) -> Self {
        self.spill = true;
        self
    }

    /// Does not limit a VM that has the device to itself: limiting would cost throughput and help no other VM. When a
    /// second VM comes, it waits for the work that is in the hardware by then.
    #[must_use]
    pub fn free_alone(mut self) -> Self {
        self.free_alone = true;
        self
    }

    /// Returns the device time of all grants that have not been returned.
    pub fn in_flight(&self) -> Nanos {
        self.in_flight
    }

    /// Returns the device time that is predicted to be still in the hardware.
    fn backlog(&self, now: Nanos) -> Nanos {
        let reckoned = self.drained.saturating_sub(now).min(self.pace.stretch(self.in_flight));
        reckoned.max(self.in_flight.saturating_sub(self.bound.saturating_mul(OUTSTANDING - 1)))
    }

    fn left(&mut self, grant: &Grant) {
        self.in_flight = self.in_flight.saturating_sub(grant.predicted);
        self.batches = self.batches.saturating_sub(1);
    }
}

impl Share for Fair {
    fn ask(&mut self, request: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        let before = self.turns.ask(request, now);
        let own = self.pace.stretch(request.predicted);
        let filled = self.backlog(now).saturating_add(self.pace.stretch(before)).saturating_add(own);
        let alone = self.free_alone && self.turns.alone(request.vm, now);
        if filled <= self.bound || (self.batches == 0 && before == 0) || alone {
            self.turns.admit(request);
            self.in_flight = self.in_flight.saturating_add(request.predicted);
            self.batches += 1;
            let expected = self.drained.saturating_sub(now).saturating_add(request.predicted);
            self.drained = self.drained.max(now).saturating_add(own);
            return AdmissionDecision::Admit(Grant {
                vm: request.vm,
                predicted: request.predicted,
                bytes: request.bytes,
                expected,
            });
        }
        let wait = filled.saturating_sub(self.bound);
        let cost = self.cpu.of(request.bytes, now);
        if self.spill && wait > cost {
            self.turns.wait(request, now.saturating_add(cost));
            return AdmissionDecision::Spill;
        }
        let until = now.saturating_add(wait.clamp(MIN_WAIT, MAX_WAIT));
        self.turns.wait(request, until);
        AdmissionDecision::Wait { until }
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, _now: Nanos) {
        self.pace.learn(sojourn, grant.expected);
        self.left(&grant);
        self.turns.left(grant.vm);
    }

    fn dropped(&mut self, grant: Grant) {
        self.left(&grant);
        self.turns.returned(grant.vm, grant.predicted);
        self.drained = self.drained.saturating_sub(self.pace.stretch(grant.predicted));
    }

    fn spilled(&mut self, bytes: u64, took: Nanos, now: Nanos) {
        self.cpu.learn(bytes, took, now);
    }

    fn largest_batch(&self) -> u64 {
        if self.turns.contended() { CONTENDED_BATCH } else { u64::MAX }
    }
}
