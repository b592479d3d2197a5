//! A device's engines: they remove entries from the queues in turn, fetch batches, return descriptors for execution,
//! and are occupied for the time that the timing gives.

use super::{Device, Event, Owner, Pending, Running, State};
use crate::config::Kind;
use crate::core::batch::{Batch, Next};
use crate::core::queue::{Entry, Queue};
use crate::core::script::{Fate, fate};
use crate::core::{Done, Job, JobResult, Nanos, Payload, Step, Task, Timed};
use crate::ops::{self, Outcome};
use crate::table::dsa::{self, code};

impl Device {
    /// Gives work to free engines.
    pub(super) fn dispatch(&mut self, now: Nanos) -> Option<Step> {
        if self.state == State::Halted {
            return None;
        }
        for engine in 0..self.engines.len() {
            while !self.engines[engine].busy {
                if let Some(batch) = self.engines[engine].batch {
                    match self.member(engine, batch) {
                        Some(job) => return Some(Step::Execute(job)),
                        None if self.engines[engine].batch.is_some() => break,
                        None => continue,
                    }
                }
                let Some(queue) = self.choose(engine, now) else { break };
                let entry = self.queues[queue].entries.pop_front().expect("chosen because it has one");
                if let Some(job) = self.start(engine, queue, entry) {
                    return Some(Step::Execute(job));
                }
            }
        }
        None
    }

    /// Returns the queue of the engine's group whose turn it is. Each turn costs a queue the inverse of its priority,
    /// so that no queue starves (WQ Priority, 9.2.24).
    fn choose(&mut self, engine: usize, now: Nanos) -> Option<usize> {
        let group = self.engines[engine].group;
        let ready = |queue: &Queue| queue.entries.front().is_some_and(|entry| entry.arrived <= now);
        let candidates = self.groups[group].iter().copied().filter(|&queue| ready(&self.queues[queue]));
        let chosen = candidates.min_by_key(|&queue| (self.queues[queue].turns, queue))?;
        let turns = self.queues[chosen].turns;
        for &queue in &self.groups[group] {
            // An idle queue does not save up turns.
            let other = &mut self.queues[queue];
            other.turns = other.turns.max(turns);
        }
        self.queues[chosen].turns = turns + 720_720 / u64::from(self.queues[chosen].config.priority.max(1));
        Some(chosen)
    }

    /// Starts an entry of a queue. Returns `None` if the owner has nothing to execute.
    fn start(&mut self, engine: usize, queue: usize, entry: Entry) -> Option<Job> {
        let started = self.time.max(entry.arrived);
        self.time = started;
        let Entry { sequence, payload, .. } = entry;
        let bytes = match payload {
            Payload::Timed(timed) => {
                self.timed(engine, queue, sequence, timed, started);
                return None;
            }
            Payload::Descriptor(bytes) => bytes,
        };
        let operation = dsa::OPERATION.get(&bytes[..]) as u8;
        let fate =
            fate(&mut self.scripts, &self.config.name, &self.queues[queue].config.name, &bytes, &mut self.random);
        let limits = self.queues[queue].limits;
        let owner = Owner::Entry { queue, sequence };
        let checked = ops::check(&bytes, false, &limits);
        if checked.is_ok() && operation == code::DRAIN {
            let entry = Entry { sequence, payload: Payload::Descriptor(bytes), arrived: started };
            if self.queues[queue].clear_before(sequence) {
                self.drained(queue, &entry);
            } else {
                self.queues[queue].drains.push(entry);
            }
            return None;
        }
        let is_batch = self.config.kind == Kind::Dsa && operation == code::BATCH;
        if is_batch && let Err(invalid) = checked {
            let outcome = ops::refused(&bytes, &limits, invalid);
            let running = Running { owner, queue, operation, started, fate, batch: None };
            self.engines[engine].busy = true;
            self.executed(engine, running, outcome);
            return None;
        }
        if !is_batch {
            return self.job(engine, Running { owner, queue, operation, started, fate, batch: None }, bytes, false);
        }
        self.accounts.batches += 1;
        let batch = self.id();
        let task = Task::List {
            address: dsa::SOURCE.get(&bytes[..]),
            count: dsa::SIZE.get(&bytes[..]) as usize,
            page_requests: limits.page_requests,
        };
        let mut state = Batch::new(queue, sequence, bytes);
        state.late = fate.late;
        state.dropped = fate.dropped;
        self.batches.insert(batch, state);
        self.engines[engine].busy = true;
        if self.hangs_or_halts(&fate) {
            return None;
        }
        let id = self.id();
        self.jobs.insert(id, Running { owner, queue, operation, started, fate, batch: Some(batch) });
        Some(Job { id, engine, task })
    }

