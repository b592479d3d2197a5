//! Shares between co-operating processes: each process records in a common file what it has in a queue and what it
//! waits for.
//!
//! Every process has a **slot**: its weight, the device time it has in flight, the device time it wants, and its place
//! in the order of start-time fair queueing, which is the same as inside one process. The batch with the earliest turn
//! is admitted when everything in flight leaves room for it within [`IN_FLIGHT`]. A batch with a later turn is admitted
//! when there is room for it, and for all batches that wait before it, within two thirds of that. While others wait, a
//! process has no more in flight than its weight's part, or one batch where the part is smaller than a batch.
//!
//! No lock protects a decision: each process reads, decides, and publishes that it took room or that it waits.
//! Processes that read at the same moment can all be admitted, so more than the bound can be in flight: at most one
//! batch for each other process, and the excess over its part and one batch that one of them took before the others
//! came. The excess is waiting time, never a wrong result, and the tags compensate for it in the next turns. A batch
//! costs one read and one publication; its completion is not published but follows from its expected time.
//!
//! The values in other processes' slots are limited to what an honest process could write:
//!
//! * the time that a slot claims to have or want counts up to its part and one batch, its weight up to
//!   [`MAX_WEIGHT`](super::MAX_WEIGHT);
//! * virtual time stays near the median of all, and is no faster than a device can work;
//! * a slot that waits but does not ask again is passed (after [`PATIENCE`]), and one whose owner has died is cleared:
//!   the kernel has released its lock;
//! * whatever the others claim, a process with nothing in flight gets a batch admitted after [`MAX_TURN`].
//!
//! A process that has more in the device than its slot shows is not detected. The others then wait longer than they
//! expect, and spill.

pub mod file;
mod slot;

pub use file::{LedgerFile, OpenError};
pub use slot::{Slot, Table};

use super::pace::Pace;
use super::spill::CpuCost;
use super::turns::{SCALE, Turns, start_tag, virtual_span};
use super::{AdmissionDecision, AdmissionRequest, CONTENDED_BATCH, Grant, IN_FLIGHT, Nanos, PATIENCE, Share};

/// The longest wait of a process with nothing in flight, whatever the others claim.
pub const MAX_TURN: Nanos = 50_000_000;
/// Turns shorter than this are normal.
const SHORT_TURN: Nanos = 5_000_000;
/// The most that a batch may plausibly take: 512 KiB at 10 GB/s.
const LIKELY_BATCH: Nanos = 50_000;
const MIN_WAIT: Nanos = 5_000;
/// A slot that has not changed for this long does not wait any more; perhaps its owner is dead.
const SILENCE: Nanos = 1_000_000;
/// The longest wait: a waiting process updates its slot well before the others ignore it.
const MAX_WAIT: Nanos = SILENCE / 2;

/// Observations of another process's slot.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    slot: Slot,
    since: Nanos,
    probed: Nanos,
}

/// The sums over the other slots, after the limits.
struct Others {
    weight: u64,
    in_flight: Nanos,
    /// Device time wanted with an earlier turn.
    before: Nanos,
    anyone_waits: bool,
}

/// One process's side of the ledger of one queue.
#[derive(Debug)]
pub struct Ledger<T: Table> {
    table: T,
    slots: Vec<Slot>,
    seen: Vec<Seen>,
    tags: Vec<u64>,
    turns: Turns,
    own: Slot,
    finish: u64,
    in_flight: Nanos,
    batches: u64,
    /// Since when a batch has waited, and when it is expected to ask again.
    waiting: Option<(Nanos, Nanos)>,
    virtual_time: Option<u64>,
    looked: Nanos,
    bound: Nanos,
    pace: Pace,
    cpu: CpuCost,
    spill: bool,
    contended: bool,
}

impl<T: Table> Ledger<T> {
    /// Takes part with the slot that `table` holds.
    pub fn new(table: T) -> Self {
        let slots = table.slots();
        Self {
            table,
            slots: vec![Slot::default(); slots],
            seen: vec![Seen::default(); slots],
            tags: Vec::with_capacity(slots),
            turns: Turns::default(),
            own: Slot::default(),
            finish: 0,
            in_flight: 0,
            batches: 0,
            waiting: None,
            virtual_time: None,
            looked: 0,
            bound: IN_FLIGHT,
            pace: Pace::default(),
            cpu: CpuCost::default(),
            spill: false,
            contended: false,
        }
    }

    /// Sends batches to the CPU when their turn is further away than the CPU would need. A process whose batch spills
    /// keeps its turn.
    #[must_use]
    pub fn spilling(mut self) -> Self {
        self.spill = true;
        self
    }

