//! The device: its parts, submissions to it, its schedule of events, and an administrator's actions.

mod engines;
mod records;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::batch::Batch;
use super::queue::Queue;
use super::random::Random;
use super::script::{Active, Fate};
use super::{Completed, Nanos, Payload, Posting, Step, Submitted, Write, Writing};
use crate::config::{ConfigError, DeviceConfig, Mode, QueueConfig, Script, Timing};
use crate::ops::{Limits, Record, Target};
use crate::table::dsa;
use crate::table::status;

/// Counters of a device's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    /// Descriptors executed, members of batches included, batches and drains not.
    pub descriptors: u64,
    /// Batches.
    pub batches: u64,
    /// Bytes that determined the duration.
    pub bytes: u64,
    /// Descriptors that ended with a page fault.
    pub faults: u64,
    /// Page requests made.
    pub page_requests: u64,
    /// Their total time, by the timing, ns.
    pub page_request_ns: u64,
    /// The longest of them, ns.
    pub longest_page_request_ns: u64,
    /// Submissions that got the result retry.
    pub retries: u64,
    /// Descriptors lost because a dedicated queue was full.
    pub overflows: u64,
    /// Errors reported in the software error register, including those lost because it was full.
    pub software_errors: u64,
    /// Completion records that the kernel has copied from the event log.
    pub event_log_records: u64,
    /// Completion records that were never written.
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
    /// Whether later errors were lost.
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
    /// Whether the engine has a job, is occupied, or hangs.
    busy: bool,
    /// The batch whose members the engine executes.
    batch: Option<u64>,
}

/// The owner of a descriptor.
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

/// A record that is not written yet.
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
    /// Whether the timing determines when events happen, or only the accounts.
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

    /// Returns the device's configuration.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Submits a descriptor that has reached the portal of a queue (5.3).
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

    /// Returns the next action among those due by `now`.
    pub fn poll(&mut self, now: Nanos) -> Step {
        loop {
            // A submission after the next event is not handled before that event.
            let bound = self.due.peek().map_or(now, |&Reverse((at, _, _))| at.min(now)).max(self.time);
            if let Some(step) = self.dispatch(bound) {
                return step;
            }
            match self.due.peek() {
                Some(&Reverse((at, _, id))) if at <= now => {
                    self.due.pop();
                    self.time = self.time.max(at);
                    let Some(event) = self.events.remove(&id) else { continue };
                    if let Some(step) = self.handle_event(id, event) {
                        return step;
                    }
                }
                next => {
                    let next = next.map(|&Reverse((at, _, _))| at);
                    self.time = self.time.max(now);
                    // An idle engine may have received work since.
                    return self.dispatch(now).unwrap_or(Step::Idle { next });
                }
            }
        }
    }

    /// Returns when [`Device::poll`] will have something to do, if nothing is submitted.
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

    /// Handles an event. Returns a step if the owner has to act.
    fn handle_event(&mut self, id: u64, event: Event) -> Option<Step> {
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
            Event::Record(pending) => self.record_due(id, pending),
        }
    }

    fn software_error(&mut self, code: u8, queue: usize, operation: u8) {
        self.accounts.software_errors += 1;
        match &mut self.error {
            Some(first) => first.overflow = true,
            None => self.error = Some(SoftwareError { code, queue, operation, overflow: false }),
        }
    }

    /// Reads and clears the software error register, which makes room for the next error.
    pub fn take_software_error(&mut self) -> Option<SoftwareError> {
        self.error.take()
    }

    /// Halts the device: its content is lost, and `ENQCMD` returns retry until a reset (5.7).
    pub fn halt(&mut self) {
        self.forget();
        self.state = State::Halted;
    }

    /// Resets the device: its content is lost, and its queues are disabled (*Reset Device*).
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

    /// Performs *Enable WQ* or *Disable WQ*. A disabled queue accepts nothing; the descriptors in it are completed.
    pub fn enable(&mut self, queue: usize, enabled: bool) {
        self.queues[queue].enabled = enabled;
    }

    /// Returns whether a queue accepts descriptors.
    pub fn is_enabled(&self, queue: usize) -> bool {
        self.queues[queue].enabled && self.state == State::Enabled
    }

    /// Switches the event log on or off.
    pub fn set_event_log(&mut self, on: bool) {
        self.config.event_log = on;
    }

    /// Adds a fault.
    pub fn add_script(&mut self, script: Script) {
        if script.device.as_deref().is_none_or(|only| only == self.config.name) {
            self.scripts.push(Active::new(script));
        }
    }

    /// Removes all faults.
    pub fn clear_scripts(&mut self) {
        self.scripts.clear();
    }

    /// Returns how many entries of a queue are in use.
    pub fn occupancy(&self, queue: usize) -> usize {
        self.queues[queue].entries.len()
    }

    /// Returns how many descriptors a queue has accepted and not completed.
    pub fn in_flight(&self, queue: usize) -> usize {
        self.queues[queue].outstanding.len()
    }

    /// Returns the device's counters.
    pub fn accounts(&self) -> Accounts {
        self.accounts
    }
}