    /// Applies a scripted hang or halt. Returns `true` if there is nothing to execute.
    fn hangs_or_halts(&mut self, fate: &Fate) -> bool {
        if fate.halt {
            self.halt();
        }
        fate.halt || fate.hang
    }

    fn job(&mut self, engine: usize, running: Running, bytes: Box<[u8; 64]>, in_batch: bool) -> Option<Job> {
        self.engines[engine].busy = true;
        if self.hangs_or_halts(&running.fate) {
            return None;
        }
        let task = Task::Descriptor {
            bytes,
            in_batch,
            limits: self.queues[running.queue].limits,
            effects: running.fate.effects.clone(),
        };
        let id = self.id();
        self.jobs.insert(id, running);
        Some(Job { id, engine, task })
    }

    /// Returns the job for the next member of an engine's batch. Without a member the engine may have been released.
    fn member(&mut self, engine: usize, batch: u64) -> Option<Job> {
        let state = self.batches.get_mut(&batch)?;
        match state.next(self.config.reorder, &mut self.random) {
            Next::Fence => None,
            Next::Over => {
                self.engines[engine].batch = None;
                self.batch_over(batch);
                None
            }
            Next::Member(bytes) => {
                state.pending += 1;
                let queue = state.queue;
                let operation = dsa::OPERATION.get(&bytes[..]) as u8;
                let fate = fate(
                    &mut self.scripts,
                    &self.config.name,
                    &self.queues[queue].config.name,
                    &bytes,
                    &mut self.random,
                );
                let owner = Owner::Member { batch };
                let started = self.time;
                self.job(engine, Running { owner, queue, operation, started, fate, batch: None }, bytes, true)
            }
        }
    }

    /// Reports the result of a job.
    pub fn finish(&mut self, done: Done) {
        // A reset in the meantime has dropped the job.
        let Some(running) = self.jobs.remove(&done.id) else { return };
        match done.result {
            JobResult::Descriptor(outcome) => self.executed(done.engine, running, *outcome),
            JobResult::List { descriptors, fault, page_requests } => {
                let id = running.batch.expect("lists are of batches");
                let Some(batch) = self.batches.get_mut(&id) else { return };
                batch.fetched(descriptors, fault);
                let count = u64::from(batch.count());
                self.accounts.page_requests += u64::from(page_requests);
                let fetch = self.timing.batch_ns + count * self.timing.batch_descriptor_ns;
                let requests = self.page_request_time(page_requests);
                let free = self.occupy(running.started, 0, fetch + requests, 0, true, running.fate.slow);
                self.engines[done.engine].batch = Some(id);
                self.at(free, Event::Ready(done.engine));
            }
        }
    }

