//! Whose turn it is: start-time fair queueing (Goyal, Vin, Cheng 1996) over flows that come and ask.
//!
//! A flow's batch has a start tag, the larger of virtual time and the finish tag of the flow's batch before; the finish tag
//! is later by its device time over the flow's weight. The least start tag goes first, and virtual time is that of the last
//! one let in. So a flow that was away begins beside the others: it neither owes nor has saved anything.
//!
//! In the textbook a flow's batches stand in a queue. Here its channels come and ask, and one that is late by a thread's wake-up
//! has missed its turn without having been away. So a flow may be behind virtual time by two of its batches and still
//! get them.

use std::collections::BTreeMap;

use super::{Ask, Nanos, PATIENCE, weight};

/// Virtual nanoseconds of a flow with weight 1 for each nanosecond of the device: enough for weights to divide well, and
/// nine years of work before it would run over.
pub(super) const SCALE: u64 = 64;

/// Batches that a flow may be late by.
pub(super) const CREDIT: u64 = 2;

/// A flow that has nothing in the device and has asked for nothing for this long does not want it any more: 100 ms. Between two batches it
/// still does.
const AWAY: Nanos = 100_000_000;

/// What has been heard of it last is forgotten after this, if virtual time has passed it.
const FORGET: Nanos = 1_000_000_000;
/// A channel that has not come back for this long does not wait any more.
const GONE: Nanos = 20 * PATIENCE;

/// Virtual time that a batch takes of its flow.
pub(super) fn virtual_span(predicted: Nanos, weight: u64) -> u64 {
    // A batch takes at least something: else one that predicts nothing would be let in without end.
    predicted.max(1).saturating_mul(SCALE) / weight.max(1)
}

/// The start tag of a flow's next batch.
pub(super) fn start_tag(finish: u64, virtual_time: u64, span: u64) -> u64 {
    finish.max(virtual_time.saturating_sub(span.saturating_mul(CREDIT)))
}

/// A channel that waits.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    channel: u32,
    predicted: Nanos,
    /// When it is to ask again.
    expected: Nanos,
}

impl Waiter {
    fn punctual(&self, now: Nanos) -> bool {
        now <= self.expected.saturating_add(PATIENCE)
    }
}

#[derive(Debug)]
struct Flow {
    finish: u64,
    /// Of its next batch, while one waits.
    start: u64,
    weight: u64,
    in_flight: u64,
    /// In the order in which they came.
    waiters: Vec<Waiter>,
    heard: Nanos,
}

impl Flow {
    fn new(finish: u64) -> Self {
        Self { finish, start: finish, weight: 1, in_flight: 0, waiters: Vec::new(), heard: 0 }
    }

    fn active(&self, now: Nanos) -> bool {
        self.in_flight > 0 || self.waiters.iter().any(|waiter| waiter.punctual(now))
    }
}

/// The flows of one process at one queue.
#[derive(Debug, Default)]
pub(super) struct Turns {
    flows: BTreeMap<u32, Flow>,
    virtual_time: u64,
    swept: Nanos,
}

impl Turns {
    /// A channel asks: it waits from now on, and the device time of those that come before it is given back.
    pub(super) fn ask(&mut self, ask: &Ask, now: Nanos) -> Nanos {
        self.sweep(now);
        let virtual_time = self.virtual_time;
        let flow = self.flows.entry(ask.vm).or_insert_with(|| Flow::new(virtual_time));
        flow.weight = weight(ask.weight);
        flow.heard = now;
        flow.waiters.retain(|waiter| waiter.channel == ask.channel || now <= waiter.expected.saturating_add(GONE));
        if flow.waiters.is_empty() {
            flow.start = start_tag(flow.finish, virtual_time, virtual_span(ask.predicted, flow.weight));
        }
        match flow.waiters.iter_mut().find(|waiter| waiter.channel == ask.channel) {
            Some(waiter) => *waiter = Waiter { predicted: ask.predicted, expected: now, ..*waiter },
            None => {
                flow.waiters.push(Waiter { channel: ask.channel, predicted: ask.predicted, expected: now });
            }
        }
        self.before(ask, now)
    }

