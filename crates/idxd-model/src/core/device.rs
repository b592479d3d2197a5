//! The device: queues, groups, engines, and what is due when.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::batch::{Batch, Next};
use super::queue::{Entry, Queue};
use super::random::Random;
use super::script::{Active, Fate, Script, fate};
use super::{
    Came, Completed, Done, Job, Nanos, Payload, Posting, Step, Submitted, Task, Timed, Timing, Write, Writing, Written,
};
use crate::config::{ConfigError, DeviceConfig, Kind, Mode, QueueConfig};
use crate::ops::{self, Limits, Outcome, Record, Target};
use crate::table::dsa::{self, code};
use crate::table::status;

/// What a device has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    /// Descriptors executed, members of batches included, batches and drains not.
    pub descriptors: u64,
    /// Batches.
    pub batches: u64,
    /// Bytes that decided how long it took.
    pub bytes: u64,
    /// Descriptors that a page fault ended.
    pub faults: u64,
    /// Page requests made.
    pub page_requests: u64,
    /// Time that they took, by the timing, ns.
    pub page_request_ns: u64,
    /// The longest of them, ns.
    pub longest_page_request_ns: u64,
    /// Submissions told to retry.
    pub retries: u64,
    /// Descriptors lost because a dedicated queue was full.
    pub overflows: u64,
    /// Errors reported in the software error register, those lost for want of room included.
    pub software_errors: u64,
    /// Completion records that the kernel has copied from the event log.
    pub event_log_records: u64,
    /// Completion records that nobody will ever see.
    pub lost_records: u64,
    /// Time that engines were occupied, by the timing, ns.
    pub engine_ns: u64,
}

/// The software error register: the first error, until it is cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftwareError {
    /// Status code or software error code.
    pub code: u8,
    /// Index of the queue.
    pub queue: usize,
    /// Operation of the descriptor.
    pub operation: u8,
    /// Others came after it.
    pub overflow: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Enabled,
    Halted,
}

#[derive(Debug, Default)]
struct Engine {
    group: usize,
    /// Given out, or occupied, or hung.
    busy: bool,
    /// The batch whose members it executes.
    batch: Option<u64>,
}

/// What a descriptor belongs to.
#[derive(Clone, Copy, Debug)]
enum Owner {
    Entry { queue: usize, sequence: u64 },
    Member { batch: u64 },
}

#[derive(Debug)]
struct Running {
    owner: Owner,
    queue: usize,
    operation: u8,
    started: Nanos,
    fate: Fate,
    batch: Option<u64>,
}

#[derive(Debug)]
enum Event {
    Ready(usize),
    Record(Pending),
    Data { address: u64, bytes: Vec<u8> },
    Timed { queue: usize, sequence: u64, tag: u64, started: Nanos },
}

/// A record on its way.
#[derive(Debug)]
struct Pending {
    owner: Owner,
    queue: usize,
    operation: u8,
    record: Record,
    target: Target,
    dropped: bool,
    kernel: bool,
}

/// One device.
#[derive(Debug)]
pub struct Device {
    config: DeviceConfig,
    timing: Timing,
    /// Whether the timing decides when things happen, or only what is accounted.
    paced: bool,
    state: State,
    queues: Vec<Queue>,
    groups: Vec<Vec<usize>>,
    engines: Vec<Engine>,
    jobs: HashMap<u64, Running>,
    batches: HashMap<u64, Batch>,
    writes: HashMap<u64, Pending>,
    due: BinaryHeap<Reverse<(Nanos, u64, u64)>>,
    events: HashMap<u64, Event>,
    scripts: Vec<Active>,
    random: Random,
    time: Nanos,
    fabric_free_ps: u64,
    next_id: u64,
    accounts: Accounts,
    error: Option<SoftwareError>,
}