    /// Occupies an engine from `started` and returns when it is free. The engine's own time covers `setup` and the
    /// bytes; the bytes also share the device's rate.
    fn occupy(&mut self, started: Nanos, setup: u64, fixed: u64, bytes: u64, writes: bool, slow: u32) -> Nanos {
        let (device_ps, engine_ps) = if writes {
            (self.timing.byte_ps, self.timing.engine_byte_ps)
        } else {
            (self.timing.read_byte_ps, self.timing.engine_read_byte_ps)
        };
        let ready_ps = (started + setup + fixed) * 1000;
        let data_ps = if bytes == 0 {
            ready_ps
        } else if !self.paced {
            ready_ps + bytes * engine_ps.max(device_ps)
        } else {
            let from = ready_ps.max(self.fabric_free_ps);
            self.fabric_free_ps = from + bytes * device_ps;
            self.fabric_free_ps.max(ready_ps + bytes * engine_ps)
        };
        let free = data_ps.div_ceil(1000);
        let took = (free - started) * u64::from(slow.max(1));
        self.accounts.engine_ns += took;
        if self.paced {
            started + took
        } else if slow > 1 {
            // A scripted slowdown applies even where nothing else is timed.
            self.time + took
        } else {
            self.time
        }
    }

    fn page_request_time(&mut self, requests: u32) -> Nanos {
        let mut sum = 0;
        for _ in 0..requests {
            let took = self.timing.page_requests.draw(&mut self.random);
            self.accounts.longest_page_request_ns = self.accounts.longest_page_request_ns.max(took);
            sum += took;
        }
        self.accounts.page_request_ns += sum;
        sum
    }

    pub(super) fn latency(&mut self) -> Nanos {
        match (self.paced, self.config.reorder) {
            (false, _) => 0,
            (true, false) => self.timing.latency_ns,
            // Half to one and a half times: completions of different engines overtake each other.
            (true, true) => self.timing.latency_ns / 2 + self.random.below(self.timing.latency_ns + 1),
        }
    }

    fn executed(&mut self, engine: usize, running: Running, outcome: Outcome) {
        let Running { owner, queue, operation, started, fate, .. } = running;
        self.accounts.descriptors += 1;
        self.accounts.bytes += outcome.bytes;
        self.accounts.faults += u64::from(outcome.faulted);
        self.accounts.page_requests += u64::from(outcome.page_requests);
        let requests = self.page_request_time(outcome.page_requests);
        let setup = self.timing.descriptor_ns + u64::from(outcome.misses) * self.timing.translation_miss_ns;
        let free = self.occupy(started, setup, requests, outcome.bytes, outcome.writes, fate.slow);
        self.at(free, Event::Ready(engine));
        if let Owner::Member { batch } = owner
            && let Some(batch) = self.batches.get_mut(&batch)
        {
            batch.executed(outcome.status);
        }
        // A script may express "never" by an endless delay.
        let visible = free.saturating_add(self.latency()).saturating_add(fate.late);
        let data_at = visible.saturating_add(fate.late_data.unwrap_or(0));
        for (address, bytes) in outcome.late {
            self.at(data_at, Event::Data { address, bytes });
        }
        // The record follows the data unless a script delays the data.
        let record_at = if fate.late > 0 { visible.saturating_add(1) } else { visible };
        let (record, target) = (outcome.record, outcome.target);
        let pending = Pending { owner, queue, operation, record, target, dropped: fate.dropped, kernel: false };
        self.at(record_at, Event::Record(pending));
    }

    fn timed(&mut self, engine: usize, queue: usize, sequence: u64, timed: Timed, started: Nanos) {
        let members = u64::from(timed.members.max(1));
        let mut fixed = 0;
        if timed.members > 1 {
            self.accounts.batches += 1;
            fixed += self.timing.batch_ns + members * self.timing.batch_descriptor_ns;
        }
        let requests = timed.page_requests * members as u32;
        fixed += self.page_request_time(requests);
        let setup = members
            * (self.timing.descriptor_ns + u64::from(timed.translation_misses) * self.timing.translation_miss_ns);
        self.accounts.descriptors += members;
        self.accounts.bytes += members * timed.bytes;
        self.accounts.page_requests += u64::from(requests);
        let free = self.occupy(started, setup, fixed, members * timed.bytes, timed.writes, 1);
        self.engines[engine].busy = true;
        self.at(free, Event::Ready(engine));
        let visible = free + self.latency();
        self.at(visible, Event::Timed { queue, sequence, tag: timed.tag, started });
    }
}