    /// Returns the device time that this process has in flight, as predicted.
    pub fn in_flight(&self) -> Nanos {
        self.in_flight
    }

    /// Reads all slots. A slot that has not changed since the last read ages.
    fn look(&mut self, now: Nanos) {
        self.table.read(&mut self.slots);
        let own = self.table.own();
        self.slots[own] = Slot::default();
        for (index, (slot, seen)) in self.slots.iter_mut().zip(&mut self.seen).enumerate() {
            if index == own {
                continue;
            }
            if *slot != seen.slot {
                *seen = Seen { slot: *slot, since: now, probed: now };
            }
            if !slot.active() {
                *slot = Slot::default();
                continue;
            }
            let age = now.saturating_sub(seen.since);
            // Grants are returned when completions are noticed, which can be late: after `until` the device has
            // finished.
            slot.in_flight = slot.in_flight.min(slot.until.saturating_sub(now));
            if now > slot.again.saturating_add(PATIENCE) {
                slot.wants = 0;
            }
            if age > SILENCE {
                // Only now and then: the check is a system call.
                if now.saturating_sub(seen.probed) > SILENCE {
                    seen.probed = now;
                    if !self.table.alive(index) {
                        *slot = Slot::default();
                        continue;
                    }
                }
                slot.wants = 0;
            }
        }
        self.follow(now);
    }

    /// Updates virtual time: the smallest waiting start tag. But no less than the median by more than honest tags
    /// differ, never back, and no faster than one device that works for a single flow of weight 1.
    fn follow(&mut self, now: Nanos) {
        let elapsed = now.saturating_sub(self.looked);
        self.looked = now;
        self.tags.clear();
        self.tags.extend(self.slots.iter().filter(|slot| slot.wants > 0).map(|slot| slot.start));
        if self.tags.is_empty() {
            // No process waits: the batch admitted last counts.
            self.tags.extend(self.slots.iter().filter(|slot| slot.active()).map(|slot| slot.start).max());
        }
        if self.own.wants > 0 {
            self.tags.push(self.own.start);
        }
        let Some(&least) = self.tags.iter().min() else {
            self.virtual_time.get_or_insert(0);
            return;
        };
        let middle = (self.tags.len() - 1) / 2;
        let (_, &mut median, _) = self.tags.select_nth_unstable(middle);
        let seen = least.max(median.saturating_sub(2 * LIKELY_BATCH * SCALE));
        self.virtual_time = Some(match self.virtual_time {
            // New here: level with the others.
            None => seen,
            Some(before) => {
                let most = before.saturating_add((2 * elapsed.min(u64::MAX / 4 / SCALE) + self.bound) * SCALE);
                seen.clamp(before, most)
            }
        });
    }

    fn others(&self, start: u64, batch: Nanos) -> Others {
        let weight: u64 = self.slots.iter().filter(|slot| slot.active()).map(Slot::weight).sum();
        let all = weight + self.own.weight();
        let mut others = Others { weight, in_flight: 0, before: 0, anyone_waits: false };
        for (index, slot) in self.slots.iter().enumerate() {
            if !slot.active() {
                continue;
            }
            let rightful = self.part(slot.weight(), all) + batch.clamp(LIKELY_BATCH, self.bound);
            others.in_flight += slot.in_flight.min(rightful);
            if slot.wants > 0 {
                others.anyone_waits = true;
                if (slot.start, index) < (start, self.table.own()) {
                    others.before += slot.wants.min(rightful);
                }
            }
        }
        others
    }

    /// Returns the part of the bound that belongs to this weight.
    fn part(&self, weight: u64, all: u64) -> Nanos {
        self.bound * weight / all.max(1)
    }

    /// Records, and publishes, that a batch waiting since `since` will ask again at `expected`.
    fn come_again(&mut self, since: Nanos, expected: Nanos) {
        self.waiting = Some((since, expected));
        self.own.again = expected;
        self.publish();
    }

    fn publish(&mut self) {
        self.own.in_flight = self.in_flight;
        self.own.beat = self.own.beat.wrapping_add(1);
        self.table.write(&self.own);
    }

