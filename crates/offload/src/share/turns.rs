//! The order of admission: start-time fair queueing (Goyal, Vin, Cheng 1996) over flows that poll for admission.
//!
//! A flow's batch has a start tag: the larger of virtual time and the finish tag of the flow's batch before. The finish
//! tag is later by the batch's device time divided by the flow's weight. The smallest start tag goes first, and virtual
//! time is the start tag of the batch admitted last. So a flow that was idle starts level with the others: it neither
//! owes nor has saved anything.
//!
//! In the textbook a flow's batches wait in a queue. Here its channels poll, and a channel that is late by a thread's
//! wake-up has missed its turn without having been idle. So a flow may be behind virtual time by two of its batches and
//! still get them.

use std::collections::BTreeMap;

use super::{AdmissionRequest, Nanos, PATIENCE, weight};

/// Virtual nanoseconds of a flow with weight 1 for each nanosecond of the device: enough for weights to divide well,
/// and nine years of work before an overflow.
pub(super) const SCALE: u64 = 64;

/// Batches by which a flow may be late.
pub(super) const CREDIT: u64 = 2;

/// A flow that has had nothing in the device and has not asked for this long counts as idle: 100 ms. Between two
/// batches it is not idle.
const AWAY: Nanos = 100_000_000;

/// A flow is forgotten when it has been silent for this long and virtual time has passed it.
const FORGET: Nanos = 1_000_000_000;
/// A channel that has not asked for this long does not wait any more.
const GONE: Nanos = 20 * PATIENCE;

/// Returns the virtual time that a batch takes of its flow.
pub(super) fn virtual_span(predicted: Nanos, weight: u64) -> u64 {
    // At least something: else batches predicted to take nothing would be admitted without limit.
    predicted.max(1).saturating_mul(SCALE) / weight.max(1)
}

/// Returns the start tag of a flow's next batch.
pub(super) fn start_tag(finish: u64, virtual_time: u64, span: u64) -> u64 {
    finish.max(virtual_time.saturating_sub(span.saturating_mul(CREDIT)))
}