    /// Device time that waits with an earlier turn, of channels that are not late.
    fn before(&self, ask: &Ask, now: Nanos) -> Nanos {
        let mut before: Nanos = 0;
        let mut own = self.flows.get(&ask.vm).map_or(0, |flow| flow.start);
        for waiter in self.flows.get(&ask.vm).into_iter().flat_map(|flow| &flow.waiters) {
            if waiter.channel == ask.channel {
                break;
            }
            if waiter.punctual(now) {
                before = before.saturating_add(waiter.predicted);
                own = own.saturating_add(virtual_span(waiter.predicted, weight(ask.weight)));
            }
        }
        for (&vm, flow) in self.flows.iter().filter(|&(&vm, _)| vm != ask.vm) {
            let mut tag = flow.start;
            for waiter in flow.waiters.iter().filter(|waiter| waiter.punctual(now)) {
                if (tag, vm) > (own, ask.vm) {
                    break;
                }
                before = before.saturating_add(waiter.predicted.max(1));
                tag = tag.saturating_add(virtual_span(waiter.predicted, flow.weight));
            }
        }
        before
    }

    /// It is told to come back then.
    pub(super) fn wait(&mut self, ask: &Ask, until: Nanos) {
        let flow = self.flows.get_mut(&ask.vm);
        if let Some(waiter) = flow.and_then(|flow| flow.waiters.iter_mut().find(|waiter| waiter.channel == ask.channel))
        {
            waiter.expected = until;
        }
    }

    /// Its batch is let in. Virtual time is the largest start tag that was: one let past a late flow does not take it back.
    pub(super) fn admit(&mut self, ask: &Ask) {
        if let Some(flow) = self.flows.get_mut(&ask.vm) {
            flow.waiters.retain(|waiter| waiter.channel != ask.channel);
            let span = virtual_span(ask.predicted, flow.weight);
            self.virtual_time = self.virtual_time.max(flow.start);
            flow.finish = flow.start.saturating_add(span);
            // Who waits behind it in the same flow.
            flow.start = start_tag(flow.finish, self.virtual_time, span);
            flow.in_flight += 1;
        }
    }

    /// A batch has left the device.
    pub(super) fn left(&mut self, vm: u32) {
        if let Some(flow) = self.flows.get_mut(&vm) {
            flow.in_flight = flow.in_flight.saturating_sub(1);
        }
    }

    /// A batch that was let in did not go: its flow has not had what it stood for.
    pub(super) fn returned(&mut self, vm: u32, predicted: Nanos) {
        self.left(vm);
        if let Some(flow) = self.flows.get_mut(&vm) {
            let span = virtual_span(predicted, flow.weight);
            flow.finish = flow.finish.saturating_sub(span);
            flow.start = flow.start.saturating_sub(span);
        }
    }

    /// The weights of all flows that have something in the device or wait for it.
    pub(super) fn active_weight(&self, now: Nanos) -> u64 {
        self.flows.values().filter(|flow| flow.active(now)).map(|flow| flow.weight).sum()
    }

    /// Whether nobody but this one wants the device, or has wanted it a moment ago.
    pub(super) fn alone(&self, vm: u32, now: Nanos) -> bool {
        let away = |flow: &Flow| flow.in_flight == 0 && now >= flow.heard.saturating_add(AWAY);
        self.flows.iter().all(|(&other, flow)| other == vm || away(flow))
    }

    /// Whether anyone but one flow wants the device.
    pub(super) fn contended(&self) -> bool {
        let wants = |flow: &&Flow| flow.in_flight > 0 || !flow.waiters.is_empty();
        self.flows.values().filter(wants).nth(1).is_some()
    }

    fn sweep(&mut self, now: Nanos) {
        if now < self.swept.saturating_add(FORGET) {
            return;
        }
        self.swept = now;
        // Nobody is there: what was is over, and the next begin at the end of it.
        if self.flows.values().all(|flow| !flow.active(now)) {
            let last = self.flows.values().map(|flow| flow.finish).max().unwrap_or(0);
            self.virtual_time = self.virtual_time.max(last);
        }
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