    fn admit(&mut self, request: &AdmissionRequest, ahead: Nanos, now: Nanos) -> AdmissionDecision {
        self.turns.admit(request);
        self.own.until = now.saturating_add(ahead);
        // Against the predicted time, not the stretched one.
        let expected = ahead.saturating_sub(self.pace.stretch(request.predicted)).saturating_add(request.predicted);
        self.finish = self.own.start.saturating_add(virtual_span(request.predicted, self.own.weight()));
        self.in_flight = self.in_flight.saturating_add(request.predicted);
        self.batches += 1;
        self.own.wants = 0;
        self.waiting = None;
        self.publish();
        AdmissionDecision::Admit(Grant { vm: request.vm, predicted: request.predicted, bytes: request.bytes, expected })
    }

    fn left(&mut self, grant: &Grant) {
        self.in_flight = self.in_flight.saturating_sub(grant.predicted);
        self.batches = self.batches.saturating_sub(1);
    }
}

impl<T: Table> Share for Ledger<T> {
    fn ask(&mut self, request: &AdmissionRequest, now: Nanos) -> AdmissionDecision {
        let before_own = self.turns.ask(request, now);
        let needed = before_own.saturating_add(request.predicted);
        self.own.weight = self.turns.active_weight(now).max(1);
        // The first read comes before the first tag: a process starts level with the others, not at zero.
        if self.virtual_time.is_none() {
            self.look(now);
            self.finish = self.virtual_time.unwrap_or(0);
        }
        // A batch that did not ask for long has not been waiting.
        if self.waiting.is_some_and(|(_, expected)| now > expected.saturating_add(SILENCE)) {
            self.waiting = None;
        }
        if self.waiting.is_none() {
            let span = virtual_span(request.predicted, self.own.weight());
            self.own.start = start_tag(self.finish, self.virtual_time.unwrap_or(0), span);
            self.waiting = Some((now, now));
        }
        self.own.wants = request.predicted.max(1);
        self.look(now);
        let others = self.others(self.own.start, request.predicted);
        self.contended = others.weight > 0;
        let all = others.weight + self.own.weight();
        let own = self.pace.stretch(self.in_flight).min(self.own.until.saturating_sub(now));
        let ahead = self.pace.stretch(needed).saturating_add(own).saturating_add(others.in_flight);
        let filled = ahead.saturating_add(self.pace.stretch(others.before));
        // While others wait, a process has its part, and distributes it to its own VMs in their order.
        let within_part =
            !others.anyone_waits || (before_own == 0 && (self.batches == 0 || own < self.part(self.own.weight(), all)));
        // An earlier turn is passed only where the device might run dry before its owner wakes: else a process that
        // asks more often because its batches are smaller would take every gap during the other's sleep.
        let room = if others.before > 0 { self.bound * 2 / 3 } else { self.bound };
        let alone = self.batches == 0 && others.in_flight == 0 && others.before == 0 && before_own == 0;
        let since = self.waiting.map_or(now, |(since, _)| since);
        let turn = request.predicted.saturating_mul(2 * all / self.own.weight()).clamp(SHORT_TURN, MAX_TURN);
        let overdue = self.batches == 0 && before_own == 0 && now.saturating_sub(since) >= turn;
        // A limit for a device that is much slower than predicted.
        let outstanding = self.batches == 0 || self.in_flight.saturating_add(request.predicted) <= self.bound;
        if (filled <= room && within_part && outstanding) || alone || overdue {
            return self.admit(request, ahead, now);
        }
        // Each of its own batches before this one needs a turn of its own.
        let turns = if others.anyone_waits { before_own.saturating_mul(all / self.own.weight() - 1) } else { 0 };
        let wait = filled.saturating_sub(self.bound).max(request.predicted.min(self.bound)).saturating_add(turns);
        let cost = self.cpu.of(request.bytes, now);
        if self.spill && wait > cost {
            let expected = now.saturating_add(cost);
            self.turns.wait(request, expected);
            self.come_again(since, expected);
            return AdmissionDecision::Spill;
        }
        let until = now.saturating_add(wait.clamp(MIN_WAIT, MAX_WAIT));
        self.turns.wait(request, until);
        self.come_again(since, until);
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
        // The process does not pay for it, and the others do not wait for it.
        self.finish = self.finish.saturating_sub(virtual_span(grant.predicted, self.own.weight()));
        self.own.until = self.own.until.saturating_sub(self.pace.stretch(grant.predicted));
        self.publish();
    }

    fn spilled(&mut self, bytes: u64, took: Nanos, now: Nanos) {
        self.cpu.learn(bytes, took, now);
    }

    fn largest_batch(&self) -> u64 {
        if self.contended || self.turns.contended() { CONTENDED_BATCH } else { u64::MAX }
    }
}

impl<T: Table> Drop for Ledger<T> {
    fn drop(&mut self) {
        self.table.write(&Slot::default());
    }
}
