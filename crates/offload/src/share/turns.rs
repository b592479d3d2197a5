//! Whose turn it is: start-time fair queueing (Goyal, Vin, Cheng 1996) over flows that come and ask.
//!
//! A flow's batch has a start tag, the larger of virtual time and the finish tag of the flow's batch before; the finish tag
//! is later by its device time over the flow's weight. The least start tag goes first, and virtual time is that of the last
//! one let in. So a flow that was away begins beside the others: it neither owes nor has saved anything.

use std::collections::BTreeMap;

use super::{Ask, Nanos, PATIENCE, weight};

/// Virtual nanoseconds of a flow with weight 1 for each nanosecond of the device: enough for weights to divide well, and
/// nine years of work before it would run over.
pub(super) const SCALE: u64 = 64;

/// What has been heard of it last is forgotten after this, if virtual time has passed it.
const FORGET: Nanos = 1_000_000_000;

/// Virtual time that a batch takes of its flow.
pub(super) fn virtual_span(predicted: Nanos, weight: u64) -> u64 {
    // A batch takes at least something: else one that predicts nothing would be let in without end.
    predicted.max(1).saturating_mul(SCALE) / weight.max(1)
}

#[derive(Debug)]
struct Flow {
    finish: u64,
    weight: u64,
    in_flight: u64,
    /// The start tag of the batch that waits, its device time, and when it is expected to ask again.
    waiting: Option<(u64, Nanos, Nanos)>,
    heard: Nanos,
}

/// The flows of one process at one queue.
#[derive(Debug, Default)]
pub(super) struct Turns {
    flows: BTreeMap<u32, Flow>,
    virtual_time: u64,
    swept: Nanos,
}

impl Turns {
    /// A flow asks: it waits from now on, and the device time of those that come before it is given back.
    pub(super) fn ask(&mut self, ask: &Ask, now: Nanos) -> Nanos {
        self.sweep(now);
        let virtual_time = self.virtual_time;
        let flow = self.flows.entry(ask.vm).or_insert(Flow {
            finish: virtual_time,
            weight: 1,
            in_flight: 0,
            waiting: None,
            heard: now,
        });
        flow.weight = weight(ask.weight);
        flow.heard = now;
        let start = match flow.waiting {
            Some((start, ..)) => start,
            None => flow.finish.max(virtual_time),
        };
        flow.waiting = Some((start, ask.predicted, now));
        self.before(ask.vm, start, now)
    }

    /// Device time that waits with an earlier turn, of flows that are not late.
    fn before(&self, vm: u32, start: u64, now: Nanos) -> Nanos {
        let mut before: Nanos = 0;
        for (&other, flow) in &self.flows {
            if let Some((tag, predicted, expected)) = flow.waiting
                && other != vm
                && (tag, other) < (start, vm)
                && now <= expected.saturating_add(PATIENCE)
            {
                before = before.saturating_add(predicted.max(1));
            }
        }
        before
    }

    /// It is told to come back then.
    pub(super) fn wait(&mut self, vm: u32, until: Nanos) {
        if let Some(Flow { waiting: Some((_, _, expected)), .. }) = self.flows.get_mut(&vm) {
            *expected = until;
        }
    }

    /// Its batch is let in. Virtual time is the largest start tag that was: one let past a late flow does not take it back.
    pub(super) fn admit(&mut self, ask: &Ask) {
        if let Some(flow) = self.flows.get_mut(&ask.vm) {
            let start = flow.waiting.take().map_or(flow.finish, |(start, ..)| start);
            flow.finish = start.saturating_add(virtual_span(ask.predicted, flow.weight));
            flow.in_flight += 1;
            self.virtual_time = self.virtual_time.max(start);
        }
    }

    /// A batch has left the device.
    pub(super) fn left(&mut self, vm: u32) {
        if let Some(flow) = self.flows.get_mut(&vm) {
            flow.in_flight = flow.in_flight.saturating_sub(1);
        }
    }

    /// The weights of all flows that have something in the device or wait for it.
    pub(super) fn active_weight(&self, now: Nanos) -> u64 {
        let active = |flow: &&Flow| {
            flow.in_flight > 0 || flow.waiting.is_some_and(|(.., expected)| now <= expected.saturating_add(PATIENCE))
        };
        self.flows.values().filter(active).map(|flow| flow.weight).sum()
    }

    /// Whether anyone but this one wants the device.
    pub(super) fn contended(&self) -> bool {
        self.flows.values().filter(|flow| flow.in_flight > 0 || flow.waiting.is_some()).nth(1).is_some()
    }

    fn sweep(&mut self, now: Nanos) {
        if now < self.swept.saturating_add(FORGET) {
            return;
        }
        self.swept = now;
        let virtual_time = self.virtual_time;
        self.flows.retain(|_, flow| {
            flow.in_flight > 0 || flow.finish > virtual_time || now < flow.heard.saturating_add(FORGET)
        });
    }

    #[cfg(test)]
    pub(super) fn flows(&self) -> usize {
        self.flows.len()
    }
}
