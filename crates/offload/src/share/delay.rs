//! Without a ledger and without knowing who else is there: each keeps the wait in the queue short by itself.
//!
//! What a process may have in the device is a window of device time. It grows by one batch for each window that came back
//! quickly, and shrinks by a third when batches took longer than they should. Where the window is full and room is further
//! away than the CPU would take, the CPU does the batch; the window keeps asking the device, so that one notices when it is
//! free again. This gives no weights, and someone who ignores it gets more; but nobody waits long.

use std::collections::BTreeMap;

use super::spill::CpuCost;
use super::{Ask, CONTENDED_BATCH, Grant, Nanos, Share, Verdict};

/// What is aimed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelaySettings {
    /// Below this time from submission to completion the window grows.
    pub low: Nanos,
    /// Above this it shrinks.
    pub high: Nanos,
    /// The most device time in flight.
    pub window: Nanos,
    /// Whether batches go to the CPU when that is quicker.
    pub spill: bool,
}

impl Default for DelaySettings {
    fn default() -> Self {
        Self { low: 200_000, high: 500_000, window: 2_000_000, spill: true }
    }
}

/// The window never falls below this, whatever is measured: 1 µs of device time, a batch of 512 KiB in about 20 round trips.
const LEAST_WINDOW: f64 = 1_000.0;
/// The longest that one waits before the device is tried again.
const LONGEST_WAIT: Nanos = 2_000_000;
const LEAST_WAIT: Nanos = 5_000;
/// What is left of the window when it shrinks.
const DECREASE: f64 = 0.7;

/// Additive increase, multiplicative decrease on the time that batches take.
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
    /// Which of this process's channels wait, and since when: the one that has waited longest goes first.
    waiting: BTreeMap<(u32, u32), (Nanos, Nanos)>,
}

impl Default for DelayBased {
    fn default() -> Self {
        Self::new(DelaySettings::default())
    }
}

impl DelayBased {
    /// Begins with a window of the time aimed at.
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

    /// Device time that may be in flight.
    pub fn window(&self) -> Nanos {
        self.window as Nanos
    }

    /// When there will be room for this much device time.
    fn room_at(&self, predicted: Nanos, now: Nanos) -> Nanos {
        if self.batches == 0 {
            // A window smaller than the batch: one batch at a time, with a pause so that on average the window is kept.
            let pause = self.sojourn * (predicted as f64 / self.window);
            let pause = if predicted as f64 > self.window { pause as Nanos } else { 0 };
            return self.last_admitted.saturating_add(pause.min(LONGEST_WAIT)).max(now);
        }
        let filled = self.in_flight.saturating_add(predicted) as f64;
        if filled <= self.window {
            return now;
        }
        // What is in flight comes back over one sojourn.
        let part = ((filled - self.window) / self.in_flight.max(1) as f64).min(1.0);
        now.saturating_add(((self.sojourn * part) as Nanos).clamp(LEAST_WAIT, LONGEST_WAIT))
    }

    fn left(&mut self, grant: &Grant) {
        self.in_flight = self.in_flight.saturating_sub(grant.predicted);
        self.batches = self.batches.saturating_sub(1);
    }
}

impl Share for DelayBased {
    fn ask(&mut self, ask: &Ask, now: Nanos) -> Verdict {
        let who = (ask.vm, ask.channel);
        let (since, _) = *self.waiting.entry(who).or_insert((now, now));
        // Who has not come back for two of the longest waits does not hold the others up.
        self.waiting.retain(|_, (_, expected)| now <= expected.saturating_add(2 * LONGEST_WAIT));
        self.waiting.insert(who, (since, now));
        let before =
            self.waiting.iter().filter(|&(&other, &(before, _))| (before, other) < (since, who)).count() as u64;
        let room_at = self.room_at(ask.predicted.saturating_mul(before + 1), now);
        if room_at <= now {
            self.waiting.remove(&who);
            self.in_flight = self.in_flight.saturating_add(ask.predicted);
            self.batches += 1;
            self.last_admitted = now;
            return Verdict::Admit(Grant { vm: ask.vm, predicted: ask.predicted, bytes: ask.bytes, expected: 0 });
        }
        let cost = self.cpu.of(ask.bytes, now);
        if self.settings.spill && room_at - now > cost {
            self.waiting.insert(who, (since, now.saturating_add(cost)));
            return Verdict::Spill;
        }
        self.waiting.insert(who, (since, room_at));
        Verdict::Wait { until: room_at }
    }

    fn done(&mut self, grant: Grant, sojourn: Nanos, now: Nanos) {
        self.left(&grant);
        let seen = sojourn as f64;
        self.sojourn = if self.sojourn == 0.0 { seen } else { self.sojourn * 0.75 + seen * 0.25 };
        // A batch that is itself longer than the target must not count as waiting.
        let waited = sojourn.saturating_sub(grant.predicted);
        if waited > self.settings.high {
            // Once for each time round: what is in flight now was submitted before this was known.
            if now.saturating_sub(self.last_shrunk) > sojourn {
                self.window = (self.window * DECREASE).max(LEAST_WINDOW);
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