impl Device {
    /// Checks the configuration as the kernel and the *Enable Device* and *Enable WQ* commands do (5.1, 5.2).
    pub fn new(config: &DeviceConfig, seed: u64, paced: bool) -> Result<Device, ConfigError> {
        config.validate()?;
        let limits = |queue: &QueueConfig| Limits {
            kind: config.kind,
            version: config.version,
            max_transfer: queue.max_transfer_size,
            max_batch: u64::from(queue.max_batch_size),
            block_on_fault: queue.block_on_fault,
            // Page requests are part of the translation service.
            page_requests: config.page_requests && !queue.prs_disable && !queue.ats_disable,
            translation: !queue.ats_disable,
            overlapping_copy: config.overlapping_copy,
            batch_of_one: config.batch_of_one,
            cache_control: config.cache_control,
            destination_readback: config.destination_readback,
            pattern_granule: config.pattern_granule,
        };
        let queues: Vec<Queue> = config.queues.iter().map(|queue| Queue::new(queue.clone(), limits(queue))).collect();
        let engines: Vec<Engine> = (0..config.engines as usize)
            .map(|engine| Engine {
                group: config.engine_groups.get(engine).map_or(0, |&group| group as usize),
                ..Engine::default()
            })
            .collect();
        let count = engines.iter().map(|engine| engine.group + 1).max().unwrap_or(0);
        let groups = (0..count)
            .map(|group| (0..queues.len()).filter(|&queue| queues[queue].config.group_id as usize == group).collect())
            .collect();
        Ok(Device {
            timing: config.timing.clone().unwrap_or_else(|| Timing::of(config.kind)),
            config: config.clone(),
            paced,
            state: State::Enabled,
            queues,
            groups,
            engines,
            jobs: HashMap::new(),
            batches: HashMap::new(),
            writes: HashMap::new(),
            due: BinaryHeap::new(),
            events: HashMap::new(),
            scripts: Vec::new(),
            random: Random::new(seed),
            time: 0,
            fabric_free_ps: 0,
            next_id: 0,
            accounts: Accounts::default(),
            error: None,
        })
    }

    /// As it was configured.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Hands in what has reached the portal of a queue (5.3).
    pub fn submit(&mut self, queue: usize, posting: Posting, payload: Payload, now: Nanos) -> Submitted {
        let halted = self.state == State::Halted;
        let queue_state = &mut self.queues[queue];
        let dedicated = queue_state.config.mode == Mode::Dedicated;
        let wrong = dedicated != (posting == Posting::Posted);
        let full = queue_state.entries.len() >= queue_state.room();
        if !halted && queue_state.enabled && !wrong && !full {
            queue_state.push(payload, now);
            return Submitted::Accepted;
        }
        if posting == Posting::NonPosted {
            self.accounts.retries += 1;
            return Submitted::Retry;
        }
        if !halted && queue_state.enabled && dedicated && full {
            self.accounts.overflows += 1;
            let operation = match &payload {
                Payload::Descriptor(bytes) => dsa::OPERATION.get(&bytes[..]) as u8,
                Payload::Timed(_) => 0,
            };
            self.software_error(status::QUEUE_OVERFLOW, queue, operation);
        }
        Submitted::Dropped
    }

    /// What is to be done next, of all that is due by `now`.
    pub fn poll(&mut self, now: Nanos) -> Step {
        loop {
            // What comes in after the next event is not taken before it.
            let bound = self.due.peek().map_or(now, |&Reverse((at, _, _))| at.min(now)).max(self.time);
            if let Some(step) = self.dispatch(bound) {
                return step;
            }
            match self.due.peek() {
                Some(&Reverse((at, _, id))) if at <= now => {
                    self.due.pop();
                    self.time = self.time.max(at);
                    let Some(event) = self.events.remove(&id) else { continue };
                    if let Some(step) = self.happen(id, event) {
                        return step;
                    }
                }
                next => {
                    let next = next.map(|&Reverse((at, _, _))| at);
                    self.time = self.time.max(now);
                    // An engine that was free all the time may have something that has come in since.
                    return self.dispatch(now).unwrap_or(Step::Idle { next });
                }
            }
        }
    }

