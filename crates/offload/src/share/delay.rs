//! Without a ledger, and without knowing the other users of a device: each process keeps its waiting time in the queue
//! short by itself.
//!
//! The device time that a process may have in the device is its window. The window grows by one batch for each window
//! that completed quickly, and shrinks by a third when batches took too long. Where the window is full and a free place
//! is further away than the CPU would need, the CPU does the batch; the window's batches continue to measure the
//! device, so the process notices when the device is free again. This method has no weights, and a process that ignores
//! it gets more; but no process waits long.

use std::collections::BTreeMap;

use super::spill::CpuCost;
use super::{AdmissionDecision, AdmissionRequest, CONTENDED_BATCH, Grant, Nanos, Share};

/// The target of the control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelaySettings {
    /// The window grows while batches take less than this from submission to completion.
    pub low: Nanos,
    /// The window shrinks when they take more than this.
    pub high: Nanos,
    /// The most device time in flight.
    pub window: Nanos,
    /// Whether batches go to the CPU when that is faster.
    pub spill: bool,
}

impl Default for DelaySettings {
    fn default() -> Self {
        Self { low: 200_000, high: 500_000, window: 2_000_000, spill: true }
    }
}

/// The window's minimum, whatever is measured: 1 µs of device time, a batch of 512 KiB in about 20 round trips.
const MIN_WINDOW: f64 = 1_000.0;
/// The longest wait before the next attempt at the device.
const MAX_WAIT: Nanos = 2_000_000;
const MIN_WAIT: Nanos = 5_000;
/// The factor by which the window shrinks.
const DECREASE: f64 = 0.7;

/// Additive increase, multiplicative decrease by the time that batches take.
#[derive(Debug)]
pub struct DelayBased {
    settings: DelaySettings,
    window: f64,
    in_flight: Nanos,
    batches: u64,
    /// Smoothed time from submission to completion.
    sojourn: f64,
    last_admitted: Nanos,
    last_shrunk: Nanos,
    cpu: CpuCost,
    /// When each waiting channel of this process began to wait, and when it is expected: the longest wait goes first.
    waiting: BTreeMap<(u32, u32), (Nanos, Nanos)>,
}

impl Default for DelayBased {
    fn default() -> Self {
        Self::new(DelaySettings::default())
    }
}

impl DelayBased {
    /// Starts with a window of the target time.
    pub fn new(settings: DelaySettings) -> Self {
        Self {
            settings,
            window: settings.low as f64 / 4.0,
            in_flight: 0,
            batches: 0,
            sojourn: 0.0,
            last_admitted: 0,
            last_shrunk: 0,
            cpu: CpuCost::default(),
            waiting: BTreeMap::new(),
        }
    }

    /// Returns the device time that may be in flight.
    pub fn window(&self) -> Nanos {
        self.window as Nanos
    }

    /// Returns when there will be room for this much device time.
    fn room_at(&self, predicted: Nanos, now: Nanos) -> Nanos {
        if self.batches == 0 {
            // A window smaller than the batch: one batch at a time, with a pause so that on average the window is kept.
            let pause = self.sojourn * (predicted as f64 / self.window);
            let pause = if predicted as f64 > self.window { pause as Nanos } else { 0 };
            return self.last_admitted.saturating_add(pause.min(MAX_WAIT)).max(now);
        }
        let filled = self.in_flight.saturating_add(predicted) as f64;
        if filled <= self.window {
            return now;
        }
        // The batches in flight complete over one sojourn.
        let part = ((filled - self.window) / self.in_flight.max(1) as f64).min(1.0);
        now.saturating_add(((self.sojourn * part) as Nanos).clamp(MIN_WAIT, MAX_WAIT))
    }

    fn left(&mut self, grant: &Grant) {
        self.in_flight = self.in_flight.saturating_sub(grant.predicted);
        self.batches = self.batches.saturating_sub(1);
    }
}

impl Share for DelayBased {
    fn ask(&mut self, request: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        let who = (request.vm, request.channel);
        let (since, _) = *self.waiting.entry(who).or_insert((now, now));
        // A channel that is late by two of the longest waits does not delay the others.
        self.waiting.retain(|_, (_, expected)| now <= expected.saturating_add(2 * MAX_WAIT));
        self.waiting.insert(who, (since, now));
        let before =
            self.waiting.iter().filter(|&(&other, &(before, _))| (before, other) < (since, who)).count() as u64;
        let room_at = self.room_at(request.predicted.saturating_mul(before + 1), now);
        if room_at <= now {
            self.waiting.remove(&who);
            self.in_flight = self.in_flight.saturating_add(request.predicted);
            self.batches += 1;
            self.last_admitted = now;
            return AdmissionDecision::Admit(Grant {
                vm: request.vm,
                predicted: request.predicted,
                bytes: request.bytes,
                expected: 0,
            });
        }
        let cost = self.cpu.of(request.bytes, now);
        if self.settings.spill && room_at - now > cost {
            self.waiting.insert(who, (since, now.saturating_add(cost)));
            return AdmissionDecision::Spill;
        }
        self.waiting.insert(who, (since, room_at));
        AdmissionDecision::Wait { until: room_at }
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        self.left(&grant);
        let seen = sojourn as f64;
        self.sojourn = if self.sojourn == 0.0 { seen } else { self.sojourn * 0.75 + seen * 0.25 };
        // The batch's own device time is not waiting time.
        let waited = sojourn.saturating_sub(grant.predicted);
        if waited > self.settings.high {
            // At most one decrease per sojourn: the batches in flight now were submitted before this measurement.
            if now.saturating_sub(self.last_shrunk) > sojourn {
                self.window = (self.window * DECREASE).max(MIN_WINDOW);
                self.last_shrunk = now;
            }
        } else if waited < self.settings.low {
            let batch = grant.predicted.max(1) as f64;
            let step = batch * (batch / self.window).min(1.0);
            self.window = (self.window + step).min(self.settings.window as f64);
        }
    }

    fn dropped(&mut self, grant: Grant) {
        self.left(&grant);
    }

    fn spilled(&mut self, bytes: u64, took: Nanos, now: Nanos) {
        self.cpu.learn(bytes, took, now);
    }

    fn largest_batch(&self) -> u64 {
        if self.sojourn > self.settings.low as f64 { CONTENDED_BATCH } else { u64::MAX }
    }
}
