//! A sender thread: takes packets, has them searched for zero pages, sends them.

use super::{Admitted, Diverted, InFlight, Packet, State, Then, World};
use crate::Nanos;
use crate::costs::{Cpu, after};
use crate::scenario::Structure;
use sterna_offload::share::AdmissionDecision;

impl World<'_> {
    /// Decides the thread's next action, in this order: submit to the device, collect completions, send, wait.
    pub(super) fn sender(&mut self, thread: usize, vm: usize, channel: usize) {
        if self.senders[channel].blocked_until > self.now {
            let until = self.senders[channel].blocked_until;
            self.block(thread, Some(until));
            return;
        }
        if self.scenario.structure == Structure::CompletionThread && !self.senders[channel].in_flight.is_empty() {
            // It blocks until the polling thread wakes it.
            if self.senders[channel].in_flight[0].visible.is_none_or(|visible| visible > self.now) {
                self.block(thread, None);
                return;
            }
        } else if self.submit(thread, vm, channel) {
            return;
        }
        if self.collect(thread, vm, channel) || self.send(thread, channel) {
            return;
        }
        let window = self.scenario.vms[vm].window;
        let sender = &self.senders[channel];
        if sender.in_flight.is_empty() && !self.migrations[vm].searching && self.migrations[vm].packets.is_empty() {
            self.migrations[vm].ended += 1;
            if self.migrations[vm].ended == self.scenario.vms[vm].channels {
                let drained = sender.socket.back().map_or(self.now, |(gone, _)| *gone);
                self.outcome.finished(vm, drained.max(self.now));
            }
            self.end(thread);
            return;
        }
        let mut until = None;
        let mut sooner = |moment: Nanos| until = Some(until.map_or(moment, |set: Nanos| set.min(moment)));
        // For half of the batches in the device together, so that the thread wakes less often.
        if let Some(batch) = sender.in_flight.get(sender.in_flight.len() / 2) {
            sooner(self.expected(vm, batch));
        }
        if !self.migrations[vm].packets.is_empty() && sender.in_flight.len() < window && sender.not_before > self.now {
            sooner(sender.not_before);
        }
        self.block(thread, until);
    }

    /// Returns when a batch should be done, by its process's prediction; after that time, at growing intervals.
    fn expected(&self, vm: usize, batch: &InFlight) -> Nanos {
        let usual = self.views[self.process(vm)][batch.device].sojourn.max(batch.predicted as f64);
        let expected = after(batch.submitted, usual);
        if expected > self.now { expected } else { after(self.now, (usual / 4.0).max(5_000.0)) }
    }

    fn submit(&mut self, thread: usize, vm: usize, channel: usize) -> bool {
        let spec = self.scenario.vms[vm];
        let sender = &self.senders[channel];
        let under_way = sender.in_flight.len() + sender.checked.len();
        let window = if self.scenario.structure == Structure::Harvest { spec.window } else { 1 };
        if under_way >= window {
            return false;
        }
        let Some(&packet) = self.migrations[vm].packets.front() else { return false };
        if self.scenario.structure == Structure::Cpu || self.devices.is_empty() {
            self.pop(vm);
            self.check(thread, packet, None);
            return true;
        }
        if self.now < sender.not_before {
            return false;
        }
        let device = sender.next_device % self.devices.len();
        // Only waiting for the share counts, not other work or waits of its threads.
        let migration = &mut self.migrations[vm];
        if let Some((since, until)) = migration.asked.take() {
            migration.waited += self.now.min(until).saturating_sub(since);
        }
        let waited = migration.waited;
        let costs = &self.scenario.costs;
        let asking = Cpu::measured(costs.ask);
        match self.ask(vm, channel, device, packet) {
            (AdmissionDecision::Admit(grant), predicted) => {
                self.pop(vm);
                let sender = &mut self.senders[channel];
                sender.next_device += 1;
                self.migrations[vm].waited = 0;
                let fill = Cpu::measured(costs.fill_descriptor).times(f64::from(packet.pages));
                let cpu = asking.and(fill).and(Cpu::charged(costs.enqcmd));
                self.work(
                    thread,
                    cpu,
                    0.0,
                    Then::Submit(Admitted { packet, device, grant, predicted, admission: waited }),
                );
                true
            }
            (AdmissionDecision::Spill, _) => {
                self.pop(vm);
                let sender = &mut self.senders[channel];
                sender.next_device += 1;
                self.migrations[vm].waited = 0;
                self.threads[thread].owes += asking;
                self.check(
                    thread,
                    packet,
                    Some(Diverted { begun: self.now, admission: waited, spilled: Some(device) }),
                );
                true
            }
            (AdmissionDecision::Wait { until }, _) => {
                self.threads[thread].owes += asking;
                self.senders[channel].not_before = until;
                self.migrations[vm].asked = Some((self.now, until));
                false
            }
        }
    }

    fn pop(&mut self, vm: usize) {
        let _ = self.migrations[vm].packets.pop_front();
        self.wake_search(vm);
    }

    /// Begins to search the pages for zeros on the CPU.
    fn check(&mut self, thread: usize, packet: Packet, diverted: Option<Diverted>) {
        let cpu = Cpu::measured(self.scenario.costs.scan_page).times(f64::from(packet.pages));
        self.outcome.vms[self.threads[thread].vm].on_cpu += 1;
        self.work(thread, cpu, packet.bytes() as f64, Then::Checked { packet, diverted });
    }

    pub(super) fn checked(&mut self, thread: usize, packet: Packet, diverted: Option<Diverted>) {
        let it = &self.threads[thread];
        let (vm, channel) = (it.vm, it.channel.expect("only senders check"));
        self.senders[channel].checked.push_back(packet);
        let Some(Diverted { begun, admission, spilled }) = diverted else { return };
        self.outcome.vms[vm].diverted(admission, self.now - begun);
        if let Some(device) = spilled {
            // By the clock, so with the time that the thread waits for a core per nanosecond that it runs.
            let took = (self.now - begun) as f64 * (1.0 + it.waited / it.ran);
            let process = self.process(vm);
            self.shares[process][device].spilled(packet.bytes(), took as Nanos, self.now);
        }
    }

    /// Submits an admitted batch. Returns false if the thread itself works on it instead.
    pub(super) fn submit_admitted(&mut self, thread: usize, admitted: Admitted) -> bool {
        let Admitted { packet, device, grant, predicted, admission } = admitted;
        let vm = self.threads[thread].vm;
        let channel = self.threads[thread].channel.expect("only senders submit");
        self.next_tag += 1;
        let tag = self.next_tag;
        if !self.devices[device].submit(tag, packet.pages, 4096, self.now) {
            // The queue is full: after four attempts the CPU does the batch.
            self.threads[thread].owes += Cpu::charged(self.scenario.costs.enqcmd).times(4.0);
            let process = self.process(vm);
            self.shares[process][device].dropped(grant);
            self.check(thread, packet, Some(Diverted { begun: self.now, admission, spilled: None }));
            return false;
        }
        self.schedule(device);
        self.owners.insert(tag, thread);
        self.outcome.vms[vm].on_device += 1;
        let submitted = self.now;
        self.senders[channel].in_flight.push(InFlight {
            tag,
            packet,
            device,
            grant,
            predicted,
            submitted,
            admission,
            pending: submitted,
            visible: None,
        });
        if self.scenario.structure == Structure::CompletionThread {
            let migration = &mut self.migrations[vm];
            if migration.polled.is_empty() {
                migration.polls_since = self.now.max(migration.polled_until);
            }
            migration.polled.push_back((tag, thread, None));
        }
        true
    }

    /// Collects completed batches.
    fn collect(&mut self, thread: usize, vm: usize, channel: usize) -> bool {
        let costs = &self.scenario.costs;
        let now = self.now;
        let process = self.process(vm);
        let mut cpu = Cpu::default();
        let mut index = 0;
        while index < self.senders[channel].in_flight.len() {
            let batch = &mut self.senders[channel].in_flight[index];
            if batch.visible.is_none_or(|visible| visible > now) {
                batch.pending = now;
                index += 1;
                continue;
            }
            let batch = self.senders[channel].in_flight.remove(index);
            let lines = if self.scenario.read_members { f64::from(batch.packet.pages) / 2.0 } else { 0.0 };
            cpu += Cpu::measured(costs.harvest).and(Cpu::charged(costs.record_first + costs.record_line * lines));
            // The batch ended between the last poll that found it pending and this one. After a long gap: the earlier end.
            let latest = now - batch.submitted;
            let earliest = (batch.pending - batch.submitted).max(batch.predicted);
            let sojourn = if now - batch.pending > 20_000 { earliest.min(latest) } else { latest };
            let view = &mut self.views[process][batch.device];
            let seen = sojourn as f64;
            view.sojourn = if view.sojourn == 0.0 { seen } else { view.sojourn * 0.75 + seen * 0.25 };
            // While others are in the queue, the sojourn of a batch shows little of its device time.
            if now - batch.pending <= 20_000 && self.shares[process][batch.device].largest_batch() == u64::MAX {
                view.predictor.learn(batch.packet.bytes(), batch.packet.pages, batch.submitted, now);
            }
            self.shares[process][batch.device].done(batch.grant, sojourn, now);
            self.senders[channel].not_before = now;
            self.senders[channel].checked.push_back(batch.packet);
        }
        if cpu == Cpu::default() {
            return false;
        }
        self.work(thread, cpu, 0.0, Then::Nothing);
        true
    }

    fn send(&mut self, thread: usize, channel: usize) -> bool {
        let costs = &self.scenario.costs;
        let now = self.now;
        let sender = &mut self.senders[channel];
        while let Some(&(gone, bytes)) = sender.socket.front()
            && gone <= now
        {
            sender.held -= bytes;
            sender.socket.pop_front();
        }
        if sender.checked.is_empty() {
            return false;
        }
        if sender.held >= costs.socket_buffer {
            let room = sender.socket.front().expect("the socket is not empty").0;
            self.block(thread, Some(room));
            return true;
        }
        let packet = sender.checked.pop_front().expect("not empty");
        // Sterna sends several packets of only zero pages with one call; the published structure sends each by itself.
        let share = match self.scenario.structure {
            Structure::CompletionThread => 1.0,
            _ if packet.normal > 0 || !self.scenario.share_zero_packets => 1.0,
            _ => 1.0 / costs.zero_packets_shared,
        };
        let cpu = Cpu::measured(costs.send_page)
            .times(f64::from(packet.normal))
            .and(Cpu::charged(costs.send_packet).times(share));
        let bytes = u64::from(packet.normal) << 12;
        let traffic = bytes as f64 * costs.send_traffic;
        self.work(thread, cpu, traffic, Then::Sent(bytes));
        true
    }

    pub(super) fn sent(&mut self, thread: usize, bytes: u64) {
        debug_assert_eq!(self.threads[thread].state, State::Working);
        if bytes == 0 {
            return;
        }
        let gone = self.network.reserve(self.now, bytes as f64);
        let channel = self.threads[thread].channel.expect("only senders send");
        let sender = &mut self.senders[channel];
        sender.socket.push_back((gone, bytes as f64));
        sender.held += bytes as f64;
        sender.blocked_until = after(self.now, (bytes >> 12) as f64 * self.scenario.costs.connection_page);
    }
}