    /// When [`Device::poll`] will have something to do, if nothing is submitted.
    pub fn next_event(&self) -> Option<Nanos> {
        let due = self.due.peek().map(|&Reverse((at, _, _))| at);
        if self.state == State::Halted {
            return due;
        }
        let arrived = |engine: &Engine| {
            let fronts = self.groups[engine.group].iter().filter_map(|&queue| self.queues[queue].entries.front());
            fronts.map(|entry| entry.arrived.max(self.time)).min()
        };
        let ready = self.engines.iter().filter(|engine| !engine.busy).filter_map(|engine| match engine.batch {
            Some(batch) => self.batches.get(&batch).filter(|batch| batch.can_go_on()).map(|_| self.time),
            None => arrived(engine),
        });
        ready.chain(due).min()
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn at(&mut self, at: Nanos, event: Event) {
        let id = self.id();
        let order = if self.config.reorder && matches!(event, Event::Record(_)) { self.random.next() } else { id };
        self.due.push(Reverse((at, order, id)));
        self.events.insert(id, event);
    }

    /// Gives free engines something to do.
    fn dispatch(&mut self, now: Nanos) -> Option<Step> {
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

    /// The queue of the engine's group whose turn it is. Each turn of a queue costs it the inverse of its priority, so
    /// that none starves (WQ Priority, 9.2.24).
    fn choose(&mut self, engine: usize, now: Nanos) -> Option<usize> {
        let group = self.engines[engine].group;
        let ready = |queue: &Queue| queue.entries.front().is_some_and(|entry| entry.arrived <= now);
        let candidates = self.groups[group].iter().copied().filter(|&queue| ready(&self.queues[queue]));
        let chosen = candidates.min_by_key(|&queue| (self.queues[queue].turns, queue))?;
        let turns = self.queues[chosen].turns;
        for &queue in &self.groups[group] {
            // Whoever had nothing to do does not save up turns.
            let other = &mut self.queues[queue];
            other.turns = other.turns.max(turns);
        }
        self.queues[chosen].turns = turns + 720_720 / u64::from(self.queues[chosen].config.priority.max(1));
        Some(chosen)
    }

    /// Starts what comes out of a queue. None if no work is to be done outside.
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
        if self.ill_fated(&fate) {
            return None;
        }
        let id = self.id();
        self.jobs.insert(id, Running { owner, queue, operation, started, fate, batch: Some(batch) });
        Some(Job { id, engine, task })
    }

    /// Hangs or halts. True if there is nothing to execute.
    fn ill_fated(&mut self, fate: &Fate) -> bool {
        if fate.halt {
            self.halt();
        }
        fate.halt || fate.hang
    }

    fn job(&mut self, engine: usize, running: Running, bytes: Box<[u8; 64]>, in_batch: bool) -> Option<Job> {
        self.engines[engine].busy = true;
        if self.ill_fated(&running.fate) {
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

    /// The next member of the batch that an engine is at. Without one the engine may have been released.
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

    /// Reports what came of a job.
    pub fn finish(&mut self, done: Done) {
        // A reset in the meantime has forgotten it.
        let Some(running) = self.jobs.remove(&done.id) else { return };
        match done.came {
            Came::Descriptor(outcome) => self.executed(done.engine, running, *outcome),
            Came::List { descriptors, fault, page_requests } => {
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

    /// Occupies an engine from `started`; returns when it is free. `setup` and the bytes are in its own time, and the
    /// bytes share the device's rate.
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
            // Slow is slow even where nothing else is timed.
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

    fn latency(&mut self) -> Nanos {
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
        // Scripts may say "never" by a delay without end.
        let visible = free.saturating_add(self.latency()).saturating_add(fate.late);
        let data_at = visible.saturating_add(fate.late_data.unwrap_or(0));
        for (address, bytes) in outcome.late {
            self.at(data_at, Event::Data { address, bytes });
        }
        // The record is behind the data unless the script wants it before.
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

    /// An event is due. Some if the owner has to do something.
    fn happen(&mut self, id: u64, event: Event) -> Option<Step> {
        match event {
            Event::Ready(engine) => {
                self.engines[engine].busy = false;
                None
            }
            Event::Data { address, bytes } => Some(Step::Write(Write { id, what: Writing::Data { address, bytes } })),
            Event::Timed { queue, sequence, tag, started } => {
                self.complete(queue, sequence);
                Some(Step::Completed(Completed { tag, queue, at: self.time, started }))
            }
            Event::Record(pending) => {
                if pending.dropped {
                    self.accounts.lost_records += 1;
                    self.concluded(&pending);
                    return None;
                }
                match pending.target {
                    Target::Nowhere => {
                        self.concluded(&pending);
                        None
                    }
                    Target::SoftwareError => {
                        self.software_error(pending.record.status() & 0x3f, pending.queue, pending.operation);
                        self.concluded(&pending);
                        None
                    }
                    Target::Address(address) => {
                        let what = Writing::Record {
                            address,
                            record: pending.record,
                            page_requests: self.queues[pending.queue].limits.page_requests,
                            kernel: pending.kernel,
                        };
                        self.writes.insert(id, pending);
                        Some(Step::Write(Write { id, what }))
                    }
                }
            }
        }
    }

    /// Reports what came of a write.
    pub fn written(&mut self, write: &Write, came: Written) {
        let Some(mut pending) = self.writes.remove(&write.id) else { return };
        if came != Written::Done && let Owner::Member { batch } = pending.owner
            // 8.3.2: though the fault was resolved, hardware may indicate a possible error.
            && (came == Written::Faulted || self.random.below(2) == 0)
            && let Some(batch) = self.batches.get_mut(&batch)
        {
            batch.doubt();
        }
        match came {
            Written::Done | Written::Requested => {
                self.accounts.page_requests += u64::from(came == Written::Requested && !pending.kernel);
                self.accounts.event_log_records += u64::from(pending.kernel);
            }
            // 3.13.1: without translation service nobody learns of a write that faults, be it a record.
            Written::Faulted if !self.queues[pending.queue].limits.translation => self.accounts.lost_records += 1,
            Written::Faulted if self.config.event_log && !pending.kernel => {
                // 3.13.3: the event log has the record; the kernel copies it when it has handled the fault. The
                // descriptor counts as complete for the device.
                self.concluded(&pending);
                pending.kernel = true;
                let at = self.time + self.timing.event_log_ns;
                self.at(at, Event::Record(pending));
                return;
            }
            Written::Faulted => {
                self.accounts.lost_records += 1;
                self.software_error(status::RECORD_FAULT, pending.queue, pending.operation);
            }
        }
        if !pending.kernel {
            self.concluded(&pending);
        }
    }

    /// A record is visible, or will never be: what waited for it goes on.
    fn concluded(&mut self, pending: &Pending) {
        if pending.kernel {
            return;
        }
        match pending.owner {
            Owner::Entry { queue, sequence } => self.complete(queue, sequence),
            Owner::Member { batch } => {
                if let Some(state) = self.batches.get_mut(&batch) {
                    state.pending -= 1;
                    self.batch_over(batch);
                }
            }
        }
    }

    /// Writes a batch's record if all of it is over and no engine is at it any more.
    fn batch_over(&mut self, id: u64) {
        let held = self.engines.iter().any(|engine| engine.batch == Some(id));
        if held || !self.batches.get(&id).is_some_and(Batch::is_over) {
            return;
        }
        let batch = self.batches.remove(&id).expect("it was there");
        let record = batch.record(self.config.version);
        let target = ops::target(&batch.descriptor, record.status());
        let owner = Owner::Entry { queue: batch.queue, sequence: batch.sequence };
        let at = self.time.saturating_add(self.latency()).saturating_add(batch.late);
        let pending = Pending {
            owner,
            queue: batch.queue,
            operation: code::BATCH,
            record,
            target,
            dropped: batch.dropped,
            kernel: false,
        };
        self.at(at, Event::Record(pending));
    }

    fn complete(&mut self, queue: usize, sequence: u64) {
        for drain in self.queues[queue].complete(sequence) {
            self.drained(queue, &drain);
        }
    }

    /// A drain has nothing more to wait for.
    fn drained(&mut self, queue: usize, entry: &Entry) {
        let Payload::Descriptor(bytes) = &entry.payload else { return };
        let pending = Pending {
            owner: Owner::Entry { queue, sequence: entry.sequence },
            queue,
            operation: code::DRAIN,
            record: Record::new(self.config.kind, status::SUCCESS),
            target: ops::target(bytes, status::SUCCESS),
            dropped: false,
            kernel: false,
        };
        let at = self.time + self.latency();
        self.at(at, Event::Record(pending));
    }

    fn software_error(&mut self, code: u8, queue: usize, operation: u8) {
        self.accounts.software_errors += 1;
        match &mut self.error {
            Some(first) => first.overflow = true,
            None => self.error = Some(SoftwareError { code, queue, operation, overflow: false }),
        }
    }

    /// Takes the software error register's content, which makes room for the next.
    pub fn take_software_error(&mut self) -> Option<SoftwareError> {
        self.error.take()
    }

    /// Everything in it is gone; `ENQCMD` is told to retry; only a reset helps (5.7).
    pub fn halt(&mut self) {
        self.forget();
        self.state = State::Halted;
    }

    /// Everything in it is gone; its queues are disabled (*Reset Device*).
    pub fn reset(&mut self) {
        self.forget();
        self.state = State::Enabled;
        self.error = None;
        for queue in &mut self.queues {
            queue.enabled = false;
        }
    }

    fn forget(&mut self) {
        for queue in &mut self.queues {
            queue.clear();
        }
        for engine in &mut self.engines {
            engine.busy = false;
            engine.batch = None;
        }
        self.jobs.clear();
        self.batches.clear();
        self.writes.clear();
        self.due.clear();
        self.events.clear();
        self.fabric_free_ps = 0;
    }

    /// Whether it is in the halt state.
    pub fn is_halted(&self) -> bool {
        self.state == State::Halted
    }

    /// *Enable WQ* and *Disable WQ*: a disabled queue takes nothing, what is in it is completed.
    pub fn enable(&mut self, queue: usize, enabled: bool) {
        self.queues[queue].enabled = enabled;
    }

    /// Whether a queue takes descriptors.
    pub fn is_enabled(&self, queue: usize) -> bool {
        self.queues[queue].enabled && self.state == State::Enabled
    }

    /// Event log on or off.
    pub fn set_event_log(&mut self, on: bool) {
        self.config.event_log = on;
    }

    /// Adds something that goes wrong.
    pub fn add_script(&mut self, script: Script) {
        if script.device.as_deref().is_none_or(|only| only == self.config.name) {
            self.scripts.push(Active::new(script));
        }
    }

    /// Nothing goes wrong any more.
    pub fn clear_scripts(&mut self) {
        self.scripts.clear();
    }

    /// Entries of a queue that are in use.
    pub fn occupancy(&self, queue: usize) -> usize {
        self.queues[queue].entries.len()
    }

    /// What a queue has accepted and not completed.
    pub fn in_flight(&self, queue: usize) -> usize {
        self.queues[queue].outstanding.len()
    }

    /// What it has done.
    pub fn accounts(&self) -> Accounts {
        self.accounts
    }
}