/// A channel that waits.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    channel: u32,
    predicted: Nanos,
    /// When it should ask again.
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
    /// Start tag of its next batch, while one waits.
    start: u64,
    weight: u64,
    in_flight: u64,
    /// In the order of their first request.
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
    /// Registers a channel's request: it waits from now on. Returns the device time of the batches that go first.
    pub(super) fn ask(&mut self, request: &AdmissionRequest, now: Nanos) -> Nanos {
        self.sweep(now, request.vm);
        let virtual_time = self.virtual_time;
        let flow = self.flows.entry(request.vm).or_insert_with(|| Flow::new(virtual_time));
        flow.weight = weight(request.weight);
        flow.heard = now;
        flow.waiters.retain(|waiter| waiter.channel == request.channel || now <= waiter.expected.saturating_add(GONE));
        if flow.waiters.is_empty() {
            flow.start = start_tag(flow.finish, virtual_time, virtual_span(request.predicted, flow.weight));
        }
        match flow.waiters.iter_mut().find(|waiter| waiter.channel == request.channel) {
            Some(waiter) => *waiter = Waiter { predicted: request.predicted, expected: now, ..*waiter },
            None => {
                flow.waiters.push(Waiter { channel: request.channel, predicted: request.predicted, expected: now });
            }
        }
        self.before(request, now)
    }

    /// Returns the device time that waits with an earlier turn, of channels that are not late.
    fn before(&self, request: &AdmissionRequest, now: Nanos) -> Nanos {
        let mut before: Nanos = 0;
        let mut own = self.flows.get(&request.vm).map_or(0, |flow| flow.start);
        for waiter in self.flows.get(&request.vm).into_iter().flat_map(|flow| &flow.waiters) {
            if waiter.channel == request.channel {
                break;
            }
            if waiter.punctual(now) {
                before = before.saturating_add(waiter.predicted);
                own = own.saturating_add(virtual_span(waiter.predicted, weight(request.weight)));
            }
        }
        for (&vm, flow) in self.flows.iter().filter(|&(&vm, _)| vm != request.vm) {
            let mut tag = flow.start;
            for waiter in flow.waiters.iter().filter(|waiter| waiter.punctual(now)) {
                if (tag, vm) > (own, request.vm) {
                    break;
                }
                before = before.saturating_add(waiter.predicted.max(1));
                tag = tag.saturating_add(virtual_span(waiter.predicted, flow.weight));
            }
        }
        before
    }

    /// Records that the channel was made to wait until `until`.
    pub(super) fn wait(&mut self, request: &AdmissionRequest, until: Nanos) {
        let flow = self.flows.get_mut(&request.vm);
        if let Some(waiter) =
            flow.and_then(|flow| flow.waiters.iter_mut().find(|waiter| waiter.channel == request.channel))
        {
            waiter.expected = until;
        }
    }

    /// Records the admission of its batch. Virtual time is the largest start tag so far: a batch that passes a late
    /// flow does not move it back.
    pub(super) fn admit(&mut self, request: &AdmissionRequest) {
        if let Some(flow) = self.flows.get_mut(&request.vm) {
            flow.waiters.retain(|waiter| waiter.channel != request.channel);
            let span = virtual_span(request.predicted, flow.weight);
            self.virtual_time = self.virtual_time.max(flow.start);
            flow.finish = flow.start.saturating_add(span);
            // For the channels that wait behind it in the same flow.
            flow.start = start_tag(flow.finish, self.virtual_time, span);
            flow.in_flight += 1;
        }
    }

    /// Records that a batch has left the device.
    pub(super) fn left(&mut self, vm: u32) {
        if let Some(flow) = self.flows.get_mut(&vm) {
            flow.in_flight = flow.in_flight.saturating_sub(1);
        }
    }

    /// Reverses the admission of a batch that was not submitted: its flow has not used the device time.
    pub(super) fn returned(&mut self, vm: u32, predicted: Nanos) {
        self.left(vm);
        if let Some(flow) = self.flows.get_mut(&vm) {
            let span = virtual_span(predicted, flow.weight);
            flow.finish = flow.finish.saturating_sub(span);
            flow.start = flow.start.saturating_sub(span);
        }
    }

    /// Returns the weights of all flows that have work in the device or wait.
    pub(super) fn active_weight(&self, now: Nanos) -> u64 {
        self.flows.values().filter(|flow| flow.active(now)).map(|flow| flow.weight).sum()
    }

    /// Returns whether no other flow uses the device, or did so recently.
    pub(super) fn alone(&self, vm: u32, now: Nanos) -> bool {
        let away = |flow: &Flow| flow.in_flight == 0 && now >= flow.heard.saturating_add(AWAY);
        self.flows.iter().all(|(&other, flow)| other == vm || away(flow))
    }

    /// Returns whether more than one flow uses the device.
    pub(super) fn contended(&self) -> bool {
        let wants = |flow: &&Flow| flow.in_flight > 0 || !flow.waiters.is_empty();
        self.flows.values().filter(wants).nth(1).is_some()
    }

    /// Forgets the flows that have not used the device for [`FORGET`]. That of `asking` begins anew, in the memory that it has: a batch after a
    /// long pause allocates nothing.
    fn sweep(&mut self, now: Nanos, asking: u32) {
        if now < self.swept.saturating_add(FORGET) {
            return;
        }
        self.swept = now;
        // No flow is active: virtual time moves to the end of all of them.
        if self.flows.values().all(|flow| !flow.active(now)) {
            let last = self.flows.values().map(|flow| flow.finish).max().unwrap_or(0);
            self.virtual_time = self.virtual_time.max(last);
        }
        let virtual_time = self.virtual_time;
        self.flows.retain(|&vm, flow| {
            let kept = flow.in_flight > 0 || flow.finish > virtual_time || now < flow.heard.saturating_add(FORGET);
            if !kept && vm == asking {
                flow.finish = virtual_time;
                flow.waiters.clear();
            }
            kept || vm == asking
        });
    }

    #[cfg(test)]
    pub(super) fn flows(&self) -> usize {
        self.flows.len()
    }
}
